"""A right value for each argument of every public function, and the wrong ones that are tried.

`Call`s are found by walking: each public function, and each function that one returns.
"""

import collections.abc
import inspect
import tempfile
import traceback
import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import test_purity as purity
import torch
import verifiers_guess
from recurrent_cases import case as scan_case
from torch import Tensor

import funcrl
import trl_environment
from funcrl import aggregation, config, optim, ratios, tasks
from funcrl.loop.parity import ParityConfig

WRONG: dict[str, Any] = {
    "None": None, "True": True, "3": 3, "-1": -1, "1.5": 1.5, "nan": float("nan"), "'x'": "x",
    "[]": [], "{}": {}, "object()": object(), "a tensor": torch.full((3,), 0.5),
    "a function": lambda: 0, "a class": funcrl.generators.Sampler,
}  # fmt: skip

PACKAGE = Path(funcrl.__file__).parent
FOLDER = Path(tempfile.mkdtemp())
LOGPROBS = torch.tensor([-1.0, -0.5, -2.0])
TWO = torch.zeros(1, 2, 4)
COMPLETED, GRADED = purity.roll()
GENERATOR = funcrl.generators.Sampler(purity.MICRO)
GENERATOR.push(purity.MICRO_PARAMS)
STEP = funcrl.grpo_step(purity.MODEL_FN)
STATE = STEP.init(purity.PARAMS)
TRAINING = replace(purity.TRAIN, run_dir=FOLDER / "run")
RATE = optim.sgd(0.1)

# By the name of the argument, which means the same nearly everywhere.
VALUES: dict[str, Any] = {
    "axis": funcrl.parallel.Mesh().all, "mesh": funcrl.parallel.Mesh(),
    "a": purity.MATRICES, "accuracy": lambda params: 1.0, "adapters": {}, "advantages": LOGPROBS,
    "algorithm": funcrl.grpo(), "angles": torch.zeros(3, 4), "answer": "5", "array": None,
    "b": purity.MATRICES, "base": purity.MICRO_PARAMS, "batch": purity.BATCH,
    "behavior_logprobs": LOGPROBS, "cache": 2, "completed": COMPLETED, "completion": "5",
    "config": TRAINING, "correction": ratios.truncated(2.0), "count": 1,
    "counts": torch.zeros(3, dtype=torch.int64), "data": 1, "decode": purity.spell,
    "device": "cpu", "dtype": torch.float32,
    "eps": 1e-6, "estimator": funcrl.losses.k3, "expected": purity.MATRICES, "factor": 2.0,
    "final": 0.0, "fn": purity.advantages.center, "fraction": 0.5, "function": "f",
    "generator": GENERATOR,
    "gate": TWO, "gm": purity.FLAT.gm, "gold": "5", "graded": GRADED, "grads": purity.ROWS,
    "group": torch.tensor([0, 0, 1]), "group_size": 2, "head_width": 8,
    "hidden": torch.zeros(2, 4), "initial": 1.0, "inner": RATE, "install": "", "k": TWO,
    "keys": ["a"], "kind": "a function", "label": "x", "leaf": LOGPROBS,
    "learning_rate": 0.1, "length": 20,
    "lengths": torch.arange(4), "like": "y", "log_ratio": LOGPROBS,
    "log_softmax": torch.zeros(1, 5), "logits": torch.zeros(3, 5), "logprobs": LOGPROBS,
    "loss_fn": purity.loss_fn, "mask": torch.tensor([False, True, True]), "matrix": torch.eye(2),
    "max_length": 9, "max_norm": 1.0, "metrics": purity.METRICS, "model": purity.MICRO,
    "model_fn": purity.MODEL_FN, "module": purity.MODEL, "moments": purity.MOMENTS,
    "momentum": 0.9, "more": {"format": tasks.matches("5")}, "multiple": 4, "name": "x",
    "num_tokens": torch.tensor(3), "on_error": "stop", "opt_state": RATE.init(purity.MATRICES),
    "frozen": torch.eye(4), "quantized": funcrl.ops.quantize(torch.eye(4)), "scale": 0.5,
    "ops": "native", "outcome": "5", "outcomes": COMPLETED.outcomes, "out": FOLDER / "out",
    "params": purity.PARAMS,
    "path": FOLDER / "nothing", "pattern": "5", "place": "", "policy": "none",
    "numbers": torch.arange(purity.BATCH.tokens.shape[0]),
    "positions": torch.arange(3), "prompt": purity.PROMPT, "prompt_tokens": 6,
    "prompts": COMPLETED.prompts, "q": TWO, "ratio": LOGPROBS, "ratio_fn": ratios.token,
    "ref_logprobs": LOGPROBS, "rewards": LOGPROBS, "rollout": purity.ROLLOUT,
    "rows": [[1, 2], [3]],
    "teacher_logits": torch.zeros(3, 5), "teacher_hidden": torch.zeros(2, 4),
    "teacher_weight": torch.zeros(6, 4), "batches": [purity.BATCH],
    "rotation": torch.zeros(3, 4), "rule": aggregation.token_mean, "run": FOLDER / "run",
    "sample": purity.SAMPLE,
    "sampling": purity.SAMPLING, "scores": funcrl.TokenScores(LOGPROBS, LOGPROBS), "seed": 0,
    "seeds": torch.zeros(2, dtype=torch.int64), "segment_ids": torch.zeros(3, dtype=torch.int64),
    "shape": purity.MICRO.config, "size": 2, "start": 0, "state": STATE, "step": STEP, "steps": 5,
    "stop": ("B",), "targets": torch.zeros(2, dtype=torch.int64), "task": purity.TASK,
    "tensor": LOGPROBS, "text": "5", "then": optim.constant(1.0), "theta": 1e4, "threshold": 0.05,
    "tokens": torch.tensor([1, 2, 3]), "total": torch.zeros(4), "tree": purity.MATRICES,
    "transformations": RATE,
    "truncated": torch.zeros(12, dtype=torch.bool), "uniform": torch.full((3,), 0.5), "up": TWO,
    "update": lambda grads, params: grads, "updates": purity.GRADS, "v": TWO, "value": LOGPROBS,
    "values": purity.MATRICES, "vocab_size": 13, "weight": torch.zeros(6, 4), "weight_decay": 0.1,
    "weights": [(torch.zeros(6, 4), None)], "what": "trees", "why": "", "width": 16,
    "x": torch.zeros(2, 4), "old_values": LOGPROBS, "returns": LOGPROBS,
}  # fmt: skip

