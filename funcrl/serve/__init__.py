"""A model behind a local address: what OpenAI's clients ask for, and what Tinker's do."""
