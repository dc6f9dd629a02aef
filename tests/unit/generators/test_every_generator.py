"""What every generator is: one protocol, one state, and parameters that are pushed once."""

from pathlib import Path

import pytest
import torch
from cases import tiny_model

import funcrl
from funcrl.generators import VLLM, HuggingFace, Recompute, Sampler, State
from funcrl.generators.contract import Engine, Lifecycle, pushed
from funcrl.generators.embedded.engine import EmbeddedGenerator
from funcrl.generators.vllm.settings import is_installed

METHODS = {"push", "generate", "score", "sleep", "close", "state", "pushed"}


EMBEDDED = (HuggingFace, Recompute, Sampler)


def engines():
    yield EmbeddedGenerator
    yield VLLM
    if is_installed():
        from funcrl.generators.vllm.engine import InProcess
        from funcrl.generators.vllm.remote import Remote

        yield from (InProcess, Remote)


@pytest.mark.filterwarnings("default")  # vLLM's own
def test_all_engines_have_one_protocol_and_inherit_nothing():
    assert {name for name in dir(Engine) if name in METHODS} == METHODS
    for kind in engines():
        made = {*vars(kind), *kind.__init__.__code__.co_names}  # attributes are set there
        assert made >= METHODS, kind
        assert kind.__bases__ == (object,)
    for kind in EMBEDDED:  # a constructor each, which says how a network draws, and nothing else
        assert kind.__bases__ == (EmbeddedGenerator,)
        assert [name for name, each in vars(kind).items() if callable(each)] == ["__init__"]


def test_vllm_and_the_sampler_know_nothing_of_each_other():
    folder = Path(funcrl.generators.__file__).parent
    for one, other in (("vllm", "embedded"), ("embedded", "vllm")):
        for path in (folder / one).rglob("*.py"):
            assert f"generators.{other}" not in path.read_text(), path


def test_an_error_on_the_way_to_a_state_is_a_failed_engine():
    for error in (RuntimeError("boom"), KeyboardInterrupt()):
        lifecycle = Lifecycle()
        with pytest.raises(RuntimeError, match=r"VLLM\.generate .*call push"):
            lifecycle.check_pushed("VLLM.generate")
        with lifecycle.transition_to(State.READY):
            assert lifecycle.state is State.FAILED  # until it is done
        lifecycle.check_pushed("VLLM.generate")
        with pytest.raises(type(error)), lifecycle.transition_to(State.ASLEEP):
            raise error
        assert lifecycle.state is State.FAILED
        with pytest.raises(RuntimeError, match=r"VLLM\.generate .* failed"):
            lifecycle.check_pushed("VLLM.generate")


def test_what_is_pushed_is_told_by_identity_version_and_writes():
    params = {"a": torch.zeros(2), "b": torch.ones(3)}
    held = pushed(params, 3)
    assert held.holds(params, 3)
    assert held.holds(dict(reversed(params.items())), 3)
    assert not held.holds(params, 4)
    assert not held.holds({"a": params["a"]}, 3)
    assert not held.holds({**params, "b": params["b"].clone()}, 3)
    assert not held.is_written()
    params["b"].zero_()
    assert held.is_written()
    assert not held.holds(params, 3)
    assert not pushed(params, None).holds(params, None)  # a push without a version is a new one


def test_writes_that_torch_does_not_count_arrive_with_a_push_that_names_no_version():
    model = tiny_model()
    params = funcrl.init_params(model, seed=0)
    sampler, fresh = Sampler(model), Sampler(model)
    sampler.push(params)
    before = sampler.score([[1, 2, 3]])
    optimizer = torch.optim.AdamW(params.values(), lr=0.1, fused=True)
    for leaf in params.values():
        leaf.grad = torch.ones_like(leaf)
    counted = [leaf._version for leaf in params.values()]
    optimizer.step()
    assert counted == [leaf._version for leaf in params.values()]
    sampler.push(params)
    fresh.push(params)
    assert sampler.score([[1, 2, 3]]) == fresh.score([[1, 2, 3]]) != before
