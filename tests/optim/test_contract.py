"""The contract of PyTorch's optimizers, after its own test/test_optim.py.

Groups, schedulers, signs, steps, closures, hooks. Saved states are in ``test_checkpoint``, copies
in ``test_resume``, wrong settings in ``test_options``. Its checks of foreach, fused and
differentiable do not apply (there are no such switches), those of sparse and complex parameters
neither (they are refused); capturable steps are in tests/gpu, compiled ones in tests/system, KFAC's
one group in tests/kfac.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import flat
from drawn import close, raising
from optimizers import (
    FACTORED,
    METHODS,
    NO_FAILURES,
    SETTINGS,
    backward,
    batch,
    equal,
    every,
    factored,
    made,
    moved,
    net,
    tnt_and_kfac,
    train,
    values,
)
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import lr_scheduler

from tnt_optim import KFAC
from tnt_optim import groups as param_groups

FORMS: list[dict[str, Any]] = [
    {},
    {"weight_decay": 0.1, "block_size": 3},
    {"graft": "adam", "relative_damping": True},
    {"graft": "sgd", "momentum": 0.0, "max_factor_dim": 4},
]


# ------------------------------------------------------------------ parameters and their groups


@factored
def test_complex_sparse_and_float8_parameters_are_refused(name: str) -> None:
    param = nn.Parameter(torch.randn(2, 3))
    for other in (param + 0j, param.to_sparse(), param.to(torch.float8_e4m3fn)):
        kind = other.dtype if other.layout == torch.strided else other.layout
        with pytest.raises(ValueError, match=f"dense tensors of float64.* got .*{kind}"):
            FACTORED[name]([param, nn.Parameter(other.detach())])


@factored
def test_lazy_parameters_are_refused(name: str) -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 3))
    with pytest.raises(ValueError, match="^params must be initialized, and one is lazy"):
        FACTORED[name](list(model.parameters()))
    model(torch.randn(2, 5))
    FACTORED[name](list(model.parameters()))


@pytest.mark.parametrize("name", [*FACTORED, "kfac"])
def test_a_parameter_twice_in_a_group_is_refused(name: str) -> None:
    layer = nn.Linear(2, 3)
    make = (
        (lambda ps: KFAC(layer, params=ps, likelihood="categorical"))
        if name == "kfac"
        else FACTORED[name]
    )
    with raising(ValueError, match="params must differ, got .* twice"):  # torch only warns
        make([layer.weight, layer.bias, layer.weight])


@factored
def test_groups_are_separate_optimizers(name: str) -> None:
    """Groups with settings and a dtype of their own, under a scheduler."""
    torch.manual_seed(1)
    whole = net(torch.float64)
    whole[2].to(torch.float32)
    whole[1].register_forward_hook(lambda _, args, output: output.float())
    separate = copy.deepcopy(whole)
    own: list[dict[str, Any]] = [
        {"lr": 0.05, "weight_decay": 0.3, "graft": "adam", "stat_interval": 1},
        {"maximize": True},
        {"damping": 0.2, "momentum": 0.0, "stat_decay": 0.8, "inverse_interval": 3},
        {"max_factor_dim": 2, "relative_damping": True, "lr": 0.001},
    ]
    groups = [{"params": [p], **o} for p, o in zip(whole.parameters(), own, strict=True)]
    one = FACTORED[name](groups, **SETTINGS)
    pairs = zip(separate.parameters(), own, strict=True)
    several = [FACTORED[name]([p], **{**SETTINGS, **settings}) for p, settings in pairs]
    schedulers = [lr_scheduler.ExponentialLR(opt, 0.8) for opt in (one, *several)]
    before = values(whole)
    for step in range(9):
        backward(whole, one, step)
        backward(separate, several, step)
        for opt in (one, *several):
            opt.step()
        for scheduler in schedulers:
            scheduler.step()
    rates = [opt.param_groups[0]["lr"] for opt in several]
    assert [group["lr"] for group in one.param_groups] == rates
    assert all(moved(whole, before))
    for p, q in zip(whole.parameters(), separate.parameters(), strict=True):
        close(p.detach().double(), q.detach().double())
        assert {s.dtype for s in one.state[p]["stats"]} == {p.dtype}


ALIKE: list[dict[str, Any]] = [
    *FORMS,
    {"graft": "rms"},
    {"graft": "adam", "rounding": "master"},
    {"lr": torch.tensor(0.02), "merge_small_dims": "kernel", "precondition_1d": False},
]


@factored
@pytest.mark.parametrize("form", ALIKE)
def test_groups_with_equal_settings_are_computed_together(
    name: str, form: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit as one group, and as groups that are computed one by one."""
    dtype = torch.bfloat16 if "rounding" in form else torch.float32
    models = [net(dtype)]
    models += [copy.deepcopy(models[0]) for _ in range(2)]
    calls: dict[int, list[int]] = {}
    for number, model in enumerate(models):
        params = list(model.parameters())
        if number == 2:
            monkeypatch.setattr(param_groups, "same_settings", lambda group: id(group))
        groups = [{"params": params}] if number == 0 else [{"params": [p]} for p in params]
        mle = {} if name == "shampoo" else {"estimator": "mle"}
        opt = FACTORED[name](groups, **{**SETTINGS, **form, **mle})
        counts = calls.setdefault(number, [])
        make = opt._factors

        def counted(*given: Any, make: Any = make, counts: list[int] = counts) -> Tensor:
            counts.append(len(given[1]))
            return make(*given)

        monkeypatch.setattr(opt, "_factors", counted)
        train(model, opt, range(6))
    assert equal(models[0].parameters(), models[1].parameters())
    assert equal(models[2].parameters(), models[1].parameters())
    assert sum(calls[0]) == sum(calls[1]) == sum(calls[2])
    assert calls[0] == calls[1] and len(calls[1]) < len(calls[2])


