"""The Metropolis-adjusted Langevin algorithm: its law, its proposal, and the acceptance it is tuned to."""

from __future__ import annotations

import pytest
import torch

from plausible.blocks.chains.density import run
from plausible.methods.chains.hmc import HMC
from plausible.methods.chains.mala import MALA
from tests.helpers.kernel_laws import gaussian, require_balance, require_invariance, require_moments, skewed


@pytest.mark.parametrize("law", [gaussian(), skewed()], ids=["gaussian", "skewed"])
@pytest.mark.parametrize("metric", ["diag", "dense", "lowrank"])
def test_moments(law, metric) -> None:
    method = MALA(draws=200, chains=64, warmup=200, metric=metric)
    require_moments(run(method, law.target, law.draw(64, 1))["position"], law)


def test_law_is_kept() -> None:
    require_invariance(MALA(draws=1, chains=4000, warmup=0, thin=3, step_size=1.2, adapt=False), skewed())


def test_detailed_balance() -> None:
    require_balance(MALA(draws=1, chains=20_000, warmup=0, step_size=1.4, adapt=False), skewed())


def test_proposal_and_ratio_are_langevins() -> None:
    """w' = w + ½ε²∇ + εz: acceptance from the normal densities of both ways, computed by hand."""
    law, step = skewed(), 0.9
    start = law.draw(500, 3)
    end = run(MALA(draws=1, chains=500, warmup=0, step_size=step, adapt=False), law.target, start)
    moved = end["position"][0]
    taken = (moved != start).any(-1)

    def log_density(to, origin):
        drift = origin + 0.5 * step**2 * law.target.evaluate(origin).gradient
        return -0.5 * ((to - drift) / step).square().sum(-1)

    values = [law.target.densities(q)[0] for q in (moved, start)]
    by_hand = (values[0] - values[1] + log_density(start, moved) - log_density(moved, start)).clamp(max=0).exp()
    torch.testing.assert_close(end["acceptance"][0][taken], by_hand[taken])
    assert 0.3 < float(taken.double().mean()) < 1


def test_tuned_to_its_acceptance() -> None:
    law = gaussian((1.0,) * 10, 0.0)
    result = run(MALA(draws=100, chains=32, warmup=600), law.target, law.draw(32, 2))
    assert abs(float(result["acceptance"].mean()) - 0.574) < 0.15
    assert set(result["leapfrogs"].unique().tolist()) == {1.0}


def test_is_hmc_of_one_step() -> None:
    """With its noise in other streams the same law: expected acceptance agrees."""
    law = skewed()
    start = law.draw(4000, 5)
    settings = {"draws": 1, "chains": 4000, "warmup": 0, "step_size": 0.8, "adapt": False}
    one = run(MALA(**settings), law.target, start)["acceptance"]
    two = run(HMC(leapfrogs=1, jitter=0.0, **settings), law.target, start)["acceptance"]
    error = float((one.var() + two.var()).sqrt()) / 4000**0.5
    assert abs(float(one.mean() - two.mean())) < 4.5 * error
