"""What was probably meant, when a name is not known."""

import difflib
from collections.abc import Iterable


def suggest(name: str, known: Iterable[str]) -> str:
    """A hint: the closest known name, or the first dozen of them."""
    names = list(known)
    close = difflib.get_close_matches(name, names, 1, cutoff=0.5)
    if close:
        return f"Did you mean {close[0]}?"
    return f"Known: {', '.join(names[:12])}{', …' if len(names) > 12 else ''}."
