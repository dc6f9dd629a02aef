"""Groups of options of a run: the algorithm, the optimizer, and what happens beside the steps."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

from funcrl.config.generation import Temperature
from funcrl.core.arguments import (
    CheckedFields,
    Count,
    Decay,
    Finite,
    FiniteNotNegative,
    FinitePositive,
    Fraction,
    Kind,
    Natural,
    Positive,
    check_fields,
)

ALGORITHMS = (
    "grpo", "dr_grpo", "dapo", "gspo", "cispo", "sapo", "rloo", "reinforce", "ppo", "distill",
    "sft",
)  # fmt: skip
# Those without a policy gradient, which read no reward and compare no completions.
WITHOUT_REWARDS = ("distill", "sft")
# Those that learn from a completion by itself, not from how it compares with its group.
BY_ITSELF = ("reinforce", "ppo", *WITHOUT_REWARDS)
OPTIMIZERS = ("adamw", "sgd", "muon")
GENERATORS = ("sampler", "vllm")
_OF_A_POLICY_GRADIENT = ("max_importance", "top_entropy", "off_policy_mask", "reference_every")
# Options of a critic and of the advantages that it gives.
_OF_A_CRITIC = ("value", "value_clip", "gamma", "lam", "whiten")


def is_own(name: str) -> bool:
    """Return whether a name is one of a user's code, file.py:Name or module:Name."""
    place, _, attribute = name.rpartition(":")
    names = attribute.split(".")
    return bool(place) and all(each.isidentifier() for each in names) and place != "pypi"


def _one_of(names: tuple[str, ...]) -> Kind:
    return Kind(
        f"one of {', '.join(names)}, or your own as file.py:name",
        lambda value: isinstance(value, str) and (value in names or is_own(value)),
        is_of_type=lambda value: isinstance(value, str),
    )


AlgorithmName: TypeAlias = Annotated[str, _one_of(ALGORITHMS)]
OptimizerName: TypeAlias = Annotated[str, _one_of(OPTIMIZERS)]
GeneratorName: TypeAlias = Annotated[str, _one_of(GENERATORS)]
_UNCLIPPED = ("sapo", "rloo", "reinforce", *WITHOUT_REWARDS)
_UNSCALED = ("dr_grpo", "rloo", *BY_ITSELF)


