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
    """The runs in a file; made if it is not there."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self._connected() as connection:
            connection.executescript(SCHEMA)
            connection.execute("INSERT OR IGNORE INTO facts VALUES ('format', ?)", (str(FORMAT),))
            found = connection.execute("SELECT value FROM facts WHERE name = 'format'").fetchone()[0]
        if found != str(FORMAT):
            raise InputError(f"{self.path.name} has format {found}; this version uses format {FORMAT}.")

    @contextmanager
    def _connected(self) -> Iterator[sqlite3.Connection]:
        """A connection whose changes are all made, or none of them."""
        try:
            with closing(sqlite3.connect(self.path, timeout=TIMEOUT)) as connection, connection:
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

    def export(self, path: str | Path) -> None:
        """All finished runs as CSV, without the densities of single rows."""
        runs = self.runs(state="done")
        columns = sorted({name for run in runs for name, value in run.record.items() if not isinstance(value, dict)})
        text = io.StringIO(newline="")
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["experiment", "data", "method", "split", *columns])
        for run in runs:
            values = (run.record.get(name, "") for name in columns)
            writer.writerow([run.experiment, run.data, run.method, run.split, *values])
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(text.getvalue().encode())
