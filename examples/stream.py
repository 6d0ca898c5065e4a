"""Stream a prompt's KV into a transformers cache within an SLO, computing with the model what is better computed.

    python examples/stream.py [--url URL] [--tokens N] [--slo SECONDS] [--serde NAME] [--profile FILE]
                              [--hole N]

Prefills once and stores the KV; then streams it back as if in another process, and compares what the model says next.
`KVCacheStore.load_streamed` does it; `measure_prefill` is what to take from here into a program of your own.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

import kvstore
from kvstore.errors import ConfigError
from kvstore.integrations.transformers import KVCacheStore
from kvstore.keys import chunk_keys
from kvstore.stream import PrefillModel, PrefillSample, Streamer


def measure_prefill(model: Any, tokens: int) -> PrefillModel:
    """The model's own curve, from two prefills."""
    samples = []
    for count in (tokens // 4, tokens // 4, tokens):  # the first one warms up
        ids = torch.randint(3, model.config.vocab_size - 1, (1, count))
        begun = time.perf_counter()
        with torch.inference_mode():
            model.model(input_ids=ids)
        samples.append(PrefillSample(0, count, time.perf_counter() - begun))
    return PrefillModel.fit(samples[1:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--url", default="memory://stream")
    parser.add_argument("--tokens", type=int, default=1025)
    parser.add_argument("--slo", type=float, help="seconds; without one it is as fast as possible")
    parser.add_argument("--serde", default="shuffle-zstd", help="the codec (default shuffle-zstd)")
    parser.add_argument("--profile", help="of kvt or cachegen")
    parser.add_argument("--hole", type=int, metavar="N", help="delete chunk N first: the model computes it")
    args = parser.parse_args()
    from kvstore.testing.models import smollm2_folder

    try:
        folder = smollm2_folder()
    except ConfigError as error:
        parser.error(str(error))
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = model.eval()
    text = "The cache of a long prompt is worth more than the time it takes to fetch it. " * args.tokens
    ids = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt")["input_ids"][:, : args.tokens]
    options: dict[str, Any] = {"codec_profile": (args.profile,)} if args.profile else {}
    with kvstore.open_store(args.url, remote_serde=args.serde, chunk_size=128, **options) as store:
        kv = KVCacheStore(store, model, revision="example")
        cache: Any = DynamicCache(config=model.config)
        with torch.inference_mode():
            whole = model(ids, use_cache=True, **kv.cache_argument(cache)).logits[0, -1]
        print("stored:", kv.save(ids, cache))
        if args.hole is not None:
            keys = chunk_keys(ids[0], context=kv.context, chunk_size=store.config.chunk_size)
            store.submit_delete([keys[args.hole]]).result()
        streamer = Streamer(store, prefill=measure_prefill(model, args.tokens), group_chunks=2)
        streamed, held, report = kv.load_streamed(ids, streamer, slo_s=args.slo)
        with torch.inference_mode():
            again = model(ids[:, held:], use_cache=True, **kv.cache_argument(streamed)).logits[0, -1]
    print(report)
    same = int(whole.argmax()) == int(again.argmax())
    print(
        f"next token {'the same' if same else 'another one'}; logits differ by {float((whole - again).abs().max()):.2g}"
    )
    return 0 if same else 1


if __name__ == "__main__":
    raise SystemExit(main())
