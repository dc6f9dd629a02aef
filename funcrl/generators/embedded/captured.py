"""What a sampler on a GPU keeps from call to call: its weights, its memory and its graphs."""

import threading
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor

from funcrl import ops
from funcrl.core.types import Params
from funcrl.generators.embedded.captured_batch import CapturedBatch
from funcrl.generators.embedded.engine import DrawFn
from funcrl.generators.embedded.pages import Results, sizes_of
from funcrl.generators.embedded.program import Graphs, Program, send_to
from funcrl.generators.embedded.schedule import Completions, Request, diverged
from funcrl.models import MLP, Attention, Transformer, TransformerConfig
from funcrl.models.config import is_plain
from funcrl.models.functional import bind
from funcrl.ops.exact import EXACT_FORWARD


def captured_runs(config: TransformerConfig) -> bool:
    """Return whether captured graphs compute this network: full attention, and no other option.

    Give `is_plain` the name of a new option once `program` computes it: graphs would ignore it.
    """
    return is_plain(config) and set(config.kinds) == {"full"}


def is_captured(model: Transformer, params: Params, dtype: torch.dtype | None) -> bool:
    """Return whether samples are drawn by captured graphs: in half precision on a GPU.

    A network of another class or with operations of its own is called as it is, and so is one of
    other dtypes, or with other layers than those of full attention without options.

    Args:
        model: the network.
        params: its parameters.
        dtype: to compute in; None for that of the parameters.
    """
    known = type(model) is Transformer and (model.ops is ops.NATIVE or model.ops == ops.EXACT)
    known = known and captured_runs(model.config)
    kinds = {(leaf.device.type, dtype or leaf.dtype) for leaf in params.values()}
    return known and kinds in ({("cuda", torch.bfloat16)}, {("cuda", torch.float16)})


class Weights:
    """A copy of the parameters that graphs may read: a push writes into it.

    Matrices that multiply one input lie side by side, so that one product has them all.

    The network computes by the exact kernels, whatever the numerics of the model are: they are the
    fastest here, and give one row the same bits in each bucket.
    """

    def __init__(
        self, config: TransformerConfig, params: Params, dtype: torch.dtype | None
    ) -> None:
        network = Transformer(config, EXACT_FORWARD)
        self._leaves: Params = {}
        for names in _multiplied_together(network, params):
            self._leaves |= _side_by_side({name: params[name] for name in names}, dtype)
        self.network = bind(network, self._leaves)

    @property
    def leaf(self) -> Tensor:
        """One of the weights: all have its dtype and its device."""
        return self.network.norm.weight

    def holds(self, params: Params, dtype: torch.dtype | None) -> bool:
        """Return whether parameters can be written here: each has the device and dtype of ours."""
        return all(
            (mine.device, mine.dtype) == (params[name].device, dtype or params[name].dtype)
            for name, mine in self._leaves.items()
        )

    def write(self, params: Params) -> None:
        """Copy parameters into the weights, cast to their dtype."""
        given = [params[name] for name in self._leaves]
        torch._foreach_copy_(list(self._leaves.values()), given)


def _multiplied_together(network: Transformer, params: Params) -> list[list[str]]:
    """Return the names of all parameters, those together that multiply one input."""
    together = []
    for path, module in network.named_modules():
        parts = {Attention: ("q", "k", "v"), MLP: ("gate", "up")}.get(type(module), ())
        for kind in ("weight", "bias"):
            names = [f"{path}.{part}.{kind}" for part in parts]
            together.append([name for name in names if name in params])
    found = {name for names in together for name in names}
    return [names for names in together if names] + [[name] for name in params if name not in found]


def _side_by_side(params: Params, dtype: torch.dtype | None) -> Params:
    """Return tensors like the parameters, each in memory where the one before ends."""
    first = next(iter(params.values()))
    sizes = [leaf.numel() for leaf in params.values()]
    memory = torch.empty(sum(sizes), dtype=dtype or first.dtype, device=first.device)
    parts = zip(params.items(), memory.split(sizes), strict=True)
    return {name: part.view(leaf.shape) for (name, leaf), part in parts}


