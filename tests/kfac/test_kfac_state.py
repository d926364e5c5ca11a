"""KFAC's state: its precision, checkpoints, hooks, closures, settings as tensors."""

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from drawn import close
from optimizers import through_a_file
from test_kfac_failures import train_linear
from test_kfac_observations import conv_net, train
from tolerances import BFLOAT16_SPACING
from torch import Tensor, nn

from tnt_optim import KFAC, TNT, Shampoo

if TYPE_CHECKING:
    from conftest import Snapshot

    TakeSnapshot = Callable[..., Snapshot]

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("inverse", ["damped", "eigenbasis"])
def test_half_precision_parameters_are_rounded_once(inverse: str) -> None:
    torch.manual_seed(8)
    model = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 3)).bfloat16()
    wide = copy.deepcopy(model).float()
    x = torch.randn(8, 6).bfloat16()
    opt, opt32 = (KFAC(m, lr=0.05, inverse=inverse) for m in (model, wide))
    train_linear(model, opt, x)
    for state in opt._layer_states().values():
        held = [state["momentum"], *state["stats"], *state["factors"]]
        assert {tensor.dtype for tensor in held} == {torch.float32}
    opt32.load_state_dict(opt.state_dict())
    opt.param_groups[0]["stat_interval"] = opt32.param_groups[0]["stat_interval"] = 10
    for p, q in zip(model.parameters(), wide.parameters(), strict=True):
        q.data.copy_(p.data)
        p.grad, q.grad = torch.ones_like(p), torch.ones_like(q)
    opt.step()
    opt32.step()
    for p, q in zip(model.parameters(), wide.parameters(), strict=True):
        error = (p.detach().float() - q.detach()).abs()
        assert bool((error <= BFLOAT16_SPACING * q.detach().abs()).all())


