"""Every method on the same splits: interpolating and extrapolating, with the default settings of each.

    python benchmarks/methods.py concrete energy --splits 3 --json methods.json

Runs that the JSON file already holds are not repeated.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import emit, parser

from structured_dgp import metrics
from structured_dgp.baselines import METHODS, effective_sample_size, make_method
from structured_dgp.datasets import load_embedded
from structured_dgp.experiments.splits import SPLITS

SEEDED = [name for name in METHODS if name != "exact"]
SHOWN = ("log_likelihood", "rmse", "crps", "coverage", "seconds")


def run(data: str, task: str, method: str, seed: int) -> dict[str, Any]:
    """One fit and its scores."""
    table = load_embedded(data)
    split = SPLITS[task](table.x, seed)
    x, y = table.x, table.y[:, 0]
    began = time.perf_counter()
    model = make_method(method, **({"random_state": seed} if method in SEEDED else {}))
    model.fit(x[split.train], y[split.train])
    seconds = time.perf_counter() - began
    row = {"data": data, "task": task, "what": method, "split": seed, "seconds": seconds}
    if method == "sghmc":
        row["effective_samples"] = float(np.median(effective_sample_size(model.chains_)))
    return {**row, **metrics.scores(model.predict_dist(x[split.test]), y[split.test])}


def show(rows: list[dict[str, Any]]) -> None:
    """One line for each data set, task and method: means and standard errors over splits."""
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["data"], row["task"], row["what"]), []).append(row)
    for (data, task, method), found in groups.items():
        text = []
        for key in SHOWN:
            values = np.array([row[key] for row in found])
            error = values.std(ddof=1) / np.sqrt(len(values)) if len(values) > 1 else float("nan")
            text.append(f"{key} {values.mean():8.3f} ± {error:.3f}")
        print(f"{data:9s} {task:13s} {method:10s} {len(found)} splits  {'  '.join(text)}")


def main() -> None:
    options = parser(__doc__.splitlines()[0])
    options.add_argument("names", nargs="*", default=["concrete", "energy"])
    options.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    options.add_argument("--tasks", nargs="+", default=list(SPLITS), choices=list(SPLITS))
    options.add_argument("--splits", type=int, default=3)
    arguments = options.parse_args()
    known = Path(arguments.json) if arguments.json not in (None, "-") else None
    rows = json.loads(known.read_text())["rows"] if known is not None and known.exists() else []
    done = {(row["data"], row["task"], row["what"], row["split"]) for row in rows}
    for method in arguments.methods:
        for data in arguments.names:
            for task in arguments.tasks:
                for seed in range(arguments.splits):
                    if (data, task, method, seed) not in done:
                        rows.append(run(data, task, method, seed))
                        emit(rows, arguments.json)
                        print(".", end="", flush=True)
    print()
    show(rows)


if __name__ == "__main__":
    main()
