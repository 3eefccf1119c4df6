"""The example that `python -m nado.exact` prints: a model with two letters, every number by enumeration."""

from collections.abc import Sequence

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from nado.decomposition import SoftCoefficients, log_one_minus, soft_coefficients, soft_log_r
from nado.exact import (
    TabularModel,
    exact_log_q,
    exact_log_r,
    exact_log_r_start,
    expectation,
    guided_model,
    kl_divergence,
    prefix_texts,
    satisfied_outcomes,
)

QUESTION = "does it contain ba?"
TARGET_RATE = 0.8


def print_example(console: Console | None = None) -> None:
    """Print p, R, q* and a soft rate of one tiny model."""
    console = console or Console()
    model = TabularModel.from_function(_next_token, length_limit=4)
    log_r = exact_log_r(model, _contains_ba, "")
    log_q = guided_model(model, {("", ""): log_r}).outcomes("").log_p
    soft = guided_model(model, {("", ""): soft_log_r(log_r, _coefficients(model))}).outcomes("").log_p
    console.print(
        "\n[bold]nado, small enough to enumerate[/bold]\n"
        "A language model of two letters and an end mark ∎, at most 4 tokens long, and\n"
        f"an oracle, any yes/no question about a finished text: [bold]{QUESTION}[/bold]\n"
    )
    console.print(_step_table(model, log_r))
    console.print(_text_table(model, log_q, soft))
    _print_summary(console, model, log_q, soft)


def _next_token(prompt: str, prefix: str) -> list[float]:
    """A base that likes to repeat itself and to stop."""
    if prefix.endswith("b"):
        return [1, 5, 4]
    return [5, 2, 3]


def _contains_ba(conditions: Sequence[str], texts: Sequence[str]) -> list[bool]:
    return ["ba" in text for text in texts]


def _coefficients(model: TabularModel) -> SoftCoefficients:
    log_r_start = exact_log_r_start(model, _contains_ba, "")
    return soft_coefficients(log_r_start, log_one_minus(log_r_start), TARGET_RATE)


def _step_table(model: TabularModel, log_r: Tensor) -> Table:
    """p, R and q* of the next token after each of the first prefixes."""
    table = Table(title="The next token: q* = p · R, normalised", title_style="bold", title_justify="left")
    table.add_column("prefix")
    for name, style in (("p", "white"), ("R", "cyan"), ("q*", "green")):
        for token in "ab∎":
            table.add_column(f"{name}({token})", justify="right", style=style)
    p = model.table("").exp()
    q = guided_model(model, {("", ""): log_r}).table("").exp()
    for number, text in enumerate(prefix_texts(3, 2)):
        values = torch.cat([p[number], log_r[number].exp(), q[number]])
        cells = [f"{value:.2f}" for value in values.tolist()]
        if not bool(log_r[number].exp().any()):
            cells[-3:] = ["–"] * 3  # nothing can save this prefix: q* never gets here
        table.add_row(text or "·", *cells)
    return table


def _text_table(model: TabularModel, log_q: Tensor, soft: Tensor) -> Table:
    """The likeliest texts under p and under q*."""
    table = Table(title="Whole texts (the likeliest)", title_style="bold", title_justify="left")
    for heading in ("text", "C", "p", f"q at r = {TARGET_RATE}", "q*", "p·C / R(x)"):
        table.add_column(heading, justify="left" if heading == "text" else "right")
    outcomes = model.outcomes("")
    satisfied = satisfied_outcomes(model, _contains_ba, "")
    definition = exact_log_q(model, _contains_ba, "").exp()
    order = (outcomes.log_p.exp() + 2 * log_q.exp()).argsort(descending=True)[:10]
    for row in order.tolist():
        text = outcomes.texts[row] + ("∎" if outcomes.ended[row] else " (cut)")
        mark = "[green]yes[/green]" if satisfied[row] else "[red]no[/red]"
        shares = [values[row] for values in (outcomes.log_p.exp(), soft.exp(), log_q.exp(), definition)]
        table.add_row(text, mark, *[f"{float(share):.4f}" for share in shares])
    return table


def _print_summary(console: Console, model: TabularModel, log_q: Tensor, soft: Tensor) -> None:
    log_p = model.outcomes("").log_p
    satisfied = satisfied_outcomes(model, _contains_ba, "").double()
    definition = exact_log_q(model, _contains_ba, "")
    error = (log_q.exp() - definition.exp()).abs().max()
    rows = [
        ("satisfied under p, R(x)", expectation(log_p, satisfied)),
        (f"satisfied at target rate {TARGET_RATE}", expectation(soft, satisfied)),
        ("satisfied under q*", expectation(log_q, satisfied)),
        ("KL(q* ‖ p) = −log R(x)", kl_divergence(definition, log_p)),
    ]
    for name, value in rows:
        console.print(f"{name:<34} [bold]{float(value):.6f}[/bold]", highlight=False)
    console.print(
        f"{'largest |q* − p·C / R(x)|':<34} [bold]{float(error):.1e}[/bold] over {len(log_q)} texts\n",
        highlight=False,
    )
