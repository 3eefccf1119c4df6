"""Training the guide: one loop, whatever the base, the oracle and the proposal."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nado.errors import InputError, MismatchError, NadoError
from nado.guide import Guide
from nado.objective import (
    Reduced,
    StopGradient,
    consistency_loss,
    interior_mask,
    prefix_mask,
    shift_log_odds,
    stop_loss,
    success_loss,
    warm_up_loss,
)
from nado.reading import Reader
from nado.storage import digest_json, read_json, write_atomically, write_json
from nado.training_data import Batch, TrainingData, iterate


class DivergenceError(NadoError, ArithmeticError):
    """The loss stopped being a number."""


@dataclass(frozen=True)
class TrainingConfig:
    """How the guide is trained."""

    steps: int = 1000  # optimiser steps in all
    batch_size: int = 512  # texts a step, over all processes
    learning_rate: float = 3e-4
    final_share: float = 0.05  # of the learning rate, at the end of its cosine decay
    ramp_steps: int = 50  # steps over which the learning rate rises
    weight_decay: float = 0.01
    clip: float = 1.0  # largest norm of the gradient
    consistency_weight: float = 1.0  # λ of the paper
    stop_gradient: StopGradient = "neither"  # side of the consistency loss that is held fixed
    stop_weight: float = 1.0  # of stop labels, where the samples have them
    parts_weight: float = 0.5  # of the auxiliary per-part loss, where the oracle has parts
    warm_up: bool = False  # maximise log q of satisfied texts instead (fixes only the shape of R)
    half: bool = False  # bfloat16 arithmetic; weights stay float32
    compiled: bool = False  # fuse the guide's body with torch.compile: worth it from minutes of training on
    seed: int = 0
    evaluate_every: int = 200  # steps between evaluations on held-out texts; 0 for never
    save_every: int = 200  # steps between checkpoints; 0 for only the last

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} of at least 1", f"{getattr(self, name)}", "Ask for 1 or more.")


class Losses(NamedTuple):
    """The five losses, as sums over positions or as counts of them."""

    success: Tensor
    consistency: Tensor
    stop: Tensor
    parts: Tensor
    warm_up: Tensor
    excess: Tensor  # how far a norm head goes above log R = 0

    def over(self, counts: "Losses") -> "Losses":
        """Means from sums and counts; a loss without positions is 0."""
        return Losses(*(total / count.clamp(min=1) for total, count in zip(self, counts, strict=True)))

    def total(self, config: "TrainingConfig") -> Tensor:
        """The number that is minimised, from means."""
        if config.warm_up:
            return self.warm_up + self.excess
        return (
            self.success
            + config.consistency_weight * self.consistency
            + config.stop_weight * self.stop
            + config.parts_weight * self.parts
            + self.excess
        )


class Objective(torch.nn.Module):
    """A guide and its losses as one module: what is differentiated, and what processes keep in step."""

    def __init__(self, guide: Guide, reader: Reader, config: TrainingConfig) -> None:
        super().__init__()
        self.guide, self.config, self.reader = guide, config, reader
        self._features = torch.compile(guide.features, dynamic=True) if config.compiled else guide.features

    def forward(self, batch: Batch) -> tuple[Losses, Losses, Reduced]:
        """Sums and counts of every loss, and what they are made from."""
        real = batch.positions  # (B, T)
        reduced, log_r_eos, log_not_r_eos, features, excess = self._reduce(batch, real)
        log_r, log_not_r = shift_log_odds(reduced.log_r, reduced.log_not_r, batch.offset[:, None])
        prefixes = prefix_mask(batch.lengths, log_r.shape[1])
        interior = interior_mask(batch.lengths, log_r.shape[1])
        won = real & batch.satisfied[:, None]
        none = torch.zeros((), device=real.device)
        many = batch.multiplicity[:, None]
        success = success_loss(log_r, batch.satisfied, batch.lengths, log_not_r) * batch.weights
        stop, parts, part_count = none, none, none
        if batch.stops is not None:
            terms = stop_loss(log_r_eos, batch.stops, batch.lengths, log_not_r_eos=log_not_r_eos)
            stop = (terms * many).sum()
        if batch.parts is not None:
            parts, part_count = self.guide.parts_loss(features, real * many, batch.parts)
        sums = Losses(
            success.sum(),
            (consistency_loss(reduced, batch.lengths, self.config.stop_gradient) * many).sum(),
            stop,
            parts,
            (warm_up_loss(reduced, batch.log_p, batch.satisfied, batch.lengths) * many).sum(),
            (excess * many).sum(),
        )

        def count(mask: Tensor) -> Tensor:
            return (mask * many).sum()

        counts = Losses(count(prefixes), count(interior), count(real), part_count, count(won), count(real))
        return sums, counts, reduced

    def _reduce(self, batch: Batch, real: Tensor) -> tuple[Reduced, Tensor, Tensor, Tensor, Tensor]:
        written = torch.arange(real.shape[1], device=real.device).expand_as(real)
        left = (self.reader.model.length_limit - written).clamp(min=0)
        features = self._features(batch.states, batch.last_tokens, left, batch.conditions, batch.progress)
        states, positions = batch.states[real], written[real]  # N real positions
        step = self.guide.reduce(
            self.guide.scores(features[real]),
            lambda rows: self.reader.logits(states[rows], positions[rows]),
            batch.tokens[real],
            positions,
        )

        def spread(values: Tensor) -> Tensor:
            return torch.zeros(real.shape, device=real.device, dtype=values.dtype).masked_scatter(
                real, values
            )

        log_s, log_not_s = spread(step.log_s), spread(step.log_not_s)
        reduced = Reduced(
            torch.cat([log_s[:, :1], spread(step.log_r)], dim=1),
            torch.cat([log_not_s[:, :1], spread(step.log_not_r)], dim=1),
            log_s,
            log_not_s,
        )
        return reduced, spread(step.log_r_eos), spread(step.log_not_r_eos), features, spread(step.excess)


def train(
    guide: Guide,
    reader: Reader,
    data: TrainingData,
    config: TrainingConfig,
    *,
    held_out: TrainingData | None = None,
    folder: str | Path | None = None,
    on_step: Callable[[int, dict[str, float]], None] | None = None,
) -> list[dict[str, float]]:
    """Train `guide` in place and return what was measured along the way.

    With `folder`, checkpoints are kept there, and the same call goes on from the last one after any
    interruption, bit for bit on a CPU.
    """
    objective = Objective(guide, reader, config)
    team = Team(objective)
    optimiser = torch.optim.AdamW(
        guide.parameters(), lr=config.learning_rate, betas=(0.9, 0.98), weight_decay=config.weight_decay
    )
    checkpoints = None if folder is None else Checkpoints(Path(folder), config, data)
    done, history = (0, []) if checkpoints is None else checkpoints.restore(guide, optimiser)
    guide.train()
    for step, (epoch, rows) in enumerate(iterate(data, config.batch_size, config.seed), start=1):
        if step > config.steps:
            break
        if step <= done:
            continue
        row = take_step(team, optimiser, data.batch(team.share(rows), reader), config, step)
        row["epoch"] = epoch
        if held_out is not None and config.evaluate_every and _due(step, config.evaluate_every, config.steps):
            row |= {f"held_out_{name}": value for name, value in evaluate(objective, held_out).items()}
        history.append(row)
        if on_step is not None:
            on_step(step, row)
        if checkpoints is not None and team.leads and _due(step, config.save_every, config.steps):
            checkpoints.save(step, guide, optimiser, history)
    guide.eval()  # type: ignore[no-untyped-call]
    return history


class Team:
    """The processes that train together: one alone, or several started by torchrun or accelerate.

    Each takes a share of every batch's rows. Losses are divided by the counts of all of them, so that several
    processes take the very step that one would.
    """

    def __init__(self, objective: Objective) -> None:
        from accelerate import Accelerator, DistributedDataParallelKwargs

        # The auxiliary parts of a guide take part only where the samples have labels for them.
        self._accelerator = Accelerator(
            cpu=objective.reader.model.device.type == "cpu",
            kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)],
        )
        self.objective: Any = objective
        if self._accelerator.num_processes > 1:
            self.objective = self._accelerator.prepare_model(objective, device_placement=False)

    @property
    def leads(self) -> bool:
        """Whether this process writes files."""
        return bool(self._accelerator.is_main_process)

    def share(self, rows: Tensor) -> Tensor:
        """This process's rows of a batch."""
        return rows[self._accelerator.process_index :: self._accelerator.num_processes]

    def sum(self, values: Tensor) -> Tensor:
        """`values` added up over processes."""
        return torch.as_tensor(self._accelerator.reduce(values, "sum"))

    def backward(self, loss: Tensor) -> None:
        """Gradients of the sum of all processes' losses: their synchronisation takes the mean."""
        (loss * self._accelerator.num_processes).backward()


