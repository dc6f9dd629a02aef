"""A graph as a program: Inductor, CUDA graphs, and what keeps their order."""
