"""Results in one SQLite file: each run is a row, there at most once, whoever writes it and however often."""

from __future__ import annotations

import csv
import io
import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from structured_dgp.exceptions import InputError
from structured_dgp.files import replacing

FORMAT = 1
TIMEOUT = 60.0  # seconds that a writer waits for another one

SCHEMA = """
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS runs (
    key TEXT PRIMARY KEY,
    experiment TEXT NOT NULL, data TEXT NOT NULL, method TEXT NOT NULL, split INTEGER NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('done', 'failed')),
    record TEXT NOT NULL,
    log_density BLOB
);
"""


@dataclass(frozen=True)
class Run:
    """One finished or failed run.

    Attributes:
        key: a hash of all that determines the run.
        state: ``"done"`` or ``"failed"``.
        record: scores, settings, facts about library and machine; the error of a failed one.
        log_density: of each test row, in the order of the split.
    """

    key: str
    experiment: str
    data: str
    method: str
    split: int
    state: str
    record: dict[str, Any]
    log_density: Float[np.ndarray, " m"] = field(default_factory=lambda: np.zeros(0))


class Store:
    """The runs in a file; made if it is not there, unless it is ``read_only``."""

    def __init__(self, path: str | Path, read_only: bool = False) -> None:
        self.path, self.read_only = Path(path), read_only
        if not read_only:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        elif self.path.with_name(f"{self.path.name}-journal").exists():
            # a writer was killed: what it did not finish is undone, which a reader may not do
            with self._connected("rw") as connection:
                connection.execute("SELECT COUNT(*) FROM facts")
        with self._connected() as connection:
            if not read_only:
                connection.executescript(SCHEMA)
                connection.execute("INSERT OR IGNORE INTO facts VALUES ('format', ?)", (str(FORMAT),))
            found = connection.execute("SELECT value FROM facts WHERE name = 'format'").fetchone()[0]
        if found != str(FORMAT):
            raise InputError(f"{self.path.name} has format {found}; this version uses format {FORMAT}.")

    @contextmanager
    def _connected(self, mode: str = "") -> Iterator[sqlite3.Connection]:
        """A connection whose changes are all made, or none of them."""
        try:
            address = f"{self.path.resolve().as_uri()}?mode={mode or ('ro' if self.read_only else 'rwc')}"
            with closing(sqlite3.connect(address, timeout=TIMEOUT, uri=True)) as connection, connection:
                yield connection
        except sqlite3.DatabaseError as error:
            raise InputError(f"{self.path.name} cannot be used as a store of results: {error}.") from error

    def add(self, run: Run) -> bool:
        """Write a run; a failed one is replaced by whatever comes later, a finished one stays. True if written."""
        with self._connected() as connection:
            changed = connection.execute(
                "INSERT INTO runs VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (key) DO UPDATE SET "
                "state = excluded.state, record = excluded.record, log_density = excluded.log_density "
                "WHERE runs.state = 'failed'",
                (
                    run.key,
                    run.experiment,
                    run.data,
                    run.method,
                    run.split,
                    run.state,
                    json.dumps(run.record, sort_keys=True),
                    np.asarray(run.log_density, "<f8").tobytes(),
                ),
            )
            return changed.rowcount > 0

    def finished(self) -> set[str]:
        """The keys of all finished runs."""
        with self._connected() as connection:
            return {key for (key,) in connection.execute("SELECT key FROM runs WHERE state = 'done'")}

    def runs(self, **wanted: Any) -> list[Run]:
        """All runs, or those with these values of experiment, data, method, split or state."""
        names = ("experiment", "data", "method", "split", "state")
        unknown = sorted(set(wanted) - set(names))
        if unknown:
            raise InputError(f"runs are chosen by {', '.join(names)}, not by {unknown[0]}.")
        where = " AND ".join(f"{name} = ?" for name in wanted) or "1"
        query = f"SELECT * FROM runs WHERE {where} ORDER BY experiment, data, method, split, key"
        with self._connected() as connection:
            rows = connection.execute(query, tuple(wanted.values())).fetchall()
        return [
            Run(key, experiment, data, method, split, state, json.loads(record), np.frombuffer(density, "<f8"))
            for key, experiment, data, method, split, state, record, density in rows
        ]

    def export(self, path: str | Path) -> list[Path]:
        """All finished runs as a CSV file, or as a folder with one for each data set; :func:`read_runs` reads them.

        Runs that were exported there before, and that this store does not hold, stay.
        """
        runs, path = self.runs(state="done"), Path(path)
        if path.suffix == ".csv":
            parts = {path: runs}
        else:
            names = sorted({run.data for run in runs})
            parts = {path / f"{name}.csv": [run for run in runs if run.data == name] for name in names}
        for place, some in parts.items():
            if place.is_file():
                parts[place] = _joined(_exported_before(place), some)
        for place, some in parts.items():
            place.parent.mkdir(parents=True, exist_ok=True)
            with replacing(place) as file:
                file.write(_as_csv(some).encode())
        return list(parts)