@dataclass(frozen=True)
class AlgorithmConfig:
    """What is learned from: rewards, a teacher, given answers; see docs/algorithms.md."""

    name: AlgorithmName = "grpo"
    """grpo, dr_grpo, dapo, gspo, cispo, sapo, rloo, reinforce or ppo, which learn from rewards;
    distill, from a teacher alone; sft, from the task's own answers; or one's own as
    file.py:name."""
    clip: tuple[FiniteNotNegative, ...] = ()
    """How far below and above 1 a ratio may be (TRL's epsilon and epsilon_high), such as 0.2 0.28;
    as the algorithm's paper says when left out. Refused where importance weights correct for the
    generator (see max_importance), since nothing is clipped then."""
    scale_rewards: Literal["group", "batch", "none"] | None = None
    """Whose deviation divides the advantage; as the algorithm's paper says when left out."""
    kl: FiniteNotNegative = 0.1
    """Coefficient of the KL penalty to the policy before the first step (TRL's beta). It keeps
    answers alive that a small policy would forget; 0 needs no reference and is faster."""
    kl_estimator: Literal["k1", "k2", "k3", "k1+", "k3+"] = "k3"
    """The formula that estimates the KL divergence from samples."""
    reference_every: Count | None = None
    """Move the reference of the KL penalty towards the policy each time that so many steps are done
    (TRL's ref_model_sync_steps with sync_ref_model); when left out it stays."""
    reference_mixup: Fraction = 0.6
    """How far the reference moves: 1 is to the policy (TRL's ref_model_mixup_alpha)."""
    entropy: Finite = 0.02
    """Coefficient of the entropy bonus: without one, a small policy settles on wrong answers. Its
    tokens are weighed as the loss's are; TRL's entropy_coef takes their mean, as dapo does."""
    max_importance: Positive | None = None
    """Truncate the importance weights that correct for a generator whose log-probabilities are not
    quite the policy's here; when left out 2 with vLLM or with a max_staleness above 0, and no
    correction otherwise. The weights are those at each update, and with them nothing is clipped."""
    top_entropy: Fraction = 1.0
    """Learn from this share of an update's sampled tokens alone, those of the highest entropy
    (TRL's top_entropy_quantile)."""
    off_policy_mask: FinitePositive | None = None
    """Learn nothing from a completion of negative advantage whose tokens the policy has made less
    likely by this much since, in nats as a mean (TRL's off_policy_mask_threshold)."""
    value: FiniteNotNegative = 0.1
    """Coefficient of the critic's error (TRL's vf_coef); ppo alone has a critic, and the options
    after this one up to teacher."""
    value_clip: FinitePositive = 0.2
    """How far a value may move in one rollout (TRL's cliprange_value)."""
    gamma: Fraction = 1.0
    """The discount of rewards to come."""
    lam: Fraction = 0.95
    """How far advantages look ahead for rewards, against the critic's own estimate."""
    whiten: bool = True
    """Shift and scale advantages over the batch to mean 0 and deviation 1."""
    teacher: FinitePositive = 1.0
    """Coefficient of the divergence from the teacher, its mean over tokens."""
    divergence: Literal["reverse", "forward", "sampled"] = "reverse"
    """The divergence: reverse is KL(policy, teacher) and forward KL(teacher, policy), over the
    whole vocabulary; sampled is an estimate of the first from the tokens that were drawn."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.clip and not (len(self.clip) == 2 and self.clip[0] <= 1):
            raise ValueError(
                f"AlgorithmConfig expects clip to be two numbers, of which the first is at most 1, "
                f"got {self.clip}."
            )
        if self.clip and self.name in _UNCLIPPED:
            raise ValueError(
                f"train expects no --algorithm.clip with {self.name}, which clips nothing, got "
                f"{self.clip}."
            )
        if self.scale_rewards is not None and self.name in _UNSCALED:
            raise ValueError(
                f"train expects no --algorithm.scale-rewards with {self.name}, which does not "
                f"divide by a deviation, got {self.scale_rewards}."
            )
        if self.reference_every is None and self._given(["reference_mixup"]):
            raise ValueError(
                f"train expects --algorithm.reference-every with --algorithm.reference-mixup "
                f"{self.reference_mixup}, got none."
            )
        for name in self._given(_OF_A_CRITIC if self.name != "ppo" else ()):
            raise ValueError(
                f"train expects --algorithm ppo, which has a critic, with --algorithm."
                f"{name.replace('_', '-')}, got {self.name}."
            )
        for name in self._given(_OF_A_POLICY_GRADIENT if self.name in WITHOUT_REWARDS else ()):
            raise ValueError(
                f"train expects no --algorithm.{name.replace('_', '-')} with {self.name}, "
                f"which has no policy gradient, got {getattr(self, name)}."
            )

    def _given(self, names: Sequence[str]) -> list[str]:
        """Return those of some options that do not have their defaults."""
        return [name for name in names if getattr(self, name) != getattr(type(self), name)]


@dataclass(frozen=True)
class OptimizerConfig(CheckedFields):
    """The optimizer, after clipping to a global norm."""

    name: OptimizerName = "adamw"
    """adamw, sgd, muon (for matrices, and AdamW for the rest), or one's own as file.py:name, a
    function of learning_rate."""
    learning_rate: FinitePositive = 2e-3
    """The highest learning rate; a pretrained model wants 1e-6 to 1e-5."""
    schedule: Literal["constant", "linear", "cosine"] = "linear"
    """What the learning rate does after the warm-up; linear and cosine end at 0 after the last
    update."""
    warmup: Natural = 20
    """The number of updates over which the learning rate rises from 0."""
    weight_decay: FiniteNotNegative = 0.0
    """The optimizer's weight decay, of all parameters."""
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """How slowly AdamW's two moments forget, such as 0.9 0.95 (TRL's adam_beta1 and adam_beta2)."""
    moments: Literal["float32", "8bit"] = "float32"
    """How adamw keeps its two moments; 8bit takes a quarter of the memory."""
    max_grad_norm: Positive = 1.0
    """The gradient is scaled down to this norm."""
    clip_per_sample: Positive | None = None
    """The gradient of each sample is scaled down to this norm before they are summed; inf measures
    them alone. Its metrics are per_sample/*, and it needs one sample a row."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.moments == "8bit" and self.name != "adamw":
            raise ValueError(
                f"train expects --optimizer.name adamw with --optimizer.moments 8bit, got "
                f"{self.name}."
            )
        if self.betas != OptimizerConfig.betas and self.name == "sgd":
            raise ValueError(
                f"train expects --optimizer.name adamw or muon with --optimizer.betas "
                f"{' '.join(map(str, self.betas))}, got sgd, which has no moments."
            )


# How a matrix that has an adapter is kept.
BaseDtype: TypeAlias = Literal["float32", "bfloat16", "int8", "nf4"]


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters, trained in place of the parameters themselves (arXiv:2106.09685)."""

    rank: Natural = 0
    """The rank of each adapter, often 8 to 64; 0 trains all parameters instead."""
    alpha: FinitePositive = 16.0
    """An adapter is scaled by alpha / rank."""
    targets: tuple[str, ...] = (".attention.", ".mlp.", ".delta.qkv.", ".delta.z.", ".delta.o.")
    """Matrices whose names hold one of these get an adapter; when left out, of a model of
    transformers all linear layers but the head."""
    base_dtype: BaseDtype = "float32"
    """How the matrices with an adapter are kept: nf4 has 4.5 bits a number with its scale (QLoRA),
    int8 8.5. The other parameters are then in --dtype."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.rank and not self.targets:
            raise ValueError("LoraConfig expects targets for its adapters, got none.")
        if self.is_rounded and not self.rank:
            raise ValueError(
                f"LoraConfig expects --lora.rank above 0 with a base in {self.base_dtype}, which "
                f"is not trained, got 0."
            )

    @property
    def is_rounded(self) -> bool:
        """Whether the base is kept in fewer bits than its own."""
        return self.base_dtype != "float32"

    def adapts(self, name: str) -> bool:
        """Return whether a matrix of this name gets an adapter."""
        return any(part in name for part in self.targets)


@dataclass(frozen=True)
class WarmStartConfig(CheckedFields):
    """Supervised steps on the task's own answers first, since a random policy earns no reward."""

    steps: Natural = 400
    """The largest number of supervised steps; 0 for none."""
    accuracy: Fraction = 0.3
    """Stop as soon as this fraction of the held-out prompts is answered correctly."""
    every: Count = 5
    """The number of steps between two measurements of the accuracy."""
    num_prompts: Count = 64
    """The number of answers in each step."""
    learning_rate: FinitePositive = 1e-3
    """AdamW's learning rate in these steps."""


