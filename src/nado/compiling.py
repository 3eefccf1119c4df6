"""torch.compile, with what has to be known about it."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

FunctionT = TypeVar("FunctionT", bound=Callable[..., object])


def compile_dynamic(function: FunctionT) -> FunctionT:
    """Fuse `function` for inputs whose sizes change from call to call."""
    # In torch 2.11 this analysis fails an assertion of its own on transformers' attention masks.
    options: dict[str, str | int | bool | Callable[..., Any]] = {"triton.coalesce_tiling_analysis": False}
    return cast(FunctionT, torch.compile(function, dynamic=True, options=options))
