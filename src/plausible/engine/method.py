"""What a method is: a frozen dataclass of hyper-parameters that says what the engine runs, and what the result is.

A `Stage` is one verb with a state of its own: *iterate* a step over batches, *accumulate* a sum over one pass of the data, or
*sample*: take steps that each see all of the data. A `Method` of one stage is that stage; one of several says them in `stages`.
The engine owns all loops.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, NamedTuple, TypeVar

from torch import Tensor

from plausible.core.data import Data, num_rows
from plausible.core.model import Model
from plausible.core.storage import DrawStore
from plausible.core.weights import Weights

if TYPE_CHECKING:
    from plausible.core.data import Batch
    from plausible.posteriors.base import Posterior
    from plausible.testing import LinearGaussian


class DivergenceError(ArithmeticError):
    """Training met NaN or infinity. `step` and `term` say where; `posterior` is that of the last good state, or None."""

    def __init__(self, message: str, step: int, term: str):
        super().__init__(message)
        self.step, self.term = step, term
        self.posterior: Any = None


class Registry(MutableMapping[str, "type[Method]"]):
    """Name → class. It fills itself: the first question put to it imports all methods of the library, by `discover`.

    `plausible.methods` sets `discover`, since the engine knows no methods.
    """

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
    """What a stage or a method declares about itself.

    For the engine: `verb` (see the module; a method that chooses another one never runs), `divisible`: batches may be divided
    among ranks, since gradients come from `model.gradient`; `shares_batches`: all members see the same batches; `keeps_draws`:
    the result is made of stored draws; `mixed_precision`: the forward pass may run in bfloat16; `noisy`: its steps draw noise
    of their own. For sweeps: `shaping`, the settings that are used before the first step, which cannot be stacked. For the
    conformance suite: `deterministic`: the same for every seed; `has_weights`: there are weight draws and not only function
    draws; `tolerance`, the relative error that is allowed on top of Monte Carlo error, and `bias`, in words, what to expect of
    the law.
    """

    verb: Literal["iterate", "accumulate", "sample", "choose"] = "iterate"
    divisible: bool = True
    shares_batches: bool = False
    keeps_draws: bool = True
    mixed_precision: bool = True
    noisy: bool = False
    shaping: tuple[str, ...] = ()
    deterministic: bool = False
    has_weights: bool = True
    tolerance: float = 0.02
    bias: str = ""


@dataclass(frozen=True)
class Plan:
    """How long to run and what to keep: `steps` of `batch_size` (None: all data at once), `per_epoch` steps an epoch.

    After step t (counted from 1) a draw is kept when t > `burn_in` and (t − `burn_in`) % `thin` == 0; `thin` 0 keeps the last
    state alone. `holdout` is a fraction of the data that is set aside, by the seed; `patience` epochs without a better
    log-likelihood of it end the stage, at the weights that were best. `unit` is what the progress bar counts.
    """

    steps: int
    per_epoch: int
    batch_size: int | None
    burn_in: int = 0
    thin: int = 0
    patience: int | None = None
    holdout: float = 0.0
    unit: str = "steps"

    def keeps(self, step: int) -> bool:
        return bool(self.thin) and step > self.burn_in and (step - self.burn_in) % self.thin == 0

    def next_draw(self, step: int) -> int:
        """The next step after `step` at which a draw is kept (where `thin` is not 0)."""
        return self.burn_in + (max(step - self.burn_in, 0) // self.thin + 1) * self.thin


Prepared = TypeVar("Prepared")
Info = dict[str, Tensor]
"""What a step logs: 0-d tensors, or one number for each member."""


@dataclass(frozen=True, eq=False)
class Run(Generic[Prepared]):
    """What belongs to one run of a stage, and not to the model.

    `steps` and `per_epoch` are those of its plan; `data` is what it sees (without the rows that were held out); `prepared` is
    what its `prepare` returned, of a type of its own; `before` are the named tensors that the stage before left (its `kept`);
    `starts` are weights to start at, stacked, where `fit(init=…)` gave an earlier posterior; `compile` is the caller's wish;
    `held` are the rows that were held out.
    """

    data: Data
    seed: int = 0
    steps: int = 1
    per_epoch: int = 0
    prepared: Prepared = None  # type: ignore[assignment]
    before: Weights = dataclasses.field(default_factory=dict)
    starts: Weights | None = None
    compile: Literal["auto"] | bool = "auto"
    held: Data | None = None

    @classmethod
    def alone(cls, stage: Stage, model: Model, data: Data, seed: int = 0, **settings: Any) -> Run[Any]:
        """The run of a stage outside of the engine, prepared: for single steps, tests and densities of one's own."""
        plan = stage.plan(data.num_data)
        run: Run[Any] = cls(data, seed, plan.steps, plan.per_epoch, **settings)
        return dataclasses.replace(run, prepared=stage.prepare(model, run))

    def batches(self, batch: Batch) -> int:
        """How many batches of this size make up an epoch."""
        return self.per_epoch or -(-self.data.num_data // num_rows(batch.x))


class Fitted(NamedTuple):
    """What a run leaves: the last state, kept draws, history per epoch, how it was run.

    `left` are the named tensors that the last stage left (its `kept`), for methods of several stages; `stages` has (name, steps,
    seconds) of each; `mode` says how the steps of the first were run: "eager", "compiled", "captured" or what its kernels are.
    `error` is the divergence that ended a stage, of which this is what was good.
    """

    state: Any
    draws: DrawStore | None
    history: dict[str, list[float]]
    steps: int
    seconds: float
    mode: str
    interrupted: bool = False
    left: Weights = {}  # noqa: RUF012  never written to
    stages: tuple[tuple[str, int, float], ...] = ()
    error: DivergenceError | None = None


class Stage:
    """One verb of a run: *iterate*, *accumulate* or *sample*.

    `start` and `step` are pure: states are trees of tensors, and randomness comes from the key. A step may reuse the buffers of the
    state that it was given. A stage with several `members` advances all of them, stacked on the leading axis of its state.

    The engine also uses, where they are there:

    - of a state `weights` and `buffers`: the default `kept` keeps them, early stopping judges them, NaN is looked for in them;
    - of a state `seen` and `total`: what the progress bar counts instead of steps;
    - of `run.prepared`, in a *sample* stage, `mode`: how its kernels run, for `posterior.run["mode"]`;
    - of a stage with members `looped_step`: its step for networks that vmap cannot stack; and `first`: the number of the first
      member that runs here, for messages;
    - of a method with members `part(numbers)`: the method with these members alone, which is what one of several ranks runs.
    """

    traits: ClassVar[Traits] = Traits()
    members: ClassVar[int | None] = None

    def plan(self, num_data: int, per_epoch: int | None = None) -> Plan:
        """Steps, batch size and keep rule for this many data; `per_epoch` is given where a loader decides it."""
        raise NotImplementedError

    def prepare(self, model: Model, run: Run[Any]) -> Any:
        """What there is to find out (or to refuse) about network and data before the first step; it becomes `run.prepared`."""

    def start(self, model: Model, run: Run[Any], key: Tensor) -> Any:
        """The starting state."""
        raise NotImplementedError

    def step(self, model: Model, run: Run[Any], state: Any, batch: Batch) -> tuple[Any, Info]:
        """The next state, and numbers to log. For *sample* stages `batch` is all data, or None where only a loader has them."""
        raise NotImplementedError

    def kept(self, model: Model, run: Run[Any], state: Any) -> Weights:
        """The draws that a state stands for: weights and buffers by name, with a leading axis of draws; empty where there are none.

        Of a stage that is not the last: the named tensors that the next one starts from (its `run.before`).
        """
        return {name: value.unsqueeze(0) for name, value in {**state.weights, **state.buffers}.items()}

    def judged(self, model: Model, run: Run[Any], variables: Weights) -> Weights:
        """What held-out rows judge in place of a state's `weights` and `buffers`, where these are no weights of the network."""
        return variables

    def finished(self, state: Any) -> bool:
        """Whether the stage is over before its planned steps."""
        return False

    def caption(self, state: Any) -> str | None:
        """What the progress bar says of the state; None: the first of the logged terms."""
        return None


class Method(Stage):
    """An inference method: its fields are its hyper-parameters; subclasses are frozen dataclasses with a `name`.

    A method of one stage defines `plan`, `start`, `step` (and `prepare`, `kept`, … where it must); one of several defines
    `stages` instead. `posterior` builds the result from what the run left, at once: whatever takes time is a stage.
    """

    name: ClassVar[str] = ""

    def __init_subclass__(cls, **keywords: Any):
        super().__init_subclass__(**keywords)
        taken = {name for name in inspect.get_annotations(cls) if callable(getattr(Method, name, None))}
        if taken:
            raise TypeError(f"{cls.__name__}: a setting cannot be called {min(taken)!r}, which is a function of every method")
        # a name of its own, not one that it inherits
        if cls.__dict__.get("name"):
            registry[cls.name] = cls

    def stages(self) -> Sequence[Stage]:
        """What the engine runs, in order; each starts from what the one before left."""
        return (self,)

    def posterior(self, model: Model, run: Run[Any], fitted: Fitted) -> Posterior:
        """The result; `model` and `run` are those of the last stage."""
        raise NotImplementedError

    @classmethod
    def conforming(cls) -> Method:
        """Settings under which the conformance suite runs this method: right answers on small problems, in seconds."""
        return cls()

    def conjugate(self, problem: LinearGaussian) -> tuple[Tensor, Tensor]:
        """The mean and covariance of the weights that it should find on the linear-Gaussian problem; exact unless overridden."""
        return problem.posterior()


def summary(method: type[Method]) -> str:
    """The first sentence of the docstring that is not a formula."""
    for block in (method.__doc__ or "").split("\n\n"):
        text = " ".join(block.split())
        if text and text.endswith("."):
            return text
    return method.__name__


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


def check_choice(method: Any, setting: str, known: Sequence[str]) -> None:
    value = getattr(method, setting)
    if value not in known:
        *others, last = map(repr, known)
        raise ValueError(f"{type(method).__name__}: {setting} must be {', '.join(others)} or {last}, got {value!r}")


def plan_epochs(method: Any, num_data: int, per_epoch: int | None = None, **settings: Any) -> Plan:
    """The plan of `epochs` passes in batches; the number of steps is that of a loader which keeps its last, short batch."""
    size = min(128, num_data) if method.batch_size == "auto" else method.batch_size
    if per_epoch is not None:  # a loader has its own size, which only it knows
        size = None if size is None else -1
    elif size is not None and size > num_data:
        raise ValueError(
            f"{type(method).__name__}: batch_size={size} is larger than the data ({num_data} examples); "
            "use batch_size=None for all data at once (on the command line: --set batch_size=none)"
        )
    else:
        per_epoch = 1 if size is None else -(-num_data // size)
    # 200 epochs of small data would be too few steps
    epochs = method.epochs or max(DEFAULT_EPOCHS, -(-DEFAULT_STEPS // per_epoch))
    return Plan(steps=epochs * per_epoch, per_epoch=per_epoch, batch_size=size, **settings)


PATIENCE = 20
"""Epochs without a better held-out log-likelihood."""
PATIENT_STEPS = 200
"""Steps without one, at least: on small data an epoch is a step or two."""
LEAST_ROWS = 8  # of fewer nothing can be spared
Patience = int | Literal["auto"] | None


def check_patience(method: Any) -> None:
    """Checks that every method with `patience` and `holdout` shares."""
    who, patience, share = type(method).__name__, method.patience, method.holdout
    whole = isinstance(patience, int) and not isinstance(patience, bool)
    if patience not in (None, "auto") and not (whole and patience >= 1):
        raise ValueError(f"{who}: patience must be a whole number of epochs of at least 1, 'auto' or None, got {patience!r}")
    if share is not None and not 0 < share < 1:
        raise ValueError(f"{who}: holdout must lie between 0 and 1, got {share}")


def plan_patiently(method: Any, num_data: int, per_epoch: int | None = None) -> Plan:
    """`plan_epochs` of a method with `patience` and `holdout`, ended early by rows that are set aside."""
    patience = method.patience
    if patience == "auto":  # a loader, which decides `per_epoch`, need not have rows that could be set aside
        patience = PATIENCE if method.epochs is None and per_epoch is None and num_data >= LEAST_ROWS else None
    # rows are set aside only where something is decided by them
    held = (min(0.25, max(0.1, 20 / num_data)) if method.holdout is None else method.holdout) if patience else 0.0
    plan = plan_epochs(method, num_data, per_epoch, patience=patience, holdout=held)
    if patience and method.patience == "auto":
        return dataclasses.replace(plan, patience=max(PATIENCE, -(-PATIENT_STEPS // plan.per_epoch)))
    return plan


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
        close = difflib.get_close_matches(wanted, registry, n=3)
        close.sort(key=lambda known: sorted(known) != sorted(wanted))  # of equally near ones that of the same letters
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ValueError(f"unknown method {method!r}; {hint}known methods: {', '.join(sorted(registry))}")
    chosen = registry[wanted]
    known = {field.name for field in dataclasses.fields(chosen)}  # type: ignore[arg-type]
    for setting in settings:
        if setting not in known:
            raise ValueError(f"{chosen.__name__} has no setting {setting!r}; it has {', '.join(sorted(known))}")
    return chosen(**settings)
