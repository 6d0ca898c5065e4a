"""LMCache's option names and URL schemes: what they mean here.

After LMCache 0.5.6 (`lmcache/v1/config.py`, in-process mode). Four kinds of names:

* `ALIASES` mean the same as an option of ours; the table also supplies the units that LMCache implies.
* `LOCAL` name tiers on this host: they become our option `tiers`, with `remote_url` below them.
* `UNUSED` have no meaning here (yet). One that only tunes LMCache is noted; one whose absence would change what is
  stored, found or computed is refused, so that nobody believes it to be in effect. A value that is LMCache's own
  default, and so changes nothing, is passed over.
* Everything else is unknown, and an error.

A file in which kvstore is LMCache's remote store (`kvstore.integrations.lmcache.remote`) is understood too: the plug-in
`kvstore` among `remote_storage_plugins`, and URLs that begin with `kvstore+`.

LMCache itself warns about an unknown name and turns an unparsable value into None; here both are errors.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from .errors import ConfigError
from .options import Option
from .registry import ELSEWHERE, BackendURL, Given, known_schemes, parse_urls
from .tiers.options import TierConfig

__all__ = [
    "ALIASES", "LOCAL", "NULL_BY_DEFAULT", "SERDES", "UNUSED", "Alias", "Unused", "local_tiers", "parse_local",
    "plugin_options", "resolve_unused", "translate_url",
]  # fmt: skip


class Alias(NamedTuple):
    """An LMCache option that means the same as one of ours.

    Attributes:
        name: our option.
        unit: what LMCache implies for a bare number; "" if none.
    """

    name: str
    unit: str = ""


ALIASES: dict[str, Alias] = {
    "remote_url": Alias("remote_url"),
    "chunk_size": Alias("chunk_size"),
    "save_unfull_chunk": Alias("save_unfull_chunk"),
    "remote_serde": Alias("remote_serde"),
    "blocking_timeout_secs": Alias("blocking_timeout", "s"),
    "lookup_timeout_ms": Alias("lookup_timeout", "ms"),
    "enable_blending": Alias("enable_blending"),
    "blend_recompute_ratios": Alias("blend_recompute_ratios"),
    "blend_check_layers": Alias("blend_check_layers"),
    "blend_min_tokens": Alias("blend_min_tokens"),
    "blend_special_str": Alias("blend_special_str"),
}

NULL_BY_DEFAULT = ("blend_recompute_ratios", "blend_check_layers")
"""Those of them whose default is null in LMCache; its files may say so."""

SERDES: dict[str, str] = {"naive": "raw"}
"""LMCache's values of `remote_serde` that mean the same as a codec of ours under another name. `cachegen` is ours too;
it needs the option `codec_profile`."""

_OURS = "kvstore does this in its own way"
_ENGINE = "the integration with the engine decides this"
_LOCAL = "it only concerns LMCache's own processes"
_BLEND = "tokens to compute again are chosen by their share (blend_recompute_ratios), not by a threshold"
_PD = "engines do it by kv_transfer_params over one store: docs/disaggregation.md"
_PEER = "nothing is shared between instances but what lies in remote_url"
_PLUGIN = "LMCache's plug-ins are not loaded; backends of others register an entry point kvstore.backends"
_PLACE = "it selects among LMCache's backends; remote_url names ours"


class Unused(NamedTuple):
    """An LMCache option without a meaning here.

    Attributes:
        kind: as in `Option.kind`, or "any". Ill-typed values are errors all the same.
        default: LMCache's default.
        why: for the note or the refusal.
        refuse: an error instead of a note.
        unit: what LMCache implies for a bare number.
    """

    kind: str
    default: Any
    why: str
    refuse: bool = False
    unit: str = ""


def _all(kind: str, default: Any, why: str, *names: str, refuse: bool = False) -> dict[str, Unused]:
    return {name: Unused(kind, default, why, refuse) for name in names}


UNUSED: dict[str, Unused] = {
    # Memory.
    "reserve_local_cpu_size": Unused("float", 0.0, "the size of a memory tier is max_local_cpu_size", unit="GB"),
    "local_cpu_use_hugepages": Unused("bool", False, "huge pages are used where the system has them"),
    # How, not what.
    "use_layerwise": Unused("bool", True, "records are always laid out, and can always be read, layer by layer"),
    "pre_caching_hash_algorithm": Unused("str", "builtin", "keys are always SHA-256, the same in every process"),
    "pin_timeout_sec": Unused("float", 300.0, _OURS, unit="s"),
    "pin_check_interval_sec": Unused("float", 30.0, _OURS, unit="s"),
    "enable_async_loading": Unused("bool", False, "every call is asynchronous"),
    **_all("any", None, _LOCAL, "numa_mode", "internal_api_server_port_start", "internal_api_server_host",
           "internal_api_server_include_index_list", "internal_api_server_socket_path_prefix",
           "priority_limit", "hit_miss_ratio"),
    **_all("bool", False, _LOCAL, "internal_api_server_enabled", "enable_chunk_statistics", "enable_kv_events"),
    "min_retrieve_tokens": Unused("int", 0, _ENGINE),
    "save_decode_cache": Unused("bool", False, _ENGINE),
    "enable_scheduler_bypass_lookup": Unused("bool", False, _ENGINE),
    # Blending: by a threshold other tokens would be computed again.
    "blend_thresholds": Unused("any", None, _BLEND, refuse=True),
    # Disaggregated prefill: without it the decoder waits for what never comes.
    "enable_pd": Unused("bool", False, _PD, refuse=True),
    **_all("any", None, _PD, "pd_role", "pd_buffer_size", "pd_buffer_device", "pd_peer_host", "pd_peer_init_port",
           "pd_peer_alloc_port", "pd_peer_query_port", "pd_proxy_host", "pd_proxy_port", "pd_backend_mode",
           "pd_bidirectional", "pd_allocation_timeout_sec", "transfer_channel"),
    # Instances that know each other: without them there are fewer sources, not other bytes.
    **_all("bool", False, _PEER, "enable_controller", "enable_p2p"),
    **_all("any", None, _PEER, "lmcache_instance_id", "controller_pull_url", "controller_reply_url",
           "lmcache_worker_ports", "lmcache_worker_heartbeat_time", "p2p_host", "p2p_init_ports", "p2p_lookup_ports"),
    # Where records lie.
    **_all("any", None, _PLUGIN, "remote_storage_plugins", "storage_plugins", "external_lookup_client", refuse=True),
    **_all("any", None, _PLACE, "retrieve_locations", "store_location", refuse=True),
    "extra_config": Unused("any", None, "its settings are those of LMCache's connectors; ours go into backend_options"),
}  # fmt: skip


LOCAL: dict[str, Option] = {
    "local_cpu": Option("local_cpu", "bool", True, "A memory tier."),
    "max_local_cpu_size": Option("max_local_cpu_size", "size", 5 * 10**9, "Its capacity."),
    "local_disk": Option("local_disk", "str", None, "The folder of a disk tier."),
    "max_local_disk_size": Option("max_local_disk_size", "size", 0, "Its capacity."),
    "cache_policy": Option("cache_policy", "str", "LRU", "The policy of both."),
}
"""LMCache's names for tiers on this host. A bare number is in GB."""

