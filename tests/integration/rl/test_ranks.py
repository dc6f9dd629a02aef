"""Data parallelism: processes that take a step together against one with the whole batch."""

import os

import pytest
import rank_cases
import torch
from cases import equal, tiny_batch, tiny_model
from rank_cases import COMPILED, cases_of
from ranks import run_ranks

import funcrl
from funcrl.parallel import Axis, Mesh, own_rows
from funcrl.parallel.mesh import ALONE


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What each case comes to on each of 1, 2, 3 and 4 ranks, of one thread each."""
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks([rank_cases.__file__, folder], 1, seconds=600.0)  # which forks them all
    return {
        size: [torch.load(folder / str(size) / f"{rank}.pt") for rank in range(size)]
        for size in (1, 2, 3, 4)
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "size"), [(name, size) for size in (2, 3, 4) for name in cases_of(size)]
)
def test_ranks_take_the_steps_of_one(results, name, size):
    """Six or twenty in a row, with a schedule: parameters, and every metric; compiled as eager."""
    wanted = results[1][0][COMPILED[name][1] if name in COMPILED else name]
    is_exact = name.startswith("exact")
    first, *others = (rank[name] for rank in results[size])
    for other in others:
        assert equal(first["params"], other["params"])
        assert first["reports"] == other["reports"]
    for path, leaf in wanted["params"].items():
        found = first["params"][path]
        if is_exact:
            assert torch.equal(found, leaf), path
        else:
            assert (found - leaf).abs().max() <= 1e-12, path
    tolerance = 1e-4 if is_exact else 1e-9  # float32 or float64, summed in another order
    for found, report in zip(first["reports"], wanted["reports"], strict=True):
        assert found.keys() - {"num_recompilations"} == report.keys() - {"num_recompilations"}
        for metric in report.keys() - {"padding_frac", "num_recompilations"}:
            assert found[metric] == pytest.approx(report[metric], rel=tolerance, abs=tolerance)


@pytest.mark.parametrize("size", [2, 3, 4, 5])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 6, 7, 8, 12])
@pytest.mark.parametrize("in_order", [False, True])
def test_each_row_is_on_one_rank(size, rows, in_order):
    case = rank_cases.rollout_of(0, prompts=rows, samples=1)
    batch = funcrl.collate(case, funcrl.reinforce())
    parts = [own_rows(batch, Mesh(all=Axis(size, rank)), in_order) for rank in range(size)]
    assert len({len(part.mask) for part in parts}) == 1
    assert len(parts[0].mask) == -(-rows // size) or in_order
    found = torch.cat([part.tokens[part.mask.any(dim=1)] for part in parts])
    assert sorted(found.tolist()) == sorted(batch.tokens.tolist())
    total = sum(part.token_weights.sum() for part in parts)
    assert total.item() == pytest.approx(batch.token_weights.sum().item())
    if not in_order and rows >= size:
        tokens = [int(part.mask.sum()) for part in parts]
        assert max(tokens) - min(tokens) <= case.mask.shape[1]  # no more than one row's


def test_a_mesh_of_one_rank_traces_to_the_same_graph():
    model = tiny_model()
    plain, meshed = (
        funcrl.grpo_step(funcrl.logprob_fn(model), **options)
        for options in ({}, {"mesh": funcrl.parallel.make_mesh()})
    )
    state = plain.init(funcrl.tree.cast(funcrl.init_params(model, seed=0), torch.float64))
    batch = tiny_batch()
    assert own_rows(batch, ALONE) is batch
    one, other = (funcrl.trace(step.update, state, batch).code for step in (plain, meshed))
    assert one == other


def test_a_rank_that_fails_takes_the_others_along(tmp_path):
    program = (
        "import os, sys, time\n"
        "open(f'{sys.argv[1]}/{os.getpid()}', 'w').close()\n"
        "while len(os.listdir(sys.argv[1])) < 2: time.sleep(0.01)\n"
        "sys.exit(3) if sys.argv[2] == '1' else time.sleep(100)"
    )
    with pytest.raises(AssertionError, match="3"):
        run_ranks(["-c", program, tmp_path], 2)
    for process in tmp_path.iterdir():
        with pytest.raises(ProcessLookupError):
            os.kill(int(process.name), 0)


def test_a_mesh_with_a_wrong_timeout_is_refused():
    with pytest.raises(
        ValueError, match="make_mesh expects timeout to be a finite number above 0, got 0"
    ):
        funcrl.parallel.make_mesh(timeout=0)


def test_a_mesh_whose_ranks_are_no_grid_is_refused():
    """Gradients are summed over `shard` and `data`: without them over no rank."""
    with pytest.raises(ValueError, match="^grpo_step expects a mesh whose ranks are data.size"):
        funcrl.grpo_step(funcrl.logprob_fn(tiny_model()), mesh=Mesh(all=Axis(2)))
