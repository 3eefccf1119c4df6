"""Language models small enough to enumerate: exact R, exact q*, exact expectations.

A `TabularModel` follows the same protocol as a real model, with one row of probabilities for every prefix,
so what is proved here about drawing, guiding and weighting holds for the very code that real models run.

Prefixes are numbered as in a heap: 0 is the empty one, and letter v after prefix j gives n·j + 1 + v, where
n = V − 1 is the number of letters. The N prefixes of fewer than L letters come first; the n^L of exactly L
letters follow. The same numbers name the M = N + n^L texts that p can write, the *outcomes*: number j < N is
prefix j ended by EOS, number j ≥ N is a text cut at L.

All tables are float64; `log_p` of a state is float32 as the protocol says, `log_p_exact` is not rounded.

`python -m nado.exact` prints an example.
"""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nado.decomposition import guided_distribution, log_difference
from nado.errors import InputError, OracleError
from nado.language_model import Completion
from nado.objective import label_finished

MAX_VOCABULARY = 8
MAX_LENGTH = 6

# A prompt, or a prompt and a condition where the model reads both.
Key = str | tuple[str, str]
# Conditions and texts to one boolean each.
AnyOracle = Callable[[Sequence[str], Sequence[str]], Any]


@dataclass(frozen=True)
class TabularState:
    """Which table each row reads and at which prefix it stands; prefix N stands for an ended row."""

    tables: Tensor  # (K, N + 1, V), shared
    table: Tensor  # (B,)
    prefix: Tensor  # (B,)

    @property
    def log_p_exact(self) -> Tensor:
        """Next-token log-probabilities in float64: (B, V)."""
        return self.tables[self.table, self.prefix]

    @property
    def log_p(self) -> Tensor:
        """Next-token log-probabilities as the protocol gives them, float32: (B, V)."""
        return self.log_p_exact.float()


@dataclass(frozen=True)
class Outcomes:
    """Every text a tabular model can write, in heap order, with its probability (which may be 0)."""

    tokens: Tensor  # (M, L), EOS at the padding
    lengths: Tensor  # (M,), EOS included
    ended: Tensor  # (M,): whether the text ends itself
    texts: list[str]
    log_p: Tensor  # (M,), float64


