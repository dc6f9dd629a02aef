"""Writes a page about a run, or one that compares several."""

from funcrl.run.report.page import to_frame, write_comparison, write_report

__all__ = ["to_frame", "write_comparison", "write_report"]
