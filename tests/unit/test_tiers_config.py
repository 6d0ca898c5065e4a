"""The option `tiers`, in all its forms, and LMCache's names for the same."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore.config import Config, load_config
from kvstore.errors import ConfigError
from kvstore.tiers import TIER_OPTIONS, TierConfig
from kvstore.wrappers import unwrap


def load(remote_url: object = None, *, env: dict[str, str] | None = None, **options: Any) -> Config:
    return load_config(remote_url, env=env or {}, **options)


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        path = tmp_path / "kv.yaml"
        path.write_text(text)
        return path

    return write


def shown(config: Config) -> list[tuple[str, dict[str, Any]]]:
    return [(str(tier.url), dict(tier.values)) for tier in config.tiers]


WANTED = [
    ("memory://?bytes=16MiB", {"promote": "second_use", "low_watermark": 0.5}),
    ("file:///nvme/kv?bytes=400GiB", {"write": "back", "queue": 1 << 20}),
    ("s3://bucket/prefix?region=us-west-2", {}),
]
YAML = """
tiers:
  - url: memory://?bytes=16MiB
    promote: second_use
    low_watermark: 0.5
  - {url: "file:///nvme/kv?bytes=400GiB", write: back, queue: 1MiB}
  - s3://bucket/prefix?region=us-west-2
