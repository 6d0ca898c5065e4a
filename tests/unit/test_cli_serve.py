"""`kvstore serve`: its options and where they come from, and the process itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvstore.backend import Read, Write
from kvstore.errors import ConfigError
from kvstore_backends.node.client import NodeClient
from kvstore_backends.node.protocol import Op, pack_put
from kvstore_backends.node_server import Namespace
from kvstore_cli.main import main
from kvstore_cli.serve import open_node
from kvstore_cli.serve_options import NAMESPACE_OPTIONS, SERVER_OPTIONS, Settings, load_settings
from kvstore_transport import Credentials, PeerRefused, connect
from kvstore_transport.channel import SocketChannel
from kvstore_transport.frames import Header, Kind

from .node_server_support import KiB, MiB, keys, payload, soon

_TOOLS = Path(__file__).parents[2] / "tools"


def load(
    *flags: tuple[str, object], env: dict[str, str] | None = None, file: Path | None = None
) -> Settings:  # fmt: skip
    return load_settings(flags, config_file=str(file) if file else "", env=env or {})


def default_of(settings: Settings) -> Namespace:
    assert settings.namespaces[0].name == ""
    return settings.namespaces[0]


def written(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


# Where options come from.


def test_defaults() -> None:
    settings = load()
    assert settings.server["memory"] == 1 << 30
    assert settings.namespaces == [Namespace()]


def test_each_source_overrides_the_one_before(tmp_path: Path) -> None:
    file = written(tmp_path / "serve.yaml", "memory: 1MiB\npolicy: fifo\nlisten: '127.0.0.1:1'\nttl: 1d\n")
    env = {"KVSTORE_SERVE_MEMORY": "2MiB", "KVSTORE_SERVE_POLICY": "none", "UNRELATED": "x"}
    settings = load(("memory", "3MiB"), env=env, file=file)
    assert (settings.server["memory"], default_of(settings).policy) == (3 * MiB, "none")
    assert (settings.server["listen"], default_of(settings).ttl) == ("127.0.0.1:1", 86400.0)
    assert load(env={"KVSTORE_SERVE_CONFIG": str(file)}).server["memory"] == MiB


def test_what_follows_a_namespace_belongs_to_it(tmp_path: Path) -> None:
    tokens = [written(tmp_path / name, f" of {name}\n") for name in ("default", "a", "b")]
    settings = load(
        ("memory", "8MiB"), ("token_file", str(tokens[0])), ("ttl", "1h"), ("policy", "fifo"),
        ("namespace", "a"), ("token_file", str(tokens[1])), ("memory", "2MiB"), ("policy", "lru"),
        ("namespace", "b"), ("token_file", str(tokens[2])), ("disk", "file:///kv/b"), ("ttl", "2h"), ("remote", "s3://b/kv"),
    )  # fmt: skip
    assert settings.server["memory"] == 8 * MiB
    assert list(settings.namespaces) == [
        Namespace("", b"of default", 0, "fifo", "", 3600.0),
        Namespace("a", b"of a", 2 * MiB, "lru", "", 3600.0),
        Namespace("b", b"of b", 0, "fifo", "file:///kv/b", 7200.0, remote="s3://b/kv"),
    ]


def test_namespaces_in_a_file(tmp_path: Path) -> None:
    token = written(tmp_path / "token", "secret")
    file = written(
        tmp_path / "serve.yaml",
        f"default_namespace: false\nnamespaces:\n  a: {{token_file: {token}, memory: 2MiB, ttl: 5s}}\n  b:\n",
    )
    settings = load(("namespace", "a"), ("memory", "3MiB"), file=file)
    assert list(settings.namespaces) == [Namespace("a", b"secret", 3 * MiB, ttl=5.0), Namespace("b")]


def test_tokens_from_the_environment() -> None:
    env = {"KVSTORE_SERVE_TOKEN": "of default", "KVSTORE_SERVE_TOKEN_TEAM_A": " of a\n"}
    settings = load(("namespace", "team-a"), env=env)
    assert [namespace.token for namespace in settings.namespaces] == [b"of default", b"of a"]
    assert "of a" not in repr(settings)


def test_tokens_of_the_http_side(tmp_path: Path) -> None:
    admin = written(tmp_path / "admin", "of admin\n")
    settings = load(
        ("http", "127.0.0.1:0"), ("http_admin_token_file", str(admin)), env={"KVSTORE_SERVE_CONTROLLER_TOKEN": "c"}
    )  # fmt: skip
    assert (settings.admin_token, settings.controller_token) == (b"of admin", b"c")
    assert "of admin" not in repr(settings)
    assert (load().admin_token, load().controller_token) == (b"", b"")
    with pytest.raises(ConfigError, match="give one of them"):
        load(
            ("http", "127.0.0.1:0"), ("http_admin_token_file", str(admin)),
            env={"KVSTORE_SERVE_HTTP_ADMIN_TOKEN": "other"},
        )  # fmt: skip


def test_contexts_by_name(tmp_path: Path) -> None:
    file = written(tmp_path / "serve.yaml", "contexts: {llama: /etc/llama.yaml, other: /etc/other.yaml}\n")
    settings = load(("context", "other=/etc/mine.yaml"), file=file)
    assert settings.contexts == {"llama": "/etc/llama.yaml", "other": "/etc/mine.yaml"}


def test_variables_of_kubernetes_are_none_of_ours() -> None:
    env = {"KVSTORE_SERVE_SERVICE_HOST": "10.0.0.1", "KVSTORE_SERVE_PORT_7100_TCP_ADDR": "10.0.0.1"}
    assert load(env=env) == load()


@pytest.mark.parametrize(
    ("flags", "env", "text", "message"),
    [
        ([("memory", "3parsec")], {}, "", r"parsec.*from --memory"),
        ([("memory", "1KiB")], {}, "", "at least 4 KiB"),
        ([("max_request", "512MiB")], {}, "", "'max_request'.*at most 256 MiB"),
        ([("policy", "lfu")], {}, "", "lru, fifo, none"),
        ([("memory", "1MiB"), ("memory", "2MiB")], {}, "", "--memory is given twice"),
        ([("namespace", "a"), ("namespace", "a")], {}, "", "given twice for namespace 'a'"),
        ([("namespace", "")], {}, "", "without a name"),
        ([("token_file", "/no/such/file")], {}, "", "/no/such/file cannot be read"),
        ([("controller", "http://c:1")], {}, "", "'controller' is of use with option 'http' only"),
        ([], {"KVSTORE_SERVE_HTTP_ADMIN_TOKEN_FILE": "/x"}, "", "'http_admin_token_file' is of use with option 'http'"),
        ([], {"KVSTORE_SERVE_HTTP_ADMIN_TOKEN": ""}, "", "token of option 'http_admin_token_file' is empty"),
        ([], {}, "http_admin_token: hunter2", "must not stand in the configuration file"),
        ([], {"KVSTORE_SERVE_MEMROY": "1"}, "", r"did you mean 'memory'\?.*KVSTORE_SERVE_MEMROY"),
        ([], {"KVSTORE_SERVE_MEMORY": ""}, "", "empty"),
        ([], {"KVSTORE_SERVE_TOKEN": " "}, "", "token of the default namespace is empty"),
        ([], {"KVSTORE_SERVE_TOKEN_B": "x"}, "", "KVSTORE_SERVE_TOKEN_B is set, but there is no namespace"),
        ([("namespace", "a-b"), ("namespace", "a_b")], {}, "", "same environment variable"),
        ([], {}, "memroy: 1", "did you mean 'memory'"),
        ([], {}, "token: hunter2", "must not stand in the configuration file"),
        ([], {}, "namespaces: {a: {token: hunter2}}", "must not stand in the configuration file"),
        ([], {}, "namespaces: [a]", "must map names to options"),
        ([], {}, "contexts: [a]", "must map names to files"),
        ([("context", "llama")], {}, "", "write NAME=FILE"),
        ([("remote", "/tmp/x")], {}, "", r"^option 'remote': a path is not a URL; .*\(from --remote\)"),
        ([("namespace", "a"), ("disk", "/tmp/x")], {}, "", r"^option 'disk': a path is not a URL; .*\(from --disk\)"),
        ([], {}, "remote: nope://x", r"^option 'remote': unknown scheme nope://.*\(in .*serve\.yaml\)"),
        ([], {"KVSTORE_SERVE_REMOTE": "x"}, "", r"^option 'remote': .*variable KVSTORE_SERVE_REMOTE\)"),
        ([], {}, "namespaces: {a: 3}", "must have a map of options"),
        ([], {}, "namespaces: {a: {listen: x}}", "unknown option 'listen' for namespace 'a'"),
        ([], {}, "- a", "map from option names"),
        ([], {}, "a: [", "not valid YAML"),
    ],
)
def test_what_makes_no_sense(
    tmp_path: Path, flags: list[tuple[str, object]], env: dict[str, str], text: str, message: str
) -> None:
    file = written(tmp_path / "serve.yaml", text) if text else None
    with pytest.raises(ConfigError, match=message) as caught:
        load(*flags, env=env, file=file)
    assert "hunter2" not in str(caught.value)


def test_token_files(tmp_path: Path) -> None:
    empty, long = written(tmp_path / "empty", "\n"), written(tmp_path / "long", "x" * 5000)
    for path in (empty, long):
        with pytest.raises(ConfigError, match="empty, or longer than 4096"):
            load(("token_file", str(path)))
    token = written(tmp_path / "token", "secret")
    with pytest.raises(ConfigError, match="give one of them"):
        load(("token_file", str(token)), env={"KVSTORE_SERVE_TOKEN": "other"})


# The command.


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["serve"], "an address to listen on"),
        (["serve", "--listen", "0.0.0.0:0"], "no token, so whoever reaches"),
        (["serve", "--listen", "127.0.0.1:0", "--http", "0.0.0.0:0"], "there is no admin token"),
        (["serve", "--listen", "127.0.0.1:0", "--http", "nonsense"], "is not HOST:PORT"),
        (["serve", "--listen", "127.0.0.1:0", "--memory", "3 sacks"], "unknown unit"),
        (["serve", "--lisen", "127.0.0.1:0"], "--lisen"),
        (["serve", "extra"], "extra"),
        (["serve", "--transport", "shm", "--listen", "127.0.0.1:0"], "--unix PATH"),
        (["serve", "--listen", "127.0.0.1:0", "--unix-users", "0"], "give 'unix' as well"),
        (["serve", "--unix", "/tmp/none.sock", "--unix-users", "0, no-such-user"], "no user 'no-such-user'"),
        (["serve", "--unix", "/nowhere/node.sock"], "there is no folder /nowhere"),
        (["dance"], "dance"),
    ],
)
def test_a_wrong_command_line_is_one_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: Sequence[str], message: str
) -> None:
    for variable in [name for name in os.environ if name.startswith("KVSTORE_SERVE_")]:
        monkeypatch.delenv(variable)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        assert main(words) == 2
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    said = capsys.readouterr()
    assert message in said.err
    assert said.err.startswith("kvstore: ")
    assert said.err.count("\n") == 1
    assert not said.out


def test_help_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "serve" in capsys.readouterr().out
    assert main(["serve", "--help"]) == 0
    text = capsys.readouterr().out
    for option in (*SERVER_OPTIONS, *NAMESPACE_OPTIONS):
        assert f"--{option.name.replace('_', '-')}" in text
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("kvstore ")


def test_further_users_of_the_unix_socket(tmp_path: Path) -> None:
    sock = tmp_path / "s"
    settings = load(("unix", str(sock)), ("memory", "1MiB"), ("unix_users", "root, 4242"))
    with open_node(settings) as node:
        assert node._server._limits.uids == {0, 4242}
        assert sock.stat().st_mode & 0o777 == 0o666  # who is let in is decided when he connects
    with open_node(load(("unix", str(sock)), ("memory", "1MiB"))) as node:
        assert node._server._limits.uids == frozenset()
        assert sock.stat().st_mode & 0o777 == 0o600


class Serving:
    """A process that runs `kvstore serve`."""

    def __init__(self, *words: str, env: dict[str, str] | None = None) -> None:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("KVSTORE_SERVE_")}
        path = os.pathsep.join(filter(None, [str(_TOOLS), clean.get("PYTHONPATH", "")]))
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", "-m", "kvstore_cli", "serve", *words],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**clean, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **(env or {})},
        )  # fmt: skip
        assert self.process.stdout is not None
        self.line = self.process.stdout.readline()

    def facts(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.line)
        return found

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str, str]:
        """(status, the rest of its output, its errors)"""
        self.process.send_signal(number)
        out, err = self.process.communicate(timeout=60)
        return self.process.returncode, out, err

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


@pytest.fixture
def serving() -> Iterator[list[Serving]]:
    running: list[Serving] = []
    yield running
    for each in running:
        each.close()


def client_of(address: str, credentials: Credentials = Credentials()) -> NodeClient:  # noqa: B008 - immutable
    return NodeClient(
        lambda deadline: connect(address, deadline=deadline, transport="tcp", credentials=credentials), name="node",
        connect_timeout=60,
    )  # fmt: skip


def test_a_process_that_serves_until_sigterm(serving: list[Serving], tmp_path: Path) -> None:
    disk, sock = f"file://{tmp_path}/kv?bytes=10MiB", str(tmp_path / "socket")
    words = ["--listen", "127.0.0.1:0", "--memory", "4MiB", "--disk", disk, "--unix", sock, "--json"]
    serving.append(Serving(*words))
    facts = serving[0].facts()
    assert facts["pid"] == serving[0].process.pid
    assert (facts["unix"], facts["namespaces"], facts["memory_bytes"]) == (sock, [""], 4 * MiB)
    client = client_of(facts["address"])
    records = {name: payload(name, 100 * KiB) for name in keys(5)}
    outcomes = client.put([Write(name, [memoryview(data)]) for name, data in records.items()], deadline=soon())
    assert all(outcome.ok for outcome in outcomes)
    assert serving[0].end() == (0, "", "")
    client.close()
    assert not os.path.exists(sock)

    port = facts["address"].rpartition(":")[2]
    serving.append(Serving("--listen", f"127.0.0.1:{port}", "--memory", "4MiB", "--disk", disk))
    assert serving[1].line == (f"kvstore serve: listening on 127.0.0.1:{port}; 4 MiB of memory; namespaces: default\n")
    client = client_of(facts["address"])
    for name, data in records.items():  # written behind, before the first one ended
        dst = bytearray(100 * KiB)
        assert client.get_into([Read(name, memoryview(dst))], deadline=soon())[0].ok
        assert dst == data
    client.close()
    assert serving[1].end(signal.SIGINT) == (0, "", "")


def test_a_process_with_tokens_shows_none(serving: list[Serving], tmp_path: Path) -> None:
    token = written(tmp_path / "token", "hunter2\n")
    file = written(tmp_path / "serve.yaml", "listen: 0.0.0.0:0\nmemory: 4MiB\n")
    words = ["--namespace", "team-a", "--token-file", str(token), "--memory", "1MiB", "--json"]
    serving.append(Serving("--config", str(file), *words, env={"KVSTORE_SERVE_TOKEN": "correct horse"}))
    facts = serving[0].facts()
    assert facts["namespaces"] == ["", "team-a"]
    assert facts["address"].startswith("127.0.0.1:")
    assert "hunter2" not in serving[0].line
    with pytest.raises(PeerRefused):
        connect(facts["address"], deadline=soon(), transport="tcp")
    client = client_of(facts["address"], Credentials("team-a", b"hunter2"))
    assert client.info(deadline=soon())["stats"]["capacity"] == MiB
    client.close()
    status, out, err = serving[0].end()
    assert (status, out) == (0, "")
    assert "hunter2" not in err
    assert "correct horse" not in err


def test_a_second_signal_ends_it_at_once(serving: list[Serving]) -> None:
    serving.append(Serving("--listen", "127.0.0.1:0", "--memory", "4MiB", "--drain-timeout", "1h", "--json"))
    address = serving[0].facts()["address"]
    channel = connect(address, deadline=soon(), transport="tcp")
    assert isinstance(channel, SocketChannel)
    header = Header(Kind.REQUEST, Op.PUT, number=1, body_nbytes=MiB)  # whose body never comes
    channel._control.send_frame(header, pack_put(keys(1), [MiB], [None]), deadline=soon())
    watcher = client_of(address)
    while watcher.info(deadline=soon())["stats"]["held"] == 0:
        time.sleep(0.01)
    serving[0].process.send_signal(signal.SIGTERM)
    while watcher.stat(keys(1), deadline=soon())[0].error is None:  # until it takes no more
        time.sleep(0.01)
    assert serving[0].process.poll() is None
    assert serving[0].end()[0] == -signal.SIGTERM
    watcher.close()
    channel.close()


def test_a_reader_of_its_output_that_went_away_does_not_matter(tmp_path: Path) -> None:
    sock = tmp_path / "socket"
    reading, writing = os.pipe()
    os.close(reading)
    process = subprocess.Popen(
        [sys.executable, "-m", "kvstore_cli", "serve", "--unix", str(sock), "--memory", "4MiB"],
        stdout=writing, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(_TOOLS), os.environ.get("PYTHONPATH", "")])},
    )  # fmt: skip
    os.close(writing)
    try:
        while not sock.exists():
            assert process.poll() is None
            time.sleep(0.01)
        connect(str(sock), deadline=soon(), transport="tcp").close()
        process.terminate()
        _, err = process.communicate(timeout=60)
        assert (process.returncode, err) == (0, "")
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def test_a_thread_that_hangs_does_not_hold_up_the_end() -> None:
    """Python would wait for it for ever."""
    script = (
        "import sys, threading\n"
        "import kvstore_cli.serve as serve\n"
        "serve._LINGER_S = 0.01\n"
        "before = threading.enumerate()\n"
        "serve._leave_behind(before)\n"
        "threading.Thread(target=threading.Event().wait).start()\n"
        "serve._leave_behind(threading.enumerate())\n"  # somebody else's is nothing to us
        "print('here', flush=True)\n"
        "serve._leave_behind(before)\n"
    )
    path = os.pathsep.join(str(Path(__file__).parents[2] / part) for part in (".", "backends", "transport", "tools"))
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "here\n")
