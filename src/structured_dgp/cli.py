"""The ``sdgp`` command."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from structured_dgp.console import sentences, tell
from structured_dgp.exceptions import InputError
from structured_dgp.experiments import commands

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    help="Deep Gaussian processes with structured posteriors: predictions that know how uncertain they are.\n\n"
    "Start with `sdgp demo`, or with a table of your own: `sdgp fit data.csv --target price`, then "
    "`sdgp predict data.sdgp new.csv`.",
)

app.add_typer(commands.app, name="bench")
app.command()(commands.report)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Seed = Annotated[
    int, typer.Option(min=0, max=2**32 - 1, help="Of everything random: the same seed gives the same numbers.")
]


@app.command()
def fit(
    data: Annotated[Path, typer.Argument(help="A table, CSV or Parquet, with one header line.")],
    target: Annotated[list[str], typer.Option("--target", "-t", help="The column to predict; several if repeated.")],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Model file. [default: DATA.sdgp]")] = None,
    drop: Annotated[list[str] | None, typer.Option(help="A column to leave out; repeat for more.")] = None,
    skip_missing: Annotated[bool, typer.Option("--skip-missing", help="Leave out rows with missing values.")] = False,
    classify: Annotated[bool, typer.Option("--classify", help="The target's values are names of classes.")] = False,
    coupling: Annotated[str, typer.Option(help="star, mf, fc, stripes or arrow.")] = "star",
    layers: Annotated[int, typer.Option(help="Layers, output included; 1 is a sparse GP.")] = 3,
    width: Annotated[int, typer.Option(help="Latent GPs of each hidden layer.")] = 5,
    inducing: Annotated[int, typer.Option(help="Inducing points of each layer.")] = 128,
    likelihood: Annotated[
        str, typer.Option(help="auto, gaussian, heteroscedastic, student_t (outliers) or poisson (counts).")
    ] = "auto",
    preset: Annotated[str, typer.Option(help="default or paper.")] = "default",
    steps: Annotated[int | None, typer.Option(help="Training steps at most. [default: the preset's]")] = None,
    seconds: Annotated[float | None, typer.Option(help="Training ends after this time.")] = None,
    early_stopping: Annotated[
        bool | None,
        typer.Option(
            help="Find the number of steps with rows held out. [default: from 200 rows on]", show_default=False
        ),
    ] = None,
    holdout: Annotated[float, typer.Option(help="Fraction of the rows to keep out and to score the model on.")] = 0.0,
    checkpoint: Annotated[Path | None, typer.Option(help="A folder; an interrupted fit goes on from there.")] = None,
    plots: Annotated[Path | None, typer.Option(help="A folder for pictures.")] = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Train a model on a table and write it to a file.

    All columns but the target are inputs. They must be numbers; scaling is done for you. Words in the target column
    make it a classification. With `--holdout 0.1`, a tenth of the rows is kept out and scored.

    Example: `sdgp fit concrete.csv --target strength --holdout 0.1`
    """
    from structured_dgp.couplings import as_coupling
    from structured_dgp.estimators import DeepGPClassifier, DeepGPRegressor
    from structured_dgp.files import check_output
    from structured_dgp.problems import load_problem
    from structured_dgp.report import holdout_scores, write_pictures

    with sentences():
        problem = load_problem(data, target, drop=drop or [], skip_missing=skip_missing, classify=classify or None)
        train, test = problem.split(holdout, seed)
        output = data.with_suffix(".sdgp") if output is None else output
        check_output(output, {"table": data})
        if plots is not None:
            plots.mkdir(parents=True, exist_ok=True)
        as_coupling(coupling)  # refuses those that a model file cannot hold
        kind = DeepGPClassifier if problem.is_classification else DeepGPRegressor
        estimator = kind(
            coupling=coupling,
            n_layers=layers,
            width=width,
            n_inducing=inducing,
            likelihood=likelihood,
            preset=preset,
            max_steps=steps,
            max_seconds=seconds,
            early_stopping="auto" if early_stopping is None else early_stopping,
            checkpoint=None if checkpoint is None else str(checkpoint),
            random_state=seed,
            verbose=0 if as_json else 1,
        )
        began = time.perf_counter()
        estimator.fit(train.x, train.y)
        facts: dict[str, Any] = {
            "estimator": type(estimator).__name__,
            "rows": train.n_rows,
            "inputs": problem.x.column_names,
            "targets": target,
            "steps": estimator.n_steps_,
            "elbo": estimator.elbo_,
            "seconds": round(time.perf_counter() - began, 1),
        }
        if isinstance(estimator, DeepGPClassifier):
            facts["n_classes"] = len(estimator.classes_)
        estimator.target_names_ = list(target)
        estimator.save(output)
        if test is not None:
            facts["holdout"] = {"rows": test.n_rows, **holdout_scores(estimator, test)}
        if plots is not None:
            facts["plots"] = [str(path) for path in write_pictures(estimator, plots, test or train)]
        facts["model"] = str(output)
    tell(facts, as_json)


