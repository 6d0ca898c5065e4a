"""The connector's pure logic: names, shards, slices of pages, options; and its kernels against plain torch."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import ConfigError
from kvstore.integrations._weights import adapter_identity, folder_fingerprint, model_name, model_revision
from kvstore.integrations.vllm._keys import chunk_refs, hashed, multimodal_items, shards_of
from kvstore.integrations.vllm._messages import ChunkRef, Isolation, Load, Step
from kvstore.integrations.vllm._paging import Pages, blocks_covering, segment_tensors, slots, token_runs
from kvstore.integrations.vllm._settings import Settings, SharedStore
from kvstore.keys import KeyContext, chunk_keys, keys_of
from kvstore.layout import KVLayout

TOKENS = list(range(100, 150))


# Names.


@given(st.lists(st.integers(0, 2**20), min_size=1, max_size=60), st.booleans())
def test_names_are_those_of_every_other_integration(tokens: list[int], unfull: bool) -> None:
    context = KeyContext("m", KVLayout(2, 1, 4), "float32", revision="r", cache_salt="s")
    hashes = hashed(tokens, chunk_size=8, unfull=unfull)
    assert keys_of(hashes, context=context) == chunk_keys(
        tokens, context=context, chunk_size=8, save_unfull_chunk=unfull
    )
    refs = chunk_refs(hashes, len(tokens), 8)
    assert [ref.hash for ref in refs] == hashes
    assert [ref.begin for ref in refs] == list(range(0, 8 * len(refs), 8))
    assert refs == [] or refs[-1].end == (len(tokens) if unfull else len(tokens) // 8 * 8)


def feature(identifier: str, offset: int, length: int) -> SimpleNamespace:
    return SimpleNamespace(identifier=identifier, mm_position=SimpleNamespace(offset=offset, length=length))


def test_images_isolate_from_their_chunk_on() -> None:
    plain = hashed(TOKENS, chunk_size=8, unfull=False)
    one = hashed(TOKENS, chunk_size=8, unfull=False, items=multimodal_items([feature("cat", 20, 4)]))
    two = hashed(TOKENS, chunk_size=8, unfull=False, items=multimodal_items([feature("dog", 20, 4)]))
    assert plain[:2] == one[:2] == two[:2]
    assert all(len({a, b, c}) == 3 for a, b, c in zip(plain[2:], one[2:], two[2:], strict=True))
    # A prompt that ends before an image does not know of it yet.
    assert hashed(TOKENS[:16], chunk_size=8, unfull=False, items=multimodal_items([feature("cat", 20, 4)])) == plain[:2]


def test_every_part_of_a_model_has_a_name_of_its_own_and_replicas_share_one() -> None:
    split = shards_of(tp_size=2, layers=[3, 2], kv_heads=4, head_dim=8, v_head_dim=8, mla=False)
    assert [(s.tp_rank, s.tp_size, s.pp_rank, s.pp_size) for s in split] == [
        (0, 2, 0, 2), (1, 2, 0, 2), (0, 2, 1, 2), (1, 2, 1, 2)
    ]  # fmt: skip
    assert [s.layout.num_layers for s in split] == [3, 3, 2, 2]
    assert all(s.writer and s.layout.num_kv_heads == 4 for s in split)
    digests = {
        KeyContext("m", s.layout, "float32", tp_rank=s.tp_rank, tp_size=s.tp_size, pp_rank=s.pp_rank, pp_size=2).digest
        for s in split
    }
    assert len(digests) == 4
    replicas = shards_of(tp_size=4, layers=[2], kv_heads=1, head_dim=8, v_head_dim=8, mla=False, replicas=2)
    assert [(s.tp_rank, s.tp_size, s.writer) for s in replicas] == [
        (0, 2, True), (0, 2, False), (1, 2, True), (1, 2, False)
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="3 replicas"):
        shards_of(tp_size=4, layers=[2], kv_heads=1, head_dim=8, v_head_dim=8, mla=False, replicas=3)


@pytest.mark.parametrize("tp_size", [1, 2, 8])
def test_latent_vectors_are_the_same_on_all_ranks_and_for_any_number_of_them(tp_size: int) -> None:
    shards = shards_of(tp_size=tp_size, layers=[4], kv_heads=1, head_dim=576, v_head_dim=0, mla=True)
    assert {(s.tp_rank, s.tp_size, s.layout) for s in shards} == {(0, 1, KVLayout(4, 1, 576, 0, "mla"))}
    assert [s.writer for s in shards] == [True] + [False] * (tp_size - 1)


def test_orders_can_be_copied_to_other_processes_and_show_no_salt() -> None:
    load = Load("r", Isolation("secret", "l"), [ChunkRef(b"h", 0, 8)], 0, 8, (1, 2), True)
    step = Step([load])
    assert copy.deepcopy(step) == step
    assert "secret" not in repr(step)


# Weights.


def weights(folder: Path, name: str, data: bytes) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(data)
    (folder / "readme.md").write_text(name)
    return folder_fingerprint(str(folder))


def test_other_weights_under_the_same_name_are_another_revision(tmp_path: Path) -> None:
    data = bytes(range(256)) * 300
    one = weights(tmp_path / "a", "x", data)
    assert weights(tmp_path / "b", "y", data) == one, "wherever they lie"
    assert weights(tmp_path / "c", "x", data[:-1] + b"!") != one
    assert model_name(str(tmp_path / "a")) == "a"
    assert model_name("org/name") == "org/name"
    revisions = {
        model_revision(str(tmp_path / "a"), None, {"rope_theta": 1.0}, {}),
        model_revision(str(tmp_path / "a"), None, {"rope_theta": 2.0}, {}),
        model_revision(str(tmp_path / "a"), None, {"rope_theta": 1.0}, {"quantization": "fp8"}),
        model_revision(str(tmp_path / "c"), None, {"rope_theta": 1.0}, {}),
        model_revision("org/name", "abc", {"rope_theta": 1.0}, {}),
    }
    assert len(revisions) == 5
    same = model_revision(str(tmp_path / "b"), None, {"rope_theta": 1.0, "_name_or_path": "b", "dtype": "x"}, {})
    assert same in revisions
    with pytest.raises(ConfigError, match="give a revision"):
        model_revision("org/name", None, {}, {})
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="no weights"):
        folder_fingerprint(str(tmp_path / "empty"))


def test_an_adapter_that_was_trained_on_is_another_one(tmp_path: Path) -> None:
    weights(tmp_path / "a", "x", b"1" * 100)
    before = adapter_identity("sql", str(tmp_path / "a"))
    weights(tmp_path / "a", "x", b"2" * 101)
    assert adapter_identity("sql", str(tmp_path / "a")) != before
    assert adapter_identity("sql", "org/adapter") != adapter_identity("other", "org/adapter")


# Pages.


@given(st.integers(0, 50), st.integers(0, 50), st.integers(1, 17))
def test_slices_cover_each_token_once(begin: int, length: int, block_size: int) -> None:
    end = begin + length
    seen = []
    for run in token_runs(begin, end, block_size):
        assert run.length > 0
        assert run.offset + run.length <= block_size
        seen += [run.block * block_size + run.offset + n for n in range(run.length)]
        assert run.token == seen[-run.length] - begin
    assert seen == list(range(begin, end))
    assert set(blocks_covering(begin, end, block_size)) == {token // block_size for token in seen}
    blocks = [7 * n + 3 for n in range(-(-end // block_size))]
    expected = [blocks[token // block_size] * block_size + token % block_size for token in seen]
    assert slots(blocks, begin, end, block_size).tolist() == expected


LAYOUT = KVLayout(1, 3, 8)


def caches() -> list[tuple[str, torch.Tensor, Pages]]:
    """Empty pages in each layout: 6 blocks of 4 tokens."""
    hnd = torch.zeros(6, 3, 4, 16)
    nhd = torch.zeros(6, 4, 3, 16).transpose(1, 2)
    by_head = torch.zeros(3, 6, 4, 16).transpose(0, 1)
    among_layers = torch.zeros(6, 5, 3, 4, 16)[:, 2]
    vec = torch.zeros(6, 3, 4, 16)
    return [
        ("HND", hnd, Pages.strided(hnd, LAYOUT, 4)), ("NHD", nhd, Pages.strided(nhd, LAYOUT, 4)),
        ("LHBNC", by_head, Pages.strided(by_head, LAYOUT, 4)),
        ("BLHNC", among_layers, Pages.strided(among_layers, LAYOUT, 4)),
        ("vec", vec, Pages.transposed(vec, LAYOUT, 4)),
    ]  # fmt: skip


@pytest.mark.parametrize("number", range(5))
@pytest.mark.parametrize(("begin", "end"), [(0, 20), (3, 9), (5, 7), (4, 8), (19, 20), (6, 6)])
def test_tokens_come_back_from_pages_and_nothing_else_is_touched(number: int, begin: int, end: int) -> None:
    _, cache, pages = caches()[number]
    blocks = [5, 0, 3, 1, 4]
    keys, values = torch.randn(end - begin, 3, 8), torch.randn(end - begin, 3, 8)
    pages.scatter(blocks, begin, end, keys, values)
    got_keys, got_values = torch.zeros_like(keys), torch.zeros_like(values)
    pages.gather(blocks, begin, end, got_keys, got_values)
    assert torch.equal(got_keys, keys)
    assert torch.equal(got_values, values)
    assert int((cache != 0).sum()) == 2 * keys.numel()


def test_the_page_of_a_cpu_is_as_vllm_writes_it() -> None:
    """K of a (block, head) is `[head_dim, tokens]`, V `[tokens, head_dim]` behind it."""
    cache = torch.zeros(2, 3, 4, 16)
    keys, values = torch.randn(8, 3, 8), torch.randn(8, 3, 8)
    Pages.transposed(cache, LAYOUT, 4).scatter([1, 0], 0, 8, keys, values)
    page = cache[1, 2].reshape(-1)
    assert torch.equal(page[:32].view(8, 4).T, keys[:4, 2])
    assert torch.equal(page[32:].view(4, 8), values[:4, 2])


@pytest.mark.parametrize("shape", [(6, 4, 24), (6, 1, 4, 24)])
def test_latent_vectors_have_no_values(shape: tuple[int, ...]) -> None:
    layout = KVLayout(1, 1, 24, 0, "mla")
    cache = torch.zeros(shape)
    pages = Pages.strided(cache, layout, 4)
    segment = memoryview(bytearray(layout.segment_bytes(6, "float32")))
    keys, values = segment_tensors(segment, 6, layout, torch.float32)
    assert keys.shape == (6, 1, 24)
    assert values.numel() == 0
    keys.copy_(torch.randn_like(keys))
    pages.scatter([2, 5], 1, 7, keys, values)
    got = torch.zeros_like(keys)
    pages.gather([2, 5], 1, 7, got, torch.zeros(6, 1, 0))
    assert torch.equal(got, keys)


def test_a_cache_of_another_shape_is_refused() -> None:
    for make in (Pages.strided, Pages.transposed):
        with pytest.raises(ConfigError, match="shape"):
            make(torch.zeros(6, 2, 4, 16), LAYOUT, 4)
    with pytest.raises(ConfigError, match="contiguous"):
        Pages.transposed(torch.zeros(6, 4, 3, 16).transpose(1, 2), LAYOUT, 4)


_KERNELS = """
import torch
from kvstore.integrations.vllm._kernels import gather, scatter
from kvstore.integrations.vllm._paging import Pages, slots
from kvstore.layout import KVLayout

