"""Configuration: one typed definition per option, from which parsing, defaults, messages and the manual follow.

Sources, each overriding the one before: defaults, URL, file, environment, keyword.

* URL: options of that backend, `file:///mnt/kv?lanes=8`.
* File: YAML, named by `config_file`, `KVSTORE_CONFIG_FILE` or `LMCACHE_CONFIG_FILE`.
* Environment: `KVSTORE_<OPTION>`, or `LMCACHE_<OPTION>` (ours win); `KVSTORE_<SCHEME>_<OPTION>` for a backend's.
* Keyword: `open_store(…, chunk_size=512)`.

Options of backends go into `backend_options`, by scheme or by URL: `{"file": {"lanes": 8}}`. LMCache's names are
accepted where they mean the same (`kvstore._lmcache`). Checksums are always verified; there is no option against it.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from ._lmcache import (
    ALIASES,
    LOCAL,
    NULL_BY_DEFAULT,
    SERDES,
    UNUSED,
    local_tiers,
    parse_local,
    plugin_options,
    resolve_unused,
    with_unit,
)
from .errors import ConfigError
from .keys import DEFAULT_CHUNK_SIZE, MAX_CHUNK_SIZE, MIN_CHUNK_SIZE
from .options import Option, show_value, unknown_option
from .registry import (
    PLACEMENT_OPTIONS,
    SCHEMES,
    BackendURL,
    Given,
    backend_class,
    known_schemes,
    parse_url,
    parse_urls,
    split_options,
    wrapper_options,
)
from .tiers.options import TierConfig, check_tiers, parse_tiers

__all__ = ["OPTIONS", "Config", "load_config", "read_yaml"]

logger = logging.getLogger("kvstore.config")

_MAX_FILE_BYTES = 1 << 20
_ENV_PREFIXES = ("LMCACHE_", "KVSTORE_")  # later ones win
_FILE_VARIABLES = ("KVSTORE_CONFIG_FILE", "LMCACHE_CONFIG_FILE")  # earlier ones win
# Variables that begin like options and are none: of the pool, of our other commands and tests; of LMCache's processes.
_OTHER_VARIABLES = re.compile(
    r"KVSTORE_(POOL_CANARY|(BENCH|TEST|DEMO|MODEL|SERVE|CTL|CLOUDWATCH)(_.*)?)"
    r"|LMCACHE_(LOG_LEVEL|TRACK_USAGE|USE_EXPERIMENTAL|(COORDINATOR|RESP)_.*)",
    re.DOTALL,
)
# Kubernetes sets these in every pod of a namespace that has a service called "kvstore" or "kvstore-…".
_SERVICE_VARIABLES = re.compile(
    r".*_(SERVICE_HOST=.*|SERVICE_PORT(_.*)?=[0-9]+|PORT=(tcp|udp|sctp)://.*|PORT_[0-9]+_(TCP|UDP|SCTP)(_[A-Z]+)?=.*)",
    re.DOTALL,
)


class StoreOption(Option):
    """An option of the store. Kinds besides `Option`'s: "urls", "tiers", "codec", "paths", "level", "integers",
    "shares" and "map"."""

    __slots__ = ()

    def _parse_urls(self, value: object) -> tuple[BackendURL, ...]:
        return tuple(parse_urls(value))

    def _parse_tiers(self, value: object) -> tuple[TierConfig, ...]:
        if isinstance(value, str) and value.lstrip()[:1] in ("[", "{", "-"):
            value = _yaml(value, f"option {self.name!r}")
        return parse_tiers(value)

    def _parse_codec(self, value: object) -> str:
        if not isinstance(value, str):
            raise ConfigError(f"option {self.name!r}: {type(value).__name__} is not the name of a codec")
        from .codec import CODEC_NAMES, codec_number

        try:
            return CODEC_NAMES[codec_number(SERDES.get(value, value))]
        except ConfigError as error:
            raise ConfigError(f"option {self.name!r}: {error.message}") from None

    def _parse_paths(self, value: object) -> tuple[str, ...]:
        parts = value.split(",") if isinstance(value, str) else value
        if not isinstance(parts, list | tuple) or not all(isinstance(part, str | os.PathLike) for part in parts):
            raise ConfigError(
                f"option {self.name!r}: {type(value).__name__} is not the path of a file, or a list of them"
            )
        paths = tuple(os.path.expanduser(os.fspath(part).strip()) for part in parts)
        if not all(paths):
            raise ConfigError(f"option {self.name!r}: an empty path is given")
        return paths

    def _parse_level(self, value: object) -> int | None:
        if isinstance(value, str) and value.strip().lower() == "all":
            return None
        level = self._parse_int(value)
        if not 0 <= level <= 255:
            raise ConfigError(f"option {self.name!r}: {level} is out of range; it must be 0 to 255, or all")
        return level

    def _parse_integers(self, value: object) -> tuple[int, ...]:
        """One integer from 0 on, or a list of them, or text of one."""
        integer = Option(self.name, "int", None, "", minimum=0, maximum=(1 << 31) - 1)
        return tuple(integer.parse(part) for part in self._several(value))

    def _parse_shares(self, value: object) -> tuple[float, ...]:
        """One number from 0 to 1, or a list of them, or text of one."""
        share = Option(self.name, "float", None, "", minimum=0, maximum=1)
        return tuple(share.parse(part) for part in self._several(value))

    def _several(self, value: object) -> Sequence[object]:
        if isinstance(value, str):
            value = re.split(r"[\s,]+", value.strip().removeprefix("[").removesuffix("]").strip())
        parts = value if isinstance(value, list | tuple) else [value]
        if not parts or any(part is None for part in parts):
            raise self._bad(value, "a number or a list of numbers")
        return parts

    def _parse_map(self, value: object) -> dict[str, dict[str, object]]:
        """`{scheme or URL: {option: value}}`, or YAML (JSON) text of it. No message shows a value: some are secret."""
        if isinstance(value, str):
            value = _yaml(value, f"option {self.name!r}")
        if not isinstance(value, Mapping):
            raise ConfigError(f"option {self.name!r} must map schemes or URLs to their options")
        checked: dict[str, dict[str, object]] = {}
        for key, options in value.items():
            if not isinstance(key, str):
                raise ConfigError(f"option {self.name!r}: {key!r} is neither a scheme nor a URL")
            if not isinstance(options, Mapping) or not all(isinstance(name, str) for name in options):
                raise ConfigError(f"option {self.name!r}: what is given for {_place(key)!r} must map options to values")
            checked[_place(key)] = dict(options)
        return checked


def _place(key: str) -> str:
    """A key of `backend_options` in canonical form: a known scheme, or a URL without options."""
    if "://" not in key:
        scheme = key.lower()
        if scheme not in SCHEMES and scheme not in known_schemes():
            raise ConfigError(f"unknown scheme {key!r} in backend_options; known schemes: {', '.join(known_schemes())}")
        return scheme
    url = parse_url(key)
    if url.options:
        raise ConfigError(f"the key {url.base} of backend_options must be a URL without options")
    return url.base


def _option(kind: str, default: Any, doc: str, **more: Any) -> Any:
    """A field of `Config` together with the definition of its option."""
    metadata = {"option": (kind, default, doc, more)}
    if isinstance(default, dict):
        return field(default_factory=dict, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True, repr=False)
class Config:
    """The options of a store, typed and checked. Made by `load_config`; values given directly are checked too.

    `repr` and `describe` show no secret.

    Attributes:
        sources: where each option that is not a default came from.
        notes: what was given but has no effect, one sentence each.

    Raises:
        ConfigError: a value is ill-typed, empty or out of range, or options contradict each other.
    """

    remote_url: tuple[BackendURL, ...] = _option(
        "urls",
        (),
        "The backends: `scheme://authority/path?option=value`, or a list of them, over which keys are spread.",
    )
    tiers: tuple[TierConfig, ...] = _option(
        "tiers",
        (),
        "A hierarchy of places, the fastest first: a list of URLs, or of maps with `url` and the options of a tier. "
        "`remote_url`, if it is given too, is the last tier.",
    )
    tier_staging_bytes: int = _option(
        "size", 64 << 20, "Memory for moves between tiers neither of which lies in memory; mapped when first needed.",
        minimum=1 << 20,
    )  # fmt: skip
    chunk_size: int = _option(
        "int",
        DEFAULT_CHUNK_SIZE,
        "Tokens per chunk; part of every key.",
        minimum=MIN_CHUNK_SIZE,
        maximum=MAX_CHUNK_SIZE,
    )
    save_unfull_chunk: bool = _option(
        "bool", False, "Also store a prompt's last, partial chunk; it is found only as itself."
    )
    remote_serde: str = _option("codec", "raw", "Codec of layer segments at rest; part of every key.")
    codec_profile: tuple[str, ...] = _option(
        "paths", (), "Profile files of a codec that needs one (`kvstore-codec profile` makes them), separated by "
        "commas: the first is used to encode, records of all of them can be read. Its id is part of every key.",
    )  # fmt: skip
    codec_level: int | None = _option(
        "level", None, "Highest level of an encoded record that reads take, unless they ask for another: 0, … or `all`."
    )  # fmt: skip
    namespace: str = _option("str", "default", "Tenant boundary; part of every key, and nothing crosses it.")
    replicas: int = _option("int", 1, "How many of the backends hold each record.", minimum=1)
    on_error: str = _option(
        "choice", "miss", "What trouble with a backend is for the caller: a miss, or an error that is raised.",
        choices=("miss", "raise"),
    )  # fmt: skip
    lookup_timeout: float = _option(
        "duration", 3.0, "Deadline of a lookup for which the caller gave none.", minimum=1e-3
    )
    blocking_timeout: float = _option(
        "duration", 10.0, "Deadline of a get or lease for which the caller gave none.", minimum=1e-3
    )
    put_timeout: float = _option(
        "duration", 60.0, "Deadline of a put or delete for which the caller gave none.", minimum=1e-3
    )
    close_timeout: float = _option(
        "duration", 30.0, "How long closing waits for puts under way, and for a backend that hangs."
    )
    buffer_pool_bytes: int = _option(
        "size", 1 << 30, "Memory of the buffer pool; mapped at open, used as needed, never exceeded.", minimum=1 << 20
    )
    write_queue_bytes: int = _option(
        "size", 256 << 20, "Background writes that may wait; what does not fit is dropped and said to be.", minimum=0
    )
    prefill_per_token: float = _option(
        "duration", 0.0, "What prefill takes per token on these engines, 40us say; 0: seconds saved are not counted."
    )
    metrics_listen: str = _option(
        "str", "", "HOST:PORT on which GET /metrics answers with what this store counts; of several processes each "
        "takes the next port that is free. Empty: nowhere.",
    )  # fmt: skip
    tracing: str = _option(
        "choice", "off", "Spans of OpenTelemetry, one per batch and job; where they go, say the variables OTEL_*.",
        choices=("off", "otlp"),
    )  # fmt: skip
    event_log: str = _option(
        "choice", "off", "One JSON line per batch of hits, of stored records, and per reported request.",
        choices=("off", "stdout", "stderr"),
    )  # fmt: skip
    enable_blending: bool = _option(
        "bool", False, "Whether `kvstore.blend` may reuse chunks at any position. What is computed over them is close "
        "to a full prefill, not equal.",
    )  # fmt: skip
    blend_recompute_ratios: tuple[float, ...] = _option(
        "shares", (0.15,), "Share of the reused tokens that is computed again from each of `blend_check_layers` on, "
        "falling; or the last one's alone. The least: a slow link makes it more.",
    )  # fmt: skip
    blend_check_layers: tuple[int, ...] = _option(
        "integers", (1,), "Layers at which the tokens to compute again are chosen, counted from 0; those before the "
        "first are computed in full.",
    )  # fmt: skip
    blend_measure: str = _option(
        "choice", "v", "What is compared between stored and computed tokens: K, V or both.", choices=("k", "v", "kv")
    )
    blend_selection: str = _option(
        "choice", "deviation", "Which tokens: those that deviate most, the first of each chunk, those that the "
        "question attends to most, or (as a control) any.", choices=("deviation", "first", "query", "random"),
    )  # fmt: skip
    blend_form: str = _option(
        "choice", "shared_prefix", "Chunks are computed behind the fixed prefix that prompts begin with, or alone; "
        "part of their keys.", choices=("shared_prefix", "alone"),
    )  # fmt: skip
    blend_min_tokens: int = _option(
        "int", 256, "Parts of a prompt with fewer tokens are always computed.", minimum=1, maximum=1 << 24
    )
    blend_special_str: str = _option(
        "str", " # # ", "The text between the parts of a prompt; part of the keys of parts that are reused."
    )
    backend_options: Mapping[str, Mapping[str, object]] = _option(
        "map", {}, "Options of backends, by scheme or URL; the only place in a file or keyword for secrets of backends."
    )
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)
    notes: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        for option in OPTIONS:
            value = getattr(self, option.name)
            if value is not option.default:
                given = value if isinstance(value, Given) else Given(value, self.sources.get(option.name, "given"))
                object.__setattr__(self, option.name, given.parse(option))
        if not self.remote_url and not self.tiers:
            raise ConfigError("no remote_url is given; name a backend, for instance file:///mnt/kv or memory://")
        check_tiers(self.tiers, self.remote_url, self.replicas)
        from .codec import check_profile

        try:
            check_profile(self.remote_serde, self.codec_profile)
        except ConfigError as error:
            source = self.sources.get("codec_profile" if self.codec_profile else "remote_serde", "given")
            raise ConfigError(f"{error.message} ({source})") from None
        what = "tiers and remote_url name" if self.tiers and self.remote_url else "tiers name"
        what = what if self.tiers else "remote_url names"
        folders = [url.base for url in self.urls if url.is_folder]
        if twice := sorted({folder for folder in folders if folders.count(folder) > 1}):
            raise ConfigError(f"{what} {', '.join(twice)} twice; a folder is one backend, under any name")
        names = [self.backend_name(url) for url in self.urls]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ConfigError(f"{what} {', '.join(twice)} twice; give each its own option 'name', in its URL: ?name=…")

    @property
    def urls(self) -> tuple[BackendURL, ...]:
        """All backends: those of `tiers`, the fastest first, then those of `remote_url`."""
        return (*(tier.url for tier in self.tiers), *self.remote_url)

    def backend_overrides(self, url: BackendURL) -> dict[str, object]:
        """The options that `backend_options` holds for one of `urls`: for its scheme, then for it alone."""
        return {**self.backend_options.get(url.scheme, {}), **self.backend_options.get(url.base, {})}

    def backend_name(self, url: BackendURL) -> str:
        """The name of one of `urls` in placement: its option `name`, or the URL without its options."""
        given = self.backend_overrides(url).get("name", url.options.get("name", url.base))
        return str(given.value if isinstance(given, Given) else given)

    def __repr__(self) -> str:
        shown = [f"{o.name}={getattr(self, o.name)!r}" for o in OPTIONS if o.kind not in ("urls", "tiers", "map")]
        hidden = {place: sorted(options) for place, options in self.backend_options.items()}
        urls = ", ".join(repr(url.shown) for url in self.remote_url)
        tiers = f"tiers=[{', '.join(repr(tier.shown) for tier in self.tiers)}], " if self.tiers else ""
        return f"Config(remote_url=[{urls}], {tiers}{', '.join(shown)}, backend_options={hidden!r})"

    def describe(self) -> str:
        """A table of option, value and where it came from; then what is wrong with backends, and the notes.

        Secrets are masked. Imports the backends, but opens none.
        """
        rows = [("option", "value", "from")]
        for option in OPTIONS:
            if option.kind != "map":
                value = getattr(self, option.name)
                places = option.kind in ("urls", "tiers")
                text = ", ".join(each.shown for each in value) if places else show_value(option, value)
                rows.append((option.name, text, self.sources.get(option.name, "default")))
        remarks = [f"note: {note}" for note in self.notes]
        for url in self.urls:
            try:
                rows += [(f"{url.base} {name}", value, source) for name, value, source in self._describe_backend(url)]
            except ConfigError as error:
                remarks.append(f"error: {url.about(error)}")
        widths = [max(len(row[column]) for row in rows) for column in range(2)]
        lines = [f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c}" for a, b, c in rows]
        return "\n".join([*lines, *remarks])

    def _describe_backend(self, url: BackendURL) -> list[tuple[str, str, str]]:
        overrides = self.backend_overrides(url)
        backend = backend_class(url.scheme)
        values = {name: value for part in split_options(url, backend, overrides) for name, value in part.items()}
        rows = []
        for option in (*backend.options, *wrapper_options(), *PLACEMENT_OPTIONS):
            given = overrides.get(option.name)
            if given is not None or option.name in url.options:
                source = given.source if isinstance(given, Given) else "in the URL" if given is None else "given"
                rows.append((option.name, show_value(option, values[option.name]), source))
        return rows


def _definitions() -> tuple[StoreOption, ...]:
    found = []
    for f in fields(Config):
        if "option" in f.metadata:
            kind, default, doc, more = f.metadata["option"]
            found.append(StoreOption(f.name, kind, default, doc, **more))
    return tuple(found)


OPTIONS: tuple[StoreOption, ...] = _definitions()
"""The options of the store, in the manual's order. The fields of `Config` are their definition."""

