"""From raw corpora to what training reads: clean sentences, a held-out split, keyword forms, a tokenizer.

    python recipes/tiny/prepare.py --data DATA --output local/tiny

DATA has the folders commongen, tatoeba_spa_eng and coco_captions. Everything written together is a few
megabytes, and the same on every run.
"""

import argparse
import gzip
import itertools
import json
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from sentences import Sentence, clean, find_names, read_captions, read_commongen, read_tatoeba
from tokenizers import Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast
from word_choice import MOST_WORDS, Candidates, find_candidates

START, END = "<|start|>", "<|end|>"
CONTEXT = 256


def main(arguments: Sequence[str] | None = None) -> None:
    """Read, clean, split, write."""
    options = _parse(arguments)
    chooser = random.Random(options.seed)
    names = find_names(sentence.text for sentence in read_tatoeba(options.data))
    raw = itertools.chain(
        read_commongen(options.data), read_captions(options.data), read_tatoeba(options.data)
    )
    sentences = list(clean(raw, names))
    if options.limit:
        sentences = chooser.sample(sentences, min(options.limit, len(sentences)))
    reported = read_sets(options.data / "commongen" / "dev.jsonl")
    sentences = [each for each in sentences if frozenset(each.words) not in reported]
    train, held_out = split(sentences, options.held_out, chooser)
    concepts = json.loads((options.data / "commongen" / "concept_forms.json").read_text(encoding="utf-8"))
    lemmas = find_lemmas(concepts)
    held_out = with_keywords(held_out, lemmas, names, chooser)
    tokenizer = train_tokenizer(as_read(train, lemmas, names, chooser), options.vocabulary)

    options.output.mkdir(parents=True, exist_ok=True)
    write_sentences(options.output / "train.jsonl.gz", train)
    write_sentences(options.output / "valid.jsonl.gz", held_out)
    wanted = sorted({word for sentence in held_out for word in sentence.words})
    forms = {word: concepts[word] for word in wanted if word in concepts}
    tables = {"lemmas": lemmas, "names": names, "forms": forms}
    text = json.dumps(tables, ensure_ascii=False, sort_keys=True)
    (options.output / "words.json").write_text(text, encoding="utf-8")
    tokenizer.save_pretrained(options.output / "tokenizer")
    print(json.dumps(summarise(train, held_out, tokenizer, options.output), indent=2))


def read_sets(path: Path) -> set[frozenset[str]]:
    """The concept sets, and nothing else, of a file on which results are reported."""
    with path.open(encoding="utf-8") as lines:
        return {frozenset(json.loads(line)["concepts"]) for line in lines}


