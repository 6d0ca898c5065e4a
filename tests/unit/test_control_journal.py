"""The journal: numbered batches, bounded, with a gap for who falls behind."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.control.journal import ADMIT, CLEAR, EVICT, Event, Journal, split_keys
from kvstore.errors import ConfigError
from kvstore.keys import Key


def _keys(*numbers: int) -> list[Key]:
    return [Key(bytes([number]) * 32) for number in numbers]


def test_batches_come_back_in_order_with_numbers_that_follow_each_other() -> None:
    journal = Journal()
    journal.append("", "memory", ADMIT, _keys(1, 2))
    journal.append("a", "disk", EVICT, _keys(3))
    journal.append("", "memory", ADMIT, ())  # nothing to tell
    journal.append("", "memory", CLEAR)
    found = journal.read(0)
    assert found == (journal.epoch, [
        Event(1, "", "memory", ADMIT, b"".join(_keys(1, 2))),
        Event(2, "a", "disk", EVICT, b"".join(_keys(3))),
        Event(3, "", "memory", CLEAR, b""),
    ], 3, False)  # fmt: skip
    assert journal.read(2).events == found.events[2:]
    assert journal.read(3) == (journal.epoch, [], 3, False)
    assert split_keys(found.events[0].keys) == _keys(1, 2)


def test_who_falls_behind_is_told_by_a_gap_and_can_go_on_from_its_end() -> None:
    journal = Journal(capacity=40)
    for number in range(10):
        journal.append("", "memory", ADMIT, _keys(number, number, number))
    found = journal.read(0)
    assert found.gap
    assert not found.events
    assert found.next == journal.head == 10
    journal.append("", "memory", ADMIT, _keys(99))
    assert [event.seq for event in journal.read(found.next).events] == [11]
    # A number that was never given is from another journal.
    assert journal.read(500).gap
    assert journal.read(-1).gap


def test_an_event_that_is_larger_than_the_journal_is_kept_until_the_next_one() -> None:
    journal = Journal(capacity=2)
    journal.append("", "memory", ADMIT, _keys(*range(50)))
    assert len(journal.read(0).events[0].keys) == 50 * 32
    journal.append("", "memory", ADMIT, _keys(1))
    assert journal.read(0).gap


@given(st.lists(st.integers(1, 30), max_size=60), st.integers(1, 80), st.integers(1, 100))
def test_a_reader_that_keeps_up_sees_everything_once(sizes: list[int], limit: int, capacity: int) -> None:
    journal = Journal(capacity)
    since, seen = 0, []
    for size in sizes:
        journal.append("", "memory", ADMIT, _keys(*range(size)))
        while True:
            found = journal.read(since, limit=limit)
            assert not found.gap
            seen += [event.seq for event in found.events]
            since = found.next
            if not found.events:
                break
    assert seen == list(range(1, len(sizes) + 1))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=40), st.integers(1, 60), st.data())
def test_what_is_kept_is_a_suffix_and_bounded(sizes: list[int], capacity: int, data: st.DataObject) -> None:
    journal = Journal(capacity)
    for size in sizes:
        journal.append("", "memory", ADMIT, _keys(*range(size)))
    since = data.draw(st.integers(0, len(sizes)))
    found = journal.read(since)
    if found.gap:
        assert sum(size + 8 for size in sizes[since:]) > capacity
    else:
        assert [len(event.keys) // 32 for event in found.events] == sizes[since:]


def test_a_reader_waits_for_the_next_event_and_wake_ends_the_wait() -> None:
    journal = Journal()
    found: list[int] = []
    reader = threading.Thread(target=lambda: found.append(len(journal.read(0, timeout=60).events)))
    reader.start()
    journal.append("", "memory", ADMIT, _keys(1))
    reader.join(30)
    assert found == [1]
    reader = threading.Thread(target=lambda: found.append(len(journal.read(1, timeout=60).events)))
    reader.start()
    while reader.is_alive():  # a wake before it waits is not remembered
        journal.wake()
        reader.join(0.01)
    assert found == [1, 0]


def test_many_writers_lose_nothing() -> None:
    journal = Journal()

    def write(number: int) -> None:
        for _ in range(200):
            journal.append(str(number), "memory", ADMIT, _keys(number))

    writers = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    events = journal.read(0, limit=1 << 20).events
    assert [event.seq for event in events] == list(range(1, 801))
    assert {namespace: sum(event.namespace == namespace for event in events) for namespace in "0123"} == dict.fromkeys(
        "0123", 200
    )


def test_nonsense_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="'removed'"):
        Journal().append("", "memory", "removed", _keys(1))
    with pytest.raises(ConfigError, match="at least 1"):
        Journal(0)
    with pytest.raises(ConfigError, match="33 bytes"):
        split_keys(b"x" * 33)
