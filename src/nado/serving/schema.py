"""What a request may say: OpenAI's fields, those that guidance adds, and nothing else."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Text = Annotated[str, Field(max_length=65536)]
Condition = Annotated[str, Field(max_length=4096)]
Stop = Annotated[str, Field(min_length=1, max_length=64)]
Strength = Annotated[float, Field(ge=0, le=16, allow_inf_nan=False)]
Seed = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
Name = Annotated[str, Field(max_length=256)]


class _Closed(BaseModel):
    """Unknown fields are errors: one that is ignored would be silently wrong."""

    model_config = ConfigDict(extra="forbid")


class StreamOptions(_Closed):
    """What a stream tells beside the text."""

    include_usage: bool = False


class Settings(_Closed):
    """What both kinds of request have in common."""

    model: Name | None = None
    n: Annotated[int, Field(ge=1, le=128)] = 1
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] = 1.0
    seed: Seed | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=4)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: Name | None = None
    # Not offered: only the values that change nothing are taken.
    frequency_penalty: Literal[0] | None = None
    presence_penalty: Literal[0] | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None
    # What guidance adds.
    condition: Condition | None = Field(
        None, description="What guide and oracle read, keywords for instance."
    )
    guides: Annotated[dict[Name, Strength], Field(max_length=8)] | None = Field(
        None, description="Guides and their strengths: 0 is the base alone, 1 the method itself."
    )
    target_rate: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = Field(
        None,
        description="The share of texts that shall satisfy the oracle; not with a strength other than 1.",
    )
    doubt: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = Field(
        None,
        description="R far below this is not believed: a text as good as lost goes on as the base would.",
    )
    plausible: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = Field(
        None,
        description="Tokens less than this share as likely to the base as its likeliest are left out.",
    )
    verified: bool = Field(False, description="Only texts that the oracle has said yes to, after it has.")
    return_guidance: bool = Field(False, description="Say of every token p, q, R, S and the base's choice.")

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop sequences as a tuple."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with the count of its tokens."""
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionRequest(Settings):
    """POST /v1/completions."""

    prompt: Text | Annotated[list[Text], Field(min_length=1, max_length=128)] | None = Field(
        None, description="What the base reads. Without one it is made from the condition."
    )
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    best_of: Literal[1] | None = None
    echo: Literal[False] = False
    suffix: None = None


class TextPart(_Closed):
    """A piece of a message."""

    type: Literal["text"]
    text: Text


class Message(_Closed):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Annotated[list[TextPart], Field(min_length=1, max_length=64)]
    name: Name | None = None

    @property
    def text(self) -> str:
        """Its text in one piece."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ResponseFormat(_Closed):
    """Plain text is the only one."""

    type: Literal["text"]


class ChatRequest(Settings):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=64)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None


class ErrorDetail(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """An error in OpenAI's shape."""

    error: ErrorDetail


ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": text}
    for status, text in {
        400: "The request cannot be answered as it is",
        401: "No token, or a wrong one",
        404: "No such model or route",
        408: "It took too long",
        413: "The body is too large",
        429: "Too many texts wait",
    }.items()
}
