"""The whole step as one flat graph: its memory, and what is computed twice to save some."""

from funcrl.graph.fences import add_fences
from funcrl.graph.liveness import Storages, find_storages, live_bytes, predict_peak
from funcrl.graph.phases import descendants, find_layers, find_seeds, has_flops, late_nodes
from funcrl.graph.remat import recomputed_cost, remat

__all__ = [
    "Storages",
    "add_fences",
    "descendants",
    "find_layers",
    "find_seeds",
    "find_storages",
    "has_flops",
    "late_nodes",
    "live_bytes",
    "predict_peak",
    "recomputed_cost",
    "remat",
]
