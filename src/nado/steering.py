"""What guided generation knows of the texts of one call, and of the positions of one forward pass.

Nothing here follows the rows of a search: conditions belong to the rows of the call and never move, and what
the oracle says of a prefix is a function of the prefix alone. So beams may be reordered, repeated and dropped
at will; keys and values, which do belong to rows, are in the cache.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from nado.decomposition import SoftCoefficients
from nado.following import GuideFollower
from nado.guidance import Guidance, require_scale
from nado.guide import Conditions, Guide, Known
from nado.huggingface import CausalModel, EncoderDecoderModel
from nado.oracles.protocol import Oracle
from nado.prefixes import JointReader

_WIDTH_STEP = 16  # widths of fixed caches are multiples of this, so that near-equal conditions share a graph


@dataclass(frozen=True)
class Positions:
    """The last g positions that a forward pass reads: those before the g tokens it is asked about.

    Plain tensors, so that a compiled forward takes them; a prompt read in pieces has g = 0 but for the last.
    """

    known: tuple[Known, ...]  # of each guide
    matrices: tuple[Tensor | None, ...]  # (V, rank) of each guide with a low-rank head
    last_tokens: Tensor  # (B, g), −1 before the first
    generated: Tensor  # (g,) tokens written before each
    places: Tensor | None  # (B, g) where they stand behind the condition, None where no guide asks
    mask: Tensor | None  # bool (B, 1, g, columns) of the guides' caches, None for all of them
    progress: Tensor | None  # int8 (B, g, bits)
    stops: Tensor | None  # bool (B, g)
    guidance: Guidance
    soft: SoftCoefficients | None  # (B,), written at the first position
    live: Tensor | None  # bool (B, g), where dead ends are looked for
    dead_ends: Tensor | None  # bool (B,), written
    first: bool  # the guides have read nothing yet

    @property
    def count(self) -> int:
        """g."""
        return len(self.generated)


class Steering:
    """Conditions, guidance and the oracle's answers for the texts of one call."""

    def __init__(
        self,
        base: CausalModel | EncoderDecoderModel,
        follower: GuideFollower,
        conditions: Sequence[str],
        prompt_width: int,
        guidance: Guidance,
        oracle: Oracle | None,
    ) -> None:
        """`follower` has the guides, and knows of each which oracle it is told of."""
        guides = follower.guides
        require_scale(guidance, guides)
        self.guidance, self.conditions = guidance, list(conditions)
        self.prompt_width = prompt_width  # columns before the first written token
        self.base, self._guides = base, guides
        self.prefixes: JointReader | None = None
        if oracle is not None and (guidance.exact_end or follower.progress_bits):
            self.prefixes = JointReader(oracle, follower.told, base.decode, ends=guidance.exact_end)
        self.dead_ends: Tensor | None = None  # bool, one a row
        self._soft: SoftCoefficients | None = None
        self.chunked = False  # the prompt is read in pieces
        self._read = 0  # columns of it that have been
        self._width = 0  # places of a cache of fixed width, 0 where it grows
        pairs = zip(guides, follower.oracles, strict=True)
        self._known = tuple(_know(guide, conditions, own) for guide, own in pairs)
        # Mixing the base's output matrix costs as much as a step of a small base: once a call, not a token.
        self._matrices = tuple(_mix(guide) for guide in guides)
        self._padded = not bool(self._known[0].mask.all())
        self._looks_back = any(guide.config.reads != "light" for guide in guides)
        self._spread: tuple[Known, ...] = ()  # the same, one row for every row of the search
        self._lengths: Tensor | None = None  # (B', 1) of their conditions

    def fix_width(self) -> int:
        """Settle on a fixed number of places in the guides' caches; returns it."""
        width = self._known[0].mask.shape[1]
        added = -width % _WIDTH_STEP
        self._known = tuple(
            Known(
                pad(known.inputs, (0, 0, added, 0)), pad(known.mask, (added, 0)), known.missing, known.settled
            )
            for known in self._known
        )
        self._spread = ()
        self._width = width + added + self.base.length_limit
        return self._width

    def positions(self, input_ids: Tensor, count: int) -> Positions:
        """Where a forward pass stands that reads the last `count` columns of `input_ids` (B', T)."""
        tokens, guided = self._written(input_ids, count)  # (B', t)
        rows, written = tokens.shape
        known = self._spread_over(rows)
        device = self.base.device
        tokens = tokens.to(device)
        generated = torch.arange(written + 1 - guided, written + 1, device=device)
        live = self._live(tokens, guided) if self.prefixes is not None or self.guidance.floor else None
        progress, stops = self._ask(tokens, live)
        return Positions(
            known=known,
            matrices=self._matrices,
            last_tokens=_last_tokens(tokens, guided),
            generated=generated,
            places=None if self._lengths is None else self._lengths + generated,
            mask=self._mask(known[0].mask, generated, written + 1),
            progress=progress,
            stops=stops,
            guidance=self.guidance,
            soft=self._soft,
            live=live,
            dead_ends=self.dead_ends,
            first=guided == written + 1,
        )

    def _written(self, input_ids: Tensor, count: int) -> tuple[Tensor, int]:
        """The tokens written so far, and how many positions are to be guided."""
        if self.chunked and self._read < self.prompt_width:
            self._read += count  # only the piece itself is given
            return input_ids[:, :0], int(self._read >= self.prompt_width)
        tokens = input_ids[:, self.prompt_width :]
        return tokens, min(count, tokens.shape[1] + 1)

    def _spread_over(self, rows: int) -> tuple[Known, ...]:
        """One row of conditions for each row: beams and repeated samples stand side by side."""
        if not self._spread or len(self._spread[0].mask) != rows:
            index = torch.arange(rows, device=self.base.device) // (rows // len(self.conditions))
            self._spread = tuple(known.rows(index) for known in self._known)
            self._lengths = self._spread[0].mask.sum(dim=1, keepdim=True) if self._looks_back else None
            if self.guidance.soft:
                self._soft = SoftCoefficients(*torch.zeros(2, rows, device=index.device))
            if self.guidance.floor:
                self.dead_ends = torch.zeros(rows, dtype=torch.bool, device=index.device)
        return self._spread

    def _mask(self, condition: Tensor, generated: Tensor, positions: int) -> Tensor | None:
        """What each position may look at: the condition, and the text up to itself."""
        if not self._looks_back or (not self._width and not self._padded):
            return None
        width = condition.shape[1]
        total = self._width or width + positions
        columns = torch.arange(total, device=condition.device)
        past = columns[None, :] <= width + generated[:, None]  # (g, total)
        real = pad(condition, (0, total - width), value=True)  # (B, total)
        return (real[:, None, :] & past[None])[:, None]

    def _live(self, tokens: Tensor, guided: int) -> Tensor:
        """Whether the text had not ended before each position."""
        ended = (tokens == self.base.eos_id).long().cumsum(dim=1) > 0  # (B, t)
        return ~pad(ended, (1, 0), value=False)[:, tokens.shape[1] + 1 - guided :]

    def _ask(self, tokens: Tensor, live: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """Progress and stop labels of the live rows' prefixes."""
        if self.prefixes is None:
            return None, None
        assert live is not None
        rows, guided = live.shape
        start, written, repeats = tokens.shape[1] + 1 - guided, tokens.tolist(), rows // len(self.conditions)
        places = live.nonzero().tolist()
        answers = self.prefixes.read(
            [self.conditions[row // repeats] for row, _ in places],
            [written[row][: start + position] for row, position in places],
        )
        progress = torch.full((rows, guided, self.prefixes.bits), -1, dtype=torch.int8)
        stops = torch.ones(rows, guided, dtype=torch.bool)
        asked = live.cpu()
        progress[asked], stops[asked] = answers
        return progress.to(self.base.device), stops.to(self.base.device)


def _last_tokens(tokens: Tensor, guided: int) -> Tensor:
    """The token before each of the last `guided` positions behind `tokens` (B, t), −1 before the first."""
    written = tokens.shape[1]
    last = (
        tokens[:, written - guided :] if guided <= written else pad(tokens, (guided - written, 0), value=-1)
    )
    return last.clone(memory_format=torch.contiguous_format)  # a view's strides would change every step


def _know(guide: Guide, conditions: Sequence[str], oracle: Oracle | None) -> Known:
    assert guide.reader is not None
    names = oracle.progress_names if guide.config.named_parts and oracle is not None else None
    return guide.know(Conditions.encode(guide.reader, conditions, names))


def _mix(guide: Guide) -> Tensor | None:
    """The base's output matrix as a low-rank head sees it."""
    if guide.config.matrix != "low_rank":
        return None
    nothing = guide.condition_mark[None]  # any feature: the matrix does not depend on it
    return guide.scores(nothing).matrix
