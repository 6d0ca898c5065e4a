"""Configuration: sources and their order, LMCache's names, messages, and no secret anywhere."""

from __future__ import annotations

import dataclasses
import logging
import traceback
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvstore._lmcache as lmcache
from kvstore.config import OPTIONS, Config, load_config
from kvstore.errors import ConfigError
from kvstore.registry import Given, open_backend, parse_url, split_options

URL = "memory://"


def load(remote_url: object = URL, *, env: dict[str, str] | None = None, **options: Any) -> Config:
    """`load_config` in an environment of its own."""
    return load_config(remote_url, env=env or {}, **options)


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    """Writes a configuration file and returns its path."""

    def write(text: str | bytes) -> Path:
        path = tmp_path / "kv.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


# Definitions.


def test_defaults() -> None:
    config = load()
    assert [str(url) for url in config.remote_url] == [URL]
    assert (config.chunk_size, config.save_unfull_chunk, config.remote_serde) == (256, False, "raw")
    assert (config.namespace, config.replicas, config.on_error) == ("default", 1, "miss")
    assert (config.lookup_timeout, config.blocking_timeout, config.put_timeout) == (3.0, 10.0, 60.0)
    assert config.notes == ()


def test_each_option_is_a_field_of_its_type_with_a_sentence_and_a_valid_default() -> None:
    hints = typing.get_type_hints(Config)
    types = {"int": int, "bool": bool, "str": str, "choice": str, "codec": str, "size": int, "duration": float}
    assert {option.name for option in OPTIONS} == {f.name for f in dataclasses.fields(Config)} - {"sources", "notes"}
    for option in OPTIONS:
        assert option.doc.endswith("."), option.name
        if option.kind in types:
            assert hints[option.name] is types[option.kind], option.name
            assert option.parse(option.default) == option.default
            assert type(option.default) is types[option.kind]
    assert not [option.name for option in OPTIONS if "verif" in option.name or "checksum" in option.name], (
        "integrity cannot be switched off"
    )


def test_codec_options(write: Callable[[str], Path]) -> None:
    config = load(remote_serde="kvt", codec_profile="~/a.kvp, b.kvp", codec_level="1")
    assert config.codec_profile == (str(Path("~/a.kvp").expanduser()), "b.kvp")
    assert (config.codec_level, load(codec_level="All").codec_level, load().codec_level) == (1, None, None)
    assert "b.kvp" in config.describe()
    path = write("remote_serde: cachegen\ncodec_profile: [a.kvp, b.kvp]\ncodec_level: 0\n")
    config = load(config_file=path)
    assert (config.remote_serde, config.codec_profile, config.codec_level) == ("cachegen", ("a.kvp", "b.kvp"), 0)
    path = write(f"remote_url: {URL}\nremote_serde: naive\n")
    assert load_config(config_file=path).remote_serde == "raw"


def test_values_given_directly_are_checked_too() -> None:
    assert Config(remote_url=URL, chunk_size="512").chunk_size == 512  # type: ignore[arg-type]
    assert Config(remote_url=URL, save_unfull_chunk=1).save_unfull_chunk is True  # type: ignore[arg-type]
    config = load(chunk_size=512)
    assert dataclasses.replace(config, replicas=1).chunk_size == 512
    for bad in ({"chunk_size": None}, {"chunk_size": 7}, {"on_error": "ignore"}, {"put_timeout": "5parsec"}):
        with pytest.raises(ConfigError, match=next(iter(bad))):
            dataclasses.replace(config, **bad)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.chunk_size = 8  # type: ignore[misc]


def test_equal_options_make_equal_configs() -> None:
    assert load(chunk_size=512) == load(chunk_size="512") != load()
    assert load(env={"KVSTORE_CHUNK_SIZE": "512"}) == load(chunk_size=512), "wherever they came from"


# Sources and precedence.

SOURCES = ("file", "lmcache", "env", "keyword")


