"""Networks × methods: does every method work with every kind of network that people train?

A cell of the table is a fit of a few steps in a process of its own with a time limit, after which is checked that

- predictions are finite, the same when asked again, and the same in blocks,
- the module that was given is untouched: weights, buffers, mode, hooks, gradients,
- gradients are those of plain autograd on a copy,
- what the summary calls inferred differs between draws, and what it calls a point does not,
- saved and loaded into another module of the same kind, the posterior predicts the same.

It works, or is refused by a message of ours, or fails with somebody's error, or is wrong, or runs out of time.
"""

from __future__ import annotations

import linecache
import multiprocessing
import signal
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

import plausible as pl
from experiments import zoo_packages, zoo_plain
from experiments.frame import SIZES, Bound, Cell, Part, Reproduction, Request, Results, Sheet, Size, Values
from experiments.zoo_plain import ROWS, Subject
from plausible.core.data import Batch
from plausible.core.model import Model
from plausible.core.priors import as_prior
from plausible.methods import create, registry
from plausible.posteriors.base import Posterior
from plausible.posteriors.draws import DrawsPosterior
from plausible.testing import SHORT, quick

CHAINS_OF_BATCHES = "plausible.methods.stochastic_gradient"
OUTCOMES = ("works", "refused", "fails", "wrong", "out of time")
LIMIT = 40.0
"""Seconds that a cell may take."""
_FEW = {
    **dict.fromkeys(SHORT, 2),
    "draws": 3,
    "epochs": 2,
    "cycles": 1,
    "particles": 8,
    "pilots": 4,
    "draws_kept": 6,
    "polish": 2,
}
_MAP = pl.MAP(epochs=2)

FURTHER: dict[str, Callable[[], Any]] = {
    "map, one at a time": lambda: pl.MAP(epochs=1, batch_size=1),
    "map, early stopping": lambda: pl.MAP(epochs=2, patience=1),
    "mean-field, weights": lambda: pl.MeanField(epochs=2, estimator="weights"),
    "mean-field, flipout": lambda: pl.MeanField(epochs=2, estimator="flipout"),
    "ensemble of mean-field": lambda: pl.Ensemble(pl.MeanField(epochs=2), members=2),
    "ensemble of laplace": lambda: pl.Ensemble(pl.Laplace("diag", mode=_MAP), members=2),
    "laplace, diagonal": lambda: pl.Laplace("diag", mode=_MAP),
    "laplace, full": lambda: pl.Laplace("full", mode=_MAP),
    "laplace, sampled": lambda: pl.Laplace("kron", mode=_MAP, predictive="sampled", columns=2),
    "laplace, last layer": lambda: pl.Laplace(where="last", mode=_MAP),
}
"""Settings beside the defaults of every method, shortened."""
MAIN = (
    "map",
    "ensemble",
    "laplace",
    "laplace, diagonal",
    "laplace, last layer",
    "mean-field",
    "mean-field, weights",
    "mean-field, flipout",
    "ivon",
    "vogn",
    "rank1",
    "sgld",
    "psgld",
    "sghmc",
    "cyclical",
    "swa",
    "swag",
    "nuts",
    "hmc",
    "low-rank",
    "mc-dropout",
    "gaussian-dropout",
    "concrete-dropout",
    "variational-dropout",
    "sparse-vd",
)
"""What is tried in the reduced size."""


def setting(name: str) -> Any:
    """A method in a run of a few steps."""
    if name in FURTHER:
        return FURTHER[name]()
    if name == "auto":
        return create(name, time=3.0)
    # rates that are found on the way need some way
    return quick(create(name), {**_FEW, "epochs": 10} if registry[name].__module__.startswith(CHAINS_OF_BATCHES) else _FEW)


NETWORKS = zoo_plain.ALL | {
    f"{package}: {name}": make for package, own in zoo_packages.PACKAGES.items() for name, make in own.items()
}
"""Name → what makes the network and its data."""


# ---------------------------------------------------------------------------------------------------------------------
# One cell


