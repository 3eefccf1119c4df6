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
    folder, choices = sys.argv[1], json.loads(sys.argv[2])
    model = TabularModel.random(["x", "y"], vocabulary_size=4, length_limit=3, seed=5)
    reader = TabularReader(model, ["x", "y"])
    data, held_out = (
        TrainingData.from_samples(
            labelled_samples(model, lambda c, texts: ["a" in text for text in texts], count, seed=seed),
            reader,
        )
        for count, seed in ((500, 0), (51, 1))
    )
    torch.manual_seed(0)
    guide = Guide(
        GuideConfig.for_reader(reader, reads="tokens", size=16, layers=1, heads=2, matrix="own")
    ).attach(reader)
    config = TrainingConfig(steps=10, learning_rate=1e-2, ramp_steps=2, **choices)
    summary = train(guide, reader, data, config, held_out=held_out, folder=folder)
    if int(os.environ.get("RANK", 0)) == 0:
        names = ("loss", "held_out_loss", "held_out_calibration_error")
        print(json.dumps([row[name] for row in summary.history for name in names if name in row]))


main()
