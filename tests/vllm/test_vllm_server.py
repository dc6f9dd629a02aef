"""vLLM in servers of its own, for real: parameters arrive, answers are the policy's, it ends."""

import ipaddress
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
import venv
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from engines import (
    DEVICE,
    DTYPE,
    PROMPTS,
    bound_of,
    cache_of,
    check_nan_leaves_nothing_in_the_cache,
    has_vllm,
    largest,
    make,
    needs_vllm,
    rows_of,
    scored,
    watch_builds,
)

import funcrl
from funcrl.config import EvaluationConfig, Sampling, TrainConfig, VLLMConfig, WarmStartConfig
from funcrl.config.generation import ServerConfig
from funcrl.generators import VLLM, EngineError
from funcrl.generators.vllm import transport
from funcrl.generators.vllm.generator import Completion
from funcrl.generators.vllm.processes import Server, ServerError, Servers, check_plugin, flags
from funcrl.generators.vllm.remote import shortened
from funcrl.generators.vllm.transport import (
    Bucket,
    SharedMemory,
    fingerprint,
    new_run,
    open_memory,
    plan_buckets,
    unpack,
)
from funcrl.loop.parity import compare
from funcrl.weights.names import as_stored

ROOT = Path(__file__).parents[2]


def server(network="unified", cache_bytes=0, **options):
    return VLLMConfig(
        form="server", context_length=256, slots=16, cache_bytes=cache_bytes,
        server=ServerConfig(network=network, **options),
    )  # fmt: skip


def check_scores(vllm, model, params):
    """The servers' log-probabilities of the prompts are those of these parameters."""
    difference = largest(vllm.score(PROMPTS), scored(model, params, PROMPTS))
    assert difference <= bound_of(model, params, PROMPTS)


def spell(tokens):
    return "".join(map(chr, tokens))


def processes(vllm):
    servers = vllm._engine._servers
    return [servers[index]._process for index in range(len(servers))]


def is_empty(group):
    """Whether no process of a group lives; those that nobody has waited for are dead too."""
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat") as file:
                    fields = file.read().rpartition(")")[2].split()
            except OSError:  # it has just ended
                continue
            if int(fields[2]) == group and fields[0] != "Z":
                return False
    return True


def place_of(field):
    """The address and port of /proc/net/tcp: words of 32 bits, each from its last byte on."""
    address, _, port = field.partition(":")
    content = bytes.fromhex(address)
    content = b"".join(content[at : at + 4][::-1] for at in range(0, len(content), 4))
    return ipaddress.ip_address(content), int(port, 16)


def answer_at(address, port):
    """What comes back from a port of this host to somebody who speaks HTTP there."""
    host = "127.0.0.1" if address.is_unspecified else str(address)
    with socket.create_connection((host, port), timeout=2) as caller:
        caller.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        try:
            return caller.recv(100)
        except OSError:  # it says nothing in time, or hangs up
            return b""


def group_of(process):
    try:
        return os.getpgid(process)
    except ProcessLookupError:  # it has just ended
        return None


def listening(group):
    """The addresses and ports at which the processes of a group listen for others."""
    rows = [
        row.split()
        for table in ("/proc/net/tcp", "/proc/net/tcp6")
        for row in Path(table).read_text().splitlines()[1:]
    ]
    listeners = {fields[9]: place_of(fields[1]) for fields in rows if fields[3] == "0A"}
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        if group_of(int(entry.name)) == group:
            for file in (entry / "fd").iterdir():
                inode = os.readlink(file).removeprefix("socket:[").removesuffix("]")
                if inode in listeners:
                    found.add(listeners[inode])
    return found


# The second GPU's server gets its parameters by NCCL.
two_gpus = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
PLACES = [
    pytest.param(("unified", ()), id="unified"),
    # On a CPU a run has one below.
    pytest.param(("native", ()), id="native", marks=pytest.mark.gpu),
    pytest.param(("unified", (1,)), id="unified-nccl", marks=two_gpus),
    pytest.param(("native", (1,)), id="native-nccl", marks=two_gpus),
]


