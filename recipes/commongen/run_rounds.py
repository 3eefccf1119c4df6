"""Warm-up, importance rounds, and a base that has never seen a concept, on CommonGen.

    python recipes/commongen/run_rounds.py --base smollm2.gguf --data DATA --work WORK --output OUT \\
        --workers 14 --deadline 560

The study of `recipes/keywords_in_order` with CommonGen's sets, oracle and scores: stages, deadlines and
further calls are as there. OUT gets commongen.json with lines that results_page.py adds to the main run's.
"""

import argparse
import sys
from collections.abc import Sequence
from concurrent.futures import Future
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import siblings  # noqa: F401  (finds the study in rounds, and what benchmarks share)
from concept_sets import (
    ConceptSet,
    concepts_by_form,
    concepts_in_texts,
    learned_sets,
    read_sets,
    recombine,
)
from key_samples import some_of
from ordered_keys import SEQ2SEQ, KeyedText
from results_page import envelope
from run_commongen import write_texts
from run_in_order import InOrder, KeyChooser, add_options
from side_work import Workers, run_with_workers, score_texts
from study_settings import TextSettings
from table_rows import Scored, table_row

from nado.oracles import Keywords
from nado.oracles.inflection import read_forms
from nado.prompts import Prompt
from nado.storage import write_json
from nado.versions import versions

_TEXTS = TextSettings(sentences=True, turns=2)
TRAIN, DEV, FORMS = "train.jsonl.gz", "dev.jsonl", "concept_forms.json"


class ConceptRounds(InOrder):
    """One call of the script."""

    alone_if_unseen = False  # both bases have the weights of one adapter, whichever is asked for

    def read(self, folder: Path) -> Sequence[str]:
        """Sentences with their sets, the dev sets, and whether all concepts are there."""
        self.sets = read_sets(folder / TRAIN)
        forms = read_forms(folder / FORMS)
        learned = learned_sets(self.sets, _TEXTS, forms)
        pairs = [(each.concepts, target) for each in learned for target in each.targets]
        self.training = [KeyedText(number, *pair) for number, pair in enumerate(pairs)]
        self.known = concepts_by_form(self.sets, forms)
        self.tested: Any = read_sets(folder / DEV)
        self.oracle = Keywords(forms=forms)
        self.about = {"corpus": "CommonGen", "sentences": len(pairs)}
        return TRAIN, DEV, FORMS

    def prompts(self, base: str, count: int, seed: int) -> list[Prompt]:
        """Recombined sets: those that sentences were learned for, p knows by heart."""
        several = self.recombined
        chosen = some_of(count, len(several), seed)
        return [KeyedText(at, several[at].concepts, "", sees=base == SEQ2SEQ).prompt for at in chosen]

    @cached_property
    def recombined(self) -> list[ConceptSet]:
        """As many new sets as p writes for; rounds take theirs from the same."""
        return recombine(self.sets, self.settings.draw.lists, self.settings.draw.seed, but=self.tested)

    @property
    def chooser(self) -> KeyChooser:
        """What finds concepts that texts happen to have, in any order."""
        return partial(concepts_in_texts, known=self.known)

    def score(self, texts: list[str]) -> "Future[Any]":
        """What texts for the dev sets come to, on its way."""
        return self.workers.submit(score_texts, self.tested, texts, self.oracle)

    def write(self) -> None:
        """The table's lines so far, in the form of the main run's, and every text."""
        lines = {
            row: Scored(self.scores[row].result(), written, log_p)
            for row, (written, log_p) in self.written.items()
        }
        reported = np.array([each.reported for each in self.tested])
        command = envelope({})["command"]
        batch = self.settings.shape.batch
        guides = {each.name: {"title": each.title, "batch": batch} for each in self.settings.guides}
        facts = {name: each for name, each in self.stages.facts.items() if not name.startswith("rows")}
        rows = []
        for row, line in lines.items():
            shared = (self._base_line(row, lines), reported, command)
            rows.append(table_row(row, self.title(row.system), line, *shared, group=self.settings.group))
        metrics = {
            "rows": rows,
            "stages": facts,
            "settings": {**self.settings.describe(), "guides": guides, "base": Path(self.base).name},
            "left_out": self.left_out,
            "versions": versions(),
            "seconds": self.stages.seconds,
        }
        write_json(self.output / "commongen.json", envelope(metrics))
        write_texts(self.output / "texts.jsonl.gz", self.tested, lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """All stages, one after the other."""
    return run_with_workers(make, _parse(arguments))


def make(options: argparse.Namespace, workers: Workers) -> ConceptRounds:
    """The study, told what it would be told for another corpus."""
    options.corpus, options.name, options.prepared = "commongen", "", options.data
    return ConceptRounds(options, workers)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    here = Path(__file__).parent
    parser.add_argument("--data", type=Path, required=True, help=f"folder with {TRAIN}, {DEV}, {FORMS}")
    parser.add_argument("--settings", type=Path, default=here / "rounds.toml", help="what is done")
    add_options(parser)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
