"""Tools for testing backends, and things that use them. Shipped, so that third parties can run them over their own.

    from kvstore.testing import BackendSuite            # needs pytest
    class TestMine(BackendSuite): ...

    from kvstore.testing import CodecSuite              # needs pytest
    class TestMyCodec(CodecSuite): ...

    from kvstore.testing import backend_state_machine   # needs hypothesis
    TestMineStateful = backend_state_machine(lambda path: MyBackend(path)).TestCase

    from kvstore.testing import DictBackend, Fault, FaultyBackend, LatencyBackend   # need neither

Names are imported when they are first used, so that the doubles work without pytest and hypothesis.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .audit import LeakAudit
    from .codecs import CodecSuite
    from .fault import Call, Fault
    from .faulty import FaultyBackend
    from .forwarding import assert_forwards_everything
    from .latency import LatencyBackend
    from .reference import DictBackend
    from .stateful import BackendStateMachine, backend_state_machine
    from .suite import BackendSuite

__all__ = [
    "BackendStateMachine",
    "BackendSuite",
    "Call",
    "CodecSuite",
    "DictBackend",
    "Fault",
    "FaultyBackend",
    "LatencyBackend",
    "LeakAudit",
    "assert_forwards_everything",
    "backend_state_machine",
]

_HOME = {
    "BackendStateMachine": "stateful",
    "BackendSuite": "suite",
    "Call": "fault",
    "CodecSuite": "codecs",
    "DictBackend": "reference",
    "Fault": "fault",
    "FaultyBackend": "faulty",
    "LatencyBackend": "latency",
    "LeakAudit": "audit",
    "assert_forwards_everything": "forwarding",
    "backend_state_machine": "stateful",
}
_REWRITTEN = ("codecs", "suite", "suite_base", "suite_data", "suite_life", "stateful")


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if home in ("codecs", "suite", "stateful") and (pytest := sys.modules.get("pytest")) is not None:
        # pytest explains a failed `assert` only in modules it was told of before they are imported.
        names = (f"{__name__}.{module}" for module in _REWRITTEN)
        pytest.register_assert_rewrite(*(name for name in names if name not in sys.modules))
    value = getattr(importlib.import_module(f".{home}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
