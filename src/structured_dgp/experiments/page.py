"""The report: one page with what was run, ours beside the paper's, and how to repeat it."""

from __future__ import annotations

import shlex
import textwrap
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from structured_dgp.experiments.figures import FIGURES, Drawing, read_note
from structured_dgp.experiments.formats import as_html
from structured_dgp.experiments.methods import method_text
from structured_dgp.experiments.splits import SPLITS
from structured_dgp.experiments.store import Run, is_exported
from structured_dgp.experiments.tables import TABLES, Results, ResultTable
from structured_dgp.pages import Page

OURS = "STAR L3"


def make_report(
    runs: list[Run], figures: Path | None = None, source: str = "runs.sqlite", failed: Sequence[Run] = ()
) -> Page:
    """The page, from finished runs and from the figures (PNG) that a folder holds; failed runs are told."""
    results = Results(runs)
    page = Page("Structured deep Gaussian processes: the paper's evaluation, repeated")
    page.paragraph(
        "Deep Gaussian processes with a mean-field posterior (MF), with one that keeps the correlations between layers "
        "(STAR, FC), a sparse Gaussian process (SGP) and other methods, tested near the training data (interpolation: "
        "a random tenth of the rows) and away from it (extrapolation: the half beyond a cut across a random "
        "direction). Lines marked paper are from Lindinger et al., Beyond the Mean-Field: Structured Deep Gaussian "
        "Processes Improve the Predictive Uncertainties, NeurIPS 2020."
    )
    _what_was_run(page, runs, results, source)
    _what_failed(page, failed)
    for name, make in TABLES.items():
        table = make(results)
        if not any(entry.n for entries in table.rows.values() for entry in entries.values()):
            continue
        page.heading(f"Table {name}: {table.title}" if table.counted else table.title)
        page.markup(as_html(table))
        for sentence in findings(table):
            page.paragraph(sentence)
        page.command(f"sdgp bench table {name} --results {shlex.quote(source)}")
    _pictures(page, results, figures, source)
    page.footer("Made by sdgp report.")
    return page


def _what_was_run(page: Page, runs: list[Run], results: Results, source: str) -> None:
    page.heading("What was run")
    header = ["method", *results.data]
    rows = []
    for label in results.labels:
        cells = []
        for data in results.data:
            counts = [len(results.runs(experiment, data, label)) for experiment in SPLITS]
            cells.append(" + ".join(map(str, counts)) if any(counts) else "–")
        rows.append([label, *cells])
    page.table(header, rows)
    page.paragraph(f"Number of splits, {' + '.join(SPLITS)}.", soft=True)
    seconds = sum(float(run.record.get("seconds", 0.0)) for run in runs)
    page.paragraph(
        f"{len(runs)} runs, {seconds / 3600:.1f} hours of computing. Every run has a seed, which is the number of its "
        "split; training and test rows are the same for all methods. They were made with:"
    )
    page.table(("runs", *MADE_WITH.values()), _made_with(runs))
    page.paragraph("Runs that are there are not repeated, so this goes on where it was left:")
    page.command("\n".join(commands(runs, source)))
    if any("file" in run.record for run in runs):
        page.paragraph("Files of one's own are named without their folders: call it where they are.", soft=True)


def _what_failed(page: Page, failed: Sequence[Run]) -> None:
    if not failed:
        return
    page.paragraph(f"{len(failed)} run{'s' * (len(failed) > 1)} failed:")
    page.table(
        ("method", "data", "task", "split", "error"),
        [
            (run.record["label"], run.data, run.experiment, str(run.split), textwrap.shorten(run.record["error"], 120))
            for run in failed
        ],
    )


def commands(runs: list[Run], source: str) -> list[str]:
    """What to type to make these runs, in as few lines as they allow; exported ones go into a store first."""
    splits: dict[tuple[str, ...], set[int]] = {}
    for run in runs:
        options = run.record.get("options", {})
        flags = "".join(f" {flag} {options[name]}" for name, flag in FLAGS.items() if name in options)
        row = (run.experiment, run.record.get("file", run.data), method_text(run.method, options), flags)
        splits.setdefault(row, set()).add(run.split)
    rows = [(*row, _splits_text(sorted(numbers))) for row, numbers in splits.items()]
    for column in (2, 1, 0):  # methods, data sets, experiments
        rows = _joined(rows, column)
    exported = is_exported(Path(source))
    store = "" if exported else f" --store {shlex.quote(source)}"
    return [f"sdgp bench import {shlex.quote(source)}"] * exported + [
        f"sdgp bench run --experiment {experiment} --data {shlex.quote(data)} --methods {methods} --splits {numbers}"
        f"{flags}{store}"
        for experiment, data, methods, flags, numbers in rows
    ]


