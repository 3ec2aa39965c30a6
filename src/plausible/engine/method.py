"""What a method is: a frozen dataclass of hyper-parameters with `start`, `step` and `posterior`; the engine owns the loops."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from torch import Tensor

from plausible.core.model import Model
from plausible.core.weights import Weights

if TYPE_CHECKING:
    from plausible.core.data import Batch, Data
    from plausible.engine import Fitted
    from plausible.posteriors.base import Posterior
    from plausible.testing import LinearGaussian


class Registry(MutableMapping[str, "type[Method]"]):
    """Name → class. Whoever asks it finds all methods of the library: `discover` imports them then."""

    def __init__(self) -> None:
        self._classes: dict[str, type[Method]] = {}
        self.discover: Callable[[], None] = lambda: None

    def __setitem__(self, name: str, method: type[Method]) -> None:
        self._classes[name] = method

    def __delitem__(self, name: str) -> None:
        del self._classes[name]

    def __getitem__(self, name: str) -> type[Method]:
        self.discover()
        return self._classes[name]

    def __iter__(self) -> Iterator[str]:
        self.discover()
        return iter(self._classes)

    def __len__(self) -> int:
        self.discover()
        return len(self._classes)


registry = Registry()


@dataclass(frozen=True)
class Traits:
    """What a method declares about itself; the conformance suite reads it.

    `deterministic`: the same for every seed. `exact`: its draws follow the posterior up to Monte Carlo error (`bias` says in
    words what else to expect). `trains`: it moves the weights (the alternative is post hoc). `has_weights`: it has weight draws
    and not only function draws. `mixed_precision`: the forward pass may run in bfloat16. `chaotic`: small differences grow, so
    that compiled and eager runs agree over single steps only. `noisy`: its steps draw noise of their own.
    """

    deterministic: bool = False
    exact: bool = False
    trains: bool = True
    has_weights: bool = True
    mixed_precision: bool = True
    chaotic: bool = False
    noisy: bool = False
    bias: str = ""


@dataclass(frozen=True)
class Plan:
    """How long to run and what to keep: `steps` of `batch_size` (None: all data at once), `per_epoch` steps an epoch.

    After step t (counted from 1) a draw is kept when t > `burn_in` and (t − `burn_in`) % `thin` == 0; `thin` 0 keeps none.
    `patience` epochs without a better held-out log-likelihood end the run; `holdout` is the fraction set aside for that.
    """

    steps: int
    per_epoch: int
    batch_size: int | None
    burn_in: int = 0
    thin: int = 0
    patience: int | None = None
    holdout: float = 0.0

    def keeps(self, step: int) -> bool:
        """Whether a draw is kept after step `step`."""
        return bool(self.thin) and step > self.burn_in and (step - self.burn_in) % self.thin == 0

    def next_draw(self, step: int) -> int:
        """The next step after `step` at which a draw is kept (where `thin` is not 0)."""
        return self.burn_in + (max(step - self.burn_in, 0) // self.thin + 1) * self.thin


class Method:
    """Base of all methods. Subclasses are frozen dataclasses; constructors only store and validate.

    `start(model, key)` gives the state, a named tuple of tensors (trees of tensors) with `weights` and `buffers`;
    `step(model, state, batch)` is pure: it returns the new state and a dict of 0-d tensors (it may reuse the buffers of the state
    it was given). `kept(model, state)` says what is kept as draws; `posterior(model, fitted)` builds the result.
    """

    name: ClassVar[str] = ""
    traits: ClassVar[Traits] = Traits()
    verb: ClassVar[Literal["iterate", "sample"]] = "iterate"
    members: ClassVar[int | None] = None
    keeps_draws: ClassVar[bool] = True
    divisible: ClassVar[bool] = True  # whether its batches can be divided among ranks: gradients come from `model.gradient`
    kernels: ClassVar[bool] = False  # whether parts of the step are compiled, and not the step as a whole
    shares_batches: ClassVar[bool] = False  # whether all members see the same batches
    shaping: ClassVar[tuple[str, ...]] = ()  # numbers among its settings that are used before the first step

    def __init_subclass__(cls, **keywords: Any):
        super().__init_subclass__(**keywords)
        if cls.__dict__.get("name"):
            registry[cls.name] = cls

    def plan(self, num_data: int, per_epoch: int | None = None) -> Plan:
        """Steps, batch size and keep rule for this many data; `per_epoch` is given where a loader decides it."""
        raise NotImplementedError

    def prepare(self, model: Model, data: Data) -> Model:  # noqa: ARG002
        """The model of the run, where the data have a say in it."""
        return model

    def start(self, model: Model, key: Tensor) -> Any:
        """The starting state."""
        raise NotImplementedError

    def step(self, model: Model, state: Any, batch: Batch) -> tuple[Any, dict[str, Tensor]]:
        """One pure step."""
        raise NotImplementedError

    def kept(self, model: Model, state: Any) -> Weights:  # noqa: ARG002
        """The draws that a state stands for, weights and buffers with a leading axis of draws; empty: none are kept."""
        return {name: value.unsqueeze(0) for name, value in {**state.weights, **state.buffers}.items()}

    def finished(self, state: Any) -> bool:  # noqa: ARG002
        """Whether the run is over before its planned steps."""
        return False

    def caption(self, state: Any) -> str | None:  # noqa: ARG002
        """What the progress bar says of the state; None: the first of the logged terms."""
        return None

    def compiled(self, model: Model, wish: Any) -> tuple[Model, Any]:  # noqa: ARG002
        """Of methods with `kernels`: the model with its kernels compiled as `fit(compile=wish)` asks, and the mode they run in."""
        return model, "eager"

    def held_out(self, model: Model, state: Any, batch: Batch) -> Tensor:
        """The summed log-likelihood of held-out examples, times their weights, under the current state."""
        each = model.log_likelihood({**state.weights, **state.buffers}, batch)
        return (each if batch.weight is None else each * batch.weight).sum()

    def validated(self, state: Any, value: Tensor) -> tuple[Any, Tensor]:  # noqa: ARG002
        """Take note of a held-out log-likelihood: the new state, and for how many checks it has not improved."""
        raise ValueError(f"{type(self).__name__} does not stop early; leave patience unset")

    def posterior(self, model: Model, fitted: Fitted) -> Posterior:
        """The result."""
        raise NotImplementedError

    # What the conformance suite asks

    tolerance: ClassVar[float] = 0.02

    @classmethod
    def conforming(cls) -> Method:
        """Settings under which the conformance suite runs this method: right answers on small problems, in seconds."""
        return cls()

    def quick(self) -> Method:
        """The same method in a much shorter run, for the checks that do not look at the law."""
        if any(f.name == "epochs" for f in dataclasses.fields(self)):  # type: ignore[arg-type]
            return dataclasses.replace(self, epochs=min(self.epochs or 20, 20))  # type: ignore[attr-defined,type-var]
        return self

    def conjugate(self, problem: LinearGaussian) -> tuple[Tensor, Tensor]:
        """The mean and covariance of the weights that this method should find on the linear-Gaussian problem.

        Exact unless overridden; `tolerance` is the relative error allowed on top of Monte Carlo error.
        """
        return problem.posterior()

    @classmethod
    def summary(cls) -> str:
        """The first sentence of the docstring that is not a formula."""
        for block in (cls.__doc__ or "").split("\n\n"):
            text = " ".join(block.split())
            if text and text.endswith("."):
                return text
        return cls.__name__


DEFAULT_EPOCHS, DEFAULT_STEPS = 200, 2000
BatchSize = int | None | Literal["auto"]


def check_training(method: Any) -> None:
    """Checks that every method with epochs and batches shares."""
    who = type(method).__name__
    if method.epochs is not None and (isinstance(method.epochs, bool) or not isinstance(method.epochs, int)):
        raise TypeError(f"{who}: epochs must be an integer or None, got {method.epochs!r}")
    if method.epochs is not None and method.epochs < 1:
        raise ValueError(f"{who}: epochs must be at least 1, got {method.epochs}")
    size = method.batch_size
    if size is not None and size != "auto":
        if isinstance(size, bool) or not isinstance(size, int):
            raise TypeError(f"{who}: batch_size must be an integer, None (all data) or 'auto', got {size!r}")
        if size < 1:
            raise ValueError(f"{who}: batch_size must be at least 1, got {size}")


def num_epochs(method: Any, per_epoch: int) -> int:
    """The epochs asked for; None means 200, and more on small data, where they would be too few steps."""
    if method.epochs is not None:
        return method.epochs
    return max(DEFAULT_EPOCHS, -(-DEFAULT_STEPS // per_epoch))


def plan_epochs(method: Any, num_data: int, per_epoch: int | None = None, **settings: Any) -> Plan:
    """The plan of `epochs` passes in batches; the number of steps is that of a loader which keeps its last, short batch."""
    size = method.batch_size
    if per_epoch is not None:
        return Plan(
            steps=num_epochs(method, per_epoch) * per_epoch,
            per_epoch=per_epoch,
            batch_size=-1 if size is not None else None,
            **settings,
        )
    if size == "auto":
        size = min(128, num_data)
    if size is not None and size > num_data:
        raise ValueError(
            f"{type(method).__name__}: batch_size={size} is larger than the data ({num_data} examples); "
            "use batch_size=None for all data at once (on the command line: --set batch_size=none)"
        )
    per_epoch = 1 if size is None else -(-num_data // size)
    return Plan(steps=num_epochs(method, per_epoch) * per_epoch, per_epoch=per_epoch, batch_size=size, **settings)


def create(method: str | Method, /, **settings: Any) -> Method:
    """A method from its name and settings, or the instance itself."""
    if isinstance(method, Method):
        if settings:
            raise TypeError("settings go with a method's name; with an instance use dataclasses.replace")
        return method
    if isinstance(method, type) and issubclass(method, Method):
        raise TypeError(f"method must be an instance or a name, got the class {method.__name__}; write {method.__name__}()")
    if not isinstance(method, str):
        raise TypeError(f"method must be a Method or its name, got {type(method).__name__}")
    wanted = method.lower().replace("_", "-")
    if wanted not in registry:
        import difflib

        close = difflib.get_close_matches(wanted, registry, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ValueError(f"unknown method {method!r}; {hint}known methods: {', '.join(sorted(registry))}")
    chosen = registry[wanted]
    known = {field.name for field in dataclasses.fields(chosen)}  # type: ignore[arg-type]
    for setting in settings:
        if setting not in known:
            raise ValueError(f"{chosen.__name__} has no setting {setting!r}; it has {', '.join(sorted(known))}")
    return chosen(**settings)
