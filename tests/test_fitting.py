"""`fit`: what it infers and says, seeds, weights and masks in whole runs, models, going on from before, and bad input."""

from __future__ import annotations

import copy
import inspect
import json
import logging
import math
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import polars
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import plausible as pl
from plausible import likelihoods, priors
from plausible.core.data import Batch
from plausible.core.likelihoods import unscaled
from plausible.core.schedules import Cosine
from plausible.engine import Checkpoint
from plausible.fitting import choose_device, continuing

N = 24
NAN = float("nan")


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def linear(inputs: int = 2, outputs: int = 1) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(inputs, outputs)


def mlp(inputs: int = 2, outputs: int = 1, width: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, outputs))


X, Y = randn(N, 2), randn(N, 1, seed=1) + randn(N, 2)[:, :1]
CLASSES = torch.arange(N) % 3
SHORT = pl.MAP(epochs=2, batch_size=8, lr=0.01)
STILL = pl.MAP(epochs=1, batch_size=None, lr=1e-12)  # a method that stays where it starts


def fit(network: Any, data: Any, method: Any = SHORT, **settings: Any) -> Any:
    return pl.fit(network, data, method, **{"compile": False, "progress": False, **settings})


def same(a: Any, b: Any) -> bool:
    one, two = a.weights(), b.weights()
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


# ---------------------------------------------------------------------------------------------------------------------
# What is inferred, and said


@pytest.mark.parametrize(
    ("y", "outputs", "likelihood", "kind"),
    [
        (Y, 1, "Gaussian", "float32"),
        (Y.double().numpy(), 1, "Gaussian", "float32"),
        (CLASSES, 3, "Categorical", "int64"),
        (CLASSES.numpy().astype(np.uint8), 3, "Categorical", "int64"),
        (CLASSES.tolist(), 3, "Categorical", "int64"),
        (pandas.Series(CLASSES.tolist(), dtype=object), 3, "Categorical", "int64"),
        (polars.Series(CLASSES.tolist()), 3, "Categorical", "int64"),
        (Y > 0, 1, "Bernoulli", "bool"),
        (pandas.DataFrame((Y > 0).numpy()), 1, "Bernoulli", "bool"),
    ],
)
def test_the_likelihood_is_inferred_and_said_once(
    y: Any, outputs: int, likelihood: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "plausible"):
        posterior = fit(linear(outputs=outputs), (X, y))
    assert type(unscaled(posterior.likelihood)).__name__ == likelihood
    lines = [record.getMessage() for record in caplog.records]
    assert [line for line in lines if "likelihood" in line] == [
        f"likelihood: {posterior.likelihood}, inferred from targets of type {kind}"
    ]
    assert [line for line in lines if "prior" in line] == ["prior: Default(), the default"]
    assert posterior.model.prior == priors.Default()


def test_what_is_given_is_not_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "plausible"):
        fit(linear(), (X, Y), likelihood=likelihoods.Gaussian(0.5), prior=priors.Laplace())
    assert not [r for r in caplog.records if "likelihood" in r.getMessage() or "prior" in r.getMessage()]


def test_methods_by_name() -> None:
    named = fit(linear(), (X[:4], Y[:4]), "map")
    assert named.method == pl.MAP()
    assert same(named, fit(linear(), (X[:4], Y[:4]), pl.MAP()))
    with pytest.raises(ValueError, match=r"unknown method 'sgdl'; did you mean 'sgld'\? known methods: "):
        fit(linear(), (X, Y), "sgdl")
    with pytest.raises(TypeError, match=r"got the class MAP; write MAP\(\)"):
        fit(linear(), (X, Y), pl.MAP)
    with pytest.raises(TypeError, match="method must be a Method or its name, got int"):
        fit(linear(), (X, Y), 3)


@pytest.mark.parametrize(("scale", "loc"), [(1.5, 0.0), (0.7, 0.4), (1e4, 1e6)])
def test_targets_in_any_unit_have_the_same_answer(scale: float, loc: float) -> None:
    y = Y.double()
    one, other = (fit(mlp(), (X, targets)).predict(X) for targets in (y, loc + scale * y))
    torch.testing.assert_close(other.mean, loc + scale * one.mean, rtol=1e-5, atol=1e-4 * scale)
    torch.testing.assert_close(other.std, scale * one.std, rtol=1e-4, atol=0)


def test_a_likelihood_that_is_given_is_not_rescaled() -> None:
    given = likelihoods.Gaussian()
    assert fit(mlp(), (X, 1.5 * Y + 3), likelihood=given).likelihood == given
    centred = (Y - Y.mean()) / Y.std(correction=0)
    assert fit(mlp(), (X, centred)).likelihood == given  # standardised already


