"""What a study will take: memory, disk and time, from counts of parameters and tokens.

These are estimates: right within a small factor, to tell minutes from days. With measured speeds they are
better.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from nado.drawing import default_batch_size, draw_rows
from nado.errors import InputError, unloadable
from nado.language_model import LanguageModel
from nado.metrics import score_tokens
from nado.oracles import Oracle
from nado.prompts import Prompt
from nado.proposals import tempered
from nado.study.guides import count_bits, name_parts
from nado.study.materials import Tasks
from nado.study.reading import Study
from nado.study.sections import BaseConfig, DrawConfig, GuideShape
from nado.tiny import locate_base

# Sustained floating-point operations a second that are assumed where nothing was measured.
_CPU_SPEED = 2e10  # a thread
_GPU_SPEED = 5e13
_GUIDED_COST = 1.5  # of a guided step, in steps of the base
_MEASURED_ROWS = 64
_TOKEN_BYTES = 16  # of a sampled token on disk: id, log p, log proposal, text


@dataclass(frozen=True)
class Speed:
    """What was measured on a few texts."""

    drawn: float  # tokens a second, one after the other
    read: float  # tokens a second, whole texts at once
    mean_length: float


@dataclass(frozen=True)
class Estimate:
    """What a study takes, at most: texts are counted at the length limit unless their length was measured."""

    basis: str  # "estimate" or "measured"
    device: str
    base_parameters: int
    guide_parameters: int
    texts: int
    tokens: int
    memory_bytes: int
    disk_bytes: int
    seconds: dict[str, float]  # of each stage

    def describe(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


class Outline:
    """A base known by its config and tokenizer alone."""

    def __init__(self, config: Any, tokenizer: Any, device: torch.device, dtype: torch.dtype) -> None:
        self.config, self.tokenizer, self.device, self.dtype = config, tokenizer, device, dtype
        self._parameters: int | None = None

    @classmethod
    def read(cls, base: BaseConfig) -> "Outline":
        """Read a base's config and tokenizer; no weights are loaded, but a GGUF file is converted once."""
        from transformers import AutoConfig, AutoTokenizer

        from nado.huggingface.gguf_files import converted_gguf

        where = _device(base.device)
        try:
            name = locate_base(base.name)
            path = converted_gguf(Path(name)) if base.name.endswith(".gguf") else name
            config = AutoConfig.from_pretrained(path, revision=base.revision)
            tokenizer = AutoTokenizer.from_pretrained(path, revision=base.revision)
        except InputError:
            raise
        except (OSError, ValueError) as error:
            raise unloadable(base.name, error) from error
        return cls(config, tokenizer, where, _dtype(base.dtype, where))

    @property
    def text_config(self) -> Any:
        """The config of what writes."""
        return self.config.get_text_config(decoder=True)

    @property
    def parameters(self) -> int:
        """How many numbers the base has, counted without making them."""
        if self._parameters is None:
            from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

            auto = AutoModelForSeq2SeqLM if self.config.is_encoder_decoder else AutoModelForCausalLM
            with torch.device("meta"):
                model = auto.from_config(self.config)  # type: ignore[no-untyped-call]
            self._parameters = sum(each.numel() for each in model.parameters())
        return self._parameters

    def prompt_room(self, length_limit: int) -> int | None:
        """How many tokens a prompt may have; None when there is no bound."""
        context = getattr(self.text_config, "max_position_embeddings", None)
        if context is None:
            return None
        return int(context) if self.config.is_encoder_decoder else int(context) - length_limit

    def lengths(self, prompts: Sequence[str], *, chat: bool) -> list[tuple[str, int]]:
        """The prompts with their numbers of tokens."""
        texts = list(prompts)
        if chat:
            if not getattr(self.tokenizer, "chat_template", None):
                raise InputError(
                    "a tokenizer with a chat template, because chat is on", "none", "Turn chat off."
                )
            messages = [[{"role": "user", "content": prompt}] for prompt in texts]
            texts = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        rows = self.tokenizer(texts, add_special_tokens=not chat)["input_ids"]
        return [(prompt, len(row)) for prompt, row in zip(prompts, rows, strict=True)]

    def require_guide(
        self,
        shape: GuideShape,
        oracle: Oracle,
        conditions: Sequence[str],
        length_limit: int,
        *,
        prefixes: bool,
    ) -> int:
        """Refuse a guide that cannot be built; returns how many numbers it has."""
        from nado.guide import Guide, GuideConfig

        bits = count_bits(shape, oracle, conditions, prefixes=prefixes)
        width, vocabulary = int(self.text_config.hidden_size), int(self.text_config.vocab_size)
        choices = {
            k: v for k, v in asdict(shape).items() if k not in ("progress_bits", "named_parts", "seed")
        }
        config = GuideConfig(
            vocabulary_size=vocabulary,
            length_limit=length_limit,
            state_size=width,
            embedding_size=width,
            condition_vocabulary_size=vocabulary,
            progress_bits=bits,
            named_parts=name_parts(shape, oracle, conditions, bits),
            **choices,
        )
        with torch.device("meta"):
            guide = Guide(config)
        return sum(each.numel() for each in guide.parameters())


