"""What answers lose by blending, as the CacheBlend paper measures it: full prefill, full reuse and blend on real tasks.

    python examples/blend_quality_7b.py --model FOLDER 2wikimqa.jsonl musique.jsonl samsum.jsonl multi_news.jsonl
                                        [--samples N] [--ratios 0.05,0.15,0.3] [--url URL] [--json FILE]
    python examples/blend_quality_7b.py                              (SmolLM2 on a sample file: that it works)

Data files are LongBench's (github.com/THUDM/LongBench, `data/*.jsonl`): one JSON object a line, with `input` (question
or dialogue), `context` (passages, or examples), `answers` (a list) and `dataset` ("2wikimqa", "musique", "samsum",
"multi_news"). Files of your own may leave `dataset` out, if they are named so. 2WikiMQA and Musique are scored by F1 of
words, SAMSum and MultiNews by ROUGE-L, both as LongBench does, the best of the answers.

A context is cut into chunks of `--chunk` tokens, as in the paper (512). Each is stored once, behind the instruction
(`shared_prefix`) and alone, and every sample is answered after a full prefill, after plain reuse of chunks stored
alone, and blended. Instruct models are asked in their chat template, as in LongBench (not for SAMSum). A model of 7B in
bf16 takes 15 GB of a GPU, and a chunk of 512 tokens 64 MiB (Mistral-7B, Llama-3-8B) in `--url`. The paper saw at most
0.02 lost at r = 0.15, and 0.1 to 0.2 more lost by plain reuse.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import string
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

_MARK = "@@context@@"
SAMPLE_FILE = Path(__file__).parent / "blend_quality_sample.jsonl"


@dataclass(frozen=True)
class Task:
    """How a data set is asked and scored; prompts as in LongBench.

    Attributes:
        before: text before the context, the same for all samples.
        behind: what comes behind it; `{input}` is the sample's.
        new_tokens: most tokens of an answer.
        score: (answer, truth) → 0 to 1.
        first_line: only the first line of an answer counts.
    """

    before: str
    behind: str
    new_tokens: int
    score: Callable[[str, str], float]
    first_line: bool = True


def normalised(text: str) -> list[str]:
    """Words in lower case, without punctuation and articles (SQuAD)."""
    plain = "".join(each for each in text.lower() if each not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", plain).split()


def f1(answer: str, truth: str) -> float:
    """F1 of the words that both have."""
    mine, theirs = normalised(answer), normalised(truth)
    common = sum((Counter(mine) & Counter(theirs)).values())
    if not common:
        return float(mine == theirs)
    precision, recall = common / len(mine), common / len(theirs)
    return 2 * precision * recall / (precision + recall)


def rouge_l(answer: str, truth: str) -> float:
    """F1 of the longest common subsequence of words (Lin 2004, β = 1)."""
    mine, theirs = re.findall(r"\w+", answer.lower()), re.findall(r"\w+", truth.lower())
    if not mine or not theirs:
        return 0.0
    row = [0] * (len(theirs) + 1)
    for word in mine:
        diagonal = 0
        for place, other in enumerate(theirs, 1):
            above = row[place]
            row[place] = diagonal + 1 if word == other else max(above, row[place - 1])
            diagonal = above
    return 2 * row[-1] / (len(mine) + len(theirs))


_ASK = "Answer the question based on the given passages. Only give me the answer and do not output any other words.\n\n"
_QUESTION = Task(f"{_ASK}The following are given passages.\n", f"\n\n{_ASK}Question: {{input}}\nAnswer:", 32, f1)
TASKS = {
    "2wikimqa": _QUESTION,
    "musique": _QUESTION,
    "samsum": Task(
        "Summarize the dialogue into a few short sentences. The following are some examples.\n\n", "\n\n{input}", 128,
        rouge_l,
    ),
    "multi_news": Task(
        "You are given several news passages. Write a one-page summary of all news.\n\nNews:\n",
        "\n\nNow, write a one-page summary of all the news.\n\nSummary:", 512, rouge_l, first_line=False,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Sample:
    """One line of a data file."""

    dataset: str
    context: str
    input: str
    answers: tuple[str, ...]


def read_samples(path: Path, most: int) -> Iterator[Sample]:
    """The first samples of a file. Raises `SystemExit` that names the line for anything that is none."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SystemExit(f"{str(path)!r} cannot be read: {error}") from error
    given = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not given:
        raise SystemExit(f"{str(path)!r} has no samples")
    for number, line in given[:most]:
        where = f"{str(path)!r}, line {number}"
        try:
            fields = json.loads(line)
            dataset = str(fields.get("dataset") or path.stem).removesuffix("_e")
            answers = tuple(map(str, fields["answers"]))
            sample = Sample(dataset, str(fields["context"]), str(fields["input"]), answers)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise SystemExit(f"{where} is no sample with input, context and answers: {error!r}") from error
        if dataset not in TASKS:
            raise SystemExit(f"{where}: dataset {dataset!r} is not one of {', '.join(TASKS)}")
        if not answers or not sample.context:
            raise SystemExit(f"{where} has no {'answers' if not answers else 'context'}")
        yield sample


