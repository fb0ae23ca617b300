"""Data sets for benchmarks: the embedded ones, and any folder of CSV files whose last column is the target."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from structured_dgp.datasets import load_embedded

EMBEDDED = ("concrete", "energy")


@dataclass(frozen=True)
class Split:
    """Data standardised with its training rows; ``unit`` is the standard deviation of the target."""

    x: np.ndarray
    y: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray
    unit: float


def load(name: str, folder: str | None) -> tuple[np.ndarray, np.ndarray]:
    """Inputs (n, D) and targets (n, 1)."""
    if name in EMBEDDED:
        table = load_embedded(name)
        return table.x, table.y
    if folder is None or not (Path(folder) / f"{name}.csv").is_file():
        raise SystemExit(f"{name} is not embedded: name a folder that holds {name}.csv with --data.")
    values = np.loadtxt(Path(folder) / f"{name}.csv", delimiter=",", skiprows=1)
    return values[:, :-1], values[:, -1:]


def interpolation_split(name: str, seed: int, folder: str | None = None) -> Split:
    """Nine tenths of the rows to train on, one tenth to test on."""
    x, y = load(name, folder)
    order = np.random.default_rng(seed).permutation(len(x))
    test, train = np.split(order, [round(0.1 * len(x))])
    x_mean, x_std = x[train].mean(0), x[train].std(0)
    x_std = np.where(x_std > 1e-12 * np.abs(x_mean), x_std, 1.0)
    y_mean, unit = float(y[train].mean()), float(y[train].std())
    x, y = (x - x_mean) / x_std, (y - y_mean) / unit
    return Split(x[train], y[train], x[test], y[test], unit)
