"""Many runs: planned, made in parallel, never twice, and taken up again where they were left."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from joblib import Parallel, delayed
from joblib.externals.loky.process_executor import TerminatedWorkerError
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from structured_dgp import metrics
from structured_dgp.baselines import METHODS, SghmcSettings, make_method
from structured_dgp.estimators import MANY_ROWS, STOPPING_ROWS, preset_precision
from structured_dgp.exceptions import InputError, StructuredDGPError
from structured_dgp.experiments.data import SOURCES, digest, load
from structured_dgp.experiments.facts import facts_of, machine
from structured_dgp.experiments.methods import PLACED, TRAINED, Method
from structured_dgp.experiments.splits import SPLITS
from structured_dgp.experiments.store import Run, Store
from structured_dgp.initial import STARTS
from structured_dgp.saving import plain_parameters
from structured_dgp.training.settings import MANY, RUSH_ROWS, as_settings

try:
    import fcntl
except ImportError:  # Windows has none
    fcntl = None  # type: ignore[assignment]

TIMEOUT = 30.0
"""Seconds in which a cluster has to answer."""
SEEDED = tuple(name for name in METHODS if name != "exact")
LOST_WORKERS = 50
"""So often may workers be lost before a sweep gives up,"""
LOST_RUNS = 3
"""and so often with the same run under way, and no new checkpoint of it, before this run counts as failed."""


@dataclass(frozen=True)
class Task:
    """One run: all that determines its result.

    Attributes:
        experiment: ``"interpolation"`` or ``"extrapolation"``.
        data: a name, or the path of a CSV file, which is known by its contents.
        method: one of ``baselines.METHODS``.
        split: number of the split, and seed of everything random.
        options: of the method, by name.
        label: what tables call it; default: the method's name.
        source: hash of the CSV file, so that a changed one is another run; empty for a name, whose hash is known.
        rows: of the CSV file; those of a name are known.
    """

    experiment: str
    data: str
    method: str
    split: int
    options: tuple[tuple[str, Any], ...] = ()
    label: str = ""
    source: str = ""
    rows: int = 0

    @property
    def key(self) -> str:
        """A hash of all this, without the label, and of the defaults behind it: other defaults are another run."""
        data = self.name if self.name in SOURCES else self.source or self.data
        facts = [self.experiment, data, self.method, self.split, dict(self.options), self.behind]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:24]

    @property
    def behind(self) -> dict[str, Any]:
        """All values behind the method that its options do not name."""
        rows = SOURCES[self.name].rows if self.name in SOURCES else self.rows
        # the paper's start has a value that is no plain number
        found: dict[str, Any] = json.loads(json.dumps(defaults(self.method, dict(self.options), rows), default=vars))
        return found

    @property
    def name(self) -> str:
        """What results call the data; a file with the name, but not the contents, of a set of the paper is NAME.csv."""
        path = Path(self.data)
        if path.suffix != ".csv" or path.stem not in SOURCES:
            return path.stem
        is_the_papers = self.source and SOURCES[path.stem].sha256.startswith(self.source)
        return path.stem if is_the_papers else path.name


def defaults(method: str, options: dict[str, Any], rows: int = 0) -> dict[str, Any]:
    """All values behind a method, on data with so many rows, that its options do not name."""
    found: dict[str, Any] = {"parameters": plain_parameters(make_method(method))}
    if method in TRAINED:
        preset = options.get("preset", "default")
        start = STARTS["paper" if preset == "paper" else "default"]
        found |= {"settings": as_settings(preset).as_dict(), "start": asdict(start)}
        if found["parameters"]["precision"] is None:
            found["parameters"]["precision"] = preset_precision(preset)
        rush_steps = MANY["rush_steps"]
        found["rows"] = {"stopping": STOPPING_ROWS, "many": MANY_ROWS, "rush_steps": rush_steps, "rush": RUSH_ROWS}
        if rows >= MANY_ROWS:
            found["many"] = MANY
    if method == "sghmc":
        found |= {"settings": asdict(SghmcSettings()), "start": asdict(STARTS[options.get("start", "default")])}
    return found


def plan(
    experiments: Iterable[str],
    data: Iterable[str],
    methods: Iterable[Method],
    splits: Iterable[int],
) -> list[Task]:
    """All combinations, split by split."""
    sources = {_place(name): _source(name) for name in data}
    numbers, chosen = list(splits), list(methods)
    tasks: dict[str, Task] = {}
    for experiment in experiments:
        if experiment not in SPLITS:
            raise InputError(f"unknown experiment {experiment!r}: use one of {', '.join(SPLITS)}.")
        for number in numbers:
            for name, (source, rows) in sources.items():
                for method in chosen:
                    task = Task(experiment, name, method.name, number, method.options, method.label, source, rows)
                    tasks.setdefault(task.key, task)
    return list(tasks.values())


def refuse_mixtures(tasks: Iterable[Task], finished: Iterable[Run]) -> None:
    """Raise if a table could not tell runs apart: the same name and label, made from other data or in another way."""
    seen: dict[tuple[str, ...], str] = {}
    rows = [(run.experiment, run.data, run.record) for run in finished]
    for experiment, name, record in [*rows, *((task.experiment, task.name, _recipe(task)) for task in tasks)]:
        label = str(record.get("label"))
        for fact in set(TOLD_APART) & set(record):
            text = json.dumps(record[fact], sort_keys=True, default=vars)
            if seen.setdefault((experiment, name, label, fact), text) != text:
                raise InputError(
                    f"there would be runs of {label} on {name} that differ in {TOLD_APART[fact]}, and no table could "
                    "tell them apart: keep each in a --store of its own."
                )


def _place(name: str) -> str:
    """The path of a CSV file in full, because workers may be started in another folder."""
    return str(Path(name).resolve()) if name.endswith(".csv") else name


def _source(name: str) -> tuple[str, int]:
    """The hash of a CSV file, and the number of its lines, the first one not counted; nothing for a name."""
    path = Path(name)
    if path.suffix != ".csv" or not path.is_file():
        return "", 0
    text = path.read_bytes()
    return hashlib.sha256(text).hexdigest()[:16], len(text.splitlines()) - 1


TOLD_APART = {"options": "options", "behind": "the defaults behind them", "source": "the contents of the file"}
"""Recorded facts in which the runs of one row of a table agree."""


def run_task(task: Task, data_dir: str | None = None, scratch: str | None = None) -> Run:
    """Make one run. An error inside it is its result, not the end of the sweep."""
    facts = _about(task)
    began = time.perf_counter()
    try:
        table = load(task.data, data_dir)
        split = SPLITS[task.experiment](table.x, task.split)
        facts |= {"data_digest": digest(table), "split_digest": split.digest, "rows": len(table.x)}
        options = dict(task.options)
        if task.method in SEEDED:
            options["random_state"] = task.split
        if scratch is not None and task.method in PLACED:
            # these are the methods that write checkpoints
            options["checkpoint"] = str(Path(scratch) / task.key)
        y = table.y[:, 0]
        fit_began = time.perf_counter()
        model = make_method(task.method, **options).fit(table.x[split.train], y[split.train])
        before = max(0.0, getattr(model, "fit_seconds_", 0.0) - (time.perf_counter() - fit_began))
        prediction = model.predict_dist(table.x[split.test])
        facts |= metrics.scores(prediction, y[split.test])
        facts |= facts_of(model)
        log_density = prediction.log_prob(y[split.test])
        if not np.isfinite(log_density).all():
            raise StructuredDGPError(f"{np.sum(~np.isfinite(log_density))} log densities of test rows are not finite.")
    except Exception as error:  # whatever it is, it belongs into the record
        return failed_run(task, error, {**facts, "seconds": time.perf_counter() - began})
    # with the seconds that were spent on it before it was interrupted
    facts["seconds"] = time.perf_counter() - began + before
    return Run(task.key, task.experiment, task.name, task.method, task.split, "done", facts, log_density)


def failed_run(task: Task, error: BaseException, facts: dict[str, Any] | None = None) -> Run:
    """The record of a run that ended with an error."""
    trace = "".join(traceback.format_exception(error, limit=-3))
    facts = {**(facts or _about(task)), "error": f"{type(error).__name__}: {error}", "trace": trace}
    return Run(task.key, task.experiment, task.name, task.method, task.split, "failed", facts)


def _about(task: Task) -> dict[str, Any]:
    return {**_recipe(task), **machine()}


def _recipe(task: Task) -> dict[str, Any]:
    """What is known about a run before it is made."""
    file = {"file": Path(task.data).name, "source": task.source} if task.source and task.name not in SOURCES else {}
    return {"label": task.label or task.method, "options": dict(task.options), "behind": task.behind, **file}


def _run_and_store(task: Task, store: str, data_dir: str | None) -> tuple[str, bool]:
    """What a worker does: the run, its record, and the end of its checkpoints.

    Returns its key, and whether the store has it as finished, whoever has finished it.
    """
    results, scratch = Store(store), Path(f"{store}.checkpoints")
    scratch.mkdir(exist_ok=True)
    mark = scratch / f"{task.key}.running"
    with _alone(scratch / f"{task.key}.lock"):
        mark.touch()
        if task.key not in results.finished():  # by a process that outlived the sweep before this one
            results.add(run_task(task, data_dir, str(scratch)))
        shutil.rmtree(scratch / task.key, ignore_errors=True)
        mark.unlink(missing_ok=True)
    return task.key, task.key in results.finished()


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Waits until no other process is at work on a run, where the system can tell."""
    if fcntl is None:
        yield
        return
    while True:
        with lock.open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # ends with the process, whatever ends it
            # the process that held it may have removed the file, so that others would lock a new one
            if _is_at(file.fileno(), lock):
                yield
                lock.unlink()
                return


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether an open file is the one that a path names now."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


