"""How pytest-xdist spreads the tests over processes (`make test` does; plain pytest runs them one after another)."""

from __future__ import annotations

from xdist.scheduler import LoadScopeScheduling

__all__ = ["Runs"]


class Runs(LoadScopeScheduling):
    """Neighbouring tests of one module or class go to one process together, in the order of the collection.

    A process keeps a module's fixtures for them. Tests marked `leaves` are sorted to the end, so those of a module are
    a run of their own, and each process comes to them last, too: `--dist loadscope` would fetch them to the others.
    """

    def schedule(self) -> None:
        if self.collection is None:
            self._run_of: dict[str, str] = {}
            runs, before = 0, ""
            for nodeid in next(iter(self.registered_collections.values())):
                scope = super()._split_scope(nodeid)
                runs += scope != before
                before = scope
                self._run_of[nodeid] = f"{runs} {scope}"
        super().schedule()

    def _split_scope(self, nodeid: str) -> str:
        return self._run_of[nodeid]
