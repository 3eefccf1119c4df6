"""Human evaluation: a blinded sheet to rate, and a test of what came back.

As in the paper, people rate texts for quality, plausibility, concepts and overall, from 1 to 3. The sheet
shows a condition and a text, nothing else: rows of all systems are shuffled together under random ids, and
identical texts of one prompt are one row, so that the same words cannot get two ratings. Which system wrote
what is in the key file alone. Do not open it, or send it along, before the ratings are in.

    export_sheet("sheet.csv", "key.json", conditions, {"base": base_texts, "guided": guided_texts})
    ratings = read_ratings(["sheet-anna.csv", "sheet-ben.csv"], "key.json")
    for comparison in compare_systems(ratings, "guided", "base"):
        print(comparison)
"""

import csv
import io
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nado.errors import InputError, MismatchError, StorageError
from nado.metrics.measure import Measure, mean
from nado.metrics.pairs import Comparison, compare_ratings
from nado.metrics.resampling import DEFAULT, FloatArray, Resampling
from nado.storage import digest_json, read_json, write_atomically, write_json

QUESTIONS = ("quality", "plausibility", "concepts", "overall")
SCALE = (1, 2, 3)
_COLUMNS = ("id", "condition", "text", *QUESTIONS)
_FORMAT = 1
# A cell that begins like this is a formula to a spreadsheet, and texts are written by a machine.
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


@dataclass(frozen=True)
class Ratings:
    """What raters said of each item under each system."""

    systems: tuple[str, ...]
    conditions: tuple[str, ...]
    raters: tuple[str, ...]
    scores: FloatArray  # (raters, items, systems, questions)

    def of(self, system: str, question: str) -> FloatArray:
        """The mean over raters of each item's rating: (items,)."""
        if system not in self.systems or question not in QUESTIONS:
            raise InputError(
                f"one of the systems {', '.join(self.systems)} and one of {', '.join(QUESTIONS)}",
                f"{system!r} and {question!r}",
                "Use the names the sheet was made with.",
            )
        chosen = self.scores[:, :, self.systems.index(system), QUESTIONS.index(question)]
        return np.asarray(chosen.mean(axis=0))


def export_sheet(
    sheet: str | Path,
    key: str | Path,
    conditions: Sequence[str],
    texts: Mapping[str, Sequence[str]],
    *,
    seed: int = 0,
) -> int:
    """Write the sheet to be rated (CSV) and its key (JSON); returns the number of rows to rate.

    `texts` has one text for each condition from every system. Neither file is ever overwritten: a sheet may
    already hold somebody's ratings.
    """
    sheet, key = Path(sheet), Path(key)
    _require_systems(conditions, texts)
    for path in (sheet, key):
        if path.exists():
            raise StorageError(f"no file at {path}", "one", "Choose another name: it may hold ratings.")
    rows = _shuffle_rows(texts, random.Random(seed))
    content = {
        "format": _FORMAT,
        "questions": list(QUESTIONS),
        "seed": seed,
        "systems": list(texts),
        "conditions": list(conditions),
        "rows": {
            row.name: {
                "item": row.item,
                "systems": row.systems,
                "digest": _digest(conditions[row.item], row.text),
            }
            for row in rows
        },
    }
    write_json(key, content)
    write_atomically(sheet, lambda path: _write_sheet(path, conditions, rows))
    return len(rows)


def read_ratings(sheets: str | Path | Sequence[str | Path], key: str | Path) -> Ratings:
    """The ratings of one filled-in sheet or of several, one a rater, checked against the key."""
    paths = [Path(each) for each in ([sheets] if isinstance(sheets, str | Path) else sheets)]
    if not paths:
        raise InputError("at least one filled-in sheet", "none", "Give the CSV file of each rater.")
    content = _read_key(Path(key))
    scores = np.stack([_scores_of(path, content) for path in paths])
    return Ratings(
        tuple(content["systems"]), tuple(content["conditions"]), tuple(path.stem for path in paths), scores
    )


def compare_systems(ratings: Ratings, first: str, second: str) -> list[Comparison]:
    """Wilcoxon's signed-rank test for each question, over items; raters are averaged first.

    Four tests are four chances to be lucky: `nado.metrics.adjust_holm` corrects their p-values.
    """
    return [
        compare_ratings(question, ratings.of(first, question), ratings.of(second, question))
        for question in QUESTIONS
    ]


def measure_ratings(ratings: Ratings, resampling: Resampling = DEFAULT) -> dict[str, dict[str, Measure]]:
    """The mean rating of each system on each question, with a bootstrap interval over items."""
    method = f"mean over items of ratings 1–3, mean of {len(ratings.raters)} raters"
    return {
        system: {
            question: mean(question, ratings.of(system, question), method=method).measure(
                None, resampling, over="items"
            )
            for question in QUESTIONS
        }
        for system in ratings.systems
    }


# --- writing ------------------------------------------------------------------------------------------


class _Row(NamedTuple):
    """A text to rate, and who wrote it."""

    name: str
    item: int
    text: str
    systems: list[str]


def _shuffle_rows(texts: Mapping[str, Sequence[str]], generator: random.Random) -> list[_Row]:
    """All different texts of each item, in random order and under random names."""
    written: dict[tuple[int, str], list[str]] = {}
    for system, several in texts.items():
        for item, text in enumerate(several):
            written.setdefault((item, text), []).append(system)
    rows = list(written.items())
    generator.shuffle(rows)
    # Not bare digits with an e ("12e456"), which would come back from a spreadsheet as a number.
    names = [f"t{number:06x}" for number in generator.sample(range(16**6), len(rows))]
    return [_Row(name, *key, systems) for name, (key, systems) in zip(names, rows, strict=True)]


