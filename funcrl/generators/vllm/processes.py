"""vLLM servers on this host: their processes, and requests to them."""

import http.client
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from multiprocessing import connection
from pathlib import Path
from typing import Any

from funcrl.config.generation import ServerConfig
from funcrl.core.process import python_command
from funcrl.generators.vllm.transport import RUN_VARIABLE, new_run

_LINES = 15  # of a log, that an error shows
_CAUSE = re.compile(r"\w(Error|Exception|Interrupt): ")
_LAST_SECONDS = 10  # that a server has to end in, before it is killed
_PULSE_SECONDS, _PULSE_LIMIT = 5, 60  # between two looks at whether it lives; for one of them
# What vLLM looks for in each of its processes, and how to see what it will find.
_PLUGIN = "funcrl.generators.vllm.plugin.entry:register"
_FIND_PLUGINS = """
from importlib.metadata import entry_points
print(*(each.value for each in entry_points(group="vllm.general_plugins")), sep="\\n")
"""
# Of a Unix socket's path: what Linux takes, with the zero at its end; and the name of vLLM's own.
_PATH_BYTES, _NAME_BYTES = 107, len("/") + len(str(uuid.UUID(int=0)))
_SOCKET = "socket"
# What vLLM says in place of a NaN: neither its status nor the error's type tells it from others.
_NAN = b"float values are not JSON compliant"


class ServerError(RuntimeError):
    """A server has ended, or has left a request without an answer."""


