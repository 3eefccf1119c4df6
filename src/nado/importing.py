"""Samples drawn elsewhere: read from a file, tokenised, held to the length limit, scored under p.

A record (JSON object a line, or Parquet row) has a `prompt`, a `condition` where that differs, and

    text       the text as p would write it after the prompt, a leading space included where there is one
    tokens     or its token ids instead, EOS included if the text ended itself
    finished   optional: false for a text that was cut off elsewhere; a `text` is finished unless it says so

Under p a text ends itself or has L tokens. A longer one is cut to L, as p would have cut it. One that was cut
off sooner is no text of p at all, nobody knows how p would have gone on, and it is refused.

What the texts were drawn from is not known. log_proposal is therefore null and weights are refused, unless
`drawn_from_p` says that p itself wrote them, with these very warpers: then log proposal is log p.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias, cast

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from nado.errors import InputError, require_at_least
from nado.language_model import LanguageModel, is_finished
from nado.progress import Listener, Meter
from nado.prompts import Prompt, read_records, to_prompt
from nado.samples import SCHEMA, Samples, samples_folder
from nado.storage import digest_file, hold
from nado.versions import versions

_log = logging.getLogger(__name__)

LogP: TypeAlias = NDArray[np.float32]


class Encoding(Protocol):
    """A language model that can make tokens of a text it might have written."""

    def encode_texts(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokens of each text, without special ones."""
        ...


class Imported(NamedTuple):
    """A record whose tokens are those of a text of p."""

    prompt: Prompt
    tokens: list[int]
    where: str


def import_samples(
    model: LanguageModel[Any],
    path: str | Path,
    folder: str | Path,
    *,
    drawn_from_p: bool = False,
    batch_size: int = 64,
    shard_rows: int = 4096,
    on_progress: Listener | None = None,
) -> Samples:
    """Import the samples in `path`, re-scored under p, into Parquet shards under `folder`.

    It can be interrupted and begun again as drawing can.
    """
    require_at_least(1, batch_size=batch_size, shard_rows=shard_rows)
    path = Path(path)
    imported = read_texts(model, path)
    target = samples_folder(folder)
    config = {
        "file": digest_file(path),
        "model": model.fingerprint,
        "proposal": {"imported": True, "drawn_from_p": drawn_from_p},
        "batch_size": batch_size,
        "shard_rows": shard_rows,
    }
    shards = [range(i, min(i + shard_rows, len(imported))) for i in range(0, len(imported), shard_rows)]
    with hold(target.path):
        manifest = target.open(config, len(shards))
        missing = target.missing(manifest)
        meter = Meter([len(rows) for rows in shards], missing, on_progress)
        for index in missing:
            rows = shards[index]
            texts = imported[rows.start : rows.stop]
            log_p = _score(model, texts, batch_size, meter)
            target.write(index, _to_table(model, rows, texts, log_p, drawn_from_p))
        samples = Samples(target.read(manifest))
        if None in manifest["shards"]:
            target.close(manifest, versions=versions())
    return samples


def read_texts(model: LanguageModel[Any], path: Path) -> list[Imported]:
    """The records of a file as token sequences that p can write; nothing is scored yet."""
    records = list(read_records(path))
    if not records:
        raise InputError(f"at least one sample in {path}", "none", 'Write {"prompt": "…", "text": "…"}.')
    tokens = _tokens(model, records)
    return [
        Imported(to_prompt(record, where), _hold_to_limit(model, row, record, where), where)
        for (where, record), row in zip(records, tokens, strict=True)
    ]


def _tokens(model: LanguageModel[Any], records: list[tuple[str, dict[str, Any]]]) -> list[list[int]]:
    """The tokens of every record, as given or made of its text."""
    texts = [record["text"] for where, record in records if _has_text(record, where)]
    encoded = iter(_encode(model, texts) if texts else ())
    eos_ids = set(getattr(model, "eos_ids", (model.eos_id,)))
    rows = []
    for where, record in records:
        given = next(encoded) if record.get("tokens") is None else record["tokens"]
        _require_tokens(model, given, where)
        rows.append([model.eos_id if token in eos_ids else int(token) for token in given])
    return rows


def _has_text(record: dict[str, Any], where: str) -> bool:
    text, tokens = record.get("text"), record.get("tokens")
    if (text is None) == (tokens is None) or not isinstance(text, str | None):
        raise InputError(
            f"either a string text or a list tokens in {where}",
            f"the fields {sorted(name for name, value in record.items() if value is not None)}",
            'Write {"prompt": "…", "text": "…"}.',
        )
    return text is not None


