"""Two optimizers as one: the steps of both, and one state. Its contract is in ``test_contract``."""

import copy
import pickle
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import Snapshot
from drawn import raising, weight
from optimizers import (
    NO_FAILURES,
    SETTINGS,
    backward,
    batch,
    equal,
    leaves,
    made,
    net,
    no_memory,
    train,
    values,
)
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR, OneCycleLR
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from tnt_optim import TNT, Shampoo, with_fallback


def parts(model: nn.Sequential) -> tuple[TNT, torch.optim.AdamW]:
    """Optimizers of the small net's weights and of its biases."""
    main = TNT.paper([model[0].weight, model[2].weight], likelihood="categorical", **SETTINGS)
    return main, torch.optim.AdamW([model[0].bias, model[2].bias], lr=0.01)


def test_it_is_both_optimizers_also_under_a_scheduler() -> None:
    model = net()
    other = copy.deepcopy(model)
    both = parts(model)
    schedulers = [ExponentialLR(o, 0.8) for o in both]
    for step in range(9):
        backward(model, list(both), step)
        for each in (*both, *schedulers):
            each.step()
    opt = with_fallback(*parts(other))
    train(other, opt, range(9), [ExponentialLR(opt, 0.8)])
    assert equal(model.parameters(), other.parameters())
    assert [g["lr"] for g in opt.param_groups] == pytest.approx([0.02 * 0.8**9, 0.01 * 0.8**9])
    assert [len(group["params"]) for group in opt.param_groups] == [2, 2]
    assert set(opt.state) == set(other.parameters())
    assert opt.failures() == NO_FAILURES and "with the fallback AdamW" in repr(opt)


def test_a_schedule_of_the_momentum_is_for_both() -> None:
    model = net()
    main, _ = parts(model)
    opt = with_fallback(main, torch.optim.SGD([model[0].bias, model[2].bias], 0.1, momentum=0.9))
    schedule = OneCycleLR(opt, max_lr=0.1, total_steps=4)
    train(model, opt, range(2), [schedule])
    momenta = {group["momentum"] for group in opt.param_groups}
    assert len(momenta) == 1 and momenta != {0.9}
    with pytest.raises(ValueError, match="momentum"):
        OneCycleLR(with_fallback(*parts(net())), max_lr=0.1, total_steps=4)


def test_where_main_raises_neither_moves() -> None:
    model = net()
    opt, before = made("fallback", model), values(model)
    model(batch(0)[0].float()).sum().backward()
    with raising(RuntimeError, match="no statistics"):
        opt.step()
    assert equal(model.parameters(), before)


def test_a_step_that_main_repeats_from_a_saved_state() -> None:
    """The statistics of a failed step are main's, and not added again."""
    every_step: dict[str, Any] = {"stat_interval": 1, "inverse_interval": 1, "interval_warmup": 0}

    def both(model: nn.Sequential) -> Any:
        main = TNT([model[0].weight], likelihood="categorical", **every_step)
        return with_fallback(main, Shampoo([model[2].weight], **every_step))

    model = net()
    other = copy.deepcopy(model)
    undisturbed, opt = both(other), both(model)
    train(other, undisturbed, range(4))
    train(model, opt, range(3))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(opt.main, "_factors", no_memory)
        with pytest.raises(torch.OutOfMemoryError):
            train(model, opt, [3])
    resumed = both(model)
    resumed.load_state_dict(copy.deepcopy(opt.state_dict()))
    train(model, resumed, [3])
    assert equal(model.parameters(), other.parameters())


def test_groups_are_added_to_one_of_the_two() -> None:
    opt = made("fallback", net())
    opt.main.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    opt.fallback.add_param_group({"params": [weight(2), weight(4), weight(5)]})
    assert [len(group["params"]) for group in opt.param_groups] == [2, 1, 2, 3]
    with pytest.raises(ValueError, match="must be added to .main or to .fallback"):
        opt.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})


