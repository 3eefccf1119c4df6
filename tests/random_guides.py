"""Guides with random weights, for tests of what is done with any guide."""

from typing import Any

import torch

from nado.guide import Guide, GuideConfig
from nado.huggingface.reading import HuggingFaceReader


def random_guide(reader: HuggingFaceReader, seed: int = 0, **choices: Any) -> Guide:
    """A guide whose R depends on everything it reads."""
    config = GuideConfig.for_reader(reader, **{"size": 24, "layers": 2, "heads": 2, **choices})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        guide = Guide(config)
        torch.nn.init.normal_(guide.head.vector.weight)
        torch.nn.init.normal_(guide.head.bias.weight)
    return guide.attach(reader).eval()
