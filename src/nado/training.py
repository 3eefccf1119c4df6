"""Training the guide: one loop, whatever the base, the oracle and the proposal."""

import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from nado.checkpoints import SKIPPED, Checkpoints, Row, Run
from nado.compiling import compile_layers, trained_attention
from nado.errors import InputError, NadoError, require_at_least
from nado.guide import Guide
from nado.objective import (
    Reduced,
    StopGradient,
    consistency_loss,
    interior_mask,
    log_consistency_loss,
    prefix_mask,
    shift_log_odds,
    stop_loss,
    success_loss,
    warm_up_loss,
)
from nado.options import option
from nado.reading import Reader
from nado.trackers import open_trackers, require_trackers
from nado.training_data import Batch, TrainingData, iterate

log = logging.getLogger(__name__)

Measure: TypeAlias = Callable[[Guide], dict[str, float]]

CALIBRATION_BINS = 10
SKIPPED_SHARE = 0.01  # of the steps so far that may be passed over, beside a few
_SKIPPED_AT_FIRST = 3
_AT_LEAST_ZERO = (
    "learning_rate",
    "weight_decay",
    "consistency_weight",
    "log_consistency_weight",
    "stop_weight",
    "parts_weight",
)


class DivergenceError(NadoError, ArithmeticError):
    """The loss, or its gradient, stopped being a number."""


@dataclass(frozen=True)
class TrainingConfig:
    """How the guide is trained."""

    steps: int = option(1000, "optimiser steps in all")
    batch_size: int = option(512, "texts a step, over all processes")
    micro_batch: int | None = option(
        None, "texts a process reads at once; a step adds up as many as it needs (default: all of them)"
    )
    positions_per_text: int | None = option(
        None, "prefixes of each text that are supervised, chosen anew at every step (default: all)"
    )
    learning_rate: float = option(3e-4, "the highest learning rate")
    final_share: float = option(0.05, "of the learning rate, at the end of its cosine decay")
    ramp_steps: int = option(50, "steps over which the learning rate rises")
    weight_decay: float = option(0.01, "AdamW's weight decay")
    clip: float = option(1.0, "largest norm of the gradient; inf for any")
    consistency_weight: float = option(1.0, "of the consistency loss, the paper's lambda")
    log_consistency_weight: float = option(
        0.0, "of consistency in logs, which small chances are learned faster with"
    )
    stop_gradient: StopGradient = option("neither", "side of the consistency losses held fixed")  # noqa: RUF009
    stop_weight: float = option(1.0, "of stop labels, where the samples have them")
    parts_weight: float = option(0.5, "of the auxiliary per-part loss, where the oracle has parts")
    warm_up: bool = option(False, "maximise log q of satisfied texts instead: this fixes only the shape of R")
    half: bool = option(False, "bfloat16 arithmetic; weights stay float32")
    compiled: bool = option(
        False, "fuse the guide's body with torch.compile: worth it from minutes of training on"
    )
    seed: int = option(0, "of the order of texts, of dropout and of the choice of positions")
    evaluate_every: int = option(200, "steps between evaluations on held-out texts; 0 for never")
    patience: int = option(0, "evaluations without a better held-out loss before stopping; 0 for never")
    measure_every: int = option(0, "steps between measurements of guided text; 0 for never")
    save_every: int = option(200, "steps between checkpoints; 0 for only the last")
    trackers: tuple[str, ...] = option((), "where to log as well: tensorboard, wandb")

    def __post_init__(self) -> None:
        require_at_least(
            1,
            steps=self.steps,
            batch_size=self.batch_size,
            micro_batch=self.micro_batch,
            positions_per_text=self.positions_per_text,
        )
        require_at_least(
            0,
            evaluate_every=self.evaluate_every,
            patience=self.patience,
            measure_every=self.measure_every,
            save_every=self.save_every,
        )
        if not self.clip > 0:
            raise InputError("clip above 0", f"{self.clip:g}", "1 is usual; inf clips nothing.")
        for name in _AT_LEAST_ZERO:
            if not 0 <= getattr(self, name) < math.inf:
                found = f"{getattr(self, name):g}"
                raise InputError(
                    f"{name} of 0 or more", found, f"Leave it out for {getattr(type(self), name):g}."
                )
        if self.patience and not self.evaluate_every:
            raise InputError(
                "evaluations to be patient about",
                f"patience {self.patience} and evaluate_every 0",
                "Evaluate every few hundred steps, or set patience to 0.",
            )


