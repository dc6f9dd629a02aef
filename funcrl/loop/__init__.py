"""The steps of a run: build, generate, train, evaluate and export."""
