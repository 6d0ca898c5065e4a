"""`kvstore-bench io` as a user runs it: a process of its own, real backends, tiny sizes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

SMALL = ["--sizes", "4KiB,100000B", "--batch", "4", "--repeats", "2", "--quick"]


def bench(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "kvstore_bench", *words],
        capture_output=True, text=True, timeout=120, check=False, env={**os.environ, "TMPDIR": str(folder)},
    )  # fmt: skip


def test_the_embedded_default_with_the_store(tmp_path: Path) -> None:
    temporary, results = tmp_path / "tmp", tmp_path / "results"
    temporary.mkdir()
    results.mkdir()
    done = bench("io", *SMALL, "--json", str(results / "io.json"), "--html", str(results / "io.html"), folder=temporary)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == f"wrote {results / 'io.html'}\n"  # no progress bar, no warning
    assert not list(temporary.iterdir())  # everything it put, and the folder, is gone
    data = json.loads((results / "io.json").read_text(encoding="utf-8"))
    assert data["ok"] is True
    assert data["notes"] == []
    seen = {(row["scheme"], row["op"], row["size_bytes"], row["ceiling"]["name"]) for row in data["rows"]}
    sizes = (4096, 100_000)
    assert seen == {
        *(("memory", op, size, "memcpy") for op in ("get", "put") for size in sizes),
        *((scheme, "get", size, "preadv") for scheme in ("file", "store_file") for size in sizes),
        *((scheme, "put", size, "pwritev+rename") for scheme in ("file", "store_file") for size in sizes),
        *(("store_memory", op, 256, "python loop") for op in ("get", "put")),
    }
    for row in data["rows"]:
        assert row["verified"] is True
        assert row["failed"] == 0
        assert row["gbytes_per_s"] > 0
        assert row["ceiling"]["gbytes_per_s"] > 0
        assert row["ratio"] > 0
        assert row["batch"] == (64 if row["size_bytes"] == 256 else 4)
    names = {f"io.{scheme}.{op}.{size}.ratio" for scheme in ("memory", "file", "store_file")
             for op in ("get", "put") for size in ("4KiB", "100000B")}  # fmt: skip
    assert set(data["figures"]) == names | {
        "io.store_memory.overhead_us_per_key", "io.store_memory.put_overhead_us_per_key"
    }  # fmt: skip
    assert data["figures"]["io.store_memory.overhead_us_per_key"]["bar"] == 15.0
    assert "store_file" in done.stdout
    assert (results / "io.html").read_text(encoding="utf-8").count("<svg") == 3


def test_a_folder_of_the_user_keeps_what_was_in_it(tmp_path: Path) -> None:
    root = tmp_path / "kv"
    root.mkdir()
    (root / "notes.txt").write_text("mine", encoding="utf-8")
    done = bench("io", f"file://{root}", *SMALL, "--lanes", "2", "--json", "-", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert {row["lanes"] for row in data["rows"]} == {2}
    assert {row["scheme"] for row in data["rows"]} == {"file"}
    assert data["machine"]["file_systems"][str(root)] != "unknown"
    assert (root / "notes.txt").read_text(encoding="utf-8") == "mine"
    big = [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size >= 4096]
    assert not big, "records were left behind"
    assert list(tmp_path.iterdir()) == [root]


def test_a_read_only_folder_is_one_sentence(tmp_path: Path) -> None:
    root = tmp_path / "kv"
    root.write_text("a file, not a folder", encoding="utf-8")
    done = bench("io", f"file://{root}", *SMALL, folder=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("kvstore-bench: ")
    assert done.stderr.count("\n") == 1
    assert str(root) in done.stderr
    assert list(tmp_path.iterdir()) == [root]


@pytest.mark.parametrize(
    ("number", "status", "said"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")]
)
def test_an_interrupted_process_leaves_nothing(tmp_path: Path, number: signal.Signals, status: int, said: str) -> None:
    """The process signals itself from inside a read, so that the moment does not depend on luck."""
    program = (
        "import os, sys, signal\n"
        "from kvstore_backends.memory import MemoryBackend\n"
        "from kvstore_bench.cli import main\n"
        "number, count, real = int(sys.argv[1]), [0], MemoryBackend.get_into\n"
        "def get_into(self, reads, *, deadline):\n"
        "    count[0] += 1\n"
        "    if count[0] == 5: os.kill(os.getpid(), number)\n"
        "    return real(self, reads, deadline=deadline)\n"
        "MemoryBackend.get_into = get_into\n"
        "sys.exit(main(['io', *sys.argv[2:]]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program, str(int(number)), *SMALL],
        capture_output=True, text=True, timeout=120, check=False, env={**os.environ, "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == status, done.stderr
    assert done.stderr == f"kvstore-bench: {said}; what it had put is deleted again\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("op", ["get", "put"])
def test_what_a_killed_run_left_is_removed_by_the_next(tmp_path: Path, op: str) -> None:
    """kill -9 from inside a pass, with records in the user's folder; then the same URL again."""
    program = (
        "import os, sys, signal\n"
        "from kvstore_backends.file import FileBackend\n"
        "from kvstore_bench.cli import main\n"
        "name = sys.argv[1]\n"
        "count, real = [0], getattr(FileBackend, name)\n"
        "def method(self, items, *, deadline):\n"
        "    count[0] += 1\n"
        "    done = real(self, items, deadline=deadline)\n"
        "    if count[0] == 5: os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return done\n"
        "setattr(FileBackend, name, method)\n"
        "sys.exit(main(['io', *sys.argv[2:]]))\n"
    )
    root, temporary = tmp_path / "kv", tmp_path / "tmp"
    root.mkdir()
    temporary.mkdir()
    url = f"file://{root}"
    method = {"get": "get_into", "put": "put"}[op]
    done = subprocess.run(
        [sys.executable, "-c", program, method, url, *SMALL, "--lanes", "1", "--ops", op],
        capture_output=True, text=True, timeout=120, check=False, env={**os.environ, "TMPDIR": str(temporary)},
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL
    assert len(list(root.rglob("*.kv"))) == 4
    (journal,) = temporary.iterdir()
    assert journal.stat().st_mode & 0o777 == 0o600
    assert url in journal.read_text(encoding="utf-8")

    other = tmp_path / "other"
    other.mkdir()
    done = bench("io", f"file://{other}", *SMALL, folder=temporary)
    assert done.returncode == 0, done.stderr
    assert f"note: a killed run has left records in {url}: measure that URL again" in done.stdout
    assert len(list(root.rglob("*.kv"))) == 4
    assert list(temporary.iterdir()) == [journal]

    done = bench("io", url, *SMALL, folder=temporary)
    assert done.returncode == 0, done.stderr
    assert f"note: removed 4 records that a killed run had left in {url}" in done.stdout
    assert not list(root.rglob("*.kv"))
    assert not list(temporary.iterdir())
    assert sorted(tmp_path.iterdir()) == [root, other, temporary]  # the raw ceiling's folder too
