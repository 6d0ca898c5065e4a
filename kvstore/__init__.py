"""kvstore: remote storage for the KV caches of large language models."""

from ._version import __version__

__all__ = ["__version__"]
