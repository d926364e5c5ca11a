"""capturable=True: recorded steps equal plain ones; each kind of step is recorded once.

Recordings on the CPU keep a CUDA graph's rules (see recorded_graph.py).
"""

import copy
import itertools
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from optimizers import EARLY, through_a_file
from recorded_graph import Recorder
from torch import Tensor, nn

from tnt_optim import TNT, Shampoo, cuda_graphs
from tnt_optim.processes import Processes

T1, T2 = 2, 6

Method = TNT | Shampoo


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """Recordings on the CPU, without the check that parameters are on a CUDA device."""
    for name, module in list(sys.modules.items()):
        if name.startswith("tnt_optim") and hasattr(module, "check_graphs_device"):
            monkeypatch.setattr(module, "check_graphs_device", lambda param, others: None)
    return Recorder(monkeypatch)


class Net(nn.Module):
    """A convolution, a norm and two linear layers, one of them in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3)
        self.norm = nn.LayerNorm(3)
        self.hidden = nn.Linear(3, 5).bfloat16()
        self.out = nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        h = self.norm(torch.tanh(self.conv(x)).mean((2, 3)))
        return self.out(torch.tanh(self.hidden(h.bfloat16())).float())


def optimizer_of(net: nn.Module, *, method: type[Method] = TNT, **settings: Any) -> Method:
    rest = [p for name, p in net.named_parameters() if not name.startswith("conv")]
    groups = [{"params": [*net.conv.parameters()], "weight_decay": 0.1}, {"params": rest}]
    defaults: dict[str, Any] = {
        "lr": 0.05,
        "damping": 0.1,
        "stat_interval": T1,
        "inverse_interval": T2,
    }
    if method is TNT:
        defaults["likelihood"] = "categorical"
    return method.paper(groups, **{**defaults, **settings})


def train(
    net: nn.Module,
    optimizer: Method,
    steps: int,
    *,
    first: int = 0,
    set_to_none: bool = True,
    before_step: Callable[[int], None] = lambda step: None,
) -> None:
    """Steps, each with its own batch, learning rate and momentum."""
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(6, 2, 5, 5, generator=generator)
        y = torch.randint(4, (6,), generator=generator)
        for group in optimizer.param_groups:
            group["lr"] = 0.05 / (1 + step)
            group["momentum"] = 0.9 if step < 11 else 0.8
        optimizer.zero_grad(set_to_none=set_to_none)
        output = net(x)
        optimizer.observe(output)
        nn.functional.cross_entropy(output, y).backward()
        before_step(step)
        optimizer.step()


def pair(**settings: Any) -> tuple[Net, Method, Net, Method]:
    """The same network twice, with plain and with recorded steps."""
    plain = Net()
    recorded = copy.deepcopy(plain)
    return (
        plain,
        optimizer_of(plain, **settings),
        recorded,
        optimizer_of(recorded, capturable=True, **settings),
    )


def assert_same(plain: nn.Module, recorded: nn.Module, tolerance: float = 0.0) -> None:
    for p, q in zip(plain.parameters(), recorded.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"likelihood": None},
        EARLY,
        {"relative_damping": True},
        {"interval_warmup": 4},
        {"rounding": "master"},
        {"method": Shampoo},
        {"method": Shampoo, "relative_damping": True, "max_factor_dim": 4},
    ],
)
def test_recorded_steps_are_the_steps(
    recorder: Recorder, settings: dict[str, Any], set_to_none: bool
) -> None:
    """To the bit, with settings that change from step to step."""
    plain, optimizer, recorded, capturable = pair(**settings)
    train(plain, optimizer, 30, set_to_none=set_to_none)
    train(recorded, capturable, 30, set_to_none=set_to_none)
    assert_same(plain, recorded)
    for p, q in zip(plain.parameters(), recorded.parameters(), strict=True):
        for key in ("momentum", "stats", "factors"):
            torch.testing.assert_close(
                optimizer.state[p][key], capturable.state[q][key], rtol=0, atol=0
            )
        assert int(capturable.state[q]["updates"]) == optimizer.state[p]["updates"] == 30
    assert recorder.replays > 20


def test_a_report_without_memory_does_not_repeat_the_update(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The graph has run when its codes find no memory: the next call of ``step`` only reports."""
    plain, optimizer, recorded, capturable = pair()
    train(plain, optimizer, 2 * T2 + 1)
    train(recorded, capturable, 2 * T2)  # the next step replays a graph with everything due

    def delivered(codes: Tensor) -> None:
        raise torch.OutOfMemoryError("pinned memory")

    replays = recorder.replays
    with monkeypatch.context() as patch:
        patch.setattr("tnt_optim.step.Delivery", delivered)
        with pytest.raises(torch.OutOfMemoryError, match="pinned memory"):
            train(recorded, capturable, 1, first=2 * T2)
    assert capturable.has_unfinished_update
    assert recorder.replays == replays + 1
    capturable.step()
    assert not capturable.has_unfinished_update
    assert recorder.replays == replays + 1
    assert_same(plain, recorded)
    assert capturable.param_groups[0]["step"] == optimizer.param_groups[0]["step"] == 2 * T2 + 1


