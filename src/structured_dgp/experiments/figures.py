"""The paper's figures, computed here: each function trains or measures what it draws."""

from __future__ import annotations

import json
import math
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import matplotlib.pyplot as plt
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray
from matplotlib.figure import Figure

from structured_dgp import metrics, plots
from structured_dgp.baselines import (
    SGHMCRegressor,
    SghmcSettings,
    effective_sample_size,
    n_refused,
    plot_normality,
)
from structured_dgp.couplings import StripesAndArrow
from structured_dgp.datasets import Table
from structured_dgp.estimators import DeepGPRegressor
from structured_dgp.exceptions import InputError, StructuredDGPWarning
from structured_dgp.experiments.data import load
from structured_dgp.experiments.download import NotHereError
from structured_dgp.experiments.splits import Split, extrapolation, interpolation
from structured_dgp.experiments.tables import STOPPED, Results
from structured_dgp.initial import Start, initial_model
from structured_dgp.model import DeepGP
from structured_dgp.pages import png_of
from structured_dgp.scaling import Scaling
from structured_dgp.training import train
from structured_dgp.validation import changed

COLORS = {"SGP": "C7", "MF": "C1", "STAR": "C0", "FC": "C2"}
COUPLINGS = {"MF": "mf", "STAR": "star", "FC": "fc"}
WIDTH = 5
"""Latent GPs of a hidden layer."""
ARCHITECTURES = ((3, 5), (4, 3))
"""Layers and width of the posteriors whose structure is drawn."""


@dataclass(frozen=True)
class Drawing:
    """What the figures are made from.

    Attributes:
        data: data set of those that train; default: that of the paper's figure, or concrete if it is not here.
        data_dir: folder of data sets.
        n_inducing, steps: of each training; None for the figure's own.
        results: runs, for the figures that are drawn from runs.
    """

    data: str | None = None
    data_dir: str | None = None
    n_inducing: int | None = None
    steps: int | None = None
    results: Results = field(default_factory=lambda: Results([]))

    def table(self, own: str = "concrete") -> Table:
        try:
            return load(self.data or own, self.data_dir)
        except NotHereError as error:
            if self.data is not None:
                raise
            warnings.warn(f"{error} The figure is drawn with concrete instead.", StructuredDGPWarning, stacklevel=3)
            return load("concrete")

    def estimator(self, **options: Any) -> DeepGPRegressor:
        """An estimator whose training does not look for its length."""
        size = {"n_inducing": self.n_inducing or 64, "width": WIDTH, "max_steps": self.steps or 600}
        return DeepGPRegressor(early_stopping=False, random_state=0, **{**size, **options})


@dataclass(frozen=True)
class Drawn:
    """A figure, and sentences about what it shows, which are made of the numbers behind it."""

    figure: Figure
    findings: tuple[str, ...] = ()


def _fitted(table: Table, split: Split, estimator: DeepGPRegressor) -> DeepGPRegressor:
    return estimator.fit(table.x[split.train], table.y[split.train, 0])


