"""Training a study's guide by several processes, which torchrun or accelerate starts.

On one machine `nado run study.toml --processes 8` starts them. On several, start the same on each:

    torchrun --nnodes 4 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HEAD:29500 \\
        -m nado.distributed.training study.toml --folder runs/study --shares 32

in a folder that all of them share, once its texts are drawn and labelled. Several processes take the very
steps that one would: see `nado.training.Team`, and `nado.distributed.divided_data` for what `--shares` does.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from nado.distributed.errors import EngineError, describe_failure, to_error
from nado.errors import InputError, NadoError
from nado.storage import hold, read_json, write_json
from nado.study.reading import SECTIONS, Study, make_study, read_study
from nado.study.sections import DistributedConfig, describe_section

if TYPE_CHECKING:
    from nado.distributed.divided_data import DividedData, Rank
    from nado.guide import Guide
    from nado.samples import Samples
    from nado.study.running import Run
    from nado.training import TrainingSummary
    from nado.training_data import TrainingData

_JOB, _RESULT, _FAILURE, _LOG = "job.json", "result.json", "failure.json", "processes.log"


# --- started by nado run ------------------------------------------------------------------------------


def train_in_processes(study: Study, folder: Path, config: DistributedConfig) -> dict[str, Any]:
    """Train the study's guide in `folder` with several processes of this machine; returns the summary."""
    place = folder / "train"
    for name in (_RESULT, _FAILURE):
        (place / name).unlink(missing_ok=True)
    write_json(place / _JOB, {"study": to_tables(study), "distributed": asdict(config)})
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        f"--nproc_per_node={config.processes}",
        *("-m", "nado.distributed.training", str(place / _JOB), "--folder", str(folder)),
    ]
    threads = max(1, (os.cpu_count() or 1) // config.processes)
    environment = {"OMP_NUM_THREADS": str(threads), **os.environ}
    with (place / _LOG).open("wb") as log:
        done = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env=environment, check=False)
    kept = "The last checkpoint is kept: the same command goes on."
    if (place / _FAILURE).exists():
        told = read_json(place / _FAILURE)
        raise to_error(told["failure"], f"in process {told['rank']}", kept)
    if done.returncode or not (place / _RESULT).exists():
        raise EngineError(
            f"{config.processes} training processes that end well",
            f"exit code {done.returncode}",
            f"What they said is in {place / _LOG}. {kept}",
        )
    summary: dict[str, Any] = read_json(place / _RESULT)
    for name in (_JOB, _RESULT):
        (place / name).unlink()
    return summary


def to_tables(study: Study) -> dict[str, Any]:
    """A study as tables that `make_study` makes the same study of, in another process."""
    sections = {name: getattr(study, name) for name in SECTIONS if getattr(study, name, None) is not None}
    tables = {name: describe_section(section) for name, section in sections.items()}
    plain = {name: {k: v for k, v in table.items() if v is not None} for name, table in tables.items()}
    return plain | {"oracle": study.oracle}


def _from_tables(tables: dict[str, Any]) -> Study:
    study, problems = make_study(tables, Path("/"), "the study")
    if study is None:
        raise problems[0].error
    return study


# --- in every process ---------------------------------------------------------------------------------


class Prepared(NamedTuple):
    """What a process trains on and is judged by."""

    learned: "TrainingData | DividedData"
    judged: "TrainingData | DividedData | None"
    judged_whole: "TrainingData | None"  # no states are kept of it
    held: "Samples | None"
    own: "Samples"


def train_as_team(study: Study, folder: Path, config: DistributedConfig) -> dict[str, Any]:
    """One process's part in training a study's guide; all of them return the summary, the first one saves."""
    from accelerate import PartialState

    from nado.distributed.divided_base import divide_base
    from nado.distributed.divided_data import Rank
    from nado.study.running import Run

    _require_trainable(study, config)
    state = PartialState(cpu=_on_cpu(study))  # before the base is loaded: it goes to this process's device
    run = Run(study, folder)
    if config.divide_base:
        divide_base(run.materials.base)
    guide = run.untrained(1 - _finished_share(folder / "draw"))
    data = _prepare_data(run, guide, Rank(state.process_index, state.num_processes), config)
    _keep_states(run, data, config)
    summary = _train(run, guide, data)
    # A divided base is read by all processes or by none, also by those that throw away what they save.
    with tempfile.TemporaryDirectory() as elsewhere:
        _save(run, guide, data, summary, Path(elsewhere) if state.process_index else folder / "train")
    state.wait_for_everyone()
    return summary.describe()


