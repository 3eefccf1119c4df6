"""From raw corpora to what a GPU machine needs: pairs, vocabulary, sources, test sets, two classifiers.

    python recipes/formality_mt/prepare_translation.py --data DATA --output local/formality_mt

DATA has the folders tatoeba_spa_eng, fisher_callhome, fluent_fisher and pavlick_formality. Written are two
folders of a few megabytes: `corpus` for train_translator.py, `study` for run_formality.py. Fluent references
and transcripts are for local use: keep them out of anything that is published.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from formality_classifiers import fit_classifiers
from raw_files import write_records
from translation_data import Pair, drawing_sources, read_tatoeba, read_test_records, training_pairs
from vocabulary import train_vocabulary

from nado.errors import NadoError
from nado.storage import read_json, write_json

CORPUS, STUDY = "corpus", "study"  # folders of the output
FACTS = "prepared.json"


def main(arguments: Sequence[str] | None = None) -> int:
    """Read, deduplicate, fit, write."""
    try:
        facts = prepare(_parse(arguments))
    except NadoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(json.dumps(facts, indent=2))
    return 0


def prepare_once(arguments: Sequence[str]) -> None:
    """Prepare, unless it has been done in this folder with the same choices."""
    options = _parse(arguments)
    path = options.output / STUDY / FACTS
    if not path.is_file() or read_json(path).get("choices") != _choices(options):
        path.unlink(missing_ok=True)
        prepare(options)


def _choices(options: argparse.Namespace) -> dict[str, Any]:
    """What files depend on beside the corpora."""
    return {name: getattr(options, name) for name in ("vocabulary", "sources", "longest", "seed")}


def prepare(options: argparse.Namespace) -> dict[str, Any]:
    """Everything; returns counts and what the classifiers are worth."""
    corpus, study = options.output / CORPUS, options.output / STUDY
    # First what is quick and may be missing, so that nobody waits a minute to hear of it.
    tested = read_test_records(options.data)
    classifiers = fit_classifiers(options.data, seed=options.seed)
    written, tatoeba_test = read_tatoeba(options.data)
    pairs = training_pairs(options.data, written)
    sources = drawing_sources(options.data, pairs, options.sources, options.longest)
    classifiers.save(study)
    write_records(corpus / "pairs.jsonl.gz", [{"es": each.spanish, "en": each.english} for each in pairs])
    write_records(
        corpus / "tatoeba_test.jsonl.gz", [{"es": each.spanish, "en": each.english} for each in tatoeba_test]
    )
    write_records(corpus / "fisher_test.jsonl.gz", [_without(each, "fluent") for each in tested])
    write_records(study / "test.jsonl.gz", tested)
    write_records(study / "sources.jsonl", _prompts(sources, "train") + _prompts(_distinct(tested), "test"))
    tokenizer = train_vocabulary(_texts(pairs), options.vocabulary, corpus / "tokenizer")
    facts = {
        "choices": _choices(options),
        "pairs": {"tatoeba": len(written), "in all, with spoken forms": len(pairs)},
        "tatoeba_test": len(tatoeba_test),
        "fisher_test": {
            "utterances": len(tested),
            "with fluent references": sum(bool(each["fluent"]) for each in tested),
            "fluent references": sum(len(each["fluent"]) for each in tested),
        },
        "sources": len(sources),
        "vocabulary": len(tokenizer),
        "classifiers": classifiers.held_out,
        "bytes": {
            name: sum(path.stat().st_size for path in (options.output / name).rglob("*") if path.is_file())
            for name in (CORPUS, STUDY)
        },
    }
    write_json(study / FACTS, facts)  # last: it says that all the others are there
    return facts


def _without(record: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key != name}


def _distinct(tested: Sequence[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(each["source"] for each in tested))


def _prompts(sources: Sequence[str], split: str) -> list[dict[str, Any]]:
    return [{"prompt": source, "condition": source, "split": split} for source in sources]


def _texts(pairs: Sequence[Pair]) -> list[str]:
    """Each text once: spoken forms share their English."""
    return list(dict.fromkeys(text for pair in pairs for text in (pair.spanish, pair.english)))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="the folder of the raw corpora")
    parser.add_argument("--output", type=Path, required=True, help="where the prepared files go")
    parser.add_argument("--vocabulary", type=int, default=8000, help="pieces of the vocabulary")
    parser.add_argument("--sources", type=int, default=10_000, help="sources that are drawn from")
    parser.add_argument("--longest", type=int, default=30, help="words of such a source, at most")
    parser.add_argument("--seed", type=int, default=0, help="of the two halves of the rated sentences")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
