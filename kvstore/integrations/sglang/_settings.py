"""`--hicache-storage-backend-extra-config`: which of it is the backend's own, and what the store gets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvstore.errors import ConfigError

__all__ = ["Settings"]

# What SGLang reads itself, or adds (file_storage_path, from a flag of its own).
_SGLANGS = ("backend_name", "module_path", "class_name", "interface_v1", "file_storage_path")


@dataclass(frozen=True, slots=True)
class Settings:
    """The backend's options.

    Attributes:
        remote_url, config_file: of the store, as in `kvstore.open_store`.
        options: any other option of `kvstore.config`.
        model_name: in the names of pages; None: SGLang's, of a local folder the last part.
        revision: of the weights, in the names of pages; None: what `_identity.revision_of` finds. One that is given is
            a promise, and must change with whatever changes the KV.
        zero_copy: SGLang uses the interface that hands over places in its host pool (`interface_v1`).
    """

    remote_url: Any = None
    config_file: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    model_name: str | None = None
    revision: str | None = None
    zero_copy: bool = False

    @classmethod
    def of(cls, extra: Mapping[str, Any] | None) -> Settings:
        """From SGLang's `extra_config`.

        Raises:
            ConfigError: a value that makes no sense; options of the store are checked when it is opened.
        """
        given = {name: value for name, value in (extra or {}).items() if name not in _SGLANGS}
        own = {name: given.pop(name) for name in ("model_name", "revision") if name in given}
        for name, value in own.items():
            if value is not None and (not isinstance(value, str) or not value):
                raise ConfigError(f"{name} must be non-empty text, not {value!r}")
        config_file = given.pop("config_file", None)
        if config_file is not None and not isinstance(config_file, str):
            raise ConfigError(f"config_file must be a path, not {config_file!r}")
        zero_copy = bool((extra or {}).get("interface_v1", 0))
        return cls(given.pop("remote_url", None), config_file, given, zero_copy=zero_copy, **own)
