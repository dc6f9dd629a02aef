"""What a long run holds: `python tests/helpers/long_run.py FOLDER STEPS [STEPS_PER_CHECKPOINT]`.

Prints, after each tenth of the steps, the memory that is resident once what is free has been given
back to the system (MiB), the open files, the files of the run's folder, the threads, the objects
that Python tracks, and on a GPU the memory that torch has allocated and reserved there (MiB): a
column that goes straight up is a leak. Options:

    --backend eager|aot_eager|inductor   the training step is compiled
    --cudagraph full                     and replayed from a CUDA graph
    --device cuda
    --max-tokens N                       completions of up to N tokens: batches of many shapes
"""

import argparse
import ctypes
import gc
import sys
from pathlib import Path

import torch

import funcrl
from funcrl.config import (
    CheckpointConfig,
    CompileConfig,
    EvaluationConfig,
    Sampling,
    TrainConfig,
    WarmStartConfig,
)
from funcrl.run.views import SilentView

COLUMNS = ("MiB", "open", "files", "threads", "objects", "GPU MiB", "reserved")


def held(folder: Path, device: str) -> tuple[float, ...]:
    """Return the numbers of a line."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20
    numbers = (
        resident,
        len(list(Path("/proc/self/fd").iterdir())),
        sum(path.is_file() for path in folder.rglob("*")),
        len(list(Path("/proc/self/task").iterdir())),
        len(gc.get_objects()),
    )
    if device != "cuda":
        return numbers
    return (*numbers, torch.cuda.memory_allocated() / 2**20, torch.cuda.memory_reserved() / 2**20)


class Held(SilentView):
    """A view that prints what the process holds, and notes."""

    def __init__(self, folder: Path, device: str, every: int) -> None:
        self.folder, self.device, self.every = folder, device, every

    def step(self, row, completion):
        if row["step"] % self.every == 0:
            cells = [f"{number:10.1f}" for number in held(self.folder, self.device)]
            print(f"{row['step']:6}", *cells, flush=True)

    def note(self, text):
        print(text, file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("steps", type=int)
    parser.add_argument("every", type=int, nargs="?", default=0)
    parser.add_argument("--backend")
    parser.add_argument("--cudagraph", default="none")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--max-tokens", type=int, default=2)
    given = parser.parse_args()
    compiled = None
    if given.backend is not None:
        compiled = CompileConfig(backend=given.backend, cudagraph=given.cudagraph)
    config = TrainConfig(
        run_dir=given.folder, steps=given.steps, num_prompts=2, num_generations=2, threads=1,
        device=given.device, compile=compiled, sampling=Sampling(max_tokens=given.max_tokens),
        warm_start=WarmStartConfig(steps=0), evaluation=EvaluationConfig(every=0),
        checkpoint=CheckpointConfig(every=given.every),
    )  # fmt: skip
    print(" steps", *(f"{name:>10}" for name in COLUMNS))
    funcrl.train(config, view=Held(given.folder, given.device, max(given.steps // 10, 1)))


if __name__ == "__main__":
    main()
