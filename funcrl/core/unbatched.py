"""What torch.vmap and a trace cannot run, in words that say what to write instead."""

import re
import traceback
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException

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


class Unbatched(ValueError):
    """A function that `torch.vmap` cannot run for all rows at once, or a trace cannot follow."""


def explained(function: str, error: RuntimeError) -> Exception | None:
    """Return an error of our own for what vmap cannot run, None where it is another error."""
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
    # vmap's refusals have no type of their own: `item()` and `if` begin with the first of these
    # words, `tolist()` with the others, the last of them on meta tensors.
    return str(error).startswith(
        (
            "vmap: It looks like you're",
            "Cannot access data pointer of Tensor that doesn't have",
            "Cannot copy out of meta tensor",
        )
    )


def why_not_batched(error: RuntimeError) -> str:
    """Return what of a forward vmap cannot run, "" where it is another error."""
    text = str(error)
    if "autograd.Function with functorch transforms" in text:
        return "has an autograd.Function without setup_context"
    sentence = text.partition(".")[0]
    if sentence.startswith("vmap: inplace"):
        return f"writes into a tensor of its own: {sentence}"
    return f"it refuses: {sentence}" if sentence.startswith("vmap: ") else ""


def value_was_read(function: str, what: str, error: RuntimeError) -> Unbatched:
    """Return the error that names the code that read a value, and what to pass instead."""
    package = Path(__file__).parents[1]
    inside = {Path(torch.__file__).parent, *(package / x for x in ("core", "graph", "models"))}
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
    return Unbatched(
        f"{function} expects {what} that reads no tensor's value in Python (float(), if) under "
        f"vmap or funcrl.trace, got one that does{place}.{advice}"
    )
