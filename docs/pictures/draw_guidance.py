"""The picture of the README: a sentence of the base and one of the guided model, with R under every token.

    python docs/pictures/draw_guidance.py "cook, food, kitchen, pan" --output docs/pictures/guidance.svg

Nothing is made up: both sentences are sampled with one seed from the embedded model, exact end off, and the
curve is what the embedded guide for keywords predicts after each token. The seed is the first at which the
base misses a keyword; the guided sentence is whatever that seed gives.
"""

import argparse
import math
from collections.abc import Sequence
from html import escape
from itertools import count
from pathlib import Path

from nado.guidance import Guidance
from nado.prompts import Prompt
from nado.report.traces import cut_text
from nado.study.guides import GuideInUse, use_guide
from nado.study.materials import fill
from nado.study.sections import GenerateConfig
from nado.study.systems import System, Written, write_texts
from nado.tiny import locate_guide

LETTER, SIZE = 9.0, 15  # a letter's width, the text's size
LEFT, HEIGHT = 24, 64  # the margin, the curve's height
BASE, GUIDED, GREY = "#b35806", "#2166ac", "#767676"  # told apart by every kind of eye, on white and on black


def main(arguments: Sequence[str] | None = None) -> None:
    """Sample, trace, draw."""
    options = _parse(arguments)
    used = use_guide(locate_guide())
    prompt = fill([Prompt(options.keywords, options.keywords)], used.template)[0]
    systems = {
        "base": System("base", used.base, None, Guidance(), used.oracle),
        "guided": System("guided", used.base, used.guide, Guidance(), used.oracle),
    }
    for seed in count():
        config = GenerateConfig(count=1, seed=seed)
        texts = {name: write_texts(system, [prompt], config, None)[0] for name, system in systems.items()}
        if not texts["base"].satisfied:
            break
    options.output.write_text(draw_picture(options.keywords, texts, used), encoding="utf-8")
    print(f"seed {seed}")
    for name, text in texts.items():
        print(f"{name}: {text.text} ({'satisfied' if text.satisfied else 'not satisfied'})")


def draw_picture(keywords: str, texts: dict[str, Written], used: GuideInUse) -> str:
    """The SVG: a block for each text."""
    guided = System("guided", used.base, used.guide, Guidance(), used.oracle).sampler()
    blocks, width, top = [], 0.0, 52.0
    for name, text in texts.items():
        trace = guided.trace_rows([text.prompt], [text.tokens], [text.condition])
        chances = [trace.log_s[0, 0].exp().item(), *trace.log_factor[0, : len(text.tokens)].exp().tolist()]
        pieces = cut_text(used.base.decode, text.tokens)
        block, right = _draw_text(name, pieces, chances, bool(text.satisfied), top)
        blocks.append(block)
        width, top = max(width, right), top + HEIGHT + 84
    title = f"keywords: {keywords}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width + LEFT:.0f} {top - 20:.0f}" role="img" '
        f'font-family="ui-monospace, Menlo, Consolas, monospace" font-size="{SIZE}">\n'
        f"<title>A sentence of the base and one of the guided model about {escape(keywords)}: R under it, "
        "the predicted chance that the finished sentence has all keywords</title>\n"
        f'<rect width="100%" height="100%" fill="#ffffff"/>\n'
        f'<text x="{LEFT}" y="28" fill="#1a1a1a" font-weight="bold">{escape(title)}</text>\n'
        + "\n".join(blocks)
        + "\n</svg>\n"
    )


def _draw_text(
    name: str, pieces: Sequence[str], chances: Sequence[float], satisfied: bool, top: float
) -> tuple[str, float]:
    colour = GUIDED if name == "guided" else BASE
    label = f"{name}  {'✓ has all of them' if satisfied else '✗ does not have them all'}"
    lines = [f'<text x="{LEFT}" y="{top + 12}" fill="{colour}">{label}</text>']
    base_line = top + 40 + HEIGHT + 8
    x, points = float(LEFT), [(float(LEFT), chances[0])]
    for piece, chance in zip(pieces, chances[1:], strict=True):
        shown = piece if piece.strip() else "■"
        lines.append(
            f'<text x="{x:.1f}" y="{top + 36}" fill="#1a1a1a" xml:space="preserve">{escape(shown)}</text>'
        )
        x += LETTER * len(shown)
        points.append((x, chance))
    for level in (0.0, 1.0):
        y = base_line - level * HEIGHT
        lines.append(f'<line x1="{LEFT}" x2="{x:.1f}" y1="{y}" y2="{y}" stroke="{GREY}" stroke-width="0.6"/>')
        lines.append(f'<text x="4" y="{y + 4}" fill="{GREY}" font-size="11">{level:.0f}</text>')
    path = " ".join(f"{px:.1f},{base_line - _clip(chance) * HEIGHT:.1f}" for px, chance in points)
    lines.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2.2"/>')
    lines += [
        f'<circle cx="{px:.1f}" cy="{base_line - _clip(chance) * HEIGHT:.1f}" r="2.8" fill="{colour}"/>'
        for px, chance in points
    ]
    return "\n".join(lines), x


def _clip(chance: float) -> float:
    return 0.0 if math.isnan(chance) else min(max(chance, 0.0), 1.0)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("keywords")
    parser.add_argument("--output", type=Path, required=True)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
