"""What a user of scikit-learn would pick instead: one table on scikit-learn's own data sets, same splits for all.

    python benchmarks/rivals.py --json rivals.json

diabetes (regression): log-likelihood, RMSE, CRPS and coverage of 90 % intervals. breast cancer, iris and digits
(classification): log loss, accuracy, and expected calibration error of the probability of the predicted class. For a
regression, gradient boosting predicts a set of quantiles, and a random forest has the spread of its out-of-bag
residuals.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
from common import emit, parser
from sklearn import datasets
from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process import GaussianProcessClassifier, GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel
from sklearn.model_selection import train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from structured_dgp import DeepGPClassifier, Mixture, metrics
from structured_dgp.baselines import make_method
from structured_dgp.families import Normal

REGRESSION = {"diabetes": datasets.load_diabetes}
CLASSIFICATION = {
    "breast cancer": datasets.load_breast_cancer,
    "iris": datasets.load_iris,
    "digits": datasets.load_digits,
}


def _gp(x: np.ndarray, y: np.ndarray, x_test: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    kernel = ConstantKernel() * RBF(np.full(x.shape[1], np.sqrt(x.shape[1]))) + WhiteKernel(0.1)
    model = make_pipeline(StandardScaler(), GaussianProcessRegressor(kernel, normalize_y=True)).fit(x, y)
    return model.predict(x_test, return_std=True)


Scores = dict[str, float]


def gp_scores(x: np.ndarray, y: np.ndarray, x_test: np.ndarray, y_test: np.ndarray) -> Scores:
    mean, std = _gp(x, y, x_test)
    return shown(Mixture(Normal(mean[None], std[None] ** 2)), y_test)


def shown(prediction: Mixture, y: np.ndarray) -> Scores:
    found = metrics.scores(prediction, y)
    return {key: found[key] for key in ("log_likelihood", "rmse", "crps", "coverage")}


def method_scores(name: str) -> Callable[..., Scores]:
    def scores(x: np.ndarray, y: np.ndarray, x_test: np.ndarray, y_test: np.ndarray) -> Scores:
        return shown(make_method(name, random_state=0).fit(x, y).predict_dist(x_test), y_test)

    return scores


def class_scores(make: Callable[[int], Any]) -> Callable[..., Scores]:
    def scores(x: np.ndarray, y: np.ndarray, x_test: np.ndarray, y_test: np.ndarray) -> Scores:
        model = make(x.shape[1]).fit(x, y)
        p = model.predict_proba(x_test)
        chosen, right = p.max(axis=1), p.argmax(axis=1) == y_test
        bins = np.minimum((10 * chosen).astype(int), 9)
        gaps = [abs(chosen[bins == b].mean() - right[bins == b].mean()) * np.mean(bins == b) for b in np.unique(bins)]
        return {
            "log_loss": float(-np.mean(np.log(np.maximum(p[np.arange(len(p)), y_test], 1e-15)))),
            "accuracy": float(right.mean()),
            "calibration_error": float(np.sum(gaps)),
        }

    return scores


def _gpc(n_inputs: int) -> Any:
    return make_pipeline(StandardScaler(), GaussianProcessClassifier(RBF(np.sqrt(n_inputs)), random_state=0))


REGRESSORS: dict[str, Callable[..., Scores]] = {
    "DeepGPRegressor star": method_scores("star"),
    "DeepGPRegressor one layer": method_scores("sgp"),
    "GaussianProcessRegressor": gp_scores,
    "gradient boosting": method_scores("boosting"),
    "random forest": method_scores("forest"),
}
CLASSIFIERS: dict[str, Callable[..., Scores]] = {
    "DeepGPClassifier star": class_scores(lambda n: DeepGPClassifier("star", 2, random_state=0)),
    "DeepGPClassifier one layer": class_scores(lambda n: DeepGPClassifier("mf", 1, random_state=0)),
    "GaussianProcessClassifier": class_scores(_gpc),
    "gradient boosting": class_scores(lambda n: HistGradientBoostingClassifier(random_state=0)),
    "random forest": class_scores(lambda n: RandomForestClassifier(300, random_state=0)),
}


def main() -> None:
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--splits", type=int, default=3)
    options.add_argument("--only", nargs="+", help="names of data sets")
    arguments = options.parse_args()
    warnings.simplefilter("ignore", ConvergenceWarning)
    rows: list[dict[str, Any]] = []
    for sets, methods in ((REGRESSION, REGRESSORS), (CLASSIFICATION, CLASSIFIERS)):
        for name, load in sets.items():
            if arguments.only and name not in arguments.only:
                continue
            x, y = load(return_X_y=True)
            for method, scores in methods.items():
                found = []
                for seed in range(arguments.splits):
                    stratify = y if sets is CLASSIFICATION else None
                    a, b, ya, yb = train_test_split(x, y, test_size=0.2, random_state=seed, stratify=stratify)
                    began = time.perf_counter()
                    result = scores(a, ya, b, yb)
                    found.append({**result, "seconds": time.perf_counter() - began})
                rows += [{"data": name, "what": method, "split": seed, **row} for seed, row in enumerate(found)]
                emit(rows, arguments.json)
                text = "  ".join(f"{key} {np.mean([row[key] for row in found]):8.3f}" for key in found[0])
                print(f"{name:14s} {method:27s} {text}", flush=True)


if __name__ == "__main__":
    main()