def measure_drawing(model: LanguageModel[Any], prompts: Sequence[Prompt], config: DrawConfig) -> Speed:
    """Draw a few texts, twice (the first time is for warming up), and read them again."""
    size = min(config.batch_size or default_batch_size(model), _MEASURED_ROWS)
    asked = [prompts[row % len(prompts)] for row in range(size)]
    proposal = tempered(config.proposal_temperature)
    for _ in range(2):
        began = time.perf_counter()
        table = draw_rows(model, asked, range(size), proposal=proposal, seed=config.seed, batch_size=size)
        seconds = time.perf_counter() - began
    rows = table["tokens"].to_pylist()
    tokens = sum(len(row) for row in rows)
    began = time.perf_counter()
    score_tokens(model, [each.prompt for each in asked], rows, batch_size=size)
    return Speed(tokens / seconds, tokens / (time.perf_counter() - began), tokens / size)


def estimate(
    study: Study, tasks: Tasks, oracle: Oracle, outline: Outline, *, prefixes: bool, speed: Speed | None
) -> Estimate:
    """What the study takes."""
    base = outline.parameters
    guide = outline.require_guide(
        study.guide, oracle, tasks.conditions, study.base.length_limit, prefixes=prefixes
    )
    basis = "estimate" if speed is None else "measured"
    length = study.base.length_limit if speed is None else speed.mean_length
    rounds = study.rounds.samples if study.rounds is not None else (study.draw.samples_per_prompt,)
    texts = len(tasks.training) * sum(rounds)
    tokens = round(texts * length)
    if speed is None:
        plain = _speed(outline.device) / (2 * base)
        speed = Speed(plain, plain, length)
    # At worst the base is read once a token of training; the guide is too, and its gradients cost twice that.
    step = min(study.train.batch_size, texts) * length * (1 + 3 * guide / base) / speed.read
    written = min(len(tasks.held_out), study.generate.prompts) * study.generate.count * length
    systems = 6 if study.generate.exact_end == "both" else 3
    seconds = {
        "draw": tokens / speed.drawn,
        "train": step * study.train.steps * len(rounds),
        "generate": systems * written * _GUIDED_COST / speed.drawn,
    }
    return Estimate(
        basis=basis,
        device=str(outline.device),
        base_parameters=base,
        guide_parameters=guide,
        texts=texts,
        tokens=tokens,
        memory_bytes=_memory(study, outline, base, guide, tokens),
        disk_bytes=tokens * _TOKEN_BYTES + guide * 4 * 8,  # weights, moments and the best ones; old and new
        seconds={name: round(value, 3) for name, value in seconds.items()},
    )


def describe_bytes(count: int) -> str:
    """A size in words."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"


def _memory(study: Study, outline: Outline, base: int, guide: int, tokens: int) -> int:
    """The base, the guide with gradients and moments, kept states, and one batch on its way through it."""
    number = outline.dtype.itemsize
    states = tokens * int(outline.text_config.hidden_size) * number
    kept = states if study.data.keep_states is True or states < 2 * 10**9 else 0
    rows = (study.train.micro_batch or study.train.batch_size) * study.base.length_limit
    activations = rows * study.guide.size * study.guide.layers * 16 * 4
    return base * number + guide * 16 + kept + activations


def _speed(device: torch.device) -> float:
    return _GPU_SPEED if device.type == "cuda" else _CPU_SPEED * torch.get_num_threads()


def _device(name: str | None) -> torch.device:
    try:
        found = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise InputError(
            "a device such as cpu or cuda", repr(name), "Leave it out to choose by itself."
        ) from error
    if found.type == "cuda" and not torch.cuda.is_available():
        raise InputError("a GPU, because device is cuda", "none", 'Set device = "cpu", or leave it out.')
    return found


def _dtype(name: str | None, device: torch.device) -> torch.dtype:
    if name in (None, "auto"):
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    found: torch.dtype = getattr(torch, str(name))
    return found
