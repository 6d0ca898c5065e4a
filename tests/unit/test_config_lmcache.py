"""LMCache's option names: what is used, what is noted, what is refused."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kvstore._lmcache as lmcache
from kvstore.config import OPTIONS, Config, load_config
from kvstore.errors import ConfigError

URL = "memory://"


def load(remote_url: object = URL, *, env: dict[str, str] | None = None, **options: Any) -> Config:
    """`load_config` in an environment of its own."""
    return load_config(remote_url, env=env or {}, **options)


def _one(name: str, value: object) -> dict[str, Any]:
    return {name: value}


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    """Writes a configuration file and returns its path."""

    def write(text: str | bytes) -> Path:
        path = tmp_path / "kv.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


@pytest.mark.parametrize(
    ("name", "value", "ours", "parsed"),
    [
        ("chunk_size", 512, "chunk_size", 512),
        ("save_unfull_chunk", True, "save_unfull_chunk", True),
        ("remote_serde", "naive", "remote_serde", "raw"),
        ("blocking_timeout_secs", 7, "blocking_timeout", 7.0),
        ("blocking_timeout_secs", 0.5, "blocking_timeout", 0.5),
        ("blocking_timeout_secs", "7", "blocking_timeout", 7.0),
        ("blocking_timeout_secs", "1e1", "blocking_timeout", 10.0),
        ("blocking_timeout_secs", "7min", "blocking_timeout", 420.0),
        ("lookup_timeout_ms", 20, "lookup_timeout", 0.02),
        ("lookup_timeout_ms", "20", "lookup_timeout", 0.02),
        ("lookup_timeout_ms", 1500.5, "lookup_timeout", 1.5005),
        ("enable_blending", True, "enable_blending", True),
        ("blend_recompute_ratios", 0.2, "blend_recompute_ratios", (0.2,)),
        ("blend_recompute_ratios", [0.3, 0.2], "blend_recompute_ratios", (0.3, 0.2)),
        ("blend_recompute_ratios", "0.3,0.2", "blend_recompute_ratios", (0.3, 0.2)),
        ("blend_check_layers", 1, "blend_check_layers", (1,)),
        ("blend_check_layers", "[1, 5]", "blend_check_layers", (1, 5)),
        ("blend_min_tokens", 128, "blend_min_tokens", 128),
        ("blend_special_str", "<sep>", "blend_special_str", "<sep>"),
    ],
)
def test_lmcache_names_and_units(name: str, value: object, ours: str, parsed: object) -> None:
    assert getattr(load(**_one(name, value)), ours) == parsed
    assert getattr(load(env={f"LMCACHE_{name.upper()}": str(value)}), ours) == parsed
    assert getattr(load(env={f"KVSTORE_{name.upper()}": str(value)}), ours) == parsed


@pytest.mark.parametrize("name", ["blend_recompute_ratios", "blend_check_layers"])
def test_lmcaches_null_is_the_default(name: str, write: Callable[[str], Path]) -> None:
    config = load(None, config_file=write(f"remote_url: {URL}\n{name}: null\n"))
    assert getattr(config, name) == getattr(load(), name)


@pytest.mark.parametrize(
    ("name", "bad"),
    [("blend_recompute_ratios", 1.5), ("blend_recompute_ratios", [0.1, None]), ("blend_recompute_ratios", "much"),
     ("blend_recompute_ratios", []), ("blend_recompute_ratios", True), ("blend_check_layers", 1.5),
     ("blend_check_layers", [-1]), ("blend_check_layers", [[1]]), ("blend_min_tokens", 0), ("blend_special_str", ""),
     ("blend_special_str", 7), ("enable_blending", "perhaps"), ("blend_measure", "q")],
)  # fmt: skip
def test_a_bad_value_for_blending_is_named(name: str, bad: object) -> None:
    with pytest.raises(ConfigError, match=rf"option '{name}'.*\(from keyword {name}\)"):
        load(**_one(name, bad))


@pytest.mark.parametrize("bad", [True, None, "", "soon", -1, "-1", [1], "7 parsecs", float("nan"), float("inf"), 0])
def test_a_bad_value_names_lmcaches_option(bad: object) -> None:
    with pytest.raises(ConfigError, match=r"option 'lookup_timeout_ms'.*\(from keyword lookup_timeout_ms\)"):
        load(lookup_timeout_ms=bad)


LMCACHE_FILE = """
# An ordinary LMCache 0.5.6 file.
chunk_size: 256
local_cpu: true
max_local_cpu_size: 20
local_disk: null
max_local_disk_size: 0
remote_url: "fs://localhost:0/mnt/kv"
remote_serde: "naive"
save_unfull_chunk: false
blocking_timeout_secs: 10
lookup_timeout_ms: 3000
use_layerwise: true
enable_blending: false
enable_pd: false
enable_p2p: false
enable_controller: true
lmcache_instance_id: "node7"
controller_pull_url: "10.0.0.1:8300"
cache_policy: "LRU"
min_retrieve_tokens: 512
save_decode_cache: false
pre_caching_hash_algorithm: "sha256_cbor"
extra_config:
  save_chunk_meta: false
  aws_secret_access_key: hunter2
  remote_storage_plugin.x.module_path: a.b
