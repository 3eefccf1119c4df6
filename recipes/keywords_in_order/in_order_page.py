"""Results where they belong: the README's tables and `benchmarks/results`, from runs' JSON alone.

    python recipes/keywords_in_order/in_order_page.py OUT [OUT …] [--readme README.md] [--record]

With --record the tables are those of all that is on record, whichever run it is from. No number of ours is
typed by hand; the paper's stand below.
"""

import argparse
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import nearby  # noqa: F401  (finds what recipes and benchmarks share)
from results_page import fill, span_cell, strength_and_doubt

from nado.errors import InputError
from nado.storage import read_json
from recording import RESULTS, merge, on_record

# The paper's Table 1: BLEU-2, BLEU-4, coverage of p and of NADO.
PAPER = {
    "yelp": {"seq2seq": ((16.6, 4.8, 91.2), (17.4, 6.0, 96.7)), "da": ((5.3, 0.4, 5.4), (16.9, 5.4, 95.6))},
    "news": {"seq2seq": ((13.0, 3.4, 74.0), (15.0, 4.5, 91.9)), "da": ((4.0, 0.8, 0.9), (15.4, 4.7, 92.3))},
}
_HEADS = ["system", "base", "decoding", "strength", "exact end", "coverage", "missed removed", "all in order"]
_HEADS += ["BLEU-2", "BLEU-4", "BLEU-4 against p", "words", "perplexity"]


def page(runs: Sequence[dict[str, Any]]) -> str:
    """What stands between the marks: one section a corpus."""
    return "\n\n".join(section(run, corpus) for run in runs for corpus in run["metrics"])


def section(run: dict[str, Any], corpus: str) -> str:
    """One corpus."""
    found = run["metrics"][corpus]
    about, bases = found["about"], {row["base"] for row in found["rows"]}
    parts = [
        f"### {corpus}",
        f"{run['date']}, {run['machine']}, commit {run['commit']}, {found['seconds']:.0f} s in "
        f"all: `{run['command']}`. {found['rows'][0]['lists']:,} lists of at most {about['keys']} keys, one "
        "text each; coverage is the share of keys that stand in the text in exact form, wherever; 95 % "
        "intervals by bootstrap over lists (all in order: Wilson). *Missed removed* is (c_q − c_p) / "
        "(100 − c_p).",
        table([*(ours(row) for row in found["rows"]), *papers(corpus, bases)]),
        stages_table(found),
    ]
    if missing := not_trained(found):
        parts.append(f"Not trained in this run: {', '.join(missing)}.")
    return "\n\n".join(part for part in parts if part)


def not_trained(found: dict[str, Any]) -> list[str]:
    """Guides that were not trained: left out for want of time, or the run was stopped before it got there."""
    asked = [each["name"] for each in found["settings"]["guides"]]
    return [name for name in asked if f"guide-{name}" not in found["stages"]]


def ours(row: dict[str, Any]) -> list[str]:
    """One measured line."""
    guided, against = row["system"] != row["base"], row.get("against_base")

    def number(name: str, scale: float = 1.0) -> str:
        low, high = row["interval"][name]
        span = "" if low is None else f" ±{scale * (high - low) / 2:.1f}"
        return f"{scale * row[name]:.1f}{span}"

    return [
        row["setting"],
        row["base"],
        row["decoding"],
        strength_and_doubt(row) if guided else "–",
        ("on" if row["exact_end"] else "off") if guided else "–",
        number("coverage"),
        "–" if against is None else _span(against["missed_removed"], "value"),
        number("in_order", 100),
        number("bleu2"),
        number("bleu4"),
        "–" if against is None else _span(against["bleu4"], "difference", "+"),
        f"{row['words']:.1f}",
        "–" if row["perplexity"] is None else f"{row['perplexity']:.2f}",
    ]


def papers(corpus: str, bases: Collection[str]) -> list[list[str]]:
    """The paper's lines, GPT-2 Large: its base, tokeniser of BLEU and keys of News are others than ours.

    `corpus` may have the base that the run was about behind it.
    """
    lines = []
    for base, pair in PAPER.get(corpus.partition("-")[0], {}).items():
        if base not in bases:
            continue
        covered = pair[0][2]
        for name, (bleu2, bleu4, coverage) in zip(("p", "NADO"), pair, strict=True):
            removed = "–" if name == "p" else f"{100 * (coverage - covered) / (100 - covered):.0f}"
            line = [f"*paper: {name}*", base, "–", "–", "–", f"{coverage}", removed, "–"]
            lines.append([*line, f"{bleu2}", f"{bleu4}", "–", "–", "–"])
    return lines


def stages_table(found: dict[str, Any]) -> str:
    """How guides were trained."""
    lines = []
    for each in found["settings"]["guides"]:
        facts = found["stages"].get(f"guide-{each['name']}")
        if facts is None:
            continue
        held = facts["best"].get("held_out_loss")
        lines.append(
            [
                each["title"],
                each["base"],
                ", ".join(facts["learned_from"]),
                f"{facts['texts']:,}",
                f"{100 * facts['satisfied']:.1f} %",
                f"{facts['steps']:,}",
                f"{facts['train_seconds']:.0f} s",
                f"{facts['tokens_per_s'] / 1e3:.0f}k",
                "–" if held is None else f"{held:.3f}",
            ]
        )
    heads = ["guide", "base", "learned from", "texts", "satisfied", "steps", "time", "tokens/s"]
    return table(lines, [*heads, "held-out loss"]) if lines else ""


def table(lines: Sequence[Sequence[str]], heads: Sequence[str] = _HEADS) -> str:
    """Markdown."""
    rows = [heads, ["---"] * len(heads), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _span(found: dict[str, Any], name: str, sign: str = "") -> str:
    return span_cell(found[name], found, sign=sign)


def read_runs(folders: Sequence[Path]) -> list[dict[str, Any]]:
    """The results in the folders."""
    paths = [path for folder in folders for path in sorted(folder.glob("keywords_in_order-*.json"))]
    if not paths:
        found = ", ".join(map(str, folders))
        raise InputError("keywords_in_order-….json", f"none in {found}", "Give --output of run_in_order.py.")
    return [read_json(path) for path in paths]


def main(arguments: Sequence[str] | None = None) -> None:
    """Fill the README, and put the metrics on record if asked to."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, nargs="+", help="--output of run_in_order.py, of every corpus")
    parser.add_argument("--readme", type=Path, help="the README to fill")
    parser.add_argument("--record", action="store_true", help="put the metrics into benchmarks/results")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where that is")
    options = parser.parse_args(arguments)
    runs = read_runs(options.runs)
    if options.record:
        path = options.results / "keywords_in_order.json"
        for run in runs:
            merge(run, path)
        runs = on_record(path)
    if options.readme is not None:
        fill(options.readme, page(runs))


if __name__ == "__main__":
    main()
