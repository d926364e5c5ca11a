"""Saved states: what they hold and keep, and wrong ones, which change nothing when refused."""

import copy
import itertools
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from drawn import weight
from optimizers import (
    FACTORED,
    NO_FAILURES,
    Dictated,
    ValueHead,
    any_likelihood,
    batch,
    conv_net,
    equal,
    every,
    factored,
    images,
    leaves,
    made,
    moved,
    net,
    refuses,
    through_a_file,
    train,
    trained,
    values,
    warm_start,
)
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import lr_scheduler

from tnt_optim import KFAC, TNT

# ------------------------------------------------------------------ saved states


@pytest.mark.parametrize("name", [*FACTORED, "fallback"])
def test_the_saved_settings_replace_the_constructors(name: str) -> None:
    model = conv_net()
    opt = made(name, model)
    train(model, opt, range(5), data=images)
    twin = copy.deepcopy(model)
    mle = {} if name == "shampoo" else {"estimator": "mle"}
    other = made(name, twin, maximize=True, merge_small_dims="kernel", **mle)
    other.load_state_dict(through_a_file(opt.state_dict()))
    train(model, opt, range(5, 9), data=images)
    train(twin, other, range(5, 9), data=images)
    assert not any(moved(model, values(twin)))


@every
def test_entries_of_others_in_the_state_are_kept(name: str) -> None:
    """Hooks and wrappers put entries there, under keys that are no parameters."""
    model, opt = trained(name)
    opt.state["mine"] = 7
    saved = opt.state_dict()
    assert saved["state"]["mine"] == 7
    train(model, opt, range(5, 9))
    twin, other = trained(name, 0)
    other.load_state_dict(through_a_file(saved))
    assert other.state["mine"] == 7
    train(twin, other, range(5, 9))
    assert other.failures() == opt.failures() == NO_FAILURES


def written(opt: Any) -> list[dict[str, Any]]:
    """The parameters' states, with entries as a wrapper writes them (SAM, Lookahead)."""
    params = [p for group in getattr(opt, "main", opt).param_groups for p in group["params"]]
    for number, p in enumerate(params):
        opt.state[p].update(old_p=p.detach().clone(), number=number)
    return [opt.state[p] for p in params]


def assert_written(opt: Any, by: list[dict[str, Any]]) -> None:
    """The same entries are there, to the bit."""
    groups = getattr(opt, "main", opt).param_groups
    for state, given in zip([opt.state[p] for g in groups for p in g["params"]], by, strict=True):
        assert state["number"] == given["number"] and torch.equal(state["old_p"], given["old_p"])


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_entries_that_a_wrapper_writes_before_the_first_step_are_kept(
    name: str, dtype: torch.dtype
) -> None:
    model = net(dtype)
    twin = copy.deepcopy(model)
    opt, plain = made(name, model), made(name, twin)
    given = written(opt)
    unstepped = through_a_file(opt.state_dict())
    assert opt.failures() == NO_FAILURES
    for m, o in ((model, opt), (twin, plain)):
        warm_start(o, m)
        train(m, o, range(5))
    assert equal(model.parameters(), twin.parameters())
    assert_written(opt, given)
    resumed = net(dtype)
    for saved in (unstepped, opt.state_dict()):
        other = made(name, resumed)
        other.load_state_dict(through_a_file(saved))
        assert_written(other, given)
    resumed.load_state_dict(model.state_dict())
    for m, o in ((model, opt), (resumed, other)):
        train(m, o, range(5, 9))
        assert_written(o, given)
    assert equal(model.parameters(), resumed.parameters())


@pytest.mark.parametrize("name", [*FACTORED, "fallback"])
def test_a_state_to_load_into_keeps_the_entries_of_a_wrapper(name: str) -> None:
    opt = made(name, net())
    given = written(opt)
    opt.allocate_state()
    assert_written(opt, given)
    assert all("factors" in opt.state[p] for g in opt.param_groups[:1] for p in g["params"])


