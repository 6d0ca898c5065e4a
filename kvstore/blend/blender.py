"""`Blender`: documents stored once, found by their content, and blended into prompts in any order."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import DynamicCache

from kvstore.codec import LOSSY
from kvstore.config import Config
from kvstore.errors import ConfigError, KVStoreError
from kvstore.integrations.transformers import KVCacheStore
from kvstore.keys import Key
from kvstore.stream import Policy, PrefillModel, PrefillSample, Speeds, TierOffer, cheapest_tier
from kvstore.stream.shapes import level_sizes
from kvstore.telemetry.requests import report_request

from .arguments import as_documents, as_parts, blend_config, number
from .chunks import Ids, Part, Placed, Prompt, Texts, WindowIndex, join, token_array
from .controller import BLEND_POLICY, Decision, Stored, decide
from .form import ChunkForm
from .loading import ChunkLoader, ChunksLost
from .model import BlendModel
from .recompute import Recompute
from .report import BlendReport, PrecomputeReport
from .storing import Writes
from .terms import BlendSettings, Span

if TYPE_CHECKING:
    from kvstore.prefetch import Prefetcher
    from kvstore.record import Header
    from kvstore.store import Store

    from .selection import Selector

__all__ = ["Blender"]

logger = logging.getLogger("kvstore.blend")

_SAMPLES = 64
_FIRST_SAMPLES = 3  # of a device, by `blend`
_LOOK_AGAIN_S = 30.0  # seconds without loading after which a slow link is tried again
_AT_ONCE = 4  # documents computed before the oldest write of them is waited for


@dataclass(frozen=True)
class _Found:
    """A chunk of a prompt that is stored: where, its header, and whether it is what a prefill would compute there."""

    placed: Placed
    header: Header
    lossless: bool
    exact: bool

    def stored(self) -> Stored:
        return Stored(self.placed.begin, self.placed.end, level_sizes(self.header), self.lossless, self.exact)


class Blender:
    """Stores the KV of documents and blends them into prompts (CacheBlend, arXiv 2405.16444). One thread at a time.

    What is computed over blended chunks is close to a full prefill, not equal to it; so it must be switched on, by the
    option `enable_blending`. A cache made by `blend` must not be saved as one of exact prefixes: nothing can tell.

    Args:
        model: a causal language model of transformers: Llama, Qwen2, Mistral and models that compute as they do.
        store: an open store. It is not closed.
        config: its options `enable_blending` and `blend_*` apply: a `Config`, or a map of these over the store's own;
            None: the store's.
        tokenizer: of the model, for parts that are text; None: all parts are token ids.
        prefix: text or ids that every prompt begins with (a system prompt). The tokenizer's BOS comes before it.
        selection: a `Selector` of your own, in place of the option `blend_selection`.
        prefill: how fast the model computes; None: measured, by `precompute` and by each `blend`.
        bytes_per_s: speed of the link until it is measured; None: not known.
        policy: of the planner; see `kvstore.blend.controller`.
        model_name, revision, lora, cache_salt, prefetcher: as of `KVCacheStore`.

    Attributes:
        settings: of the recompute, with the least share that is computed again.
        prefix: ids that every prompt begins with, BOS and all.

    Raises:
        ConfigError: blending is off, an option makes no sense, or the model cannot be blended; says why.
    """

    def __init__(
        self,
        model: Any,
        store: Store,
        config: Config | Mapping[str, object] | None = None,
        *,
        tokenizer: Any = None,
        prefix: Part = "",
        selection: Selector | None = None,
        prefill: PrefillModel | None = None,
        bytes_per_s: float | None = None,
        policy: Policy = BLEND_POLICY,
        model_name: str | None = None,
        revision: str | None = None,
        lora: str | None = None,
        cache_salt: str | None = None,
        prefetcher: Prefetcher | None = None,
    ) -> None:
        if not hasattr(store, "submit_get"):
            raise ConfigError(f"an open kvstore.Store is needed, not {type(store).__name__}")
        own = blend_config(store.config, config)
        if bytes_per_s is not None and not 0 <= number("bytes_per_s", bytes_per_s) < math.inf:
            raise ConfigError(f"bytes_per_s={bytes_per_s} is no speed of a link")
        for name, value, kind in (("policy", policy, Policy), ("prefill", prefill, PrefillModel | None)):
            if not isinstance(value, kind):
                raise ConfigError(f"{name}={value!r} is not a {getattr(kind, '__name__', 'PrefillModel')}")
        self.settings = BlendSettings(
            own.blend_check_layers, own.blend_recompute_ratios, own.blend_measure, selection or own.blend_selection
        )
        self._config = own
        self._store = store
        self._model = model
        self._kv = KVCacheStore(
            store, model, model_name=model_name, revision=revision, lora=lora, cache_salt=cache_salt,
            prefetcher=prefetcher,
        )  # fmt: skip
        self._texts = Texts(tokenizer, own.blend_special_str)
        given = self._texts.ids(prefix) if isinstance(prefix, str) else token_array(prefix, "token ids of the prefix")
        leading = self._texts.leading
        if len(leading) and not np.array_equal(given[: len(leading)], leading):
            given = np.concatenate([leading, given])
        self.prefix = given
        self._prefill = prefill
        self._bytes_per_s = bytes_per_s
        self._policy = policy.capped(store.config.codec_level)
        self._latency_s = math.inf
        self._loaded_at = time.monotonic()
        self._samples: deque[PrefillSample] = deque(maxlen=_SAMPLES)
        self._index = WindowIndex(own.blend_min_tokens)
        self._numbers: dict[bytes, int] = {}  # documents of the index, by their ids
        self._told_of_short = False
        self._look_at_model()

    def _look_at_model(self) -> None:
        self._blend_model = BlendModel(self._model)
        if self.settings.check_layers[-1] >= self._blend_model.num_layers:
            raise ConfigError(
                f"blend_check_layers={list(self.settings.check_layers)}: {self._blend_model.name} has only layers 0 to "
                f"{self._blend_model.num_layers - 1}"
            )
        own = self._config
        self._form = ChunkForm(
            self._blend_model,
            self._kv.context,
            form=own.blend_form,
            prefix=self.prefix,
            separator=own.blend_special_str,
        )
        self._seen = self._kv.context.digest, self._kv.device

    def _notice_changes(self) -> None:
        self._kv._notice_changes()
        if (self._kv.context.digest, self._kv.device) != self._seen:  # other weights, another dtype, moved
            self._samples.clear()
            self._look_at_model()
        self._blend_model.require_evaluation()

    def cache_argument(self, cache: DynamicCache) -> dict[str, DynamicCache]:
        """The keyword under which this version of transformers takes a cache:
        `model.generate(report.input_ids, **blender.cache_argument(cache))`."""
        return self._kv.cache_argument(cache)

    def key(self, document: Part) -> Key:
        """Under which a document, without separators in it, is stored."""
        self._notice_changes()
        ids = self._texts.ids(document) if isinstance(document, str) else token_array(document)
        return self._form.key(ids)

    # Storing.

    def precompute(self, documents: Sequence[Part], *, timeout: float | None = None) -> PrecomputeReport:
        """Store the KV of documents that are not stored yet, and of the fixed prefix, and wait.

        A document with separators in it is several chunks. Each is computed whole and is one record: the store's
        `buffer_pool_bytes` must hold it. Documents are also remembered, as ids, so that `blend` finds runs of them at
        any offset; who wants that in a new process calls `precompute` there, too.

        Args:
            documents: texts or token ids.
            timeout: seconds for each document; None: the store's `put_timeout`.

        Raises:
            ConfigError: something that is neither text nor ids, or ids that the model does not know; then nothing is
                stored.
            KVStoreError: the first chunk that failed, with `on_error="raise"`, after all others were tried.
        """
        self._notice_changes()
        seconds = self._store.config.put_timeout if timeout is None else number("timeout", timeout)
        least = self._config.blend_min_tokens
        chunks: dict[Key, tuple[Ids, bool]] = {}
        longest = short = 0
        if len(self.prefix) >= least:
            chunks[self._form.place_prefix().key] = (self.prefix, True)
        for document in as_documents(documents):
            for ids in self._texts.parts(document)[::2]:
                self._form.require_known(ids)
                longest = max(longest, len(ids))
                if len(ids) >= least:
                    chunks[self._form.key(ids)] = (ids, False)
                    self._remember(ids)
                else:
                    short += len(ids) > 0
        if short and longest < least and not self._told_of_short:
            self._told_of_short = True
            logger.warning(
                "no document is stored: all of them have fewer tokens (the longest %d) than the option "
                "blend_min_tokens=%d; set it lower", longest, least,
            )  # fmt: skip
        keys = list(chunks)
        known = self._heads(keys, time.monotonic() + seconds)
        totals = Writes()
        for key, header in zip(keys, known, strict=True):
            ids, is_prefix = chunks[key]
            if header is not None and header.matches(self._form.spec(len(ids))):
                totals.existing += 1
            else:
                self._store_chunk(key, ids, is_prefix, time.monotonic() + seconds, totals)
        totals.drain(0)
        if totals.error is not None and self._store.config.on_error == "raise":
            raise totals.error
        return PrecomputeReport(
            len(keys) + short, totals.stored, totals.existing, short, totals.failed, totals.nbytes, totals.error
        )

    def _store_chunk(self, key: Key, ids: Ids, is_prefix: bool, deadline: float, totals: Writes) -> None:
        layers = self._form.compute(ids, is_prefix=is_prefix)
        totals.drain(_AT_ONCE)
        nbytes = self._form.spec(len(ids)).raw_bytes
        try:
            buffer = self._store.pool.acquire(nbytes, max(0.0, deadline - time.monotonic()))
        except KVStoreError as error:
            totals.fail(error)
            return
        with buffer:
            item = self._form.item(key, ids, layers, buffer, is_prefix=is_prefix)
            totals.pending.append(self._kv._put(item, deadline))

    def cheapest_tier(self, tiers: Sequence[TierOffer], documents: Sequence[Part]) -> TierOffer | None:
        """Where to keep documents: the cheapest place from which they come while the least share of their tokens is
        computed again (`kvstore.stream.cheapest_tier`). By the measured prefill, and by raw bytes: a codec needs less.

        Args:
            tiers: the places.
            documents: as many, and as long, as one prompt has.

        Returns:
            None: from none of them.

        Raises:
            ConfigError: the speed of the prefill is not known: nothing was computed yet, and none was given.
        """
        prefill = self.prefill
        if prefill is None:
            raise ConfigError("nothing was computed yet, so its speed is not known: call precompute, or give prefill")
        lengths = [len(ids) for each in as_documents(documents) for ids in self._texts.parts(each)[::2] if len(ids)]
        nbytes = sum(self._form.spec(length).raw_bytes for length in lengths)
        return cheapest_tier(tiers, nbytes, prefill.seconds(len(self.prefix), sum(lengths)), self.settings.ratio)

    def _remember(self, ids: Ids) -> None:
        name = ids.tobytes()
        if name not in self._numbers:
            self._numbers[name] = self._index.add(ids)

    # Blending.

    def blend(
        self,
        prompt_parts: Part | Sequence[Part],
        *,
        ratio: float | None = None,
        slo_s: float | None = None,
        timeout: float | None = None,
    ) -> tuple[DynamicCache, BlendReport]:
        """The cache of a prompt, from what is stored of it and what is computed.

            cache, report = blender.blend([*documents, question])
            out = model.generate(report.input_ids, **blender.cache_argument(cache))

        Stored are parts that `precompute` was given, and runs of at least `blend_min_tokens` tokens of such parts
        anywhere else before the question. What fails or is late becomes tokens to compute: the cache is always whole.

        Args:
            prompt_parts: texts or token ids in their order, or one of these, cut at separators. They are joined as they
                are, nothing is put between them; the fixed prefix comes first. The last part is the question; of a
                prompt in one part, it is what comes behind the last run that is stored.
            ratio: exactly this share of the reused tokens is computed again, and all that is stored is loaded. None:
                the load controller decides, from `blend_recompute_ratios` on.
            slo_s: seconds to the first token, from now. Of records with levels it decides how fine they are loaded.
            timeout: seconds after which nothing more is waited for, and the rest is computed; None: the store's
                `blocking_timeout`.

        Returns:
            The cache, without the last token (which `generate` computes), on the model's device; and the report.

        Raises:
            ConfigError: no question, something that is neither text nor ids, token ids that the model does not know,
                or a ratio that is no share.
            KVStoreError: the store was closed, or with `on_error="raise"` the first error.
        """
        began = time.monotonic()
        settings = self.settings if ratio is None else self.settings.at(ratio)
        slo = math.inf if slo_s is None else number("slo_s", slo_s, above=0)
        seconds = self._store.config.blocking_timeout if timeout is None else number("timeout", timeout)
        self._notice_changes()
        deadline = began + seconds
        prompt = join(as_parts(prompt_parts), self._texts, self.prefix)
        ids = torch.from_numpy(prompt.ids).to(self._blend_model.device)
        report = BlendReport(ids[None], torch.empty(0), len(ids))
        found = self._find(prompt, deadline, report)
        prompt = prompt.ask_behind([each.placed for each in found])
        report.question = len(ids) - prompt.question
        report.lookup_s = time.monotonic() - began
        if ratio is None:
            decision = self._decide(prompt, found, slo - report.lookup_s, report)
            if found and not decision.load and began - self._loaded_at > _LOOK_AGAIN_S:
                # The link may be faster by now, which only loading shows. It has as long as computing would take.
                decision = Decision(tuple(range(len(found))), self.settings.ratio)
                deadline = min(deadline, time.monotonic() + self._prefill_s(prompt))
            settings = settings.at(decision.ratio)
        else:
            decision = Decision(tuple(range(len(found))), settings.ratio)
        report.expected_s, report.level = decision.seconds, decision.level
        chosen = self._fitting([found[number] for number in decision.load])
        report.left = len(found) - len(chosen)
        if chosen:
            self._loaded_at = began
        report.ratio = settings.ratio if chosen else 1.0
        while True:
            try:
                cache = self._run(ids, prompt, chosen, settings, deadline, report)
                break
            except ChunksLost as lost:
                logger.info("%s; computing begins again without them", lost)
                report.restarts += 1
                report.lost += len(lost.chunks)
                report.misses += len(lost.chunks)
                chosen = [each for number, each in enumerate(chosen) if number not in lost.chunks]
        cache.crop(-1)
        report.total_s = time.monotonic() - began
        told = report.request(self._kv.context.model)
        report_request(told, metrics=self._store.metrics, tracer=self._store.tracer)
        return cache, report

    def _find(self, prompt: Prompt, deadline: float, report: BlendReport) -> list[_Found]:
        """What of a prompt is stored, in its order."""
        form, least = self._form, self._config.blend_min_tokens
        wanted = [form.place_prefix()] if prompt.prefix >= least else []
        parts = [(begin, end) for begin, end in prompt.parts if end - begin >= least]
        report.short = len(prompt.parts) - len(parts)
        wanted += [form.place(prompt.ids[begin:end], begin) for begin, end in parts]
        found = self._stored(wanted, prompt, deadline)
        runs = []
        for begin, end in prompt.gaps([each.placed for each in found]):
            for match in self._index.find(prompt.ids[begin:end]) if end - begin >= least else ():
                document = self._index.document(match.document)
                length = match.end - match.begin
                runs.append(form.place(document, begin + match.begin, first=match.first, length=length))
        found += self._stored(runs, prompt, deadline)
        report.misses = sum(
            not any(each.placed.begin < placed.end and placed.begin < each.placed.end for each in found)
            for placed in wanted
        )
        return sorted(found, key=lambda each: each.placed.begin)

    def _stored(self, wanted: Sequence[Placed], prompt: Prompt, deadline: float) -> list[_Found]:
        heads = self._heads([placed.key for placed in wanted], deadline)
        found = []
        for placed, head in zip(wanted, heads, strict=True):
            if head is not None and head.matches(self._form.spec(placed.tokens)):
                lossless = not any(segment.codec in LOSSY for segment in head.segments)
                found.append(_Found(placed, head, lossless, lossless and self._form.exact(placed, prompt)))
        return found

    def _heads(self, keys: Sequence[Key], deadline: float) -> list[Header | None]:
        if not keys:
            return []
        unique = list(dict.fromkeys(keys))
        began = time.monotonic()
        heads = dict(zip(unique, self._store.submit_heads(unique, deadline=deadline).result(), strict=True))
        self._latency_s = min(self._latency_s, time.monotonic() - began)
        return [heads[key] for key in keys]

    def _decide(self, prompt: Prompt, found: Sequence[_Found], left_s: float, report: BlendReport) -> Decision:
        measured = self._kv.prefetcher.bandwidth
        report.bytes_per_s = self._bytes_per_s if measured is None else measured
        latency = 0.0 if self._latency_s == math.inf else self._latency_s
        speeds = Speeds(report.bytes_per_s, latency, (), self.prefill)
        stored = [each.stored() for each in found]
        return decide(
            stored, prompt.question, len(prompt.ids), speeds,
            r_min=self.settings.ratio, remaining_s=left_s, policy=self._policy,
        )  # fmt: skip

    def _fitting(self, chosen: Sequence[_Found]) -> list[_Found]:
        """Those of which a layer fits into the memory that the prefetcher has; the first ones, if not all."""
        kept, room = [], self._kv.prefetcher.budget_bytes
        for each in chosen:
            size = max(self._form.spec(each.placed.tokens).sizes)
            if size <= room:
                kept.append(each)
                room -= size
        if len(kept) < len(chosen):
            logger.warning(
                "a layer of %d of %d chunks does not fit into the prefetcher's %d bytes; they are computed (a larger "
                "buffer_pool_bytes helps)", len(chosen) - len(kept), len(chosen), self._kv.prefetcher.budget_bytes,
            )  # fmt: skip
        return kept

    def _prefill_s(self, prompt: Prompt) -> float:
        return math.inf if (model := self.prefill) is None else model.seconds(0, len(prompt.ids))

    @property
    def prefill(self) -> PrefillModel | None:
        """How fast the model computes: as given, or as measured; None: nothing was computed yet."""
        if self._prefill is not None:
            return self._prefill
        self._samples.extend(self._form.samples)
        self._form.samples.clear()
        return PrefillModel.fit(self._samples) if self._samples else None

    def _run(
        self,
        ids: torch.Tensor,
        prompt: Prompt,
        chosen: Sequence[_Found],
        settings: BlendSettings,
        deadline: float,
        report: BlendReport,
    ) -> DynamicCache:
        """Load and compute layer by layer. Raises `ChunksLost`."""
        spans = [Span(each.placed.begin, each.placed.end, each.exact) for each in chosen]
        # A device computes beside all this, and waiting for it costs time: only until something is known of it.
        timed = self._blend_model.device.type == "cpu" or self.prefill is None or len(self._samples) < _FIRST_SAMPLES
        run = Recompute(self._blend_model, ids, spans, settings, logits=1, timed=timed)
        if chosen:
            placed = [each.placed for each in chosen]
            with ChunkLoader(self._form, placed, self._kv.prefetcher, deadline=deadline, level=report.level) as loader:
                for _ in run.layers(loader.layers(run.needs)):
                    pass  # the prefetcher loads the next layer while one is computed
            report.load_s, report.wait_s, report.move_s = loader.load_s, loader.wait_s, loader.move_s
            report.nbytes = sum(map(loader.layer_bytes, range(loader.num_layers)))
        else:
            deque(run.layers([None] * self._blend_model.num_layers), maxlen=0)
        cache, logits = run.finish()
        report.logits = logits[-1]
        report.compute_s = run.compute_s
        report.hits = len(chosen)
        report.reused = sum(each.placed.length for each in chosen)
        report.exact = sum(each.placed.length for each in chosen if each.exact)
        report.recomputed = run.ratios()
        report.computed = [len(rows) / len(ids) for rows in run.rows]
        if timed:
            self._samples.append(_sample(run.rows[0], run.compute_s[0] * len(run.compute_s)))
        return cache


def _sample(rows: torch.Tensor, seconds: float) -> PrefillSample:
    """What computing the tokens at these positions took: as much as of as many in a row that lie as far back."""
    begin = float(rows.float().mean()) - (len(rows) - 1) / 2
    return PrefillSample(max(0, round(begin)), len(rows), seconds)
