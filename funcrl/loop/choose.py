"""Chooses the options of speed and memory that nobody has given, for the device to train on."""

from collections.abc import Collection, Iterator
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

from funcrl.config import CompileConfig, TrainConfig
from funcrl.config.sections import is_own
from funcrl.core.arguments import checked
from funcrl.loop.memory import LONGEST, MemoryEstimate, Network, estimate_memory, num_params
from funcrl.models import Recurrent, Transformer, TransformerConfig

_FILLED = 0.92  # the share of a GPU's memory that an estimate may take
_ROW = 4096  # the most tokens of a packed row that holds several samples
_MULTIPLE = 64  # of which the length of a packed row is one
_ROWS = 16  # the number of packed rows is a multiple of at most so many
_SLOTS = 512
_BUSY = 8192  # tokens of a micro-batch that keep a GPU's products busy
_COMPILED = CompileConfig(backend="inductor", remat="selective")
_WHY = {"samples": "no padding", "prefixes": "no padding, and a prompt once for its group"}


class Chosen(NamedTuple):
    """A configuration with what was chosen for it, and why."""

    config: TrainConfig
    reasons: dict[str, str]  # by the name of each option that was chosen
    estimate: MemoryEstimate

    @property
    def line(self) -> str:
        """The choices as options of the command line."""
        flags = []
        for name in self.reasons:
            value = getattr(self.config, name)
            if isinstance(value, CompileConfig):
                flags += [f"--compile.backend {value.backend}", f"--compile.remat {value.remat}"]
            else:
                flags.append(f"--{name.replace('_', '-')} {value}")
        return " ".join(flags)


