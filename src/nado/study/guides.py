"""Guides of a study: built for a base and an oracle, trained on labelled samples, saved with what loads them.

Beside what `save_guide` writes, a guide's folder has

oracle.json   the oracle's table. A shipped oracle is loaded from it; a Python file is only named there, and
              is executed only where the operator names it again
base.json     the base's section and the form of its prompts
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nado.calibration import SMALLEST_SCALE, calibrate, calibration_table, recalibrate
from nado.errors import InputError
from nado.guidance import Guidance
from nado.guide import UNCALIBRATED, Guide, GuideConfig
from nado.guide_files import load_guide, save_guide
from nado.guided import GuidedModel
from nado.huggingface import CausalModel, EncoderDecoderModel, load_model
from nado.huggingface.reading import HuggingFaceReader
from nado.oracles import Oracle, load_oracle
from nado.oracles.loading import names_python, saved_oracle
from nado.oracles.suggestion import suggest
from nado.prefixes import find_part, names_for
from nado.prompts import Prompt
from nado.reading import Reader
from nado.samples import Samples
from nado.storage import read_json, write_json
from nado.study.materials import digest_base, load_base, loading_options
from nado.study.reading import find_base
from nado.study.sections import BaseConfig, DataConfig, GenerateConfig, GuideShape, describe_section
from nado.study.systems import System, write_texts
from nado.study.tables import Problem, read_table
from nado.tiny import GUIDES, locate_guide
from nado.trackers import StepListener
from nado.training import Measure, Objective, TrainingConfig, TrainingSummary, train
from nado.training_data import TrainingData, split_by_prompt

log = logging.getLogger(__name__)

_KEPT_BYTES = 2 * 10**9  # of states that are kept without being asked
_MEASURED_PROMPTS = 64  # that guided text is measured on during training
_OWN_CHOICES = ("progress_bits", "named_parts", "seed")  # what is worked out, or is not the guide's


def count_bits(shape: GuideShape, oracle: Oracle, conditions: Sequence[str], *, prefixes: bool) -> int:
    """Bits of progress the guide reads: as asked for, else as many as the conditions have."""
    if shape.progress_bits != "auto":
        if shape.progress_bits and not prefixes:
            raise InputError(
                f"labels of prefixes for a guide with {shape.progress_bits} progress bits",
                "label.prefixes off",
                "Set prefixes = true in [label], or progress_bits = 0 in [guide].",
            )
        return shape.progress_bits
    return max(len(oracle.progress_names(each)) for each in conditions) if prefixes else 0


def name_parts(shape: GuideShape, oracle: Oracle, conditions: Sequence[str], bits: int) -> bool:
    """Whether the guide is told what parts are called: it helps where that depends on the condition."""
    if shape.named_parts != "auto":
        return shape.named_parts
    first = oracle.progress_names(conditions[0])
    return bits > 0 and any(oracle.progress_names(each) != first for each in conditions)


def build_guide(
    reader: HuggingFaceReader,
    oracle: Oracle,
    conditions: Sequence[str],
    shape: GuideShape,
    *,
    base_name: str,
    prefixes: bool,
    cut_share: float = 0.0,
) -> Guide:
    """A fresh guide, the same for the same arguments."""
    bits = count_bits(shape, oracle, conditions, prefixes=prefixes)
    choices = {name: value for name, value in asdict(shape).items() if name not in _OWN_CHOICES}
    config = GuideConfig.for_reader(
        reader,
        **choices,
        progress_bits=bits,
        named_parts=name_parts(shape, oracle, conditions, bits),
        base_name=base_name,
        oracle_name=oracle.name,
        oracle_fingerprint=oracle.fingerprint,
        cut_share=cut_share,
    )
    return _make(config, shape.seed, reader)


def untrained_like(guide: Guide, seed: int = 0) -> Guide:
    """A fresh guide of the same shape, for the same base."""
    assert guide.reader is not None
    config = GuideConfig(**guide.config.to_dict() | {"calibration": UNCALIBRATED})
    return _make(config, seed, guide.reader)


def _make(config: GuideConfig, seed: int, reader: Reader) -> Guide:
    """A guide with its first weights, from the seed alone."""
    with torch.random.fork_rng(devices=[]):
        # Not torch.manual_seed, which would seed the GPUs too, and for good.
        torch.default_generator.manual_seed(seed)
        guide = Guide(config)
    guide.to(reader.model.device)  # type: ignore[arg-type]
    return guide.attach(reader).eval()  # type: ignore[no-untyped-call, no-any-return]


def part_names(guide: Guide, oracle: Oracle) -> Any:
    """What names the parts of a condition, for a guide that reads them."""
    return oracle.progress_names if guide.config.named_parts else None


def train_guide(
    guide: Guide,
    reader: HuggingFaceReader,
    oracle: Oracle,
    samples: Samples,
    folder: Path,
    data: DataConfig,
    config: TrainingConfig,
    *,
    on_step: StepListener | None = None,
) -> TrainingSummary:
    """Train a guide on labelled samples and save it in `folder`; after an interruption it goes on."""
    texts = prepare_guide_texts(samples, guide, reader, oracle, data, config.seed)
    return train_on(texts, guide, reader, oracle, folder, config, calibrated=data.calibrate, on_step=on_step)


@dataclass(frozen=True)
class GuideTexts:
    """Labelled samples ready to learn from and to be judged by, for any guide with as many progress bits."""

    samples: Samples  # that texts are written for, where a guide in training is measured
    held: Samples | None  # held out, as they are saved with a guide
    learned: TrainingData
    judged: TrainingData | None


def prepare_guide_texts(
    samples: Samples, guide: Guide, reader: HuggingFaceReader, oracle: Oracle, data: DataConfig, seed: int
) -> GuideTexts:
    """Samples as tensors, some held out, with the base's states beside them where there is room."""
    kept, held = hold_out(samples, data.held_out, seed)
    learned = prepare_texts(kept, guide, reader, oracle, data)
    judged = None if held is None else prepare_texts(held, guide, reader, oracle, data, both_labels=False)
    if keeps_states(data, learned, reader):
        for each in (learned, judged):
            if each is not None:
                each.keep_states(reader)
    return GuideTexts(held or kept, held, learned, judged)