@factored
def test_a_group_whose_settings_change_is_computed_and_checked_on_its_own(name: str) -> None:
    model = net()
    opt = FACTORED[name]([{"params": [p]} for p in model.parameters()], **SETTINGS)
    train(model, opt, range(2))
    opt.param_groups[2]["lr"] = 0.0
    before = values(model)
    train(model, opt, range(2, 4))
    assert moved(model, before) == [True, True, False, True]
    for value in (torch.tensor(-1.0), -1.0):
        opt.param_groups[2]["lr"], before = value, values(model)
        with raising(ValueError, match="lr must be a finite number >= 0, got"):
            train(model, opt, [4])
        assert not any(moved(model, before))
    opt.param_groups[2].update(lr=0.02, relative_damping=0)  # 0 == False
    with raising(ValueError, match="relative_damping must be True or False, got 0"):
        train(model, opt, [4])


@factored
def test_a_group_is_added_during_training(name: str) -> None:
    model = net()
    model[0].requires_grad_(False)
    opt = FACTORED[name](model[2].parameters(), **SETTINGS)
    train(model, opt, range(3))
    model[0].requires_grad_(True)
    opt.add_param_group({"params": model[0].parameters(), "lr": 0.5})
    assert [(group["lr"], group["step"]) for group in opt.param_groups] == [(0.02, 3), (0.5, 3)]
    before = values(model)
    train(model, opt, range(3, 8))
    assert all(moved(model, before)) and set(opt.state) == set(model.parameters())
    with pytest.raises(ValueError, match="more than one parameter group"):
        opt.add_param_group({"params": [model[0].weight]})
    with pytest.raises(ValueError, match="with/without names"):
        opt.add_param_group({"params": [("new", nn.Parameter(torch.zeros(2)))]})
    assert [len(group["params"]) for group in opt.param_groups] == [2, 2]


@factored
def test_a_group_that_is_no_dictionary_is_refused(name: str) -> None:
    opt = made(name, net())
    for given in (nn.Parameter(torch.zeros(2)), [nn.Parameter(torch.zeros(2))], 3):
        with pytest.raises(TypeError, match="param_group must be a dict"):
            opt.add_param_group(given)
    assert len(opt.param_groups) == 1


