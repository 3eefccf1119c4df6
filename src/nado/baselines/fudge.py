"""FUDGE (Yang and Klein 2021): a classifier of prefixes rescores the base's likeliest next tokens.

A recurrent network reads the condition and then the text, and says after every token how likely the whole
text is to satisfy the oracle. It is trained on given labelled texts, every prefix with its text's label:
here on the very draws and labels that q's guide had. In decoding the k likeliest tokens of the base are
each tried, p(v) · P(C | y ⊕ v)^λ, and the others are given up. With the exact R as classifier and k = V
this is q* itself.

A GRU of 256 stands where the paper has an LSTM of 300 to 512; its inputs are the base's own token
embeddings, which know more than the paper's GloVe vectors.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, linear, logsigmoid
from torch.nn.utils.rnn import pack_padded_sequence

from nado.baselines.fine_tuning import pick_rows, text_weights
from nado.baselines.method import (
    Method,
    Provisions,
    Sampled,
    Settings,
    Stopwatch,
    System,
    Training,
    missing_labels,
    require_samples,
)
from nado.following import Standing
from nado.guidance import Guidance
from nado.guided_language_model import GuidedLanguageModel
from nado.huggingface import CausalModel, EncoderDecoderModel
from nado.samples import Samples

SIZE = 256
INPUT_SIZE = 128
TOP_K = 200  # the paper's
_BATCH = 128
_MORE_TEXTS = 8  # for each that a tuned base reads: a pass of this network is cheaper by more than that
_RATE = 2e-3

StateT = TypeVar("StateT")


class PrefixClassifier(Protocol[StateT]):
    """Says of prefixes how likely their texts are to satisfy the oracle."""

    @property
    def fingerprint(self) -> str:
        """A digest of everything its answers depend on."""
        ...

    def start(self, prompts: Sequence[str], conditions: Sequence[str]) -> StateT:
        """Rows before their first token."""
        ...

    def select(self, state: StateT, rows: Tensor) -> StateT:
        """The given rows, in that order."""
        ...

    def put(self, state: StateT, rows: Tensor, fresh: StateT) -> StateT:
        """Other rows in the given places."""
        ...

    def append(self, state: StateT, tokens: Tensor, written: Tensor) -> StateT:
        """A token (B,) behind the rows for which `written` (B,) is true; the others stay as they are."""
        ...

    def log_chance(self, state: StateT, standing: Standing, candidates: Tensor) -> Tensor:
        """log P(C | prefix ⊕ v) of each candidate v: (B, k)."""
        ...


class Fudge(Method):
    """A prefix classifier over the base's likeliest tokens."""

    name = "FUDGE"
    source = "Yang and Klein 2021"
    trained = True

    def obstacle(self, given: Provisions) -> str | None:
        """It needs texts of both kinds, and the base's embeddings."""
        if not isinstance(given.base, CausalModel | EncoderDecoderModel):
            return f"{type(given.base).__name__} has no token embeddings"
        return missing_labels(given, both=True)

    def grid(self, given: Provisions) -> list[dict[str, Any]]:
        """λ, by which the classifier's log-probability is multiplied."""
        top_k = min(TOP_K, given.base.vocabulary_size)
        return [{"top_k": top_k, "strength": strength} for strength in (1.0, 2.0, 4.0)]

    def prepare(self, given: Provisions, settings: Settings) -> System:
        """The base with its classifier."""
        network, training = given.remember("prefix classifier", lambda: train_classifier(given))
        follower = FudgeFollower(network, settings["top_k"])
        model = GuidedLanguageModel(given.base, follower, guidance=Guidance(strength=settings["strength"]))
        return Sampled(model, given.rows, training=training)


@dataclass
class _Followed:
    """Rows of the classifier, and what they were before the last token, should that be asked for again."""

    rows: Any
    before: Any = None


