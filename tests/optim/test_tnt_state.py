"""State and life cycle: checkpoints, copies, schedules, closures, gradient accumulation."""

import copy
import io
import itertools
import pickle
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import pytest
import torch
from oracle import DenseTNT
from tolerances import FLOAT64_REORDERED, FLOAT64_TRAJECTORY
from torch import Tensor, nn

from tnt_optim import KFAC, TNT, Shampoo

if TYPE_CHECKING:
    from conftest import DirectGradients, FixedLabels, Snapshot

    Direct = Callable[[Sequence[Tensor]], DirectGradients]
    TakeSnapshot = Callable[..., Snapshot]

RESUMABLE: dict[str, dict[str, Any]] = {
    "paper": {},
    "diagonal": {"max_factor_dim": 4, "likelihood": "bernoulli"},
    "grafted": {"graft": "adam", "relative_damping": True, "weight_decay": 0.1},
    "empirical": {"fisher": "empirical", "graft": "sgd"},
    "gaussian": {"likelihood": "gaussian", "seed": 5},
}


def conv_net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Conv, batch norm, linear, biases, and a scalar-free small size."""
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 5)
    ).to(dtype)


def make(model: nn.Module, **settings: Any) -> TNT:
    """TNT with T1 = 2, T2 = 5, small steps."""
    return TNT(
        model.parameters(), lr=1e-3, damping=0.1, stat_interval=2, inverse_interval=5, **settings
    )


def train(
    model: nn.Module, opt: TNT, first: int, last: int, shape: tuple[int, ...] = (2, 4, 4)
) -> None:
    """Steps first .. last - 1 on data that depends on the step alone."""
    dtype = next(model.parameters()).dtype
    for t in range(first, last):
        generator = torch.Generator().manual_seed(100 + t)
        x = torch.randn(8, *shape, generator=generator).to(dtype)
        y = torch.randint(5, (8,), generator=generator)
        opt.zero_grad()
        output = model(x)
        loss = nn.functional.cross_entropy(output, y)
        opt.observe(output)
        loss.backward()
        opt.step()


def through_a_file(content: Any) -> Any:
    """torch.save, then torch.load with weights_only."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def assert_close_to(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    """Within `tolerance`, relative to the norm of what is expected."""
    assert actual.shape == expected.shape
    error = float((actual.detach().double() - expected.detach().double()).norm())
    assert error <= tolerance * float(expected.detach().double().norm())


# ------------------------------------------------------------------ checkpoints and copies


@pytest.mark.parametrize("stop", [1, 6, 7, 10])
@pytest.mark.parametrize("name", RESUMABLE)
def test_resumed_training_is_bit_for_bit_the_uninterrupted(
    name: str, stop: int, snapshot: "TakeSnapshot"
) -> None:
    """Stopped inside an interval (7 = T2 + 2, odd to T1 = 2), at its edge, and after one step."""
    model = conv_net()
    opt = make(model, **RESUMABLE[name])
    train(model, opt, 0, stop)
    files = through_a_file((model.state_dict(), opt.state_dict()))
    train(model, opt, stop, stop + 8)
    resumed = conv_net()
    resumed.load_state_dict(files[0])
    fresh = make(resumed, **RESUMABLE[name])
    fresh.load_state_dict(files[1])
    train(resumed, fresh, stop, stop + 8)
    snapshot(model.parameters(), opt).assert_equals(snapshot(resumed.parameters(), fresh))


def test_resumed_training_is_bit_for_bit_with_matrices_large_enough_for_threads(
    snapshot: "TakeSnapshot",
) -> None:
    runs = []
    for stops in ([0, 12], [0, 7, 12]):
        torch.manual_seed(2)
        model = nn.Sequential(nn.Linear(300, 130), nn.Tanh(), nn.Linear(130, 67))
        opt = make(model)
        for first, last in itertools.pairwise(stops):
            files = through_a_file((model.state_dict(), opt.state_dict()))
            model.load_state_dict(files[0])
            opt = make(model)
            opt.load_state_dict(files[1])
            train(model, opt, first, last, shape=(300,))
        runs.append(snapshot(model.parameters(), opt))
    runs[0].assert_equals(runs[1])


@pytest.mark.parametrize(
    "clone",
    [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))],
    ids=["deepcopy", "pickle"],
)
@pytest.mark.parametrize("stop", [0, 7])
def test_copies_continue_bit_for_bit(
    clone: Callable[[Any], Any], stop: int, snapshot: "TakeSnapshot"
) -> None:
    model = conv_net()
    opt = make(model)
    train(model, opt, 0, stop)
    model2, opt2 = clone((model, opt))
    train(model, opt, stop, stop + 8)
    pairs = zip(model.parameters(), model2.parameters(), strict=True)
    assert not any(torch.equal(a, b) for a, b in pairs), "the copy is not a copy"
    train(model2, opt2, stop, stop + 8)
    snapshot(model.parameters(), opt).assert_equals(snapshot(model2.parameters(), opt2))


def test_state_dict_of_a_group_with_modes_loads_with_weights_only(direct: "Direct") -> None:
    def run(p: nn.Parameter) -> tuple[TNT, "DirectGradients"]:
        harness = direct([p])
        group = {"params": [p], "modes": lambda shape: (shape[0] // 2, 2, shape[1])}
        return TNT([group], stat_interval=1, likelihood=harness.likelihood), harness

    p = nn.Parameter(torch.randn(6, 5))
    opt, harness = run(p)
    harness.iterate(opt, [torch.randn(6, 5)], [torch.randn(6, 5)])
    q = nn.Parameter(p.detach().clone())
    other, harness2 = run(q)
    other.load_state_dict(through_a_file(opt.state_dict()))
    g, s = torch.randn(6, 5), torch.randn(6, 5)
    harness.iterate(opt, [g], [s])
    harness2.iterate(other, [g.clone()], [s])
    assert torch.equal(p, q)
    assert [len(f) for f in other.state[q]["factors"]] == [3, 2, 5]


def test_state_is_documented(snapshot: "TakeSnapshot") -> None:
    model = conv_net()
    opt = make(model, max_factor_dim=5)
    train(model, opt, 0, 3)
    conv, linear = model[0].weight, model[4].weight
    assert opt.state[conv]["momentum"].shape == (4, 2, 9)
    assert [tuple(s.shape) for s in opt.state[conv]["stats"]] == [(4, 4), (2, 2), (9,)]
    assert [tuple(s.shape) for s in opt.state[conv]["factors"]] == [(4, 4), (2, 2), (9,)]
    assert [tuple(s.shape) for s in opt.state[linear]["stats"]] == [(5, 5), (16,)]
    assert all(group["step"] == 3 for group in opt.param_groups)


@pytest.mark.parametrize("change", ["shape", "count", "kind"])
def test_state_of_something_else_is_refused(change: str, snapshot: "TakeSnapshot") -> None:
    model = conv_net()
    opt = make(model)
    train(model, opt, 0, 3)
    others: dict[str, nn.Module] = {
        "shape": nn.Sequential(
            nn.Conv2d(2, 3, 3, bias=False), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 5)
        ),
        "count": nn.Sequential(nn.Flatten(), nn.Linear(32, 5)),
        "kind": conv_net(),
    }
    other = others[change]
    fresh = make(other, max_factor_dim=4 if change == "kind" else 8192)
    train(other, fresh, 0, 2)
    before = snapshot(other.parameters(), fresh)
    message = {"shape": "momentum must be", "count": "parameters", "kind": "max_factor_dim=4"}
    with pytest.raises(ValueError, match=f"state_dict.*{message[change]}"):
        fresh.load_state_dict(opt.state_dict())
    before.assert_unchanged()


def _without(*path: str | int) -> Callable[[Any], None]:
    def change(state_dict: Any) -> None:
        for key in path[:-1]:
            state_dict = state_dict[key]
        del state_dict[path[-1]]

    return change


def _with(value: Any, *path: str | int) -> Callable[[Any], None]:
    def change(state_dict: Any) -> None:
        for key in path[:-1]:
            state_dict = state_dict[key]
        state_dict[path[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without("state"), "'state'"),
        (_without("param_groups"), "'param_groups'"),
        (_without("param_groups", 0, "damping"), "damping"),
        (_without("param_groups", 0, "step"), "step"),
        (_without("state", 0, "updates"), "updates"),
        (_without("state", 0, "stats"), "stats"),
        (_with(1, "state", 0, "momentum"), "tensors"),
        (_with(0, "param_groups", 0, "stat_interval"), "stat_interval"),
        (_with(-1.0, "param_groups", 0, "lr"), "lr"),
    ],
)
def test_damaged_state_is_refused(
    change: Callable[[Any], None], message: str, snapshot: "TakeSnapshot"
) -> None:
    model = conv_net()
    opt = make(model)
    train(model, opt, 0, 3)
    damaged = copy.deepcopy(opt.state_dict())
    change(damaged)
    before = snapshot(model.parameters(), opt)
    with pytest.raises(ValueError, match=f"state_dict.*{message}"):
        opt.load_state_dict(damaged)
    before.assert_unchanged()


def test_adams_state_is_refused() -> None:
    model = conv_net()
    adam = torch.optim.Adam(model.parameters())
    with pytest.raises(ValueError, match="another optimizer's"):
        make(model).load_state_dict(adam.state_dict())


class Reordered(nn.Module):
    """A model whose parameters come in another order, under other names."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first = nn.Linear(6, 5), nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        return self.last(torch.tanh(self.first(x)))