@pytest.mark.parametrize("name", [*FACTORED, "kfac"])
def test_a_state_saved_without_a_scheduler_loads_with_one(name: str) -> None:
    """A scheduler adds entries to the groups, which no saved state needs."""
    saved = made(name, net(), lr=0.25).state_dict()
    opt = made(name, net(), lr=0.5)
    scheduler = lr_scheduler.StepLR(opt, step_size=1, gamma=0.5)
    assert "initial_lr" in opt.param_groups[0]
    opt.load_state_dict(saved)
    assert opt.param_groups[0]["lr"] == 0.25
    opt.step()
    scheduler.step()
    assert opt.param_groups[0]["lr"] == 0.125


@pytest.mark.parametrize("name", [*FACTORED, "kfac"])
def test_a_state_without_a_method_loads(name: str) -> None:
    """torch.distributed.checkpoint returns one."""
    model, opt = trained(name, 2)
    state = opt.state_dict()
    derived = type("Derived", (type(opt),), {})
    own = (
        {} if name == "shampoo" else {"likelihood": None if name == "empirical" else "categorical"}
    )
    fresh = derived(model if name == "kfac" else model.parameters(), **own)
    fresh.load_state_dict({key: state[key] for key in ("state", "param_groups")})
    assert leaves(fresh.state_dict()["state"]) == leaves(state["state"])
    fresh.load_state_dict(state)
    assert fresh.param_groups[0]["step"] == 2


def one_class_more(output: Tensor) -> Tensor:
    return output.sum()


SAMPLINGS: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("sampled", {}, {"seed": 3}, "saved with seed=0: .* its own seed=3"),
    ("sampled", {}, {"likelihood": "gaussian"}, "'categorical'.*own likelihood='gaussian'"),
    ("sampled", {"likelihood": one_class_more}, {}, "'one_class_more'.*'categorical'"),
    ("sampled", {"seed": 1}, {}, "seed=1: .* own seed=0"),
    ("sampled", {"likelihood": None, "seed": 2}, {}, "likelihood=None: .*own likelihood='categ"),
    ("empirical", {}, {"likelihood": "gaussian"}, "likelihood=None: .*own likelihood='gaussian'"),
    ("sampled", {"seed": 1}, {"likelihood": None}, "likelihood='categorical': .*likelihood=None,"),
    ("kfac", {"likelihood": "gaussian", "seed": 2}, {}, "likelihood='gaussian', seed=2: "),
]


@any_likelihood
@pytest.mark.parametrize(("name", "before", "after", "message"), SAMPLINGS)
def test_another_sampling_than_the_saved_one_is_warned_of(
    name: str, before: dict[str, Any], after: dict[str, Any], message: str
) -> None:
    """The constructor's options stay, as torch's optimizers keep options of the whole optimizer."""
    model, opt = trained(name, 1, **before)
    saved = through_a_file(opt.state_dict())
    opt.load_state_dict(saved)  # its own: no warning, which would be an error here
    fresh = made(name, model, **after)
    with pytest.warns(RuntimeWarning, match=message) as said:
        fresh.load_state_dict(saved)
    assert [w.filename for w in said] == [__file__]
    del saved["sampling"]  # as torch.distributed.checkpoint does
    fresh.load_state_dict(saved)
    train(model, fresh, [1])


@pytest.mark.parametrize("method", [TNT, KFAC])
def test_settings_of_numpy_are_saved_in_plain_values(method: Any) -> None:
    model = net()
    settings = {"lr": np.float64(0.5), "damping": np.float32(0.5), "stat_interval": np.int64(2)}
    own = {"block_size": np.int64(3)} if method is TNT else {}
    params: Any = model if method is KFAC else model.parameters()
    opt = method(params, likelihood="categorical", **settings, **own)
    train(model, opt, [0])
    (group,) = through_a_file(opt.state_dict())["param_groups"]
    assert [(type(group[name]), group[name]) for name in settings] == [
        *[(float, 0.5), (float, 0.5), (int, 2)]
    ]


# ------------------------------------------------------------------ names