class Captured:
    """Draws samples by a program that stays from push to push.

    A request that needs more memory than the program has gets a larger one, which has room for
    earlier ones too. Threads that draw at the same time wait for each other.
    """

    def __init__(self, config: TransformerConfig) -> None:
        self._config = config
        self._lock = threading.RLock()
        self._weights: Weights | None = None
        self._written: Params | None = None  # the parameters that the weights are copies of
        self._graphs: Graphs | None = None
        self._program: Program | None = None

    def lay_out(self, params: Params, dtype: torch.dtype | None) -> DrawFn:
        """Write parameters into the weights; return what draws with them."""
        with self._lock:
            self._write(params, dtype)
        return partial(self._draw, params, dtype)

    def _write(self, params: Params, dtype: torch.dtype | None) -> Weights:
        if self._weights is None or not self._weights.holds(params, dtype):
            self.free()
            self._weights = Weights(self._config, params, dtype)
        self._weights.write(params)
        self._written = params
        return self._weights

    def free(self) -> None:
        """Let go of weights, memory and graphs."""
        with self._lock:
            self._graphs = self._program = self._weights = self._written = None

    def _draw(self, params: Params, dtype: torch.dtype | None, request: Request) -> Completions:
        with self._lock:
            weights = self._weights
            # Another thread may have pushed, or let go of the memory.
            if weights is None or self._written is not params:
                weights = self._write(params, dtype)
            device = weights.leaf.device
            with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
                program = self._program_for(request, weights.network)
                ends = CapturedBatch(program, request).run()
                found = collect(program.results, request, ends)
                if device.type == "cuda":  # the next thread's samples may overwrite these
                    torch.cuda.current_stream().synchronize()
                return found

    def _program_for(self, request: Request, network: Transformer) -> Program:
        """Return a program in which the request has room."""
        sizes = sizes_of(request)
        if self._program is not None and self._program.sizes.covers(sizes):
            return self._program
        if self._program is not None:
            sizes = sizes.joined(self._program.sizes)
        # The old one is freed before there is a new one.
        self._program = self._graphs = None
        self._graphs = Graphs(network.norm.weight.device)
        self._program = Program(network, sizes, self._graphs)
        return self._program


def collect(results: Results, request: Request, ends: dict[int, int]) -> Completions:
    """Return the samples of a request; raise if the network left no distribution for a token."""
    sampling = request.sampling
    count = len(request.prompts) * sampling.num_samples
    tokens, logprobs, policy_logprobs = (each[:count] for each in results)
    lengths = (tokens >= 0).sum(dim=1)
    if ends:
        rows, cut = send_to([list(ends), list(ends.values())], tokens.device)
        lengths.index_copy_(0, rows, cut)
    mask = torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]
    last = tokens.gather(1, lengths[:, None] - 1).squeeze(1).tolist()
    _check_finite(mask, logprobs, policy_logprobs, sampling.num_samples)
    mask = mask[:, : int(lengths.amax())]

    def padded(values: Tensor) -> Tensor:
        return values[:, : mask.shape[1]].masked_fill(~mask, 0)

    stopped = [token in sampling.stop_tokens or row in ends for row, token in enumerate(last)]
    return Completions(
        tokens=padded(tokens),
        mask=mask,
        logprobs=padded(logprobs),
        policy_logprobs=padded(policy_logprobs),
        finish_reasons=tuple("stop" if each else "length" for each in stopped),
    )


def _check_finite(mask: Tensor, logprobs: Tensor, policy_logprobs: Tensor, group: int) -> None:
    """Raise for the earliest token whose log-probability is not finite."""
    broken = mask & ~(logprobs + policy_logprobs).isfinite()
    if bool(broken.any()):
        count, row = min((column, row) for row, column in broken.nonzero().tolist())
        raise diverged(policy_logprobs[row, count].item(), count, row // group)
