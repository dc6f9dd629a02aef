"""Environments of verifiers: the real package plays, and what it recorded is what is trained on."""

from types import SimpleNamespace

import pytest
import torch
import verifiers_guess
from cases import equal
from renderers import Qwen3RendererConfig, create_renderer
from test_episodes import Script
from verifiers_guess import RENDERER, qwen_tokenizer

import funcrl
from funcrl.config import Sampling, TrainConfig, WarmStartConfig
from funcrl.loop.rollouts.draw import complete, to_rollout
from funcrl.loop.rollouts.grade import RewardError, grade
from funcrl.tasks import ToolCall, from_verifiers, json_calls, renderer_calls


def guess(**options):
    agent = options.pop("agent", {})
    options = {"tokenizer": qwen_tokenizer(), "renderer": RENDERER, "held_out": 0, **options}
    return from_verifiers(verifiers_guess.environment(**agent), **options)


def play(task, *turns, prompts=None, samples=1, max_tokens=9):
    """Return the rollouts in which a policy says these turns, a text for each that goes on."""
    script = Script(task.tokenizer, *turns, context_length=10_000)
    tokenizer = task.tokenizer

    def say(text, sampling):
        tokens = tokenizer.encode_answer(text)[: sampling.max_tokens]
        done = len(tokens) < sampling.max_tokens
        return ([*tokens, tokenizer.end], "stop") if done else (tokens, "length")

    script._say = say
    prompts = prompts or [digit(task, 7)]
    return complete(task, script, prompts, Sampling(samples, max_tokens=max_tokens), 3), script


def digit(task, wanted):
    return next(p for p in task.prompts(0, 0, 10) if p.data.data.secret == str(wanted))


def test_a_rollout_is_what_the_renderer_writes_and_the_policy_drew():
    task = guess()
    completed, script = play(task, ["5", "7"], ["9"], ["7"], samples=2)
    encode = task.tokenizer.encode_answer
    renderer = create_renderer(task.tokenizer._tokenizer, RENDERER)
    talk = [{"role": "user", "content": "Guess a digit!"}]
    asked = renderer.render_ids(talk, add_generation_prompt=True)
    assert script.contexts[0] == [asked, asked]
    assert completed.prompt_tokens == [asked, asked]
    assert completed.turns == [3, 1]
    row = to_rollout(completed, torch.tensor([1.0, 0.0]))
    end = task.tokenizer.end
    drawn = [token for text in "597" for token in (*encode(text), end)]
    assert row.tokens[0][row.mask[0]].tolist() == drawn
    # The generator's own numbers, -1, -2 in each turn, to the bit.
    assert row.behavior_logprobs[0][row.mask[0]].tolist() == [-1, -2] * 3
    assert row.behavior_logprobs[0][~row.mask[0]].abs().sum() == 0
    # Each turn was drawn after exactly what is trained on.
    whole = row.tokens[0].tolist()
    for contexts in script.contexts[1:]:
        assert whole[: len(contexts[0])] == contexts[0]
    assert task.tokenizer._tokenizer.decode(whole).count("<|im_start|>user\nmore") == 1
    rewards = grade(task, completed.prompts, completed.outcomes).rewards
    assert rewards["correct"].tolist() == [1, 1]
    assert rewards["tried"].tolist() == pytest.approx([0.3, 0.1])


