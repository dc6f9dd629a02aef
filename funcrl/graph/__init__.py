"""The graph: a whole step as one flat program, passes that rewrite it, and its compilation."""

from funcrl.graph.fuse import fuse_per_sample
from funcrl.graph.tracing import trace

__all__ = ["fuse_per_sample", "trace"]
