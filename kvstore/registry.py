"""Backends by URL: parsing, the table scheme → class, and which option belongs to whom.

This is the one joint at which the core reaches its siblings, and it does so by name only: `SCHEMES` maps a scheme to
"module:Class", and other distributions add schemes through the entry point group `kvstore.backends`.

No secret may stand in a URL: URLs end up in process lists, logs and error messages. User names and passwords before an
`@`, and options that are secret or are named like a secret, are refused without being shown.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import IPv6Address
from typing import Any, NamedTuple
from urllib.parse import quote, unquote_to_bytes

from .backend import Backend
from .errors import ConfigError
from .options import Option, format_manual, unknown_option

__all__ = [
    "ELSEWHERE",
    "PLACEMENT_OPTIONS",
    "SCHEMES",
    "BackendURL",
    "Given",
    "Scheme",
    "SplitOptions",
    "backend_class",
    "install_hint",
    "known_schemes",
    "open_backend",
    "parse_url",
    "parse_urls",
    "scheme_manual",
    "split_options",
]

ENTRY_POINTS = "kvstore.backends"

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]*", re.ASCII)
_BAD_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_SECRET_NAME = re.compile(
    r"(^|[_.\-])(password|passwd|passphrase|secret|token|credentials?|(secret|access|api|private)_?key|signature)$",
    re.ASCII | re.IGNORECASE,
)
_WHERE_SECRETS_GO = (
    "put it into the configuration file or the keyword backend_options={scheme: {option: value}}, "
    "or into an environment variable KVSTORE_<SCHEME>_<OPTION>"
)


class Scheme(NamedTuple):
    """What the registry knows of a scheme without importing its backend.

    Attributes:
        target: "module:Class".
        example: a URL for messages and the manual.
        doc: one sentence.
        extra: the extra of the distribution `kvstore` that brings what it needs; "" if it needs nothing.
        modules: top-level modules of that extra. If one of them is missing, the message names the extra.
        folder: the path of its URLs is that of a folder, and is normalised as one; the same folder twice is a mistake.
    """

    target: str
    example: str
    doc: str
    extra: str = ""
    modules: tuple[str, ...] = ()
    folder: bool = False


SCHEMES: dict[str, Scheme] = {
    "file": Scheme(
        "kvstore_backends.file:FileBackend",
        "file:///mnt/kv",
        "A folder: local NVMe, or NFS, EFS, FSx and the like shared by many nodes.",
        folder=True,
    ),
    "memory": Scheme(
        "kvstore_backends.memory:MemoryBackend",
        "memory://",
        "Memory of this process: for tests, demos, and as the fastest place records can lie.",
    ),
    "mooncake": Scheme(
        "kvstore_backends.mooncake:MooncakeBackend",
        "mooncake://host:50051",
        "Mooncake Store: memory of many hosts behind a mooncake_master, through its own client.",
        extra="mooncake",
        modules=("mooncake",),
    ),
    "node": Scheme(
        "kvstore_backends.node:NodeBackend",
        "node://10.0.0.1:7070,10.0.0.2:7070?replicas=2",
        "The memory and disks of other nodes as one pool, over TCP, RDMA (UCX) or shared memory.",
    ),
    "kvstore+ucx": Scheme(
        "kvstore_backends.node:NodeBackend",
        "kvstore+ucx://10.0.0.1:7070,10.0.0.2:7070",
        "As node://, over UCX and nothing else.",
    ),
    "s3": Scheme(
        "kvstore_backends.s3:S3Backend",
        "s3://bucket/prefix?region=us-west-2",
        "S3, S3 Express One Zone (recognised by the bucket's name), and what speaks their protocol, by endpoint_url.",
        extra="s3",
        modules=("boto3", "botocore"),
    ),
    "valkey": Scheme(
        "kvstore_backends.valkey:ValkeyBackend",
        "valkey://host:6379/kv",
        "Valkey or Redis: one server, a primary with replicas (also by Sentinels), or a cluster.",
    ),
    "valkeys": Scheme(
        "kvstore_backends.valkey:ValkeyBackend",
        "valkeys://host:6379/kv",
        "The same over TLS.",
    ),
}
"""The schemes of this distribution."""

ELSEWHERE: dict[str, str] = {
    "nixl": (
        "NIXL moves bytes and keeps no records; node:// with transport=ucx moves them over the same UCX, and "
        "kvstore-bench compare nixl measures both"
    ),
    "infinistore": "InfiniStore has no backend here; use node:// (memory of many hosts, RDMA by UCX) or mooncake://",
    "weka": "WEKA is a mounted file system: use file:///mnt/weka/kv",
    "gds": (
        "GPUDirect Storage has no backend here: records are read into page-locked host memory and copied to the GPU "
        "from there; use file:///mnt/kv"
    ),
}
"""Schemes that people look for, and what to use instead."""

PLACEMENT_OPTIONS: tuple[Option, ...] = (
    Option("weight", "float", 1.0, "Share of the keys this backend gets, relative to the others; 0 takes no new keys.",
           minimum=0.0),
    Option("name", "str", None, "Name of this backend in placement, errors and metrics; the same on every node that "
                                "shares it. Unset: the URL without its options."),
)  # fmt: skip
"""What the store needs to know of each of its backends. Every scheme has these options."""


@dataclass(frozen=True, slots=True, repr=False)
class BackendURL:
    """A parsed `scheme://authority/path?option=value`.

    `str` gives it back, percent-encoded where needed. Log `shown` instead: it leaves out the values of options.

    Attributes:
        scheme: lower case.
        authority: host and port as written, percent-decoded; "" if none.
        path: percent-decoded, with its leading slash; "" if none. That of a folder (`Scheme.folder`) is normalised, so
            that all nodes and both spellings agree on `base`: no `//`, no `.`, no slash at the end.
        options: the query, percent-decoded; each option at most once.

    Raises:
        ConfigError: the path of a folder has `..` in it, which means another place if a symbolic link precedes it.
    """

    scheme: str
    authority: str = ""
    path: str = ""
    options: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if self.is_folder and self.path:
            object.__setattr__(self, "path", _folder_path(self.path, self.scheme))

    @property
    def is_folder(self) -> bool:
        """Whether the path is that of a folder."""
        entry = SCHEMES.get(self.scheme)
        return entry is not None and entry.folder

    @property
    def base(self) -> str:
        """The URL without its options: which place it is."""
        return f"{self.scheme}://{quote(self.authority, safe='[]:,*~!$()')}{quote(self.path, safe='/:@,+=~!$()*')}"

    def __str__(self) -> str:
        query = "&".join(
            f"{quote(name, safe='')}={'…' if _SECRET_NAME.search(name) else quote(value, safe='/:@,~!$()*')}"
            for name, value in self.options.items()
        )
        return self.base + (f"?{query}" if query else "")

    def about(self, error: Exception) -> str:
        """A message with the place it is about in front, unless it begins with that itself."""
        text = str(error)
        return text if text.startswith(f"{self.scheme}://{self.authority}:") else f"{self.base}: {text}"

    @property
    def shown(self) -> str:
        """For logs and reprs: the URL without the values of its options, which nobody has checked for secrets yet."""
        return self.base + "".join(f"{'&' if i else '?'}{quote(n, safe='')}=…" for i, n in enumerate(self.options))

    def __repr__(self) -> str:
        return f"BackendURL({self.shown!r})"


@dataclass(frozen=True, slots=True, repr=False)
class Given:
    """The value of an option, and where it came from. Its repr does not show the value: it may be secret.

    Attributes:
        source: for messages: "in /etc/kv.yaml", "from environment variable KVSTORE_CHUNK_SIZE".
    """

    value: object
    source: str

    def __repr__(self) -> str:
        return f"<given {self.source}>"

    def parse(self, option: Option) -> Any:
        """The typed value. Raises `ConfigError`, naming option and source, for an empty, null or ill-typed one."""
        if self.value is None or (isinstance(self.value, str) and not self.value.strip()):
            what = "null" if self.value is None else "empty"
            raise ConfigError(f"option {option.name!r} is {what} ({self.source}); give a value or leave it out")
        try:
            return option.parse(self.value)
        except ConfigError as error:
            raise ConfigError(f"{error.message} ({self.source})") from None


class SplitOptions(NamedTuple):
    """Typed options by owner, with defaults filled in.

    Attributes:
        own: the backend's, for `Backend.from_url`.
        wrapper: of the wrappers around it (`kvstore.wrappers.WRAPPER_OPTIONS`).
        placement: of the store (`PLACEMENT_OPTIONS`).
    """

    own: dict[str, Any]
    wrapper: dict[str, Any]
    placement: dict[str, Any]


def parse_url(text: str) -> BackendURL:
    """Parse one URL (RFC 3986 syntax, without user info and fragment).

    `+` stands for itself. Only the syntax is looked at, not whether scheme and options are known.

    Raises:
        ConfigError: not a URL, a bad percent escape, an option given twice or without a value, or a secret in it. No
            message shows what might be one.
    """
    if not isinstance(text, str):
        raise ConfigError(f"a backend is named by a URL such as file:///mnt/kv, not by {type(text).__name__}")
    text = text.strip()
    scheme, separator, rest = text.partition("://")
    if not separator or not _SCHEME.fullmatch(scheme):
        raise ConfigError(_not_a_url(text))
    scheme = scheme.lower()
    location, _, query = rest.partition("?")
    slash = location.find("/")
    authority, path = (location, "") if slash < 0 else (location[:slash], location[slash:])
    if any(_bare_ipv6(part) for part in authority.split(",")):
        raise ConfigError(f"an IPv6 address stands in brackets: {scheme}://[::1]:7070")
    if "@" in authority or not _ports_are_numbers(authority):
        raise ConfigError(
            f"the {scheme}:// URL holds credentials, or a port that is not a number, before its path; "
            f"a URL must not hold a user name, password or key: {_WHERE_SECRETS_GO}"
        )
    if "#" in rest:
        raise ConfigError(f"the {scheme}:// URL has a fragment ('#'); write %23 for a literal '#'")
    options: dict[str, str] = {}
    for pair in query.split("&") if query else ():
        raw_name, equals, raw_value = pair.partition("=")
        name = _decoded(raw_name, scheme, "an option's name")
        if not name:
            raise ConfigError(f"the {scheme}:// URL has an option without a name; write ?option=value&option=value")
        if _SECRET_NAME.search(name):
            raise ConfigError(f"option {name!r} must not stand in a URL ({scheme}://): {_WHERE_SECRETS_GO}")
        if name in options:
            raise ConfigError(f"option {name!r} is given twice in the {scheme}:// URL")
        value = _decoded(raw_value, scheme, f"option {name!r}")
        if not equals or not value.strip():
            raise ConfigError(f"option {name!r} in the {scheme}:// URL has no value; write {name}=VALUE")
        options[name] = value
    return BackendURL(scheme, _decoded(authority, scheme, "the authority"), _decoded(path, scheme, "the path"), options)


def _folder_path(path: str, scheme: str) -> str:
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise ConfigError(f"the path of the {scheme}:// URL has '..' in it; write out the folder that is meant")
    return "/" + "/".join(parts)


def _not_a_url(text: str) -> str:
    if re.match(r"[/~.]", text):
        return f"a path is not a URL; for a folder write file:// and its absolute path, e.g. {SCHEMES['file'].example}"
    return "a backend is named by scheme://authority/path?option=value; for instance file:///mnt/kv or memory://"


def _bare_ipv6(part: str) -> bool:
    """Whether it is an IPv6 address without brackets; one with a port behind it is one, too."""
    if part.count(":") < 2 or "[" in part:
        return False
    try:
        IPv6Address(part.partition("%")[0])
    except ValueError:
        return False
    return True


def _ports_are_numbers(authority: str) -> bool:
    """False if something that is not a port follows a colon: most likely a password with a slash in it."""
    for part in authority.split(","):
        _, bracket, after = part.rpartition("]")
        host, colon, port = (after if bracket else part).partition(":")
        if colon and not (port.isascii() and port.isdigit()):
            return False
        if bracket and host:
            return False
    return True


def _decoded(text: str, scheme: str, what: str) -> str:
    if _BAD_ESCAPE.search(text):
        raise ConfigError(f"{what} of the {scheme}:// URL has a '%' that begins no escape; write %25 for a literal '%'")
    try:
        decoded = unquote_to_bytes(text).decode("utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"{what} of the {scheme}:// URL is not UTF-8 after percent-decoding") from None
    if _CONTROL.search(decoded):
        raise ConfigError(f"{what} of the {scheme}:// URL holds a control character")
    return decoded


def parse_urls(value: object) -> list[BackendURL]:
    """The backends a `remote_url` names: one URL, several separated by commas, or a list of them.

    A comma separates URLs only where another `scheme://` follows; write %2C for one that does not. LMCache's schemes
    that mean the same as one of ours are translated (`fs://host:0/a,/b` is two `file://` URLs).

    Raises:
        ConfigError: as `parse_url`; an empty list; or an LMCache scheme that has no counterpart here (the message says
            what to use instead).
    """
    if isinstance(value, BackendURL):
        return [value]
    if isinstance(value, str):
        parts: Sequence[object] = re.split(r",\s*(?=[A-Za-z][A-Za-z0-9+.\-]*://)", value)
    elif isinstance(value, list | tuple):
        parts = value
    else:
        raise ConfigError(f"remote_url must be a URL or a list of URLs, not {type(value).__name__}")
    urls: list[BackendURL] = []
    for part in parts:
        if isinstance(part, BackendURL):
            urls.append(part)
        elif not isinstance(part, str):
            raise ConfigError(f"remote_url must be a URL or a list of URLs, not a list with {type(part).__name__}")
        elif len(parts) > 1 or not isinstance(value, str):
            urls += parse_urls(part)
        else:
            urls += _translated(parse_url(part))
    if not urls:
        raise ConfigError("remote_url is an empty list; name at least one backend")
    return urls


def _translated(url: BackendURL) -> list[BackendURL]:
    """`url`, or what LMCache means by it."""
    if url.scheme in SCHEMES:
        return [url]
    from ._lmcache import translate_url

    return translate_url(url) or [url]


def known_schemes() -> list[str]:
    """All schemes that can be opened: the table's, and those of installed entry points."""
    return sorted({*SCHEMES, *(point.name for point in _entry_points())})


