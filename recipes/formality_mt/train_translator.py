"""Train the base on one GPU, measure it, and save it as a plain Hugging Face folder.

    python recipes/formality_mt/train_translator.py --corpus CORPUS --work WORK --output OUT

CORPUS is the folder `corpus` of prepare_translation.py. With the defaults it takes about seven minutes on one
H200; `--deadline` shortens training so that all of it ends in time. WORK/base/model is the model; OUT gets it
in pieces of at most 15 MiB (`cat base.tar.* | tar x` puts it together) and what was measured.
"""

import argparse
import sys
import zlib
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import neighbours  # noqa: F401  (finds the clock and the stages of the CommonGen recipe)
from packing import pack_in_pieces
from progress_log import Clock, Stages
from raw_files import read_records, require_file
from results_envelope import envelope
from transformers import PreTrainedTokenizerFast
from translator import (
    Pairs,
    TranslatorSettings,
    build_translator,
    mean_loss,
    save_translator,
    train_translator,
    translate,
)

from nado.errors import NadoError
from nado.huggingface import EncoderDecoderModel, load_model
from nado.metrics import sacre_bleu
from nado.storage import digest_file, digest_json, write_json

LENGTH_LIMIT = 72
BASE_FACTS = "base.json"  # in the output
_HELD_OUT = 100  # one English sentence of so many is not learned from, with all its pairs
_RESERVED = 150.0  # seconds kept before the deadline for compiling, measuring and saving


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, measure, pack."""
    try:
        train_base(arguments)
    except NadoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def train_base(arguments: Sequence[str] | None) -> Path:
    """The two stages, each of which is not done twice; returns the model's folder."""
    options = _parse(arguments)
    settings = TranslatorSettings(
        **{each.name: getattr(options, each.name) for each in fields(TranslatorSettings)}
    )
    clock = Clock(options.output / "train.log", deadline=options.deadline)
    files = [
        options.corpus / name for name in ("pairs.jsonl.gz", "tatoeba_test.jsonl.gz", "fisher_test.jsonl.gz")
    ]
    for path in (*files, options.corpus / "tokenizer" / "tokenizer.json"):
        require_file(path, "what prepare_translation.py writes")
    stages = Stages(options.work, digest_json([digest_file(path) for path in files]), clock)
    base = stages.run(
        "base", asdict(settings), [], lambda folder: train_stage(clock, options.corpus, settings, folder)
    )
    stages.run(
        "base_scores",
        {"beams": options.beams, "length_limit": LENGTH_LIMIT},
        ["base"],
        lambda folder: score_stage(clock, options.corpus, base / "model", options),
    )
    pack_in_pieces(base / "model", options.output, "base")
    facts = {name: stages.facts[name] for name in ("base", "base_scores")}
    write_json(
        options.output / BASE_FACTS, envelope({**facts, "settings": asdict(settings)}, "train_translator.py")
    )
    clock.say("done")
    return base / "model"


def train_stage(clock: Clock, corpus: Path, settings: TranslatorSettings, folder: Path) -> dict[str, Any]:
    """Train for as long as there is time; returns how it went."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(corpus / "tokenizer")
    records = read_records(corpus / "pairs.jsonl.gz", "pairs")
    pairs, held_out = (Pairs(sides, clock.device) for sides in split_pairs(tokenizer, records))
    english = int(pairs.lengths[1].sum())
    clock.say(f"{len(pairs):,} pairs, {english:,} English tokens, {len(held_out):,} held out, {clock.device}")
    model: Any = build_translator(settings, len(tokenizer)).to(clock.device)  # type: ignore[arg-type]
    parameters = sum(each.numel() for each in model.parameters())
    seconds = min(settings.seconds, max(10.0, clock.left - _RESERVED))
    facts = train_translator(model, pairs, settings, seconds=seconds, say=clock.say)
    facts["held_out_loss"] = mean_loss(model, held_out, settings.tokens)
    save_translator(model, tokenizer, folder / "model")
    passes = facts["tokens"] / max(1, int(pairs.lengths[0].sum()))
    return {**facts, "parameters": parameters, "pairs": len(pairs), "passes": round(passes, 1)}


def split_pairs(tokenizer: Any, records: Sequence[dict[str, str]]) -> tuple[list[Any], list[Any]]:
    """Tokens of both sides, of pairs to learn from and to be judged by; no sentence is in both."""
    digests = [zlib.crc32(each["en"].lower().encode()) % _HELD_OUT for each in records]
    parts = []
    for held in (False, True):
        chosen = [each for each, digest in zip(records, digests, strict=True) if (digest == 0) == held]
        parts.append([tokenizer([each[side] for each in chosen])["input_ids"] for side in ("es", "en")])
    return parts[0], parts[1]


def score_stage(clock: Clock, corpus: Path, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """BLEU of the saved model, as it will be drawn from."""
    model = load_model(folder, length_limit=LENGTH_LIMIT, device=clock.device)
    assert isinstance(model, EncoderDecoderModel)
    tatoeba = read_records(corpus / "tatoeba_test.jsonl.gz", "the Tatoeba test set")
    fisher = read_records(corpus / "fisher_test.jsonl.gz", "the Fisher test set")
    found: dict[str, Any] = {}
    for name, beams in (("greedy", 1), ("beam", options.beams)):
        for title, sources, references in (
            ("tatoeba_test", [each["es"] for each in tatoeba], [[each["en"]] for each in tatoeba]),
            ("fisher_test", [each["source"] for each in fisher], [each["original"] for each in fisher]),
        ):
            written = translate(model, sources, beams=beams, batch=max(1, options.batch // beams))
            measured = sacre_bleu([written[source] for source in sources], references).measure(sources)
            found[f"{title}_{name}"] = measured.describe()
            clock.say(f"  {title}, {name}: {measured}")
            if name == "greedy":
                found[f"{title}_first"] = [[source, written[source]] for source in sources[:20]]
    return found


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--corpus", type=Path, required=True, help="the folder corpus of prepare_translation.py"
    )
    parser.add_argument("--work", type=Path, required=True, help="where stages leave their results")
    parser.add_argument("--output", type=Path, required=True, help="where what is to be kept goes")
    parser.add_argument("--deadline", type=float, default=0.0, help="seconds after which all is to be done")
    parser.add_argument("--beams", type=int, default=5, help="of beam search, when it is measured")
    parser.add_argument("--batch", type=int, default=8192, help="rows translated side by side")
    for each in fields(TranslatorSettings):
        name = each.name.replace("_", "-")
        parser.add_argument(f"--{name}", type=each.type, default=each.default)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
