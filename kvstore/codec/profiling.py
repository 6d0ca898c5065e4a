"""What a codec's profile is made from: texts, token lists of one length, and the K and V that a model has for them.

    lists = token_lists(tokenizer, read_texts(["corpus/"]), tokens=1000, limit=8)
    for kv in map(lambda ids: collect(model, ids), lists):
        kv.keys      # [layers, tokens, heads, head_dim], before the rotary embedding
        kv.values    # [layers, tokens, heads, v_head_dim]

torch and transformers are the caller's: nothing is imported here before `collect` is called.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.errors import ConfigError
from kvstore.layout import KVLayout
from kvstore.rope import RotarySpec

__all__ = ["Captured", "collect", "layout_of", "model_name", "read_texts", "token_lists"]

Floats = npt.NDArray[np.float32]

_SUFFIXES = frozenset({"", ".txt", ".md", ".rst", ".py", ".jsonl", ".json", ".c", ".h", ".html", ".log", ".text"})
_MATCH = 1e-2  # of the largest element: two ways to the same K differ by rounding, at most that of bf16


class Captured(NamedTuple):
    """K and V of one context, fp32.

    Attributes:
        keys: `[layers, tokens, kv_heads, head_dim]`, before the rotary embedding.
        values: `[layers, tokens, kv_heads, v_head_dim]`.
        queries: `[layers, tokens, heads, head_dim]`, before the rotary embedding; None if not asked for.
    """

    keys: Floats
    values: Floats
    queries: Floats | None = None

    def rotated(self, rotary: RotarySpec, start: int = 0) -> Floats:
        """`keys` after the rotary embedding at positions start, start + 1, …"""
        turned: Floats = rotary.apply(self.keys, np.arange(start, start + self.keys.shape[1]))
        return turned


def collect(model: Any, token_ids: Sequence[int], *, queries: bool = False) -> Captured:
    """Run a transformers model over one context.

    K is what `k_proj` gives, if the model has it and the embedding of that is what the model cached; else it is taken
    from the cache and the embedding is undone (`kvstore.rope`), as for models with a normalisation of K or with fused
    projections. V is the cache's.

    Args:
        model: a causal language model of transformers, on any device, in evaluation mode.
        token_ids: the context, at least one token.
        queries: also give Q, which needs a `q_proj` and no normalisation behind it.

    Raises:
        ConfigError: the model has no KV cache that is understood, or no way to K before the embedding.
    """
    import torch

    if len(token_ids) == 0:
        raise ConfigError("a context to collect KV of has no tokens")
    seen: dict[str, list[Any]] = {"k_proj": [], "q_proj": []}
    hooks = []
    for name, module in model.named_modules():
        kind = name.rpartition(".")[2]
        if kind in seen:
            hooks.append(module.register_forward_hook(_keep(seen[kind])))
    # The base model has no output layer, which would cost time and memory for logits that nobody looks at.
    body = getattr(model, getattr(model, "base_model_prefix", "") or "model", model)
    device = next(model.parameters()).device
    try:
        with torch.inference_mode():
            ids = torch.tensor([list(token_ids)], dtype=torch.long, device=device)
            out = body(input_ids=ids, use_cache=True)
            cache = getattr(out, "cache", None) or out.past_key_values  # as newer and older transformers call it
    finally:
        for hook in hooks:
            hook.remove()
    cached_k, cached_v = _cached(cache)
    layers, tokens, heads, width = cached_k.shape
    rotary, refused = _rotary(model.config)
    keys = _projected(seen["k_proj"], layers, tokens, width, heads)
    if rotary is None:
        if keys is None or _has_norm(model, "k_norm"):
            raise ConfigError(f"there is no way to K before the rotary embedding of {model_name(model)}: {refused}")
    elif keys is None or not _close(rotary.apply(keys, np.arange(tokens)), cached_k):
        keys = rotary.undo(cached_k, np.arange(tokens))
    asked = None
    if queries:
        asked = _projected(seen["q_proj"], layers, tokens, width)
        if asked is None or _has_norm(model, "q_norm"):
            raise ConfigError(f"{model_name(model)} has no q_proj whose output is Q before the rotary embedding")
    return Captured(keys, cached_v, asked)


def layout_of(captured: Captured) -> KVLayout:
    """The layout of the model whose KV this is."""
    layers, _, heads, width = captured.keys.shape
    return KVLayout(layers, heads, width, captured.values.shape[-1])


def _keep(into: list[Any]) -> Callable[[Any, Any, Any], None]:
    def hook(_: Any, __: Any, output: Any) -> None:
        into.append(output[0].detach().float().cpu().numpy())

    return hook


def _cached(cache: Any) -> tuple[Floats, Floats]:
    """(K after the embedding, V), `[layers, tokens, heads, width]` each."""
    both: list[list[Floats]] = [[], []]
    for layer in getattr(cache, "layers", None) or ():
        for into, name in zip(both, ("keys", "values"), strict=True):
            tensor = getattr(layer, name, None)
            if tensor is None or tensor.ndim != 4 or tensor.shape[0] != 1:
                raise ConfigError("the model's cache has layers that are not K and V of every token")
            into.append(tensor[0].detach().transpose(0, 1).float().cpu().numpy())
    shapes = [{each.shape for each in one} for one in both]
    if not both[0] or len(shapes[0]) > 1 or len(shapes[1]) > 1:
        raise ConfigError("the model's cache has no layers of K and V of one shape")
    return np.stack(both[0]), np.stack(both[1])


def _projected(seen: list[Any], layers: int, tokens: int, width: int, heads: int | None = None) -> Floats | None:
    if len(seen) != layers or any(each.shape[0] != tokens or each.size % (tokens * width) for each in seen):
        return None
    shaped = [each.reshape(tokens, -1, width) for each in seen]
    if len({each.shape for each in shaped}) > 1 or (heads is not None and shaped[0].shape[1] != heads):
        return None
    return np.stack(shaped)


def _rotary(config: Any) -> tuple[RotarySpec | None, str]:
    try:
        return RotarySpec.from_config(config), ""
    except ConfigError as error:
        return None, error.message


def _close(one: Floats, other: Floats) -> bool:
    return float(np.abs(one - other).max()) <= _MATCH * float(np.abs(other).max())


def _has_norm(model: Any, name: str) -> bool:
    return any(module.rpartition(".")[2] == name for module, _ in model.named_modules())


def model_name(model: Any) -> str:
    """What a transformers model is called: its `name_or_path`, of a local folder only the last part, else its class.
    The transformers integration names it so in its keys."""
    name = str(getattr(model, "name_or_path", "") or getattr(model.config, "name_or_path", "") or "")
    if os.path.isdir(name):
        name = os.path.basename(os.path.abspath(name))
    return name or type(model).__name__


# Texts.


def read_texts(
    paths: Iterable[str | os.PathLike[str]], *, field: str | None = None, suffixes: Iterable[str] | None = None
) -> Iterator[str]:
    """The texts of files and folders, in a fixed order.

    A file is one text; a file whose name ends in .jsonl has one on each line: the member `field` of an object ("text"
    if not said), or a string. Of folders all files below are read whose suffix is in `suffixes` (default: of texts).
    What is not UTF-8 is read with replacement characters.

    Raises:
        ConfigError: there is no such path, a folder holds no texts, a line is no JSON or has no such member.
    """
    wanted = _SUFFIXES if suffixes is None else frozenset(suffixes)
    for path in paths:
        top = Path(path)
        if top.is_dir():
            files = sorted(each for each in top.rglob("*") if each.is_file() and each.suffix in wanted)
            if not files:
                raise ConfigError(f"folder {top} holds no texts")
        else:
            files = [top]
        for file in files:
            try:
                text = file.read_text("utf-8", "replace")
            except OSError as error:
                raise ConfigError(f"text {file}: {error.strerror or error}", cause=error) from error
            if file.suffix == ".jsonl":
                yield from _lines(file, text, field or "text")
            else:
                yield text


def _lines(file: Path, text: str, field: str) -> Iterator[str]:
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{file}, line {number}, is no JSON: {error}", cause=error) from error
        if isinstance(value, dict):
            value = value.get(field)
        if not isinstance(value, str):
            raise ConfigError(f"{file}, line {number}, has no text in {field!r}")
        yield value


def token_lists(tokenizer: Any, texts: Iterable[str], *, tokens: int, limit: int | None = None) -> list[list[int]]:
    """Contexts of exactly `tokens` tokens: the texts one after the other, cut.

    Where the tokenizer puts something in front of a prompt (a begin-of-text token), it is in front of each context.

    Args:
        limit: how many at most; reading stops there.

    Raises:
        ConfigError: the texts are too short for a single context.
    """
    front = list(tokenizer("x").input_ids)
    plain = list(tokenizer("x", add_special_tokens=False).input_ids)
    front = front[: len(front) - len(plain)] if front[len(front) - len(plain) :] == plain else []
    if tokens <= len(front):
        raise ConfigError(f"contexts of {tokens} tokens are too short")
    made: list[list[int]] = []
    left: list[int] = []
    room = tokens - len(front)
    for text in texts:
        left += tokenizer(text, add_special_tokens=False).input_ids
        while len(left) >= room and (limit is None or len(made) < limit):
            made.append(front + left[:room])
            del left[:room]
        if limit is not None and len(made) >= limit:
            break
    if not made:
        raise ConfigError(f"the texts have {len(left)} tokens, fewer than one context of {tokens}")
    return made
