"""The paper's tables from our runs, ours beside the paper's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Float

from structured_dgp.exceptions import InputError
from structured_dgp.experiments import paper
from structured_dgp.experiments.data import SOURCES
from structured_dgp.experiments.methods import TITLES
from structured_dgp.experiments.paper import Cell
from structured_dgp.experiments.store import Run

MISSING = "–"


@dataclass(frozen=True)
class Entry:
    """One cell: our mean, its standard error and the number of splits, the paper's cell, and how it is marked.

    Attributes:
        n: splits; 0 for a cell that is missing.
        marks: any of ``"bold"``, ``"italic"``, ``"underline"``.
    """

    mean: float = float("nan")
    error: float = float("nan")
    n: int = 0
    paper: Cell | None = None
    marks: frozenset[str] = frozenset()

    @classmethod
    def of(cls, values: Sequence[float], paper_cell: Cell | None = None) -> Entry:
        """Mean and standard error of one value for each split."""
        if not len(values):
            return cls(paper=paper_cell)
        error = float(np.std(values, ddof=1) / np.sqrt(len(values))) if len(values) > 1 else float("nan")
        return cls(float(np.mean(values)), error, len(values), paper_cell)

    def marked(self, *marks: str) -> Entry:
        return replace(self, marks=self.marks | set(marks))


@dataclass(frozen=True)
class ResultTable:
    """A table of entries: data sets down, columns across."""

    name: str
    title: str
    note: str
    columns: tuple[str, ...]
    rows: dict[str, dict[str, Entry]]
    digits: int | dict[str, int] = 2
    """For all columns, or for each."""
    counted: bool = True
    """Whether cells show their number of splits."""

    def cells(self, mark: Callable[[str, frozenset[str]], str]) -> list[list[str]]:
        """Two lines for each data set, ours and the paper's where it has one; ``mark`` marks a text."""
        lines = []
        for data, entries in self.rows.items():
            ours = [data]
            for column in self.columns:
                entry = entries[column]
                count = f" [{entry.n}]" if entry.n and self.counted else ""
                ours.append(mark(self._text((entry.mean, entry.error), column), entry.marks) + count)
            lines.append([cell or MISSING for cell in ours])
            theirs = [self._text(entries[column].paper, column) for column in self.columns]
            if any(theirs):
                lines.append(["  paper", *(cell or MISSING for cell in theirs)])
        return lines

    def _text(self, cell: Cell | None, column: str) -> str:
        if cell is None or not np.isfinite(cell[0]):
            return ""
        digits = self.digits if isinstance(self.digits, int) else self.digits[column]
        form = f".{digits - 1}e" if column in IN_UNITS and abs(cell[0]) < 10.0 ** (1 - digits) else f".{digits}f"
        error = f"({cell[1]:{form}})" if np.isfinite(cell[1]) else ""
        return f"{cell[0]:{form}}{error}"


IN_UNITS = ("RMSE", "CRPS")
"""Columns in the units of a target, which may be tiny."""


# --- From runs to numbers -------------------------------------------------------------------------


DIGESTS = ("split_digest", "data_digest")
"""Recorded hashes that runs on the same rows share."""


def _how(run: Run) -> dict[str, Any]:
    """All options and settings of a run but the seed, its data, and the defaults behind it where they are known."""
    settings = {name: value for name, value in (run.record.get("settings") or {}).items() if name != "seed"}
    known = {"behind": run.record["behind"]} if "behind" in run.record else {}
    return {"settings": settings, **{name: run.record.get(name) for name in ("options", "data_digest")}, **known}


def _differ(runs: Iterable[Run]) -> bool:
    """Whether there are two that were made in different ways."""
    seen: dict[str, Any] = {}
    return any(seen.setdefault(name, value) != value for run in runs for name, value in _how(run).items())


def _mixed(label: str, data: str) -> str:
    return (
        f"there are runs of {label} on {data} with different options or settings, or of different versions of the "
        "data: keep each in a store of its own."
    )


