"""The GPU path of cachegen gives the bytes and bits of the CPU's. In Triton's interpreter, unless there is a GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

_CODE = """
import numpy as np, torch
from kvstore.codec.cachegen import CachegenCodec
from kvstore.codec.cachegen_kernel import decode_segments, encode_segments
from kvstore.errors import ConfigError, CorruptRecord
from kvstore.layout import KVLayout
from tests.unit.codec_profile_support import info, segment_of, small_profile, synthetic_kv

device = "cuda" if torch.cuda.is_available() else "cpu"
escapes = raw_ones = 0
for layout, levels, group, dtype, tokens in [
    (KVLayout(4, 2, 8), (0.4,), 10, "bfloat16", 12),
    (KVLayout(3, 2, 6, 4), (1.0, 0.25), 4, "float16", 9),
    (KVLayout(1, 1, 40, kind="mla"), ((8, 5, 3),), 10, "float32", 3),
    (KVLayout(1, 2, 32), (0.4,), 10, "bfloat16", 1),
]:
    profile = small_profile(layout, levels=levels, group=group)
    codec = CachegenCodec(profile)
    k, v = synthetic_kv(layout, tokens, 3)
    k[0, tokens // 2] *= 60
    v[:1, -1:] = 0
    if layout.num_layers > 3:
        k[3, 0, 0, 0] = np.inf
    raws = [segment_of(k, v, layer, dtype) for layer in range(layout.num_layers)]
    kv = torch.stack([torch.frombuffer(bytearray(raw), dtype=getattr(torch, dtype)) for raw in raws]).to(device)
    mine = encode_segments(kv, range(layout.num_layers), profile)
    good = []
    for layer, raw in enumerate(raws):
        (part,) = codec.encode(raw, info(profile, layer, dtype, tokens))
        if part.codec == 0:
            assert mine[layer] is None
            raw_ones += 1
        else:
            assert mine[layer] == bytes(part.data), (layout, dtype, layer)
            good.append(layer)
            escapes += int.from_bytes(mine[layer][28:32], "little")
    good.reverse()
    out = torch.empty((len(good), kv.shape[1]), dtype=kv.dtype, device=device)
    decode_segments([mine[layer] for layer in good], out, profile)
    for row, layer in zip(out, good):
        expected = bytearray(len(raws[layer]))
        codec.decode_into([memoryview(mine[layer])], memoryview(expected))
        assert row.cpu().view(torch.uint8).numpy().tobytes() == bytes(expected), (layout, dtype, layer)
    try:
        decode_segments([mine[good[0]][:-2] + b"\\xff\\x7f"], out[:1], profile)
    except CorruptRecord:
        pass
    else:
        raise AssertionError("a damaged stream was decoded")
    for wrong in (out[:, :-1], out.to(torch.float64), out[:0]):
        try:
            decode_segments([mine[layer] for layer in good], wrong, profile)
        except (ConfigError, CorruptRecord):
            pass
        else:
            raise AssertionError(wrong.shape)
assert escapes > 0, "large deltas were tried"
assert raw_ones > 0, "inf was tried"
print("equal")
"""


def test_the_kernels_give_the_same_bytes_and_bits() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    # Triton decides at its import whether it interprets, so this has a process of its own.
    done = subprocess.run(
        [sys.executable, "-c", _CODE],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stdout.strip() == "equal", done.stderr
