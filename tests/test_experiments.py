"""Data, splits, the store of results, and sweeps that lose nothing and repeat nothing."""

from __future__ import annotations

import csv
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib import resources
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from structured_dgp import DeepGPRegressor
from structured_dgp.baselines import METHODS
from structured_dgp.exceptions import InputError
from structured_dgp.experiments import data as experiment_data
from structured_dgp.experiments import paper, sweep
from structured_dgp.experiments.data import SOURCES, digest, load
from structured_dgp.experiments.methods import Method, parse_method
from structured_dgp.experiments.splits import SPLITS, extrapolation, interpolation
from structured_dgp.experiments.store import Run, Store, read_runs
from structured_dgp.experiments.sweep import Task, defaults, failed_run, plan, run_sweep, run_task
from structured_dgp.initial import STARTS, Start
from structured_dgp.kernels import lengthscale_of
from structured_dgp.parameters import Fixed
from structured_dgp.prediction import Mixture
from structured_dgp.training.saver import Saver
from structured_dgp.training.settings import MANY, PRESETS

FOREST = [Method("forest", "forest", (("options", {"n_estimators": 60}),))]
SHARED = Path(__file__).parents[2] / "shared" / "data"


def no_network(*arguments: object, **named: object) -> str:
    raise OSError("no network")


def write_table(folder: Path, name: str = "own", rows: int = 60, seed: int = 0) -> Path:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, 2))
    values = np.column_stack([x, np.sin(x[:, 0]) + 0.1 * rng.standard_normal(rows)])
    path = folder / f"{name}.csv"
    np.savetxt(path, values, delimiter=",", header="a,b,y", comments="")
    return path


# --- Data and splits ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SOURCES)
def test_the_papers_sets_have_their_shape(name: str) -> None:
    if name not in ("concrete", "energy") and not SHARED.exists():
        pytest.skip(f"{name} is not embedded, and there is no folder of data sets")
    table = load(name, SHARED)
    assert table.x.shape == (SOURCES[name].rows, SOURCES[name].inputs)
    assert table.y.shape == (SOURCES[name].rows, 1)


def test_ones_own_table_works_the_same_way(tmp_path: Path) -> None:
    table = load(str(write_table(tmp_path)))
    assert (table.name, table.inputs, table.target) == ("own", ("a", "b"), "y")
    assert digest(table) != digest(load("energy"))


def test_a_table_without_names_loses_no_row_in_silence(tmp_path: Path) -> None:
    (tmp_path / "bare.csv").write_text("1,2.5\n3,4\n")
    with pytest.raises(InputError, match="numbers in its first line"):
        load(str(tmp_path / "bare.csv"))


def test_a_changed_file_under_a_known_name_is_refused(tmp_path: Path) -> None:
    write_table(tmp_path, "kin8nm")
    with pytest.raises(InputError, match="sha256"):
        load("kin8nm", tmp_path)


def test_what_is_not_here_is_said_clearly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(experiment_data.VARIABLE, raising=False)
    monkeypatch.setattr(experiment_data.pooch, "os_cache", lambda name: tmp_path / "cache")
    monkeypatch.setattr(experiment_data.pooch, "retrieve", no_network)
    with pytest.raises(InputError, match="--data-dir"):
        load("naval", tmp_path)
    with pytest.raises(InputError, match="unknown data set"):
        load("titanic")
    broken = tmp_path / "broken.csv"
    broken.write_text("a,y\n1,two\n")
    with pytest.raises(InputError, match=r"broken\.csv"):
        load(str(broken))
    broken.write_text("a,y\n1,nan\n")
    with pytest.raises(InputError, match="missing"):
        load(str(broken))


def test_the_folder_may_come_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(experiment_data.VARIABLE, str(tmp_path))
    write_table(tmp_path, "kin8nm")
    with pytest.raises(InputError, match="sha256"):  # it was found
        load("kin8nm")


@pytest.mark.parametrize("name", SPLITS)
def test_a_split_has_every_row_once_and_is_a_function_of_the_seed(name: str) -> None:
    x = np.random.default_rng(0).standard_normal((101, 3))
    split = SPLITS[name](x, 1)
    assert sorted([*split.train, *split.test]) == list(range(101))
    assert split.digest == SPLITS[name](x, 1).digest
    assert split.digest != SPLITS[name](x, 2).digest


