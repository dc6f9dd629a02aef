"""Random programs for the tests of the graph: functions that write in place, and small policies.

Both are made from a seed alone. A program draws its statements anew at each call, always the same
ones, so that it can be run, traced and compiled.
"""

from random import Random

import torch
from torch import Tensor

import funcrl

LENGTH, VOCABULARY = 5, 11

# -- functions of two tensors that write into what they have made ---------------------------------


def places(value: Tensor) -> int:
    """How many elements of the memory a tensor looks at: fewer than its own if some are shared."""
    found = {0}
    for size, stride in zip(value.shape, value.stride(), strict=True):
        found = {place + stride * index for place in found for index in range(size)}
    return len(found)


def views(value: Tensor) -> dict:
    """The views that can be taken of a tensor, by name."""
    found = {
        "alias": lambda: value.view(value.shape),
        "unsqueeze": lambda: value.unsqueeze(0),
        "transposed": lambda: value.swapaxes(0, -1),
    }
    if value.is_complex():
        return found | {"pairs": lambda: torch.view_as_real(value), "real": lambda: value.real}
    if not value.is_floating_point():
        return found
    if value.ndim and value.shape[0] > 1:
        rows = value.shape[0]
        found |= {
            "slice": lambda: value[1:],
            "last": lambda: value[-1],
            "every other": lambda: value[::2],
            "unbind": lambda: value.unbind(0)[rows // 2],
            "split": lambda: value.split(1)[0],
            "chunk": lambda: value.chunk(2)[1],
            "unfold": lambda: value.unfold(0, 2, 1),
            "narrow": lambda: value.narrow(0, 0, rows - 1),
            "columns": lambda: value[..., :1],
        }
    if value.ndim > 1:
        found |= {
            "diagonal": lambda: value.diagonal(),
            "permuted": lambda: value.permute(*reversed(range(value.ndim))),
        }
    if value.is_contiguous() and value.numel() > 3:
        found |= {
            "flat": lambda: value.view(-1),
            "strided": lambda: value.as_strided((2, 2), (2, 1), value.storage_offset()),
            "strided behind": lambda: value.as_strided((2, 2), (2, 1), value.storage_offset() + 1),
        }
    if value.is_contiguous() and value.dtype == torch.float64 and value.ndim:
        found["bits"] = lambda: value.view(torch.int64)
        if value.shape[-1] % 2 == 0 and value.storage_offset() % 2 == 0:
            pairs = (*value.shape[:-1], value.shape[-1] // 2, 2)
            found["complex"] = lambda: torch.view_as_complex(value.view(pairs))
    return found


def writes(value: Tensor, x: Tensor, draw: Random) -> dict:
    """The ways to write into a tensor, by name; `x` is another, of float64, to write from."""
    if value.is_complex():
        return {"mul_": lambda: value.mul_(0.5j), "add_": lambda: value.add_(x[0, 0])}
    if not value.is_floating_point():
        return {"xor": lambda: value.bitwise_xor_(1)}
    other = x.sum().to(draw.choice([torch.float64, torch.float32, torch.bfloat16]))
    found = {
        "add_": lambda: value.add_(other),
        "mul_ by bits": lambda: value.mul_(x[0, 1] > 0),
        "sub_": lambda: value.sub_(x.mean(), alpha=2),
        "pow_": lambda: value.pow_(2).clamp_(max=9),
        "pow_ of tensors": lambda: value.abs_().add_(1).clamp_(max=3).pow_(x[0, 0].abs()),
        "copy_": lambda: value.copy_(x[1, 1]),
        "gt_": lambda: value.gt_(0.1),
        "logical_not_": lambda: value.logical_not_(),
        "masked_fill_": lambda: value.masked_fill_(value > 0.3, 0.25),
        "fill_": lambda: value.fill_(0.5),
        "foreach": lambda: torch._foreach_mul_([value], 0.5),
        "out": lambda: torch.mul(value.clone(), 3, out=value),
        "lerp_": lambda: value.lerp_(torch.ones_like(value), 0.25),
    }
    if value.ndim:
        index = torch.tensor([0, -1])
        found |= {
            "index_put_": lambda: value.index_put_((index,), value[index] + 1),
            "setitem": lambda: value.__setitem__(-1, x[2, 2]),
            "cumsum_": lambda: value.cumsum_(0),
        }
    return found


def program(seed: int):
    """Return a function of two float64 tensors [4, 6] that takes views and writes, at random."""

    def run(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        draw = Random(seed)
        dtype = draw.choice([torch.float64, torch.float64, torch.float32, torch.bfloat16])
        values = [x.to(dtype) * 2, (y + 1).t().to(dtype) + 1, x.sum()]
        if draw.random() < 0.2:
            values.append(x)  # an argument is written into as well
        for _ in range(draw.randint(3, 9)):
            value = draw.choice(values)
            if draw.random() < 0.5:
                found = views(value)
                values.append(found[draw.choice(sorted(found))]())
            elif places(value) == value.numel():
                found = writes(value, y, draw)
                found[draw.choice(sorted(found))]()
        returned = draw.sample(values, draw.randint(1, len(values)))
        return tuple(value.clone() for value in returned)

    return run


# -- policies -------------------------------------------------------------------------------------


def policy(seed: int, mixed: bool):
    """Return a `model_fn` and its parameters, put together at random.

    Args:
        seed: says which parts it has.
        mixed: some parameters are float32 and bfloat16, and not all float64.
    """
    draw = Random(seed)
    generator = torch.Generator().manual_seed(seed)
    width = draw.choice([4, 8])

    def leaf(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        return (torch.randn(shape, generator=generator, dtype=torch.float64) * 0.4).to(dtype)

    narrow = draw.choice([torch.float32, torch.bfloat16]) if mixed else torch.float64
    params = {"embed": leaf(VOCABULARY, width), "out": leaf(width, VOCABULARY)}
    parts = draw.sample(sorted(_PARTS), draw.randint(2, 4))
    for part in parts:
        params |= {
            f"{part}.{name}": leaf(*shape, dtype=narrow)
            for name, shape in _PARTS[part][0](width).items()
        }

    def model_fn(params: dict, sample) -> funcrl.TokenScores:
        hidden = params["embed"][sample.tokens]
        for part in parts:
            own = {name: params[f"{part}.{name}"] for name in _PARTS[part][0](width)}
            hidden = _PARTS[part][1](own, sample, hidden)
        return funcrl.token_scores(
            torch.tanh(hidden.to(torch.float64)) @ params["out"], sample.tokens
        )

    return model_fn, params


def _previous(p, sample, hidden):
    """The token before, -1 where there is none: the table's last row."""
    before = torch.cat([torch.full((1,), -1), sample.tokens[:-1]])
    return hidden + p["table"][before]


def _from_the_end(p, sample, hidden):
    return hidden + p["table"][sample.positions - LENGTH]


def _constant_rows(p, sample, hidden):
    return hidden + p["table"][torch.arange(LENGTH)]


def _few_rows(p, sample, hidden):
    return hidden + p["table"][torch.tensor([0, -1, 0, 2, -1])]


def _scaled(p, sample, hidden):
    return (hidden.T * p["scale"]).T * p["gate"]


def _in_place(p, sample, hidden):
    h = hidden.clone()
    h.add_(p["bias"])
    h.mul_(0.5).pow_(2)
    return hidden + h


def _narrow_sum(p, sample, hidden):
    """A sum in a narrow dtype that takes in wider numbers."""
    h = p["table"][sample.tokens].clone()
    h.add_(hidden)
    h.copy_(h > -1)
    return hidden + p["table"][sample.tokens] * h


def _rotated(p, sample, hidden):
    rates = p["rates"].to(torch.float64).abs()
    angles = sample.positions[:, None] * rates
    h = hidden.clone()
    pairs = torch.view_as_complex(h.view(LENGTH, -1, 2))
    pairs.mul_(torch.polar(torch.ones_like(angles), angles))
    return h + hidden


def _window(p, sample, hidden):
    """A causal convolution over a buffer that is filled after its windows were taken."""
    buffer = torch.nn.functional.pad(hidden, (0, 0, 1, 0)) * 0
    windows = buffer.unfold(0, 2, 1)
    buffer[1:].copy_(hidden)
    return (windows * p["taps"]).sum(-1)


def _linear(p, sample, hidden):
    return hidden + torch.nn.functional.linear(hidden.to(p["weight"].dtype), p["weight"], p["bias"])


_PARTS = {
    "previous": (lambda width: {"table": (VOCABULARY + 1, width)}, _previous),
    "from the end": (lambda width: {"table": (LENGTH + 2, width)}, _from_the_end),
    "constant rows": (lambda width: {"table": (LENGTH + 3, width)}, _constant_rows),
    "few rows": (lambda width: {"table": (4, width)}, _few_rows),
    "scaled": (lambda width: {"scale": (width, 1), "gate": ()}, _scaled),
    "in place": (lambda width: {"bias": (width,)}, _in_place),
    "narrow sum": (lambda width: {"table": (VOCABULARY, width)}, _narrow_sum),
    "rotated": (lambda width: {"rates": (width // 2,)}, _rotated),
    "window": (lambda width: {"taps": (2,)}, _window),
    "linear": (lambda width: {"weight": (width, width), "bias": (width,)}, _linear),
}
