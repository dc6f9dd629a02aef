"""Runs whose optimizer keeps its moments in eight bits: resumed, compiled, shared by ranks."""

import pytest
import torch
from cases import equal
from test_streams_of_runs import goes_on_to_the_same_bits
from test_torchrun import CONFIG, ended, params_of, torchrun
from test_train import small, untimed

import funcrl
from funcrl.config import CompileConfig, OptimizerConfig

SMALL = OptimizerConfig(moments="8bit")


@pytest.mark.parametrize("compiled", [False, True])
def test_it_goes_on_to_the_same_bits_compiled_or_not(tmp_path, compiled):
    options = {"optimizer": SMALL, "length_multiple": 16, "num_minibatches": 2}
    config = small(tmp_path / "whole", **options)
    if compiled:
        aot = CompileConfig(backend="aot_eager", fuse="none")
        config = small(tmp_path / "whole", compile=aot, **options)
    straight = goes_on_to_the_same_bits(config)
    assert torch.uint8 in {leaf.dtype for leaf in funcrl.tree.leaves(straight.state.opt_state)}
    if compiled:
        plain = funcrl.train(small(tmp_path / "plain", **options))
        assert equal(plain.state, straight.state)
        extra = {"num_recompilations"}
        for row, other in zip(untimed(plain.history), untimed(straight.history), strict=True):
            assert row == {name: value for name, value in other.items() if name not in extra}


@pytest.mark.slow
def test_ranks_that_share_them_have_the_bits_of_one_process(tmp_path):
    """Without a norm that clips, whose sum would be in another order."""
    options = ("--optimizer.moments", "8bit", "--optimizer.max-grad-norm", "1e9")
    one, both = (tmp_path / name for name in ("one", "both"))
    status, output = ended(torchrun(one, 1, options))
    assert status == 0, output
    status, output = ended(torchrun(both, 2, (*options, "--shard", "state")))
    assert status == 0, output
    config = funcrl.config.read_config(type(CONFIG), one / "config.yaml")
    wanted, found = (params_of(folder, config) for folder in (one, both))
    for name, leaf in wanted.items():
        assert torch.equal(found[name], leaf), name
