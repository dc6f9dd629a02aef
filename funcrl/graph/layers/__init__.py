"""Which layer a node belongs to, and a graph cut into pieces that repeat."""