def test_extrapolation_is_one_half_along_a_direction() -> None:
    x = np.column_stack([np.random.default_rng(0).standard_normal((200, 2)), np.ones(200)])  # and a constant column
    split = extrapolation(x, 3)
    assert len(split.train) == len(split.test) == 100
    direction = np.random.default_rng(3).standard_normal(3)[:2]
    place = ((x[:, :2] - x[:, :2].mean(0)) / x[:, :2].std(0)) @ direction
    assert place[split.train].max() <= place[split.test].min()
    assert len(interpolation(x, 0).test) == 20


# --- The store ------------------------------------------------------------------------------------


def a_run(key: str = "k", state: str = "done", **record: Any) -> Run:
    return Run(key, "interpolation", "own", "forest", 0, state, {"rmse": 1.0, **record}, np.array([0.5, -1.0]))


def test_a_finished_run_is_written_once(tmp_path: Path) -> None:
    store = Store(tmp_path / "results.sqlite")
    assert store.add(a_run())
    assert not store.add(a_run(rmse=2.0))
    (run,) = Store(tmp_path / "results.sqlite").runs()
    assert run.record == {"rmse": 1.0}
    np.testing.assert_array_equal(run.log_density, [0.5, -1.0])


def test_a_failed_run_gives_way_to_a_later_one(tmp_path: Path) -> None:
    store = Store(tmp_path / "results.sqlite")
    store.add(a_run(state="failed", error="no"))
    assert store.finished() == set()
    assert store.add(a_run())
    assert [run.state for run in store.runs()] == ["done"]


def test_runs_are_chosen_by_their_columns_and_exported(tmp_path: Path) -> None:
    store = Store(tmp_path / "results.sqlite")
    store.add(a_run("a"))
    store.add(Run("b", "extrapolation", "own", "exact", 1, "done", {"crps": 0.2, "options": {}}))
    assert [run.key for run in store.runs(method="exact", split=1)] == ["b"]
    with pytest.raises(InputError, match="colour"):
        store.runs(colour="red")
    store.export(tmp_path / "out" / "results.csv")
    rows = list(csv.DictReader((tmp_path / "out" / "results.csv").read_text().splitlines()))
    assert [(row["method"], row["rmse"], row["crps"]) for row in rows] == [("exact", "", "0.2"), ("forest", "1.0", "")]


def test_exported_runs_are_read_again(tmp_path: Path) -> None:
    store = Store(tmp_path / "results.sqlite")
    store.add(a_run("a", label="trees", options={"n": [1, 2]}, elbo=None))
    store.add(a_run("b", state="failed", error="no"))
    store.export(tmp_path / "results.csv")
    assert store.export(tmp_path / "all") == [tmp_path / "all" / "own.csv"]
    for path in (store.path, tmp_path / "results.csv", tmp_path / "all"):
        (run,) = read_runs(path)
        assert (run.key, run.split, run.state) == ("a", 0, "done")
        assert run.record == {"rmse": 1.0, "label": "trees", "options": {"n": [1, 2]}, "elbo": None}
        np.testing.assert_array_equal(run.log_density, [0.5, -1.0])
    store.export(tmp_path / "all")  # once more, over its own files
    (tmp_path / "all" / "own.csv").write_text("a,b,y\n1,2,3\n")
    with pytest.raises(InputError, match="holds no exported runs"):
        store.export(tmp_path / "all")
    assert (tmp_path / "all" / "own.csv").read_text() == "a,b,y\n1,2,3\n"
    with pytest.raises(InputError, match="not there"):
        read_runs(tmp_path / "other.csv")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="holds no finished runs"):
        read_runs(tmp_path / "empty")
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(InputError, match=r"other\.csv"):
        read_runs(tmp_path / "other.csv")


