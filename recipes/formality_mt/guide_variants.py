"""Training one guide of the table within the time there is."""

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import neighbours  # noqa: F401  (finds the clock of the CommonGen recipe)
from progress_log import Clock
from table_settings import GuideVariant, RoundSettings

from nado.guide import Guide
from nado.guided_language_model import GuidedLanguageModel
from nado.proposals import Guided, Proposal, Tempered
from nado.samples import Samples
from nado.storage import read_json, write_json
from nado.study.guides import GuideTexts, build_guide, prepare_guide_texts, train_on
from nado.study.materials import Materials
from nado.training import TrainingConfig, train

_PROBE = 12  # steps that are timed; the first half warms up
_FEWEST = 20  # steps that a guide is trained at least
_SHOWN = 500  # steps between two lines of progress


def fresh_guide(materials: Materials, cut_share: float = 0.0) -> Guide:
    """An untrained guide of the study's shape: q is p."""
    study = materials.study
    return build_guide(
        materials.reader,
        materials.oracle,
        materials.tasks.conditions,
        study.guide,
        base_name=Path(study.base.name).name,
        prefixes=materials.prefixes,
        cut_share=cut_share,
    )


def training_config(materials: Materials, variant: GuideVariant, steps: int) -> TrainingConfig:
    """The study's own with this variant's weights and number of steps."""
    config = materials.study.train
    names = ("consistency_weight", "log_consistency_weight", "learning_rate")
    own = {name: getattr(variant, name) for name in names if getattr(variant, name) is not None}
    half = config.half and materials.base.device.type == "cuda"
    return replace(
        config,
        **own,
        steps=steps,
        half=half,
        ramp_steps=min(config.ramp_steps, max(1, steps // 10)),
        evaluate_every=max(1, steps // 6),
    )


@dataclass(frozen=True)
class VariantTexts:
    """What all guides of one temperature learn from: made ready once."""

    texts: GuideTexts
    cut_share: float  # of the texts were cut at the length limit

    @classmethod
    def prepare(cls, materials: Materials, samples: Samples) -> "VariantTexts":
        """Labelled samples as tensors."""
        study = materials.study
        shape = fresh_guide(materials)
        shared = (shape, materials.reader, materials.oracle, study.data, study.train.seed)
        cut = 1 - float(samples.array("finished").mean())
        return cls(prepare_guide_texts(samples, *shared), cut)


def begun_by(q_hat: GuidedLanguageModel, settings: RoundSettings) -> Proposal:
    """Beginnings by q̂, by a sharper p and by p; p itself writes the rest of each."""
    components = (Guided(q_hat), Tempered(settings.sharp_temperature), Tempered())
    shares = (settings.share, settings.sharp, 1 - settings.share - settings.sharp)
    return Proposal(components, shares, complete_from_p=True, mean_prefix=settings.mean_prefix)


def train_variant(
    clock: Clock,
    materials: Materials,
    ready: VariantTexts,
    variant: GuideVariant,
    seconds: float,
    folder: Path,
    start: Guide | None = None,
) -> dict[str, Any]:
    """Train a guide, from another's weights where one is given, and save it in `folder`/guide."""
    steps = plan_steps(materials, ready, variant, seconds, folder)
    clock.say(f"  {steps} steps in {seconds:.0f} s")
    guide = fresh_guide(materials, ready.cut_share)
    if start is not None:  # its calibration is in its config, and is found anew for this one
        guide.load_state_dict(start.state_dict())

    def show(step: int, row: dict[str, float]) -> None:
        if step == 1 or step % _SHOWN == 0 or "held_out_loss" in row:
            held = f", held out {row['held_out_loss']:.4f}" if "held_out_loss" in row else ""
            clock.say(f"  {step}/{steps}: {row['loss']:.4f}{held}")

    summary = train_on(
        ready.texts,
        guide,
        materials.reader,
        materials.oracle,
        folder / "guide",
        training_config(materials, variant, steps),
        calibrated=materials.study.data.calibrate,
        on_step=show,
    )
    facts = summary.describe()
    return {
        "steps": facts["steps"],
        "texts": facts["texts"],
        "ess": facts["ess"],
        "satisfied_samples": facts["satisfied"],
        "train_seconds": round(facts["seconds"], 1),
        "tokens_per_s": facts["tokens"] / max(facts["seconds"], 1e-9),
        "parameters": sum(each.numel() for each in guide.parameters()),
        "best_step": facts["best_step"],
        "best": facts["best"],
    }


def plan_steps(
    materials: Materials, ready: VariantTexts, variant: GuideVariant, seconds: float, folder: Path
) -> int:
    """Steps that fit into the time; settled once, so that a run that is taken up has the same ones."""
    path = folder / "plan.json"
    if not path.is_file():
        most = materials.study.train.steps
        a_step = seconds_a_step(materials, ready, variant)
        fitting = most if seconds == float("inf") else int(seconds / a_step)
        write_json(path, {"steps": max(min(_FEWEST, most), min(most, fitting)), "seconds_a_step": a_step})
    return int(read_json(path)["steps"])


def seconds_a_step(materials: Materials, ready: VariantTexts, variant: GuideVariant) -> float:
    """How long a step takes, by a few of them with a guide of their own."""
    times: list[float] = []
    config = replace(training_config(materials, variant, _PROBE), evaluate_every=0, save_every=0)
    train(
        fresh_guide(materials),
        materials.reader,
        ready.texts.learned,
        config,
        on_step=lambda step, row: times.append(time.perf_counter()),
    )
    half = len(times) // 2
    return (times[-1] - times[half]) / (len(times) - 1 - half)
