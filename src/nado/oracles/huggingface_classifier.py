"""A Hugging Face sequence classifier as an oracle."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from nado.errors import InputError
from nado.oracles.protocol import check_threshold
from nado.oracles.scored import ScoredOracle, read_steps
from nado.oracles.suggestion import suggest
from nado.storage import digest_file

if TYPE_CHECKING:
    import torch


@dataclasses.dataclass(frozen=True)
class HuggingFaceClassifier(ScoredOracle):
    """A sequence classifier from the hub or a folder, with a threshold on one label's probability.

    `label` None reads the label from the condition. Labels of a model for several at once have
    independent probabilities (sigmoid), others share them (softmax). Texts beyond `max_tokens` are cut.
    Weights are read as safetensors only, and remote code is never run. With `steps` it says of every prefix
    which of these probabilities it has reached; a guide that is told them asks it at every token.
    """

    model: str
    label: str | None = None
    threshold: float = 0.5
    batch_size: int = 64
    max_tokens: int = 512
    device: str | None = None
    steps: tuple[float, ...] = ()
    _loaded: list[Any] = dataclasses.field(init=False, repr=False, compare=False)

    name = "huggingface_classifier"

    def __post_init__(self) -> None:
        check_threshold(self.threshold)
        object.__setattr__(self, "steps", read_steps(self.steps, 0, 1))
        object.__setattr__(self, "_loaded", [])

    @property
    def spec(self) -> str:
        """The model by name, or by the content of its folder; batch size and device change nothing."""
        source = f"{self.model!r}"
        if Path(self.model).is_dir():
            source = f"#{_digest_folder(Path(self.model))}"
        return (
            f"huggingface_classifier(model={source}, label={self.label!r}, threshold={self.threshold}, "
            f"max_tokens={self.max_tokens}{self.said_steps})"
        )

    def scores(self, conditions: Sequence[str], texts: Sequence[str]) -> NDArray[np.float64]:
        """The probability of the label asked for, for each text."""
        network, _ = self._load()
        ids = {name: i for i, name in network.config.id2label.items()}
        labels = list(conditions) if self.label is None else [self.label] * len(texts)
        columns = [_find_label(label.strip(), ids, self.model) for label in labels]
        found = np.zeros(len(texts))
        # Long texts together: less padding, and the answer does not depend on the neighbours.
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        for start in range(0, len(order), self.batch_size):
            rows = order[start : start + self.batch_size]
            probabilities = self._probabilities([texts[i] for i in rows])  # (B, labels)
            found[rows] = probabilities[np.arange(len(rows)), [columns[i] for i in rows]]
        return found

    def _probabilities(self, texts: list[str]) -> NDArray[np.float32]:
        import torch

        network, tokenizer = self._load()
        inputs = tokenizer(
            texts, padding=True, truncation=True, max_length=self.max_tokens, return_tensors="pt"
        )
        with torch.inference_mode():
            logits: torch.Tensor = network(**inputs.to(network.device)).logits.float()
        several = network.config.problem_type == "multi_label_classification" or logits.shape[1] == 1
        probabilities: NDArray[np.float32] = (
            (logits.sigmoid() if several else logits.softmax(-1)).cpu().numpy()
        )
        return probabilities

    def _load(self) -> tuple[Any, Any]:
        if not self._loaded:
            import torch
            from transformers import AutoModelForSequenceClassification, AutoTokenizer

            try:
                network = AutoModelForSequenceClassification.from_pretrained(self.model, use_safetensors=True)
                tokenizer = AutoTokenizer.from_pretrained(self.model)
            except (OSError, ValueError) as error:
                raise InputError(
                    "a sequence classifier with safetensors weights",
                    f"{self.model}: {str(error).splitlines()[0]}",
                    "Give a hub name or a folder saved with save_pretrained.",
                ) from error
            device = self.device or ("cuda" if torch.cuda.is_available() else "cpu")
            self._loaded[:] = [network.eval().to(device), tokenizer]
        return self._loaded[0], self._loaded[1]


def _find_label(label: str, ids: dict[str, int], model: str) -> int:
    if label not in ids:
        raise InputError(f"a label of the classifier {model}", repr(label), suggest(label, ids))
    return int(ids[label])


def _digest_folder(folder: Path) -> str:
    paths = sorted(folder.glob("*.json")) + sorted(folder.glob("*.safetensors"))
    return _digest_files(tuple((path.absolute(), _read_stamp(path)) for path in paths))


def _read_stamp(path: Path) -> tuple[int, ...]:
    """What is another number once a file has been written to."""
    found = path.stat()
    return found.st_size, found.st_mtime_ns, found.st_ino


@lru_cache(maxsize=32)
def _digest_files(files: tuple[tuple[Path, tuple[int, ...]], ...]) -> str:
    """A digest of files as they stand: weights are long, and are asked for with every fingerprint."""
    digest = hashlib.sha256()
    for path, _ in files:
        digest.update(path.name.encode() + digest_file(path).encode())
    return digest.hexdigest()[:16]
