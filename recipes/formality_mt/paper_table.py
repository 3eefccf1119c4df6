"""What the paper's translation table looks like when its own outputs are scored like for like.

    python recipes/formality_mt/paper_table.py --data DATA --page docs/paper_translation_table.md

DATA has the folders nado_mt_dumps, fluent_fisher, fisher_callhome and pavlick_formality. Every number on the
page is made here; the references themselves are not on it.
"""

import argparse
import string
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import sacrebleu
from formality_classifiers import Classifiers, fit_classifiers
from numpy.typing import NDArray
from raw_files import read_records

from nado.errors import InputError, NadoError
from nado.metrics import Comparison, Metric, chrf, compare, mean, sacre_bleu
from nado.storage import write_atomically

BASE, GUIDED = "marian_base", "nado_T0.80"
_NOTHING = "None"
_PAPER = {"MarianMT": 16.98, "NADO": 21.04}
_SHOWN = 12  # characters
# The authors' log of the base has the oracle's value beside each line. In 58 of these lines, read one by one,
# it is the number of these capitals, every time.
_COUNTED = "AEITWY"


class Utterance(NamedTuple):
    """One line of Fisher test with both published translations."""

    base: str
    guided: str
    original: list[str]
    fluent: list[str]


def main(arguments: Sequence[str] | None = None) -> int:
    """Score and write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="the folder of the raw corpora")
    parser.add_argument("--page", type=Path, required=True, help="the page to write")
    options = parser.parse_args(arguments)
    try:
        text = make_page(read_utterances(options.data), fit_classifiers(options.data))
    except NadoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    write_atomically(options.page, lambda partial: _write(partial, text))
    return 0


def read_utterances(data: Path) -> list[Utterance]:
    """The published outputs with the references of the same utterances."""
    outputs = read_records(data / "nado_mt_dumps" / "fisher_test_outputs.jsonl", "the published translations")
    fluent = _by_id(data / "fluent_fisher" / "test.jsonl", "fluent_refs", "fluent references of Fisher test")
    original = _by_id(data / "fisher_callhome" / "fisher_test.jsonl", "en_refs", "references of Fisher test")
    lost = [each["id"] for each in outputs if each["id"] not in fluent or each["id"] not in original]
    if lost:
        raise InputError(
            "references for every output", f"none for {lost[0]}", "Use the same Fisher test set."
        )
    return [Utterance(each[BASE], each[GUIDED], original[each["id"]], fluent[each["id"]]) for each in outputs]


def _by_id(path: Path, field: str, what: str) -> dict[str, list[str]]:
    return {each["id"]: each[field] for each in read_records(path, what)}


# --- what is measured ---------------------------------------------------------------------------------


class Setting(NamedTuple):
    """Utterances and the references they are scored against."""

    name: str
    rows: list[int]
    references: list[list[str]]


def list_settings(utterances: Sequence[Utterance]) -> list[Setting]:
    """The ways in which these outputs can be scored, the paper's own first."""
    everything = list(range(len(utterances)))
    kept = [[ref for ref in each.fluent if ref.strip() != _NOTHING] for each in utterances]
    first = [each.fluent[:1] for each in utterances]
    told = [row for row in everything if kept[row]]
    first_told = [row for row in everything if first[row][0].strip() != _NOTHING]
    return [
        Setting("first fluent reference, “None” kept (the authors' script)", everything, first),
        Setting(
            "both fluent references, “None” kept",
            everything,
            [each.fluent for each in utterances],
        ),
        Setting("first fluent reference, “None” dropped", first_told, [first[row] for row in first_told]),
        Setting("both fluent references, “None” dropped", told, [kept[row] for row in told]),
        Setting("the four original references", everything, [each.original for each in utterances]),
    ]


def score_setting(
    utterances: Sequence[Utterance], setting: Setting, kind: Any
) -> tuple[Metric, Metric, Comparison]:
    """A metric of base and NADO, and NADO minus base, paired."""
    texts = [[getattr(utterances[row], side) for row in setting.rows] for side in ("base", "guided")]
    base, guided = (kind(side, setting.references) for side in texts)
    return base, guided, compare(guided, base)


