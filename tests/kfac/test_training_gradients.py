"""KFAC without a likelihood: statistics of the training's own backward, without ``observe``."""

import copy
from typing import Any

import pytest
import torch
from drawn import close
from kfac_models import Heads, conv_net, held, images
from optimizers import equal, through_a_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from tnt_optim import KFAC

EVERY: dict[str, Any] = {"stat_interval": 1, "inverse_interval": 2, "interval_warmup": 0}


def batches(step: int, count: int = 1) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(step)
    return [(images(), torch.randint(5, (8,))) for _ in range(count)]


def train(model: nn.Module, opt: KFAC, steps: range, micro: int = 1) -> None:
    """Averages ``micro`` batches; a sampled form gets the labels of the training."""
    for step in steps:
        opt.zero_grad()
        for x, y in batches(step, micro):
            output = model(x)
            LABELS[0] = y
            opt.observe(output)
            (cross_entropy(output, y) / micro).backward()
        opt.step()


LABELS = [torch.empty(0)]


def of_the_training(output: Tensor) -> Tensor:
    return cross_entropy(output, LABELS[0])


@pytest.mark.parametrize("inverse", ["damped", "eigenbasis"])
@pytest.mark.parametrize("inplace", [False, True])
def test_it_is_the_sampled_form_at_the_labels_of_the_training(inverse: Any, inplace: bool) -> None:
    runs = []
    for likelihood in (None, of_the_training):
        model = conv_net(inplace=inplace)
        opt = KFAC(model, inverse=inverse, likelihood=likelihood, **EVERY)
        start = [p.detach().clone() for p in model.parameters()]
        train(model, opt, range(6))
        runs.append([p.detach() for p in model.parameters()])
    for own, other, before in zip(*runs, start, strict=True):
        assert not torch.equal(own, before)
        close(own, other)


def test_gradients_accumulate() -> None:
    """Over micro-batches whose loss is divided; the damping is relative, so the scale is free."""
    ends = []
    for micro in (1, 2):
        model = conv_net()
        model[1].eval()
        opt = KFAC(model, **EVERY)
        for step in range(4):
            (x, y), (x2, y2) = batches(step, 2)
            opt.zero_grad()
            if micro == 1:
                cross_entropy(model(torch.cat([x, x2])), torch.cat([y, y2])).backward()
            else:
                (cross_entropy(model(x), y) / 2).backward()
                (cross_entropy(model(x2), y2) / 2).backward()
            opt.step()
        ends.append([p.detach() for p in model.parameters()])
    for own, other in zip(*ends, strict=True):
        close(own, other)


def test_calls_in_one_backward_add_positions() -> None:
    """As a layer that is called twice: A is a sum over both, per example."""
    model = nn.Linear(4, 4).double()
    opt = KFAC(model, **EVERY)
    x = torch.randn(8, 4).double()
    opt.zero_grad()
    h = model(x)
    model(h).square().mean().backward()
    opt.step()
    rows = torch.cat([torch.cat([m, torch.ones(8, 1).double()], 1) for m in (x, h.detach())])
    close(held(opt)[1], rows.T @ rows / 8)


def test_a_head_without_a_gradient_joins_when_it_has_one() -> None:
    model = Heads()
    opt = KFAC(model, stat_interval=3, inverse_interval=3, interval_warmup=0)
    x, y = torch.randn(6, 4).double(), torch.arange(6) % 3
    for step, head in enumerate((0, 0, 1, 1)):
        opt.zero_grad()
        cross_entropy(model(x, head), y).backward()
        opt.step()
        assert bool(opt.state.get(model.heads[1].weight, {}).get("stats")) == (step >= 2)
    assert opt.failures() == {"skipped_statistics": 0, "failed_inverses": 0, "unreached": 0}


def test_checkpointed_layers_are_seen_once() -> None:
    """The forward that the backward repeats gives no second gradient."""
    ends = []
    for checkpointed in (False, True):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
        opt = KFAC(model, **EVERY)
        for step in range(3):
            torch.manual_seed(step)
            x, y = torch.randn(5, 4).double(), torch.arange(5) % 3
            opt.zero_grad()
            out = checkpoint(model, x, use_reentrant=False) if checkpointed else model(x)
            cross_entropy(out, y).backward()
            opt.step()
        ends.append([p.detach() for p in model.parameters()])
    for own, other in zip(*ends, strict=True):
        close(own, other)


def test_a_warm_start_takes_training_losses() -> None:
    model = conv_net()
    opt = KFAC(model, **EVERY)
    buffers = [b.clone() for b in model.buffers()]
    opt.warm_start(cross_entropy(model(x), y) for x, y in batches(0, 3))
    assert equal(buffers, model.buffers())
    assert len(held(opt)) == 6 and all(matrix.any() for matrix in held(opt))
    train(model, opt, range(2))


