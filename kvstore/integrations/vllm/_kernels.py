"""Triton kernels between pages and contiguous staging, one for each direction: one program for each token and head.

Both take the strides of the pages, so NHD, HND and every other of vLLM's layouts are one kernel. Bytes are moved as
they are: every dtype is moved as integers of its size. Without a GPU they run in Triton's interpreter
(TRITON_INTERPRET=1, set before triton is imported), which is how they are tested here.
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
def _gather_kernel(
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
) -> None:
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    element = tl.arange(0, WIDTH)
    inside = element < width
    page = (slot // block_size) * block_stride + (slot % block_size) * token_stride + head * head_stride
    value = tl.load(pages_ptr + page + element * element_stride, mask=inside)
    tl.store(staged_ptr + (token * heads + head) * width + element, value, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _scatter_kernel(
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
) -> None:
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    element = tl.arange(0, WIDTH)
    inside = element < width
    page = (slot // block_size) * block_stride + (slot % block_size) * token_stride + head * head_stride
    value = tl.load(staged_ptr + (token * heads + head) * width + element, mask=inside)
    tl.store(pages_ptr + page + element * element_stride, value, mask=inside)


def _launch(kernel: Any, pages: torch.Tensor, staged: torch.Tensor, slots: torch.Tensor) -> None:
    tokens, heads, width = staged.shape
    if not tokens or not width:
        return
    integers = _INTEGERS[staged.element_size()]
    kernel[(tokens, heads)](
        pages.view(integers), staged.view(integers), slots, pages.shape[1], *pages.stride(), width, heads,
        WIDTH=triton.next_power_of_2(width),
    )  # fmt: skip


def gather(keys: torch.Tensor, values: torch.Tensor, pages: Pages, slots: torch.Tensor) -> None:
    """Copy the tokens at `slots` (`[tokens]` int64, on the device) out of the pages into contiguous
    `[tokens, kv_heads, …]`, on the current stream."""
    _launch(_gather_kernel, pages.keys, keys, slots)
    _launch(_gather_kernel, pages.values, values, slots)


def scatter(keys: torch.Tensor, values: torch.Tensor, pages: Pages, slots: torch.Tensor) -> None:
    """Copy contiguous `[tokens, kv_heads, …]` into the pages' tokens at `slots`, on the current stream."""
    _launch(_scatter_kernel, pages.keys, keys, slots)
    _launch(_scatter_kernel, pages.values, values, slots)
