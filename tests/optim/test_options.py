"""Settings: wrong ones are refused by name and change nothing; what repr says of them."""

import copy
import inspect
import math
import pickle
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Snapshot
from drawn import noise, raising, weight
from optimizers import FACTORED, METHODS, Dictated, conv_net, factored, made, net, train, values
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tnt_optim import KFAC, TNT, Shampoo

NAN, INF = math.nan, math.inf

BAD: list[tuple[str, Any]] = [
    *[("lr", bad) for bad in (-1e-3, NAN, INF, "fast", torch.tensor(1), torch.ones(2))],
    *[("damping", bad) for bad in (-0.1, NAN, INF)],
    *[("weight_decay", bad) for bad in (-1.0, NAN, INF)],
    *[("momentum", bad) for bad in (-0.1, 1.0, NAN)],
    *[("stat_decay", bad) for bad in (-0.1, 1.0, NAN)],
    *[("stat_interval", bad) for bad in (0, -1, 1.5, True)],
    *[("inverse_interval", bad) for bad in (0, -1, 2.5)],
    *[("interval_warmup", bad) for bad in (-1, 2.5, False, "long")],
    *[("max_factor_dim", bad) for bad in (0, -3)],
    *[("block_size", bad) for bad in (0, -1, 1.5, True, "many")],
    *[("merge_small_dims", bad) for bad in (18, True, "all")],
    *[("maximize", bad) for bad in (1, None, "yes")],
    ("relative_damping", 1),
    ("graft", "lion"),
    ("rounding", "up"),
]


KFACS = inspect.signature(KFAC).parameters


@pytest.mark.parametrize(
    ("name", "option", "bad"),
    [
        *[("sampled", *bad) for bad in BAD],
        *[
            (name, option, bad)
            for name in ("empirical", "shampoo", "kfac")
            for option, bad in dict(BAD).items()
            if name != "kfac" or option in KFACS
        ],
    ],
    ids=str,
)
def test_a_bad_setting_is_refused_by_name(name: str, option: str, bad: Any) -> None:
    """At the start, in a group, in a group added later, and set on a group between steps."""
    model, message = net(), f"^{option} must be .*, got"
    with pytest.raises(ValueError, match=message):
        made(name, model, **{option: bad})
    assert not any(m._forward_hooks for m in model.modules())
    opt = made(name, model)
    if name != "kfac":  # which has one group
        opt = FACTORED[name]([{"params": layer.parameters()} for layer in (model[0], model[2])])
        with pytest.raises(ValueError, match=message):
            FACTORED[name]([{"params": [weight(2, 3)], option: bad}])
        with pytest.raises(ValueError, match=message):
            opt.add_param_group({"params": [weight(4)], option: bad})
    group = opt.param_groups[-1]
    train(model, opt, [0])
    good, group[option] = group[option], bad
    before = Snapshot(model.parameters(), opt)
    with pytest.raises(ValueError, match=message):
        opt.step()
    before.assert_unchanged()
    group[option] = good
    opt.step()
    assert {group["step"] for group in opt.param_groups} == {2}


@pytest.mark.parametrize("name", [*FACTORED, "kfac"])
def test_groups_of_another_optimizer_start_at_step_zero(name: str) -> None:
    model = net()
    opt = made(name, model)
    train(model, opt, range(3))
    groups = [{**group, "params": list(group["params"])} for group in opt.param_groups]
    for group in groups:
        group.pop("param_names", None)
    new: Any = (
        KFAC.paper(model, params=groups, likelihood="categorical")
        if name == "kfac"
        else FACTORED[name](groups)
    )
    assert [group["step"] for group in new.param_groups] == [0]
    if name != "kfac":
        train(model, new, range(2))
        new.add_param_group({"params": [weight(3)], "step": 7})
        assert [group["step"] for group in new.param_groups] == [2, 2]


@factored
def test_frozen_integers_are_let_through_and_flattened_parameters_refused(name: str) -> None:
    quantized = nn.Parameter(torch.ones(4, 4, dtype=torch.uint8), requires_grad=False)
    run = Dictated(name, [weight(3, 4), quantized])
    run.step([noise(3, 4), None])
    run.opt.state_dict()
    assert bool((quantized == 1).all()) and quantized not in run.opt.state
    flat = weight(12)
    flat._fsdp_flattened = True  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="fully_shard.*got parameter"):
        FACTORED[name]([flat])