class TabularModel:
    """A language model given by one table of log-probabilities (N, V) for each prompt.

    Letters are tokens 0 … V − 2 and decode to "a", "b", …; EOS is token V − 1. A table may be keyed by
    (prompt, condition) where the model reads a condition too, as a guided model does.
    """

    def __init__(
        self, tables: Mapping[Key, Tensor], *, length_limit: int, completion: Completion = "eos"
    ) -> None:
        _require_tables(tables, length_limit, completion)
        self._number = {key: number for number, key in enumerate(tables)}
        stacked = torch.stack([torch.as_tensor(table, dtype=torch.float64) for table in tables.values()])
        self._vocabulary_size = stacked.shape[-1]
        self._length_limit = length_limit
        self._completion: Completion = completion
        # One more row, for rows that have ended: they write EOS for ever.
        ended = stacked.new_full((len(tables), 1, stacked.shape[-1]), -math.inf)
        ended[..., -1] = 0.0
        self._tables = torch.cat([stacked, ended], dim=1)  # (K, N + 1, V)

    @classmethod
    def random(
        cls,
        prompts: Sequence[Key] = ("",),
        *,
        vocabulary_size: int = 4,
        length_limit: int = 3,
        completion: Completion = "eos",
        seed: int = 0,
        zeros: float = 0.0,
    ) -> "TabularModel":
        """A model with random tables; a share `zeros` of the entries is impossible (−inf)."""
        _require_size(vocabulary_size, length_limit)
        generator = torch.Generator().manual_seed(seed)
        shape = (prefix_count(vocabulary_size, length_limit), vocabulary_size)
        tables: dict[Key, Tensor] = {}
        for prompt in prompts:
            logits = 1.5 * torch.randn(shape, generator=generator, dtype=torch.float64)
            removed = torch.rand(shape, generator=generator) < zeros
            kept = torch.randint(shape[1], (shape[0], 1), generator=generator)  # a row needs one entry
            logits = logits.masked_fill(removed.scatter(1, kept, False), -math.inf)
            tables[prompt] = torch.log_softmax(logits, dim=-1)
        return cls(tables, length_limit=length_limit, completion=completion)

    @classmethod
    def from_function(
        cls,
        next_token: Callable[[str, str], Sequence[float]],
        prompts: Sequence[str] = ("",),
        *,
        length_limit: int,
        completion: Completion = "eos",
    ) -> "TabularModel":
        """A model from a function of (prompt, prefix text) that gives a weight to each letter and to EOS."""
        vocabulary_size = len(next_token(prompts[0], ""))
        _require_size(vocabulary_size, length_limit)
        texts = prefix_texts(vocabulary_size, length_limit)[: prefix_count(vocabulary_size, length_limit)]
        tables: dict[Key, Tensor] = {}
        for prompt in prompts:
            rows = torch.tensor([list(next_token(prompt, text)) for text in texts], dtype=torch.float64)
            tables[prompt] = torch.log(rows) - torch.log(rows.sum(dim=-1, keepdim=True))
        return cls(tables, length_limit=length_limit, completion=completion)

    @property
    def vocabulary_size(self) -> int:
        """V, EOS included."""
        return self._vocabulary_size

    @property
    def eos_id(self) -> int:
        """The last token."""
        return self._vocabulary_size - 1

    @property
    def length_limit(self) -> int:
        """L."""
        return self._length_limit

    @property
    def completion(self) -> Completion:
        """What a text cut at L counts as."""
        return self._completion

    @property
    def device(self) -> torch.device:
        """Always the CPU."""
        return self._tables.device

    @property
    def fingerprint(self) -> str:
        """A digest of the tables, the limit and the mode."""
        digest = hashlib.sha256(f"{list(self._number)} {self._length_limit} {self._completion}".encode())
        digest.update(self._tables.numpy().tobytes())
        return digest.hexdigest()

    @property
    def keys(self) -> list[Key]:
        """The prompts, or pairs of prompt and condition, that have a table."""
        return list(self._number)

    def table(self, prompt: str, condition: str | None = None) -> Tensor:
        """log p(v | prompt, prefix) for every prefix, float64: (N, V)."""
        return self._tables[self._locate(prompt, condition), :-1]

    def start(self, prompts: Sequence[str], conditions: Sequence[str] | None = None) -> TabularState:
        """The state before the first token of each row."""
        pairs = zip(prompts, prompts if conditions is None else conditions, strict=True)
        table = torch.tensor([self._locate(*pair) for pair in pairs], dtype=torch.long)
        return TabularState(self._tables, table, torch.zeros_like(table))

    def step(self, state: TabularState, tokens: Tensor) -> TabularState:
        """Append `tokens` (B,) to the rows."""
        prefixes = self._tables.shape[1] - 1  # N
        child = self.eos_id * state.prefix + 1 + tokens
        over = (state.prefix == prefixes) | (tokens == self.eos_id) | (child >= prefixes)
        return replace(state, prefix=torch.where(over, prefixes, child))

    def select(self, state: TabularState, rows: Tensor) -> TabularState:
        """The state of the given rows, in that order."""
        return replace(state, table=state.table[rows], prefix=state.prefix[rows])

    def refill(
        self,
        state: TabularState,
        rows: Tensor,
        prompts: Sequence[str],
        conditions: Sequence[str] | None = None,
    ) -> TabularState:
        """Put a fresh start of `prompts` into `rows`."""
        fresh = self.start(prompts, conditions)
        return replace(
            state,
            table=state.table.index_copy(0, rows, fresh.table),
            prefix=state.prefix.index_copy(0, rows, fresh.prefix),
        )

    def score(
        self, prompts: Sequence[str], tokens: Tensor, lengths: Tensor, conditions: Sequence[str] | None = None
    ) -> Tensor:
        """Teacher-forced log p of each token, float32 (B, T), 0 from `lengths` on."""
        return self.score_exact(prompts, tokens, lengths, conditions).float()

    def score_exact(
        self, prompts: Sequence[str], tokens: Tensor, lengths: Tensor, conditions: Sequence[str] | None = None
    ) -> Tensor:
        """`score` in float64."""
        state = self.start(prompts, conditions)
        columns = []
        for position in range(tokens.shape[1]):
            token = torch.where(position < lengths, tokens[:, position], self.eos_id)
            chosen = state.log_p_exact.gather(1, token.unsqueeze(1)).squeeze(1)
            columns.append(torch.where(position < lengths, chosen, 0.0))
            state = self.step(state, token)
        return torch.stack(columns, dim=1) if columns else torch.zeros(tokens.shape, dtype=torch.float64)

    def decode(self, tokens: Sequence[Sequence[int]]) -> list[str]:
        """Letters, and nothing for EOS."""
        return ["".join(chr(ord("a") + int(t)) for t in row if int(t) != self.eos_id) for row in tokens]

    def outcomes(self, prompt: str, condition: str | None = None) -> Outcomes:
        """Every text with its probability; they sum to 1."""
        table = self.table(prompt, condition)
        tokens, lengths = _outcome_tokens(self._vocabulary_size, self._length_limit)
        texts = prefix_texts(self._vocabulary_size, self._length_limit)
        ended = torch.arange(len(texts)) < len(table)
        return Outcomes(tokens, lengths, ended, texts, outcome_log_p(table))

    def _locate(self, prompt: str, condition: str | None) -> int:
        pair = (prompt, prompt if condition is None else condition)
        key: Key = pair if pair in self._number else prompt
        if key not in self._number:
            raise InputError(
                f"one of the prompts this model has a table for: {self.keys[:8]}",
                f"{pair if pair[0] != pair[1] else prompt!r}",
                "Make the model with a table for every prompt you ask it about.",
            )
        return self._number[key]