def _write_sheet(path: Path, conditions: Sequence[str], rows: Sequence[_Row]) -> None:
    # With a byte-order mark: without it spreadsheets take UTF-8 for something else.
    with path.open("w", encoding="utf-8-sig", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(_COLUMNS)
        for row in rows:
            cells = [row.name, _guard(conditions[row.item]), _guard(row.text)]
            writer.writerow([*cells, *[""] * len(QUESTIONS)])


def _guard(cell: str) -> str:
    return f"'{cell}" if cell.startswith(_FORMULA) else cell


def _require_systems(conditions: Sequence[str], texts: Mapping[str, Sequence[str]]) -> None:
    if len(texts) < 2 or len(conditions) == 0:
        raise InputError(
            "at least two systems and one condition to rate",
            f"{len(texts)} systems and {len(conditions)} conditions",
            "A rating means something only beside another.",
        )
    for system, several in texts.items():
        if isinstance(several, str) or len(several) != len(conditions):
            raise InputError(
                f"one text for each of {len(conditions)} conditions from every system",
                f"{'a bare string' if isinstance(several, str) else len(several)} from {system}",
                "Choose one text a condition, without looking at it.",
            )


# --- reading ------------------------------------------------------------------------------------------


def _read_key(path: Path) -> dict[str, Any]:
    content = read_json(path)
    if not isinstance(content, dict) or content.get("format") != _FORMAT or "rows" not in content:
        raise InputError(
            f"a key of format {_FORMAT} in {path}", "something else", "Use the file export_sheet wrote."
        )
    return content


def _scores_of(path: Path, key: Mapping[str, Any]) -> FloatArray:
    """One rater's sheet as (items, systems, questions)."""
    rows = _read_sheet(path)
    _require_same_rows(path, rows, key["rows"])
    scores = np.full((len(key["conditions"]), len(key["systems"]), len(QUESTIONS)), np.nan)
    for name, row in rows.items():
        answer = key["rows"][name]
        given = [_rating(path, name, question, row[question]) for question in QUESTIONS]
        for system in answer["systems"]:
            scores[answer["item"], key["systems"].index(system)] = given
    return scores


def _read_sheet(path: Path) -> dict[str, dict[str, str]]:
    """The rows by id, whatever delimiter the rater's spreadsheet has saved them with."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise StorageError(
            f"a rating sheet in UTF-8 at {path}", f"the error: {error}", "Save it as CSV (UTF-8)."
        ) from error
    for delimiter in ",;\t":
        reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter)
        if reader.fieldnames is not None and set(_COLUMNS) <= set(reader.fieldnames):
            return _index_rows(path, list(reader))
    first = text.partition("\n")[0].strip()
    raise InputError(
        f"the columns {', '.join(_COLUMNS)} in {path}",
        f"the first line {first[:80]!r}",
        "Keep the first row of the sheet as it was, and save it as CSV.",
    )


def _index_rows(path: Path, rows: Sequence[Mapping[str, str | None]]) -> dict[str, dict[str, str]]:
    indexed: dict[str, dict[str, str]] = {}
    for row in rows:
        cells = {column: (row[column] or "") for column in _COLUMNS}
        if not any(cell.strip() for cell in cells.values()):
            continue  # spreadsheets like to leave empty lines at the end
        name = cells["id"].strip()
        if name in indexed:
            raise MismatchError(f"every id once in {path}", f"{name} twice", "Delete one of the rows.")
        indexed[name] = cells
    return indexed


def _require_same_rows(
    path: Path, rows: Mapping[str, Mapping[str, str]], key: Mapping[str, Mapping[str, Any]]
) -> None:
    strange = [name for name in rows if name not in key]
    if strange:
        raise MismatchError(
            f"only ids of the key in {path}",
            f"{len(strange)} others, the first {strange[0]!r}",
            "Ids must not be changed: copy them back from the sheet as it was sent.",
        )
    missing = [name for name in key if name not in rows]
    if missing:
        raise MismatchError(
            f"all {len(key)} rows in {path}",
            f"{len(missing)} missing, the first {missing[0]}",
            "Copy the missing rows back from the sheet as it was sent, and rate them.",
        )
    for name, row in rows.items():
        if _digest(row["condition"], row["text"]) != key[name]["digest"]:
            raise MismatchError(
                f"the text of row {name} in {path} as it was sent",
                f"{row['text'][:60]!r}",
                "Raters must not edit texts: copy the row back, then check that its ratings are for it.",
            )


def _digest(*cells: str) -> str:
    """A digest of what a row shows, blind to what spreadsheets change: blanks, line ends, a leading quote."""
    return digest_json([" ".join(cell.removeprefix("'").split()) for cell in cells])


def _rating(path: Path, name: str, question: str, cell: str) -> int:
    given = cell.strip()
    if given not in {str(value) for value in SCALE}:
        raise InputError(
            f"a rating of 1, 2 or 3 for {question} in row {name} of {path}",
            f"{given!r}" if given else "an empty cell",
            "Ask the rater: a guess or a mean would not be a rating.",
        )
    return int(given)
