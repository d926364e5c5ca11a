"""The optimizers by name, every setting of a run, and the baselines that torch has in parts."""

from __future__ import annotations

import importlib
import inspect
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tnt_optim import KFAC, TNT, Shampoo, with_fallback

# The first part of a run, in which "warmup-cosine" raises the learning rate.
WARM_UP = 0.05


@dataclass(frozen=True)
class Settings:
    """Every setting of one run. None: the optimizer has no such setting."""

    optimizer: str
    lr: float  # alpha in the paper
    damping: float | None  # epsilon in the paper, lambda for KFAC; Adam's epsilon
    momentum: float  # mu in the paper; Adam's beta_1
    stat_decay: float | None  # beta in the paper; Adam's beta_2
    weight_decay: float  # gamma in the paper, decoupled
    stat_interval: int | None  # T_1 in the paper
    inverse_interval: int | None  # T_2 in the paper
    warm_start: bool | None
    relative_damping: bool | None
    graft: str | None
    schedule: str  # "constant", "step:N" (a tenth every N epochs) or "warmup-cosine"
    batch_size: int
    epochs: int
    seed: int
    interval_warmup: int | None = None
    precondition_1d: bool | None = None  # whether biases and norms have statistics
    estimator: str | None = None  # of TNT's statistics
    # False for optimizers without them, too, and where older records lack them.
    nesterov: bool = False
    early_roots: bool = False


# From the model, the settings and the likelihood of the outputs.
Build = Callable[[nn.Module, Settings, str], torch.optim.Optimizer]


@dataclass(frozen=True)
class Method:
    """One optimizer of the comparison.

    Attributes:
        label: its name in tables and legends, as in the paper.
        colour: of its curves; from Okabe and Ito's palette or Tol's, which colour-blind readers
            can tell.
        statistics: source of the curvature: labels "sampled" from the model's own distribution,
            the "empirical" training gradients, or None for a first-order method and for other
            libraries' second-order ones, which have no warm start and intervals of their own.
        damped: whether it has a damping (Adam: its epsilon).
        stat_decay: decay of its moving average (beta in the paper; Adam's beta_2), as the paper
            sets it; None without such an average.
        build: makes the optimizer.
    """

    label: str
    colour: str
    statistics: Literal["sampled", "empirical"] | None
    damped: bool
    stat_decay: float | None
    build: Build


def method_settings(
    optimizer: str,
    lr: float,
    damping: float | None,
    *,
    batch_size: int,
    epochs: int,
    momentum: float = 0.9,
    stat_decay: float | None = None,
    weight_decay: float = 0.0,
    intervals: tuple[int, int] = (1, 20),
    warm_start: bool = True,
    graft: str | None = None,
    relative_damping: bool = False,
    interval_warmup: int = 0,
    precondition_1d: bool = True,
    estimator: str = "moments",
    nesterov: bool = False,
    early_roots: bool = False,
    schedule: str = "constant",
    seed: int = 0,
) -> Settings:
    """`Settings`, with None for every setting that the optimizer does not have.

    `stat_decay` None is the method's own; `intervals` are T1 and T2.
    """
    second_order, grafts = has_statistics(optimizer), takes_graft(optimizer)
    return Settings(
        optimizer=optimizer,
        lr=lr,
        damping=damping if METHODS[optimizer].damped else None,
        momentum=momentum,
        stat_decay=METHODS[optimizer].stat_decay if stat_decay is None else stat_decay,
        weight_decay=weight_decay,
        stat_interval=intervals[0] if second_order else None,
        inverse_interval=intervals[1] if second_order else None,
        warm_start=warm_start if second_order else None,
        relative_damping=relative_damping if grafts else None,
        graft=graft if grafts else None,
        schedule=schedule,
        batch_size=batch_size,
        epochs=epochs,
        seed=seed,
        interval_warmup=interval_warmup if grafts else None,
        precondition_1d=precondition_1d if grafts else None,
        estimator=estimator if grafts and optimizer != "shampoo" else None,
        nesterov=nesterov,
        early_roots=early_roots,
    )


