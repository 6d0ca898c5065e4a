"""`kvstore ctl` against real processes: a controller (`kvstore ctl serve`) and nodes (`kvstore serve --http`)."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import pytest

import kvstore
from kvstore.control import Client, Health
from kvstore.errors import TransientError
from kvstore_cli.main import kvstore as kvstore_command
from kvstore_cli.main import main
from tests.control_support import CONTEXT, eventually, keys_of, plain_node

ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("KVSTORE_")}


class Process:
    """`kvstore …`, ready: what it printed as JSON, and its end."""

    def __init__(self, *words: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kvstore_cli", *words, "--json"], stdout=subprocess.PIPE, text=True,
            env={**ENVIRONMENT, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.kill()
            raise RuntimeError(f"kvstore {' '.join(words)} did not start")
        self.said = json.loads(line)

    def end(self) -> int:
        """SIGTERM; its exit status."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(60)
        finally:
            self.kill()

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


@contextlib.contextmanager
def _started(*words: str) -> Iterator[Process]:
    process = Process(*words)
    try:
        yield process
    finally:
        process.kill()


def _run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, Any]:
    status = main(["ctl", *words, "--json", "-"])
    text = capsys.readouterr().out
    return status, json.loads(text) if text else None


def _get(url: str, token: str = "") -> tuple[int, bytes]:
    request = urllib.request.Request(url, headers={"authorization": f"Bearer {token}"} if token else {})
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def _files(folder: Path, **texts: str) -> list[str]:
    for name, text in texts.items():
        (folder / name).write_text(text)
    return [str(folder / name) for name in texts]