_POLICIES = {"lru": "lru", "fifo": "fifo"}
_GB_NAMES = ("max_local_cpu_size", "max_local_disk_size")
_OFF = (None, False, "", "none", "null", "false")


def parse_local(name: str, given: Given) -> Given:
    """The typed value of an option of `LOCAL`. Raises `ConfigError`."""
    value = given.value
    if name == "local_disk" and (value.strip().lower() if isinstance(value, str) else value) in _OFF:
        return Given(None, given.source)
    if name in _GB_NAMES:
        value = with_unit(value, "GB")
    return Given(Given(value, given.source).parse(LOCAL[name]), given.source)


def local_tiers(given: Mapping[str, Given], notes: list[str]) -> tuple[TierConfig, ...]:
    """The tiers that LMCache's names ask for: memory with `local_cpu` or `max_local_cpu_size`, a folder with
    `local_disk` and `max_local_disk_size`. Without them none, although LMCache itself then keeps 5 GB in memory.

    Args:
        notes: gets a sentence for what cannot be had.

    Raises:
        ConfigError: a folder without a size, or one that is no folder.
    """

    def value(name: str) -> Any:
        return given[name].value if name in given else LOCAL[name].default

    policy = str(value("cache_policy")).lower()
    values: dict[str, Any] = {"policy": _POLICIES[policy]} if policy in _POLICIES and "cache_policy" in given else {}
    tiers: list[TierConfig] = []
    if value("local_cpu") and not given.keys().isdisjoint(("local_cpu", "max_local_cpu_size")):
        nbytes = value("max_local_cpu_size")
        if nbytes:
            tiers.append(TierConfig(BackendURL("memory"), {"bytes": nbytes, **values}))
    if value("local_disk") is not None:
        source = given["local_disk"].source
        if not value("max_local_disk_size"):
            raise ConfigError(f"LMCache's option 'local_disk' needs 'max_local_disk_size', which is 0 ({source})")
        text = value("local_disk")
        urls = parse_urls(text if "://" in text else f"file://{text}")
        if len(urls) != 1 or not urls[0].is_folder or "," in urls[0].path:
            raise ConfigError(
                f"LMCache's option 'local_disk' must name one folder, for instance file:///nvme/kv ({source})"
            )
        tiers.append(TierConfig(urls[0], {"bytes": value("max_local_disk_size"), **values}))
    if tiers and policy not in _POLICIES:
        source = given["cache_policy"].source
        notes.append(
            f"LMCache's option 'cache_policy' has a value that is not used ({source}): kvstore has no policy "
            f"{policy}; its own default is used"
        )
    return tuple(tiers)


