"""What the sampler and vLLM give for the same tokens."""

from collections.abc import Callable, Iterator
from typing import TypeAlias

import torch
from torch import Tensor

from funcrl.config import Sampling, VLLMConfig
from funcrl.core.types import Params
from funcrl.generators import VLLM
from funcrl.generators.embedded.cache import (
    empty_cache,
    extend,
    pack_weights,
    prefill,
    write_prefix,
)
from funcrl.loop.parity.results import ParityRow
from funcrl.loop.parity.sides import LOGPROBS, Part, Side, Way, difference
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


_BLOCKS = {"cpu": 128, "cuda": 16}  # tokens that vLLM keeps together in its cache of prefixes


def vllm_rows(
    generator: VLLM,
    config: VLLMConfig,
    tokens: Tensor,
    reference: Callable[[Tensor], Side],
    seed: int,
) -> Iterator[ParityRow]:
    """Yield a row for each of vLLM's ways, also for those that it cannot go here.

    Args:
        generator: to which the parameters have been pushed.
        config: of the generator.
        tokens: [B, T], the samples.
        reference: the trainer's own values of samples [B, T].
        seed: of what is drawn.
    """
    rows: list[list[int]] = tokens.tolist()
    expected, device = reference(tokens), tokens.device

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
    yield _after_known_prefixes(generator, tokens, reference, seed)


def _after_known_prefixes(
    generator: VLLM, tokens: Tensor, reference: Callable[[Tensor], Side], seed: int
) -> ParityRow:
    """Return the row of a token drawn after each sample, whose cache vLLM has kept."""
    name, block = "vLLM, prefix from its cache", _BLOCKS[tokens.device.type]
    count, length = tokens.shape
    if length <= block:
        return ParityRow(name, skipped=f"needs samples of more than {block} tokens, a block")
    if length >= generator.context_length:
        return ParityRow(name, skipped=f"needs --vllm.context-length above {length}")
    rows: list[list[int]] = tokens.tolist()
    samples = generator.generate(rows, Sampling(max_tokens=1), seed)
    longer = torch.cat([tokens, samples.tokens.to(tokens.device)], dim=1)
    drawn = [Part(n, length, samples.policy_logprobs[n]) for n in range(count)]
    return difference(name, reference(longer), {LOGPROBS: drawn})
