"""Wrong values for every argument of every public function, and for every option of the commands.

A clear error is a TypeError or ValueError of funcrl's own that names the function, or the option.
"""

import contextlib
import dataclasses
import inspect
import io
import pickle
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import wrong_types
from wrong_types import WRONG, calls, outcome, takes

import funcrl
from benchmarks.generate import GenerateBenchConfig
from benchmarks.inputs import StepBenchConfig
from benchmarks.loop import LoopBenchConfig
from benchmarks.scans import RecurrentBenchConfig
from benchmarks.vllm import VLLMBenchConfig
from funcrl import cli, config
from funcrl.cli.options import UsageError, parse
from funcrl.cli.program import read_train_config
from funcrl.loop.parity import ParityConfig

EMPTY, TENSOR = {"[]", "{}"}, {"a tensor"}
MASKS = {"True", "[]", "{}", "a function", "a class"}
FUNCTIONS = {"a function", "a class"}
ALL = set(WRONG)

# What passes without an error, and why. Annotations cannot say these; all else must be refused.
_ANY_TREE = [(f"tree.{name}", "tree") for name in (
    "flatten", "leaves", "map_with_path", "paths", "structure")]  # fmt: skip
_MASKED = [(f"optim.{name}", "mask") for name in (
    "adamw", "add_decayed_weights", "freeze", "masked", "sgd")]  # fmt: skip
_TREES = [
    ("clip_per_sample()", "grads"), ("per_sample_norms", "grads"), ("rows.num_rows", "batch"),
    ("rows.split_rows", "batch"), ("tree.global_norm", "tree"), ("parallel.global_norm", "values"),
]  # fmt: skip
_EMPTY_TREES = [
    ("optim.current_learning_rate", "opt_state"), ("optim.skip_nonfinite().update", "grads"),
    ("optim.scale_by_learning_rate().update", "grads"), ("save", "state"), ("tree.cast", "tree"),
    ("tree.zeros_like", "tree"), ("parallel.broadcast_tree", "values"),
    ("parallel.pairwise_psum_tree", "values"), ("parallel.psum_scatter_tree", "values"),
    ("parallel.psum_tree", "values"), ("parallel.shard", "values"),
]  # fmt: skip
SILENT: dict[tuple[str, str], tuple[set[str], str]] = {
    **dict.fromkeys(_ANY_TREE, (ALL, "any object is a tree: what is no container is a leaf")),
    **dict.fromkeys(_MASKED, (MASKS, "a tree of bools is compared with the parameters, by init")),
    **dict.fromkeys(_TREES, (TENSOR, "a tensor is a tree of one leaf")),
    **dict.fromkeys(_EMPTY_TREES, (EMPTY | TENSOR, "as above, and a tree may be empty")),
    ("tree.check_tensors", "tree"): (EMPTY | TENSOR | {"None"}, "no leaves, and none is wrong"),
    ("tree.scale", "tree"): (
        EMPTY | TENSOR | {"True", "3", "-1", "1.5", "nan"}, "a number is a tree of one leaf"),
    ("checks.check_callable", "value"): (FUNCTIONS, "what the check is for"),
    ("checks.check_count", "value"): ({"3"}, "what the check is for"),
    ("checks.check_dtype", "value"): (TENSOR, "what the check is for"),
    ("checks.check_floating", "value"): (TENSOR, "what the check is for"),
    ("checks.check_range", "value"): ({"1.5"}, "what the check is for"),
    ("checks.check_rank", "value"): (TENSOR, "what the check is for"),
    ("checks.check_shape", "value"): (TENSOR, "what the check is for"),
    ("checks.check_tensor", "value"): (TENSOR, "what the check is for"),
    ("parallel.gather_objects", "value"): (ALL, "anything that can be pickled"),
    ("rollouts.named_rewards", "outcome"): (ALL, "an environment's state is of any kind"),
    ("tasks.from_verifiers", "renderer"): ({"None"}, "as when it is left out"),
    ("trace", "args"): (TENSOR, "what the traced function takes"),
}  # fmt: skip


def outcomes() -> dict[tuple[str, str, str], str]:
    """How a call with each wrong value in place of each argument ends."""
    return {
        (call.name, argument, wrong): outcome(call, argument, wrong)
        for call in calls()
        for argument, parameter in inspect.signature(call.fn).parameters.items()
        if parameter.kind is not parameter.VAR_KEYWORD
        for wrong in WRONG.keys() - takes(parameter.annotation)
    }