@given(st.sets(st.sampled_from(SOURCES)))
def test_precedence_of_an_option(tmp_path_factory: pytest.TempPathFactory, used: set[str]) -> None:
    folder = tmp_path_factory.getbasetemp()
    values = dict(zip(SOURCES, (16, 32, 64, 128), strict=True))
    path = folder / "precedence.yaml"
    path.write_text("chunk_size: 16\n" if "file" in used else "")
    env = {"KVSTORE_CONFIG_FILE": str(path)}
    env |= {"LMCACHE_CHUNK_SIZE": "32"} if "lmcache" in used else {}
    env |= {"KVSTORE_CHUNK_SIZE": "64"} if "env" in used else {}
    config = load(env=env, **({"chunk_size": 128} if "keyword" in used else {}))
    strongest = max(used, key=SOURCES.index, default=None)
    assert config.chunk_size == (256 if strongest is None else values[strongest])
    expected = {
        None: "default",
        "file": f"in {path}",
        "lmcache": "from environment variable LMCACHE_CHUNK_SIZE",
        "env": "from environment variable KVSTORE_CHUNK_SIZE",
        "keyword": "from keyword chunk_size",
    }[strongest]
    assert config.sources.get("chunk_size", "default") == expected


BACKEND_SOURCES = ("url", "file", "env", "keyword")


@given(st.sets(st.sampled_from(BACKEND_SOURCES)))
def test_precedence_of_a_backends_option(tmp_path_factory: pytest.TempPathFactory, used: set[str]) -> None:
    values = dict(zip(BACKEND_SOURCES, (2, 3, 4, 5), strict=True))
    path = tmp_path_factory.getbasetemp() / "precedence.yaml"
    # The file names the URL itself and so is more specific; a later source wins all the same.
    path.write_text("backend_options: {'memory://': {weight: 3}}\n" if "file" in used else "")
    config = load(
        f"{URL}?weight=2" if "url" in used else URL,
        env={"KVSTORE_MEMORY_WEIGHT": "4"} if "env" in used else {},
        config_file=path,
        **({"backend_options": {"memory": {"weight": 5}}} if "keyword" in used else {}),
    )
    strongest = max(used, key=BACKEND_SOURCES.index, default=None)
    url = config.remote_url[0]
    split = split_options(url, _backend(), config.backend_overrides(url))
    assert split.placement["weight"] == (1.0 if strongest is None else values[strongest])


def _backend() -> Any:
    from kvstore.backend import Backend

    return Backend


def test_remote_url_from_every_source(write: Callable[[str], Path]) -> None:
    path = write("remote_url: [file:///a, 'file:///b?weight=2']\n")
    assert [str(url) for url in load(None, config_file=path).remote_url] == ["file:///a", "file:///b?weight=2"]
    env = {"KVSTORE_REMOTE_URL": "file:///c,file:///d"}
    assert [str(url) for url in load(None, config_file=path, env=env).remote_url] == ["file:///c", "file:///d"]
    assert [str(url) for url in load("memory://", config_file=path, env=env).remote_url] == ["memory://"]
    with pytest.raises(ConfigError, match="no remote_url is given; name a backend, for instance file:///mnt/kv"):
        load(None)


def test_the_environment_of_the_process_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTORE_CHUNK_SIZE", "64")
    assert load_config(URL).chunk_size == 64
    assert load_config(URL, env={}).chunk_size == 256


def test_which_file(write: Callable[[str], Path], tmp_path: Path) -> None:
    ours, theirs = write("chunk_size: 16\n"), tmp_path / "lmcache.yaml"
    theirs.write_text("chunk_size: 32\n")
    both = {"KVSTORE_CONFIG_FILE": str(ours), "LMCACHE_CONFIG_FILE": str(theirs)}
    assert load(env=both).chunk_size == 16
    assert load(env={"LMCACHE_CONFIG_FILE": str(theirs)}).chunk_size == 32
    assert load(env=both, config_file=theirs).chunk_size == 32
    for variable in both:
        with pytest.raises(ConfigError, match=f"environment variable {variable} is empty"):
            load(env={variable: " "})


