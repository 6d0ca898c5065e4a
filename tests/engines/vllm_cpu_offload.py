"""Only for tests: vLLM's offloading to host memory on a CPU, whose stock worker wants a GPU. The worker copies between
the engine's pages (in host memory here) and the region of the primary tier; scheduler, manager and tiers are vLLM's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class CopyingWorker(OffloadingWorker):  # type: ignore[misc]
    """One KV cache group, one block for each chunk."""

    def __init__(self, caches: Any, region: Any) -> None:
        self._pages = [each.tensor for each in caches.tensors]
        self._region = region
        self._chunks = [region.create_next_worker_view(each.page_size_bytes) for each in caches.tensors]
        self._done: list[Any] = []

    def _copy(self, job: int, source: Sequence[Any], sources: Any, target: Sequence[Any], targets: Any) -> bool:
        for a, b in zip(source, target, strict=True):
            for i, j in zip(sources.block_ids, targets.block_ids, strict=True):
                b[j].copy_(a[i])
        self._done.append(TransferResult(job_id=job, success=True))
        return True

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, self._pages, src_spec, self._chunks, dst_spec)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, self._chunks, src_spec, self._pages, dst_spec)

    def get_finished(self) -> list[Any]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: Any) -> None:
        return None

    def shutdown(self) -> None:
        self._region.cleanup()


class CpuTieringSpec(TieringOffloadingSpec):  # type: ignore[misc]
    """vLLM's tiering, with that worker."""

    def get_worker(self, kv_caches: Any) -> Any:
        if not self._worker:
            assert self.blocks_per_chunk == 1
            assert len(kv_caches.group_data_refs) == 1
            region = SharedOffloadRegion(
                engine_id=self._engine_id, num_chunks=self.num_chunks, rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk, cpu_page_size=self.cpu_page_size_per_worker,
            )  # fmt: skip
            self._worker = CopyingWorker(kv_caches, region)
        return self._worker
