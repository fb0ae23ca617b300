"""The command: tables in, models and predictions out, and a sentence for everything that is wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.csv as pa_csv
import pyarrow.parquet as pa_parquet
import pytest
from typer.testing import CliRunner, Result

from structured_dgp import load_estimator
from structured_dgp.cli import app
from structured_dgp.problems import load_problem
from structured_dgp.tables import column_names, read_table, stream_table

RNG = np.random.default_rng(0)
X = RNG.standard_normal((40, 2)) * [1.0, 30.0]
Y = 10.0 + np.sin(X[:, 0])
QUICK = ["--layers", "2", "--width", "1", "--inducing", "4", "--steps", "3"]


def run(*arguments: Any) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def write_csv(path: Path, columns: dict[str, Any], separator: str = ",") -> Path:
    lines = [separator.join(columns), *(separator.join(map(str, row)) for row in zip(*columns.values(), strict=True))]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def columns(**changes: Any) -> dict[str, Any]:
    return {"a": X[:, 0], "b": X[:, 1], "price": Y, **changes}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a table ``data.csv`` and a model ``data.sdgp``."""
    folder = tmp_path_factory.mktemp("cli")
    write_csv(folder / "data.csv", columns())
    result = run("fit", folder / "data.csv", "-t", "price", "--holdout", "0.2", *QUICK, "--json")
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert facts["rows"] == 32
    assert facts["inputs"] == ["a", "b"]
    assert facts["holdout"]["rows"] == 8
    assert np.isfinite(facts["holdout"]["log_likelihood"])
    return folder


def test_predictions_are_the_estimators_in_the_order_of_the_rows(folder: Path, tmp_path: Path) -> None:
    model = load_estimator(folder / "data.sdgp")
    result = run(
        "predict", folder / "data.sdgp", folder / "data.csv", "-o", tmp_path / "out.csv", "--keep", "a", "--json"
    )
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["rows"] == 40
    found = pa_csv.read_csv(tmp_path / "out.csv").to_pydict()
    assert list(found) == ["a", "price", "price_std", "price_q5", "price_q95"]
    table = read_table(folder / "data.csv").select(["a", "b"])
    mean, std = model.predict(table, return_std=True)
    np.testing.assert_allclose(found["price"], mean, rtol=1e-9)
    np.testing.assert_allclose(found["price_std"], std, rtol=1e-9)
    np.testing.assert_allclose(found["price_q5"], model.predict_quantiles(table, [0.05])[:, 0], rtol=1e-9)
    np.testing.assert_allclose(found["a"], X[:, 0])


def test_parquet_in_and_out(folder: Path, tmp_path: Path) -> None:
    pa_parquet.write_table(read_table(folder / "data.csv"), tmp_path / "data.parquet")
    for data in (folder / "data.csv", tmp_path / "data.parquet"):
        assert run("predict", folder / "data.sdgp", data, "-o", tmp_path / f"{data.suffix}.parquet").exit_code == 0
    first, second = (pa_parquet.read_table(tmp_path / f"{kind}.parquet") for kind in (".csv", ".parquet"))
    assert first.equals(second)


def test_a_table_in_many_pieces_is_the_same_table(folder: Path, monkeypatch: Any) -> None:
    whole = read_table(folder / "data.csv").select(["b", "a"])
    monkeypatch.setattr("structured_dgp.tables.BLOCK_BYTES", 200)
    pieces = list(stream_table(folder / "data.csv", ["b", "a"]))
    assert len(pieces) > 5
    joined = np.concatenate([np.asarray(piece) for piece in pieces])
    np.testing.assert_array_equal(joined, np.asarray(whole))


def test_columns_are_found_by_name_not_by_place(folder: Path, tmp_path: Path) -> None:
    write_csv(tmp_path / "turned.csv", {"note": ["x"] * 40, "b": X[:, 1], "a": X[:, 0]}, separator=";")
    assert column_names(tmp_path / "turned.csv") == ["note", "b", "a"]
    for data, out in ((folder / "data.csv", "first.csv"), (tmp_path / "turned.csv", "second.csv")):
        assert run("predict", folder / "data.sdgp", data, "-o", tmp_path / out).exit_code == 0
    assert (tmp_path / "first.csv").read_text() == (tmp_path / "second.csv").read_text()


def test_text_in_the_target_is_a_classification(tmp_path: Path) -> None:
    data = write_csv(tmp_path / "data.csv", columns(price=np.where(X[:, 0] > 0, "dear", "cheap")))
    assert run("fit", data, "-t", "price", *QUICK).exit_code == 0
    assert run("predict", tmp_path / "data.sdgp", data, "-o", tmp_path / "out.csv").exit_code == 0
    found = pa_csv.read_csv(tmp_path / "out.csv").to_pydict()
    assert list(found) == ["price", "p_cheap", "p_dear"]
    assert set(found["price"]) <= {"dear", "cheap"}
    np.testing.assert_allclose(np.add(found["p_cheap"], found["p_dear"]), 1.0, rtol=1e-9)


