"""Stages of a study on disk: reused when finished, taken up when begun, refused when they were another's.

Each stage has a folder with `stage.json`: the resolved config, digests of what it depends on, and whether it
is finished. Digests are chained, so that all of them are known, and any change is found, before the first
stage runs.
"""

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from nado.errors import MismatchError
from nado.storage import digest_json, read_json, write_json
from nado.versions import versions

Standing = Literal["new", "begun", "finished", "changed"]

FORMAT = 1
_FILE = "stage.json"


@dataclass(frozen=True)
class Stage:
    """One stage: what it depends on, and where it is kept."""

    name: str
    folder: Path
    config: dict[str, Any]
    inputs: dict[str, Any]  # digests of what it is made from, earlier stages among them
    files: tuple[str, ...] = ()  # that are there when it is finished
    owned: tuple[Path, ...] = field(default=())  # what it writes outside its folder

    @property
    def digest(self) -> str:
        """Equal for stages that come to the same result."""
        return digest_json(
            {"format": FORMAT, "stage": self.name, "config": self.config, "inputs": self.inputs}
        )

    @property
    def record(self) -> Path:
        """The file that says how it stands."""
        return self.folder / _FILE

    def standing(self) -> Standing:
        """How it stands on disk."""
        if not self.record.exists():
            return "new"
        found = read_json(self.record)
        if found.get("digest") != self.digest:
            return "changed" if found.get("finished") or self._holds_work() else "new"
        there = all((self.folder / name).exists() for name in self.files)
        return "finished" if found.get("finished") and there else "begun"

    def _holds_work(self) -> bool:
        """Whether there is anything beside the record: a stage that failed at once has left nothing."""
        places = (self.folder, *self.owned)
        return any(each.is_file() and each != self.record for place in places for each in place.rglob("*"))

    def run(self, work: Callable[[], dict[str, Any]]) -> None:
        """Do the work, with a record of its beginning and of its end; `work` returns a summary."""
        self._write(finished=False)
        began = time.monotonic()
        summary = work()
        self._write(finished=True, seconds=round(time.monotonic() - began, 3), summary=summary)

    def clear(self) -> None:
        """Delete what is there: it was made from something else."""
        for place in (self.folder, *self.owned):
            shutil.rmtree(place, ignore_errors=True)

    def differences(self) -> str:
        """Names of what has changed since."""
        found = read_json(self.record)
        names = [
            f"{self.name}.{name}"
            for name in {**found.get("config", {}), **self.config}
            if self.config.get(name) != found.get("config", {}).get(name)
        ]
        names += [name for name in self.inputs if self.inputs[name] != found.get("inputs", {}).get(name)]
        return ", ".join(names) or "its format"

    def _write(self, **more: Any) -> None:
        write_json(
            self.record,
            {
                "format": FORMAT,
                "stage": self.name,
                "digest": self.digest,
                "config": self.config,
                "inputs": self.inputs,
                "versions": versions(),
                **more,
            },
        )


def require_same(stages: Sequence[Stage], *, force: bool) -> None:
    """Refuse stages that hold another run, or, forced, delete them; those that are the same stay."""
    if not force:
        refuse_changed(stages)
    for stage in stages:
        if stage.standing() == "changed":
            stage.clear()


def refuse_changed(stages: Sequence[Stage]) -> None:
    """Refuse stages that were made from something else."""
    changed = [stage for stage in stages if stage.standing() == "changed"]
    if changed:
        first = changed[0]
        raise MismatchError(
            f"{first.folder} to hold this same study",
            f"another one, which differs in {first.differences()}",
            "Use --force to make it and what follows from it again, or choose another folder.",
        )