"""


def test_tiers_from_every_source(write: Callable[[str], Path]) -> None:
    assert shown(load(config_file=write(YAML))) == WANTED
    text = textwrap.dedent(YAML.partition("tiers:")[2])
    assert shown(load(env={"KVSTORE_TIERS": text.strip()})) == WANTED
    json = '[{"url": "memory://?bytes=1MiB", "write": "back"}, "file:///kv"]'
    assert shown(load(env={"KVSTORE_TIERS": json})) == [("memory://?bytes=1MiB", {"write": "back"}), ("file:///kv", {})]
    assert shown(load(env={"KVSTORE_TIERS": "memory://?bytes=1MiB, file:///kv"})) == [
        ("memory://?bytes=1MiB", {}),
        ("file:///kv", {}),
    ]
    given: list[Any] = [{"url": "memory://", "bytes": "2MiB", "policy": "fifo"}, "file:///kv"]
    config = load(tiers=given)
    assert shown(config) == [("memory://", {"bytes": 2 << 20, "policy": "fifo"}), ("file:///kv", {})]
    assert Config(tiers=config.tiers).tiers == config.tiers
    assert config.remote_url == ()


def test_remote_url_is_the_last_tier() -> None:
    config = load("file:///kv", tiers=["memory://?bytes=1MiB"])
    assert [url.base for url in config.urls] == ["memory://", "file:///kv"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tiers": []}, "empty list"),
        ({"tiers": 7}, "must be a list"),
        ({"tiers": [{"bytes": 1}]}, "has no url"),
        ({"tiers": ["nonsense"]}, "a backend is named by"),
        ({"tiers": [3]}, "a tier must be a URL or a map with a url, not int"),
        ({"tiers": [{"url": None}]}, "a tier must be a URL or a map with a url, not NoneType"),
        ({"tiers": [{"url": "memory://", "policy_options": {"clock": 3}}]}, "policy_options has no 'clock'"),
        ({"tiers": [["memory://", "file:///kv"]]}, "a tier is one place, but 2 URLs"),
        (
            {"tiers": [{"url": "memory://", "promot": "never"}]},
            "unknown option 'promot' for tier memory://; did you mean",
        ),
        ({"tiers": [{"url": "memory://", "promote": "often"}]}, r"option 'promote': 'often' is not one of .*memory://"),
        ({"tiers": [{"url": "memory://", "write": None}]}, "option 'write' of tier memory:// is empty"),
        ({"tiers": [{"url": "memory://", "high_watermark": 1.5}]}, "out of range"),
        ({"tiers": [{"url": "memory://", "low_watermark": 0.99}]}, "low_watermark is above high_watermark"),
        ({"tiers": [{"url": "memory://", "policy_options": {"nonsense": 1}}]}, "nonsense"),
        ({"tiers": [{"url": "memory://", "policy_options": 3}]}, "must map names to values"),
        (
            {"tiers": [{"url": "memory://", "policy": "ttl", "policy_options": {"ttl": "soon"}}]},
            "option 'ttl' of the eviction policy ttl must be a number, not 'soon'",
        ),
        ({"tiers": ["file:///kv", "file:///kv/"]}, "tiers name file:///kv twice"),
        (
            {"tiers": ["memory://", "memory://?bytes=1GiB"]},
            "tiers name memory:// twice; give each its own option 'name'",
        ),
        ({"tiers": ["memory://"], "remote_url": "memory://"}, "tiers and remote_url name memory:// twice"),
        ({"tiers": ["memory://"], "remote_url": ["file:///a", "file:///b"]}, "room for one"),
        ({"tiers": ["memory://", "file:///a"], "replicas": 2}, "replicas must be 1 with tiers"),
        ({"tiers": ["memory://"], "local_cpu": True}, "tiers are given .* and LMCache's local_cpu too"),
    ],
)
def test_what_makes_no_sense_is_an_error(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(options.pop("remote_url", None), **options)


def test_secrets_in_tiers_are_not_shown() -> None:
    with pytest.raises(ConfigError) as caught:
        load(tiers=["s3://user:hunter2@bucket"])
    assert "hunter2" not in str(caught.value)
    config = load(
        tiers=["memory://?bytes=1MiB", "s3://bucket"], backend_options={"s3": {"secret_access_key": "hunter2"}}
    )
    assert config.backend_overrides(config.tiers[1].url)["secret_access_key"].value == "hunter2"  # type: ignore[attr-defined]
    assert "hunter2" not in repr(config) + config.describe()
    assert "memory://" in config.describe()


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"local_cpu": True}, [("memory://", {"bytes": 5 * 10**9})]),
        ({"max_local_cpu_size": 1.5}, [("memory://", {"bytes": 1_500_000_000})]),
        ({"max_local_cpu_size": "2GiB"}, [("memory://", {"bytes": 2 << 30})]),
        ({"local_cpu": False, "max_local_cpu_size": 20}, []),
        ({"local_cpu": True, "max_local_cpu_size": 0}, []),
        ({"cache_policy": "LRU"}, []),
        ({"local_disk": None, "max_local_disk_size": 0}, []),
        ({"local_disk": "file:///nvme/kv/", "max_local_disk_size": 3}, [("file:///nvme/kv", {"bytes": 3 * 10**9})]),
        ({"local_disk": "/nvme/kv", "max_local_disk_size": 3, "cache_policy": "FIFO"},
         [("file:///nvme/kv", {"bytes": 3 * 10**9, "policy": "fifo"})]),
        ({"local_cpu": True, "local_disk": "/nvme", "max_local_disk_size": 1},
         [("memory://", {"bytes": 5 * 10**9}), ("file:///nvme", {"bytes": 10**9})]),
    ],
)  # fmt: skip
def test_lmcaches_names(given: dict[str, Any], wanted: list[tuple[str, dict[str, Any]]]) -> None:
    config = load("s3://bucket", **given)
    assert shown(config) == wanted
    assert config.notes == ()
    env = {f"LMCACHE_{name.upper()}": str(value) for name, value in given.items()}
    assert shown(load("s3://bucket", env=env)) == wanted


def test_what_lmcaches_names_cannot_give() -> None:
    config = load("s3://bucket", local_cpu=True, cache_policy="MRU")
    assert "no policy mru" in config.notes[0]
    for given, message in (
        ({"local_disk": "/nvme"}, "needs 'max_local_disk_size'"),
        ({"local_disk": "s3://x", "max_local_disk_size": 1}, "must name one folder"),
        ({"local_disk": "/a,/b", "max_local_disk_size": 1}, "must name one folder"),
    ):
        with pytest.raises(ConfigError, match=message):
            load("s3://bucket", **given)


def test_a_store_runs_on_what_was_configured(tmp_path: Path) -> None:
    """Capacities, policies and modes arrive, and each backend below refuses instead of evicting by itself."""
    tiers = [
        {"url": "memory://?bytes=1MiB&policy=fifo", "high_watermark": 0.8, "low_watermark": 0.7, "write": "back"},
        {"url": f"file://{tmp_path}/kv?name=nvme", "bytes": "8MiB", "promote": "never", "timeout": "2s"},
    ]
    with kvstore.open_store(f"file://{tmp_path}/far", tiers=tiers, buffer_pool_bytes="1MiB") as store:
        assert store.tiers is not None
        first, second, third = store.tiers.tiers
        assert [tier.name for tier in store.tiers.tiers] == ["memory://", "nvme", f"file://{tmp_path}/far"]
        assert (first.capacity, first.high, first.low, first.write) == (1 << 20, 0.8, 0.7, "back")
        assert (second.capacity, second.promote, second.timeout, third.capacity) == (8 << 20, "never", 2.0, None)
        assert first.policy is not None
        assert first.policy.name == "fifo"
        assert third.policy is None
        assert unwrap(first.backend).store.asked == (1 << 20, "none")  # type: ignore[attr-defined]
        assert unwrap(second.backend)._policy == "none"  # type: ignore[attr-defined]
        assert store.put_many({"name": b"bytes"})[0].ok
        assert store.get_many(["name"]) == [b"bytes"]
        assert [tier["name"] for tier in store.stats()["tiers"]] == [tier.name for tier in store.tiers.tiers]
        assert "kvstore_tier_used_bytes" in store.metrics.snapshot()
    with kvstore.open_store(f"file://{tmp_path}/far", buffer_pool_bytes="1MiB") as store:
        assert store.tiers is None
        assert store.get_many(["name"]) == [b"bytes"], "what memory had acknowledged was brought down at the close"


def test_every_option_of_a_tier_is_documented() -> None:
    text = (Path(__file__).parents[2] / "docs" / "tiers.md").read_text(encoding="utf-8")
    for option in TIER_OPTIONS:
        assert f"`{option.name}" in text, option.name
    assert TierConfig(kvstore.parse_url("memory://")).get("write") == "through"