_BY_NAME = {option.name: option for option in OPTIONS}


class _Layers:
    """Options as they are gathered, one source after the other; a later source wins."""

    def __init__(self) -> None:
        self.values: dict[str, Given] = {}
        self.backend: list[tuple[str, str, Given]] = []  # place, option, value; later ones win
        self.notes: list[str] = []
        self.local: dict[str, Given] = {}  # LMCache's names for tiers on this host

    def add(self, layer: Mapping[str, Given], *, tolerant: bool = False) -> None:
        """Add one source. `tolerant`: note an unknown name, as it is another program's."""
        layer, plugin = plugin_options(layer, self.notes)
        self._add(layer, tolerant=tolerant)
        file = plugin.pop("config_file", None)
        if file is not None:
            if not isinstance(file.value, str) or not file.value.strip():
                raise ConfigError(f"option 'config_file' is not the path of a file ({file.source})")
            inner = {name: Given(value, f"in {file.value}") for name, value in read_yaml(file.value).items()}
            self._add({name: given for name, given in inner.items() if name != "remote_url" or name not in layer})
        self._add(plugin)

    def _add(self, layer: Mapping[str, Given], *, tolerant: bool = False) -> None:
        seen: dict[str, str] = {}
        for name, given in layer.items():
            target = self._target(name, given, tolerant=tolerant)
            if target is None:
                continue
            if target in seen:
                raise ConfigError(f"options {seen[target]!r} and {name!r} mean the same ({given.source}); give one")
            seen[target] = name
            if target == "backend_options":
                self.add_backend(given)
            else:
                self.values[target] = self._checked(name, target, given)

    def _target(self, name: str, given: Given, *, tolerant: bool) -> str | None:
        """The option a name stands for, or None if it was dealt with."""
        if name in NULL_BY_DEFAULT and given.value is None:
            return None
        if name in _BY_NAME:
            return name
        if name in ALIASES:
            return ALIASES[name].name
        if name in LOCAL:
            self.local[name] = parse_local(name, given)
            return None
        if name in UNUSED:
            note = resolve_unused(name, given)
        elif tolerant:
            note = f"{name!r} is not known ({given.source}); it is not used"
        else:
            known = [*_BY_NAME, *(alias for alias in (*ALIASES, *LOCAL) if alias not in _BY_NAME)]
            raise ConfigError(f"{unknown_option(name, known, where='the store')} ({given.source})")
        if note:
            self.notes.append(note)
        return None

    @staticmethod
    def _checked(name: str, target: str, given: Given) -> Given:
        """The typed value; messages name the option as the user did."""
        option = _BY_NAME[target]
        if name in ALIASES and name != target:
            option = dataclasses.replace(option, name=name)
            given = Given(with_unit(given.value, ALIASES[name].unit), given.source)
        return Given(given.parse(option), given.source)

    def add_backend(self, given: Given) -> None:
        """Add a `backend_options` map: what is for a scheme, then what is for one URL."""
        places: dict[str, dict[str, object]] = given.parse(_BY_NAME["backend_options"])
        for place in sorted(places, key=lambda place: "://" in place):
            self.backend += [(place, name, Given(value, given.source)) for name, value in places[place].items()]

    def config(self) -> Config:
        local = local_tiers(self.local, self.notes)
        if local and "tiers" in self.values:
            names = ", ".join(sorted(self.local))
            raise ConfigError(f"tiers are given {self.values['tiers'].source}, and LMCache's {names} too; give one")
        if local:
            self.values["tiers"] = Given(local, next(iter(self.local.values())).source)
        tiers: tuple[TierConfig, ...] = self.values["tiers"].value if "tiers" in self.values else ()  # type: ignore[assignment]
        urls: tuple[BackendURL, ...] = self.values["remote_url"].value if "remote_url" in self.values else ()  # type: ignore[assignment]
        urls = (*(tier.url for tier in tiers), *urls)
        resolved: dict[str, dict[str, Given]] = {}
        for place, name, given in self.backend:
            matching = [url for url in urls if place in (url.scheme, url.base)]
            for url in matching:
                resolved.setdefault(url.base, {})[name] = given
            if not matching:
                self.notes.append(f"option {name!r} of {place} is not used ({given.source}): no such backend is named")
        return Config(
            **{name: given.value for name, given in self.values.items()},  # type: ignore[arg-type]
            backend_options=resolved,
            sources={name: given.source for name, given in self.values.items()},
            notes=tuple(self.notes),
        )