@app.command()
def predict(
    model: Annotated[Path, typer.Argument(help="A model file.")],
    data: Annotated[Path, typer.Argument(help="A table with the columns of the model's inputs.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Where predictions go: .csv, .tsv or .parquet.")],
    quantile: Annotated[list[float] | None, typer.Option(help="Quantiles to write. [default: 0.05 0.95]")] = None,
    keep: Annotated[list[str] | None, typer.Option(help="A column of the table to copy; repeat for more.")] = None,
    draws: Annotated[int | None, typer.Option(help="Draws of the hidden layers; fewer are faster.")] = None,
    as_json: Json = False,
) -> None:
    """Predict for every row of a table.

    Writes the mean of the target, its standard deviation and quantiles, or the probability of each class, in the
    units of the training data. The table is read piece by piece, so it may be larger than memory; rows keep their
    order, and the output appears under its name only when it is complete.

    Example: `sdgp predict concrete.sdgp new.csv -o predictions.csv`
    """
    from structured_dgp.estimators import load_estimator
    from structured_dgp.files import check_output
    from structured_dgp.streaming import predict_table
    from structured_dgp.tables import check_suffix

    with sentences():
        check_output(output, {"table": data, "model": model})
        check_suffix(output)
        estimator = load_estimator(model)
        if draws is not None:
            estimator.n_draws = draws
        began = time.perf_counter()
        with Console(stderr=True).status("predicting") as status:
            rows = predict_table(
                estimator,
                data,
                output,
                quantiles=quantile or [0.05, 0.95],
                keep=keep or [],
                report=lambda done: status.update(f"predicting: {done:,} rows"),
            )
        facts = {"rows": rows, "seconds": round(time.perf_counter() - began, 1), "output": str(output)}
    tell(facts, as_json)


@app.command()
def info(model: Annotated[Path, typer.Argument(help="A model file.")], as_json: Json = False) -> None:
    """Say what a model file holds."""
    from structured_dgp.estimators import load_estimator
    from structured_dgp.report import model_facts

    with sentences():
        facts = model_facts(load_estimator(model))
    tell(facts, as_json)


@app.command()
def plot(
    model: Annotated[Path, typer.Argument(help="A model file.")],
    data: Annotated[Path | None, typer.Argument(help="A table with inputs and targets, to judge predictions.")] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="A folder for the pictures.")] = Path("plots"),
    as_json: Json = False,
) -> None:
    """Draw a model: training history, which inputs matter, covariances; and, with a table, how good it predicts."""
    from structured_dgp.estimators import DeepGPClassifier, load_estimator
    from structured_dgp.problems import load_problem
    from structured_dgp.report import write_pictures

    with sentences():
        estimator = load_estimator(model)
        judged = None
        if data is not None:
            if not estimator.target_names_:
                raise InputError(f"{model.name} does not know the names of its targets: leave out the table.")
            classes = estimator.classes_ if isinstance(estimator, DeepGPClassifier) else None
            judged = load_problem(
                data,
                estimator.target_names_,
                inputs=estimator.feature_names(),
                classify=classes is not None,
                classes=classes,
            )
        paths = write_pictures(estimator, output, judged)
    tell({"pictures": [str(path) for path in paths]}, as_json)


@app.command()
def demo(
    folder: Annotated[Path, typer.Option(help="Where the page goes.")] = Path("demo-output"),
    steps: Annotated[int, typer.Option(help="Training steps of each model.")] = 600,
    inducing: Annotated[int, typer.Option(help="Inducing points of each layer.")] = 64,
) -> None:
    """Fit a sparse GP, a mean-field and a structured deep GP to embedded data, and write a page that compares them."""
    from structured_dgp.demo import run

    with sentences():
        page = run(folder, inducing, steps)
    typer.echo(f"Page: {page.resolve().as_uri() if sys.stdout.isatty() else page}")


def main() -> None:
    """Entry point of the command."""
    app()
