"""`Blender` under attack: odd prompts, broken records, failing computations, threads, senseless arguments."""

from __future__ import annotations

import math
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from kvstore.blend.selection import Evidence
from kvstore.errors import ConfigError
from kvstore.prefetch import Prefetcher
from kvstore.record import parse_header
from kvstore.stream import Policy, PrefillModel, TierOffer
from kvstore.stream.shapes import level_sizes
from kvstore.testing import Fault
from tests.unit.blend_world import (
    DOCUMENTS,
    PREFIX,
    QUESTION,
    Kept,
    backend,
    blender,
    form_of,
    model,
    prefill,
    store,
)

ONE, TWO, THREE, FOUR = DOCUMENTS
ORDER = [THREE, ONE, FOUR]
WHOLE = torch.cat([PREFIX, *ORDER, QUESTION])
INSIDE = torch.cat([ONE, TWO, THREE])
PREFIXES = {"prefix": PREFIX, "bare": PREFIX[:0]}


@pytest.fixture(scope="module")
def some_model() -> Any:
    return model()


@pytest.fixture(scope="module")
def shelves(some_model: Any) -> dict[str, Kept]:
    """Documents as they are stored behind a prefix and behind none. Tests that change records take others."""
    found = {}
    for name, prefix in PREFIXES.items():
        found[name] = backend()
        with store(found[name]) as opened:
            assert blender(some_model, opened, prefix=prefix).precompute([*DOCUMENTS, INSIDE]).failed == 0
    return found


def right(some_model: Any, report: Any, whole: torch.Tensor) -> bool:
    """Whether the next token's logits are those of a full prefill of this prompt."""
    assert report.input_ids[0].tolist() == whole.tolist()
    logits, _ = prefill(some_model, whole)
    return bool(torch.allclose(report.logits, logits[-1], atol=1e-4, rtol=1e-4))


# Prompts.


@pytest.mark.parametrize(
    ("parts", "reused"),
    [
        ([ONE, ONE, TWO, ONE, QUESTION], 3 * len(ONE) + len(TWO)),
        ([INSIDE, QUESTION], len(INSIDE)),
        ([TWO, INSIDE, QUESTION], len(TWO) + len(INSIDE)),
        ([torch.cat([FOUR[:30], INSIDE[10:90]]), QUESTION], 30 + 80),
        ([[], ONE, [], TWO, QUESTION, []], len(ONE) + len(TWO)),
        ([[7], [8], [5]], 0),
        ([ONE, [5]], len(ONE)),
        ([[5]], 0),
        ([5], 0),
        ([ONE], len(ONE) - 1),  # no question: its last token is one
        (torch.cat([ONE, TWO]), len(ONE) + len(TWO) - 1),
        (ONE[:15], 0),
    ],
    ids=range(12),
)
@pytest.mark.parametrize("name", PREFIXES)
def test_odd_prompts(some_model: Any, shelves: dict[str, Kept], parts: Any, reused: int, name: str) -> None:
    prefix = PREFIXES[name]
    pieces = [parts] if isinstance(parts, torch.Tensor) or isinstance(parts[0], int) else parts
    whole = torch.cat([prefix, *(torch.as_tensor(piece, dtype=torch.int64) for piece in pieces)])
    with store(shelves[name]) as opened:
        made = blender(some_model, opened, prefix=prefix)
        assert made.precompute([*DOCUMENTS, INSIDE]).existing >= 5
        cache, report = made.blend(parts, ratio=1.0)
        assert right(some_model, report, whole)
        assert report.reused == len(prefix) + reused
        assert report.misses == report.lost == 0
        assert cache.get_seq_length() == len(whole) - 1
        fields = {"max_new_tokens": 2, "do_sample": False, "pad_token_id": 0}
        theirs = some_model.generate(whole[None], **fields)
        mine = some_model.generate(report.input_ids, **made.cache_argument(cache), **fields)
        assert mine.tolist() == theirs.tolist()


