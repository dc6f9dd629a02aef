"""A network's scores, as a configuration computes them: its chunks, its dtype and its attention."""

from torch import nn

from funcrl.config import TrainConfig
from funcrl.core.types import ModelFn
from funcrl.loop.parts import chosen
from funcrl.models import Recurrent, Transformer
from funcrl.models.logits import forward_takes
from funcrl.models.logprobs import logprob_fn
from funcrl.models.transformer import has_delta
from funcrl.ops import AttendFn, attend_flash, attend_flash_segments


def plain_model_fn(function: str, config: TrainConfig, model: nn.Module) -> ModelFn:
    """Return the scores of a network's own parameters, as the configuration computes them."""
    _check_packing(function, config, model)
    return logprob_fn(
        model,
        config.sampling.temperature or 1.0,
        chunk=config.logprob_chunk if isinstance(model, Transformer | Recurrent) else None,
        dtype=chosen.compute_dtype(config),
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
