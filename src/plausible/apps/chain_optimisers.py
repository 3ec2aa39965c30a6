"""Chains by stochastic gradients as optimisers: the steps of SGLD, PSGLD, SGHMC and SGNHT on parameters themselves."""

from __future__ import annotations

import copy
import math
import numbers
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from plausible.blocks.natural_gradients import wide
from plausible.core import random


def noise_for(parameters: list[Tensor], count: int, seed: int, *path: int) -> list[Tensor]:
    """N(0, 1) for each parameter: on the CPU by key and counter, on other devices by a generator seeded with both."""
    # Noise is a function of seed, stream and number of the draw, so that a resumed run draws what it would have drawn.
    like = {i: p if p.dtype == wide(p) else torch.empty_like(p, dtype=wide(p)) for i, p in enumerate(parameters)}
    here = {str(i): p for i, p in like.items() if p.device.type == "cpu"}
    noise = random.normal(random.key(seed, *path), count, here) if here else {}
    generators: dict[torch.device, torch.Generator] = {}
    for i, p in like.items():
        if p.device.type != "cpu":
            if p.device not in generators:
                number = random.generator(seed, *path, count).initial_seed()
                generators[p.device] = torch.Generator(p.device).manual_seed(number)
            noise[str(i)] = torch.randn(p.shape, dtype=p.dtype, device=p.device, generator=generators[p.device])
    return [noise[str(i)] for i in like]


Rules = Mapping[str, tuple[Callable[[float], bool], str]]
CHAIN_RULES: Rules = {
    "lr": (lambda v: 0 <= v < math.inf, "at least 0"),
    "num_data": (lambda v: 0 < v < math.inf, "positive and finite"),
    "temperature": (lambda v: 0 <= v < math.inf, "at least 0 and finite"),
}


def check(who: str, group: Mapping[str, Any], rules: Rules) -> None:
    """Refuse settings that make no law, and parameters that are not real numbers."""
    for name, (holds, words) in rules.items():
        value = group[name]
        if isinstance(value, bool) or not isinstance(value, numbers.Real | Tensor):
            raise TypeError(f"{who}: {name} must be a number, got {value!r}")
        if not holds(float(value)):
            raise ValueError(f"{who}: {name} must be {words}, got {value!r}")
    for parameter in group["params"]:
        if not parameter.is_floating_point():
            what = parameter.dtype
            raise TypeError(f"{who}: parameters must be real floating-point tensors, got {what}; leave it out of params")


class ChainOptimizer(torch.optim.Optimizer):
    """The base of chains: a subclass says how a parameter `moves`, in units of the log joint of all data."""

    RULES: ClassVar[Rules] = CHAIN_RULES

    def __init__(self, params: Iterable[Any], settings: dict[str, Any], seed: int):
        self._seed, self._steps = seed, 0
        random.key(seed)  # says what a seed is
        super().__init__(params, settings)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with settings of their own; they are checked here."""
        super().add_param_group(param_group)
        try:
            check(type(self).__name__, self.param_groups[-1], self.RULES)
            self._check_group(self.param_groups[-1])
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

    def _check_group(self, group: dict[str, Any]) -> None:
        """What settings must fulfil together; and what a group has beside them."""

    def _move(self, parameter: Tensor, group: dict[str, Any], up: Tensor, noise: Tensor) -> Tensor:
        """The new values, from the gradient of log p(θ, D) and N(0, 1)."""
        raise NotImplementedError

    def _moved(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        """After all parameters of a group that had a gradient have moved."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Move the parameters by their gradients and the noise; returns what `closure` returned, where there is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        noises = iter(
            noise_for([p for g in self.param_groups for p in g["params"] if p.requires_grad], self._steps, self._seed)
        )
        self._steps += 1
        for group in self.param_groups:
            moved = []
            for parameter in (p for p in group["params"] if p.requires_grad):
                noise = next(noises)
                if parameter.grad is None:
                    continue
                if parameter.grad.is_sparse:
                    who = type(self).__name__
                    raise RuntimeError(f"{who} needs dense gradients, and one is sparse: use sparse=False in the embedding")
                up = -group["num_data"] * parameter.grad.to(noise.dtype)
                parameter.copy_(self._move(parameter, group, up, noise))
                moved.append(parameter)
            if moved:
                self._moved(group, moved)
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Everything a bit-equal continuation needs: settings, what the dynamics carry, and where the noise is."""
        return {**super().state_dict(), "noise": {"seed": self._seed, "steps": self._steps}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken; the parameters themselves are loaded with their module."""
        if "steps" not in state_dict.get("noise", {}):
            raise ValueError(
                f"load_state_dict: this is not a state of plausible.optim.{type(self).__name__}: it has no entry 'noise' with its "
                "steps"
            )
        super().load_state_dict(dict(state_dict))
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        places = [place for group in state_dict["param_groups"] for place in group["params"]]
        # torch casts a state to the type of its parameter, which may be narrower than what is carried
        for parameter, place in zip(parameters, places):
            if given := state_dict["state"].get(place):
                self.state[parameter] = {
                    key: value.detach().to(parameter.device, copy=True) if isinstance(value, Tensor) else copy.copy(value)
                    for key, value in given.items()
                }
        self._seed, self._steps = state_dict["noise"]["seed"], state_dict["noise"]["steps"]

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_seed": self._seed, "_steps": self._steps}

    def _carried(self, parameter: Tensor, name: str) -> Tensor:
        """What the dynamics carry beside a parameter, 0 at first, in float32 at least."""
        state = self.state[parameter]
        if name not in state:
            state[name] = torch.zeros_like(parameter, dtype=wide(parameter), requires_grad=False)
        return state[name]


