"""Tasks from rows of data: a file of JSON lines, CSV or parquet, or a data set in memory."""
