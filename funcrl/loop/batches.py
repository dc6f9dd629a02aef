"""The batch of an update as the configuration lays it: a sample a row, or packed rows."""

import torch

from funcrl.config import TrainConfig
from funcrl.core.types import Batch, Rows
from funcrl.loop.parts.build import Parts
from funcrl.loop.parts.memory import LONGEST
from funcrl.rl.mixing import mixing_parts
from funcrl.rl.packing import pack_batch, pack_batch_groups


def laid_out(config: TrainConfig, batch: Batch) -> Rows:
    """Return a batch, or a mini-batch, in the rows that a step is given.

    Args:
        config: whose `packing` says how, and the options beside it in which shapes.
        batch: of one sample a row.
    """
    if config.packing == "none":
        return batch
    width = batch.mask.shape[1]
    length = config.pack_length or LONGEST * width
    places = torch.arange(1, width + 1, device=batch.mask.device)
    longest = int((places * batch.mask).amax())
    if longest > length:
        raise ValueError(
            f"train expects --pack-length of at least the longest sample, {longest} tokens with "
            f"its prompt, got {length}."
        )
    pack = pack_batch if config.packing == "samples" else pack_batch_groups
    return pack(batch, length, config.pack_rows)


def check_packing(config: TrainConfig, parts: Parts) -> None:
    """Raise if the samples of a packed row would be mixed; a step of one's own says so itself."""
    if config.packing == "none" or "step" in parts.replaced:
        return
    mixing = mixing_parts(parts.algorithm)
    if mixing:
        raise ValueError(
            f"train expects --packing none for an algorithm whose {mixing} depends on the other "
            f"samples of a packed row, got {config.packing}."
        )