def load_config(
    remote_url: object = None,
    *,
    config_file: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
    **options: object,
) -> Config:
    """Gather the options of a store from all sources.

    Args:
        remote_url: a URL or a list of URLs; None leaves it to the other sources.
        config_file: YAML; overrides `KVSTORE_CONFIG_FILE` and `LMCACHE_CONFIG_FILE`.
        env: the environment; None means this process's.
        options: keyword options, typed or as text.

    Raises:
        ConfigError: an unknown option, or a bad, empty or missing value; names the option and its source. A file that
            cannot be read or is not YAML.
    """
    env = os.environ if env is None else env
    layers = _Layers()
    path = config_file if config_file is not None else _file_of(env)
    if path is not None:
        source = f"in {os.fspath(path)}"
        layers.add({name: Given(value, source) for name, value in read_yaml(path).items()})
    for prefix in _ENV_PREFIXES:
        layer, backend = _environment(env, prefix)
        layers.add(layer, tolerant=prefix != "KVSTORE_")
        layers.backend += backend
    if remote_url is not None:
        options["remote_url"] = remote_url
    layers.add({name: Given(value, f"from keyword {name}") for name, value in options.items()})
    config = layers.config()
    if config.notes:
        logger.warning("configuration: %s", "; ".join(config.notes))
    return config