def test_a_document_of_one_token(some_model: Any) -> None:
    with store(backend()) as opened:
        made = blender(some_model, opened, {"blend_min_tokens": 1})
        assert made.precompute([ONE, [9], [10]]).stored == 4
        _, report = made.blend([[9], ONE, [10], [9], QUESTION], ratio=1.0)
        assert report.hits == 5
        assert right(some_model, report, torch.cat([PREFIX, torch.tensor([9]), ONE, torch.tensor([10, 9]), QUESTION]))


# Records.


@pytest.mark.parametrize("how", ["empty", "10 bytes", "half", "all but one", "another's"])
def test_broken_records_are_computed_and_stored_again(some_model: Any, how: str) -> None:
    kept = backend()
    with store(kept) as opened:
        made = blender(some_model, opened)
        made.precompute(DOCUMENTS)
        key, records = made.key(ONE), kept.inner.records  # type: ignore[attr-defined]
        whole = bytes(records[key])
        cut = {"empty": 0, "10 bytes": 10, "half": len(whole) // 2, "all but one": len(whole) - 1}
        records[key] = whole[: cut[how]] if how in cut else bytes(records[made.key(TWO)])
        _, report = made.blend([*ORDER, QUESTION], ratio=1.0)
        assert right(some_model, report, WHOLE)
        assert (report.hits, report.misses) == (3, 1)
        assert report.restarts == report.lost <= 1
        assert made.precompute([ONE]).stored == 1
        assert made.blend([*ORDER, QUESTION], ratio=1.0)[1].hits == 4


def test_of_a_lossy_codec_nothing_is_exact(some_model: Any) -> None:
    """r = 1 is a full prefill whatever the records went through."""
    with store(backend(), remote_serde="int8") as opened:
        made = blender(some_model, opened)
        made.precompute(DOCUMENTS)
        _, report = made.blend([*ORDER, QUESTION], ratio=1.0)
        assert (report.hits, report.exact) == (4, 0)
        assert right(some_model, report, WHOLE)


def test_headers_that_never_come_cost_the_deadline(some_model: Any) -> None:
    kept = backend()
    with store(kept) as opened:
        made = blender(some_model, opened)
        made.precompute(DOCUMENTS)
        kept.push(*[Fault.hang()] * 3, operation="get")
        _, report = made.blend([*ORDER, QUESTION], timeout=0.2)
        assert right(some_model, report, WHOLE)
        assert (report.hits, report.misses) == (0, 4)
        while kept.hung:
            kept.release()


# What is left behind.


class Broken:
    """A selector that fails."""

    def __init__(self, error: type[BaseException]) -> None:
        self.error = error

    def scores(self, evidence: Evidence) -> torch.Tensor:
        raise self.error("on purpose")


def state_of(some: Any) -> tuple[Any, ...]:
    modules = [
        (name, module.training, len(module._forward_hooks), len(module._forward_pre_hooks), sorted(vars(module)))
        for name, module in some.named_modules()
    ]
    weights = [(name, each.requires_grad, each.data_ptr(), each.sum().item()) for name, each in some.named_parameters()]
    return modules, weights, some.config.to_dict(), torch.is_grad_enabled()


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_nothing_is_left_behind_when_the_computation_fails(error: type[BaseException]) -> None:
    some = model()
    before = state_of(some)
    with store(backend()) as opened, Prefetcher(opened) as prefetcher:
        made = blender(some, opened, selection=Broken(error), prefetcher=prefetcher)
        made.precompute(DOCUMENTS)
        for _ in range(5):
            with pytest.raises(error, match="on purpose"):
                made.blend([*ORDER, QUESTION], ratio=0.3)
        end = time.monotonic() + 30  # reads under way end by themselves
        while prefetcher.stats()["used_bytes"] or opened.pool.stats().in_use:
            assert time.monotonic() < end, (prefetcher.stats(), opened.pool.stats())
            threading.Event().wait(0.001)
        assert prefetcher.stats()["streams"] == 0
        assert state_of(some) == before
        _, report = blender(some, opened, prefetcher=prefetcher).blend([*ORDER, QUESTION], ratio=1.0)
        assert right(some, report, WHOLE)


def test_blenders_of_several_threads(some_model: Any) -> None:
    """Over one store, storing the same documents at once."""
    failed: list[BaseException] = []
    hits: list[int] = []
    logits, _ = prefill(some_model, WHOLE)
    with store(backend()) as opened:

        def work() -> None:
            try:
                made = blender(some_model, opened)
                assert made.precompute(DOCUMENTS).failed == 0
                for _ in range(3):
                    _, report = made.blend([*ORDER, QUESTION], ratio=1.0, timeout=60)
                    torch.testing.assert_close(report.logits, logits[-1], atol=1e-4, rtol=1e-4)
                    hits.append(report.hits)
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failed
        assert hits == [4] * 12


def test_nothing_is_stored_or_blended_with_dropout() -> None:
    """A model that was put into training mode later computes something else every time."""
    some = model(attention_dropout=0.5)
    kept = backend()
    with store(kept) as opened:
        made = blender(some, opened)
        some.train()
        with pytest.raises(ConfigError, match="training mode"):
            made.precompute(DOCUMENTS)
        with pytest.raises(ConfigError, match="training mode"):
            made.blend([*ORDER, QUESTION])
        some.eval()
        assert made.precompute(DOCUMENTS).stored == 5


# Control.

RULE = Policy(text="time", pointers=False, safety=1.0)


@pytest.mark.parametrize("share", [0.4, 0.6, 0.9])
def test_what_is_repaired_takes_no_longer_than_loading(some_model: Any, shelves: dict[str, Kept], share: float) -> None:
    """The share that the planner says is the share that is computed, also with chunks that are exact."""
    kept = shelves["prefix"]
    load_s = share * len(WHOLE)  # with a second per token
    with store(kept) as opened:
        keys = [form_of(blender(some_model, opened)).place_prefix().key, *map(blender(some_model, opened).key, ORDER)]
        records = kept.inner.records  # type: ignore[attr-defined]
        nbytes = sum(level_sizes(parse_header(bytes(records[key]), key=key))[-1] for key in keys)
        made = blender(some_model, opened, prefill=PrefillModel(1.0), bytes_per_s=nbytes / load_s, policy=RULE)
        _, report = made.blend([*ORDER, QUESTION])
        moved = report.reused - report.exact
        assert (report.hits, report.exact) == (4, len(PREFIX) + len(THREE))
        computed = report.computed[-1] * report.tokens
        expected = min(load_s, len(QUESTION) + moved)
        assert computed == pytest.approx(expected, abs=1), "rounded to whole tokens"
        assert report.expected_s == pytest.approx(load_s, abs=1), "and what was measured of the latency"


def test_levels_that_are_not_loaded_are_not_waited_for(
    some_model: Any, shelves: dict[str, Kept], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The option `codec_level` bounds what a plan counts with."""
    monkeypatch.setattr("kvstore.blend.blender.level_sizes", lambda header: (100, 10**9))
    for level, hits in ((0, 4), (None, 0)):
        with store(shelves["prefix"], codec_level=level) as opened:
            made = blender(some_model, opened, prefill=PrefillModel(1.0), bytes_per_s=100.0, policy=RULE)
            _, report = made.blend([*ORDER, QUESTION])
            assert (report.hits, report.left) == (hits, 4 - hits)
            assert report.level == level


def test_speeds_are_known_in_a_process_that_stores_nothing(some_model: Any, shelves: dict[str, Kept]) -> None:
    """Everything is stored already, and the first chunks are exact, so that no layer is computed in full."""
    with store(shelves["prefix"]) as opened:
        made = blender(some_model, opened)
        assert made.blend([*ORDER, QUESTION])[1].expected_s == math.inf
        assert made.prefill is not None
        (sample,) = made._samples
        assert (sample.begin, sample.tokens) == (len(PREFIX) + len(THREE), len(WHOLE) - len(PREFIX) - len(THREE))
        report = made.blend([*ORDER, QUESTION])[1]
        assert 0 < report.expected_s < math.inf


def test_the_cheapest_place_for_documents(some_model: Any) -> None:
    tiers = [TierOffer("slow", 1e3, 1.0), TierOffer("fast", 1e6, 2.0), TierOffer("memory", 1e9, 3.0)]
    with store(backend()) as opened:
        made = blender(some_model, opened, {"blend_recompute_ratios": 0.15}, prefill=PrefillModel(0.01))
        # 0.15 of 81 tokens take 0.12 s; their 81 KiB come from the slow place in 85 s, from the fast one in 0.083 s.
        assert made.cheapest_tier(tiers, [ONE, THREE]) == tiers[1]
        assert made.cheapest_tier(tiers[:1], [ONE, THREE]) is None
        quick = blender(some_model, opened, prefill=PrefillModel(0.001))
        assert quick.cheapest_tier(tiers, [ONE, THREE]) == tiers[2]
        with pytest.raises(ConfigError, match="precompute"):
            blender(some_model, opened).cheapest_tier(tiers, [ONE])


# Arguments.


@pytest.mark.parametrize("name", ["timeout", "slo_s", "ratio"])
@pytest.mark.parametrize("bad", [math.nan, "1", True, [1.0]])
def test_numbers_that_are_none_are_named(some_model: Any, name: str, bad: Any) -> None:
    with store(backend()) as opened:
        made = blender(some_model, opened)
        with pytest.raises(ConfigError, match="blend_recompute_ratios" if name == "ratio" else name):
            made.blend([ONE, QUESTION], **{name: bad})
        if name == "timeout":
            with pytest.raises(ConfigError, match="timeout"):
                made.precompute([ONE], timeout=bad)


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"bytes_per_s": "fast"}, "bytes_per_s"), ({"bytes_per_s": math.nan}, "bytes_per_s"),
     ({"bytes_per_s": math.inf}, "bytes_per_s"), ({"prefill": 3.0}, "prefill"), ({"policy": "time"}, "policy"),
     ({"tokenizer": 3}, "tokenizer"), ({"prefix": None}, "prefix"), ({"selection": 3}, "blend_selection"),
     ({"prefix": [5000]}, "5000"), ({"revision": 3}, "revision")],
)  # fmt: skip
def test_arguments_of_the_wrong_kind_are_named(some_model: Any, fields: dict[str, Any], message: str) -> None:
    with store(backend()) as opened, pytest.raises(ConfigError, match=message):
        blender(some_model, opened, **fields)


def test_numbers_of_numpy_are_numbers(some_model: Any, shelves: dict[str, Kept]) -> None:
    with store(shelves["prefix"]) as opened:
        made = blender(some_model, opened)
        made.precompute(DOCUMENTS, timeout=np.float64(60))
        for kind in (np.float32, np.float64):
            _, report = made.blend([ONE, QUESTION], ratio=kind(0.25), timeout=kind(60), slo_s=kind(60))
            assert (report.hits, report.ratio) == (2, 0.25)


@pytest.mark.parametrize("bad", [7, None, b"text", {"a": "text"}, ONE, [None], [[True] * 20], [np.zeros((2, 30), int)]])
def test_documents_that_are_none(some_model: Any, bad: Any) -> None:
    with store(backend()) as opened:
        made = blender(some_model, opened)
        with pytest.raises(ConfigError):
            made.precompute(bad)
        with pytest.raises(ConfigError):
            made.blend(bad if bad is not ONE else 5)
        assert opened.pool.stats().in_use == 0


def test_documents_may_come_one_by_one(some_model: Any) -> None:
    with store(backend()) as opened:
        assert blender(some_model, opened).precompute(each for each in DOCUMENTS).stored == 5
