"""Write what a benchmark measured: the numbers with date, machine, command and commit beside them."""

import json
import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from nado.storage import write_bytes, write_json

RESULTS = Path(__file__).parent / "results"


def record(
    name: str, metrics: dict[str, Any], *, output: Path | None = None, machine: str | None = None
) -> Path:
    """Write ``results/<name>.json``, or `output`, in one piece.

    Metrics of an earlier run that this one did not measure (on another machine, say) stay; `runs` says
    which run each metric is from.
    """
    path = output or RESULTS / f"{name}.json"
    merge(envelope(metrics, command(), machine), path)
    return path


def envelope(metrics: dict[str, Any], line: str, machine: str | None = None) -> dict[str, Any]:
    """Metrics of one run with date, machine, commit and the command `line` that made them."""
    run = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": machine or this_machine(),
        "command": line,
        "commit": commit(),
    }
    return {**run, "metrics": metrics, "runs": [{**run, "metrics": list(metrics)}]}


def merge(new: dict[str, Any], path: Path) -> None:
    """Put a run's metrics into a file of results; what it did not measure stays, with its own run."""
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"metrics": {}, "runs": []}
    measured = new["metrics"]
    earlier = [
        {**old, "metrics": kept}
        for old in before.get("runs", [])
        if (kept := [name for name in old["metrics"] if name not in measured])
    ]
    runs = [*earlier, *new["runs"]]
    machines = " and ".join(dict.fromkeys(each["machine"] for each in runs))
    metrics = {**before["metrics"], **measured}
    write_json(path, {**new, "machine": machines, "metrics": metrics, "runs": runs})


def on_record(path: Path) -> list[dict[str, Any]]:
    """Every metric of a file of results with the run it is from, in the order of the metrics' names."""
    found = json.loads(path.read_text(encoding="utf-8"))
    runs = [
        {**run, "metrics": {name: found["metrics"][name]}} for run in found["runs"] for name in run["metrics"]
    ]
    return sorted(runs, key=lambda run: list(run["metrics"]))


def write_page(folder: Path, text: str) -> None:
    """A run's tables beside what it has measured, in Markdown."""
    write_bytes(folder / "results.md", f"{text}\n".encode())


def this_machine() -> str:
    """The GPU where torch has one in use, else the number of CPU cores."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        return f"one {torch.cuda.get_device_name()}"
    return f"{os.cpu_count()} CPU cores"


def command() -> str:
    """The command that was run; paths outside the repository are cut to their last part."""
    words = sys.argv[1:]
    if "--output" in words:  # where the numbers went says nothing about them
        at = words.index("--output")
        words = words[:at] + words[at + 2 :]
    arguments = [Path(a).name if Path(a).is_absolute() else a for a in words]
    script, root = Path(sys.argv[0]).resolve(), RESULTS.parent.parent.resolve()
    name = script.relative_to(root).as_posix() if script.is_relative_to(root) else script.name
    return " ".join(["python", name, *arguments])


def commit() -> str:
    """The commit that was measured, marked when the code differs from it.

    A copy of the tree without its history is told the commit in NADO_COMMIT.
    """
    if "NADO_COMMIT" in os.environ:
        return os.environ["NADO_COMMIT"]
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        return (
            f"{head} with changes" if _git("status", "--porcelain", "--", "src", "benchmarks/*.py") else head
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=RESULTS.parent.parent, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()
