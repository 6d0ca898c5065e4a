"""`kvstore-bench compare`: what it refuses, that both sides are verified, and that both ends' CPU counts.

The peer is a program of this file that speaks the protocol of `peers/child.py`; the last tests run the real ones.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore.errors import ConfigError, PermanentError
from kvstore_bench import cli
from kvstore_bench.ceilings import Lanes
from kvstore_bench.compare import BARS, run_compare
from kvstore_bench.io import OPS
from kvstore_bench.peers import process as peers
from kvstore_bench.peers.process import PeerProcess, PeerSide
from kvstore_bench.processes import NodeProcess, cpu_of
from tests.servers.mooncake import MISSING, mooncake_folder
from tests.servers.valkey import until

CHILD = Path(peers.__file__).with_name("child.py")

FAKE = '''
import os, sys, time
sys.path.insert(0, {folder!r})
import child

class Fake(child.Peer):
    """Memory of this process; `slow` takes longer, `bad` fails, and what `wrong` reads is not what was written."""
    forms = {{"get": {get!r}, "put": ("put", "slow put")}}
    lanes = {lanes}

    def __init__(self):
        super().__init__()
        self.name = "fake 1.0"
        self.puts = 0

    def register(self):
        self.store = child.Memory(self.size * self.count)

    def fill(self):
        self.store.array[:] = self.source.array

    def run(self, op, form, first, count):
        if form.startswith("slow"):
            time.sleep(0.05)
        if form.startswith("bad"):
            raise RuntimeError("no luck")
        if form.startswith("die"):
            os._exit(7)
        if form.startswith("hot"):
            end = time.process_time() + 0.005
            while time.process_time() < end:
                pass
        at = slice(first * self.size, (first + count) * self.size)
        if op == "get":
            self.out.array[at] = self.store.array[at]
            if form.startswith("wrong"):
                self.out.array[at.start] ^= 1
        else:
            self.store.array[at] = self.source.array[at]
            self.puts += count

    def settle(self):
        if self.puts != self.count:
            raise RuntimeError("settled after %d puts" % self.puts)
        self.puts = 0

    def verify(self, op):
        wrong = 0
        if op == "put":
            self.store.array[:] = 0
            self.run("put", "put", 0, self.count)
            self.puts = 0
        for form in self.forms["get"]:
            self.out.array[:] = 0
            self.run("get", form, 0, self.count)
            wrong = max(wrong, self.wrong())
        return wrong

    def drop(self):
        del self.source, self.out, self.store

child.PEERS["fake"] = Fake
child.main(sys.argv[1], sys.argv[2])
'''


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes "fake" a peer: the calls it has for gets, and its number of lanes."""
    folder = tmp_path / "peers"
    folder.mkdir()
    monkeypatch.setattr(peers, "__file__", str(folder / "process.py"))
    monkeypatch.setitem(peers.PEERS, "fake", "a peer of the tests")

    def make(*forms: str, lanes: int = 2) -> None:
        text = FAKE.format(folder=str(folder / "real"), get=forms or ("get", "slow get"), lanes=lanes)
        (folder / "child.py").write_text(text)
        (folder / "real").mkdir(exist_ok=True)
        (folder / "real" / "child.py").write_text(CHILD.read_text())

    make()
    return make


@pytest.fixture
def peer(fake: Callable[..., None]) -> Iterator[PeerProcess]:
    with PeerProcess("fake") as running:
        yield running


# The peer's process.


def test_what_a_peer_started_ends_with_it_however_it_ends(fake: Callable[..., None]) -> None:
    """It dies while it starts, with a process of its own that nobody else knows of."""
    folder = Path(peers.__file__).parent
    text = f"""
import pathlib, subprocess, sys, time
left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path({str(folder)!r}, "left").write_text(str(left.pid))
sys.exit("it goes wrong")
"""
    (folder / "child.py").write_text(text)
    with pytest.raises(ConfigError, match="it goes wrong"):
        PeerProcess("fake")
    stat = Path(f"/proc/{(folder / 'left').read_text()}/stat")

    def ended() -> bool:
        try:
            return stat.read_text().rpartition(")")[2].split()[0] in "ZX"  # to be waited for by init
        except (FileNotFoundError, ProcessLookupError):
            return True

    assert until(ended)


def test_the_child_needs_nothing_of_kvstore() -> None:
    """It runs in the peer's interpreter, which need not have kvstore."""
    program = f"import runpy, sys; runpy.run_path({str(CHILD)!r}, run_name='child'); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-I", "-c", program], capture_output=True, text=True, check=True)
    assert not {name for name in done.stdout.split() if name.startswith("kvstore")}


