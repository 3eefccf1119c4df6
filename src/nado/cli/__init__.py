"""The command line: one short file a verb, data on stdout, progress and errors on stderr."""

import sys

import typer
from rich.console import Console
from rich.markup import escape

from nado.cli.audit import audit_command
from nado.errors import NadoError

app = typer.Typer(
    name="nado",
    help="Steer language models by any yes/no question about the finished text.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from nado import __version__

        typer.echo(f"nado {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
    ),
) -> None:
    """Options that belong to no single verb."""


app.command("audit")(audit_command)


def main() -> None:
    """Run the command line; exit codes: 0 done, 1 an error on one line, 2 usage, 130 interrupted."""
    try:
        app()
    except NadoError as error:
        Console(stderr=True, soft_wrap=True).print(f"[red]error:[/red] {escape(str(error))}", highlight=False)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