def train_on(
    texts: GuideTexts,
    guide: Guide,
    reader: HuggingFaceReader,
    oracle: Oracle,
    folder: Path,
    config: TrainingConfig,
    *,
    calibrated: bool = True,
    on_step: StepListener | None = None,
) -> TrainingSummary:
    """Train a guide on texts made ready for it, and save it in `folder`."""
    summary = train(
        guide,
        reader,
        texts.learned,
        config,
        held_out=texts.judged,
        folder=folder / "checkpoints",
        on_step=on_step,
        measure=measure_satisfaction(reader, oracle, texts.samples) if config.measure_every else None,
    )
    table = None
    if texts.judged is not None and calibrated and not config.warm_up:
        table = calibrate_guide(guide, reader, config, texts.judged)
    save_guide(
        guide,
        folder,
        summary=summary,
        calibration=table,
        held_out=texts.held,
        part_names=part_names(guide, oracle),
    )
    return summary


def hold_out(samples: Samples, share: float, seed: int) -> tuple[Samples, Samples | None]:
    """Training and held-out texts: apart by prompt, or by text where there is only one prompt."""
    if share == 0:
        return samples, None
    if len(set(zip(samples.strings("prompt"), samples.strings("condition"), strict=True))) > 1:
        return split_by_prompt(samples, share, seed)
    chosen = np.random.default_rng(seed).permutation(len(samples)) < max(1, round(share * len(samples)))
    return (samples, None) if len(samples) < 2 else (samples.filter(~chosen), samples.filter(chosen))


def prepare_texts(
    samples: Samples,
    guide: Guide,
    reader: HuggingFaceReader,
    oracle: Oracle,
    data: DataConfig,
    *,
    both_labels: bool = True,
) -> TrainingData:
    """Labelled samples as a guide learns from them."""
    prepared = TrainingData.from_samples(
        samples,
        reader,
        progress_bits=guide.config.progress_bits,
        balanced=data.balanced,
        weight_form=data.weight_form,
        clip=data.weight_clip,
        both_labels=both_labels,
        part_names=part_names(guide, oracle),
    )
    if data.merge:
        prepared.merge_equal()
    return prepared


def measure_satisfaction(reader: HuggingFaceReader, oracle: Oracle, samples: Samples) -> Measure:
    """What is measured of a guide in training: how many of a few texts it leads satisfy the oracle."""
    pairs = zip(samples.strings("prompt"), samples.strings("condition"), strict=True)
    prompts = [Prompt(*pair) for pair in dict.fromkeys(pairs)][:_MEASURED_PROMPTS]
    config = GenerateConfig(count=1)

    def measure(guide: Guide) -> dict[str, float]:
        system = System("trained guide", reader.model, guide, Guidance(), oracle)
        written = write_texts(system, prompts, config, None)
        return {"satisfied": sum(bool(each.satisfied) for each in written) / len(written)}

    return measure


def keeps_states(data: DataConfig, learned: TrainingData, reader: HuggingFaceReader) -> bool:
    """Whether the base's states of these texts are read once and kept."""
    if data.keep_states != "auto":
        return data.keep_states
    size = reader.model.model.dtype.itemsize
    return int(learned.lengths.sum()) * reader.state_size * size < _KEPT_BYTES


def calibrate_guide(
    guide: Guide, reader: HuggingFaceReader, config: TrainingConfig, held_out: TrainingData
) -> dict[str, Any]:
    """Fit R to held-out labels, where there are both kinds; the table of what it then predicts."""
    objective = Objective(guide, reader, config)
    try:
        recalibrate(guide, calibrate(objective, held_out))
    except InputError as error:
        log.warning("R is not calibrated: %s", error)
    if guide.config.calibration[0] <= SMALLEST_SCALE:
        log.warning(
            "R is nearly the same for all texts: on held-out ones the guide did not tell those that satisfy "
            "from others. Train it for longer, or on more texts."
        )
    return calibration_table(objective, held_out)


