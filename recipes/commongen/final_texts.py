"""The configuration that the choosing sets choose, and what it writes for test sets and unseen words."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from concept_sets import ConceptSet, read_sets
from dev_decoding import Written
from study_settings import BASE, VERIFIED, FinalSettings, Row, RowSettings, Settings

from nado.storage import write_bytes

TEST_SETS = "test_inputs.jsonl"

Write = Callable[[Sequence[ConceptSet], Row, RowSettings], Written]


def choose_line(lines: Sequence[dict[str, Any]], settings: FinalSettings) -> dict[str, Any] | None:
    """The line with the best BLEU-4 on the choosing sets, of those that cover enough of them there.

    Where none does, the one that covers most. None where the system has no such lines.
    """
    wanted = (settings.system, settings.decoding, settings.exact_end)
    ours = [line for line in lines if (line["system"], line["decoding"], line["exact_end"]) == wanted]
    enough = [line for line in ours if line["choosing_sets"]["coverage"] >= settings.coverage]
    measure = "bleu4" if enough else "coverage"
    return max(enough or ours, key=lambda line: line["choosing_sets"][measure], default=None)


def final_rows(chosen: dict[str, Any], settings: FinalSettings) -> dict[str, Row]:
    """p, q and verified q, as they write for the test sets."""
    doubt = chosen.get("doubt", 0.0)  # lines of older records have none
    q = Row(settings.system, settings.decoding, chosen["strength"], settings.exact_end, doubt=doubt)
    strength, exact_end = settings.verified_strength, settings.verified_exact_end
    return {
        "p": Row(BASE, q.base_decoding, 1.0, exact_end=False),
        "q": q,
        VERIFIED: Row(settings.system, VERIFIED, strength, exact_end),
    }


def write_outputs(
    sets: Sequence[ConceptSet],
    rows: dict[str, Row],
    settings: Settings,
    write: Write,
    folder: Path,
    kind: str,
) -> None:
    """`folder/KIND.{p,q,verified}.jsonl`: one text a set, in their order."""
    sections = {
        row: section for system in (BASE, *settings.guides) for row, section in settings.rows_of(system)
    }
    for name, row in rows.items():
        texts = write(sets, row, sections.get(row, RowSettings((row.system,)))).texts
        lines = [
            json.dumps({"id": each.number, "concepts": list(each.concepts), "text": text}, ensure_ascii=False)
            for each, text in zip(sets, texts, strict=True)
        ]
        write_bytes(folder / f"{kind}.{name}.jsonl", "".join(f"{line}\n" for line in lines).encode())


def final_sets(data: Path, settings: FinalSettings | None) -> dict[str, list[ConceptSet]]:
    """The sets that the final configuration writes for."""
    if settings is None:
        return {}
    found = {"unseen": [ConceptSet(at, tuple(each), ()) for at, each in enumerate(settings.unseen)]}
    if (data / TEST_SETS).is_file():
        found["test"] = read_sets(data / TEST_SETS)
    return found
