"""URLs, schemes, and which option belongs to whom."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import kvstore._lmcache as lmcache
from kvstore import registry
from kvstore.backend import Backend, Outcome, Read, Write
from kvstore.errors import ConfigError
from kvstore.keys import Key
from kvstore.options import Option
from kvstore.registry import (
    PLACEMENT_OPTIONS,
    SCHEMES,
    BackendURL,
    Given,
    Scheme,
    backend_class,
    known_schemes,
    open_backend,
    parse_url,
    parse_urls,
    scheme_manual,
    split_options,
)


class StubBackend(Backend):
    """Remembers how it was opened."""

    options: ClassVar[Sequence[Option]] = (
        Option("lanes", "int", 4, "Lanes.", minimum=1),
        Option("capacity", "size", None, "Capacity."),
        Option("pin", "str", None, "Secret by definition, not by name.", secret=True),
        Option("password", "str", None, "Secret.", secret=True),
    )

    def __init__(self, url: BackendURL, options: Mapping[str, Any]) -> None:
        self.name = url.base
        self.url = url
        self.given = dict(options)

    @classmethod
    def from_url(cls, url: BackendURL, options: Mapping[str, Any]) -> StubBackend:
        return cls(url, options)

    def stat(self, keys: Sequence[Key], *, deadline: float) -> list[Outcome]:
        raise NotImplementedError

    def get_into(self, reads: Sequence[Read], *, deadline: float) -> list[Outcome]:
        raise NotImplementedError

    def put(self, writes: Sequence[Write], *, deadline: float) -> list[Outcome]:
        raise NotImplementedError

    def delete(self, keys: Sequence[Key], *, deadline: float) -> list[Outcome]:
        raise NotImplementedError

    def quarantine(self, keys: Sequence[Key], *, deadline: float) -> list[Outcome]:
        raise NotImplementedError

    def close(self) -> None:
        pass


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> type[StubBackend]:
    """`stub://` opens `StubBackend`."""
    module = type(sys)("kvstore_stub_backend")
    module.StubBackend = StubBackend  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(SCHEMES, "stub", Scheme(f"{module.__name__}:StubBackend", "stub://", "A stub."))
    return StubBackend


# URLs.


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("memory://", BackendURL("memory")),
        ("file:///mnt/kv", BackendURL("file", "", "/mnt/kv")),
        ("FILE:///Mnt/KV", BackendURL("file", "", "/Mnt/KV")),
        ("  memory://  ", BackendURL("memory")),
        ("memory://?lanes=2", BackendURL("memory", "", "", {"lanes": "2"})),
        ("memory://?", BackendURL("memory")),
        ("node://10.0.0.1:7000/a?x=1&y=2", BackendURL("node", "10.0.0.1:7000", "/a", {"x": "1", "y": "2"})),
        ("node://[::1]:7000/a", BackendURL("node", "[::1]:7000", "/a")),
        ("node://a:1,b:2/", BackendURL("node", "a:1,b:2", "/")),
        ("kvstore+ucx://host:1/", BackendURL("kvstore+ucx", "host:1", "/")),
        ("file:///a%20b/c%3Fd%23e%25?n=%C3%A9%26%3D", BackendURL("file", "", "/a b/c?d#e%", {"n": "é&="})),
        ("file:///a+b?n=c+d", BackendURL("file", "", "/a+b", {"n": "c+d"})),
        ("file:///mnt/k v", BackendURL("file", "", "/mnt/k v")),
        ("file:///mnt/a@b:c", BackendURL("file", "", "/mnt/a@b:c")),
        ("s?b://x", None),
        ("file:///a?b=c?d=e", BackendURL("file", "", "/a", {"b": "c?d=e"})),
        ("file:///a?b=/x:y@z", BackendURL("file", "", "/a", {"b": "/x:y@z"})),
    ],
)
def test_parsing(text: str, url: BackendURL | None) -> None:
    if url is None:
        with pytest.raises(ConfigError):
            parse_url(text)
        return
    assert parse_url(text) == url
    assert parse_url(str(url)) == url, "str gives it back"


names = st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1, max_size=8)


@given(
    st.text(st.characters(exclude_categories=("Cs", "Cc")), max_size=12),
    st.dictionaries(names.filter(lambda n: not registry._SECRET_NAME.search(n)), names.filter(str.strip), max_size=3),
)
def test_any_path_and_options_survive_their_own_text(path: str, options: dict[str, str]) -> None:
    assume(".." not in path.split("/"))
    for scheme in ("file", "node"):  # a folder's path, and one that is left as it is
        url = BackendURL(scheme, "", f"/{path}", options)
        assert parse_url(str(url)) == url
        assert str(url).isascii()
        assert not set(str(url)) & set(' "<>\n\t')


@pytest.mark.parametrize(
    "text",
    ["file:///a/b", "file:///a/b/", "file:////a//b", "file:///a/./b/.", "file:///a%2Fb%2F", "file:///./a/%2e/b//"],
)
def test_one_folder_has_one_name(text: str) -> None:
    url = parse_url(text + "?lanes=2")
    assert (url.path, url.base, str(url)) == ("/a/b", "file:///a/b", "file:///a/b?lanes=2")
    assert url == BackendURL("file", "", "/a//b/", {"lanes": "2"})


def test_only_the_paths_of_folders_are_normalised() -> None:
    assert parse_url("s3://bucket//a/../b/").path == "//a/../b/"  # keys of S3, where all of this means itself
    assert parse_url("file:///a/..b/...").path == "/a/..b/..."
    assert parse_url("file://").path == ""
    assert parse_url("file:///.//").path == "/"


@pytest.mark.parametrize(
    "text", ["file:///x/../a", "file:///a/..", "file:///a/%2e%2e/b", "file:///..", "fs://x:0/a/../b"]
)
def test_a_folder_is_not_named_by_dots(text: str) -> None:
    with pytest.raises(ConfigError, match=r"path of the file:// URL has '\.\.' in it"):
        parse_urls(text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "named by scheme://"),
        ("/mnt/kv", "a path is not a URL; for a folder write file://"),
        ("./kv", "a path is not a URL"),
        ("~/kv", "a path is not a URL"),
        ("file:/mnt/kv", "named by scheme://authority/path"),
        ("file", "named by scheme://"),
        ("://x", "named by scheme://"),
        ("1file:///x", "named by scheme://"),
        ("fi_le:///x", "named by scheme://"),
        ("file:///a#b", "fragment"),
        ("file:///a?x=1#b", "fragment"),
        ("file:///a%2", "write %25"),
        ("file:///a%zz", "write %25"),
        ("file:///a?x=%", "write %25"),
        ("file:///a%ff", "not UTF-8"),
        ("file:///a%00b", "control character"),
        ("file:///a\nb", "control character"),
        ("file:///a?x=a%0Ab", "control character"),
        ("file:///a?x=1&x=2", "option 'x' is given twice"),
        ("file:///a?x=1&%78=2", "option 'x' is given twice"),
        ("file:///a?x", "option 'x' in the file:// URL has no value; write x=VALUE"),
        ("file:///a?x=", "option 'x' in the file:// URL has no value"),
        ("file:///a?x=%20", "option 'x' in the file:// URL has no value"),
        ("file:///a?=1", "option without a name"),
        ("file:///a?x=1&", "option without a name"),
    ],
)
def test_what_is_not_a_url(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_url(text)
    assert says in str(caught.value)


@pytest.mark.parametrize("value", [None, 7, b"file:///x", Path("/mnt"), ["file:///x"]])
def test_only_text_is_a_url(value: Any) -> None:
    with pytest.raises(ConfigError, match="named by a URL"):
        parse_url(value)


SECRETS = [
    "redis://user:hunter2@host:6379/0",
    "redis://:hunter2@host",
    "valkey://hunter2@host",
    "valkey://user:hunter2/x@host",  # a slash in a password ends the authority
    "valkey://user:hunter2?x@host",
    "valkey://user:hunter2#x@host",
    "valkey://user:6hunter2",
    "file:///a?password=hunter2",
    "file:///a?PASSWORD=hunter2",
    "file:///a?aws_secret_access_key=hunter2",
    "file:///a?x=1&api%5Fkey=hunter2",
    "file:///a?session_token=hunter2&x=1&x=1",
    "file:///a?auth.secret=hunter2",
    "file:///a?x=hunter2&x=hunter2",
    "file:///a?x=hunter2%zz",
    "file:///a?x=hunter2%ff",
    "file:///a?x=hunter2%00",
    "user:hunter2@host",
    "postgres:user:hunter2@host",
]


@pytest.mark.parametrize("text", SECRETS)
def test_a_secret_in_a_url_is_refused_and_never_shown(text: str) -> None:
    for function in (parse_url, parse_urls, open_backend):
        with pytest.raises(ConfigError) as caught:
            function(text)
        shown = "".join(traceback.format_exception(caught.value, chain=True))
        assert "hunter2" not in str(caught.value)
        assert "hunter2" not in shown.replace(text, ""), "nor in a chained exception"


@pytest.mark.parametrize("text", SECRETS[:12])
def test_the_message_says_where_a_secret_goes(text: str) -> None:
    with pytest.raises(ConfigError, match=r"backend_options|fragment|has no value") as caught:
        parse_url(text)
    if "fragment" not in str(caught.value) and "no value" not in str(caught.value):
        assert "KVSTORE_<SCHEME>_<OPTION>" in str(caught.value)


@pytest.mark.parametrize("name", ["token_file", "password_file", "keys", "key", "tokens", "secretary", "monkey"])
def test_a_name_that_only_looks_like_one_is_no_secret(name: str) -> None:
    assert parse_url(f"file:///a?{name}=1").options == {name: "1"}


def test_a_url_made_by_hand_masks_what_is_named_like_a_secret() -> None:
    url = BackendURL("x", "h", "/p", {"password": "hunter2", "lanes": "4"})
    assert "hunter2" not in str(url) + repr(url)
    assert "lanes=4" in str(url)


def test_logs_show_no_values_of_options() -> None:
    url = parse_url("file:///a b?pin=hunter2&lanes=4")
    assert url.shown == "file:///a%20b?pin=…&lanes=…"
    assert repr([url]) == "[BackendURL('file:///a%20b?pin=…&lanes=…')]"
    assert parse_url("file:///a").shown == "file:///a"


def test_urls_are_hashable_and_their_base_is_without_options() -> None:
    one, other = parse_url("file:///a b?x=1"), parse_url("file:///a b?x=2")
    assert one != other
    assert one.base == other.base == "file:///a%20b"
    assert len({one, other, parse_url("file:///a%20b?x=1")}) == 2


# Lists, and LMCache's URLs.


@pytest.mark.parametrize(
    ("value", "texts"),
    [
        ("file:///a", ["file:///a"]),
        ("file:///a,file:///b", ["file:///a", "file:///b"]),
        ("file:///a?x=1, memory://", ["file:///a?x=1", "memory://"]),
        ("file:///a,b", ["file:///a,b"]),
        (["file:///a", "memory://"], ["file:///a", "memory://"]),
        (("file:///a,memory://",), ["file:///a", "memory://"]),
        ([BackendURL("file", "", "/a")], ["file:///a"]),
        (BackendURL("file", "", "/a"), ["file:///a"]),
        ("fs://x:0/a", ["file:///a"]),
        ("fs://host:0/a/b,/c", ["file:///a/b", "file:///c"]),
        ("fs://host:0/a,b", ["file:///a,b"]),
        ("fs://x:0/a?lanes=2", ["file:///a?lanes=2"]),
        ("fs://x:0/a,/b,memory://", ["file:///a", "file:///b", "memory://"]),
        ("other://x", ["other://x"]),
    ],
)
def test_several_urls(value: object, texts: list[str]) -> None:
    assert [str(url) for url in parse_urls(value)] == texts


@pytest.mark.parametrize("value", [[], (), None, 7, {"file:///a": 1}, [7], ["file:///a", None], ["file:///a", ["x"]]])
def test_what_is_no_list_of_urls(value: object) -> None:
    with pytest.raises(ConfigError, match=r"remote_url (must be|is an empty)"):
        parse_urls(value)


@pytest.mark.parametrize("text", ["fs://x:0", "fs://x:0/", "fs://x:0/a,/"])
def test_an_lmcache_folder_needs_a_path(text: str) -> None:
    with pytest.raises(ConfigError, match="absolute path"):
        parse_urls(text)


LMCACHE_SCHEMES = [
    "redis", "rediss", "unix", "redis-sentinel", "redis-cluster", "resp", "valkey", "lm", "fs", "s3", "infinistore",
    "mooncakestore", "audit", "external", "mock", "blackhole", "azure", "bigtable", "hf3fs", "hfbucket", "eic",
    "sagemaker-hyperpod", "plugin",
]  # fmt: skip
"""All schemes of LMCache 0.5.6, in-process mode."""


def test_every_lmcache_scheme_is_known() -> None:
    assert sorted(lmcache.SCHEMES) == sorted(LMCACHE_SCHEMES)


@pytest.mark.parametrize("scheme", sorted({*LMCACHE_SCHEMES} - {*lmcache.TRANSLATED, *SCHEMES}))
def test_an_lmcache_scheme_without_counterpart_is_refused_by_name(scheme: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_urls(f"{scheme}://host:1/x")
    message = str(caught.value)
    assert message.startswith(f"{scheme}:// is one of LMCache's schemes, not of kvstore's: ")
    assert "file://" in message or "use" in message or "give" in message or "entry point" in message


def test_our_own_scheme_wins_over_lmcaches(stub: type[StubBackend], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SCHEMES, "s3", SCHEMES["stub"])
    assert isinstance(open_backend("s3://bucket"), stub)


# Schemes.


def test_an_unknown_scheme_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"unknown scheme ftp://; known schemes: .*file, .*memory"):
        open_backend("ftp://host/x")


def test_only_what_exists_is_listed() -> None:
    assert {"file", "memory"} <= set(known_schemes())
    for scheme in SCHEMES:
        assert issubclass(backend_class(scheme), Backend)


def test_every_scheme_of_the_table_has_sound_options() -> None:
    for scheme, entry in SCHEMES.items():
        found = backend_class(scheme)
        split = split_options(parse_url(entry.example), found)
        assert set(split.own) == {option.name for option in found.options}
        for option in (*found.options, *registry.wrapper_options(), *PLACEMENT_OPTIONS):
            assert option.doc.endswith("."), f"{option.name}: one sentence"
            if option.default is not None:
                assert option.parse(option.default) == option.default, "a default is a value"


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on `sys.path` for throw-away modules named `kvstore_throwaway…`."""
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("kvstore_throwaway")]:
        del sys.modules[name]


