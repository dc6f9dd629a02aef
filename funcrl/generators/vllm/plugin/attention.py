"""funcrl's attention on vLLM's paged cache, native and exact, and exact log-probabilities there."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
)
from vllm.v1.worker.gpu.model_states.default import DefaultModelState

from funcrl.ops import attend_hidden
from funcrl.ops.exact import EXACT_FORWARD
from funcrl.ops.exact.paged import attend_paged


@dataclass
class Layout:
    """Where the tokens of one forward pass belong."""

    starts: list[int]  # of each request's new tokens, and the end of the last
    lengths: list[int]  # of each request, new tokens included
    blocks: Tensor  # [requests, most] the blocks of each request
    slots: Tensor  # [tokens] where each new token's key and value go


class LayoutBuilder(AttentionMetadataBuilder):
    """Reads a `Layout` off what vLLM says of a batch."""

    def __init__(self, *args: Any, **kw: Any) -> None:
        super().__init__(*args, **kw)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> Layout:
        """Return the batch's layout."""
        del common_prefix_len, fast_build
        batch, count = common_attn_metadata, common_attn_metadata.num_reqs
        return Layout(
            batch.query_start_loc[: count + 1].tolist(),
            batch.seq_lens[:count].tolist(),
            batch.block_table_tensor[:count].long(),
            batch.slot_mapping[: batch.num_actual_tokens].long(),
        )


class FuncrlBackend(AttentionBackend):
    """Named as vLLM names any backend from outside."""

    supported_dtypes = [torch.float32, torch.bfloat16]  # noqa: RUF012 (vLLM reads a list)
    supported_kv_cache_dtypes = ["auto", "float32", "bfloat16"]  # noqa: RUF012 (the same)
    forward_includes_kv_cache_update = True

    @staticmethod
    def get_name() -> str:
        """Return the name for a backend that is not vLLM's."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[Any]:
        """Return the class that computes attention."""
        return PagedAttention

    @staticmethod
    def get_builder_cls() -> type[Any]:
        """Return the class that builds a `Layout` of each batch."""
        return LayoutBuilder

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, *_: Any, **__: Any
    ) -> tuple[int, ...]:
        """Return the cache's shape, for which versions before 0.32 ask."""
        return num_blocks, num_kv_heads, block_size, 2 * head_size