@pytest.fixture(scope="module", params=PLACES)
def running(request):
    model, params = make("qwen3", DTYPE)
    network, devices = request.param
    config = server(network, cache_of(24, model.config, DTYPE), devices=devices)
    vllm = VLLM(model, config=config, dtype=DTYPE, decode=spell)
    try:
        vllm.push(params)
        yield vllm, model, params
    finally:
        groups = [each.pid for each in processes(vllm)] if vllm._engine else []
        vllm.close()
        assert all(is_empty(group) for group in groups)


def check_a_native_server(vllm):
    """Its log-probabilities are the trainer's, of what it has and of what is pushed next."""
    model, params = vllm._model, vllm.pushed.params
    prompts = [[token % model.config.vocab_size for token in prompt] for prompt in PROMPTS]
    other = {name: leaf * 0.5 for name, leaf in params.items()}
    for policy in (params, other):
        vllm.push(policy)
        samples = vllm.generate(prompts, Sampling(num_samples=3, max_tokens=12), seed=1)
        rows = rows_of(samples, 3, prompts)
        bound = bound_of(model, policy, rows)
        assert compare(model, policy, prompts, samples).max_abs_diff <= bound
        assert largest(vllm.score(rows), scored(model, policy, rows)) <= bound
    check_nan_leaves_nothing_in_the_cache(vllm, model, params, prompts, same_batches=False)


