"""Texts with every token marked by how much the guide moved it, and R running underneath."""

import math

from markupsafe import Markup, escape

from nado.report.content import ExampleText, TokenTrace
from nado.report.numbers import write_chance, write_factor
from nado.report.svg import tag

LEVELS = (1.25, 2.0, 5.0, 20.0)  # a token this many times likelier, or less likely, is one level up
SHOWN_TOKENS = 200  # of a text; the rest is in report.json
SHOWN_CHARACTERS = 60  # of a token
SHOWN_TEXT = 4000  # of a text without tokens


def moved(token: TokenTrace) -> float | None:
    """log q − log p: −inf where the guide forbids the token, None where the base could not write it."""
    if token.log_p is None:
        return None
    return -math.inf if token.log_q is None else token.log_q - token.log_p


def level(token: TokenTrace) -> int:
    """How far a token was moved: 1 to 4 raised, −1 to −4 lowered, 0 left about where it was."""
    difference = moved(token)
    if difference is None:
        return 0
    steps = sum(abs(difference) >= math.log(edge) for edge in LEVELS)
    return steps if difference > 0 else -steps


def describe_token(token: TokenTrace, *, has_r: bool) -> str:
    """All that is known of a token, in one line."""
    name = "end of text" if token.ends else _quote(token.text)
    step = level(token)
    verb = "raised" if step > 0 else "lowered" if step < 0 else "hardly moved"
    chances = f"base {write_chance(token.log_p)} → guided {write_chance(token.log_q)}"
    parts = [f"{name} {verb} {write_factor(moved(token))}: {chances}"]
    if has_r:
        parts.append(f"R {write_chance(token.log_r)}")
    if token.log_p_base_choice is not None:
        parts.append(_alternative(token))
    return " · ".join(parts)


def _alternative(token: TokenTrace) -> str:
    if token.log_p is not None and token.log_p >= (token.log_p_base_choice or 0.0):
        return "the base's own first choice"
    return f"base alone: {_quote(token.base_choice)} {write_chance(token.log_p_base_choice)}"


def _quote(text: str) -> str:
    """A token by its letters, or in words where it has none."""
    if not text:
        return "(no letters)"
    return f"“{shorten(text.strip())}”" if text.strip() else f"(blank {text[:20]!r})"


def shorten(text: str, most: int = SHOWN_CHARACTERS) -> str:
    """A text of at most `most` characters, with how many were left out."""
    return text if len(text) <= most else f"{text[:most]}… ({len(text) - most:,} more characters)"


def show_text(text: ExampleText) -> Markup:
    """A text for the page: marked tokens, or the bare text where there are none."""
    if not text.tokens:
        return show_characters(shorten(text.text, SHOWN_TEXT))
    before = text.log_r_start if text.log_r_start is not None else text.tokens[0].log_r
    parts = []
    for token in text.tokens[:SHOWN_TOKENS]:
        parts.append(_show_token(token, before, has_r=text.has_r))
        before = token.log_r
    left = len(text.tokens) - SHOWN_TOKENS
    if left > 0:
        parts.append(tag("span", escape(f" … {left:,} more tokens in report.json"), class_="more"))
    return Markup("").join(parts)


def _show_token(token: TokenTrace, before: float | None, *, has_r: bool) -> Markup:
    """A token as a marked span; blanks before it stand outside, so that no line ends within it."""
    blanks, text = _split_blanks(token.text)
    step = level(token)
    classes = ["t", *([f"u{step}"] if step > 0 else [f"d{-step}"] if step < 0 else [])]
    if blanks.endswith(" ") or token.ends:
        classes.append("b")
    style = None
    if has_r:
        classes.append("r")
        style = f"--a:{_height(before)};--b:{_height(token.log_r)}"
    shown = show_characters(shorten(text)) + (tag("b", "end", class_="end") if token.ends else "")
    about = _visible(describe_token(token, has_r=has_r))
    marked = tag("span", shown or "·", class_=" ".join(classes), style=style, title=about)
    return show_characters(shorten(blanks)) + (" " if token.ends and not text else "") + marked


def _split_blanks(text: str) -> tuple[str, str]:
    """Blanks at the start of a piece, and the rest; a piece of nothing but blanks is shown as it is."""
    rest = text.lstrip()
    return (text[: len(text) - len(rest)], rest) if rest else ("", text)


def _height(log_r: float | None) -> str:
    height = 0.0 if log_r is None else min(1.0, math.exp(log_r))
    return f"{height:.3f}".rstrip("0").rstrip(".")


def show_characters(text: str) -> Markup:
    """Escaped text in which line ends are seen and control characters do nothing."""
    lines = [escape(_visible(line)) for line in text.replace("\r\n", "\n").split("\n")]
    return (tag("i", "↵", class_="nl") + Markup("\n")).join(lines)


def _visible(text: str) -> str:
    """Control characters as their pictures; those that turn the direction of writing as a mark."""
    return "".join(_picture(character) for character in text)


def _picture(character: str) -> str:
    code = ord(character)
    if code < 0x20:
        return chr(0x2400 + code)
    if code == 0x7F:
        return "\u2421"
    # Overrides could make the words around them read backwards; surrogates cannot be written as UTF-8.
    if 0x80 <= code < 0xA0 or 0x202A <= code <= 0x202E or 0x2066 <= code <= 0x2069 or 0xD800 <= code < 0xE000:
        return "\ufffd"
    return character
