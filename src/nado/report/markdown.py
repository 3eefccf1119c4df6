"""The report as Markdown: the page's tables and texts, for a README, a pull request or a terminal."""

import re
from collections.abc import Sequence

from nado.report.content import Example, Examples, ExampleText, Report
from nado.report.highlights import describe_token, moved, shorten
from nado.report.sections import Section, list_sections
from nado.report.tables import Cell, Table

_SPECIAL = re.compile(r"([\\`*_{}\[\]#|~$])")
_BLOCK = re.compile(r"^(\d*)([.)+=-])(?=\s|$|[=-])")  # what would begin a list, a rule or a heading
_SHOWN_TEXT = 600
_MOST_MOVED = 3


def render_markdown(report: Report) -> str:
    """The whole report."""
    blocks = [f"# {escape_markdown(report.title)}"]
    if report.summary:
        blocks.append(escape_markdown(report.summary))
    if report.facts:
        blocks.append("\n".join(f"- {_fact(each.name, each.value)}" for each in report.facts))
    sections, missing = list_sections(report)
    for section in sections:
        blocks += _section(section)
    if report.examples is not None and report.examples.examples:
        blocks += _examples(report.examples)
    if report.notes:
        blocks += ["## Notes", "\n".join(f"- {escape_markdown(note)}" for note in report.notes)]
    if missing:
        blocks.append(f"Not measured: {', '.join(missing)}.")
    if report.versions:
        made = ", ".join(
            f"{escape_markdown(each.name)} {escape_markdown(each.value)}" for each in report.versions
        )
        blocks.append(f"Made with {made}.")
    return "\n\n".join(blocks) + "\n"


def escape_markdown(text: str) -> str:
    """Text that Markdown shows as it is, on one line, and that no HTML in it survives."""
    flat = " ".join(text.replace("\r\n", "\n").replace("\n", " ↵ ").split())
    escaped = _SPECIAL.sub(r"\\\1", flat.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;"))
    visible = "".join(each if each.isprintable() else "\ufffd" for each in escaped)
    return _BLOCK.sub(r"\1\\\2", visible)


def _fact(name: str, value: str) -> str:
    return f"{escape_markdown(name)}: {escape_markdown(value)}"


def _section(section: Section) -> list[str]:
    blocks = [f"## {section.title}"]
    if section.lead:
        blocks.append(escape_markdown(section.lead))
    for table in section.tables:
        blocks += _table(table)
    for figure in section.figures:
        if figure.table is not None or figure.note:
            blocks.append(f"### {escape_markdown(figure.title)}")
        if figure.note:
            blocks.append(escape_markdown(figure.note))
        if figure.table is not None:
            blocks += _table(figure.table)
    for table in section.folded:
        blocks += [f"### {table.title}", *_table(table)]
    return blocks


def _table(table: Table) -> list[str]:
    if not table.rows:
        return []
    numeric = [all(row[place].numeric for row in table.rows) for place in range(len(table.heads))]
    rule = "|".join("---:" if right else "---" for right in numeric)
    lines = [_row(table.heads), f"|{rule}|", *(_row(row) for row in table.rows)]
    caveats = "\n".join(f"- {escape_markdown(each)}" for each in table.caveats)
    return ["\n".join(lines), *([caveats] if caveats else [])]


def _row(cells: Sequence[Cell]) -> str:
    return "| " + " | ".join(_cell(cell) for cell in cells) + " |"


def _cell(cell: Cell) -> str:
    if cell.numeric:  # our own digits and brackets
        return " ".join(
            part for part in (cell.text, cell.detail, f"({cell.badge})" if cell.badge else "") if part
        )
    detail = f"({cell.detail})" if cell.detail else ""
    return " ".join(escape_markdown(part) for part in (cell.text, detail) if part)


def _examples(examples: Examples) -> list[str]:
    blocks = ["## Texts", f"Not picked by hand: {escape_markdown(examples.how)}."]
    for number, example in enumerate(examples.examples, start=1):
        blocks += [f"### {number}. {_head(example)}", *(_text(text) for text in example.texts)]
    return blocks


def _head(example: Example) -> str:
    prompt = escape_markdown(shorten(example.prompt, 200)) or "(empty prompt)"
    same = example.condition == example.prompt
    return prompt if same else f"{prompt} · {escape_markdown(shorten(example.condition, 200))}"


def _text(text: ExampleText) -> str:
    verdict = {True: "satisfied", False: "not satisfied", None: "not judged"}[text.satisfied]
    finished = "" if text.finished else ", not finished"
    lines = [
        f"**{escape_markdown(text.system)}** ({verdict}{finished})",
        f"> {escape_markdown(shorten(text.text, _SHOWN_TEXT)) or '(empty)'}",
    ]
    most = sorted(text.tokens, key=lambda token: -abs(moved(token) or 0.0))[:_MOST_MOVED]
    if most:
        lines.append("\n".join(f"- {escape_markdown(describe_token(t, has_r=text.has_r))}" for t in most))
    return "\n\n".join(lines)
