"""Packs the batch of an update into rows as the configuration says."""

from collections.abc import Callable

import torch
from torch import Tensor

from funcrl.config import TrainConfig
from funcrl.core import tree
from funcrl.core.printing import warn_safely
from funcrl.core.rows import row_ends
from funcrl.core.types import Batch, ModelFn, PackedBatch, Params, Rows, TokenScores
from funcrl.loop.build import Parts, trained_like
from funcrl.loop.memory import LONGEST
from funcrl.loop.rollouts.roll import rows_of
from funcrl.models import Transformer
from funcrl.models.logprobs import reading_segments, score
from funcrl.rl.batching import sampled_tokens
from funcrl.rl.mixing import mixing_parts
from funcrl.rl.packing import pack_batch, pack_batch_groups


def to_rows(config: TrainConfig, batch: Batch) -> Rows:
    """Return a batch, or a mini-batch, in the rows that a step is given.

    They are longer than `pack_length` where a sample is: a run of hours does not end for it.

    Args:
        config: whose `packing` says how, and the options beside it in which shapes.
        batch: of one sample a row.
    """
    if config.packing == "none":
        return batch
    width = batch.mask.shape[1]
    length = config.pack_length or LONGEST * width
    longest = int(row_ends(sampled_tokens(batch)).amax())
    if longest > length:
        length = longest + -longest % config.length_multiple
        warn_safely(
            f"A sample is longer than --pack-length {config.pack_length}: the rows of its update "
            f"are as long as it, which takes more memory."  # in the same words: once
        )
    return _packing(config)(batch, length, config.pack_rows)


def score_in_rows(
    config: TrainConfig, model_fn: ModelFn, params: Params, tokens: Tensor, mask: Tensor
) -> TokenScores:
    """Return the scores [B, T] of a rollout's sampled tokens, computed in rows as the step's are.

    Args:
        config: whose `packing` and `microbatch` say how.
        model_fn: that scores; of packed rows it reads `segment_ids`.
        params: its parameters.
        tokens: [B, T], one sample a row.
        mask: [B, T], True where a token was sampled; of packed rows other tokens score 0.
    """
    rows = rows_of(tokens)
    if config.packing == "none":
        return score(model_fn, params, rows, config.microbatch)
    nothing = torch.zeros_like(tokens)
    places = torch.arange(1, tokens.numel() + 1, device=tokens.device).view_as(tokens)
    # Where each token of a packed row comes from is carried in place of its advantage.
    batch = Batch(*rows, mask, nothing, advantages=places, token_weights=nothing)
    packed = to_rows(config, batch)
    found = score(model_fn, params, packed, config.microbatch)
    is_token = packed.advantages > 0

    def unpacked(values: Tensor) -> Tensor:
        padded = torch.zeros(tokens.shape, dtype=values.dtype, device=values.device)
        padded.view(-1)[packed.advantages[is_token] - 1] = values[is_token]
        return padded

    scores: TokenScores = tree.map(unpacked, found)
    return scores


def check_packing(config: TrainConfig, parts: Parts) -> None:
    """Raise if the samples of a packed row would be mixed; a step of one's own says so itself.

    A model or a model_fn of one's own scores a small packed row, as it will score large ones.
    """
    if config.packing == "none" or "step" in parts.replaced:
        return
    if parts.per_sample is not None:
        raise ValueError(
            f"train expects --packing none with a per_sample transform, which needs one sample a "
            f"row, got {config.packing}."
        )
    mixing = mixing_parts(parts.algorithm)
    if mixing:
        raise ValueError(
            f"train expects --packing none for an algorithm whose {mixing} depends on the other "
            f"samples of a packed row, got {config.packing}."
        )
    if parts.replaced & {"model", "model_fn"} or not isinstance(parts.model, Transformer):
        model_fn = reading_segments("train", parts.model_fn)
        score(model_fn, trained_like(parts), _packed_row(config))


def _packed_row(config: TrainConfig) -> PackedBatch:
    """Return a row of two samples of three tokens, the first two of them their prompt."""
    positions = torch.arange(3, device=config.device).repeat(2, 1)
    numbers = torch.zeros(2, 3, device=config.device)
    tokens, mask = torch.zeros_like(positions), positions == 2
    batch = Batch(tokens, positions, mask, numbers, numbers, numbers)
    return _packing(config)(batch, 6, 1)


def _packing(config: TrainConfig) -> Callable[[Batch, int, int], PackedBatch]:
    return pack_batch if config.packing == "samples" else pack_batch_groups
