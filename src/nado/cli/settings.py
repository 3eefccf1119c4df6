"""Options of commands, made from the config classes: one option a field, its help the field's description.

A value comes from the option, else from the study file named with --config, else from what was kept beside
the samples, else from the class.
"""

import atexit
import functools
import inspect
import sys
import tempfile
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from nado.errors import InputError
from nado.options import Option, read_options
from nado.study.reading import SECTIONS, make_section, read_tables, resolve_oracle, section_class
from nado.study.tables import Problem, parse_words

_ORACLE_HELP = "The oracle: file.py:name, a shipped name, or a TOML table {name = …, arguments}."
_CONFIG_HELP = "A study file, whose values are used where no option is given."
_LOCAL = ("name", "adapter")  # strings that may be paths


@dataclass
class Settings:
    """What was given for each section, as TOML values."""

    given: dict[str, dict[str, Any]]
    file: Path | None
    kept: dict[str, dict[str, Any]] = field(default_factory=dict)  # beside the samples

    def section(self, name: str) -> Any:
        """A section's config; its first mistake is an error."""
        tables = {} if self.file is None else read_tables(self.file)
        folder = Path.cwd() if self.file is None else self.file.resolve().parent
        own = tables.get(name, {})
        if not isinstance(own, Mapping):
            raise InputError(f"a table [{name}] in {self.file}", repr(own), f"Write [{name}] on a line.")
        table = {**self.kept.get(name, {}), **own, **self.given.get(name, {})}
        problems: list[Problem] = []
        found = make_section(name, table, folder, problems)
        if problems:
            error = problems[0].error
            raise type(error)(f"{error.expected} ([{name}])", error.found, error.hint)
        return found

    def tells(self, section: str, name: str) -> bool:
        """Whether a value was given, by an option or in the file, and is not just the default."""
        own = {} if self.file is None else read_tables(self.file).get(section, {})
        return name in own or name in self.given.get(section, {})

    def oracle(self) -> dict[str, Any] | None:
        """The oracle's table, from the option or the file; None where neither has one."""
        if "oracle" in self.given:
            return self.given["oracle"]
        if self.file is not None and "oracle" in (tables := read_tables(self.file)):
            return resolve_oracle(tables["oracle"], self.file.resolve().parent)
        return self.kept.get("oracle")


def takes(
    *sections: str, only: Sequence[str] | None = None, left_out: Sequence[str] = (), config: bool = True
) -> Callable[..., Any]:
    """Give a command the options of some sections; they arrive as its first argument, `settings`.

    "oracle" is a section of one option. `only` and `left_out` name fields. `config`: whether there is an
    option for a file of values too.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        made = _make_options(sections, only, left_out)

        @functools.wraps(command)
        def wrapper(**values: Any) -> None:
            given: dict[str, dict[str, Any]] = {}
            for name, (section, option) in made.items():
                value = values.pop(name)
                if value is not None:
                    given.setdefault(section, {})[option.name] = _read(value, option)
            oracle = values.pop("oracle", None)
            if oracle is not None:
                given["oracle"] = read_oracle(oracle)
            file = values.pop("config", None)
            command(Settings(given, file), **values)

        _sign(wrapper, command, made, "oracle" in sections, config)
        return wrapper

    return decorate


def _make_options(
    sections: Sequence[str], only: Sequence[str] | None, left_out: Sequence[str]
) -> dict[str, tuple[str, Option]]:
    made: dict[str, tuple[str, Option]] = {}
    for section in sections:
        if section not in SECTIONS:
            continue
        for option in read_options(section_class(section)):
            if option.name not in left_out and (only is None or option.name in only):
                made[option.flag.replace("-", "_")] = (section, option)
    return made


def _sign(
    wrapper: Callable[..., None],
    command: Callable[..., None],
    made: dict[str, tuple[str, Option]],
    oracle: bool,
    config: bool,
) -> None:
    """Give the wrapper the signature that typer reads: the command's own parameters, then the options."""
    own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
    parameters = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in own]
    if oracle:
        parameters.append(_parameter("oracle", str, _ORACLE_HELP))
    for name, (_, option) in made.items():
        parameters.append(_parameter(name, _word_type(option.kind), _sentence(option.help)))
    if config:
        parameters.append(_parameter("config", Path, _CONFIG_HELP))
    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {each.name: each.annotation for each in parameters}


def _parameter(name: str, kind: Any, text: str) -> inspect.Parameter:
    annotation = Annotated[kind | None, typer.Option(help=text, show_default=False)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + "."


def _word_type(kind: Any) -> type:
    """What typer shall read: numbers and switches itself, everything else as a word."""
    return kind if kind in (bool, int, float) else str


def _read(value: Any, option: Option) -> Any:
    """An option's value as TOML has it; paths are relative to where the command runs."""
    if not isinstance(value, str):
        return value
    parsed = parse_words(value, option.kind)
    if option.kind is Path:
        return str(read_stdin()) if value == "-" else str(Path(value).expanduser().absolute())
    if option.name in _LOCAL and Path(value).expanduser().exists():
        return str(Path(value).expanduser().absolute())
    return parsed


def read_oracle(text: str) -> dict[str, Any]:
    """The table of an oracle as it is named on a command line."""
    table: Any = {"name": text}
    if text.lstrip().startswith("{"):
        try:
            table = tomllib.loads(f"oracle = {text}")["oracle"]
        except tomllib.TOMLDecodeError as error:
            raise InputError(
                "an oracle as a TOML inline table",
                f"{text!r}: {error}",
                'Write {name = "keywords", at_least = 2}.',
            ) from error
    return resolve_oracle(table, Path.cwd())


def read_stdin() -> Path:
    """What comes in on stdin, as a file: JSON lines where it begins with a brace, else a prompt a line."""
    text = sys.stdin.read()
    suffix = ".jsonl" if text.lstrip().startswith("{") else ".txt"
    with tempfile.NamedTemporaryFile(
        "w", suffix=suffix, prefix="stdin-", delete=False, encoding="utf-8"
    ) as file:
        file.write(text)
    atexit.register(Path(file.name).unlink, missing_ok=True)
    return Path(file.name)