def test_a_controller_and_two_nodes_as_their_operator_uses_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    admin, reports, team = _files(tmp_path, admin="admin-token\n", reports="report-token\n", team="team-token\n")
    context, tokens = _files(
        tmp_path, context="model: org/model\ndtype: bfloat16\nlayout: {num_layers: 2, num_kv_heads: 2, head_dim: 64}\n",
        tokens=" ".join(["2 0"] * 24),
    )  # fmt: skip
    controller = [
        "ctl", "serve", "--admin-token-file", admin, "--report-token-file", reports, "--namespace", f"team={team}",
        "--context", f"mine={context}", "--lost-timeout", "2s",
    ]  # fmt: skip
    node = ["serve", "--listen", "127.0.0.1:0", "--memory", "64MiB", "--http", "127.0.0.1:0", "--http-admin-token-file",
            admin, "--controller-token-file", reports]  # fmt: skip
    keys = keys_of(1, 6)
    prompt = ["--tokens", tokens, "--context", context, "--chunk-size", "8", "--namespace", "team"]
    with contextlib.ExitStack() as stack:
        head = stack.enter_context(_started(*controller, "--http", "127.0.0.1:0"))
        url = head.said["url"]
        nodes = [
            stack.enter_context(_started(*node, "--name", f"n{number}", "--controller", url, "--namespace", "team",
                                         "--token-file", team, "--memory", "32MiB"))
            for number in range(2)
        ]  # fmt: skip
        for process, some in zip(nodes, (keys[:4], keys[:2]), strict=True):
            address = f"node://{process.said['address']}?namespace=team"
            with kvstore.open_store(address, backend_options={"node": {"token": "team-token"}}) as store:
                store.put_many(dict.fromkeys(some, b"kv" * 1000))
        monkeypatch.setenv("KVSTORE_CTL_URL", url)
        monkeypatch.setenv("KVSTORE_CTL_TOKEN", "admin-token")
        client = stack.enter_context(Client(url, token="team-token"))

        def hits() -> dict[str, int]:
            found = client.lookup(keys=keys, namespace="team")
            return {place.instance: place.hit_chunks for place in found.places}

        eventually(lambda: hits() == {"n0": 4, "n1": 2})
        status, found = _run(capsys, "lookup", *prompt)
        assert (status, found["instance"], found["tier"], found["hit_tokens"]) == (0, "n0", "memory", 32)
        assert main(["ctl", "lookup", *prompt]) == 0
        assert "n0" in capsys.readouterr().out
        status, found = _run(capsys, "route", *prompt, "--candidate", "n0=10", "--candidate", "n1")
        assert (status, found["instance"]) == (0, "n0")
        assert main(["ctl", "route", *prompt, "--candidate", "n0=10", "--candidate", "n7=5"]) == 0
        (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("n7")]
        assert line.endswith("not reporting here")
        unknown = ["move", keys_of(3, 1)[0].hex(), "--namespace", "team", "--from"]
        assert main(["ctl", *unknown, "memory", "--to-instance", "n1"]) == 1
        assert "nobody has any of the 1 chunks" in capsys.readouterr().err
        assert main(["ctl", *unknown, "memroy", "--to-instance", "n1"]) == 2
        assert "'memroy'; there are: memory" in capsys.readouterr().err
        assert main(["ctl", "workers", "--url", f"http://{nodes[0].said['address']}"]) == 2
        assert "is this the --http of a node" in capsys.readouterr().err
        assert _run(capsys, "lookup", keys_of(3, 1)[0].hex())[0] == 1
        status, found = _run(capsys, "pin", *prompt, "--ttl", "10min")
        assert (status, found["instances"]) == (0, {"n0": 4, "n1": 2})
        assert _run(capsys, "unpin", *prompt, "--instance", "n0")[1]["count"] == 4
        status, found = _run(capsys, "workers")
        assert (status, [worker["chunks"] for worker in found]) == (0, [4, 2])
        assert main(["ctl", "workers"]) == 0
        assert "team" in capsys.readouterr().out
        assert _run(capsys, "query-ip", "n1")[1][0]["address"] == nodes[1].said["address"]
        assert _run(capsys, "health")[0] == 0

        # Its page has no data for who has no token.
        assert _get(f"{url}/")[0] == 200
        assert _get(f"{url}/page/data")[0] == _get(f"{url}/metrics")[0] == 401
        status, page = _get(f"{url}/page/data", "admin-token")
        assert (status, [node["name"] for node in json.loads(page)["nodes"]]) == (200, ["n0", "n1"])
        status, numbers = _get(f"{url}/metrics", "admin-token")
        assert b'kvstore_controller_event_keys_total{op="admit"} ' in numbers

        # The controller is killed and comes back on its port: it is told all again.
        port = url.rpartition(":")[2]
        head.process.kill()
        head.process.wait()
        with pytest.raises(TransientError):
            client.workers(timeout=1)
        stack.enter_context(_started(*controller, "--http", f"127.0.0.1:{port}"))
        eventually(lambda: hits() == {"n0": 4, "n1": 2})

        assert main(["ctl", "clear", "--all", "--namespace", "team"]) == 2
        assert "say --yes" in capsys.readouterr().err
        status, found = _run(capsys, "clear", *prompt, "--instance", "n1", "--wait", "30s")
        assert (status, found["jobs"]["n1"]["done"]) == (0, 2)
        eventually(lambda: hits() == {"n0": 4})
        status, found = _run(capsys, "clear", "--all", "--yes", "--namespace", "team")
        assert status == 0
        assert _run(capsys, "check-finish", found["event"], "--wait", "30s")[0] == 0
        eventually(lambda: hits() == {})

        # A node that ends says so; one that is killed is missed.
        assert nodes[0].end() == 0
        eventually(lambda: {h.instance: h.state for h in client.health()}["n0"] in ("draining", "lost"))
        nodes[1].kill()
        eventually(lambda: {h.instance: h.state for h in client.health()}["n1"] == "lost")
        status, found = _run(capsys, "health")
        assert status == 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["lookup"], "name the KEYs"),
        (["lookup", "zz"], "not a key"),
        (["lookup", "ab" * 32, "--tokens", "x"], "name the KEYs"),
        (["lookup", "--tokens", "/nowhere", "--context", "x"], "/nowhere cannot be read"),
        (["lookup", "--tokens", "x"], "fewer tokens than a chunk (256)"),
        (["lookup", "--tokens", "x", "--context", "y", "--context-name", "z"], "one of them"),
        (["lookup", "ab" * 32, "--context-name", "z"], "goes with --tokens"),
        (["route", "ab" * 32, "--candidate", "a=b"], "NAME=WAITING_TOKENS"),
        (["clear"], "say what to remove"),
        (["clear", "--model", "m"], "say --yes"),
        (["move", "ab" * 32, "--from", "memory"], "say where to"),
        (["workers", "--url", "nonsense"], "http://HOST:PORT"),
        (["workers", "--url", "http://127.0.0.1:1"], "by --url, or KVSTORE_CTL_URL"),
        (["--url", "http://127.0.0.1:1", "health"], "behind the subcommand: kvstore ctl health --url"),
        (["--ulr", "http://127.0.0.1:1", "health"], "--ulr"),
        (["context", "file:///nowhere", "ab" * 32], "/nowhere"),
        (["workers", "--timeout", "0s"], "out of range"),
        (["pin", "ab" * 32, "--ttl", "0s"], "more than 0"),
        (["serve", "--http", "0.0.0.0:0"], "no admin token: give one (--admin-token-file)"),
        (["serve", "--http", "nonsense"], "HOST:PORT"),
        (["serve", "--tier-worth", "memory=2"], "out of range"),
        (["serve", "--tier-worth", "memory"], "NAME=VALUE"),
        (["serve", "--admin-token-file", "/nowhere"], "/nowhere cannot be read"),
        (["serve", "--lost-timeout", "1h"], "lost_s=3600"),
    ],
)
def test_what_makes_no_sense_is_said_in_one_sentence(
    words: Sequence[str], says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("KVSTORE_CTL_URL", raising=False)
    (tmp_path / "x").write_text("1 2 3")
    assert main(["ctl", *words]) == 2
    captured = capsys.readouterr()
    assert says in captured.err
    assert captured.err.count("\n") == 1


def test_sigterm_ends_the_controller_whichever_thread_the_kernel_gives_it_to() -> None:
    with _started("ctl", "serve", "--http", "127.0.0.1:0") as controller:
        process = controller.process
        others = {int(thread) for thread in os.listdir(f"/proc/{process.pid}/task")} - {process.pid}
        assert ctypes.CDLL(None).tgkill(process.pid, max(others), signal.SIGTERM) == 0
        assert process.wait(30) == 0


def test_options_of_the_controller_come_from_file_environment_and_flags(tmp_path: Path) -> None:
    from kvstore_cli.ctl_serve import load_controller

    (tmp_path / "c.yaml").write_text(
        "http: 127.0.0.1:1\ncapacity: 1000\nlost_timeout: 3s\nnamespaces: {a: {token_file: /t}}\n"
        "tier_worth: {disk: 0.5}\n"
    )
    options, maps = load_controller(
        {"http": "127.0.0.1:3", "insecure": None},
        {"namespaces": ["b=/u", "default"], "tier_worth": [], "contexts": []},
        config_file=str(tmp_path / "c.yaml"),
        env={"KVSTORE_CTL_SERVE_CAPACITY": "2000", "KVSTORE_CTL_SERVE_HTTP": "127.0.0.1:2", "KVSTORE_CTL_URL": "x"},
    )  # fmt: skip
    assert (options["http"], options["capacity"], options["lost_timeout"]) == ("127.0.0.1:3", 2000, 3.0)
    assert maps["namespaces"] == {"a": {"token_file": "/t"}, "b": {"token_file": "/u"}, "default": {"token_file": ""}}
    assert maps["tier_worth"] == {"disk": 0.5}
    wrong = (({"KVSTORE_CTL_SERVE_CAPCITY": "1"}, "capcity"), ({"KVSTORE_CTL_SERVE_CAPACITY": "x"}, "capacity"))
    for env, words in wrong:
        with pytest.raises(kvstore.ConfigError, match=words):
            load_controller({}, {}, config_file="", env=env)


def test_jobs_of_a_single_node_on_the_command_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    keys = keys_of(1, 3)
    words = [key.hex() for key in keys]
    with plain_node("n0") as (instance, url):
        instance.put("", "memory", keys)
        at = ["--url", url]
        assert _run(capsys, "move", *words, "--from", "memory", "--to", "disk", "--wait", "5s", *at)[0] == 0
        assert _run(capsys, "lookup", *words, *at)[1]["tier"] == "disk"
        assert _run(capsys, "compress", *words, "--codec", "lz4", "--level", "3", "--wait", "5s", *at)[0] == 0
        assert _run(capsys, "decompress", *words, "--wait", "5s", *at)[0] == 0
        assert next(call for call in instance.calls if call[0] == "transcode") == ("transcode", ("lz4", 3))
        assert main(["ctl", "clear", "--model", "org/model", "--yes", "--wait", "5s", *at]) == 0
        assert "clear" in capsys.readouterr().out
        assert _run(capsys, "lookup", *words, *at)[0] == 1
        assert main(["ctl", "clear", "--model", "org/model", "--yes", "--wait", "5s", *at]) == 1
        assert "no record names the model 'org/model'" in capsys.readouterr().err
        for gone in (["compress", "--codec", "lz4"], ["decompress"], ["move", "--from", "memory", "--to", "disk"]):
            assert main(["ctl", gone[0], *words, *gone[1:], *at]) == 1
            assert "nobody has any of the 3 chunks" in capsys.readouterr().err
        assert main(["ctl", "compress", *words, "--codec", "kvt", *at]) == 2
        assert "'kvt'" in capsys.readouterr().err


def test_tokens_alone_are_enough_where_the_server_knows_what_they_are_of(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    keys = keys_of(1, 6)
    (tmp_path / "tokens").write_text(" ".join(["2 0"] * 24))
    prompt = ["--tokens", str(tmp_path / "tokens"), "--chunk-size", "8"]
    with plain_node("n0", contexts={"mine": CONTEXT}) as (instance, url):
        instance.put("", "memory", keys[:5])
        at = ["--url", url]
        assert _run(capsys, "lookup", *prompt, *at)[1]["hit_tokens"] == 40
        assert _run(capsys, "lookup", *prompt, "--context-name", "mine", *at)[1]["hit_tokens"] == 40
        assert _run(capsys, "pin", *prompt, *at)[1]["count"] == 5
        assert _run(capsys, "clear", *prompt, "--wait", "5s", *at)[1]["jobs"]["n0"]["done"] == 5
        assert main(["ctl", "lookup", *prompt, "--context-name", "other", *at]) == 2
        assert "known: mine" in capsys.readouterr().err
    with plain_node("n0", contexts={"mine": CONTEXT, "other": CONTEXT}) as (_, url):
        assert main(["ctl", "lookup", *prompt, "--url", url]) == 2
        assert "mine, other" in capsys.readouterr().err


def test_what_a_node_says_of_itself_does_not_steer_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with plain_node("n0") as (instance, url):
        instance.healthy = Health(True, False, 0.0, ["\x1b]0;mine\x07\x9b2J wörter"])
        assert main(["ctl", "health", "--url", url]) == 1
        shown = capsys.readouterr().out
        assert r"\x1b]0;mine\x07\x9b2J wörter" in shown
        assert not set(shown) & set("\x1b\x07\x9b")
        assert _run(capsys, "health", "--url", url)[1][0]["health"]["problems"] == instance.healthy.problems


def _commands(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from _commands(command, (*path, name))
        else:
            yield (*path, name), command


def test_every_command_is_there_and_writes_json() -> None:
    found = dict(_commands(kvstore_command))
    of_issue = ["serve", "doctor", "ls", "stat", "verify", "rm", "options", "config check", "plan", "ctl lookup",
                "ctl query-ip", "ctl pin", "ctl unpin", "ctl clear", "ctl move", "ctl compress", "ctl decompress",
                "ctl health", "ctl context", "ctl check-finish", "ctl workers", "ctl route",
                "cloudwatch publish"]  # fmt: skip
    assert {tuple(words.split()) for words in of_issue} <= set(found)
    assert [path for path, command in found.items() if not any("--json" in each.opts for each in command.params)] == []


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["kvstore", "c"], {"config", "ctl", "cloudwatch"}),
        (["kvstore", "ctl", "che"], {"check-finish"}),
        (["kvstore", "ctl", "lookup", "--tok"], {"--tokens", "--token-file"}),
    ],
)
def test_a_shell_completes_commands_and_options(words: list[str], expected: set[str]) -> None:
    given = {"_KVSTORE_COMPLETE": "bash_complete", "COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}
    done = subprocess.run(
        [sys.executable, "-m", "kvstore_cli"], env=ENVIRONMENT | given, capture_output=True, text=True, check=True
    )
    assert {line.partition(",")[2] for line in done.stdout.split()} == expected


def test_the_context_of_a_file_is_that_of_the_code(tmp_path: Path) -> None:
    from kvstore_cli.ctl import context_of

    path = tmp_path / "context.yaml"
    path.write_text("model: org/model\ndtype: bfloat16\nlayout: {num_layers: 2, num_kv_heads: 2, head_dim: 64}\n")
    assert context_of(str(path)) == CONTEXT
    shape = "{num_layers: 2, num_kv_heads: 2, head_dim: 64}"
    wrong = [
        ("model: x\n", "layout"),
        ("model: x\ndtype: bfloat16\nlayout: {num_layers: 1}\n", "layout needs num_kv_heads, head_dim"),
        (
            "layout: {layers: 2}\n",
            "layout has no field 'layers'; its fields: num_layers, num_kv_heads, head_dim, v_head",
        ),
        (f"modl: x\nlayout: {shape}\n", "key context has no field 'modl'; its fields: model, layout, dtype, revision"),
        (f"model: x\nlayout: {shape}\n", "key context needs dtype"),
        (f"model: x\ndtype: bf17\nlayout: {shape}\n", "is no key context"),
    ]
    for text, words in wrong:
        path.write_text(text)
        with pytest.raises(kvstore.ConfigError, match=words):
            context_of(str(path))