def resolve_unused(name: str, given: Given) -> str | None:
    """The note for an option of `UNUSED`; None if its value is LMCache's default.

    Raises:
        ConfigError: the value is ill-typed, or the option is one that cannot be passed over.
    """
    known = UNUSED[name]
    value = given.value
    if known.kind == "any" or (value is None and known.default is None):
        text = value.strip().lower() if isinstance(value, str) else value
        changes = value != known.default and text not in (None, False, "", "none", "null", "false", [], {}, "[]", "{}")
    else:
        changes = given.parse(Option(name, known.kind, known.default, "")) != known.default
    if not changes:
        return None
    if known.refuse:
        raise ConfigError(
            f"LMCache's option {name!r} is not supported ({given.source}): {known.why}; take it out to go on without it"
        )
    which = f" ({', '.join(sorted(map(str, value)))})" if name == "extra_config" and isinstance(value, Mapping) else ""
    return f"LMCache's option {name!r}{which} is not used ({given.source}): {known.why}"


_PLUGIN_NAME = "kvstore"
_PLUGIN_CLASS = ("module_path", "class_name")


def plugin_options(layer: Mapping[str, Given], notes: list[str]) -> tuple[dict[str, Given], dict[str, Given]]:
    """One source of options without what it says of our plug-in, and the options that it gives the plug-in.

    That is the name `kvstore`, or `kvstore.INSTANCE`, in `remote_storage_plugins`, and in `extra_config` what begins
    with `remote_storage_plugin.NAME.`: `remote_url`, `config_file` and options of ours. Other plug-ins stay in the
    layer.

    Args:
        notes: gets a sentence for what has no meaning here.

    Raises:
        ConfigError: several of our plug-ins, which are stores of their own; `backend_options`, as LMCache logs its
            settings; another `remote_url` beside the plug-in's; or an `extra_config` that is no map.
    """
    rest = dict(layer)
    listed = rest.get("remote_storage_plugins")
    names = _plugin_names(listed.value) if listed is not None else []
    ours = [name for name in names if name.partition(".")[0] == _PLUGIN_NAME]
    if listed is None or not ours:
        return rest, {}
    if len(ours) > 1:
        raise ConfigError(
            f"remote_storage_plugins names {', '.join(ours)}: each is a store of its own, and a configuration is of "
            f"one ({listed.source}); leave one of them"
        )
    rest["remote_storage_plugins"] = Given([name for name in names if name != ours[0]], listed.source)
    prefix = f"remote_storage_plugin.{ours[0]}."
    given = rest.pop("extra_config", Given({}, listed.source))
    extra = _extra_config(given)
    found = {name[len(prefix) :]: value for name, value in extra.items() if name.startswith(prefix)}
    if left := {name: value for name, value in extra.items() if not name.startswith(prefix)}:
        rest["extra_config"] = Given(left, given.source)
    if "backend_options" in found:
        raise ConfigError(
            f"{prefix}backend_options ({given.source}): it may hold secrets, and LMCache writes its settings into its "
            f"log; put it into a file of kvstore's own and name that as {prefix}config_file"
        )
    if passed := [f"{prefix}{name}" for name in _PLUGIN_CLASS if found.pop(name, None) is not None]:
        notes.append(f"{' and '.join(passed)} are not used ({given.source}): they tell LMCache where to find kvstore")
    url = rest.get("remote_url")
    if url is not None and not found.keys().isdisjoint(("remote_url", "config_file")):
        if url.value in (None, ""):
            del rest["remote_url"]  # LMCache's null
        elif "remote_url" in found:
            raise ConfigError(
                f"remote_url and {prefix}remote_url are given: to LMCache they are two stores, and a configuration is "
                f"of one ({given.source}); leave one of them"
            )
    source = f"{given.source}, under {prefix[:-1]}"
    return rest, {name: Given(value, source) for name, value in found.items()}