def _file_of(env: Mapping[str, str]) -> str | None:
    for variable in _FILE_VARIABLES:
        if variable in env:
            if not env[variable].strip():
                raise ConfigError(f"environment variable {variable} is empty; name a file or unset it")
            return env[variable]
    return None


def _environment(env: Mapping[str, str], prefix: str) -> tuple[dict[str, Given], list[tuple[str, str, Given]]]:
    """The options, and the options of backends, that variables with a prefix give."""
    layer: dict[str, Given] = {}
    backend: list[tuple[str, str, Given]] = []
    for variable in sorted(name for name in env if name.startswith(prefix)):
        if variable in _FILE_VARIABLES:
            continue
        name = variable.removeprefix(prefix).lower()
        given = Given(env[variable], f"from environment variable {variable}")
        if name in _BY_NAME or name in ALIASES or name in LOCAL or name in UNUSED:
            layer[name] = given
        elif _OTHER_VARIABLES.fullmatch(variable) or _SERVICE_VARIABLES.fullmatch(f"{variable}={env[variable]}"):
            continue
        elif prefix == "KVSTORE_" and (found := _backend_variable(name)):
            backend.append((*found, given))
        else:
            layer[name] = given  # unknown
    return layer, backend


def _backend_variable(name: str) -> tuple[str, str] | None:
    """(scheme, option) of `<scheme>_<option>`; characters that a variable cannot have stand as underscores."""
    for scheme in sorted(known_schemes(), key=len, reverse=True):
        prefix = re.sub(r"[^a-z0-9]", "_", scheme) + "_"
        if name.startswith(prefix) and len(name) > len(prefix):
            return scheme, name.removeprefix(prefix)
    return None