def _entry_points() -> Iterator[Any]:
    from importlib.metadata import entry_points

    yield from entry_points(group=ENTRY_POINTS)


def backend_class(scheme: str) -> type[Backend]:
    """The class that serves a scheme; imports its module.

    Raises:
        ConfigError: the scheme is unknown (the message names the known ones), or what it needs is not installed.
        ImportError: its module was found, but is broken.
    """
    entry = SCHEMES.get(scheme)
    if entry is None:
        points = [point for point in _entry_points() if point.name == scheme]
        if not points and scheme in ELSEWHERE:
            raise ConfigError(f"{scheme}:// is not a scheme of kvstore's: {ELSEWHERE[scheme]}")
        if not points:
            raise ConfigError(f"unknown scheme {scheme}://; known schemes: {', '.join(known_schemes())}")
        entry = Scheme(points[0].value, f"{scheme}://", "")
    found = _load(scheme, entry)
    if not (isinstance(found, type) and issubclass(found, Backend)):
        raise ConfigError(f"{entry.target}, registered for {scheme}://, is not a kvstore.backend.Backend")
    return found


def install_hint(extra: str) -> str:
    """The command that installs an extra. By path, not by name: `kvstore` on PyPI is another project."""
    return f"pip install -c constraints.txt '.[{extra}]'"