def test_several_targets(tmp_path: Path) -> None:
    data = write_csv(tmp_path / "data.csv", columns(cost=-Y))
    assert run("fit", data, "-t", "price", "-t", "cost", *QUICK, "-o", tmp_path / "m").exit_code == 0
    assert run("predict", tmp_path / "m", data, "-o", tmp_path / "out.csv", "--quantile", "0.5").exit_code == 0
    names = list(pa_csv.read_csv(tmp_path / "out.csv").to_pydict())
    assert names == ["price", "price_std", "price_q50", "cost", "cost_std", "cost_q50"]


def test_info_and_plot(folder: Path, tmp_path: Path) -> None:
    facts = json.loads(run("info", folder / "data.sdgp", "--json").stdout)
    assert facts["inputs"] == ["a", "b"]
    assert facts["targets"] == ["price"]
    assert facts["coupling"] == "star"
    assert "inducing points" in run("info", folder / "data.sdgp").stdout
    result = run("plot", folder / "data.sdgp", folder / "data.csv", "-o", tmp_path / "plots", "--json")
    assert result.exit_code == 0, result.output
    pictures = [Path(path) for path in json.loads(result.stdout)["pictures"]]
    assert {path.stem for path in pictures} == {"history", "inputs", "covariance", "calibration", "pit", "error"}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in pictures)


BAD_TABLES: dict[str, tuple[dict[str, Any], list[str], str]] = {
    "text": ({"a": ["north"] * 40}, [], "column 'a' holds text ('north')"),
    "missing": ({"a": ["", *X[1:, 0]]}, [], "column 'a' has 1 missing or infinite values, the first in data row 1"),
    "no target": ({}, ["-t", "cost"], "has no column 'cost'; its columns are a, b, price"),
    "no such column": ({}, ["--drop", "c"], "has no column 'c'"),
    "nothing left": ({}, ["--drop", "a", "--drop", "b"], "no columns left"),
    "bad coupling": ({}, ["--coupling", "all"], "unknown coupling 'all'"),
    "bad fraction": ({}, ["--holdout", "1.5"], "must be from 0 to below 1"),
    "too large a fraction": ({}, ["--holdout", "0.99"], "0.99 of 40 rows is 40 to hold out"),
    "too small a fraction": ({}, ["--holdout", "0.01"], "at least one is needed"),
    "not a coupling": ({}, ["--coupling", "chain"], "unknown coupling 'chain'"),
    "a target twice": ({}, ["-t", "price", "-t", "price"], "the target 'price' is named twice"),
    "numbers as classes": ({}, ["--classify"], "Unknown label type"),
    "dates as classes": ({"price": ["2020-01-01", "2020-01-02"] * 20}, ["--classify"], "Unknown label type"),
    "no folder": ({}, ["-o", "nowhere/model.sdgp"], "there is no folder nowhere for the output model.sdgp"),
}


@pytest.mark.parametrize("case", BAD_TABLES)
def test_what_cannot_be_fitted_is_said(case: str, tmp_path: Path) -> None:
    changes, options, message = BAD_TABLES[case]
    data = write_csv(tmp_path / "data.csv", columns(**changes))
    target = [] if "-t" in options else ["-t", "price"]
    result = run("fit", data, *target, *options, *QUICK)
    assert result.exit_code == 1
    assert message in result.stderr
    assert result.stderr.startswith("error: ")
    assert not list(tmp_path.glob("*.sdgp"))


def test_rows_with_missing_values_can_be_left_out(tmp_path: Path) -> None:
    data = write_csv(tmp_path / "data.csv", columns(a=["NA", *X[1:, 0]], price=[*Y[:-1], ""]))
    result = run("fit", data, "-t", "price", "--skip-missing", *QUICK, "--json")
    assert json.loads(result.stdout)["rows"] == 38


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"a": ["north", *X[1:, 0]]}, "column 'a' must hold numbers, but line 2 of new.csv has 'north'"),
        ({"a": [*X[:-1, 0], ""]}, "column 'a' has 1 missing or infinite values, the first in data row 40"),
        ({"a": None}, "has no column 'a'; its columns are b, price"),
    ],
)
def test_what_cannot_be_predicted_is_said(changes: dict[str, Any], message: str, folder: Path, tmp_path: Path) -> None:
    table = {name: values for name, values in columns(**changes).items() if values is not None}
    data = write_csv(tmp_path / "new.csv", table)
    result = run("predict", folder / "data.sdgp", data, "-o", tmp_path / "out.csv")
    assert result.exit_code == 1
    assert message in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["new.csv"]


