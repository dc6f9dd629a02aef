"""The models, the prompts and the checks that vLLM's tests have in common."""

import sys

import pytest
import torch

import funcrl
from funcrl.config import Sampling
from funcrl.generators.vllm.settings import is_installed

has_vllm = pytest.mark.skipif(not is_installed(), reason="needs vLLM")
needs_vllm = [
    pytest.mark.vllm,
    pytest.mark.slow,
    has_vllm,
    # vLLM and what it imports warn of their own affairs.
    pytest.mark.filterwarnings("default"),
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# On a GPU vLLM's attention does not multiply float32 in float32.
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
_GEMMA3 = {
    "num_layers": 3, "rope_theta": 1e6, "rope_factor": 4.0, "norm_offset": 1.0, "post_norms": True,
    "activation": "gelu_tanh", "embed_scale": 8.0, "attention_scale": 20**-0.5, "logit_cap": 5.0,
}  # fmt: skip
SHAPES = {
    "llama": {"qk_norm": False},
    "llama3": {"qk_norm": False, "rope_scaling": (8.0, 1.0, 4.0, 16.0)},
    "mistral": {"qk_norm": False, "layers": ("sliding",), "window": 7},
    "qwen2": {"qk_norm": False, "qkv_bias": True, "tied": False, "width": 128},
    "qwen3": {"qk_norm": True},
    "narrow": {"qk_norm": True, "head_width": 16},  # vLLM has no CPU kernel for such heads
    "gemma3": _GEMMA3 | {"layers": ("sliding", "full"), "window": 7, "local_rope_theta": 1e3},
    "options": _GEMMA3 | {"attention_gate": True, "rotary_width": 8},  # of full attention alone
    "qwen3.5": {
        "num_layers": 4, "layers": ("delta", "delta", "delta", "full"), "norm_offset": 1.0,
        "attention_gate": True, "rotary_width": 8, "delta_heads": 4, "delta_key_heads": 2,
        "delta_key_width": 64, "delta_value_width": 64,
    },
}  # fmt: skip
PROMPTS = [[1, 2, 3], [4] * 40, [5, 6], list(range(7, 30))]


def with_infinite_values(params):
    """Parameters that are finite themselves; the values that a cache keeps are not."""
    return {
        name: leaf / leaf.abs().max() * 3e38 if ".v." in name else leaf
        for name, leaf in params.items()
    }


def make(shape, dtype=torch.float32):
    """A model of one of the `SHAPES`, and its parameters."""
    config = funcrl.models.TransformerConfig(
        **{
            "vocab_size": 97, "width": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2,
            "head_width": 32, "mlp_width": 128, "context_length": 256, **SHAPES[shape],
        }
    )  # fmt: skip
    model = funcrl.models.Transformer(config)
    drawn = funcrl.init_params(model, seed=0, device=DEVICE)
    # Far from uniform, so that a mistake shows.
    params = {name: leaf * 5 if leaf.ndim == 2 else leaf + 0.1 for name, leaf in drawn.items()}
    return model, funcrl.tree.cast(params, dtype)


def scored(model, params, rows):
    """The trainer's log-probabilities of rows of tokens, from the second on."""
    model_fn = funcrl.logprob_fn(model)
    found = []
    for row in rows:
        tokens = torch.tensor(row, device=DEVICE)
        sample = funcrl.Sample(tokens, torch.arange(len(row), device=DEVICE))
        found.append(model_fn(params, sample).logprobs[1:].double().cpu())
    return found


def rounding(model, params, rows):
    """The largest error of the trainer's own numbers, against float64 with the same weights."""
    exact = scored(model, funcrl.tree.cast(params, torch.float64), rows)
    own = scored(model, params, rows)
    return max((a - b).abs().max().item() for a, b in zip(exact, own, strict=True))


def watch_builds(monkeypatch):
    """A list that will hold the parts of each run that `funcrl.train` builds."""
    built = []

    def build(*args, **kw):
        built.append(funcrl.build(*args, **kw))
        return built[-1]

    monkeypatch.setattr(sys.modules["funcrl.loop.train"], "build", build)
    return built


def untimed(history):
    """A run's rows of metrics, without times."""
    return [{name: value for name, value in row.items() if "time" not in name} for row in history]


def largest(found, wanted):
    """The largest difference between two lists of log-probabilities."""
    return max(
        (torch.as_tensor(a, dtype=torch.float64) - torch.as_tensor(b, dtype=torch.float64))
        .abs()
        .max()
        .item()
        for a, b in zip(found, wanted, strict=True)
    )


def rows_of(samples, group, prompts=PROMPTS):
    """Each sample's prompt and tokens, as one row."""
    lengths = samples.mask.sum(dim=1).tolist()
    return [
        prompts[row // group] + samples.tokens[row, :length].tolist()
        for row, length in enumerate(lengths)
    ]


def cache_of(blocks, shape, dtype):
    """The bytes of a cache of so many blocks of 128 tokens, of which vLLM keeps one for itself."""
    numbers = 2 * shape.num_layers * shape.num_kv_heads * shape.head_width
    return blocks * 128 * numbers * dtype.itemsize


def bound_of(model, params, rows):
    """Four times the trainer's own rounding: twice for two sides, and twice for orders of sums."""
    return 4 * rounding(model, params, rows)


def check_nan_leaves_nothing_in_the_cache(
    generator, model, params, prompts=PROMPTS, same_batches=True
):
    """vLLM multiplies what is past a sequence's end by zero, which NaN survives.

    The cache has few enough blocks for those that had NaN to be taken again. What is drawn is the
    same afterwards, to the bit where the same batches are computed again. A server's batches are of
    those requests that have come by then: two of its answers differ by rounding.
    """
    sampling = Sampling(4, max_tokens=20)
    generator.push(params)
    clean = generator.generate(prompts, sampling, seed=0)
    bound = 0.0 if same_batches else bound_of(model, params, rows_of(clean, 4, prompts))
    for request in (
        lambda: generator.generate(prompts, sampling, seed=0),
        lambda: generator.score(prompts),
    ):
        generator.push(with_infinite_values(params))
        with pytest.raises(FloatingPointError, match="generate expects logits"):
            request()
        generator.push(params)
        again = generator.generate(prompts, sampling, seed=0)
        assert torch.equal(again.tokens, clean.tokens)
        assert (again.logprobs - clean.logprobs).abs().max() <= bound
