"""Two optimizers as one: what each would have done alone, and one state."""

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from drawn import raising, weight
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tnt_optim import TNT, Shampoo, with_fallback
from tnt_optim.fallback import WithFallback

pytestmark = pytest.mark.usefixtures("one_thread")


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


def made() -> tuple[Net, TNT, torch.optim.AdamW]:
    torch.manual_seed(0)
    net = Net()
    matrices = [net.hidden.weight, net.out.weight]
    rest = [net.embed.weight, net.hidden.bias, net.out.bias]
    main = TNT(matrices, lr=0.05, damping=0.1, stat_interval=2, inverse_interval=4)
    return net, main, torch.optim.AdamW(rest, lr=0.01)


def train(
    net: Net, optimizers: list[Any], steps: range, schedulers: list[Any] | None = None
) -> None:
    for step in steps:
        rng = torch.Generator().manual_seed(step)
        x, y = torch.randint(11, (8,), generator=rng), torch.randint(4, (8,), generator=rng)
        for optimizer in optimizers:
            optimizer.zero_grad()
        output = net(x)
        optimizers[0].observe(output)
        cross_entropy(output, y).backward()
        for optimizer in optimizers:
            optimizer.step()
        for scheduler in schedulers or []:
            scheduler.step()


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(map(torch.equal, a.parameters(), b.parameters()))


