"""A run on disk and on the screen: its files, checkpoints, views, trackers and report."""
