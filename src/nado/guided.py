"""A guided model as a Hugging Face model: base and guide in one, for transformers' own `generate`.

`GuidedModel` is a subclass, made on the spot, of the base's own class, so that everything `generate` asks of
a model is answered by the base. Its forward returns log q in place of logits: p with its warpers, times the
guide's R, normalised. Greedy and beam search, sampling, streaming, assisted decoding and left-padded batches
are then transformers' own, over q. The guide keeps its keys and values in the base's cache
(`guide_cache.py`) and has no other state (`steering.py`).

The base is read once a token. A guide whose head is tied to the base's output matrix adds its rows to the
product the base makes anyway.
"""

import functools
import inspect
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from nado.beam_search import search_beams
from nado.composition import Composable, Composition, combine
from nado.decomposition import SoftCoefficients, close_at_limit
from nado.errors import InputError
from nado.following import GuideFollower
from nado.guidance import Guidance, begin_soft, chance, guide_step
from nado.guide import Guide
from nado.guide_cache import add_guide_layers, guide_caches, is_static
from nado.guide_files import load_guide
from nado.guided_language_model import GuidedLanguageModel, Trace
from nado.heads import Scores
from nado.huggingface import CausalModel, EncoderDecoderModel
from nado.huggingface.encoder_decoder import shift_to_left
from nado.huggingface.output_layer import watch_inputs
from nado.huggingface.reading import HuggingFaceReader
from nado.huggingface.shared import require_list
from nado.oracles.protocol import Oracle
from nado.prefixes import JointReader, names_for
from nado.prompts import pair_prompts
from nado.steering import Positions, Steering

log = logging.getLogger(__name__)

# The name of our argument in transformers' hands. What begins with "decoder_" is not given to encoders.
_GUIDING = "decoder_guiding"
# What a model keeps that is bound to the object itself: a copy must make its own.
_BOUND = {
    "forward",
    "_old_forward",
    "_hf_hook",
    "_compiled_call",
    "_compiled_call_impl",
    "_last_compile_config",
}
_NOT_FOR_BODY = {"labels", "return_dict"}


@dataclass(frozen=True)
class GuidedText:
    """One text and what became of it."""

    text: str
    tokens: list[int]  # EOS included
    finished: bool  # it ended itself, or, under completion "limit", was cut as agreed
    satisfied: bool | None  # None where there is no oracle to ask
    dead_end: bool = False  # given up: its chance of success fell below the floor


@dataclass(frozen=True)
class GuidedTexts(Sequence[GuidedText]):
    """The texts of one call, and what asking the oracle on the way has cost."""

    texts: list[GuidedText]
    guidance: Guidance  # as it was applied, exact end included
    oracle_calls: int  # different prefixes the oracle was asked about
    oracle_seconds: float

    @overload
    def __getitem__(self, index: int) -> GuidedText: ...

    @overload
    def __getitem__(self, index: slice) -> list[GuidedText]: ...

    def __getitem__(self, index: int | slice) -> GuidedText | list[GuidedText]:
        return self.texts[index]

    def __len__(self) -> int:
        return len(self.texts)

    def __iter__(self) -> Iterator[GuidedText]:
        return iter(self.texts)


class _Products(NamedTuple):
    """What the vocabulary products give for N positions."""

    base: Tensor  # (N, V) logits of the base
    guides: list[Tensor | None]  # (N, V) of each guide, where they were made in the same product


