"""The main routes of Tinker's protocol, so that its SDK trains and samples on this machine."""

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch

from funcrl.config import Sampling
from funcrl.core import rng
from funcrl.core.types import Params
from funcrl.models import Recurrent, Transformer
from funcrl.models.logprobs import logprob_fn
from funcrl.serve import training, wire
from funcrl.serve.http import Request, RequestError, Response, Routes, as_json, refusing
from funcrl.serve.jobs import Failure, SharedGenerator
from funcrl.serve.served import Served, check_tokens
from funcrl.serve.training import Kind, Trained
from funcrl.tasks.contracts import all_ends

_WAIT = 20.0  # seconds that a client is kept waiting for a result before it is told to ask again
_SCHEME = "tinker://"
_FOLDERS = ("weights", "sampler_weights")
# What the SDK may do: one request of a model at a time, so that they come in order.
_CLIENT = {"parallel_fwdbwd_chunks": False, "use_pyqwest_transport": False}
# What a sample may be asked for besides, and has nothing of here.
_UNKNOWN = ("topk_prompt_logprobs", "topk_sample_logprobs", "prompt_alt_tokens_k")

Found: TypeAlias = dict[str, Any] | bytes  # fields, or a message of `wire`


class Draw(NamedTuple):
    """Completions that a client asks for."""

    sampler: str
    prompt: list[int]
    sampling: Sampling
    seed: int
    prompt_logprobs: bool


@dataclass(frozen=True)
class Sampled:
    """What a sampler draws from: a base, or adapters of it."""

    path: str | None = None
    merged: Callable[[], Params] | None = None