class SGLD(ChainOptimizer):
    """θ ← θ − (ε/2)·N·∇loss(θ) + √(ε T) ξ,  ξ ~ N(0, I),  where loss(θ) = −log p(θ, D)/N

    Stochastic-gradient Langevin dynamics (Welling & Teh 2011): the parameters after a step are a draw, near the posterior once the
    loop has run for a while.

    Args:
        params: parameters, named parameters or groups of them; every setting but `seed` may differ between groups.
        lr: ε of the method `plausible.SGLD`, in units of the full-data log joint: good values fall like 1/N.
        num_data: N. The loss must be a mean over examples of −log p(y | x, θ), plus −log p(θ)/N: for a Gaussian prior
            ‖θ‖²/(2·N·scale²).
        temperature: T = 1 samples the posterior, below 1 a cold one, and 0 is gradient descent with the rate ε·N/2.
        seed: of the noise, which is a function of the seed and the number of the step; torch's global generators are left alone.
            Processes that share gradients must share the seed.

    Parameters without a gradient are left alone. Memory: none beside the parameters.

    """

    def __init__(self, params: Iterable[Any], lr: float, *, num_data: float, temperature: float = 1.0, seed: int = 0):
        super().__init__(params, {"lr": lr, "num_data": num_data, "temperature": temperature}, seed)

    def _move(self, parameter: Tensor, group: dict[str, Any], up: Tensor, noise: Tensor) -> Tensor:
        return parameter + 0.5 * group["lr"] * up + (group["lr"] * group["temperature"]) ** 0.5 * noise


class PSGLD(ChainOptimizer):
    """θ ← θ − (ε/2)·N·G∇loss(θ) + √(ε T G) ξ,  G = 1/(λ + √V),  V ← αV + (1 − α)(∇loss)²,  where loss(θ) = −log p(θ, D)/N

    SGLD with a step size for each parameter by RMSProp (Li et al. 2016), as the method `plausible.PSGLD` without `gamma`.

    Args:
        params, num_data, temperature, seed: as of `SGLD`.
        lr: ε, in units of the full-data log joint times G.
        decay: α; V is divided by 1 − α^t, so that it starts at its own size.
        damping: λ.

    Parameters without a gradient are left alone. Memory: one number a parameter.

    """

    RULES: ClassVar[Rules] = {
        **CHAIN_RULES,
        "decay": (lambda v: 0 <= v < 1, "in [0, 1)"),
        "damping": (lambda v: 0 < v < math.inf, "positive and finite"),
    }

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        *,
        num_data: float,
        temperature: float = 1.0,
        decay: float = 0.99,
        damping: float = 1e-5,
        seed: int = 0,
    ):
        settings = {"lr": lr, "num_data": num_data, "temperature": temperature, "decay": decay, "damping": damping}
        super().__init__(params, settings, seed)

    def _move(self, parameter: Tensor, group: dict[str, Any], up: Tensor, noise: Tensor) -> Tensor:
        square, state = self._carried(parameter, "square"), self.state[parameter]
        state["step"] = state.get("step", 0) + 1
        square.mul_(group["decay"]).add_((1 - group["decay"]) * (up / group["num_data"]).square())
        metric = 1 / (group["damping"] + (square / (1 - group["decay"] ** state["step"])).sqrt())
        spread = (group["lr"] * group["temperature"]) ** 0.5
        return parameter + 0.5 * group["lr"] * metric * up + spread * metric.sqrt() * noise


