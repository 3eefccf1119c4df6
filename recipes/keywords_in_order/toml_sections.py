"""Settings from a TOML file as frozen dataclasses: a name that nobody knows is an error, not silence."""

import tomllib
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from nado.errors import InputError

SectionT = TypeVar("SectionT")


def read_table(path: Path, names: Sequence[str]) -> dict[str, Any]:
    """The tables of a file, which are called `names`; those that it lacks, of the file that it is `like`."""
    if not path.is_file():
        raise InputError("a TOML file of settings", f"nothing at {path}", "Give one of those in this folder.")
    with path.open("rb") as file:
        table = tomllib.load(file)
    if like := table.pop("like", None):
        table = read_table(path.parent / like, names) | table
    require_known(table, names, path.name)
    return table


def read_section(kind: type[SectionT], table: dict[str, Any], where: str) -> SectionT:
    """One table as a dataclass; lists become tuples."""
    require_known(table, [each.name for each in fields(kind)], where)  # type: ignore[arg-type]
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in table.items()}
    return kind(**values)


def require_known(table: dict[str, Any], names: Sequence[str], where: str) -> None:
    """Refuse a name that would be ignored."""
    unknown = [name for name in table if name not in names]
    if unknown:
        raise InputError(f"the names {', '.join(names)} in {where}", unknown[0], "Check its spelling.")