def _plugin_names(value: object) -> list[str]:
    """Of LMCache's `remote_storage_plugins`: a list, or its text in the environment, `a,b` or `["a", "b"]`."""
    if isinstance(value, str):
        value = re.split(r"[\s,]+", re.sub(r"[\[\]\"']", " ", value).strip())
    return [name for name in value if isinstance(name, str) and name] if isinstance(value, list) else []


def _extra_config(given: Given) -> dict[str, object]:
    value = given.value
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            value = ()
    if value is None:
        return {}
    if not isinstance(value, Mapping):  # not shown: there may be a secret in it
        raise ConfigError(f"LMCache's option 'extra_config' must map names to values ({given.source})")
    return {str(name): each for name, each in value.items()}


_FILE = "a folder shared by the nodes, file:///mnt/kv"
_REMOTE = f"it has no counterpart here; use the memory of other nodes, node://host:port, or {_FILE}"
_MOUNT = f"mount it and use {_FILE}"

_REFUSED: dict[str, str] = {
    "unix": "sockets of the file system are not used; let the server listen on TCP: valkey://127.0.0.1:6379",
    **dict.fromkeys(("lm", "eic", "bigtable", "sagemaker-hyperpod"), _REMOTE),
    "infinistore": ELSEWHERE["infinistore"],
    **dict.fromkeys(("azure", "hf3fs", "hfbucket"), f"it is not part of this release; {_MOUNT}"),
    "audit": "every record is verified anyway; give the audited URL itself (extra_config audit_actual_remote_url)",
    **dict.fromkeys(("external", "plugin"), _PLUGIN),
    "mock": "use memory://; kvstore.testing.LatencyBackend adds latency to it",
    "blackhole": "use kvstore.testing.FaultyBackend, which can drop everything, in tests",
}

_VALKEY = {
    "redis": "valkey",
    "rediss": "valkeys",
    "redis-sentinel": "valkey",
    "redis-cluster": "valkey",
    "resp": "valkey",
}
_BEHIND = "kvstore+"
_SENTINEL_NAME = "redismaster"  # LMCache's default for REDIS_SERVICE_NAME

TRANSLATED = ("fs", "mooncakestore", *_VALKEY)
"""LMCache's URL schemes that are not ours and mean the same as one of ours."""

SCHEMES = ("s3", "valkey", *TRANSLATED, *_REFUSED)
"""LMCache's URL schemes (in-process mode)."""


def translate_url(url: BackendURL) -> list[BackendURL] | None:
    """What an LMCache URL means here; None if the scheme is not LMCache's.

    `fs://host:port/path[,path2]` is a folder, or several that share the keys; host and port mean nothing there. The
    path of a `redis://` URL is the number of a database; Sentinels watch the primary $REDIS_SERVICE_NAME.
    `kvstore+SCHEME://` is for our plug-in, and its URL is what follows the `+`, unless the scheme is registered as it
    stands (`kvstore+ucx`).

    Raises:
        ConfigError: the scheme has no counterpart; says what to use instead.
    """
    if url.scheme == "fs":
        paths = [path.strip() for path in re.split(r",(?=\s*/)", url.path)]
        if not all(path.startswith("/") and path != "/" for path in paths):
            raise ConfigError("an LMCache URL fs://host:port/path needs an absolute path; ours is file:///path")
        return [BackendURL("file", "", path, dict(url.options)) for path in paths]
    if url.scheme in _VALKEY:
        return [_valkey(url)]
    if url.scheme == "mooncakestore":
        return [BackendURL("mooncake", url.authority, "", dict(url.options))]
    if url.scheme.startswith(_BEHIND) and url.scheme not in (known := known_schemes()):
        behind = BackendURL(url.scheme.removeprefix(_BEHIND), url.authority, url.path, dict(url.options))
        if behind.scheme in known:
            return [behind]
        return translate_url(behind) if behind.scheme in SCHEMES else None
    if (why := _REFUSED.get(url.scheme)) is not None:
        raise ConfigError(f"{url.scheme}:// is one of LMCache's schemes, not of kvstore's: {why}")
    return None