def test_a_state_that_does_not_fit_changes_nothing() -> None:
    model = net()
    opt = made("fallback", model)
    train(model, opt, range(3))
    good = copy.deepcopy(opt.state_dict())
    saves: list[Any] = []
    hook = opt.main.register_state_dict_pre_hook(saves.append)
    opt.load_state_dict(good)
    assert not saves, "loading saves nothing of main, which would warn with shard"
    hook.remove()
    for broken, message in [
        ({"state": {}}, "must have the key 'param_groups'"),
        ({**good, "param_groups": good["param_groups"][:1]}, r"groups of \[2, 2\] parameters"),
        ({**good, "method": "Shampoo"}, "must be of TNT, got that of Shampoo"),
    ]:
        with pytest.raises(ValueError, match=message):
            opt.load_state_dict(broken)
    assert leaves(opt.state_dict()) == leaves(good)


def test_where_the_fallback_cannot_load_main_is_unchanged() -> None:
    def started(block_size: int, steps: int) -> Any:
        model = net()
        rest = [model[0].bias, model[2].bias]
        opt = with_fallback(parts(model)[0], Shampoo.paper(rest, block_size=block_size))
        train(model, opt, range(steps))
        return opt

    opt, refusing = started(4, 3), started(5, 1)
    before = leaves(refusing.main.state_dict())
    with pytest.raises(ValueError, match="block_size=5"):
        refusing.load_state_dict(opt.state_dict())
    assert leaves(refusing.main.state_dict()) == before


def test_optimizers_that_cannot_be_combined_are_refused() -> None:
    param = weight(3)
    with pytest.raises(ValueError, match="no parameter in common, got 1, the first of shape"):
        with_fallback(Shampoo.paper([param]), torch.optim.SGD([param], lr=0.1))
    with pytest.raises(TypeError, match="fallback must be an optimizer, got list"):
        with_fallback(Shampoo.paper([param]), [weight(2)])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="must step without a closure, got LBFGS"):
        with_fallback(Shampoo.paper([param]), torch.optim.LBFGS([weight(2)]))
    with pytest.raises(TypeError, match="must not observe outputs"):
        with_fallback(Shampoo.paper([param]), TNT([weight(2)], likelihood="categorical"))
    with_fallback(Shampoo.paper([param]), TNT([weight(2)]))


@pytest.mark.parametrize("main", [TNT.paper, Shampoo.paper])
def test_a_main_without_a_likelihood_observes_nothing(main: Any) -> None:
    layer = nn.Linear(3, 4)
    settings = {"likelihood": None} if main == TNT.paper else {}
    opt = with_fallback(main([layer.weight], **settings), torch.optim.SGD([layer.bias]))
    before = Snapshot(layer.parameters(), opt.main)
    assert not opt.observing
    opt.observe(layer(torch.randn(2, 3)))
    with opt.attach(layer):
        assert not layer._forward_hooks
    before.assert_unchanged()


def test_states_to_load_into_lack_statistics_of_what_no_output_reached() -> None:
    layer = nn.Linear(3, 4)
    opt = with_fallback(
        TNT([layer.weight], likelihood="categorical"), torch.optim.SGD([layer.bias])
    )
    opt.allocate_state(unreached=[layer.weight])
    assert "momentum" in opt.state[layer.weight] and not opt.state[layer.weight].get("stats")


@pytest.mark.filterwarnings("ignore:torch.distributed:UserWarning")
def test_torchs_distributed_checkpoints_load_both_in_place(tmp_path: Path) -> None:
    model, other = net(), net()
    opt, resumed = (made("fallback", m, graft="adam") for m in (model, other))
    train(model, opt, range(5))
    saved = {"net": model.state_dict(), "opt": opt.state_dict()}
    dcp.save(saved, checkpoint_id=tmp_path / "saved", no_dist=True)
    train(model, opt, range(5, 9))
    start = values(other)
    resumed.allocate_state()
    assert all(p.grad is None for p in other.parameters())
    assert equal(other.parameters(), start)
    target = {"net": other.state_dict(), "opt": resumed.state_dict()}
    dcp.load(target, checkpoint_id=tmp_path / "saved", no_dist=True)
    other.load_state_dict(target["net"])
    resumed.load_state_dict(target["opt"])
    train(other, resumed, range(5, 9))
    assert equal(model.parameters(), other.parameters())


