"""How fast the keyword oracle labels a million texts, in one process and in two.

Texts are CommonGen sentences; every other one is paired with another set's concepts, so that both answers
occur. Rounds of one process and of two worker processes alternate, so that both see the same machine; the
best round of each counts. Each round begins with a fresh oracle; `scaling_2core` includes the start of the
workers, about half a second, which a second figure leaves out.

    python benchmarks/labeling.py --data path/to/commongen/train.jsonl.gz
"""

import argparse
import gzip
import itertools
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from nado.labeling import Rows, label_batches
from nado.oracles import Keywords, prepare_forms
from recording import record

SMALL = Path(__file__).parent.parent / "tests" / "data" / "commongen"


def read_pairs(data: Path | None, count: int) -> tuple[list[str], list[str], str]:
    """Conditions and texts, repeated up to `count`, and where they come from."""
    path = data or SMALL / "dev_200.jsonl"
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as lines:
        sets = [json.loads(line) for line in lines]
    conditions = [", ".join(s["concepts"]) for s in sets for _ in s["targets"]]
    texts = [text for s in sets for text in s["targets"]]
    conditions = [c if i % 2 else conditions[(i + 997) % len(texts)] for i, c in enumerate(conditions)]
    source = "CommonGen train" if data else "the 200 CommonGen dev sets in tests/data"
    repeated = (list(itertools.islice(itertools.cycle(column), count)) for column in (conditions, texts))
    return *repeated, f"{source}: {len(texts)} sentences repeated to {count}"


def batches(conditions: list[str], texts: list[str], size: int) -> Iterator[Rows]:
    for start in range(0, len(texts), size):
        rows = slice(start, start + size)
        finished = np.ones(len(texts[rows]), dtype=bool)
        yield Rows(conditions[rows], texts[rows], finished)


def measure(
    oracle: Keywords, conditions: list[str], texts: list[str], workers: int, size: int
) -> tuple[float, float]:
    """Texts a second over the whole run, and from the first labels on (without the workers' start)."""
    begin, first, labelled = time.perf_counter(), 0.0, 0
    for labels in label_batches(oracle, batches(conditions, texts, size), workers=workers):
        first = first or time.perf_counter()
        labelled += len(labels)
    end = time.perf_counter()
    assert labelled == len(texts)
    return labelled / (end - begin), (labelled - size) / (end - first)


def measure_oracle(oracle: Keywords, conditions: list[str], texts: list[str]) -> float:
    start = time.perf_counter()
    oracle(conditions, texts)
    return len(texts) / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--data", type=Path, help="CommonGen train.jsonl.gz; without it the small committed part"
    )
    parser.add_argument("--texts", type=int, default=1_000_000)
    parser.add_argument("--batch-size", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    conditions, texts, source = read_pairs(options.data, options.texts)
    forms = prepare_forms(set(", ".join(set(conditions)).split(", ")))
    print(f"texts: {source}", file=sys.stderr)
    alone: list[float] = []
    speeds: dict[int, list[tuple[float, float]]] = {1: [], 2: []}
    for _ in range(options.rounds):
        alone.append(measure_oracle(Keywords(forms=forms), conditions, texts))
        for workers in (1, 2):
            oracle = Keywords(forms=forms)
            speeds[workers].append(measure(oracle, conditions, texts, workers, options.batch_size))
    whole = {workers: [each for each, _ in rounds] for workers, rounds in speeds.items()}
    steady = {workers: max(each for _, each in rounds) for workers, rounds in speeds.items()}
    metrics = {
        "texts_per_s_1core": round(max(whole[1])),
        "texts_per_s_2core": round(max(whole[2])),
        "scaling_2core": round(max(whole[2]) / max(whole[1]), 3),
        "scaling_2core_without_start": round(steady[2] / steady[1], 3),
        "oracle_alone_texts_per_s_1core": round(max(alone)),
        "rounds_by_workers": {str(n): [round(speed) for speed in each] for n, each in whole.items()},
        "texts": source,
    }
    path = record("labeling", metrics)
    print(json.dumps(metrics, indent=2))
    print(
        f"written to {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}",
        file=sys.stderr,
    )


if __name__ == "__main__":
    main()