# ------------------------------------------------------------------ directions and schedules


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "step": lambda opt: lr_scheduler.StepLR(opt, step_size=2, gamma=0.5),
    "cycle": lambda opt: lr_scheduler.OneCycleLR(opt, 0.3, total_steps=9, cycle_momentum=False),
    "sequential": lambda opt: lr_scheduler.SequentialLR(
        opt, [lr_scheduler.LinearLR(opt, 0.1), lr_scheduler.ExponentialLR(opt, 0.5)], [3]
    ),
}


@every
@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("as_tensor", [False, True])
def test_schedulers_set_the_rates_that_they_set_for_sgd(
    name: str, scheduler: str, as_tensor: bool
) -> None:
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
def test_schedulers_that_cycle_the_momentum(name: str) -> None:
    model = net()
    opt = made(name, model)
    scheduler = lr_scheduler.OneCycleLR(opt, 0.05, total_steps=8)
    momenta = []
    for step in range(7):
        momenta.append(opt.param_groups[0]["momentum"])
        train(model, opt, [step], [scheduler])
    assert min(momenta) < 0.87 and max(momenta) >= 0.9 and opt.param_groups[0]["step"] == 7


@every
@pytest.mark.parametrize("dims", [0, 1, 2])
def test_a_learning_rate_may_be_a_tensor_of_one_element(name: str, dims: int) -> None:
    model = net()
    twin = copy.deepcopy(model)
    lr = torch.tensor(0.0625).reshape([1] * dims)
    train(model, made(name, model, lr=0.0625), range(5))
    train(twin, made(name, twin, lr=lr), range(5))
    assert torch.equal(lr, torch.full([1] * dims, 0.0625))
    torch.testing.assert_close(values(model), values(twin))


@every
@pytest.mark.parametrize("lr", [-1e-19, torch.tensor(-1e-19)])
def test_a_rate_that_a_schedulers_roundings_take_below_zero_is_zero(name: str, lr: Any) -> None:
    """As LinearLR's to ``end_factor=0.0``."""
    model = net()
    opt = made(name, model)
    train(model, opt, range(3))
    for group in opt.param_groups:
        group["lr"] = lr
    opt.load_state_dict(opt.state_dict())
    before = values(model)
    train(model, opt, range(3, 6))
    assert not any(moved(model, before))


# ------------------------------------------------------------------ maximize


@factored
@pytest.mark.parametrize("form", FORMS)
def test_maximizing_is_minimizing_the_negative(name: str, form: dict[str, Any]) -> None:
    """To the bit: statistics are even in the gradient, and weight decay has no sign."""
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


# ------------------------------------------------------------------ steps


@every
def test_a_step_without_gradients_changes_nothing(name: str) -> None:
    """It also makes no state, and returns the closure's value."""
    model = net().requires_grad_(False)
    opt = made(name, model, weight_decay=0.1)
    before, loss = values(model), torch.tensor([1.0])
    assert opt.step(lambda: loss) is loss and opt.step() is None and not any(opt.state.values())
    assert not any(moved(model, before))


@pytest.mark.parametrize(
    ("name", "form"),
    [*((n, form) for n in FACTORED for form in FORMS), ("kfac", {}), ("fallback", {})],
)
def test_a_first_step_on_zero_gradients_moves_nothing(name: str, form: dict[str, Any]) -> None:
    model = net()
    opt = made(name, model, **{**form, "weight_decay": 0.0})
    before = values(model)
    backward(model, opt, 0)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    opt.step()
    assert not any(moved(model, before))
    train(model, opt, range(1, 5))
    assert all(moved(model, before)) and all(bool(p.isfinite().all()) for p in model.parameters())


@every
def test_layers_are_frozen_for_a_while(name: str) -> None:
    """Steps 3 and 4 freeze one layer; step 2 has no gradients at all."""
    model = net()
    opt = made(name, model)
    for step in range(7):
        before = values(model)
        model[0].requires_grad_(step not in (3, 4))
        if step == 2:
            opt.zero_grad()
            opt.step()
        else:
            train(model, opt, [step])
        assert moved(model, before) == [step not in (2, 3, 4)] * 2 + [step != 2] * 2