def best_score(task: Task, answer: str, truths: Sequence[str]) -> float:
    """The best over all answers that count as right."""
    given = answer.strip().split("\n")[0] if task.first_line else answer.strip()
    return max(task.score(given, truth) for truth in truths)


@dataclass
class Scored:
    """One sample, one way."""

    dataset: str
    way: str
    score: float
    ttft_s: float
    tokens: int
    answer: str


class Judge:
    """A model, and a store in which chunks are kept in both forms."""

    def __init__(self, folder: Path, url: str, *, chunk: int, longest: int, pool: str, most: int | None) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils.logging import disable_progress_bar

        import kvstore

        quiet: Any = disable_progress_bar
        quiet()
        self.torch, self.chunk, self.longest, self.most = torch, chunk, longest, most
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        if self.device == "cpu":
            torch.set_num_threads(1)
        dtype = torch.bfloat16 if self.device == "cuda" else torch.float32
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        self.model: Any = loaded.to(self.device).eval()
        self.store = kvstore.open_store(url, enable_blending=True, blend_min_tokens=16, buffer_pool_bytes=pool)
        self._blenders: dict[tuple[str, str], Any] = {}

    def blender(self, before: str, form: str) -> Any:
        from kvstore.blend import Blender

        if (before, form) not in self._blenders:
            self._blenders[before, form] = Blender(
                self.model, self.store, {"enable_blending": True, "blend_form": form, "blend_min_tokens": 16},
                tokenizer=self.tokenizer, prefix=before, revision="judge",
            )  # fmt: skip
        return self._blenders[before, form]

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        return ids

    def framed(self, task: Task, sample: Sample) -> tuple[str, str]:
        """Text before the context and behind it, in the model's chat template if it has one."""
        before, behind = task.before, task.behind.replace("{input}", sample.input)
        if sample.dataset == "samsum" or not self.tokenizer.chat_template:
            return before, behind
        text = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": _MARK}], tokenize=False, add_generation_prompt=True
        )
        begin, _, end = text.partition(_MARK)
        return begin + before, behind + end

    def chunks(self, context: str, room: int) -> list[list[int]]:
        """A context as chunks of ids; if it is longer than `room` tokens, those in the middle are left out, as in
        LongBench."""
        ids = self.encode(context)
        chunks = [ids[begin : begin + self.chunk] for begin in range(0, len(ids), self.chunk)]
        while len(chunks) > 1 and sum(map(len, chunks)) > room:
            del chunks[len(chunks) // 2]
        return chunks

    def judge(self, sample: Sample, ratios: Sequence[float]) -> Iterator[Scored]:
        """Every way to answer a sample."""
        task = TASKS[sample.dataset]
        before, behind = self.framed(task, sample)
        question = self.encode(behind)
        alone, shared = (self.blender(before, form) for form in ("alone", "shared_prefix"))
        room = self.longest - len(alone.prefix) - len(question) - self._new_tokens(task)
        chunks = self.chunks(sample.context, room)
        ids = self.torch.tensor([alone.prefix.tolist() + [each for chunk in chunks for each in chunk] + question])
        ids = ids.to(self.device)
        begin = self._now()
        with self.torch.inference_mode():
            out = self.model(ids, use_cache=True, logits_to_keep=1)
        seconds = self._now() - begin
        cache = out["cache"] if "cache" in out else out["past_key_values"]
        cache.crop(-1)
        yield self._scored(sample, "full prefill", seconds, ids, alone.cache_argument(cache))
        ways = [("full reuse", alone, 0.0), *((f"blend {ratio:g}", shared, ratio) for ratio in ratios)]
        for blender in (alone, shared):
            stored = blender.precompute(chunks)
            if stored.failed:
                raise SystemExit(f"{stored.failed} chunks could not be stored: {stored.error}")
        for name, blender, ratio in ways:
            begin = self._now()
            cache, report = blender.blend([*chunks, question], ratio=ratio)
            seconds = self._now() - begin
            if report.lost or report.misses:
                raise SystemExit(f"{report.misses} chunks were not there any more; give --url more room")
            yield self._scored(sample, name, seconds, report.input_ids, blender.cache_argument(cache))

    def _new_tokens(self, task: Task) -> int:
        return task.new_tokens if self.most is None else min(self.most, task.new_tokens)

    def _now(self) -> float:
        if self.device == "cuda":
            self.torch.cuda.synchronize()
        return time.perf_counter()

    def _scored(self, sample: Sample, way: str, seconds: float, ids: Any, given: dict[str, Any]) -> Scored:
        task = TASKS[sample.dataset]
        with self.torch.inference_mode():
            out = self.model.generate(
                ids, attention_mask=self.torch.ones_like(ids), max_new_tokens=self._new_tokens(task), do_sample=False,
                pad_token_id=self.tokenizer.eos_token_id, **given,
            )  # fmt: skip
        answer = self.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
        score = best_score(task, answer, sample.answers)
        return Scored(sample.dataset, way, score, seconds, ids.shape[1], answer.strip())


def table(rows: Sequence[Scored]) -> str:
    """Means per data set and way."""
    lines = [f"{'data set':<12} {'way':<14} {'samples':>7} {'score':>7} {'lost':>7} {'TTFT s':>8} {'of full':>8}"]
    for dataset in dict.fromkeys(row.dataset for row in rows):
        some = [row for row in rows if row.dataset == dataset]
        full = [row for row in some if row.way == "full prefill"]
        whole, prefill = (statistics.fmean(values) for values in zip(*((r.score, r.ttft_s) for r in full), strict=True))
        for way in dict.fromkeys(row.way for row in some):
            mine = [row for row in some if row.way == way]
            score, seconds = statistics.fmean(r.score for r in mine), statistics.fmean(r.ttft_s for r in mine)
            lines.append(
                f"{dataset:<12} {way:<14} {len(mine):>7} {score:>7.3f} {whole - score:>+7.3f} {seconds:>8.3f} "
                f"{seconds / prefill:>8.2f}"
            )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("data", nargs="*", type=Path, help="LongBench's .jsonl files (default: a sample of all four)")
    parser.add_argument("--model", type=Path, help="a folder that transformers loads (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--samples", type=int, default=200, help="of each file (default 200)")
    parser.add_argument("--ratios", default="0.05,0.15,0.3", help="r of blending (default 0.05,0.15,0.3)")
    parser.add_argument("--chunk", type=int, default=512, help="tokens of a chunk (default 512)")
    parser.add_argument("--max-tokens", type=int, help="longest prompt (default: what the model knows positions for)")
    parser.add_argument("--new-tokens", type=int, help="most tokens of an answer (default: as LongBench has them)")
    parser.add_argument("--url", default="memory://?bytes=16GiB", help="where chunks are kept (default: 16 GiB of RAM)")
    parser.add_argument("--pool", default="2GiB", help="memory for loading (default 2GiB)")
    parser.add_argument("--json", type=Path, help="write every answer and its score into this file")
    args = parser.parse_args(argv)
    from kvstore.errors import KVStoreError

    try:
        ratios = [float(each) for each in args.ratios.split(",")]
        if (
            not ratios
            or not all(0 <= ratio <= 1 for ratio in ratios)
            or min(args.samples, args.chunk, args.new_tokens or 1) < 1
        ):
            raise SystemExit(
                f"--ratios {args.ratios} must lie between 0 and 1, --samples, --chunk and --new-tokens be at least 1"
            )
        samples = [each for path in args.data or [SAMPLE_FILE] for each in read_samples(path, args.samples)]
        folder = args.model
        if folder is None:
            from kvstore.testing.models import smollm2_folder

            folder = smollm2_folder()
        rows = _run(folder, samples, ratios, args)
    except ValueError as error:
        print(f"blend_quality_7b.py: --ratios: {error}", file=sys.stderr)
        return 2
    except (KVStoreError, SystemExit) as error:
        print(f"blend_quality_7b.py: {error}", file=sys.stderr)
        return 2
    print(table(rows))
    if args.json:
        args.json.write_text(json.dumps([vars(row) for row in rows], indent=1, ensure_ascii=False), encoding="utf-8")
    return 0


def _run(folder: Path, samples: Sequence[Sample], ratios: Sequence[float], args: argparse.Namespace) -> list[Scored]:
    from transformers import AutoConfig

    longest = args.max_tokens or int(AutoConfig.from_pretrained(folder).max_position_embeddings)
    judge = Judge(folder, args.url, chunk=args.chunk, longest=longest, pool=args.pool, most=args.new_tokens)
    rows: list[Scored] = []
    try:
        for number, sample in enumerate(samples, 1):
            rows += judge.judge(sample, ratios)
            print(f"{number} of {len(samples)}: {sample.dataset}, {rows[-1].tokens} tokens", file=sys.stderr)
    finally:
        judge.store.close()
    return rows


if __name__ == "__main__":
    sys.exit(main())
