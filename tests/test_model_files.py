"""Model files: every bit comes back, and nothing that is not whole gets in."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from structured_dgp import (
    DeepGP,
    DeepGPClassifier,
    DeepGPRegressor,
    Fixed,
    InputError,
    ModelFileError,
    initial_model,
    load_estimator,
)
from structured_dgp.couplings import FullyCoupled, Order
from structured_dgp.files import Contents, _digest, read_contents, write_contents
from structured_dgp.kernels import RBF, Kernel, Linear, Matern12, Matern32, Periodic, RationalQuadratic, White
from structured_dgp.likelihoods import Bernoulli, Gaussian, Heteroscedastic, Likelihood, Poisson, Softmax, StudentT
from structured_dgp.model_files import KINDS, describe, rebuild

RNG = np.random.default_rng(0)
X = RNG.standard_normal((30, 2)) * [1.0, 50.0]
Y = 100.0 + 10.0 * np.sin(X[:, 0])
SMALL: dict[str, Any] = {"n_layers": 2, "width": 1, "n_inducing": 4, "max_steps": 3, "random_state": 0}


@pytest.fixture(scope="module")
def fitted() -> DeepGPRegressor:
    return DeepGPRegressor(**SMALL).fit(X, Y)


@pytest.fixture(scope="module")
def saved(fitted: DeepGPRegressor, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "model.sdgp"
    fitted.save(path)
    return path


def test_a_regressor_comes_back(fitted: DeepGPRegressor, saved: Path) -> None:
    copy = DeepGPRegressor.load(saved)
    np.testing.assert_array_equal(copy.predict(X), fitted.predict(X))
    np.testing.assert_array_equal(copy.predict(X, return_std=True)[1], fitted.predict(X, return_std=True)[1])
    assert copy.get_params() == fitted.get_params()
    assert copy.history_.records == fitted.history_.records
    assert (copy.elbo_, copy.n_steps_, copy.n_features_in_) == (fitted.elbo_, fitted.n_steps_, 2)


def test_parameters_come_back_whatever_their_type(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        **SMALL,
        "coupling": FullyCoupled(),
        "width": [2],
        "n_draws": 7,
        "likelihood": StudentT(0.3),
        "settings": {"learning_rate": 0.01},
        "checkpoint": tmp_path / "run",
    }
    model = DeepGPRegressor(**options).fit(X, Y)
    expected = model.predict(X)
    model.set_params(n_draws=np.int64(7)).save(tmp_path / "model.sdgp")
    copy = load_estimator(tmp_path / "model.sdgp")
    np.testing.assert_array_equal(copy.predict(X), expected)
    found = copy.get_params()
    assert found["width"] == [2]
    assert (found["n_draws"], found["settings"], found["coupling"]) == (7, {"learning_rate": 0.01}, FullyCoupled())
    assert found["checkpoint"] == str(tmp_path / "run")
    assert isinstance(found["likelihood"], StudentT)
    # and training goes on from it
    copy.set_params(warm_start=True, checkpoint=None).fit(X, Y)
    assert copy.n_steps_ == 6


def test_another_process_predicts_the_same_bits(fitted: DeepGPRegressor, saved: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", X)
    script = """
