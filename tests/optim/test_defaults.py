"""The settings without any argument, the paper's by name, and parameters without statistics."""

import copy
import itertools
import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from drawn import close, noise, weight
from optimizers import (
    NO_FAILURES,
    Dictated,
    ValueHead,
    batch,
    conv_net,
    factored,
    images,
    made,
    net,
    through_a_file,
    train,
    values,
)
from torch import nn
from torch.nn.functional import cross_entropy

from tnt_optim import KFAC, TNT, Shampoo
from tnt_optim.paper import PAPER

FORM = {"graft": None, "relative_damping": False, "precondition_1d": True, "interval_warmup": 0}


# ------------------------------------------------------------------ forms


DEFAULTS: dict[str, Callable[[nn.Module], TNT | Shampoo | KFAC]] = {
    "empirical": lambda model: TNT(model.parameters()),
    "sampled": lambda model: TNT(model.parameters(), likelihood="categorical"),
    "shampoo": lambda model: Shampoo(model.parameters()),
    "kfac": lambda model: KFAC(model, likelihood="categorical"),
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_the_default_trains_as_it_stands(name: str) -> None:
    torch.manual_seed(0)
    model = conv_net()
    opt = DEFAULTS[name](model)
    losses = train(model, opt, range(60), data=images)
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5])


def test_intervals_grow_for_longer_without_a_likelihood() -> None:
    """A refresh with sampled labels costs a second backward."""
    for likelihood, default in ((None, 2000), ("categorical", 500)):
        groups = [
            TNT(net().parameters(), likelihood=likelihood, **given).param_groups[0]
            for given in ({}, {"interval_warmup": 7})
        ]
        assert [group["interval_warmup"] for group in groups] == [default, 7]


def test_the_papers_form_has_the_papers_settings() -> None:
    group = TNT.paper(net().parameters(), likelihood="categorical").param_groups[0]
    settings = {"lr": 1e-4, "damping": 0.01, "stat_interval": 10, "inverse_interval": 100}
    assert {name: group[name] for name in (*FORM, *settings)} == {**FORM, **settings}
    opt = TNT.paper(net().parameters(), "mnist", momentum=0.5)
    group = opt.param_groups[0]
    assert (group["lr"], group["damping"], group["momentum"]) == (1e-4, 0.1, 0.5)
    assert (group["stat_interval"], group["inverse_interval"]) == (1, 20)
    assert opt.likelihood == "bernoulli"
    group = TNT.paper(net().parameters(), "vgg16", likelihood=None).param_groups[0]
    assert (group["lr"], group["weight_decay"]) == (3e-6, 100.0)
    assert Shampoo.paper(net().parameters(), "resnet32").param_groups[0]["lr"] == 0.01


def test_an_unknown_problem_is_refused() -> None:
    with pytest.raises(ValueError, match=r"problem must be one of mnist, .*, got 'cifar'"):
        TNT.paper(net().parameters(), "cifar")


@pytest.mark.parametrize("name", PAPER)
def test_every_setting_of_the_tables_is_accepted(name: str) -> None:
    method: Any = {"Shampoo": Shampoo, "KFAC": KFAC}.get(name, TNT)
    more = {"likelihood": None} if name == "TNT-EF" else {}
    for problem, settings in PAPER[name].items():
        model = net()
        opt = method.paper(model if name == "KFAC" else model.parameters(), problem, **more)
        held = {**vars(getattr(opt, "_sampling", opt)), **vars(opt), **opt.param_groups[0]}
        assert {option: held[option] for option in settings} == settings


# ------------------------------------------------------------------ vectors