@pytest.mark.parametrize("method", [TNT, Shampoo])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hooks_that_adapt_a_state_are_followed(
    dtype: torch.dtype, method: type[TNT] | type[Shampoo], snapshot: "TakeSnapshot"
) -> None:
    """Checked as they leave it, copied from what they return, before hooks that come after."""
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5)).to(dtype)
    opt = method(model.named_parameters())
    x, y = torch.randn(8, 4).to(dtype), torch.randint(5, (8,))
    output = model(x)
    if isinstance(opt, TNT):
        opt.observe(output)
    nn.functional.cross_entropy(output, y).backward()
    opt.step()
    other = Reordered().to(dtype)
    fresh = method(other.named_parameters())
    layers = {"first": "0", "last": "2"}
    seen: list[list[Tensor]] = []

    def adapt(_: Any, state: dict[str, Any]) -> dict[str, Any]:
        (group,) = state["param_groups"]
        numbers = dict(zip(group["param_names"], group["params"], strict=True))
        names = [name for name, _ in other.named_parameters()]
        parts = [name.split(".") for name in names]
        params = [numbers[f"{layers[layer]}.{kind}"] for layer, kind in parts]
        return {**state, "param_groups": [{**group, "params": params, "param_names": names}]}

    def loaded(optimizer: Any) -> None:
        seen.extend(state["stats"] for state in optimizer.state.values())

    files = through_a_file(opt.state_dict())
    before = snapshot(other.parameters(), fresh)
    with pytest.raises(ValueError, match=r"state_dict\['state'\]\[0\].*of another model"):
        fresh.load_state_dict(files)
    before.assert_unchanged()
    fresh.register_load_state_dict_pre_hook(adapt)
    fresh.register_load_state_dict_post_hook(loaded)
    fresh.load_state_dict(files)
    pairs = [(other.first, model[0]), (other.last, model[2])]
    for mine, theirs in pairs:
        for p, q in zip(mine.parameters(), theirs.parameters(), strict=True):
            for key in ("stats", "factors"):  # not rounded to the parameters' dtype
                assert all(map(torch.equal, fresh.state[p][key], opt.state[q][key]))
    assert {s.dtype for stats in seen for s in stats} == {torch.float32} and len(seen) == 4
    before = snapshot(other.parameters(), fresh)
    damaged = copy.deepcopy(files)
    damaged["param_groups"][0]["lr"] = -1.0
    with pytest.raises(ValueError, match="state_dict: group 0: lr"):
        fresh.load_state_dict(damaged)
    before.assert_unchanged()
    assert list(fresh._optimizer_load_state_dict_pre_hooks.values()) == [adapt]
    assert list(fresh._optimizer_load_state_dict_post_hooks.values()) == [loaded]


