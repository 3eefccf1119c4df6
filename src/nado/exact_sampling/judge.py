"""An oracle's answers about texts that are over, and the texts themselves: each different one once."""

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from nado.labeling import label
from nado.language_model import LanguageModel
from nado.oracles.protocol import Oracle
from nado.prompts import Prompt

_REMEMBERED = 2**16  # texts whose answers are kept


class Judge:
    """Asks an oracle whether finished texts satisfy it; copies and repeats cost nothing."""

    def __init__(self, model: LanguageModel[Any], oracle: Oracle, tasks: Sequence[Prompt]) -> None:
        self.oracle, self._model, self._tasks = oracle, model, tasks
        number: dict[str, int] = {}  # equal conditions are one question
        self._condition = torch.tensor([number.setdefault(task.condition, len(number)) for task in tasks])
        self._answers: dict[bytes, bool] = {}
        self.calls = 0  # texts the oracle was asked about

    def ask(self, task: Tensor, tokens: Tensor, lengths: Tensor) -> Tensor:
        """The answers about texts (n, L), padded with EOS, of the tasks (n,): bool (n,) on the CPU."""
        task, tokens = task.cpu(), tokens.cpu()
        keys = _pack(torch.cat([self._condition[task][:, None], tokens], dim=1))
        fresh = {
            key: row for row, key in enumerate(keys) if key not in self._answers
        }  # the last of equal ones
        if fresh:
            rows = torch.tensor(list(fresh.values()))
            conditions = [self._tasks[number].condition for number in task[rows].tolist()]
            texts = self._model.decode(_cut(tokens[rows], lengths.cpu()[rows]))
            answers = label(self.oracle, conditions, texts, parts=False).satisfied.tolist()
            self._answers.update(zip(fresh, answers, strict=True))
            self.calls += len(fresh)
        found = torch.tensor([self._answers[key] for key in keys])
        if len(self._answers) > _REMEMBERED:
            self._answers.clear()
        return found


def decode_distinct(model: LanguageModel[Any], tokens: Tensor, lengths: Tensor) -> list[str]:
    """The text of every row (n, L), on the CPU; equal rows are decoded once."""
    keys = _pack(torch.cat([lengths[:, None], tokens], dim=1))
    first = {key: row for row, key in enumerate(keys)}
    rows = torch.tensor(list(first.values()), dtype=torch.long)
    texts = dict(zip(first, model.decode(_cut(tokens[rows], lengths[rows])), strict=True))
    return [texts[key] for key in keys]


def _pack(rows: Tensor) -> list[bytes]:
    """Each row of integers as one key."""
    packed = np.ascontiguousarray(rows.numpy().astype(np.int32))
    width = packed.shape[1] * packed.itemsize
    return cast(list[bytes], packed.view(np.dtype((np.void, width))).ravel().tolist())


def _cut(tokens: Tensor, lengths: Tensor) -> list[list[int]]:
    return [row[:length] for row, length in zip(tokens.tolist(), lengths.tolist(), strict=True)]