def _exported_before(place: Path) -> list[Run]:
    """The runs in a file that is about to be written over."""
    if not place.read_bytes().startswith(",".join(COLUMNS).encode()):
        raise InputError(f"{place} is there, and holds no exported runs: choose another place for them.")
    return _exported_runs(place)


def _joined(old: list[Run], new: list[Run]) -> list[Run]:
    """Each run once, in the order of a store; the new ones count where both have it."""
    runs = {run.key: run for run in (*old, *new)}
    return sorted(runs.values(), key=lambda run: (run.experiment, run.data, run.method, run.split, run.key))


def _as_csv(runs: list[Run]) -> str:
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    names = sorted({name for run in runs for name in run.record})
    writer.writerow([*COLUMNS, *names, "log_density"])
    for run in runs:
        own = [getattr(run, name) for name in COLUMNS]
        values = [json.dumps(run.record[name]) if name in run.record else "" for name in names]
        writer.writerow([*own, *values, " ".join(f"{value:.{DIGITS}g}" for value in run.log_density)])
    return text.getvalue()


COLUMNS = ("key", "experiment", "data", "method", "split")
"""Of an exported file, before what was recorded."""
DIGITS = 7
"""Of the densities in an exported file."""


def is_exported(path: Path) -> bool:
    """Whether a path names exported runs, a CSV file or a folder of such files, and not a store."""
    return path.suffix == ".csv" or path.is_dir()


def read_runs(path: str | Path, *, none_allowed: bool = False) -> list[Run]:
    """The finished runs of a store, or what was exported from one: a CSV file, or a folder of them."""
    path = Path(path)
    if not path.exists():
        raise InputError(f"{path} is not there: make runs with `sdgp bench run`.")
    if is_exported(path):
        files = sorted(path.glob("*.csv")) if path.is_dir() else [path]
        runs = [run for file in files for run in _exported_runs(file)]
    else:
        runs = Store(path, read_only=True).runs(state="done")
    if not runs and not none_allowed:
        raise InputError(f"{path} holds no finished runs: make some with `sdgp bench run`.")
    return runs


def read_failures(path: str | Path) -> list[Run]:
    """The failed runs of a store; exported files hold none."""
    path = Path(path)
    return [] if is_exported(path) or not path.exists() else Store(path, read_only=True).runs(state="failed")


def _exported_runs(path: Path) -> list[Run]:
    runs = []
    usual = csv.field_size_limit(2**31 - 1)
    try:
        with path.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                key, experiment, data, method, split = (row.pop(name) for name in COLUMNS)
                density = np.array(row.pop("log_density").split(), np.float64)
                record = {name: json.loads(value) for name, value in row.items() if value}
                runs.append(Run(key, experiment, data, method, int(split), "done", record, density))
    except (AttributeError, KeyError, TypeError, ValueError, UnicodeDecodeError) as error:
        raise InputError(f"{path.name} is not a file of exported runs: {error!r}.") from error
    finally:
        csv.field_size_limit(usual)
    return runs