@contextmanager
def _one_thread_each(n_jobs: int) -> Iterator[None]:
    """While several processes are started, each is told to use one thread.

    That joblib replaces a process whose memory has grown, as it does with every compiled program, is not worth a word.
    """
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false".strip()
    wanted = {"XLA_FLAGS": flags, "OMP_NUM_THREADS": "1"} if n_jobs > 1 else {}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "A worker stopped while some jobs", UserWarning)
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
    cluster: str | None = None,
    data_dir: str | None = None,
    verbose: int = 1,
) -> tuple[int, int]:
    """Make all runs that the store does not hold yet, in ``n_jobs`` processes, or on a Dask ``cluster``.

    Returns how many were finished and how many failed now. A lost worker loses no result: its run is made again, from
    its last checkpoint if it was one of these processes.
    """
    if n_jobs < 1:
        raise InputError(f"the number of processes must be at least 1; got {n_jobs}.")
    path, finished = str(store), Store(store).finished()
    refuse_mixtures(tasks, Store(store).runs(state="done"))
    if data_dir is not None:
        data_dir = str(Path(data_dir).resolve())  # because workers may be started in another folder
    open_tasks = {task.key: task for task in tasks if task.key not in finished}
    counts = {True: 0, False: 0}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    console = Console(stderr=True)
    with Progress(
        *(*columns, TimeElapsedColumn(), TimeRemainingColumn()),
        console=console,
        disable=not (verbose and console.is_terminal),
        speed_estimate_period=24 * 3600.0,  # runs take minutes
    ) as progress:
        bar = progress.add_task("runs", total=len(tasks), completed=len(tasks) - len(open_tasks))
        outcomes = (
            _outcomes(open_tasks, path, n_jobs, data_dir)
            if cluster is None
            else _outcomes_on_cluster(list(open_tasks.values()), Store(store), cluster, data_dir)
        )
        for key, good in outcomes:
            counts[good] += 1
            progress.advance(bar)
            if verbose and not console.is_terminal:
                task = open_tasks[key]
                what = f"{task.experiment} {task.name} {task.label} split {task.split}"
                print(f"{sum(counts.values())}/{len(open_tasks)} {what}{'' if good else ': failed'}", file=sys.stderr)
    return counts[True], counts[False]


