"""Files that are either whole or not there: atomic writes, digests, and errors that say what to do."""

import hashlib
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nado.errors import StorageError


def write_atomically(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a file beside `path`, flush it to disk, then move it into place."""
    handle, name = -1, ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-", suffix=".partial")
        write(Path(name))
        os.fsync(handle)
        Path(name).replace(path)
    except OSError as error:
        if name:
            Path(name).unlink(missing_ok=True)
        raise StorageError(
            f"to write {path}",
            f"the error: {error.strerror or error}",
            "Free some space or choose another folder, then run the same command again: what is already "
            "written is kept.",
        ) from error
    finally:
        if handle >= 0:
            os.close(handle)


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON, atomically."""
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    write_atomically(path, lambda partial: _write_text(partial, text))


def read_json(path: Path) -> Any:
    """Read a JSON file, or say what is wrong with it."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise StorageError(f"a file {path}", "none", "Check the folder's name.") from error
    except (OSError, ValueError) as error:
        raise StorageError(
            f"valid JSON in {path}", f"the error: {error}", "Restore the file, or start in a new folder."
        ) from error


def digest_json(value: Any) -> str:
    """A digest of any JSON-ready value, the same for equal values."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=False).encode()).hexdigest()[:32]


def digest_file(path: Path) -> str:
    """A digest of a file's bytes."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()[:32]


def remove_partial_files(folder: Path) -> None:
    """Delete what a killed run left half written; finished files never look like this."""
    for partial in folder.glob(".*.partial"):
        partial.unlink(missing_ok=True)


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