class Tinker:
    """A base, the models that clients train of it, and the samplers that they have made."""

    def __init__(
        self,
        served: Served,
        shared: SharedGenerator,
        folder: Path,
        microbatch: int | None,
        dtype: torch.dtype,
    ) -> None:
        self._served, self._folder = served, folder
        self._shared, self._generator, self._jobs = shared, shared.generator, shared.jobs
        self._microbatch = microbatch
        chunk = 1024 if isinstance(served.model, Transformer | Recurrent) else None
        model_fn = logprob_fn(served.model, chunk=chunk, dtype=dtype)
        self._base = training.Base(served.model, model_fn, served.params)
        self._models: dict[str, Trained] = {}
        self._samplers: dict[str, Sampled] = {}
        self._num_sessions = self._num_draws = 0
        self._seed = secrets.randbits(32)

    def routes(self) -> Routes:
        """Return what answers each path."""
        of_fields: dict[str, Callable[[dict[str, Any]], Mapping[str, Any]]] = {
            "client/config": lambda _: _CLIENT,
            "client/dynamic_config": lambda _: {},
            "telemetry": lambda _: {"status": "accepted"},
            "create_session": self._create_session,
            "session_heartbeat": lambda _: {},
            "create_sampling_session": self._create_sampling_session,
            "get_info": self._get_info,
            "weights_info": self._weights_info,
            "create_model": self._create_model,
            "unload_model": self._unload_model,
            "optim_step": self._optim_step,
            "save_weights": self._save_weights,
            "save_weights_for_sampler": self._save_weights_for_sampler,
            "load_weights": self._load_weights,
            "asample": self._asample,
        }
        return {
            "GET /api/v1/healthz": lambda _: as_json({"status": "ok"}),
            "GET /api/v1/get_server_capabilities": lambda _: as_json(self._capabilities()),
            "GET /api/v1/samplers/": lambda request: as_json(self._sampler(request.rest)),
            "POST /api/v1/sessions/": self._finish_session,
            "POST /api/v1/forward_backward": self._forward_backward,
            "POST /api/v1/retrieve_future": self._retrieve_future,
            **{f"POST /api/v1/{name}": _answered(fn) for name, fn in of_fields.items()},
        }

    def _capabilities(self) -> dict[str, Any]:
        length = self._generator.context_length
        model = {"model_name": self._served.name, "max_context_length": length}
        return {"supported_models": [{**model, "trainable": True, "sampleable": True}]}

    def _create_session(self, _: dict[str, Any]) -> dict[str, Any]:
        self._num_sessions += 1
        return {"session_id": f"session-{self._num_sessions}-{secrets.token_hex(4)}"}

    def _finish_session(self, request: Request) -> Response:
        """Forget what a session has made, after all that it has asked for."""
        session, _, verb = request.rest.partition("/")
        if verb != "finish":
            raise RequestError(404, f"this server has no sessions/{request.rest}")

        def run() -> Found:
            for made in (self._models, self._samplers):
                for name in [each for each in made if each.partition(":")[0] == session]:
                    del made[name]
            return {}

        self._promise(run, ("finish", session))
        return as_json({})

    # Models

    def _create_model(self, asked: dict[str, Any]) -> dict[str, Any]:
        self._check_base(asked["base_model"])
        optimizer = (asked.get("optimizer_config") or {}).get("type", "adamw")
        if optimizer != "adamw":
            raise RequestError(400, f"create_model expects the optimizer adamw, got {optimizer!r}")
        options = asked.get("lora_config")
        if options is None:
            raise RequestError(400, "create_model expects a lora_config, got none")
        flags = {name: bool(options.get(f"train_{name}", True)) for name in ("attn", "mlp")}
        seed, unembed = options.get("seed"), bool(options.get("train_unembed", True))
        seed = secrets.randbits(31) if seed is None else seed
        kind = Kind(options["rank"], seed, **flags, unembed=unembed)
        model_id = f"{asked['session_id']}:train:{asked['model_seq_id']}"

        def run() -> Found:
            self._models[model_id] = training.new_model(self._base, kind)
            return {"model_id": model_id}

        return self._promise(run, ("model", model_id), model_id=model_id)

    def _get_info(self, asked: dict[str, Any]) -> dict[str, Any]:
        trained = self._model(asked["model_id"])
        place = self._served.place
        data = {"model_name": self._served.name, "arch": type(self._served.model).__name__}
        return {
            "model_id": asked["model_id"],
            "model_data": {**data, "tokenizer_id": None if place is None else str(place)},
            "is_lora": True,
            "lora_rank": trained.kind.rank,
            "model_name": self._served.name,
        }

    def _unload_model(self, asked: dict[str, Any]) -> dict[str, Any]:
        model_id = asked["model_id"]

        def run() -> Found:
            self._models.pop(model_id, None)
            return {"model_id": model_id}

        return self._promise(run, ("unload", model_id))

    def _forward_backward(self, request: Request) -> Response:
        with refusing(422):
            asked = wire.read_gradients(request.body)
        targets = [each.inputs.get("target_tokens") for each in asked.data]
        last = [each[-1:].tolist() for each in targets if each is not None]
        self._check_tokens([*(each.tokens for each in asked.data), *last])
        trained = self._model(asked.model_id)

        def run() -> Found:
            logprobs, metrics = training.add_gradients(
                trained, asked.data, asked.loss, asked.options, self._microbatch,
                asked.forward_only,
            )  # fmt: skip
            return wire.write_gradients(logprobs, metrics)

        return as_json(self._promise(run, _once(asked.model_id, asked.number)))

    def _optim_step(self, asked: dict[str, Any]) -> dict[str, Any]:
        trained = self._model(asked["model_id"])
        numbers = {name: float(value) for name, value in asked["adam_params"].items()}

        def run() -> Found:
            return {"metrics": training.update(trained, numbers)}

        return self._promise(run, _once(asked["model_id"], asked.get("seq_id")))

    # Weights

    def _save_weights(self, asked: dict[str, Any]) -> dict[str, Any]:
        model_id, trained = asked["model_id"], self._model(asked["model_id"])
        name = asked.get("path") or f"step-{int(trained.state.step)}"
        path = self._path(model_id, "weights", name)
        again = bool(asked.get("overwrite"))

        def run() -> Found:
            training.save_model(trained, self._folder_of(path), self._served.name, again)
            return {"path": path, "type": "save_weights"}

        return self._promise(run, _once(model_id, asked.get("seq_id")))

    def _save_weights_for_sampler(self, asked: dict[str, Any]) -> dict[str, Any]:
        model_id, name = asked["model_id"], asked.get("path")
        trained = self._model(model_id)
        path = None if name is None else self._path(model_id, "sampler_weights", name)
        number = asked.get("sampling_session_seq_id")
        sampler = f"{model_id.partition(':')[0]}:sample:{number}"

        def run() -> Found:
            if path is not None:
                training.save_model(trained, self._folder_of(path), self._served.name)
                return {"path": path}
            adapters, merge = trained.state.params, trained.adapters.merge
            self._samplers[sampler] = Sampled(merged=lambda: merge(adapters))
            return {"sampling_session_id": sampler}

        return self._promise(run, _once(model_id, asked.get("seq_id")))

    def _load_weights(self, asked: dict[str, Any]) -> dict[str, Any]:
        model_id = asked.get("model_id") or f"{asked['session_id']}:train:{asked['model_seq_id']}"
        path, whole = asked["path"], bool(asked["optimizer"])
        folder = self._folder_of(path)

        def run() -> Found:
            found = self._load(folder, whole)
            before = self._models.get(model_id)
            if before is None:
                self._models[model_id] = found
            else:  # requests that came before hold the object
                before.kind, before.adapters, before.state = found.kind, found.adapters, found.state
                before.grads = None
            return {"path": path, "model_id": model_id}

        return self._promise(run, _once(model_id, asked.get("seq_id")), model_id=model_id)

    def _weights_info(self, asked: dict[str, Any]) -> dict[str, Any]:
        folder = self._folder_of(asked.get("tinker_path") or asked.get("path") or "")
        kind = training.read_kind(folder, self._served.name)
        flags = {"train_unembed": kind.unembed, "train_mlp": kind.mlp, "train_attn": kind.attn}
        return {
            "base_model": self._served.name, "is_lora": True, "lora_rank": kind.rank, **flags
        }  # fmt: skip

    def _load(self, folder: Path, with_optimizer: bool) -> Trained:
        return training.load_model(self._base, folder, self._served.name, with_optimizer)

    def _path(self, model_id: str, kind: str, name: str) -> str:
        path = f"{_SCHEME}{model_id}/{kind}/{name}"
        self._folder_of(path)  # raises if it would lie elsewhere
        return path

    def _folder_of(self, path: str) -> Path:
        """Return where a path's weights are: below the server's folder, whatever the path says."""
        parts = path.removeprefix(_SCHEME).split("/")
        named = len(parts) == 3 and parts[1] in _FOLDERS and path.startswith(_SCHEME)
        if not named or any(part in ("", ".", "..") or "\0" in part for part in parts):
            raise RequestError(
                400, f"expected {_SCHEME}MODEL/weights/NAME or .../sampler_weights/NAME, got {path}"
            )
        return self._folder.joinpath(*parts)

    # Samples

    def _create_sampling_session(self, asked: dict[str, Any]) -> dict[str, Any]:
        sampler = f"{asked['session_id']}:sample:{asked['sampling_session_seq_id']}"
        path = asked.get("model_path")
        if path is None:
            self._check_base(asked.get("base_model"))
            self._samplers[sampler] = Sampled()
            return {"sampling_session_id": sampler}
        folder = self._folder_of(path)
        try:
            training.read_kind(folder, self._served.name)
        except (ValueError, OSError) as error:
            raise RequestError(404, str(error)) from error

        def merged() -> Params:
            loaded = self._load(folder, with_optimizer=False)
            return loaded.adapters.merge(loaded.state.params)

        self._samplers[sampler] = Sampled(path, merged)
        return {"sampling_session_id": sampler}

    def _sampler(self, sampler: str) -> dict[str, Any]:
        found = self._samplers.get(sampler)
        if found is None:
            raise RequestError(404, f"expected a sampling session, got {sampler!r}")
        fields = {"sampler_id": sampler, "base_model": self._served.name}
        return {**fields, "model_path": found.path}

    def _asample(self, asked: dict[str, Any]) -> dict[str, Any]:
        sampler, number = asked.get("sampling_session_id"), asked.get("seq_id")
        if sampler not in self._samplers:
            raise RequestError(404, f"asample expects a sampling session, got {sampler!r}")
        for name in _UNKNOWN:
            if asked.get(name):
                raise RequestError(422, f"asample expects no {name}, got {asked[name]}")
        if asked.get("target_prompt_logprobs") or asked.get("prompt_logprobs_last_n"):
            raise RequestError(422, "asample expects prompt_logprobs of the whole prompt, or none")
        options = asked.get("sampling_params") or {}
        count = int(asked.get("num_samples", 1))
        chunks = asked["prompt"]["chunks"]
        if not all("tokens" in chunk for chunk in chunks):
            raise RequestError(422, "asample expects a prompt of tokens alone, got another chunk")
        prompt = [token for chunk in chunks for token in chunk["tokens"]]
        self._check_tokens([prompt])
        sampling = self._sampling(options, count, len(prompt))
        self._num_draws += 1
        given = options.get("seed")
        seed = rng.fold_in(self._seed, self._num_draws) if given is None else int(given)
        draw = Draw(sampler, prompt, sampling, seed, bool(asked.get("prompt_logprobs")))
        # Equal prompts of one call are drawn differently, and of one seed they should not be.
        joins = None if given is not None else (sampler, sampling)
        request = self._jobs.add(self._draw, draw, _once(sampler, number), joins)
        names = [f"{sampler}:{number}:{index}" for index in range(count)]
        return {"request_id": str(request), "sample_sequence_ids": names}

    def _sampling(self, options: Mapping[str, Any], count: int, length: int) -> Sampling:
        """Return how to draw, by the fields that the protocol has."""
        tokenizer, stop = self._served.tokenizer, options.get("stop")
        ends = tuple(all_ends(tokenizer))
        texts: tuple[str, ...] = ()
        if stop is not None:
            stop = [stop] if isinstance(stop, str) else list(stop)
            texts = tuple(each for each in stop if isinstance(each, str))
            ends = tuple(each for each in stop if not isinstance(each, str))
        room = self._generator.context_length - length
        most = options.get("max_tokens")
        with refusing(422):
            return Sampling(
                num_samples=count,
                max_tokens=room if most is None else min(int(most), room),
                temperature=float(options.get("temperature", 1.0)),
                top_k=max(int(options.get("top_k", -1)), 0),
                top_p=float(options.get("top_p", 1.0)),
                stop_tokens=tuple(dict.fromkeys(ends)),
                stop=texts,
            )

    def _draw(self, draws: Sequence[Draw]) -> list[Found]:
        """Draw for several requests in one call: they are of one sampler, and alike."""
        first = draws[0]
        self._shared.push(first.sampler, lambda: self._merged(first.sampler))
        samples = self._generator.generate(
            [draw.prompt for draw in draws], first.sampling, first.seed
        )
        found: list[Found] = []
        count = first.sampling.num_samples
        for index, draw in enumerate(draws):
            scores = None
            if draw.prompt_logprobs:
                scores = [float("nan"), *self._generator.score([draw.prompt])[0]]
            rows = range(index * count, (index + 1) * count)
            found.append(wire.write_samples(samples, rows, scores))
        return found

    def _merged(self, sampler: str) -> Params:
        merged = self._samplers[sampler].merged
        return self._served.params if merged is None else merged()

    # Results

    def _promise(
        self, run: Callable[[], Found], name: tuple[Any, ...] | None, **fields: Any
    ) -> dict[str, Any]:
        """Return the number under which a client can ask for a result."""
        return {"request_id": str(self._jobs.add(lambda _: [run()], None, name)), **fields}

    def _retrieve_future(self, request: Request) -> Response:
        number = str(request.json().get("request_id", ""))
        try:
            found = self._jobs.result(int(number), _WAIT)
        except (KeyError, ValueError) as error:
            raise RequestError(404, f"expected a request_id, got {number!r}") from error
        if found is None:
            waits = {"type": "try_again", "request_id": number, "queue_state": "active"}
            return as_json(waits)
        if isinstance(found, Failure):
            category = "user" if found.is_of_user else "server"
            return as_json({"error": found.message, "category": category})
        return Response(found, kind=wire.KIND) if isinstance(found, bytes) else as_json(found)

    def _model(self, model_id: str) -> Trained:
        # It is made by a job that may be under way: a client waits for that before it goes on.
        if model_id not in self._models:
            raise RequestError(404, f"expected a model that was created, got {model_id!r}")
        return self._models[model_id]

    def _check_base(self, name: Any) -> None:
        if name != self._served.name:
            raise RequestError(
                404, f"expected the base model {self._served.name!r}, which is served, got {name!r}"
            )

    def _check_tokens(self, sequences: Sequence[Sequence[int]]) -> None:
        check_tokens(self._served, sequences, self._generator.context_length, 422)


def _answered(fn: Callable[[dict[str, Any]], Mapping[str, Any]]) -> Callable[[Request], Response]:
    def answer(request: Request) -> Response:
        # `fn` only reads fields: what it does with them, a job does later.
        with refusing(400, "expected fields as tinker's SDK sends them: "):
            return as_json(fn(request.json()))

    return answer


def _once(owner: Any, number: int | None) -> tuple[Any, int] | None:
    """Return the name of a request that a client may send again, None where it has no number."""
    return None if number is None else (owner, number)
