"""The checker with an emulator that knows some services only: `emulated.py s3,kms … (as check.py)`. Runs in the
checker's environment, as a process of its own."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

sys.dont_write_bytecode = True
sys.path.insert(0, str(Path(__file__).parent / "checker"))


def main(words: list[str]) -> int:
    calls = importlib.import_module("emulator").CALLS
    services = words[0].split(",")
    for kind in [kind for kind, call in calls.items() if call[0] not in services]:
        del calls[kind]
    status: int = importlib.import_module("check").main(words[1:])
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