"""


def test_an_existing_lmcache_file(write: Callable[[str], Path], caplog: pytest.LogCaptureFixture) -> None:
    path = write(LMCACHE_FILE)
    with caplog.at_level(logging.WARNING, logger="kvstore"):
        config = load(None, env={"LMCACHE_CONFIG_FILE": str(path)})
    assert [str(url) for url in config.remote_url] == ["file:///mnt/kv"]
    assert [(str(tier.url), tier.values) for tier in config.tiers] == [
        ("memory://", {"bytes": 20 * 10**9, "policy": "lru"})
    ]
    noted = [re.findall(r"option '(\w+)'", note)[0] for note in config.notes]
    assert noted == [
        "enable_controller",
        "lmcache_instance_id",
        "controller_pull_url",
        "min_retrieve_tokens",
        "pre_caching_hash_algorithm",
        "extra_config",
    ], "defaults of LMCache are passed over; everything else is said to be unused"
    assert all(f"(in {path})" in note for note in config.notes)
    assert "aws_secret_access_key" in config.notes[-1], "which settings, but not what they are"
    assert "hunter2" not in repr(config) + config.describe() + caplog.text
    assert len(caplog.records) == 1, "one line for the log, not one per note"


def test_what_changes_nothing_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        load(chunk_size=512)
    assert not caplog.records


@pytest.mark.parametrize("name", [name for name, known in lmcache.UNUSED.items() if known.refuse])
def test_what_would_change_results_is_refused(name: str) -> None:
    value: Any = True if lmcache.UNUSED[name].kind == "bool" else ["x"]
    with pytest.raises(ConfigError, match=rf"LMCache's option '{name}' is not supported \(from keyword {name}\): "):
        load_config(URL, env={}, **_one(name, value))
    harmless: Any
    for harmless in (lmcache.UNUSED[name].default, False if value is True else []):
        assert load_config(URL, env={}, **_one(name, harmless)).notes == ()
    env = {f"LMCACHE_{name.upper()}": "False" if value is True else "[]"}
    assert load(env=env).notes == ()


def test_refused_are_those_that_change_what_is_stored_found_or_computed() -> None:
    refused = {name for name, known in lmcache.UNUSED.items() if known.refuse}
    assert refused == {
        "blend_thresholds", "enable_pd", "remote_storage_plugins", "storage_plugins", "external_lookup_client",
        "retrieve_locations", "store_location",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "bad"),
    [("max_local_cpu_size", "much"), ("local_cpu", 7), ("min_retrieve_tokens", 1.5), ("enable_blending", "perhaps"),
     ("max_local_cpu_size", None), ("local_cpu", "")],
)  # fmt: skip
def test_an_ill_typed_lmcache_value_is_an_error(name: str, bad: object) -> None:
    with pytest.raises(ConfigError, match=rf"option '{name}'.*\(from keyword {name}\)"):
        load_config(URL, env={}, **_one(name, bad))


LMCACHE_NAMES = """
chunk_size local_cpu max_local_cpu_size reserve_local_cpu_size local_cpu_use_hugepages local_disk max_local_disk_size
remote_url remote_serde use_layerwise save_decode_cache pre_caching_hash_algorithm save_unfull_chunk
blocking_timeout_secs lookup_timeout_ms min_retrieve_tokens hit_miss_ratio enable_async_loading cache_policy
priority_limit retrieve_locations store_location external_lookup_client enable_scheduler_bypass_lookup
enable_kv_events numa_mode pin_timeout_sec pin_check_interval_sec enable_chunk_statistics internal_api_server_enabled
enable_blending blend_recompute_ratios blend_thresholds blend_check_layers blend_min_tokens blend_special_str
enable_pd pd_role pd_buffer_size pd_buffer_device pd_peer_host pd_peer_init_port pd_peer_alloc_port pd_peer_query_port
pd_proxy_host pd_proxy_port pd_backend_mode pd_bidirectional pd_allocation_timeout_sec transfer_channel
enable_controller lmcache_instance_id controller_pull_url controller_reply_url lmcache_worker_ports
lmcache_worker_heartbeat_time enable_p2p p2p_host p2p_init_ports p2p_lookup_ports extra_config remote_storage_plugins
storage_plugins
"""


@pytest.mark.parametrize("name", LMCACHE_NAMES.split())
def test_every_lmcache_option_is_known(name: str) -> None:
    assert sum(name in names for names in (lmcache.ALIASES, lmcache.LOCAL, lmcache.UNUSED)) == 1


def test_no_name_has_two_meanings() -> None:
    ours = {option.name for option in OPTIONS}
    assert not ours & {*lmcache.UNUSED, *lmcache.LOCAL}
    assert all(alias.name in ours for alias in lmcache.ALIASES.values())
    assert all(alias.name == name for name, alias in lmcache.ALIASES.items() if name in ours)


# Files in which kvstore is LMCache's remote store.

PLUGIN_FILE = """
chunk_size: 256
remote_url: null
remote_storage_plugins: ["kvstore"]
extra_config:
  remote_storage_plugin.kvstore.module_path: kvstore.integrations.lmcache
  remote_storage_plugin.kvstore.class_name: KVStoreAdapter
  remote_storage_plugin.kvstore.remote_url: "file:///mnt/kv?lanes=3"
  remote_storage_plugin.kvstore.namespace: team-a
