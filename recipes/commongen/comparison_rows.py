"""The lines of a `nado compare` in the form of this study's: other methods on the same p, or on another base.

    nado compare recipes/commongen/comparison.toml --folder FOLDER …
    python recipes/commongen/comparison_rows.py FOLDER --data DATA --output OUT --about "Other methods on p:"

OUT gets commongen.json, whose lines results_page.py puts into a table of their own. Of every method the first
text of each prompt counts; all prompts must be dev sets.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import siblings  # noqa: F401  (finds what benchmarks share)
from concept_sets import ConceptSet, read_sets
from dev_decoding import Written, tidy
from results_page import command, envelope
from side_work import score_texts
from study_settings import Row
from table_rows import Scored, table_row

from nado.baselines import METHODS
from nado.errors import InputError, NadoError
from nado.oracles import Keywords
from nado.storage import read_json, write_json
from nado.study.comparison import SEARCHED
from nado.study.systems import read_texts

_GREEDY = "greedy"  # what methods that search are compared with, and those that sample with:
_SAMPLED = "base"


def comparison_lines(folder: Path, data: Path, about: str) -> list[dict[str, Any]]:
    """One line of the table for every method of a comparison."""
    found = read_json(folder / "compare" / "comparison.json")["systems"]
    dev = {each.prompt.condition: each for each in read_sets(data / "dev.jsonl")}
    oracle = Keywords(forms=data / "concept_forms.json")
    kept = {each["key"]: read_method(folder / "compare" / each["key"], each, dev, oracle) for each in found}
    return [method_line(each, kept, about) for each in found]


def read_method(
    folder: Path, facts: dict[str, Any], dev: dict[str, ConceptSet], oracle: Keywords
) -> tuple[list[ConceptSet], Scored]:
    """A method's first text for each set, measured."""
    texts, log_p = read_texts(folder / "texts.jsonl"), read_json(folder / "log_p.json")
    first = {each.condition: at for at, each in reversed(list(enumerate(texts)))}
    unknown = [condition for condition in first if condition not in dev]
    if unknown:
        raise InputError("texts for dev sets alone", f"one for {unknown[0]}", "Compare on sets of dev.")
    sets, chosen = [dev[condition] for condition in first], list(first.values())
    a_text = 1 / len(texts)
    written = Written(
        tidy([texts[at].text for at in chosen]),
        [texts[at].tokens for at in chosen],
        [texts[at].finished for at in chosen],
        None,
        None,
        facts["seconds"] * a_text * len(chosen),
        drawn_tokens=round(facts["base_tokens"] * a_text * len(chosen)),
    )
    rows = [np.array(log_p[at], dtype=np.float32) for at in chosen]
    return sets, Scored(score_texts(sets, written.texts, oracle), written, rows)


def method_line(
    facts: dict[str, Any], kept: dict[str, tuple[list[ConceptSet], Scored]], about: str
) -> dict[str, Any]:
    """A method's line, beside p's own texts of the same kind."""
    key = facts["key"]
    name = key if key in METHODS else key.rpartition("-")[0]  # some have their budget in the name
    searches = name == SEARCHED or (name in METHODS and METHODS[name].one_text)
    other = kept.get(_GREEDY if searches else _SAMPLED)
    alone = key in (_GREEDY, _SAMPLED)
    sets, scored = kept[key]
    row = Row(
        key,
        "search" if searches else "sample",
        float(facts["settings"].get("strength", 1.0)),
        exact_end=name.endswith("exact-end") or facts["settings"].get("exact_end", False),
    )
    reported = np.array([each.reported for each in sets])
    base = None if alone or other is None else other[1]
    doubt = facts["settings"].get("doubt", 0.0)
    title = f"{facts['system']}, doubt {doubt:g}" if doubt else facts["system"]
    return table_row(row, title, scored, base, reported, command(), group=about)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the lines of a comparison."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="--folder of nado compare")
    parser.add_argument("--data", type=Path, required=True, help="folder with dev.jsonl, concept_forms.json")
    parser.add_argument("--output", type=Path, required=True, help="where the lines go")
    parser.add_argument("--about", default="Other methods on p:", help="what stands above their table")
    options = parser.parse_args(arguments)
    try:
        rows = comparison_lines(options.folder, options.data, options.about)
    except NadoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    seconds = sum(each["seconds"] for each in rows)
    metrics = {"rows": rows, "stages": {}, "settings": {"guides": {}}, "seconds": seconds}
    write_json(options.output / "commongen.json", envelope(metrics))
    return 0


if __name__ == "__main__":
    sys.exit(main())
