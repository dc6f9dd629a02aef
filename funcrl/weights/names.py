"""One table of parameter names: ours, Hugging Face's and GGUF's."""

from typing import NamedTuple

from funcrl.core.arguments import checked


class Name(NamedTuple):
    """One parameter in the three vocabularies; `{}` stands for the number of the block."""

    ours: str
    hugging_face: str
    gguf: str


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


@checked
def translate(name: str) -> Name:
    """Return a parameter of `Transformer` in all vocabularies.

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
    parts = name.split(".")
    if parts[0] == "blocks" and len(parts) > 3:
        module, leaf = ".".join(parts[2:-1]), parts[-1]
        for inside in _MODULES:
            if module == inside.ours:
                there = f"{parts[1]}.{inside.hugging_face}.{leaf}"
                return Name(name, f"model.layers.{there}", f"blk.{parts[1]}.{inside.gguf}.{leaf}")
    raise ValueError(f"translate expects the name of a Transformer's parameter, got {name!r}.")