def test_options_of_several_backends() -> None:
    config = load(
        ["file:///a", "file:///b?weight=2&lanes=7"],
        backend_options={"file": {"lanes": 3}, "file:///b": {"weight": 5}, "FILE:///a": {"name": "first"}},
        env={"KVSTORE_BACKEND_OPTIONS": '{"file": {"lanes": 1, "fsync": "data"}}', "KVSTORE_FILE_O_DIRECT": "true"},
    )
    first, second = (config.backend_overrides(url) for url in config.remote_url)
    plain = [{name: each.value for name, each in one.items() if isinstance(each, Given)} for one in (first, second)]
    assert plain == [
        {"lanes": 3, "fsync": "data", "o_direct": "true", "name": "first"},
        {"lanes": 3, "fsync": "data", "o_direct": "true", "weight": 5},
    ]
    assert [config.backend_name(url) for url in config.remote_url] == ["first", "file:///b"]
    source = second["lanes"]
    assert isinstance(source, Given)
    assert source.source == "from keyword backend_options"


def test_overrides_open_a_backend_and_name_their_source() -> None:
    config = load(backend_options={"memory": {"weight": "much"}})
    with pytest.raises(ConfigError, match=r"option 'weight': 'much' .*\(from keyword backend_options\)"):
        open_backend(config.remote_url[0], **config.backend_overrides(config.remote_url[0]))


def test_one_place_twice_needs_names() -> None:
    with pytest.raises(ConfigError, match=r"remote_url names memory:// twice; give each its own option 'name'"):
        load(["memory://", "memory://"])
    with pytest.raises(ConfigError, match="names a twice"):
        load(["memory://?name=a", "file:///x?name=a"])
    config = load(["memory://?name=a", "memory://?name=b"])
    assert [config.backend_name(url) for url in config.remote_url] == ["a", "b"]


@pytest.mark.parametrize("other", ["file:///a/", "file:////a", "file:///./a?name=b", "fs://x:0/a/"])
def test_a_folder_twice_is_refused_under_any_name(other: str) -> None:
    with pytest.raises(ConfigError, match=r"remote_url names file:///a twice; a folder is one backend, under any name"):
        load(["file:///a", other])


def test_every_spelling_of_a_folder_gets_its_options() -> None:
    config = load("file:///a//b/", backend_options={"file:///a/./b/": {"lanes": 7}})
    assert config.backend_name(config.remote_url[0]) == "file:///a/b"
    given = config.backend_overrides(config.remote_url[0])["lanes"]
    assert isinstance(given, Given)
    assert given.value == 7


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (7, "must map schemes or URLs"),
        ("[1]", "must map schemes or URLs"),
        ("{", "not valid YAML"),
        ({"fiel": {}}, "unknown scheme 'fiel' in backend_options; known schemes: "),
        ({7: {}}, "7 is neither a scheme nor a URL"),
        ({"file": 7}, "must map options to values"),
        ({"file": {7: 7}}, "must map options to values"),
        ({"file:///a?x=1": {}}, "must be a URL without options"),
        ({"file:///a#": {}}, "fragment"),
        (None, "is null"),
        ("", "is empty"),
    ],
)
def test_bad_backend_options(value: object, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(backend_options=value)
    assert says in str(caught.value)
    assert "from keyword backend_options" in str(caught.value)


def test_options_of_a_backend_that_is_not_used_are_noted() -> None:
    config = load(backend_options={"file": {"lanes": 3}}, env={"KVSTORE_FILE_FSYNC": "data"})
    assert len(config.notes) == 2
    assert "option 'lanes' of file is not used (from keyword backend_options)" in config.notes[1]


# Bad values.


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"chunk_size": 7}, "option 'chunk_size': 7 is out of range; it must be at least 8 (from keyword chunk_size)"),
        ({"chunk_size": 2049}, "at most 2048"),
        ({"chunk_size": True}, "True is not an integer"),
        ({"chunk_size": 256.0}, "256.0 is not an integer"),
        ({"chunk_size": None}, "option 'chunk_size' is null (from keyword chunk_size)"),
        ({"namespace": ""}, "option 'namespace' is empty"),
        ({"namespace": 7}, "option 'namespace': 7 is not text"),
        ({"on_error": "ignore"}, "'ignore' is not one of miss, raise"),
        ({"replicas": 0}, "at least 1"),
        ({"lookup_timeout": 0}, "at least 1 ms"),
        ({"lookup_timeout": "3 sec"}, "unknown unit 'sec'"),
        ({"buffer_pool_bytes": "lots"}, "not a size"),
        ({"buffer_pool_bytes": "1KiB"}, "at least 1 MiB"),
        ({"remote_serde": "zip"}, "option 'remote_serde': unknown codec 'zip'; known codecs: raw"),
        ({"remote_serde": "cachegen"}, "option codec_profile; make one with kvstore-codec profile --codec cachegen"),
        ({"remote_serde": "kvt", "codec_profile": "a,,b"}, "option 'codec_profile': an empty path"),
        ({"remote_serde": "kvt", "codec_profile": 7}, "option 'codec_profile': int is not the path"),
        ({"remote_serde": "int8", "codec_profile": "a.kvp"}, "codec 'int8' needs none, only cachegen and kvt do"),
        ({"codec_level": -1}, "option 'codec_level': -1 is out of range; it must be 0 to 255, or all"),
        ({"codec_level": "some"}, "option 'codec_level': 'some' is not an integer"),
        ({"remote_serde": "kivi"}, "unknown codec 'kivi'"),
        ({"remote_serde": 7}, "is not the name of a codec"),
        ({"save_unfull_chunk": "maybe"}, "'maybe' is not true or false"),
        ({"chunk_sise": 256}, "unknown option 'chunk_sise' for the store; did you mean 'chunk_size'? known options: "),
        ({"verify": False}, "unknown option 'verify'"),
        ({"remote_url": 7}, "must be a URL"),
        ({"remote_url": []}, "empty list"),
        ({"remote_url": "/mnt/kv"}, "a path is not a URL"),
    ],
)
def test_bad_values_name_option_and_source(options: dict[str, Any], says: str) -> None:
    options = {"remote_url": URL, **options}
    with pytest.raises(ConfigError) as caught:
        load(options.pop("remote_url"), **options)
    assert says in str(caught.value)
    assert "(from keyword " in str(caught.value)


