"""How fitted estimators are kept: pickles, and model files, which hold arrays and JSON and run nothing on loading."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from sklearn.base import BaseEstimator
from sklearn.utils.validation import check_is_fitted

from structured_dgp.exceptions import InputError, ModelFileError
from structured_dgp.files import Contents, read_contents, write_contents
from structured_dgp.model import DeepGP
from structured_dgp.model_files import describe, rebuild
from structured_dgp.precision import wide_scope
from structured_dgp.scaling import Scaling
from structured_dgp.training import History, Record

FORMAT = 1
E = TypeVar("E", bound="SavedEstimator")


class PortableEstimator(BaseEstimator):
    """An estimator whose pickles hold arrays as NumPy's, which keep their type wherever they are loaded."""

    def __getstate__(self) -> dict[str, Any]:
        state = dict(super().__getstate__())
        if "model_" in state:
            state["model_"] = jax.tree.map(lambda a: np.asarray(a) if eqx.is_array(a) else a, state["model_"])
        return state

    @wide_scope
    def __setstate__(self, state: dict[str, Any]) -> None:
        if "model_" in state:
            model = jax.tree.map(lambda a: jnp.asarray(a) if isinstance(a, np.ndarray) else a, state["model_"])
            state = {**state, "model_": model}
        super().__setstate__(state)


class SavedEstimator(PortableEstimator):
    """An estimator with a trained model that can be written to one file."""

    model_: DeepGP
    x_scaling_: Scaling
    y_scaling_: Scaling
    n_features_in_: int
    n_steps_: int
    elbo_: float
    history_: History
    target_names_: list[str] | None

    _own_facts: ClassVar[tuple[str, ...]] = ()
    """Fitted attributes of a subclass that a model file holds beside the shared ones."""

    def save(self, path: str | Path) -> None:
        """Write the fitted model to one file: arrays and JSON, nothing that is run on loading."""
        check_is_fitted(self, "model_")
        model, arrays = describe(self.model_)
        arrays |= {"x.centre": self.x_scaling_.centre, "x.spread": self.x_scaling_.spread}
        arrays |= {"y.centre": self.y_scaling_.centre, "y.spread": self.y_scaling_.spread}
        facts = {
            "format": FORMAT,
            "library": version("structured-dgp"),
            "estimator": type(self).__name__,
            "parameters": {name: value for name, value in self.get_params().items() if _is_plain(value)},
            "model": model,
            "feature_names": _plain_names(getattr(self, "feature_names_in_", None)),
            "target_names": self.target_names_,
            "n_steps": self.n_steps_,
            "elbo": self.elbo_,
            "history": [record.__dict__ for record in self.history_.records],
            "own": {name: _to_plain(getattr(self, name)) for name in self._own_facts},
        }
        write_contents(path, Contents(arrays, facts))

    def _take_over(self, contents: Contents) -> None:
        """The fitted state of a model file."""
        facts, arrays = contents.facts, dict(contents.arrays)
        scaling = {name: arrays.pop(name) for name in ("x.centre", "x.spread", "y.centre", "y.spread")}
        self.model_ = rebuild(facts["model"], arrays)
        self.n_features_in_ = int(self.model_.layers[0].inducing.shape[1])
        sizes = {"x": self.n_features_in_, "y": self.model_.n_targets}
        for name, values in scaling.items():
            fits = values.shape == (sizes[name[0]],) and values.dtype == np.float64 and np.isfinite(values).all()
            if not fits or (name.endswith("spread") and (values < 0.0).any()):
                raise ValueError(f"{name!r} is not the scaling of {sizes[name[0]]} columns.")
        self.x_scaling_ = Scaling(scaling["x.centre"], scaling["x.spread"])
        self.y_scaling_ = Scaling(scaling["y.centre"], scaling["y.spread"])
        if facts["feature_names"] is not None:
            if len(facts["feature_names"]) != self.n_features_in_:
                raise ValueError(f"there are {len(facts['feature_names'])} feature names.")
            self.feature_names_in_ = np.array(list(map(str, facts["feature_names"])), dtype=object)
        names = facts["target_names"]
        self.target_names_ = None if names is None else list(map(str, names))
        if names is not None and len(names) > sizes["y"]:
            raise ValueError(f"there are {len(names)} target names.")
        self.n_steps_, self.elbo_ = int(facts["n_steps"]), float(facts["elbo"])
        self.history_ = History([Record.from_dict(record) for record in facts["history"]])
        for name in self._own_facts:
            setattr(self, name, _from_plain(facts["own"][name]))


def read_estimator(path: str | Path, kinds: dict[str, type[E]]) -> E:
    """The estimator in a model file, which is one of these kinds, after everything in it has been checked."""
    contents = read_contents(path, ModelFileError)
    facts, name = contents.facts, Path(path).name
    if facts.get("estimator") not in kinds:
        raise ModelFileError(f"{name} is not a model file of this library.")
    if not isinstance(facts.get("format"), int) or not 1 <= facts["format"] <= FORMAT:
        raise ModelFileError(
            f"{name} has format {facts.get('format')}, made by version {facts.get('library')}; this version reads "
            f"formats up to {FORMAT}: update the library."
        )
    try:
        kind = kinds[facts["estimator"]]
        known = set(kind._get_param_names())
        estimator = kind(**{key: value for key, value in facts["parameters"].items() if key in known})
        estimator._take_over(contents)
    except (ArithmeticError, AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise ModelFileError(f"{name} cannot be used: {error}") from error
    return estimator


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


def _plain_names(names: Any) -> list[str] | None:
    return None if names is None else [str(name) for name in names]


def _to_plain(value: Any) -> Any:
    """What JSON can hold; arrays with their type."""
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "biufUO":
            raise InputError(f"labels of type {value.dtype} cannot be saved: use numbers or text.")
        kind = "O" if value.dtype.kind == "O" else value.dtype.str
        return {"dtype": kind, "values": value.tolist()}
    return value


def _from_plain(value: Any) -> Any:
    if isinstance(value, dict):
        if np.dtype(value["dtype"]).kind not in "biufUO":
            raise ValueError(f"labels of type {value['dtype']}.")
        return np.array(value["values"], dtype=value["dtype"])
    return value