def read_yaml(path: str | os.PathLike[str]) -> dict[str, object]:
    """The top-level map of a YAML file; an empty file has no options.

    Raises:
        ConfigError: it cannot be read, is not YAML, too large, or no map of names.
    """
    shown = os.fspath(path)
    try:
        with open(path, "rb") as file:
            data = file.read(_MAX_FILE_BYTES + 1)
        text = data.decode("utf-8")
    except OSError as error:
        raise ConfigError(f"the configuration file {shown} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError:
        raise ConfigError(f"the configuration file {shown} is not UTF-8 text") from None
    if len(data) > _MAX_FILE_BYTES:
        raise ConfigError(f"the configuration file {shown} is larger than {_MAX_FILE_BYTES} bytes")
    value = _yaml(text, f"the configuration file {shown}")
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise ConfigError(f"the configuration file {shown} must hold a map from option names to values")
    return value


def _yaml(text: str, what: str) -> object:
    """Parse YAML safely. A key given twice is an error. No message shows a line of the text: it may hold a secret."""
    import yaml

    class Twice(yaml.MarkedYAMLError):
        pass

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            seen: set[str] = set()
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                    if key.value in seen:
                        raise Twice(problem=f"{key.value!r} is given twice", problem_mark=key.start_mark)
                    seen.add(key.value)
            return super().construct_mapping(node, deep)

    try:
        return yaml.load(text, Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        # What stands in quotes is taken from the text ("found undefined alias 'hunter2'"), but for our own message.
        problem = error.problem if isinstance(error, Twice) else re.sub(r"'.*'", "'…'", error.problem or "malformed")
        where = f", line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{what} is not valid YAML{where}: {problem}") from None
    except (yaml.YAMLError, RecursionError, ValueError):
        raise ConfigError(f"{what} is not valid YAML") from None
