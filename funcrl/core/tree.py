"""Operations on pytrees of tensors, by optree, with errors that name the leaf."""

from collections.abc import Callable, Collection
from typing import Any

import optree
import torch
from torch import Tensor

from funcrl.core.arguments import NumberTree, TensorTree, checked
from funcrl.core.numerics import at_least_float32
from funcrl.core.types import Tree


@checked
def map(fn: Callable[..., Any], tree: Tree, *rest: Tree) -> Tree:
    """Return the tree of `fn(leaf, *leaves of rest)`; every tree must have the same structure.

    Example:
        >>> import torch
        >>> from funcrl import tree
        >>> tree.map(lambda a, b: a + b, {"w": torch.ones(2)}, {"w": torch.ones(2)})
        {'w': tensor([2., 2.])}
    """
    for other in rest:
        check_same_structure("tree.map", tree, other)
    return optree.tree_map(fn, tree, *rest)


@checked
def map_with_path(fn: Callable[[str, Any], Any], tree: Tree) -> Tree:
    """Return the tree of `fn(path, leaf)`, the path joined by dots.

    Example:
        >>> from funcrl import tree
        >>> tree.map_with_path(lambda path, leaf: path, {"a": {"b": 1}})
        {'a': {'b': 'a.b'}}
    """
    return optree.tree_map_with_accessor(lambda at, leaf: fn(_dotted(at), leaf), tree)


@checked
def leaves(tree: Tree) -> list[Any]:
    """Return the leaves, dictionaries in sorted order of their keys.

    Example:
        >>> from funcrl import tree
        >>> tree.leaves({"b": 2, "a": (1,)})
        [1, 2]
    """
    return optree.tree_leaves(tree)


@checked
def paths(tree: Tree) -> list[str]:
    """Return each leaf's path joined by dots, in the order of `leaves`.

    Example:
        >>> from funcrl import tree
        >>> tree.paths({"b": 2, "a": (1,)})
        ['a.0', 'b']
    """
    return [_dotted(accessor) for accessor in optree.tree_accessors(tree)]


@checked
def flatten(tree: Tree) -> tuple[list[Any], Callable[[list[Any]], Tree]]:
    """Return the leaves and the function that puts leaves back into this structure.

    Example:
        >>> from funcrl import tree
        >>> values, unflatten = tree.flatten({"a": 1, "b": (2,)})
        >>> unflatten([10 * value for value in values])
        {'a': 10, 'b': (20,)}
    """
    values, spec = optree.tree_flatten(tree)
    return values, spec.unflatten


@checked
def structure(tree: Tree) -> Any:
    """Return the structure of a tree, without leaves; equal for any order of a dictionary's keys.

    Example:
        >>> from funcrl import tree
        >>> tree.structure({"a": 1, "b": (2,)}) == tree.structure({"b": (4,), "a": 3})
        True
    """
    return optree.tree_structure(tree)


@checked
def zeros_like(tree: TensorTree, dtype: torch.dtype | None = None) -> Tree:
    """Return a tree of zeros with the shapes of `tree`, in its dtypes unless one is given.

    Example:
        >>> import torch
        >>> from funcrl import tree
        >>> tree.zeros_like({"w": torch.ones(2)})
        {'w': tensor([0., 0.])}
    """
    return map(lambda leaf: torch.zeros_like(leaf, dtype=dtype), tree)


@checked
def add(a: Tree, b: Tree) -> Tree:
    """Return `a + b`, leaf by leaf; tensors must have equal shapes.

    Example:
        >>> from funcrl import tree
        >>> tree.add({"w": 1.0}, {"w": 2.0})
        {'w': 3.0}
    """
    check_same_shapes("tree.add", "the second tree", b, "the first", a)
    return optree.tree_map(lambda x, y: x + y, a, b)


@checked
def scale(tree: NumberTree, factor: float | Tensor) -> Tree:
    """Return `factor * tree`, leaf by leaf and in each leaf's dtype; the factor is one number.

    Example:
        >>> from funcrl import tree
        >>> tree.scale({"w": 2.0}, 3.0)
        {'w': 6.0}
    """
    if isinstance(factor, Tensor) and factor.ndim:
        raise ValueError(
            f"tree.scale expects factor to be one number, got a tensor of shape "
            f"{list(factor.shape)}."
        )
    return map(lambda leaf: _like(leaf * factor, leaf), tree)


@checked
def cast(tree: TensorTree, dtype: torch.dtype) -> Tree:
    """Return the tree with its floating-point leaves in `dtype` and all others unchanged.

    Example:
        >>> import torch
        >>> from funcrl import tree
        >>> tree.cast({"w": torch.ones(1), "n": torch.ones(1, dtype=torch.int64)}, torch.bfloat16)
        {'w': tensor([1.], dtype=torch.bfloat16), 'n': tensor([1])}
    """
    return map(lambda leaf: leaf.to(dtype) if leaf.is_floating_point() else leaf, tree)


