"""Variational and sparse variational dropout: the exact KL, what is pruned, what is left."""

import math

import numpy as np
import pytest
import scipy.special
import torch
from torch import nn

import plausible as pl
from plausible.core.special import scale_free_kl
from plausible.methods.dropout.weight_noise import divergence
from plausible.posteriors import compression

EXACT = {-5: 3.131778, -3: 2.107978, -1: 0.914531, 0: 0.426686, 1: 0.173194, 3: 0.024688}


# ---------------------------------------------------------------------------------------------------------------------
# The KL


def test_the_exact_kl_at_the_published_values():
    log_alpha = torch.tensor(list(EXACT), dtype=torch.float64)
    torch.testing.assert_close(
        scale_free_kl(log_alpha), torch.tensor(list(EXACT.values()), dtype=torch.float64), atol=1e-6, rtol=0
    )
    torch.testing.assert_close(scale_free_kl(log_alpha.float()), scale_free_kl(log_alpha).float(), atol=1e-5, rtol=1e-5)


def test_the_exact_kl_is_an_expectation_and_goes_on_beyond_the_table():
    z = torch.randn(1_000_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for log_alpha in (-4.0, 0.0, 2.0):
        expected = (math.exp(-log_alpha / 2) + z).abs().log().mean() + (np.euler_gamma + math.log(2)) / 2
        assert float(scale_free_kl(torch.tensor(log_alpha, dtype=torch.float64))) == pytest.approx(float(expected), abs=4e-3)
    far = scale_free_kl(torch.tensor([-60.0, -30.0, 40.0], dtype=torch.float64))
    torch.testing.assert_close(far[0] - far[1], torch.tensor(15.0, dtype=torch.float64))
    assert float(far[2]) == pytest.approx(0, abs=1e-9)


def test_its_derivatives_are_right():
    grid = torch.linspace(-26, 20, 97, dtype=torch.float64)
    slopes = torch.func.vmap(torch.func.grad(scale_free_kl))(grid)
    ratio = (-0.5 * grid).exp().numpy() / math.sqrt(2)
    torch.testing.assert_close(slopes, torch.from_numpy(-ratio * scipy.special.dawsn(ratio)), atol=1e-7, rtol=1e-5)


def test_published_approximations_err_by_what_is_known():
    grid = torch.linspace(-7, 8, 400, dtype=torch.float64)
    gap = (divergence(grid, "molchanov") - divergence(grid)).abs().max()
    assert 0.009 < float(gap) < 0.0095
    below = torch.linspace(-7, 0, 400, dtype=torch.float64)
    difference = divergence(below, "kingma") - divergence(below)
    assert float(difference.max() - difference.min()) / 2 == pytest.approx(0.021, abs=0.002)
    assert float(difference[-1]) == pytest.approx(0, abs=1e-6)


def test_a_log_uniform_prior_has_its_expectation_in_closed_form():
    mean, scale = torch.tensor([0.3, -2.0, 0.0]), torch.tensor([0.5, 0.1, 1.0])
    drawn = mean + scale * torch.randn(2_000_000, 3, generator=torch.Generator().manual_seed(0))
    closed = pl.priors.LogUniform().expectation("w", mean, scale)
    assert float(closed) == pytest.approx(float(-drawn.abs().log().mean(0).sum()), abs=6e-3)
    assert pl.priors.LogUniform(0.1, 10.0).expectation("w", mean, scale) is None


# ---------------------------------------------------------------------------------------------------------------------
# The methods


def small(inputs=4, outputs=1):
    return nn.Sequential(nn.Linear(inputs, 10), nn.Tanh(), nn.Linear(10, outputs))


@pytest.mark.parametrize(("alpha", "count"), [("layer", 1), ("neuron", 4), ("weight", 40)])
def test_alpha_is_shared_as_asked(alpha, count):
    x, y = torch.randn(60, 4), torch.randn(60, 1)
    posterior = pl.fit(small(), (x, y), pl.VariationalDropout(alpha=alpha, epochs=100, patience=None), progress=False)
    log_alpha = 2 * (posterior.scales["0.weight"] / posterior.means["0.weight"].abs()).log()
    assert len(log_alpha.flatten().round(decimals=3).unique()) <= count
    assert (count == 1) == bool(log_alpha.std() < 1e-4)
    assert set(posterior.weights(2)) == {"0.weight", "2.weight"}
    assert posterior.log_evidence is not None


def test_kingmas_alpha_stays_below_one():
    x, y = torch.randn(60, 4), torch.randn(60, 1)
    posterior = pl.fit(small(), (x, y), pl.VariationalDropout(kl="kingma", epochs=200, lr=0.05, patience=None), progress=False)
    ratio = posterior.scales["0.weight"] / posterior.means["0.weight"].abs()
    assert float(ratio.max()) <= 1 + 1e-4
    free = pl.fit(small(), (x, y), pl.VariationalDropout(epochs=200, lr=0.05, patience=None), progress=False)
    assert float((free.scales["0.weight"] / free.means["0.weight"].abs()).max()) > 1.5  # of noise alone


def relevant(rows=1500, inputs=20):
    stream = torch.Generator().manual_seed(0)
    x = torch.randn(rows, inputs, generator=stream)
    return x, torch.sin(2 * x[:, :1]) + 0.5 * x[:, 1:2] ** 2 + 0.2 * torch.randn(rows, 1, generator=stream)


def wide(outputs=1):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 40), nn.ReLU(), nn.Linear(40, 30), nn.ReLU(), nn.Linear(30, outputs))


