"""`BackendSuite`: the contract of `kvstore.backend`, line by line, as tests that any backend can run."""

from __future__ import annotations

from .suite_base import payload
from .suite_data import DataTests
from .suite_life import LifeTests

__all__ = ["BackendSuite", "payload"]


class BackendSuite(DataTests, LifeTests):
    """Subclass it in a test module of your own, give it three hooks, and pytest runs the whole contract:

        from kvstore.testing import BackendSuite

        class TestMyBackend(BackendSuite):
            def open(self):                        # a new instance; self.path is a folder of this test
                return MyBackend(self.path)

            def seed(self, backend, key, data):    # replace the record of key behind the backend's back
                (self.path / key.hex()).write_bytes(data)

            def inspect(self, backend, key):       # its stored bytes, or None, behind the backend's back
                file = self.path / key.hex()
                return file.read_bytes() if file.exists() else None

    Where one cannot get behind it, `put_through` and `read_through` do the same by way of a second instance.

    More hooks: `reopen` for DURABLE backends, `open_limited` and `open_capacity` for limits on sizes. Knobs:
    `requires`, `max_value`, `stores_empty`, `patience_s`, `fork_limit_s`, `forbidden_text`. Which tests apply follows
    from the capabilities that the backend claims, and a claim that is not kept fails. See `SuiteBase`.

    Keys differ from run to run, so a shared place (a bucket, a server) need not be empty; nothing of it is deleted
    but what the test stored. Tests that fork take real children, with a time limit.
    """
