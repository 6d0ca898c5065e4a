"""Records in S3, S3 Express One Zone and the like: `s3://bucket/prefix`.

Needs `pip install -c constraints.txt '.[s3]'` in this project's checkout.
"""

from .backend import S3Backend

__all__ = ["S3Backend"]