def test_the_summary_says_what_became_of_each_weight() -> None:
    network = mlp()
    network[0].bias.requires_grad_(False)
    text = str(fit(network, (X, Y), where="last", likelihood=likelihoods.Gaussian()).summary())
    rows = {line.split()[0]: " ".join(line.split()[2:]) for line in text.splitlines()[2:]}
    assert rows == {
        "0.weight": "trained as a point",
        "0.bias": "fixed",
        "2.weight": "inferred",
        "2.bias": "inferred",
        "likelihood.log_scale": "inferred",
    }
    assert re.search(r"MAP posterior, Gaussian likelihood, 24 examples", text)
    assert "1×4" in text
    assert "scalar" in text


def test_callbacks_hear_of_every_step() -> None:
    heard: list[tuple[int, dict[str, float]]] = []
    posterior = fit(linear(), (X, Y), SHORT, callbacks=[lambda step, info: heard.append((step, info))])
    assert [step for step, _ in heard] == [1, 2, 3, 4, 5, 6]
    for _, info in heard:
        assert set(info) == {"log_joint", "log_likelihood", "log_prior"}
        assert all(isinstance(value, float) for value in info.values())
        assert info["log_joint"] == pytest.approx(info["log_likelihood"] + info["log_prior"], rel=1e-5)
    mean = sum(info["log_joint"] for _, info in heard[:3]) / 3
    assert posterior.history["log_joint"][0] == pytest.approx(mean, rel=1e-5)
    quiet = fit(linear(), (X, Y), SHORT)
    assert same(posterior, quiet)
    for bad in (print, [3], ["print"]):
        with pytest.raises(TypeError, match="callbacks must be a sequence of functions"):
            fit(linear(), (X, Y), callbacks=bad)


def test_a_callbacks_own_error_comes_through_and_leaves_the_generator_alone() -> None:
    def stop(step: int, info: dict[str, float]) -> None:
        raise RuntimeError(f"enough at {step}")

    network = linear()
    state = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="enough at 1"):
        fit(network, (X, Y), callbacks=[stop])
    assert torch.equal(torch.get_rng_state(), state)


def test_moving_to_a_device_keeps_everything() -> None:
    network = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))
    for method in (SHORT, pl.Ensemble(SHORT, members=2), pl.SGLD(epochs=4, lr=1e-4)):
        posterior = fit(network, (X, Y), method)
        moved = posterior.to("cpu")
        assert moved is not posterior
        assert same(posterior, moved)
        assert torch.equal(posterior.functions(X), moved.functions(X))
        assert moved.history == posterior.history
        assert moved.device == torch.device("cpu")
        assert moved.summary() == posterior.summary()


# ---------------------------------------------------------------------------------------------------------------------
# Seeds


