"""Models that funcrl's own network cannot describe, run by their class in transformers."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import get_ident
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from funcrl.core import checks, rng
from funcrl.core.files import brief, read_json
from funcrl.core.types import Params
from funcrl.models.functional import without_weights
from funcrl.models.networks import cache_name, forward_takes, keeps_cache
from funcrl.weights.hub import no_progress_bar
from funcrl.weights.hugging_face import plain_json
from funcrl.weights.tensors import LONGEST_HEADER


def load_with_transformers(
    folder: Path, dtype: torch.dtype, device: str
) -> tuple[nn.Module, Params]:
    """Return a causal language model of transformers, without its weights, and its parameters."""
    module = _load(folder, dtype)
    _check_causal(module, folder)
    params = {name: leaf.detach().to(device) for name, leaf in sorted(module.named_parameters())}
    return _without_weights(module, device), params


def network_of_transformers(folder: Path, device: str) -> nn.Module:
    """Return a causal language model of transformers without its weights.

    They are read only where buffers lie beside them, such as the biases of DeepSeek-V3's router.
    """
    transformers = _transformers_for(folder)
    try:
        config = transformers.AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
        with rng.restored_global_state(), _parameters_on_meta():
            module = transformers.AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, attn_implementation="eager", trust_remote_code=False
            )
    except Exception as error:
        raise _not_loaded(folder, transformers, error) from error
    if _kept_buffers(module):
        return _without_weights(_load(folder, torch.float32), device)
    return _without_weights(_as_scored(module), device)


def config_json(model: nn.Module, dtype: str) -> dict[str, Any]:
    """Return the config.json of a model of transformers, beside weights of a dtype."""
    written = {"architectures": [type(model).__name__], "dtype": dtype, "torch_dtype": dtype}
    return plain_json(model.config) | written


def as_checkpoint(model: Any, params: Params) -> Params:
    """Return what a checkpoint of a model of transformers holds, under the names there.

    Those are the parameters, experts one by one, and the buffers that are kept with them.
    """
    from transformers.core_model_loading import revert_weight_conversion

    found: Params = revert_weight_conversion(model, {**params, **_kept_buffers(model)})
    return found


def _kept_buffers(model: nn.Module) -> Params:
    """Return the buffers of a model that a checkpoint has beside its parameters."""
    kept = model.state_dict().keys()
    return {name: leaf for name, leaf in model.named_buffers() if name in kept}


def _without_weights(module: nn.Module, device: str) -> nn.Module:
    """Return a model with its parameters on meta, and its buffers on a device."""
    found = without_weights(module)
    for part in found.modules():
        for name, buffer in part.named_buffers(recurse=False):
            part._buffers[name] = buffer.to(device)
    return found


def _load(folder: Path, dtype: torch.dtype) -> nn.Module:
    """Return a model with its weights, on the CPU.

    Attention is "eager", one product for all rows under `torch.vmap`, where "sdpa" is a call each.
    """
    transformers = _transformers_for(folder)
    with no_progress_bar():
        try:
            module, loaded = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, attn_implementation="eager", use_safetensors=True,
                local_files_only=True, trust_remote_code=False, output_loading_info=True,
            )  # fmt: skip
        except Exception as error:
            raise _not_loaded(folder, transformers, error) from error
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if loaded[kind]:
            names = ", ".join(sorted(map(str, loaded[kind]))[:3])
            raise ValueError(
                f"load_params expects the parameters of {type(module).__name__} in {folder}, all "
                f"and no others, got {kind.replace('_keys', '')} {names}."
            )
    return _as_scored(module)


def _transformers_for(folder: Path) -> Any:
    """Return the package transformers; raise if it is not there, or not for what a folder has."""
    described = read_json("load_params", folder / "config.json", LONGEST_HEADER)
    _check_described(described, folder)
    why = f"for {brief(described.get('architectures'))} in {folder}"
    return checks.import_extra("load_params", "transformers", why, "'funcrl[models]'")


def _not_loaded(folder: Path, transformers: Any, error: Exception) -> ValueError:
    return ValueError(
        f"load_params expects a causal language model in {folder} that transformers "
        f"{transformers.__version__} loads, got {type(error).__name__}: {error}"
    )


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Make modules whose parameters are on the meta device, and their buffers where they belong."""
    thread = get_ident()

    def on_meta(_: nn.Module, __: str, parameter: nn.Parameter) -> Any:
        if get_ident() != thread or parameter.is_meta:  # one that is tied stays tied
            return None
        return nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)

    with register_module_parameter_registration_hook(on_meta):
        yield


def _as_scored(module: nn.Module) -> nn.Module:
    """Return a model without dropout, and with rotations that are functions of a position alone."""
    module.eval()
    _keep_angles_of_short_texts(module)
    return module


def _keep_angles_of_short_texts(module: nn.Module) -> None:
    """Make rotations functions of a token's position alone, and `context_length` say until where.

    Those of two kinds have other angles in a call whose longest text is above that length, where
    the log-probability of a token would depend on its neighbours in the batch.
    """
    part: Any
    for part in module.modules():
        kind = getattr(part, "rope_type", None)
        if kind == "longrope":
            length = part.config.rope_parameters["original_max_position_embeddings"]
        elif kind == "dynamic":
            length = part.config.max_position_embeddings
        else:
            continue
        module.context_length = length
        part.rope_type = "default"  # its forward chooses no angles then


def _check_causal(module: nn.Module, folder: Path) -> None:
    """Raise unless the logits of a token are of those until there, at positions that count from 0.

    In an encoder a token sees those after it, and RoBERTa's positions begin elsewhere.
    """
    wanted = f"load_params expects a causal language model in {folder}, got a"
    kind = type(module).__name__
    try:
        agree = _decodes_as_scored(module)
    except Exception as error:  # of whatever kind a forward raises
        raise ValueError(
            f"{wanted} {kind} that raises {type(error).__name__} for a token on its own cache: "
            f"{error}"
        ) from error
    if not agree:
        raise ValueError(
            f"{wanted} {kind} whose logits of a token are not of those until there alone, at "
            f"positions that count from 0."
        )


def _decodes_as_scored(module: nn.Module) -> bool:
    """Return whether decoding on a cache gives the logits of all tokens at once, with positions.

    The first is a generator's way, the other a trainer's. They may differ by rounding, with room
    for half precision, where that may choose another expert.
    """
    padding = getattr(module.config, "pad_token_id", None)
    first, second = [token for token in range(3) if token != padding][:2]
    tokens = torch.tensor([[first, second, first]], device="cpu")
    counted = torch.arange(3, device="cpu")[None]
    positions = {"position_ids": counted} if forward_takes(module, "position_ids") else {}
    caches = keeps_cache(module)
    with torch.no_grad():
        whole = module(input_ids=tokens, **positions).logits[0]
        start = module(input_ids=tokens[:, :2], **({"use_cache": True} if caches else {}))
        parts = [start.logits[0]]
        if caches:
            name = cache_name(module)
            kept = {name: getattr(start, name)}
            parts += [module(tokens[:, 2:], use_cache=True, **kept).logits[0]]
    found = torch.cat(parts)
    rounding = float(torch.finfo(whole.dtype).eps ** (1 / 3) * whole.abs().max())
    return not (found - whole[: len(found)]).abs().max() > rounding  # NaN is for others to find


def _check_described(described: dict[str, Any], folder: Path) -> None:
    if described.get("quantization_config") is not None:
        raise ValueError(
            f"load_params expects weights that are not quantised, got a quantization_config in "
            f"{folder / 'config.json'}."
        )
