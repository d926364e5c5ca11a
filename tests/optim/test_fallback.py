"""Two optimizers as one: the steps of both, and one state. Its contract is in ``test_contract``."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from drawn import raising, weight
from optimizers import NO_FAILURES, leaves, values
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import ExponentialLR

from tnt_optim import TNT, Shampoo, with_fallback


class Net(nn.Module):
    """An embedding and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.hidden = nn.Linear(6, 5)
        self.out = nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        return self.out(torch.tanh(self.hidden(self.embed(x))))


def parts(**settings: Any) -> tuple[Net, TNT, torch.optim.AdamW]:
    """A net, and the two optimizers of its parameters."""
    torch.manual_seed(0)
    net = Net()
    schedule: dict[str, int] = {"stat_interval": 2, "inverse_interval": 4}
    matrices = [net.hidden.weight, net.out.weight]
    main = TNT.paper(matrices, lr=0.05, damping=0.1, **schedule, **settings)
    rest = [net.embed.weight, net.hidden.bias, net.out.bias]
    return net, main, torch.optim.AdamW(rest, lr=0.01)


def made(**settings: Any) -> tuple[Net, Any]:
    """A net, and the combined optimizer."""
    net, main, fallback = parts(**settings)
    return net, with_fallback(main, fallback)


def train(net: Net, optimizers: list[Any], steps: range, schedulers: tuple[Any, ...] = ()) -> None:
    for step in steps:
        rng = torch.Generator().manual_seed(step)
        x, y = torch.randint(11, (8,), generator=rng), torch.randint(4, (8,), generator=rng)
        for optimizer in optimizers:
            optimizer.zero_grad()
        output = net(x)
        optimizers[0].observe(output)
        cross_entropy(output, y).backward()
        for each in (*optimizers, *schedulers):
            each.step()


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(map(torch.equal, a.parameters(), b.parameters()))


def test_it_is_both_optimizers_also_under_a_scheduler() -> None:
    net, main, fallback = parts()
    both = tuple(ExponentialLR(o, 0.8) for o in (main, fallback))
    train(net, [main, fallback], range(9), both)
    other, opt = made()
    train(other, [opt], range(9), (ExponentialLR(opt, 0.8),))
    assert same(net, other)
    assert opt.param_groups[0]["lr"] == pytest.approx(0.05 * 0.8**9)
    assert [len(group["params"]) for group in opt.param_groups] == [2, 3]
    assert set(opt.state) == set(other.parameters())
    assert opt.failures() == NO_FAILURES


def test_where_main_raises_neither_moves() -> None:
    net, opt = made()
    before = copy.deepcopy(net)
    cross_entropy(net(torch.arange(8)), torch.zeros(8, dtype=torch.int64)).backward()
    with raising(RuntimeError, match="no statistics"):
        opt.step()
    assert same(net, before)


def test_groups_are_added_to_one_of_the_two() -> None:
    _, opt = made()
    opt.main.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    opt.fallback.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    assert [len(group["params"]) for group in opt.param_groups] == [2, 1, 3, 1]
    with pytest.raises(ValueError, match="must be added to .main or to .fallback"):
        opt.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})


def test_a_state_that_does_not_fit_changes_nothing() -> None:
    net, opt = made()
    train(net, [opt], range(3))
    good = copy.deepcopy(opt.state_dict())
    for broken, message in [
        ({"state": {}}, "must have the key 'param_groups'"),
        ({**good, "param_groups": good["param_groups"][:1]}, r"groups of \[2, 3\] parameters"),
        ({**good, "method": "Shampoo"}, "must be of TNT, got that of Shampoo"),
    ]:
        with pytest.raises(ValueError, match=message):
            opt.load_state_dict(broken)
    assert leaves(opt.state_dict()) == leaves(good)


def test_where_the_fallback_cannot_load_main_is_unchanged() -> None:
    def started(block_size: int) -> tuple[Net, Any]:
        net, main, _ = parts()
        rest = [net.embed.weight, net.hidden.bias, net.out.bias]
        return net, with_fallback(main, Shampoo.paper(rest, block_size=block_size))

    net, opt = started(4)
    train(net, [opt], range(3))
    other, refusing = started(5)
    train(other, [refusing], range(1))
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


def test_a_main_without_sampled_statistics_observes_nothing() -> None:
    layer = nn.Linear(3, 4)
    opt = with_fallback(Shampoo.paper([layer.weight]), torch.optim.SGD([layer.bias]))
    assert not opt.observing
    with pytest.raises(TypeError, match=r"main must be a TNT for observe\(\), got Shampoo"):
        opt.observe(layer(torch.randn(2, 3)))
    with pytest.raises(TypeError, match=r"main must be a TNT for attach\(\), got Shampoo"):
        opt.attach(layer)


@pytest.mark.filterwarnings("ignore:torch.distributed:UserWarning")
def test_torchs_distributed_checkpoints_load_both_in_place(tmp_path: Path) -> None:
    net, opt = made(graft="adam")
    train(net, [opt], range(5))
    saved = {"net": net.state_dict(), "opt": opt.state_dict()}
    dcp.save(saved, checkpoint_id=tmp_path / "saved", no_dist=True)
    train(net, [opt], range(5, 9))
    other, resumed = made(graft="adam")
    start = values(other)
    resumed.allocate_state()
    assert all(p.grad is None for p in other.parameters())
    assert all(map(torch.equal, other.parameters(), start))
    target = {"net": other.state_dict(), "opt": resumed.state_dict()}
    dcp.load(target, checkpoint_id=tmp_path / "saved", no_dist=True)
    other.load_state_dict(target["net"])
    resumed.load_state_dict(target["opt"])
    train(other, [resumed], range(5, 9))
    assert same(net, other)