@pytest.mark.parametrize("method", [SHORT, pl.SGLD(epochs=4, batch_size=8, lr=1e-3), pl.Ensemble(SHORT, members=2)])
def test_the_seed_decides(method: Any) -> None:
    network = mlp()
    state = torch.get_rng_state()
    first = fit(network, (X, Y), method, seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(123)
    assert same(first, fit(network, (X, Y), method, seed=3))
    assert same(first, fit(network, (X, Y), method, seed=np.int64(3)))
    assert not same(first, fit(network, (X, Y), method, seed=4))
    assert same(fit(network, (X, Y), method, seed=2**70), fit(network, (X, Y), method, seed=2**70))


@pytest.mark.parametrize("seed", [-1, 1.5, "0", None, True])
def test_bad_seeds_are_refused(seed: Any) -> None:
    with pytest.raises(ValueError, match="seed must be a whole number of at least 0"):
        fit(linear(), (X, Y), seed=seed)


# ---------------------------------------------------------------------------------------------------------------------
# Whole runs against closed forms

CONVERGED = pl.MAP(epochs=400, batch_size=None, lr=Cosine(0.1))


def ridge(x: Tensor, y: Tensor, weight: Tensor, noise: float = 0.5) -> Tensor:
    """argmax of Σ wᵢ log N(yᵢ; xᵢ·b, noise²) + log N(b; 0, I)."""
    x, y, weight = x.double(), y.double(), weight.double()
    precision = (x.T * weight) @ x / noise**2 + torch.eye(x.shape[1], dtype=torch.float64)
    return torch.linalg.solve(precision, (x.T * weight) @ y / noise**2).T.float()


def bare(outputs: int = 1) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(2, outputs, bias=False)


def test_example_weights_in_a_run() -> None:
    weight = torch.rand(N, generator=torch.Generator().manual_seed(2)) * 3
    settings: dict[str, Any] = {"likelihood": likelihoods.Gaussian(0.5), "prior": priors.Gaussian()}
    found = fit(bare(), (X, Y, weight), CONVERGED, **settings).weights()["weight"][0]
    torch.testing.assert_close(found, ridge(X, Y, weight), atol=2e-3, rtol=0)
    assert float((ridge(X, Y, weight) - ridge(X, Y, torch.ones(N))).abs().max()) > 0.02
    twice = fit(bare(), (torch.cat([X, X]), torch.cat([Y, Y])), CONVERGED, **settings).weights()["weight"][0]
    torch.testing.assert_close(twice, ridge(X, Y, torch.full((N,), 2.0)), atol=2e-3, rtol=0)


@pytest.mark.parametrize("kind", ["nan", "boolean", "dataset", "loader"])
def test_masked_targets_in_a_run(kind: str) -> None:
    """Each output is a regression of its own on the rows where it was observed."""
    y = torch.cat([Y, 1 - 2 * Y], 1)
    mask = torch.rand(N, 2, generator=torch.Generator().manual_seed(5)) < 0.6
    hidden = torch.where(mask, y, torch.full_like(y, NAN))
    data: Any = (X, hidden)
    method = CONVERGED
    if kind == "dataset":
        data = list(zip(X, hidden))

        class Rows(torch.utils.data.Dataset):
            def __len__(self) -> int:
                return N

            def __getitem__(self, i: int) -> Any:
                return X[i], hidden[i]

        data = Rows()
        method = pl.MAP(epochs=400, batch_size=N, lr=Cosine(0.1))
    if kind == "loader":
        data = DataLoader(TensorDataset(X, hidden), batch_size=N)
        method = pl.MAP(epochs=400, lr=Cosine(0.1))
    settings: dict[str, Any] = {"likelihood": likelihoods.Gaussian(0.5), "prior": priors.Gaussian()}
    settings["mask"] = mask.numpy() if kind == "boolean" else "nan"
    found = fit(bare(2), data, method, **settings).weights()["weight"][0]
    for k in range(2):
        expected = ridge(X, y[:, k : k + 1], mask[:, k].float())
        torch.testing.assert_close(found[k : k + 1], expected, atol=2e-3, rtol=0)
    with pytest.raises(ValueError, match=r"y contains .* NaN at .*mask='nan'"):
        fit(bare(2), data, method)


def test_the_number_of_data_of_a_stream_scales_the_likelihood() -> None:
    """num_data=4N in a stream of N rows: each row counts four times."""

    class Rows(torch.utils.data.IterableDataset):
        def __iter__(self) -> Any:
            return iter(zip(X, Y))

    method = pl.MAP(epochs=100, lr=Cosine(0.1))  # four passes an epoch
    settings: dict[str, Any] = {"likelihood": likelihoods.Gaussian(0.5), "prior": priors.Gaussian(0.2)}
    found = fit(bare(), DataLoader(Rows(), batch_size=N), method, num_data=4 * N, **settings).weights()["weight"][0]
    x, y = X.double(), Y.double()
    precision = 4 * x.T @ x / 0.25 + torch.eye(2) / 0.04
    expected = torch.linalg.solve(precision, 4 * x.T @ y / 0.25).T.float()
    torch.testing.assert_close(found, expected, atol=2e-3, rtol=0)


def last_states(network: Any, data: Any, lr: float, **settings: Any) -> Tensor:
    """A thousand independent chains of one weight, the last state of each."""
    method = pl.SGLD(epochs=60, batch_size=None, lr=lr, burn_in=0.98, thin=1)
    posterior = fit(network, data, pl.Ensemble(method, members=1000, init="given"), **settings)
    return posterior.weights()["weight"].flatten().double()


@pytest.mark.parametrize("temperature", [0.25, 1.0, 3.0])
def test_a_tempered_model_has_a_posterior_of_that_temperature(temperature: float) -> None:
    """Precision Λ/T, known bias 1/(1 − εΛ/4T) of the step, 1000 independent chains: five standard errors."""
    x, y = X[:, :1], Y
    network = nn.Linear(1, 1, bias=False)
    batch = Batch(x, y)
    model = pl.Model.build(network, likelihoods.Gaussian(1.0), priors.Gaussian(1.0), batch, num_data=N)
    precision = float((x * x).sum()) + 1
    lr = 0.4 * temperature / precision
    draws = last_states(model.tempered(temperature), (x, y), lr)
    variance = temperature / precision / (1 - 0.1)
    mean = float((x * y).sum()) / precision
    assert abs(float(draws.mean()) - mean) < 5 * math.sqrt(variance / 1000)
    assert abs(float(draws.var()) / variance - 1) < 5 * math.sqrt(2 / 1000)


# ---------------------------------------------------------------------------------------------------------------------
# A Model instead of a module


def model_of(network: nn.Module, **settings: Any) -> pl.Model:
    return pl.Model.build(network, likelihoods.Gaussian(), priors.Gaussian(1.0), Batch(X, Y), num_data=N, **settings)


def test_a_model_is_taken_as_it_is() -> None:
    network = mlp()
    assert same(
        fit(model_of(network), (X, Y)), fit(network, (X, Y), prior=priors.Gaussian(), likelihood=likelihoods.Gaussian())
    )
    last = fit(model_of(network, where="last"), (X, Y))
    assert list(last.weights()) == ["2.weight", "2.bias", "likelihood.log_scale"]
    model = model_of(network)
    before = copy.deepcopy(model.initial)
    fit(model, (X, Y), pl.Ensemble(SHORT, members=2))
    assert all(torch.equal(before[name], model.initial[name]) for name in before)
    assert model.num_data == N


@pytest.mark.parametrize(
    "extra",
    [
        {"likelihood": likelihoods.Gaussian()},
        {"prior": priors.Gaussian()},
        {"where": "last"},
        {"output": lambda f: f},
        {"precision": "bfloat16"},
    ],
    ids=lambda e: next(iter(e)),
)
def test_a_model_brings_its_own_settings(extra: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="a Model brings its own"):
        fit(model_of(linear()), (X, Y), **extra)


def test_a_model_must_fit_the_data() -> None:
    with pytest.raises(ValueError, match="made for 24 examples and data has 20"):
        fit(model_of(linear()), (X[:20], Y[:20]))
    with pytest.raises(ValueError, match=r"network could not be run on the inputs x \(shape \(8, 1\)"):
        fit(model_of(linear()), (X[:, :1], Y))
    with pytest.raises(ValueError, match=r"y\.unsqueeze"):
        fit(model_of(linear()), (X, Y[:, 0]))


# ---------------------------------------------------------------------------------------------------------------------
# Going on from an earlier posterior


def start_of(init: Any, members: int | None = None, **settings: Any) -> dict[str, Tensor]:
    """Where a run begins that goes on from `init`."""
    method = STILL if members is None else pl.Ensemble(STILL, members=members)
    return fit(settings.pop("network", mlp()), (X, Y), method, init=init, **settings).weights()


def test_going_on_from_a_point() -> None:
    first = fit(mlp(), (X, Y), pl.MAP(epochs=30, lr=0.05))
    for name, weight in start_of(first).items():
        torch.testing.assert_close(weight, first.weights()[name])
    chain = fit(mlp(), (X, Y), pl.SGLD(epochs=2, batch_size=None, lr=1e-12, burn_in=0, thin=1), init=first)
    for name, weight in chain.weights().items():
        torch.testing.assert_close(weight, first.weights()[name].expand_as(weight), atol=1e-4, rtol=1e-4)
    members = start_of(first, members=3)
    for name, weight in members.items():
        torch.testing.assert_close(weight, first.weights()[name].expand_as(weight))


def test_going_on_from_the_mode_keeps_it() -> None:
    settings: dict[str, Any] = {"likelihood": likelihoods.Gaussian(0.5), "prior": priors.Gaussian()}
    there = fit(bare(), (X, Y), CONVERGED, **settings)
    again = fit(bare(), (X, Y), pl.MAP(epochs=20, batch_size=None, lr=Cosine(1e-3)), init=there, **settings)
    torch.testing.assert_close(again.weights()["weight"][0], ridge(X, Y, torch.ones(N)), atol=5e-3, rtol=0)


def test_every_member_goes_on_from_its_own_place() -> None:
    first = fit(mlp(), (X, Y), pl.Ensemble(SHORT, members=3))
    for name, weight in start_of(first, members=3).items():
        torch.testing.assert_close(weight, first.weights()[name])
    single = start_of(first)
    for name, weight in single.items():
        torch.testing.assert_close(weight[0], first.weights()[name][-1])
    chains = fit(mlp(), (X, Y), pl.Ensemble(pl.SGLD(epochs=4, batch_size=None, lr=1e-3, burn_in=0, thin=1), members=2))
    assert len(chains) == 8
    for name, weight in start_of(chains, members=2).items():
        torch.testing.assert_close(weight, chains.weights()[name][-2:])  # the last state of each chain


def test_members_start_at_draws_spread_over_a_chain() -> None:
    chain = fit(mlp(), (X, Y), pl.SGLD(epochs=10, batch_size=None, lr=1e-3, burn_in=0, thin=1))
    assert len(chain) == 10
    for members, rows in ((None, [9]), (1, [9]), (2, [4, 9]), (5, [1, 3, 5, 7, 9])):
        for name, weight in start_of(chain, members).items():
            torch.testing.assert_close(weight, chain.weights()[name][rows])


def test_running_statistics_go_on_too() -> None:
    network = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))
    first = fit(network, (X + 3, Y), pl.MAP(epochs=5, batch_size=None))
    second = fit(network, (X + 3, Y), pl.MAP(epochs=5, batch_size=None), init=first)
    stored = second.store.get([0], "cpu")
    assert int(stored["0.num_batches_tracked"]) == 10
    torch.testing.assert_close(stored["0.running_mean"][0], (1 - 0.9**10) * (X + 3).mean(0))


