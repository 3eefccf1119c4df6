"""`nado audit`: what an oracle really answers to, before anything is trained on it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from nado.errors import InputError

if TYPE_CHECKING:
    from nado.oracles import Audit

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red", "skipped": "dim"}


def audit_command(
    oracle: Annotated[
        str, typer.Option(help="file.py:name, a shipped name, or a TOML table {name = …, arguments}.")
    ],
    texts: Annotated[
        Path,
        typer.Option(
            help="A .txt file (a text a line), a .jsonl file (fields text and condition) or a samples folder."
        ),
    ],
    conditions: Annotated[
        Path | None, typer.Option(help="A text file with the condition of each text, a line each.")
    ] = None,
    condition: Annotated[str | None, typer.Option(help="One condition for every text.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Ask about at most this many texts.")] = 2000,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    strict: Annotated[bool, typer.Option(help="Exit with 1 when anything failed or was warned of.")] = False,
) -> None:
    """Ask an oracle about a sample of texts and look for answers that something trivial explains.

    Exit code 0 when the audit was done, whatever it found; with --strict 1 unless all is clean.
    """
    from nado.oracles import audit, load_oracle

    loaded = load_oracle(oracle)
    read_texts, read_conditions = _read(texts, conditions, condition)
    Console(stderr=True).print(
        f"asking {loaded.name} about {min(limit, len(read_texts))} texts", markup=False
    )
    found = audit(loaded, read_texts, read_conditions, limit=limit)
    if as_json:
        typer.echo(json.dumps(found.to_json(), indent=2, ensure_ascii=False))
    else:
        _print_table(found)
    if strict and not found.clean:
        raise typer.Exit(1)


def _print_table(found: Audit) -> None:
    table = Table(title=f"{found.oracle}: {found.texts} texts", title_justify="left")
    for column in ("check", "status", "value", "message"):
        table.add_column(column, overflow="fold")
    for finding in found.findings:
        colour = _COLOURS[finding.status]
        table.add_row(
            finding.check, f"[{colour}]{finding.status}[/]", escape(finding.value), escape(finding.message)
        )
    Console().print(table)


def _read(texts: Path, conditions: Path | None, condition: str | None) -> tuple[list[str], list[str]]:
    if conditions is not None and condition is not None:
        raise InputError("--conditions or --condition", "both", "Leave one of them out.")
    if texts.is_dir():
        from nado.samples import read_samples

        samples = read_samples(texts)
        rows = list(zip(samples.strings("text"), samples.strings("condition"), strict=True))
    else:
        rows = list(_read_file(texts))
    if condition is not None:
        return [text for text, _ in rows], [condition] * len(rows)
    if conditions is None:
        return [text for text, _ in rows], [own for _, own in rows]
    lines = _read_lines(conditions)
    if len(lines) != len(rows):
        raise InputError(
            f"one line in {conditions} for each text",
            f"{len(lines)} lines and {len(rows)} texts",
            "Line them up.",
        )
    return [text for text, _ in rows], lines


def _read_file(path: Path) -> Iterator[tuple[str, str]]:
    for number, line in enumerate(_read_lines(path), start=1):
        if path.suffix != ".jsonl":
            yield line, ""
        elif line.strip():
            record = _parse(line)
            text, condition = record.get("text"), record.get("condition", "")
            if not isinstance(text, str) or not isinstance(condition, str):
                raise InputError(
                    f"a JSON object with a string text in {path}, line {number}",
                    f"{line.strip()[:60]!r}",
                    'Write {"text": "…", "condition": "…"}.',
                )
            yield text, condition


def _parse(line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}


def _read_lines(path: Path) -> list[str]:
    try:
        # Not splitlines(): that also splits at characters which may stand inside a text.
        return path.read_text(encoding="utf-8").rstrip("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"a readable UTF-8 file {path}", f"the error: {error}", "Give a .txt or .jsonl file."
        ) from error
