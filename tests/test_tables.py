"""The paper's tables from made-up runs whose means, errors and marks are known."""

from __future__ import annotations

import html
import io
import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.colors import to_rgb
from typer.testing import CliRunner

from structured_dgp.baselines import plot_normality
from structured_dgp.cli import app
from structured_dgp.exceptions import InputError
from structured_dgp.experiments import figures, paper
from structured_dgp.experiments.commands import parse_splits
from structured_dgp.experiments.figures import COLORS, Drawing
from structured_dgp.experiments.formats import FORMATS, as_html, as_latex, as_markdown, as_text
from structured_dgp.experiments.methods import method_text, parse_method
from structured_dgp.experiments.page import commands, make_report
from structured_dgp.experiments.store import Run, Store, read_runs
from structured_dgp.experiments.tables import (
    PAPER_LABELS,
    TABLES,
    Entry,
    Pairs,
    Results,
    mark_comparison,
    mark_elbo,
    mark_extrapolation,
    mark_interpolation,
)
from structured_dgp.pages import png_of

matplotlib.use("Agg")
CHROMIUM = shutil.which("chromium")


def a_run(
    label: str, split: int, density: Any, experiment: str = "interpolation", data: str = "boston", **more: Any
) -> Run:
    density = np.asarray(density, np.float64)
    record = {"label": label, "log_likelihood": float(density.mean()), "split_digest": f"{data}{split}", **more}
    return Run(f"{label}-{experiment}-{data}-{split}", experiment, data, "mf", split, "done", record, density)


def some_runs() -> list[Run]:
    """Two splits of three methods, with numbers that are easy to check by hand."""
    runs = []
    for experiment in ("interpolation", "extrapolation"):
        for split, shift in enumerate((0.0, 0.2)):
            base = np.array([-3.0, -2.0, -1.0, -2.0]) + shift
            for label, change in (("SGP", 0.0), ("MF L3", -1.0), ("STAR L3", np.array([0.5, 0.5, 0.5, -2.0]))):
                elbo = {"SGP": None, "MF L3": -500.0 + split, "STAR L3": -300.0 + split}[label]
                runs.append(a_run(label, split, base + change, experiment, elbo=elbo, seconds=2.0))
    return runs


def test_means_errors_and_numbers_of_splits() -> None:
    table = TABLES["1"](Results(some_runs()))
    entry = table.rows["boston"]["STAR L3"]
    values = [-2.125, -1.925]
    assert entry.mean == pytest.approx(np.mean(values))
    assert entry.error == pytest.approx(np.std(values, ddof=1) / np.sqrt(2))
    assert (entry.n, entry.paper) == (2, paper.INTERPOLATION["boston"]["STAR L3"])
    missing = table.rows["boston"]["SGHMC L2"]
    assert (missing.n, missing.paper) == (0, (-2.51, 0.07))


def test_bold_is_as_good_as_the_sparse_gp() -> None:
    rows = TABLES["1"](Results(some_runs())).rows["boston"]
    assert not rows["STAR L3"].marks  # -2.025, the sparse GP -1.9
    assert not rows["MF L3"].marks
    better = [*some_runs(), *(a_run("STAR L2", split, np.full(4, -2.004 + 0.2 * split)) for split in range(2))]
    assert TABLES["1"](Results(better)).rows["boston"]["STAR L2"].marks == {"bold"}


def test_extrapolation_looks_at_both_tasks_and_underlines_what_is_apart() -> None:
    runs = some_runs()
    for split in range(2):
        runs.append(a_run("STAR L2", split, np.full(4, -1.9 + 0.2 * split)))
        runs.append(a_run("STAR L2", split, np.full(4, -1.0 + 0.01 * split), "extrapolation"))
        runs.append(a_run("MF L2", split, np.full(4, -9.0)))
        runs.append(a_run("MF L2", split, np.full(4, -1.0), "extrapolation"))
    rows = TABLES["S1"](Results(runs)).rows["boston"]
    assert rows["STAR L2"].marks == {"bold", "underline"}
    assert not rows["MF L2"].marks  # better away from the data, but not near it