class Results:
    """Finished runs, found by experiment, data set and label; one for each split.

    Attributes:
        data: data sets of the runs, those of the paper first.
        wanted: the same, and those of the paper that are missing, if there is any of them.
        labels: of the methods.
    """

    def __init__(self, runs: Iterable[Run]) -> None:
        self._runs: dict[tuple[str, str, str], dict[int, Run]] = {}
        for run in runs:
            if run.state != "done":
                continue
            label = str(run.record.get("label", run.method))
            splits = self._runs.setdefault((run.experiment, run.data, label), {})
            if run.split in splits and splits[run.split].key != run.key:
                raise InputError(_mixed(label, run.data))
            splits[run.split] = run
        for (_, data, label), splits in self._runs.items():
            if _differ(splits.values()):
                raise InputError(_mixed(label, data))
        found = {data for _, data, _ in self._runs}
        self.data = [*(name for name in SOURCES if name in found), *sorted(found - set(SOURCES))]
        self.wanted = [*SOURCES, *sorted(found - set(SOURCES))] if found & set(SOURCES) else self.data
        methods = {label: run.method for (_, _, label), runs in self._runs.items() for run in runs.values()}
        ranks = {name: index for index, name in enumerate(TITLES)}
        self.labels = sorted(methods, key=lambda label: (ranks.get(methods[label], len(ranks)), label))

    def runs(self, experiment: str, data: str, label: str) -> dict[int, Run]:
        """Split -> run."""
        return self._runs.get((experiment, data, label), {})

    def entry(self, experiment: str, data: str, label: str, what: str, paper_cell: Cell | None = None) -> Entry:
        """Mean and standard error of a recorded quantity."""
        values = [run.record.get(what) for run in self.runs(experiment, data, label).values()]
        return Entry.of([float(value) for value in values if value is not None], paper_cell)

    def pairs(self, experiment: str, data: str, first: str, second: str) -> list[tuple[Run, Run]]:
        """The runs of two methods on the same splits."""
        ours, theirs = (self.runs(experiment, data, label) for label in (first, second))
        common = sorted(set(ours) & set(theirs))
        for split in common:
            if any(ours[split].record.get(what) != theirs[split].record.get(what) for what in DIGESTS):
                raise InputError(f"{first} and {second} saw different rows of {data} in split {split}.")
        return [(ours[split], theirs[split]) for split in common]

    def compared(self, experiment: str, data: str, first: str, second: str, what: str) -> tuple[Entry, Entry]:
        """A recorded quantity of two methods over the splits that both have."""
        found = [(a.record.get(what), b.record.get(what)) for a, b in self.pairs(experiment, data, first, second)]
        values = [(float(a), float(b)) for a, b in found if a is not None and b is not None]
        return Entry.of([a for a, _ in values]), Entry.of([b for _, b in values])

    def all_natural(self, experiment: str, data: str, label: str) -> bool:
        """Whether no run is known to have been trained otherwise than with natural gradients."""
        settings = (run.record.get("settings", {}) for run in self.runs(experiment, data, label).values())
        return all(each.get("optimizer", "natural") == "natural" for each in settings)

    def wins(self, experiment: str, data: str, first: str, second: str) -> Float[np.ndarray, " splits"]:
        """For each split, the fraction of test rows to which ``second`` gives a larger density than ``first``."""
        pairs = self.pairs(experiment, data, first, second)
        return np.array([np.mean(b.log_density > a.log_density) for a, b in pairs])

    def gains(self, experiment: str, data: str, first: str, second: str) -> Float[np.ndarray, " splits"]:
        """For each split, the mean log density of ``second`` minus that of ``first``."""
        pairs = self.pairs(experiment, data, first, second)
        return np.array([np.mean(b.log_density) - np.mean(a.log_density) for a, b in pairs])


# --- The tables -----------------------------------------------------------------------------------

PAPER_LABELS = {
    "SGP": "SGP L1",
    "SGHMC L1": "SGHMC L1",
    "SGHMC L2": "SGHMC L2",
    "SGHMC L3": "SGHMC L3",
    "MF L2": "MF L2",
    "MF L3": "MF L3",
    "STAR L2": "STAR L2",
    "STAR L3": "STAR L3",
}
"""Our labels of the methods in the paper's tables of log-likelihoods."""


def _likelihoods(results: Results, experiment: str, numbers: dict[str, dict[str, Cell]]) -> dict[str, dict[str, Entry]]:
    """Test log-likelihoods of the paper's methods, and of ours that it does not have."""
    columns = {**PAPER_LABELS, **{label: "" for label in results.labels if label not in PAPER_LABELS}}
    return {
        data: {
            label: results.entry(experiment, data, label, "log_likelihood", numbers.get(data, {}).get(theirs))
            for label, theirs in columns.items()
        }
        for data in results.wanted
    }


Pairs = dict[str, tuple[Entry, Entry]]
"""Each method but the baseline, and the baseline, over the splits that both have."""

SHARED = "Methods are compared over the splits that they share; nothing is marked if these are fewer than two."
STOPPED = (
    "The ELBO is that of the models in the other tables: of those that are stopped early, because they predict better "
    "so, it is not the largest that training would reach."
)


def _pairs(results: Results, experiment: str, data: str, labels: Iterable[str], base: str, what: str) -> Pairs:
    return {label: results.compared(experiment, data, label, base, what) for label in labels if label != base}


def _as_good(entry: Entry, base: Entry) -> bool:
    """Whether the mean, with two digits, is at least that of the baseline."""
    return min(entry.n, base.n) > 1 and round(entry.mean, 2) >= round(base.mean, 2)


