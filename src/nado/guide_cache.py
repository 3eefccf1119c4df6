"""A guide's keys and values, kept inside the base's own cache object.

transformers reorders, repeats, selects, crops and resets a cache layer by layer. Layers of the guide that are
appended to the base's follow all of it, and nothing has to be kept in step by hand.
"""

from collections.abc import Sequence
from typing import Any

from transformers import Cache, EncoderDecoderCache
from transformers.cache_utils import DynamicLayer, StaticLayer

from nado.errors import InputError
from nado.guide import Guide


class GuideLayer(DynamicLayer):
    """A layer of guide number `guide` that grows with the text."""

    def __init__(self, guide: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.guide = guide

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens, given as a negative number: a length would be the base's own."""
        if tokens_to_remove > 0:
            raise InputError(
                "a negative number of tokens to take off a guided cache",
                f"the length {tokens_to_remove}",
                "Base and guide have read different numbers of tokens: say how many to remove.",
            )
        if self.is_initialized:
            super().crop(tokens_to_remove)


class StaticGuideLayer(StaticLayer):
    """A layer of guide number `guide` with a fixed number of places."""

    def __init__(self, guide: int, width: int) -> None:
        super().__init__(max_cache_len=width)
        self.guide = guide


def is_static(cache: Cache) -> bool:
    """Whether the cache has a fixed number of places, so that a step can be compiled."""
    return any(isinstance(layer, StaticLayer) for layer in _own(cache).layers)


def add_guide_layers(cache: Cache, guides: Sequence[Guide], width: int, base_layers: int) -> None:
    """Append empty layers for the guides; `width` places each where the base's have a fixed number.

    Layers of an earlier text are dropped. `base_layers` is how many the base will fill: a cache that makes
    its layers when they are first used must not take the guide's for them.
    """
    own = _own(cache)
    if own.offloading:
        raise InputError(
            "a cache that stays on the model's device",
            "an offloaded one",
            'Leave cache_implementation out, or use "static": layers of a guide are not moved to and fro.',
        )
    fixed = is_static(cache)
    own.layers[:] = [layer for layer in own.layers if not isinstance(layer, GuideLayer | StaticGuideLayer)]
    if own.layer_class_to_replicate is not None:
        own.layers += [own.layer_class_to_replicate() for _ in range(base_layers - len(own.layers))]
    for number, guide in enumerate(guides):
        own.layers += [
            StaticGuideLayer(number, width) if fixed else GuideLayer(number) for _ in _layers(guide)
        ]


def guide_caches(cache: Cache | None, guides: Sequence[Guide]) -> list[Cache]:
    """Each guide's part of a cache, as a cache; fresh ones where there is none."""
    if cache is None:
        layers: list[Any] = [
            GuideLayer(number) for number, guide in enumerate(guides) for _ in _layers(guide)
        ]
    else:
        layers = [layer for layer in _own(cache).layers if isinstance(layer, GuideLayer | StaticGuideLayer)]
    return [
        Cache(layers=[layer for layer in layers if layer.guide == number]) for number in range(len(guides))
    ]


def _layers(guide: Guide) -> range:
    return range(guide.config.layers if guide.attentive else 0)


def _own(cache: Cache) -> Any:
    return cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
