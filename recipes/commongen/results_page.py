"""Results where they belong: the README's tables and `benchmarks/results`, from a run's JSON alone.

    python recipes/commongen/results_page.py OUT [--readme README.md] [--record]

No number is typed by hand.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import siblings  # noqa: F401  (finds what benchmarks share)

import recording
from nado.errors import InputError
from nado.storage import read_json
from recording import RESULTS, merge

BEGIN, FINISH = "<!-- results: written by results_page.py -->", "<!-- end of results -->"
_PRIVATE = ("--output", "--work", "--data")  # where files were says nothing about the numbers


def envelope(metrics: dict[str, Any]) -> dict[str, Any]:
    """Metrics with date, machine, command and commit, in the form of `benchmarks/results`."""
    return recording.envelope(metrics, command())


def command() -> str:
    """The command that is running; absolute paths are cut to their last part."""
    words, kept = sys.argv[1:], []
    for at, word in enumerate(words):
        if word in _PRIVATE or (at and words[at - 1] in _PRIVATE):
            continue
        kept.append(Path(word).name if Path(word).is_absolute() else word)
    return " ".join(["python", f"recipes/commongen/{Path(sys.argv[0]).name}", *kept])


def results(study: dict[str, Any], overhead: dict[str, Any]) -> str:
    """What stands between the marks."""
    metrics = study["metrics"]
    rows = metrics["rows"]
    parts = [
        f"{study['date']}, {study['machine']}, commit {study['commit']}, {metrics['seconds']:.0f} s in all: "
        f"`{study['command']}`.",
        f"Dev; the {rows[0]['sets']} sets whose id is not divisible by 5, in brackets all "
        f"{rows[0]['sets_in_all']}; one text a set. Corpus BLEU with spaCy-like English tokens, case kept; "
        "coverage by whole words in the forms of `concept_forms.json`, mean over sets; 95 % intervals, by "
        "bootstrap over sets (all covered: Wilson). Perplexity is that of the texts under p. *Missed "
        "removed* is (c_q − c_p) / (100 − c_p) against p under the same decoding.",
        table(rows),
        guides_table(metrics),
        costs_section(overhead["metrics"]),
    ]
    return "\n\n".join(part for part in parts if part)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The main table."""
    heads = ["system", "decoding", "strength", "exact end", "coverage", "all covered", "missed removed"]
    heads += ["BLEU-3", "BLEU-4", "against p", "words", "perplexity"]
    return _table(heads, [_line(row) for row in rows])


def _line(row: dict[str, Any]) -> list[str]:
    against = row.get("against_base")
    every = row["all_sets"]

    def number(name: str, digits: int = 1) -> str:
        low, high = row["interval"][name]
        span = "" if low is None else f" ±{(high - low) / 2:.{digits}f}"
        return f"{_number(row[name], digits)}{span} ({_number(every[name], digits)})"

    gain = "–" if against is None else _span(against["bleu4"]["difference"], against["bleu4"], sign="+")
    removed = "–" if against is None else _span(against["missed_removed"]["value"], against["missed_removed"])
    guided = row["system"] != "base"
    return [
        row["setting"],
        row["decoding"],
        f"{row['strength']:g}" if guided else "–",
        ("on" if row["exact_end"] else "off") if guided else "–",
        number("coverage"),
        number("all_covered"),
        removed,
        number("bleu3"),
        number("bleu4"),
        gain,
        _number(row["length"], 1),
        _number(row["perplexity"], 2),
    ]


def guides_table(metrics: dict[str, Any]) -> str:
    """How the guides were trained."""
    lines = []
    for name, settings in metrics["settings"]["guides"].items():
        facts = metrics["stages"].get(f"guide-{name}")
        if facts is None:
            continue
        best = facts["best"]
        lines.append(
            [
                settings["title"],
                f"{facts['parameters'] / 1e6:.1f}M",
                f"{facts['steps']:,} × {settings['batch']:,}",
                f"{facts['train_seconds']:.0f} s",
                f"{facts['tokens_per_s'] / 1e3:.0f}k",
                _number(best.get("held_out_success"), 4),
                _number(best.get("held_out_calibration_error"), 4),
            ]
        )
    heads = ["guide", "parameters", "steps × texts", "time", "tokens/s", "held-out CE", "held-out ECE"]
    return _table(heads, lines) if lines else ""


def costs_section(metrics: dict[str, Any]) -> str:
    """Rejection, soft rates and what the light guide keeps."""
    parts = []
    rejection = metrics.get("rejection_h200") or metrics.get("rejection_cpu")
    if rejection:
        ratio = rejection["ratio"]
        parts.append(
            f"Rare sets ({rejection['prompts']}, on which p satisfies {rejection['p']['rate']:.1%} of fresh "
            f"draws): {_span(ratio['value'], ratio)} times fewer base tokens a satisfying text than by "
            f"rejection, exact end off (q satisfies {rejection['q']['rate']:.1%})."
        )
    gain = metrics.get("light_gain_share_interval")
    if gain:
        parts.append(
            f"The light guide keeps {_span(gain['value'], gain, digits=2)} of the larger guide's gain in "
            "coverage (greedy, strength 1, exact end off)."
        )
    for name, words in (
        ("soft_rates", "as trained"),
        ("soft_rates_calibrated", "calibrated on held-out sets"),
    ):
        if metrics.get(name):
            got = "; ".join(f"{each['asked']:g} → {_span(each['got'], each, 3)}" for each in metrics[name])
            parts.append(f"Soft rate asked for → got, guide {words}: {got}.")
    return "\n\n".join(parts)


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _span(value: float | None, found: dict[str, Any], digits: int = 1, sign: str = "") -> str:
    if value is None:
        return "–"
    if found["low"] is None:
        return f"{value:{sign}.{digits}f}"
    return f"{value:{sign}.{digits}f} [{found['low']:{sign}.{digits}f}, {found['high']:{sign}.{digits}f}]"


def _table(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [heads, ["---"] * len(heads), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def fill(readme: Path, text: str) -> None:
    """Put the results between the two marks."""
    whole = readme.read_text(encoding="utf-8")
    if whole.count(BEGIN) != 1 or whole.count(FINISH) != 1:
        raise InputError(f"the marks {BEGIN} and {FINISH}", f"not one of each in {readme}", "Put them back.")
    before, rest = whole.split(BEGIN)
    readme.write_text(f"{before}{BEGIN}\n\n{text}\n\n{FINISH}{rest.split(FINISH)[1]}", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    """Fill the README, and put the metrics on record if asked to."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="--output of run_commongen.py")
    parser.add_argument("--readme", type=Path, help="the README to fill")
    parser.add_argument("--record", action="store_true", help="put the metrics into benchmarks/results")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where that is")
    options = parser.parse_args(arguments)
    found = {name: read_json(options.run / f"{name}.json") for name in ("commongen", "overhead")}
    if options.readme is not None:
        fill(options.readme, results(found["commongen"], found["overhead"]))
    if options.record:
        for name, each in found.items():
            if each["metrics"]:
                merge(each, options.results / f"{name}.json")


if __name__ == "__main__":
    main()
