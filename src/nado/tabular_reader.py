"""A tabular model as a guide reads it: a state is the number of the prefix, or that number one-hot."""

from collections.abc import Sequence

import torch
from torch import Tensor

from nado.errors import InputError
from nado.exact import TabularModel, TabularState


class TabularReader:
    """`Reader` of a `TabularModel`; each of `conditions` is one condition token.

    With `one_hot` states a guide can learn a table of its own: every prefix apart from every other.
    """

    def __init__(self, model: TabularModel, conditions: Sequence[str], *, one_hot: bool = False) -> None:
        self.model, self._one_hot = model, one_hot
        self._ids = {condition: number for number, condition in enumerate(dict.fromkeys(conditions))}
        self._rows = torch.cat([model.table(*_pair(key)) for key in model.keys])  # (K · N, V)
        self._first = {key: number * len(model.table(*_pair(key))) for number, key in enumerate(model.keys)}

    @property
    def state_size(self) -> int:
        """A number, or one place for each."""
        return len(self._rows) if self._one_hot else 1

    @property
    def condition_vocabulary_size(self) -> int:
        """One id a condition."""
        return len(self._ids)

    @property
    def input_embeddings(self) -> None:
        """A table has none."""
        return

    @property
    def output_embeddings(self) -> None:
        """A table has none."""
        return

    def encode_conditions(self, conditions: Sequence[str]) -> list[list[int]]:
        """One token each."""
        unknown = [condition for condition in conditions if condition not in self._ids]
        if unknown:
            raise InputError(
                f"one of the conditions {list(self._ids)[:8]}",
                f"{unknown[0]!r}",
                "Name every condition when the reader is made.",
            )
        return [[self._ids[condition]] for condition in conditions]

    def read(self, prompts: Sequence[str], tokens: Tensor, lengths: Tensor) -> Tensor:
        """Row numbers of the prefixes: (B, T, 1)."""
        letters = self.model.eos_id
        prefix = torch.tensor([0] * len(prompts))
        columns = []
        for position in range(tokens.shape[1]):
            columns.append(prefix)
            # Past the end the number is meaningless; it only has to stay inside the table.
            inside = position < lengths - 1
            prefix = torch.where(inside, letters * prefix + 1 + tokens[:, position], 0)
        first = torch.tensor([self._first[prompt] for prompt in prompts])
        return self._states(torch.stack(columns, dim=1) + first[:, None])

    def current(self, state: TabularState) -> Tensor:
        """Row numbers of where the rows stand: (B, 1). Rows that have ended get any."""
        prefixes = len(self._rows) // len(self._first)
        inside = torch.where(state.prefix < prefixes, state.prefix, 0)
        return self._states(state.table * prefixes + inside)

    def logits(self, states: Tensor, generated: Tensor) -> Tensor:
        """The table's rows: (N, V)."""
        return self._rows[states.argmax(dim=1) if self._one_hot else states[:, 0].long()].float()

    def _states(self, numbers: Tensor) -> Tensor:
        if self._one_hot:
            return torch.nn.functional.one_hot(numbers, len(self._rows)).float()
        return numbers[..., None].float()


def _pair(key: str | tuple[str, str]) -> tuple[str, str]:
    return (key, key) if isinstance(key, str) else key