def default_settings(optimizer: str, *, batch_size: int, epochs: int, schedule: str) -> Settings:
    """The settings of an optimizer of tnt_optim without any argument.

    >>> default_settings("shampoo", batch_size=32, epochs=8, schedule="constant").graft
    'adam'
    """
    kind = {"shampoo": Shampoo, "kfac": KFAC, "kfac-ef": KFAC}.get(optimizer, TNT)
    own = {name: p.default for name, p in inspect.signature(kind).parameters.items()}
    found = method_settings(
        *(optimizer, own["lr"], own["damping"]),
        **{name: own[name] for name in ("momentum", "stat_decay", "weight_decay")},
        intervals=(own["stat_interval"], own["inverse_interval"]),
        warm_start=False,
        schedule=schedule,
        batch_size=batch_size,
        epochs=epochs,
    )
    form = {name: own[name] for name in _FORM if own.get(name) is not None}
    if kind is TNT:  # these depend on the likelihood
        likelihood = None if METHODS[optimizer].statistics == "empirical" else "categorical"
        group = TNT([nn.Parameter(torch.zeros(1))], likelihood=likelihood).param_groups[0]
        form |= {name: group[name] for name in ("nesterov", "early_roots", "interval_warmup")}
    return replace(found, **form)


def lr_multiplier(schedule: str, step: int, steps_per_epoch: int, steps: int) -> float:
    """The factor of the learning rate at one step, counted from 0.

    Args:
        schedule: "constant"; "step:N", a tenth of it every N epochs; or "warmup-cosine", linear
            from 0 over the first twentieth of the steps, then down to 0 along a cosine.
        step: the step about to be taken.
        steps_per_epoch: steps in an epoch.
        steps: steps in the run.

    Raises:
        ValueError: there is no such schedule.

    >>> [lr_multiplier("step:2", step, 1, 6) for step in range(6)]
    [1.0, 1.0, 0.1, 0.1, 0.01, 0.01]
    """
    if schedule == "constant":
        return 1.0
    if schedule == "warmup-cosine":
        warm = max(1, math.ceil(WARM_UP * steps))
        if step < warm:
            return (step + 1) / warm
        return (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm))) / 2
    kind, _, number = schedule.partition(":")
    if kind == "step" and number.isdecimal() and int(number) > 0:
        return float(f"{0.1 ** (step // steps_per_epoch // int(number)):.6g}")
    raise ValueError(
        f"schedule must be 'constant', 'warmup-cosine' or 'step:N' with N > 0, got {schedule!r}"
    )


def variant(settings: Settings) -> Settings:
    """The settings with one seed for all: runs with the same variant are one curve."""
    return replace(settings, seed=0)


def variant_labels(variants: Sequence[Settings]) -> list[str]:
    """For each variant the method's name, with the settings that differ within the method.

    The library's defaults are "defaults", and differ only from each other: in the schedule.
    """
    labels = []
    variants = [variant(settings) for settings in variants]
    for settings in variants:
        like = [other for other in variants if other.optimizer == settings.optimizer]
        peers = [other for other in like if _is_default(other) == _is_default(settings)]
        parts = [
            f"{name.replace('_', ' ')} {value}"
            for name, value in asdict(settings).items()
            if len({getattr(other, name) for other in peers}) > 1 and value is not None
        ]
        if _is_default(settings) and len(like) > 1:
            parts = ["defaults", *parts]
        label = METHODS[settings.optimizer].label
        labels.append(f"{label} ({', '.join(parts)})" if parts else label)
    return labels


def _is_default(settings: Settings) -> bool:
    if not has_statistics(settings.optimizer):
        return False
    names = ("batch_size", "epochs", "schedule")
    own = default_settings(settings.optimizer, **{n: getattr(settings, n) for n in names})
    return variant(own) == variant(settings)


