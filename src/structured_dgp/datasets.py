"""Data sets that come with the package (see ``data/ATTRIBUTION.md``)."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from importlib import resources

import numpy as np
from jaxtyping import Float

from structured_dgp.exceptions import InputError

EMBEDDED = ("concrete", "energy")


@dataclass(frozen=True)
class Table:
    """A regression problem: inputs, one target, and their column names."""

    name: str
    x: Float[np.ndarray, "n D"]
    y: Float[np.ndarray, "n 1"]
    inputs: tuple[str, ...]
    target: str


def load_embedded(name: str) -> Table:
    """One of the embedded data sets."""
    if name not in EMBEDDED:
        raise InputError(f"no embedded data set {name!r}: use one of {', '.join(map(repr, EMBEDDED))}.")
    text = (resources.files("structured_dgp") / "data" / f"{name}.csv").read_text(encoding="utf-8")
    header, *rows = csv.reader(text.splitlines())
    values = np.array(rows, dtype=np.float64)
    return Table(name, values[:, :-1], values[:, -1:], tuple(header[:-1]), header[-1])
