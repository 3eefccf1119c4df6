"""A guide's folder: saved, loaded, described, and measured beside another base."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from safetensors import safe_open

import small_models
from guide_quality import guide_log_r, labelled_samples
from nado import __version__
from nado.calibration import calibration_table
from nado.drawing import draw_rows
from nado.errors import InputError, MismatchError, StorageError
from nado.exact import TabularModel
from nado.following import GuideFollower
from nado.guide import Guide, GuideConfig
from nado.guide_files import BaseComparison, load_guide, save_guide
from nado.huggingface import CausalModel, EncoderDecoderModel
from nado.huggingface.reading import HuggingFaceReader
from nado.prompts import Prompt
from nado.proposals import Proposal
from nado.samples import Samples
from nado.tabular_reader import TabularReader
from nado.training import Objective, TrainingConfig, TrainingSummary, evaluate, train
from nado.training_data import TrainingData

PROMPTS = ["x", "y"]
COMPARED = ("success", "calibration_error", "consistency_residual")


def has_a(conditions: list[str], texts: list[str]) -> np.ndarray:
    return np.array(["a" in text for text in texts])


def reader_of(seed: int = 5, **choices: Any) -> TabularReader:
    shape = {"vocabulary_size": 4, "length_limit": 3, **choices}
    return TabularReader(TabularModel.random(PROMPTS, seed=seed, **shape), PROMPTS)


@pytest.fixture(scope="module")
def trained() -> tuple[Guide, TrainingSummary, Samples]:
    reader = reader_of()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        choices: dict[str, Any] = {"reads": "tokens", "size": 16, "layers": 1, "heads": 2, "matrix": "own"}
        names = {"base_name": "tiny-table", "oracle_name": "has an a"}
        guide = Guide(GuideConfig.for_reader(reader, **choices, **names)).attach(reader)
    held_out = labelled_samples(reader.model, has_a, 700, seed=1)
    data = TrainingData.from_samples(labelled_samples(reader.model, has_a, 500), reader)
    config = TrainingConfig(steps=40, batch_size=64, learning_rate=1e-2, ramp_steps=2, evaluate_every=20)
    summary = train(guide, reader, data, config, held_out=TrainingData.from_samples(held_out, reader))
    return guide, summary, held_out


def score(guide: Guide, reader: TabularReader, samples: Samples) -> dict[str, float]:
    data = TrainingData.from_samples(samples, reader)
    found = evaluate(Objective(guide, reader, TrainingConfig()), data)
    return {name: found[name] for name in COMPARED}


def test_a_guide_comes_back_as_it_was(
    trained: tuple[Guide, TrainingSummary, Samples], tmp_path: Path
) -> None:
    guide, summary, held_out = trained
    table = calibration_table(
        Objective(guide, guide.reader, TrainingConfig()), TrainingData.from_samples(held_out, guide.reader)
    )
    folder = save_guide(guide, tmp_path / "guide", summary=summary, calibration=table, held_out=held_out)
    assert {path.name for path in folder.iterdir()} == {
        "README.md",
        "calibration.json",
        "config.json",
        "held_out.parquet",
        "model.safetensors",
        "training.json",
    }
    assert list(tmp_path.iterdir()) == [folder]
    reader = reader_of()
    loaded = load_guide(folder, reader)
    assert not loaded.training
    assert not guide.training  # measuring it has left it as it was
    for prompt in PROMPTS:
        assert torch.equal(guide_log_r(loaded, reader, prompt), guide_log_r(guide, reader, prompt))
    assert json.loads((folder / "calibration.json").read_text()) == table
    assert json.loads((folder / "training.json").read_text())["summary"] == json.loads(
        json.dumps(summary.describe())
    )


def test_a_guide_is_the_same_before_a_save_and_after_under_whatever_name_its_base_has(
    trained: tuple[Guide, TrainingSummary, Samples], tmp_path: Path
) -> None:
    """Its identity is what dials and trainings are known by, and none of them is lost by a save."""
    guide = trained[0]
    folder = save_guide(guide, tmp_path / "guide")
    config = json.loads((folder / "config.json").read_text())
    moved = {"base_name": "./elsewhere", "nado_version": "0.0.1", "transformers_version": "4.0"}
    (folder / "config.json").write_text(json.dumps(config | moved))
    loaded = load_guide(folder, reader_of())
    assert loaded.config.base_name == "./elsewhere"
    assert loaded.config.identity() == guide.config.identity()
    assert GuideFollower(loaded).fingerprint == GuideFollower(guide).fingerprint
    loaded.config.shape_only = not loaded.config.shape_only
    assert GuideFollower(loaded).fingerprint != GuideFollower(guide).fingerprint


def test_the_card_says_what_was_measured(
    trained: tuple[Guide, TrainingSummary, Samples], tmp_path: Path
) -> None:
    guide, summary, held_out = trained
    table = {"bins": [{"predicted": 0.25, "observed": 0.3, "texts": 1234}]}
    save_guide(guide, tmp_path, summary=summary, calibration=table, held_out=held_out)
    card = (tmp_path / "README.md").read_text()
    stored = json.loads((tmp_path / "training.json").read_text())
    best = summary.history[summary.best_step - 1]
    for line in (
        "# A guide for tiny-table",
        f"| base | tiny-table, fingerprint {guide.config.base_fingerprint} |",
        "| oracle | has an a |",
        "| length limit | 3 tokens, completion `eos` |",
        f"| library | nado {__version__} |",
        "| texts | 1,000 |",
        f"| weights of step | {summary.best_step} |",
        f"| held out loss | {best['held_out_loss']:.4f} |",
        "## On 1,000 held-out texts",
        f"| success | {stored['held_out']['success']:.4f} |",
        "| 0.250 | 0.300 | 1,234 |",
        'guide = load_guide("this folder", reader)  # `reader`: the base above, as nado reads it',
    ):
        assert line in card.splitlines(), line


def test_a_guide_can_be_saved_without_its_history(
    trained: tuple[Guide, TrainingSummary, Samples], tmp_path: Path
) -> None:
    guide, _, _ = trained
    save_guide(guide, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        "README.md",
        "config.json",
        "model.safetensors",
        "training.json",
    }
    load_guide(tmp_path, reader_of())


@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_a_guide_of_a_real_base_is_saved_without_it(kind: str, tmp_path: Path) -> None:
    tokenizer = small_models.tokenizer(appends_eos=kind in small_models.SEQ2SEQ)
    adapter = CausalModel if kind in small_models.CAUSAL else EncoderDecoderModel
    model = adapter(small_models.build(kind), tokenizer, length_limit=6)
    reader = HuggingFaceReader(model)
    guide = Guide(GuideConfig.for_reader(reader, size=16, layers=1, heads=2)).attach(reader)
    torch.nn.init.normal_(guide.head.vector.weight, generator=torch.Generator().manual_seed(0))
    asked = [Prompt("the dog", "ball"), Prompt("a cat sees", "red, park")] * 8
    table = draw_rows(model, asked, range(16), proposal=Proposal(), seed=1, batch_size=8)
    samples = Samples(table.append_column("satisfied", pa.array([row % 3 == 0 for row in range(16)])))
    save_guide(guide, tmp_path, held_out=samples)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        names = file.keys()
        assert all(reader.model.vocabulary_size not in file.get_tensor(name).shape for name in names)
    loaded = load_guide(tmp_path, reader)
    data = TrainingData.from_samples(samples, reader)
    mine, theirs = (
        evaluate(Objective(each.eval(), reader, TrainingConfig()), data) for each in (loaded, guide)
    )
    assert mine == theirs
    stored = json.loads((tmp_path / "training.json").read_text())["held_out"]
    assert stored["success"] == pytest.approx(mine["success"], rel=1e-5)


def test_shards_are_small_on_request_and_replaced(
    trained: tuple[Guide, TrainingSummary, Samples], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    guide, _, _ = trained
    (tmp_path / "notes.txt").write_text("mine")
    with caplog.at_level(logging.WARNING):
        save_guide(guide, tmp_path, shard_size="5KB")
    shards = list(tmp_path.glob("model-*.safetensors"))
    largest = max(tensor.nbytes for tensor in guide.state_dict().values())
    assert len(shards) > 2
    assert largest == 64 * 16 * 4 < 5000
    # A shard is its tensors, of 5 KB at most, and a header that names them.
    assert max(path.stat().st_size for path in shards) < 5000 + 1500
    assert not caplog.messages
    loaded = load_guide(tmp_path, reader_of())
    assert torch.equal(guide_log_r(loaded, reader_of(), "x"), guide_log_r(guide, reader_of(), "x"))
    with caplog.at_level(logging.WARNING):
        save_guide(guide, tmp_path, shard_size="4KB")
    assert "alone takes 0.0 MB and is not split: its file will be larger than 4KB" in caplog.text
    save_guide(guide, tmp_path)
    assert [path.name for path in tmp_path.glob("model*")] == ["model.safetensors"]
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_shard_size_that_is_none_is_refused(
    trained: tuple[Guide, TrainingSummary, Samples], tmp_path: Path
) -> None:
    with pytest.raises(InputError) as caught:
        save_guide(trained[0], tmp_path, shard_size="small")
    assert str(caught.value) == (
        "expected a shard size such as 15MB or 5GB; found 'small'. Give a whole number and KB, MB or GB."
    )
    assert not list(tmp_path.iterdir())


def test_held_out_texts_are_few_and_whole(
    trained: tuple[Guide, TrainingSummary, Samples], tmp_path: Path
) -> None:
    guide, _, held_out = trained
    assert len(held_out) == 1400
    seen: list[BaseComparison] = []
    save_guide(guide, tmp_path, held_out=held_out)
    load_guide(tmp_path, reader_of(seed=6), allow_other_base=True, on_other_base=seen.append)
    assert seen[0].texts == 1000
    # Texts of one label only cannot be trained on, but they can be measured.
    failing = held_out.filter(~held_out.array("satisfied").astype(bool))
    save_guide(guide, tmp_path, held_out=Samples(failing.table, uncorrected=True))
    load_guide(tmp_path, reader_of(seed=6), allow_other_base=True, on_other_base=seen.append)
    assert seen[1].texts == min(1000, len(failing))
    unattached = Guide(guide.config)
    with pytest.raises(InputError) as caught:
        save_guide(unattached, tmp_path, held_out=held_out)
    assert str(caught.value) == (
        "expected a guide attached to its base, to measure it on the held-out samples; found one that is not "
        "attached. Call guide.attach(reader) first."
    )


def test_uncorrected_samples_stay_uncorrected(
    trained: tuple[Guide, TrainingSummary, Samples], tmp_path: Path
) -> None:
    """Weighted by a proposal that is marked as not to be used, the numbers would be others."""
    guide, _, held_out = trained
    at = held_out.table.column_names.index("log_proposal")
    skewed = [
        [value - 0.3 * place for place, value in enumerate(row)]
        for row in held_out.table["log_p"].to_pylist()
    ]
    table = held_out.table.set_column(at, "log_proposal", pa.array(skewed, pa.list_(pa.float32())))
    found: list[BaseComparison] = []
    for uncorrected in (True, False):
        save_guide(guide, tmp_path, held_out=Samples(table, uncorrected=uncorrected))
        load_guide(tmp_path, reader_of(seed=6), allow_other_base=True, on_other_base=found.append)
    plain = Samples(held_out.table)
    save_guide(guide, tmp_path, held_out=plain)
    load_guide(tmp_path, reader_of(seed=6), allow_other_base=True, on_other_base=found.append)
    assert found[0].other == found[2].other
    assert found[1].other != found[2].other


def test_another_base_is_refused_or_measured(
    trained: tuple[Guide, TrainingSummary, Samples], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    guide, summary, held_out = trained
    few = held_out.filter(np.arange(len(held_out)) % 2 == 0)
    save_guide(guide, tmp_path, summary=summary, held_out=few)
    other = reader_of(seed=6)
    with pytest.raises(MismatchError, match="expected the base this guide was trained for \\(tiny-table"):
        load_guide(tmp_path, other)
    with caplog.at_level(logging.WARNING):
        loaded = load_guide(tmp_path, other, allow_other_base=True)
    assert loaded.reader is other
    assert loaded.config.trained_base_fingerprint == guide.config.base_fingerprint
    own, lost = score(guide, reader_of(), few), score(loaded, other, few)
    assert lost["success"] > own["success"]
    mine, theirs = (reader.model.fingerprint[:8] for reader in (reader_of(), other))
    assert caplog.messages == [
        f"the guide was trained for the base {mine}, not {theirs}: on 700 held-out texts "
        f"success {own['success']:.4f} → {lost['success']:.4f}, "
        f"calibration error {own['calibration_error']:.4f} → {lost['calibration_error']:.4f}, "
        f"consistency residual {own['consistency_residual']:.4f} → {lost['consistency_residual']:.4f}"
    ]
    seen: list[BaseComparison] = []
    load_guide(tmp_path, other, allow_other_base=True, on_other_base=seen.append)
    assert json.loads(json.dumps(seen[0].describe()))["own"] == pytest.approx(own, rel=1e-5)
    load_guide(tmp_path, reader_of(), allow_other_base=True, on_other_base=seen.append)
    assert len(seen) == 1  # its own base needs no comparison


def test_nothing_can_be_measured_without_held_out_texts(
    trained: tuple[Guide, TrainingSummary, Samples], tmp_path: Path
) -> None:
    save_guide(trained[0], tmp_path)
    seen: list[BaseComparison] = []
    load_guide(tmp_path, reader_of(seed=6), allow_other_base=True, on_other_base=seen.append)
    assert str(seen[0]).endswith("it was saved without held-out texts, so what that costs is not known")


@pytest.mark.parametrize("choices", [{"vocabulary_size": 5}, {"length_limit": 2}, {"completion": "limit"}])
def test_another_vocabulary_limit_or_completion_is_never_allowed(
    trained: tuple[Guide, TrainingSummary, Samples], tmp_path: Path, choices: dict[str, Any]
) -> None:
    save_guide(trained[0], tmp_path)
    name, value = next(iter(choices.items()))
    with pytest.raises(MismatchError) as caught:
        load_guide(tmp_path, reader_of(**choices), allow_other_base=True)
    own = getattr(trained[0].config, name)
    assert str(caught.value) == (
        f"expected a base with {name.replace('_', ' ')} {own}, as this guide was trained for; found {value}. "
        "Load the base, limit and completion named in the guide's config.json."
    )


def test_a_base_of_another_width_is_never_allowed(
    trained: tuple[Guide, TrainingSummary, Samples], tmp_path: Path
) -> None:
    save_guide(trained[0], tmp_path)
    more = TabularReader(reader_of().model, [*PROMPTS, "z"])
    with pytest.raises(MismatchError) as caught:
        load_guide(tmp_path, more, allow_other_base=True)
    assert str(caught.value) == (
        "expected a base with condition vocabulary size 2, as this guide was trained for; found 3. Load the "
        "base named in the guide's config.json."
    )


def test_a_folder_without_a_guide_is_refused(
    trained: tuple[Guide, TrainingSummary, Samples], tmp_path: Path
) -> None:
    with pytest.raises(StorageError) as caught:
        load_guide(tmp_path / "nowhere", reader_of())
    assert str(caught.value) == (
        f"expected a guide in the folder {tmp_path / 'nowhere'}; found no config.json there. Check the "
        "folder's name; a guide on a hub has to be downloaded first."
    )
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(MismatchError) as other:
        load_guide(tmp_path, reader_of())
    assert str(other.value) == (
        f"expected a guide in {tmp_path}; found a model of type gpt2. Give a folder written by save_guide."
    )
    save_guide(trained[0], tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(StorageError, match="pickled weights are not read"):
        load_guide(tmp_path, reader_of())
    save_guide(trained[0], tmp_path, held_out=trained[2])
    (tmp_path / "held_out.parquet").write_bytes(b"nothing")
    with pytest.raises(StorageError, match="readable samples in"):
        load_guide(tmp_path, reader_of(seed=6), allow_other_base=True)
