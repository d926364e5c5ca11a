"""Frozen parts, heads used in turn, heads aside, and parameters outside of all layers."""

import copy
import math

import pytest
import torch
from drawn import close
from test_kfac_failures import train_linear
from test_kfac_observations import conv_net, train
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tnt_optim import KFAC

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("inverse", ["damped", "eigenbasis"])
@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_frozen_part_counts_as_zero_and_stays(frozen: str, inverse: str) -> None:
    model = nn.Linear(3, 2).double()
    getattr(model, frozen).requires_grad_(False)
    start = torch.cat([model.weight, model.bias[:, None]], 1).detach()
    opt = KFAC(model, lr=0.1, damping=0.3, inverse=inverse, weight_decay=0.5)
    x = torch.randn(5, 3).double()
    train_linear(model, opt, x)
    g, a = opt.state[model.weight]["stats"]
    m = torch.ones(2, 4).double()
    m[:, slice(0, 3) if frozen == "weight" else 3] = 0
    eye_g, eye_a = torch.eye(2).double(), torch.eye(4).double()
    if inverse == "damped":
        root = math.sqrt(0.3)
        fisher = torch.kron(g + root * eye_g, a + root * eye_a)
    else:
        fisher = torch.kron(g, a) + 0.3 * torch.kron(eye_g, eye_a)
    wanted = 0.1 * (torch.linalg.solve(fisher, m.reshape(-1)).reshape(2, 4) + 0.5 * start)
    moved = start - torch.cat([model.weight, model.bias[:, None]], 1).detach()
    columns = slice(3, 4) if frozen == "weight" else slice(0, 3)
    close(moved[:, columns], wanted[:, columns])
    still = slice(0, 3) if frozen == "weight" else slice(3, 4)
    assert not moved[:, still].any()
    getattr(model, frozen).requires_grad_(True)
    for _ in range(2):
        train_linear(model, opt, x)
    assert bool((start != torch.cat([model.weight, model.bias[:, None]], 1)).all())


def test_frozen_layer_joins_when_it_thaws() -> None:
    model = conv_net()
    model[0].requires_grad_(False)
    opt = KFAC(model, stat_interval=10)
    train(model, opt, 2)
    assert not opt.state.get(model[0].weight)
    before = model[0].weight.detach().clone()
    model[0].requires_grad_(True)
    train(model, opt)  # not a step of the schedule
    assert not torch.equal(before, model[0].weight)


class Heads(nn.Module):
    """One body, two heads, one of which a batch uses."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 5)
        self.heads = nn.ModuleList(nn.Linear(5, 3) for _ in range(2))

    def forward(self, x: Tensor, head: int) -> Tensor:
        """Logits of one head."""
        return self.heads[head](torch.tanh(self.body(x)))


def test_heads_used_in_turn_are_all_trained() -> None:
    model = Heads()
    opt = KFAC(model, stat_interval=10)
    before = copy.deepcopy(model.state_dict())
    for head in [0, 0, 1, 0, 1]:
        opt.zero_grad()
        output = model(torch.randn(8, 4), head)
        opt.observe(output)
        stats = [
            s.clone() for s in opt._layer_states().get(model.body.weight, {"stats": []})["stats"]
        ]
        output.square().sum().backward()
        opt.step()
        if stats:  # a newcomer's first statistics are no one else's
            held = opt.state[model.body.weight]["stats"]
            assert all(torch.equal(a, b) for a, b in zip(stats, held, strict=True))
    assert all(not torch.equal(before[k], v) for k, v in model.state_dict().items())


def test_layer_that_the_loss_reaches_but_the_output_does_not_waits() -> None:
    model = Heads()
    opt = KFAC(model, stat_interval=1)
    still = model.heads[1].weight.detach().clone()
    x = torch.randn(8, 4)
    for _ in range(2):
        opt.zero_grad()
        output = model(x, 0)
        opt.observe(output)
        (output.square().sum() + model(x, 1).square().sum()).backward()
        opt.step()
    assert torch.equal(model.heads[1].weight, still)
    opt.warm_start(model(x, head) for head in (0, 1))
    opt.param_groups[0]["step"] = 1
    opt.param_groups[0]["stat_interval"] = 2
    opt.step()
    assert not torch.equal(model.heads[1].weight, still)


class Auxiliary(nn.Module):
    """A head that the loss has and the output has not."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.aside = nn.Linear(4, 5), nn.Linear(5, 3), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Logits, and what the head aside says."""
        hidden = torch.tanh(self.body(x))
        return self.head(hidden), self.aside(hidden)


