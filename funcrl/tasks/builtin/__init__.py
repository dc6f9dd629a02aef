"""The tasks that funcrl brings."""
