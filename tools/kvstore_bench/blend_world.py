"""What `kvstore-bench blend` measures with: a model on one thread, a store behind a link, documents in it, and prompts.

torch is imported when a world is made.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from kvstore.errors import ConfigError

from .blend_prompts import PREFIX, Document, Prompt, make_documents, make_prompts

if TYPE_CHECKING:
    from kvstore.blend import Blender, BlendModel, ChunkForm, Placed, Selector
    from kvstore.prefetch import Prefetcher
    from kvstore.store import Store

    from .layers_link import LinkBackend

__all__ = ["MIN_TOKENS", "REVISION", "Asked", "World", "question_logits"]

REVISION = "bench"
MIN_TOKENS = 16
_POOL_BYTES = 1 << 30
_TIMEOUT_S = 600.0


class Asked:
    """One prompt as token ids.

    Attributes:
        parts: prefix, documents and question, int64 tensors `[tokens]`.
        ids: all of it, `[1, tokens]`.
        question: tokens of the question.
        answer: ids of the answer, `[tokens]`.
        documents: begin and end of each document in the prompt.
    """

    def __init__(self, prefix: Any, documents: Sequence[Any], question: Any, answer: Any) -> None:
        import torch

        self.parts = [prefix, *documents, question]
        self.ids = torch.cat(self.parts)[None]
        self.question = len(question)
        self.answer = answer
        ends = torch.tensor([len(part) for part in self.parts]).cumsum(0).tolist()
        self.documents = list(itertools.pairwise(ends[:-1]))

    @property
    def tokens(self) -> int:
        return int(self.ids.shape[1])


class World:
    """Everything that stays the same over the run.

    Args:
        folder: of a model and its tokenizer.
        documents, prompts: how many are made; `tokens` in a document, `each` documents in a prompt.
        latency_s, lanes: of the link in front of the store.

    Raises:
        ConfigError: a model that cannot be blended, or has no tokenizer.
    """

    def __init__(
        self,
        folder: Path,
        *,
        documents: int,
        prompts: int,
        tokens: int = 150,
        each: int = 6,
        seed: int = 0,
        latency_s: float = 1e-3,
        lanes: int = 4,
    ) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils.logging import disable_progress_bar

        from kvstore.blend import BlendModel
        from kvstore.config import Config
        from kvstore.integrations.transformers import KVCacheStore
        from kvstore.store import Store

        from .layers_link import LinkBackend

        cast(Any, disable_progress_bar)()
        try:
            self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
            self.model: Any = cast(Any, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)).eval()
        except (OSError, ValueError) as error:
            raise ConfigError(f"{str(folder)!r} is no model with a tokenizer: {error}", cause=error) from error
        self.torch = torch
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # else loading would be disturbed by the second one, and that would be measured
        self._undo: Callable[[], None] = lambda: torch.set_num_threads(threads)
        self.link: LinkBackend = LinkBackend(latency_s=0.0, lanes=lanes)
        self.latency_s = latency_s
        config = Config(
            remote_url=("memory://link",), enable_blending=True, blend_min_tokens=MIN_TOKENS,  # type: ignore[arg-type]
            buffer_pool_bytes=_POOL_BYTES,
        )  # fmt: skip
        self.store: Store = Store(config, backends=[self.link])
        try:
            self.kv = KVCacheStore(self.store, self.model, revision=REVISION)
            self.prefetcher: Prefetcher = self.kv.prefetcher
            self.blend_model: BlendModel = BlendModel(self.model)
            self.texts: tuple[Document, ...] = make_documents(documents, self._length, tokens=tokens, seed=seed)
            self.asked: tuple[Prompt, ...] = make_prompts(self.texts, prompts, each=each, seed=seed)
            self.prefix = self.encode(PREFIX)
            self.documents = [self.encode(each.text) for each in self.texts]
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._undo()
        self.store.close()

    def encode(self, text: str) -> Any:
        """Ids of a text, int64 tensor `[tokens]`."""
        return self.torch.tensor(self.tokenizer(text, add_special_tokens=False).input_ids, dtype=self.torch.int64)

    def _length(self, text: str) -> int:
        return len(self.tokenizer(text, add_special_tokens=False).input_ids)

    def prompt(self, number: int) -> Asked:
        """A prompt as ids: the prefix once, the documents in their order, the question."""
        made = self.asked[number]
        documents = [self.documents[each] for each in made.documents]
        return Asked(self.prefix, documents, self.encode(made.question), self.encode(made.answer))

    # Ways to compute a prompt.

    def blender(
        self, form: str, *, check_layers: Sequence[int] = (1,), selection: Selector | str = "deviation"
    ) -> Blender:
        """One over this world's store."""
        from kvstore.blend import Blender

        options: dict[str, object] = {
            "enable_blending": True, "blend_form": form, "blend_check_layers": list(check_layers),
            "blend_min_tokens": MIN_TOKENS,
        }  # fmt: skip
        own = None
        if isinstance(selection, str):
            options["blend_selection"] = selection
        else:
            own = selection
        return Blender(
            self.model, self.store, options, tokenizer=self.tokenizer, prefix=self.prefix, selection=own,
            revision=REVISION, prefetcher=self.prefetcher,
        )  # fmt: skip

    def precompute(self, blender: Blender) -> None:
        """Store all documents. Raises `ConfigError` if one is not."""
        done = blender.precompute(self.documents, timeout=_TIMEOUT_S)
        if done.failed or done.short:
            raise ConfigError(f"{done.failed + done.short} of {done.chunks} chunks were not stored: {done.error}")

    def form(self, name: str) -> ChunkForm:
        """How chunks are stored under that name, as blenders of this world do."""
        from kvstore.blend import ChunkForm

        return ChunkForm(
            self.blend_model, self.kv.context, form=name, prefix=self.prefix.numpy(),
            separator=str(self.store.config.blend_special_str),
        )  # fmt: skip

    def placed(self, form: ChunkForm, asked: Asked) -> list[Placed]:
        """The prefix and the documents of a prompt, where they stand."""
        ids = asked.ids[0].numpy()
        return [form.place_prefix(), *(form.place(ids[begin:end], begin) for begin, end in asked.documents)]

    def prefill(self, asked: Asked) -> tuple[Any, Any]:
        """The model's own prefill: its cache and the logits of the next token `[vocabulary]`."""
        with self.torch.inference_mode():
            out = self.model(asked.ids, use_cache=True, logits_to_keep=1)
        return (out["cache"] if "cache" in out else out["past_key_values"]), out.logits[0, -1]

    def compute_seconds(self, ids: Any) -> float:
        """CPU seconds of a prefill of ids `[1, tokens]`, without its logits: what others do on this machine is not
        in it."""
        begin = time.thread_time()
        with self.torch.inference_mode():
            self.model.get_decoder()(ids, use_cache=True)
        return time.thread_time() - begin

    def question_logits(self, cache: Any, asked: Asked) -> Any:
        """See `question_logits`."""
        return question_logits(self.model, cache, asked, self.kv.cache_argument)

    # The link.

    def throttle(self, bytes_per_s: float | None) -> None:
        """From now on the store is behind a link of that rate (None: at once, without latency)."""
        from .layers_link import TokenBucket

        self.link.bucket = None if bytes_per_s is None else TokenBucket(bytes_per_s)
        self.link.latency_s = 0.0 if bytes_per_s is None else self.latency_s

    def seconds(self, run: Callable[[], object]) -> float:
        """Wall time of a call."""
        begin = time.perf_counter()
        run()
        return time.perf_counter() - begin


def question_logits(model: Any, cache: Any, asked: Asked, argument: Callable[[Any], dict[str, Any]]) -> Any:
    """What a model says behind each token of the question, and of the answer but its last, over a cache of the whole
    prompt; `[question + answer - 1, vocabulary]`. The cache is cut.

    Args:
        argument: the keyword under which the model takes a cache.
    """
    import torch

    begin = asked.tokens - asked.question
    cache.crop(begin - cache.get_seq_length())
    ids = torch.cat([asked.ids[0, begin:], asked.answer[:-1]])[None]
    positions = torch.arange(begin, begin + ids.shape[1])[None]
    with torch.inference_mode():
        return model(ids, position_ids=positions, use_cache=True, **argument(cache)).logits[0]