class TestServer:
    pytestmark = needs_vllm

    def test_its_logprobs_are_the_trainers(self, running):
        vllm, model, params = running
        samples = vllm.generate(PROMPTS, Sampling(num_samples=3, max_tokens=12), seed=1)
        bound = bound_of(model, params, rows_of(samples, 3))
        assert compare(model, params, PROMPTS, samples).max_abs_diff <= bound

    def test_it_scores_as_the_trainer(self, running):
        check_scores(*running)

    def test_a_seed_draws_the_same_again(self, running):
        vllm, *_ = running
        sampling = Sampling(num_samples=4, max_tokens=8)
        first, second = (vllm.generate(PROMPTS, sampling, seed=5) for _ in range(2))
        assert torch.equal(first.tokens, second.tokens)
        assert len({tuple(row.tolist()) for row in first.tokens[:4]}) == 4
        assert not torch.equal(first.tokens, vllm.generate(PROMPTS, sampling, seed=6).tokens)

    def test_a_push_arrives_and_the_old_policys_cache_is_dropped(self, running, monkeypatch):
        vllm, model, params = running
        other = {name: leaf * 0.5 for name, leaf in params.items()}
        vllm.score(PROMPTS)  # the cache holds these prompts now
        try:
            for policy in (other, params):
                vllm.push(policy, 7)
                check_scores(vllm, model, policy)
                assert vllm.generate(PROMPTS, Sampling(max_tokens=2), 0).policy_version == 7
            updates, link = [], vllm._engine._link
            send = link.push
            monkeypatch.setattr(link, "push", lambda *a, **kw: (updates.append(1), send(*a, **kw)))
            vllm.push(params, 7)  # is there already
            assert not updates
            vllm.push(params, 8)
            assert updates == [1]
        finally:
            vllm.push(params)

    def test_stop_tokens_and_strings_end_a_sample(self, running):
        vllm, *_ = running
        greedy = Sampling(max_tokens=12, temperature=0.0)
        tokens = vllm.generate([PROMPTS[0]], greedy, 0).tokens[0].tolist()
        last = tokens[3]
        until = tokens.index(last) + 1
        for sampling in (replace(greedy, stop_tokens=(last,)), replace(greedy, stop=(chr(last),))):
            samples = vllm.generate([PROMPTS[0]], sampling, 0)
            assert samples.tokens[0].tolist() == tokens[:until]
            assert samples.finish_reasons == ("stop",)

    def test_it_is_compatible_with_openais_api(self, running):
        import httpx

        vllm, *_ = running
        content = {"model": vllm._engine._servers[0].model, "prompt": [1, 2], "max_tokens": 3}
        through = httpx.HTTPTransport(uds=vllm.addresses[0])
        with httpx.Client(transport=through, base_url="http://vllm", timeout=60) as client:
            answer = client.post("/v1/completions", json=content).json()
        assert answer["usage"]["completion_tokens"] == 3

    def test_nobody_else_gets_in(self, running):
        vllm, *_ = running
        folder = Path(vllm.addresses[0]).parent
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        for process in processes(vllm):
            # torch.distributed's, for its group of one process; on a GPU it listens everywhere.
            places = listening(process.pid)
            assert DEVICE == "cuda" or all(address.is_loopback for address, _ in places), places
            with ThreadPoolExecutor(1 + len(places)) as pool:  # what says nothing takes two seconds
                answers = pool.map(lambda place: answer_at(*place), places)
            assert not [answer for answer in answers if answer.startswith(b"HTTP")]
        if os.geteuid() == 0:  # another user tries
            code = "import socket, sys; socket.socket(socket.AF_UNIX).connect(sys.argv[1])"
            for path in folder.iterdir():
                if path.is_socket():
                    tried = subprocess.run(
                        ["python3", "-c", code, path], user=65534, group=65534, cwd="/",
                        capture_output=True, text=True, check=False,
                    )  # fmt: skip
                    assert "PermissionError" in tried.stderr

    @pytest.mark.skipif(DEVICE == "cuda", reason="there NaN ends vLLM's kernels and the process")
    def test_nan_leaves_nothing_in_the_cache(self, running):
        vllm, model, params = running
        check_nan_leaves_nothing_in_the_cache(vllm, model, params, same_batches=False)

    def test_a_trainer_that_is_killed_leaves_no_memory_behind(self, running):
        """Nobody could take it away then: it has no name any more."""
        vllm, *_ = running
        if isinstance(vllm._engine._link._sender, SharedMemory):
            assert not vllm._engine._link._sender._path.exists()

    def test_parameters_that_somebody_has_written_to_are_refused(self, running, monkeypatch):
        """And what is pushed next arrives."""
        vllm, model, params = running
        memory, servers = vllm._engine._link._sender, vllm._engine._servers
        if not isinstance(memory, SharedMemory):
            return  # nobody else is in the group
        post = servers.all

        def meddle(path, content=None):
            if path == "/update_weights":
                memory._flat[5] += 1
                # For itself: an error of one of several servers ends all of them.
                servers[0].post(path, content)
            else:
                post(path, content)

        monkeypatch.setattr(servers, "all", meddle)
        with pytest.raises(ServerError, match="parameters that the trainer sent"):
            vllm._engine._link.push(params)
        monkeypatch.undo()
        vllm.push(params)
        check_scores(vllm, model, params)

    @pytest.mark.parametrize("running", [PLACES[0], PLACES[2]], indirect=True)
    def test_a_run_beside_has_its_own_parameters(self, running, tmp_path, monkeypatch):
        """Its server, with vLLM's own class, is killed after step 1.

        Step 1 is saved, step 2 says that its server is dead; the run can go on, and this one does.
        """
        vllm, model, params = running
        tiny = funcrl.models.shape("tiny", vocab_size=97)
        config = TrainConfig(
            run_dir=tmp_path / "run", steps=3, num_prompts=2, num_generations=2, generator="vllm",
            vllm=server("native", cache_of(24, tiny, torch.float32)),
            model="tiny",  # micro's heads are too narrow for vLLM's kernels
            warm_start=WarmStartConfig(steps=1), evaluation=EvaluationConfig(num_prompts=2),
        )  # fmt: skip
        built = watch_builds(monkeypatch)
        metrics = tmp_path / "run" / "metrics.jsonl"

        def check_and_kill_after_the_first_step():
            if metrics.exists() and metrics.read_text().count("\n") == 2:
                beside = built[0].generator
                check_scores(vllm, model, params)
                if DEVICE == "cpu":  # on a GPU `running` has such a server
                    check_a_native_server(beside)
                check_scores(vllm, model, params)
                for process in processes(beside):
                    os.killpg(process.pid, signal.SIGKILL)
            return False

        with pytest.raises(EngineError, match=r"VLLM\.\w+ .*ServerError"):
            funcrl.train(config, stop=check_and_kill_after_the_first_step)
        assert (tmp_path / "run" / "checkpoints" / "1").exists()
        check_scores(vllm, model, params)
        resumed = funcrl.train(replace(config, generator="sampler"), resume=True)
        assert [row["step"] for row in resumed.history] == [0, 1, 2, 3]

    def test_last_an_engine_that_hangs_or_dies_in_a_push_is_noticed(self, running, monkeypatch):
        """The server's own process lives on, and waits for its engine's without end."""
        vllm, _, params = running
        children = subprocess.check_output(
            ["ps", "-wwo", "pid=,args=", "--ppid", str(processes(vllm)[0].pid)], text=True
        )
        rows = [row for row in children.splitlines() if "resource_tracker" not in row]
        assert len(rows) == 1, children
        core = int(rows[0].split()[0])
        os.kill(core, signal.SIGSTOP)
        # The server says that all is well, and would let this wait without end.
        hung, started = vllm._engine._servers[0], time.monotonic()
        asked = {"model": hung.model, "prompt": [1, 2], "max_tokens": 2}
        with monkeypatch.context() as patch:
            patch.setattr(hung, "_answer_seconds", 3)
            with pytest.raises(ServerError, match=r"--vllm\.server\.answer-seconds 3, got nothing"):
                hung.post("/v1/completions", asked)
        assert 3 <= time.monotonic() - started < 60
        # It is stopped, so that the push is under way when it dies.
        kill = threading.Timer(2, os.kill, (core, signal.SIGKILL))
        kill.start()
        with pytest.raises(EngineError, match=r"VLLM\.push .*ServerError"):
            vllm.push(params, version=1)
        with pytest.raises(RuntimeError, match=r"VLLM\.score .* one that is closed"):
            vllm.score(PROMPTS)