def _keep_states(run: "Run", data: Prepared, config: DistributedConfig) -> None:
    """Keep states of this process's texts, where that is asked for, or cheap, or the base is divided."""
    from nado.distributed.divided_base import read_in_lockstep
    from nado.study.guides import keeps_states

    reader = run.materials.reader
    if not (
        config.divide_base or keeps_states(run.study.data, getattr(data.learned, "own", data.learned), reader)
    ):
        return
    with read_in_lockstep(reader) if config.divide_base else nullcontext(reader) as together:
        for each in (data.learned, data.judged):
            if each is not None:
                each.keep_states(together)


def _train(run: "Run", guide: "Guide", data: Prepared) -> "TrainingSummary":
    from nado.study.guides import measure_satisfaction
    from nado.trackers import training_bar
    from nado.training import train

    config, reader = run.study.train, run.materials.reader
    shown = data.held if data.held is not None else data.own
    with training_bar(config.steps) as on_step:
        return train(
            guide,
            reader,
            data.learned,
            config,
            held_out=data.judged,
            folder=run.folder / "train" / "checkpoints",
            on_step=on_step,
            measure=measure_satisfaction(reader, run.materials.oracle, shown)
            if config.measure_every
            else None,
        )


def _save(run: "Run", guide: "Guide", data: Prepared, summary: "TrainingSummary", place: Path) -> None:
    """Calibrate the guide and write its folder, as `nado.study.guides.train_guide` does."""
    from nado.guide_files import save_guide
    from nado.study.guides import calibrate_guide, part_names, save_usage
    from nado.study.reporting import save_history

    study, table = run.study, None
    if data.judged_whole is not None and study.data.calibrate and not study.train.warm_up:
        table = calibrate_guide(guide, run.materials.reader, study.train, data.judged_whole)
    names = part_names(guide, run.materials.oracle)
    save_guide(guide, place, summary=summary, calibration=table, held_out=data.held, part_names=names)
    save_history(place, {"": summary.history})
    save_usage(place, study.base, study.oracle, study.prompts.template)


def _prepare_data(run: "Run", guide: "Guide", rank: "Rank", config: DistributedConfig) -> Prepared:
    """Training and held-out texts: whole, or this process's shares of them."""
    from nado.samples import read_samples
    from nado.study.guides import hold_out, prepare_texts

    study, folder = run.study, run.folder / "draw"
    reader, oracle = run.materials.reader, run.materials.oracle
    if config.shares is not None:
        return _prepare_shares(run, guide, rank, config.shares)
    kept, held = hold_out(read_samples(folder), study.data.held_out, study.train.seed)
    learned = prepare_texts(kept, guide, reader, oracle, study.data)
    judged = (
        None if held is None else prepare_texts(held, guide, reader, oracle, study.data, both_labels=False)
    )
    return Prepared(learned, *_to_judge(judged, rank), held, kept)


def _prepare_shares(run: "Run", guide: "Guide", rank: "Rank", shares: int) -> Prepared:
    """Texts of which each process reads its own shares, and held-out ones that all read."""
    import torch

    from nado.distributed.divided_data import Spread, divide, number_shares, read_index, read_places
    from nado.samples import join_samples
    from nado.study.guides import hold_out, prepare_texts

    if shares % rank.of:
        raise InputError(f"shares that {rank.of} processes can divide evenly", f"{shares}", "Use a multiple.")
    study, folder = run.study, run.folder / "draw"
    reader, oracle = run.materials.reader, run.materials.oracle
    kept, held = hold_out(read_index(folder), study.data.held_out, study.train.seed)
    numbers = number_shares(kept, shares)
    samples = {
        share: read_places(folder, kept.array("place")[numbers == share]) for share in rank.own_shares(shares)
    }
    own = join_samples(samples.values())
    learned = prepare_texts(own, guide, reader, oracle, study.data, both_labels=False)
    pairs = zip(kept.strings("prompt"), kept.strings("condition"), strict=True)
    share_of = dict(zip(pairs, numbers.tolist(), strict=True))
    names = [learned.condition_names[number] for number in learned.condition.tolist()]
    own_share = torch.tensor([share_of[pair] for pair in zip(learned.prompts, names, strict=True)])
    spreads = {share: Spread.of(each) for share, each in samples.items()}
    divided = divide(learned, own_share, spreads, shares)
    texts = None if held is None else read_places(folder, held.array("place"))
    judged = (
        None if texts is None else prepare_texts(texts, guide, reader, oracle, study.data, both_labels=False)
    )
    return Prepared(divided, *_to_judge(judged, rank), texts, own)


