"""Drawing with vLLM: the same folder of samples as `nado.drawing.draw`, written by vLLM's engine.

The rows are draws of the same p, but not the same rows: vLLM has random numbers of its own. Each row has its
own seed, so a run can be repeated and taken up; a folder begun by another engine is refused. vLLM tells log p
of what it draws. Before a shard is written, some of its rows are scored by the base itself, as transformers
computes it: an engine that computes something else than p is an error, not a folder of wrong samples.
"""

import importlib.metadata
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch

from nado.distributed.vllm_sampling import Asked, Row, ask_for, require_p, row_seed
from nado.drawing import open_run, require_prompts
from nado.errors import InputError, MismatchError, MissingPackageError, require_at_least
from nado.huggingface import CausalModel, EncoderDecoderModel
from nado.language_model import is_finished
from nado.progress import Listener
from nado.prompts import Prompt
from nado.proposals import Proposal
from nado.samples import SCHEMA, Folder, Samples, samples_folder
from nado.storage import hold
from nado.study.sections import BaseConfig
from nado.tiny import locate_base
from nado.versions import versions

BATCH_SIZE = 256  # rows vLLM writes at a time
CHECKED_ROWS = 16  # of every shard, scored by the base itself
# How far log p may be from the base's own, as a mean over a row's tokens: for every row in float32, where
# 1e-5 is usual; for the rows together in anything less precise, where one row may be ten times as far. There
# the logits themselves are rounded, those around 20 to an eighth, and twice: 0.05 is usual.
TOLERANCE = (1e-4, 0.15)
_ROUNDED_ROW = 10.0
_FEWEST_TOKENS = 8  # a shorter row counts as one of so many: a mean of two roundings says little
_EDGE_SHARE = 0.02  # of tokens that rounding may put on the other side of a truncation, below float32
_CPU_CACHE_BYTES = 2**30  # for keys and values, on a CPU
_GPU_SHARE = 0.9  # of the GPU memory that is free when the engine starts
# vLLM prints to stdout, which is for results; and much.
_LOGGING = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_LOGGING_STREAM": "ext://sys.stderr"}