def _outcomes(open_tasks: dict[str, Task], store: str, n_jobs: int, data_dir: str | None) -> Iterator[tuple[str, bool]]:
    """The outcomes of all tasks as they come, in other processes unless there is only one."""
    if n_jobs == 1:
        for task in open_tasks.values():
            yield _run_and_store(task, store, data_dir)
        return
    left, scratch = dict(open_tasks), Path(f"{store}.checkpoints")
    suspects, lost = set[str](), Counter[str]()
    marks = {key: scratch / f"{key}.running" for key in left}
    reached = {key: _reached(scratch / key) for key in left}
    for _ in range(LOST_WORKERS):
        for key in left:
            marks[key].unlink(missing_ok=True)
        # runs that were under way when a process was lost come last, each on its own, to find the one that did it
        groups = [[task for key, task in left.items() if key not in suspects]]
        groups += [[task] for key, task in left.items() if key in suspects]
        try:
            for group in groups:
                for key, good in _in_processes(group, store, n_jobs, data_dir):
                    del left[key]
                    yield key, good
            return
        except TerminatedWorkerError as error:
            results = Store(store)
            finished = results.finished()
            for key in list(left):
                if key in finished:
                    del left[key]
                    yield key, True
                elif marks[key].exists():
                    suspects.add(key)
                    before, reached[key] = reached[key], _reached(scratch / key)
                    lost[key] += before == reached[key]
                    if lost[key] == LOST_RUNS:
                        results.add(failed_run(left.pop(key), error))
                        yield key, False
    raise StructuredDGPError(f"workers were lost {LOST_WORKERS} times: is there enough memory? Use fewer processes.")


