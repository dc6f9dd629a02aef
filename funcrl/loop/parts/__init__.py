"""From a configuration to the parts of a run, and the memory that they need."""
