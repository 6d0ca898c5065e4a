"""The model that a bench runs."""

from __future__ import annotations

import subprocess
from pathlib import Path

from kvstore.errors import ConfigError

__all__ = ["model_folder"]


def model_folder(given: str | None) -> Path:
    """The folder of `--model`; None: SmolLM2, made if it is not there.

    Raises:
        ConfigError: it is no model, or SmolLM2 cannot be made here.
    """
    if given is not None:
        if not (Path(given) / "config.json").exists():
            raise ConfigError(f"--model {given!r}: there is no config.json")
        return Path(given)
    try:
        from kvstore.testing.models import smollm2_folder

        return smollm2_folder()
    except (ImportError, OSError, RuntimeError, subprocess.CalledProcessError) as error:
        raise ConfigError(f"the model cannot be made ({error}); install kvstore[demo], or give --model") from error
