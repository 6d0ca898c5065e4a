"""Which weights a model has, and which an adapter, without reading them through the engine."""

from __future__ import annotations

import functools
import json
import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from kvstore.errors import ConfigError

__all__ = ["adapter_identity", "folder_fingerprint", "model_name", "model_revision"]

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_BLOCK = 16 << 20

# What does not change the KV, or is in a key by itself, or says where and by whom the model was saved.
_NOT_THE_MODEL = frozenset(
    (
        "_name_or_path", "name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype", "use_cache",
        "return_dict", "output_attentions", "output_hidden_states", "_commit_hash",
    )
)  # fmt: skip


def model_name(path: str) -> str:
    """The name in keys: of a local folder only the last part, since a path means nothing on another host."""
    return os.path.basename(os.path.abspath(path)) if os.path.exists(path) else path


def folder_fingerprint(folder: str) -> str:
    """XXH3-128 over every byte of the weight files of a folder (or of one file) with their names, as 32 hex digits.

    About 0.15 s of CPU per GB in the page cache, where it is after the engine loaded it; else as long as reading takes.
    It is remembered as long as names, sizes and times of the files stay the same. It guards against mistakes, not
    against somebody who makes weights that collide.

    Raises:
        ConfigError: there are no weights.
    """
    top = Path(folder)
    files = [top] if top.is_file() else sorted(path for path in top.iterdir() if path.suffix in _WEIGHTS)
    if not files:
        raise ConfigError(f"{folder} has no weights ({', '.join(_WEIGHTS)}); give a revision instead")
    stats = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return _fingerprint(tuple(stats))


@functools.lru_cache(maxsize=64)
def _fingerprint(files: tuple[tuple[str, int, int], ...]) -> str:
    digest = xxhash.xxh3_128(b"kvstore weight files 1")
    for path, size, _ in files:
        digest.update(json.dumps([os.path.basename(path), size]).encode())
        if not size:
            continue
        with (
            open(path, "rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
            memoryview(mapped) as view,
        ):
            for begin in range(0, size, _BLOCK):
                digest.update(view[begin : begin + _BLOCK])
    return digest.hexdigest()


def model_revision(path: str, revision: str | None, config: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """What tells weights, and how they are used, from others under the same name.

    Args:
        path: folder, file or name on a hub.
        revision: on a hub: of the weights (a commit), if it is known.
        config: the model's text configuration, with whatever overrides it.
        settings: of the engine, as far as they change the KV.

    Raises:
        ConfigError: neither a local folder nor a revision.
    """
    if os.path.exists(path):
        weights = folder_fingerprint(path)
    elif revision:
        weights = revision
    else:
        raise ConfigError(f"which weights {path!r} has cannot be told; give a revision")
    kept = {str(name): value for name, value in config.items() if name not in _NOT_THE_MODEL}
    text = json.dumps([weights, kept, dict(settings)], sort_keys=True, default=str)
    return xxhash.xxh3_128(text.encode()).hexdigest()


def adapter_identity(name: str, path: str | None) -> str:
    """Name and weights of a LoRA adapter. One that is not a local folder has only its path for a version."""
    if path and os.path.isdir(path):
        return f"{name}:{folder_fingerprint(path)}"
    return f"{name}:{path}"
