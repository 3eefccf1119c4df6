"""A study file: one TOML file that says everything about a study."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nado.errors import InputError
from nado.oracles.loading import is_python
from nado.oracles.suggestion import suggest
from nado.study.sections import (
    BaseConfig,
    CompareConfig,
    DataConfig,
    DistributedConfig,
    DrawConfig,
    EvaluateConfig,
    GenerateConfig,
    GuideShape,
    LabelConfig,
    PromptsConfig,
)
from nado.study.tables import Problem, parse_words, read_table, resolve
from nado.tiny import locate_base

if TYPE_CHECKING:
    from nado.rounds import RoundsConfig
    from nado.training import TrainingConfig

# Section → its class; those written as text need torch and are imported when a study is read.
SECTIONS: dict[str, type | str] = {
    "base": BaseConfig,
    "prompts": PromptsConfig,
    "draw": DrawConfig,
    "label": LabelConfig,
    "guide": GuideShape,
    "data": DataConfig,
    "train": "nado.training:TrainingConfig",
    "rounds": "nado.rounds:RoundsConfig",
    "generate": GenerateConfig,
    "evaluate": EvaluateConfig,
    "compare": CompareConfig,
    "distributed": DistributedConfig,
}
_NEEDED = ("base", "prompts", "oracle")
_ORACLE_PATHS = ("forms", "folder")  # arguments of shipped oracles that name a file


@dataclass(frozen=True)
class Study:
    """Everything a study file says, checked."""

    folder: Path  # of the file: relative paths begin there
    base: BaseConfig
    oracle: dict[str, Any]  # as `load_oracle` takes it, paths resolved
    prompts: PromptsConfig
    draw: DrawConfig
    label: LabelConfig
    guide: GuideShape
    data: DataConfig
    train: "TrainingConfig"
    generate: GenerateConfig
    evaluate: EvaluateConfig
    rounds: "RoundsConfig | None" = None
    compare: CompareConfig = field(default_factory=CompareConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)


def read_study(path: str | Path, settings: Sequence[str] = ()) -> Study:
    """A study from its file; `settings` such as "train.steps=100" replace what it says."""
    study, problems = parse_study(path, settings)
    if study is None:
        first, more = problems[0], len(problems) - 1
        error = first.error
        rest = f" ({more} more: nado check {path} shows all)" if more else ""
        raise type(error)(f"{error.expected} in {first.where}", error.found, error.hint + rest)
    return study


def parse_study(path: str | Path, settings: Sequence[str] = ()) -> tuple[Study | None, list[Problem]]:
    """A study from its file, or every mistake in it."""
    path = Path(path)
    tables = read_tables(path)
    apply_settings(tables, settings)
    return make_study(tables, path.resolve().parent, str(path))


def read_tables(path: Path) -> dict[str, Any]:
    """The tables of a TOML file."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        found = getattr(error, "strerror", None) or error
        raise InputError(f"a study file {path}", f"the error: {found}", "Give a TOML file.") from error
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"valid TOML in {path}", f"the error: {error}", "Mend that line.") from error


def apply_settings(tables: dict[str, Any], settings: Sequence[str]) -> None:
    """Put "section.key=value" into the tables."""
    for setting in settings:
        place, equals, text = setting.partition("=")
        section, dot, key = place.strip().partition(".")
        if not (equals and dot and key):
            raise InputError("a setting as section.key=value", repr(setting), "Write train.steps=100.")
        options = {} if section not in SECTIONS else _kinds(section)
        tables.setdefault(section, {})[key] = parse_words(text.strip(), options.get(key, int | str))


def make_study(tables: Mapping[str, Any], folder: Path, source: str) -> tuple[Study | None, list[Problem]]:
    """A study from tables, or every mistake in them."""
    problems: list[Problem] = []
    sections = make_sections(tables, folder, source, problems)
    return (None if problems else Study(folder=folder, **sections)), problems


def make_sections(
    tables: Mapping[str, Any], folder: Path, source: str, problems: list[Problem]
) -> dict[str, Any]:
    """The sections of a study, None for those with a mistake; mistakes are added to `problems`."""
    known = [*SECTIONS, "oracle"]
    problems += [
        Problem(source, InputError("a known section", f"[{name}]", suggest(name, known)))
        for name in tables
        if name not in known
    ]
    problems += [
        Problem(source, InputError(f"a section [{name}]", "none", f"Add [{name}]."))
        for name in _NEEDED
        if name not in tables
    ]
    sections: dict[str, Any] = {}
    for name in SECTIONS:
        table = tables.get(name)
        if table is None:
            # A section that is not there has its defaults, but rounds are only made where they are asked for.
            left_out = name in (*_NEEDED, "rounds")
            sections[name] = None if left_out else make_section(name, {}, folder, problems)
        else:
            sections[name] = make_section(name, table, folder, problems)
    oracle = tables.get("oracle", {})
    if not isinstance(oracle, Mapping):
        error = InputError("a table as [oracle]", repr(oracle), 'Write [oracle] and name = "keywords".')
        problems.append(Problem("[oracle]", error))
        oracle = {}
    sections["oracle"] = resolve_oracle(oracle, folder) if oracle else None
    return sections


def make_section(name: str, table: Any, folder: Path, problems: list[Problem]) -> Any:
    """One section's config; mistakes are added to `problems`."""
    where = f"[{name}]"
    if not isinstance(table, Mapping):
        problems.append(
            Problem(where, InputError(f"a table {where}", repr(table), f"Write {where} on a line."))
        )
        return None
    found = read_table(section_class(name), table, where, folder, problems)
    if isinstance(found, BaseConfig):
        return with_local_base(found, folder)
    return found


def section_class(name: str) -> type:
    """The class of a section."""
    found = SECTIONS[name]
    if isinstance(found, str):
        module, _, attribute = found.partition(":")
        return getattr(import_module(module), attribute)  # type: ignore[no-any-return]
    return found


def resolve_oracle(table: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The oracle's table with its files found beside the study's."""

    def fix(key: str, value: Any) -> Any:
        if isinstance(value, Mapping):
            return resolve_oracle(value, folder)
        if isinstance(value, list) and key in ("all", "any"):
            return [fix(key, each) for each in value]
        if not isinstance(value, str):
            return value
        if key in _ORACLE_PATHS or (key in ("name", "all", "any", "not") and is_python(value)):
            return str(resolve(value, folder))
        return value

    return {key: fix(key, value) for key, value in table.items()}


def with_local_base(base: BaseConfig, folder: Path) -> BaseConfig:
    """Names that are files beside the study's, as absolute paths; others are left as hub names."""
    adapter = None if base.adapter is None else find_base(base.adapter, folder)
    return replace(base, name=find_base(base.name, folder), adapter=adapter)


def find_base(name: str, folder: Path) -> str:
    """An absolute path where there is one from `folder`; hub names, and the embedded base's, as they are."""
    there = resolve(name, folder)
    return str(there) if locate_base(name) == name and there.exists() else name


def _kinds(section: str) -> dict[str, Any]:
    from nado.options import read_options

    return {each.name: each.kind for each in read_options(section_class(section))}
