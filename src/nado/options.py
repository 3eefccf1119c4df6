"""Config fields that carry their own description: the command line's help is made from it."""

import dataclasses
from collections.abc import Iterator
from dataclasses import MISSING, field
from typing import Any, TypeVar, get_type_hints

T = TypeVar("T")


def option(default: T, text: str, *, flag: str | None = None) -> T:
    """A config field with a default; `flag` is its name on the command line where that is another."""
    described: T = field(default=default, metadata={"help": text, "flag": flag})
    return described


def required(text: str, *, flag: str | None = None) -> Any:
    """A config field that must be given."""
    return field(metadata={"help": text, "flag": flag})


@dataclasses.dataclass(frozen=True)
class Option:
    """One field of a config class, as a command line or a file reads it."""

    name: str
    flag: str
    kind: Any  # its type, resolved
    text: str
    default: Any  # MISSING where it must be given

    @property
    def help(self) -> str:
        """The description, with the default where that says anything."""
        if self.default is MISSING or self.default is None or self.default == ():
            return self.text
        shown = str(self.default).lower() if isinstance(self.default, bool) else self.default
        return f"{self.text} (default: {shown})"


def read_options(config: type) -> Iterator[Option]:
    """The fields of a config class, in order."""
    hints = get_type_hints(config)
    for each in dataclasses.fields(config):
        if each.init:
            flag = each.metadata.get("flag") or each.name
            text = each.metadata.get("help", "")
            yield Option(each.name, flag.replace("_", "-"), hints[each.name], text, each.default)
