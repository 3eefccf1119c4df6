"""The sections of a study file: one typed class each, whose descriptions are the command line's help.

`[train]` is `nado.training.TrainingConfig` and `[rounds]` is `nado.rounds.RoundsConfig`; `[oracle]` is a
table as `load_oracle` takes it. Nothing here needs torch.
"""

import json
import math
import re
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from nado.errors import InputError, require_at_least
from nado.options import option, required
from nado.oracles.suggestion import suggest

if TYPE_CHECKING:
    from nado.guidance import Guidance
    from nado.oracles import Oracle

Auto = Literal["auto"]
CONDITION = "{condition}"
WORDS = "{words}"
_PLACEHOLDER = re.compile(r"\{\w*\}")
_CLOSE = 0.7  # {word}, {keywords} and {conditions} are meant to be replaced, {content} is not


@dataclass(frozen=True, kw_only=True)
class BaseConfig:
    """The base model: what p is."""

    name: str = required("the base: a hub name, a folder or a .gguf file", flag="base")
    length_limit: int = required("most tokens of a text, its end included")
    completion: Literal["eos", "limit"] = option("eos", "when a text is finished: at its own end, or cut")
    chat: bool = option(False, "prompts are messages to a chat model")
    adapter: str | None = option(None, "a PEFT adapter of the base")
    revision: str | None = option(None, "revision of a base on a hub")
    dtype: Literal["float32", "bfloat16", "float16", "auto"] | None = option(
        None, "numbers: float32, bfloat16, float16, or auto as on disk (default: by device)"
    )
    device: str | None = option(None, "where the base runs (default: a GPU where there is one)")
    temperature: float = option(1.0, "temperature that is part of p; above 1 flattens")
    top_k: int = option(0, "top-k that is part of p; 0 keeps all")
    top_p: float = option(1.0, "top-p that is part of p; 1 keeps all")
    forced: tuple[int, ...] = option((), "token ids every text begins with")
    forbidden: tuple[int, ...] = option((), "token ids no text contains")
    checkpoint_warpers: bool = option(False, "take the checkpoint's own temperature, top-k and top-p for p")

    def __post_init__(self) -> None:
        require_at_least(1, length_limit=self.length_limit)
        require_at_least(0, top_k=self.top_k)
        if not 0 < self.temperature < math.inf:
            raise InputError("a temperature above 0", f"{self.temperature:g}", "Use 1 to leave p as it is.")
        if not 0 < self.top_p <= 1:
            raise InputError("top_p in (0, 1]", f"{self.top_p:g}", "Use 1 to keep the whole vocabulary.")
        own = (self.temperature, self.top_k, self.top_p, self.forced, self.forbidden)
        if self.checkpoint_warpers and own != (1.0, 0, 1.0, (), ()):
            raise InputError(
                "either checkpoint_warpers or temperature, top_k, top_p, forced, forbidden",
                "both",
                "Leave one of them out.",
            )


@dataclass(frozen=True, kw_only=True)
class PromptsConfig:
    """What is written about, and which of it is kept for evaluation."""

    file: Path = required(  # noqa: RUF009
        "prompts: a .jsonl, .parquet or .txt file", flag="prompts"
    )
    split: str | None = option(None, "use only records of this split")
    held_out_split: str | None = option(None, "evaluate on the records of this split")
    held_out: float = option(0.1, "share of the prompts kept for evaluation, where no split is named")
    template: str | None = option(
        None,
        f"the base's prompt, made from each condition: {CONDITION} is replaced by it, {WORDS} by it with "
        "blanks for commas",
    )
    limit: int | None = option(None, "use only the first so many prompts")
    seed: int = option(0, "of the choice of prompts kept for evaluation", flag="prompts_seed")

    def __post_init__(self) -> None:
        if not 0 <= self.held_out < 1:
            raise InputError("held_out of at least 0 and below 1", f"{self.held_out}", "Try 0.1.")
        require_at_least(1, limit=self.limit)
        if wrong := _misspelled(self.template or ""):
            raise InputError(
                f"{CONDITION} and {WORDS} in the template", wrong[0], suggest(wrong[0], (CONDITION, WORDS))
            )


def _misspelled(template: str) -> list[str]:
    """What stands in braces and was meant to be replaced, as far as one can tell: code has braces too."""
    braced = set(_PLACEHOLDER.findall(template))
    others = sorted(braced - {CONDITION, WORDS})
    if len(others) == len(braced):  # nothing is replaced
        return others
    names = [each.strip("{}") for each in (CONDITION, WORDS)]
    return [each for each in others if get_close_matches(each.strip("{}").lower(), names, cutoff=_CLOSE)]


def fill_template(template: str, condition: str) -> str:
    """The base's prompt for a condition."""
    return template.replace(WORDS, " ".join(condition.replace(",", " ").split())).replace(
        CONDITION, condition
    )


