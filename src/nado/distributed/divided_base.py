"""A base too large for one GPU, divided among the processes that train (FSDP).

Only its layers are divided: guides use the embedding matrices whole. The base is frozen, so it is read once,
by all processes together, and its states are kept; after that training needs none of its layers.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from nado.errors import InputError
from nado.reading import Reader


def divide_base(model: Any) -> None:
    """Divide the layers of a base among all processes, in place: it is read by all of them or by none."""
    from torch.distributed.fsdp import fully_shard

    _ = model.fingerprint  # of the weights while they are whole
    for layer in find_layers(model.model):
        fully_shard(layer)


def find_layers(network: Any) -> list[torch.nn.Module]:
    """The repeated layers of a transformer: the members of its longest lists of modules of one class."""
    lists = [
        list(module)
        for module in network.modules()
        if isinstance(module, torch.nn.ModuleList) and len({type(each) for each in module}) == 1
    ]
    if not lists:
        raise InputError(
            "a base made of layers, to divide it",
            f"none in {type(network).__name__}",
            "Train it without divide_base.",
        )
    most = max(sum(p.numel() for layer in each for p in layer.parameters()) for each in lists)
    # An encoder's and a decoder's are both worth dividing; lists inside layers, of experts say, are not.
    outer = [each for each in lists if 4 * sum(p.numel() for m in each for p in m.parameters()) >= most]
    inner = {
        id(module) for each in outer for layer in each for module in layer.modules() if module is not layer
    }
    return [layer for each in outer for layer in each if id(layer) not in inner]


@contextmanager
def read_in_lockstep(reader: Reader) -> Iterator[Reader]:
    """A reader for processes that read different numbers of batches: all take part in every read.

    Before each read they count who has something to read. A process that is done goes on taking part until
    nobody has.
    """
    together = _TogetherReader(reader)
    yield together
    together.finish()


class _TogetherReader:
    """`Reader` whose reads are made by all processes at once."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)

    def read(self, prompts: Sequence[str], tokens: Tensor, lengths: Tensor) -> Tensor:
        """The base's states, as the reader within gives them."""
        self._count(1)
        return self._reader.read(prompts, tokens, lengths)

    def finish(self) -> None:
        """Take part in what others still read."""
        device = self._reader.model.device
        tokens = torch.full((1, 1), self._reader.model.eos_id, device=device)
        while self._count(0):
            self._reader.read([""], tokens, torch.ones(1, dtype=torch.long, device=device))

    def _count(self, reading: int) -> int:
        """How many processes have something to read."""
        counted = torch.tensor([reading], device=self._reader.model.device)
        torch.distributed.all_reduce(counted)
        return int(counted)
