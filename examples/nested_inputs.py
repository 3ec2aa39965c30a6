"""Dict inputs, a structured output, missing targets and example weights, in one small regression.

Rents and prices of flats from two measurements and a district. Some prices were never observed (NaN), and some rows are
known to be unreliable (weight below 1).

Run: python examples/nested_inputs.py [--quick].
"""

from __future__ import annotations

import sys
from typing import NamedTuple

import torch
from torch import Tensor, nn

import plausible as pl


class Outcome(NamedTuple):
    """What the network returns: the predictions, and something that inference should not look at."""

    values: Tensor
    hidden: Tensor


class Flats(nn.Module):
    """Measurements [N, 2] and district numbers [N] → rent and price [N, 2]."""

    def __init__(self, districts: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(districts, 4)
        self.body = nn.Sequential(nn.Linear(2 + 4, 32), nn.Tanh())
        self.head = nn.Linear(32, 2)

    def forward(self, measurements: Tensor, district: Tensor) -> Outcome:
        """The names of the arguments are the keys of the inputs."""
        hidden = self.body(torch.cat([measurements, self.embedding(district)], 1))
        return Outcome(self.head(hidden), hidden)


def data(count: int = 300, districts: int = 6) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    measurements = torch.randn(count, 2, generator=generator)
    district = torch.randint(districts, (count,), generator=generator)
    level = torch.linspace(-1, 1, districts)[district]
    rent = level + measurements[:, 0] + 0.1 * torch.randn(count, generator=generator)
    price = 2 * level + measurements.sum(1).tanh() + 0.3 * torch.randn(count, generator=generator)
    y = torch.stack([rent, price], 1)
    y[torch.rand(count, generator=generator) < 0.4, 1] = torch.nan  # prices that nobody observed
    weights = torch.ones(count)
    weights[:30] = 0.2  # rows that are known to be unreliable
    return {"measurements": measurements, "district": district}, y, weights


def main(quick: bool = False) -> None:
    x, y, weights = data()
    posterior = pl.fit(
        Flats(districts=6),
        (x, y, weights),
        pl.Ensemble(pl.MAP(epochs=5 if quick else 100, lr=0.02), members=4),
        likelihood=pl.likelihoods.Gaussian(scale="per-output"),
        output=lambda outcome: outcome.values,
        mask="nan",
    )
    pred = posterior.predict({name: part[:5] for name, part in x.items()})
    low, high = pred.interval(0.9)
    for name, column in (("rent", 0), ("price", 1)):
        print(f"{name}: mean and 90 % interval of five flats")
        for row in range(5):
            print(f"  {pred.mean[row, column]:6.2f}   {low[row, column]:6.2f} to {high[row, column]:6.2f}")
    noise = posterior.weights()["likelihood.log_scale"].exp().mean(0)
    print(f"learned noise: rent {noise[0]:.2f} (0.1 was used), price {noise[1]:.2f} (0.3 was used)")

    posterior.save("flats", overwrite=True)
    again = pl.load("flats", Flats(districts=6), output=lambda outcome: outcome.values)  # code is never in the file
    same = torch.equal(again.functions(x), posterior.functions(x))
    print("saved, loaded, the same functions:", same)


if __name__ == "__main__":
    main(quick="--quick" in sys.argv)
