"""One training step at the standard workload: ours, GPyTorch's mean-field deep GP, and the matrix-product limit.

    python benchmarks/step.py                     # a table
    python benchmarks/step.py --json step.json    # and the numbers

A step is the value and gradient of the ELBO and an Adam update of all parameters, as in a training run: several steps
in one compiled call. Standard workload: batch 512, R=5, M=128, widths (5, 5, 1), D=9. GPyTorch rows appear when torch
and gpytorch are installed. The ``limit`` rows time the matrix products that a step cannot avoid, each alone and at full
batch size, and add them up. ``--optimizers adam natural`` compares a natural-gradient step with an Adam step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from common import emit, interleave, parser

from structured_dgp.couplings import as_coupling
from structured_dgp.initial import initial_model
from structured_dgp.precision import Precision
from structured_dgp.propagation import layer_pairs
from structured_dgp.training import Settings
from structured_dgp.training.step import Minibatches, compile_steps, initial_state


@dataclass(frozen=True)
class Workload:
    """Sizes of one training step."""

    batch: int = 512
    n_samples: int = 5
    n_inducing: int = 128
    widths: tuple[int, ...] = (5, 5, 1)
    n_inputs: int = 9
    n_data: int = 41_157
    per_call: int = 5

    def data(self) -> tuple[np.ndarray, np.ndarray]:
        """Standardised inputs and a smooth target."""
        rng = np.random.default_rng(0)
        x = rng.standard_normal((self.batch, self.n_inputs))
        return x, np.sin(x.sum(1, keepdims=True)) + 0.1 * rng.standard_normal((self.batch, 1))


SMALL = Workload(batch=100, n_inducing=20, widths=(2, 1), n_data=100, per_call=100)


def our_step(
    work: Workload, coupling: str, precision: Precision, optimizer: str = "adam"
) -> tuple[Callable[[], Any], float]:
    """A function that makes ``work.per_call`` steps and waits for them, and the seconds until the first step was made.

    The steps are those of a training run: minibatch, noise, value, gradient, update, and the check that it is finite.
    """
    x, y = work.data()
    model = initial_model(x, coupling, work.widths, work.n_inducing, precision=precision)
    settings = Settings(optimizer=optimizer, learning_rate=0.005, batch_size=work.batch, n_samples=work.n_samples)
    optimiser = settings.make_optimizer(model, work.n_data)
    steps = compile_steps(model, optimiser, n_samples=work.n_samples, n_data=work.n_data, chunk=max(work.per_call, 1))
    rows = Minibatches(work.batch, work.batch, 0).rows(0, work.per_call)
    x, y, key = jnp.asarray(x, model.dtype), jnp.asarray(y, model.dtype), jax.random.key(0)
    states = [initial_state(model, optimiser)]

    def run(n_steps: int) -> None:
        states[0], info, _ = steps(states[0], x, y, rows, n_steps, key)
        if not np.asarray(info.good)[:n_steps].all():
            raise RuntimeError("a step failed")

    start = time.perf_counter()
    run(1)
    return lambda: run(work.per_call), time.perf_counter() - start


def unavoidable_products(work: Workload, coupling: str) -> dict[str, list[tuple[int, int, int]]]:
    """Sizes (a, b, c) of all products of an (a, b) and a (b, c) matrix, forward and backward.

    ``posterior``: features with blocks of S. ``features``: A = K Wᵀ. ``blocks``: S = C Cᵀ.
    """
    structure = as_coupling(coupling).structure(work.widths)
    M, n_layers = work.n_inducing, len(work.widths)
    kinds: dict[str, list[tuple[int, int, int]]] = {"posterior": [], "features": [], "blocks": []}
    rows = [work.batch] + [work.batch * work.n_samples] * (n_layers - 1)
    for lower in range(n_layers):
        n, width = rows[lower], work.widths[lower]
        # A S and Aᵀ (g A) for the variances; the gradient with respect to A reuses A S.
        kinds["posterior"] += [(n, M, width * M), (M, n, width * M)]
        kinds["features"] += [(n, M, M), (n, M, M), (M, n, M)]
        for upper in range(lower, n_layers):
            if pairs := len(layer_pairs(structure, lower, upper)):
                kinds["posterior"] += [(n, M, pairs * M), (n, pairs * M, M), (M, n, pairs * M)]
    for j in range(sum(work.widths)):
        depth, partners = len(structure.predecessors[j]) * M, len(structure.partners[j]) * M
        kinds["blocks"] += [(M, depth, partners), (M, partners, depth), (partners, M, depth)]
    return kinds


def limit(work: Workload, coupling: str, dtype: Any, repeats: int) -> dict[str, float]:
    """The sum of the unavoidable products, each timed alone."""
    kinds = unavoidable_products(work, coupling)
    shapes = sorted({shape for group in kinds.values() for shape in group})
    rng = np.random.default_rng(0)
    product = jax.jit(jnp.matmul)

    def timed(shape: tuple[int, int, int]) -> Callable[[], Any]:
        a, b, c = shape
        left, right = (jnp.asarray(rng.standard_normal(size), dtype) for size in ((a, b), (b, c)))
        product(left, right).block_until_ready()
        return lambda: product(left, right).block_until_ready()

    times = interleave({str(shape): timed(shape) for shape in shapes}, repeats)
    return {kind: sum(times[str(shape)]["ms_min"] for shape in group) for kind, group in kinds.items()}


def gpytorch_model(work: Workload, precision: str) -> tuple[Any, Any]:
    """The same architecture as a mean-field deep GP in GPyTorch: one kernel per layer, shared inducing inputs."""
    import gpytorch
    import torch
    from gpytorch.models.deep_gps import DeepGP as TorchDeepGP
    from gpytorch.models.deep_gps import DeepGPLayer

    dtype = getattr(torch, precision)
    rng = np.random.default_rng(0)

    class TorchLayer(DeepGPLayer):  # type: ignore[misc]
        def __init__(self, n_inputs: int, width: int | None) -> None:
            batch = torch.Size([] if width is None else [width])
            inducing = torch.as_tensor(rng.standard_normal((work.n_inducing, n_inputs)), dtype=dtype)
            distribution = gpytorch.variational.CholeskyVariationalDistribution(work.n_inducing, batch_shape=batch)
            super().__init__(gpytorch.variational.VariationalStrategy(self, inducing, distribution), n_inputs, width)
            self.mean_module = gpytorch.means.ConstantMean(batch_shape=batch)
            kernel = gpytorch.kernels.RBFKernel(ard_num_dims=n_inputs)
            self.covar_module = gpytorch.kernels.ScaleKernel(kernel)

        def forward(self, x: Any) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    class Model(TorchDeepGP):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            sizes = [work.n_inputs, *work.widths[:-1]]
            outputs: list[int | None] = [*work.widths[:-1], None]
            self.parts = torch.nn.ModuleList(TorchLayer(a, b) for a, b in zip(sizes, outputs, strict=True))

        def forward(self, x: Any) -> Any:
            for part in self.parts:
                x = part(x)
            return x

    return Model().to(dtype), gpytorch.likelihoods.GaussianLikelihood().to(dtype)


def gpytorch_step(work: Workload, precision: str) -> Callable[[], Any]:
    """A function that makes one training step of it."""
    import gpytorch
    import torch

    model, likelihood = gpytorch_model(work, precision)
    x, y = (torch.as_tensor(part, dtype=getattr(torch, precision)) for part in work.data())
    model.train()
    bound = gpytorch.mlls.DeepApproximateMLL(gpytorch.mlls.VariationalELBO(likelihood, model, work.n_data))
    optimiser = torch.optim.Adam([*model.parameters(), *likelihood.parameters()], lr=0.005)
    target = y[:, 0]

    def one() -> None:
        with gpytorch.settings.num_likelihood_samples(work.n_samples):
            optimiser.zero_grad()
            loss = -bound(model(x), target)
            loss.backward()
            optimiser.step()

    one()
    return one


def gpytorch_is_here() -> bool:
    try:
        import gpytorch  # noqa: F401
    except ImportError:
        return False
    return True


def main() -> None:
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--couplings", nargs="+", default=["mf", "star", "fc"])
    options.add_argument("--precisions", nargs="+", default=["float64", "float32", "mixed"])
    options.add_argument("--optimizers", nargs="+", default=["adam"], choices=["adam", "natural"])
    options.add_argument("--small", action="store_true", help="100 rows, M=20, widths (2, 1) instead")
    arguments = options.parse_args()
    work = SMALL if arguments.small else Workload()

    with jax.enable_x64(True):
        steps: dict[str, Callable[[], Any]] = {}
        rows: list[dict[str, Any]] = []
        for optimizer in arguments.optimizers:
            for precision in arguments.precisions:
                for coupling in arguments.couplings:
                    name = f"{coupling} {precision} {optimizer}"
                    steps[name], first = our_step(work, coupling, precision, optimizer)
                    row = {"what": coupling, "precision": precision, "optimizer": optimizer}
                    rows.append({**row, "first_call_s": first})
        if gpytorch_is_here():
            for precision in ("float64", "float32"):
                steps[f"gpytorch-mf {precision} adam"] = gpytorch_step(work, precision)
                rows.append({"what": "gpytorch-mf", "precision": precision, "optimizer": "adam"})
        times = interleave(steps, arguments.repeats)
        for row in rows:
            per_call = 1 if row["what"] == "gpytorch-mf" else work.per_call
            found = times[f"{row['what']} {row['precision']} {row['optimizer']}"]
            row |= {name: value / per_call for name, value in found.items()}
        for precision in ("float64", "float32"):
            for coupling in arguments.couplings:
                parts = limit(work, coupling, precision, arguments.repeats)
                total = sum(parts.values())
                rows.append(
                    {
                        "what": f"limit-{coupling}",
                        "precision": precision,
                        "optimizer": "adam",
                        "ms_min": total,
                        "ms_median": total,
                        "parts": parts,
                    }
                )
    print(f"{'':12s} {'precision':10s} {'optimizer':9s} {'min ms':>8s} {'median':>8s}  first call")
    for row in rows:
        first = f"{row['first_call_s']:8.1f} s" if "first_call_s" in row else ""
        name = f"{row['what']:12s} {row['precision']:10s} {row['optimizer']:9s}"
        print(f"{name} {row['ms_min']:8.2f} {row['ms_median']:8.2f} {first}")
    best = {(row["what"], row["precision"], row["optimizer"]): row["ms_min"] for row in rows}
    ratios = ratio_table({key[:2]: value for key, value in best.items() if key[2] == "adam"})
    for what, precision, optimizer in best:
        if optimizer == "natural" and (what, precision, "adam") in best:
            ratios[f"{what} {precision}: natural / adam"] = (
                best[what, precision, "natural"] / best[what, precision, "adam"]
            )
    for name, value in ratios.items():
        print(f"{name}: {value:.2f}")
    emit(rows, arguments.json, workload=work.__dict__, ratios=ratios)


def ratio_table(best: dict[tuple[str, str], float]) -> dict[str, float]:
    """The ratios that matter, of minimum times, where both sides were measured."""
    wanted = []
    for precision in ("float64", "float32", "mixed"):
        single = "float32" if precision == "mixed" else precision
        wanted += [(("star", precision), ("mf", precision)), (("fc", precision), ("star", precision))]
        for what in ("mf", "star", "fc"):
            wanted += [((what, precision), (f"limit-{what}", single)), ((what, precision), ("gpytorch-mf", single))]
    return {
        f"{' '.join(top)} / {' '.join(bottom)}": best[top] / best[bottom]
        for top, bottom in wanted
        if top in best and bottom in best
    }


if __name__ == "__main__":
    main()
