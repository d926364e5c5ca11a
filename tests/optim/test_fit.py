"""Parameters that a user changes between steps: states and gradients that no longer fit."""

import copy
import math
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from conftest import Snapshot
from drawn import noise, weight
from optimizers import EVERY, Dictated, every, factored, made, moved, train, values
from torch import Tensor, nn

from tnt_optim import KFAC, TNT, Shampoo, with_fallback
from tnt_optim.fit import Fit

# No refresh is due after the first step.
RARE = {"stat_interval": 100, "inverse_interval": 100, "interval_warmup": 0}
CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda w: w.t().contiguous(),
    "grown": lambda w: torch.cat([w, w]),
    "pruned": lambda w: w[:5].clone(),
    # Its modes are the same, but a transposed kernel's would be, too.
    "reshaped": lambda w: w.reshape(8, 3, 3),
}


def wide_batch(step: int) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(step)
    return torch.randn(7, 9, generator=rng), torch.randint(3, (7,), generator=rng)


def trained(name: str) -> tuple[nn.Sequential, Any]:
    """A float64 model with a first layer (8, 9), and its optimizer after one step."""
    layers = [nn.Linear(9, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 12)]
    model = nn.Sequential(*layers).double()
    own = {} if name in ("kfac", "eigenbasis") else {"merge_small_dims": "kernel"}
    opt = made(name, model, named=True, graft="adam", **RARE, **own)
    train(model, opt, [0], data=wide_batch)
    return model, opt


def set_gradients(model: nn.Module) -> None:
    for param in model.parameters():
        param.grad = noise(*param.shape)


def refuses_to_step(model: nn.Module, opt: Any, message: str) -> None:
    """Steps raise, also when repeated, and nothing has changed."""
    before, counts = Snapshot(model.parameters(), opt), [g.get("step") for g in opt.param_groups]
    for _ in range(2):
        with pytest.raises(RuntimeError, match=message):
            opt.step()
        before.assert_unchanged()
    assert [g.get("step") for g in opt.param_groups] == counts


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", [*EVERY, "eigenbasis"])
def test_a_changed_shape_is_refused_and_can_be_repaired(name: str, change: str) -> None:
    model, opt = trained(name)
    twin = copy.deepcopy((model, opt))
    param = model[0].weight
    old, param.data = param.data, CHANGES[change](param.data)
    set_gradients(model)
    refuses_to_step(model, opt, r"0\.weight.*del opt\.state\[param\].*load a state")
    param.data = old
    for m, o in ((model, opt), twin):
        for number, p in enumerate(m.parameters()):
            p.grad = torch.full_like(p, 0.1 * number)
        o.step()
    assert not any(moved(model, values(twin[0])))


@pytest.mark.parametrize("place", ["0.bias", "1.weight", "3.bias"])
@pytest.mark.parametrize("name", [*EVERY, "eigenbasis"])
def test_vectors_and_parameters_outside_of_layers_are_checked_too(name: str, place: str) -> None:
    """The fallback's also: before main moves."""
    model, opt = trained(name)
    param = model.get_parameter(place)
    param.data = torch.cat([param.data, param.data])
    set_gradients(model)
    refuses_to_step(model, opt, rf"{place.replace('.', '[.]')}.*del opt\.state\[param\]")


@pytest.mark.parametrize("name", ["empirical", "shampoo", "fallback", "sampled", "kfac"])
def test_a_parameter_starts_over_without_its_state(name: str) -> None:
    """The others go on; the new state is that of the new shape, with one update."""
    model, opt = trained(name)
    param = model[0].weight
    param.data = torch.cat([param.data, noise(8, 2)], 1)
    del opt.state[param]
    opt.zero_grad()
    output = model(noise(7, 11))
    opt.observe(output)
    output.square().sum().backward()
    opt.step()
    assert opt.state[param]["momentum"].shape == (8, 12 if name == "kfac" else 11)
    assert opt.state[param]["updates"] == 1 and opt.state[model[3].weight]["updates"] == 2
    assert [len(s) for s in opt.state[param]["stats"]] == [8, 12 if name == "kfac" else 11]


