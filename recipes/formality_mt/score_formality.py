"""The table's numbers from the texts of a run: BLEU, chrF, both formality scores, intervals, paired tests.

    python recipes/formality_mt/score_formality.py OUT --prepared local/formality_mt/study --record

Needs no GPU. OUT is the --output of run_formality.py; formality_mt.json and its tables, results.md, are
written there.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import neighbours  # noqa: F401  (finds what puts results on record)
import numpy as np
from fisher_scores import FisherTest, Scored, compare_scored
from formality_page import fill, results
from raw_files import read_records
from table_settings import BASE, FUDGE, GREEDY, SAMPLE, Row
from tuned_lines import tune

from nado.errors import NadoError
from nado.metrics import share
from nado.storage import read_json, write_json
from recording import RESULTS, merge, write_page

NAME = "formality_mt.json"
_EXAMPLES = 20


def score_run(output: Path, prepared: Path, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Score every line of a run and write `formality_mt.json` beside its texts."""
    run = read_json(output / "run.json")
    test = FisherTest(prepared, run["metrics"]["study"]["threshold"])
    texts: dict[str, dict[str, str]] = {}
    for each in read_records(output / "texts.jsonl.gz", "the texts of a run"):
        texts.setdefault(each["row"], {})[each["source"]] = each["text"]
    rows, scored = [], {}
    for row in run["metrics"]["rows"]:
        name = _line(row).name
        scored[name] = test.score([texts[name][source] for source in test.sources])
        rows.append({**row, "name": name, **_measures(scored[name])})
        say(f"  {name}: BLEU {rows[-1]['bleu_fluent']:.2f}, formality {rows[-1]['formality_oracle']:.3f}")
    for row in rows:
        for title, other in rivals(row, rows):
            row[title] = compare_scored(scored[row["name"]], scored[other])
    references = _references(test)
    metrics = {
        **run["metrics"],
        "rows": rows,
        "tuned": tune(rows, scored),
        "left_out": left_out(run["metrics"]),
        "references": references,
        "classifiers": read_json(prepared / "prepared.json")["classifiers"],
        "examples": examples(test, texts, rows),
    }
    found = {**run, "metrics": metrics, "runs": [{**run["runs"][0], "metrics": list(metrics)}]}
    write_json(output / NAME, found)
    return found


def left_out(metrics: dict[str, Any]) -> dict[str, str]:
    """What the table asks for and the run has not, guides of a run that was stopped among it."""
    there = {row["system"] for row in metrics["rows"]}
    missing = {name: "no line of it is there" for name in metrics["table"]["guides"] if name not in there}
    return {**missing, **metrics["left_out"]}


def rivals(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """What a line is compared with: the base, and FUDGE at the same strength, under the same search.

    Sampled lines are compared with the greedy ones.
    """
    names = {each["name"] for each in rows}
    line = _line(row)
    decoding = GREEDY if line.decoding == SAMPLE else line.decoding
    searched = replace(line, decoding=decoding, doubt=0.0, plausible=0.0)
    base, fudge = replace(searched, system=BASE, strength=1.0).name, replace(searched, system=FUDGE).name
    found = []
    if line.system != BASE and base in names:
        found.append(("against_base", base))
    if line.system not in (BASE, FUDGE) and fudge in names:
        found.append(("against_fudge", fudge))
    return found


def _line(row: dict[str, Any]) -> Row:
    known = [each.name for each in fields(Row) if each.name in row]  # lines of older runs lack some
    return Row(**{name: row[name] for name in known})


def _measures(scored: Scored) -> dict[str, Any]:
    measured = {name: metric.measure(scored.groups[name]) for name, metric in scored.metrics.items()}
    satisfied = scored.metrics["satisfied"].rows[:, 0] > 0.5
    measured["satisfied"] = share("satisfied", satisfied, scored.groups["satisfied"])
    return {
        **{name: each.value for name, each in measured.items()},
        "interval": {name: [each.low, each.high] for name, each in measured.items()},
    }


def _references(test: FisherTest) -> dict[str, Any]:
    """How formal people's own translations are, under both classifiers."""
    kinds = {
        "original": [ref for each in test.records for ref in each["original"]],
        "fluent": [ref for each in test.records for ref in each["fluent"]],
    }
    return {
        kind: {
            "texts": len(texts),
            "formality_oracle": float(test.oracle.probabilities(texts).mean()),
            "formality_judge": float(test.judge.probabilities(texts).mean()),
        }
        for kind, texts in kinds.items()
    }


def examples(
    test: FisherTest, texts: dict[str, dict[str, str]], rows: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Utterances at even distances, none selected, with the greedy texts at strength 1."""
    names = [row["name"] for row in rows if row["name"] == f"{row['system']}-{GREEDY}"]
    places = np.linspace(0, len(test.records) - 1, min(_EXAMPLES, len(test.records))).astype(int)
    return [
        {
            "id": test.records[place]["id"],
            "source": test.sources[place],
            **{name: texts[name][test.sources[place]] for name in names},
        }
        for place in places.tolist()
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Score a run; fill the README and put the results on record if asked to."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="--output of run_formality.py")
    parser.add_argument(
        "--prepared", type=Path, required=True, help="the folder study of prepare_translation.py"
    )
    parser.add_argument(
        "--base", type=Path, help="base.json of train_translator.py, to be put on record, too"
    )
    parser.add_argument("--readme", type=Path, help="the README to fill")
    parser.add_argument("--record", action="store_true", help="put the results into benchmarks/results")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where that is")
    options = parser.parse_args(arguments)
    try:
        found = score_run(options.run, options.prepared)
        base = None if options.base is None else read_json(options.base)
        tables = results(found, base)
        write_page(options.run, tables)
        if options.readme is not None:
            fill(options.readme, tables)
        if options.record:
            for each in (_without_examples(found), *([] if base is None else [_as_base(base)])):
                merge(each, options.results / NAME)
    except NadoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _without_examples(found: dict[str, Any]) -> dict[str, Any]:
    """The numbers alone: examples quote a corpus under a licence of its own, and stand in the README."""
    metrics = {name: value for name, value in found["metrics"].items() if name != "examples"}
    return {**found, "metrics": metrics, "runs": [{**found["runs"][0], "metrics": list(metrics)}]}


def _as_base(found: dict[str, Any]) -> dict[str, Any]:
    """The base's training as one metric beside the table's, without the texts that it quotes."""
    runs = [{**found["runs"][0], "metrics": ["translator"]}]
    scores = found["metrics"]["base_scores"]
    numbers = {name: value for name, value in scores.items() if not name.endswith("_first")}
    metrics = {**found["metrics"], "base_scores": numbers}
    return {**found, "metrics": {"translator": metrics}, "runs": runs}


if __name__ == "__main__":
    sys.exit(main())
