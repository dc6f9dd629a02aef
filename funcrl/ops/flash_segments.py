"""Attention of packed rows by kernels that never hold [T, T] scores.

They are those of exact numerics, which skip what a segment does not see. On an H200 their time for
samples in rows of their own was between cuDNN's and that of torch's flash kernels
(docs/benchmarks.md), neither of which knows of a prefix that samples share.
"""

import torch
from torch import Tensor

from funcrl.core import checks
from funcrl.core.arguments import Count, checked
from funcrl.core.types import Absent
from funcrl.ops.contract import AttendFn
from funcrl.ops.exact import attention


@checked
def attend_flash_segments(segment_ids: Tensor, prefix_ids: Tensor | Absent = ()) -> AttendFn:
    """Return what `attend_segments` returns, up to rounding, in time and memory of what is seen.

    One kernel forward and a few backward, for a whole batch under `vmap` too, in a fixed order of
    sums. The function has a first derivative only.

    Args:
        segment_ids: [T], equal for the tokens of one sample, -1 on padding; tokens of one number
            are neighbours, as `pack` and `pack_groups` lay them, and numbers are below T.
        prefix_ids: [T], the segment of which each token sees all tokens too, -1 for none; none has
            one when left out.

    Example:
        >>> import torch, funcrl
        >>> ids = torch.tensor([0, 1, 1]), torch.tensor([-1, 0, 0])
        >>> zero, v = torch.zeros(1, 3, 1), torch.tensor([[[1.0], [3.0], [8.0]]])
        >>> funcrl.ops.attend_flash_segments(*ids)(zero, zero, v).squeeze(-1)
        tensor([[1., 2., 4.]])
    """
    checks.check_rank("attend_flash_segments", "segment_ids", segment_ids, "T")
    checks.check_dtype("attend_flash_segments", "segment_ids", segment_ids, torch.int64)
    if not isinstance(prefix_ids, tuple):
        name, shape = "prefix_ids", segment_ids.shape
        checks.check_shape("attend_flash_segments", name, prefix_ids, "segment_ids", shape)
        checks.check_dtype("attend_flash_segments", name, prefix_ids, torch.int64)
    attend_rows = attention.attend_segments(segment_ids, prefix_ids)

    @checked
    def attend(q: Tensor, k: Tensor, v: Tensor, window: Count | None = None) -> Tensor:
        for name, part in (("q", q), ("k", k), ("v", v)):
            if part.ndim < 3 or part.shape[-2] != segment_ids.shape[0]:
                raise ValueError(
                    f"attend_flash_segments expects {name} [..., heads, T, C] of T = "
                    f"{segment_ids.shape[0]}, got {list(part.shape)}."
                )
        return attend_rows(q, k, v, window)

    return attend
