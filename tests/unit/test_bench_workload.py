"""What the benchmark moves: deterministic, incompressible, and impossible to pass off."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import pytest

from kvstore.keys import Key, opaque_key
from kvstore_bench.workload import POISON, Region, Workload, same_bytes, size_name, stamp


def workload(count: int = 3, nbytes: int = 5000, run_id: str = "a") -> Workload:
    room = Workload.room(count, nbytes)
    return Workload(Region(room), Region(room), count=count, nbytes=nbytes, make_key=opaque_key, run_id=run_id)


def deliver(work: Workload) -> None:
    for source, destination in zip(work.sources, work.destinations, strict=True):
        destination[:] = source


def test_the_same_run_gives_the_same_bytes() -> None:
    one, two = workload(), workload()
    assert one.new_keys() == two.new_keys()
    assert [bytes(view) for view in one.sources] == [bytes(view) for view in two.sources]


def test_bytes_follow_from_key_and_size() -> None:
    one, other = workload(run_id="a"), workload(run_id="b")
    one.new_keys()
    other.new_keys()
    assert all(a[:32] != b[:32] and a[-32:] != b[-32:] for a, b in zip(one.sources, other.sources, strict=True))
    longer = workload(nbytes=5001)
    assert bytes(longer.sources[0][100:4000]) != bytes(one.sources[0][100:4000])
    assert stamp(b"k" * 32, 100) != stamp(b"k" * 32, 101)


def test_keys_are_never_used_twice() -> None:
    work = workload(count=4)
    names: list[Key] = [key for _ in range(50) for key in work.new_keys()]
    assert len(set(names)) == len(names) == 200


def test_the_bytes_cannot_be_compressed() -> None:
    work = workload(count=1, nbytes=1 << 20)
    assert len(zlib.compress(work.sources[0], 6)) > 0.999 * (1 << 20)


def test_no_two_records_share_a_page() -> None:
    work = workload(count=2, nbytes=1 << 18)
    pages = [bytes(view[at : at + 4096]) for view in work.sources for at in range(0, 1 << 18, 4096)]
    assert len(set(pages)) == len(pages)


def swap(work: Workload) -> None:
    first = bytes(work.destinations[0])
    work.destinations[0][:] = work.destinations[1]
    work.destinations[1][:] = first


def flip(work: Workload) -> None:
    work.destinations[0][2500] ^= 1


def untouched_page(work: Workload) -> None:
    work.destinations[0][4096:5000] = bytes([POISON]) * 904


def shift(work: Workload) -> None:
    work.destinations[0][:-1] = bytes(work.destinations[0][1:])


@pytest.mark.parametrize(
    ("damage", "expected"), [(swap, [0, 1]), (flip, [0]), (untouched_page, [0]), (shift, [0]), (lambda work: None, [])]
)
def test_damage_is_seen(damage: Callable[[Workload], None], expected: list[int]) -> None:
    work = workload()
    work.new_keys()
    work.poison()
    assert work.wrong() == [0, 1, 2]  # nothing arrived yet
    deliver(work)
    assert work.wrong() == []
    damage(work)
    assert work.wrong() == expected


def test_bytes_of_an_earlier_pass_cannot_pass() -> None:
    work = workload()
    work.new_keys()
    deliver(work)
    work.new_keys()
    assert work.wrong() == [0, 1, 2]


@pytest.mark.parametrize("nbytes", [1, 7, 32, 63, 4096, 4097])
def test_any_size_works(nbytes: int) -> None:
    work = workload(count=3, nbytes=nbytes)
    work.new_keys()
    assert [len(view) for view in work.sources] == [nbytes] * 3
    work.poison()
    deliver(work)
    assert work.wrong() == []


def test_same_bytes_compares_lengths_too() -> None:
    a, b = memoryview(bytearray(b"abc")), memoryview(bytearray(b"abcd"))
    assert not same_bytes(a, b)
    assert same_bytes(a, b[:3])
    assert same_bytes(a[:0], b[:0])


@pytest.mark.parametrize(
    ("nbytes", "name"),
    [(1, "1B"), (1000, "1000B"), (65536, "64KiB"), (1 << 20, "1MiB"), (16 << 20, "16MiB"), (1 << 30, "1GiB")],
)
def test_names_of_sizes(nbytes: int, name: str) -> None:
    assert size_name(nbytes) == name