# Where it means something else.
OWN: dict[str, dict[str, Any]] = {
    "aggregation.constant": {"mask": purity.ROLLOUT.mask},
    "aggregation.sequence_mean": {"mask": purity.ROLLOUT.mask},
    "aggregation.token_mean": {"mask": purity.ROLLOUT.mask},
    "ratios.sequence_mean": {"values": LOGPROBS},
    "ratios.sequence_sum": {"values": LOGPROBS},
    "arrays.to_tensor": {"array": LOGPROBS.numpy(), "like": LOGPROBS},
    "checks.check_callable": {"value": abs},
    "checks.check_choice": {"value": 1, "choices": (1, 2)},
    "checks.check_count": {"value": 1},
    "checks.check_range": {"value": 1.0, "low": 0.0, "high": 2.0},
    "checks.check_rank": {"axes": "T"},
    "checks.check_shape": {"shape": LOGPROBS.shape},
    "checks.import_extra": {"module": "math"},
    "compile_step": {"config": funcrl.CompileConfig()},
    "config.changed_options": {"before": purity.TRAIN, "after": purity.TRAIN},
    "config.from_plain": {"kind": config.CheckpointConfig, "values": {"every": 5}},
    "config.read_config": {"kind": config.CheckpointConfig},
    "evaluate": {"config": purity.EVALUATION},
    "functional": {"module": torch.nn.Embedding(5, 2)},
    "fuse_per_sample": {"module": purity.FLAT.gm},
    "generators.draw": {"logprobs": torch.zeros(3, 5).log_softmax(-1)},
    "generators.sample": {"params": purity.MICRO_PARAMS, "prompts": [[1, 2]]},
    "graph.compile_at_first": {"config": funcrl.CompileConfig()},
    "graph.split_repeated": {"module": purity.FLAT.gm},
    "graph.step_graph": {"config": funcrl.CompileConfig()},
    "grads.summed_gradient": {"loss_fn": purity.aux_loss_fn},
    "load_run": {"folder": FOLDER / "run"},
    "weights.push_to_hub": {"folder": FOLDER / "nothing", "name": "me/model"},
    "lora": {"model_fn": purity.MICRO_FN},
    "memory.num_params": {"config": purity.MICRO.config},
    "metrics.describe_rollout": {"rewards": None},
    "metrics.merge": {"reports": [purity.METRICS], "weights": [1.0]},
    "models.recur_causal": {"mix": lambda past: (past, past)},
    "models.shape": {"name": "micro"},
    "numerics.power_of_two": {"values": LOGPROBS},
    "ops.attend_hidden": {"hidden": torch.eye(2) > 2},
    **{f"ops.{cell}_scan": dict(
           zip(("x", "params", "state", "resets"), scan_case(cell, (2,))[:4], strict=True))
       for cell in ("gru", "lstm")},
    "ops.delta_gates": {
        "a": torch.zeros(2, 3), "b": torch.zeros(2, 3), "log_rate": torch.zeros(3),
        "step_bias": torch.zeros(3)},
    "ops.gated_delta_scan": {
        "decay": torch.zeros(1, 2), "beta": torch.zeros(1, 2), "state": torch.zeros(1, 4, 4),
        "resets": torch.zeros(2, dtype=torch.bool)},
    "ops.rms_norm": {"weight": torch.ones(4)},
    "ops.short_conv": {
        "weight": torch.zeros(4, 2), "history": torch.zeros(1, 4),
        "resets": torch.zeros(2, dtype=torch.bool)},
    "optim.apply_updates": {"params": purity.MATRICES},
    "optim.masked": {"mask": {"a": True, "b": False}},
    "optim.freeze": {"mask": {"a": True, "b": False}},
    "optim.constant": {"value": 0.1},
    "parity": {"config": ParityConfig(num_prompts=1, max_tokens=2)},
    "policy_loss": {"scores": purity.ROW_SCORES},
    "models.rotate": {"x": torch.zeros(4, 6), "rotation": torch.zeros(2, 4, 6)},
    "restore": {"like": purity.MATRICES},
    "rewards.soft_overlong": {"lengths": torch.arange(4)},
    "rewards.weighted_sum": {"rewards": {"x": LOGPROBS}, "weights": None},
    "rng.splitmix64": {"value": torch.zeros(2, dtype=torch.int64)},
    "rollouts.grade": {"weights": None},
    "metrics.merge_ranks": {"report": purity.METRICS, "weight": torch.tensor(2)},
    "parallel.gather_objects": {"value": "mine"},
    "parallel.whole_leaf": {"leaf": torch.zeros(3), "shape": (3,)},
    "parallel.layout_of": {"params": purity.MATRICES},
    "parallel.unshard": {
        "shards": purity.MATRICES, "layout": funcrl.parallel.layout_of(purity.MATRICES)},
    "rollouts.to_completions": {"step": 1},
    "rows.over_rows": {"fn": purity.MODEL_FN},
    "rows.over_groups": {
        "fn": torch.sum, "values": torch.zeros(4), "group": torch.zeros(4, dtype=torch.int64),
        "by_vmap": True},
    "rows.row_ends": {"mask": purity.BATCH.mask},
    "save": {"path": FOLDER / "saved", "state": purity.MATRICES},
    "save_params": {"path": FOLDER / "model", "params": purity.MICRO_PARAMS},
    "stops.cut_at_stop": {"tokens": [65, 66], "sampling": purity.STOPPING},
    "stops.has_stop_string": {"tokens": [65, 66], "sampling": purity.STOPPING},
    "tasks.data_file": {"name": "data.csv"},
    "tasks.from_environment": {
        "environment_factory": trl_environment.Guess, "rows": [{"secret": 1}], "reward": None,
        "read_calls": None},
    "optim.from_torch": {
        "make": lambda params: torch.optim.SGD(params, lr=0.1), "schedule": None,
    },
    "tasks.ask_judge": {
        "address": "http://localhost:1/v1", "model": "m", "question": "{completion}",
        "key": "", "best": 10.0, "attempts": 1, "cache": None, "options": None,
    },
    "tasks.reward_model": {
        "name": FOLDER / "nothing", "device": "cpu", "dtype": torch.float32, "batch_size": 2,
    },
    "tasks.from_verifiers": {
        "env": verifiers_guess.environment(), "tokenizer": tasks.CharTokenizer("ab"),
        "renderer": None},
    "tasks.renderer_calls": {
        "tokenizer": verifiers_guess.qwen_tokenizer(), "renderer": verifiers_guess.RENDERER},
    "tasks.json_calls": {"text": "5"},
    "tasks.python_calls": {"text": "5"},
    "tasks.from_rows": {"rows": [{"prompt": "a", "answer": "b"}]},
    "tasks.is_built_in": {"name": "sum_digits"},
    "tasks.load": {"name": "sum_digits"},
    "tasks.load_rewards": {"names": ["math:sqrt"]},
    "tasks.source_file": {"name": "sum_digits"},
    "tasks.with_rewards": {"weights": None},
    "token_scores": {"logits": torch.zeros(3, 5)},
    "forward_backward": {"model_fn": purity.MODEL_FN},
    "models.qlora": {"score": funcrl.logprob_fn},
    "choose_options": {"config": TRAINING, "given": [], "shape": purity.MICRO.config},
    "ops.adapted": {"down": torch.zeros(1, 4), "up": torch.zeros(4, 1)},
    "ops.adapted_linear": {
        "x": torch.zeros(2, 4), "down": torch.zeros(1, 4), "up": torch.zeros(4, 1)},
    "ops.truncated_logits": {
        "logits": torch.zeros(3, 5), "truncation": funcrl.ops.Truncation(top_k=2)},
    "trace": {"fn": torch.sin, "args": LOGPROBS},
    "tree.check_same_shapes": {"like": "others"},
    "tree.map": {"fn": torch.add, "rest": purity.MATRICES},
    "tree.map_with_path": {"fn": lambda path, leaf: leaf},
    "warm_start": {
        "model_fn": purity.MICRO_FN, "params": purity.MICRO_PARAMS,
        "config": config.WarmStartConfig(steps=1)},
    "weights.from_hugging_face": {
        "values": funcrl.weights.to_hugging_face(purity.MICRO.config, "float32")},
    "weights.to_hugging_face": {"config": purity.MICRO.config, "dtype": "float32"},
    "weights.translate": {"name": "norm.weight"},
    "weights.find": {"source": "."},
    "weights.find_model": {"path": Path("a.gguf")},
}  # fmt: skip