class Ordered(nn.Module):
    """Two layers of one shape, in an order, under their names."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        for name in names:
            setattr(self, name, nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        """Through the layers."""
        for layer in self.children():
            x = torch.tanh(layer(x))
        return x


@every
def test_a_state_of_reordered_layers_is_refused(name: str) -> None:
    model, other = Ordered("first", "second"), Ordered("second", "first")
    opt, fresh = made(name, model, named=True), made(name, other, named=True)
    train(model, opt, [0])
    train(other, fresh, [0])
    saved = through_a_file(opt.state_dict())
    match = r"same order, got 'first\.weight' for 'second\.weight' \(parameter 0 of group 0\)"
    refuses(fresh, other, saved, match)
    saved["param_groups"][0].pop("param_names")
    if name == "fallback":
        refuses(fresh, other, saved, r"'first\.bias' for 'second\.bias' \(parameter 0 of group 1\)")
        saved["param_groups"][1].pop("param_names")
    if name != "kfac":
        made(name, other).load_state_dict(saved)
    fresh.load_state_dict(saved)


@factored
def test_a_state_with_parameters_in_other_groups_is_refused(name: str) -> None:
    a, b, c = weight(2, 2), weight(2, 2), weight(2, 2)
    one, other = (
        Dictated(name, [{"params": first}, {"params": second}])
        for first, second in (
            ([("a", a), ("b", b)], [("c", c)]),
            ([("a", a), ("c", c)], [("b", b)]),
        )
    )
    with pytest.raises(ValueError, match=r"'b' for 'c' \(parameter 1 of group 0\), 'c' for 'b'"):
        other.opt.load_state_dict(one.opt.state_dict())


@every
@pytest.mark.parametrize(
    ("saved_prefix", "prefix"),
    [("", "module."), ("module._orig_mod.", ""), ("module.", "_orig_mod.module.")],
)
def test_prefixes_of_wrappers_are_no_other_names(name: str, saved_prefix: str, prefix: str) -> None:
    """The optimizer keeps its own names."""
    model, opt = trained(name, 2, named=True)
    other = copy.deepcopy(model)
    fresh = made(name, other, named=True)
    for each, start in ((opt, saved_prefix), (fresh, prefix)):
        for group in each.param_groups:
            group["param_names"] = [start + n for n in group["param_names"]]
    own = [group["param_names"] for group in fresh.param_groups]
    fresh.load_state_dict(opt.state_dict())
    assert [group["param_names"] for group in fresh.param_groups] == own


@every
def test_renamed_modules_are_warned_of(name: str) -> None:
    """Their states are loaded by order; one warning for all parts."""
    model, other = Ordered("first", "second"), Ordered("first", "third")
    opt, fresh = made(name, model, named=True), made(name, other, named=True)
    train(model, opt, [0])
    own = [group["param_names"] for group in fresh.param_groups]
    saved = copy.deepcopy(opt.state_dict())
    with pytest.warns(RuntimeWarning, match=r"by order: 'second\.\w+' for 'third\.\w+'") as caught:
        fresh.load_state_dict(saved)
    assert len(caught) == (2 if name == "fallback" else 1)  # a warning for each part
    assert [group["param_names"] for group in fresh.param_groups] == own
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert leaves(opt.state[p]) == leaves(fresh.state[q])


@pytest.mark.parametrize("name", ["sampled", "kfac"])
def test_torch_matches_reordered_layers_by_name(name: str) -> None:
    """``set_optimizer_state_dict`` brings the states in the optimizer's order, and no names."""
    model, other = Ordered("first", "second"), Ordered("second", "first")
    opt, fresh = made(name, model, named=True), made(name, other, named=True)
    train(model, opt, range(2))
    set_optimizer_state_dict(other, fresh, get_optimizer_state_dict(model, opt))
    own = dict(model.named_parameters())
    for key, param in other.named_parameters():
        assert leaves(fresh.state[param]) == leaves(opt.state[own[key]])
    names = [key for key, _ in other.named_parameters()]
    assert fresh.param_groups[0]["param_names"] == names


@every
def test_steps_without_a_state_are_warned_of(name: str) -> None:
    """As after an in-place load into an optimizer without a state."""
    _, opt = trained(name, 3)
    saved = {**opt.state_dict(), "state": {}}
    fresh = made(name, net())
    with pytest.warns(RuntimeWarning, match=r"no state.*call allocate_state\(\) before"):
        fresh.load_state_dict(saved)
    fresh.load_state_dict(made(name, net()).state_dict())


# ------------------------------------------------------------------ states that are refused


