"""Which settings a method would be used with: chosen on some utterances, reported on the others."""

import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from fisher_scores import Scored, compare_scored
from numpy.typing import NDArray
from table_settings import BASE, FUDGE, SAMPLE

_CHOOSING = 3  # one different source of so many is for choosing
_TOLERANCE = 0.3  # of BLEU: a difference that so many utterances do not resolve
_BLEU, _FORMALITY = "bleu_fluent", "formality_oracle"  # the judge has no say in it


def tune(rows: Sequence[dict[str, Any]], scored: dict[str, Scored]) -> dict[str, Any]:
    """For each guide and search the setting that is chosen, against the base and against FUDGE's."""
    families: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        if row["system"] != BASE and row["decoding"] != SAMPLE:
            families.setdefault((row["system"], row["decoding"]), []).append(row)
    chosen = {key: choose(several, scored) for key, several in families.items()}
    found = []
    for (system, decoding), row in chosen.items():
        own = part_of(scored[row["name"]], chooses=False)
        names = ("system", "title", "decoding", "strength", "doubt", "plausible")
        line = {name: row[name] for name in names if name in row}
        line |= {"tried": len(families[system, decoding]), "utterances": len(own.texts)}
        base = scored[f"{BASE}-{decoding}"]
        line["against_base"] = compare_scored(own, part_of(base, chooses=False))
        rival = chosen.get((FUDGE, decoding))
        if system != FUDGE and rival is not None:
            line["against_fudge"] = compare_scored(own, part_of(scored[rival["name"]], chooses=False))
        found.append(line)
    return {"tolerance": _TOLERANCE, "choosing_share": 1 / _CHOOSING, "lines": found}


def choose(rows: Sequence[dict[str, Any]], scored: dict[str, Scored]) -> dict[str, Any]:
    """The most formal line whose BLEU is the base's or near it; where there is none, that of best BLEU."""
    parts = {row["name"]: part_of(scored[row["name"]], chooses=True) for row in rows}
    base = part_of(scored[f"{BASE}-{rows[0]['decoding']}"], chooses=True)

    def value(row: dict[str, Any], name: str) -> float:
        return _value(parts[row["name"]], name)

    able = [row for row in rows if value(row, _BLEU) >= _value(base, _BLEU) - _TOLERANCE]
    if able:
        return max(able, key=lambda row: value(row, _FORMALITY))
    return max(rows, key=lambda row: value(row, _BLEU))


def part_of(scored: Scored, *, chooses: bool) -> Scored:
    """The same on the utterances that choose, or on the others; equal sources stay together."""
    inside = {name: _inside(sources, chooses) for name, sources in scored.groups.items()}
    metrics = {name: replace(each, rows=each.rows[inside[name]]) for name, each in scored.metrics.items()}
    groups = {name: _kept(sources, inside[name]) for name, sources in scored.groups.items()}
    return Scored(_kept(scored.texts, inside[_FORMALITY]), metrics, groups)


def _inside(sources: Sequence[str], chooses: bool) -> NDArray[np.bool_]:
    return np.array([(zlib.crc32(each.encode()) % _CHOOSING == 0) == chooses for each in sources], dtype=bool)


def _kept(values: Sequence[str], inside: NDArray[np.bool_]) -> list[str]:
    return [values[at] for at in np.flatnonzero(inside)]


def _value(scored: Scored, name: str) -> float:
    found = scored.metrics[name].value
    return -np.inf if found is None else found
