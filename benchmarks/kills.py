"""A sweep that is killed again and again, beside one that is not: every run has to be there once, and equal.

    python benchmarks/kills.py --kills 10 --json kills.json

Three sweeps of the same small runs: undisturbed; in two processes, of which at random moments one is killed, or their
parent, after which the sweep is called again; and on a Dask cluster that at random moments loses a worker and gets a
new one. Linux only, because children are found in ``/proc``.
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import emit, parser

from structured_dgp.experiments.store import Run, Store

RUNS = {"--data": "energy,concrete", "--methods": "sgp,mf-l2,star-l2", "--splits": "2", "--steps": "150"}
SWEEP = ["bench", "run", *(word for option in RUNS.items() for word in option), "--inducing", "16"]
VICTIMS = ("worker", "parent")
"""Of the sweep in processes, in turn."""
SDGP = str(Path(sys.executable).parent / "sdgp")
ONE_THREAD = {"XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false", "OMP_NUM_THREADS": "1"}


class Stage:
    """A folder in which sweeps and a cluster are started, with one thread in each process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        programs = {
            "JAX_COMPILATION_CACHE_DIR": str(folder / "programs"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.3",
        }
        self.environment = {**os.environ, **ONE_THREAD, **programs}

    def start(self, name: str, command: list[str]) -> subprocess.Popen[bytes]:
        with self.log(name).open("ab") as file:
            return subprocess.Popen(command, stdout=file, stderr=file, cwd=self.folder, env=self.environment)

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def sweep(self, name: str, *options: str) -> subprocess.Popen[bytes]:
        return self.start(name, [SDGP, *SWEEP, "--store", str(self.store(name)), *options])

    def store(self, name: str) -> Path:
        return self.folder / f"{name}.sqlite"

    def is_at_work(self, name: str) -> bool:
        """Whether a run is under way."""
        return any(Path(f"{self.store(name)}.checkpoints").glob("*.running"))

    def dask(self, name: str, part: str, *options: str) -> subprocess.Popen[bytes]:
        return self.start(name, [sys.executable, "-m", f"distributed.cli.dask_{part}", *options])


def workers_of(pid: int) -> list[int]:
    """The processes in which a sweep makes its runs."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                status, command = (entry / "stat").read_text(), (entry / "cmdline").read_bytes()
            except OSError:
                continue  # it has just ended
            if int(status.rpartition(")")[2].split()[1]) == pid and b"loky" in command and b"tracker" not in command:
                found.append(int(entry.name))
    return found


def undisturbed(stage: Stage) -> float:
    """The sweep that nobody kills, and how long it took."""
    began = time.perf_counter()
    if stage.sweep("undisturbed", "--jobs", "2").wait() != 0:
        raise SystemExit(stage.log("undisturbed").read_text())
    return time.perf_counter() - began


def killed_here(stage: Stage, kills: int, pause: float, chance: random.Random) -> list[str]:
    """The sweep in processes, with kills at random moments, and who was killed."""
    victims: list[str] = []
    process = stage.sweep("processes", "--jobs", "2")
    while True:
        try:
            process.wait(timeout=chance.uniform(0.3, 1.7) * pause if len(victims) < kills else None)
        except subprocess.TimeoutExpired:
            victim = VICTIMS[len(victims) % len(VICTIMS)]
            workers = workers_of(process.pid)
            if victim == "parent":
                process.kill()
                process.wait()
                process = stage.sweep("processes", "--jobs", "2")
            elif workers and stage.is_at_work("processes"):
                os.kill(chance.choice(workers), signal.SIGKILL)
            else:
                continue  # nobody to kill yet
            victims.append(victim)
            continue
        return victims


def killed_on_cluster(stage: Stage, kills: int, pause: float, chance: random.Random) -> list[str]:
    """The sweep on a cluster whose workers are killed at random moments, each replaced by a new one."""
    scheduler = stage.dask("scheduler", "scheduler", "--host", "127.0.0.1", "--port", "0", "--no-dashboard")
    while not (found := re.search(r"tcp://127\.0\.0\.1:\d+", stage.log("scheduler").read_text())):
        if scheduler.poll() is not None:
            raise SystemExit(stage.log("scheduler").read_text())
        time.sleep(0.1)
    options = (found[0], "--nthreads", "1", "--no-nanny", "--no-dashboard")
    workers = [stage.dask("workers", "worker", *options) for _ in range(2)]
    victims: list[str] = []
    try:
        process = stage.sweep("cluster", "--cluster", found[0])
        while process.poll() is None:
            try:
                process.wait(timeout=chance.uniform(0.3, 1.7) * pause if len(victims) < kills else None)
            except subprocess.TimeoutExpired:
                place = chance.randrange(len(workers))
                workers[place].kill()
                workers[place].wait()
                workers[place] = stage.dask("workers", "worker", *options)
                victims.append("dask worker")
        return victims
    finally:
        for one in (*workers, scheduler):
            one.kill()
            one.wait()


def compared(stage: Stage, name: str, victims: list[str]) -> dict[str, Any]:
    """How the runs of a disturbed sweep differ from those of the undisturbed one."""
    ours, theirs = (Store(stage.store(which)).runs() for which in (name, "undisturbed"))

    def same(a: Run, b: Run) -> bool:
        scores = ("log_likelihood", "rmse", "elbo")
        return np.array_equal(a.log_density, b.log_density) and all(
            a.record.get(score) == b.record.get(score) for score in scores
        )

    there = {run.key: run for run in ours if run.state == "done"}
    return {
        "what": name,
        "killed": victims,
        "runs": len(theirs),
        "once": len(ours) == len(there) == len(theirs) and all(run.key in there for run in theirs),
        "equal": sum(run.key in there and same(there[run.key], run) for run in theirs),
        "left_behind": len(list(Path(f"{stage.store(name)}.checkpoints").glob("*"))),
    }


def main() -> None:
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--kills", type=int, default=10, help="in each of the two disturbed sweeps")
    options.add_argument("--seed", type=int, default=0)
    arguments = options.parse_args()
    chance = random.Random(arguments.seed)
    rows = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        stage = Stage(Path(folder))
        seconds = undisturbed(stage)
        print(f"undisturbed: {seconds:.0f} s", flush=True)
        for name, way in (("processes", killed_here), ("cluster", killed_on_cluster)):
            # the later sweeps find their programs compiled, and are faster than the first
            victims = way(stage, arguments.kills, max(2.0, seconds / (4 * arguments.kills)), chance)
            rows.append(compared(stage, name, victims))
            print(rows[-1], flush=True)
            emit(rows, arguments.json)
    if any(not row["once"] or row["equal"] < row["runs"] or row["left_behind"] for row in rows):
        raise SystemExit("a sweep that was killed is not equal to one that was not.")
    if any(len(row["killed"]) < arguments.kills for row in rows):
        raise SystemExit("a sweep ended before it was killed so often: make it longer, with more --splits in RUNS.")


if __name__ == "__main__":
    main()
