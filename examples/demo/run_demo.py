"""The whole job on the embedded model, in three minutes on a laptop: draw, label, train, generate, evaluate.

    python examples/demo/run_demo.py            (or: make demo)

The base writes sentences about keywords; the oracle asks whether the number of their words is a multiple of
four. A guide is trained from nothing on the base's own labelled sentences and then judged on keywords it has
not seen, without an exact end.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from nado.cli.console import print_table, quieten, say
from nado.errors import NadoError
from nado.huggingface import load_model
from nado.oracles.text_rules import count_words
from nado.report import write_report
from nado.samples import read_samples
from nado.study.evaluation import table_rows
from nado.study.reading import read_study
from nado.study.reporting import report_study
from nado.study.running import run_study
from nado.study.systems import read_texts

HERE = Path(__file__).parent
COLUMNS = ("system", "exact end", "satisfied", "length", "perplexity", "KL(q‖p)", "tokens")
ORACLE = "examples/demo/word_count.py:WordsInFours"  # its file is executed, so it has to be named
SHOWN = 4  # pairs of sentences
NEXT = """What now? The first and the last use guides of the package, the second the one just trained:

  nado generate --keywords "dog, ball, beach"
  nado generate --guide {folder}/train --oracle {oracle} --keywords "girl, horse" --inspect
  nado serve
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the study, write the page, print the table; 1 if the guide does not do what is promised."""
    options = _parse(arguments)
    quieten()
    try:
        return demonstrate(options)
    except NadoError as error:
        say(f"error: {error}")
        return 1


def demonstrate(options: argparse.Namespace) -> int:
    """The whole job, and what came of it."""
    began = time.monotonic()
    study = read_study(HERE / "demo.toml", options.settings)
    evaluation = run_study(study, options.folder, force=options.force, say=say)
    assert evaluation is not None
    page = write_report(report_study(options.folder), options.folder)
    seconds = time.monotonic() - began
    heads, rows = table_rows(evaluation)
    kept = [place for place, head in enumerate(heads) if head in COLUMNS]
    print_table(
        [heads[place] for place in kept],
        [[row[place] for place in kept] for row in rows],
        f"words in fours, after {evaluation['prompts']} sets of keywords not seen in training",
    )
    for line in pairs(options.folder / "generate"):
        print(line)
    token, auc = best_token(options.folder / "draw")
    print(f"No single token decides: the best one, {token!r}, has an AUC of {auc:.2f}.")
    print(f"{seconds:.0f} seconds. Everything that was measured: {page}\n")
    print(NEXT.format(folder=options.folder, oracle=ORACLE))
    satisfied = {
        each["system"]: each["measures"]["satisfied"]["value"]
        for each in evaluation["systems"]
        if not each["exact_end"]
    }
    if options.record:
        record(satisfied, seconds, token, auc)
    return 0 if promise_held(satisfied, auc) else 1


def pairs(folder: Path) -> Iterator[str]:
    """The first sentences of base and guide about the same keywords, with their numbers of words."""
    written = [read_texts(folder / f"{name}.jsonl") for name in ("base", "trained-guide")]
    for base, guided in list(zip(*written, strict=True))[:SHOWN]:
        yield f"\n{base.condition}"
        for name, each in (("base", base), ("guided", guided)):
            text = each.text.strip()
            yield f"  {name:<7} {count_words(text):>2} words  {text}"
    yield ""


def best_token(folder: Path) -> tuple[str, float]:
    """The token whose presence alone tells most about the label, and its AUC."""
    samples = read_samples(folder)
    satisfied = samples.array("satisfied").astype(bool)
    model = load_model("tiny", length_limit=32, device="cpu")
    present = np.zeros((len(satisfied), model.vocabulary_size), dtype=bool)
    for row, tokens in enumerate(samples.table["tokens"].to_pylist()):
        present[row, tokens] = True
    auc = 0.5 + 0.5 * (present[satisfied].mean(0) - present[~satisfied].mean(0))
    best = int(np.abs(auc - 0.5).argmax())
    return model.tokenizer.decode([best]), float(max(auc[best], 1 - auc[best]))


def promise_held(satisfied: dict[str, float], auc: float) -> bool:
    """Whether the base was under 30 %, the guide over 80 %, and no token decides."""
    promises = {
        "the base satisfies the oracle in under 30 % of its texts": satisfied["base"] < 0.3,
        "the trained guide does in over 80 %": satisfied["trained guide"] > 0.8,
        "no token's presence reaches an AUC of 0.75": auc < 0.75,
    }
    for promise, held in promises.items():
        if not held:
            say(f"not so: {promise}")
    return all(promises.values())


def record(satisfied: dict[str, float], seconds: float, token: str, auc: float) -> None:
    """Write benchmarks/results/demo.json."""
    sys.path.insert(0, str(HERE.parent.parent / "benchmarks"))
    import recording

    metrics = {
        "seconds_2core": seconds,
        "satisfied_base": satisfied["base"],
        "satisfied_untrained": satisfied["untrained guide"],
        "satisfied_guided": satisfied["trained guide"],
        "best_token": token,
        "best_token_auc": auc,
    }
    recording.record("demo", metrics)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path("demo"), help="where everything is kept")
    parser.add_argument("--set", dest="settings", action="append", default=[], help="--set train.steps=100")
    parser.add_argument("--force", action="store_true", help="make stages again that differ")
    parser.add_argument("--record", action="store_true", help="write benchmarks/results/demo.json")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
