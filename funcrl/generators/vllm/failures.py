"""Whether vLLM runs here, and what its failures mean."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from funcrl.core import rng, tree
from funcrl.core.process import ExplainedMemoryError, is_out_of_memory
from funcrl.core.types import Params, Sample
from funcrl.generators.vllm.memory import shape_of
from funcrl.models.logprobs import logprob_fn, score

# What torch and vLLM say where memory runs out: on a CPU, at the start and in vLLM's own allocator
# they raise a RuntimeError or ValueError like any other, so that only their words tell it.
_NO_MEMORY = (
    "out of memory", "can't allocate memory", "not enough memory", "less than requested memory",
    "less than desired gpu memory", "larger than the available kv cache memory",
)  # fmt: skip


class EngineError(RuntimeError):
    """A vLLM engine has died, and is closed."""


def out_of_memory(method: str, error: BaseException) -> ExplainedMemoryError | None:
    """Return the error of a method of `VLLM` that names the options to lower, if memory ran out."""
    is_known = any(words in str(error).lower() for words in _NO_MEMORY)
    if not is_known and not is_out_of_memory(error):
        return None
    return ExplainedMemoryError(
        f"VLLM.{method} expects more memory than there is: lower --vllm.cache-bytes, --vllm.slots "
        f"or --vllm.batched-tokens, or on a GPU lend the engine's to the update by --vllm.sleep; "
        f"the engine is closed. Got {type(error).__name__}: {error}"
    )


def died(method: str, error: BaseException) -> EngineError:
    """Return the error of a method of `VLLM` that says what to do when another ended the engine."""
    return EngineError(
        f"VLLM.{method} expects an engine that answers, got one that has died of "
        f"{type(error).__name__}: {error}. It is closed: go on with a run by --resume, or make "
        f"another VLLM."
    )


def not_started(model: nn.Module, error: BaseException) -> EngineError:
    """Return the error of vLLM's class for a model of transformers that cannot be started."""
    return EngineError(
        f"VLLM expects a {type(model).__name__} that vLLM can run, got {type(error).__name__}: "
        f"{error}; --generator sampler takes any."
    )


# Of a probe: enough for experts that are chosen otherwise for a part of the tokens.
_TOKENS = 64
# Another engine rounds in other places than the model does, not by much more. In float32, where the
# model is what is compared with, by this: on a GPU vLLM's attention multiplies with fewer bits.
_FACTOR, _LEAST = 4.0, {"cpu": 1e-3, "cuda": 1e-2}


def check_finite(params: Params) -> None:
    """Raise if a parameter is not finite: on a GPU vLLM's kernels would end the process."""
    norms = torch.stack(torch._foreach_norm(list(params.values()), float("inf")))
    named = zip(params, norms.isfinite().tolist(), strict=True)
    broken = [name for name, is_finite in named if not is_finite]
    if broken:
        raise FloatingPointError(
            f"VLLM.push expects finite parameters, got others in {len(broken)} of {len(params)} "
            f"leaves, such as {broken[0]!r}; have the parameters diverged?"
        )


def check_probe(
    model: nn.Module,
    params: Params,
    engine_scores: Callable[[Sequence[Sequence[int]]], list[list[float]]],
    context_length: int,
) -> None:
    """Raise if an engine's log-probabilities of a few tokens are not the model's, but for rounding.

    Rounding is what the model's own numbers show, in the dtype of the parameters against float32.

    Args:
        model: the trainer's.
        params: in the engine's dtype.
        engine_scores: of rows of tokens, the log-probabilities from the second token on.
        context_length: of the engine; one of its tokens is left for a completion.
    """
    count = min(_TOKENS, context_length - 1)
    like = next(iter(params.values()))
    vocab_size = shape_of(model).vocab_size
    drawn = [[rng.fold_in(0, place) % vocab_size for place in range(count)]]
    tokens = torch.tensor(drawn, device=like.device)
    positions = torch.arange(count, device=like.device)[None]
    scored = engine_scores(drawn)[0]
    found = torch.tensor(scored, dtype=torch.float32, device="cpu")
    rows, model_fn = Sample(tokens, positions), logprob_fn(model)

    def scores(weights: Params) -> Tensor:
        return score(model_fn, weights, rows).logprobs[0, 1:].float().cpu()

    exact = scores(tree.cast(params, torch.float32))
    off, allowed = ((each - exact).abs().mean().item() for each in (found, scores(params)))
    if not off <= _FACTOR * allowed + _LEAST[like.device.type]:
        raise RuntimeError(
            f"VLLM.push expects vLLM to give a probe's tokens the model's own log-probabilities, "
            f"got a mean difference of {off:.3g} where rounding to {like.dtype} makes "
            f"{allowed:.3g}: vLLM computes another network, or funcrl's names of parameters and "
            f"vLLM's do not agree; --generator sampler draws from the model itself."
        )
