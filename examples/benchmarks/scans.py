"""The inputs of the benchmark of recurrent scans, and the ways to run one."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from funcrl.core.arguments import Count, Fraction, check_fields
from funcrl.core.types import Params
from funcrl.ops import gru_scan, lstm_scan
from funcrl.ops.recurrent import Cell, Precision, Recompute

Part: TypeAlias = Literal["forward", "gradient"]
Backend: TypeAlias = Literal["torch", "loop", "op", "exact", "triton", "cudnn"]

_SCANS: dict[Cell, Callable[..., Any]] = {"lstm": lstm_scan, "gru": gru_scan}
_MODULES: dict[Cell, Callable[..., nn.RNNBase]] = {"lstm": nn.LSTM, "gru": nn.GRU}


@dataclass(frozen=True)
class RecurrentBenchConfig:
    """Peak memory and time of lstm_scan and gru_scan with each backend and way to recompute, beside
    torch.nn.LSTM and GRU."""

    cells: tuple[Cell, ...] = ("lstm", "gru")
    """The recurrent networks."""
    backends: tuple[Backend, ...] = ("torch", "loop", "op", "triton", "cudnn")
    """What computes them: torch is torch.nn.LSTM or GRU (cuDNN's on a GPU), the others are
    backends of the scans. What a scan refuses is listed with its reason."""
    recomputes: tuple[Recompute, ...] = ("none", "chunk", "full")
    """What the backward pass of a scan computes again."""
    parts: tuple[Part, ...] = ("forward", "gradient")
    """forward: without a gradient, so that nothing is kept, whatever is recomputed; gradient:
    forward and backward, with the gradients of the input and of all parameters."""
    batch: Count = 64
    """The number of sequences."""
    steps: tuple[Count, ...] = (32,)
    """The numbers of steps of a sequence, each of which has a table of its own."""
    width: Count = 128
    """The width of the state, and of the input."""
    layers: Count = 1
    """The number of layers."""
    resets: Fraction = 0.0
    """The share of steps at which a new episode begins; with 0 a scan is given no resets."""
    dtype: Literal["float32", "float64", "bfloat16", "float16"] = "float32"
    """The dtype of the input and the parameters."""
    precision: Precision = "ieee"
    """How a GPU multiplies float32 numbers; tf32 rounds factors to 10 bits first."""
    cudagraph: Literal["none", "full"] = "none"
    """full records the kernels of a call once and replays them together; it needs a GPU. The peak
    is then what the recording holds, copies of its input and results included."""
    repeats: Count = 10
    """The number of measured runs of each variant, which take turns without a CUDA graph."""
    device: Literal["cpu", "cuda"] = "cpu"
    """The device to run on."""
    threads: Count | None = None
    """The number of CPU threads, torch's default when left out."""
    json: Path | None = None
    """The file that every row, and every refused variant, is written to as well."""

    def __post_init__(self) -> None:
        check_fields(self, "benchmarks recurrent")
        if self.cudagraph == "full" and self.device != "cuda":
            raise ValueError(
                f"benchmarks recurrent expects --device cuda with --cudagraph full, got "
                f"{self.device}."
            )


class Inputs(NamedTuple):
    """What changes from one call of a scan to the next."""

    x: Tensor  # [B, T, D]
    resets: Tensor | None  # [B, T]
    grad_outputs: Tensor  # [B, T, H]

    def first_step(self) -> "Inputs":
        """Return the first step of the first sequence."""
        resets = None if self.resets is None else self.resets[:1, :1]
        return Inputs(self.x[:1, :1], resets, self.grad_outputs[:1, :1])


class Way(NamedTuple):
    """A way to compute a recurrent network."""

    name: str
    outputs: Callable[[Tensor, Tensor | None], Tensor]  # of x and resets
    params: list[Tensor]  # what it differentiates with respect to, beside x


class Case(NamedTuple):
    """One table of the benchmark: a cell and its inputs."""

    config: RecurrentBenchConfig
    cell: Cell
    shape: str  # in words
    inputs: Inputs
    params: Params

    def ways(self, part: Part) -> Iterator[Way]:
        """Yield each way to run a part; without a gradient all recomputes are one."""
        for backend in self.config.backends:
            if backend == "torch":
                yield self._of_torch()
            elif part == "forward":
                yield self._of_scan(backend, backend, "none")
            else:
                for recompute in self.config.recomputes:
                    yield self._of_scan(f"{backend}, recompute {recompute}", backend, recompute)

    def _of_scan(self, name: str, backend: Backend, recompute: Recompute) -> Way:
        params = {key: leaf.detach().requires_grad_() for key, leaf in self.params.items()}
        # What is not Triton's multiplies as torch is set to, which the benchmark does for all.
        precision = self.config.precision if backend == "triton" else "ieee"
        options = {"backend": backend, "recompute": recompute, "precision": precision}

        def outputs(x: Tensor, resets: Tensor | None) -> Tensor:
            found: Tensor = _SCANS[self.cell](x, params, resets=resets, **options)[0]
            return found

        return Way(name, outputs, list(params.values()))

    def _of_torch(self) -> Way:
        module = _module(self.config, self.cell)
        module.to_empty(device=self.config.device).load_state_dict(self.params)
        name = f"torch.nn.{type(module).__name__}"

        def outputs(x: Tensor, resets: Tensor | None) -> Tensor:
            if resets is not None:
                raise ValueError(f"{name} expects no resets, got {int(resets.sum())} of them.")
            # In training cuDNN keeps what a backward pass needs, even where there will be none.
            found: Tensor = module.train(torch.is_grad_enabled())(x)[0]
            return found

        return Way(name, outputs, list(module.parameters()))


def make_case(config: RecurrentBenchConfig, cell: Cell, steps: int) -> Case:
    """Return random sequences and parameters, drawn on the device."""
    device, dtype = config.device, getattr(torch, config.dtype)
    generator = torch.Generator(device=device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=dtype, device=device)

    scale = config.width**-0.5
    names = {name: leaf.shape for name, leaf in _module(config, cell).named_parameters()}
    params = {name: scale * normal(*shape) for name, shape in names.items()}
    x, grad_outputs = (normal(config.batch, steps, config.width) for _ in range(2))
    resets = None
    if config.resets:
        resets = torch.rand(x.shape[:2], generator=generator, device=device) < config.resets
    return Case(config, cell, _words(config, cell, steps), Inputs(x, resets, grad_outputs), params)


def _module(config: RecurrentBenchConfig, cell: Cell) -> nn.RNNBase:
    """Return torch's module, without weights."""
    return _MODULES[cell](
        config.width,
        config.width,
        config.layers,
        batch_first=True,
        device="meta",
        dtype=getattr(torch, config.dtype),
    )


def _words(config: RecurrentBenchConfig, cell: Cell, steps: int) -> str:
    words = (
        f"{cell}, {config.batch} sequences of {steps} steps, width {config.width}, "
        f"{config.layers} layer{'s' * (config.layers > 1)}, {config.dtype}, {config.device}"
    )
    if config.resets:
        words += f", a new episode at {config.resets:.0%} of the steps"
    if config.precision != "ieee":
        words += f", {config.precision}"
    return words + (", as a CUDA graph" if config.cudagraph == "full" else "")


def forward(way: Way, inputs: Inputs) -> list[Tensor]:
    """Return the outputs, for which no gradient is wanted."""
    with torch.no_grad():
        return [way.outputs(inputs.x, inputs.resets)]


def gradient(way: Way, inputs: Inputs) -> list[Tensor]:
    """Return the gradients of the input and of the parameters."""
    x = inputs.x.detach().requires_grad_()
    outputs = way.outputs(x, inputs.resets)
    return list(torch.autograd.grad(outputs, [x, *way.params], inputs.grad_outputs))


PARTS: dict[Part, Callable[[Way, Inputs], list[Tensor]]] = {
    "forward": forward,
    "gradient": gradient,
}