def out_of_memory(monkeypatch: pytest.MonkeyPatch, call: int) -> None:
    """The factors of this call find no memory."""
    factors, calls = TNT._factors, itertools.count(1)

    def refreshed(self: Any, *arguments: Any) -> Tensor:
        if next(calls) == call:
            raise torch.OutOfMemoryError("factors")
        return factors(self, *arguments)

    monkeypatch.setattr(TNT, "_factors", refreshed)


@pytest.mark.filterwarnings("ignore:steps that refresh .* cannot be captured")
def test_a_recording_that_fails_leaves_no_trace(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory runs out in the capture, after a stage of the update, and then in the step itself."""
    settings: dict[str, Any] = {"stat_interval": 1, "inverse_interval": 1, "nesterov": True}
    plain, optimizer, recorded, capturable = pair(**settings)
    train(plain, optimizer, 6)
    train(recorded, capturable, 2)
    recorder.refused = {"scaled_step_"}
    with monkeypatch.context() as patch:
        out_of_memory(patch, 1 + len(capturable.param_groups))
        with pytest.raises(torch.OutOfMemoryError, match="factors"):
            train(recorded, capturable, 1, first=2)
    assert not capturable.has_unfinished_update
    train(recorded, capturable, 4, first=2)
    assert_same(plain, recorded)


def test_reports_of_a_step_without_a_graph_outlive_an_error(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Statistics that were left out are counted, though the factors then found no memory."""
    settings: dict[str, Any] = {"stat_interval": 1, "inverse_interval": 1, "likelihood": None}
    _, _, net, optimizer = pair(**settings)
    train(net, optimizer, 5)
    params = list(net.parameters())

    def other_kind(step: int) -> None:
        params[-1].grad = None  # such a step has no graph yet
        params[0].grad.fill_(torch.nan)  # type: ignore[union-attr]

    with monkeypatch.context() as patch:
        out_of_memory(patch, 1)
        with pytest.raises(torch.OutOfMemoryError, match="factors"):
            train(net, optimizer, 1, first=5, before_step=other_kind)
    with pytest.warns(RuntimeWarning, match="not finite"):
        train(net, optimizer, 1, first=5, before_step=other_kind)
    assert optimizer.failures()["skipped_statistics"] == 1


@pytest.mark.parametrize("method", [TNT, Shampoo])
def test_one_recording_for_each_kind_of_step(recorder: Recorder, method: type[Method]) -> None:
    _, _, net, optimizer = pair(method=method)
    train(net, optimizer, 4 * T2)
    # Three kinds: nothing due (also the first step, which makes its statistics and inverses before
    # it), statistics due, both due. The first step of each kind is no replay.
    assert recorder.recordings == 3
    assert recorder.replays == 4 * T2 - 3
    train(net, optimizer, 2 * T2, first=4 * T2)
    assert recorder.recordings == 3
    assert recorder.replays == 6 * T2 - 3


@pytest.mark.parametrize(
    ("method", "form"),
    [
        (TNT, {"graft": "adam", "estimator": "mle"}),
        (TNT, {"graft": "sgd"}),
        (Shampoo, {"graft": "adam"}),
        (Shampoo, {"graft": "sgd"}),
    ],
    ids=str,
)
def test_grafted_steps(recorder: Recorder, method: type[Method], form: dict[str, str]) -> None:
    """Adam's bias corrections go on counting in a replay."""
    plain, optimizer, recorded, capturable = pair(method=method, **form, lr=0.01)
    train(plain, optimizer, 20)
    train(recorded, capturable, 20)
    assert_same(plain.conv, recorded.conv, 1e-5)
    assert recorder.replays > 10


def test_one_gradient_given_to_two_parameters(recorder: Recorder) -> None:
    results = []
    for capturable in (False, True):
        params = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))]
        optimizer = TNT.paper(params, lr=0.1, damping=0.1, likelihood=None, capturable=capturable)
        for step in range(6):
            given = torch.arange(3.0) + step
            params[0].grad = given
            params[1].grad = given if step < 3 else torch.full((), 2.0).expand(3)
            optimizer.step()
        results.append([p.detach().clone() for p in params])
    assert recorder.replays > 2
    for plain, recorded in zip(*results, strict=True):
        assert torch.equal(plain, recorded)


