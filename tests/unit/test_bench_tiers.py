"""`kvstore-bench tiers`: small traces whose results can be counted by hand, and the generators' promises."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvstore.errors import ConfigError
from kvstore_bench.cli import main
from kvstore_bench.tiers import parse_capacities, run_tiers
from kvstore_bench.tiers_replay import CostModel, policy_names, replay, servers_for, split_name
from kvstore_bench.tiers_traces import Trace, load_trace, sharegpt

COST = CostModel()


def mooncake(path: Path, rows: list[tuple[int, list[int]]], *, tokens_off: int = 0) -> str:
    """A file of Mooncake's kind: (ms, ids)."""
    path.write_text(
        "".join(
            json.dumps({
                "timestamp": at, "input_length": 512 * len(ids) - tokens_off, "output_length": 1, "hash_ids": ids,
            }) + "\n"
            for at, ids in rows
        )
    )  # fmt: skip
    return str(path)


ROWS = [
    (0, [0, 1, 2, 3]),
    (1000, [0, 10, 11]),
    (2000, [0, 1, 2, 4]),
    (3000, [0, 20, 21, 22]),
    (4000, [0, 10, 11, 12]),
    (5000, [0, 1, 2, 4, 5]),
]


@pytest.fixture
def trace(tmp_path: Path) -> Trace:
    return load_trace(mooncake(tmp_path / "mooncake_tiny_trace.jsonl", ROWS))[0]


def test_mooncake_lines_become_requests(trace: Trace) -> None:
    assert (trace.name, trace.block, len(trace.requests), trace.references) == ("tiny", 512, 6, 24)
    assert [each.turn for each in trace.requests] == [0, 0, 1, 0, 1, 2]
    assert trace.requests[5].session == trace.requests[0].session != trace.requests[1].session
    assert trace.requests[0].keys[0] == trace.requests[3].keys[0]
    assert trace.requests[2].at == 2.0


def test_all_fits_and_lru_by_hand(trace: Trace) -> None:
    whole = replay(trace, (100,), "lru", COST)
    assert whole.hits == 0 + 1 + 3 + 1 + 3 + 4
    assert whole.saved_s == pytest.approx(sum(COST.prefill(0, 512 * hits) for hits in (1, 3, 1, 3, 4)))
    assert whole.prefill_s == pytest.approx(sum(COST.prefill(0, 512 * len(ids)) for _, ids in ROWS))
    assert whole.halves == [[4, 11], [8, 13]]
    assert whole.dropped_bytes == 0
    assert whole.written_bytes == [12 * 512 * COST.bytes_per_token]
    # Room for 6: after the second request 0 10 11 and 0 1 2 (3 has gone); after the third 0 1 2 4 and 10 (11 went,
    # then there is room for one more of it); and so on.
    small = replay(trace, (6,), "lru", COST)
    assert small.hits == 0 + 1 + 3 + 1 + 1 + 1
    best = replay(trace, (6,), "belady", COST)
    assert small.hits < best.hits <= whole.hits


def test_two_tiers_hold_as_much_as_one_and_move_between(trace: Trace) -> None:
    one, two = replay(trace, (8,), "lru", COST), replay(trace, (5, 100), "lru", COST)
    assert two.hits == replay(trace, (100,), "lru", COST).hits
    assert two.hits > one.hits
    assert two.read_bytes[1] > 0
    assert two.written_bytes[1] > 0
    block = 512 * COST.bytes_per_token
    assert sum(two.read_bytes) == two.hits * block
    assert two.dropped_bytes == 0


def test_ttft_is_load_and_compute_overlapped_and_the_queue(tmp_path: Path) -> None:
    source = mooncake(tmp_path / "a.jsonl", [(0, [0, 1]), (60_000, [0, 1]), (60_000, [5])])
    trace = load_trace(source)[0]
    slow = CostModel(per_token=1e-3, per_position=0.0, bandwidth=(131072 * 1024.0,))
    assert servers_for(trace, slow) == 1
    result = replay(trace, (10,), "lru", slow)
    first, second, third = 1.024, 1.0, 1.0 + 0.512  # computed; loaded; waits, then computed
    assert result.ttft_mean_s == pytest.approx((first + second + third) / 3)
    assert result.ttft_p99_s == pytest.approx(third)


@pytest.mark.parametrize("name", ["fifo", "s3fifo", "ttl", "session", "value", "default"])
def test_every_policy_replays_and_none_beats_belady(trace: Trace, name: str) -> None:
    for capacity in (5, 7, 9):
        result = replay(trace, (capacity,), name, COST)
        assert result.hits <= replay(trace, (capacity,), "belady", COST).hits
        assert result.written_bytes[0] - result.dropped_bytes <= capacity * 512 * COST.bytes_per_token


def test_an_announced_queue_helps_and_its_window_stays(trace: Trace) -> None:
    for name in ("default_queue64", "lookahead_queue64"):
        seen = replay(trace, (9,), name, COST)
        assert seen.hits >= replay(trace, (9,), split_name(name)[0], COST).hits
        assert seen.broken == 0
    assert replay(trace, (9,), "lookahead_queue64", COST).hits > replay(trace, (7,), "lru", COST).hits


def test_names_of_policies() -> None:
    assert policy_names("lru, default_queue64,belady") == ["lru", "default_queue64", "belady"]
    assert split_name("default_queue64") == ("default", 64)
    for bad in ("lfu", "none", "belady_queue64", "default_queue0", ""):
        with pytest.raises(ConfigError, match="--policies"):
            policy_names(bad)


