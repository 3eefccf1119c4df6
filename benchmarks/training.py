"""Tokens per second and peak memory of training a guide, against the plain way of doing it, in one run.

Tokens are those of the texts, not padding; a step is p's distribution, R, all losses, backward and the
optimiser. The plain way holds the (batch, length, vocabulary) tensors of log p and log R, and compiles
nothing; like "uncached" it runs the base at every step.

    python benchmarks/training.py --model FOLDER_OR_GGUF --prompts sets.jsonl
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from torch import Tensor

from nado.drawing import draw_rows
from nado.guide import Guide, GuideConfig
from nado.heads import Step
from nado.huggingface import CausalModel, load_model
from nado.huggingface.reading import HuggingFaceReader
from nado.objective import reduce_vocabulary
from nado.oracles import Length
from nado.prompts import Prompt
from nado.proposals import Proposal
from nado.samples import Samples
from nado.training import Objective, Team, TrainingConfig, take_step
from nado.training_data import TrainingData
from recording import record


def main() -> None:
    options = parse()
    model = load_model(options.model, length_limit=options.limit)
    assert isinstance(model, CausalModel)
    plain = HuggingFaceReader(model)
    fused = CausalModel(model.model, model.tokenizer, length_limit=options.limit, compiled=True)
    reader = HuggingFaceReader(fused)
    data = make_data(model, reader, options)
    results = {
        "uncached": measure(reader, data, options, options.batch),
        "naive": measure(plain, data, options, options.naive_batch, naive=True),
    }
    data.keep_states(reader)
    results["cached"] = measure(reader, data, options, options.cached_batch)
    results["vocabulary_doubled"] = measure(DoubledReader(reader), data, options, options.cached_batch)
    where = "h200" if model.device.type == "cuda" else "cpu"
    memory = [results[name]["peak_bytes"] for name in ("cached", "vocabulary_doubled")]
    metrics = {
        f"tokens_per_s_{where}": results["cached"]["tokens_per_s"],
        f"tokens_per_s_{where}_uncached": results["uncached"]["tokens_per_s"],
        f"ratio_vs_naive_{where}": results["uncached"]["tokens_per_s"] / results["naive"]["tokens_per_s"],
        "peak_memory_ratio_vocab_doubled": memory[1] / memory[0] if memory[0] else None,
        f"runs_{where}": results,
        f"setting_{where}": {
            "guide": f"{options.layers} x {options.size}, tied sigmoid head",
            "batch_uncached": options.batch,
            "batch_cached": options.cached_batch,
            "mean_length": float(data.lengths.float().mean()),
            "torch": torch.__version__,
        },
    }
    print(json.dumps(metrics, indent=2))
    record("training", metrics, output=options.output)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=32768)
    parser.add_argument("--limit", type=int, default=40)
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--cached-batch", type=int, default=1024)
    parser.add_argument("--naive-batch", type=int, default=256)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--size", type=int, default=768)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


def make_data(model: Any, reader: HuggingFaceReader, options: argparse.Namespace) -> TrainingData:
    with options.prompts.open(encoding="utf-8") as lines:
        sets = [json.loads(line)["concepts"] for line in lines]
    prompts = [Prompt(" ".join(words) + " =", ", ".join(words)) for words in sets]
    asked = (prompts * (options.samples // len(prompts) + 1))[: options.samples]
    table = draw_rows(model, asked, range(len(asked)), proposal=Proposal(), seed=0, batch_size=4096)
    oracle = Length(maximum=120, unit="characters")  # speed does not depend on what is learned
    labels = oracle(table["condition"].to_pylist(), table["text"].to_pylist())
    return TrainingData.from_samples(Samples(table.append_column("satisfied", pa.array(labels))), reader)


def measure(
    reader: Any, data: TrainingData, options: argparse.Namespace, batch: int, *, naive: bool = False
) -> dict[str, Any]:
    config = TrainingConfig(batch_size=batch, half=True, compiled=not naive)
    guide = Guide(
        GuideConfig.for_reader(reader, size=options.size, layers=options.layers, heads=options.heads)
    )
    guide = guide.to(reader.model.device).attach(reader)
    if naive:
        guide.reduce = naive_reduce(guide)  # type: ignore[method-assign]
    team = Team(Objective(guide, reader, config))
    optimiser = torch.optim.AdamW(guide.parameters(), lr=1e-4, fused=True)
    batches = data.order(config.batch_size, seed=0, epoch=0)
    for step in range(5):
        take_step(team, optimiser, data, batches[step], config, step + 1)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    began, tokens = time.perf_counter(), 0
    for step in range(options.steps):
        rows = batches[step % len(batches)]
        take_step(team, optimiser, data, rows, config, step + 1)
        tokens += int(data.lengths[rows].sum())
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    result = {
        "tokens_per_s": tokens / seconds,
        "peak_bytes": torch.cuda.max_memory_allocated() - resident(data, reader),
    }
    print(type(reader).__name__, "naive" if naive else "", result, flush=True)
    return result


def resident(data: TrainingData, reader: Any) -> int:
    """What lies in memory whatever the training does: kept states and the base's matrix."""
    states = 0 if data.states is None else data.states.nbytes
    return int(states + reader.output_embeddings.nbytes)


def naive_reduce(guide: Guide) -> Any:
    def reduce(scores: Any, base_logits: Any, chosen: Tensor, generated: Tensor) -> Step:
        everything = base_logits(slice(0, len(chosen))).float().log_softmax(dim=-1)  # (N, V)
        log_r = guide.head.log_r(scores, everything)
        found = reduce_vocabulary(everything[:, None], log_r[:, None], chosen[:, None])
        eos = log_r[:, guide.config.eos_id]
        zero = torch.zeros_like(eos)
        return Step(
            found.log_r[:, 1],
            found.log_not_r[:, 1],
            found.log_s[:, 0],
            found.log_not_s[:, 0],
            eos,
            zero,
            zero,
        )

    return reduce


class DoubledReader:
    """The same base with every row of its output matrix twice."""

    def __init__(self, reader: HuggingFaceReader) -> None:
        self._reader = reader
        self.output_embeddings = torch.cat([reader.output_embeddings] * 2)
        self.model = DoubledModel(reader.model)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)

    def logits(self, states: Tensor, generated: Tensor) -> Tensor:
        return states @ self.output_embeddings.T


class DoubledModel:
    """The base itself, said to have twice the vocabulary."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.vocabulary_size = 2 * model.vocabulary_size

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


if __name__ == "__main__":
    main()
