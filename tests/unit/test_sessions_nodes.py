"""Sessions on several nodes: who lags behind, who was faster, states that are over or strange; and all together."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore._session_slots import StateSlots
from kvstore._session_state import MAX_STATE_BYTES
from kvstore.errors import ConfigError, KVStoreError
from kvstore.keys import Key
from kvstore.record import opaque_spec
from kvstore.sessions import Session, SessionStore
from kvstore.store import Item, Store
from kvstore.testing import DictBackend, Fault, FaultyBackend
from tests.faults.support import store_over

from .session_support import CHUNK, SYSTEM, Cache, Clock, compute, over, play, words


@pytest.fixture
def store() -> Iterator[Store]:
    with store_over(DictBackend(), chunk_size=CHUNK) as opened:
        yield opened


def shared(store: Store, count: int, **options: Any) -> list[SessionStore]:
    contents: dict[bytes, bytes] = {}
    return [over(store, contents=contents, **options) for _ in range(count)]


def test_a_node_with_an_old_view_does_not_end_the_session_of_another(store: Store) -> None:
    clock = Clock()
    here, there, third = shared(store, 3, ttl=100.0, clock=clock)
    for name in ("expired", "opened"):
        play(here, here.open(name).turn([1]), [2])
    clock.now += 60
    for name in ("expired", "opened"):
        play(there, there.open(name).turn([3]), [4])
    clock.now += 60  # 120 seconds for `here`, 60 for those who know
    assert here.expire("expired") == ["expired"]
    assert here.open("opened").turns == 2
    assert here.expire() == []
    assert here.open("opened", system=[7]).turns == 0  # knows turn 2, so it is its own to remove
    assert third.open("expired").turns == 2
    assert third.open("opened").turns == 0


def test_a_node_that_lags_behind_undoes_nothing(store: Store) -> None:
    here, there, third = shared(store, 3)
    ahead = here.open("a")
    for number in range(2):
        play(here, ahead.turn([number]), [9])
    behind = there.open("a")
    for number in range(3):
        play(here, ahead.turn([10 + number]), [9])
    for _ in range(2):
        turn = behind.turn([7])
        cache, hit = there.load(turn)
        turn.finish([8])
        assert not there.save(turn, compute(cache, turn.tokens[hit:])).state
    assert there.stats()["conflict"] == 2
    assert third.open("a").tokens.tolist() == ahead.tokens.tolist()
    assert there.open("a") is behind
    assert behind.tokens.tolist() == ahead.tokens.tolist()


def test_who_was_slower_goes_on_with_what_was_saved(store: Store) -> None:
    here, there = shared(store, 2)
    play(here, here.open("a").turn([1]), [2])
    one, other = here.open("a").turn([3]), there.open("a").turn([4])
    play(here, one, [5])
    play(there, other, [6])
    assert there.open("a").tokens.tolist() == [1, 2, 3, 5]
    play(there, there.open("a").turn([7]), [8])
    assert here.open("a").tokens.tolist() == [1, 2, 3, 5, 7, 8]


def test_a_state_past_its_ttl_is_in_nobodys_way() -> None:
    backend = FaultyBackend(DictBackend())
    clock = Clock()
    with store_over(backend, chunk_size=CHUNK) as store:
        here, there = shared(store, 2, ttl=100.0, clock=clock)
        for number in range(7):
            play(here, here.open("a").turn([number]), [9])
        clock.now += 100
        backend.push(*[Fault.error()] * 4, operation="delete")
        assert there.open("a").turns == 0  # cannot remove it
        assert here.open("a").turns == 0
        for number in range(4):
            assert here.open("a").turns == number
            turn = here.open("a").turn([number])
            turn.finish([9])
            assert here.save_state(turn.session)
            backend.assert_done()
        assert there.open("a").turns == 4


def test_opening_waits_for_no_removal() -> None:
    backend = FaultyBackend(DictBackend(), {"delete": [Fault.hang()]})
    with store_over(backend, chunk_size=CHUNK, put_timeout=3600) as store:
        sessions = over(store)
        sessions.open("a", system=[1]).turn([2]).finish([3])
        assert sessions.save_state(sessions.open("a", system=[1]))
        assert sessions.open("a", system=[5], timeout=0.2).turns == 0
        assert backend.hung == 1
        backend.release()


def test_the_state_is_stored_although_kv_is_not() -> None:
    backend = FaultyBackend(DictBackend())
    with store_over(backend, chunk_size=CHUNK, on_error="raise") as store:
        sessions = over(store)
        turn = sessions.open("a").turn(words(0, 20))
        cache, _ = sessions.load(turn)
        turn.finish([1])
        backend.push(Fault.error(), operation="put")
        with pytest.raises(KVStoreError):
            sessions.save(turn, compute(cache, turn.tokens))
        backend.assert_done()
        assert over(store).open("a").turns == 1


def test_strange_states_are_passed_over(store: Store) -> None:
    sessions = over(store)
    session = sessions.open("a")
    for number in range(2):
        play(sessions, session.turn([number]), [9])
    places = StateSlots(sessions.kv).keys("a", session.system_hash)
    good = session.state()
    meta = {"session_turns": 3, "session_end": good.used + good.ttl}
    later = {**meta, "session_turns": 1 << 40}
    for data, what in (
        (replace(good, turns=9).pack(), meta),  # its header says another turn
        (b"\x80", meta),
        (replace(good, name="b").pack(), meta),
        (good.pack().replace(b"\xa7version\x01", b"\xa7version\x02"), meta),  # of a newer version
        (bytes(MAX_STATE_BYTES + 1), meta),
        (replace(good, turns=3).pack(), {"session_turns": "3", "session_end": 1e12}),
        (replace(good, turns=3).pack(), {"session_turns": 3, "session_end": float("nan")}),
        (replace(good, turns=3).pack(), {"session_turns": 3}),
        (replace(good, turns=3).pack(), {}),
        (b"", later),
    ):
        spec = opaque_spec(len(data))
        assert store.submit_put([Item(places[0], spec.split(memoryview(data)), spec, what)]).result()[0].ok
        assert over(store).open("a").turns == 2
        store.submit_delete([places[0]]).result()
    assert over(store).open("a").turns == 2


def test_many_truncations_in_a_row(store: Store) -> None:
    """The state stays small, every epoch has names of its own, and every truncation goes on with what was there."""
    sessions = over(store, window=64, reserve=4, sinks=4, keep_system=False, drop=0.5)
    session = sessions.open("a")
    lineages: set[bytes] = set()
    sizes: list[int] = []
    hits: list[int] = []
    while len(hits) < 10:
        turn = session.turn(words(100 * session.turns, 12))
        _, hit = play(sessions, turn, words(100 * session.turns + 50, 4))
        if turn.dropped:
            hits.append(hit)
            state = session.state()
            lineages.add(state.history.tail_context.digest)
            sizes.append(len(state.pack()) - 4 * len(state.history.tokens) - len(state.seen.rest))
            assert len(state.history.base) <= 64 // CHUNK
            assert over(store).open("a").tokens.tolist() == session.tokens.tolist()
    assert len(lineages) == 10
    assert min(hits) >= 12
    assert max(sizes) < 700
    assert session.dropped == session.seen - len(session.tokens)


class Life:
    """Two nodes, two conversations, a store that fails and loses records, against the plain lists of what was said.

    `FakeKV` asserts that a name has one content, that what is loaded is what was stored, and that pieces have no gaps.
    """

    def __init__(self, data: st.DataObject, rope: str) -> None:
        self.draw = data.draw
        self.clock = Clock()
        self.contents: dict[bytes, bytes] = {}
        self.token_of: dict[bytes, int] = {}  # of which token this is the KV
        self.said: dict[Session, list[int]] = {}
        self.backend = FaultyBackend(DictBackend())
        self.raising = self.draw(st.booleans())
        self.options: dict[str, Any] = {
            "window": self.draw(st.sampled_from([40, 64])), "reserve": 4, "sinks": self.draw(st.integers(0, 12)),
            "drop": self.draw(st.sampled_from([0.0, 0.3, 1.0])), "keep_system": self.draw(st.booleans()), "rope": rope,
            "ttl": 100.0, "clock": self.clock, "contents": self.contents,
            "max_sessions": self.draw(st.sampled_from([1, 9])),
        }  # fmt: skip

    def run(self) -> None:
        on_error = "raise" if self.raising else "miss"
        with store_over(self.backend, chunk_size=CHUNK, on_error=on_error) as store:
            nodes = [over(store, **self.options) for _ in range(2)]
            for _ in range(self.draw(st.integers(1, 20))):
                number, name = self.draw(st.integers(0, 1)), self.draw(st.sampled_from("ab"))
                match self.draw(st.sampled_from(["turn"] * 8 + ["lose", "wait", "expire", "fault", "restart"])):
                    case "turn":
                        self.turn(nodes[number], name)
                    case "lose" if self.contents:
                        lost = self.draw(st.sampled_from(sorted(self.contents)))
                        self.backend.inner.delete([Key(lost)], deadline=math.inf)
                    case "wait":
                        self.clock.now += self.draw(st.sampled_from([10, 60, 101]))
                    case "expire":
                        nodes[number].expire(self.draw(st.sampled_from([None, name])))
                    case "fault":
                        self.backend.push(Fault.error(), operation=self.draw(st.sampled_from(["get", "put", "delete"])))
                    case "restart":
                        nodes[number] = over(store, **self.options)

    def turn(self, sessions: SessionStore, name: str) -> None:
        system = self.draw(st.sampled_from([[], SYSTEM]))
        session = sessions.open(name, system=system)
        before = session.state()
        if not session.turns:
            self.said[session] = list(system)
        said = self.said.get(session)
        if said is not None and len(said) != session.seen:
            said = None  # it goes on where another node was
        new = [self.draw(st.integers(0, 2))] * self.draw(st.sampled_from([1, 7, 15]))
        how = self.draw(st.sampled_from(["new", "whole", "given up"]))
        try:
            turn = session.turn(new) if how == "new" or said is None else session.turn(whole=said + new)
        except ConfigError as error:
            if "has no room" not in str(error):
                raise
            how = "given up"
        assert session.state() == before
        if how == "given up":
            return
        assert session.restarts == 0
        assert len(turn.tokens) <= sessions.limits.window - 4  # type: ignore[operator]
        assert turn.tokens[-len(new) :].tolist() == new
        answer = [0, 1][: self.draw(st.integers(1, 2))]
        try:
            cache = self.play(sessions, turn, answer)
        except KVStoreError:
            assert self.raising
            self.said.pop(session, None)
            return
        if said is not None:
            self.said[session] = said + new + answer
            assert session.seen == len(self.said[session])
        state = session.state()
        assert len(state.pack()) < 4 * len(state.history.tokens) + 44 * (64 // CHUNK + 4) + 1400
        if not state.history.base:
            assert cache == compute([], session.tokens[:-1])

    def play(self, sessions: SessionStore, turn: Any, answer: list[int]) -> Cache:
        cache, hit = sessions.load(turn)
        assert [self.token_of[kv] for kv in cache] == turn.tokens[:hit].tolist()
        rest = [*turn.tokens[hit:].tolist(), *answer[:-1]]
        cache = compute(cache, rest)
        for kv, token in zip(cache[hit:], rest, strict=True):
            assert self.token_of.setdefault(kv, token) == token
        turn.finish(answer)
        sessions.save(turn, cache)
        return cache


@given(data=st.data(), rope=st.sampled_from(["pre", "pre", "post"]))
@settings(max_examples=80, deadline=None)
def test_whatever_happens_what_is_loaded_is_kv_of_what_was_said(data: st.DataObject, rope: str) -> None:
    Life(data, rope).run()
