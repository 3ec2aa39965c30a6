"""Bayesian learning in a training loop of your own: IVON, and chains, as a `torch.optim.Optimizer`.

    for x, y in loader:
        with optimizer.sampled_params(train=True):  # weights drawn from q; once or several times
            loss(network(x), y).backward()
        optimizer.step()

IVON takes the steps of `plausible.natural_gradients`, as the method `plausible.IVON` does, on the parameters themselves. SGLD,
PSGLD, SGHMC and SGNHT take those of the methods of these names, in the loop of any other optimiser: the parameters after a step are
a draw.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from plausible.apps.chain_optimisers import PSGLD, SGHMC, SGLD, SGNHT, Rules, check, noise_for
from plausible.blocks.natural_gradients import descend, deviation, price, wide
from plausible.core import random
from plausible.core.weights import clone, select

if TYPE_CHECKING:
    from plausible.core.likelihoods import Likelihood
    from plausible.methods import Method
    from plausible.posteriors.laws import LawPosterior

__all__ = ["IVON", "PSGLD", "SGHMC", "SGLD", "SGNHT"]

TRAIN, TEST = "train", "test"


class IVON(torch.optim.Optimizer):
    """h ← β₂h + (1 − β₂)ĥ + ½(1 − β₂)²(h − ĥ)²/(h + δ),  ĥ = ĝε/σ;  m ← m − lr·(g + δm)/(h + δ);  σ² = 1/(ess·(h + δ))

    Independent Gaussians q = N(m, σ²) over the parameters, at the cost of Adam (Shen et al. 2024, "Variational learning is
    effective for large deep networks"). Between steps the parameters hold the means m; inside `sampled_params` they hold a draw.

    Args:
        params: parameters, named parameters or groups of them; every setting but `seed` may differ between groups.
        lr: learning rate. With `rescale_lr` it is multiplied by `initial_hessian` + `weight_decay`, so that the first steps are
            those of gradient descent with this rate, as in the authors' code; without, it counts in Newton steps.
        ess: λ, the effective number of examples: N, or N over a temperature. The loss must be a mean over examples.
        beta1, beta2: memory of the gradient and of the curvature.
        initial_hessian: h at the start; σ starts at 1/√(ess·(h + δ)).
        weight_decay: δ, the precision of a centred Gaussian prior over N: 1/(N·scale²).
        damping: added to h + δ where it divides the gradient, not in σ.
        clip_radius: bound on each element of (g + δm)/(h + δ).
        rescale_lr: see `lr`.
        seed: of the noise, which is a function of the seed and the number of the draw; torch's global generators are left alone.
            Processes that share gradients must share the seed.

    Momentum and curvature are kept in float32 at least. Memory: two numbers a weight, and two more while weights are drawn.

    """

    _step_supports_amp_scaling = True  # GradScaler hands the scale over instead of dividing the gradients

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        ess: float,
        *,
        beta1: float = 0.9,
        beta2: float = 0.99999,
        initial_hessian: float = 1.0,
        weight_decay: float = 1e-4,
        damping: float = 0.0,
        clip_radius: float = math.inf,
        rescale_lr: bool = True,
        seed: int = 0,
    ):
        self._seed, self._counts, self._inside = seed, {TRAIN: 0, TEST: 0}, False
        random.key(seed)  # says what a seed is
        settings = {"lr": lr, "ess": ess, "beta1": beta1, "beta2": beta2, "initial_hessian": initial_hessian}
        settings |= {"weight_decay": weight_decay, "damping": damping, "clip_radius": clip_radius, "rescale_lr": rescale_lr}
        super().__init__(params, settings)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with settings of their own; they are checked here."""
        super().add_param_group(param_group)
        try:
            check("IVON", self.param_groups[-1], IVON_RULES)
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

    @contextlib.contextmanager
    def sampled_params(self, train: bool = False) -> Iterator[None]:
        """Within the block the parameters hold a draw from q; after it they hold the means again, bit for bit.

        `train=True` collects the gradients that the block leaves in `.grad`: afterwards `.grad` is their mean over the draws since
        the last step, and the curvature is estimated with them. Draws may see the same batch (a better estimate) or parts of it
        (gradient accumulation; each part with the mean loss over its own examples, parts of equal size). Where the block raises,
        nothing is collected. Training and test draws have separate streams of noise.
        """
        if self._inside:
            raise RuntimeError("sampled_params: the parameters hold a draw already; leave that block first")
        kind = TRAIN if train else TEST
        chosen = [(p, group) for group in self.param_groups for p in group["params"] if p.requires_grad]
        noises = noise_for([p for p, _ in chosen], self._counts[kind], self._seed, int(kind == TEST))
        self._counts[kind] += 1
        # Kept and put back: subtracting the noise again would round.
        held = [parameter.detach().clone() for parameter, _ in chosen]
        grads = [parameter.grad for parameter, _ in chosen]
        counts = [self.state[p]["draws"] for (p, _), grad in zip(chosen, grads) if self.state[p] and grad is not None]
        since = max(counts, default=0)
        with torch.no_grad():
            for (parameter, group), noise in zip(chosen, noises):
                state = self._ready(parameter, group)
                parameter.copy_(parameter + deviation(state["curvature"], group["ess"]) * noise)
                if train:
                    parameter.grad = None
        self._inside, finished = True, False
        try:
            yield
            finished = True
        finally:
            self._inside = False
            with torch.no_grad():
                for (parameter, group), mean, noise, grad in zip(chosen, held, noises, grads):
                    parameter.copy_(mean)
                    if train:
                        self._collect(parameter, group, noise, grad, finished, since)

    def _collect(
        self, parameter: Tensor, group: dict[str, Any], noise: Tensor, before: Tensor | None, use: bool, since: int
    ) -> None:
        """Mix the gradient of one draw into the running means of gradient and curvature over `since` draws before it."""
        state, grad = self.state[parameter], parameter.grad
        kept = before if state["draws"] else None  # what was there before the first draw belongs to none
        # A parameter without influence on a part of the step has the gradient 0 there, now or on the parts before.
        if use and grad is None and kept is not None:
            grad = torch.zeros_like(kept)
        if use and grad is not None and kept is None and since:
            kept = torch.zeros_like(grad)
            state["estimate"] = torch.zeros_like(state["curvature"])
        parameter.grad = kept
        if not use or grad is None:
            return
        if grad.is_sparse:
            raise RuntimeError("IVON needs dense gradients, and one is sparse: use sparse=False in the embedding")
        state["draws"] = since + 1
        estimate = price(noise, grad.to(noise.dtype), state["curvature"], group["ess"])
        parameter.grad = grad if kept is None else kept + (grad - kept) / (since + 1)
        state["estimate"] = estimate if kept is None else state["estimate"] + (estimate - state["estimate"]) / (since + 1)

    def _ready(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        state = self.state[parameter]
        if not state:
            start = group["initial_hessian"] + group["weight_decay"]
            state["step"], state["draws"] = 0, 0
            state["momentum"] = torch.zeros_like(parameter, dtype=wide(parameter), requires_grad=False)
            state["curvature"] = torch.full_like(state["momentum"], start)
        return state

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear `.grad`; outside of `sampled_params` also forget the draws since the last step."""
        super().zero_grad(set_to_none)
        if not self._inside:
            self._forget()

    def _forget(self) -> None:
        for state in self.state.values():
            state["draws"] = 0
            state.pop("estimate", None)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, samples: int = 1) -> Any:  # type: ignore[override]
        """Move the means and the curvature by the gradients collected since the last step; `.grad` stays for `zero_grad`.

        With a `closure` (which clears gradients, computes the loss, calls backward and returns it) `samples` draws are taken here,
        and the mean of their losses is returned. Parameters without a gradient are left alone. After `GradScaler.scale(loss)` call
        `scaler.step(optimizer)` without `scaler.unscale_`: a step with infinite gradients is then left out.
        """
        if self._inside:
            raise RuntimeError("step: the parameters hold a draw; leave the block of sampled_params first")
        loss = None
        if closure is not None:
            losses = []
            for _ in range(samples):
                with torch.enable_grad(), self.sampled_params(train=True):
                    losses.append(closure())
            loss = losses[0] if samples == 1 or losses[0] is None else sum(losses) / samples
        scale, overflow = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if overflow is not None and scale is None:
            raise RuntimeError(
                "IVON: scaler.unscale_(optimizer) has divided the gradients but not the curvature; call scaler.step(optimizer) "
                "without it, and bound steps by clip_radius"
            )
        if overflow is None or not bool(overflow):
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._advance(parameter, group, 1.0 if scale is None else 1.0 / scale)
        self._forget()
        return loss

    def _advance(self, parameter: Tensor, group: dict[str, Any], factor: Any) -> None:
        state = self.state.get(parameter, {})
        if not state or not state["draws"]:
            raise RuntimeError(
                "step: found a gradient that belongs to no draw; call backward inside "
                "`with optimizer.sampled_params(train=True):`, or pass step a closure"
            )
        state["step"] += 1
        lr, start = group["lr"], group["initial_hessian"] + group["weight_decay"]
        mean, state["momentum"], state["curvature"] = descend(
            parameter,
            state["momentum"],
            state["curvature"],
            parameter.grad.to(state["momentum"].dtype) * factor,  # type: ignore[union-attr]
            state["estimate"] * factor,
            lr=lr * start if group["rescale_lr"] else lr,
            correction=1 - group["beta1"] ** state["step"],
            beta1=group["beta1"],
            beta2=group["beta2"],
            decay=group["weight_decay"],
            damping=group["damping"],
            clip_radius=group["clip_radius"],
        )
        parameter.copy_(mean)

    def state_dict(self) -> dict[str, Any]:
        """Everything a bit-equal continuation needs: momentum, curvature, steps, draws since the last step, and the noise."""
        whole = super().state_dict()
        whole["state"] = {place: dict(state) for place, state in whole["state"].items()}
        for place, parameter in enumerate(p for group in self.param_groups for p in group["params"]):
            if self.state.get(parameter, {}).get("draws"):
                whole["state"][place]["gradient"] = parameter.grad
        return {**whole, "noise": {"seed": self._seed, **self._counts}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken; the parameters themselves are loaded with their module."""
        if "noise" not in state_dict:
            raise ValueError("load_state_dict: this is not a state of plausible.optim.IVON: it has no entry 'noise'")
        super().load_state_dict(dict(state_dict))
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        places = [place for group in state_dict["param_groups"] for place in group["params"]]
        # torch casts a state to the type of its parameter, which may be narrower than momentum and curvature are kept in.
        for parameter, place in zip(parameters, places):
            given = {
                key: value.detach().to(parameter.device, copy=True) if isinstance(value, Tensor) else copy.copy(value)
                for key, value in state_dict["state"].get(place, {}).items()
            }
            if "gradient" in given:
                parameter.grad = given.pop("gradient")
            if given:
                self.state[parameter] = given
        noise = state_dict["noise"]
        self._seed, self._counts = noise["seed"], {TRAIN: noise[TRAIN], TEST: noise[TEST]}

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_seed": self._seed, "_counts": dict(self._counts), "_inside": False}

    def scale(self, parameter: Tensor) -> Tensor:
        """σ of one parameter, in its shape, in float32 at least."""
        for group in self.param_groups:
            if any(parameter is other for other in group["params"]):
                return deviation(self._ready(parameter, group)["curvature"], group["ess"])
        raise ValueError(f"scale: the optimizer has no such parameter (of shape {tuple(parameter.shape)})")

    def posterior(
        self, network: nn.Module, data: Any, *, likelihood: Likelihood | None = None, **settings: Any
    ) -> LawPosterior:
        """Return q as a `plausible` posterior of `network`: predictions, metrics, decisions, `save`.

        `data` are some examples `(x, y)` for shapes and types. The likelihood must have no weights of its own; `settings` are
        `output` and `num_data` of `plausible.fit`. Parameters that the optimizer does not have are points. The prior is that of
        `weight_decay`.
        """
        from plausible.core import priors
        from plausible.core.networks import choose_device
        from plausible.core.priors.composed import by_name
        from plausible.fitting import model_and_examples
        from plausible.posteriors.laws import DiagonalGaussian, LawPosterior

        held = {id(p): group for group in self.param_groups for p in group["params"]}
        named = {name: p for name, p in network.named_parameters() if id(p) in held and p.requires_grad}
        if not named:
            raise ValueError("posterior: none of the network's parameters belongs to this optimizer")
        rules: dict[str, priors.Prior] = {}
        for name, parameter in named.items():
            group = held[id(parameter)]
            precision = group["weight_decay"] * group["ess"]
            rules[name] = priors.Gaussian(precision**-0.5) if precision else priors.Flat()
        method = _as_method(self.param_groups[0])
        prior, where = by_name(rules, priors.Flat()), lambda name: name in named
        output, num_data, device = settings.pop("output", None), settings.pop("num_data", None), choose_device(network, None)
        model, *_ = model_and_examples(
            network, data, likelihood, prior, where, output, device, num_data, None, None, method, any_unit=False
        )
        if settings:
            raise TypeError(f"posterior: unknown settings {', '.join(settings)}; there are output and num_data")
        if model.likelihood_names:
            raise ValueError(
                f"posterior: {likelihood or model.likelihood} has weights of its own, {', '.join(model.likelihood_names)}, "
                "that this optimizer has not learned; give a fixed one, such as likelihoods.Gaussian(scale=0.1)"
            )
        means = clone(select(named, model.random))
        scales = {name: self.scale(named[name]).to(mean.dtype) for name, mean in means.items()}
        points = clone({**select(model.initial, model.points), **model.buffers})
        steps = max((state["step"] for state in self.state.values()), default=0)
        run: dict[str, Any] = {"history": {}, "steps": steps, "seconds": 0.0, "mode": "own loop", "interrupted": False}
        return LawPosterior(method, model, run, DiagonalGaussian(means, scales, dict.fromkeys(means, "weights")), points)


def _as_method(group: Mapping[str, Any]) -> Method:
    """The method that takes the same steps; a schedule's first rate stands for all."""
    from plausible import methods

    lr = float(group.get("initial_lr", group["lr"]))
    lr = lr * (group["initial_hessian"] + group["weight_decay"]) if group["rescale_lr"] else lr
    kept: dict[str, Any] = {n: group[n] for n in ("beta1", "beta2", "initial_hessian", "damping", "clip_radius")}
    return methods.IVON(**kept, lr=lr) if lr else methods.IVON(**kept)


IVON_RULES: Rules = {
    "lr": (lambda v: 0 <= v < math.inf, "at least 0"),
    "ess": (lambda v: 0 < v < math.inf, "positive and finite"),
    "beta1": (lambda v: 0 <= v < 1, "in [0, 1)"),
    "beta2": (lambda v: 0.5 <= v < 1, "in [0.5, 1)"),
    "initial_hessian": (lambda v: 0 < v < math.inf, "positive and finite"),
    "weight_decay": (lambda v: 0 <= v < math.inf, "at least 0 and finite"),
    "damping": (lambda v: 0 <= v < math.inf, "at least 0 and finite"),
    "clip_radius": (lambda v: v > 0, "positive"),
}
