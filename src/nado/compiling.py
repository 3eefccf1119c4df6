"""torch.compile, with what has to be known about it."""

from collections.abc import Callable
from typing import Any

import torch

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