def test_capacities() -> None:
    assert parse_capacities("1000, 100+900") == [(1000,), (100, 900)]
    for bad in ("", "0", "1k", "1+2+3+4", "5+-1"):
        with pytest.raises(ConfigError, match="--capacity"):
            parse_capacities(bad)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "not a trace we know"),
        ("a,b\n1,2\n", "not a trace we know"),
        ('{"timestamp": 0}\n', r":1: not a line of Mooncake"),
        ('{"timestamp": 0, "input_length": 100, "hash_ids": [1, 2]}\n', r":1: 2 hash_ids for 100 tokens"),
        ('{"timestamp": 0, "input_length": 0, "hash_ids": []}\n', r":1: 0 hash_ids for 0 tokens"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,abc,1\n", r":2: not a line of Azure"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "no requests"),
    ],
)
def test_files_that_are_no_traces_are_named(tmp_path: Path, text: str, match: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=match):
        load_trace(str(path))


def test_mooncake_time_does_not_go_back(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=":2: timestamp goes back"):
        load_trace(mooncake(tmp_path / "x.jsonl", [(5, [1]), (4, [2])]))


def test_azure_conversations_are_assumed_and_said_so(tmp_path: Path) -> None:
    path = tmp_path / "azure2023_conv.csv"
    rows = [
        ("18:00:00.0000000", 300, 100),
        ("18:00:01.0000000", 410, 100),  # too soon after; itself too long for the next
        ("18:00:30.0000000", 420, 10),  # goes on from the first: 400 of its 420
        ("18:00:40.0000000", 5000, 10),  # nothing is half of it
        ("18:40:00.0000000", 430, 10),  # too late
    ]
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        + "".join(f"2023-11-16 {at},{context},{generated}\n" for at, context, generated in rows)
    )
    trace = load_trace(str(path))[0]
    assert trace.name == "azure_conv"
    assert "no prefixes" in trace.note
    first, _, third, fourth, fifth = trace.requests
    assert (third.session, third.turn) == (first.session, 1)
    assert third.keys[:2] == first.keys[:2]  # whole blocks of 128; the third of the first was partial
    assert third.keys[2] != first.keys[2]
    assert (fourth.turn, fifth.turn) == (0, 0)
    assert third.at == 30.0


def test_sharegpt_has_the_figures_it_promises() -> None:
    for pre_rope in (True, False):
        trace = sharegpt(pre_rope=pre_rope, sessions=1500)
        turns: dict[str, int] = {}
        for request in trace.requests:
            turns[request.session] = max(turns.get(request.session, 0), request.turn + 1)
            assert request.tokens <= 2048
            assert -(-request.tokens // 128) <= len(request.keys) <= -(-request.tokens // 128) + 1
        assert sum(each > 1 for each in turns.values()) / 1500 == pytest.approx(0.73, abs=0.04)
        assert sum(turns.values()) / 1500 == pytest.approx(5.75, abs=0.5)
        times = [request.at for request in trace.requests]
        assert times == sorted(times)
        assert trace.requests == sharegpt(pre_rope=pre_rope, sessions=1500).requests  # seeded
    with pytest.raises(ConfigError, match="window"):
        sharegpt(pre_rope=True, window=100)


def test_k_before_rope_keeps_hits_after_an_overflow(tmp_path: Path) -> None:
    report = run_tiers(load_trace("sharegpt:sessions=200"), [(100_000,)], ["lru"])
    gap = report.figures["tiers.sharegpt.100000.lru.pre_rope_gap"].value
    before = report.figures["tiers.sharegpt.100000.lru.hit_rate"].value
    assert 0.05 < gap < before < 1


def test_generator_options_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"no option 'turns'.*sessions, rate, seed, window"):
        load_trace("sharegpt:turns=3")
    with pytest.raises(ConfigError, match="rate='x'"):
        load_trace("sharegpt:rate=x")


def test_command_writes_table_json_and_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = mooncake(tmp_path / "mooncake_tiny_trace.jsonl", ROWS, tokens_off=10)
    page, figures = tmp_path / "out.html", tmp_path / "out.json"
    status = main(["tiers", "--trace", source, "--capacity", "7,20,3+9", "--json", str(figures), "--html", str(page)])
    assert status == 0
    text = capsys.readouterr().out
    assert "default_queue64" in text
    assert "Savings(t) = 1 - n_t/Σnᵢ" in text
    document: dict[str, Any] = json.loads(figures.read_text())
    assert document["ok"] is True
    for policy in ("lru", "default", "default_queue64", "belady", "value", "session"):
        for what in ("hit_rate", "seconds_saved", "ttft_mean", "ttft_p99", "hit_rate_second_half"):
            assert f"tiers.tiny.7.{policy}.{what}" in document["figures"]
            assert f"tiers.tiny.3+9.{policy}.{what}" in document["figures"]
    assert document["figures"]["tiers.tiny.20.lru.hit_rate"]["value"] == pytest.approx(12 / 24)
    assert len(document["rows"]) == 30
    html = page.read_text()
    assert html.count("<svg") == 3 + 1 + 3
    assert "belady" in html


def test_command_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tiers", "--trace", str(tmp_path / "absent.jsonl")]) == 2
    assert "absent.jsonl" in capsys.readouterr().err
    source = mooncake(tmp_path / "x.jsonl", ROWS)
    for words in (["--capacity", "x"], ["--policies", "lfu"], ["--requests", "1"], ["--bandwidth", "0B"]):
        assert main(["tiers", "--trace", source, *words]) == 2
        assert words[0] in capsys.readouterr().err


def test_a_replay_that_does_not_give_what_is_known_fails(trace: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    known = {("tiny", 6, 24): {"100": {"lru": 0.4}}}
    monkeypatch.setattr("kvstore_bench.tiers._KNOWN", known)
    report = run_tiers([trace], [(100,)], ["lru"])
    assert not report.ok
    assert report.wrong == ["tiny 100 lru: hit rate 0.5000, known is 0.4"]
