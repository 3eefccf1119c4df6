"""Training a causal model on packed documents: the loss, one step, and a schedule that follows the clock."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import fields
from typing import Any, TypeAlias

import torch
from documents import IGNORED, Batch
from torch import Tensor
from torch.nn.functional import cross_entropy

from nado.compiling import compile_layers

_FLOOR = 0.01  # the learning rate at the end, as a share of the highest
_CALIBRATED = (10, 50)  # between these steps a step's time is measured
_TOLD = 200  # steps between two lines of progress

_TRIED = 3  # steps before one is recorded, so that every library has made what it keeps

Loss: TypeAlias = Callable[[Batch], Tensor]


def packed_mask(batch: Batch) -> Tensor:
    """Each token sees the tokens of its own document up to itself: bool (B, 1, T, T)."""
    width = batch.document.shape[1]
    past = torch.ones(width, width, dtype=torch.bool, device=batch.document.device).tril()
    return ((batch.document[:, :, None] == batch.document[:, None, :]) & past)[:, None]


def hidden_states(model: Any, batch: Batch) -> Tensor:
    """The last hidden states: (B, T, D)."""
    output = model.model(
        input_ids=batch.tokens,
        attention_mask=packed_mask(batch),
        position_ids=batch.position,
        use_cache=False,
    )
    return torch.as_tensor(output.last_hidden_state)


def whole_loss(model: Any, batch: Batch) -> Tensor:
    """Mean loss of the labelled tokens, from logits of all: fixed shapes, for a small vocabulary."""
    logits = model.lm_head(hidden_states(model, batch))  # (B, T, V)
    return cross_entropy(logits.flatten(0, 1).float(), batch.labels.flatten(), ignore_index=IGNORED)


def sparse_loss(model: Any, batch: Batch) -> Tensor:
    """The same, from logits of the labelled tokens alone: for a large vocabulary."""
    learned = batch.labels != IGNORED
    logits = model.lm_head(hidden_states(model, batch)[learned])  # (N, V)
    return cross_entropy(logits.float(), batch.labels[learned])


def half(device: torch.device) -> AbstractContextManager[Any]:
    """Products in bfloat16 on a GPU, everything in float32 elsewhere."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def optimiser_for(model: torch.nn.Module, *, decay: float) -> torch.optim.Optimizer:
    """AdamW; weights of layers decay, norms do not."""
    learned = [each for each in model.parameters() if each.requires_grad]
    matrices = [each for each in learned if each.ndim > 1]
    others = [each for each in learned if each.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]
    fused = next(model.parameters()).is_cuda
    return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), fused=fused)


class Schedule:
    """Learning rates over a number of steps, or over as many as fit into a number of seconds.

    In the second case steps are timed, and the plan is made anew from time to time: the run ends when it
    should on a slower machine too.
    """

    def __init__(self, highest: float, warm_up: int, *, steps: int = 0, seconds: float = 0.0) -> None:
        self.highest, self.warm_up, self.seconds, self.steps = highest, warm_up, seconds, steps
        self.step = 0
        self._timed = steps == 0
        self._first = (0, 0.0)
        self._began = 0.0

    @property
    def done(self) -> bool:
        """Whether the last step has been taken."""
        return self.steps > 0 and self.step >= self.steps

    @property
    def rate(self) -> float:
        """The learning rate of the coming step."""
        ramp = min(1.0, (self.step + 1) / self.warm_up)
        part = min(1.0, self.step / self.steps) if self.steps else 0.0
        return self.highest * ramp * (_FLOOR + (1 - _FLOOR) * (1 + math.cos(math.pi * part)) / 2)

    @property
    def elapsed(self) -> float:
        """Seconds since the first step was over."""
        return time.perf_counter() - self._began if self._began else 0.0

    def advance(self, wait: Callable[[], None]) -> None:
        """Count a step; `wait` lets the device catch up before the clock is read."""
        self.step += 1
        if self.step == 1:  # compiling belongs to the first step, and not to the time there is
            wait()
            self._began = time.perf_counter()
        if not self._timed:
            return
        if self.step == _CALIBRATED[0]:
            wait()
            self._first = (self.step, self.elapsed)
        elif self.step == _CALIBRATED[1] or (self.step > _CALIBRATED[1] and self.step % _TOLD == 0):
            wait()
            elapsed = self.elapsed
            a_step = (elapsed - self._first[1]) / (self.step - self._first[0])
            self.steps = self.step + max(0, int((self.seconds - elapsed) / a_step))


