"""The shipped codec suite over cachegen: levels as alternatives, embedded, and of bits."""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import numpy as np

from kvstore.codec import codec_by_name
from kvstore.codec.base import Codec
from kvstore.codec.profile import Profile, register
from kvstore.codec.profiling_cachegen import profile_of
from kvstore.layout import KVLayout
from kvstore.testing import CodecSuite

TOKENS = 160


class _Cachegen(CodecSuite):
    stable = False  # a new scale of the anchors, from rounded ones
    options: ClassVar[dict[str, Any]] = {}

    def make(self, layout: KVLayout) -> Codec:
        made = self._profile(layout, tuple(self.options.items()))
        register(made)
        return codec_by_name("cachegen", made)

    @functools.cache  # noqa: B019 - as long as the tests
    def _profile(self, layout: KVLayout, options: tuple[tuple[str, Any], ...]) -> Profile:
        middle = TOKENS * layout.num_kv_heads * layout.head_dim
        layers = [self.kv(layout, TOKENS, seed) for seed in range(4)]
        chosen = [layers[n % 4] for n in range(layout.num_layers)]
        k = np.stack([x[:middle].reshape(TOKENS, layout.num_kv_heads, -1) for x in chosen])
        v = np.stack([x[middle:].reshape(TOKENS, layout.num_kv_heads, -1) for x in chosen])
        return profile_of(lambda: [(k, v)], name="suite", **dict(options))


class TestCachegen(_Cachegen):
    options: ClassVar[dict[str, Any]] = {"levels": (0.4,)}
    error_share = (0.3,)


class TestCachegenEmbedded(_Cachegen):
    layouts = (KVLayout(2, 2, 64), KVLayout(3, 2, 32, v_head_dim=16))
    dtypes = ("bfloat16",)
    options: ClassVar[dict[str, Any]] = {"levels": (1.2, 0.4), "embedded": True}
    error_share = (0.6, 0.2)


class TestCachegenBits(_Cachegen):
    layouts = (KVLayout(2, 2, 64),)
    dtypes = ("float16",)
    options: ClassVar[dict[str, Any]] = {"levels": ((8, 6, 4),)}
    error_share = (0.1,)
