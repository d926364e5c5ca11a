"""What PyTorch asks of every optimizer, after its own test/test_optim.py: groups, schedules, signs.

What it asks of steps, saved states, copies and hooks is in ``test_optimizer_contract_state``. Of
its checks these do not apply, or are made elsewhere:

==================================  ==============================================================
check of test_optim.py              why it is not in these two files
==================================  ==============================================================
foreach, fused: parity, defaults,   there are no such switches: one path, whose operators take
peak memory, params on meta         lists of tensors (the backends' parity: test_cuda_on_host)
adamw_serialization, its own table  of PyTorch's classes
differentiable                      no such switch: a step is not recorded by autograd
capturable, cuda params, multi-GPU  need GPUs: test_capturable, test_on_gpu; large ones 72 GB
rosenbrock_sparse                   sparse gradients are refused: test_tnt_edges, test_kfac_edges
complex, complex_2d                 complex parameters are refused: below, test_kfac_edges
second-order optimizers' return     of LBFGS; what the closure returns is in the second file
one graph for a compiled step       a step looks at values; compiled with breaks: below
load_nontensor_step                 steps are numbers; counts that are tensors: second file
KFAC: groups, wrong parameters,     its parameters are its model's, in one group, with names:
names, maximize                     test_kfac_edges; to maximize, negate the loss
with_fallback: wrong parameters,    of the two optimizers; further groups are theirs, its list of
groups added or repeated            them is made when it is asked for: test_with_fallback
==================================  ==============================================================
"""

import copy
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from drawn import close, raising
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn

from tnt_optim import KFAC, TNT, Shampoo, with_fallback

pytestmark = pytest.mark.usefixtures("one_thread")

FACTORED: dict[str, Callable[..., Any]] = {
    "empirical": functools.partial(TNT, fisher="empirical"),
    "sampled": TNT,
    "shampoo": Shampoo,
}
EVERY = [*FACTORED, "kfac", "fallback"]
SETTINGS = {"lr": 0.01, "damping": 0.1, "stat_interval": 2, "inverse_interval": 4}
COMMON = ("lr", "weight_decay", "maximize")  # of both of the combined optimizers


def net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Two linear layers with biases."""
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).to(dtype)


def strided_net() -> nn.Sequential:
    """The same with parameters that are every second entry of something else."""
    model = net()
    for layer in (model[0], model[2]):
        for kind, param in list(layer.named_parameters()):
            setattr(layer, kind, nn.Parameter(torch.randn((*param.shape, 2))[..., 0]))
    assert not any(param.is_contiguous() for param in model.parameters())
    return model


def made(name: str, model: nn.Module, *, named: bool = False, **settings: Any) -> Any:
    """The optimizer of that name, of a model's parameters; the combined one is TNT and AdamW."""
    chosen = {**SETTINGS, **settings}
    if name == "kfac":
        return KFAC(model, **chosen)
    params: list[Any] = [(n, p) if named else p for n, p in model.named_parameters()]
    if name == "fallback":
        small = [p.dim() < 2 for p in model.parameters()]
        common = {"weight_decay": 0.0, **{k: v for k, v in chosen.items() if k in COMMON}}
        main = TNT([p for p, is_small in zip(params, small, strict=True) if not is_small], **chosen)
        rest = [p for p, is_small in zip(params, small, strict=True) if is_small]
        return with_fallback(main, torch.optim.AdamW(rest, **common))
    return FACTORED[name](params, **chosen)


