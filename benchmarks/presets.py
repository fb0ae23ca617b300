"""How the default settings were chosen: hold-out scores inside the training rows, over data sets and splits.

    python benchmarks/presets.py concrete energy --splits 0 1 --set learning_rate 0.01 0.02 0.04 --json presets.json

The test rows of a split are never looked at: a tenth of its training rows is held out, the rest is trained on, and the
log-likelihood of the held-out rows, in the units of the target, is recorded along the way.
"""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Any

import numpy as np
from common import emit, parser
from data import interpolation_split

from structured_dgp.initial import STARTS, initial_model
from structured_dgp.training import train


def scores(name: str, seed: int, arguments: Any, **changes: Any) -> dict[str, Any]:
    """Hold-out scores of one run, every ``arguments.every`` steps."""
    split = interpolation_split(name, seed, arguments.data)
    start = "default" if arguments.noise is None else replace(STARTS["default"], noise=arguments.noise)
    model = initial_model(split.x, arguments.coupling, (5, 5, 1), 128, start=start, precision=arguments.precision)
    start = time.perf_counter()
    options = {"max_steps": arguments.steps, "score_every": arguments.every, "score_draws": 64, "holdout": 0.1}
    history = train(model, split.x, split.y, **options, seed=seed, **changes).history
    return {
        "data": name,
        "split": seed,
        "noise": arguments.noise,
        **changes,
        "step": history["step"].tolist(),
        "score": (history["score"] - np.log(split.unit)).tolist(),
        "elbo": history["elbo"].tolist(),
        "noises": history["noise"].tolist(),
        "seconds": time.perf_counter() - start,
    }


def main() -> None:
    options = parser(__doc__.splitlines()[0])
    options.add_argument("names", nargs="*", default=["concrete", "energy"])
    options.add_argument("--data", metavar="FOLDER")
    options.add_argument("--splits", type=int, nargs="+", default=[0, 1])
    options.add_argument("--set", nargs="+", default=["learning_rate", "0.01"], help="a setting and its values")
    options.add_argument("--also", nargs="+", default=[], metavar="NAME=VALUE", help="other settings, the same for all")
    options.add_argument("--noise", type=float, help="initial noise variance")
    options.add_argument("--coupling", default="star")
    options.add_argument("--precision", default="mixed")
    options.add_argument("--steps", type=int, default=1500)
    options.add_argument("--every", type=int, default=125)
    arguments = options.parse_args()
    setting, *values = arguments.set
    also = {name: json.loads(value) for name, value in (pair.split("=") for pair in arguments.also)}
    rows = []
    for name in arguments.names:
        for value in map(json.loads, values):
            found = [scores(name, seed, arguments, **also, **{setting: value}) for seed in arguments.splits]
            rows += found
            mean = np.mean([row["score"] for row in found], axis=0)
            text = " ".join(f"{score:7.3f}" for score in mean)
            seconds = np.mean([row["seconds"] for row in found])
            print(f"{name:10s} {setting} {value!s:6s} {seconds:4.0f} s {text}", flush=True)
            emit(rows, arguments.json)


if __name__ == "__main__":
    main()
