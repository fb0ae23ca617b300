"""Prediction at many rows: rows per second and peak memory, ours and GPyTorch's mean-field deep GP.

    python benchmarks/predict.py --json predict.json

Every case runs in a process of its own, because peak memory is a property of a process. Standard sizes: M=128,
widths (5, 5, 1), D=9, and the same number of draws of the hidden noise for all.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from typing import Any

import numpy as np
from common import emit, parser

CASES = ("mf float64", "star float64", "fc float64", "mf mixed", "star mixed", "fc mixed")
YARDSTICKS = ("gpytorch-mf float64", "gpytorch-mf float32")
BATCH = 512  # rows that GPyTorch is given at once; it keeps everything of a call in memory


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024.0


def ours(coupling: str, precision: str, x: np.ndarray, n_draws: int) -> dict[str, float]:
    from structured_dgp.initial import initial_model
    from structured_dgp.model import PREDICTION_ROWS

    model = initial_model(x[:2000], coupling, (5, 5, 1), 128, precision=precision)
    model.predict(x[:PREDICTION_ROWS], n_draws)
    before, start = peak_mb(), time.perf_counter()
    mixture = model.predict(x, n_draws)
    seconds = time.perf_counter() - start
    if not (np.isfinite(mixture.mean).all() and np.isfinite(mixture.var).all()):
        raise RuntimeError("the prediction is not finite")
    return {"seconds": seconds, "peak_mb": peak_mb(), "before_mb": before}


def theirs(precision: str, x: np.ndarray, n_draws: int) -> dict[str, float]:
    import gpytorch
    import torch
    from step import Workload, gpytorch_model

    dtype = getattr(torch, precision)
    model, likelihood = gpytorch_model(Workload(), precision)
    model.eval()
    likelihood.eval()
    rows = torch.as_tensor(x, dtype=dtype)

    def predict(rows: Any) -> tuple[Any, Any]:
        means, variances = [], []
        with torch.no_grad(), gpytorch.settings.num_likelihood_samples(n_draws):
            for start in range(0, len(rows), BATCH):
                output = likelihood(model(rows[start : start + BATCH]))
                means.append(output.mean)
                variances.append(output.variance)
        return torch.cat(means, -1), torch.cat(variances, -1)

    predict(rows[:BATCH])
    before, start = peak_mb(), time.perf_counter()
    predict(rows)
    return {"seconds": time.perf_counter() - start, "peak_mb": peak_mb(), "before_mb": before}


def one_case(case: str, n_rows: int, n_draws: int) -> dict[str, Any]:
    what, precision = case.split()
    x = np.random.default_rng(0).standard_normal((n_rows, 9))
    found = theirs(precision, x, n_draws) if what == "gpytorch-mf" else ours(what, precision, x, n_draws)
    rate = n_rows / found["seconds"]
    return {"what": what, "precision": precision, "rows": n_rows, "draws": n_draws, "rows_per_s": rate, **found}


def main() -> None:
    options = parser(__doc__.splitlines()[0])
    options.set_defaults(repeats=1)
    options.add_argument("--rows", type=int, default=100_000)
    options.add_argument("--draws", type=int, default=10)
    options.add_argument("--cases", nargs="+", default=[*CASES, *YARDSTICKS])
    options.add_argument("--one", help="run this case in this process and print JSON")
    arguments = options.parse_args()
    if arguments.one:
        print(json.dumps(one_case(arguments.one, arguments.rows, arguments.draws)))
        return
    rows = []
    for case in arguments.cases:
        command = [sys.executable, __file__, "--one", case, "--rows", str(arguments.rows)]
        best: dict[str, Any] | None = None
        for _ in range(arguments.repeats):
            done = subprocess.run(
                [*command, "--draws", str(arguments.draws)], stdout=subprocess.PIPE, text=True, check=True
            )
            row = json.loads(done.stdout)
            best = row if best is None or row["seconds"] < best["seconds"] else best
        rows.append(best)
        print(f"{case:20s} {best['rows_per_s']:10.0f} rows/s  peak {best['peak_mb']:7.0f} MB", flush=True)
    emit(rows, arguments.json)


if __name__ == "__main__":
    main()
