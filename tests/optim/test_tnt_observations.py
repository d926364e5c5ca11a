"""What observe() keeps until the step: who is asked, what a raised or skipped step leaves."""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch
from drawn import close, noise, weight
from oracle import contraction
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tnt_optim import TNT, PreconditionerError
from tnt_optim.update import Local

if TYPE_CHECKING:
    from conftest import DirectGradients, Snapshot

    Direct = Callable[[Sequence[Tensor]], DirectGradients]
    TakeSnapshot = Callable[..., Snapshot]

pytestmark = pytest.mark.usefixtures("one_thread")


class Heads(nn.Module):
    """One body, several heads; a batch uses the body and one of them."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.body = nn.Linear(4, 5)
        self.heads = nn.ModuleList(nn.Linear(5, 3) for _ in range(count))

    def forward(self, x: Tensor, head: int) -> Tensor:
        """Logits of one head."""
        logits: Tensor = self.heads[head](torch.tanh(self.body(x)))
        return logits


def train(model: Heads, opt: TNT, heads: Sequence[int]) -> None:
    """One step for each entry, with that head; all other gradients are None."""
    for head in heads:
        opt.zero_grad()
        output = model(torch.randn(8, 4), head)
        opt.observe(output)
        nn.functional.cross_entropy(output, torch.randint(3, (8,))).backward()
        opt.step()


def test_heads_used_in_turn_are_all_trained() -> None:
    model = Heads(3)
    opt = TNT(model.parameters(), lr=0.1, damping=1.0, stat_interval=10)
    before = copy.deepcopy(model.state_dict())
    # The second and third head appear for the first time between the scheduled statistics, and
    # once newcomers are asked for, the batch at hand may use none of them.
    train(model, opt, [0, 1, 0, 2, 0, 1, 1, 2, 2, 0, 1, 2])
    for name, value in model.state_dict().items():
        assert not torch.equal(value, before[name]), name
    assert all(opt.state[p]["updates"] > 0 for p in model.parameters())


@pytest.mark.parametrize("period", [2, 5, 10])
def test_head_used_only_between_scheduled_statistics_is_trained(period: int) -> None:
    """The batches at which statistics are due, and those right after its own, use another one."""
    model = Heads(2)
    opt = TNT(model.parameters(), stat_interval=10)
    train(model, opt, ([0] * (period - 1) + [1]) * 3)
    # It waits at its first batch, brings its statistics with its second.
    assert [opt.state[p]["updates"] for p in model.heads[1].parameters()] == [2, 2]


def test_group_added_later_may_be_missed_by_the_next_batch() -> None:
    model = Heads(2)
    opt = TNT([*model.body.parameters(), *model.heads[0].parameters()], stat_interval=10)
    train(model, opt, [0, 0])
    opt.add_param_group({"params": list(model.heads[1].parameters())})
    train(model, opt, [0, 1, 1])
    # At the first batch with it, no observe had asked for it since: it waits for the next one.
    assert [opt.state[p]["updates"] for p in model.heads[1].parameters()] == [1, 1]


def test_step_that_raises_has_used_up_its_observation(
    direct: "Direct", snapshot: "TakeSnapshot"
) -> None:
    p, q = weight(3, 4), weight(5)
    harness = direct([p, q])
    opt = TNT([p, q], likelihood=harness.likelihood)
    before = snapshot([p, q], opt)
    with pytest.raises(RuntimeError, match="no statistics"):
        harness.iterate(opt, [noise(3, 4), noise(5)], [noise(3, 4), None])
    p.grad = q.grad = None
    before.assert_unchanged()
    sampled = [noise(3, 4), noise(5)]
    harness.iterate(opt, [noise(3, 4), noise(5)], sampled)
    close(opt.state[p]["stats"][0], contraction(sampled[0], 0))
    close(opt.state[q]["stats"][0], contraction(sampled[1], 0))


def test_observations_of_a_skipped_step_are_averaged_in(direct: "Direct") -> None:
    p = weight(3, 4)
    harness = direct([p])
    opt = TNT([p], likelihood=harness.likelihood)
    first, second = noise(3, 4), noise(3, 4)
    harness.observe(opt, [first])  # and no step, as GradScaler does on an overflow
    harness.iterate(opt, [noise(3, 4)], [second])
    close(opt.state[p]["stats"][1], contraction((first + second) / 2, 1))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("place", [0, 1, 2, 3])
def test_skipped_steps_observation_that_is_not_finite_is_left_out(
    direct: "Direct", place: int, bad: float
) -> None:
    """Whole, though only one parameter's gradient is not finite; the others' bits are kept."""
    params = [weight(3, 4), weight(5)]
    harness = direct(params)
    good = [[noise(3, 4), noise(5)] for _ in range(3)]
    first = [noise(3, 4), noise(5)]

    def statistics(observed: list[list[Tensor]]) -> list[Tensor]:
        opt = TNT(params, lr=0.0, stat_interval=1, likelihood=harness.likelihood)
        harness.iterate(opt, first, first)
        for sampled in observed[:-1]:
            harness.observe(opt, sampled)
        harness.observe(opt, observed[-1])
        held = opt._observed.gradients(Local(), params, params, opt._has_state)
        for i, p in enumerate(params):  # as without any choice, to the bit
            assert torch.equal(held[p], (good[0][i] + good[1][i] + good[2][i]) / 3)
        harness.iterate(opt, first)
        assert opt.failures() == {"skipped_statistics": 0, "failed_inverses": 0}
        return [s for p in params for s in opt.state[p]["stats"]]

    expected = statistics(good)
    spoiled = [noise(3, 4), noise(5)]
    spoiled[1][2] = bad
    assert all(map(torch.equal, statistics([*good[:place], spoiled, *good[place:]]), expected))
    mean = (good[0][1] + good[1][1] + good[2][1]) / 3
    close(expected[2], 0.9 * contraction(first[1], 0) + 0.1 * contraction(mean, 0))


def test_observations_none_of_which_is_finite_are_counted(direct: "Direct") -> None:
    p = weight(3, 4)
    harness = direct([p])
    opt = TNT([p], stat_interval=1, likelihood=harness.likelihood)
    harness.iterate(opt, [noise(3, 4)], [noise(3, 4)])
    held = [s.clone() for s in opt.state[p]["stats"]]
    harness.observe(opt, [noise(3, 4) * math.nan])
    with pytest.warns(RuntimeWarning, match="not finite"):
        harness.iterate(opt, [noise(3, 4)], [noise(3, 4) * math.inf])
    assert all(map(torch.equal, held, opt.state[p]["stats"]))
    assert opt.failures() == {"skipped_statistics": 1, "failed_inverses": 0}


@pytest.mark.parametrize("bad", [lambda z: z.detach(), lambda z: z[:0], lambda z: z.sum()])
def test_refused_output_leaves_an_earlier_one(
    bad: Callable[[Tensor], Tensor], snapshot: "TakeSnapshot"
) -> None:
    model = nn.Linear(3, 4)
    opt = TNT(model.parameters())
    opt.observe(model(torch.randn(5, 3)))
    before = snapshot(model.parameters(), opt)
    assert before.content["held"]["_observed"]["count"] == 1
    assert len(before.content["held"]["_observed"]["sampled"]) == 2
    with pytest.raises(ValueError, match="output"):
        opt.observe(bad(model(torch.randn(5, 3))))
    before.assert_unchanged()


def test_warnings_name_the_line_that_called_step(direct: "Direct") -> None:
    p = weight(3, 4)
    harness = direct([p])
    opt = TNT([p], stat_interval=1, likelihood=harness.likelihood)
    schedule = torch.optim.lr_scheduler.ConstantLR(opt)  # wraps step once more
    harness.iterate(opt, [noise(3, 4)], [noise(3, 4)])
    with pytest.warns(RuntimeWarning) as said:
        opt.step()
        harness.observe(opt, [noise(3, 4) * math.nan])
        opt.step()
    assert ["observe(output)" in str(w.message) for w in said] == [True, False]
    assert [w.filename for w in said] == [__file__] * 2
    schedule.step()


def test_float16_gradients_have_norms_beyond_float16(direct: "Direct") -> None:
    p = nn.Parameter(torch.zeros(200, 200, dtype=torch.float16))
    harness = direct([p])
    opt = TNT([p], likelihood=harness.likelihood)
    # Norm 80000; float16 ends at 65504. The dictated gradient is a sum, which must not overflow.
    gradient = torch.full((200, 200), 400.0, dtype=torch.float16)
    harness.iterate(opt, [gradient], [gradient])
    expected = torch.full((200, 200), 400.0**2 * 200)
    torch.testing.assert_close(opt.state[p]["stats"][0], expected, rtol=1e-6, atol=0)


class _HostReads(TorchDispatchMode):
    """Counts the reads that would make the host wait for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select"):
            self.reads.append(name)
        return func(*args, **(kwargs or {}))


