"""How fitted estimators are kept: pickles, and model files, which hold arrays and JSON and run nothing on loading."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
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
from structured_dgp.posterior import Posterior
from structured_dgp.precision import wide_scope
from structured_dgp.scaling import Scaling
from structured_dgp.training import History, Record
from structured_dgp.validation import as_count

FORMAT = 1
LABEL_BYTES = 1 << 26  # that the labels of a classifier may take
E = TypeVar("E", bound="SavedEstimator")


@contextmanager
def all_or_nothing(estimator: BaseEstimator) -> Iterator[None]:
    """If what is inside fails, or is interrupted, the estimator has all its attributes as they were before."""
    before = dict(vars(estimator))
    try:
        yield
    except BaseException:
        vars(estimator).clear()
        vars(estimator).update(before)
        raise


class PortableEstimator(BaseEstimator):
    """An estimator whose pickles hold arrays as NumPy's, which keep their type wherever they are loaded."""

    def __getstate__(self) -> dict[str, Any]:
        return _in_modules(np.asarray, jax.Array, super().__getstate__())

    @wide_scope
    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(_in_modules(jnp.asarray, np.ndarray, state))


def _in_modules(convert: Callable[[Any], Any], kind: type, state: dict[str, Any]) -> dict[str, Any]:
    """The attributes of an estimator; in models and parts of them, arrays of this kind are converted."""

    def converted(value: Any) -> Any:
        return jax.tree.map(lambda a: convert(a) if isinstance(a, kind) else a, value)

    return {name: converted(value) if isinstance(value, eqx.Module | dict) else value for name, value in state.items()}


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
    _made_with: dict[str, Any]

    _own_facts: ClassVar[tuple[str, ...]] = ()
    """Fitted attributes of a subclass that a model file holds beside the shared ones."""

    def _check_own(self, own: dict[str, Any]) -> None:
        """A ``ValueError`` if these attributes, read from a file, do not fit the model."""
        raise NotImplementedError

    def save(self, path: str | Path) -> None:
        """Write the fitted model to one file: arrays and JSON, nothing that is run on loading.

        Parameters are kept, too. Where they are not plain values, the model says what they were; but a ``kernel`` that
        is not a name, and a generator of random numbers, are the default ones after loading.
        """
        check_is_fitted(self, "model_")
        model, arrays = describe(self.model_)
        arrays |= {"x.centre": self.x_scaling_.centre, "x.spread": self.x_scaling_.spread}
        arrays |= {"y.centre": self.y_scaling_.centre, "y.spread": self.y_scaling_.spread}
        facts = {
            "format": FORMAT,
            "library": version("structured-dgp"),
            "estimator": type(self).__name__,
            "parameters": plain_parameters(self),
            "model": model,
            "feature_names": _plain_names(getattr(self, "feature_names_in_", None)),
            "target_names": self.target_names_,
            "n_steps": self.n_steps_,
            "elbo": self.elbo_,
            "history": [record.__dict__ for record in self.history_.records],
            "own": {name: _to_plain(getattr(self, name)) for name in self._own_facts},
        }
        write_contents(path, Contents(arrays, facts))

    def _makers(self) -> dict[str, Any]:
        """The parameters that a model keeps from the fit that made it."""
        raise NotImplementedError

    def _take_over(self, contents: Contents) -> None:
        """The fitted state of a model file."""
        facts, arrays = contents.facts, dict(contents.arrays)
        scaling = {name: arrays.pop(name) for name in ("x.centre", "x.spread", "y.centre", "y.spread")}
        self.model_ = rebuild(facts["model"], arrays)
        given = facts["parameters"]
        if "likelihood" not in given:
            self.set_params(likelihood=self.model_.likelihood)
        if "coupling" not in given and isinstance(self.model_.posterior, Posterior):
            self.set_params(coupling=self.model_.posterior.coupling)
        self._made_with = self._makers()
        self.n_features_in_ = int(self.model_.layers[0].inducing.shape[1])
        sizes = {"x": self.n_features_in_, "y": self.model_.n_targets}
        for name, values in scaling.items():
            fits = values.shape == (sizes[name[0]],) and values.dtype == np.float64 and np.isfinite(values).all()
            if not fits or (name.endswith("spread") and (values < 0.0).any()):
                raise ValueError(f"{name!r} is not the scaling of {sizes[name[0]]} columns.")
        self.x_scaling_ = Scaling(scaling["x.centre"], scaling["x.spread"])
        self.y_scaling_ = Scaling(scaling["y.centre"], scaling["y.spread"])
        names = facts["feature_names"]
        if names is not None:
            if not isinstance(names, list) or len(names) != self.n_features_in_:
                raise ValueError(f"{names!r} are not the names of {self.n_features_in_} columns.")
            self.feature_names_in_ = np.array(list(map(str, names)), dtype=object)
        names = facts["target_names"]
        self.target_names_ = None if names is None else list(map(str, names))
        self.n_steps_, self.elbo_ = int(facts["n_steps"]), float(facts["elbo"])
        self.history_ = History([Record.from_dict(record) for record in facts["history"]])
        own = {name: _from_plain(facts["own"][name]) for name in self._own_facts}
        self._check_own(own)
        for name, value in own.items():
            setattr(self, name, value)


def read_estimator(path: str | Path, kinds: dict[str, type[E]]) -> E:
    """The estimator in a model file, which is one of these kinds, after everything in it has been checked."""
    contents = read_contents(path, ModelFileError)
    facts, name = contents.facts, Path(path).name
    if str(facts.get("estimator")) not in kinds:
        raise ModelFileError(f"{name} is not a model file of this library.")
    if type(facts.get("format")) is not int or not 1 <= facts["format"] <= FORMAT:
        raise ModelFileError(
            f"{name} has format {facts.get('format')}, made by version {facts.get('library')}; this version reads "
            f"formats up to {FORMAT}: update the library."
        )
    try:
        kind = kinds[facts["estimator"]]
        known = set(kind._get_param_names())
        estimator = kind(**{key: value for key, value in facts["parameters"].items() if key in known})
        as_count(estimator.get_params()["n_draws"], "n_draws")
        estimator._take_over(contents)
    except (ArithmeticError, AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise ModelFileError(f"{name} cannot be used: {error}") from error
    return estimator


def plain_parameters(estimator: BaseEstimator) -> dict[str, Any]:
    """The parameters of an estimator that JSON can hold."""
    found = {}
    for name, value in estimator.get_params(deep=False).items():
        with suppress(TypeError):
            found[name] = _plain(value)
    return found


def _plain(value: Any) -> Any:
    """A value as JSON has it; a ``TypeError`` if it has not."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.generic):
        return _plain(value.item())
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, dict):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [_plain(inner) for inner in value]
    raise TypeError(f"a {type(value).__name__} is not plain.")


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
        kind, values = np.dtype(value["dtype"]), value["values"]
        if kind.kind not in "biufUO" or len(values) * kind.itemsize > LABEL_BYTES:
            raise ValueError(f"{len(values)} labels of type {kind}.")
        if any(isinstance(label, list | dict) for label in values):
            raise ValueError("its labels are not a list.")
        return np.array(values, dtype=kind)
    return value
