"""Per-sample gradients at the price of a batch: their sums and norms without the gradients."""