def equal(a: Any, b: Any) -> bool:
    """Whether two states are the same, to the bit."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(equal, a, b))
    return torch.equal(a, b) if isinstance(a, Tensor) else bool(a == b)


def test_it_is_both_of_them() -> None:
    net, main, fallback = made()
    train(net, [main, fallback], range(9))
    other, main, fallback = made()
    opt = with_fallback(main, fallback)
    train(other, [opt], range(9))
    assert same(net, other)
    assert [len(group["params"]) for group in opt.param_groups] == [2, 3]
    assert set(opt.state) == set(other.parameters())
    assert opt.failures() == {"skipped_statistics": 0, "failed_inverses": 0}


def test_schedulers_set_both() -> None:
    net, main, fallback = made()
    both = [torch.optim.lr_scheduler.ExponentialLR(o, 0.8) for o in (main, fallback)]
    train(net, [main, fallback], range(6), both)
    other, main, fallback = made()
    opt = with_fallback(main, fallback)
    train(other, [opt], range(6), [torch.optim.lr_scheduler.ExponentialLR(opt, 0.8)])
    assert same(net, other)
    assert main.param_groups[0]["lr"] == pytest.approx(0.05 * 0.8**6)


def test_one_state_resumes_both() -> None:
    net, main, fallback = made()
    opt = with_fallback(main, fallback)
    train(net, [opt], range(5))
    saved = io.BytesIO()
    torch.save({"net": net.state_dict(), "opt": opt.state_dict()}, saved)
    train(net, [opt], range(5, 9))
    other, main, fallback = made()
    resumed = with_fallback(main, fallback)
    saved.seek(0)
    loaded = torch.load(saved, weights_only=True)
    other.load_state_dict(loaded["net"])
    resumed.load_state_dict(loaded["opt"])
    train(other, [resumed], range(5, 9))
    assert same(net, other)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_go_on(copied: Any) -> None:
    net, main, fallback = made()
    opt = with_fallback(main, fallback)
    train(net, [opt], range(5))
    other, twin = copied((net, opt))
    train(net, [opt], range(5, 9))
    train(other, [twin], range(5, 9))
    assert same(net, other)


def test_hooks_are_called() -> None:
    net, main, fallback = made()
    opt = with_fallback(main, fallback)
    called = []
    opt.register_step_pre_hook(lambda *_: called.append("before"))
    opt.register_step_post_hook(lambda *_: called.append("after"))
    opt.register_state_dict_post_hook(lambda _, state: {**state, "mine": called.append("saved")})
    opt.register_load_state_dict_pre_hook(
        lambda _, state: {key: state[key] for key in state if key != "mine"}
    )
    opt.register_load_state_dict_post_hook(lambda _: called.append("loaded"))
    train(net, [opt], range(1))
    opt.load_state_dict(opt.state_dict())
    assert called == ["before", "after", "saved", "loaded"]


def test_closures_are_called_once() -> None:
    net, main, fallback = made()
    opt = with_fallback(main, fallback)
    calls = []

    def closure() -> Tensor:
        opt.zero_grad()
        output = net(torch.arange(8))
        opt.observe(output)
        loss = cross_entropy(output, torch.zeros(8, dtype=torch.int64))
        loss.backward()
        calls.append(loss)
        return loss

    before = copy.deepcopy(net)
    assert opt.step(closure) is calls[0]
    assert len(calls) == 1
    for name, param in net.named_parameters():
        assert not torch.equal(param, before.get_parameter(name)), name


def test_where_main_raises_neither_moves() -> None:
    net, main, fallback = made()
    opt = with_fallback(main, fallback)
    before = copy.deepcopy(net)
    cross_entropy(net(torch.arange(8)), torch.zeros(8, dtype=torch.int64)).backward()
    with raising(RuntimeError, match="no statistics"):
        opt.step()
    assert same(net, before)


def test_groups_added_to_either_are_its_own() -> None:
    net, main, fallback = made()
    opt = with_fallback(main, fallback)
    main.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    fallback.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    assert [len(group["params"]) for group in opt.param_groups] == [2, 1, 3, 1]
    with pytest.raises(ValueError, match="must be added to .main or to .fallback"):
        opt.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})


def test_a_state_that_does_not_fit_changes_nothing() -> None:
    net, main, fallback = made()
    opt = with_fallback(main, fallback)
    train(net, [opt], range(3))
    before = copy.deepcopy(opt.state_dict())
    good = copy.deepcopy(before)
    for broken, message in [
        ({"state": {}}, "must have the key 'param_groups'"),
        ({**good, "param_groups": good["param_groups"][:1]}, r"groups of \[2, 3\] parameters"),
        ({**good, "method": "Shampoo"}, "must be of TNT, got that of Shampoo"),
    ]:
        with pytest.raises(ValueError, match=message):
            opt.load_state_dict(broken)
    assert equal(opt.state_dict(), before)


def test_what_cannot_be_combined_is_refused() -> None:
    param = weight(3)
    with pytest.raises(ValueError, match="no parameter in common, got 1, the first of shape"):
        with_fallback(Shampoo([param]), torch.optim.SGD([param], lr=0.1))
    with pytest.raises(TypeError, match="fallback must be an optimizer, got list"):
        with_fallback(Shampoo([param]), [weight(2)])  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:torch.distributed:UserWarning")
def test_checkpoints_load_both_in_place(tmp_path: Path) -> None:
    def started() -> tuple[Net, WithFallback]:
        net, main, fallback = made()
        for group in main.param_groups:
            group["graft"] = "adam"
        return net, with_fallback(main, fallback)

    net, opt = started()
    train(net, [opt], range(5))
    saved = {"net": net.state_dict(), "opt": opt.state_dict()}
    dcp.save(saved, checkpoint_id=tmp_path / "saved", no_dist=True)
    train(net, [opt], range(5, 9))
    other, resumed = started()
    resumed.allocate_state()
    assert all(p.grad is None for p in other.parameters())
    target = {"net": other.state_dict(), "opt": resumed.state_dict()}
    dcp.load(target, checkpoint_id=tmp_path / "saved", no_dist=True)
    other.load_state_dict(target["net"])
    resumed.load_state_dict(target["opt"])
    train(other, [resumed], range(5, 9))
    assert same(net, other)


def test_where_the_fallback_cannot_load_main_is_what_it_was() -> None:
    def started(block_size: int) -> tuple[Net, WithFallback]:
        net, main, _ = made()
        rest = [net.embed.weight, net.hidden.bias, net.out.bias]
        return net, with_fallback(main, Shampoo(rest, block_size=block_size))

    net, opt = started(4)
    train(net, [opt], range(3))
    other, refusing = started(5)
    train(other, [refusing], range(1))
    before = copy.deepcopy(refusing.main.state_dict())
    with pytest.raises(ValueError, match="block_size=5"):
        refusing.load_state_dict(opt.state_dict())
    assert equal(refusing.main.state_dict(), before)
