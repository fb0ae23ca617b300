"""Predictions for a table that may be larger than memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from structured_dgp.estimators import DeepGPClassifier, DeepGPEstimator, DeepGPRegressor
from structured_dgp.exceptions import InputError
from structured_dgp.files import check_output
from structured_dgp.tables import as_numbers, stream_table, table_writer

ROWS = 8192  # predicted at a time


def predict_table(
    estimator: DeepGPEstimator,
    data: str | Path,
    output: str | Path,
    *,
    quantiles: Sequence[float] = (0.05, 0.95),
    keep: Sequence[str] = (),
    report: Callable[[int], None] = lambda done: None,
) -> int:
    """Write the predictions for every row of ``data`` to ``output``; the number of rows.

    Rows keep their order. ``keep`` are columns of the table to copy. The output takes its name when it is complete.
    """
    features = list(getattr(estimator, "feature_names_in_", []))
    if not features:
        raise InputError("the model does not know the names of its inputs: fit it on a table with column names.")
    check_output(output, {"table": data})
    done = 0
    pieces = stream_table(data, features, keep)
    first = next(pieces, None)
    if first is None:
        raise InputError(f"{Path(data).name} has no rows.")
    schema = predicted(estimator, first.slice(0, 1), features, quantiles, keep, 0).schema
    with table_writer(output, schema) as writer:
        piece: pa.Table | None = first
        while piece is not None:
            for start in range(0, piece.num_rows, ROWS):
                rows = piece.slice(start, ROWS)
                writer.write_table(predicted(estimator, rows, features, quantiles, keep, done))
                done += rows.num_rows
                report(done)
            piece = next(pieces, None)
    return done


def predicted(
    estimator: DeepGPEstimator,
    rows: pa.Table,
    features: Sequence[str],
    quantiles: Sequence[float],
    keep: Sequence[str],
    first_row: int,
) -> pa.Table:
    """The columns of the output for some rows."""
    x = as_numbers(rows.select(list(features)), first_row + 1)
    columns = {name: rows[name] for name in keep}
    taken = set(columns)

    def add(name: str, values: np.ndarray) -> None:
        while name in taken:
            name = f"{name}_predicted"
        taken.add(name)
        columns[name] = pa.array(values)

    names = list(estimator.target_names_ or [])
    if isinstance(estimator, DeepGPClassifier):
        probabilities = estimator.predict_proba(x)
        add(names[0] if names else "class", estimator.classes_[probabilities.argmax(axis=1)])
        for label, column in zip(estimator.classes_.tolist(), probabilities.T, strict=True):
            add(f"p_{label}", column)
    elif isinstance(estimator, DeepGPRegressor):
        prediction = estimator.predict_dist(x)
        shape = (len(prediction), -1)
        mean, std = prediction.mean.reshape(shape), prediction.std.reshape(shape)
        levels = prediction.quantile(list(quantiles)).reshape(len(quantiles), *mean.shape)
        for p in range(mean.shape[1]):
            name = names[p] if names else f"y{p}" if mean.shape[1] > 1 else "y"
            add(name, mean[:, p])
            add(f"{name}_std", std[:, p])
            for level, values in zip(quantiles, levels[:, :, p], strict=True):
                add(f"{name}_q{100 * level:g}", values)
    return pa.table(columns)