def test_learning_rate_may_be_a_tensor_and_have_a_schedule() -> None:
    results = []
    for lr in (0.1, torch.tensor(0.1, dtype=torch.float64)):
        model = conv_net()
        opt = KFAC(model, lr=lr, weight_decay=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(opt, step_size=2, gamma=0.5)
        torch.manual_seed(3)
        for _ in range(4):
            train(model, opt)
            scheduler.step()
        results.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
        assert float(opt.param_groups[0]["lr"]) == 0.025
    close(*results)


@pytest.mark.parametrize("stop", [1, 6, 7])
@pytest.mark.parametrize("inverse", ["damped", "eigenbasis"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_resumed_training_is_bit_for_bit_the_uninterrupted(
    dtype: torch.dtype, inverse: str, stop: int, snapshot: "TakeSnapshot"
) -> None:
    def make(model: nn.Module) -> KFAC:
        return KFAC(model, stat_interval=2, inverse_interval=5, inverse=inverse)

    model = conv_net(dtype=dtype)
    opt = make(model)
    opt.warm_start(model(torch.randn(8, 2, 4, 4).to(dtype)) for _ in range(2))
    train(model, opt, stop)
    files = through_a_file((model.state_dict(), opt.state_dict()))
    torch.manual_seed(7)
    train(model, opt, 8)
    resumed = conv_net(dtype=dtype)
    resumed.load_state_dict(files[0])
    fresh = make(resumed)
    fresh.load_state_dict(files[1])
    torch.manual_seed(7)
    train(resumed, fresh, 8)
    snapshot(model.parameters(), opt).assert_equals(snapshot(resumed.parameters(), fresh))


def test_state_of_something_else_is_refused(snapshot: "TakeSnapshot") -> None:
    model = conv_net()
    opt = KFAC(model)
    train(model, opt, 2)
    before = snapshot(model.parameters(), opt)
    wide = nn.Sequential(
        nn.Conv2d(2, 4, 2, bias=False), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1),
        nn.Flatten(), nn.Linear(36, 5),
    ).double()  # fmt: skip
    small = nn.Linear(3, 2)
    others: list[KFAC | TNT] = [
        KFAC(wide),
        KFAC(conv_net(), inverse="eigenbasis"),
        TNT(model.parameters()),
        KFAC(small),
    ]
    models = [wide, others[1]._model, model, small]
    shapes = [(2, 4, 4), (2, 4, 4), (2, 4, 4), (3,)]
    for other, source, shape in zip(others, models, shapes, strict=True):
        x = torch.randn(5, *shape, dtype=next(source.parameters()).dtype)
        other.warm_start((source(x) for _ in range(2)), model=source)
        with pytest.raises(ValueError, match="state_dict"):
            opt.load_state_dict(other.state_dict())
    adam = torch.optim.Adam(model.parameters())
    with pytest.raises(ValueError, match="another optimizer's"):
        opt.load_state_dict(adam.state_dict())
    for path, value in (("lr", -1.0), ("stat_interval", 0)):
        damaged = copy.deepcopy(opt.state_dict())
        damaged["param_groups"][0][path] = value
        with pytest.raises(ValueError, match=f"state_dict: group 0: {path}"):
            opt.load_state_dict(damaged)
    before.assert_unchanged()


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("method", [TNT, Shampoo])
def test_another_methods_state_is_refused(
    method: type[TNT] | type[Shampoo], trained: bool, snapshot: "TakeSnapshot"
) -> None:
    """Without biases its tensors have the same form: modes are rows and columns."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 3, bias=False))
    opt, other = KFAC(model), method(model.parameters())
    before = snapshot(model.parameters(), opt)
    if trained:
        losses = (nn.functional.cross_entropy(model(x), x[:, :3].argmax(1))
                  for x in torch.randn(2, 5, 4))  # fmt: skip
        outputs = (model(x) for x in torch.randn(2, 5, 4))
        other.warm_start(losses if method is Shampoo else outputs)
    assert bool(other.state_dict()["state"]) == trained
    message = f"^state_dict must be of KFAC, got that of {method.__name__}"
    with pytest.raises(ValueError, match=message):
        opt.load_state_dict(through_a_file(other.state_dict()))
    message = f"^state_dict must be of {method.__name__}, got that of KFAC"
    with pytest.raises(ValueError, match=message):
        other.load_state_dict(through_a_file(opt.state_dict()))
    before.assert_unchanged()
    state = opt.state_dict()
    opt.load_state_dict({key: state[key] for key in ("state", "param_groups")})


class Renamed(nn.Module):
    """`Auxiliary`'s head on its body, under other names and in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.top, self.bottom = nn.Linear(5, 3), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        return self.top(torch.tanh(self.bottom(x)))


def test_hooks_that_adapt_a_state_are_followed(snapshot: "TakeSnapshot") -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).bfloat16()
    opt = KFAC(model)
    x = torch.randn(8, 4).bfloat16()
    train_linear(model, opt, x)
    other = Renamed().bfloat16()
    fresh = KFAC(other)
    names = {"bottom": "0", "top": "2"}
    seen: list[Any] = []

    def adapt(_: Any, state: dict[str, Any]) -> dict[str, Any]:
        (group,) = state["param_groups"]
        numbers = dict(zip(group["param_names"], group["params"], strict=True))
        wanted = [n for n, _ in other.named_parameters()]
        params = [numbers[f"{names[n.split('.')[0]]}.{n.split('.')[1]}"] for n in wanted]
        return {**state, "param_groups": [{**group, "params": params, "param_names": wanted}]}

    handle = fresh.register_load_state_dict_pre_hook(adapt)
    fresh.register_load_state_dict_post_hook(lambda loaded: seen.append(len(loaded.state)))
    fresh.load_state_dict(through_a_file(opt.state_dict()))
    assert seen == [4]
    for mine, theirs in ((other.bottom, model[0]), (other.top, model[2])):
        held, saved = fresh.state[mine.weight], opt.state[theirs.weight]
        for key in ("stats", "factors"):
            assert all(map(torch.equal, held[key], saved[key]))  # in float32, not rounded
        assert torch.equal(held["momentum"], saved["momentum"])
        assert torch.equal(fresh.state[mine.bias]["momentum"], opt.state[theirs.bias]["momentum"])
    train_linear(other, fresh, x)
    handle.remove()
    before = snapshot(other.parameters(), fresh)
    with pytest.raises(ValueError, match="state_dict"):
        fresh.load_state_dict(opt.state_dict())
    before.assert_unchanged()
    assert len(fresh._optimizer_load_state_dict_pre_hooks) == 0


def test_closure_is_evaluated_with_gradients_and_its_loss_returned() -> None:
    model, twin = conv_net(), conv_net()
    opt, opt2 = KFAC(model, stat_interval=2), KFAC(twin, stat_interval=2)
    x, y = torch.randn(8, 2, 4, 4).double(), torch.randint(5, (8,))

    def closure() -> Tensor:
        opt.zero_grad()
        output = model(x)
        loss = nn.functional.cross_entropy(output, y)
        opt.observe(output)
        loss.backward()
        return loss

    for _ in range(3):
        opt2.zero_grad()
        output = twin(x)
        expected = nn.functional.cross_entropy(output, y)
        opt2.observe(output)
        expected.backward()
        assert opt2.step() is None
        assert torch.equal(torch.as_tensor(opt.step(closure)), expected)
    assert all(map(torch.equal, model.parameters(), twin.parameters()))


@pytest.mark.parametrize("inverse", ["damped", "eigenbasis"])
def test_settings_may_be_tensors(inverse: str) -> None:
    numbers = {"damping": 0.25, "momentum": 0.75, "stat_decay": 0.5, "weight_decay": 0.125}
    ends = []
    for wrap in (float, lambda v: torch.tensor(v, dtype=torch.float64)):
        model = conv_net()
        settings = {name: wrap(value) for name, value in numbers.items()}
        opt = KFAC(model, inverse=inverse, stat_interval=2, inverse_interval=3, **settings)
        torch.manual_seed(3)
        train(model, opt, 5)
        ends.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
    close(*ends)


def test_copies_of_before_there_were_processes_go_on() -> None:
    model = conv_net()
    opt = KFAC(model)
    train(model, opt, 1)
    state = {k: v for k, v in opt.__getstate__().items() if k not in ("shard", "_group_is_lost")}
    older = KFAC.__new__(KFAC)
    older.__setstate__(state)
    train(model, older, 2)
    assert (older.shard, older.param_groups[0]["step"]) == (None, 3)