def _reached(folder: Path) -> dict[Path, str]:
    """The name, with the step, of the latest checkpoint of each part of a run."""
    return {path.parent: path.name for path in sorted(folder.rglob("step-*.safetensors"))}


def _in_processes(tasks: list[Task], store: str, n_jobs: int, data_dir: str | None) -> Iterator[tuple[str, bool]]:
    with _one_thread_each(n_jobs), Parallel(n_jobs=n_jobs, return_as="generator_unordered") as parallel:
        yield from parallel(delayed(_run_and_store)(task, store, data_dir) for task in tasks)


def _outcomes_on_cluster(
    open_tasks: list[Task], store: Store, address: str, data_dir: str | None
) -> Iterator[tuple[str, bool]]:
    """The outcomes of all tasks as they come from a Dask cluster, whose workers need not see the store.

    The scheduler gives the tasks of a lost worker to another one, but after some losses it gives up every task that was
    waiting there, not only the one under way. Such tasks are sent again together, and then each on its own: a run that
    is given up even so counts as failed. A result is stored here when it arrives.
    """
    try:
        from distributed import Client
    except ImportError as error:
        raise InputError("a cluster needs Dask: pip install 'structured-dgp[cluster]'.") from error
    try:
        client = Client(address, timeout=TIMEOUT)
    except (OSError, ValueError) as error:
        raise InputError(f"there is no Dask scheduler at {address}: {error}.") from error
    with client:
        left = {task.key: task for task in open_tasks}
        for name in ("", "again-"):
            for task, run, is_given_up in _on_cluster(client, list(left.values()), data_dir, name):
                if not is_given_up:
                    del left[task.key]
                    store.add(run)
                    yield task.key, task.key in store.finished()
        for task in left.values():
            for _, run, _ in _on_cluster(client, [task], data_dir, "alone-"):
                store.add(run)
                yield task.key, task.key in store.finished()


def _on_cluster(client: Any, tasks: list[Task], data_dir: str | None, name: str) -> Iterator[tuple[Task, Run, bool]]:
    """Each task with its run as it comes, and whether this is the scheduler's word that workers were lost with it."""
    from distributed import KilledWorker, as_completed
    from distributed.client import FutureCancelledError

    keys = [name + task.key for task in tasks]
    futures = client.map(run_task, tasks, data_dir=data_dir, key=keys, pure=False)
    found = dict(zip(keys, tasks, strict=True))
    for future in as_completed(futures):
        try:
            task, trouble = found[future.key], future.exception()
            run = future.result() if trouble is None else failed_run(task, trouble)
        except FutureCancelledError as error:
            raise StructuredDGPError(
                "the cluster was lost: finished runs are stored, call again for others."
            ) from error
        if run.key != task.key:
            run = failed_run(task, StructuredDGPError("the worker has another version of the library, or of the data."))
        future.release()  # or the cluster would make it again if it lost the worker that still holds it
        yield task, run, isinstance(trouble, KilledWorker)