class Slopes:
    """A batch's loss, and its gradients in the model's parameters."""

    def __init__(self, model: torch.nn.Module, loss_of: Loss) -> None:
        self.model, self.loss_of = model, loss_of
        self.device = next(model.parameters()).device

    def __call__(self, batch: Batch) -> Tensor:
        """The loss; whatever gradients there were are gone."""
        self.model.zero_grad(set_to_none=True)
        with half(self.device):
            loss = self.loss_of(batch)
        loss.backward()
        return loss.detach()


class RecordedSlopes(Slopes):
    """The same for batches of one shape: recorded once on a GPU and replayed.

    An adapter's step is tens of thousands of small launches, which take the host several times as long as
    they take the GPU. Nothing in `loss_of` may ask the GPU for a value.
    """

    def __init__(self, model: torch.nn.Module, loss_of: Loss, like: Batch) -> None:
        super().__init__(model, loss_of)
        self.batch = Batch(*(getattr(like, each.name).clone() for each in fields(like)))
        model.train()
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            for _ in range(_TRIED):
                super().__call__(self.batch)
        torch.cuda.current_stream(self.device).wait_stream(side)
        model.zero_grad(set_to_none=True)  # the recording makes gradients of its own, and fills them anew
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.loss = self._record()

    def _record(self) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            loss = self.loss_of(self.batch)
        loss.backward()
        return loss.detach()

    def __call__(self, batch: Batch) -> Tensor:
        """The loss, in a place that the next call writes to."""
        for each in fields(batch):
            getattr(self.batch, each.name).copy_(getattr(batch, each.name))
        self.graph.replay()
        return self.loss


class FusedSlopes(Slopes):
    """The same by compiled layers, for as long as that works: a fault costs speed, never the run."""

    def __init__(
        self, model: torch.nn.Module, loss_by: Callable[[Any], Loss], say: Callable[[str], None]
    ) -> None:
        """`loss_by(runs)` gives the loss of a batch by a model that shares its weights, or is it."""
        super().__init__(model, loss_by(model))
        self._say = say
        fused = compile_layers(model)
        fused.train()
        self._fused: Slopes | None = Slopes(model, loss_by(fused))

    def __call__(self, batch: Batch) -> Tensor:
        """The loss; whatever gradients there were are gone."""
        if self._fused is not None:
            try:
                return self._fused(batch)
            except RuntimeError as error:  # of which kind the compiler's are
                self._fused = None
                self._say(f"  layers are not compiled any more: {str(error)[:300]}")
        return super().__call__(batch)


def record_slopes(model: torch.nn.Module, loss_of: Loss, like: Batch, say: Callable[[str], None]) -> Slopes:
    """Recorded, where there is a GPU and nothing speaks against it: a fault costs speed, never the run."""
    plain = Slopes(model, loss_of)
    if plain.device.type != "cuda":
        return plain
    try:
        return RecordedSlopes(model, loss_of, like)
    except RuntimeError as error:
        say(f"  goes on step by step: {str(error)[:300]}")
        return plain


def learn(
    model: torch.nn.Module,
    batches: Iterator[Batch],
    slopes: Slopes,
    schedule: Schedule,
    *,
    decay: float,
    report: Callable[[int, float], None],
) -> dict[str, float]:
    """Train until the schedule is done; returns steps, tokens, seconds and the mean of the last losses."""
    device = next(model.parameters()).device

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    optimiser = optimiser_for(model, decay=decay)
    learned = [each for group in optimiser.param_groups for each in group["params"]]
    recent = torch.zeros((), device=device)
    tokens = 0
    model.train()
    while not schedule.done:
        batch = next(batches)
        for group in optimiser.param_groups:
            group["lr"] = schedule.rate
        loss = slopes(batch)
        torch.nn.utils.clip_grad_norm_(learned, 1.0)
        optimiser.step()
        recent = torch.lerp(recent, loss.float(), 1.0 if schedule.step == 0 else 0.02)
        tokens += batch.tokens.numel()
        schedule.advance(wait)
        if schedule.step == 1 or schedule.step % _TOLD == 0 or schedule.done:
            report(schedule.step, float(recent))
    wait()
    model.zero_grad(set_to_none=True)
    model.eval()
    return {"steps": schedule.step, "tokens": tokens, "seconds": schedule.elapsed, "loss": float(recent)}


@torch.no_grad()
def total_loss(model: Any, batch: Batch, *, rows: int = 256) -> Tensor:
    """Summed loss of each row's labelled tokens: float64 (B,)."""
    sums = []
    for at in range(0, len(batch), rows):
        part = batch.rows(slice(at, at + rows))
        with half(part.tokens.device):
            logits = model.lm_head(hidden_states(model, part))
        losses = cross_entropy(
            logits.transpose(1, 2).float(), part.labels, ignore_index=IGNORED, reduction="none"
        )
        sums.append(losses.double().sum(dim=1))
    return torch.cat(sums)
