"""The table of options: name, default, rule and documentation of every argument of an optimizer.

Constructors, parameter groups, checkpoints and ``help`` read it. A new option is an entry here, an
argument of the constructors, and the code that implements it; an option with state of its own also
has a line in ``state.SPEC``.
"""

import inspect
import math
import re
import textwrap
from collections.abc import Callable, Container
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal, TypeVar, get_args

from torch import Tensor

from tnt_optim.likelihoods import LIKELIHOODS
from tnt_optim.modes import Settings

Check = Callable[[Any], bool]
Class = TypeVar("Class", bound=type)

# The values of options that are names.
Estimator = Literal["moments", "mle"]
Graft = Literal["adam", "sgd", "rms"]
MergedDims = Literal["kernel"]
Inverse = Literal["damped", "eigenbasis"]
Rounding = Literal["nearest", "stochastic", "master"]
Shard = Literal["directions", "inverses"]


@dataclass(frozen=True)
class Option:
    """One argument of an optimizer."""

    name: str
    default: Any  # if a method's constructor does not say otherwise
    holds: Check  # whether a value fits
    rule: str  # what a value must be, for the error message
    doc: str  # for the constructors that have it
    shapes: bool = False  # whether the shapes of statistics, factors and momentum depend on it
    per_group: bool = True  # whether every parameter group can have its own value


def _number(holds: Check, any_shape: bool = False) -> Check:
    """A check of real numbers, also in a 0-dim tensor (of one element with ``any_shape``).

    A captured graph can change such a tensor. On a GPU its value is not checked: reading it would
    wait for the device at every step.
    """

    def check(value: Any) -> bool:
        if isinstance(value, Tensor):
            single = value.dim() == 0 or (any_shape and value.numel() == 1)
            if not single or not value.is_floating_point():
                return False
            return not value.is_cpu or holds(value.item())
        return isinstance(value, Real) and not isinstance(value, bool) and holds(value)

    return check


def _whole(least: int, most: float = math.inf) -> Check:
    return lambda v: isinstance(v, Integral) and not isinstance(v, bool) and least <= int(v) <= most


def _is_seed(value: Any) -> bool:
    # NumPy's integers have another repr, which would give another random stream.
    return isinstance(value, int) and not isinstance(value, bool)