class AuthorsAdam(torch.optim.Optimizer):
    """What the paper's published code computes as Adam: the momentum's second moment.

    m <- beta_1 m + (1 - beta_1) g; n = m / (1 - beta_1^t); v <- beta_2 v + (1 - beta_2) n^2;
    W <- W - lr n / (sqrt(v / (1 - beta_2^t)) + eps). Kingma & Ba's v has g^2 for n^2. A momentum
    averages noise away, so v is smaller and steps are longer.

    Args:
        params: parameters, named parameters or groups.
        lr: alpha in the paper.
        betas: beta_1 and beta_2.
        eps: outside the root, after the bias correction.
    """

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "step": 0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take one step, without a closure."""
        for group in self.param_groups:
            group["step"] += 1
            (beta1, beta2), t = group["betas"], group["step"]
            moved = [p for p in group["params"] if p.grad is not None]
            for p in moved:
                if not self.state[p]:
                    self.state[p] = {"m": torch.zeros_like(p), "v": torch.zeros_like(p)}
            m, v = ([self.state[p][name] for p in moved] for name in "mv")
            torch._foreach_lerp_(m, [p.grad for p in moved], 1 - beta1)
            n = torch._foreach_div(m, 1 - beta1**t)
            torch._foreach_mul_(v, beta2)
            torch._foreach_addcmul_(v, n, n, 1 - beta2)
            roots = torch._foreach_sqrt(torch._foreach_div(v, 1 - beta2**t))
            torch._foreach_add_(roots, group["eps"])
            torch._foreach_addcdiv_(moved, n, roots, -group["lr"])


def with_adamw(model: nn.Module, first: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """An optimizer of some of a model's parameters, and AdamW for all others.

    One learning rate serves both, so the first one's updates must be about as large as AdamW's.
    """
    shared = {name: first.param_groups[0][name] for name in ("lr", "weight_decay")}
    chosen = {p for group in first.param_groups for p in group["params"]}
    rest = [(name, p) for name, p in model.named_parameters() if p not in chosen]
    return with_fallback(first, torch.optim.AdamW(rest, betas=(0.9, 0.99), fused=True, **shared))


def hidden_matrices(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Named weights of all recurrent layers, and of all linear ones but the last: the outputs'."""
    modules = list(model.named_modules())
    recurrent = [
        (f"{name}.{weight}", parameter)
        for name, module in modules
        if isinstance(module, nn.RNNBase)
        for weight, parameter in module.named_parameters()
        if parameter.dim() == 2
    ]
    linears = [(n, m) for n, m in modules if isinstance(m, nn.Linear)]
    return recurrent + [(f"{name}.weight", module.weight) for name, module in linears[:-1]]


# The settings in which the default differs from the paper's form.
_FORM = (
    *("relative_damping", "graft", "interval_warmup", "precondition_1d", "estimator"),
    *("nesterov", "early_roots"),
)


def _second_order(kind: type[TNT | Shampoo | KFAC], **fixed: Any) -> Build:
    def build(model: nn.Module, settings: Settings, likelihood: str) -> torch.optim.Optimizer:
        names = ["lr", "damping", "momentum", "stat_decay", "weight_decay"]
        names += ["stat_interval", "inverse_interval", *_FORM]
        accepted = inspect.signature(kind).parameters
        values = {name: getattr(settings, name) for name in names if name in accepted}
        given: dict[str, Any] = {name: v for name, v in values.items() if v is not None}
        if kind is not Shampoo:
            given |= {"likelihood": likelihood, "seed": settings.seed}
        # What `Settings` does not hold is the paper's, or the default's in the default's form.
        make: Callable[..., torch.optim.Optimizer] = kind
        if settings.graft is None:
            make = kind.paper
        return make(model if kind is KFAC else model.named_parameters(), **{**given, **fixed})

    return build


def _adam(model: nn.Module, settings: Settings, likelihood: str) -> torch.optim.Optimizer:
    assert settings.stat_decay is not None and settings.damping is not None
    # AdamW without decay is Adam.
    return torch.optim.AdamW(
        model.named_parameters(),
        lr=settings.lr,
        betas=(settings.momentum, settings.stat_decay),
        eps=settings.damping,
        weight_decay=settings.weight_decay,
        fused=True,
    )


