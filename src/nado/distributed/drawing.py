"""Drawing on a cluster: the same shards as `nado.drawing.draw`, row for row, made by Ray's actors.

Noise depends on (seed, row, step) alone and a shard begins afresh, so it does not matter which machine draws
it, or how often. A folder begun by one engine may be finished by the other.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from nado.distributed.cluster import connect, find_place
from nado.distributed.errors import EngineError, describe_failure, explain, to_error
from nado.distributed.shards import Made, ShardTask, make_shards
from nado.drawing import (
    default_batch_size,
    draw_rows,
    open_run,
    require_prompts,
)
from nado.errors import InputError, MismatchError, require_at_least
from nado.language_model import LanguageModel
from nado.progress import Listener, Meter
from nado.prompts import Prompt
from nado.proposals import Proposal, summarise_weights
from nado.samples import Folder, Samples, samples_folder
from nado.storage import hold
from nado.study.sections import DistributedConfig
from nado.versions import versions

LoadModel: TypeAlias = Callable[[], LanguageModel[Any]]


def draw_on_cluster(
    load: LoadModel,
    prompts: Sequence[Prompt],
    folder: str | Path,
    cluster: DistributedConfig,
    *,
    samples_per_prompt: int = 1,
    proposal: Proposal | None = None,
    seed: int = 0,
    batch_size: int | None = None,
    shard_rows: int | None = None,
    on_progress: Listener | None = None,
) -> dict[str, Any]:
    """Draw as `nado.drawing.draw` does, with actors that each `load` the model; returns how much was drawn.

    `folder` has to be on a file system that all nodes share. The samples are not read back: they may be more
    than this machine can hold.
    """
    proposal = proposal if proposal is not None else Proposal()
    _require_no_models(proposal)
    require_prompts(prompts)
    require_at_least(1, samples_per_prompt=samples_per_prompt, batch_size=batch_size, shard_rows=shard_rows)
    target = samples_folder(Path(folder).resolve())
    with hold(target.path), connect(cluster) as ray:
        found = describe_model(ray, load, cluster)
        run = open_run(
            target,
            prompts,
            found["fingerprint"],
            lambda: int(found["batch_size"]),
            samples_per_prompt=samples_per_prompt,
            proposal=proposal,
            seed=seed,
            batch_size=batch_size,
            shard_rows=shard_rows,
            on_progress=on_progress,
        )
        if run.missing:
            task = DrawTask(target, cluster.attempts, load, found["fingerprint"], proposal, run.config)
            entries = [_entry(index, run.shards[index], prompts, samples_per_prompt) for index in run.missing]
            make_shards(task, entries, find_place(ray, cluster, len(run.missing)), _counting(run.meter))
        if None in run.manifest["shards"]:
            target.close(run.manifest, versions=versions(), **_weights(target, len(run.shards), proposal))
    return _summarise(target, len(run.shards))


@dataclass
class DrawTask(ShardTask):
    """Draws shards with a model that is loaded when the first of them is asked for."""

    load: LoadModel
    fingerprint: str  # of the model that every actor must have
    proposal: Proposal
    config: dict[str, Any]  # as in the manifest

    @cached_property
    def model(self) -> LanguageModel[Any]:
        """The model, or an error if it is not the one the run began with."""
        model = self.load()
        if model.fingerprint != self.fingerprint:
            raise MismatchError(
                f"the same base on every node, {self.fingerprint}",
                f"{model.fingerprint}",
                "Give all nodes the same files, and the same numbers: set dtype in [base].",
            )
        return model

    def make(self, entry: dict[str, Any]) -> pa.Table:
        """Draw one shard."""
        rows = range(entry["first"], entry["stop"])
        each, start = self.config["samples_per_prompt"], entry["first"] // self.config["samples_per_prompt"]
        own = [Prompt(*pair) for pair in zip(entry["prompts"], entry["conditions"], strict=True)]
        return draw_rows(
            self.model,
            [own[row // each - start] for row in rows],
            rows,
            proposal=self.proposal,
            seed=self.config["seed"],
            batch_size=self.config["batch_size"],
        )


def describe_model(ray: Any, load: LoadModel, cluster: DistributedConfig) -> dict[str, Any]:
    """Fingerprint and batch size of the model as an actor will have it: this machine may have no GPU."""
    place = find_place(ray, cluster, 1)
    task = ray.remote(num_cpus=place.cpus, num_gpus=place.gpus, max_retries=cluster.attempts)(_describe)
    try:
        found: dict[str, Any] = ray.get(task.remote(load))
    except ray.exceptions.RayError as error:
        raise EngineError(
            "a base that can be loaded on the cluster",
            f"the error: {explain(error)}",
            "If memory ran out, give each actor more cores or GPUs, or load fewer bits: set dtype in [base].",
        ) from error
    if "failure" in found:
        raise to_error(found["failure"], f"on {found['node']}")
    return found


def _describe(load: LoadModel) -> dict[str, Any]:
    import socket

    try:
        model = load()
        return {"fingerprint": model.fingerprint, "batch_size": default_batch_size(model)}
    except Exception as error:
        return {"failure": describe_failure(error), "node": socket.gethostname()}


def _entry(index: int, rows: range, prompts: Sequence[Prompt], each: int) -> dict[str, Any]:
    """What an actor needs to know to draw a shard: its rows, and their prompts once each."""
    own = prompts[rows.start // each : (rows.stop - 1) // each + 1]
    return {
        "shard": index,
        "first": rows.start,
        "stop": rows.stop,
        "prompts": [prompt.prompt for prompt in own],
        "conditions": [prompt.condition for prompt in own],
    }


def _counting(meter: Meter) -> Callable[[Made], None]:
    return lambda made: meter.count(made.rows, made.tokens)


def _weights(target: Folder, shards: int, proposal: Proposal) -> dict[str, Any]:
    """What the manifest says of the weights; one shard is read at a time."""
    if proposal.is_p or proposal.uncorrected:
        return {}
    log_w = [Samples(target.read_shard(index)).log_weights() for index in range(shards)]
    return {"weights": summarise_weights(np.concatenate(log_w)).describe()}


def _summarise(target: Folder, shards: int) -> dict[str, Any]:
    """How many texts there are, and the share of finished ones."""
    finished = [
        pq.read_table(target.shard_path(index), columns=["finished"])["finished"].to_numpy()
        for index in range(shards)
    ]
    return {"texts": sum(map(len, finished)), "finished": float(np.concatenate(finished).mean())}


def _require_no_models(proposal: Proposal) -> None:
    if proposal.models:
        raise InputError(
            "a proposal made from p alone, to draw on a cluster",
            "one that is guided",
            "Draw from guided proposals with the engine local.",
        )
