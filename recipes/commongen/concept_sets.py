"""CommonGen's concept sets, and the form in which base, guide and oracle read them."""

import gzip
import json
from dataclasses import dataclass
from pathlib import Path

from nado.prompts import Prompt

_CHOOSING = 5  # every fifth dev set is for choosing between configurations; the others are reported


@dataclass(frozen=True)
class ConceptSet:
    """A set of concepts and the sentences people wrote with them."""

    number: int
    concepts: tuple[str, ...]
    targets: tuple[str, ...]

    @property
    def prompt(self) -> Prompt:
        """What the base reads, and what guide and oracle read."""
        return Prompt(" ".join(self.concepts) + " =", ", ".join(self.concepts))

    @property
    def reported(self) -> bool:
        """Whether it is one of those that are reported: the file is ordered by size, so all sizes are."""
        return self.number % _CHOOSING != 0


def read_sets(path: Path) -> list[ConceptSet]:
    """Sets from a `.jsonl` or `.jsonl.gz` file."""
    content = path.read_bytes()
    lines = (gzip.decompress(content) if path.suffix == ".gz" else content).decode("utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    return [
        ConceptSet(each["id"], tuple(each["concepts"]), tuple(each.get("targets", ()))) for each in records
    ]
