"""Train perceptrons on MNIST over stacked seeds, and measure them as the papers do: errors by epoch, pruning, histograms.

All seeds of a cell are members of one `Ensemble`; member k is seed k. The first 50,000 training images are trained on, the last
10,000 of the 60,000 are for validation; the test set is only reported. Errors are percentages.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor, nn

from experiments.frame import Request, Results, Sheet, Values, look
from plausible.apps import datasets
from plausible.apps.compare.tables import mean
from plausible.core.likelihoods import Categorical
from plausible.core.networks import choose_device
from plausible.core.priors import Flat, Prior
from plausible.engine import Checkpoint
from plausible.engine.watching import Monitor
from plausible.fitting import fit
from plausible.methods import Ensemble, Method
from plausible.posteriors.base import Posterior
from plausible.posteriors.laws import LawPosterior
from plausible.posteriors.mixture import MixturePosterior

WEIGHT_EDGES = torch.linspace(-0.3, 0.3, 121)
SNR_EDGES = torch.linspace(-60.0, 40.0, 201)
"""Decibels, 20·log₁₀(|μ|/σ)."""


@dataclass(frozen=True)
class Classifier:
    """One setting of a network on MNIST.

    `method` trains one seed. `normalisation` "126" divides pixels by 126, "unit" by 255, "standard" takes off the mean of the
    training images and divides by their standard deviation. Every `every` epochs the errors are looked at with `curve_draws` sets
    of weights and at the posterior mean; the end with `final_draws` too. `prune` are the fractions of weights that are removed at
    the end, each way of `prune_by`. `geometric` averages log-probabilities, over the draws and the posterior mean, instead of
    probabilities.
    """

    method: Method
    units: int
    prior: Prior = Flat()  # noqa: RUF009
    hidden_dropout: float = 0.0
    input_dropout: float = 0.0
    normalisation: Literal["126", "unit", "standard"] = "126"
    train: int = 50_000
    validation: int = 10_000
    test: int = 10_000
    every: int = 10
    curve_draws: int = 10
    final_draws: int = 100
    prune: tuple[float, ...] = ()
    prune_by: tuple[str, ...] = ("snr",)
    geometric: bool = False


def run(settings: Classifier, request: Request) -> dict[str, Any]:
    """Train all seeds and measure them: what the file of a cell holds."""
    module = network(settings)
    device = choose_device(module, request.device)
    data = {part: (x.to(device), y.to(device)) for part, (x, y) in images(settings).items()}
    monitor = Monitor(lambda _, posterior: _errors(posterior, data, settings, settings.curve_draws), settings.every)
    posterior = fit(
        module,
        data["train"],
        Ensemble(settings.method, members=request.seeds),
        likelihood=Categorical(),
        prior=settings.prior,
        seed=request.seed,
        device=request.device,
        compile=request.compile,
        precision=request.precision,
        progress=request.progress,
        callbacks=[monitor],
        checkpoint=None if request.checkpoint is None else Checkpoint(request.checkpoint, seconds=120),
    )
    if posterior.interrupted:
        raise KeyboardInterrupt("the same command goes on from here")
    if request.keep is not None:
        posterior.save(request.keep, overwrite=True)
    final = {**monitor.records[-1], **_errors(posterior, data, settings, settings.final_draws)}
    final.pop("epoch")
    members = _members(posterior)
    return {
        "errors": final,
        "curve": {key: [record[key] for record in monitor.records] for key in monitor.records[0]},
        "at_best_validation": _at_best(monitor.records, settings.curve_draws, request.seeds),
        "pruned": _pruned(members, data, settings),
        "weights": weight_histogram(members),
        "snr": snr_histogram(members, settings.prune),
        "training_seconds": posterior.run["seconds"],
        "mode": posterior.run["mode"],
        "precision": request.precision or "float32",
        "history": {name: values[-1] for name, values in posterior.history.items() if values},
    }


def network(settings: Classifier) -> nn.Sequential:
    """784 – units – units – 10 with ReLU; dropout where it is asked for."""
    layers: list[nn.Module] = [nn.Dropout(settings.input_dropout)] if settings.input_dropout else []
    before = 784
    for _ in range(2):
        layers += [nn.Linear(before, settings.units), nn.ReLU()]
        layers += [nn.Dropout(settings.hidden_dropout)] if settings.hidden_dropout else []
        before = settings.units
    return nn.Sequential(*layers, nn.Linear(before, 10))


def images(settings: Classifier) -> dict[str, tuple[Tensor, Tensor]]:
    """Parts `train`, `validation` and `test`: x float32 [N, 784], y int64 [N]."""
    (x, y), (x_test, y_test) = _raw()
    if not settings.train <= 50_000:
        raise ValueError(f"train: got {settings.train}, but only 50,000 images are for training")
    first, last = slice(0, settings.train), slice(50_000, 50_000 + settings.validation)
    kind = settings.normalisation
    loc, scale = (0.0, 126.0 if kind == "126" else 255.0)
    if kind == "standard":
        shares = torch.bincount(x[:50_000].flatten(), minlength=256).double() / x[:50_000].numel()
        values = torch.arange(256.0, dtype=torch.float64)
        loc = float(shares @ values)
        scale = math.sqrt(float(shares @ (values - loc).square()))
    parts = {"train": (x[first], y[first]), "validation": (x[last], y[last])}
    parts["test"] = (x_test[: settings.test], y_test[: settings.test])
    return {name: ((pixels.float() - loc) / scale, labels) for name, (pixels, labels) in parts.items()}


@lru_cache(maxsize=1)
def _raw() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    found = datasets.mnist(raw=True)
    (x, y), (x_test, y_test) = found.train, found.test
    return (x.flatten(1), y), (x_test.flatten(1), y_test)


# ---------------------------------------------------------------------------------------------------------------------
# Errors


def _members(posterior: Posterior) -> list[Posterior]:
    return posterior.parts if isinstance(posterior, MixturePosterior) else [posterior]


def _errors(
    posterior: Posterior, data: Mapping[str, tuple[Tensor, Tensor]], settings: Classifier, draws: int
) -> dict[str, list[float]]:
    """Error rates in per cent, one for each seed: of the network at the mean weights, and of the average over draws."""
    parts = ("validation", "test")
    x = torch.cat([data[part][0] for part in parts])
    sizes = [len(data[part][1]) for part in parts]
    found: dict[str, list[float]] = {}
    for way, predicted in _predictions(posterior, x, draws, settings.geometric).items():  # [seeds, N]
        for part, classes in zip(parts, predicted.split(sizes, dim=1)):
            found[f"{part}, {way}"] = _per_cent(classes, data[part][1])
    return found


def _per_cent(classes: Tensor, labels: Tensor) -> list[float]:
    return [round(rate, 6) for rate in (100 * (classes != labels).double().mean(-1)).tolist()]


def _predictions(posterior: Posterior, x: Tensor, draws: int, geometric: bool) -> dict[str, Tensor]:
    """Classes [seeds, N] by each way of predicting: "mean" and "N draws"; points have the first alone."""
    members = _members(posterior)
    if not isinstance(members[0], LawPosterior):
        return {"mean": posterior.functions(x).argmax(-1)}
    means = torch.stack([_log_probabilities(member, x).argmax(-1) for member in members])
    averages = torch.stack([averaged(member, x, draws, k, geometric).argmax(-1) for k, member in enumerate(members)])
    return {"mean": means, f"{draws} draws": averages}


def averaged(member: Any, x: Tensor, draws: int, seed: int, geometric: bool = False) -> Tensor:
    """(1/S) Σ_s p(y | x, w_s), or the geometric mean with the posterior mean as one more network, not normalised: [N, 10].

    One draw after the other, with noise of the device's own generator: the memory of one network, and no copies from the host.
    """
    stream = torch.Generator(device=member.device).manual_seed(seed)
    total = _log_probabilities(member, x) if geometric else torch.zeros((), device=x.device)
    for _ in range(draws):
        noise = {
            name: scale * torch.randn(scale.shape, generator=stream, dtype=scale.dtype, device=scale.device)
            for name, scale in member.scales.items()
        }
        each = _log_probabilities(member, x, noise)
        total = total + (each if geometric else each.exp())
    return (total / (draws + 1)).exp() if geometric else total / draws


def _log_probabilities(member: Any, x: Tensor, noise: Mapping[str, Tensor] | None = None) -> Tensor:
    """Log p(y | x, w) at the posterior mean, or that far from it; weights that were pruned are 0: [N, 10]."""
    weights = {name: mean if noise is None else mean + noise[name] for name, mean in member.means.items()}
    kept = {name: torch.where(mask, weights[name], 0.0) for name, mask in member.masks.items()}
    with torch.no_grad():
        return member.model.outputs({**weights, **kept, **member.points}, x).log_softmax(-1)


def _at_best(records: Sequence[Mapping[str, Any]], draws: int, seeds: int) -> list[float]:
    """The test error of each seed at the epoch of its lowest validation error."""
    way = f"{draws} draws" if f"test, {draws} draws" in records[0] else "mean"
    best = [min(records, key=lambda record, k=k: record[f"validation, {way}"][k]) for k in range(seeds)]  # type: ignore[misc]
    return [record[f"test, {way}"][k] for k, record in enumerate(best)]


def _pruned(
    members: Sequence[Any], data: Mapping[str, tuple[Tensor, Tensor]], settings: Classifier
) -> dict[str, dict[str, list[float]]]:
    """Test errors after removing the fraction of the weights that matters least, by way and fraction."""
    x, y = data["test"]
    found: dict[str, dict[str, list[float]]] = {}
    for by in settings.prune_by if settings.prune else ():
        for fraction in settings.prune:
            errors = []
            for k, member in enumerate(members):
                kept = member.prune(fraction, by=by, where="*weight") if fraction else member
                classes = averaged(kept, x, settings.final_draws, k, settings.geometric).argmax(-1)
                errors += _per_cent(classes[None], y)
            found.setdefault(by, {})[f"{fraction:g}"] = errors
    return found


# ---------------------------------------------------------------------------------------------------------------------
# Histograms: biases are left out


def weight_histogram(members: Sequence[Posterior]) -> dict[str, Any]:
    """Shares of the weights in bins of `WEIGHT_EDGES`, of one draw of each seed; the rest lies outside."""
    drawn = [value.flatten() for member in members for value in _matrices(_drawn(member)).values()]
    whole = torch.cat(drawn).cpu().float()
    return {"edges": _list(WEIGHT_EDGES), "shares": _shares(whole, WEIGHT_EDGES), "std": float(whole.double().std())}


def _drawn(member: Posterior) -> Mapping[str, Tensor]:
    return member.weights(1) if isinstance(member, LawPosterior) else member.weights()


def snr_histogram(members: Sequence[Any], fractions: Sequence[float]) -> dict[str, Any] | None:
    """Shares of 20·log₁₀(|μ|/σ) in bins of `SNR_EDGES` (values beyond them in the outermost), cuts of these fractions, modes."""
    if not all(isinstance(member, LawPosterior) for member in members):
        return None
    ratios = [ratio.flatten() for member in members for ratio in _matrices(member.snr(decibels=True)).values()]
    whole = torch.cat(ratios).cpu().float()
    shares = _shares(whole.clamp(float(SNR_EDGES[0]), float(SNR_EDGES[-1])), SNR_EDGES)
    ordered = whole.sort().values
    cuts = {f"{f:g}": float(ordered[min(int(f * len(ordered)), len(ordered) - 1)]) for f in fractions if f}
    return {"edges": _list(SNR_EDGES), "shares": shares, "cuts": cuts, "peaks": peaks(shares[1:-1])}


def peaks(shares: Sequence[float], width: int = 4, depth: float = 0.1) -> int:
    """How many maxima a histogram has, smoothed over 2·width + 1 bins; a dip counts if it is `depth` below the lower maximum."""
    values = torch.tensor(shares, dtype=torch.float64)
    smooth = nn.functional.avg_pool1d(values[None], 2 * width + 1, 1, width, count_include_pad=False)[0].tolist()
    count, high, low, rising = 0, 0.0, 0.0, True
    floor = 0.02 * max(smooth)
    for value in [*smooth, 0.0]:
        if rising:
            high = max(high, value)
            if value < (1 - depth) * high and high > floor:
                count, rising, low = count + 1, False, value
        else:
            low = min(low, value)
            if value > low / (1 - depth) and value > floor:
                rising, high = True, value
    return count


def _matrices(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in named.items() if name.endswith("weight")}


def _shares(values: Tensor, edges: Tensor) -> list[float]:
    counts = torch.histc(values, len(edges) - 1, float(edges[0]), float(edges[-1]))
    return [round(share, 9) for share in (counts.double() / len(values)).tolist()]


def _list(values: Tensor) -> list[float]:
    return [round(value, 6) for value in values.tolist()]


# ---------------------------------------------------------------------------------------------------------------------
# Numbers from stored results


def final_error(cell: str) -> Values:
    """Test errors at the end: of the most draws there are, for points of the point."""

    def values(results: Results) -> Sequence[float] | None:
        errors = look(results, cell, "errors") or {}
        ways = [key for key in errors if key.startswith("test, ")]
        return errors[ways[-1]] if ways else None

    return values


def all_errors(results: Results) -> list[Sheet]:
    """Every way of measuring the test error."""
    trained = {name: result for name, result in results.items() if "errors" in result}
    ways = list(dict.fromkeys(key for result in trained.values() for key in result["errors"] if key.startswith("test, ")))
    rows = []
    for name, result in trained.items():
        columns = [mean(result["errors"].get(way, [])).text() for way in ways]
        columns += [mean(result["at_best_validation"]).text(), f"{result['training_seconds']:.0f}"]
        rows.append((name, *columns))
    labels = ["posterior mean" if way == "test, mean" else way.removeprefix("test, ") for way in ways]
    head = ("cell", *labels, "at the best validation epoch", "training seconds")
    return [Sheet("Test error in per cent, mean ± standard error over seeds, by each way of predicting", head, tuple(rows))]