def _encode(model: LanguageModel[Any], texts: list[str]) -> list[list[int]]:
    if not callable(getattr(model, "encode_texts", None)):
        raise InputError(
            "a model that can make tokens of texts",
            f"{type(model).__name__}, which has no encode_texts",
            "Give the tokens of each sample instead of its text.",
        )
    encoded = cast(Encoding, model).encode_texts(texts)
    back = zip(texts, model.decode(encoded), strict=True)
    changed = [text for text, read in back if text.split() != read.split()]
    if changed:
        _log.warning(
            "%d of %d texts read otherwise once this model's tokenizer has seen them, the first %r: samples "
            "keep what the tokenizer made of them",
            len(changed),
            len(texts),
            changed[0][:60],
        )
    return encoded


def _require_tokens(model: LanguageModel[Any], tokens: Any, where: str) -> None:
    numbers = isinstance(tokens, list) and all(type(token) is int for token in tokens)
    if not numbers or not all(0 <= token < model.vocabulary_size for token in tokens):
        raise InputError(
            f"token ids from 0 to {model.vocabulary_size - 1} in {where}",
            f"{str(tokens)[:60]}",
            "Use the ids of this model's own tokenizer.",
        )


def _hold_to_limit(
    model: LanguageModel[Any], tokens: list[int], record: dict[str, Any], where: str
) -> list[int]:
    """The tokens as p would have written them: ended by EOS, or L of them."""
    if model.eos_id in tokens[:-1]:
        raise InputError(f"EOS only at the end in {where}", "tokens after it", "Drop what follows it.")
    ended = tokens[-1:] == [model.eos_id]
    finished = record.get("finished")
    if finished is None:
        finished = ended or record.get("text") is not None
    if not isinstance(finished, bool) or (ended and not finished):
        raise InputError(
            f"finished as true or false in {where}, and true where the tokens end with EOS",
            f"{finished!r}",
            "Leave it out where the text ended itself.",
        )
    if finished and not ended and (model.completion == "eos" or len(tokens) < model.length_limit):
        tokens = [*tokens, model.eos_id]
    if not finished and len(tokens) < model.length_limit:
        raise InputError(
            f"a text that ended itself, or one of at least {model.length_limit} tokens, in {where}",
            f"one cut off after {len(tokens)}",
            "Nobody knows how p would have gone on: import it for a lower length limit, or draw it anew.",
        )
    return tokens[: model.length_limit]


def _score(model: LanguageModel[Any], texts: Sequence[Imported], batch_size: int, meter: Meter) -> list[LogP]:
    """Log p of every token of every text."""
    scored = []
    for first in range(0, len(texts), batch_size):
        batch = texts[first : first + batch_size]
        lengths = torch.tensor([len(each.tokens) for each in batch])
        tokens = torch.full((len(batch), int(lengths.max())), model.eos_id)
        for row, each in enumerate(batch):
            tokens[row, : len(each.tokens)] = torch.tensor(each.tokens)
        prompts, conditions = zip(*(each.prompt for each in batch), strict=True)
        log_p = model.score(prompts, tokens.to(model.device), lengths.to(model.device), conditions).cpu()
        for row, each in enumerate(batch):
            scored.append(log_p[row, : len(each.tokens)].numpy())
            _require_possible(scored[-1], each)
        meter.count(len(batch), int(lengths.sum()))
    return scored


def _require_possible(log_p: LogP, text: Imported) -> None:
    if not np.isfinite(log_p).all():
        place = int(np.flatnonzero(~np.isfinite(log_p))[0])
        raise InputError(
            f"a text that p can write in {text.where}",
            f"log p = {log_p[place]:g} of its token {place + 1}, number {text.tokens[place]}",
            "Drop the record, or load the model with the warpers it was drawn with.",
        )


def _to_table(
    model: LanguageModel[Any],
    rows: range,
    texts: Sequence[Imported],
    log_p: list[LogP],
    drawn_from_p: bool,
) -> pa.Table:
    ended = torch.tensor([each.tokens[-1] == model.eos_id for each in texts])
    return pa.table(
        {
            "row": np.array(rows, dtype=np.int64),
            "prompt": [each.prompt.prompt for each in texts],
            "condition": [each.prompt.condition for each in texts],
            "tokens": pa.array([each.tokens for each in texts], pa.list_(pa.int32())),
            "text": model.decode([each.tokens for each in texts]),
            "log_p": pa.array(log_p, pa.list_(pa.float32())),
            "log_proposal": pa.array(log_p if drawn_from_p else [None] * len(texts), pa.list_(pa.float32())),
            "finished": is_finished(ended, model.completion).numpy(),
            "proposal": ["imported, from p" if drawn_from_p else "imported"] * len(texts),
            "prefix_length": [0 if drawn_from_p else len(each.tokens) for each in texts],
        }
    ).cast(SCHEMA)
