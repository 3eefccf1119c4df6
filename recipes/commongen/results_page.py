"""Results where they belong: the README's tables and `benchmarks/results`, from a run's JSON alone.

    python recipes/commongen/results_page.py OUT [OUT …] [--readme README.md] [--record] [--outputs outputs]

The first run is the main one; further ones (ablations, other bases) add their lines. What is on record can
stand for the runs that made it, but for costs: `results_page.py benchmarks/results OUT …` adds to it. No
number is typed by hand.
"""

import argparse
import json
import sys
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import siblings  # noqa: F401  (finds what benchmarks share)
from looks_plot import draw_looks, measured_looks

import recording
from nado.errors import InputError
from nado.storage import read_json
from recording import RESULTS, merge

BEGIN, FINISH = "<!-- results: written by this recipe's page script -->", "<!-- end of results -->"
_UNSEEN = "Texts of the chosen configuration for sets with words that no training text has, none selected:"
_PICTURE = "along_training.svg"  # beside the README
_PRIVATE = ("--output", "--work", "--data")  # where files were says nothing about the numbers
_BEAMS = ("beam", "search")  # transformers' own, and those by p·R


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


def join_runs(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Several runs as one: the lines of all of them, those of p once; the rest is the first one's.

    Runs of one study share their stages, and a guide's name must not stand for two different guides.
    """
    first = runs[0]["metrics"]
    known: dict[tuple[Any, ...], dict[str, Any]] = {}
    stages: dict[str, Any] = {}
    for run in runs:
        for row in run["metrics"]["rows"]:
            kept = known.setdefault(_name(row), row)
            if "against_base" in row and kept["coverage"] != row["coverage"]:
                _refuse_two(f"the line {row['setting']}, {row['decoding']}, strength {row['strength']:g}")
        for name, facts in run["metrics"]["stages"].items():
            if stages.setdefault(name, facts) != facts and name.startswith("guide-"):
                _refuse_two(f"the guide {name.removeprefix('guide-')}")
    rows = list(known.values())
    guides = {
        name: each for run in reversed(runs) for name, each in run["metrics"]["settings"]["guides"].items()
    }
    joined = {**first, "rows": rows, "stages": stages, "settings": {**first["settings"], "guides": guides}}
    joined["runs"] = [each for run in runs for each in _runs_in(run)]
    return {**runs[0], "metrics": joined}


def _refuse_two(what: str) -> None:
    raise InputError(f"{what} in one run", "two that differ", "Leave one of them out, or name it otherwise.")


def _runs_in(run: dict[str, Any]) -> list[dict[str, Any]]:
    """What is said of a run; of each, where several were joined before."""
    metrics = run["metrics"]
    own = {name: run[name] for name in ("date", "machine", "commit", "command")}
    return metrics.get("runs") or [{**own, "seconds": metrics["seconds"]}]


def _name(row: dict[str, Any]) -> tuple[Any, ...]:
    names = ("setting", "system", "decoding", "strength", "exact_end", "seed")
    return (row.get("group", ""), row.get("doubt", 0.0), *(row[each] for each in names))


def results(study: dict[str, Any], overhead: dict[str, Any], picture: str = "") -> str:
    """What stands between the marks; `picture` is a file that shows how training went."""
    metrics = study["metrics"]
    groups = group_rows(metrics["rows"])
    rows = groups.pop("")
    blind = [row for several in groups.values() for row in several if _is_blind(row)]
    parts = [
        *(
            f"{run['date']}, {run['machine']}, commit {run['commit']}, {run['seconds']:.0f} s: "
            f"`{run['command']}`."
            for run in metrics["runs"]
        ),
        aims_table([*rows, *blind]),
        f"Dev; the {rows[0]['sets']} sets whose id is not divisible by 5, in brackets all "
        f"{rows[0]['sets_in_all']}; one text a set. Corpus BLEU with spaCy-like English tokens, case kept; "
        "coverage by whole words in the forms of `concept_forms.json`, mean over sets; 95 % intervals, by "
        "bootstrap over sets (all covered: Wilson). Perplexity is that of the texts under p. *Missed "
        "removed* is (c_q − c_p) / (100 − c_p) against p under the same decoding.",
        table(rows),
        *(f"{name}\n\n{table(several)}" for name, several in groups.items()),
        guides_table(metrics),
        f"![Coverage and BLEU-4 of greedy texts along training]({picture})" if picture else "",
        looks_table(metrics),
        costs_section(overhead["metrics"]),
    ]
    return "\n\n".join(part for part in parts if part)


def first_costs(folders: Sequence[Path]) -> dict[str, Any]:
    """What guidance costs, of the first run that measured it."""
    paths = [folder / "overhead.json" for folder in folders]
    measured = [each for each in map(read_json, filter(Path.is_file, paths)) if each["metrics"]]
    return measured[0] if measured else {"metrics": {}}


def group_rows(rows: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Lines by what they are about: those of the main table, then those of each table of its own."""
    groups: dict[str, list[dict[str, Any]]] = {"": []}
    for row in rows:
        groups.setdefault(row.get("group", ""), []).append(row)
    return groups


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Lines with all that was measured."""
    heads = ["system", "decoding", "strength", "exact end", "coverage", "all covered", "missed removed"]
    heads += ["BLEU-3", "BLEU-4", "against p", "words", "perplexity", "draws"]
    lines = [_line(row) for row in rows]
    if any(row.get("base_tokens_a_text") for row in rows):
        heads += ["tokens of p a text"]
        for row, line in zip(rows, lines, strict=True):
            line.append(number_cell(row.get("base_tokens_a_text"), 0))
    return _table(heads, lines)


def _line(row: dict[str, Any]) -> list[str]:
    against = row.get("against_base")
    every = row["all_sets"]

    def number(name: str, digits: int = 1) -> str:
        low, high = row["interval"][name]
        span = "" if low is None else f" ±{(high - low) / 2:.{digits}f}"
        return f"{number_cell(row[name], digits)}{span} ({number_cell(every[name], digits)})"

    gain = "–" if against is None else span_cell(against["bleu4"]["difference"], against["bleu4"], sign="+")
    removed = (
        "–" if against is None else span_cell(against["missed_removed"]["value"], against["missed_removed"])
    )
    guided = against is not None
    return [
        row["setting"],
        row["decoding"] + (f", seed {row['seed']}" if row["seed"] else ""),
        strength_and_doubt(row) if guided else "–",
        ("on" if row["exact_end"] else "off") if guided else "–",
        number("coverage"),
        number("all_covered"),
        removed,
        number("bleu3"),
        number("bleu4"),
        gain,
        number_cell(row["length"], 1),
        number_cell(row["perplexity"], 2),
        number_cell(row.get("draws_a_text"), 2),
    ]


def aims_table(rows: Sequence[dict[str, Any]]) -> str:
    """What was aimed at, and the line that came nearest: the best of all, so read it with the table below."""
    guided = [row for row in rows if "against_base" in row and row["system"] != "untrained"]
    blind = [row for row in guided if _is_blind(row)]
    guided = [row for row in guided if row not in blind]
    searched = [row for row in guided if row["decoding"].startswith(("greedy", *_BEAMS))]
    free = [row for row in searched if not row["exact_end"]]
    told = [row for row in free if "whole texts only" not in row["setting"]]
    bare = [row for row in free if "whole texts only" in row["setting"]]
    exact = [row for row in searched if row["exact_end"] and row["decoding"].startswith(_BEAMS)]
    checked = [row for row in guided if row["decoding"] == "verified"]
    blind = [row for row in blind if not row["exact_end"]]
    lines = [
        _aim("missed removed, bare oracle, exact end off", "≥ 37 %", bare, _removed),
        _aim("missed removed, with parts, progress, stop labels, exact end off", "≥ 75 %", told, _removed),
        _aim("coverage, exact end on, beams, BLEU-4 no worse than p's", "≥ 97", exact, _coverage_kept),
        _aim("gain in BLEU-4 over p", "≥ +1.0, interval above 0", searched, _gain),
        _aim("all covered, verified", "≥ 99.5 % in ≤ 4 draws", checked, lambda row: row["all_covered"]),
        _aim("domain-adapted base, coverage, exact end off", "≥ 90", blind, lambda row: row["coverage"]),
    ]
    return _table(["aim", "", "best", "by"], [line for line in lines if line])


def _is_blind(row: dict[str, Any]) -> bool:
    """Whether a guide stands beside the base that sees no concepts."""
    return bool(row["setting"].startswith("domain-adapted"))


def _aim(
    name: str, wanted: str, rows: Sequence[dict[str, Any]], value: Callable[[dict[str, Any]], float | None]
) -> list[str]:
    """One aim, and the line that is best at it; nothing where no line is about it."""
    found = [(value(row), row) for row in rows]
    known = [(number, row) for number, row in found if number is not None]
    if not known:
        return [name, wanted, "–", "no line"] if rows else []
    number, row = max(known, key=lambda pair: pair[0])
    draws = f", {row['draws_a_text']:.2f} draws" if row.get("draws_a_text") else ""
    gain = row["against_base"]["bleu4"]
    change = f"BLEU-4 {span_cell(gain['difference'], gain, sign='+')}"
    by = f"{row['setting']}; {row['decoding']}, strength {strength_and_doubt(row)}{draws}; {change}"
    return [name, wanted, f"{number:.1f}", by]


def strength_and_doubt(row: dict[str, Any]) -> str:
    """How a line was guided; lines of older records have no doubt."""
    return f"{row['strength']:g}" + (f", doubt {row['doubt']:g}" if row.get("doubt") else "")


def _removed(row: dict[str, Any]) -> float | None:
    found: float | None = row["against_base"]["missed_removed"]["value"] if "against_base" in row else None
    return found


def _coverage_kept(row: dict[str, Any]) -> float | None:
    """Coverage, where it has not cost BLEU."""
    return row["coverage"] if (_gain(row) or 0.0) >= 0 else None


def _gain(row: dict[str, Any]) -> float | None:
    found: float | None = row["against_base"]["bleu4"]["difference"] if "against_base" in row else None
    return found


def looks_table(metrics: dict[str, Any]) -> str:
    """Coverage and BLEU-4 of greedy texts along the training of guides that were measured."""
    lines = []
    for title, looks in measured_looks(metrics):
        for each in looks:
            numbers = [each["held_out_loss"], each["guided_coverage"], each["guided_bleu4"]]
            counts = [f"{each['step']:.0f}", f"{each['read']:,.0f}"]
            lines.append([title, *counts, *(f"{number:.3f}" for number in numbers)])
    heads = ["guide", "step", "texts read", "held-out loss", "coverage, greedy", "BLEU-4, greedy"]
    return _table(heads, lines) if lines else ""


def unseen_table(folder: Path) -> str:
    """What the chosen configuration writes for words that it has not learned; none selected."""
    texts = {kind: _read_lines(folder / f"unseen.{kind}.jsonl") for kind in ("p", "q", "verified")}
    lines = [
        [", ".join(each[0]["concepts"]), *(record["text"] for record in each)]
        for each in zip(*texts.values(), strict=True)
    ]
    return _table(["concepts", *texts], lines) if lines else ""


def _read_lines(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


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
                number_cell(best.get("held_out_success"), 4),
                number_cell(best.get("held_out_calibration_error"), 4),
                number_cell(best.get("held_out_likelihood_gain"), 4),
            ]
        )
    heads = ["guide", "parameters", "steps × texts", "time", "tokens/s"]
    heads += ["held-out CE", "held-out ECE", "held-out gain, nats a token"]
    return _table(heads, lines) if lines else ""


def costs_section(metrics: dict[str, Any]) -> str:
    """Rejection, soft rates and what the light guide keeps."""
    parts = []
    rejection = metrics.get("rejection_h200") or metrics.get("rejection_cpu")
    if rejection:
        ratio = rejection["ratio"]
        parts.append(
            f"Rare sets ({rejection['prompts']}, on which p satisfies {rejection['p']['rate']:.1%} of fresh "
            f"draws): {span_cell(ratio['value'], ratio)} times fewer base tokens a satisfying text than by "
            f"rejection, exact end off (q satisfies {rejection['q']['rate']:.1%})."
        )
    gain = metrics.get("light_gain_share_interval")
    if gain:
        parts.append(
            f"The light guide keeps {span_cell(gain['value'], gain, digits=2)} of the larger guide's gain in "
            "coverage (greedy, strength 1, exact end off)."
        )
    for name, words in (
        ("soft_rates", "as trained"),
        ("soft_rates_calibrated", "calibrated on held-out sets"),
    ):
        if metrics.get(name):
            got = "; ".join(
                f"{each['asked']:g} → {span_cell(each['got'], each, 3)}" for each in metrics[name]
            )
            parts.append(f"Soft rate asked for → got, guide {words}: {got}.")
    return "\n\n".join(parts)


def number_cell(value: float | None, digits: int) -> str:
    """A cell with a number, or with a dash where there is none; never a negative zero."""
    return "–" if value is None else f"{value:z.{digits}f}"


def span_cell(value: float | None, found: dict[str, Any], digits: int = 1, sign: str = "") -> str:
    """A cell with a number and its interval."""
    if value is None:
        return "–"
    if found["low"] is None:
        return f"{value:{sign}z.{digits}f}"
    return f"{value:{sign}z.{digits}f} [{found['low']:{sign}z.{digits}f}, {found['high']:{sign}z.{digits}f}]"


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


def unpack_final(archive: Path, folder: Path) -> None:
    """The texts of the chosen configuration, as plain files."""
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive) as packed:
        for each in packed:
            content = packed.extractfile(each)
            if content is not None and each.name.endswith(".jsonl"):
                (folder / Path(each.name).name).write_bytes(content.read())


def main(arguments: Sequence[str] | None = None) -> None:
    """Fill the README, and put the metrics on record if asked to."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, nargs="+", help="outputs, of the main run first, or --results")
    parser.add_argument("--readme", type=Path, help="the README to fill")
    parser.add_argument("--record", action="store_true", help="put the metrics into benchmarks/results")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where that is")
    parser.add_argument("--outputs", type=Path, help="where the texts for the test sets are to lie")
    options = parser.parse_args(arguments)
    final = options.runs[0] / "final.tar"
    found = {
        "commongen": join_runs([read_json(run / "commongen.json") for run in options.runs]),
        "overhead": first_costs([run for run in options.runs if run.resolve() != options.results.resolve()]),
    }
    metrics, readme = found["commongen"]["metrics"], options.readme
    drawn = readme is not None and draw_looks(metrics, readme.parent / _PICTURE)
    text = results(found["commongen"], found["overhead"], _PICTURE if drawn else "")
    if options.outputs is not None:
        if final.is_file():
            unpack_final(final, options.outputs)
        text += f"\n\n{_UNSEEN}\n\n{unseen_table(options.outputs)}"
    if readme is not None:
        fill(readme, text)
    if options.record:
        for name, each in found.items():
            if each["metrics"]:
                merge(each, options.results / f"{name}.json")


if __name__ == "__main__":
    main()
