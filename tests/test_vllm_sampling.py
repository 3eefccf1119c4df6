"""What vLLM is asked for so that its texts are p's, and how its log p is checked. Without vLLM."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from typer.testing import CliRunner

import small_models
from nado.cli import app
from nado.distributed import EngineError
from nado.distributed.vllm_drawing import check_log_p, draw_with_vllm, locate_for_vllm
from nado.distributed.vllm_sampling import ask_for, require_p, row_seed
from nado.drawing import DrawingError, draw, draw_rows
from nado.errors import InputError, MismatchError, MissingPackageError
from nado.huggingface import CausalModel, EncoderDecoderModel
from nado.prompts import Prompt
from nado.proposals import Proposal, tempered
from nado.study.sections import BaseConfig
from nado.warpers import Warpers

V, LIMIT = 24, 8
PROMPTS = [Prompt("the dog", "ball"), Prompt("a man sees", "beach")]


@dataclass
class Told:
    """As vLLM tells a log-probability."""

    logprob: float


@pytest.fixture(scope="module")
def model() -> CausalModel:
    return CausalModel(small_models.build("llama", 3), small_models.tokenizer(), length_limit=LIMIT)


@pytest.fixture
def table(model: CausalModel) -> pa.Table:
    prompts = [prompt for prompt in PROMPTS for _ in range(20)]
    return draw_rows(model, prompts, range(100, 140), proposal=Proposal(), seed=0, batch_size=8)


# --- p in vLLM's words --------------------------------------------------------------------------------


def test_the_plain_base_is_asked_for_without_any_change() -> None:
    assert ask_for(Warpers(), (1,), V, LIMIT).settings == {
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "max_tokens": 8,
        "ignore_eos": True,
        "stop_token_ids": [1],
        "detokenize": False,
        "logprobs": 0,
    }


def test_warpers_become_sampling_parameters() -> None:
    asked = ask_for(Warpers(0.7, 5, 0.9, forced=(4, 9), forbidden=(2, 3)), (1, 7), V, LIMIT)
    assert asked.forced == (4, 9)
    assert asked.settings == {
        "temperature": 0.7,
        "top_k": 5,
        "top_p": 0.9,
        "max_tokens": 6,  # the forced ones count
        "ignore_eos": True,
        "stop_token_ids": [1, 7],
        "detokenize": False,
        "logprob_token_ids": [1, 7],
        "allowed_token_ids": [token for token in range(V) if token not in (2, 3)],
    }


def test_a_top_k_of_the_whole_vocabulary_is_none() -> None:
    assert ask_for(Warpers(top_k=V), (1,), V, LIMIT).settings["top_k"] == 0
    assert ask_for(Warpers(top_k=V - 1), (1,), V, LIMIT).settings["top_k"] == V - 1


@pytest.mark.parametrize(
    ("warpers", "eos_ids", "message"),
    [
        (
            Warpers(temperature=0.005),
            (1,),
            "expected a temperature of p of at least 0.01, for the engine vllm; "
            "found 0.005, which vLLM would raise to that. Draw with the engine local.",
        ),
        (
            Warpers(forced=(4, 1)),
            (1,),
            "expected forced tokens that leave something to write, for the engine vllm; "
            "found EOS (1) among them. Draw with the engine local.",
        ),
        (
            Warpers(forced=(4,) * 8),
            (1,),
            "expected forced tokens that leave something to write, for the engine vllm; "
            "found 8 of at most 8. Draw with the engine local.",
        ),
        (
            Warpers(),
            tuple(range(129)),
            "expected a base with at most 128 EOS ids, for the engine vllm; found 129. "
            "Draw with the engine local.",
        ),
    ],
)
def test_what_cannot_be_mapped_is_refused(warpers: Warpers, eos_ids: tuple[int, ...], message: str) -> None:
    with pytest.raises(InputError) as caught:
        ask_for(warpers, eos_ids, V, LIMIT)
    assert str(caught.value) == message


def test_only_p_itself_is_drawn_from() -> None:
    require_p(Proposal())
    with pytest.raises(InputError) as caught:
        require_p(tempered(1.2))
    assert str(caught.value) == (
        "expected p itself as the proposal, for the engine vllm; found p at temperature 1.2. "
        "Draw from other proposals with the engine local."
    )


# --- what vLLM answers --------------------------------------------------------------------------------


def told(*log_p: float, tokens: list[int]) -> list[dict[int, Any]]:
    return [{token: Told(value)} for token, value in zip(tokens, log_p, strict=True)]


def test_a_text_is_read_with_its_forced_beginning() -> None:
    asked = ask_for(Warpers(forced=(4, 9)), (1,), V, LIMIT)
    row = asked.read([5, 1], told(-0.5, -2.0, tokens=[5, 1]), "stop")
    assert row.tokens == [4, 9, 5, 1]
    assert row.log_p == [0.0, 0.0, -0.5, -2.0]
    assert row.ended
    cut = asked.read([5, 6], told(-0.5, -2.0, tokens=[5, 6]), "length")
    assert cut.tokens == [4, 9, 5, 6]
    assert not cut.ended


def test_whichever_eos_ends_a_text_all_their_mass_is_on_the_first() -> None:
    asked = ask_for(Warpers(), (1, 7), V, LIMIT)
    log_p = [{5: Told(-0.5)}, {7: Told(np.log(0.1)), 1: Told(np.log(0.3))}]
    row = asked.read([5, 7], log_p, "stop")
    assert row.tokens == [5, 1]
    assert row.log_p == pytest.approx([-0.5, np.log(0.4)])


def test_an_end_that_p_forbids_adds_nothing() -> None:
    asked = ask_for(Warpers(forbidden=(1,)), (1, 7), V, LIMIT)
    row = asked.read([7], [{7: Told(-1.25), 1: Told(-np.inf)}], "stop")
    assert row.log_p == pytest.approx([-1.25])


def test_a_text_that_vllm_gave_up_is_an_error() -> None:
    asked = ask_for(Warpers(), (1,), V, LIMIT)
    with pytest.raises(EngineError, match=r"found one that vLLM gave up \(abort\)"):
        asked.read([5], told(-1.0, tokens=[5]), "abort")
    with pytest.raises(DrawingError, match="found 1 of 2 that are not"):
        asked.read([5, 6], told(-1.0, float("nan"), tokens=[5, 6]), "length")


def test_every_row_has_a_seed_of_its_own() -> None:
    seeds = {row_seed(seed, row) for seed in range(20) for row in range(500)}
    assert len(seeds) == 10_000
    assert all(0 <= seed < 2**62 for seed in seeds)
    assert row_seed(3, 17) == row_seed(3, 17)


# --- the check against the base itself ----------------------------------------------------------------


def changed(table: pa.Table, row: int, change: Callable[[list[float]], list[float]]) -> pa.Table:
    """The table with log p of one row changed."""
    log_p = table["log_p"].to_pylist()
    log_p[row] = change(log_p[row])
    at = table.schema.get_field_index("log_p")
    return table.set_column(at, "log_p", pa.array(log_p, table.schema.field("log_p").type))


def test_log_p_of_the_base_itself_passes(model: CausalModel, table: pa.Table) -> None:
    check_log_p(model, table)
    check_log_p(model, table.slice(0, 1))


def test_a_wrong_log_p_is_an_error_that_names_the_worst_row(model: CausalModel, table: pa.Table) -> None:
    wrong = changed(table, 0, lambda row: [value - 0.01 for value in row])
    wrong = changed(wrong, 39, lambda row: [value - 0.2 for value in row])
    with pytest.raises(MismatchError) as caught:
        check_log_p(model, wrong)
    text, tokens = table["text"].to_pylist()[39], len(table["tokens"].to_pylist()[39])
    mean = (0.01 * len(table["tokens"].to_pylist()[0]) + 0.2 * tokens) / 8 / 16
    assert str(caught.value) == (
        "expected log p as the base itself has it, within 0.0001 a token; "
        f"found {0.2 * tokens / 8:.3g} in row 139 ({text[:40]!r}) and {mean:.3g} on average. "
        "Draw with the engine local: this vLLM computes something else than p."
    )


def test_rounded_numbers_are_given_more_room_but_not_any(model: CausalModel) -> None:
    """In bfloat16, log p of one order of summation against another's."""
    half = CausalModel(
        small_models.build("llama", 3).bfloat16(), small_models.tokenizer(), length_limit=LIMIT
    )
    prompts = [PROMPTS[0]] * 64
    rounded = draw_rows(half, prompts, range(64), proposal=Proposal(), seed=0, batch_size=8)
    whole = draw_rows(model, prompts, range(64), proposal=Proposal(), seed=0, batch_size=8)
    check_log_p(half, rounded)
    check_log_p(half, whole)
    with pytest.raises(MismatchError):
        check_log_p(model, rounded)
    with pytest.raises(MismatchError, match=r"within 0\.15 a token"):
        check_log_p(half, changed(whole, 0, lambda row: [value - 16.0 for value in row]))
    for row in range(64):  # no row stands out, but all of them are off
        whole = changed(whole, row, lambda values: [value - 0.6 for value in values])
    with pytest.raises(MismatchError, match=r"within 0\.15 a token"):
        check_log_p(half, whole)