class Call(NamedTuple):
    """A function that a user can call, and values that are right for it."""

    name: str  # as a user reaches it; "adamw().update" is a function that `adamw` returns
    fn: Callable[..., Any]
    values: dict[str, Any]

    def required(self) -> dict[str, Any]:
        """The values without which it cannot be called."""
        return {
            parameter.name: self.value(parameter.name)
            for parameter in inspect.signature(self.fn).parameters.values()
            if parameter.default is parameter.empty and parameter.kind.name != "VAR_KEYWORD"
        }

    def value(self, argument: str) -> Any:
        """The right value of an argument."""
        return self.values[argument] if argument in self.values else VALUES[argument]

    def __call__(self, **values: Any) -> Any:
        """Call it, by position where an argument has no name."""
        places, names = [], {}
        for parameter in inspect.signature(self.fn).parameters.values():
            if parameter.kind.name in ("VAR_POSITIONAL", "POSITIONAL_ONLY"):
                places += [names.pop(each) for each in list(names)]
                places += [values.pop(parameter.name)] if parameter.name in values else []
            elif parameter.name in values:
                names[parameter.name] = values.pop(parameter.name)
        return self.fn(*places, **names, **values)


def calls() -> Iterator[Call]:
    """Every public function, and every function that one of them returns."""
    functions = sorted(purity.pure_functions().items())
    public = [Call(name, function, OWN.get(name, {})) for name, function in functions]
    yield from public
    seen = {place(call.fn) for call in public}
    for call in public:
        for made in returned(call) if call.name not in SLOW else ():
            if place(made.fn) not in seen:
                seen.add(place(made.fn))
                yield made