class SGHMC(ChainOptimizer):
    """v ← (1 − α)v − η·N·∇loss(θ) + √(2(α − β̂)ηT) ξ,  θ ← θ + v,  where loss(θ) = −log p(θ, D)/N

    Langevin dynamics with momentum and friction (Chen, Fox & Guestrin 2014), as the method `plausible.SGHMC`.

    Args:
        params, num_data, temperature, seed: as of `SGLD`.
        lr: η, in units of the full-data log joint.
        friction: α; 1 is `SGLD` with ε = 2η.
        noise: β̂, the friction whose noise batches already bring.

    Parameters without a gradient are left alone. Memory: one number a parameter.

    """

    RULES: ClassVar[Rules] = {
        **CHAIN_RULES,
        "friction": (lambda v: 0 < v <= 1, "above 0 and at most 1"),
        "noise": (lambda v: 0 <= v < math.inf, "at least 0"),
    }

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        *,
        num_data: float,
        temperature: float = 1.0,
        friction: float = 0.1,
        noise: float = 0.0,
        seed: int = 0,
    ):
        settings = {"lr": lr, "num_data": num_data, "temperature": temperature, "friction": friction, "noise": noise}
        super().__init__(params, settings, seed)

    def _check_group(self, group: dict[str, Any]) -> None:
        if group["noise"] > group["friction"]:
            raise ValueError(f"SGHMC: noise={group['noise']:g} is more than friction={group['friction']:g} can take away")

    def _move(self, parameter: Tensor, group: dict[str, Any], up: Tensor, noise: Tensor) -> Tensor:
        spread = (2 * (group["friction"] - group["noise"]) * group["lr"] * group["temperature"]) ** 0.5
        velocity = self._carried(parameter, "velocity")
        velocity.mul_(1 - group["friction"]).add_(group["lr"] * up).add_(spread * noise)
        return parameter + velocity


class SGNHT(ChainOptimizer):
    """v ← (1 − α)v − η·N·∇loss(θ) + √(2aηT) ξ,  θ ← θ + v,  α ← α + κ(‖v‖²/(PηT) − 1),  where loss(θ) = −log p(θ, D)/N

    Langevin dynamics whose friction follows the noise of the batches (Ding et al. 2014), as the method `plausible.SGNHT`; each
    group of parameters has a thermostat of its own.

    Args:
        params, num_data, seed: as of `SGLD`.
        lr: η, in units of the full-data log joint.
        temperature: T, above 0.
        diffusion: a, the noise that is added; α starts there.
        gain: κ, the pace of the thermostat.

    Parameters without a gradient are left alone. Memory: one number a parameter.

    """

    RULES: ClassVar[Rules] = {
        **CHAIN_RULES,
        "temperature": (lambda v: 0 < v < math.inf, "positive and finite"),
        "diffusion": (lambda v: 0 < v < 1, "in (0, 1)"),
        "gain": (lambda v: 0 < v < 1, "in (0, 1)"),
    }

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        *,
        num_data: float,
        temperature: float = 1.0,
        diffusion: float = 0.05,
        gain: float = 0.01,
        seed: int = 0,
    ):
        settings = {"lr": lr, "num_data": num_data, "temperature": temperature, "diffusion": diffusion, "gain": gain}
        super().__init__(params, settings, seed)

    def _check_group(self, group: dict[str, Any]) -> None:
        group.setdefault("thermostat", torch.tensor(float(group["diffusion"]), device=group["params"][0].device))

    def _move(self, parameter: Tensor, group: dict[str, Any], up: Tensor, noise: Tensor) -> Tensor:
        spread = (2 * group["diffusion"] * group["lr"] * group["temperature"]) ** 0.5
        velocity = self._carried(parameter, "velocity")
        velocity.mul_(1 - group["thermostat"].to(velocity.device)).add_(group["lr"] * up).add_(spread * noise)
        return parameter + velocity

    def _moved(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        heat = group["lr"] * group["temperature"] * sum(parameter.numel() for parameter in parameters)
        if heat > 0:  # a rate of 0 has no temperature to hold
            squares = (self.state[p]["velocity"].square().sum(dtype=torch.float32) for p in parameters)
            energy = sum(square.to(group["thermostat"].device) for square in squares)
            group["thermostat"] = group["thermostat"] + group["gain"] * (energy / heat - 1)