@factored
def test_vectors_take_the_momentum_without_decay(name: str) -> None:
    p, q = weight(3, 4), weight(5)
    start = q.detach().clone()
    run = Dictated(name, [p, q], precondition_1d=False, lr=0.1, weight_decay=0.3)
    first, second = noise(5), noise(5)
    assert not run.opt.state[q]  # reading it leaves an empty entry, which does no harm
    run.step([noise(3, 4), first], [noise(3, 4), None] if name == "sampled" else None)
    run.step([noise(3, 4), second], [noise(3, 4), None] if name == "sampled" else None)
    momentum = 0.9 * first + second
    close(q, start - 0.1 * first - 0.1 * momentum)
    assert run.opt.state[q]["stats"] == [] and run.opt.state[p]["stats"] != []
    assert run.opt.failures() == NO_FAILURES


@pytest.mark.parametrize("graft", [None, "adam"])
def test_only_vectors_without_statistics_are_not_decayed(graft: str | None) -> None:
    start = net(torch.float64)
    for precondition_1d in (False, True):
        plain, decayed = copy.deepcopy(start), copy.deepcopy(start)
        settings: dict[str, Any] = {"precondition_1d": precondition_1d, "graft": graft}
        train(plain, made("empirical", plain, **settings), range(1))
        train(decayed, made("empirical", decayed, weight_decay=0.5, **settings), range(1))
        for p, q in zip(plain.parameters(), decayed.parameters(), strict=True):
            assert torch.equal(p, q) == (p.dim() < 2 and not precondition_1d)


# ------------------------------------------------------------------ out of reach


def take(model: ValueHead, opt: TNT, step: int, *, both: bool = False) -> None:
    x, y = batch(step)
    opt.zero_grad()
    policy, value = model(x.float())
    opt.observe(torch.cat([policy, value], 1) if both else policy)
    (cross_entropy(policy, y) + value.square().mean()).backward()
    opt.step()


@pytest.mark.parametrize("form", [TNT, TNT.paper])
def test_what_no_output_reaches_is_trained_with_one_warning(form: Any) -> None:
    torch.manual_seed(0)
    model = ValueHead()
    opt = form(model.named_parameters(), lr=0.01, stat_interval=1, likelihood="categorical")
    before = model.value.weight.detach().clone()
    with pytest.warns(
        RuntimeWarning, match=r"does not depend on parameter 'value\.weight'"
    ) as found:
        take(model, opt, 0)
    assert len(found) == 1
    take(model, opt, 1)
    assert not torch.equal(model.value.weight, before)
    unreached = 1 if form is TNT else 2  # a bias has no statistics by default
    assert opt.failures() == NO_FAILURES | {"unreached": unreached}


def test_what_an_output_reaches_later_gets_statistics_and_keeps_its_momentum() -> None:
    torch.manual_seed(0)
    model = ValueHead()
    opt = TNT.paper(
        model.named_parameters(), lr=0.01, stat_interval=2, graft="adam", likelihood="categorical"
    )
    with pytest.warns(RuntimeWarning, match="does not depend on"):
        take(model, opt, 0)
    take(model, opt, 1)
    momentum = opt.state[model.value.weight]["momentum"].clone()
    take(model, opt, 2, both=True)
    state = opt.state[model.value.weight]
    assert state["first_step"] == 2 and state["updates"] == 3
    close(state["momentum"], 0.9 * momentum + model.value.weight.grad)
    assert opt.failures() == NO_FAILURES


def test_a_parameter_out_of_reach_resumes() -> None:
    torch.manual_seed(0)
    model = ValueHead()
    opt = TNT.paper(model.named_parameters(), lr=0.01, stat_interval=2, likelihood="categorical")
    with pytest.warns(RuntimeWarning, match="does not depend on"):
        take(model, opt, 0)
    twin = copy.deepcopy(model)
    other = TNT.paper(twin.named_parameters(), lr=0.01, stat_interval=2, likelihood="categorical")
    other.load_state_dict(through_a_file(opt.state_dict()))
    for step, both in enumerate([True, False, False], 1):  # one reaches it between refreshes
        take(model, opt, step, both=both)
        with pytest.warns(RuntimeWarning, match="depend on") if step == 2 else nullcontext():
            take(twin, other, step, both=both)
        assert opt.failures() == other.failures() == NO_FAILURES | {"unreached": 2}
    assert all(map(torch.equal, values(model), values(twin)))