device = "cuda" if torch.cuda.is_available() else "cpu"
generator = torch.Generator().manual_seed(1)
cases = 0
for layout, dtype in [
    (KVLayout(1, 3, 8), torch.float32), (KVLayout(1, 2, 20, 12), torch.bfloat16),
    (KVLayout(1, 1, 24, 0, "mla"), torch.float16), (KVLayout(1, 2, 5), torch.uint8),
]:
    heads, width, v = layout.num_kv_heads, layout.head_dim, layout.v_head_dim
    shape = (6, heads, 4, width + v)
    def zeros(*shape):
        return torch.zeros(shape, dtype=dtype, device=device)
    makers = [lambda: Pages.strided(zeros(*shape), layout, 4),
              lambda: Pages.strided(zeros(6, 4, heads, width + v).transpose(1, 2), layout, 4)]
    if v == width:
        makers.append(lambda: Pages.transposed(zeros(*shape), layout, 4))
    for make in makers:
        for begin, end in [(3, 9), (6, 6)]:
            blocks = [5, 0, 3, 1, 4]
            plain, ours = make(), make()
            raw = [torch.randint(0, 100, (end - begin, heads, w), generator=generator).to(device, dtype)
                   for w in (width, v)]
            plain.scatter(blocks, begin, end, *raw)
            places = slots(blocks, begin, end, 4).to(device)
            scatter(*raw, ours, places)
            assert torch.equal(plain.keys, ours.keys) and torch.equal(plain.values, ours.values)
            out = [torch.zeros_like(each) for each in raw]
            gather(*out, ours, places)
            assert all(torch.equal(a, b) for a, b in zip(out, raw))
            cases += 1
