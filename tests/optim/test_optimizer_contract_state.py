"""What PyTorch asks of every optimizer: steps, saved states, copies, hooks.

After its own test/test_optim.py; ``test_optimizer_contract`` has the rest, and what is left out.
"""

import copy
import io
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import Snapshot
from test_optimizer_contract import (
    EVERY,
    FACTORED,
    FORMS,
    SETTINGS,
    backward,
    batch,
    made,
    moved,
    net,
    train,
    values,
)
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def leaves(value: Any, path: str = "") -> dict[str, Any]:
    """What is in nested dictionaries and lists, by path; tensors as (dtype, entries)."""
    if isinstance(value, Tensor):
        return {path: (value.dtype, value.tolist())}
    if isinstance(value, dict):
        value = [(f"[{key!r}]", item) for key, item in value.items()]
    elif isinstance(value, list | tuple):
        value = [(f"[{index}]", item) for index, item in enumerate(value)]
    else:
        return {path: value}
    found: dict[str, Any] = {}
    for key, item in value:
        found.update(leaves(item, path + key))
    return found


def through_a_file(content: Any, **how: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    buffer.seek(0)
    return torch.load(buffer, **how)


def trained(name: str, steps: int = 5, **settings: Any) -> tuple[nn.Sequential, Any]:
    """A model and its optimizer after some steps."""
    model = net()
    opt = made(name, model, **settings)
    train(model, opt, range(steps))
    return model, opt


# ------------------------------------------------------------------ steps


@pytest.mark.parametrize("name", EVERY)
def test_a_step_without_gradients_changes_nothing(name: str) -> None:
    """Nor does it make a state; a closure's value is handed on."""
    model = net().requires_grad_(False)
    opt = made(name, model, weight_decay=0.1)
    before, loss = values(model), torch.tensor([1.0])
    assert opt.step(lambda: loss) is loss and opt.step() is None and not any(opt.state.values())
    assert not any(moved(model, before))
    model.requires_grad_(True)
    train(model, opt, range(3))
    opt.zero_grad()
    before = values(model)
    opt.step()
    assert not any(moved(model, before))


@pytest.mark.parametrize(
    ("name", "form"),
    [*((n, form) for n in FACTORED for form in FORMS), ("kfac", {}), ("fallback", {})],
)
def test_a_first_step_on_gradients_of_zero_moves_nothing(name: str, form: dict[str, Any]) -> None:
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


@pytest.mark.parametrize("name", EVERY)
def test_layers_are_frozen_for_a_while(name: str) -> None:
    """Steps 3 and 4 freeze one; step 2 has no gradients at all."""
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


@pytest.mark.parametrize("name", EVERY)
def test_parameters_change_in_place_and_autograd_knows(name: str) -> None:
    model = net()
    opt = made(name, model)
    before = [(p.data_ptr(), p.grad_fn, p.requires_grad) for p in model.parameters()]
    backward(model, opt, 0)
    loss = model(batch(0, torch.float32)[0]).sum()
    opt.step()
    assert [(p.data_ptr(), p.grad_fn, p.requires_grad) for p in model.parameters()] == before
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("set_to_none", [False, True])
def test_gradients_are_set_to_zero_or_none(name: str, set_to_none: bool) -> None:
    model, opt = trained(name, 1)
    opt.zero_grad(set_to_none)
    for param in model.parameters():
        assert param.grad is None if set_to_none else not param.grad.any()  # type: ignore[union-attr]


@pytest.mark.parametrize("name", EVERY)
def test_a_closure_is_called_once_with_gradients(name: str) -> None:
    model, opt = trained(name)
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


@pytest.mark.parametrize("name", EVERY)
def test_a_scaler_skips_steps_that_are_not_finite(name: str) -> None:
    model, opt = trained(name)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
    for step in range(5, 9):
        before = values(model)
        scale = float(scaler.scale(torch.ones(())))
        backward(model, opt, step, sign=scale if step != 6 else math.inf)
        scaler.step(opt)
        scaler.update()
        assert moved(model, before) == [step != 6] * 4
    assert scaler.get_scale() == 2.0


@pytest.mark.parametrize("name", EVERY)
def test_the_default_dtype_does_not_matter(name: str) -> None:
    model = net()
    twin = copy.deepcopy(model)
    opt = made(name, model)
    train(model, opt, range(4))
    torch.set_default_dtype(torch.float64)
    try:
        other = made(name, twin)
        train(twin, other, range(4))
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(values(model), values(twin))
    kept = [v for v in leaves(other.state_dict()["state"]).values() if isinstance(v, tuple)]
    assert {dtype for dtype, entries in kept if isinstance(entries, list)} == {torch.float32}


@pytest.mark.parametrize("name", EVERY)
def test_it_can_be_printed_and_profiled(name: str) -> None:
    _, opt = trained(name, 1, lr=0.0123)
    assert "lr: 0.0123" in repr(opt) and "weight_decay: 0.0" in repr(opt)
    with torch.autograd.profiler.profile() as profile:
        opt.step()
        opt.zero_grad()
    names = {event.name for event in profile.function_events}
    kind = type(opt).__name__
    assert {f"Optimizer.step#{kind}.step", f"Optimizer.zero_grad#{kind}.zero_grad"} <= names


@pytest.mark.parametrize("name", EVERY)
def test_every_parameter_has_a_state_in_the_order_of_the_groups(name: str) -> None:
    model, opt = trained(name, 1)
    saved = opt.state_dict()
    params = [p for group in opt.param_groups for p in group["params"]]
    numbers = [n for group in saved["param_groups"] for n in group["params"]]
    assert numbers == list(range(4)) and set(params) == set(model.parameters())
    assert all(saved["state"][n] is opt.state[params[n]] != {} for n in numbers)


# ------------------------------------------------------------------ saved states and copies


@pytest.mark.parametrize(
    ("name", "named", "other_named"),
    [*((n, a, b) for n in [*FACTORED, "fallback"] for a in (0, 1) for b in (0, 1)), ("kfac", 1, 1)],
)
def test_a_state_goes_on_where_it_was_saved(name: str, named: int, other_named: int) -> None:
    """To the bit, and what is saved after it; from and to optimizers with and without names."""
    model, opt = trained(name, named=bool(named))
    twin = copy.deepcopy(model)
    other = made(name, twin, named=bool(other_named))
    saved = opt.state_dict()
    given = copy.deepcopy(saved)
    other.load_state_dict(given)
    assert leaves(given) == leaves(saved)
    for step in range(5, 11):
        train(model, opt, [step])
        train(twin, other, [step])
        assert not any(moved(model, values(twin)))
    ends = [leaves(o.state_dict()).items() for o in (opt, other)]
    kept, found = ([item for item in end if "param_names" not in item[0]] for end in ends)
    assert kept == found
    names = [n for group in other.param_groups for n in group.get("param_names", [])]
    wanted = ["0.weight", "0.bias", "2.weight", "2.bias"]
    wanted.sort(key=lambda param: name == "fallback" and "bias" in param)
    assert names == (wanted if named or other_named else [])


@pytest.mark.parametrize("name", [*FACTORED, "kfac"])
def test_groups_that_are_repeated_are_saved_alike(name: str) -> None:
    _, opt = trained(name, 1)
    opt.param_groups.extend(opt.param_groups)
    first, second = opt.state_dict()["param_groups"]
    assert leaves(first) == leaves(second)


@pytest.mark.parametrize("name", [*FACTORED, "kfac"])
def test_what_is_loaded_is_a_copy(name: str) -> None:
    """PyTorch's own optimizers go on in the very tensors that they were given."""
    model, opt = trained(name)
    saved = copy.deepcopy(opt.state_dict())
    kept = leaves(saved)
    opt.load_state_dict(saved)
    train(model, opt, range(5, 9))
    assert leaves(saved) == kept != leaves(opt.state_dict())


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("weights_only", [False, True])
def test_a_file_holds_all_of_it(name: str, named: bool, weights_only: bool) -> None:
    _, opt = trained(name, named=named, lr=torch.tensor(0.01))
    saved = opt.state_dict()
    assert leaves(through_a_file(saved, weights_only=weights_only)) == leaves(saved)


@pytest.mark.parametrize("name", [*FACTORED, "fallback"])
def test_states_of_before_a_switch_was_there_load(name: str) -> None:
    """PyTorch's switches that came later, of which ours is ``maximize``, are then off."""
    model, opt = trained(name)
    older = copy.deepcopy(opt.state_dict())
    for group in older["param_groups"]:
        assert group.pop("maximize") is False
        for switch in ("foreach", "differentiable", "capturable"):
            group.pop(switch, None)
    twin = copy.deepcopy(model)
    other = made(name, twin, maximize=True)
    other.load_state_dict(opt.state_dict())
    assert not any(group["maximize"] for group in other.param_groups)
    other = made(name, twin)
    other.load_state_dict(older)
    assert not any(group["maximize"] for group in other.param_groups)
    train(model, opt, range(5, 9))
    train(twin, other, range(5, 9))
    assert not any(moved(model, values(twin)))


@pytest.mark.parametrize("name", FACTORED)
def test_counts_that_were_saved_as_tensors_load(name: str) -> None:
    """As a capturable optimizer saves them."""
    model, opt = trained(name, graft="adam")
    saved = copy.deepcopy(opt.state_dict())
    for state in saved["state"].values():
        for key in ("updates", "second_moment_updates"):
            state[key] = torch.tensor(float(state[key]), dtype=torch.float64)
    twin = copy.deepcopy(model)
    other = made(name, twin, graft="adam")
    other.load_state_dict(saved)
    train(model, opt, range(5, 9))
    train(twin, other, range(5, 9))
    assert not any(moved(model, values(twin)))


@pytest.mark.parametrize("name", EVERY)
def test_what_others_keep_in_the_state_is_kept(name: str) -> None:
    """Hooks and wrappers put entries of their own there, under keys that are no parameters."""
    model, opt = trained(name)
    opt.state["mine"] = 7
    saved = opt.state_dict()
    assert saved["state"]["mine"] == 7
    train(model, opt, range(5, 9))
    twin, other = trained(name, 0)
    other.load_state_dict(through_a_file(saved))
    assert other.state["mine"] == 7
    train(twin, other, range(5, 9))
    assert other.failures() == opt.failures() == {"skipped_statistics": 0, "failed_inverses": 0}


@pytest.mark.parametrize("name", EVERY)
def test_looking_for_a_state_that_is_not_there_yet_gives_an_empty_one(name: str) -> None:
    model = net()
    opt = made(name, model)
    assert [len(opt.state[p]) for p in model.parameters()] == [0] * 4
    before = values(model)
    train(model, opt, range(2))
    assert all(moved(model, before))


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("clone", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_have_all_that_is_public_and_go_on_alone(name: str, clone: Any) -> None:
    """Also with a scheduler, which puts a ``step`` of its own into the optimizer."""
    model, opt = trained(name)
    public = {key for key in vars(opt) if not key.startswith("_")}
    lr_scheduler.ExponentialLR(opt, 0.9)
    opt.register_step_pre_hook(lambda *_: None)
    twin, other = clone((model, opt))
    assert {key for key in vars(other) if not key.startswith("_")} == public
    assert not other._optimizer_step_pre_hooks
    before = values(model)
    train(twin, other, range(5, 9))
    assert not any(moved(model, before))
    train(model, opt, range(5, 9))
    Snapshot(model.parameters(), opt).assert_equals(Snapshot(twin.parameters(), other))


# ------------------------------------------------------------------ hooks


@pytest.mark.parametrize("name", EVERY)
def test_hooks_around_a_step(name: str) -> None:
    """Those of all optimizers outermost; the combined one's two have theirs, within its own."""
    opt, other = made(name, net()), torch.optim.SGD(net().parameters())
    called: list[tuple[Any, str]] = []

    def note(what: str) -> Callable[..., None]:
        return lambda optimizer, *_: called.append((optimizer, what))

    handles = [
        register_optimizer_step_pre_hook(note("all, before")),
        register_optimizer_step_post_hook(note("all, after")),
    ]
    for own in (opt, other):
        handles.append(own.register_step_pre_hook(note("before")))
        handles.append(own.register_step_post_hook(note("after")))
    try:
        for own in (opt, other, opt):
            own.step()
    finally:
        for handle in handles:
            handle.remove()
    outer = [(o, what) for o, what in called if o in (opt, other)]
    order = ["all, before", "before", "after", "all, after"]
    assert outer == [(o, what) for o in (opt, other, opt) for what in order]
    opt.step()
    assert len(called) == len(outer) + (8 if name == "fallback" else 0)


@pytest.mark.parametrize("name", EVERY)
def test_a_hook_may_give_a_step_its_closure(name: str) -> None:
    model, opt = trained(name)
    before, seen = values(model), []
    opt.register_step_pre_hook(lambda o, args, kwargs: ((o, lambda: backward(model, o, 5)), {}))
    opt.register_step_post_hook(lambda o, args, kwargs: seen.append(len(args)))
    assert opt.step().item() > 0
    assert all(moved(model, before)) and seen == [2]


@pytest.mark.parametrize("name", EVERY)
def test_hooks_around_state_dict(name: str) -> None:
    """Both may change what is saved; a hook that is prepended comes first."""
    _, opt = trained(name, 1)
    order: list[str] = []
    opt.register_state_dict_post_hook(lambda _, s: {**s, "marked": s["state"].pop("mark", 0)})
    assert opt.state_dict()["marked"] == 0
    opt.register_state_dict_pre_hook(lambda o: o.state.update(mark=1))
    saved = opt.state_dict()
    assert saved["marked"] == 1 and "mark" not in saved["state"]
    opt.register_state_dict_pre_hook(lambda _: order.append("before"))
    handle = opt.register_state_dict_pre_hook(lambda _: order.append("first"), prepend=True)
    opt.register_state_dict_post_hook(lambda *_: order.append("after"))
    opt.register_state_dict_post_hook(lambda *_: order.append("just after"), prepend=True)
    opt.state_dict()
    handle.remove()
    opt.state_dict()
    assert order == ["first", *(2 * ["before", "just after", "after"])]


@pytest.mark.parametrize("name", EVERY)
def test_hooks_around_load_state_dict(name: str) -> None:
    """A hook may change what is loaded in place, or return another; the first come first."""
    _, opt = trained(name, 1)
    seen = []

    def in_place(_: Any, state_dict: dict[str, Any]) -> None:
        state_dict["param_groups"][0]["lr"] = 0.002
        state_dict["mine"] = "a shallow copy's"

    def another(_: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        changed = copy.deepcopy(state_dict)
        changed["param_groups"][0]["lr"] = 0.003
        return changed

    def rate() -> float:
        given = copy.deepcopy(saved)
        opt.load_state_dict(given)
        assert "mine" not in given
        return float(opt.param_groups[0]["lr"])

    saved = opt.state_dict()
    assert rate() == SETTINGS["lr"]
    for n in range(2):
        opt.register_load_state_dict_post_hook(
            lambda o, n=n: seen.append((n, o.param_groups[0]["lr"])), prepend=n == 1
        )
    handle = opt.register_load_state_dict_pre_hook(in_place)
    assert rate() == 0.002
    opt.register_load_state_dict_pre_hook(another, prepend=True)
    assert rate() == 0.002
    handle.remove()
    assert rate() == 0.003
    assert seen == [(n, lr) for lr in (0.002, 0.002, 0.003) for n in (1, 0)]
