"""Guides: their data, how many steps fit into the time there is, their training, their files."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Protocol, TypeVar

import torch
from progress_log import Clock
from study_settings import GuideSettings

from nado.calibration import Calibration, calibrate, calibration_table
from nado.errors import InputError
from nado.guide import Guide, GuideConfig
from nado.guide_files import load_guide, save_guide
from nado.huggingface.reading import HuggingFaceReader
from nado.oracles import Keywords, Oracle
from nado.samples import Samples
from nado.storage import read_json, write_json
from nado.training import Measure, Objective, TrainingConfig, train
from nado.training_data import TrainingData, split_by_prompt

SHARD = "15MB"
_PROBE = 12  # steps that are timed; the first half warms up
_FEWEST = 20  # steps that a guide is trained at least
_LOOKS = 6  # evaluations on held-out texts
_SHOWN = 250  # steps between two lines of progress
_SAVED = 1000  # steps between checkpoints


@dataclass(frozen=True)
class GuideData:
    """What all guides of a study learn from; the base's states are read once for all of them."""

    samples: Samples  # held out, as they are saved with a guide
    learned: TrainingData
    judged: TrainingData  # held out
    bits: int
    cut_share: float  # of the texts were cut at the length limit

    def told_to(self, settings: GuideSettings) -> "GuideData":
        """The same texts with what this guide is told of them; a bare one learns whole-text labels alone."""
        kinds = ("stops", "progress", "parts")
        nothing: dict[str, Any] = {kind: None for kind in kinds if not settings.is_told(kind)}
        return replace(
            self,
            learned=replace(self.learned, **nothing),
            judged=replace(self.judged, **nothing),
            bits=self.bits if settings.is_told("progress") else 0,
        )


def prepare(
    samples: Samples, reader: HuggingFaceReader, oracle: Keywords, *, held_out: float, seed: int
) -> GuideData:
    """Labelled samples as tensors, with the base's states beside them."""
    bits = max(len(oracle.progress_names(each)) for each in set(samples.strings("condition")))
    parts = split_by_prompt(samples, held_out, seed)
    learned, judged = (
        TrainingData.from_samples(
            each,
            reader,
            progress_bits=bits,
            part_names=oracle.progress_names,
            both_labels=each is parts[0],
        )
        for each in parts
    )
    for each in (learned, judged):
        each.keep_states(reader)
    cut = 1 - float(samples.array("finished").mean())
    return GuideData(parts[1], learned, judged, bits, cut)