@dataclass(frozen=True)
class TrainingSummary:
    """What a training run did."""

    config: TrainingConfig
    history: list[Row]  # one row a step: losses, and what was measured after it
    best_step: int  # whose weights the guide has now: the best on held-out texts, or the last
    stopped_early: bool
    ess: float  # share of the samples that their weights leave effective
    texts: int
    satisfied: float  # share of the texts
    tokens: int  # read, padding not counted
    seconds: float
    skipped: int  # steps that were not taken: their gradients were not finite

    def describe(self) -> dict[str, Any]:
        """JSON-ready: everything but the steps in between."""
        return {
            "config": asdict(self.config),
            "steps": len(self.history),
            "best_step": self.best_step,
            "stopped_early": self.stopped_early,
            "ess": self.ess,
            "texts": self.texts,
            "satisfied": self.satisfied,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "skipped": self.skipped,
            "best": self.history[self.best_step - 1],
            "last": self.history[-1],
        }


class Losses(NamedTuple):
    """The seven losses, as sums over positions or as counts of them."""

    success: Tensor
    consistency: Tensor
    stop: Tensor
    parts: Tensor
    warm_up: Tensor
    excess: Tensor  # how far a norm head goes above log R = 0
    log_consistency: Tensor

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
            + config.log_consistency_weight * self.log_consistency
            + config.stop_weight * self.stop
            + config.parts_weight * self.parts
            + self.excess
        )


def count_positions(lengths: Tensor, multiplicity: Tensor, satisfied: Tensor, parts: Tensor | None) -> Losses:
    """Over how many positions each loss of these texts is summed: known before any of it is computed.

    Where only a sample of the positions is supervised the counts are still those of all: the sampled terms
    are weighted up to stand for the rest.
    """
    many, lengths = multiplicity.double(), lengths.double()
    known = torch.zeros_like(lengths) if parts is None else (parts >= 0).sum(dim=1)
    real, interior = (lengths * many).sum(), ((lengths - 1).clamp(min=0) * many).sum()
    counts = (
        ((lengths + 1) * many).sum(),
        interior,
        real,
        (lengths * many * known).sum(),
        (lengths * many * satisfied).sum(),
        real,
        interior,
    )
    return Losses(*(count.float() for count in counts))


