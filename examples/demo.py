"""The main job, end to end: a real model's KV cache goes into a store in process A and comes back in process B.

    python examples/demo.py [--tokens N] [--new-tokens N] [--html FILE]

Process A loads SmolLM2-135M-Instruct, prefills a long prompt, generates, and stores the prompt's KV cache in chunks.
Process B opens the same `remote_url`, finds the hit prefix, loads the cache layer by layer and generates. Then the raw
file ceiling of the same run, and a short `kvstore-bench io`. Exits non-zero if anything is not as claimed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # two threads on two shared cores are many times slower
os.environ.setdefault("HF_HUB_OFFLINE", "1")

PARAGRAPHS = (
    "The lighthouse at Cape Morna was built in 1871 by a crew of forty masons who carried every stone up the cliff by "
    "hand. Its keeper, Ada Quill, wrote down the weather four times a day for thirty-one years and never missed one.",
    "A harvest of barley is judged by its moisture first. Above fourteen percent the grain sprouts in the silo; below "
    "eleven it cracks in the mill. Farmers in the valley therefore begin at noon, when the dew has gone.",
    "The committee met on Tuesday to discuss the new tram line. Three routes were proposed: along the river, through "
    "the old market, and under the station. The second was the cheapest, and the loudest voices were against it.",
    "Copper conducts better than aluminium, but aluminium weighs a third. Overhead lines are aluminium around a core "
    "of steel; the wires in a wall are copper, because there the space is scarce and the weight is not.",
    "When the ice on the lake is thicker than a hand, the village holds its market on it. Smoked fish, wool, knives "
    "and bread are sold until dark, and children race on sledges between the stalls for a prize of honey.",
    "Every evening the librarian walked the same round: the maps, the letters, the newspapers, the locked cabinet. "
    "In the cabinet lay a single book without a title, and nobody had asked for it in her lifetime.",
)


def prompt_ids(tokenizer: Any, tokens: int) -> Any:
    """A chat prompt of about `tokens` tokens, the same in every process."""
    text, number = [], 0
    while len(tokenizer("\n\n".join(text)).input_ids) < tokens - 60:
        text.append(f"{number + 1}. {PARAGRAPHS[number % len(PARAGRAPHS)]}")
        number += 1
    question = "\n\n".join(text) + "\n\nIn one sentence: what is this collection of notes about?"
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt"
    )
    return ids if hasattr(ids, "shape") else ids["input_ids"]


def load_model(folder: str) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return tokenizer, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def first_token(model: Any, ids: Any, argument: dict[str, Any]) -> tuple[float, Any]:
    """Seconds to the first new token, and the cache afterwards."""
    import torch

    start = time.perf_counter()
    with torch.inference_mode():
        out = model(ids, use_cache=True, logits_to_keep=1, **argument)
        out.logits[0, -1].argmax().item()
    return time.perf_counter() - start, out["cache"] if "cache" in out else out["past_key_values"]


def generate(model: Any, ids: Any, new_tokens: int, eos: int, argument: dict[str, Any]) -> list[int]:
    import torch

    with torch.inference_mode():
        out = model.generate(ids, max_new_tokens=new_tokens, do_sample=False, pad_token_id=eos, **argument)
    tokens: list[int] = out[0, ids.shape[1] :].tolist()
    return tokens


def process_a(args: argparse.Namespace) -> dict[str, Any]:
    """Prefill cold, store the prompt's cache, generate."""
    import kvstore
    from kvstore.integrations.transformers import KVCacheStore

    tokenizer, model = load_model(args.model)
    ids = prompt_ids(tokenizer, args.tokens)
    first_token(model, ids[:, :64], {})  # warm up the allocator and the kernels
    with kvstore.open_store(args.url) as store:
        kv = KVCacheStore(store, model)
        before = kv.load(ids)[1]
        ttft, cache = first_token(model, ids, {})
        saved = kv.save(ids, cache)
        output = generate(model, ids, args.new_tokens, tokenizer.eos_token_id, {})
    return {
        "prompt": ids.shape[1], "hit_before": before, "ttft": ttft, "output": output,
        "text": tokenizer.decode(output, skip_special_tokens=True), **saved._asdict(),
    }  # fmt: skip


