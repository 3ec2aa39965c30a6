"""`fit`: from a module and data to a posterior, in one call."""

from __future__ import annotations

import contextlib
import operator
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor, nn
from typing_extensions import TypeVar

from plausible import engine
from plausible.core import random, targets, turns
from plausible.core.data import ArrayData, Data, as_data, select_rows
from plausible.core.likelihoods import Likelihood, infer
from plausible.core.model import Model
from plausible.core.networks import Where, as_initialised, check_inputs, choose_device
from plausible.core.priors import Earlier, Prior, as_prior
from plausible.core.tasks import Tasks, joined
from plausible.core.weights import Weights
from plausible.core.words import log
from plausible.engine import Checkpoint, Options
from plausible.engine.checkpoint import identity
from plausible.engine.data_parallel import assemble
from plausible.engine.method import Fitted, Method, Run
from plausible.engine.ranks import Ranks, Team
from plausible.engine.running import show_result
from plausible.methods import create
from plausible.methods.automatic.auto import Auto
from plausible.posteriors import doubts
from plausible.posteriors.base import Posterior, checked
from plausible.posteriors.saving import load
from plausible.posteriors.verdicts import text

__all__ = ["fit", "load"]

P = TypeVar("P", bound=Posterior, default=Posterior, covariant=True)


class Gives(Protocol[P]):
    """A method, as far as type checkers need to know it: the kind of posterior that it gives."""

    def posterior(self, model: Model, run: Run[Any], fitted: Fitted) -> P: ...