class Objective(torch.nn.Module):
    """A guide and its losses as one module: what is differentiated, and what processes keep in step."""

    def __init__(self, guide: Guide, reader: Reader, config: TrainingConfig) -> None:
        super().__init__()
        self.guide, self.config, self.reader = guide, config, reader
        # Not as a module of this one: its weights are the guide's. What is around the body stays eager, since
        # torch takes the strides of the progress of one batch for those of all.
        fused = compile_layers(guide.body) if config.compiled and guide.attentive else None
        self._features = partial(guide.features, body=fused)

    def forward(self, batch: Batch) -> tuple[Losses, Losses, Reduced]:
        """Sums and counts of every loss, and what they are made from."""
        reduced, log_r_eos, log_not_r_eos, features, excess = self._reduce(batch)
        log_r, log_not_r = shift_log_odds(reduced.log_r, reduced.log_not_r, batch.offset[:, None])
        many = batch.multiplicity[:, None]

        def add_up(terms: Tensor, weights: Tensor = many) -> Tensor:
            # Columns are prefixes; a (B, T) tensor of steps has one column less.
            chosen = 1.0 if batch.sampled is None else batch.sampled[:, : terms.shape[1]]
            return (terms * weights * chosen).sum()

        stop = parts = torch.zeros((), device=many.device)
        if batch.stops is not None:
            stop = add_up(stop_loss(log_r_eos, batch.stops, batch.lengths, log_not_r_eos=log_not_r_eos))
        if batch.parts is not None:
            parts, _ = self.guide.parts_loss(features, batch.positions * many, batch.parts)
        sums = Losses(
            add_up(success_loss(log_r, batch.satisfied, batch.lengths, log_not_r), batch.weights),
            add_up(consistency_loss(reduced, batch.lengths, self.config.stop_gradient)),
            stop,
            parts,
            add_up(warm_up_loss(reduced, batch.log_p, batch.satisfied, batch.lengths)),
            add_up(excess),
            add_up(log_consistency_loss(reduced, batch.lengths, self.config.stop_gradient)),
        )
        counts = count_positions(batch.lengths, batch.multiplicity, batch.satisfied, batch.parts)
        return sums, counts, reduced

    def _reduce(self, batch: Batch) -> tuple[Reduced, Tensor, Tensor, Tensor, Tensor]:
        """Features of whole texts; then, where the batch asks for it, sums over the vocabulary."""
        summed = batch.summed  # (B, T), N of them set
        # Counted once, and before the guide runs: a GPU that has much to do would be waited for.
        places = summed.flatten().nonzero().squeeze(1)  # (N,)
        written = torch.arange(summed.shape[1], device=summed.device).expand_as(summed)
        left = (self.reader.model.length_limit - written).clamp(min=0)
        with trained_attention():
            features = self._features(batch.states, batch.last_tokens, left, batch.conditions, batch.progress)

        def gather(values: Tensor) -> Tensor:
            return values.flatten(0, 1).index_select(0, places)

        states, positions = gather(batch.states), gather(written)
        step = self.guide.reduce(
            self.guide.scores(gather(features)),
            lambda rows: self.reader.logits(states[rows], positions[rows]),
            gather(batch.tokens),
            positions,
        )

        def spread(values: Tensor) -> Tensor:
            empty = torch.zeros(summed.numel(), device=summed.device, dtype=values.dtype)
            return empty.index_copy(0, places, values).view(summed.shape)

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
    on_step: Callable[[int, Row], None] | None = None,
    measure: Measure | None = None,
) -> TrainingSummary:
    """Train `guide` in place and return what was measured along the way.

    With `held_out`, the guide ends with the weights that were best on it. With `folder`, checkpoints are
    kept there, and the same call goes on from the last one after any interruption, bit for bit on a CPU.
    `measure` is asked about the guide every `measure_every` steps, in the first process only; its values are
    in the history as guided_….
    """
    _require_what_config_needs(config, held_out, folder, measure)
    team = Team(Objective(guide, reader, config))
    optimiser = torch.optim.AdamW(
        guide.parameters(),
        lr=config.learning_rate,
        betas=(0.9, 0.98),
        weight_decay=config.weight_decay,
        fused=reader.model.device.type == "cuda",
    )
    checkpoints = (
        None if folder is None else Checkpoints(Path(folder), _identity(config, guide, data, held_out))
    )
    run = Run() if checkpoints is None else checkpoints.restore(guide, optimiser)
    tracked = config.trackers if team.leads else ()
    team.plain.train()
    with open_trackers(tracked, folder, asdict(config), run.step) as track:
        for step, epoch, rows in _remaining(data, config, run):
            began = time.monotonic()
            row = take_step(team, optimiser, data, rows, config, step) | {"epoch": float(epoch)}
            row |= _look(team, config, step, held_out, measure)
            run.record(row, guide, int(data.lengths[rows].sum()), time.monotonic() - began)
            if SKIPPED in row:
                _require_gradients(run)
            track(step, row)
            if on_step is not None:
                on_step(step, row)
            last = step == config.steps or run.is_over(config.patience)
            if checkpoints is not None and team.leads and (last or _due(step, config.save_every)):
                checkpoints.save(guide, optimiser, run, finished=last)
    if run.best_weights:
        guide.load_state_dict(run.best_weights)
    guide.eval()  # type: ignore[no-untyped-call]
    guide.config.shape_only = config.warm_up
    return _summarise(run, config, data)


