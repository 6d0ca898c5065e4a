"""What `kvstore-bench stream` streams: real KV of a real text, encoded, in stores behind throttled links; and how fast
the model computed it.

torch and transformers are imported when a world is made.
"""

from __future__ import annotations

import inspect
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xxhash import xxh3_64_intdigest

from kvstore.codec.profile import Profile
from kvstore.config import load_config
from kvstore.errors import ConfigError
from kvstore.keys import Key, chunk_keys
from kvstore.layout import KVLayout, canonical_dtype, dtype_itemsize
from kvstore.record import RecordSpec, kv_spec, parse_header
from kvstore.store import Item, Store, Want
from kvstore.stream import Chunk, Group, PrefillModel, PrefillSample
from kvstore.stream.shapes import level_sizes

from .layers_link import LinkBackend
from .progress import telling

if TYPE_CHECKING:
    from .progress import Progress

__all__ = ["CODECS", "Shelf", "World", "make_world"]

CODECS = ("kvt", "cachegen", "int8", "raw")
"""Each has a store of its own."""

_TIMEOUT_S = 120.0
_POOL_BYTES = 1 << 30
_WINDOW = 512  # tokens of a window of text
_STEP = 128  # tokens per call of the model


@dataclass
class Shelf:
    """One codec: a store behind a link with the records of all chunks.

    Attributes:
        sizes: stored bytes of each chunk's record, by level, cumulative.
        decode_s_per_token: measured here, per level.
        digests: of each chunk's decoded bytes, per level and layer.
    """

    codec: str
    store: Store
    link: LinkBackend
    keys: Sequence[Key]
    spec: RecordSpec
    sizes: list[tuple[int, ...]] = field(default_factory=list)
    decode_s_per_token: tuple[float, ...] = ()
    digests: list[list[list[int]]] = field(default_factory=list)

    @property
    def chunks(self) -> list[Chunk]:
        return [Chunk(key, self.spec) for key in self.keys]

    def groups(self, count: int, per_group: int = 1) -> list[Group]:
        """The stream groups of the first `count` chunks, with their exact sizes."""
        groups = []
        tokens = self.spec.tokens
        for first in range(0, count, per_group):
            some = self.sizes[first : min(first + per_group, count)]
            sizes = tuple(sum(each[level] for each in some) for level in range(len(some[0])))
            groups.append(Group(first * tokens, len(some) * tokens, sizes, self.codec == "raw"))
        return groups

    def holds(self, number: int, view: memoryview, level: int) -> bool:
        """Whether each layer of a chunk is what it decodes to at this level, or finer: where refining was given up,
        some layers have it and some have not."""
        known = self.digests[number][level:]
        layers = self.spec.split(view)
        return all(xxh3_64_intdigest(v) in {each[n] for each in known} for n, v in enumerate(layers))

    def nbytes(self, count: int) -> int:
        """Stored bytes of the first `count` chunks, all levels."""
        return sum(each[-1] for each in self.sizes[:count])


@dataclass
class World:
    """Everything that requests are made of.

    Attributes:
        samples: measured prefills, as the KV was computed.
        measured: the curve fitted to them.
        chunk: tokens per chunk.
        dtype: of the KV.
        notes: what is worth saying about it.
    """

    layout: KVLayout
    dtype: str
    chunk: int
    count: int
    samples: list[PrefillSample]
    measured: PrefillModel
    shelves: dict[str, Shelf]
    model_name: str
    notes: list[str] = field(default_factory=list)

    @property
    def raw_bytes_per_token(self) -> int:
        return self.layout.num_layers * self.layout.elements_per_token * dtype_itemsize(self.dtype)

    def close(self) -> None:
        """Close the stores."""
        for shelf in self.shelves.values():
            shelf.store.close()