@dataclass(frozen=True, kw_only=True)
class DrawConfig:
    """How many texts are drawn from the base, and from what."""

    samples_per_prompt: int = option(32, "texts drawn for each prompt")
    proposal_temperature: float = option(1.0, "temperature texts are drawn at, corrected by weights; 1 is p")
    seed: int = option(0, "of the texts")
    batch_size: int | None = option(None, "texts drawn side by side (default: by device)")

    def __post_init__(self) -> None:
        require_at_least(1, samples_per_prompt=self.samples_per_prompt, batch_size=self.batch_size)
        if not self.proposal_temperature > 0:
            raise InputError("a temperature above 0", f"{self.proposal_temperature}", "Use 1 to draw from p.")


@dataclass(frozen=True, kw_only=True)
class LabelConfig:
    """How the oracle is asked."""

    prefixes: bool | Auto = option(  # noqa: RUF009
        "auto", "ask about every prefix too, for progress and stop labels; auto: where the oracle is cheap"
    )
    parts: bool = option(True, "ask for the oracle's parts")
    workers: int = option(1, "processes that ask")
    timeout: float | None = option(None, "seconds the oracle may take for a batch")
    batch_size: int = option(1024, "texts a call")

    def __post_init__(self) -> None:
        require_at_least(1, workers=self.workers, batch_size=self.batch_size)


@dataclass(frozen=True, kw_only=True)
class GuideShape:
    """The guide's network."""

    reads: Literal["states", "tokens", "light"] = option(
        "states", "what it reads: the base's states, tokens alone, or states without attention (light)"
    )
    size: int = option(768, "width")
    layers: int = option(4, "layers")
    heads: int = option(12, "attention heads a layer")
    head: Literal["sigmoid", "norm"] = option("sigmoid", "output: sigmoid or norm")
    matrix: Literal["tied", "low_rank", "own"] = option(
        "tied", "output matrix: the base's (tied), the base's mixed (low_rank), or its own"
    )
    rank: int = option(64, "rank of a low_rank matrix")
    dropout: float = option(0.0, "share of activations dropped in training")
    progress_bits: int | Auto = option(  # noqa: RUF009
        "auto", "bits of the oracle's progress it reads; auto: as many as the prompts' conditions have"
    )
    named_parts: bool | Auto = option(  # noqa: RUF009
        "auto", "it is told what the oracle's parts are called; auto: where that depends on the condition"
    )
    seed: int = option(0, "of its first weights", flag="guide_seed")

    def __post_init__(self) -> None:
        require_at_least(1, size=self.size, layers=self.layers, heads=self.heads, rank=self.rank)
        if self.size % (2 * self.heads):
            raise InputError(
                "a size that is an even multiple of heads", f"{self.size} and {self.heads}", "Try 768 and 12."
            )


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """How labelled texts are made ready for training."""

    held_out: float = option(
        0.1, "share of the training prompts whose texts choose the best weights", flag="held_out_texts"
    )
    balanced: bool = option(False, "weight labels to be even within each prompt")
    weight_form: Literal["suffix", "whole"] = option("suffix", "weights of the suffix, or of the whole text")
    weight_clip: float = option(10.0, "largest importance weight")
    merge: bool = option(True, "train on equal texts once, with their number as weight")
    keep_states: bool | Auto = option(  # noqa: RUF009
        "auto", "read the base's states once and keep them; auto: if they take less than 2 GB"
    )
    calibrate: bool = option(True, "fit R to held-out labels after training")

    def __post_init__(self) -> None:
        if not 0 <= self.held_out < 1:
            raise InputError("held_out of at least 0 and below 1", f"{self.held_out}", "Try 0.1.")


@dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    """Which texts are written for evaluation, and how the guide is applied."""

    prompts: int = option(200, "held-out prompts written about, at most", flag="most_prompts")
    count: int = option(4, "texts a prompt")
    search: Literal["sample", "greedy", "beam"] = option("sample", "sample, greedy or beam")
    beams: int = option(4, "beams of beam search")
    length_penalty: float = option(1.0, "beams' texts are ranked by log p / length^this")
    strength: float = option(1.0, "R to this power: 0 is the base alone, above 1 pulls harder")
    target_rate: float = option(1.0, "share of texts that shall satisfy the oracle")
    doubt: float = option(0.0, "R far below this is not believed: a text as good as lost goes on as p would")
    plausible: float = option(
        0.0, "tokens that p finds less than this share as likely as the likeliest are left out"
    )
    exact_end: Literal["off", "on", "both"] = option(
        "both", "let a text end only where the oracle says yes; both: measured off and on where possible"
    )
    seed: int = option(0, "of the texts")
    batch_size: int | None = option(None, "texts written side by side (default: by device)")

    def __post_init__(self) -> None:
        require_at_least(
            1, prompts=self.prompts, count=self.count, beams=self.beams, batch_size=self.batch_size
        )
        if self.search == "greedy" and self.count > 1:
            raise InputError("count 1 with greedy search", f"{self.count}", "They would be the same text.")
        if self.search == "beam" and self.count > self.beams:
            raise InputError(f"count of at most {self.beams}, the beams", f"{self.count}", "Use more beams.")

    def ends(self, oracle: "Oracle", completion: str) -> list[bool]:
        """Whether ends are exact in what is measured: off, on, or off and then on."""
        possible = oracle.cheap and completion == "eos" and self.target_rate == 1
        if self.exact_end == "on" and not possible:
            about = f"{oracle.name}, which is {'cheap' if oracle.cheap else 'not cheap'}"
            raise InputError(
                'a cheap oracle, completion "eos" and target rate 1 for an exact end',
                f'{about}, completion "{completion}" and target rate {self.target_rate:g}',
                'Set exact_end = "off" in [generate].',
            )
        return {"off": [False], "on": [True], "both": [False, True] if possible else [False]}[self.exact_end]

    def guidance(self, *, exact_end: bool = False) -> "Guidance":
        """How the guide is applied."""
        from nado.guidance import Guidance

        return Guidance(
            self.strength,
            self.target_rate,
            exact_end=exact_end,
            doubt=self.doubt,
            plausible=self.plausible,
        )


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """What is measured on the texts."""

    confidence: float = option(0.95, "of the intervals")
    perplexity: bool = option(True, "measure perplexity and divergence under the base")
    batch_size: int = option(32, "texts scored at once", flag="scoring_batch_size")

    def __post_init__(self) -> None:
        require_at_least(1, batch_size=self.batch_size)
        if not 0 < self.confidence < 1:
            raise InputError("a confidence between 0 and 1", f"{self.confidence}", "Use 0.95.")


@dataclass(frozen=True, kw_only=True)
class CompareConfig:
    """What other methods are given when they are compared with the guide."""

    budgets: tuple[float, ...] = option(
        (1.0, 8.0),
        "budgets of methods that work while decoding: multiples of the guided model's base tokens a text",
    )
    tuning_prompts: int = option(24, "prompts on which every method's settings are chosen")
    most_perplexity: float = option(
        2.0, "settings whose texts are this many times as perplexing as the base's are not chosen"
    )
    training_texts: int = option(8000, "texts a fine-tuned base reads, repeats counted")
    examples: int = option(20, "prompts whose texts are shown, none of them picked")

    def __post_init__(self) -> None:
        require_at_least(
            1, tuning_prompts=self.tuning_prompts, training_texts=self.training_texts, examples=self.examples
        )
        if not self.budgets or not all(each > 0 for each in self.budgets):
            raise InputError("budgets above 0", f"{list(self.budgets)}", "Try budgets = [1.0, 8.0].")
        if not self.most_perplexity >= 1:
            raise InputError("most_perplexity of at least 1", f"{self.most_perplexity:g}", "Try 2.")


@dataclass(frozen=True, kw_only=True)
class DistributedConfig:
    """Where a study runs that is too large for one process. Only `shares` changes what comes out."""

    engine: Literal["local", "ray", "vllm"] = option(
        "local", "what draws and labels: this process, Ray's actors, or vLLM, which draws only"
    )
    address: str | None = option(
        None, "Ray's head node as host:port (default: RAY_ADDRESS, or a cluster of this machine alone)"
    )
    actors: int | None = option(
        None, "actors that draw or label at a time (default: one a GPU, or one a core, of all nodes)"
    )
    cpus: float = option(1.0, "cores an actor is given", flag="actor_cpus")
    gpus: float | None = option(
        None, "GPUs an actor is given (default: 1 to draw where there are any, 0 to label)", flag="actor_gpus"
    )
    attempts: int = option(3, "actors that may die over a shard before that is an error")
    processes: int = option(1, "processes that train, on this machine")
    shares: int | None = option(
        None,
        "divide the training texts and their states into so many parts, which processes read each for itself "
        "(default: every process reads all)",
    )
    divide_base: bool = option(
        False, "divide the base's layers among the processes that train (FSDP); its states are kept"
    )

    @property
    def in_processes(self) -> bool:
        """Whether the guide is trained by processes of their own."""
        return self.processes > 1 or self.shares is not None or self.divide_base

    def __post_init__(self) -> None:
        require_at_least(1, actors=self.actors, attempts=self.attempts, processes=self.processes)
        require_at_least(1, shares=self.shares)
        if self.shares is not None and self.shares % self.processes:
            expected = f"shares that {self.processes} processes can divide evenly"
            raise InputError(expected, f"{self.shares}", "Use a multiple.")
        if not self.cpus > 0 or (self.gpus is not None and self.gpus < 0):
            raise InputError(
                "cpus above 0 and gpus of at least 0", f"{self.cpus} and {self.gpus}", "Try cpus = 1."
            )


def describe_section(config: Any, *left_out: str) -> dict[str, Any]:
    """JSON-ready values of a section."""
    values = {name: value for name, value in asdict(config).items() if name not in left_out}
    described: dict[str, Any] = json.loads(json.dumps(values, default=str))  # as it will be read again
    return described
