"""``sdgp bench`` and ``sdgp report``: the paper's experiments from the command line."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from structured_dgp.console import sentences, tell
from structured_dgp.exceptions import InputError

app = typer.Typer(no_args_is_help=True, help="The paper's experiments: runs, tables and figures.")

T = TypeVar("T")
STORE = Path("results/runs.sqlite")
SMALL = ("energy", "concrete")

Results = Annotated[Path, typer.Option("--results", help="Store of runs, or a CSV file or folder exported from one.")]
DataDir = Annotated[str | None, typer.Option(help="A folder with NAME.csv of the data sets. [default: $SDGP_DATA]")]


def _split(text: str, option: str) -> list[str]:
    """The parts of a list with commas, each once."""
    parts = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not parts:
        raise InputError(f"{option} names nothing.")
    return parts


def parse_splits(text: str) -> list[int]:
    """``"10"``: the first ten; ``"3-5"``: 3, 4 and 5; ``"0,7"``: these two."""
    numbers: list[int] = []
    try:
        if "," in text or "-" in text:
            for part in _split(text, "--splits"):
                first, _, last = part.partition("-")
                found = range(int(first), int(last or first) + 1)
                if not found:
                    raise InputError(f"--splits {text}: there is no split in {part}.")
                numbers += found
        else:
            numbers = list(range(int(text)))
    except ValueError as error:
        raise InputError(f"--splits {text}: use a number such as 10, a range such as 0-9, or a list.") from error
    if not numbers:
        raise InputError(f"--splits {text}: there is no split in it.")
    return list(dict.fromkeys(numbers))


@app.command()
def run(
    experiment: Annotated[str, typer.Option(help="interpolation, extrapolation, or both, with a comma.")] = (
        "interpolation,extrapolation"
    ),
    data: Annotated[str, typer.Option(help="Data sets by name, or CSV files, with commas.")] = ",".join(SMALL),
    methods: Annotated[
        str,
        typer.Option(
            help="exact, sgp, mf, star, fc, chain, fc_sampled, sghmc, boosting, forest, with commas; -l2 for two "
            "layers, -adam for Adam."
        ),
    ] = "sgp,mf-l3,star-l3",
    splits: Annotated[str, typer.Option(help="10: the first ten; 0-9: a range; 0,7: a list.")] = "10",
    preset: Annotated[str, typer.Option(help="default or paper.")] = "default",
    steps: Annotated[int | None, typer.Option(help="Training steps, without early stopping.")] = None,
    inducing: Annotated[int | None, typer.Option(help="Inducing points of each layer.")] = None,
    jobs: Annotated[int, typer.Option(help="Processes; each has one thread if there are several.")] = 1,
    cluster: Annotated[str | None, typer.Option(help="Address of a Dask scheduler to run on instead.")] = None,
    data_dir: DataDir = None,
    store: Annotated[Path, typer.Option(help="Where results are kept.")] = STORE,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Make all runs that are not there yet.

    Can be killed at any time: what is finished stays, and the next call goes on. A run that fails is recorded with its
    error, does not stop the others, and is tried again by the next call.

    Example: `sdgp bench run --data energy,concrete --methods sgp,mf-l3,star-l3,boosting --splits 3 --jobs 2`
    """
    from structured_dgp.experiments.data import check_name
    from structured_dgp.experiments.methods import parse_method
    from structured_dgp.experiments.store import Store
    from structured_dgp.experiments.sweep import plan, run_sweep
    from structured_dgp.training.settings import as_settings

    with sentences():
        as_settings(preset)
        for option, number in (("--steps", steps), ("--inducing", inducing)):
            if number is not None and number < 1:
                raise InputError(f"{option} must be at least 1; got {number}.")
        if data_dir is not None and not Path(data_dir).is_dir():
            raise InputError(f"--data-dir {data_dir} is not a folder.")
        for name in _split(data, "--data"):
            check_name(name)
        options: dict[str, Any] = {"preset": preset, "max_steps": steps, "n_inducing": inducing}
        chosen = [parse_method(name, **options) for name in _split(methods, "--methods")]
        tasks = plan(_split(experiment, "--experiment"), _split(data, "--data"), chosen, parse_splits(splits))
        done, failed = run_sweep(tasks, store, n_jobs=jobs, cluster=cluster, data_dir=data_dir, verbose=not as_json)
        keys = {task.key for task in tasks}
        bad = [run for run in Store(store).runs(state="failed") if run.key in keys]
        errors = sorted({str(each.record["error"]) for each in bad})
    facts = {"finished now": done, "were there": len(tasks) - done - failed, "failed": failed, "store": str(store)}
    tell({**facts, **({"errors": errors} if errors else {})}, as_json)
    if failed:
        raise typer.Exit(1)


