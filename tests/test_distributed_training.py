"""Several processes, each with its own part of the texts and of the base, take the steps of one."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import small_models
from guide_quality import labelled_samples
from nado.distributed.divided_base import find_layers
from nado.distributed.divided_data import (
    DividedData,
    Rank,
    Spread,
    divide,
    divide_for_evaluation,
    number_shares,
    read_index,
    read_places,
)
from nado.distributed.training import _from_tables, main, to_tables, train_as_team
from nado.errors import InputError
from nado.exact import TabularModel
from nado.proposals import tempered
from nado.samples import Samples, join_samples, read_samples
from nado.study import read_study, run_study
from nado.study.reading import Study
from nado.study.sections import DistributedConfig
from nado.tabular_reader import TabularReader
from nado.training_data import TrainingData

WORDS = ["dog", "cat", "ball", "beach", "man", "woman", "park", "old", "red"]
STUDY = """
[base]
name = "base"
length_limit = 12
device = "cpu"
[oracle]
name = "keywords"
inflections = false
at_least = 1
[prompts]
file = "prompts.txt"
held_out = 0.25
template = "a {condition}"
[draw]
samples_per_prompt = 32
batch_size = 8
[guide]
size = 32
layers = 1
heads = 2
[train]
steps = 30
batch_size = 64
learning_rate = 6e-3
ramp_steps = 5
evaluate_every = 10
save_every = 10
"""


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study with its texts drawn and labelled."""
    folder = tmp_path_factory.mktemp("study")
    small_models.save("llama", folder / "base")
    (folder / "prompts.txt").write_text("\n".join(WORDS))
    (folder / "study.toml").write_text(STUDY)
    run_study(read_study(folder / "study.toml"), folder / "run", until="label")
    return folder


def copied(drawn: Path, place: Path, *settings: str) -> tuple[Study, Path]:
    shutil.copytree(drawn / "run", place)
    return read_study(drawn / "study.toml", settings), place


def train_alone(drawn: Path, place: Path, config: DistributedConfig, *settings: str) -> Path:
    study, folder = copied(drawn, place, *settings)
    train_as_team(study, folder, config)
    return folder


def train_together(drawn: Path, place: Path, config: DistributedConfig, *settings: str) -> Path:
    study, folder = copied(drawn, place, *settings)
    run_study(study, folder, until="train", distributed=config)
    return folder


def history(folder: Path) -> dict[str, list[float]]:
    rows = json.loads((folder / "train" / "history.json").read_text())[""]
    return {name: [row[name] for row in rows if name in row] for name in ("loss", "held_out_loss")}


def require_same(there: Path, here: Path) -> None:
    """The same losses to 1e-5, and near enough the same guide."""
    for name, values in history(here).items():
        assert len(values) >= 3
        np.testing.assert_allclose(history(there)[name], values, rtol=1e-5)
    ours, theirs = (load_file(next((folder / "train").glob("*.safetensors"))) for folder in (here, there))
    for name, value in ours.items():
        torch.testing.assert_close(theirs[name], value, rtol=1e-2, atol=1e-4)
    files = [{path.name for path in (folder / "train").iterdir()} for folder in (here, there)]
    assert files[1] - {"processes.log"} == files[0] | {"stage.json"}


# --- torchrun -----------------------------------------------------------------------------------------


def test_two_processes_with_a_share_each_take_the_steps_of_one(drawn: Path, tmp_path: Path) -> None:
    shares = DistributedConfig(shares=2)
    alone = train_alone(drawn, tmp_path / "alone", shares)
    together = train_together(drawn, tmp_path / "together", replace(shares, processes=2))
    require_same(together, alone)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        ("data.keep_states=false",),
        ("data.keep_states=true", "train.micro_batch=10", "train.positions_per_text=3"),
        ("data.balanced=true", "data.merge=false", "data.held_out=0", "train.evaluate_every=0"),
    ],
)
def test_whatever_the_setting(drawn: Path, tmp_path: Path, settings: tuple[str, ...]) -> None:
    alone = train_alone(drawn, tmp_path / "alone", DistributedConfig(shares=4), *settings)
    config = DistributedConfig(shares=4, processes=2)
    together = train_together(drawn, tmp_path / "together", config, *settings)
    np.testing.assert_allclose(history(together)["loss"], history(alone)["loss"], rtol=1e-5)
    np.testing.assert_allclose(history(together)["held_out_loss"], history(alone)["held_out_loss"], rtol=1e-5)


