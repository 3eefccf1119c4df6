"""Tokens per second of `nado draw` and of `transformers` generate: same model, prompts, lengths, machine.

Only tokens of the texts count, not padding. generate runs at each batch size and its best one is taken,
and it records no log-probabilities while nado does. Both are warmed up on the same shapes first.

    python benchmarks/drawing.py --model FOLDER_OR_GGUF --prompts sets.jsonl --samples 65536
    python benchmarks/drawing.py                     # a small model made on the spot, for a CPU
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from nado.drawing import draw_rows
from nado.huggingface import CausalModel, load_model
from nado.prompts import Prompt
from nado.proposals import Proposal
from recording import record


def main() -> None:
    options = parse()
    model = (
        load_model(
            options.model, length_limit=options.limit, device=options.device, compiled=options.compiled
        )
        if options.model
        else small_model(options.limit)
    )
    prompts = read_sets(options.prompts, options.samples // options.per_prompt)
    asked = [prompt for prompt in prompts for _ in range(options.per_prompt)]
    print(f"{len(asked)} samples of {len(prompts)} prompts, at most {options.limit} tokens, {model.device}")
    implementation = model.model.config._attn_implementation
    model.model.set_attn_implementation("sdpa")  # generate runs as transformers ships it
    generate = [generate_speed(model, asked, size, options) for size in options.hf_batches]
    model.model.set_attn_implementation(implementation)
    ours = [drawing_speed(model, asked, size, options) for size in options.batches]
    best_generate = max(generate, key=lambda row: row["tokens_per_s"])
    best = max(ours, key=lambda row: row["tokens_per_s"])
    where = "h200" if model.device.type == "cuda" else "cpu"
    metrics = {
        f"ratio_vs_hf_generate_{where}": best["tokens_per_s"] / best_generate["tokens_per_s"],
        f"tokens_per_s_{where}": best["tokens_per_s"],
        f"hf_generate_tokens_per_s_{where}": best_generate["tokens_per_s"],
        f"runs_{where}": {"nado": ours, "generate": generate},
        f"setting_{where}": {
            "model": Path(options.model).name
            if options.model
            else "Llama, 4 layers of 256, V = 8192, random weights",
            "dtype": str(model.model.dtype),
            "samples": len(asked),
            "per_prompt": options.per_prompt,
            "length_limit": options.limit,
            "compiled": options.compiled,
            "torch": torch.__version__,
        },
    }
    print(json.dumps(metrics, indent=2))
    record("drawing", metrics, output=options.output)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a model folder or GGUF file; without it a small random model")
    parser.add_argument("--prompts", type=Path, help="JSONL with concepts; without it made-up word lists")
    parser.add_argument("--samples", type=int, default=2048)
    parser.add_argument("--per-prompt", type=int, default=32)
    parser.add_argument("--limit", type=int, default=32)
    parser.add_argument("--batches", type=sizes, default=[128, 256, 512])
    parser.add_argument("--hf-batches", type=sizes, default=[128, 256, 512, 1024, 2048])
    parser.add_argument("--hf-samples", type=int, default=2048, help="samples generate is timed on")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device")
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


def sizes(text: str) -> list[int]:
    return [int(size) for size in text.split(",")]


def read_sets(path: Path | None, count: int) -> list[Prompt]:
    """Prompts of the form `dog ball beach =`."""
    if path is None:
        words = [f"w{index}" for index in range(5000)]
        sets = [words[3 * index % 4990 :][: 3 + index % 3] for index in range(count)]
    else:
        with path.open(encoding="utf-8") as lines:
            sets = [json.loads(line)["concepts"] for line in lines]
    return [
        Prompt(" ".join(words) + " =", ", ".join(words))
        for words in (sets * (count // len(sets) + 1))[:count]
    ]


def small_model(limit: int) -> CausalModel:
    """About 6M parameters and 8,192 words; ends a text after some 15 tokens, as a fine-tuned model does."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    words = {"</s>": 0, "=": 1, **{f"w{index}": index + 2 for index in range(8190)}}
    inner = Tokenizer(WordLevel(words, unk_token="="))
    inner.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>", pad_token="</s>")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8192, hidden_size=256, intermediate_size=688, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=256, eos_token_id=0, bos_token_id=0, pad_token_id=0,
        tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    ending = EndingHead(model.lm_head, eos_id=0, log_odds=6.35)
    model.set_output_embeddings(ending.eval())
    return CausalModel(model, tokenizer, length_limit=limit)


class EndingHead(torch.nn.Module):
    """The output layer with a constant added to EOS, so that random weights write texts of natural length."""

    def __init__(self, head: torch.nn.Linear, eos_id: int, log_odds: float) -> None:
        super().__init__()
        self.head, self.weight = head, head.weight
        bias = torch.zeros(head.weight.shape[0])
        bias[eos_id] = log_odds
        self.register_buffer("bias", bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(hidden) + self.bias


def generate_speed(
    model: CausalModel, asked: list[Prompt], batch: int, options: argparse.Namespace
) -> dict[str, Any]:
    chosen = asked[: max(batch, options.hf_samples)]
    chosen = chosen[: len(chosen) // batch * batch]
    tokenizer = model.tokenizer
    tokenizer.padding_side = "left"
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token

    def run(prompts: list[Prompt]) -> int:
        inputs = tokenizer(
            [p.prompt for p in prompts], return_tensors="pt", padding=True, return_token_type_ids=False
        )
        inputs = inputs.to(model.device)
        out = model.model.generate(
            **inputs, do_sample=True, top_k=0, top_p=1.0, temperature=1.0, max_new_tokens=options.limit,
            pad_token_id=tokenizer.pad_token_id,
        )  # fmt: skip
        new = out[:, inputs["input_ids"].shape[1] :]
        before_eos = (new == model.eos_id).cumsum(dim=1) == 0
        return int((before_eos.sum(dim=1) + (~before_eos).any(dim=1)).sum())

    try:
        run(chosen[:batch])
        return timed(
            lambda: sum(run(chosen[at : at + batch]) for at in range(0, len(chosen), batch)), batch, options
        )
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return {"batch": batch, "tokens_per_s": 0.0, "out_of_memory": True}


def drawing_speed(
    model: CausalModel, asked: list[Prompt], batch: int, options: argparse.Namespace
) -> dict[str, Any]:
    def run(prompts: list[Prompt], seed: int) -> int:
        table = draw_rows(
            model, prompts, range(len(prompts)), proposal=Proposal(), seed=seed, batch_size=batch
        )
        return len(table["tokens"].combine_chunks().values)

    began = time.perf_counter()
    run(asked[: 2 * batch], seed=99)
    warm_up = time.perf_counter() - began
    result = timed(lambda: run(asked, seed=0), batch, options)
    return {**result, "warm_up_s": warm_up}


def timed(work: Any, batch: int, options: argparse.Namespace) -> dict[str, Any]:
    rates, tokens = [], 0
    for _ in range(options.repeats):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        began = time.perf_counter()
        tokens = work()
        rates.append(tokens / (time.perf_counter() - began))
    row = {"batch": batch, "tokens_per_s": statistics.median(rates), "all": rates, "tokens": tokens}
    print(row, flush=True)
    return row


if __name__ == "__main__":
    main()