def _require_what_config_needs(
    config: TrainingConfig, held_out: TrainingData | None, folder: str | Path | None, measure: Measure | None
) -> None:
    """An option that could do nothing is an error before the first step, not a surprise after the last."""
    require_trackers(config.trackers)
    needs = (
        (config.patience, held_out, "held-out samples", "patience", "Hold some prompts out"),
        (config.measure_every, measure, "a function that measures", "measure_every", "Pass measure="),
        (len(config.trackers), folder, "a folder to log into", "trackers", "Pass folder="),
    )
    for asked, given, expected, name, hint in needs:
        if asked and given is None:
            raise InputError(f"{expected}, which {name} needs", "none", f"{hint}, or leave {name} out.")


def _remaining(data: TrainingData, config: TrainingConfig, run: Run) -> Iterator[tuple[int, int, Tensor]]:
    """(step, epoch, rows) of the steps still to be taken; stops when `run` is over."""
    for step, (epoch, rows) in enumerate(iterate(data, config.batch_size, config.seed), start=1):
        if step > config.steps or run.is_over(config.patience):
            return
        if step > run.step:
            yield step, epoch, rows


@torch.no_grad()
def _look(
    team: "Team", config: TrainingConfig, step: int, held_out: TrainingData | None, measure: Measure | None
) -> Row:
    """What is measured after a step, where it is due."""
    row: Row = {}
    last = step == config.steps
    if held_out is not None and config.evaluate_every and (last or _due(step, config.evaluate_every)):
        found = evaluate(team.plain, held_out, team=team)
        row |= {f"held_out_{name}": value for name, value in found.items()}
    if measure is not None and config.measure_every and (last or _due(step, config.measure_every)):
        with evaluating(team.plain):
            guided = measure(team.plain.guide) if team.leads else {}
        row |= {f"guided_{name}": float(value) for name, value in guided.items()}
    return row


def _identity(
    config: TrainingConfig, guide: Guide, data: TrainingData, held_out: TrainingData | None
) -> list[Any]:
    """What tells one run from another, so that a folder is never taken up by the wrong one."""
    # What is logged and how often is saved may change from one start to the next.
    result = asdict(replace(config, trackers=(), save_every=0))
    network = {name: value for name, value in guide.config.identity().items() if name != "calibration"}
    shapes = {name: list(value.shape) for name, value in guide.state_dict().items()}
    return [result, network, shapes, *(None if each is None else _sizes(each) for each in (data, held_out))]


def _sizes(data: TrainingData) -> list[Any]:
    """What tells one set of samples, or one way of weighting them, from another."""
    total = f"{float(data.weights.double().sum()):.6g}"
    return [len(data), int(data.lengths.sum()), int(data.satisfied.sum()), total]


def _summarise(run: Run, config: TrainingConfig, data: TrainingData) -> TrainingSummary:
    texts = float(data.multiplicity.sum())
    return TrainingSummary(
        config=config,
        history=run.history,
        best_step=run.best_step or run.step,
        stopped_early=run.step < config.steps,
        ess=data.ess,
        texts=round(texts),
        satisfied=float((data.multiplicity * data.satisfied).sum()) / texts,
        tokens=run.tokens,
        seconds=run.seconds,
        skipped=run.skipped,
    )


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


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
        self.plain = objective
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

    def backward(self, batch: Batch, counts: Losses, *, last: bool) -> Tensor:
        """Add the gradients of a part of a step; returns its loss and losses, detached.

        Processes exchange gradients with the last part only. Their synchronisation takes the mean, where the
        loss is a sum over processes.
        """
        with nullcontext() if last else self._accelerator.no_sync(self.objective):
            with torch.autocast(batch.tokens.device.type, torch.bfloat16, enabled=self.plain.config.half):
                sums, _, _ = self.objective(batch)
            means = sums.over(Losses(*torch.stack(counts).to(batch.tokens.device)))
            loss = means.total(self.plain.config)
            (loss * self._accelerator.num_processes).backward()
        return torch.stack([loss.detach(), *(value.detach() for value in means)])


