"""The load controller: a prompt's chunks, gaps and question as groups of the one planner."""

from __future__ import annotations

import math

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from kvstore.blend import Decision, Stored, decide
from kvstore.errors import ConfigError
from kvstore.stream import Policy, PrefillModel, Speeds

PREFILL = PrefillModel(0.001)
CHUNKS = [Stored(20, 170, (1500,)), Stored(170, 320, (1500,)), Stored(330, 480, (1500,))]
RULE = Policy(text="time", pointers=False, safety=1.0)


def at(rate: float | None, *, r_min: float = 0.15, **more: object) -> Decision:
    fields = {"policy": RULE, **more}
    return decide(CHUNKS, 500, 520, Speeds(rate, prefill=PREFILL), r_min=r_min, **fields)  # type: ignore[arg-type]


def brute_force(
    chunks: list[Stored], tokens: int, rate: float, prefill: PrefillModel, r_min: float, step: float
) -> tuple[float | None, float]:
    """Knows nothing of the rule: of all r of a grid, and of loading nothing (None), the one that is ready first, the
    largest of equals; and when. A layer takes the longer of loading it and computing what is computed in it."""
    layers = 24
    stored = [prefill.seconds(c.begin, c.end - c.begin) - prefill.fixed_s for c in chunks]
    whole_s = prefill.seconds(0, tokens)
    moved = sum(c.end - c.begin for c in chunks if not c.exact)
    moved_s = sum(cost for c, cost in zip(chunks, stored, strict=True) if not c.exact)
    load_s = math.inf if rate == 0 else sum(c.sizes[-1] for c in chunks) / rate
    costs: dict[float | None, float] = {}
    for number in range(round((1 - r_min) / step) + 1):
        ratio = min(1.0, r_min + number * step)
        again = min(1.0, ratio * sum(c.end - c.begin for c in chunks) / moved) if moved else 0.0
        compute_s = whole_s - sum(stored) + again * moved_s
        costs[ratio] = sum(max(load_s / layers, compute_s / layers) for _ in range(layers))
    first = min(costs.values())
    if whole_s < first * (1 - 1e-9):
        return None, whole_s
    return max(ratio for ratio, seconds in costs.items() if ratio is not None and seconds <= first * (1 + 1e-9)), first


EXACT = [Stored(0, 20, (200,), exact=True), CHUNKS[0]._replace(exact=True), *CHUNKS[1:]]
RATES = [0.0, *(10 ** (exponent / 8) for exponent in range(56)), math.inf]


@pytest.mark.parametrize("r_min", [0.0, 0.15, 0.6, 1.0])
@pytest.mark.parametrize("chunks", [CHUNKS, EXACT, EXACT[:2], CHUNKS[1:2]], ids=["moved", "mixed", "exact", "one"])
@pytest.mark.parametrize("prefill", [PREFILL, PrefillModel(0.0005, 2e-6, 0.02)], ids=["linear", "quadratic"])
def test_over_a_sweep_of_bandwidths_it_is_brute_force(
    chunks: list[Stored], r_min: float, prefill: PrefillModel
) -> None:
    step, seen = 0.01, set()
    for tokens in (501, 520, 1500):  # a short question, and one that is longer than all before it
        for rate in RATES:
            found = decide(chunks, 500, tokens, Speeds(rate, prefill=prefill), r_min=r_min, policy=RULE)
            best, seconds = brute_force(chunks, tokens, rate, prefill, r_min, step)
            assert found.seconds == pytest.approx(seconds, rel=1e-6)
            assert bool(found.load) == (best is not None)
            if best is not None and any(not chunk.exact for chunk in chunks):
                assert found.load == tuple(range(len(chunks)))
                assert found.ratio == pytest.approx(best, abs=step + 1e-9)
            seen.add(best)
    assert None in seen
    assert len(seen) > 1


def test_what_is_not_known_is_not_guessed() -> None:
    assert at(None) == Decision((0, 1, 2), 0.15)
    assert decide(CHUNKS, 500, 520, Speeds(1.0), r_min=0.15) == Decision((0, 1, 2), 0.15)
    assert decide([], 500, 520, Speeds(1.0, prefill=PREFILL), r_min=0.15) == Decision((), 0.15)


def test_a_link_that_is_down_is_not_waited_for() -> None:
    assert at(0.0).load == ()


def test_exact_chunks_need_no_repair() -> None:
    exact = [chunk._replace(exact=True) for chunk in CHUNKS]
    found = decide(exact, 480, 500, Speeds(1e5, prefill=PREFILL), r_min=0.15, policy=RULE)
    assert found.load == (0, 1, 2)
    # 30 tokens between them and 20 behind them; 0.045 s of loading hide behind these.
    assert found.seconds == pytest.approx(0.05)


def test_with_two_pointers_the_front_is_computed_while_the_back_is_loaded() -> None:
    found = at(4500 / 0.4, policy=Policy(text="time", safety=1.0))
    assert found.load == (1, 2), "0.27 s of loading beside 0.05 + 0.15 + 2 · 0.15 · 0.15 s of computing"
    assert found.seconds < at(4500 / 0.4).seconds


def test_levels_under_an_slo() -> None:
    levels = [chunk._replace(sizes=(300, 900, 1500), lossless=False) for chunk in CHUNKS]

    def level(slo: float) -> int | None:
        speeds = Speeds(10_000.0, prefill=PREFILL)
        return decide(levels, 500, 520, speeds, r_min=0.15, remaining_s=slo, policy=RULE).level

    assert level(math.inf) is None
    assert level(0.6) is None
    assert level(0.33) == 1
    assert level(0.2) == 0


@pytest.mark.parametrize(
    "chunks", [[Stored(0, 501, (1,))], [Stored(5, 5, (1,))], [Stored(0, 9, (1,)), Stored(8, 12, (1,))]]
)
def test_chunks_that_are_none(chunks: list[Stored]) -> None:
    with pytest.raises(ConfigError):
        decide(chunks, 500, 520, Speeds(1.0, prefill=PREFILL), r_min=0.15)
    with pytest.raises(ConfigError, match="r_min"):
        at(1.0, r_min=1.5)
    with pytest.raises(ConfigError, match="question"):
        decide(CHUNKS, 520, 520, Speeds(1.0, prefill=PREFILL), r_min=0.15)


def test_so_few_are_out_of_place_that_all_of_them_are_computed() -> None:
    chunks = [CHUNKS[0]._replace(exact=True), CHUNKS[1]._replace(exact=True), CHUNKS[2]._replace(end=340)]
    found = decide(chunks, 500, 520, Speeds(1e6, prefill=PREFILL), r_min=0.15, policy=RULE)
    assert (found.load, found.ratio) == ((0, 1, 2), 1.0)


def test_a_chunk_of_one_level_does_not_coarsen_the_others() -> None:
    plain, levels = CHUNKS[0], CHUNKS[1]._replace(sizes=(300, 900, 1500), lossless=False)

    def level(slo: float, policy: Policy = RULE) -> int | None:
        speeds = Speeds(10_000.0, prefill=PREFILL)
        return decide([plain, levels], 500, 520, speeds, r_min=0.15, remaining_s=slo, policy=policy).level

    assert level(math.inf) is None
    assert level(0.29) == 1
    assert level(0.22) == 0
    assert level(math.inf, Policy(text="time", pointers=False, max_level=1)) == 1
