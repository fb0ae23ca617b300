"""What the commands share: how they speak to people and to machines."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from structured_dgp.exceptions import StructuredDGPError, StructuredDGPWarning


@contextmanager
def sentences() -> Iterator[None]:
    """Errors and warnings as one line on standard error; exit code 1 after an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("default", StructuredDGPWarning)
        original = warnings.showwarning

        def show(message: Any, category: type[Warning], *rest: Any, **named: Any) -> None:
            if issubclass(category, StructuredDGPWarning):
                typer.secho(f"warning: {message}", err=True, fg="yellow")
            else:
                original(message, category, *rest, **named)

        warnings.showwarning = show
        try:
            yield
        except (StructuredDGPError, OSError) as error:
            typer.secho(f"error: {error}", err=True, fg="red")
            raise typer.Exit(1) from error
        finally:
            warnings.showwarning = original


def tell(facts: dict[str, Any], as_json: bool) -> None:
    """Facts as JSON for machines, as a table for people."""
    if as_json:
        typer.echo(json.dumps(_without_nan(facts)))
        return
    table = RichTable(show_header=False, box=None, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _flat(facts):
        table.add_row(Text(name), Text(_text(value)))
    Console().print(table)


def _flat(facts: dict[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Facts inside of facts, with both names."""
    for name, value in facts.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{before}{name} ")
        else:
            yield before + name.replace("_", " "), value


def _without_nan(value: Any) -> Any:
    """The same with None for numbers that JSON does not have."""
    if isinstance(value, dict):
        return {name: _without_nan(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_without_nan(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return ", ".join(map(_text, value))
    return "-" if value is None else str(value)