def fit(
    network: nn.Module | Model,
    data: Any,
    method: Gives[P] | str = "auto",
    *,
    likelihood: Likelihood | Mapping[str, Likelihood] | None = None,
    prior: Prior | Mapping[str, Prior] | None = None,
    where: Where = None,
    output: Callable[[Any], Any] | None = None,
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
    time: float | str | None = None,
) -> P:
    """p(w | D) ∝ p(D | w) p(w) for any network, by any method: module + data → `Posterior`.

    Args:
        network: a `torch.nn.Module`; never changed. A `Model` (say, a tempered one) is taken as it is.
        data: `(x, y)` or `(x, y, weights)` of tensors, arrays or frames (x may be a dict, tuple or nested), a `Dataset` or a
            `DataLoader`, which is streamed.
        method: an instance such as `MAP(epochs=100)`, or a name such as "map" for its defaults. "auto" chooses by rows, weights and
            `time`: chains where all data fit into them, then ensembles, then a last layer; see docs/methods/auto.md.
        likelihood: outputs → distribution of targets. Inferred if None: integers `Categorical`, booleans `Bernoulli`, floats
            `Gaussian` with learned noise (of "auto" `StudentT`), standardised inside unless the network was trained on them. A dict
            of them, for a network that returns a dict of outputs, and targets by the same names.
        prior: over all weights, or a mapping from name patterns to priors. Default `priors.Default()`, N(0, 2²/fan-in) for weights;
            what is given is never rescaled.
        where: which weights are random: a name pattern or several, "last", or a predicate of the name (and the weight). The
            others are trained as points, or keep their values for methods that do not train.
        output: picks f(x) from what the network returns, for example `lambda o: o.logits`.
        init: an earlier posterior to continue from.
        seed: the same seed gives the same bits on the same machine; torch's global generators are left as they were.
        device: "cpu", "cuda", "mps", "auto" for the best there is, or None for where the network is.
        compile: "auto" compiles or captures where that pays for the number of steps; True, False.
        progress: a bar; None shows it on a terminal and in a notebook only.
        checkpoint: a folder (or a `Checkpoint`) to write to now and then; if it holds one of the same run, that run goes on.
        callbacks: called with `(step, info)` after each step.
        num_data: examples in one pass, for iterable data sets without a length.
        mask: boolean, shaped like y, True where the target was observed; or "nan" to leave out NaN targets.
        precision: "bfloat16" runs the forward pass of methods that allow it in mixed precision; "tf32" lets an NVIDIA GPU multiply
            float32 matrices with 10-bit mantissas while training (several times faster; predictions stay exact).
        time: of "auto": about how long the fit may take, in seconds or as a text such as "5m"; about a minute if None.

    Under `torchrun` the members of an ensemble are split over the ranks, batches of other methods divided among them, and every
    rank returns the whole posterior; see docs/distributed.md.

    Raises ValueError or TypeError for bad input, `DivergenceError` where training meets NaN or infinity.

    """
    chosen = create(cast("Method | str", method))
    if time is not None:
        if not isinstance(chosen, Auto):
            raise ValueError(
                f"time= is for method='auto', which chooses by it; {type(chosen).__name__} runs as long as its settings say"
            )
        chosen = replace(chosen, time=time)
    if isinstance(seed, bool) or not hasattr(seed, "__index__") or operator.index(seed) < 0:
        raise ValueError(f"seed must be a whole number of at least 0, got {seed!r}")
    seed = operator.index(seed)
    if progress not in (None, True, False):
        raise TypeError(f"progress must be True, False or None, got {progress!r}")
    if callable(callbacks) or not isinstance(callbacks, Sequence) or not all(callable(callback) for callback in callbacks):
        raise TypeError("callbacks must be a sequence of functions of (step, info), such as callbacks=[print]")
    with assemble(chosen) as team:  # the other processes of a run under torchrun, or none
        module = network.network if isinstance(network, Model) else network
        chosen_device = choose_device(module, team.device(device, module))
        # networks and methods may draw from torch's global generators: they are seeded for the run, and put back
        with turns.one_fit(), torch.inference_mode(False), random.isolated(team.seed(seed), chosen_device):
            if init is not None and likelihood is None and isinstance(init, Posterior) and not isinstance(network, Model):
                likelihood = init.likelihood  # targets in the units of the earlier fit
            if isinstance(likelihood, Mapping | Tasks) and not isinstance(network, Model):
                likelihood, data = joined(network, likelihood, data, output)
            model, examples, chosen, choice = model_and_examples(
                network,
                data,
                cast("Likelihood | None", likelihood),
                prior,
                where,
                output,
                chosen_device,
                num_data,
                mask,
                precision,
                chosen,
                team,
                native=compile is not False,
            )
            fresh = init is None and not isinstance(network, Model) and likelihood is not None and as_initialised(network)
            said = doubts.before(model, examples, fresh=fresh)
            doubts.warn([] if team.rank else said)
            starts = None
            if init is not None:
                model, starts = continuing(model, init, getattr(chosen, "chains", None) or chosen.members or 1)
            if isinstance(team, Ranks):
                model, starts = team.agree(model, starts, identity(chosen, model, examples, seed))
            options = Options(
                seed=seed,
                compile=compile,
                progress=progress,
                callbacks=tuple(callbacks),
                checkpoint=Checkpoint.of(checkpoint),
                identity=identity(chosen, model, examples, seed, precision, starts) if checkpoint is not None else {},
                starts=starts,
                team=team,
            )
            if precision == "tf32" and chosen_device.type != "cuda":
                log.info("precision='tf32' has no effect on %s", chosen_device.type)
            with tensor_float(precision == "tf32" and chosen_device.type == "cuda"):
                model, run, fitted = engine.run(chosen, model, examples, options)
            resume = f"; resume with checkpoint={str(checkpoint)!r}" if checkpoint else ""
            if fitted.interrupted and fitted.draws is None and chosen.traits.keeps_draws:
                raise KeyboardInterrupt(f"stopped before the first draw was kept{resume}")
            posterior = chosen.posterior(model, run, fitted)
            if choice:
                posterior.run["choice"] = choice
            show_result(chosen, examples, posterior, fitted, callbacks)
            if not fitted.interrupted:
                later = doubts.after(posterior, run.data, run.held)
                doubts.warn([] if team.rank else later)
                said += later
            if said:
                posterior.run["doubts"] = [text([one]) for one in said]
    if fitted.interrupted and not team.rank:  # the first one says it
        warnings.warn(
            f"stopped by Ctrl-C after {fitted.steps:,} steps: this is the posterior so far"
            + ("; call fit again with the same checkpoint to go on" if checkpoint is not None else ""),
            UserWarning,
            stacklevel=2,
        )
    return cast("P", posterior)


