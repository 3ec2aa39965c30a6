"""`fit`: from a module and data to a posterior, in one call."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import operator
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from plausible import engine
from plausible.core import random, serialise
from plausible.core.data import ArrayData, Batch, Data, as_data, select_rows
from plausible.core.likelihoods import Likelihood, infer
from plausible.core.model import Model
from plausible.core.networks import Where, choose_device
from plausible.core.priors import Prior, as_prior
from plausible.engine import Checkpoint, DivergenceError, Options, ranks
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
    with ranks.assemble(method) as team:
        module = network.network if isinstance(network, Model) else network
        target = choose_device(module, team.device(device, module))
        with torch.inference_mode(False), random.isolated(team.seed(seed), target):
            model, prepared = _prepare(
                network, data, likelihood, prior, where, output, target, num_data, mask, precision, method
            )
            if init is not None:
                model = continuing(model, init, getattr(method, "chains", None) or method.members or 1)
            if team.size > 1:
                model = team.agree(model, _identity(method, model, prepared, seed))
            options = Options(
                seed=seed,
                compile=compile,
                progress=progress,
                callbacks=tuple(callbacks),
                checkpoint=_as_checkpoint(checkpoint),
                team=team,
                identity=_identity(method, model, prepared, seed, precision) if checkpoint is not None else {},
            )
            try:
                if precision == "tf32" and target.type != "cuda":
                    log.info("precision='tf32' has no effect on %s", target.type)
                with tensor_float(precision == "tf32" and target.type == "cuda"):
                    fitted = engine.run(method, model, prepared, options)
            except DivergenceError as error:
                if error.fitted is not None:
                    error.posterior = team.part(method).posterior(model, error.fitted)
                raise
    if fitted.interrupted:
        if fitted.draws is None and method.keeps_draws:
            raise KeyboardInterrupt(
                "stopped before the first draw was kept"
                + (f"; resume with checkpoint={str(checkpoint)!r}" if checkpoint else "")
            )
        posterior = method.posterior(model, fitted)
        if team.rank:  # the first one says it
            return posterior
        warnings.warn(
            f"stopped by Ctrl-C after {fitted.steps:,} steps: this is the posterior so far"
            + ("; call fit again with the same checkpoint to go on" if checkpoint is not None else ""),
            UserWarning,
            stacklevel=2,
        )
        return posterior
    return method.posterior(model, fitted)


def _as_seed(seed: Any) -> int:
    try:
        number = operator.index(seed)
    except TypeError:
        number = -1
    if isinstance(seed, bool) or number < 0:
        raise ValueError(f"seed must be a whole number of at least 0, got {seed!r}")
    return number


def _prepare(
    network: nn.Module | Model,
    data: Any,
    likelihood: Likelihood | None,
    prior: Prior | Mapping[str, Prior] | None,
    where: Where,
    output: Callable[[Any], Tensor] | None,
    device: torch.device,
    num_data: int | None,
    mask: Any,
    precision: str | None,
    method: Method,
) -> tuple[Model, Data]:
    """Check everything that can be checked before the work starts."""
    module = network.network if isinstance(network, Model) else network
    first = next((p for p in module.parameters() if p.is_floating_point()), None)
    dtype = torch.float32 if first is None else first.dtype
    if likelihood is not None and not isinstance(likelihood, Likelihood):
        hint = f"; write {likelihood.__name__}()" if isinstance(likelihood, type) else ""
        raise TypeError(f"likelihood must be one of plausible.likelihoods, got {likelihood!r}{hint}")
    prepared = as_data(data, dtype=dtype, device=device, mask=mask, num_data=num_data)
    example = _example(prepared)
    if isinstance(network, Model):
        if any(v is not None for v in (likelihood, prior, where, output, precision)):
            raise ValueError("a Model brings its own likelihood, prior, where, output and precision: leave those arguments out")
        model = network.to(device)
        if model.num_data != prepared.num_data:
            raise ValueError(f"the Model was made for {model.num_data} examples and data has {prepared.num_data}")
        with torch.no_grad():
            model.check_inputs(example.x)
    else:
        if likelihood is None:
            likelihood = infer(example.y)
            log.info(
                "likelihood: %s, inferred from targets of type %s", likelihood, str(example.y.dtype).removeprefix("torch.")
            )
        if prior is None:
            log.info("prior: Gaussian(scale=1.0) on every weight, the default")
        model = Model.build(
            network,
            likelihood,
            as_prior(prior),
            example,
            num_data=prepared.num_data,
            where=where,
            output=output,
            device=device,
            precision=_as_precision(precision, method),
            check_targets=not isinstance(prepared, ArrayData),
        )
    if isinstance(prepared, ArrayData):
        batch = prepared.batch
        shape = torch.Size((prepared.num_data, *model.output_shape))
        targets = model.likelihood.check(shape, batch.y, mask=batch.mask)
        return model, ArrayData(batch._replace(y=targets), prepared.num_data)
    check = lambda y, mask: model.likelihood.check(torch.Size((len(y), *model.output_shape)), y, mask=mask)  # noqa: E731
    return model, replace(prepared, check=check)


def _example(data: Data, rows: int = 8) -> Batch:
    """A few examples to learn the shapes from."""
    if isinstance(data, ArrayData):
        return select_rows(data.batch, slice(rows))
    first = next(iter(data.chunks(rows)), None)
    if first is None:
        raise ValueError("data is empty: the loader gave no batch")
    return select_rows(first, slice(rows))


def _as_precision(precision: str | None, method: Method) -> torch.dtype | None:
    if precision in (None, "float32"):
        return None
    if precision not in ("bfloat16", "tf32"):
        raise ValueError(f"precision must be None, 'float32', 'tf32' or 'bfloat16', got {precision!r}")
    if not method.traits.mixed_precision:
        raise ValueError(f"{type(method).__name__} needs full precision: its energies or solves would be wrong in {precision}")
    return torch.bfloat16 if precision == "bfloat16" else None


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


def _as_checkpoint(checkpoint: str | Path | Checkpoint | None) -> Checkpoint | None:
    if checkpoint is None or isinstance(checkpoint, Checkpoint):
        return checkpoint
    if not isinstance(checkpoint, (str, Path)):
        raise TypeError(f"checkpoint must be a folder or a Checkpoint, got {type(checkpoint).__name__}")
    return Checkpoint(checkpoint)


def continuing(model: Model, earlier: Posterior, members: int = 1) -> Model:
    """The model at the last draw of an earlier posterior; the members of an ensemble start at draws of their own.

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
        found = "is missing there" if name not in draws else f"has shape {tuple(draws[name].shape[1:])} there"
        if name not in draws or draws[name].shape[1:] != value.shape:
            raise ValueError(f"init does not fit this network: {name!r} {found}, expected shape {tuple(value.shape)}")
    for name in draws:
        if name in model.initial or name in model.buffers or name.startswith("likelihood."):
            continue
        raise ValueError(
            f"init does not fit this network: {name!r} was learned there and is fixed here; fit the same network, and hold "
            "weights by where= instead of requires_grad=False"
        )
    fitting = {**model.initial, **model.buffers}
    draws = {name: draws[name].to(value) for name, value in fitting.items() if name in draws}
    return model.starting_at({name: value[-1] for name, value in draws.items()}, draws)


