"""The Laplace approximation: a Gaussian around a mode, with the curvature of the log joint there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch

from plausible.blocks.ascent import can_climb
from plausible.blocks.curvature.estimating import forecast, require
from plausible.blocks.curvature.linearising import Linearisation
from plausible.blocks.curvature.structures import CURVATURES, STRUCTURES, CurvatureName, StructureName
from plausible.blocks.curvature.tuning import Tune
from plausible.core.data import Data
from plausible.core.model import Model
from plausible.core.networks import Where, choose, last_layer
from plausible.core.priors import Default
from plausible.core.serialise import check_count, register
from plausible.core.weights import num_elements
from plausible.core.words import log
from plausible.engine.method import Fitted, Method, Run, Stage, Traits
from plausible.methods.laplace import stages as parts
from plausible.methods.laplace.mode import all_gaussian, check_gaussian, tunable_noise
from plausible.methods.points.map import MAP
from plausible.posteriors.base import record_of
from plausible.posteriors.linearised import PREDICTIVES, LaplacePosterior

MANY = 1000  # outputs of an example from which it is said what they take


@register
@dataclass(frozen=True)
class Laplace(Method):
    """q(w) = N(w*, Λ⁻¹),  Λ = −∇² log p(w*, D) ≈ Σ_n J_nᵀF_nJ_n + diag(τ)

    A Gaussian around a mode, with the curvature of the log joint there as its precision (MacKay 1992).

    `mode` is trained (None takes the module's weights as they are) and polished on all data, by at most `polish` steps of
    L-BFGS, or of Gauss and Newton for dense structures of up to 2,000 weights; then one pass adds up the curvature.
    `structure` is what is kept of it, `where` which weights have a posterior: "all", "last", name patterns, or a number: so
    many elements with the largest variance. `predictive` "linearised" is exact for f(x; w*) + J(x)(w − w*); "probit" and
    "bridge" are closed forms for classes; "sampled" puts draws into the network. `tune` sets the precisions of a Gaussian
    prior (one for all weights, one by "layer", one by "weight") and a learned noise by the evidence, `rounds` times, with `online`
    epochs of `mode` or polishing in between; "auto" does so by layer where no prior was given, and sets the noise alone where one
    was, which stays as it is. At most the share `negligible` of what is known about any output is left out. `columns` takes so
    many random combinations of the columns of the outputs' Fisher for each example: for words, pixels and thousands of classes.
    """

    structure: StructureName = "kron"
    where: Where | int = "all"
    curvature: CurvatureName = "ggn"
    predictive: Literal["linearised", "probit", "bridge", "sampled"] = "linearised"
    mode: Method | None = field(default_factory=MAP)
    tune: Tune | Literal["auto"] | None = "auto"
    rounds: int = 3
    online: int = 0
    polish: int | None = None
    sharing: Literal["expand", "reduce"] = "expand"
    rank: int = 20
    chunk: int | None = None
    negligible: float = 0.0
    columns: int | None = None

    name: ClassVar[str] = "laplace"
    traits: ClassVar[Traits] = Traits(
        divisible=False,
        keeps_draws=False,
        mixed_precision=False,
        bias="a Gaussian around one mode: exact where the posterior is Gaussian",
    )

    def __post_init__(self) -> None:
        for name, known in (
            ("structure", STRUCTURES),
            ("curvature", CURVATURES),
            ("predictive", PREDICTIVES),
            ("sharing", ("expand", "reduce")),
            ("tune", ("auto", None, "global", "layer", "weight")),
        ):
            if getattr(self, name) not in known:
                allowed = ", ".join(map(repr, known))
                raise ValueError(f"Laplace: {name} must be one of {allowed}, got {getattr(self, name)!r}")
        if self.mode is not None and not isinstance(self.mode, MAP):
            raise TypeError(
                f"Laplace: mode must be MAP(…), which finds a mode, or None for the weights as they are, got {self.mode!r}"
            )
        for name, least in (("rounds", 1), ("online", 0), ("rank", 1), ("polish", 0), ("chunk", 1), ("columns", 1)):
            if getattr(self, name) is not None:
                check_count(self, name, at_least=least)
        share = self.negligible
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share < 1:
            raise ValueError(f"Laplace: negligible must be a number of at least 0 and below 1, got {share!r}")
        if self.columns is not None and (share or self.structure == "lowrank" or self.curvature in ("empirical", "hessian")):
            raise ValueError(
                "Laplace: columns= samples the outputs' Fisher of curvature 'ggn' or 'fisher', all of it; it does not go with "
                "structure='lowrank' or negligible="
            )
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

    def stages(self) -> tuple[Stage, ...]:
        """Train, settle, add up the curvature; and as often as `rounds` say: tune, settle again, add up again."""
        stages: list[Stage] = [parts.Training(self), *self._settling(), *self._adding_up(0)]
        if self.tune is not None:  # given weights stay where they are
            # where nothing is trained, tuning moves nothing but the prior, and once is enough
            for turn in range(1, 1 + (self.rounds if self.mode is not None else 1)):
                trained = [parts.Online(self)] if self.online and self.mode is not None else []
                stages += [parts.Tuning(self), *trained, *self._settling(), *self._adding_up(turn)]
        return tuple(stages)

    def _settling(self) -> list[Stage]:
        """The stages that go from where training ended to the mode on all data."""
        if self.mode is None or self.polish == 0:
            return []
        if self.structure not in ("block", "full") or isinstance(self.where, int):
            return [parts.Polishing(self)]
        # points and random weights in turn, since each settles given the other; all that is needed for three is planned
        return [stage for turn in range(3) for stage in (parts.Polishing(self, turn), parts.Climbing(self, turn))]

    def _adding_up(self, turn: int) -> list[Stage]:
        """The stages that add up the curvature: first that of the diagonal where a number of weights is to be chosen by it."""
        return [*([parts.Ranking(self)] if isinstance(self.where, int) else []), parts.AddingUp(self, turn)]

    def holdout(self, num_data: int, per_epoch: int | None = None) -> float:
        """The share of the data that the training sets aside; the curvature is that of the others."""
        return 0.0 if self.mode is None else self.mode.plan(num_data, per_epoch).holdout

    def iterations(self, model: Model) -> int:
        """How many iterations polishing takes at most."""
        if self.polish is not None:
            return self.polish
        # fewer where a pass over the data takes long
        work = model.num_data * num_elements(model.initial)
        return 1000 if work < 10**6 else 100 if work < 10**8 else 20

    def tuning(self, model: Model, names: Sequence[str]) -> tuple[Tune | None, bool]:
        """How precisions are shared that are set by the evidence (None: they stay), and whether anything is set at all."""
        if self.tune != "auto":
            return self.tune, self.tune is not None
        # a tempered model has no evidence, and other priors have no precision
        possible = model.temperature == 1 and all_gaussian(model.restricted(names))
        how: Tune | None = "layer" if isinstance(model.prior, Default) else None
        return how, possible and (how is not None or tunable_noise(model))

    def climbs(self, model: Model, names: Sequence[str]) -> bool:
        """Whether settling goes by Gauss-Newton steps: the curvature is dense, and small enough to be solved at every step."""
        dense = self.structure in ("block", "full") and not isinstance(self.where, int)
        return dense and can_climb(sum(model.initial[n].numel() for n in names))

    def names(self, model: Model, data: Data) -> tuple[str, ...]:
        """The names of the weights that get a posterior; a learned noise never does, it stays a point."""
        free = {n: model.initial[n] for n in model.random if not n.startswith("likelihood.")}
        # of a number of weights, which ones is known only at the mode
        if self.where in (None, "all") or isinstance(self.where, int):
            return tuple(free)
        last = last_layer(model, next(iter(data.chunks(8)))) if self.where == "last" else ()
        return choose(free, self.where, last, "leaves no weight of the network a posterior")

    def check(self, model: Model, data: Data) -> None:
        """Refuse before the training what could not be done after it, and what would not fit into memory."""
        names = self.names(model, data)
        if self.tune not in (None, "auto"):
            check_gaussian(model.restricted(names))
            if model.temperature != 1:
                raise ValueError("Laplace: tune needs the evidence, which a tempered model does not have; leave tune=None")
        if self.predictive in ("probit", "bridge") and model.likelihood.kind not in ("classes", "binary"):
            raise ValueError(
                f"Laplace: predictive={self.predictive!r} is for classes; with {model.likelihood} use 'linearised'"
            )
        self._check_size(model.restricted(names), data)

    def _check_size(self, model: Model, data: Data) -> None:
        first = next(iter(model.initial.values()))
        # finding the layers runs the network, which may draw numbers
        with torch.random.fork_rng(devices=[first.device] if first.device.type == "cuda" else []):
            layers = Linearisation(model, {**model.initial, **model.buffers}, next(iter(data.chunks(3))).x).all_layers
        total = sum(layer.size for layer in layers)
        if isinstance(self.where, int) and self.where > total:
            raise ValueError(f"Laplace: where={self.where} asks for more weights than there are ({total:,})")
        needed = 5 * self.where**2 if isinstance(self.where, int) else forecast(layers, self.structure, self.rank)
        size = first.element_size() * needed
        log.info("curvature %r of %s weights: about %.1f MiB", self.structure, f"{total:,}", size / 2**20)
        require(size, first.device, self.structure)
        outputs = math.prod(model.output_shape)
        if outputs <= MANY:
            return
        if self.columns is None and self.structure != "lowrank" and self.curvature in ("ggn", "fisher"):
            log.warning(
                "the curvature takes %s backward passes for each of %s examples, one for each output; columns=10 takes ten random "
                "combinations of them, with which it is right in expectation",
                *(f"{number:,}" for number in (outputs, data.num_data)),
            )
        if self.predictive != "sampled":
            log.warning(
                "predictive=%r takes %s backward passes and a covariance of %.1f MiB for each input; predictive='sampled' takes a "
                "forward pass for each draw",
                self.predictive,
                f"{outputs:,}",
                first.element_size() * outputs**2 / 2**20,
            )

    @classmethod
    def conforming(cls) -> Laplace:
        return cls(mode=replace(MAP.conforming(), epochs=30))  # which is polished anyway

    def posterior(self, model: Model, run: Run[Any], fitted: Fitted) -> LaplacePosterior:
        # of all rounds the one with the highest evidence
        best = parts.restored(self, model, run, parts.below(parts.BEST, fitted.left))
        if run.held is None:  # early stopping ends before the mode
            best.warn()
        return best.posterior(record_of(fitted))