def test_states_to_load_into_have_the_shapes_of_the_saved_ones() -> None:
    """torch.distributed.checkpoint loads in place."""
    model = ValueHead()
    opt, empty = (TNT(model.parameters(), likelihood="categorical") for _ in range(2))
    with pytest.warns(RuntimeWarning, match="does not depend on"):
        take(model, opt, 0)
    empty.allocate_state(unreached=[model.value.weight])
    for param in model.parameters():
        saved, zeros = (optimizer.state[param] for optimizer in (opt, empty))
        assert saved.keys() == zeros.keys()
        for name in ("stats", "factors"):
            assert [t.shape for t in saved[name]] == [t.shape for t in zeros[name]]


def test_a_group_that_joins_late_refreshes_its_factors_with_every_statistic() -> None:
    """Its first factors come from one sample; the warm-up of the intervals is over."""
    model = net()
    opt = TNT(
        model[0].parameters(),
        stat_interval=2,
        inverse_interval=50,
        interval_warmup=4,
        likelihood="categorical",
    )
    train(model, opt, range(6))
    opt.add_param_group({"params": list(model[2].parameters())})
    factors = []
    for step in range(6, 14):
        train(model, opt, [step])
        factors.append(opt.state[model[2].weight]["factors"][0].clone())
    changed = [not torch.equal(a, b) for a, b in itertools.pairwise(factors)]
    assert sum(changed) == 3


def test_the_estimator_is_a_setting_of_a_group() -> None:
    """Both groups have the statistics of an optimizer of their own."""
    model = net()
    halves = [list(layer.parameters()) for layer in (model[0], model[2])]
    groups = [{"params": halves[0]}, {"params": halves[1], "estimator": "moments"}]
    opt, twin = TNT(groups, lr=0.0, likelihood="categorical"), copy.deepcopy(model)
    other = TNT(twin.parameters(), lr=0.0, estimator="moments", likelihood="categorical")
    train(model, opt, range(2))
    train(twin, other, range(2))
    same = [
        all(map(torch.equal, opt.state[p]["stats"], other.state[q]["stats"]))
        for p, q in zip(model.parameters(), twin.parameters(), strict=True)
        if p.dim() == 2
    ]
    assert same == [False, True]
    with pytest.raises(ValueError, match="^estimator must be one of 'moments', 'mle', got 'ml'$"):
        TNT(net().parameters(), estimator="ml")
    with pytest.raises(ValueError, match="^estimator must be 'moments' for Shampoo, got 'mle'"):
        Shampoo([{"params": net().parameters(), "estimator": "mle"}])


def test_a_subclass_without_a_signature_has_the_papers_form() -> None:
    class Own(TNT):
        def __init__(self, params: Any, **options: Any) -> None:
            super().__init__(params, **options)

    group = Own.paper(net().parameters(), "mnist").param_groups[0]
    assert {name: group[name] for name in FORM} == FORM


def test_a_warm_start_without_matrices_does_nothing() -> None:
    model = nn.LayerNorm(3)
    opt = TNT(model.parameters(), likelihood="categorical")
    opt.warm_start(model(torch.randn(4, 3)) for _ in range(2))
    assert not opt.state


def test_a_mismatch_is_noticed_after_a_skipped_step() -> None:
    """GradScaler skips the first step; its gradient at the output tells nothing."""
    model = net()
    opt = TNT(model.parameters(), likelihood="categorical")
    output = model(batch(0)[0].float())
    opt.observe(output)
    (math.inf * output.square().mean()).backward()
    opt.zero_grad()
    output = model(batch(1)[0].float())
    opt.observe(output)
    (output - 1).square().mean().backward()
    with pytest.warns(RuntimeWarning, match="does not fit the training loss"):
        opt.step()
