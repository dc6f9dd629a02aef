"""Recurrent networks over whole sequences, which can compute again instead of keeping."""

from funcrl.ops.recurrent.contract import Cell, Precision
from funcrl.ops.recurrent.scan import Backend, Recompute, gru_scan, lstm_scan

__all__ = ["Backend", "Cell", "Precision", "Recompute", "gru_scan", "lstm_scan"]
