"""Hierarchies with faults: any sequence of calls, exact books, no wrong bytes, nothing that comes back."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvstore.keys import Key

from .tiers_model import KEYS, Model

CASES = {
    "two": ((24_000, 60_000), "through"),
    "three": ((20_000, 40_000, None), "through"),
    "back": ((20_000, 40_000, None), "back"),
    "drops": ((16_000, 24_000, 48_000), "back"),
}
OPERATIONS = ("stat", "get", "put", "delete", "lease", "quarantine")
KINDS = ("error", "raises", "transient", "cut", "flip", "first", "lost")


def step(model: Model, rng: random.Random) -> None:
    """One random operation."""
    keys = rng.sample(KEYS, rng.choice((1, 1, 2, 4, 8)))
    what = rng.random()
    if what < 0.30:
        model.put(keys)
    elif what < 0.62:
        model.get(keys)
    elif what < 0.70:
        model.stat(keys)
    elif what < 0.80:
        model.delete(keys[:2])
    elif what < 0.84:
        model.lease(keys)
    elif what < 0.97:
        model.fault(rng.randrange(len(model.faulty)), rng.choice(OPERATIONS), rng.choice(KINDS))
    elif what < 0.985:
        model.announce([rng.sample(KEYS, rng.randrange(1, 6)) for _ in range(rng.randrange(4))])
    elif what < 0.99:
        model.restart(drain=rng.random() < 0.5)
    else:
        model.check_calm()
    model.check_capacity()


@pytest.mark.parametrize("name", CASES)
def test_ten_thousand_random_operations(name: str) -> None:
    """2,500 for each of four hierarchies."""
    capacities, write = CASES[name]
    model = Model(capacities, write=write)
    rng = random.Random(name)
    try:
        for _ in range(2_500):
            step(model, rng)
        model.check_calm()
    finally:
        model.close()
    counts = model.counts
    assert model.hits > 500
    assert model.faults > 200
    assert counts["demotions"] + counts["released"] + counts["drops"] > 100
    assert counts["promotions"] > 50
    assert counts["quarantined"] > 2 or name == "drops"  # there few records live long enough to be damaged


_keys = st.lists(st.sampled_from(KEYS[:12]), unique=True, min_size=1, max_size=4)


class TierMachine(RuleBasedStateMachine):
    """The same, driven by hypothesis, which finds a short sequence if there is a wrong one."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Model((10_000, 20_000, 40_000), write="back")

    def teardown(self) -> None:
        try:
            self.model.check_calm()
        finally:
            self.model.close()

    @rule(keys=_keys)
    def put(self, keys: list[Key]) -> None:
        self.model.put(keys)

    @rule(keys=_keys)
    def get(self, keys: list[Key]) -> None:
        self.model.get(keys)

    @rule(keys=_keys)
    def delete(self, keys: list[Key]) -> None:
        self.model.delete(keys)

    @rule(keys=_keys)
    def lease(self, keys: list[Key]) -> None:
        self.model.lease(keys)

    @rule(number=st.integers(0, 2), operation=st.sampled_from(OPERATIONS), kind=st.sampled_from(KINDS))
    def fault(self, number: int, operation: str, kind: str) -> None:
        self.model.fault(number, operation, kind)

    @rule(waiting=st.lists(_keys, max_size=3))
    def announce(self, waiting: list[list[Key]]) -> None:
        self.model.announce(waiting)

    @rule(drain=st.booleans())
    def restart(self, drain: bool) -> None:
        self.model.restart(drain=drain)

    @invariant()
    def never_too_full(self) -> None:
        self.model.check_capacity()


TierMachine.TestCase.settings = settings(
    max_examples=20, stateful_step_count=25, deadline=None, phases=[Phase.generate, Phase.shrink],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)  # fmt: skip
TestTierMachine = TierMachine.TestCase
