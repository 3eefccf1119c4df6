"""What commands print: data on stdout, everything else on stderr; no colour where there is no terminal."""

import json
import sys
from collections.abc import Sequence
from typing import Any

import typer


def say(text: str) -> None:
    """A line of progress, on stderr."""
    typer.echo(text, err=True)


def print_json(value: Any) -> None:
    """A JSON document, on stdout."""
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))


def print_line(value: Any) -> None:
    """One line of JSON, on stdout."""
    typer.echo(json.dumps(value, ensure_ascii=False))


def print_table(heads: Sequence[str], rows: Sequence[Sequence[str]], title: str | None = None) -> None:
    """A table on stdout; as wide as it needs where stdout is no terminal."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=title and escape(title), title_justify="left")
    for head in heads:
        table.add_column(head, overflow="fold")
    for row in rows:
        table.add_row(*(escape(cell) for cell in row))
    width = None if sys.stdout.isatty() else 200
    Console(width=width, soft_wrap=False).print(table)


def quieten() -> None:
    """Keep transformers' own progress bars off stderr: they say nothing that ours do not."""
    from transformers.utils import logging

    logging.disable_progress_bar()