def model_and_examples(
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
    team: Team | None = None,
    any_unit: bool = True,
    native: bool = True,
) -> tuple[Model, Data, Method, str]:
    """What the engine runs on: the model, the data in one of the forms that it reads, the method, and why it was chosen.

    Everything that can be checked without training is checked here. A `Model` given as `network` is used as it is; otherwise one
    is built, with the likelihood inferred from the targets and the default prior where none is given. `Auto` is settled here.
    Where `native`, chains that `Auto` chooses may be machine code.
    Without `any_unit` the network speaks in that of the targets, whatever they look like.
    """
    team = team or Team()
    module = network.network if isinstance(network, Model) else network
    first = next((p for p in module.parameters() if p.is_floating_point()), None)
    dtype = torch.float32 if first is None else first.dtype
    if dtype in (torch.bfloat16, torch.float16):
        kind = str(dtype).removeprefix("torch.")
        log.warning(
            "network is in %s, which rounds small steps and small noise away: fit network.float(), with precision='bfloat16'",
            kind,
        )
    if likelihood is not None and not isinstance(likelihood, Likelihood):
        hint = f"; write {likelihood.__name__}()" if isinstance(likelihood, type) else ""
        raise TypeError(f"likelihood must be one of plausible.likelihoods, got {likelihood!r}{hint}")
    examples = as_data(data, dtype=dtype, device=device, mask=mask, num_data=num_data)
    first_batch = examples.batch if isinstance(examples, ArrayData) else next(iter(examples.chunks(8)), None)
    if first_batch is None:
        raise ValueError("data is empty: the loader gave no batch")
    example = select_rows(first_batch, slice(8))  # enough to learn the shapes from
    if isinstance(network, Model):
        if any(v is not None for v in (likelihood, prior, where, output, precision)):
            raise ValueError("a Model brings its own likelihood, prior, where, output and precision: leave those arguments out")
        model = network.to(device)
        if model.num_data != examples.num_data:
            raise ValueError(f"the Model was made for {model.num_data} examples and data has {examples.num_data}")
        with torch.no_grad():
            check_inputs(model, example.x)
        examples = checked(model, examples)
        if not isinstance(method, Auto):
            return model, examples, method, ""
        choice = method.choose(model, examples, fresh=True, likelihood=model.likelihood, prior=model.prior, native=native)
        log.info("auto: %s", choice.reason)
        return model, examples, choice.method, choice.reason

    def build(law: Likelihood, belief: Prior, precision: torch.dtype | None) -> Model:
        return Model.build(
            network,
            law,
            belief,
            example,
            num_data=examples.num_data,
            where=where,
            output=output,
            device=device,
            precision=precision,
            # arrays are checked as a whole below; of a stream these few rows are all there is to look at now
            check_targets=not isinstance(examples, ArrayData),
        )

    # a method that is chosen yet has no say in the precision
    narrow = None if isinstance(method, Auto) else _as_precision(precision, method)
    law, belief = infer(example.y) if likelihood is None else likelihood, as_prior(prior)
    model = build(law, belief, narrow)
    examples = checked(model, examples)
    seen: targets.Look | None = None
    if isinstance(method, Auto) or (any_unit and likelihood is None and law.kind == "continuous"):
        # a method without a training of its own takes the weights as they are, and with them the units that the network speaks in
        seen = team.first(targets.look(model, examples, given=getattr(method, "mode", method) is None))
    reason = ""
    if isinstance(method, Auto):
        given = None if prior is None else belief
        fresh = not (seen and seen.trained)
        choice = method.choose(model, examples, fresh=fresh, likelihood=likelihood, prior=given, native=native)
        method, law, belief, reason = choice.method, choice.likelihood or law, choice.prior or belief, choice.reason
        narrow = _as_precision(precision, method)
        log.info("auto: %s", reason)
    if likelihood is None:
        # targets may be in any unit, unless somebody has said what outputs mean: by training, or by an earlier posterior
        if seen is not None and not seen.trained and not isinstance(belief, Earlier):
            law = targets.in_their_units(law, seen)
        kind = str(example.y.dtype).removeprefix("torch.")
        log.info("likelihood: %s, inferred from targets of type %s", law, kind)
    if prior is None:
        log.info("prior: %s, the default", belief)
    if (law, belief, narrow) != (model.likelihood, model.prior, model.precision):
        model = build(law, belief, narrow)
    return model, examples, method, reason


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
    """Inside the block, where it is wanted, products of float32 matrices run in TensorFloat-32; PyTorch's setting is put back."""
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
    """For `fit(init=…)`: the model with the last starting point as its initial weights, and all starting points, stacked.

    Which they are, the earlier posterior says (`starting_points`): the last states of its chains or members, draws spread evenly
    over a single chain, or the means of a law over the weights (and draws of it where there are several `members`). A method
    without members starts at the model's initial weights, an ensemble or a sampler at the points in turn.
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
