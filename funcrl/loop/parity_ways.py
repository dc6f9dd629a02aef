"""Ways to compute log-probabilities: the trainer's own, and those of the sampler and of vLLM."""

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from funcrl.config import Sampling, VLLMConfig
from funcrl.core.types import Params, Sample
from funcrl.generators import VLLM
from funcrl.generators.embedded.cache import empty_cache, extend, prefill, write_prefix
from funcrl.generators.packed import pack_weights
from funcrl.models import Transformer
from funcrl.models.logprobs import logprob_fn
from funcrl.ops import AttendFn, Ops
from funcrl.ops.choice import replace_ops

LOGPROBS = "log-probabilities"
_NUM_PREFIXES = 4  # of each sample
_PREFILL_TOKENS = 16384  # at a time
_BLOCKS = {"cpu": 128, "cuda": 16}  # tokens that vLLM keeps together in its cache of prefixes
_OF_THE_WHOLE = {"embed": "embed", "linear": "unembed"}  # which the network calls by itself


class ParityRow(NamedTuple):
    """One way of a generator to compute log-probabilities, against the trainer's."""

    name: str
    tokens: int = 0
    different: int = 0  # of them, with another log-probability, by however little
    max_abs_diff: float = 0.0
    first_difference: str = ""  # the first operation that differs, where it was looked for
    skipped: str = ""  # why nothing was computed, "" where it was

    @property
    def equal(self) -> bool:
        """Whether all log-probabilities are equal to the last bit."""
        return not self.skipped and self.different == 0


class Part(NamedTuple):
    """The values of consecutive tokens of one sample."""

    sample: int
    start: int  # the first of the tokens
    values: Tensor  # [n, ...]


Side: TypeAlias = dict[str, list[Part]]  # values by name, in the order of computation


class Operation(NamedTuple):
    """The result of one operation."""

    name: str  # such as "layer 0, attention: project"
    result: Tensor  # [..., T, F], all that belongs to a token side by side


# (the network, its recorded operations, tokens [B, T], the prompt's length) -> what it gives
_RunFn: TypeAlias = Callable[[Transformer, list[Operation], Tensor, int], Side]


class Way(NamedTuple):
    """A way to compute log-probabilities of the same tokens."""

    name: str
    # (whether to record the result of every operation) -> what it gives
    run: Callable[[bool], Side]


def trainer_side(model: nn.Module, params: Params, tokens: Tensor, recorded: bool = False) -> Side:
    """Return the trainer's values of samples [B, T], by a forward pass of each by itself."""
    operations: list[Operation] = []
    if recorded:
        assert isinstance(model, Transformer)  # whose operations are known
        model = recording(model, operations)
    model_fn = logprob_fn(model)
    positions = torch.arange(tokens.shape[1], device=tokens.device)
    side: Side = {}
    for n, row in enumerate(tokens):
        operations.clear()
        with torch.no_grad():
            logprobs = model_fn(params, Sample(row, positions)).logprobs
        for name, result in operations:
            side.setdefault(name, []).append(Part(n, 0, result))
        side.setdefault(LOGPROBS, []).append(Part(n, 1, logprobs[1:]))
    return side


def sampler_ways(model: Transformer, params: Params, tokens: Tensor, prompt: int) -> Iterator[Way]:
    """Yield the sampler's ways to compute log-probabilities of samples [B, T]."""

    def way(name: str, run: _RunFn) -> Way:
        def side(recorded: bool) -> Side:
            operations: list[Operation] = []
            # The network that the sampler makes of pushed parameters.
            network = pack_weights(model, params, by_operation=recorded)
            with torch.inference_mode():
                used = recording(network, operations) if recorded else network
                return run(used, operations, tokens, prompt)

        return Way(f"sampler, {name}", side)

    yield way("prefill", prefixes)
    yield way("decode", steps)