@pytest.mark.parametrize("name", METHODS)
def test_a_frozen_layer_has_its_statistics_refreshed_when_it_is_used_next(name: str) -> None:
    """They are due at steps 0, 6 and 12. An output is observed before it is known to be used."""
    model = net()
    opt = made(name, model, stat_interval=6)
    steps, before = [], []
    for step in range(13):
        model[0].requires_grad_(step not in (5, 6, 7))
        train(model, opt, [step])
        now = [s.clone() for s in opt.state[model[0].weight]["stats"]]
        if not before or not equal(now, before):
            steps.append(step)
        before = now
    assert steps == [0, 9 if name == "sampled" else 8, 12]


@every
def test_parameters_change_in_place_and_autograd_knows(name: str) -> None:
    model = net()
    opt = made(name, model)
    before = [(p.data_ptr(), p.grad_fn, p.requires_grad) for p in model.parameters()]
    backward(model, opt, 0)
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    loss = model(batch(0)[0].float()).sum()
    opt.step()
    assert [(p.data_ptr(), p.grad_fn, p.requires_grad) for p in model.parameters()] == before
    assert all(map(torch.equal, gradients, [p.grad for p in model.parameters()]))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@every
def test_a_closure_is_called_once_with_gradients_enabled(name: str) -> None:
    model = net()
    opt = made(name, model)
    train(model, opt, range(5))
    twin, twin_opt = copy.deepcopy((model, opt))
    losses = []

    def closure() -> Tensor:
        assert torch.is_grad_enabled()
        losses.append(backward(model, opt, 5))
        return losses[-1]

    with torch.no_grad():
        returned = opt.step(closure)
    assert returned is losses[0] and len(losses) == 1
    train(twin, twin_opt, [5])
    assert not any(moved(model, values(twin)))


@every
@pytest.mark.parametrize("error", [torch.OutOfMemoryError, KeyboardInterrupt])
def test_a_closure_that_fails_has_used_up_its_observations(
    name: str, error: type[BaseException]
) -> None:
    model = net()
    opt = made(name, model)
    twin, twin_opt = copy.deepcopy((model, opt))

    def failing() -> Tensor:
        backward(model, opt, 9)
        raise error

    with pytest.raises(error):
        opt.step(failing)
    train(model, opt, range(3))
    train(twin, twin_opt, range(3))
    assert equal(model.parameters(), twin.parameters())


@every
def test_the_default_dtype_does_not_matter(name: str) -> None:
    model = net()
    twin = copy.deepcopy(model)
    train(model, made(name, model), range(4))
    torch.set_default_dtype(torch.float64)
    try:
        other = made(name, twin)
        train(twin, other, range(4))
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(values(model), values(twin))
    kept = [t for t in flat(other.state_dict()["state"]) if t.dim() > 0]
    assert {t.dtype for t in kept} == {torch.float32}


@every
def test_the_default_device_does_not_matter(name: str) -> None:
    model = net()
    twin = copy.deepcopy(model)
    train(model, made(name, model), range(4))
    ready = [batch(step) for step in range(4)]
    with torch.device("meta"):
        train(twin, made(name, twin), range(4), data=ready.__getitem__)
    assert all(map(torch.equal, values(model), values(twin)))


@tnt_and_kfac
def test_outputs_are_observed_under_no_grad_too(name: str) -> None:
    model = net()
    opt = made(name, model)
    output = model(batch(0)[0].float())
    with torch.no_grad():
        opt.observe(output)
    cross_entropy(output, batch(0)[1]).backward()
    opt.step()
    assert opt.failures() == NO_FAILURES


# ------------------------------------------------------------------ hooks


@every
def test_a_hook_may_give_a_step_its_closure(name: str) -> None:
    model = net()
    opt = made(name, model)
    train(model, opt, range(5))
    before, seen = values(model), []
    opt.register_step_pre_hook(lambda o, args, kwargs: ((o, lambda: backward(model, o, 5)), {}))
    opt.register_step_post_hook(lambda o, args, kwargs: seen.append(len(args)))
    assert opt.step().item() > 0
    assert all(moved(model, before)) and seen == [2]
