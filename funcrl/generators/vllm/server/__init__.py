"""vLLM as processes of their own: starting them, asking them, sending them parameters."""
