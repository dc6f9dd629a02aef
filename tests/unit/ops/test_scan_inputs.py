"""What the scans refuse, each in words that name the function, and the dtypes that they take."""

import pytest
import torch
from recurrent_cases import CELLS, SCANS, case, close

from funcrl import tree

L_2 = "params named weight_ih_l0, weight_hh_l0, bias_ih_l0, bias_hh_l0"


def without(params, *names):
    return {name: each for name, each in params.items() if name not in names}


@pytest.mark.parametrize(("change", "message"), [
    (lambda x, p, s, r: (x[0, 0], p), r"x of shape \[..., T, D\] with T of at least 1, got \[5\]"),
    (lambda x, p, s, r: (x[:, :0], p), r"with T of at least 1, got \[2, 0, 5\]"),
    (lambda x, p, s, r: (x, {}), f"{L_2}, and so on for each layer, got 'none'"),
    (lambda x, p, s, r: (x, {**p, "weight_hr_l0": x}), f"{L_2}.*, got 'weight_hr_l0'"),
    (lambda x, p, s, r: (x, {**p, "bias_ih_l2": x}), f"{L_2}.*, got 'bias_ih_l2'"),
    (lambda x, p, s, r: (x, without(p, "bias_hh_l1")), r"params\['bias_hh_l1'\], got \["),
    (lambda x, p, s, r: (x, without(p, "weight_ih_l0")), r"params\['weight_ih_l0'\], got \["),
    (lambda x, p, s, r: (x, without(p, "weight_hh_l0")), r"got 'bias_hh_l1'"),
    (lambda x, p, s, r: (x[..., :3], p), r"params\['weight_ih_l0'\] of shape \[\d\d, 3\], got"),
    (lambda x, p, s, r: (x, {**p, "weight_hh_l1": p["weight_hh_l1"][:, :3]}),
     r"params\['weight_hh_l1'\] of shape \[\d\d, 8\], got \[\d\d, 3\]"),
    (lambda x, p, s, r: (x.float(), p), r"params\['weight_ih_l0'\] of torch.float32, got"),
    (lambda x, p, s, r: (x.long(), p), "x of a floating-point dtype, got torch.int64"),
    (lambda x, p, s, r: (x, p, tree.map(lambda e: e[0], s)),
     r"of shape \[2, 2, 8\], \[..., L, H\], got \[2, 8\]"),
    (lambda x, p, s, r: (x, p, tree.map(lambda e: e.float(), s)),
     "of torch.float64, got torch.float32"),
    (lambda x, p, s, r: (x, p, s, r[0]),
     r"resets of the shape of x without its last axis, \[2, 7\]"),
    (lambda x, p, s, r: (x, {**p, "weight_hh_l1": p["weight_hh_l1"].to("meta")}),
     r"params\['weight_hh_l1'\] on the device of x, cpu, got meta"),
    (lambda x, p, s, r: (x, p, s, r.to("meta")), "resets on the device of x, cpu, got meta"),
    (lambda x, p, s, r: (x, p, s, r.long()), "resets of torch.bool, got torch.int64"),
])  # fmt: skip
@pytest.mark.parametrize("cell", CELLS)
def test_what_does_not_fit_is_refused(cell, change, message):
    given = change(*case(cell, (2,), layers=2)[:4])
    with pytest.raises((TypeError, ValueError), match=f"^{cell}_scan expects .*{message}"):
        SCANS[cell](*given)


@pytest.mark.parametrize(("options", "message"), [
    ({"backend": "loop", "recompute": "full"},
     "with backend='loop' expects recompute='none', got 'full'"),
    ({"backend": "cudnn", "recompute": "chunk"},
     "with backend='cudnn' expects recompute='none', got 'chunk'"),
    ({"backend": "cudnn"}, "with backend='cudnn' expects resets=None, got a tensor"),
    ({"backend": "cudnn", "resets": None},
     "with backend='cudnn' expects float64, 32 or 16 on a GPU that has cuDNN, "
     "got torch.float64 on cpu"),
    ({"backend": "op", "precision": "tf32"},
     "with backend='op' expects precision='ieee', got 'tf32'"),
    ({"backend": "loop", "precision": "tf32"},
     "with backend='loop' expects precision='ieee', got 'tf32'"),
    ({"precision": "tf32"}, "with backend='op' expects precision='ieee', got 'tf32'"),
    ({"backend": "cuda"}, "expects backend to be 'auto' or 'loop' or 'op' or 'exact' or 'triton'"),
    ({"recompute": True}, "expects recompute to be 'none' or 'full' or 'chunk', got True"),
])  # fmt: skip
@pytest.mark.parametrize("cell", CELLS)
def test_a_backend_says_what_it_does_not_do(cell, options, message):
    x, params, state, resets, _ = case(cell, (2,))
    with pytest.raises((TypeError, ValueError), match=f"^{cell}_scan {message}"):
        SCANS[cell](x, params, state, **{"resets": resets, **options})


@pytest.mark.parametrize("cell", CELLS)
def test_on_a_cpu_auto_is_the_operator(cell):
    args = case(cell, (2,))[:4]
    close(SCANS[cell](*args), SCANS[cell](*args, backend="op"), 0.0)


@pytest.mark.parametrize("backend", ["loop", "op"])
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_step_in_half_precision_is_off_by_its_roundings(dtype, cell, backend):
    """Its bound, with P for the largest sum of magnitudes in a product and its biases.

    At most four results of size P are rounded, each by eps / 2 of itself, on the way to what a
    gate's activation gets: d = 2 eps P. A sigmoid's slope is at most 1/4, that of tanh 1.
        lstm: c is off by |c0| d/4 + d/4 + d,  and h by that, and d/4 of o
        gru:  n is off by d + |m| d/4 + d,     and h by that, and (|h0| + 1) d/4 of z
    The result is rounded to h by eps / 2 at most.
    """
    x, params, state, _, _ = case(cell, (64,), 1, dtype=dtype)
    h, c = (state[0], state[1].float()) if cell == "lstm" else (state, None)
    state = h if c is None else (h, c)
    exact = tree.cast((x, params, state), torch.float64)
    (wanted, _), (outputs, last) = (
        SCANS[cell](*given, backend=backend) for given in (exact, (x, params, state))
    )
    x, params, state = tree.map(torch.abs, exact)
    h = state[0] if cell == "lstm" else state
    products = [x[:, 0] @ params["weight_ih_l0"].mT, h[:, 0] @ params["weight_hh_l0"].mT]
    largest = max(sum(products, params["bias_ih_l0"] + params["bias_hh_l0"]).flatten().tolist())
    eps = torch.finfo(dtype).eps
    off = 2 * eps * largest
    more = 6 + state[1].max().item() if cell == "lstm" else 9 + largest + h.max().item()
    assert outputs.dtype == dtype
    assert [each.dtype for each in tree.leaves(last)] == [dtype, torch.float32][
        : 1 + (c is not None)
    ]
    assert (outputs.double() - wanted).abs().max() <= off * more / 4 + eps / 2
