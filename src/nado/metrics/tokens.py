"""Tokens for metrics that compare words: one tokeniser, named in every result that used it.

CommonGen's BLEU is taken on English words as spaCy's blank English pipeline cuts them: punctuation stands
alone, "don't" is "do n't", "dog's" is "dog 's", case is kept. BLEU moves by points with the tokeniser, so
numbers made with different ones must never share a table. `tokenise_english` follows the same conventions by
rules of its own: peel punctuation off both ends of what stands between blanks, unless what is left is a
known whole; then cut inside, at hyphens and slashes between letters.
"""

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Literal, TypeAlias

from nado.errors import InputError
from nado.oracles.words import split_words

TokeniserName: TypeAlias = Literal["english", "words", "blanks"]
Ngrams: TypeAlias = Counter[tuple[str, ...]]

_QUOTES = "'\"”“`‘´’‚„»«「」『』（）〔〕【】《》〈〉〈〉⟦⟧"  # full-width brackets count with them
_MARKS = "…,:;!?¿؟¡()[]{}<>_#*&。？！，、；：～·।،۔؛٪"
_CURRENCY = "$£€¥฿₽₴₠₡₢₣₤₥₦₧₨₩₪₫₭₮₯₰₱₲₳₵₸₹₺₼₾₿"
_HYPHENS = r"(?:-{1,3}|–|—{1,2}|~)"
# Pictures and symbols (arrows, dingbats, emoji): each is a token.
_ICONS = (
    "\u00a6\u00a9\u00ae\u00b0\u0482\u2100-\u214f\u2190-\u23ff\u2400-\u27bf\u2900-\u297f"
    "\u2b00-\u2bff\u3004\u3012\u3013\u3020\U0001f000-\U0001faff"
)
_UNITS = (
    "km km² km³ m m² m³ dm dm² dm³ cm cm² cm³ mm mm² mm³ ha µm nm yd in ft kg g mg µg t lb oz m/s km/h mph "
    "hPa Pa mbar mb MB kb KB gb GB tb TB T G M K %"
)

_escape = re.escape
_UNIT = "|".join(sorted(map(_escape, _UNITS.split()), key=len, reverse=True))
_PREFIX = re.compile(
    rf"\.\.+|[{_escape(_MARKS + _QUOTES + _CURRENCY)}]|[§%=—–]|\+(?![0-9])|[{_ICONS}]|(?:US|C|A)\$"
)
_SUFFIX = re.compile(
    rf"(?:\.\.+|[{_escape(_MARKS + _QUOTES)}]|['’][sS]|[—–]|[{_ICONS}]"
    rf"|(?<=[0-9])(?:\+|[{_escape(_CURRENCY)}]|{_UNIT})"
    rf"|(?<=°[FfCcKk])\.|(?<=[^\W_A-Z]|[%²+\-{_escape(_QUOTES + _MARKS)}])\.|(?<=[A-Z][A-Z])\.)$"
)
_INFIX = re.compile(
    rf"\.\.+|…|[{_ICONS}]"
    rf"|(?<=[0-9])[+\-*^](?=[0-9\-])"
    rf"|(?<=[a-zà-ÿ{_escape(_QUOTES)}])\.(?=[A-ZÀ-Þ{_escape(_QUOTES)}])"
    rf"|(?<=[^\W\d_]),(?=[^\W\d_])"
    rf"|(?<=[^\W_]){_HYPHENS}(?=[^\W\d_])"
    rf"|(?<=[^\W_])[:<>=/](?=[^\W\d_])"
)
_URL = re.compile(
    r"(?:[a-z][a-z0-9+.-]*://\S+|(?:\S+@)?[\w-]+(?:\.[\w-]+)*\.(?:com|org|net|edu|gov|mil|info|biz|io|co|tv|me|"
    r"uk|de|fr|eu|us|ca|au|in|jp|cn|ru)(?::\d+)?(?:/\S*)?)",
    re.IGNORECASE,
)

# What keeps its full stop.
_ABBREVIATIONS = (
    "'s 're 'll 'd '' Mr. Mrs. Ms. Dr. Prof. Rev. Gen. Gov. Sen. Rep. Adm. Messrs. Mt. St. Jr. Ph.D. "
    "Inc. Ltd. Co. Corp. Bros. vs. v.s. a.m. p.m. i.e. e.g. E.g. I.e. E.G. I.E. N.V. D.C. "
    "Jan. Feb. Mar. Apr. Jun. Jul. Aug. Sep. Sept. Oct. Nov. Dec. "
    "Ala. Ariz. Ark. Calif. Colo. Conn. Del. Fla. Ga. Ia. Id. Ill. Ind. Kan. Kans. Ky. La. Mass. Mich. "
    "Minn. Miss. Mo. Mont. Neb. Nebr. Nev. Okla. Ore. Pa. Tenn. Va. Wash. Wis. "
    "ma'am Ma'am o'clock o.0 O.o 'em 'Cause 'cause 'nuff 'bout ol' Ol' lovin' Lovin' havin' Havin' "
    "doin' Doin' goin' Goin' nothin' Nothin' somethin' Somethin' nuthin' Nuthin' and/or w/o cause Cause"
)
_EMOTICONS = (
    ":) :-) (: (-: :( :-( ): )-: ;) ;-) :D :-D :P :-P :p :-p =) =( :o :O :0 :-o :-O :/ :-/ :| :-| :* :-* :3 "
    "<3 </3 xD XD :'( :') ^_^ -_- o_o O_O >.< ._. (y) :] :[ :} 8) 8-) :x :X =D =P ;D \\o/"
)
_SUBJECTS = {
    "'m": "i",
    "'re": "you we they who what when where why how there that this these those",
    "'ve": "i you we they who what when where why how there that these those could might must should would",
    "'s": "he she it who what when where why how there that this",
    "'ll": "i you he she it we they who what when where why how there that this",
    "'d": "i you he she it we they who what when where why how there that this",
}
_NEGATED = (
    "ai are ca could did does do had has have is may might must need ought sha should was were wo would dare"
)
# Contractions that are other words once their apostrophe is gone.
_WORDS = {"ill", "hell", "shell", "well", "shed", "were", "its", "whore"}
_SPLIT = {
    "cannot": ("can", "not"),
    "gonna": ("gon", "na"),
    "gotta": ("got", "ta"),
    "c'mon": ("c'm", "on"),
    "y'all": ("y'", "all"),
    "yall": ("y", "all"),
}


