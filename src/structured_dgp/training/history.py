"""What happened during training, record by record."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float


@dataclass(frozen=True)
class Record:
    """The run at one step.

    Attributes:
        step: how many steps were made.
        elbo: the evidence lower bound, a mean over the steps since the last record; so are its parts:
        data: the expected log-likelihood of all data,
        kl: the KL divergence of the posterior from the prior.
        score: mean log-likelihood of the hold-out rows, in the units of the training targets; None if not scored here.
        learning_rate: Adam's rate.
        natural_rate: ρ; None without natural gradients.
        natural_length: mean Fisher norm of the natural steps, before the trust region shortened them.
        noise: variance of a Gaussian likelihood; None for others.
        jitter: what was added to each layer's kernel matrix.
        jitter_events: how many layers needed more than the model's jitter.
        failures: failed attempts so far.
        seconds: since the start of the run, time before a resumption included.
    """

    step: int
    elbo: float
    data: float
    kl: float
    score: float | None
    learning_rate: float
    natural_rate: float | None
    natural_length: float | None
    noise: float | None
    jitter: tuple[float, ...]
    jitter_events: int
    failures: int
    seconds: float

    def as_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Record:
        return cls(**{**values, "jitter": tuple(values["jitter"])})


@dataclass
class History:
    """All records of a run."""

    records: list[Record] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, name: str) -> Float[np.ndarray, " records"]:
        """One quantity over the records, such as ``history["elbo"]``; NaN where a record has none."""
        values = [getattr(record, name) for record in self.records]
        return np.array([np.nan if value is None else value for value in values], np.float64)

    @property
    def scored(self) -> list[Record]:
        """The records that have a hold-out score."""
        return [record for record in self.records if record.score is not None]

    def write_jsonl(self, path: str | Path) -> None:
        """One line of JSON for each record."""
        Path(path).write_text("".join(record.as_json() + "\n" for record in self.records), encoding="utf-8")


class Log:
    """A file that gets every record; a resumed run first writes those it already has."""

    def __init__(self, path: str | Path | None, history: History) -> None:
        self._path = None if path is None else Path(path)
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            history.write_jsonl(self._path)

    def write(self, record: Record) -> None:
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(record.as_json() + "\n")
