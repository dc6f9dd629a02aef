"""Adapters: the gradient of a part of the parameters, and parameters like any others."""

import gc

import pytest
import torch
from cases import equal, tiny_batch, tiny_model
from torch import nn
from torch.func import grad

import funcrl

RANK, ALPHA = 2, 6.0


def make():
    model = tiny_model()
    base = funcrl.init_params(model, seed=0, dtype=torch.float64)
    model_fn = funcrl.logprob_fn(model)
    adapted = funcrl.lora(model_fn, base, rank=RANK, alpha=ALPHA)
    adapters = adapted.init(1)
    generator = torch.Generator().manual_seed(2)
    moved = {
        name: leaf + 0.1 * torch.randn(leaf.shape, generator=generator, dtype=leaf.dtype)
        for name, leaf in adapters.items()
    }
    return model_fn, base, adapted, adapters, moved


def loss_of(model_fn, batch):
    def loss(params):
        return sum(
            funcrl.policy_loss(funcrl.grpo(), model_fn(params, sample), sample)[0]
            for sample in (
                funcrl.tree.map(lambda leaf, row=row: leaf[row], batch) for row in range(3)
            )
        )

    return loss


def test_fresh_adapters_are_the_base():
    _, base, adapted, adapters, _ = make()
    assert equal(adapted.merge(adapters), base)


def test_the_gradient_is_the_full_one_projected():
    """dL/d up = s G down^T and dL/d down = s up^T G, where G = dL/dW of the merged weights."""
    model_fn, base, adapted, _, moved = make()
    batch = tiny_batch()
    found = grad(loss_of(adapted.model_fn, batch))(moved)
    full = grad(loss_of(model_fn, batch))(adapted.merge(moved))
    scale = ALPHA / RANK
    names = {name.rsplit(".lora", 1)[0] for name in moved}
    assert len(names) == 2 * 7
    for name in names:
        up, down = moved[f"{name}.lora_up"], moved[f"{name}.lora_down"]
        wanted = {"up": scale * full[name] @ down.T, "down": scale * up.T @ full[name]}
        for end, leaf in wanted.items():
            assert (found[f"{name}.lora_{end}"] - leaf).abs().max() <= 1e-12 * full[name].norm()
    assert not any(name.startswith(("embed", "norm")) for name in names)
    assert base.keys() == full.keys()


def test_merged_parameters_give_the_same_scores_and_can_be_pushed(tmp_path):
    model_fn, _, adapted, _, moved = make()
    sample = funcrl.tree.map(lambda leaf: leaf[0], tiny_batch())
    merged = adapted.merge(moved)
    assert equal(adapted.model_fn(moved, sample), model_fn(merged, sample))
    model = tiny_model()
    sampler = funcrl.generators.Sampler(model)
    sampler.push(merged)
    assert sampler.generate([[1]], funcrl.config.Sampling(max_tokens=2), seed=0).tokens.shape[1]
    folder = funcrl.save_params(tmp_path / "model", model, merged)
    assert equal(funcrl.load_params(folder, torch.float64)[1], merged)


def test_a_step_trains_the_adapters_alone():
    _, base, adapted, adapters, _ = make()
    before = funcrl.tree.map(torch.clone, base)
    step = funcrl.grpo_step(adapted.model_fn, optimizer=funcrl.optim.adamw(1e-2))
    state, _ = step(step.init(adapters), tiny_batch())
    assert state.params.keys() == adapters.keys()
    assert not equal(adapted.merge(state.params), base)
    assert equal(base, before)
    assert not equal(adapted.init(1), adapted.init(2))


def test_bad_input_is_refused():
    model_fn, base, adapted, adapters, _ = make()
    with pytest.raises(ValueError, match="lora .*rank"):
        funcrl.lora(model_fn, base, rank=1000)
    with pytest.raises(ValueError, match="lora .*targets"):
        funcrl.lora(model_fn, base, targets=lambda name: name == "norm.weight")
    with pytest.raises(ValueError, match="lora .*adapters.* none for"):
        adapted.merge({})
    with pytest.raises(ValueError, match="lora .*adapters.* besides"):
        adapted.merge({**adapters, "x": adapters[next(iter(adapters))]})
    with pytest.raises(TypeError, match="lora .*targets"):
        funcrl.lora(model_fn, base, targets="q")


@pytest.mark.parametrize("change", [
    lambda leaf: leaf[:1], lambda leaf: leaf[0], lambda leaf: leaf.float(),
    lambda leaf: torch.cat([leaf, leaf], dim=1),
])  # fmt: skip
def test_adapters_of_another_shape_are_refused(change):
    """They could be multiplied all the same, with the scale of this rank."""
    _, _, adapted, adapters, _ = make()
    name = next(name for name in adapters if name.endswith("lora_up"))
    with pytest.raises(ValueError, match=f"lora .*'{name}'.* torch.float64"):
        adapted.merge({**adapters, name: change(adapters[name])})


def test_adapters_of_another_rank_are_refused():
    model_fn, base, _, adapters, _ = make()
    with pytest.raises(ValueError, match=r"lora .* shape \[4, .* \[2, "):
        funcrl.lora(model_fn, base, rank=4).merge(adapters)


def test_what_becomes_of_the_base_or_of_torchs_default_does_not_matter():
    model_fn, base, _, _, moved = make()
    changed = dict(base)
    adapted = funcrl.lora(model_fn, changed, rank=RANK, alpha=ALPHA)
    before, drawn = adapted.merge(moved), adapted.init(1)
    for name, leaf in base.items():
        changed[name] = leaf * 5
    assert equal(adapted.merge(moved), before)
    torch.set_default_dtype(torch.float64)
    try:
        assert equal(adapted.init(1), drawn)
    finally:
        torch.set_default_dtype(torch.float32)


