"""What the planner is told: prefill models, the shared link, break-even and admission."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.errors import ConfigError
from kvstore.stream.admission import (
    Admission,
    break_even_bytes_per_s,
    break_even_tokens,
    load_is_faster,
)
from kvstore.stream.estimates import LinkShare, PrefillModel, PrefillSample, Transfer

models = st.builds(PrefillModel, st.floats(1e-6, 1e-2), st.floats(0, 1e-5), st.floats(0, 0.1))


# Prefill.


@given(models, st.integers(0, 5000), st.integers(1, 3000), st.integers(1, 3000))
def test_computing_in_two_calls_costs_one_call_more(model: PrefillModel, begin: int, one: int, two: int) -> None:
    whole = model.seconds(begin, one + two)
    parts = model.seconds(begin, one) + model.seconds(begin + one, two)
    assert parts == pytest.approx(whole + model.fixed_s, rel=1e-9)
    assert model.seconds(begin + 1, one) >= model.seconds(begin, one)
    assert model.seconds(begin, 0) == 0
    by_token = sum(model.a + model.b * (begin + n) for n in range(one))
    assert model.seconds(begin, one) == pytest.approx(model.fixed_s + by_token, rel=1e-9)


@given(models)
@settings(max_examples=60)
def test_a_model_is_found_again(model: PrefillModel) -> None:
    samples = [
        PrefillSample(begin, tokens, model.seconds(begin, tokens))
        for begin, tokens in ((0, 128), (0, 512), (0, 2048), (1024, 128), (4096, 512))
    ]
    found = PrefillModel.fit(samples)
    for sample in samples:
        assert found.seconds(sample.begin, sample.tokens) == pytest.approx(sample.seconds, rel=1e-3)
    assert found.seconds(2048, 2048) == pytest.approx(model.seconds(2048, 2048), rel=2e-2)


def test_noise_makes_no_negative_cost() -> None:
    rng = random.Random(7)
    for _ in range(50):
        samples = [PrefillSample(0, n, n * 1e-3 * rng.uniform(0.5, 2)) for n in (100, 200, 400, 800)]
        found = PrefillModel.fit(samples)
        assert min(found.a, found.b, found.fixed_s) >= 0
        assert found.seconds(0, 300) == pytest.approx(0.3, rel=1.2)


def test_few_samples_give_a_simple_model() -> None:
    simple = PrefillModel.fit([PrefillSample(0, 100, 1.0)])
    assert simple.a == pytest.approx(0.01)
    assert (simple.b, simple.fixed_s) == (0, 0)
    assert PrefillModel(0.01, 1e-4).tokens_per_s(100) == pytest.approx(50)
    assert PrefillModel(0.01).scaled(2).seconds(0, 10) == pytest.approx(0.2)


@pytest.mark.parametrize(
    "make",
    [
        lambda: PrefillModel(0),
        lambda: PrefillModel(-1e-3, 1),
        lambda: PrefillModel(math.nan),
        lambda: PrefillModel.fit([]),
        lambda: PrefillModel.fit([PrefillSample(0, 0, 1)]),
        lambda: PrefillModel.fit([PrefillSample(0, 10, 0)]),
        lambda: LinkShare(-1),
        lambda: LinkShare(math.inf),
        lambda: LinkShare(latency_s=-1),
        lambda: Admission(PrefillModel(1), -1),
    ],
)
def test_nonsense_is_refused(make: object) -> None:
    with pytest.raises(ConfigError):
        make()  # type: ignore[operator]


# The link.


def test_a_transfer_is_a_measurement() -> None:
    link = LinkShare(latency_s=0.5)
    assert link.bytes_per_s is None
    assert link.share(0) is None
    first = link.begin(1000, 10)
    link.end(first, 12.5)
    assert link.bytes_per_s == pytest.approx(500)  # the latency is not the link's
    assert link.share(13) == pytest.approx(500)


def test_slower_counts_at_once_and_faster_by_half() -> None:
    link = LinkShare(1000)
    link.end(link.begin(100, 0), 1)
    assert link.bytes_per_s == pytest.approx(100)
    link.end(link.begin(500, 1), 2)  # 300 over both
    assert link.bytes_per_s == pytest.approx(200)
    link.end(link.begin(500, 2), 3)  # 500 over both
    assert link.bytes_per_s == pytest.approx(350)
    assert link.slowest() == pytest.approx(100)


def test_those_who_share_it_see_the_whole_link() -> None:
    link = LinkShare()
    for _ in range(2):
        link.join()
    one, two = link.begin(1000, 0), link.begin(1000, 0)
    link.end(one, 2)  # one behind the other
    link.end(two, 4)
    side, by_side = link.begin(1000, 4), link.begin(1000, 4)  # side by side, each at half the speed
    link.end(side, 8)
    link.end(by_side, 8)
    assert link.bytes_per_s == pytest.approx(500, rel=0.3)
    assert link.share(4) == pytest.approx(link.bytes_per_s / 2)  # type: ignore[operator]
    assert link.share(4, mine=False) == pytest.approx(link.bytes_per_s / 3)  # type: ignore[operator]
    link.leave()
    assert link.share(4) == pytest.approx(link.bytes_per_s)


def test_what_is_overdue_shows_that_the_link_is_slower() -> None:
    link = LinkShare(1000)
    transfer = link.begin(1000, 0)
    assert link.share(0.5) == pytest.approx(1000)
    assert link.share(1) == pytest.approx(1000)
    assert link.share(1.2) == pytest.approx(1000)
    assert link.share(10) == pytest.approx(50)  # it will take ten seconds more
    assert link.share(1e6) == pytest.approx(1e-3 / 2)
    link.end(transfer, 10, nbytes=0)  # it was given up for that: what it showed stands
    assert link.bytes_per_s == pytest.approx(50)
    link.end(transfer, 11)  # once only
    assert link.bytes_per_s == pytest.approx(50)
    failed = link.begin(1000, 20)
    link.end(failed, 21, nbytes=0)  # it was not due yet: that says nothing of the speed
    assert link.bytes_per_s == pytest.approx(50)
    assert link.overdue_at(link.begin(1000, 30), 30) == pytest.approx(55)


def test_the_latency_is_learned_unless_it_was_given() -> None:
    link = LinkShare()
    for seconds in (0.03, 0.01, 0.05):
        link.answered(seconds)
    assert link.latency_s == 0.01
    given_one = LinkShare(latency_s=0.2)
    given_one.answered(0.01)
    assert given_one.latency_s == 0.2


@given(st.lists(st.tuples(st.floats(0, 1), st.integers(0, 10**9), st.booleans()), max_size=30))
def test_whatever_happens_the_speed_is_a_number(events: list[tuple[float, int, bool]]) -> None:
    link, now = LinkShare(), 0.0
    under_way: list[Transfer] = []
    for passed, nbytes, begins in events:
        now += passed
        if begins or not under_way:
            under_way.append(link.begin(nbytes, now))
        else:
            link.end(under_way.pop(0), now)
        share = link.share(now)
        assert share is None or share >= 0
        assert not math.isnan(share or 0.0)


# Break-even.


@given(models, st.floats(1, 1e6), st.floats(1, 1e10), st.floats(0, 1))
@settings(max_examples=200)
def test_break_even_separates_those_who_win(model: PrefillModel, per_token: float, rate: float, latency: float) -> None:
    found = break_even_tokens(model, per_token, rate, latency_s=latency)

    def wins(tokens: int) -> bool:
        return load_is_faster(model, tokens, tokens * per_token, rate, latency_s=latency)

    if found is None:
        assert not wins(1 << 40)
        return
    assert all(wins(found + n) for n in (0, 1, 2, 10, 1000, 10**6))
    assert found == 1 or not wins(found - 1)
    tokens = 1000
    speed = break_even_bytes_per_s(model, tokens, tokens * per_token, latency_s=latency)
    if speed < math.inf:
        assert load_is_faster(model, tokens, tokens * per_token, speed * 1.01, latency_s=latency)
        assert not load_is_faster(model, tokens, tokens * per_token, speed * 0.99, latency_s=latency)


def test_what_would_never_pay_is_not_stored() -> None:
    rule = Admission(PrefillModel(1e-3, 1e-6), slowest_bytes_per_s=1e6, latency_s=0.01, min_tokens=64)
    assert rule.chunk(0, 256, 1e5)
    assert rule.chunk(0, 256, 1e5).admit
    slow = rule.chunk(0, 256, 5e5)
    assert not slow.admit
    assert "slowest likely link" in slow.reason
    assert rule.chunk(1024, 256, 5e5).admit  # later tokens cost more to compute
    assert not rule.chunk(0, 32, 1, prompt_tokens=32).admit
    short = Admission(PrefillModel(1e-4), slowest_bytes_per_s=1e9, latency_s=0.05)
    assert "no longer than one request waits" in short.chunk(0, 256, 1).reason
    assert short.chunk(0, 256, 1, prompt_tokens=1024).admit
    assert not Admission(PrefillModel(1e-3), slowest_bytes_per_s=0).chunk(0, 256, 1).admit