def test_the_source_is_named_for_file_and_environment(write: Callable[[str], Path]) -> None:
    path = write("chunk_size: many\n")
    with pytest.raises(ConfigError, match=rf"option 'chunk_size': 'many' is not an integer \(in {path}\)"):
        load(config_file=path)
    for prefix in ("KVSTORE", "LMCACHE"):
        with pytest.raises(ConfigError, match=rf"\(from environment variable {prefix}_CHUNK_SIZE\)"):
            load(env={f"{prefix}_CHUNK_SIZE": "many"})
        with pytest.raises(ConfigError, match=rf"is empty \(from environment variable {prefix}_CHUNK_SIZE\)"):
            load(env={f"{prefix}_CHUNK_SIZE": ""})


def test_a_weaker_source_is_checked_even_if_overridden() -> None:
    with pytest.raises(ConfigError, match="LMCACHE_CHUNK_SIZE"):
        load(env={"LMCACHE_CHUNK_SIZE": "many"}, chunk_size=16)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("chunk_size: 16\nchunk_size: 32\n", "not valid YAML, line 2: 'chunk_size' is given twice"),
        ("backend_options:\n  file: {lanes: 1, lanes: 2}\n", "line 2: 'lanes' is given twice"),
        ("- chunk_size\n", "must hold a map"),
        ("7", "must hold a map"),
        ("7: 8\n", "must hold a map from option names"),
        ("chunk_size: [\n", "not valid YAML, line "),
        ("chunk_size:\t16\n\tx", "not valid YAML"),
        ("chunk_size:\n", "option 'chunk_size' is null"),
        ("chunk_size: !!python/object/apply:os.system ['true']\n", "not valid YAML, line 1"),
        (b"chunk_size: \xff\n", "is not UTF-8 text"),
        ("chunk_size: \x07\n", "not valid YAML"),
        ("x: 2024-13-45\n", "not valid YAML"),
        ("[" * 20_000, "not valid YAML"),
        ("#" * ((1 << 20) + 1), "is larger than 1048576 bytes"),
        ("chunk_size: 16\nchunk_sise: 32\n", "unknown option 'chunk_sise'"),
        (
            "blocking_timeout: 1s\nblocking_timeout_secs: 1\n",
            "'blocking_timeout' and 'blocking_timeout_secs' mean the same",
        ),
    ],
)
def test_bad_files(text: str | bytes, says: str, write: Callable[[str | bytes], Path]) -> None:
    path = write(text)
    with pytest.raises(ConfigError) as caught:
        load(config_file=path)
    assert says in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    for path in (tmp_path / "none.yaml", tmp_path):
        with pytest.raises(ConfigError, match=f"the configuration file {path} cannot be read: "):
            load(config_file=path)


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n"])
def test_an_empty_file_has_no_options(text: str, write: Callable[[str], Path]) -> None:
    assert load(config_file=write(text)) == load()


