"""Inputs of recurrent scans, and what their tests share."""

import torch

from funcrl import tree
from funcrl.ops import gru_scan, lstm_scan

SCANS = {"lstm": lstm_scan, "gru": gru_scan}
MODULES = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU}
CELLS = ["lstm", "gru"]
BACKENDS = ["loop", "op"]
WIDTH_IN, WIDTH = 5, 8


def case(cell, lead=(), length=7, *, layers=1, bias=True, dtype=torch.float64, device="cpu"):
    """Return x, parameters, a state, resets, and the weights of a loss."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape, scale=1.0):
        return scale * torch.randn(shape, generator=generator, dtype=torch.float64)

    rows = {"lstm": 4, "gru": 3}[cell] * WIDTH
    params = {}
    for n in range(layers):
        width_in = WIDTH if n else WIDTH_IN
        params[f"weight_ih_l{n}"] = randn(rows, width_in, scale=width_in**-0.5)
        params[f"weight_hh_l{n}"] = randn(rows, WIDTH, scale=WIDTH**-0.5)
        if bias:
            params |= {f"bias_ih_l{n}": randn(rows), f"bias_hh_l{n}": randn(rows)}
    h, c = randn(*lead, layers, WIDTH), randn(*lead, layers, WIDTH)
    state = (h, c) if cell == "lstm" else h
    x, weights = randn(*lead, length, WIDTH_IN), randn(*lead, length, WIDTH)
    resets = torch.rand(*lead, length, generator=generator) < 0.2
    params = dict(sorted(params.items()))  # as funcrl's are
    x, params, state, weights = tree.cast((x, params, state, weights), dtype)
    return tree.map(lambda each: each.to(device), (x, params, state, resets, weights))


def loss_of(cell, **options):
    """Return a loss of (x, parameters, state, resets, weights) that reads every result."""

    def loss(x, params, state, resets, weights):
        outputs, last = SCANS[cell](x, params, state, resets, **options)
        return (outputs * weights).sum() + sum(
            each.square().sum() * (1 + n) for n, each in enumerate(tree.leaves(last))
        )

    return loss


def close(mine, theirs, bound=1e-12):
    """Equal to `bound`, relative to the largest entry of a leaf where that is above 1."""
    for a, b in zip(tree.leaves(mine), tree.leaves(theirs), strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        largest = max([1.0, *b.detach().abs().flatten().tolist()])
        assert ((a - b).abs() <= bound * largest).all()