def test_resumed_and_copied_trainings_go_on_bit_for_bit() -> None:
    model = conv_net()
    opt = KFAC(model, **EVERY)
    train(model, opt, range(3))
    copied, copy_opt = copy.deepcopy((model, opt))
    other = conv_net()
    resumed = KFAC(other, **EVERY)
    state, saved = through_a_file([model.state_dict(), opt.state_dict()])
    other.load_state_dict(state)
    resumed.load_state_dict(saved)
    for net, optimizer in ((model, opt), (copied, copy_opt), (other, resumed)):
        train(net, optimizer, range(3, 6))
    assert equal(model.parameters(), copied.parameters())
    assert equal(model.parameters(), other.parameters())


def test_nothing_is_kept_where_nothing_is_due() -> None:
    """Between refreshes, in eval mode without gradients, and after ``close``."""
    model = conv_net()
    opt = KFAC(model, stat_interval=10, interval_warmup=0)
    train(model, opt, range(2))
    (x, y) = batches(9)[0]
    cross_entropy(model(x), y).backward()
    assert not opt._observed.sums
    opt.param_groups[0]["step"] = 10
    with torch.no_grad():
        model(x)
    assert not opt._observed.sums
    cross_entropy(model(x), y).backward()
    assert len(opt._observed.sums) == 3
    opt.step()
    opt.close()
    opt.param_groups[0]["step"] = 20
    cross_entropy(model(x), y).backward()
    assert not opt._observed.sums


def test_a_loss_that_is_not_finite_keeps_the_statistics() -> None:
    model = conv_net()
    opt = KFAC(model, **EVERY)
    train(model, opt, range(2))
    stats = held(opt)
    opt.zero_grad()
    x, y = batches(5)[0]
    (cross_entropy(model(x), y) * torch.inf).backward()
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    with pytest.warns(RuntimeWarning, match="not finite: they are not refreshed"):
        opt.step()
    assert equal(stats, held(opt))


def test_an_input_that_changes_in_place_is_refused() -> None:
    model = nn.Linear(4, 4)
    KFAC(model)
    h = torch.randn(3, 4, requires_grad=True) * 1
    out = model(h.detach().requires_grad_())
    fine = out.sum()
    fine.backward()
    x = torch.randn(3, 4)
    out = model(x)
    x.add_(1)
    with pytest.raises(RuntimeError, match="input of a layer must not be changed in place|inplace"):
        out.sum().backward()


def test_a_weight_used_outside_of_its_layer_is_named() -> None:
    model = nn.Linear(4, 4)
    opt = KFAC(model, **EVERY)
    (torch.randn(3, 4) @ model.weight.T).square().sum().backward()
    with pytest.warns(RuntimeWarning, match="no call of its layer gave .*'weight'.*compiled"):
        opt.step()
    assert opt.failures()["unreached"] == 1


def test_zero_grad_forgets_the_backwards_before() -> None:
    model = conv_net()
    opt = KFAC(model, **EVERY)
    x, y = batches(0)[0]
    cross_entropy(model(1000 * x), y).backward()
    opt.zero_grad()
    cross_entropy(model(x), y).backward()
    opt.step()
    twin = conv_net()
    other = KFAC(twin, **EVERY)
    cross_entropy(twin(x), y).backward()
    other.step()
    assert equal(held(opt)[:2], held(other)[:2])


def test_transforms_and_other_weights_do_not_count() -> None:
    """Of torch.func: gradients per example, and a call with the weights of another model."""
    model = nn.Linear(4, 3)
    opt = KFAC(model, **EVERY)
    params = dict(model.named_parameters())

    def loss(own: Any, x: Tensor) -> Tensor:
        return torch.func.functional_call(model, own, (x,)).square().sum()

    torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(params, torch.randn(5, 4))
    others = {name: torch.randn_like(p).requires_grad_() for name, p in params.items()}
    loss(others, torch.randn(5, 4)).backward()
    assert not opt._observed.sums
    loss(params, torch.randn(5, 4)).backward()
    assert len(opt._observed.sums) == 1


def test_a_group_that_was_removed_is_named() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3))
    groups = [{"params": part.parameters()} for part in model]
    opt = KFAC(model, params=groups, **EVERY)
    del opt.param_groups[1]
    model(torch.randn(5, 4)).square().sum().backward()
    with pytest.raises(RuntimeError, match=r"layer '1' must keep its weight"):
        opt.step()


def test_biases_decay_as_the_group_grafts() -> None:
    """Also if ``graft`` was switched off later."""
    model = nn.Linear(4, 3).double()
    opt = KFAC(model, lr=0.1, weight_decay=0.5, **EVERY)
    opt.param_groups[0]["graft"] = None
    before = model.bias.detach().clone()
    (0 * model(torch.randn(5, 4).double())).sum().backward()
    opt.step()
    close(model.bias.detach(), 0.95 * before)
