"""The report: one page with what was run, ours beside the paper's, and how to repeat it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from structured_dgp.experiments.figures import FIGURES, Drawing
from structured_dgp.experiments.methods import method_text
from structured_dgp.experiments.splits import SPLITS
from structured_dgp.experiments.store import Run
from structured_dgp.experiments.tables import TABLES, Results, ResultTable, as_html
from structured_dgp.pages import Page

OURS = "STAR L3"


def make_report(runs: list[Run], figures: Path | None = None, source: str = "runs.sqlite") -> Page:
    """The page, from finished runs and from the figures (PNG) that a folder holds."""
    results = Results(runs)
    page = Page("Structured deep Gaussian processes: the paper's evaluation, repeated")
    page.paragraph(
        "Deep Gaussian processes with a mean-field posterior (MF), with one that keeps the correlations between layers "
        "(STAR, FC), a sparse Gaussian process (SGP) and other methods, tested near the training data (interpolation: "
        "a random tenth of the rows) and away from it (extrapolation: the half beyond a cut across a random "
        "direction). Lines marked paper are from Lindinger et al., Beyond the Mean-Field: Structured Deep Gaussian "
        "Processes Improve the Predictive Uncertainties, NeurIPS 2020."
    )
    _what_was_run(page, runs, results)
    for name, make in TABLES.items():
        table = make(results)
        if not any(entry.n for entries in table.rows.values() for entry in entries.values()):
            continue
        page.heading(f"Table {name}: {table.title}" if table.counted else table.title)
        page.markup(as_html(table))
        for sentence in findings(table):
            page.paragraph(sentence)
        page.command(f"sdgp bench table {name} --results {source}")
    _pictures(page, results, figures, source)
    page.footer("Made by sdgp report.")
    return page


def _what_was_run(page: Page, runs: list[Run], results: Results) -> None:
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
        f"{len(runs)} runs, {seconds / 3600:.1f} hours of computing. {_machines(runs)} Every run has a seed, which is "
        "the number of its split; training and test rows are the same for all methods."
    )
    page.paragraph("Runs that are there are not repeated, so this goes on where it was left:")
    page.command(_command(runs, results))


def _command(runs: list[Run], results: Results) -> str:
    """What to type to make these runs; of options, those that all runs share."""
    known = [(run.method, dict(run.record.get("options", {}))) for run in runs]
    methods = dict.fromkeys(method_text(name, options) for name, options in known)
    parts = [
        "sdgp bench run",
        f"--experiment {','.join(name for name in SPLITS if any(run.experiment == name for run in runs))}",
        f"--data {','.join(results.data)}",
        f"--methods {','.join(sorted(methods))}",
        f"--splits {max(run.split for run in runs) + 1 if runs else 0}",
    ]
    for option, flag in (("preset", "--preset"), ("max_steps", "--steps"), ("n_inducing", "--inducing")):
        values = {options[option] for _, options in known if option in options}
        parts += [f"{flag} {value}" for value in values] if len(values) == 1 else []
    return " ".join(parts)


def _machines(runs: list[Run]) -> str:
    kinds = Counter(
        tuple(str(run.record.get(name, "?")) for name in ("library", "jax", "python", "cores", "processor"))
        for run in runs
    )
    return " ".join(
        f"{count} runs with structured-dgp {library}, jax {jax}, Python {python}, {cores} cores ({processor})."
        for (library, jax, python, cores, processor), count in kinds.items()
    )


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
        text = f"{data} ({entry.mean - entry.paper[0]:+.2f})"
        (reached if entry.mean >= goal else missed).append(text)
    sentences = []
    if reached:
        sentences.append(f"{OURS} is at least the paper's value minus its standard error on {', '.join(reached)}.")
    if missed:
        sentences.append(f"{OURS} is below the paper's value minus its standard error on {', '.join(missed)}.")
    return sentences


def _direct(table: ResultTable) -> list[str]:
    sentences: list[str] = []
    for column in table.columns:
        entries = {data: row[column] for data, row in table.rows.items() if row[column].n}
        for mark, words in (("bold", "the second is better"), ("italic", "the first is better")):
            names = [data for data, entry in entries.items() if mark in entry.marks]
            if names:
                sentences.append(f"{column}: {words} on {', '.join(names)}.")
        open_ones = [data for data, entry in entries.items() if not entry.marks]
        if open_ones:
            sentences.append(f"{column}: a draw, within one standard error, on {', '.join(open_ones)}.")
    return sentences


def _pictures(page: Page, results: Results, folder: Path | None, source: str) -> None:
    drawn = False
    for name, kind in FIGURES.items():
        path = folder / f"{name}.png" if folder is not None else None
        available = path is not None and path.is_file()
        possible = kind.from_runs and any(
            results.runs("interpolation", data, label) for data in results.data for label in ("MF L3", OURS)
        )
        if not (available or possible):
            continue
        if not drawn:
            page.heading("Figures")
            drawn = True
        if kind.from_runs:
            page.picture(kind.draw(Drawing(results=results)), kind.caption)
        elif path is not None:
            page.image(path.read_bytes(), kind.caption)
        page.command(f"sdgp bench figure {name}" + f" --results {source}" * kind.from_runs)
