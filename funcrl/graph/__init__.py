"""The graph: a whole step as one flat program, passes that rewrite it, and its compilation."""

from funcrl.graph.compilation import compile_step
from funcrl.graph.donation import donate
from funcrl.graph.fuse import fuse_per_sample
from funcrl.graph.tracing import trace

__all__ = ["compile_step", "donate", "fuse_per_sample", "trace"]