def draw_with_vllm(
    model: CausalModel | EncoderDecoderModel,
    name: str | Path,
    prompts: Sequence[Prompt],
    folder: str | Path,
    *,
    samples_per_prompt: int = 1,
    proposal: Proposal | None = None,
    seed: int = 0,
    batch_size: int | None = None,
    shard_rows: int | None = None,
    on_progress: Listener | None = None,
    revision: str | None = None,
) -> Samples:
    """Draw as `nado.drawing.draw` does, from the base that `model` is, loaded by vLLM from `name`.

    `model` encodes the prompts, checks what vLLM says of log p, and names the run. Only p itself can be drawn
    from, and only what `ask_for` can map.
    """
    require_p(proposal if proposal is not None else Proposal())
    require_prompts(prompts)
    require_at_least(1, samples_per_prompt=samples_per_prompt, batch_size=batch_size, shard_rows=shard_rows)
    model, path = _require_loadable(model, name)
    asked = ask_for(model.warpers, model.eos_ids, model.vocabulary_size, model.length_limit)
    target = samples_folder(folder)
    with hold(target.path):
        run = open_run(
            target,
            prompts,
            model.fingerprint,
            lambda: BATCH_SIZE,
            samples_per_prompt=samples_per_prompt,
            proposal=Proposal(),
            seed=seed,
            batch_size=batch_size,
            shard_rows=shard_rows,
            on_progress=on_progress,
            engine="vllm",
        )
        work = [
            Work(index, run.shards[index], [prompts[row // samples_per_prompt] for row in run.shards[index]])
            for index in run.missing
        ]
        if work:
            longest = _longest(model, [prompt for each in work for prompt in each.prompts])
            with start_engine(model, path, run.config["batch_size"], longest, revision) as engine:
                for each in work:
                    table = draw_rows(engine, model, asked, each.prompts, each.rows, seed)
                    check_log_p(model, table)
                    target.write(each.shard, table)
                    run.meter.count(table.num_rows, len(table["tokens"].combine_chunks().flatten()))
        return _finish(target, run.manifest)


class Work(NamedTuple):
    """A shard to draw: its rows, and the prompt of each."""

    shard: int
    rows: range
    prompts: list[Prompt]


def _finish(target: Folder, manifest: dict[str, Any]) -> Samples:
    """Read everything back; if that is news, say in the manifest what it was made with."""
    samples = Samples(target.read(manifest))
    if None in manifest["shards"]:
        target.close(manifest, versions=versions() | {"vllm": vllm_version()})
    return samples


def locate_for_vllm(base: BaseConfig) -> dict[str, Any]:
    """`name` and `revision` of `draw_with_vllm` for a study's base."""
    if base.adapter is not None:
        raise InputError(
            "a base without an adapter, for the engine vllm",
            f"the adapter {base.adapter}",
            "Merge it and save the result as a folder of its own, or draw with the engine local.",
        )
    return {"name": base.name, "revision": base.revision}


def draw_rows(
    engine: Any, model: CausalModel, asked: Asked, prompts: Sequence[Prompt], rows: Sequence[int], seed: int
) -> pa.Table:
    """One text for each prompt; `rows` are their numbers, on which their seeds depend."""
    settings = import_module("vllm").SamplingParams
    encoded = model.encode([each.prompt for each in prompts])
    outputs = engine.generate(
        [{"prompt_token_ids": [*row, *asked.forced]} for row in encoded],
        [settings(**asked.settings, seed=row_seed(seed, row)) for row in rows],
        use_tqdm=False,
    )
    drawn = [
        asked.read(answer.token_ids, answer.logprobs, answer.finish_reason)
        for answer in (output.outputs[0] for output in outputs)
    ]
    return _to_table(model, prompts, rows, drawn)


def _to_table(
    model: CausalModel, prompts: Sequence[Prompt], rows: Sequence[int], drawn: Sequence[Row]
) -> pa.Table:
    log_p = [row.log_p for row in drawn]
    ended = torch.tensor([row.ended for row in drawn])
    return pa.table(
        {
            "row": np.asarray(rows, dtype=np.int64),
            "prompt": [each.prompt for each in prompts],
            "condition": [each.condition for each in prompts],
            "tokens": [row.tokens for row in drawn],
            "text": model.decode([row.tokens for row in drawn]),
            "log_p": log_p,
            "log_proposal": log_p,
            "finished": is_finished(ended, model.completion).numpy(),
            "proposal": [Proposal().name()] * len(drawn),
            "prefix_length": np.zeros(len(drawn), dtype=np.int32),
        }
    ).cast(SCHEMA)


def check_log_p(model: CausalModel, table: pa.Table) -> None:
    """Compare log p of some rows, evenly spread, with the base's own; too large a gap names the worst row."""
    spread = np.unique(np.linspace(0, table.num_rows - 1, CHECKED_ROWS).round().astype(np.int64))
    rows = table.take(pa.array(spread)).to_pylist()
    lengths = torch.tensor([len(row["tokens"]) for row in rows])
    padded = torch.zeros(len(rows), int(lengths.max()), dtype=torch.long)
    for at, row in enumerate(rows):
        padded[at, : len(row["tokens"])] = torch.tensor(row["tokens"])
    own = model.score([row["prompt"] for row in rows], padded, lengths).cpu().numpy()
    rounded = model.model.dtype != torch.float32
    lenient = rounded and np.isneginf(own).sum() <= _EDGE_SHARE * int(lengths.sum())
    gaps = np.array(
        [_gap(row["log_p"], own[at, : len(row["tokens"])], lenient) for at, row in enumerate(rows)]
    )
    worst, tolerance = int(gaps.argmax()), TOLERANCE[rounded]
    if gaps[worst] > tolerance * (_ROUNDED_ROW if rounded else 1) or gaps.mean() > tolerance:
        raise MismatchError(
            f"log p as the base itself has it, within {tolerance:g} a token",
            f"{gaps[worst]:.3g} in row {rows[worst]['row']} ({rows[worst]['text'][:40]!r}) and "
            f"{gaps.mean():.3g} on average",
            "Draw with the engine local: this vLLM computes something else than p.",
        )


def _gap(told: Sequence[float], own: Any, lenient: bool) -> float:
    """The mean |Δ log p| of a row; infinite where it has tokens the base cannot write, unless lenient."""
    outside = np.isneginf(own)
    if outside.any() and not lenient:
        return float("inf")
    gaps = np.abs(np.asarray(told)[~outside] - own[~outside])
    return float(gaps.sum() / max(_FEWEST_TOKENS, len(gaps)))


# --- the engine ---------------------------------------------------------------------------------------


@contextmanager
def start_engine(
    model: CausalModel, path: str | Path, batch_size: int, longest: int, revision: str | None = None
) -> Iterator[Any]:
    """vLLM's engine with the base at `path`, in the numbers that `model` has; it ends with the block."""
    for name, value in _LOGGING.items():
        os.environ.setdefault(name, value)
    try:
        vllm = import_module("vllm")
    except ImportError as error:
        raise MissingPackageError("vllm", "vllm", "the engine vllm") from error
    engine = vllm.LLM(
        model=str(path),
        revision=revision,
        tokenizer_revision=revision,
        dtype=str(model.model.dtype).removeprefix("torch."),
        max_model_len=longest,
        max_num_seqs=batch_size,
        generation_config="vllm",  # the checkpoint's own settings are not part of p
        logprobs_mode="processed_logprobs",  # of what is drawn from: p with its warpers
        **_place(model.device),
    )
    try:
        yield engine
    finally:
        engine.llm_engine.engine_core.shutdown()


def _place(device: torch.device) -> dict[str, Any]:
    """Memory, and whether to compile: a GPU is shared with the base that checks."""
    if device.type != "cuda":
        own = {} if "VLLM_CPU_KVCACHE_SPACE" in os.environ else {"kv_cache_memory_bytes": _CPU_CACHE_BYTES}
        return {"enforce_eager": True, **own}
    free, total = torch.cuda.mem_get_info(device)
    return {"gpu_memory_utilization": round(_GPU_SHARE * free / total, 3)}


def vllm_version() -> str:
    """Which vLLM is installed; its build for CPUs has a name of its own."""
    for package in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "not installed"


def _longest(model: CausalModel, prompts: Sequence[Prompt]) -> int:
    """Tokens of the longest prompt with its text."""
    encoded = model.encode(list(dict.fromkeys(each.prompt for each in prompts)))
    return max(map(len, encoded)) + model.length_limit


def _require_loadable(
    model: CausalModel | EncoderDecoderModel, name: str | Path
) -> tuple[CausalModel, str | Path]:
    """The base, and where vLLM finds it; what it would load as something else than `model` is refused."""
    path = locate_base(name)
    if not isinstance(model, CausalModel) or str(path).endswith(".gguf"):
        raise InputError(
            "a causal base in a folder or on a hub, for the engine vllm",
            f"{path}" if isinstance(model, CausalModel) else f"{type(model).__name__} of {path}",
            "Draw with the engine local.",
        )
    return model, path