def test_a_missing_extra_says_what_to_install(module: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (module / "kvstore_throwaway_a.py").write_text("import kvstore_no_such_library.client\n")
    entry = Scheme("kvstore_throwaway_a:B", "x://", "…", extra="s3", modules=("kvstore_no_such_library",))
    monkeypatch.setitem(SCHEMES, "x", entry)
    with pytest.raises(
        ConfigError, match=r"x:// needs kvstore_no_such_library.*checkout run pip install .*'\.\[s3\]'$"
    ) as caught:
        open_backend("x://")
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_a_missing_module_of_an_extra_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SCHEMES, "x", Scheme("kvstore_throwaway_none.deep:B", "x://", "…", extra="ucx"))
    with pytest.raises(
        ConfigError, match=r"needs kvstore_throwaway_none, .*pip install -c constraints\.txt '\.\[ucx\]'"
    ):
        open_backend("x://")
    monkeypatch.setitem(SCHEMES, "x", Scheme("kvstore_throwaway_none.deep:B", "x://", "…"))
    with pytest.raises(ConfigError, match=r"reinstall what provides kvstore_throwaway_none.deep:B"):
        open_backend("x://")


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("import kvstore_throwaway_typo", ModuleNotFoundError),
        ("from kvstore.errors import NoSuchName", ImportError),
        ("raise ImportError('broken')", ImportError),
        ("1 / 0", ZeroDivisionError),
    ],
)
def test_a_broken_module_is_not_taken_for_a_missing_one(
    code: str, error: type[Exception], module: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (module / "kvstore_throwaway_b.py").write_text(code + "\n")
    monkeypatch.setitem(SCHEMES, "x", Scheme("kvstore_throwaway_b:B", "x://", "…", extra="s3", modules=("boto3",)))
    with pytest.raises(error) as caught:
        open_backend("x://")
    assert not isinstance(caught.value, ConfigError)


def test_a_wrong_table_entry_is_named(module: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (module / "kvstore_throwaway_c.py").write_text("thing = 7\n")
    monkeypatch.setitem(SCHEMES, "x", Scheme("kvstore_throwaway_c:Nothing", "x://", "…"))
    with pytest.raises(ConfigError, match="kvstore_throwaway_c:Nothing, registered for x://, does not exist"):
        open_backend("x://")
    monkeypatch.setitem(SCHEMES, "x", Scheme("kvstore_throwaway_c:thing", "x://", "…"))
    with pytest.raises(ConfigError, match=r"is not a kvstore\.backend\.Backend"):
        open_backend("x://")


def test_another_distribution_adds_a_scheme(stub: type[StubBackend], monkeypatch: pytest.MonkeyPatch) -> None:
    target = SCHEMES["stub"].target
    points = [
        EntryPoint("theirs", target, registry.ENTRY_POINTS),
        EntryPoint("file", target, registry.ENTRY_POINTS),
    ]
    monkeypatch.setattr(registry, "_entry_points", lambda: iter(points))
    backend = open_backend("theirs://host/p?lanes=2")
    assert isinstance(backend, stub)
    assert backend.given["lanes"] == 2
    assert "theirs" in known_schemes()
    assert backend_class("file") is not stub, "nobody takes over a scheme of ours"


def test_entry_points_are_read_from_installed_distributions(module: Path, stub: type[StubBackend]) -> None:
    info = module / "kvstore_throwaway-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kvstore-throwaway\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[kvstore.backends]\nthrowaway = {SCHEMES['stub'].target}\n")
    assert isinstance(open_backend("throwaway://"), stub)


# Options.


def test_options_are_split_by_owner(stub: type[StubBackend]) -> None:
    url = parse_url("stub://h/p?lanes=2&weight=3&capacity=1GiB")
    split = split_options(url, stub, {"name": "a", "password": "hunter2"})
    assert split.own == {"lanes": 2, "capacity": 1 << 30, "pin": None, "password": "hunter2"}
    assert split.placement == {"weight": 3.0, "name": "a"}
    assert set(split.wrapper) == {option.name for option in registry.wrapper_options()}
    assert split_options(parse_url("stub://"), stub).placement == {"weight": 1.0, "name": None}


def test_the_backend_gets_its_own_options_only(stub: type[StubBackend]) -> None:
    backend = open_backend("stub://h/p?lanes=2&weight=3", lanes="8")
    assert isinstance(backend, stub)
    assert backend.given == {"lanes": 8, "capacity": None, "pin": None, "password": None}, "an override wins"
    assert backend.url.path == "/p"


def test_open_backend_takes_a_parsed_url_and_one_only(stub: type[StubBackend]) -> None:
    assert isinstance(open_backend(BackendURL("stub")), stub)
    with pytest.raises(ConfigError, match="names 2 backends"):
        open_backend("stub://a,stub://b")


def test_unknown_options_are_named_with_scheme_source_and_choices(stub: type[StubBackend]) -> None:
    with pytest.raises(ConfigError) as caught:
        open_backend("stub://h/p?lane=2")
    message = str(caught.value)
    assert "unknown option 'lane' for stub://; did you mean 'lanes'?" in message
    for name in ("capacity", "lanes", "weight", "name"):
        assert name in message
    assert "(in the URL stub://h/p)" in message
    with pytest.raises(ConfigError, match=r"unknown option 'lane' .* \(in /etc/kv\.yaml\)"):
        open_backend("stub://h/p", lane=Given(2, "in /etc/kv.yaml"))


def test_an_option_of_the_store_in_a_url_says_where_it_goes(stub: type[StubBackend]) -> None:
    with pytest.raises(ConfigError, match=r"'chunk_size' is one of the store, not of stub://; .*KVSTORE_CHUNK_SIZE"):
        open_backend("stub://?chunk_size=512")


@pytest.mark.parametrize(
    ("url", "overrides", "says"),
    [
        ("stub://?lanes=two", {}, "option 'lanes': 'two' is not an integer (in the URL stub://)"),
        ("stub://?lanes=0", {}, "option 'lanes': '0' is out of range; it must be at least 1 (in the URL stub://)"),
        ("stub://?capacity=1PiB", {}, "unknown unit 'PiB'"),
        ("stub://?weight=-1", {}, "option 'weight': '-1' is out of range"),
        ("stub://?weight=nan", {}, "option 'weight': 'nan' is not a finite number"),
        ("stub://", {"lanes": None}, "option 'lanes' is null (given for stub://)"),
        ("stub://", {"lanes": Given("", "in f")}, "option 'lanes' is empty (in f)"),
        ("stub://", {"lanes": Given([1], "in f")}, "option 'lanes': [1] is not an integer (in f)"),
        ("stub://?pin=hunter2", {}, "option 'pin' must not stand in a URL"),
        ("stub://", {"pin": ["hunter2"]}, "option 'pin': the value is not text"),
        ("stub://", {"password": Given({"hunter2": 1}, "in f")}, "option 'password': the value is not text (in f)"),
    ],
)
def test_bad_values_name_option_and_source(
    url: str, overrides: dict[str, object], says: str, stub: type[StubBackend]
) -> None:
    with pytest.raises(ConfigError) as caught:
        open_backend(url, **overrides)
    assert says in str(caught.value)
    assert "hunter2" not in "".join(traceback.format_exception(caught.value)).replace("open_backend(url", "")


def test_one_name_has_one_owner(stub: type[StubBackend]) -> None:
    class Clash(StubBackend):
        options = (Option("weight", "int", 1, "…"),)

    with pytest.raises(ConfigError, match="'weight' of stub:// is defined twice"):
        split_options(parse_url("stub://"), Clash)


def test_a_given_value_shows_only_its_source() -> None:
    assert "hunter2" not in repr(Given("hunter2", "in f")) + str(Given("hunter2", "in f")) + repr(
        [Given("hunter2", "f")]
    )


def test_nothing_says_to_install_the_other_project_of_that_name() -> None:
    assert registry.install_hint("s3") == "pip install -c constraints.txt '.[s3]'"
    assert registry.install_hint("s3") in scheme_manual()
    assert "kvstore[" not in scheme_manual()


def test_the_manual_has_every_scheme_and_option() -> None:
    text = scheme_manual()
    for scheme, entry in SCHEMES.items():
        assert f"### `{scheme}://`" in text
        assert entry.example in text
        for option in backend_class(scheme).options:
            assert f"| `{option.name}` |" in text
    for option in (*registry.wrapper_options(), *PLACEMENT_OPTIONS):
        assert f"| `{option.name}` |" in text


@pytest.mark.parametrize(
    "url", ["node://::1:7070", "node://a:1,fe80::1:7070", "node://::1", "node://fe80::1%eth0:7070"]
)
def test_an_ipv6_address_without_brackets_is_told_so(url: str) -> None:
    with pytest.raises(ConfigError, match="stands in brackets"):
        parse_url(url)
    assert parse_url("node://[::1]:7070,a:1").authority == "[::1]:7070,a:1"
    with pytest.raises(ConfigError, match="credentials"):
        parse_url("node://user:secret:7070")
