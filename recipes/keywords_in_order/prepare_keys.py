"""Make what the study needs from a corpus: texts with keys drawn at random, and key lists to be tested on.

    python recipes/keywords_in_order/prepare_keys.py --corpus yelp --data DATA \\
        --output local/keywords_in_order/yelp

DATA holds the folders yelp_pointer and yelp_reviews (yelp), emnlp_news (news) or ccby_reviews (reviews). The
first two are for local use only: what is made of them is not to be published. No training text shares ten
words in a row with a test text.
"""

import argparse
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from key_corpora import read_corpus
from ordered_keys import choose_keys, draw_count, ordered_oracle, write_keyed

from nado.errors import InputError, NadoError
from nado.storage import read_json, write_json

TRAIN, TEST, ABOUT = "train.jsonl.gz", "test.jsonl.gz", "about.json"


def draw_keys(
    texts: Sequence[str], keys: int, *, lists: int, fewer: float, chooser: random.Random
) -> list[dict[str, Any]]:
    """Each text with `lists` lists of its keys; one that has too few words to choose from is left out."""
    oracle, found = ordered_oracle(), []
    for text in texts:
        several = [choose_keys(text, draw_count(keys, fewer, chooser), chooser) for _ in range(lists)]
        if min(map(len, several)) < 2:
            continue
        conditions = [", ".join(each) for each in several]
        if bool(oracle(conditions, [text] * lists).all()):
            found.append({"text": text, "keys": [list(each) for each in several]})
    return found


def require_kept(tested: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The test lists, all of which their own references must satisfy; a few that do not are left out."""
    oracle, tested = ordered_oracle(), [each for each in tested if each["keys"]]  # some have no key at all
    holds = oracle([", ".join(each["keys"]) for each in tested], [each["text"] for each in tested])
    kept = [each for each, right in zip(tested, holds.tolist(), strict=True) if right]
    if len(kept) < 0.95 * len(tested):
        raise InputError(
            "test keys that stand in their references, in order",
            f"{len(tested) - len(kept)} of {len(tested)} that do not",
            "Get the test file again.",
        )
    return kept


def prepare(options: argparse.Namespace) -> dict[str, Any]:
    """Write the prepared files, last the one that says what they are, which is returned."""
    corpus = read_corpus(options.corpus, options.data, news_keys=options.news_keys, seed=options.seed)
    chooser = random.Random(options.seed + 1)
    training = list(corpus.training)
    chooser.shuffle(training)
    chosen = training[: options.texts or None]
    records = draw_keys(chosen, corpus.keys, lists=options.lists, fewer=options.fewer, chooser=chooser)
    tested = require_kept(corpus.tested)
    write_keyed(options.output / TRAIN, records)
    write_keyed(options.output / TEST, tested)
    about = {
        "corpus": options.corpus,
        "keys": corpus.keys,
        "training_texts": len(records),
        "test_lists": len(tested),
        "test_lists_left_out": len(corpus.tested) - len(tested),
        "mean_words": sum(len(each["text"].split()) for each in records) / max(1, len(records)),
        "mean_test_words": sum(len(each["text"].split()) for each in tested) / max(1, len(tested)),
    }
    write_json(options.output / ABOUT, about)
    return about


def prepare_once(corpus: str, data: Path, folder: Path) -> Path:
    """The folder, in which the corpus is prepared in the usual way unless it is there."""
    about = folder / ABOUT
    if not about.is_file() or read_json(about)["corpus"] != corpus:
        about.unlink(missing_ok=True)
        prepare(_parse(["--corpus", corpus, "--data", str(data), "--output", str(folder)]))
    return folder


def main(arguments: Sequence[str] | None = None) -> int:
    """Prepare, and say what there is."""
    options = _parse(arguments)
    try:
        about = prepare(options)
    except NadoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(", ".join(f"{name}: {value}" for name, value in about.items()))
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--corpus", required=True, help="yelp, news or reviews")
    parser.add_argument("--data", type=Path, required=True, help="folder of the corpora")
    parser.add_argument("--output", type=Path, required=True, help="where the prepared files go")
    parser.add_argument("--texts", type=int, default=0, help="training texts at most, 0 for all")
    parser.add_argument("--lists", type=int, default=4, help="key lists of each training text")
    parser.add_argument("--fewer", type=float, default=0.25, help="share of lists with fewer keys")
    parser.add_argument("--news-keys", default="keys_yake", help="keys_yake (as POINTER) or keys_random")
    parser.add_argument("--seed", type=int, default=0, help="of every choice")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
