"""Tinker's own SDK trains and samples here: its losses, its optimizer, its files, its errors."""

import json
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import tinker
import torch
import transformers
from cases import tiny_pretrained

import funcrl
from funcrl.config import LoraConfig, ServeConfig
from funcrl.serve import training
from funcrl.serve.serve import serving

types = tinker.types
KEY = "tml-of-these-tests"
PROMPT = [71, 68, 75]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base") / "model"
    tiny_pretrained(folder, tied=False)
    model, params = funcrl.load_params(folder)
    # Large, so that what is trained decides what is drawn.
    params["embed.weight"] *= 30
    params["unembed.weight"] *= 30
    funcrl.save_params(folder, model, params)
    return str(folder)


@pytest.fixture(scope="module")
def service(base, tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    config = ServeConfig(model=base, port=0, key=KEY, folder=folder, microbatch=2)
    patch = pytest.MonkeyPatch()
    patch.setenv("TINKER_TELEMETRY", "0")
    with serving(config, lambda line: None) as address:
        client = tinker.ServiceClient(base_url=address, api_key=KEY)
        yield client, address, folder
        client.close("success").result()
    patch.undo()


def client_of(service, base, **options):
    return (
        service[0].create_lora_training_client(base_model=base, rank=4, seed=1, **options).result()
    )


def made(client):
    """The client itself, of a method that gives a promise or the client."""
    return client.result() if hasattr(client, "result") else client


def rows(count=3):
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, 256, (5 + row,), generator=generator).tolist() for row in range(count)]


def datum(tokens, **inputs):
    given = {name: values.tolist() for name, values in inputs.items()}
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], **given},
    )


def randoms(tokens, seed):
    return torch.randn(len(tokens) - 1, generator=torch.Generator().manual_seed(seed))


class Oracle:
    """The same adapters, by torch.optim.AdamW and autograd of a loss over plain log-softmaxes."""

    def __init__(self, base, names=("attention", "mlp", "unembed")):
        self.model, params = funcrl.load_params(base)
        self.lora = funcrl.lora(
            funcrl.logprob_fn(self.model), params, rank=4, alpha=32.0,
            targets=lambda name: any(f".{each}." in f".{name}" for each in names),
        )  # fmt: skip
        self.adapters = {
            name: leaf.clone().requires_grad_() for name, leaf in self.lora.init(1).items()
        }
        self.optimizer = torch.optim.AdamW(
            self.adapters.values(), lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0
        )

    def logprobs(self, tokens):
        whole = torch.tensor(tokens)
        merged = self.lora.merge(self.adapters)
        logits = torch.func.functional_call(self.model, merged, (whole, torch.arange(len(whole))))
        found = logits.float().log_softmax(-1)[:-1]
        return found.gather(1, whole[1:, None]).squeeze(1)

    def step(self, loss):
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def of_cross_entropy(found, weights):
    return -(weights * found).sum()


def of_policy(name, found, behavior, advantages):
    ratio = (found - behavior).exp()
    if name == "importance_sampling":
        return -(ratio * advantages).sum()
    if name == "ppo":
        return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).sum()
    if name == "cispo":
        return -(ratio.detach().clamp(0, 4) * found * advantages).sum()
    return -(found * advantages - 0.1 * (found - behavior) ** 2 / 2).sum()


LOSSES = ["cross_entropy", "importance_sampling", "ppo", "cispo", "dro"]


