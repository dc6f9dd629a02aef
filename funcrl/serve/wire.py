"""Messages of Tinker's protocol from and to tensors; the `tinker` package says what they are."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from google.protobuf.message import DecodeError
from tinker.proto import tinker_public_pb2 as messages
from torch import Tensor

from funcrl.core.types import Samples

KIND = "application/x-protobuf"
_NUMPY = {messages.DTYPE_FLOAT32: np.float32, messages.DTYPE_INT64: np.int64}


class Datum(NamedTuple):
    """One sequence to learn from."""

    tokens: list[int]  # [n] that the model reads
    inputs: dict[str, Tensor]  # [n] each, of the loss, by name


class Gradients(NamedTuple):
    """What `forward_backward` is asked for."""

    model_id: str
    number: int
    data: list[Datum]
    loss: str
    options: dict[str, float]
    forward_only: bool


def read_gradients(body: bytes) -> Gradients:
    """Return the request of a message."""
    message = messages.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise ValueError(f"forward_backward expects a message of Tinker's: {error}.") from error
    texts = [name for name, value in message.loss_fn_config_v2.items() if value.text]
    if texts:
        raise ValueError(f"forward_backward expects numbers in loss_fn_config, got {texts[0]!r}.")
    data = [_datum(each) for each in message.data]
    return Gradients(
        message.model_id,
        message.seq_id,
        data,
        message.loss_fn,
        dict(message.loss_fn_config),
        message.forward_only,
    )


def _datum(message: Any) -> Datum:
    tokens: list[int] = []
    for chunk in message.model_input:
        if not chunk.HasField("encoded_text"):
            raise ValueError("forward_backward expects inputs of tokens alone, got another chunk.")
        tokens += np.frombuffer(chunk.encoded_text.tokens, dtype=np.int32).tolist()
    inputs = {name: _tensor(name, each) for name, each in message.loss_fn_inputs.items()}
    return Datum(tokens, inputs)


def _tensor(name: str, message: Any) -> Tensor:
    if message.HasField("sparse_csr") or len(message.shape) > 1:
        raise ValueError(
            f"forward_backward expects one number a token in {name}, got the shape "
            f"{list(message.shape)}."
        )
    if message.dtype not in _NUMPY:
        raise ValueError(
            f"forward_backward expects float32 or int64 in {name}, got the type {message.dtype}."
        )
    found = np.frombuffer(message.dense, dtype=_NUMPY[message.dtype])
    return torch.from_numpy(found.copy())


def write_gradients(logprobs: Sequence[Tensor], metrics: dict[str, float]) -> bytes:
    """Return the message of each datum's log-probabilities, and of metrics."""
    message = messages.ForwardBackwardOutput()
    message.loss_fn_output_type = "ArrayRecord"
    record = message.loss_fn_outputs.add()
    record.num_datums = len(logprobs)
    column = record.fields["logprobs"]
    column.dtype = messages.DTYPE_FLOAT32
    column.data = b"".join(_bytes(each, np.float32) for each in logprobs)
    ends = np.cumsum([0, *(4 * len(each) for each in logprobs)], dtype=np.int64)
    column.offsets = ends.tobytes()
    message.metrics.update(metrics)
    written: bytes = message.SerializeToString()
    return written


def write_samples(samples: Samples, rows: range, prompt_logprobs: list[float] | None) -> bytes:
    """Return the message of some samples, with log-probabilities under the policy itself.

    Args:
        samples: of several requests.
        rows: those of this one.
        prompt_logprobs: of the prompt's tokens, the first's is not a number; or None.
    """
    message = messages.SampleResponse()
    for row in rows:
        kept = samples.mask[row]
        sequence = message.sequences.add()
        stopped = samples.finish_reasons[row] == "stop"
        sequence.stop_reason = messages.STOP_REASON_STOP if stopped else messages.STOP_REASON_LENGTH
        sequence.tokens = _bytes(samples.tokens[row][kept], np.int32)
        sequence.logprobs = _bytes(samples.policy_logprobs[row][kept], np.float32)
    if prompt_logprobs is not None:
        message.prompt_logprobs = np.asarray(prompt_logprobs, dtype=np.float32).tobytes()
    written: bytes = message.SerializeToString()
    return written


def _bytes(values: Tensor, dtype: Any) -> bytes:
    written: bytes = values.detach().cpu().numpy().astype(dtype).tobytes()
    return written
