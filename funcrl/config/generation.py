"""Options of what generates (sampling, vLLM, compilation), and of `funcrl eval`."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from funcrl.core import checks
from funcrl.core.arguments import Count, Fraction, Natural, TopP, check_fields, number

Temperature: TypeAlias = Annotated[  # smaller ones overflow float32
    float, number("0, or from 1e-6 to 1e6", lambda value: value == 0 or 1e-6 <= value <= 1e6)
]
Form: TypeAlias = Literal["native", "unified", "server"]


@dataclass(frozen=True)
class Sampling:
    """How completions are drawn. Truncations apply in the order top-k, top-p, min-p."""

    num_samples: Count = 1
    """The number of completions of each prompt: the group that an advantage compares."""
    max_tokens: Count = 64
    """The largest number of tokens in a completion."""
    min_tokens: Natural = 0
    """The number of first tokens that end no completion: none of them is a stop token, and no stop
    string that ends in them counts."""
    temperature: Temperature = 1.0
    """Divides the logits; 0 takes the most likely token."""
    top_k: Natural = 0
    """Only the k most likely tokens (ties at the last place included); 0 for all."""
    top_p: TopP = 1.0
    """Only the most likely tokens that make up this probability (ties at the last included)."""
    min_p: Fraction = 0.0
    """Only tokens at least this probability times that of the most likely one."""
    stop_tokens: tuple[Natural, ...] = ()
    """The tokens that end a completion; the one that is drawn is its last token."""
    stop: tuple[str, ...] = ()
    """A completion ends as soon as its text contains one of these strings, wherever that began."""

    def __post_init__(self) -> None:
        check_fields(self)
        checks.check_range("Sampling", "min_tokens", self.min_tokens, 0, self.max_tokens)
        if "" in self.stop:
            raise ValueError("Sampling expects stop strings of at least one character, got ''.")

    @property
    def truncates(self) -> bool:
        """Whether some tokens are never drawn, so that the others are likelier than they were."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0 or self.min_tokens > 0


@dataclass(frozen=True)
class CompileConfig:
    """How the training step is compiled; without one it runs as it is written."""

    backend: Literal["eager", "aot_eager", "inductor"] = "eager"
    """eager runs each operation of the traced graph by itself, and so does aot_eager, through
    torch's compiler: both keep every bit. inductor fuses operations, which changes rounding."""
    cudagraph: Literal["none", "full"] = "none"
    """full records the kernels of a step once and replays them together; it needs a GPU."""
    fuse: Literal["none", "per_sample"] = "per_sample"
    """per_sample computes sums and norms of per-sample gradients without making the gradients,
    which changes their rounding."""
    remat: Literal["none", "full", "selective", "budget"] = "none"
    """What the backward pass computes again to save memory. full: everything; selective: all but
    matrix products and attention; budget: the least that fits remat_budget."""
    remat_budget: Natural = 0
    """The bytes that remat budget has to fit."""
    max_shapes: Count = 8
    """The largest number of batch shapes that are compiled; others run uncompiled."""
    cache_dir: Path | None = None
    """The folder that keeps inductor's results, so that the next process starts fast."""

    def __post_init__(self) -> None:
        check_fields(self)
        if (self.remat == "budget") != (self.remat_budget > 0):
            raise ValueError(
                f"CompileConfig expects remat_budget > 0 with remat budget and 0 without, got "
                f"remat_budget {self.remat_budget} with remat {self.remat}."
            )
        if self.cache_dir is not None and self.backend != "inductor":
            raise ValueError(
                f"CompileConfig expects backend inductor with cache_dir, which keeps its results, "
                f"got backend {self.backend}."
            )


