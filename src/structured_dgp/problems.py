"""A table split into inputs and targets, ready for an estimator."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from structured_dgp.exceptions import InputError, StructuredDGPWarning
from structured_dgp.tables import (
    as_matrix,
    as_numbers,
    first_word,
    index_columns,
    is_text,
    looks_numeric,
    read_table,
    refuse_text,
    require_columns,
    without_missing,
)


@dataclass(frozen=True)
class Problem:
    """Inputs with their names, and targets: (n,), (n, P), or labels (n,) of a classification."""

    x: pa.Table
    y: np.ndarray
    is_classification: bool

    @property
    def n_rows(self) -> int:
        return len(self.y)

    def rows(self, chosen: np.ndarray) -> Problem:
        """Some rows."""
        return Problem(self.x.take(pa.array(chosen)), self.y[chosen], self.is_classification)

    def split(self, fraction: float, seed: int) -> tuple[Problem, Problem | None]:
        """All rows but a random ``fraction``, and that fraction; None if it is 0.

        One row of each class is never held out.
        """
        if not 0.0 <= fraction < 1.0:
            raise InputError(f"the fraction of rows to hold out must be from 0 to below 1; got {fraction}.")
        if fraction == 0.0:
            return self, None
        order = np.random.default_rng(seed).permutation(self.n_rows)
        if self.is_classification:
            _, first = np.unique(self.y[order], return_index=True)
            order = np.concatenate([np.delete(order, first), order[first]])
        n_test = round(fraction * self.n_rows)
        needed = len(np.unique(self.y)) if self.is_classification else 1
        if not 1 <= n_test <= self.n_rows - needed:
            raise InputError(
                f"{fraction} of {self.n_rows} rows is {n_test} to hold out: at least one is needed, and {needed} to "
                "train on."
            )
        return self.rows(np.sort(order[n_test:])), self.rows(np.sort(order[:n_test]))


def load_problem(
    path: Path,
    targets: Sequence[str],
    *,
    inputs: Sequence[str] | None = None,
    drop: Sequence[str] = (),
    skip_missing: bool = False,
    classify: bool | None = None,
    classes: np.ndarray | None = None,
) -> Problem:
    """A problem from a table.

    Args:
        inputs: by default all columns but the targets, those to ``drop`` and the row index of a pandas frame.
        skip_missing: leaves out rows with missing values.
        classify: whether it is a classification; by default, if the target holds text or truth values.
        classes: those that a classification is known to have.
    """
    written = classes is not None and all(isinstance(label, str) for label in classes.tolist())
    table = read_table(path, text=targets if written else ())
    twice = next((name for name in targets if list(targets).count(name) > 1), None)
    if twice is not None:
        raise InputError(f"the target {twice!r} is named twice.")
    require_columns(table.column_names, [*targets, *drop, *(inputs or [])], path.name)
    names = _inputs(table, [*targets, *drop], path.name) if inputs is None else list(inputs)
    if not names:
        raise InputError(f"{path.name} has no columns left to predict {', '.join(targets)} from.")
    table, has_options = table.select([*names, *targets]), inputs is None
    if classify is None:
        classify = len(targets) == 1 and _is_names(table.select(targets))
    may_be_text = targets if classify and (classes is None or written) else ()
    # before rows are left out, which changes their numbers
    refuse_text(table.drop_columns(list(may_be_text)), has_options=has_options)
    if skip_missing:
        table = without_missing(table)
        if table.num_rows == 0:
            raise InputError(f"every row of {path.name} has a missing value: --skip-missing leaves none.")
    x = as_numbers(table.select(names), has_options=has_options)
    y = table.select(list(targets))
    if not classify:
        numbers = as_matrix(as_numbers(y, has_options=has_options))
        return Problem(x, numbers[:, 0] if len(targets) == 1 else numbers, False)
    if len(targets) > 1:
        raise InputError(f"a classification has one target; got {', '.join(targets)}.")
    if y[0].null_count:
        raise InputError(
            f"column {targets[0]!r} has {y[0].null_count} missing values: fill them in, or leave out the rows"
            f"{' (--skip-missing)' if has_options else ''}."
        )
    labels = y[0].to_pylist()
    if classes is not None:
        known = set(classes.tolist())
        for row, label in enumerate(labels):
            if label not in known:
                raise InputError(
                    f"column {targets[0]!r} has {label!r} in data row {row + 1}, which is not a class of the model; "
                    f"these are {', '.join(map(repr, classes.tolist()))}: leave out such rows."
                )
    return Problem(x, np.array(labels), True)


def _inputs(table: pa.Table, others: Sequence[str], where: str) -> list[str]:
    """All columns but some others; none that only counts the rows."""
    index = [name for name in index_columns(table) if name not in others]
    if index:
        warnings.warn(
            f"{where}: {', '.join(map(repr, index))} is left out, as it is the row index of a pandas frame; to use it "
            "as an input, write the table after frame.reset_index().",
            StructuredDGPWarning,
            stacklevel=3,
        )
    names = [name for name in table.column_names if name not in others and name not in index]
    for name in names:
        if re.fullmatch(r"\s*|Unnamed: \d+", name):
            raise InputError(
                f"{where} has a column without a name, as the row index of a pandas frame is: leave it out (--drop "
                f"{name!r}), or give it a name if it is an input."
            )
    return names


def _is_names(target: pa.Table) -> bool:
    """Whether a target holds names of classes or truth values; an error if the names look like numbers."""
    (name,), (column,) = target.column_names, target.columns
    if is_text(column) and looks_numeric(column):
        row, word = first_word(column)
        raise InputError(
            f"column {name!r} holds text ({word!r} in data row {row + 1}), but most of its values look like numbers: "
            "write all of them as numbers, or add --classify if they are names of classes."
        )
    return is_text(column) or pa.types.is_boolean(column.type)
