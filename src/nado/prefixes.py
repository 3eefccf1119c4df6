"""What an oracle says of texts that are still being written: progress, and whether they may end here.

Training reads the same from labels on disk (`sample_labels.py`); both go through `Oracle.read_prefixes`.
"""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nado.errors import InputError
from nado.oracles.protocol import Oracle

_REMEMBERED = 2**16  # prefixes whose answers are kept


class PrefixAnswers(NamedTuple):
    """One row a prefix."""

    progress: Tensor  # int8 (B, bits), −1 where there is no such bit
    stops: Tensor  # bool (B,): would the oracle be satisfied if the text ended here?


class PrefixReader:
    """Asks an oracle about prefixes, each different one once.

    It holds no state of the rows: answers depend on condition and tokens alone, so rows may be reordered,
    repeated and dropped at will.
    """

    def __init__(
        self, oracle: Oracle, decode: Callable[[Sequence[Sequence[int]]], list[str]], bits: int = 0
    ) -> None:
        self.oracle, self.bits = oracle, bits
        self._decode = decode
        self._answers: dict[tuple[str, str], tuple[NDArray[np.bool_], bool]] = {}
        self.calls = 0  # prefixes the oracle was asked about
        self.seconds = 0.0  # spent on answers

    def read(self, conditions: Sequence[str], tokens: Sequence[Sequence[int]]) -> PrefixAnswers:
        """Progress and stop labels of each prefix, on the CPU."""
        began = time.perf_counter()
        keys = list(zip(conditions, self._decode(tokens), strict=True))
        self._ask([key for key in dict.fromkeys(keys) if key not in self._answers])
        progress = np.full((len(keys), self.bits), -1, dtype=np.int8)
        stops = np.empty(len(keys), dtype=bool)
        for row, key in enumerate(keys):
            own, stops[row] = self._answers[key]
            if self.bits:
                progress[row, : len(own)] = own
        if len(self._answers) > _REMEMBERED:
            self._answers.clear()
        self.seconds += time.perf_counter() - began
        return PrefixAnswers(torch.from_numpy(progress), torch.from_numpy(stops))

    def _ask(self, fresh: list[tuple[str, str]]) -> None:
        if not fresh:
            return
        bits, stops = self.oracle.read_prefixes([key[0] for key in fresh], [key[1] for key in fresh])
        most = max((len(own) for own in bits), default=0)
        if self.bits and most > self.bits:
            raise InputError(
                f"conditions with at most {self.bits} bits of progress, as this guide was trained with",
                f"one with {most}",
                "Use fewer parts in a condition, or train a guide with more progress_bits.",
            )
        self.calls += len(fresh)
        for key, own, stop in zip(fresh, bits, stops.tolist(), strict=True):
            self._answers[key] = (own, stop)
