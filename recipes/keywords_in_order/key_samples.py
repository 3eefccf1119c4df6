"""Samples that guides learn from: texts of p, texts that q̂ begins, and references with their own keys."""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nearby  # noqa: F401  (finds the labelling processes of the CommonGen recipe)
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from key_settings import KeyDraw
from ordered_keys import KeyedText
from progress_log import Clock
from side_work import TextMaker, Workers, label_folder

from nado.drawing import draw
from nado.huggingface import CausalModel
from nado.importing import import_samples
from nado.oracles import Keywords
from nado.prompts import Prompt
from nado.proposals import Proposal
from nado.samples import Samples, join_samples, read_samples, samples_folder
from nado.storage import write_atomically

_IMPORT_BATCH = 512


@dataclass(frozen=True)
class Making:
    """What it takes to make labelled samples."""

    clock: Clock
    model: CausalModel
    oracle: Keywords
    workers: Workers
    settings: KeyDraw

    def draw(
        self, prompts: Sequence[Prompt], per_prompt: int, folder: Path, proposal: Proposal, seed: int
    ) -> dict[str, Any]:
        """Draw chunk by chunk; each is labelled by other processes while the next is drawn."""
        size, labels = max(1, self.settings.chunk // per_prompt), []
        for number, first in enumerate(range(0, len(prompts), size)):
            place = folder / f"chunk-{number:03d}"
            draw(
                self.model,
                prompts[first : first + size],
                place,
                samples_per_prompt=per_prompt,
                proposal=proposal,
                seed=seed + 1000 * number,
                batch_size=self.settings.batch,
                shard_rows=size * per_prompt,
            )
            labels.append(self.label(place))
            self.clock.say(f"  {min(first + size, len(prompts)):,} of {len(prompts):,} prompts")
        return wait(labels, folder)

    def write_freely(self, count: int, folder: Path, seed: int, proposal: Proposal | None = None) -> Samples:
        """Texts of p after no prompt at all, those that end by themselves."""
        samples = draw(
            self.model,
            [Prompt("", "")],
            folder,
            samples_per_prompt=count,
            proposal=proposal or Proposal(),
            seed=seed,
            batch_size=self.settings.batch,
        )
        return samples.filter(samples.array("finished"))

    def keep(self, drawn: Samples, conditions: Sequence[str], folder: Path) -> dict[str, Any]:
        """Drawn texts once more, for the condition that each is given now; those given none are left."""
        table = drawn.table.set_column(
            drawn.table.schema.get_field_index("condition"), "condition", pa.array(conditions, pa.string())
        ).filter(pa.array([each != "" for each in conditions]))
        labels, size = [], self.settings.chunk
        for number, first in enumerate(range(0, len(table), size)):
            place = samples_folder(folder / f"chunk-{number:03d}")
            some = table.slice(first, size)
            manifest = place.open({"model": self.model.fingerprint, "first": first, "rows": len(some)}, 1)
            rows = pa.array(range(len(some)), pa.int64())
            place.write(0, some.set_column(some.schema.get_field_index("row"), "row", rows))
            place.close(manifest)
            labels.append(self.label(place.path))
        return wait(labels, folder)

    def bring(self, texts: Sequence[KeyedText], folder: Path) -> dict[str, Any]:
        """References as samples: what p gives them is scored, what they were drawn from nobody knows."""
        labels = []
        for number, first in enumerate(range(0, len(texts), self.settings.chunk)):
            some = texts[first : first + self.settings.chunk]
            path, place = folder / f"texts-{number:03d}.parquet", folder / f"chunk-{number:03d}"
            write_atomically(path, lambda partial, some=some: _write_references(partial, some))
            import_samples(self.model, path, place, batch_size=_IMPORT_BATCH, shard_rows=len(some))
            labels.append(self.label(place))
            self.clock.say(f"  {first + len(some):,} of {len(texts):,} references")
        return wait(labels, folder)

    def label(self, place: Path) -> "Future[float]":
        """Hand a chunk to the labelling processes."""
        return self.workers.submit(label_folder, place, self.oracle, TextMaker(self.model))


def _write_references(path: Path, texts: Sequence[KeyedText]) -> None:
    columns = {
        "prompt": [each.prompt.prompt for each in texts],
        "condition": [each.prompt.condition for each in texts],
        "text": [f" {each.text}" for each in texts],
    }
    pq.write_table(pa.table(columns), path)


def wait(labels: "Sequence[Future[float]]", folder: Path) -> dict[str, Any]:
    """Facts about samples once they are labelled."""
    for each in labels:
        each.result()
    samples = read_folder(folder)
    lengths = np.diff(samples.ragged("tokens").offsets)
    return {
        "texts": len(samples),
        "tokens": int(lengths.sum()),
        "mean_tokens": float(lengths.mean()),
        "finished": float(np.mean(samples.array("finished"))),
        "satisfied": float(np.mean(samples.array("satisfied"))),
        "parts": float(np.mean(samples.ragged("parts").values)),
    }


def read_folder(folder: Path) -> Samples:
    """All labelled chunks of a stage, as one."""
    return join_samples(read_samples(each) for each in sorted(folder.glob("chunk-*")))


def satisfied_only(samples: Samples) -> Samples:
    """What a warm-up learns from, stamped as uncorrected: their weights are not asked for."""
    chosen = samples.filter(samples.array("satisfied").astype(bool))
    return Samples(chosen.table, uncorrected=True)


def some_of(count: int, of: int, seed: int) -> list[int]:
    """`count` different numbers below `of`, in random order."""
    order = torch.randperm(of, generator=torch.Generator().manual_seed(seed))
    return [int(each) for each in order[:count]]
