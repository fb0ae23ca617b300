"""The ``sdgp`` command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Deep Gaussian processes with structured posteriors."
)


@app.callback()
def commands() -> None:
    """Deep Gaussian processes with structured posteriors."""


@app.command()
def demo(
    folder: Annotated[Path, typer.Option(help="Where the picture goes.")] = Path("demo-output"),
    n_inducing: Annotated[int, typer.Option(help="Inducing points of each layer.")] = 32,
    n_steps: Annotated[int, typer.Option(help="Training steps of each model.")] = 500,
) -> None:
    """Fit a sparse GP, a mean-field and a structured deep GP to embedded data, and test them away from it."""
    from structured_dgp.demo import run

    typer.echo("Concrete strength: trained on one half of the input space, tested on the other.")
    picture = run(folder, n_inducing, n_steps, typer.echo)
    typer.echo(f"Picture: {picture}")


def main() -> None:
    """Entry point of the command."""
    app()