def batch(step: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Inputs and labels that depend on the step alone."""
    rng = torch.Generator().manual_seed(100 + step)
    x = torch.randn(8, 4, generator=rng, dtype=torch.float64)
    return x.to(dtype), torch.randint(3, (8,), generator=rng)


def backward(model: nn.Module, opts: Any, step: int, sign: float = 1.0) -> Tensor:
    """Gradients of the loss, times ``sign``, and what the optimizers want to observe."""
    x, y = batch(step, next(model.parameters()).dtype)
    output = model(x)
    for opt in opts if isinstance(opts, list) else [opts]:
        opt.zero_grad()
        if not isinstance(opt, Shampoo):
            opt.observe(output)
    loss = cross_entropy(output, y)
    (sign * loss).backward()
    return loss


def train(
    model: nn.Module, opt: Any, steps: Iterable[int], schedulers: Sequence[Any] = ()
) -> list[float]:
    """Takes steps; the loss before each."""
    losses = []
    for step in steps:
        loss = backward(model, opt, step)
        opt.step()
        losses.append(float(loss.detach()))
        for scheduler in schedulers:
            plateau = isinstance(scheduler, lr_scheduler.ReduceLROnPlateau)
            scheduler.step(*([loss.detach()] if plateau else []))
    return losses


def values(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def moved(model: nn.Module, before: Sequence[Tensor]) -> list[bool]:
    """Of each parameter, whether it is another than it was."""
    return [not torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True)]


# ------------------------------------------------------------------ parameters and their groups

WRONG: dict[str, tuple[Callable[[nn.Parameter], Any], type[Exception], str]] = {
    "a tensor": (lambda p: p, TypeError, "should be an iterable of Tensors or dicts"),
    "nothing": (lambda p: [], ValueError, "empty parameter list"),
    "a number": (lambda p: [p, 1.0], TypeError, "can only optimize Tensors"),
    "a set": (lambda p: [{"params": {p}}], TypeError, "ordered collections"),
    "not a leaf": (lambda p: [p, p + 1], ValueError, "non-leaf"),
    "complex": (lambda p: [p, nn.Parameter(p + 0j)], ValueError, "dense real"),
    "twice": (lambda p: [{"params": p}, {"params": p}], ValueError, "more than one parameter"),
    "half named": (lambda p: [("p", p), nn.Parameter(p.detach())], ValueError, "with/without"),
    "a group named": (
        lambda p: [{"params": [("p", p)]}, {"params": [nn.Parameter(p.detach())]}],
        ValueError,
        "param groups should be with/without names",
    ),
}


@pytest.mark.parametrize("name", FACTORED)
@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_parameters_are_refused(name: str, wrong: str) -> None:
    params, error, message = WRONG[wrong]
    with pytest.raises(error, match=message):
        FACTORED[name](params(nn.Parameter(torch.randn(2, 3))))


@pytest.mark.parametrize("name", FACTORED)
def test_one_parameter_twice_in_a_group_is_warned_of(name: str) -> None:
    param = nn.Parameter(torch.randn(2, 3))
    with pytest.warns(UserWarning, match="group with duplicate parameters"):
        FACTORED[name]([param, param])


@pytest.mark.parametrize("name", [*FACTORED, "kfac"])
@pytest.mark.parametrize(
    ("setting", "value"),
    [("lr", -0.1), ("lr", torch.tensor([1e-3, 1e-3])), ("momentum", -0.5), ("weight_decay", -1.0)],
)
def test_wrong_settings_are_refused(name: str, setting: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{setting} must be"):
        made(name, net(), **{setting: value})


@pytest.mark.parametrize("name", FACTORED)
def test_groups_are_optimizers_of_their_own(name: str) -> None:
    """With learning rate and weight decay of their own, a schedule, and of another dtype."""
    torch.manual_seed(1)
    whole = net(torch.float64)
    whole[2].to(torch.float32)
    whole[1].register_forward_hook(lambda _, args, output: output.float())
    apart = copy.deepcopy(whole)
    own: list[dict[str, Any]] = [{"lr": 0.05, "weight_decay": 0.3}, {}, {"momentum": 0.0}, {}]
    groups = [{"params": [p], **o} for p, o in zip(whole.parameters(), own, strict=True)]
    one = FACTORED[name](groups, **SETTINGS)
    pairs = zip(apart.parameters(), own, strict=True)
    several = [FACTORED[name]([p], **{**SETTINGS, **settings}) for p, settings in pairs]
    schedulers = [lr_scheduler.ExponentialLR(opt, 0.8) for opt in (one, *several)]
    before = values(whole)
    for step in range(6):
        backward(whole, one, step)
        backward(apart, several, step)
        for opt in (one, *several):
            opt.step()
        for scheduler in schedulers:
            scheduler.step()
    rates = [opt.param_groups[0]["lr"] for opt in several]
    assert [group["lr"] for group in one.param_groups] == rates
    assert all(moved(whole, before))
    for p, q in zip(whole.parameters(), apart.parameters(), strict=True):
        close(p.detach().double(), q.detach().double())
        assert {s.dtype for s in one.state[p]["stats"]} == {p.dtype}


@pytest.mark.parametrize("name", [*FACTORED, "fallback"])
def test_a_group_with_hardly_any_learning_rate_stays(name: str) -> None:
    model = net()
    if name == "fallback":  # its second group has the biases
        opt, moving = made(name, model), [True, False, True, False]
        opt.param_groups[1]["lr"] = 1e-28
    else:
        moving = [False, False, True, True]
        groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.05}]
        opt = FACTORED[name](groups, **{**SETTINGS, "lr": 1e-28})
    before = values(model)
    losses = train(model, opt, [0] * 20)
    assert moved(model, before) == moving
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", FACTORED)
def test_a_group_is_added_during_training(name: str) -> None:
    model = net()
    model[0].requires_grad_(False)
    opt = FACTORED[name](model[2].parameters(), **SETTINGS)
    train(model, opt, range(3))
    model[0].requires_grad_(True)
    opt.add_param_group({"params": model[0].parameters(), "lr": 0.5})
    assert [group["lr"] for group in opt.param_groups] == [0.01, 0.5]
    before = values(model)
    train(model, opt, range(3, 8))
    assert all(moved(model, before)) and set(opt.state) == set(model.parameters())
    with pytest.raises(ValueError, match="more than one parameter group"):
        opt.add_param_group({"params": [model[0].weight]})
    with pytest.raises(ValueError, match="with/without names"):
        opt.add_param_group({"params": [("new", nn.Parameter(torch.zeros(2)))]})
    assert [len(group["params"]) for group in opt.param_groups] == [2, 2]


@pytest.mark.parametrize("name", FACTORED)
@pytest.mark.parametrize("wrong", ["a tensor", "a list", "a number"])
def test_a_group_that_is_no_dictionary_is_refused(name: str, wrong: str) -> None:
    opt = made(name, net())
    param = nn.Parameter(torch.zeros(2))
    given = {"a tensor": param, "a list": [param], "a number": 3}[wrong]
    with pytest.raises(TypeError, match="param_group must be a dict"):
        opt.add_param_group(given)
    assert len(opt.param_groups) == 1


# ------------------------------------------------------------------ the right direction, schedules


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("model", [net, strided_net])
@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.parametrize("settings", [{}, {"weight_decay": 0.1}, {"momentum": 0.0, "lr": 0.05}])
def test_the_loss_goes_down(
    name: str, model: Callable[[], nn.Sequential], scheduled: bool, settings: dict[str, Any]
) -> None:
    trained = model()
    opt = made(name, trained, **settings)
    schedulers = [lr_scheduler.StepLR(opt, 10, gamma=0.9), lr_scheduler.ReduceLROnPlateau(opt)]
    losses = train(trained, opt, [0] * 20, schedulers if scheduled else [])
    assert losses[-1] < losses[0]
    assert (opt.param_groups[0]["lr"] == settings.get("lr", 0.01)) == (not scheduled)


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "step": lambda opt: lr_scheduler.StepLR(opt, step_size=2, gamma=0.5),
    "exponential": lambda opt: lr_scheduler.ExponentialLR(opt, 0.9),
    "linear": lambda opt: lr_scheduler.LinearLR(opt, start_factor=0.4, total_iters=4),
    "polynomial": lambda opt: lr_scheduler.PolynomialLR(opt, total_iters=4, power=0.9),
    "cosine": lambda opt: lr_scheduler.CosineAnnealingLR(opt, T_max=5),
    "lambda": lambda opt: lr_scheduler.LambdaLR(opt, lambda step: 1 / (1 + step)),
    "cycle": lambda opt: lr_scheduler.OneCycleLR(opt, 0.3, total_steps=9, cycle_momentum=False),
    "sequential": lambda opt: lr_scheduler.SequentialLR(
        opt, [lr_scheduler.LinearLR(opt, 0.1), lr_scheduler.ExponentialLR(opt, 0.5)], [3]
    ),
    "chained": lambda opt: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(opt, factor=0.1), lr_scheduler.ExponentialLR(opt, 0.9)]
    ),
}


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("as_tensor", [False, True])
def test_schedulers_set_what_they_set_for_sgd(name: str, scheduler: str, as_tensor: bool) -> None:
    def rates(opt: Any) -> list[list[float]]:
        following, found = SCHEDULERS[scheduler](opt), []
        for _ in range(7):
            opt.step()  # without gradients
            following.step()
            found.append([float(group["lr"]) for group in opt.param_groups])
        return found

    def lr() -> Any:
        return torch.tensor(0.25) if as_tensor else 0.25

    opt = made(name, net(), lr=lr())
    held = [group["lr"] for group in opt.param_groups]
    reference = torch.optim.SGD([{"params": p} for p in net()[: len(held)].parameters()], lr=lr())
    wanted = [[rate] * len(held) for rate, *_ in rates(reference)]
    assert rates(opt) == wanted and wanted[-1] != wanted[0]
    assert all((g["lr"] is h) == as_tensor for g, h in zip(opt.param_groups, held, strict=True))


@pytest.mark.parametrize("name", [*FACTORED, "kfac"])
@pytest.mark.parametrize(
    "cycle",
    [
        lambda opt: lr_scheduler.OneCycleLR(opt, 0.05, total_steps=8),
        lambda opt: lr_scheduler.CyclicLR(opt, 0.01, 0.05, step_size_up=4),
    ],
)
def test_schedulers_that_cycle_the_momentum(name: str, cycle: Any) -> None:
    model = net()
    opt = made(name, model)
    scheduler = cycle(opt)
    momenta = []
    for step in range(7):
        momenta.append(opt.param_groups[0]["momentum"])
        train(model, opt, [step], [scheduler])
    assert min(momenta) < 0.87 and max(momenta) >= 0.9 and opt.param_groups[0]["step"] == 7


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("dims", [0, 1, 2])
def test_a_learning_rate_may_be_a_tensor_of_one_element(name: str, dims: int) -> None:
    model = net()
    twin = copy.deepcopy(model)
    lr = torch.tensor(0.0625).reshape([1] * dims)
    train(model, made(name, model, lr=0.0625), range(5))
    train(twin, made(name, twin, lr=lr), range(5))
    assert torch.equal(lr, torch.full([1] * dims, 0.0625))
    torch.testing.assert_close(values(model), values(twin))


@pytest.mark.parametrize("name", ["shampoo", "kfac", "fallback"])  # which is TNT's, too
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a:UserWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
def test_a_compiled_step_follows_a_scheduler_without_recompiling(name: str) -> None:
    """Once every kind of step has been taken, none is compiled again; the results are the same."""
    model = net()
    twin = copy.deepcopy(model)
    opts = [made(name, m, lr=torch.tensor(0.01), inverse_interval=2) for m in (model, twin)]
    schedulers = [lr_scheduler.ExponentialLR(opt, 0.9) for opt in opts]
    torch._dynamo.reset()
    compiled = torch.compile(lambda: opts[0].step(), backend="eager")
    frames = torch._dynamo.utils.counters["frames"]
    frames.clear()
    for step in range(9):
        if step == 4:
            taken = dict(frames)
            assert taken["total"] > 0
        backward(model, opts[0], step)
        compiled()
        train(twin, opts[1], [step])
        for scheduler in schedulers:
            scheduler.step()
    assert dict(frames) == taken
    torch.testing.assert_close(values(model), values(twin))
    torch._dynamo.reset()


@pytest.mark.parametrize("name", EVERY)
def test_weights_are_averaged(name: str) -> None:
    """torch.optim.swa_utils: the mean of the weights, its learning rate, batch norm's buffers."""
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))
    opt = made(name, model)
    average = AveragedModel(model)
    scheduler = SWALR(opt, swa_lr=0.002, anneal_epochs=3, anneal_strategy="linear")
    seen = []
    for step in range(5):
        train(model, opt, [step], [scheduler])
        average.update_parameters(model)
        seen.append(values(model))
    for mine, *theirs in zip(average.module.parameters(), *seen, strict=True):
        torch.testing.assert_close(mine.detach(), torch.stack(theirs).mean(dim=0))
    assert all(group["lr"] == pytest.approx(0.002) for group in opt.param_groups)
    x, _ = batch(0, torch.float32)
    update_bn([x], average)
    linear, norm, *_ = average.module.children()
    torch.testing.assert_close(norm.running_mean, linear(x).mean(dim=0))
    train(model, opt, range(5, 8))


