"""Are float32 and mixed precision accurate enough? ELBO, gradients and training runs against float64.

    python benchmarks/precision.py concrete naval --data FOLDER --json precision.json

A model is trained in float64. Its ELBO and gradients, with the same noise, are then computed in each precision. Then
the same training run is made in each precision, for several seeds, and ends at a test log-likelihood.
"""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import numpy as np
from common import emit, parser
from data import Split, interpolation_split

from structured_dgp import DeepGP
from structured_dgp.initial import initial_model
from structured_dgp.parameters import trainable_mask
from structured_dgp.precision import PRECISIONS
from structured_dgp.training import train

ROWS = 1000  # rows of the ELBO that is compared


def log_likelihood(model: DeepGP, split: Split) -> float:
    """Mean over the test rows, in the units of the target."""
    return float(np.mean(model.predict(split.x_test).log_prob(split.y_test))) - float(np.log(split.unit))


def relative_errors(model: DeepGP, split: Split) -> dict[str, dict[str, float]]:
    """ELBO and gradients of the same parameters in each precision, relative to float64 with the same jitter."""
    x, y = split.x[:ROWS], split.y[:ROWS]
    eps = np.random.default_rng(0).standard_normal((5, len(x), model.n_hidden))

    def value_and_gradient(model: DeepGP) -> tuple[float, dict[str, np.ndarray]]:
        parameters, fixed = eqx.partition(model, trainable_mask(model))

        @jax.jit
        def elbo(parameters: DeepGP) -> Any:
            return jax.value_and_grad(lambda p: eqx.combine(p, fixed).elbo(x, y, eps=eps, n_data=len(split.x)))(
                parameters
            )

        value, gradient = elbo(parameters)
        leaves = jax.tree_util.tree_leaves_with_path(gradient)
        return float(value), {jax.tree_util.keystr(path): np.asarray(leaf, np.float64) for path, leaf in leaves}

    errors = {}
    for precision in PRECISIONS[1:]:
        other = DeepGP(model.layers, model.posterior, model.likelihood, precision=precision)
        wide = DeepGP(model.layers, model.posterior, model.likelihood, other.jitter)
        exact, exact_gradient = value_and_gradient(wide)
        value, gradient = value_and_gradient(other)
        by_leaf = {
            name: float(np.linalg.norm(gradient[name] - leaf) / np.linalg.norm(leaf))
            for name, leaf in exact_gradient.items()
            if np.linalg.norm(leaf) > 0
        }
        difference = sum(np.sum((gradient[name] - leaf) ** 2) for name, leaf in exact_gradient.items())
        size = sum(np.sum(leaf**2) for leaf in exact_gradient.values())
        errors[precision] = {
            "elbo_error": abs(value - exact) / abs(exact),
            "gradient_error": float(np.sqrt(difference / size)),
            "worst_gradient_error": max(by_leaf.values()),
        }
    return errors


def main() -> None:
    options = parser(__doc__.splitlines()[0])
    options.add_argument("names", nargs="*", default=["concrete"])
    options.add_argument("--data", metavar="FOLDER")
    options.add_argument("--coupling", default="star")
    options.add_argument("--steps", type=int, default=400)
    options.add_argument("--seeds", type=int, default=3)
    arguments = options.parse_args()
    rows: list[dict[str, Any]] = []
    with jax.enable_x64(True):
        for name in arguments.names:
            split = interpolation_split(name, 0, arguments.data)
            scores: dict[str, list[float]] = {}
            errors: dict[str, dict[str, float]] = {}
            for precision in PRECISIONS:
                scores[precision] = []
                for seed in range(arguments.seeds):
                    model = initial_model(split.x, arguments.coupling, (5, 5, 1), 128, precision=precision)
                    trained = train(model, split.x, split.y, max_steps=arguments.steps, seed=seed).model
                    scores[precision].append(log_likelihood(trained, split))
                    if precision == "float64" and seed == 0:
                        errors = relative_errors(trained, split)
            for precision in PRECISIONS:
                found = scores[precision]
                row = {"what": arguments.coupling, "data": name, "precision": precision, "log_likelihoods": found}
                row |= {"mean": float(np.mean(found)), "spread": float(np.std(found)), **errors.get(precision, {})}
                rows.append(row)
                text = "  ".join(f"{key} {value:.2g}" for key, value in errors.get(precision, {}).items())
                print(f"{name:10s} {precision:8s} test {row['mean']:.4f} ± {row['spread']:.4f}  {text}", flush=True)
    emit(rows, arguments.json)


if __name__ == "__main__":
    main()
