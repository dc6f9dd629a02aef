"""Exact operations on a GPU, by Triton and cuBLAS: the twins of the functions above.

Plain functions of tensors, without autograd and without checks. A GPU older than Hopper may not
hold that tiles of different sizes have equal bits: `tests/ops/exact` compares them.
"""