# --- numbering ----------------------------------------------------------------------------------------


def prefix_count(vocabulary_size: int, length_limit: int) -> int:
    """N: the number of prefixes of fewer than L letters."""
    return sum((vocabulary_size - 1) ** depth for depth in range(length_limit))


def prefix_texts(vocabulary_size: int, length_limit: int) -> list[str]:
    """The text of each of the M prefixes of at most L letters, in heap order."""
    letters = [chr(ord("a") + number) for number in range(vocabulary_size - 1)]
    texts = [""]
    for number in range(prefix_count(vocabulary_size, length_limit)):
        texts.extend(texts[number] + letter for letter in letters)
    return texts


def _outcome_tokens(vocabulary_size: int, length_limit: int) -> tuple[Tensor, Tensor]:
    """Tokens (M, L), padded with EOS, and lengths (M,) of every outcome."""
    texts = prefix_texts(vocabulary_size, length_limit)
    tokens = torch.full((len(texts), length_limit), vocabulary_size - 1)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = torch.tensor([ord(letter) - ord("a") for letter in text], dtype=torch.long)
    lengths = torch.tensor([min(len(text) + 1, length_limit) for text in texts])
    return tokens, lengths


def _levels(table: Tensor) -> list[tuple[int, int]]:
    """The range of prefix numbers of each number of letters, 0 first."""
    letters = table.shape[1] - 1
    levels, start, width = [], 0, 1
    while start < len(table):
        levels.append((start, start + width))
        start, width = start + width, width * letters
    return levels


# --- enumeration --------------------------------------------------------------------------------------


def outcome_log_p(table: Tensor) -> Tensor:
    """log p of every outcome from a table (N, V): (M,)."""
    arrive = _arrival_log_p(table)
    ending = torch.cat([table[:, -1], table.new_zeros(len(arrive) - len(table))])  # a cut text has no EOS
    return arrive + ending


def prefix_log_p(table: Tensor) -> Tensor:
    """log p of arriving at each prefix of fewer than L letters: (N,)."""
    return _arrival_log_p(table)[: len(table)]


def _arrival_log_p(table: Tensor) -> Tensor:
    """log p of arriving at each prefix of at most L letters: (M,)."""
    arrive = [table.new_zeros(1)]
    for start, stop in _levels(table):
        arrive.append((arrive[-1].unsqueeze(1) + table[start:stop, :-1]).flatten())
    return torch.cat(arrive)


def propagate(table: Tensor, log_terminal: Tensor) -> Tensor:
    """Terminal values (M,) back through p: log of E_p[value | prefix ⊕ v] for all prefixes and v, (N, V).

    This is Eq. 6 used as a definition, from the longest prefixes to the empty one.
    """
    letters = table.shape[1] - 1
    value = log_terminal.clone()  # (M,): a cut text is worth its terminal value
    log_r = torch.empty_like(table)
    log_r[:, -1] = log_terminal[: len(table)]
    for start, stop in reversed(_levels(table)):
        log_r[start:stop, :letters] = value[letters * start + 1 : letters * stop + 1].view(-1, letters)
        value[start:stop] = torch.logsumexp(table[start:stop] + log_r[start:stop], dim=-1)
    return log_r


