"""The vocabulary of all other folders: types, trees, checks, numerics, seeds, rows and files."""
