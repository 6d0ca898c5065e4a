"""What UCX needs to be used at all, what it is set to, and what is told about it."""

from __future__ import annotations

import os

import pytest

from kvstore_transport import ucx
from kvstore_transport._ucx_engine import HOST, NET, UcxEngine
from kvstore_transport.errors import TransportUnavailable
from kvstore_transport.ucx import UcxWay
from tests.unit.ucx_support import contexts, no_lane_left_behind

__all__ = ["contexts", "no_lane_left_behind"]  # fixtures


def test_other_versions_do_not_agree() -> None:
    mine = UcxWay().facts(server=True)
    assert UcxWay().agree(mine, mine) == ""
    why = UcxWay().agree(mine, {**mine, "version": "1.20.1"})
    assert str(mine["version"]) in why
    assert "1.20.1" in why
    assert UcxWay().agree(mine, {})
    assert UcxWay().agree(mine, {"version": ["x"] * 1000})


def test_rdma_is_insisted_upon(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = UcxEngine.get()
    if engine.rdma_devices():
        pytest.skip("there is RDMA here")
    with pytest.raises(TransportUnavailable, match="RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY=true"):
        ucx.require_rdma()
    assert UcxWay().facts(server=False)["rdma"] is False, "nothing was required by the call that failed"
    monkeypatch.setattr(engine, "rdma_devices", lambda: ["rc_mlx5/mlx5_0:1"])
    try:
        assert ucx.require_rdma() == ["rc_mlx5/mlx5_0:1"]
        facts = UcxWay().facts(server=False)
        assert facts["rdma"] is True
        assert UcxWay().agree(facts, facts) == ""
        assert "RDMA" in UcxWay().agree(facts, {**facts, "rdma": False})
        monkeypatch.setattr(engine, "rdma_devices", list)
        with pytest.raises(TransportUnavailable, match="no rc, dc or ud"):
            UcxWay().facts(server=False)
    finally:
        ucx.require_rdma(False)


def test_rdma_devices_are_told_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = UcxEngine.get()
    found = ["self/memory", "tcp/eth0", "rc_mlx5/mlx5_0:1", "ud_verbs/mlx5_0:1", "dc_mlx5/mlx5_0:1", "rdmacm/x"]
    monkeypatch.setattr(engine, "devices", lambda kind=NET: found)
    assert engine.rdma_devices() == found[2:5]


def test_the_description_names_what_is_in_use() -> None:
    said = ucx.describe()
    assert said["binding"] == UcxEngine.get().library.name
    assert said["ucx_version"] == UcxEngine.get().version
    assert os.path.exists(str(said["libucp"]))
    assert any(device.startswith("tcp/") for device in said["transports"])  # type: ignore[attr-defined]
    assert any(device.startswith("sysv/") for device in said["host_transports"])  # type: ignore[attr-defined]
    assert not any("sysv" in device for device in said["transports"])  # type: ignore[attr-defined]
    assert said["rdma"] or "RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY" in str(said["rdma_hint"])
    assert isinstance(said["environment"], dict)


def test_our_settings_are_in_effect() -> None:
    engine = UcxEngine.get()
    for kind, names in ((HOST, ["TLS", "RNDV_SCHEME"]), (NET, ["TLS", "RNDV_SCHEME", "MAX_RNDV_RAILS"])):
        config = engine.config(kind)
        for name in names:
            if name in engine.settings[kind]:
                assert config[name] == engine.settings[kind][name]


def test_what_the_user_sets_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setenv("UCX_RNDV_SCHEME", "put_zcopy")
    engine = UcxEngine(UcxEngine.get().library)
    assert "TLS" not in engine.settings[HOST]
    assert "TLS" not in engine.settings[NET]
    assert "RNDV_SCHEME" not in engine.settings[NET]
    assert engine.settings[HOST]["RNDV_SCHEME"] == "get_zcopy", "a sender must not write into memory that we gave up"
    assert "TCP_TX_SEG_SIZE" in engine.settings[NET]


def test_a_process_without_shared_memory_uses_the_networks_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = UcxEngine.get()
    assert engine.host()
    monkeypatch.setattr(type(engine.library), "info", lambda self, context: "#  resource 0 : dev 0 flags -- tcp/lo\n")
    assert engine.host() == ""


def test_connections_beyond_the_limit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = UcxEngine.get()
    monkeypatch.setattr(engine, "most_lanes", 1)
    lane = engine.lane(NET)
    with pytest.raises(TransportUnavailable, match="1 connections of this process use UCX already"):
        engine.lane(NET)
    assert engine.release(lane)
    engine.release(engine.lane(NET))
