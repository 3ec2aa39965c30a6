"""`fit`: from a module and data to a posterior, in one call."""

from __future__ import annotations

import contextlib
import logging
import operator
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from plausible import engine
from plausible.core import random
from plausible.core.likelihoods import Likelihood
from plausible.core.model import Model
from plausible.core.networks import Where, choose_device
from plausible.core.priors import Prior
from plausible.core.weights import Weights
from plausible.engine import Checkpoint, Options
from plausible.engine.data_parallel import assemble
from plausible.engine.inputs import as_checkpoint, identity, prepare
from plausible.engine.method import Method
from plausible.methods import create
from plausible.posteriors.base import Posterior
from plausible.posteriors.saving import load

log = logging.getLogger("plausible")

__all__ = ["fit", "load"]


def fit(
    network: nn.Module | Model,
    data: Any,
    method: Method | str,
    *,
    likelihood: Likelihood | None = None,
    prior: Prior | Mapping[str, Prior] | None = None,
    where: Where = None,
    output: Callable[[Any], Tensor] | None = None,
    init: Posterior | None = None,
    seed: int = 0,
    device: torch.device | str | None = None,
    compile: Literal["auto"] | bool = "auto",
    progress: bool | None = None,
    checkpoint: str | Path | Checkpoint | None = None,
    callbacks: Sequence[Callable[[int, dict[str, float]], Any]] = (),
    num_data: int | None = None,
    mask: Any = None,
    precision: Literal["float32", "bfloat16", "tf32"] | None = None,
) -> Posterior:
    """p(w | D) ∝ p(D | w) p(w) for any network, by any method: module + data → `Posterior`.

    Args:
        network: a `torch.nn.Module`; never changed. A `Model` (say, a tempered one) is taken as it is.
        data: `(x, y)` or `(x, y, weights)` of tensors, arrays or frames (x may be a dict, tuple or nested), a `Dataset` or a
            `DataLoader`, which is streamed.
        method: an instance such as `MAP(epochs=100)`, or a name such as "map" for its defaults.
        likelihood: outputs → distribution of targets. Inferred if None: integers `Categorical`, booleans `Bernoulli`, floats
            `Gaussian` with learned noise.
        prior: over all weights, or a mapping from name patterns to priors. Default `priors.Gaussian(scale=1.0)`.
        where: which weights are random: a name pattern or several, "last", or a predicate of the name (and the weight). The
            others are trained as points, or keep their values for methods that do not train.
        output: picks f(x) from what the network returns, for example `lambda o: o.logits`.
        init: an earlier posterior to continue from.
        seed: the same seed gives the same bits on the same machine; torch's global generators are left as they were.
        device: "cpu", "cuda", "mps", "auto" for the best there is, or None for where the network is.
        compile: "auto" compiles or captures where that pays for the number of steps; True, False.
        progress: a bar; None shows it on a terminal only.
        checkpoint: a folder (or a `Checkpoint`) to write to now and then; if it holds one of the same run, that run goes on.
        callbacks: called with `(step, info)` after each step.
        num_data: examples in one pass, for iterable data sets without a length.
        mask: boolean, shaped like y, True where the target was observed; or "nan" to leave out NaN targets.
        precision: "bfloat16" runs the forward pass of methods that allow it in mixed precision; "tf32" lets an NVIDIA GPU multiply
            float32 matrices with 10-bit mantissas while training (several times faster; predictions stay exact).

    Under `torchrun` the members of an ensemble are split over the ranks, batches of other methods divided among them, and every
    rank returns the whole posterior; see docs/distributed.md.

    Raises ValueError or TypeError for bad input, `DivergenceError` where training meets NaN or infinity.

    """
    method = create(method)
    seed = _as_seed(seed)
    if callable(callbacks) or not all(callable(callback) for callback in callbacks):
        raise TypeError("callbacks must be a sequence of functions of (step, info), such as callbacks=[print]")
    with assemble(method) as team:
        module = network.network if isinstance(network, Model) else network
        target = choose_device(module, team.device(device, module))
        with torch.inference_mode(False), random.isolated(team.seed(seed), target):
            model, prepared = prepare(
                network, data, likelihood, prior, where, output, target, num_data, mask, precision, method
            )
            starts = None
            if init is not None:
                model, starts = continuing(model, init, getattr(method, "chains", None) or method.members or 1)
            if team.size > 1:
                model, starts = team.agree(model, starts, identity(method, model, prepared, seed))
            options = Options(
                seed=seed,
                compile=compile,
                progress=progress,
                callbacks=tuple(callbacks),
                checkpoint=as_checkpoint(checkpoint),
                identity=identity(method, model, prepared, seed, precision, starts) if checkpoint is not None else {},
                starts=starts,
                team=team,
            )
            if precision == "tf32" and target.type != "cuda":
                log.info("precision='tf32' has no effect on %s", target.type)
            with tensor_float(precision == "tf32" and target.type == "cuda"):
                model, run, fitted = engine.run(method, model, prepared, options)
            resume = f"; resume with checkpoint={str(checkpoint)!r}" if checkpoint else ""
            if fitted.interrupted and fitted.draws is None and method.traits.keeps_draws:
                raise KeyboardInterrupt(f"stopped before the first draw was kept{resume}")
            posterior = method.posterior(model, run, fitted)
    if fitted.interrupted and not team.rank:  # the first one says it
        warnings.warn(
            f"stopped by Ctrl-C after {fitted.steps:,} steps: this is the posterior so far"
            + ("; call fit again with the same checkpoint to go on" if checkpoint is not None else ""),
            UserWarning,
            stacklevel=2,
        )
    return posterior


