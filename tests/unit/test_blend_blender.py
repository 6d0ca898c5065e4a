"""`Blender`: documents stored once, blended into prompts in any order; whatever fails, the text is never wrong."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from kvstore.blend import Blender, BlendReport
from kvstore.blend.selection import Evidence
from kvstore.config import load_config
from kvstore.errors import ConfigError, TransientError
from kvstore.prefetch import Prefetcher
from kvstore.stream import Policy, PrefillModel
from kvstore.testing import Fault
from tests.unit.blend_world import (
    DOCUMENTS,
    LAYERS,
    OPTIONS,
    PREFIX,
    QUESTION,
    backend,
    blender,
    damage,
    form_of,
    model,
    prefill,
    store,
    tokens,
)

ORDER = [DOCUMENTS[2], DOCUMENTS[0], DOCUMENTS[3]]
WHOLE = torch.cat([PREFIX, *ORDER, QUESTION])


@pytest.fixture(scope="module")
def some_model() -> Any:
    return model()


def greedy(some: Any, ids: torch.Tensor, **more: Any) -> list[int]:
    out = some.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0, **more)
    made: list[int] = out[0, ids.shape[1] :].tolist()
    return made


def assert_like_prefill(some_model: Any, made: Any, report: BlendReport, whole: torch.Tensor = WHOLE) -> None:
    assert report.input_ids[0].tolist() == whole.tolist()
    logits, theirs = prefill(some_model, whole)
    torch.testing.assert_close(report.logits, logits[-1], atol=1e-4, rtol=1e-4)
    for mine, layer in zip(made.layers, theirs.layers, strict=True):
        torch.testing.assert_close(mine.keys, layer.keys[:, :, :-1], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(mine.values, layer.values[:, :, :-1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "mistral"])
@pytest.mark.parametrize("form", ["shared_prefix", "alone"])
def test_all_computed_again_is_a_full_prefill(kind: str, form: str) -> None:
    some = model(kind)
    with store(backend()) as opened:
        made = blender(some, opened, {"blend_form": form})
        assert made.precompute(DOCUMENTS).stored == 5
        cache, report = made.blend([*ORDER, QUESTION], ratio=1.0)
        assert_like_prefill(some, cache, report)
        assert report.hits == 4
        assert greedy(some, report.input_ids, **made.cache_argument(cache)) == greedy(some, WHOLE[None])


def test_nothing_computed_again_is_plain_reuse(some_model: Any) -> None:
    with store(backend()) as opened:
        made = blender(some_model, opened)
        made.precompute(DOCUMENTS)
        cache, report = made.blend([*ORDER, QUESTION], ratio=0.0)
        form, begin = form_of(made), len(PREFIX)
        for document in ORDER:
            where = form.place(document.numpy(), begin)
            for (k, v), layer in zip(form.compute(document.numpy()), cache.layers, strict=True):
                moved = form.moving(where)(k[0].transpose(0, 1).contiguous()).transpose(0, 1)
                assert torch.equal(layer.keys[0, :, where.begin : where.end], moved)
                assert torch.equal(layer.values[:, :, where.begin : where.end], v)
            begin = where.end
        assert report.computed == [len(QUESTION) / len(WHOLE)] * LAYERS
        assert report.recomputed == [0.0] * LAYERS
        assert (report.hits, report.misses, report.reused) == (4, 0, len(WHOLE) - len(QUESTION))
        assert report.exact == len(PREFIX) + len(ORDER[0])
        assert report.nbytes == sum(form.spec(n).raw_bytes for n in (len(PREFIX), *map(len, ORDER)))


def test_the_report_tells_what_was_done(some_model: Any) -> None:
    with store(backend()) as opened:
        made = blender(some_model, opened)
        made.precompute(DOCUMENTS[:3])
        _, report = made.blend([DOCUMENTS[0], tokens(30, 5), DOCUMENTS[3], DOCUMENTS[1], QUESTION], ratio=0.2)
        stored = len(PREFIX) + len(DOCUMENTS[0]) + len(DOCUMENTS[1])
        assert (report.hits, report.misses, report.short, report.lost, report.left) == (3, 1, 1, 0, 0)
        assert (report.tokens, report.question, report.reused) == (161, 9, stored)
        assert report.ratio == 0.2
        assert report.recomputed[-1] == pytest.approx(0.2, abs=1 / stored)
        for times in (report.load_s, report.wait_s, report.move_s, report.compute_s, report.computed):
            assert len(times) == LAYERS
        assert min(report.compute_s) > 0
        assert report.total_s >= sum(report.compute_s) + sum(report.wait_s)
        assert report.token_layers == pytest.approx(sum(report.computed) / LAYERS)
        assert "3 chunks, 1 missing" in str(report)


def test_the_closer_the_more_is_computed(some_model: Any) -> None:
    logits, _ = prefill(some_model, WHOLE)
    with store(backend()) as opened:
        made = blender(some_model, opened)
        made.precompute(DOCUMENTS)
        away = [
            float((made.blend([*ORDER, QUESTION], ratio=ratio)[1].logits - logits[-1]).norm())
            for ratio in (0.0, 0.5, 1.0)
        ]
        assert away[0] > away[1] > away[2]
        assert away[2] < 1e-3


# Wrong hits.


def test_what_was_stored_for_something_else_is_never_hit(some_model: Any) -> None:
    kept = backend()
    with store(kept) as opened:
        blender(some_model, opened).precompute(DOCUMENTS)
    changed = [*ORDER[:2], torch.cat([ORDER[2][:-1], torch.tensor([3])])]
    others: list[tuple[str, Any, dict[str, object], dict[str, Any]]] = [
        ("other weights", model(seed=1), {}, {}),
        ("other revision", some_model, {}, {"revision": "r2"}),
        ("other name", some_model, {}, {"model_name": "x"}),
        ("other separator", some_model, {"blend_special_str": "--"}, {}),
        ("other prefix", some_model, {}, {"prefix": tokens(77, 20)}),
        ("other form", some_model, {"blend_form": "alone"}, {}),
        ("other dtype", model(dtype=torch.bfloat16), {}, {}),
        ("other salt", some_model, {}, {"cache_salt": "s"}),
    ]
    for what, some, options, more in others:
        with store(kept) as opened:
            _, report = blender(some, opened, options, **more).blend([*ORDER, QUESTION])
            # Alone or not, the prefix itself stands at position 0.
            assert report.hits == (what == "other form"), what
            assert report.misses == 4 - report.hits, what
    with store(kept) as opened:
        made = blender(some_model, opened)
        _, report = made.blend([*changed, QUESTION])
        assert (report.hits, report.misses) == (3, 1)
        cache, report = made.blend([*changed, QUESTION], ratio=1.0)
        assert_like_prefill(some_model, cache, report, torch.cat([PREFIX, *changed, QUESTION]))


def test_weights_that_change_are_noticed() -> None:
    some = model()
    with store(backend()) as opened:
        made = blender(some, opened)
        made.precompute(DOCUMENTS)
        assert made.blend([*ORDER, QUESTION])[1].hits == 4
        with torch.no_grad():
            some.model.layers[1].mlp.up_proj.weight.mul_(1.5)
        cache, report = made.blend([*ORDER, QUESTION])
        assert report.hits == 0
        assert_like_prefill(some, cache, report)


# Trouble.


@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_chunk_that_fails_in_any_layer_is_computed(some_model: Any, layer: int) -> None:
    kept = backend()
    with store(kept) as opened, Prefetcher(opened, first_group_bytes=1) as prefetcher:
        made = blender(some_model, opened, prefetcher=prefetcher)
        made.precompute(DOCUMENTS)
        damage(kept, made.key(ORDER[1].tolist()), layer)
        cache, report = made.blend([*ORDER, QUESTION], ratio=1.0)
        assert_like_prefill(some_model, cache, report)
        assert (report.hits, report.misses, report.lost, report.restarts) == (3, 1, 1, 1)
        # What is reused is just what is reused of a prompt in which it never was stored.
        assert made.precompute([ORDER[1]]).stored == 1, "the damaged record was put aside, and is stored again"
        damage(kept, made.key(ORDER[1].tolist()), layer)
        _, hurt = made.blend([*ORDER, QUESTION], ratio=0.3)
        _, without = made.blend([*ORDER, QUESTION], ratio=0.3)
        assert without.misses == 1
        assert without.restarts == 0
        torch.testing.assert_close(hurt.logits, without.logits, atol=0, rtol=0)


@pytest.mark.parametrize("fault", [Fault.miss(), Fault.error(), Fault.raises(OSError("down")), Fault.flip(5000)])
def test_whatever_reading_does_the_text_is_right(some_model: Any, fault: Fault) -> None:
    kept = backend()
    with store(kept) as opened:
        made = blender(some_model, opened)
        made.precompute(DOCUMENTS)
        expected = made.blend([*ORDER, QUESTION], ratio=1.0)[1].logits
        for skip in range(6):  # the fault hits headers, first layers, second looks
            kept.push(*[Fault.ok()] * skip, *[fault] * 2, operation="get")
            cache, report = made.blend([*ORDER, QUESTION], ratio=1.0)
            torch.testing.assert_close(report.logits, expected, atol=1e-4, rtol=1e-4)
            assert cache.get_seq_length() == len(WHOLE) - 1
            assert report.hits + report.misses == 4
            assert report.reused < len(WHOLE) - len(QUESTION) or not report.misses


def test_a_store_that_hangs_costs_its_deadline_and_no_more(some_model: Any) -> None:
    kept = backend()
    with store(kept) as opened:
        made = blender(some_model, opened)
        made.precompute(DOCUMENTS)
        kept.push(Fault.ok(), *[Fault.hang()] * 4, operation="get")
        cache, report = made.blend([*ORDER, QUESTION], timeout=0.3)
        released = threading.Timer(0, kept.release)
        released.start()
        released.join()
        assert_like_prefill(some_model, cache, report)
        assert (report.hits, report.misses) == (0, 4)
        while kept.hung:
            kept.release()


@pytest.mark.parametrize("skip", range(1, 2 + LAYERS))
def test_a_layer_that_is_late_is_not_waited_for(some_model: Any, skip: int) -> None:
    kept = backend()
    with store(kept) as opened, Prefetcher(opened, first_group_bytes=1) as prefetcher:
        made = blender(some_model, opened, prefetcher=prefetcher)
        made.precompute(DOCUMENTS)
        kept.push(*[Fault.ok()] * skip, *[Fault.hang()] * 8, operation="get")
        cache, report = made.blend([*ORDER, QUESTION], ratio=1.0, timeout=0.3)
        assert_like_prefill(some_model, cache, report)
        assert report.hits + report.misses == 4
        assert report.restarts == (report.lost > 0)
        while kept.hung:
            kept.release()


def test_on_error_raise_raises() -> None:
    kept = backend()
    with store(kept, on_error="raise") as opened:
        made = blender(model(), opened)
        made.precompute(DOCUMENTS[:1])
        assert made.blend([DOCUMENTS[0], QUESTION], ratio=0.5)[1].hits == 2
        kept.push(Fault.ok(), *[Fault.error()] * 9, operation="get")  # the headers come, the layers do not
        with pytest.raises(TransientError):
            made.blend([DOCUMENTS[0], QUESTION], ratio=0.5)


# Storing.


def test_documents_are_stored_once(some_model: Any) -> None:
    kept = backend()
    with store(kept) as opened:
        made = blender(some_model, opened)
        first = made.precompute([*DOCUMENTS, DOCUMENTS[0], tokens(40, 7)])
        assert (first.chunks, first.stored, first.existing, first.short, first.failed) == (6, 5, 0, 1, 0)
        assert first.nbytes > 0
        puts = sum(call.operation == "put" for call in kept.calls)
        again = made.precompute(DOCUMENTS)
        assert (again.chunks, again.stored, again.existing, again.nbytes) == (5, 0, 5, 0)
        assert sum(call.operation == "put" for call in kept.calls) == puts
    with store(kept) as opened:  # another process
        assert blender(some_model, opened).blend([*ORDER, QUESTION])[1].hits == 4


def test_what_cannot_be_written_is_said(some_model: Any) -> None:
    kept = backend()
    with store(kept) as opened:
        made = blender(some_model, opened)
        kept.push(Fault.error(), operation="put")
        found = made.precompute(DOCUMENTS[:2])
        assert (found.stored, found.failed) == (2, 1)
        assert found.error is not None
        assert made.precompute(DOCUMENTS[:2]).stored == 1
    with store(backend(), buffer_pool_bytes=1 << 20) as opened:
        found = blender(some_model, opened).precompute([tokens(50, 1200)], timeout=0.2)
        assert found.failed == 1
        assert "buffer" in str(found.error) or "pool" in str(found.error)


def test_the_least_length(some_model: Any) -> None:
    with store(backend()) as opened:
        made = blender(some_model, opened, {"blend_min_tokens": 42})
        assert (made.precompute(DOCUMENTS).stored, made.precompute(DOCUMENTS).short) == (3, 1)
        report = made.blend([*DOCUMENTS, QUESTION])[1]
        assert (report.hits, report.short, report.misses) == (3, 1, 0)


def test_documents_that_are_all_too_short_are_told_of_once(
    some_model: Any, caplog: pytest.LogCaptureFixture
) -> None:  # fmt: skip
    def told(some: Any, documents: Any) -> list[str]:
        caplog.clear()
        some.precompute(documents)
        return [record.getMessage() for record in caplog.records if "blend_min_tokens" in record.getMessage()]

    with store(backend()) as opened, caplog.at_level("WARNING", "kvstore.blend"):
        made = blender(some_model, opened, {"blend_min_tokens": 42})
        assert told(made, DOCUMENTS) == [], "some are long enough"
        assert told(made, []) == []
        assert told(blender(some_model, opened, {"blend_min_tokens": 44}), DOCUMENTS) == [], "one is long enough"
        made = blender(some_model, opened, {"blend_min_tokens": 45})
        assert told(made, DOCUMENTS) == [
            "no document is stored: all of them have fewer tokens (the longest 44) than the option "
            "blend_min_tokens=45; set it lower"
        ]
        assert told(made, DOCUMENTS) == [], "once"


# Finding.


def test_runs_of_documents_are_found_anywhere(some_model: Any) -> None:
    with store(backend()) as opened:
        made = blender(some_model, opened)
        made.precompute(DOCUMENTS)
        prompt = torch.cat([PREFIX, tokens(60, 7), DOCUMENTS[1], tokens(61, 3), DOCUMENTS[3][5:35], QUESTION])
        cache, report = made.blend(prompt, ratio=1.0)
        assert_like_prefill(some_model, cache, report, prompt)
        assert report.reused == len(PREFIX) + len(DOCUMENTS[1]) + 30
        assert report.question == len(QUESTION)
        # A part of a record is moved from where it was.
        cache, report = made.blend(prompt, ratio=0.0)
        form, begin = form_of(made), len(prompt) - len(QUESTION) - 30
        k, v = form.compute(DOCUMENTS[3].numpy())[2]
        where = form.place(DOCUMENTS[3].numpy(), begin, first=5, length=30)
        moved = form.moving(where)(k[0].transpose(0, 1)[5:35].contiguous())
        assert torch.equal(cache.layers[2].keys[0, :, begin : begin + 30].transpose(0, 1), moved)
        assert torch.equal(cache.layers[2].values[0, :, begin : begin + 30], v[0, :, 5:35])
        # In a part that is not stored as a whole, too; never in the question.
        report = made.blend([torch.cat([tokens(62, 4), DOCUMENTS[0]]), DOCUMENTS[1]], ratio=0.3)[1]
        assert (report.reused, report.misses) == (len(PREFIX) + len(DOCUMENTS[0]), 0)
        assert report.question == len(DOCUMENTS[1])


class Letters:
    """A tokenizer: a token per character, and a BOS before every text that asks for one."""

    def __call__(self, text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
        ids = [ord(letter) for letter in text]
        return {"input_ids": [1, *ids] if add_special_tokens else ids}


def test_text_with_separators(some_model: Any) -> None:
    with store(backend()) as opened:
        made = blender(some_model, opened, tokenizer=Letters(), prefix="You are a helpful assistant.")
        one, two = "the first of two documents", "and this is the second document"
        assert made.precompute([f"{one} # # {two}"]).stored == 3
        text = f"{two} # # {one} # # which is the first?"
        for prompt in (text, [text], [two, " # # ", one, " # # ", "which is the first?"]):
            cache, report = made.blend(prompt, ratio=1.0)
            assert bytes(report.input_ids[0].tolist()) == b"\x01You are a helpful assistant." + text.encode()
            assert_like_prefill(some_model, cache, report, report.input_ids[0])
            assert (report.hits, report.misses) == (3, 0)
            assert report.question == len("which is the first?")
        assert made.key(one) == form_of(made).key(torch.tensor([ord(c) for c in one]).numpy())


# Control.


def test_the_controller_decides_by_the_speeds(some_model: Any) -> None:
    """The measured link is that of a dictionary, so what is given is looked at in a fresh Blender each time."""
    kept = backend()
    with store(kept) as opened:
        blender(some_model, opened).precompute(DOCUMENTS)
    policy = Policy(text="time", pointers=False, safety=1.0)
    prefill_model = PrefillModel(1.0)  # so slow that a busy machine does not matter
    ratios = {}
    for rate in (10.0, 2500.0, 1e6):
        with store(kept) as opened:
            made = blender(some_model, opened, prefill=prefill_model, bytes_per_s=rate, policy=policy)
            cache, report = made.blend([*ORDER, QUESTION])
            assert report.bytes_per_s == rate
            ratios[rate] = report.ratio
            if rate == 10.0:
                assert (report.hits, report.left, report.reused) == (0, 4, 0)
                assert_like_prefill(some_model, cache, report)
            else:
                assert (report.hits, report.left) == (4, 0)
    assert ratios[10.0] == 1.0
    assert 0.15 < ratios[2500.0] < 1.0
    assert ratios[1e6] == 0.15


def test_speeds_are_measured(some_model: Any) -> None:
    with store(backend()) as opened:
        made = blender(some_model, opened)
        before = made.prefill
        made.precompute(DOCUMENTS)
        assert before is None
        assert made.prefill.seconds(0, 100) > 0
        assert made.blend([*ORDER, QUESTION])[1].bytes_per_s is None
        report = made.blend([*ORDER, QUESTION])[1]
        assert report.bytes_per_s is not None
        assert report.expected_s < 60


def test_records_with_a_codec(some_model: Any) -> None:
    with store(backend(), remote_serde="int8") as opened:
        made = blender(some_model, opened)
        assert made.precompute(DOCUMENTS).stored == 5
        logits, _ = prefill(some_model, WHOLE)
        cache, report = made.blend([*ORDER, QUESTION], ratio=0.5)
        assert report.hits == 4
        assert cache.get_seq_length() == len(WHOLE) - 1
        assert float((report.logits - logits[-1]).norm() / logits[-1].norm()) < 0.5


def test_bf16() -> None:
    some = model(dtype=torch.bfloat16)
    with store(backend()) as opened:
        made = blender(some, opened)
        made.precompute(DOCUMENTS)
        cache, report = made.blend([*ORDER, QUESTION], ratio=1.0)
        assert cache.layers[0].keys.dtype == torch.bfloat16
        logits, _ = prefill(some, WHOLE)
        assert float((report.logits - logits[-1]).float().norm() / logits[-1].float().norm()) < 0.05
        assert len(greedy(some, report.input_ids, **made.cache_argument(cache))) == 6


# Options.


def test_blending_must_be_switched_on(some_model: Any) -> None:
    with store(backend()) as opened, pytest.raises(ConfigError, match="enable_blending"):
        Blender(some_model, opened)
    with store(backend(), enable_blending=True, blend_check_layers=2, blend_recompute_ratios="0.3") as opened:
        made = Blender(some_model, opened)
        assert made.settings.measure == "v"
        assert made.settings.check_layers == (2,)
        assert made.settings.ratios == (0.3,)
        config = load_config(
            "memory://", env={}, enable_blending=True, blend_measure="kv", blend_recompute_ratios=[0.3]
        )
        assert Blender(some_model, opened, config).settings.measure == "kv"


@pytest.mark.parametrize(
    ("options", "message"),
    [({"blend_recompute_ratio": 0.1}, "blend_recompute_ratios"), ({"chunk_size": 16}, "chunk_size"),
     ({"blend_recompute_ratios": 1.5}, "blend_recompute_ratios"), ({"blend_check_layers": [0]}, "blend_check_layers"),
     ({"blend_check_layers": [LAYERS]}, "blend_check_layers"), ({"blend_measure": "q"}, "blend_measure"),
     ({"blend_selection": "best"}, "blend_selection"), ({"blend_form": "x"}, "blend_form"),
     ({"blend_min_tokens": 0}, "blend_min_tokens"), ({"enable_blending": False}, "enable_blending"),
     ({"blend_recompute_ratios": [0.1, 0.2], "blend_check_layers": [1, 2]}, "blend_recompute_ratios")],
)  # fmt: skip
def test_options_that_make_no_sense_are_named(some_model: Any, options: dict[str, object], message: str) -> None:
    with store(backend()) as opened, pytest.raises(ConfigError, match=message):
        blender(some_model, opened, options)


def test_arguments_that_make_no_sense(some_model: Any) -> None:
    with store(backend()) as opened:
        made = blender(some_model, opened)
        bad_calls: list[tuple[Any, dict[str, Any]]] = [
            ([], {}), (["text"], {}), ([[5000]], {}), (7, {}), (b"x", {}), ([DOCUMENTS[0], QUESTION], {"ratio": 1.5}),
            ([DOCUMENTS[0], QUESTION], {"slo_s": 0.0}), ([[1.5]], {}),
        ]  # fmt: skip
        for parts, more in bad_calls:
            with pytest.raises(ConfigError):
                made.blend(parts, **more)
        for documents in ("text", [[0.5]], ["text"]):
            with pytest.raises(ConfigError):
                made.precompute(documents)
        with pytest.raises(ConfigError, match="bytes_per_s"):
            blender(some_model, opened, bytes_per_s=-1.0)
    with pytest.raises(ConfigError, match="Store"):
        Blender(some_model, object(), OPTIONS)  # type: ignore[arg-type]


def test_a_selector_of_ones_own(some_model: Any) -> None:
    class Last:
        compares = False

        def scores(self, evidence: Evidence) -> torch.Tensor:
            return evidence.positions

    with store(backend()) as opened:
        made = blender(some_model, opened, selection=Last())
        made.precompute(DOCUMENTS)
        assert made.settings.selection.__class__ is Last
        cache, _ = made.blend([*ORDER, QUESTION], ratio=0.1)
        again, _ = blender(some_model, opened).blend([*ORDER, QUESTION], ratio=0.1)
        assert not torch.equal(cache.layers[-1].keys, again.layers[-1].keys)


def test_a_slow_link_is_tried_again_after_a_while(some_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = backend()
    with store(kept) as opened:
        blender(some_model, opened).precompute(DOCUMENTS)
    with store(kept) as opened:
        made = blender(some_model, opened, prefill=PrefillModel(0.1), bytes_per_s=10.0)
        assert made.blend([*ORDER, QUESTION])[1].left == 4
        monkeypatch.setattr("kvstore.blend.blender._LOOK_AGAIN_S", -1.0)
        report = made.blend([*ORDER, QUESTION])[1]
        assert (report.hits, report.left) == (4, 0)
        monkeypatch.undo()
        assert made.blend([*ORDER, QUESTION])[1].hits == 4, "it is known to be fast now"


def test_what_the_pool_cannot_hold_is_computed(some_model: Any) -> None:
    kept = backend()
    long = [tokens(70 + n, 1800) for n in range(3)]  # 3 · 450 KiB in a layer
    with store(kept) as opened:
        assert blender(some_model, opened).precompute(long).stored == 4
    with store(kept, buffer_pool_bytes=1 << 20) as opened:
        cache, report = blender(some_model, opened).blend([*long, QUESTION], ratio=0.1)
        assert cache.get_seq_length() == 20 + 3 * 1800 + len(QUESTION) - 1
        # Half of the pool holds the prefix and one of the three.
        assert (report.hits, report.left, report.misses, report.lost) == (2, 2, 0, 0)
        assert sum(report.wait_s) < 5, "nothing waits for room that there never is"


def test_ids_that_the_model_does_not_know_are_not_stored(some_model: Any) -> None:
    kept = backend()
    with store(kept) as opened, pytest.raises(ConfigError, match="5000"):
        blender(some_model, opened).precompute([DOCUMENTS[0], [5000] * 20])
    assert not any(call.operation == "put" for call in kept.calls), "it was noticed before anything was computed"
