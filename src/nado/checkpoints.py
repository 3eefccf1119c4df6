"""Where a training run stands, in memory and on disk: safetensors and JSON, nothing pickled."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nado.errors import MismatchError
from nado.guide import Guide
from nado.storage import digest_json, read_json, write_atomically, write_json

Row: TypeAlias = dict[str, float]

SKIPPED = "skipped"  # in the row of a step that was not taken


@dataclass
class Run:
    """Where a run stands: with the weights and the optimiser's state, all that the next step depends on."""

    step: int = 0
    history: list[Row] = field(default_factory=list)
    best_step: int = 0  # 0 before the first evaluation
    best_loss: float | None = None
    stale: int = 0  # evaluations since the best one
    tokens: int = 0
    seconds: float = 0.0
    best_weights: dict[str, Tensor] = field(default_factory=dict)  # on the CPU

    def record(self, row: Row, guide: Guide, tokens: int, seconds: float) -> None:
        """Add a step; the guide's weights are kept if they are the best so far."""
        self.step += 1
        self.history.append(row)
        self.tokens += tokens
        self.seconds += seconds
        loss = row.get("held_out_loss")
        if loss is None:
            return
        if math.isfinite(loss) and (self.best_loss is None or loss < self.best_loss):
            self.best_step, self.best_loss, self.stale = self.step, loss, 0
            self.best_weights = {
                name: value.detach().cpu().clone() for name, value in guide.state_dict().items()
            }
        else:
            self.stale += 1

    @property
    def skipped(self) -> int:
        """Steps that were not taken."""
        return sum(SKIPPED in row for row in self.history)

    def is_over(self, patience: int) -> bool:
        """Whether patience, if there is any, has run out."""
        return 0 < patience <= self.stale


class Checkpoints:
    """The folder of a run.

    `latest.json` names the files in force: the last step's weights and optimiser, and the best weights. When
    the run is over the best ones are in `best.safetensors`.
    """

    def __init__(self, folder: Path, identity: Any) -> None:
        """`identity` is JSON-ready and tells this run from another."""
        self.folder = folder
        self.digest = digest_json(identity)
        self._best: str | None = None  # the file that holds the best weights so far

    def save(self, guide: Guide, optimiser: torch.optim.Optimizer, run: Run, *, finished: bool) -> None:
        """Write the step's tensors, then point to them: a kill leaves the previous checkpoint in force."""
        name = f"step-{run.step:07d}.safetensors"
        tensors = {f"guide.{key}": value for key, value in guide.state_dict().items()}
        for number, state in optimiser.state_dict()["state"].items():
            tensors |= {f"optimiser.{number}.{key}": value for key, value in state.items()}
        self._write(name, tensors)
        best = None
        if run.best_weights:
            best = "best.safetensors" if finished else f"best-{run.best_step:07d}.safetensors"
            if best != self._best:
                self._write(best, run.best_weights, {"step": str(run.best_step)})
                self._best = best
        standing = {key: value for key, value in vars(run).items() if key != "best_weights"}
        write_json(self.folder / "latest.json", {"file": name, "best": best, "run": self.digest, **standing})
        for old in [*self.folder.glob("step-*.safetensors"), *self.folder.glob("best-*.safetensors")]:
            if old.name not in (name, best):
                old.unlink()

    def _write(self, name: str, tensors: dict[str, Tensor], about: dict[str, str] | None = None) -> None:
        plain = {key: value.detach().cpu().contiguous() for key, value in tensors.items()}
        write_atomically(self.folder / name, lambda path: save_file(plain, path, metadata=about))

    def restore(self, guide: Guide, optimiser: torch.optim.Optimizer) -> Run:
        """Load the last checkpoint, if there is one; returns where the run stands."""
        pointer = self.folder / "latest.json"
        if not pointer.exists():
            return Run()
        latest = read_json(pointer)
        if latest.pop("run") != self.digest:
            raise MismatchError(
                f"{self.folder} to hold this same training run",
                "another guide or config, or other samples",
                "Choose another folder, or delete this one.",
            )
        tensors = load_file(self.folder / latest.pop("file"))
        guide.load_state_dict({key[6:]: value for key, value in tensors.items() if key.startswith("guide.")})
        states: dict[int, dict[str, Tensor]] = {}
        for key, value in tensors.items():
            if key.startswith("optimiser."):
                _, number, name = key.split(".", 2)
                states.setdefault(int(number), {})[name] = value
        optimiser.load_state_dict({"state": states, "param_groups": optimiser.state_dict()["param_groups"]})
        self._best = latest.pop("best")
        return Run(**latest, best_weights={} if self._best is None else load_file(self.folder / self._best))
