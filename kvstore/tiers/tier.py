"""One tier: a backend, how much of it may be used, and who goes first. Its state is under the hierarchy's lock."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from kvstore.backend import Backend, Capability
from kvstore.buffers import Buffer
from kvstore.errors import ClosedError, ConfigError
from kvstore.eviction import EvictionPolicy, RecordInfo, make_policy
from kvstore.keys import Key

__all__ = ["Tier"]

_MAX_USED_ONCE = 1 << 16
_MAX_UNSURE = 1 << 16
_SWEEP_LEASES = 1024


class Tier:
    """A place of a `TieredBackend`, fastest first.

    Args:
        backend: where the records lie. One with a capacity of its own must refuse when it is full (policy `none`):
            the order in which records go is the tier's.
        capacity: bytes of records; None: no limit, no accounting, nothing ever leaves.
        policy: name of a policy of `kvstore.eviction`, or one; only used with a capacity.
        high, low: from `high` of the capacity on records are moved down in the background, until `low` is reached.
        promote: whether what is found below comes up here: "always", "second_use" or "never".
        write: "through": a put goes on to the next tier before it is acknowledged; "back": it is acknowledged once it
            is here, and brought down in the background.
        queue_bytes: what may wait to be brought down (write: back); a put beyond that goes through.
        timeout: the most seconds that one read or question may wait for this tier while there are others to ask; None:
            half of what is left of the deadline.
        ttl_factor: a record's own time to live is multiplied by this here; None: 2 to the power of the tier's place.
        name: in statistics; default: the backend's.

    Raises:
        ConfigError: an argument out of range, or an unknown policy.
    """

    def __init__(
        self,
        backend: Backend,
        capacity: int | None = None,
        *,
        policy: str | EvictionPolicy = "default",
        high: float = 0.95,
        low: float = 0.90,
        promote: str = "always",
        write: str = "through",
        queue_bytes: int = 256 << 20,
        timeout: float | None = None,
        ttl_factor: float | None = None,
        name: str | None = None,
    ) -> None:
        self.backend = backend
        self.name = name or backend.name
        if capacity is not None and capacity < 1:
            raise ConfigError(f"tier {self.name}: a capacity of {capacity} bytes; it must be at least 1")
        if not 0 < low <= high <= 1:
            raise ConfigError(f"tier {self.name}: watermarks {low} and {high}; needed is 0 < low <= high <= 1")
        if promote not in ("always", "second_use", "never"):
            raise ConfigError(f"tier {self.name}: promote is {promote!r}; choices: always, second_use, never")
        if write not in ("through", "back"):
            raise ConfigError(f"tier {self.name}: write is {write!r}; choices: through, back")
        if queue_bytes < 0 or (timeout is not None and not timeout > 0) or (ttl_factor is not None and ttl_factor <= 0):
            raise ConfigError(f"tier {self.name}: queue, timeout and ttl_factor must be positive")
        self.capacity = capacity
        self.policy: EvictionPolicy | None = None
        if capacity is not None:
            self.policy = make_policy(policy) if isinstance(policy, str) else policy
        self.expires = self.policy is not None and self.policy.expires  # by age, whatever the load
        self.high, self.low = high, low
        self.promote, self.write = promote, write
        self.queue_bytes = queue_bytes
        self.timeout = timeout
        self.ttl_factor = ttl_factor
        self.reserved = 0  # bytes of writes under way
        self.wanted = 0  # bytes that somebody could not get
        self.pressed = 0  # bytes that should go although there is room, for the place itself says that it is full
        self.owed: dict[Key, int] = {}  # what is to be brought down, and its bytes
        self.owed_bytes = 0
        self.stuck: dict[Key, float] = {}  # could not be moved down: until when others are tried before
        self.unsure_bytes = 0  # what those may occupy beside what is counted
        self.unsure: dict[Key, int] = {}  # after a failed call: there or not, nobody knows
        self.listing = False  # what lay here before is being listed
        self.gone: set[Key] = set()  # … and this went meanwhile
        self.used_once: dict[Key, None] = {}  # read below, for promote: second_use
        self.counts: Counter[str] = Counter()
        self._leases: dict[Key, list[Buffer]] = {}
        self._zombies: list[tuple[int, list[Buffer]]] = []  # gone, but their memory is still leased

    @property
    def largest(self) -> int:
        """The largest record that can lie here, in bytes."""
        most = self.backend.limits.max_value_bytes
        return most if self.capacity is None else min(most, self.capacity)

    @property
    def durable(self) -> bool:
        return Capability.DURABLE in self.backend.capabilities

    @property
    def uncertain(self) -> bool:
        """What lies here is not known yet, and the backend does not keep a limit by itself: nothing may be added."""
        return self.listing and Capability.CAPACITY not in self.backend.capabilities

    # What follows needs the hierarchy's lock.

    @property
    def used(self) -> int:
        """Bytes of the records here, as counted; 0 without a capacity."""
        return 0 if self.policy is None else self.policy.nbytes

    @property
    def occupied(self) -> int:
        """Bytes of the capacity that are taken: records, writes under way, writes of which nobody knows whether they
        failed, what is gone but leased."""
        if self._zombies:
            self._zombies = [(size, live) for size, held in self._zombies if (live := _live(held))]
        return self.used + self.reserved + self.unsure_bytes + sum(size for size, _ in self._zombies)

    def reserve(self, nbytes: int) -> bool:
        """Take room for a write. False: there is none."""
        if self.capacity is not None and (self.uncertain or self.occupied + nbytes > self.capacity):
            return False
        self.reserved += nbytes
        return True

    def admit(self, key: Key, nbytes: int, place: int, parent: Key | None, info: RecordInfo | None) -> None:
        """A record is here now."""
        if self.policy is None:
            return
        if info is not None and info.ttl is not None:
            factor = 2.0**place if self.ttl_factor is None else self.ttl_factor
            info = info._replace(ttl=info.ttl * factor)
        self.policy.admit(key, nbytes, parent=parent, info=info)
        self._sure(key)
        if self.listing:
            self.gone.discard(key)

    def forget(self, key: Key) -> int:
        """A record is no longer here. Returns the bytes it had, as counted."""
        if self.policy is None:
            return 0
        nbytes = self.policy.forget(key)
        self.pressed = max(0, self.pressed - nbytes)
        self._sure(key)
        self.stuck.pop(key, None)
        if self.listing:
            self.gone.add(key)
        held = self._leases.pop(key, None)
        if held and nbytes and (live := _live(held)):
            self._zombies.append((nbytes, live))
        return nbytes

    def doubt(self, key: Key, nbytes: int = 0) -> None:
        """A call failed in the middle: whether the record is here must be asked again.

        Args:
            nbytes: of a put: what it may occupy.
        """
        if self.policy is None or (key not in self.unsure and len(self.unsure) >= _MAX_UNSURE):
            return
        nbytes = 0 if key in self.policy else max(nbytes, self.unsure.get(key, 0))
        self._sure(key)
        self.unsure[key] = nbytes
        self.unsure_bytes += nbytes

    def _sure(self, key: Key) -> None:
        self.unsure_bytes -= self.unsure.pop(key, 0)

    def owe(self, key: Key, nbytes: int) -> None:
        """The record has to be brought down."""
        self.owed_bytes += nbytes - self.owed.get(key, 0)
        self.owed[key] = nbytes

    def settle(self, key: Key) -> None:
        """It need not be brought down any more."""
        self.owed_bytes -= self.owed.pop(key, 0)

    def second_use(self, key: Key) -> bool:
        """Whether a record that was read below should come up, by the option `promote`."""
        if self.promote != "second_use":
            return self.promote == "always"
        seen = self.used_once
        if key in seen:
            del seen[key]
            return True
        seen[key] = None
        if len(seen) > _MAX_USED_ONCE:
            del seen[next(iter(seen))]
        return False

    def lend(self, keys: Sequence[Key], buffers: Iterable[Buffer | None]) -> None:
        """Records were leased: while they are, removing them frees nothing."""
        leases = self._leases
        if len(leases) > _SWEEP_LEASES:
            self._leases = leases = {key: live for key, held in leases.items() if (live := _live(held))}
        for key, buffer in zip(keys, buffers, strict=True):
            if buffer is not None:
                leases.setdefault(key, []).append(buffer)

    def leased(self, key: Key) -> bool:
        """Whether somebody holds a lease on the record."""
        held = self._leases.get(key)
        if held is None:
            return False
        if live := _live(held):
            self._leases[key] = live
            return True
        del self._leases[key]
        return False

    @property
    def crowded(self) -> bool:
        """Whether the high watermark is passed."""
        return self.capacity is not None and self.occupied > self.capacity * self.high

    def excess(self) -> int:
        """Bytes that should go: above the high watermark, down to the low one; or what somebody waits for; or what the
        place itself wants freed."""
        if self.capacity is None or self.policy is None:
            return 0
        occupied, excess = self.occupied, min(self.pressed, self.used)
        if self.crowded and len(self.policy) > 1:  # one that is larger than the mark may stay
            excess = max(excess, occupied - math.floor(self.capacity * self.low))
        if self.wanted:
            excess = max(excess, occupied + min(self.wanted, self.capacity) - self.capacity)
        return excess

    def stats(self) -> dict[str, int | float | str | None]:
        """See `TieredBackend.stats`."""
        return {
            "name": self.name,
            "capacity": self.capacity,
            "used": self.used,
            "records": 0 if self.policy is None else len(self.policy),
            "reserved": self.reserved,
            "queued_bytes": self.owed_bytes,
            "queued_records": len(self.owed),
            **{name: self.counts[name] for name in COUNTS},
        }


COUNTS = (
    "hits", "misses", "errors", "hit_bytes", "stored", "stored_bytes", "refused", "promotions", "promoted_bytes",
    "demotions", "demoted_bytes", "released", "drops", "dropped_bytes", "expired", "quarantined",
)  # fmt: skip
"""What is counted per tier. hits, misses, errors: items of reads that came to this tier; stored: records written here,
by puts and moves; refused: no room; promotions: came up to this tier; demotions: went from here to a slower one;
released: left this tier because a slower one had them already; drops: left the store."""


def _live(buffers: list[Buffer]) -> list[Buffer]:
    """Those that nobody has given back."""
    live = []
    for buffer in buffers:
        try:
            _ = buffer.view
        except ClosedError:
            continue
        live.append(buffer)
    return live