def test_going_on_keeps_the_networks_type() -> None:
    first = fit(mlp().double(), (X, Y))
    start = start_of(first)
    assert all(weight.dtype == torch.float32 for weight in start.values())
    torch.testing.assert_close(start["0.weight"], first.weights()["0.weight"].float())


def test_another_where_or_noise_can_go_on() -> None:
    first = fit(mlp(), (X, Y), where="last")  # the points of the first run are part of its state
    everything = start_of(first)
    torch.testing.assert_close(everything["0.weight"], first.store.get([0], "cpu")["0.weight"])
    known = start_of(first, likelihood=likelihoods.Gaussian(0.5))
    assert "likelihood.log_scale" not in known
    torch.testing.assert_close(known["0.weight"], everything["0.weight"])


def test_what_does_not_fit_is_refused() -> None:
    first = fit(mlp(), (X, Y))
    with pytest.raises(ValueError, match=r"'0\.weight' has shape \(4, 2\) there, expected shape \(5, 2\)"):
        start_of(first, network=mlp(width=5))
    with pytest.raises(ValueError, match="'weight' is missing there"):
        start_of(first, network=linear())
    fixed = fit(mlp(), (X, Y), likelihood=likelihoods.Gaussian(0.5))
    assert "likelihood.log_scale" not in start_of(fixed)  # the likelihood goes on too
    learned = start_of(fixed, likelihood=likelihoods.Gaussian())
    assert float(learned["likelihood.log_scale"]) == pytest.approx(0.0, abs=1e-4)  # where it would start anyway
    frozen = mlp()
    frozen[0].requires_grad_(False)  # holds the values of the module, not those that were learned
    with pytest.raises(ValueError, match=r"'0\.weight' was learned there and is fixed here.*where="):
        start_of(first, network=frozen)
    for bad in (mlp(), {"0.weight": X}, "run"):
        with pytest.raises(TypeError, match="init must be an earlier Posterior"):
            start_of(bad)
    model, starts = continuing(first.model, first)
    assert set(starts) == {*model.initial, *model.buffers}


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints: what belongs to a run


