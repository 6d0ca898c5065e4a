"""Stands in for torchaudio; see ../sitecustomize.py."""

__version__ = "0.0.0"