def build_guide(
    reader: HuggingFaceReader, oracle: Keywords, settings: GuideSettings, data: GuideData, base_name: str
) -> Guide:
    """An untrained guide, the same for the same settings: q is p."""
    config = GuideConfig.for_reader(
        reader,
        reads=settings.reads,
        size=settings.size,
        layers=settings.layers,
        heads=settings.heads,
        dropout=settings.dropout,
        head=settings.head,
        matrix=settings.matrix,
        progress_bits=data.bits,
        named_parts=data.bits > 0,
        base_name=base_name,
        oracle_name=oracle.name,
        oracle_fingerprint=oracle.fingerprint,
        cut_share=data.cut_share,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        guide: Any = Guide(config)
    guide.to(reader.model.device)
    built: Guide = guide.attach(reader).eval()
    return built


def training_config(settings: GuideSettings, steps: int, reader: HuggingFaceReader) -> TrainingConfig:
    """How this guide is trained when it has this many steps: in the arithmetic of the base it reads."""
    looks = max(1, steps // _LOOKS)
    return TrainingConfig(
        steps=steps,
        batch_size=settings.batch,
        learning_rate=settings.learning_rate,
        ramp_steps=min(50, max(1, steps // 10)),
        consistency_weight=settings.consistency_weight,
        log_consistency_weight=settings.log_consistency_weight,
        stop_weight=1.0 * settings.is_told("stops"),
        parts_weight=0.5 * settings.is_told("parts"),
        half=reader.input_embeddings.dtype == torch.bfloat16,
        compiled=settings.compiled and reader.model.device.type == "cuda",
        seed=settings.seed,
        evaluate_every=looks,
        measure_every=looks if settings.measured else 0,
        save_every=_SAVED,
    )


def seconds_a_step(
    guide: Guide, reader: HuggingFaceReader, data: GuideData, settings: GuideSettings
) -> float:
    """How long a step takes, by a few of them; the guide is spoiled by it."""
    times: list[float] = []
    config = training_config(settings, _PROBE, reader)
    config = replace(config, evaluate_every=0, measure_every=0)
    train(guide, reader, data.learned, config, on_step=lambda step, row: times.append(time.perf_counter()))
    # The middle one: a step that compiles something, or that other work delays, says nothing of the rest.
    return median(later - earlier for earlier, later in pairwise(times[len(times) // 2 :]))


WaitingT = TypeVar("WaitingT")


class Timed(Protocol):
    """What asks for time."""

    @property
    def seconds(self) -> float:
        """How much, at most."""
        ...


def share_time(clock: Clock, waiting: Sequence[Timed], reserve: float) -> float:
    """Seconds for the first of the guides that wait; all get the same share of what they ask for."""
    asked = sum(each.seconds for each in waiting)
    there = max(0.0, clock.left - reserve)
    return waiting[0].seconds * min(1.0, there / asked)


def leave_out_last(
    waiting: Sequence[WaitingT],
    done: Callable[[WaitingT], bool],
    too_short: Callable[[Sequence[WaitingT]], bool],
) -> tuple[list[WaitingT], list[WaitingT]]:
    """Those there is time for, and those there is not: rather than cutting all short, the last are left.

    What is done already is never left out; `too_short` is asked about the others.
    """
    begun = [each for each in waiting if not done(each)]
    kept = len(begun)
    while kept and too_short(begun[:kept]):
        kept -= 1
    others = begun[kept:]
    return [each for each in waiting if each not in others], others


def plan_steps(folder: Path, settings: GuideSettings, seconds: float, a_step: float) -> int:
    """Steps that fit into the time; settled once, so that a run that is taken up has the same ones."""
    path = folder / "plan.json"
    if not path.is_file():
        fitting = settings.steps if settings.whole else int(seconds / a_step)
        steps = max(min(_FEWEST, settings.steps), min(settings.steps, fitting))
        write_json(path, {"steps": steps, "seconds": seconds, "seconds_a_step": a_step})
    return int(read_json(path)["steps"])


def train_guide(
    clock: Clock,
    guide: Guide,
    reader: HuggingFaceReader,
    data: GuideData,
    oracle: Keywords,
    settings: GuideSettings,
    steps: int,
    folder: Path,
    measure: Measure | None = None,
) -> dict[str, Any]:
    """Train a guide and save it in `folder`; returns what was measured, its history too."""
    config = training_config(settings, steps, reader)

    def show(step: int, row: dict[str, float]) -> None:
        if step == 1 or step % _SHOWN == 0 or "held_out_loss" in row:
            held = f", held out {row['held_out_loss']:.4f}" if "held_out_loss" in row else ""
            clock.say(f"  {step}/{steps}: {row['loss']:.4f}{held}")

    summary = train(
        guide,
        reader,
        data.learned,
        config,
        held_out=data.judged,
        folder=folder / "checkpoints",
        on_step=show,
        measure=measure if settings.measured else None,
    )
    objective = Objective(guide, reader, config)
    found = _calibrate(objective, data.judged)
    save_guide(
        guide,
        folder / "guide",
        summary=summary,
        calibration=calibration_table(objective, data.judged),
        held_out=data.samples,
        shard_size=SHARD,
        part_names=oracle.progress_names if data.bits else None,
    )
    facts = summary.describe()
    looks = [row for row in summary.history if "held_out_loss" in row]
    parameters = sum(each.numel() for each in guide.parameters())
    return {
        "steps": steps,
        "sample_passes": steps * settings.batch,
        "tokens_per_s": facts["tokens"] / max(facts["seconds"], 1e-9),
        "train_seconds": facts["seconds"],
        "best_step": facts["best_step"],
        "parameters": parameters,
        "best": facts["best"],
        "looks": looks,
        "calibration": None if found is None else found.describe(),
    }


def _calibrate(objective: Objective, judged: TrainingData) -> Calibration | None:
    """What would mend R on held-out texts; None where they are of one kind."""
    try:
        return calibrate(objective, judged)
    except InputError:
        return None


def open_guide(folder: Path, reader: HuggingFaceReader, oracle: Oracle) -> Guide:
    """A trained guide as it was saved."""
    guide: Any = load_guide(folder / "guide", reader, part_names=oracle.progress_names)
    opened: Guide = guide.eval()
    return opened