class Offset(nn.Module):
    """Has a frozen scalar and a constant buffer."""

    def __init__(self, constant: float = 1.0, frozen: float = 2.0):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(2, 1)
        self.frozen = nn.Parameter(torch.tensor(frozen), requires_grad=False)
        self.register_buffer("constant", torch.tensor(constant))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.frozen + self.constant


def test_a_checkpoint_belongs_to_its_run(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "run"
    law: dict[str, Any] = {"likelihood": likelihoods.Gaussian()}  # which does not follow the data
    first = fit(Offset(), (X, Y), checkpoint=folder, **law)
    assert (folder / "checkpoint.json").exists()
    assert same(first, fit(Offset(), (X, Y), checkpoint=str(folder), **law))
    assert same(first, fit(Offset(), (X, Y), checkpoint=Checkpoint(folder, steps=1), **law))
    changed = X.clone()
    changed[3, 0] += 1e-3
    others: list[tuple[Any, Any, dict[str, Any], str]] = [
        (Offset(constant=1.5), (X, Y), {}, "fixed was"),
        (Offset(frozen=2.5), (X, Y), {}, "fixed was"),
        (Offset(), (changed, Y), {}, "data was"),
        (Offset(), (X[:20], Y[:20]), {}, "data was"),
        (Offset(), (X, Y, torch.ones(N)), {}, "data was"),
        (Offset(), (X, Y), {"seed": 1}, "seed was 0 and is now 1"),
        (Offset(), (X, Y), {"prior": priors.Gaussian(2.0)}, "prior.type was 'priors.Default' and is now 'priors.Gaussian'"),
        (Offset(), (X, Y), {"where": "layer.weight"}, "random was"),
        (Offset(), (X, Y), {"likelihood": likelihoods.Gaussian(1.0)}, "likelihood"),
        (Offset(), (X, Y), {"method": pl.MAP(epochs=3, batch_size=8, lr=0.01)}, "method.*epochs.* was 2 and is now 3"),
    ]
    content = (folder / "checkpoint.json").read_bytes()
    for network, data, settings, message in others:
        method = settings.pop("method", SHORT)
        with pytest.raises(ValueError, match=f"belongs to another run: .*{message}"):
            fit(network, data, method, checkpoint=folder, **{**law, **settings})
    assert (folder / "checkpoint.json").read_bytes() == content


def test_folders_that_cannot_be_used_are_refused_before_any_work(tmp_path: Path) -> None:
    steps: list[int] = []
    settings: dict[str, Any] = {"callbacks": [lambda step, info: steps.append(step)]}
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("dear diary")
    with pytest.raises(FileExistsError, match=r"checkpoint=.*thesis.* holds no checkpoint .*chapter\.tex"):
        fit(linear(), (X, Y), checkpoint=tmp_path / "thesis", **settings)
    assert os.listdir(tmp_path / "thesis") == ["chapter.tex"]
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError, match=r"checkpoint=.*is a file, expected a folder"):
        fit(linear(), (X, Y), checkpoint=tmp_path / "file", **settings)
    with pytest.raises(OSError, match=r"checkpoint=.*cannot be written"):
        fit(linear(), (X, Y), checkpoint=tmp_path / "file" / "below", **settings)
    with pytest.raises(OSError, match=r"checkpoint=.*cannot be written"):
        fit(linear(), (X, Y), checkpoint="/proc/plausible", **settings)
    with pytest.raises(TypeError, match="checkpoint must be a folder or a Checkpoint, got int"):
        fit(linear(), (X, Y), checkpoint=3, **settings)
    damaged = tmp_path / "damaged"
    fit(linear(), (X, Y), checkpoint=damaged)
    record = json.loads((damaged / "checkpoint.json").read_text())
    record["step"] = 1
    (damaged / "checkpoint.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match="damaged or was changed"):
        fit(linear(), (X, Y), checkpoint=damaged, **settings)
    assert steps == []


def test_bad_input_leaves_no_folder(tmp_path: Path) -> None:
    for data, settings in (
        ((X, Y[:, 0]), {}),
        ((X * NAN, Y), {}),
        ((X, Y), {"where": "nothing"}),
        ((X, Y), {"likelihood": likelihoods.Categorical()}),
    ):
        with pytest.raises((ValueError, TypeError)):
            fit(linear(), data, checkpoint=tmp_path / "run", **settings)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------------------------------------------------------------
# Bad input


@pytest.mark.parametrize(
    ("y", "outputs", "settings", "error", "message"),
    [
        (Y[:, 0], 1, {}, ValueError, r"shape \[24\].*\[24, 1\].*y\.unsqueeze\(-1\)"),
        (Y, 2, {}, ValueError, r"targets have shape \[24, 1\], Gaussian expects \[24, 2\]"),
        (CLASSES[:, None], 3, {}, ValueError, r"y\.squeeze\(-1\)"),
        (CLASSES, 1, {}, ValueError, "at least 2 classes"),
        (CLASSES, 2, {}, ValueError, r"class labels must lie in 0\.\.1"),
        (CLASSES - 1, 3, {}, ValueError, "got -1 at index"),
        (CLASSES.float(), 3, {"likelihood": likelihoods.Categorical()}, TypeError, r"targets\.long\(\)"),
        (CLASSES, 1, {"likelihood": likelihoods.Gaussian()}, TypeError, r"targets\.float\(\)"),
        (CLASSES[:, None], 1, {"likelihood": likelihoods.Bernoulli()}, ValueError, "0 or 1"),
        (Y, 1, {"likelihood": likelihoods.Poisson()}, ValueError, "counts must be integers"),
        (nn.functional.one_hot(CLASSES), 3, {}, ValueError, r"y\.argmax\(-1\)"),
        (Y, 1, {"likelihood": likelihoods.Gaussian}, TypeError, r"write Gaussian\(\)"),
        (Y, 1, {"likelihood": "gaussian"}, TypeError, "likelihood must be one of plausible.likelihoods, got 'gaussian'"),
        (Y, 1, {"prior": 1.0}, TypeError, r"did you mean Gaussian\(scale=1\.0\)\?"),
        (Y, 1, {"prior": {"bias": priors.Gaussian()}}, ValueError, "no prior for the weight 'weight'"),
        (Y, 1, {"where": "head.*"}, ValueError, "matches no weight; the names are weight, bias, likelihood.log_scale"),
        (Y, 1, {"device": "cuda:99"}, ValueError, "device='cuda:99' was asked for"),
        (Y, 1, {"device": "tpu"}, ValueError, "device='tpu' is not a device"),
        (Y, 1, {"device": "meta"}, ValueError, "device='meta' is not supported"),
        (Y, 1, {"precision": "float8"}, ValueError, "precision must be"),
        (Y, 1, {"compile": "yes"}, ValueError, "compile must be"),
        (Y, 1, {"num_data": 5}, ValueError, "num_data=5 contradicts the 24 examples"),
        (Y, 1, {"mask": "inf"}, ValueError, "mask must be"),
    ],
)
def test_bad_settings_are_refused(y: Any, outputs: int, settings: dict[str, Any], error: type[Exception], message: str) -> None:
    network = linear(outputs=outputs)
    before = copy.deepcopy(network.state_dict())
    with pytest.raises(error, match=message):
        fit(network, (X, y), **settings)
    assert all(torch.equal(before[name], value) for name, value in network.state_dict().items())


def test_bad_rows_behind_the_first_examples_are_found() -> None:
    """The shapes are learned from a few examples, the values of all are checked."""
    y = CLASSES.clone()
    y[20] = 7
    with pytest.raises(ValueError, match=r"got 7 at index \[20\]"):
        fit(linear(outputs=3), (X, y))
    for data in (DataLoader(TensorDataset(X, y), batch_size=10), TensorDataset(X, y)):
        with pytest.raises(ValueError, match="class labels must lie"):
            fit(linear(outputs=3), data)
    x = X.clone()
    x[21, 1] = NAN
    with pytest.raises(ValueError, match=r"x contains 1 non-finite value, the first a NaN at \(21, 1\)"):
        fit(linear(outputs=3), (x, CLASSES))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: pl.MAP(epochs=0), ValueError, "epochs must be at least 1, got 0"),
        (lambda: pl.MAP(epochs=2.5), TypeError, "epochs must be an integer"),
        (lambda: pl.MAP(lr=-0.1), ValueError, "-0.1"),
        (lambda: pl.MAP(lr=0.0), ValueError, "0"),
        (lambda: pl.MAP(lr=NAN), ValueError, "nan"),
        (lambda: pl.SGLD(lr=-1e-4), ValueError, "-0.0001"),
        (lambda: pl.SGLD(epochs=0), ValueError, "epochs must be at least 1"),
        (lambda: pl.SGLD(burn_in=1.0), ValueError, "burn_in"),
        (lambda: pl.SGLD(temperature=-1.0), ValueError, "temperature"),
        (lambda: pl.MAP(batch_size=0), ValueError, "batch_size must be at least 1"),
        (lambda: pl.Ensemble(members=0), ValueError, "members must be a whole number of at least 1"),
        (lambda: pl.Ensemble(pl.MAP), TypeError, "method must be a Method"),
        (lambda: priors.Gaussian(scale=0), ValueError, "scale"),
        (lambda: priors.Gaussian(scale=-1.0), ValueError, "scale"),
        (lambda: priors.Laplace(scale=0.0), ValueError, "scale"),
        (lambda: likelihoods.Gaussian(scale=0.0), ValueError, "scale"),
    ],
)
def test_impossible_settings_are_refused(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        make()


def test_only_an_explicit_batch_larger_than_the_data_is_refused() -> None:
    with pytest.raises(ValueError, match=r"batch_size=25 is larger than the data \(24 examples\); use batch_size=None"):
        fit(linear(), (X, Y), pl.MAP(epochs=1, batch_size=25))
    assert fit(linear(), (X, Y), pl.MAP(epochs=1, batch_size=24)).run["steps"] == 1
    assert fit(linear(), (X, Y), pl.MAP(epochs=1)).run["steps"] == 1  # the default takes what there is
    assert fit(linear(), (X[:1], Y[:1]), pl.MAP(epochs=1)).run["steps"] == 1  # even one example
    assert fit(linear(), (X, Y), pl.MAP(epochs=3, batch_size=10)).run["steps"] == 9


def test_more_members_than_memory_holds() -> None:
    members = 10**12
    with pytest.raises(
        MemoryError, match=r"Ensemble of 1,000,000,000,000 members.*about [\d,.]+ GiB are needed and [\d,.]+ GiB"
    ):
        fit(linear(), (X, Y), pl.Ensemble(SHORT, members=members))


def test_devices() -> None:
    network = linear()
    assert choose_device(network, None) == torch.device("cpu")
    assert choose_device(network, "cpu") == torch.device("cpu")
    assert choose_device(network, torch.device("cpu")) == torch.device("cpu")
    assert choose_device(nn.Tanh(), None) == torch.device("cpu")
    assert choose_device(network, "auto").type in ("cpu", "cuda", "mps")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="finds no CUDA GPU here; use device='cpu' or 'auto'"):
            fit(network, (X, Y), device="cuda")
    if not torch.backends.mps.is_available():
        with pytest.raises(ValueError, match="no Metal GPU"):
            fit(network, (X, Y), device="mps")


