"""What a study is made from: its base, its oracle, its prompts. Each is loaded when it is first needed."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nado.prompts import Prompt, read_prompts
from nado.storage import digest_ends, digest_json
from nado.study.reading import Study
from nado.study.sections import BaseConfig, PromptsConfig, describe_section, fill_template
from nado.tiny import locate_base

if TYPE_CHECKING:
    from nado.huggingface import CausalModel, EncoderDecoderModel
    from nado.huggingface.reading import HuggingFaceReader
    from nado.oracles import Oracle
    from nado.samples import Samples


@dataclass(frozen=True)
class Tasks:
    """Prompts to learn from, and prompts to be judged by."""

    training: list[Prompt]
    held_out: list[Prompt]
    seen: bool  # the held-out prompts are those of training: there was nothing to hold out

    @property
    def conditions(self) -> list[str]:
        """Every different condition."""
        return list(dict.fromkeys(each.condition for each in [*self.training, *self.held_out]))


class Materials:
    """The base, oracle and prompts of a study."""

    def __init__(self, study: Study) -> None:
        self.study = study

    @cached_property
    def oracle(self) -> "Oracle":
        """The oracle."""
        from nado.oracles import load_oracle

        return load_oracle(self.study.oracle)

    @cached_property
    def tasks(self) -> Tasks:
        """The prompts."""
        return read_tasks(self.study.prompts)

    @cached_property
    def base(self) -> "CausalModel | EncoderDecoderModel":
        """The base model."""
        return load_base(self.study.base)

    @cached_property
    def reader(self) -> "HuggingFaceReader":
        """The base as guides read it."""
        from nado.huggingface.reading import HuggingFaceReader

        return HuggingFaceReader(self.base)

    @property
    def prefixes(self) -> bool:
        """Whether the oracle is asked about prefixes."""
        chosen = self.study.label.prefixes
        return self.oracle.cheap if chosen == "auto" else chosen


def draw_with(engine: str, base: BaseConfig) -> Callable[..., "Samples"]:
    """What draws from a base in this process: our own loop, or vLLM, which loads the base by itself."""
    if engine == "local":
        from nado.drawing import draw

        return draw
    from nado.distributed.vllm_drawing import draw_with_vllm, locate_for_vllm

    return partial(draw_with_vllm, **locate_for_vllm(base))


def load_base(config: BaseConfig) -> "CausalModel | EncoderDecoderModel":
    """The base model that a section describes."""
    from nado.huggingface import load_model

    return load_model(**loading_options(config))


def loading_options(config: BaseConfig) -> dict[str, Any]:
    """The arguments of `load_model` that a section stands for."""
    import torch

    from nado.warpers import Warpers

    warpers = Warpers(config.temperature, config.top_k, config.top_p, config.forced, config.forbidden)
    return {
        "name": config.name,
        "length_limit": config.length_limit,
        "completion": config.completion,
        "warpers": "checkpoint" if config.checkpoint_warpers else warpers,
        "chat": config.chat,
        "adapter": config.adapter,
        "revision": config.revision,
        "dtype": config.dtype if config.dtype in (None, "auto") else getattr(torch, config.dtype),
        "device": config.device,
    }


def digest_base(config: BaseConfig) -> dict[str, Any]:
    """What tells this base from another, without loading it."""
    described = describe_section(config, "device", "name", "adapter")
    return {
        **described,
        "model": _digest_model(config.name),
        "adapter": config.adapter and _digest_model(config.adapter),
    }


def _digest_model(name: str) -> str:
    path = Path(locate_base(name))
    if not path.exists():
        return name
    files = [path] if path.is_file() else sorted(each for each in path.iterdir() if each.is_file())
    return digest_json([[each.name, digest_ends(each)] for each in files])


def read_tasks(config: PromptsConfig) -> Tasks:
    """Prompts from their file, divided into those to learn from and those to be judged by."""
    known = fill(_distinct(read_prompts(config.file, config.split)), config.template)[: config.limit]
    if config.held_out_split is not None:
        others = fill(_distinct(read_prompts(config.file, config.held_out_split)), config.template)
        shared = set(others)
        known = [each for each in known if each not in shared] or known
        return Tasks(known, others[: config.limit], seen=shared <= set(known))
    if len(known) == 1 or config.held_out == 0:
        return Tasks(known, known, seen=True)
    held = set(
        random.Random(config.seed).sample(range(len(known)), max(1, round(config.held_out * len(known))))
    )
    return Tasks(
        [each for number, each in enumerate(known) if number not in held],
        [each for number, each in enumerate(known) if number in held],
        seen=False,
    )


def fill(prompts: Sequence[Prompt], template: str | None) -> list[Prompt]:
    """Prompts whose base's part is made from the condition."""
    if template is None:
        return list(prompts)
    return [Prompt(fill_template(template, each.condition), each.condition) for each in prompts]


def fill_missing(prompts: Sequence[Prompt], template: str | None) -> list[Prompt]:
    """The same, but a record that says itself what the base reads keeps that."""
    return [fill([each], template)[0] if each.prompt == each.condition else each for each in prompts]


def _distinct(prompts: Sequence[Prompt]) -> list[Prompt]:
    return list(dict.fromkeys(prompts))


def digest_prompts(prompts: Sequence[Prompt]) -> str:
    """A digest of prompts."""
    return digest_json([list(each) for each in prompts])