BOLD = {
    "boston": "SGHMC L2, SGHMC L3, MF L2, MF L3, STAR L2, STAR L3",
    "energy": "SGHMC L2, SGHMC L3",  # the paper also has MF L2, whose -0.73 is less than -0.71
    "concrete": "SGHMC L2, SGHMC L3, MF L2, MF L3, STAR L2, STAR L3",
    "wine_red": "SGHMC L2, SGHMC L3, STAR L2, STAR L3",
    "kin8nm": "SGHMC L1, SGHMC L2, SGHMC L3, MF L2, MF L3, STAR L2, STAR L3",
    "power": "SGHMC L1, SGHMC L2, SGHMC L3, MF L2, MF L3, STAR L2, STAR L3",
    "naval": "SGHMC L1",
    "protein": "SGHMC L1, SGHMC L2, SGHMC L3, MF L2, MF L3, STAR L2, STAR L3",
}
BOLD_IN_BOTH = {
    "boston": "MF L2, MF L3, STAR L2, STAR L3",
    "energy": "",
    "concrete": "MF L2, MF L3, STAR L2, STAR L3",
    "wine_red": "STAR L2, STAR L3",
    "kin8nm": "SGHMC L1, SGHMC L2, SGHMC L3, MF L2, MF L3, STAR L2, STAR L3",
    "power": "",
    "naval": "",
    "protein": "SGHMC L1, SGHMC L2, SGHMC L3, STAR L3",
}


UNDERLINED = {
    "concrete": "STAR L2, STAR L3",  # the paper has STAR L3 only, but in table 1 -3.04(0.02) is apart from -3.09(0.02)
    "kin8nm": BOLD_IN_BOTH["kin8nm"],
    "protein": BOLD_IN_BOTH["protein"],
}
"""No others."""


def with_mark(mark: str, entries: dict[str, Entry]) -> str:
    return ", ".join(label for label, entry in entries.items() if mark in entry.marks)


def with_base(entries: dict[str, Entry], base: str) -> Pairs:
    return {label: (entry, entries[base]) for label, entry in entries.items() if label != base}


@pytest.mark.parametrize("data", list(BOLD))
def test_the_papers_likelihoods_are_marked_as_in_the_paper(data: str) -> None:
    def entries(numbers: dict[str, paper.Cell]) -> dict[str, Entry]:
        return {label: Entry(*numbers[theirs], n=10) for label, theirs in PAPER_LABELS.items()}

    near, away = entries(paper.INTERPOLATION[data]), entries(paper.EXTRAPOLATION[data])
    assert with_mark("bold", mark_interpolation(near, with_base(near, "SGP"))) == BOLD[data]
    marked = mark_extrapolation(away, with_base(away, "SGP"), with_base(near, "SGP"))
    assert with_mark("bold", marked) == BOLD_IN_BOTH[data]
    assert with_mark("underline", marked) == UNDERLINED.get(data, "")


COMPARED = {  # data set: columns of table 2, then those of table S2; b is bold, i italic, - neither
    "boston": "b- bbbbb",
    "energy": "bb bbbbb",
    "concrete": "bb -bbbb",
    "wine_red": "bb bbbbb",
    "kin8nm": "ii i-bbi",
    "power": "-b -bbb-",
    "naval": "bb b-iib",
    "protein": "-- bi-ii",
}


@pytest.mark.parametrize("data", list(COMPARED))
def test_the_papers_comparisons_are_marked_as_in_the_paper(data: str) -> None:
    signs = {frozenset(): "-", frozenset({"bold"}): "b", frozenset({"italic"}): "i"}
    rows = []
    for numbers in (paper.STAR_BEATS[data], paper.DIFFERENCES[data]):
        draws = {name: 0.0 if "dif" in name else 0.5 for name in numbers}
        rows.append("".join(signs[mark_comparison(Entry(*numbers[n], n=10), draws[n]).marks] for n in numbers))
    assert " ".join(rows) == COMPARED[data]
    elbo = {label: Entry(*cell, n=10) for label, cell in paper.ELBO[data].items()}
    assert with_mark("bold", mark_elbo(elbo, with_base(elbo, "MF"))) == "FC"


def test_marks_compare_the_splits_that_both_have() -> None:
    def marks(others: Sequence[float], splits: Sequence[int]) -> list[frozenset[str]]:
        """Of STAR, with -20 on some splits, where the sparse GP and mean field have other values on the first four."""
        runs = []
        for experiment in ("interpolation", "extrapolation"):
            for split, value in enumerate(others):
                runs += [a_run(label, split, [value], experiment, elbo=value) for label in ("SGP", "MF L3")]
            runs += [a_run("STAR L3", split, [-20.0], experiment, elbo=-20.0) for split in splits]
        return [TABLES[name](Results(runs)).rows["boston"]["STAR L3"].marks for name in ("1", "S1", "S3")]

    # worse on both splits that they share, better than the mean of all, and the other way round
    assert marks((-10.0, -10.0, -90.0, -90.0), (0, 1)) == [frozenset()] * 3
    assert marks((-90.0, -90.0, -10.0, -10.0), (0, 1)) == [{"bold"}, {"bold", "underline"}, {"bold"}]
    # one shared split is not enough
    assert marks((-90.0, -90.0, -90.0, -90.0), (0, 9)) == [frozenset()] * 3
    assert marks((-90.0, -90.0, -90.0, -90.0), (0, 3)) == [{"bold"}, {"bold", "underline"}, {"bold"}]


def test_direct_comparison_counts_test_points_of_the_same_rows() -> None:
    entry = TABLES["2"](Results(some_runs())).rows["boston"]["MF vs STAR"]
    assert (entry.mean, entry.n) == (0.75, 2)  # three of four points, in both splits
    assert entry.marks == {"bold"}
    assert entry.paper == (0.55, 0.04)
    runs = some_runs()
    changed = [
        r
        if r.key != "MF L3-extrapolation-boston-0"
        else a_run("MF L3", 0, r.log_density, "extrapolation", split_digest="x")
        for r in runs
    ]
    with pytest.raises(InputError, match="different rows"):
        TABLES["2"](Results(changed))


def test_natural_gradient_columns_leave_out_runs_with_adam() -> None:
    runs = [*some_runs(), *(a_run("FC L3", split, np.zeros(4), "extrapolation") for split in range(2))]
    assert TABLES["S2"](Results(runs)).rows["boston"]["MF NG vs FC NG"].n == 2
    runs += [a_run("MF L3 Adam", split, np.zeros(4), "extrapolation") for split in range(2)]
    for label in ("FC L3", "MF L3"):
        for run in runs:
            adam = run.record["label"] in (label, "MF L3 Adam")
            run.record["settings"] = {"optimizer": "adam" if adam else "natural"}
        row = TABLES["S2"](Results(runs)).rows["boston"]
        assert row["MF NG vs FC NG"].n == row["MF NG vs FC NG (dif)"].n == 0
        assert row["MF NG vs MF"].n == (2 if label == "FC L3" else 0)


def test_models_trained_with_adam_stand_beside_the_papers_numbers_too() -> None:
    names = ("MF Adam vs STAR Adam", "MF Adam vs STAR Adam (dif)")
    assert not {*TABLES["2"](Results(some_runs())).columns, *TABLES["S2"](Results(some_runs())).columns} & {*names}
    densities = {"MF L3 Adam": [-1.0, -1.0, -1.0, -4.0], "STAR L3 Adam": [0.0, 0.0, -2.0, 0.0]}
    adam = [a_run(label, split, each, "extrapolation") for label, each in densities.items() for split in range(2)]
    results = Results([*some_runs(), *adam])
    fraction, difference = (
        TABLES[table](results).rows["boston"][name] for table, name in zip(("2", "S2"), names, strict=True)
    )
    assert (fraction.mean, fraction.paper) == (0.75, paper.STAR_BEATS["boston"]["MF"])
    assert (difference.mean, difference.paper) == (1.25, paper.DIFFERENCES["boston"]["MF vs STAR (dif)"])


def test_errors_in_tiny_units_are_not_shown_as_nothing() -> None:
    runs = [a_run("SGP", split, [0.0], rmse=(2.5 + split) * 1e-4, crps=0.25) for split in range(2)]
    text = as_text(TABLES["scores-interpolation"](Results(runs)))
    assert "3.00e-04(5.00e-05)" in text
    assert "0.250(0.000)" in text


def test_data_sets_of_the_paper_that_were_not_run_are_missing() -> None:
    table = TABLES["1"](Results(some_runs()))
    assert list(table.rows) == list(paper.INTERPOLATION)
    assert table.rows["naval"]["STAR L3"].n == 0
    own = Results([a_run("SGP", 0, [0.0], data="own")])
    assert list(TABLES["1"](own).rows) == ["own"]


def test_the_report_says_what_to_type() -> None:
    runs = some_runs()
    for run in runs:
        run.record["options"] = {"n_layers": 3, "max_steps": 9}
    runs += [a_run("forest", 4, [0.0], "extrapolation")]
    assert commands(runs, "a/r.sqlite") == [
        "sdgp bench run --experiment interpolation,extrapolation --data boston --methods mf-l3 --splits 2 --steps 9 "
        "--store a/r.sqlite",
        "sdgp bench run --experiment extrapolation --data boston --methods mf --splits 4, --store a/r.sqlite",
    ]


def test_exported_runs_are_imported_before_they_are_repeated(tmp_path: Path) -> None:
    source = tmp_path / "results"
    source.mkdir()
    first, second = commands([a_run("MF L3", 0, [0.0])], str(source))
    assert first == f"sdgp bench import {source}"
    assert second == "sdgp bench run --experiment interpolation --data boston --methods mf --splits 1"


def test_the_papers_comparison_with_sghmc_is_there_beside_another_number_of_layers() -> None:
    runs = [*some_runs(), a_run("SGHMC L2", 0, [0.0] * 4, "extrapolation")]
    for name, other, three, cell in (
        ("2", "SGHMC L2 vs STAR", "SGHMC L3 vs STAR", (0.50, 0.05)),
        ("S2", "SGHMC L2 vs STAR (dif)", "SGHMC L3 vs STAR (dif)", (0.27, 0.15)),
    ):
        row = TABLES[name](Results(runs)).rows["boston"]
        assert (row[other].n, row[other].paper) == (1, None)
        assert (row[three].n, row[three].paper) == (0, cell)


def test_differences_and_elbo() -> None:
    results = Results(some_runs())
    gain = TABLES["S2"](results).rows["boston"]["MF vs STAR (dif)"]
    assert gain.mean == pytest.approx(0.875)
    rows = TABLES["S3"](results).rows["boston"]
    assert rows["STAR L3"].mean == pytest.approx(-299.5)
    assert rows["STAR L3"].marks == {"bold"}
    assert rows["FC L3"].n == 0


def test_the_papers_elbo_with_natural_gradients_stands_beside_ours_with_them() -> None:
    runs = some_runs()
    for run in runs:
        if run.record["label"] == "MF L3":
            run.record["settings"] = {"optimizer": "adam"}
    row = TABLES["S3"](Results(runs)).rows["boston"]
    assert (row["MF L3"].n, row["STAR L3"].n) == (0, 2)
    assert row["MF L3"].paper == (-510.0, 30.0)


def test_only_splits_that_both_have_are_compared() -> None:
    runs = [run for run in some_runs() if not (run.split == 1 and run.record["label"] == "MF L3")]
    assert TABLES["2"](Results(runs)).rows["boston"]["MF vs STAR"].n == 1


def test_runs_with_different_options_do_not_mix() -> None:
    first, *rest = some_runs()
    other = Run("another", first.experiment, first.data, first.method, first.split, "done", first.record)
    with pytest.raises(InputError, match="different options"):
        Results([first, *rest, other])


@pytest.mark.parametrize(
    "change",
    [
        {"options": {"preset": "paper"}},
        {"settings": {"seed": 1, "max_steps": 9}},
        {"data_digest": "other"},
        {"behind": {"parameters": {"n_inducing": 64}}},
    ],
)
def test_splits_with_different_settings_do_not_mix(change: dict[str, Any]) -> None:
    runs = [replace(run, record={**run.record, "settings": {"seed": run.split, "max_steps": 5}}) for run in some_runs()]
    runs = [replace(run, record={**run.record, "behind": {"parameters": {"n_inducing": 128}}}) for run in runs]
    Results(runs)  # another seed is no other setting
    changed = replace(runs[-1], record={**runs[-1].record, **change})
    with pytest.raises(InputError, match="different options or settings"):
        Results([*runs[:-1], changed])


def test_every_format_has_every_number() -> None:
    table = TABLES["2"](Results(some_runs()))
    assert re.search(r"boston +0\.75\(0\.00\)\* \[2\] +–", as_text(table))
    assert "| boston | **0.75(0.00)** [2] | – |" in as_markdown(table)
    assert r"boston & \textbf{0.75(0.00)} [2] & -- \\" in as_latex(table)
    assert "<td><b>0.75(0.00)</b> [2]</td><td>–</td>" in as_html(table)
    for write in FORMATS.values():
        assert "0.55(0.04)" in write(table)


def test_differences_have_as_many_digits_as_the_papers() -> None:
    text = as_text(TABLES["S2"](Results(some_runs())))
    for cell in ("0.036(0.029)", " 0.27(0.15)", " 0.58(0.04)", "0.303(0.108)", " 0.63(0.04)"):
        assert cell in text


def test_one_split_has_no_error() -> None:
    entry = Entry.of([1.0])
    assert (entry.mean, entry.n) == (1.0, 1)
    assert np.isnan(entry.error)


def test_one_split_is_not_marked() -> None:
    results = Results(run for run in some_runs() if run.split == 0)
    for name in ("1", "2", "S1", "S2", "S3"):
        entries = TABLES[name](results).rows["boston"]
        assert any(entry.n == 1 for entry in entries.values())
        assert not any(entry.marks for entry in entries.values())


# --- Names of methods and splits ------------------------------------------------------------------


def test_methods_by_name() -> None:
    assert parse_method("sgp").label == "SGP"
    assert parse_method("star").options == parse_method("star-l3").options == (("n_draws", 1024), ("n_layers", 3))
    deep = parse_method("mf-l2-adam", preset="paper", max_steps=7, n_inducing=9)
    assert deep.label == "MF L2 Adam"
    expected = {"n_layers": 2, "optimizer": "adam", "preset": "paper", "max_steps": 7, "early_stopping": False}
    assert dict(deep.options) == {**expected, "n_inducing": 9, "n_draws": 1024}
    assert parse_method("boosting", max_steps=7).options == ()
    sampled = {"n_layers": 1, "n_inducing": 4, "n_draws": 1024}
    assert dict(parse_method("sghmc-l1", max_steps=7, n_inducing=4).options) == sampled
    assert parse_method("fc_sampled").label == "FC sampled L3"
    for text in ("sgp", "mf-l2-adam", "sghmc-l1", "boosting", "fc_sampled-l3"):
        method = parse_method(text, max_steps=3)
        assert method_text(method.name, dict(method.options)) == text
    for wrong in ("magic", "forest-l2", "exact-adam", "star-3", ""):
        with pytest.raises(InputError):
            parse_method(wrong)


def test_splits_by_number_range_and_list() -> None:
    assert parse_splits("3") == [0, 1, 2]
    assert parse_splits("2-4") == [2, 3, 4]
    assert parse_splits("0,7,9-10") == [0, 7, 9, 10]
    assert parse_splits("3,") == [3]
    for wrong in ("x", "0", "5-3", "5-3,1", "-1", ","):
        with pytest.raises(InputError):
            parse_splits(wrong)


# --- The commands and the report ------------------------------------------------------------------


def test_run_table_export_and_report_from_the_command_line(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((60, 2))
    values = np.column_stack([x, np.sin(x[:, 0]) + 0.1 * rng.standard_normal(60)])
    table, store = tmp_path / "own.csv", tmp_path / "out" / "runs.sqlite"
    np.savetxt(table, values, delimiter=",", header="a,b,y", comments="")
    runner = CliRunner()
    run = ["bench", "run", "--data", str(table), "--methods", "exact,forest", "--splits", "2", "--store", str(store)]
    first = runner.invoke(app, [*run, "--json"])
    assert first.exit_code == 0, first.output
    assert json.loads(first.output)["finished now"] == 8
    again = json.loads(runner.invoke(app, [*run, "--json"]).output)
    assert (again["finished now"], again["were there"]) == (0, 8)
    shown = runner.invoke(app, ["bench", "table", "scores-interpolation", "--results", str(store)])
    assert "exact GP" in shown.output
    mean = np.mean([r.record["crps"] for r in Store(store).runs(experiment="interpolation", method="exact")])
    assert f"{mean:.3f}" in shown.output
    part = runner.invoke(app, ["bench", "table", "1", "--results", str(store), "--splits", "1,", "--data", "own"])
    assert part.output.count("[1]") == 2  # two methods
    none = runner.invoke(app, ["bench", "table", "1", "--results", str(store), "--splits", "7,"])
    assert none.exit_code == 1
    assert "no runs of these data sets and splits" in none.output
    before = store.read_bytes()
    exported = tmp_path / "out" / "runs.csv"
    assert runner.invoke(app, ["bench", "export", str(exported), "--store", str(store)]).exit_code == 0
    from_csv = runner.invoke(app, ["bench", "table", "scores-interpolation", "--results", str(exported)])
    assert from_csv.output == shown.output
    assert store.read_bytes() == before
    other = str(tmp_path / "other.sqlite")
    assert "8 of 8 runs are new" in runner.invoke(app, ["bench", "import", str(exported), "--store", other]).output
    both = runner.invoke(app, ["bench", "import", str(exported), str(store), "--store", other])
    assert "0 of 16 runs are new" in both.output
    gone_on = json.loads(runner.invoke(app, [*run[:-1], other, "--json"]).output)
    assert (gone_on["finished now"], gone_on["were there"]) == (0, 8)
    page = tmp_path / "page.html"
    made = runner.invoke(app, ["report", "--results", str(exported), "--output", str(page), "--figures", str(tmp_path)])
    assert made.exit_code == 0, made.output
    assert f"{mean:.3f}" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench", "run", "--methods", "magic"], "unknown method 'magic'"),
        (["bench", "run", "--splits", "none"], "--splits none"),
        (["bench", "run", "--jobs", "0"], "at least 1"),
        (["bench", "run", "--data", "titanic"], "unknown data set 'titanic'"),
        (["bench", "run", "--data", "no.csv"], "unknown data set 'no.csv'"),
        (["bench", "run", "--preset", "magic"], "unknown preset"),
        (["bench", "run", "--inducing", "0"], "--inducing must be at least 1"),
        (["bench", "run", "--methods", ","], "--methods names nothing"),
        (["bench", "run", "--data-dir", "nowhere"], "nowhere is not a folder"),
        (["bench", "figure", "elbo", "--results", "nothing.sqlite"], "nothing.sqlite is not there"),
        (["bench", "run", "--experiment", "guess"], "unknown experiment"),
        (["bench", "table", "--results", "nothing.sqlite"], "nothing.sqlite is not there"),
        (["bench", "figure", "mona-lisa"], "unknown figure"),
        (["bench", "export", "--store", "nothing.sqlite"], "nothing.sqlite is not there"),
        (["bench", "import", "nothing.csv"], "nothing.csv is not there"),
        (["report", "--results", "nothing.csv"], "nothing.csv is not there"),
    ],
)
def test_what_cannot_be_done_is_said(arguments: list[str], message: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    assert message in result.output
    assert list(tmp_path.iterdir()) == []


def test_a_failed_run_is_an_exit_code_and_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "bad.csv").write_text("a,y\n1,[b]\n")
    command = ["bench", "run", "--data", str(tmp_path / "bad.csv"), "--methods", "forest", "--splits", "1"]
    runner = CliRunner()
    result = runner.invoke(app, [*command, "--store", str(tmp_path / "r.sqlite")])
    assert result.exit_code == 1
    assert "bad.csv is not a table of numbers" in " ".join(result.output.split())
    with pytest.raises(InputError, match="no finished runs"):
        read_runs(tmp_path / "r.sqlite")
    told = runner.invoke(app, ["report", "--results", str(tmp_path / "r.sqlite"), "-o", str(tmp_path / "r.html")])
    assert told.exit_code == 0, told.output
    assert "bad.csv is not a table of numbers" in (tmp_path / "r.html").read_text(encoding="utf-8")