def process_b(args: argparse.Namespace) -> dict[str, Any]:
    """Find the hit prefix, load it layer by layer, compute the rest, generate."""
    import kvstore
    from kvstore.integrations.transformers import KVCacheStore

    tokenizer, model = load_model(args.model)
    ids = prompt_ids(tokenizer, args.tokens)
    first_token(model, ids[:, :64], {})
    with kvstore.open_store(args.url) as store:
        kv = KVCacheStore(store, model)
        kv.load(ids)  # once before the clock: page cache and allocator, as on a node that serves
        loads = []
        for _ in range(3):
            start = time.perf_counter()
            cache, hit = kv.load(ids)
            loads.append(time.perf_counter() - start)
        ttft = 0.0
        if hit:
            ttft, cache = first_token(model, ids[:, hit:], kv.cache_argument(cache))
        fresh, hit = kv.load(ids)
        output = generate(model, ids, args.new_tokens, tokenizer.eos_token_id, kv.cache_argument(fresh))
        nbytes = kv.layout.chunk_bytes(hit, kv.context.dtype) if hit else 0
        backends = sorted(store.stats()["backends"])
    load = sorted(loads)[len(loads) // 2]
    return {
        "hit": hit, "load": load, "ttft": load + ttft, "output": output, "nbytes": nbytes, "backends": backends,
        "text": tokenizer.decode(output, skip_special_tokens=True),
    }  # fmt: skip


def raw_read_speed(folder: Path) -> float:
    """GB/s of plain preadv over the stored files, into memory that is reused: the ceiling. Imports nothing of ours."""
    files = [path for path in folder.rglob("*.kv") if path.is_file()]
    buffer = bytearray(max(path.stat().st_size for path in files))
    times = []
    for _ in range(5):
        total, start = 0, time.perf_counter()
        for path in files:
            fd = os.open(path, os.O_RDONLY)
            total += os.preadv(fd, [buffer], 0)
            os.close(fd)
        times.append(total / (time.perf_counter() - start) / 1e9)
    return sorted(times)[len(times) // 2]


def child(role: str, args: argparse.Namespace) -> dict[str, Any]:
    """Run one process and read its result."""
    command = [sys.executable, __file__, "--role", role, "--url", args.url, "--model", args.model]
    command += ["--tokens", str(args.tokens), "--new-tokens", str(args.new_tokens)]
    done = subprocess.run(command, check=False, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"process {role.upper()} failed with status {done.returncode}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048, help="length of the prompt (default 2048)")
    parser.add_argument("--new-tokens", type=int, default=24, help="tokens to generate (default 24)")
    parser.add_argument("--html", default="out/kvstore-bench-io.html", help="where kvstore-bench writes its report")
    parser.add_argument("--no-bench", action="store_true", help="leave out kvstore-bench")
    parser.add_argument("--role", choices=("a", "b"), help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role:
        print(json.dumps(process_a(args) if args.role == "a" else process_b(args)))
        return 0

    from kvstore.testing.models import smollm2_folder

    print("model: SmolLM2-135M-Instruct (the first time it is downloaded and converted)", flush=True)
    args.model = str(smollm2_folder().resolve())
    wrong: list[str] = []
    with tempfile.TemporaryDirectory(prefix="kvstore-demo-") as folder:
        args.url = f"file://{folder}"
        print(f"store: {args.url}", flush=True)
        print("process A: prefill, store, generate …", flush=True)
        a = child("a", args)
        print("process B: load, generate …", flush=True)
        b = child("b", args)
        ceiling = raw_read_speed(Path(folder))
    speed = b["nbytes"] / b["load"] / 1e9
    lines = (
        ("prompt", f"{a['prompt']} tokens"),
        ("stored by A", f"{a['stored']} chunks, {a['nbytes'] / 1e6:.1f} MB"),
        ("hit prefix in B", f"{b['hit']} tokens"),
        ("TTFT cold (A, prefill)", f"{a['ttft'] * 1e3:.0f} ms"),
        ("TTFT from the store (B)", f"{b['ttft'] * 1e3:.0f} ms, {b['load'] * 1e3:.0f} ms of it loading"),
        ("ratio", f"{a['ttft'] / b['ttft']:.1f} times faster"),
        ("load into the cache", f"{speed:.2f} GB/s verified and transposed; raw file read {ceiling:.2f} GB/s"),
        ("text", "identical" if a["output"] == b["output"] else "DIFFERENT"),
        ("answer", b["text"].strip()),
    )
    width = max(len(name) for name, _ in lines)
    print("\n".join(f"  {name:<{width}}  {value}" for name, value in lines), flush=True)
    chunks = a["prompt"] // 256
    checks = (
        (a["hit_before"] == 0, f"a fresh store already had {a['hit_before']} tokens"),
        (a["stored"] == chunks == a["chunks"], f"A stored {a['stored']} chunks instead of {chunks}"),
        (b["hit"] == min(chunks * 256, a["prompt"] - 1), f"B found {b['hit']} tokens instead of {chunks * 256}"),
        (a["output"] == b["output"], "the texts of A and B differ"),
        (b["ttft"] < a["ttft"], "loading was not faster than computing"),
    )
    wrong += [message for good, message in checks if not good]

    if not args.no_bench:
        print("\nkvstore-bench io --quick", flush=True)
        Path(args.html).parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "kvstore_bench", "io", "--quick", "--html", args.html]
        if subprocess.run(command, check=False).returncode:
            wrong.append("kvstore-bench failed")
        elif not Path(args.html).is_file():
            wrong.append(f"kvstore-bench wrote no report to {args.html}")
        else:
            print(f"report: {args.html}")
    for message in wrong:
        print(f"NOT AS CLAIMED: {message}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