import sys, numpy as np
from structured_dgp import load_estimator
folder, model = sys.argv[1:]
np.save(folder + "/y.npy", load_estimator(model).predict(np.load(folder + "/x.npy"), return_std=True))
"""
    subprocess.run([sys.executable, "-c", script, str(tmp_path), str(saved)], check=True)
    np.testing.assert_array_equal(np.load(tmp_path / "y.npy"), fitted.predict(X, return_std=True))


def test_a_classifier_and_its_labels_come_back(tmp_path: Path) -> None:
    for labels in (np.array(["no", "yes"]), np.array([3, 7, 9]), np.array([False, True])):
        y = labels[np.arange(30) % len(labels)]
        model = DeepGPClassifier(**{**SMALL, "n_layers": 1}).fit(X, y)
        model.save(tmp_path / "model")
        copy = load_estimator(tmp_path / "model")
        assert isinstance(copy, DeepGPClassifier)
        np.testing.assert_array_equal(copy.predict_proba(X), model.predict_proba(X))
        np.testing.assert_array_equal(copy.classes_, model.classes_)
        assert copy.classes_.dtype == model.classes_.dtype
        with pytest.raises(ModelFileError, match="holds a DeepGPClassifier"):
            DeepGPRegressor.load(tmp_path / "model")


KERNELS: list[Callable[[], Kernel]] = [
    lambda: RBF(1.0) + White(0.1),
    lambda: Matern12(2.0) * Matern32(0.5, Fixed(2.0)),
    lambda: RationalQuadratic(1.0, 2.0, 3.0) + Periodic(1.0, 2.0, 3.0) * Linear(0.5),
]
LIKELIHOODS: list[Callable[[], Likelihood]] = [
    lambda: Gaussian(Fixed(0.3)),
    lambda: StudentT(0.2, 5.0, 30),
    lambda: Heteroscedastic(np.array([0.2])),
    Bernoulli,
    Poisson,
    lambda: Softmax(8),
]


@pytest.mark.parametrize("precision", ["float64", "mixed"])
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_every_part_comes_back(kernel: Any, likelihood: Any, precision: str) -> None:
    coupling = Order(lambda k, i: k.layer == 0 and i.layer == 2)
    model = initial_model(
        X, coupling, (2, 1, 2), 4, kernel=kernel(), likelihood=likelihood(), precision=precision, jitter=3e-5
    )
    facts, arrays = describe(model)
    copy = rebuild(json.loads(json.dumps(facts)), arrays)
    assert repr(copy.layers) == repr(model.layers)
    assert repr(copy.likelihood) == repr(model.likelihood)
    assert copy.jitter == model.jitter
    assert copy.posterior.structure.blocks == model.posterior.structure.blocks
    np.testing.assert_array_equal(copy.inducing_covariance(), model.inducing_covariance())


def test_every_kernel_and_likelihood_can_be_saved() -> None:
    def final(kind: type) -> set[type]:
        below = [other for other in kind.__subclasses__() if other.__module__.startswith("structured_dgp.")]
        return set().union(*map(final, below)) if below else {kind}

    assert final(Kernel) | final(Likelihood) <= set(KINDS.values())


def test_a_kernel_from_outside_cannot_be_saved(tmp_path: Path) -> None:
    class Own(RBF):
        pass

    facts: DeepGP = initial_model(X, "mf", (1,), 4, kernel=Own(1.0))
    with pytest.raises(InputError, match="a Own cannot be saved"):
        describe(facts)


# --- damage ------------------------------------------------------------------------------------------


def test_500_damaged_files_are_refused(saved: Path, tmp_path: Path) -> None:
    original = saved.read_bytes()
    rng = np.random.default_rng(0)
    header = 8 + struct.unpack("<Q", original[:8])[0]
    path = tmp_path / "model"
    for case in range(500):
        content = bytearray(original)
        if case % 5 == 0:
            content = content[: int(rng.integers(len(content)))]
        elif case % 5 == 1:
            content[:8] = struct.pack("<Q", int(rng.integers(2**63)))
        elif case % 5 == 2:
            start = int(rng.integers(len(content) - 64))
            content[start : start + 64] = rng.bytes(64)
        else:  # one bit, in the header as often as in the arrays
            place = int(rng.integers(header)) if case % 5 == 3 else int(rng.integers(header, len(content)))
            content[place] ^= 1 << int(rng.integers(8))
        assert bytes(content) != original
        path.write_bytes(content)
        with pytest.raises(ModelFileError):
            load_estimator(path)


def changed(key: str, value: Any) -> Callable[[Contents], None]:
    def change(contents: Contents) -> None:
        *path, last = key.split("/")
        place: Any = contents.facts
        for name in path:
            place = place[int(name) if name.isdigit() else name]
        place[last] = value

    return change


def reshaped(name: str, value: Any) -> Callable[[Contents], None]:
    def change(contents: Contents) -> None:
        contents.arrays[name] = value(contents.arrays[name])

    return change


LIES: dict[str, Callable[[Contents], None]] = {
    "newer format": changed("format", 2),
    "no format": changed("format", None),
    "other estimator": changed("estimator", "os.system"),
    "other part": changed("model/likelihood/kind", "DeepGP"),
    "a layer as likelihood": changed("model/likelihood", {"kind": "Constant", "raw": None}),
    "other field": changed("model/likelihood/extra", 1),
    "huge widths": changed("model/widths", [10**9, 1]),
    "more layers": changed("model/widths", [1, 1, 1]),
    "no widths": changed("model/widths", []),
    "text for widths": changed("model/widths", "abc"),
    "cycle": changed("model/coupling", [[1, 0]]),
    "unknown coupling": changed("model/coupling", "all"),
    "negative jitter": changed("model/jitter", -1.0),
    "other precision": changed("model/precision", "float64"),
    "unknown precision": changed("model/precision", "float128"),
    "number for a part": changed("model/layers/0/kernel", 10**9),
    "missing layers": changed("model/layers", []),
    "names of other columns": changed("feature_names", ["a"]),
    "history of something else": changed("history", [{"step": 1}]),
    "parameters of something else": changed("parameters", 3),
    "a list for an estimator": changed("estimator", ["DeepGPRegressor"]),
    "truth for a format": changed("format", True),
    "text for names": changed("feature_names", "ab"),
    "names of other targets": changed("target_names", ["a", "b"]),
    "text for draws": changed("parameters/n_draws", "abc"),
    "no draws": changed("parameters/n_draws", 0),
    "nothing of its own": changed("own", None),
    "text for a truth value": changed("own/is_flat_", "no"),
    "number for a truth value": changed("own/is_flat_", 1),
    "negative spread": reshaped("x.spread", lambda a: -a),
    "spread of other columns": reshaped("x.spread", lambda a: a[:1]),
    "NaN": reshaped("posterior.mean", lambda a: np.full_like(a, np.nan)),
    "other shape": reshaped("posterior.blocks", lambda a: a[:, :2]),
    "other type": reshaped("posterior.blocks", lambda a: a.astype(np.float64)),
    "integers": reshaped("posterior.mean", lambda a: a.astype(np.int64)),
    "inducing points of another size": reshaped("layers.0.inducing", lambda a: a[:, :1]),
    "missing array": lambda contents: contents.arrays.__delitem__("layers.0.inducing"),
    "array too many": lambda contents: contents.arrays.update(more=np.zeros(3)),
}


def renamed(contents: Contents) -> None:
    contents.facts["estimator"] = "DeepGPRegressor"
    contents.facts["own"]["is_flat_"] = True


def labelled(values: Any, dtype: str = "<i8") -> Callable[[Contents], None]:
    return changed("own/classes_", {"dtype": dtype, "values": values})


OTHER_LIES: dict[str, tuple[str, Callable[[Contents], None]]] = {
    "flat with two targets": ("two targets", changed("own/is_flat_", True)),
    "one name for two targets": ("two targets", changed("target_names", ["a"])),
    "regressor with classes": ("two targets", changed("estimator", "DeepGPClassifier")),
    "classifier as regressor": ("two classes", renamed),
    "classifier of three as regressor": ("three classes", renamed),
    "three classes for two": ("two classes", labelled([0, 1, 2])),
    "one class": ("two classes", labelled([0])),
    "two classes for three": ("three classes", labelled([0, 1])),
    "four classes for three": ("three classes", labelled([0, 1, 2, 3])),
    "the same class again": ("three classes", labelled([0, 1, 1])),
    "classes in another order": ("three classes", labelled([2, 1, 0])),
    "classes in columns": ("three classes", labelled([[0], [1], [2]])),
    "a number for classes": ("three classes", changed("own/classes_", 3)),
    "a list for classes": ("three classes", changed("own/classes_", [0, 1, 2])),
    "tables for classes": ("three classes", labelled([{}, {}, {}], "O")),
    "text for numbers": ("three classes", labelled(["a", "b", "c"])),
    "huge labels": ("three classes", labelled(["a", "b", "c"], "<U500000000")),
}


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder, options = tmp_path_factory.mktemp("others"), {**SMALL, "n_layers": 1}
    models: dict[str, DeepGPRegressor | DeepGPClassifier] = {
        "two targets": DeepGPRegressor(**options).fit(X, np.column_stack([Y, -Y])),
        "two classes": DeepGPClassifier(**options).fit(X, np.arange(30) % 2),
        "three classes": DeepGPClassifier(**options).fit(X, np.arange(30) % 3),
    }
    for name, model in models.items():
        model.save(folder / name)
        load_estimator(folder / name)
    return {name: folder / name for name in models}


@pytest.mark.parametrize("lie", OTHER_LIES)
def test_what_does_not_fit_the_model_is_refused(lie: str, others: dict[str, Path], tmp_path: Path) -> None:
    name, change = OTHER_LIES[lie]
    contents = read_contents(others[name], ModelFileError)
    change(contents)
    write_contents(tmp_path / "model", contents)
    with pytest.raises(ModelFileError):
        load_estimator(tmp_path / "model")


@pytest.mark.parametrize("text", ["hello", "[" * 100_000, "[1]", '{"format": ' + "1" * 5000 + "}"])
def test_a_header_that_is_no_table_is_refused_whatever_its_checksum(text: str, saved: Path, tmp_path: Path) -> None:
    arrays = read_contents(saved, ModelFileError).arrays
    (tmp_path / "model").write_bytes(save(arrays, {"facts": text, "sha256": _digest(arrays, text)}))
    with pytest.raises(ModelFileError, match="model is no file of this library: its header is not"):
        load_estimator(tmp_path / "model")


@pytest.mark.parametrize("lie", LIES)
def test_a_whole_file_with_wrong_contents_is_refused(lie: str, saved: Path, tmp_path: Path) -> None:
    contents = read_contents(saved, ModelFileError)
    LIES[lie](contents)
    write_contents(tmp_path / "model", contents)
    with pytest.raises(ModelFileError):
        load_estimator(tmp_path / "model")


def test_deep_nesting_is_refused(saved: Path, tmp_path: Path) -> None:
    contents = read_contents(saved, ModelFileError)
    nested: Any = []
    for _ in range(500):
        nested = [nested]
    contents.facts["model"]["layers"][0]["kernel"] = {"kind": "Sum", "parts": nested}
    write_contents(tmp_path / "model", contents)
    with pytest.raises(ModelFileError):
        load_estimator(tmp_path / "model")


def test_other_files_are_refused_with_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("not a model")
    (tmp_path / "empty").write_text("")
    for name in ("text", "empty"):
        with pytest.raises(ModelFileError, match="truncated or damaged, or no file of this library"):
            load_estimator(tmp_path / name)
    with pytest.raises(ModelFileError, match="there is no file"):
        load_estimator(tmp_path / "nothing")
    with pytest.raises(ModelFileError):
        load_estimator(tmp_path)


def test_a_failed_save_leaves_the_old_file(saved: Path, fitted: DeepGPRegressor, monkeypatch: Any) -> None:
    before = saved.read_bytes()

    def no_space(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", no_space)
    with pytest.raises(OSError, match="No space left"):
        fitted.save(saved)
    assert saved.read_bytes() == before
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]


def test_a_file_of_the_first_format_still_loads() -> None:
    folder = Path(__file__).parent / "files"
    model = load_estimator(folder / "format-1.sdgp")
    expected = json.loads((folder / "format-1.json").read_text())
    assert isinstance(model, DeepGPRegressor)
    mean, std = model.predict(np.array(expected["x"]), return_std=True)
    np.testing.assert_allclose(mean, expected["mean"], rtol=1e-6)
    np.testing.assert_allclose(std, expected["std"], rtol=1e-5)
