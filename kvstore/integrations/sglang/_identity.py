"""Whose pages they are: what of a model, its weights and an engine's shape their names must have. SGLang's own page
hashes cover tokens, `extra_key` (LoRA) and `cache_salt` only."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvstore.errors import ConfigError
from kvstore.integrations._weights import model_name, model_revision

from ._pages import Pages

__all__ = ["dtype_of", "identity_of", "revision_of"]

_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope", "su")  # fixed by the longest context that the engine serves


def identity_of(config: Any, name: str | None, revision: str, dtype: str, pages: Pages) -> str:
    """What stands before the hash in the name of each page of this rank.

    Pages of MLA are the same on all tensor-parallel ranks, so theirs have no rank; with data-parallel attention each
    group computes the same.

    Args:
        config: SGLang's `HiCacheStorageConfig`.
        name: of the model, if it is not SGLang's.
        dtype: of the KV, as `dtype_of` says.

    Raises:
        ConfigError: the model has no name.
    """
    name = name or config.model_name
    if not name:
        raise ConfigError("SGLang does not tell the model's name; give model_name in the backend's extra config")
    model = model_name(name.removesuffix(f"-{pages.tag}") if pages.tag else name)
    tensor = None if config.is_mla_model else [config.tp_rank, config.tp_size]
    pipeline, context = [config.pp_rank, config.pp_size], [config.attn_cp_rank, config.attn_cp_size]
    return json.dumps(["page", 1, model, pages.tag, revision, dtype, tensor, pipeline, context, pages.geometry])


def dtype_of(pages: Pages) -> str:
    """The dtype of the KV. A pool of bytes does not tell it; SGLang's configuration does.

    Raises:
        ConfigError: it cannot be told.
    """
    return pages.dtype if pages.dtype != "uint8" else f"uint8 of {_published('model').kv_cache_dtype}"


def revision_of() -> str:
    """What stands for weights, configuration and whatever else changes KV, of the engine of this process. Reads all
    weights of a local folder.

    Raises:
        ConfigError: it cannot be told.
    """
    model, spec, device = (_published(name) for name in ("model", "spec", "device"))
    path = str(model.model_path)
    overrides = json.loads(model.json_model_override_args or "{}")
    config = {**_config_of(path), **overrides}
    commit = None if os.path.exists(path) else _commit_of(path, model.revision)
    if commit is None and not os.path.exists(path):
        raise ConfigError(f"{_WHICH} {path!r} has: no commit of it is in the hub's cache; {_GIVE}")
    settings = {
        "quantization": model.quantization,
        "dtype": model.dtype,
        "scales": _content_of(model.quantization_param_path),
        "context": model.context_length if _length_matters(config) else None,
        "random weights": device.random_seed if str(model.load_format) == "dummy" else None,
        # Draft layers may lie in the same pages.
        "draft": [spec.speculative_algorithm, spec.speculative_draft_model_path, spec.speculative_draft_model_revision],
    }
    return model_revision(path, commit, config, settings)


def _published(name: str) -> Any:
    """A part of the configuration of this process's engine."""
    from sglang.srt import runtime_context

    try:
        return getattr(runtime_context, f"get_{name}")()
    except ValueError as error:
        raise ConfigError(f"{_WHICH} has: there is no engine in this process ({error}); {_GIVE}") from error


_WHICH = "it cannot be told which weights the model"
_GIVE = "give revision in the backend's extra config, and change it with the weights"


def _config_of(path: str) -> dict[str, Any]:
    file = Path(path) / "config.json"
    if not file.is_file():
        return {}
    read: dict[str, Any] = json.loads(file.read_text())
    return read


def _content_of(path: str | None) -> str | None:
    return Path(path).read_text() if path else None


def _commit_of(name: str, revision: str | None) -> str | None:
    """The commit whose files are in the hub's cache; None if there are none."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, "config.json", revision=revision or "main")
    return Path(found).parent.name if isinstance(found, str) else None


def _length_matters(config: Mapping[str, Any]) -> bool:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return isinstance(rope, Mapping) and rope.get("rope_type", rope.get("type")) in _LENGTH_DEPENDENT_ROPE