def _to_judge(
    judged: "TrainingData | None", rank: "Rank"
) -> "tuple[DividedData | None, TrainingData | None]":
    from nado.distributed.divided_data import divide_for_evaluation

    return (None, None) if judged is None else (divide_for_evaluation(judged, rank), judged)


def _finished_share(folder: Path) -> float:
    """The share of finished texts, from that column alone."""
    import numpy as np
    import pyarrow.parquet as pq

    columns = [
        pq.read_table(path, columns=["finished"])["finished"] for path in sorted(folder.glob("*.parquet"))
    ]
    return float(np.concatenate([column.to_numpy() for column in columns]).mean())


def _on_cpu(study: Study) -> bool:
    import torch

    return study.base.device == "cpu" or not torch.cuda.is_available()


def _require_trainable(study: Study, config: DistributedConfig) -> None:
    if study.rounds is not None:
        raise InputError(
            "a study without [rounds], to train in processes", "one with it", "Train it in one process."
        )
    if study.base.device is not None and study.base.device.startswith("cuda:"):
        raise InputError(
            "a base whose device each process may choose",
            f"device {study.base.device!r}",
            "Leave device out of [base].",
        )
    if config.divide_base and (study.train.measure_every or study.data.keep_states is False):
        raise InputError(
            "kept states, and no measurements of guided text, with a divided base",
            f"keep_states {study.data.keep_states} and measure_every {study.train.measure_every}",
            "Leave both out: a divided base can only be read by all processes at once.",
        )


# --- the command --------------------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> None:
    """What torchrun runs: a study file, or a job that `nado run` has written."""
    parser = argparse.ArgumentParser(
        prog="torchrun -m nado.distributed.training",
        description="Train a study's guide in the processes that torchrun starts.",
    )
    parser.add_argument("study", type=Path, help="the study file (TOML)")
    parser.add_argument("--folder", type=Path, help="where the stages are kept, shared by all machines")
    parser.add_argument("--set", action="append", default=[], help="replace a value: --set train.steps=100")
    parser.add_argument("--shares", type=int, help="parts the training texts are divided into")
    parser.add_argument("--divide-base", action="store_true", help="divide the base's layers (FSDP)")
    options = parser.parse_args(arguments)
    rank = int(os.environ.get("RANK", 0))
    try:
        if options.study.name == _JOB:
            _run_job(options.study, options.folder, rank)
        else:
            _run_stage(options, rank)
    except NadoError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)


def _run_job(job: Path, folder: Path, rank: int) -> None:
    """A job of `nado run`, which keeps the stage's record itself."""
    told = read_json(job)
    try:
        summary = train_as_team(_from_tables(told["study"]), folder, DistributedConfig(**told["distributed"]))
    except Exception as error:
        if not (job.parent / _FAILURE).exists():
            write_json(job.parent / _FAILURE, {"failure": describe_failure(error), "rank": rank})
        raise
    if rank == 0:
        write_json(job.parent / _RESULT, summary)


def _run_stage(options: argparse.Namespace, rank: int) -> None:
    """The stage `train` of a study whose texts are there: the first process keeps its record."""
    from nado.study.running import Run
    from nado.study.stages import refuse_changed

    study = read_study(options.study, options.set)
    folder = options.folder if options.folder is not None else options.study.with_suffix("")
    config = DistributedConfig(shares=options.shares, divide_base=options.divide_base)
    _require_trainable(study, config)
    stages = {stage.name: stage for stage in Run(study, folder, config).stages()}
    refuse_changed([stages[name] for name in ("draw", "label", "train")])
    for name in ("draw", "label"):
        if stages[name].standing() != "finished":
            raise InputError(
                f"the finished stage {name} in {folder}",
                stages[name].standing(),
                "Make it first: nado run --until label.",
            )
    if stages["train"].standing() == "finished":
        return
    if rank == 0:
        with hold(folder):
            stages["train"].run(lambda: train_as_team(study, folder, config))
    else:
        train_as_team(study, folder, config)


if __name__ == "__main__":
    main()
