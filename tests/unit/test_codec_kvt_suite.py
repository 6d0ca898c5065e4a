"""The shipped codec suite over kvt."""

from __future__ import annotations

import functools

from kvstore.codec import codec_by_name
from kvstore.codec.base import Codec
from kvstore.codec.profile import Profile
from kvstore.layout import KVLayout
from kvstore.testing import CodecSuite

from .kvt_support import make_profile


@functools.cache
def profile_of(layout: KVLayout, levels: int) -> Profile:
    return make_profile(layout, levels=levels, step=0.05, spread=12.0, tail=1.5)


class TestKvt(CodecSuite):
    layouts = (KVLayout(2, 2, 64), KVLayout(128, 1, 16), KVLayout(3, 2, 32, v_head_dim=16))
    stable = False  # K is rotated and rounded to the dtype, after which an index may be its neighbour
    error_share = (0.2, 0.1, 0.02)

    def make(self, layout: KVLayout) -> Codec:
        return codec_by_name("kvt", profile_of(layout, 3))


class TestKvtOfOneLevel(CodecSuite):
    layouts = (KVLayout(2, 2, 64),)
    dtypes = ("float16",)
    rope = "none"
    stable = False
    error_share = (0.02,)

    def make(self, layout: KVLayout) -> Codec:
        return codec_by_name("kvt", profile_of(layout, 1))