def left(posterior):
    return sum(int(mask.sum()) for mask in posterior.masks.values())


@pytest.mark.slow
def test_weights_that_say_nothing_go():
    x, y = relevant()
    posterior = pl.fit(wide(), (x, y), pl.SparseVD(epochs=600), progress=False)
    assert left(posterior) < 500
    used = posterior.masks["0.weight"].sum(0)
    assert int(used[:2].min()) >= 1.3 * float(used[2:].float().mean())
    assert float(posterior.predict(x).log_prob(y).mean()) > 0
    assert posterior.size_on_disk() < 4 * 2030 / 5


@pytest.mark.slow
def test_random_labels_end_constant():
    x, _ = relevant()
    labels = torch.randint(0, 4, (1500,), generator=torch.Generator().manual_seed(1))
    posterior = pl.fit(wide(4), (x, labels), pl.SparseVD(epochs=600), progress=False)
    assert left(posterior) <= 20
    probs = posterior.predict(x).probs
    assert float(probs.std(0).max()) < 0.01
    remembered = pl.fit(wide(4), (x, labels), pl.MCDropout(rate=0.1, epochs=600, patience=None), progress=False)
    assert float((remembered.predict(x).probs.argmax(1) == labels).float().mean()) > 0.6


@pytest.mark.slow
def test_groups_take_whole_units():
    x, y = relevant()
    posterior = pl.fit(wide(), (x, y), pl.SparseVD(epochs=600, groups=True), progress=False)
    for mask in posterior.masks.values():
        assert bool((mask == mask[:1]).all())  # whole columns
    inputs = posterior.masks["0.weight"][0].nonzero().flatten().tolist()
    assert inputs[:2] == [0, 1]
    assert len(inputs) <= 4
    module = posterior.compress()
    assert module[2].weight.numel() < 700


def test_groups_find_the_channels_of_images_that_matter():
    torch.manual_seed(0)
    x = torch.randn(400, 4, 4, 4)  # two of four channels
    y = (x[:, 0].sum((1, 2)) - x[:, 1].sum((1, 2)))[:, None] + 0.05 * torch.randn(400, 1)
    net = nn.Sequential(nn.Conv2d(4, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 1))
    method = pl.SparseVD(epochs=200, batch_size=None, lr=0.05, groups=True)
    posterior = pl.fit(net, (x, y), method, progress=False, compile=False)
    rates = posterior.law.rates["0.weight"]
    assert rates.shape == (4,)
    assert float(rates[:2].max()) < 1e-3 < float(rates[2:].min())


def test_groups_of_a_weight_that_two_layers_share():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)
            self.second.weight = self.first.weight

        def forward(self, x):
            return self.last(self.second(self.first(x).relu()).relu())

    torch.manual_seed(0)
    x, y = torch.randn(60, 4), torch.randn(60, 1)
    posterior = pl.fit(Tied(), (x, y), pl.SparseVD(epochs=2, groups=True), progress=False)
    assert posterior.functions(x, 3).isfinite().all()


