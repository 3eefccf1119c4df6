"""Oracles: yes/no questions about a finished text.

from nado.oracles import Keywords, Length, oracle

@oracle
def polite(text: str) -> bool:
    return "please" in text.lower()

question = Keywords() & Length(maximum=20) & polite
satisfied = question(["dog, ball"], ["Please throw the dog a ball."])
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from nado.oracles.function import FunctionOracle, oracle
from nado.oracles.protocol import AllOf, AnyOf, BoolArray, Not, Oracle

if TYPE_CHECKING:
    from nado.oracles.auditing import Audit, Finding, audit, wilson_interval
    from nado.oracles.checking import check_oracle
    from nado.oracles.huggingface_classifier import HuggingFaceClassifier
    from nado.oracles.inflection import prepare_forms
    from nado.oracles.keywords import ForbiddenWords, Keywords
    from nado.oracles.language_tools import Language, Sentiment
    from nado.oracles.linear_classifier import LinearClassifier
    from nado.oracles.loading import load_oracle
    from nado.oracles.readability import Readability
    from nado.oracles.remote_calls import RemoteOracle, remote
    from nado.oracles.scored import ScoredOracle
    from nado.oracles.sklearn_classifier import SklearnClassifier
    from nado.oracles.text_rules import EndsWith, Json, Length, Pattern, StartsWith

# Public name → module, imported when first used: none of them is needed to define an oracle.
_LAZY = {
    "Audit": "auditing",
    "EndsWith": "text_rules",
    "Finding": "auditing",
    "ForbiddenWords": "keywords",
    "HuggingFaceClassifier": "huggingface_classifier",
    "Json": "text_rules",
    "Keywords": "keywords",
    "Language": "language_tools",
    "Length": "text_rules",
    "LinearClassifier": "linear_classifier",
    "Pattern": "text_rules",
    "Readability": "readability",
    "RemoteOracle": "remote_calls",
    "ScoredOracle": "scored",
    "Sentiment": "language_tools",
    "SklearnClassifier": "sklearn_classifier",
    "StartsWith": "text_rules",
    "check_oracle": "checking",
    "load_oracle": "loading",
    "prepare_forms": "inflection",
    "audit": "auditing",
    "remote": "remote_calls",
    "wilson_interval": "auditing",
}

__all__ = [
    "AllOf",
    "AnyOf",
    "Audit",
    "BoolArray",
    "EndsWith",
    "Finding",
    "ForbiddenWords",
    "FunctionOracle",
    "HuggingFaceClassifier",
    "Json",
    "Keywords",
    "Language",
    "Length",
    "LinearClassifier",
    "Not",
    "Oracle",
    "Pattern",
    "Readability",
    "RemoteOracle",
    "ScoredOracle",
    "Sentiment",
    "SklearnClassifier",
    "StartsWith",
    "audit",
    "check_oracle",
    "load_oracle",
    "oracle",
    "prepare_forms",
    "remote",
    "wilson_interval",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)


def __dir__() -> list[str]:
    return __all__