def _load(scheme: str, entry: Scheme) -> object:
    module_name, _, attribute = entry.target.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        own = missing != "" and f"{module_name}.".startswith(f"{missing}.")
        if not own and missing.partition(".")[0] not in entry.modules:
            raise  # a broken module is not a missing one
        hint = f"reinstall what provides {entry.target}"
        if entry.extra:
            hint = f"in this project's checkout run {install_hint(entry.extra)}"
        raise ConfigError(f"{scheme}:// needs {missing}, which is not installed: {hint}") from error
    try:
        return getattr(module, attribute)
    except AttributeError as error:
        raise ConfigError(f"{entry.target}, registered for {scheme}://, does not exist") from error


def wrapper_options() -> Sequence[Option]:
    """Options of the wrappers, which every scheme has."""
    from .wrappers import WRAPPER_OPTIONS

    return WRAPPER_OPTIONS


def split_options(
    url: BackendURL, backend: type[Backend], overrides: Mapping[str, object] | None = None
) -> SplitOptions:
    """The options of one backend, typed, by owner.

    Args:
        overrides: take precedence over the URL's; plain values, or `Given` with a source for messages.

    Raises:
        ConfigError: an unknown name (with the choices), a bad value, or a secret in the URL.
    """
    groups = (tuple(backend.options), wrapper_options(), PLACEMENT_OPTIONS)
    known: dict[str, Option] = {}
    for option in (option for group in groups for option in group):
        if option.name in known:
            raise ConfigError(f"option {option.name!r} of {url.scheme}:// is defined twice ({backend.__name__})")
        known[option.name] = option
    given: dict[str, Given] = {name: Given(text, f"in the URL {url.base}") for name, text in url.options.items()}
    for name in given:
        if name in known and known[name].secret:
            raise ConfigError(f"option {name!r} must not stand in a URL ({url.base}): {_WHERE_SECRETS_GO}")
    for name, value in (overrides or {}).items():
        given[name] = value if isinstance(value, Given) else Given(value, f"given for {url.base}")
    for name, value in given.items():
        if name not in known:
            raise ConfigError(f"{_unknown(name, known, url.scheme)} ({value.source})")
    typed = {name: value.parse(known[name]) for name, value in given.items()}
    return SplitOptions(*({option.name: typed.get(option.name, option.default) for option in g} for g in groups))