def refuses_dictated(run: Dictated, message: str) -> None:
    """As ``refuses_to_step``, on random gradients."""
    for _ in range(2):
        for param in run.params:
            param.grad = None
        before = run.snapshot()
        with pytest.raises(RuntimeError, match=message):
            run.step([noise(*p.shape) for p in run.params], [None] * len(run.params))
        for param in run.params:
            param.grad = None
        before.assert_unchanged()


@factored
def test_no_group_moves_before_a_later_one_is_refused(name: str) -> None:
    run = Dictated(name, [{"params": [weight(3, 2)]}, {"params": [weight(12, 6)]}], **RARE)
    run.step([noise(3, 2), noise(12, 6)])
    run.params[1].data = noise(6, 12)
    refuses_dictated(run, r"parameter 0 of group 1, shape \(6, 12\)")


def flat(shape: Sequence[int]) -> tuple[int, ...]:
    return (math.prod(shape),)


@pytest.mark.parametrize("copied", [None, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
@pytest.mark.parametrize("name", ["empirical", "shampoo"])
def test_a_shape_with_the_same_modes_is_another_shape(name: str, copied: Any) -> None:
    """A function gives all shapes one mode. Copies know the shape, too."""
    run = Dictated(name, [{"params": [weight(12, 6)], "modes": flat}])
    run.step([noise(12, 6)])
    param, opt = run.params[0], run.opt
    param.data = param.data.t().contiguous()
    param.grad = noise(6, 12)
    if copied is not None:
        param, opt = copied((param, opt))
        param.grad = noise(6, 12)
    with pytest.raises(RuntimeError, match=r"the shape that its state was made for, \(12, 6\)"):
        opt.step()
    # To load it is to say that it fits.
    opt.load_state_dict(opt.state_dict())
    opt.step()


@factored
def test_a_state_that_is_moved_to_another_parameter_must_fit_it(name: str) -> None:
    run = Dictated(name, [weight(3, 2), weight(12, 6)], merge_small_dims="kernel", **RARE)
    run.step([noise(3, 2), noise(12, 6)])
    old, opt = run.params[1], run.opt
    for new in (weight(6, 12), weight(13, 6), weight(12, 3, 2)):
        opt.param_groups[0]["params"][1] = run.params[1] = new
        opt.state[new] = opt.state.pop(old)
        old = new
        refuses_dictated(run, r"parameter 1 of group 0.*\(12, 6\): set the parameter back")
    # To load it is to say that it fits. Its modes do.
    opt.load_state_dict(opt.state_dict())
    moves = run.step([noise(3, 2), noise(12, 3, 2)], [None, None])
    assert all(move.abs().max() > 0 for move in moves)


@factored
@pytest.mark.parametrize("moves", [False, True])
def test_a_state_that_the_user_adapts_is_checked_by_its_own_shapes(name: str, moves: bool) -> None:
    """As when Gaussians are split: the same dictionary with other tensors, here of one more row."""
    run = Dictated(name, [{"params": [weight(3, 2)], "max_factor_dim": 2}], **RARE)
    run.step([noise(3, 2)])
    (old,), opt = run.params, run.opt
    state, grown = opt.state.pop(old), torch.cat([old.detach(), noise(1, 2)])
    new = nn.Parameter(grown) if moves else old
    new.data = grown
    opt.param_groups[0]["params"], run.params, opt.state[new] = [new], [new], state
    state["momentum"] = torch.cat([state["momentum"], noise(1, 2)])
    refuses_dictated(run, r"parameter 0 .*: (stats|factors) must have shapes .*load a state")
    for key in ("stats", "factors"):
        state[key] = [torch.ones(4, dtype=torch.float64), state[key][1]]
    before = state["momentum"].clone()
    (gradient,) = gradients = [noise(4, 2)]
    run.step(gradients, [None])
    torch.testing.assert_close(opt.state[new]["momentum"], 0.9 * before + gradient)


def test_a_fallbacks_state_that_the_user_adapts_goes_on() -> None:
    main, rest = weight(3, 2), weight(4, 2)
    opt = with_fallback(Shampoo([main]), torch.optim.AdamW([rest]))
    main.grad, rest.grad = noise(3, 2), noise(4, 2)
    opt.step()
    rest.data, rest.grad = noise(5, 2), noise(5, 2)
    state = opt.state[rest]
    for key in ("exp_avg", "exp_avg_sq"):
        state[key] = torch.cat([state[key], torch.zeros(1, 2)])
    opt.step()
    assert state["step"] == 2


@factored
def test_states_are_not_swapped_between_shapes(name: str) -> None:
    run = Dictated(name, [weight(3, 2), weight(2, 3)], **RARE)
    run.step([noise(3, 2), noise(2, 3)])
    (a, b), state = run.params, run.opt.state
    state[a], state[b] = state[b], state[a]
    refuses_dictated(run, r"parameter 0 of group 0, shape \(3, 2\) must have .* \(2, 3\)")


@every
@pytest.mark.parametrize("change", ["transposed", "grown"])
def test_other_calls_refuse_a_changed_shape(name: str, change: str) -> None:
    model, opt = trained(name)
    saved = copy.deepcopy(opt.state_dict())
    model[0].weight.data = CHANGES[change](model[0].weight.data)
    before = Snapshot(model.parameters(), opt)
    for call in (lambda: opt.warm_start(iter([])), opt.allocate_state):
        with pytest.raises(RuntimeError, match=r"0\.weight.*del opt\.state"):
            call()
    with pytest.raises(ValueError, match="momentum"):
        opt.load_state_dict(saved)
    before.assert_unchanged()


@every
def test_a_gradient_of_another_dtype_is_refused(name: str) -> None:
    """In the first step, in which no state could be checked."""
    model = nn.Sequential(nn.Linear(9, 8), nn.Tanh(), nn.Linear(8, 3))
    opt = made(name, model)
    x, y = wide_batch(0)
    output = model(x)
    opt.observe(output)
    nn.functional.cross_entropy(output, y).backward()
    model[2].weight.data = model[2].weight.data.double()
    before = Snapshot(model.parameters(), opt).content
    with pytest.raises(RuntimeError, match=r"gradient of .*float64 .*float32 of shape \(3, 8\)"):
        opt.step()
    after = Snapshot(model.parameters(), opt).content
    assert torch.equal(before["params"][0], after["params"][0]) and not opt.state
    assert all(group.get("step", 0) == 0 for group in opt.param_groups)


@every
def test_a_gradient_of_another_shape_is_refused(name: str) -> None:
    model, opt = trained(name)
    set_gradients(model)
    param = model[3].bias
    param.data = noise(4)
    del opt.state[param]
    refuses_to_step(model, opt, r"gradient of .*3\.bias|gradient of parameter 2 of the fallback")


def test_a_gradient_on_another_device_is_refused() -> None:
    """As it is after ``p.data = p.data.cuda()``; the meta device stands for the GPU."""
    param = nn.Parameter(noise(3, 2).to("meta"))
    with pytest.raises(RuntimeError, match=r"gradient of it must fit .* on meta, got .* on cpu"):
        Fit().check([param], {}, lambda _: "it", lambda *_: None, {param: noise(3, 2)})


def test_an_observation_of_another_shape_is_refused() -> None:
    for method in (TNT, KFAC):
        model: Any = nn.Sequential(nn.Linear(4, 6)).double()
        opt = method(model if method is KFAC else model.parameters(), likelihood="categorical")
        output = model(noise(5, 4))
        opt.observe(output)
        output.sum().backward()
        model[0].weight.data = noise(6, 2)
        model[0].weight.grad = noise(6, 2)
        before = values(model)
        with pytest.raises(RuntimeError, match="changed since|observe an output again"):
            opt.step()
        assert not any(moved(model, before)) and not opt.state


def test_an_empty_state_that_the_fallback_fills_is_checked() -> None:
    main, rest = weight(3, 2), weight(4, 2)
    opt = with_fallback(Shampoo([main]), torch.optim.AdamW([rest]))
    assert not opt.fallback.state[rest]  # which leaves an empty entry
    for _ in range(2):
        main.grad, rest.grad = noise(3, 2), noise(4, 2)
        opt.step()
    before = main.detach().clone()
    rest.data, rest.grad = noise(2, 4), noise(2, 4)
    with pytest.raises(RuntimeError, match=r"parameter 0 of the fallback's group 0.*\(4, 2\)"):
        opt.step()
    assert torch.equal(main, before)
