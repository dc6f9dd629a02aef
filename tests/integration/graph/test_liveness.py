"""Predicted memory: small graphs by hand, whole steps against the allocator's own record."""

import pytest
import torch
from graphs import flat_step_as_written, flatten_as_written

import funcrl
from benchmarks.measure import peak_bytes
from funcrl.graph.aliases import find_storages
from funcrl.graph.remat import live_bytes, predict_peak

pytestmark = pytest.mark.usefixtures("one_thread")

X = torch.zeros(100)  # 400 bytes
TWO_LAYERS = {"optimizer": funcrl.optim.sgd(0.1), "num_layers": 2}


def names(gm):
    return [node.name for node in gm.graph.nodes]


def live(fn, *args) -> dict[str, int]:
    gm = flatten_as_written(fn, *args).gm
    return dict(zip(names(gm), live_bytes(gm), strict=True))


def test_a_value_is_freed_after_its_last_use():
    # x stays, the caller has it; a dies at b, b at c; c is an output.
    assert live(lambda x: x.sin().cos().exp(), X) == {
        "arg0_1": 400, "sin": 800, "cos": 1200, "exp": 1200, "output": 800,
    }  # fmt: skip


def test_a_value_that_nobody_reads_lives_while_it_is_made():
    assert live(lambda x: (x.sin(), x.cos())[1], X)["cos"] == 800


def test_a_view_keeps_what_it_looks_at_and_costs_nothing():
    bytes_ = live(lambda x: x.sin().view(10, 10).t()[:1].sum(), X)
    assert bytes_["view"] == bytes_["t"] == bytes_["slice_1"] == 800
    assert bytes_["sum_1"] == 804
    assert bytes_["output"] == 404


def test_unsafe_view_is_a_view_though_its_schema_hides_it():
    bytes_ = live(lambda x: torch.ops.aten._unsafe_view(x.sin(), [10, 10]).cos(), X)
    assert bytes_["_unsafe_view"] == 800
    assert bytes_["cos"] == 1200


def test_an_in_place_result_is_the_same_memory():
    gm = flatten_as_written(lambda x: x.sin().mul_(2).add_(1), X).gm
    assert live_bytes(gm) == [400, 800, 800, 800, 800]
    assert find_storages(gm).written == {1: 2}  # first by mul_, which follows x and sin


@pytest.mark.parametrize(
    "split", [lambda x: x.split([40, 60]), lambda x: x.view(2, 50).unbind(), lambda x: x.chunk(2)]
)
def test_parts_of_a_list_of_views_keep_the_whole(split):
    bytes_ = live(lambda x: split(x.sin())[1].cos().sum(), X)
    assert bytes_["getitem_1"] == 800
    assert bytes_["output"] == 404


def test_each_output_of_an_op_has_its_own_life():
    # Values 400 and indices 800: the indices die when the values alone have been taken.
    bytes_ = live(lambda x: x.view(1, 100).sort()[0].exp(), X)
    assert bytes_["sort"] == 1600
    assert bytes_["exp"] == 1200


def test_custom_ops_are_read_from_their_schemas():
    @torch.library.custom_op("funcrl_tests::two", mutates_args=())
    def two(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.clone(), x[:50].clone()

    @torch.library.custom_op("funcrl_tests::write", mutates_args=("x",))
    def write(x: torch.Tensor) -> None:
        x.add_(1)

    def fn(x):
        first, second = two(x)
        write(second)
        return first.sum() + second.sum()

    gm = flatten_as_written(fn, X).gm
    assert live_bytes(gm)[1] == 400 + 400 + 200
    second = next(node for node in gm.graph.nodes if node.name == "getitem_1")
    (storage,) = find_storages(gm).of[second]
    assert find_storages(gm).written == {storage: 4}  # x, two, its results, write


def test_a_new_value_takes_its_own_bytes_whatever_its_example_is_a_part_of():
    """A pass that makes an in-place op on a slice a pure one leaves the slice as its example."""
    gm = flatten_as_written(lambda x: x.sin().sum(), X).gm
    next(n for n in gm.graph.nodes if n.name == "sin").meta["val"] = torch.zeros(1000)[:100]
    assert live_bytes(gm)[1] == 800


def test_constants_of_the_graph_are_always_there():
    constant = torch.ones(100)
    gm = flatten_as_written(lambda x: (x.sin() + constant).sum(), X).gm
    assert live_bytes(gm)[-1] == 400 + 400 + 4


def test_a_node_without_an_example_value_is_refused_by_name():
    gm = flatten_as_written(lambda x: x.sin().cos(), X).gm
    del next(node for node in gm.graph.nodes if node.name == "sin").meta["val"]
    with pytest.raises(ValueError, match="predict_peak.*'sin'"):
        predict_peak(gm)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"dtype": torch.bfloat16, **TWO_LAYERS, "num_layers": 3},
        {"microbatch": 2, **TWO_LAYERS},
        {"per_sample": funcrl.clip_per_sample(1.0), **TWO_LAYERS},
        {"chunk": 16, **TWO_LAYERS},
    ],
    ids=["bfloat16", "microbatches", "per sample", "chunked head"],
)
def test_the_prediction_is_what_the_allocator_sees(options):
    flat = flat_step_as_written(**options)
    flat.gm.graph.eliminate_dead_code()
    flat.gm.recompile()
    measured = peak_bytes(flat.run) + flat.input_bytes
    assert predict_peak(flat.gm) == pytest.approx(measured, rel=0.02)