@pytest.mark.slow
def test_processes_that_all_read_everything_take_the_steps_of_nado_run(drawn: Path, tmp_path: Path) -> None:
    study, folder = copied(drawn, tmp_path / "alone")
    run_study(study, folder, until="train")
    together = train_together(drawn, tmp_path / "together", DistributedConfig(processes=2))
    require_same(together, folder)


READ_DIVIDED = """
import sys

import torch
from accelerate import PartialState

from nado.distributed.divided_base import divide_base, find_layers, read_in_lockstep
from nado.huggingface import load_model
from nado.huggingface.reading import HuggingFaceReader

state = PartialState(cpu=True)
whole, divided = (load_model(sys.argv[1], length_limit=6, device="cpu") for _ in range(2))
divide_base(divided)
layers = zip(find_layers(whole.model), find_layers(divided.model), strict=True)
for ours, theirs in layers:
    total = sum(each.numel() for each in ours.parameters())
    held = sum(each.to_local().numel() for each in theirs.parameters())
    assert 0.4 * total < held < 0.6 * total, (held, total)
assert divided.fingerprint == whole.fingerprint
reader, plain = HuggingFaceReader(divided), HuggingFaceReader(whole)
# One process reads three times and the other once: it has to take part in what the first still reads.
with read_in_lockstep(reader) as together:
    for number in range(1 if state.process_index else 3):
        tokens = torch.randint(4, 20, (2 + number, 5), generator=torch.Generator().manual_seed(number))
        asked = (["the dog"] * len(tokens), tokens, torch.full((len(tokens),), 5))
        torch.testing.assert_close(together.read(*asked), plain.read(*asked))
state.wait_for_everyone()
print("read")
"""