@pytest.mark.parametrize(("temperature", "top_k"), [(1.0, 0), (0.7, 0), (1.0, 5)])
def test_rollouts_score_as_they_were_drawn_whoever_is_the_fastest(temperature, top_k):
    """Teacher forcing gives every token the log-probability that verifiers' trace has for it."""
    task = guess(tokenizer=funcrl.tasks.CharTokenizer("0123456789Guesadigt! morl"), renderer=None)
    model = funcrl.models.Transformer(funcrl.models.shape("micro", task.tokenizer.vocab_size))
    params = funcrl.init_params(model, seed=0)
    sampler = funcrl.generators.Sampler(model, decode=task.tokenizer.decode)
    sampler.push(params)
    sampling = Sampling(4, max_tokens=3, temperature=temperature, top_k=top_k)
    completed = complete(task, sampler, task.prompts(0, 0, 4), sampling, seed=1)
    assert completed.prompt_tokens == [task.tokenizer.encode("Guess a digit!")] * 16
    rollout = to_rollout(completed, torch.zeros(16))
    positions = torch.arange(rollout.tokens.shape[1]).expand_as(rollout.tokens)
    batch = funcrl.types.Sample(rollout.tokens, positions)
    truncation = funcrl.ops.Truncation(top_k=top_k) if top_k else None
    model_fn = funcrl.logprob_fn(model, temperature=temperature, truncation=truncation)
    scored = funcrl.models.logprobs.score(model_fn, params, batch).logprobs
    assert (scored - rollout.behavior_logprobs)[rollout.mask].abs().max() <= 1e-5
    policy = completed.samples.policy_logprobs[completed.samples.mask]
    assert bool(policy.isnan().all()) is (temperature != 1.0 or top_k > 0)
    again = complete(task, sampler, task.prompts(0, 0, 4), sampling, seed=1)
    assert equal(again.samples.tokens, completed.samples.tokens)
    assert equal(again.samples.logprobs, completed.samples.logprobs)


def test_an_answer_that_is_cut_off_is_said_to_be():
    completed, _ = play(guess(), ["123456789"], ["7"], max_tokens=4)
    assert completed.samples.finish_reasons == ("stop",)
    completed, _ = play(guess(), ["1"], ["2"], ["3456"], max_tokens=4)
    assert completed.samples.finish_reasons == ("length",)


def test_a_rollout_that_fails_has_no_reward_and_says_why():
    task = guess()
    prompt = digit(task, 7)

    class Broken(type(prompt.data)):
        async def setup(self, trace, runtime):
            raise RuntimeError("no such digit")

    broken = prompt._replace(data=Broken(prompt.data.data))
    completed, _ = play(task, ["7"], prompts=[broken, prompt])
    graded = grade(task, completed.prompts, completed.outcomes, on_error="skip")
    assert graded.total.isnan().tolist() == [True, False]
    assert "no such digit" in str(graded.errors[0])
    with pytest.raises(RewardError, match="no such digit"):
        grade(task, completed.prompts, completed.outcomes)


def test_a_template_that_writes_the_past_anew_is_told_from_one_that_does_not():
    """An answer that is no text of UTF-8 is another one when it is read again."""
    task = guess(renderer=None)
    end = task.tokenizer.end
    script = Script(task.tokenizer, ["x"], ["7"], ["7"], context_length=10_000)
    broken = [next(t for t in range(256) if "\ufffd" in task.tokenizer.decode([t])), end]
    script._say = lambda text, _: (
        broken if text == "x" else [*task.tokenizer.encode_answer(text), end],
        "stop",
    )
    completed = complete(task, script, [digit(task, 7)], Sampling(max_tokens=9), seed=0)
    with pytest.raises(RewardError, match="has 2 sequences of tokens, and one is expected"):
        grade(task, completed.prompts, completed.outcomes)


def test_a_generator_that_fails_ends_the_rollouts():
    task = guess()

    class Failing(Script):
        def generate(self, *_):
            raise MemoryError("no room")

    with pytest.raises(MemoryError, match="no room"):
        complete(task, Failing(task.tokenizer), [digit(task, 7)], Sampling(max_tokens=9), seed=0)


def test_sampling_is_the_runs_own():
    task = guess(agent={"sampling": {"temperature": 0.3}})
    with pytest.raises(
        RuntimeError, match="the run's own options to say how to sample.*temperature"
    ):
        play(task, ["7"])


