"""A light guide trained in seconds on the embedded base, for tests and benchmarks that serve it with vLLM."""

from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import torch

from nado.drawing import draw_rows
from nado.guide import Guide, GuideConfig
from nado.huggingface import CausalModel, load_model
from nado.huggingface.reading import HuggingFaceReader
from nado.prompts import Prompt, read_prompts
from nado.proposals import Proposal
from nado.samples import Samples
from nado.study.materials import fill
from nado.training import TrainingConfig, train
from nado.training_data import TrainingData

LIMIT = 24
WORDS = ("the", "a", "with", "is")  # conditions: the text shall have this word
TEMPLATE = "{words} ="
_PROMPTS = Path(__file__).parent.parent / "examples" / "demo" / "prompts.jsonl"


def demo_prompts(count: int) -> list[Prompt]:
    """The first prompts of the demo, in the base's own form."""
    return fill(read_prompts(_PROMPTS), TEMPLATE)[:count]


def train_light_guide(rows: int = 640, steps: int = 60) -> tuple[CausalModel, Guide]:
    """The embedded base and a light guide for single words; weak, but it changes what is written."""
    base = load_model("tiny", length_limit=LIMIT, device="cpu")
    assert isinstance(base, CausalModel)
    reader = HuggingFaceReader(base)
    subjects = demo_prompts(rows // 8)
    asked = [Prompt(subjects[row // 8].prompt, WORDS[row % len(WORDS)]) for row in range(rows)]
    table = draw_rows(base, asked, range(rows), proposal=Proposal(), seed=1, batch_size=128)
    pairs = zip(table["condition"].to_pylist(), table["text"].to_pylist(), strict=True)
    has_word = pa.array([word in text.lower().split() for word, text in pairs])
    satisfied = pc.and_(has_word, table["finished"])
    data = TrainingData.from_samples(Samples(table.append_column("satisfied", satisfied)), reader)
    data.keep_states(reader)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        guide = Guide(GuideConfig.for_reader(reader, size=64, reads="light", base_name="tiny")).attach(reader)
    train(
        guide, reader, data, TrainingConfig(steps=steps, batch_size=48, learning_rate=5e-3, evaluate_every=0)
    )
    return base, guide
