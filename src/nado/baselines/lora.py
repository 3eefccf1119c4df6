"""Fine-tuning an adapter on the base's own positives: LoRA (Hu et al. 2021), the usual economical choice.

The same texts, the same likelihood as `fine_tuning.py`; low-rank changes of every linear layer are trained
and then merged into a copy of the base.
"""

import copy
from importlib.util import find_spec
from typing import Any

import torch

from nado.baselines.fine_tuning import Tuned, fit, untrainable, with_weights
from nado.baselines.method import Method, Provisions, Sampled, Settings, System, missing_labels

RANK = 16


class LowRankTuning(Method):
    """An adapter of the base, trained on its texts that satisfy the oracle."""

    name = "LoRA on positives"
    source = "Hu et al. 2021"
    trained = True

    def obstacle(self, given: Provisions) -> str | None:
        """It needs peft, and what fine-tuning needs."""
        if find_spec("peft") is None:
            return "peft is not installed: pip install 'nado-lm[peft]'"
        return untrainable(given) or missing_labels(given, both=False)

    def grid(self, given: Provisions) -> list[dict[str, Any]]:
        """Learning rates; adapters take higher ones than weights."""
        return [{"rank": RANK, "learning_rate": rate} for rate in (2e-3, 5e-4)]

    def prepare(self, given: Provisions, settings: Settings) -> System:
        """The base with the adapter merged in."""
        rank, rate = settings["rank"], settings["learning_rate"]
        tuned = given.remember(f"adapter rank={rank} rate={rate}", lambda: _train(given, rank, rate))
        return Sampled(tuned.model, given.rows, training=tuned.training, read_as=given.read_as)


def _train(given: Provisions, rank: int, learning_rate: float) -> Tuned:
    from peft import LoraConfig, get_peft_model

    base: Any = given.base
    network = copy.deepcopy(base.model).float()
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", lora_dropout=0.0)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(given.seed)  # not torch.manual_seed, which seeds GPUs for good
        adapted = get_peft_model(network, config)
    # The base itself, adapters inside its layers, and not PEFT's wrapper, which hides what forward takes.
    training = fit(given, adapted.get_base_model(), satisfied=True, learning_rate=learning_rate)
    return Tuned(with_weights(base, adapted.merge_and_unload()), training)
