"""AdamW, SGD and Muon: each a chain of one primitive, weight decay and the learning rate."""

import math
from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from funcrl.core import checks, tree
from funcrl.core.arguments import (
    Count,
    Decay,
    Fraction,
    Mask,
    NotNegative,
    TensorTree,
    checked,
)
from funcrl.core.printing import shows_arguments
from funcrl.core.types import GradientTransformation, Params, Tree
from funcrl.optim.base import add_decayed_weights, bias_correction, chain, zero_count
from funcrl.optim.eight_bits import scale_by_adam_8bit
from funcrl.optim.schedules import LearningRate, scale_by_learning_rate

# (rows, columns) -> the factor of a matrix's updates.
ShapeScale: TypeAlias = Callable[[int, int], float]
Adjust: TypeAlias = Literal["original", "match_rms_adamw"]
_SHAPE_SCALES: dict[Adjust, ShapeScale] = {
    "original": lambda rows, columns: math.sqrt(max(1, rows / columns)),
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
}


class ScaleByAdamState(NamedTuple):
    """The number of updates done, and the two moments."""

    num_updates: Tensor  # [] int64
    mean: Tree
    square: Tree


class TraceState(NamedTuple):
    """The running sum of gradients."""

    trace: Tree


class ScaleByMuonState(NamedTuple):
    """The running mean of gradients."""

    mean: Tree


@shows_arguments
@checked
def adamw(
    learning_rate: LearningRate,
    betas: tuple[Decay, Decay] = (0.9, 0.999),
    eps: NotNegative = 1e-8,
    weight_decay: NotNegative = 0.01,
    mask: Mask | None = None,
    moment_dtype: torch.dtype | Literal["8bit"] | None = None,
) -> GradientTransformation:
    """Return Adam with decoupled weight decay, as `torch.optim.AdamW` (arXiv:1711.05101).

        m = b1 m + (1 - b1) g            v = b2 v + (1 - b2) g^2
        p = p - lr (m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + weight_decay p)

    Args:
        learning_rate: a number or a schedule.
        betas: how slowly the two moments forget.
        eps: added to the root.
        weight_decay: multiplies the parameters.
        mask: which leaves decay: a tree of bools or `(path, leaf) -> bool`; all when left out.
        moment_dtype: of the moments, such as `torch.float32` for bfloat16 parameters; that of
            each parameter when left out; or "8bit", as `scale_by_adam_8bit` keeps them.

    Example:
        >>> import torch, funcrl
        >>> tx = funcrl.optim.adamw(0.1, weight_decay=0.0)
        >>> params = {"w": torch.zeros(2)}
        >>> tx.update({"w": torch.tensor([3.0, -0.2])}, tx.init(params), params)[0]
        {'w': tensor([-0.1000,  0.1000])}
    """
    return chain(
        scale_by_adam_8bit(betas, eps)
        if moment_dtype == "8bit"
        else scale_by_adam(betas, eps, moment_dtype),
        add_decayed_weights(weight_decay, mask),
        scale_by_learning_rate(learning_rate),
    )


@shows_arguments
@checked
def sgd(
    learning_rate: LearningRate,
    momentum: Fraction = 0.0,
    nesterov: bool = False,
    weight_decay: NotNegative = 0.0,
    mask: Mask | None = None,
    moment_dtype: torch.dtype | None = None,
) -> GradientTransformation:
    """Return stochastic gradient descent with momentum, as `torch.optim.SGD`.

        g = g + weight_decay p        buf = momentum buf + g        p = p - lr buf

    Args:
        learning_rate: a number or a schedule.
        momentum: how slowly the running sum of gradients forgets; 0 keeps no state.
        nesterov: whether to step by `g + momentum buf` instead of `buf`.
        weight_decay: multiplies the parameters, inside the gradient.
        mask: which leaves decay: a tree of bools or `(path, leaf) -> bool`; all when left out.
        moment_dtype: of the running sum, as in `adamw`.

    Example:
        >>> import torch, funcrl
        >>> tx = funcrl.optim.sgd(0.5)
        >>> tx.update({"w": torch.ones(1)}, tx.init({"w": torch.ones(1)}), {"w": torch.ones(1)})[0]
        {'w': tensor([-0.5000])}
    """
    if nesterov and not momentum:
        raise ValueError(f"sgd(nesterov=True) expects momentum > 0, got {momentum}.")
    links = [add_decayed_weights(weight_decay, mask)] if weight_decay else []
    links += [trace(momentum, nesterov, moment_dtype)] if momentum else []
    return chain(*links, scale_by_learning_rate(learning_rate))


