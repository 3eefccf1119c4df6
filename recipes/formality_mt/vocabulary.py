"""One SentencePiece vocabulary for both languages, as a tokenizer file that needs no sentencepiece to run."""

import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import Unigram
from transformers import PreTrainedTokenizerFast

from nado.errors import MissingPackageError
from nado.storage import read_json, write_json

PAD, END, UNKNOWN = "<pad>", "</s>", "<unk>"
PAD_ID, END_ID, UNKNOWN_ID = 0, 1, 2
_BLANK = "▁"
_MODEL_FILE = "sentencepiece.model"


def train_vocabulary(texts: Iterable[str], size: int, folder: Path) -> PreTrainedTokenizerFast:
    """Train a unigram model of `size` pieces and save it, as SentencePiece's file and as a fast tokenizer."""
    try:
        import sentencepiece
    except ImportError as error:
        raise MissingPackageError("sentencepiece", "mt", "training a vocabulary") from error
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_writer=written,
        vocab_size=size,
        model_type="unigram",
        normalization_rule_name="identity",  # texts come tidied
        character_coverage=0.9999,
        pad_id=PAD_ID,
        eos_id=END_ID,
        unk_id=UNKNOWN_ID,
        bos_id=-1,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _MODEL_FILE).write_bytes(written.getvalue())
    pieces = sentencepiece.SentencePieceProcessor(model_proto=written.getvalue())
    vocabulary = [(pieces.id_to_piece(number), pieces.get_score(number)) for number in range(len(pieces))]
    tokenizer = make_tokenizer(vocabulary)
    save_tokenizer(tokenizer, folder)
    return tokenizer


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Save it under a name of its class that every transformers 5 knows."""
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    write_json(path, {**read_json(path), "tokenizer_class": "PreTrainedTokenizerFast"})


def make_tokenizer(vocabulary: Sequence[tuple[str, float]]) -> PreTrainedTokenizerFast:
    """The fast tokenizer of SentencePiece's pieces and scores: the same pieces for the same text."""
    inner = Tokenizer(Unigram(list(vocabulary), unk_id=UNKNOWN_ID, byte_fallback=False))
    blanks: Any = Regex(" {2,}")
    inner.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Replace(blanks, " "), normalizers.Strip()]
    )
    inner.pre_tokenizer = pre_tokenizers.Metaspace(replacement=_BLANK, prepend_scheme="always")
    inner.decoder = decoders.Metaspace(replacement=_BLANK, prepend_scheme="always")
    inner.post_processor = processors.TemplateProcessing(
        single=f"$A {END}", pair=f"$A {END} $B {END}", special_tokens=[(END, END_ID)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )
