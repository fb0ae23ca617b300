"""The command: tables in, models and predictions out, and a sentence for everything that is wrong."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pyarrow.csv as pa_csv
import pyarrow.parquet as pa_parquet
import pytest
from typer.testing import CliRunner, Result

from structured_dgp import DeepGPRegressor, InputError, StructuredDGPWarning, load_estimator
from structured_dgp.cli import app
from structured_dgp.kernels import Linear
from structured_dgp.problems import load_problem
from structured_dgp.report import pictures
from structured_dgp.tables import as_numbers, column_names, read_table, stream_table

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
    assert facts["estimator"] == "DeepGPRegressor"
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
    facts = json.loads(run("fit", data, "-t", "price", *QUICK, "--json").stdout)
    assert (facts["estimator"], facts["n_classes"]) == ("DeepGPClassifier", 2)
    assert run("predict", tmp_path / "data.sdgp", data, "-o", tmp_path / "out.csv").exit_code == 0
    found = pa_csv.read_csv(tmp_path / "out.csv").to_pydict()
    assert list(found) == ["price", "p_cheap", "p_dear"]
    assert set(found["price"]) <= {"dear", "cheap"}
    np.testing.assert_allclose(np.add(found["p_cheap"], found["p_dear"]), 1.0, rtol=1e-9)


def test_several_targets(tmp_path: Path) -> None:
    data = write_csv(tmp_path / "data.csv", columns(unit_cost=-1000.0 * Y))
    targets = ["price", "unit_cost"]
    options = ["-t", "price", "-t", "unit_cost", "--holdout", "0.2", *QUICK]
    scores = json.loads(run("fit", data, *options, "-o", tmp_path / "m", "--json").stdout)["holdout"]["targets"]
    assert run("predict", tmp_path / "m", data, "-o", tmp_path / "out.csv", "--quantile", "0.5").exit_code == 0
    found = pa_csv.read_csv(tmp_path / "out.csv").to_pydict()
    assert list(found) == [f"{name}{end}" for name in targets for end in ("", "_std", "_q50")]
    held_out = load_problem(data, targets).split(0.2, 0)[1]
    assert held_out is not None
    for p, name in enumerate(targets):  # each in its units
        mean = np.array(found[name])[np.isin(Y, held_out.y[:, 0])]
        assert scores[name]["rmse"] == pytest.approx(np.sqrt(np.mean((mean - held_out.y[:, p]) ** 2)), rel=1e-6)
    assert "holdout targets unit_cost log likelihood" in run("fit", data, *options).stdout


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
    "text": ({"a": ["north"] * 40}, [], "column 'a' holds text ('north' in data row 1)"),
    "text among numbers": ({"a": [*X[:9, 0], "north", *X[10:, 0]]}, [], "text ('north' in data row 10)"),
    "text, rows left out": ({"a": ["NA", "x", *X[2:, 0]]}, ["--skip-missing"], "text ('x' in data row 2)"),
    "text among target numbers": (
        {"price": [*Y[:3], "unknown", *Y[4:]]},
        [],
        "column 'price' holds text ('unknown' in data row 4), but most of its values look like numbers",
    ),
    "numbers with commas": ({"price": [f'"1,{k}.5"' for k in range(40)]}, [], "look like numbers: write all of them"),
    "no name": ({"": range(40)}, [], "data.csv has a column without a name, as the row index of a pandas frame is"),
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
    "no place": ({}, ["-o", "x" * 250 + ".sdgp"], "cannot be written to . (File name too long)"),
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


def test_a_stray_word_can_be_a_class_and_classes_are_compared_as_they_are_written(tmp_path: Path) -> None:
    labels = ["01", "2", "x", "2"] * 10
    data = write_csv(tmp_path / "data.csv", columns(price=labels))
    assert "look like numbers" in run("fit", data, "-t", "price", *QUICK).stderr
    assert load_problem(data, ["price"], classify=True).y.tolist() == labels
    classes = np.array(["01", "2", "x"])
    judged = write_csv(tmp_path / "judged.csv", columns(price=["01", "2"] * 20))
    assert load_problem(judged, ["price"], inputs=["a"], classify=True, classes=classes).y.tolist() == ["01", "2"] * 20
    pa_parquet.write_table(read_table(judged), tmp_path / "judged.parquet")
    problem = load_problem(
        tmp_path / "judged.parquet", ["price"], inputs=["a"], classify=True, classes=np.array([1, 2])
    )
    assert problem.y.tolist() == [1, 2] * 20
    for known, message in (
        (np.array(["01", "2"]), "'x' in data row 3, which is not a class of the model; these are '01', '2'"),
        (np.array([1, 2]), "holds text ('x' in data row 3): write it as numbers"),
    ):
        with pytest.raises(InputError) as error:
            load_problem(data, ["price"], inputs=["a"], classify=True, classes=known)
        assert message in str(error.value)


def test_a_table_to_judge_a_regressor_by_holds_numbers(folder: Path, tmp_path: Path) -> None:
    data = write_csv(tmp_path / "data.csv", columns(price=[*Y[:3], "unknown", *Y[4:]]))
    result = run("plot", folder / "data.sdgp", data, "-o", tmp_path / "plots")
    assert result.exit_code == 1
    assert "column 'price' holds text ('unknown' in data row 4): write it as numbers." in result.stderr


def test_marks_of_missing_values_are_those_of_pandas(tmp_path: Path) -> None:
    marks = ["n/a", "N/A", "NA", "#N/A", "#NA", "nan", "-nan", "NaN", "null", "NULL", "<NA>", "None", ""]
    data = write_csv(tmp_path / "data.csv", {"a": [1.5, *marks], "b": range(14)})
    assert pd.read_csv(data)["a"].isna().tolist() == [False] + [True] * 13
    assert read_table(data)["a"].is_null().to_pylist() == [False] + [True] * 13
    (piece,) = stream_table(data, ["a"])
    assert piece["a"].is_null().to_pylist() == [False] + [True] * 13


def test_an_empty_line_of_a_single_column_is_a_missing_value(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "one.csv").write_text("a\n1\n\n3\n")
    with pytest.raises(InputError, match="1 missing or infinite values, the first in data row 2"):
        as_numbers(read_table(tmp_path / "one.csv"))
    (piece,) = stream_table(tmp_path / "one.csv", ["a"])
    assert piece["a"].to_pylist() == [1.0, None, 3.0]
    (tmp_path / "two.csv").write_text("a,b\n1,2\n\n3,4\n")
    assert read_table(tmp_path / "two.csv")["a"].to_pylist() == [1, 3]


def test_the_row_index_of_a_frame_is_no_input(tmp_path: Path) -> None:
    frame = pd.DataFrame(columns()).sample(frac=0.5, random_state=0)
    for index, name in ((frame.index, "__index_level_0__"), (pd.Index(frame.index, name="id"), "id")):
        frame.set_index(index).to_parquet(tmp_path / "data.parquet")
        assert name in column_names(tmp_path / "data.parquet")
        with pytest.warns(StructuredDGPWarning, match=f"'{name}' is left out, as it is the row index"):
            problem = load_problem(tmp_path / "data.parquet", ["price"])
        assert problem.x.column_names == ["a", "b"]
        assert load_problem(tmp_path / "data.parquet", ["price"], drop=[name]).x.column_names == ["a", "b"]
    frame.to_csv(tmp_path / "data.csv")
    assert load_problem(tmp_path / "data.csv", ["price"], drop=[""]).x.column_names == ["a", "b"]
    with pytest.raises(InputError, match="--drop ''"):
        load_problem(tmp_path / "data.csv", ["price"])


def test_separators_are_found_beside_quotes_and_in_compressed_files(tmp_path: Path) -> None:
    text = '"length, width, height";b\n1;2\n'
    (tmp_path / "data.csv").write_text(text)
    (tmp_path / "data.csv.gz").write_bytes(gzip.compress(text.encode()))
    for name in ("data.csv", "data.csv.gz"):
        assert read_table(tmp_path / name).to_pydict() == {"length, width, height": [1], "b": [2]}


def test_long_integers_are_rounded(tmp_path: Path) -> None:
    data = write_csv(tmp_path / "data.csv", columns(b=[2**53 + 2 * k + 1 for k in range(40)]))
    problem = load_problem(data, ["price"])
    assert problem.x["b"].to_pylist() == [float(2**53 + 2 * k + 1) for k in range(40)]
    (piece,) = stream_table(data, ["b"])
    assert piece["b"].to_pylist() == problem.x["b"].to_pylist()


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
        (("predict", model, data, "-o", tmp_path / "out.xlsx"), "cannot be written to out.xlsx: end its name in .csv"),
        (("predict", model, data, "-o", tmp_path / "out.csv.gz"), "cannot be written to out.csv.gz"),
    ]:
        result = run(*arguments)
        assert result.exit_code == 1
        assert message in result.stderr
    (tmp_path / "twice.csv").write_text("a,a,price\n1,2,3\n")
    assert "two columns named 'a'" in run("fit", tmp_path / "twice.csv", "-t", "price").stderr
    (tmp_path / "empty.csv").write_text("")
    assert "cannot be read" in run("fit", tmp_path / "empty.csv", "-t", "price").stderr
    assert run("predict").exit_code == 2
    seed = run("fit", data, "-t", "price", "--seed", 5_000_000_000)
    assert seed.exit_code == 2
    assert "4294967295" in seed.stderr


def test_a_pipe_is_not_replaced_by_a_file(folder: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.csv")
    for command in (
        ("predict", folder / "data.sdgp", folder / "data.csv", "-o", tmp_path / "pipe.csv"),
        ("fit", folder / "data.csv", "-t", "price", "-o", tmp_path / "pipe.csv"),
    ):
        result = run(*command)
        assert result.exit_code == 1
        assert "is a pipe or a device, which a file would replace" in result.stderr
    with pytest.raises(InputError, match="a pipe or a device"):
        load_estimator(folder / "data.sdgp").save(tmp_path / "pipe.csv")
    assert (tmp_path / "pipe.csv").is_fifo()


def test_what_is_asked_for_twice_is_written_once_and_tsv_has_tabs(folder: Path, tmp_path: Path) -> None:
    twice = ["--keep", "a", "--keep", "a", "--quantile", "0.5", "--quantile", "0.5"]
    result = run("predict", folder / "data.sdgp", folder / "data.csv", "-o", tmp_path / "out.tsv", *twice)
    assert result.exit_code == 0, result.output
    found = pd.read_csv(tmp_path / "out.tsv", sep="\t")
    assert list(found) == ["a", "price", "price_std", "price_q50"]
    np.testing.assert_allclose(found["a"], X[:, 0])


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


def test_other_units_are_one_warning_with_the_columns_name(folder: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("structured_dgp.streaming.ROWS", 7)  # 40 rows in 6 pieces
    far = X[:, 1] * np.linspace(100.0, 300.0, 40)
    for values, expected in (
        (100_000.0 + far, 1),  # everywhere, and farther in each piece
        (X[:, 1] + 100_000.0 * (np.arange(40) == 0), 0),  # in the first row
        (X[:, 1] + 100_000.0 * (np.arange(40) >= 35), 0),  # in the whole last piece
    ):
        data = write_csv(tmp_path / "new.csv", columns(b=values))
        result = run("predict", folder / "data.sdgp", data, "-o", tmp_path / "out.csv")
        assert result.exit_code == 0, result.output
        assert result.stderr.count("warning: column 'b' lies more than 30 standard deviations") == expected
        assert result.stderr.count("warning") == expected


def test_a_picture_that_does_not_apply_is_left_out(tmp_path: Path) -> None:
    data = write_csv(tmp_path / "data.csv", {"a": X[:, 0], "price": Y})
    problem = load_problem(data, ["price"])
    model = DeepGPRegressor(n_layers=1, n_inducing=4, max_steps=2, random_state=0, kernel=Linear(1.0))
    model.fit(problem.x, pd.Series(problem.y, name="price")).save(tmp_path / "model.sdgp")
    result = run("plot", tmp_path / "model.sdgp", data, "-o", tmp_path / "plots", "--json")
    assert result.exit_code == 0, result.output
    assert "warning: there is no picture 'inputs': a Linear has no lengthscales." in result.stderr
    names = {"history", "covariance", "calibration", "pit", "error", "prediction", "layers"}
    assert {Path(path).stem for path in json.loads(result.stdout)["pictures"]} == names
    (axes,) = pictures(model, problem)["prediction"]().axes
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("a", "price")
    plt.close(axes.figure)


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