OTHERS: dict[str, tuple[dict[str, Any], Callable[[], nn.Module], str]] = {
    "shape": ({}, lambda: nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)), "momentum must be"),
    "count": ({}, lambda: nn.Linear(4, 3), "parameters"),
    "kind": ({"max_factor_dim": 3}, net, "max_factor_dim=3"),
    "blocks": ({"block_size": 4}, net, "block_size=4.*block_size=None"),
}


@factored
@pytest.mark.parametrize("other", OTHERS)
def test_a_state_of_another_model_is_refused(name: str, other: str) -> None:
    settings, model, message = OTHERS[other]
    twin = model()
    fresh = made(name, twin, **settings)
    train(twin, fresh, range(2))
    refuses(fresh, twin, trained(name, 3)[1].state_dict(), f"state_dict.*{message}")


def damaged(value: Any, *path: str | int) -> Callable[[Any], None]:
    """Sets one entry of a state, or deletes it where the value is ``damaged``."""

    def change(state_dict: Any) -> None:
        for key in path[:-1]:
            state_dict = state_dict[key]
        if value is damaged:
            del state_dict[path[-1]]
        else:
            state_dict[path[-1]] = value

    return change


@factored
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (damaged(damaged, "state"), "'state'"),
        (damaged(damaged, "param_groups"), "'param_groups'"),
        (damaged(damaged, "param_groups", 0, "damping"), "damping"),
        (damaged(damaged, "param_groups", 0, "step"), "step"),
        (damaged(damaged, "state", 0, "updates"), "updates"),
        (damaged(damaged, "state", 0, "stats"), "stats"),
        (damaged(None, "state", 0, "updates"), "updates must be a finite number >= 0, got None"),
        (damaged(math.nan, "state", 0, "updates"), "updates must be a finite number >= 0, got nan"),
        (damaged(-1, "state", 0, "updates"), "updates must be a finite number >= 0, got -1"),
        (
            damaged("x", "state", 0, "first_step"),
            "first_step must be a finite number >= 0, got 'x'",
        ),
        (damaged(None, "state", 0, "failed_inverses"), "failed_inverses"),
        (damaged([99], "accumulated"), "'accumulated'"),
        (damaged(1, "state", 0, "momentum"), "tensors"),
        (damaged(None, "state", 0, "stats"), "tensors"),
        (damaged(0, "param_groups", 0, "stat_interval"), "stat_interval"),
        (damaged(-1.0, "param_groups", 0, "lr"), "lr"),
    ],
)
def test_a_damaged_state_is_refused(name: str, change: Callable[[Any], None], message: str) -> None:
    model, opt = trained(name, 3)
    state = copy.deepcopy(opt.state_dict())
    change(state)
    refuses(opt, model, state, f"state_dict.*{message}")


OBSERVED = "state_dict['observed']"
NUMBERS = {  # entries with numbers of parameters or layers, and what the message says of them
    ("missed",): ({99: 1}, "state_dict['missed'] must hold numbers from 0 to {}, got 99"),
    ("missed", 0): ("x", "state_dict['missed'][0] must be an integer, got 'x'"),
    ("accumulated",): ([-1], "state_dict['accumulated'] must hold numbers from 0 to {}, got -1"),
    ("observed",): (3, f"{OBSERVED} must be a mapping, got int"),
    ("observed", "asked"): (
        [0, 77],
        f"{OBSERVED}['asked'] must hold numbers from 0 to {{}}, got 7",
    ),
    ("observed", "count"): (-1, f"{OBSERVED}['count'] must be an integer >= 0, got -1"),
    ("observed", "attached"): ("2", f"{OBSERVED}['attached'] must be an integer >= 0, got '2'"),
}
OF_TNT = {
    ("observed", "totals"): ({5: torch.ones(2)}, f"{OBSERVED}['totals'] must hold numbers from"),
    ("observed", "totals", 0): (1, f"{OBSERVED} must have a gradient of shape (6, 4) for para"),
    ("observed", "number"): (None, f"{OBSERVED}['number'] must be an integer >= 0, got None"),
}
OF_KFAC = {
    ("observed", "sums"): ({1: []}, f"{OBSERVED}['sums'] must hold numbers from 0 to 2, got 1"),
    ("observed", "sums", 0): (
        [1],
        f"{OBSERVED} must have sums of sizes (6, 5) for parameter 0",
    ),
    ("observed", "sums", 0, 2): (1.5, f"{OBSERVED}['sums'][0] must be an integer >= 0, got 1.5"),
    ("observed", "called"): ([1], f"{OBSERVED}['called'] must hold numbers from 0 to 2, got 1"),
}
DAMAGED = {"sampled": NUMBERS | OF_TNT, "kfac": NUMBERS | OF_KFAC}