def tokenise_english(text: str) -> list[str]:
    """English words and punctuation, case kept: what CommonGen's BLEU counts."""
    tokens: list[str] = []
    for chunk in text.split():
        tokens.extend(_cut_chunk(chunk))
    return tokens


def tokeniser(name: TokeniserName) -> Callable[[str], list[str]]:
    """The tokeniser of that name: "english", "words" (lower case, no punctuation) or "blanks"."""
    if name not in _TOKENISERS:
        raise InputError(
            f"a tokeniser out of {', '.join(_TOKENISERS)}",
            f"{name!r}",
            'Use "english" for CommonGen, "blanks" for texts that are tokenised already.',
        )
    return _TOKENISERS[name]


def count_ngrams(tokens: Sequence[str], order: int) -> Ngrams:
    """How often each run of `order` tokens occurs."""
    return Counter(zip(*(itertools.islice(tokens, start, None) for start in range(order)), strict=False))


def _cut_chunk(chunk: str) -> list[str]:
    """The tokens of what stands between two blanks."""
    heads: list[str] = []
    tails: list[str] = []
    while (known := _known(chunk)) is None:
        prefix, suffix = _find_ends(chunk)
        if not prefix and not suffix:
            known = tuple(_cut_inside(chunk))
            break
        # ":)." ends with a known whole and a full stop: no colon is peeled off it.
        if prefix and not (suffix and _known(chunk[: -len(suffix)])):
            heads.append(prefix)
            chunk = chunk[len(prefix) :]
            if _known(chunk) is not None:
                continue
        if suffix:
            tails.append(suffix)
            chunk = chunk[: -len(suffix)]
    return [*heads, *known, *reversed(tails)]


def _find_ends(chunk: str) -> tuple[str, str]:
    """What to peel off at the front and, from what is left then, at the back."""
    prefix = _PREFIX.match(chunk)
    start = prefix.end() if prefix is not None else 0
    suffix = _SUFFIX.search(chunk, start)
    return chunk[:start], suffix.group() if suffix is not None else ""


def _cut_inside(chunk: str) -> Iterator[str]:
    """Pieces and what separates them; an address stays whole."""
    if _URL.fullmatch(chunk):
        yield chunk
        return
    place = 0
    for match in _INFIX.finditer(chunk):
        if match.start() > place:
            yield chunk[place : match.start()]
        yield match.group()
        place = match.end()
    if place < len(chunk):
        yield chunk[place:]


def _known(chunk: str) -> tuple[str, ...] | None:
    """The tokens of a whole that punctuation rules would cut wrongly, None for anything else."""
    if not chunk:
        return ()
    if len(chunk) == 2 and chunk[1] == "." and chunk[0].isalpha() and chunk[0].islower():
        return (chunk,)
    time = re.fullmatch(r"(1[0-2]|[1-9])([ap]m|[ap]\.m\.)", chunk)
    if time is not None:
        return time.groups()
    lengths = _wholes().get(chunk)
    if lengths is None:
        return None
    cuts = list(itertools.accumulate(lengths, initial=0))
    return tuple(chunk[start:end] for start, end in itertools.pairwise(cuts))


@cache
def _wholes() -> dict[str, tuple[int, ...]]:
    """Known wholes → the lengths of their tokens, in lower case, capitalised, and with curly apostrophes."""
    parts: list[tuple[str, ...]] = [*_contractions(), *_SPLIT.values()]
    parts += [tuple(piece.capitalize() if i == 0 else piece for i, piece in enumerate(p)) for p in parts]
    parts += [(whole,) for whole in f"{_ABBREVIATIONS} {_EMOTICONS}".split()]
    parts += [tuple(piece.replace("'", "’") for piece in p) for p in parts]
    return {"".join(p): tuple(map(len, p)) for p in parts}


def _contractions() -> Iterator[tuple[str, ...]]:
    """he'll, he'll've, don't, don't've …, and the same without apostrophes (dont) where that is no word."""
    pairs = [(subject, clitic) for clitic, subjects in _SUBJECTS.items() for subject in subjects.split()]
    full: list[tuple[str, ...]] = list(pairs)
    full += [(subject, clitic, "'ve") for subject, clitic in pairs if clitic in ("'ll", "'d")]
    for verb in _NEGATED.split():
        full += [(verb, "n't"), (verb, "n't", "'ve")]
    for parts in full:
        yield parts
        bare = tuple(piece.replace("'", "") for piece in parts)
        if "".join(bare) not in _WORDS:
            yield bare


_TOKENISERS: dict[str, Callable[[str], list[str]]] = {
    "english": tokenise_english,
    "words": split_words,
    "blanks": str.split,
}
