"""Models, tokenizers and texts, as the subcommands need them; and what a terminal shows meanwhile."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kvstore.codec.profiling import read_texts, token_lists
from kvstore.errors import ConfigError

__all__ = ["contexts_of", "load", "ticker"]


def load(name: str) -> tuple[Any, Any]:
    """A model (fp32, evaluation mode, on the CPU or the first GPU) and its tokenizer.

    Args:
        name: a folder, or a name that transformers finds.

    Raises:
        ConfigError: torch or transformers is missing, or there is no such model.
    """
    try:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging
    except ImportError as error:
        raise ConfigError(
            f"a model is needed, and {error}; pip install 'kvstore[transformers]'", cause=error
        ) from error
    quiet: Any = logging
    quiet.disable_progress_bar()
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(name)
        model: Any = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(f"--model {name}: it cannot be loaded: {reason}", cause=error) from error
    tokenizer.model_max_length = 1 << 30  # whole texts are tokenised; no warning that they are long
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return model.to(device).eval(), tokenizer


def contexts_of(tokenizer: Any, texts: Sequence[str], field: str | None, tokens: int, contexts: int) -> list[list[int]]:
    """`contexts` lists of `tokens` tokens. Raises `ConfigError` if the texts do not give a single one."""
    found = token_lists(tokenizer, read_texts(texts, field=field), tokens=tokens, limit=contexts)
    if len(found) < contexts:
        print(
            f"kvstore-codec: warning: the texts give {len(found)} contexts of {tokens} tokens, not the {contexts} that "
            "were asked for; what follows is of those",
            file=sys.stderr,
        )
    return found


@contextlib.contextmanager
def ticker() -> Iterator[Callable[[str], None]]:
    """Says on standard error what is being done: in one line that is gone at the end on a terminal, else in a line
    each."""
    if not sys.stderr.isatty():
        yield lambda what: print(f"kvstore-codec: {what}", file=sys.stderr, flush=True)
        return
    from rich.console import Console

    with Console(stderr=True).status("loading the model") as status:
        yield status.update