@shows_arguments
@checked
def muon(
    learning_rate: LearningRate,
    momentum: Decay = 0.95,
    nesterov: bool = True,
    weight_decay: NotNegative = 0.1,
    steps: Count = 5,
    adjust: Adjust | ShapeScale = "original",
    compute_dtype: torch.dtype = torch.bfloat16,
    moment_dtype: torch.dtype | None = None,
) -> GradientTransformation:
    """Return Muon (Jordan et al., 2024; arXiv:2502.16982), as `torch.optim.Muon`.

    The running mean of a matrix's gradients is replaced by an approximation of its nearest
    semi-orthogonal matrix. Every leaf must be a matrix; give the rest to AdamW:

        matrices = lambda path, leaf: leaf.ndim == 2 and "embed" not in path
        others = lambda path, leaf: not matrices(path, leaf)
        optim.chain(optim.masked(optim.muon(2e-2), matrices),
                    optim.masked(optim.adamw(1e-3), others))

    Args:
        learning_rate: a number or a schedule.
        momentum: how slowly the running mean forgets.
        nesterov: whether to look one step ahead.
        weight_decay: multiplies the parameters, decoupled.
        steps: of the Newton-Schulz iteration.
        adjust: how the rate depends on the shape: "original", sqrt(max(1, rows / columns)), or
            "match_rms_adamw", 0.2 sqrt(max(rows, columns)), for AdamW's learning rates.
        compute_dtype: of the iteration.
        moment_dtype: of the running mean, as in `adamw`.

    Example:
        >>> import torch, funcrl
        >>> tx = funcrl.optim.muon(0.1)
        >>> params = {"w": torch.zeros(2, 2)}
        >>> tx.update({"w": torch.eye(2)}, tx.init(params), params)[0]["w"].diagonal().sign()
        tensor([-1., -1.])
    """
    return chain(
        scale_by_muon(momentum, nesterov, steps, adjust, compute_dtype, moment_dtype),
        add_decayed_weights(weight_decay),
        scale_by_learning_rate(learning_rate),
    )


@checked
def scale_by_adam(
    betas: tuple[Decay, Decay] = (0.9, 0.999),
    eps: NotNegative = 1e-8,
    moment_dtype: torch.dtype | None = None,
) -> GradientTransformation:
    """Return the transformation `m_hat / (sqrt(v_hat) + eps)` of `adamw`.

    Example:
        >>> import torch, funcrl
        >>> tx = funcrl.optim.scale_by_adam()
        >>> tx.update({"w": torch.tensor([4.0])}, tx.init({"w": torch.zeros(1)}), {})[0]
        {'w': tensor([1.])}
    """
    b1, b2 = betas

    @checked
    def init(params: Params) -> ScaleByAdamState:
        mean, square = (tree.zeros_like(params, moment_dtype) for _ in range(2))
        return ScaleByAdamState(zero_count(params), mean, square)

    @checked
    def update(
        grads: TensorTree, state: ScaleByAdamState, params: Params
    ) -> tuple[Tree, ScaleByAdamState]:
        del params
        grads = _like_moments("scale_by_adam", grads, state.mean)
        num_updates = state.num_updates + 1
        mean = tree.map(lambda m, g: torch.lerp(m, g, 1 - b1), state.mean, grads)
        square = tree.map(
            lambda v, g: torch.addcmul(b2 * v, g, g, value=1 - b2), state.square, grads
        )
        mean_scale, square_scale = (bias_correction(beta, num_updates) for beta in betas)
        updates = tree.map(
            lambda m, v: ((m / mean_scale) / ((v / square_scale).sqrt() + eps)).to(m.dtype),
            mean,
            square,
        )
        return updates, ScaleByAdamState(num_updates, mean, square)

    return GradientTransformation(init, update)


