"""Samples of p for the training sets, and of the dev sets to know how often p satisfies them."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from concept_sets import ConceptSet
from numpy.typing import NDArray
from progress_log import Clock
from side_work import label_folder
from study_settings import DrawSettings

from nado.drawing import draw
from nado.language_model import LanguageModel
from nado.oracles import Keywords
from nado.prompts import Prompt
from nado.proposals import Proposal
from nado.samples import Samples, join_samples, read_samples

P = Proposal()
_ENDING = 0.5  # share of texts that must end by themselves


@dataclass(frozen=True)
class Chunk:
    """Prompts that are drawn together, into one folder."""

    prompts: list[Prompt]
    samples: int  # of each


def cut_chunks(sets: Sequence[ConceptSet], settings: DrawSettings) -> list[Chunk]:
    """All prompts, those with as many samples together, in pieces of about `chunk` texts."""
    by_count: dict[int, dict[Prompt, None]] = {}
    for each in sets:
        by_count.setdefault(settings.samples_of(len(each.concepts)), {})[each.prompt] = None
    chunks = []
    for count, prompts in by_count.items():
        size = max(1, settings.chunk // count)
        several = list(prompts)
        chunks += [Chunk(several[at : at + size], count) for at in range(0, len(several), size)]
    return chunks


def draw_chunks(
    clock: Clock,
    model: LanguageModel[Any],
    chunks: Sequence[Chunk],
    folder: Path,
    label: "Callable[[Path], Future[float]]",
    *,
    seed: int,
    batch: int | None,
    proposal: Proposal = P,
) -> "list[Future[float]]":
    """Draw every chunk into a folder of its own; `label` hands it to others while the next is drawn."""
    labels = []
    for number, chunk in enumerate(chunks):
        place = folder / f"chunk-{number:03d}"
        samples = draw(
            model,
            chunk.prompts,
            place,
            samples_per_prompt=chunk.samples,
            proposal=proposal,
            seed=seed + 1000 * number,
            batch_size=batch,
            shard_rows=len(chunk.prompts) * chunk.samples,
        )
        if number == 0:
            require_endings(samples)
        labels.append(label(place))
        clock.say(f"  chunk {number + 1} of {len(chunks)}: {len(samples):,} texts")
    return labels


def require_endings(samples: Samples) -> None:
    """Stop before minutes are spent on texts that can satisfy nothing."""
    ended = float(np.mean(samples.array("finished")))
    if ended < _ENDING:
        raise SystemExit(
            f"only {ended:.1%} of the texts end by themselves: the base was taught another end token than it "
            f"is asked for, or the length limit is too low. The first one: {samples.strings('text')[0]!r}"
        )


def read_chunks(folder: Path) -> Samples:
    """All labelled chunks of a stage, as one."""
    return join_samples(read_samples(each) for each in sorted(folder.glob("chunk-*")))


def describe(samples: Samples) -> dict[str, Any]:
    """What was drawn, in numbers."""
    lengths = np.diff(samples.ragged("tokens").offsets)
    return {
        "texts": len(samples),
        "tokens": int(lengths.sum()),
        "mean_tokens": float(lengths.mean()),
        "finished": float(np.mean(samples.array("finished"))),
        "satisfied": float(np.mean(samples.array("satisfied"))),
    }


def draw_labelled(
    model: LanguageModel[Any],
    prompts: Sequence[Prompt],
    folder: Path,
    oracle: Keywords,
    *,
    samples: int,
    seed: int,
    batch: int,
) -> Samples:
    """Samples of p or of q with labels of whole texts, drawn and labelled here."""
    draw(model, prompts, folder, samples_per_prompt=samples, seed=seed, batch_size=batch)
    label_folder(folder, oracle, None)
    return read_samples(folder)


def rates(samples: Samples, per_prompt: int) -> NDArray[np.float64]:
    """How often each prompt's texts satisfy the oracle: (prompts,)."""
    satisfied: NDArray[np.float64] = samples.array("satisfied").reshape(-1, per_prompt).mean(axis=1)
    return satisfied