def test_images_of_bytes() -> None:
    images = torch.randint(256, (N, 1, 6, 6), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.convolve, self.head = nn.Conv2d(1, 2, 3), nn.Linear(32, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.convolve(x.float() / 255).relu().flatten(1))

    posterior = fit(Network(), (images, CLASSES), pl.Ensemble(SHORT, members=2))
    assert posterior.predict(images).probs.shape == (N, 3)
    with pytest.raises(ValueError, match=r"torch\.uint8.*x\.float\(\)"):
        fit(nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(32, 3)), (images, CLASSES))


def test_mixed_precision_is_for_methods_that_allow_it() -> None:
    posterior = fit(mlp(), (X, Y), precision="bfloat16")
    assert posterior.weights()["0.weight"].dtype == torch.float32
    assert same(fit(mlp(), (X, Y), precision="float32"), fit(mlp(), (X, Y)))
    assert not same(posterior, fit(mlp(), (X, Y)))


def test_frames_in_and_numbers_out() -> None:
    for kind in (pandas, polars):
        frame = kind.DataFrame({"a": X[:, 0].numpy(), "b": X[:, 1].numpy(), "price": Y[:, 0].numpy()})
        posterior = fit(linear(), (frame[["a", "b"]], frame[["price"]]))
        assert same(posterior, fit(linear(), (X, Y)))
        torch.testing.assert_close(posterior.predict(frame[["a", "b"]]).mean, posterior.predict(X).mean)
        with pytest.raises(ValueError, match=r"y\.unsqueeze"):
            fit(linear(), (frame[["a", "b"]], frame["price"]))


