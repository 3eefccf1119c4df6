"""Training: losses against a plain reference, resuming, errors, and that R is learned."""

import dataclasses
import json
import logging
import os
import subprocess
import sys
import types
from importlib.machinery import ModuleSpec
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from safetensors import safe_open

import small_models
from guide_quality import guide_log_r, labelled_samples, measure
from nado.beam_search import search_beams
from nado.compiling import trained_attention
from nado.drawing import draw, draw_rows
from nado.errors import InputError, MismatchError, MissingPackageError
from nado.exact import TabularModel, guided_model
from nado.guidance import Guidance
from nado.guide import Guide, GuideConfig
from nado.guide_files import load_guide, save_guide
from nado.guided_language_model import GuidedLanguageModel
from nado.huggingface import CausalModel, EncoderDecoderModel
from nado.huggingface.reading import HuggingFaceReader
from nado.metrics.likelihood import score_tokens
from nado.objective import Reduced, reduce_vocabulary
from nado.oracles import Keywords
from nado.prompts import Prompt
from nado.proposals import Proposal, tempered
from nado.sample_labels import label_samples
from nado.samples import Samples
from nado.tabular_reader import TabularReader
from nado.trackers import describe_losses, training_bar
from nado.training import (
    DivergenceError,
    Losses,
    Objective,
    Team,
    TrainingConfig,
    calibration_error,
    evaluate,
    learning_rate,
    take_step,
    train,
)
from nado.training_data import TrainingData, sample_prefixes, split_by_prompt

SMALL: dict[str, Any] = {"reads": "tokens", "size": 16, "layers": 1, "heads": 2, "matrix": "own"}


def has_a(conditions: list[str], texts: list[str]) -> np.ndarray:
    return np.array(
        [(condition == "x") == ("a" in text) for condition, text in zip(conditions, texts, strict=True)]
    )


@pytest.fixture(scope="module")
def tabular() -> tuple[TabularReader, Samples]:
    model = TabularModel.random(["x", "y"], vocabulary_size=4, length_limit=3, seed=5)
    return TabularReader(model, ["x", "y"]), labelled_samples(model, has_a, 2000)


def with_prefix_labels(samples: Samples) -> Samples:
    """The same samples with the labels that an oracle with the parts "has an a" and "has a b" gives."""
    table = samples.table
    parts, stops, progress = [], [], []
    for condition, text, tokens in zip(
        *(table[name].to_pylist() for name in ("condition", "text", "tokens")), strict=True
    ):
        prefixes = [text[:length] for length in range(len(tokens))]
        parts.append(["a" in text, "b" in text])
        stops.append(has_a([condition] * len(prefixes), prefixes).tolist())
        progress.append([letter in prefix for prefix in prefixes for letter in "ab"])
    for name, column in (("parts", parts), ("stops", stops), ("progress", progress)):
        table = table.append_column(name, pa.array(column, pa.list_(pa.bool_())))
    return Samples(table)


def labelled_in_full(samples: Samples, reader: Any) -> TrainingData:
    """Training data in which no loss is zero."""
    return TrainingData.from_samples(
        with_prefix_labels(samples), reader, progress_bits=2, balanced=True, weight_form="whole"
    )


def randomise(guide: Guide, seed: int = 1) -> Guide:
    """Move the head away from zero, so that R differs from token to token."""
    torch.nn.init.normal_(guide.head.vector.weight, generator=torch.Generator().manual_seed(seed))
    return guide


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
    history = train(guide, reader, TrainingData.from_samples(samples, reader), config).history
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
    history = train(whole, reader, data, config).history

    class KilledError(Exception):
        pass

    def kill(step: int, row: dict[str, float]) -> None:
        if step == 8:
            raise KilledError

    with pytest.raises(KilledError):
        train(fresh_guide(reader, dropout=0.2), reader, data, config, folder=tmp_path, on_step=kill)
    resumed = fresh_guide(reader, seed=99, dropout=0.2)  # what it starts with does not matter
    again = train(resumed, reader, data, config, folder=tmp_path)
    assert again.history == history
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
        f"expected {tmp_path} to hold this same training run; found another guide or config, or other "
        "samples. Choose another folder, or delete this one."
    )
    for guide in (fresh_guide(reader, head="norm"), fresh_guide(reader, shape_only=True)):
        with pytest.raises(MismatchError, match="another guide or config"):
            train(guide, reader, data, TrainingConfig(steps=1, batch_size=8), folder=tmp_path)


