"""The paper's data sets by name, and any table of one's own.

A name is looked for among the embedded sets, in a given folder or the one that ``SDGP_DATA`` names, and in the cache;
what is in none of them is downloaded into the cache. Files are compared with the known hashes, so a result can be
traced to its data.
"""

from __future__ import annotations

import csv
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pooch

from structured_dgp.datasets import EMBEDDED, Table, load_embedded
from structured_dgp.exceptions import InputError
from structured_dgp.experiments.download import fetch

VARIABLE = "SDGP_DATA"


@dataclass(frozen=True)
class Source:
    """What is known about a data set: rows, inputs, and the hash of its CSV file."""

    rows: int
    inputs: int
    sha256: str


SOURCES: dict[str, Source] = {
    "boston": Source(506, 13, "79ac716620024011b03c0c44d2bf99069b8173649181926d9109c25475a3804c"),
    "energy": Source(768, 8, "15bcfc654b7c5067945efd970686188be630281161a62743eb986ff86ff998e8"),
    "concrete": Source(1030, 8, "eb2a1f2a871cd01cbca7a96df487416fb6a1c3598bbda61687923e2207a9bc1b"),
    "wine_red": Source(1599, 11, "b51c8ee6ca1f66473bd98042780da9ce3eceaf6fe113441e8f2c3ee593b02318"),
    "kin8nm": Source(8192, 8, "e74acfb93744b300a8bca76890a2a4a2f3dedf0ea6a76a7fb353da44ee91c773"),
    "power": Source(9568, 4, "3c1fc11025f8424f8d95802d8b7086dffd3f73a552c6dcab3d973620986194b2"),
    "naval": Source(11934, 16, "aaa94978400e29fbf4c4243a5fb6fb0863850578ae34fba25e23f42f7d5d154c"),
    "protein": Source(45730, 9, "5879f143cf15b2f59e63ddd413bc11417b1cd6ef311ff6f449b0aeb5b861e1f0"),
}
"""The eight sets of the paper."""


def load(name: str, folder: str | Path | None = None) -> Table:
    """A data set of the paper by name, or a CSV file with one header line whose last column is the target."""
    if name.endswith(".csv"):
        return read_table(Path(name))
    if name in EMBEDDED:
        return load_embedded(name)
    if name not in SOURCES:
        raise InputError(f"unknown data set {name!r}: use one of {', '.join(SOURCES)}, or the path of a CSV file.")
    places = [folder, os.environ.get(VARIABLE), pooch.os_cache("structured-dgp")]
    for place in places:
        path = Path(place) / f"{name}.csv" if place else None
        if path is not None and path.is_file():
            return _checked(read_table(path), path)
    return read_table(fetch(name, Path(pooch.os_cache("structured-dgp")), SOURCES[name].sha256))


def check_name(name: str) -> None:
    """Refuse what is neither a data set of the paper nor a CSV file that is there."""
    if name not in SOURCES and not (name.endswith(".csv") and Path(name).is_file()):
        raise InputError(f"unknown data set {name!r}: use one of {', '.join(SOURCES)}, or the path of a CSV file.")


def read_table(path: Path) -> Table:
    """A CSV file of numbers with one header line; the last column is the target."""
    try:
        header, *rows = csv.reader(path.read_text(encoding="utf-8").splitlines())
        values = np.array(rows, dtype=np.float64)
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise InputError(f"{path.name} is not a table of numbers with one header line: {error}.") from error
    if values.ndim != 2 or values.shape[1] < 2 or values.shape[1] != len(header) or not np.isfinite(values).all():
        raise InputError(f"{path.name} needs at least two columns of numbers, none missing, and a name for each.")
    if not any(_is_text(cell) for cell in header):
        raise InputError(f"{path.name} has numbers in its first line, where the names of the columns belong: add them.")
    return Table(path.stem, values[:, :-1], values[:, -1:], tuple(header[:-1]), header[-1])


def _is_text(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return True
    return False


def _checked(table: Table, path: Path) -> Table:
    """The table, after its file has been compared with the known hash."""
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != SOURCES[table.name].sha256:
        raise InputError(
            f"{path.name} is not the data set of the paper: its sha256 is {found[:12]}..., not "
            f"{SOURCES[table.name].sha256[:12]}.... Remove it, or give it another name to use it as your own: {path}"
        )
    return table


def digest(table: Table) -> str:
    """A hash of the numbers of a table."""
    found = hashlib.sha256()
    for part in (table.x, table.y):
        found.update(repr(part.shape).encode() + np.ascontiguousarray(part, "<f8").tobytes())
    return found.hexdigest()[:16]
