"""The sampler as a captured program: static memory, a CUDA graph a token, prompts in between."""
