"""From a request to a job: what is asked for is checked against what is served, before anything is queued."""

import time
from collections.abc import Sequence

from nado.errors import InputError, NadoError
from nado.guidance import Guidance, require_scale
from nado.serving.engine import Engine
from nado.serving.jobs import Job
from nado.serving.models import ServedModel
from nado.serving.refusals import RefusalError, refuse
from nado.serving.schema import ChatRequest, CompletionRequest, Message, Settings
from nado.serving.voices import Member, Voice, as_oracle_error
from nado.study.sections import fill_template

_COLDEST = 1e-6  # a temperature below it is 0: numbers divided by less overflow


def read_completion(asked: CompletionRequest, engine: Engine, seed: int) -> Job:
    """A job from a completion request."""
    given = [asked.prompt] if asked.prompt is None or isinstance(asked.prompt, str) else asked.prompt
    if asked.prompt is None and asked.condition is None:
        raise RefusalError(400, "Give a prompt, a condition, or both.", param="prompt")
    prompts = [_fill(engine.model, asked.condition or "") if prompt is None else prompt for prompt in given]
    conditions = [asked.condition if asked.condition is not None else prompt for prompt in prompts]
    return _make(asked, engine, seed, prompts, conditions, asked.max_tokens, asked.logprobs)


def read_chat(asked: ChatRequest, engine: Engine, seed: int) -> Job:
    """A job from a chat request."""
    served = engine.model
    if not served.chats:
        raise RefusalError(
            400,
            "This model has no chat template: use /v1/completions.",
            param="messages",
            code="no_chat_template",
        )
    prompt = _render(served, asked.messages)
    condition = asked.condition if asked.condition is not None else asked.messages[-1].text
    limit = asked.max_completion_tokens if asked.max_completion_tokens is not None else asked.max_tokens
    if asked.top_logprobs is not None and not asked.logprobs:
        raise RefusalError(400, "top_logprobs needs logprobs: true.", param="top_logprobs")
    top = (asked.top_logprobs or 0) if asked.logprobs else None
    return _make(asked, engine, seed, [prompt], [condition], limit, top)


def _fill(served: ServedModel, condition: str) -> str:
    """What the base reads for a condition: the form the guide was trained with."""
    return condition if served.template is None else fill_template(served.template, condition)


def _render(served: ServedModel, messages: Sequence[Message]) -> str:
    """A chat as a prompt of the base."""
    if served.base.chat:  # it wraps a prompt as the user's message by itself
        if len(messages) != 1 or messages[0].role != "user":
            raise RefusalError(
                400,
                "This model was guided with single messages: send one message, of the user.",
                param="messages",
            )
        return messages[0].text
    tokenizer = served.base.tokenizer
    chat = [{"role": each.role, "content": each.text} for each in messages]
    try:
        text = str(tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False))
    except Exception as error:  # templates refuse, in their own ways, roles they do not know
        raise RefusalError(
            400, "The model's chat template refuses these messages.", param="messages"
        ) from error
    first = tokenizer.bos_token
    adds_first = first is not None and served.base.encode([""])[0][:1] == [tokenizer.bos_token_id]
    return text.removeprefix(first) if adds_first and first is not None else text


def _make(
    asked: Settings,
    engine: Engine,
    seed: int,
    prompts: Sequence[str],
    conditions: Sequence[str],
    max_tokens: int | None,
    top_logprobs: int | None,
) -> Job:
    served, config = engine.model, engine.config
    strengths = served.default_guides if asked.guides is None else asked.guides
    names = tuple(sorted(strengths))
    members = _choose(served, names)
    voice = _voice(asked, served, members, tuple(strengths[name] for name in names))
    if asked.n * len(prompts) > config.max_texts:
        raise RefusalError(400, f"A request may ask for {config.max_texts} texts.", param="n")
    _require_readable(engine, members, prompts, conditions)
    limit = served.base.length_limit
    return Job(
        prompts=tuple(prompt for prompt in prompts for _ in range(asked.n)),
        conditions=tuple(condition for condition in conditions for _ in range(asked.n)),
        guides=names,
        voice=voice,
        seed=seed,
        max_tokens=limit if max_tokens is None else min(limit, max_tokens),
        stops=asked.stops,
        temperature=asked.temperature if asked.temperature >= _COLDEST else 0.0,
        top_p=asked.top_p,
        verified=asked.verified,
        judged=asked.return_guidance and _can_judge(members),
        stream=asked.stream,
        top_logprobs=top_logprobs,
        guidance=asked.return_guidance,
        deadline=time.monotonic() + config.deadline,
    )


