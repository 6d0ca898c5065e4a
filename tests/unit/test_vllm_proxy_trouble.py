"""examples/disaggregation.py: what clients send that is no good, and engines that are slow, odd or gone."""

from __future__ import annotations

import gzip
import json
import socket
import threading
from typing import Any

import pytest

pytest.importorskip("httpx")
pytest.importorskip("uvicorn")
pytest.importorskip("fastapi")

from tests.unit.test_vllm_proxy import PATIENCE_S, PROMPT, WAITS, World, world

__all__ = ["world"]


def trouble_of(answer: Any) -> dict[str, Any]:
    """The error of an answer, in the shape in which OpenAI's clients read it."""
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "code"}
    assert error["code"] == answer.status_code
    assert error["message"]
    return error


def test_bodies_that_are_no_good_are_refused_as_openai_does(world: World) -> None:
    for body in (
        "", "{", "[1]", "null", '"text"', '{"prompt": "a", "temperature": NaN}', '{"prompt": "a", "top_p": Infinity}',
        '{"prompt": "a", "top_p": 1e999}', '{"prompt": "\\ud800"}', b'{"prompt": "\xff"}', "[" * 100_000,
        '{"prompt": ' + "[" * 100_000, '{"prompt": "' + "\\ud800" * 2000 + '"}', '{"n": ' + "9" * 5000 + "}",
    ):  # fmt: skip
        answer = world.client.post("/v1/completions", content=body)
        assert answer.status_code == 400, (body[:30], answer.text[:300])
        assert trouble_of(answer)["type"] == "invalid_request_error"
    assert not any(each.asked for each in (*world.prefillers, *world.decoders))
    assert world.ask().json() == {"text": "ok"}, "and it goes on"


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/v1/completions", 405), ("POST", "/v1/other", 404)])
def test_what_it_does_not_do_is_said_as_openai_does(world: World, method: str, path: str, status: int) -> None:
    answer = world.client.request(method, path)
    assert answer.status_code == status
    assert trouble_of(answer)["type"] == "invalid_request_error"


def test_prompts_of_any_size_and_kind_go_through_whole(world: World) -> None:
    for prompt in ("ü" * 2_000_000, [7] * 100_000, [[1, 2, 3] * 400, [4, 5]], [PROMPT, "b"]):
        assert world.ask(prompt=prompt).json() == {"text": "ok"}
        asked = [body["prompt"] for each in (*world.prefillers, *world.decoders) for body in each.bodies()]
        assert asked == [prompt, prompt]
        for each in (*world.prefillers, *world.decoders):
            each.asked.clear()


def test_several_answers_to_one_prompt_need_one_prefill(world: World) -> None:
    world.ask(n=4, best_of=5, logprobs=3, echo=True, stream=True, stream_options={"include_usage": True}, seed=1)
    (prefill,) = world.prefillers[0].bodies()
    assert prefill == {"model": "m", "prompt": PROMPT, "max_tokens": 1, "seed": 1, "stream": False,
                       "kv_transfer_params": {"do_remote_decode": True}}  # fmt: skip
    (decode,) = world.decoders[0].bodies()
    assert (decode["n"], decode["best_of"], decode["kv_transfer_params"]) == (4, 5, WAITS)


def test_an_answer_that_was_compressed_on_the_way_is_read_by_the_client(world: World) -> None:
    def decoder(handler: Any, body: dict[str, Any]) -> None:
        data = json.dumps({"text": "ok"}).encode()
        packed = "gzip" in handler.headers.get("accept-encoding", "")
        data = gzip.compress(data) if packed else data
        handler.send_response(200)
        handler.send_header("content-type", "application/json")
        if packed:
            handler.send_header("content-encoding", "gzip")
        handler.send_header("content-length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)

    for each in world.decoders:
        each.does = decoder
    assert world.ask().json() == {"text": "ok"}


def test_a_slow_prefiller_holds_up_no_answer(world: World) -> None:
    """The decoder has computed it itself after prefill_timeout; the prefiller is told to stop."""
    world.prefillers[0].does = lambda handler, body: handler.until_hung_up()
    assert world.ask().json() == {"text": "ok"}
    assert world.prefillers[0].hung_up.wait(PATIENCE_S)


@pytest.mark.parametrize("stream", [False, True])
def test_a_decoder_that_dies_before_its_first_byte_is_passed_over(world: World, stream: bool) -> None:
    gate = threading.Event()

    def dies(handler: Any, body: dict[str, Any]) -> None:
        if stream:
            handler.begin_stream()
        gate.set()
        handler.die()

    world.decoders[0].does = dies
    assert world.ask(stream=stream).json() == {"text": "ok"}
    assert gate.is_set()
    assert world.decoders[1].bodies()[0]["kv_transfer_params"] == WAITS


def test_a_decoder_that_dies_in_an_answer_that_is_no_stream_leaves_no_half_answer(world: World) -> None:
    def dies(handler: Any, body: dict[str, Any]) -> None:
        handler.send_response(200)
        handler.send_header("content-type", "application/json")
        handler.send_header("content-length", "1000")
        handler.end_headers()
        handler.wfile.write(b'{"text": "ha')
        handler.wfile.flush()
        handler.die()

    for each in world.decoders:
        each.does = dies
    answer = world.ask()
    assert answer.status_code == 502
    assert trouble_of(answer)["type"] == "server_error"


def test_all_decoders_that_die_are_a_502(world: World) -> None:
    for each in world.decoders:
        each.does = lambda handler, body: handler.die()
    answer = world.ask()
    assert answer.status_code == 502
    trouble_of(answer)


def test_clients_that_go_while_the_body_comes_leave_nothing_behind(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    for part in (b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n", b"content-length: 1000\r\n\r\n{"):
        with socket.create_connection(("127.0.0.1", int(world.url.rsplit(":", 1)[1]))) as client:
            client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n" + part)
    assert world.ask().json() == {"text": "ok"}
    assert sum(len(each.asked) for each in world.decoders) == 1
    assert not [record for record in caplog.records if record.exc_info]


def test_engines_that_answer_that_they_are_broken_come_last_for_a_while(world: World) -> None:
    def broken(handler: Any, body: dict[str, Any]) -> None:
        handler.reply({"error": "broken"}, 503)

    world.prefillers[0].does = world.decoders[0].does = broken
    for _ in range(4):
        assert world.ask().json() == {"text": "ok"}
    assert [len(each.asked) for each in (*world.prefillers, *world.decoders)] == [1, 4, 1, 4]
    assert all(body["kv_transfer_params"] == WAITS for body in world.decoders[1].bodies()), "the prefill did not fail"
    world.decoders[1].does = broken
    answer = world.ask()
    assert (answer.status_code, answer.json()) == (503, {"error": "broken"}), "the last one's word"
