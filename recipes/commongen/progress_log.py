"""A clock with a log, and stages that are not done twice."""

import json
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from nado.storage import digest_json, read_json, write_json

_FILE = "stage.json"


class Clock:
    """What time it is in this run, when it must end, and what it has said so far."""

    def __init__(self, log: Path, *, deadline: float = 0.0) -> None:
        self.began = time.perf_counter()
        self.deadline = deadline
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._log = log
        log.parent.mkdir(parents=True, exist_ok=True)

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self.began

    @property
    def left(self) -> float:
        """Seconds until the deadline; endless without one."""
        return self.deadline - self.elapsed if self.deadline else float("inf")

    def say(self, text: str) -> None:
        """One line of progress, on screen and in the log."""
        line = f"[{self.elapsed:6.1f} s] {text}"
        print(line, flush=True)
        with self._log.open("a", encoding="utf-8") as log:
            log.write(line + "\n")


class Stages:
    """Folders of results, each made from its settings and from earlier stages, and anew when one changes.

    A stage that was begun keeps its files: drawing and training go on where they stopped.
    """

    def __init__(self, folder: Path, inputs: str, clock: Clock) -> None:
        """`inputs` is a digest of what all stages are made from."""
        self.folder, self.clock = folder, clock
        self.facts: dict[str, dict[str, Any]] = {}
        self._digests: dict[str, str] = {"": inputs}

    @property
    def seconds(self) -> float:
        """What the stages known so far took, in whichever calls."""
        return round(float(sum(each["stage_seconds"] for each in self.facts.values())), 1)

    def is_done(self, name: str) -> bool:
        """Whether an earlier call has finished this stage, with whatever settings."""
        return "facts" in self._recorded(name)

    def _recorded(self, name: str) -> dict[str, Any]:
        """What is on disk about a stage; nothing where it was never begun."""
        path = self.folder / name / _FILE
        return read_json(path) if path.is_file() else {}

    def run(
        self, name: str, config: Any, after: Sequence[str], work: Callable[[Path], dict[str, Any]]
    ) -> Path:
        """The folder of a stage; `work` fills it and returns facts, unless that was done before."""
        folder = self.folder / name
        digest = digest_json([name, config, *(self._digests[each] for each in ("", *after))])
        self._digests[name] = digest
        record, found = folder / _FILE, self._recorded(name)
        if found.get("digest") == digest and "facts" in found:
            self.facts[name] = found["facts"]
            self.clock.say(f"{name}: done before")
            return folder
        if found.get("digest") != digest:
            shutil.rmtree(folder, ignore_errors=True)
            write_json(record, {"digest": digest, "config": config})
        began = self.clock.elapsed
        facts = {**work(folder), "stage_seconds": round(self.clock.elapsed - began, 1)}
        self.facts[name] = facts
        write_json(record, {"digest": digest, "config": config, "facts": facts})
        shown = {key: value for key, value in facts.items() if not isinstance(value, list | dict)}
        self.clock.say(f"{name}: {json.dumps(shown)}")
        return folder
