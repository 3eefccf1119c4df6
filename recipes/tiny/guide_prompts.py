"""Keyword prompts for the embedded guides, from what `prepare.py` has written: a file `nado run` reads.

    python recipes/tiny/guide_prompts.py --prepared local/tiny --output local/tiny/guide_prompts.jsonl

Training prompts are CommonGen's training sets and words of other training sentences; held-out ones are those
of held-out sentences, which neither the base nor a guide has seen.
"""

import argparse
import gzip
import json
import random
from collections.abc import Iterable, Sequence
from pathlib import Path

from prepare import draw_keywords
from sentences import Sentence


def main(arguments: Sequence[str] | None = None) -> None:
    """Read, choose, write."""
    options = _parse(arguments)
    chooser = random.Random(options.seed)
    tables = json.loads((options.prepared / "words.json").read_text(encoding="utf-8"))
    train = read_sentences(options.prepared / "train.jsonl.gz")
    concept_sets = distinct(each.words for each in train if each.words)
    others = chooser.sample([each for each in train if not each.words], options.others)
    drawn = distinct(draw_keywords(others, tables["lemmas"], tables["names"], chooser))
    held_out = distinct(each.words for each in read_sentences(options.prepared / "valid.jsonl.gz"))
    chooser.shuffle(held_out)
    known = {frozenset(words) for words in held_out}
    train_words = [words for words in concept_sets + drawn if words and frozenset(words) not in known]
    chooser.shuffle(train_words)
    with options.output.open("w", encoding="utf-8") as file:
        for split, chosen in (("train", train_words), ("held_out", held_out)):
            for words in chosen:
                file.write(json.dumps({"condition": ", ".join(words), "split": split}) + "\n")
    print(f"{len(train_words):,} training prompts, {len(held_out):,} held out")


def read_sentences(path: Path) -> list[Sentence]:
    """The sentences of a prepared file."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        records = [json.loads(line) for line in lines]
    return [Sentence(each["text"], each["source"], tuple(each["words"])) for each in records]


def distinct(sets: Iterable[Sequence[str]]) -> list[tuple[str, ...]]:
    """Each list of words once."""
    return list(dict.fromkeys(tuple(words) for words in sets))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prepared", type=Path, required=True, help="the folder prepare.py has written")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--others", type=int, default=20_000, help="sentences whose words are drawn")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