def test_learning_rate_as_a_tensor(recorder: Recorder) -> None:
    plain, optimizer, recorded, capturable = pair()

    def as_tensors(step: int) -> None:
        for group in capturable.param_groups:
            group["lr"] = torch.tensor(group["lr"], dtype=torch.float64)

    train(plain, optimizer, 15)
    train(recorded, capturable, 15, before_step=as_tensors)
    assert_same(plain, recorded)
    assert recorder.replays > 5


@pytest.mark.parametrize("method", [TNT, Shampoo])
def test_resumed_training_is_the_training(recorder: Recorder, method: type[Method]) -> None:
    """Saved by one kind of optimizer and loaded by the other, in the middle of the schedule."""
    plain, optimizer, recorded, capturable = pair(method=method)
    train(plain, optimizer, 2 * T2 + 3)
    train(recorded, capturable, T2 + 2)
    weights, state = through_a_file([recorded.state_dict(), capturable.state_dict()])
    for settings in ({"capturable": True}, {}):
        net = Net()
        net.load_state_dict(weights)
        again = optimizer_of(net, method=method, **settings)
        again.load_state_dict(state)
        before = recorder.replays
        train(net, again, T2 + 1, first=T2 + 2)
        assert_same(plain, net)
        assert (recorder.replays > before) == again.capturable
    train(recorded, capturable, T2 + 1, first=T2 + 2)
    assert_same(plain, recorded)
    # Loading in the middle: the old recordings are of other memory.
    capturable.load_state_dict(optimizer.state_dict())
    train(plain, optimizer, T2, first=2 * T2 + 3)
    train(recorded, capturable, T2, first=2 * T2 + 3)
    assert_same(plain, recorded)


def test_copies_record_for_themselves(recorder: Recorder) -> None:
    plain, optimizer, recorded, capturable = pair()
    train(plain, optimizer, 20)
    train(recorded, capturable, 10)
    net, other = copy.deepcopy((recorded, capturable))
    before = recorder.replays
    train(net, other, 10, first=10)
    assert_same(plain, net)
    assert recorder.replays > before
    train(recorded, capturable, 10, first=10)
    assert_same(plain, recorded)


def test_parameters_that_moved_are_recorded_anew(recorder: Recorder) -> None:
    plain, optimizer, recorded, capturable = pair()
    train(plain, optimizer, 20)
    train(recorded, capturable, 10)
    before = recorder.recordings
    for param in recorded.parameters():
        param.data = param.data.clone()
    train(recorded, capturable, 10, first=10)
    assert_same(plain, recorded)
    assert recorder.recordings > before


