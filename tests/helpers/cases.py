"""Random rollouts, a model that is a table, and a command's end: what several tests share."""

import copy
from typing import NamedTuple

import torch
from torch import Tensor

import funcrl
from funcrl import cli, tree


class Case(NamedTuple):
    """A ragged rollout, and the policy's and the reference's scores of it."""

    rollout: funcrl.Rollout
    params: dict[str, Tensor]  # logprobs [B, T] and entropy [B, T]: the policy is a table
    ref_logprobs: Tensor  # [B, T]


def random_case(
    seed: int = 0,
    prompts: int = 3,
    samples: int = 4,
    length: int = 9,
    dtype: torch.dtype = torch.float64,
    spread: float = 0.4,
    completion: int | None = None,
) -> Case:
    """Make one case; `spread` is how far the policy has moved from the sampling one.

    Completions are ragged unless `completion` fixes their length; one row is fully masked.
    """
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    rows = prompts * samples
    start = torch.randint(1, 3, (rows, 1), generator=generator)
    if completion is None:
        count = torch.randint(1, length - 2, (rows, 1), generator=generator)
        count[-1] = 0
    else:
        count = torch.full((rows, 1), completion)
    place = torch.arange(length)
    mask = (place >= start) & (place < start + count)
    behavior = -3 * rand(rows, length)
    logprobs = (behavior + spread * (2 * rand(rows, length) - 1)).clamp(max=0)
    rollout = funcrl.Rollout(
        # The first token is the row's number: the table model reads its row there.
        tokens=torch.arange(rows)[:, None].expand(rows, length).contiguous(),
        mask=mask,
        behavior_logprobs=behavior.to(dtype),
        rewards=torch.randint(0, 5, (rows,), generator=generator).to(dtype) / 4,
        group=torch.arange(prompts).repeat_interleave(samples),
        policy_version=torch.zeros(rows, dtype=torch.int64),
    )
    params = {"logprobs": logprobs.to(dtype), "entropy": (2 * rand(rows, length)).to(dtype)}
    reference = (logprobs + 0.5 * (2 * rand(rows, length) - 1)).clamp(max=0)
    return Case(rollout, params, reference.to(dtype))


def table_model(params: dict[str, Tensor], sample: funcrl.Batch) -> funcrl.TokenScores:
    """Read the row's scores from the parameters: what the loss does to them is all that is left."""
    row = sample.tokens[:1]
    return funcrl.TokenScores(
        *(params[name].index_select(0, row).squeeze(0) for name in ("logprobs", "entropy"))
    )


def cell_model(params: dict[str, Tensor], sample: funcrl.types.Row) -> funcrl.TokenScores:
    """Each token is the number of its cell in the table, wherever it lies.

    So no sample of a packed row sees another: reading where they begin says that it is known.
    """
    for name in ("segment_ids", "prefix_ids"):
        getattr(sample, name, ())
    cells = (params[name].reshape(-1) for name in ("logprobs", "entropy"))
    return funcrl.TokenScores(*(cell.index_select(0, sample.tokens) for cell in cells))


def tiny_model(vocab_size: int = 11, **options: object) -> funcrl.models.Transformer:
    """Return a two-layer transformer."""
    shape = {"width": 16, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "head_width": 8,
             "mlp_width": 24}  # fmt: skip
    config = funcrl.models.TransformerConfig(vocab_size=vocab_size, **{**shape, **options})
    return funcrl.models.Transformer(config)


