"""What a base model is worth: held-out perplexity, coverage of keywords, and samples as they come."""

import math
import re
from typing import Any

import torch
from documents import Documents, Words, read_documents
from learning import total_loss
from sentences import Sentence

from nado.drawing import draw_rows
from nado.huggingface import CausalModel
from nado.prompts import Prompt
from nado.proposals import Proposal

SHOWN = 50  # samples of each kind


def measure(
    model: CausalModel, held_out: list[Sentence], words: Words, forms: dict[str, list[str]], *, seed: int
) -> dict[str, Any]:
    """Perplexities of both forms, coverage on held-out concept sets, and samples."""
    documents = read_documents(held_out, model.tokenizer, words, model.device)
    free = torch.full_like(documents.given, -1)
    sets = list(dict.fromkeys(each.words for each in held_out if each.source == "commongen"))
    asked = [Prompt(f"{' '.join(concepts)} =", ", ".join(concepts)) for concepts in sets]
    texts, ended = _draw(model, asked, seed)
    free_texts, _ = _draw(model, [Prompt("", "")] * SHOWN, seed + 1)
    covered = [coverage(text, concepts, forms) for text, concepts in zip(texts, sets, strict=True)]
    return {
        "parameters": sum(each.numel() for each in model.model.parameters()),
        "after_keywords": perplexities(model.model, documents, documents.given, held_out),
        "free": perplexities(model.model, documents, free, held_out),
        "sets": len(sets),
        "coverage": sum(covered) / len(covered),
        "all_covered": sum(share == 1.0 for share in covered) / len(covered),
        "ended": ended,
        "mean_words": sum(len(text.split()) for text in texts) / len(texts),
        "free_samples": free_texts,
        "keyword_samples": [
            {"prompt": prompt.prompt, "text": text}
            for prompt, text in zip(asked[:SHOWN], texts[:SHOWN], strict=True)
        ],
    }


def perplexities(
    model: Any, documents: Documents, words: torch.Tensor, sentences: list[Sentence]
) -> dict[str, float]:
    """exp of the mean loss a token and a word, the end counted as a token; by source a word alone."""
    everything = torch.arange(len(documents), device=words.device)
    batch = documents.pad(documents.compose(everything, words))
    losses = total_loss(model, batch).tolist()
    tokens = int((batch.labels >= 0).sum())
    counts = [len(each.text.split()) for each in sentences]
    found = {"token": math.exp(sum(losses) / tokens), "word": math.exp(sum(losses) / sum(counts))}
    for source in sorted({each.source for each in sentences}):
        own = [at for at, each in enumerate(sentences) if each.source == source]
        found[f"word_{source}"] = math.exp(sum(losses[at] for at in own) / sum(counts[at] for at in own))
    return found


def coverage(text: str, concepts: tuple[str, ...], forms: dict[str, list[str]]) -> float:
    """The share of concepts of which some form stands in the text as a whole word."""
    present = set(re.findall(r"[a-z]+", text.lower()))
    return sum(not present.isdisjoint([word, *forms.get(word, [])]) for word in concepts) / len(concepts)


def _draw(model: CausalModel, prompts: list[Prompt], seed: int) -> tuple[list[str], float]:
    """One text for each prompt, and the share that ended by themselves."""
    batch_size = min(len(prompts), 1024)
    table = draw_rows(
        model, prompts, range(len(prompts)), proposal=Proposal(), seed=seed, batch_size=batch_size
    )
    texts = [text.strip() for text in table["text"].to_pylist()]
    return texts, sum(table["finished"].to_pylist()) / len(texts)