class Server:
    """An OpenAI-compatible server of vLLM's, at `address`, in processes of its own.

    The address is a Unix socket in a folder that only this user can enter: the routes for pausing,
    new weights and calls of vLLM's workers ask for no key. It is not ready before `wait` returns.

    Args:
        settings: vLLM's arguments, by the names of its `EngineArgs`.
        hf_config: the config.json that vLLM is to read, if it needs one.
        device: the GPU, as nvidia-smi counts them; where this process is when left out.
        run: what the trainer and its servers meet by, as `transport.new_run` makes it.
        answer_seconds: that each of its answers may take.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        hf_config: Mapping[str, Any] | None,
        device: int | None,
        run: str,
        answer_seconds: float = ServerConfig.answer_seconds,
    ) -> None:
        self._answer_seconds = answer_seconds
        self._folder = _private_folder()
        folder = Path(self._folder.name)
        if hf_config is not None:
            (folder / "config.json").write_text(json.dumps(hf_config))
        self.model, self._log = str(folder), folder / "log.txt"
        self.address, self._closed = str(folder / _SOCKET), False
        command = _command(self.model, self.address, settings, device, run)
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True,
                umask=0o077,
            )  # fmt: skip
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended already, which `wait` will tell
            os.write(self._process.stdin.fileno(), self.model.encode())

    @property
    def alive(self) -> bool:
        """Whether its process has not ended."""
        return self._process.poll() is None

    def wait(self, seconds: float) -> None:
        """Return when the server answers; raise if it ends, or does not in time."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._check_alive()
            if _is_healthy(self.address, 10):
                return
            time.sleep(0.2)
        raise TimeoutError(
            f"VLLM expects its server to answer in --vllm.server.start-seconds {seconds}, got "
            f"none; the end of its log:\n{self._tail()}"
        )

    def post(self, path: str, content: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the answer to a request; raise if the server refuses, or is no more."""
        try:
            status, body = _ask(self.address, path, content, self._answer_seconds)
        except TimeoutError as error:
            raise ServerError(
                f"VLLM expects its server at {self.address} to answer {path} in "
                f"--vllm.server.answer-seconds {self._answer_seconds}, got nothing; the end of its "
                f"log:\n{self._tail()}"
            ) from error
        except (OSError, http.client.HTTPException) as error:
            self._check_alive()
            raise ServerError(
                f"VLLM expects its server at {self.address} to answer {path}, got {error!r}; the "
                f"end of its log:\n{self._tail()}"
            ) from error
        if status != 200:
            if _NAN in body:
                raise FloatingPointError(
                    "generate expects logits that leave a distribution to draw from, got "
                    "log-probabilities of NaN; have the parameters diverged?"
                )
            # From 500 on its engine has died, most of the time.
            raise (ServerError if status >= 500 else RuntimeError)(
                f"VLLM expects its server at {self.address} to answer {path} with 200, got "
                f"{status}: {body[:500].decode(errors='replace')}\nThe end of its log:\n"
                f"{self._tail()}"
            )
        answer: dict[str, Any] = json.loads(body) if body else {}
        return answer

    def close(self) -> None:
        """End the server and all of its processes."""
        if self._closed:
            return  # the number of its processes may be another's by now
        self._closed = True
        for kind in (signal.SIGTERM, signal.SIGKILL):
            end = time.monotonic() + _LAST_SECONDS
            with suppress(ProcessLookupError):  # nobody is left
                os.killpg(self._process.pid, kind)
                while time.monotonic() < end:
                    self._process.poll()
                    os.killpg(self._process.pid, 0)
                    time.sleep(0.1)
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._folder.cleanup()

    def _check_alive(self) -> None:
        if self._process.poll() is not None:
            code = self._process.returncode
            raise ServerError(
                f"VLLM expects its server at {self.address} to live, got its end with exit code "
                f"{code}; the end of its log:\n{self._tail()}"
            )

    def _tail(self) -> str:
        if not self._log.exists():
            return "(closed)"
        lines = self._log.read_text(errors="replace").splitlines()
        # What went wrong first is far from the end, in another process's words.
        causes = [line for line in lines[:-_LINES] if _CAUSE.search(line)]
        return "\n".join([*causes[-_LINES:], *lines[-_LINES:]])


class Servers:
    """Servers of the same settings, started at once and ready when this is.

    Args:
        settings: vLLM's arguments, by the names of its `EngineArgs`.
        hf_config: the config.json that vLLM is to read, if it needs one.
        devices: the GPU of each; None is where this process is.
        seconds: that they have to start in.
        answer_seconds: that each of their answers may take.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        hf_config: Mapping[str, Any] | None,
        devices: Sequence[int | None],
        seconds: float,
        answer_seconds: float = ServerConfig.answer_seconds,
    ) -> None:
        self._servers: list[Server] = []
        self.run = new_run()
        try:
            for device in devices:
                made = Server(settings, hf_config, device, self.run, answer_seconds)
                self._servers.append(made)
            for server in self._servers:
                server.wait(seconds)
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return len(self._servers)

    def __getitem__(self, index: int) -> Server:
        """Return the server whose turn it is, round after round."""
        return self._servers[index % len(self._servers)]

    @property
    def addresses(self) -> tuple[str, ...]:
        """The Unix socket that the API of each is at."""
        return tuple(server.address for server in self._servers)

    @property
    def alive(self) -> bool:
        """Whether none of them has ended."""
        return all(server.alive for server in self._servers)

    def each(self, ask: Callable[[int, Server], Any]) -> None:
        """Ask all of them at once, by their numbers, and wait for all answers.

        An error ends all of them: the others may wait for the one that has failed.
        """
        pool = ThreadPoolExecutor(len(self._servers))
        answers = [pool.submit(ask, index, server) for index, server in enumerate(self._servers)]
        try:
            for answer in as_completed(answers):
                answer.result()
        except BaseException:
            self.close()
            raise
        finally:
            pool.shutdown()

    def all(self, path: str, content: Mapping[str, Any] | None = None) -> None:
        """Post the same to all of them."""
        self.each(lambda _, server: server.post(path, content))

    def close(self) -> None:
        """End all of them."""
        for server in self._servers:
            server.close()


