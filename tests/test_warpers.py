"""Warpers against transformers' own, in the order they are documented, and every refusal word for word."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from nado.errors import InputError
from nado.warpers import Warpers, fold_eos

V = 300
EOS = (5,)


def logits(rows: int = 64, spread: float = 3.0, seed: int = 0) -> Tensor:
    return torch.randn(rows, V, generator=torch.Generator().manual_seed(seed)) * spread


def start(rows: int = 64) -> Tensor:
    return torch.zeros(rows, dtype=torch.long)


def theirs(scores: Tensor, *processors: Any) -> Tensor:
    ids = torch.zeros(len(scores), 1, dtype=torch.long)
    return LogitsProcessorList(processors)(ids, scores).log_softmax(dim=-1)


@pytest.mark.parametrize(
    ("warpers", "processors"),
    [
        (Warpers(), ()),
        (Warpers(temperature=0.7), (TemperatureLogitsWarper(0.7),)),
        (Warpers(temperature=1.9), (TemperatureLogitsWarper(1.9),)),
        (Warpers(top_k=1), (TopKLogitsWarper(1),)),
        (Warpers(top_k=17), (TopKLogitsWarper(17),)),
        (Warpers(top_k=V + 5), (TopKLogitsWarper(V + 5),)),
        (Warpers(top_p=0.9), (TopPLogitsWarper(0.9),)),
        (Warpers(top_p=1e-6), (TopPLogitsWarper(1e-6),)),
        (Warpers(forbidden=(0, 7, 299)), (SuppressTokensLogitsProcessor([0, 7, 299]),)),
        (
            Warpers(temperature=1.5, top_k=40, top_p=0.8, forbidden=(3, 4)),
            (
                SuppressTokensLogitsProcessor([3, 4]),
                TemperatureLogitsWarper(1.5),
                TopKLogitsWarper(40),
                TopPLogitsWarper(0.8),
            ),
        ),
    ],
)
def test_warpers_are_those_of_transformers(warpers: Warpers, processors: tuple[Any, ...]) -> None:
    scores = logits()
    found, expected = warpers.apply(scores, EOS, start()), theirs(scores, *processors)
    assert torch.equal(found.isneginf(), expected.isneginf())
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_low_precision_logits_become_normalised_float32() -> None:
    log_p = Warpers(top_p=0.9).apply(logits().bfloat16(), EOS, start())
    assert log_p.dtype == torch.float32
    torch.testing.assert_close(log_p.logsumexp(-1), torch.zeros(64), atol=1e-6, rtol=0)


def test_logits_come_back_unchanged() -> None:
    scores = logits()
    before = scores.clone()
    Warpers(0.5, 20, 0.9, forced=(1,), forbidden=(2,)).apply(scores, (5, 9), start())
    assert torch.equal(scores, before)


def test_the_mass_of_several_eos_ids_is_summed_into_the_first() -> None:
    scores = logits()
    p = scores.softmax(-1)
    found = Warpers().apply(scores, (9, 5, 280), start()).exp()
    torch.testing.assert_close(found[:, 9], p[:, [9, 5, 280]].sum(-1))
    assert not found[:, [5, 280]].any()
    others = [token for token in range(V) if token not in (5, 9, 280)]
    torch.testing.assert_close(found[:, others], p[:, others])


def test_eos_ids_are_folded_after_truncation() -> None:
    """Folded before, two EOS ids too weak for top-k alone could get in together."""
    scores = torch.zeros(1, V)
    scores[0, :3] = 5.0
    scores[0, [5, 9]] = 4.9
    assert Warpers(top_k=3).apply(scores, (5, 9), start(1))[0, 5] == -torch.inf
    assert Warpers(top_k=5).apply(scores, (5, 9), start(1))[0, 5].isfinite()


def test_folding_logits_and_folding_log_p_are_the_same() -> None:
    scores = logits()
    folded = fold_eos(scores, (9, 5)).log_softmax(-1)
    torch.testing.assert_close(folded, Warpers().apply(scores, (9, 5), start()))


def test_every_text_begins_with_the_forced_tokens_in_order() -> None:
    generated = torch.tensor([0, 1, 2, 7])
    scores = logits(4)
    log_p = Warpers(forced=(11, 12)).apply(scores, EOS, generated)
    for row, token in ((0, 11), (1, 12)):
        assert log_p[row, token] == 0
        assert log_p[row].isneginf().sum() == V - 1
    torch.testing.assert_close(log_p[2:], scores[2:].log_softmax(-1))


def test_forced_tokens_overrule_all_else() -> None:
    log_p = Warpers(temperature=2, top_k=1, forced=(11,), forbidden=(11,)).apply(logits(4), EOS, start(4))
    assert (log_p[:, 11] == 0).all()


@pytest.mark.parametrize(
    ("warpers", "truncates"),
    [
        (Warpers(), False),
        (Warpers(temperature=3.0), False),
        (Warpers(top_k=5), True),
        (Warpers(top_p=0.99), True),
        (Warpers(forced=(1,)), True),
        (Warpers(forbidden=(1,)), True),
    ],
)
def test_whether_part_of_the_vocabulary_is_cut_off(warpers: Warpers, truncates: bool) -> None:
    assert warpers.truncates is truncates


def test_lists_become_tuples_and_values_json() -> None:
    warpers = Warpers(forced=[1, 2], forbidden=[3])  # type: ignore[arg-type]
    assert warpers == Warpers(forced=(1, 2), forbidden=(3,))
    assert warpers.to_dict() == {
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "forced": (1, 2),
        "forbidden": (3,),
    }


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ({"temperature": 0.0}, "expected a temperature above 0; found 0.0. Use 1 to leave p as it is."),
        ({"temperature": -1.0}, "expected a temperature above 0; found -1.0. Use 1 to leave p as it is."),
        (
            {"temperature": float("nan")},
            "expected a temperature above 0; found nan. Use 1 to leave p as it is.",
        ),
        (
            {"temperature": float("inf")},
            "expected a temperature above 0; found inf. Use 1 to leave p as it is.",
        ),
        ({"top_k": -1}, "expected top_k of 0 or more; found -1. Use 0 to keep the whole vocabulary."),
        ({"top_p": 0.0}, "expected top_p in (0, 1]; found 0.0. Use 1 to keep the whole vocabulary."),
        ({"top_p": 1.1}, "expected top_p in (0, 1]; found 1.1. Use 1 to keep the whole vocabulary."),
    ],
)
def test_refusals(setting: dict[str, float], text: str) -> None:
    with pytest.raises(InputError) as caught:
        Warpers(**setting)  # type: ignore[arg-type]
    assert str(caught.value) == text
