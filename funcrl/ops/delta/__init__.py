"""What a gated delta layer computes with: its scan, its short convolution, and its gates."""

from funcrl.ops.delta.scan import delta_gates, gated_delta_scan, short_conv

__all__ = ["delta_gates", "gated_delta_scan", "short_conv"]
