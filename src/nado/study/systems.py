"""What is compared in a study, and the texts that each system writes.

A system is the base, or the base with a guide, with an exact end or without. All are language models, so one
loop writes their texts; row r of every system is drawn with the same noise.
"""

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from nado.beam_search import search_beams
from nado.drawing import default_batch_size, draw_rows
from nado.guidance import Guidance
from nado.guide import Guide
from nado.guided import GuidedModel
from nado.guided_language_model import GuidedLanguageModel
from nado.huggingface import CausalModel, EncoderDecoderModel
from nado.labeling import label
from nado.oracles import Oracle
from nado.prompts import Prompt
from nado.proposals import Proposal
from nado.storage import read_json, write_atomically, write_json
from nado.study.sections import GenerateConfig

_SEARCHED = 64  # prompts that are searched side by side


@dataclass(frozen=True)
class Written:
    """One text of a system."""

    prompt: str
    condition: str
    text: str
    tokens: list[int]  # EOS included when the text ended itself
    finished: bool
    satisfied: bool | None = None  # None where there is no oracle to ask
    parts: dict[str, bool] = field(default_factory=dict)
    log_q: float | None = None  # of the whole text, where it was sampled


@dataclass(frozen=True)
class System:
    """A base, alone or guided, and how it decodes."""

    name: str
    base: CausalModel | EncoderDecoderModel
    guide: Guide | None
    guidance: Guidance
    oracle: Oracle | None
    proposal: Proposal = field(default_factory=Proposal)  # other than p itself where a dial is turned

    @property
    def key(self) -> str:
        """A name for its files."""
        return self.name.replace(" ", "-") + ("-exact-end" if self.guidance.exact_end else "")

    def sampler(self) -> Any:
        """The system as a language model."""
        if self.guide is None:
            return self.base
        return GuidedLanguageModel(self.base, self.guide, guidance=self.guidance, oracle=self.oracle)

    def searcher(self, fallback: Guide) -> GuidedModel:
        """The system as a model for transformers' `generate`; the base is a guide of strength 0."""
        guidance = self.guidance if self.guide is not None else Guidance(strength=0.0)
        return GuidedModel(self.base, self.guide or fallback, guidance=guidance, oracle=self.oracle)


def list_systems(
    base: CausalModel | EncoderDecoderModel,
    oracle: Oracle,
    untrained: Guide,
    trained: Guide,
    config: GenerateConfig,
) -> list[System]:
    """Base, untrained and trained guide, each with the exact end off and on where that is possible."""
    systems = []
    for exact in config.ends(oracle, base.completion):
        guided = config.guidance(exact_end=exact)
        # Strength 0 leaves the guide out, not the oracle.
        alone = Guidance(strength=0.0, exact_end=True) if exact else Guidance()
        systems += [
            System("base", base, untrained if exact else None, alone, oracle),
            System("untrained guide", base, untrained, guided, oracle),
            System("trained guide", base, trained, guided, oracle),
        ]
    return systems


def write_texts(
    system: System, prompts: Sequence[Prompt], config: GenerateConfig, fallback: Guide | None
) -> list[Written]:
    """`config.count` texts for each prompt, side by side, judged where there is an oracle."""
    if config.search == "sample":
        written = _sample(system, prompts, config)
    elif config.search == "beam":
        written = _search(system, prompts, config)
    else:
        assert fallback is not None
        written = _decode_greedily(system.searcher(fallback), prompts, config)
    return written if system.oracle is None else judge_texts(written, system.oracle)


def _sample(system: System, prompts: Sequence[Prompt], config: GenerateConfig) -> list[Written]:
    model = system.sampler()
    asked = [each for each in prompts for _ in range(config.count)]
    size = config.batch_size or default_batch_size(model)
    rows = range(len(asked))
    table = draw_rows(model, asked, rows, proposal=system.proposal, seed=config.seed, batch_size=size)
    columns = (table[name].to_pylist() for name in ("text", "tokens", "finished", "log_proposal"))
    return [
        Written(each.prompt, each.condition, text, tokens, finished, log_q=float(sum(log_q)))
        for each, text, tokens, finished, log_q in zip(asked, *columns, strict=True)
    ]