class TestEnds:
    pytestmark = needs_vllm

    def test_a_server_that_does_not_start_says_why(self, tmp_path, monkeypatch):
        """Its Python finds a vLLM that cannot be imported."""
        (tmp_path / "vllm").mkdir()
        (tmp_path / "vllm" / "__init__.py").write_text("raise ImportError('no libcudart.so')")
        monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH')}")
        server = Server({}, {}, None, new_run())
        with pytest.raises(ServerError, match=r"(?s)exit code 1; .*ImportError: no libcudart\.so"):
            server.wait(300)
        with pytest.raises(ServerError, match=r"exit code 1; "):
            server.post("/pause")
        server.close()
        server.close()  # is closed already

    def test_a_server_that_is_late_shows_its_log(self):
        servers = Servers({}, {}, [], 1)
        servers._servers.append(server := Server({}, {}, None, new_run()))
        server._log.write_text("is still loading")
        with pytest.raises(
            TimeoutError, match=r"(?s)VLLM .*--vllm\.server\.start-seconds 0.*is still loading"
        ):
            server.wait(0)
        servers.close()

    def test_servers_do_not_wait_for_each_other_when_one_has_failed(self):
        servers = Servers({}, {}, [], 1)
        servers._servers += [Server({}, {}, None, new_run()) for _ in range(2)]

        def ask(index, server):
            if index == 0:
                raise ValueError("boom")
            while server.alive:
                time.sleep(0.1)

        with pytest.raises(ValueError, match="boom"):
            servers.each(ask)

    def test_a_server_of_a_trainer_that_is_killed_ends_and_takes_its_files_along(self):
        code = """
import os, signal
from funcrl.generators.vllm.processes import Server
from funcrl.generators.vllm.transport import new_run
server = Server({}, {}, None, new_run())
print(server._process.pid, server.model, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
        said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        group, folder = said.stdout.split()
        end = time.monotonic() + 30
        while time.monotonic() < end and not (is_empty(int(group)) and not os.path.exists(folder)):
            time.sleep(0.1)
        assert is_empty(int(group))
        assert not os.path.exists(folder)

    def test_a_path_too_long_for_a_socket_is_refused(self, tmp_path, monkeypatch):
        deep = tmp_path / ("d" * 80)
        deep.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(deep))
        with pytest.raises(ValueError, match="VLLM .*TMPDIR"):
            Server({}, {}, None, new_run())
        assert list(deep.iterdir()) == []


@pytest.fixture
def uninstalled(tmp_path, monkeypatch):
    """Another environment's Python, for which funcrl is a folder on the path and no more."""
    venv.create(tmp_path / "other", with_pip=False)
    source = tmp_path / "source"
    source.mkdir()
    (source / "funcrl").symlink_to(Path(funcrl.__file__).parent)
    python = str(tmp_path / "other" / "bin" / "python")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(source))
    look = "import importlib.util as util; print(util.find_spec('funcrl').origin)"
    seen = subprocess.run([python, "-c", look], capture_output=True, text=True, check=True).stdout
    assert seen.strip() == str(source / "funcrl" / "__init__.py")
    monkeypatch.setattr(sys, "executable", python)
    return source


