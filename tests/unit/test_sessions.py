"""Sessions: what is kept, what is dropped, under which names it is found, and how another node goes on."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore._session_slots import StateSlots
from kvstore._session_state import MAX_TOKENS, History, Seen, State, token_array
from kvstore.errors import ConfigError, CorruptRecord
from kvstore.keys import KeyContext, chunk_keys
from kvstore.sessions import SessionStore
from kvstore.store import Item, Store
from kvstore.testing import DictBackend, Fault, FaultyBackend
from tests.faults.support import store_over

from .session_support import CHUNK, LAYOUT, SPEC, SYSTEM, Clock, FakeKV, compute, over, play, words


@pytest.fixture
def store() -> Iterator[Store]:
    with store_over(DictBackend(), chunk_size=CHUNK) as opened:
        yield opened


# Without truncation.


def test_turns_reuse_the_ordinary_chain(store: Store) -> None:
    sessions = over(store)
    session = sessions.open("a", system=SYSTEM)
    turn = session.turn(words(0, 10))
    assert turn.tokens.tolist() == SYSTEM + words(0, 10)
    assert turn.input_ids.tolist() == [SYSTEM + words(0, 10)]
    assert play(sessions, turn, words(100, 5))[1] == 0
    assert session.turns == 1
    turn = session.turn(words(20, 10))
    assert turn.keys == chunk_keys(turn.tokens, context=turn.context, chunk_size=CHUNK)
    cache, hit = play(sessions, turn, words(200, 5))
    assert hit == 24  # of 26 tokens in the cache
    assert cache == compute([], session.tokens[:-1])
    assert session.tokens.tolist() == SYSTEM + words(0, 10) + words(100, 5) + words(20, 10) + words(200, 5)
    other = sessions.open("b", system=SYSTEM).turn(words(0, 10) + words(100, 5) + words(20, 10))
    assert sessions.load(other)[1] == 32  # another conversation that began alike


def test_the_prompt_of_a_finished_turn_stays_what_it_was(store: Store) -> None:
    turn = over(store).open("a").turn([1, 2, 3])
    turn.finish([4, 5])
    assert turn.input_ids.tolist() == [[1, 2, 3]]
    assert turn.tokens.tolist() == [1, 2, 3, 4, 5]


def test_what_policies_are_told(store: Store) -> None:
    sessions = over(store, ttl=60.0)
    session = sessions.open("a")
    play(sessions, session.turn(words(0, 20)), [7])
    turn = session.turn(words(30, 10))
    last = turn.info(turn.pieces[2])
    assert last == (16, CHUNK, "a", 1, 60.0)


# Truncation.


def long_session(sessions: SessionStore, name: str = "a") -> Any:
    """Three turns that fill a window of 64: 11 + 3 · (12 + 4) = 59 tokens."""
    session = sessions.open(name, system=SYSTEM)
    for number in range(3):
        play(sessions, session.turn(words(100 * number, 12)), words(100 * number + 50, 4))
    assert len(session.tokens) == 59
    return session


def test_an_overflow_drops_the_oldest_and_reuses_the_rest(store: Store) -> None:
    sessions = over(store, window=64, reserve=4, sinks=4, drop=0.5)
    session = long_session(sessions)
    before = session.tokens.tolist()
    turn = session.turn(words(500, 12))
    # 11 tokens of the head and the last 21 at most; the cut is moved on from 38 to the chunk that begins at 40.
    assert turn.dropped == 40 - 11
    assert turn.tokens.tolist() == SYSTEM + before[40:] + words(500, 12)
    # The head: a chunk and three tokens of the next. The rest: chunks 5 and 6 under their old names.
    old = chunk_keys(before, context=turn.context, chunk_size=CHUNK)
    assert [(p.key, p.first, p.length, p.position) for p in turn.pieces[:4]] == [
        (old[0], 0, 8, 0), (old[1], 0, 3, 8), (old[5], 0, 8, 11), (old[6], 0, 8, 19),
    ]  # fmt: skip
    new = turn.pieces[4:]
    assert [(p.position, p.length) for p in new] == [(27, 8)]
    for tokens in (turn.tokens, turn.tokens[27:]):
        assert new[0].key not in chunk_keys(tokens, context=turn.context, chunk_size=CHUNK)
    _, hit = play(sessions, turn, words(550, 4))
    assert hit == 27
    assert session.dropped == 29
    assert session.seen == 59 + 16
    assert sessions.stats()["truncations"] == 1
    assert sessions.stats()["dropped_tokens"] == 29
    _, hit = play(sessions, session.turn(words(600, 4)), words(650, 4))
    assert hit == 43  # what was computed since is found too: 27 and two chunks


def test_without_movable_k_nothing_is_found_after_a_truncation(store: Store) -> None:
    sessions = over(store, window=64, reserve=4, rope="post")
    session = long_session(sessions)
    before = session.tokens.tolist()
    turn = session.turn(words(500, 12))
    assert turn.tokens.tolist() == SYSTEM + before[59 - 21 :] + words(500, 12)  # no need to align
    cache, hit = play(sessions, turn, words(550, 4))
    assert hit == 8  # the one chunk of the system prompt that is a prefix still
    assert cache == compute([], session.tokens[:-1])


def test_truncated_twice_the_sinks_and_the_records_of_both_epochs_stay(store: Store) -> None:
    sessions = over(store, window=64, reserve=4, sinks=4, keep_system=False, drop=0.4)
    session = long_session(sessions)
    first = session.turn(words(500, 12))
    assert first.tokens[:4].tolist() == SYSTEM[:4]
    assert first.pieces[0][1:] == (CHUNK, 0, 4, 0)
    play(sessions, first, words(550, 4))
    play(sessions, session.turn(words(600, 12)), words(650, 4))
    second = session.turn(words(700, 12))
    assert second.dropped > 0
    assert second.pieces[0] == first.pieces[0]
    old = {piece.key for piece in first.pieces}
    assert {piece.key for piece in second.pieces[1:]} - old  # chunks of the second epoch
    assert play(sessions, second, words(750, 4))[1] > 4


def test_a_lost_record_ends_the_reuse_and_nothing_is_stored_under_its_name(store: Store) -> None:
    sessions = over(store, window=64, reserve=4)
    session = long_session(sessions)
    turn = session.turn(words(500, 12))
    lost, after = turn.pieces[2], turn.pieces[3]
    store.delete_many([lost.key])
    play(sessions, turn, words(550, 4))
    assert turn.hit == 11  # the head
    assert lost.key not in [piece.key for piece in turn.pieces]
    assert after.key not in [piece.key for piece in turn.pieces]
    assert store.hit_prefix([lost.key]) == 0
    assert play(sessions, session.turn([1, 2]), [3])[1] == 43  # what was computed in its place was stored: 11 + 4 · 8


def test_all_records_lost_makes_an_exact_prefix_of_what_is_left(store: Store) -> None:
    sessions = over(store, window=64, reserve=4)
    session = long_session(sessions)
    turn = session.turn(words(500, 12))
    store.delete_many([piece.key for piece in turn.pieces])
    cache, hit = play(sessions, turn, words(550, 4))
    assert hit == 0
    assert cache == compute([], session.tokens[:-1])
    assert turn.keys == chunk_keys(turn.tokens, context=turn.context, chunk_size=CHUNK)


def test_a_truncated_turn_is_not_saved_before_it_is_said_what_was_loaded(store: Store) -> None:
    sessions = over(store, window=64, reserve=4)
    turn = long_session(sessions).turn(words(500, 12))
    with pytest.raises(ConfigError, match=r"Turn\.served"):
        sessions.save(turn, compute([], turn.tokens))
    with pytest.raises(ConfigError, match="cannot have been loaded"):
        turn.served(1000)


def test_the_same_truncation_of_the_same_conversation_is_shared(store: Store) -> None:
    contents: dict[bytes, bytes] = {}
    one = over(store, window=64, reserve=4, contents=contents)
    other = over(store, window=64, reserve=4, contents=contents, persist=False)
    play(one, long_session(one).turn(words(500, 12)), words(550, 4))
    twin = long_session(other).turn(words(500, 12))
    assert other.load(twin)[1] == 35  # the chunk computed on top of the truncated context too


def test_other_sinks_are_another_context(store: Store) -> None:
    """The same records and the same new tokens, but one token more of the first record."""
    turns: list[Any] = []
    contents: dict[bytes, bytes] = {}
    options: dict[str, Any] = {"keep_system": False, "persist": False, "contents": contents}
    for sinks in (4, 5):
        sessions = over(store, window=64, reserve=4, sinks=sinks, **options)
        turns.append(long_session(sessions).turn(words(500, 12)))
        play(sessions, turns[-1], words(550, 4))
    one, other = turns
    assert one.pieces[0].key == other.pieces[0].key
    assert one.pieces[0].length + 1 == other.pieces[0].length
    assert one.pieces[1].key == other.pieces[1].key
    assert not {p.key for p in one.new_chunks(64)} & {p.key for p in other.new_chunks(64)}


def test_a_slice_is_taken_whole_or_not_at_all(store: Store) -> None:
    """A conversation that is cut without new tokens, and whose last token lies in a stored chunk: one token must be
    computed, and it must not be computed into a chunk whose other tokens were loaded."""
    sessions = over(store, window=64, sinks=8)
    said = words(0, 80)
    exact = FakeKV(store).context
    kept = History(exact, CHUNK, token_array(said)).pieces()
    for piece in kept:
        data = b"".join(compute([], said)[piece.position : piece.end])
        sessions.kv.contents[piece.key] = data
        store.submit_put([Item(piece.key, [memoryview(data)], SPEC)]).result()
    turn = sessions.open("a").turn(whole=said)
    assert turn.tokens.tolist() == said[:8] + said[24:]
    assert [piece.key for piece in turn.pieces[:7]] == [kept[number].key for number in (0, 3, 4, 5, 6, 7, 8)]
    _, hit = play(sessions, turn, [1, 2])
    assert hit == 56
    assert turn.pieces[7].key != kept[9].key


def test_every_turn_fits_the_window_or_is_refused(store: Store) -> None:
    sessions = over(store, window=64, reserve=4)
    session = long_session(sessions)
    with pytest.raises(ConfigError, match="window of 64 tokens has no room for 50 new ones, the 11 kept at the head"):
        session.turn(words(0, 50))
    turn = session.turn(words(0, 49))
    assert len(turn.tokens) == 60
    assert turn.tokens.tolist() == SYSTEM + words(0, 49)
    assert over(store).open("b").turn(words(0, 5000)).dropped == 0  # no window


# The whole conversation.


def test_stateless_clients_send_the_whole_conversation(store: Store) -> None:
    sessions = over(store, window=64, reserve=4)
    session = sessions.open("a", system=SYSTEM)
    said = [*SYSTEM]
    hits = []
    for number in range(6):
        said += words(100 * number, 12)
        turn = session.turn(whole=said)
        assert turn.tokens[-12:].tolist() == words(100 * number, 12)
        hits.append(play(sessions, turn, words(100 * number + 50, 4))[1])
        said += words(100 * number + 50, 4)
        assert session.seen == len(said)
    assert session.restarts == 0
    assert session.dropped > 0
    assert min(hits[1:]) > 0
    edited = [*said[:30], 7, *said[31:]]
    turn = session.turn(whole=edited)
    assert session.restarts == 1
    assert turn.tokens[-4:].tolist() == said[-4:]
    assert len(turn.tokens) <= 60
    with pytest.raises(ConfigError, match="does not begin with its system prompt"):
        session.turn(whole=said[1:])


def test_a_first_conversation_longer_than_the_window_is_cut(store: Store) -> None:
    said = SYSTEM + words(0, 200)
    for drop in (0.0, 0.5, 1.0):  # the new message is in it, so not more is dropped than must be
        turn = over(store, window=64, reserve=4, drop=drop).open("a", system=SYSTEM).turn(whole=said)
        assert turn.tokens[:11].tolist() == SYSTEM
        assert turn.tokens[11:].tolist() == said[-(len(turn.tokens) - 11) :]
        assert 60 - CHUNK < len(turn.tokens) <= 60


def test_the_same_conversation_again_is_another_answer_to_it(store: Store) -> None:
    sessions = over(store)
    session = sessions.open("a")
    play(sessions, session.turn(whole=words(0, 20)), words(50, 4))
    again = session.turn(whole=words(0, 20))
    assert again.tokens.tolist() == words(0, 20)
    assert sessions.load(again)[1] == 16


def test_a_conversation_many_turns_ahead_is_taken_as_a_whole(store: Store) -> None:
    sessions = over(store, window=64)
    session = sessions.open("a")
    play(sessions, session.turn(whole=words(0, 20)), words(50, 4))
    said = words(0, 20) + words(50, 4) + words(1000, 200)
    turn = session.turn(whole=said)
    assert turn.tokens[4:].tolist() == said[-(len(turn.tokens) - 4) :]
    assert session.seen == 24
    turn.finish()
    assert session.seen == len(said)


# Identity and life.


def test_another_system_prompt_is_another_session(store: Store) -> None:
    sessions = over(store)
    session = sessions.open("a", system=SYSTEM)
    play(sessions, session.turn([1, 2, 3]), [4])
    assert sessions.open("a", system=SYSTEM) is session
    changed = sessions.open("a", system=[*SYSTEM, 1])
    assert changed.turns == 0
    assert changed.tokens.tolist() == [*SYSTEM, 1]
    assert sessions.stats()["invalidated"] == 1
    assert sessions.open("a", system=SYSTEM).turns == 0  # its state was removed as well


def test_ttl(store: Store) -> None:
    clock = Clock()
    sessions = over(store, ttl=100.0, clock=clock)
    kept = sessions.open("kept")
    gone = sessions.open("gone")
    for session in (kept, gone):
        play(sessions, session.turn(words(0, 20)), [7])
    clock.now += 99
    assert sessions.expire() == []
    play(sessions, kept.turn([1]), [2])
    clock.now += 1
    assert gone.expired
    assert sessions.expire() == ["gone"]
    assert sessions.stats()["sessions"] == 1
    assert sessions.open("gone").turns == 0
    assert sessions.open("kept").turns == 2
    clock.now += 100
    assert sessions.open("kept").turns == 0  # over, without anybody calling expire
    play(sessions, sessions.open("kept").turn([1]), [2])
    assert sessions.expire("kept") == ["kept"]
    assert sessions.expire("kept") == []
    assert sessions.open("kept").turns == 0


def test_states_of_sessions_past_their_ttl_are_not_taken(store: Store) -> None:
    clock = Clock()
    one, other = over(store, ttl=100.0, clock=clock), over(store, ttl=100.0, clock=clock)
    play(one, one.open("a").turn(words(0, 20)), [7])
    clock.now += 99.5
    assert other.open("a").turns == 1
    clock.now += 1
    third = over(store, ttl=1000.0, clock=clock)  # the session's own TTL counts
    assert third.open("a").turns == 0
    assert third.stats()["expired"] == 1


def test_sessions_in_memory_are_bounded(store: Store) -> None:
    sessions = over(store, max_sessions=3)
    for name in "abcd":
        play(sessions, sessions.open(name).turn([1, 2]), [3])
    assert sessions.stats()["sessions"] == 3
    assert sessions.open("a").turns == 1  # from its state


def test_only_the_current_turn_can_be_finished(store: Store) -> None:
    session = over(store).open("a")
    abandoned = session.turn([1])
    turn = session.turn([2])
    with pytest.raises(ConfigError, match="over, or another one has begun"):
        abandoned.finish()
    turn.finish([3])
    assert session.tokens.tolist() == [2, 3]
    with pytest.raises(ConfigError, match="over, or another one has begun"):
        turn.finish([3])


def test_other_weights_make_everything_stored_useless_but_not_the_tokens(store: Store) -> None:
    sessions = over(store, window=64, reserve=4)
    session = long_session(sessions)
    play(sessions, session.turn(words(500, 12)), words(550, 4))
    tokens = session.tokens.tolist()
    sessions.kv.context = replace(sessions.kv.context, revision="2")
    turn = session.turn([1, 2])
    assert turn.tokens.tolist() == [*tokens, 1, 2]
    assert turn.context.revision == "2"
    cache, hit = play(sessions, turn, [3])
    assert hit == 0
    assert cache == compute([], session.tokens[:-1])
    later = over(store, window=64, reserve=4)
    later.kv.context = replace(later.kv.context, revision="3")
    found = later.open("a", system=SYSTEM)  # a node with newer weights still
    assert found.tokens.tolist() == session.tokens.tolist()
    assert found.state().history.base == ()


# Other nodes.


def test_another_node_goes_on(store: Store) -> None:
    contents: dict[bytes, bytes] = {}
    here, there = (over(store, window=64, reserve=4, contents=contents) for _ in range(2))
    session = long_session(here)
    play(here, session.turn(words(500, 12)), words(550, 4))
    assert session.dropped
    other = there.open("a", system=SYSTEM)
    assert there.stats()["restored"] == 1
    assert other is not session
    assert other.tokens.tolist() == session.tokens.tolist()
    assert (other.turns, other.seen, other.dropped) == (session.turns, session.seen, session.dropped)
    one, two = other.turn(words(600, 4)), session.turn(words(600, 4))
    assert one.pieces == two.pieces
    play(there, one, words(650, 4))
    assert here.open("a", system=SYSTEM) is session  # the state that came back is newer than what is here
    assert session.turns == 5
    assert session.tokens.tolist() == other.tokens.tolist()
    whole = session.turn(whole=[*SYSTEM, *words(0, 12), 1])
    assert session.restarts == 1
    assert whole.tokens.tolist() == [*SYSTEM, *words(0, 12), 1]


def test_no_more_than_three_states_are_kept(store: Store) -> None:
    sessions = over(store)
    session = sessions.open("a")
    for number in range(10):
        play(sessions, session.turn([number]), [number + 1])
        assert over(store).open("a").turns == number + 1
    kept = [key for page in store.list() for key in page if key.nbytes]
    slots = StateSlots(sessions.kv).keys("a", session.system_hash)
    assert len({info.key for info in kept} & set(slots)) == 2


def test_two_nodes_at_once_the_first_to_save_wins(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    one, other = over(store), over(store)
    play(one, one.open("a").turn([1]), [2])
    here, there = one.open("a").turn([3]), other.open("a").turn([4])
    for sessions, turn in ((one, here), (other, there)):
        sessions.load(turn)
        turn.finish([5])
    assert one.save(here, compute([], here.tokens)).state
    with caplog.at_level(logging.WARNING):
        assert not other.save(there, compute([], there.tokens)).state
    assert "continued elsewhere" in caplog.text
    assert other.stats()["conflict"] == 1
    assert one.save(here, compute([], here.tokens)).state  # again: nothing to do
    assert over(store).open("a").tokens.tolist() == [1, 2, 3, 5]


def test_an_old_state_that_could_not_be_removed_is_replaced(store: Store) -> None:
    sessions = over(store)
    session = sessions.open("a")
    assert StateSlots(sessions.kv).write(replace(session.state(), turns=2), math.inf).name == "STORED"
    session.turns = 4  # the state of turn 5 goes where that of turn 2 is
    play(sessions, session.turn([1]), [2])
    assert session.turns == 5
    assert sessions.stats()["stored"] == 1
    assert over(store).open("a").turns == 5


@pytest.mark.parametrize("operation", ["get", "put", "delete"])
@pytest.mark.parametrize("on_error", ["miss", "raise"])
def test_trouble_with_the_state_costs_recomputation_only(operation: str, on_error: str) -> None:
    backend = FaultyBackend(DictBackend(), {operation: [Fault.error()] * 500})
    with store_over(backend, chunk_size=CHUNK, on_error=on_error) as store:
        sessions = over(store)
        session = sessions.open("a", system=SYSTEM)
        for number in range(5):
            session.turn(words(10 * number, 5)).finish([number])
            # The three places are full after three turns without deletes, and what cannot be looked at is not deleted.
            assert sessions.save_state(session) is (operation != "put" and number < 3)
            assert sessions.open("a", system=SYSTEM) is session
        assert session.turns == 5
        assert len(session.tokens) == 11 + 30
        assert sessions.expire("a") == ["a"]


def test_without_persistence_nothing_is_written_but_kv(store: Store) -> None:
    sessions = over(store, persist=False)
    session = sessions.open("a")
    play(sessions, session.turn([1, 2]), [3])
    assert not sessions.save_state(session)
    assert list(store.list()) in ([], [[]])
    assert sessions.open("a") is session


# States.


CONTEXT = KeyContext("org/model", LAYOUT, "uint8", revision="1", extra=(("rope", "pre"),))


def some_state(**fields: Any) -> State:
    history = History(CONTEXT, CHUNK, token_array(words(0, 40)))
    cut = history.cut_to(4, 20, movable=True)
    history = history.cut(cut, movable=True).extended(token_array([1, 2, 3]))
    values: dict[str, Any] = {
        "name": "a", "system": bytes(32), "history": history, "turns": 3,
        "seen": Seen().plus(token_array(words(0, 43))), "dropped": 43 - len(history.tokens), "used": 5.0, "ttl": 60.0,
    }  # fmt: skip
    return State(**{**values, **fields})


def unpack(data: bytes, **fields: Any) -> State:
    return State.unpack(data, **{"name": "a", "system": bytes(32), "context": CONTEXT, "chunk_size": CHUNK, **fields})


def test_a_state_comes_back() -> None:
    state = some_state()
    assert state.history.base
    again = unpack(state.pack())
    assert np.array_equal(again.history.tokens, state.history.tokens)
    assert again.history.base == state.history.base
    for field in ("name", "system", "turns", "seen", "dropped", "used", "ttl"):
        assert getattr(again, field) == getattr(state, field)
    assert again.history.pieces() == state.history.pieces()


def test_states_of_others_are_refused() -> None:
    data = some_state().pack()
    with pytest.raises(CorruptRecord, match="another name"):
        unpack(data, name="b")
    with pytest.raises(CorruptRecord, match="another system"):
        unpack(data, system=bytes(31) + b"1")
    for changed in ({"context": replace(CONTEXT, extra=(("rope", "post"),))}, {"chunk_size": 16}):
        assert unpack(data, **changed).history.base == ()  # the tokens stay, the records are of no use


@pytest.mark.parametrize(
    "fields",
    [
        {"turns": -1}, {"dropped": 1}, {"ttl": 0.0}, {"ttl": 1e9}, {"used": -1.0}, {"used": float("nan")},
        {"ttl": float("nan")}, {"turns": 1.5}, {"used": 5}, {"seen": Seen(43, bytes(31), b"")},
        {"seen": Seen(43, bytes(32), bytes(8))},
    ],
)  # fmt: skip
def test_impossible_states_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(CorruptRecord, match="not the state of session 'a'"):
        unpack(some_state(**fields).pack())


def test_impossible_slices_are_refused() -> None:
    state = some_state()
    piece = state.history.base[0]
    for bad in (
        piece._replace(length=9), piece._replace(first=5), piece._replace(length=0), piece._replace(tokens=4000),
    ):  # fmt: skip
        history = replace(state.history, base=(bad,))
        with pytest.raises(CorruptRecord, match="slices contradict"):
            unpack(replace(state, history=history).pack())
    many = replace(state.history, base=state.history.base * 20)
    with pytest.raises(CorruptRecord, match="slices contradict"):
        unpack(replace(state, history=many).pack())


def test_a_state_that_is_too_large_is_not_written() -> None:
    tokens = np.zeros(MAX_TOKENS + 1, np.uint32)
    with pytest.raises(ConfigError, match="at most 4194304"):
        some_state(history=History(CONTEXT, CHUNK, tokens)).pack()


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_damaged_states_are_refused_or_whole(data: st.DataObject) -> None:
    packed = bytearray(some_state().pack())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(packed) - 1))
        packed[at] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(packed)))
    try:
        state = unpack(bytes(packed if data.draw(st.booleans()) else packed[:cut]))
    except CorruptRecord:
        return
    assert state.history.base_tokens <= len(state.history.tokens) <= state.seen.count
    state.history.pieces()


@given(st.binary(max_size=200))
@settings(max_examples=100, deadline=None)
def test_garbage_is_refused(data: bytes) -> None:
    with pytest.raises(CorruptRecord):
        unpack(data)


@given(st.lists(st.integers(0, 700), max_size=4))
def test_what_was_seen_does_not_depend_on_the_turns(cuts: list[int]) -> None:
    tokens = token_array(words(0, 700))
    seen, begin = Seen(), 0
    for end in [*sorted(cuts), 700]:
        seen = seen.plus(tokens[begin:end])
        begin = end
    assert seen == Seen().plus(tokens)
    assert seen != Seen().plus(tokens[::-1])
    assert seen.count == 700


# Anything.


@given(data=st.data(), rope=st.sampled_from(["pre", "post"]))
@settings(max_examples=60, deadline=None)
def test_names_stand_for_one_content_whatever_happens(data: st.DataObject, rope: str) -> None:
    """Conversations over two nodes that lose records: `FakeKV` asserts that a name never gets two contents, that what
    is loaded is what was stored; and what was not truncated is exact."""
    window, reserve = data.draw(st.sampled_from([36, 64])), 4
    contents: dict[bytes, bytes] = {}
    backend = DictBackend()
    with store_over(backend, chunk_size=CHUNK) as store:
        nodes = [
            over(
                store, window=window, reserve=reserve, rope=rope, contents=contents,
                sinks=data.draw(st.integers(0, 12)), keep_system=data.draw(st.booleans()),
                drop=data.draw(st.sampled_from([0.0, 0.3, 0.5, 1.0])),
            )
            for _ in range(2)
        ]  # fmt: skip
        systems = [[], SYSTEM]
        for _ in range(data.draw(st.integers(1, 20))):
            sessions = data.draw(st.sampled_from(nodes))
            name, system = data.draw(st.sampled_from("ab")), data.draw(st.sampled_from(systems))
            session = sessions.open(name, system=system)
            before = session.tokens.tolist()
            turn = session.turn([data.draw(st.integers(0, 1))] * data.draw(st.sampled_from([1, 8, 19])))
            kept, new = len(before) - turn.dropped, turn.tokens[len(before) - turn.dropped :].tolist()
            assert len(turn.tokens) <= window - reserve
            limits = sessions.limits
            head = min(max(limits.sinks, len(system) if limits.keep_system else 0), len(before))
            if turn.dropped:
                assert turn.tokens[:kept].tolist() == before[:head] + before[len(before) - (kept - head) :]
            assert new
            answer = [0] * data.draw(st.sampled_from([1, 5]))
            cache, hit = play(sessions, turn, answer)
            assert len(cache) == len(session.tokens) - 1
            assert hit < len(turn.input_ids[0])
            if not session.state().history.base:
                assert cache == compute([], session.tokens[:-1])
            position = 0
            for piece in turn.pieces:  # no gaps
                assert piece.position == position
                position = piece.end
            if data.draw(st.booleans()):
                keys = sorted(contents)
                store.delete_many([data.draw(st.sampled_from(keys))] if keys else [])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 0}, "window=0"),
        ({"window": 10, "reserve": 8}, "window=10 has no room beside reserve=8 and sinks=4"),
        ({"sinks": -1}, "sinks=-1"),
        ({"drop": 1.5}, "drop=1.5"),
        ({"ttl": 0}, "ttl=0"),
        ({"ttl": 1e9}, "ttl=1000000000.0"),
        ({"max_sessions": 0}, "max_sessions=0"),
    ],
)
def test_impossible_options(store: Store, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        over(store, **options)


def test_impossible_turns(store: Store) -> None:
    sessions = over(store)
    with pytest.raises(ConfigError, match="non-empty text"):
        sessions.open("")
    with pytest.raises(ConfigError, match="token id -1"):
        sessions.open("a", system=[-1])
    session = sessions.open("a")
    for arguments in ({}, {"new": [1], "whole": [1]}):
        with pytest.raises(ConfigError, match="either its new tokens or the whole"):
            session.turn(**arguments)
    for arguments in ({"new": []}, {"whole": []}):
        with pytest.raises(ConfigError, match="at least one new token"):
            session.turn(**arguments)
    with pytest.raises(ConfigError, match="token id 'x'"):
        session.turn(["x"])


def test_wrong_uses_name_what_is_wrong(store: Store) -> None:
    sessions: Any = over(store)
    turn: Any = sessions.open("a").turn([1, 2])
    other: Any = store
    uses: list[tuple[Callable[[], Any], str]] = [
        (lambda: SessionStore(other), "Store has no store"),
        (lambda: over(store, ttl="1h"), "ttl='1h'"),
        (lambda: over(store, drop="half"), "drop='half'"),
        (lambda: over(store, clock=5), "clock=5"),
        (lambda: sessions.open("n" * 1025), "nnn' cannot be the id of a session: it has more than 1024 bytes"),
        (lambda: sessions.open("\ud800"), "surrogates not allowed"),
        (lambda: sessions.open("a", timeout="soon"), "timeout='soon'"),
        (lambda: sessions.expire(""), "non-empty text"),
        (lambda: sessions.load(sessions.open("a")), "a turn is needed, as Session.turn gives it, not Session"),
        (lambda: over(store).load(turn), "turn of session 'a' belongs to another SessionStore"),
        (lambda: turn.served(1.5), "1.5 tokens"),
    ]
    for use, message in uses:
        with pytest.raises(ConfigError, match=message):
            use()
    assert sessions.open("é" * 512).turns == 0


def test_a_clock_of_whole_seconds(store: Store) -> None:
    sessions = over(store, clock=lambda: 1000)
    play(sessions, sessions.open("a").turn([1]), [2])
    assert over(store, clock=lambda: 1000).open("a").turns == 1


def test_a_turn_that_is_refused_or_given_up_leaves_no_trace(store: Store) -> None:
    session = over(store, window=32, sinks=0).open("a")
    session.turn([1, 2, 3]).finish([4])
    before = session.state()
    with pytest.raises(ConfigError, match="at least one new token"):
        session.turn(whole=[])
    with pytest.raises(ConfigError, match="no room"):
        session.turn(words(0, 40))
    session.turn(whole=words(50, 20))
    session.turn(whole=words(50, 80))
    assert session.state() == before
    turn = session.turn([5])
    assert turn.tokens.tolist() == [1, 2, 3, 4, 5]
    turn.finish()
    assert session.seen == 5
