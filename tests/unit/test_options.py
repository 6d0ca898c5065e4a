"""Typed options: units, types, bounds, messages and the manual."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import ConfigError
from kvstore.options import (
    Option,
    format_manual,
    parse_duration,
    parse_options,
    parse_size,
    show_value,
    unknown_option,
)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        (0, 0), (4096, 4096), ("0", 0), ("4096", 4096), (" 4096 ", 4096), ("1B", 1), ("1b", 1), ("1k", 1000),
        ("1KB", 1000), ("1kib", 1024), ("64KiB", 65536), ("64 KiB", 65536), ("16MiB", 16 << 20), ("16MB", 16_000_000),
        ("1.5GiB", 3 << 29), ("1.5 GB", 1_500_000_000), (".5MiB", 1 << 19), ("2.MiB", 2 << 20), ("1TiB", 1 << 40),
        ("3TB", 3 * 10**12), ("1e3", 1000), ("1E3", 1000), ("1e3KiB", 1_024_000), ("9007199254740993", 2**53 + 1),
        ("9007199254740993KiB", (2**53 + 1) << 10), (2**70, 2**70),
    ],
)  # fmt: skip
def test_sizes(text: object, nbytes: int) -> None:
    assert parse_size(text) == nbytes
    assert type(parse_size(text)) is int


@pytest.mark.parametrize(
    "bad",
    [
        None, True, False, -1, "-1", "+1", 1.5, 1.0, math.nan, "", " ", "MiB", "1 2", "1 Mi B", "0x10", "1,5GiB",
        "1_000", "1.5.2MiB", "1e", "nan", "inf", "1e400", "1e308TiB", "9" * 5000, "1.5", "0.5B", "2.5e0",
        b"1", [], {}, "１MiB",
        "1MiB\x00", "1 MiB/s", "\u00b5",
    ],
)  # fmt: skip
def test_not_a_size(bad: object) -> None:
    with pytest.raises(ConfigError, match=r"option 'pool': ") as caught:
        parse_size(bad, name="pool")
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("unit", ["KK", "Mbit", "ms", "KiBs", "PiB", "s"])
def test_unknown_size_unit_names_the_choices(unit: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_size(f"1{unit}", name="pool")
    assert repr(unit) in str(caught.value)
    assert "KiB" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (0, 0.0), (5, 5.0), (0.25, 0.25), ("5", 5.0), ("5s", 5.0), ("5 S", 5.0), ("200ms", 0.2), ("200 MS", 0.2),
        ("1.5us", 1.5e-6), ("2min", 120.0), ("2 min", 120.0), ("1h", 3600.0), ("1d", 86400.0), ("1e-3s", 1e-3),
        ("1e-3", 1e-3), (".5s", 0.5),
    ],
)  # fmt: skip
def test_durations(text: object, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds, rel=1e-15)
    assert type(parse_duration(text)) is float


@pytest.mark.parametrize(
    "bad",
    [None, True, -1, -0.1, "-1s", math.inf, -math.inf, math.nan, 10**400, "", "s", "1 2s", "inf", "nan", "1e400",
     "1e308d", "1:30", "5m", "5sec", "1ns", [], b"1s"],
)  # fmt: skip
def test_not_a_duration(bad: object) -> None:
    with pytest.raises(ConfigError, match=r"option 'timeout': "):
        parse_duration(bad, name="timeout")


def test_an_ambiguous_minute_names_the_units() -> None:
    with pytest.raises(ConfigError, match=r"unknown unit 'm' in '5m'; use us, ms, s, min, h or d"):
        parse_duration("5m")


@given(st.one_of(st.text(), st.integers(), st.floats(), st.booleans(), st.none(), st.binary()))
def test_anything_is_a_value_or_a_config_error(value: object) -> None:
    kinds = ("int", "float", "bool", "str", "size", "duration", "choice")
    for kind in kinds:
        option = Option("x", kind, None, "…", choices=("a", "on"))
        try:
            parsed = option.parse(value)
        except ConfigError as error:
            assert "'x'" in str(error)  # noqa: PT017 - other kinds must not raise
            continue
        assert parsed is None or type(parsed) in (int, float, bool, str)
        if parsed is not None:
            assert option.parse(parsed) == parsed, "a typed value parses to itself"


@given(st.integers(0, 2**80))
def test_a_whole_number_of_bytes_is_exact(nbytes: int) -> None:
    assert parse_size(str(nbytes)) == nbytes
    assert parse_size(f"{nbytes}KiB") == nbytes << 10


@pytest.mark.parametrize(
    ("kind", "value", "parsed"),
    [
        ("int", 7, 7), ("int", "7", 7), ("int", " -7 ", -7), ("int", "+7", 7), ("int", 10**30, 10**30),
        ("float", 1, 1.0), ("float", "1.5", 1.5), ("float", "-1e-3", -1e-3), ("float", " 2 ", 2.0),
        ("bool", True, True), ("bool", "true", True), ("bool", "TRUE", True), ("bool", " yes ", True),
        ("bool", "on", True), ("bool", 1, True), ("bool", "1", True), ("bool", False, False),
        ("bool", "False", False), ("bool", "no", False),
        ("bool", "off", False), ("bool", 0, False), ("bool", "0", False),
        ("str", "text", "text"), ("str", "", ""), ("str", " kept ", " kept "), ("str", "7", "7"),
        ("size", "1KiB", 1024), ("duration", "1ms", 1e-3),
    ],
)  # fmt: skip
def test_kinds(kind: str, value: object, parsed: object) -> None:
    result = Option("x", kind, None, "…").parse(value)
    assert result == parsed
    assert type(result) is type(parsed)


@pytest.mark.parametrize(
    ("kind", "bad"),
    [
        ("int", True), ("int", 1.0), ("int", "1.0"), ("int", "1e3"), ("int", "0x1"), ("int", "1_000"), ("int", ""),
        ("int", "9" * 19), ("int", "٣"), ("int", None.__class__), ("float", True), ("float", "1_000"), ("float", "٣"),
        ("float", "nan"), ("float", "inf"), ("float", math.nan), ("float", math.inf), ("float", 10**400), ("float", ""),
        ("float", [1]), ("bool", 2), ("bool", "2"), ("bool", "y"), ("bool", ""), ("bool", 1.0), ("bool", []),
        ("str", 7), ("str", True), ("str", b"x"), ("str", ["x"]),
    ],
)  # fmt: skip
def test_ill_typed_values(kind: str, bad: object) -> None:
    with pytest.raises(ConfigError, match=r"option 'x': .* is not (an integer|a finite number|true or false|text)"):
        Option("x", kind, None, "…").parse(bad)


def test_a_choice() -> None:
    option = Option("sync", "choice", "off", "…", choices=("off", "on", "data"))
    assert [option.parse(value) for value in ("off", "data", True, False)] == ["off", "data", "on", "off"]
    with pytest.raises(ConfigError, match=r"option 'sync': 'Data' is not one of off, on, data"):
        option.parse("Data")
    for bad in (1, None.__class__, ["off"], ""):
        with pytest.raises(ConfigError, match="is not one of"):
            option.parse(bad)
    with pytest.raises(ConfigError, match="True is not one of a, b"):
        Option("x", "choice", "a", "…", choices=("a", "b")).parse(True)


def test_none_is_the_default() -> None:
    assert Option("x", "int", 5, "…").parse(None) == 5
    assert Option("x", "int", None, "…").parse(None) is None


@pytest.mark.parametrize(
    ("option", "inside", "outside", "says"),
    [
        (Option("x", "int", 1, "…", minimum=8, maximum=2048), [8, 2048, "8"], [7, "7", -1], "at least 8"),
        (Option("x", "int", 1, "…", minimum=8, maximum=2048), [9], [2049], "at most 2048"),
        (Option("x", "size", 1, "…", minimum=1 << 20), ["1MiB", 1 << 20], ["1023KiB", 1], "at least 1 MiB"),
        (Option("x", "size", 1, "…", maximum=1234567), [1234567], [1234568], "at most 1234567 B"),
        (Option("x", "duration", 1, "…", minimum=0.001), ["1ms"], ["0.9ms", 0], "at least 1 ms"),
        (Option("x", "float", 1, "…", minimum=0, maximum=0.5), [0, 0.5], [-0.1], "at least 0"),
        (Option("x", "float", 1, "…", minimum=0, maximum=0.5), [0.25], [0.51], "at most 0.5"),
        (Option("x", "int", 1, "…", maximum=10**15 + 1), [10**15 + 1], [10**15 + 2], "at most 1000000000000001"),
    ],
)
def test_bounds_are_inclusive_and_named_exactly(
    option: Option, inside: list[object], outside: list[object], says: str
) -> None:
    for value in inside:
        option.parse(value)
    for value in outside:
        with pytest.raises(ConfigError, match=f"out of range; it must be {says}"):
            option.parse(value)


def test_a_secret_is_in_no_message() -> None:
    option = Option("password", "str", None, "…", secret=True)
    assert option.parse("hunter2") == "hunter2"
    for bad in (123456789, ["hunter2"], {"hunter2": 1}, b"hunter2", True):
        with pytest.raises(ConfigError) as caught:
            option.parse(bad)
        assert "hunter2" not in str(caught.value)
        assert "123456789" not in str(caught.value)
    assert "hunter2" not in show_value(option, "hunter2")
    assert "hunter2" not in format_manual([Option("password", "str", "hunter2", "…", secret=True)])


def test_a_long_value_does_not_flood_the_message() -> None:
    for kind in ("int", "float", "bool", "size", "duration", "choice"):
        with pytest.raises(ConfigError) as caught:
            Option("x", kind, None, "…").parse("z" * 100_000)
        assert len(str(caught.value)) < 400


@pytest.mark.parametrize("kind", ["integer", "", "bytes"])
def test_a_definition_with_an_unknown_kind_fails_at_once(kind: str) -> None:
    with pytest.raises(TypeError, match="unknown kind"):
        Option("x", kind, None, "…")


def test_a_definition_of_a_secret_that_messages_would_show_fails_at_once() -> None:
    with pytest.raises(TypeError, match="secret"):
        Option("x", "size", None, "…", secret=True)


OPTIONS = (
    Option("lanes", "int", 4, "How many.", minimum=1),
    Option("capacity", "size", None, "How much."),
    Option("fsync", "choice", "off", "When.", choices=("off", "on")),
)


def test_parse_options_fills_in_defaults() -> None:
    assert parse_options(OPTIONS, {"lanes": "8"}, where="file://") == {"lanes": 8, "capacity": None, "fsync": "off"}
    assert parse_options(OPTIONS, {"capacity": "1GiB"}, where="file://")["capacity"] == 1 << 30
    assert parse_options((), {}, where="x") == {}


@pytest.mark.parametrize("name", ["lane", "Lanes", "", "lanes ", 1, None, ("lanes",)])
def test_an_unknown_option_is_named_with_the_choices(name: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_options(OPTIONS, {name: 1}, where="file://")
    message = str(caught.value)
    assert f"unknown option {name!r} for file://" in message
    assert "known options: capacity, fsync, lanes" in message


def test_a_near_miss_is_suggested() -> None:
    assert "did you mean 'lanes'?" in unknown_option("lane", ["capacity", "lanes"], where="file://")
    assert "did you mean" not in unknown_option("zzz", ["capacity", "lanes"], where="file://")
    assert unknown_option("a", [], where="x") == "unknown option 'a' for x; known options: none"


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        (0, "0 B"), (4096, "4 KiB"), (1000, "1000 B"), ("1GiB", "1 GiB"), ("1500MiB", "1500 MiB"),
        ("1.5GiB", "1536 MiB"), ("16G", "16 GB"), ("16000MB", "16 GB"), ("1.5GB", "1500 MB"), ("3TB", "3 TB"),
        ("2TiB", "2 TiB"),
        (99_999, "99999 B"), (100_001, "100001 B (97.66 KiB)"), ("123.4MB", "123400000 B (117.7 MiB)"),
        (2**34 + 1, "17179869185 B (16 GiB)"),
    ],
)  # fmt: skip
def test_sizes_are_shown_in_the_unit_that_fits(written: object, shown: str) -> None:
    option = Option("memory", "size", 1, "…")
    assert show_value(option, option.parse(written)) == shown


@given(nbytes=st.integers(0, 2**60))
def test_a_size_that_is_shown_is_the_size(nbytes: int) -> None:
    shown = show_value(Option("memory", "size", 1, "…"), nbytes)
    assert parse_size(shown.partition(" (")[0]) == nbytes


def test_the_manual_shows_units_choices_and_escapes_pipes() -> None:
    rows = format_manual([
        *OPTIONS,
        Option("pool", "size", 1 << 30, "Memory."),
        Option("odd", "size", 1000, "Memory."),
        Option("wait", "duration", 0.25, "Time."),
        Option("long", "duration", 90.0, "Time."),
        Option("flag", "bool", False, "A | B."),
        Option("label", "str", "", "Text."),
    ]).splitlines()  # fmt: skip
    assert rows[:2] == ["| option | type | default | meaning |", "|---|---|---|---|"]
    assert rows[2:] == [
        "| `lanes` | int | 4 | How many. |",
        "| `capacity` | size | — | How much. |",
        "| `fsync` | off \\| on | off | When. |",
        "| `pool` | size | 1 GiB | Memory. |",
        "| `odd` | size | 1000 B | Memory. |",
        "| `wait` | duration | 250 ms | Time. |",
        "| `long` | duration | 90 s | Time. |",
        "| `flag` | bool | false | A \\| B. |",
        '| `label` | str | "" | Text. |',
    ]
