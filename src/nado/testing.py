"""Contracts you can run on your own classes: does it keep what nado's mathematics assumes of it?

    from nado.testing import check_language_model, check_oracle
    check_language_model(my_model, ["a prompt", "another, longer prompt"])
    check_oracle(my_oracle, conditions, texts)

Each check raises an error that says what was expected, what was found and what to do; silence means that
nothing wrong was seen. A model is asked for a few short texts, drawn with a generator of our own.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from nado.errors import InputError, MismatchError
from nado.language_model import LanguageModel, Refillable, Sampling, State
from nado.oracles.checking import check_oracle

__all__ = ["check_language_model", "check_oracle"]

TOLERANCE = 1e-3
MAX_STEPS = 8


def check_language_model(
    model: LanguageModel[Any],
    prompts: Sequence[str],
    conditions: Sequence[str] | None = None,
    *,
    tolerance: float = TOLERANCE,
    max_steps: int = MAX_STEPS,
    seed: int = 0,
) -> None:
    """Raise an error if `model` breaks the contract of `LanguageModel` on `prompts`; return None if not.

    Give at least two prompts of different lengths: padding mistakes show only then. `tolerance` is on
    log-probabilities; loosen it for low-precision models whose batched kernels round differently.
    """
    prompts = _require_prompts(prompts)
    _check_attributes(model)
    _check_global_generator(lambda: model.start(prompts, conditions))
    _check_arguments_unchanged(model, prompts, conditions)
    drawn = _Draw(model, prompts, conditions, max_steps, seed)
    _check_repeatable(model, drawn, tolerance)
    _check_default_conditions(model, prompts, tolerance)
    _check_single_rows(model, drawn, tolerance)
    _check_select(model, drawn, tolerance)
    _check_score(model, drawn, tolerance)
    # Not isinstance: in Python 3.11 that reads every property of the protocol, a digest of weights included.
    if callable(getattr(model, "refill", None)) and getattr(model, "refillable", True):
        _check_refill(cast(Refillable[Any], model), drawn, tolerance)
    if callable(getattr(model, "sample", None)):
        _check_sample(cast(Sampling[Any], model), drawn, tolerance)
    _check_decode(model, drawn)


class _Draw:
    """One batch of short texts drawn from the model, with the distribution of every step.

    The first row is made to end half-way where it can.
    """

    def __init__(
        self,
        model: LanguageModel[Any],
        prompts: list[str],
        conditions: Sequence[str] | None,
        max_steps: int,
        seed: int,
    ) -> None:
        self.prompts, self.conditions = prompts, None if conditions is None else list(conditions)
        generator = torch.Generator().manual_seed(seed)
        state = model.start(prompts, self.conditions)
        ended = torch.zeros(len(prompts), dtype=torch.bool)
        tokens, steps, lengths = [], [], torch.zeros(len(prompts), dtype=torch.long)
        total = min(max_steps, model.length_limit)
        for position in range(total):
            log_p = state.log_p
            _check_distribution(model, log_p, len(prompts), position, ~ended)
            chosen = _sample(log_p, ended, model.eos_id, generator)
            if position == total // 2 and len(prompts) > 1 and bool(log_p[0, model.eos_id] > -torch.inf):
                chosen[0] = model.eos_id  # a real model seldom ends this early, and an ended row must be seen
            steps.append(log_p.detach().cpu().clone())
            tokens.append(chosen)
            lengths = lengths + (~ended).long()
            ended = ended | (chosen == model.eos_id)
            if position + 1 < total:
                state = _step(model, state, chosen.to(model.device))
        self.tokens = torch.stack(tokens, dim=1)  # (B, T)
        self.log_p = torch.stack(steps, dim=1)  # (B, T, V)
        self.lengths = lengths  # (B,)
        self.live = torch.arange(self.tokens.shape[1]) < lengths.unsqueeze(1)  # (B, T)

    def replay(self, model: LanguageModel[Any], rows: list[int], steps: int) -> Any:
        """The state of some rows of this draw, started on their own, after the first `steps` tokens."""
        conditions = None if self.conditions is None else [self.conditions[row] for row in rows]
        state = model.start([self.prompts[row] for row in rows], conditions)
        for position in range(steps):
            state = model.step(state, self.tokens[rows, position].to(model.device))
        return state


# --- single checks ------------------------------------------------------------------------------------


def _require_prompts(prompts: Sequence[str]) -> list[str]:
    if isinstance(prompts, str) or not prompts:
        raise InputError(
            "a list of prompts", f"{prompts!r}", 'Give a list of strings, such as ["a prompt", "another"].'
        )
    return list(prompts)


def _check_attributes(model: LanguageModel[Any]) -> None:
    missing = [name for name in _MEMBERS if not hasattr(model, name)]
    if missing:
        raise InputError(
            "a model with all members of nado.language_model.LanguageModel",
            f"{type(model).__name__} without {', '.join(missing)}",
            "Add them; the docstrings of the protocol say what each one means.",
        )
    for name, wanted, holds in _CLAIMS:
        if not holds(model):
            raise InputError(
                f"{name} to be {wanted}",
                f"{getattr(model, name)!r}",
                f"Correct {type(model).__name__}.{name}.",
            )
    if model.fingerprint != model.fingerprint:  # two calls: a digest of a time or a counter shows here
        raise MismatchError(
            "the same fingerprint each time it is read",
            "two that differ",
            "Digest only what defines p: weights, warpers, limit, completion, tokenizer.",
        )


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


_MEMBERS = (
    *("vocabulary_size", "eos_id", "length_limit", "completion", "device", "fingerprint"),
    *("start", "step", "select", "score", "decode"),
)

# In this order: a later claim may lean on an earlier one.
_CLAIMS: tuple[tuple[str, str, Callable[[LanguageModel[Any]], bool]], ...] = (
    (
        "vocabulary_size",
        "an int of 2 or more",
        lambda m: _is_int(m.vocabulary_size) and m.vocabulary_size >= 2,
    ),
    (
        "eos_id",
        "a token of the vocabulary",
        lambda m: _is_int(m.eos_id) and 0 <= m.eos_id < m.vocabulary_size,
    ),
    ("length_limit", "an int of 1 or more", lambda m: _is_int(m.length_limit) and m.length_limit >= 1),
    ("completion", '"eos" or "limit"', lambda m: m.completion in ("eos", "limit")),
    ("device", "a torch.device", lambda m: isinstance(m.device, torch.device)),
    ("fingerprint", "a string, not empty", lambda m: isinstance(m.fingerprint, str) and m.fingerprint != ""),
)


def _check_distribution(
    model: LanguageModel[Any], log_p: object, rows: int, position: int, live: Tensor
) -> None:
    where = f"log_p of step {position + 1}"
    shape = (rows, model.vocabulary_size)
    if not isinstance(log_p, Tensor) or log_p.shape != shape or log_p.dtype != torch.float32:
        found = f"{tuple(log_p.shape)} in {log_p.dtype}" if isinstance(log_p, Tensor) else f"a {type(log_p)}"
        raise InputError(
            f"{where} to be a tensor of shape {shape} in torch.float32",
            found,
            "Return log_softmax(logits.float(), dim=-1) for each row, whatever the weights' type.",
        )
    if log_p.device.type != model.device.type:
        raise InputError(
            f"{where} on {model.device}", f"{log_p.device}", "Return it on the device the model names."
        )
    values = log_p.detach().cpu()[live]
    if bool(torch.isnan(values).any()) or bool((values > TOLERANCE).any()):
        raise InputError(
            f"{where} to hold log-probabilities, ≤ 0 and never nan",
            "nan" if bool(torch.isnan(values).any()) else f"{float(values.max()):g}",
            "Write −inf for an impossible token and normalise after the warpers.",
        )
    sums = torch.logsumexp(values, dim=-1)
    if not bool((sums.abs() < TOLERANCE).all()):
        raise InputError(
            f"{where} to sum to 1",
            f"a row that sums to {float(sums.exp()[sums.abs().argmax()]):.4g}",
            "Apply log_softmax after all warpers, and fold other EOS ids into eos_id, do not drop them.",
        )


def _check_global_generator(call: Callable[[], object]) -> None:
    before = torch.get_rng_state()
    call()
    if not torch.equal(before, torch.get_rng_state()):
        raise MismatchError(
            "the global random state of torch to be left alone",
            "that start changed it",
            "Use a torch.Generator of your own, or call eval() if dropout is on.",
        )


def _check_arguments_unchanged(
    model: LanguageModel[Any], prompts: list[str], conditions: Sequence[str] | None
) -> None:
    given = list(prompts)
    tokens = torch.full((len(given), 1), model.eos_id, device=model.device)
    lengths = torch.ones(len(given), dtype=torch.long, device=model.device)
    model.score(given, tokens, lengths, conditions)
    _step(model, model.start(given, conditions), tokens[:, 0])
    intact = bool((tokens == model.eos_id).all()) and bool((lengths == 1).all())
    if given != prompts or not intact:
        name = "prompts" if given != prompts else "tokens or lengths"
        raise MismatchError(
            "arguments to come back unchanged",
            f"other {name} after start, step or score",
            "Copy an argument before you change it.",
        )


def _step(model: LanguageModel[Any], state: State, tokens: Tensor) -> Any:
    """`step`, and a check that it left the tokens alone."""
    given = tokens.clone()
    following = model.step(state, tokens)
    if not torch.equal(given, tokens):
        raise MismatchError(
            "arguments to come back unchanged",
            "other tokens after step",
            "Copy an argument before you change it.",
        )
    return following


def _check_repeatable(model: LanguageModel[Any], drawn: _Draw, tolerance: float) -> None:
    again = model.start(drawn.prompts, drawn.conditions).log_p
    _require_close(
        again,
        drawn.log_p[:, 0],
        tolerance,
        "the same log_p from two starts on the same prompts",
        "Call eval() on the network: dropout is part of no p. State must be passed, not held.",
    )


def _check_default_conditions(model: LanguageModel[Any], prompts: list[str], tolerance: float) -> None:
    try:
        implied, said = model.start(prompts).log_p, model.start(prompts, prompts).log_p
    except InputError:
        return  # a model that needs conditions other than its prompts says so itself
    _require_close(
        implied,
        said,
        tolerance,
        "start(prompts) to mean start(prompts, conditions=prompts)",
        "Treat conditions=None as the prompts.",
    )


def _check_single_rows(model: LanguageModel[Any], drawn: _Draw, tolerance: float) -> None:
    for row in range(len(drawn.prompts)):
        steps = int(drawn.lengths[row])
        state = drawn.replay(model, [row], 0)
        for position in range(steps):
            _require_close(
                state.log_p,
                drawn.log_p[row : row + 1, position],
                tolerance,
                f"row {row} alone to have the log_p it has in the batch, at step {position + 1}",
                "Look at padding, position ids and attention masks; ended rows must not touch the others.",
            )
            if position + 1 < steps:
                state = model.step(state, drawn.tokens[row : row + 1, position].to(model.device))


def _check_select(model: LanguageModel[Any], drawn: _Draw, tolerance: float) -> None:
    number, steps = len(drawn.prompts), drawn.tokens.shape[1]
    everyone = list(range(number))
    rows = [number - 1, 0, 0, *everyone[1:-1]]  # reordered, one repeated; and below, all but one dropped
    for kept in (rows, [number - 1]):
        for before in {0, steps // 2}:
            chosen = torch.tensor(kept, device=model.device)
            state = model.select(drawn.replay(model, everyone, before), chosen)
            if chosen.tolist() != kept:
                raise MismatchError(
                    "arguments to come back unchanged", "other rows after select", "Copy an argument first."
                )
            _follow(model, drawn, state, kept, before, tolerance, _SELECT_HINT)


_SELECT_HINT = (
    "select must move everything a row owns, caches, masks and positions, and copy what it repeats."
)


def _check_refill(model: Refillable[Any], drawn: _Draw, tolerance: float) -> None:
    """Put prompt 0 into the last row half-way: it must start anew, and the others must go on."""
    number, before = len(drawn.prompts), drawn.tokens.shape[1] // 2
    last = number - 1
    state = drawn.replay(model, list(range(number)), before)
    conditions = None if drawn.conditions is None else drawn.conditions[:1]
    state = model.refill(state, torch.tensor([last], device=model.device), drawn.prompts[:1], conditions)
    hint = "refill must reset all a row owns and leave the other rows alone."
    for position in range(before, drawn.tokens.shape[1]):
        for row in range(number):
            source, column = (0, position - before) if row == last else (row, position)
            if column < int(drawn.lengths[source]):
                _require_close(
                    state.log_p[row : row + 1],
                    drawn.log_p[source : source + 1, column],
                    tolerance,
                    f"row {row} to have the log_p of its own text {position - before} steps after a refill",
                    hint,
                )
        if position + 1 < drawn.tokens.shape[1]:
            place = drawn.tokens[:, position].clone()
            place[last] = drawn.tokens[0, position - before]
            state = model.step(state, place.to(model.device))


def _follow(
    model: LanguageModel[Any],
    drawn: _Draw,
    state: Any,
    rows: list[int],
    start: int,
    tolerance: float,
    hint: str,
) -> None:
    """Step a state of the given rows along their texts and compare with what was drawn."""
    for position in range(start, drawn.tokens.shape[1]):
        live = drawn.live[rows, position]
        _require_close(
            state.log_p.detach().cpu()[live],
            drawn.log_p[rows, position][live],
            tolerance,
            f"rows {rows} to have the log_p of their own texts {position - start} steps after select",
            hint,
        )
        if position + 1 < drawn.tokens.shape[1]:
            state = model.step(state, drawn.tokens[rows, position].to(model.device))


def _check_score(model: LanguageModel[Any], drawn: _Draw, tolerance: float) -> None:
    """Whole texts, and the same ones called shorter than they are: what lies behind a length is padding."""
    shorter = torch.minimum(drawn.lengths, 1 + torch.arange(len(drawn.lengths)) % drawn.tokens.shape[1])
    for lengths in (drawn.lengths, shorter):
        live = torch.arange(drawn.tokens.shape[1]) < lengths.unsqueeze(1)
        for filler in (model.eos_id, (model.eos_id + 1) % model.vocabulary_size):
            tokens = torch.where(live, drawn.tokens, filler).to(model.device)
            scores = model.score(drawn.prompts, tokens, lengths.to(model.device), drawn.conditions)
            _check_scores(scores, drawn, live, tolerance)


def _check_scores(scores: Tensor, drawn: _Draw, live: Tensor, tolerance: float) -> None:
    if scores.shape != live.shape or scores.dtype != torch.float32:
        raise InputError(
            f"score to return a tensor of shape {tuple(live.shape)} in torch.float32",
            f"{tuple(scores.shape)} in {scores.dtype}",
            "Return one log-probability for each token given.",
        )
    scores = scores.detach().cpu()
    if bool(scores[~live].any()):
        raise InputError(
            "score to be 0 from each row's length on",
            f"{float(scores[~live].abs().max()):g}",
            "Multiply by a mask made from lengths, not from a padding token: EOS may pad and may end.",
        )
    expected = drawn.log_p.gather(-1, drawn.tokens.unsqueeze(-1)).squeeze(-1)
    _require_close(
        scores[live],
        expected[live],
        tolerance,
        "score to agree with start and step, token by token, whatever stands in the padding",
        "Shift by one: the score of a token is read from the distribution before it; EOS has one too.",
    )


def _check_sample(model: Sampling[Any], drawn: _Draw, tolerance: float) -> None:
    """The quick way to sample reports the log p of the token it took."""
    number = len(drawn.prompts)
    for share in (0.05, 0.5, 0.95):
        noise = torch.full((number,), share, device=model.device)
        tokens, log_p = model.sample(drawn.replay(model, list(range(number)), 0), noise)
        if tokens.shape != (number,) or log_p.shape != (number,):
            raise InputError(
                f"sample to return tokens and their log p, of shape ({number},) each",
                f"{tuple(tokens.shape)} and {tuple(log_p.shape)}",
                "Return one token a row.",
            )
        _require_close(
            log_p,
            drawn.log_p[:, 0].gather(1, tokens.detach().cpu().long().unsqueeze(1)).squeeze(1),
            tolerance,
            "sample to report the log p of the token it took",
            "Read it from the same distribution as log_p, after the warpers.",
        )


def _check_decode(model: LanguageModel[Any], drawn: _Draw) -> None:
    rows = [drawn.tokens[row, : int(drawn.lengths[row])].tolist() for row in range(len(drawn.prompts))]
    texts = model.decode(rows)
    if not isinstance(texts, list) or len(texts) != len(rows) or not all(isinstance(t, str) for t in texts):
        raise InputError(
            f"decode to return a list of {len(rows)} strings, one for each row",
            f"{texts!r}",
            "Decode row by row; a row without letters is the empty string.",
        )
    without = [[token for token in row if token != model.eos_id] for row in rows]
    if model.decode(without) != texts:
        raise MismatchError(
            "EOS to decode to nothing",
            f"{texts} with it and {model.decode(without)} without",
            "Skip special tokens.",
        )
    if model.decode([[]]) != [""]:
        raise MismatchError(
            "a row of no tokens to decode to the empty string",
            f"{model.decode([[]])!r}",
            "Return [''] for [[]].",
        )


# --- shared -------------------------------------------------------------------------------------------


def _sample(log_p: Tensor, ended: Tensor, eos_id: int, generator: torch.Generator) -> Tensor:
    """One token a row, EOS for rows that have ended; on the CPU, with our own generator."""
    p = log_p.detach().cpu().double().exp()
    p[ended] = torch.nn.functional.one_hot(torch.tensor(eos_id), p.shape[1]).double()
    return torch.multinomial(p, 1, generator=generator).squeeze(1)


def _require_close(found: Tensor, expected: Tensor, tolerance: float, what: str, hint: str) -> None:
    found, expected = found.detach().cpu(), expected.detach().cpu()
    if found.shape != expected.shape:
        raise MismatchError(what, f"shape {tuple(found.shape)} instead of {tuple(expected.shape)}", hint)
    same = found == expected  # −inf on both sides
    gap = torch.where(same, 0.0, (found - expected).abs())
    if not bool((gap <= tolerance).all()):
        raise MismatchError(what, f"a difference of {float(gap.nan_to_num(nan=torch.inf).max()):.3g}", hint)
