"""ROUGE-L as COCO takes it: longest common subsequence, best precision and recall over references."""

from collections.abc import Sequence

from nado.metrics.measure import Metric, mean, require_references
from nado.metrics.tokens import TokeniserName, tokeniser

_BETA = 1.2  # recall counts 1.44 times as much as precision


def rouge_l(
    texts: Sequence[str], references: Sequence[Sequence[str]], *, tokens: TokeniserName = "english"
) -> Metric:
    """The mean over texts of ROUGE-L's F, 0 to 100."""
    require_references(texts, references, "ROUGE-L")
    cut = tokeniser(tokens)
    scores = [
        100 * _score(cut(text), [cut(one) for one in several])
        for text, several in zip(texts, references, strict=True)
    ]
    method = f"ROUGE-L, β = {_BETA}, {tokens} tokens, case kept, mean over texts"
    return mean("ROUGE-L", scores, method=method, unit="0–100")


def _score(text: list[str], references: list[list[str]]) -> float:
    if not text:
        return 0.0
    common = [count_common(text, reference) for reference in references]
    precision = max(common) / len(text)
    pairs = zip(common, references, strict=True)
    recall = max((each / len(reference) for each, reference in pairs if reference), default=0.0)
    if precision == 0 or recall == 0:
        return 0.0
    return (1 + _BETA**2) * precision * recall / (recall + _BETA**2 * precision)


def count_common(first: Sequence[str], second: Sequence[str]) -> int:
    """The length of the longest common subsequence."""
    best = [0] * (len(second) + 1)
    for one in first:
        diagonal = 0
        for place, other in enumerate(second, start=1):
            above = best[place]
            best[place] = diagonal + 1 if one == other else max(above, best[place - 1])
            diagonal = above
    return best[-1]
