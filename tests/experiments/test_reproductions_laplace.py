"""What the Laplace reproductions stand on: the wide limit, the choice of precisions, two predictives of one posterior."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import plausible as pl
from experiments import immer, in_between, last_layer
from experiments.running import Folder

Z = 4.5


# The wide limit


def test_the_kernel_has_its_known_values() -> None:
    """Lee et al. 2018: σ_w² = 2, σ_b² = 0 keep the diagonal; three layers take a correlation of 0.3 to 0.6758208545."""
    x = torch.tensor([[1.0, 0.0], [0.3, math.sqrt(1 - 0.09)]], dtype=torch.float64)
    found = in_between.kernel(x, x, 2.0, 0.0, depth=3)
    torch.testing.assert_close(found.diag(), torch.ones(2, dtype=torch.float64))
    assert float(found[0, 1]) == pytest.approx(0.6758208545, abs=1e-10)


def test_the_kernel_is_the_covariance_of_random_networks() -> None:
    """E f(x) f(x') is the same at every width; the standard error is that of the mean of products."""
    stream = torch.Generator().manual_seed(0)
    x = torch.tensor([[0.3, -1.0], [1.2, 0.4], [-0.7, -0.2]], dtype=torch.float64)
    weight, bias, count, units = 4.0, 1.0, 40_000, 3

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=stream, dtype=torch.float64)

    first = weight / math.sqrt(2) * normal(count, units, 2) @ x.T + bias * normal(count, units, 1)
    f = weight / math.sqrt(units) * (normal(count, 1, units) @ first.relu())[:, 0] + bias * normal(count, 1)
    products = f[:, :, None] * f[:, None, :]
    error = products.std(0) / math.sqrt(count)
    expected = in_between.kernel(x, x, weight**2, bias**2)
    assert float(((products.mean(0) - expected) / error).abs().max()) < Z


def test_the_limit_conditions_the_process_on_the_data() -> None:
    """Mean and deviation against the joint Gaussian of data and inputs, inverted as a whole."""
    settings = in_between.Clusters("curve", None)
    x, y = in_between.clusters("curve")
    at = torch.linspace(-1.5, 1.5, 7)[:, None]
    mean, std = in_between.limit(settings, (x, y), at)
    whole = in_between.kernel(torch.cat([x, at]), torch.cat([x, at]), 16.0, 1.0)
    noisy = whole[:100, :100] + 0.01 * torch.eye(100, dtype=torch.float64)
    gain = whole[100:, :100] @ torch.linalg.inv(noisy)
    torch.testing.assert_close(mean.double(), (gain @ y.double())[:, 0], rtol=1e-4, atol=1e-4)
    exact = (whole[100:, 100:] - gain @ whole[:100, 100:]).diag().sqrt()
    torch.testing.assert_close(std.double(), exact, rtol=1e-3, atol=1e-4)
    assert float(std[3]) > 10 * float(std[1])  # between the clusters and at one of them


def test_openings_are_ratios_of_deviations_seed_by_seed() -> None:
    results = {"curve-laplace": {"between": [3.0, 1.0], "at_data": [0.5, 2.0]}}
    assert in_between.opening("curve", "laplace")(results) == [6.0, 0.5]
    assert in_between.opening("curve", "mean-field")(results) is None


def test_the_truth_opens_in_the_stored_results(tiny: Callable[[str], Path]) -> None:
    from experiments import load

    results = Folder(tiny("in-between"), "in-between", "tiny").results(load("in-between"))
    (truth,) = in_between.opening("curve", "limit")(results)
    assert truth > 20
    assert len(results["curve-laplace"]["std"]) == len(results["curve-mean-field"]["std"]) == 2
    assert results["curve-mean-field"]["std"][0] != results["curve-mean-field"]["std"][1]
    assert len(results["curve-laplace"]["distance"]) == 2


# Two predictives of one posterior


@pytest.fixture(scope="module")
def posterior() -> pl.Posterior:
    torch.manual_seed(0)
    x = torch.randn(40, 2)
    y = (x[:, 0] + 0.5 * torch.randn(40) > 0).long() + (x[:, 1] > 0.8)
    method = pl.Laplace(structure="full", mode=pl.MAP(epochs=100, batch_size=None))
    return pl.fit(nn.Linear(2, 3), (x, y), method, prior=pl.priors.Gaussian(1.0), compile=False, progress=False)


