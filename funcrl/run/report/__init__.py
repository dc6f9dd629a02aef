"""Writes a page about a run, or one that compares several."""

from funcrl.run.report.page import write_comparison, write_report

__all__ = ["write_comparison", "write_report"]
