"""vLLM servers on this host: their processes, and what is asked of them."""

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from funcrl.generators.vllm_transport import free_port

_LINES = 15  # of a log, that an error shows
_CAUSE = re.compile(r"\w(Error|Exception|Interrupt): ")
_LAST_SECONDS = 10  # that a server has to end in, before it is killed


class Server:
    """An OpenAI-compatible server of vLLM's, at `address`, in processes of its own.

    It is not ready before `wait` returns. Its routes for pausing and new weights are open to all
    who reach the address, which are the users of this host.

    Args:
        settings: vLLM's arguments, by the names of its `EngineArgs`.
        described: the config.json that vLLM is to read, if it needs one.
        device: the GPU, as nvidia-smi counts them; where this process is when left out.
    """

    def __init__(
        self, settings: Mapping[str, Any], described: Mapping[str, Any] | None, device: int | None
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="funcrl-vllm-")
        folder = Path(self._folder.name)
        if described is not None:
            (folder / "config.json").write_text(json.dumps(described))
        self.model, self._log = str(folder), folder / "log.txt"
        self.host, self.port = "127.0.0.1", free_port()
        self.address = f"http://{self.host}:{self.port}"
        command = ["env", "VLLM_SERVER_DEV_MODE=1"]  # opens the routes for new weights
        if device is not None:
            command += ["CUDA_DEVICE_ORDER=PCI_BUS_ID", f"CUDA_VISIBLE_DEVICES={device}"]
        command += [sys.executable, "-m", "funcrl.generators.vllm_serve", "--model", self.model]
        command += ["--host", self.host, "--port", str(self.port), *flags(settings)]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
            )

    @property
    def alive(self) -> bool:
        """Whether its process has not ended."""
        return self._process.poll() is None

    def wait(self, seconds: float) -> None:
        """Return when the server answers; raise if it ends, or does not in time."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._check_alive()
            with suppress(OSError):
                if self._ask("GET", "/health", None, 10)[0] == 200:
                    return
            time.sleep(0.2)
        self.close()
        raise TimeoutError(
            f"VLLM expects its server to answer in --vllm.server.start-seconds {seconds}, got "
            f"none; the end of its log:\n{self._tail()}"
        )

    def post(self, path: str, content: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the answer to a request; raise if the server refuses, or is no more."""
        try:
            status, body = self._ask("POST", path, content, None)
        except (OSError, http.client.HTTPException) as error:
            self._check_alive()
            raise RuntimeError(
                f"VLLM expects its server at {self.address} to answer {path}, got {error!r}; the "
                f"end of its log:\n{self._tail()}"
            ) from error
        if status != 200:
            raise RuntimeError(
                f"VLLM expects its server at {self.address} to answer {path} with 200, got "
                f"{status}: {body[:500].decode(errors='replace')}\nThe end of its log:\n"
                f"{self._tail()}"
            )
        answer: dict[str, Any] = json.loads(body) if body else {}
        return answer

    def complete(self, content: Mapping[str, Any]) -> dict[str, Any]:
        """Return the first choice of OpenAI's /v1/completions."""
        answer = self.post("/v1/completions", {"model": self.model} | dict(content))
        choice: dict[str, Any] = answer["choices"][0]
        return choice

    def close(self) -> None:
        """End the server and all of its processes."""
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

    def _ask(
        self, method: str, path: str, content: Mapping[str, Any] | None, seconds: float | None
    ) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=seconds)
        try:
            headers = {"Content-Type": "application/json"}
            body = None if content is None else json.dumps(content)
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def _check_alive(self) -> None:
        if not self.alive:
            code = self._process.returncode
            tail = self._tail()
            raise RuntimeError(
                f"VLLM expects its server at {self.address} to live, got its end with exit code "
                f"{code}; the end of its log:\n{tail}"
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
        described: the config.json that vLLM is to read, if it needs one.
        devices: the GPU of each; None is where this process is.
        seconds: that they have to start in.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        described: Mapping[str, Any] | None,
        devices: Sequence[int | None],
        seconds: float,
    ) -> None:
        self._servers: list[Server] = []
        try:
            for device in devices:
                self._servers.append(Server(settings, described, device))
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
        """Where the API of each is."""
        return tuple(server.address for server in self._servers)

    @property
    def alive(self) -> bool:
        """Whether none of them has ended."""
        return all(server.alive for server in self._servers)

    def each(self, ask: Callable[[int, Server], Any]) -> None:
        """Ask all of them at once, by their numbers, and wait for all answers."""
        with ThreadPoolExecutor(len(self._servers)) as pool:
            list(pool.map(ask, range(len(self._servers)), self._servers))

    def all(self, path: str, content: Mapping[str, Any] | None = None) -> None:
        """Post the same to all of them."""
        self.each(lambda _, server: server.post(path, content))

    def pause(self) -> None:
        """Let them finish what is under way, and hold back what comes."""
        self.all("/pause?mode=wait")

    def resume(self) -> None:
        """Let them go on."""
        self.all("/resume")

    def close(self) -> None:
        """End all of them."""
        for server in self._servers:
            server.close()


def flags(settings: Mapping[str, Any]) -> list[str]:
    """Return vLLM's arguments as its command line takes them.

    Example:
        >>> from funcrl.generators.vllm_server import flags
        >>> flags({"max_num_seqs": 4, "enforce_eager": True, "enable_chunked_prefill": False})
        ['--max-num-seqs', '4', '--enforce-eager', '--no-enable-chunked-prefill']
        >>> flags({"hf_overrides": {"a": 1}})
        ['--hf-overrides', '{"a": 1}']
    """
    made: list[str] = []
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            made.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            made += [f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return made
