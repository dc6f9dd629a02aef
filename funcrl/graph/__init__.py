"""The whole step as one flat graph: its memory, and what is computed twice to save some."""

from funcrl.graph.liveness import Storages, find_storages, live_bytes, predict_peak
from funcrl.graph.remat import recomputed_cost, remat

__all__ = [
    "Storages",
    "find_storages",
    "live_bytes",
    "predict_peak",
    "recomputed_cost",
    "remat",
]