@app.command()
def table(
    names: Annotated[list[str] | None, typer.Argument(help="1, 2, S1, S2, S3, scores-interpolation ... [all]")] = None,
    results: Results = STORE,
    data: Annotated[str | None, typer.Option(help="Only these data sets, with commas.")] = None,
    splits: Annotated[str | None, typer.Option(help="Only these splits: 3 (the first three), 0-4, or 0,7.")] = None,
    form: Annotated[str, typer.Option("--format", help="text, markdown, latex or html.")] = "text",
    output: Annotated[Path | None, typer.Option("--output", "-o", help="A file, instead of the terminal.")] = None,
) -> None:
    """The paper's tables from the runs that are there, ours beside the paper's.

    Example: `sdgp bench table 1 S1 --format markdown`
    """
    from structured_dgp.experiments import tables
    from structured_dgp.experiments.formats import FORMATS
    from structured_dgp.experiments.store import read_runs
    from structured_dgp.files import replacing

    with sentences():
        if form not in FORMATS:
            raise InputError(f"unknown format {form!r}: use one of {', '.join(FORMATS)}.")
        kept = set(_split(data, "--data")) if data is not None else None
        numbers = set(parse_splits(splits)) if splits is not None else None
        runs = [
            run
            for run in read_runs(results)
            if (kept is None or run.data in kept) and (numbers is None or run.split in numbers)
        ]
        if not runs:
            raise InputError(f"{results} holds no runs of these data sets and splits.")
        found = tables.Results(runs)
        texts = [FORMATS[form](_known(tables.TABLES, name, "table")(found)) for name in names or tables.TABLES]
        if output is not None:
            output.parent.mkdir(parents=True, exist_ok=True)
            with replacing(output) as file:
                file.write(("\n\n".join(texts) + "\n").encode())
    if output is None:
        typer.echo("\n\n".join(texts))


@app.command()
def figure(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="covariance, structure, convergence, calibration, runtime, elbo, normality. [all]"),
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="A folder.")] = Path("results/figures"),
    results: Results = STORE,
    data: Annotated[str | None, typer.Option(help="Train on this data set. [default: the paper's]")] = None,
    steps: Annotated[int | None, typer.Option(help="Training steps. [default: the figure's own]")] = None,
    inducing: Annotated[int | None, typer.Option(help="Inducing points of each layer. [default: the figure's]")] = None,
    data_dir: DataDir = None,
) -> None:
    """The paper's figures, as SVG and PNG. Those that train models take some minutes each.

    Example: `sdgp bench figure covariance runtime`
    """
    from structured_dgp.experiments.figures import FIGURES, Drawing, write_figure
    from structured_dgp.experiments.store import read_runs
    from structured_dgp.experiments.tables import Results as Found

    with sentences():
        kinds = {name: _known(FIGURES, name, "figure") for name in names or FIGURES}
        runs = Found(read_runs(results) if any(kind.from_runs for kind in kinds.values()) else [])
        given = {"--data": data, "--steps": steps, "--inducing": inducing, "--data-dir": data_dir}
        trained = [text for flag, value in given.items() if value is not None for text in (flag, str(value))]
        for name, kind in kinds.items():
            flags = ["--results", str(results)] if kind.from_runs else trained
            drawn = kind.draw(Drawing(data, data_dir, inducing, steps, runs))
            for path in write_figure(name, drawn, output, shlex.join(["sdgp", "bench", "figure", name, *flags])):
                typer.echo(path)


@app.command()
def export(
    output: Annotated[Path, typer.Argument(help="A CSV file, or a folder for one of each data set.")] = Path("results"),
    store: Annotated[Path, typer.Option(help="Store of runs.")] = STORE,
) -> None:
    """Write all finished runs as CSV, from which tables and the report can be made as well.

    Runs that were exported there before, and that the store does not hold, stay.
    """
    from structured_dgp.experiments.store import Store

    with sentences():
        if not store.is_file():
            raise InputError(f"{store} is not there: make runs with `sdgp bench run`.")
        paths = Store(store).export(output)
    typer.echo("\n".join(str(path) for path in paths))


@app.command("import")
def import_runs(
    sources: Annotated[list[Path], typer.Argument(help="Exported folders or CSV files, or other stores.")],
    store: Annotated[Path, typer.Option(help="The store that takes them in.")] = STORE,
) -> None:
    """Take finished runs into a store, so that a sweep goes on from them, on another machine, too.

    Example: `sdgp bench import results` and then `sdgp bench run` makes only what was not exported.
    """
    from structured_dgp.experiments.store import Store, read_runs

    with sentences():
        runs = [run for source in sources for run in read_runs(source)]
        results = Store(store)
        new = sum(results.add(run) for run in runs)
    typer.echo(f"{new} of {len(runs)} runs are new in {store}.")


def report(
    results: Results = STORE,
    figures: Annotated[Path, typer.Option(help="Folder with figures from `sdgp bench figure`.")] = Path(
        "results/figures"
    ),
    output: Annotated[Path, typer.Option("--output", "-o", help="The page.")] = Path("results/report.html"),
) -> None:
    """One page with all tables and figures, ours beside the paper's, and how to repeat each number."""
    from structured_dgp.experiments.page import make_report
    from structured_dgp.experiments.store import read_failures, read_runs
    from structured_dgp.files import replacing

    with sentences():
        failed = read_failures(results)
        page = make_report(read_runs(results, none_allowed=bool(failed)), figures, results.as_posix(), failed)
        output.parent.mkdir(parents=True, exist_ok=True)
        with replacing(output) as file:
            file.write(page.render().encode())
    typer.echo(f"Page: {output}")


def _known(choices: dict[str, T], name: str, what: str) -> T:
    if name not in choices:
        raise InputError(f"unknown {what} {name!r}: use one of {', '.join(choices)}.")
    return choices[name]
