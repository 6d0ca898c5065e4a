"""Records in Valkey or Redis: `valkey://host:port/prefix`, `valkeys://…` over TLS. Needs nothing to be installed."""

from .backend import ValkeyBackend

__all__ = ["ValkeyBackend"]
