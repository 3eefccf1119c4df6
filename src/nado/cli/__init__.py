"""The command line: one short file a verb, data on stdout, progress and errors on stderr."""

import sys
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup

from nado.errors import NadoError

# What each verb does; its module, nado.cli.<verb>, is imported when the verb is used.
VERBS = {
    "draw": "Draw texts from a base model into a folder of samples.",
    "label": "Ask an oracle about samples, or about texts on stdin.",
    "train": "Train a guide on labelled samples.",
    "generate": "Write texts that a guide leads towards what its oracle asks for.",
    "dial": "Measure how often texts of several strengths satisfy, so that any rate can be asked for.",
    "evaluate": "Measure what a guide does to its base: satisfaction, fluency, cost.",
    "serve": "Serve guided texts over HTTP to OpenAI's clients, with a page at / to try them out.",
    "run": "Run a study: draw, label, train, generate and evaluate from one TOML file.",
    "compare": "Compare a study's guide with other methods on the same prompts, seeds and budget.",
    "check": "Find every mistake in a study file, and estimate what it will take.",
    "report": "Write what a study measured as one page.",
    "audit": "Ask an oracle about a sample of texts and look for answers that something trivial explains.",
}


class Verbs(TyperGroup):
    """Verbs that are listed by name, and imported only when one of them is used."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The verb's own command in place of the one that is listed."""
        name, command, rest = super().resolve_command(ctx, args)
        return name, command if name is None else load_verb(name), rest


app = typer.Typer(
    name="nado",
    cls=Verbs,
    help="Steer language models by any yes/no question about the finished text.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)


def load_verb(name: str) -> Any:
    """A verb's command, from its module."""
    single = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
    single.command(name)(getattr(import_module(f"nado.cli.{name}"), f"{name}_command"))
    return typer.main.get_command(single)


def _listed() -> None:
    """Stands for a verb in the list of verbs."""


for _verb, _text in VERBS.items():
    app.command(_verb, help=_text)(_listed)


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


def main() -> None:
    """Run the command line; exit codes: 0 done, 1 an error on one line, 2 usage, 130 interrupted."""
    try:
        app()
    except NadoError as error:
        _fail(str(error))
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        if type(error).__name__ != "OutOfMemoryError":  # torch's, which is not imported here
            raise
        _fail(f"expected enough GPU memory; found {_first_line(error)} Lower batch_size or length_limit.")


def _fail(text: str) -> None:
    from rich.console import Console
    from rich.markup import escape

    one_line = " ".join(text.split("\n"))
    Console(stderr=True, soft_wrap=True).print(f"[red]error:[/red] {escape(one_line)}", highlight=False)
    sys.exit(1)


def _first_line(error: Exception) -> str:
    return str(error).split(". ")[0] + "."
