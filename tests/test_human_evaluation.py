"""Human evaluation: a sheet that gives nothing away, and ratings that are checked on their way back."""

import csv
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from nado.errors import InputError, MismatchError, NadoError, StorageError
from nado.human_evaluation import (
    QUESTIONS,
    Ratings,
    compare_systems,
    export_sheet,
    measure_ratings,
    read_ratings,
)

CONDITIONS = [f"dog, ball {number}" for number in range(30)]
TEXTS = {
    "base": [f"A dog {number}, and “more”." for number in range(30)],
    "guided": [f'A dog with a "ball" {number}\nand a line' for number in range(30)],
}


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    assert export_sheet(tmp_path / "sheet.csv", tmp_path / "key.json", CONDITIONS, TEXTS) == 60
    return tmp_path


def read_rows(path: Path) -> list[list[str]]:
    with path.open(encoding="utf-8-sig", newline="") as stream:
        return list(csv.reader(stream))


def write_rows(path: Path, rows: list[list[Any]], delimiter: str = ",", encoding: str = "utf-8") -> Path:
    with path.open("w", encoding=encoding, newline="") as stream:
        csv.writer(stream, delimiter=delimiter).writerows(rows)
    return path


def fill(folder: Path, rate: Any, name: str = "anna.csv", **how: Any) -> Path:
    """A sheet filled in by `rate(text)`, which gives four numbers."""
    head, *rows = read_rows(folder / "sheet.csv")
    return write_rows(folder / name, [head, *([*row[:3], *rate(row[2])] for row in rows)], **how)


def honest(text: str) -> list[int]:
    number = int("".join(letter for letter in text if letter.isdigit()))
    has_ball = "ball" in text
    return [1 + number % 3, 2, 3 if has_ball else 1 + number % 2, 2 + has_ball * (number % 2)]


def test_the_sheet_is_blind_and_shuffled(exported: Path) -> None:
    head, *rows = read_rows(exported / "sheet.csv")
    assert head == ["id", "condition", "text", *QUESTIONS]
    sheet = (exported / "sheet.csv").read_text(encoding="utf-8-sig")
    assert "base" not in sheet
    assert "guided" not in sheet
    assert {(row[1], row[2]) for row in rows} == {
        (condition, text)
        for several in TEXTS.values()
        for condition, text in zip(CONDITIONS, several, strict=True)
    }
    assert len({row[0] for row in rows}) == 60
    systems = ["ball" in row[2] for row in rows]
    changes = sum(a != b for a, b in itertools.pairwise(systems))
    assert 15 < changes < 45  # 29.5 expected, 3.8 its deviation; blocks of one system would have 1
    assert all(row[3:] == [""] * 4 for row in rows)
    assert sorted(row[0] for row in rows) != [row[0] for row in rows]


def test_the_same_seed_gives_the_same_sheet(exported: Path, tmp_path: Path) -> None:
    again = tmp_path / "again"
    export_sheet(again / "sheet.csv", again / "key.json", CONDITIONS, TEXTS)
    assert (again / "sheet.csv").read_bytes() == (exported / "sheet.csv").read_bytes()
    export_sheet(again / "other.csv", again / "other.json", CONDITIONS, TEXTS, seed=1)
    assert (again / "other.csv").read_bytes() != (exported / "sheet.csv").read_bytes()


@pytest.mark.parametrize(
    "how", [{}, {"delimiter": ";"}, {"delimiter": "\t"}, {"encoding": "utf-8-sig"}], ids=str
)
def test_ratings_come_back_to_their_systems(exported: Path, how: dict[str, str]) -> None:
    ratings = read_ratings(fill(exported, honest, **how), exported / "key.json")
    assert ratings.systems == ("base", "guided")
    for system, several in TEXTS.items():
        for column, question in enumerate(QUESTIONS):
            expected = [honest(text)[column] for text in several]
            assert ratings.of(system, question).tolist() == expected