def test_parameters_that_take_turns(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A parameter without a gradient at some steps makes kinds of its own, up to a number."""
    monkeypatch.setattr(cuda_graphs, "MOST_GRAPHS", 4)
    plain, optimizer, recorded, capturable = pair()

    def drop(net: Net) -> Callable[[int], None]:
        def drop_(step: int) -> None:
            if step % 3 == 2:
                net.out.bias.grad = None

        return drop_

    train(plain, optimizer, 36, before_step=drop(plain))
    train(recorded, capturable, 36, before_step=drop(recorded))
    assert_same(plain, recorded)
    assert 0 < recorder.recordings <= 4
    assert len(capturable._graphs._recorded) == 4


@pytest.mark.parametrize(
    "settings",
    [
        {"likelihood": None},
        {"method": Shampoo},
        {"method": Shampoo, "relative_damping": True},
    ],
)
def test_failures_are_counted_in_replays(recorder: Recorder, settings: dict[str, Any]) -> None:
    """A gradient that is not finite leaves the statistics alone, and a bad inverse the factors."""
    _, _, net, optimizer = pair(**settings)
    train(net, optimizer, 4 * T2)
    replays = recorder.replays
    state = optimizer.state[net.out.weight]
    stats = [s.clone() for s in state["stats"]]
    net.out.weight.grad = torch.full_like(net.out.weight, float("nan"))
    for param in net.parameters():
        if param is not net.out.weight:
            param.grad = torch.zeros_like(param)
    optimizer.step()  # statistics are due, and inverses
    torch.testing.assert_close(state["stats"], stats, rtol=0, atol=0)
    assert recorder.replays == replays + 1
    with pytest.warns(RuntimeWarning, match="not finite"):
        assert optimizer.failures()["skipped_statistics"] == 1

    factors = [a.clone() for a in state["factors"]]
    with torch.no_grad():
        state["stats"][0].fill_(float("nan"))
    for param in net.parameters():
        param.grad = torch.zeros_like(param)
    for _ in range(T2):
        optimizer.step()
    torch.testing.assert_close(state["factors"], factors, rtol=0, atol=0)
    with pytest.warns(RuntimeWarning, match="mode 0 could not be inverted"):
        assert optimizer.failures()["failed_inverses"] == 1


def test_parameters_on_another_device_than_the_current_one(recorder: Recorder) -> None:
    """The device and the streams of the caller stay the current ones."""
    recorder.device = 1
    before = recorder.place()
    plain, optimizer, recorded, capturable = pair()
    train(plain, optimizer, 30)
    train(recorded, capturable, 30)
    assert_same(plain, recorded)
    assert recorder.replays > 20
    assert recorder.place() == before


def test_a_graph_that_updates_nothing_is_an_error(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder.device = 1
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    net = Net()
    optimizer = optimizer_of(net, capturable=True)
    with pytest.raises(RuntimeError, match="the CUDA graph of steps .* updates nothing"):
        train(net, optimizer, 6)


@pytest.mark.parametrize("late", [False, True], ids=["at once", "at its end"])
@pytest.mark.parametrize(
    ("refused", "kinds"),
    [
        ("damped_inverse", ["statistics and factors"]),
        ("preconditioned_step_", ["nothing", "statistics", "statistics and factors"]),
    ],
)
def test_kinds_that_cannot_be_recorded_run_without_a_graph(
    recorder: Recorder, refused: str, kinds: list[str], late: bool
) -> None:
    """One warning each; the other kinds are recorded."""
    recorder.refused, recorder.refuses_late = {refused}, late
    before = recorder.place()
    plain, optimizer, recorded, capturable = pair()
    train(plain, optimizer, 4 * T2)
    with pytest.warns(RuntimeWarning) as said:
        train(recorded, capturable, 4 * T2)
    assert_same(plain, recorded)
    assert recorder.place() == before
    assert recorder.recordings == 3
    assert (recorder.replays > 2 * T2) == (len(kinds) < 3)
    why = "previous error" if late else f"{refused}: operation not permitted"
    parts = [str(warning.message).partition(" cannot be captured") for warning in said]
    assert sorted(what for what, _, _ in parts) == [f"steps that refresh {k}" for k in kinds]
    assert all(why in rest for _, _, rest in parts)


@pytest.mark.parametrize("layout", ["expanded", "gaps"])
def test_a_kind_first_runs_with_the_strides_that_it_records(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    """Launches are planned at the first step of a kind, which a recording must not do."""
    seen: list[tuple[int, ...]] = []
    update = Processes.update

    def spied(self: Processes, part: Any) -> Any:
        seen.extend(g.stride() for g in part.grads.values())
        return update(self, part)

    monkeypatch.setattr(Processes, "update", spied)
    weight = nn.Parameter(torch.ones(4, 3))
    optimizer = Shampoo.paper([weight], lr=0.1, damping=0.1, capturable=True)
    for step in range(8):
        memory = torch.full((4, 6), 1.0 + step)
        weight.grad = memory[:, ::2] if layout == "gaps" else memory[:1, :3].expand(4, 3)
        optimizer.step()
    assert recorder.recordings > 0 and len(seen) > recorder.recordings
    assert len(set(seen)) == 1


def test_not_within_another_graph(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, net, optimizer = pair()
    train(net, optimizer, 3)
    before = [p.detach().clone() for p in net.parameters()]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="graphs of its own"):
        optimizer.step()
    for param, value in zip(net.parameters(), before, strict=True):
        assert torch.equal(param, value)


def test_mistakes() -> None:
    net = Net()
    with pytest.raises(ValueError, match="^capturable=True needs .* one CUDA device, got cpu"):
        optimizer_of(net, capturable=True)
    with pytest.raises(ValueError, match="^rounding='stochastic' cannot be part of CUDA graphs"):
        optimizer_of(net, capturable=True, rounding="stochastic")
