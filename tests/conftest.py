"""What holds for every test: deterministic hypothesis, canaries in free pool memory, and nothing left behind."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from kvstore.testing.audit import LeakAudit, track_pools
from tests.servers.fixtures import *  # noqa: F403 - fixtures of servers, by name

settings.register_profile(
    "kvstore", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("explore", deadline=None, database=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "kvstore"))

_CANARY = "KVSTORE_POOL_CANARY"
_canary_before = os.environ.get(_CANARY)


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell's background jobs have it; children inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.addinivalue_line(
        "markers",
        "leaves(reason): the test may leave threads, descriptors or children behind (a library's own, for instance); "
        "buffer pools are audited all the same",
    )
    # UCX looks for devices once per process: one that another test has made (a veth pair) and removes would be missed.
    os.environ.setdefault("UCX_NET_DEVICES", "lo")
    os.environ[_CANARY] = "1"  # a pool fills free memory with 0xA5, and checks it before it hands it out


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Last those that leave things behind: what a library closes later would count against the test of that moment."""
    items.sort(key=lambda item: item.get_closest_marker("leaves") is not None)


def pytest_collection_finish() -> None:
    """What was imported and collected lives to the end: no garbage collection of a test looks through it (0.2 s)."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from tests.spread import Runs

    return Runs(config, log)


def pytest_unconfigure(config: pytest.Config) -> None:
    if _canary_before is None:
        os.environ.pop(_CANARY, None)
    else:
        os.environ[_CANARY] = _canary_before


@pytest.fixture(autouse=True)
def leak_audit(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a thread, a descriptor, a child process, or memory of a pool in use.

    Set up before, and so torn down after, the test's own fixtures.
    """
    audit = LeakAudit()
    with track_pools() as pools:
        yield
    found = audit.problems(pools)
    if request.node.get_closest_marker("leaves") is not None:
        found = [problem for problem in found if "buffer pool" in problem]
    if found:
        pytest.fail("left behind: " + "; ".join(found), pytrace=False)