assert cases == 20
print("equal")
"""


# The path of a GPU, with streams and events that are nothing: what is copied, in which order, and given back.
_DEVICE = """
import contextlib
import torch
from tests.unit import vllm_support
from tests.unit.test_vllm_engine import TOKENS, keys, opened
from kvstore.integrations.vllm._mover import DeviceMover
from kvstore.testing import DictBackend

class Stream:
    def __init__(self, device=None): pass
    def wait_stream(self, other): pass
    def wait_event(self, event): pass
    def synchronize(self): pass
    def query(self): return True
    def record_event(self): return self

torch.cuda.Stream = Stream
torch.cuda.stream = lambda stream: contextlib.nullcontext()
torch.cuda.current_stream = lambda device=None: Stream()
torch.Tensor.pin_memory = lambda self: self
inner = DictBackend()
for asynchronous in (False, True):
    with opened(inner if not asynchronous else DictBackend()) as store:
        engine = vllm_support.Engine(store, asynchronous=asynchronous)
        worker = engine.worker
        worker._mover, worker._between_mover = (
            DeviceMover(vllm_support.LAYOUT, torch.float32, torch.device("cpu")) for _ in range(2)
        )
        worker._on_device = True
        engine.compute(vllm_support.request("a", TOKENS[:27]))
        assert store.submit_lookup(keys(store, TOKENS[:27])).result() == 3
        assert engine.compute(vllm_support.request("b", TOKENS[:30])) == set()
        assert worker.counters["load_tokens"] == 24
        store.submit_delete(keys(store, TOKENS[:27])[1:2]).result()
        hurt = vllm_support.request("c", TOKENS[:30])
        engine.side.arrived(hurt)
        engine.side._states["c"].lookups, engine.side._states["c"].hits = None, 3
        assert engine.compute(hurt) == set(engine.tables["c"][2:6])
        engine.close()
        assert worker.stats()["prefetch"]["used_bytes"] == 0
        assert store.stats()["pool"]["buffers"] == 0