def star_share(model: DeepGP) -> float:
    """Of the squared correlations between inducing outputs of different GPs, the part in blocks that STAR has."""
    covariance, T = model.inducing_covariance(), len(model.posterior.structure.gps)
    scale = np.sqrt(np.diag(covariance))
    squared = (covariance / np.outer(scale, scale)) ** 2
    blocks = squared.reshape(T, len(squared) // T, T, -1).sum(axis=(1, 3))
    blocks[np.diag_indices(T)] = 0.0
    kept = StripesAndArrow().structure(model.posterior.structure.widths).covariance
    return float(blocks[kept].sum() / blocks.sum())


def covariance_figure(drawing: Drawing) -> Drawn:
    """Fig. 1: covariance of the inducing outputs under mean field, STAR and FC."""
    table = drawing.table()
    split = interpolation(table.x, 0)
    figure, axes = plt.subplots(1, 3, figsize=(12, 4.2), layout="constrained")
    models = {}
    for axis, (name, coupling) in zip(axes, COUPLINGS.items(), strict=True):
        models[name] = _fitted(table, split, drawing.estimator(coupling=coupling)).model_
        plots.plot_covariance(models[name], axis)
        axis.set_title(name)
    figure.suptitle(f"{table.name}, L = 3, τ = {WIDTH}, M = {models['FC'].posterior.n_inducing}")
    return Drawn(figure, (f"{table.name}: {_what_star_keeps(models['FC'])}.",))


def _what_star_keeps(model: DeepGP) -> str:
    structure = model.posterior.structure
    kept = StripesAndArrow().structure(structure.widths).covariance
    places = (kept.sum() - len(kept)) / (kept.size - len(kept))
    return (
        f"of FC's squared correlations between the inducing outputs of different GPs, {star_share(model):.0%} lie in "
        f"the blocks that STAR has, which are {places:.0%} of all such blocks"
    )


def structure_figure(drawing: Drawing) -> Drawn:
    """Additional covariance and precision matrices of FC: three layers of width 5, and four of width 3."""
    table = drawing.table()
    split = interpolation(table.x, 0)
    size = (4.4 * len(ARCHITECTURES), 8.6)
    figure, axes = plt.subplots(2, len(ARCHITECTURES), figsize=size, layout="constrained", squeeze=False)
    findings = []
    for column, (layers, width) in enumerate(ARCHITECTURES):
        estimator = drawing.estimator(coupling=COUPLINGS["FC"], n_layers=layers, width=width)
        model = _fitted(table, split, estimator).model_
        for axis, what in zip(axes[:, column], ("covariance", "precision"), strict=True):
            plots.plot_covariance(model, axis, what=what)
            axis.set_title(f"L = {layers}, τ = {width}: {what}")
        findings.append(f"{table.name}, L = {layers}, τ = {width}: {_what_star_keeps(model)}.")
    figure.suptitle(f"{table.name}, FC, M = {model.posterior.n_inducing}")
    return Drawn(figure, tuple(findings))


MANY = 1000
"""The run with samples may make this many times the steps of the other one, in the same time."""


def convergence_figure(drawing: Drawing) -> Drawn:
    """ELBO of FC under Adam, inducing outputs marginalised analytically or, for the same time, sampled.

    The rate is the paper's, and surges of the gradient are clipped, as is best for sampled inducing outputs.
    """
    table = drawing.table()
    split = interpolation(table.x, 0)
    x = Scaling.of(table.x[split.train]).to_standard(table.x[split.train])
    y = Scaling.of(table.y[split.train]).to_standard(table.y[split.train])
    steps = drawing.steps or 1000
    options: dict[str, Any] = {
        "optimizer": "adam",
        "learning_rate": 0.005,
        "relative": False,
        "antithetic": False,
        "score_every": max(1, min(25, steps // 4)),
    }
    limits: dict[str, Any] = {"max_steps": steps}
    allowed = 0.0
    figure, (over_time, over_steps) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    ends: dict[str, tuple[float, int]] = {}
    for label, inducing, color in (("analytic", "marginalised", "C0"), ("sampled", "sampled", "C3")):
        size = ((WIDTH, WIDTH, 1), drawing.n_inducing or 64)
        start = initial_model(x, COUPLINGS["FC"], *size, start=Start(noise=0.01), precision="mixed")
        train(start, x, y, inducing=inducing, max_steps=1, **options)  # compiles, so that the next one need not
        trained = train(start, x, y, inducing=inducing, **limits, **options)
        allowed = allowed or trained.seconds
        limits = {"max_steps": MANY * steps, "max_seconds": allowed}
        history = trained.history
        over_time.plot(history["seconds"], history["elbo"], label=label, color=color)
        over_steps.plot(history["step"], history["elbo"], label=label, color=color)
        ends[label] = (float(np.max(history["elbo"])), trained.steps)
    best = max(elbo for elbo, _ in ends.values())
    over_steps.set_xscale("log")
    for axis, name in ((over_time, "seconds, without compilation"), (over_steps, "steps")):
        axis.set(xlabel=name, ylabel="ELBO", ylim=(best - 3.0 * abs(best) - 300.0, best + 0.1 * abs(best) + 30.0))
        axis.legend(frameon=False)
    reached = "; ".join(f"{label}, {elbo:.0f} in {n_steps} steps" for label, (elbo, n_steps) in ends.items())
    return Drawn(figure, (f"{table.name}: the largest ELBO in {allowed:.0f} seconds: {reached}.",))


def calibration_figure(drawing: Drawing) -> Drawn:
    """Calibration study: variance against distance, squared error against variance, fraction inside intervals."""
    table = drawing.table("kin8nm")
    split = extrapolation(table.x, 0)
    y = table.y[split.test, 0]
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    methods: dict[str, dict[str, Any]] = {
        "SGP": {"n_layers": 1},
        "MF": {"coupling": "mf"},
        "STAR": {"coupling": "star"},
    }
    findings = []
    for name, options in methods.items():
        estimator = _fitted(table, split, drawing.estimator(**options))
        prediction, color = estimator.predict_dist(table.x[split.test]), COLORS[name]
        inputs = estimator.x_scaling_.to_standard(table.x)
        distance = plots.distance_to_data(inputs[split.test], inputs[split.train])
        left.plot(*plots.running_median(distance, prediction.var), color=color, label=name)
        place, squared = plots.running_median(prediction.var, (prediction.mean - y) ** 2)
        middle.plot(place, squared / plots.MEDIAN_OF_SQUARE, color=color, label=name)
        right.plot(*metrics.calibration_curve(prediction, y), color=color, label=name)
        scaled = np.median((prediction.mean - y) ** 2 / prediction.var) / plots.MEDIAN_OF_SQUARE
        findings.append(
            f"{name}: {metrics.coverage(prediction, y):.0%} of the targets lie inside 90 % intervals; half of the "
            f"squared errors are larger than {scaled:.2f} times what their predicted variance lets expect; "
            f"log-likelihood {metrics.log_likelihood(prediction, y):.2f}."
        )
    left.set(xlabel="distance to the training data (standardised)", ylabel="predicted variance", title=table.name)
    middle.set(xscale="log", yscale="log")
    ends = np.array(middle.get_xlim())
    middle.plot(ends, ends, color="0.4", linestyle="--", linewidth=1, label="right")
    middle.set(xlabel="predicted variance", ylabel="squared error (median, as a variance)")
    right.plot([0, 1], [0, 1], color="0.4", linestyle="--", linewidth=1)
    right.set(xlabel="nominal level of the interval", ylabel="fraction inside", xlim=(0, 1), ylim=(0, 1))
    for axis in (left, middle, right):
        axis.legend(frameon=False)
    return Drawn(figure, tuple(findings))


SIZES: dict[str, tuple[int, ...]] = {"M": (32, 64, 128, 256), "L": (1, 2, 3, 4), "τ": (1, 2, 5, 8)}
"""What the run-time figure measures: inducing points, layers, width; one varies at a time around 128, 3 and 5."""


def step_seconds(coupling: str, n_inducing: int, n_layers: int, width: int, repeats: int = 5) -> float:
    """The shortest time of one ELBO gradient: batch 512, five samples, nine inputs as in protein, float64."""
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((512, 9)), rng.standard_normal((512, 1))
    model = initial_model(x, coupling, (width,) * (n_layers - 1) + (1,), n_inducing)

    @eqx.filter_jit
    @eqx.filter_grad
    def gradient(model: DeepGP, key: PRNGKeyArray) -> Float[Array, ""]:
        return model.elbo(x, y, key=key, n_data=45_730)

    times = []
    with jax.enable_x64(True):
        for repeat in range(repeats + 1):
            began = time.perf_counter()
            jax.block_until_ready(eqx.filter(gradient(model, jax.random.key(repeat)), eqx.is_array))
            times.append(time.perf_counter() - began)
    return min(times[1:])  # the first one compiled


def runtime_figure(drawing: Drawing) -> Drawn:
    """Run time of one gradient over M, L and τ."""
    figure, axes = plt.subplots(1, len(SIZES), figsize=(12, 3.8), layout="constrained")
    standard = {"M": drawing.n_inducing or 128, "L": 3, "τ": 5}
    at_standard: dict[str, float] = {}
    for axis, (quantity, values) in zip(axes, SIZES.items(), strict=True):
        for name, coupling in COUPLINGS.items():
            sizes = [{**standard, quantity: value} for value in values]
            seconds = [step_seconds(coupling, size["M"], size["L"], size["τ"]) for size in sizes]
            jax.clear_caches()
            if quantity == "L":
                at_standard[name] = seconds[values.index(standard["L"])]
            axis.plot(values, seconds, "o-", color=COLORS[name], label=name)
            if name == "STAR":
                power = {"M": 2, "L": 2, "τ": 1}[quantity]
                theory = seconds[-1] * (np.array(values) / values[-1]) ** power
                axis.plot(values, theory, ":", color="0.5", label=f"{quantity}{'²' * (power == 2)}")
        axis.set(xscale="log", yscale="log", xlabel=quantity, ylabel="seconds per gradient")
        axis.set_xticks(values, [str(value) for value in values])
        axis.minorticks_off()
        axis.legend(frameon=False)
    ratios = " and ".join(f"{name} {at_standard[name] / at_standard['MF']:.1f}" for name in ("STAR", "FC"))
    size = ", ".join(f"{quantity} = {value}" for quantity, value in standard.items())
    return Drawn(figure, (f"With {size}, {ratios} times as long as MF, which takes {at_standard['MF']:.3f} seconds.",))


def elbo_figure(drawing: Drawing) -> Drawn:
    """Box plots of the ELBO over splits, mean field and STAR."""
    results = drawing.results
    labels = [label for label in ("MF L3", "STAR L3", "FC L3") if label in results.labels]
    found = {data: values for data in results.data if (values := _elbos(results, data, labels))}
    if not found:
        raise InputError("the ELBO figure needs finished runs of mf-l3 and star-l3: make them with `sdgp bench run`.")
    columns = 4
    lines = -(-len(found) // columns)
    figure, grid = plt.subplots(lines, columns, figsize=(12, 3.0 * lines), layout="constrained", squeeze=False)
    for axis in grid.flat[len(found) :]:
        axis.set_visible(False)
    for axis, (data, values) in zip(grid.flat, found.items(), strict=False):
        names = [label.split()[0] for label in values]
        line = {"color": "black"}
        boxes = axis.boxplot(list(values.values()), tick_labels=names, patch_artist=True, widths=0.6, medianprops=line)
        for box, name in zip(boxes["boxes"], names, strict=True):
            box.set_facecolor(COLORS[name])
            box.set_alpha(0.6)
        count = len(next(iter(values.values())))
        axis.set(title=f"{data} ({count} split{'s' * (count > 1)})", ylabel="ELBO")
    return Drawn(figure, tuple(_elbo_findings(results, labels, found)))


def _elbos(results: Results, data: str, labels: Iterable[str]) -> dict[str, list[float]]:
    """Those of the methods that there are, over the splits that all of these share."""
    runs = {label: found for label in labels if (found := results.runs("interpolation", data, label))}
    splits = sorted(set.intersection(*map(set, runs.values()))) if runs else []
    return {label: [float(of[split].record["elbo"]) for split in splits] for label, of in runs.items() if splits}


def _elbo_findings(results: Results, labels: Sequence[str], data: Iterable[str]) -> list[str]:
    """By how much the bound of the structured posteriors is larger than that of mean field, or smaller."""
    sentences = []
    for label in labels:
        counts = []
        for name in data:
            ours, theirs = results.compared("interpolation", name, label, "MF L3", "elbo")
            if label != "MF L3" and ours.n:
                sign = "larger" if ours.mean > theirs.mean else "smaller"
                counts.append(f"{name} {sign} by {abs(ours.mean - theirs.mean):.0f}")
        if counts:
            sentences.append(f"Mean ELBO of {label} beside MF L3 over the same splits: {', '.join(counts)}.")
    return sentences


ENOUGH = 50
"""A chain is not thinned to fewer samples than this."""
LONGER = 100
"""So many times as many samples as published are drawn for the study of normality."""


def normality_figure(drawing: Drawing) -> Drawn:
    """The paper's study of SGHMC with one layer, and the same with a chain long enough for the test.

    Above, the samples that the published settings keep, as if they were independent; below, samples of the same chain
    that lie as far apart as its effective sample size asks for.
    """
    table = drawing.table()
    split = interpolation(table.x, 0)
    published = SghmcSettings()
    if drawing.steps is not None:
        published = changed(published, {"n_samples": ENOUGH, "burn_in": drawing.steps, "thinning": 1})
    settings = changed(published, {"n_samples": LONGER * published.n_samples})
    estimator = SGHMCRegressor(1, n_inducing=drawing.n_inducing or 64, settings=asdict(settings), random_state=0)
    estimator.fit(table.x[split.train], table.y[split.train, 0])
    samples, size = estimator.chains_[0], float(np.median(effective_sample_size(estimator.chains_)))
    stride = thinning_of(len(samples), size)
    figure, (above, below) = plt.subplots(2, 2, figsize=(9, 6.8), layout="constrained")
    kept, thinned = samples[: published.n_samples], samples[::stride]
    plot_normality(kept, tuple(above))
    plot_normality(thinned, tuple(below))
    above[0].set_title(f"{published.n_samples} samples, {published.thinning} steps apart")
    below[0].set_title(
        f"one in {stride} of {len(samples)} samples" if stride > 1 else f"all {len(samples)} samples, correlated"
    )
    figure.suptitle(
        f"{table.name}, one layer, M = {samples.shape[-1]}, {settings.burn_in} steps of burn-in; "
        f"median effective size of {len(samples)} samples: {size:.0f}",
        fontsize="medium",
    )
    finding = (
        f"Of {kept[0].size} inducing outputs the test refuses {n_refused(kept)} with the {len(kept)} samples of the "
        f"published settings, and {n_refused(thinned)} with {len(thinned)} samples {stride * published.thinning} steps "
        "apart."
    )
    return Drawn(figure, (finding,))


def thinning_of(n_samples: int, effective: float) -> int:
    """One in how many samples is about independent of the one before; 1 if too few of them would be left."""
    stride = math.ceil(n_samples / effective)
    return stride if len(range(0, n_samples, stride)) >= ENOUGH else 1


@dataclass(frozen=True)
class Kind:
    """A figure: how it is drawn, and how it is read."""

    draw: Callable[[Drawing], Drawn]
    caption: str
    from_runs: bool = False


FIGURES: dict[str, Kind] = {
    "covariance": Kind(
        covariance_figure,
        "Covariance of the inducing outputs of all layers after training, logarithmic colours, lines between layers. "
        "Mean field has blocks on the diagonal only; STAR adds stripes between hidden layers and an arrow to the "
        "output; FC shows which of all the others matter.",
    ),
    "structure": Kind(
        structure_figure,
        "Covariance and precision of the fully coupled posterior after training, for two architectures.",
    ),
    "convergence": Kind(
        convergence_figure,
        "The same bound, the same optimiser (Adam), the same start, the same time: with inducing outputs marginalised "
        "analytically, and with inducing outputs that are sampled, whose steps are faster. Both were compiled before "
        "the clock started. Right: the same over steps.",
    ),
    "calibration": Kind(
        calibration_figure,
        "Away from the training data. Left: predicted variance over the distance to the nearest training point. "
        "Middle: squared error over predicted variance, above the dashed line the variance is too small. Both are "
        "running medians over a tenth of the points, as far as there are so many. Right: how many targets lie inside "
        "central intervals.",
    ),
    "runtime": Kind(
        runtime_figure,
        "Seconds of one gradient of the ELBO on this machine, over inducing points, layers and width; dotted, the "
        "leading term of the theory for STAR.",
    ),
    "elbo": Kind(elbo_figure, f"ELBO over the splits of the interpolation task. {STOPPED}", from_runs=True),
    "normality": Kind(
        normality_figure,
        "Inducing outputs of a one-layer model sampled by SGHMC, whose posterior is normal; below the dashed line, a "
        "test says that the samples are not. The test takes samples as independent. Above: the samples that the "
        "published settings keep, which lie too close together, so that refusals may only mean that the chain has not "
        f"moved far. Below: {LONGER} times as many samples of the same chain, thinned to about their effective number "
        f"unless fewer than {ENOUGH} would be left.",
    ),
}
"""By name."""


def write_figure(name: str, drawn: Drawn, folder: Path, command: str = "") -> list[Path]:
    """The figure as SVG and PNG on a white ground, which is readable in print and on light and dark pages.

    The ``command`` that made it, and what it shows, go into a JSON file beside it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    note = {"command": command or f"sdgp bench figure {name}", "findings": drawn.findings}
    (folder / f"{name}.json").write_text(json.dumps(note, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    paths = [folder / f"{name}.{suffix}" for suffix in ("svg", "png")]
    drawn.figure.savefig(paths[0], dpi=150, facecolor="white")
    paths[1].write_bytes(png_of(drawn.figure))
    return paths


def read_note(name: str, folder: Path) -> tuple[str, list[str]]:
    """The command that made a figure in a folder, and what the figure shows; as far as it is known."""
    try:
        note = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # the figure is worth showing without its note
        note = {}
    return note.get("command", f"sdgp bench figure {name}"), note.get("findings", [])
