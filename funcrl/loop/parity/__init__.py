"""Whether generator and trainer, each in all of its ways, compute the same log-probabilities."""

from funcrl.loop.parity.comparison import compare, parity
from funcrl.loop.parity.results import Parity, ParityConfig, ParityRow, format_parity

__all__ = ["Parity", "ParityConfig", "ParityRow", "compare", "format_parity", "parity"]
