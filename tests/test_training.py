"""Training: losses against a plain reference, resuming, errors, and that R is learned."""

import dataclasses
import json
import logging
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

import small_models
from guide_quality import guide_log_r, labelled_samples, measure
from nado.drawing import draw_rows
from nado.errors import InputError, MismatchError
from nado.exact import TabularModel
from nado.guide import Guide, GuideConfig
from nado.huggingface import CausalModel, EncoderDecoderModel
from nado.huggingface.reading import HuggingFaceReader
from nado.objective import Reduced, reduce_vocabulary
from nado.prompts import Prompt
from nado.proposals import Proposal, tempered
from nado.samples import Samples
from nado.tabular_reader import TabularReader
from nado.training import (
    DivergenceError,
    Objective,
    TrainingConfig,
    calibration_error,
    evaluate,
    learning_rate,
    train,
)
from nado.training_data import TrainingData, split_by_prompt

SMALL: dict[str, Any] = {"reads": "tokens", "size": 16, "layers": 1, "heads": 2, "matrix": "own"}


def has_a(conditions: list[str], texts: list[str]) -> np.ndarray:
    return np.array(
        [(condition == "x") == ("a" in text) for condition, text in zip(conditions, texts, strict=True)]
    )


@pytest.fixture(scope="module")
def tabular() -> tuple[TabularReader, Samples]:
    model = TabularModel.random(["x", "y"], vocabulary_size=4, length_limit=3, seed=5)
    return TabularReader(model, ["x", "y"]), labelled_samples(model, has_a, 2000)


def fresh_guide(reader: Any, seed: int = 0, **choices: Any) -> Guide:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Guide(GuideConfig.for_reader(reader, **{**SMALL, **choices})).attach(reader)


def weights(guide: Guide) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in guide.state_dict().items()}


def test_a_fresh_guide_leaves_p_as_it_is(tabular: tuple[TabularReader, Samples]) -> None:
    reader, _ = tabular
    log_r = guide_log_r(fresh_guide(reader), reader, "x")
    possible = ~log_r.isneginf()
    assert torch.equal(log_r[possible], torch.full_like(log_r[possible], log_r[0, 0].item()))


def test_r_is_learned(tabular: tuple[TabularReader, Samples]) -> None:
    reader, samples = tabular
    guide = fresh_guide(reader, size=32)
    before = measure(guide, reader, has_a)
    config = TrainingConfig(steps=150, batch_size=256, learning_rate=3e-3, ramp_steps=10, weight_decay=0.0)
    history = train(guide, reader, TrainingData.from_samples(samples, reader), config)
    after = measure(guide, reader, has_a)
    assert history[-1]["success"] < history[0]["success"]
    assert after.total_variation < 0.1 < before.total_variation
    assert after.log_r_error < before.log_r_error


def test_an_interrupted_run_goes_on_bit_for_bit(
    tabular: tuple[TabularReader, Samples], tmp_path: Path
) -> None:
    reader, samples = tabular
    data = TrainingData.from_samples(samples, reader)
    config = TrainingConfig(steps=12, batch_size=64, save_every=3, learning_rate=1e-2, ramp_steps=4)
    whole = fresh_guide(reader, dropout=0.2)
    history = train(whole, reader, data, config)

    class KilledError(Exception):
        pass

    def kill(step: int, row: dict[str, float]) -> None:
        if step == 8:
            raise KilledError

    with pytest.raises(KilledError):
        train(fresh_guide(reader, dropout=0.2), reader, data, config, folder=tmp_path, on_step=kill)
    resumed = fresh_guide(reader, seed=99, dropout=0.2)  # what it starts with does not matter
    again = train(resumed, reader, data, config, folder=tmp_path)
    assert again == history
    for name, value in weights(whole).items():
        assert torch.equal(value, weights(resumed)[name]), name
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json", ".safetensors"]


