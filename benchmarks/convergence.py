"""ELBO over steps and seconds: natural gradients against Adam, and analytic marginalisation against sampling.

    python benchmarks/convergence.py concrete --couplings star --json convergence.json --figure convergence.png

All runs of a data set and coupling start from the same model, with the paper's initial noise, and see the same
minibatches. ``natural`` has the default settings; ``adam 0.005`` has the paper's rate and runs longest; the other rates
look for the best that Adam can do. ``--also`` adds the default settings with some values changed: fewer samples, or
``'optimizer="adam",learning_rate=0.02'`` to tell what natural gradients give from what the other defaults give.

``--estimators`` compares two unbiased estimates of the same bound under the same optimiser: with the inducing outputs
marginalised analytically (Theorem 1), and with inducing outputs that are sampled.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from common import emit, parser
from data import Split, interpolation_split

from structured_dgp import DeepGP
from structured_dgp.initial import Start, initial_model
from structured_dgp.parameters import trainable_mask
from structured_dgp.training import Trained, train
from structured_dgp.training.step import ESTIMATES

RATES = (0.005, 0.01, 0.02, 0.04)
EVERY = 25
SAMPLES = 5
LEADING = ("natural", "analytic")
"""Drawn with a thicker line."""

PAPER = {"optimizer": "adam", "memory": 0.999, "surge": None, "relative": False, "antithetic": False}
"""Adam as the paper has it."""

Curve = dict[str, list[float]]


def smooth(elbo: Any) -> list[float]:
    """Means over four records, because each is itself a mean over few minibatches."""
    window = np.ones(4) / 4
    sums, counts = (np.convolve(part, window)[: len(elbo)] for part in (elbo, np.ones(len(elbo))))
    return (sums / counts).tolist()


def curve(trained: Trained) -> Curve:
    history = trained.history
    return {
        "step": history["step"].tolist(),
        "elbo": smooth(history["elbo"]),
        "seconds": history["seconds"].tolist(),
    }


def reach(run: Curve, target: float) -> dict[str, float] | None:
    """The first step, and the time, at which a curve reaches ``target``."""
    for step, elbo, seconds in zip(run["step"], run["elbo"], run["seconds"], strict=True):
        if elbo >= target:
            return {"step": step, "seconds": seconds}
    return None


def at(run: Curve, step: int) -> tuple[float, float]:
    """ELBO and seconds at a step, or at the last one before."""
    place = max(i for i, s in enumerate(run["step"]) if s <= step)
    return run["elbo"][place], run["seconds"][place]


def optimisers(
    split: Split,
    start: DeepGP,
    name: str,
    natural_steps: int,
    steps: int,
    paper_steps: int,
    others: dict[str, dict[str, Any]],
    known: dict[str, Curve],
) -> Any:
    """The curves of all optimisers, and what they say; curves that are known are not computed again."""
    ours: dict[str, dict[str, Any]] = {"natural": {}, **others}
    wanted: dict[str, tuple[int, dict[str, Any]]] = {label: (natural_steps, changes) for label, changes in ours.items()}
    for rate in RATES:
        wanted[f"adam {rate}"] = (
            paper_steps if rate == RATES[0] else steps,
            {**PAPER, "learning_rate": rate},
        )
    runs: dict[str, Curve] = {}
    for label, (n_steps, changes) in wanted.items():
        if label in known:
            runs[label] = known[label]
            continue
        options = {"max_steps": n_steps, "score_every": EVERY, "batch_size": 512, "n_samples": SAMPLES, **changes}
        runs[label] = curve(train(start, split.x, split.y, **options))
        print(f"{name} {label}: ELBO {runs[label]['elbo'][-1]:.1f} after {n_steps} steps", flush=True)
    paper, paper_seconds = at(runs["adam 0.005"], paper_steps)
    best = max(RATES, key=lambda rate: at(runs[f"adam {rate}"], steps)[0])
    best_elbo, best_seconds = at(runs[f"adam {best}"], steps)
    findings: dict[str, Any] = {
        "paper": {"elbo": paper, "steps": paper_steps, "seconds": paper_seconds},
        "best": {"rate": best, "elbo": best_elbo, "steps": steps, "seconds": best_seconds},
    }
    for label in ours:
        findings[f"{label} reaches paper"] = reach(runs[label], paper)
        findings[f"{label} reaches best"] = reach(runs[label], best_elbo)
    for what, found in findings.items():
        print(f"{name} {what}: {found}", flush=True)
    return {"findings": findings, "curves": runs}


def gradient_noise(model: DeepGP, split: Split, draws: int = 40) -> dict[str, float]:
    """The total variance of the gradient of the data term over draws of its noise, same rows, for both estimates."""
    x, y = (jnp.asarray(part[:512], model.dtype) for part in (split.x, split.y))
    parameters, fixed = eqx.partition(model, trainable_mask(model))
    noise = {}
    for label, inducing in ESTIMATED.items():

        @jax.jit
        def gradient(key: Any, estimate: Any = ESTIMATES[inducing]) -> Any:
            return jax.grad(lambda p: estimate(eqx.combine(p, fixed), x, y, key, SAMPLES))(parameters)

        drawn = [jax.tree.leaves(gradient(key)) for key in jax.random.split(jax.random.key(0), draws)]
        stacked = [np.stack([np.asarray(leaf, np.float64) for leaf in leaves]) for leaves in zip(*drawn, strict=True)]
        noise[label] = float(sum(leaf.var(axis=0, ddof=1).sum() for leaf in stacked))
    return noise


ESTIMATED = {"analytic": "marginalised", "sampled": "sampled"}
CAREFUL = {"optimizer": "adam", "learning_rate": 0.005, "relative": False, "antithetic": False}
"""The paper's rate, with surges of the gradient clipped: best for sampled inducing outputs."""


