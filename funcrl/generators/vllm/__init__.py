"""vLLM as a generator, in this process or as servers: what the trainer's side holds."""
