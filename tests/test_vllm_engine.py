"""Drawing with vLLM: its texts are draws of p, with p's own log p. Run by `make test-vllm`."""

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from nado.cli import app
from nado.distributed.vllm_drawing import check_log_p, draw_with_vllm
from nado.huggingface import CausalModel, load_model
from nado.prompts import Prompt
from nado.samples import Samples, read_samples
from nado.storage import read_json
from nado.warpers import Warpers

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's own, of many kinds
    pytest.importorskip("vllm", reason="vLLM is not installed here: make test-vllm")

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]

PROMPTS = [Prompt("dog ball =", "dog"), Prompt("beach =", "beach"), Prompt("", "")]
FULL_STOP, ARTICLE, THE = 15, 259, 335
STUDY = """
[base]
name = "tiny"
length_limit = 6
device = "cpu"
[oracle]
name = "keywords"
[prompts]
file = "prompts.txt"
held_out = 0.0
[draw]
samples_per_prompt = 4
batch_size = 8
"""


def load(limit: int, warpers: Warpers | None = None, completion: str = "eos") -> CausalModel:
    model = load_model("tiny", length_limit=limit, warpers=warpers, completion=completion, device="cpu")  # type: ignore[arg-type]
    assert isinstance(model, CausalModel)
    return model


def all_rows(samples: Samples, model: CausalModel) -> None:
    """Every row's log p is the base's own, not only those that drawing has looked at."""
    for first in range(0, len(samples), 16):
        check_log_p(model, samples.table.slice(first, 16))


def test_texts_have_ps_own_log_p_and_a_run_can_be_taken_up(tmp_path: Path) -> None:
    """With every warper at once, and a second EOS id whose mass is folded into the first."""
    warpers = Warpers(temperature=0.8, top_k=200, top_p=0.95, forced=(THE,), forbidden=(ARTICLE, 0))
    model = load(12, warpers)
    model.eos_ids = (1, FULL_STOP)
    sizes = {"samples_per_prompt": 32, "batch_size": 16, "shard_rows": 40, "seed": 7}
    told = []
    samples = draw_with_vllm(model, "tiny", PROMPTS, tmp_path, **sizes, on_progress=told.append)  # type: ignore[arg-type]
    all_rows(samples, model)
    tokens = samples.table["tokens"].to_pylist()
    assert [row[0] for row in tokens] == [THE] * 96
    assert not {ARTICLE, 0, FULL_STOP} & {token for row in tokens for token in row}
    ended = np.array([row[-1] == 1 for row in tokens])
    assert 0.2 < ended.mean() < 1
    assert (samples.array("finished") == ended).all()
    assert all(len(row) == 12 for row, own in zip(tokens, ended, strict=True) if not own)
    assert samples.table["log_p"].equals(samples.table["log_proposal"])
    assert samples.table["text"].to_pylist() == model.decode(tokens)
    assert [each.rows for each in told] == [40, 80, 96]
    manifest = read_json(tmp_path / "manifest.json")
    assert manifest["config"]["engine"] == "vllm"
    assert manifest["versions"]["vllm"] != "not installed"
    # A shard that is lost is drawn again, and is the same.
    (tmp_path / "shard-00001.parquet").unlink()
    again = draw_with_vllm(model, "tiny", PROMPTS, tmp_path, **sizes)  # type: ignore[arg-type]
    assert again.table["tokens"].equals(samples.table["tokens"])
    assert read_samples(tmp_path).table.equals(again.table)


def test_tokens_are_drawn_as_often_as_p_says(tmp_path: Path) -> None:
    """One-token texts against p, cell by cell; a false alarm once in a million runs."""
    model, count = load(1, completion="limit"), 4000
    prompt = PROMPTS[:1]
    samples = draw_with_vllm(
        model, "tiny", prompt, tmp_path, samples_per_prompt=count, batch_size=500, seed=3
    )
    assert samples.array("finished").all()
    drawn = torch.bincount(torch.tensor(samples.ragged("tokens").values), minlength=model.vocabulary_size)
    p = model.start([prompt[0].prompt]).log_p[0].exp()
    likely = p.topk(20).indices
    expected, found = count * p[likely], drawn[likely]
    gaps = (found - expected) / (expected * (1 - p[likely])).sqrt()
    assert float(gaps.abs().max()) < 5.5  # Φ(5.5) over 20 cells: 8e-7
    assert expected.min() > 10


def test_the_commands_draw_with_vllm(tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("dog\nbeach\n", encoding="utf-8")
    words = ["draw", "--base", "tiny", "--length-limit", "6", "--engine", "vllm", "--batch-size", "8"]
    words += ["--prompts", str(tmp_path / "prompts.txt"), "--samples-per-prompt", "4"]
    result = CliRunner().invoke(app, [*words, "--out", str(tmp_path / "drawn"), "--device", "cpu"])
    assert result.exit_code == 0, result.exception
    assert result.stdout.startswith("8 texts, ")
    assert read_json(tmp_path / "drawn" / "base.json")["base"]["name"] == "tiny"
    all_rows(read_samples(tmp_path / "drawn"), load(6))


def test_a_study_draws_with_vllm_and_goes_on_as_always(tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("dog\nbeach\n", encoding="utf-8")
    (tmp_path / "study.toml").write_text(STUDY, encoding="utf-8")
    words = ["run", str(tmp_path / "study.toml"), "--engine", "vllm", "--until", "label"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.exception
    samples = read_samples(tmp_path / "study" / "draw")
    assert len(samples) == 8
    assert samples.labelled
    # The engine is no part of the study: what is there is used again, whoever drew it.
    again = CliRunner().invoke(app, ["run", str(tmp_path / "study.toml"), "--until", "label"])
    assert "draw: reused" in again.stderr
