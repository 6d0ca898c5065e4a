"""examples/demo.py without a model: what it refuses, how it ends, and what it deletes."""

from __future__ import annotations

import importlib.util
import os
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import kvstore
import kvstore.testing.models

ROOT = Path(__file__).parents[2]


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo_under_test", ROOT / "examples" / "demo.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(kvstore.testing.models, "smollm2_folder", lambda: Path("no-model"))
    return module


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--tokens", "100"], "has 100 tokens, and one shorter than a chunk (256 tokens) stores nothing"),
        (["--tokens", "-1"], "stores nothing"),
        (["--new-tokens", "0"], "--new-tokens must be at least 1"),
        (["--url", "nowhere"], "scheme://"),
        (["--url", "memory://"], "lies in one process"),
    ],
)
def test_nonsense_is_one_sentence(
    demo: ModuleType, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo.main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert err.count("\n") == 1


def test_ctrl_c_is_no_traceback(
    demo: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "child", interrupted)
    assert demo.main([]) == 130
    assert capsys.readouterr().err == "demo: interrupted\n"
    monkeypatch.setattr(demo, "process_a", interrupted)
    assert demo.main(["--role", "a"]) == 130
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("status", ["130", "-2"])
def test_an_interrupted_child_interrupts_the_demo(demo: ModuleType, status: str) -> None:
    program = f"import os, signal\nsignal.signal(2, signal.SIG_DFL)\nos.kill(os.getpid(), 2) if {status} < 0 else 0\n"
    with pytest.raises(KeyboardInterrupt):
        demo.wait_for([sys.executable, "-c", program + f"os._exit({status})"])
    assert demo.wait_for([sys.executable, "-c", "print('x')"], subprocess.PIPE) == (0, "x\n")


def doubles(folder: Path, trouble: BaseException | None) -> Any:
    """Process A stores a real record; process B looks at it or fails."""

    def child(role: str, args: Any) -> dict[str, Any]:
        from kvstore.keys import opaque_key

        key = opaque_key(args.salt)
        with kvstore.open_store(args.url) as store:
            if role == "a":
                store.put_many({key: b"x" * 1000})
            assert store.hit_prefix([key]) == 1
        if role == "b" and trouble is not None:
            raise trouble
        both = {"output": [1], "text": "t", "nbytes": 1000, "ttft": 1.0 if role == "a" else 0.5}
        of_a = {"prompt": 300, "hit_before": 0, "stored": 1, "chunks": 1, "keys": [key.hex()]}
        return both | (of_a if role == "a" else {"hit": 256, "load": 0.1, "near": 0.01})

    return child


@pytest.mark.parametrize(("trouble", "status"), [(None, 0), (KeyboardInterrupt(), 130)])
def test_a_store_of_the_user_is_left_as_it_was(
    demo: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    trouble: BaseException | None,
    status: int,
) -> None:
    url = f"file://{tmp_path}"
    with kvstore.open_store(url) as store:
        store.put_many({"mine": b"precious"})
    monkeypatch.setattr(demo, "child", doubles(tmp_path, trouble))
    assert demo.main(["--url", url, "--no-bench"]) == status
    out = capsys.readouterr().out
    assert f"store: {url}\n" in out
    assert ("raw file read" in out) is (trouble is None)
    assert len(list(tmp_path.rglob("*.kv"))) == 1
    with kvstore.open_store(url) as store:
        assert store.hit_prefix(["mine"]) == 1


@pytest.mark.parametrize(("url", "words"), [("", []), ("s3://b/kv?a=1&b=2", ["--url", "s3://b/kv?a=1&b=2"])])
def test_make_demo_passes_the_url(url: str, words: list[str]) -> None:
    command = ["make", "--no-print-directory", "-n", "demo", *([f"URL={url}"] if url else [])]
    outer = {"MAKEFLAGS", "MAKELEVEL", "MFLAGS"}  # `make test` runs this; what it was told is not for the inner make
    env = {name: value for name, value in os.environ.items() if name not in outer}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    last = done.stdout.splitlines()[-1]
    assert shlex.split(last)[1:] == ["examples/demo.py", *words]
