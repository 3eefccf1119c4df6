"""How new rows join a running batch: a few at once, in shapes that depend on each row's own request alone.

Reading prompts one by one would cost as much as writing the texts. Read together they must not be padded to
one another's length, nor may their number change anything: products of other shapes round differently. So
sizes are rounded up to multiples of a few tokens, rows are read together whose prompt and condition then have
the same sizes, and always as many of them; where there are fewer, some are read again.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from nado.guide import round_up
from nado.huggingface import CausalModel
from nado.serving.voices import ROUNDING, Member

Shape: TypeAlias = tuple[int, ...]

ROWS, _TOKENS = 8, 256  # prompts read together, as long as they have no more tokens than this in all


def measure(
    base: CausalModel, members: Sequence[Member], prompt: str, condition: str, most_tokens: int
) -> Shape:
    """The sizes that tensors have when this prompt and condition are read; the first is the prompt's.

    Prompts have at most `most_tokens`, for which there is room; rounding up must not ask for more.
    """
    sizes = [min(round_up(len(base.encode([prompt])[0]), ROUNDING), most_tokens)]
    for member in members:
        reader = member.guide.reader
        assert reader is not None
        sizes.append(round_up(len(reader.encode_conditions([condition])[0]), ROUNDING))
        if member.guide.config.named_parts and member.told is not None:
            names = list(member.told.progress_names(condition))
            lengths = [len(row) for row in reader.encode_conditions(names)] if names else [0]
            sizes.append(round_up(max(lengths), ROUNDING))
    return tuple(sizes)


def rows_together(shape: Shape, batch_size: int) -> int:
    """How many prompts of this shape are read in one pass."""
    rows = ROWS
    while rows > 1 and (rows * shape[0] > _TOKENS or rows > batch_size):
        rows //= 2
    return rows


def group(shapes: Iterable[Shape], batch_size: int) -> list[list[int]]:
    """Which of the rows to come are read together: places in the given order."""
    alike: dict[Shape, list[int]] = defaultdict(list)
    for place, shape in enumerate(shapes):
        alike[shape].append(place)
    return [
        places[first : first + rows]
        for shape, places in alike.items()
        for rows in [rows_together(shape, batch_size)]
        for first in range(0, len(places), rows)
    ]


def read_ahead(base: CausalModel, prompts: Sequence[str], rows: int, width: int) -> None:
    """Let the base read prompts in a pass of `rows` rows of `width` tokens; the next refill finds them."""
    distinct = list(dict.fromkeys(prompts))
    tokens = base.encode(distinct)
    filled = tokens + [tokens[-1]] * (rows - len(tokens))
    # Not `prepare`, which reads each different prompt once, however many there are.
    base._bank = base._read_rows(filled, {prompt: at for at, prompt in enumerate(distinct)}, width)
