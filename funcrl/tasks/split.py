"""The split of generated problems into those to train on and those held out."""

from funcrl.core import rng

_HELD_OUT = 10


def is_held_out(*key: int) -> bool:
    """Return whether a hash of its numbers puts a problem into the tenth that is held out."""
    return rng.fold_in(0, *key) % _HELD_OUT == 0
