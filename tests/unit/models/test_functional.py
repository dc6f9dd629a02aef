"""Modules as pure functions: strict, on meta, tied weights, buffers, transformers' models."""

import copy
import inspect
import threading

import pytest
import torch
from cases import tiny_model
from torch import nn
from torch.func import grad, vmap
from torch.nn.utils import prune

import funcrl
from funcrl.models.functional import bind, fill


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.out = nn.Linear(3, 5, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, tokens):
        return self.out(self.embed(tokens))


class Buffered(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("scale", torch.tensor([2.0, 3.0]))

    def forward(self, x):
        return x * self.weight * self.scale


def test_two_threads_may_call_it_with_parameters_of_their_own():
    network = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(20)))
    apply, wrong = funcrl.functional(network), []

    def call(sign):
        params = {name: sign * torch.eye(2) for name, _ in network.named_parameters()}
        params["0.weight"] = torch.eye(2)  # 19 others change the sign
        for _ in range(200):
            found = apply(params, torch.ones(2))
            if not torch.equal(found, torch.full((2,), sign)):
                wrong.append(found)

    threads = [threading.Thread(target=call, args=(sign,)) for sign in (1.0, -1.0)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not wrong


class Counting(Buffered):
    def forward(self, x):
        self.scale += 1
        return x * self.weight


class Numbered(Buffered):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return x * self.weight * self.calls


class Remembering(Buffered):
    last = None

    def forward(self, x):
        y = x * self.weight + (0 if self.last is None else self.last)
        self.last = y.detach()
        return y


class Filling(Buffered):
    def __init__(self):
        super().__init__()
        self.cache = torch.zeros(2)

    def forward(self, x):
        self.cache += 1
        return x * self.weight * self.cache


class Rebinding(Buffered):
    def forward(self, x):
        self.scale = self.scale + 1
        return x * self.weight * self.scale


class Naming(Buffered):
    def __init__(self, rate):
        super().__init__()
        self.drop_prob = rate


IMPURE = {"last": Remembering, "cache": Filling, "scale": Rebinding}


@pytest.mark.parametrize("name", IMPURE)
def test_what_a_forward_keeps_is_an_error(name):
    apply = funcrl.functional(IMPURE[name]())
    for _ in range(2):
        with pytest.raises(ValueError, match=f"functional .*value of '{name}'"):
            apply({"weight": torch.ones(2)}, torch.ones(2))


def test_a_buffer_that_is_given_is_checked_as_parameters_are():
    params = {"weight": torch.ones(2), "scale": torch.ones(2)}
    with pytest.raises(ValueError, match="functional .*value of 'scale'"):
        funcrl.functional(Counting())(params, torch.ones(2))
    apply = funcrl.functional(Buffered())
    with pytest.raises(ValueError, match=r"functional .*'scale'.* shape .* \[5, 1\]"):
        apply({**params, "scale": torch.ones(5, 1)}, torch.ones(2))
    with pytest.raises(TypeError, match="apply .*params.*scale"):
        apply({**params, "scale": 7.0}, torch.ones(2))
    got = vmap(apply, in_dims=({"weight": None, "scale": 0}, None))(
        {**params, "scale": torch.ones(3, 2)}, torch.ones(2)
    )
    assert torch.equal(got, torch.ones(3, 2))


def test_dropout_by_another_name_is_refused():
    with pytest.raises(ValueError, match="functional .*drop_prob.* 'Naming'"):
        funcrl.functional(Naming(0.9))
    funcrl.functional(Naming(0.9).eval())
    funcrl.functional(Naming(0.0))


def test_equals_the_module():
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    x = torch.linspace(-1, 1, 15).reshape(5, 3)
    apply = funcrl.functional(module)
    assert torch.equal(apply(dict(module.named_parameters()), x), module(x))


def test_holds_no_weights_and_leaves_the_module_alone():
    module = nn.Linear(3, 2)
    before = copy.deepcopy(module.state_dict())
    apply = funcrl.functional(module)
    captured = [cell.cell_contents for cell in inspect.unwrap(apply).__closure__]
    skeletons = [value for value in captured if isinstance(value, nn.Module)]
    assert len(skeletons) == 1
    assert all(leaf.is_meta for leaf in skeletons[0].parameters())
    other = {name: torch.zeros_like(leaf) for name, leaf in module.named_parameters()}
    assert torch.equal(apply(other, torch.ones(3)), torch.zeros(2))
    assert all(torch.equal(before[name], leaf) for name, leaf in module.state_dict().items())


def test_is_strict_by_path():
    apply = funcrl.functional(nn.Sequential(nn.Linear(3, 2)))
    good = {"0.weight": torch.zeros(2, 3), "0.bias": torch.zeros(2)}
    with pytest.raises(ValueError, match="functional .*Sequential.* '0.bias'"):
        apply({"0.weight": good["0.weight"]}, torch.zeros(3))
    with pytest.raises(ValueError, match="functional .*'1.bias'"):
        apply({**good, "1.bias": torch.zeros(2)}, torch.zeros(3))
    with pytest.raises(ValueError, match="functional .*'0.weight'.* shape"):
        apply({**good, "0.weight": torch.zeros(3, 2)}, torch.zeros(3))


def test_tied_weights_are_given_once():
    module = Tied()
    apply = funcrl.functional(module)
    params = dict(module.named_parameters())
    assert list(params) == ["embed.weight"]
    tokens = torch.tensor([1, 2])
    assert torch.equal(apply(params, tokens), module(tokens))
    # Both uses contribute to the gradient.
    module(tokens).square().sum().backward()
    got = grad(lambda p: apply(p, tokens).square().sum())({"embed.weight": params["embed.weight"]})
    assert torch.allclose(got["embed.weight"], module.embed.weight.grad)
    with pytest.raises(ValueError, match="functional .*tied.*'embed.weight'.* 'out.weight'"):
        apply({**params, "out.weight": params["embed.weight"]}, tokens)


def test_buffers_are_constants():
    module = Buffered()
    apply = funcrl.functional(module)
    params = {"weight": torch.ones(2)}
    module.scale.zero_()  # copied: what happens to the module later does not matter
    assert torch.equal(apply(params, torch.ones(2)), torch.tensor([2.0, 3.0]))
    overridden = {**params, "scale": torch.tensor([5.0, 5.0])}
    assert torch.equal(apply(overridden, torch.ones(2)), torch.tensor([5.0, 5.0]))
    got = vmap(apply, in_dims=(None, 0))(params, torch.ones(4, 2))
    assert torch.equal(got, torch.tensor([[2.0, 3.0]] * 4))


def test_impure_modules_are_refused_by_name():
    with pytest.raises(ValueError, match=r"functional .*dropout.* p=0.1 .*'1'.* module.eval"):
        funcrl.functional(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1)))
    funcrl.functional(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1)).eval())
    funcrl.functional(nn.Dropout(0.0))
    with pytest.raises(ValueError, match="functional .*statistics.* 'BatchNorm1d'"):
        funcrl.functional(nn.BatchNorm1d(2))
    with pytest.raises(ValueError, match="functional .*value of 'scale'"):
        funcrl.functional(Counting())({"weight": torch.ones(2)}, torch.ones(2))
    with pytest.raises(ValueError, match="functional .*dropout=0.5 .*'MultiheadAttention'"):
        funcrl.functional(nn.MultiheadAttention(4, 2, dropout=0.5))
    with pytest.raises(ValueError, match="functional .*dropout=0.5 .*'LSTM'"):
        funcrl.functional(nn.LSTM(2, 2, num_layers=2, dropout=0.5))
    for bounds in ((), (-0.5, -0.1)):  # it draws between negative ones, too
        with pytest.raises(ValueError, match="functional .*dropout.* 'RReLU'"):
            funcrl.functional(nn.RReLU(*bounds))
    for own in (nn.MultiheadAttention(4, 2), nn.LSTM(2, 2)):
        own.path_drop = 0.5  # as a subclass has it
        with pytest.raises(ValueError, match="functional .*dropout path_drop=0.5"):
            funcrl.functional(own)
    with pytest.raises(ValueError, match="functional .*value of 'calls'"):
        funcrl.functional(Numbered())({"weight": torch.ones(2)}, torch.ones(2))
    with torch.device("meta"):
        meta = Buffered()
    with pytest.raises(ValueError, match="functional .*meta.* 'scale'"):
        funcrl.functional(meta)


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
@pytest.mark.parametrize("hook", ["weight_norm", "spectral_norm", "prune"])
def test_a_hook_that_computes_weights_is_refused_by_name(hook):
    inner = nn.Linear(2, 3)
    if hook == "prune":
        prune.l1_unstructured(inner, "weight", 0.5)
    else:
        getattr(nn.utils, hook)(inner)
    with pytest.raises(ValueError, match=rf"functional .*torch\.nn\.utils\.{hook} .*'1'.*\.{hook}"):
        funcrl.functional(nn.Sequential(nn.Linear(2, 2), inner).eval())