def test_the_report_says_what_the_numbers_say(tmp_path: Path) -> None:
    (tmp_path / "covariance.png").write_bytes(b"picture")
    text = make_report(some_runs(), tmp_path).render()
    # the paper has -2.43 ± 0.05 and -3.38 ± 0.18 for STAR L3 on boston, the made-up runs -2.025
    gain = -2.025 - -2.43
    reached = "STAR L3 is at least the paper&#x27;s value minus its standard error on boston"
    assert f"{reached} ({gain:+.2f}, 2 splits)." in text
    assert "MF vs STAR: the second is better on boston (2 splits)." in text
    assert text.count("data:image/png;base64,") == 2  # the covariances of the folder, and the ELBO of the runs
    assert "2 + 2" in text
    assert "http" not in re.sub(r"base64,[A-Za-z0-9+/=]*", "", text)


def test_the_report_tells_what_failed_and_how_to_repeat_ones_own_table() -> None:
    facts = {"label": "forest", "options": {}, "file": "own.csv"}
    done = Run("a", "interpolation", "own", "forest", 0, "done", facts, np.zeros(3))
    failed = Run("b", "interpolation", "own", "forest", 1, "failed", {**facts, "error": "ValueError: it <broke>"})
    text = make_report([done], failed=[failed]).render()
    assert "1 run failed:" in text
    assert "ValueError: it &lt;broke&gt;" in text
    assert "--data own.csv --methods forest" in text
    assert "call it where they are" in text


@pytest.mark.skipif(CHROMIUM is None, reason="there is no program named chromium on the path")
@pytest.mark.parametrize("width", [390, 1400])
def test_the_page_works_in_a_browser(width: int, tmp_path: Path) -> None:
    runs = [*some_runs(), *(a_run("SGP", split, np.zeros(4), data="a_table_with_a_long_name") for split in range(2))]
    for run in runs:
        run.record["options"] = {"n_layers": 3, "max_steps": 1000, "n_inducing": 100}
        run.record["cpu"] = "A Processor With A Long Name @ 2.00GHz"
    failed = Run("b", "interpolation", "own", "forest", 1, "failed", {"label": "forest", "error": "x" * 400})
    text = make_report(runs, failed=[failed]).render()
    shown = in_browser(text, width, tmp_path)
    assert shown["inner"] == width
    assert shown["needed"] <= width  # nothing makes the page wider than its window
    for name in ("1", "2", "S1", "S2", "S3"):
        assert any(heading.startswith(f"Table {name}: ") for heading in shown["headings"])
    assert shown["tables"] == text.count("<table>") >= 8