def test_right_values_are_taken():
    for call in calls():
        values = call.required()
        if call.name not in wrong_types.SLOW:
            call(**values)


@pytest.mark.slow
def test_wrong_values_are_refused():
    found = outcomes()
    allowed = {(*place, wrong) for place, (values, _) in SILENT.items() for wrong in values}
    silent = {key for key, end in found.items() if end == "silent"}
    assert silent == allowed
    raw = sorted(key for key, end in found.items() if end == "raw")
    assert len(found) > 6000
    assert len(raw) <= 0.05 * len(found), raw


def test_a_checked_function_is_the_function():
    assert str(inspect.signature(funcrl.collate)).startswith("(rollout: funcrl.core.types.Rollout")
    assert pickle.loads(pickle.dumps(funcrl.losses.k3)) is funcrl.losses.k3
    a, b = torch.rand(4), torch.rand(4)
    plain = funcrl.losses.k3(a, b)
    assert torch.equal(torch.func.vmap(funcrl.losses.k3)(a[None], b[None])[0], plain)
    assert torch.equal(funcrl.trace(funcrl.losses.k3, a, b)(a, b), plain)
    assert torch.func.grad(lambda x: funcrl.losses.k3(x, b).sum())(a).shape == a.shape


def test_a_checked_function_breaks_no_graph():
    a, b = torch.rand(4), torch.rand(4)

    def program(a, b):
        cost = funcrl.losses.as_loss(funcrl.losses.k3)  # its closure is made under the compiler
        return cost(a, b, funcrl.numerics.exp_ratio(a))

    compiled = torch.compile(program, backend="eager", fullgraph=True)
    assert torch.equal(compiled(a, b), program(a, b))


def test_the_part_that_is_wrong_is_named():
    rollout = wrong_types.VALUES["rollout"]._replace(mask=[True])
    with pytest.raises(TypeError, match=r"drop_zero_variance .*rollout\.mask"):
        funcrl.drop_zero_variance(rollout)
    step, state = wrong_types.STEP, wrong_types.STATE
    broken = state._replace(params=state.params | {"norm.weight": 3})
    with pytest.raises(TypeError, match=r"grpo_step's update .*state\.params\['norm\.weight'\]"):
        step(broken, wrong_types.VALUES["batch"])
    with pytest.raises(TypeError, match="grpo_step's update .*batch"):
        step(state, state)


@pytest.mark.parametrize("wrong", ["x", None, True, float("nan"), 2**70])
def test_a_dataclass_refuses_wrong_types_of_its_options(wrong):
    with pytest.raises((TypeError, ValueError), match="Sampling .*num_samples"):
        config.Sampling(num_samples=wrong)


TEXTS = ("", "x", "-1", "nan", "inf", "-inf", "1e400", "99999999999999999999", "\u0663", "1_000",
         "9" * 5000, "0x10", " 3", "1.5", "True", "None")  # fmt: skip
CONFIGS = (
    config.TrainConfig, config.EvalConfig, ParityConfig, StepBenchConfig, GenerateBenchConfig,
    VLLMBenchConfig, LoopBenchConfig, RecurrentBenchConfig,
)  # fmt: skip
# What an option may be besides the texts of its type, and why.
LEGITIMATE = {
    "entropy": ({"-1"}, "a negative bonus punishes entropy"),
    "max_grad_norm": ({"inf"}, "no clipping"),
    "clip_per_sample": ({"inf"}, "measured, without clipping"),
    "max_importance": ({"inf"}, "no truncation"),
    "tolerance": ({"inf"}, "any difference passes"),
    "stop": (set(TEXTS) - {""}, "a string to stop at"),
}


def right(field: dataclasses.Field) -> set[str]:
    """The texts that an option of this type may be: any name, a number, None for what has none."""
    kinds = {field.type, *typing.get_args(field.type)}  # of Count | None: Count, None
    kinds |= {part for kind in kinds for part in typing.get_args(kind)}  # and of Count: int
    texts = set(TEXTS) if kinds & {str, Path} else set()
    texts |= {"1.5", "99999999999999999999"} if float in kinds else set()
    texts |= {"True"} if bool in kinds else set()
    return (
        texts
        | ({"None"} if type(None) in kinds else set())
        | LEGITIMATE.get(field.name, [set()])[0]
    )


def options(kind: type) -> Iterator[tuple[type, dataclasses.Field]]:
    """Every option of a command: the fields of its dataclass, and of those inside."""
    for field in dataclasses.fields(kind):
        if dataclasses.is_dataclass(field.type):
            yield from options(field.type)
        else:
            yield kind, field


