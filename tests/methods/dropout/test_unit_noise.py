"""Noise on the inputs of layers: MC, Gaussian and concrete dropout."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import plausible as pl
from plausible.blocks.stochastic import Noise, gaussian
from plausible.blocks.unit_noise import KINDS, Site, entropy, survey, with_noisy_inputs
from plausible.core import random
from plausible.posteriors.unit_noise import UnitNoise

FAST = {"epochs": 5, "progress": False}


def perceptron(*layers):
    return nn.Sequential(*layers)


def small(inputs=3, outputs=1):
    return perceptron(nn.Linear(inputs, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, outputs))


def sine(rows=60, seed=0):
    stream = torch.Generator().manual_seed(seed)
    x = 6 * torch.rand(rows, 1, generator=stream) - 3
    return x, torch.sin(x) + 0.3 * torch.randn(rows, 1, generator=stream)


# ---------------------------------------------------------------------------------------------------------------------
# The law


@pytest.mark.parametrize(
    "layer",
    [
        nn.Linear(6, 4),
        nn.Conv1d(6, 4, 3, padding=1),
        nn.Conv2d(6, 4, 3),
        nn.Conv2d(6, 6, 3, groups=3),
        nn.Conv2d(6, 6, 3, groups=6),
        nn.ConvTranspose2d(6, 4, 3),
    ],
    ids=lambda layer: f"{type(layer).__name__}-{getattr(layer, 'groups', 1)}",
)
def test_noise_on_columns_of_weights_is_noise_on_inputs(layer):
    torch.manual_seed(0)
    x = torch.randn(2, 6) if isinstance(layer, nn.Linear) else torch.randn(2, 6, *[7] * (layer.weight.ndim - 2))
    (site,) = survey(lambda w: torch.func.functional_call(layer, w, (x,)), {"weight": layer.weight}).values()
    assert site.units == 6
    z = torch.rand(6)
    scaled = {"weight": site.scaled(layer.weight, z), "bias": layer.bias}
    by_input = layer(x * z.view(1, 6, *[1] * (x.ndim - 2)))
    torch.testing.assert_close(torch.func.functional_call(layer, scaled, (x,)), by_input)


@pytest.mark.parametrize("kind", ["dropout", "gaussian"])
def test_draws_of_the_law_have_its_mean_and_scale(kind):
    means = {"w": torch.tensor([[1.0, -2.0], [0.5, 3.0]]), "v": torch.tensor([[2.0, 1.0, -1.0]])}
    rates = {"w": torch.tensor([0.3, 0.1]), "v": torch.full((3,), 0.5)}
    sites = {"w": Site(1, 2), "v": Site(1, 3)}
    law = UnitNoise(means, rates, sites, kind, {"w": torch.full((2, 2), 0.4)} if kind == "gaussian" else None)
    drawn = law.draws(0, 40_000, seed=0)
    for name, mean in means.items():
        torch.testing.assert_close(drawn[name].mean(0), mean, atol=0.04, rtol=0)
        torch.testing.assert_close(drawn[name].std(0), law.scales[name], rtol=0.03, atol=0)
    ratio = drawn["v"][:, 0] / means["v"]  # of a weight without noise of its own: one number for each column
    assert (drawn["w"][0] - drawn["w"][1]).abs().max() > 0
    if kind == "dropout":
        torch.testing.assert_close(ratio.unique(), torch.tensor([0.0, 2.0]))
        whole = drawn["w"] / means["w"]
        torch.testing.assert_close(whole[:, 0], whole[:, 1])
    torch.testing.assert_close(law.draws(7, 3, seed=0)["w"], drawn["w"][7:10])


@pytest.mark.parametrize("kind", KINDS)
def test_in_training_each_example_has_noise_of_its_own(kind):
    torch.manual_seed(0)
    weight, x, rate = torch.randn(1, 5), torch.randn(1, 5).expand(60_000, 5), torch.tensor(0.2)
    noisy = with_noisy_inputs({"w": weight}, {"w": Site(1, 5)}, {"w": rate}, Noise(random.key(0), 0), kind)
    out = F.linear(x, noisy["w"])
    slack = 0.06 if kind == "concrete" else 0.02  # the relaxed mask is not quite Bernoulli
    torch.testing.assert_close(out.mean(0), (x[:1] @ weight.T)[0], atol=slack, rtol=0)
    variance = 0.25 * (x[0] * weight[0]).square().sum()
    torch.testing.assert_close(out.var(0)[0], variance, rtol=2 * slack, atol=0)
    assert len(out.unique()) > 20


@pytest.mark.parametrize(
    "op", [F.linear, F.conv1d, F.conv2d, F.conv_transpose2d], ids=["sequence", "conv1d", "conv2d", "transposed"]
)
def test_a_rate_for_each_unit_holds_for_its_channel(op):
    places = {F.linear: 0, F.conv1d: 1}.get(op, 2)
    x = torch.ones(4000, 5, 3) if op is F.linear else torch.ones(4000, 3, *[2] * places)
    shape = (3, 1) if op is F.conv_transpose2d else (1, 3)
    rates, seen = torch.tensor([1e-6, 0.2, 0.5]), []
    for unit in range(3):
        weight = torch.zeros(3).index_fill_(0, torch.tensor(unit), 1.0).view(*shape, *[1] * places)
        site = Site(shape.index(3), 3)
        noisy = with_noisy_inputs({"w": weight}, {"w": site}, {"w": rates}, Noise(random.key(0), 0), "gaussian")
        out = op(x, noisy["w"])
        assert torch.allclose(out, out[:, :1, ...] if op is F.linear else out[..., :1])  # one number for all places
        seen.append(out.flatten(1)[:, 0].var())
    torch.testing.assert_close(torch.stack(seen), rates / (1 - rates), rtol=0.1, atol=1e-5)


def test_gaussian_weights_may_have_noisy_inputs():
    mean, scale, x = torch.randn(1, 5), torch.rand(1, 5), torch.randn(1, 5).expand(60_000, 5)
    noise = Noise(random.key(1), 0)
    weight = gaussian(mean, scale, noise, "local", "w")
    out = F.linear(x, with_noisy_inputs({"w": weight}, {"w": Site(1, 5)}, {"w": torch.tensor(0.2)}, noise, "gaussian")["w"])
    expected = (x[0].square() * (0.25 * mean[0].square() + 1.25 * scale[0].square())).sum()
    torch.testing.assert_close(out.var(0)[0], expected, rtol=0.03, atol=0)


def test_the_inputs_of_a_product_are_those_that_are_summed_over():
    x, ways = torch.randn(6, 4), {}
    for name, function, shape in (
        ("right", lambda w: x @ w["w"], (4, 3)),
        ("left", lambda w: torch.matmul(w["w"], x.T), (3, 4)),
        ("layer", lambda w: F.linear(x, w["w"]), (3, 4)),
        ("nothing that is known", lambda w: torch.einsum("bi,io->bo", x, w["w"]), (4, 3)),
    ):
        ways[name] = survey(function, {"w": torch.randn(shape)})
    assert ways == {
        "right": {"w": Site(0, 4)},
        "left": {"w": Site(1, 4)},
        "layer": {"w": Site(1, 4)},
        "nothing that is known": {},
    }


@pytest.mark.parametrize("kind", [nn.RNNCell, nn.GRUCell, nn.LSTMCell])
def test_cells_of_recurrent_nets_have_inputs(kind):
    cell, x = kind(3, 4), torch.randn(2, 3)
    weights = {name: value for name, value in cell.named_parameters() if value.ndim == 2}
    sites = survey(lambda w: torch.func.functional_call(cell, w, (x,)), weights)
    assert sites == {"weight_ih": Site(1, 3), "weight_hh": Site(1, 4)}


def test_recurrent_weights_share_their_noise_over_time():
    rnn, x = nn.RNN(3, 4, batch_first=True), torch.randn(2, 5, 3)
    weights = {n: p for n, p in rnn.named_parameters() if p.ndim == 2}
    sites = survey(lambda w: torch.func.functional_call(rnn, w, (x,))[0], weights)
    assert sites == {"weight_ih_l0": Site(1, 3), "weight_hh_l0": Site(1, 4)}
    noise = Noise(random.key(0), 0)
    drawn = with_noisy_inputs(weights, sites, dict.fromkeys(sites, torch.tensor(0.5)), noise, "dropout")
    out = torch.func.functional_call(rnn, drawn, (x,))[0]
    same = torch.func.functional_call(rnn, {**noise.drawn}, (x,))[0]
    torch.testing.assert_close(out, same)
    columns = (noise.drawn["weight_hh_l0"] / weights["weight_hh_l0"])[0]
    assert set(columns.round().tolist()) <= {0.0, 2.0}


# ---------------------------------------------------------------------------------------------------------------------
# The methods


def test_the_first_layer_has_no_noise_unless_it_is_asked_for_or_the_only_one():
    x, y = torch.randn(30, 3), torch.randn(30, 1)
    assert list(pl.fit(small(), (x, y), pl.MCDropout(epochs=1), progress=False).law.sites) == ["2.weight", "4.weight"]
    chosen = pl.fit(small(), (x, y), pl.MCDropout(epochs=1, where="0.*"), progress=False)
    assert list(chosen.law.sites) == ["0.weight"]
    assert list(pl.fit(nn.Linear(3, 1), (x, y), pl.MCDropout(epochs=1), progress=False).law.sites) == ["weight"]


@pytest.mark.parametrize("method", [pl.MCDropout(rate=0.3), pl.GaussianDropout(rate=0.3)], ids=lambda m: m.name)
def test_the_rate_is_that_of_the_draws(method):
    from dataclasses import replace

    posterior = pl.fit(small(), (torch.randn(30, 3), torch.randn(30, 1)), replace(method, epochs=3), progress=False)
    ratio = posterior.weights(4000)["2.weight"][:, 0] / posterior.means["2.weight"][0]
    torch.testing.assert_close(ratio.var(0).mean(), torch.tensor(0.3 / 0.7), rtol=0.05, atol=0)
    assert "dropout 0.3" in str(posterior.summary())
    assert posterior.diagnostics()["kl"] is None


def test_precision_of_the_gaussian_process():
    assert pl.MCDropout.precision(0.1, 0.01, 400, 1e-5) == pytest.approx(0.9 * 1e-4 / (2 * 400 * 1e-5))


def test_entropy_of_a_mask():
    p = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    torch.testing.assert_close(entropy(p), torch.distributions.Bernoulli(p).entropy())


def test_the_concrete_bound_is_that_of_the_paper():
    """−l²(1 − p)/2·‖M‖² + K·H(p) with M = θ/(1 − p), and the likelihood; up to the prior's constant."""
    torch.manual_seed(0)
    x, y, length = torch.randn(8, 4), torch.randn(8, 1), 0.7
    method = pl.ConcreteDropout(initial_rate=0.25)
    network = nn.Linear(4, 1, bias=False)
    from plausible.core.data import Batch, as_data
    from plausible.core.model import Model
    from plausible.engine.method import Run

    likelihood, prior = pl.likelihoods.Gaussian(scale=1.0), pl.priors.Gaussian(scale=1 / length)
    model = Model.build(network, likelihood, prior, Batch(x, y), num_data=8)
    run = Run.alone(method, model, as_data((x, y), dtype=torch.float32, device="cpu"))
    parameters = method.parameters(model, run, random.key(0))
    terms = method.estimate(model, run, parameters, Batch(x, y), {}, random.key(0), torch.zeros((), dtype=torch.int64))
    theta = network.weight.detach()
    kl = length**2 * 0.75 / 2 * (theta / 0.75).square().sum() - 4 * entropy(torch.tensor(0.25))
    constant = 4 * 0.5 * math.log(length**2 / (2 * math.pi))
    torch.testing.assert_close(terms.bound - terms.info["log_likelihood"], constant - kl)


