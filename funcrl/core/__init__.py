"""What everything else is written in: types, trees, checks, numbers, rows, files."""