READ: dict[tuple[Any, str], tuple[Any, str]] = {}  # by annotation and text: many are alike


def read(kind: type, field: dataclasses.Field, text: str) -> tuple[Any, str]:
    """What the parser reads, and its error instead."""
    key = (field.type, text)
    if key not in READ:
        READ[key] = parsed(field.type, getattr(kind(), field.name), text)
    return READ[key]


def parsed(hint: Any, default: Any, text: str) -> tuple[Any, str]:
    makes = {"default": default} if default != {} else {"default_factory": dict}
    option = dataclasses.make_dataclass(
        "Option", [("value", hint, dataclasses.field(**makes))], frozen=True
    )
    try:
        (read_option,) = parse("train", [f"--value={text}"], option())
    except UsageError as error:
        return None, str(error)
    return read_option.value, ""


def end(kind: type, field: dataclasses.Field, text: str) -> str:
    """ "clear" where the parser or the dataclass names the option, "silent" where both take it."""
    value, printed = read(kind, field, text)
    if printed:
        by_tyro = re.search("matching|parse|help-all|<class", printed)
        return "clear" if "--value" in printed and not by_tyro else "raw"
    try:
        dataclasses.replace(kind(), **{field.name: value})
    except ValueError as error:
        named = any(each in str(error) for each in (field.name, field.name.replace("_", "-")))
        return "clear" if named else "raw"
    return "silent"


@pytest.mark.slow
def test_wrong_texts_are_refused_by_the_name_of_the_option():
    every = {(kind, field.name): field for each in CONFIGS for kind, field in options(each)}
    ends = {
        (kind.__name__, name, text[:30]): end(kind, field, text)
        for (kind, name), field in every.items()
        for text in set(TEXTS) - right(field)
    }
    assert len(ends) > 1500
    assert {key for key, found in ends.items() if found != "clear"} == set()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--threads x", "--threads to be an integer in the digits 0 to 9, got 'x'."),
        ("--seeds 1 x", "--seeds to be an integer in the digits 0 to 9, or several, got '1', 'x'."),
        ("--logprob-chunk x",
         "--logprob-chunk to be an integer in the digits 0 to 9 or all, got 'x'."),
        ("--enable-thinking on", "--enable-thinking to be True or False, got 'on'."),
        ("--algorithm.scale-rewards grop",
         "--algorithm.scale-rewards to be group or batch or none, got 'grop'; did you mean group?"),
        ("--log.trackers wandb x",
         "--log.trackers to be tensorboard or wandb or trackio, or several, got 'x'."),
    ],
)  # fmt: skip
def test_what_an_option_takes_is_said_in_its_order(line, said):
    with pytest.raises(UsageError) as error:
        read_train_config(line.split())
    assert str(error.value) == f"train expects {said}"


def test_every_legitimate_text_is_taken():
    every = {field.name: (kind, field) for each in CONFIGS for kind, field in options(each)}
    for name, (texts, _) in LEGITIMATE.items():
        assert {end(*every[name], text) for text in texts} == {"silent"}, name


def run(*args: str) -> tuple[int, str]:
    """The exit code of a command, and what it printed."""
    printed = io.StringIO()
    with (
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(printed),
        pytest.raises(SystemExit) as stop,
    ):
        cli.main(args)
    return stop.value.code, printed.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("--steps", "99999999999999999999"), ("--steps", "1_000"), ("--microbatch", "\u0663"),
        ("--algorithm.entropy", "\u0663"), ("--optimizer.learning-rate", "nan"),
        ("--sampling.stop-tokens", "x"), ("--reward-weights", "a=\u0663"), ("--device", "tpu"),
    ],
)  # fmt: skip
def test_a_whole_line_names_the_option(option, text):
    code, printed = run("train", "--dry-run", option, *text.split("="))
    assert code == 2
    assert option in printed


@pytest.mark.parametrize(
    ("command", "flag"),
    [
        ("train", "--dry-run"), ("train", "--drop-zero-variance"), ("train", "--no-mask-truncated"),
        ("train", "--vllm.sleep"), ("train", "--vllm.no-sleep"), ("parity", "--json"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("value", [["true"], ["-1"], [""], "="])
def test_a_value_after_a_flag_names_the_flag(command, flag, value):
    args = [f"{flag}=1"] if value == "=" else [flag, *value]
    code, printed = run(*command.split(), *args)
    assert code == 2
    assert f"{command} expects {flag.replace('_', '-')} without a value" in printed
