"""funcrl's attention on vLLM's paged cache, for head widths that vLLM has no kernel for."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, AttentionMetadataBuilder

from funcrl.ops import attend_hidden


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