def test_an_export_keeps_runs_that_were_exported_before(tmp_path: Path) -> None:
    first, second = Store(tmp_path / "first.sqlite"), Store(tmp_path / "second.sqlite")
    for key in "abc":
        first.add(a_run(key, label="old"))
    second.add(a_run("b", label="new"))
    second.add(a_run("d", label="new"))
    labels = {"a": "old", "b": "new", "c": "old", "d": "new"}
    for place in (tmp_path / "all", tmp_path / "all.csv"):
        first.export(place)
        before = read_runs(place)
        second.export(place)
        after = {run.key: run for run in read_runs(place)}
        assert {key: run.record["label"] for key, run in after.items()} == labels
        for run in before:
            np.testing.assert_array_equal(run.log_density, after[run.key].log_density)
        file = place / "own.csv" if place.is_dir() else place
        text = file.read_bytes()
        Store(tmp_path / "empty.sqlite").export(place)
        assert file.read_bytes() == text
        file.write_bytes(text[:-40])  # the last run is broken
        with pytest.raises(InputError):
            second.export(place)
        assert file.read_bytes() == text[:-40]


HALF_WRITTEN = """
import os, sqlite3, sys
connection = sqlite3.connect(sys.argv[1])
connection.execute("PRAGMA cache_size = 1")  # so that changes reach the file before they are all made
connection.executemany("INSERT INTO facts VALUES (?, ?)", ((str(i), "x" * 1000) for i in range(1000)))
os._exit(1)
"""


def test_what_a_killed_writer_left_is_undone_by_a_reader(tmp_path: Path) -> None:
    path = tmp_path / "r.sqlite"
    Store(path).add(Run("a", "interpolation", "own", "exact", 0, "done", {"crps": 0.1}, np.ones(2)))
    subprocess.run([sys.executable, "-c", HALF_WRITTEN, str(path)], check=False)
    assert path.with_name("r.sqlite-journal").stat().st_size > 0
    assert [run.key for run in read_runs(path)] == ["a"]


def test_a_file_that_is_no_store_is_refused(tmp_path: Path) -> None:
    (tmp_path / "results.sqlite").write_text("not a database, but a long enough text to look at " * 20)
    with pytest.raises(InputError, match=r"results\.sqlite"):
        Store(tmp_path / "results.sqlite")


# --- The sweep ------------------------------------------------------------------------------------


def test_a_plan_has_all_combinations_and_keys_of_their_own(tmp_path: Path) -> None:
    methods = [Method("a", "exact"), Method("b", "sgp", (("max_steps", 5),))]
    tasks = plan(SPLITS, ["energy", "concrete"], methods, range(3))
    assert len(tasks) == 24
    assert len({task.key for task in tasks}) == 24
    with pytest.raises(InputError, match="unknown experiment"):
        plan(["guessing"], ["energy"], FOREST, [0])


def test_a_run_records_what_it_did(tmp_path: Path) -> None:
    path = write_table(tmp_path)
    run = run_task(Task("interpolation", str(path), "forest", 3, (("options", {"n_estimators": 60}),), "trees"))
    table = load(str(path))
    assert run.state == "done"
    assert run.record["label"] == "trees"
    assert run.record["split_digest"] == interpolation(table.x, 3).digest
    assert run.log_density.shape == (6,)
    assert run.record["log_likelihood"] == pytest.approx(run.log_density.mean())
    assert {"library", "jax", "numpy", "sklearn", "seconds", "crps", "coverage", "xla_flags"} <= set(run.record)
    assert run.record["cpu"]
    assert run.record["behind"]["parameters"]["random_state"] is None  # its other parameters, with their defaults
    assert len(run.record["code"]) == 12


SGHMC = {"burn_in": 20, "n_samples": 8, "thinning": 2}
SIZES = {
    # of 2 inputs and 5 inducing points: inducing inputs, lengthscales, kernel variance, noise, ...
    "exact": ({}, 2 + 1 + 1),
    "sgp": ({"n_inducing": 5, "max_steps": 3, "early_stopping": False}, 10 + 2 + 1 + 1 + 5 + 15),
    "sghmc": ({"n_inducing": 5, "n_layers": 1, "settings": SGHMC}, 10 + 2 + 1 + 1 + 5),
    "mf": (
        {"n_inducing": 5, "max_steps": 2, "early_stopping": False, "n_layers": 2, "width": 1, "preset": "paper"},
        # the hidden layer has white noise and a fixed variance, the output layer a variance and one input
        (10 + 2 + 1 + 5 + 15) + (5 + 1 + 1 + 5 + 15) + 1,
    ),
}


@pytest.mark.parametrize("method", SIZES)
def test_a_gp_records_its_hyper_parameters(method: str, tmp_path: Path) -> None:
    options, size = SIZES[method]
    path = write_table(tmp_path)
    record = run_task(Task("interpolation", str(path), method, 0, tuple(options.items()))).record
    assert "error" not in record, record
    assert record["parameters"] == size
    table = load(str(path))
    rows = interpolation(table.x, 0).train
    seed = {} if method == "exact" else {"random_state": 0}
    model = METHODS[method](**options, **seed).fit(table.x[rows], table.y[rows, 0])
    noise = np.sqrt(np.asarray(model.model_.likelihood.variance)) * table.y[rows].std()
    np.testing.assert_allclose(record["noise"], noise, atol=1e-6)
    kernels = [model.model_.kernel] if method == "exact" else [layer.kernel for layer in model.model_.layers]
    total = [float(kernel.diagonal(jnp.zeros((1, 2)))[0]) for kernel in kernels]
    np.testing.assert_allclose([sum(parts) for parts in record["variances"]], total, rtol=1e-4)
    assert [len(parts) for parts in record["variances"]] == ([2, 1] if method == "mf" else [1])
    for kernel, recorded in zip(kernels, record["lengthscales"], strict=True):
        np.testing.assert_allclose(recorded, np.ravel(lengthscale_of(kernel)), rtol=1e-4)
    if method == "sghmc":
        assert SGHMC.items() <= record["settings"].items()
        assert record["settings"]["step_size"] == 0.01


def test_only_the_papers_own_table_has_its_name(tmp_path: Path) -> None:
    text = (resources.files("structured_dgp") / "data" / "energy.csv").read_bytes()
    paths = {name: tmp_path / name / "energy.csv" for name in ("same", "other")}
    for name, path in paths.items():
        path.parent.mkdir()
        path.write_bytes(text if name == "same" else text[: text.rindex(b"\n", 0, -1) + 1])
    # the same contents are the same run, by whatever path or name
    same, other = plan(["interpolation"], [*map(str, paths.values()), "energy"], [*FOREST, *FOREST], [0])
    (by_name,) = plan(["interpolation"], ["energy"], FOREST, [0])
    assert (same.name, other.name, by_name.name) == ("energy", "energy.csv", "energy")
    assert same.key == by_name.key != other.key
    run = run_task(other)
    assert (run.state, run.data) == ("done", "energy.csv")
    assert run_task(Task("interpolation", str(tmp_path / "boston.csv"), "forest", 0)).data == "boston.csv"  # failed


