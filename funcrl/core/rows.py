"""Rows of a batch: parts of them, a function mapped over all, and what torch.vmap cannot run."""

import re
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.func import vmap

from funcrl.core import checks, tree
from funcrl.core.arguments import TensorTree, checked
from funcrl.core.types import Params, Tree


@checked
def num_rows(function: str, batch: Tree) -> int:
    """Return B, the length of every leaf's leading axis; errors are in the name of `function`."""
    sizes: dict[str, int] = {}
    for path, leaf in zip(tree.paths(batch), tree.leaves(batch), strict=True):
        name = path or "the batch"
        checks.check_tensor(function, name, leaf)
        if leaf.ndim == 0:
            raise ValueError(f"{function} expects {name} to have a leading axis B, got a scalar.")
        sizes[name] = leaf.shape[0]
    if not sizes or 0 in sizes.values():
        raise ValueError(f"{function} expects at least one row, got an empty batch.")
    if len(set(sizes.values())) > 1:
        raise ValueError(f"{function} expects leaves of one leading axis B, got {sizes}.")
    return next(iter(sizes.values()))


@checked
def split_rows(function: str, batch: Tree, size: int | None) -> Iterator[Tree]:
    """Return consecutive parts of the batch, in order, each of at most `size` rows."""
    rows = num_rows(function, batch)
    size = size or rows
    return (
        tree.map(lambda leaf, start=start: leaf[start : start + size], batch)
        for start in range(0, rows, size)
    )


@checked
def over_rows(
    function: str, fn: Callable[[Params, Any], Any], chunk: int | None = None
) -> Callable[[Params, Tree], Any]:
    """Return `(params, batch) -> fn(params, sample)` of `chunk` rows at a time, by `torch.vmap`.

    An error is in the name of `function`, and names the operator that vmap cannot run.
    """
    mapped = vmap(fn, in_dims=(None, 0), chunk_size=chunk)

    @checked
    def rows(params: TensorTree, batch: Tree) -> Any:
        num_rows(function, batch)
        try:
            return mapped(params, batch)
        except RuntimeError as error:
            if ours := explained(function, error):
                raise ours from error
            raise

    return rows


# torch's messages where `vmap` cannot run an operator, and where an operator writes values with a
# batch axis in place into a tensor without one.
_NO_BATCHING_RULE = re.compile(r"Batching rule not implemented for (\w+::\w+)")
_NO_BATCH_AXIS = re.compile(r"output with shape .* doesn't match the broadcast shape")
# Operators of torch.nn's recurrent layers.
_RECURRENT = {
    "aten::gru": "nn.GRU", "aten::lstm": "nn.LSTM", "aten::rnn_tanh": "nn.RNN",
    "aten::rnn_relu": "nn.RNN", "aten::lstm_cell": "nn.LSTMCell",
}  # fmt: skip
_ADVICE = (
    " funcrl.logprob_fn(model) calls a model of transformers so that it reads none: without "
    "use_cache=False and without an attention_mask of [1, T]. A mask of [1, 1, T, T], with 0 where "
    "a token sees another and -inf elsewhere, is not read either: docs/models.md shows how."
)


def explained(function: str, error: RuntimeError) -> Exception | None:
    """Return an error of our own for what vmap cannot run, None where it is another error.

    Args:
        function: the public function that was given the model.
        error: what torch raised.
    """
    text = str(error)
    if found := _NO_BATCHING_RULE.search(text):
        layer = _RECURRENT.get(found[1])
        instead = (
            f"that of {layer}; write the recurrence as a loop over the tokens, as docs/models.md "
            f"does"
            if layer
            else "for which it has no batching rule; use other ones"
        )
        return NotImplementedError(
            f"{function} expects a model of operators that torch.vmap can run for all rows at "
            f"once, got {found[1]}, {instead}."
        )
    if _NO_BATCH_AXIS.search(text):
        return NotImplementedError(
            f"{function} expects a model that torch.vmap can run for all rows at once, got an "
            f"operation in place ({text}): it writes values of all rows into a tensor of none; "
            f"make that from the input, as a recurrent module's first state by "
            f"torch.zeros_like(x[0]), or do not write in place. torch's nn.RNN, nn.GRU and nn.LSTM "
            f"do: write those as a loop over the tokens, as docs/models.md does."
        )
    return value_was_read(function, "a model", error) if reads_a_value(error) else None


def reads_a_value(error: RuntimeError) -> bool:
    """Return whether the error says that a tensor has no value under vmap or in a trace."""
    # Imported here, because its module takes long to import and only an error needs it.
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    if isinstance(error, DataDependentOutputException | GuardOnDataDependentSymNode):
        return True
    # vmap's refusals have no type of their own; all of them begin with these words.
    return str(error).startswith("vmap: It looks like you're")


def value_was_read(function: str, what: str, error: RuntimeError) -> ValueError:
    """Return the error that names the code that read a value, and what to pass instead."""
    inside = {Path(torch.__file__).parent, Path(__file__).parents[1] / "core",
              Path(__file__).parents[1] / "models"}  # fmt: skip
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not inside & {Path(frame.filename), *Path(frame.filename).parents}
    ]
    place = advice = ""
    if frames:
        last = frames[-1]
        place = f" in {last.name}() at line {last.lineno} of {Path(last.filename).name}"
        if "transformers" in Path(last.filename).parts:
            advice = _ADVICE
    return ValueError(
        f"{function} expects {what} that reads no tensor's value in Python (float(), if) under "
        f"vmap or funcrl.trace, got one that does{place}.{advice}"
    )
