"""LMCache's own CacheGen, run by an interpreter that has LMCache; `codec_lmcache` talks to it. Imports nothing of ours.

Run it with `python -I`: this folder holds modules with names of the standard library's.

Standard input and output carry one JSON object a line. What is run is `lmcache.v1.storage_backend.naive_serde`:
`CreateSerde("cachegen", …)`, whose `serialize` quantises with torch, makes the CDFs of the chunk and codes them by
LMCache's device operations (on a CPU: its numba coder), and pickles; and whose `deserialize` undoes that.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import itertools
import json
import os
import sys
import time
from typing import Any

os.environ["LMCACHE_TRACK_USAGE"] = "false"
os.environ["DO_NOT_TRACK"] = "1"
os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")


def _attribute(module: str, name: str) -> Any:
    """What LMCache has under a name; it is no dependency of ours, so nobody checks types here."""
    return getattr(importlib.import_module(module), name)


class _Chunk:
    """As much of LMCache's MemoryObj as its serializer looks at: a tensor on the CPU without a lazy allocator."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor

    def parent(self) -> None:
        return None


class CacheGen:
    """Its serializer and deserializer for one model.

    Args:
        model: folder of the model; LMCache derives the bins from its configuration.
        bins: None for what LMCache picks; else this many for every layer of K and V.
        chunk: tokens per chunk, at most.
    """

    def __init__(self, model: str, bins: int | None, layers: int, heads: int, width: int, chunk: int) -> None:
        os.environ["HF_HUB_OFFLINE"] = "1"
        device = _attribute("lmcache", "torch_device_type")
        if device != "cpu":
            raise RuntimeError(f"LMCache would use {device!r}, not the CPU")
        import torch

        torch.set_num_threads(1)
        self.torch = torch
        shape = (layers, 2, chunk, heads, width)
        metadata = _attribute("lmcache.v1.metadata", "LMCacheMetadata")(
            model_name=model, world_size=1, local_world_size=1, worker_id=0, local_worker_id=0,
            kv_dtype=torch.bfloat16, kv_shape=shape, chunk_size=chunk, role="worker",
        )  # fmt: skip
        of_config = _attribute("lmcache.v1.config", "LMCacheEngineConfig")
        config = of_config.from_defaults(chunk_size=chunk, remote_serde="cachegen")
        create = _attribute("lmcache.v1.storage_backend.naive_serde", "CreateSerde")
        self.serializer, self.deserializer = create("cachegen", metadata, config)
        if bins is not None:
            for serde in (self.serializer, self.deserializer):
                serde.key_bins[:] = bins
                serde.value_bins[:] = bins
        self.layers, self.heads, self.width = layers, heads, width
        self.bins = [each.int().tolist() for each in (self.serializer.key_bins, self.serializer.value_bins)]

    def tensor(self, path: str) -> Any:
        """A chunk as LMCache has it, `[2, layers, tokens, heads · width]` bfloat16, from a file of our segments: per
        layer K and then V, `[tokens, heads, width]`."""
        with open(path, "rb") as file:
            flat = self.torch.frombuffer(bytearray(file.read()), dtype=self.torch.bfloat16)
        return flat.view(self.layers, 2, -1, self.heads * self.width).transpose(0, 1).contiguous()

    def encode(self, tensor: Any) -> bytes:
        return bytes(self.serializer.serialize(_Chunk(tensor)).byte_array)

    def decode(self, data: bytes) -> Any:
        buffer = _attribute("lmcache.v1.memory_management", "BytesBufferMemoryObj")(data)
        tensor = self.deserializer.deserialize(buffer).tensor
        return tensor.view(2, self.layers, -1, self.heads * self.width)


class Child:
    """What it knows between commands."""

    def __init__(self) -> None:
        self.serde: dict[str, CacheGen] = {}
        self.loaded: list[Any] = []

    def open(self, asked: dict[str, Any]) -> dict[str, Any]:
        made = CacheGen(asked["model"], asked["bins"], asked["layers"], asked["heads"], asked["width"], asked["chunk"])
        self.serde[asked["name"]] = made
        return {"version": importlib.metadata.version("lmcache"), "k_bins": made.bins[0], "v_bins": made.bins[1]}

    def through(self, asked: dict[str, Any]) -> dict[str, Any]:
        """A chunk there and back: the stored bytes, and a file with what came back."""
        serde = self.serde[asked["name"]]
        data = serde.encode(serde.tensor(asked["path"]))
        back = serde.decode(data).transpose(0, 1).contiguous().view(serde.torch.uint8)
        with open(asked["out"], "wb") as file:
            file.write(back.numpy().tobytes())
        return {"nbytes": len(data)}

    def load(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Chunks to time."""
        serde = self.serde[asked["name"]]
        self.loaded = [serde.tensor(path) for path in asked["paths"]]
        return {}

    def once(self, asked: dict[str, Any]) -> dict[str, Any]:
        """The loaded chunks encoded and decoded: seconds of each."""
        serde = self.serde[asked["name"]]
        moments = [(time.perf_counter(), time.process_time())]
        data = [serde.encode(tensor) for tensor in self.loaded]
        moments.append((time.perf_counter(), time.process_time()))
        for each in data:
            serde.decode(each)
        moments.append((time.perf_counter(), time.process_time()))
        (encode_s, encode_cpu_s), (decode_s, decode_cpu_s) = (
            (after[0] - before[0], after[1] - before[1]) for before, after in itertools.pairwise(moments)
        )
        return {"encode_s": encode_s, "decode_s": decode_s, "encode_cpu_s": encode_cpu_s, "decode_cpu_s": decode_cpu_s}


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    child = Child()
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            commands = {"open": child.open, "through": child.through, "load": child.load, "once": child.once}
            answer = commands[asked["do"]](asked)
        except Exception as error:  # noqa: BLE001 - told to whoever asked
            answer = {"error": f"{type(error).__name__}: {error}"}
        out.write(json.dumps(answer) + "\n")
        out.flush()


if __name__ == "__main__":
    main()
