"""Two real vLLM 0.32 engines, one that computes prompts and one that goes on with them, over a node they share."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvstore.testing.models import smollm2_folder
from tests.node_support import wait_until

from .support import environment, interpreter
from .test_vllm import _NOTHING, Server
from .vllm_roles import Role, served

pytestmark = pytest.mark.engines

_WAIT = {"do_remote_prefill": True}
_CHUNK = 128


@pytest.fixture(scope="module")
def python() -> Path:
    return interpreter("vllm")


@contextlib.contextmanager
def engines(python: Path, folder: Path, url: str, **more: Any) -> Iterator[tuple[Role, Role]]:
    """A prefiller and a decoder that share the store at a URL."""
    given = {"model": str(smollm2_folder()), "url": url, "batched": _CHUNK, "longest": 1024, "blocks": 24}
    extra = {"chunk_size": _CHUNK, "save_unfull_chunk": True, **more}
    with (
        Role(python, folder / "prefill.log", {**given, "role": "kv_producer", "extra": extra}) as prefiller,
        Role(python, folder / "decode.log", {**given, "role": "kv_consumer", "extra": extra}) as decoder,
    ):
        for role in (prefiller, decoder):
            role.until("ready")
        yield prefiller, decoder


def prompt_of(topic: str, facts: int = 40) -> str:
    told = " ".join(f"Fact {n}: {topic} {n} costs {n * 3} coins." for n in range(facts))
    return f"{told} Question: how much does {topic} 7 cost? Answer:"


@pytest.mark.model
@pytest.mark.parametrize("transport", ["tcp", pytest.param("shm", marks=pytest.mark.slow)])
def test_a_prompt_is_loaded_while_it_is_computed_elsewhere(python: Path, tmp_path: Path, transport: str) -> None:
    with (
        served(tmp_path) as urls,
        engines(python, tmp_path, urls[transport], prefill_timeout="4min") as (p, d),
    ):
        prompt, other = prompt_of("item"), prompt_of("apple")
        cold, cold_other = (d.answer(f"cold {n}", text, salt="cold") for n, text in enumerate((prompt, other)))
        length = cold["length"]
        assert length > 4 * _CHUNK
        assert cold["cached"] == 0

        # The prefill is held in the middle, and goes on only after the decoder has loaded what there is: loading began
        # before prefill ended, by the order of events.
        d.ask("running", prompt_of("pear", 5), 200)
        d.until("token", name="running")
        p.order("hold", chunks=3)
        p.ask("x", prompt, 1, params={"do_remote_decode": True})
        p.until("held")
        d.ask("x", prompt, params=_WAIT)
        d.until("arrived", chunks=3)
        before = next(each["count"] for each in reversed(d.heard) if each["event"] == "token")
        d.until("token", name="running", count=before + 3)  # the scheduler waits for nobody
        assert not any(each["event"] == "done" and each["name"] == "x" for each in d.heard)
        p.order("go")
        told = p.until("told", name="x")["params"]
        assert (told["do_remote_prefill"], told["tokens"]) == (True, length), "what vLLM's own proxies hand on"
        warm = d.until("done", name="x")
        assert (warm["text"], warm["tokens"]) == (cold["text"], cold["tokens"])
        assert warm["cached"] == length - 1

        # After the fact, as vLLM's own proxies do it: what the prefiller told goes to the decoder.
        d.until("done", name="running")
        d.order("reset")
        before = d.counters()["load_tokens"]
        late = d.answer("late", prompt, params=told)
        assert late["text"] == cold["text"]
        assert d.counters()["load_tokens"] - before == length - 1
        assert late["cached"] == 0, "vLLM then reports what the prefiller had cached"

        # The prefiller dies in the middle.
        p.order("hold", chunks=2)
        p.ask("y", other, 1, params={"do_remote_decode": True})
        p.until("held")
        so_far = d.counters()["arrived_chunks"]
        d.order("patience", seconds=1.0)
        d.ask("y", other, params=_WAIT)
        d.until("arrived", chunks=so_far + 2)
        p.kill()
        left = d.until("done", name="y")
        assert (left["text"], left["tokens"]) == (cold_other["text"], cold_other["tokens"])

        # Nobody ever computes it; and nobody wants it any more.
        d.order("reset")
        alone = d.answer("alone", other[5:], params={**_WAIT, "tokens": 10**9})
        assert alone["text"] == d.answer("alone cold", other[5:], salt="cold")["text"]
        d.ask("unwanted", prompt_of("plum"), params=_WAIT)
        d.order("abort", name="unwanted")
        d.until("aborted")
        d.order("state")
        state = d.until("state")
        assert state["leaked"] == _NOTHING
        counters = state["counters"]
        assert counters["prefills_lost"] == 2, "killed, and never there"
        assert counters["awaited"] == 5
        assert counters["save_chunks"] == 0, "a consumer saves nothing"


@contextlib.contextmanager
def proxied(python: Path, prefill: str, decode: str) -> Iterator[str]:
    """examples/disaggregation.py in front of two servers; its URL."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    script = Path(__file__).parents[2] / "examples" / "disaggregation.py"
    command = [str(python), str(script), "--prefill", prefill, "--decode", decode, "--port", str(port)]
    process = subprocess.Popen(command, env=environment())
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health"):
                break
            assert process.poll() is None
            time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait(60)