def test_both_predictives_are_of_the_same_gaussian(posterior: pl.Posterior) -> None:
    """The draws of weights are the same, and of a linear model the functions too: there the predictives agree up to noise."""
    other = posterior.with_predictive("sampled")
    assert (posterior.predictive, other.predictive) == ("linearised", "sampled")
    x = torch.randn(6, 2)
    torch.testing.assert_close(other.functions(x, 20), posterior.functions(x, 20), rtol=1e-4, atol=1e-5)
    draws = 4000
    sampled = other.functions(x, draws, seed=3).softmax(-1)
    error = sampled.std(0) / math.sqrt(draws) + 1e-4  # the integral over classes is by nodes
    assert float(((posterior.predict(x).probs - sampled.mean(0)) / error).abs().max()) < Z
    with pytest.raises(ValueError, match=r"predictive must be one of 'linearised', .*, got 'glm'"):
        posterior.with_predictive("glm")


def test_the_mode_is_the_network_at_the_mean_weights(posterior: pl.Posterior) -> None:
    x = torch.randn(5, 2)
    logits = (x @ posterior.means["weight"].T + posterior.means["bias"]).double()
    torch.testing.assert_close(immer.at_mode(posterior, x), logits.softmax(-1), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(last_layer.at_mode(posterior, x, 2.0), (logits / 2).softmax(-1), rtol=1e-5, atol=1e-7)


# Choosing and splitting


def test_every_way_takes_the_precision_with_its_own_best_validation_score() -> None:
    def scores(validation: list[list[float]], test: list[list[float]]) -> dict:
        return {"validation": {"log_likelihood": validation}, "test": {"log_likelihood": test}}

    results = {
        "a": {
            "scores": {
                "kron, sampled": scores([[-3.0, -1.0], [-1.0, -2.0]], [[-30.0, -10.0], [-11.0, -21.0]]),
                "kron, linearised": scores([[-1.0, -2.0], [-1.0, -2.0]], [[-5.0, -6.0], [-7.0, -8.0]]),
            },
            "log_evidence": {"kron": [[1.0, 2.0], [1.0, 0.0]]},
        }
    }
    assert immer.chosen("a", "kron, sampled")(results) == [-10.0, -11.0]
    assert immer.gain("a", "kron")(results) == [5.0, 4.0]
    assert immer.same("a", "kron")(results) == [4.0, 4.0]
    assert immer.by_evidence("a", "kron", "linearised")(results) == [-6.0, -7.0]
    assert immer.wins(["a"], "kron", immer.gain)(results) == [1.0]
    assert immer.wins(["a", "b"], "kron", immer.gain)(results) is None
    assert immer.chosen("a", "full, sampled")(results) is None


def test_parts_are_disjoint_and_standardised_by_the_training_rows(data_folder: Path) -> None:
    settings = immer.Compared("neal_classes", shares=(0.25, 0.1))
    parts = immer.parts(settings, 1)
    assert {part: len(y) for part, (_, y) in parts.items()} == {"train": 350, "validation": 140, "test": 910}
    x = parts["train"][0].double()
    torch.testing.assert_close(x.mean(0), torch.zeros(4, dtype=torch.float64), rtol=0, atol=1e-6)
    torch.testing.assert_close(x.std(0, correction=0), torch.ones(4, dtype=torch.float64))
    raw = immer.table("neal_classes")[0].double()
    again = torch.cat([x for x, _ in parts.values()]).double()
    scale = raw[:, 0].std() / again[:, 0].std()
    torch.testing.assert_close((scale * again[:, 0]).sort().values.diff(), raw[:, 0].sort().values.diff(), rtol=1e-2, atol=1e-5)
    assert not torch.equal(parts["test"][1], immer.parts(settings, 2)["test"][1])
    assert sum(len(y) for _, y in immer.parts(replace(settings, rows=100), 1).values()) == 100


def test_sets_of_scikit_learn_and_marks_of_wines_are_classes(data_folder: Path) -> None:
    pytest.importorskip("sklearn")
    sizes = {name: (tuple(immer.table(name)[0].shape), immer.classes(name)) for name in ("iris", "digits", "red_wine")}
    assert sizes == {"iris": ((150, 4), 3), "digits": ((1797, 64), 10), "red_wine": ((1599, 11), 6)}


def test_validation_images_are_the_last_ones_and_the_last_layer_is_last(data_folder: Path) -> None:
    settings = last_layer.Convolutional(train=300, validation=100, test=50)
    parts = last_layer.images(settings)
    raw = pl.datasets.fashion_mnist()
    x = parts["train"][0].double()
    assert float(x.mean()) == pytest.approx(0, abs=1e-5)
    assert float(x.std()) == pytest.approx(1, abs=1e-5)
    assert torch.equal(parts["validation"][1], raw.train[1][-100:])
    assert torch.equal(parts["test"][1], raw.test[1][:50])
    with pytest.raises(ValueError, match=r"got 60,000 \+ 100 images"):
        last_layer.images(replace(settings, train=60_000))
    module = last_layer.network(settings)
    assert [name for name, _ in module.named_parameters()][-2:] == [f"{last_layer.LAST}.weight", f"{last_layer.LAST}.bias"]