def _authors_adam(model: nn.Module, settings: Settings, likelihood: str) -> torch.optim.Optimizer:
    assert settings.stat_decay is not None and settings.damping is not None
    if settings.weight_decay:
        raise ValueError(f"weight_decay must be 0 for adam-authors, got {settings.weight_decay}")
    return AuthorsAdam(
        model.named_parameters(),
        lr=settings.lr,
        betas=(settings.momentum, settings.stat_decay),
        eps=settings.damping,
    )


def _sgd(model: nn.Module, settings: Settings, likelihood: str) -> torch.optim.Optimizer:
    """SGD with momentum and decoupled weight decay: m <- mu m + g; W <- W - lr (m + decay W).

    torch's own SGD adds the decay to the gradient, so it passes through the momentum; the paper
    decays the weights of all methods in the same way.
    """
    optimizer = torch.optim.SGD(
        model.named_parameters(), lr=settings.lr, momentum=settings.momentum, fused=True
    )

    @torch.no_grad()
    def decay(*_: Any) -> None:
        for group in optimizer.param_groups:
            moved = [p for p in group["params"] if p.grad is not None]
            torch._foreach_mul_(moved, 1 - group["lr"] * settings.weight_decay)

    if settings.weight_decay:
        optimizer.register_step_pre_hook(decay)
    return optimizer


def _hidden(model: nn.Module) -> list[tuple[str, Tensor]]:
    found = hidden_matrices(model)
    if not found:
        raise ValueError("model must have a matrix in a hidden layer for Muon, got none")
    return found


def _muon(model: nn.Module, settings: Settings, likelihood: str) -> torch.optim.Optimizer:
    first = torch.optim.Muon(
        _hidden(model),
        lr=settings.lr,
        momentum=settings.momentum,
        weight_decay=settings.weight_decay,
        adjust_lr_fn="match_rms_adamw",
    )
    return with_adamw(model, first)


def _library(method: str, package: str) -> Any:
    try:
        return importlib.import_module(package.replace("-", "_"))
    except ModuleNotFoundError as error:
        raise ValueError(
            f"optimizer {method!r} needs the package {package}: python -m pip install {package}"
        ) from error


def _normuon(model: nn.Module, settings: Settings, likelihood: str) -> torch.optim.Optimizer:
    # "match_rms" is the paper's Algorithm 1, and Muon's "match_rms_adamw" with rows of one norm.
    group = {"params": _hidden(model), "use_muon": True, "update_scale": "match_rms"}
    first = _library("normuon", "pytorch-optimizer").NorMuon(
        [group],
        lr=settings.lr,
        momentum=settings.momentum,
        beta2=settings.stat_decay,
        weight_decay=settings.weight_decay,
    )
    return with_adamw(model, first)


def _soap(model: nn.Module, settings: Settings, likelihood: str) -> torch.optim.Optimizer:
    # As its authors run it: eigenbases by QR every 10 steps, vectors by Adam, no first step.
    optimizer: torch.optim.Optimizer = _library("soap", "pytorch-optimizer").SOAP(
        model.named_parameters(),
        lr=settings.lr,
        betas=(settings.momentum, settings.stat_decay),
        eps=settings.damping,
        weight_decay=settings.weight_decay,
        precondition_frequency=10,
        max_precondition_dim=4096,  # as TNT: a factor of 5000 takes seconds
    )
    return optimizer


def _heavyball(
    kind: str, model: nn.Module, settings: Settings, **own: Any
) -> torch.optim.Optimizer:
    heavyball = _library(settings.optimizer, "heavyball")
    # On one thread of a CPU, compiling took 100 s and doubled the time of a step (width 64).
    heavyball.utils.compile_mode = None
    # The library warns of every schedule. It takes a new rate at once, as the tests check.
    warnings.filterwarnings("ignore", "Learning rate changed between steps")
    optimizer: torch.optim.Optimizer = getattr(heavyball, kind)(
        model.named_parameters(), lr=settings.lr, weight_decay=settings.weight_decay, **own
    )

    def seed_step(*_: object) -> None:
        step = int(optimizer.param_groups[0].get("step_count", 0))
        torch.manual_seed(settings.seed * 10**6 + step)

    # It draws from the global generator: a run must not depend on what else has drawn from it.
    optimizer.register_step_pre_hook(seed_step)
    return optimizer