def streamed(url: str, prompt: str, tokens: int) -> str:
    """The text of a streamed answer, which must end as streams do."""
    body = {"model": "m", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        lines = [line.decode().removeprefix("data: ").strip() for line in answer if line.startswith(b"data: ")]
    assert lines[-1] == "[DONE]"
    return "".join(choice["text"] for line in lines[:-1] for choice in json.loads(line)["choices"])


@pytest.mark.model
@pytest.mark.slow
def test_through_the_proxy_with_two_api_servers(python: Path, tmp_path: Path) -> None:
    model, tokens = str(smollm2_folder()), 12
    with served(tmp_path) as urls, contextlib.ExitStack() as stack:
        options = {"remote_url": urls["tcp"], "chunk_size": 128, "save_unfull_chunk": True, "prefill_timeout": "4min"}
        prefiller, decoder = (
            Server(python, tmp_path, model, role=role, wait=False, **options) for role in ("kv_producer", "kv_consumer")
        )
        for each in (prefiller, decoder):
            stack.callback(each.stop)
        for each in (prefiller, decoder):
            each.started()
        ends = [f"http://127.0.0.1:{each.port}" for each in (prefiller, decoder)]
        url = stack.enter_context(proxied(python, *ends))
        prompts = [prompt_of(topic) for topic in ("item", "apple", "pear")]
        cold = [decoder.ask(prompt, cache_salt="cold")[0] for prompt in prompts]

        assert streamed(url, prompts[0], tokens) == cold[0]
        chunks = 5  # of its 594 tokens
        wait_until(lambda: decoder.metric("vllm:kvstore_arrived_chunks_total") == chunks, "all chunks came")
        assert decoder.metric("vllm:kvstore_prefills_lost_total") == 0

        # It computes nothing any more, the decoder waits, and then it is gone: the proxy asks anew, at once.
        prefiller.signal(signal.SIGSTOP)
        with ThreadPoolExecutor(1) as one:
            answer = one.submit(streamed, url, prompts[1], tokens)
            wait_until(lambda: decoder.metric("vllm:kvstore_awaited_total") == 2, "it waits", seconds=120)
            prefiller.signal(signal.SIGKILL)
            prefiller.process.wait()
            assert answer.result(180) == cold[1], "long before prefill_timeout"
        assert streamed(url, prompts[2], tokens) == cold[2], "nobody answers there"
        assert decoder.metric("vllm:kvstore_arrived_chunks_total") == chunks
        assert decoder.metric("vllm:num_requests_running") == 0, "what was asked first was taken back"
