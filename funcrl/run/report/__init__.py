"""A run as a page: curves, completions, configuration, environment, timings; and runs compared."""

from funcrl.run.report.page import write_comparison, write_report

__all__ = ["write_comparison", "write_report"]