def test_a_weight_that_was_computed_once_is_refused_by_name():
    module = nn.Sequential(nn.Linear(2, 2))
    module[0].scaled = 2 * module[0].weight
    with pytest.raises(ValueError, match="functional .*'scaled' .*'0'"):
        funcrl.functional(module)


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch runs it row by row
@pytest.mark.parametrize("name", ["weight_norm", "spectral_norm", "orthogonal"])
def test_a_parametrized_module_is_a_function(name):
    torch.manual_seed(0)
    module = nn.Sequential(getattr(nn.utils.parametrizations, name)(nn.Linear(3, 2)), nn.Tanh())
    module = module.double().eval()
    params = {path: leaf.detach() for path, leaf in module.named_parameters()}
    x = torch.randn(4, 3, dtype=torch.float64)
    apply = funcrl.functional(module)
    assert torch.equal(apply(params, x), module(x))
    got = funcrl.per_sample_grad(lambda p, row: apply(p, row).sum())(params, x)
    for index, row in enumerate(x):
        module.zero_grad()
        module(row).sum().backward()
        for path, leaf in module.named_parameters():
            assert (got[path][index] - leaf.grad).abs().max() <= 1e-14, path


class Recurrent(nn.Module):
    """Scores of tokens [T], from a layer that `torch` runs, or from a cell in a loop."""

    def __init__(self, layer, first=True):
        super().__init__()
        self.embed, self.layer, self.out = nn.Embedding(5, 4), layer, nn.Linear(4, 5)
        self.first = first

    def forward(self, tokens):
        rows = self.embed(tokens)
        if isinstance(self.layer, nn.RNNBase):
            return self.out(self.layer(rows)[0])
        state = torch.zeros_like(rows[0]) if self.first else None
        if self.first and isinstance(self.layer, nn.LSTMCell):
            state = (state, state)
        states = []
        for row in rows:
            state = self.layer(row, state)
            states.append(state[0] if isinstance(state, tuple) else state)
        return self.out(torch.stack(states))