def between_observe_and_step(name: str) -> tuple[nn.Module, Any, Any]:
    """A model, its optimizer, and a state with an observation that no step has used."""
    model, opt = trained(name, 2)
    opt.observe(model(batch(2)[0].float()))
    saved = through_a_file(opt.state_dict())
    return model, opt, {"missed": {0: 0}, "accumulated": [0], **saved}


@pytest.mark.parametrize(("name", "path"), [(n, path) for n, of in DAMAGED.items() for path in of])
def test_damaged_observations_are_refused(name: str, path: tuple[Any, ...]) -> None:
    """By the name of the entry; neither is a number outside of the model an IndexError later."""
    model, opt, saved = between_observe_and_step(name)
    value, message = DAMAGED[name][path]
    damaged(value, *path)(saved)
    # Only weights of layers are observed.
    last = 2 if name == "kfac" and path[0] == "observed" else 3
    refuses(opt, model, saved, f"^{re.escape(message.format(last))}")
    if len(path) == 2 and path[0] == "observed":
        damaged(damaged, *path)(saved)
        refuses(opt, model, saved, rf"^state_dict\['observed'\] lacks \['{path[1]}'\]")


@pytest.mark.parametrize("name", DAMAGED)
def test_a_file_sets_no_attributes(name: str) -> None:
    """Entries that the optimizer does not know are left out."""
    model, opt, saved = between_observe_and_step(name)
    before = set(vars(opt._observed))
    saved["observed"] |= {"use_up": None, "agreed": True, "foreign": 1}
    opt.load_state_dict(saved)
    assert set(vars(opt._observed)) == before and callable(opt._observed.use_up)
    assert not opt._observed.agreed
    train(model, opt, [2])


@pytest.mark.parametrize("name", DAMAGED)
def test_numbers_under_string_keys_are_numbers(name: str) -> None:
    """torch.distributed.checkpoint puts what it loads in place under "0"."""
    _, opt, saved = between_observe_and_step(name)
    opt.load_state_dict({**saved, "missed": {0: -1, "0": 0, "1": 1}})
    assert opt.state_dict()["missed"] == {0: 0, 1: 1}


@factored
def test_adams_state_is_refused(name: str) -> None:
    model, opt = trained(name, 0)
    refuses(opt, model, torch.optim.Adam(net().parameters()).state_dict(), "another optimizer's")


@pytest.mark.parametrize(
    ("saved", "loaded"), [*itertools.permutations(("sampled", "shampoo", "kfac"), 2)]
)
def test_a_state_of_another_method_is_refused(saved: str, loaded: str) -> None:
    """Its tensors and settings have the same names and shapes, but mean something else."""
    (_, first), (model, second) = trained(saved, 2), trained(loaded, 2)
    kinds = type(second).__name__, type(first).__name__
    message = "^state_dict must be of {}, got that of {}".format(*kinds)
    refuses(second, model, through_a_file(first.state_dict()), message)


# ------------------------------------------------------------------ hooks


@every
def test_hooks_around_state_dict(name: str) -> None:
    """Both may change the saved state, and the hooks after them see it all."""
    _, opt = trained(name, 1)
    seen: list[Any] = []
    opt.register_state_dict_post_hook(lambda _, s: seen.append(leaves(s)), prepend=True)
    saved = opt.state_dict()
    assert seen == [leaves(saved)]
    assert "method" in saved or name == "fallback"
    assert not any("modes" in group for group in saved["param_groups"])
    opt.register_state_dict_post_hook(lambda _, s: {**s, "marked": s["state"].pop("mark", 0)})
    assert opt.state_dict()["marked"] == 0
    opt.register_state_dict_pre_hook(lambda o: o.state.update(mark=1))
    saved = opt.state_dict()
    assert saved["marked"] == 1 and "mark" not in saved["state"]