def test_a_folder_of_another_run_is_refused(tabular: tuple[TabularReader, Samples], tmp_path: Path) -> None:
    reader, samples = tabular
    data = TrainingData.from_samples(samples, reader)
    train(fresh_guide(reader), reader, data, TrainingConfig(steps=1, batch_size=8), folder=tmp_path)
    with pytest.raises(MismatchError) as caught:
        train(fresh_guide(reader), reader, data, TrainingConfig(steps=2, batch_size=8), folder=tmp_path)
    assert str(caught.value) == (
        f"expected {tmp_path} to hold this same training run; found another config or other samples. "
        "Choose another folder, or delete this one."
    )


@pytest.mark.parametrize("kind", ["llama", "gpt2", "t5"])
def test_losses_equal_those_of_full_tensors(kind: str) -> None:
    """Chunked, flattened and padded, the losses are those of plain (B, T, V) tensors."""
    base = small_models.build(kind)
    tokenizer = small_models.tokenizer(appends_eos=kind in small_models.SEQ2SEQ)
    model = (CausalModel if kind in small_models.CAUSAL else EncoderDecoderModel)(
        base, tokenizer, length_limit=6
    )
    reader = HuggingFaceReader(model)
    asked = [
        Prompt(prompt, condition) for prompt, condition in (("the dog", "ball"), ("a cat sees", "red, park"))
    ] * 8
    table = draw_rows(model, asked, range(len(asked)), proposal=Proposal(), seed=1, batch_size=8)
    samples = Samples(table.append_column("satisfied", pa.array([row % 3 == 0 for row in range(len(asked))])))
    data = TrainingData.from_samples(samples, reader)
    guide = fresh_guide(reader, reads="states", matrix="tied")
    torch.nn.init.normal_(guide.head.vector.weight, std=0.3, generator=torch.Generator().manual_seed(3))
    objective = Objective(guide.eval(), reader, TrainingConfig())
    batch = data.batch(torch.arange(len(data)), reader)
    _, _, found = objective(batch)
    wanted = full_reference(guide, reader, batch)
    real = batch.positions
    for name in ("log_s", "log_not_s"):
        torch.testing.assert_close(
            getattr(found, name)[real], getattr(wanted, name)[real], rtol=1e-4, atol=1e-5
        )
    prefixes = torch.nn.functional.pad(real, (1, 0), value=True)
    for name in ("log_r", "log_not_r"):
        torch.testing.assert_close(
            getattr(found, name)[prefixes], getattr(wanted, name)[prefixes], rtol=1e-4, atol=1e-5
        )
    data.keep_states(reader)
    kept = objective(data.batch(torch.arange(len(data)), reader))[0]
    for mine, theirs in zip(kept, objective(batch)[0], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def full_reference(guide: Guide, reader: Any, batch: Any) -> Reduced:
    written = torch.arange(batch.tokens.shape[1]).expand_as(batch.tokens)
    features = guide.features(
        batch.states, batch.last_tokens, reader.model.length_limit - written, batch.conditions, None
    )
    flat = features.flatten(0, 1)
    log_p = reader.logits(batch.states.flatten(0, 1), written.flatten()).float().log_softmax(-1)
    log_r = guide.head.log_r(guide.scores(flat), log_p)
    at_limit = (written == reader.model.length_limit - 1).flatten()
    others = torch.arange(log_r.shape[1]) != reader.model.eos_id
    log_r = log_r.masked_fill(at_limit[:, None] & others[None, :], -torch.inf)
    shape = (*batch.tokens.shape, -1)
    return reduce_vocabulary(log_p.view(shape), log_r.view(shape), batch.tokens)


def test_equal_texts_are_merged_without_changing_the_losses(tabular: tuple[TabularReader, Samples]) -> None:
    reader, samples = tabular
    data, merged = (TrainingData.from_samples(samples, reader, balanced=True) for _ in range(2))
    merged.merge_equal()
    assert len(merged) < 80 < len(data)
    assert merged.multiplicity.sum() == len(data)
    guide = fresh_guide(reader)
    torch.nn.init.normal_(guide.head.vector.weight, generator=torch.Generator().manual_seed(1))
    objective = Objective(guide, reader, TrainingConfig())
    found, wanted = (evaluate(objective, each, batch_size=10_000) for each in (merged, data))
    for name in ("success", "consistency", "warm_up"):
        assert found[name] == pytest.approx(wanted[name], rel=1e-4), name


def test_tempered_samples_are_weighted(tabular: tuple[TabularReader, Samples]) -> None:
    reader, _ = tabular
    samples = labelled_samples(reader.model, has_a, 200, proposal=tempered(2.0))
    data = TrainingData.from_samples(samples, reader, weight_form="whole")
    assert 0.1 < data.ess < 1.0
    assert data.weights[:, 0].std() > 0.1


def test_uncorrected_samples_are_trained_on_without_weights(tabular: tuple[TabularReader, Samples]) -> None:
    reader, _ = tabular
    samples = labelled_samples(reader.model, has_a, 200, proposal=tempered(2.0))
    data = TrainingData.from_samples(dataclasses.replace(samples, uncorrected=True), reader)
    assert data.ess == 1
    assert set(data.weights.unique().tolist()) == {0.0, 1.0}


def test_a_collapse_of_the_weights_is_said(
    tabular: tuple[TabularReader, Samples], caplog: pytest.LogCaptureFixture
) -> None:
    reader, samples = tabular
    skewed = [[log_p - 9.0 for log_p in row] for row in samples.table["log_p"].to_pylist()]
    skewed[0] = [log_p - 0.0 for log_p in samples.table["log_p"][0].as_py()]
    at = samples.table.column_names.index("log_proposal")
    reversed_proposal = pa.array(
        [
            [2 * a - b for a, b in zip(p, s, strict=True)]
            for p, s in zip(samples.table["log_p"].to_pylist(), skewed, strict=True)
        ],
        pa.list_(pa.float32()),
    )
    table = samples.table.set_column(at, "log_proposal", reversed_proposal)
    with caplog.at_level(logging.WARNING):
        data = TrainingData.from_samples(Samples(table), reader)
    assert data.ess < 0.05
    assert "the effective sample size is 0." in caplog.text
    assert "% of the samples: draw closer to p, or mix in more of it" in caplog.text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (
            False,
            "expected samples of both kinds to learn from; found no satisfied text among 4000. Draw more "
            "samples, draw from a guided proposal, or begin with one of the oracle's parts.",
        ),
        (
            True,
            "expected samples of both kinds to learn from; found no unsatisfied text among 4000. p satisfies "
            "this oracle already, or the oracle says yes to everything: audit it.",
        ),
    ],
)
def test_one_kind_of_label_is_refused(tabular: tuple[TabularReader, Samples], value: bool, text: str) -> None:
    reader, samples = tabular
    at = samples.table.column_names.index("satisfied")
    table = samples.table.set_column(at, "satisfied", pa.array([value] * len(samples)))
    with pytest.raises(InputError) as caught:
        TrainingData.from_samples(Samples(table), reader)
    assert str(caught.value) == text


