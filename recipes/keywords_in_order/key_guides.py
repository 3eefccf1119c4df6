"""Guides of this study: their data, a stage of their training, their files."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import nearby  # noqa: F401  (finds guides of the CommonGen recipe)
import numpy as np
from guide_training import SHARD, GuideData, plan_steps, seconds_a_step, training_config
from key_samples import satisfied_only
from key_settings import WARM_UP, GuideStage
from progress_log import Clock
from study_settings import GuideSettings

from nado.guide import Guide
from nado.guide_files import save_guide
from nado.huggingface.reading import HuggingFaceReader
from nado.oracles import Keywords
from nado.samples import Samples, join_samples
from nado.training import train
from nado.training_data import TrainingData, split_by_group, split_by_prompt

_SHOWN = 100  # steps between two lines of progress


@dataclass(frozen=True)
class Learning:
    """One stage in hand: a guide, what it is told, and for how long."""

    clock: Clock
    reader: HuggingFaceReader
    oracle: Keywords
    stage: GuideStage
    settings: GuideSettings

    def gather(self, several: Sequence[Samples], bits: int, held_out: float, seed: int) -> GuideData:
        """Samples as tensors, with the base's states beside them."""
        warm = self.stage.objective == WARM_UP
        samples = join_samples([satisfied_only(each) for each in several] if warm else several)
        # What a warm-up learns from are texts, each of which comes behind several lists.
        if warm:
            parts = split_by_group(samples, samples.strings("text"), held_out, seed)
        else:
            parts = split_by_prompt(samples, held_out, seed)
        learned, judged = (
            TrainingData.from_samples(
                each,
                self.reader,
                progress_bits=bits,
                part_names=self.oracle.progress_names,
                both_labels=not warm and each is parts[0],
            )
            for each in parts
        )
        for each in (learned, judged):
            each.keep_states(self.reader)
        cut = 1 - float(np.mean(samples.array("finished")))
        return GuideData(parts[1], learned, judged, bits, cut)

    def train(
        self, guide: Guide, probe: Guide, data: GuideData, folder: Path, seconds: float
    ) -> dict[str, Any]:
        """Train for about so many seconds and save the guide; `probe` is one to time steps with."""
        a_step = seconds_a_step(probe, self.reader, data, self.settings)
        steps = plan_steps(folder, self.settings, seconds, a_step)
        self.clock.say(f"  {steps} steps of {1e3 * a_step:.1f} ms in {seconds:.0f} s")
        config = training_config(self.settings, steps, self.reader)
        config = replace(config, warm_up=self.stage.objective == WARM_UP)
        summary = train(
            guide,
            self.reader,
            data.learned,
            config,
            held_out=data.judged,
            folder=folder / "checkpoints",
            on_step=lambda step, row: self._show(step, steps, row),
        )
        names = self.oracle.progress_names
        save_guide(guide, folder / "guide", summary=summary, shard_size=SHARD, part_names=names)
        return {
            **describe_guide(summary.describe(), self.stage.objective),
            "parameters": sum(each.numel() for each in guide.parameters()),
        }

    def _show(self, step: int, steps: int, row: dict[str, float]) -> None:
        if step == 1 or step % _SHOWN == 0 or "held_out_loss" in row:
            held = f", held out {row['held_out_loss']:.4f}" if "held_out_loss" in row else ""
            self.clock.say(f"  {step}/{steps}: {row['loss']:.4f}{held}")


def describe_guide(summary: dict[str, Any], objective: str) -> dict[str, Any]:
    """What a table says of a guide, from the summary of its training."""
    return {
        "objective": objective,
        "steps": summary["steps"],
        "texts": summary["texts"],
        "satisfied": summary["satisfied"],
        "train_seconds": summary["seconds"],
        "skipped": summary["skipped"],
        "tokens_per_s": summary["tokens"] / max(summary["seconds"], 1e-9),
        "best_step": summary["best_step"],
        "best": summary["best"],
    }