# ------------------------------------------------------------------ states to load into

OTHERS: dict[str, Callable[[list[Any]], torch.optim.Optimizer]] = {
    "AdamW": lambda ps: torch.optim.AdamW(ps, 0.1, weight_decay=0.1, amsgrad=True),
    "Adam": lambda ps: torch.optim.Adam(ps, torch.tensor(0.1), weight_decay=0.1, maximize=True),
    "fused": lambda ps: torch.optim.AdamW(ps, 0.1, fused=True),
    "SGD": lambda ps: torch.optim.SGD(ps, 0.1),
    "momentum": lambda ps: torch.optim.SGD(ps, 0.1, 0.9, weight_decay=0.1),
    "Adagrad": lambda ps: torch.optim.Adagrad(ps, 0.1, weight_decay=0.1),
    "Adadelta": lambda ps: torch.optim.Adadelta(ps, weight_decay=0.1),
    "Adamax": lambda ps: torch.optim.Adamax(ps, 0.1),
    "NAdam": lambda ps: torch.optim.NAdam(ps, 0.1),
    "RAdam": lambda ps: torch.optim.RAdam(ps, 0.1, decoupled_weight_decay=True),
    "RMSprop": lambda ps: torch.optim.RMSprop(ps, 0.1, momentum=0.9, centered=True),
    "Rprop": lambda ps: torch.optim.Rprop(ps, 0.1),
    "ASGD": lambda ps: torch.optim.ASGD(ps, 0.1),
    "Adafactor": lambda ps: torch.optim.Adafactor(ps, 0.1),
    "Muon": lambda ps: torch.optim.Muon(ps, 0.1),
    "Shampoo": lambda ps: Shampoo(ps, 0.1),
    "SparseAdam": lambda ps: torch.optim.SparseAdam(ps, 0.1),
}
others = pytest.mark.parametrize("name", OTHERS)


def with_other(name: str) -> tuple[Any, list[nn.Parameter]]:
    """A Shampoo with this fallback of two groups, and the fallback's parameters."""
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(*shape)) for shape in ((5, 3), (4, 2))]
    other = OTHERS[name]([{"params": params[:1]}, {"params": params[1:]}])
    return with_fallback(Shampoo([weight(3, 2)]), other), params


def set_gradients(name: str, params: list[nn.Parameter], step: int) -> None:
    """The fallback's parameters get gradients that depend on the step alone."""
    for p in params:
        rng = torch.Generator().manual_seed(step)
        gradient = torch.randn(p.shape, generator=rng)
        p.grad = gradient.to_sparse(1) if name == "SparseAdam" else gradient


def run(name: str, opt: Any, params: list[nn.Parameter], steps: range) -> None:
    """Takes steps. The main optimizer's parameter keeps the gradient that it has, if any."""
    for step in steps:
        set_gradients(name, params, step)
        opt.step()


def bits(tensors: Iterable[Tensor]) -> list[Any]:
    """The numbers as integers, in which NaN and -0 are equal to themselves only."""
    return [t.detach().to_dense().view(torch.int32).tolist() for t in tensors]


@pytest.mark.filterwarnings("ignore:torch.distributed:UserWarning")
@others
def test_a_state_that_a_read_or_a_wrapper_has_begun_is_loaded(name: str, tmp_path: Path) -> None:
    """``opt.state[p]`` leaves an empty entry."""
    opt, params = with_other(name)
    (main,) = opt.main.param_groups[0]["params"]
    main.grad = torch.ones_like(main)
    run(name, opt, params, range(3))
    dcp.save({"opt": opt.state_dict()}, checkpoint_id=tmp_path / "saved", no_dist=True)
    resumed, copies = with_other(name)
    resumed.state[copies[0]]
    resumed.state[copies[1]]["old_p"] = torch.ones(2)
    resumed.allocate_state()
    assert torch.equal(resumed.state[copies[1]].pop("old_p"), torch.ones(2))
    target = {"opt": resumed.state_dict()}
    dcp.load(target, checkpoint_id=tmp_path / "saved", no_dist=True)
    resumed.load_state_dict(target["opt"])
    for p, copied in zip(params, copies, strict=True):
        copied.data.copy_(p.data)
        assert leaves(dict(resumed.state[copied])) == leaves(dict(opt.state.get(p, {})))
    for each, members in ((opt, params), (resumed, copies)):
        run(name, each, members, range(3, 6))
    assert equal(params, copies)


