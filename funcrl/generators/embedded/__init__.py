"""The embedded sampler: a model of funcrl on a cache of keys and values, in this process."""