def _valkey(url: BackendURL) -> BackendURL:
    options = dict(url.options)
    if url.scheme == "redis-sentinel":
        options.setdefault("sentinel", os.environ.get("REDIS_SERVICE_NAME") or _SENTINEL_NAME)
    elif url.scheme == "redis-cluster":
        options.setdefault("cluster", "on")
    path = url.path
    if (number := path.strip("/")).isdecimal():
        path = ""
        if int(number):
            options.setdefault("database", number)
    return BackendURL(_VALKEY[url.scheme], url.authority, path, options)


def manual() -> str:
    """The names of this module as Markdown: what is used, then the rest by what becomes of it."""
    lines = ["| LMCache option | here |", "|---|---|"]
    for name, alias in ALIASES.items():
        unit = f"; a bare number is in {alias.unit}" if alias.unit else ""
        lines.append(f"| `{name}` | {f'`{alias.name}`' if alias.name != name else 'the same'}{unit} |")
    lines += [
        "| `local_cpu`, `max_local_cpu_size` (GB) | if one is given: a tier `memory://` of that size (5 GB) |",
        "| `local_disk`, `max_local_disk_size` (GB) | a tier `file://` of that size |",
        "| `cache_policy` | `policy` of these tiers: `LRU`, `FIFO`; others are noted |",
        "| `remote_serde: naive` | `raw` |",
        "| `remote_serde: cachegen` | `cachegen`, with `codec_profile` (`kvstore-codec profile` makes one) |",
        "| `remote_storage_plugins: [kvstore]` | `remote_url` and options that `extra_config` has under "
        "`remote_storage_plugin.kvstore.` |",
    ]
    options: dict[str, list[str]] = {}
    for name, known in UNUSED.items():
        unit = f" ({known.unit})" if known.unit else ""
        options.setdefault(f"{'refused' if known.refuse else 'noted'}: {known.why}", []).append(f"`{name}`{unit}")
    schemes: dict[str, list[str]] = {}
    for scheme, why in _REFUSED.items():
        schemes.setdefault(f"refused: {why}", []).append(f"`{scheme}://`")
    lines += [f"| {', '.join(names)} | {what} |" for what, names in options.items()]
    lines += [
        "",
        "| LMCache URL | here |",
        "|---|---|",
        "| `kvstore+SCHEME://…` | `SCHEME://…` |",
        "| `fs://host:port/a,/b` | `file:///a`, `file:///b` |",
        "| `s3://bucket.s3.REGION.amazonaws.com` | `s3://bucket?region=REGION`; records of LMCache's are not read |",
        "| `redis://host:port/N`, `rediss://…`, `resp://…` | `valkey://host:port?database=N`, `valkeys://…` |",
        "| `redis-cluster://host:port` | `valkey://host:port?cluster=on` |",
        "| `redis-sentinel://host:port` | `valkey://host:port?sentinel=$REDIS_SERVICE_NAME` (`redismaster`) |",
        "| `valkey://host:port` | the same; records of LMCache's are not read |",
        "| `mooncakestore://host:port/?device=X` | `mooncake://host:port?device=X`; as above. What LMCache has in "
        "extra_config goes into the URL: `protocol`, `metadata`, `local_host`, `segment` |",
    ]
    lines += [f"| {', '.join(names)} | {what} |" for what, names in schemes.items()]
    return "\n".join(lines)


def with_unit(value: object, unit: str) -> object:
    """`value` with LMCache's implied unit if it is a bare number, or text of one."""
    if not unit or isinstance(value, bool):
        return value
    if isinstance(value, int | float):
        return f"{value}{unit}"
    if isinstance(value, str) and re.fullmatch(r"\s*[0-9.]+(e[+-]?[0-9]+)?\s*", value):
        return f"{value.strip()}{unit}"
    return value
