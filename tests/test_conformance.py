"""Every registered method × every check of the shipped suite, and a method of a user's own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from torch import Tensor

import plausible as pl
from plausible import testing
from plausible.core import random
from plausible.core.weights import Weights, clone
from plausible.engine.method import Fitted, Method, Plan, Run, Traits
from plausible.methods import registry
from plausible.posteriors.draws import DrawsPosterior

METHODS = {name: cls.conforming() for name, cls in registry.items()}
METHODS["chains"] = pl.Ensemble(replace(pl.SGLD.conforming(), epochs=450, burn_in=0.3), members=16)


# One method of each family meets the second fit of the conjugate problem at once, the others in the slow suite.
WEIGHTED = ("hmc", "ivon", "laplace", "map", "mean-field", "smc")
SHARED = {name: pytest.mark.xdist_group(name) for name in METHODS}  # one process makes what all checks of a method look at


@pytest.mark.parametrize(
    ("name", "check"),
    [
        pytest.param(name, check, marks=[SHARED[name], *([pytest.mark.slow] if late else [])])
        for name in METHODS
        for check in testing.CHECKS
        for late in [check == "example weights" and name not in WEIGHTED]
    ],
)
def test_method_passes(name: str, check: str) -> None:
    testing.CHECKS[check](METHODS[name])


@pytest.mark.slow
@pytest.mark.compile
@pytest.mark.parametrize("name", METHODS)
def test_compiled_step_equals_eager_step(name: str, compiler: None) -> None:
    testing.check_compiled(METHODS[name])


# A sampler of the user's own: random-walk Metropolis on the full data, in one class.


class WalkState(NamedTuple):
    weights: Weights
    buffers: Weights
    log_joint: Tensor
    key: Tensor
    step: Tensor


@dataclass(frozen=True)
class Walk(Method):
    """w' = w + s·ξ, accepted with probability min(1, p(w', D)/p(w, D)).

    A random walk.
    """

    draws_kept: int = 500
    scale: float = 0.12
    broken: bool = False

    traits: ClassVar[Traits] = Traits(verb="sample", mixed_precision=False)

    def plan(self, num_data: int, per_epoch: int | None = None) -> Plan:
        thin = 5 if self.draws_kept > 100 else 1
        return Plan(steps=thin * self.draws_kept + 200, per_epoch=100, batch_size=None, burn_in=200, thin=thin)

    def start(self, model: pl.Model, run: Run[Any], key: Tensor) -> WalkState:
        return WalkState(
            clone(model.initial), clone(model.buffers), torch.tensor(-torch.inf), key, torch.zeros((), dtype=torch.int64)
        )

    def step(self, model: pl.Model, run: Run[Any], state: WalkState, batch: pl.Batch) -> tuple[WalkState, dict[str, Tensor]]:
        noise = random.normal(state.key, state.step, state.weights)
        level = random.uniform(random.fold(state.key, 1), state.step, torch.zeros(1)).log().squeeze()
        proposal = {n: w + self.scale * noise[n] for n, w in state.weights.items()}
        value = model.log_joint({**proposal, **state.buffers}, batch)
        accept = level < value - state.log_joint * (0.5 if self.broken else 1.0)
        weights = {n: torch.where(accept, proposal[n], w) for n, w in state.weights.items()}
        kept = torch.where(accept, value, state.log_joint)
        return state._replace(weights=weights, log_joint=kept, step=state.step + 1), {"log_joint": kept}

    def posterior(self, model: pl.Model, run: Run[Any], fitted: Fitted) -> pl.Posterior:
        return DrawsPosterior.of(self, model, fitted)


def test_a_users_own_method_passes_the_suite() -> None:
    assert set(testing.check_method(Walk())) == set(testing.CHECKS)


def test_a_wrong_method_fails_the_suite() -> None:
    with pytest.raises(testing.ConformanceError, match=r"posterior mean|epistemic variance"):
        testing.check_exact_posterior(Walk(broken=True))


@dataclass(frozen=True)
class ColdSGLD(pl.SGLD):
    """Says that it targets the posterior, and injects a tenth of the noise."""

    name: ClassVar[str] = ""

    def step(self, model: pl.Model, run: Run[Any], state: Any, batch: pl.Batch) -> Any:
        return replace(
            pl.SGLD(**{f: getattr(self, f) for f in ("epochs", "batch_size", "lr", "burn_in", "thin")}), temperature=0.1
        ).step(model, run, state, batch)


def test_a_sampler_with_the_wrong_temperature_fails() -> None:
    own = pl.SGLD.conforming()
    cold = ColdSGLD(own.epochs, own.batch_size, own.lr, own.burn_in, own.thin)
    with pytest.raises(testing.ConformanceError, match="epistemic variance"):
        testing.check_exact_posterior(cold)


def test_a_setting_cannot_hide_a_function_of_every_method() -> None:
    with pytest.raises(TypeError, match="a setting cannot be called 'start'"):

        class Late(Walk):
            start: float = 0.5  # type: ignore[assignment]


@dataclass(frozen=True)
class Twice(pl.MAP):
    """Two stages, of which the result is made of what the last one left, or of all draws that were kept."""

    left: bool = True

    name: ClassVar[str] = ""
    traits: ClassVar[Traits] = Traits(deterministic=True, keeps_draws=False)

    def stages(self) -> Any:
        return (self, pl.MAP(epochs=1))

    def posterior(self, model: pl.Model, run: Run[Any], fitted: Fitted) -> pl.Posterior:
        return (DrawsPosterior.left if self.left else DrawsPosterior.of)(self, model, fitted)


def test_an_ensemble_of_several_stages_needs_what_each_member_left() -> None:
    testing.check_stacked(Twice(epochs=2))
    with pytest.raises(testing.ConformanceError, match=r"cannot predict .* `fitted.left`"):
        testing.check_stacked(Twice(epochs=2, left=False))


def test_names_build_without_arguments() -> None:
    for name in registry:
        assert isinstance(pl.methods.create(name), registry[name])
    with pytest.raises(ValueError, match="did you mean 'sgld'"):
        pl.methods.create("sgdl")


@pytest.mark.slow
@pytest.mark.compile
def test_two_compiled_runs_in_one_process_do_not_share_a_graph(compiler: None) -> None:
    for width in (3, 5):  # without guards the second would run the graph of the first
        net, x, y = torch.nn.Linear(width, 1), torch.randn(40, width), torch.randn(40, 1)
        one = pl.fit(net, (x, y), pl.MAP(epochs=5, batch_size=10), compile=True, progress=False)
        two = pl.fit(net, (x, y), pl.MAP(epochs=5, batch_size=10), compile=False, progress=False)
        assert one.run["mode"] == "compiled"
        torch.testing.assert_close(one.functions(x), two.functions(x), rtol=1e-4, atol=1e-5)