@factored
@pytest.mark.parametrize(
    "edge",
    [{"lr": 0.0}, {"damping": 0.0}, {"momentum": 0.0}, {"stat_decay": 0.0}, {"max_factor_dim": 1}],
)
def test_the_ends_of_the_allowed_ranges_are_allowed(name: str, edge: dict[str, Any]) -> None:
    opt = FACTORED[name]([weight(2, 3)], **edge)
    assert edge.items() <= opt.param_groups[0].items()


SHARED: dict[str, list[Any]] = {
    "capturable": [1, None],
    "shard": ["all", True, 0],
    "process_group": [],
    "likelihood": [
        *["poisson", (), ("categorical", "poisson"), ["categorical"], (None,)],
        *[nn.CrossEntropyLoss(), cross_entropy],  # losses, which take labels
    ],
    "seed": [1.5, True, "none", np.int64(3)],
}


SAMPLING_OPTIONS = ("likelihood", "seed")


@pytest.mark.parametrize("option", SHARED)
@pytest.mark.parametrize("method", [TNT, Shampoo])
def test_options_of_all_groups(option: str, method: type[TNT | Shampoo]) -> None:
    """They are refused in a group; Shampoo, which samples nothing, lacks some of them."""
    if method is Shampoo and option in SAMPLING_OPTIONS:
        with pytest.raises(TypeError, match=option):
            Shampoo.paper([weight(2, 3)], **{option: 0})
    for bad in [] if method is Shampoo and option in SAMPLING_OPTIONS else SHARED[option]:
        with pytest.raises(ValueError, match=f"^{option} must be .*, got {re.escape(repr(bad))}"):
            method([weight(2, 3)], **{option: bad})
    message = f"^{option} cannot be set for a parameter group"
    with pytest.raises(ValueError, match=message):
        method([{"params": [weight(2, 3)], option: "another"}])
    opt = method([weight(2, 3)])
    with pytest.raises(ValueError, match=message):
        opt.add_param_group({"params": [weight(4)], option: "another"})
    assert len(opt.param_groups) == 1
    opt.param_groups[0][option] = "another"
    with pytest.raises(ValueError, match=message):
        opt.step()


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimization, as public code of it wraps another optimizer."""

    def __init__(self, params: Any, base: Any, rho: float = 0.05, **kwargs: Any) -> None:
        super().__init__(params, {"rho": rho, **kwargs})
        self.base_optimizer = base(self.param_groups, **kwargs)
        self.param_groups = self.base_optimizer.param_groups
        self.defaults.update(self.base_optimizer.defaults)

    def step(self, closure: Any) -> None:  # type: ignore[override]
        closure()
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    self.state[p]["old_p"] = p.clone()
                    p.add_(p.grad, alpha=group["rho"])
        closure()
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p.copy_(self.state[p]["old_p"])
        self.base_optimizer.step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.base_optimizer.param_groups = self.param_groups


WRAPPED: dict[str, tuple[Callable[[Any], Any], dict[str, Any]]] = {
    "TNT": (lambda _: TNT, {"seed": 3}),
    "likelihood": (lambda _: TNT, {"likelihood": "gaussian"}),
    "parts": (lambda _: TNT, {"likelihood": ("gaussian",), "shard": None}),
    "Shampoo": (lambda _: Shampoo, {"shard": None, "process_group": None}),
    "KFAC": (
        lambda model: lambda groups, **options: KFAC(model, params=groups, **options),
        {"inverse": "eigenbasis", "seed": 3, "likelihood": "gaussian", "shard": None},
    ),
}


@pytest.mark.filterwarnings("ignore:.*observe.* was not called")
@pytest.mark.parametrize("name", WRAPPED)
def test_a_wrapper_gives_its_keywords_to_groups_and_optimizer(name: str) -> None:
    """The group then has no option of the whole optimizer; states and copies load."""
    make, options = WRAPPED[name]
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(8, 3, generator=rng, dtype=torch.float64)

    def built(model: nn.Module) -> SAM:
        return SAM(model.parameters(), make(model), lr=0.02, stat_interval=2, **options)

    def train(model: nn.Module, opt: SAM, steps: int) -> None:
        def closure() -> None:
            opt.zero_grad()
            output = model(x)
            opt.base_optimizer.observe((output,) if name == "parts" else output)
            output.square().mean().backward()

        for _ in range(steps):
            opt.step(closure)

    opt = built(model)
    base = opt.base_optimizer
    assert base.param_groups is opt.param_groups and opt.param_groups[0]["rho"] == 0.05
    assert not options.keys() & opt.param_groups[0].keys()
    before = [p.detach().clone() for p in model.parameters()]
    train(model, opt, 4)
    assert not any(map(torch.equal, model.parameters(), before))
    saved = copy.deepcopy((model.state_dict(), opt.state_dict(), base.state_dict()))
    train(model, opt, 3)
    twin = copy.deepcopy(model)
    twin.load_state_dict(saved[0])
    resumed = built(twin)
    resumed.load_state_dict(saved[1])
    resumed.base_optimizer.load_state_dict(saved[2])
    train(twin, resumed, 3)
    assert all(map(torch.equal, model.parameters(), twin.parameters()))


@pytest.mark.parametrize("method", [TNT, Shampoo])
def test_a_group_with_another_value_says_the_optimizers_own(method: Any) -> None:
    group = {"params": [weight(2, 3)], "shard": "inverses"}
    message = "^shard cannot be .* of .*, whose own is None, got 'inverses': remove it"
    with pytest.raises(ValueError, match=message):
        method([group])
    assert method([group], shard="inverses").param_groups[0].keys().isdisjoint({"shard"})


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *[("likelihood", None), ("likelihood", "gaussian"), ("seed", 3)],
        *[("shard", "inverses"), ("capturable", False)],
    ],
)
def test_options_of_the_whole_optimizer_are_fixed_by_the_constructor(
    option: str, value: Any
) -> None:
    opt = TNT([weight(2, 3)], **{option: value})
    for each in (opt, copy.deepcopy(opt), pickle.loads(pickle.dumps(opt))):
        with pytest.raises(AttributeError, match=rf"construct TNT\(\.\.\., {option}=1\) anew"):
            setattr(each, option, 1)
        assert getattr(each, option) == value


@factored
def test_modes_must_be_a_function_to_sizes_with_the_same_product(name: str) -> None:
    for bad in (lambda shape: (4, 5), lambda shape: 4, (4, 6)):
        with pytest.raises(ValueError, match="modes"):
            FACTORED[name]([{"params": [weight(4, 6)], "modes": bad}])


@factored
def test_modes_are_not_asked_for_vectors_without_statistics(name: str) -> None:
    group = {"params": [weight(4, 6), weight(4)], "modes": lambda shape: (2, 2, shape[1])}
    opt = FACTORED[name]([group], precondition_1d=False)
    assert [p["statistics"] for p in opt.memory_estimate()["parameters"]] == [
        [(2, 2), (2, 2), (6, 6)],
        [],
    ]


def test_parameters_of_others_have_no_state_to_allocate() -> None:
    model = net()
    opt = TNT(model.parameters(), likelihood="categorical")
    for unreached in (model[0].weight, [nn.Parameter(torch.zeros(6))]):  # a tensor is its rows
        with pytest.raises(ValueError, match=r"unreached must be parameters .* got \((4|6),\)"):
            opt.allocate_state(unreached)
    assert not opt.state


@factored
def test_stochastic_rounding_of_float16_is_refused(name: str) -> None:
    half = nn.Parameter(torch.zeros(3, dtype=torch.float16))
    message = "rounding='stochastic' is for bfloat16, got torch.float16"
    with pytest.raises(ValueError, match=message):
        FACTORED[name]([half], rounding="stochastic")


@pytest.mark.parametrize(
    ("name", "option", "value", "error", "message"),
    [
        *[
            (name, "graft", "adam", RuntimeError, "graft='adam' must be set before the first")
            for name in FACTORED
        ],
        *[
            ("sampled", option, value, RuntimeError, f"{option} must be set before the first step")
            for option, value in (
                *[("max_factor_dim", 2), ("block_size", 2), ("merge_small_dims", "kernel")],
                ("modes", lambda shape: (3,)),
            )
        ],
        ("shampoo", "estimator", "mle", ValueError, "must be 'moments' for Shampoo, got 'mle'"),
        ("sampled", "precondition_1d", False, RuntimeError, "must be set to False before the"),
    ],
)
def test_settings_that_have_become_wrong_change_nothing(
    name: str, option: str, value: Any, error: type[Exception], message: str
) -> None:
    run = Dictated(name, [nn.Parameter(torch.randn(3).bfloat16())], stat_interval=1)
    run.step([torch.randn(3).bfloat16()])
    run.opt.param_groups[0][option] = value
    before = run.params[0].detach().clone()
    with raising(error, match=message):
        run.step([torch.randn(3).bfloat16()])
    assert torch.equal(run.params[0], before)


def reloaded(model: nn.Module, opt: Any) -> tuple[nn.Module, Any]:
    again = made("sampled", model)
    again.load_state_dict(opt.state_dict())
    return model, again


@pytest.mark.parametrize(
    "copied", [reloaded, lambda *both: copy.deepcopy(both)], ids=["load", "deepcopy"]
)
@pytest.mark.parametrize(
    ("option", "value"), [("max_factor_dim", 2), ("block_size", 2), ("merge_small_dims", None)]
)
def test_states_keep_their_shapes_after_a_load_and_in_a_copy(
    copied: Any, option: str, value: Any
) -> None:
    model = net()
    opt = made("sampled", model, merge_small_dims="kernel")
    train(model, opt, range(2))
    model, opt = copied(model, opt)
    opt.param_groups[0][option] = value
    with pytest.raises(RuntimeError, match=f"{option} must be set before the first step"):
        train(model, opt, range(2, 3))


def test_a_first_step_that_raises_fixes_no_shapes() -> None:
    model = net()
    opt = made("sampled", model)
    cross_entropy(model(torch.randn(8, 4)), torch.zeros(8, dtype=torch.int64)).backward()
    with pytest.raises(RuntimeError, match="has no statistics"):
        opt.step()
    opt.param_groups[0]["max_factor_dim"] = 2
    train(model, opt, range(2))
    made("sampled", net(), max_factor_dim=2).load_state_dict(opt.state_dict())


def test_a_warm_start_in_new_shapes_must_reach_all_old_statistics() -> None:
    model = net()
    opt = made("sampled", model)
    train(model, opt, range(2))
    opt.param_groups[0]["max_factor_dim"] = 2
    first = next(model.parameters())
    first.requires_grad_(False)
    before = Snapshot(model.parameters(), opt)
    with pytest.raises(RuntimeError, match="reach all its parameters, among them parameter 0"):
        opt.warm_start([model(torch.randn(8, 4))])
    before.assert_unchanged()
    first.requires_grad_(True)
    opt.warm_start([model(torch.randn(8, 4))])
    made("sampled", net(), max_factor_dim=2).load_state_dict(opt.state_dict())


@pytest.mark.parametrize("name", [*FACTORED, "kfac"])
def test_warm_starts_without_a_batch_are_refused(name: str) -> None:
    model = net()
    opt = made(name, model)
    before = Snapshot(model.parameters(), opt)
    with pytest.raises(ValueError, match="^outputs must hold at least one batch"):
        opt.warm_start(iter(()))
    with pytest.raises(TypeError, match="^model must be a torch.nn.Module, got int"):
        opt.warm_start([], model=5)
    with pytest.raises(TypeError, match="^outputs must be an iterable of outputs, got int"):
        opt.warm_start(3)
    with pytest.raises(TypeError, match="^outputs must be an iterable of outputs, got Tensor"):
        opt.warm_start(model(torch.randn(8, 4)))
    before.assert_unchanged()


@pytest.mark.parametrize("name", ["empirical", "shampoo"])
def test_warm_starts_from_training_gradients_take_losses(name: str) -> None:
    run = Dictated(name, [weight(3, 4)])
    before = run.snapshot()
    with pytest.raises(ValueError, match=r"^outputs \(here: training losses\) must give a 0-dim"):
        run.opt.warm_start(p * 1.0 for p in run.params)
    before.assert_unchanged()


@factored
def test_repr_names_the_class_the_settings_and_the_modes(name: str) -> None:
    model = conv_net()
    groups = [
        {"params": model[0].parameters(), "lr": 0.0123, "damping": 0.456},
        {"params": model[1:].parameters(), "stat_interval": 17, "graft": "adam", "block_size": 9},
    ]
    text = repr(FACTORED[name](groups))
    assert text.startswith(FACTORED[name]([weight(1)]).__class__.__name__ + " (")
    for wanted in ("lr: 0.0123", "damping: 0.456", "stat_interval: 17", "graft: adam"):
        assert wanted in text
    assert "4 parameters" in text and "inverse_interval: 100" in text
    text = repr(FACTORED[name]([weight(7, 5)], block_size=3, max_factor_dim=2))
    assert "1 parameters, 35 numbers, 5 full and 7 diagonal modes" in text


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("option", ["lr", "damping", "momentum", "stat_decay", "weight_decay"])
def test_numbers_may_be_tensors(name: str, option: str) -> None:
    """Of no dimensions, as a captured graph needs them; the steps are the same."""
    value = {"momentum": 0.5, "stat_decay": 0.75}.get(option, 0.125)
    start = net(torch.float64)
    ends: list[list[Tensor]] = []
    for given in (value, torch.tensor(value, dtype=torch.float64)):
        model = copy.deepcopy(start)
        train(model, made(name, model, stat_interval=1, **{option: given}), range(4))
        ends.append(values(model))
    torch.testing.assert_close(*ends)