def place(fn: Callable[..., Any]) -> tuple[str, str]:
    """Where a function is defined: factories return the same one under several names."""
    return fn.__module__, inspect.unwrap(fn).__code__.co_qualname


# What is never called with right values: it would train, read files, or compile.
SLOW = {
    "build", "compile_step", "config.read_config", "evaluate", "export", "graph.compile_at_first",
    "graph.step_graph", "load_params", "load_run", "parity", "restore", "save", "save_params",
    "tasks.load_tokenizer", "train", "warm_start", "weights.load_config",
    "weights.load_network", "weights.find_model", "weights.push_to_hub",
    "tasks.reward_model", "tasks.ask_judge",
}  # fmt: skip


def returned(call: Call) -> Iterator[Call]:
    """The functions that a call returns, with values that suit them."""
    result = call(**call.required())
    if isinstance(result, funcrl.GradientTransformation):
        own = {"params": purity.MATRICES, "grads": purity.GRADS}
        own["state"] = result.init(purity.MATRICES)
    else:
        own = {"count": torch.tensor(1)} if call.name.startswith("optim.") else {}
    own |= RETURNED.get(call.name, {})
    if inspect.isfunction(result) and result.__module__.startswith("funcrl"):
        yield Call(f"{call.name}()", result, own)
    for field in getattr(result, "_fields", ()):
        part = getattr(result, field)
        if inspect.isfunction(part) and part.__module__.startswith("funcrl"):
            name = f"{call.name}().{field}"
            yield Call(name, part, own | RETURNED.get(name, {}))


