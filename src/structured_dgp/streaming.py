"""Predictions for a table that may be larger than memory."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow as pa

from structured_dgp.estimators import DeepGPClassifier, DeepGPEstimator, DeepGPRegressor
from structured_dgp.exceptions import InputError, StructuredDGPWarning
from structured_dgp.files import check_output
from structured_dgp.scaling import Units
from structured_dgp.tables import as_matrix, as_numbers, check_suffix, stream_table, table_writer

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
    check_suffix(output)
    # what is asked for twice is written once
    quantiles, keep = list(dict.fromkeys(quantiles)), list(dict.fromkeys(keep))
    pieces = predicted_pieces(estimator, stream_table(data, features, keep), features, quantiles, keep)
    first = next(pieces, None)
    if first is None:
        raise InputError(f"{Path(data).name} has no rows.")
    done = 0
    with table_writer(output, first.schema) as writer:
        for piece in chain([first], pieces):
            writer.write_table(piece)
            done += piece.num_rows
            report(done)
    return done


def predicted_pieces(
    estimator: DeepGPEstimator,
    pieces: Iterator[pa.Table],
    features: Sequence[str],
    quantiles: Sequence[float],
    keep: Sequence[str],
) -> Iterator[pa.Table]:
    """The output, some rows at a time; a column in other units is a warning once."""
    done, units = 0, Units(features)
    for piece in pieces:
        for start in range(0, piece.num_rows, ROWS):
            rows = piece.slice(start, ROWS)
            x = as_numbers(rows.select(list(features)), done + 1)
            units.look_at(estimator.x_scaling_.to_standard(as_matrix(x)))
            with warnings.catch_warnings():  # of the estimator, which sees these rows only
                warnings.filterwarnings("ignore", "column .* standard deviations", StructuredDGPWarning)
                table = predicted(estimator, x, quantiles, {name: rows[name] for name in keep})
            yield table
            done += rows.num_rows


def predicted(
    estimator: DeepGPEstimator, x: pa.Table, quantiles: Sequence[float], kept: Mapping[str, pa.ChunkedArray]
) -> pa.Table:
    """The columns of the output for some rows."""
    columns = dict(kept)
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
