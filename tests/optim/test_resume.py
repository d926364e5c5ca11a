"""Training that resumes from a saved state, or from a copy, goes on to the bit."""

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from conftest import Snapshot, observed_gradients
from drawn import noise, weight
from optimizers import (
    EVERY,
    FACTORED,
    METHODS,
    Dictated,
    any_likelihood,
    batch,
    conv_net,
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
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import lr_scheduler

from tnt_optim import TNT

FORMS: dict[str, dict[str, Any]] = {
    "paper": {},
    "diagonal": {"max_factor_dim": 3},
    "adam": {"graft": "adam", "relative_damping": True, "weight_decay": 0.1},
    "sgd": {"graft": "sgd"},
    "blocks": {"block_size": 3, "graft": "adam"},
    "merged": {"merge_small_dims": "kernel", "relative_damping": True},
    "stochastic": {"rounding": "stochastic", "graft": "adam"},
    "master": {"rounding": "master", "block_size": 3},
    "vectors": {"precondition_1d": False},
    "plain blocks": {"precondition_1d": False, "graft": "adam", "block_size": 3},
    "float64": {},
}
CASES = [
    *((name, form) for name in FACTORED for form in FORMS),
    *((name, form) for name in ("kfac", "eigenbasis") for form in ("paper", "adam", "float64")),
]


@any_likelihood
@pytest.mark.parametrize(("warm", "stop"), [(False, 1), (True, 4), (False, 7)])
@pytest.mark.parametrize(("name", "form"), CASES)
def test_resumed_training_is_bit_for_bit_the_uninterrupted(
    name: str, form: str, warm: bool, stop: int
) -> None:
    """After one step, where all is due (4 = T2), and inside both intervals (7; T1 = 2)."""
    settings = {"lr": 1e-3, **FORMS[form]}
    if name == "sampled" and form in ("diagonal", "sgd"):
        settings.update(likelihood="gaussian" if form == "sgd" else "bernoulli", seed=5)
    dtype = torch.bfloat16 if "rounding" in settings else torch.float32
    model = conv_net(torch.float64 if form == "float64" else dtype)
    opt = made(name, model, **settings)
    if warm:
        warm_start(opt, model, data=images)
    train(model, opt, range(stop), data=images)
    files = through_a_file((model.state_dict(), opt.state_dict()))
    train(model, opt, range(stop, stop + 6), data=images)
    resumed = copy.deepcopy(model)
    resumed.load_state_dict(files[0])
    fresh = made(name, resumed, **settings)
    fresh.load_state_dict(files[1])
    train(resumed, fresh, range(stop, stop + 6), data=images)
    Snapshot(model.parameters(), opt).assert_equals(Snapshot(resumed.parameters(), fresh))
    kept = [key for state in fresh.state.values() for key in state]
    assert ("master" in kept) == (form == "master")


SKIPPED: list[tuple[int, tuple[int, ...], dict[str, Any]]] = [
    (0, (), {}),
    (4, (), {"max_factor_dim": 3}),
    (4, (4, 5), {"graft": "adam"}),
    (4, (5,), {"rounding": "master"}),
]


@pytest.mark.parametrize(
    ("name", "first", "bad", "settings"),
    [(name, *case) for name in ("sampled", "fallback") for case in SKIPPED]
    + [("kfac", *SKIPPED[0]), ("kfac", *SKIPPED[2])],
)
def test_training_resumes_bit_for_bit_after_steps_that_were_skipped(
    name: str, first: int, bad: tuple[int, ...], settings: dict[str, Any]
) -> None:
    """As GradScaler skips them: their observations count for the step that comes."""
    model = net(torch.bfloat16 if "rounding" in settings else torch.float32)
    opt = made(name, model, lr=1e-3, **settings)
    main = getattr(opt, "main", opt)
    train(model, opt, range(first))
    assert "observed" not in opt.state_dict()
    for step in (first, first + 1):
        x, _ = batch(step)
        output = model(x.to(model[0].weight.dtype))
        opt.observe(output * math.inf if step in bad else output)
    opt.zero_grad()
    saved = opt.state_dict()
    assert saved["observed"]["count"] == 2
    files = through_a_file((model.state_dict(), saved))
    resumed = copy.deepcopy(model)
    resumed.load_state_dict(files[0])
    fresh = made(name, resumed, lr=1e-3, **settings)
    fresh.load_state_dict(files[1])
    held = Snapshot(resumed.parameters(), getattr(fresh, "main", fresh))
    main._observed.comparisons.clear()  # a resumed training does not compare
    Snapshot(model.parameters(), main).assert_equals(held)
    train(model, opt, range(first + 2, first + 8))
    train(resumed, fresh, range(first + 2, first + 8))
    Snapshot(model.parameters(), opt).assert_equals(Snapshot(resumed.parameters(), fresh))
    assert "observed" not in opt.state_dict()
    fresh.load_state_dict(files[1])
    fresh.load_state_dict(opt.state_dict())
    assert "observed" not in fresh.state_dict()


def test_saved_observations_follow_the_parameters_dtype_and_numbers() -> None:
    model, opt = trained("sampled", 2)
    opt.observe(model(batch(2)[0].float()))
    saved = through_a_file(opt.state_dict())
    other = net(torch.float64)
    fresh = made("sampled", other)
    fresh.load_state_dict(saved)
    held = observed_gradients(fresh)
    assert [held[p].dtype for p in other.parameters()] == [torch.float64] * 4
    for p, gradient in zip(model.parameters(), held.values(), strict=True):
        assert torch.equal(observed_gradients(opt)[p].double(), gradient)
    train(other, fresh, range(3, 6))
    shuffled = copy.deepcopy(saved)
    shuffled["param_groups"][0]["params"] = [2, 1, 0, 3]
    shuffled["state"] = {}
    refuses(fresh, other, shuffled, r"state_dict\['observed'\].*shape \(3, 6\).*got \(6, 4\)")


@pytest.mark.parametrize(
    ("name", "named", "other_named"),
    [*((n, a, b) for n in [*FACTORED, "fallback"] for a in (0, 1) for b in (0, 1)), ("kfac", 1, 1)],
)
def test_a_state_goes_on_with_and_without_names(name: str, named: int, other_named: int) -> None:
    """To the bit, as does the state saved after it; loading changes no name that is there."""
    model, opt = trained(name, named=bool(named))
    twin = copy.deepcopy(model)
    other = made(name, twin, named=bool(other_named))
    saved = opt.state_dict()
    given, content = through_a_file(saved), leaves(saved)
    other.load_state_dict(given)
    assert leaves(given) == content
    for step in range(5, 11):
        train(model, opt, [step])
        train(twin, other, [step])
        assert not any(moved(model, values(twin)))
    ends = [leaves(o.state_dict()).items() for o in (opt, other)]
    kept, found = ([item for item in end if "param_names" not in item[0]] for end in ends)
    assert kept == found
    # PyTorch's own optimizers keep the tensors of the given state and overwrite them.
    assert (leaves(given) == content) == (name != "fallback")
    names = [n for group in other.param_groups for n in group.get("param_names", [])]
    wanted = ["0.weight", "0.bias", "2.weight", "2.bias"]
    wanted.sort(key=lambda param: name == "fallback" and "bias" in param)
    assert names == (wanted if named or other_named else [])


@pytest.mark.parametrize("name", [*EVERY, "eigenbasis"])
@pytest.mark.parametrize("steps", [0, 5])
@pytest.mark.parametrize("clone", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_have_all_that_is_public_and_go_on_alone(name: str, steps: int, clone: Any) -> None:
    """Also with a scheduler, which puts a ``step`` of its own into the optimizer."""
    model, opt = trained(name, steps)
    public = {key for key in vars(opt) if not key.startswith("_")}
    lr_scheduler.ExponentialLR(opt, 0.9)
    opt.register_step_pre_hook(lambda *_: None)
    twin, other = clone((model, opt))
    assert {key for key in vars(other) if not key.startswith("_")} == public
    assert not other._optimizer_step_pre_hooks
    before = values(model)
    train(twin, other, range(steps, steps + 4))
    assert not any(moved(model, before))
    train(model, opt, range(steps, steps + 4))
    Snapshot(model.parameters(), opt).assert_equals(Snapshot(twin.parameters(), other))


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("graft", [None, "adam"])
def test_a_state_of_another_dtype_is_refused(name: str, graft: str | None) -> None:
    """It loads into the same optimizer, which converts it."""
    model, opt = trained(name, graft=graft)
    model.double()
    before = copy.deepcopy([values(model), opt.state_dict()["state"]])
    with pytest.raises(RuntimeError, match=r"must be torch.float64 for torch.float64, got torch.f"):
        train(model, opt, [5])
    assert leaves(before) == leaves([values(model), opt.state_dict()["state"]])
    opt.load_state_dict(opt.state_dict())
    train(model, opt, range(5, 9))
    assert all(moved(model, before[0]))


@factored
def test_a_state_from_which_adams_graft_is_gone_loads(name: str) -> None:
    """A new start leaves the second moment and its count out together."""
    run = Dictated(name, [weight(4, 3)], graft="adam")
    run.step([noise(4, 3)])
    run.opt.param_groups[0]["graft"] = "rms"
    run.warm_start([[noise(4, 3)]])
    run.step([noise(4, 3)])
    Dictated(name, [weight(4, 3)]).opt.load_state_dict(through_a_file(run.opt.state_dict()))
    run.opt.param_groups[0]["graft"] = "adam"
    with pytest.raises(RuntimeError, match="graft='adam' must be set before the first"):
        run.step([noise(4, 3)])


@pytest.mark.parametrize("full", [False, True])
def test_torchs_functions_for_the_state_by_name(full: bool) -> None:
    """A bias has no statistics: an empty list, which torch drops from a full state."""
    options = StateDictOptions(full_state_dict=full)
    model, other = net(), net()
    opt, fresh = (TNT(m.parameters()) for m in (model, other))
    train(model, opt, range(3))
    fresh.allocate_state()
    saved = get_optimizer_state_dict(model, opt, options=options)
    set_optimizer_state_dict(other, fresh, saved, options=options)
    other.load_state_dict(model.state_dict())
    for m, o in ((model, opt), (other, fresh)):
        train(m, o, range(3, 5))
    assert not any(moved(model, values(other)))


def test_a_state_with_a_modes_function_loads_with_weights_only() -> None:
    def modes(shape: torch.Size) -> tuple[int, ...]:
        return (shape[0] // 2, 2, shape[1])

    run, other = (Dictated("sampled", [{"params": [weight(6, 5)], "modes": modes}]) for _ in "ab")
    run.step([noise(6, 5)])
    other.params[0].data.copy_(run.params[0].detach())
    other.opt.load_state_dict(through_a_file(run.opt.state_dict()))
    gradient = noise(6, 5)
    run.step([gradient])
    other.step([gradient])
    assert torch.equal(run.params[0], other.params[0])
    assert [len(f) for f in other.factors()] == [3, 2, 5]
