"""One table of parameter names: ours, Hugging Face's and GGUF's.

Tensors of a Hugging Face folder may hold several parameters: `FusedTensor`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from einops import rearrange
from torch import Tensor

from funcrl.core.arguments import checked
from funcrl.core.types import Params
from funcrl.models import TransformerConfig


class Name(NamedTuple):
    """One parameter in the three vocabularies."""

    ours: str
    hugging_face: str
    gguf: str | None = None  # None in networks that are written to no GGUF file


_OUTSIDE = (
    Name("embed.weight", "model.embed_tokens.weight", "token_embd.weight"),
    Name("norm.weight", "model.norm.weight", "output_norm.weight"),
    Name("unembed.weight", "lm_head.weight", "output.weight"),
)
_MODULES = (
    Name("attention_norm", "input_layernorm", "attn_norm"),
    Name("attention.q", "self_attn.q_proj", "attn_q"),
    Name("attention.k", "self_attn.k_proj", "attn_k"),
    Name("attention.v", "self_attn.v_proj", "attn_v"),
    Name("attention.o", "self_attn.o_proj", "attn_output"),
    Name("attention.q_norm", "self_attn.q_norm", "attn_q_norm"),
    Name("attention.k_norm", "self_attn.k_norm", "attn_k_norm"),
    Name("mlp_norm", "post_attention_layernorm", "ffn_norm"),
    Name("mlp.gate", "mlp.gate_proj", "ffn_gate"),
    Name("mlp.up", "mlp.up_proj", "ffn_up"),
    Name("mlp.down", "mlp.down_proj", "ffn_down"),
)
_MORE_MODULES = (
    # The rows of each head of queries are followed by those of its gate, in one matrix.
    Name("attention.gate", "self_attn.q_proj"),
    Name("delta.qkv", "linear_attn.in_proj_qkv"),
    Name("delta.z", "linear_attn.in_proj_z"),
    Name("delta.a", "linear_attn.in_proj_a"),
    Name("delta.b", "linear_attn.in_proj_b"),
    Name("delta.norm", "linear_attn.norm"),
    Name("delta.o", "linear_attn.out_proj"),
)
# Of networks with norms after attention and after the MLP.
_NORMS = (
    Name("attention_post_norm", "post_attention_layernorm"),
    Name("mlp_norm", "pre_feedforward_layernorm"),
    Name("mlp_post_norm", "post_feedforward_layernorm"),
)
# Parameters that are no module's only weight or bias.
_LEAVES = (
    Name("delta.conv", "linear_attn.conv1d.weight"),
    Name("delta.log_rate", "linear_attn.A_log"),
    Name("delta.step_bias", "linear_attn.dt_bias"),
)
# What the names of a text model's parameters begin with in a larger one, and in one alone.
_TEXT_PREFIXES = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
_INSIDE = {each.ours: each for each in (*_MODULES, *_MORE_MODULES)}


@checked
def translate(name: str, config: TransformerConfig | None = None) -> Name:
    """Return a parameter of `Transformer` in all vocabularies.

    Args:
        name: the parameter.
        config: of the network; names of norms differ where `post_norms` are.

    Example:
        >>> from funcrl.weights import translate
        >>> translate("blocks.3.attention.q.bias").hugging_face
        'model.layers.3.self_attn.q_proj.bias'
        >>> translate("blocks.3.attention.q.bias").gguf
        'blk.3.attn_q.bias'
    """
    for outside in _OUTSIDE:
        if name == outside.ours:
            return outside
    block, _, inner = name.removeprefix("blocks.").partition(".")
    module, _, leaf = inner.rpartition(".")
    if name.startswith("blocks.") and inner:
        for each in _LEAVES:
            if inner == each.ours:
                return Name(name, f"model.layers.{block}.{each.hugging_face}")
        inside = _INSIDE
        if config is not None and config.post_norms:
            inside = _INSIDE | {each.ours: each for each in _NORMS}
        if module in inside:
            _, theirs, gguf = inside[module]
            return Name(
                name, f"model.layers.{block}.{theirs}.{leaf}", gguf and f"blk.{block}.{gguf}.{leaf}"
            )
    raise ValueError(f"translate expects the name of a Transformer's parameter, got {name!r}.")


def name_alone(name: str) -> str:
    """Return the name that a text model's tensor in a larger model has in one alone."""
    prefix = next((each for each in _TEXT_PREFIXES if name.startswith(each)), "")
    return _TEXT_PREFIXES.get(prefix, "") + name.removeprefix(prefix)


class FusedTensor(NamedTuple):
    """A tensor of a folder and the parameters that it holds."""

    name: str  # of the tensor
    parts: tuple[str, ...]  # the parameters
    join: Callable[[Sequence[Tensor]], Tensor]  # the tensor of parameters
    split: Callable[[Tensor], Sequence[Tensor]]  # the parameters of the tensor


def fused_tensors_of(
    names: Iterable[str], config: TransformerConfig, vocabulary: str = "hugging_face"
) -> list[FusedTensor]:
    """Return the tensors that hold parameters."""
    parts: dict[str, list[str]] = {}
    for name in names:
        parts.setdefault(getattr(translate(name, config), vocabulary), []).append(name)
    return [_fused_tensor(name, each, config) for name, each in parts.items()]


def as_stored(params: Mapping[str, Tensor], config: TransformerConfig) -> Params:
    """Return the tensors of a Hugging Face folder, by their names, that hold parameters."""
    return {
        fused.name: fused.join([params[part] for part in fused.parts])
        for fused in fused_tensors_of(params, config)
    }


def _fused_tensor(name: str, parts: Sequence[str], config: TransformerConfig) -> FusedTensor:
    if len(parts) > 1:
        rows = config.head_width

        def join(leaves: Sequence[Tensor]) -> Tensor:
            return rearrange([*leaves], "part (n rows) ... -> (n part rows) ...", rows=rows)

        def split(tensor: Tensor) -> Sequence[Tensor]:
            form = "(n part rows) ... -> part (n rows) ..."
            return list(rearrange(tensor, form, part=len(parts), rows=rows))

        return FusedTensor(
            name, tuple(sorted(parts, reverse=True)), join, split
        )  # q, then its gate
    if parts[0].endswith("delta.conv"):  # with an axis for the one channel that each filter reads
        return FusedTensor(
            name, tuple(parts), lambda leaves: leaves[0].unsqueeze(1), lambda t: [t.squeeze(1)]
        )
    return FusedTensor(name, tuple(parts), lambda leaves: leaves[0], lambda tensor: [tensor])
