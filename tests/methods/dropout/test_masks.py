"""MC dropout of networks that have dropout of their own: one draw is one function."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import plausible as pl


class Functional(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 12), nn.Linear(12, 2)

    def forward(self, x):
        return self.last(F.dropout(torch.relu(self.first(x)), 0.4, self.training))


class Attending(nn.Module):
    """Self-attention with dropout in its weights, by PyTorch's module or by the fused product."""

    def __init__(self, fused, batch_first=True):
        super().__init__()
        self.attention = None if fused else nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=batch_first)
        self.into, self.last, self.batch_first = nn.Linear(2, 8), nn.Linear(8, 2), batch_first

    def forward(self, x):
        h = self.into(x.view(len(x), 2, 2).expand(-1, -1, 2) if x.ndim == 2 else x)
        if self.attention is None:
            heads = h.view(len(h), 2, 2, 4).transpose(1, 2)
            h = F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.3 if self.training else 0.0, is_causal=True)
            return self.last(h.transpose(1, 2).reshape(len(x), 2, 8).mean(1))
        h = h if self.batch_first else h.transpose(0, 1)
        h = self.attention(h, h, h, need_weights=False)[0]
        return self.last((h if self.batch_first else h.transpose(0, 1)).mean(1))


class Attended(Attending):
    def forward(self, x):
        return super().forward(x.view(len(x), 2, 2))


def networks():
    images = nn.Unflatten(1, (2, 2, 1)), nn.Conv2d(2, 6, 1)
    return {
        "dropout": nn.Sequential(nn.Linear(4, 12), nn.ReLU(), nn.Dropout(0.4), nn.Linear(12, 2)),
        "functional": Functional(),
        "dropout1d": nn.Sequential(
            nn.Unflatten(1, (2, 2)), nn.Conv1d(2, 6, 1), nn.Dropout1d(0.4), nn.Flatten(), nn.Linear(12, 2)
        ),
        "dropout2d": nn.Sequential(*images, nn.Dropout2d(0.4), nn.Flatten(), nn.Linear(12, 2)),
        "dropout3d": nn.Sequential(
            nn.Unflatten(1, (2, 2, 1, 1)), nn.Conv3d(2, 6, 1), nn.Dropout3d(0.4), nn.Flatten(), nn.Linear(12, 2)
        ),
        "alpha": nn.Sequential(nn.Linear(4, 12), nn.SELU(), nn.AlphaDropout(0.3), nn.Linear(12, 2)),
        "feature alpha": nn.Sequential(*images, nn.SELU(), nn.FeatureAlphaDropout(0.3), nn.Flatten(), nn.Linear(12, 2)),
        "attention": Attended(fused=False),
        "time first": Attended(fused=False, batch_first=False),
        "fused attention": Attended(fused=True),
        "transformer": nn.Sequential(
            nn.Unflatten(1, (2, 2)),
            nn.Linear(2, 8),
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True),
            nn.Flatten(),
            nn.Linear(16, 2),
        ),
        "batch norm": nn.Sequential(nn.Linear(4, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.4), nn.Linear(12, 2)),
    }


NAMES = list(networks())


def fitted(name, epochs=2):
    torch.manual_seed(0)
    network = networks()[name]
    x, y = torch.randn(40, 4), torch.randn(40, 2)
    likelihood = pl.likelihoods.Gaussian()  # in the unit of the outputs
    return network, x, pl.fit(network, (x, y), pl.MCDropout(epochs=epochs), likelihood=likelihood, progress=False)


@pytest.mark.parametrize("name", NAMES)
def test_masks_have_the_law_of_pytorchs_own(name):
    """Mean and standard deviation of f(x) over masks, against PyTorch's passes in training mode (batch norm aside)."""
    network, x, posterior = fitted(name)
    network.load_state_dict(posterior.point, strict=False)
    for module in network.modules():
        module.training = not isinstance(module, nn.BatchNorm1d)
    torch.manual_seed(1)
    few, count = x[:3], 4000
    with torch.no_grad():
        passes = torch.stack([network(few) for _ in range(count)])
    draws = posterior.functions(few, count)
    error = passes.std(0) / count**0.5
    assert float(((draws.mean(0) - passes.mean(0)).abs() / (error + 1e-6)).max()) < 6
    torch.testing.assert_close(draws.std(0), passes.std(0), rtol=0.12, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_a_draw_is_one_function(name):
    _, x, posterior = fitted(name)
    again = torch.cat([x[:5], x[3:4], x[3:4]])
    draws = posterior.functions(again, 6)
    torch.testing.assert_close(draws[:, 5], draws[:, 3])  # the same input twice: the same value
    torch.testing.assert_close(draws[:, 6], draws[:, 3])
    assert bool((draws[0] != draws[1]).any())
    torch.testing.assert_close(posterior.functions(x[:5], 6), draws[:, :5])  # in whatever company
    torch.testing.assert_close(posterior.functions(x[3:4], 6), draws[:, 3:4])
    torch.testing.assert_close(posterior.functions(x, 2)[:, 3], draws[:2, 3])  # the first draws of more


def test_a_saved_posterior_draws_the_same_masks(tmp_path):
    network, x, posterior = fitted("transformer")
    posterior.save(tmp_path / "run")
    loaded = pl.load(tmp_path / "run", networks()["transformer"])
    assert torch.equal(loaded.functions(x, 4, seed=2), posterior.functions(x, 4, seed=2))
    assert not network.training or all(torch.isfinite(p).all() for p in network.parameters())
    assert posterior.predict(x).epistemic.min() > 0
    assert "trained under dropout" in str(posterior.summary())
    weights = posterior.weights(3)
    assert all(torch.equal(draws[0], draws[2]) for draws in weights.values())


def test_parts_of_inputs_and_ensembles_see_whole_functions():
    _, x, posterior = fitted("dropout")
    torch.testing.assert_close(posterior.predict(x, 10, batch_size=7).mean, posterior.predict(x, 10).mean)
    ensemble = pl.fit(networks()["dropout"], (x, torch.randn(40, 2)), pl.Ensemble(pl.MCDropout(epochs=2), 2), progress=False)
    assert ensemble.predict(x).mean.shape == (40, 2)


def test_dropout_that_cannot_be_held_is_refused():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.last = nn.LSTM(2, 5, num_layers=2, dropout=0.5, batch_first=True), nn.Linear(5, 1)

        def forward(self, x):
            return self.last(self.rnn(x)[0][:, -1])

    with pytest.raises(ValueError, match="between the layers of a recurrent module"):
        pl.fit(Recurrent(), (torch.randn(20, 3, 2), torch.randn(20, 1)), pl.MCDropout(epochs=1), progress=False)


def test_own_dropout_and_a_rate_are_refused_together():
    with pytest.raises(ValueError, match="the network has dropout of its own"):
        pl.fit(networks()["dropout"], (torch.randn(20, 4), torch.randn(20, 2)), pl.MCDropout(rate=0.1), progress=False)