# --- what loads a guide -------------------------------------------------------------------------------


def save_usage(folder: Path, base: BaseConfig, oracle: dict[str, Any], template: str | None) -> None:
    """Write what is needed to use the guide: how its base, its oracle and its prompts are made."""
    write_json(folder / "oracle.json", {"table": oracle, "executes_a_file": names_python(oracle)})
    described = {"base": describe_section(base, "device"), "template": template}
    write_json(folder / "base.json", {**described, "digest": digest_base(base)})


def saved_base(folder: Path, **changes: Any) -> tuple[BaseConfig, str | None]:
    """The base's section that a guide was trained with, with changes, and the form of its prompts."""
    table: dict[str, Any] = {}
    template = None
    if (folder / "base.json").exists():
        saved = read_json(folder / "base.json")
        table = {key: value for key, value in saved["base"].items() if value is not None}
        template = saved["template"]
    else:
        config = _guide_config(folder)
        table = {key: config[key] for key in ("length_limit", "completion") if key in config}
        if config.get("base_name"):
            table["name"] = config["base_name"]
    given = {key: value for key, value in changes.items() if value is not None}
    if "name" in given:  # of the caller's, a path from here; a saved name is no such path
        given["name"] = find_base(given["name"], Path.cwd())
    table |= given
    if "name" not in table:
        raise InputError(
            "a guide that names its base", f"none in {folder}", "Name it: --base FOLDER, or load(…, base=…)."
        )
    problems: list[Problem] = []
    base = read_table(BaseConfig, table, "[base]", Path.cwd(), problems)
    if base is None:
        raise problems[0].error
    return base, template


@dataclass(frozen=True)
class GuideInUse:
    """A guide with everything it is used with."""

    guide: Guide
    base: CausalModel | EncoderDecoderModel
    oracle: Oracle | None
    template: str | None  # of the base's prompts


def use_guide(
    folder: Path, *, oracle: dict[str, Any] | None = None, allow_other_base: bool = False, **base: Any
) -> GuideInUse:
    """Load a guide with its base and its oracle; `base` changes values of the base's section.

    A shipped oracle is found by itself; one in a Python file has to be named in `oracle`.
    """
    config = _guide_config(folder)
    section, template = saved_base(folder, **base)
    asked = saved_oracle(folder) if oracle is None else load_oracle(oracle)
    if asked is None and config.get("progress_bits"):
        raise InputError(
            f"the oracle {config.get('oracle_name', '')}, whose progress this guide reads".replace("  ", " "),
            "only the name of its Python file" if (folder / "oracle.json").exists() else "none",
            "Name it: --oracle file.py:name. No file is executed that you have not named.",
        )
    model = load_base(section)
    names = names_for(folder, asked)
    guide = load_guide(folder, HuggingFaceReader(model), allow_other_base=allow_other_base, part_names=names)
    if asked is not None:
        _compare_oracles(guide, asked)
    return GuideInUse(guide, model, asked, template)


def load(
    path: str | Path,
    *,
    oracle: Oracle | str | Mapping[str, Any] | None = None,
    guidance: Guidance | None = None,
    base: str | Path | None = None,
    **options: Any,
) -> GuidedModel:
    """A guided model from a guide's folder: its base is loaded as it was when the guide was trained.

    The name of an embedded guide is a folder too: ``load("keywords")``. Where no `oracle` is given it is the
    one the guide was trained for, if nado has it; a Python file that a guide names is not executed, one that
    is given here as ``"file.py:name"`` is. `base` is where the base lies, if not under its name; `options`
    go to `load_model`: device, dtype, warpers.
    """
    path = locate_guide(path)
    section, _ = saved_base(path, name=None if base is None else str(base))
    model = load_model(**{**loading_options(section), **options})
    known = saved_oracle(path) if oracle is None else oracle
    if isinstance(known, str | Mapping):
        known = load_oracle(known)
    guided = GuidedModel.from_pretrained(model, path, oracle=known, guidance=guidance)
    if known is not None:
        _compare_oracles(guided.guides[0], known)
    return guided


def _compare_oracles(guide: Guide, oracle: Oracle) -> None:
    """Say so where a guide is used with another oracle than its own, which may be a part of this one."""
    own = guide.config.oracle_fingerprint
    part = find_part(oracle, own)
    # What is denied reads the same of prefixes, but the guide leads to it and not away from it.
    if own and (part is None or (~part).fingerprint == oracle.fingerprint):
        misread = part is None and guide.config.progress_bits
        told = ", and what it is told of prefixes is another thing now" if misread else ""
        log.warning("the guide was trained for another oracle than this %s%s", oracle.name, told)


def _guide_config(folder: Path) -> dict[str, Any]:
    if not (folder / "config.json").is_file():
        inner = folder / "train"  # of a study
        raise InputError(
            f"a guide in the folder {folder}",
            "no config.json there",
            f"Give {inner}."
            if (inner / "config.json").is_file()
            else f"Give what nado train has written, or an embedded guide. {suggest(str(folder), GUIDES)}",
        )
    found: dict[str, Any] = read_json(folder / "config.json")
    return found
