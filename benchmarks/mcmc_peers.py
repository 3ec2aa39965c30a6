"""Candidates of `benchmarks.mcmc` that need libraries of their own, each imported where it is used.

`leapfrogs(name, chains)` gives a function that runs trajectories of 50 leapfrogs, `sampler(name, …)` one that draws from the
posterior and says how long that took. This file imports nothing of ours, so that it runs in the peers' environment.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.mcmc_problem import NOISE, problem, start, unpack

LENGTH = 50
"""Leapfrogs of a trajectory."""
STEP = 1e-3
"""The step size where only time counts."""


# JAX ------------------------------------------------------------------------------------------------------------------


def jax_density() -> Callable[[Any], Any]:
    """log p(D | q) p(q) up to a constant, of one position."""
    import jax.numpy as jnp

    x, y, _ = map(jnp.asarray, problem())

    def density(position: Any) -> Any:
        first, bias, second, last = unpack(position)
        error = y - (jnp.tanh(x @ first.T + bias) @ second.T + last)
        return -0.5 * (error**2).sum() / NOISE**2 - 0.5 * (position**2).sum()

    return density


def blackjax_leapfrogs(chains: int) -> Callable[[int], None]:
    """`blackjax.hmc`, many transitions in one program; several chains by vmap."""
    import blackjax
    import jax
    import jax.numpy as jnp

    density = jax_density()
    kernel = blackjax.hmc(density, STEP, jnp.ones(start(1).shape[1]), LENGTH)
    first = jnp.asarray(start(chains))
    state = jax.vmap(kernel.init)(first) if chains > 1 else kernel.init(first[0])
    step = jax.vmap(kernel.step) if chains > 1 else kernel.step

    def run(state: Any, key: Any, count: int) -> Any:
        def one(state: Any, key: Any) -> Any:
            return step(jax.random.split(key, chains) if chains > 1 else key, state)[0], None

        return jax.lax.scan(one, state, jax.random.split(key, count))[0]

    compiled = jax.jit(run, static_argnums=2)
    return lambda count: jax.block_until_ready(compiled(state, jax.random.PRNGKey(0), count))


def numpyro_leapfrogs(chains: int) -> Callable[[int], None]:
    """`numpyro.infer.HMC` without adaptation, many transitions in one program; several chains vectorised, as by its `MCMC`."""
    import jax
    import jax.numpy as jnp
    from numpyro.infer import HMC

    density, first = jax_density(), jnp.asarray(start(chains))
    kernel = HMC(
        potential_fn=lambda q: -density(q),
        step_size=STEP,
        trajectory_length=STEP * LENGTH,
        adapt_step_size=False,
        adapt_mass_matrix=False,
    )
    keys = jax.random.split(jax.random.PRNGKey(0), chains)
    state = kernel.init(keys if chains > 1 else keys[0], 0, first if chains > 1 else first[0], (), {})
    step = lambda s: kernel.sample(s, (), {})  # noqa: E731  vmapped by `init` where it got several keys
    compiled = jax.jit(lambda s, n: jax.lax.fori_loop(0, n, lambda _, s: step(s), s))
    return lambda count: jax.block_until_ready(compiled(state, count))


def numpyro_nuts(chains: int, warmup: int, draws: int, seed: int) -> dict[str, Any]:
    """NUTS with its defaults; transitions one by one from a program compiled beforehand; several chains vectorised."""
    import jax
    import jax.numpy as jnp
    from numpyro.infer import NUTS

    density, first = jax_density(), jnp.asarray(start(chains, seed + 1))
    kernel = NUTS(potential_fn=lambda q: -density(q))
    keys = jax.random.split(jax.random.PRNGKey(seed), chains)
    state = kernel.init(keys if chains > 1 else keys[0], warmup, first if chains > 1 else first[0], (), {})
    begun = time.perf_counter()
    compiled = jax.jit(lambda s: kernel.sample(s, (), {})).lower(state).compile()  # vmapped, if `init` got several keys
    found = {"compile": time.perf_counter() - begun, **_chain(compiled, state, warmup, draws)}
    last = found.pop("state")
    sizes = np.atleast_1d(np.asarray(last.adapt_state.step_size))
    inverse = last.adapt_state.inverse_mass_matrix
    inverse = next(iter(inverse.values())) if isinstance(inverse, dict) else inverse
    return {**found, "step_size": float(np.median(sizes)), "inverse_mass": np.atleast_2d(np.asarray(inverse))[0]}


def _chain(step: Callable[[Any], Any], state: Any, warmup: int, draws: int) -> dict[str, Any]:
    """Warm up, draw, and tell times and leapfrogs of both."""
    import jax

    seconds, used, counts, positions = [], [], [0, 0], []
    for part, count in enumerate((warmup, draws)):
        begun, worked = time.perf_counter(), time.process_time()
        for _ in range(count):
            state = jax.block_until_ready(step(state))
            counts[part] += int(np.asarray(state.num_steps).sum())
            if part:
                positions.append(np.asarray(state.z))
        seconds.append(time.perf_counter() - begun)
        used.append(time.process_time() - worked)
    array = np.stack(positions)  # [draws, 601] or [draws, chains, 601]
    array = array[None] if array.ndim == 2 else array.swapaxes(0, 1)
    return {
        "warmup": seconds[0],
        "seconds": seconds[1],
        "warmup_leapfrogs": counts[0],
        "leapfrogs": counts[1],
        "cpu": used[1],
        "positions": array,
        "state": state,
    }


# PyTorch --------------------------------------------------------------------------------------------------------------


def torch_density() -> Callable[[Any], Any]:
    """The same of positions `[..., 601]` in PyTorch."""
    import torch

    x, y, _ = map(torch.from_numpy, problem())

    def density(position: Any) -> Any:
        first, bias, second, last = unpack(position)
        hidden = torch.tanh(x @ first.mT + bias.unsqueeze(-2))
        error = y - (hidden @ second.mT + last.unsqueeze(-2))
        return -0.5 * (error**2).sum((-1, -2)) / NOISE**2 - 0.5 * (position**2).sum(-1)

    return density


def handwritten_leapfrogs(chains: int) -> Callable[[int], None]:
    """What one writes by hand: leapfrogs compiled in blocks of ten, the momentum and the decision eager."""
    import torch

    density = torch_density()

    def gradient(position: Any) -> Any:
        return torch.func.grad(lambda q: density(q).sum())(position)

    @torch.compile(fullgraph=True, dynamic=False)
    def block(position: Any, momentum: Any, slope: Any) -> Any:
        for _ in range(10):
            momentum = momentum + 0.5 * STEP * slope
            position = position + STEP * momentum
            slope = gradient(position)
            momentum = momentum + 0.5 * STEP * slope
        return position, momentum, slope

    shape = (chains,) if chains > 1 else ()
    first = torch.from_numpy(start(chains)).reshape(*shape, -1)

    def run(count: int) -> None:
        with torch.no_grad():
            position, slope, value = first, gradient(first), density(first)
            for _ in range(count):
                drawn = torch.randn_like(position)
                new = (position, drawn, slope)
                for _ in range(LENGTH // 10):
                    new = block(*new)
                reached = density(new[0])
                change = reached - value + 0.5 * (drawn.square() - new[1].square()).sum(-1)
                accept = torch.rand(shape).log() < change
                position, slope = (torch.where(accept.unsqueeze(-1), a, b) for a, b in ((new[0], position), (new[2], slope)))
                value = torch.where(accept, reached, value)

    return run


def hamiltorch_leapfrogs(chains: int) -> Callable[[int], None]:
    """`hamiltorch.sample`, one chain."""
    import hamiltorch
    import torch

    density, first = torch_density(), torch.from_numpy(start(chains))[0]

    def run(count: int) -> None:
        hamiltorch.sample(density, first.clone(), num_samples=count, step_size=STEP, num_steps_per_sample=LENGTH, verbose=False)

    return run


def pyro_leapfrogs(chains: int, jit: bool = False) -> Callable[[int], None]:
    """`pyro.infer.HMC`, one chain, no adaptation."""
    import pyro
    import torch
    from pyro.infer.mcmc import HMC

    density, first = torch_density(), torch.from_numpy(start(chains))[0]
    pyro.enable_validation(False)
    kernel = HMC(
        potential_fn=lambda p: -density(p["q"]),
        step_size=STEP,
        num_steps=LENGTH,
        adapt_step_size=False,
        adapt_mass_matrix=False,
        jit_compile=jit,
        ignore_jit_warnings=True,
    )
    kernel.initial_params = {"q": first}
    kernel.setup(0)
    held = {"q": first}

    def run(count: int) -> None:
        for _ in range(count):
            held.update(kernel.sample(held))

    return run


def pyro_nuts(step_size: float, inverse_mass: Any, first: Any, draws: int, seed: int, jit: bool = False) -> dict[str, Any]:
    """`pyro.infer.NUTS` from a draw of the posterior, with the step size and the masses that another NUTS arrived at."""
    import pyro
    import torch
    from pyro.infer.mcmc import NUTS

    density = torch_density()
    pyro.set_rng_seed(seed)
    pyro.enable_validation(False)
    leapfrogs = [0]

    def potential(p: dict[str, Any]) -> Any:
        leapfrogs[0] += 1
        return -density(p["q"])

    kernel = NUTS(
        potential_fn=potential,
        step_size=step_size,
        adapt_step_size=False,
        adapt_mass_matrix=False,
        jit_compile=jit,
        ignore_jit_warnings=True,
    )
    held = {"q": torch.as_tensor(first, dtype=torch.float32)}
    kernel.initial_params = held
    kernel.setup(0)
    kernel.mass_matrix_adapter.inverse_mass_matrix = {("q",): torch.as_tensor(inverse_mass, dtype=torch.float32)}
    held = kernel.sample(held)
    positions, begun, worked, leapfrogs[0] = [], time.perf_counter(), time.process_time(), 0
    for _ in range(draws):
        held = kernel.sample(held)
        positions.append(held["q"].numpy().copy())
    return {
        "compile": 0.0,
        "warmup": 0.0,
        "warmup_leapfrogs": 0,
        "seconds": time.perf_counter() - begun,
        "cpu": time.process_time() - worked,
        "leapfrogs": np.nan if jit else leapfrogs[0],  # a traced potential counts nothing
        "positions": np.stack(positions)[None],
    }


LEAPFROGS: dict[str, Callable[[int], Callable[[int], None]]] = {
    "blackjax": blackjax_leapfrogs,
    "numpyro": numpyro_leapfrogs,
    "by hand": handwritten_leapfrogs,
    "hamiltorch": hamiltorch_leapfrogs,
    "Pyro": pyro_leapfrogs,
    "Pyro, JIT": lambda chains: pyro_leapfrogs(chains, jit=True),
}
