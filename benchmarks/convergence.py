"""ELBO over steps and seconds: natural gradients against Adam, on one split of each data set.

    python benchmarks/convergence.py concrete --couplings star --json convergence.json --figure convergence.png

All runs start from the same model. ``natural`` are the default settings; ``adam 0.005`` has the paper's rate and runs
longest; the other rates look for the best that Adam can do.
"""

from __future__ import annotations

from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from common import emit, parser
from data import interpolation_split

from structured_dgp.initial import initial_model
from structured_dgp.training import Trained, train

RATES = (0.005, 0.01, 0.02, 0.04)
EVERY = 25


def curve(trained: Trained) -> dict[str, list[float]]:
    """Smoothed over four records, because each is a mean over few minibatches."""
    elbo = trained.history["elbo"]
    window = np.ones(4) / 4
    smooth = np.convolve(elbo, window, mode="full")[: len(elbo)] / np.convolve(np.ones_like(elbo), window)[: len(elbo)]
    return {
        "step": trained.history["step"].tolist(),
        "elbo": smooth.tolist(),
        "seconds": trained.history["seconds"].tolist(),
    }


def reach(run: dict[str, list[float]], target: float) -> dict[str, float] | None:
    """The first step, and the time, at which a curve reaches ``target``."""
    for step, elbo, seconds in zip(run["step"], run["elbo"], run["seconds"], strict=True):
        if elbo >= target:
            return {"step": step, "seconds": seconds}
    return None


def at(run: dict[str, list[float]], step: int) -> tuple[float, float]:
    """ELBO and seconds at a step, or at the last one before."""
    place = max(i for i, s in enumerate(run["step"]) if s <= step)
    return run["elbo"][place], run["seconds"][place]


def compare(name: str, coupling: str, arguments: Any) -> dict[str, Any]:
    """All runs of one coupling on one data set, and what they say."""
    split = interpolation_split(name, 0, arguments.data)
    start = initial_model(split.x, coupling, (5, 5, 1), 128, precision=arguments.precision)
    runs: dict[str, dict[str, list[float]]] = {}

    def run(label: str, steps: int, **changes: Any) -> None:
        options = {"max_steps": steps, "score_every": EVERY, "batch_size": 512, **changes}
        runs[label] = curve(train(start, split.x, split.y, **options))
        print(f"{name} {coupling} {label}: ELBO {runs[label]['elbo'][-1]:.1f} after {steps} steps", flush=True)

    run("natural", arguments.steps)
    for rate in RATES:
        steps = arguments.paper_steps if rate == RATES[0] else arguments.steps
        run(f"adam {rate}", steps, optimizer="adam", learning_rate=rate)
    paper, paper_seconds = at(runs["adam 0.005"], arguments.paper_steps)
    best = max(RATES, key=lambda rate: at(runs[f"adam {rate}"], arguments.steps)[0])
    best_elbo, best_seconds = at(runs[f"adam {best}"], arguments.steps)
    findings = {
        "paper": {"elbo": paper, "steps": arguments.paper_steps, "seconds": paper_seconds},
        "best": {"rate": best, "elbo": best_elbo, "steps": arguments.steps, "seconds": best_seconds},
        "natural_reaches_paper": reach(runs["natural"], paper),
        "natural_reaches_best": reach(runs["natural"], best_elbo),
    }
    print(f"{name} {coupling}: {findings}", flush=True)
    return {"what": coupling, "data": name, "precision": arguments.precision, "findings": findings, "curves": runs}


def draw(rows: list[dict[str, Any]], path: str) -> None:
    """ELBO over seconds, one panel for each data set and coupling."""
    figure, axes = plt.subplots(1, len(rows), figsize=(4.5 * len(rows), 3.8), layout="constrained", squeeze=False)
    for axis, row in zip(axes[0], rows, strict=True):
        for label, run in row["curves"].items():
            axis.plot(run["seconds"], run["elbo"], label=label, linewidth=2 if label == "natural" else 1)
        last = max(run["elbo"][-1] for run in row["curves"].values())
        axis.set(title=f"{row['data']}, {row['what'].upper()}", xlabel="seconds")
        axis.set_ylim(last - 3 * abs(last) - 300, None)
        axis.legend(frameon=False, fontsize=8)
    axes[0][0].set_ylabel("ELBO")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    options = parser(__doc__.splitlines()[0])
    options.add_argument("names", nargs="*", default=["concrete"])
    options.add_argument("--couplings", nargs="+", default=["star"])
    options.add_argument("--data", metavar="FOLDER")
    options.add_argument("--precision", default="mixed")
    options.add_argument("--steps", type=int, default=1500)
    options.add_argument("--paper-steps", type=int, default=5000)
    options.add_argument("--figure", metavar="FILE")
    arguments = options.parse_args()
    rows = [compare(name, coupling, arguments) for name in arguments.names for coupling in arguments.couplings]
    if arguments.figure:
        draw(rows, arguments.figure)
    emit(rows, arguments.json)


if __name__ == "__main__":
    main()
