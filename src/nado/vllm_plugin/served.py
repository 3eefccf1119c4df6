"""What a folder for vLLM says of p and of requests: the table `nado` of its config.json."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from nado.errors import StorageError
from nado.language_model import Completion
from nado.warpers import Warpers

FORMAT = 1
GUIDE = "guide"


@dataclass(frozen=True)
class Served:
    """What the plug-in has to know of p and of requests: the table `nado` of config.json."""

    warpers: Warpers
    eos_ids: tuple[int, ...]
    length_limit: int
    completion: Completion
    condition: str | None = None  # of requests that give none; None where each has to give its own
    template: str | None = None  # how clients make the base's prompt from a condition
    base_fingerprint: str = ""
    shape_only: bool = False  # the guide was only warmed up: there is no R to doubt

    def describe(self) -> dict[str, Any]:
        """JSON-ready."""
        return {"format": FORMAT, **asdict(self)}

    @classmethod
    def read(cls, table: Mapping[str, Any] | None) -> "Served":
        """From the table of a folder's config.json."""
        if not isinstance(table, Mapping) or table.get("format") != FORMAT:
            raise StorageError(
                f"a table nado of format {FORMAT} in config.json",
                "none" if not isinstance(table, Mapping) else f"format {table.get('format')}",
                "Write the folder with the nado that serves it: save_for_vllm.",
            )
        values = {name: value for name, value in table.items() if name != "format"}
        warpers = Warpers(**values.pop("warpers"))
        return cls(**{**values, "warpers": warpers, "eos_ids": tuple(values["eos_ids"])})