def test_a_guide_that_was_warmed_up_in_between_is_another_one(
    tabular: tuple[TabularReader, Samples], tmp_path: Path
) -> None:
    """The folder's run cannot have left it so: its warm-up would be lost without a word."""
    reader, samples = tabular
    data, guide = TrainingData.from_samples(samples, reader), fresh_guide(reader)
    config = TrainingConfig(steps=1, batch_size=8)
    train(guide, reader, data, config, folder=tmp_path)
    train(guide, reader, data, dataclasses.replace(config, warm_up=True))
    with pytest.raises(MismatchError, match="another guide or config"):
        train(guide, reader, data, config, folder=tmp_path)


def test_gradients_need_not_be_clipped(tabular: tuple[TabularReader, Samples], tmp_path: Path) -> None:
    reader, samples = tabular
    data = TrainingData.from_samples(samples, reader)
    found = []
    for clip in (1e30, float("inf"), 1e-3):
        guide = randomise(fresh_guide(reader))
        config = TrainingConfig(steps=2, batch_size=8, clip=clip, weight_decay=0.0)
        summary = train(guide, reader, data, config, folder=tmp_path / str(clip))
        save_guide(guide, tmp_path / "guide", summary=summary)
        found.append(weights(guide))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    assert not all(torch.equal(found[0][name], found[2][name]) for name in found[0])
    for wrong in (0.0, -1.0, float("nan")):
        with pytest.raises(InputError) as raised:
            TrainingConfig(clip=wrong)
        assert str(raised.value) == f"expected clip above 0; found {wrong:g}. 1 is usual; inf clips nothing."