def test_a_token_at_the_edge_of_a_truncation_may_fall_on_either_side_of_it(table: pa.Table) -> None:
    """Where numbers are rounded, and seldom; in float32 never."""
    half = CausalModel(
        small_models.build("llama", 3).bfloat16(), small_models.tokenizer(), length_limit=LIMIT
    )
    checked = [table["tokens"].to_pylist()[at] for at in range(16)]
    written = [token for row in checked for token in row]
    once = next(token for token in written if written.count(token) == 1 and token != 1)
    seldom = {"length_limit": LIMIT, "warpers": Warpers(forbidden=(once,))}
    often = {"length_limit": LIMIT, "warpers": Warpers(forbidden=(max(set(written), key=written.count),))}
    rows = table.slice(0, 16)
    check_log_p(CausalModel(half.model, half.tokenizer, **seldom), rows)  # type: ignore[arg-type]
    whole = small_models.build("llama", 3)
    for model, settings in ((whole, seldom), (half.model, often)):
        with pytest.raises(MismatchError, match="found inf in row"):
            check_log_p(CausalModel(model, half.tokenizer, **settings), rows)  # type: ignore[arg-type]


def test_another_temperature_is_noticed(model: CausalModel, table: pa.Table) -> None:
    """What a vLLM would tell that had left p's temperature out."""
    warped = CausalModel(model.model, model.tokenizer, length_limit=LIMIT, warpers=Warpers(temperature=0.9))
    with pytest.raises(MismatchError, match="this vLLM computes something else than p"):
        check_log_p(warped, table)