@checked
def contiguous(tree: Tree, keys: Collection[str]) -> Tree:
    """Return the tree with the named leaves contiguous, and every other leaf the very same tensor.

    A leaf that is contiguous already is not copied.

    Args:
        tree: a tree of tensors, such as parameters.
        keys: the paths of the leaves to lay out, as `paths` gives them.

    Example:
        >>> import torch
        >>> from funcrl import tree
        >>> params = {"a": torch.ones(3, 2).T, "b": torch.ones(3, 2).T}
        >>> laid = tree.contiguous(params, ["a"])
        >>> laid["a"].is_contiguous(), laid["b"] is params["b"]
        (True, True)
    """
    known = paths(tree)
    for key in keys:
        if key not in known:
            raise ValueError(
                f"tree.contiguous expects keys to be paths of leaves, such as {known[:3]}, got "
                f"{key!r}."
            )
    named = {path: leaf for path, leaf in zip(known, leaves(tree), strict=True) if path in keys}
    check_tensors("tree.contiguous", "the leaves that keys name", named)
    return map_with_path(lambda path, leaf: leaf.contiguous() if path in named else leaf, tree)


@checked
def global_norm(tree: TensorTree) -> Tensor:
    """Return the Euclidean norm of all leaves taken as one vector, summed in at least float32.

    Example:
        >>> import torch
        >>> from funcrl import tree
        >>> tree.global_norm({"a": torch.tensor([3.0]), "b": torch.tensor([4.0])})
        tensor(5.)
    """
    tensors = leaves(tree)
    if not tensors:
        raise ValueError("tree.global_norm expects at least one leaf, got an empty tree.")
    return torch.linalg.vector_norm(torch.stack([leaf_norm(leaf) for leaf in tensors]))


@checked
def leaf_norm(leaf: Tensor) -> Tensor:
    """Return one leaf's Euclidean norm in at least float32.

    Example:
        >>> import torch
        >>> from funcrl import tree
        >>> tree.leaf_norm(torch.tensor([3.0, 4.0], dtype=torch.bfloat16))
        tensor(5.)
    """
    return torch.linalg.vector_norm(leaf, dtype=at_least_float32(leaf.dtype))


@checked
def check_same_structure(name: str, a: Tree, b: Tree) -> None:
    """Raise, in the name of `name`, at the first path where the structures of two trees differ.

    Example:
        >>> from funcrl import tree
        >>> tree.check_same_structure("apply", {"w": 1}, {"w": 1, "v": 1})
        Traceback (most recent call last):
        ValueError: apply expects trees of one structure, got 'v' only in the second.
    """
    if optree.tree_structure(a) == optree.tree_structure(b):
        return
    first, second = paths(a), paths(b)
    for path, owner, others in [
        *((path, "first", second) for path in first),
        *((path, "second", first) for path in second),
    ]:
        if path not in others:
            raise ValueError(
                f"{name} expects trees of one structure, got {path!r} only in the {owner}."
            )
    raise ValueError(
        f"{name} expects trees of one structure, got the nodes "
        f"{optree.tree_structure(a)} and {optree.tree_structure(b)}."
    )


@checked
def check_tensors(name: str, what: str, tree: Tree) -> None:
    """Raise, in the name of `name`, at the first leaf of `what` that is not a tensor.

    Example:
        >>> from funcrl import tree
        >>> tree.check_tensors("grpo_step", "the optimizer's state", {"count": 0})
        Traceback (most recent call last):
        TypeError: grpo_step expects tensors alone in the optimizer's state, got int at 'count'; \
torch.tensor(...) makes one of it.
    """
    for index, leaf in enumerate(leaves(tree)):
        if not isinstance(leaf, Tensor):
            raise TypeError(
                f"{name} expects tensors alone in {what}, got {type(leaf).__name__} at "
                f"{paths(tree)[index]!r}; torch.tensor(...) makes one of it."
            )


@checked
def check_same_shapes(name: str, what: str, values: Tree, like: str, expected: Tree) -> None:
    """Raise, in the name of `name`, unless two trees have one structure and equal shapes.

    Leaves that are no tensors have no shape.

    Args:
        name: of the public function that was given them.
        what: the `values` are.
        values: a tree.
        like: what the tree of the `expected` shapes is.
        expected: the tree that has them.

    Example:
        >>> import torch
        >>> from funcrl import tree
        >>> grads, params = {"w": torch.ones(2, 1)}, {"w": torch.ones(2, 2)}
        >>> tree.check_same_shapes("sgd", "gradients", grads, "the parameters", params)
        Traceback (most recent call last):
        ValueError: sgd expects gradients of the shapes of the parameters, [2, 2] at 'w', \
got [2, 1].
    """
    check_same_structure(name, expected, values)
    pairs = zip(leaves(values), leaves(expected), strict=True)
    for index, (value, wanted) in enumerate(pairs):
        tensors = isinstance(value, Tensor) and isinstance(wanted, Tensor)
        if tensors and value.shape != wanted.shape:
            raise ValueError(
                f"{name} expects {what} of the shapes of {like}, {list(wanted.shape)} at "
                f"{paths(expected)[index]!r}, got {list(value.shape)}."
            )


def _like(value: Any, leaf: Any) -> Any:
    """Return `value` in the dtype of the leaf: a 0-d tensor would take on that of a 0-d factor."""
    return value.to(leaf.dtype) if isinstance(leaf, Tensor) else value


def _dotted(accessor: optree.PyTreeAccessor) -> str:
    return ".".join(str(getattr(entry, "field", entry.entry)) for entry in accessor)