def _as_seed(seed: Any) -> int:
    try:
        number = operator.index(seed)
    except TypeError:
        number = -1
    if isinstance(seed, bool) or number < 0:
        raise ValueError(f"seed must be a whole number of at least 0, got {seed!r}")
    return number


@contextlib.contextmanager
def tensor_float(wanted: bool) -> Iterator[None]:
    """Products of float32 matrices in TensorFloat-32 inside the block, where that is wanted; PyTorch's setting is put back."""
    if not wanted:
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def continuing(model: Model, earlier: Posterior, members: int = 1) -> tuple[Model, Weights]:
    """The model at the last draw of an earlier posterior, and starting points: members of an ensemble start at draws of their own.

    Those are the last states of the earlier chains or members, or, of a single chain, draws spread evenly over it. A posterior that
    is a law over the weights starts one run at its means, and several at draws.
    """
    if not isinstance(earlier, Posterior):
        raise TypeError(f"init must be an earlier Posterior, got {type(earlier).__name__}")
    draws = earlier.starting_points(members)
    count = len(next(iter(draws.values())))
    for name in model.likelihood_names:  # noise that was fixed there and is learned here starts where it would anyway
        if name not in draws:
            draws = {**draws, name: model.initial[name].expand(count, *model.initial[name].shape)}
    for name, value in model.initial.items():
        problem = "is missing there" if name not in draws else f"has shape {tuple(draws[name].shape[1:])} there"
        if name not in draws or draws[name].shape[1:] != value.shape:
            raise ValueError(f"init does not fit this network: {name!r} {problem}, expected shape {tuple(value.shape)}")
    for name in draws:
        if name in model.initial or name in model.buffers or name.startswith("likelihood."):
            continue
        raise ValueError(
            f"init does not fit this network: {name!r} was learned there and is fixed here; fit the same network, and hold "
            "weights by where= instead of requires_grad=False"
        )
    fitting = {**model.initial, **model.buffers}
    draws = {name: draws[name].to(value) for name, value in fitting.items() if name in draws}
    return model.starting_at({name: value[-1] for name, value in draws.items()}), draws
