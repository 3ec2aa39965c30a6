"""Many weights as one vector, which is how a GPU gets them: the same steps as one by one."""

from typing import Any

import pytest
import torch
from torch import nn

import plausible as pl
from plausible.blocks import variational
from plausible.methods.natural import base as natural
from plausible.methods.variational import mean_field


@pytest.mark.parametrize(
    "method", [pl.MeanField(epochs=20, estimator="weights"), pl.IVON(epochs=20), pl.VOGN(epochs=20)], ids=lambda m: m.name
)
@pytest.mark.parametrize("prior", [None, pl.priors.Gaussian(0.5), pl.priors.Laplace()], ids=["default", "gaussian", "laplace"])
def test_joined_weights_take_the_same_steps(method: Any, prior: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 1))
    x, y = torch.randn(40, 4), torch.randn(40, 1)

    def fitted() -> Any:
        return pl.fit(net, (x, y), method, prior=prior, progress=False, compile=False)

    apart = fitted()
    for module in (variational, mean_field, natural):
        monkeypatch.setattr(module, "joins", lambda _: True)
    joined = fitted()
    for name in apart.means:
        torch.testing.assert_close(joined.means[name], apart.means[name], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(joined.scales[name], apart.scales[name], atol=1e-5, rtol=1e-4)
    assert joined.history["elbo"][-1] == pytest.approx(apart.history["elbo"][-1], rel=1e-4)
