"""The memory of a long run: `python tests/helpers/long_run.py FOLDER STEPS STEPS_PER_CHECKPOINT`.

Prints what is resident after each tenth of the steps, in MiB, once what is free has been given
back to the system: a straight line up is a leak.
"""

import ctypes
import gc
import sys
from pathlib import Path

import funcrl
from funcrl.config import CheckpointConfig, EvaluationConfig, Sampling, TrainConfig, WarmStartConfig
from funcrl.run.views import SilentView


def resident() -> float:
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20


class Memory(SilentView):
    """A view that shows memory, and what is said."""

    def __init__(self, every: int) -> None:
        self.every = every

    def step(self, row, completion):
        if row["step"] % self.every == 0:
            print(f"{row['step']:6} steps {resident():8.1f} MiB", flush=True)

    def note(self, text):
        print(text, file=sys.stderr)


def main(folder: str, steps: int, every: int) -> None:
    config = TrainConfig(
        run_dir=Path(folder), steps=steps, num_prompts=2, num_generations=2, threads=1,
        sampling=Sampling(max_tokens=2), warm_start=WarmStartConfig(steps=0),
        evaluation=EvaluationConfig(every=0), checkpoint=CheckpointConfig(every=every),
    )  # fmt: skip
    funcrl.train(config, view=Memory(steps // 10))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
