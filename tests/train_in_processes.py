"""Run by torchrun: trains a small guide and prints the losses, once."""

import json
import os
import sys

import torch

from guide_quality import labelled_samples
from nado.exact import TabularModel
from nado.guide import Guide, GuideConfig
from nado.tabular_reader import TabularReader
from nado.training import TrainingConfig, train
from nado.training_data import TrainingData


def main() -> None:
    model = TabularModel.random(["x", "y"], vocabulary_size=4, length_limit=3, seed=5)
    reader = TabularReader(model, ["x", "y"])
    samples = labelled_samples(model, lambda c, texts: ["a" in text for text in texts], 500)
    torch.manual_seed(0)
    guide = Guide(
        GuideConfig.for_reader(reader, reads="tokens", size=16, layers=1, heads=2, matrix="own")
    ).attach(reader)
    config = TrainingConfig(steps=10, batch_size=63, learning_rate=1e-2, ramp_steps=2)
    history = train(guide, reader, TrainingData.from_samples(samples, reader), config, folder=sys.argv[1])
    if int(os.environ.get("RANK", 0)) == 0:
        print(json.dumps([row["loss"] for row in history]))


main()