@pytest.mark.parametrize("loss", LOSSES)
def test_losses_and_updates_equal_torchs(service, base, loss):
    """Two batches whose gradients add up, an update, and again: log-probabilities say it all."""
    client, oracle = client_of(service, base), Oracle(base)
    data = rows()
    options = {"beta": 0.1} if loss == "dro" else None
    for step in range(3):
        expected, results = torch.zeros(()), []
        for part in (data[:1], data[1:]):
            given = []
            for tokens in part:
                found = oracle.logprobs(tokens)
                weights = randoms(tokens, step)
                if loss == "cross_entropy":
                    given.append(datum(tokens, weights=weights))
                    expected = expected + of_cross_entropy(found, weights)
                    continue
                behavior = found.detach() + 0.3 * randoms(tokens, 9 + step)
                given.append(datum(tokens, logprobs=behavior, advantages=weights))
                expected = expected + of_policy(loss, found, behavior, weights)
            results.append((part, client.forward_backward(given, loss, options)))
        update = client.optim_step(types.AdamParams(learning_rate=1e-2, eps=1e-8))
        total = 0.0
        for part, future in results:
            result = future.result()
            total += result.metrics["loss:sum"]
            for tokens, output in zip(part, result.loss_fn_outputs, strict=True):
                mine = output["logprobs"].to_torch()
                torch.testing.assert_close(mine, oracle.logprobs(tokens), rtol=0, atol=2e-5)
        assert total == pytest.approx(expected.item(), abs=2e-4)
        oracle.step(expected)
        assert update.result().metrics["grad_norm"] > 0


@pytest.mark.parametrize("part", ["attention", "mlp", "unembed"])
def test_adapters_are_where_the_client_wants_them(service, base, part):
    flags = {"attention": "train_attn", "mlp": "train_mlp", "unembed": "train_unembed"}
    client = client_of(service, base, **{flag: name == part for name, flag in flags.items()})
    oracle, tokens = Oracle(base, [part]), rows()[2]
    weights = torch.ones(len(tokens) - 1)
    given = [datum(tokens, weights=weights)]
    for _ in range(2):
        client.forward_backward(given, "cross_entropy").result()
        client.optim_step(types.AdamParams(learning_rate=1e-2, eps=1e-8)).result()
        oracle.step(of_cross_entropy(oracle.logprobs(tokens), weights))
    after = client.forward(given, "cross_entropy").result().loss_fn_outputs[0]["logprobs"]
    torch.testing.assert_close(after.to_torch(), oracle.logprobs(tokens), rtol=0, atol=2e-5)


def targets_of(network, **flags):
    params = dict(network.named_parameters())
    return training.Base(network, None, params).targets(training.Kind(4, **flags))


def test_adapters_of_a_hybrid_network_are_where_a_run_has_them():
    model = funcrl.models.Transformer(funcrl.models.shape("micro-hybrid", vocab_size=20))
    names = {name for name, _ in model.named_parameters() if LoraConfig().adapts(name)}
    of_mlp = {name for name in names if ".mlp." in name}
    assert any(".delta." in name for name in names - of_mlp)
    assert targets_of(model, unembed=False) == names
    assert targets_of(model, unembed=False, attn=False) == of_mlp
    assert targets_of(model, unembed=False, mlp=False) == names - of_mlp