def test_a_server_that_would_not_find_the_plugin_is_refused(uninstalled):
    message = "VLLM .*funcrl.*/other/bin/python.* pip install"
    with pytest.raises(ImportError, match=message):
        check_plugin()
    facts = uninstalled / "funcrl-0.1.0.dist-info"  # what pip leaves of an installation
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: funcrl\nVersion: 0.1.0\n")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    plugins = project["entry-points"]["vllm.general_plugins"]
    lines = [f"{name} = {value}" for name, value in plugins.items()]
    (facts / "entry_points.txt").write_text("\n".join(["[vllm.general_plugins]", *lines]))
    check_plugin()


@pytest.mark.vllm
@has_vllm
@pytest.mark.filterwarnings("default")
def test_it_is_refused_before_a_server_starts(uninstalled, tmp_path):
    config = TrainConfig(run_dir=tmp_path / "run", generator="vllm", vllm=server())
    with pytest.raises(ImportError, match="VLLM .*funcrl.* pip install"):
        funcrl.train(config)
    assert not (tmp_path / "run").exists()


def test_parameters_travel_in_buckets_and_arrive_as_they_were():
    model, ours = make("qwen2")
    params = as_stored(ours, model.config)
    for most in (1, 10_000, 1 << 30):
        buckets = plan_buckets(params, torch.float32, most)
        names = [name for bucket in buckets for name in bucket.names]
        assert sorted(names) == sorted(params)
        # q, k and v are one matrix of vLLM's: it is written as a whole.
        q, k, v = (f"model.layers.1.self_attn.{part}_proj.weight" for part in "qkv")
        assert {k, v} <= set(next(bucket for bucket in buckets if q in bucket.names).names)
        count, told, opened = sum(bucket.size for bucket in buckets), [], []
        run = new_run()

        def tell(facts, run=run, told=told, opened=opened):
            told += facts
            opened.append(open_memory(run, **facts[0], device=torch.device("cpu")))

        memory = SharedMemory(count, torch.float32, run)
        try:
            memory.open(tell, servers=2)
            assert told[0] == told[1]
            for scale in (1.0, 2.0):  # the second over the first
                sent = {name: leaf * scale for name, leaf in params.items()}
                memory.send(sent, buckets, lambda: None)
                for bucket in buckets:
                    for name, leaf in unpack(opened[0](bucket.size), bucket).items():
                        assert torch.equal(leaf, sent[name].cpu())
        finally:
            memory.close()
        assert not memory._path.exists()


def test_only_the_runs_own_memory_is_read():
    run = new_run()
    memory = SharedMemory(6, torch.float32, run)
    path, opened = memory._path, partial(open_memory, dtype="float32", device=torch.device("cpu"))
    try:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with pytest.raises(FileExistsError):
            SharedMemory(6, torch.float32, run)
        with pytest.raises(FileNotFoundError):
            opened(new_run(), 6)
        for count in (5, 7, 1 << 40):
            with pytest.raises(ValueError, match=rf"VLLM\.push .* {count * 4} bytes, got 24"):
                opened(run, count)
        assert path.stat().st_size == 24
        path.chmod(0o620)
        with pytest.raises(PermissionError, match=r"VLLM\.push .* -rw--w----"):
            opened(run, 6)
        path.chmod(0o600)
        if os.geteuid() == 0:
            os.chown(path, 65534, 65534)
            with pytest.raises(PermissionError, match=r"VLLM\.push .* -rw------- of user 65534"):
                opened(run, 6)
        other = path.with_name(f"funcrl-{new_run()}")
        path.rename(other)
        path.symlink_to(other)
        with pytest.raises(OSError, match="symbolic link"):
            opened(run, 6)
        other.unlink()
    finally:
        memory.close()