@pytest.mark.parametrize("groups", [False, True])
def test_sparse_posteriors_are_saved_whole(groups, tmp_path):
    torch.manual_seed(0)
    x, y = torch.randn(60, 4), torch.randn(60, 1)
    net = small()
    threshold = -9.765 if groups else -6.0
    posterior = pl.fit(net, (x, y), pl.SparseVD(epochs=30, groups=groups, threshold=threshold), progress=False)
    assert 0 < left(posterior) < 50
    posterior.save(tmp_path / "run")
    loaded = pl.load(tmp_path / "run", net)
    assert torch.equal(loaded.functions(x, 5), posterior.functions(x, 5))
    for name, mask in loaded.masks.items():
        assert torch.equal(mask, posterior.masks[name])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: pl.VariationalDropout(alpha="unit"), "alpha must be"),
        (lambda: pl.VariationalDropout(kl="approximate"), "kl must be"),
        (lambda: pl.VariationalDropout(initial_alpha=0), "initial_alpha"),
        (lambda: pl.SparseVD(kl="kingma"), "where nothing is pruned"),
        (lambda: pl.SparseVD(threshold=9.0), "must lie below limit"),
        (lambda: pl.SparseVD(groups="no"), "groups must be True or False"),
        (lambda: pl.schedules.Ramp(end=0.01), "end"),
    ],
)
def test_settings_are_checked(make, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make()


def test_a_ramp_waits_and_rises():
    ramp = pl.schedules.Ramp(2.0, start=0.1, end=0.5)
    values = [float(ramp(torch.tensor(step), 100)) for step in (0, 10, 30, 50, 99)]
    assert values == pytest.approx([0, 0, 1, 2, 2])


# ---------------------------------------------------------------------------------------------------------------------
# Compression


def pruned(network, x, y, fraction=0.7, seed=0):
    """A posterior of which whole rows and columns were pruned, by hand."""
    posterior = pl.fit(network, (x, y), pl.SparseVD(epochs=2, threshold=7.9), progress=False)
    stream = torch.Generator().manual_seed(seed)
    masks = {}
    for name, mask in posterior.masks.items():
        rows = torch.rand(len(mask), generator=stream) > fraction / 2
        columns = torch.rand(mask.shape[1], generator=stream) > fraction / 2
        shape = [len(mask), mask.shape[1], *[1] * (mask.ndim - 2)]
        masks[name] = (rows[:, None] & columns).view(shape).expand_as(mask) & mask
    return posterior.masked(masks)


def functions_at_the_mean(posterior, x):
    outputs = posterior.model.outputs({**posterior.points, **posterior.means}, x)
    return posterior.likelihood.in_units(outputs).float()


CHAINS = {
    "dense": (
        lambda: nn.Sequential(nn.Linear(6, 20), nn.Sigmoid(), nn.Sequential(nn.Linear(20, 15), nn.Tanh()), nn.Linear(15, 2)),
        (6,),
    ),
    "images": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 10, 3), nn.Sigmoid(), nn.Flatten(), nn.Linear(40, 12),
            nn.ELU(),
            nn.Linear(12, 2)
        ),
        (1, 10, 10),
    ),
    "padded": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.Sigmoid(), nn.Conv2d(8, 6, 3, padding=1), nn.AvgPool2d(2, padding=1), nn.Flatten(),
            nn.Linear(6 * 9, 2)
        ),
        (1, 4, 4),
    ),
    "no bias": (lambda: nn.Sequential(nn.Linear(6, 20, bias=False), nn.Softplus(), nn.Linear(20, 2, bias=False)), (6,)),
}  # fmt: skip


@pytest.mark.parametrize("name", CHAINS)
def test_a_compressed_module_predicts_the_same_with_fewer_units(name):
    torch.manual_seed(0)
    make, shape = CHAINS[name]
    x, y = torch.randn(30, *shape), 5 + 3 * torch.randn(30, 2) * torch.tensor([1.0, 10.0])  # in units of its own
    posterior = pruned(make(), x, y)
    module = posterior.compress()
    torch.testing.assert_close(module(x), functions_at_the_mean(posterior, x), atol=1e-4, rtol=1e-4)
    before = sum(p.numel() for p in make().parameters())
    assert sum(p.numel() for p in module.parameters()) < 0.8 * before
    assert all(type(part).__module__.startswith("torch.nn") for part in module.modules())
    assert not module.training


MIXED = {
    "places before channels": (
        lambda: nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Flatten(), nn.Linear(20, 2)), (4, 3)
    ),
    "maps as rows": (
        lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(2), nn.Linear(16, 2), nn.Flatten(), nn.Linear(8, 2)),
        (1, 6, 6),
    ),
    "along the signal": (
        lambda: nn.Sequential(nn.Conv1d(2, 4, 3), nn.ReLU(), nn.Linear(4, 1), nn.Flatten(), nn.Linear(4, 2)), (2, 6)
    ),
    "pooled units": (lambda: nn.Sequential(nn.Linear(3, 16), nn.Sigmoid(), nn.MaxPool1d(3, 1, 1), nn.Linear(16, 2)), (3,)),
    "sums": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.Sigmoid(), nn.AvgPool2d(2, divisor_override=1), nn.Flatten(), nn.Linear(16, 2)
        ),
        (1, 6, 6),
    ),
    "units as places": (
        lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Conv1d(4, 2, 1), nn.Flatten(), nn.Linear(8, 2)), (4, 3)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MIXED)
