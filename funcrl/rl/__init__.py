"""The mathematics of a step: rewards to advantages, losses, gradients, the update."""
