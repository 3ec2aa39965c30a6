"""MAP: convex problems reach their closed form, steps are those of torch.optim, early stopping keeps the best weights."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import plausible as pl
from plausible.blocks.adversarial import input_range, with_neighbours
from plausible.core.data import Batch, Order, as_data
from plausible.core.optimisers import SGD, AdamW
from plausible.core.random import permutation
from plausible.core.schedules import Cosine, Exponential, Linear, Polynomial, Steps

QUIET: dict[str, Any] = {"progress": False, "compile": False}


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def _problem(num_data: int = 40, inputs: int = 3, seed: int = 0) -> tuple[Tensor, Tensor]:
    stream = torch.Generator().manual_seed(seed)
    x = torch.randn(num_data, inputs, generator=stream) * torch.linspace(0.5, 1.5, inputs) + 0.3
    y = x @ torch.randn(inputs, 1, generator=stream) - 0.7 + 0.4 * torch.randn(num_data, 1, generator=stream)
    return x, y


def _network(inputs: int = 3) -> nn.Linear:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Linear(inputs, 1)


NOISE, SCALE = 0.4, 0.7


def _ridge(x: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
    """argmin ‖y − Xw‖²/σ² + ‖w‖²/s² with an intercept, in float64: [inputs + 1]."""
    design = torch.cat([x, torch.ones(len(x), 1)], 1).double()
    scaled = design if weight is None else design * weight.double()[:, None]
    precision = scaled.T @ design / NOISE**2 + torch.eye(design.shape[1], dtype=torch.float64) / SCALE**2
    return torch.linalg.solve(precision, scaled.T @ y.double() / NOISE**2).squeeze(1)


def _fit(x: Tensor, y: Tensor, method: pl.MAP, net: nn.Module | None = None, **settings: Any) -> pl.Posterior:
    settings = {"likelihood": pl.likelihoods.Gaussian(scale=NOISE), "prior": pl.priors.Gaussian(SCALE), **settings}
    return pl.fit(_network(x.shape[1]) if net is None else net, (x, y), method, **QUIET, **settings)


def _solution(posterior: pl.Posterior) -> Tensor:
    weights = posterior.weights()
    return torch.cat([weights["weight"].reshape(-1), weights["bias"].reshape(-1)]).double()


# ---------------------------------------------------------------------------------------------------------------------
# Closed form


@pytest.mark.parametrize(
    ("optimiser", "lr"),
    [
        (AdamW(), Cosine(0.1)),
        (AdamW(), Exponential(0.1, 1e-3)),
        (AdamW(), Linear(0.1)),
        (SGD(momentum=0.9), 0.02),
        (SGD(momentum=0.9, nesterov=True), 0.02),
        (SGD(momentum=0.0), Steps(0.08)),
        (SGD(momentum=0.9), Polynomial(0.03, b=50.0)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_ridge_regression_reaches_its_closed_form(optimiser: Any, lr: Any) -> None:
    x, y = _problem()
    posterior = _fit(x, y, pl.MAP(epochs=400, batch_size=None, lr=lr, optimiser=optimiser))
    torch.testing.assert_close(_solution(posterior), _ridge(x, y), rtol=0, atol=2e-4)


def test_minibatches_with_a_falling_rate_reach_it_too() -> None:
    x, y = _problem()
    posterior = _fit(x, y, pl.MAP(epochs=150, batch_size=7, lr=Cosine(0.05)))
    torch.testing.assert_close(_solution(posterior), _ridge(x, y), rtol=0, atol=0.01)


def test_double_precision_reaches_it_to_more_digits() -> None:
    x, y = _problem()
    method = pl.MAP(epochs=800, batch_size=None, lr=0.05, optimiser=SGD())
    posterior = _fit(x.double(), y.double(), method, _network().double())
    assert posterior.weights()["weight"].dtype == torch.float64
    torch.testing.assert_close(_solution(posterior), _ridge(x, y), rtol=0, atol=1e-9)


def test_example_weights_enter_the_objective() -> None:
    x, y = _problem()
    weight = torch.linspace(0.0, 2.0, len(x))
    data = (x, y, weight)
    posterior = pl.fit(
        _network(),
        data,
        pl.MAP(epochs=400, batch_size=None, lr=Cosine(0.1)),
        prior=pl.priors.Gaussian(SCALE),
        likelihood=pl.likelihoods.Gaussian(scale=NOISE),
        **QUIET,
    )
    torch.testing.assert_close(_solution(posterior), _ridge(x, y, weight), rtol=0, atol=2e-4)


def test_a_tempered_model_has_the_same_mode() -> None:
    x, y = _problem()
    model = _fit(x, y, pl.MAP(epochs=1)).model.tempered(0.1)
    posterior = pl.fit(model, (x, y), pl.MAP(epochs=400, batch_size=None, lr=Cosine(0.1)), **QUIET)
    torch.testing.assert_close(_solution(posterior), _ridge(x, y), rtol=0, atol=1e-3)


# ---------------------------------------------------------------------------------------------------------------------
# The same steps as a hand-written loop


@pytest.mark.parametrize("kind", ["adam", "adamw", "sgd"])
@pytest.mark.parametrize("batch_size", [None, 7])
def test_equals_a_loop_with_torch_optim(kind: str, batch_size: int | None) -> None:
    x, y = (part.double() for part in _problem())
    with torch.random.fork_rng():
        torch.manual_seed(6)
        net = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    epochs, seed, lr = 12, 5, 0.003 if kind == "sgd" else 0.03  # a stable rate: differences in rounding do not grow
    ours, theirs = {
        "adam": (AdamW(), lambda p: torch.optim.Adam(p, lr=lr)),
        "adamw": (AdamW(weight_decay=0.1), lambda p: torch.optim.AdamW(p, lr=lr, weight_decay=0.1)),
        "sgd": (SGD(momentum=0.9), lambda p: torch.optim.SGD(p, lr=lr, momentum=0.9)),
    }[kind]
    method = pl.MAP(epochs=epochs, batch_size=batch_size, lr=lr, optimiser=ours)
    posterior = _fit(x, y, method, net, seed=seed)
    optimiser = theirs(net.parameters())  # from here on the module itself is trained
    steps = epochs * (1 if batch_size is None else math.ceil(len(x) / batch_size))
    rows = torch.arange(len(x)).repeat(steps, 1) if batch_size is None else Order(len(x), batch_size, seed)(0, steps)
    values = []
    for row in rows:
        optimiser.zero_grad()
        likelihood = torch.distributions.Normal(net(x[row]), NOISE).log_prob(y[row]).sum() * len(x) / len(row)
        prior = sum(torch.distributions.Normal(0.0, SCALE).log_prob(p).sum() for p in net.parameters())
        (-(likelihood + prior) / len(x)).backward()
        optimiser.step()
        values.append(float((likelihood + prior).detach()))
    for name, value in net.named_parameters():
        torch.testing.assert_close(posterior.weights()[name][0], value.detach(), rtol=1e-5, atol=1e-6)
    per_epoch = steps // epochs
    means = torch.tensor(values, dtype=torch.float64).reshape(epochs, per_epoch).mean(1)
    torch.testing.assert_close(torch.tensor(posterior.history["log_joint"]).double(), means, rtol=1e-5, atol=1e-4)


def test_a_cosine_rate_is_that_of_torch() -> None:
    x, y = _problem()
    net, epochs = _network(), 25
    posterior = _fit(x, y, pl.MAP(epochs=epochs, batch_size=None, lr=Cosine(0.05), optimiser=SGD(momentum=0.0)), net)
    optimiser = torch.optim.SGD(net.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, epochs)
    for _ in range(epochs):
        optimiser.zero_grad()
        joint = torch.distributions.Normal(net(x), NOISE).log_prob(y).sum()
        joint = joint + sum(torch.distributions.Normal(0.0, SCALE).log_prob(p).sum() for p in net.parameters())
        (-joint / len(x)).backward()
        optimiser.step()
        schedule.step()
    torch.testing.assert_close(_solution(posterior).float(), torch.cat([p.detach().reshape(-1) for p in net.parameters()]))


def test_classification_reaches_the_optimum_of_the_penalised_likelihood() -> None:
    stream = torch.Generator().manual_seed(1)
    x = torch.randn(60, 2, generator=stream)
    y = (x @ torch.randn(2, 3, generator=stream) + torch.randn(60, 3, generator=stream)).argmax(1)
    method = pl.MAP(epochs=300, batch_size=None, lr=Cosine(0.1))
    posterior = pl.fit(nn.Linear(2, 3), (x, y), method, prior=pl.priors.Gaussian(), **QUIET)
    weights = {name: value[0].double().requires_grad_() for name, value in posterior.weights().items()}
    logits = x.double() @ weights["weight"].T + weights["bias"]
    joint = -nn.functional.cross_entropy(logits, y, reduction="sum")
    joint = joint + sum(torch.distributions.Normal(0.0, 1.0).log_prob(w).sum() for w in weights.values())
    gradients = torch.autograd.grad(joint, list(weights.values()))
    assert max(float(g.abs().max()) for g in gradients) < 0.02


def test_a_point_has_no_epistemic_variance_and_starts_at_the_modules_weights() -> None:
    x, y = _problem()
    posterior = _fit(x, y, pl.MAP(epochs=3, lr=1e-12))
    torch.testing.assert_close(posterior.weights()["weight"][0], _network().weight.detach())
    assert posterior.functions(x).shape == (1, 40, 1)
    assert float(posterior.predict(x).epistemic.max()) == 0
    assert posterior.log_evidence is None
    assert posterior.diagnostics() == {"draws": 1, "chains": 1, "divergences": 0}


# ---------------------------------------------------------------------------------------------------------------------
# Early stopping


def _overfitting() -> tuple[nn.Module, Tensor, Tensor]:
    """Few noisy data and a wide network: the held-out log-likelihood turns round soon."""
    stream = torch.Generator().manual_seed(2)
    x = torch.randn(40, 2, generator=stream)
    y = x[:, :1] + torch.randn(40, 1, generator=stream)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 1)), x, y


STOPPING = pl.MAP(epochs=300, batch_size=8, lr=0.02, patience=5, holdout=0.25)
LOOSE: dict[str, Any] = {"likelihood": pl.likelihoods.Gaussian(scale=0.5), "prior": pl.priors.Gaussian(10.0)}


def _held_out(x: Tensor, y: Tensor, seed: int = 0) -> tuple[Tensor, Tensor]:
    rows = permutation(seed, 2**31 - 1, len(x))[:10]
    return x[rows], y[rows]


def test_it_stops_after_patience_and_keeps_the_best_weights() -> None:
    net, x, y = _overfitting()
    posterior = pl.fit(net, (x, y), STOPPING, **QUIET, **LOOSE)
    values = torch.tensor(posterior.history["held_out_log_likelihood"])
    best = int(values.argmax())
    assert len(values) < STOPPING.epochs
    assert len(values) == best + 1 + 5
    assert posterior.run["steps"] == len(values) * 4  # ⌈30/8⌉ steps an epoch
    assert len(posterior.history["log_joint"]) == len(values)
    held_x, held_y = _held_out(x, y)
    value = posterior.predict(held_x).log_prob(held_y).mean()
    torch.testing.assert_close(value, values[best], rtol=1e-4, atol=1e-4)


def test_without_overfitting_all_epochs_run() -> None:
    x, y = _problem()
    posterior = _fit(x, y, pl.MAP(epochs=8, batch_size=None, lr=1e-3, patience=8))
    assert len(posterior.history["held_out_log_likelihood"]) == 8


def test_the_held_out_part_is_seeded_and_not_trained_on() -> None:
    net, x, y = _overfitting()
    one = pl.fit(net, (x, y), STOPPING, seed=1, **QUIET, **LOOSE)
    two = pl.fit(net, (x, y), STOPPING, seed=1, **QUIET, **LOOSE)
    other = pl.fit(net, (x, y), STOPPING, seed=2, **QUIET, **LOOSE)
    assert one.history == two.history
    assert one.history != other.history
    # Training sees 30 of the 40: changing held-out targets changes the held-out value and not the training terms.
    changed = y.clone()
    changed[permutation(1, 2**31 - 1, 40)[:10]] += 1.0
    third = pl.fit(net, (x, changed), STOPPING, seed=1, **QUIET, **LOOSE)
    shared = min(len(one.history["log_joint"]), len(third.history["log_joint"]))
    assert one.history["log_joint"][:shared] == third.history["log_joint"][:shared]
    assert one.history["held_out_log_likelihood"][0] != third.history["held_out_log_likelihood"][0]


def test_early_stopping_on_a_data_set_equals_that_on_tensors() -> None:
    class Rows(torch.utils.data.Dataset):
        def __init__(self, x: Tensor, y: Tensor):
            self.x, self.y = x, y

        def __len__(self) -> int:
            return len(self.x)

        def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
            return self.x[i], self.y[i]

    net, x, y = _overfitting()
    one = pl.fit(net, (x, y), STOPPING, **QUIET, **LOOSE)
    two = pl.fit(net, Rows(x, y), STOPPING, **QUIET, **LOOSE)
    assert len(one.history["log_joint"]) == len(two.history["log_joint"])
    torch.testing.assert_close(one.functions(x), two.functions(x), rtol=1e-4, atol=1e-5)


def test_a_loader_cannot_be_split() -> None:
    x, y = _problem()
    loader = DataLoader(TensorDataset(x, y), batch_size=10)
    with pytest.raises(ValueError, match="early stopping needs a held-out part"):
        pl.fit(_network(), loader, pl.MAP(epochs=2, patience=2), **QUIET)


def test_a_holdout_that_leaves_nothing_is_refused() -> None:
    x, y = _problem(num_data=2)
    with pytest.raises(ValueError, match="leaves nothing to train on"):
        _fit(x, y, pl.MAP(epochs=2, patience=2, holdout=0.9))


def test_batch_norm_statistics_belong_to_the_best_weights() -> None:
    _, x, y = _overfitting()
    net = nn.Sequential(nn.Linear(2, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 1))
    posterior = pl.fit(net, (x, y), STOPPING, **QUIET, **LOOSE)
    values = posterior.history["held_out_log_likelihood"]
    held_x, held_y = _held_out(x, y)
    assert float(posterior.predict(held_x).log_prob(held_y).mean()) == pytest.approx(max(values), rel=1e-3)


# ---------------------------------------------------------------------------------------------------------------------
# Bad settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"epochs": 0}, "epochs must be at least 1"),
        ({"epochs": 2.5}, "epochs must be an integer"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"batch_size": 1.5}, "batch_size must be an integer"),
        ({"lr": -1e-3}, "lr must be positive"),
        ({"lr": 0.0}, "lr must be positive"),
        ({"lr": math.nan}, "lr must be positive"),
        ({"lr": "fast"}, "lr must be a positive number"),
        ({"optimiser": "adam"}, "optimiser must be one of"),
        ({"patience": 0}, "patience must be"),
        ({"patience": True}, "patience must be"),
        ({"holdout": 1.0}, "holdout must lie"),
        ({"holdout": -0.1}, "holdout must lie"),
    ],
)
def test_bad_settings_are_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        pl.MAP(**settings)


def test_a_batch_larger_than_the_data_is_refused_and_the_default_is_not() -> None:
    x, y = _problem()
    with pytest.raises(ValueError, match=r"batch_size=41 is larger than the data \(40 examples\)"):
        _fit(x, y, pl.MAP(epochs=1, batch_size=41))
    assert _fit(x, y, pl.MAP(epochs=1)).run["steps"] == 1


# ---------------------------------------------------------------------------------------------------------------------
# Adversarial training


def _line() -> tuple[Tensor, Tensor]:
    x = torch.linspace(-1, 1, 9, dtype=torch.float64)[:, None] * torch.tensor([[1.0, 10.0]], dtype=torch.float64)
    return x, x @ torch.tensor([[1.0], [0.2]], dtype=torch.float64) + 0.3


def test_neighbours_lie_where_the_likelihood_falls() -> None:
    """For f = w·x with unit noise the slope of −log p is (w·x − y)·w: moved by the radius times its sign."""
    x, y = _line()
    net = torch.nn.Linear(2, 1, bias=False).double()
    torch.nn.init.constant_(net.weight, 0.5)
    data = as_data((x, y), dtype=torch.float64, device="cpu")
    torch.testing.assert_close(input_range(data), torch.tensor([2.0, 20.0], dtype=torch.float64))
    model = pl.Model.build(net, pl.likelihoods.Gaussian(scale=1.0), pl.priors.Gaussian(), data.all(), num_data=9)
    radius = 0.1 * input_range(data)
    doubled = with_neighbours(model, model.initial, data.all(), {}, radius, train=True)
    residual = x @ net.weight.detach().T - y
    expected = x + radius * (residual * net.weight.detach()).sign()
    torch.testing.assert_close(doubled.x, torch.cat([x, expected]))
    torch.testing.assert_close(doubled.y, torch.cat([y, y]))
    joint = model.gradient(model.initial, doubled)
    both = [model.gradient(model.initial, Batch(part, y)) for part in (x, expected)]
    torch.testing.assert_close(joint.log_likelihood, (both[0].log_likelihood + both[1].log_likelihood) / 2)
    for name, grad in joint.grads.items():
        torch.testing.assert_close(grad, (both[0].grads[name] + both[1].grads[name]) / 2)


def test_adversarial_members_equal_single_runs_and_differ_from_plain_ones() -> None:
    x, y = _line()
    net = torch.nn.Sequential(torch.nn.Linear(2, 6), torch.nn.Tanh(), torch.nn.Linear(6, 1)).double()
    settings: Any = {"compile": False, "progress": False}
    one = pl.MAP(epochs=30, batch_size=None, adversarial=0.1)
    alone = pl.fit(net, (x, y), one, **settings).functions(x)
    stacked = pl.fit(net, (x, y), pl.Ensemble(one, members=2, init="given"), **settings).functions(x)
    torch.testing.assert_close(stacked, alone.expand_as(stacked), rtol=1e-6, atol=1e-8)
    plain = pl.fit(net, (x, y), pl.MAP(epochs=30, batch_size=None), **settings).functions(x)
    assert (plain - alone).abs().max() > 1e-3


def test_adversarial_is_refused_where_inputs_cannot_be_moved() -> None:
    words, y = torch.randint(5, (20, 3)), torch.randn(20, 1)
    net = torch.nn.Sequential(torch.nn.Embedding(5, 2), torch.nn.Flatten(), torch.nn.Linear(6, 1))
    with pytest.raises(ValueError, match=r"adversarial: inputs must be one floating-point tensor.*int64"):
        pl.fit(net, (words, y), pl.MAP(epochs=1, adversarial=0.01), progress=False)
    with pytest.raises(ValueError, match="adversarial"):
        pl.MAP(adversarial=-0.1)


def test_early_stopping_looks_at_example_weights() -> None:
    """Targets of rows with weight 0 make no difference, held out or not."""
    x, y = _problem(60)
    weights = (torch.arange(60) % 3 > 0).float()
    method = pl.MAP(epochs=40, batch_size=10, patience=5, holdout=0.2)
    found = []
    for other in (0.0, 50.0):
        targets = torch.where(weights[:, None] > 0, y, other)
        found.append(pl.fit(nn.Linear(3, 1), (x, targets, weights), method, init=None, **QUIET))
        torch.manual_seed(0)
    a, b = found
    assert a.history["held_out_log_likelihood"] == pytest.approx(b.history["held_out_log_likelihood"])


def test_batch_norm_with_a_single_example_says_what_to_do() -> None:
    x, y = _problem(9)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    for data, size in (((x, y), 1), (DataLoader(TensorDataset(x, y), batch_size=8), "auto")):
        with pytest.raises(ValueError, match=r"batch norm in training needs at least two examples.*drop_last=True"):
            pl.fit(net, data, pl.MAP(epochs=2, batch_size=size), **QUIET)
