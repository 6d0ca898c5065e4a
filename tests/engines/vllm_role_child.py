"""Runs in vLLM's environment: the engine that computes prompts for another one, or the one that waits for them.
`vllm_role_child.py JSON` reads orders and prints what happens, each one JSON line, in the order in which it happens.

| order | |
|---|---|
| `{"do": "ask", "name", "prompt", "tokens", "salt", "params"}` | serve a request; any number run side by side |
| `{"do": "hold", "chunks"}` | stop once so many more chunks of prompts are stored, until `{"do": "go"}` |
| `{"do": "patience", "seconds"}` | the `prefill_timeout` of what is asked from now on |
| `{"do": "abort", "name"}`, `{"do": "reset"}`, `{"do": "state"}`, `{"do": "end"}` | |
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
import time
from typing import Any

from vllm_child import Engine, SamplingParams


class Role:
    """An engine that does what lines on stdin say, step by step."""

    def __init__(self, given: dict[str, Any]) -> None:
        self.orders: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()
        self.engine = Engine(given)
        self.llm = self.engine.llm.llm_engine
        self.until: float | None = None  # stop once so many chunks are stored
        self.arrived = 0.0
        worker = self.engine.worker
        finish = worker.finish

        def finished() -> None:
            finish()
            if self.until is not None:
                self.engine.drain()
                if worker.counters["save_chunks"] >= self.until:
                    self.until = None
                    self.say("held")
                    while self.orders.get()["do"] != "go":
                        pass

        worker.finish = finished
        self.say("ready")

    def _read(self) -> None:
        for line in sys.stdin:
            self.orders.put(json.loads(line))
        self.orders.put({"do": "end"})  # whoever gave them is gone

    def say(self, event: str, **more: Any) -> None:
        said = {"event": event, "at": time.monotonic(), "cpu": time.process_time(), **more}
        print(json.dumps(said), flush=True)

    def run(self) -> None:
        """Until it is told to end."""
        while True:
            busy = self.llm.has_unfinished_requests()
            try:
                order = self.orders.get(block=not busy)
            except queue.Empty:
                self.step()
                continue
            if order["do"] == "end":
                return
            getattr(self, order["do"])(order)

    def step(self) -> None:
        outputs = self.llm.step()
        if (arrived := self.engine.worker.counters["arrived_chunks"]) != self.arrived:
            self.say("arrived", chunks=arrived, before=self.arrived)
            self.arrived = arrived
        if not outputs:
            time.sleep(0.001)  # as vLLM's own loop does
        for out in outputs:
            answer = out.outputs[0]
            if not out.finished:
                self.say("token", name=out.request_id, count=len(answer.token_ids))
                continue
            if out.kv_transfer_params is not None:
                self.say("told", name=out.request_id, params=out.kv_transfer_params)
            self.say("done", name=out.request_id, tokens=list(answer.token_ids), text=answer.text,
                     cached=out.num_cached_tokens or 0, length=len(out.prompt_token_ids))  # fmt: skip

    def ask(self, order: dict[str, Any]) -> None:
        prompt = order["prompt"]
        given = {"prompt": prompt} if isinstance(prompt, str) else {"prompt_token_ids": prompt}
        if order.get("salt"):
            given["cache_salt"] = order["salt"]
        extra = {"kv_transfer_params": order["params"]} if order.get("params") else None
        params = SamplingParams(temperature=0, max_tokens=order["tokens"], ignore_eos=True, extra_args=extra)
        self.llm.add_request(order["name"], given, params)
        self.say("asked", name=order["name"])

    def hold(self, order: dict[str, Any]) -> None:
        self.until = self.engine.worker.counters["save_chunks"] + order["chunks"]

    def abort(self, order: dict[str, Any]) -> None:
        end = time.monotonic() + 60
        name, side, scheduler = order["name"], self.engine.side, self.engine.scheduler

        def ours(names: Any) -> list[str]:  # vLLM puts something behind a name
            return [each for each in names if each.startswith(name)]

        while not ours(side._loading) and not ours(each.request_id for each in scheduler.running):  # it has begun
            self.step()
            assert time.monotonic() < end
        self.llm.abort_request([name])
        while ours(scheduler.requests):  # its blocks are held until its load has ended
            self.step()
            assert time.monotonic() < end, "the blocks of an aborted request are never freed"
        self.say("aborted", name=name)

    def patience(self, order: dict[str, Any]) -> None:
        self.engine.worker._prefill_timeout = order["seconds"]

    def reset(self, _: dict[str, Any]) -> None:
        self.engine.drain()
        assert self.engine.llm.reset_prefix_cache()
        self.say("reset")

    def state(self, _: dict[str, Any]) -> None:
        worker, side = self.engine.worker, self.engine.side
        self.say("state", leaked=self.engine.leaked(), counters={**worker.counters, **side.counters})


def main() -> None:
    given = json.loads(sys.argv[1])
    signal.alarm(int(given.get("alarm", 600)))
    if (cores := given.get("cores")) is not None:
        os.sched_setaffinity(0, cores)
    Role(given).run()


if __name__ == "__main__":
    main()