@others
def test_a_state_to_load_into_changes_nothing_else(name: str) -> None:
    """Weights and gradients to the bit, counters, random numbers; no hook of a step runs."""
    opt, params = with_other(name)
    fallback, calls = opt.fallback, []
    scheduler = ExponentialLR(fallback, 0.5)
    set_gradients(name, params, 0)
    with torch.no_grad():
        params[0].view(-1)[:4] = torch.tensor([-0.0, 0.0, torch.inf, torch.nan])
    handles = [
        fallback.register_step_pre_hook(lambda *_: calls.append("before")),
        fallback.register_step_post_hook(lambda *_: calls.append("after")),
        register_optimizer_step_pre_hook(lambda *_: calls.append("before any")),
        register_optimizer_step_post_hook(lambda *_: calls.append("after any")),
    ]
    gradients = [p.grad for p in params]

    def seen() -> list[Any]:
        made = "state", "param_groups", "_shaping"
        counters = {k: v for k, v in vars(fallback).items() if k not in made}
        groups = [{**group, "params": None} for group in fallback.param_groups]
        numbers = bits([*params, *[g for g in gradients if g is not None]])
        return [numbers, torch.get_rng_state().tolist(), repr(counters), leaves(groups)]

    before = seen()
    opt.allocate_state()
    assert seen() == before and not calls
    for handle in handles:
        handle.remove()
    assert all(p.grad is g for p, g in zip(params, gradients, strict=True))
    with pytest.warns(UserWarning, match="before `optimizer.step"):
        scheduler.step()


@others
def test_a_parameter_that_has_moments_keeps_them(name: str) -> None:
    opt, (first, second) = with_other(name)
    run(name, opt, [first], range(3))
    before = leaves(dict(opt.fallback.state.get(first, {})))
    opt.allocate_state()
    assert leaves(dict(opt.fallback.state.get(first, {}))) == before
    given = [opt.fallback.state.get(p, {}).keys() for p in (first, second)]
    assert given[0] == given[1]


@pytest.mark.parametrize(
    "name", [n for n in OTHERS if n not in ("NAdam", "Adadelta", "Rprop", "ASGD", "Shampoo")]
)
def test_an_allocated_state_of_the_fallback_trains_as_a_new_one(name: str) -> None:
    opt, params = with_other(name)
    other, copies = with_other(name)
    other.allocate_state()
    for each, members in ((opt, params), (other, copies)):
        run(name, each, members, range(3))
    assert equal(params, copies)