def rounded(base, base_dtype, names):
    """The base with the adapted matrices as `qlora` keeps them, in float64."""
    ops = funcrl.ops
    if base_dtype in ("bfloat16", "float32"):
        dtype = getattr(torch, base_dtype)
        return {n: p.to(dtype).double() if n in names else p for n, p in base.items()}
    return {
        n: ops.dequantize(ops.quantize(p, base_dtype)).double() if n in names else p
        for n, p in base.items()
    }


@pytest.mark.parametrize("base_dtype", ["nf4", "int8", "bfloat16", "float32"])
def test_qlora_is_lora_on_the_rounded_base(base_dtype):
    """Scores and gradients in float64, of each sample and packed into one graph, and merged."""
    model, batch = tiny_model(), tiny_batch()
    base = funcrl.init_params(model, seed=0, dtype=torch.float64)
    options = {"rank": RANK, "alpha": ALPHA}
    small = funcrl.models.qlora(model, base, base_dtype=base_dtype, dtype=torch.float64, **options)
    adapters = small.init(1)
    names = {name.rsplit(".lora", 1)[0] for name in adapters}
    wanted = funcrl.lora(funcrl.logprob_fn(model), rounded(base, base_dtype, names), **options)
    generator = torch.Generator().manual_seed(2)
    moved = {
        name: leaf + 0.1 * torch.randn(leaf.shape, generator=generator, dtype=leaf.dtype)
        for name, leaf in adapters.items()
    }
    assert adapters.keys() == wanted.init(1).keys()
    for name, leaf in wanted.init(1).items():
        assert torch.equal(adapters[name], leaf)
    for row in range(3):
        sample = funcrl.tree.map(lambda leaf, row=row: leaf[row], batch)
        found = small.model_fn(moved, sample)
        assert (found.logprobs - wanted.model_fn(moved, sample).logprobs).abs().max() <= 1e-12
    found = grad(loss_of(small.model_fn, batch))(moved)
    by_lora = grad(loss_of(wanted.model_fn, batch))(moved)
    for name, leaf in by_lora.items():
        assert (found[name] - leaf).abs().max() <= 1e-12 * leaf.abs().max()
    for name, leaf in wanted.merge(moved).items():
        assert torch.equal(small.merge(moved)[name], leaf), name


class Direct(nn.Module):
    """Multiplies by a layer's matrix itself, as Mamba does, and casts to its dtype, as T5 does."""

    def __init__(self):
        super().__init__()
        self.embed, self.mix = nn.Embedding(11, 8), nn.Linear(8, 8, bias=False)
        self.out = nn.Linear(8, 11)

    def forward(self, tokens):
        rows = self.embed(tokens).cumsum(0).to(self.mix.weight.dtype)
        return self.out((self.mix.weight @ rows.mT).mT.tanh())


@pytest.mark.parametrize("base_dtype", ["nf4", "float32"])
def test_a_matrix_that_a_network_reads_itself_is_adapted(base_dtype):
    torch.manual_seed(0)
    model, batch = Direct().double(), tiny_batch()
    base = {name: leaf.detach() for name, leaf in model.named_parameters()}
    small = funcrl.models.qlora(
        model, base, rank=2, alpha=ALPHA, targets=lambda name: name in ("mix.weight", "out.weight"),
        base_dtype=base_dtype, dtype=torch.float64,
    )  # fmt: skip
    moved = {name: leaf + 0.1 * torch.ones_like(leaf) for name, leaf in small.init(1).items()}
    assert len(moved) == 4
    whole, kept = small.merge(moved), small.merge(small.init(1))
    assert not torch.equal(whole["mix.weight"], kept["mix.weight"])
    for row in range(3):
        sample = funcrl.tree.map(lambda leaf, row=row: leaf[row], batch)
        found = small.model_fn(moved, sample).logprobs
        assert (found - funcrl.logprob_fn(model)(whole, sample).logprobs).abs().max() <= 1e-12


def bytes_alive():
    gc.collect()
    with funcrl.memory_profile("test", stacks=False) as profile:
        torch.zeros(1)
    return profile.result.start_allocated


def test_a_qlora_base_is_kept_in_its_bits():
    """4 bits a number of an adapted matrix, 32 for 64 of them, and the levels of each matrix."""
    model = funcrl.models.Transformer(funcrl.models.shape("micro", vocab_size=13))
    before = bytes_alive()
    base = funcrl.init_params(model, seed=0)
    whole = sum(leaf.nbytes for leaf in base.values())
    adapted = [leaf for name, leaf in base.items() if ".mlp." in name or ".attention." in name]
    numbers = sum(leaf.numel() for leaf in adapted if leaf.ndim == 2)
    small = funcrl.models.qlora(model, base, rank=RANK)
    del base, adapted
    others = whole - 4 * numbers
    levels = 2 * 7 * 16 * 4
    assert bytes_alive() - before == others + numbers // 2 + 4 * numbers // 64 + levels
    assert small.init(0)


def test_what_qlora_cannot_adapt_is_refused():
    model = tiny_model()
    base = funcrl.init_params(model, seed=0)
    with pytest.raises(ValueError, match="^qlora expects matrices that are the weight of an nn.L"):
        funcrl.models.qlora(model, base, rank=1, targets=lambda name: name == "embed.weight")
    with pytest.raises(ValueError, match="^qlora expects targets among"):
        funcrl.models.qlora(model, base, targets=lambda name: False)
    exact = funcrl.models.Transformer(model.config, "exact")
    with pytest.raises(ValueError, match="^qlora expects a network of native operations"):
        funcrl.models.qlora(exact, base)
    with pytest.raises(ValueError, match="^qlora expects base_dtype"):
        funcrl.models.qlora(model, base, base_dtype="nf3")