def test_yaml_anchors_and_merges_work(write: Callable[[str], Path]) -> None:
    path = write("backend_options:\n  file: &f {lanes: 1, fsync: data}\n  memory: {<<: *f, lanes: 2}\n")
    config = load(config_file=path)
    values = {name: each.value for name, each in config.backend_overrides(config.remote_url[0]).items()}  # type: ignore[attr-defined]
    assert values == {"lanes": 2, "fsync": "data"}


# The environment.


@pytest.mark.parametrize("name", ["KVSTORE_CHUNKSIZE", "KVSTORE_FOO", "KVSTORE_", "KVSTORE_FILE_", "KVSTORE_FOO_PORT"])
def test_an_unknown_variable_of_ours_is_an_error(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"unknown option .*\(from environment variable {name}\)"):
        load(env={name: "1"})


def test_variables_of_others_do_no_harm() -> None:
    env = {
        "KVSTORE_SERVICE_HOST": "10.0.0.1",  # kubernetes, for a service called "kvstore"
        "KVSTORE_SERVICE_PORT": "80",
        "KVSTORE_SERVICE_PORT_HTTP": "80",
        "KVSTORE_PORT": "tcp://10.0.0.1:80",
        "KVSTORE_PORT_80_TCP": "tcp://10.0.0.1:80",
        "KVSTORE_PORT_80_TCP_ADDR": "10.0.0.1",
        "KVSTORE_PORT_80_TCP_PORT": "80",
        "KVSTORE_PORT_80_TCP_PROTO": "tcp",
        "KVSTORE_FILE_PORT": "tcp://10.0.0.1:80",  # … or "kvstore-file"
        "KVSTORE_FILE_SERVICE_HOST": "10.0.0.1",
        "KVSTORE_POOL_CANARY": "1",
        "KVSTORE_TEST_THING": "x",
        "LMCACHE_TRACK_USAGE": "false",
        "LMCACHE_LOG_LEVEL": "DEBUG",
        "LMCACHE_COORDINATOR_URL": "http://x",
        "kvstore_chunk_size": "1",
        "MY_KVSTORE_CHUNK_SIZE": "1",
        "KVSTOREX": "1",
    }
    assert load(env=env) == load()
    assert load(env=env).notes == ()


def test_an_unknown_variable_of_lmcache_is_noted_without_its_value() -> None:
    config = load(env={"LMCACHE_FROM_THE_FUTURE": "hunter2"})
    assert config.notes == (
        "'from_the_future' is not known (from environment variable LMCACHE_FROM_THE_FUTURE); it is not used",
    )


# No secret anywhere.


def test_no_secret_is_shown(write: Callable[[str], Path], caplog: pytest.LogCaptureFixture) -> None:
    path = write("backend_options: {memory: {password: hunter2, obscure: hunter2}}\n")
    with caplog.at_level(logging.DEBUG):
        config = load(["memory://", "file:///x"], config_file=path, env={"KVSTORE_FILE_TOKEN": "hunter2"})
    assert "password" in repr(config)
    assert "hunter2" not in repr(config) + str(config) + caplog.text + "".join(config.notes)
    assert "hunter2" not in repr(config.backend_options) + repr(config.backend_overrides(parse_url(URL)))
    for url in config.remote_url:
        with pytest.raises(ConfigError, match="unknown option") as caught:
            open_backend(url, **config.backend_overrides(url))
        assert "hunter2" not in _shown(caught.value)


