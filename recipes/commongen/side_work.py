"""Work beside the GPU, in processes of its own: labels of drawn texts, scores of decoded ones.

Making text of every prefix and asking the oracle about it takes many times as long as drawing on a fast GPU,
and the oracle's own workers do only the second part. Here each process does both, for a folder of samples at
a time, while the GPU draws the next.
"""

import argparse
import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
from concept_sets import ConceptSet
from numpy.typing import NDArray

from nado.errors import NadoError
from nado.huggingface import CausalModel, EncoderDecoderModel
from nado.huggingface.shared import HuggingFaceModel
from nado.metrics.bleu import ORDER, corpus_bleu
from nado.metrics.coverage import coverage_metric
from nado.oracles import Keywords
from nado.sample_labels import label_samples

ResultT = TypeVar("ResultT")


class TextMaker(HuggingFaceModel):
    """The part of a model that makes text of tokens: all that labelling needs, and small enough to send."""

    def __init__(self, model: CausalModel | EncoderDecoderModel) -> None:
        self.tokenizer, self.eos_ids = model.tokenizer, model.eos_ids
        self._decodes_plainly = model._decodes_plainly
        self._fingerprint = model.fingerprint


class Workers:
    """Processes that take work; with none, this very process does it when it is handed in."""

    def __init__(self, count: int) -> None:
        self._pool: ProcessPoolExecutor | None = None
        if count:
            context = multiprocessing.get_context("spawn")  # a fork of a process with a GPU is not safe
            self._pool = ProcessPoolExecutor(count, mp_context=context, initializer=_work_alone)
            for _ in range(count):  # they start now, and not when the first work comes
                self._pool.submit(os.getpid)

    def submit(self, function: Callable[..., ResultT], *arguments: Any) -> "Future[ResultT]":
        """Hand work in."""
        if self._pool is not None:
            return self._pool.submit(function, *arguments)
        done: Future[ResultT] = Future()
        done.set_result(function(*arguments))
        return done

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *error: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


def run_with_workers(make: Callable[[argparse.Namespace, Workers], Any], options: argparse.Namespace) -> int:
    """Make a study with `options.workers` processes and run it; an error of nado's is one line, and a 1."""
    options.output.mkdir(parents=True, exist_ok=True)
    try:
        with Workers(options.workers) as workers:
            make(options, workers).run()
    except NadoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _work_alone() -> None:
    """One thread a process: there are as many processes as cores."""
    os.environ["RAYON_NUM_THREADS"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def label_folder(folder: Path, oracle: Keywords, model: TextMaker | None) -> float:
    """Label drawn samples, their prefixes too where a model is given; returns the share satisfied."""
    # Labelling asks a model for its fingerprint and for texts, and for nothing else.
    # And a folder is a part of what is learned from: texts of both kinds are not to be looked for in each.
    samples = label_samples(folder, oracle, model=cast(Any, model), prefixes=model is not None, quiet=True)
    return float(np.mean(samples.array("satisfied")))


class TextScores(NamedTuple):
    """What decoded texts come to, a row a text."""

    coverage: NDArray[np.float64]  # share of the concepts
    complete: NDArray[np.bool_]  # all of them
    bleu: NDArray[np.float64]  # counts from which BLEU of any order is made
    words: NDArray[np.float64]


def score_texts(sets: Sequence[ConceptSet], texts: Sequence[str], oracle: Keywords) -> TextScores:
    """Coverage and BLEU counts of one text a set."""
    coverage, complete = coverage_metric([each.prompt.condition for each in sets], texts, oracle)
    bleu = corpus_bleu(texts, [each.targets for each in sets], ORDER)
    words = np.array([len(text.split()) for text in texts], dtype=np.float64)
    return TextScores(coverage.rows[:, 0], complete, bleu.rows, words)
