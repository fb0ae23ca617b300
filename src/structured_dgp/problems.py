"""A table split into inputs and targets, ready for an estimator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from structured_dgp.exceptions import InputError
from structured_dgp.tables import as_matrix, as_numbers, is_text, read_table, require_columns, without_missing


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
    classify: bool = False,
) -> Problem:
    """A problem from a table: ``inputs``, by default all columns but the targets and those to ``drop``."""
    table = read_table(path)
    twice = next((name for name in targets if list(targets).count(name) > 1), None)
    if twice is not None:
        raise InputError(f"the target {twice!r} is named twice.")
    require_columns(table.column_names, [*targets, *drop, *(inputs or [])], path.name)
    names = [name for name in table.column_names if name not in targets and name not in drop]
    names = names if inputs is None else list(inputs)
    if not names:
        raise InputError(f"{path.name} has no columns left to predict {', '.join(targets)} from.")
    table = table.select([*names, *targets])
    if skip_missing:
        table = without_missing(table)
        if table.num_rows == 0:
            raise InputError(f"every row of {path.name} has a missing value: --skip-missing leaves none.")
    has_options = inputs is None
    x = as_numbers(table.select(names), has_options=has_options)
    y = table.select(list(targets))
    classes = classify or (len(targets) == 1 and (is_text(y[0]) or pa.types.is_boolean(y[0].type)))
    if not classes:
        numbers = as_matrix(as_numbers(y, has_options=has_options))
        return Problem(x, numbers[:, 0] if len(targets) == 1 else numbers, False)
    if len(targets) > 1:
        raise InputError(f"a classification has one target; got {', '.join(targets)}.")
    if y[0].null_count:
        raise InputError(
            f"column {targets[0]!r} has {y[0].null_count} missing values: fill them in, or --skip-missing."
        )
    return Problem(x, np.array(y[0].to_pylist()), True)
