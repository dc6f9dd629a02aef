"""Time and memory of funcrl's parts, each beside another way to do the same."""
