"""vLLM's ways to compute log-probabilities, through what its generator offers."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from funcrl.config import Sampling, VLLMConfig
from funcrl.generators import VLLM
from funcrl.loop.parity.results import ParityRow
from funcrl.loop.parity.sides import LOGPROBS, Part, Side, difference

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