def _choose(served: ServedModel, names: tuple[str, ...]) -> tuple[Member, ...]:
    try:
        return served.choose(names)
    except NadoError as error:
        raise RefusalError(400, str(error), param="guides") from error


def _can_judge(members: Sequence[Member]) -> bool:
    return bool(members) and all(each.oracle is not None for each in members)


def _voice(
    asked: Settings, served: ServedModel, members: Sequence[Member], strengths: tuple[float, ...]
) -> Voice:
    rate = 1.0 if asked.target_rate is None else asked.target_rate
    if rate < 1 and not members:
        raise RefusalError(400, "A target rate needs a guide.", param="target_rate")
    if asked.doubt and not members:
        raise RefusalError(400, "There is nothing to doubt without a guide.", param="doubt")
    if asked.plausible and not members:
        raise RefusalError(400, "Without a guide, use top_p.", param="plausible")
    if rate < 1 and (asked.verified or asked.temperature != 1 or asked.top_p != 1):
        raise RefusalError(
            400,
            "A target rate goes neither with verified texts nor with another temperature or top_p: "
            "it would not be the rate.",
            param="target_rate",
        )
    if asked.verified and not _can_judge(members):
        raise RefusalError(400, "Verified texts need a guide whose oracle is loaded.", param="verified")
    # Verified texts are checked anyway, and without an exact end they are nearer to q*.
    pulled = [each for each, strength in zip(members, strengths, strict=True) if strength > 0]
    exact = rate == 1 and not asked.verified and served.ends_exactly(pulled)
    guides = [each.guide for each in members]
    for name, guidance in (
        ("target_rate", Guidance(target_rate=rate)),
        ("doubt", Guidance(doubt=asked.doubt or 0.0)),
    ):
        try:
            require_scale(guidance, guides)
        except NadoError as error:
            raise RefusalError(400, str(error), param=name) from error
    try:
        return Voice(strengths, rate, exact, asked.doubt or 0.0, asked.plausible or 0.0)
    except NadoError as error:
        raise RefusalError(400, str(error), param="target_rate") from error


def _require_readable(
    engine: Engine, members: Sequence[Member], prompts: Sequence[str], conditions: Sequence[str]
) -> None:
    """Refuse prompts and conditions that are too long, or that base, guide or oracle cannot read."""
    served, config = engine.model, engine.config
    try:
        longest = max(len(row) for row in served.base.encode(list(prompts)))
    except InputError as error:
        raise RefusalError(400, str(error), param="prompt", code="context_length_exceeded") from error
    if longest > engine.prompt_tokens:
        raise RefusalError(
            400,
            f"A prompt may have {engine.prompt_tokens} tokens; this one has {longest}.",
            param="prompt",
            code="context_length_exceeded",
        )
    for member in members:
        _require_condition(member, list(conditions), config.max_condition_tokens)


def _require_condition(member: Member, conditions: list[str], most: int) -> None:
    reader = member.guide.reader
    assert reader is not None
    longest = max(len(row) for row in reader.encode_conditions(conditions))
    if longest > most:
        raise RefusalError(
            400, f"A condition may have {most} tokens; this one has {longest}.", param="condition"
        )
    if member.oracle is None or member.told is None:
        return
    try:  # only names: the oracle itself is asked in the engine's thread and nowhere else
        names = [member.told.progress_names(each) for each in conditions]
    except InputError as error:
        raise RefusalError(400, str(error), param="condition") from error
    except Exception as error:
        raise refuse(as_oracle_error(member.oracle, error)) from error
    parts = max(map(len, names))
    if member.bits and parts > member.bits:
        raise RefusalError(
            400,
            f"A condition of the guide {member.name} may have {member.bits} parts; this one has {parts}.",
            param="condition",
        )