def _joined(rows: list[tuple[str, ...]], column: int) -> list[tuple[str, ...]]:
    """Rows that differ in one column only become one, with commas there."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        groups.setdefault((*row[:column], *row[column + 1 :]), []).append(row[column])
    return [(*rest[:column], ",".join(values), *rest[column:]) for rest, values in groups.items()]


FLAGS = {"preset": "--preset", "start": "--preset", "max_steps": "--steps", "n_inducing": "--inducing"}
"""Options of a run, and how they are typed."""


def _splits_text(numbers: list[int]) -> str:
    return str(len(numbers)) if numbers == list(range(len(numbers))) else ",".join(map(str, numbers)) + ","


MADE_WITH = {
    "library": "structured-dgp",
    "code": "hash of its code",
    "jax": "jax",
    "python": "Python",
    "cores": "cores",
    "cpu": "processor",
}
"""Recorded facts about libraries and machine, and what the report calls them."""


def _made_with(runs: list[Run]) -> list[tuple[str, ...]]:
    """Rows of these facts, with the number of runs that share them; the most frequent first."""
    kinds = Counter(tuple(str(run.record.get(name) or "?") for name in MADE_WITH) for run in runs)
    return [(str(count), *facts) for facts, count in kinds.most_common()]


def findings(table: ResultTable) -> list[str]:
    """What a table says, in words that follow the numbers."""
    if table.name in ("1", "S1"):
        return _against_paper(table)
    if table.name == "2":
        return _direct(table)
    return []


def _against_paper(table: ResultTable) -> list[str]:
    reached: list[str] = []
    missed: list[str] = []
    for data, entries in table.rows.items():
        entry = entries.get(OURS)
        if entry is None or not entry.n or entry.paper is None:
            continue
        goal = entry.paper[0] - entry.paper[1]
        text = f"{data} ({entry.mean - entry.paper[0]:+.2f}, {_counted(entry.n)})"
        (reached if entry.mean >= goal else missed).append(text)
    sentences = []
    if reached:
        sentences.append(f"{OURS} is at least the paper's value minus its standard error on {', '.join(reached)}.")
    if missed:
        sentences.append(f"{OURS} is below the paper's value minus its standard error on {', '.join(missed)}.")
    return sentences


def _counted(splits: int) -> str:
    return f"{splits} split{'s' * (splits > 1)}"


def _direct(table: ResultTable) -> list[str]:
    sentences: list[str] = []
    for column in table.columns:
        entries = {data: row[column] for data, row in table.rows.items() if row[column].n}
        for mark, words in (("bold", "the second is better"), ("italic", "the first is better")):
            names = [f"{data} ({_counted(entry.n)})" for data, entry in entries.items() if mark in entry.marks]
            if names:
                sentences.append(f"{column}: {words} on {', '.join(names)}.")
        draws = {data: entry for data, entry in entries.items() if not entry.marks and entry.n > 1}
        open_ones = [f"{data} ({_counted(entry.n)})" for data, entry in draws.items()]
        if open_ones:
            sentences.append(f"{column}: a draw, within one standard error, on {', '.join(open_ones)}.")
    return sentences


def _pictures(page: Page, results: Results, folder: Path | None, source: str) -> None:
    of_runs = any(results.runs("interpolation", data, label) for data in results.data for label in ("MF L3", OURS))
    in_folder = {name for name in FIGURES if folder is not None and (folder / f"{name}.png").is_file()}
    names = [name for name, kind in FIGURES.items() if name in in_folder or (kind.from_runs and of_runs)]
    if names:
        page.heading("Figures")
    for name in names:
        kind = FIGURES[name]
        if kind.from_runs and of_runs:
            drawn = kind.draw(Drawing(results=results))
            page.picture(drawn.figure, kind.caption)
            command, findings = f"sdgp bench figure {name} --results {shlex.quote(source)}", list(drawn.findings)
        elif folder is not None:
            page.image((folder / f"{name}.png").read_bytes(), kind.caption)
            command, findings = read_note(name, folder)
        for sentence in findings:
            page.paragraph(sentence)
        page.command(command)
