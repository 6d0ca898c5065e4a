"""What "auto" stands for."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore_transport import bodies


def test_ucx_is_chosen_unasked_only_where_there_is_rdma(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bodies, "_RDMA_DEVICES", tmp_path / "none")
    assert bodies.auto() == ("shm", "tcp")
    monkeypatch.setattr(bodies, "_RDMA_DEVICES", tmp_path)
    assert bodies.auto() == ("shm", "tcp")
    (tmp_path / "mlx5_0").mkdir()
    assert bodies.auto() == bodies.AUTO == ("shm", "ucx", "tcp")