@dataclass(frozen=True)
class EvaluationConfig(CheckedFields):
    """Accuracy on held-out prompts, before the first step, every so often, and after the last."""

    every: Natural = 25
    """The number of steps between two evaluations; 0 for none."""
    num_prompts: Count = 100
    """The largest number of held-out prompts to ask."""
    temperature: Temperature = 0.0
    """The sampling temperature; 0 takes the most likely tokens."""


@dataclass(frozen=True)
class CheckpointConfig(CheckedFields):
    """What is kept to resume from: the first, the last and every so many steps, or nothing."""

    every: Natural = 50
    """The number of steps between two checkpoints, the last step has one besides; 0 keeps none, so
    that the run can be neither resumed nor evaluated later."""
    keep_last: Count = 3
    """The number of newest checkpoints to keep."""
    keep_best: Natural = 1
    """The number of checkpoints with the highest accuracy to keep besides."""


@dataclass(frozen=True)
class LogConfig(CheckedFields):
    """What is written down besides metrics.jsonl."""

    completions_every: Count = 25
    """The number of steps between two at which completions are shown and written down."""
    num_completions: Count = 8
    """The number of completions that are written down at such a step."""
    trackers: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ()
    """Where the metrics go besides the run's own files; each of these must be installed."""


@dataclass(frozen=True)
class RanksConfig(CheckedFields):
    """Several processes that torchrun starts, which train one run together."""

    timeout: FinitePositive = 600.0
    """The seconds after which a rank that the others wait for ends the run."""
    meet: FinitePositive = 60.0
    """The seconds within which all ranks must have started."""
    shard_size: Count | None = None
    """With shard: how many neighbouring ranks hold a state together, such as the GPUs of a host;
    other groups hold the same one (FSDP's hybrid sharding). All ranks when left out."""
