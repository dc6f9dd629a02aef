"""The options of `funcrl eval`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from funcrl.config.generation import Temperature, TopP
from funcrl.core import checks
from funcrl.core.arguments import Count, Fraction, Natural, check_fields


@dataclass(frozen=True)
class EvalConfig:
    """Accuracy, pass@k and majority@k of a run's last checkpoint, or of a model."""

    run: Path | None = None
    """The folder of a run, whose last checkpoint, task and limits are taken."""
    model: str | None = None
    """Without a run: a shape, or pretrained weights, as for `funcrl train`; micro when left out."""
    task: str | None = None
    """The task, as for `funcrl train`; the run's own, or sum_digits, when left out."""
    reward: tuple[str, ...] = ()
    """Rewards, as for `funcrl train`; those of the run with its own task when left out."""
    prompt_template: str | None = None
    """The text of a prompt from a file of rows, as for `funcrl train`; the run's own when left
    out."""
    held_out: Fraction | None = None
    """The share of a file's rows to evaluate on; when left out the rows that the run held out, and
    all rows of a file that it was not trained on."""
    num_prompts: Count = 100
    """The largest number of held-out prompts to ask."""
    num_samples: Count = 1
    """The number of completions of each prompt."""
    ks: tuple[Count, ...] = (1,)
    """Each k of pass@k and majority@k; none may be above num_samples."""
    temperature: Temperature = 0.0
    """0 takes the most likely token, and then one sample says it all."""
    top_p: TopP | None = None
    """Top-p as in training; the run's own when left out, as for everything else about drawing."""
    top_k: Natural | None = None
    """Top-k as in training; the run's own when left out."""
    max_tokens: Count | None = None
    """The largest number of tokens in a completion; the run's limit when left out."""
    system_prompt: str | None = None
    """The system's message, as for `funcrl train`; the run's own when left out."""
    seed: Natural = 0
    """The seed of the draws."""
    device: Literal["cpu", "cuda"] = "cpu"
    """The device to run on."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """The dtype to compute in."""
    threads: Count | None = None
    """The number of CPU threads, torch's default when left out."""
    slots: Count = 256
    """The number of samples that are drawn at a time."""
    out: Path | None = None
    """Write every completion here, one JSON object a line."""
    json: Path | None = None
    """Write the result here as well."""

    def __post_init__(self) -> None:
        check_fields(self, "evaluate")
        if self.run is not None and self.model is not None:
            raise ValueError(f"evaluate expects --run or --model, got both ({self.model}).")
        for k in self.ks:
            checks.check_range("evaluate", "--ks", k, 1, self.num_samples)
        if self.temperature == 0 and self.num_samples > 1:
            raise ValueError(
                f"evaluate expects --temperature above 0 for {self.num_samples} samples of a "
                f"prompt, which would be equal, got 0."
            )
