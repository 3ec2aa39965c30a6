"""Comparing models by the evidence: log p(D | M), Bayes factors, and the probabilities of models given the data.

    p(M | D) ∝ p(D | M) p(M),      log p(D | M) = log p(D | w*) + log of the Occam factor

The evidence rewards fit and charges for freedom: the Occam factor is the share of what the prior thought possible that is left
when the data are in (MacKay 1992). `compare` puts posteriors of the same data side by side; `Evidence` is what a Laplace
posterior takes apart.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from plausible.blocks.curvature.tuning import Evidence
from plausible.core.data import num_rows, take
from plausible.core.priors.composed import Patterns
from plausible.core.tables import Table, Tabular, data_frame
from plausible.posteriors.base import Posterior, check_draws
from plausible.posteriors.predictive import Draws, Predictive

__all__ = ["Comparison", "Evidence", "Row", "compare", "log_symmetries", "verdict"]

SCALE = ((1.0, "hardly worth a mention"), (3.0, "positive"), (5.0, "strong"), (math.inf, "very strong"))
"""Natural logs of Bayes factors up to which evidence is called so (Kass and Raftery 1995, whose 2 log B is halved)."""
DRAWS = 1000
"""How many draws of functions a model average has by default."""

ODD = (nn.Tanh, nn.Softsign, nn.Hardtanh, nn.Tanhshrink, nn.Softshrink, nn.Hardshrink)
RECTIFIERS = (nn.ReLU, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.ReLU6, nn.Hardswish, nn.Softplus)
SIGMOIDS = (nn.Sigmoid, nn.Hardsigmoid, nn.LogSigmoid)
PASSING = (nn.Identity, nn.Dropout, nn.Flatten)


def verdict(log_bayes_factor: float) -> str:
    """How much a log Bayes factor says, in the words of Kass and Raftery (1995): by its size, whatever its sign."""
    return next(words for limit, words in SCALE if abs(log_bayes_factor) <= limit)


@dataclass(frozen=True)
class Row:
    """One model: its evidence, what it is made of, and how it stands beside the others; logarithms are natural.

    `log_bayes_factor` is log p(D | M)/p(D | best), 0 or below; `probability` is p(M | D). `log_likelihood` and `log_occam`
    (None where the method does not take the evidence apart) sum up with `log_symmetries` to `log_evidence`. `bound` says that
    `log_evidence` is a lower bound, `points` how many weights of the network were trained as points, given which the evidence
    is, and `error` the standard error of `log_evidence` where it was sampled.
    """

    name: str
    log_evidence: float
    log_bayes_factor: float
    probability: float
    verdict: str
    weights: int
    log_likelihood: float | None = None
    log_occam: float | None = None
    effective: float | None = None
    log_symmetries: float = 0.0
    bound: bool = False
    points: int = 0
    error: float | None = None

    @property
    def note(self) -> str:
        """What to keep in mind about the number."""
        words = ["lower bound"] if self.bound else [] if self.error is None else [f"± {self.error:.2g}"]
        return ", ".join([*words, f"given {self.points:,} points"] if self.points else words)


class Comparison(Tabular):
    """Models of the same data, the most probable first: `rows`, `best`, `probabilities`; `print` shows a table.

    `posteriors` are those that were compared, by name. `predict` averages over all of them.
    """

    def __init__(self, rows: Sequence[Row], posteriors: Mapping[str, Posterior]):
        self.rows = tuple(sorted(rows, key=lambda row: (-row.probability, -row.log_evidence)))
        self.posteriors = dict(posteriors)

    @property
    def best(self) -> str:
        """The name of the most probable model."""
        return self.rows[0].name

    @property
    def probabilities(self) -> dict[str, float]:
        """p(M | D) by name; they sum to 1."""
        return {row.name: row.probability for row in self.rows}

    def __getitem__(self, name: str) -> Row:
        row = next((row for row in self.rows if row.name == name), None)
        if row is None:
            raise KeyError(f"{name!r} was not compared; there are: {', '.join(row.name for row in self.rows)}")
        return row

    def log_bayes_factor(self, first: str, second: str) -> float:
        """Log p(D | first)/p(D | second)."""
        return self[first].log_evidence - self[second].log_evidence

    def predict(self, x: Any, draws: int = DRAWS, seed: int = 0) -> Predictive:
        """p(y | x, D) = Σ_M p(y | x, M, D) p(M | D), the average over models, as a mixture of function draws.

        Each model gets its share of the `draws`, to the nearest whole draw; one whose share is less is left out. Models must have
        the same likelihood and outputs.
        """
        if draws is None or (total := check_draws(draws)) is None:
            raise ValueError("draws must be a whole number of at least 1, which is divided among the models, got None")
        shares = _shares([row.probability for row in self.rows], total)
        parts = {row.name: count for row, count in zip(self.rows, shares) if count}
        first = self.posteriors[self.best]
        for name in parts:
            other = self.posteriors[name]
            if other.likelihood != first.likelihood or other.model.output_shape != first.model.output_shape:
                raise ValueError(
                    f"models with different likelihoods or outputs cannot be averaged: {self.best} has {first.likelihood} of "
                    f"{first.model.output_shape}, {name} {other.likelihood} of {other.model.output_shape}"
                )
        chosen = {name: self.posteriors[name] for name in parts}
        # Each model converts inputs to its own type and device.
        inputs = {name: posterior.inputs(x) for name, posterior in chosen.items()}

        def source(rows: slice) -> Draws:
            drawn = [
                posterior._evaluated(take(inputs[name], rows), parts[name], seed + k)
                for k, (name, posterior) in enumerate(chosen.items())
            ]
            device, dtype = drawn[0].outputs.device, drawn[0].outputs.dtype
            join = lambda values: torch.cat([value.to(device, dtype) for value in values])  # noqa: E731
            names = drawn[0].weights
            return Draws(join([d.outputs for d in drawn]), {n: join([d.weights[n] for d in drawn]) for n in names})

        count = num_rows(next(iter(inputs.values())))
        return Predictive(first.likelihood, source, num_inputs=count, num_draws=total, output_shape=first.model.output_shape)

    def to_records(self) -> list[dict[str, Any]]:
        return [asdict(row) for row in self.rows]

    def to_pandas(self) -> Any:
        """A data frame with a row for each model and the fields of `Row`; needs pandas."""
        return data_frame(self.to_records())

    def as_table(self) -> Table:
        """Columns that no row has anything in are left out."""
        rows = [
            {
                "model": row.name,
                "log evidence": _signed(row.log_evidence),
                "log likelihood": _signed(row.log_likelihood),
                "log Occam factor": _signed(row.log_occam),
                "weights": f"{row.weights:,}",
                "determined": "" if row.effective is None else f"{row.effective:.1f}",
                "log Bayes factor": _signed(row.log_bayes_factor),
                "probability": _probability(row.probability),
                "evidence against": "–" if row.log_bayes_factor == 0 else row.verdict,
                "log symmetries": f"+{row.log_symmetries:.1f}" if row.log_symmetries else "",
                "note": row.note,
            }
            for row in self.rows
        ]
        heads = [head for head in rows[0] if any(row[head] for row in rows)]
        return Table(heads, [[row[head] for head in heads] for row in rows], words=("model", "evidence against", "note"))

    def __repr__(self) -> str:
        return f"<Comparison of {len(self.rows)} models: {self.best} has probability {self.rows[0].probability:.3g}>"


def compare(
    posteriors: Mapping[str, Posterior] | Sequence[Posterior],
    prior_probabilities: Mapping[str, float] | Sequence[float] | None = None,
    *,
    symmetries: bool = False,
) -> Comparison:
    """p(M | D) = p(D | M) p(M) / Σ p(D | M′) p(M′) for models of the same data, from their `log_evidence`.

    posteriors: by name, or in a row (then they are called after their methods and numbers: "Laplace 1"). Laplace approximations
        have an estimate of log p(D) with its Occam factor; variational methods have lower bounds, by which a model looks worse
        than it is, and the more so the cruder its family: the table says which is which.
    prior_probabilities: p(M), equal by default; they sum to 1.
    symmetries: add `log_symmetries` of each network, the number of modes that are copies of the one that was found.

    That all were fitted on the same data cannot be seen from a posterior but for the number of examples, which is checked. One
    model fitted by two methods is refused: the difference of their estimates is no Bayes factor.
    """
    named = _named(posteriors)
    priors = _priors(prior_probabilities, tuple(named))
    _check_same_data(named)
    copies = {name: log_symmetries(posterior.model.network) if symmetries else 0.0 for name, posterior in named.items()}
    logs = {name: _log_evidence(name, posterior) + copies[name] for name, posterior in named.items()}
    _check_models(named)
    top = max(logs.values())
    with_prior = {name: value + (math.log(priors[name]) if priors[name] else -math.inf) for name, value in logs.items()}
    # Log evidences differ by hundreds of nats: the largest is taken out before the exponentials.
    highest = max(with_prior.values())
    total = highest + math.log(sum(math.exp(value - highest) for value in with_prior.values()))
    rows = []
    for name, posterior in named.items():
        parts: Evidence | None = getattr(posterior, "evidence", None)
        model, estimated = posterior.model, "log_evidence_error" in posterior.run
        points = [n for n in model.points if not n.startswith("likelihood.")]
        rows.append(
            Row(
                name,
                logs[name],
                logs[name] - top,
                math.exp(with_prior[name] - total),
                verdict(logs[name] - top),
                weights=sum(model.initial[n].numel() for n in model.random),
                log_likelihood=None if parts is None else float(parts.log_likelihood),
                log_occam=None if parts is None else float(parts.log_occam),
                effective=getattr(posterior, "effective", None),
                log_symmetries=copies[name],
                bound=parts is None and not estimated,
                points=sum(model.initial[n].numel() for n in points),
                error=posterior.run.get("log_evidence_error"),
            )
        )
    return Comparison(rows, named)


def log_symmetries(network: nn.Module) -> float:
    """Σ over hidden layers of log H! + H log 2: the number of modes that are the same function, as a natural logarithm.

    Hidden units can change places (H! ways), and with an odd activation such as tanh each can change the signs of its weights
    (2^H ways). A Laplace approximation looks at one of these modes; where they lie far apart, the evidence of the model is that
    many times as large. It is too much where units are not used: their copies coincide. For perceptrons: `nn.Sequential` of
    linear layers with activations.
    """
    layers = [module for module in network.modules() if not list(module.children())]
    widths: list[tuple[int, bool]] = []
    width, known = None, True
    for module in layers:
        if isinstance(module, nn.Linear):
            width = module.out_features
        elif isinstance(module, (*ODD, *RECTIFIERS, *SIGMOIDS)):
            if width is not None:
                widths.append((width, isinstance(module, ODD)))
        elif not isinstance(module, PASSING):
            known = False
    if not known or (list(network.children()) and not isinstance(network, nn.Sequential)):
        raise ValueError(
            f"the symmetries of a {type(network).__name__} are not known, only those of an nn.Sequential of linear layers and "
            "activations; use symmetries=False"
        )
    return sum(math.lgamma(size + 1) + (size * math.log(2.0) if odd else 0.0) for size, odd in widths)


def _named(posteriors: Any) -> dict[str, Posterior]:
    if isinstance(posteriors, Mapping):
        named = {str(name): posterior for name, posterior in posteriors.items()}
        if len(named) != len(posteriors):
            raise ValueError(f"posteriors has names that are the same as text: {', '.join(map(repr, posteriors))}")
    elif isinstance(posteriors, Sequence) and not isinstance(posteriors, str):
        named = {f"{getattr(each, 'method_name', each)} {k}": each for k, each in enumerate(posteriors, start=1)}
    else:
        what = type(posteriors).__name__
        raise TypeError(f"posteriors must be a mapping of names to posteriors or a list of them, got {what}")
    for name, posterior in named.items():
        if not isinstance(posterior, Posterior):
            raise TypeError(f"posteriors[{name!r}] must be a posterior, as pl.fit returns it, got {type(posterior).__name__}")
    if len(named) < 2:
        raise ValueError(f"a comparison needs at least two posteriors, got {len(named)}")
    return named


def _log_evidence(name: str, posterior: Posterior) -> float:
    value = posterior.log_evidence
    if value is None:
        raise ValueError(
            f"{name} has no log_evidence: {posterior.method_name} estimates none (or it was tempered, pruned, or is part of an "
            "ensemble); use Laplace, SMC, or a variational method such as MeanField, whose bound stands in for it"
        )
    if not math.isfinite(value):
        raise ValueError(f"the log evidence of {name} is {value}: its fit has diverged, or its prior is improper")
    return float(value)


def _check_same_data(named: Mapping[str, Posterior]) -> None:
    (first, one), *others = named.items()
    discrete = lambda other: other.likelihood.kind != "continuous"  # noqa: E731
    for name, other in others:
        if other.model.num_data != one.model.num_data:
            raise ValueError(
                f"evidence compares models of the same data: {first} was fitted on {one.model.num_data:,} examples, {name} on "
                f"{other.model.num_data:,}"
            )
        if discrete(other) != discrete(one):
            raise ValueError(
                f"evidence compares models of the same targets: {first} has a likelihood of {one.likelihood.kind} targets, {name} "
                f"of {other.likelihood.kind} ones"
            )


def _check_models(named: Mapping[str, Posterior]) -> None:
    """Refuse one model fitted by two methods: these are two estimates of one number, and no models to choose between."""
    for (name, one), (other, two) in itertools.combinations(named.items(), 2):
        if type(one.method) is type(two.method) or _anatomy(one) != _anatomy(two):
            continue
        if one.model.prior == two.model.prior or _tuned(one) or _tuned(two):
            ways = [_estimate(each) for each in (one, two)]
            raise ValueError(
                f"{name} and {other} are the same model, fitted by {one.method_name} and {two.method_name}: their numbers "
                f"({one.log_evidence:.1f}, {ways[0]}, and {two.log_evidence:.1f}, {ways[1]}) stand for the same log p(D), and the "
                "difference says how good the estimates are, not how probable a model is: it is no Bayes factor. Compare models "
                "(networks, priors, likelihoods) by one method; compare methods by held-out scores (plausible compare)"
            )


def _anatomy(posterior: Posterior) -> tuple[Any, ...]:
    model = posterior.model
    shapes = {n: (value.shape, n in model.random) for n, value in model.initial.items() if not n.startswith("likelihood.")}
    return str(model.network), str(model.likelihood), shapes


def _tuned(posterior: Posterior) -> bool:
    """Whether the precisions of the prior are those that the method found by the evidence."""
    return getattr(posterior.method, "tune", None) is not None and isinstance(posterior.model.prior, Patterns)


def _estimate(posterior: Posterior) -> str:
    sampled = "log_evidence_error" in posterior.run
    return "an estimate" if sampled or getattr(posterior, "evidence", None) is not None else "a lower bound"


def _priors(given: Any, names: tuple[str, ...]) -> dict[str, float]:
    if given is None:
        return dict.fromkeys(names, 1 / len(names))
    if isinstance(given, Mapping):
        if set(given) != set(names):
            raise ValueError(f"prior_probabilities must name the models {', '.join(names)}, got {', '.join(map(str, given))}")
        probabilities = {name: float(given[name]) for name in names}
    else:
        if len(given) != len(names):
            raise ValueError(f"prior_probabilities must have one number for each of {len(names)} models, got {len(given)}")
        probabilities = dict(zip(names, map(float, given)))
    if not all(value >= 0 for value in probabilities.values()) or abs(sum(probabilities.values()) - 1) > 1e-6:
        raise ValueError(f"prior_probabilities must be 0 or more and sum to 1, got {list(probabilities.values())}")
    return probabilities


def _shares(probabilities: Sequence[float], total: int) -> list[int]:
    """Whole numbers with this sum, nearest to the probabilities: by largest remainders."""
    exact = [total * p for p in probabilities]
    shares = [math.floor(value) for value in exact]
    # Largest remainders: rounding each share on its own would not sum to the total.
    order = sorted(range(len(exact)), key=lambda k: shares[k] - exact[k])
    for k in order[: total - sum(shares)]:
        shares[k] += 1
    return shares


def _signed(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}".replace("-", "−")


def _probability(value: float) -> str:
    return f"{value:.3f}" if value >= 5e-4 or value == 0 else f"{value:.0e}".replace("e-0", "e-").replace("-", "−")