def test_a_token_that_p_cannot_write_is_noticed(model: CausalModel, table: pa.Table) -> None:
    written = table["tokens"].to_pylist()[0][0]
    forbidding = CausalModel(
        model.model, model.tokenizer, length_limit=LIMIT, warpers=Warpers(forbidden=(written,))
    )
    with pytest.raises(MismatchError, match="found inf in row 100"):
        check_log_p(forbidding, table)


# --- what is refused before anything is started -------------------------------------------------------


def test_without_vllm_the_engine_says_what_to_install(
    model: CausalModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(MissingPackageError) as caught:
        draw_with_vllm(model, "anywhere", PROMPTS, tmp_path / "drawn")
    assert str(caught.value) == (
        "expected the package vllm for the engine vllm; found that it is not installed. "
        "Install it with: pip install 'nado-lm[vllm]'"
    )


def test_samples_of_another_engine_are_not_gone_on_with(model: CausalModel, tmp_path: Path) -> None:
    draw(model, PROMPTS, tmp_path, samples_per_prompt=4, batch_size=4, shard_rows=4)
    with pytest.raises(MismatchError, match="another one, which differs in engine"):
        draw_with_vllm(model, "anywhere", PROMPTS, tmp_path, samples_per_prompt=4)


def test_bases_that_vllm_would_load_as_something_else_are_refused(model: CausalModel, tmp_path: Path) -> None:
    translator = EncoderDecoderModel(
        small_models.build("t5"), small_models.tokenizer(appends_eos=True), length_limit=LIMIT
    )
    with pytest.raises(InputError, match="found EncoderDecoderModel of somewhere"):
        draw_with_vllm(translator, "somewhere", PROMPTS, tmp_path)
    with pytest.raises(InputError, match=r"found model\.gguf"):
        draw_with_vllm(model, "model.gguf", PROMPTS, tmp_path)
    with pytest.raises(InputError, match="found the adapter mine"):
        locate_for_vllm(BaseConfig(name="tiny", length_limit=4, adapter="mine"))
    found = locate_for_vllm(BaseConfig(name="tiny", length_limit=4, revision="v1"))
    assert found == {"name": "tiny", "revision": "v1"}


def test_the_command_refuses_what_it_cannot_do(tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("dog\n", encoding="utf-8")
    words = ["draw", "--base", "tiny", "--length-limit", "4", "--out", str(tmp_path / "drawn")]
    words += ["--prompts", str(tmp_path / "prompts.txt"), "--engine", "ray"]
    result = CliRunner().invoke(app, words)
    assert str(result.exception) == (
        "expected the engine local or vllm for this command; found ray. "
        "Ray draws for a study: nado run study.toml --engine ray --until draw."
    )
