"""Prompts and conditions from files: what the base reads, and what guide and oracle read."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from nado.errors import InputError


class Prompt(NamedTuple):
    """One thing to write about: `prompt` is read by the base, `condition` by guide and oracle."""

    prompt: str
    condition: str


def read_prompts(path: str | Path, split: str | None = None) -> list[Prompt]:
    """Prompts from a `.jsonl`, `.parquet` or text file (one prompt a line).

    Records have a `prompt`, and where they differ a `condition`; one of the two is enough unless the base
    reads nothing (then `prompt` is the empty string). A field `split` names the split a record belongs
    to, and `split=` keeps one of them.
    """
    path = Path(path)
    if not path.is_file():
        raise InputError("a file of prompts", f"nothing at {path}", "Give a .jsonl, .parquet or text file.")
    prompts, splits = [], set()
    for number, record in enumerate(_records(path), start=1):
        splits.add(record.get("split"))
        if split is None or record.get("split") == split:
            prompts.append(_to_prompt(record, f"{path}, record {number}"))
    if not prompts:
        names = ", ".join(sorted(str(name) for name in splits if name is not None)) or "no split names"
        wanted = "at least one prompt" if split is None else f"prompts of split {split!r}"
        raise InputError(wanted, f"{names} in {path}", "Check the file and the name of the split.")
    return prompts


def _records(path: Path) -> Iterator[dict[str, Any]]:
    if path.suffix == ".parquet":
        import pyarrow.parquet as pq

        yield from pq.read_table(path).to_pylist()
        return
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            yield (
                _parse(line, f"{path}, line {number}")
                if path.suffix == ".jsonl"
                else {"prompt": line.rstrip("\n")}
            )


def _parse(line: str, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise InputError(f"a JSON object in {where}", f"{line.strip()[:60]!r}", f"{error}.") from error
    if not isinstance(record, dict):
        raise InputError(f"a JSON object in {where}", f"{line.strip()[:60]!r}", 'Write {"prompt": "…"}.')
    return record


def _to_prompt(record: dict[str, Any], where: str) -> Prompt:
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