def check_plugin() -> None:
    """Raise unless a server started from here would find funcrl as a plugin of vLLM's.

    A folder on the path makes funcrl importable; vLLM asks for what is installed.
    """
    found = subprocess.run(
        python_command("-c", _FIND_PLUGINS), capture_output=True, text=True, check=True
    ).stdout.split()
    if _PLUGIN in found:
        return
    root = Path(__file__).parents[3]
    source = f"-e {shlex.quote(str(root))}" if (root / "pyproject.toml").exists() else "funcrl"
    raise ImportError(
        f"VLLM expects funcrl to be installed for {sys.executable}, which runs --vllm.form server: "
        f"there vLLM finds funcrl as a plugin (vllm.general_plugins), got "
        f"{', '.join(found) or 'no plugin'}. Importable is not enough: "
        f"{shlex.quote(sys.executable)} -m pip install --no-deps {source}"
    )


def _command(
    folder: str, address: str, settings: Mapping[str, Any], device: int | None, run: str
) -> list[str]:
    """Return what starts a server, with what its processes are to find in their environment."""
    variables = {
        "VLLM_SERVER_DEV_MODE": 1,  # opens the routes for new weights
        "VLLM_RPC_BASE_PATH": folder,
        # torch.distributed listens for its group of one process: here, and not for the network.
        "VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo",
        RUN_VARIABLE: run,
    }  # fmt: skip
    if device is not None:
        variables |= {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": device}
    python = python_command("-m", "funcrl.generators.vllm.serve")
    quiet = "--disable-uvicorn-access-log"  # a line for each sample of a long run
    arguments = ["--model", folder, "--uds", address, *flags(settings), quiet]
    return ["env", *(f"{name}={value}" for name, value in variables.items()), *python, *arguments]


class _Connection(http.client.HTTPConnection):
    """HTTP through a Unix socket."""

    def __init__(self, address: str, seconds: float | None = None) -> None:
        super().__init__("localhost", timeout=seconds)
        self._address = address

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._address)


def _ask(
    address: str, path: str, content: Mapping[str, Any] | None, seconds: float
) -> tuple[int, bytes]:
    """Return a server's answer to a POST; raise if there will be none, or none in time."""
    caller, end = _Connection(address, seconds), time.monotonic() + seconds
    try:
        headers = {"Content-Type": "application/json"}
        body = None if content is None else json.dumps(content)
        caller.request("POST", path, body, headers)
        # A server whose engine has died may wait for it without end, and so would this.
        while not connection.wait([caller.sock], min(_PULSE_SECONDS, seconds)):
            if time.monotonic() > end:  # its engine may hang while it says that all is well
                raise TimeoutError
            if not _is_healthy(address, _PULSE_LIMIT):
                raise ConnectionError("no sign of life")
        answer = caller.getresponse()
        return answer.status, answer.read()
    finally:
        caller.close()


def _is_healthy(address: str, seconds: float) -> bool:
    """Return whether a server says so in time."""
    caller = _Connection(address, seconds)
    try:
        caller.request("GET", "/health")
        return caller.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        caller.close()


def _private_folder() -> tempfile.TemporaryDirectory[str]:
    """Return a folder that only this user can enter, whose path is short enough for sockets."""
    folder = tempfile.TemporaryDirectory(prefix="funcrl-vllm-")
    if len(os.fsencode(folder.name)) + _NAME_BYTES > _PATH_BYTES:
        folder.cleanup()
        raise ValueError(
            f"VLLM expects a folder for temporary files whose path has at most "
            f"{_PATH_BYTES - _NAME_BYTES - len('/funcrl-vllm-12345678')} bytes, for the sockets of "
            f"its servers, got {tempfile.gettempdir()}; set TMPDIR to a shorter one."
        )
    return folder


def flags(settings: Mapping[str, Any]) -> list[str]:
    """Return vLLM's arguments as its command line takes them."""
    made: list[str] = []
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            made.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            made += [f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return made