def prefixes(
    network: Transformer, operations: list[Operation], tokens: Tensor, prompt: int
) -> Side:
    """Return the values of prefixes of several lengths, entered as prompts of one batch."""
    last = tokens.shape[1] - 1
    steps_between = _NUM_PREFIXES - 1
    ends = sorted({prompt + (last - prompt) * n // steps_between for n in range(_NUM_PREFIXES)})
    rows = [(sample, end) for sample in range(len(tokens)) for end in ends]
    size = max(1, _PREFILL_TOKENS // max(ends))
    side: Side = {}
    for start in range(0, len(rows), size):
        part = rows[start : start + size]
        lengths = torch.tensor([end for _, end in part], device=tokens.device)
        prompts = tokens[[sample for sample, _ in part], : max(ends)]
        operations.clear()
        logits = prefill(network, prompts, lengths).logits
        targets = tokens[[sample for sample, _ in part], lengths]
        logprobs = _logprobs(network, logits, targets)
        for row, (sample, end) in enumerate(part):
            for name, result in operations:
                # Logits are of the last token alone.
                alone = result.ndim == 2
                values = result[row : row + 1] if alone else result[row, :end]
                side.setdefault(name, []).append(Part(sample, end - 1 if alone else 0, values))
            side.setdefault(LOGPROBS, []).append(Part(sample, end, logprobs[row : row + 1]))
    return side


def steps(network: Transformer, operations: list[Operation], tokens: Tensor, prompt: int) -> Side:
    """Return the values of all samples under way together, one token after the other."""
    count, length = tokens.shape
    lengths = torch.full((count,), prompt, device=tokens.device)
    prefix = prefill(network, tokens[:, :prompt], lengths)
    cache = empty_cache(network, count, length - 1, network.norm.weight)
    write_prefix(cache, prefix, slice(count), 1)
    logits = [prefix.logits]
    for place in range(prompt, length - 1):
        positions = torch.full_like(lengths, place)
        logits.append(extend(network, cache, tokens[:, place], positions, place))
    logprobs = [_logprobs(network, each, tokens[:, prompt + n]) for n, each in enumerate(logits)]
    results: dict[str, list[Tensor]] = {}
    for name, result in operations:
        results.setdefault(name, []).append(result[:, None] if result.ndim == 2 else result)
    side: Side = {}
    for name, each in results.items():
        joined = torch.cat(each, dim=1)
        first = length - 1 - joined.shape[1]  # the last token of a sample is never entered
        side[name] = [Part(sample, first, row) for sample, row in enumerate(joined)]
    rows = torch.stack(logprobs, dim=1)
    side[LOGPROBS] = [Part(sample, prompt, row) for sample, row in enumerate(rows)]
    return side


def _logprobs(network: Transformer, logits: Tensor, targets: Tensor) -> Tensor:
    """Return the log-probabilities [n] as the sampler computes them."""
    logprobs = network.ops.log_softmax(logits, 1.0)
    return logprobs.gather(1, targets[:, None]).squeeze(1)


def vllm_rows(
    generator: VLLM,
    config: VLLMConfig,
    model: nn.Module,
    params: Params,
    tokens: Tensor,
    seed: int,
) -> Iterator[ParityRow]:
    """Yield a row for each of vLLM's ways, also for those that it cannot go here.

    Args:
        generator: to which the parameters have been pushed.
        config: of the generator.
        model: the trainer's network.
        params: its parameters.
        tokens: [B, T], the samples.
        seed: of what is drawn.
    """
    rows: list[list[int]] = tokens.tolist()
    expected, device = trainer_side(model, params, tokens), tokens.device

    def scored(name: str, found: list[list[float]]) -> ParityRow:
        parts = [Part(n, 1, torch.tensor(each, device=device)) for n, each in enumerate(found)]
        return difference(f"vLLM, {name}", expected, {LOGPROBS: parts})

    yield scored("prefill, one at a time", [generator.score([row])[0] for row in rows])
    yield scored("prefill, all at once", generator.score(rows))
    limit = max(config.batched_tokens, config.context_length)
    pieces = "prefill in pieces"
    if not tokens.is_cuda:
        yield ParityRow(f"vLLM, {pieces}", skipped="funcrl lets vLLM cut no prompt on a CPU")
    elif tokens.numel() <= limit:
        why = f"needs --vllm.batched-tokens and --vllm.context-length below {tokens.numel()}"
        yield ParityRow(f"vLLM, {pieces}", skipped=why)
    else:
        yield scored(pieces, generator.score(rows))
    name, block = "vLLM, prefix from its cache", _BLOCKS[device.type]
    count, length = tokens.shape
    if length <= block:
        yield ParityRow(name, skipped=f"needs samples of more than {block} tokens, a block")
    elif length >= generator.context_length:
        yield ParityRow(name, skipped=f"needs --vllm.context-length above {length}")
    else:  # a token drawn after each sample, whose cache vLLM has kept
        samples = generator.generate(rows, Sampling(max_tokens=1), seed)
        longer = torch.cat([tokens, samples.tokens.to(device)], dim=1)
        drawn = [Part(n, length, samples.policy_logprobs[n]) for n in range(count)]
        yield difference(name, trainer_side(model, params, longer), {LOGPROBS: drawn})


def difference(name: str, reference: Side, side: Side, of: str = LOGPROBS) -> ParityRow:
    """Return the row of a way: how far its values are from those of whole samples."""
    whole = reference[of]
    gaps = []
    for sample, start, values in side[of]:
        skipped = start - whole[sample].start
        expected = whole[sample].values[skipped : skipped + len(values)]
        gap = (values.to(expected.device).double() - expected.double()).abs()
        gaps.append(gap.flatten(1).amax(dim=1) if gap.ndim > 1 else gap)
    largest = torch.cat(gaps)  # of each token
    return ParityRow(
        name=name,
        tokens=largest.numel(),
        different=int((largest != 0).sum()),
        max_abs_diff=largest.max().item(),
    )


def first_difference(reference: Side, side: Side) -> str:
    """Return the first operation whose results differ, with the largest difference, "" if none."""
    for name in side:
        if name not in reference:
            continue
        row = difference(name, reference, side, of=name)
        if row.different:
            return (
                f"{name}, {row.different:,} of {row.tokens:,} tokens, by at most "
                f"{row.max_abs_diff:.1e}"
            )
    return ""


def recording(network: Transformer, operations: list[Operation]) -> Transformer:
    """Return a copy of the network, with the same weights, whose operations are appended to a list.

    The list belongs to the caller, who may empty it between two calls. Under `vmap` its tensors are
    of that `vmap`, and leave it as results of the mapped function.

    Args:
        network: bound to its parameters or not.
        operations: what each call of the copy adds to.

    Example:
        >>> import torch, funcrl
        >>> from funcrl.loop.parity_ways import recording
        >>> config = funcrl.models.TransformerConfig(vocab_size=7, width=8, num_layers=1)
        >>> model = funcrl.models.Transformer(config)
        >>> operations = []
        >>> apply = funcrl.functional(recording(model, operations))
        >>> logits = apply(funcrl.init_params(model, seed=0), torch.arange(3), torch.arange(3))
        >>> [each.name for each in operations[:3]]
        ['embed: embed', 'layer 0, attention_norm: rms_norm', 'layer 0, attention: project']
    """
    shared = {id(weight): weight for weight in network.parameters()}
    copied = copy.deepcopy(network, shared)  # which takes what it finds there for an id
    last_place = [""]
    replace_ops(copied, lambda path, ops: _recording_ops(ops, path, operations, last_place))
    return copied


def _recording_ops(ops: Ops, path: str, operations: list[Operation], last_place: list[str]) -> Ops:
    """Return the same operations, which also append to the list, of a module at `path`."""
    of_heads = path.endswith(("q_norm", "k_norm", "delta.norm"))

    def keep(operation: str, result: Any, place: str) -> None:
        parts = [result] if isinstance(result, Tensor) else list(result)
        by_head = of_heads or (path.endswith("delta") and operation == "rms_norm")
        flat = [part.flatten(-2) if by_head else part for part in parts]
        operations.append(Operation(f"{_title(place)}: {operation}", torch.cat(flat, dim=-1)))
        last_place[0] = place

    def kept(operation: str) -> Callable[..., Any]:
        function = getattr(ops, operation)

        def call(*inputs: Any) -> Any:
            result = function(*inputs)
            keep(operation, result, path or _OF_THE_WHOLE[operation])
            return result

        return call

    def rotate(parts: Sequence[Tensor], factors: Tensor) -> Sequence[Tensor]:
        turned = ops.rotate(parts, factors)
        keep("rotate", [_by_token(part) for part in turned], path)
        return turned

    def norm_rotate(*inputs: Any) -> tuple[Tensor, Tensor]:
        assert ops.norm_rotate is not None
        turned = ops.norm_rotate(*inputs)
        keep("norm_rotate", [_by_token(part) for part in turned], path)
        return turned

    def gated_delta(*inputs: Any) -> tuple[Tensor, Tensor]:
        outputs, state = ops.gated_delta(*inputs)
        keep("gated_delta", [_by_token(outputs)], path)
        return outputs, state

    def attending(attend: AttendFn) -> AttendFn:
        def call(q: Tensor, k: Tensor, v: Tensor, **window: int) -> Tensor:
            attended = attend(q, k, v, **window)
            # The network hands `attend` down to its layers, which have just rotated q and k.
            keep("attend", _by_token(attended), last_place[0])
            return attended

        return call

    plain = (
        "embed", "linear", "project", "rms_norm", "add_rms_norm", "swiglu", "geglu", "sigmoid_gate",
    )  # fmt: skip
    recorded: dict[str, Any] = {
        operation: kept(operation) for operation in plain if getattr(ops, operation) is not None
    }
    return ops._replace(
        **recorded,
        rotate=rotate,
        norm_rotate=None if ops.norm_rotate is None else norm_rotate,
        gated_delta=gated_delta,
        attend_causal=attending(ops.attend_causal),
        attend_prompts=attending(ops.attend_prompts),
        attend_segments=lambda *ids: attending(ops.attend_segments(*ids)),
        attend_last=lambda *cache: attending(ops.attend_last(*cache)),
    )


def _by_token(x: Tensor) -> Tensor:
    """Return [..., H, T, C] as [..., T, H C]."""
    return x.transpose(-2, -3).flatten(-2)


def _title(place: str) -> str:
    """Return the path of a module in words: "layer 0, attention.q_norm"."""
    first, *rest = place.split(".")
    if first != "blocks":
        return place
    return ", ".join([f"layer {rest[0]}", *([".".join(rest[1:])] if rest[1:] else [])])