def satisfied_outcomes(
    model: TabularModel, oracle: AnyOracle, prompt: str, condition: str | None = None
) -> Tensor:
    """C of every outcome: the oracle's answer, and False for a text cut under completion "eos": (M,)."""
    texts = prefix_texts(model.vocabulary_size, model.length_limit)
    answers = np.asarray(oracle([prompt if condition is None else condition] * len(texts), texts))
    if answers.shape != (len(texts),) or answers.dtype != np.bool_:
        raise OracleError(
            f"one boolean for each of {len(texts)} texts",
            f"an array of shape {answers.shape} and type {answers.dtype}",
            "Return a list or array of bool, one for each text.",
        )
    ended = torch.arange(len(texts)) < prefix_count(model.vocabulary_size, model.length_limit)
    return label_finished(torch.from_numpy(answers.copy()), ended, model.completion)


def finish_log_r(model: TabularModel, prompt: str, condition: str | None = None) -> Tensor:
    """Exact log R_F, the chance that a text is finished: 0 under completion "limit"; (N, V)."""
    return exact_log_r(model, lambda _, texts: [True] * len(texts), prompt, condition)


def exact_log_r(model: TabularModel, oracle: AnyOracle, prompt: str, condition: str | None = None) -> Tensor:
    """Exact log R(x, prefix ⊕ v) = log Pr_p[C = 1 | prefix ⊕ v], at every prefix and for every v: (N, V)."""
    satisfied = satisfied_outcomes(model, oracle, prompt, condition)
    log_terminal = torch.where(satisfied, 0.0, -math.inf).double()
    return propagate(model.table(prompt, condition), log_terminal)


def exact_log_r_start(
    model: TabularModel, oracle: AnyOracle, prompt: str, condition: str | None = None
) -> Tensor:
    """Exact log R(x) by plain summation over the satisfied texts: a scalar."""
    satisfied = satisfied_outcomes(model, oracle, prompt, condition)
    log_p = model.outcomes(prompt, condition).log_p
    return torch.logsumexp(torch.where(satisfied, log_p, -math.inf), dim=0)


def exact_log_q(model: TabularModel, oracle: AnyOracle, prompt: str, condition: str | None = None) -> Tensor:
    """log q*(y | x) = log (p·C / R(x)) of every outcome, straight from its definition (Eq. 3): (M,).

    All −inf when R(x) = 0: there is no q* then.
    """
    satisfied = satisfied_outcomes(model, oracle, prompt, condition)
    log_joint = torch.where(satisfied, model.outcomes(prompt, condition).log_p, -math.inf)
    return log_difference(log_joint, torch.logsumexp(log_joint, dim=0))


def conditionals(log_joint: Tensor, vocabulary_size: int, length_limit: int) -> Tensor:
    """Next-token conditionals of any joint distribution over outcomes (M,), by summing it up: (N, V).

    Rows of prefixes that the joint never reaches are all −inf.
    """
    prefixes = prefix_count(vocabulary_size, length_limit)
    flat = log_joint.new_zeros(prefixes, vocabulary_size)
    mass = propagate(flat, log_joint)  # Σ over completions of each prefix ⊕ v: p = 1 makes it a plain sum
    return log_difference(mass, torch.logsumexp(mass, dim=-1, keepdim=True).expand_as(mass))


def guided_model(model: TabularModel, log_r: Mapping[tuple[str, str], Tensor]) -> TabularModel:
    """The model with log R tables (N, V) multiplied in, one a (prompt, condition): q is a model too."""
    tables: dict[Key, Tensor] = {
        key: guided_distribution(model.table(*key), factor).log_q for key, factor in log_r.items()
    }
    return TabularModel(tables, length_limit=model.length_limit, completion=model.completion)


def exact_model(model: TabularModel, oracle: AnyOracle, pairs: Sequence[tuple[str, str]]) -> TabularModel:
    """q* as a language model, for the given pairs of prompt and condition."""
    return guided_model(model, {pair: exact_log_r(model, oracle, *pair) for pair in pairs})


