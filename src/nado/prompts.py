"""Prompts and conditions, from files and from lists: what the base reads, and what guide and oracle read."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from nado.errors import InputError

_TEXT_SUFFIXES = ("", ".txt", ".text")


class Prompt(NamedTuple):
    """One thing to write about: `prompt` is read by the base, `condition` by guide and oracle."""

    prompt: str
    condition: str


def pair_prompts(prompts: Sequence[str], conditions: Sequence[str] | None) -> list[Prompt]:
    """Prompts with their conditions, which equal them where none are given."""
    for name, rows in (("prompts", prompts), ("conditions", conditions)):
        if isinstance(rows, str):
            raise InputError(f"a list of {name}", f"the bare string {rows!r}", "Put it in a list.")
    conditions = prompts if conditions is None else conditions
    if not prompts or len(prompts) != len(conditions):
        raise InputError(
            "at least one prompt, and a condition for each",
            f"{len(prompts)} prompts and {len(conditions)} conditions",
            "Give one of each a row; conditions=None repeats the prompts.",
        )
    return [Prompt(*pair) for pair in zip(prompts, conditions, strict=True)]


def read_prompts(path: str | Path, split: str | None = None) -> list[Prompt]:
    """Prompts from a `.jsonl`, `.parquet` or `.txt` file (one prompt a line).

    Records have a `prompt`, and where they differ a `condition`; one of the two is enough unless the base
    reads nothing (then `prompt` is the empty string). A field `split` names the split a record belongs
    to, and `split=` keeps one of them.
    """
    path = Path(path)
    prompts, splits = [], set()
    for where, record in read_records(path):
        splits.add(record.get("split"))
        if split is None or record.get("split") == split:
            prompts.append(to_prompt(record, where))
    if not prompts:
        names = ", ".join(sorted(str(name) for name in splits if name is not None)) or "no split names"
        wanted = "at least one prompt" if split is None else f"prompts of split {split!r}"
        raise InputError(wanted, f"{names} in {path}", "Check the file and the name of the split.")
    return prompts


def read_records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The records of a `.jsonl` or `.parquet` file, each with words that say where it stands.

    A line of a text file is a record with the field prompt. Blank lines are left out.
    """
    if not path.is_file():
        raise InputError("a file of records", f"nothing at {path}", "Give a .jsonl, .parquet or .txt file.")
    if path.suffix == ".parquet":
        yield from _parquet_records(path)
    elif path.suffix == ".jsonl":
        for where, line in _lines(path):
            yield where, _parse(line, where)
    elif path.suffix in _TEXT_SUFFIXES:
        for where, line in _lines(path):
            yield where, {"prompt": line}
    else:
        raise InputError(
            "a .jsonl, .parquet or .txt file",
            f"{path.name}",
            "Rename it, if it is one of these; otherwise write one JSON object a line.",
        )


def to_prompt(record: dict[str, Any], where: str) -> Prompt:
    """The prompt of a record."""
    prompt, condition = record.get("prompt"), record.get("condition")
    found = prompt if prompt is not None else condition
    if found is None:
        raise InputError(
            f"a field prompt or condition in {where}",
            f"the fields {sorted(record)}",
            "Rename the field the base should read to prompt.",
        )
    for name, value in (("prompt", prompt), ("condition", condition)):
        if value is not None and not isinstance(value, str):
            raise InputError(
                f"a string as {name} in {where}",
                f"{type(value).__name__}",
                "Join lists into one string: keywords are separated by commas.",
            )
    return Prompt(found if prompt is None else prompt, found if condition is None else condition)


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    """Lines that are not blank, without their ends; a byte-order mark is no part of the first."""
    try:
        with path.open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield f"{path}, line {number}", line.rstrip("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, "a readable UTF-8 file", error) from error


def _parquet_records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        records = pq.read_table(path).to_pylist()
    except (OSError, pa.ArrowException) as error:
        raise _unreadable(path, "a readable Parquet file", error) from error
    for number, record in enumerate(records, start=1):
        yield f"{path}, row {number}", record


def _parse(line: str, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise InputError(f"a JSON object in {where}", f"{line.strip()[:60]!r}", f"{error}.") from error
    if not isinstance(record, dict):
        raise InputError(f"a JSON object in {where}", f"{line.strip()[:60]!r}", 'Write {"prompt": "…"}.')
    return record


def _unreadable(path: Path, expected: str, error: Exception) -> InputError:
    return InputError(f"{expected} {path}", f"the error: {error}", "Write it anew, or give another file.")
