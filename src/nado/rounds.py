"""Training in rounds: draw, label, train, and draw again from the guided model.

Where the oracle is rare, samples of p hold hardly a text that satisfies it, and a guide learned from them is
poor exactly where it leads. So each round draws from q̂, the model guided so far, mixed with p; weights
p / q̂ keep R what it is (Semantics 5). A rare conjunction may be approached through easier ones: every round
can ask an oracle of its own, the last one the oracle that is wanted.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from nado.drawing import draw
from nado.errors import InputError
from nado.guide import Guide
from nado.guided_language_model import GuidedLanguageModel
from nado.objective import WeightForm
from nado.options import option
from nado.oracles.partly import Partly
from nado.oracles.protocol import Oracle
from nado.prompts import Prompt
from nado.proposals import Proposal, guided_mixture, summarise_weights
from nado.reading import Reader
from nado.sample_labels import label_samples, relabel
from nado.samples import Samples, join_samples
from nado.training import TrainingConfig, TrainingSummary, train
from nado.training_data import TrainingData

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RoundsConfig:
    """How many samples each round draws, and from what."""

    samples: tuple[int, ...] = option((32, 32, 32), "texts a prompt in each round; the first draws from p")
    guided_share: float = option(0.9, "of the later rounds' texts that the guided model writes; p the rest")
    complete_from_p: bool = option(
        False, "the guided model writes only a prefix and p the rest: labels that need no weights"
    )
    mean_prefix: float | None = option(
        None, "tokens of that prefix on average (default: an eighth of the limit)"
    )
    weight_form: WeightForm = option("suffix", "importance weights of suffixes, or of whole texts")  # noqa: RUF009
    balanced: bool = option(False, "labels weighted to be even within each prompt")
    merge: bool = option(False, "equal texts are trained on once, with their number as weight")
    warm_up_steps: int = option(0, "steps before each round's training that raise log q of satisfied texts")
    seed: int = option(0, "of the draws")

    def __post_init__(self) -> None:
        if not self.samples or min(self.samples) < 1:
            raise InputError(
                "at least one round, each with at least 1 sample a prompt",
                f"{list(self.samples)}",
                "Give a number of samples for every round.",
            )


@dataclass(frozen=True)
class RoundSummary:
    """What one round drew and learned."""

    number: int  # from 1
    oracle: str
    proposal: str
    drawn: int
    satisfied: float  # share of what this round drew
    effective_share: float  # of what this round drew, by its weights
    training: TrainingSummary

    def describe(self) -> dict[str, Any]:
        """JSON-ready."""
        return {**asdict(replace(self, training=None)), "training": self.training.describe()}  # type: ignore[arg-type]


@dataclass
class Rounds:
    """A run of several rounds in a folder; taken up again after any interruption, like all it consists of."""

    guide: Guide
    reader: Reader
    oracle: Oracle
    prompts: Sequence[Prompt]
    folder: Path
    config: RoundsConfig
    training: TrainingConfig
    stages: Sequence[Oracle]  # what each round asks
    prefixes: bool = False  # ask about every prefix too, for progress and stop labels
    drawn: list[Samples] = field(default_factory=list)

    def run(self, on_round: Callable[[RoundSummary], None] | None = None) -> list[RoundSummary]:
        """All rounds."""
        summaries = []
        for number in range(len(self.config.samples)):
            summaries.append(self._round(number))
            if on_round is not None:
                on_round(summaries[-1])
        return summaries

    def _round(self, number: int) -> RoundSummary:
        folder, oracle, proposal = self.folder / f"round-{number + 1}", self.stages[number], Proposal()
        if number:
            q_hat = GuidedLanguageModel(self.reader.model, self.guide, oracle=self.oracle)
            proposal = guided_mixture(
                q_hat,
                self.config.guided_share,
                complete_from_p=self.config.complete_from_p,
                mean_prefix=self.config.mean_prefix,
            )
        fresh = self._draw(folder, oracle, proposal, number)
        self.drawn.append(fresh)
        summary = self._train(folder, oracle, number)
        satisfied = fresh.array("satisfied")
        weights = summarise_weights(fresh.log_weights(), warn=False)
        return RoundSummary(
            number=number + 1,
            oracle=oracle.name,
            proposal=proposal.name(),
            drawn=len(fresh),
            satisfied=float(np.mean(satisfied)),
            effective_share=weights.effective_samples / len(fresh),
            training=summary,
        )

    def _draw(self, folder: Path, oracle: Oracle, proposal: Proposal, number: int) -> Samples:
        draw(
            self.reader.model,
            self.prompts,
            folder,
            samples_per_prompt=self.config.samples[number],
            proposal=proposal,
            seed=self.config.seed * 1009 + number,
        )
        return label_samples(folder, oracle, model=self.reader.model, prefixes=self.prefixes)

    def _train(self, folder: Path, oracle: Oracle, number: int) -> TrainingSummary:
        config = self.config
        known = [
            each
            if self.stages[at].fingerprint == oracle.fingerprint
            else relabel(each, oracle, model=self.reader.model, prefixes=self.prefixes)
            for at, each in enumerate(self.drawn)
        ]
        data = TrainingData.from_samples(
            join_samples(known),
            self.reader,
            progress_bits=self.guide.config.progress_bits,
            part_names=self.oracle.progress_names if self.guide.config.named_parts else None,
            balanced=config.balanced,
            weight_form=config.weight_form,
        )
        if config.merge:
            data.merge_equal()
        training = replace(self.training, seed=self.training.seed + number)
        if oracle is not self.oracle:  # whose parts are others than those the guide will be asked about
            training = replace(training, parts_weight=0.0)
        if config.warm_up_steps:
            warm = replace(training, steps=config.warm_up_steps, warm_up=True)
            train(self.guide, self.reader, data, warm, folder=folder / "warm_up")
        return train(self.guide, self.reader, data, training, folder=folder / "training")


def train_in_rounds(
    guide: Guide,
    reader: Reader,
    oracle: Oracle,
    prompts: Sequence[Prompt],
    folder: str | Path,
    config: RoundsConfig | None = None,
    training: TrainingConfig | None = None,
    *,
    stages: Sequence[Oracle] | None = None,
    prefixes: bool = False,
    on_round: Callable[[RoundSummary], None] | None = None,
) -> list[RoundSummary]:
    """Train `guide` in place, in rounds; each round's draws are labelled and added to those before.

    `stages` are the oracles that the rounds ask, `curriculum(oracle, rounds)` for instance; by default every
    round asks `oracle` itself.
    """
    config = config if config is not None else RoundsConfig()
    asked = list(stages) if stages is not None else [oracle] * len(config.samples)
    if len(asked) != len(config.samples) or asked[-1].fingerprint != oracle.fingerprint:
        raise InputError(
            f"an oracle for each of {len(config.samples)} rounds, the last one {oracle.name}",
            f"{len(asked)}, the last one {asked[-1].name if asked else 'missing'}",
            "Use curriculum(oracle, rounds), or leave stages out.",
        )
    training = training if training is not None else TrainingConfig()
    rounds = Rounds(
        guide, reader, oracle, prompts, Path(folder), config, training, asked, prefixes or _needs(guide)
    )
    return rounds.run(on_round)


def curriculum(oracle: Oracle, rounds: int) -> list[Oracle]:
    """An oracle for each round: a growing share of its parts is asked for, in the last round all of them.

    An oracle without parts has only itself to ask.
    """
    return [*(Partly(oracle, (number + 1) / rounds) for number in range(rounds - 1)), oracle]


def _needs(guide: Guide) -> bool:
    return bool(guide.config.progress_bits)