@dataclass(frozen=True)
class VLLMCompileConfig:
    """How vLLM compiles the network that it generates with, by vLLM's own modes."""

    backend: Literal["eager", "inductor"] = "eager"
    """eager runs each operation as it is written; inductor fuses operations, which changes
    rounding."""
    cudagraph: Literal["none", "piecewise", "full"] = "none"
    """Replay kernels without launching each: all but attention (piecewise), or all (full); on a
    GPU."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.backend != "inductor" and self.cudagraph == "piecewise":
            raise ValueError(
                f"VLLMCompileConfig expects backend inductor with cudagraph piecewise, whose "
                f"pieces it makes, got backend {self.backend}."
            )

    @property
    def is_eager(self) -> bool:
        """Whether nothing is compiled and nothing recorded."""
        return self.backend == "eager" and self.cudagraph == "none"


@dataclass(frozen=True)
class ServerConfig:
    """vLLM servers, which are started with a run and end with it."""

    network: Literal["native", "unified"] = "unified"
    """native computes with vLLM's own class for the architecture, as is always done for a model of
    transformers, unified with funcrl's `Transformer`."""
    devices: tuple[Natural, ...] = ()
    """The GPUs, as nvidia-smi counts them, that have a server each; with none there is one server,
    where the trainer is."""
    transfer: Literal["auto", "shared_memory", "nccl"] = "auto"
    """How parameters reach the servers: through memory of this host, or from GPU to GPU. auto takes
    nccl where there are `devices`."""
    start_seconds: Count = 600
    """The number of seconds after which a server that has not started is given up."""
    answer_seconds: Count = 1800
    """The number of seconds that an answer of a server may take, such as a completion, with its
    wait for others; a server that takes longer is given up."""

    def __post_init__(self) -> None:
        check_fields(self)
        if len(set(self.devices)) < len(self.devices):
            raise ValueError(
                f"ServerConfig expects devices to be different GPUs, got {self.devices}."
            )
        if self.transfer == "nccl" and not self.devices:
            raise ValueError(
                "ServerConfig expects devices, GPUs besides the trainer's, with transfer nccl, "
                "got none."
            )


@dataclass(frozen=True)
class VLLMConfig:
    """A vLLM engine: in this process, or in servers of its own."""

    form: Form = "unified"
    """native runs vLLM's own class for the architecture, as is always done for a model of
    transformers, unified funcrl's `Transformer` inside vLLM, both in this process; server runs
    either in servers of their own."""
    attention: Literal["auto", "vllm", "funcrl"] = "auto"
    """The attention of the unified form: vLLM's kernel on its paged cache, or funcrl's own there.
    auto takes vLLM's where it has one for the model's head width, and the numerics are native."""
    context_length: Count = 2048
    """The largest number of tokens of a prompt and its completion; the model's own limit if that is
    less."""
    slots: Count = 64
    """The number of samples that are under way at a time."""
    cache_bytes: Natural = 0
    """The size of the cache of keys and values, never more than `slots` samples of `context_length`
    can fill. 0 is what the trainer will leave of the GPU at its peak, and 1 GiB on a CPU."""
    batched_tokens: Count = 8192
    """The largest number of prompt tokens in one forward pass."""
    logprobs: Literal["policy", "sampling"] = "policy"
    """Which log-probabilities vLLM keeps where the two differ: the policy's own, or those of the
    distribution that was sampled from. The other is NaN then; a trainer needs `logprob_fn` at
    temperature 1 for the first, and at that of sampling for the second."""
    sleep: bool = False
    """Give the cache and vLLM's own weights up after `generate`, so that the update has their
    memory; what is generated next wakes the engine. Needs a GPU."""
    compile: VLLMCompileConfig = field(default_factory=VLLMCompileConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    """The servers of `--vllm.form server`."""

    @property
    def network(self) -> str:
        """What is computed with: vLLM's "native" class, or funcrl's "unified" one."""
        return self.server.network if self.form == "server" else self.form

    def __post_init__(self) -> None:
        check_fields(self)
        if self.sleep and self.form == "server":
            raise ValueError(
                "VLLMConfig expects no sleep with form server, whose memory is its own, got both."
            )


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
    reward_model: str | None = None
    """A sequence classifier, as for `funcrl train`; likewise."""
    prompt_template: str | None = None
    """The text of a prompt from rows of data, as for `funcrl train`; the run's own when left
    out."""
    prompt_column: str | None = None
    """The column with the prompts, as for `funcrl train`; the run's own when left out."""
    answer_column: str | None = None
    """The column with the answers, as for `funcrl train`; the run's own when left out."""
    split: str | None = None
    """The split of a data set, as for `funcrl train`; the run's own when left out."""
    test_split: str | None = None
    """The split to evaluate on, as for `funcrl train`; the run's own when left out."""
    held_out: Fraction | None = None
    """The share of the rows to evaluate on; when left out the rows that the run held out, and all
    rows of a file or a split that it was not trained on."""
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
    enable_thinking: bool | None = None
    """Whether the chat template lets the model think first, as for `funcrl train`; the run's own
    when left out."""
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
