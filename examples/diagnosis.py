"""A diagnosis with costs: the same probabilities, four rules of acting on them, judged by what happened to the patients.

Wisconsin breast cancer data, fine-needle aspirates, 569 patients. Missing a tumour costs 50, an unneeded operation 5, a needed
one 1 and sending a healthy patient home nothing. A second look at the slide finds the truth and costs 2 on top.

Run: python examples/diagnosis.py [--quick]. Needs the extra `sklearn`, for the data.
"""

from __future__ import annotations

import math
import sys

import torch
from torch import Tensor, nn

import plausible as pl
from plausible import decisions

ACTIONS = ("send home", "operate")
COSTS = torch.tensor([[0.0, 50.0], [5.0, 1.0]], dtype=torch.float64)  # rows: actions; columns: benign, malignant
SECOND_LOOK = 2.0


def data(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Half of the patients to learn from, half to be judged on; y = 1 is malignant."""
    from sklearn.datasets import load_breast_cancer

    measured, benign = load_breast_cancer(return_X_y=True)
    x, y = torch.tensor(measured, dtype=torch.float32)[:, :10], 1 - torch.tensor(benign)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    train, test = order[: len(x) // 2], order[len(x) // 2 :]
    x = (x - x[train].mean(0)) / x[train].std(0)
    return x[train], y[train], x[test], y[test]


def outcomes(pred: pl.Predictive, y: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """For each rule what each patient cost, and who got a second look."""
    rules = {
        "operate on all": decisions.decide(pred, -COSTS[1:], actions=ACTIONS[1:]),
        "most probable class": decisions.decide(pred, torch.eye(2)),
        "least expected cost": decisions.decide(pred, -COSTS, actions=ACTIONS),
        "with a second look": decisions.decide(pred, -COSTS, actions=ACTIONS, reject=SECOND_LOOK),
    }
    found = {}
    for name, decision in rules.items():
        row = torch.ones_like(decision.action) if name == "operate on all" else decision.action.clamp(min=0)
        found_out = COSTS.amin(0)[y] + SECOND_LOOK
        found[name] = torch.where(decision.rejected, found_out, COSTS[row, y]), decision.rejected
    return found


def main(quick: bool = False) -> None:
    splits, epochs = (2, 5) if quick else (5, 40)
    costs: dict[str, list[float]] = {}
    looks: dict[str, list[float]] = {}
    worth = []
    for seed in range(splits):
        x, y, x_test, y_test = data(seed)
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 2))
        method = pl.Ensemble(pl.MAP(epochs=epochs, batch_size=64, lr=0.02), members=5)
        pred = pl.fit(net, (x, y), method, seed=seed, compile=False, progress=False).predict(x_test)
        for name, (cost, looked) in outcomes(pred, y_test).items():
            costs.setdefault(name, []).append(float(cost.mean()))
            looks.setdefault(name, []).append(float(looked.double().mean()))
        perfect = decisions.value_of_perfect_information(pred, -COSTS).mean()
        model = decisions.value_of_epistemic_information(pred, -COSTS).mean()
        worth.append((float(perfect), float(model)))

    means = {name: torch.tensor(values, dtype=torch.float64) for name, values in costs.items()}
    base = means["most probable class"]
    print(f"cost per patient, {splits} random halves of the data; differences are paired")
    print(f"{'rule':22}{'cost':>7}{'difference':>13}{'± s.e.':>8}{'second looks':>14}")
    for name, values in means.items():
        gap = values - base
        error = float(gap.std()) / math.sqrt(splits)
        share = sum(looks[name]) / splits
        print(f"{name:22}{float(values.mean()):7.2f}{float(gap.mean()):+13.2f}{error:8.2f}{share:14.1%}")
    perfect, model = torch.tensor(worth).mean(0).tolist()
    print(f"knowing the truth would be worth {perfect:.2f} per patient, knowing the right network {model:.2f} of it")


if __name__ == "__main__":
    main(quick="--quick" in sys.argv)