@pytest.mark.parametrize(
    ("kind", "sizes", "block", "attention", "mlp"),
    [
        ("GPT2LMHeadModel", {"n_embd": 16, "n_layer": 1, "n_head": 2},
         "transformer.h.0", ["attn.c_attn", "attn.c_proj"], ["mlp.c_fc", "mlp.c_proj"]),
        ("FalconForCausalLM",
         {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
         "transformer.h.0", ["self_attention.query_key_value", "self_attention.dense"],
         ["mlp.dense_h_to_4h", "mlp.dense_4h_to_h"]),
        ("OPTForCausalLM",
         {"hidden_size": 16, "word_embed_proj_dim": 16, "num_hidden_layers": 1,
          "num_attention_heads": 2, "ffn_dim": 24},
         "model.decoder.layers.0", [f"self_attn.{each}_proj" for each in ("q", "k", "v", "out")],
         ["fc1", "fc2"]),
    ],
)  # fmt: skip
def test_adapters_of_a_class_of_transformers_are_of_all_layers(kind, sizes, block, attention, mlp):
    made = getattr(transformers, kind)
    network = made(made.config_class(vocab_size=20, tie_word_embeddings=False, **sizes))
    expected = {
        "attn": {f"{block}.{each}.weight" for each in attention},
        "mlp": {f"{block}.{each}.weight" for each in mlp},
        "unembed": {"lm_head.weight"},
    }
    for flag, names in expected.items():
        assert targets_of(network, **dict.fromkeys(expected, False) | {flag: True}) == names


def test_a_custom_loss_runs_here_too(service, base):
    client, oracle = client_of(service, base), Oracle(base)
    tokens = rows()[2]

    def squared(data, logprobs):
        return sum((each**2).sum() for each in logprobs), {"squares": 1.0}

    given = [datum(tokens, advantages=torch.ones(len(tokens) - 1))]  # which another loss may read
    result = client.forward_backward_custom(given, squared).result()
    assert result.metrics["squares"] == 1.0
    client.optim_step(types.AdamParams(learning_rate=1e-2, eps=1e-8)).result()
    oracle.step((oracle.logprobs(tokens) ** 2).sum())
    after = client.forward(given, "cross_entropy").result().loss_fn_outputs[0]["logprobs"]
    torch.testing.assert_close(after.to_torch(), oracle.logprobs(tokens), rtol=0, atol=5e-5)


def test_samples_are_of_the_policy_that_was_saved(service, base):
    client = client_of(service, base)
    tokens = rows()[0]
    given = [datum(tokens, weights=torch.ones(len(tokens) - 1))]
    for _ in range(3):
        client.forward_backward(given, "cross_entropy")
        client.optim_step(types.AdamParams(learning_rate=5e-2))
    sampler = made(client.save_weights_and_get_sampling_client())
    params = types.SamplingParams(max_tokens=4, temperature=0.7, seed=3, stop=[])
    prompt = types.ModelInput.from_ints(PROMPT)
    ask = lambda: sampler.sample(  # noqa: E731
        prompt=prompt, num_samples=3, sampling_params=params, include_prompt_logprobs=True
    ).result()
    first, again = ask(), ask()
    assert [each.tokens for each in first.sequences] == [each.tokens for each in again.sequences]
    assert len({each.sequence_id for each in (*first.sequences, *again.sequences)}) == 6
    for sequence in first.sequences:
        assert (len(sequence.tokens), sequence.stop_reason) == (4, "length")
        scored = client.forward([datum([*PROMPT, *sequence.tokens])], "cross_entropy").result()
        whole = scored.loss_fn_outputs[0]["logprobs"].to_torch()
        said = [*first.prompt_logprobs[1:], *sequence.logprobs]
        torch.testing.assert_close(torch.tensor(said), whole, rtol=0, atol=2e-5)
    assert first.prompt_logprobs[0] is None
    # Later updates of the model are not those of the sampler.
    client.forward_backward(given, "cross_entropy")
    client.optim_step(types.AdamParams(learning_rate=5e-1)).result()
    assert [each.logprobs for each in ask().sequences] == [
        each.logprobs for each in first.sequences
    ]


def test_many_requests_at_once_are_drawn_apart(service, base):
    sampler = made(service[0].create_sampling_client(base_model=base))
    params = types.SamplingParams(max_tokens=6, temperature=30.0)
    prompt = types.ModelInput.from_ints(PROMPT)
    futures = [
        sampler.sample(prompt=prompt, num_samples=2, sampling_params=params) for _ in range(8)
    ]
    drawn = [tuple(each.tokens) for future in futures for each in future.result().sequences]
    assert len(set(drawn)) == 16


def test_saved_states_go_on_where_they_were(service, base):
    client = client_of(service, base)
    tokens = rows()[1]
    given = [datum(tokens, weights=torch.ones(len(tokens) - 1))]

    def step(one):
        future = one.forward_backward(given, "cross_entropy")
        one.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        return future.result().loss_fn_outputs[0]["logprobs"].tolist()

    step(client)
    path = client.save_state("once").result().path
    whole = service[0].create_training_client_from_state_with_optimizer(path)
    alone = service[0].create_training_client_from_state(path)
    whole, alone = (each.result() if hasattr(each, "result") else each for each in (whole, alone))
    steps = [[step(each) for _ in range(2)] for each in (client, whole, alone)]
    assert steps[0] == steps[1]
    assert steps[0][0] == steps[2][0]
    assert steps[0][1] != steps[2][1]  # Adam's moments began anew
    sampled = client.save_weights_for_sampler("drawn").result().path
    sampler = made(service[0].create_sampling_client(model_path=sampled))
    scores = sampler.compute_logprobs(types.ModelInput.from_ints(tokens)).result()
    now = client.forward(given, "cross_entropy").result().loss_fn_outputs[0]["logprobs"]
    torch.testing.assert_close(torch.tensor(scores[1:]), now.to_torch(), rtol=0, atol=2e-5)
    with pytest.raises(tinker.RequestFailedError, match="a name that is free"):
        client.save_state("once").result()


def test_a_policy_learns_by_the_sdks_own_loop(service, base):
    """REINFORCE on samples of the SDK: tokens on one side of the embedding are rewarded."""
    embedding = funcrl.load_params(base)[1]["embed.weight"]
    rewarded = {*(embedding @ embedding[0] > 0).nonzero().squeeze(1).tolist()}
    client = client_of(service, base)
    prompt, means = types.ModelInput.from_ints(PROMPT), []
    for number in range(12):
        params = types.SamplingParams(max_tokens=4, stop=[], seed=number)
        sampler = made(client.save_weights_and_get_sampling_client())
        drawn = sampler.sample(prompt=prompt, num_samples=32, sampling_params=params).result()
        shares = [sum(token in rewarded for token in each.tokens) / 4 for each in drawn.sequences]
        rewards = torch.tensor(shares)
        means.append(rewards.mean().item())
        data = []
        for sequence, advantage in zip(drawn.sequences, rewards - rewards.mean(), strict=True):
            before = torch.zeros(len(PROMPT) - 1)
            behavior = torch.cat([before, torch.tensor(sequence.logprobs)])
            advantages = torch.cat([before, advantage.expand(4)])
            tokens = [*PROMPT, *sequence.tokens]
            data.append(datum(tokens, logprobs=behavior, advantages=advantages))
        gradient = client.forward_backward(data, "importance_sampling")
        client.optim_step(types.AdamParams(learning_rate=1e-2))
        gradient.result()
    assert sum(means[-3:]) / 3 > sum(means[:3]) / 3 + 0.4  # 0.67 to 0.88 with 14 sets of seeds


@pytest.mark.parametrize(
    ("ask", "named"),
    [
        (lambda client: client.forward_backward([datum(rows()[0])], "gspo"), "loss_fn to be"),
        (lambda client: client.forward_backward([datum(rows()[0])], "ppo"), "logprobs of 4"),
        (lambda client: client.forward_backward([datum(rows()[0])], "cross_entropy", {"x": 1.0}),
         "loss_fn_config"),
        (lambda client: client.forward_backward([datum(rows()[0])], "dro", {"beta": "x"}),
         "numbers in loss_fn_config"),
        (lambda client: client.forward_backward(
            [datum([1, 2, 3], advantages=torch.ones(2))], "cross_entropy"),
         "target_tokens, weights in loss_fn_inputs of cross_entropy, got 'advantages' in datum 0"),
        (lambda client: client.optim_step(types.AdamParams()), "forward_backward before it"),
        (lambda client: client.forward_backward([types.Datum(
            model_input=types.ModelInput.from_ints([1, 2, 3]),
            loss_fn_inputs={"target_tokens": [2, 9, 3], "weights": [1.0, 1.0, 1.0]})],
            "cross_entropy"), "shifted by one"),
        (lambda client: client.forward_backward([datum([1, 2, 99999, 3])], "cross_entropy"),
         "tokens below"),
        (lambda client: client.forward_backward([datum([1, 2, 99999])], "cross_entropy"),
         "tokens below"),
        (lambda client: client.forward_backward(
            [datum([1, 2, 3], weights=torch.ones(3))], "cross_entropy"), "weights of 2 numbers"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_named(service, base, ask, named):
    with pytest.raises(Exception, match=named):
        ask(client_of(service, base)).result()
    client_of(service, base).forward([datum(rows()[0])], "cross_entropy").result()  # others go on


def test_a_request_that_is_sent_again_is_done_once(service, base):
    session = posted(service[1], "create_session", {})[1]["session_id"]
    fields = {"session_id": session, "model_seq_id": 0, "base_model": base}
    fields["lora_config"] = {"rank": 2, "seed": 0}
    first, again = (posted(service[1], "create_model", fields)[1] for _ in range(2))
    assert first == again
    posted(service[1], "retrieve_future", {"request_id": first["request_id"]})
    steps = [
        posted(service[1], "optim_step", {"model_id": first["model_id"], "adam_params": {}})[1]
        for _ in range(2)
    ]
    assert steps[0] != steps[1]  # without a number each is a request of its own
    answer = posted(service[1], "retrieve_future", steps[1])[1]
    assert "forward_backward before it" in answer["error"]
    assert answer["category"] == "user"


def test_what_cannot_be_drawn_is_refused(service, base):
    """A picture would else be left out of the prompt, and 0 tokens would be all that fit."""
    ids = {"session_id": "drawn", "sampling_session_seq_id": 0, "base_model": base}
    sampler = posted(service[1], "create_sampling_session", ids)[1]["sampling_session_id"]
    text = {"type": "encoded_text", "tokens": PROMPT}
    for chunks, most, named in (
        ([text, {"type": "image", "data": "x", "format": "png"}], 3, "tokens alone"),
        ([text], 0, "max_tokens"),
    ):
        fields = {
            "sampling_session_id": sampler,
            "prompt": {"chunks": chunks},
            "sampling_params": {"max_tokens": most},
        }
        code, answer = posted(service[1], "asample", fields)
        assert code == 422
        assert named in answer["error"]


def posted(address, path, fields, key=KEY):
    body = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    request = urllib.request.Request(f"{address}/api/v1/{path}", body, {"X-API-Key": key})
    try:
        with urllib.request.urlopen(request) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


@pytest.mark.parametrize(
    ("path", "fields", "status", "named"),
    [
        ("create_session", {}, 401, "key"),
        (
            "create_model",
            {"base_model": "other", "session_id": "s", "model_seq_id": 0},
            404,
            "other",
        ),
        ("create_model", {}, 400, "base_model"),
        ("create_model", {"lora_config": 3}, 400, "SDK"),
        ("weights_info", {"tinker_path": 3}, 400, "SDK"),
        ("forward_backward", b"{}", 422, "a message of Tinker's"),
        ("get_info", {"model_id": "none"}, 404, "none"),
        ("retrieve_future", {"request_id": "99999"}, 404, "99999"),
        ("retrieve_future", {"request_id": "x"}, 404, "x"),
        ("weights_info", {"tinker_path": "tinker://a/weights/../../x"}, 400, "weights/NAME"),
        ("weights_info", {"tinker_path": "tinker://../weights/x"}, 400, "weights/NAME"),
        ("nothing", {}, 404, "nothing"),
    ],
)
def test_bad_requests_are_refused(service, path, fields, status, named):
    key = "tml-wrong" if status == 401 else KEY
    code, answer = posted(service[1], path, fields, key)
    assert code == status
    assert named in answer["error"]


def test_a_saved_name_stays_below_the_folder(service, base):
    client = client_of(service, base)
    with pytest.raises(Exception, match="weights/NAME"):
        client.save_state("../../out").result()
    assert not list(Path(service[2]).parent.glob("out"))
