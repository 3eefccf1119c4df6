"""Raw corpora: where they are expected, and one line that says what to get where one is missing."""

import gzip
import json
from pathlib import Path
from typing import Any

from nado.errors import InputError

_SOURCES = {
    "tatoeba_spa_eng": "spa-eng of manythings.org/anki and the test set of the Tatoeba Challenge (CC BY 2.0)",
    "fisher_callhome": "the Fisher and CALLHOME Spanish–English speech translation corpus (CC BY-SA 3.0)",
    "fluent_fisher": "Fluent Fisher, fluent references of Fisher dev and test (no licence: local use only)",
    "pavlick_formality": "the formality corpus of Pavlick and Tetreault 2016 (CC BY 3.0)",
    "nado_mt_dumps": "the translations that the NADO authors have published with their code (MIT)",
}


def require_file(path: Path, what: str) -> Path:
    """The path, or what to get and where to put it."""
    if path.is_file():
        return path
    source = _SOURCES.get(path.parent.name)
    hint = f"Get {source} and put it into {path.parent}." if source else f"Put it into {path.parent}."
    raise InputError(f"{what} in {path}", "no such file", hint)


def read_lines(path: Path, what: str) -> list[str]:
    """The lines of a text file, packed or not; characters inside a line never split it."""
    content = require_file(path, what).read_bytes()
    text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode("utf-8")
    return [line for line in text.split("\n") if line]


def read_records(path: Path, what: str) -> list[dict[str, Any]]:
    """The records of a `.jsonl` or `.jsonl.gz` file."""
    return [json.loads(line) for line in read_lines(path, what)]


def write_records(path: Path, records: list[dict[str, Any]]) -> None:
    """One JSON object a line; packed ones carry no time stamp, so that equal records make equal files."""
    content = "".join(json.dumps(each, ensure_ascii=False) + "\n" for each in records).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(content, 9, mtime=0) if path.suffix == ".gz" else content)