def test_layer_that_outputs_never_reach_is_asked_for_at_scheduled_steps_only() -> None:
    model = Auxiliary()
    opt = KFAC(model, stat_interval=4)
    still = copy.deepcopy(model.aside.state_dict())
    for t in range(9):
        opt.zero_grad()
        output, aside = model(torch.randn(8, 4))
        calls: list[Tensor] = []
        output.register_hook(calls.append)
        if t % 4 == 0 or t == 2:
            opt.observe(output)
        assert len(calls) == (t % 4 == 0)
        assert opt._observed.called == ({0, 1, 2} if t % 4 == 0 else set())
        (output.square().sum() + aside.square().sum()).backward()
        opt.step()  # never refused, though observe was mostly not called
        assert opt._observed.unreached == {2: True}
    assert all(torch.equal(still[k], v) for k, v in model.aside.state_dict().items())
    opt.param_groups[0]["step"] = 12
    opt.observe(torch.cat(model(torch.randn(8, 4)), dim=1))
    opt.step()
    assert opt._observed.unreached == {}
    assert all(not torch.equal(still[k], v) for k, v in model.aside.state_dict().items())


def test_layer_unused_so_far_costs_nothing_and_joins_when_it_is_used() -> None:
    """Between the scheduled steps, at its first use, whatever was asked for before."""
    model = Heads()
    sampled: list[Tensor] = []

    def likelihood(output: Tensor) -> Tensor:
        sampled.append(output)
        return cross_entropy(output, output.detach().argmin(1))

    opt = KFAC(model, stat_interval=10, likelihood=likelihood)
    before = model.heads[1].weight.detach().clone()
    for head in [0, 0, 0, 1]:
        opt.zero_grad()
        output = model(torch.randn(8, 4), head)
        sampled.clear()
        opt.observe(output)
        assert len(sampled) == (opt.param_groups[0]["step"] == 0 or head == 1)
        output.square().sum().backward()
        opt.step()
        assert opt._observed.unreached == ({2: False} if head == 0 else {})
    assert not torch.equal(before, model.heads[1].weight)


def test_layer_unused_at_the_scheduled_step_waits_where_later_ones_are_not_observed() -> None:
    model = Heads()
    opt = KFAC(model, stat_interval=3)
    before = model.heads[1].weight.detach().clone()
    for t, head in enumerate([0, 1, 1, 1]):
        opt.zero_grad()
        output = model(torch.randn(8, 4), head)
        if t % 3 == 0:
            opt.observe(output)
        output.square().sum().backward()
        opt.step()
        assert torch.equal(before, model.heads[1].weight) == (t < 3)


def test_copies_and_loaded_states_know_who_was_missed() -> None:
    model = Auxiliary()
    opt = KFAC(model, stat_interval=4)
    opt.observe(model(torch.randn(8, 4))[0])
    opt.step()
    assert copy.deepcopy((model, opt))[1]._observed.unreached == {2: True}
    opt.load_state_dict(opt.state_dict())
    assert opt._observed.unreached == {}  # asked for again, once


def test_parameters_outside_of_layers_take_the_momentum() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2)).double()
    opt = KFAC(model, lr=0.1, momentum=0.5, weight_decay=0.2)
    norm, momentum = model[1].weight, torch.zeros(4).double()
    for _ in range(3):
        opt.zero_grad()
        output = model(torch.randn(5, 3).double())
        opt.observe(output)
        output.square().sum().backward()
        momentum = 0.5 * momentum + norm.grad
        expected = norm.detach() - 0.1 * (momentum + 0.2 * norm.detach())
        opt.step()
        close(norm.detach(), expected)