def test_a_peer_that_is_not_installed_is_named_with_what_to_install(tmp_path: Path) -> None:
    """A bare interpreter stands for one without the wheels."""
    if importlib.util.find_spec("nixl_cu12") is not None or importlib.util.find_spec("nixl") is not None:
        pytest.skip("NIXL is installed here")
    with pytest.raises(ConfigError, match=r"nixl cannot be compared with here: .* has no NIXL: pip install"):
        PeerProcess("nixl")


def test_an_interpreter_that_does_not_exist_is_named() -> None:
    with pytest.raises(ConfigError, match=r"--python /no/such/python: No such file"):
        PeerProcess("mooncake", "/no/such/python")


def test_an_interpreter_that_is_none_is_quoted() -> None:
    with pytest.raises(ConfigError, match="the peer's process did not start: it said nothing"):
        PeerProcess("mooncake", "/bin/false")


def test_a_peer_that_dies_is_an_error(fake: Callable[..., None]) -> None:
    fake("die")
    with PeerProcess("fake") as running:
        running.ask("load", size=1000, count=2)
        with pytest.raises(PermanentError, match="process died"):
            running.ask("run", op="get", form="die", first=0, count=1)
    assert running._process.returncode == 7


def test_a_peer_ends_with_its_connections(peer: PeerProcess) -> None:
    peer.close()
    assert peer._process.returncode == 0


# A side made of it.


def test_the_fastest_call_is_chosen_and_all_are_verified(peer: PeerProcess) -> None:
    side = PeerSide(peer, "get", count=4, nbytes=1000)
    side.form = "slow get"
    with Lanes(2) as pool:
        side.choose(pool)
        assert side.form == "get"
        assert side.name == "fake get"
        assert side.verify()
        one = pool.run(side.jobs(2), 3)
        assert len(one.calls) == 6
        assert side.settle(3) == 3 * 4 * 1000
    side.close()


def test_puts_are_undone_after_each_pass(peer: PeerProcess) -> None:
    side = PeerSide(peer, "put", count=4, nbytes=1000)
    assert not side.repeatable
    with Lanes(2) as pool:
        side.choose(pool)
        for _ in range(2):
            pool.run(side.jobs(2))
            assert side.settle(1) == 4000
    side.close()


def test_a_call_that_fails_moves_nothing_and_is_not_chosen(fake: Callable[..., None]) -> None:
    fake("bad get", "slow get")
    with PeerProcess("fake") as running, Lanes(1) as pool:
        side = PeerSide(running, "get", count=2, nbytes=1000)
        side.choose(pool, rounds=1)
        assert side.form == "slow get"
        assert side.failures.count == 1
        assert "no luck" in side.failures.messages["get"]
        side.close()


def test_a_peer_that_brings_other_bytes_is_not_verified(fake: Callable[..., None]) -> None:
    fake("get", "wrong get")
    with PeerProcess("fake") as running:
        side = PeerSide(running, "get", count=2, nbytes=1000)
        assert not side.verify()
        assert side.failures.messages == {"verify": "the peer brought 1 of 2 records wrong"}
        side.close()


# Other processes.


def test_the_cpu_of_another_process_is_read() -> None:
    program = "import time\nwhile time.process_time() < 0.3: pass\nprint(time.process_time(), flush=True)\ninput()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        said = float(child.stdout.readline())
        assert cpu_of(child.pid) >= said >= 0.3
        child.communicate(b"\n")
    assert cpu_of(child.pid) == 0.0


def test_a_node_of_its_own_starts_and_ends() -> None:
    with NodeProcess(memory_bytes=64 << 20) as node:
        assert node.address.startswith("127.0.0.1:")
        assert cpu_of(node.pid) > 0
    assert cpu_of(node.pid) == 0.0


def test_a_node_that_does_not_start_says_why() -> None:
    with pytest.raises(ConfigError, match=r"did not start: .*no-such-policy"):
        NodeProcess(memory_bytes=64 << 20, words=("--policy", "no-such-policy"))


# The comparison.


