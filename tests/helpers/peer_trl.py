"""TRL's GRPOTrainer on a rollout that is given: its own code from rewards to gradients."""

import contextlib
import warnings
from typing import Any, NamedTuple

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor, nn

ALPHABET = "0123456789+=ep?"
END, PAD = ALPHABET.index("e"), ALPHABET.index("p")
GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16, "resid_pdrop": 0.0,
        "embd_pdrop": 0.0, "attn_pdrop": 0.0}  # fmt: skip
LLAMA = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
         "num_attention_heads": 2, "num_key_value_heads": 1}  # fmt: skip
SIZES = {"GPT2": ("GPT2LMHeadModel", GPT2), "Llama": ("LlamaForCausalLM", LLAMA)}


class Given(NamedTuple):
    """What a generator drew: rows of any lengths, group-major."""

    prompts: list[list[int]]
    completions: list[list[int]]
    logprobs: list[list[float]]  # of the generator
    rewards: list[list[float]]  # of each function


class Result(NamedTuple):
    """What TRL computed of one rollout."""

    loss: Tensor  # the sum over its micro-batches, whose gradients it accumulates
    grads: dict[str, Tensor]
    metrics: dict[str, list[float]]  # as they are logged, one a micro-batch


def import_trl() -> Any:
    """Return the module; it warns where the vLLM beside it is newer than those it was made for."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "TRL currently supports vLLM", UserWarning)
        import trl

        trl.GRPOTrainer  # noqa: B018  # imported at its first mention
    return trl


def network(family: str, folder: Any) -> nn.Module:
    """Return a tiny random network that was loaded from a folder, as TRL's reference will be."""
    name, sizes = SIZES[family]
    special = {"bos_token_id": END, "eos_token_id": END}
    config = getattr(transformers, f"{family}Config")(
        vocab_size=len(ALPHABET), attn_implementation="eager", **special, **sizes
    )
    torch.manual_seed(0)
    getattr(transformers, name)(config).save_pretrained(folder)
    made: nn.Module = getattr(transformers, name).from_pretrained(
        folder, attn_implementation="eager"
    )
    return made


def tokenizer() -> Any:
    words = Tokenizer(WordLevel({each: n for n, each in enumerate(ALPHABET)}, unk_token="?"))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="e", pad_token="p"
    )


def trainer_class(in_float64: bool) -> Any:
    """Return TRL's trainer; in float64 with log-probabilities that its kernel has in float32."""
    trl = import_trl()
    if not in_float64:
        return trl.GRPOTrainer

    class Trainer(trl.GRPOTrainer):
        def _get_per_token_logps_and_entropies(
            self, model, input_ids, attention_mask, logits_to_keep, *args, **kwargs
        ):
            logits = model(input_ids=input_ids, attention_mask=attention_mask).logits[:, :-1]
            logps = (logits / self.temperature).log_softmax(-1)
            chosen = logps.gather(-1, input_ids[:, 1:, None])[..., 0]
            entropies = -(logps.exp() * logps).sum(-1)
            return chosen[:, -logits_to_keep:], entropies[:, -logits_to_keep:], None

    return Trainer


def run(
    module: nn.Module,
    given: Given,
    folder: Any,
    moved: dict[str, Tensor],
    *,
    vllm: bool = False,
    **options: Any,
) -> tuple[Any, Result]:
    """Return TRL's configuration, and the loss of the second pass over a rollout.

    The trainer draws with the parameters that the module has, and they are its old policy. Then
    the parameters `moved` take their place, as after the updates of a first pass.

    Args:
        module: a network of transformers in the dtype to compute in.
        given: takes the place of what the trainer would generate.
        folder: where it may write.
        moved: the parameters of the second pass.
        vllm: the generator is vLLM, whose log-probabilities are corrected for.
        options: of `GRPOConfig`.
    """
    from datasets import Dataset

    trl = import_trl()
    dtype = next(module.parameters()).dtype
    args = trl.GRPOConfig(
        output_dir=str(folder), bf16=False, use_cpu=True, report_to=[], disable_tqdm=True,
        gradient_checkpointing=False, num_iterations=2, max_completion_length=6, **options,
    )  # fmt: skip
    rewards = [
        _reward(name, [row[place] for row in given.rewards])
        for place, name in enumerate(["right", "format"][: len(given.rewards[0])])
    ]
    rows = [{"prompt": "1+2="}] * len(given.prompts)
    with default_dtype(dtype):
        trainer = trainer_class(dtype == torch.float64)(
            module,
            reward_funcs=rewards,
            args=args,
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer(),
            rollout_func=lambda prompts, trainer: {
                "prompt_ids": given.prompts,
                "completion_ids": given.completions,
                "logprobs": given.logprobs,
            },
        )
        if trainer.ref_model is not None:
            trainer.ref_model.to(dtype)
        if vllm:  # without an engine, whose part `rollout_func` has
            trainer.use_vllm, trainer._last_loaded_step = True, trainer.state.global_step
        trainer.model.train()
        trainer.current_gradient_accumulation_steps = args.gradient_accumulation_steps
        trainer._prepare_inputs(rows)  # the first pass: old log-probabilities, advantages
        module.load_state_dict(moved, strict=False)
        trainer._step = args.steps_per_generation
        losses = [
            trainer.training_step(trainer.model, rows, None)
            for _ in range(args.gradient_accumulation_steps)
        ]
    grads = {name: leaf.grad for name, leaf in module.named_parameters()}
    return args, Result(torch.stack(losses).sum(), grads, dict(trainer._metrics["train"]))


def _reward(name: str, values: list[float]) -> Any:
    def reward(completions, **columns):
        return values

    reward.__name__ = name
    return reward


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Any:
    """Rewards and sampled log-probabilities become tensors of torch's default dtype in TRL."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
