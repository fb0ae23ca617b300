"""One input, changing noise and shape: a deep GP beside a sparse GP on mcycle and lidar, over random splits.

    python benchmarks/curves.py --data FOLDER --json curves.json --figure curves.png

``FOLDER`` holds mcycle.csv and lidar.csv. A tenth of the rows is tested on. Methods called noise have a likelihood with
noise that depends on the input.
"""

from __future__ import annotations

from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from common import emit, parser
from data import load

from structured_dgp import DeepGPRegressor, metrics
from structured_dgp.plots import plot_prediction

AXES = {"mcycle": ("milliseconds after the impact", "acceleration (g)"), "lidar": ("distance", "log ratio")}
METHODS: dict[str, dict[str, Any]] = {
    "sgp": {"n_layers": 1},
    "mf": {"coupling": "mf"},
    "star": {"coupling": "star"},
    "sgp noise": {"n_layers": 1, "likelihood": "heteroscedastic"},
    "star noise": {"coupling": "star", "likelihood": "heteroscedastic"},
}


def estimator(method: str, arguments: Any, seed: int) -> DeepGPRegressor:
    return DeepGPRegressor(**METHODS[method], width=arguments.width, n_inducing=64, random_state=seed)


def score(name: str, method: str, seed: int, arguments: Any) -> dict[str, Any]:
    x, y = load(name, arguments.data)
    order = np.random.default_rng(seed).permutation(len(x))
    test, train = np.split(order, [round(0.1 * len(x))])
    model = estimator(method, arguments, seed).fit(x[train], y[train, 0])
    return {"data": name, "what": method, "split": seed, **metrics.scores(model.predict_dist(x[test]), y[test, 0])}


def draw(names: list[str], arguments: Any, path: str) -> None:
    figure, axes = plt.subplots(
        len(names),
        len(METHODS),
        figsize=(4 * len(METHODS), 3.2 * len(names)),
        sharey="row",
        layout="constrained",
        squeeze=False,
    )
    for row, name in zip(axes, names, strict=True):
        x, y = load(name, arguments.data)
        grid = np.linspace(x.min(), x.max(), 300)[:, None]
        for axis, method in zip(row, METHODS, strict=True):
            model = estimator(method, arguments, 0).fit(x, y[:, 0])
            plot_prediction(grid, model.predict_dist(grid), axis, data=(x, y))
            kind, *noise = method.upper().split()
            axis.set(title=f"{name}, {kind}{', noise by input' if noise else ''}", xlabel=AXES[name][0])
            if axis is not row[0]:
                axis.get_legend().remove()
        row[0].set_ylabel(AXES[name][1])
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    options = parser(__doc__.splitlines()[0])
    options.add_argument("names", nargs="*", default=["mcycle", "lidar"])
    options.add_argument("--data", metavar="FOLDER")
    options.add_argument("--splits", type=int, default=10)
    options.add_argument("--width", type=int, default=5)
    options.add_argument("--figure", metavar="FILE")
    arguments = options.parse_args()
    rows: list[dict[str, Any]] = []
    for name in arguments.names:
        for method in METHODS:
            found = [score(name, method, seed, arguments) for seed in range(arguments.splits)]
            rows += found
            emit(rows, arguments.json)
            text = []
            for key in ("log_likelihood", "crps", "rmse", "coverage"):
                values = np.array([row[key] for row in found])
                text.append(f"{key} {values.mean():7.3f} ± {values.std(ddof=1) / np.sqrt(len(values)):.3f}")
            print(f"{name:8s} {method:5s} {'  '.join(text)}", flush=True)
    if arguments.figure:
        draw(arguments.names, arguments, arguments.figure)


if __name__ == "__main__":
    main()
