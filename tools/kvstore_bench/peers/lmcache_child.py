"""LMCache's own L2 adapters and ours in one process, driven by LMCache's own benchmark; `compare_lmcache` talks to it.

Run it with `python -I`, by an interpreter that has LMCache and kvstore: this folder holds modules with names of others.
Standard input and output carry one JSON object a line. Imports of kvstore only what LMCache imports: our adapter.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os
import shutil
import sys
import time
from typing import Any

for _name in [name for name in os.environ if name.startswith(("KVSTORE_", "LMCACHE_"))]:
    del os.environ[_name]  # settings of somebody's are not what is compared
os.environ.update({"LMCACHE_TRACK_USAGE": "false", "DO_NOT_TRACK": "1", "LMCACHE_LOG_LEVEL": "ERROR"})

BENCH = "lmcache.cli.commands.bench.l2_adapter_bench"


def _attribute(module: str, name: str) -> Any:
    """What LMCache has under a name; it is no dependency of ours, so nobody checks types here."""
    return getattr(importlib.import_module(module), name)


def specs(folder: str) -> dict[str, dict[str, Any]]:
    """LMCache's configuration of each side. All write into the page cache and sync nothing; all have four threads."""
    return {
        "kvstore": {
            "type": "native_plugin",
            "module_path": "kvstore.integrations.lmcache",
            "class_name": "KVStoreL2",
            "adapter_params": {"remote_url": f"file://{folder}/kvstore?fsync=off&lanes=4"},
        },
        "fs_native": {"type": "fs_native", "base_path": f"{folder}/fs_native", "num_workers": 4},
        "fs": {"type": "fs", "base_path": f"{folder}/fs"},
    }


class Child:
    """What it knows between commands."""

    def __init__(self) -> None:
        self.adapters: dict[str, Any] = {}
        self.numbers = 0

    def open(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Make the adapters below a folder, as LMCache does."""
        parse = _attribute("lmcache.v1.distributed.l2_adapters.config", "parse_args_to_l2_adapters_config")
        create = _attribute("lmcache.v1.distributed.l2_adapters", "create_l2_adapter")
        self.folder = asked["folder"]
        for name, spec in specs(self.folder).items():
            os.makedirs(os.path.join(self.folder, name), exist_ok=True)
            (config,) = parse(argparse.Namespace(l2_adapter=[json.dumps(spec)])).adapters
            self.adapters[name] = create(config)
        versions = {name: importlib.metadata.version(name) for name in ("lmcache", "kvstore")}
        return {"versions": versions, "sides": list(self.adapters)}

    def size(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Objects of one size: `tasks` lists of `keys`, random bytes to store, and as many to load into."""
        import torch

        torch.set_num_threads(1)
        self.tasks, self.keys, self.nbytes = asked["tasks"], asked["keys"], asked["nbytes"]
        total = self.tasks * self.keys * self.nbytes
        make = _attribute(f"{BENCH}.data", "make_memory_objects")
        self.there, self.back = (_attribute(f"{BENCH}.data", "make_aligned_tensor")(total, 4096) for _ in range(2))
        self.stored, self.loaded = (
            [make(buffer, self.keys, self.nbytes, task * self.keys * self.nbytes) for task in range(self.tasks)]
            for buffer in (self.there, self.back)
        )
        self.there.random_(0, 256, generator=torch.Generator().manual_seed(asked["nbytes"]))
        self.back.zero_()
        return {"nbytes": total}

    def fresh(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Keys for the next round: records are written once."""
        make = _attribute(f"{BENCH}.data", "make_object_keys")
        self.round = []
        for _ in range(self.tasks):
            self.round.append(make(self.keys, key_offset=self.numbers))
            self.numbers += self.keys
        return {}

    def once(self, asked: dict[str, Any]) -> dict[str, Any]:
        """One round of one side: seconds by the benchmark's clock, CPU seconds of this process, and what failed."""
        op, side = asked["op"], asked["side"]
        bench = _attribute(f"{BENCH}.runner", "bench_store" if op == "store" else "bench_load")
        objects = self.stored if op == "store" else self.loaded
        before = time.process_time()
        result = bench(
            self.adapters[side], in_flight=self.tasks, num_keys=self.keys, data_size=self.nbytes, rounds=1,
            keys_for_round=lambda _: self.round, objs_for_round=lambda _: objects, log=lambda _: None,
        )  # fmt: skip
        cpu = time.process_time() - before
        failed = self.tasks * self.keys - sum(result.success_counts)
        if not result.round_durations:
            return {"seconds": None, "cpu": cpu, "failed": failed, "verified": False}
        verified = True
        if op == "load":
            import torch

            verified = bool(torch.equal(self.there, self.back))
        return {"seconds": result.round_durations[0], "cpu": cpu, "failed": failed, "verified": verified}

    def memcpy(self, asked: dict[str, Any]) -> dict[str, Any]:
        """The bytes of a round copied from memory to memory by one thread: seconds."""
        begin = time.perf_counter()
        self.back.copy_(self.there)
        return {"seconds": time.perf_counter() - begin}

    def forget(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Remove what the round stored, so that the disk and the page cache stay as they were."""
        for adapter in self.adapters.values():
            for keys in self.round:
                adapter.delete(keys)
        return {}

    def close(self, asked: dict[str, Any]) -> dict[str, Any]:
        for adapter in self.adapters.values():
            adapter.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        return {}


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    child = Child()
    commands = {name: getattr(child, name) for name in ("open", "size", "fresh", "once", "memcpy", "forget", "close")}
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            answer = commands[asked["do"]](asked)
        except Exception as error:  # noqa: BLE001 - told to whoever asked
            answer = {"error": f"{type(error).__name__}: {error}"}
        out.write(json.dumps(answer) + "\n")
        out.flush()
    os._exit(0)  # LMCache's threads do not end by themselves


if __name__ == "__main__":
    main()