def test_a_diverging_run_says_where_and_keeps_the_last_good_state() -> None:
    huge = nn.Sequential(nn.Linear(2, 1))
    with pytest.raises(pl.DivergenceError, match=r"became (nan|inf|-inf) at step \d+ of 400") as caught:
        fit(huge, (X, Y), pl.MAP(epochs=400, batch_size=None, lr=1e20), likelihood=likelihoods.Gaussian(1e-3))
    assert caught.value.step >= 1
    assert caught.value.term in ("log_joint", "log_likelihood", "log_prior")
    kept = caught.value.posterior
    assert kept is None or all(bool(torch.isfinite(w).all()) for w in kept.weights().values())


# ---------------------------------------------------------------------------------------------------------------------
# Types


@pytest.mark.parametrize(
    ("method", "declared"),
    [
        (pl.MAP(epochs=2), "DrawsPosterior"),
        (pl.SGLD(epochs=5, thin=1), "DrawsPosterior"),
        (pl.MeanField(epochs=2), "LawPosterior"),
        (pl.FullRank(epochs=2), "LawPosterior"),
        (pl.IVON(epochs=2), "LawPosterior"),
        (pl.DVI(epochs=2), "MomentsPosterior"),
        (pl.Refined(epochs=2), "RefinedPosterior"),
        (pl.Laplace(mode=pl.MAP(epochs=40)), "LaplacePosterior"),
        (pl.NUTS(draws=3, warmup=5, chains=2), "ChainsPosterior"),
        (pl.Ensemble(pl.MAP(epochs=2), members=2), "Posterior"),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
@pytest.mark.filterwarnings("ignore:the network is not at a mode")
def test_a_method_gives_the_kind_of_posterior_that_it_declares(method: pl.Method, declared: str) -> None:
    assert inspect.get_annotations(type(method).posterior)["return"] == declared
    posterior = fit(mlp(), (X, Y), method)
    assert declared in [kind.__name__ for kind in type(posterior).__mro__]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"progress": "no"}, "progress must be True, False or None, got 'no'"),
        ({"num_data": 20.0}, "num_data must be a whole number of at least 1, got 20.0"),
    ],
)
def test_arguments_that_mean_nothing_are_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        pl.fit(nn.Linear(2, 1), (torch.randn(20, 2), torch.randn(20, 1)), pl.MAP(epochs=1), **settings)