class FudgeFollower:
    """log R of the base's k likeliest tokens from a prefix classifier, and R = 0 for all others."""

    progress_bits = 0

    def __init__(self, classifier: PrefixClassifier[Any], top_k: int) -> None:
        self.classifier, self.top_k = classifier, top_k

    @property
    def fingerprint(self) -> str:
        """A digest of the classifier and k."""
        return f"{self.classifier.fingerprint}-{self.top_k}"

    def start(self, prompts: Sequence[str], conditions: Sequence[str]) -> _Followed:
        """Fresh rows."""
        return _Followed(self.classifier.start(prompts, conditions))

    def select(self, state: _Followed, rows: Tensor) -> _Followed:
        """The given rows, in that order."""
        before = None if state.before is None else self.classifier.select(state.before, rows)
        return _Followed(self.classifier.select(state.rows, rows), before)

    def refill(
        self, state: _Followed, rows: Tensor, prompts: Sequence[str], conditions: Sequence[str]
    ) -> _Followed:
        """Fresh rows in the given places."""
        fresh = self.classifier.start(prompts, conditions)
        return _Followed(self.classifier.put(state.rows, rows, fresh))

    @torch.no_grad()
    def log_r(self, state: _Followed, standing: Standing) -> Tensor:
        """log R where the rows stand: (B, V)."""
        state.before = state.rows
        written = standing.generated > 0
        state.rows = self.classifier.append(state.rows, standing.last_tokens.clamp(min=0), written)
        count = min(self.top_k, standing.log_p.shape[-1])
        candidates = standing.log_p.topk(count, dim=-1).indices  # (B, k)
        chances = self.classifier.log_chance(state.rows, standing, candidates)
        nothing = torch.full_like(standing.log_p, -math.inf)
        return nothing.scatter(1, candidates, chances.to(nothing.dtype))

    def rewind(self, state: _Followed) -> None:
        """Forget the last token, which will be read again."""
        if state.before is not None:
            state.rows, state.before = state.before, None


class RecurrentClassifier(torch.nn.Module):
    """A GRU over the condition and then the text; the base's token embeddings are its frozen inputs."""

    def __init__(self, embeddings: Tensor, base: Any, size: int = SIZE) -> None:
        super().__init__()
        self._base = (base,)  # in a tuple, so that its weights do not become this module's
        scaled = embeddings.float()
        self.register_buffer("embeddings", scaled / scaled.std().clamp(min=1e-6), persistent=False)
        self.project = torch.nn.Linear(embeddings.shape[1], INPUT_SIZE)
        self.mark = torch.nn.Parameter(torch.zeros(INPUT_SIZE))  # between condition and text
        self.unit = torch.nn.GRU(INPUT_SIZE, size, batch_first=True)
        self.answer = torch.nn.Linear(size, 1)

    @property
    def fingerprint(self) -> str:
        """A digest of its weights."""
        digest = hashlib.sha256()
        for value in self.state_dict().values():
            digest.update(value.cpu().numpy().tobytes())
        return digest.hexdigest()[:32]

    def read(self, tokens: Tensor) -> Tensor:
        """Inputs (…, E) of tokens (…)."""
        assert isinstance(self.embeddings, Tensor)
        found: Tensor = self.project(self.embeddings[tokens])
        return found

    def know(self, conditions: Sequence[str]) -> Tensor:
        """The hidden state after each condition and the mark: (B, size)."""
        names = list(dict.fromkeys(conditions))
        rows = self._base[0].tokenizer(names, add_special_tokens=False)["input_ids"]
        lengths = torch.tensor([len(row) + 1 for row in rows])
        device = self.mark.device
        tokens = torch.zeros(len(rows), int(lengths.max()), dtype=torch.long)
        for place, row in enumerate(rows):
            tokens[place, 1 : len(row) + 1] = torch.tensor(list(row), dtype=torch.long)
        inputs = self.read(tokens.to(device))
        # The mark comes first: a GRU needs no end mark, its state is read where the condition ends.
        inputs = torch.cat([self.mark.expand(len(rows), 1, -1), inputs[:, 1:]], dim=1)
        packed = pack_padded_sequence(inputs, lengths, batch_first=True, enforce_sorted=False)
        hidden: Tensor = self.unit(packed)[1][0]
        number = {name: place for place, name in enumerate(names)}
        return hidden[torch.tensor([number[each] for each in conditions], device=device)]

    def forward(self, conditions: Sequence[str], tokens: Tensor) -> Tensor:
        """Log-odds that the text satisfies the oracle, after each of its tokens (B, T): (B, T)."""
        states, _ = self.unit(self.read(tokens), self.know(conditions)[None].contiguous())
        found: Tensor = self.answer(states).squeeze(-1)
        return found

    # --- in decoding ----------------------------------------------------------------------------------

    @torch.no_grad()
    def start(self, prompts: Sequence[str], conditions: Sequence[str]) -> Tensor:
        """The hidden states before the first token: (B, size)."""
        return self.know(conditions)

    def select(self, state: Tensor, rows: Tensor) -> Tensor:
        """The given rows, in that order."""
        return state[rows]

    def put(self, state: Tensor, rows: Tensor, fresh: Tensor) -> Tensor:
        """Other rows in the given places."""
        return state.index_copy(0, rows, fresh)

    @torch.no_grad()
    def append(self, state: Tensor, tokens: Tensor, written: Tensor) -> Tensor:
        """A token behind the rows that have one."""
        return torch.where(written[:, None], self._turn(state, tokens[:, None])[:, 0], state)

    @torch.no_grad()
    def log_chance(self, state: Tensor, standing: Standing, candidates: Tensor) -> Tensor:
        """log P(C | prefix ⊕ v) of each candidate: (B, k)."""
        return logsigmoid(self.answer(self._turn(state, candidates)).squeeze(-1))

    def _turn(self, state: Tensor, tokens: Tensor) -> Tensor:
        """The hidden states after each of the tokens (B, k) alone: (B, k, size).

        The unit's own equations: what comes from the state is made once for all candidates.
        """
        weights: Any = self.unit
        inward = linear(self.read(tokens), weights.weight_ih_l0, weights.bias_ih_l0)
        across = linear(state, weights.weight_hh_l0, weights.bias_hh_l0)[:, None]
        reset_in, update_in, new_in = inward.chunk(3, dim=-1)
        reset_state, update_state, new_state = across.chunk(3, dim=-1)
        update = torch.sigmoid(update_in + update_state)
        fresh = torch.tanh(new_in + torch.sigmoid(reset_in + reset_state) * new_state)
        return (1 - update) * fresh + update * state[:, None]