def take_step(
    team: Team,
    optimiser: torch.optim.Optimizer,
    data: TrainingData,
    rows: Tensor,
    config: TrainingConfig,
    step: int,
) -> Row:
    """One optimiser step on the texts `rows` of all processes; returns the step's losses."""
    for group in optimiser.param_groups:
        group["lr"] = learning_rate(config, step)
    optimiser.zero_grad(set_to_none=True)
    losses = team.sum(_add_gradients(team, data, rows, config, step))
    learned = [each for each in team.objective.parameters() if each.grad is not None]
    norm = torch.nn.utils.get_total_norm(each.grad for each in learned)
    measured = torch.cat([losses[:1], norm[None], losses[1:]]).tolist()
    names = ("loss", "gradient_norm", *Losses._fields)
    row = {"step": float(step), **dict(zip(names, measured, strict=True))}
    if not math.isfinite(sum(measured[:1] + measured[2:])):
        raise DivergenceError(
            "a finite loss",
            f"loss {measured[0]} and gradient norm {measured[1]} at step {step}",
            "Lower the learning rate, or check the samples' log-probabilities; the last checkpoint is kept.",
        )
    if math.isfinite(measured[1]):
        torch.nn.utils.clip_grads_with_norm_(learned, config.clip, norm)
        optimiser.step()
        return row
    # The losses are numbers, and the weights still are: the batch is passed over, and the next one taken.
    if team.leads:
        log.warning("step %d is passed over: no finite gradient of %s", step, _without_gradient(team.plain))
    del row["gradient_norm"]
    return row | {SKIPPED: 1.0}


def _without_gradient(module: torch.nn.Module, shown: int = 4) -> str:
    """Names of the first parameters whose gradients are not numbers, and how many others there are."""
    found = [
        name
        for name, each in module.named_parameters()
        if each.grad is not None and not bool(each.grad.isfinite().all())
    ]
    names = found or ["all of them together, whose norm is too large"]
    return ", ".join(names[:shown] + [f"{len(found) - shown} others"] * (len(found) > shown))


def _require_gradients(run: Run) -> None:
    """A batch in a hundred may be an accident of arithmetic; more of them are no training."""
    if run.skipped > _SKIPPED_AT_FIRST + SKIPPED_SHARE * run.step:
        raise DivergenceError(
            "finite gradients",
            f"none at {run.skipped} of {run.step} steps",
            "Train without half, or without compiled; the warnings name the parameters.",
        )


def _add_gradients(team: Team, data: TrainingData, rows: Tensor, config: TrainingConfig, step: int) -> Tensor:
    """This process's gradients of a step, a micro-batch at a time; returns its part of the losses."""
    reader, seed = team.plain.reader, config.seed * 1_000_003 + step
    counts = count_positions(
        data.lengths[rows],
        data.multiplicity[rows],
        data.satisfied[rows],
        None if data.parts is None else data.parts[rows],
    )
    own = team.share(rows)
    parts = (own if len(own) else rows[:1]).split(config.micro_batch or config.batch_size)
    losses: list[Tensor] = []
    # Dropout draws from torch's global generator: seeded by the step, and put back afterwards.
    with torch.random.fork_rng(devices=[reader.model.device] if reader.model.device.type == "cuda" else []):
        torch.manual_seed(seed)
        for number, part in enumerate(parts, start=1):
            batch = data.batch(part, reader, config.positions_per_text, seed)
            batch = batch if len(own) else batch.silenced()  # processes must meet, with or without rows
            losses.append(team.backward(batch, counts, last=number == len(parts)))
    return torch.stack(losses).sum(dim=0)


def learning_rate(config: TrainingConfig, step: int) -> float:
    """Rising over `ramp_steps`, then a cosine down to `final_share`; steps count from 1."""
    if step <= config.ramp_steps:
        return config.learning_rate * step / config.ramp_steps
    share = (step - config.ramp_steps) / max(1, config.steps - config.ramp_steps)
    floor = config.final_share
    return config.learning_rate * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * share)))


@contextmanager
def evaluating(objective: Objective) -> Iterator[None]:
    """Without gradients and dropout, in the arithmetic of training."""
    was_training = objective.guide.training
    objective.eval()
    device = objective.reader.model.device.type
    try:
        with torch.no_grad(), torch.autocast(device, torch.bfloat16, enabled=objective.config.half):
            yield
    finally:
        objective.train(was_training)


