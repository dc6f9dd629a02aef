"""What runs inside vLLM: funcrl's network there, and where parameters arrive."""
