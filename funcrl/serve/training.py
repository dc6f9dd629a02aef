"""Models that are trained by requests: adapters of one base, their gradients and their files."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from funcrl import optim
from funcrl.core import tree
from funcrl.core.files import write_whole
from funcrl.core.types import (
    Algorithm,
    Batch,
    GradientTransformation,
    ModelFn,
    Params,
    Surrogate,
    TrainState,
)
from funcrl.models.logprobs import score
from funcrl.models.lora import Lora, head_weight, layer_weights, lora
from funcrl.rl import algorithms, surrogates
from funcrl.rl.primitives import forward_backward, optim_step
from funcrl.run.checkpoint import restore, restore_field, save
from funcrl.serve.wire import Datum

_RATE = 1e-4
_ALPHA = 32.0  # of the adapters, which are scaled by it over their rank, as Tinker's are
_KIND, _STATE = "adapters.json", "state"  # of a folder of saved weights


class Kind(NamedTuple):
    """What a model's adapters are: two of one kind can take each other's."""

    rank: int
    seed: int = 0
    attn: bool = True
    mlp: bool = True
    unembed: bool = True


class Base(NamedTuple):
    """What adapters are of."""

    network: nn.Module
    model_fn: ModelFn
    params: Params

    def targets(self, kind: Kind) -> set[str]:
        """Return which matrices get an adapter: those of `funcrl train`, and a head of its own."""
        layers = layer_weights(self.network, kind.rank)
        head = {head_weight(self.network)}
        of_attention = ("attn", "attention", ".delta.")
        attention = {name for name in layers if any(part in name for part in of_attention)}
        parts = (kind.attn, attention), (kind.mlp, layers - attention), (kind.unembed, head)
        return {name for is_wanted, names in parts if is_wanted for name in names}


@dataclass
class Trained:
    """A model under training, which requests change one after another."""

    kind: Kind
    adapters: Lora
    state: TrainState
    grads: Params | None = None  # the sum since the last update


def new_model(base: Base, kind: Kind) -> Trained:
    """Return adapters that change nothing yet."""
    targets = base.targets(kind).__contains__
    adapters = lora(base.model_fn, base.params, rank=kind.rank, alpha=_ALPHA, targets=targets)
    return Trained(kind, adapters, optim_step(_optimizer({})).init(adapters.init(kind.seed)))


def add_gradients(
    trained: Trained,
    data: Sequence[Datum],
    loss: str,
    options: Mapping[str, float],
    microbatch: int | None,
    forward_only: bool,
) -> tuple[list[Tensor], dict[str, float]]:
    """Add the gradient of a loss to the model's, and return log-probabilities and metrics.

    Args:
        trained: the model.
        data: what the loss is of.
        loss: its name in Tinker's protocol.
        options: its numbers.
        microbatch: rows differentiated at a time, all of them when left out.
        forward_only: add nothing.
    """
    algorithm = _algorithm(loss, options)
    device = tree.leaves(trained.state.params)[0].device
    batch = tree.map(lambda leaf: leaf.to(device), to_batch(data, loss))
    model_fn, params = trained.adapters.model_fn, trained.state.params
    metrics: dict[str, float] = {}
    if forward_only:
        logprobs = score(model_fn, params, batch, microbatch).logprobs
    else:
        # Where scores alone are asked for, a loss of the client's own reads other inputs.
        place, known = f"loss_fn_inputs of {loss}", _inputs_of(loss)
        for row, datum in enumerate(data):
            _check_names(place, datum.inputs, known, f" in datum {row}")
        gradient = forward_backward(model_fn, algorithm=algorithm, microbatch=microbatch)
        found = gradient(params, batch)
        logprobs, metrics["loss:sum"] = found.logprobs, found.loss.item()
        before = trained.grads
        trained.grads = found.grads if before is None else tree.map(torch.add, before, found.grads)
    rows = zip(logprobs, data, strict=True)
    return [row[1 : 1 + len(each.tokens)] for row, each in rows], metrics


def update(trained: Trained, numbers: Mapping[str, float]) -> dict[str, float]:
    """Take a step along the gradients since the last one, and return its metrics."""
    if trained.grads is None:
        raise ValueError("optim_step expects forward_backward before it, got no gradient.")
    rate = numbers.get("learning_rate", _RATE)
    state = optim.with_learning_rate(trained.state, rate)  # which is a part of the state
    trained.state, metrics = optim_step(_optimizer(numbers))(state, trained.grads)
    trained.grads = None
    return {
        "grad_norm": metrics.maxes["grad_norm"].item(),
        "num_skipped_updates": float(metrics.last["num_skipped_updates"]),
    }


def _optimizer(numbers: Mapping[str, float]) -> GradientTransformation:
    """Return Adam with the protocol's numbers; whatever they are, its state is of one form."""
    clip = numbers.get("grad_clip_norm", 0.0)
    return optim.chain(
        optim.clip_by_global_norm(clip if clip > 0 else float("inf")),
        optim.adamw(
            _RATE,
            betas=(numbers.get("beta1", 0.9), numbers.get("beta2", 0.95)),
            eps=numbers.get("eps", 1e-12),
            weight_decay=numbers.get("weight_decay", 0.0),
        ),
    )


