"""The embedded model: a small language model of English sentences, at hand without a network.

`tiny` is its name wherever a base is asked for, and its guides' names stand for their folders. How it was
made: `recipes/tiny/` in the repository.
"""

from pathlib import Path

NAME = "tiny"
GUIDES = {
    "keywords": "the sentence has the given keywords, in any of their forms",
    "positive": "the sentence has a positive sentiment",
}

_HERE = Path(__file__).parent


def locate_base(name: str | Path) -> str | Path:
    """The embedded base's folder where that is what is named; any other name as it is."""
    return _HERE / "base" if str(name) == NAME else name


def locate_guide(guide: str | Path | None = None) -> Path:
    """The folder of a guide: a path as it is, an embedded guide by its name; None is the one for keywords."""
    if guide is not None and (Path(guide).exists() or str(guide) not in GUIDES):
        return Path(guide)
    return _HERE / str(guide or "keywords")