def _apart(entry: Entry, base: Entry, digits: int = 2) -> bool:
    """Whether the mean is larger and the intervals of one standard error, rounded, do not even touch."""
    if min(entry.n, base.n) < 2:
        return False
    mean, error, base_mean, base_error = (
        round(value, digits) for value in (entry.mean, entry.error, base.mean, base.error)
    )
    return mean - error > base_mean + base_error + 1e-9


def mark_interpolation(entries: dict[str, Entry], near: Pairs) -> dict[str, Entry]:
    """Bold: as good as the sparse GP."""
    return {
        label: entry.marked("bold") if label in near and _as_good(*near[label]) else entry
        for label, entry in entries.items()
    }


def mark_extrapolation(entries: dict[str, Entry], away: Pairs, near: Pairs) -> dict[str, Entry]:
    """Bold: as good as the sparse GP in both tasks; underlined: and apart from it in one of them."""
    marked = dict(entries)
    for label in away:
        both = (away[label], near[label])
        if all(_as_good(*pair) for pair in both):
            underline = ["underline"] if any(_apart(*pair) for pair in both) else []
            marked[label] = entries[label].marked("bold", *underline)
    return marked


def interpolation_table(results: Results) -> ResultTable:
    """Table 1."""
    found = _likelihoods(results, "interpolation", paper.INTERPOLATION)
    rows = {
        data: mark_interpolation(entries, _pairs(results, "interpolation", data, entries, "SGP", "log_likelihood"))
        for data, entries in found.items()
    }
    return ResultTable(
        "1",
        "Interpolation: test log-likelihood",
        f"Larger is better. Bold: at least as large as the sparse GP (SGP), with two digits. {SHARED}",
        _columns(rows),
        rows,
    )


def extrapolation_table(results: Results) -> ResultTable:
    """Table S1."""
    found = _likelihoods(results, "extrapolation", paper.EXTRAPOLATION)
    rows = {}
    for data, entries in found.items():
        away, near = (
            _pairs(results, experiment, data, entries, "SGP", "log_likelihood")
            for experiment in ("extrapolation", "interpolation")
        )
        rows[data] = mark_extrapolation(entries, away, near)
    return ResultTable(
        "S1",
        "Extrapolation: test log-likelihood",
        "Bold: at least as large as the sparse GP, both interpolating and extrapolating; underlined if larger by more "
        f"than both standard errors in one of them. {SHARED}",
        _columns(rows),
        rows,
    )


def _columns(rows: dict[str, dict[str, Entry]]) -> tuple[str, ...]:
    """All columns that hold anything."""
    names = dict.fromkeys(label for entries in rows.values() for label in entries)
    return tuple(name for name in names if any(row[name].n or row[name].paper for row in rows.values()))


OPTIMISERS = (
    "The paper's models are trained with Adam, ours with natural gradients unless their name or preset says otherwise."
)


def mark_comparison(entry: Entry, draw: float) -> Entry:
    """Bold if the second method is better by more than the standard error, italic if the first one is."""
    if entry.n > 1 and entry.mean > draw + entry.error:
        return entry.marked("bold")
    return entry.marked("italic") if entry.n > 1 and entry.mean < draw - entry.error else entry


COMPARED = f"Bold: the second method is better by more than the standard error; italic: the first one is. {SHARED}"


def _sghmc(results: Results) -> list[str]:
    """The SGHMC models that there are, and the one with three layers, with which the paper compares."""
    return [label for label in ("SGHMC L1", "SGHMC L2", "SGHMC L3") if label in results.labels or label == "SGHMC L3"]


WITH_ADAM = ("MF L3 Adam", "STAR L3 Adam")
"""Mean field and STAR, trained as the paper's."""


def direct_table(results: Results) -> ResultTable:
    """Table 2."""
    columns = {"MF vs STAR": ("MF L3", "STAR L3", "MF")}
    if set(WITH_ADAM) <= set(results.labels):
        columns["MF Adam vs STAR Adam"] = (*WITH_ADAM, "MF")
    columns |= {
        f"{label} vs STAR": (label, "STAR L3", "SGHMC" if label == "SGHMC L3" else "") for label in _sghmc(results)
    }
    rows = {}
    for data in results.wanted:
        numbers = paper.STAR_BEATS.get(data, {})
        rows[data] = {
            name: mark_comparison(
                Entry.of(results.wins("extrapolation", data, first, second).tolist(), numbers.get(theirs)), 0.5
            )
            for name, (first, second, theirs) in columns.items()
        }
    note = f"{COMPARED} MF and STAR with three layers. {OPTIMISERS}"
    title = "Extrapolation: fraction of test points to which the second method gives a larger density"
    return ResultTable("2", title, note, tuple(columns), rows)