def test_complex_example_weights_are_refused() -> None:
    weights = torch.ones(20, dtype=torch.complex64)
    with pytest.raises(TypeError, match=r"example weights must be real, got torch\.complex64"):
        pl.fit(nn.Linear(2, 1), (torch.randn(20, 2), torch.randn(20, 1), weights), pl.MAP(epochs=1))


@pytest.mark.parametrize("method", [pl.HMC, pl.NUTS, pl.Refined], ids=lambda method: method.__name__)
def test_switches_are_true_or_false(method: Any) -> None:
    setting = "learn_step_size" if method is pl.Refined else "adapt"
    with pytest.raises(TypeError, match=f"{method.__name__}: {setting} must be True or False, got 'no'"):
        method(**{setting: "no"})


@pytest.mark.filterwarnings("ignore")  # one epoch is no fit, and need not be
@pytest.mark.parametrize("method", [pl.MAP(epochs=1), pl.Laplace(mode=pl.MAP(epochs=1))], ids=lambda m: type(m).__name__)
@pytest.mark.parametrize("wrong", [{"batch_size": -5}, {"batch_size": 2.0}, {"draws": 0}, {"seed": "one"}, {"seed": 1.5}])
def test_predict_refuses_by_name(method: pl.Method, wrong: dict[str, Any]) -> None:
    x = torch.randn(20, 2)
    posterior = pl.fit(nn.Linear(2, 1), (x, x[:, :1]), method, progress=False)
    with pytest.raises((TypeError, ValueError), match=f"{next(iter(wrong))} must be a whole number"):
        posterior.predict(x, **wrong)
