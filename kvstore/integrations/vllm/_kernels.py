"""A Triton kernel between pages and contiguous staging, compiled once per direction: a program for each token and head.

It takes the strides of the pages, so NHD, HND and every other of vLLM's layouts are one kernel. Bytes are moved as they
are: every dtype is moved as integers of its size. Without a GPU it runs in Triton's interpreter (TRITON_INTERPRET=1,
set before triton is imported), which is how it is tested here.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ._paging import Pages

__all__ = ["gather", "scatter"]

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


@triton.jit  # type: ignore[untyped-decorator]
def _copy_kernel(
    pages_ptr: Any,
    staged_ptr: Any,
    slots_ptr: Any,
    block_size: Any,
    block_stride: Any,
    token_stride: Any,
    head_stride: Any,
    element_stride: Any,
    width: Any,
    heads: Any,
    WIDTH: tl.constexpr,
    INTO_PAGES: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    element = tl.arange(0, WIDTH)
    inside = element < width
    page = (slot // block_size) * block_stride + (slot % block_size) * token_stride + head * head_stride
    paged = pages_ptr + page + element * element_stride
    staged = staged_ptr + (token * heads + head) * width + element
    if INTO_PAGES:
        tl.store(paged, tl.load(staged, mask=inside), mask=inside)
    else:
        tl.store(staged, tl.load(paged, mask=inside), mask=inside)


def _copy(pages: torch.Tensor, staged: torch.Tensor, slots: torch.Tensor, *, into_pages: bool) -> None:
    tokens, heads, width = staged.shape
    if not tokens or not width:
        return
    integers = _INTEGERS[staged.element_size()]
    _copy_kernel[(tokens, heads)](
        pages.view(integers), staged.view(integers), slots, pages.shape[1], *pages.stride(), width, heads,
        WIDTH=triton.next_power_of_2(width), INTO_PAGES=into_pages,
    )  # fmt: skip


def gather(keys: torch.Tensor, values: torch.Tensor, pages: Pages, slots: torch.Tensor) -> None:
    """Copy the tokens at `slots` (`[tokens]` int64, on the device) out of the pages into contiguous
    `[tokens, kv_heads, …]`, on the current stream."""
    _copy(pages.keys, keys, slots, into_pages=False)
    _copy(pages.values, values, slots, into_pages=False)


def scatter(keys: torch.Tensor, values: torch.Tensor, pages: Pages, slots: torch.Tensor) -> None:
    """Copy contiguous `[tokens, kv_heads, …]` into the pages' tokens at `slots`, on the current stream."""
    _copy(pages.keys, keys, slots, into_pages=True)
    _copy(pages.values, values, slots, into_pages=True)
