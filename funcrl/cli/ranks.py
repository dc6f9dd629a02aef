"""`torchrun -m funcrl train`: joins the ranks that torchrun has started."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
from torch import distributed
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.elastic.multiprocessing.errors import get_error_handler
from torch.distributed.rendezvous import rendezvous

from funcrl.config import TrainConfig
from funcrl.core.process import num_ranks
from funcrl.parallel import Mesh, make_mesh
from funcrl.parallel.mesh import ALONE

# What an error of a collective says that another rank has left, or has not come.
_OF_OTHERS = ("connection closed by peer", "connection reset by peer", "timed out", "timeout")
_NAMES = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def rank_label() -> str:
    """Return what a line of this process begins with: its rank, if there are several."""
    return f"funcrl (rank {os.environ.get('RANK', '?')})" if num_ranks() > 1 else "funcrl"


def is_first_rank() -> bool:
    """Return whether this process is the one of all ranks that speaks."""
    return num_ranks() == 1 or os.environ.get("RANK") == "0"


def is_restarted() -> bool:
    """Return whether torchrun has started these ranks again, because one of them had failed."""
    return _restarts() not in ("", "0")


def _restarts() -> str:
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


@contextmanager
def joined_ranks(config: TrainConfig) -> Iterator[Mesh]:
    """Give the mesh of the ranks that torchrun has started; that of one where it has not."""
    size = num_ranks()
    if size == 1:
        yield ALONE
        return
    missing = [name for name in _NAMES if name not in os.environ]
    if missing:
        raise ValueError(
            f"train expects torchrun to start its {size} ranks (WORLD_SIZE), got no "
            f"{', '.join(missing)} in the environment; docs/scaling.md has the commands."
        )
    sharing = config.num_sharing(size)
    if size % sharing or (sharing == 1 and config.shard != "none"):
        raise ValueError(
            f"train expects --ranks.shard-size above 1, by which its {size} ranks can be divided, "
            f"got {sharing}."
        )
    backend, local = "gloo", int(os.environ["LOCAL_RANK"])
    if config.device == "cuda":
        if local >= torch.cuda.device_count():
            raise ValueError(
                f"train expects a GPU for each rank of a host (--nproc-per-node), got rank {local} "
                f"of a host on which torch sees {torch.cuda.device_count()}."
            )
        torch.cuda.set_device(local)
        backend = "cpu:gloo,cuda:nccl"
    meet = timedelta(seconds=config.ranks.meet)
    try:
        store, rank, _ = next(rendezvous("env://", timeout=meet))
        # torchrun may keep its store for a restart, with the addresses of ranks that are gone.
        fresh = PrefixStore(f"funcrl/{_restarts()}", store)
        distributed.init_process_group(
            backend, store=fresh, rank=rank, world_size=size, timeout=meet
        )
    except (RuntimeError, ValueError) as error:
        raise ValueError(
            f"train expects its {size} ranks to meet within {config.ranks.meet:g} s "
            f"(--ranks.meet), got: {error}"
        ) from error
    yield make_mesh(config.ranks.timeout, shard=sharing)
    # After an error the others may be gone, which this would wait for. vLLM's engine has done it.
    if distributed.is_initialized():
        distributed.destroy_process_group()


def left_alone(error: BaseException) -> str:
    """Return what to say of an error that another rank has caused; '' of any other error."""
    text = str(error).lower()
    is_of_collective = isinstance(error, distributed.DistError) or "gloo" in text or "nccl" in text
    if num_ranks() == 1 or not is_of_collective or not any(each in text for each in _OF_OTHERS):
        return ""
    first, notes = (str(error).splitlines() or [""])[0], getattr(error, "__notes__", [])
    said = (
        f"another rank has ended or does not answer (--ranks.timeout); its own lines, or those of "
        f"torchrun, say why. Here: {first}"
    )
    return "\n".join([said, *notes])


def tell_torchrun(error: BaseException) -> None:
    """Write an error where torchrun looks for the first one of all ranks."""
    if num_ranks() > 1:
        get_error_handler().record_exception(error)