@checked
def trace(
    momentum: Fraction, nesterov: bool = False, moment_dtype: torch.dtype | None = None
) -> GradientTransformation:
    """Return the transformation `t = momentum t + g`; Nesterov's gives `momentum t + g` of that t.

    Example:
        >>> import torch, funcrl
        >>> tx, grads = funcrl.optim.trace(0.5), {"w": torch.ones(1)}
        >>> _, state = tx.update(grads, tx.init(grads), grads)
        >>> tx.update(grads, state, grads)[0]
        {'w': tensor([1.5000])}
    """

    @checked
    def init(params: Params) -> TraceState:
        return TraceState(tree.zeros_like(params, moment_dtype))

    @checked
    def update(grads: TensorTree, state: TraceState, params: Params) -> tuple[Tree, TraceState]:
        del params
        grads = _like_moments("trace", grads, state.trace)
        running = tree.map(lambda t, g: momentum * t + g, state.trace, grads)
        ahead = tree.map(lambda t, g: momentum * t + g, running, grads) if nesterov else running
        return ahead, TraceState(running)

    return GradientTransformation(init, update)


@checked
def scale_by_muon(
    momentum: Decay = 0.95,
    nesterov: bool = True,
    steps: Count = 5,
    adjust: Adjust | ShapeScale = "original",
    compute_dtype: torch.dtype = torch.bfloat16,
    moment_dtype: torch.dtype | None = None,
) -> GradientTransformation:
    """Return the transformation of `muon`: momentum, orthogonalised, scaled by the shape.

    Example:
        >>> import torch, funcrl
        >>> tx = funcrl.optim.scale_by_muon()
        >>> tx.init({"b": torch.zeros(3)})
        Traceback (most recent call last):
        ValueError: scale_by_muon expects matrices, got b of shape [3]; leave it out by masked.
    """
    shape_scale = adjust if callable(adjust) else _SHAPE_SCALES[adjust]

    @checked
    def init(params: Params) -> ScaleByMuonState:
        for path, leaf in zip(tree.paths(params), tree.leaves(params), strict=True):
            if leaf.ndim != 2:
                raise ValueError(
                    f"scale_by_muon expects matrices, got {path} of shape {list(leaf.shape)}; "
                    "leave it out by masked."
                )
        return ScaleByMuonState(tree.zeros_like(params, moment_dtype))

    def orthogonalize(matrix: Tensor) -> Tensor:
        update = newton_schulz(matrix.to(compute_dtype), steps)
        return update.to(matrix.dtype) * shape_scale(*matrix.shape)

    @checked
    def update(
        grads: TensorTree, state: ScaleByMuonState, params: Params
    ) -> tuple[Tree, ScaleByMuonState]:
        del params
        grads = _like_moments("scale_by_muon", grads, state.mean)
        mean = tree.map(lambda m, g: torch.lerp(m, g, 1 - momentum), state.mean, grads)
        ahead = tree.map(lambda m, g: torch.lerp(g, m, momentum), mean, grads) if nesterov else mean
        return tree.map(orthogonalize, ahead), ScaleByMuonState(mean)

    return GradientTransformation(init, update)


@checked
def newton_schulz(matrix: Tensor, steps: int = 5) -> Tensor:
    """Return nearly `U V^T` for `matrix = U S V^T`: its singular values are 0.7 to 1.2.

        X = M / |M|;   A = X X^T;   X = a X + (b A + c A A) X   (steps times)

    with Muon's quintic coefficients (3.4445, -4.7750, 2.0315), steepest at 0.

    Example:
        >>> import torch, funcrl
        >>> funcrl.optim.newton_schulz(torch.diag(torch.tensor([9.0, 1.0]))).diagonal() > 0.6
        tensor([True, True])
    """
    checks.check_rank("newton_schulz", "matrix", matrix, "MN")
    a, b, c = 3.4445, -4.7750, 2.0315
    # Transposed where that makes the Gram matrix smaller.
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.T
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.addmm(x, polynomial, x, beta=a)
    return x.T if matrix.shape[0] > matrix.shape[1] else x


def _like_moments(function: str, grads: TensorTree, moments: Tree) -> Tree:
    tree.check_same_shapes(function, "gradients", grads, "the parameters of init", moments)
    return tree.map(lambda grad, moment: grad.to(moment.dtype), grads, moments)