class CachedAttention(AttentionImpl):
    """Writes new keys and values into vLLM's cache; a subclass attends to what is there."""

    def __init__(self, num_heads: int, head_size: int, scale: float, *args: Any, **kw: Any) -> None:
        del args
        self.num_heads, self.head_size, self.scale = num_heads, head_size, scale
        self.num_kv_heads = kw.get("num_kv_heads", num_heads)
        self.kv_cache_dtype = kw.get("kv_cache_dtype", "auto")

    def forward(
        self, layer: Any, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor,
        attn_metadata: Any, output: Tensor, *_: Any, **__: Any,
    ) -> Tensor:  # fmt: skip
        """Write the new keys and values, and each token's attention into `output`."""
        del layer
        if attn_metadata is None:  # vLLM tries how much memory a pass takes
            return output.zero_()
        slots, size = attn_metadata.slots, kv_cache.shape[2]
        count = len(slots)
        pairs = torch.cat([key[:count], value[:count]], dim=-1).to(kv_cache.dtype)
        kv_cache[slots // size, :, slots % size] = pairs
        self.attend(query, kv_cache, attn_metadata, output)
        return output

    def attend(self, query: Tensor, kv_cache: Tensor, at: Any, output: Tensor) -> None:
        """Write each token's attention over the cache into `output`."""
        raise NotImplementedError


class PagedAttention(CachedAttention):
    """`attend_hidden` on the keys and values of each request."""

    def attend(self, query: Tensor, kv_cache: Tensor, at: Layout, output: Tensor) -> None:
        """Write each token's attention over the cache into `output`."""
        size, width = kv_cache.shape[2], self.head_size
        if at.starts == list(range(len(at.lengths) + 1)):
            self._last(query, kv_cache, at, output)
            return
        for row, length in enumerate(at.lengths):
            new = slice(at.starts[row], at.starts[row + 1])
            blocks = at.blocks[row, : -(-length // size)]
            pairs = kv_cache[blocks].transpose(0, 1).flatten(1, 2)[:, :length]
            places = torch.arange(length, device=query.device)
            hidden = places > places[length - (new.stop - new.start) :, None]
            q = query[new].transpose(0, 1)
            attended = attend_hidden(q, pairs[..., :width], pairs[..., width:], hidden)
            output[new] = attended.transpose(0, 1).to(output.dtype)

    def _last(self, query: Tensor, kv_cache: Tensor, at: Layout, output: Tensor) -> None:
        """Attend from one new token of each request, all requests at once."""
        longest, size, width = max(at.lengths), kv_cache.shape[2], self.head_size
        blocks = at.blocks[:, : -(-longest // size)]
        pairs = kv_cache[blocks].transpose(1, 2).flatten(2, 3)[:, :, :longest]
        lengths = torch.tensor(at.lengths, device=query.device)
        hidden = torch.arange(longest, device=query.device) >= lengths[:, None]
        # A slot that nobody has written to may hold NaN, and 0 times NaN is NaN.
        pairs = pairs.masked_fill(hidden[:, None, :, None], 0.0)
        count = len(at.lengths)
        q = query[:count, :, None]
        attended = attend_hidden(q, pairs[..., :width], pairs[..., width:], hidden[:, None])
        output[:count] = attended.squeeze(2).to(output.dtype)


# Of a log-probability, which is 0 or at most -2^-25: then e to its multiple is 0 in float32.
_SCALE, _ZERO = 2.0**40, -1024.0


@dataclass
class Rows:
    """Where each token of one forward pass belongs, whatever request it is of."""

    blocks: Tensor  # [requests, most] the blocks of each request
    slots: Tensor  # [tokens] where each token's key and value go
    request: Tensor  # [tokens] the request of each token
    last: Tensor  # [tokens] the place of each token in its request, -1 for padding


class RowsBuilder(AttentionMetadataBuilder):
    """Reads `Rows` off what vLLM says of a batch, without waiting for a GPU."""

    _cudagraph_support = AttentionCGSupport.ALWAYS

    def __init__(self, spec: Any, names: Any, vllm_config: Any, device: Any) -> None:
        super().__init__(spec, names, vllm_config, device)
        # A graph reads where it was captured: the rows of its batches always lie there.
        sizes = vllm_config.compilation_config.cudagraph_capture_sizes
        is_eager = vllm_config.model_config.enforce_eager
        self._most = 0 if is_eager else max(sizes or [0])
        self._kept: dict[str, Tensor] = {}

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> Rows:
        """Return the rows of a batch."""
        del common_prefix_len, fast_build
        batch, count = common_attn_metadata, common_attn_metadata.num_reqs
        starts, lengths = batch.query_start_loc[: count + 1], batch.seq_lens[:count]
        request, last = token_places(starts, lengths, batch.num_actual_tokens)
        # Padding, -1, is written to the first block, which vLLM gives to no request.
        slots = batch.slot_mapping[: batch.num_actual_tokens].long().clamp(min=0)
        blocks = batch.block_table_tensor[:count].long()
        if len(slots) > self._most:
            return Rows(blocks, slots, request, last)
        rows = {"blocks": blocks, "slots": slots, "request": request, "last": last}
        return Rows(**{name: self._keep(name, each) for name, each in rows.items()})

    def _keep(self, name: str, value: Tensor) -> Tensor:
        """Return a value where graphs read it."""
        if name not in self._kept:
            self._kept[name] = value.new_zeros(self._most, *value.shape[1:])
        return self._kept[name][: len(value)].copy_(value)


class ExactBackend(FuncrlBackend):
    """Attention of exact numerics, under the name of any backend from outside."""

    @staticmethod
    def get_impl_cls() -> type[Any]:
        """Return the class that computes attention."""
        return ExactAttention

    @staticmethod
    def get_builder_cls() -> type[Any]:
        """Return the class that builds the `Rows` of each batch."""
        return RowsBuilder


class ExactAttention(CachedAttention):
    """One call of the kernel for prompts, their pieces, what a cache had already, and decoding."""

    def attend(self, query: Tensor, kv_cache: Tensor, at: Rows, output: Tensor) -> None:
        """Write each token's attention over the cache into `output`."""
        count = len(at.slots)
        output[:count] = attend_paged(query[:count], kv_cache, at.blocks, at.request, at.last)


def token_places(starts: Tensor, lengths: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the request of each of `count` tokens, and its place there: -1 for padding.

    Args:
        starts: [requests + 1], of each request's new tokens, and the end of the last.
        lengths: [requests], new tokens included.
        count: of tokens, and of padding after them.
    """
    token = torch.arange(count, device=starts.device)
    ends = starts[1:].long()
    request = torch.searchsorted(ends, token, right=True).clamp_(max=len(ends) - 1)
    last = (lengths - ends)[request] + token
    return request, torch.where(token < ends[-1], last, -1)


def pack_scores(logits: Tensor) -> Tensor:
    """Return log-probabilities [n, V + 1] in a form that a softmax over them leaves as it is.

    Every version of vLLM normalises what it scores a prompt with once more. Multiplied by 2^40,
    which loses no bit, all are so far below the 0 of one more column that the sum is that column's.
    """
    logprobs = EXACT_FORWARD.log_softmax(logits, 1.0)
    return nn.functional.pad(torch.where(logprobs == 0, _ZERO, logprobs * _SCALE), (0, 1))


def unpack_score(packed: float) -> float:
    """Return the log-probability that `pack_scores` has packed."""
    return 0.0 if packed == _ZERO else packed / _SCALE


class ExactState(DefaultModelState):
    """What that runner asks a model for a sampler."""

    def custom_sampler(self, sampler: Any) -> tuple[Any, None]:
        """Return vLLM's sampler, which then reports what it was given."""
        return GivenLogprobs(sampler, self.model_config.get_vocab_size()), None


class GivenLogprobs:
    """A sampler whose log-probabilities are the numbers that it draws from, to the last bit."""

    def __init__(self, sampler: Any, vocab_size: int) -> None:
        self._sampler, self._vocab_size = sampler, vocab_size

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)

    def __call__(self, logprobs: Tensor, *args: Any, **kw: Any) -> Any:
        """Return vLLM's output of the log-probabilities [n, V], and these of the tokens."""
        logprobs = logprobs[:, : self._vocab_size]
        output = self._sampler(logprobs, *args, **kw)
        found = output.logprobs_tensors
        if found is not None:
            given = logprobs.gather(-1, found.logprob_token_ids.long())
            output.logprobs_tensors = found._replace(logprobs=given)
        return output
