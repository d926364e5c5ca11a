"""Bad input, failures and frozen parts: what KFAC refuses, survives and reports; and its state."""

import copy
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from drawn import close
from test_kfac_observations import conv_net, train
from test_tnt_state import through_a_file
from tolerances import BFLOAT16_SPACING
from torch import Tensor, nn

from tnt_optim import KFAC, TNT, PreconditionerError

if TYPE_CHECKING:
    from conftest import Snapshot

    TakeSnapshot = Callable[..., Snapshot]

pytestmark = pytest.mark.usefixtures("one_thread")

NAN = math.nan
BAD_SETTINGS: list[tuple[str, Any]] = [
    *[("lr", bad) for bad in (-1e-3, NAN, math.inf)],
    *[("damping", bad) for bad in (-0.1, NAN, math.inf)],
    *[("weight_decay", bad) for bad in (-1.0, NAN)],
    *[("momentum", bad) for bad in (-0.1, 1.0, NAN)],
    *[("stat_decay", bad) for bad in (-0.1, 1.0, NAN)],
    *[("stat_interval", bad) for bad in (0, 1.5)],
    *[("inverse_interval", bad) for bad in (0, 2.5)],
]


# ------------------------------------------------------------------ arguments


@pytest.mark.parametrize(
    ("name", "bad"),
    [*BAD_SETTINGS, ("likelihood", "poisson"), ("inverse", "svd"), ("seed", 1.5), ("seed", True)],
)
def test_bad_argument_is_refused_by_name(name: str, bad: Any) -> None:
    model = conv_net()
    with pytest.raises(ValueError, match=name):
        KFAC(model, **{name: bad})
    assert not any(m._forward_hooks for m in model.modules())


@pytest.mark.parametrize(("name", "bad"), BAD_SETTINGS)
def test_setting_that_goes_bad_later_changes_nothing(
    name: str, bad: Any, snapshot: "TakeSnapshot"
) -> None:
    model = conv_net()
    opt = KFAC(model)
    train(model, opt, 2)
    before = snapshot(model.parameters(), opt)
    good, opt.param_groups[0][name] = opt.param_groups[0][name], bad
    with pytest.raises(ValueError, match=name):
        opt.step()
    opt.param_groups[0][name] = good
    before.assert_unchanged()
    train(model, opt)


def tied_weight() -> nn.Module:
    model = nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    return model


def shared_bias() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].bias = model[0].bias
    return model


def same_layer_twice() -> nn.Module:
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, nn.Tanh(), layer)


