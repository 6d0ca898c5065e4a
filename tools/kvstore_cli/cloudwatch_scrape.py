"""What `kvstore cloudwatch publish` reads: /metrics of daemons, engines and exporters, as numbers of one interval.

A counter counts by how much it grew between two scrapes; one that became smaller began anew, and counts from 0. An
endpoint that does not answer is left out of the interval, and counts from its next two scrapes on. Values that are no
numbers, or larger than CloudWatch takes, are left out as if they were not there.
"""

from __future__ import annotations

import contextlib
import http.client
import math
import socket
import threading
import urllib.parse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvstore.errors import ConfigError, TransientError

__all__ = ["MOST", "Endpoint", "Interval", "Series", "parse_metrics", "quantile"]

_MOST_BYTES = 16 << 20
_ACCEPT = "text/plain;version=0.0.4"

MOST = 2.0**360
"""What CloudWatch takes, up or down."""

Series = tuple[str, frozenset[tuple[str, str]]]
"""(name of a sample, its labels)."""


def parse_metrics(text: str) -> dict[Series, float]:
    """The samples of Prometheus' text format.

    Raises:
        ConfigError: `prometheus_client` is not installed.
        ValueError: it is not that format.
    """
    try:
        from prometheus_client.parser import text_string_to_metric_families
    except ImportError as error:
        raise ConfigError("scraping needs prometheus_client: pip install 'kvstore[control]'", cause=error) from error
    return {
        (sample.name, frozenset(sample.labels.items())): float(sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if abs(sample.value) <= MOST and _has_bound(sample)
    }


def _has_bound(sample: Any) -> bool:
    """False for a bucket of a histogram without a bound that is a number."""
    if not sample.name.endswith("_bucket"):
        return True
    try:
        return not math.isnan(float(sample.labels["le"]))
    except (KeyError, ValueError):
        return False


class Endpoint:
    """One address that answers with metrics.

    Args:
        url: http or https.
        token: sent as a bearer token, if it is not empty.
        timeout: seconds for a scrape, all in all.

    Attributes:
        url: the same, for people: without its query, in which there may be a secret.

    Raises:
        ConfigError: no http URL, or one with a user or password in it.
    """

    def __init__(self, url: str, *, token: str = "", timeout: float = 5.0) -> None:
        try:
            parts = urllib.parse.urlsplit(url)
            found = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
        except ValueError:
            found = False
        if not found or "@" in parts.netloc:
            raise ConfigError(
                f"{url.rpartition('@')[2]!r:.120} is not an address such as http://127.0.0.1:7180/metrics "
                "(without a password: --token-file)"
            )
        path = parts.path if parts.path not in ("", "/") else "/metrics"
        self.url = urllib.parse.urlunsplit(parts._replace(path=path, query="", fragment=""))
        self._target = f"{path}?{parts.query}" if parts.query else path
        self._secure = parts.scheme == "https"
        self._host, self._port = str(parts.hostname), parts.port
        self._token = token
        self._timeout = timeout
        self._before: dict[Series, float] | None = None

    def scrape(self) -> dict[Series, float]:
        """What it answers now. A redirection is not followed: a token goes where it was meant to, or nowhere.

        Raises:
            TransientError: it does not answer, not all of it in time, or with something else.
        """
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=self._timeout)
        headers = {"Accept": _ACCEPT, **({"Authorization": f"Bearer {self._token}"} if self._token else {})}
        late = threading.Event()

        def cut_off() -> None:
            """Each byte in time is not enough: an answer may go on for ever."""
            late.set()
            held = connection.sock or opened
            if held is not None:
                with contextlib.suppress(OSError):
                    held.shutdown(socket.SHUT_RDWR)

        opened: socket.socket | None = None
        watch = threading.Timer(self._timeout, cut_off)
        watch.daemon = True
        watch.start()
        try:
            connection.connect()
            opened = connection.sock
            connection.request("GET", self._target, headers=headers)
            answer = connection.getresponse()
            body = answer.read(_MOST_BYTES + 1) if answer.status == 200 else b""
        except (OSError, http.client.HTTPException) as error:
            reason = f"not within {self._timeout:g} s" if late.is_set() else str(error) or type(error).__name__
            raise TransientError(f"{self.url} does not answer: {reason}", operation="scrape", cause=error) from error
        finally:
            watch.cancel()
            connection.close()
        if answer.status != 200:
            raise TransientError(f"{self.url} answered {answer.status}", operation="scrape")
        if late.is_set():
            raise TransientError(f"{self.url} does not answer: not within {self._timeout:g} s", operation="scrape")
        if len(body) > _MOST_BYTES:
            raise TransientError(f"{self.url} answers with more than {_MOST_BYTES >> 20} MiB", operation="scrape")
        try:
            return parse_metrics(body.decode("utf-8"))
        except ValueError as error:
            raise TransientError(f"{self.url} has no metrics: {error!s:.120}", operation="scrape") from error

    def advance(self, interval: Interval) -> None:
        """Scrape, and add to `interval` what happened since the scrape before.

        Raises:
            TransientError: see `scrape`; the next scrape then begins anew.
        """
        before, self._before = self._before, None
        now = self.scrape()
        self._before = now
        if before is not None:
            interval.add(before, now)