def evaluate(
    objective: Objective, data: TrainingData, batch_size: int = 512, team: Team | None = None
) -> Row:
    """Losses on held-out texts, and how consistent and how well calibrated R is there.

    `consistency_residual` is the mean of |S − R|, `calibration_error` the ECE over ten bins of R.
    `likelihood_gain` is by how many nats a token q likes satisfied texts more than p does: 0 for an untrained
    guide, −log R(x) a text for the exact one, whatever the losses say. The processes of a team share the work
    and all get the same numbers.
    """
    rows = data.lengths.argsort(stable=True)  # texts of equal length together: less padding
    rows = rows if team is None else team.share(rows)
    size = objective.config.micro_batch or batch_size
    fields = len(Losses._fields)
    total = torch.zeros(
        2 * fields + 2 + 2 * CALIBRATION_BINS, dtype=torch.float64, device=objective.reader.model.device
    )
    with evaluating(objective):
        for part in rows.split(size) if len(rows) else ():
            total += _tally(objective, data, part)
    total = total if team is None else team.sum(total)
    counts = Losses(*total[fields : 2 * fields])
    means = Losses(*total[:fields]).over(counts)
    return {
        "loss": float(means.total(objective.config)),
        **{name: float(mean) for name, mean in zip(Losses._fields, means, strict=True)},
        "consistency_residual": float(total[2 * fields] / counts.consistency.clamp(min=1)),
        "likelihood_gain": float(total[2 * fields + 1] / counts.warm_up.clamp(min=1)),
        "calibration_error": _expected_error(total[2 * fields + 2 :].view(2, -1)),
    }


def _tally(objective: Objective, data: TrainingData, rows: Tensor) -> Tensor:
    """Sums over some texts, of everything that `evaluate` divides in the end."""
    # At step 0: the same positions at every evaluation, and never those of a training step.
    seed = objective.config.seed * 1_000_003
    batch = data.batch(rows, objective.reader, objective.config.positions_per_text, seed)
    sums, counts, reduced = objective(batch)
    chosen = torch.ones_like(batch.weights) if batch.sampled is None else batch.sampled
    interior = interior_mask(batch.lengths, reduced.log_r.shape[1])[:, 1:-1]
    gap = (reduced.log_s[:, 1:].exp() - reduced.log_r[:, 1:-1].exp()).abs()
    residual = (gap * interior * chosen[:, 1:-1] * batch.multiplicity[:, None]).sum()
    inside = prefix_mask(batch.lengths, reduced.log_r.shape[1])
    bins = _calibration_bins(
        reduced.log_r.exp()[inside],
        batch.satisfied[:, None].expand_as(inside)[inside],
        (batch.natural_weights * chosen)[inside],
        CALIBRATION_BINS,
    )
    many = batch.multiplicity[:, None] * chosen[:, :-1]
    written = torch.where(batch.positions & batch.satisfied[:, None], batch.log_p, 0.0)
    gain = -(sums.warm_up + (written * many).sum())
    parts = torch.stack([*sums, *counts, residual, gain]).double()
    return torch.cat([parts, bins.flatten()])


def calibration_error(
    predicted: Tensor, happened: Tensor, bins: int = CALIBRATION_BINS, weights: Tensor | None = None
) -> float:
    """ECE: the mean distance between predicted and observed rate, over bins of the prediction."""
    weights = torch.ones_like(predicted) if weights is None else weights
    return _expected_error(_calibration_bins(predicted, happened, weights, bins))


def _calibration_bins(predicted: Tensor, happened: Tensor, weights: Tensor, bins: int) -> Tensor:
    """The weight in each bin of the prediction, and that of prediction minus outcome: (2, bins)."""
    place = (predicted * bins).long().clamp(0, bins - 1)
    values = torch.stack([weights, weights * (predicted - happened.to(predicted.dtype))]).double()
    return torch.zeros(2, bins, dtype=torch.float64, device=values.device).index_add(1, place, values)


def _expected_error(bins: Tensor) -> float:
    return float(bins[1].abs().sum() / bins[0].sum().clamp(min=1e-30))