@every
def test_hooks_around_load_state_dict(name: str) -> None:
    """A hook may change the state in place, or return another."""
    _, opt = trained(name, 1)
    saved, seen = opt.state_dict(), []

    def in_place(_: Any, state_dict: dict[str, Any]) -> None:
        state_dict["param_groups"][0]["lr"] = 0.002
        state_dict["mine"] = "a shallow copy's"

    def another(_: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        changed = copy.deepcopy(state_dict)
        changed["param_groups"][0]["lr"] = 0.003
        return changed

    opt.register_load_state_dict_post_hook(lambda o: seen.append(o.param_groups[0]["lr"]))
    for hook in (in_place, another):
        opt.register_load_state_dict_pre_hook(hook)
        given = copy.deepcopy(saved)
        opt.load_state_dict(given)
        assert "mine" not in given
    assert seen == [0.002, 0.003]


@pytest.mark.parametrize("name", [*FACTORED, "kfac"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hooks_may_adapt_a_state_to_another_order(name: str, dtype: torch.dtype) -> None:
    """The state is checked after its hooks, and copied before the hooks that come after."""
    model, layers = net(dtype), {"first": "0", "last": "2"}
    other = nn.ModuleDict({"last": nn.Linear(6, 3), "first": nn.Linear(4, 6)}).to(dtype)
    opt, fresh = made(name, model, named=True), made(name, other, named=True)
    train(model, opt, [0])
    seen: list[list[Tensor]] = []

    def adapt(_: Any, state: dict[str, Any]) -> dict[str, Any]:
        (group,) = state["param_groups"]
        numbers = dict(zip(group["param_names"], group["params"], strict=True))
        names = [name for name, _ in other.named_parameters()]
        parts = [name.split(".") for name in names]
        params = [numbers[f"{layers[layer]}.{kind}"] for layer, kind in parts]
        return {**state, "param_groups": [{**group, "params": params, "param_names": names}]}

    files = through_a_file(opt.state_dict())
    refuses(fresh, other, files, r"state_dict\['state'\]\[0\].*(another model|have shapes)")
    fresh.register_load_state_dict_pre_hook(adapt)
    fresh.register_load_state_dict_post_hook(
        lambda o: seen.extend(state["stats"] for state in o.state.values() if "stats" in state)
    )
    fresh.load_state_dict(files)
    for mine, theirs in layers.items():
        pair = other[mine], model.get_submodule(theirs)
        for p, q in zip(*(layer.parameters() for layer in pair), strict=True):
            # Not rounded to the parameters' dtype.
            assert leaves(fresh.state[p]) == leaves(opt.state[q])
    assert {s.dtype for stats in seen for s in stats} == {torch.float32}
    assert len(seen) == (2 if name == "kfac" else 4)
    broken = copy.deepcopy(files)
    broken["param_groups"][0]["lr"] = -1.0
    refuses(fresh, other, broken, "state_dict: group 0: lr")
    fresh.load_state_dict(files)  # the hooks are still there
    assert len(seen) == (4 if name == "kfac" else 8)


@pytest.mark.filterwarnings("ignore:the observed output does not depend:RuntimeWarning")
def test_a_state_without_a_group_that_was_removed() -> None:
    """Of its parameters the observed output had missed one, and another observation is pending."""
    model = ValueHead()
    rest = [*model.body.parameters(), *model.policy.parameters()]
    opt = TNT([{"params": rest}, {"params": model.value.parameters()}], likelihood="categorical")
    for _ in range(2):
        policy, value = model(torch.randn(8, 4))
        opt.observe(policy)
        loss = nn.functional.cross_entropy(policy, torch.zeros(8, dtype=torch.int64))
        (loss + value.square().mean()).backward()
        opt.step()
    opt.observe(torch.cat(model(torch.randn(8, 4)), 1))
    for param in opt.param_groups.pop()["params"]:
        opt.state.pop(param, None)
    saved = opt.state_dict()
    assert len(saved["param_groups"]) == 1 and set(saved["state"]) == set(range(len(rest)))
    TNT(rest, likelihood="categorical").load_state_dict(saved)