def _digest(weights: Mapping[str, Tensor]) -> str:
    """A hash of named tensors."""
    digest = hashlib.blake2b(digest_size=8)
    for name, value in weights.items():
        flat = value.detach().cpu().contiguous().reshape(-1)
        digest.update(name.encode() + flat.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _identity(method: Method, model: Model, data: Data, seed: int, precision: str | None = None) -> dict[str, Any]:
    """What must agree for a checkpoint to be this run's."""
    everything = (*model.network.named_parameters(), *model.network.named_buffers())
    fixed = {name: value for name, value in everything if name not in model.initial and name not in model.buffers}
    return {
        "method": serialise.encode(method, strict=False),
        "likelihood": serialise.encode(model.likelihood, strict=False),
        "prior": serialise.encode(model.prior, strict=False),
        "weights": {name: list(value.shape) for name, value in model.initial.items()},
        "random": list(model.random),
        "network": repr(model.network),
        "output": model.output is not None,
        "init": None if model.initial_draws is None else _digest(model.initial_draws),
        "fixed": _digest(fixed),
        "temperature": model.temperature,
        "precision": "tf32" if precision == "tf32" else None if model.precision is None else "bfloat16",
        "seed": seed,
        "num_data": data.num_data,
        "data": data.fingerprint(),
        "device": next(iter(model.initial.values())).device.type,
    }