def test_other_mistakes(folder: Path, tmp_path: Path) -> None:
    model, data = folder / "data.sdgp", folder / "data.csv"
    for arguments, message in [
        (("predict", data, data, "-o", tmp_path / "out.csv"), "truncated or damaged, or no file of this library"),
        (("predict", model, tmp_path / "none.csv", "-o", tmp_path / "out.csv"), "there is no file"),
        (("predict", model, data, "-o", data), "would replace the table data.csv"),
        (("predict", model, data, "-o", model), "would replace the model data.sdgp"),
        (("predict", model, data, "-o", folder), "is a folder"),
        (("fit", data, "-t", "price", "-o", data), "would replace the table data.csv"),
        (("info", tmp_path / "none"), "there is no file"),
    ]:
        result = run(*arguments)
        assert result.exit_code == 1
        assert message in result.stderr
    (tmp_path / "twice.csv").write_text("a,a,price\n1,2,3\n")
    assert "two columns named 'a'" in run("fit", tmp_path / "twice.csv", "-t", "price").stderr
    (tmp_path / "empty.csv").write_text("")
    assert "cannot be read" in run("fit", tmp_path / "empty.csv", "-t", "price").stderr
    assert run("predict").exit_code == 2


def test_a_command_advises_only_what_it_can_do(folder: Path, tmp_path: Path) -> None:
    data = write_csv(tmp_path / "new.csv", columns(a=["", *X[1:, 0]]))
    for command in (
        ("predict", folder / "data.sdgp", data, "-o", tmp_path / "out.csv"),
        ("plot", folder / "data.sdgp", data),
    ):
        message = run(*command).stderr
        assert "first in data row 1: fill them in" in message
        assert "--" not in message
    assert "--skip-missing" in run("fit", data, "-t", "price").stderr


def test_truth_values_are_numbers_in_every_command(tmp_path: Path) -> None:
    data = write_csv(tmp_path / "data.csv", columns(b=["true", "false"] * 20))
    assert run("fit", data, "-t", "price", *QUICK).exit_code == 0
    result = run("predict", tmp_path / "data.sdgp", data, "-o", tmp_path / "out.csv")
    assert result.exit_code == 0, result.output
    x = np.column_stack([X[:, 0], [1.0, 0.0] * 20])
    table = pd.DataFrame(x, columns=["a", "b"])
    expected = load_estimator(tmp_path / "data.sdgp").predict(table)
    np.testing.assert_allclose(pa_csv.read_csv(tmp_path / "out.csv")["price"], expected, rtol=1e-6)


def test_a_rare_class_is_never_held_out_and_classes_are_judged(tmp_path: Path) -> None:
    labels = np.array(["common", "usual"] * 19 + ["rare", "single"])
    data = write_csv(tmp_path / "data.csv", columns(price=labels))
    for seed in range(3):
        problem = load_problem(data, ["price"])
        train, test = problem.split(0.5, seed)
        assert test is not None
        assert (train.n_rows, test.n_rows) == (20, 20)
        assert set(train.y) == set(labels)
        np.testing.assert_array_equal(np.sort(np.concatenate([train.y, test.y])), np.sort(labels))
    assert run("fit", data, "-t", "price", "--holdout", "0.3", *QUICK).exit_code == 0
    result = run("plot", tmp_path / "data.sdgp", data, "-o", tmp_path / "plots", "--json")
    assert "calibration" in {Path(path).stem for path in json.loads(result.stdout)["pictures"]}


def test_json_has_no_numbers_that_json_does_not_know(tmp_path: Path) -> None:
    data = write_csv(tmp_path / "data.csv", columns())
    text = run("fit", data, "-t", "price", *QUICK[:-1], "0", "--json").stdout
    assert json.loads(text, parse_constant=pytest.fail)["elbo"] is None


def test_other_units_are_a_warning_with_the_columns_name(folder: Path, tmp_path: Path) -> None:
    data = write_csv(tmp_path / "new.csv", columns(b=X[:, 1] + 100_000.0))
    result = run("predict", folder / "data.sdgp", data, "-o", tmp_path / "out.csv")
    assert result.exit_code == 0
    assert "warning: column 'b' lies about" in result.stderr


def test_help_teaches() -> None:
    for command, example in {
        (): "sdgp fit data.csv --target price",
        ("fit",): "sdgp fit concrete.csv --target strength",
        ("predict",): "sdgp predict concrete.sdgp new.csv -o predictions.csv",
    }.items():
        words = " ".join(run(*command, "--help").stdout.split())
        assert example in words


def test_a_killed_prediction_leaves_nothing_under_the_final_name(folder: Path, tmp_path: Path) -> None:
    rows = np.tile(X, (5000, 1))
    write_csv(tmp_path / "new.csv", {"a": rows[:, 0], "b": rows[:, 1]})
    script = "from structured_dgp.cli import main; main()"
    command = [sys.executable, "-c", script, "predict", str(folder / "data.sdgp"), "new.csv", "-o", "out.csv"]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not any(path.stat().st_size > 0 for path in tmp_path.glob(".out.csv.*.tmp")):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "out.csv").exists()
