"""Make what the dial needs from corpora: prompts, and a toxicity classifier fitted to ParaDetox.

    python recipes/dial/prepare_dial.py --data DATA --output local/dial/prepared

DATA holds the folders ccby_reviews, paradetox and real_toxicity_prompts. OUTPUT gets openings.jsonl, the
classifier, and about.json with what the classifier is worth on pairs it has not seen. The texts of
RealToxicityPrompts are for local use only: OUTPUT is not to be published. With `--without-toxicity` only
ccby_reviews is needed; `openings.jsonl` beside this file was made so.
"""

import argparse
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from dial_data import Opening, read_lines, require_file, review_openings, toxicity_prompts, write_openings
from numpy.typing import NDArray

from nado.errors import NadoError
from nado.oracles.linear_classifier import LinearClassifier
from nado.storage import write_json

CLASSIFIER = "toxicity"  # its folder
ABOUT = "about.json"
_HELD_OUT = 0.1  # of the pairs
_THRESHOLDS = (0.2, 0.3, 0.4, 0.5)


def fit_toxicity(data: Path, *, seed: int) -> tuple[LinearClassifier, dict[str, Any]]:
    """A classifier of toxic sentences against their neutral paraphrases; both of a pair on one side."""
    pairs = [
        (record["toxic"], record["neutral"])
        for record in read_lines(require_file(data / "paradetox" / "paradetox.jsonl"))
        if record["neutral"]
    ]
    random.Random(seed).shuffle(pairs)
    held = max(1, round(_HELD_OUT * len(pairs)))
    texts, labels = _unfold(pairs[held:])
    # Weak regularisation: what is toxic is said by few words, and those must weigh.
    classifier = LinearClassifier.fit(texts, labels, max_ngram=2, max_terms=20_000, regularisation=0.1)
    unseen, labels = _unfold(pairs[:held])
    predicted, toxic = classifier.probabilities(unseen), np.array(labels)
    return classifier, {
        "texts": len(texts),
        "held_out_texts": len(unseen),
        "held_out_auc": round(_auc(predicted, toxic), 4),
        "held_out_by_threshold": {
            f"{each:g}": {
                "toxic_found": round(float(np.mean(predicted[toxic] >= each)), 4),
                "neutral_passed": round(float(np.mean(predicted[~toxic] < each)), 4),
            }
            for each in _THRESHOLDS
        },
    }


def _unfold(pairs: Sequence[tuple[str, list[str]]]) -> tuple[list[str], list[bool]]:
    """One toxic and one neutral text of each pair: as many of one kind as of the other."""
    texts = [text for toxic, neutral in pairs for text in (toxic, neutral[0])]
    return texts, [True, False] * len(pairs)


def _auc(predicted: NDArray[np.float64], positive: NDArray[np.bool_]) -> float:
    """The chance that a toxic text is ranked above a neutral one; ties count half."""
    above, below = np.sort(predicted[positive]), np.sort(predicted[~positive])
    wins = np.searchsorted(below, above, side="left") + np.searchsorted(below, above, side="right")
    return float(wins.sum() / 2 / (len(above) * len(below)))


def prepare(options: argparse.Namespace) -> tuple[list[Opening], dict[str, Any]]:
    """Write the prepared files, about.json last; returns the prompts and what the classifier is worth."""
    sizes = {"train": options.train, "test": options.test, "seed": options.seed}
    openings, about = review_openings(options.data, **sizes), {}
    if options.toxicity:
        openings += toxicity_prompts(options.data, **sizes)
        classifier, about = fit_toxicity(options.data, seed=options.seed)
        classifier.save(options.output / CLASSIFIER)
    write_openings(options.output / "openings.jsonl", openings)
    write_json(options.output / ABOUT, about)
    return openings, about


def prepare_once(data: Path, folder: Path) -> Path:
    """The folder, in which everything is prepared in the usual way unless it is there."""
    if not (folder / ABOUT).is_file():
        prepare(_parse(["--data", str(data), "--output", str(folder)]))
    return folder


def main(arguments: Sequence[str] | None = None) -> int:
    """Prepare, and say what there is."""
    options = _parse(arguments)
    try:
        openings, about = prepare(options)
    except NadoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    kinds = [(each.kind, each.split) for each in openings]
    for kind, split in dict.fromkeys(kinds):
        print(f"{kinds.count((kind, split)):,} {kind} prompts to {split}")
    if about:
        print(f"toxicity classifier: held-out AUC {about['held_out_auc']:.3f}")
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder of the corpora")
    parser.add_argument("--output", type=Path, required=True, help="where the prepared files go")
    parser.add_argument("--train", type=int, default=4000, help="training prompts of each kind at most")
    parser.add_argument("--test", type=int, default=600, help="held-out prompts of each kind")
    parser.add_argument("--seed", type=int, default=0, help="of the choice")
    parser.add_argument(
        "--without-toxicity", dest="toxicity", action="store_false", help="review openings alone"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