def tempered_model(model: TabularModel, temperature: float) -> TabularModel:
    """The model with every next-token distribution flattened (temperature above 1) or sharpened."""
    if not temperature > 0:
        raise InputError("a temperature above 0", f"{temperature:g}", "Use 1 for the model as it is.")
    tables: dict[Key, Tensor] = {}
    for key in model.keys:
        table = model.table(*key) if isinstance(key, tuple) else model.table(key)
        tables[key] = torch.log_softmax(table / temperature, dim=-1)
    return TabularModel(tables, length_limit=model.length_limit, completion=model.completion)


# --- what to read off ---------------------------------------------------------------------------------


def expectation(log_p: Tensor, values: Tensor) -> Tensor:
    """Σ p · values over outcomes, where a text of probability 0 adds nothing whatever its value."""
    return torch.where(torch.isneginf(log_p), 0.0, log_p.exp() * values).sum()


def kl_divergence(log_a: Tensor, log_b: Tensor) -> Tensor:
    """KL(a ‖ b) over outcomes; infinite where a has mass and b has none."""
    return expectation(log_a, log_a - log_b)


def log_delta(table: Tensor, log_r_hat: Tensor, log_r: Tensor) -> Tensor:
    """ln δ = max |log R̂ − log R| over {R > 0}, the distance of the lemmas; the empty prefix counts too."""
    start_hat, start = (torch.logsumexp(table[0] + values[0], dim=0) for values in (log_r_hat, log_r))
    every_hat = torch.cat([log_r_hat.flatten(), start_hat.unsqueeze(0)])
    every = torch.cat([log_r.flatten(), start.unsqueeze(0)])
    positive = ~torch.isneginf(every)
    return (every_hat[positive] - every[positive]).abs().max()


def kl_bound(delta: Tensor, length_limit: int | None = None) -> Tensor:
    """The most KL(q* ‖ q) can be at distance ln δ = `delta`: (2L + 2) ln δ (Lemma 1).

    Without a length limit: 2 ln δ, for an R̂ that satisfies Eq. 6 (Lemma 2).
    """
    return 2 * delta if length_limit is None else (2 * length_limit + 2) * delta


def log_kept_mass(table: Tensor, log_r_hat: Tensor, log_r: Tensor) -> Tensor:
    """log(1 − leak) of each prefix, (N,): the share of q̂'s next step that stays on {R > 0}.

    A sigmoid is never 0, so q̂ leaks mass to texts that q* never writes. δ, taken on {R > 0}, does not see
    it: Lemma 1 gains the term −E_q*[Σ_i log(1 − leak_i)].
    """
    log_q, _ = guided_distribution(table, log_r_hat)
    return torch.logsumexp(torch.where(torch.isneginf(log_r), -math.inf, log_q), dim=-1)


# --- checks of arguments ------------------------------------------------------------------------------


def _require_size(vocabulary_size: int, length_limit: int) -> None:
    if not 2 <= vocabulary_size <= MAX_VOCABULARY or not 1 <= length_limit <= MAX_LENGTH:
        raise InputError(
            f"2 to {MAX_VOCABULARY} tokens, EOS included, and a length limit of 1 to {MAX_LENGTH}",
            f"{vocabulary_size} tokens and a limit of {length_limit}",
            "Tables grow as V^L: use a smaller model, or a real one.",
        )


def _require_tables(tables: Mapping[Key, Tensor], length_limit: int, completion: Completion) -> None:
    if not tables:
        raise InputError(
            "a table for at least one prompt", "none", 'Use the prompt "" for a model without one.'
        )
    if completion not in ("eos", "limit"):
        raise InputError('completion "eos" or "limit"', f"{completion!r}", "See nado.language_model.")
    for key, given in tables.items():
        table = torch.as_tensor(given, dtype=torch.float64)
        _require_size(table.shape[-1], length_limit)
        shape = (prefix_count(table.shape[-1], length_limit), table.shape[-1])
        if table.shape != shape:
            raise InputError(
                f"a table of shape {shape} for prompt {key!r}: one row for each prefix",
                f"shape {tuple(table.shape)}",
                "Rows are prefixes in heap order, columns are letters and then EOS.",
            )
        error = torch.logsumexp(table, dim=-1).abs().max()
        if not bool(error < 1e-6):
            raise InputError(
                f"log-probabilities that sum to 1 in each row of the table for prompt {key!r}",
                f"a row whose log-sum is off by {float(error):g}",
                "Apply torch.log_softmax to the last dimension.",
            )


if __name__ == "__main__":
    from nado.exact_example import print_example

    print_example()