def test_a_comparison_has_figures_and_rows_of_both_sides(fake: Callable[..., None]) -> None:
    """A peer that burns CPU: its share is in the ratio. What is measured is ours against it, verified."""
    fake("hot get")
    steps: list[str] = []
    report = run_compare(
        "fake", sizes=[64 << 10], ops=["get"], batch=4, repeats=3, quick=True,
        progress=lambda what, done, total: steps.append(f"{what} {done}/{total}"),
    )  # fmt: skip
    assert report.ok
    assert steps == ["fake get 64KiB 0/1"]
    (row,) = report.rows
    assert (row.scheme, row.op, row.size_bytes, row.batch) == ("node_tcp", "get", 64 << 10, 4)
    assert row.ceiling.name == "fake hot get"
    figures = {name.removeprefix("compare.fake.get.64KiB."): figure for name, figure in report.figures.items()}
    assert set(figures) == {
        "speed_ratio", "cpu_ratio", "gbytes_per_s", "peer_gbytes_per_s", "cpu_s_per_gib", "peer_cpu_s_per_gib",
    }  # fmt: skip
    assert figures["peer_cpu_s_per_gib"].value >= 0.005 * (1 << 30) / (256 << 10)
    assert figures["cpu_s_per_gib"].value > 0
    ratio = figures["cpu_s_per_gib"].value / figures["peer_cpu_s_per_gib"].value
    assert figures["cpu_ratio"].value == pytest.approx(ratio, rel=0.01, abs=1e-3)
    assert figures["speed_ratio"].better == "higher"
    assert figures["cpu_ratio"].better == "lower"
    assert any("CPU s/GiB of both ends" in note for note in report.notes)


def test_wrong_bytes_of_the_peer_fail_the_run(fake: Callable[..., None], tmp_path: Path) -> None:
    """No figure then, and exit status 1."""
    fake("get", "wrong get")
    out = tmp_path / "out.json"
    words = ["compare", "fake", "--sizes", "16KiB", "--batch", "4", "--ops", "get", "--repeats", "3", "--quick"]
    assert cli.main([*words, "--json", str(out)]) == 1
    document = json.loads(out.read_text())
    assert document["figures"] == {}
    assert document["rows"][0]["verified"] is False
    assert any("records wrong" in note for note in document["notes"])


def test_a_run_from_the_command_line(fake: Callable[..., None], tmp_path: Path) -> None:
    html, out = tmp_path / "page.html", tmp_path / "out.json"
    words = ["compare", "fake", "--sizes", "16KiB", "--batch", "4", "--repeats", "3", "--quick"]
    assert cli.main([*words, "--html", str(html), "--json", str(out)]) == 0
    document = json.loads(out.read_text())
    assert [row["op"] for row in document["rows"]] == ["put", "get"]
    assert document["command"].startswith("kvstore-bench compare fake --sizes 16KiB")
    assert "fake" in html.read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["compare", "hivecache"], "unknown peer 'hivecache'; known peers: mooncake, nixl, lmcache"),
        (["compare", "mooncake", "--transport", "pigeon"], "unknown transport 'pigeon'"),
        (["compare", "mooncake", "--sizes", "4parsec"], "unknown unit 'parsec'"),
        (["compare", "mooncake", "--ops", "delete"], "'delete' is not known"),
        (["compare", "mooncake", "--python", "/no/such"], "--python /no/such: No such file"),
        (["compare", "mooncake", "--json", "-", "--html", "-"], "cannot both go to standard output"),
    ],
)
def test_what_makes_no_sense_is_one_sentence_and_status_2(
    capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    begin = time.monotonic()
    assert cli.main(words) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert time.monotonic() - begin < 60


def test_bars_are_those_of_the_issue() -> None:
    wanted = {"speed_ratio": 1.15, "cpu_ratio": 0.6}
    names = {
        f"compare.mooncake.{op}.{size}.{what}": what for op in OPS for size in ("4MiB", "32MiB") for what in wanted
    }
    assert {name: wanted[what] for name, what in names.items()} == BARS


def test_help_names_every_peer(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["compare", "--help"]) == 0
    said = capsys.readouterr().out
    for word in ("mooncake", "nixl", "--python", "--quick", "--sizes", "--json", "--html", "--transport"):
        assert word in said


@pytest.mark.slow
@pytest.mark.leaves("finding out whether Mooncake can be loaded loads it")
def test_mooncake_itself(tmp_path: Path) -> None:
    if mooncake_folder() is None:
        pytest.skip(MISSING)
    out = tmp_path / "out.json"
    assert cli.main(["compare", "mooncake", "--sizes", "1MiB", "--repeats", "3", "--quick", "--json", str(out)]) == 0
    figures = json.loads(out.read_text())["figures"]
    for op in ("get", "put"):
        assert figures[f"compare.mooncake.{op}.1MiB.speed_ratio"]["value"] > 0
        assert figures[f"compare.mooncake.{op}.1MiB.peer_cpu_s_per_gib"]["value"] > 0