def test_units_that_are_mixed_on_the_way_are_left_alone(name):
    torch.manual_seed(0)
    make, shape = MIXED[name]
    x, y = torch.randn(30, *shape), torch.randn(30, 2)
    posterior = pruned(make(), x, y, fraction=1.0)
    assert not all(bool(mask.all()) for mask in posterior.masks.values())
    torch.testing.assert_close(posterior.compress()(x), functions_at_the_mean(posterior, x), atol=1e-4, rtol=1e-4)


def test_a_network_that_is_no_chain_keeps_its_shape():
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.last = nn.Linear(6, 6), nn.Linear(6, 2)

        def forward(self, x):
            return self.last(x + torch.tanh(self.inner(x)))

    x, y = torch.randn(30, 6), 5 + torch.randn(30, 2)
    posterior = pruned(Residual(), x, y)
    module = posterior.compress()
    assert module[0].inner.weight.shape == (6, 6)
    assert torch.equal(module[1].weight != 0, torch.eye(2) != 0)  # back into the unit of y
    torch.testing.assert_close(module(x), functions_at_the_mean(posterior, x), atol=1e-4, rtol=1e-4)


def test_a_module_can_be_trained_on_after_compression():
    x, y = torch.randn(30, 6), torch.randn(30, 2)
    module = pruned(CHAINS["dense"][0](), x, y).compress()
    (module(x) - y).square().mean().backward()
    assert all(p.grad is not None for p in module.parameters())


def test_chains_cannot_be_one_module_and_a_point_can():
    x, y = torch.randn(30, 4), torch.randn(30, 1)
    network = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 1))
    point = pl.fit(network, (x, y), pl.MAP(epochs=5), likelihood=pl.likelihoods.Gaussian(), progress=False)
    torch.testing.assert_close(point.compress()(x), point.functions(x)[0])
    chain = pl.fit(small(), (x, y), pl.SGLD(epochs=20), progress=False)
    with pytest.raises(ValueError, match="one set of weights"):
        chain.compress()
    members = pl.fit(small(), (x, y), pl.Ensemble(pl.MAP(epochs=2), 2), progress=False)
    with pytest.raises(ValueError, match=r"one network, and this posterior has 2|one set of weights|no means"):
        members.compress()


@pytest.mark.parametrize("share", [0.0, 0.003, 0.5, 1.0])
def test_packed_modules_come_back(share):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(300, 40), nn.BatchNorm1d(40))
    with torch.no_grad():
        module[0].weight *= torch.rand(40, 300) < share
    state = compression.unpacked(compression.packed(module, half=False))
    assert state.keys() == module.state_dict().keys()
    for name, value in module.state_dict().items():
        assert torch.equal(state[name], value)
        assert state[name].dtype == value.dtype
    rounded = compression.unpacked(compression.packed(module))
    torch.testing.assert_close(rounded["0.weight"], module[0].weight.detach(), rtol=1e-3, atol=1e-6)
    assert len(compression.packed(module)) < len(compression.packed(module, half=False))


def test_damaged_bytes_are_refused():
    good = compression.packed(nn.Linear(3, 2))
    for bad in (b"", b"x" * 100, good[:40], good[:-5]):
        with pytest.raises(ValueError, match="not the bytes of a packed module"):
            compression.unpacked(bad)


@pytest.mark.slow
@pytest.mark.compile
@pytest.mark.parametrize(
    "method", [pl.SparseVD(epochs=20, groups=True), pl.VariationalDropout(epochs=20)], ids=["groups", "layer"]
)
def test_compiled_steps_are_those_of_eager_ones(method, compiler):
    x, y = torch.randn(60, 4, generator=torch.Generator().manual_seed(0)), torch.ones(60, 1)
    torch.manual_seed(0)
    net = small()
    eager, compiled = (pl.fit(net, (x, y), method, progress=False, compile=how) for how in (False, True))
    assert compiled.run["mode"] == "compiled"
    torch.testing.assert_close(compiled.means["0.weight"], eager.means["0.weight"], atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(compiled.scales["0.weight"], eager.scales["0.weight"], atol=1e-4, rtol=1e-3)
