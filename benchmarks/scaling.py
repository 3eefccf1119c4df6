"""How much faster two are than one: actors that draw, and processes that train, on the cores of this machine.

Rounds of one and of two alternate, so that both see the same machine, and the median of the rounds' ratios
counts. Everyone has one thread. Speeds are those from the first shards, or the first step, on: what starting
takes (seconds, where a run takes hours) is told beside them. The model is the embedded one.

    python benchmarks/scaling.py
"""

import argparse
import functools
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch counts the cores

from nado.distributed import draw_on_cluster
from nado.distributed.cluster import connect
from nado.progress import Progress
from nado.storage import read_json
from nado.study import read_study, run_study
from nado.study.materials import Materials, load_base
from nado.study.sections import DistributedConfig
from recording import record

PROMPTS = Path(__file__).parent.parent / "examples" / "demo" / "prompts.jsonl"
STUDY = """
[base]
name = "tiny"
length_limit = 32
device = "cpu"
[oracle]
name = "keywords"
[prompts]
file = "{prompts}"
template = "{{words}} ="
limit = {limit}
[draw]
samples_per_prompt = 16
batch_size = 64
[label]
prefixes = false
[guide]
size = 256
layers = 2
heads = 4
[data]
held_out = 0
keep_states = true
[train]
steps = {steps}
batch_size = 256
evaluate_every = 0
save_every = 0
"""


def main() -> None:
    options = parse()
    busy = os.getloadavg()[0]
    if busy > 0.5:
        print(f"others use this machine (load {busy:.1f}): ratios will be too low", file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        text = STUDY.format(prompts=options.prompts.resolve(), limit=options.limit, steps=options.steps)
        (place / "study.toml").write_text(text, encoding="utf-8")
        drawn = measure_drawing(place, options)
        trained = measure_training(place, options)
    metrics = {
        "draw_speedup_2": speedup(drawn, "rows_per_s"),
        "draw_speedup_2_with_start": speedup(drawn, "rows_per_s_with_start"),
        "train_speedup_2": speedup(trained, "tokens_per_s"),
        "runs_draw": drawn,
        "runs_train": trained,
        "setting": {
            "model": "tiny",
            "texts_drawn": drawn[0]["1"]["rows"],
            "guide": "2 x 256, tied sigmoid head, kept states, batches of 256 in two shares",
            "steps": options.steps,
            "load_before": round(busy, 2),
        },
    }
    print(json.dumps(metrics, indent=2))
    record("scaling", metrics, output=options.output)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=Path, default=PROMPTS)
    parser.add_argument("--limit", type=int, default=1000, help="prompts, of 16 texts each")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


def speedup(rounds: list[dict[str, Any]], name: str) -> float:
    """The median over rounds of two's speed over one's."""
    return statistics.median(each["2"][name] / each["1"][name] for each in rounds)


# --- drawing ------------------------------------------------------------------------------------------


def measure_drawing(place: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Rounds of one actor and of two on a cluster of two cores."""
    study = read_study(place / "study.toml")
    prompts = Materials(study).tasks.training
    rounds = []
    with connect(DistributedConfig(engine="ray", actors=2)):
        for number in range(options.rounds):
            found: dict[str, Any] = {}
            for actors in (1, 2):
                told: list[tuple[float, Progress]] = []
                began = time.perf_counter()
                draw_on_cluster(
                    functools.partial(load_base, study.base),
                    prompts,
                    place / f"drawn-{number}-{actors}",
                    DistributedConfig(engine="ray", actors=actors),
                    samples_per_prompt=study.draw.samples_per_prompt,
                    batch_size=study.draw.batch_size,
                    shard_rows=4 * 64,  # many small shards: the last ones leave an actor idle only briefly
                    on_progress=lambda now, told=told: told.append((time.perf_counter(), now)),  # type: ignore[misc]
                )
                found[str(actors)] = describe_drawing(began, told, actors)
            print("drawing", json.dumps(found), file=sys.stderr, flush=True)
            rounds.append(found)
    return rounds


def describe_drawing(began: float, told: list[tuple[float, Progress]], actors: int) -> dict[str, Any]:
    """Rows a second in all, and from when every actor has finished its first shard."""
    (first, start), (last, end) = told[actors - 1], told[-1]
    return {
        "rows": end.rows,
        "rows_per_s": (end.rows - start.rows) / (last - first),
        "rows_per_s_with_start": end.rows / (last - began),
    }


# --- training -----------------------------------------------------------------------------------------


def measure_training(place: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Rounds of one process and of two, with the same batches."""
    study = read_study(place / "study.toml", [f"prompts.limit={min(options.limit, 200)}"])
    run_study(study, place / "labelled", until="label")
    rounds = []
    for number in range(options.rounds):
        found: dict[str, Any] = {}
        for processes in (1, 2):
            folder = place / f"trained-{number}-{processes}"
            for stage in ("draw", "label"):
                (folder / stage).parent.mkdir(exist_ok=True)
                (folder / stage).symlink_to(place / "labelled" / stage)
            config = DistributedConfig(processes=processes, shares=2)
            run_study(study, folder, until="train", distributed=config)
            summary = read_json(folder / "train" / "stage.json")["summary"]
            found[str(processes)] = {
                "tokens_per_s": summary["tokens"] / summary["seconds"],
                "last_loss": summary["last"]["loss"],
            }
        print("training", json.dumps(found), file=sys.stderr, flush=True)
        rounds.append(found)
    return rounds


if __name__ == "__main__":
    main()
