"""A model as arrays and JSON, and back: every part by the name of its class, from a fixed list of classes.

Loading builds the parts without running anything from the file, and checks each array's name, type and shape, the
pattern of the posterior and the fit of the layers before the model exists.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from structured_dgp import kernels, likelihoods
from structured_dgp.couplings import BY_NAME, Coupling, Order, Widths, as_coupling, check_widths
from structured_dgp.exceptions import InputError, ModelFileError
from structured_dgp.model import DeepGP
from structured_dgp.parameters import Constant, Positive
from structured_dgp.posterior import Posterior
from structured_dgp.precision import wide_scope
from structured_dgp.propagation import Layer

KINDS: dict[str, type[eqx.Module]] = {
    kind.__name__: kind
    for kind in (
        Constant,
        Layer,
        Positive,
        kernels.RBF,
        kernels.Matern12,
        kernels.Matern32,
        kernels.Matern52,
        kernels.RationalQuadratic,
        kernels.Periodic,
        kernels.Linear,
        kernels.White,
        kernels.Sum,
        kernels.Product,
        likelihoods.Gaussian,
        likelihoods.Heteroscedastic,
        likelihoods.StudentT,
        likelihoods.Bernoulli,
        likelihoods.Softmax,
        likelihoods.Poisson,
    )
}
"""The parts that a model file can hold."""

LARGEST = 1000  # of the whole numbers among their fields: points of a quadrature rule


def describe(model: DeepGP) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """A model as JSON and arrays."""
    if not isinstance(model.posterior, Posterior):
        raise InputError(f"a {type(model.posterior).__name__} cannot be saved: only posteriors of a coupling can.")
    arrays: dict[str, np.ndarray] = {}
    facts = {
        "precision": model.precision,
        "jitter": model.jitter,
        "widths": list(model.widths),
        "coupling": _describe_coupling(model.posterior.coupling, model.widths),
        "layers": [_describe(layer, f"layers.{index}", arrays) for index, layer in enumerate(model.layers)],
        "likelihood": _describe(model.likelihood, "likelihood", arrays),
    }
    arrays["posterior.mean"] = np.asarray(model.posterior.mean)
    arrays["posterior.blocks"] = np.asarray(model.posterior.blocks)
    return facts, arrays


def _describe(node: Any, path: str, arrays: dict[str, np.ndarray]) -> Any:
    if isinstance(node, eqx.Module):
        kind = type(node).__name__
        if KINDS.get(kind) is not type(node):
            raise InputError(f"a {kind} cannot be saved: a model file holds parts of this library only. Use pickle.")
        inside = {
            field.name: _describe(getattr(node, field.name), f"{path}.{field.name}", arrays)
            for field in dataclasses.fields(node)
        }
        return {"kind": kind, **inside}
    if isinstance(node, tuple):
        return [_describe(part, f"{path}.{index}", arrays) for index, part in enumerate(node)]
    if isinstance(node, jax.Array):
        arrays[path] = np.asarray(node)
        return {"shape": list(node.shape)}
    if not _is_small(node):
        raise InputError(f"{path} is {node!r} and cannot be saved: a model file holds numbers up to {LARGEST}.")
    return node


def _is_small(value: Any) -> bool:
    return value is None or (isinstance(value, int) and 0 <= value <= LARGEST)


def coupling_name(coupling: Coupling) -> str | None:
    """The short name of a coupling, if it has one."""
    return next((name for name, known in BY_NAME.items() if coupling == known), None)


def _describe_coupling(coupling: Coupling, widths: Widths) -> str | list[list[int]]:
    name = coupling_name(coupling)
    if name is not None:
        return name
    return [[k, i] for i, k in coupling.structure(widths).blocks if i != k]


@wide_scope
def rebuild(facts: dict[str, Any], arrays: dict[str, np.ndarray]) -> DeepGP:
    """The model that ``describe`` was given; a ``ModelFileError`` if anything does not fit."""
    try:
        return _rebuild(facts, dict(arrays))
    except (ArithmeticError, AttributeError, IndexError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise ModelFileError(f"the file does not describe a model: {error}") from error


def _rebuild(facts: dict[str, Any], arrays: dict[str, np.ndarray]) -> DeepGP:
    widths = check_widths(facts["widths"])
    if sum(widths) != len(arrays["posterior.mean"]):
        raise ValueError(f"the posterior has {len(arrays['posterior.mean'])} GPs, but the widths are {widths}.")
    given = facts["coupling"]
    coupling = as_coupling(given) if isinstance(given, str) else Order([(k, i) for k, i in given])
    dtype = np.dtype(np.float64 if facts["precision"] == "float64" else np.float32)
    layers = [_built(part, f"layers.{index}", arrays, dtype) for index, part in enumerate(facts["layers"])]
    likelihood = _built(facts["likelihood"], "likelihood", arrays, dtype)
    if not all(isinstance(layer, Layer) for layer in layers) or not isinstance(likelihood, likelihoods.Likelihood):
        raise ValueError("its parts are not layers and a likelihood.")
    structure, n_inducing = coupling.structure(widths), int(layers[0].inducing.shape[0])
    posterior = Posterior(
        coupling=coupling,
        widths=widths,
        mean=_taken(arrays, "posterior.mean", [len(structure.gps), n_inducing], dtype),
        blocks=_taken(arrays, "posterior.blocks", [len(structure.blocks), n_inducing, n_inducing], dtype),
    )
    if arrays:
        raise ValueError(f"it has an array {next(iter(arrays))!r} that belongs to no part.")
    model = DeepGP(layers, posterior, likelihood, facts["jitter"], facts["precision"])
    model.diagnose()
    return model


def _built(part: Any, path: str, arrays: dict[str, np.ndarray], dtype: np.dtype[Any]) -> Any:
    if isinstance(part, list):
        return tuple(_built(inner, f"{path}.{index}", arrays, dtype) for index, inner in enumerate(part))
    if isinstance(part, dict) and "shape" in part:
        return _taken(arrays, path, part["shape"], dtype)
    if not isinstance(part, dict):
        if not _is_small(part):
            raise ValueError(f"{path} is {part!r}.")
        return part
    if part["kind"] not in KINDS:
        raise ValueError(f"unknown part {part['kind']!r}; it may come from a newer version.")
    kind = KINDS[part["kind"]]
    node = object.__new__(kind)
    names = {field.name for field in dataclasses.fields(kind)}
    if names != set(part) - {"kind"}:
        raise ValueError(f"{path} is a {part['kind']} with other fields than {sorted(names)}.")
    for name in names:
        object.__setattr__(node, name, _built(part[name], f"{path}.{name}", arrays, dtype))
    return node


def _taken(arrays: dict[str, np.ndarray], name: str, shape: list[int], dtype: np.dtype[Any]) -> jax.Array:
    """The array of this name, no longer in ``arrays``, after a check of its type, shape and numbers."""
    if name not in arrays:
        raise ValueError(f"the array {name!r} is missing.")
    array = arrays.pop(name)
    if list(array.shape) != shape or array.dtype != dtype:
        raise ValueError(f"{name!r} has shape {array.shape} and type {array.dtype}, not {shape} and {dtype}.")
    if not np.isfinite(array).all():
        raise ValueError(f"{name!r} holds NaN or infinity.")
    return jnp.asarray(array)