def _kl_shampoo(model: nn.Module, settings: Settings, likelihood: str) -> torch.optim.Optimizer:
    # The library's defaults: eigenbases by QR every 2 steps, momentum alone for vectors, no first
    # step. Its authors' 10 steps, or AdamW for the vectors, gave higher losses at width 64.
    return _heavyball(
        *("KLShampoo", model, settings),
        betas=(settings.momentum, settings.stat_decay),
        shampoo_beta=settings.stat_decay,
        eps=settings.damping,
    )


def _psgd(model: nn.Module, settings: Settings, likelihood: str) -> torch.optim.Optimizer:
    # PSGD-Kron in its author's present coordinates, dQ = Q^0.5 E Q^1.5. heavyball's PSGDKron and
    # pytorch-optimizer's Kron have dQ = E Q, which he advises against; their losses were higher.
    return _heavyball("PSGDPRO", model, settings, beta=settings.momentum)


METHODS: dict[str, Method] = {
    "tnt": Method("TNT", "#0072B2", "sampled", True, 0.9, _second_order(TNT)),
    "tnt-ef": Method(
        "TNT-EF", "#56B4E9", "empirical", True, 0.9, _second_order(TNT, likelihood=None)
    ),
    # The paper inverts KFAC's damped factors for the autoencoders, and works in their eigenbasis
    # for the convolutional networks.
    "kfac": Method("KFAC", "#CC79A7", "sampled", True, 0.9, _second_order(KFAC, inverse="damped")),
    "kfac-ef": Method(
        "KFAC-EF",
        "#DDCC77",
        "empirical",
        True,
        0.9,
        _second_order(KFAC, inverse="damped", likelihood=None),
    ),
    "kfac-eigen": Method(
        "KFAC (eigenbasis)",
        "#AA4499",
        "sampled",
        True,
        0.9,
        _second_order(KFAC, inverse="eigenbasis"),
    ),
    "shampoo": Method("Shampoo", "#E69F00", "empirical", True, 0.9, _second_order(Shampoo)),
    "adam": Method("Adam", "#009E73", None, True, 0.999, _adam),
    "adam-authors": Method("Adam (authors')", "#117733", None, True, 0.999, _authors_adam),
    "sgd": Method("SGD-m", "#D55E00", None, False, None, _sgd),
    "muon": Method("Muon + AdamW", "#000000", None, False, None, _muon),
    "normuon": Method("NorMuon + AdamW", "#332288", None, False, 0.95, _normuon),
    "soap": Method("SOAP", "#999999", None, True, 0.95, _soap),
    "kl-shampoo": Method("KL-Shampoo", "#882255", None, True, 0.95, _kl_shampoo),
    "psgd": Method("PSGD-Kron", "#999933", None, False, None, _psgd),
}


def has_statistics(optimizer: str) -> bool:
    """Whether the optimizer is second-order: with statistics, inverses and a warm start."""
    return METHODS[optimizer].statistics is not None


def takes_graft(optimizer: str) -> bool:
    """Whether the optimizer has `graft` and `relative_damping`."""
    return optimizer in ("tnt", "tnt-ef", "shampoo")


def build_optimizer(model: nn.Module, settings: Settings, likelihood: str) -> torch.optim.Optimizer:
    """The optimizer that `settings` names, over all parameters of `model`.

    Raises:
        ValueError: there is no such method.
    """
    if settings.optimizer not in METHODS:
        raise ValueError(
            f"optimizer must be one of {', '.join(METHODS)}, got {settings.optimizer!r}"
        )
    return METHODS[settings.optimizer].build(model, settings, likelihood)


def observes(settings: Settings) -> bool:
    """Whether the loop calls `observe`."""
    return METHODS[settings.optimizer].statistics == "sampled"