class SmallLayer(torch.nn.Module):
    """Of few kernels: Inductor takes the better part of a second for each."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = torch.nn.Linear(width, 4 * width, bias=False)
        self.down = torch.nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        return x + self.down(h.sin() * h.exp().tanh())


def small_network(num_layers: int, width: int = 16) -> torch.nn.Sequential:
    """Return a network of such layers, for tokens below 11."""
    layers = (SmallLayer(width) for _ in range(num_layers))
    return torch.nn.Sequential(
        torch.nn.Embedding(11, width), *layers, torch.nn.Linear(width, 11, bias=False)
    )


def tiny_batch(
    seed: int = 0, rows: int = 6, length: int = 7, dtype: torch.dtype = torch.float64
) -> funcrl.Batch:
    """Return a ragged batch of tokens below 11 for `tiny_model`, with GRPO's weights."""
    case = random_case(seed, prompts=rows // 2, samples=2, length=length, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 11, (rows, length), generator=generator)
    rewards = torch.randn(rows, generator=generator, dtype=dtype)
    rollout = case.rollout._replace(tokens=tokens, rewards=rewards)
    return funcrl.collate(rollout, funcrl.grpo())


def table_params(batch: funcrl.Batch) -> dict[str, Tensor]:
    """Return a table on-policy with the batch."""
    return {
        "logprobs": batch.behavior_logprobs.clone(),
        "entropy": torch.ones_like(batch.behavior_logprobs),
    }


def equal(a: object, b: object) -> bool:
    """Whether two trees of tensors have the same dtypes, shapes and bits."""
    pairs = zip(funcrl.tree.leaves(a), funcrl.tree.leaves(b), strict=True)
    return all(x.dtype == y.dtype and torch.equal(x, y) for x, y in pairs)


# Chat templates of `tiny_tokenizer`.
TEMPLATES = {
    "chatml": "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "llama": "{{ bos_token }}{% for m in messages %}<|start|>{{ m.role }}<|end|>\n\n"
    "{{ m.content }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant<|end|>\n\n{% endif %}",
    "none": None,
}


def tiny_tokenizer(template=None):
    """A tokenizer of bytes with the special tokens of a few chat templates."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={char: n for n, char in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    special = ["<|im_start|>", "<|im_end|>", "<|start|>", "<|end|>", "<|eot|>"]
    fast = PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", additional_special_tokens=special
    )
    fast.chat_template = template
    return funcrl.tasks.ChatTokenizer(fast)


def tiny_pretrained(folder, template=None, **options):
    """A model and its tokenizer in a Hugging Face folder; returns the folder and the parameters."""
    tokenizer = tiny_tokenizer(template)
    tokenizer._tokenizer.save_pretrained(folder)
    shape = funcrl.models.TransformerConfig(
        vocab_size=tokenizer.vocab_size + 3, width=16, num_layers=1, num_heads=2, num_kv_heads=1,
        head_width=8, mlp_width=24, qk_norm=False, **options,
    )  # fmt: skip
    model = funcrl.models.Transformer(shape)  # its vocabulary is padded, as is often the case
    params = funcrl.init_params(model, seed=5)
    return funcrl.save_params(folder, model, params), params


class Ended(NamedTuple):
    """How a command ended, and what it printed."""

    code: int
    out: str
    err: str


def run_command(args, capsys, main=cli.main) -> Ended:
    """Run a command in this process."""
    try:
        main([str(arg) for arg in args])
        code = 0
    except SystemExit as stop:
        code = stop.code
    printed = capsys.readouterr()
    return Ended(code, printed.out, printed.err)


def twice(step, state, batch):
    """The results of two steps, as copies: a donated state is used up."""
    results = []
    for _ in range(2):
        state, metrics = step(state, batch)
        metrics.maxes.pop("num_recompilations", None)
        results.append(copy.deepcopy((state, metrics)))
    return results


def relative(got, expected):
    """The largest difference of a leaf, relative to the largest entry of that leaf."""
    pairs = zip(tree.leaves(got), tree.leaves(expected), strict=True)
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-30)) for a, b in pairs)


def num_letters(prompt, completion):
    """A reward that differs between samples of random weights."""
    return float(len(set(completion)))


def gradient_of_row(module, batch, row):
    """The gradient of a row's weighted log-probabilities in a model of transformers."""
    module.zero_grad()
    logprobs = module(batch.tokens[row : row + 1]).logits[0, :-1].log_softmax(-1)
    chosen = logprobs.gather(-1, batch.tokens[row, 1:, None])[:, 0]
    (batch.token_weights[row, 1:] * chosen).sum().backward()
    zero = torch.zeros(())  # of experts that no token goes to
    return {name: zero if leaf.grad is None else leaf.grad.clone()
            for name, leaf in module.named_parameters()}  # fmt: skip
