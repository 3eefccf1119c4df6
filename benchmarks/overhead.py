"""What guidance costs: seconds a token, guided against the base alone, same `generate`, same run.

Both sides sample 32 tokens a text at every batch size, base and guided in turns, and the median of the turns
counts. Guides have random weights: what is learned costs nothing. "with oracle" is a guide that is told which
keywords are missing at every step, exact end on; the others ask no oracle. On a GPU the largest batch is also
measured with a static cache, for which transformers compiles the forward of both sides: kernels are then
waited for, not the host, and these are the ratios on record.

    python benchmarks/overhead.py --model FOLDER_OR_GGUF [--parts static billion dynamic]
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from nado.guidance import Guidance
from nado.guide import Guide, GuideConfig
from nado.guided import GuidedModel
from nado.huggingface import CausalModel, load_model
from nado.huggingface.reading import HuggingFaceReader
from nado.oracles import Keywords
from recording import record

WORDS = ["dog", "ball", "beach", "man", "woman", "park", "run", "throw", "car", "tree", "water", "guitar"]
_WARM_UP = 2  # turns that do not count: compilation, allocation
GUIDES: dict[str, dict[str, Any]] = {
    "4x768": {"size": 768, "layers": 4, "heads": 12},
    "light": {"reads": "light", "size": 512},
    "4x768 with oracle": {
        "size": 768,
        "layers": 4,
        "heads": 12,
        "progress_bits": 3,
        "named_parts": True,
    },
    "light with oracle": {"reads": "light", "size": 512, "progress_bits": 3, "named_parts": True},
}


def main() -> None:
    options = parse()
    torch.manual_seed(0)
    model = load_model(options.model, length_limit=options.limit)
    assert isinstance(model, CausalModel)
    large, largest = max(options.batches), f"b{max(options.batches)}"
    if model.device.type == "cpu":
        found = measure(model, options, list(GUIDES), options.batches)
        write({"timings_cpu": found, "time_ratio_cpu_light": found[largest]["light"]["ratio"]}, options)
        return
    # Written part by part, what is on record first: a run that is cut short has measured something.
    if "static" in options.parts:
        found = measure(model, options, ["4x768", "light", "4x768 with oracle"], [large], cache="static")
        ratios = {
            f"time_ratio_h200_{largest}_{name}": found[largest][name]["ratio"] for name in ("4x768", "light")
        }
        write({**ratios, "timings_h200_static": found}, options)
    if "billion" in options.parts:
        found = measure(billion(model, options), options, ["light"], [large], cache="static")
        ratio = found[largest]["light"]["ratio"]
        write({f"time_ratio_h200_{largest}_1b": ratio, "timings_h200_static_1b": found}, options)
    if "dynamic" in options.parts:
        found = measure(model, options, list(GUIDES), options.batches)
        write({"timings_h200_dynamic": found}, options)


def write(metrics: dict[str, Any], options: argparse.Namespace) -> None:
    print(json.dumps(metrics, indent=2), flush=True)
    record("overhead", metrics, output=options.output)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--limit", type=int, default=32)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument(
        "--parts",
        nargs="+",
        default=["static", "billion", "dynamic"],
        choices=["static", "billion", "dynamic"],
        help="on a GPU: what is measured; billion is a base of that many parameters, with random weights",
    )
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


def billion(like: CausalModel, options: argparse.Namespace) -> CausalModel:
    """A Llama of 1.1 billion parameters with random weights and the other model's tokenizer."""
    config = LlamaConfig(
        vocab_size=like.vocabulary_size,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=22,
        num_attention_heads=32,
        num_key_value_heads=8,
        tie_word_embeddings=True,
        eos_token_id=like.eos_id,
        dtype=like.model.dtype,
    )
    with torch.device(like.device):
        large = LlamaForCausalLM(config).to(like.model.dtype).eval()
    return CausalModel(large, like.tokenizer, length_limit=options.limit)


def measure(
    model: CausalModel,
    options: argparse.Namespace,
    names: list[str],
    batches: list[int],
    cache: str = "dynamic",
) -> dict[str, Any]:
    reader = HuggingFaceReader(model)
    guided = {name: guide_model(reader, name) for name in names}
    return {f"b{batch}": measure_batch(model, guided, options, batch, cache) for batch in batches}


def guide_model(reader: HuggingFaceReader, name: str) -> GuidedModel:
    guide = Guide(GuideConfig.for_reader(reader, **GUIDES[name]))
    for parameter in (guide.head.vector.weight, guide.head.bias.weight):
        torch.nn.init.normal_(parameter, std=1e-3)
    guide = guide.to(reader.model.device, reader.model.model.dtype).attach(reader)
    asks = "oracle" in name
    return GuidedModel(
        reader.model,
        guide,
        guidance=Guidance(exact_end=asks),
        oracle=Keywords(inflections=False) if asks else None,
    )


def measure_batch(
    model: CausalModel, guided: dict[str, GuidedModel], options: argparse.Namespace, batch: int, cache: str
) -> dict[str, Any]:
    sets = [[WORDS[(3 * row + part) % len(WORDS)] for part in range(3)] for row in range(batch)]
    prompts = [" ".join(words) + " =" for words in sets]
    conditions = [", ".join(words) for words in sets]
    ids, mask = model._pad_left(model.encode(prompts))
    common: dict[str, Any] = {
        "input_ids": ids,
        "attention_mask": mask.long(),
        "do_sample": True,
        "top_k": 0,
        "min_new_tokens": options.limit - 1,  # nobody stops early; step L is for EOS alone
        "max_new_tokens": options.limit,
        "pad_token_id": model.eos_id,
    }
    if cache == "static":
        common["cache_implementation"] = "static"
    ways: dict[str, Callable[[], Any]] = {"base": lambda: model.model.generate(**common)}
    for name, each in guided.items():
        ways[name] = lambda each=each: each.generate(conditions=conditions, **common)  # type: ignore[misc]
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(options.turns + _WARM_UP):
        for name, run in ways.items():
            began = time.perf_counter()
            run()
            if model.device.type == "cuda":
                torch.cuda.synchronize()
            if turn >= _WARM_UP:
                seconds[name].append(time.perf_counter() - began)
    base = statistics.median(seconds["base"])
    found = {
        name: {
            "ms_per_step": 1e3 * statistics.median(values) / options.limit,
            "ratio": statistics.median(values) / base,
        }
        for name, values in seconds.items()
    }
    print(
        f"{cache} cache, batch {batch}:",
        {name: round(each["ratio"], 3) for name, each in found.items()},
        flush=True,
    )
    return found


if __name__ == "__main__":
    main()
