"""Machine code where there is no place to keep it: a container whose file systems are read-only."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from kvstore.codec.compiled import compiled

caching = pytest.importorskip("numba.core.caching")


def doubled(values: np.ndarray) -> int:
    total = 0
    for value in values:
        total += 2 * value
    return total


def test_without_a_folder_for_it_code_is_compiled_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from kvstore.codec import compiled as module

    monkeypatch.setattr(caching.CacheImpl, "_locator_classes", [])
    module._say_so.cache_clear()
    for _ in range(2):
        assert compiled()(doubled)(np.arange(4)) == 12
    assert [record.message for record in caplog.records if "NUMBA_CACHE_DIR" in record.message], caplog.text
    assert len(caplog.records) == 1  # said once
    module._say_so.cache_clear()


_CODE = """
from numba.core.caching import CacheImpl
CacheImpl._locator_classes = []
from kvstore.codec import cachegen, scaled
from kvstore.codec.rans import coder
assert scaled.native().__name__.endswith("scaled_native")
assert cachegen.quantiser().__name__.endswith("cachegen_native")
assert coder.coder().__name__.endswith("rans.native")
"""


def test_no_codec_fails_for_want_of_such_a_folder() -> None:
    subprocess.run([sys.executable, "-c", _CODE], check=True, timeout=120)
