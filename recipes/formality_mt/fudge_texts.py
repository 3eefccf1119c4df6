"""FUDGE on the same samples: the only place of this recipe that knows the library's baselines."""

import time
from collections.abc import Sequence
from typing import Any

from table_settings import FudgeSettings, Row, SearchSettings
from table_texts import Lines, by_length

from nado.beam_search import search_beams
from nado.errors import InputError
from nado.labeling import label
from nado.oracles import Oracle
from nado.prompts import Prompt
from nado.samples import Samples
from nado.study.systems import Written


class Fudge:
    """A prefix classifier, trained once; its lines differ in strength and decoding."""

    def __init__(self, base: Any, oracle: Oracle, samples: Samples, settings: FudgeSettings) -> None:
        from nado.baselines import METHODS, Provisions

        self.base, self.oracle = base, oracle
        lengths = samples.ragged("tokens").offsets
        length = float(lengths[-1]) / max(1, len(samples))
        self._method: Any = METHODS["fudge"]
        self._given = Provisions(
            base,
            oracle,
            budget=length,
            text_length=length,
            samples=samples,
            training_texts=settings.texts,
            seed=settings.seed,
        )
        obstacle = self._method.obstacle(self._given)
        if obstacle is not None:
            raise InputError("samples that FUDGE can learn from", obstacle, "Leave [fudge] out of the table.")

    def write(self, prompts: Sequence[Prompt], row: Row, settings: SearchSettings) -> Lines:
        """Greedy or beam search over the rescored base; beams rank prefixes as those of the guides do."""
        usual = self._method.grid(self._given)[0]
        system: Any = self._method.prepare(self._given, {**usual, "strength": row.strength})
        beams, size = settings.sizes(row.decoding)
        began, asked = time.perf_counter(), by_length(prompts)
        # The penalty is that of transformers' beam search: log-probability over length.
        found = search_beams(system.model, asked, beams, 1.0 if beams > 1 else 0.0, size * beams)
        seconds = time.perf_counter() - began
        texts = self.base.decode([each.tokens for each in found.best])
        labels = label(
            self.oracle,
            [each.condition for each in asked],
            texts,
            finished=[each.finished for each in found.best],
        )
        written = [
            Written(each.prompt, each.condition, text, one.tokens, one.finished, bool(satisfied))
            for each, one, text, satisfied in zip(asked, found.best, texts, labels.satisfied, strict=True)
        ]
        trained = system.training
        facts = {"base_tokens": found.base_tokens, "train_seconds": round(trained.seconds, 1)}
        return Lines(written, seconds, {**facts, "train_texts": trained.texts})