@pytest.mark.parametrize(
    ("saved", "loaded"), [(torch.float32, torch.float64), (torch.float64, torch.float32)]
)
def test_state_follows_the_parameters_dtype(saved: torch.dtype, loaded: torch.dtype) -> None:
    model = conv_net(saved)
    opt = make(model, graft="adam")
    train(model, opt, 0, 3)
    other = conv_net(loaded)
    other.load_state_dict(model.state_dict())
    fresh = make(other, graft="adam")
    fresh.load_state_dict(opt.state_dict())
    state = fresh.state[other[0].weight]
    held = [state["momentum"], state["second_moment"], *state["stats"], *state["factors"]]
    assert {tensor.dtype for tensor in held} == {loaded}
    train(other, fresh, 3, 5)


def test_resumed_after_a_warm_start_is_bit_for_bit(snapshot: "TakeSnapshot") -> None:
    runs = []
    for interrupted in (False, True):
        torch.manual_seed(3)
        model = conv_net()
        opt = make(model)
        batches = torch.randn(3, 8, 2, 4, 4, generator=torch.Generator().manual_seed(9))
        opt.warm_start((model(x) for x in batches), model=model)
        if interrupted:
            files = through_a_file((model.state_dict(), opt.state_dict()))
            model.load_state_dict(files[0])
            opt = make(model)
            opt.load_state_dict(files[1])
        train(model, opt, 0, 7)
        runs.append(snapshot(model.parameters(), opt))
    runs[0].assert_equals(runs[1])


# ------------------------------------------------------------------ schedule, closure, accumulation


