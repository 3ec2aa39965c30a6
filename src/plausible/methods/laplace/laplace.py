"""The Laplace approximation: a Gaussian around a mode, with the curvature of the log joint there."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from plausible.blocks.curvature.estimating import forecast, require
from plausible.blocks.curvature.linearising import Linearisation
from plausible.blocks.curvature.structures import CURVATURES, STRUCTURES, Curvature, CurvatureName, StructureName
from plausible.blocks.curvature.tuning import Tune
from plausible.core.model import Model
from plausible.core.networks import choose
from plausible.core.serialise import check_count, register
from plausible.core.weights import Weights, index, num_elements
from plausible.engine.method import Method, Plan, Traits
from plausible.methods.laplace.mode import Mode, check_deterministic, check_gaussian, polished, tunable_noise
from plausible.methods.points.map import MAP
from plausible.posteriors.base import record_of
from plausible.posteriors.linearised import PREDICTIVES

if TYPE_CHECKING:
    from plausible.core.data import Batch, Data
    from plausible.engine import Fitted
    from plausible.posteriors.base import Posterior

log = logging.getLogger("plausible")


class GivenState(NamedTuple):
    """The module's weights, as they are."""

    weights: Weights
    buffers: Weights


@register
@dataclass(frozen=True)
class Laplace(Method):
    """q(w) = N(w*, Λ⁻¹),  Λ = −∇² log p(w*, D) ≈ Σ_n J_nᵀF_nJ_n + diag(τ)

    A Gaussian around a mode, with the curvature of the log joint there as its precision (MacKay 1992).

    First `mode` is trained (None takes the module's weights as they are: a pretrained network) and polished on all data, by at
    most `polish` steps of L-BFGS, or of Gauss and Newton for dense structures of up to 2,000 weights (None: 1,000 where weights
    × examples are below a million, 100 below 10⁸, else 20); then one pass over the data adds up the curvature. `structure` is
    what is kept of it, `curvature` which one ("ggn" and "fisher" are the expected Fisher information of the outputs, never
    indefinite), `where` which of the random weights have a posterior: "all", "last", name patterns, or a number k: the k
    elements with the largest variance. `predictive` "linearised" is exact for the Gaussian over functions f(x; w*) + J(x)(w −
    w*); "probit" and "bridge" have class probabilities in closed form; "sampled" puts draws of the weights into the network.
    `tune` sets the precisions of a Gaussian prior by the evidence, and the learned noise of a Gaussian likelihood; `rounds`
    times, training on in between, for `online` epochs of `mode` or by polishing. At most the share `negligible` of what
    is known about any output may be left out of the curvature: a network that is sure of its examples then takes less time.
    """

    structure: StructureName = "kron"
    where: Any = "all"
    curvature: CurvatureName = "ggn"
    predictive: Literal["linearised", "probit", "bridge", "sampled"] = "linearised"
    mode: Method | None = field(default_factory=MAP)
    tune: Tune | None = None
    rounds: int = 3
    online: int = 0
    polish: int | None = None
    sharing: Literal["expand", "reduce"] = "expand"
    rank: int = 20
    chunk: int | None = None
    negligible: float = 0.0

    name: ClassVar[str] = "laplace"
    divisible: ClassVar[bool] = False
    keeps_draws: ClassVar[bool] = False
    traits: ClassVar[Traits] = Traits(
        exact=True, mixed_precision=False, bias="a Gaussian around one mode: exact where the posterior is Gaussian"
    )

    def __post_init__(self) -> None:
        for name, known in (
            ("structure", STRUCTURES),
            ("curvature", CURVATURES),
            ("predictive", PREDICTIVES),
            ("sharing", ("expand", "reduce")),
            ("tune", (None, "global", "layer", "weight")),
        ):
            if getattr(self, name) not in known:
                allowed = ", ".join(map(repr, known))
                raise ValueError(f"Laplace: {name} must be one of {allowed}, got {getattr(self, name)!r}")
        if self.mode is not None and not isinstance(self.mode, MAP):
            raise TypeError(
                f"Laplace: mode must be MAP(…), which finds a mode, or None for the weights as they are, got {self.mode!r}"
            )
        for name, least in (("rounds", 1), ("online", 0), ("rank", 1), ("polish", 0), ("chunk", 1)):
            if getattr(self, name) is not None:
                check_count(self, name, at_least=least)
        share = self.negligible
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share < 1:
            raise ValueError(f"Laplace: negligible must be a number of at least 0 and below 1, got {share!r}")
        if isinstance(self.where, bool) or (isinstance(self.where, int) and self.where < 1):
            raise ValueError(
                f"Laplace: where must be 'all', 'last', name patterns, or a number of weights of at least 1, got {self.where!r}"
            )
        if self.tune == "weight" and self.structure in ("kron", "ekfac"):
            raise ValueError(
                "Laplace: Kronecker factors have one precision for each layer; tune='weight' needs structure='diag', 'block', "
                "'lowrank' or 'full'"
            )
        if isinstance(self.where, int) and (self.structure == "lowrank" or self.curvature == "hessian"):
            raise ValueError(
                "Laplace: a number of weights in where= has their full covariance, by curvature 'ggn', 'fisher' or 'empirical'; it "
                "does not go with structure='lowrank' or curvature='hessian'"
            )
        if self.curvature == "hessian" and self.structure in ("kron", "ekfac"):
            raise ValueError("Laplace: a Hessian has no Kronecker factors; use structure='diag', 'block', 'lowrank' or 'full'")

    # -----------------------------------------------------------------------------------------------------------------
    # To the mode

    def plan(self, num_data: int, per_epoch: int | None = None) -> Plan:
        """That of the mode; one step that does nothing where the weights are given."""
        if self.mode is None:
            return Plan(steps=1, per_epoch=1, batch_size=1 if per_epoch is None else -1)
        return self.mode.plan(num_data, per_epoch)

    def prepare(self, model: Model, data: Data) -> Model:
        """Hold on to the data, over which the curvature is added up at the end."""
        names = self._names(model, data)
        if self.tune is not None:
            check_gaussian(model.restricted(names))
            if model.temperature != 1:
                raise ValueError("Laplace: tune needs the evidence, which a tempered model does not have; leave tune=None")
        if self.predictive in ("probit", "bridge") and model.likelihood.kind not in ("classes", "binary"):
            raise ValueError(
                f"Laplace: predictive={self.predictive!r} is for classes; with {model.likelihood} use 'linearised'"
            )
        self._check_size(model.restricted(names), data)
        model = model if self.mode is None else self.mode.prepare(model, data)
        return model.with_prepared(data)

    def _check_size(self, model: Model, data: Data) -> None:
        """Refuse what cannot fit before the training."""
        first = next(iter(model.initial.values()))
        with torch.random.fork_rng(devices=[first.device] if first.device.type == "cuda" else []):
            layers = Linearisation(model, {**model.initial, **model.buffers}, next(iter(data.chunks(3))).x).all_layers
        total = sum(layer.size for layer in layers)
        if isinstance(self.where, int) and self.where > total:
            raise ValueError(f"Laplace: where={self.where} asks for more weights than there are ({total:,})")
        needed = 5 * self.where**2 if isinstance(self.where, int) else forecast(layers, self.structure, self.rank)
        log.info(
            "curvature %r of %s weights: about %.1f MiB", self.structure, f"{total:,}", first.element_size() * needed / 2**20
        )
        require(first.element_size() * needed, first.device, self.structure)

    def start(self, model: Model, key: Tensor) -> Any:
        """That of the mode."""
        if self.mode is None:
            return GivenState(dict(model.initial), dict(model.buffers))  # no step changes them
        return self.mode.start(model, key)

    def step(self, model: Model, state: Any, batch: Batch) -> tuple[Any, dict[str, Tensor]]:
        """That of the mode."""
        if self.mode is None:
            return state, {}
        return self.mode.step(model, state, batch)

    def validated(self, state: Any, value: Tensor) -> tuple[Any, Tensor]:
        """As the mode."""
        return (self.mode or MAP()).validated(state, value)

    def kept(self, model: Model, state: Any) -> Weights:  # noqa: ARG002
        """None: they come from the Gaussian."""
        return {}

    @classmethod
    def conforming(cls) -> Laplace:
        """A short way to the mode, and polishing."""
        return cls(mode=MAP.conforming())

    def quick(self) -> Laplace:
        """Few epochs."""
        return self if self.mode is None else replace(self, mode=self.mode.quick())

    # -----------------------------------------------------------------------------------------------------------------
    # At the mode

    def _names(self, model: Model, data: Data) -> tuple[str, ...]:
        """The weights that get a posterior; a learned noise is a point."""
        free = {n: model.initial[n] for n in model.random if not n.startswith("likelihood.")}
        if self.where in (None, "all") or isinstance(self.where, int):
            return tuple(free)
        last = model.last_layer(next(iter(data.chunks(8)))) if self.where == "last" else ()
        return choose(free, self.where, last, "leaves no weight of the network a posterior")

    def posterior(self, model: Model, fitted: Fitted) -> Posterior:
        """Polish, add up the curvature, tune; then the Gaussian."""
        data: Data = fitted.prepared
        if self.mode is None:
            weights = {**fitted.state.weights, **fitted.state.buffers}
        else:
            weights = {name: value.detach().clone() for name, value in index(self.mode.kept(model, fitted.state), 0).items()}
        model = model.for_run(num_data=data.num_data, steps=fitted.steps, seed=model.seed)
        check_deterministic(model, weights, data)
        names = self._names(model, data)
        work = data.num_data * num_elements(model.initial)
        polish = self.polish if self.polish is not None else 1000 if work < 10**6 else 100 if work < 10**8 else 20
        if self.mode is None or getattr(self.mode, "patience", None) is not None:
            polish = 0
        with torch.inference_mode(False):
            found = self._rounds(model, weights, data, names, polish, fitted.progress)
        return found.posterior(self, record_of(fitted))

    def _rounds(
        self, model: Model, weights: Weights, data: Data, names: tuple[str, ...], polish: int, progress: bool | None
    ) -> Mode:
        """Alternate between the mode and its hyper-parameters; the last round counts, unless an earlier one had more evidence.

        Where the mode moves, the curvature does too, and the evidence may fall: each round is only the best at its own mode.
        """
        weights = self._settled(model, weights, data, names, polish, (), progress)
        best = at = Mode.at(self, model, weights, data, names, progress)
        at.judge()
        rounds = 0 if self.tune is None else self.rounds if self.mode is not None else 1  # given weights stay where they are
        for _ in range(rounds):
            try:
                model, weights, at = self._next(at, data, names, polish, progress)
            except ValueError as error:  # the noise or a precision ran away; what came before stands
                log.warning("tuning ended early: %s", error)
                break
            best = at if at.better(best) else best
        best.warn()
        return best

    def _next(
        self, at: Mode, data: Data, names: tuple[str, ...], polish: int, progress: bool | None
    ) -> tuple[Model, Weights, Mode]:
        """One round: hyper-parameters at this mode, and the mode under them."""
        model, weights = at.tuned(self.tune)
        noise = {n: weights[n] for n in model.likelihood_names} if tunable_noise(model) else {}
        if self.online and self.mode is not None:
            weights = {**self._trained(model, weights, data), **noise}
        weights = self._settled(model, weights, data, names, polish, tuple(noise), progress)
        found = Mode.at(self, model, weights, data, names, progress)
        found.judge()
        return model, weights, found

    def _settled(
        self,
        model: Model,
        weights: Weights,
        data: Data,
        names: tuple[str, ...],
        polish: int,
        held: tuple[str, ...],
        progress: bool | None,
    ) -> Weights:
        """Polished by L-BFGS, or where the curvature is written down by Gauss-Newton steps; a tuned noise is `held`."""
        if not polish:
            return weights
        from plausible.blocks.curvature.newton import climbed, climbs
        from plausible.blocks.curvature.products import log_joint_gradient

        method = replace(self, curvature="ggn") if self.curvature == "hessian" else self

        def at(found: Weights) -> tuple[Curvature, Weights, Tensor]:
            mode = Mode.at(method, model, found, data, names)
            return mode.curvature, mode.precision, mode.factor

        dense = self.structure in ("block", "full") and not isinstance(self.where, int)
        dense = dense and climbs(sum(model.initial[n].numel() for n in names))
        if not dense:
            return polished(model, weights, data, polish, held, progress)
        points = set(model.initial) - set(names) - set(held)
        for _ in range(3 if points else 1):  # points move by L-BFGS, the rest follows
            if points:
                weights = polished(model, weights, data, min(polish, 100), held, progress)
            weights = climbed(weights, at, lambda found: log_joint_gradient(model, found, data), polish)
        return weights

    def _trained(self, model: Model, weights: Weights, data: Data) -> Weights:
        """`online` more epochs of the mode, under the new prior."""
        from plausible import engine

        assert self.mode is not None
        method = replace(self.mode, epochs=self.online)  # type: ignore[call-arg,type-var]
        options = engine.Options(seed=model.seed, compile=False, progress=False)
        fitted = engine.run(method, model.starting_at(weights), data, options)
        return {name: value.detach().clone() for name, value in index(method.kept(model, fitted.state), 0).items()}