def recurrent_paths(module):
    """What runs a model function for all rows of a batch at once."""
    apply = funcrl.functional(module)
    params = {name: leaf.detach() for name, leaf in module.named_parameters()}
    tokens = torch.tensor([[1, 2, 3], [4, 0, 2]])
    ones = torch.ones(2, 3)
    batch = funcrl.Batch(tokens, ones.long(), ones > 0, -ones, ones, ones)

    def model_fn(params, sample):
        return funcrl.token_scores(apply(params, sample.tokens), sample.tokens)

    def loss(params, tokens):
        return funcrl.token_scores(apply(params, tokens), tokens).logprobs.sum()

    def step(per_sample=None):
        step = funcrl.grpo_step(model_fn, per_sample=per_sample)
        return step(step.init(params), batch)

    return {
        "score": lambda: funcrl.score(model_fn, params, batch).logprobs,
        "step": step,
        "clipped": lambda: step(funcrl.clip_per_sample(1.0)),
        "gradient": lambda: funcrl.per_sample_grad(loss)(params, tokens),
    }, lambda row: funcrl.token_scores(apply(params, tokens[row]), tokens[row]).logprobs


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_a_recurrent_layer_that_vmap_cannot_run_is_refused_by_name(kind):
    paths, one = recurrent_paths(Recurrent(kind(4, 4)))
    assert one(0).shape == (3,)  # of a single sample it is a function
    for run in paths.values():
        with pytest.raises(
            NotImplementedError, match=rf"functional .*nn\.{kind.__name__} .*'layer'"
        ):
            run()


def test_an_operator_without_a_batching_rule_is_named():
    paths, one = recurrent_paths(Recurrent(nn.LSTMCell(4, 4)))
    assert one(0).shape == (3,)
    for name in ("score", "step"):
        with pytest.raises(NotImplementedError, match="aten::lstm_cell") as caught:
            paths[name]()
        assert "Batching rule" in str(caught.value.__cause__)