def split(
    sentences: list[Sentence], held_out: int, chooser: random.Random
) -> tuple[list[Sentence], list[Sentence]]:
    """Hold out `held_out` concept sets with all their sentences, and as many sentences of Tatoeba and COCO.

    Sentences are different already, so no held-out sentence is in training; a concept set is held out in
    every order in which it occurs.
    """
    sets = sorted({tuple(sorted(each.words)) for each in sentences if each.words})
    kept_sets = set(chooser.sample(sets, min(held_out, len(sets) // 5)))
    kept = {each.key for each in sentences if each.words and tuple(sorted(each.words)) in kept_sets}
    for source in ("tatoeba", "coco"):
        keys = [each.key for each in sentences if each.source == source]
        kept |= set(chooser.sample(keys, min(held_out, len(keys) // 5)))
    train = [each for each in sentences if each.key not in kept]
    valid = [each for each in sentences if each.key in kept]
    chooser.shuffle(train)
    return train, valid


def find_lemmas(concepts: dict[str, list[str]]) -> dict[str, str]:
    """The concept of each inflected form; a form that is a concept itself stays what it is."""
    lemmas: dict[str, str] = {}
    for concept in sorted(concepts):
        for form in concepts[concept]:
            if form not in concepts and form.isalpha():
                lemmas.setdefault(form, concept)
    return lemmas


def with_keywords(
    sentences: list[Sentence], lemmas: dict[str, str], names: dict[str, str], chooser: random.Random
) -> list[Sentence]:
    """The sentences, those without concepts with keywords of their own; left out if they have none."""
    drawn = draw_keywords(sentences, lemmas, names, chooser)
    filled = [Sentence(s.text, s.source, s.words or words) for s, words in zip(sentences, drawn, strict=True)]
    return [each for each in filled if each.words]


def draw_keywords(
    sentences: list[Sentence], lemmas: dict[str, str], names: dict[str, str], chooser: random.Random
) -> list[tuple[str, ...]]:
    """Up to five content words of each sentence, in random order, most of them as base forms."""
    found = find_candidates(pa.array([each.text for each in sentences]), lemmas, names, [])
    return [_pick(row[row >= 0].tolist(), found, chooser) for row in found.table]


def _pick(candidates: list[int], found: Candidates, chooser: random.Random) -> tuple[str, ...]:
    count = min(len(candidates), chooser.randint(1, MOST_WORDS))
    chosen = chooser.sample(candidates, count)
    return tuple(found.words[found.lemma[at] if chooser.random() < 0.7 else at] for at in chosen)


def as_read(
    sentences: list[Sentence], lemmas: dict[str, str], names: dict[str, str], chooser: random.Random
) -> Iterable[str]:
    """What the model will read: every sentence after a prompt of keywords, and by itself."""
    drawn = draw_keywords(sentences, lemmas, names, chooser)
    for sentence, words in zip(sentences, drawn, strict=True):
        if words:
            yield f"{' '.join(sentence.words or words)} = {sentence.text}"
        yield sentence.text


def train_tokenizer(texts: Iterable[str], size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE of `size` tokens: any text comes back as it was. Every prompt begins with START."""
    inner = Tokenizer(BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    inner.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=size,
        special_tokens=[START, END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    inner.train_from_iterator(texts, trainer)
    start = (START, inner.token_to_id(START))
    inner.post_processor = processors.TemplateProcessing(single=f"{START} $A", special_tokens=[start])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token=START,
        eos_token=END,
        pad_token=END,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )


def write_sentences(path: Path, sentences: list[Sentence]) -> None:
    """One JSON object a line; no time stamp, so that equal sentences make equal files."""
    lines = (
        json.dumps({"text": each.text, "source": each.source, "words": list(each.words)}, ensure_ascii=False)
        for each in sentences
    )
    data = "".join(f"{line}\n" for line in lines).encode()
    path.write_bytes(gzip.compress(data, compresslevel=9, mtime=0))


def summarise(
    train: list[Sentence], held_out: list[Sentence], tokenizer: PreTrainedTokenizerFast, folder: Path
) -> dict[str, Any]:
    """Counts and sizes, to print."""
    pieces = tokenizer([each.text for each in held_out], add_special_tokens=False)["input_ids"]
    words = sum(len(each.text.split()) for each in held_out)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        "train": Counter(each.source for each in train),
        "train_words": sum(len(each.text.split()) for each in train),
        "train_sets": len({frozenset(each.words) for each in train if each.words}),
        "held_out": Counter(each.source for each in held_out),
        "held_out_sets": len({frozenset(s.words) for s in held_out if s.source == "commongen"}),
        "vocabulary": len(tokenizer),
        "tokens_per_word": round(sum(map(len, pieces)) / words, 3),
        "bytes": {str(path.relative_to(folder)): path.stat().st_size for path in files},
    }


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="the folder of the raw corpora")
    parser.add_argument("--output", type=Path, required=True, help="where the prepared files go")
    parser.add_argument("--vocabulary", type=int, default=6144, help="tokens of the tokenizer")
    parser.add_argument(
        "--held-out", type=int, default=1000, help="sets and sentences held out of each source"
    )
    parser.add_argument("--limit", type=int, default=0, help="use this many sentences only, to try it out")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