def character_shifts(utterances: Sequence[Utterance]) -> list[tuple[str, float, Comparison]]:
    """Which characters NADO writes more or less often a text, the surest first."""
    seen = Counter(char for each in utterances for char in each.base + each.guided)
    shifts = []
    for char, count in seen.items():
        if count >= len(utterances) / 20:
            base, guided = (
                mean(f"{char!r} a text", [float(getattr(each, side).count(char)) for each in utterances])
                for side in ("base", "guided")
            )
            shifts.append((char, float(base.value or 0.0), compare(guided, base)))
    return sorted(shifts, key=lambda shift: -_sureness(shift[2]))


def counted_rows(utterances: Sequence[Utterance]) -> list[list[str]]:
    """Capitals that the authors' oracle counts, and as a control those that it does not."""
    others = "".join(letter for letter in string.ascii_uppercase if letter not in _COUNTED)
    rows = []
    for name, letters in ((f"{', '.join(_COUNTED)}: counted", _COUNTED), ("all other capitals", others)):
        counts = {
            side: [float(sum(getattr(each, side).count(letter) for letter in letters)) for each in utterances]
            for side in ("base", "guided")
        }
        found = compare(mean("capitals", counts["guided"]), mean("capitals", counts["base"]))
        totals = [f"{sum(counts[side]):,.0f}" for side in ("base", "guided")]
        rows.append([name, *totals, _difference(found, 4)])
    return rows


def _sureness(found: Comparison) -> float:
    """How many half-widths of its interval a difference is away from 0."""
    if found.difference is None or found.low is None or found.high is None:
        return 0.0
    return abs(found.difference) / max((found.high - found.low) / 2, 1e-9)


def formality_rows(utterances: Sequence[Utterance], classifiers: Classifiers) -> list[list[str]]:
    """Mean probability of being formal under both classifiers."""
    rows = []
    for name, scorer in (
        ("words and marks", classifiers.oracle),
        ("characters and style", classifiers.judge),
    ):
        scores = {
            side: scorer.probabilities([getattr(each, side) for each in utterances])
            for side in ("base", "guided")
        }
        fluent = [ref for each in utterances for ref in each.fluent if ref.strip() != _NOTHING]
        original = [ref for each in utterances for ref in each.original]
        difference = compare(mean("formality", scores["guided"]), mean("formality", scores["base"]))
        rows.append(
            [
                name,
                *(f"{_mean(scores[side]):.4f}" for side in ("base", "guided")),
                _difference(difference, 4),
                *(f"{_mean(scorer.probabilities(each)):.4f}" for each in (original, fluent)),
            ]
        )
    return rows


def _mean(values: NDArray[np.float64]) -> float:
    return float(values.mean())


# --- the page -----------------------------------------------------------------------------------------


def make_page(utterances: Sequence[Utterance], classifiers: Classifiers) -> str:
    """The whole page."""
    lines = []
    for setting in list_settings(utterances):
        bleu = score_setting(utterances, setting, sacre_bleu)
        letters = score_setting(utterances, setting, chrf)
        row = [setting.name, f"{len(setting.rows):,}", *_scores(bleu), *_scores(letters)]
        lines.append(row)
    shifts = character_shifts(utterances)
    same = sum(each.base == each.guided for each in utterances) / len(utterances)
    none = sum(ref.strip() == _NOTHING for each in utterances for ref in each.fluent)
    words = [sum(len(getattr(each, side).split()) for each in utterances) for side in ("base", "guided")]
    heads = [
        "references",
        "texts",
        "BLEU base",
        "BLEU NADO",
        "difference",
        "chrF base",
        "chrF NADO",
        "difference",
    ]
    held_out = classifiers.held_out
    return _PAGE.format(
        count=f"{len(utterances):,}",
        none=none,
        marian=_PAPER["MarianMT"],
        nado=_PAPER["NADO"],
        version=sacrebleu.__version__,
        scores=_table(heads, lines),
        formality=_table(
            ["classifier", "base", "NADO", "difference", "original references", "fluent references"],
            formality_rows(utterances, classifiers),
        ),
        oracle_auc=f"{held_out['oracle']['auc']:.3f}",
        judge_auc=f"{held_out['judge']['auc']:.3f}",
        same=f"{100 * same:.1f} %",
        base_words=f"{words[0]:,}",
        nado_words=f"{words[1]:,}",
        characters=_table(
            ["character", "base, a text", "NADO − base"],
            [
                [f"`{_shown(char)}`", f"{rate:.3f}", _difference(found, 4)]
                for char, rate, found in shifts[:_SHOWN]
            ],
        ),
        counted=_table(["capitals", "base", "NADO", "NADO − base, a text"], counted_rows(utterances)),
        verdict=_verdict(lines),
    )