def differences_table(results: Results) -> ResultTable:
    """Table S2; NG are runs with natural gradients."""
    columns: dict[str, tuple[str, str, bool]] = {
        "MF vs STAR (dif)": ("MF L3", "STAR L3", True),
        **({"MF Adam vs STAR Adam (dif)": (*WITH_ADAM, True)} if set(WITH_ADAM) <= set(results.labels) else {}),
        **{f"{label} vs STAR (dif)": (label, "STAR L3", True) for label in _sghmc(results)},
        "MF NG vs FC NG": ("MF L3", "FC L3", False),
        "MF NG vs FC NG (dif)": ("MF L3", "FC L3", True),
        "MF NG vs MF": ("MF L3", "MF L3 Adam", False),
    }
    rows: dict[str, dict[str, Entry]] = {}
    for data in results.wanted:
        rows[data] = {}
        for name, (first, second, is_difference) in columns.items():
            compare = results.gains if is_difference else results.wins
            values = compare("extrapolation", data, first, second).tolist()
            natural = [label for label in (first, second) if "NG" in name and not label.endswith("Adam")]
            if not all(results.all_natural("extrapolation", data, label) for label in natural):
                values = []
            theirs = name.replace("SGHMC L3", "SGHMC").replace(" Adam", "")
            cell = paper.DIFFERENCES.get(data, {}).get(theirs)
            rows[data][name] = mark_comparison(Entry.of(values, cell), 0.0 if is_difference else 0.5)
    note = (
        f"{COMPARED} (dif): mean difference of the log-likelihood; otherwise the fraction of test points. NG: trained "
        f"with natural gradients. MF vs STAR: {OPTIMISERS[0].lower()}{OPTIMISERS[1:]}"
    )
    title = "Extrapolation: more direct comparisons"
    digits = {name: 3 if name.endswith("(dif)") and "SGHMC" not in name else 2 for name in columns}  # as the paper has
    return ResultTable("S2", title, note, _columns(rows), rows, digits)


def mark_elbo(entries: dict[str, Entry], pairs: Pairs) -> dict[str, Entry]:
    """Bold: larger than mean field, and apart from it."""
    return {
        label: entry.marked("bold") if label in pairs and _apart(*pairs[label], digits=0) else entry
        for label, entry in entries.items()
    }


def elbo_table(results: Results) -> ResultTable:
    """Table S3, with STAR."""
    columns = {"MF L3": "MF", "STAR L3": "", "FC L3": "FC"}
    rows = {}
    for data in results.wanted:
        numbers = paper.ELBO.get(data, {})
        entries = {
            label: results.entry("interpolation", data, label, "elbo", numbers.get(theirs))
            if results.all_natural("interpolation", data, label)
            else Entry(paper=numbers.get(theirs))
            for label, theirs in columns.items()
        }
        rows[data] = mark_elbo(entries, _pairs(results, "interpolation", data, columns, "MF L3", "elbo"))
    note = (
        f"Bold: larger than mean field by more than both standard errors. {SHARED} {STOPPED} The paper's FC started "
        "from its trained mean field, ours does not."
    )
    return ResultTable(
        "S3", "ELBO of three-layer models, trained with natural gradients", note, tuple(columns), rows, digits=0
    )


SCORES = {
    "log_likelihood": ("log-likelihood", 3),
    "rmse": ("RMSE", 3),
    "crps": ("CRPS", 3),
    "coverage": ("inside 90 %", 3),
    "calibration_error": ("calibration error", 3),
    "elbo": ("ELBO", 0),
    "effective_samples": ("effective samples", 0),
    "seconds": ("seconds", 0),
}
"""Recorded quantities, their headings and digits."""


def scores_table(results: Results, experiment: str) -> ResultTable:
    """Every method on every data set with all scores."""
    rows = {}
    for data in results.data:
        for label in results.labels:
            count = len(results.runs(experiment, data, label))
            if count:
                rows[f"{data}, {label}"] = {"splits": Entry(float(count), n=count)} | {
                    heading: results.entry(experiment, data, label, what) for what, (heading, _) in SCORES.items()
                }
    note = "Means over splits, with standard errors, in the units of the targets."
    digits = {"splits": 0, **{heading: digits for heading, digits in SCORES.values()}}
    title = f"All scores, {experiment}"
    return ResultTable(f"scores-{experiment}", title, note, _columns(rows), rows, digits, counted=False)


TABLES: dict[str, Callable[[Results], ResultTable]] = {
    "1": interpolation_table,
    "2": direct_table,
    "S1": extrapolation_table,
    "S2": differences_table,
    "S3": elbo_table,
    "scores-interpolation": lambda results: scores_table(results, "interpolation"),
    "scores-extrapolation": lambda results: scores_table(results, "extrapolation"),
}
"""By name."""
