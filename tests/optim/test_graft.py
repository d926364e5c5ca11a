"""Grafting that is switched on, off and on again, and statistics that start over in new modes."""

import pytest
import torch
from drawn import close, noise, weight
from tolerances import FLOAT64_TRAJECTORY
from torch import Tensor, nn

from tnt_optim import TNT, update
from tnt_optim.directions import Workspace

LR, MU = 0.01, 0.9


def drawn_gradients(count: int) -> Tensor:
    return torch.randn(count, 4, 6, generator=torch.Generator().manual_seed(0)).double()


def take_step(opt: TNT, param: nn.Parameter, gradient: Tensor) -> float:
    """One step; returns how far the parameter moved."""
    before = param.detach().clone()
    param.grad = gradient.clone()
    opt.step()
    return float((param.detach() - before).norm())


def adams_length(first: Tensor, updates: int, second: Tensor, squares: int) -> float:
    """The norm of Adam's step.

    Args:
        first: the plain sum m <- MU m + g.
        updates: of it.
        second: the sum of 0.01 0.99^j g^2.
        squares: how many it has.
    """
    mean = (1 - MU) * first / (1 - MU**updates)
    return LR * float((mean / ((second / (1 - 0.99**squares)).sqrt() + 1e-8)).norm())


def plain(param: nn.Parameter, graft: str | None) -> TNT:
    return TNT([param], lr=LR, momentum=MU, fisher="empirical", graft=graft)


def test_switched_on_after_a_new_start_it_has_adams_length() -> None:
    """The second moment is young then, and the momentum is not."""
    gradients = drawn_gradients(201)
    param = nn.Parameter(torch.zeros(4, 6, dtype=torch.float64))
    opt = plain(param, None)
    momentum = torch.zeros(4, 6, dtype=torch.float64)
    for gradient in gradients[:200]:
        momentum = MU * momentum + gradient
        take_step(opt, param, gradient)
    opt.param_groups[0]["graft"] = "adam"
    param.grad = gradients[200].clone()
    with pytest.raises(RuntimeError, match="graft='adam' must be set before the first statistics"):
        opt.step()
    opt.warm_start([(param * gradients[0]).sum()])
    moved = take_step(opt, param, gradients[200])
    momentum = MU * momentum + gradients[200]
    wanted = adams_length(momentum, 201, 0.01 * gradients[200] ** 2, 1)
    assert moved == pytest.approx(wanted, rel=FLOAT64_TRAJECTORY)


def test_switched_off_and_on_again_it_has_adams_length() -> None:
    gradients = drawn_gradients(52)
    param = nn.Parameter(torch.zeros(4, 6, dtype=torch.float64))
    opt = plain(param, "adam")
    momentum = torch.zeros(4, 6, dtype=torch.float64)
    for number, gradient in enumerate(gradients[:51]):
        opt.param_groups[0]["graft"] = None if number else "adam"
        momentum = MU * momentum + gradient
        take_step(opt, param, gradient)
    opt.param_groups[0]["graft"] = "adam"
    moved = take_step(opt, param, gradients[51])
    momentum = MU * momentum + gradients[51]
    second = 0.99 * 0.01 * gradients[0] ** 2 + 0.01 * gradients[51] ** 2
    wanted = adams_length(momentum, 52, second, 2)
    assert moved == pytest.approx(wanted, rel=FLOAT64_TRAJECTORY)


def test_a_new_start_in_other_modes_keeps_the_moments() -> None:
    gradients = drawn_gradients(5)
    param = nn.Parameter(torch.zeros(4, 6, dtype=torch.float64))
    opt = plain(param, "adam")
    for gradient in gradients[:3]:
        take_step(opt, param, gradient)
    before = {key: opt.state[param][key].clone() for key in ("momentum", "second_moment")}
    opt.param_groups[0]["modes"] = lambda shape: (2, 2, 6)
    opt.warm_start([(param * gradients[3]).sum()])
    assert [stat.shape for stat in opt.state[param]["stats"]] == [(2, 2), (2, 2), (6, 6)]
    for key, value in before.items():
        assert torch.equal(opt.state[param][key], value.reshape(2, 2, 6))
    # As it would be with those modes from the start.
    other = nn.Parameter(param.detach().clone())
    fresh = plain(other, "adam")
    fresh.param_groups[0]["modes"] = lambda shape: (2, 2, 6)
    fresh.warm_start([(other * gradients[3]).sum()])
    for key, value in before.items():
        fresh.state[other][key].copy_(value.reshape(2, 2, 6))
    fresh.state[other].update(updates=3, second_moment_updates=3)
    fresh.param_groups[0]["step"] = opt.param_groups[0]["step"]
    take_step(opt, param, gradients[4])
    take_step(fresh, other, gradients[4])
    close(param.detach(), other.detach())


# The memory that directions are made in.


def test_workspace_serves_again() -> None:
    workspace = Workspace()
    tensors = [torch.empty(3, 5), torch.empty(7, dtype=torch.float64), torch.empty(0, 2)]
    first = workspace.like(tensors)
    assert first is not None
    for made, tensor in zip(first, tensors, strict=True):
        assert (made.shape, made.dtype) == (tensor.shape, tensor.dtype) and made.is_contiguous()
        made.fill_(1)
    first[0].fill_(2)
    assert bool((first[1] == 1).all())  # none is in another's memory
    again = workspace.like(tensors[:1])
    assert again is not None and again[0].data_ptr() == first[0].data_ptr()
    larger = workspace.like([torch.empty(1024)])
    assert larger is not None and larger[0].numel() == 1024
    assert workspace.like([]) is None
    assert workspace.like([torch.empty(3, device="meta")]) is None


@pytest.mark.parametrize("graft", ["adam", "sgd"])
def test_steps_in_a_workspace_are_the_steps_without(
    graft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In lots that each take the memory of the one before."""
    monkeypatch.setattr(update, "_BUCKET", 20)
    trained = []
    for kept in (True, False):
        torch.manual_seed(5)
        params = [nn.Parameter(weight(*shape)) for shape in ((4, 3), (5,), (2, 6), (7, 2))]
        opt = TNT(params, lr=0.1, damping=0.1, fisher="empirical", graft=graft)
        if not kept:
            monkeypatch.setattr(opt._workspace, "like", lambda tensors: None)
        for _ in range(4):
            for param in params:
                param.grad = noise(*param.shape)
            opt.step()
        trained.append(params)
    for one, other in zip(*trained, strict=True):
        assert torch.equal(one, other)
