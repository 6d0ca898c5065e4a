"""`file://`: records as files in a folder, on a local disk or on NFS, EFS, FSx and other shared file systems."""

from .backend import FileBackend

__all__ = ["FileBackend"]
