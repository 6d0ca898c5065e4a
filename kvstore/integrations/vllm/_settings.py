"""`kv_connector_extra_config`: which of it is the connector's own, and the store that the rest of it opens."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvstore.config import load_config
from kvstore.errors import ConfigError
from kvstore.options import parse_duration
from kvstore.store import Store

__all__ = ["Settings", "SharedStore"]

PREFILL_TIMEOUT_S = 10.0
LOAD_MODES = ("auto", "layerwise", "async")

_OWN = ("model_name", "revision", "load_mode", "save_generated", "prefill_timeout")
_NO_BLENDING = (
    "enable_blending cannot be had in vLLM: its connectors say how many of a prompt's first tokens are loaded, and all "
    "others are computed in full, so a chunk behind other tokens than those it was computed behind is neither skipped "
    "nor repaired. Here an exact prefix is reused (a shared introduction and the document that follows it, say); "
    "blending is in kvstore.blend, with transformers. Leave enable_blending out; see 'Blending' in docs/vllm.md"
)


@dataclass(frozen=True, slots=True)
class Settings:
    """The connector's options.

    Attributes:
        remote_url, config_file: of the store, as in `kvstore.open_store`.
        options: any other option of `kvstore.config`.
        model_name: in the keys; None: vLLM's model, of a local folder the last part.
        revision: of the weights, in the keys; None: what `_weights.model_revision` finds. One that is given is a
            promise, and must change with whatever changes the KV (overrides, quantisation).
        load_mode: "layerwise": within the step, each layer before it is computed. "async": between steps; other
            requests go on meanwhile. "auto": layerwise where it is safe (one rank, no asynchronous scheduling).
        save_generated: chunks that are generated are saved like those of prompts.
        prefill_timeout: of a prompt that another engine computes, how long no further chunk may come until this one
            computes the rest itself. Seconds; as an option also with a unit ("500ms").
    """

    remote_url: Any = None
    config_file: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    model_name: str | None = None
    revision: str | None = None
    load_mode: str = "auto"
    save_generated: bool = True
    prefill_timeout: float = PREFILL_TIMEOUT_S

    @classmethod
    def of(cls, extra: Mapping[str, Any]) -> Settings:
        """From `kv_connector_extra_config`.

        Raises:
            ConfigError: a value that makes no sense; options of the store are checked when it is opened.
        """
        given = dict(extra)
        own = {name: given.pop(name) for name in _OWN if name in given}
        if "prefill_timeout" in own:
            own["prefill_timeout"] = parse_duration(own["prefill_timeout"], name="prefill_timeout")
        settings = cls(given.pop("remote_url", None), given.pop("config_file", None), given, **own)
        if settings.load_mode not in LOAD_MODES:
            raise ConfigError(f"load_mode={settings.load_mode!r} is not known; use one of {', '.join(LOAD_MODES)}")
        if not isinstance(settings.save_generated, bool):
            raise ConfigError(f"save_generated must be true or false, not {settings.save_generated!r}")
        for name in ("model_name", "revision"):
            value = getattr(settings, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise ConfigError(f"{name} must be non-empty text, not {value!r}")
        return settings

    def asynchronous(self, *, ranks: int, async_scheduling: bool) -> bool:
        """Whether loads run between steps.

        Layer by layer is for one rank: others would save what they computed from KV that only this one knows to have
        failed. And not for asynchronous scheduling: vLLM has planned the next step on top of it by then.

        Raises:
            ConfigError: "layerwise" where it is not safe.
        """
        safe = ranks == 1 and not async_scheduling
        if self.load_mode == "layerwise" and not safe:
            why = f"there are {ranks} ranks" if ranks > 1 else "asynchronous scheduling is on (--no-async-scheduling)"
            raise ConfigError(f"load_mode=layerwise cannot be had: {why}; use async, or auto")
        return self.load_mode == "async" or not safe


class SharedStore:
    """A store that the scheduler's and the worker's side of one process share; closed with the last of them.

    Raises:
        ConfigError: as `kvstore.open_store`.
    """

    _open: dict[tuple[int, str], SharedStore] = {}  # noqa: RUF012
    _lock = threading.Lock()

    def __init__(self, name: tuple[int, str], store: Store) -> None:
        self.store = store
        self._name = name
        self._users = 0

    @classmethod
    def of(cls, settings: Settings) -> SharedStore:
        """The store of these settings; opens it if this process has it not."""
        text = json.dumps(
            [settings.remote_url, settings.config_file, dict(settings.options)], default=str, sort_keys=True
        )
        name = (os.getpid(), text)
        with cls._lock:
            shared = cls._open.get(name)
            if shared is None:
                options = {"on_error": "miss", **settings.options}
                config = load_config(settings.remote_url, config_file=settings.config_file, **options)
                if config.enable_blending:
                    raise ConfigError(_NO_BLENDING)
                shared = cls._open[name] = cls(name, Store(config))
            shared._users += 1
            return shared

    def close(self) -> None:
        """One user less."""
        with self._lock:
            self._users -= 1
            if self._users:
                return
            self._open.pop(self._name, None)
        self.store.close()