def _unknown(name: str, known: Mapping[str, Option], scheme: str) -> str:
    from .config import OPTIONS

    if any(option.name == name for option in OPTIONS):
        return (
            f"option {name!r} is one of the store, not of {scheme}://; give it as a keyword, in the configuration "
            f"file or as KVSTORE_{name.upper()}"
        )
    return unknown_option(name, known, where=f"{scheme}://")


def open_backend(url: str | BackendURL, /, **overrides: object) -> Backend:
    """The bare backend a URL names: without wrappers, lanes and placement (their options are checked and left out).

    Args:
        overrides: options; they take precedence over the URL's.

    Raises:
        ConfigError: the URL, its scheme or an option is wrong, or what the backend needs is not installed.
    """
    urls = parse_urls(url)
    if len(urls) != 1:
        raise ConfigError(f"this names {len(urls)} backends, where one is wanted; kvstore.open_store takes several")
    found = backend_class(urls[0].scheme)
    return found.from_url(urls[0], split_options(urls[0], found, overrides).own)


def scheme_manual() -> str:
    """All schemes of this distribution with their options, as Markdown."""
    parts = []
    for scheme, entry in sorted(SCHEMES.items()):
        own = backend_class(scheme).options
        needs = f" Needs `{install_hint(entry.extra)}` in this project's checkout." if entry.extra else ""
        table = format_manual(own) if own else "No options of its own."
        parts.append(f"### `{scheme}://`\n\n{entry.doc}{needs} Example: `{entry.example}`\n\n{table}")
    parts.append(
        "### Every scheme\n\nHow a backend is treated when it is slow or fails, and its share of the keys.\n\n"
        + format_manual([*wrapper_options(), *PLACEMENT_OPTIONS])
    )
    return "\n\n".join(parts)