@pytest.mark.slow
def test_each_process_holds_half_of_a_divided_base_and_all_read_it_together(
    drawn: Path, tmp_path: Path
) -> None:
    script = tmp_path / "read.py"
    script.write_text(READ_DIVIDED)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [*launcher, str(script), str(drawn / "base")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("read") == 2


@pytest.mark.slow
def test_training_with_a_divided_base_takes_the_same_steps(drawn: Path, tmp_path: Path) -> None:
    alone = train_alone(drawn, tmp_path / "alone", DistributedConfig(shares=2))
    config = DistributedConfig(processes=2, shares=2, divide_base=True)
    require_same(train_together(drawn, tmp_path / "together", config), alone)


@pytest.mark.slow
def test_killed_processes_go_on_from_their_checkpoint(drawn: Path, tmp_path: Path) -> None:
    settings = ("train.steps=120", "train.save_every=5")
    config = DistributedConfig(processes=2, shares=2)
    alone = train_alone(drawn, tmp_path / "alone", DistributedConfig(shares=2), *settings)
    study, folder = copied(drawn, tmp_path / "together", *settings)
    words = [word for setting in settings for word in ("--set", setting)]
    command = [sys.executable, "-m", "nado.cli", "run", str(drawn / "study.toml"), "--folder", str(folder)]
    command += ["--until", "train", "--processes", "2", "--shares", "2", *words]
    running = subprocess.Popen(command, start_new_session=True, stderr=subprocess.DEVNULL)
    latest = folder / "train" / "checkpoints" / "latest.json"
    give_up = time.monotonic() + 200
    while not latest.exists() and time.monotonic() < give_up and running.poll() is None:
        time.sleep(0.02)
    _kill_tree(running.pid)
    running.wait(30)
    assert 0 < json.loads(latest.read_text())["step"] < 120
    run_study(study, folder, until="train", distributed=config)
    require_same(folder, alone)


def _kill_tree(pid: int) -> None:
    """Kill a process and all that it has started; torchrun gives its processes sessions of their own."""
    found = [pid]
    for parent in found:
        children = Path(f"/proc/{parent}/task/{parent}/children")
        found += [int(child) for child in children.read_text().split()] if children.exists() else []
    for each in found:
        try:
            os.kill(each, signal.SIGKILL)
        except ProcessLookupError:
            continue


@pytest.mark.slow
def test_an_error_in_a_process_is_one_line_here(drawn: Path, tmp_path: Path) -> None:
    study, folder = copied(drawn, tmp_path / "run", "train.batch_size=63")
    with pytest.raises(InputError) as caught:
        run_study(study, folder, until="train", distributed=DistributedConfig(processes=2, shares=2))
    assert caught.value.expected == "a batch_size that is a multiple of 2, the number of shares"
    assert caught.value.found in ("63 (in process 0)", "63 (in process 1)")
    assert caught.value.hint == "Change one. The last checkpoint is kept: the same command goes on."


def test_the_stage_is_recorded_when_torchrun_is_started_by_hand(drawn: Path, tmp_path: Path) -> None:
    _, folder = copied(drawn, tmp_path / "run")
    arguments = [
        str(drawn / "study.toml"),
        "--folder",
        str(folder),
        "--shares",
        "2",
        "--set",
        "train.steps=30",
    ]
    main(arguments)
    record = json.loads((folder / "train" / "stage.json").read_text())
    assert record["finished"]
    assert record["config"]["shares"] == 2
    before = (folder / "train" / "history.json").stat().st_mtime_ns
    main(arguments)
    assert (folder / "train" / "history.json").stat().st_mtime_ns == before


def test_training_by_hand_needs_labelled_texts(
    drawn: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([str(drawn / "study.toml"), "--folder", str(tmp_path)])
    assert capsys.readouterr().err.strip() == (
        f"error: expected the finished stage draw in {tmp_path}; found new. "
        "Make it first: nado run --until label."
    )


def test_a_study_survives_the_journey_to_another_process(drawn: Path) -> None:
    settings = ("train.trackers=tensorboard", "base.forbidden=5,6", "label.timeout=2.5")
    study = read_study(drawn / "study.toml", settings)
    there = _from_tables(json.loads(json.dumps(to_tables(study))))
    assert replace(there, folder=study.folder) == study


# --- dividing -----------------------------------------------------------------------------------------


def tabular_data(count: int = 60) -> tuple[TabularReader, Samples]:
    """Samples of three prompts, at a temperature of their own, so that weights differ."""
    model = TabularModel.random(list("xyz"), vocabulary_size=4, length_limit=4, seed=5)
    samples = labelled_samples(
        model, lambda c, texts: ["a" in text for text in texts], count, seed=0, proposal=tempered(1.7)
    )
    return TabularReader(model, list("xyz")), samples


def divided(samples: Samples, reader: TabularReader, shares: int) -> DividedData:
    numbers = number_shares(samples, shares)
    ordered = [samples.filter(numbers == share) for share in range(shares)]
    own = TrainingData.from_samples(join_samples(ordered), reader)
    share = torch.tensor(np.repeat(np.arange(shares), [len(each) for each in ordered]))
    return divide(own, share, {number: Spread.of(each) for number, each in enumerate(ordered)}, shares)


def test_batches_have_equally_many_texts_of_each_share_in_turn() -> None:
    reader, samples = tabular_data()
    data = divided(samples, reader, 3)
    seen: list[int] = []
    for rows in data.order(12, seed=1, epoch=0):
        assert (data.share[rows] == torch.arange(len(rows)) % 3).all()
        seen += rows.tolist()
    assert len(seen) == len(set(seen)) == 3 * int(torch.bincount(data.share).min())
    again, other = (torch.cat(data.order(12, seed=1, epoch=epoch)) for epoch in (0, 1))
    assert again.tolist() == seen
    assert other.tolist() != seen


def test_divided_data_knows_what_the_whole_knows() -> None:
    reader, samples = tabular_data()
    data = divided(samples, reader, 3)
    whole = TrainingData.from_samples(samples, reader)
    assert len(data) == len(whole)
    assert data.ess == pytest.approx(whole.ess, rel=1e-5)
    assert whole.ess < 0.95
    assert float(data.weights.sum()) == pytest.approx(float(whole.weights.double().sum()))
    assert sorted(data.lengths.tolist()) == sorted(whole.lengths.tolist())


def test_a_batch_of_divided_data_is_that_of_the_whole() -> None:
    reader, samples = tabular_data()
    data, whole = divided(samples, reader, 3), TrainingData.from_samples(samples, reader)
    rows = torch.arange(len(whole))[::7]
    ours, theirs = data.batch(rows, reader, 2, seed=9), whole.batch(rows, reader, 2, seed=9)
    for name in ("tokens", "weights", "satisfied", "sampled", "states", "log_p"):
        torch.testing.assert_close(getattr(ours, name), getattr(theirs, name))


def test_which_prefixes_are_supervised_does_not_depend_on_who_holds_the_text() -> None:
    reader, samples = tabular_data()
    whole = TrainingData.from_samples(samples, reader)
    part = divide_for_evaluation(whole, Rank(1, 3))
    rows = whole.lengths.argsort(stable=True)[1::3][::5]
    assert (part.place[rows] != rows).all()
    ours, theirs = part.batch(rows, reader, 2, seed=9), whole.batch(rows, reader, 2, seed=9)
    assert ours.sampled is not None
    torch.testing.assert_close(ours.sampled, theirs.sampled)


def test_every_process_evaluates_its_own_part_and_all_of_them_everything() -> None:
    reader, samples = tabular_data()
    whole = TrainingData.from_samples(samples, reader)
    order = whole.lengths.argsort(stable=True)
    parts = [divide_for_evaluation(whole, Rank(number, 3)) for number in range(3)]
    for number, part in enumerate(parts):
        assert part.batch(order[number::3], reader).tokens.shape[0] == len(order[number::3])
        part.keep_states(reader)
        assert part.own.states is not None
        assert len(part.own.states) == int(whole.lengths[order[number::3]].sum())
    assert sum(len(part.own) for part in parts) == len(whole)
    with pytest.raises(InputError, match="expected texts that this process holds; found 1 of 1 that another"):
        parts[0].batch(order[1:2], reader)


def test_shares_hold_whole_prompts_and_about_equally_many_texts() -> None:
    _, samples = tabular_data(40)
    few = samples.filter(np.array([p != "z" or i % 10 == 0 for i, p in enumerate(samples.strings("prompt"))]))
    numbers = number_shares(few, 2)
    by_prompt = {
        prompt: {n for n, p in zip(numbers, few.strings("prompt"), strict=True) if p == prompt}
        for prompt in "xyz"
    }
    assert all(len(found) == 1 for found in by_prompt.values())
    assert sorted(set(numbers.tolist())) == [0, 1]
    with pytest.raises(InputError, match="expected at least 4 prompts, one for each share; found 3"):
        number_shares(few, 4)


def test_a_process_reads_only_the_shards_of_its_own_rows(drawn: Path, tmp_path: Path) -> None:
    folder = tmp_path / "draw"
    shutil.copytree(drawn / "run" / "draw", folder)
    whole = read_samples(folder)
    index = read_index(folder)
    places = index.array("place")[150:170]
    shards = sorted(folder.glob("shard-*.parquet"))
    assert len(shards) > 1
    assert read_places(folder, places).table.equals(whole.table.slice(150, 20))
    shards[0].write_bytes(b"")
    assert read_places(folder, places).table.equals(whole.table.slice(150, 20))
    with pytest.raises(OSError, match="its digest is not the one in the manifest"):
        read_places(folder, np.arange(3))


@pytest.mark.parametrize(("kind", "layers"), [("llama", 2), ("gpt2", 2), ("bart", 4), ("qwen3_moe", 2)])
def test_the_layers_of_a_base_are_found(kind: str, layers: int) -> None:
    network = small_models.build(kind)
    found = find_layers(network)
    assert len(found) == layers
    assert all("Layer" in type(each).__name__ or "Block" in type(each).__name__ for each in found)