@contextmanager
def no_host_reads() -> Iterator[None]:
    """Fails where a tensor's value is read on the host."""
    with _HostReads() as mode:
        yield
    assert mode.reads == []


def test_reads_are_noticed() -> None:
    with pytest.raises(AssertionError, match="_local_scalar_dense"), no_host_reads():
        torch.ones(2).sum().item()


@pytest.mark.parametrize("likelihood", ["categorical", "bernoulli", "gaussian"])
def test_later_steps_never_wait_for_the_device(
    likelihood: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(12, 4))
    opt = TNT(model.parameters(), likelihood=likelihood, stat_interval=2, inverse_interval=3)
    # Reports reach the host by a copy nobody waits for; on the CPU reading them is the arrival.
    monkeypatch.setattr("tnt_optim.failures._Delivery.arrived", lambda self: False)
    for t in range(7):
        opt.zero_grad()
        output = model(torch.randn(5, 2, 4, 4))
        if t == 0:  # the first statistics have nothing to fall back on: they are waited for
            opt.observe(output)
            output.sum().backward()
            opt.step()
            continue
        with no_host_reads():
            opt.observe(output)
            for _ in range(t % 3):  # micro-batches
                opt.observe(model(torch.randn(5, 2, 4, 4)))
        output.sum().backward()
        with no_host_reads():
            opt.step()