def take_step(
    team: Team, optimiser: torch.optim.Optimizer, batch: Batch, config: TrainingConfig, step: int
) -> dict[str, float]:
    """One optimiser step; returns the step's losses."""
    for group in optimiser.param_groups:
        group["lr"] = learning_rate(config, step)
    # Dropout draws from torch's global generator: seeded by the step, and put back afterwards.
    with torch.random.fork_rng(devices=[batch.tokens.device] if batch.tokens.is_cuda else []):
        torch.manual_seed(config.seed * 1_000_003 + step)
        with torch.autocast(batch.tokens.device.type, torch.bfloat16, enabled=config.half):
            sums, counts, _ = team.objective(batch)
        means = sums.over(Losses(*team.sum(torch.stack(counts))))
        loss = means.total(config)
        optimiser.zero_grad(set_to_none=True)
        team.backward(loss)
    norm = torch.nn.utils.clip_grad_norm_(team.objective.parameters(), config.clip)
    losses = team.sum(torch.stack([loss.detach(), *(value.detach() for value in means)]))
    measured = torch.cat([losses[:1], norm[None], losses[1:]]).tolist()
    if not all(math.isfinite(value) for value in measured):
        raise DivergenceError(
            "a finite loss",
            f"loss {measured[0]} and gradient norm {measured[1]} at step {step}",
            "Lower the learning rate, or check the samples' log-probabilities; the last checkpoint is kept.",
        )
    optimiser.step()
    names = ("loss", "gradient_norm", *Losses._fields)
    return {"step": float(step), **dict(zip(names, measured, strict=True))}