# ------------------------------------------------------------------ maximize

FORMS: list[dict[str, Any]] = [
    {},
    {"weight_decay": 0.1, "block_size": 3},
    {"graft": "adam", "relative_damping": True},
    {"graft": "sgd", "momentum": 0.0, "max_factor_dim": 4},
]


@pytest.mark.parametrize("name", FACTORED)
@pytest.mark.parametrize("form", FORMS)
def test_to_maximize_is_to_minimize_the_negative(name: str, form: dict[str, Any]) -> None:
    """To the bit: statistics are even in the gradient, weight decay has no sign."""
    model = net()
    twin = copy.deepcopy(model)
    up = made(name, model, maximize=True, **form)
    down = made(name, twin, **form)
    before = values(model)
    for step in range(7):
        backward(model, up, step)
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        up.step()
        for param, gradient in zip(model.parameters(), gradients, strict=True):
            assert param.grad is not None and torch.equal(param.grad, gradient)
        backward(twin, down, step, sign=-1.0)
        down.step()
    assert all(moved(model, before)) and not any(moved(model, values(twin)))
    kept = (opt.state_dict()["state"] for opt in (up, down))
    torch.testing.assert_close(*kept, rtol=0, atol=0)


@pytest.mark.parametrize("name", [*FACTORED, "fallback"])
def test_the_loss_goes_up(name: str) -> None:
    model = net()
    opt = made(name, model, maximize=True)
    losses = train(model, opt, [0] * 20, [lr_scheduler.StepLR(opt, step_size=10, gamma=0.9)])
    assert losses[-1] > losses[0]


@pytest.mark.parametrize("name", FACTORED)
def test_maximize_is_of_a_group(name: str) -> None:
    """One group is as where neither is maximized, the other as where both are."""
    start = net()
    ends = []
    for maximize in ([False, False], [True, True], [False, True]):
        model = copy.deepcopy(start)
        layers = zip((model[0], model[2]), maximize, strict=True)
        groups = [{"params": layer.parameters(), "maximize": up} for layer, up in layers]
        train(model, FACTORED[name](groups, **SETTINGS), [0])
        ends.append(values(model))
    assert all(map(torch.equal, ends[2], [*ends[0][:2], *ends[1][2:]]))
    assert not any(map(torch.equal, ends[0], ends[1]))


@pytest.mark.parametrize("name", FACTORED)
@pytest.mark.parametrize("value", [1, None, "yes"])
def test_maximize_is_true_or_false(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match="maximize must be True or False, got"):
        made(name, net(), maximize=value)
    opt = made(name, net())
    assert "maximize: False" in repr(opt)
    opt.param_groups[0]["maximize"] = value
    with raising(ValueError, "maximize must be True or False, got"):
        opt.step()