def test_nothing_is_left_after_a_failure_is_caught(direct: "Direct") -> None:
    p, q = weight(3, 4), weight(5)
    harness = direct([p, q])
    opt = TNT([{"params": [p]}, {"params": [q]}], likelihood=harness.likelihood, stat_interval=1)
    harness.iterate(opt, [noise(3, 4), noise(5)], [noise(3, 4), noise(5)])
    good = copy.deepcopy(opt.state_dict())
    for _ in range(4):
        with pytest.warns(RuntimeWarning, match="not finite"):
            harness.iterate(opt, [noise(3, 4), noise(5)], [noise(3, 4) / 0, noise(5)])
    with pytest.raises(PreconditionerError, match="5 in a row"):
        harness.iterate(opt, [noise(3, 4), noise(5)], [noise(3, 4) / 0, noise(5)])
    # A checkpoint can still be written, a copy made, and the last good one loaded.
    assert opt.state_dict()["state"][0]["skipped_statistics"] == 5
    assert copy.deepcopy(opt).failures()["skipped_statistics"] == 5
    opt.load_state_dict(good)
    assert opt.failures() == {"skipped_statistics": 0, "failed_inverses": 0}
    harness.iterate(opt, [noise(3, 4), noise(5)], [noise(3, 4), noise(5)])
    assert bool(torch.isfinite(p).all())