def _or_none(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _one_of(*known: Any) -> tuple[Check, str]:
    """A check, and its rule."""
    return lambda value: value in known, f"one of {', '.join(map(repr, known))}"


def _is_likelihood(value: Any) -> bool:
    if value is None:
        return True
    if not callable(value):
        names = value if isinstance(value, tuple) and value else (value,)
        return all(isinstance(name, str) and name in LIKELIHOODS for name in names)
    try:
        inspect.signature(getattr(value, "forward", value)).bind(None)
    except TypeError:  # a loss, which takes labels as well
        return False
    except ValueError:  # a built-in function without a signature
        pass
    return True


_NOT_NEGATIVE = (_number(lambda v: 0 <= v < math.inf), "a finite number >= 0")
_FRACTION = (_number(lambda v: 0 <= v < 1), "a number in [0, 1)")
_COUNT = (_whole(1), "an integer >= 1")
_COUNT_OR_NONE = (_or_none(_whole(1)), "None or an integer >= 1")
_BOOL = (lambda value: isinstance(value, bool), "True or False")

_TABLE = (
    # A scheduler's rounding may end just below 0.
    Option(
        "lr",
        1e-4,
        _number(lambda v: -1e-9 < v < math.inf, any_shape=True),
        "a finite number >= 0",
        doc="""the learning rate, alpha in the paper. With ``graft="adam"`` it has the scale of
        Adam's rate; for transformers begin at 0.018 below width 128, at 0.01 for 128, at
        0.0056 from 256 on. Without grafting it depends on ``damping``, the batch size and the
        loss's scale.""",
    ),
    Option(
        "damping",
        0.01,
        *_NOT_NEGATIVE,
        doc="""a number added to the eigenvalues of every statistic, epsilon in the paper.""",
    ),
    Option(
        "momentum",
        0.9,
        *_FRACTION,
        doc="""the decay of the sum of gradients, mu in the paper: m <- mu m + g.""",
    ),
    Option(
        "nesterov",
        False,
        *_BOOL,
        doc="""precondition mu m + g, the next step's momentum if its gradient were g again, instead
        of m; ``graft`` looks ahead in the same way.""",
    ),
    Option(
        "stat_decay",
        0.9,
        *_FRACTION,
        doc="""the decay of the statistics' moving average, beta in the paper.""",
    ),
    Option(
        "weight_decay",
        0.0,
        *_NOT_NEGATIVE,
        doc="""decoupled, gamma in the paper: W <- W - lr (P + weight_decay W).""",
    ),
    Option(
        "stat_interval",
        10,
        *_COUNT,
        doc="""the steps between two refreshes of the statistics, T1 in the paper.""",
    ),
    Option(
        "inverse_interval",
        100,
        *_COUNT,
        doc="""the steps between two refreshes of the factors, T2 in the paper. Without
        ``interval_warmup`` the factors are also refreshed with the statistics of the first T2
        steps.""",
    ),
    Option(
        "interval_warmup",
        0,
        _whole(0, 10**6),
        "an integer from 0 to 1000000",
        doc="""the number of first steps in which both intervals grow from 1 to their values:
        statistics and factors change fast at first. With 0 they have their values from the
        start. None (``TNT``): 2000, with a ``likelihood`` 500, because a refresh costs more.""",
    ),
    Option(
        "likelihood",
        None,
        _is_likelihood,
        f"None, {', '.join(map(repr, LIKELIHOODS))}, a tuple of these names or a function of the "
        "output alone",
        doc="""None: the statistics are of the training gradients (TNT-EF in the paper). Otherwise
        they are of gradients at labels sampled from the distribution that the model's output
        parametrises, and the loop calls ``observe``: "categorical" (logits (..., classes); cross
        entropy, mean over rows), "bernoulli" (logits (N, ...); binary cross entropy, summed over
        outputs, mean over N), "gaussian" (means (N, ...), unit variance; half the squared error,
        summed over outputs, mean over N), a tuple of these for an output that is a tuple (the sum
        of their losses), or a function. The function samples labels itself, from torch's global
        generator, and returns the 0-dim loss at them; the generator is seeded before the call and
        restored after it. The guide "Likelihoods" says which fits a loss of torch, and which
        mismatches give a warning.""",
        per_group=False,
    ),
    Option(
        "estimator",
        "moments",
        *_one_of(*get_args(Estimator)),
        doc="""what the statistics are. "moments": the Gram matrix of the gradient along each mode,
        as in the paper. "mle": the Gram matrix after the other modes have been whitened by their
        factors, scaled to the same trace: the update of a tensor-normal distribution's
        maximum-likelihood estimate.""",
    ),
    Option(
        "max_factor_dim",
        8192,
        *_COUNT,
        doc="""a mode larger than this keeps only the diagonal of its statistic.""",
        shapes=True,
    ),
    Option(
        "precondition_1d",
        True,
        *_BOOL,
        doc="""precondition parameters of fewer than two dimensions, too: biases and norms.
        Otherwise they are updated with the momentum, rescaled by ``graft``, without weight
        decay.""",
    ),
    Option(
        "block_size",
        None,
        *_COUNT_OR_NONE,
        doc="""a mode larger than this is cut into pieces of this size and a rest. Each block of a
        parameter is then treated as a parameter of its own. None: no mode is cut.""",
        shapes=True,
    ),
    Option(
        "merge_small_dims",
        None,
        *_one_of(None, *get_args(MergedDims)),
        doc=""""kernel": a convolution's kernel and input channels are one mode, as for KFAC, if it
        is at most ``max_factor_dim`` and no side of the kernel is above 16. None: no modes merge. A
        group's ``modes`` merges others.""",
        shapes=True,
    ),
    Option(
        "relative_damping",
        False,
        *_BOOL,
        doc="""damp with ``damping`` times the average eigenvalue of the statistics.""",
    ),
    Option(
        "early_roots",
        False,
        *_BOOL,
        doc="""take inverse square roots of the damped statistics instead of inverses in the first
        steps, as long as the mean of the training gradients dominates their second moment, on
        average over the parameters. It needs ``relative_damping``. Gradients at sampled labels have
        mean zero: with a ``likelihood`` it does nothing. None: True if there is no likelihood and
        ``graft`` and ``relative_damping`` are set.""",
    ),
    Option(
        "graft",
        None,
        *_one_of(None, *get_args(Graft)),
        doc="""rescale each parameter's direction. "adam": to the norm of Adam's direction, which
        needs a second moment; "sgd": to the momentum's norm; "rms": to a root mean square of 0.2,
        about that of Adam's direction, without its memory (steps stay as long when gradients
        vanish: not for heads or experts that are idle); None: not at all.""",
    ),
    Option(
        "maximize",
        False,
        *_BOOL,
        doc="""maximize the objective instead of minimizing.""",
    ),
    Option(
        "rounding",
        "nearest",
        *_one_of(*get_args(Rounding)),
        doc="""how parameters in half precision are rounded after a step, which is computed in
        float32. "nearest"; "stochastic" (bfloat16 only): up or down at random, so that the mean
        step is exact even where steps are smaller than half a spacing; "master": from a float32
        copy in the state.""",
    ),
    Option(
        "modes",
        None,
        _or_none(callable),
        "a function of a shape",
        doc="""for a parameter group only: a function from a parameter's shape to mode sizes; used
        for vectors only with ``precondition_1d``.""",
        shapes=True,
    ),
    Option(
        "inverse",
        "damped",
        *_one_of(*get_args(Inverse)),
        doc=""""damped": (G + √damping I)^-1 M (A + √damping I)^-1, the paper's form for
        autoencoders, with √damping in units of each factor's average eigenvalue if it is relative;
        "eigenbasis": the inverse of G ⊗ A + damping I, the paper's form for CNNs, which keeps one
        more matrix of each weight's shape, and waits for the device when it is refreshed.""",
        per_group=False,
    ),
    Option(
        "seed",
        0,
        _is_seed,
        "an integer",
        doc="""the seed of the sampled labels; the global generators are not touched.""",
        per_group=False,
    ),
    Option(
        "capturable",
        False,
        *_BOOL,
        doc="""run the steps as CUDA graphs, one for each kind of step, from the second step of its
        kind on. All parameters must be on one CUDA device. Gradients at new addresses are copied:
        ``zero_grad(set_to_none=False)`` saves the copies. The learning rate and the other numbers
        may change at every step.""",
        per_group=False,
    ),
    Option(
        "process_group",
        None,
        lambda value: True,
        "a process group or None",
        doc="""the processes that train copies of one model, as under DistributedDataParallel; None
        for torch.distributed's default group, if there is one. The statistics are of the batches
        of all processes.""",
        per_group=False,
    ),
    Option(
        "shard",
        None,
        *_one_of(None, *get_args(Shard)),
        doc="""how processes divide the work. None: each does all of it. Otherwise every parameter
        has one owner rank, which keeps its statistics and refreshes its factors. With "inverses"
        the owner sends new factors to the others; with "directions", which takes the least memory,
        only the owner keeps factors and momentum, and it sends the direction at every step.""",
        per_group=False,
    ),
)
OPTIONS = {option.name: option for option in _TABLE}
# Options of earlier versions, and what to use instead.
REMOVED = {
    "kl_clip": "graft='adam', the default, bounds the length of every parameter's step",
    "sample_scale": "leave it out; a likelihood function of your own may multiply its loss by a "
    "constant, which relative damping and graft cancel",
}


class Fixed:
    """An option that a constructed optimizer cannot change; the default if it was not given."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, optimizer: Any, owner: type | None = None) -> Any:
        if optimizer is None:
            return self
        return optimizer.__dict__.get(self.name, OPTIONS[self.name].default)

    def __set__(self, optimizer: Any, value: Any) -> None:
        if self.name in optimizer.__dict__:
            kind = type(optimizer).__name__
            raise AttributeError(
                f"{self.name} cannot be set: construct {kind}(..., {self.name}={value!r}) anew"
            )
        optimizer.__dict__[self.name] = value


def check_settings(settings: Settings) -> None:
    """Refuses a value that does not fit, in a parameter group or a constructor's arguments."""
    for name, value in settings.items():
        option = OPTIONS.get(name)
        if option is not None and not option.holds(value):
            raise ValueError(f"{name} must be {option.rule}, got {value!r}")


def same_settings(group: Settings) -> tuple[Any, ...]:
    """A key that groups share only if all their settings, but not their parameters, are the same.

    Tensors, which may change in place, must be the same objects.
    """
    values = [value for name, value in group.items() if name in OPTIONS]
    schedule = group["step"], group.get("takes_roots")
    return (*group.keys(), *values, *map(type, values), *schedule)  # 1 == True


def repeated_options(
    group: Settings, per_group: Container[str], whole: Settings, kind: str
) -> list[str]:
    """The names in a group of options of the ``whole`` optimizer, whose values it repeats.

    Wrappers give their keyword arguments to the groups and to the optimizer (SAM).

    Raises:
        ValueError: if the value of such an option differs, or no group of this ``kind`` has it,
            or it was removed.
    """
    for name in REMOVED.keys() & group.keys():
        raise ValueError(f"{name} was removed: {REMOVED[name]}")
    foreign = [name for name in group if name not in per_group]
    names = [name for name in foreign if name in OPTIONS or name in whole]
    for name in names:
        message = f"{name} cannot be set for a parameter group of {kind}"
        if name not in whole:
            raise ValueError(f"{message}: remove it")
        if group[name] != whole[name]:
            raise ValueError(
                f"{message}, whose own is {whole[name]!r}, got {group[name]!r}: remove it"
            )
    return names


def split(given: Settings) -> tuple[dict[str, Any], dict[str, Any]]:
    """Checks a constructor's options; splits them into a group's and the whole optimizer's.

    Missing options of a group get their defaults.
    """
    unknown = sorted(given.keys() - OPTIONS.keys())
    if unknown:
        raise TypeError(f"options must be among {', '.join(OPTIONS)}, got {', '.join(unknown)}")
    check_settings(given)
    groups = {o.name: given.get(o.name, o.default) for o in _TABLE if o.per_group}
    return groups, {name: value for name, value in given.items() if not OPTIONS[name].per_group}


def documented(**replaced: str) -> Callable[[Class], Class]:
    """A class decorator: replaces "{options}" by the documentation of the constructor's options.

    ``replaced`` is the method's own text for some options.
    """

    def decorate(cls: Class) -> Class:
        place = re.search(r"( *){options}", cls.__doc__ or "")
        if place is None:  # python -OO removes docstrings
            return cls
        indent = place[1]  # Python 3.13 removes the docstring's own indent
        names = [name for name in inspect.signature(cls).parameters if name in OPTIONS]
        lines = [
            textwrap.fill(
                " ".join(f"{name}: {replaced.get(name, OPTIONS[name].doc)}".split()),
                width=100,
                initial_indent=indent,
                subsequent_indent=indent + " " * 4,
                break_long_words=False,
                break_on_hyphens=False,
            )
            for name in names
        ]
        cls.__doc__ = place.string.replace(place[0], "\n".join(lines))
        return cls

    return decorate


def arguments(variables: Settings) -> dict[str, Any]:
    """The options among the local variables of a constructor."""
    return {name: value for name, value in variables.items() if name in OPTIONS}


def as_number(value: Any) -> Any:
    """A learning rate as the operators take it: a 0-dim tensor or a number >= 0."""
    return value.reshape(()).clamp(min=0) if isinstance(value, Tensor) else max(value, 0)


def as_they_are(group: Settings) -> Settings:
    """A group's settings for a step that no CUDA graph records."""
    return {**group, "lr": as_number(group["lr"])}
