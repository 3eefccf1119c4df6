"""Training a causal model on packed documents: the loss, one step, and a schedule that follows the clock."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import torch
from documents import IGNORED, Batch
from torch import Tensor
from torch.nn.functional import cross_entropy

_FLOOR = 0.01  # the learning rate at the end, as a share of the highest
_CALIBRATED = (10, 50)  # between these steps a step's time is measured
_TOLD = 200  # steps between two lines of progress

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
    matrices = [each for each in model.parameters() if each.ndim > 1]
    others = [each for each in model.parameters() if each.ndim <= 1]
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


def learn(
    model: torch.nn.Module,
    batches: Iterator[Batch],
    loss_of: Loss,
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
    recent = torch.zeros((), device=device)
    tokens = 0
    model.train()
    while not schedule.done:
        batch = next(batches)
        for group in optimiser.param_groups:
            group["lr"] = schedule.rate
        with half(device):
            loss = loss_of(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        recent = torch.lerp(recent, loss.detach().float(), 1.0 if schedule.step == 0 else 0.02)
        tokens += batch.tokens.numel()
        schedule.advance(wait)
        if schedule.step == 1 or schedule.step % _TOLD == 0 or schedule.done:
            report(schedule.step, float(recent))
    wait()
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