@checked
def choose_options(
    config: TrainConfig,
    given: Collection[str],
    shape: Network,
    prompt_tokens: int,
    gpu_bytes: int | None = None,
    num_turns: int = 1,
    num_ranks: int = 1,
    has_compiler: bool = True,
    teacher: Network | None = None,
) -> Chosen:
    """Return a configuration with fast options that fit a device, in the place of defaults.

    It is what `funcrl train` does, on a GPU with a network of 50 million parameters and more. On a
    CPU it chooses packed rows, if a step takes the whole batch at once and is not compiled.

    Args:
        config: the run's.
        given: the fields of it that somebody has chosen, such as "dtype": they stay. "compile" is
            one if any option of it is given.
        shape: the model's, or the model. For one that is no `Transformer` dtype, slots and
            microbatch are chosen, on a GPU.
        prompt_tokens: of the longest prompt.
        gpu_bytes: the GPU's memory; none for a CPU.
        num_turns: of an environment.
        num_ranks: that train together.
        has_compiler: whether there is a C compiler, which Triton needs.
        teacher: the model that `config.teacher` names, or its shape.

    Example:
        >>> import funcrl
        >>> from funcrl.config import Sampling, TrainConfig
        >>> config = TrainConfig(device="cuda", num_prompts=16, sampling=Sampling(max_tokens=256))
        >>> shape = funcrl.models.shape("qwen3-0.6b", vocab_size=151936)
        >>> chosen = funcrl.choose_options(config, ["slots"], shape, 128, 141 * 10**9)
        >>> chosen.config.slots, chosen.config.packing, chosen.config.pack_length
        (512, 'prefixes', 2240)
    """
    found = _Choices(config, given, teacher)
    shape = shape.config if isinstance(shape, Transformer) else shape

    def estimated(config: TrainConfig) -> MemoryEstimate:
        return estimate_memory(config, shape, prompt_tokens, num_turns, num_ranks, teacher)

    if config.device == "cpu":
        if num_turns == 1 and isinstance(shape, TransformerConfig):
            _pack_on_cpu(found, shape, prompt_tokens)
        return Chosen(found.config, found.reasons, estimated(found.config))
    if gpu_bytes is None:
        raise ValueError("choose_options expects gpu_bytes for device cuda, got none.")
    found.choose("dtype", "bfloat16", "a GPU multiplies it many times as fast as float32")
    if isinstance(shape, TransformerConfig):
        _choose_operations(found, shape, prompt_tokens if num_turns == 1 else None)
        if has_compiler:
            found.choose("compile", _COMPILED, "fewer kernels, and products alone are kept")
    samples = -(-config.num_prompts // num_ranks) * config.num_generations
    slots = min(samples, _SLOTS)
    while slots > 1 and estimated(replace(found.config, slots=slots)).cache > gpu_bytes / 4:
        slots = -(-slots // 2)
    found.choose("slots", slots, "samples drawn at once; their cache takes a quarter at most")
    length = prompt_tokens + config.sampling.max_tokens * (2 * num_turns - 1)
    chunks = ["all", 1024, 256] if isinstance(shape, TransformerConfig) else [config.logprob_chunk]
    too_large = []
    for changes in _sizes(found, length, samples, chunks):
        estimate = estimated(replace(found.config, **changes))
        if estimate.peak <= _FILLED * gpu_bytes:
            break
        too_large.append((estimate, changes))
    else:  # gradients that wait for each other can take more than a larger micro-batch
        estimate, changes = min(reversed(too_large), key=lambda each: each[0].peak)
    fits = "" if estimate.peak <= gpu_bytes else f", which does not fit. {estimate.advice}"
    reason = f"{estimate.peak / 1e9:.0f} of {gpu_bytes / 1e9:.0f} GB estimated{fits}"
    for name, value in changes.items():
        found.choose(name, value, reason)
    return Chosen(found.config, found.reasons, estimate)


class _Choices:
    """A configuration that is completed option by option."""

    def __init__(
        self, config: TrainConfig, given: Collection[str], teacher: Network | None
    ) -> None:
        self.config, self.given, self.teacher = config, given, teacher
        self.reasons: dict[str, str] = {}

    def choose(self, name: str, value: Any, reason: str) -> None:
        """Set an option that was not given and has another value."""
        if name not in self.given and getattr(self.config, name) != value:
            self.config = replace(self.config, **{name: value})
            self.reasons[name] = reason


def _choose_operations(found: _Choices, shape: TransformerConfig, prompt: int | None) -> None:
    """Choose how funcrl's own network attends, and how rows with prompts of a turn are packed."""
    halves = found.config.dtype == "bfloat16"
    if found.config.numerics == "native" and halves and shape.head_width in range(8, 257, 8):
        found.choose("attend", "flash", "no scores of all pairs of tokens are in memory")
    if prompt is not None:
        _pack(found, shape, prompt)


def _pack_on_cpu(found: _Choices, shape: TransformerConfig, prompt: int) -> None:
    """Choose packed rows where attention to a whole one costs less than the weights' products."""
    config = found.config
    if config.microbatch is not None or config.compile is not None:
        return  # the caller chose both for rows that are not packed
    row = LONGEST * (prompt + config.sampling.max_tokens)
    attention = 2 * row * shape.num_heads * shape.head_width * shape.num_layers
    # Without prompts to share it gains little.
    if attention <= num_params(shape) and _packing_for(found, shape) == "prefixes":
        found.choose("packing", "prefixes", _WHY["prefixes"])


def _packing_for(found: _Choices, shape: TransformerConfig) -> str | None:
    """Return how rows can be packed; None if that is given, or packing is not for this run."""
    config, teacher = found.config, found.teacher
    refuses = config.optimizer.clip_per_sample is not None or config.algorithm.name == "ppo"
    named = {"packing", "pack_length", "pack_rows"} & {*found.given}
    # A teacher of one's own that has distributions is a network that is not known yet.
    is_unknown = config.teacher is not None and config.algorithm.divergence != "sampled"
    if refuses or named or is_own(config.algorithm.name) or (is_unknown and teacher is None):
        return None
    of_networks = [_packing_of(each) for each in (shape, teacher) if each is not None]
    if None in of_networks:
        return None
    return "samples" if config.is_supervised or "samples" in of_networks else "prefixes"


def _packing_of(network: Network) -> str | None:
    """Return how rows can be packed for a network; None if it would mix their samples."""
    shape = network.config if isinstance(network, Transformer) else network
    if isinstance(shape, TransformerConfig):
        return "samples" if "delta" in shape.kinds else "prefixes"
    return "samples" if isinstance(network, Recurrent) else None


def _pack(found: _Choices, shape: TransformerConfig, prompt: int) -> None:
    """Choose packed rows and their sizes, unless an option of theirs is given."""
    config = found.config
    if config.attend == "native" and config.numerics == "native":
        return  # all scores of a long row would be in memory
    packing = _packing_for(found, shape)
    if packing is None:
        return
    found.choose("packing", packing, _WHY[packing])
    completion, copies = config.sampling.max_tokens, config.num_generations
    together = copies * (prompt + completion)
    if packing == "prefixes":
        together -= (copies - 1) * max(prompt - 1, 0)
    length = max(min(together, _ROW), prompt + completion)
    length += -length % _MULTIPLE
    found.choose("pack_length", length, "a group, or some of its samples")
    rows = -(-config.num_prompts * together // length)
    multiple = min(_ROWS, 1 << max(rows.bit_length() - 1, 0))
    found.choose("pack_rows", multiple, "few shapes to compile")


def _sizes(
    found: _Choices, length: int, samples: int, chunks: list[Any]
) -> Iterator[dict[str, Any]]:
    """Yield micro-batches from large to small, with all logits kept where tokens are enough.

    Where a compiled step was chosen, they come once more with everything computed again.
    """
    config, given = found.config, found.given
    row = length if config.packing == "none" else config.pack_length or length
    most = samples if config.packing == "none" else config.pack_rows
    rows = [1 << power for power in range(most.bit_length() - 1, -1, -1) if 1 << power <= most]
    if "microbatch" in given:
        rows = [config.microbatch or samples]
    if "logprob_chunk" in given:
        chunks = [config.logprob_chunk]
    steps = [config.compile]
    if "compile" in found.reasons:
        steps.append(replace(_COMPILED, remat="full"))
    for step, chunk, count in product(steps, chunks, rows):
        if chunk != "all" or count * row >= _BUSY or len(chunks) == 1:
            changes = {"microbatch": count, "logprob_chunk": chunk, "compile": step}
            yield {name: value for name, value in changes.items() if name not in given}