def _algorithm(loss: str, options: Mapping[str, float]) -> Algorithm:
    """Return a loss of Tinker's protocol: each is a sum over tokens, of the weights it is given."""
    if loss == "cross_entropy":
        _check_options(loss, options, ())
        return algorithms.sft()
    if loss == "importance_sampling":
        _check_options(loss, options, ())
        return algorithms.reinforce()._replace(surrogate=_weighted)
    if loss in ("ppo", "cispo"):
        _check_options(loss, options, ("clip_low_threshold", "clip_high_threshold"))
        low, high = (0.8, 1.2) if loss == "ppo" else (0.0, 4.0)
        low = options.get("clip_low_threshold", low)
        high = options.get("clip_high_threshold", high)
        bounded = surrogates.clipped if loss == "ppo" else surrogates.clipped_weight
        return algorithms.reinforce()._replace(surrogate=bounded(1 - low, high - 1))
    if loss == "dro":
        _check_options(loss, options, ("beta",))
        return algorithms.reinforce()._replace(surrogate=_regressed(options.get("beta", 0.05)))
    raise ValueError(
        f"forward_backward expects loss_fn to be cross_entropy, importance_sampling, ppo, cispo or "
        f"dro, got {loss!r}; forward_backward_custom has any other."
    )


def _check_options(loss: str, options: Mapping[str, float], known: Sequence[str]) -> None:
    _check_names(f"loss_fn_config of {loss}", options, known)


def _check_names(place: str, given: Mapping[str, Any], known: Sequence[str], at: str = "") -> None:
    """Raise for a name that nothing reads."""
    unknown = sorted(given.keys() - {*known})
    if unknown:
        takes = ", ".join(known) or "nothing"
        raise ValueError(f"forward_backward expects {takes} in {place}, got {unknown[0]!r}{at}.")


def _weighted(_logprobs: Tensor, ratio: Tensor, advantages: Tensor) -> Surrogate:
    return Surrogate(ratio * advantages)


def _regressed(beta: float) -> Callable[[Tensor, Tensor, Tensor], Surrogate]:
    """Return DRO: REINFORCE less beta/2 times the squared log-ratio (arXiv:2405.19107)."""

    def surrogate(logprobs: Tensor, ratio: Tensor, advantages: Tensor) -> Surrogate:
        return Surrogate(logprobs * advantages - beta / 2 * ratio.log().square())

    return surrogate