def _search(system: System, prompts: Sequence[Prompt], config: GenerateConfig) -> list[Written]:
    size = (config.batch_size or _SEARCHED) * config.beams
    sizes = (config.beams, config.length_penalty, size)
    found = search_beams(system.sampler(), prompts, *sizes, count=config.count).found
    pairs = [(each, text) for each, texts in zip(prompts, found, strict=True) for text in texts]
    decoded = system.base.decode([text.tokens for _, text in pairs])
    return [
        Written(each.prompt, each.condition, words, text.tokens, text.finished)
        for (each, text), words in zip(pairs, decoded, strict=True)
    ]


def _decode_greedily(model: GuidedModel, prompts: Sequence[Prompt], config: GenerateConfig) -> list[Written]:
    found = []
    size = config.batch_size or _SEARCHED
    for first in range(0, len(prompts), size):
        some = prompts[first : first + size]
        asked = ([each.prompt for each in some], [each.condition for each in some])
        found += [
            Written(each.prompt, each.condition, one.text, one.tokens, one.finished)
            for each, one in zip(some, model.generate_texts(*asked, do_sample=False), strict=True)
        ]
    return found


def judge_texts(written: Sequence[Written], oracle: Oracle) -> list[Written]:
    """The same texts with what the oracle says of them, and of each of their parts."""
    conditions = [each.condition for each in written]
    labels = label(
        oracle, conditions, [each.text for each in written], finished=[each.finished for each in written]
    )
    assert labels.parts is not None
    judged = []
    for row, each in enumerate(written):
        parts = dict(zip(oracle.part_names(each.condition), labels.parts.row(row).tolist(), strict=True))
        values = {**vars(each), "satisfied": bool(labels.satisfied[row]), "parts": parts}
        judged.append(Written(**values))
    return judged


def trace_texts(system: System, written: Sequence[Written]) -> list[list[dict[str, Any]]]:
    """Every token of every text: what base and guided model gave it, R and S, and the base's own choice."""
    trace = system.sampler().trace_rows(
        [each.prompt for each in written],
        [each.tokens for each in written],
        [each.condition for each in written],
    )
    columns = [value.exp().tolist() for value in (trace.log_p, trace.log_q, trace.log_factor, trace.log_s)]
    choices = trace.base_choice.tolist()
    name = system.base.tokenizer.convert_ids_to_tokens
    return [
        [
            {
                "token": str(name(token)),
                **{key: column[row][place] for key, column in zip("pqRS", columns, strict=True)},
                "base_choice": str(name(choices[row][place])),
            }
            for place, token in enumerate(each.tokens)
        ]
        for row, each in enumerate(written)
    ]


# --- on disk ------------------------------------------------------------------------------------------


def write_systems(
    systems: Sequence[System],
    prompts: Sequence[Prompt],
    config: GenerateConfig,
    folder: Path,
    fallback: Guide,
) -> Iterator[tuple[System, dict[str, Any]]]:
    """Each system's texts as `<system>.jsonl`, with their cost; those that are there are not made again."""
    for system in systems:
        texts, cost = folder / f"{system.key}.jsonl", folder / f"{system.key}.json"
        if not texts.exists():
            began = time.perf_counter()
            written = write_texts(system, prompts, config, fallback)
            _synchronise(system.base.device)
            write_json(cost, _cost(system, written, time.perf_counter() - began))
            save_texts(written, texts)  # last: it says that the system is done
        yield system, read_json(cost)


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _cost(system: System, written: Sequence[Written], seconds: float) -> dict[str, Any]:
    return {
        "system": system.name,
        "guidance": asdict(system.guidance),
        "exact_end": system.guidance.exact_end,
        "texts": len(written),
        "base_tokens": sum(len(each.tokens) for each in written),
        "seconds": seconds,
    }


def save_texts(written: Sequence[Written], path: Path) -> None:
    """Texts as JSON, one a line."""
    lines = "".join(json.dumps(asdict(each), ensure_ascii=False) + "\n" for each in written)
    write_atomically(path, lambda partial: _write(partial, lines))


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def read_texts(path: Path) -> list[Written]:
    """Texts that `save_texts` has written."""
    # Not splitlines(): that also splits at characters which may stand inside a text.
    lines = path.read_text(encoding="utf-8").split("\n")
    return [Written(**json.loads(line)) for line in lines if line]