"""


def test_our_plugin_in_lmcaches_file(write: Callable[[str], Path]) -> None:
    path = write(PLUGIN_FILE)
    config = load(None, config_file=path)
    assert [str(url) for url in config.remote_url] == ["file:///mnt/kv?lanes=3"]
    assert (config.namespace, config.chunk_size) == ("team-a", 256)
    assert config.sources["namespace"] == f"in {path}, under remote_storage_plugin.kvstore"
    (note,) = config.notes
    assert "kvstore.module_path and remote_storage_plugin.kvstore.class_name are not used" in note
    config = load(None, config_file=write(PLUGIN_FILE + "  save_chunk_meta: false\n"))
    assert "extra_config' (save_chunk_meta) is not used" in config.notes[1], "ours are not among the unused ones"


def test_our_plugin_in_lmcaches_environment() -> None:
    extra = '{"remote_storage_plugin.kvstore.one.remote_url": "memory://"}'
    for names in ("kvstore.one", '["kvstore.one"]'):
        env = {"LMCACHE_REMOTE_STORAGE_PLUGINS": names, "LMCACHE_EXTRA_CONFIG": extra}
        assert [str(url) for url in load(None, env=env).remote_url] == ["memory://"]


def test_a_file_of_our_own_named_by_the_plugin(write: Callable[[str], Path], tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("remote_url: memory://\nnamespace: in-file\nreplicas: 1\n", encoding="utf-8")
    text = PLUGIN_FILE.replace('remote_url: "file:///mnt/kv?lanes=3"', f"config_file: {own}")
    config = load(None, config_file=write(text))
    assert [str(url) for url in config.remote_url] == ["memory://"]
    assert config.namespace == "team-a", "what LMCache's file says wins"
    assert config.sources["remote_url"] == f"in {own}"


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('["kvstore"]', '["kvstore.a", "kvstore.b"]', "kvstore.a, kvstore.b: each is a store of its own"),
        ('["kvstore"]', '["kvstore", "other"]', "'remote_storage_plugins' is not supported"),
        ("remote_url: null", "remote_url: redis://h:1", "are two stores"),
        ("namespace: team-a", "backend_options: {s3: {x: hunter2}}", "kvstore.config_file"),
        ("namespace: team-a", "namespce: team-a", "did you mean 'namespace'.*under remote_storage_plugin.kvstore"),
        ("namespace: team-a", "config_file: 7", "'config_file' is not the path"),
    ],
)
def test_a_plugin_that_makes_no_sense(write: Callable[[str], Path], old: str, new: str, says: str) -> None:
    assert old in PLUGIN_FILE
    with pytest.raises(ConfigError, match=says) as caught:
        load(None, config_file=write(PLUGIN_FILE.replace(old, new)))
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "means"),
    [
        ("kvstore+s3://bucket/kv?region=us-west-2", ["s3://bucket/kv?region=us-west-2"]),
        ("kvstore+file:///mnt//kv/", ["file:///mnt/kv"]),
        ("kvstore+fs://h:0/a,/b", ["file:///a", "file:///b"]),
        ("kvstore+redis://h:1/2", ["valkey://h:1?database=2"]),
        ("kvstore+memory://,kvstore+file:///a", ["memory://", "file:///a"]),
        ("kvstore+ucx://10.0.0.1:7070", ["kvstore+ucx://10.0.0.1:7070"]),
        ("kvstore+s4://bucket", ["kvstore+s4://bucket"]),
    ],
)
def test_a_url_behind_our_prefix(url: str, means: list[str]) -> None:
    assert [str(each) for each in load(None, env={"LMCACHE_REMOTE_URL": url}).remote_url] == means


def test_the_older_form_with_options(write: Callable[[str], Path]) -> None:
    text = PLUGIN_FILE.replace('  remote_storage_plugin.kvstore.remote_url: "file:///mnt/kv?lanes=3"\n', "")
    config = load(None, config_file=write(text.replace("remote_url: null", "remote_url: kvstore+memory://")))
    assert ([str(url) for url in config.remote_url], config.namespace) == (["memory://"], "team-a")