def to_batch(data: Sequence[Datum], loss: str) -> Batch:
    """Return the rows of data: each row has a datum's inputs, and the last token that follows them.

    Args:
        data: at least one; `target_tokens` are the inputs, shifted by one.
        loss: of Tinker's protocol, which says what else a datum has.
    """
    if not data:
        raise ValueError("forward_backward expects at least one datum, got none.")
    needed, is_policy = _inputs_of(loss), loss != "cross_entropy"
    length = 1 + max(len(each.tokens) for each in data)
    tokens = torch.zeros(len(data), length, dtype=torch.int64, device="cpu")
    columns = torch.zeros(3, len(data), length, dtype=torch.float32, device="cpu")
    for row, datum in enumerate(data):
        count = len(datum.tokens)
        inputs = {"weights": torch.ones(count, device="cpu"), **datum.inputs}
        for name in needed:
            got = inputs.get(name)
            if not count or got is None or len(got) != count:
                raise ValueError(
                    f"forward_backward expects {name} of {count} numbers, one for each input token "
                    f"of datum {row}, got {'none' if got is None else len(got)}."
                )
        targets = inputs["target_tokens"]
        if is_policy:
            behavior, advantages = inputs["logprobs"], inputs["advantages"]
            # A prompt's tokens have neither.
            weights = ((behavior != 0) | (advantages != 0)).float()
            values = torch.stack([weights, behavior, advantages])
        else:
            weights = inputs["weights"]
            values = weights[None]
        if not values.isfinite().all():
            raise ValueError(f"forward_backward expects finite numbers, got others in datum {row}.")
        _check_targets(row, datum.tokens, targets, weights != 0)
        tokens[row, : count + 1] = torch.tensor([*datum.tokens, int(targets[-1])], device="cpu")
        columns[: len(values), row, 1 : 1 + count] = values
    weights, behavior, advantages = columns
    return Batch(
        tokens=tokens,
        positions=torch.arange(length, device="cpu").expand(len(data), -1).contiguous(),
        mask=weights != 0,
        behavior_logprobs=behavior,
        advantages=advantages,
        token_weights=weights if is_policy else torch.zeros_like(weights),
        ce_weights=() if is_policy else weights,
    )


def _inputs_of(loss: str) -> tuple[str, ...]:
    """Return what a datum has for a loss of Tinker's protocol."""
    others = ("weights",) if loss == "cross_entropy" else ("logprobs", "advantages")
    return ("target_tokens", *others)


def _check_targets(row: int, tokens: Sequence[int], targets: Tensor, counts: Tensor) -> None:
    """Raise unless the targets that count are the tokens that follow."""
    following = torch.tensor([*tokens[1:], int(targets[-1])], device="cpu")
    wrong = ((targets != following) & counts).nonzero()
    if len(wrong):
        place = int(wrong[0])
        raise ValueError(
            f"forward_backward expects target_tokens to be the input tokens, shifted by one, got "
            f"{int(targets[place])} where {int(following[place])} follows, at {place} of datum "
            f"{row}."
        )


def save_model(trained: Trained, folder: Path, base: str, again: bool = False) -> None:
    """Write adapters and the optimizer's state to a folder, and what they are beside them."""
    if folder.exists() and not again:
        raise FileExistsError(f"save_weights expects a name that is free, got {folder}.")
    folder.mkdir(parents=True, exist_ok=True)
    save(folder / _STATE, trained.state)
    write_whole(folder / _KIND, json.dumps({"base": base, **trained.kind._asdict()}) + "\n")


def load_model(base: Base, folder: Path, name: str, with_optimizer: bool) -> Trained:
    """Return the model that was saved in a folder; raise if it is of a base of another name."""
    trained = new_model(base, read_kind(folder, name))
    if with_optimizer:
        state, _ = restore(folder / _STATE, like=trained.state)
        return replace(trained, state=state)
    adapters, _ = restore_field(folder / _STATE, "params", trained.state.params)
    return replace(trained, state=trained.state._replace(params=adapters))


def read_kind(folder: Path, base: str) -> Kind:
    """Return what was saved in a folder; raise if it is of another base."""
    if not (folder / _KIND).is_file():
        raise FileNotFoundError(f"load_weights expects weights that were saved, got {folder}.")
    fields = json.loads((folder / _KIND).read_text())
    if fields.pop("base") != base:
        raise ValueError(f"load_weights expects adapters of {base}, got others in {folder}.")
    return Kind(**fields)