def train_classifier(given: Provisions, size: int = SIZE) -> tuple[RecurrentClassifier, Training]:
    """A classifier of the prefixes of the labelled draws; every prefix has its text's label."""
    watch, samples = Stopwatch(), require_samples(given)
    base: Any = given.base
    network = _make(base, given.seed, size)
    optimiser = torch.optim.AdamW(network.parameters(), lr=_RATE, weight_decay=0.01)
    steps = max(1, round(_MORE_TEXTS * given.training_texts / _BATCH))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, _RATE, total_steps=steps + 1, pct_start=0.1)
    columns = _Columns.of(samples)
    texts = tokens = 0
    for rows in pick_rows(samples, steps, _BATCH, given.seed):
        loss, read = columns.loss(network, rows, base)
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        texts, tokens = texts + len(rows), tokens + read
    return network.eval(), Training(texts, tokens, watch.seconds)


def _make(base: Any, seed: int, size: int) -> RecurrentClassifier:
    """A fresh network, from the seed alone."""
    embeddings = torch.as_tensor(base.model.get_input_embeddings().weight).detach()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # not torch.manual_seed, which seeds GPUs for good
        network = RecurrentClassifier(embeddings.cpu(), base, size)
    return network.to(base.device)


@dataclass(frozen=True)
class _Columns:
    """Labelled texts as the loss takes them."""

    tokens: Any
    conditions: list[str]
    satisfied: Tensor
    weights: Tensor

    @classmethod
    def of(cls, samples: Samples) -> "_Columns":
        satisfied = torch.from_numpy(samples.array("satisfied").astype(np.float32))
        return cls(samples.ragged("tokens"), samples.strings("condition"), satisfied, text_weights(samples))

    def loss(self, network: RecurrentClassifier, rows: list[int], base: Any) -> tuple[Tensor, int]:
        own = [self.tokens.row(row).tolist() for row in rows]
        lengths = torch.tensor([len(row) for row in own])
        padded = torch.full((len(rows), int(lengths.max())), base.eos_id)
        for place, row in enumerate(own):
            padded[place, : len(row)] = torch.tensor(row)
        log_odds = network([self.conditions[row] for row in rows], padded.to(base.device))
        inside = torch.arange(padded.shape[1])[None, :] < lengths[:, None]
        weights = (self.weights[rows][:, None] * inside).to(log_odds.device)
        labels = self.satisfied[rows][:, None].to(log_odds.device).expand_as(log_odds)
        terms = binary_cross_entropy_with_logits(log_odds, labels, reduction="none")
        return (terms * weights).sum() / weights.sum(), int(lengths.sum())