def estimators(split: Split, start: DeepGP, name: str, steps: int) -> dict[str, Any]:
    """ELBO under Adam, with the bound estimated in two ways, and the noise of both gradients before and after.

    Steps with sampled inducing outputs are cheaper, and that run gets as many of them as fit into the same time.
    """
    curves, noise = {}, {"start": gradient_noise(start, split)}
    limits: dict[str, Any] = {"max_steps": steps}
    for label, inducing in ESTIMATED.items():
        options = {**CAREFUL, "score_every": EVERY, "inducing": inducing, **limits}
        trained = train(start, split.x, split.y, **options)
        curves[label] = curve(trained)
        what = f"{trained.steps} steps, {trained.seconds:.0f} s"
        print(f"{name} {label}: ELBO {curves[label]['elbo'][-1]:.1f} after {what}", flush=True)
        limits = {"max_steps": 100 * steps, "max_seconds": trained.seconds}
        noise[f"trained {label}"] = gradient_noise(trained.model, split)
    for when, found in noise.items():
        print(f"{name} variance of the gradient, {when}: {found}, ratio {found['sampled'] / found['analytic']:.3g}")
    return {"curves": curves, "gradient variance": noise}


def draw(rows: list[dict[str, Any]], path: str) -> None:
    """ELBO over steps and over seconds, one column of panels for each row; a label has one colour in all of them."""
    size = {"figsize": (4.5 * len(rows), 6.8), "layout": "constrained", "squeeze": False}
    figure, axes = plt.subplots(2, len(rows), **size)
    labels = dict.fromkeys(label for row in rows for label in row["curves"])
    colors = {label: f"C{place}" for place, label in enumerate(labels)}
    for place, against in enumerate(("step", "seconds")):
        for axis, row in zip(axes[place], rows, strict=True):
            for label, run in row["curves"].items():
                width = 2 if label in LEADING else 1
                axis.plot(run[against], run["elbo"], label=label, color=colors[label], linewidth=width)
            reached = [max(run["elbo"]) for run in row["curves"].values()]
            best, reach = max(reached), max(2.0 * abs(max(reached)) + 300.0, 1.5 * (max(reached) - min(reached)))
            axis.set(xlabel=against if against == "seconds" else "steps", ylabel="ELBO")
            axis.set_ylim(best - reach, best + 0.05 * reach)
            axis.set_title(f"{row['data']}, {row['what'].upper()}" if place == 0 else "")
    axes[0][0].legend(frameon=False, fontsize=8, loc="lower right")
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
    options.add_argument("--natural-steps", type=int, help="of natural gradients and of --also; default: --steps")
    options.add_argument("--estimators", action="store_true", help="compare estimates of the bound instead")
    options.add_argument("--reuse", metavar="FILE", help="take Adam's curves from an earlier JSON file")
    options.add_argument(
        "--also", nargs="+", default=[], metavar="NAME=VALUE,...", help="the default settings changed so"
    )
    options.add_argument("--figure", metavar="FILE")
    arguments = options.parse_args()
    earlier = json.loads(Path(arguments.reuse).read_text())["rows"] if arguments.reuse else []
    others = {
        f"ours {text}": {name: json.loads(value) for name, value in (pair.split("=") for pair in text.split(","))}
        for text in arguments.also
    }
    rows: list[dict[str, Any]] = []
    with jax.enable_x64(True):
        for name in arguments.names:
            split = interpolation_split(name, 0, arguments.data)
            for coupling in arguments.couplings:
                label = f"{name} {coupling}"
                start = initial_model(
                    split.x, coupling, (5, 5, 1), 128, start=Start(noise=0.01), precision=arguments.precision
                )
                row: dict[str, Any] = {"what": coupling, "data": name, "precision": arguments.precision}
                if arguments.estimators:
                    row |= estimators(split, start, label, arguments.steps)
                else:
                    same = [old["curves"] for old in earlier if all(old[key] == row[key] for key in row)]
                    known = {key: run for key, run in (same[0] if same else {}).items() if key.startswith("adam")}
                    lengths = (arguments.natural_steps or arguments.steps, arguments.steps, arguments.paper_steps)
                    row |= optimisers(split, start, label, *lengths, others, known)
                rows.append(row)
                emit(rows, arguments.json)
    if arguments.figure:
        draw(rows, arguments.figure)


if __name__ == "__main__":
    main()
