"""The network of a run: what one of your own must give, and its scores as configured."""

import torch
from torch import Tensor, nn

from funcrl.config import TrainConfig
from funcrl.core.rows import over_rows
from funcrl.core.types import ModelFn, Params, Sample
from funcrl.loop.parts import from_config
from funcrl.models import Recurrent, Transformer
from funcrl.models.logits import LogitsFn, forward_takes, is_of_transformers, logits_fn
from funcrl.models.logprobs import logprob_fn
from funcrl.models.transformer import has_delta
from funcrl.ops import AttendFn, attend_flash, attend_flash_segments
from funcrl.tasks.rewards.failures import describe_error, is_of_user


def check_model(function: str, config: TrainConfig, model: nn.Module, vocab_size: int) -> None:
    """Raise if a network, as it is, does not give causal logits of the task's tokens.

    Args:
        function: whose error it would be.
        config: that names the network.
        model: the network; a `Transformer` and one without weights are not looked at.
        vocab_size: of the task.
    """
    params: Params = dict(model.named_parameters())
    if isinstance(model, Transformer) or any(leaf.is_meta for leaf in params.values()):
        return
    what, kind = f"{function} expects --model {config.model}", type(model).__name__
    device = next((leaf.device for leaf in params.values()), torch.device("cpu"))
    tokens = torch.tensor([0, vocab_size - 1], device=device)  # the first and the last
    logits, sample = logits_fn(model), Sample(tokens, torch.arange(2, device=device))
    with torch.no_grad():
        found = _logits_of_two(f"{what} to give logits", kind, logits, params, sample, vocab_size)
        other = logits(params, sample._replace(tokens=tokens[:1].expand(2)))
        if not torch.allclose(found[0], other[0], rtol=1e-3, atol=1e-5):
            raise ValueError(
                f"{what} to be causal, so that the logits at a token depend on it and on those "
                f"before it, got {kind}, whose logits at the first of 2 tokens change with the "
                f"second; does its attention have a causal mask?"
            )
        if not is_of_transformers(model):  # its generator need not batch it by vmap
            _check_rows(function, logits, params, sample)


def _logits_of_two(
    what: str, kind: str, logits: LogitsFn, params: Params, sample: Sample, vocab_size: int
) -> Tensor:
    what = (
        f"{what} [T, at least {vocab_size}] of the tokens [T] of one sample, without a batch axis"
    )
    try:
        found = logits(params, sample)
    except Exception as error:
        of_torch = isinstance(error, IndexError | RuntimeError | AttributeError)
        if not of_torch and not is_of_user(error):  # funcrl's own says what is wrong
            raise
        raise ValueError(f"{what}. {describe_error(kind, error)}.") from error
    got = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
    if not isinstance(got, list) or len(got) != 2 or got[0] != 2 or got[1] < vocab_size:
        raise ValueError(f"{what}, got {got} of 2 tokens.")
    return found


def _check_rows(function: str, logits: LogitsFn, params: Params, sample: Sample) -> None:
    """Raise if vmap cannot run the network over rows of samples."""
    rows = Sample(sample.tokens[None], sample.positions[None])
    try:
        over_rows(function, logits)(params, rows)
    except NotImplementedError as error:
        raise ValueError(str(error)) from error


def plain_model_fn(function: str, config: TrainConfig, model: nn.Module) -> ModelFn:
    """Return the scores of a network's own parameters, as the configuration computes them."""
    _check_packing(function, config, model)
    return logprob_fn(
        model,
        config.sampling.temperature or 1.0,
        chunk=config.logprob_chunk if isinstance(model, Transformer | Recurrent) else None,
        dtype=from_config.compute_dtype(config),
        attend=_attend(function, config, model),
        attend_segments=attend_flash_segments if config.attend == "flash" else None,
    )


def _check_packing(function: str, config: TrainConfig, model: nn.Module) -> None:
    """Raise if samples of a packed row would see each other."""
    carries = forward_takes(model, "resets") or has_delta(model)
    if config.packing != "none" and not (carries or forward_takes(model, "attend")):
        raise ValueError(
            f"{function} expects --packing none for a network whose forward takes neither attend= "
            f"nor resets=, and would let samples of a row see each other, got {config.packing} for "
            f"{type(model).__name__}."
        )
    if config.packing == "prefixes" and carries:
        raise ValueError(
            f"{function} expects --packing none or samples for a network that carries a state, "
            f"which does not fork behind a shared prompt, got prefixes for {type(model).__name__}."
        )


def _attend(function: str, config: TrainConfig, model: nn.Module) -> AttendFn | None:
    """Return how heads attend; None is the network's own way."""
    if config.attend == "native":
        return None
    if not isinstance(model, Transformer):
        raise ValueError(
            f"{function} expects --attend native for a network of one's own, which attends in its "
            f"own way, got flash for {type(model).__name__}."
        )
    width = model.config.head_width
    if config.device == "cuda" and width % 8:
        raise ValueError(
            f"{function} expects --attend native for heads that are no multiple of 8 wide, on "
            f"cuda, got flash for heads of {width}."
        )
    return attend_flash
