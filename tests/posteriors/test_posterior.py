"""The posterior: which draws are meant, evaluation in parts, bad inputs, diagnostics, devices."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import plausible as pl
from plausible.core.draws import LOOPED
from plausible.core.storage import MemoryDraws
from plausible.posteriors import diagnostics
from plausible.posteriors.draws import DrawsPosterior

QUIET: dict[str, Any] = {"progress": False, "compile": False}


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def _data() -> tuple[Tensor, Tensor]:
    stream = torch.Generator().manual_seed(1)
    x = torch.randn(20, 2, generator=stream)
    return x, x[:, :1] - x[:, 1:]


def _network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 1))


DRAWS = 12
STEPS = pl.SGLD(epochs=DRAWS, batch_size=None, lr=1e-2, burn_in=0.0, thin=1)


def _fit(method: pl.Method = STEPS, net: nn.Module | None = None, data: Any = None, **settings: Any) -> Any:
    law = {} if data else {"likelihood": pl.likelihoods.Gaussian()}  # in the unit of the targets
    return pl.fit(_network() if net is None else net, data or _data(), method, **{**law, **QUIET, **settings})


@pytest.fixture(scope="module")
def posterior() -> Any:
    torch.manual_seed(0)
    return _fit()


def _by_hand(posterior: Any, weights: dict[str, Tensor], x: Tensor) -> Tensor:
    """f(x) of stacked weights, written out."""
    hidden = torch.tanh(torch.einsum("nd,shd->snh", x, weights["0.weight"]) + weights["0.bias"][:, None])
    return torch.einsum("snh,soh->sno", hidden, weights["2.weight"]) + weights["2.bias"][:, None]


# ---------------------------------------------------------------------------------------------------------------------
# Which draws


def test_none_means_all_in_order(posterior: Any) -> None:
    x, _ = _data()
    f = posterior.functions(x)
    assert f.shape == (DRAWS, 20, 1)
    torch.testing.assert_close(f, _by_hand(posterior, posterior.weights(), x), rtol=1e-5, atol=1e-5)
    assert torch.equal(f, posterior.functions(x, seed=5))
    assert torch.equal(f, posterior.functions(x, DRAWS, seed=5))


@pytest.mark.parametrize("draws", [1, 5, DRAWS, 30])
def test_weights_functions_and_predictions_use_the_same_draws(draws: int, posterior: Any) -> None:
    x, _ = _data()
    for seed in (0, 7):
        f = posterior.functions(x, draws, seed)
        assert f.shape == (draws, 20, 1)
        torch.testing.assert_close(f, _by_hand(posterior, posterior.weights(draws, seed), x), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(posterior.predict(x, draws, seed).functions, f, rtol=1e-5, atol=1e-6)
        assert torch.equal(f, posterior.functions(x, draws, seed))


def test_fewer_draws_are_taken_without_replacement(posterior: Any) -> None:
    seen = set()
    for seed in range(60):
        rows = posterior.rows(5, seed)
        assert len(set(rows)) == 5
        assert rows == sorted(rows)
        seen |= set(rows)
    assert seen == set(range(DRAWS))
    assert posterior.rows(5, 0) != posterior.rows(5, 1)


def test_more_draws_are_resampled_evenly(posterior: Any) -> None:
    rows = torch.tensor(posterior.rows(6000, 3))
    counts = torch.bincount(rows, minlength=DRAWS).double()
    expected = 6000 / DRAWS
    assert float(((counts - expected) ** 2 / expected).sum()) < 45  # χ² with 11 degrees of freedom, 5e-6
    repeated = posterior.functions(_data()[0], 30, 3)
    assert len(torch.unique(repeated.flatten(1), dim=0)) <= DRAWS


def test_learned_noise_goes_with_its_draw(posterior: Any) -> None:
    x, y = _data()
    weights = posterior.weights(5, 3)
    scale = weights["likelihood.log_scale"].exp()
    f = posterior.functions(x, 5, 3)
    mixture = torch.distributions.Normal(f, scale.reshape(5, 1, 1)).log_prob(y).sum(-1).logsumexp(0) - np.log(5)
    torch.testing.assert_close(posterior.predict(x, 5, 3).log_prob(y), mixture, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("draws", [0, -1, 2.0, "3", True])
def test_bad_numbers_of_draws_are_refused(draws: Any, posterior: Any) -> None:
    x, _ = _data()
    for ask in (lambda: posterior.functions(x, draws), lambda: posterior.predict(x, draws), lambda: posterior.weights(draws)):
        with pytest.raises(ValueError, match="draws must be a whole number of at least 1, or None"):
            ask()


def test_numpy_numbers_are_numbers(posterior: Any) -> None:
    assert posterior.functions(_data()[0], np.int64(3)).shape == (3, 20, 1)


# ---------------------------------------------------------------------------------------------------------------------
# Evaluation


@pytest.mark.parametrize("size", [1, 7, 20, 100])
def test_prediction_in_parts_is_prediction_at_once(size: int, posterior: Any) -> None:
    x, y = _data()
    whole, parts = posterior.predict(x), posterior.predict(x, batch_size=size)
    for name in ("mean", "variance", "epistemic", "aleatoric"):
        torch.testing.assert_close(getattr(whole, name), getattr(parts, name), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(whole.log_prob(y), parts.log_prob(y), rtol=1e-5, atol=1e-5)


def test_parts_are_no_larger_than_asked_for() -> None:
    seen: list[int] = []

    class Counting(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(len(x))
            return super().forward(x)

    posterior = _fit(net=Counting(2, 1))
    seen.clear()
    posterior.predict(_data()[0], batch_size=6).mean  # noqa: B018
    assert max(seen) <= 6


@pytest.mark.parametrize("size", [0, -3, 2.5, True, "8"])
def test_bad_batch_sizes_are_refused(size: Any, posterior: Any) -> None:
    with pytest.raises(ValueError, match="batch_size must be a whole number"):
        posterior.predict(_data()[0], batch_size=size)


def test_one_by_one_equals_stacked(posterior: Any) -> None:
    x, _ = _data()
    stacked = posterior.functions(x)
    LOOPED.add(posterior.model.network)
    torch.testing.assert_close(posterior.functions(x), stacked, rtol=1e-5, atol=1e-6)
    LOOPED.discard(posterior.model.network)


def test_networks_that_vmap_cannot_stack_are_evaluated_one_by_one() -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) if float(self.layer.bias.detach().sum()) > 0 else -self.layer(x)

    x, _ = _data()
    posterior = _fit(net=Branching())
    f = posterior.functions(x)
    weights = posterior.weights()
    sign = torch.where(weights["layer.bias"] > 0, 1.0, -1.0)
    by_hand = torch.einsum("nd,sod->sno", x, weights["layer.weight"]) + weights["layer.bias"][:, None]
    torch.testing.assert_close(f, sign[:, None] * by_hand)


def test_dropout_is_off_and_predictions_repeat() -> None:
    posterior = _fit(net=nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.5), nn.Linear(8, 1)))
    x, _ = _data()
    state = torch.get_rng_state()
    assert torch.equal(posterior.functions(x), posterior.functions(x))
    assert torch.equal(state, torch.get_rng_state())
    assert not posterior.functions(x).requires_grad


def test_many_draws_of_many_inputs_are_evaluated_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    posterior = _stored(torch.randn(2, 40))
    x = torch.randn(8192, 2)
    asked: list[int] = []
    original = MemoryDraws.get

    def watched(self: MemoryDraws, rows: Any, device: Any) -> Any:
        asked.append(len(rows))
        return original(self, rows, device)

    monkeypatch.setattr(MemoryDraws, "get", watched)
    f = posterior.functions(x)
    assert max(asked) * 4096 <= 2**17 < 80 * 4096
    monkeypatch.undo()
    torch.testing.assert_close(f, torch.einsum("nd,sod->sno", x, posterior.weights()["weight"]), rtol=1e-5, atol=1e-5)


# ---------------------------------------------------------------------------------------------------------------------
# Bad inputs


def test_inputs_of_the_wrong_width_are_refused_at_once_and_change_nothing(posterior: Any) -> None:
    x, _ = _data()
    before = posterior.functions(x)
    for ask in (posterior.functions, posterior.predict):
        for bad in (torch.randn(5, 3), torch.randn(5)):
            with pytest.raises(ValueError, match="the network could not be run on x: RuntimeError"):
                ask(bad)
    assert posterior.model.network not in LOOPED  # a mistake in x says nothing about vmap
    assert torch.equal(before, posterior.functions(x))


def test_inputs_that_give_other_outputs_are_refused() -> None:
    class Any2(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            return self.scale * x

    x, y = _data()
    posterior = _fit(net=Any2(), data=(x[:, :1], y))
    with pytest.raises(ValueError, match=r"x gives outputs of shape \(2,\) per example, the data it was fitted on gave \(1,\)"):
        posterior.functions(x)
    with pytest.raises(ValueError, match=r"x gives outputs of shape \(2,\)"):
        posterior.predict(x)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (torch.zeros(0, 2), "x is empty"),
        (torch.tensor(1.0), "x"),
        ([[0.0, float("nan")]], "x contains 1 non-finite value"),
        (torch.full((3, 2), torch.inf), "x contains 6 non-finite values"),
        (None, "x"),
        ("table.csv", "x"),
        ({"a": torch.zeros(3, 2)}, "x"),
    ],
    ids=str,
)
def test_bad_inputs_are_refused_by_name(bad: Any, message: str, posterior: Any) -> None:
    for ask in (posterior.functions, posterior.predict):
        with pytest.raises((ValueError, TypeError), match=message):
            ask(bad)


def test_arrays_lists_and_integers_are_inputs(posterior: Any) -> None:
    x, _ = _data()
    f = posterior.functions(x)
    assert torch.equal(f, posterior.functions(x.numpy()))
    assert torch.equal(f, posterior.functions(x.double()))
    assert torch.equal(f, posterior.functions(x.tolist()))


def test_memory_errors_are_not_blamed_on_x() -> None:
    class Hungry(nn.Linear):
        hungry = False

        def forward(self, x: Tensor) -> Tensor:
            if Hungry.hungry:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().forward(x)

    posterior = _fit(net=Hungry(2, 1))
    Hungry.hungry = True
    with pytest.raises(torch.OutOfMemoryError):
        posterior.functions(_data()[0])


# ---------------------------------------------------------------------------------------------------------------------
# Diagnostics


def _stored(chains: Tensor) -> Any:
    """A posterior whose only weight has these draws, [chains, draws]."""
    point = _fit(pl.MAP(epochs=1), net=nn.Linear(2, 1, bias=False), likelihood=pl.likelihoods.Gaussian(scale=1.0))
    count, draws = chains.shape
    value = torch.stack([chains.T.reshape(-1), torch.ones(count * draws)], 1).reshape(-1, 1, 2)  # draw by draw
    return DrawsPosterior(point.method, point.model, point.run, MemoryDraws({"weight": value}), count)


def test_diagnostics_see_the_chains_in_their_order() -> None:
    chains = torch.randn(4, 200, generator=torch.Generator().manual_seed(0))
    report = _stored(chains).diagnostics()
    assert report["draws"] == 800
    assert report["chains"] == 4
    assert report["divergences"] == 0
    expected = diagnostics.summarise(chains.unsqueeze(-1))
    assert report["rhat"] == pytest.approx(expected["rhat"])
    assert report["ess_bulk"] == pytest.approx(expected["ess_bulk"])
    assert report["ess_tail"] == pytest.approx(expected["ess_tail"])
    assert report["rhat"] < 1.02
    shifted = chains + torch.tensor([0.0, 0.0, 0.0, 3.0])[:, None]
    assert _stored(shifted).diagnostics()["rhat"] > 1.3  # mixed up chains would hide it


def test_diagnostics_of_functions() -> None:
    chains = torch.randn(2, 100, generator=torch.Generator().manual_seed(0))
    posterior = _stored(chains)
    x = torch.tensor([[1.0, 0.0], [2.0, 0.0]])  # f = w₁x₁: the same quantity twice
    assert posterior.diagnostics(x)["rhat"] == pytest.approx(posterior.diagnostics()["rhat"])
    constant = posterior.diagnostics(torch.tensor([[0.0, 1.0]]))  # f = w₂, which never moves
    assert "rhat" not in constant
    assert constant["draws"] == 200


def test_too_few_draws_have_counts_alone() -> None:
    assert _stored(torch.randn(3, 3)).diagnostics() == {"draws": 9, "chains": 3, "divergences": 0}
    assert _fit(pl.Ensemble(pl.MAP(epochs=1), members=3)).diagnostics()["chains"] == 3


# ---------------------------------------------------------------------------------------------------------------------
# The rest


def test_a_posterior_says_what_it_is(posterior: Any) -> None:
    assert repr(posterior) == "<DrawsPosterior by SGLD: 22 random weights, 20 examples>"
    summary = str(posterior.summary())
    for part in ("SGLD posterior, Gaussian likelihood, 20 examples", "0.weight", "5×2", "likelihood.log_scale", "inferred"):
        assert part in summary
    assert posterior.log_evidence is None
    assert len(posterior) == DRAWS
    assert posterior.device == torch.device("cpu")
    partly = str(_fit(replace(STEPS, epochs=1), where="last").summary())
    assert "trained as a point" in partly


def test_moving_gives_an_independent_equal_posterior(posterior: Any) -> None:
    x, _ = _data()
    moved = posterior.to("cpu")
    assert moved is not posterior
    assert torch.equal(moved.functions(x), posterior.functions(x))
    assert moved.history == posterior.history
    assert moved.run == posterior.run


def test_what_is_handed_out_cannot_change_the_posterior(posterior: Any) -> None:
    x, _ = _data()
    before = posterior.functions(x)
    for weights in (posterior.weights(), posterior.weights(3), posterior.weights(DRAWS)):
        for value in weights.values():
            value.zero_()
    assert torch.equal(before, posterior.functions(x))


def test_changing_the_module_afterwards_changes_nothing() -> None:
    net = _network()
    posterior = _fit(net=net)
    x, _ = _data()
    before = posterior.functions(x)
    with torch.no_grad():
        for value in net.parameters():
            value.zero_()
    assert torch.equal(before, posterior.functions(x))


def test_structured_inputs() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(1, 1), nn.Linear(1, 1)

        def forward(self, left: Tensor, right: Tensor) -> Tensor:
            return self.a(left) + self.b(right)

    x, y = _data()
    inputs = {"left": x[:, :1], "right": x[:, 1:]}
    posterior = _fit(net=Two(), data=(inputs, y))
    whole = posterior.predict(inputs)
    torch.testing.assert_close(whole.mean, posterior.predict(inputs, batch_size=3).mean)
    assert posterior.functions((x[:, :1], x[:, 1:])).shape == (DRAWS, 20, 1)
    with pytest.raises(ValueError, match="the network could not be run on x: TypeError"):
        posterior.functions({"left": x[:, :1]})
    with pytest.raises(ValueError, match="the same number of examples"):
        posterior.functions({"left": x[:, :1], "right": x[:5, 1:]})