def layer_in_a_shared_container() -> nn.Module:
    block = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    return nn.ModuleDict({"a": block, "b": block})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.Sequential(nn.Conv2d(4, 4, 3, groups=2), nn.BatchNorm2d(4)), "with none"),
        (lambda: nn.Sequential(nn.LazyLinear(3)), "lazy"),
        (lambda: nn.Sequential(nn.Linear(2, 3, dtype=torch.complex64)), "complex64"),
        (tied_weight, "'0.weight' is '1.weight', too"),
        (shared_bias, "'0.bias' is '1.bias', too"),
        (same_layer_twice, "'0' is '2', too"),
        (layer_in_a_shared_container, "'a.0' is 'b.0', too"),
    ],
)
def test_model_that_does_not_fit_is_refused(make: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(ValueError, match=f"model must .*{message}"):
        KFAC(make())


def test_parameters_instead_of_a_model_are_refused() -> None:
    with pytest.raises(TypeError, match="model must be a torch.nn.Module, got generator"):
        KFAC(conv_net().parameters())


def test_shared_modules_without_a_block_are_welcome() -> None:
    norm, act = nn.LayerNorm(4), nn.ReLU()
    model = nn.Sequential(nn.Linear(4, 4), norm, act, nn.Linear(4, 4), norm, act)
    assert len(KFAC(model).param_groups[0]["params"]) == 6


def test_second_group_is_refused() -> None:
    opt = KFAC(conv_net())
    with pytest.raises(ValueError, match="param_group"):
        opt.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    assert len(opt.param_groups) == 1


@pytest.mark.parametrize(
    ("likelihood", "output", "message"),
    [
        ("categorical", lambda z: z.sum(1), "output must be"),
        ("categorical", lambda z: z[None], "output must be"),
        ("bernoulli", lambda z: z.sum(1), "output must be"),
        ("gaussian", lambda z: z.sum(), "output must be"),
        ("gaussian", lambda z: z.detach(), "graph"),
        ("gaussian", lambda z: (z,), "floating-point tensor, got tuple"),
        ("gaussian", lambda z: z[:0], "at least one example"),
        ("gaussian", lambda z: nn.Linear(2, 2)(torch.ones(3, 2)), "another model's"),
        (lambda z: 2 * z, lambda z: z, "likelihood must give a 0-dim"),
        (lambda z: z.sum().detach(), lambda z: z, "likelihood must have a graph"),
    ],
)
def test_outputs_that_do_not_fit_are_refused(
    likelihood: Any, output: Callable[[Tensor], Any], message: str, snapshot: "TakeSnapshot"
) -> None:
    model = nn.Linear(3, 4)
    opt = KFAC(model, likelihood=likelihood)
    before = snapshot(model.parameters(), opt)
    with pytest.raises(ValueError, match=message):
        opt.observe(output(model(torch.randn(5, 3))))
    with pytest.raises(ValueError, match=message):
        opt.warm_start(output(model(torch.randn(5, 3))) for _ in range(2))
    before.assert_unchanged()


def test_warm_start_needs_batches_and_restores_what_it_moved(snapshot: "TakeSnapshot") -> None:
    model = conv_net()
    opt = KFAC(model)
    buffers, before = copy.deepcopy(list(model.buffers())), snapshot(model.parameters(), opt)
    with pytest.raises(ValueError, match="outputs must hold at least one batch"):
        opt.warm_start(iter(()))
    with pytest.raises(TypeError, match="iterable"):
        opt.warm_start(3)

    def outputs() -> Any:
        yield model(torch.randn(8, 2, 4, 4).double())
        raise KeyError("the data set is broken")

    with pytest.raises(KeyError, match="broken"):
        opt.warm_start(outputs(), model=model)
    before.assert_unchanged()
    assert all(torch.equal(a, b) for a, b in zip(buffers, model.buffers(), strict=True))
    opt.param_groups[0]["step"] = 1  # not due any more, and the outputs were made before
    train_outputs = [model(torch.randn(8, 2, 4, 4).double())]
    opt.warm_start(train_outputs)  # a layer without statistics is captured at every step
    late = [model(torch.randn(8, 2, 4, 4).double())]
    with pytest.raises(ValueError, match="generator"):
        opt.warm_start(late)


def test_several_processes_are_refused(
    monkeypatch: pytest.MonkeyPatch, snapshot: "TakeSnapshot"
) -> None:
    model = nn.Linear(4, 3)
    opt = KFAC(model)
    before = snapshot(model.parameters(), opt)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(RuntimeError, match="runs 2"):
        opt.observe(model(torch.randn(5, 4)))
    with pytest.raises(RuntimeError, match="runs 2"):
        opt.warm_start(model(torch.randn(5, 4)) for _ in range(2))
    before.assert_unchanged()


# ------------------------------------------------------------------ failures


def test_step_before_any_statistic_says_what_to_do(snapshot: "TakeSnapshot") -> None:
    model = conv_net()
    opt = KFAC(model)
    model(torch.randn(8, 2, 4, 4).double()).sum().backward()
    before = snapshot(model.parameters(), opt)
    with pytest.raises(RuntimeError, match=r"layer '0'.*observe.*warm_start"):
        opt.step()
    before.assert_unchanged()


def test_forgotten_observe_warns_once_and_keeps_the_statistics() -> None:
    model = nn.Linear(3, 2).double()
    opt = KFAC(model, stat_interval=1)
    x = torch.randn(5, 3).double()
    train_linear(model, opt, x)
    stats = [s.clone() for s in opt.state[model.weight]["stats"]]
    with pytest.warns(RuntimeWarning, match="observe"):
        opt.step()
    opt.step()  # a second warning would be an error
    assert all(
        torch.equal(a, b) for a, b in zip(stats, opt.state[model.weight]["stats"], strict=True)
    )


def train_linear(model: nn.Module, opt: KFAC, x: Tensor) -> None:
    """One step whose user gradient is finite whatever the input."""
    opt.zero_grad()
    opt.observe(model(x))
    for p in model.parameters():
        p.grad = torch.ones_like(p) if p.requires_grad else None
    opt.step()


def test_what_is_not_finite_is_left_out_counted_and_stops_training() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    opt = KFAC(model, stat_interval=1, inverse_interval=1)
    x = torch.randn(5, 3).double()
    train_linear(model, opt, x)
    stats = [s.clone() for state in opt._layer_states().values() for s in state["stats"]]
    bad = x.clone()
    bad[0, 0] = math.inf
    for _ in range(4):
        before = model[0].weight.detach().clone()
        with pytest.warns(RuntimeWarning, match=r"not finite.*layer '0'.*1 other"):
            train_linear(model, opt, bad)
        assert not torch.equal(before, model[0].weight) and bool(model[0].weight.isfinite().all())
    held = [s for state in opt._layer_states().values() for s in state["stats"]]
    assert all(torch.equal(a, b) for a, b in zip(stats, held, strict=True))
    with pytest.raises(PreconditionerError, match="5 in a row"):
        train_linear(model, opt, bad)
    assert opt.failures() == {"skipped_statistics": 5, "failed_inverses": 0}
    train_linear(model, opt, x)
    assert opt.state[model[0].weight]["skipped_in_a_row"] == 0


def test_first_statistics_that_are_not_finite_raise(snapshot: "TakeSnapshot") -> None:
    model = nn.Linear(3, 2).double()
    opt = KFAC(model)
    before = [p.detach().clone() for p in model.parameters()]
    bad = torch.full((5, 3), NAN).double()
    with pytest.raises(PreconditionerError, match="first inputs or gradients"):
        train_linear(model, opt, bad)
    with pytest.raises(PreconditionerError, match="none of 2 batches"):
        opt.warm_start(model(bad) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert not opt.state_dict()["state"]
    opt.warm_start(model(x) for x in (torch.randn(5, 3).double(), bad))
    assert opt.failures()["skipped_statistics"] == 1
    train_linear(model, opt, torch.randn(5, 3).double())


@pytest.mark.parametrize("inverse", ["damped", "eigenbasis"])
def test_singular_matrices_without_damping(inverse: str) -> None:
    """At first there is nothing to go on with; later the old inverses stay."""
    model = nn.Linear(3, 2).double()  # categorical: the rows of g sum to zero
    with pytest.raises(PreconditionerError, match=r"mode 0 of layer.*damping is 0.0"):
        train_linear(model, KFAC(model, damping=0.0, inverse=inverse), torch.randn(5, 3).double())
    opt = KFAC(model, inverse=inverse, stat_interval=1, inverse_interval=1)
    train_linear(model, opt, torch.randn(5, 3).double())
    factors = [f.clone() for f in opt.state[model.weight]["factors"]]
    opt.param_groups[0]["damping"] = 0.0
    with pytest.warns(RuntimeWarning, match="mode 0 could not be inverted"):
        train_linear(model, opt, torch.randn(5, 3).double())
    kept = zip(factors, opt.state[model.weight]["factors"], strict=True)
    same = [torch.equal(a, b) for a, b in kept]
    assert same == ([True, False] if inverse == "damped" else [True, True, True])
    assert opt.failures()["failed_inverses"] == 1


def test_eigenvalues_that_do_not_come_keep_the_old_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double()
    opt = KFAC(model, inverse="eigenbasis", stat_interval=1)
    x = torch.randn(5, 3).double()
    train_linear(model, opt, x)
    factors = [f.clone() for s in opt._layer_states().values() for f in s["factors"]]

    def eigh(matrix: Tensor) -> Any:
        raise torch.linalg.LinAlgError("no convergence")

    monkeypatch.setattr(torch.linalg, "eigh", eigh)
    with pytest.warns(RuntimeWarning, match=r"mode 0.*1 other"):
        train_linear(model, opt, x)
    held = [f for s in opt._layer_states().values() for f in s["factors"]]
    assert all(torch.equal(a, b) for a, b in zip(factors, held, strict=True))
    with pytest.raises(PreconditionerError, match="mode 0"):
        train_linear(model, KFAC(model, inverse="eigenbasis"), x)


@pytest.mark.parametrize("inverse", ["damped", "eigenbasis"])
def test_zero_gradients_give_a_multiple_of_the_identity(inverse: str) -> None:
    """G = 0: (√λ I)^-1 M (A + √λ I)^-1, or M / λ in the eigenbasis."""
    model, damping = nn.Linear(3, 2).double(), 0.25
    start = torch.cat([model.weight, model.bias[:, None]], 1).detach()
    opt = KFAC(model, lr=0.5, damping=damping, inverse=inverse, likelihood=lambda z: (0 * z).sum())
    x = torch.randn(5, 3).double()
    train_linear(model, opt, x)
    rows = torch.cat([x, torch.ones(5, 1)], 1)
    a = rows.T @ rows / 5 + 0.5 * torch.eye(4)
    wanted = torch.ones(2, 4).double() / damping
    if inverse == "damped":
        wanted = torch.ones(2, 4).double() @ torch.linalg.inv(a) / 0.5
    moved = start - torch.cat([model.weight, model.bias[:, None]], 1).detach()
    close(moved, 0.5 * wanted)


def test_statistics_and_inverses_are_symmetric_to_the_bit() -> None:
    model = nn.Sequential(nn.Conv2d(3, 65, 3), nn.Flatten(), nn.Linear(65 * 4, 9))
    opt = KFAC(model, stat_interval=1, inverse_interval=1)
    for _ in range(3):
        train_linear(model, opt, torch.randn(5, 3, 4, 4))
    for state in opt._layer_states().values():
        for matrix in state["stats"] + state["factors"]:
            assert matrix.dtype == torch.float32
            assert torch.equal(matrix, matrix.T)


# ------------------------------------------------------------------ parts that do not take part


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


# ------------------------------------------------------------------ precision and state


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
        with pytest.raises(ValueError, match=f"state_dict: {path}"):
            opt.load_state_dict(damaged)
    before.assert_unchanged()
