"""Pages of SGLang's host pool in a store. SGLang itself is not needed here: tests/engines runs its real factory, host
pools and engine."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvstore.backend import Outcome, Read, Write
from kvstore.config import load_config
from kvstore.errors import ConfigError, PermanentError, TransientError
from kvstore.integrations._opaque import Client, open_client
from kvstore.integrations.sglang._identity import dtype_of, identity_of
from kvstore.integrations.sglang._page_store import PREFIX, PageStore, logger
from kvstore.integrations.sglang._pages import LAYOUTS, Pages
from kvstore.integrations.sglang._settings import Settings
from kvstore.keys import opaque_key
from kvstore.store import Store
from kvstore.testing import DictBackend

LAYERS, HEADS, DIM, PAGE, TOKENS = 3, 2, 8, 4, 64


class Pool:
    """A host pool that lies and answers as SGLang's of 0.5.23 do (`pool_host/mha.py`, `mla.py`); MLA has one half."""

    def __init__(self, layout: str, *, mla: bool = False, dim: int = DIM, page: int = PAGE) -> None:
        self.layout, self.page_size, self.layer_num, self.head_num, self.head_dim = layout, page, LAYERS, HEADS, dim
        self.start_layer, self.end_layer, self.halves = 0, LAYERS, 1 if mla else 2
        pages, self.size = TOKENS // PAGE, TOKENS // PAGE * page
        dims = {
            "layer_first": (LAYERS, self.size, HEADS, dim),
            "page_first": (self.size, LAYERS, HEADS, dim),
            "page_first_direct": (pages, LAYERS, page, HEADS, dim),
            "page_head": (pages, HEADS, page, LAYERS, dim),
        }.get(layout, (self.size,))
        self.kv_buffer = torch.zeros((self.halves, *dims), dtype=torch.bfloat16)

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        token = HEADS * self.head_dim * 2
        half = self.layer_num * self.size * token
        pointers = []
        for index in indices.tolist()[:: self.page_size]:
            if self.layout == "layer_first":
                firsts = [(layer * self.size + index) * token for layer in range(self.layer_num)]
            else:
                firsts = [index * self.layer_num * token]
            pointers += [self.kv_buffer.data_ptr() + at + n * half for at in firsts for n in range(self.halves)]
        size = self.page_size * token * (1 if self.layout == "layer_first" else self.layer_num)
        return pointers, [size] * len(pointers)

    def get_size_per_token(self) -> int:
        return self.kv_buffer.numel() // self.size * 2

    def get_data_page(self, index: int) -> torch.Tensor:
        if self.layout == "layer_first":
            page = self.kv_buffer[:, :, index : index + self.page_size]
        elif self.layout == "page_first":
            page = self.kv_buffer[:, index : index + self.page_size]
        else:
            page = self.kv_buffer[:, index // self.page_size]
        return page.flatten().clone()

    def fill(self, seed: int = 0) -> None:
        values = torch.randn(self.kv_buffer.shape, generator=torch.Generator().manual_seed(seed))
        self.kv_buffer.copy_(values.to(torch.bfloat16))


def places(pool: Pool, *pages: int) -> torch.Tensor:
    """Places of the tokens of some of the pool's pages."""
    size = pool.page_size
    return torch.cat([torch.arange(page * size, (page + 1) * size) for page in pages])


def opened(pool: Pool, backend: Any = None, *, identity: str = "me", writer: bool = True, **options: Any) -> PageStore:
    backends = None if backend is None else [backend]
    store = Store(load_config("memory://", env={}, **options), backends=backends)
    pages = PageStore(Client(store, PREFIX, logger), writer=writer, measured=True)
    pages.use(Pages(pool), identity)
    return pages


@pytest.mark.parametrize("mla", [False, True], ids=["mha", "mla"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_come_back_where_they_are_wanted(layout: str, mla: bool) -> None:
    pool = Pool(layout, mla=mla)
    pages = opened(pool)
    pool.fill()
    before = pool.kv_buffer.clone()
    flats = [pool.get_data_page(page * PAGE) for page in (5, 2, 7)]
    assert pages.save(["a", "b", "c"], places(pool, 5, 2, 7)) == [True] * 3
    assert torch.equal(pool.kv_buffer, before)
    assert pages.prefix(["a", "b", "c", "d"]) == 3
    pool.kv_buffer.zero_()
    assert pages.load(["c", "a", "b"], places(pool, 0, 9, 2)) == [True] * 3
    for page, flat in ((0, flats[2]), (9, flats[0]), (2, flats[1])):
        assert torch.equal(pool.get_data_page(page * PAGE), flat)
    others = [page for page in range(TOKENS // PAGE) if page not in (0, 9, 2)]
    assert not any(pool.get_data_page(page * PAGE).any() for page in others)
    pages.close()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_flat_pages_are_the_same_records(layout: str) -> None:
    pool = Pool(layout)
    pages = opened(pool)
    pool.fill()
    flat = pool.get_data_page(3 * PAGE)
    assert pages.save(["a"], places(pool, 3)) == [True]
    into = torch.zeros_like(flat)
    assert pages.load_flat(["a"], [into]) == [True]
    assert torch.equal(into, flat)
    assert pages.save_flat(["b"], [flat]) == [True]
    pool.kv_buffer.zero_()
    assert pages.load(["b"], places(pool, 1)) == [True]
    assert torch.equal(pool.get_data_page(PAGE), flat)
    pages.close()


def test_pieces_of_more_than_a_mib_are_cut() -> None:
    pool = Pool("page_first", dim=8192, page=16)  # 1.5 MiB of K, and of V
    pages = opened(pool, write_queue_bytes=1 << 30)
    assert Pages(pool).spec.sizes == (1 << 20, 1 << 19, 1 << 20, 1 << 19)
    pool.fill()
    flat = pool.get_data_page(16)
    assert pages.save(["a"], places(pool, 1)) == [True]
    pool.kv_buffer.zero_()
    assert pages.load(["a"], places(pool, 3)) == [True]
    assert torch.equal(pool.get_data_page(3 * 16), flat)
    pages.close()


class _Watches(DictBackend):
    """Where reads land and writes come from, and what continues what."""

    def __init__(self) -> None:
        super().__init__()
        self.landed: list[int] = []
        self.sent: list[int] = []
        self.parents: dict[Any, Any] = {}

    def get_into(self, reads: Sequence[Read], *, deadline: float) -> list[Outcome]:
        self.landed += [_address(read.dst) for read in reads if read.offset]
        return super().get_into(reads, deadline=deadline)

    def put(self, writes: Sequence[Write], *, deadline: float) -> list[Outcome]:
        self.sent += [_address(part) for write in writes for part in write.src]
        self.parents.update({write.key: write.parent for write in writes})
        return super().put(writes, deadline=deadline)


def _address(view: memoryview) -> int:
    import numpy as np

    return int(np.frombuffer(view, dtype=np.uint8).__array_interface__["data"][0])


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
def test_nothing_is_copied_on_the_way(layout: str) -> None:
    pool, backend = Pool(layout), _Watches()
    pages = opened(pool, backend)
    pool.fill()
    hashes, there = ["a", "b"], places(pool, 4, 1)
    assert pages.save(hashes, there) == [True, True]
    assert pages.load(hashes, there) == [True, True]
    meta, _ = pool.get_page_buffer_meta(there)
    assert sorted(set(backend.landed)) == sorted(meta)
    assert set(meta) <= set(backend.sent)
    pages.close()


def test_each_page_is_said_to_continue_the_one_before() -> None:
    pool, backend = Pool("page_first"), _Watches()
    pages = opened(pool, backend)
    pages.save(["a", "b"], places(pool, 0, 1))
    pages.save(["c"], places(pool, 2), before="b")
    a, b, c = (opaque_key(f"{PREFIX}me/{each}") for each in "abc")
    assert backend.parents == {a: None, b: a, c: b}
    pages.close()


def test_a_hole_ends_the_prefix_and_moves_nothing() -> None:
    pool = Pool("page_first_direct")
    pages = opened(pool)
    pool.fill()
    flat = pool.get_data_page(2 * PAGE)
    pages.save(["a", "c"], places(pool, 0, 2))
    assert pages.prefix(["a", "b", "c"]) == 1
    assert pages.prefix([]) == 0
    pool.kv_buffer.zero_()
    assert pages.load(["a", "b", "c"], places(pool, 4, 5, 6)) == [True, False, True]
    assert torch.equal(pool.get_data_page(6 * PAGE), flat)
    assert not pool.get_data_page(5 * PAGE).any()
    pages.close()


def test_a_damaged_page_is_no_hit_and_heals() -> None:
    pool, backend = Pool("layer_first"), DictBackend()
    pages = opened(pool, backend)
    pool.fill()
    pages.save(["a", "b"], places(pool, 0, 1))
    key = opaque_key(f"{PREFIX}me/a")
    data = bytearray(backend.records[key])
    data[-3] ^= 1
    backend.records[key] = bytes(data)
    assert pages.load(["a", "b"], places(pool, 2, 3)) == [False, True]
    assert len(backend.quarantined) == 1
    assert pages.save(["a"], places(pool, 0)) == [True]
    assert pages.load(["a"], places(pool, 2)) == [True]
    pages.close()


def test_pages_of_another_shape_are_no_hit() -> None:
    backend = DictBackend()
    small, large = Pool("page_first"), Pool("page_first", dim=2 * DIM)
    pages = opened(small, backend)
    pages.save(["a"], places(small, 0))
    pages.use(Pages(large), "me")
    large.fill()
    assert pages.load(["a"], places(large, 0)) == [False]
    pages.close()


def test_what_makes_no_sense_is_no_hit_and_is_told(caplog: pytest.LogCaptureFixture) -> None:
    pool = Pool("page_first")
    pages = opened(pool)
    assert pages.load(["a"], places(pool, 0)[:-1]) == [False]
    assert "are no whole pages" in caplog.text
    assert pages.save(["a", "b"], places(pool, 0)) == [False, False]
    assert "2 keys, but 1 memory views" in caplog.text
    caplog.clear()
    other = opened(pool)
    assert other.load(["a"], torch.arange(TOKENS, TOKENS + PAGE)) == [False]
    assert "outside of its memory" in caplog.text
    pages.close()
    other.close()


def test_before_there_is_a_pool_nothing_is_found() -> None:
    pages = PageStore(Client(Store(load_config("memory://", env={})), PREFIX, logger), writer=True, measured=False)
    assert pages.prefix(["a"]) == 0
    assert pages.load(["a"], torch.arange(PAGE)) == [False]
    assert pages.load_flat(["a"], [torch.zeros(8)]) == [False]
    assert pages.clear() == 0
    pages.close()


class _Hangs(DictBackend):
    """Reads and writes that go on when they are let go, whatever the deadline."""

    def __init__(self) -> None:
        super().__init__()
        self.let_go, self.begun = threading.Event(), threading.Event()

    def get_into(self, reads: Sequence[Read], *, deadline: float) -> list[Outcome]:
        self.begun.set()
        self.let_go.wait(30)
        return super().get_into(reads, deadline=float("inf"))


def test_memory_is_not_given_back_while_a_hung_backend_may_write_into_it(caplog: pytest.LogCaptureFixture) -> None:
    pool, backend = Pool("page_first"), _Hangs()
    pages = opened(pool, backend, blocking_timeout=0.05)
    pages.save(["a"], places(pool, 0))
    answers: list[list[bool]] = []
    loading = threading.Thread(target=lambda: answers.append(pages.load(["a"], places(pool, 1))))
    loading.start()
    assert backend.begun.wait(10)
    loading.join(0.3)  # the deadline is long past
    assert not answers
    backend.let_go.set()
    loading.join(10)
    assert answers == [[False]]
    assert "beyond the deadline" in caplog.text
    pages.close()


class _Broken(DictBackend):
    def stat(self, keys: Any, *, deadline: float) -> list[Outcome]:
        return [Outcome.failed(TransientError("gone"))] * len(keys)

    def get_into(self, reads: Sequence[Read], *, deadline: float) -> list[Outcome]:
        return [Outcome.failed(TransientError("gone"))] * len(reads)

    def put(self, writes: Sequence[Write], *, deadline: float) -> list[Outcome]:
        return [Outcome.failed(TransientError("gone"))] * len(writes)

    def delete(self, keys: Any, *, deadline: float) -> list[Outcome]:
        return [Outcome.failed(TransientError("gone"))] * len(keys)


def test_a_place_that_is_gone_costs_misses(caplog: pytest.LogCaptureFixture) -> None:
    pool = Pool("page_first")
    pages = opened(pool, _Broken())
    for _ in range(5):
        assert pages.prefix(["a", "b"]) == 0
        assert pages.load(["a", "b"], places(pool, 0, 1)) == [False, False]
        assert pages.save(["a", "b"], places(pool, 0, 1)) == [False, False]
    told = [record.getMessage() for record in caplog.records if record.name == logger.name]
    assert len(told) == 2, "once in ten seconds for each kind of trouble"
    assert all("2 of 2 failed" in each for each in told)
    pages.close()


def test_a_closed_store_is_a_miss() -> None:
    pool = Pool("page_first")
    pages = opened(pool)
    pages.close()
    pages.close()
    assert pages.prefix(["a"]) == 0
    assert pages.load(["a"], places(pool, 0)) == [False]
    assert pages.save(["a"], places(pool, 0)) == [False]


def test_one_rank_of_mla_writes_for_all() -> None:
    pool, backend = Pool("page_first", mla=True), DictBackend()
    idle = opened(pool, backend, writer=False)
    assert idle.save(["a"], places(pool, 0)) == [True]
    assert not backend.records
    assert idle.load(["a"], places(pool, 0)) == [False]
    busy = opened(pool, backend)
    assert busy.save(["a"], places(pool, 0)) == [True]
    assert idle.load(["a"], places(pool, 0)) == [True]
    assert idle.clear() == 0
    assert backend.records
    assert busy.clear() == 1
    assert not backend.records
    idle.close()
    busy.close()


def test_clear_takes_its_own_pages_only(tmp_path: Path) -> None:
    pool, url = Pool("page_first"), f"file://{tmp_path}/kv"

    def of(identity: str, namespace: str = "default") -> PageStore:
        client = open_client("SGLang", PREFIX, url, None, {"namespace": namespace}, env={})
        pages = PageStore(client, writer=True, measured=False)
        pages.use(Pages(pool), identity)
        return pages

    mine, other, tenant = of("me"), of("you"), of("me", "tenant")
    for pages in (mine, other, tenant):
        assert pages.save(["a", "b"], places(pool, 0, 1)) == [True, True]
    mine._client.store.put_many({"somebody's": b"x" * 100})
    again = of("me")  # another process of the same engine
    assert again.clear() == 2
    assert mine.prefix(["a", "b"]) == 0
    assert other.prefix(["a", "b"]) == tenant.prefix(["a", "b"]) == 2
    assert mine._client.store.get_many(["somebody's"]) == [b"x" * 100]
    assert again.clear() == 0
    for pages in (mine, other, tenant, again):
        pages.close()


def test_clear_says_when_pages_are_left() -> None:
    pool = Pool("page_first")

    class Keeps(DictBackend):
        def delete(self, keys: Any, *, deadline: float) -> list[Outcome]:
            return [Outcome.failed(PermanentError("read only"))] * len(keys)

    pages = opened(pool, Keeps())
    pages.save(["a", "b"], places(pool, 0, 1))
    with pytest.raises(TransientError, match="pages are left: 2 of 2 failed"):
        pages.clear()
    assert pages.prefix(["a", "b"]) == 2
    pages.close()


def test_clear_says_when_records_could_not_be_looked_into() -> None:
    pool = Pool("page_first")

    class Unreadable(DictBackend):
        def get_into(self, reads: Sequence[Read], *, deadline: float) -> list[Outcome]:
            return [Outcome.failed(TransientError("gone"))] * len(reads)

    pages = opened(pool, Unreadable())
    pages.save(["a", "b"], places(pool, 0, 1))
    with pytest.raises(TransientError, match="pages may be left: 2 records"):
        pages.clear()
    assert pages.prefix(["a", "b"]) == 2
    pages.close()


def test_what_was_moved_is_told_once() -> None:
    pool = Pool("page_first")
    pages = opened(pool)
    pages.save(["a", "b"], places(pool, 0, 1))
    pages.save(["a", "b"], places(pool, 0, 1))  # was there: nothing moved
    pages.load(["a", "x"], places(pool, 0, 1))
    pages.load(["y"], places(pool, 1))
    loads, saves = pages.moved()
    size = 2 * LAYERS * PAGE * HEADS * DIM * 2
    assert [(each.pages, each.nbytes) for each in loads] == [(1, size)]
    assert [(each.pages, each.nbytes) for each in saves] == [(2, 2 * size)]
    assert all(each.gbytes_per_s > 0 for each in loads + saves)
    assert pages.moved() == ([], [])
    assert pages.stats()["metrics"]
    pages.close()


# Pools that are refused.


def test_unknown_pools_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"'page_unified'.*one of layer_first"):
        Pages(Pool("page_unified"))
    pool = Pool("page_first")
    pool.kv_buffer = pool.kv_buffer.transpose(0, 1)
    with pytest.raises(ConfigError, match="one contiguous piece"):
        Pages(pool)
    with pytest.raises(ConfigError, match="does not say where"):
        Pages(SimpleNamespace(layout="page_first", page_size=1))

    class Short(Pool):
        def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
            pointers, sizes = super().get_page_buffer_meta(indices)
            return pointers[::2], sizes[::2]

    with pytest.raises(ConfigError, match="pages of 768 bytes, but gives 384 bytes in 1 pieces"):
        Pages(Short("page_first"))


# Names.


def config(**given: Any) -> Any:
    fields = {
        "tp_rank": 0, "tp_size": 2, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1,
        "is_mla_model": False, "model_name": "org/model", "dp_rank": 0,
    }  # fmt: skip
    return SimpleNamespace(**{**fields, **given})


def named(pool: Any = None, name: str | None = None, revision: str = "r", dtype: str = "bfloat16", **given: Any) -> str:
    return identity_of(config(**given), name, revision, dtype, Pages(pool or Pool("page_first")))


def test_names_tell_apart_what_has_other_bytes() -> None:
    stage = Pool("page_first")
    stage.start_layer, stage.end_layer = 3, 6
    identities = [
        named(), named(name="other"), named(revision="r2"), named(dtype="float16"),
        named(dtype="uint8 of fp8_e4m3"), named(dtype="uint8 of fp8_e5m2"), named(model_name="org/other"),
        named(tp_rank=1), named(tp_size=4), named(is_mla_model=True), named(pp_size=2), named(pp_size=2, pp_rank=1),
        named(attn_cp_size=2), named(attn_cp_size=2, attn_cp_rank=1), named(stage),
        named(Pool("layer_first")), named(Pool("page_first_direct")), named(Pool("page_first", mla=True)),
        named(Pool("page_first", page=8)), named(Pool("page_first", dim=16)),
    ]  # fmt: skip
    assert len(set(identities)) == len(identities)


def test_names_bring_together_what_has_the_same_bytes(tmp_path: Path) -> None:
    ranks = [named(is_mla_model=True, tp_rank=rank, tp_size=size) for rank, size in ((0, 1), (0, 2), (1, 2))]
    assert len(set(ranks)) == 1
    assert named(dp_rank=1) == named()
    folders = []
    for host in ("here", "there"):
        (folder := tmp_path / host / "model").mkdir(parents=True)
        folders.append(named(model_name=str(folder)))
    assert folders[0] == folders[1] == named(model_name="model")
    pool: Any = Pool("page_first")
    pool.storage_format_tag = "own"
    tagged = named(pool, model_name=f"{tmp_path}/here/model-own")
    assert str(tmp_path) not in tagged
    assert tagged != folders[0]
    with pytest.raises(ConfigError, match="give model_name"):
        named(model_name=None)


def test_a_pool_says_its_dtype_unless_it_is_one_of_bytes() -> None:
    pages = Pages(Pool("page_first"))
    assert dtype_of(pages) == pages.dtype == "bfloat16"


# Settings.


def test_extra_config_is_split() -> None:
    extra = {
        "backend_name": "kvstore", "module_path": "m", "class_name": "c", "interface_v1": 1, "file_storage_path": "f",
        "remote_url": "memory://", "model_name": "m", "revision": "r", "namespace": "n",
    }  # fmt: skip
    settings = Settings.of(extra)
    assert settings == Settings("memory://", None, {"namespace": "n"}, "m", "r", True)
    assert Settings.of(None) == Settings()
    for wrong in ({"model_name": 3}, {"revision": ""}, {"config_file": ["x"]}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            Settings.of(wrong)


def test_options_that_cannot_be_had_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "hunter2secret"
    for options, what in (
        ({"backend_options": {"s3": {"secret_access_key": secret}}}, "SGLang writes its settings into its log"),
        ({"on_error": "raise"}, "cost SGLang its whole batch"),
        ({"no_option_of_anybody": 1}, "no_option_of_anybody"),
    ):
        with pytest.raises(ConfigError, match=what) as raised:
            open_client("SGLang", PREFIX, "memory://", None, options, env={})
        assert secret not in str(raised.value)
    monkeypatch.setenv("KVSTORE_WRITE_QUEUE_BYTES", "7MiB")
    client = open_client("SGLang", PREFIX, "memory://", None, {"blocking_timeout": "3s"})
    assert client.store.config.write_queue_bytes == 7 << 20
    assert client.store.config.buffer_pool_bytes == 64 << 20
    assert client.store.config.blocking_timeout == 3
    client.close()


def test_its_log_is_that_of_the_integration() -> None:
    assert logger is logging.getLogger("kvstore.integrations.sglang")
    client = open_client("SGLang", PREFIX, "memory://", None, {}, env=dict(os.environ))
    assert client.settler._logger is logger
    client.close()
