"""`KVStoreTier`: a store as a tier behind vLLM's own offloading to host memory.

    "kv_connector": "OffloadingConnector", "kv_connector_extra_config": {"spec_name": "TieringOffloadingSpec",
        "cpu_bytes_to_use": …, "secondary_tiers": [{"type": "KVStoreTier",
            "module_path": "kvstore.integrations.vllm", "remote_url": "s3://bucket/prefix"}]}

Whole chunks of vLLM's are moved as opaque bytes, so every layout is served (also the packed ones that
`KVStoreConnector` refuses), but their records are of use only to engines of the same layout and sharding: their names
have all of that. Every method runs in the scheduler's process; none blocks but `drain_jobs` and `shutdown`.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, ClassVar

import numpy as np
from vllm.v1.kv_offload.base import LookupResult, Medium, RequestOffloadingContext
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from kvstore.backend import Outcome
from kvstore.completion import Completion
from kvstore.errors import KVStoreError
from kvstore.integrations._opaque import Settler, outcomes_of
from kvstore.integrations._weights import folder_fingerprint, model_name
from kvstore.keys import Key, opaque_key
from kvstore.record import opaque_spec
from kvstore.targets import Item, Want

from ._settings import Settings, SharedStore

__all__ = ["KVStoreTier"]

logger = logging.getLogger("kvstore.integrations.vllm")


class KVStoreTier(SecondaryTierManager):  # type: ignore[misc]
    """A store as vLLM's secondary tier.

    Args:
        offloading_spec, primary_kv_view, tier_type, backpressure_detector: as vLLM gives them.
        identity: model, weights and layout in the names of records; None: what vLLM's configuration says, and the
            weights of a local folder. Engines share records only if it is equal. vLLM does not tell a tier the revision
            of a model that it got from a hub: give it here if it may change.
        options: `remote_url`, `config_file` and any option of `kvstore.config`.

    Raises:
        ConfigError: as `kvstore.open_store`.
    """

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        identity: str | None = None,
        locality: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self._view = np.asarray(primary_kv_view).view(np.uint8).reshape(len(primary_kv_view), -1)
        # What is written lies in vLLM's memory, which bounds it; nothing is copied into our queue.
        settings = Settings.of({"write_queue_bytes": 1 << 40, "buffer_pool_bytes": 64 << 20, **options})
        self._shared = SharedStore.of(settings)
        self._store = self._shared.store
        self._spec = opaque_spec(self._view.shape[1])
        self._identity = identity or _identity_of(offloading_spec.config, self._view.shape[1])
        self._lock = threading.Condition()
        self._settler = Settler(logger)
        self._jobs = 0
        self._finished: list[JobResult] = []
        self._answers: dict[bytes, _Answer] = {}  # touched by the scheduler's thread; set to "not found" by others
        self._asked: dict[str, set[bytes]] = {}  # by which request
        self._asking: list[bytes] = []  # with this step's end

    def _key(self, key: bytes) -> Key:
        name = b"vllm tier\0" + self._identity.encode() + b"\0" + bytes(key)
        return opaque_key(name, namespace=self._store.config.namespace)

    def lookup(self, key: Any, req_context: Any) -> LookupResult:
        """See SecondaryTierManager. RETRY until the store has answered; what a step asks for is one question to it."""
        raw = bytes(key)
        answer = self._answers.get(raw)
        if answer is None:
            answer = self._answers[raw] = _Answer()
            self._asking.append(raw)
        if raw not in (asked := self._asked.setdefault(req_context.req_id, set())):
            asked.add(raw)
            answer.users += 1
        if answer.found is None and answer.batch is not None and answer.batch.done():
            answer.found = outcomes_of(answer.batch, answer.index + 1)[answer.index].stored
            answer.batch = None
        if answer.found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if answer.found else LookupResult.MISS

    def on_schedule_end(self, context: Any) -> None:
        """See SecondaryTierManager. Sends the step's lookups."""
        asking, self._asking = [raw for raw in self._asking if raw in self._answers], []
        if not asking:
            return
        batch: Completion[Sequence[Outcome]]
        try:
            batch = self._store.submit_stat([self._key(raw) for raw in asking])
        except KVStoreError as error:
            logger.warning("the store cannot be asked: %s", error)
            batch = Completion.of([Outcome.failed(error)] * len(asking))
        for index, raw in enumerate(asking):
            self._answers[raw].batch, self._answers[raw].index = batch, index

    def on_request_finished(self, req_context: Any) -> None:
        """See SecondaryTierManager. Answers that no other request has asked for are forgotten."""
        for raw in self._asked.pop(req_context.req_id, ()):
            answer = self._answers.get(raw)
            if answer is not None:
                answer.users -= 1
                if not answer.users:
                    del self._answers[raw]

    def submit_store(self, job_metadata: Any) -> None:
        """See SecondaryTierManager. What is there already is not sent again."""
        keys = list(job_metadata.keys)
        items = [
            Item(self._key(key), self._spec.split(self._chunk(chunk)), self._spec)
            for key, chunk in zip(keys, job_metadata.chunk_ids, strict=True)
        ]

        def done(outcomes: Sequence[Outcome]) -> JobResult:
            return self._result(job_metadata, keys, [outcome.stored for outcome in outcomes], whole=True)

        self._start(job_metadata, lambda: self._store.submit_put(items), done)

    def submit_load(self, job_metadata: Any) -> None:
        """See SecondaryTierManager."""
        keys = list(job_metadata.keys)
        wants = [
            Want(self._key(key), self._chunk(chunk), self._spec)
            for key, chunk in zip(keys, job_metadata.chunk_ids, strict=True)
        ]

        def done(outcomes: Sequence[Outcome]) -> JobResult:
            for key, outcome in zip(keys, outcomes, strict=True):
                if not outcome.stored and (answer := self._answers.get(bytes(key))) is not None:
                    answer.found = False  # do not try again for requests that know of it
            return self._result(job_metadata, keys, [outcome.stored for outcome in outcomes], whole=False)

        self._start(job_metadata, lambda: self._store.submit_get(wants), done)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """See SecondaryTierManager."""
        with self._lock:
            finished, self._finished = self._finished, []
        return finished

    def has_pending_work(self) -> bool:
        """See SecondaryTierManager."""
        with self._lock:
            return bool(self._jobs or self._finished)

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        """See SecondaryTierManager."""
        return RequestOffloadingContext()

    def drain_jobs(self) -> None:
        """See SecondaryTierManager. Waits until no job is under way."""
        with self._lock:
            while self._jobs:
                self._lock.wait()

    def shutdown(self) -> None:
        """See SecondaryTierManager. Finishes what is being written, within the store's `close_timeout`."""
        self._shared.close()

    def _chunk(self, number: Any) -> memoryview:
        return memoryview(self._view[int(number)])

    def _start(
        self,
        job: Any,
        submit: Callable[[], Completion[Sequence[Outcome]]],
        done: Callable[[Sequence[Outcome]], JobResult],
    ) -> None:
        with self._lock:
            self._jobs += 1
        count = len(job.chunk_ids)
        try:
            completion = submit()
        except KVStoreError as error:
            self._end(done([Outcome.failed(error)] * count))
            return
        # The memory is vLLM's again only once late I/O cannot touch it any more.
        self._settler.when_settled(completion, lambda: self._end(done(outcomes_of(completion, count))))

    def _end(self, result: JobResult) -> None:
        with self._lock:
            self._finished.append(result)
            self._jobs -= 1
            self._lock.notify_all()

    def _result(self, job: Any, keys: Sequence[Any], good: Sequence[bool], *, whole: bool) -> JobResult:
        fine: Collection[Any] | None = None
        if not all(good) and not whole:
            fine = [key for key, each in zip(keys, good, strict=True) if each]
        return JobResult(
            job_id=job.job_id, success=all(good), successful_keys=fine,
            transfer_time=time.monotonic() - job.submit_time, transfer_bytes=sum(good) * self._view.shape[1],
        )  # fmt: skip


class _Answer:
    """What is known of one key.

    Attributes:
        batch, index: the question under way.
        found: the answer; None: not known yet.
        users: requests that asked.
    """

    __slots__ = ("batch", "found", "index", "users")

    def __init__(self) -> None:
        self.batch: Completion[Sequence[Outcome]] | None = None
        self.index = 0
        self.found: bool | None = None
        self.users = 0


def _identity_of(config: Any, chunk_bytes: int) -> str:
    """What of an engine makes its chunks what they are: not which engine it is, nor where its model lies."""
    parallel = config.parallel
    weights = folder_fingerprint(config.model.name) if os.path.exists(config.model.name) else None
    return json.dumps(
        [
            model_name(config.model.name), weights, config.model.dtype, config.cache.tokens_per_hash,
            config.cache.blocks_per_chunk, parallel.tp_size, parallel.pp_size, parallel.pcp_size, parallel.dcp_size,
            config.kv_cache_layout, [[group.tokens_per_block, group.layer_names] for group in config.groups],
            chunk_bytes,
        ]
    )  # fmt: skip
