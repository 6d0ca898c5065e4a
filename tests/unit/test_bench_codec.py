"""`kvstore-bench codec`: what is counted is what is stored, what is judged came out of it, bars are what they say."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import platform
import stat
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

import kvstore.codec
from kvstore.codec import codec_by_name, rans
from kvstore.codec.base import Codec, Decoder, Encoded, SegmentInfo
from kvstore.errors import ConfigError, CorruptRecord
from kvstore.layout import KVLayout
from kvstore.record import parse_header
from kvstore_bench import cli, codec_profiles, texts
from kvstore_bench.codec import Plan, run_codec
from kvstore_bench.codec_entropy import modelled_bits, watched
from kvstore_bench.codec_figures import best_level, figures_of, unjudged
from kvstore_bench.codec_lmcache import LMCacheProcess
from kvstore_bench.codec_measure import Pass, Scheme, measure
from kvstore_bench.codec_page import page, plot
from kvstore_bench.codec_records import chunks_of, refines_alike, store
from kvstore_bench.codec_report import CodecReport, QualityRow, SpeedRow
from kvstore_bench.codec_speed import a_core, measure_speed, one_core
from kvstore_bench.progress import telling
from kvstore_bench.quality import Score, summarise
from kvstore_bench.report import Figure

from .codec_profile_support import small_profile

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from kvstore.testing.models import tiny_model  # noqa: E402 - after the skip
from kvstore_bench.quality import Judge  # noqa: E402

TOKENS, NEXT = 40, 8


class Halves(Codec):
    """Level 0 holds the upper byte of each element, level 1 the lower one: coarse, then exact."""

    name: ClassVar[str] = "halves"
    number: ClassVar[int] = 200
    lossless: ClassVar[bool] = False
    levels = 2

    def encode(self, raw: memoryview, about: SegmentInfo) -> Sequence[Encoded]:
        both = np.frombuffer(raw, np.uint8).reshape(-1, 2)
        return [Encoded(200, level, memoryview(both[:, 1 - level].tobytes())) for level in range(2)]

    def decode_into(self, parts: Sequence[memoryview], dst: memoryview) -> None:
        out = np.frombuffer(dst, np.uint8).reshape(-1, 2)
        out[:] = 0
        for level, part in enumerate(parts):
            out[:, 1 - level] = np.frombuffer(part, np.uint8)

    def decoder(self, dst: memoryview) -> Decoder:
        return HalvesDecoder(dst, self)


class HalvesDecoder(Decoder):
    def __init__(self, dst: memoryview, codec: Halves) -> None:
        self.dst, self.codec, self.parts = dst, codec, list[memoryview]()

    def feed(self, part: memoryview) -> None:
        self.parts.append(part)
        self.codec.decode_into(self.parts, self.dst)


class Forgetful(Halves):
    """Says that it is lossless, and its refinement in place forgets the coarse half."""

    name: ClassVar[str] = "forgetful"
    number: ClassVar[int] = 201
    lossless: ClassVar[bool] = True

    def encode(self, raw: memoryview, about: SegmentInfo) -> Sequence[Encoded]:
        return [Encoded(201, each.level, each.data) for each in super().encode(raw, about)]

    def decoder(self, dst: memoryview) -> Decoder:
        decoder = HalvesDecoder(dst, self)
        decoder.parts = [memoryview(bytes(len(dst) // 2))]
        return decoder


@pytest.fixture(autouse=True)
def own_codecs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(kvstore.codec._loaded, 200, Halves())
    monkeypatch.setitem(kvstore.codec._loaded, 201, Forgetful())


@pytest.fixture(scope="module")
def judge() -> Judge:
    return Judge(tiny_model("llama"))


def ids(count: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(3, 1000, count).tolist())


# Texts.


def words(text: str) -> list[int]:
    return [hash(word) for word in text.split()]


def grams(windows: Sequence[Sequence[int]], size: int) -> set[tuple[int, ...]]:
    return {tuple(each[at : at + size]) for each in windows for at in range(len(each) - size + 1)}


@pytest.mark.parametrize("kind", ["prose", "code"])
def test_what_is_judged_shares_no_text_with_what_profiles_are_made_of(kind: str) -> None:
    documents = {"prose": texts.prose_passages, "code": texts.code_passages}[kind]()
    some = texts.load_corpus(kind, documents, words, window=500, held_out=20, profile=40)
    assert len(some.held_out) == 20
    assert len(some.profile) >= 20
    assert {len(each) for each in some.held_out + some.profile} == {500}
    assert not grams(some.held_out, 60) & grams(some.profile, 60)
    assert len(set(some.held_out)) == 20
    again = texts.load_corpus(kind, documents, words, window=500, held_out=20, profile=40)
    assert again == some
    other = texts.load_corpus(kind, documents, words, window=500, held_out=20, profile=40, seed=1)
    assert other.held_out != some.held_out


def test_repeated_passages_count_once() -> None:
    passage = " ".join(f"word{number}" for number in range(50))
    documents = [[passage, f"tail {number} " * 20] for number in range(30)]
    some = texts.load_corpus("x", documents, words, window=40, held_out=3, profile=10)
    flat = [word for each in some.held_out + some.profile for word in each]
    assert flat.count(hash("word7")) <= 1
    assert flat.count(hash("tail")) > 100


def test_own_texts(tmp_path: Path) -> None:
    file = tmp_path / "own.txt"
    file.write_text("\n\n".join(f"passage {number} of a long enough text" for number in range(100)))
    documents = texts.file_passages([file])
    some = texts.load_corpus("texts", documents, words, window=100, held_out=2, profile=0)
    assert len(some.held_out) == 2
    with pytest.raises(ConfigError, match="too short: 9 held-out windows of 100"):
        texts.load_corpus("texts", documents, words, window=100, held_out=9, profile=1)
    with pytest.raises(ConfigError, match="cannot be read"):
        texts.file_passages([tmp_path / "missing.txt"])


# Packaged profiles.

INDEX = json.loads((codec_profiles.PACKAGED / "index.json").read_text("utf-8"))


def smollm2(**more: Any) -> Any:
    """What a profile is compared with: a name, and the shape of SmolLM2-135M."""
    config = {"num_hidden_layers": 30, "num_key_value_heads": 3, "num_attention_heads": 9, "hidden_size": 576, **more}
    return SimpleNamespace(name_or_path="HuggingFaceTB/SmolLM2-135M-Instruct", config=SimpleNamespace(**config))


@pytest.mark.parametrize("codec", ["cachegen", "kvt"])
def test_packaged_profiles_serve_the_model_that_they_are_of(codec: str) -> None:
    profile, described = codec_profiles.packaged_profile(codec, smollm2(), [ids(100)])
    assert (profile.codec, profile.id, profile.model) == (codec, INDEX["files"][codec]["id"], "SmolLM2-135M-Instruct")
    assert profile.layout == KVLayout(30, 3, 64)
    assert described.startswith(f"{texts.PROFILE_LISTS} lists of {texts.PROFILE_TOKENS} tokens")
    levels = [each.codec.levels for each in codec_profiles.schemes_of(codec, profile)]
    assert levels == {"cachegen": [1, 1, 1, 1], "kvt": [3]}[codec]


def test_packaged_profiles_are_refused_where_they_do_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = np.load(codec_profiles.PACKAGED / INDEX["texts"]["file"])
    assert seen.shape == (texts.PROFILE_LISTS, texts.PROFILE_TOKENS)
    other = smollm2()
    other.name_or_path = "org/other"
    for model, judged, said in (
        (other, [], "is not of org/other"),
        (smollm2(num_hidden_layers=12), [], "30 layers"),
        (smollm2(), [ids(50), seen[4][100:141].tolist()], "has seen 2 runs of tokens of what is judged"),
    ):
        with pytest.raises(ConfigError, match=said):
            codec_profiles.packaged_profile("kvt", model, judged)
    with pytest.raises(ConfigError, match="names no profile of int8"):
        codec_profiles.packaged_profile("int8", smollm2(), [])
    for name in ("index.json", INDEX["texts"]["file"]):
        (tmp_path / name).write_bytes((codec_profiles.PACKAGED / name).read_bytes())
    monkeypatch.setattr(codec_profiles, "PACKAGED", tmp_path)
    with pytest.raises(ConfigError, match="No such file"):
        codec_profiles.packaged_profile("kvt", smollm2(), [])
    small_profile().save(tmp_path / INDEX["files"]["kvt"]["file"])
    with pytest.raises(ConfigError, match="not profile"):
        codec_profiles.packaged_profile("kvt", smollm2(), [])


def test_where_a_profile_is_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, lists, told = tiny_model("llama"), [ids(60, 1), ids(60, 2)], list[str]()
    given: dict[str, Any] = {"model_digest": "m", "folder": tmp_path, "unseen": [ids(80)], "tell": told.append}
    made, origin = codec_profiles.profile_for("cachegen", model, None, lists, **given)
    assert origin.startswith(f"{made}: made in this run of 2 lists of 60 tokens")
    assert "the packaged one does not serve" in origin
    assert "takes a minute or more" in told[0]
    assert told[1:] == ["context 1 of 2", "context 2 of 2"]
    again, origin = codec_profiles.profile_for("cachegen", model, None, lists, **given)
    assert again == made
    assert origin.startswith(f"{made}: found as {tmp_path}")
    assert len(told) == 3
    fits = codec_profiles.packaged_profile("cachegen", smollm2(), [])
    monkeypatch.setattr(codec_profiles, "packaged_profile", lambda codec, model, unseen: fits)
    taken, origin = codec_profiles.profile_for("cachegen", model, None, lists[::-1], **given)
    assert taken == fits[0]
    assert origin == f"{taken}: packaged with kvstore-bench, made of {fits[1]}"
    _, origin = codec_profiles.profile_for("cachegen", model, None, lists[::-1], **{**given, "unseen": None})
    assert origin.split("; ")[0].endswith("of the profile texts")
    assert "packaged" not in origin


@pytest.mark.model
def test_packaged_profiles_are_of_the_profile_texts() -> None:
    """What lies beside them is what `texts` deals to profiles, and nothing that it keeps back."""
    from transformers import AutoTokenizer

    from kvstore.testing.models import smollm2_folder

    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder())

    def tokenise(text: str) -> list[int]:
        found: list[int] = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        return found

    seen = np.load(codec_profiles.PACKAGED / INDEX["texts"]["file"]).tolist()
    made = texts.profile_lists(tokenise)
    assert [len(each) for each in made] == [texts.PROFILE_TOKENS] * texts.PROFILE_LISTS
    if platform.python_version() in INDEX["texts"]["what"]:  # the documentation is this release's
        assert seen == made
    windows = {"window": texts.JUDGED_WINDOW, "held_out": texts.JUDGED_WINDOWS, "profile": 0}
    kept_back = texts.load_corpus("prose", texts.prose_passages(), tokenise, **windows).held_out
    assert texts.shared_runs(made, kept_back) == 0
    stream = texts.load_corpus("prose", texts.prose_passages(), tokenise, window=512, held_out=6, profile=0).held_out
    assert texts.shared_runs(made, stream) == 0


def test_what_takes_long_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    shown: list[tuple[str, int, int]] = []
    telling(lambda *each: shown.append(each), "profile of kvt", 2, 8)("context 1 of 9")
    assert shown == [("profile of kvt: context 1 of 9", 2, 8)]
    assert capsys.readouterr().err == ""
    telling(None, "profile of kvt")("context 1 of 9")
    assert capsys.readouterr().err == "kvstore-bench: profile of kvt: context 1 of 9\n"


# Quality.


def test_the_reference_is_the_model_itself(judge: Judge) -> None:
    context = ids(TOKENS + NEXT + 1)
    reference = judge.refer(context, TOKENS)
    with torch.inference_mode():
        whole = judge.model(torch.tensor([context[:-1]])).logits[0, TOKENS:].float().log_softmax(-1)
    assert reference.log_probs.shape == (NEXT, 1024)
    assert torch.allclose(reference.log_probs, whole, atol=0.1)  # all but for the cache's bfloat16
    targets = torch.tensor(context[TOKENS + 1 :])[:, None]
    assert reference.nll == pytest.approx(-float(whole.gather(1, targets).mean()), abs=0.05)
    assert [len(each) for each in reference.segments] == [judge.layout.segment_bytes(TOKENS, "bfloat16")] * 2


def test_scores(judge: Judge) -> None:
    reference = judge.refer(ids(TOKENS + NEXT + 1), TOKENS)
    assert judge.score(reference, reference.segments) == Score(0.0, 0.0, 1.0)
    coarse = [each.copy() for each in reference.segments]
    for each in coarse:
        each.reshape(-1, 2)[:, 0] = 0
    score = judge.score(reference, coarse)
    log_probs = judge._continue(coarse, TOKENS, reference.ids)
    known = reference.log_probs.double()
    assert score.kl == pytest.approx(float((known.exp() * (known - log_probs.double())).sum(-1).mean()), rel=1e-4)
    assert score.kl > 0
    assert 0 <= score.top1 <= 1
    broken = [np.full_like(each, 0xFF) for each in reference.segments]  # nan
    assert judge.score(reference, broken).kl == math.inf
    found = summarise([Score(0.01, 0.02, 1.0), Score(0.03, -0.02, 0.5)])
    assert (found.contexts, found.top1) == (2, 0.75)
    assert found.kl == pytest.approx(0.02)
    assert found.dnll == pytest.approx(0.0)
    assert found.kl_se == pytest.approx(0.01)


# Records.


def test_bytes_are_those_of_the_records(judge: Judge) -> None:
    reference = judge.refer(ids(TOKENS + NEXT + 1), TOKENS)
    stored = store(Halves(), reference.segments, judge.layout, TOKENS, 16)
    assert [tokens for _, tokens in stored.records] == [16, 16, 8]
    assert stored.values == TOKENS * 2 * 2 * 2 * 16
    assert stored.nbytes == sum(len(record) for record, _ in stored.records) == stored.fetched(1)
    header = parse_header(stored.records[0][0])
    assert header.meta()["tokens"] == [0, 16]
    coarse = sum(each.length for each in header.segments if each.level == 0)
    assert stored.fetched(0) < stored.nbytes
    assert stored.fetched(0) > 2 * coarse + 96 * 3
    exact = stored.read(1)
    assert all(np.array_equal(one, other) for one, other in zip(exact, reference.segments, strict=True))
    for level, segment in enumerate((stored.read(0)[1], stored.read(1)[1])):
        upper, lower = segment.reshape(-1, 2)[:, 1], segment.reshape(-1, 2)[:, 0]
        assert np.array_equal(upper, reference.segments[1].reshape(-1, 2)[:, 1])
        assert lower.any() == bool(level)
    assert refines_alike(stored)
    assert not refines_alike(store(Forgetful(), reference.segments, judge.layout, TOKENS, 16))


def test_a_damaged_record_is_not_judged(judge: Judge) -> None:
    reference = judge.refer(ids(TOKENS + NEXT + 1), TOKENS)
    stored = store(codec_by_name("shuffle-zstd"), reference.segments, judge.layout, TOKENS, 16)
    record, tokens = stored.records[1]
    broken = record[:-3] + bytes([record[-3] ^ 1]) + record[-2:]
    with pytest.raises(CorruptRecord, match="checksum"):
        type(stored)([stored.records[0], (broken, tokens)], judge.layout).read(0)


def test_modelled_bits_are_those_of_the_symbols() -> None:
    counts = np.array([[60, 30, 10], [1, 1, 98]])
    distributions = rans.Distributions.from_counts(counts)
    symbols = np.random.default_rng(0).choice(3, (300, 16), p=[0.6, 0.3, 0.1]).astype(np.uint8)
    classes = np.zeros(16, np.uint16)
    with watched() as seen:
        stream = rans.encode(symbols, classes, distributions)
    assert len(seen) == 1
    assert seen[0].stream == stream
    share = distributions.frequencies[0] / 4096
    assert seen[0].bits == pytest.approx(-np.log2(share)[symbols].sum(), rel=1e-5)
    assert 8 * len(stream) > seen[0].bits
    rans.encode(symbols, classes, distributions)  # nobody listens any more
    assert len(seen) == 1
    assert modelled_bits(codec_by_name("shuffle-zstd"), [], KVLayout(1, 1, 8), 0, 16) is None


# Everything together.


def a_pass(**more: Any) -> Pass:
    return Pass("prose", [ids(TOKENS + NEXT + 1, seed) for seed in range(3)], TOKENS, 16, **more)


def test_measuring(judge: Judge) -> None:
    schemes = [Scheme("int8", Halves()), Scheme("shuffle-zstd", codec_by_name("shuffle-zstd"))]
    rows, references = measure(judge, schemes, a_pass())
    assert [(row.codec, row.level) for row in rows] == [("int8", "0"), ("int8", "1"), ("shuffle-zstd", "0")]
    coarse, exact, lossless = rows
    for row in rows:
        assert row.verified
        assert row.contexts == 3
        assert row.bits_per_value == pytest.approx(8 * row.nbytes / (3 * TOKENS * 128))
    stored = [store(Halves(), each.segments, judge.layout, TOKENS, 16) for each in references]
    assert coarse.nbytes == sum(each.fetched(0) for each in stored)
    assert coarse.stored_nbytes == exact.nbytes == sum(each.nbytes for each in stored)
    assert lossless.bytes_vs_int8 == pytest.approx(coarse.nbytes / lossless.nbytes)
    scores = [judge.score(judge.refer(each, TOKENS), some.read(0)) for each, some in
              zip(a_pass().windows, stored, strict=True)]  # fmt: skip
    assert coarse.kl == pytest.approx(summarise(scores).kl)
    assert coarse.kl is not None
    assert coarse.kl > 0
    assert (exact.kl, exact.dnll, exact.top1) == (0.0, 0.0, 1.0)
    assert (lossless.kl, lossless.dnll, lossless.top1) == (0.0, 0.0, 1.0)
    assert all(each.log_probs is None for each in references)


def test_levels_that_are_records_of_their_own(judge: Judge) -> None:
    schemes = [Scheme("x", codec_by_name("shuffle-zstd"), 0), Scheme("x", codec_by_name("lz4"), 1)]
    rows, _ = measure(judge, schemes, a_pass(judged=False))
    assert [(row.codec, row.level, row.kl) for row in rows] == [("x", "0", None), ("x", "1", None)]
    assert rows[0].nbytes != rows[1].nbytes


def test_what_comes_back_wrong_is_told(judge: Judge) -> None:
    rows, _ = measure(judge, [Scheme("forgetful", Forgetful())], a_pass())
    assert [row.verified for row in rows] == [False, False]
    report = CodecReport("codec", quality=rows)
    assert not report.ok
    assert "Not everything verified" in page(report)


SMALL = Plan(contexts=2, code_contexts=1, group_contexts=1, context_tokens=32, continuation=4, chunk=16, group=48,
             speed_chunks=2, repeats=2, profile_tokens=36)  # fmt: skip


def test_a_run(judge: Judge, tmp_path: Path) -> None:
    given: list[Sequence[int]] = []

    def schemes(token_lists: Sequence[Sequence[int]]) -> list[Scheme]:
        given.extend(token_lists)
        return [Scheme("int8", Halves()), Scheme("lz4", codec_by_name("lz4"))]

    corpora = [
        texts.Corpus("prose", (ids(53, 9),), tuple(ids(SMALL.window, seed) for seed in range(2))),
        texts.Corpus("code", (), (ids(SMALL.window, 5),)),
    ]
    told: list[tuple[str, int, int]] = []
    report = run_codec(judge, schemes, corpora, SMALL, progress=lambda *each: told.append(each))
    assert given == [ids(53, 9)[:36]]
    assert report.ok
    assert {(row.text, row.record_tokens, row.contexts) for row in report.quality} == {
        ("prose", 16, 2), ("code", 16, 1), ("prose", 48, 1),
    }  # fmt: skip
    assert {(row.codec, row.record_tokens) for row in report.speeds} == {
        (codec, tokens) for codec in ("memcpy", "int8", "lz4") for tokens in (16, 48)
    }
    assert told[0] == ("profiles", 0, told[0][2])
    assert all(done <= total for _, done, total in told)
    report.write_json(str(tmp_path / "out.json"))
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["ok"] is True
    assert {row["kind"] for row in found["rows"]} == {"quality", "speed"}
    report.write_html(str(tmp_path / "out.html"))
    html = (tmp_path / "out.html").read_text()
    assert "<svg" in html
    assert "<script" not in html
    assert "prefers-color-scheme:dark" in html
    report.print_table(sys.stdout)


# Figures.


def row(codec: str, level: str, nbytes: int, kl: float, dnll: float, **more: Any) -> QualityRow:
    fields: dict[str, Any] = {
        "codec": codec, "level": level, "text": "prose", "contexts": 20, "tokens": 1000, "record_tokens": 256,
        "nbytes": nbytes, "stored_nbytes": nbytes, "bits_per_value": nbytes / 100, "bytes_vs_int8": 800 / nbytes,
        "kl": kl, "kl_se": 0.0, "dnll": dnll, "dnll_se": 0.0, "top1": 0.9, "entropy_ratio": 1.02, "raw_segments": 0,
        "lossless": False, "verified": True, **more,
    }  # fmt: skip
    return QualityRow(**fields)


def figures(rows: Sequence[QualityRow], speeds: Sequence[SpeedRow] = ()) -> tuple[dict[str, Any], list[str]]:
    notes: list[str] = []
    made = figures_of(rows, speeds, text="prose", prefill_tokens_s=500.0, values_per_token=1000, notes=notes)
    return dict(made), notes


def test_the_level_that_figures_are_of() -> None:
    rows = [
        row("int8", "0", 800, 0.001, 0.0),
        row("kvt", "0", 100, 0.09, 0.01),
        row("kvt", "1", 150, 0.03, 0.04),
        row("kvt", "2", 200, 0.04, 0.03),
        row("kvt", "3", 300, 0.001, 0.0),
        row("kvt", "2", 190, 0.05, 0.0, text="code"),
        row("kvt", "2", 1100, 0.03, 0.0, record_tokens=1536, entropy_ratio=1.01),
        row("lmcache", "default", 400, 0.1, 0.1),
        row("lmcache", "32 bins", 500, 0.002, 0.0),
    ]
    speeds = [
        SpeedRow("kvt", "2", 256, 1024, 3, 120.0, 90.0, 0, 0, 0),
        SpeedRow("lmcache", "default", 256, 1024, 3, 10.0, 9.0, 0, 0, 0),
    ]
    found, notes = figures(rows, speeds)
    value = {name: each.value for name, each in found.items()}
    assert value["codec.kvt.bytes_vs_int8"] == 4.0
    assert value["codec.kvt.kl"] == 0.04
    assert value["codec.kvt.kl_code"] == 0.05
    assert value["codec.kvt.entropy_ratio.256"] == 1.02
    assert value["codec.kvt.entropy_ratio.1536"] == 1.01
    assert value["codec.kvt.bytes_vs_lmcache"] == 100 / 400
    assert value["codec.kvt.bytes_vs_lmcache_32_bins"] == 300 / 500
    assert value["codec.kvt.speed_vs_lmcache"] == 10.0
    assert value["codec.kvt.decode_vs_prefill"] == pytest.approx(90e6 / 1000 / 500)
    assert found["codec.kvt.bytes_vs_int8"].met is True
    assert found["codec.kvt.encode_msym_s"].met is True
    assert found["codec.kvt.decode_msym_s"].met is False
    assert found["codec.kvt.bytes_vs_lmcache"].better == "lower"
    assert any("level 2, the smallest of 4" in note for note in notes)


def test_no_level_good_enough_is_no_size() -> None:
    rows = [row("int8", "0", 800, 0.0, 0.0), row("kvt", "0", 100, 0.05, 0.0), row("kvt", "1", 200, 0.01, 0.031)]
    found, notes = figures(rows)
    assert best_level(rows, "kvt", "prose") is None
    assert found["codec.kvt.bytes_vs_int8"].value == 0
    assert found["codec.kvt.bytes_vs_int8"].met is False
    assert any("no level reaches" in note for note in notes)
    rows = [row("int8", "0", 800, 0.0, 0.0), row("cachegen", "0", 100, 0.05, 0.0)]
    found, _ = figures(rows)
    assert found["codec.cachegen.bytes_vs_int8"].value == 0
    assert found["codec.cachegen.bytes_vs_int8_dnll"].value == 8.0  # the bar for it is ΔNLL alone


def test_few_contexts_judge_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    def rows(contexts: int) -> list[QualityRow]:
        return [
            row("int8", "0", 800, 0.002, 0.0, contexts=contexts),
            row("cachegen", "0", 300, 0.05, 0.09, contexts=contexts),
            row("kvt", "0", 100, 0.09, 0.2, contexts=contexts),
            row("kvt", "1", 200, 0.02, 0.05, contexts=contexts),
            row("lmcache", "default", 400, 0.1, 0.1, contexts=contexts),
        ]

    found, notes = figures(rows(7))
    assert found["codec.kvt.bytes_vs_int8"].value == 4.0  # of level 1, whose KL is the least
    assert found["codec.kvt.kl"].value == 0.02
    by_quality = ("kvt.bytes_vs_int8", "kvt.kl", "kvt.dnll", "kvt.bytes_vs_lmcache", "cachegen.bytes_vs_int8")
    assert [found[f"codec.{name}"].bar for name in by_quality] == [None] * 5
    assert "codec.cachegen.bytes_vs_int8_dnll" not in found
    assert found["codec.kvt.entropy_ratio.256"].bar == 1.1
    assert not any("no level reaches" in note for note in notes)
    (said,) = [note for note in notes if "too few" in note]
    assert "7 of prose, at least 8" in said
    assert "(kvt 1)" in said
    report = CodecReport("codec", quality=rows(7), figures=found, unjudged=unjudged(rows(7), found, "prose"))
    report.print_table(sys.stdout)
    shown = capsys.readouterr().out
    assert "codec.kvt.kl = 0.02 nats  (too few contexts to judge)" in shown
    assert "codec.kvt.bits_per_value = 2 bits\n" in shown
    assert "standard error" in shown

    found, notes = figures(rows(8))
    assert found["codec.kvt.bytes_vs_int8"].value == 0
    assert [found[f"codec.{name}"].bar for name in by_quality] == [3.5, 0.04, 0.03, 0.6, 2.2]
    assert not any("too few" in note for note in notes)
    assert unjudged(rows(8), found, "prose") == []


def test_noise_excuses_speeds_only() -> None:
    report = CodecReport("codec", machine={"ceiling_spread": 0.5})
    report.figures = {
        "codec.kvt.kl": Figure(0.05, "nats", "lower", 0.04),
        "codec.kvt.decode_msym_s": Figure(50.0, "Msym/s", "higher", 100.0),
        "codec.kvt.dnll": Figure(0.01, "nats", "lower", 0.03),
    }
    texts_of = [report.bar_text(name, figure) for name, figure in report.figures.items()]
    assert texts_of == ["bar ≤ 0.04: NOT met", "bar ≥ 100: not met in this noisy run", "bar ≤ 0.03: met"]
    assert report.bars_missed.startswith("bars not met: codec.kvt.kl, codec.kvt.decode_msym_s;")


# Speed.


def test_speed_is_of_one_core(judge: Judge) -> None:
    before = os.sched_getaffinity(0)
    with one_core(a_core()):
        assert os.sched_getaffinity(0) == {max(before)}
    assert os.sched_getaffinity(0) == before
    reference = judge.refer(ids(TOKENS + NEXT + 1), TOKENS)
    chunks = chunks_of(reference.segments, TOKENS, 16)
    rows = measure_speed([(Scheme("halves", Halves()), 1)], chunks, judge.layout, repeats=3)
    assert [(each.codec, each.level, each.tokens, each.record_tokens) for each in rows] == [
        ("memcpy", "", 40, 16), ("halves", "1", 40, 16),
    ]  # fmt: skip
    for each in rows:
        assert each.encode_msym_s > 0
        assert each.decode_cpu_msym_s > 0


# The page.


def test_the_plot_has_a_point_per_level() -> None:
    rows = [row("kvt", "0", 100, 0.09, 0.01), row("kvt", "1", 200, 0.03, 0.0), row("int8", "0", 800, 0.0, 0.0),
            row("<x>", "0", 500, 0.01, 0.0), row("lossless", "0", 1080, 0.0, 0.0, lossless=True)]  # fmt: skip
    svg = plot(rows, "prose")
    assert svg.count("<title>") == 4
    assert svg.count("<polyline") == 1
    assert "&lt;x&gt;" in svg
    assert "<x>" not in svg
    assert "nan" not in svg


# LMCache's side.

STUB = """#!{python}
import json, sys
for line in sys.stdin:
    asked = json.loads(line)
    if asked["do"] == "open":
        answer = {{"version": "9", "k_bins": [32, 32, 16], "v_bins": [16, 16, 16]}}
    elif asked["do"] == "through":
        data = open(asked["path"], "rb").read()
        open(asked["out"], "wb").write(bytes(255 - each for each in data))
        answer = {{"nbytes": len(data) // 4}}
    elif asked["do"] == "once":
        answer = {{"encode_s": 1.0, "decode_s": 2.0, "encode_cpu_s": 0.5, "decode_cpu_s": 1.5}}
    else:
        answer = {{"error": "no such thing"}} if asked["name"] == "32 bins" else {{}}
    print(json.dumps(answer), flush=True)
"""


def test_lmcache_is_asked_in_its_own_interpreter(judge: Judge, tmp_path: Path) -> None:
    stub = tmp_path / "python"
    stub.write_text(STUB.format(python=sys.executable))
    stub.chmod(stub.stat().st_mode | stat.S_IXUSR)
    reference = judge.refer(ids(TOKENS + NEXT + 1), TOKENS)
    with LMCacheProcess(str(stub), tmp_path, judge.layout, chunk=16) as process:
        assert process.version == "9"
        assert process.bins["default"] == "K 2x32 1x16, V 3x16"
        nbytes, back = process.through("default", reference.segments)
        assert nbytes == sum(map(len, reference.segments)) // 4
        assert all(np.array_equal(255 - one, other) for one, other in zip(back, reference.segments, strict=True))
        rows, _ = measure(judge, [], a_pass(), lmcache=process)
        assert [(each.codec, each.level) for each in rows] == [("lmcache", "default"), ("lmcache", "32 bins")]
        assert rows[0].nbytes == 3 * TOKENS * 128 * 2 // 4
        process.load("default", [reference.segments])
        assert process.once() == (1.0, 2.0, 0.5, 1.5)
        with pytest.raises(kvstore.errors.PermanentError, match="no such thing"):
            process.load("32 bins", [reference.segments])


def test_an_interpreter_without_lmcache_is_said(tmp_path: Path, judge: Judge) -> None:
    with pytest.raises(ConfigError, match=r"does not run with .*ModuleNotFoundError: No module named 'lmcache'"):
        LMCacheProcess(sys.executable, tmp_path, judge.layout, chunk=16)
    with pytest.raises(ConfigError, match="--lmcache-python"):
        LMCacheProcess(str(tmp_path / "missing"), tmp_path, judge.layout, chunk=16)


# The command line.


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--codecs", "zip"], "unknown codec 'zip'; known: raw, lz4"),
        (["--codecs", ","], "no codec"),
        (["--contexts", "0"], "--contexts 0"),
        (["--profile", "/nowhere.profile"], "/nowhere.profile"),
        (["--json", "-", "--html", "-"], "standard output"),
    ],
)
def test_bad_arguments_are_named(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["codec", *words]) == 2
    assert said in capsys.readouterr().err


def test_plans() -> None:
    assert Plan.of(None, quick=False).contexts == 20
    assert Plan.of(30, quick=False).code_contexts == 15
    assert Plan.of(None, quick=True).contexts < 5
    assert Plan.of(None, quick=False).window == 1536 + 128 + 1


# The script for a GPU.


@pytest.fixture(scope="module")
def codec_gpu() -> Any:
    path = Path(__file__).parents[1] / "bench" / "codec_gpu.py"
    spec = importlib.util.spec_from_file_location("codec_gpu", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["codec_gpu"] = module
    spec.loader.exec_module(module)
    return module


def test_the_gpu_script_reads_its_command_line(codec_gpu: Any, tmp_path: Path) -> None:
    options = codec_gpu.parse([])
    assert (options.tokens, options.segments, options.kv, options.device) == ((256, 1536), 30, None, "cuda")
    file = tmp_path / "kv.npy"
    np.save(file, np.zeros((2, 8), np.uint8))
    options = codec_gpu.parse(["--tokens", "10,20", "--kv", str(file), "--json", "out", "--interpreter"])
    assert (options.tokens, options.kv, options.json, options.device) == ((10, 20), file, Path("out"), "cpu")
    for words, said in (
        (["--tokens", "x"], "--tokens 'x'"),
        (["--tokens", "0"], "at least 1"),
        (["--repeats", "0"], "at least 1"),
        (["--kv", str(tmp_path / "none")], "no such file"),
        (["--profile", str(tmp_path / "none")], "no such file"),
    ):
        with pytest.raises(ConfigError, match=said):
            codec_gpu.parse(words)


def test_the_gpu_script_takes_kept_kv(codec_gpu: Any, tmp_path: Path) -> None:
    layout = KVLayout(2, 1, 4)
    k, v = np.arange(12, dtype=np.uint16).reshape(3, 4), np.arange(100, 112, dtype=np.uint16).reshape(3, 4)
    file = tmp_path / "kv.npy"
    np.save(file, np.stack([np.concatenate([k.ravel(), v.ravel()])]).view(np.uint8))
    two = codec_gpu.segments_of(file, layout, 2, 3)
    assert two.shape == (3, layout.segment_bytes(2, "bfloat16"))
    for each in two:
        assert each.view(np.uint16).reshape(2, 2, 4).tolist() == [k[:2].tolist(), v[:2].tolist()]
    longer = codec_gpu.segments_of(file, layout, 4, 1).view(np.uint16).reshape(2, 4, 4)
    assert longer[0].tolist() == [*k.tolist(), k[0].tolist()]
    made = codec_gpu.segments_of(None, layout, 5, 2)
    assert made.shape == (2, layout.segment_bytes(5, "bfloat16"))
    assert np.array_equal(made, codec_gpu.segments_of(None, layout, 5, 2))
    np.save(file, np.zeros((2, 9), np.uint8))
    with pytest.raises(ConfigError, match="no KV of 8 values"):
        codec_gpu.segments_of(file, layout, 2, 1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_the_gpu_script_says_that_there_is_no_device(codec_gpu: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert codec_gpu.main([]) == 2
    assert "no CUDA device" in capsys.readouterr().err
    assert codec_gpu.main(["--segments", "-1"]) == 2
