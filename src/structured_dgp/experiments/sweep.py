"""Many runs: planned, made in parallel, never twice, and taken up again where they were left."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np
from joblib import Parallel, delayed
from joblib.externals.loky.process_executor import TerminatedWorkerError
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from structured_dgp import metrics
from structured_dgp.baselines import METHODS, make_method
from structured_dgp.exceptions import InputError, StructuredDGPError
from structured_dgp.experiments.data import digest, load
from structured_dgp.experiments.splits import SPLITS
from structured_dgp.experiments.store import Run, Store

RESUMABLE = ("sgp", "mf", "star", "fc", "fc_sampled", "chain", "sghmc")
"""Methods that write checkpoints."""
SEEDED = tuple(name for name in METHODS if name != "exact")
LOST_WORKERS = 20
"""So often may workers be lost before a sweep gives up."""


@dataclass(frozen=True)
class Task:
    """One run: all that determines its result.

    Attributes:
        experiment: ``"interpolation"`` or ``"extrapolation"``.
        data: a name, or the path of a CSV file.
        method: one of ``baselines.METHODS``.
        split: number of the split, and seed of everything random.
        options: of the method, by name.
        label: what tables call it; default: the method's name.
        source: hash of the CSV file, so that a changed one is another run; empty for a name, whose hash is known.
    """

    experiment: str
    data: str
    method: str
    split: int
    options: tuple[tuple[str, Any], ...] = ()
    label: str = ""
    source: str = ""

    @property
    def key(self) -> str:
        """A hash of all this, without the label."""
        facts = [self.experiment, self.data, self.source, self.method, self.split, sorted(map(list, self.options))]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:24]


def plan(
    experiments: Iterable[str],
    data: Iterable[str],
    methods: dict[str, tuple[str, dict[str, Any]]],
    splits: Iterable[int],
) -> list[Task]:
    """All combinations, split by split; ``methods`` maps a label to a method and its options."""
    sources = {name: _source(name) for name in data}
    numbers = list(splits)
    tasks = []
    for experiment in experiments:
        if experiment not in SPLITS:
            raise InputError(f"unknown experiment {experiment!r}: use one of {', '.join(SPLITS)}.")
        for number in numbers:
            for name, source in sources.items():
                for label, (method, options) in methods.items():
                    if method not in METHODS:
                        raise InputError(f"unknown method {method!r}: use one of {', '.join(METHODS)}.")
                    tasks.append(Task(experiment, name, method, number, tuple(sorted(options.items())), label, source))
    return tasks


def _source(name: str) -> str:
    path = Path(name)
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.suffix == ".csv" and path.is_file() else ""


def run_task(task: Task, data_dir: str | None = None, scratch: str | None = None) -> Run:
    """Make one run. An error inside it is its result, not the end of the sweep."""
    facts: dict[str, Any] = {"label": task.label or task.method, "options": dict(task.options), **machine()}
    began = time.perf_counter()
    try:
        table = load(task.data, data_dir)
        split = SPLITS[task.experiment](table.x, task.split)
        facts |= {"data_digest": digest(table), "split_digest": split.digest, "rows": len(table.x)}
        options = dict(task.options)
        if task.method in SEEDED:
            options["random_state"] = task.split
        if scratch is not None and task.method in RESUMABLE:
            options["checkpoint"] = str(Path(scratch) / task.key)
        y = table.y[:, 0]
        model = make_method(task.method, **options).fit(table.x[split.train], y[split.train])
        prediction = model.predict_dist(table.x[split.test])
        facts |= metrics.scores(prediction, y[split.test])
        facts |= {"elbo": getattr(model, "elbo_", None), "steps": getattr(model, "n_steps_", None)}
        log_density = prediction.log_prob(y[split.test])
        state = "done"
    except Exception as error:  # whatever it is, it belongs into the record
        facts |= {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc(limit=-3)}
        log_density, state = np.zeros(0), "failed"
    facts["seconds"] = time.perf_counter() - began
    return Run(task.key, task.experiment, task.data, task.method, task.split, state, facts, log_density)


def machine() -> dict[str, Any]:
    """Facts about library and machine that belong to every result."""
    return {
        "library": version("structured-dgp"),
        "jax": jax.__version__,
        "python": platform.python_version(),
        "processor": platform.machine(),
        "cores": os.cpu_count(),
    }


def _run_and_store(task: Task, store: str, data_dir: str | None) -> tuple[str, bool]:
    """What a worker does: the run, its record, and the end of its checkpoints. Its key, and whether it is good."""
    results, scratch = Store(store), f"{store}.checkpoints"
    run = run_task(task, data_dir, scratch)
    results.add(run)
    shutil.rmtree(Path(scratch) / task.key, ignore_errors=True)
    return task.key, run.state == "done"


@contextmanager
def _one_thread_each(n_jobs: int) -> Iterator[None]:
    """While several processes are started, each is told to use one thread."""
    wanted = {"XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false", "OMP_NUM_THREADS": "1"} if n_jobs > 1 else {}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def run_sweep(
    tasks: list[Task],
    store: str | Path,
    *,
    n_jobs: int = 1,
    data_dir: str | None = None,
    verbose: int = 1,
) -> tuple[int, int]:
    """Make all runs that the store does not hold yet, in ``n_jobs`` processes.

    Returns how many were finished and how many failed now. A lost worker loses no result: its run is made again, from
    its last checkpoint.
    """
    path, finished = str(store), Store(store).finished()
    open_tasks = {task.key: task for task in tasks if task.key not in finished}
    counts = {True: 0, False: 0}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    console = Console(stderr=True)
    silent = not (verbose and console.is_terminal)
    progress = Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, disable=silent)
    with progress:
        bar = progress.add_task("runs", total=len(tasks), completed=len(tasks) - len(open_tasks))
        for _, good in _outcomes(open_tasks, path, n_jobs, data_dir):
            counts[good] += 1
            progress.advance(bar)
    return counts[True], counts[False]


def _outcomes(open_tasks: dict[str, Task], store: str, n_jobs: int, data_dir: str | None) -> Iterator[tuple[str, bool]]:
    """The outcomes of all tasks as they come, in other processes unless there is only one."""
    if n_jobs == 1:
        for task in open_tasks.values():
            yield _run_and_store(task, store, data_dir)
        return
    tried: set[str] = set()
    for _ in range(LOST_WORKERS):
        over = tried | Store(store).finished()
        left = [task for task in open_tasks.values() if task.key not in over]
        try:
            with _one_thread_each(n_jobs), Parallel(n_jobs=n_jobs, return_as="generator_unordered") as parallel:
                for key, good in parallel(delayed(_run_and_store)(task, store, data_dir) for task in left):
                    tried.add(key)
                    yield key, good
        except TerminatedWorkerError:
            continue  # what was finished is in the store
        return
    raise StructuredDGPError(f"workers were lost {LOST_WORKERS} times: is there enough memory? Use fewer processes.")