@pytest.mark.slow
def test_learned_rates_fall_with_the_number_of_rows():
    rates = []
    for rows in (50, 400, 3000):
        posterior = pl.fit(
            perceptron(nn.Linear(1, 30), nn.ReLU(), nn.Linear(30, 1)), sine(rows), pl.ConcreteDropout(), progress=False
        )
        rates.append(float(posterior.law.rates["2.weight"][0]))
    assert rates[0] > 1.3 * rates[1] > 1.3**2 * rates[2]


@pytest.mark.parametrize("name", ["mc-dropout", "gaussian-dropout", "concrete-dropout"])
def test_saved_posteriors_predict_the_same(name, tmp_path):
    x, y = torch.randn(40, 3), torch.randn(40, 1)
    net = small()
    posterior = pl.fit(net, (x, y), pl.methods.registry[name](epochs=3), progress=False)
    posterior.save(tmp_path / "run")
    loaded = pl.load(tmp_path / "run", net)
    assert torch.equal(loaded.functions(x, 5), posterior.functions(x, 5))
    assert loaded.method == posterior.method


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: pl.MCDropout(rate=0.0), "rate must be finite and above 0"),
        (lambda: pl.MCDropout(rate=1.0), "share of inputs that is dropped, below 1"),
        (lambda: pl.GaussianDropout(rate="much"), "rate must be a number"),
        (lambda: pl.ConcreteDropout(initial_rate=1.5), "initial_rate"),
        (lambda: pl.MCDropout(where=lambda name: True), "where must be a pattern"),
    ],
)
def test_settings_are_checked(make, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make()


def test_networks_without_inputs_to_drop_are_refused():
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

        def forward(self, x):
            return (x * self.scale).sum(1, keepdim=True)

    with pytest.raises(ValueError, match="no weight that is inferred has inputs that could be dropped"):
        pl.fit(Scale(), (torch.randn(20, 3), torch.randn(20, 1)), pl.MCDropout(epochs=1), progress=False)
