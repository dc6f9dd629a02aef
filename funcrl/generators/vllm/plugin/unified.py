"""funcrl's own network inside vLLM: registered classes, and nothing on disk."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn
from vllm import ModelRegistry
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention

from funcrl.config import Sampling
from funcrl.core.types import Params
from funcrl.generators.draw import sampling_logprobs
from funcrl.generators.packed import pack_weights
from funcrl.generators.vllm.plugin.attention import ExactBackend, FuncrlBackend, pack_scores
from funcrl.generators.vllm.plugin.entry import NAME, register
from funcrl.models import Transformer, TransformerConfig
from funcrl.models.functional import bind
from funcrl.ops import AttendFn
from funcrl.ops.exact import EXACT_FORWARD


def overrides(shape: TransformerConfig, own_attention: bool) -> dict[str, Any]:
    """Register the classes, and return the arguments of vLLM's engine that make it use them.

    All that describes the model is in the arguments; the registered names stand for code alone.
    """
    register()
    # The class itself: by its name alone vLLM would start a process to look at it.
    ModelRegistry.register_model(NAME, FuncrlForCausalLM)
    overrides = {
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.width,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_width,
        "num_hidden_layers": shape.num_layers,
        "intermediate_size": shape.mlp_width,
        "max_position_embeddings": shape.context_length,
        "tie_word_embeddings": shape.tied,
        "funcrl_shape": asdict(shape),
        "funcrl_attention": own_attention,
    }
    return {"config_format": "funcrl", "load_format": "funcrl", "hf_overrides": overrides}


class FuncrlForCausalLM(nn.Module):
    """What vLLM runs: `Transformer` with vLLM's cache below its attention."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        self.body = Body(vllm_config=vllm_config, prefix=f"{prefix}body.")
        self._finish: Callable[[Tensor], Tensor] | None = None  # what becomes of logits
        if self.body.skeleton.ops.exact:
            self.draw_from(Sampling())

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """Return the embeddings [N, D] of tokens."""
        out: Tensor = self.body.network.embed(input_ids)
        return out

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Any = None,
        **_: Any,
    ) -> Tensor:
        """Return the last layer's output [N, D] of the tokens of all requests, end to end."""
        del intermediate_tensors, inputs_embeds
        out: Tensor = self.body(input_ids, positions)
        return out

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Return logits [n, V] of some of the tokens; log-probabilities with exact numerics."""
        out: Tensor = self.body.network.logits(hidden_states)
        return out if self._finish is None else self._finish(out)

    def get_model_state_cls(self) -> type[Any]:
        """Return what vLLM's second runner, on a GPU, holds of a model besides."""
        if self.body.skeleton.ops.exact:
            from funcrl.generators.vllm.plugin.attention import ExactState

            return ExactState
        from vllm.v1.worker.gpu.model_states.default import DefaultModelState

        return DefaultModelState

    def draw_from(self, sampling: Sampling) -> None:
        """Let `compute_logits` return log-probabilities of what `sampling` draws from."""
        softmax = EXACT_FORWARD.log_softmax
        self._finish = lambda logits: sampling_logprobs(logits, sampling, softmax)

    def score_prompts(self) -> None:
        """Let `compute_logits` return what `unpack_score` makes the policy's numbers of."""
        self._finish = pack_scores

    def load_weights(self, weights: Any) -> set[str]:
        """Load nothing."""
        del weights
        return set()

    def adopt(self, params: Params) -> None:
        """Compute with these parameters from now on: by reference, or copied where graphs are."""
        self.body.adopt(params)

    def let_go(self) -> None:
        """Refer to no parameters until others are adopted."""
        self.body.let_go()


@support_torch_compile(dynamic_arg_dims={"input_ids": 0, "positions": 0})
class Body(nn.Module):
    """All but the logits: what vLLM compiles, if it is told to."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        hf_config = vllm_config.model_config.hf_config
        described = hf_config.funcrl_shape  # whose tuples a server gets as lists
        lists = {name: tuple(each) for name, each in described.items() if isinstance(each, list)}
        c = TransformerConfig(**described | lists)
        is_exact = c.numerics == "exact"
        self.skeleton = Transformer(c, EXACT_FORWARD if is_exact else None)
        own = ExactBackend if is_exact else FuncrlBackend
        backend = {"attn_backend": own} if hf_config.funcrl_attention else {}
        self.attention = nn.ModuleList(
            Attention(
                c.num_heads, c.head_width, c.head_width**-0.5, num_kv_heads=c.num_kv_heads,
                cache_config=vllm_config.cache_config, prefix=f"{prefix}layers.{index}.attention",
                per_layer_sliding_window=c.window if kind == "sliding" else None, **backend,
            )
            for index, kind in enumerate(c.kinds)
        )  # fmt: skip
        # Compiled code and graphs hold on to addresses: there parameters are copied into these.
        self.fixed = not vllm_config.model_config.enforce_eager
        # In the engine's dtype and on its device, which are the defaults here.
        self.network = bind(self.skeleton, self._stand_ins(torch.zeros(())))
        self.attends: Sequence[AttendFn] = [_on(layer, c) for layer in self.attention]

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """Return the last layer's output [N, D]."""
        out: Tensor = self.network(input_ids, positions, self.attends, head=_hidden)
        return out

    def adopt(self, params: Params) -> None:
        """Compute with these parameters from now on."""
        own = dict(self.network.named_parameters())
        dtype, device = self.network.norm.weight.dtype, self.network.norm.weight.device
        if self.fixed:
            torch._foreach_copy_([own[name].data for name in params], list(params.values()))
            return
        cast = {name: leaf.to(device=device, dtype=dtype) for name, leaf in params.items()}
        self.network = pack_weights(self.skeleton, cast)

    def let_go(self) -> None:
        """Refer to no parameters, if they are not this engine's own."""
        if not self.fixed:
            like = self.network.norm.weight
            self.network = bind(self.skeleton, self._stand_ins(like.new_zeros(())))

    def _stand_ins(self, zero: Tensor) -> Params:
        """Return zeros of the parameters' shapes: in memory only where parameters are copied to."""
        make = zero.new_zeros if self.fixed else zero.expand
        return {name: make(leaf.shape) for name, leaf in self.skeleton.named_parameters()}


def _on(layer: nn.Module, shape: TransformerConfig) -> AttendFn:
    """Return attention on a layer's cache: vLLM's axes are [N, H C], ours [H, N, C]."""

    def attend(q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
        del window  # which the layer has
        flat = [part.transpose(0, 1).flatten(1) for part in (q, k, v)]
        out: Tensor = layer(*flat)
        return out.unflatten(-1, (shape.num_heads, shape.head_width)).transpose(0, 1)

    return attend


def _hidden(x: Tensor, weight: Tensor) -> Tensor:
    """Return the last layer's output as it is: `compute_logits` gets some of its rows."""
    del weight
    return x
