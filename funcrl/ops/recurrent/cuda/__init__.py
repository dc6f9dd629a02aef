"""Recurrent scans on a GPU, by Triton."""
