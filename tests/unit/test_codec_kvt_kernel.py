"""The GPU path of kvt in Triton's interpreter, against the CPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

CODE = """
import numpy as np, torch
from kvstore.codec.kvt import KvtCodec
from kvstore.codec.kvt_kernel import decode_segments
from kvstore.errors import CorruptRecord
from kvstore.layout import KVLayout
from kvstore.rope import RotarySpec
from tests.unit.kvt_support import info, make_profile, segment, sides

for layout, spec, rope, dtype, tokens, start in [
    (KVLayout(3, 2, 16, 8), RotarySpec(16), "applied", "bfloat16", 21, 0),
    (KVLayout(3, 2, 16, 8), RotarySpec(16, rotary_dim=6), "applied", "float32", 9, 100),
    (KVLayout(3, 1, 24, 20), RotarySpec(24, layout="interleaved"), "applied", "float16", 13, 2),
    (KVLayout(3, 2, 16, 9), RotarySpec(16), "none", "float32", 7, 7),
]:
    profile = make_profile(layout, levels=3, rotary=spec, step=0.05, spread=9.0, tail=1.0)
    codec = KvtCodec(profile)
    torch_dtype = getattr(torch, dtype)
    some, raws = [], []
    for layer in range(3):
        raw, k, v = segment(layout, tokens, dtype, seed=layer)
        if layer == 1:
            k[tokens // 2] *= 400
            flat = torch.from_numpy(np.concatenate([k.ravel(), v.ravel()])).to(torch_dtype)
            raw = flat.view(torch.uint8).numpy().tobytes()
        about = info(layout, tokens, dtype, layer=layer, start=start, rope=rope)
        encoded = codec.encode(memoryview(raw), about)
        assert len(encoded) == 3
        some.append([each.data for each in encoded][: layer + 1])
        raws.append(raw)
    out = torch.full((3, tokens * layout.elements_per_token), 7.0, dtype=torch_dtype)
    decode_segments(some, out)
    for layer in range(3):
        dst = bytearray(len(raws[layer]))
        codec.decode_into(some[layer], memoryview(dst))
        mine = out[layer].float().numpy()
        plain = np.concatenate([each.ravel() for each in sides(dst, layout, tokens, dtype)])
        unit = {"bfloat16": 2**-7, "float16": 2**-10, "float32": 2**-20}[dtype]
        worst = np.abs(mine - plain) - unit * np.abs(plain)
        assert worst.max() <= 1e-5, (layout, layer, worst.max())
        assert (mine == plain).mean() > (0.2 if dtype == "float32" else 0.95)
    if dtype == "bfloat16":
        refused = 0
        rng = np.random.default_rng(1)
        for _ in range(4):
            data = bytearray(some[0][0])
            data[int(rng.integers(44 + 16 + 4 * 96, len(data)))] ^= 1 << int(rng.integers(8))
            try:
                decode_segments([[bytes(data)]], out[:1])
            except CorruptRecord:
                refused += 1
            else:
                assert torch.isfinite(out[:1]).all()
        assert refused >= 2, refused
print("equal")
"""


def test_the_device_decodes_what_the_cpu_decodes() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    # Triton decides at its import whether it interprets, so this has a process of its own.
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.stdout.strip() == "equal", done.stderr