def test_wilcoxon_for_each_question(exported: Path) -> None:
    ratings = read_ratings([fill(exported, honest)], exported / "key.json")
    quality, plausibility, concepts, overall = compare_systems(ratings, "guided", "base")
    assert quality.note == plausibility.note == "no item was rated differently"
    moved = np.array([3 - (1 + number % 2) for number in range(30)])
    expected = 2 / 2**30  # all 30 differences have one sign
    assert concepts.p_value == pytest.approx(expected)
    assert concepts.difference == pytest.approx(moved.mean())
    assert overall.p_value == pytest.approx(stats.wilcoxon(np.ones(15), method="exact").pvalue)
    assert "15 equal pairs left out" in overall.method
    back = compare_systems(ratings, "base", "guided")
    assert back[2].difference == -concepts.difference


def test_raters_are_averaged(exported: Path) -> None:
    sheets = [fill(exported, honest), fill(exported, lambda text: [3, 3, 3, 3], "ben.csv")]
    ratings = read_ratings(sheets, exported / "key.json")
    assert (ratings.raters, ratings.scores.shape) == (("anna", "ben"), (2, 30, 2, 4))
    assert ratings.of("base", "plausibility").tolist() == [2.5] * 30
    means = measure_ratings(ratings)
    assert means["guided"]["concepts"].value == pytest.approx(3.0)
    assert means["guided"]["concepts"].note.startswith("no interval: all items agree")
    assert means["base"]["quality"].low < means["base"]["quality"].value < means["base"]["quality"].high
    assert means["base"]["quality"].method.startswith("mean over items of ratings 1–3, mean of 2 raters")


def test_identical_texts_are_rated_once(tmp_path: Path) -> None:
    texts = {"base": ["same", "one"], "guided": ["same", "two"], "third": ["same", "one"]}
    assert export_sheet(tmp_path / "sheet.csv", tmp_path / "key.json", ["a", "b"], texts) == 3
    score = {"same": [1, 1, 1, 1], "one": [2, 2, 2, 2], "two": [3, 3, 3, 3]}
    ratings = read_ratings(fill(tmp_path, lambda text: score[text]), tmp_path / "key.json")
    assert [ratings.of(system, "overall").tolist() for system in texts] == [[1, 2], [1, 3], [1, 2]]


def test_a_text_cannot_become_a_formula(tmp_path: Path) -> None:
    texts = {"base": ["=HYPERLINK(1)", "- a"], "guided": ["'quoted'", "+1\r\nline"]}
    export_sheet(tmp_path / "sheet.csv", tmp_path / "key.json", ["@a", "b"], texts)
    cells = [cell for row in read_rows(tmp_path / "sheet.csv")[1:] for cell in row]
    assert not any(cell.startswith(("=", "+", "-", "@")) for cell in cells)
    filled = fill(tmp_path, lambda text: [1, 2, 3, 1])
    assert read_ratings(filled, tmp_path / "key.json").of("base", "concepts").tolist() == [3, 3]
    # A spreadsheet that drops the quote, or changes line ends, has not changed the text.
    rows = [[cell.removeprefix("'=").replace("\r\n", "\n") for cell in row] for row in read_rows(filled)]
    rows = [[f"={cell}" if cell == "HYPERLINK(1)" else cell for cell in row] for row in rows]
    assert read_ratings(write_rows(tmp_path / "b.csv", rows), tmp_path / "key.json").scores.shape == (
        1,
        2,
        2,
        4,
    )


# --- what comes back broken ---------------------------------------------------------------------------


def broken(folder: Path, change: Any) -> NadoError:
    """The error of reading a sheet that `change` has spoilt by editing its rows, head first."""
    rows: list[list[Any]] = read_rows(fill(folder, honest))
    change(rows)
    with pytest.raises(NadoError) as raised:
        read_ratings(write_rows(folder / "broken.csv", rows), folder / "key.json")
    return raised.value


def test_missing_rows(exported: Path) -> None:
    error = broken(exported, lambda rows: rows.__delitem__(slice(5, 7)))
    assert isinstance(error, MismatchError)
    assert error.expected == f"all 60 rows in {exported / 'broken.csv'}"
    assert error.found.startswith("2 missing, the first t")
    assert error.hint == "Copy the missing rows back from the sheet as it was sent, and rate them."


