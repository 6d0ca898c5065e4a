"""Log lines and trouble with whoever reads them: a store goes on, what is lost is counted, no line is forged."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvstore
from kvstore.errors import TransientError
from kvstore.telemetry import configure_logs, request_scope
from kvstore.telemetry.lines import LineHandler
from kvstore.telemetry.logs import EVENTS, log_event
from tests.faults.store_support import until


@contextlib.contextmanager
def events_to(stream: IO[str], form: str = "json") -> Iterator[logging.Handler]:
    handler = configure_logs(form, stream=stream, logger=EVENTS.name)
    try:
        yield handler
    finally:
        EVENTS.removeHandler(handler)
        EVENTS.setLevel(logging.NOTSET)
        EVENTS.propagate = True


@pytest.fixture
def pipe() -> Iterator[tuple[int, IO[str]]]:
    """The end to read, and a stream that writes."""
    read, write = os.pipe()
    with os.fdopen(write, "w") as stream:
        yield read, stream
    os.close(read)


def read_all(fd: int, until: threading.Event) -> bytes:
    """What comes until `until` is set and nothing more is there."""
    found = b""
    while True:
        ended = until.is_set()
        if select.select([fd], [], [], 0.05)[0]:
            found += os.read(fd, 1 << 16)
        elif ended:
            return found


def test_nobody_who_reads_holds_nobody_up(pipe: tuple[int, IO[str]]) -> None:
    read, stream = pipe
    with events_to(stream) as handler, kvstore.open_store("memory://?bytes=4MiB") as store:
        with request_scope("r" * 200):
            for number in range(600):  # more than a pipe takes; a lane that waited would never come back
                assert store.put_many({f"k{number}": b"x"})[0].ok
        for _ in range(4000):  # more than may wait
            log_event("marker", {"text": "y" * 400})
        ended = threading.Event()
        found: list[bytes] = []
        reader = threading.Thread(target=lambda: found.append(read_all(read, ended)))
        reader.start()
        handler.flush()
        log_event("last", {})
        handler.flush()
        ended.set()
        reader.join(20)
    lines = [json.loads(line) for line in found[0].decode().splitlines()]
    messages = [line["message"] for line in lines]
    assert messages.count("kv_cache_store") == 600, "they came first, and waited"
    kept = messages.count("marker")
    assert 0 < kept < 4000
    assert messages[-1] == "last"
    assert messages[-2].startswith(f"{4000 - kept} lines of this log were lost"), "honestly counted"


def test_a_slow_reader_gets_everything_in_order(pipe: tuple[int, IO[str]]) -> None:
    """A line longer than what a pipe takes at once, too."""
    read, stream = pipe
    ended = threading.Event()
    with events_to(stream) as handler:
        for number in range(300):
            log_event(str(number), {"text": "z" * (20_000 if number == 150 else 300)})
        found: list[bytes] = []
        reader = threading.Thread(target=lambda: found.append(read_all(read, ended)))
        reader.start()
        end = time.monotonic() + 20
        while handler._waiting and time.monotonic() < end:  # type: ignore[attr-defined]
            time.sleep(0.005)  # nobody logs, nobody flushes: it catches up by itself
        ended.set()
        reader.join(20)
    assert [json.loads(line)["message"] for line in found[0].decode().splitlines()] == [*map(str, range(300))]


class Disk:
    """A file that is full for a while."""

    def __init__(self, path: Path) -> None:
        self.full = open("/dev/full", "w")  # noqa: SIM115
        self.file = path.open("w")
        self.is_full = True

    def close(self) -> None:
        self.full.close()
        self.file.close()

    def fileno(self) -> int:
        return (self.full if self.is_full else self.file).fileno()


def test_a_full_disk(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    disk: Any = Disk(tmp_path / "log")
    with events_to(disk) as handler, kvstore.open_store("memory://?bytes=4MiB") as store:
        assert isinstance(handler, LineHandler)
        for number in range(5):
            assert store.put_many({f"k{number}": b"x"})[0].ok
        assert store.get_many(["k1"], into=[bytearray(1)]) == [1]
        until(lambda: handler._lost == 6)  # whoever resolved a batch writes its line, maybe after the caller went on
        disk.is_full = False
        log_event("again", {})
    disk.close()
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [line["message"][:26] for line in lines] == ["6 lines of this log were l", "again"]
    assert lines[0]["level"] == "WARNING"
    assert capfd.readouterr().err == "", "not a word anywhere else"


def test_a_stream_in_memory_that_fails() -> None:
    class Broken(io.StringIO):
        broken = True

        def write(self, text: str) -> int:
            if self.broken:
                raise OSError("no")
            return super().write(text)

    stream = Broken()
    with events_to(stream):
        log_event("one", {})
        stream.broken = False
        log_event("two", {})
    assert [json.loads(line)["message"][:7] for line in stream.getvalue().splitlines()] == ["1 lines", "two"]


def test_a_process_ends_although_nobody_reads() -> None:
    program = (
        "import kvstore, logging\n"
        "with kvstore.open_store('memory://?bytes=4MiB', event_log='stderr') as store:\n"
        "    for number in range(1000): store.put_many({f'k{number}': b'x'})\n"
        "print('done', flush=True)\n"
    )
    read, write = os.pipe()
    try:
        done = subprocess.run(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=write, text=True, timeout=60, check=True
        )
    finally:
        os.close(read)
        os.close(write)
    assert done.stdout == "done\n"


def test_a_fork_writes_its_own_lines_only(pipe: tuple[int, IO[str]]) -> None:
    read, stream = pipe
    os.set_blocking(read, False)
    with events_to(stream) as handler:
        for number in range(400):
            log_event(f"parent {number}", {"text": "z" * 300})
        assert handler._waiting  # type: ignore[attr-defined]
        pid = os.fork()
        if pid == 0:
            with contextlib.suppress(BaseException):
                log_event("child", {})
                handler.flush()
            os._exit(0)
        text, ended = b"", False
        end = time.monotonic() + 20
        while not (ended and b'"parent 399"' in text) and time.monotonic() < end:
            with contextlib.suppress(BlockingIOError):
                text += os.read(read, 1 << 16)
            ended = ended or os.waitpid(pid, os.WNOHANG)[0] == pid
    messages = [json.loads(line)["message"] for line in text.decode().splitlines()]
    assert messages.count("child") == 1
    messages.remove("child")
    assert messages == [f"parent {number}" for number in range(400)], "what waited was written once"


# Forged lines.


@given(st.text(), st.text())
def test_nothing_that_is_quoted_begins_a_line_or_reaches_a_terminal(one: str, other: str) -> None:
    for form in ("json", "text"):
        out = io.StringIO()
        with events_to(out, form), request_scope(one, model=other):
            log_event("marker", {"text": f"{other}\r\n\x1b[2J"})
        text = out.getvalue()
        assert text.endswith("\n")
        assert len(text.splitlines()) == 1
        assert not any(ord(char) < 32 or 127 <= ord(char) < 160 for char in text[:-1])


def test_a_field_cannot_pretend_to_be_another() -> None:
    out = io.StringIO()
    with events_to(out, "text"), request_scope("r-1 level=CRITICAL", model='a"b'):
        log_event("marker", {"empty": "", "count": 3})
    assert out.getvalue() == (
        'INFO kvstore.events: marker empty="" count=3 model_name="a\\"b" request_id="r-1 level=CRITICAL"\n'
    )


def test_a_traceback_for_people_is_indented() -> None:
    out = io.StringIO()
    with events_to(out, "text"):
        try:
            raise TransientError("gone\nCRITICAL kvstore: all is lost")
        except TransientError:
            EVENTS.exception("failed\x1b[31m")
    first, *others = out.getvalue().splitlines()
    assert first == "ERROR kvstore.events: failed\\x1b[31m"
    assert others
    assert all(line.startswith("  ") for line in others)


def test_the_daemons_log_does_not_wait_either() -> None:
    handler = configure_logs(stream=io.StringIO(), logger="kvstore.test_lines")
    assert isinstance(handler, LineHandler)
    logging.getLogger("kvstore.test_lines").removeHandler(handler)
