"""A light guide outside transformers, as vLLM runs it: the same q, the folder, the requests. Without vLLM."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

import small_models
from nado.errors import InputError, MismatchError, StorageError
from nado.guidance import Guidance
from nado.guide import Guide
from nado.guide_files import save_guide
from nado.guided_language_model import GuidedLanguageModel
from nado.huggingface import CausalModel, EncoderDecoderModel, load_model
from nado.huggingface.reading import HuggingFaceReader
from nado.vllm_plugin import register
from nado.vllm_plugin.__main__ import main
from nado.vllm_plugin.folders import save_for_vllm
from nado.vllm_plugin.guiding import Lent, LightGuiding, add_marks, split_marks
from nado.vllm_plugin.rows import (
    Board,
    RequestRow,
    board_of,
    read_row,
    require_arguments,
    require_no_beams,
    require_room,
)
from nado.vllm_plugin.served import GUIDE, Served
from nado.warpers import Warpers
from random_guides import random_guide

LIMIT = 6
PROMPTS = ["the dog", "a", "the old woman sees", "a cat"]
CONDITIONS = ["ball", "red , park", "", "ball"]
STRENGTHS = [1.0, 0.0, 2.5, 0.3]
WARPED = Warpers(temperature=0.8, top_k=20, top_p=0.95, forced=(6,), forbidden=(3,))


def make_reader(warpers: Warpers | None = None, completion: Any = "eos", **config: Any) -> HuggingFaceReader:
    model = small_models.build("llama", 3, **config)
    base = CausalModel(
        model, small_models.tokenizer(), length_limit=LIMIT, completion=completion, warpers=warpers
    )
    return HuggingFaceReader(base)


@pytest.fixture(scope="module")
def reader() -> HuggingFaceReader:
    return make_reader()


def guiding(guide: Guide, condition: str | None = None) -> LightGuiding:
    reader: Any = guide.reader
    base = reader.model
    served = Served(base.warpers, base.eos_ids, LIMIT, base.completion, condition)
    lent = Lent(reader.input_embeddings, reader.output_embeddings, reader.encode_conditions, base.device)
    copy = Guide(guide.config)  # it is lent another base
    copy.load_state_dict(guide.state_dict())
    return LightGuiding(copy, served, lent)


def steps(guide: Guide, guidance: Guidance, row: int, tokens: Tensor) -> Tensor:
    """log q of one row along a text, by the guided model itself: (T, V)."""
    reader: Any = guide.reader
    model = GuidedLanguageModel(reader.model, guide, guidance=guidance)
    state = model.start([PROMPTS[row]], [CONDITIONS[row]])
    found = []
    for token in tokens:
        found.append(state.log_p[0])
        state = model.step(state, token[None])
    return torch.stack(found)


# --- q ------------------------------------------------------------------------------------------------

CHOICES: list[dict[str, Any]] = [
    {"head": "sigmoid", "matrix": "tied"},
    {"head": "norm", "matrix": "low_rank", "rank": 8},
    {"head": "sigmoid", "matrix": "own", "calibration": (0.7, 0.2, 0.9)},
]


BASES = [
    (None, "eos", 1),
    (WARPED, "limit", 1),
    (None, "eos", [1, 5]),
    (Warpers(top_k=2), "eos", 1),  # where p cannot end a text at its limit, q is p
]


ON, OFF, SURE, ANY = [1.0] * 4, [0.0] * 4, [0.0] * 4, [0.0] * 4
ASKED = {
    "mixed": (STRENGTHS, SURE, ANY),
    "on": (ON, SURE, ANY),
    "off": (OFF, SURE, ANY),
    "doubted": (ON, [0.0, 0.3, 0.05, 1.0], ANY),
    "mixed and doubted": (STRENGTHS, [0.3, 0.0, 0.3, 0.3], ANY),
    "plausible": (ON, SURE, [0.0, 0.3, 0.05, 1.0]),
    "all of it": (STRENGTHS, [0.3, 0.0, 0.3, 0.3], [0.3, 0.1, 0.0, 0.6]),
}


@pytest.mark.parametrize(("strengths", "doubts", "plausibles"), ASKED.values(), ids=ASKED.keys())
@pytest.mark.parametrize("choices", CHOICES)
@pytest.mark.parametrize(("warpers", "completion", "eos"), BASES)
def test_rows_of_a_batch_have_the_guided_models_q(
    choices: dict[str, Any],
    warpers: Warpers | None,
    completion: str,
    eos: Any,
    strengths: list[float],
    doubts: list[float],
    plausibles: list[float],
) -> None:
    """Rows with all they ask for and prompts of their own, each at another place of its text."""
    reader = make_reader(warpers, completion, eos_token_id=eos)
    guide = random_guide(reader, reads="light", **choices)
    mine = guiding(guide)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(4, small_models.V, (len(PROMPTS), LIMIT), generator=generator)
    tokens[:, 0] = 6  # which is forced in one of the cases
    lengths = [len(row) for row in reader.model.encode(PROMPTS)]
    states = reader.read(PROMPTS, tokens, torch.full((len(PROMPTS),), LIMIT))  # (B, T, H)
    asked = zip(lengths, CONDITIONS, strengths, doubts, plausibles, strict=True)
    rows = mine.lay_out([RequestRow(*each) for each in asked])
    several = zip(strengths, doubts, plausibles, strict=True)
    guidances = [Guidance(strength=one, doubt=two, plausible=three) for one, two, three in several]
    expected = [steps(guide, guidance, row, tokens[row]) for row, guidance in enumerate(guidances)]
    for offset in range(LIMIT):
        at = torch.tensor([(offset + row) % LIMIT for row in range(len(PROMPTS))])
        here = states[torch.arange(len(PROMPTS)), at]
        # The token last read is the prompt's own at the first place.
        read = torch.where(at > 0, tokens[torch.arange(len(PROMPTS)), (at - 1).clamp(min=0)], 7)
        positions = torch.tensor(lengths) + at - 1
        log_q = mine.guide(here, reader._output(here), read, positions, rows).log_softmax(-1)
        wanted = torch.stack([own[place] for own, place in zip(expected, at.tolist(), strict=True)])
        torch.testing.assert_close(log_q, wanted, atol=2e-5, rtol=1e-5)


def test_the_guide_changes_what_the_base_would_write(reader: HuggingFaceReader) -> None:
    """So that the test above has something to compare."""
    guide = random_guide(reader, reads="light")
    tokens = torch.tensor([6, 8, 9, 4, 10, 5])
    one, none, other = (
        steps(guide, Guidance(strength=strength), 0, tokens).exp() for strength in (1.0, 0.0, 2.5)
    )
    doubted = steps(guide, Guidance(doubt=0.3), 0, tokens).exp()
    plausible = steps(guide, Guidance(plausible=0.3), 0, tokens).exp()
    assert float((one - none).abs().sum(-1).mean()) > 0.2
    assert float((one - other).abs().sum(-1).mean()) > 0.05
    assert float((one - doubted).abs().sum(-1).mean()) > 0.05
    assert float((one - plausible).abs().sum(-1).mean()) > 0.05


def test_a_prompt_that_is_not_read_to_its_end_has_some_q(reader: HuggingFaceReader) -> None:
    mine = guiding(random_guide(reader, reads="light"))
    rows = mine.lay_out([RequestRow(9, "ball", 1.0)])
    states = torch.randn(1, reader.state_size, generator=torch.Generator().manual_seed(0))
    log_q = mine.guide(states, reader._output(states), torch.tensor([4]), torch.tensor([2]), rows)
    assert torch.isfinite(log_q).all()


def test_requests_without_a_condition_get_the_folders_own(reader: HuggingFaceReader) -> None:
    guide = random_guide(reader, reads="light")
    rows = guiding(guide, condition="park").lay_out(
        [RequestRow(2, None, 1.0), RequestRow(2, "park", 1.0), RequestRow(2, "ball", 1.0)]
    )
    first, second, third = rows.known.inputs[:, 0]
    assert torch.equal(first, second)
    assert not torch.equal(first, third)


def test_a_base_of_another_size_is_refused(reader: HuggingFaceReader) -> None:
    guide = random_guide(reader, reads="light")
    served = Served(Warpers(), (1,), LIMIT, "eos")
    matrix = torch.zeros(small_models.V, 16)
    lent = Lent(reader.input_embeddings, matrix, reader.encode_conditions, torch.device("cpu"))
    with pytest.raises(MismatchError) as caught:
        LightGuiding(guide, served, lent)
    assert str(caught.value) == (
        "expected output embeddings of shape (24, 32), as this guide was trained for; found (24, 16). "
        "Serve the base it was saved with, on one device and unquantised."
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tokens_and_positions_travel_with_states(dtype: torch.dtype) -> None:
    tokens = torch.tensor([0, 1, 255, 256, 257, 65_535, 151_936, 2**24 - 1])
    positions = torch.tensor([0, 300, 131_071, 7, 511, 512, 100_000, 1_000_000])
    states = torch.randn(8, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    picked = add_marks(states, tokens, positions)[[5, 2, 7]]
    found = split_marks(picked)
    assert torch.equal(found[0], states[[5, 2, 7]])
    assert found[1].tolist() == [65_535, 255, 2**24 - 1]
    assert found[2].tolist() == [512, 131_071, 1_000_000]


# --- the folder ---------------------------------------------------------------------------------------


def test_a_folder_has_base_guide_and_what_p_is(tmp_path: Path) -> None:
    reader = make_reader(WARPED, eos_token_id=[1, 5])
    guide = random_guide(reader, reads="light")
    folder = save_for_vllm(reader.model, guide, tmp_path / "served", condition="ball", template="{words} =")
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "guide/model.safetensors"} <= names
    assert not {name for name in names if name.endswith((".bin", ".pt", ".pkl", ".py"))}
    config: Any = AutoConfig.from_pretrained(folder)
    assert config.architectures == ["NadoGuidedLlamaForCausalLM"]
    served = Served.read(config.nado)
    base = reader.model
    assert served == Served(WARPED, (1, 5), LIMIT, "eos", "ball", "{words} =", base.fingerprint)
    settings = json.loads((folder / "generation_config.json").read_text())
    assert settings["max_new_tokens"] == LIMIT
    assert (settings["temperature"], settings["top_k"], settings["top_p"]) == (1.0, 0, 1.0)
    # What lies there is the base and the guide.
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.tensor([[4, 6, 9]])
    assert torch.equal(model(ids).logits, base.model(ids).logits)
    lent = Lent(
        reader.input_embeddings, reader.output_embeddings, reader.encode_conditions, torch.device("cpu")
    )
    loaded = LightGuiding.load(folder / GUIDE, served, lent).model
    assert all(
        torch.equal(mine, other)
        for mine, other in zip(guide.state_dict().values(), loaded.state_dict().values(), strict=True)
    )


def test_a_command_writes_the_folder_of_a_guide(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = load_model(small_models.save("llama", tmp_path / "base", 3), length_limit=LIMIT, device="cpu")
    guide = random_guide(HuggingFaceReader(base), reads="light", base_name=str(tmp_path / "base"))
    save_guide(guide, tmp_path / "guide")
    main(tmp_path / "guide", tmp_path / "served", condition="ball")
    assert capsys.readouterr().out == f"{tmp_path / 'served'}\n"
    config: Any = AutoConfig.from_pretrained(tmp_path / "served")
    assert Served.read(config.nado).condition == "ball"
    assert Served.read(config.nado).base_fingerprint == base.fingerprint


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        (
            {"reads": "states"},
            'expected a light guide (reads="light"), for vLLM; '
            'found one that reads "states" and keeps keys and values of its own. '
            'Train one with reads = "light" in [guide], or serve this one with nado serve.',
        ),
        (
            {"reads": "light", "progress_bits": 2},
            "expected a guide without progress, for vLLM; "
            "found one that is told 2 bits of it by the oracle at every token. "
            "Train one with progress_bits = 0 in [guide], or serve this one with nado serve.",
        ),
    ],
)
def test_guides_that_need_more_than_vllm_tells_are_refused(
    reader: HuggingFaceReader, tmp_path: Path, choices: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError) as caught:
        save_for_vllm(reader.model, random_guide(reader, **choices), tmp_path / "served")
    assert str(caught.value) == message
    assert not (tmp_path / "served").exists()


def test_a_folder_is_written_for_the_guides_own_base_into_an_empty_place(
    reader: HuggingFaceReader, tmp_path: Path
) -> None:
    guide = random_guide(reader, reads="light")
    with pytest.raises(MismatchError, match="expected the base this guide was trained for"):
        save_for_vllm(make_reader(WARPED).model, guide, tmp_path / "served")
    translator = EncoderDecoderModel(
        small_models.build("t5"), small_models.tokenizer(appends_eos=True), length_limit=LIMIT
    )
    with pytest.raises(
        InputError, match="expected a causal base, for vLLM; found T5ForConditionalGeneration"
    ):
        save_for_vllm(translator, guide, tmp_path / "served")
    (tmp_path / "mine.txt").write_text("kept")
    with pytest.raises(StorageError, match="expected a new or empty folder"):
        save_for_vllm(reader.model, guide, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize(("table", "found"), [(None, "none"), ({"format": 2}, "format 2")])
def test_a_config_of_another_kind_is_refused(table: Any, found: str) -> None:
    with pytest.raises(StorageError) as caught:
        Served.read(table)
    assert str(caught.value) == (
        f"expected a table nado of format 1 in config.json; found {found}. "
        "Write the folder with the nado that serves it: save_for_vllm."
    )


# --- requests -----------------------------------------------------------------------------------------


def row(name: str) -> RequestRow:
    return RequestRow(3, name, 1.0)


def test_the_board_follows_requests_that_come_go_and_move() -> None:
    board = Board()
    board.update([], [(0, row("a")), (1, row("b")), (2, row("c"))], [])
    assert [each.condition for each in board.in_order()] == ["a", "b", "c"]
    board.update([0], [], [(2, 0, False)])  # the last one fills the gap
    assert [each.condition for each in board.in_order()] == ["c", "b"]
    board.update([], [(1, row("d"))], [(0, 1, True)])  # a new one takes a place, then two are exchanged
    assert [each.condition for each in board.in_order()] == ["d", "c"]
    changes = board.changes
    board.update([0, 1], [], [])
    assert board.in_order() == []
    assert board.changes > changes


def test_processor_and_model_of_an_engine_share_a_board() -> None:
    mine = board_of("engine 1")
    assert board_of("engine 1") is mine
    assert board_of("engine 2") is not mine


def test_requests_are_read() -> None:
    assert read_row(5, None) == RequestRow(5, None, 1.0)
    assert read_row(5, {"nado_condition": "dog", "nado_strength": 0}) == RequestRow(5, "dog", 0.0)
    assert read_row(5, {"nado_doubt": 0.1}) == RequestRow(5, None, 1.0, 0.1)
    assert read_row(5, {"nado_plausible": 0.1}) == RequestRow(5, None, 1.0, 0.0, 0.1)
    require_arguments({"nado_condition": "", "nado_strength": 2}, needs_condition=True)
    require_arguments({"nado_strength": 0, "other": [1]}, needs_condition=True)
    require_arguments(None, needs_condition=False)
    require_arguments({"nado_plausible": 0.1}, needs_condition=False, has_scale=False)
    with pytest.raises(InputError, match="no nado_doubt of a guide that was only warmed up; found"):
        require_arguments({"nado_doubt": 0.1}, needs_condition=False, has_scale=False)
    require_room(LIMIT, None, LIMIT)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            None,
            "expected the condition that the guide shall lead to, as nado_condition; found none. "
            'Send "vllm_xargs": {"nado_condition": "…"}, or {"nado_strength": 0} for the base alone.',
        ),
        (
            {"nado_condition": "dog", "nado_strength": -1},
            "expected nado_strength of 0 or more; found -1. "
            "Use 0 for the base alone, 1 for the method itself.",
        ),
        (
            {"nado_condition": "dog", "nado_strength": True},
            "expected nado_strength of 0 or more; found True. "
            "Use 0 for the base alone, 1 for the method itself.",
        ),
        (
            {"nado_condition": ["dog"]},
            "expected nado_condition as a string; found ['dog']. Write \"dog, ball\" for keywords.",
        ),
        (
            {"nado_target_rate": 0.5},
            "expected the arguments nado_condition, nado_strength, nado_doubt, nado_plausible; "
            "found nado_target_rate. Leave it out.",
        ),
        (
            {"nado_condition": "dog", "nado_doubt": 1.5},
            "expected nado_doubt from 0 to 1; found 1.5. Use 0 to believe the guide whatever it says.",
        ),
        (
            {"nado_condition": "dog", "nado_plausible": "0.1"},
            "expected nado_plausible from 0 to 1; found '0.1'. Use 0 to leave nothing out.",
        ),
    ],
)
def test_requests_that_cannot_be_guided_are_refused(given: Any, message: str) -> None:
    with pytest.raises(InputError) as caught:
        require_arguments(given, needs_condition=True)
    assert str(caught.value) == message


def test_texts_beyond_the_limit_and_prompts_scores_are_refused() -> None:
    for asked in (LIMIT + 1, None):
        with pytest.raises(InputError) as caught:
            require_room(asked, None, LIMIT)
        assert str(caught.value) == (
            "expected max_tokens of at most 6, the length limit that guide and base were made for; "
            f"found {asked}. Lower it, or train a guide for a higher limit."
        )
    with pytest.raises(InputError, match="expected no prompt_logprobs from a guided model; found 0"):
        require_room(LIMIT, 0, LIMIT)


def test_what_beam_search_sends_is_refused() -> None:
    with pytest.raises(InputError) as caught:
        require_no_beams(1, False, None)
    assert str(caught.value) == (
        "expected texts written token by token, which a guide can follow; "
        "found beam search, or a request for one token without its text. "
        "Sample, or search greedily; if it is one token you want, send nado_strength."
    )
    require_no_beams(1, True, None)
    require_no_beams(2, False, None)
    require_no_beams(1, False, {"nado_strength": 1.0})


def test_another_vllm_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The plug-in is loaded by every vLLM beside it: one it does not know must still start."""
    monkeypatch.setitem(sys.modules, "vllm", None)
    register()
    assert "guided models cannot be served with this vLLM; nado is written for 0.32" in caplog.text