print("equal")
"""


@pytest.mark.parametrize("code", [_KERNELS, _DEVICE], ids=["kernels", "device"])
def test_the_path_of_a_gpu_does_what_plain_torch_does(code: str) -> None:
    pytest.importorskip("triton")
    # Triton decides at its import whether it interprets, so this has a process of its own.
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True,
        timeout=300, check=False, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.stdout.strip() == "equal", done.stderr


# Options.


def test_options_are_checked_by_name() -> None:
    settings = Settings.of({"remote_url": "memory://a", "chunk_size": 64, "load_mode": "async", "revision": "r1"})
    assert settings.options == {"chunk_size": 64}
    assert settings.asynchronous(ranks=1, async_scheduling=False)
    for bad in ({"load_mode": "fast"}, {"save_generated": "yes"}, {"revision": ""}, {"model_name": 3}):
        with pytest.raises(ConfigError, match=next(iter(bad))):
            Settings.of(bad)
    with pytest.raises(ConfigError, match="chunk_sise"):
        SharedStore.of(Settings.of({"remote_url": "memory://a", "chunk_sise": 64}))


@pytest.mark.parametrize(
    ("mode", "ranks", "async_scheduling", "expected"),
    [
        ("auto", 1, False, False), ("auto", 2, False, True), ("auto", 1, True, True), ("layerwise", 1, False, False),
        ("layerwise", 2, False, "2 ranks"), ("layerwise", 1, True, "--no-async-scheduling"), ("async", 1, False, True),
    ],
)  # fmt: skip
def test_layer_by_layer_only_where_it_is_safe(
    mode: str, ranks: int, async_scheduling: bool, expected: bool | str
) -> None:
    settings = Settings.of({"load_mode": mode})
    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=expected):
            settings.asynchronous(ranks=ranks, async_scheduling=async_scheduling)
    else:
        assert settings.asynchronous(ranks=ranks, async_scheduling=async_scheduling) is expected


def test_both_sides_of_a_process_share_a_store(tmp_path: Path) -> None:
    settings = Settings.of({"remote_url": f"file://{tmp_path}/kv"})
    one, two = SharedStore.of(settings), SharedStore.of(settings)
    other = SharedStore.of(Settings.of({"remote_url": f"file://{tmp_path}/kv", "namespace": "b"}))
    assert one.store is two.store
    assert one.store is not other.store
    one.close()
    assert two.store.submit_lookup([]).result() == 0
    two.close()
    other.close()
    again = SharedStore.of(settings)
    assert again.store is not one.store
    again.close()
