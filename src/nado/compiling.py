"""torch.compile and attention on a GPU, with what has to be known about them."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

# In torch 2.11 this analysis fails an assertion of its own on transformers' attention masks.
_OPTIONS: dict[str, str | int | bool | Callable[..., Any]] = {"triton.coalesce_tiling_analysis": False}


def compile_layers(model: torch.nn.Module) -> torch.nn.Module:
    """A model with the same weights whose layers are fused one by one; `model` itself stays as it is.

    Compiled once for all layers, that takes seconds instead of minutes. And what transformers does between
    the layers stays eager: it sees that a batch without padding needs no attention mask, which it cannot see
    while it is traced.
    """
    from accelerate.utils import compile_regions

    fused: torch.nn.Module = compile_regions(model, dynamic=True, options=_OPTIONS)
    return fused


def trained_attention() -> AbstractContextManager[None]:
    """Attention whose backward pass can be trusted.

    That of cuDNN gives nan in the queries' gradient on Hopper GPUs since torch 2.11 (pytorch's issue 196678;
    seen on an H200, benchmarks/LOG.md), where a boolean mask leaves some place nothing to look at, as padding
    on the left does, and 64 (192, 320 …) places are read. Layers that are compiled keep the kernel that was
    chosen when they were first traced, also in a cache on disk.
    """
    sound = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    chosen: AbstractContextManager[None] = sdpa_kernel(sound)
    return chosen
