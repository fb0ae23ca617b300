"""The same sweep on a Dask cluster, whose workers may be lost."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from structured_dgp.exceptions import InputError, StructuredDGPError
from structured_dgp.experiments.methods import Method
from structured_dgp.experiments.splits import SPLITS
from structured_dgp.experiments.store import Store
from structured_dgp.experiments.sweep import Task, plan, run_sweep

pytest.importorskip("distributed")
TREES = [Method("forest", "forest", (("options", {"n_estimators": 150}),))]


POISON = """
from dataclasses import replace
from os import _exit
from structured_dgp.experiments import sweep

run_task = sweep.harmless = getattr(sweep, "harmless", sweep.run_task)  # a worker may read this file twice


def other_version(task, *rest, **more):
    if task.split == 2:
        _exit(1)
    return replace(run_task(task, *rest, **more), **({"key": "unplanned"} if task.split == 3 else {}))


sweep.run_task = other_version
"""


@contextmanager
def cluster(folder: Path, *options: str) -> Iterator[tuple[str, list[subprocess.Popen[bytes]]]]:
    """A scheduler that gives up a task with the first lost worker, and two workers, in processes of their own.

    Its address, and all three processes.
    """
    log, processes = folder / "scheduler.log", list[subprocess.Popen[bytes]]()
    settings = {"ADMIN__LOW_LEVEL_LOG_LENGTH": "100", "SCHEDULER__ALLOWED_FAILURES": "0"}
    environment = {**os.environ, **{f"DASK_DISTRIBUTED__{name}": value for name, value in settings.items()}}

    def start(*arguments: str, output: Path) -> subprocess.Popen[bytes]:
        with output.open("wb") as file:
            command = [sys.executable, "-m", *arguments]
            where = {"stdout": file, "stderr": file, "cwd": folder}
            process = subprocess.Popen(command, **where, env=environment, start_new_session=True)
        processes.append(process)
        return process

    try:
        start("distributed.cli.dask_scheduler", "--host", "127.0.0.1", "--port", "0", "--no-dashboard", output=log)
        deadline = time.monotonic() + 60.0
        while not (found := re.search(r"tcp://127\.0\.0\.1:\d+", log.read_text())):
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        options = ("--nthreads", "1", "--no-dashboard", "--death-timeout", "60", *(options or ("--no-nanny",)))
        for index in range(2):
            start("distributed.cli.dask_worker", found[0], *options, output=folder / f"worker-{index}.log")
        yield found[0], processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def tasks_on(folder: Path) -> list[Task]:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((200, 2))
    path = folder / "own.csv"
    values = np.column_stack([x, np.sin(x[:, 0]) + 0.1 * rng.standard_normal(200)])
    np.savetxt(path, values, delimiter=",", header="a,b,y", comments="")
    return plan(SPLITS, [str(path)], TREES, range(5))


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_lost_worker_loses_and_repeats_nothing(tmp_path: Path) -> None:
    tasks, store = tasks_on(tmp_path), tmp_path / "cluster.sqlite"
    with cluster(tmp_path) as (address, (_, worker, _)):

        def kill_one_in_the_middle() -> None:
            while not (store.exists() and len(Store(store).runs()) >= 3):
                time.sleep(0.05)
            worker.send_signal(signal.SIGKILL)

        killer = threading.Thread(target=kill_one_in_the_middle, daemon=True)
        killer.start()
        assert run_sweep(tasks, store, cluster=address, verbose=0) == (10, 0)
        killer.join(timeout=30.0)
        assert worker.wait(timeout=30.0) == -signal.SIGKILL
        assert run_sweep(tasks, store, cluster=address, verbose=0) == (0, 0)  # nothing is left
    run_sweep(tasks, tmp_path / "here.sqlite", verbose=0)
    ours, theirs = Store(store).runs(), Store(tmp_path / "here.sqlite").runs()
    assert [run.key for run in ours] == [run.key for run in theirs]
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(one.log_density, other.log_density)


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_run_that_kills_its_workers_or_comes_from_another_version_fails_alone(tmp_path: Path) -> None:
    tasks, store = tasks_on(tmp_path), tmp_path / "cluster.sqlite"
    (tmp_path / "poison.py").write_text(POISON)
    with cluster(tmp_path, "--nanny", "--preload", "poison.py") as (address, _):
        assert run_sweep(tasks, store, cluster=address, verbose=0) == (6, 4)
    states = {(run.split, run.state) for run in Store(store).runs()}
    assert states == {(0, "done"), (1, "done"), (2, "failed"), (3, "failed"), (4, "done")}
    errors = {(run.split, run.record["error"].split(":")[0]) for run in Store(store).runs(state="failed")}
    assert errors == {(2, "KilledWorker"), (3, "StructuredDGPError")}


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_lost_scheduler_is_a_sentence_and_loses_no_finished_run(tmp_path: Path) -> None:
    tasks, store = tasks_on(tmp_path), tmp_path / "cluster.sqlite"
    with cluster(tmp_path) as (address, (scheduler, *_)):

        def kill_it_in_the_middle() -> None:
            while not (store.exists() and len(Store(store).runs()) >= 2):
                time.sleep(0.05)
            scheduler.kill()

        threading.Thread(target=kill_it_in_the_middle, daemon=True).start()
        with pytest.raises(StructuredDGPError, match="the cluster was lost"):
            run_sweep(tasks, store, cluster=address, verbose=0)
    assert 2 <= len(Store(store).runs(state="done")) < 10
    assert len(Store(store).runs(state="failed")) == 0


def test_no_cluster_is_an_error_with_its_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("structured_dgp.experiments.sweep.TIMEOUT", 1.0)
    with pytest.raises(InputError, match=r"127\.0\.0\.1:1"):
        run_sweep(tasks_on(tmp_path), tmp_path / "r.sqlite", cluster="tcp://127.0.0.1:1", verbose=0)
