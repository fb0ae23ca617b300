"""Natural gradients against the Fisher information by brute force, and what the steps keep."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import Array

from structured_dgp import RBF, DeepGP, Gaussian, Layer, Posterior
from structured_dgp.couplings import Coupling, Order
from structured_dgp.exceptions import InputError
from structured_dgp.training import natural_direction, natural_gradient, retract
from structured_dgp.training.natural import RETRACTIONS, SHORT, Direction, group_product

M = 2


def random_order(widths: tuple[int, ...], seed: int) -> Order:
    """Each pair of GPs, in flat order, is related with probability 0.4; the closure adds what follows."""
    size = sum(widths)
    return Order(np.tril(np.random.default_rng(seed).random((size, size)) < 0.4, -1))


CASES = [
    ("mf", (2, 2, 1)),
    ("stripes", (2, 2, 1)),
    ("arrow", (2, 1, 2)),
    ("star", (2, 2, 1)),
    ("fc", (2, 1, 1)),
    *((random_order((2, 2, 1), seed), (2, 2, 1)) for seed in range(3)),
    (random_order((1, 3, 2), 3), (1, 3, 2)),
]


@pytest.fixture(autouse=True)
def wide() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def random_posterior(coupling: str | Coupling, widths: tuple[int, ...], seed: int, size: int = M) -> Posterior:
    rng = np.random.default_rng(seed)
    shape = Posterior.prior(coupling, widths, size)
    blocks = shape.blocks + 0.3 * rng.standard_normal(shape.blocks.shape)
    mean = rng.standard_normal(shape.mean.shape)
    raw = Posterior(coupling=shape.coupling, widths=widths, mean=jnp.asarray(mean), blocks=jnp.asarray(blocks))
    return Posterior(coupling=shape.coupling, widths=widths, mean=raw.mean, blocks=raw.factor_blocks())


def free_numbers(posterior: Posterior) -> np.ndarray:
    """Which entries of the dense factor may vary."""
    size = len(posterior.structure.gps) * posterior.n_inducing
    grid = np.zeros((size, size), bool)
    n = posterior.n_inducing
    for i, k in posterior.structure.blocks:
        grid[i * n : (i + 1) * n, k * n : (k + 1) * n] = True
    return grid & np.tril(np.ones((size, size), bool))


@pytest.mark.parametrize(("coupling", "widths"), CASES)
def test_the_direction_is_the_inverse_fisher_information_times_the_gradient(
    coupling: str | Coupling, widths: tuple[int, ...]
) -> None:
    """Fisher information by its definition: the Hessian of KL[q || q'] in all free numbers of m' and C', at q' = q."""
    posterior = random_posterior(coupling, widths, 0)
    free = free_numbers(posterior)
    m, C = np.asarray(posterior.mean).ravel(), np.asarray(posterior.factor())
    n_means = m.size
    S = C @ C.T

    def divergence(theta: Array) -> Array:
        mean, factor = theta[:n_means], jnp.zeros(C.shape).at[np.nonzero(free)].set(theta[n_means:])
        cov = factor @ factor.T
        difference = mean - m
        return 0.5 * (
            jnp.trace(jnp.linalg.solve(cov, S))
            + difference @ jnp.linalg.solve(cov, difference)
            + jnp.linalg.slogdet(cov)[1]
        )

    theta = jnp.concatenate([m, C[free]])
    fisher = np.asarray(jax.hessian(divergence)(theta))
    rng = np.random.default_rng(1)
    gradient = rng.standard_normal(theta.shape)
    dense_gradient = np.zeros(C.shape)
    dense_gradient[free] = gradient[n_means:]
    as_posterior = Posterior.prior(coupling, widths, M)
    blocks = np.stack([dense_gradient[i * M : (i + 1) * M, k * M : (k + 1) * M] for i, k in posterior.structure.blocks])
    as_posterior = Posterior(
        coupling=as_posterior.coupling,
        widths=widths,
        mean=jnp.asarray(gradient[:n_means].reshape(-1, M)),
        blocks=jnp.asarray(blocks),
    )
    direction = natural_direction(posterior, as_posterior)
    # To first order, a step moves m by C d and C by C X: the same as the steepest direction in the free numbers.
    expected = np.linalg.solve(fisher, gradient)
    X = np.zeros(C.shape)
    for (i, k), block in zip(posterior.structure.blocks, np.asarray(direction.blocks), strict=True):
        X[i * M : (i + 1) * M, k * M : (k + 1) * M] = block
    np.testing.assert_allclose(C @ np.asarray(direction.mean).ravel(), expected[:n_means], rtol=1e-8, atol=1e-8)
    np.testing.assert_allclose((C @ X)[free], expected[n_means:], rtol=1e-8, atol=1e-8)
    np.testing.assert_allclose(direction.length**2, gradient @ expected, rtol=1e-8)


@pytest.mark.parametrize(("coupling", "widths"), CASES)
@pytest.mark.parametrize("retraction", ["linear", "exponential"])
def test_a_step_is_right_to_its_order_and_stays_in_the_family(
    coupling: str | Coupling, widths: tuple[int, ...], retraction: str
) -> None:
    posterior, other = random_posterior(coupling, widths, 2), random_posterior(coupling, widths, 3)
    step = Direction(other.mean, 0.3 * other.blocks, jnp.asarray(0.0))
    moved = retract(posterior, step, retraction)
    C = np.asarray(posterior.factor())
    X = 0.3 * np.asarray(other.factor())
    series = {"linear": 0.0, "exponential": 0.5}[retraction]
    expected = C @ (np.eye(len(C)) + X + series * X @ X)
    np.testing.assert_allclose(moved.factor(), expected, rtol=1e-12, atol=1e-12)
    mean = np.asarray(posterior.mean).ravel() + C @ np.asarray(other.mean).ravel()
    np.testing.assert_allclose(np.asarray(moved.mean).ravel(), mean, rtol=1e-12)
    # A dense factor outside the coupling's pattern would be refused here.
    Posterior.from_dense(posterior.coupling, widths, moved.mean, moved.factor())


@pytest.mark.parametrize(("coupling", "widths"), CASES)
def test_a_conjugate_step_is_right_to_first_order_and_straight_in_the_precision_of_each_gp(
    coupling: str | Coupling, widths: tuple[int, ...]
) -> None:
    posterior, other = random_posterior(coupling, widths, 2), random_posterior(coupling, widths, 3)
    direction = natural_direction(posterior, other)
    small = Direction(1e-5 * direction.mean, 1e-5 * direction.blocks, jnp.asarray(0.0))
    conjugate, linear = (retract(posterior, small, way) for way in ("conjugate", "linear"))
    np.testing.assert_allclose(conjugate.factor(), linear.factor(), rtol=0, atol=1e-8)
    np.testing.assert_allclose(conjugate.mean, linear.mean, rtol=0, atol=1e-8)
    large = Direction(direction.mean, -0.5 * jnp.abs(direction.blocks), jnp.asarray(0.0))
    moved = retract(posterior, large, "conjugate")
    Posterior.from_dense(posterior.coupling, widths, moved.mean, moved.factor())
    last = len(posterior.structure.gps) - 1
    place = posterior.structure.block_index[last, last]
    X = np.asarray(large.blocks[place])
    R = np.linalg.solve(np.asarray(posterior.factor_blocks()[place]), np.asarray(moved.blocks[place]))
    P = np.eye(M) - X - X.T
    expected = np.linalg.inv(P) if np.linalg.eigvalsh(P).min() > 0 else None
    assert expected is not None
    np.testing.assert_allclose(R @ R.T, expected, rtol=1e-9, atol=1e-10)


def test_a_short_conjugate_step_is_right_to_second_order() -> None:
    """The exact factor of (I - X - Xᵀ)⁻¹ is reached with an error of third order, and steps next to SHORT agree."""
    size = 6
    X = np.tril(np.random.default_rng(12).standard_normal((size, size)))
    X /= np.linalg.norm(X + X.T, 2)
    posterior = Posterior.prior("mf", (1,), size)

    def error(length: float) -> float:
        step = Direction(jnp.zeros((1, size)), jnp.asarray(length * X)[None], jnp.asarray(0.0))
        S = retract(posterior, step, "conjugate").covariance()
        return float(np.linalg.norm(S - np.linalg.inv(np.eye(size) - length * (X + X.T))))

    assert error(0.02) < 1e-4
    assert 6.0 < error(0.02) / error(0.01) < 10.0
    assert error(1.05 * SHORT) < 1e-10  # exact
    assert 1e-10 < error(0.95 * SHORT) < 0.05


def test_a_conjugate_step_out_of_the_positive_matrices_is_shortened() -> None:
    posterior = random_posterior("mf", (1,), 2)
    moved = retract(posterior, Direction(posterior.mean, 5.0 * jnp.eye(M)[None], jnp.asarray(0.0)), "conjugate")
    ratio = np.diag(moved.factor()) / np.diag(posterior.factor())
    np.testing.assert_allclose(ratio, 1.0 + 0.5 / np.sqrt(2.0), rtol=1e-12)


def test_the_group_product_is_the_product_of_the_dense_factors() -> None:
    a, b = (random_posterior("star", (2, 2, 2), seed) for seed in (4, 5))
    product = group_product(a.structure, a.blocks, b.blocks)
    both = Posterior(coupling=a.coupling, widths=a.widths, mean=a.mean, blocks=product)
    np.testing.assert_allclose(both.factor(), a.factor() @ b.factor(), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("retraction", RETRACTIONS)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e6])
def test_the_trust_region_bounds_every_step(retraction: str, scale: float) -> None:
    """However large the gradient is, the length of the step is at most the radius, and the diagonal stays positive."""
    radius = 1.4
    posterior = random_posterior("star", (2, 2, 1), 6)
    gradient = jax.tree.map(lambda a: scale * a, random_posterior("star", (2, 2, 1), 7))
    transformation = natural_gradient(1.0, radius, retraction)
    updates, state = transformation.update(gradient, transformation.init(posterior), posterior)
    moved = optax.apply_updates(posterior, updates)
    length = float(natural_direction(posterior, gradient).length)
    if retraction != "conjugate":
        taken = np.linalg.solve(posterior.factor(), np.asarray(moved.mean - posterior.mean).ravel())
        expected = min(1.0, radius / length) * np.linalg.norm(natural_direction(posterior, gradient).mean)
        np.testing.assert_allclose(np.linalg.norm(taken), expected, rtol=1e-6)  # products of single precision
    np.testing.assert_allclose(state.length, length, rtol=1e-5)
    ratio = np.diag(moved.factor()) / np.diag(posterior.factor())
    assert np.all(ratio > 0.0)


def test_other_parameters_pass_and_the_parameters_are_needed() -> None:
    tree = {"posterior": random_posterior("mf", (1,), 8), "other": jnp.ones(3)}
    transformation = natural_gradient(0.1)
    updates, _ = transformation.update(tree, transformation.init(tree), tree)
    np.testing.assert_array_equal(updates["other"], tree["other"])
    with pytest.raises(ValueError, match="needs the parameters"):
        transformation.update(tree, transformation.init(tree))


@pytest.mark.parametrize(("radius", "retraction"), [(0.0, "exponential"), (-1.0, "linear"), (1.5, "linear")])
def test_a_radius_in_which_the_factor_could_become_singular_is_refused(radius: float, retraction: str) -> None:
    with pytest.raises(InputError, match="radius must be positive"):
        natural_gradient(0.1, radius, retraction)


def test_the_trust_region_may_follow_a_schedule() -> None:
    posterior = random_posterior("star", (2, 2, 1), 6)
    gradient = jax.tree.map(lambda a: 1e6 * a, random_posterior("star", (2, 2, 1), 7))
    transformation = natural_gradient(1.0, lambda step: 1.0 / (1.0 + step), "exponential")
    state = transformation.init(posterior)
    direction = natural_direction(posterior, gradient)
    share = np.linalg.norm(direction.mean) / float(direction.length)
    for radius in (1.0, 0.5, 1.0 / 3.0):
        updates, state = transformation.update(gradient, state, posterior)
        taken = np.linalg.solve(posterior.factor(), np.asarray(updates.mean).ravel())
        np.testing.assert_allclose(np.linalg.norm(taken), share * radius, rtol=1e-6)
    with pytest.raises(InputError, match="not a schedule"):
        natural_gradient(1.0, lambda step: 1.0, "linear")


@pytest.mark.parametrize(
    ("retraction", "radius", "n_steps", "tolerance"),
    [("conjugate", 1e6, 1, 1e-6), ("conjugate", 1e6, 3, 1e-11), ("linear", 1.4, 60, 1e-6), ("linear", 1.4, 90, 1e-11)],
)
def test_one_gaussian_layer_reaches_the_exact_optimum(
    retraction: str, radius: float, n_steps: int, tolerance: float
) -> None:
    """S = (I + AᵀA/σ²)⁻¹ and m = S Aᵀy/σ², where A are the whitened features of the data.

    The products of a step are of single precision; more steps take away what they have rounded.
    """
    rng = np.random.default_rng(9)
    x = rng.standard_normal((30, 1))
    y = np.sin(2.0 * x) + 0.1 * rng.standard_normal((30, 1))
    Z, noise = np.linspace(-2.0, 2.0, 5)[:, None], 0.3

    def loss(posterior: Posterior) -> Array:
        return -DeepGP([Layer(RBF(1.0, 1.0), Z)], posterior, Gaussian(noise)).elbo(x, y)

    posterior = Posterior.prior("mf", (1,), 5)
    transformation = natural_gradient(1.0, radius, retraction)
    state = transformation.init(posterior)
    update = jax.jit(lambda posterior, state: transformation.update(jax.grad(loss)(posterior), state, posterior))
    for _ in range(n_steps):
        updates, state = update(posterior, state)
        posterior = optax.apply_updates(posterior, updates)
    K = np.exp(-0.5 * (Z - Z.T) ** 2) + 1e-6 * np.eye(5)
    A = np.exp(-0.5 * (x - Z.T) ** 2) @ np.linalg.inv(np.linalg.cholesky(K)).T
    S = np.linalg.inv(np.eye(5) + A.T @ A / noise)
    np.testing.assert_allclose(posterior.covariance(), S, rtol=tolerance, atol=1e-3 * tolerance)
    np.testing.assert_allclose(posterior.mean[0], (S @ A.T @ y / noise)[:, 0], rtol=tolerance, atol=1e-3 * tolerance)


@pytest.mark.parametrize("scale", [1e-60, 1e30, 1e60])
def test_gradients_beyond_the_range_of_single_precision_are_followed(scale: float) -> None:
    """A step is as long as the trust region allows, or as the gradient is, whatever the units of the loss."""
    posterior, gradient = random_posterior("star", (2, 1), 10), random_posterior("star", (2, 1), 11)
    transformation = natural_gradient(0.3 / scale, 0.7)
    huge = jax.tree.map(lambda a: scale * a, gradient)
    updates, _ = transformation.update(huge, transformation.init(posterior), posterior)
    same = natural_gradient(0.3, 0.7)
    expected, _ = same.update(gradient, same.init(posterior), posterior)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), updates, expected)
    assert float(jnp.abs(updates.mean).max()) > 1e-3


def test_without_a_gradient_nothing_moves() -> None:
    posterior = random_posterior("star", (2, 1), 10)
    transformation = natural_gradient(0.3)
    zero = jax.tree.map(jnp.zeros_like, posterior)
    updates, state = transformation.update(zero, transformation.init(posterior), posterior)
    jax.tree.map(lambda a: np.testing.assert_array_equal(a, 0.0), updates)
    assert float(state.length) == 0.0
