"""A task whose reward does what it may not, and a run of a second that asks for it."""

from funcrl.config import CheckpointConfig, EvaluationConfig, Sampling, TrainConfig, WarmStartConfig
from funcrl.tasks import SumDigits


def small(run_dir, **options):
    """A run of a second."""
    return TrainConfig(**{
        "run_dir": run_dir, "steps": 2, "num_prompts": 3, "num_generations": 4,
        "sampling": Sampling(max_tokens=3), "warm_start": WarmStartConfig(steps=0),
        "evaluation": EvaluationConfig(every=0), "checkpoint": CheckpointConfig(every=2), **options,
    })  # fmt: skip


class Meddling(SumDigits):
    """Whose reward calls a function first, for some completions."""

    name = "meddling"

    def __init__(self, meddle):
        super().__init__()
        self.meddle = meddle

    def reward(self, prompt, completion):
        if len(completion) == 3:
            self.meddle()
        return {"correct": float(len(completion) == 2), "short": float(completion[:1] > "4")}
