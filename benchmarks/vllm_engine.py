"""vLLM beside our own loop on the same base: tokens a second of drawing, what a guide costs, greedy equality.

Runs of one engine and the other alternate, so that both see the same machine, and medians count; starting and
compiling are left out. Both have one core: vLLM keeps one for its own processes. Needs the environment of
`make test-vllm`; the base and the guide are those of its tests.

    .venv-vllm/bin/python benchmarks/vllm_engine.py
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch counts the cores
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch

from nado.distributed.vllm_drawing import draw_rows as draw_rows_with_vllm
from nado.distributed.vllm_drawing import start_engine, vllm_version
from nado.distributed.vllm_sampling import ask_for
from nado.drawing import draw_rows
from nado.guidance import Guidance
from nado.guided import GuidedModel
from nado.huggingface import CausalModel
from nado.prompts import Prompt
from nado.proposals import Proposal
from nado.versions import versions
from nado.vllm_plugin.folders import save_for_vllm
from recording import record

sys.path.append(str(Path(__file__).parent.parent / "tests"))

from vllm_guides import LIMIT, WORDS, demo_prompts, train_light_guide


def main() -> None:
    options = parse()
    busy = os.getloadavg()[0]
    if busy > 0.5:
        print(f"others use this machine (load {busy:.1f}): look at ratios only", file=sys.stderr)
    torch.set_num_threads(1)
    base, guide = train_light_guide()
    with tempfile.TemporaryDirectory() as place:
        folder = save_for_vllm(base, guide, Path(place) / "served", condition=WORDS[0])
        drawing = measure_drawing(base, options)
        serving = measure_serving(GuidedModel(base, guide), folder, options)
    found = versions() | {"vllm": vllm_version()}
    metrics = {
        **summarise(drawing, serving),
        "runs_draw": drawing,
        "runs_serve": serving,
        "setting": {
            "model": "tiny, float32",
            "texts": options.texts,
            "rows_at_a_time": options.batch_size,
            "length_limit": LIMIT,
            "guide": "light, size 64, tied sigmoid head",
            "versions": {name: found[name] for name in ("vllm", "torch", "transformers")},
            "load_before": round(busy, 2),
        },
    }
    print(json.dumps(metrics, indent=2))
    record("vllm", metrics, output=options.output)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--texts", type=int, default=512, help="texts a run")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


def summarise(drawing: list[dict[str, float]], serving: dict[str, Any]) -> dict[str, Any]:
    """Medians over rounds, and medians of the rounds' own ratios."""
    rounds = serving["rounds"]

    def middle(runs: list[dict[str, float]], name: str) -> float:
        return statistics.median(each[name] for each in runs)

    return {
        "draw_tokens_per_s_vllm": middle(drawing, "vllm"),
        "draw_tokens_per_s_own": middle(drawing, "own"),
        "draw_vllm_over_own": statistics.median(each["vllm"] / each["own"] for each in drawing),
        "serve_tokens_per_s_guided": middle(rounds, "guided"),
        "serve_tokens_per_s_off": middle(rounds, "off"),
        "serve_tokens_per_s_base": middle(rounds, "base"),
        "guided_over_base": statistics.median(each["guided"] / each["base"] for each in rounds),
        "greedy_equal": serving["greedy_equal"],
        "greedy_texts": serving["greedy_texts"],
        "greedy_changed_by_guide": serving["greedy_changed_by_guide"],
    }


def measure_drawing(base: CausalModel, options: argparse.Namespace) -> list[dict[str, float]]:
    """Tokens a second of drawing texts with their log p, decoded and as a table: both ways, in turns."""
    subjects = demo_prompts(options.texts // 8)
    prompts = [subject for subject in subjects for _ in range(8)]
    asked = ask_for(base.warpers, base.eos_ids, base.vocabulary_size, base.length_limit)
    rows, rounds = range(len(prompts)), []
    with start_engine(base, base.model.name_or_path, options.batch_size, 64) as engine:
        for number in range(options.rounds + 1):
            found = {}
            began = time.perf_counter()
            table = draw_rows_with_vllm(engine, base, asked, prompts, rows, seed=number)
            found["vllm"] = count_tokens(table) / (time.perf_counter() - began)
            began = time.perf_counter()
            table = draw_rows(
                base, prompts, rows, proposal=Proposal(), seed=number, batch_size=options.batch_size
            )
            found["own"] = count_tokens(table) / (time.perf_counter() - began)
            print("drawing", json.dumps(found), file=sys.stderr, flush=True)
            rounds.append(found)
    return rounds[1:]  # the first one compiles


def measure_serving(model: GuidedModel, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Sampled tokens a second in vLLM: guided, with the guide off, and of the base's own architecture."""
    from vllm import LLM, SamplingParams

    base = model.base
    assert isinstance(base, CausalModel)
    subjects = demo_prompts(options.texts)
    prompts = [Prompt(each.prompt, WORDS[at % len(WORDS)]) for at, each in enumerate(subjects)]
    common = {"dtype": "float32", "enforce_eager": True, "max_model_len": 64}
    common |= {"max_num_seqs": options.batch_size, "kv_cache_memory_bytes": 2**29}
    encoded = [{"prompt_token_ids": row} for row in base.encode([each.prompt for each in prompts])]

    def write(engine: Any, arguments: list[Any], **choices: Any) -> tuple[float, list[list[int]]]:
        settings = {"max_tokens": LIMIT, "detokenize": False, **choices}
        asked = [SamplingParams(**settings, extra_args=each) for each in arguments]
        began = time.perf_counter()
        answers = engine.generate(encoded[: len(asked)], asked, use_tqdm=False)
        tokens = [list(answer.outputs[0].token_ids) for answer in answers]
        return sum(map(len, tokens)) / (time.perf_counter() - began), tokens

    on = [{"nado_condition": each.condition} for each in prompts]
    off = [{"nado_strength": 0.0} for _ in prompts]
    guided, plain = LLM(str(folder), **common), LLM(str(base.model.name_or_path), **common)
    rounds = []
    for number in range(options.rounds + 1):
        # Texts of fixed length: a guide that lets texts end earlier would look slower or faster for that.
        choices = {"temperature": 1.0, "ignore_eos": True, "seed": number}
        found = {
            "guided": write(guided, on, **choices)[0],
            "off": write(guided, off, **choices)[0],
            "base": write(plain, [None] * len(prompts), **choices)[0],
        }
        print("serving", json.dumps(found), file=sys.stderr, flush=True)
        rounds.append(found)
    compared = prompts[:64]
    greedy = write(guided, on[: len(compared)], temperature=0)[1]
    wanted, unguided = (greedy_texts(model, compared, strength) for strength in (1.0, 0.0))
    pairs = list(zip(greedy, wanted, strict=True))
    for engine in (guided, plain):
        engine.llm_engine.engine_core.shutdown()
    return {
        "rounds": rounds[1:],
        "greedy_equal": sum(mine == own for mine, own in pairs) / len(pairs),
        "greedy_texts": len(pairs),
        "greedy_changed_by_guide": sum(a != b for a, b in zip(wanted, unguided, strict=True)) / len(pairs),
    }


def greedy_texts(model: GuidedModel, prompts: list[Prompt], strength: float) -> list[list[int]]:
    """What transformers' greedy search writes over the guided model."""
    texts = model.generate_texts(
        [each.prompt for each in prompts],
        [each.condition for each in prompts],
        guidance=Guidance(strength=strength),
        do_sample=False,
    )
    return [text.tokens for text in texts]


def count_tokens(table: Any) -> int:
    return len(table["tokens"].combine_chunks().flatten())


if __name__ == "__main__":
    main()
