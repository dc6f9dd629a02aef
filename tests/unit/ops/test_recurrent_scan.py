"""LSTM and GRU scans against torch's modules, and against sequences split by hand."""

import pytest
import torch
from recurrent_cases import BACKENDS, CELLS, MODULES, SCANS, case, close, loss_of
from torch.func import grad

from funcrl import tree


def module_of(cell, width_in, width, layers, bias, dtype):
    torch.manual_seed(layers)
    module = MODULES[cell](width_in, width, layers, bias=bias, batch_first=True, dtype=dtype)
    return module, dict(module.named_parameters())


def torch_states(state):
    """States [N, L, H] as torch has them: [L, N, H]."""
    return tree.map(lambda each: each.transpose(0, 1).contiguous(), state)


@pytest.mark.parametrize(("dtype", "bounds"), [
    (torch.float32, (1e-6, 1e-5)), (torch.float64, (1e-12, 1e-12)),
])  # fmt: skip
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize(("layers", "bias", "length"), [
    (1, True, 1), (1, False, 70), (2, True, 130), (3, False, 17), (3, True, 512),
])  # fmt: skip
@pytest.mark.parametrize("backend", BACKENDS)
def test_outputs_states_and_gradients_are_those_of_torch_s_module(
    backend, layers, bias, length, cell, dtype, bounds
):
    module, params = module_of(cell, 5, 8, layers, bias, dtype)
    x, _, state, _, weights = case(cell, (3,), length, layers=layers, dtype=dtype)
    leaves = [x.requires_grad_(), *tree.leaves(state), *params.values()]
    for leaf in tree.leaves(state):
        leaf.requires_grad_()

    outputs, last = SCANS[cell](x, params, state, backend=backend)
    wanted, wanted_last = module(x, torch_states(state))
    close((outputs, last), (wanted, torch_states(wanted_last)), bounds[0])

    def loss(outputs, last):
        return (outputs * weights).sum() + sum(each.square().sum() for each in tree.leaves(last))

    gradients = torch.autograd.grad(loss(outputs, last), leaves)
    close(gradients, torch.autograd.grad(loss(wanted, wanted_last), leaves), bounds[1])


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_reset_is_a_sequence_that_starts_there(backend, cell):
    """Episodes of 30, 1, 44 and 5 steps back to back; the first one starts from a state."""
    x, params, state, resets, _ = case(cell, (2,), 80, layers=2)
    starts = (30, 31, 75)
    resets = torch.zeros_like(resets)
    resets[:, starts] = True
    scan = SCANS[cell]

    def together(params, x, state):
        outputs, last = scan(x, params, state, resets, backend=backend)
        return outputs.square().sum() + sum(each.sum() for each in tree.leaves(last)), outputs

    def split(params, x, state):
        pieces = []
        for part in x.tensor_split(starts, dim=1):
            outputs, last = scan(part, params, state if not pieces else None, backend=backend)
            pieces.append(outputs)
        outputs = torch.cat(pieces, dim=1)
        return outputs.square().sum() + sum(each.sum() for each in tree.leaves(last)), outputs

    close(*(grad(fn, (0, 1, 2), has_aux=True)(params, x, state) for fn in (together, split)))


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_stands_before_a_reset_changes_nothing_after_it(backend, cell):
    x, params, state, resets, _ = case(cell, (), 9)
    resets = torch.arange(9) == 4
    outputs, _ = SCANS[cell](x, params, state, resets, backend=backend)
    worse = torch.where((torch.arange(9) < 4)[:, None], torch.nan, x)
    changed, _ = SCANS[cell](worse, params, state, resets, backend=backend)
    assert changed[:4].isnan().all()
    assert torch.equal(changed[4:], outputs[4:])


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_state_is_carried_from_one_scan_to_the_next(backend, cell):
    x, params, state, resets, _ = case(cell, (3,), 11, layers=2)
    whole, last = SCANS[cell](x, params, state, resets, backend=backend)
    outputs = []
    for step in range(11):
        part = slice(step, step + 1)
        found, state = SCANS[cell](x[:, part], params, state, resets[:, part], backend=backend)
        outputs.append(found)
    close((torch.cat(outputs, dim=1), state), (whole, last))


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize(("lead", "length"), [((), 64), ((), 65), ((3,), 150), ((5000,), 6)])
def test_recomputing_changes_no_bit(cell, lead, length):
    """Of one piece, several, and a shorter last one; pieces are of 64 steps, or of 4."""
    args = case(cell, lead, length, layers=2, dtype=torch.float32)
    found = {}
    for recompute in ("none", "full", "chunk"):
        loss = loss_of(cell, backend="op", recompute=recompute)
        found[recompute] = tree.leaves(torch.func.grad_and_value(loss, (0, 1, 2))(*args))
    for recompute in ("full", "chunk"):
        assert all(map(torch.equal, found[recompute], found["none"]))
