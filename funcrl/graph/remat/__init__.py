"""Which values of the forward pass are kept and which are computed again, and the memory."""