def _verdict(lines: Sequence[Sequence[str]]) -> str:
    """How many of the like-for-like comparisons NADO wins in BLEU, in words."""
    won = sum(line[4].startswith("+") for line in lines)
    return f"NADO is ahead of its own base in {won} of these {len(lines)} comparisons by BLEU."


def _scores(found: tuple[Metric, Metric, Comparison]) -> list[str]:
    base, guided, difference = found
    return [f"{base.value:.2f}", f"{guided.value:.2f}", _difference(difference, 2)]


def _difference(found: Comparison, digits: int) -> str:
    if found.difference is None:
        return "–"
    if found.low is None or found.high is None:
        return f"{found.difference:+.{digits}f}"
    p_value = "" if found.p_value is None else f", p {_p_value(found.p_value)}"
    return f"{found.difference:+.{digits}f} [{found.low:+.{digits}f}, {found.high:+.{digits}f}]{p_value}"


def _p_value(value: float) -> str:
    return "< 0.01" if value < 0.01 else f"= {value:.2f}"


def _shown(char: str) -> str:
    return {" ": "blank", "|": "bar", "`": "backtick"}.get(char, char)


def _table(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [heads, ["---"] * len(heads), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


_PAGE = """# The paper's translation table, scored like for like

The paper reports Spanish→English translation of Fisher test, guided towards formality: MarianMT {marian}
BLEU, NADO {nado} (T = 5/4). The authors have published the translations themselves with their code, {count}
lines each of plain MarianMT and of NADO. This page scores both files in the same way. It is made by

```sh
python recipes/formality_mt/paper_table.py --data DATA --page docs/paper_translation_table.md
```

with sacreBLEU {version} and its defaults. Differences are NADO minus base, paired, with 95 % bootstrap
intervals over utterances. What is said of the authors' code was read there; every number is measured here.

## BLEU and chrF

{scores}

{verdict}

- The paper's {nado} is about what the first row gives for NADO: the authors' script makes its two lists of
  references as one list twice, and the sacreBLEU it pins then scores a single reference.
- No row gives MarianMT the paper's {marian}, and the first one gives it more than NADO. The two numbers of
  the paper's table were not made in one way; the gain of four points is not one of NADO over these MarianMT
  outputs.
- Of the fluent references {none} are the literal string “None”: an utterance with nothing worth keeping. A
  system can score there only by writing “None”. recipes/formality_mt drops them.

## Formality

Mean probability of being formal under two classifiers that share neither sentences nor features (AUC
{oracle_auc} and {judge_auc} on sentences they have not seen; `formality_classifiers.py`), and the same of the
references.

{formality}

The paper reports 0.45 → 0.54 under the classifier of FUDGE's evaluation, which is not at hand here; under
these two the published outputs show no such step.

## What the guide did raise

{same} of the translations are the same in both files; base {base_words} words in all, NADO {nado_words}.
When it labels samples, the authors' script asks its oracle about a string where a list of texts is expected.
The oracle goes through it character by character and adds up those that it finds formal by themselves; a
sample is positive if there is one. (When the script measures formality it gives a list, as it should.) The
log of the base has that sum beside each line: in the 58 lines that were read one by one, it is the number of
six capitals. These are what has risen:

{counted}

Single characters whose number in a text has moved most surely:

{characters}

The guide learned what it was asked for; the question was another one than intended. `nado audit` exists
because of this: before anything is trained, an oracle's answers are compared with trivial explanations
(length, single characters, the first word), and a bare string in place of a list of texts is an error.

The same script keeps the epoch with the highest BLEU on the test set, and its NADO outputs are that epoch's;
the base has no such choice.

## What follows for our own table

`recipes/formality_mt` scores every system on one set of sources and references, “None” dropped, with a paired
test against its own base, and with a second formality classifier that no guide was trained for.
"""


if __name__ == "__main__":
    sys.exit(main())