@pytest.mark.parametrize("kind", ["llama", "gpt2", "t5"])
def test_losses_equal_those_of_full_tensors(kind: str, tmp_path: Path) -> None:
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
    for file in (None, tmp_path / "states"):
        data.states = None
        data.keep_states(reader, file=file)
        kept = objective(data.batch(torch.arange(len(data)), reader))[0]
        for mine, theirs in zip(kept, objective(batch)[0], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
    assert (tmp_path / "states").stat().st_size == 4 * int(data.lengths.sum()) * reader.state_size


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


def test_a_column_is_copied_to_the_states_once_and_again_when_it_is_replaced(tabular: Any) -> None:
    reader, samples = tabular
    data, elsewhere = TrainingData.from_samples(samples, reader), torch.device("meta")
    copy = data._column("weights", elsewhere)
    assert copy.device == elsewhere
    assert data._column("weights", elsewhere) is copy
    data.weights = data.weights[:, :2]
    assert data._column("weights", elsewhere).shape == data.weights.shape


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


def test_a_batch_without_a_finite_gradient_is_passed_over(
    tabular: tuple[TabularReader, Samples], caplog: pytest.LogCaptureFixture
) -> None:
    """Seen on a GPU: one batch in a run, losses finite, gradients nan."""
    reader, samples = tabular
    data = TrainingData.from_samples(samples, reader)
    guide, weights = fresh_guide(reader), []
    calls = iter(range(1, 100))

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        return gradient * torch.nan if next(calls) == 2 else gradient

    guide.head.bias.bias.register_hook(spoil)
    config = TrainingConfig(steps=4, batch_size=8)
    keep: Any = lambda step, row: weights.append(guide.head.bias.bias.detach().clone())  # noqa: E731
    summary = train(guide, reader, data, config, on_step=keep)
    assert summary.skipped == 1
    assert [row.get("skipped", 0.0) for row in summary.history] == [0, 1, 0, 0]
    assert ["gradient_norm" in row for row in summary.history] == [True, False, True, True]
    assert torch.equal(weights[1], weights[0])
    assert not torch.equal(weights[2], weights[1])
    assert caplog.messages == ["step 2 is passed over: no finite gradient of guide.head.bias.bias"]


def test_a_guide_never_learns_by_attention_that_gives_nan(tabular: tuple[TabularReader, Samples]) -> None:
    """cuDNN's backward pass, torch 2.11, Hopper: padding on the left and 64 places."""
    reader, samples = tabular
    data, seen = TrainingData.from_samples(samples, reader), []
    guide = fresh_guide(reader)
    guide.body.register_forward_hook(
        lambda *_: seen.append(
            (torch.backends.cuda.cudnn_sdp_enabled(), torch.backends.cuda.mem_efficient_sdp_enabled())
        )
    )
    train(guide, reader, data, TrainingConfig(steps=2, batch_size=8))
    assert seen == [(False, True)] * 2
    assert torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("places", [63, 64, 192])
def test_gradients_behind_padding_are_numbers_on_a_gpu(places: int) -> None:
    # With cuDNN's attention they are nan for 64 and 192 places on an H200 with torch 2.11.
    made = torch.Generator("cuda").manual_seed(0)
    shape, options = (4, 2, places, 64), {"device": "cuda", "dtype": torch.bfloat16, "generator": made}
    inputs = [torch.randn(shape, **options).requires_grad_() for _ in range(3)]
    place = torch.arange(places, device="cuda")
    seen = (place[None, :] <= place[:, None]) & (place[None, :] >= places // 2)  # half of them are padding
    with trained_attention():
        mixed = torch.nn.functional.scaled_dot_product_attention(*inputs, attn_mask=seen)
    mixed[:, :, places // 2 :].float().square().sum().backward()
    assert all(torch.isfinite(each.grad).all() for each in inputs)


def test_many_such_batches_are_no_training(tabular: tuple[TabularReader, Samples]) -> None:
    reader, samples = tabular
    guide = fresh_guide(reader)
    guide.head.bias.bias.register_hook(lambda gradient: gradient * torch.nan)
    with pytest.raises(DivergenceError, match="expected finite gradients; found none at 4 of 4 steps"):
        train(
            guide, reader, TrainingData.from_samples(samples, reader), TrainingConfig(steps=9, batch_size=8)
        )


def test_a_warm_up_alone_leaves_r_without_a_scale(
    tabular: tuple[TabularReader, Samples], tmp_path: Path
) -> None:
    """Semantics 9: what compares R with a number is refused, and what needs its shape alone is not."""
    reader, samples = tabular
    data, guide = TrainingData.from_samples(samples, reader), fresh_guide(reader)
    assert not guide.config.shape_only
    train(guide, reader, data, TrainingConfig(steps=2, batch_size=8, warm_up=True))
    save_guide(guide, tmp_path)
    warmed = load_guide(tmp_path, reader)
    model: Any = reader.model
    for guidance, name in (
        (Guidance(target_rate=0.5), "target_rate"),
        (Guidance(doubt=0.1), "doubt"),
        (Guidance(floor=0.1), "floor"),
    ):
        with pytest.raises(InputError) as caught:
            GuidedLanguageModel(model, warmed, guidance=guidance)
        assert str(caught.value) == (
            f"expected a guide whose R is a probability, which {name} is compared with; found one that was "
            "only warmed up: its R is known up to a factor at every prefix. Train it further without "
            f"warm_up, or leave {name} out."
        )
    for refused in (lambda: ~warmed, lambda: warmed | warmed):
        with pytest.raises(InputError, match="a guide whose R is a probability, for "):
            refused()
    with pytest.raises(InputError) as caught:
        search_beams(GuidedLanguageModel(model, warmed), [Prompt("x", "x")], beams=2)
    assert str(caught.value) == (
        "expected a guide whose R is a probability, by which beams rank prefixes; found one that was only "
        "warmed up: its R is known up to a factor at every prefix. Train it further without warm_up, or "
        'leave beams out: search = "greedy" in a study, --greedy on a command line. In Python '
        "GuidedModel.generate(num_beams=…) searches q, which needs no more than ratios of R."
    )
    GuidedLanguageModel(model, warmed & warmed, guidance=Guidance(strength=2, plausible=0.1))
    train(warmed, reader, data, TrainingConfig(steps=2, batch_size=8))
    GuidedLanguageModel(model, warmed, guidance=Guidance(doubt=0.1))


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
    assert 0 < found["consistency_residual"] < 1
    assert calibration_error(torch.tensor([0.25] * 4), torch.tensor([1.0, 0, 0, 0])) == 0
    assert calibration_error(torch.tensor([0.9] * 4), torch.zeros(4)) == pytest.approx(0.9)


def test_the_likelihood_gain_is_what_q_says_of_satisfied_texts(
    tabular: tuple[TabularReader, Samples],
) -> None:
    reader, samples = tabular
    guide = randomise(fresh_guide(reader))
    satisfied = samples.filter(samples.array("satisfied"))
    prompts, tokens = satisfied.strings("prompt"), satisfied.table["tokens"].to_pylist()
    tables = {(key, key): guide_log_r(guide, reader, key) for key in sorted(set(prompts))}
    guided = guided_model(reader.model, tables)
    log_p, log_q = (
        sum(float(each.sum()) for each in score_tokens(model, prompts, tokens))
        for model in (reader.model, guided)
    )
    found = evaluate(Objective(guide, reader, TrainingConfig()), TrainingData.from_samples(samples, reader))
    assert abs(log_q - log_p) > 1
    assert found["likelihood_gain"] * sum(map(len, tokens)) == pytest.approx(log_q - log_p, rel=1e-3)


# Warnings of the compiler's own making: of an old decorator, and of looking at what comes into a layer.
of_the_compiler = pytest.mark.filterwarnings(
    "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning",
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",
)


@pytest.mark.slow
@of_the_compiler
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


@pytest.mark.slow
@of_the_compiler
def test_compiled_training_takes_the_same_steps(tmp_path: Path) -> None:
    """Also where batches differ in length and the guide is told its progress."""
    model = CausalModel(small_models.build("llama"), small_models.tokenizer(), length_limit=8)
    reader, oracle = HuggingFaceReader(model), Keywords(inflections=False)
    asked = [Prompt("the dog", "ball, park"), Prompt("a cat sees", "red, man")]
    draw(model, asked, tmp_path, samples_per_prompt=48, batch_size=32)
    samples = label_samples(tmp_path, oracle, model=model, prefixes=True)
    data = TrainingData.from_samples(
        samples, reader, progress_bits=2, part_names=oracle.progress_names, both_labels=False
    )
    assert len(set(data.lengths.tolist())) > 2
    histories = []
    for compiled in (False, True):
        guide = fresh_guide(reader, reads="states", matrix="tied", progress_bits=2, named_parts=True)
        config = TrainingConfig(steps=12, batch_size=16, compiled=compiled)
        histories.append([row["loss"] for row in train(guide, reader, data, config).history])
    assert histories[1] == pytest.approx(histories[0], rel=1e-3)


def test_the_learning_rate_rises_then_falls() -> None:
    config = TrainingConfig(steps=100, ramp_steps=10, learning_rate=1.0, final_share=0.1)
    rates = [learning_rate(config, step) for step in range(1, 101)]
    assert rates[0] == 0.1
    assert rates[9] == 1.0
    assert rates[-1] == pytest.approx(0.1)
    assert all(a >= b for a, b in pairwise(rates[9:]))


@pytest.mark.parametrize(
    ("choices", "text"),
    [
        ({"steps": 0}, "expected steps of at least 1; found 0. Ask for 1 or more."),
        ({"micro_batch": 0}, "expected micro_batch of at least 1; found 0. Ask for 1 or more."),
        ({"positions_per_text": 0}, "expected positions_per_text of at least 1; found 0. Ask for 1 or more."),
        ({"patience": -1}, "expected patience of at least 0; found -1. Ask for 0 or more."),
        (
            {"patience": 2, "evaluate_every": 0},
            "expected evaluations to be patient about; found patience 2 and evaluate_every 0. Evaluate every "
            "few hundred steps, or set patience to 0.",
        ),
    ],
)
def test_a_config_that_makes_no_sense_is_refused(choices: dict[str, Any], text: str) -> None:
    with pytest.raises(InputError) as caught:
        TrainingConfig(**choices)
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("choices", "text"),
    [
        (
            {"patience": 1},
            "expected held-out samples, which patience needs; found none. Hold some prompts out, or leave "
            "patience out.",
        ),
        (
            {"measure_every": 1},
            "expected a function that measures, which measure_every needs; found none. Pass measure=, or "
            "leave measure_every out.",
        ),
        (
            {"trackers": ("tensorboard",)},
            "expected a folder to log into, which trackers needs; found none. Pass folder=, or leave "
            "trackers out.",
        ),
        (
            {"trackers": ("paper",)},
            "expected trackers out of tensorboard, wandb; found 'paper'. Name one of these, or none.",
        ),
    ],
)
def test_an_option_that_could_do_nothing_is_refused(
    tabular: tuple[TabularReader, Samples], choices: dict[str, Any], text: str
) -> None:
    reader, samples = tabular
    data = TrainingData.from_samples(samples, reader)
    with pytest.raises(InputError) as caught:
        train(fresh_guide(reader), reader, data, TrainingConfig(**choices))
    assert str(caught.value) == text


def test_every_option_says_what_it_is() -> None:
    for each in dataclasses.fields(TrainingConfig):
        assert each.metadata["help"], each.name


def run_processes(count: int, folder: Path, choices: dict[str, Any]) -> list[float]:
    script = Path(__file__).parent / "train_in_processes.py"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={count}"]
    command = [*(launcher if count > 1 else [sys.executable]), str(script), str(folder), json.dumps(choices)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    losses: list[float] = json.loads(done.stdout.strip().splitlines()[-1])
    return losses


@pytest.mark.parametrize(
    "choices",
    [
        {"batch_size": 63},
        # 1,000 texts are nine batches of 111 and one of a single text, of which one process has none.
        {"batch_size": 111, "micro_batch": 11, "positions_per_text": 1, "evaluate_every": 4, "patience": 1},
    ],
)
def test_two_processes_take_the_steps_of_one(tmp_path: Path, choices: dict[str, Any]) -> None:
    """The shares are unequal: only global counts make the losses agree."""
    alone, together = (run_processes(count, tmp_path / str(count), choices) for count in (1, 2))
    np.testing.assert_allclose(together, alone, rtol=1e-5)


# --- stopping, the best weights, resuming -------------------------------------------------------------


def overfitting(samples: Samples, reader: Any) -> tuple[TrainingData, TrainingData]:
    """Ten texts to learn by heart, and others on which that shows."""
    training = np.arange(len(samples)) % (len(samples) // 10) == 0
    return (
        TrainingData.from_samples(samples.filter(training), reader),
        TrainingData.from_samples(samples.filter(~training), reader),
    )


def test_training_stops_when_patience_runs_out(tabular: tuple[TabularReader, Samples]) -> None:
    """Nothing is learned at a learning rate of 0: the first evaluation stays the best."""
    reader, samples = tabular
    data = TrainingData.from_samples(samples, reader)
    config = TrainingConfig(steps=50, batch_size=32, learning_rate=0.0, evaluate_every=2, patience=3)
    summary = train(fresh_guide(reader), reader, data, config, held_out=data)
    assert (len(summary.history), summary.best_step, summary.stopped_early) == (8, 2, True)
    patient = train(fresh_guide(reader), reader, data, dataclasses.replace(config, patience=0), held_out=data)
    assert (len(patient.history), patient.best_step, patient.stopped_early) == (50, 2, False)


def test_the_guide_ends_with_its_best_weights(tabular: tuple[TabularReader, Samples], tmp_path: Path) -> None:
    reader, samples = tabular
    data, held_out = overfitting(samples, reader)
    guide = fresh_guide(reader, size=32)
    config = TrainingConfig(
        steps=60, batch_size=30, learning_rate=3e-2, ramp_steps=1, evaluate_every=5, save_every=7
    )
    summary = train(guide, reader, data, config, held_out=held_out, folder=tmp_path)
    losses = {row["step"]: row["held_out_loss"] for row in summary.history if "held_out_loss" in row}
    assert summary.best_step == min(losses, key=lambda step: losses[step]) < 60
    found = evaluate(Objective(guide, reader, config), held_out)["loss"]
    assert found == pytest.approx(losses[summary.best_step], rel=1e-6)
    assert found < 0.95 * losses[60]
    with safe_open(tmp_path / "best.safetensors", "pt") as file:
        assert file.metadata() == {"step": str(summary.best_step)}
        for name, value in weights(guide).items():
            assert torch.equal(value, file.get_tensor(name)), name
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["best.safetensors", "latest.json", "step-0000060.safetensors"]


@pytest.mark.parametrize("killed_at", [6, 13, 27])
def test_patience_and_the_best_weights_survive_a_kill(
    tabular: tuple[TabularReader, Samples], tmp_path: Path, killed_at: int
) -> None:
    reader, samples = tabular
    data, held_out = overfitting(samples, reader)
    config = TrainingConfig(
        steps=60,
        batch_size=30,
        learning_rate=3e-2,
        ramp_steps=1,
        evaluate_every=5,
        save_every=4,
        patience=4,
        positions_per_text=2,
    )

    def run(guide: Guide, **choices: Any) -> Any:
        return train(guide, reader, data, config, held_out=held_out, **choices)

    whole = fresh_guide(reader, size=32, dropout=0.2)
    wanted = run(whole)
    assert wanted.stopped_early
    assert killed_at < len(wanted.history)

    class KilledError(Exception):
        pass

    def kill(step: int, row: dict[str, float]) -> None:
        if step == killed_at:
            raise KilledError

    with pytest.raises(KilledError):
        run(fresh_guide(reader, size=32, dropout=0.2), folder=tmp_path, on_step=kill)
    for seed in (98, 99):  # the second time there is nothing left to do
        steps: dict[int, dict[str, float]] = {}
        resumed = fresh_guide(reader, seed=seed, size=32, dropout=0.2)
        found = run(resumed, folder=tmp_path, on_step=steps.__setitem__)
        timeless = (dataclasses.replace(each, seconds=0.0) for each in (found, wanted))
        assert next(timeless) == next(timeless)
        for name, value in weights(whole).items():
            assert torch.equal(value, weights(resumed)[name]), name
        assert bool(steps) == (seed == 98)


def test_a_folder_may_be_saved_to_and_logged_from_differently(
    tabular: tuple[TabularReader, Samples], tmp_path: Path
) -> None:
    reader, samples = tabular
    data = TrainingData.from_samples(samples, reader)
    config = TrainingConfig(steps=2, batch_size=8)
    first = train(fresh_guide(reader), reader, data, config, folder=tmp_path)
    again = dataclasses.replace(config, save_every=1, trackers=("tensorboard",))
    assert train(fresh_guide(reader), reader, data, again, folder=tmp_path).history == first.history
    balanced = TrainingData.from_samples(samples, reader, balanced=True)
    for changed, guide in ((balanced, fresh_guide(reader)), (data, fresh_guide(reader, size=8))):
        with pytest.raises(MismatchError, match="to hold this same training run"):
            train(guide, reader, changed, config, folder=tmp_path)


def test_the_summary_says_what_was_done(tabular: tuple[TabularReader, Samples]) -> None:
    reader, samples = tabular
    data = TrainingData.from_samples(samples, reader)
    tokens = int(data.lengths.sum())
    merged = TrainingData.from_samples(samples, reader)
    merged.merge_equal()
    config = TrainingConfig(steps=2, batch_size=2000)
    summary = train(fresh_guide(reader), reader, data, config)
    assert (summary.texts, summary.tokens, summary.ess, summary.best_step) == (4000, tokens, 1.0, 2)
    assert summary.satisfied == pytest.approx(samples.array("satisfied").mean())
    assert summary.seconds > 0
    assert not summary.stopped_early
    described = json.loads(json.dumps(summary.describe()))
    assert described["config"]["batch_size"] == 2000
    assert described["last"] == summary.history[-1]
    assert train(fresh_guide(reader), reader, merged, config).texts == 4000


# --- micro-batches and positions ----------------------------------------------------------------------


@pytest.mark.parametrize("head", ["sigmoid", "norm"])
def test_micro_batches_take_the_same_step(tabular: tuple[TabularReader, Samples], head: str) -> None:
    reader, samples = tabular
    data = labelled_in_full(samples, reader)
    found = []
    for micro_batch in (None, 1, 7):
        guide = randomise(fresh_guide(reader, head=head, progress_bits=2))
        # Plain descent of one step: AdamW's first would blow rounding in tiny gradients up to its full size.
        config = TrainingConfig(batch_size=15, steps=1, micro_batch=micro_batch, positions_per_text=2)
        team = Team(Objective(guide, reader, config))
        optimiser = torch.optim.SGD(guide.parameters(), lr=1.0)
        row = take_step(team, optimiser, data, torch.arange(100, 115), config, 1)
        found.append((row, weights(guide)))
    for row, moved in found[1:]:
        assert row == pytest.approx(found[0][0], rel=1e-6, abs=1e-6)
        for name, value in moved.items():
            torch.testing.assert_close(value, found[0][1][name], rtol=0, atol=1e-6)
    assert all(value > 0 for name, value in found[0][0].items() if name not in ("excess",))


@pytest.mark.parametrize("head", ["sigmoid", "norm"])
def test_sampled_positions_leave_every_loss_right_on_average(
    tabular: tuple[TabularReader, Samples], head: str
) -> None:
    """Exactly: the mean over all choices of one prefix is the full loss, text by text."""
    reader, samples = tabular
    data = labelled_in_full(samples, reader)
    objective = Objective(
        randomise(fresh_guide(reader, head=head, progress_bits=2)), reader, TrainingConfig()
    )
    lengths = set()
    for row in range(0, 4000, 400):
        batch = data.batch(torch.tensor([row]), reader)
        full, counts, _ = objective(batch)
        prefixes = int(batch.lengths[0]) + 1
        lengths.add(prefixes)
        several = []
        for choice in torch.eye(prefixes) * prefixes:
            sums, counted, _ = objective(dataclasses.replace(batch, sampled=choice[None]))
            assert counted == counts
            several.append(torch.stack(sums))
        torch.testing.assert_close(torch.stack(several).mean(0), torch.stack(full), rtol=1e-5, atol=1e-5)
        assert torch.stack(several).std(0)[0] > 1e-3  # they do differ
    assert len(lengths) > 1


def test_the_mean_over_seeds_is_the_full_loss(tabular: tuple[TabularReader, Samples]) -> None:
    """Within four standard errors: a false alarm in one of 5,000 runs of the three."""
    reader, samples = tabular
    data = labelled_in_full(samples, reader)
    objective = Objective(randomise(fresh_guide(reader, progress_bits=2)), reader, TrainingConfig())
    rows = torch.arange(0, 4000, 100)
    with torch.no_grad():
        full = torch.stack(objective(data.batch(rows, reader))[0])
        found = torch.stack(
            [
                torch.stack(objective(data.batch(rows, reader, positions_per_text=2, seed=seed))[0])
                for seed in range(200)
            ]
        )
    error = found.std(0) / len(found) ** 0.5
    for name in ("success", "consistency", "stop"):
        at = Losses._fields.index(name)
        assert 0 < error[at] < 0.05 * full[at]
        assert abs(found.mean(0)[at] - full[at]) < 4 * error[at], name


def test_positions_are_chosen_evenly_and_by_text_alone() -> None:
    lengths = torch.tensor([9, 4, 2, 1])
    rows = torch.tensor([5, 17, 3, 8])
    share = sample_prefixes(rows, lengths, 3, seed=1)
    assert ((share > 0).sum(1)).tolist() == [3, 3, 3, 2]  # a text of at most 3 tokens is taken whole
    assert share.sum(1).tolist() == pytest.approx([10, 5, 3, 2])
    for row in range(4):
        alone = sample_prefixes(rows[row : row + 1], lengths[row : row + 1], 3, seed=1)
        assert torch.equal(alone[0], share[row, : alone.shape[1]])
    many = torch.arange(20_000)
    shares = sample_prefixes(many, torch.full((20_000,), 9), 3, seed=2)
    # A weight is 10/3 with probability 0.3: five standard errors, a false alarm in 2e5 runs of ten columns.
    assert (shares.mean(0) - 1).abs().max() < 5 * (7 / 3 / 20_000) ** 0.5
    assert not torch.equal(shares, sample_prefixes(many, torch.full((20_000,), 9), 3, seed=3))


def test_enough_positions_are_exactly_all_of_them(tabular: tuple[TabularReader, Samples]) -> None:
    reader, samples = tabular
    data = TrainingData.from_samples(samples, reader)
    config = TrainingConfig(steps=5, batch_size=32)
    full, sampled = (
        train(fresh_guide(reader), reader, data, dataclasses.replace(config, positions_per_text=positions))
        for positions in (None, 3)
    )
    assert sampled.history == full.history


def test_only_sampled_positions_meet_the_vocabulary(tabular: tuple[TabularReader, Samples]) -> None:
    reader, samples = tabular
    data = TrainingData.from_samples(samples, reader)
    asked = []

    class CountingReader(TabularReader):
        def logits(self, states: torch.Tensor, generated: torch.Tensor) -> torch.Tensor:
            asked.append(len(states))
            return super().logits(states, generated)

    objective = Objective(fresh_guide(reader), CountingReader(reader.model, ["x", "y"]), TrainingConfig())
    rows = (data.lengths == 3).nonzero()[:100, 0]
    objective(data.batch(rows, reader))
    batch = data.batch(rows, reader, positions_per_text=1)
    objective(batch)
    # One of the four prefixes of each text: the steps beside it, one at the ends and two in between.
    ends = (batch.sampled[:, [0, -1]] > 0).sum()
    assert asked == [300, int(ends + 2 * (100 - ends))]


def test_r_is_learned_from_sampled_positions(tabular: tuple[TabularReader, Samples]) -> None:
    reader, samples = tabular
    guide = fresh_guide(reader, size=32)
    config = TrainingConfig(
        steps=150, batch_size=256, learning_rate=3e-3, ramp_steps=10, weight_decay=0.0, positions_per_text=1
    )
    train(guide, reader, TrainingData.from_samples(samples, reader), config)
    assert measure(guide, reader, has_a).total_variation < 0.12


# --- evaluation during training -----------------------------------------------------------------------


def test_evaluation_counts_texts_as_p_does(tabular: tuple[TabularReader, Samples]) -> None:
    """Balancing and merging change how the texts are stored, not how often they happen."""
    reader, samples = tabular
    objective = Objective(randomise(fresh_guide(reader)), reader, TrainingConfig())
    plain, balanced = (
        TrainingData.from_samples(samples, reader, balanced=choice) for choice in (False, True)
    )
    merged = TrainingData.from_samples(samples, reader)
    merged.merge_equal()
    wanted = evaluate(objective, plain)
    for other in (balanced, merged):
        found = evaluate(objective, other)
        for name in ("calibration_error", "consistency_residual"):
            assert found[name] == pytest.approx(wanted[name], rel=1e-4), name


def test_evaluation_and_measurement_are_done_as_in_decoding(
    tabular: tuple[TabularReader, Samples],
) -> None:
    """No gradients, no dropout, the arithmetic of training; and training goes on as it was."""
    reader, samples = tabular
    data = TrainingData.from_samples(samples, reader)
    guide = fresh_guide(reader, dropout=0.2)
    seen: list[tuple[bool, bool, torch.dtype]] = []
    guide.head.vector.register_forward_hook(
        lambda module, inputs, output: seen.append((module.training, output.requires_grad, output.dtype))
    )
    measured_at: list[int] = []

    def measure_guided(measured: Guide) -> dict[str, float]:
        assert measured is guide
        assert not guide.training
        assert not torch.is_grad_enabled()
        assert torch.is_autocast_enabled("cpu")
        measured_at.append(len(seen))
        return {"satisfied": 0.5}

    config = TrainingConfig(steps=5, batch_size=32, half=True, evaluate_every=3, measure_every=2)
    summary = train(guide, reader, data, config, held_out=data, measure=measure_guided)
    training, evaluating = (True, True, torch.bfloat16), (False, False, torch.bfloat16)
    looks = [evaluating] * -(-len(data) // 512)
    assert seen == [*[training] * 3, *looks, *[training] * 2, *looks]
    assert len(measured_at) == 3
    guided = {row["step"]: row["guided_satisfied"] for row in summary.history if "guided_satisfied" in row}
    assert guided == {2: 0.5, 4: 0.5, 5: 0.5}
    assert [row["step"] for row in summary.history if "held_out_loss" in row] == [3, 5]


# --- trackers and the bar -----------------------------------------------------------------------------


def test_tensorboard_has_every_step_once_after_a_kill(
    tabular: tuple[TabularReader, Samples], tmp_path: Path
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader, samples = tabular
    data = TrainingData.from_samples(samples, reader)
    config = TrainingConfig(steps=6, batch_size=16, save_every=2, trackers=("tensorboard",))

    def kill(step: int, row: dict[str, float]) -> None:
        if step == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(fresh_guide(reader), reader, data, config, folder=tmp_path, on_step=kill)
    summary = train(fresh_guide(reader), reader, data, config, folder=tmp_path)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    found = {event.step: event.value for event in events.Scalars("loss")}
    assert found == pytest.approx({int(row["step"]): row["loss"] for row in summary.history}, rel=1e-6)
    assert len(events.Scalars("loss")) == 6


def test_wandb_gets_one_run_a_folder(
    tabular: tuple[TabularReader, Samples], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for the package: what it is asked for, and what it is told."""
    told: list[Any] = []

    class FakeRun:
        def log(self, values: dict[str, float], step: int) -> None:
            told.append((step, values["loss"]))

        def finish(self) -> None:
            told.append("finished")

    fake = types.ModuleType("wandb")
    fake.__spec__ = ModuleSpec("wandb", None)
    fake.init = lambda **choices: told.append(choices) or FakeRun()  # type: ignore[attr-defined]
    fake.config = types.SimpleNamespace(  # type: ignore[attr-defined]
        update=lambda values, allow_val_change: told.append(values["steps"])
    )
    monkeypatch.setitem(sys.modules, "wandb", fake)
    reader, samples = tabular
    data = TrainingData.from_samples(samples, reader)
    config = TrainingConfig(steps=2, batch_size=16, trackers=("wandb",))
    summary = train(fresh_guide(reader), reader, data, config, folder=tmp_path / "study")
    first = told[0]
    assert (first["project"], first["name"], first["dir"]) == ("nado", "study", str(tmp_path / "study"))
    assert first["resume"] == "allow"
    assert told[1:] == [2, *((int(row["step"]), row["loss"]) for row in summary.history), "finished"]
    train(fresh_guide(reader), reader, data, config, folder=tmp_path / "study")
    assert told[-2]["id"] == first["id"]


def test_a_tracker_without_its_package_is_refused(
    tabular: tuple[TabularReader, Samples], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nado.trackers.find_spec", lambda name: None)
    reader, samples = tabular
    data = TrainingData.from_samples(samples, reader)
    with pytest.raises(MissingPackageError) as caught:
        train(fresh_guide(reader), reader, data, TrainingConfig(trackers=("wandb",)), folder=tmp_path)
    assert str(caught.value) == (
        "expected the package wandb for the tracker wandb; found that it is not installed. Install it with: "
        "pip install 'nado-lm[trackers]'"
    )
    assert not list(tmp_path.iterdir())


def test_the_bar_shows_losses_on_stderr(
    tabular: tuple[TabularReader, Samples], capsys: pytest.CaptureFixture[str]
) -> None:
    reader, samples = tabular
    data = TrainingData.from_samples(samples, reader)
    with training_bar(3, force=True) as show:
        summary = train(
            fresh_guide(reader), reader, data, TrainingConfig(steps=3, batch_size=8), on_step=show
        )
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "3/3" in printed.err
    assert f"loss {summary.history[-1]['loss']:.4f}" in printed.err
    with training_bar(3) as silent:  # stderr is no terminal here
        silent(1, {"loss": 1.0})
    assert capsys.readouterr().err == ""
    row = {"loss": 0.5, "held_out_loss": 0.25, "guided_all_covered": 0.875}
    assert describe_losses(row) == "loss 0.5000 · held out 0.2500 · guided all covered 0.875"
