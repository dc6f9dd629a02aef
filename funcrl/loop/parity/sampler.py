"""The embedded sampler's ways: a prefix entered at once, and a token at a time on its cache."""

from collections.abc import Callable, Iterator
from typing import TypeAlias

import torch
from torch import Tensor

from funcrl.core.types import Params
from funcrl.generators.embedded.cache import empty_cache, extend, prefill, write_prefix
from funcrl.generators.packed import pack_weights
from funcrl.loop.parity.sides import LOGPROBS, Part, Side, Way
from funcrl.models import Transformer
from funcrl.models.recording import Operation, recording

# (network, its recorded operations, tokens [B, T], length of the prompt) -> log-probabilities, and
# what led to them
_RunFn: TypeAlias = Callable[[Transformer, list[Operation], Tensor, int], Side]
_NUM_PREFIXES = 4  # of each sample
_PREFILL_TOKENS = 16384  # at a time


def sampler_ways(model: Transformer, params: Params, tokens: Tensor, prompt: int) -> Iterator[Way]:
    """Yield the sampler's ways to compute log-probabilities of samples [B, T]."""

    def way(name: str, run: _RunFn) -> Way:
        def side(recorded: bool) -> Side:
            operations: list[Operation] = []
            # The network that the sampler makes of pushed parameters.
            network = pack_weights(model, params)
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
