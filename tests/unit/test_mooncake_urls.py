"""`mooncake://` and its relatives as URLs: what is opened, translated, or refused by name."""

from __future__ import annotations

import os
from typing import Any

import pytest

from kvstore.errors import ConfigError
from kvstore.registry import ELSEWHERE, backend_class, open_backend, parse_url, parse_urls
from kvstore_backends import _mooncake_client
from kvstore_backends.mooncake import MooncakeBackend
from tests.unit.mooncake_double import double_place


@pytest.mark.parametrize(
    ("text", "master", "prefix"),
    [
        ("mooncake://10.0.0.5:50051", ("10.0.0.5", 50051), ""),
        ("mooncake://master", ("master", 50051), ""),
        ("mooncake://[::1]:7", ("::1", 7), ""),
        ("mooncake://[::1]", ("::1", 50051), ""),
        ("mooncake://m:1/team/a/", ("m", 1), "team/a/"),
    ],
)
def test_a_url_names_the_master_and_a_prefix(
    monkeypatch: pytest.MonkeyPatch, text: str, master: tuple[str, int], prefix: str
) -> None:
    with double_place(monkeypatch):
        backend = open_backend(text, copies=2, staging="2MiB")
        assert isinstance(backend, MooncakeBackend)
        assert (backend.settings.master, backend.settings.prefix) == (master, prefix)
        assert backend.settings.copies == 2
        assert backend.name.startswith("mooncake://")
        backend.close()


@pytest.mark.parametrize(
    "text",
    [
        "mooncake://",
        "mooncake:///x",
        "mooncake://a:1,b:2",
        "mooncake://m:0/x",
        "mooncake://m:65536",
        "mooncake://a b:1",
    ],
)
def test_a_url_without_one_master_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    with double_place(monkeypatch), pytest.raises(ConfigError, match="names the one master"):
        open_backend(text)


def test_identity_is_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    with double_place(monkeypatch):
        opened = [open_backend(u) for u in ("mooncake://m:1/a", "mooncake://m:1/a?lanes=2", "mooncake://m:1/b")]
        assert opened[0].identity == opened[1].identity != opened[2].identity
        for backend in opened:
            backend.close()


def test_without_the_wheel_the_message_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError("No module named 'mooncake'", name="mooncake")

    assert backend_class("mooncake") is MooncakeBackend  # the manual is printed without it
    monkeypatch.setattr("importlib.import_module", missing)
    with pytest.raises(ConfigError, match=r"needs mooncake, which is not installed: .*\[mooncake\]"):
        _mooncake_client.load()


def test_without_a_system_library_the_message_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> Any:
        raise ImportError("libibverbs.so.1: cannot open shared object file")

    monkeypatch.setattr("importlib.import_module", broken)
    with pytest.raises(ConfigError, match=r"libibverbs\.so\.1.*apt-get install libibverbs1"):
        _mooncake_client.load()


def test_the_environment_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.import_module", lambda name: None)
    monkeypatch.setenv("MC_RPC_TIMEOUT_MS", "7000")
    monkeypatch.delenv("MC_TCP_BIND_ADDRESS", raising=False)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    _mooncake_client.load("10.0.0.9")
    assert os.environ["MC_RPC_TIMEOUT_MS"] == "7000"
    assert os.environ["MC_STORE_CLIENT_SETUP_RETRIES"] == "1"
    assert os.environ["MC_TCP_BIND_ADDRESS"] == "10.0.0.9"


def test_lmcaches_url_is_translated() -> None:
    (url,) = parse_urls("mooncakestore://10.0.0.5:50051/?device=mlx5_0")
    assert url == parse_url("mooncake://10.0.0.5:50051?device=mlx5_0")


@pytest.mark.parametrize(
    ("scheme", "instead"),
    [("nixl", "node://"), ("infinistore", "node://"), ("weka", "file:///mnt/weka"), ("gds", "file://")],
)
def test_what_people_look_for_is_refused_by_name(scheme: str, instead: str) -> None:
    with pytest.raises(ConfigError, match=f"^{scheme}:// is ") as caught:
        open_backend(f"{scheme}://host:1/x")
    assert instead in caught.value.message
    assert ELSEWHERE[scheme] in caught.value.message
