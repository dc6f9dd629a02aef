"""The reference policy of a KL penalty: the first one, and when and where to it moves."""

import torch

from funcrl.config import TrainConfig
from funcrl.core import tree
from funcrl.core.types import Params
from funcrl.loop.build import Parts, whole_params
from funcrl.parallel import broadcast_tree
from funcrl.run.follower import Follower
from funcrl.run.record import Record, reference_policy


def check_reference(config: TrainConfig, parts: Parts) -> None:
    """Raise if a reference is to move that there is not."""
    every = config.algorithm.reference_every
    if every and not parts.kl:
        raise ValueError(
            f"train expects --algorithm.kl above 0 with --algorithm.reference-every {every}, which "
            f"moves the reference of its penalty, got 0."
        )


def first_reference(parts: Parts, record: Follower) -> Params | None:
    """Return the reference of a KL penalty that a run begins or goes on with, if it has one."""
    step, state, *_, moved = record.progress
    if not parts.kl:
        return None
    reference = whole_params(parts, state.params)
    if isinstance(record, Record):
        reference = moved[0] if moved else reference_policy(record.folder, step, reference)
    reference = dict(broadcast_tree(dict(reference), parts.mesh.all))
    if parts.donates:  # the first step overwrites its state, which must not be the reference
        reference = tree.map(torch.clone, reference)
    return reference


def moves_reference(config: TrainConfig, index: int) -> bool:
    """Return whether the reference of a KL penalty moves after a step."""
    every = config.algorithm.reference_every
    return every is not None and index % every == 0


def moved_reference(config: TrainConfig, reference: Params, policy: Params) -> Params:
    """Return the reference of a KL penalty, moved towards the policy."""
    share = config.algorithm.reference_mixup
    return tree.map(lambda old, new: (1 - share) * old + share * new, reference, policy)