def test_no_secret_is_shown_if_the_file_is_broken(write: Callable[[str], Path]) -> None:
    texts = [
        "backend_options: {memory: {password: hunter2, password: hunter2}}",
        "backend_options: {memory: {password: 'hunter2}}",
        "backend_options: {memory: {password: *hunter2}}",
        "backend_options: {memory: {password: !hunter2 x}}",
        "backend_options: {memory: {password: \"hunter2\\q\"}}",
        "backend_options: {memory: [hunter2]}",
        "backend_options: {memory: hunter2}",
        "backend_options: [hunter2]",
        "backend_options: hunter2",
        "backend_options: {memory: {password: [hunter2}}",
        "password: hunter2",
        "remote_url: 'redis://user:hunter2@host'",
        "remote_url: ['memory://', 'memory://?password=hunter2']",
        "backend_options: {'valkey://user:hunter2@host': {}}",
        "remote_url: {'redis://user:hunter2@host': 1}",
        "extra_config: '{hunter2'\nchunk_size: 1",
        "- hunter2",
    ]  # fmt: skip
    for text in texts:
        with pytest.raises(ConfigError) as caught:
            load(None, config_file=write(text))
        assert "hunter2" not in _shown(caught.value), text


def _shown(error: BaseException) -> str:
    return str(error) + "".join(traceback.format_exception(error))


def test_describe(write: Callable[[str], Path]) -> None:
    path = write("chunk_size: 512\nbuffer_pool_bytes: 2GiB\nbackend_options: {memory: {weight: 2}}\nenable_p2p: true\n")
    config = load("memory://?name=a", config_file=path, env={"KVSTORE_LOOKUP_TIMEOUT": "20ms"}, on_error="raise")
    lines = [line.split() for line in config.describe().splitlines()]
    assert lines[0] == ["option", "value", "from"]
    assert ["chunk_size", "512", "in", str(path)] in lines
    assert ["buffer_pool_bytes", "2", "GiB", "in", str(path)] in lines
    assert ["lookup_timeout", "20", "ms", "from", "environment", "variable", "KVSTORE_LOOKUP_TIMEOUT"] in lines
    assert ["on_error", "raise", "from", "keyword", "on_error"] in lines
    assert ["put_timeout", "60", "s", "default"] in lines
    assert ["memory://", "weight", "2.0", "in", str(path)] in lines
    assert ["memory://", "name", "a", "in", "the", "URL"] in lines
    assert lines[-1][0] == "note:"


def test_describe_tells_what_is_wrong_instead_of_raising() -> None:
    text = load("memory://?wieght=2", backend_options={"memory": {"password": "hunter2"}}).describe()
    assert "error: memory://: unknown option 'wieght' for memory://; did you mean 'weight'?" in text
    assert "hunter2" not in text
    assert "error: ftp://x: unknown scheme ftp://" in load("ftp://x").describe()


def test_describe_masks_what_a_backend_defines_as_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvstore.options import Option
    from kvstore_backends.memory import MemoryBackend

    options = (*MemoryBackend.options, Option("pin", "str", None, "…", secret=True))
    monkeypatch.setattr(MemoryBackend, "options", options)
    config = load(backend_options={"memory": {"pin": "hunter2"}})
    assert ["memory://", "pin", "…", "from", "keyword", "backend_options"] in [
        line.split() for line in config.describe().splitlines()
    ]
    assert "hunter2" not in config.describe()
    in_url = load("memory://?pin=hunter2")
    assert "option 'pin' must not stand in a URL" in in_url.describe()
    assert "hunter2" not in in_url.describe() + repr(in_url) + repr(in_url.remote_url)


# The manual.


def test_the_manual_is_up_to_date() -> None:
    from kvstore.manual import manual

    path = Path(__file__).parents[2] / "docs" / "options.md"
    assert path.read_text(encoding="utf-8") == manual(), "run: python -m kvstore.manual > docs/options.md"


def test_the_manual_has_everything() -> None:
    from kvstore.manual import manual

    text = manual()
    for option in OPTIONS:
        assert f"| `{option.name}` |" in text
        assert option.doc in text
    for name in (*lmcache.ALIASES, *lmcache.UNUSED):
        assert f"`{name}`" in text
    for scheme in lmcache.SCHEMES:
        assert f"`{scheme}://" in text
    assert "| `remote_serde` | raw \\| lz4 \\| shuffle-zstd \\| int8 \\| fp8 \\| cachegen \\| kvt | raw |" in text
