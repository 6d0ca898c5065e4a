"""The main job, end to end: a real model's KV cache goes into a store in process A and comes back in process B.

    python examples/demo.py [--url URL] [--tokens N] [--new-tokens N] [--html FILE]      (or: make demo [URL=...])

Process A loads SmolLM2-135M-Instruct, prefills a long prompt, generates, and stores the prompt's KV cache in chunks.
Process B opens the same `remote_url`, finds the hit prefix, loads the cache layer by layer and generates. Then the raw
file ceiling of the same run (for file URLs), and a short `kvstore-bench io`. The store is a temporary folder, or
`--url`; the keys are of this run only, and what was stored is deleted again at the end.

Exit status: 0 as claimed · 1 something is not as claimed · 2 an argument or the URL makes no sense · 130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # two threads on two shared cores are many times slower
os.environ.setdefault("HF_HUB_OFFLINE", "1")

CHUNK_TOKENS = 256
TOO_SHORT = (
    f"the prompt has {{}} tokens, and one shorter than a chunk ({CHUNK_TOKENS} tokens) stores nothing; "
    "use for instance --tokens 512"
)

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
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    transformers.utils.logging.disable_progress_bar()
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
    from kvstore.keys import chunk_keys

    tokenizer, model = load_model(args.model)
    ids = prompt_ids(tokenizer, args.tokens)
    if ids.shape[1] < CHUNK_TOKENS:
        sys.exit(complain(TOO_SHORT.format(ids.shape[1])))
    first_token(model, ids[:, :64], {})  # warm up the allocator and the kernels
    with kvstore.open_store(args.url, chunk_size=CHUNK_TOKENS) as store:
        kv = KVCacheStore(store, model, cache_salt=args.salt)
        keys = chunk_keys(ids[0], context=kv.context, chunk_size=CHUNK_TOKENS)
        try:
            before = kv.load(ids)[1]
            ttft, cache = first_token(model, ids, {})
            saved = kv.save(ids, cache)
            output = generate(model, ids, args.new_tokens, tokenizer.eos_token_id, {})
        except BaseException:  # also Ctrl-C: nobody else knows these keys yet
            store.delete_many(keys)
            raise
    if saved.error is not None:
        print(f"process A could not store {saved.failed} chunks: {saved.error}", file=sys.stderr)
    return {
        "prompt": ids.shape[1], "hit_before": before, "ttft": ttft, "output": output,
        "text": tokenizer.decode(output, skip_special_tokens=True), "keys": [key.hex() for key in keys],
        **saved._replace(error=None)._asdict(),
    }  # fmt: skip


def process_b(args: argparse.Namespace) -> dict[str, Any]:
    """Find the hit prefix, load it layer by layer, compute the rest, generate."""
    import kvstore
    from kvstore.integrations.transformers import KVCacheStore

    tokenizer, model = load_model(args.model)
    ids = prompt_ids(tokenizer, args.tokens)
    first_token(model, ids[:, :64], {})
    with kvstore.open_store(args.url, chunk_size=CHUNK_TOKENS) as store:
        kv = KVCacheStore(store, model, cache_salt=args.salt)
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
        near = through_memory(model, ids, fresh, hit, args.salt)
        output = generate(model, ids, args.new_tokens, tokenizer.eos_token_id, kv.cache_argument(fresh))
        nbytes = kv.layout.chunk_bytes(hit, kv.context.dtype) if hit else 0
        backends = sorted(store.stats()["backends"])
    load = sorted(loads)[len(loads) // 2]
    return {
        "hit": hit, "load": load, "ttft": load + ttft, "output": output, "nbytes": nbytes, "backends": backends,
        "text": tokenizer.decode(output, skip_special_tokens=True), "near": near,
    }  # fmt: skip


def through_memory(model: Any, ids: Any, cache: Any, hit: int, salt: str | None) -> float:
    """Put the loaded cache into `memory://` and take it out again; seconds of the load, 0.0 if it is not the same."""
    import torch

    import kvstore
    from kvstore.integrations.transformers import KVCacheStore

    if not hit:
        return 0.0
    with kvstore.open_store("memory://?bytes=4GiB", chunk_size=CHUNK_TOKENS) as store:
        kv = KVCacheStore(store, model, cache_salt=salt)
        kv.save(ids[:, :hit], cache)
        kv.load(ids)
        start = time.perf_counter()
        again, found = kv.load(ids)
        seconds = time.perf_counter() - start
    same = found == hit and all(
        torch.equal(one.keys, other.keys) and torch.equal(one.values, other.values)
        for one, other in zip(again.layers, cache.layers, strict=True)
    )
    return seconds if same else 0.0


def raw_read_speed(folder: Path, keys: Sequence[str]) -> float | None:
    """GB/s of plain preadv over the files of these keys, into reused memory: the ceiling. None without files."""
    files = [path for path in (folder / key[:2] / f"{key}.kv" for key in keys) if path.is_file()]
    if not files:
        return None
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


def remove(url: str, keys: Sequence[str]) -> str:
    """Delete what process A stored. Returns what went wrong, or ""."""
    import kvstore
    from kvstore.errors import KVStoreError
    from kvstore.keys import Key

    try:
        with kvstore.open_store(url) as store:
            outcomes = store.delete_many([Key.fromhex(key) for key in keys])
    except KVStoreError as error:
        return f"what was stored could not be deleted: {error}"
    wrong = [outcome.error for outcome in outcomes if outcome.error is not None]
    return f"{len(wrong)} chunks could not be deleted: {wrong[0]}" if wrong else ""


def complain(message: str) -> int:
    print(f"demo: {message}", file=sys.stderr)
    return 2


def wait_for(command: Sequence[str], stdout: int | None = None) -> tuple[int, str]:
    """Run a program. After Ctrl-C, which it gets too, it has time to clean up before it is killed."""
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=stdout, text=True) as process:
        try:
            said, _ = process.communicate()
        except KeyboardInterrupt:
            try:
                process.wait(30)
            except (subprocess.TimeoutExpired, KeyboardInterrupt):
                process.kill()
            raise
    if process.returncode in (130, -signal.SIGINT):
        raise KeyboardInterrupt
    return process.returncode, said or ""


def child(role: str, args: argparse.Namespace) -> dict[str, Any]:
    """Run one process and read its result."""
    command = [sys.executable, __file__, "--role", role, "--url", args.url, "--model", args.model]
    command += ["--tokens", str(args.tokens), "--new-tokens", str(args.new_tokens)]
    command += ["--salt", args.salt]
    status, said = wait_for(command, subprocess.PIPE)
    if status == 2:  # it has said why
        sys.exit(2)
    if status:
        sys.exit(f"process {role.upper()} failed with status {status}")
    result: dict[str, Any] = json.loads(said.splitlines()[-1])
    return result


def main(argv: Sequence[str] | None = None) -> int:
    try:
        return run(argv)
    except KeyboardInterrupt:
        if "--role" not in (sys.argv if argv is None else argv):
            print("demo: interrupted", file=sys.stderr)
        return 130


def run(argv: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="the store, shared by two processes, e.g. s3://… (default: a temporary folder)")
    parser.add_argument("--tokens", type=int, default=2048, help="length of the prompt (default 2048)")
    parser.add_argument("--new-tokens", type=int, default=24, help="tokens to generate (default 24)")
    parser.add_argument("--html", default="out/kvstore-bench-io.html", help="where kvstore-bench writes its report")
    parser.add_argument("--no-bench", action="store_true", help="leave out kvstore-bench")
    parser.add_argument("--role", choices=("a", "b"), help=argparse.SUPPRESS)
    parser.add_argument("--salt", default="", help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    from kvstore.errors import ConfigError, KVStoreError
    from kvstore.registry import parse_url

    if args.role:
        try:
            print(json.dumps(process_a(args) if args.role == "a" else process_b(args)))
        except KVStoreError as error:
            return complain(str(error))
        return 0
    if args.tokens < CHUNK_TOKENS:
        return complain(TOO_SHORT.format(args.tokens))
    if args.new_tokens < 1:
        return complain(f"--new-tokens must be at least 1, not {args.new_tokens}")
    try:
        given = parse_url(args.url) if args.url else None
    except ConfigError as error:
        return complain(str(error))
    if given is not None and given.scheme == "memory":
        return complain("memory:// lies in one process, and the demo has two; use file://, s3:// or no --url")

    from kvstore.testing.models import smollm2_folder

    print("model: SmolLM2-135M-Instruct (the first time it is downloaded and converted)", flush=True)
    try:
        args.model = str(smollm2_folder().resolve())
    except ConfigError as error:
        return complain(str(error))
    wrong: list[str] = []
    on_files = given is None or given.scheme == "file"
    with tempfile.TemporaryDirectory(prefix="kvstore-demo-") as folder:
        args.url = args.url or f"file://{folder}"
        args.salt = f"demo-{secrets.token_hex(8)}"
        print(f"store: {given or args.url}", flush=True)
        print("process A: prefill, store, generate …", flush=True)
        a = child("a", args)
        print("process B: load, generate …", flush=True)
        try:
            b = child("b", args)
            ceiling = raw_read_speed(Path(given.path if given else folder), a["keys"]) if on_files else None
        finally:
            left = remove(args.url, a["keys"])
            if left:
                print(f"demo: {left}", file=sys.stderr)
    wrong += [left] if left else []
    speed = b["nbytes"] / b["load"] / 1e9
    raw = "" if ceiling is None else f"; raw file read {ceiling:.2f} GB/s"
    lines = (
        ("prompt", f"{a['prompt']} tokens"),
        ("stored by A", f"{a['stored']} chunks, {a['nbytes'] / 1e6:.1f} MB"),
        ("hit prefix in B", f"{b['hit']} tokens"),
        ("TTFT cold (A, prefill)", f"{a['ttft'] * 1e3:.0f} ms"),
        ("TTFT from the store (B)", f"{b['ttft'] * 1e3:.0f} ms, {b['load'] * 1e3:.0f} ms of it loading"),
        ("ratio", f"{a['ttft'] / b['ttft']:.1f} times faster"),
        ("load into the cache", f"{speed:.2f} GB/s verified and transposed{raw}"),
        ("from memory:// instead", f"{b['near'] * 1e3:.0f} ms loading"),
        ("text", "identical" if a["output"] == b["output"] else "DIFFERENT"),
        ("answer", b["text"].strip()),
    )
    width = max(len(name) for name, _ in lines)
    print("\n".join(f"  {name:<{width}}  {value}" for name, value in lines), flush=True)
    chunks = a["prompt"] // CHUNK_TOKENS
    checks = [
        (a["hit_before"] == 0, f"a fresh store already had {a['hit_before']} tokens"),
        (a["stored"] == chunks == a["chunks"], f"A stored {a['stored']} chunks instead of {chunks}"),
        (b["hit"] == min(chunks * CHUNK_TOKENS, a["prompt"] - 1), f"B found {b['hit']} of {a['prompt']} tokens"),
        (a["output"] == b["output"], "the texts of A and B differ"),
        (b["near"] > 0, "memory:// gave back another cache"),
    ]
    if on_files:  # over a network that depends on the network: the figures above say it
        checks.append((b["ttft"] < a["ttft"], "loading was not faster than computing"))
    wrong += [message for good, message in checks if not good]

    if not args.no_bench:
        print("\nkvstore-bench io --quick", flush=True)
        Path(args.html).parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "kvstore_bench", "io", "--quick", "--html", args.html]
        if wait_for(command)[0]:
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