@dataclass
class Interval:
    """What all endpoints counted between two scrapes.

    Attributes:
        grown: by how much each sample grew.
        now: values at the end.
    """

    grown: dict[Series, float] = field(default_factory=dict)
    now: dict[Series, list[float]] = field(default_factory=dict)

    def add(self, before: Mapping[Series, float], now: Mapping[Series, float]) -> None:
        """Add one endpoint's two scrapes."""
        anew = {_whole(series) for series, value in now.items() if value < before.get(series, 0.0)}
        for series, value in now.items():
            self.now.setdefault(series, []).append(value)
            more = value if _whole(series) in anew else value - before.get(series, 0.0)
            self.grown[series] = self.grown.get(series, 0.0) + more

    def _matching(self, name: str, labels: Mapping[str, str]) -> Iterable[Series]:
        wanted = labels.items()
        return [series for series in self.now if series[0] == name and wanted <= dict(series[1]).items()]

    def has(self, name: str, **labels: str) -> bool:
        """Whether there is such a sample, whatever its value."""
        return bool(self._matching(name, labels))

    def sum(self, name: str, **labels: str) -> float | None:
        """By how much samples of this name, with at least these labels, grew together; None if there is none."""
        found = [self.grown[series] for series in self._matching(name, labels)]
        return math.fsum(found) if found else None

    def values(self, name: str, **labels: str) -> list[float]:
        """The values of now, of all endpoints."""
        return [value for series in self._matching(name, labels) for value in self.now[series]]

    def by_labels(self, name: str) -> dict[frozenset[tuple[str, str]], list[float]]:
        """The values of now, by labels."""
        return {series[1]: self.now[series] for series in self._matching(name, {})}

    def buckets(self, name: str) -> list[tuple[float, float]]:
        """(upper bound, how many more values are at most so large), rising, of a histogram over all its labels."""
        sums: dict[float, float] = {}
        for series in self._matching(f"{name}_bucket", {}):
            bound = float(dict(series[1])["le"])
            sums[bound] = sums.get(bound, 0.0) + self.grown[series]
        return sorted(sums.items())


def _whole(series: Series) -> Series:
    """What begins anew together with a sample: all of a histogram, or it alone."""
    name, labels = series
    for end in ("_bucket", "_count", "_sum"):
        if name.endswith(end):
            return name.removesuffix(end), frozenset(label for label in labels if label[0] != "le")
    return series


def quantile(buckets: Sequence[tuple[float, float]], share: float) -> float | None:
    """The value below which `share` of a histogram's values lie: between the bounds of its bucket in a straight line,
    as Prometheus' histogram_quantile. Beyond the last bound it is that bound. None without values.

    Args:
        buckets: as `Interval.buckets` gives them, the last of them infinite.
    """
    if not buckets or buckets[-1][1] <= 0:
        return None
    rank = share * buckets[-1][1]
    low = below = 0.0
    for bound, count in buckets:
        if count >= rank:
            if math.isinf(bound):
                return low
            return low + (bound - low) * ((rank - below) / (count - below) if count > below else 1.0)
        low, below = bound, count
    return low
