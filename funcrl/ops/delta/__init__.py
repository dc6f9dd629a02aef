"""What a gated delta layer computes with: its scan, its short convolution, and its gates."""

from funcrl.ops.delta.gates import delta_gates, short_conv
from funcrl.ops.delta.scan import gated_delta_scan

__all__ = ["delta_gates", "gated_delta_scan", "short_conv"]
