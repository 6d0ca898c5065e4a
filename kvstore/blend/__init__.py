"""Blending: documents' KV stored once, found by their content, reused at any position of a prompt, and repaired by
computing a few tokens again (CacheBlend, arXiv 2405.16444).

    blender = Blender(model, store, {"enable_blending": True}, tokenizer=tokenizer, prefix=system_prompt)
    blender.precompute(documents)
    cache, report = blender.blend([*some_documents, question])
    out = model.generate(report.input_ids, **blender.cache_argument(cache))

parts (`chunks`) → keys and records (`form`) → plan (`controller`, the one planner's) → loading one layer ahead
(`loading`) → recompute of a layer (`recompute`, `selection`, over `model`) → cache. `diagnostics` and `plot` show what
repair does. docs/blending.md tells more.
"""

from __future__ import annotations

from kvstore.errors import ConfigError

try:
    import torch  # noqa: F401
    import transformers  # noqa: F401
except ModuleNotFoundError as missing:
    raise ConfigError(f"blending needs {missing.name}: pip install 'kvstore[transformers]'", cause=missing) from missing

from .blender import Blender
from .chunks import Placed, Prompt, WindowIndex
from .controller import BLEND_POLICY, Decision, Stored, decide
from .form import FORMS, ChunkForm
from .loading import ChunkLoader, ChunksLost
from .model import BlendModel
from .recompute import LayerInput, Recompute
from .report import BlendReport, PrecomputeReport
from .selection import Selector
from .terms import BlendSettings, LayerKV, Span

__all__ = [
    "BLEND_POLICY",
    "FORMS",
    "BlendModel",
    "BlendReport",
    "BlendSettings",
    "Blender",
    "ChunkForm",
    "ChunkLoader",
    "ChunksLost",
    "Decision",
    "LayerInput",
    "LayerKV",
    "Placed",
    "PrecomputeReport",
    "Prompt",
    "Recompute",
    "Selector",
    "Span",
    "Stored",
    "WindowIndex",
    "decide",
]
