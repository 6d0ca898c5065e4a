"""The rotary embedding of a live transformers model, compared with what the model itself does."""

from __future__ import annotations

import sys
from typing import Any

import torch

from kvstore.errors import ConfigError
from kvstore.rope import RotarySpec

__all__ = ["model_rotary"]

_PROBE = (0, 1, 7, 100, 1000)  # positions
_TOLERANCE = 2e-5  # of K of length about 1, with the model's own frequencies


def model_rotary(model: Any, config: Any, head_dim: int) -> RotarySpec:
    """The spec of a model's rotary embedding, with the frequencies that the model has, after embedding a few random
    vectors with both and finding them equal.

    Raises:
        ConfigError: the embedding is not supported (`RotarySpec.from_config` says why), or is not what the
            configuration says.
    """
    name = f"{type(model).__name__} ({config.model_type})"
    spec = RotarySpec.from_config(config)
    modules = [module for module in model.modules() if hasattr(module, "inv_freq")]
    if not modules:
        raise ConfigError(f"{name} has no module with rotary frequencies; K cannot be stored before its embedding")
    rotary: Any = modules[0]
    for module in modules:
        if module.inv_freq.shape != rotary.inv_freq.shape or not torch.equal(module.inv_freq, rotary.inv_freq):
            raise ConfigError(f"{name} has other rotary embeddings in other layers")
    if rotary.inv_freq.dtype != torch.float32:
        raise ConfigError(
            f"the rotary frequencies of {name} were cast to {rotary.inv_freq.dtype} with the model, which spoils far "
            "positions; load the model with dtype=... instead of converting it"
        )
    if spec.head_dim != head_dim:
        raise ConfigError(f"{name} has heads of {head_dim}, but a rotary embedding for heads of {spec.head_dim}")
    spec = spec.with_frequencies(rotary.inv_freq)
    home = sys.modules[type(rotary).__module__]
    embed = getattr(home, "apply_rotary_pos_emb", None)
    if embed is None:
        raise ConfigError(f"{home.__name__} has no apply_rotary_pos_emb to compare with")
    with torch.no_grad():
        device = rotary.inv_freq.device
        generator = torch.Generator().manual_seed(0)
        plain = torch.randn(1, len(_PROBE), 2, head_dim, generator=generator).to(device)
        cos, sin = rotary(plain, torch.tensor([_PROBE], device=device))
        # Some models embed whole heads here, others cut off what is not rotated before they call it.
        wide = plain.transpose(1, 2)
        for k in (wide, wide[..., : spec.width]):
            try:
                theirs = embed(k, k, cos, sin)[1].transpose(1, 2)
            except RuntimeError:  # the shapes do not fit
                continue
            ours = spec.apply(plain, _PROBE)[..., : theirs.shape[-1]]
            if torch.allclose(ours, theirs, rtol=0, atol=_TOLERANCE * spec.magnitude):
                return spec
            break
    raise ConfigError(f"the rotary embedding of {name} is not what its configuration says ({spec.text})")