def tried(maker: Callable[[], Subject], method: Any) -> tuple[str, str]:
    """The outcome of a fit and its checks, and why."""
    torch.manual_seed(0)
    subject = maker()
    before = _state(subject.network)
    options = {"likelihood": subject.likelihood, "output": subject.output}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            posterior = pl.fit(
                subject.network, (subject.x, subject.y), method, device="cpu", compile=False, progress=False, **options
            )
            wrong = _untouched(before, subject.network) or _predictions(posterior, subject.x) or _summary(posterior)
            wrong = wrong or _stored(posterior, subject, maker)
    except Exception as error:  # whatever a network raises is an outcome
        return _refused(error), f"{type(error).__name__}: {error}"
    return ("wrong", wrong) if wrong else ("works", "")


def differentiated(maker: Callable[[], Subject]) -> tuple[str, str]:
    """Whether the gradient of the log joint is that of plain autograd, in training and in evaluation."""
    torch.manual_seed(0)
    subject = maker()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            likelihood = subject.likelihood or (
                pl.likelihoods.Bernoulli() if subject.y.dtype == torch.bool else pl.likelihoods.Gaussian(scale=1.0)
            )
            batch = Batch(subject.x, subject.y)
            model = Model.build(
                subject.network, likelihood, as_prior(pl.priors.Gaussian(1.0)), batch, num_data=2 * ROWS, output=subject.output
            )
            for train in (True, False):
                expected = _by_autograd(maker, subject, model, train)
                torch.manual_seed(1)
                found = model.gradient(model.initial, batch, buffers=model.buffers, train=train).grads
                for name, grad in expected.items():
                    near = torch.linalg.vector_norm(found[name] - grad) <= 1e-3 * torch.linalg.vector_norm(grad) + 1e-4
                    if not near and grad.dtype != torch.bfloat16:
                        return "wrong", f"the gradient of {name} {'in training' if train else ''}"
    except Exception as error:  # see above
        return _refused(error), f"{type(error).__name__}: {error}"
    return "works", ""


def _by_autograd(maker: Callable[[], Subject], subject: Subject, model: Model, train: bool) -> dict[str, Tensor]:
    torch.manual_seed(0)
    network = maker().network.train(train)
    parameters = {name.replace("_orig_mod.", ""): p for name, p in network.named_parameters()}
    parameters = {name: p for name, p in parameters.items() if name in model.initial}
    noise = {name: value.clone().requires_grad_() for name, value in model.initial.items() if name not in parameters}
    torch.manual_seed(1)
    x = _cloned(subject.x)
    returned = network(**x) if isinstance(x, dict) else network(x)
    outputs = returned if subject.output is None else subject.output(returned)
    targets = model.likelihood.check(outputs.shape, subject.y)
    seen = model.likelihood.observed(subject.y)
    each = model.likelihood.log_prob(
        outputs.float() if outputs.dtype == torch.bfloat16 else outputs, targets, model.noise({**parameters, **noise})
    )
    total = (each if seen is None else each[seen]).sum() * 2 + model.log_prior({**parameters, **noise})
    named = {**parameters, **noise}
    total.backward()
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.to_dense() for name, p in named.items()}


