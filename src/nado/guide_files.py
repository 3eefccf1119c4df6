"""A guide as a folder: its weights, a model card, and what is needed to check it beside another base.

config.json, model*.safetensors   the guide alone; its base is only named
README.md                         the model card, written from the training run
training.json                     the run's summary, and what the guide scored on held_out.parquet
held_out.parquet                  some labelled texts of prompts it was never trained on
calibration.json                  predicted against observed rates
"""

import json
import logging
import re
import secrets
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from nado import __version__
from nado.errors import InputError, MismatchError, StorageError
from nado.guide import Guide, GuideConfig
from nado.reading import Reader
from nado.samples import Samples
from nado.storage import read_json, write_atomically, write_bytes, write_json
from nado.training import Objective, TrainingConfig, TrainingSummary, evaluate
from nado.training_data import TrainingData

log = logging.getLogger(__name__)

PartNames: TypeAlias = Callable[[str], Sequence[str]]

HELD_OUT_TEXTS = 1000
_COMPARED = ("success", "calibration_error", "consistency_residual")
_UNCORRECTED = b"nado_uncorrected"
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}


@dataclass(frozen=True)
class BaseComparison:
    """What a guide loses beside another base than its own, on the held-out texts it was saved with."""

    trained_for: str  # fingerprint
    attached_to: str
    texts: int  # 0 when the guide was saved without held-out texts, and nothing could be measured
    own: dict[str, float]  # beside its own base, when it was saved
    other: dict[str, float]

    def __str__(self) -> str:
        bases = f"the guide was trained for the base {self.trained_for[:8]}, not {self.attached_to[:8]}"
        if not self.texts:
            return f"{bases}; it was saved without held-out texts, so what that costs is not known"
        changes = ", ".join(
            f"{name.replace('_', ' ')} {self.own[name]:.4f} → {self.other[name]:.4f}" for name in _COMPARED
        )
        return f"{bases}: on {self.texts} held-out texts {changes}"

    def describe(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


def save_guide(
    guide: Guide,
    folder: str | Path,
    *,
    summary: TrainingSummary | None = None,
    calibration: dict[str, Any] | None = None,
    held_out: Samples | None = None,
    shard_size: str = "5GB",
    part_names: PartNames | None = None,
) -> Path:
    """Write the guide's folder; returns it. Files of an earlier save are replaced, others left alone.

    `calibration` is a `calibration_table`. At most 1,000 of the `held_out` samples are kept, with what the
    guide, attached to its base, scores on them. `shard_size` of "15MB" keeps files small enough for most
    places.
    """
    folder = Path(folder)
    kept = None if held_out is None else _choose(held_out, HELD_OUT_TEXTS)
    scores = None if kept is None else _score(guide, kept, part_names)
    _warn_of_large_tensors(guide, shard_size)
    _write_weights(guide, folder, shard_size)
    described = None if summary is None else summary.describe()
    write_json(folder / "training.json", {"summary": described, "held_out": scores})
    card = model_card(guide.config, described, scores, calibration)
    write_bytes(folder / "README.md", card.encode())
    if calibration is not None:
        write_json(folder / "calibration.json", calibration)
    if kept is not None:
        write_atomically(folder / "held_out.parquet", lambda path: _write_samples(kept, path))
    return folder


def load_guide(
    folder: str | Path,
    reader: Reader,
    *,
    allow_other_base: bool = False,
    part_names: PartNames | None = None,
    on_other_base: Callable[[BaseComparison], None] | None = None,
) -> Guide:
    """Read a guide from a local folder and attach it to its base.

    With `allow_other_base` a base with other weights or warpers is accepted, as long as its vocabulary, limit
    and completion are the same: what is lost is measured, and told to `on_other_base` or else logged.
    """
    folder = Path(folder)
    _require_guide(folder)
    guide: Guide = Guide.from_pretrained(folder, local_files_only=True, use_safetensors=True)
    guide.to(reader.model.device)  # type: ignore[arg-type]
    trained_for, here = guide.config.base_fingerprint, reader.model.fingerprint
    if allow_other_base:
        guide.config.base_fingerprint = here
    guide.attach(reader)
    _require_fit(guide.config, reader)
    if trained_for != here:
        guide.config.trained_base_fingerprint = trained_for  # not forgotten if it is saved again
        (on_other_base or _log_comparison)(_compare(guide, folder, trained_for, part_names))
    return guide


# --- held-out texts -----------------------------------------------------------------------------------


def _choose(samples: Samples, count: int) -> Samples:
    """At most `count` of the samples, the same ones every time."""
    if len(samples) <= count:
        return samples
    kept = np.zeros(len(samples), dtype=bool)
    kept[np.random.default_rng(0).choice(len(samples), count, replace=False)] = True
    return samples.filter(kept)


def _score(guide: Guide, samples: Samples, part_names: PartNames | None) -> dict[str, float]:
    """What the guide makes of labelled samples beside the base it is attached to."""
    if guide.reader is None:
        raise InputError(
            "a guide attached to its base, to measure it on the held-out samples",
            "one that is not attached",
            "Call guide.attach(reader) first.",
        )
    bits = guide.config.progress_bits
    data = TrainingData.from_samples(
        samples, guide.reader, progress_bits=bits, both_labels=False, part_names=part_names
    )
    # Training data of a few texts cost little: all positions, float32, a few texts at once.
    found = evaluate(Objective(guide, guide.reader, TrainingConfig()), data, batch_size=64)
    return {"texts": len(samples), **{name: found[name] for name in _COMPARED}}


def _compare(guide: Guide, folder: Path, trained_for: str, part_names: PartNames | None) -> BaseComparison:
    here = guide.config.base_fingerprint
    path = folder / "held_out.parquet"
    if not path.exists():
        return BaseComparison(trained_for, here, 0, {}, {})
    own = read_json(folder / "training.json")["held_out"]
    other = _score(guide, _read_samples(path), part_names)
    texts = int(other.pop("texts"))
    return BaseComparison(trained_for, here, texts, {name: own[name] for name in _COMPARED}, other)


def _log_comparison(comparison: BaseComparison) -> None:
    log.warning("%s", comparison)


def _write_samples(samples: Samples, path: Path) -> None:
    table = samples.table.replace_schema_metadata({_UNCORRECTED: json.dumps(samples.uncorrected)})
    pq.write_table(table, path, compression="zstd")


def _read_samples(path: Path) -> Samples:
    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowException) as error:
        raise StorageError(
            f"readable samples in {path}", f"the error: {error}", "Fetch or save the guide again."
        ) from error
    return Samples(table, json.loads((table.schema.metadata or {}).get(_UNCORRECTED, b"false")))


