"""Results where they belong: the README's tables and picture, `benchmarks/results`, from runs' JSON alone.

    python recipes/dial/dial_page.py [OUT …] [--readme README.md] [--record]

With --record, or without an OUT, the tables are those of all that is on record, whichever run it is from.
No number is typed by hand.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import around  # noqa: F401  (finds what recipes and benchmarks share)
from dial_plot import draw_dial
from in_order_page import table
from results_page import fill, number_cell, span_cell

from nado.dial import Dial
from nado.errors import InputError
from nado.storage import read_json
from recording import RESULTS, merge, on_record


def illustrated_page(run: dict[str, Any], name: str, folder: Path) -> str:
    """One run, its picture drawn into the folder that the page will be in."""
    curves = run["metrics"]["curves"]
    shown = [each for each in run["metrics"]["settings"]["questions"] if each in curves]
    draw_dial(curves, shown, folder / f"{name}.svg")
    return page(run, f"{name}.svg")


def page(run: dict[str, Any], picture: str) -> str:
    """One run: where it was, the picture, the curves, the formulas, the guides, the audits."""
    metrics = run["metrics"]
    settings = metrics["settings"]
    curves, questions = metrics["curves"], settings["questions"]
    parts = [
        f"### {Path(picture).stem}",
        f"{run['date']}, {run['machine']}, commit {run['commit']}, {metrics['seconds']:.0f} s in "
        f"all: `{run['command']}`. Base {settings['base']}, at most {settings['length_limit']} tokens, "
        "temperature 1; held-out prompts; 95 % intervals over prompts.",
        f"![asked for and got]({picture})",
        *(curve_section(name, curves[name]) for name in questions if name in curves),
        formulas_section({name: each for name, each in curves.items() if name not in questions}),
        guides_section(metrics),
        audits_section(metrics),
    ]
    if metrics["left_out"]:
        parts.append(f"Not reached in the time there was: {len(metrics['left_out'])} points.")
    return "\n\n".join(part for part in parts if part)


def curve_section(name: str, curve: dict[str, Any]) -> str:
    """One question's curve as a table."""
    base, points = curve["base"], curve["points"]
    start = base["start"]
    heads = ["asked", "got", "chosen by weight", "ends mixed", "ends mixed, chosen by weight"]
    heads += ["KL(q‖p)", "least possible KL", "perplexity"]
    mixed = curve.get("mixed") or [None] * len(points)
    lines = [
        [
            f"{each['asked']:g}",
            _span(each["got"], 3),
            _span(each["corrected"], 3),
            "–" if ends is None else _span(ends["got"], 3),
            "–" if ends is None else _span(ends["corrected"], 3),
            _span(each["kl"], 2),
            number_cell(base["least_kl"][f"{each['asked']:g}"], 2),
            _span(each["perplexity"], 1),
        ]
        for each, ends in zip(points, mixed, strict=True)
    ]
    words = (
        f"**{name}**: p itself satisfies {_span(base['got'], 3)} of its texts (perplexity "
        f"{base['perplexity']['value']:.1f}); the guide says {start['predicted']:.3f} on average"
    )
    if start["correlation"] is not None:
        words += f", correlation with the prompts' own rates {start['correlation']:.2f}"
    error, several = curve["largest_error"], points[0]["texts"] // points[0]["prompts"]
    words += (
        f". {points[0]['texts']:,} texts a point, of {points[0]['prompts']} prompts. Largest distance "
        f"between asked and got: {error['got']:.3f}; with one text in {several} "
        f"chosen by its weight {error['corrected']:.3f}"
    )
    if "mixed" in curve:
        ends = curve["largest_error_mixed"]
        words += f"; of the two ends mixed {ends['got']:.3f}, chosen by weight {ends['corrected']:.3f}"
    verified = curve["p_verified"]
    words += (
        f". Choosing by weight asks the oracle about {several} texts: of as many texts of p alone one is "
        f"satisfied for {100 * verified['rate_1']:.1f} % of the prompts, and one unsatisfied for "
        f"{100 * (1 - verified['rate_0']):.1f} %."
    )
    parts = [words, table(lines, heads)]
    if "turned" in curve:
        parts.append(turned_section(curve))
    return "\n\n".join(parts)