def learning_rate(config: TrainingConfig, step: int) -> float:
    """Rising over `ramp_steps`, then a cosine down to `final_share`; steps count from 1."""
    if step <= config.ramp_steps:
        return config.learning_rate * step / config.ramp_steps
    share = (step - config.ramp_steps) / max(1, config.steps - config.ramp_steps)
    floor = config.final_share
    return config.learning_rate * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * share)))


@torch.no_grad()
def evaluate(objective: Objective, data: TrainingData, batch_size: int = 512) -> dict[str, float]:
    """Losses on held-out texts, and the calibration error of R over ten bins."""
    was_training = objective.training
    objective.eval()
    sums = counts = None
    predicted, happened = [], []
    for rows in torch.arange(len(data)).split(batch_size):
        batch = data.batch(rows, objective.reader)
        found, counted, reduced = objective(batch)
        sums = found if sums is None else Losses(*(a + b for a, b in zip(sums, found, strict=True)))
        counts = counted if counts is None else Losses(*(a + b for a, b in zip(counts, counted, strict=True)))
        inside = prefix_mask(batch.lengths, reduced.log_r.shape[1])
        predicted.append(reduced.log_r.exp()[inside].cpu())
        happened.append(batch.satisfied[:, None].expand_as(inside)[inside].float().cpu())
    objective.train(was_training)
    assert sums is not None
    assert counts is not None
    means = dict(zip(Losses._fields, (float(mean) for mean in sums.over(counts)), strict=True))
    return {**means, "calibration_error": calibration_error(torch.cat(predicted), torch.cat(happened))}


def calibration_error(predicted: Tensor, happened: Tensor, bins: int = 10) -> float:
    """ECE: the mean distance between predicted and observed rate, over bins of the prediction."""
    place = (predicted * bins).long().clamp(max=bins - 1)
    counts = torch.zeros(bins).index_add(0, place, torch.ones_like(predicted))
    gap = torch.zeros(bins).index_add(0, place, predicted - happened).abs()
    return float(gap.sum() / counts.sum())


class Checkpoints:
    """Where a training run stands, on disk: safetensors and JSON, nothing pickled."""

    def __init__(self, folder: Path, config: TrainingConfig, data: TrainingData) -> None:
        self.folder = folder
        self.digest = digest_json(
            [asdict(config), len(data), int(data.lengths.sum()), int(data.satisfied.sum())]
        )

    def save(
        self, step: int, guide: Guide, optimiser: torch.optim.Optimizer, history: list[dict[str, float]]
    ) -> None:
        """Write the step's tensors, then point to them: a kill leaves the previous checkpoint in force."""
        name = f"step-{step:07d}.safetensors"
        tensors = {f"guide.{key}": value for key, value in guide.state_dict().items()}
        for number, state in optimiser.state_dict()["state"].items():
            tensors |= {f"optimiser.{number}.{key}": value for key, value in state.items()}
        tensors = {key: value.detach().cpu().contiguous() for key, value in tensors.items()}
        write_atomically(self.folder / name, lambda path: save_file(tensors, path))
        write_json(
            self.folder / "latest.json", {"step": step, "file": name, "run": self.digest, "history": history}
        )
        for old in self.folder.glob("step-*.safetensors"):
            if old.name != name:
                old.unlink()

    def restore(self, guide: Guide, optimiser: torch.optim.Optimizer) -> tuple[int, list[dict[str, float]]]:
        """Load the last checkpoint, if there is one; returns its step and history."""
        pointer = self.folder / "latest.json"
        if not pointer.exists():
            return 0, []
        latest = read_json(pointer)
        if latest["run"] != self.digest:
            raise MismatchError(
                f"{self.folder} to hold this same training run",
                "another config or other samples",
                "Choose another folder, or delete this one.",
            )
        tensors = load_file(self.folder / latest["file"])
        guide.load_state_dict({key[6:]: value for key, value in tensors.items() if key.startswith("guide.")})
        states: dict[int, dict[str, Tensor]] = {}
        for key, value in tensors.items():
            if key.startswith("optimiser."):
                _, number, field = key.split(".", 2)
                states.setdefault(int(number), {})[field] = value
        optimiser.load_state_dict({"state": states, "param_groups": optimiser.state_dict()["param_groups"]})
        history: list[dict[str, float]] = latest["history"]
        return int(latest["step"]), history


def _due(step: int, every: int, last: int) -> bool:
    return step == last or (every > 0 and step % every == 0)