def make_world(
    folder: Path,
    *,
    tokens: int,
    chunk: int,
    dtype: str,
    latency_s: float,
    profiles: Sequence[str] = (),
    packaged: bool = False,
    lanes: int = 4,
    progress: Progress | None = None,
) -> World:
    """Compute the KV of `tokens` tokens of text that no profile has seen, and store it once per codec.

    Args:
        folder: of the model.
        chunk: tokens per record.
        dtype: that the KV is stored in.
        latency_s: of each request to a store.
        profiles: profile files; those missing are made of other texts and kept in `.cache/profiles`.
        packaged: take the profiles that come with the package where none were made here.

    Raises:
        ConfigError: the model or the texts do not serve.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    from .codec_profiles import digest_of_folder, load_profiles, profile_for
    from .texts import load_corpus, profile_lists, prose_passages

    def tell(what: str, done: int) -> None:
        if progress is not None:
            progress(what, done, 8)

    import torch

    disable_progress_bar()  # type: ignore[no-untyped-call]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as one engine's; and the same curve wherever it is measured
    tell("model", 0)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = model.eval()
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    windows = -(-tokens // _WINDOW)

    def tokenise(text: str) -> Sequence[int]:
        found: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return found

    # Of the beginning of what is kept back for judging: no profile has seen it.
    corpus = load_corpus("prose", prose_passages(), tokenise, window=_WINDOW, held_out=windows, profile=0)
    ids = [token for window in corpus.held_out for token in window][:tokens]
    tell("prefill", 1)
    segments, layout, samples = _prefill(model, ids, chunk, dtype)
    given = load_profiles(profiles)
    digest = digest_of_folder(folder)
    found: dict[str, Profile] = {}
    origins: list[str] = []
    lists = profile_lists(tokenise)
    for number, codec in enumerate(("kvt", "cachegen")):
        what = f"profile of {codec}"
        tell(what, 2 + number)
        if codec in given:
            found[codec] = given[codec]
            origins.append(f"{given[codec]}: given as a file")
            continue
        found[codec], origin = profile_for(
            codec, model, tokenizer, lists, model_digest=digest, unseen=corpus.held_out if packaged else None,
            tell=telling(progress, what, 2 + number, 8),
        )  # fmt: skip
        origins.append(origin)
    torch.set_num_threads(threads)
    shelves: dict[str, Shelf] = {}
    world = World(
        layout, dtype, chunk, len(segments), samples, PrefillModel.fit(samples), shelves, folder.name, origins,
    )  # fmt: skip
    try:
        with tempfile.TemporaryDirectory(prefix="kvstore-bench-") as scratch:
            for number, codec in enumerate(CODECS):
                tell(f"records of {codec}", 4 + number)
                path = None
                if codec in found:
                    path = Path(scratch) / f"{codec}.kvprofile"
                    found[codec].save(path)
                shelves[codec] = _shelf(codec, world, segments, ids, path, latency_s=latency_s, lanes=lanes)
    except BaseException:
        world.close()
        raise
    return world


def _prefill(
    model: Any, ids: Sequence[int], chunk: int, dtype: str
) -> tuple[list[list[memoryview]], KVLayout, list[PrefillSample]]:
    """KV of all chunks (per chunk and layer: K after the rotary embedding, then V), and how long each step took."""
    import torch
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    body = model.model
    name = "cache" if "cache" in inspect.signature(body.forward).parameters else "past_key_values"
    samples = []
    with torch.inference_mode():
        body(input_ids=torch.tensor([ids[:_STEP]]), use_cache=True)  # what torch does once
        for begin in range(0, len(ids), _STEP):
            step = ids[begin : begin + _STEP]
            started = time.perf_counter()
            body(
                input_ids=torch.tensor([list(step)]), use_cache=True,
                position_ids=torch.arange(begin, begin + len(step))[None], **{name: cache},
            )  # fmt: skip
            samples.append(PrefillSample(begin, len(step), time.perf_counter() - started))
    kind = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}[dtype]
    cached: Any = cache.layers
    layers = [(layer.keys[0].transpose(0, 1).to(kind), layer.values[0].transpose(0, 1).to(kind)) for layer in cached]
    heads, width = layers[0][0].shape[1:]
    layout = KVLayout(len(layers), int(heads), int(width), int(layers[0][1].shape[2]))
    made = []
    for begin in range(0, len(ids) - chunk + 1, chunk):
        made.append(
            [
                memoryview(
                    torch.cat([t[begin : begin + chunk].reshape(-1) for t in pair]).view(torch.uint8).numpy().tobytes()
                )
                for pair in layers
            ]
        )
    return made, layout, samples


def _shelf(
    codec: str, world: World, segments: Sequence[Sequence[memoryview]], ids: Sequence[int], profile: Path | None, *,
    latency_s: float, lanes: int,
) -> Shelf:  # fmt: skip
    """A store of one codec with all records in it, read once at each level."""
    options: dict[str, Any] = {} if profile is None else {"codec_profile": (str(profile),)}
    config = load_config(
        "memory://link", remote_serde=codec, chunk_size=world.chunk, buffer_pool_bytes=_POOL_BYTES,
        write_queue_bytes=_POOL_BYTES, **options,
    )  # fmt: skip
    link = LinkBackend(latency_s=0.0, lanes=lanes)
    store = Store(config, backends=[link])
    try:
        context = store.key_context(
            model=world.model_name, layout=world.layout, dtype=canonical_dtype(world.dtype), revision="bench"
        )
        keys = chunk_keys(list(ids), context=context, chunk_size=world.chunk)[: len(segments)]
        spec = kv_spec(world.layout, world.dtype, world.chunk)
        items = [
            Item(key, views, spec, {
                "model": world.model_name, "dtype": world.dtype, "rope": "applied",
                "tokens": [number * world.chunk, (number + 1) * world.chunk],
            })
            for number, (key, views) in enumerate(zip(keys, segments, strict=True))
        ]  # fmt: skip
        for outcome in store.submit_put(items, deadline=time.monotonic() + _TIMEOUT_S).result():
            if outcome.error is not None:
                raise outcome.error
        shelf = Shelf(codec, store, link, keys, spec)
        for key in keys:
            shelf.sizes.append(level_sizes(parse_header(link.records[key], key=key)))
        levels = {len(each) for each in shelf.sizes}
        if len(levels) > 1:
            raise ConfigError(f"records of {codec} have different numbers of levels: {sorted(levels)}")
        _read_all(shelf, segments)
        link.latency_s = latency_s
        return shelf
    except BaseException:
        store.close()
        raise


def _read_all(shelf: Shelf, segments: Sequence[Sequence[memoryview]]) -> None:
    """What each chunk decodes to at each level, and how long that takes: the store alone, no link before it."""
    levels = len(shelf.sizes[0])
    room = memoryview(bytearray(shelf.spec.raw_bytes))
    seconds: list[list[float]] = [[] for _ in range(levels)]
    shelf.digests = [[] for _ in shelf.keys]
    for number, key in enumerate(shelf.keys):
        for level in range(levels):
            begin = time.perf_counter()
            want = Want(key, room, shelf.spec, level=level if levels > 1 else None)
            (outcome,) = shelf.store.submit_get([want], deadline=time.monotonic() + _TIMEOUT_S).result()
            seconds[level].append(time.perf_counter() - begin)
            if not outcome.ok:
                raise outcome.error or ConfigError(f"a record of {shelf.codec} that was just stored is not there")
            shelf.digests[number].append([xxh3_64_intdigest(layer) for layer in shelf.spec.split(room)])
    known = [[xxh3_64_intdigest(view) for view in views] for views in segments]
    if shelf.codec == "raw" and [each[0] for each in shelf.digests] != known:
        raise ConfigError("records that were stored raw came back with other bytes")
    typical = [statistics.median(each) / shelf.spec.tokens for each in seconds]
    shelf.decode_s_per_token = tuple(
        max(0.0, each - before) for each, before in zip(typical, [0.0, *typical[:-1]], strict=True)
    )
