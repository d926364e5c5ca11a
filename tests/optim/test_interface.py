"""What a user writes: the drop-in form, one loop for every method, errors with a way out."""

import copy
import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import torch
from conftest import Snapshot
from drawn import weight
from optimizers import conv_net, equal, images, leaves, net, through_a_file, train
from torch import nn
from torch.nn.functional import cross_entropy

from tnt_optim import KFAC, TNT, Shampoo, with_fallback
from tnt_optim.checks import _INSTEAD

Method = type[TNT | Shampoo | KFAC]
methods = pytest.mark.parametrize("method", [TNT, Shampoo, KFAC])


def made(method: Method, model: nn.Module, **settings: Any) -> Any:
    """An optimizer with its defaults, and a likelihood only where it needs one."""
    if issubclass(method, KFAC):
        return method(model, **{"likelihood": "categorical", **settings})
    return method(model.parameters(), **settings)


# ------------------------------------------------------------------ the loop


def mixed(model: nn.Module, main: Callable[..., Any], **settings: Any) -> Any:
    """``with_fallback`` with SGD for the vectors."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    return with_fallback(main(matrices, **settings), torch.optim.SGD(rest, lr=0.1))


LOOP: dict[str, Callable[[nn.Module], Any]] = {
    "TNT": lambda model: TNT(model.parameters()),
    "sampled": lambda model: TNT(model.parameters(), likelihood="categorical"),
    "Shampoo": lambda model: Shampoo(model.parameters()),
    "KFAC": lambda model: KFAC(model, likelihood="categorical"),
    "TNT, SGD": lambda model: mixed(model, TNT),
    "sampled, SGD": lambda model: mixed(model, TNT, likelihood="categorical"),
    "Shampoo, SGD": lambda model: mixed(model, Shampoo),
}
SAMPLED = ("sampled", "KFAC", "sampled, SGD")


def steps(model: nn.Module, opt: Any, count: int, *, observe: bool) -> list[float]:
    """The losses of a plain loop."""
    losses = []
    for step in range(count):
        x, y = images(step)
        opt.zero_grad()
        output = model(x)
        if observe:
            opt.observe(output)
        loss = cross_entropy(output, y)
        loss.backward()
        opt.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("name", LOOP)
def test_one_loop_trains_with_every_optimizer(name: str) -> None:
    """With ``observe`` or ``attach``, to the same bits; where nothing is sampled also without."""
    torch.manual_seed(0)
    start, ends = conv_net(), []
    for way in ("observe", "attach", *(() if name in SAMPLED else ("neither",))):
        model = copy.deepcopy(start)
        opt = LOOP[name](model)
        assert opt.observing == (name in SAMPLED)
        with opt.attach(model) if way == "attach" else nullcontext():
            assert bool(model._forward_hooks) == (way == "attach" and name in SAMPLED)
            losses = steps(model, opt, 60, observe=way == "observe")
        assert sum(losses[-5:]) < 0.7 * sum(losses[:5])
        ends.append(list(model.parameters()))
    assert all(equal(end, ends[0]) for end in ends[1:])


@pytest.mark.parametrize("name", [name for name in LOOP if name not in SAMPLED])
def test_without_a_likelihood_an_output_may_be_anything(name: str) -> None:
    """It is not looked at."""
    model = net()
    opt = LOOP[name](model)
    before = Snapshot(model.parameters(), getattr(opt, "main", opt))
    opt.observe(None)
    opt.observe(torch.ones(3))
    before.assert_unchanged()
    opt.attach(model, output=lambda out: None).remove()
    with pytest.raises(ValueError, match="model must have a parameter of this optimizer"):
        opt.attach(net())


# ------------------------------------------------------------------ fisher, of earlier versions


FISHER: list[tuple[str | None, dict[str, Any], Any]] = [
    # A problem of the paper, arguments with ``fisher``, the likelihood that they mean.
    (None, {"fisher": "empirical"}, None),
    (None, {"fisher": "empirical", "likelihood": "gaussian"}, None),
    (None, {"fisher": "sampled"}, "categorical"),
    (None, {"fisher": "sampled", "likelihood": ("gaussian",)}, ("gaussian",)),
    ("mnist", {"fisher": "empirical"}, None),
    ("mnist", {"fisher": "sampled"}, "bernoulli"),
    ("mnist", {"fisher": "sampled", "likelihood": "gaussian"}, "gaussian"),
    ("vgg16", {"fisher": "sampled"}, "categorical"),
]


@pytest.mark.parametrize(("problem", "given", "likelihood"), FISHER)
def test_fisher_means_a_likelihood_and_a_warning_says_which(
    problem: str | None, given: dict[str, Any], likelihood: Any
) -> None:
    params = list(net().parameters())
    forms = [(TNT.paper, (params, problem))] + ([] if problem else [(TNT, (params,))])
    for form, arguments in forms:
        message = re.escape(f"write likelihood={likelihood!r} for fisher={given['fisher']!r}. ")
        with pytest.warns(RuntimeWarning, match=message) as said:
            opt = form(*arguments, **given)
        assert [warning.filename for warning in said] == [__file__]
        wanted = form(*arguments, likelihood=likelihood)
        assert opt.likelihood == likelihood and opt.defaults == wanted.defaults
        assert repr(opt) == repr(wanted)


@pytest.mark.parametrize("fisher", ["empirical", "sampled"])
@pytest.mark.parametrize("form", [TNT, TNT.paper])
def test_both_ways_of_writing_train_the_same(form: Any, fisher: str) -> None:
    """TNT without an argument is what was ``fisher="empirical"``."""
    settings: dict[str, Any] = {"lr": 0.01, "seed": 3}
    own: dict[str, Any] = {"likelihood": None if fisher == "empirical" else "categorical"}
    model = net()
    other = copy.deepcopy(model)
    with pytest.warns(RuntimeWarning, match="write likelihood="):
        old = form(other.parameters(), fisher=fisher, **settings)
    drop_in = form is TNT and fisher == "empirical"
    new = form(model.parameters(), **settings, **({} if drop_in else own))
    train(model, new, range(7))
    train(other, old, range(7))
    assert equal(model.parameters(), other.parameters())
    assert leaves(new.state_dict()) == leaves(old.state_dict())


@pytest.mark.parametrize("form", [TNT, TNT.paper])
def test_another_fisher_is_refused(form: Any) -> None:
    with pytest.raises(ValueError, match="^fisher must be 'sampled' or 'empirical', got 'exact'"):
        form([weight(2, 3)], fisher="exact")


OLD: dict[str, dict[str, Any]] = {  # what earlier versions saved
    "empirical": {"fisher": "empirical"},
    "sampled": {"fisher": "sampled", "likelihood": "categorical", "seed": 0},
}


@pytest.mark.parametrize("into", OLD)
@pytest.mark.parametrize("saved_as", OLD)
def test_states_of_earlier_versions_load(saved_as: str, into: str) -> None:
    """With one warning if the statistics were of other gradients."""
    likelihoods = {"empirical": None, "sampled": "categorical"}
    model = net()
    opt = TNT(model.parameters(), likelihood=likelihoods[saved_as])
    train(model, opt, range(3))
    saved = through_a_file({**opt.state_dict(), "sampling": OLD[saved_as]})
    twin = copy.deepcopy(model)
    fresh = TNT(twin.parameters(), likelihood=likelihoods[into])
    if saved_as == into:
        fresh.load_state_dict(saved)  # a warning is an error in this suite
        train(model, opt, range(3, 6))
        train(twin, fresh, range(3, 6))
        assert equal(model.parameters(), twin.parameters())
        return
    before, after = likelihoods[saved_as], likelihoods[into]
    message = f"saved with likelihood={before!r}: .* its own likelihood={after!r}"
    with pytest.warns(RuntimeWarning, match=message) as said:
        fresh.load_state_dict(saved)
    assert len(said) == 1
    train(twin, fresh, [3])


# ------------------------------------------------------------------ arguments that are refused


def test_a_likelihood_must_be_chosen_where_there_is_no_default() -> None:
    model = net()
    with pytest.raises(ValueError, match=r"^likelihood must be given for TNT\.paper .*, or None"):
        TNT.paper(model.parameters(), lr=0.1)
    assert TNT.paper(model.parameters(), likelihood=None).likelihood is None
    assert TNT.paper(model.parameters(), "faces").likelihood == "gaussian"
    with pytest.raises(ValueError, match=r"^likelihood must be given for KFAC\.paper .*, or None"):
        KFAC.paper(model)
    assert not any(module._forward_hooks for module in model.modules())
    assert KFAC(model).likelihood is None and KFAC.paper(model, likelihood=None).likelihood is None
    assert KFAC.paper(model, "faces").state_dict()["sampling"]["likelihood"] == "gaussian"


@methods
@pytest.mark.parametrize("name", [*_INSTEAD, "learning_rate"])
def test_arguments_of_other_optimizers_are_refused(method: Method, name: str) -> None:
    model = net()
    hint = f": {re.escape(_INSTEAD[name])}" if name in _INSTEAD else ""
    with pytest.raises(TypeError, match=f"^{method.__name__} has no argument '{name}'{hint}$"):
        made(method, model, **{name: 0.5})
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("method", [TNT, Shampoo])
def test_what_is_no_list_of_parameters_is_refused(method: type[TNT | Shampoo]) -> None:
    model, kind = net(), method.__name__
    for params, message in [
        (model, rf"got a module: write {kind}\(model\.parameters\(\)\)"),
        (model[0].weight, rf"got Parameter: for a single one write {kind}\(\[parameter\]\)"),
        (3, "got int: "),
        (
            [list(model[0].parameters()), list(model[2].parameters())],
            rf"got a list of 2 in it: write {kind}\(\[{{'params': first_list}}, ",
        ),
    ]:
        with pytest.raises(TypeError, match=f"^params must .*{message}"):
            method(params)
    groups = [{"params": list(layer.parameters())} for layer in (model[0], model[2])]
    for params in (groups, model.named_parameters(), iter(groups)):
        assert sum(len(g["params"]) for g in method(params).param_groups) == 4


# ------------------------------------------------------------------ what is shown


@methods
def test_the_representation_has_the_options_of_the_whole_optimizer(method: Method) -> None:
    sampling = {} if method is Shampoo else {"likelihood": "gaussian", "seed": 5}
    lines = repr(made(method, net(), shard="inverses", **sampling)).splitlines()
    assert lines[0] == f"{method.__name__} (" and lines[-1] == ")"
    for name, value in {"shard": "inverses", **sampling}.items():
        assert lines.count(f"  {name}: {value}") == 1
    if method is TNT:
        assert "  likelihood: None" in repr(TNT([weight(2, 3)])).splitlines()


@methods
def test_types_of_options_that_are_names_have_their_values(method: Method) -> None:
    """Each value is accepted; the error message for another value lists these, and no other."""
    found = {}
    for name, hint in get_type_hints(method.__init__).items():
        parts = get_args(hint) if get_origin(hint) is not Literal else (hint,)
        names = [v for part in parts if get_origin(part) is Literal for v in get_args(part)]
        if names and name != "likelihood":
            found[name] = {*map(repr, names), *(["None"] if type(None) in parts else [])}
    own = {"inverse"} if method is KFAC else {"rounding", "merge_small_dims"}
    assert found.keys() == {"graft", "shard", *own, *(["estimator"] if method is TNT else [])}
    for name, allowed in found.items():
        for value in allowed:
            made(method, net(torch.bfloat16), **{name: None if value == "None" else eval(value)})
        with pytest.raises(ValueError, match=f"^{name} must be .*, got 'another'") as caught:
            made(method, net(), **{name: "another"})
        listed = re.findall(r"'\w+'|None", str(caught.value).partition(", got")[0])
        assert len(listed) == len(allowed) and set(listed) == allowed


# ------------------------------------------------------------------ few preconditioned entries


@pytest.mark.parametrize("method", [TNT, Shampoo])
def test_flat_parameters_are_noticed_at_the_first_step(method: type[TNT | Shampoo]) -> None:
    """As wrappers leave them that flatten all parameters: once, with the share."""
    flat, small = weight(90), weight(2, 3)
    opt = method([flat, small])
    for step in range(3):
        flat.grad, small.grad = torch.ones_like(flat), torch.ones_like(small)
        message = (
            rf"^{method.__name__} preconditions 6% of the 96 entries .*: 1 of 2 parameters .* "
            r"largest is \(90,\)"
        )
        noticed = pytest.warns(RuntimeWarning, match=message)
        with nullcontext() if step else noticed as said:
            opt.step()
        if not step:
            assert [warning.filename for warning in said] == [__file__]


def test_usual_parameters_are_not_noticed() -> None:
    """A warning is an error in this suite."""
    model = net()
    train(model, TNT(model.parameters()), [0])
    for layer in (model[0], model[2]):
        layer.weight.requires_grad_(False)  # only biases are trained
    train(model, TNT(model.parameters()), [0])
    flat = weight(90)
    flat.grad = torch.ones_like(flat)
    TNT([flat], precondition_1d=True).step()