RETURNED: dict[str, dict[str, Any]] = {
    "aggregation.scaled": {"mask": purity.ROLLOUT.mask},
    "losses.clipped_value": {"values": LOGPROBS},
    "functional": {"params": {"weight": torch.zeros(5, 2)}, "args": torch.tensor([1, 2, 3])},
    "ops.attend_flash_segments": dict.fromkeys("qkv", torch.zeros(1, 3, 4)),
    "ops.attend_segments": dict.fromkeys("qkv", torch.zeros(1, 3, 4)),
    "ops.choose_ops().attend_last": {
        "positions": torch.tensor([2]),
        "layer": torch.zeros(1, 2, 5, 8),
        "places": 3,
    },
    "ops.choose_ops().log_softmax": {"temperature": 1.0},
    "ops.choose_ops().rotate": {
        "parts": [torch.zeros(1, 3, 4)],
        "factors": torch.zeros(2, 1, 3, 4),
    },
    "forward_backward": {"params": purity.PARAMS, "batch": purity.BATCH},
    "optim_step().update": {
        "state": funcrl.optim_step().init(purity.MATRICES),
        "grads": purity.GRADS,
    },
    "logprob_fn": {"params": purity.MICRO_PARAMS},
    "models.recur_segments": {"mix": lambda past: (past, past)},
    "models.logits_fn": {"params": purity.MICRO_PARAMS},
    "gae": {
        "scores": purity.SCORES._replace(values=purity.SCORES.logprobs),
        "batch": purity.COLLATED,
    },
    "off_policy_mask": {"scores": purity.SCORES, "batch": purity.COLLATED},
    "recenter": {"scores": purity.SCORES, "batch": purity.COLLATED},
    "top_entropy": {"scores": purity.SCORES, "batch": purity.COLLATED},
    "lora": {"adapters": funcrl.lora(purity.MICRO_FN, purity.MICRO_PARAMS).init(0)},
    "models.qlora": {"adapters": funcrl.lora(purity.MICRO_FN, purity.MICRO_PARAMS).init(0)},
}

# What each type takes of WRONG. A function's annotation is what it promises to take.
TAKES: dict[Any, set[str]] = {
    float: {"3", "-1", "1.5"}, int: {"3", "-1"}, typing.SupportsIndex: {"3", "-1"},
    bool: {"True"}, str: {"'x'"}, types.NoneType: {"None"}, Tensor: {"a tensor"},
    collections.abc.Callable: {"a function", "a class"}, list: {"[]"}, dict: {"{}"},
    collections.abc.Sequence: {"[]"}, collections.abc.Collection: {"[]", "{}"},
    collections.abc.Mapping: {"{}"}, type: {"a class"},
}  # fmt: skip


def takes(annotation: Any) -> set[str]:
    """The names of the values that are right by their type."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return set().union(*map(takes, typing.get_args(annotation)))
    if typing.get_origin(annotation) is typing.Annotated:
        return takes(annotation.__origin__)
    return TAKES.get(typing.get_origin(annotation) or annotation, set())


def outcome(call: Call, argument: str, wrong: str) -> str:
    """ "clear", "raw", "silent": how a call with one wrong value ends."""
    values = {**call.required(), argument: WRONG[wrong]}
    try:
        call(**values)
    except (TypeError, ValueError) as error:
        frames = list(traceback.walk_tb(error.__traceback__))
        ours = Path(frames[-1][0].f_code.co_filename).is_relative_to(PACKAGE)
        return "clear" if ours and names(call, str(error)) else "raw"
    except Exception:
        return "raw"
    return "silent"


def names(call: Call, message: str) -> bool:
    """Whether a message begins with the function, or with what a helper was told to speak for."""
    own = inspect.unwrap(call.fn).__qualname__.replace(".<locals>.", "'s ").split(".__")[0]
    names = {own, own.partition("'s ")[0], call.name, call.name.rpartition(".")[2]}
    if call.name.startswith(("checks.", "rows.", "ops.choose", "tasks.check", "tree.check")):
        names |= {VALUES["function"], VALUES["name"]}
    return any(message.startswith(f"{name} expects ") for name in names)