class GuidedModel(PreTrainedModel, GenerationMixin):
    """q ∝ p·R as a model for transformers' `generate`, over the weights of `base`, which stays as it is.

    `guide` is a guide attached to the base, or a formula over such guides. `oracle` is needed where a guide
    was trained with its progress, and for an exact end. `language_model` is the same q for drawing and
    exact sampling.
    """

    def __new__(cls, base: CausalModel | EncoderDecoderModel, *args: Any, **kwargs: Any) -> "GuidedModel":
        """A model of the base's own class that shares its modules and weights, but not the lists of them."""
        kind: Any = type(base.model)
        model = super().__new__(_guided_class(kind))
        for name, value in vars(base.model).items():
            if name not in _BOUND:
                model.__dict__[name] = value.copy() if isinstance(value, dict | set) else value
        return model

    def __init__(
        self,
        base: CausalModel | EncoderDecoderModel,
        guide: Composable,
        *,
        guidance: Guidance | None = None,
        oracle: Oracle | None = None,
    ) -> None:
        self.base, self.oracle, self.guidance = base, oracle, guidance
        # Which part of the oracle each guide is told of is found out once, not for every call.
        self.follower = GuideFollower(guide, oracle)
        self.language_model = GuidedLanguageModel(base, self.follower, guidance=guidance, oracle=oracle)
        self.guides = tuple(self.follower.guides)
        self.__dict__["formula"] = guide  # past torch's own setter: the guide's weights are not the base's
        for each in self.guides:
            _require_masks(each)
        self.generation_config = _neutral_config(base)
        self._output = base._output if isinstance(base, CausalModel) else None
        self._limit = base.length_limit if base.completion == "eos" else None

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls,
        base: CausalModel | EncoderDecoderModel,
        guide: str | Path,
        *,
        oracle: Oracle | None = None,
        guidance: Guidance | None = None,
        allow_other_base: bool = False,
    ) -> "GuidedModel":
        """A base with the guide of a folder that `save_guide` has written."""
        names = names_for(guide, oracle)
        loaded = load_guide(
            guide, HuggingFaceReader(base), allow_other_base=allow_other_base, part_names=names
        )
        return cls(base, loaded, guidance=guidance, oracle=oracle)

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """Refused: a guided model is a base that exists already and a guide that is saved by itself."""
        raise InputError(
            "a guide to save",
            "a guided model, most of which is its base",
            "Save the guide alone with save_guide(guide, folder).",
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "GuidedModel":
        """Move the guides with the base; `to`, `cuda` and their like come through here."""
        movable: list[Any] = [super(), *self.guides]
        for each in movable:
            each._apply(fn, recurse)
        return self

    # --- generation -----------------------------------------------------------------------------------

    @torch.no_grad()
    def generate(  # type: ignore[override]
        self,
        inputs: Tensor | None = None,
        *,
        prompts: Sequence[str] | None = None,
        conditions: Sequence[str] | None = None,
        guidance: Guidance | None = None,
        **settings: Any,
    ) -> Any:
        """transformers' `generate` over q; `settings` and what is returned are transformers' own.

        Give `prompts`, or tokens as `inputs` or `input_ids` together with `conditions`; conditions are the
        prompts where none are given. At most L tokens are written. Sampling is from q itself unless
        `settings` ask for a temperature, top-k or top-p: those act on q, and weights no longer hold.
        """
        return self._generate(inputs, prompts, conditions, guidance or self._guidance, settings)[0]

    @torch.no_grad()
    def generate_texts(
        self,
        prompts: Sequence[str],
        conditions: Sequence[str] | None = None,
        *,
        guidance: Guidance | None = None,
        **settings: Any,
    ) -> GuidedTexts:
        """Texts, each with what became of it; `num_return_sequences` of a prompt stand side by side.

        Where neither this call nor the model was given a guidance and the oracle is cheap, the exact end is
        on: a finished text always satisfies the oracle. What that costs is told.
        """
        guidance = guidance or self._default_guidance
        output, steering = self._generate(None, prompts, conditions, guidance, settings)
        sequences = output if isinstance(output, Tensor) else output.sequences
        rows = [self._text_of(row) for row in sequences[:, steering.prompt_width :].tolist()]
        repeats = len(rows) // len(steering.conditions)
        dead = [False] * len(rows) if steering.dead_ends is None else steering.dead_ends.tolist()
        finished = [self._is_finished(row) and not lost for row, lost in zip(rows, dead, strict=True)]
        asked = [steering.conditions[row // repeats] for row in range(len(rows))]
        return self._judge(asked, rows, finished, dead, guidance, steering.prefixes)

    @torch.no_grad()
    def search_texts(
        self,
        prompts: Sequence[str],
        conditions: Sequence[str] | None = None,
        *,
        beams: int = 5,
        length_penalty: float = 1.0,
        batch_size: int = 64,
        guidance: Guidance | None = None,
    ) -> GuidedTexts:
        """Of each prompt the likeliest text of the base that satisfies, as far as beams find it.

        They rank prefixes by p·R and texts by log p / length^penalty; `generate` with `num_beams` ranks both
        by products of q, in which a guide's errors add up (`beam_search.py`). The exact end is on where it is
        in `generate_texts`. Where no text may end, a likely one that may not is given, unfinished.
        """
        guidance = guidance or self._default_guidance
        model, asked = self._under(guidance), pair_prompts(prompts, conditions)
        best = search_beams(model, asked, beams, length_penalty, batch_size).best
        rows, finished = [each.tokens for each in best], [each.finished for each in best]
        owners = [each.condition for each in asked]
        return self._judge(owners, rows, finished, [False] * len(rows), guidance, model.prefixes)

    def _judge(
        self,
        conditions: list[str],
        rows: list[list[int]],
        finished: list[bool],
        dead_ends: list[bool],
        guidance: Guidance,
        prefixes: JointReader | None,
    ) -> GuidedTexts:
        """Texts with what the oracle says of them, and what asking it on the way has cost."""
        texts = self.base.decode(rows)
        answers: list[bool | None] = [None] * len(rows)
        if self.oracle is not None:
            said = self.oracle(conditions, texts)
            answers = [bool(hit) and ended for hit, ended in zip(said, finished, strict=True)]
        columns = zip(texts, rows, finished, answers, dead_ends, strict=True)
        cost = (0, 0.0) if prefixes is None else (prefixes.calls, prefixes.seconds)
        return GuidedTexts([GuidedText(*each) for each in columns], guidance, *cost)

    def inspect(
        self,
        prompts: Sequence[str],
        conditions: Sequence[str] | None,
        tokens: Sequence[Sequence[int]],
        *,
        guidance: Guidance | None = None,
    ) -> Trace:
        """What guided decoding looks like along given texts, however they were written: (B, T) each.

        Log p and log q of each token, the factor that lifted it, the normaliser S, and what the base alone
        would have chosen.
        """
        model = self.language_model if guidance is None else self._under(guidance)
        return model.trace_rows(prompts, [self._text_of(list(row)) for row in tokens], conditions)

    def _under(self, guidance: Guidance) -> GuidedLanguageModel:
        """q under another guidance than the model's own."""
        return GuidedLanguageModel(self.base, self.follower, guidance=guidance, oracle=self.oracle)

    @property
    def _formula(self) -> Composable:
        formula: Composable = self.__dict__["formula"]
        return formula

    @property
    def _guidance(self) -> Guidance:
        return self.guidance or Guidance()

    @property
    def _default_guidance(self) -> Guidance:
        """What the model was given, or the method itself, with an exact end where that costs little."""
        cheap = self.oracle is not None and self.oracle.cheap and self.base.completion == "eos"
        return self.guidance or Guidance(exact_end=cheap)

    def _text_of(self, row: list[int]) -> list[int]:
        """Tokens up to EOS and with it."""
        return row[: row.index(self.base.eos_id) + 1] if self.base.eos_id in row else row

    def _is_finished(self, row: list[int]) -> bool:
        ended = self.base.eos_id in row
        return ended or (self.base.completion == "limit" and len(row) == self.base.length_limit)

    def _generate(
        self,
        inputs: Tensor | None,
        prompts: Sequence[str] | None,
        conditions: Sequence[str] | None,
        guidance: Guidance,
        settings: dict[str, Any],
    ) -> tuple[Any, Steering]:
        if guidance is not self._guidance:  # the same checks as when the model was made
            self._under(guidance)
        settings = self._with_prompts(inputs, prompts, conditions, settings)
        rows = settings["input_ids"]
        conditions = list(conditions if conditions is not None else prompts or [])
        if len(conditions) != len(rows):
            raise InputError(
                f"one condition for each of {len(rows)} rows",
                f"{len(conditions)}",
                "Give conditions= with the tokens: a guide does not read them from the base's prompt.",
            )
        width = 1 if isinstance(self.base, EncoderDecoderModel) else rows.shape[1]
        steering = Steering(self.base, self.follower, conditions, width, guidance, self.oracle)
        parent: Any = super()
        return parent.generate(**self._with_defaults(settings), **{_GUIDING: steering}), steering

    def _with_prompts(
        self,
        inputs: Tensor | None,
        prompts: Sequence[str] | None,
        conditions: Sequence[str] | None,
        settings: dict[str, Any],
    ) -> dict[str, Any]:
        """The settings with `input_ids` among them, and the mask where they come from prompts."""
        for name in ("inputs_embeds", "decoder_input_ids"):
            if settings.get(name) is not None:
                raise InputError("prompts or input_ids", name, "A guided text begins with its first token.")
        ids = settings.pop("input_ids", None) if inputs is None else inputs
        if (ids is None) == (prompts is None):
            raise InputError(
                "either prompts or input_ids",
                "neither" if ids is None else "both",
                "Call generate(prompts=[...]), or generate(input_ids, conditions=[...]).",
            )
        settings = dict(settings)
        if prompts is None:
            return settings | {"input_ids": ids}
        require_list(prompts)
        ids, mask = self.base._pad_left(self.base.encode(prompts))
        if isinstance(self.base, EncoderDecoderModel):  # encoders count positions from the left edge
            ids, mask = shift_to_left(ids, mask)
        return settings | {"input_ids": ids, "attention_mask": mask.long()}

    def _with_defaults(self, settings: dict[str, Any]) -> dict[str, Any]:
        """The settings with ours where transformers' own would change q: 20 tokens, top-k of 50."""
        holders = (settings.get("generation_config"), self.generation_config)

        def chosen(name: str) -> Any:
            given = [settings.get(name), *(getattr(holder, name, None) for holder in holders)]
            return next((value for value in given if value is not None), None)

        if chosen("max_new_tokens") is None and chosen("max_length") is None:
            settings = settings | {"max_new_tokens": self.base.length_limit}
        if chosen("do_sample") and chosen("top_k") is None:
            settings = settings | {"top_k": 0}
        return settings

    # --- what transformers calls ----------------------------------------------------------------------

    def _prepare_cache_for_generation(  # type: ignore[override]
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        parent: Any = super()
        parent._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)
        steering: Steering = model_kwargs[_GUIDING]
        self._check_settings(generation_config, steering)
        steering.chunked = generation_config.prefill_chunk_size is not None
        cache = model_kwargs.get("past_key_values")
        if cache is not None:
            width = steering.fix_width() if is_static(cache) else 0
            config = self.config.get_text_config(decoder=True)
            add_guide_layers(cache, self.guides, width, len(DynamicCache(config=config).layers))

    def _check_settings(self, settings: GenerationConfig, steering: Steering) -> None:
        guidance, limit = steering.guidance, self.base.length_limit
        beams = settings.num_beams > 1
        mode = "beam search" if beams else "greedy decoding"
        if guidance.soft and (beams or not settings.do_sample):
            raise InputError(
                f"sampling for a target rate of {guidance.target_rate:g}",
                mode,
                "A rate is a property of sampling: pass do_sample=True, num_beams=1.",
            )
        if guidance.floor and beams:
            raise InputError(
                "no floor under beam search",
                f"a floor of {guidance.floor:g}",
                "A dead end is ended at no cost and would win: beams leave dead ends by themselves.",
            )
        most = settings.max_length - steering.prompt_width
        if most > limit:
            raise InputError(
                f"at most {limit} new tokens, the length limit that guide and base were made for",
                f"{most}",
                "Leave max_new_tokens out, or train a guide for a higher limit.",
            )
        if most < limit:
            log.warning("%d new tokens are fewer than the length limit of %d that R counts with", most, limit)

    def _get_candidate_generator(self, *args: Any, **kwargs: Any) -> Any:
        # An assistant is not guided, and must not be given (nor copy) what guides this model.
        steering: Steering = kwargs["model_kwargs"][_GUIDING]
        if steering.guidance.floor:
            raise InputError(
                "no floor with an assistant",
                f"a floor of {steering.guidance.floor:g}",
                "A row could be given up for tokens that are taken back again: leave one of the two out.",
            )
        given = {name: value for name, value in kwargs["model_kwargs"].items() if name != _GUIDING}
        parent: Any = super()
        return parent._get_candidate_generator(*args, **(kwargs | {"model_kwargs": given}))

    def prepare_inputs_for_generation(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The base's inputs, and where the rows stand, which only the whole prefixes tell."""
        steering: Steering = kwargs.pop(_GUIDING)
        parent: Any = super()
        inputs: dict[str, Any] = parent.prepare_inputs_for_generation(input_ids, *args, **kwargs)
        name = "decoder_input_ids" if self.config.is_encoder_decoder else "input_ids"
        return inputs | {_GUIDING: steering.positions(input_ids, inputs[name].shape[1])}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The base's forward, with log q (B, positions, V) in place of logits.

        Only positions from the prompt's last on have one: logits are those of the last positions, as many
        as there are and at most `logits_to_keep`.
        """
        if args:
            kwargs = dict(inspect.signature(self.forward).bind_partial(*args, **kwargs).arguments)
            kwargs |= kwargs.pop("kwargs", {})
        positions: Positions | None = kwargs.pop(_GUIDING, None)
        if positions is None:
            raise InputError(
                "a forward pass made by generate",
                "one that does not know its conditions",
                "Call generate, generate_texts or inspect.",
            )
        keep = kwargs.pop("logits_to_keep", 0) or positions.count
        if self._output is None:
            layer: Any = self.get_output_embeddings()  # type: ignore[no-untyped-call]
            with watch_inputs(layer) as seen:
                output = super().forward(**kwargs)
            states, logits = seen[-1], output.logits
        else:
            body = self.base_model(**{name: kwargs[name] for name in kwargs if name not in _NOT_FOR_BODY})
            states, logits = body.last_hidden_state, None
            output = CausalLMOutputWithPast(
                past_key_values=body.past_key_values,
                hidden_states=body.get("hidden_states"),
                attentions=body.get("attentions"),
            )
        output.logits = self._guide(states, logits, positions, kwargs.get("past_key_values"), int(keep))
        return output

    # --- one forward pass: from hidden states to log q ------------------------------------------------

    def _guide(
        self, states: Tensor, logits: Tensor | None, positions: Positions, cache: Any, keep: int
    ) -> Tensor:
        """log q (B, k, V) of the last k = min(keep, g) positions; all g are read by the guides."""
        batch, count = len(states), positions.count
        kept = min(keep, count)
        if not kept:
            return states.new_empty(batch, 0, self.base.vocabulary_size)
        generated = positions.generated[count - kept :].repeat(batch)  # (N,), N = B·k
        scores = self._read(states[:, states.shape[1] - count :], positions, cache, kept)
        products = self._multiply(states[:, states.shape[1] - kept :].flatten(0, 1), scores, logits, kept)
        log_p = self.base.warpers.apply(products.base, self.base.eos_ids, generated)
        log_r = self._log_r(scores, log_p, generated, products.guides)
        log_q = self._apply_guidance(log_p, log_r, positions, kept)
        return log_q.view(batch, kept, -1)

    def _read(self, states: Tensor, positions: Positions, cache: Any, kept: int) -> list[Scores]:
        """Let each guide read the positions; its scores of the last `kept` of them."""
        scores = []
        left = (self.base.length_limit - positions.generated).clamp(min=0).expand(len(states), -1)
        caches = guide_caches(cache, self.guides)
        each = zip(self.guides, positions.known, positions.matrices, caches, strict=True)
        first = 0  # bit of progress that is for the next guide
        for guide, known, matrix, own in each:
            bits, progress = guide.config.progress_bits, None
            if bits and positions.progress is not None:
                progress = positions.progress[..., first : first + bits]
            first += bits
            text = guide.text_inputs(known, states, positions.last_tokens, left, progress)
            if positions.first:
                guide.read_conditions(known, own)
            features = guide.follow(known, text, positions.mask, positions.places, own)
            scores.append(_scores(guide, features[:, -kept:].flatten(0, 1), matrix))
        return scores

    def _multiply(self, states: Tensor, scores: list[Scores], logits: Tensor | None, kept: int) -> _Products:
        """The base's logits; where its output layer is a plain product, tied guides share it."""
        if logits is not None:
            return _Products(logits[:, -kept:].flatten(0, 1), [None] * len(scores))
        assert self._output is not None
        layer = self._output.layer
        tied = [guide.config.matrix == "tied" for guide in self.guides]
        if type(layer) is not torch.nn.Linear or not any(tied):
            return _Products(self._output(states), [None] * len(scores))
        shared = [each.vectors for each, own in zip(scores, tied, strict=True) if own]
        rows = torch.cat([states, *(vectors.to(states.dtype) for vectors in shared)])
        first, *others = (rows @ layer.weight.T).split(len(states))
        base = first if layer.bias is None else first + layer.bias
        rest = iter(others)
        return _Products(self._output.finish(base), [next(rest) if own else None for own in tied])

    def _log_r(
        self, scores: list[Scores], log_p: Tensor, generated: Tensor, products: list[Tensor | None]
    ) -> Tensor:
        parts = [
            guide.log_r(own, log_p, generated, logits)
            for guide, own, logits in zip(self.guides, scores, products, strict=True)
        ]
        log_r = combine(self._formula, parts)
        if self._limit is None or not isinstance(self._formula, Composition):
            return log_r
        return close_at_limit(log_r, self.base.eos_id, generated == self._limit - 1)

    def _apply_guidance(self, log_p: Tensor, log_r: Tensor, positions: Positions, kept: int) -> Tensor:
        """log q (N, V), dead ends ended."""
        guidance, eos_id = positions.guidance, self.base.eos_id
        soft = self._soften(log_p, log_r, positions, kept)
        stops = None if positions.stops is None else positions.stops[:, -kept:].flatten()
        answers: dict[str, Any] = {"stops": stops, "eos_id": eos_id}
        step = guide_step(log_p, log_r, guidance, soft=soft, **answers)
        if positions.live is None or positions.dead_ends is None:
            return step.log_q
        dead = chance(step, log_p, log_r, guidance, **answers) < math.log(guidance.floor)
        live = positions.live[:, -kept:]
        positions.dead_ends.logical_or_((dead.view(live.shape) & live).any(dim=1))
        ended = torch.full_like(step.log_q, -math.inf)
        ended[:, eos_id] = 0.0
        return torch.where(dead[:, None], ended, step.log_q)

    def _soften(
        self, log_p: Tensor, log_r: Tensor, positions: Positions, kept: int
    ) -> SoftCoefficients | None:
        """A soft rate's coefficients, from the first position of each row, one pair for each position."""
        soft = positions.soft
        if soft is None:
            return None
        if positions.first and kept == positions.count:
            made = begin_soft(log_p[::kept], log_r[::kept], positions.guidance)
            assert made is not None
            soft.log_alpha.copy_(made.log_alpha)
            soft.log_beta.copy_(made.log_beta)
        return SoftCoefficients(soft.log_alpha.repeat_interleave(kept), soft.log_beta.repeat_interleave(kept))


def _scores(guide: Guide, features: Tensor, matrix: Tensor | None) -> Scores:
    """A guide's scores of features (N, size), with its matrix where that is made already."""
    if matrix is None:
        return guide.scores(features)
    return Scores(guide.head.vector(features), guide.head.bias(features).squeeze(-1).float(), matrix)


@functools.cache
def _guided_class(kind: type[PreTrainedModel]) -> type[GuidedModel]:
    """A guided subclass of a model's class, whose forward looks like that class's own."""

    @functools.wraps(kind.forward)
    def forward(self: GuidedModel, *args: Any, **kwargs: Any) -> Any:
        return GuidedModel.forward(self, *args, **kwargs)

    signature = inspect.signature(kind.forward)
    guiding = inspect.Parameter(_GUIDING, inspect.Parameter.KEYWORD_ONLY, default=None)
    named = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
    rest = [each for each in signature.parameters.values() if each.kind is each.VAR_KEYWORD]
    forward.__signature__ = signature.replace(parameters=[*named, guiding, *rest])  # type: ignore[attr-defined]
    # The module too is the base's: transformers reads there what an architecture can do.
    return type(
        f"Guided{kind.__name__}", (GuidedModel, kind), {"forward": forward, "__module__": kind.__module__}
    )


def _neutral_config(base: CausalModel | EncoderDecoderModel) -> GenerationConfig:
    """A generation config that leaves q alone; the checkpoint's own is not inherited."""
    pad = base.tokenizer.pad_token_id
    start = base._start_id if isinstance(base, EncoderDecoderModel) else None
    return GenerationConfig(
        eos_token_id=base.eos_id,
        pad_token_id=base.eos_id if pad is None else pad,
        bos_token_id=base.tokenizer.bos_token_id,
        decoder_start_token_id=start,
    )


def _require_masks(guide: Guide) -> None:
    body: Any = guide.body
    if guide.attentive and body.config._attn_implementation != "sdpa":
        raise InputError(
            "a guide with sdpa attention, which reads boolean masks",
            f"{body.config._attn_implementation}",
            "Load it without attn_implementation.",
        )
