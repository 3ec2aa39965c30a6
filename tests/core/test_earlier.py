"""An earlier posterior as a prior: its density, Bayes' rule in two steps, draws, other weights, files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plausible as pl
from plausible.core.priors import Earlier, Gaussian
from plausible.core.serialise import encode
from plausible.core.weights import Weights
from plausible.posteriors.laws import Law, LawPosterior


class Joint(Law):
    """N(μ, Λ⁻¹) over all weights together, with a dense Λ."""

    independent = False

    def __init__(self, means: Weights, precision: Tensor):
        self.means, self.precision = means, precision
        spread = torch.linalg.inv(precision).diagonal().sqrt()
        self.scales = self.named(spread)

    def named(self, flat: Tensor) -> Weights:
        parts = flat.split([mean.numel() for mean in self.means.values()], -1)
        return {n: part.reshape(*flat.shape[:-1], *m.shape) for (n, m), part in zip(self.means.items(), parts)}

    @property
    def tensors(self) -> Any:
        raise NotImplementedError

    @classmethod
    def rebuilt(cls, method: Any, model: Any, content: Any) -> Any:
        raise NotImplementedError

    @property
    def noise(self) -> Tensor:
        return torch.zeros(len(self.precision), dtype=torch.float64)

    def sample(self, noise: Tensor, first: int) -> Weights:
        root = torch.linalg.cholesky(torch.linalg.inv(self.precision))
        moves = self.named(noise @ root.T)
        return {name: mean + moves[name] for name, mean in self.means.items()}

    def log_density(self, weights: Weights) -> Tensor:
        raise NotImplementedError

    def kl(self, prior: Any, masks: Weights, samples: int = 1000, seed: int = 0) -> float:
        raise NotImplementedError

    def precision_product(self, vectors: Weights) -> Weights:
        return self.named(torch.cat([vectors[name].reshape(-1) for name in self.means]) @ self.precision)

    @property
    def precision_log_det(self) -> Tensor:
        return torch.logdet(self.precision)


def net() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 2).double()


def tasks(count: int = 2, rows: int = 30) -> list[tuple[Tensor, Tensor]]:
    stream = torch.Generator().manual_seed(1)
    x = torch.randn(count, rows, 3, dtype=torch.float64, generator=stream)
    noise = 0.3 * torch.randn(count, rows, 2, dtype=torch.float64, generator=stream)
    return [(a, a[:, :2] * k + a[:, 2:] + 0.5 + n) for k, (a, n) in enumerate(zip(x, noise), 1)]


QUIET: dict[str, Any] = {"compile": False, "progress": False}
KNOWN: dict[str, Any] = {"likelihood": pl.likelihoods.Gaussian(0.3)}
FIT: dict[str, Any] = {**KNOWN, **QUIET, "prior": Gaussian()}
TRAINED = pl.MAP(epochs=800, batch_size=None, lr=pl.schedules.Cosine(0.1))


def exact(data: list[tuple[Tensor, Tensor]], scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """μ [2, 4] and Λ [8, 8] (weights row by row, then biases) of linear regression with noise 0.3."""
    x = torch.cat([a for a, _ in data])
    y = torch.cat([b for _, b in data])
    inputs = torch.cat([x, torch.ones_like(x[:, :1])], 1)
    each = inputs.T @ inputs / 0.09 + torch.eye(4, dtype=torch.float64) / scale**2
    mean = torch.linalg.solve(each, inputs.T @ y / 0.09).T
    whole = torch.zeros(8, 8, dtype=torch.float64)
    places = torch.tensor([[0, 1, 2, 6], [3, 4, 5, 7]])
    for own in places:
        whole[own[:, None], own] = each
    return mean, whole


def joint(data: list[tuple[Tensor, Tensor]]) -> LawPosterior:
    """The exact posterior of some tasks, and its model."""
    fitted = pl.fit(net(), data[0], pl.MAP(epochs=1), **FIT)
    mean, precision = exact(data)
    means = {"weight": mean[:, :3].clone(), "bias": mean[:, 3].clone()}
    return LawPosterior(fitted.method, fitted.model, {}, Joint(means, precision), {})


@pytest.fixture(scope="module")
def field() -> LawPosterior:
    return pl.fit(net(), tasks()[0], pl.MeanField(epochs=60, lr=0.03), **FIT)  # type: ignore[return-value]


def test_the_density_is_that_of_the_gaussian() -> None:
    posterior = joint(tasks()[:1])
    earlier: Any = posterior.law
    prior = Earlier(posterior)
    stream = torch.Generator().manual_seed(2)
    stacked = {n: m + 0.1 * torch.randn(5, *m.shape, dtype=m.dtype, generator=stream) for n, m in earlier.means.items()}
    flat = torch.cat([stacked["weight"].flatten(1), stacked["bias"]], 1)
    mean = torch.cat([m.reshape(-1) for m in earlier.means.values()])
    truth = torch.distributions.MultivariateNormal(mean, precision_matrix=earlier.precision).log_prob(flat)
    torch.testing.assert_close(torch.func.vmap(prior.log_prob)(stacked), truth)
    one = {name: value[0].clone().requires_grad_() for name, value in stacked.items()}
    grads = torch.autograd.grad(prior.log_prob(one), list(one.values()))
    expected = earlier.precision_product({n: earlier.means[n] - w.detach() for n, w in one.items()})
    torch.testing.assert_close(dict(zip(one, grads)), expected)
    hessian = torch.func.hessian(lambda w: prior.log_prob({"weight": w[:6].view(2, 3), "bias": w[6:]}))(mean)
    torch.testing.assert_close(hessian, -earlier.precision)
    (slope,) = torch.autograd.grad(prior.log_prob(one), [one["bias"]], create_graph=True)
    (second,) = torch.autograd.grad(slope[0], [one["bias"]])
    torch.testing.assert_close(second, -earlier.precision[6, 6:])


def test_two_tasks_in_turn_are_both_together() -> None:
    """p(w | D₁, D₂) ∝ p(D₂ | w) p(w | D₁): the mode after the second task is that of all data, with nothing kept of the first."""
    one, two = tasks()
    posterior = pl.fit(net(), two, TRAINED, prior=Earlier(joint([one])), **KNOWN, **QUIET)
    truth = exact([one, two])[0]
    torch.testing.assert_close(posterior.weights()["weight"][0], truth[:, :3], rtol=0, atol=1e-4)
    torch.testing.assert_close(posterior.weights()["bias"][0], truth[:, 3], rtol=0, atol=1e-4)
    apart = exact([two])[0]
    assert float((apart - truth).abs().max()) > 0.1


def test_independent_gaussians_have_closed_forms(field: LawPosterior) -> None:
    prior = Earlier(field)
    normal = {n: torch.distributions.Normal(field.means[n], field.scales[n]) for n in field.means}
    weights = {name: mean + 0.2 for name, mean in field.means.items()}
    truth = torch.stack([normal[n].log_prob(w).sum() for n, w in weights.items()]).sum()
    torch.testing.assert_close(prior.log_prob(weights), truth)
    for name, law in normal.items():
        entropy = law.entropy().sum()
        torch.testing.assert_close(prior.expectation(name, law.mean, law.stddev), -entropy)
        other = torch.distributions.Normal(law.mean + 0.3, 2 * law.stddev)
        divergence = torch.distributions.kl_divergence(other, law).sum()
        expected = prior.expectation(name, other.mean, other.stddev)
        torch.testing.assert_close(expected, -divergence - other.entropy().sum())


def test_variational_posteriors_carry_on(field: LawPosterior) -> None:
    """The optimum for the second task: Λ = XᵀX/σ² + diag(1/σ₁²) has the mean, and 1/√Λ_ii are the scales."""
    x, y = tasks()[1]
    method = pl.MeanField(epochs=1000, lr=pl.schedules.Cosine(0.02), batch_size=None)
    second: Any = pl.fit(net(), (x, y), method, prior=Earlier(field), init=field, **KNOWN, **QUIET)
    inputs = torch.cat([x, torch.ones_like(x[:, :1])], 1)
    for row in range(2):
        mean, scale = (torch.cat([p["weight"][row], p["bias"][row : row + 1]]) for p in (field.means, field.scales))
        precision = inputs.T @ inputs / 0.09 + torch.diag(scale**-2)
        truth = torch.linalg.solve(precision, inputs.T @ y[:, row] / 0.09 + mean * scale**-2)
        ours, spread = (torch.cat([p["weight"][row], p["bias"][row : row + 1]]) for p in (second.means, second.scales))
        torch.testing.assert_close(ours, truth, rtol=0, atol=0.01)
        torch.testing.assert_close(spread, precision.diagonal().rsqrt(), rtol=0.1, atol=0)


@pytest.mark.parametrize("kind", ["joint", "independent"])
def test_draws_follow_the_posterior(kind: str, field: LawPosterior) -> None:
    earlier = joint(tasks()[:1]) if kind == "joint" else field
    stream = torch.Generator().manual_seed(4)
    drawn = Earlier(earlier).sample(earlier.model.initial, stream, 4000)
    flat = torch.cat([drawn["weight"].flatten(1), drawn["bias"]], 1)
    if kind == "joint":
        covariance = torch.linalg.inv(earlier.law.precision)  # type: ignore[attr-defined]
    else:
        covariance = torch.diag(torch.cat([s.reshape(-1) for s in field.scales.values()]).square())
    mean = torch.cat([m.reshape(-1) for m in earlier.means.values()])
    sizes = covariance.diagonal()
    assert float(((flat.mean(0) - mean) / (sizes / 4000).sqrt()).abs().max()) < 4.5
    errors = ((sizes[:, None] * sizes + covariance.square()) / 4000).sqrt()
    assert float(((flat.T.cov() - covariance) / errors).abs().max()) < 4.5
    single = Earlier(earlier).sample(earlier.model.initial, stream)
    assert {name: value.shape for name, value in single.items()} == {
        name: value.shape for name, value in earlier.model.initial.items()
    }
    alone = Earlier(earlier).draw("bias", earlier.means["bias"], stream, (3,))
    assert alone.shape == (3, 2)


def test_other_weights_keep_the_prior_they_had() -> None:
    one, two = tasks()
    fitted = pl.fit(net(), one, pl.MeanField(epochs=2), where="weight", prior=Gaussian(0.5), **KNOWN, **QUIET)
    prior = Earlier(fitted)
    weights = {"weight": fitted.means["weight"], "bias": torch.full((2,), 0.7, dtype=torch.float64)}  # type: ignore[attr-defined]
    own = prior.log_prob({"weight": weights["weight"]})
    torch.testing.assert_close(prior.log_prob(weights), own + Gaussian(0.5).log_prob({"bias": weights["bias"]}))
    narrow = Earlier(fitted, rest={"*": Gaussian(0.1)})
    torch.testing.assert_close(narrow.log_prob(weights), own + Gaussian(0.1).log_prob({"bias": weights["bias"]}))
    assert prior.rule("bias") == Gaussian(0.5)
    assert prior.rule("weight") is prior
    assert prior.proper
    assert not Earlier(fitted, rest=pl.priors.Flat()).proper
    again = pl.fit(net(), two, pl.MAP(epochs=2), prior=prior, **KNOWN, **QUIET)
    assert set(again.weights()) == {"weight", "bias"}


def test_a_joint_density_wants_all_its_weights() -> None:
    prior = Earlier(joint(tasks()[:1]))
    means = prior.law.means
    with pytest.raises(ValueError, match="one density over 2 weights together, and 'bias' is not among those given"):
        prior.log_prob({"weight": means["weight"]})
    with pytest.raises(ValueError, match="'bias' alone has none"):
        prior.elementwise("bias", means["bias"])
    assert prior.expectation("bias", means["bias"], means["bias"].abs()) is None
    with pytest.raises(ValueError, match=r"'bias' has shape \(3,\), and shape \(2,\) in the earlier posterior"):
        prior.log_prob({"weight": means["weight"], "bias": torch.zeros(3)})


@pytest.mark.parametrize("method", [pl.MAP(epochs=1), pl.Ensemble(pl.MAP(epochs=1), members=2)])
def test_posteriors_that_are_not_gaussian_are_refused(method: Any) -> None:
    fitted = pl.fit(net(), tasks()[0], method, **FIT)
    with pytest.raises(TypeError, match="posterior must be Gaussian over the weights, as those of Laplace"):
        Earlier(fitted)
    with pytest.raises(TypeError, match="posterior must be Gaussian"):
        Earlier(net())


def test_weights_without_spread_are_refused(field: LawPosterior) -> None:
    with pytest.raises(ValueError, match="no spread"):
        Earlier(field.prune(0.5))
    with pytest.raises(ValueError, match="no spread"):
        Earlier(laplace("diag", tasks()[0], where=3))


def test_a_saved_posterior_wants_its_prior_again(field: LawPosterior, tmp_path: Path) -> None:
    one, two = tasks()
    second = pl.fit(net(), two, pl.MeanField(epochs=3), prior=Earlier(field), **KNOWN, **QUIET)
    field.save(tmp_path / "first")
    second.save(tmp_path / "second")
    with pytest.raises(ValueError, match=r"the prior Earlier\(\w+\) .*not in the file: pass prior= again"):
        pl.load(tmp_path / "second", net())
    prior = Earlier(pl.load(tmp_path / "first", net()))
    loaded = pl.load(tmp_path / "second", net(), prior=prior)
    torch.testing.assert_close(loaded.functions(one[0], 3), second.functions(one[0], 3))
    assert loaded.kl() == pytest.approx(second.kl(), rel=1e-6)  # type: ignore[attr-defined]


def test_a_checkpoint_knows_the_earlier_posterior(field: LawPosterior, tmp_path: Path) -> None:
    _, two = tasks()
    place = pl.Checkpoint(tmp_path / "checkpoint", steps=1)
    pl.fit(net(), two, pl.MAP(epochs=2), prior=Earlier(field), checkpoint=place, **KNOWN, **QUIET)
    other = pl.fit(net(), two, pl.MeanField(epochs=2), **FIT)
    assert encode(Earlier(field), strict=False) == encode(Earlier(field), strict=False)
    with pytest.raises(ValueError, match="prior"):
        pl.fit(net(), two, pl.MAP(epochs=2), prior=Earlier(other), checkpoint=place, **KNOWN, **QUIET)


# With Laplace


def laplace(structure: str, data: tuple[Tensor, Tensor], prior: Any = None, **settings: Any) -> Any:
    method = pl.Laplace(structure=structure, mode=pl.MAP(epochs=100, batch_size=None, lr=0.05), **settings)  # type: ignore[arg-type]
    return pl.fit(net(), data, method, prior=prior or Gaussian(), **KNOWN, **QUIET)


@pytest.mark.parametrize("structure", ["full", "block", "kron", "ekfac", "lowrank"])
def test_laplace_in_turn_is_laplace_of_all(structure: str) -> None:
    """In the linear-Gaussian model the posterior after two tasks is that of all data; log p(D₁) + log p(D₂ | D₁) = log p(D₁, D₂).

    All inputs have one covariance for both outputs, so that sums of Kronecker products are Kronecker products here.
    """
    one, two = tasks()
    first = laplace(structure, one)
    second = laplace(structure, two, Earlier(first))
    whole = laplace(structure, (torch.cat([one[0], two[0]]), torch.cat([one[1], two[1]])))
    mean, precision = exact([one, two])
    torch.testing.assert_close(second.means["weight"], mean[:, :3], rtol=0, atol=1e-4)
    unit = {"weight": torch.eye(8, dtype=torch.float64)[:, :6].view(8, 2, 3), "bias": torch.eye(8, dtype=torch.float64)[:, 6:]}
    found = torch.func.vmap(second.precision_product)(unit)
    torch.testing.assert_close(torch.cat([found["weight"].flatten(1), found["bias"]], 1), precision, rtol=1e-6, atol=1e-6)
    assert second.precision_log_det.item() == pytest.approx(torch.logdet(precision).item(), rel=1e-6)
    assert first.log_evidence + second.log_evidence == pytest.approx(whole.log_evidence, abs=1e-3)
    torch.testing.assert_close(second.predict(one[0]).std, whole.predict(one[0]).std, rtol=1e-4, atol=0)


def test_diagonals_add_up_weight_by_weight() -> None:
    one, two = tasks()
    first = laplace("diag", one)
    prior = Earlier(first)
    assert prior.independent
    second = laplace("diag", two, prior)
    alone = laplace("diag", two)
    for name, scale in second.scales.items():
        torch.testing.assert_close(scale**-2, first.scales[name] ** -2 + alone.scales[name] ** -2 - 1.0)
    third = pl.fit(net(), two, pl.MeanField(epochs=2), prior=prior, **KNOWN, **QUIET)
    assert third.kl() > 0  # type: ignore[attr-defined]


def test_a_third_task_follows() -> None:
    three = tasks(3)
    posterior: Any = None
    for data in three:
        posterior = laplace("kron", data, None if posterior is None else Earlier(posterior))
    torch.testing.assert_close(posterior.means["weight"], exact(three)[0][:, :3], rtol=0, atol=1e-4)
    last = Earlier(posterior)
    assert isinstance(posterior.model.prior, Earlier)
    assert last.rest == Gaussian(1.0)
    assert not any(isinstance(value, Earlier) for value in (*vars(last).values(), *vars(last.law).values()))  # not kept alive


def test_divergence_from_the_earlier_posterior() -> None:
    """KL between Gaussians, against its closed form, within 4.5 standard errors of the Monte Carlo mean."""
    one, two = tasks()
    first = laplace("full", one)
    second = laplace("full", two, Earlier(first))
    laws = []
    for part in (second, first):
        mean = torch.cat([m.reshape(-1) for m in part.means.values()])
        unit = {
            "weight": torch.eye(8, dtype=torch.float64)[:, :6].view(8, 2, 3),
            "bias": torch.eye(8, dtype=torch.float64)[:, 6:],
        }
        rows = torch.func.vmap(part.precision_product)(unit)
        precision = torch.cat([rows["weight"].flatten(1), rows["bias"]], 1)
        laws.append(torch.distributions.MultivariateNormal(mean, precision_matrix=(precision + precision.T) / 2))
    truth = float(torch.distributions.kl_divergence(*laws))
    drawn = laws[0].sample((4000,))
    error = float((laws[0].log_prob(drawn) - laws[1].log_prob(drawn)).std()) / 2000**0.5
    assert abs(second.kl(samples=2000) - truth) < 4.5 * error
    assert second.diagnostics()["kl"] is not None


def test_files_hold_the_whole_precision(tmp_path: Path) -> None:
    one, two = tasks()
    first = laplace("kron", one)
    second = laplace("kron", two, Earlier(first))
    first.save(tmp_path / "first")
    second.save(tmp_path / "second")
    earlier = Earlier(pl.load(tmp_path / "first", net()))
    loaded: Any = pl.load(tmp_path / "second", net(), prior=earlier)
    torch.testing.assert_close(loaded.precision_product(second.means), second.precision_product(second.means))
    torch.testing.assert_close(earlier.log_prob(second.means), Earlier(first).log_prob(second.means))


def test_other_weights_or_structures_are_refused() -> None:
    one, two = tasks()
    first = laplace("kron", one)
    with pytest.raises(ValueError, match="use the same where= for all tasks"):
        laplace("kron", two, Earlier(first), where="weight")
    with pytest.raises(ValueError, match="cannot be added: use one structure= for all tasks"):
        laplace("block", two, Earlier(first))
    with pytest.raises(ValueError, match="tune needs Gaussian priors"):
        laplace("kron", two, Earlier(first), tune="global")