def test_a_fallback_that_cannot_make_its_state_changes_nothing() -> None:
    class Stubborn(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            raise RuntimeError("needs a gradient of a kind")

    param = weight(3, 2)
    opt = with_fallback(Shampoo([param]), Stubborn([weight(4)], 0.1))
    with pytest.raises(RuntimeError, match=r"Stubborn raised RuntimeError\('needs a gradient"):
        opt.allocate_state()
    assert not opt.state
    with pytest.raises(ValueError, match="unreached must be parameters of this optimizer"):
        made("fallback", net()).allocate_state([weight(3)])


# ------------------------------------------------------------------ edits of groups and states

EDITS: dict[str, Callable[[Any], Any]] = {
    "append": lambda opt: opt.param_groups.append({"params": [weight(3)]}),
    "extend": lambda opt: opt.param_groups.extend([{"params": [weight(3)]}]),
    "insert": lambda opt: opt.param_groups.insert(0, {"params": [weight(3)]}),
    "pop": lambda opt: opt.param_groups.pop(),
    "remove": lambda opt: opt.param_groups.remove(opt.main.param_groups[0]),
    "clear": lambda opt: opt.param_groups.clear(),
    "sort": lambda opt: opt.param_groups.sort(key=id),
    "reverse": lambda opt: opt.param_groups.reverse(),
    "set": lambda opt: opt.param_groups.__setitem__(0, {"params": [weight(3)]}),
    "del": lambda opt: opt.param_groups.__delitem__(0),
    "+=": lambda opt: opt.param_groups.__iadd__([{"params": [weight(3)]}]),
    "*=": lambda opt: opt.param_groups.__imul__(2),
    "=": lambda opt: setattr(opt, "param_groups", [{"params": [weight(3)]}]),
    "= []": lambda opt: setattr(opt, "param_groups", []),
    "= part": lambda opt: setattr(opt, "param_groups", opt.param_groups[:1]),
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_of_the_list_of_groups_is_refused(edit: str) -> None:
    opt = made("fallback", net())
    for each in (opt, copy.deepcopy(opt), pickle.loads(pickle.dumps(opt))):
        with pytest.raises(ValueError, match="in .main.param_groups or .fallback.param_groups"):
            EDITS[edit](each)
        assert [len(group["params"]) for group in each.param_groups] == [2, 2]


def test_groups_are_edited_and_their_list_is_copied() -> None:
    opt = made("fallback", net())
    opt.param_groups[1]["lr"] = 0.5
    opt.param_groups = opt.param_groups  # its own, as wrappers assign it
    assert opt.fallback.param_groups[0]["lr"] == 0.5
    for copied in (copy.copy(opt.param_groups), copy.deepcopy(opt.param_groups)):
        copied.pop()
        assert type(copied) is list and len(copied) == 1
    pickle.loads(pickle.dumps(opt.param_groups)).append({})
    assert len(opt.param_groups) == 2


RESETS: dict[str, Callable[[Any], Any]] = {
    "= defaultdict": lambda opt: setattr(opt, "state", defaultdict(dict)),
    "= {}": lambda opt: setattr(opt, "state", {}),
    "clear": lambda opt: opt.state.clear(),
    "pop": lambda opt: [opt.state.pop(p) for p in list(opt.state)],
    "del": lambda opt: [opt.state.__delitem__(p) for p in list(opt.state)],
}


@pytest.mark.parametrize("reset", RESETS)
def test_a_state_that_is_reset_starts_anew(reset: str) -> None:
    """In both optimizers, also after a group was taken from one of them."""
    model = net()
    opt = made("fallback", model)
    opt.fallback.add_param_group({"params": [weight(3)]})
    opt.state[opt.param_groups[2]["params"][0]]["mine"] = opt.state["mine"] = 7
    train(model, opt, range(3))
    opt.fallback.param_groups.pop()
    RESETS[reset](opt)
    assert not opt.state and not opt.main.state and not opt.fallback.state
    train(model, opt, range(3, 7))
    assert {float(opt.state[p]["step"]) for p in opt.fallback.param_groups[0]["params"]} == {4.0}


def test_a_state_that_is_assigned_is_that_of_both() -> None:
    model = net()
    opt = made("fallback", model)
    train(model, opt, range(3))
    kept = {p: dict(state) for p, state in opt.state.items()}
    train(model, opt, range(3, 5))
    opt.state = {**kept, "mine": 7}
    assert all(opt.main.state[p] == kept[p] for p in opt.main.param_groups[0]["params"])
    assert all(opt.fallback.state[p] == kept[p] for p in opt.fallback.param_groups[0]["params"])
    assert opt.state["mine"] == 7 and len(opt.state) == 5
    opt.state = opt.state
    assert len(opt.state) == 5 and opt.state_dict()["state"]["mine"] == 7


def test_a_look_at_the_state_makes_no_entry() -> None:
    model = net()
    opt = made("fallback", model)
    for p in model.parameters():
        assert p not in opt.state and opt.state.get(p) is None and opt.state.pop(p, 3) == 3
        with pytest.raises(KeyError):
            opt.state.pop(p)
    assert not opt.state
    bias = model[0].bias
    assert opt.state.setdefault(bias, {"mine": 7}) == {"mine": 7} == opt.fallback.state[bias]
    assert opt.state.setdefault(bias, {}) == {"mine": 7} and bias in opt.state