PROBE = """<script>addEventListener("load", () => { parent.document.title = JSON.stringify({
    inner: innerWidth, needed: document.documentElement.scrollWidth, tables: document.querySelectorAll("table").length,
    headings: [...document.querySelectorAll("h2")].map((heading) => heading.textContent) }); });</script>"""


def in_browser(text: str, width: int, folder: Path) -> dict[str, Any]:
    """What a page says about itself; its console must stay empty. In a frame, which can be narrower than a window."""
    frame = folder / "frame.html"
    inside = html.escape(text.replace("</body>", f"{PROBE}</body>"))
    style = f"width: {width}px; height: 900px; border: 0"
    frame.write_text(f'<!doctype html><title></title><iframe style="{style}" srcdoc="{inside}"></iframe>', "utf-8")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
    flags += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
    flags += ["--enable-logging=stderr", "--v=0", f"--user-data-dir={folder / 'profile'}", "--window-size=1600,1000"]
    command = [str(CHROMIUM), *flags, "--dump-dom", frame.as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert [line for line in shown.stderr.splitlines() if "CONSOLE" in line] == []
    title = re.search(r"<title>(.+)</title>", shown.stdout)
    assert title is not None, shown.stdout[:2000]
    return dict(json.loads(html.unescape(title[1])))


@pytest.mark.skipif(CHROMIUM is None, reason="there is no program named chromium on the path")
def test_the_browser_would_tell(tmp_path: Path) -> None:
    wide = in_browser('<body><div style="width: 600px">wide</div></body>', 390, tmp_path)
    assert (wide["inner"], wide["needed"]) == (390, 608)  # with the usual margin
    with pytest.raises(AssertionError, match="CONSOLE"):
        in_browser("<body><script>nothing();</script></body>", 390, tmp_path)


def test_pictures_are_small_and_keep_their_colours() -> None:
    figure, axes = plt.subplots(1, 2)
    axes[0].imshow(np.random.default_rng(0).standard_normal((200, 200)), cmap="RdBu_r", interpolation="none")
    for place, colour in enumerate(COLORS.values()):
        axes[1].plot([0, 1], [place, place], color=colour, linewidth=1)
    full, png = io.BytesIO(), png_of(figure)
    figure.savefig(full, format="png", dpi=150, facecolor="white")
    plt.close(figure)
    before, after = plt.imread(io.BytesIO(full.getvalue())), plt.imread(io.BytesIO(png))
    assert len(png) < 0.5 * len(full.getvalue())
    assert after.shape[:2] == before.shape[:2]
    np.testing.assert_allclose(after[..., :3].mean((0, 1)), before[..., :3].mean((0, 1)), atol=0.005)
    for colour in COLORS.values():
        assert np.abs(after[..., :3] - to_rgb(colour)).max(axis=2).min() < 0.06


def test_figures_from_runs_need_runs() -> None:
    with pytest.raises(InputError, match="sdgp bench run"):
        figures.elbo_figure(Drawing())
    drawn = figures.elbo_figure(Drawing(results=Results(some_runs())))
    assert [axis.get_title() for axis in drawn.figure.axes if axis.get_visible()] == ["boston (2 splits)"]
    assert drawn.findings == ("Mean ELBO of STAR L3 beside MF L3 over the same splits: boston larger by 200.",)
    more = a_run("STAR L3", 7, np.zeros(4), elbo=9e9)  # a split that mean field has not
    drawn = figures.elbo_figure(Drawing(results=Results([*some_runs(), more])))
    assert drawn.figure.axes[0].get_title() == "boston (2 splits)"
    assert drawn.figure.axes[0].get_ylim()[1] < 0


@pytest.mark.parametrize("name", ["covariance", "structure", "convergence", "calibration", "normality"])
def test_figures_that_train_are_drawn(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = figures.load("energy")
    few = figures.Table("few", table.x[::12], table.y[::12], table.inputs, table.target)
    monkeypatch.setattr(figures, "load", lambda *arguments: few)
    monkeypatch.setattr(figures, "COUPLINGS", {"MF": "mf", "STAR": "star", "FC": "star"})  # FC compiles slowly
    monkeypatch.setattr(figures, "WIDTH", 1)
    monkeypatch.setattr(figures, "ARCHITECTURES", ((2, 1),))
    monkeypatch.setattr(figures, "LONGER", 2)
    drawn = figures.FIGURES[name].draw(Drawing(n_inducing=5, steps=4))
    paths = figures.write_figure(name, drawn, tmp_path)
    assert [path.suffix for path in paths] == [".svg", ".png"]
    assert all(path.stat().st_size > 5_000 for path in paths)
    assert len(drawn.figure.axes) >= 2
    assert figures.read_note(name, tmp_path) == (f"sdgp bench figure {name}", list(drawn.findings))
    assert len(drawn.findings) == {"calibration": 3}.get(name, 1)
    if name in ("covariance", "structure"):  # FC is a STAR here
        assert "100% lie in the blocks that STAR has" in drawn.findings[0]


def test_both_estimates_converge_for_the_same_time_without_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    table = figures.load("energy")
    few = figures.Table("few", table.x[::12], table.y[::12], table.inputs, table.target)
    monkeypatch.setattr(figures, "load", lambda *arguments: few)
    monkeypatch.setattr(figures, "COUPLINGS", {"FC": "mf"})
    monkeypatch.setattr(figures, "WIDTH", 1)
    made: list[tuple[dict[str, Any], Any]] = []

    def train(*arguments: Any, **options: Any) -> Any:
        made.append((options, figures_train(*arguments, **options)))
        return made[-1][1]

    figures_train = figures.train
    monkeypatch.setattr(figures, "train", train)
    over_time, over_steps = figures.convergence_figure(Drawing(n_inducing=4, steps=8)).figure.axes
    (_, analytic), (_, sampled) = made[1], made[3]
    assert [(options["inducing"], result.steps) for options, result in made[::2]] == [
        ("marginalised", 1),  # these two compile
        ("sampled", 1),
    ]
    assert analytic.steps == 8
    assert made[3][0]["max_seconds"] == analytic.seconds
    assert sampled.reason == "max_seconds"
    for axis, name in ((over_time, "seconds"), (over_steps, "step")):
        for line, result in zip(axis.get_lines(), (analytic, sampled), strict=True):
            np.testing.assert_array_equal(line.get_xdata(), result.history[name])


def test_a_chain_is_thinned_to_its_effective_size_if_enough_is_left() -> None:
    assert figures.thinning_of(400, 11.0) == 1  # 11 are too few to test
    assert figures.thinning_of(400, 100.0) == 4
    assert figures.thinning_of(400, 99.0) == 5
    assert figures.thinning_of(400, 900.0) == 1


def test_the_normality_figure_tests_the_published_samples_and_a_thinned_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    table = figures.load("energy")
    few = figures.Table("few", table.x[::12], table.y[::12], table.inputs, table.target)
    monkeypatch.setattr(figures, "load", lambda *arguments: few)
    monkeypatch.setattr(figures, "effective_sample_size", lambda chains: np.array([1.0, 30.0, 99.0]))
    monkeypatch.setattr(figures, "ENOUGH", 30)
    monkeypatch.setattr(figures, "LONGER", 3)
    tested: list[np.ndarray] = []

    def plot(samples: np.ndarray, axes: Any) -> Any:
        tested.append(samples)
        return plot_normality(samples, axes)

    monkeypatch.setattr(figures, "plot_normality", plot)
    drawn = figures.normality_figure(Drawing(n_inducing=5, steps=6))
    figure = drawn.figure
    assert "M = 5, 6 steps of burn-in; median effective size of 90 samples: 30" in figure.get_suptitle()
    titles = [axis.get_title() for axis in figure.axes]
    assert (titles[0], titles[2]) == ("30 samples, 1 steps apart", "one in 3 of 90 samples")
    kept, thinned = tested
    assert len(kept) == len(thinned) == 30
    np.testing.assert_array_equal(kept[::3], thinned[:10])  # of the same chain


def test_the_run_time_is_that_of_a_compiled_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "step_seconds", lambda coupling, M, L, width: 1e-3 * M * L * width)
    drawn = figures.runtime_figure(Drawing())
    assert drawn.findings[0].startswith("With M = 128, L = 3, τ = 5, STAR 1.0 and FC 1.0 times as long as MF")
    axes = drawn.figure.axes
    star = next(line for line in axes[0].get_lines() if line.get_label() == "STAR")
    np.testing.assert_allclose(star.get_ydata(), [0.48, 0.96, 1.92, 3.84])
    monkeypatch.undo()
    assert figures.step_seconds("mf", 4, 1, 1, repeats=2) > 0.0
