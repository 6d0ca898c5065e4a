"""`CodecSuite`: what `kvstore.codec.base` asks of a codec, as tests that any codec can run."""

from __future__ import annotations

import itertools
import threading
import tracemalloc
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pytest

from kvstore.codec import codec_by_number
from kvstore.codec.base import RAW, Codec, Encoded, SegmentInfo
from kvstore.codec.floats import FLOATS, from_float32, to_float32
from kvstore.errors import ConfigError, CorruptRecord, PermanentError
from kvstore.layout import DTYPES, KVLayout

__all__ = ["CodecSuite"]

_CANARY = 0xA5
_GUARD = 64
_LENGTHS = (*range(1, 12), 19, 20, 64, 255, 256, 257, 1000, 2048)


class CodecSuite:
    """Subclass it in a test module of your own, say which codec, and pytest runs the whole contract:

        from kvstore.testing import CodecSuite

        class TestMyCodec(CodecSuite):
            def make(self, layout):                # the codec, able to encode KV of this layout
                return MyCodec(profile_of(layout))

    Codecs that need a profile register it in `make`. Knobs: `layouts`, `dtypes`, `rope`, `stable`, `error_share`,
    `mutants`. `kv` gives the values that are encoded; override it where the profile is of other ones.
    """

    layouts: ClassVar[Sequence[KVLayout]] = (
        KVLayout(2, 2, 64),
        KVLayout(128, 1, 16),
        KVLayout(3, 2, 32, v_head_dim=16),
        KVLayout(2, 1, 72, kind="mla"),
    )
    """Shapes that the codec is tried with; leave out what it refuses."""
    dtypes: ClassVar[Sequence[str]] = FLOATS
    rope: ClassVar[str | None] = "applied"
    """How K is stored, as the codec is told."""
    stable: ClassVar[bool] = True
    """Encoding what was decoded gives the same symbols: decode(encode(decode(encode(x)))) == decode(encode(x))."""
    error_share: ClassVar[Sequence[float]] = (0.3,)
    """Per level: the energy of the error may be at most this share of the energy of the segment; the last one holds
    for all further levels."""
    mutants: ClassVar[int] = 400
    """How many damaged segments are decoded per layout."""

    def make(self, layout: KVLayout) -> Codec:
        """The codec, able to encode KV of this layout."""
        raise NotImplementedError(f"{type(self).__name__} must define make()")

    def kv(self, layout: KVLayout, tokens: int, seed: int) -> npt.NDArray[np.float32]:
        """The values of a segment, K then V: scales that differ by channel, and tokens that are like their
        neighbours."""
        random = np.random.default_rng(seed)
        parts = []
        for width in (layout.head_dim, layout.v_head_dim or 0):
            channels = layout.num_kv_heads * width
            scale = np.exp(random.normal(0, 0.7, channels))
            walk = np.cumsum(random.standard_normal((tokens, channels)) * 0.3, axis=0) / np.sqrt(1 + tokens / 10)
            values = (walk + random.standard_normal((tokens, channels)) * 0.7) * scale
            parts.append(values.astype(np.float32).ravel())
        return np.concatenate(parts)

    # What the tests use.

    def about(self, layout: KVLayout, dtype: str, tokens: int, layer: int = 0, **more: Any) -> SegmentInfo:
        """What the codec is told of a segment."""
        fields: dict[str, Any] = {"start": 0, "rope": self.rope, **more}
        return SegmentInfo(DTYPES[dtype], layer, layout, dtype, tokens, **fields)

    def raw(self, layout: KVLayout, dtype: str, tokens: int, seed: int = 0) -> bytes:
        """The bytes of a segment."""
        out = bytearray(layout.segment_bytes(tokens, dtype))
        from_float32(self.kv(layout, tokens, seed), dtype, memoryview(out))
        return bytes(out)

    def decoded(self, encoded: Sequence[Encoded], nbytes: int, *, offset: int = 0) -> bytes:
        """What levels decode to, in memory whose surroundings must not change."""
        room = bytearray([_CANARY]) * (nbytes + 2 * _GUARD)
        view = memoryview(room)[_GUARD + offset : _GUARD + offset + nbytes]
        codec_by_number(encoded[0].codec).decode_into([each.data for each in encoded], view)
        begin, end = _GUARD + offset, _GUARD + offset + nbytes
        assert set(room[:begin]) | set(room[end:]) == {_CANARY}, "bytes around the destination were written"
        return bytes(view)

    def check(self, codec: Codec, raw: bytes, about: SegmentInfo) -> list[Encoded]:
        """Encode, decode in every way, and compare."""
        source = bytearray(raw)
        encoded = list(codec.encode(memoryview(source), about))
        assert source == raw, "the source was changed"
        assert [each.level for each in encoded] == [*range(len(encoded))]
        assert 1 <= len(encoded) <= codec.levels
        assert len({each.codec for each in encoded}) == 1
        assert encoded[0].codec in (RAW, codec.number)
        for each in encoded:
            assert (each.data.format, each.data.ndim, each.data.c_contiguous) == ("B", 1, True)
            assert len(each.data) <= len(raw)
        assert sum(len(each.data) for each in encoded) <= 2 * len(raw)
        again = codec.encode(memoryview(raw), about)
        assert [bytes(each.data) for each in again] == [bytes(each.data) for each in encoded], "not deterministic"
        if encoded[0].codec == RAW:
            assert len(encoded) == 1
            assert bytes(encoded[0].data) == raw
            return encoded
        step = bytearray([_CANARY]) * len(raw)
        decoder = codec_by_number(codec.number).decoder(memoryview(step))
        for count in range(1, len(encoded) + 1):
            whole = self.decoded(encoded[:count], len(raw), offset=count % 3)
            decoder.feed(encoded[count - 1].data)
            assert step == whole, f"level {count - 1} in place differs from levels 0 to {count - 1} at once"
            if codec.lossless and count == len(encoded):
                assert whole == raw
            elif about.dtype is not None and not codec.lossless:
                self._close(raw, whole, about.dtype, count - 1)
        return encoded

    def _close(self, raw: bytes, decoded: bytes, dtype: str, level: int) -> None:
        before, after = (to_float32(memoryview(each), dtype).astype(np.float64) for each in (raw, decoded))
        assert np.isfinite(after).all()
        share = self.error_share[min(level, len(self.error_share) - 1)]
        energy = float((before**2).sum())
        assert float(((after - before) ** 2).sum()) <= share * energy, f"level {level} is further off than {share}"

    # The contract.

    def test_the_registry_knows_it(self) -> None:
        codec = self.make(self.layouts[0])
        found = codec_by_number(codec.number)
        assert (found.name, found.number, found.lossless) == (codec.name, codec.number, codec.lossless)
        assert codec.levels >= 1

    def test_lengths_of_every_kind(self) -> None:
        for layout, dtype in itertools.product(self.layouts, self.dtypes):
            codec = self.make(layout)
            most = 1 << 21  # elements
            for tokens in _LENGTHS:
                if tokens <= 20 or tokens * layout.elements_per_token <= most:
                    self.check(codec, self.raw(layout, dtype, tokens, seed=tokens), self.about(layout, dtype, tokens))

    def test_every_layer(self) -> None:
        for layout in self.layouts:
            codec = self.make(layout)
            for layer in range(layout.num_layers):
                about = self.about(layout, self.dtypes[0], 13, layer, start=500)
                self.check(codec, self.raw(layout, self.dtypes[0], 13, seed=layer), about)

    def test_positions_and_dropped_tokens(self) -> None:
        layout, dtype = self.layouts[0], self.dtypes[0]
        codec = self.make(layout)
        for tokens, positions in ((40, np.arange(3, 123, 3)), (7, np.array([0, 1, 2, 5, 90, 4000, 100_000]))):
            about = self.about(layout, dtype, tokens, start=int(positions[0]), positions=positions.astype(np.int32))
            self.check(codec, self.raw(layout, dtype, tokens), about)
        for start in (0, 3, 100_000):
            self.check(codec, self.raw(layout, dtype, 30), self.about(layout, dtype, 30, start=start))

    def test_zero_vectors(self) -> None:
        for layout, dtype in itertools.product(self.layouts, self.dtypes):
            codec = self.make(layout)
            tokens = 23
            values = self.kv(layout, tokens, 5)
            for kind in range(4):
                some = values.copy()
                keys = some[: tokens * layout.num_kv_heads * layout.head_dim].reshape(tokens, -1)
                if kind == 0:
                    some[:] = 0
                elif kind == 1:
                    keys[::2] = 0
                elif kind == 2:
                    keys[0] = 0
                else:
                    keys[:, 0] = 0
                    some[-1] = -0.0
                raw = bytearray(layout.segment_bytes(tokens, dtype))
                from_float32(some, dtype, memoryview(raw))
                about = self.about(layout, dtype, tokens)
                encoded = codec.encode(memoryview(raw), about)
                if kind == 0 and encoded[0].codec != RAW and not codec.lossless:
                    after = to_float32(memoryview(self.decoded(encoded, len(raw))), dtype)
                    assert np.abs(after).max() <= np.abs(values).max()
                else:
                    self.check(codec, bytes(raw), about)

    def test_inf_and_nan_come_back_exactly(self) -> None:
        for layout, dtype in itertools.product(self.layouts, self.dtypes):
            codec = self.make(layout)
            values = self.kv(layout, 12, 3)
            for bad, place in itertools.product((np.inf, -np.inf, np.nan), (0, len(values) // 2, len(values) - 1)):
                some = values.copy()
                some[place] = bad
                raw = bytearray(layout.segment_bytes(12, dtype))
                from_float32(some, dtype, memoryview(raw))
                encoded = codec.encode(memoryview(raw), self.about(layout, dtype, 12))
                assert codec.lossless or encoded[0].codec == RAW
                assert self.decoded(encoded, len(raw)) == raw

    def test_extreme_values(self) -> None:
        """Huge and tiny ones do not become inf or nan."""
        for layout, dtype in itertools.product(self.layouts, self.dtypes):
            codec = self.make(layout)
            most = 6e4 if dtype == "float16" else 3e38
            for scale in (most, 1e-7 if dtype == "float16" else 1e-38):
                values = self.kv(layout, 11, 4)
                values *= np.float32(scale) / np.abs(values).max()
                raw = bytearray(layout.segment_bytes(11, dtype))
                from_float32(values, dtype, memoryview(raw))
                encoded = codec.encode(memoryview(raw), self.about(layout, dtype, 11))
                for count in range(1, len(encoded) + 1):
                    after = to_float32(memoryview(self.decoded(encoded[:count], len(raw))), dtype)
                    assert np.isfinite(after).all()

    def test_what_it_knows_nothing_of_is_stored_raw(self) -> None:
        codec = self.make(self.layouts[0])
        if codec.lossless:
            return
        for data in (b"", b"x", b"opaque" * 1000):
            encoded = codec.encode(memoryview(data), SegmentInfo())
            assert [each.codec for each in encoded] == [RAW]
            assert self.decoded(encoded, len(data)) == data

    def test_encoding_what_was_decoded_gives_the_same(self) -> None:
        if not self.stable:
            return
        for layout, dtype in itertools.product(self.layouts, self.dtypes):
            codec = self.make(layout)
            for tokens in (1, 9, 57):
                raw, about = self.raw(layout, dtype, tokens), self.about(layout, dtype, tokens)
                once = self.decoded(codec.encode(memoryview(raw), about), len(raw))
                twice = self.decoded(codec.encode(memoryview(once), about), len(raw))
                assert twice == once

    def test_unaligned_and_read_only_memory(self) -> None:
        layout, dtype = self.layouts[0], self.dtypes[-1]
        codec = self.make(layout)
        raw, about = self.raw(layout, dtype, 33), self.about(layout, dtype, 33)
        plain = codec.encode(memoryview(raw), about)
        for offset in (1, 2, 3):
            shifted = memoryview(bytearray(offset) + raw)[offset:]
            for source in (shifted, shifted.toreadonly()):
                encoded = codec.encode(source, about)
                assert [bytes(each.data) for each in encoded] == [bytes(each.data) for each in plain]
            moved = [memoryview(bytes(offset) + bytes(each.data))[offset:] for each in plain]
            out = memoryview(bytearray(len(raw) + offset))[offset:]
            codec_by_number(plain[0].codec).decode_into(moved, out)
            assert out == self.decoded(plain, len(raw))

    def test_other_lengths_and_orders_are_corrupt(self) -> None:
        layout, dtype = self.layouts[0], self.dtypes[0]
        codec = self.make(layout)
        raw = self.raw(layout, dtype, 40)
        encoded = codec.encode(memoryview(raw), self.about(layout, dtype, 40))
        if encoded[0].codec == RAW:
            return
        decoding = codec_by_number(codec.number)
        parts = [each.data for each in encoded]
        for nbytes in (0, 1, len(raw) - 1, len(raw) + 1, len(raw) // 2, 2 * len(raw)):
            for some in (parts[:1], parts):
                with pytest.raises(CorruptRecord):
                    decoding.decode_into(some, memoryview(bytearray(nbytes)))
        for wrong in ([], [*parts, parts[-1]], [*parts, parts[0]], *([parts[1:]] if len(parts) > 1 else [])):
            with pytest.raises(CorruptRecord):
                decoding.decode_into(wrong, memoryview(bytearray(len(raw))))
        decoder = decoding.decoder(memoryview(bytearray(len(raw))))
        for part in parts:
            decoder.feed(part)
        with pytest.raises(CorruptRecord):
            decoder.feed(parts[-1])
        if len(parts) > 2:
            decoder = decoding.decoder(memoryview(bytearray(len(raw))))
            decoder.feed(parts[0])
            with pytest.raises(CorruptRecord):
                decoder.feed(parts[2])

    def test_kv_of_another_shape_is_refused(self) -> None:
        layout, dtype = self.layouts[0], self.dtypes[0]
        codec = self.make(layout)
        if codec.lossless:
            return
        raw = self.raw(layout, dtype, 20)
        with pytest.raises(ConfigError):  # not as many bytes as it says
            codec.encode(memoryview(raw)[:-2], self.about(layout, dtype, 20))
        if codec.profile is not None:
            other = KVLayout(layout.num_layers, layout.num_kv_heads * 2, layout.head_dim)
            with pytest.raises(ConfigError, match=codec.profile.id):
                codec.encode(memoryview(self.raw(other, dtype, 20)), self.about(other, dtype, 20))

    def test_several_threads_at_once(self) -> None:
        layout, dtype = self.layouts[0], self.dtypes[0]
        codec = self.make(layout)
        raws = [self.raw(layout, dtype, 50 + n, seed=n) for n in range(4)]
        expected = [
            self.decoded(codec.encode(memoryview(raw), self.about(layout, dtype, 50 + n)), len(raw))
            for n, raw in enumerate(raws)
        ]
        trouble: list[object] = []

        def work(n: int) -> None:
            try:
                for _ in range(10):
                    encoded = codec.encode(memoryview(raws[n]), self.about(layout, dtype, 50 + n))
                    if self.decoded(encoded, len(raws[n])) != expected[n]:
                        trouble.append(n)
            except Exception as error:  # noqa: BLE001 - told by the test's own thread
                trouble.append(error)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not trouble

    # Damage.

    def test_damaged_segments_cost_nothing_and_break_nothing(self) -> None:
        """Nothing but `CorruptRecord` and `PermanentError`, nothing written beside the destination, and no more memory
        than a good segment takes."""
        for number, layout in enumerate(self.layouts):
            codec, dtype = self.make(layout), self.dtypes[number % len(self.dtypes)]
            raw = self.raw(layout, dtype, 37)
            encoded = list(codec.encode(memoryview(raw), self.about(layout, dtype, 37)))
            if encoded[0].codec == RAW:
                continue
            self.decoded(encoded, len(raw))  # what is loaded and compiled on first use is not counted
            good = _peak(lambda: self.decoded(encoded, len(raw)))  # noqa: B023 - called at once
            for parts in _mutants([bytes(each.data) for each in encoded], self.mutants, seed=number):
                damaged = [Encoded(codec.number, n, memoryview(part)) for n, part in enumerate(parts)]
                used = _peak(lambda: self._try(damaged, len(raw)))  # noqa: B023 - called at once
                assert used <= 2 * good + 4 * len(raw) + (1 << 20), f"{used} bytes for a segment of {len(raw)}"

    def test_arbitrary_bytes(self) -> None:
        codec = self.make(self.layouts[0])
        random = np.random.default_rng(11)
        raw = self.raw(self.layouts[0], self.dtypes[0], 16)
        head = bytes(codec.encode(memoryview(raw), self.about(self.layouts[0], self.dtypes[0], 16))[0].data)
        for _ in range(self.mutants):
            junk = random.bytes(int(random.integers(0, 300)))
            keep = int(random.integers(0, min(64, len(head))))
            for data in (junk, head[:keep] + junk):
                self._try([Encoded(codec.number, 0, memoryview(data))], int(random.choice([0, 1, 96, len(raw)])))

    def _try(self, encoded: Sequence[Encoded], nbytes: int) -> None:
        try:
            self.decoded(encoded, nbytes)
        except (CorruptRecord, PermanentError):
            pass


def _peak(work: Any) -> int:
    """Bytes allocated at most while `work` runs."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def _mutants(parts: Sequence[bytes], count: int, *, seed: int) -> Iterator[list[bytes]]:
    """Damaged forms of the levels of a segment."""
    random = np.random.default_rng(seed)
    numbers = (0, 1, 0x7F, 0x80, 0xFF)
    for n in range(count):
        level = int(random.integers(len(parts)))
        data = bytearray(parts[level])
        kind = n % 6
        if kind == 0:
            for _ in range(int(random.integers(1, 4))):
                data[int(random.integers(len(data)))] ^= 1 << int(random.integers(8))
        elif kind == 1:  # the head, where the lengths are
            at = int(random.integers(min(64, len(data))))
            data[at] = int(random.choice(numbers))
        elif kind == 2:  # a count of its own
            at = int(random.integers(min(64, len(data))))
            value = int(random.choice([0, 1, 2**16, 2**31, 2**32 - 1]))
            data[at : at + 4] = value.to_bytes(4, "little")[: len(data[at : at + 4])]
        elif kind == 3:
            del data[int(random.integers(len(data))) :]
        elif kind == 4:
            data += random.bytes(int(random.integers(1, 40)))
        else:
            at = int(random.integers(len(data)))
            length = min(int(random.integers(1, 40)), len(data) - at)
            data[at : at + length] = random.bytes(length)
        yield [*parts[:level], bytes(data), *(parts[level + 1 :] if random.integers(2) else ())]
