"""Tokens to text as they come: never half a character, never part of a stop sequence."""

from collections.abc import Sequence

_BROKEN = "�"  # what decoders write for a character that is not complete yet


class TextStream:
    """The text of one row, cut into the piece that each token adds; together they are the text.

    A token may hold part of a character: the character then belongs to the token that completes it. A text
    that might still turn out to be the start of a stop sequence is held back.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self.text = ""
        self.pieces: list[str] = []
        self.stopped = False  # a stop sequence was found: the text ends before it
        self._stops = [stop for stop in stops if stop]
        self._released = 0  # pieces that were given out
        self._released_end = 0  # where in the text they end

    def add(self, decoded: str, *, last: bool = False) -> None:
        """One more token; `decoded` is the text of all tokens so far."""
        if self.stopped:
            self.pieces.append("")
            return
        whole = decoded if last else decoded.rstrip(_BROKEN)
        start = len(self.text)
        # Some decoders tidy up what they wrote before: what was given out stays as it is.
        piece = whole[start:] if whole.startswith(self.text) or last else ""
        self.text += piece
        self.pieces.append(piece)
        self._cut(start)

    def finish(self, decoded: str) -> None:
        """The whole text, where single tokens were not followed: there are no stop sequences then."""
        self.text = decoded

    def _cut(self, start: int) -> None:
        """End the text before the first stop sequence that reaches behind `start`."""
        longest = max(map(len, self._stops), default=0)
        first = max(0, start - longest + 1)
        found = [place for stop in self._stops if (place := self.text.find(stop, first)) >= 0]
        if not found:
            return
        self.stopped = True
        surplus = len(self.text) - min(found)
        self.text = self.text[: min(found)]
        for place in range(len(self.pieces) - 1, -1, -1):  # a stop sequence may begin several tokens back
            taken = min(surplus, len(self.pieces[place]))
            self.pieces[place] = self.pieces[place][: len(self.pieces[place]) - taken]
            surplus -= taken

    @property
    def _safe(self) -> int:
        """How much of the text can be no part of a stop sequence."""
        held = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(self.text)), held, -1):
                if self.text.endswith(stop[:length]):
                    held = length
                    break
        return len(self.text) - held

    def release(self, *, last: bool = False) -> range:
        """Pieces that may be given out now and were not before."""
        first, safe = self._released, len(self.text) if last or self.stopped else self._safe
        while self._released < len(self.pieces):
            end = self._released_end + len(self.pieces[self._released])
            if end > safe:
                break
            self._released, self._released_end = self._released + 1, end
        return range(first, self._released)