def test_a_state_that_is_not_of_the_input_is_named():
    paths, _ = recurrent_paths(Recurrent(nn.GRUCell(4, 4), first=False))
    with pytest.raises(NotImplementedError, match="in place .* torch.zeros_like"):
        paths["clipped"]()


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch runs it row by row
@pytest.mark.parametrize("kind", [nn.GRUCell, nn.RNNCell])
def test_a_cell_in_a_loop_is_a_function(kind):
    torch.manual_seed(0)
    module = Recurrent(kind(4, 4))
    paths, one = recurrent_paths(module)
    assert torch.allclose(paths["score"](), torch.stack([one(0), one(1)]), atol=1e-6)
    got = paths["gradient"]()
    for row in (0, 1):
        module.zero_grad()
        tokens = torch.tensor([[1, 2, 3], [4, 0, 2]])[row]
        funcrl.token_scores(module(tokens), tokens).logprobs.sum().backward()
        for name, leaf in module.named_parameters():
            assert torch.allclose(got[name][row], leaf.grad, atol=1e-6), name
    plain, clipped = (paths[name]()[1] for name in ("step", "clipped"))
    assert plain.maxes["grad_norm"] >= clipped.maxes["grad_norm"] > 0


class Branching(Buffered):
    def forward(self, x):
        return x * self.weight if x.sum() > 0 else -x


def test_unknown_names_are_refused_whatever_their_types():
    params = {"weight": torch.ones(2), 3: torch.ones(2), "more": torch.ones(2)}
    with pytest.raises(ValueError, match="functional .*got 3"):
        funcrl.functional(Branching())(params, torch.ones(2))


def test_a_forward_that_reads_a_value_is_refused_where_there_is_none():
    apply, params = funcrl.functional(Branching()), {"weight": torch.ones(2)}
    mapped = vmap(apply, in_dims=(None, 0))
    x = torch.ones(3, 2)
    for run in (
        lambda: mapped(params, x),
        lambda: funcrl.trace(apply, params, x[0]),
        lambda: funcrl.trace(mapped, params, x),
        lambda: funcrl.per_sample_grad(lambda params, row: apply(params, row).sum())(params, x),
    ):
        with pytest.raises(ValueError, match=r"functional .* Branching.* forward\(\) at line") as e:
            run()
        assert "transformers" not in str(e.value)
    assert torch.equal(apply(params, x), x)


def test_other_errors_of_a_forward_are_its_own():
    with pytest.raises(RuntimeError, match="size of tensor a"):
        funcrl.functional(Buffered())({"weight": torch.ones(2)}, torch.ones(3))


def test_a_transformers_model_under_grad_and_vmap():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=11, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    module = LlamaForCausalLM(config).double().eval()
    apply = funcrl.functional(module)
    params = {name: leaf.detach() for name, leaf in module.named_parameters()}
    tokens = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])

    def loss(params, row):
        logits = apply(params, row[None], use_cache=False).logits[0]
        return -funcrl.token_scores(logits, row).logprobs.sum()

    got = funcrl.per_sample_grad(loss)(params, tokens)
    for i, row in enumerate(tokens):
        module.zero_grad()
        logprobs = module(row[None]).logits[0, :-1].log_softmax(-1)
        (-logprobs[torch.arange(3), row[1:]].sum()).backward()
        for name, leaf in module.named_parameters():
            assert (got[name][i] - leaf.grad).abs().max() <= 1e-12, name


def test_the_house_model_holds_no_weights():
    assert all(leaf.is_meta for leaf in tiny_model().parameters())


@pytest.mark.parametrize("give", [bind, fill])
def test_weights_are_given_by_reference_and_tied_ones_stay_tied(give):
    module, weight = Tied(), torch.randn(5, 3)
    found = give(module, {"embed.weight": weight})
    assert (found is module) == (give is fill)
    assert found.embed.weight is found.out.weight
    assert found.out.weight.data_ptr() == weight.data_ptr()
    assert not found.out.weight.requires_grad
    assert torch.equal(found(torch.tensor([1])), weight[1:2] @ weight.T)
    with pytest.raises(ValueError, match=r"functional expects .*'embed.weight'"):
        give(Tied(), {})
