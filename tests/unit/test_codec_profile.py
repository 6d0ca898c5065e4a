"""Profiles: what goes into a file comes out of it, and what is no profile is refused by name and cause."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import random
import struct
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as nps

from kvstore.codec import profile as profiles
from kvstore.codec.profile import Profile, find, register, registered
from kvstore.errors import ConfigError
from kvstore.layout import KVLayout

HEAD = struct.Struct("<8sIIQ32s")


def made(**more: Any) -> Profile:
    fields: dict[str, Any] = {
        "codec": "cachegen", "model": "org/model", "layout": KVLayout(4, 2, 8, 6), "revision": "1", "rotary": None,
        "parameters": {"b": [1, 2.5, None, True], "a": {"z": "text"}},
        "arrays": {"x": np.arange(12, dtype=np.uint16).reshape(3, 4), "empty": np.zeros((0, 3), np.float32)},
    }  # fmt: skip
    return Profile(**{**fields, **more})


plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 63) - 1) | st.text(max_size=8)
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip
arrays = st.dictionaries(
    st.text(min_size=1, max_size=8),
    nps.arrays(
        st.sampled_from(["u1", "i1", "<u2", ">u2", "<i4", "<u8", "<f4", ">f8"]),
        nps.array_shapes(min_dims=0, max_dims=3, max_side=4),
        elements={"allow_nan": False, "allow_infinity": False},
    ),
    max_size=4,
)


@settings(max_examples=60)
@given(parameters=st.dictionaries(st.text(max_size=6), plain, max_size=5), some=arrays)
def test_a_profile_comes_back_as_it_was(parameters: dict[str, Any], some: dict[str, np.ndarray]) -> None:
    one = made(parameters=parameters, arrays=some)
    other = Profile.from_bytes(one.to_bytes())
    assert other == one
    assert other.id == one.id == hashlib.sha256(one.to_bytes()[HEAD.size :]).hexdigest()[:16]
    assert other.parameters == parameters
    assert other.arrays.keys() == some.keys()
    for name, array in some.items():
        assert np.array_equal(other.arrays[name], array)
        assert other.arrays[name].shape == array.shape
        assert other.arrays[name].dtype == array.dtype.newbyteorder("<")
        assert not other.arrays[name].flags.writeable
    for field in ("codec", "model", "revision", "layout", "dtypes", "rotary"):
        assert getattr(other, field) == getattr(one, field)


def test_the_id_is_the_same_in_every_process_and_release() -> None:
    assert made().id == "2afd79dff696b7cc"
    assert made().id_bytes.hex() == made().id


def test_the_order_of_what_is_given_does_not_matter() -> None:
    swapped = made(
        parameters={"a": {"z": "text"}, "b": (1, 2.5, None, True)},
        arrays=dict(reversed(made().arrays.items())),
    )
    assert swapped == made()
    assert hash(swapped) == hash(made())


@pytest.mark.parametrize(
    "change",
    [
        {"codec": "kvt"}, {"model": "other"}, {"revision": None}, {"layout": KVLayout(4, 2, 8)}, {"rotary": "x"},
        {"dtypes": ("bfloat16",)}, {"parameters": {}}, {"arrays": {}},
        {"arrays": {"x": np.arange(12, dtype=np.uint16).reshape(4, 3), "empty": np.zeros((0, 3), np.float32)}},
        {"arrays": {"x": np.arange(12, dtype=np.int16).reshape(3, 4), "empty": np.zeros((0, 3), np.float32)}},
    ],
)  # fmt: skip
def test_everything_is_in_the_id(change: dict[str, Any]) -> None:
    assert made(**change).id != made().id
    assert made(**change) != made()


def test_arrays_are_copies() -> None:
    mine = np.arange(4, dtype=np.uint8)
    profile = made(arrays={"x": mine})
    mine[0] = 9
    assert profile.arrays["x"][0] == 0


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "a.kvprofile"
    made().save(path)
    made(model="other").save(path)  # replaces it
    assert Profile.load(path) == made(model="other")
    assert os.listdir(tmp_path) == ["a.kvprofile"]
    assert path.stat().st_mode & 0o777 == 0o644
    with pytest.raises(FileNotFoundError):
        made().save(tmp_path / "no" / "folder")


def test_a_save_that_fails_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"):
        made().save(tmp_path / "folder")
    assert os.listdir(tmp_path) == ["folder"]


def refused(tmp_path: Path, data: bytes) -> str:
    path = tmp_path / "bad.kvprofile"
    path.write_bytes(data)
    with pytest.raises(ConfigError) as caught:
        Profile.load(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"codec profile .*missing: No such file"):
        Profile.load(tmp_path / "missing")
    with pytest.raises(ConfigError, match="directory"):
        Profile.load(tmp_path)
    with pytest.raises(ConfigError, match=r"codec profile .*null byte"):
        Profile.load(f"{tmp_path}/a\0b")
    os.mkfifo(tmp_path / "pipe")  # nobody writes to it, and nobody may wait for that
    with pytest.raises(ConfigError, match="pipe is not a codec profile"):
        Profile.load(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(ConfigError, match="loop"):
        Profile.load(tmp_path / "loop")


def test_every_cut_is_refused(tmp_path: Path) -> None:
    data = made().to_bytes()
    for length in range(0, len(data), 7):
        assert "bytes" in refused(tmp_path, data[:length])
    assert "bytes instead of" in refused(tmp_path, data + b"\0")


def test_every_flipped_byte_is_refused(tmp_path: Path) -> None:
    data = made().to_bytes()
    for place in range(0, len(data), 3):
        bad = bytearray(data)
        bad[place] ^= 1 << place % 8
        refused(tmp_path, bytes(bad))


def test_what_is_wrong_is_said(tmp_path: Path) -> None:
    data = made().to_bytes()
    assert "begins with other bytes" in refused(tmp_path, b"X" + data[1:])
    assert "format 2; this release reads format 1" in refused(tmp_path, data[:8] + struct.pack("<I", 2) + data[12:])
    assert "more than a profile may have" in refused(tmp_path, HEAD.pack(b"KVPROFIL", 1, 1, 1 << 62, bytes(32)))
    assert "more than a profile may have" in refused(tmp_path, HEAD.pack(b"KVPROFIL", 1, 1 << 31, 1, bytes(32)))
    assert "bytes instead of" in refused(tmp_path, HEAD.pack(b"KVPROFIL", 1, 1, 1 << 29, bytes(32)))
    assert "another SHA-256" in refused(tmp_path, data[:-1] + b"\1")


def signed(head: object, body: bytes = b"") -> bytes:
    """A file whose lengths and hash are right, whatever is in it."""
    packed = head if isinstance(head, bytes) else msgpack.packb(head)
    return HEAD.pack(b"KVPROFIL", 1, len(packed), len(body), hashlib.sha256(packed + body).digest()) + packed + body


def good_head() -> dict[str, Any]:
    return {
        "arrays": [["x", "|u1", [3]]], "codec": "c", "dtypes": ["bfloat16"], "layout": [2, 1, 4, 4, "kv"], "model": "m",
        "parameters": {}, "revision": None, "rotary": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("change", "body", "message"),
    [
        ({"arrays": [["x", "|u1", [65]]]}, bytes(64), "longer than the file"),
        ({"arrays": [["x", "|u1", [1 << 40]]]}, bytes(64), "impossible shape"),
        ({"arrays": [["x", "<f8", [1 << 30, 1 << 30, 1 << 30]]]}, bytes(64), "longer than the file"),
        ({"arrays": [["x", "|u1", [-1]]]}, bytes(64), "impossible shape"),
        ({"arrays": [["x", "|u1", [0, 1 << 30, 1 << 30, 1 << 30]]]}, b"", "impossible shape"),
        ({"arrays": [["x", "|u1", [1.0]]]}, bytes(64), "impossible shape"),
        ({"arrays": [["x", "|u1", [1] * 9]]}, bytes(64), "impossible shape"),
        ({"arrays": [["x", "|O", [1]]]}, bytes(64), "is none"),
        ({"arrays": [["x", "|V16", [1]]]}, bytes(64), "is none"),
        ({"arrays": [["x", ["|u1"], [1]]]}, bytes(64), "is none"),
        ({"arrays": [["x", "|u1", [1]], ["x", "|u1", [1]]]}, bytes(128), "there twice"),
        ({"arrays": [["x", "|u1", [3]]]}, bytes(128), "do not add up"),
        ({"arrays": [["x", "|u1", [3]]]}, b"\0\0\0\7" + bytes(60), "written in another way"),
        ({"arrays": [["x", "<f4", [1]]]}, struct.pack("<f", float("nan")) + bytes(60), "inf or nan"),
        ({"arrays": "x"}, bytes(64), "list of arrays"),
        ({"arrays": [["x"]]}, bytes(64), "list of arrays"),
        ({"codec": 5}, bytes(64), "codec is text"),
        ({"model": None}, bytes(64), "model is text"),
        ({"model": ""}, bytes(64), "model is text"),
        ({"layout": [2, 1, 4]}, bytes(64), "layout"),
        ({"layout": [0, 1, 4, 4, "kv"]}, bytes(64), "num_layers=0"),
        ({"layout": [2, 1, 4, 4, ["kv"]]}, bytes(64), "kind"),
        ({"dtypes": "bfloat16"}, bytes(64), "dtypes"),
        ({"dtypes": []}, bytes(64), "at least one dtype"),
        ({"dtypes": ["float128"]}, bytes(64), "float128"),
        ({"parameters": []}, bytes(64), "parameters"),
        ({"more": 1}, bytes(64), "fields of a profile"),
    ],
)
def test_a_hostile_file_with_a_right_hash_is_refused(
    tmp_path: Path, change: dict[str, Any], body: bytes, message: str
) -> None:
    assert Profile.from_bytes(signed(good_head(), bytes(64))).model == "m"
    assert message in refused(tmp_path, signed({**good_head(), **change}, body))


@pytest.mark.parametrize(
    "head",
    [
        b"", b"\xc1", msgpack.packb([]), msgpack.packb({1: 2}), msgpack.packb(msgpack.ExtType(5, b"x")),
        b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\x91" * 5000, b"\x81\xa1\xff\xc0",
        msgpack.packb({"parameters": {}}),
        msgpack.packb(dict(reversed(good_head().items()))),
        msgpack.packb({(name.encode() if name == "model" else name): value for name, value in good_head().items()}),
        msgpack.packb({**good_head(), "parameters": {"when": msgpack.Timestamp(1)}}),
    ],
)  # fmt: skip
def test_a_hostile_head_is_refused(tmp_path: Path, head: bytes) -> None:
    refused(tmp_path, signed(head, bytes(64)))


def fuzz(cases: int, seed: int) -> int:
    """Damage with the hash made right again. Returns how many were refused."""
    rng = random.Random(seed)
    good = made().to_bytes()
    magic, version, head_length, *_ = HEAD.unpack_from(good)
    del magic, version
    count = 0
    for _ in range(cases):
        rest = bytearray(good[HEAD.size :])
        for _ in range(rng.randint(1, 4)):
            kind = rng.randrange(4)
            place = rng.randrange(len(rest))
            if kind == 0:
                rest[place] = rng.randrange(256)
            elif kind == 1:
                rest[place : place + rng.randrange(1, 9)] = rng.randbytes(rng.randrange(9))
            elif kind == 2:
                rest[place : place + 4] = struct.pack("<I", rng.choice([0, 1, 0x7FFFFFFF, 0xFFFFFFFF]))
            else:
                del rest[place:]
                rest += rng.randbytes(rng.randrange(200))
            if not rest:
                rest = bytearray(b"\xc0")
        head = min(len(rest), max(0, head_length + rng.randint(-2, 2)))
        data = HEAD.pack(b"KVPROFIL", 1, head, len(rest) - head, hashlib.sha256(rest).digest()) + bytes(rest)
        try:
            found = Profile.from_bytes(data)
        except ConfigError:
            count += 1
        else:
            assert found.to_bytes() == data, "what is accepted is what a profile is written as"
    return count


def test_fuzzed_profiles_are_refused_or_are_profiles() -> None:
    assert fuzz(300, 1) > 200


@pytest.mark.slow
def test_ten_thousand_fuzzed_profiles() -> None:
    assert fuzz(10_000, 2) > 7_000


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"parameters": {"x": float("nan")}}, "parameters.x is nan"),
        ({"parameters": {"x": [1 << 63]}}, r"parameters.x\[0\] has more than 64 bits"),
        ({"parameters": {"x": b"1"}}, "parameters.x cannot be a bytes"),
        ({"parameters": {1: 1}}, "name that is no text"),
        ({"parameters": {"x": "\ud800"}}, "UTF-8"),
        ({"parameters": {"x": "y" * (1 << 20)}}, "too large"),
        ({"arrays": {"x": np.array(["a"])}}, "array 'x'"),
        ({"arrays": {"x": np.array([None])}}, "array 'x'"),
        ({"arrays": {"": np.zeros(1)}}, "has a name"),
        ({"arrays": {"x": np.array([np.inf])}}, "inf or nan"),
        ({"arrays": {str(n): np.zeros(1) for n in range(1025)}}, "at most 1024 arrays"),
        ({"layout": "x"}, "layout is a KVLayout"),
        ({"codec": ""}, "codec is text"),
        ({"revision": ""}, "revision is text"),
    ],
)
def test_what_cannot_be_a_profile(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        made(**change)


def test_parameters_that_are_nested_without_end() -> None:
    nested: list[Any] = []
    nested.append(nested)
    with pytest.raises(ConfigError, match="nested too deeply"):
        made(parameters={"x": nested})


def test_another_model_or_layout_is_refused_by_name() -> None:
    profile = made()
    assert all(profile.is_of(name) for name in ("org/model", "model", "/models/model/", "other/model"))
    assert not any(profile.is_of(name) for name in ("org/other", "org", "mode", "org/model-2", ""))
    profile.check_layout(KVLayout(4, 2, 8, 6), "float16")
    with pytest.raises(ConfigError, match=r"4 layers x 2 heads x 8/6, not kv 5 layers x 2 heads x 8/6"):
        profile.check_layout(KVLayout(5, 2, 8, 6), "float16")
    with pytest.raises(ConfigError, match="not int8"):
        profile.check_layout(profile.layout, "int8")


def test_an_array_is_asked_for_by_dtype_and_shape() -> None:
    profile = made()
    assert profile.array("x", np.uint16, (3, None)) is profile.arrays["x"]
    for name, dtype, shape in (("y", np.uint16, (3, 4)), ("x", np.int16, (3, 4)), ("x", np.uint16, (3, 4, 1)),
                               ("x", np.uint16, (4, None))):  # fmt: skip
        with pytest.raises(ConfigError, match=f"{name!r}.*{profile.id}|{profile.id}.*{name!r}"):
            profile.array(name, dtype, shape)


def test_the_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiles, "_registered", {})
    one, other = made(), made(model="other")
    assert find(one.id) is None
    register(one)
    register(made())  # an equal one
    register(other)
    assert find(one.id) is one
    assert registered() == [one, other]
    twin = dataclasses.replace(one, model="third")
    object.__setattr__(twin, "id", one.id)
    with pytest.raises(ConfigError, match=f"two profiles have the id {one.id}"):
        register(twin)
