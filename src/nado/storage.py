"""Files that are either whole or not there: atomic writes, locks, digests, errors that say what to do."""

import contextlib
import hashlib
import json
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from nado.errors import StorageError

try:
    import fcntl
except ImportError:  # not a POSIX system: two runs in one folder are then not told apart
    fcntl = None  # type: ignore[assignment]


_SAMPLE = 1 << 20  # bytes at either end of a large file that tell it from another


def write_atomically(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a file beside `path`, flush it to disk, then move it into place."""
    partial = path.with_name(f".{path.name}-{secrets.token_hex(4)}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(partial)
        _flush(partial)
        partial.replace(path)
    except OSError as error:
        raise StorageError(
            f"to write {path}",
            f"the error: {error.strerror or error}",
            "Free some space or choose another folder, then run the same command again: what is already "
            "written is kept.",
        ) from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # the name as well as the file; not every file system can
        _flush(path.parent)


def require_writable(path: Path) -> None:
    """Raise StorageError where no file can be written at `path`: before long work for it, not after."""
    try:
        folder = next(each for each in path.absolute().parents if each.exists())
        possible = not path.is_dir() and folder.is_dir() and os.access(folder, os.W_OK)
    except OSError:  # a folder on the way may not even be looked into
        possible = False
    if not possible:
        found = "a folder, or a place that cannot be written to"
        raise StorageError(f"to write the file {path}", found, "Name a file in a folder of yours.")


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON, atomically."""
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file in one piece."""
    write_atomically(path, lambda partial: _fill(partial, content))


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


def digest_ends(path: Path) -> str:
    """Size, first and last megabyte: enough to tell files apart without reading tens of gigabytes."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as stream:
        digest.update(stream.read(_SAMPLE))
        stream.seek(max(0, size - _SAMPLE))
        digest.update(stream.read(_SAMPLE))
    return digest.hexdigest()[:32]


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


@contextlib.contextmanager
def hold(folder: Path) -> Iterator[None]:
    """Keep other runs out of `folder` meanwhile, which is made if need be.

    The lock is the system's own: it goes with the process, however that ends, and leaves no file behind.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(
            f"a folder at {folder}",
            f"the error: {error.strerror or error}",
            "Choose a folder that can be made and written.",
        ) from error
    if fcntl is None:
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        _lock(handle, folder)
        yield
    finally:
        os.close(handle)


def _lock(handle: int, folder: Path) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise StorageError(
            f"{folder} to be free",
            "another run that is writing to it",
            "Wait until it ends, or choose another folder.",
        ) from error
    except OSError:
        return  # a file system without locks: runs are then not told apart


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _fill(path: Path, content: bytes) -> None:
    path.write_bytes(content)