def test_learning_rate_scheduler_is_followed(direct: "Direct") -> None:
    p = nn.Parameter(torch.randn(4, 3, dtype=torch.float64))
    mirror, harness = p.detach().clone(), direct([p])
    opt = TNT([p], lr=0.1, stat_interval=2, inverse_interval=3, likelihood=harness.likelihood)
    oracle = DenseTNT([mirror], lr=0.1, damping=0.01, stat_interval=2, inverse_interval=3)
    scheduler = torch.optim.lr_scheduler.StepLR(opt, step_size=3, gamma=0.5)
    for t in range(10):
        g, s = torch.randn(4, 3).double(), torch.randn(4, 3).double()
        harness.iterate(opt, [g], [s])
        scheduler.step()
        oracle.lr = 0.1 * 0.5 ** (t // 3)
        oracle.step([g], [s])
        assert_close_to(p, mirror, FLOAT64_TRAJECTORY)


@pytest.mark.parametrize("method", [TNT, Shampoo, KFAC])
def test_a_state_saved_without_a_scheduler_loads_beside_one(method: Any) -> None:
    """A scheduler leaves entries of its own in the groups, which no saved state need have."""
    model = nn.Linear(3, 2)

    def made(lr: float) -> Any:
        return method(model if method is KFAC else model.parameters(), lr=lr)

    saved = made(0.25).state_dict()
    opt = made(0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(opt, step_size=1, gamma=0.5)
    assert "initial_lr" in opt.param_groups[0]
    opt.load_state_dict(saved)
    assert opt.param_groups[0]["lr"] == 0.25
    opt.step()
    scheduler.step()
    assert opt.param_groups[0]["lr"] == 0.125


def test_closure_is_evaluated_with_gradients_and_its_loss_returned(
    fixed_labels: "FixedLabels",
) -> None:
    torch.manual_seed(1)
    model = nn.Linear(3, 4).double()
    twin = copy.deepcopy(model)
    opt, opt2 = (
        TNT(m.parameters(), lr=1e-2, stat_interval=1, likelihood=fixed_labels)
        for m in (model, twin)
    )
    x, fixed_labels.current = torch.randn(5, 3).double(), torch.tensor([0, 1, 2, 3, 0])

    def closure() -> Tensor:
        opt.zero_grad()
        output = model(x)
        loss = output.square().mean()
        opt.observe(output)
        loss.backward()
        return loss

    for _ in range(3):
        output = twin(x)
        expected = output.square().mean()
        opt2.zero_grad()
        opt2.observe(output)
        expected.backward()
        assert opt2.step() is None
        assert torch.equal(torch.as_tensor(opt.step(closure)), expected)
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True)
    )


def test_micro_batches_average_the_sampled_gradients(fixed_labels: "FixedLabels") -> None:
    """Four micro-batches of 4 are one batch of 16, statistics included; the next step is new."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 4)).double()
    twin = copy.deepcopy(model)
    opt, whole = (
        TNT(m.parameters(), lr=1e-3, stat_interval=2, inverse_interval=3, likelihood=fixed_labels)
        for m in (model, twin)
    )
    for _ in range(7):
        x, y, sampled = torch.randn(16, 3).double(), *torch.randint(4, (2, 16))
        opt.zero_grad()
        for part in range(0, 16, 4):
            rows = slice(part, part + 4)
            output = model(x[rows])
            fixed_labels.current = sampled[rows]
            loss = nn.functional.cross_entropy(output, y[rows]) / 4
            opt.observe(output)
            loss.backward()
        opt.step()
        whole.zero_grad()
        output = twin(x)
        fixed_labels.current = sampled
        whole.observe(output)
        nn.functional.cross_entropy(output, y).backward()
        whole.step()
        for a, b in zip(model.parameters(), twin.parameters(), strict=True):
            assert_close_to(a, b, FLOAT64_REORDERED)
            for kind in ("stats", "factors"):
                for s, r in zip(opt.state[a][kind], whole.state[b][kind], strict=True):
                    assert_close_to(s, r, 100 * FLOAT64_REORDERED)


def test_observe_costs_a_backward_only_where_due_and_leaves_no_trace() -> None:
    torch.manual_seed(1)
    model = nn.Linear(3, 4)
    opt = TNT(model.parameters(), stat_interval=3, inverse_interval=3)
    for t in range(7):
        output = model(torch.randn(5, 3))
        calls: list[Tensor] = []
        output.register_hook(calls.append)
        grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        before = torch.get_rng_state()
        opt.observe(output)
        assert len(calls) == (1 if t % 3 == 0 else 0)
        assert torch.equal(torch.get_rng_state(), before)
        for p, g in zip(model.parameters(), grads, strict=True):
            assert (p.grad is None) if g is None else torch.equal(p.grad, g)
        output.square().sum().backward()
        opt.step()