def test_divergence_stops_and_says_where(tabular: tuple[TabularReader, Samples]) -> None:
    reader, samples = tabular
    data = TrainingData.from_samples(samples, reader)
    guide = fresh_guide(reader)
    guide.head.bias.bias.data.fill_(torch.nan)
    with pytest.raises(DivergenceError) as caught:
        train(guide, reader, data, TrainingConfig(steps=2, batch_size=8))
    assert str(caught.value) == (
        "expected a finite loss; found loss nan and gradient norm nan at step 1. Lower the learning rate, or "
        "check the samples' log-probabilities; the last checkpoint is kept."
    )


def test_another_base_is_refused(tabular: tuple[TabularReader, Samples]) -> None:
    reader, _ = tabular
    guide = fresh_guide(reader)
    other = TabularModel.random(["x", "y"], vocabulary_size=4, length_limit=3, seed=6)
    with pytest.raises(
        MismatchError, match="expected the base this guide was trained for \\(unnamed, fingerprint"
    ):
        guide.attach(TabularReader(other, ["x", "y"]))
    shorter = TabularModel.random(["x", "y"], vocabulary_size=4, length_limit=2, seed=5)
    with pytest.raises(MismatchError) as caught:
        guide.attach(TabularReader(shorter, ["x", "y"]))
    assert str(caught.value) == (
        "expected a base with length limit 3, as this guide was trained for; found 2. Load the base, limit "
        "and completion named in the guide's config.json."
    )


