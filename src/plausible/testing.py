"""The conformance suite: every method, the library's or your own, meets the same checks.

    from plausible.testing import check_method
    check_method(MyMethod(steps=2000))          # raises ConformanceError naming each check that failed

Six groups: exact answers on a conjugate problem, the right scale of the objective, the law of predictions, determinism,
invariances, bad input. What a method may differ in it says itself: `Method.traits`, and `Method.conjugate`, the posterior
that it is supposed to reach on the linear-Gaussian problem. Tolerances come from Monte Carlo standard errors; at `Z` of them
a false alarm comes about once in a million comparisons.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import plausible as pl
from plausible.blocks.chains import convergence as diagnostics
from plausible.core import random
from plausible.engine.method import Method, Run, Stage
from plausible.fitting import Gives, P
from plausible.methods import create, registry
from plausible.posteriors.base import Posterior
from plausible.posteriors.doubts import FitWarning
from plausible.posteriors.draws import DrawsPosterior

Z = 5.0


class ConformanceError(AssertionError):
    """One or more checks failed; the message has a line for each."""


class _Stop(Exception):
    """Raised inside a callback to imitate a run that is killed."""


# ---------------------------------------------------------------------------------------------------------------------
# The conjugate problem


@dataclass(frozen=True)
class LinearGaussian:
    """y = x·w + N(0, σ²), w ~ N(0, s²I): the posterior is N(Λ⁻¹xᵀWy/σ², Λ⁻¹) with Λ = xᵀWx/σ² + I/s², W the example weights.

    Inputs are correlated and on different scales, so that a diagonal or wrongly scaled answer shows.
    """

    num_data: int = 40
    inputs: int = 3
    noise: float = 0.5
    scale: float = 1.5
    weight: float = 1.0
    seed: int = 0

    def data(self) -> tuple[Tensor, Tensor, Tensor]:
        """X [N, D], y [N, 1] and example weights [N], in float64."""
        stream = random.generator(self.seed, 101)
        mixing = torch.eye(self.inputs) + 0.6 * torch.ones(self.inputs, self.inputs).triu(1)
        x = torch.randn(self.num_data, self.inputs, generator=stream) @ mixing * torch.linspace(0.5, 1.0, self.inputs)
        truth = torch.randn(self.inputs, 1, generator=stream)
        y = x @ truth + self.noise * torch.randn(self.num_data, 1, generator=stream)
        return x.double(), y.double(), torch.full((self.num_data,), self.weight, dtype=torch.float64)

    def precision(self) -> Tensor:
        """Λ [D, D]."""
        x, _, w = self.data()
        return x.T @ (w[:, None] * x) / self.noise**2 + torch.eye(self.inputs, dtype=x.dtype) / self.scale**2

    def posterior(self) -> tuple[Tensor, Tensor]:
        """The exact mean [D] and covariance [D, D]."""
        x, y, w = self.data()
        covariance = torch.linalg.inv(self.precision())
        return (covariance @ x.T @ (w[:, None] * y) / self.noise**2).squeeze(1), covariance

    def mean_field(self) -> tuple[Tensor, Tensor]:
        """The exact mean and diag(1/Λ_ii), the optimum of independent Gaussians (Bishop 2006, §10.1.2)."""
        mean, covariance = self.posterior()
        return mean, torch.diag(1 / torch.linalg.inv(covariance).diagonal())

    def log_evidence(self) -> float:
        """Log N(y; 0, σ²I + s²xxᵀ) for unit weights."""
        x, y, _ = self.data()
        covariance = self.noise**2 * torch.eye(self.num_data, dtype=x.dtype) + self.scale**2 * x @ x.T
        law = torch.distributions.MultivariateNormal(torch.zeros(self.num_data, dtype=x.dtype), covariance)
        return float(law.log_prob(y.squeeze(1)))

    def network(self) -> nn.Module:
        """A linear map without bias, started away from the answer."""
        net = nn.Linear(self.inputs, 1, bias=False)
        with torch.no_grad():
            net.weight.copy_(torch.linspace(-1, 1, self.inputs))
        return net

    def fit(self, method: Gives[P], **settings: Any) -> P:
        """Fit a method to this problem."""
        x, y, w = self.data()
        data = (x.float(), y.float(), w.float()) if self.weight != 1 else (x.float(), y.float())
        settings = {"progress": False, "compile": False, **settings}
        return pl.fit(
            self.network(),
            data,
            method,
            likelihood=pl.likelihoods.Gaussian(scale=self.noise),
            prior=pl.priors.Gaussian(scale=self.scale),
            **settings,
        )


SHORT = {
    "epochs": 10,
    "draws": 6,
    "warmup": 5,
    "chains": 2,
    "members": 2,
    "leapfrogs": 3,
    "max_leapfrogs": 3,
    "max_depth": 3,
    "particles": 24,
    "pilots": 8,
    "moves": 1,
    "temperatures": 4,
    "draws_kept": 20,
    "further": 1,
    "polish": 6,
}
"""Settings of methods that say how long they run, and the most that checks need which do not look at the law."""


def quick(method: Method, most: Mapping[str, int] = SHORT) -> Method:
    """The same method in a much shorter run, for the checks that do not look at the law; `most` says how long settings may be."""
    changes: dict[str, Any] = {}
    for setting in dataclasses.fields(method):  # type: ignore[arg-type]
        value = getattr(method, setting.name)
        if isinstance(value, Method):
            changes[setting.name] = quick(value, most)
        elif setting.name in most and (value is None or isinstance(value, int)):
            changes[setting.name] = most[setting.name] if value is None else min(value, most[setting.name])
    return dataclasses.replace(method, **changes) if changes else method  # type: ignore[type-var]


def probe_inputs(inputs: int, count: int = 6) -> Tensor:
    """Inputs at which functions are compared."""
    return torch.randn(count, inputs, generator=random.generator(0, 102))


# ---------------------------------------------------------------------------------------------------------------------
# Group 1 and 2: exact answers, the right scale


DRAWS = 400
"""Draws from posteriors that can give any number of them: enough to tell variances apart that differ by a half."""


def _all_or(count: int, posterior: Posterior) -> int | None:
    """All draws of a posterior that is made of draws, so many of one that is a law."""
    stored = all(isinstance(part, DrawsPosterior) for part in getattr(posterior, "parts", [posterior]))
    return None if stored else count


def _compare_with_expected(method: Method, problem: LinearGaussian) -> None:
    posterior = problem.fit(method)
    mean, covariance = method.conjugate(problem)
    x = probe_inputs(problem.inputs)
    f = posterior.functions(x, _all_or(DRAWS, posterior)).squeeze(-1).double()  # [S, n]
    expected_mean = x.double() @ mean
    expected_variance = ((x.double() @ covariance) * x.double()).sum(1)
    slack = method.traits.tolerance
    _, exact_covariance = problem.posterior()
    scale = ((x.double() @ exact_covariance) * x.double()).sum(1).sqrt()
    average = f.mean(0)
    count, chains = len(f), getattr(posterior, "chains", 1)
    if float(expected_variance.max()) == 0:
        error = (average - expected_mean).abs() / scale
        _require(bool((error < slack).all()), f"posterior mean of f(x) is off by {float(error.max()):.3g} posterior deviations")
        _require(
            float(f.var(0, unbiased=False).max()) <= (slack * float(scale.max())) ** 2,
            "a point estimate has epistemic variance",
        )
        return
    shaped = f.reshape(count // chains, chains, -1).transpose(0, 1)
    effective = diagnostics.ess_mean(shaped).clamp(max=count)
    centred = (shaped - average) ** 2
    effective_square = diagnostics.ess_mean(centred).clamp(max=count)
    z = (average - expected_mean).abs() / (expected_variance / effective).sqrt()
    bias = (average - expected_mean).abs() / scale
    ok = (z < Z) | (bias < slack)
    _require(bool(ok.all()), f"posterior mean of f(x) is {float(z.max()):.1f} standard errors from its expected value")
    variance = f.var(0, unbiased=False)
    ratio = variance / expected_variance
    error = (2 / effective_square).sqrt()
    ok = (ratio - 1).abs() < Z * error + slack
    _require(
        bool(ok.all()),
        f"epistemic variance over its expected value is {[round(float(r), 3) for r in ratio]}, "
        f"allowed 1 ± {[round(float(e), 3) for e in Z * error + slack]}",
    )


def check_exact_posterior(method: Method) -> None:
    """Mean and epistemic variance of f(x) on the conjugate problem are what the method says they should be."""
    _compare_with_expected(method, LinearGaussian())


def check_example_weights(method: Method) -> None:
    """Example weights of 3 act like three copies of each example."""
    _compare_with_expected(method, LinearGaussian(weight=3.0))


def check_scale(method: Method) -> None:
    """Minibatch log joints average to the full one; the likelihood is scaled by N/B and the prior is not."""
    problem = LinearGaussian()
    model = _once(method, "conjugate", lambda: problem.fit(quick(method))).model
    x, y, _ = problem.data()
    x, y = x.float(), y.float()
    weights = {name: torch.randn(value.shape, generator=random.generator(1)) for name, value in model.initial.items()}
    full = model.log_joint(weights, pl.Batch(x, y))
    parts = torch.stack([model.log_joint(weights, pl.Batch(x[i : i + 8], y[i : i + 8])) for i in range(0, 40, 8)])
    _require(
        torch.allclose(parts.mean(), full, rtol=1e-4),
        f"batches average to {parts.mean():.4f}, the full log joint is {full:.4f}",
    )
    direct = torch.distributions.Normal(x @ weights["weight"].T, problem.noise).log_prob(y).sum()
    direct = direct + torch.distributions.Normal(0.0, problem.scale).log_prob(weights["weight"]).sum()
    _require(torch.allclose(direct, full, rtol=1e-4), f"log joint is {full:.4f}, computed directly {direct:.4f}")


# ---------------------------------------------------------------------------------------------------------------------
# Group 3: the law of predictions


def check_predictive_law(method: Method) -> None:
    """The predictive is the mixture over function draws: variances add, densities average, samples follow."""
    problem = LinearGaussian()
    posterior = _once(method, "conjugate", lambda: problem.fit(quick(method)))
    x = probe_inputs(problem.inputs)
    predictive = posterior.predict(x, draws=20, seed=3)
    f = posterior.functions(x, draws=20, seed=3)
    _require(tuple(f.shape) == (20, 6, 1), f"functions(x, 20) has shape {tuple(f.shape)}, expected (20, 6, 1)")
    _require(
        torch.allclose(predictive.variance, predictive.epistemic + predictive.aleatoric),
        "variance is not epistemic + aleatoric",
    )
    _require(
        torch.allclose(predictive.aleatoric, torch.tensor(problem.noise**2), rtol=1e-4), "aleatoric variance is not the noise's"
    )
    if getattr(posterior, "closed_form", False):
        return
    _require(
        torch.allclose(predictive.mean, f.mean(0), atol=1e-5), "predict and functions use different draws for the same seed"
    )
    y = torch.zeros(6, 1)
    mixture = torch.distributions.Normal(f, problem.noise).log_prob(y).sum(-1).logsumexp(0) - torch.log(torch.tensor(20.0))
    _require(
        torch.allclose(predictive.log_prob(y), mixture.to(predictive.log_prob(y).dtype), atol=1e-4),
        "log_prob is not log-mean-exp over draws",
    )
    samples = predictive.sample(4000, seed=1)
    z = (samples.mean(0) - predictive.mean).abs() / (predictive.variance / 4000).sqrt()
    _require(float(z.max()) < Z, f"the mean of samples is {float(z.max()):.1f} standard errors off")
    if method.traits.has_weights:
        weights = posterior.weights(draws=20, seed=3)
        by_hand = torch.einsum("nd,sod->sno", x, weights["weight"])
        _require(torch.allclose(by_hand, f, atol=1e-4), "weights() and functions() are not the same draws")


# ---------------------------------------------------------------------------------------------------------------------
# Group 4: determinism


def _small() -> tuple[nn.Sequential, tuple[Tensor, Tensor]]:
    stream = random.generator(5)
    x = torch.randn(30, 2, generator=stream)
    y = (x[:, :1] * x[:, 1:]).sin() + 0.1 * torch.randn(30, 1, generator=stream)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 1))
    return net, (x, y)


def _fit_quickly(method: Method, net: nn.Module, data: tuple[Tensor, Tensor], seed: int = 0, **settings: Any) -> Posterior:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # so short a run may say that it is too short
        return pl.fit(net, data, quick(method), seed=seed, progress=False, compile=False, **settings)


def _fit_small(method: Method) -> Posterior:
    """A short fit of the small network, made once for all checks that only look at it."""
    return _once(method, "small", lambda: _fit_quickly(method, *_small()))


_made: dict[tuple[str, str], Posterior] = {}


def _once(method: Method, what: str, make: Callable[[], Posterior]) -> Posterior:
    """Checks of one method follow each other: what was made for another is forgotten."""
    key = (repr(method), what)
    if key not in _made:
        for other in [known for known in _made if known[0] != key[0]]:
            del _made[other]
        _made[key] = make()
    return _made[key]


def check_determinism(method: Method) -> None:
    """Same seed, same bits; another seed differs; the global generator and the module are left alone."""
    net, (x, y) = _small()
    net.train()
    net[4].eval()
    handle = net[0].register_forward_hook(lambda *_: None)
    before = copy.deepcopy(net.state_dict())
    modes = [module.training for module in net.modules()]
    torch.manual_seed(11)
    state = torch.get_rng_state()
    one = _fit_quickly(method, net, (x, y)).functions(x, 5, seed=1)
    _require(torch.equal(state, torch.get_rng_state()), "torch's global generator was moved")
    _require(
        all(torch.equal(v, before[k]) for k, v in net.state_dict().items()), "the module's weights or buffers were changed"
    )
    _require(modes == [module.training for module in net.modules()], "the module's training mode was changed")
    _require(len(net[0]._forward_hooks) == 1 and not net[4]._forward_hooks, "the module's hooks were changed")
    handle.remove()
    _require(torch.equal(one, _fit_small(method).functions(x, 5, seed=1)), "the same seed gave other bits")
    if not method.traits.deterministic:
        other = _fit_quickly(method, net, (x, y), seed=1).functions(x, 5, seed=1)
        _require(not torch.equal(one, other), "another seed gave the same bits")


# ---------------------------------------------------------------------------------------------------------------------
# Group 5: invariances


def check_chunked_prediction(method: Method) -> None:
    """Predicting in parts, or one input at a time, gives what predicting at once gives."""
    posterior = _fit_small(method)
    _, (x, _) = _small()
    whole, parts = posterior.predict(x, 10), posterior.predict(x, 10, batch_size=7)
    _require(torch.allclose(whole.mean, parts.mean, atol=1e-5), "chunked prediction has another mean")
    _require(torch.allclose(whole.variance, parts.variance, rtol=1e-4, atol=1e-6), "chunked prediction has another variance")
    _require(
        torch.allclose(whole.mean[3:4], posterior.predict(x[3:4], 10).mean, atol=1e-5), "one input alone is predicted otherwise"
    )


def check_save_and_load(method: Method) -> None:
    """A saved and loaded posterior gives the same bits."""
    posterior = _fit_small(method)
    net, (x, _) = _small()
    with tempfile.TemporaryDirectory() as folder:
        posterior.save(Path(folder) / "run")
        loaded = pl.load(Path(folder) / "run", net)
        _require(torch.equal(posterior.functions(x, 6, seed=2), loaded.functions(x, 6, seed=2)), "loaded functions differ")
        _require(torch.equal(posterior.predict(x, 6).std, loaded.predict(x, 6).std), "loaded predictions differ")
        _require(
            loaded.method == posterior.method or registry.get(method.name) is not type(method),
            "the method's settings were lost",
        )


def check_resume(method: Method) -> None:
    """A run that was killed in any of its stages and resumed ends with the bits of one that was not; other data is refused."""
    net, (x, y) = _small()
    whole = _fit_small(method)
    count = _all_or(10, whole)
    functions, finished = whole.functions(x, count), ["a finished checkpoint"]
    lengths = [steps for _, steps, _ in whole.run["stages"]]
    for number, steps in enumerate(lengths):
        if steps == 1 and len(lengths) > 1:  # nothing lies between its begin and its end
            continue
        at = sum(lengths[:number]) + max(1, 2 * steps // 3)

        def kill(step: int, _: Any, at: int = at) -> None:
            if step >= at:
                raise _Stop

        with tempfile.TemporaryDirectory() as folder:
            place = pl.Checkpoint(Path(folder) / "checkpoint", steps=max(1, steps // 3))
            with contextlib.suppress(_Stop):
                _fit_quickly(method, net, (x, y), checkpoint=place, callbacks=[kill])
            for what in (f"a run killed at step {at}", *finished):
                again = _fit_quickly(method, net, (x, y), checkpoint=place)
                _require(torch.equal(functions, again.functions(x, count)), f"{what} gave another posterior")
            finished = []  # it is the same wherever the run was killed
            try:
                _fit_quickly(method, net, (x + 1, y), checkpoint=place)
            except ValueError as error:
                _require("data" in str(error), f"the refusal of other data does not name the difference: {error}")
            else:
                raise ConformanceError("a checkpoint of other data was accepted")


def check_stacked(method: Method) -> None:
    """Members stacked by vmap advance as members in a loop do (one step); what their later stages left can predict."""
    if method.members is not None or method.traits.verb != "iterate":
        return
    if len(method.stages()) > 1:
        net, (x, y) = _small()
        pair = _fit_quickly(pl.Ensemble(method, members=2), net, (x, y))
        try:
            pair.predict(x)
        except (KeyError, ValueError) as error:
            advice = "with several stages the result is made of `fitted.left`, as `DrawsPosterior.left` does"
            raise ConformanceError(f"an ensemble of it cannot predict ({error}): {advice}") from error
    from plausible.core.data import as_data
    from plausible.core.weights import clone, tensors
    from plausible.methods import Ensemble

    stage = Ensemble(method, members=3, init="fresh").stages()[0]
    net = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
    _, (x, y) = _small()
    data = as_data((x, y), dtype=torch.float32, device=torch.device("cpu"))
    model = pl.Model.build(net, pl.likelihoods.Gaussian(), pl.priors.Gaussian(), data.all(), num_data=30)
    run = Run.alone(stage, model, data)
    state = stage.start(model, run, random.key(0))
    with torch.no_grad():
        one, _ = stage.step(model, run, clone(state), data.all())
        two, _ = stage.looped_step(model, run, clone(state), data.all())  # type: ignore[attr-defined]
    close = all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(tensors(one), tensors(two)))
    _require(close, "vmapped and looped members differ after one step")


def check_compiled(method: Method) -> None:
    """A compiled step does what the eager one does (one step from the same state)."""
    if method.traits.verb == "choose":
        return
    from plausible.core.data import as_data
    from plausible.core.weights import clone, tensors
    from plausible.engine.source import Source
    from plausible.engine.stepper import Compiled, Eager

    # the compiler takes a second for each of the kernels, of which there are several for each weight
    net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Tanh(), nn.Linear(2, 1))
    _, (x, y) = _small()
    data = as_data((x, y), dtype=torch.float32, device=torch.device("cpu"))
    model = pl.Model.build(net, pl.likelihoods.Gaussian(), pl.priors.Gaussian(), data.all(), num_data=30)
    stage = method.stages()[0]
    if stage.traits.verb != "iterate":  # along long trajectories rounding grows beyond any tolerance: short ones are compared
        _compare_kernels(quick(method).stages()[0], model, data)
        return
    run = Run.alone(stage, model, data)
    source = Source(data, stage.plan(30), seed=0, members=stage.members)
    state = stage.start(model, run, random.key(0))
    eager = Eager(stage.step, model, run, clone(state), source)
    compiled = Compiled(stage.step, model, run, clone(state), source)
    for stepper in (eager, compiled):
        stepper.advance(0, 1, lambda _: False)
    close = all(
        torch.allclose(a.double(), b.double(), rtol=1e-3, atol=1e-5)
        for a, b in zip(tensors(eager.state), tensors(compiled.state))
    )
    _require(close, "compiled and eager steps differ")


def _compare_kernels(stage: Stage, model: pl.Model, data: Any) -> None:
    """The same transition with and without compiled kernels, which may stop trajectories at another leapfrog of the same path."""
    from plausible.core.weights import clone, tensors

    runs = [Run.alone(stage, model, data, compile=compile) for compile in (False, True)]
    with torch.no_grad():
        state = stage.start(model, runs[0], random.key(0))
        states = [stage.step(model, run, clone(state), data.all())[0] for run in runs]
    for i, state in enumerate(states):
        if hasattr(state, "statistics"):
            states[i] = state._replace(statistics={n: v for n, v in state.statistics.items() if n != "leapfrogs"})

    def close(one: Tensor, two: Tensor) -> bool:
        one, two = one.double(), two.double()
        return torch.allclose(one, two, rtol=1e-3, atol=1e-4 * max(1.0, float(one.abs().max()) if one.numel() else 0.0))

    _require(
        all(close(a, b) for a, b in zip(*map(tensors, states))), "transitions with compiled kernels differ from eager ones"
    )


# ---------------------------------------------------------------------------------------------------------------------
# Group 6: bad input


def check_bad_input(method: Method) -> None:
    """Bad input is refused with a ValueError or TypeError that names the argument, before any work."""
    net = nn.Linear(2, 1)
    x, y = torch.randn(20, 2), torch.randn(20, 1)
    bad_x, bad_y = x.clone(), y.clone()
    bad_x[3, 1] = torch.nan
    bad_y[4, 0] = torch.inf

    class Detached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 1)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.layer(inputs).detach()

    cases: list[tuple[str, str, Callable[[], Any]]] = [
        ("targets that would broadcast", "shape", lambda: (net, (x, y[:, 0]), {})),
        ("NaN inputs", "x contains", lambda: (net, (bad_x, y), {})),
        ("infinite targets", "y contains", lambda: (net, (x, bad_y), {})),
        ("no data", "empty", lambda: (net, (x[:0], y[:0]), {})),
        ("different lengths", "examples", lambda: (net, (x, y[:5]), {})),
        ("inputs of the wrong width", "network", lambda: (net, (torch.randn(20, 3), y), {})),
        ("integer targets for a Gaussian", "Gaussian", lambda: (net, (x, y.long()), {"likelihood": pl.likelihoods.Gaussian()})),
        (
            "float targets for classes",
            "Categorical",
            lambda: (nn.Linear(2, 3), (x, y[:, 0]), {"likelihood": pl.likelihoods.Categorical()}),
        ),
        ("a device that is not there", "device", lambda: (net, (x, y), {"device": "cuda:77"})),
        ("weights without influence", "influence", lambda: (Detached(), (x, y), {})),
        ("no module", "network", lambda: ("net", (x, y), {})),
        ("a class as likelihood", "likelihood", lambda: (net, (x, y), {"likelihood": pl.likelihoods.Gaussian})),
    ]
    for what, word, make in cases:
        network, data, settings = make()
        try:
            pl.fit(network, data, method, progress=False, compile=False, **settings)
        except (ValueError, TypeError) as error:
            _require(word.lower() in str(error).lower(), f"{what}: the message does not say {word!r}: {error}")
        else:
            raise ConformanceError(f"{what} was accepted")


# ---------------------------------------------------------------------------------------------------------------------


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConformanceError(message)


CHECKS: dict[str, Callable[[Method], None]] = {
    "exact posterior": check_exact_posterior,
    "example weights": check_example_weights,
    "scale": check_scale,
    "predictive law": check_predictive_law,
    "determinism": check_determinism,
    "chunked prediction": check_chunked_prediction,
    "save and load": check_save_and_load,
    "resume": check_resume,
    "stacked": check_stacked,
    "bad input": check_bad_input,
}
COMPILING_CHECKS: dict[str, Callable[[Method], None]] = {"compiled": check_compiled}


def check_method(method: Method | str, *, compile: bool = False) -> list[str]:
    """Run the whole suite on a method (a name means its `conforming()` settings); returns the names of the checks passed.

    `compile=True` adds the check that needs a C++ compiler and up to a minute. Raises `ConformanceError` with one line for
    each failure.
    """
    chosen = registry[method].conforming() if isinstance(method, str) and method in registry else create(method)
    checks = {**CHECKS, **(COMPILING_CHECKS if compile else {})}
    failures, passed = [], []
    for name, check in checks.items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", UserWarning)
                warnings.simplefilter("ignore", FitWarning)  # runs are short, and no judgement of them is asked for
                check(chosen)
            passed.append(name)
        except Exception as error:
            failures.append(f"{name}: {type(error).__name__}: {error}")
    if failures:
        raise ConformanceError(
            f"{type(chosen).__name__} fails {len(failures)} of {len(checks)} checks:\n  " + "\n  ".join(failures)
        )
    return passed