def _refused(error: Exception) -> str:
    """A message that was raised by us is a refusal; an error from elsewhere is a failure, and so is one that is only passed on."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    raised = "plausible" in Path(last.filename).parts and linecache.getline(
        last.filename, last.lineno or 0
    ).lstrip().startswith("raise")
    passed_on = "could not be run" in str(error) or isinstance(error, ArithmeticError)
    return "refused" if raised and not passed_on else "fails"


def _cloned(x: Any) -> Any:
    return {name: value.clone() for name, value in x.items()} if isinstance(x, dict) else x.clone()


def _state(network: nn.Module) -> dict[str, Any]:
    """What a fit must leave as it is."""
    modules = list(network.modules())
    named = [*network.named_parameters(), *network.named_buffers()]
    return {
        "weights": {name: value.detach().clone() for name, value in named if not is_lazy(value)},
        "modes": [module.training for module in modules],
        "hooks": [
            len(module._forward_hooks) + len(module._forward_pre_hooks) + len(module._backward_hooks) for module in modules
        ],
        "gradients": [p.requires_grad for p in network.parameters()] + [p.grad is None for p in network.parameters()],
    }


def _untouched(before: dict[str, Any], network: nn.Module) -> str:
    now = _state(network)
    for what in ("modes", "hooks", "gradients"):
        if now[what] != before[what]:
            return f"{what} of the module were changed"
    changed = [name for name, value in before["weights"].items() if not torch.equal(now["weights"][name], value)]
    return f"{changed[0]} of the module was changed" if changed else ""


def _mean(posterior: Posterior, x: Any, **how: Any) -> Tensor:
    return posterior.predict(_cloned(x), **how).mean.float()


def _predictions(posterior: Posterior, x: Any) -> str:
    first = _mean(posterior, x)
    predictive = posterior.predict(x)
    if not all(bool(torch.isfinite(part).all()) for part in (first, predictive.aleatoric, predictive.epistemic)):
        return "predictions are not finite"
    if not torch.equal(first, _mean(posterior, x)):
        return "predictions differ from call to call"
    half = posterior.model.dtype in (torch.bfloat16, torch.float16) if hasattr(posterior.model, "dtype") else False
    if not half and not torch.allclose(first, _mean(posterior, x, batch_size=5), rtol=1e-2, atol=1e-3):
        return "predictions in blocks differ"
    return ""


def _summary(posterior: Posterior) -> str:
    status = {row[0]: row[2] for row in posterior.summary().rows}
    if missing := [name for name in posterior.model.random if name not in status]:
        return f"the summary has no {missing[0]}"
    if not posterior.method.traits.has_weights:
        return ""
    weights = posterior.weights(None if isinstance(posterior, DrawsPosterior) else 16)
    weights = {name: value for name, value in weights.items() if value.any()}  # zeros under multiplied noise stay zeros
    point = "point" in (posterior.method.traits.bias or "") or any(len(value) == 1 for value in weights.values())
    for name, value in weights.items():
        moves = bool((value != value[:1]).any())
        if status[name].startswith("inferred") and "equal" not in status[name] and not moves and not point:
            return f"{name} is called inferred and equal in all draws"
        if moves and status[name] == "trained as a point":
            return f"{name} is called a point and differs between draws"
    return ""


def _stored(posterior: Posterior, subject: Subject, maker: Callable[[], Subject]) -> str:
    with tempfile.TemporaryDirectory() as folder:
        posterior.save(Path(folder) / "saved")
        torch.manual_seed(5)
        again = pl.load(Path(folder) / "saved", maker().network, output=subject.output)
        near = torch.allclose(_mean(posterior, subject.x), _mean(again, subject.x), rtol=1e-4, atol=1e-5)
    return "" if near else "predictions differ after save and load"


# ---------------------------------------------------------------------------------------------------------------------
# All settings of one network, in processes that end with a cell that fails to end


def _work(network: str, wanted: Sequence[str], told: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    maker = NETWORKS[network]
    for name in wanted:
        told.send((name, *(differentiated(maker) if name == "gradient" else tried(maker, setting(name)))))


def outcomes(network: str, wanted: Sequence[str], limit: float) -> dict[str, tuple[str, str]]:
    """Setting → outcome and reason; a process that takes too long over a setting, or dies, is replaced for the others."""
    found: dict[str, tuple[str, str]] = {}
    context = multiprocessing.get_context("fork" if not torch.cuda.is_available() else "spawn")
    while left := [name for name in wanted if name not in found]:
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=_work, args=(network, left, there), daemon=True)
        process.start()
        there.close()
        for name in left:
            try:
                if not here.poll(limit):
                    found[name] = ("out of time", f"more than {limit:.0f} s")
                    break
                said, outcome, reason = here.recv()
                found[said] = (outcome, reason)
            except EOFError:
                process.join()
                found[name] = ("fails", f"the process ended with {process.exitcode}")
                break
        process.kill()
        process.join()
        here.close()
    return found


@dataclass(frozen=True)
class Trial:
    """A network, what is tried on it, and the seconds of each."""

    network: str
    settings: tuple[str, ...]
    limit: float = LIMIT


def run(settings: Trial, request: Request) -> dict[str, Any]:  # noqa: ARG001
    """The outcome of every setting; none where the package is not installed."""
    package = settings.network.partition(":")[0]
    if package in zoo_packages.PACKAGES and not zoo_packages.available(package):
        return {"outcomes": {}, "missing": package}
    began = time.perf_counter()
    found = outcomes(settings.network, settings.settings, settings.limit)
    cells = {name: {"outcome": outcome, "why": " ".join(reason.split())[:400]} for name, (outcome, reason) in found.items()}
    return {"outcomes": cells, "seconds": time.perf_counter() - began}


# ---------------------------------------------------------------------------------------------------------------------
# What the results say


def count(outcome: str) -> Values:
    """How many cells came out so."""

    def values(results: Results) -> Sequence[float] | None:
        found = [cell["outcome"] == outcome for result in results.values() for cell in result["outcomes"].values()]
        return [float(sum(found))] if found else None

    return values


def sheets(results: Results) -> list[Sheet]:
    """Counts by network and by setting, and everything that was refused or went wrong, by reason."""
    cells = [
        (result["settings"]["network"], name, cell["outcome"], cell["why"])
        for result in results.values()
        for name, cell in result["outcomes"].items()
    ]

    def counted(place: int, title: str) -> Sheet:
        rows = []
        for name in dict.fromkeys(cell[place] for cell in cells):
            numbers = Counter(cell[2] for cell in cells if cell[place] == name)
            rows.append((name, *(str(numbers[outcome]) if numbers[outcome] else "" for outcome in OUTCOMES)))
        return Sheet(title, ("", *OUTCOMES), tuple(rows))

    totals = Counter(cell[2] for cell in cells)
    found = [
        Sheet("All cells", OUTCOMES, (tuple(str(totals[outcome]) for outcome in OUTCOMES),)),
        counted(0, "By network"),
        counted(1, "By method"),
    ]
    for outcome in OUTCOMES[1:]:
        reasons: dict[str, list[tuple[str, str]]] = {}
        for network, name, came, why in cells:
            if came == outcome:
                reasons.setdefault(_kind(why), []).append((network, name))
        rows = [
            (why, _listed(method for _, method in where), _listed(network for network, _ in where), str(len(where)))
            for why, where in sorted(reasons.items(), key=lambda pair: -len(pair[1]))
        ]
        if rows:
            found.append(
                Sheet(
                    f"What {outcome}" if outcome in ("fails",) else f"What is {outcome}",
                    ("", "methods", "networks", "cells"),
                    tuple(rows),
                )
            )
    return found


def _kind(why: str) -> str:
    """A reason as a table can hold it."""
    return why.replace("|", "/").replace("<", "‹").replace(">", "›")[:220]


def _listed(names: Any, most: int = 4) -> str:
    different = list(dict.fromkeys(names))
    return ", ".join(different[:most]) + (f" and {len(different) - most} more" if len(different) > most else "")


def build() -> Reproduction:
    """A cell of this experiment is a network, with all settings."""
    every = ("gradient", *FURTHER, *(name for name in registry if name != "auto"), "auto")
    main = ("gradient", *MAIN)
    tiny = ("gradient", "map", "mean-field", "laplace", "sgld", "mc-dropout")
    few = ("mlp", "batch norm", "checkpointed", "channels last", "tagger with ignored words", "graph", "VAE", "tied weights")
    kinds = {"plain PyTorch": list(zoo_plain.ALL)}
    kinds |= {package: [f"{package}: {name}" for name in own] for package, own in zoo_packages.PACKAGES.items()}
    cells = []
    for name in NETWORKS:
        sizes: dict[Size, Trial] = {"full": Trial(name, every), "reduced": Trial(name, main)}
        cells.append(Cell(_file(name), run, sizes | ({"tiny": Trial(name, tiny)} if name in few else {})))
    parts = []
    for kind, names in kinds.items():
        needed: dict[Size, Sequence[str]] = {
            size: [_file(name) for name in names if size != "tiny" or name in few] for size in SIZES
        }
        claims = [Bound("cells that work", count("works"), unit="")]
        claims += [Bound(f"cells that are {outcome}", count(outcome), high=0, unit="") for outcome in ("wrong", "out of time")]
        claims.append(Bound("cells that fail", count("fails"), high=0, unit=""))
        parts.append(Part("table", _file(kind), kind, needed, dict.fromkeys(SIZES, claims), sheets))
    return Reproduction(
        "zoo",
        "Every method on every kind of network",
        "torchvision, timm, transformers, peft, torch_geometric, torchdiffeq and plain PyTorch, as far as they are installed.",
        tuple(cells),
        tuple(parts),
        "zoo",
        {"full": 1, "reduced": 1, "tiny": 1},
    )


def _file(name: str) -> str:
    """A name as a file can have it."""
    words = "".join(letter if letter.isalnum() else " " for letter in name.replace("²", "2").replace("³", "3")).split()
    return "-".join(words).lower()


REPRODUCTIONS = {"zoo": build()}