def test_a_guide_is_saved_and_loaded_without_its_base(
    tabular: tuple[TabularReader, Samples], tmp_path: Path
) -> None:
    reader, _ = tabular
    guide = fresh_guide(reader)
    guide.save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "model.safetensors"}
    loaded = Guide.from_pretrained(tmp_path).attach(reader)
    assert torch.equal(guide_log_r(loaded, reader, "x"), guide_log_r(guide, reader, "x"))


def test_held_out_prompts_are_never_trained_on(tabular: tuple[TabularReader, Samples]) -> None:
    _, samples = tabular
    training, held_out = split_by_prompt(samples, share=0.5, seed=0)
    assert len(training) + len(held_out) == len(samples)
    assert not set(training.strings("prompt")) & set(held_out.strings("prompt"))


def test_evaluation_reports_calibration(tabular: tuple[TabularReader, Samples]) -> None:
    reader, samples = tabular
    data = TrainingData.from_samples(samples, reader)
    found = evaluate(Objective(fresh_guide(reader), reader, TrainingConfig()), data)
    assert 0 < found["calibration_error"] < 1
    assert calibration_error(torch.tensor([0.25] * 4), torch.tensor([1.0, 0, 0, 0])) == 0
    assert calibration_error(torch.tensor([0.9] * 4), torch.zeros(4)) == pytest.approx(0.9)


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"
)  # inductor's own
def test_a_compiled_body_gives_the_same_losses(tabular: tuple[TabularReader, Samples]) -> None:
    reader, samples = tabular
    data = TrainingData.from_samples(samples, reader)
    guide = fresh_guide(reader)
    torch.nn.init.normal_(guide.head.vector.weight, generator=torch.Generator().manual_seed(1))
    torch._dynamo.utils.counters.clear()
    compiled, plain = (Objective(guide, reader, TrainingConfig(compiled=each)) for each in (True, False))
    for rows in (torch.arange(64), torch.arange(100)):  # another shape must not need another compilation
        batch = data.batch(rows, reader)
        for mine, theirs in zip(compiled(batch)[0], plain(batch)[0], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    assert torch._dynamo.utils.counters["frames"]["ok"] > 0  # something was compiled


def test_the_learning_rate_rises_then_falls() -> None:
    config = TrainingConfig(steps=100, ramp_steps=10, learning_rate=1.0, final_share=0.1)
    rates = [learning_rate(config, step) for step in range(1, 101)]
    assert rates[0] == 0.1
    assert rates[9] == 1.0
    assert rates[-1] == pytest.approx(0.1)
    assert all(a >= b for a, b in pairwise(rates[9:]))


def test_a_config_without_steps_is_refused() -> None:
    with pytest.raises(InputError) as caught:
        dataclasses.replace(TrainingConfig(), steps=0)
    assert str(caught.value) == "expected steps of at least 1; found 0. Ask for 1 or more."


def run_processes(count: int, folder: Path) -> list[float]:
    script = Path(__file__).parent / "train_in_processes.py"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={count}"]
    command = [*(launcher if count > 1 else [sys.executable]), str(script), str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    losses: list[float] = json.loads(done.stdout.strip().splitlines()[-1])
    return losses


def test_two_processes_take_the_steps_of_one(tmp_path: Path) -> None:
    """Batches of 63 rows: the shares are unequal, and only global counts make the losses agree."""
    alone, together = run_processes(1, tmp_path / "1"), run_processes(2, tmp_path / "2")
    np.testing.assert_allclose(together, alone, rtol=1e-5)
