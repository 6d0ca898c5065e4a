"""What callers hand over, checked before anything else sees it: wants, items, keys."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import pairwise

from .buffers import Buffer
from .errors import ConfigError
from .flights import Flight
from .keys import Key
from .targets import Item, Progress, Want, flat_bytes

__all__ = ["check_apart", "check_keys", "check_once", "prepare", "segments_of"]


def _not_a_key(value: object) -> ConfigError:
    return ConfigError(
        f"a record is named by a Key (kvstore.chunk_keys, kvstore.opaque_key), not by {type(value).__name__}"
    )


def check_keys(keys: object) -> None:
    """Raises `ConfigError` for anything but a sequence of keys, before any backend sees it."""
    if isinstance(keys, str | bytes) or not isinstance(keys, Sequence):
        raise ConfigError(f"a list of keys is needed, not {type(keys).__name__}")
    for key in keys:
        if key.__class__ is not Key:
            raise _not_a_key(key)


def prepare(want: Want) -> Flight:
    """The flight of a want.

    Raises:
        ConfigError: its fields are not what they must be, or do not fit each other; its progress is in use.
    """
    if want.__class__ is not Want:
        raise ConfigError(f"a Want is needed, not {type(want).__name__}")
    flight = _flight_of(want)
    if want.memo is not None:
        flight.memo = want.memo
    if want.level is not None:
        if type(want.level) is not int or not 0 <= want.level <= 255:
            raise ConfigError(f"level={want.level!r} of a Want must be None or an integer from 0 to 255")
        flight.level = want.level
    if want.progress is not None:
        _follow(flight, want.progress, want.hold)
    return flight


def _follow(flight: Flight, progress: Progress, hold: Buffer | None) -> None:
    """`flight` goes on where `progress` is."""
    if not isinstance(progress, Progress):
        raise ConfigError(f"a Progress is needed, not {type(progress).__name__}")
    places = [ctypes.addressof(ctypes.c_char.from_buffer(view)) if len(view) else 0 for view in flight.views]
    progress.claim((flight.key, flight.first, flight.spec.sizes, tuple(places)), hold)
    flight.progress = flight.hold = progress
    flight.ask_for(flight.level)


def _flight_of(want: Want) -> Flight:
    key, dst, spec, first, count, hold, _, _, _ = want
    if key.__class__ is not Key:
        raise _not_a_key(key)
    total = len(spec.sizes)
    if count is None:
        count = total - first
    if first < 0 or count < 1 or first + count > total:
        raise ConfigError(f"segments {first}..{first + count - 1} asked for, but the record has {total}")
    if isinstance(dst, list | tuple):
        views = [flat_bytes(view, writable=True)[:] for view in dst]
        sizes = spec.sizes[first : first + count]
        if len(views) != count or any(len(view) != size for view, size in zip(views, sizes, strict=True)):
            raise ConfigError(
                f"{len(views)} destinations of {list(map(len, views))[:4]}… bytes do not fit {count} segments"
            )
        return Flight(key, spec, first, views, views[0] if count == 1 else None, sum(sizes), hold)
    # A view of our own: the caller may release his after a cancel.
    flat = flat_bytes(dst, writable=True)[:]
    nbytes = len(flat)
    if total == 1 and nbytes == spec.raw_bytes:
        return Flight(key, spec, 0, (flat,), flat, nbytes, hold)
    return Flight(key, spec, first, spec.split(flat, first, count), flat, nbytes, hold)


def segments_of(item: Item) -> Sequence[memoryview]:
    """The segments of an item as flat views of bytes. Raises `ConfigError` if they are not, or do not fit its spec."""
    if item.__class__ is not Item:
        raise ConfigError(f"an Item is needed, not {type(item).__name__}")
    if item.key.__class__ is not Key:
        raise _not_a_key(item.key)
    views = [flat_bytes(segment, writable=False) for segment in item.segments]
    if tuple(map(len, views)) != item.spec.sizes:
        raise ConfigError(
            f"{len(views)} segments of {list(map(len, views))[:4]}… bytes do not fit the spec"
            f" ({len(item.spec.sizes)} of {list(item.spec.sizes[:4])}…)"
        )
    return views


def check_apart(views: Sequence[memoryview]) -> None:
    """Raises `ConfigError` if two destinations overlap: what one read brings the other would spoil."""
    spans = sorted((ctypes.addressof(ctypes.c_char.from_buffer(view)), len(view)) for view in views if len(view))
    for (begin, nbytes), (following, _) in pairwise(spans):
        if begin + nbytes > following:
            raise ConfigError("buffers to read into overlap")


def check_once(wants: Sequence[Want]) -> None:
    """Raises `ConfigError` if one object is the destination of two wants that are not the same."""
    seen: dict[int, Want] = {}
    for want in wants:
        other = seen.setdefault(id(want.dst), want)
        if len(want.dst) and (other.key, other.first, other.spec) != (want.key, want.first, want.spec):
            raise ConfigError("one destination is given for two different wants; destinations must not overlap")