# --- weights ------------------------------------------------------------------------------------------


def _write_weights(guide: Guide, folder: Path, shard_size: str) -> None:
    """Save beside the folder, then move in file by file, config.json last: it is what makes it a guide."""
    partial = folder.with_name(f".{folder.name}-{secrets.token_hex(4)}.partial")
    try:
        guide.save_pretrained(partial, max_shard_size=shard_size)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").unlink(missing_ok=True)
        for old in folder.glob("model*.safetensors*"):
            old.unlink()
        for new in sorted(partial.iterdir(), key=lambda path: path.name == "config.json"):
            new.replace(folder / new.name)
    except OSError as error:
        raise StorageError(
            f"to write {folder}",
            f"the error: {error.strerror or error}",
            "Free some space or choose another folder, then save again.",
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _warn_of_large_tensors(guide: Guide, shard_size: str) -> None:
    limit = _bytes_of(shard_size)
    large = {name: tensor.nbytes for name, tensor in guide.state_dict().items() if tensor.nbytes > limit}
    if large:
        name = max(large, key=lambda each: large[each])
        log.warning(
            "%s alone takes %.1f MB and is not split: its file will be larger than %s",
            name,
            large[name] / 10**6,
            shard_size,
        )


def _bytes_of(size: str) -> int:
    match = re.fullmatch(r"(\d+) ?(KB|MB|GB)", size)
    if match is None:
        raise InputError(
            "a shard size such as 15MB or 5GB", f"{size!r}", "Give a whole number and KB, MB or GB."
        )
    return int(match[1]) * _UNITS[match[2]]


def _require_guide(folder: Path) -> None:
    if not (folder / "config.json").is_file():
        raise StorageError(
            f"a guide in the folder {folder}",
            "no config.json there",
            "Check the folder's name; a guide on a hub has to be downloaded first.",
        )
    kind = read_json(folder / "config.json").get("model_type")
    if kind != GuideConfig.model_type:
        raise MismatchError(
            f"a guide in {folder}", f"a model of type {kind}", "Give a folder written by save_guide."
        )
    if not any(folder.glob("model*.safetensors")):
        raise StorageError(
            f"weights as safetensors in {folder}",
            "none",
            "Save the guide again, or fetch all of its files; pickled weights are not read.",
        )


def _require_fit(config: Any, reader: Reader) -> None:
    """A base of another width cannot be read at all, allowed or not. `attach` checks the rest."""
    embeddings = reader.input_embeddings
    widths = {
        "state_size": reader.state_size,
        "embedding_size": 0 if embeddings is None else int(embeddings.shape[1]),
        "condition_vocabulary_size": reader.condition_vocabulary_size,
    }
    for name, found in widths.items():
        wanted = getattr(config, name)
        if wanted != found:
            raise MismatchError(
                f"a base with {name.replace('_', ' ')} {wanted}, as this guide was trained for",
                f"{found}",
                "Load the base named in the guide's config.json.",
            )


# --- the model card -----------------------------------------------------------------------------------


def model_card(
    config: Any,
    summary: dict[str, Any] | None,
    held_out: dict[str, float] | None,
    calibration: dict[str, Any] | None,
) -> str:
    """README.md of a guide: what it is, what was measured, how to load it."""
    sections = [_CARD_START.format(**_card_facts(config))]
    if summary is not None:
        sections.append(_training_section(summary))
    if held_out is not None:
        scores = [(name.replace("_", " "), f"{held_out[name]:.4f}") for name in _COMPARED]
        title = f"## On {held_out['texts']:,} held-out texts\n\n"
        sections.append(title + _table(("measure", "value"), scores))
    if calibration is not None:
        bins = [
            (f"{row['predicted']:.3f}", f"{row['observed']:.3f}", f"{row['texts']:,}")
            for row in calibration["bins"]
        ]
        sections.append("## Calibration\n\n" + _table(("predicted R", "observed rate", "texts"), bins))
    sections.append(_CARD_END)
    return "\n".join(sections)


def _card_facts(config: Any) -> dict[str, Any]:
    return {
        "base": config.base_name or "an unnamed base",
        "fingerprint": getattr(config, "trained_base_fingerprint", config.base_fingerprint),
        "oracle": config.oracle_name or "an unnamed oracle",
        "limit": config.length_limit,
        "completion": config.completion,
        "vocabulary": config.vocabulary_size,
        "body": "light" if config.reads == "light" else f"{config.layers} layers of {config.size}",
        "reads": config.reads,
        "head": f"{config.head}, {config.matrix}",
        "version": __version__,
    }


def _training_section(summary: dict[str, Any]) -> str:
    best = summary["best"]
    rows = [
        ("texts", f"{summary['texts']:,}"),
        ("of them satisfied", f"{summary['satisfied']:.1%}"),
        ("effective sample size", f"{summary['ess']:.1%}"),
        ("steps", f"{summary['steps']:,}" + (", stopped early" if summary["stopped_early"] else "")),
        ("weights of step", f"{summary['best_step']:,}"),
        ("tokens read", f"{summary['tokens']:,}"),
        ("seconds", f"{summary['seconds']:,.0f}"),
        *((name.replace("_", " "), f"{best[name]:.4f}") for name in best if _is_shown(name)),
    ]
    return "## Training\n\n" + _table(("what", "value"), rows)


def _is_shown(name: str) -> bool:
    return name == "loss" or name.startswith(("held_out_", "guided_"))


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


_CARD_START = """---
library_name: nado
tags: [nado, controllable-text-generation]
---
# A guide for {base}

Predicts at every token how likely the text is to end up satisfying {oracle}, so that the base writes texts
that do. The base's own weights are untouched and not in this folder.

| what | value |
| --- | --- |
| base | {base}, fingerprint {fingerprint} |
| oracle | {oracle} |
| length limit | {limit} tokens, completion `{completion}` |
| vocabulary | {vocabulary} |
| network | {body}, reads {reads}; head {head} |
| library | nado {version} |
"""

_CARD_END = """## Use

```python
from nado.guide_files import load_guide

guide = load_guide("this folder", reader)  # `reader`: the base above, as nado reads it
```
"""