@pytest.mark.parametrize(
    ("value", "found"),
    [("4", "'4'"), ("0", "'0'"), ("2.5", "'2.5'"), ("", "an empty cell"), ("good", "'good'")],
)
def test_ratings_outside_the_scale(exported: Path, value: str, found: str) -> None:
    identity = []

    def change(rows: list[list[Any]]) -> None:
        rows[3][5] = value
        identity.append(rows[3][0])

    error = broken(exported, change)
    assert isinstance(error, InputError)
    assert str(error) == (
        f"expected a rating of 1, 2 or 3 for concepts in row {identity[0]} of {exported / 'broken.csv'}; "
        f"found {found}. Ask the rater: a guess or a mean would not be a rating."
    )


def test_changed_ids(exported: Path) -> None:
    error = broken(exported, lambda rows: rows[1].__setitem__(0, "17"))
    assert isinstance(error, MismatchError)
    assert error.found == "1 others, the first '17'"
    assert error.hint == "Ids must not be changed: copy them back from the sheet as it was sent."
    assert broken(exported, lambda rows: rows.append(rows[1])).found.endswith(" twice")


def test_swapped_ids_and_edited_texts(exported: Path) -> None:
    def swap(rows: list[list[Any]]) -> None:
        rows[1][0], rows[2][0] = rows[2][0], rows[1][0]

    assert broken(exported, swap).expected.startswith("the text of row t")
    error = broken(exported, lambda rows: rows[1].__setitem__(2, "A better text."))
    assert (error.found, type(error)) == ("'A better text.'", MismatchError)


def test_a_file_that_is_no_sheet(exported: Path) -> None:
    error = broken(exported, lambda rows: rows.pop(0))
    assert error.expected.startswith(
        "the columns id, condition, text, quality, plausibility, concepts, overall"
    )
    with pytest.raises(StorageError, match="a rating sheet in UTF-8"):
        read_ratings(exported / "nowhere.csv", exported / "key.json")
    (exported / "latin.csv").write_bytes("é".encode("latin-1"))
    with pytest.raises(StorageError, match=r"Save it as CSV \(UTF-8\)"):
        read_ratings(exported / "latin.csv", exported / "key.json")
    with pytest.raises(InputError, match="at least one filled-in sheet"):
        read_ratings([], exported / "key.json")
    (exported / "other.json").write_text(json.dumps({"format": 2}))
    with pytest.raises(InputError, match="a key of format 1"):
        read_ratings(exported / "sheet.csv", exported / "other.json")


def test_empty_lines_at_the_end_do_no_harm(exported: Path) -> None:
    rows = [*read_rows(fill(exported, honest)), [""] * 7, []]
    assert read_ratings(write_rows(exported / "b.csv", rows), exported / "key.json").scores.shape == (
        1,
        30,
        2,
        4,
    )


# --- what cannot be exported --------------------------------------------------------------------------


def test_filled_in_sheets_are_never_overwritten(exported: Path) -> None:
    with pytest.raises(StorageError) as raised:
        export_sheet(exported / "sheet.csv", exported / "new.json", CONDITIONS, TEXTS)
    assert str(raised.value) == (
        f"expected no file at {exported / 'sheet.csv'}; found one. Choose another name: it may hold ratings."
    )
    assert not (exported / "new.json").exists()


def test_what_cannot_be_rated_is_refused(tmp_path: Path) -> None:
    def export(conditions: list[str], texts: dict[str, Any]) -> str:
        with pytest.raises(InputError) as raised:
            export_sheet(tmp_path / "s.csv", tmp_path / "k.json", conditions, texts)
        return raised.value.found

    assert export(["a"], {"base": ["b"]}) == "1 systems and 1 conditions"
    assert export([], {"base": [], "guided": []}) == "2 systems and 0 conditions"
    assert export(["a", "b"], {"base": ["x", "y"], "guided": ["x"]}) == "1 from guided"
    assert export(["a"], {"base": "x", "guided": ["x"]}) == "a bare string from base"


def test_unknown_systems_and_questions() -> None:
    ratings = Ratings(("base", "guided"), ("a",), ("anna",), np.ones((1, 1, 2, 4)))
    with pytest.raises(InputError, match="found 'basis' and 'overall'"):
        ratings.of("basis", "overall")
    with pytest.raises(InputError, match="found 'base' and 'style'"):
        ratings.of("base", "style")