def turned_section(curve: dict[str, Any]) -> str:
    """The dial of measured stops: what was measured, and what came of it."""
    dial = Dial.read(curve["dial"])
    stops = "; ".join(
        f"{stop.strength:g}{'' if stop in dial.stops else ' (left out)'}: {stop.rate:.3f} at KL {stop.kl:.2f}"
        for stop in dial.measured
    )
    points = curve["turned"]
    lines = [
        [
            f"{each['asked']:g}",
            _span(each["got"], 3),
            ", ".join(f"{100 * part:.0f} % of {name}" for name, part in each["stops"].items()),
            _span(each["kl"], 2),
            number_cell(curve["base"]["least_kl"][f"{each['asked']:g}"], 2),
            _span(each["perplexity"], 1),
            number_cell(each["spread"], 2),
        ]
        for each in points
    ]
    words = (
        "By a dial of measured stops (no finished text is judged to write by it): largest distance between "
        f"asked and got {curve['largest_error_turned']:.3f}. Stops, by strength, each from {dial.texts:,} "
        f"texts of {dial.prompts} prompts that the guide was not trained on: {stops}."
    )
    heads = ["asked", "got", "written by", "KL(q‖p)", "least possible KL", "perplexity"]
    return f"{words}\n\n{table(lines, [*heads, 'spread over prompts'])}"


def formulas_section(curves: dict[str, Any]) -> str:
    """Guides combined."""
    lines = [
        [
            f"`{name}`",
            _span(curve["base"]["got"], 3),
            f"{each['asked']:g}",
            _span(each["got"], 3),
            _span(each["corrected"], 3),
            _span(each["kl"], 2),
            _span(each["perplexity"], 1),
        ]
        for name, curve in curves.items()
        for each in curve["points"]
    ]
    heads = ["formula", "p", "asked", "got", "chosen by weight", "KL(q‖p)", "perplexity"]
    turned = [f"**`{name}`**. {turned_section(curve)}" for name, curve in curves.items() if "turned" in curve]
    return "\n\n".join([table(lines, heads), *turned]) if lines else ""


def guides_section(metrics: dict[str, Any]) -> str:
    """How guides were trained, and what recalibration changed."""
    lines = []
    for name, facts in metrics["guides"].items():
        mended = facts["calibration"] or {}
        drawn = facts["drawn"]
        lines.append(
            [
                name,
                f"{facts['parameters'] / 1e6:.2f}M",
                f"{drawn['texts']:,}, {100 * drawn['satisfied']:.1f} % satisfied",
                f"{facts['steps']:,} × {metrics['settings']['guide']['batch']}",
                f"{facts['train_seconds']:.0f} s",
                number_cell(facts["best"].get("held_out_success"), 4),
                number_cell(mended.get("calibration_error_before"), 4),
                number_cell(mended.get("calibration_error_after"), 4),
            ]
        )
    heads = [
        "guide",
        "parameters",
        "texts of p",
        "steps × texts",
        "time",
        "held-out CE",
        "ECE",
        "recalibrated",
    ]
    return table(lines, heads)


def audits_section(metrics: dict[str, Any]) -> str:
    """What the oracles really answer to, on texts of p."""
    parts = []
    for name, facts in metrics["guides"].items():
        if "audit" not in facts:
            continue
        found = facts["audit"]
        lines = [
            [each["check"], each["status"], each["value"], each["message"]] for each in found["findings"]
        ]
        verdict = "clean" if found["clean"] else "passed with warnings" if found["passed"] else "failed"
        heads = ["check", "status", "found", ""]
        parts.append(
            f"Audit of *{name}* on {found['texts']:,} texts of p: {verdict}.\n\n{table(lines, heads)}"
        )
    known = metrics["classifier"]
    if known:
        parts.append(
            f"The toxicity classifier on {known['held_out_texts']:,} ParaDetox texts it has not seen: AUC "
            f"{known['held_out_auc']:.3f}."
        )
    return "\n\n".join(parts)


def _span(found: dict[str, Any], digits: int) -> str:
    return span_cell(found["value"], found, digits)


def read_runs(folders: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """The results in the folders, by name."""
    paths = [path for folder in folders for path in sorted(folder.glob("dial-*.json"))]
    if folders and not paths:
        found = ", ".join(map(str, folders))
        raise InputError("dial-….json", f"none in {found}", "Give --output of run_dial.py.")
    return {path.stem: read_json(path) for path in paths}


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw, fill the README, and put the metrics on record if asked to."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, nargs="*", help="--output of run_dial.py, of every run to show")
    parser.add_argument("--readme", type=Path, help="the README to fill; pictures are put beside it")
    parser.add_argument("--record", action="store_true", help="put the metrics into benchmarks/results")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where that is")
    options = parser.parse_args(arguments)
    runs, path = read_runs(options.runs), options.results / "dial.json"
    if options.record:
        for name, run in runs.items():
            whole = {**run, "metrics": {name: run["metrics"]}}
            whole["runs"] = [{**each, "metrics": [name]} for each in run["runs"]]
            merge(whole, path)
    if options.record or not runs:
        runs = {
            name: {**run, "metrics": metrics}
            for run in on_record(path)
            for name, metrics in run["metrics"].items()
        }
    if options.readme is not None:
        folder = options.readme.parent
        pages = [illustrated_page(run, name, folder) for name, run in runs.items()]
        fill(options.readme, "\n\n".join(pages))


if __name__ == "__main__":
    main()
