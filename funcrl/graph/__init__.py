"""The graph: a whole step as one flat program, passes that rewrite it, and its compilation."""

from funcrl.graph.compilation import compile_at_first, compile_step, step_graph
from funcrl.graph.donation import donate
from funcrl.graph.lowering import add_fences
from funcrl.graph.per_sample import fuse_per_sample
from funcrl.graph.regions import split_repeated
from funcrl.graph.remat import live_bytes, predict_peak, recomputed_cost, remat
from funcrl.graph.tracing import trace

__all__ = [
    "add_fences",
    "compile_at_first",
    "compile_step",
    "donate",
    "fuse_per_sample",
    "live_bytes",
    "predict_peak",
    "recomputed_cost",
    "remat",
    "split_repeated",
    "step_graph",
    "trace",
]