@pytest.mark.parametrize("what", ["options", "the defaults behind them", "the contents of the file"])
def test_runs_that_no_table_could_tell_apart_are_refused_before_they_are_made(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [tmp_path / name for name in ("a", "b")]
    for seed, folder in enumerate(folders):
        folder.mkdir()
        write_table(folder, seed=seed)
    paths = [str(path) for folder in folders for path in folder.iterdir()]
    store = tmp_path / "r.sqlite"
    assert run_sweep(plan(["interpolation"], paths[:1], FOREST, [0]), store, verbose=0) == (1, 0)
    data, method = paths[0], FOREST[0]
    if what == "options":
        method = Method("forest", "forest", (("options", {"n_estimators": 61}),))
    elif what == "the contents of the file":
        data = paths[1]
    else:
        monkeypatch.setattr(sweep, "defaults", lambda name, options, rows: {"parameters": "others"})
    with pytest.raises(InputError, match=f"forest on own that differ in {what}.* --store of its own"):
        run_sweep(plan(["interpolation"], [data], [method], [1]), store, verbose=0)
    assert len(Store(store).runs()) == 1
    monkeypatch.undo()
    assert run_sweep(plan(["interpolation"], paths[:1], FOREST, [0, 1]), store, verbose=0) == (1, 0)


def test_an_error_is_a_record_and_the_rest_goes_on(tmp_path: Path) -> None:
    good, missing = str(write_table(tmp_path)), str(tmp_path / "missing.csv")
    tasks = plan(["interpolation"], [missing, good], FOREST, [0])
    assert run_sweep(tasks, tmp_path / "r.sqlite", verbose=0) == (1, 1)
    failed = Store(tmp_path / "r.sqlite").runs(state="failed")[0]
    assert "missing.csv" in failed.record["error"]
    assert run_sweep(tasks, tmp_path / "r.sqlite", verbose=0) == (0, 1)  # only the failed one is tried again


def test_a_changed_table_is_another_run(tmp_path: Path) -> None:
    path = write_table(tmp_path)
    (before,) = plan(["interpolation"], [str(path)], FOREST, [0])
    path.write_text(path.read_text() + "0,0,0\n")
    (after,) = plan(["interpolation"], [str(path)], FOREST, [0])
    assert before.key != after.key


def test_checkpoints_do_not_change_a_result(tmp_path: Path) -> None:
    options = (("early_stopping", False), ("max_steps", 4), ("n_inducing", 5))
    task = Task("interpolation", str(write_table(tmp_path)), "sgp", 0, options)
    plain, kept = run_task(task), run_task(task, scratch=str(tmp_path / "scratch"))
    assert list((tmp_path / "scratch" / task.key).glob("step-*.safetensors"))
    resumed = run_task(task, scratch=str(tmp_path / "scratch"))
    for other in (kept, resumed):
        np.testing.assert_array_equal(plain.log_density, other.log_density)


def test_a_resumed_run_goes_on_and_its_time_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def save_later(saver: Saver, run: Any, seconds: float) -> None:
        save(saver, run, seconds + 1000.0)

    save = Saver.save
    monkeypatch.setattr(Saver, "save", save_later)
    options = (("early_stopping", False), ("max_steps", 4), ("n_inducing", 5))
    task = Task("interpolation", str(write_table(tmp_path)), "sgp", 0, options)
    first, resumed = (run_task(task, scratch=str(tmp_path / "scratch")) for _ in range(2))
    assert first.record["seconds"] < 1000.0 < resumed.record["seconds"] < 2000.0


def test_a_run_that_loses_its_process_is_a_failed_run_and_the_rest_goes_on(tmp_path: Path) -> None:
    script = """
import os, sys
from structured_dgp.experiments import sweep
from structured_dgp.experiments.methods import Method
from structured_dgp.experiments.store import Run, Store

def deadly(task, data_dir=None, scratch=None):
    if task.split == 0:
        os._exit(9)
    return Run(task.key, task.experiment, "own", task.method, task.split, "done", {})

def run_and_store(task, store, data_dir):  # in the worker, where the module is as it was
    from structured_dgp.experiments import sweep
    sweep.run_task = deadly
    return sweep._run_and_store(task, store, data_dir)

sweep._run_and_store = run_and_store
tasks = sweep.plan(["interpolation"], ["energy"], [Method("forest", "forest")], range(6))
print(sweep.run_sweep(tasks, sys.argv[1], n_jobs=2, verbose=0))
(failed,) = Store(sys.argv[1]).runs(state="failed")
print(failed.split, failed.record["error"].split(":")[0])
"""
    command = [sys.executable, "-c", script, str(tmp_path / "r.sqlite")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == ["(5, 1)", "0 TerminatedWorkerError"]


def test_a_run_that_gets_farther_each_time_is_not_given_up(tmp_path: Path) -> None:
    script = """
import os, sys
from pathlib import Path
from structured_dgp.experiments import sweep
from structured_dgp.experiments.methods import Method
from structured_dgp.experiments.store import Run

def slow(task, data_dir=None, scratch=None):
    folder = Path(scratch) / task.key / "refit"
    folder.mkdir(parents=True, exist_ok=True)
    step = len(list(folder.iterdir())) + 1
    (folder / f"step-{step:09d}.safetensors").touch()
    if step < 4:
        os._exit(9)
    return Run(task.key, task.experiment, "own", task.method, task.split, "done", {})

def run_and_store(task, store, data_dir):  # in the worker, where the module is as it was
    from structured_dgp.experiments import sweep
    sweep.run_task = slow
    return sweep._run_and_store(task, store, data_dir)

sweep._run_and_store, sweep.LOST_RUNS = run_and_store, 2
tasks = sweep.plan(["interpolation"], ["energy"], [Method("forest", "forest")], [0])
print(sweep.run_sweep(tasks, sys.argv[1], n_jobs=2, verbose=0))
"""
    command = [sys.executable, "-c", script, str(tmp_path / "r.sqlite")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == ["(1, 0)"]


def test_a_worker_killed_in_training_changes_no_bit(tmp_path: Path) -> None:
    script = """
import os, signal, sys
from pathlib import Path
from structured_dgp.experiments import sweep
from structured_dgp.experiments.methods import Method

def run_and_store(task, store, data_dir):  # in the worker, where the modules are as they were
    from structured_dgp.experiments import sweep
    from structured_dgp.training import loop

    class Noisy(loop.Saver):
        def is_due(self, step):
            return True

        def save(self, run, seconds):
            super().save(run, seconds)
            log = Path(f"{store}.log")
            with log.open("a") as file:
                file.write(f"{run.step} {os.getpid()}\\n")
            if Path(store).stem == "killed" and len(log.read_text().splitlines()) == 2:
                os.kill(os.getpid(), signal.SIGKILL)

    usual, loop.Saver = loop.Saver, Noisy
    try:
        return sweep._run_and_store(task, store, data_dir)
    finally:
        loop.Saver = usual

sweep._run_and_store = run_and_store
options = {"n_inducing": 8, "max_steps": 20, "early_stopping": False, "settings": {"score_every": 5}}
tasks = sweep.plan(["extrapolation"], [sys.argv[1]], [Method("SGP", "sgp", tuple(options.items()))], [0])
for store in sys.argv[2:]:
    print(sweep.run_sweep(tasks, store, n_jobs=2, verbose=0))
"""
    stores = [tmp_path / "killed.sqlite", tmp_path / "undisturbed.sqlite"]
    command = [sys.executable, "-c", script, str(write_table(tmp_path)), *map(str, stores)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == ["(1, 0)"] * 2
    logs = [[line.split() for line in Path(f"{store}.log").read_text().splitlines()] for store in stores]
    for log, n_processes in zip(logs, (2, 1), strict=True):
        # the second process went on where the first was killed
        assert [int(step) for step, _ in log] == [5, 10, 15, 20]
        assert len({process for _, process in log}) == n_processes
    assert_same_results(*stores)
    (killed,), (undisturbed,) = (Store(store).runs() for store in stores)
    for name in ("log_likelihood", "elbo", "noise", "lengthscales", "variances"):
        assert killed.record[name] == undisturbed.record[name]


def test_what_another_worker_finished_is_not_reported_as_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (task,) = plan(["interpolation"], [str(write_table(tmp_path))], FOREST, [0])
    store = tmp_path / "r.sqlite"

    def late(task: Task, *arguments: Any) -> Run:
        Store(store).add(run_task(task))  # by a worker that outlived its parent
        return failed_run(task, OSError("no room"))

    monkeypatch.setattr("structured_dgp.experiments.sweep.run_task", late)
    assert run_sweep([task], store, verbose=0) == (1, 0)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such locks")
def test_two_processes_do_not_work_on_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    (task,) = plan(["interpolation"], [str(write_table(tmp_path))], FOREST, [0])
    store = tmp_path / "r.sqlite"
    scratch = tmp_path / "r.sqlite.checkpoints"
    scratch.mkdir()
    made = run_task(task)
    monkeypatch.setattr("structured_dgp.experiments.sweep.run_task", lambda *arguments: pytest.fail("made twice"))
    with (scratch / f"{task.key}.lock").open("ab") as file, ThreadPoolExecutor() as pool:
        fcntl.flock(file, fcntl.LOCK_EX)  # a process that outlived its parent is at work on it
        waiting = pool.submit(run_sweep, [task], store, verbose=0)
        time.sleep(0.5)
        assert not waiting.done()
        Store(store).add(made)
        fcntl.flock(file, fcntl.LOCK_UN)
        assert waiting.result(timeout=60) == (1, 0)
    assert list(scratch.iterdir()) == []


def test_workers_get_the_whole_path_of_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str | None] = []

    def look(task: Task, data_dir: str | None, scratch: str) -> Run:
        seen.append(data_dir)
        return failed_run(task, OSError("enough"))

    monkeypatch.setattr("structured_dgp.experiments.sweep.run_task", look)
    monkeypatch.chdir(tmp_path)
    run_sweep(plan(["interpolation"], ["energy"], FOREST, [0]), "r.sqlite", data_dir="sets", verbose=0)
    run_sweep(plan(["interpolation"], ["energy"], FOREST, [0]), "r.sqlite", verbose=0)
    assert seen == [str(tmp_path / "sets"), None]


def test_densities_that_are_not_finite_are_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Mixture, "log_prob", lambda self, y: np.full(len(y), np.nan))
    run = run_task(Task("interpolation", str(write_table(tmp_path)), "forest", 0, FOREST[0].options))
    assert run.state == "failed"
    assert "6 log densities" in run.record["error"]
    assert "split_digest" in run.record


@pytest.mark.parametrize(("preset", "precision"), [("default", "mixed"), ("paper", "float64")])
def test_the_precision_of_its_preset_is_behind_a_run(preset: str, precision: str) -> None:
    assert defaults("star", {"preset": preset})["parameters"]["precision"] == precision


def test_other_defaults_are_another_run(monkeypatch: pytest.MonkeyPatch) -> None:
    task = Task("interpolation", "energy", "star", 0)
    keys = [task.key]
    monkeypatch.setitem(PRESETS, "default", PRESETS["default"].changed(learning_rate=0.03))
    keys.append(task.key)
    monkeypatch.setattr("structured_dgp.experiments.sweep.STOPPING_ROWS", 7)
    keys.append(task.key)
    monkeypatch.setitem(STARTS, "default", Start(noise=0.3))
    keys.append(task.key)
    monkeypatch.setitem(METHODS, "star", lambda **options: DeepGPRegressor("star", precision="float64", **options))
    keys.append(task.key)
    assert len(set(keys)) == 5


def test_what_concerns_many_rows_is_behind_runs_on_many_rows_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [tmp_path / "few.csv", tmp_path / "many.csv"]
    for path, rows in zip(paths, (1999, 2000), strict=True):
        path.write_text("x,y\n" + "1,2\n" * rows)

    def keys() -> list[str]:
        data = ["energy", "kin8nm", *map(str, paths)]
        return [task.key for task in plan(["interpolation"], data, [parse_method("star")], [0])]

    before = keys()
    monkeypatch.setitem(MANY, "decay", 0.4)
    assert [a == b for a, b in zip(before, keys(), strict=True)] == [True, False, True, False]


def test_the_papers_preset_has_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = []
    for value in (1.0, 2.0):
        monkeypatch.setitem(STARTS, "paper", Start(hidden_variance=Fixed(value)))
        keys += [Task("interpolation", "energy", "star", 0, (("preset", "paper"),)).key]
        keys += [Task("interpolation", "energy", "sghmc", 0, (("start", "paper"),)).key]
    assert len(set(keys)) == 4


def test_a_table_is_known_by_what_it_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_table(tmp_path)
    monkeypatch.chdir(tmp_path)
    keys = {plan(["interpolation"], [name], FOREST, [0])[0].key for name in (str(path), "own.csv", "./own.csv")}
    assert len(keys) == 1
    assert run_task(plan(["interpolation"], ["own.csv"], FOREST, [0])[0]).data == "own"


def test_the_embedded_tables_are_the_papers() -> None:
    for name in ("energy", "concrete"):
        path = resources.files("structured_dgp") / "data" / f"{name}.csv"
        assert hashlib.sha256(path.read_bytes()).hexdigest() == SOURCES[name].sha256


def test_equal_rows_stay_in_order_whatever_the_machine() -> None:
    x = np.repeat(np.random.default_rng(0).standard_normal((10, 3)), 4, axis=0)
    split = extrapolation(x, 0)
    halves = {
        row: {int(i) for i in part if (x[i] == x[row]).all()} for part in (split.train,) for row in map(int, part)
    }
    assert all(same == set(range(min(same), min(same) + len(same))) for same in halves.values())


def test_processes_give_the_same_results_as_one(tmp_path: Path) -> None:
    tasks = plan(SPLITS, [str(write_table(tmp_path))], FOREST, range(2))
    assert run_sweep(tasks, tmp_path / "one.sqlite", verbose=0) == (4, 0)
    assert run_sweep(tasks, tmp_path / "two.sqlite", n_jobs=2, verbose=0) == (4, 0)
    assert_same_results(tmp_path / "one.sqlite", tmp_path / "two.sqlite")


def assert_same_results(a: Path, b: Path) -> None:
    ours, theirs = Store(a).runs(), Store(b).runs()
    assert [run.key for run in ours] == [run.key for run in theirs]
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(one.log_density, other.log_density)


SCRIPT = """
import json, sys
from structured_dgp.experiments.sweep import plan, run_sweep
from structured_dgp.experiments.methods import Method
methods = [Method("forest", "forest", (("options", {"n_estimators": 150}),))]
tasks = plan(["interpolation", "extrapolation"], [sys.argv[1]], methods, range(6))
print(json.dumps(run_sweep(tasks, sys.argv[2], n_jobs=2, verbose=0)))
"""


def started(table: Path, store: Path) -> subprocess.Popen[bytes]:
    """A sweep in a process of its own; what it prints goes to a file, which workers that outlive it cannot block."""
    command = [sys.executable, "-c", SCRIPT, str(table), str(store)]
    with store.with_suffix(".out").open("wb") as output:
        return subprocess.Popen(command, stdout=output, stderr=output)


def children(pid: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                status, command = (entry / "stat").read_text(), (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if int(status.rpartition(")")[2].split()[1]) == pid and b"loky" in command and b"tracker" not in command:
                found.append(int(entry.name))
    return found


@pytest.mark.skipif(not Path("/proc").exists(), reason="processes can only be found on Linux")
@pytest.mark.parametrize("victim", ["worker", "parent"])
def test_a_killed_sweep_ends_with_every_run_exactly_once(victim: str, tmp_path: Path) -> None:
    table, store = write_table(tmp_path, rows=200), tmp_path / "killed.sqlite"
    process = started(table, store)
    deadline = time.monotonic() + 120.0
    while time.monotonic() < deadline and not (store.exists() and len(Store(store).runs()) >= 2):
        assert process.poll() is None, store.with_suffix(".out").read_text()
        time.sleep(0.05)
    if victim == "worker":
        os.kill(children(process.pid)[0], signal.SIGKILL)
    else:
        process.kill()
        process.wait()
        process = started(table, store)
    assert process.wait(timeout=240) == 0, store.with_suffix(".out").read_text()
    assert json.loads(store.with_suffix(".out").read_text().splitlines()[-1])[1] == 0
    undisturbed = tmp_path / "undisturbed.sqlite"
    tasks = plan(SPLITS, [str(table)], [Method("forest", "forest", (("options", {"n_estimators": 150}),))], range(6))
    run_sweep(tasks, undisturbed, verbose=0)
    assert_same_results(store, undisturbed)


# --- The paper's numbers --------------------------------------------------------------------------


@pytest.mark.parametrize("table", [paper.INTERPOLATION, paper.EXTRAPOLATION])
def test_the_papers_tables_are_complete(table: dict[str, dict[str, tuple[float, float]]]) -> None:
    assert list(table) == list(SOURCES)
    assert all(len(row) == 8 and all(error >= 0.0 for _, error in row.values()) for row in table.values())


def test_some_cells_of_the_paper() -> None:
    assert paper.INTERPOLATION["concrete"]["STAR L3"] == (-3.05, 0.02)
    assert paper.EXTRAPOLATION["energy"]["MF L3"] == (-3.45, 0.86)
    assert paper.STAR_BEATS["energy"]["MF"] == (0.73, 0.05)
    assert paper.DIFFERENCES["naval"]["MF vs STAR (dif)"] == (0.693, 0.527)
    assert paper.ELBO["boston"]["FC"] == (-246.0, 5.0)
