"""From tables of a TOML file, or words of a command line, to typed configs; all mistakes at once."""

import contextlib
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from nado.errors import InputError, NadoError
from nado.options import read_options
from nado.oracles.suggestion import suggest

C = TypeVar("C")

_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "a string", Path: "a path"}


@dataclass(frozen=True)
class Problem:
    """One mistake, and where it stands."""

    where: str
    error: NadoError

    def __str__(self) -> str:
        return f"{self.where}: {self.error}"

    def describe(self) -> dict[str, str]:
        """JSON-ready."""
        error = self.error
        return {"where": self.where, "expected": error.expected, "found": error.found, "hint": error.hint}


def read_table(
    config: type[C], table: Mapping[str, Any], where: str, folder: Path, problems: list[Problem]
) -> C | None:
    """A config from a table; mistakes are added to `problems`, and with any of them there is no config.

    Relative paths are relative to `folder`.
    """
    options = {each.name: each for each in read_options(config)}
    values: dict[str, Any] = {}
    before = len(problems)

    def blame(error: NadoError) -> None:
        problems.append(Problem(where, error))

    for name, value in table.items():
        if name not in options:
            blame(InputError("a known key", repr(name), suggest(name, options)))
            continue
        try:
            values[name] = convert(value, options[name].kind, name, folder)
        except InputError as error:
            blame(error)
    for name, each in options.items():
        if each.default is MISSING and name not in table:
            blame(InputError(f"the key {name}", "none", f"Give {each.text}."))
    if any(each.default is MISSING and name not in values for name, each in options.items()):
        return None
    try:
        made = config(**values)  # although a key may be wrong: its own checks may find more
    except NadoError as error:
        blame(error)
    return made if len(problems) == before else None


def salvage(config: type[C], table: Mapping[str, Any], folder: Path, **stand_ins: Any) -> C | None:
    """A config from what is right in a table, with stand-ins for what is missing; only to look further."""
    kinds = {each.name: each.kind for each in read_options(config)}
    values = dict(stand_ins)
    for name, value in table.items():
        with contextlib.suppress(InputError, KeyError):
            values[name] = convert(value, kinds[name], name, folder)
    # Where a value by itself is right and what they come to together is not, one of them is left out.
    for left_out in (None, *values):
        with contextlib.suppress(NadoError, TypeError):
            return config(**{name: value for name, value in values.items() if name != left_out})
    return None


def convert(value: Any, kind: Any, name: str, folder: Path) -> Any:
    """A TOML value as the type of a field, or an error that says what the field takes."""
    for choice in _choices(kind):
        fits, converted = _fit(value, choice, folder)
        if fits:
            return converted
    words = [word for choice in _choices(kind) for word in _literals(choice)]
    named = words and isinstance(value, str)
    hint = suggest(value, words) if named else f"Write {_example(kind, name)}."
    raise InputError(f"{describe_kind(kind)} as {name}", repr(value), hint)


def parse_words(text: str, kind: Any) -> Any:
    """What a word of a command line is as a TOML value, for fields that take more than one type."""
    kinds = [get_origin(choice) or choice for choice in _choices(kind)]
    if tuple in kinds:
        pieces = [piece.strip() for piece in text.split(",") if piece.strip()]
        return [_parse_word(piece) for piece in pieces]
    return text if set(kinds) <= {str, Path, Literal} else _parse_word(text)


def _parse_word(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def describe_kind(kind: Any) -> str:
    """A type in words."""
    parts = []
    for choice in _choices(kind):
        if get_origin(choice) is Literal:
            parts += [repr(word) for word in get_args(choice)]
        elif get_origin(choice) is tuple:
            parts.append(f"a list of {_NAMES[get_args(choice)[0]].removeprefix('a ')}s")
        else:
            parts.append(_NAMES[choice])
    return " or ".join(parts)


def _choices(kind: Any) -> list[Any]:
    """The members of a union, None left out: a key that is not given is None."""
    if get_origin(kind) in (Union, UnionType):
        return [choice for choice in get_args(kind) if choice is not NoneType]
    return [kind]


def _literals(choice: Any) -> tuple[str, ...]:
    return get_args(choice) if get_origin(choice) is Literal else ()


def _fit(value: Any, kind: Any, folder: Path) -> tuple[bool, Any]:
    """Whether a value is of a type, and what it is as one."""
    if get_origin(kind) is Literal:
        return value in get_args(kind) and isinstance(value, str), value
    if get_origin(kind) is tuple:
        inner = get_args(kind)[0]
        fitted = [_fit(each, inner, folder) for each in value] if isinstance(value, list | tuple) else []
        return isinstance(value, list | tuple) and all(fits for fits, _ in fitted), tuple(
            v for _, v in fitted
        )
    if kind is Path:
        return isinstance(value, str | Path), resolve(value, folder) if isinstance(
            value, str | Path
        ) else None
    if kind is float:
        fits = isinstance(value, int | float) and not isinstance(value, bool)
        return fits, float(value) if fits else None
    return type(value) is kind, value


def resolve(path: str | Path, folder: Path) -> Path:
    """A path as the file in `folder` means it."""
    return folder / Path(path).expanduser()


def _example(kind: Any, name: str) -> str:
    first = _choices(kind)[0]
    if get_origin(first) is tuple:
        return f"{name} = [1, 2]" if get_args(first)[0] is int else f'{name} = ["…"]'
    examples = {bool: "true", int: "10", float: "0.5"}
    return f"{name} = {examples.get(first, chr(34) + '…' + chr(34))}"
