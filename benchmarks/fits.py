"""Whole fits with the default settings: time, ELBO and test scores over splits, beside the paper's figures.

    python benchmarks/fits.py concrete energy --couplings mf star fc --splits 0 1 2 --json fits.json

Nine tenths of the rows are trained on. The ELBO is the mean over the last tenth of the steps.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from common import emit, parser
from data import interpolation_split

from structured_dgp.experiments import paper
from structured_dgp.initial import initial_model
from structured_dgp.training import Settings, train

MISSING = (float("nan"), float("nan"))


def fit(name: str, coupling: str, seed: int, arguments: Any) -> dict[str, Any]:
    """One fit."""
    split = interpolation_split(name, seed, arguments.data)
    model = initial_model(split.x, coupling, (5, 5, 1), 128, precision=arguments.precision)
    changes = {name: json.loads(value) for name, value in (pair.split("=") for pair in arguments.also)}
    if arguments.steps is not None:
        changes["max_steps"] = arguments.steps
    settings = Settings() if arguments.preset == "none" else arguments.preset
    trained = train(model, split.x, split.y, settings, seed=seed, **changes)
    mixture = trained.model.predict(split.x_test)
    history = trained.history if trained.refit is None else trained.refit
    late = history["step"] > 0.9 * history["step"][-1]
    return {
        "what": coupling,
        "data": name,
        "split": seed,
        "steps": trained.steps,
        "best_step": trained.best_step,
        "seconds": trained.seconds,
        "elbo": float(history["elbo"][late].mean()),
        "noise": float(history["noise"][-1]),
        "log_likelihood": float(np.mean(mixture.log_prob(split.y_test)) - np.log(split.unit)),
        "rmse": float(split.unit * np.sqrt(np.mean((mixture.mean - split.y_test) ** 2))),
    }


def main() -> None:
    options = parser(__doc__.splitlines()[0])
    options.add_argument("names", nargs="*", default=["concrete", "energy"])
    options.add_argument("--couplings", nargs="+", default=["star"])
    options.add_argument("--splits", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    options.add_argument("--data", metavar="FOLDER")
    options.add_argument("--precision", default="mixed")
    options.add_argument(
        "--preset", default="default", help="default, paper, or none: all rows, a fixed number of steps"
    )
    options.add_argument("--steps", type=int)
    options.add_argument("--also", nargs="+", default=[], metavar="NAME=VALUE", help="other settings changed so")
    arguments = options.parse_args()
    rows: list[dict[str, Any]] = []
    for name in arguments.names:
        for coupling in arguments.couplings:
            found = [fit(name, coupling, seed, arguments) for seed in arguments.splits]
            rows += found
            emit(rows, arguments.json)
            scores, elbos, seconds = (
                np.array([row[k] for row in found]) for k in ("log_likelihood", "elbo", "seconds")
            )
            error = scores.std(ddof=1) / np.sqrt(len(scores)) if len(scores) > 1 else float("nan")
            known = paper.INTERPOLATION.get(name, {}).get(f"{coupling.upper()} L3", MISSING)[0]
            known_elbo = paper.ELBO.get(name, {}).get(coupling.upper(), MISSING)[0]
            print(
                f"{name:9s} {coupling:5s} log-likelihood {scores.mean():7.3f} ± {error:.3f} (paper {known:6.2f})  "
                f"ELBO {elbos.mean():8.1f} (paper {known_elbo:6.0f})  {seconds.mean():5.0f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