def test_calls_are_read_in_the_form_of_a_model_that_renderers_knows():
    tokenizer = qwen_tokenizer()
    read = renderer_calls(tokenizer, RENDERER)
    calls = [{"name": "guess", "arguments": {"digit": 5}}, {"name": "hint", "arguments": {}}]
    said = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "So:", "tool_calls": [{"function": c} for c in calls]},
    ]
    text = tokenizer.inner.decode(create_renderer(tokenizer.inner, RENDERER).render_ids(said))
    answer = text.rpartition("<|im_start|>assistant\n")[2].partition("<|im_end|>")[0]
    assert read(answer) == [ToolCall("guess", {"digit": 5}), ToolCall("hint", {})]
    assert json_calls(answer) == read(answer)
    assert read("<tool_call>{</tool_call>") == [ToolCall("", {})]
    assert read("It is 5.") == []
    with pytest.raises(TypeError, match="renderer_calls expects renderer to be a config"):
        renderer_calls(tokenizer, "qwen3")


@pytest.mark.parametrize(
    ("env", "options", "message"),
    [
        (SimpleNamespace(), {}, "env to be a verifiers.v1.Env, got SimpleNamespace"),
        (None, {"renderer": "qwen3"}, "renderer to be a config of the renderers package, got str"),
        (None, {"tokenizer": funcrl.tasks.WordTokenizer(["a"])}, "files for transformers"),
    ],
)
def test_what_cannot_be_played_is_refused(env, options, message):
    given = verifiers_guess.environment() if env is None else env
    with pytest.raises((TypeError, ValueError), match=f"from_verifiers expects .*{message}"):
        from_verifiers(given, **{"tokenizer": qwen_tokenizer(), **options})


@pytest.mark.slow
def test_a_run_trains_on_it_and_resumes_to_the_same_bits(tmp_path):
    def options(name):
        return TrainConfig(
            steps=3, num_prompts=2, num_generations=2, sampling=Sampling(max_tokens=2),
            warm_start=WarmStartConfig(steps=0), run_dir=tmp_path / name,
            evaluation=funcrl.config.EvaluationConfig(every=2, num_prompts=1),
        )  # fmt: skip

    whole = funcrl.train(options("whole"), task=guess(held_out=0.2))
    assert whole.history[1]["completions/mean_turns"] == 3
    calls = iter([False, True])
    with pytest.raises(KeyboardInterrupt):
        funcrl.train(options("cut"), task=guess(held_out=0.2), stop=lambda: next(calls, True))
    rest = funcrl.train(options("cut"), task=guess(held_out=0.2), resume=True)
    assert equal(whole.state.params, rest.state.params)
    assert torch.isfinite(torch.tensor(whole.history[1]["loss"]))


QWEN3 = (  # what of Qwen3's template is between two turns
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\n<tool_response>\n' }}{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    "{% endif %}"
)


@pytest.mark.parametrize("thinks", [False, True])
def test_chat_tasks_go_on_after_an_answer_as_renderers_does(thinks):
    """funcrl encodes what follows an answer from the template; renderers has it in code."""
    inner = qwen_tokenizer().inner
    inner.chat_template = QWEN3
    kwargs = {"enable_thinking": thinks}
    tokenizer = funcrl.tasks.ChatTokenizer(inner, chat_template_kwargs=kwargs)
    config = Qwen3RendererConfig(enable_thinking=thinks, thinking_retention="all")
    renderer = create_renderer(inner, config)
    prompt = tokenizer.encode("Which shelf?")
    asked = [{"role": "user", "content": "Which shelf?"}]
    assert prompt == renderer.render_ids(asked, add_generation_prompt=True)
    said = "<think>\nhm\n</think>\n\nfour" if thinks else "four"
    answer = [*tokenizer.encode_answer(said), tokenizer.end]
    for messages, written in [
        ([{"role": "user", "content": "Are you sure?"}], tokenizer.encode_reply("Are you sure?")),
        ([{"role": "tool", "content": "4 books"}], tokenizer.encode_results(["4 books"])),
        (
            [{"role": "tool", "content": "4"}, {"role": "tool", "content": "5"}],
            tokenizer.encode_results(["4", "5"]),
        ),
    ]:
        bridged = renderer.bridge_to_next_turn(prompt, answer, messages)
        assert bridged.token_ids == [*prompt, *answer, *written]
