"""Runs whose optimizer keeps its moments in eight bits: resumed, compiled, shared by ranks."""

from dataclasses import replace

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
        traced = CompileConfig(backend="eager", fuse="none")
        config = small(tmp_path / "whole", compile=traced, **options)
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
    status, output = ended(torchrun(tmp_path / "both", 2, (*options, "--shard", "state")))
    assert status == 0, output
    config = replace(CONFIG, optimizer=replace(SMALL, max_grad_norm=1e9), run_dir=tmp_path / "one")
    threads = torch.get_num_threads()
    try:
        wanted = funcrl.train(config).state.params
    finally:
        torch.set_num_threads(threads)
    found = params_of(tmp_path / "both", config)
    for name, leaf in wanted.items():
        assert torch.equal(found[name], leaf), name