def test_what_is_read_of_a_runs_memory_cannot_change_it():
    memory = SharedMemory(2, torch.float32, run := new_run())
    try:
        open_memory(run, 2, "float32", torch.device("cpu"))(2).fill_(3.0)
        assert memory._flat.tolist() == [0.0, 0.0]
    finally:
        memory.close()


def plain_fingerprint(content, key):
    """The definition, in Python's integers."""

    def mixed(word):
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            signed = word - 2**64 if word >> 63 else word  # torch's shift keeps the sign
            word = ((word ^ (signed >> shift)) * factor) % 2**64
        signed = word - 2**64 if word >> 63 else word
        return (word ^ (signed >> 31)) % 2**64

    content += bytes(-len(content) % 8)
    words = [int.from_bytes(content[at : at + 8], "little") for at in range(0, len(content), 8)]
    total = sum(mixed(word ^ mixed((8 * at + key) % 2**64)) for at, word in enumerate(words))
    return (total + 2**63) % 2**64 - 2**63


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 97])
def test_a_fingerprint_is_of_every_bit_and_its_place(dtype, count, monkeypatch):
    flat = torch.randn(count, generator=torch.Generator().manual_seed(count)).to(dtype)
    content = flat.view(torch.uint8).numpy().tobytes()
    found = fingerprint(flat, 2**62 + 5)
    assert found == plain_fingerprint(content, 2**62 + 5)
    monkeypatch.setattr(transport, "_PIECE_BYTES", 16)  # in pieces it is the same
    assert fingerprint(flat, 2**62 + 5) == found
    others = {fingerprint(flat, 6)}
    for byte in range(len(content)):
        changed = flat.clone()
        changed.view(torch.uint8)[byte] ^= 1
        others.add(fingerprint(changed, 2**62 + 5))
    assert len(others | {found}) == len(content) + 2


def test_a_bucket_holds_at_least_one_matrix():
    params = {"embed.weight": torch.zeros(7, 2), "norm.weight": torch.zeros(2)}
    assert plan_buckets(params, torch.bfloat16, most=1) == [
        Bucket(["embed.weight"], [[7, 2]]), Bucket(["norm.weight"], [[2]]),
    ]  # fmt: skip


def test_memory_that_is_not_there_is_an_error_and_no_crash():
    with pytest.raises(MemoryError, match=r"VLLM\.push .*--vllm\.server\.transfer"):
        SharedMemory(1 << 50, torch.float32, new_run())


def test_a_server_that_dies_while_a_group_forms_is_waited_for_no_longer(monkeypatch):
    ended = threading.Event()
    monkeypatch.setattr(transport, "join_group", lambda *_: ended.wait())
    sender = transport.Broadcast(torch.device("cpu"), torch.float32, new_run())

    def post(facts):
        raise RuntimeError(f"{len(facts)} servers have died")

    with pytest.raises(RuntimeError, match="2 servers have died"):
        sender.open(post, servers=2)
    sender.close()
    ended.set()


def test_what_follows_a_stop_string_is_cut_off():
    whole = Completion([97, 98, 99], [-1.0, -2.0, -3.0], "length")
    cut = Completion([97, 98], [-1.0, -2.0], "stop")
    assert shortened(whole, Sampling(stop=("ab",)), spell) == cut
    assert shortened(whole, Sampling(stop=("x",)), spell) == whole
    assert shortened(whole, Sampling(), None) == whole


def test_settings_become_the_arguments_of_a_command():
    assert flags({"a_b": 1, "yes": True, "no": False, "map": {"c": [1]}}) == [
        "--a-b", "1", "--yes", "--no-no", "--map", '{"c": [1]}',
    ]  # fmt: skip


def test_combinations_that_cannot_work_are_refused():
    with pytest.raises(ValueError, match="ServerConfig .*devices.*transfer"):
        ServerConfig(transfer="nccl")
    for devices, message in (((1, 1), "devices.*different"), ((-1,), r"devices\[0\]")):
        with pytest.raises(ValueError, match=f"ServerConfig .*{message}"):
            ServerConfig(devices=devices)
