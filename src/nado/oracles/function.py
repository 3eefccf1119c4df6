"""Plain Python functions as oracles."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal, overload

import numpy as np

from nado.errors import InputError, NadoError, OracleError
from nado.oracles.description import describe
from nado.oracles.protocol import BoolArray, Oracle, check_answers, rebuild, shorten

Takes = Literal["text", "condition and text"]


class OracleOfFunction(Oracle):
    """What oracles made of a function share: its name, its arguments, and how workers find it again."""

    def __init__(self, function: Callable[..., Any], takes: Takes, name: str | None) -> None:
        self.function = function
        self.takes = takes
        self._name = str(name or getattr(function, "__name__", type(function).__name__))

    @property
    def name(self) -> str:
        """The function's own name unless another was given."""
        return self._name

    def settings(self) -> dict[str, Any]:
        """The arguments beside the function that make the same oracle again."""
        raise NotImplementedError

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.origin is not None:
            return self.origin.reload, ()
        module, path = self.function.__module__, getattr(self.function, "__qualname__", "<lambda>")
        found = _look_up(module, path)
        if found is self:  # decorated: the module's name is the oracle, not the function
            return _look_up, (module, path)
        if found is self.function:
            return rebuild, (type(self), {"function": self.function, **self.settings()})
        raise OracleError(
            "an oracle that worker processes can find again",
            f"{self.name}, defined inside a function or at a prompt",
            "Define it at the top of a module, or label with workers=1 and no timeout.",
        )


class FunctionOracle(OracleOfFunction):
    """A function of one text, or of a condition and a text, asked row by row (or batch by batch)."""

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        cheap: bool = False,
        name: str | None = None,
        batch: bool = False,
    ) -> None:
        super().__init__(function, read_signature(function, batch), name)
        self.cheap = cheap
        self.batch = batch

    @property
    def spec(self) -> str:
        """The function with a digest of its code and of what it rests on."""
        return f"function({describe(self.function)})"

    def settings(self) -> dict[str, Any]:
        """The arguments beside the function."""
        return {"cheap": self.cheap, "name": self._name, "batch": self.batch}

    def judge(self, conditions: Sequence[str], texts: Sequence[str]) -> BoolArray:
        """The function's answer on each row, or on the whole batch."""
        if self.batch:
            arguments = (texts,) if self.takes == "text" else (conditions, texts)
            return check_answers(self.function(*arguments), len(texts), self.name)
        answers = [self._answer(*row) for row in zip(conditions, texts, strict=True)]
        return np.array(answers, dtype=bool)

    def _answer(self, condition: str, text: str) -> bool:
        """The answer on one row; what the function raises names the text."""
        try:
            answer = self.function(text) if self.takes == "text" else self.function(condition, text)
        except NadoError:
            raise
        except Exception as error:
            raise OracleError(
                f"an answer from the oracle {self.name}",
                f"{type(error).__name__}: {error} for the text {shorten(text)}",
                "Mend it: any text may come, the empty one too, and for a cheap oracle every prefix.",
            ) from error
        return check_answer(answer, self.name, text)


def _look_up(module: str, path: str) -> Any:
    found: Any = sys.modules.get(module) or importlib.import_module(module)
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


@overload
def oracle(function: Callable[..., Any], /) -> FunctionOracle: ...
@overload
def oracle(
    *, cheap: bool = False, name: str | None = None, batch: bool = False
) -> Callable[[Callable[..., Any]], FunctionOracle]: ...
def oracle(
    function: Callable[..., Any] | None = None,
    /,
    *,
    cheap: bool = False,
    name: str | None = None,
    batch: bool = False,
) -> FunctionOracle | Callable[[Callable[..., Any]], FunctionOracle]:
    """Make an oracle of a function of one text, or of a condition and a text, that answers bool.

    `cheap` lets decoding ask it at every step. With `batch` the function takes lists (texts, or
    conditions and texts) and answers with one boolean a text.
    """

    def wrap(function: Callable[..., Any]) -> FunctionOracle:
        return FunctionOracle(function, cheap=cheap, name=name, batch=batch)

    return wrap if function is None else wrap(function)


def read_signature(function: Callable[..., Any], batch: bool, asynchronous: bool = False) -> Takes:
    """Whether a function takes a text, or a condition and a text; anything unclear is refused."""
    wanted = (
        "a function of (texts) or (conditions, texts)"
        if batch
        else "a function of (text) or (condition, text)"
    )
    if not callable(function):
        raise InputError(wanted, type(function).__name__, "Pass a function or an Oracle.")
    called = getattr(function, "__name__", type(function).__name__)
    if inspect.iscoroutinefunction(function) and not asynchronous:
        raise InputError(wanted, f"the async function {called}", "Wrap it with remote(...) instead.")
    names = _required_arguments(function, wanted, called)
    shown = f"{called}({', '.join(names)})"
    if len(names) not in (1, 2):
        raise InputError(wanted, shown, "Give further arguments a default value.")
    if len(names) == 2 and names[0].startswith("text") and not names[1].startswith("text"):
        raise InputError(wanted, shown, "The condition comes first: swap the two arguments.")
    if not batch and names[-1] in ("texts", "batch", "sentences"):
        hint = "Write it for one text, or say @oracle(batch=True) when it takes lists."
        raise InputError(wanted, shown, hint)
    return "text" if len(names) == 1 else "condition and text"


def _required_arguments(function: Callable[..., Any], wanted: str, called: str) -> list[str]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:
        raise InputError(
            wanted, f"{called}, whose arguments Python cannot tell", "Wrap it: lambda text: ..."
        ) from None
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        raise InputError(wanted, f"{called}(*args)", "Name its arguments.")
    required = [p for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    return [p.name for p in required]


def check_answer(answer: Any, name: str, text: str) -> bool:
    """One boolean; a truthy score is refused because it is true even where it is low."""
    if isinstance(answer, (bool, np.bool_)):
        return bool(answer)
    raise OracleError(
        f"True or False from the oracle {name}",
        f"{answer!r} ({type(answer).__name__}) for the text {shorten(text)}",
        "Return a bool; compare a score with a threshold first.",
    )
