"""An oracle's easier sister: some of its parts are enough."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from nado.errors import InputError
from nado.oracles.protocol import BoolArray, Oracle


@dataclasses.dataclass(frozen=True)
class Partly(Oracle):
    """Whether at least this share of another oracle's parts hold. Its progress is that oracle's."""

    oracle: Oracle
    share: float

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise InputError("a share above 0 and at most 1", f"{self.share}", "0.5 asks for half the parts.")

    @property
    def cheap(self) -> bool:  # type: ignore[override]
        """Cheap when the other one is."""
        return self.oracle.cheap

    @property
    def name(self) -> str:
        """The other one's name with the share."""
        return f"{self.share:.0%} of {self.oracle.name}"

    @property
    def spec(self) -> str:
        """The other one's spec with the share."""
        return f"partly({self.oracle.spec}, {self.share!r})"

    def judge(self, conditions: Sequence[str], texts: Sequence[str]) -> BoolArray:
        """Whether enough parts hold."""
        rows = self.oracle.parts(conditions, texts)
        answers = [int(row.sum()) >= math.ceil(self.share * len(row) - 1e-9) for row in rows]
        return np.array(answers, dtype=bool)

    def judge_progress(self, conditions: Sequence[str], prefixes: Sequence[str]) -> list[BoolArray]:
        """The other one's progress: the same facts about the prefix."""
        return self.oracle.progress(conditions, prefixes)

    def progress_names(self, condition: str) -> list[str]:
        """The other one's."""
        return self.oracle.progress_names(condition)
