"""``observe`` and ``warm_start``: refusals, when they sample, micro-batches, skipped steps."""

import copy
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext

import pytest
import torch
from conftest import FixedLabels, Snapshot, observation_count
from drawn import close, noise, weight
from kfac_models import Heads
from optimizers import (
    NO_FAILURES,
    Dictated,
    apart,
    conv_net,
    equal,
    images,
    made,
    moved,
    net,
    no_host_reads,
    statistics,
    tnt_and_kfac,
    train,
    values,
)
from oracle import contraction
from tolerances import FLOAT64_REORDERED
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tnt_optim import KFAC, TNT, Masked, observations

# ------------------------------------------------------------------ outputs


@pytest.mark.parametrize("shape", [(), (4,)])
@pytest.mark.parametrize("likelihood", ["categorical", "bernoulli", "gaussian"])
def test_outputs_of_wrong_dimensions_are_refused(likelihood: str, shape: tuple[int, ...]) -> None:
    p = nn.Parameter(torch.randn(shape))
    with pytest.raises(ValueError, match="^output must"):
        TNT.paper([p], likelihood=likelihood).observe(p * 1.0)


WRONG: dict[str, tuple[Callable[[Tensor], object], str]] = {
    "no graph": (lambda z: z.detach(), "output must have a graph"),
    "one class": (lambda z: z[:, :1], "at least two classes .* 'bernoulli' or 'gaussian'"),
    "integers": (lambda z: z.argmax(1), "output must be a floating-point tensor"),
    "no tensor": (lambda z: (z,), "output must be a floating-point tensor, got tuple"),
    "another model's": (lambda z: net()(torch.randn(2, 4)), "parameter"),
}


@tnt_and_kfac
@pytest.mark.parametrize("empty", [lambda z: z[:0], lambda z: z[:, None][:, :0]])
def test_an_output_without_rows_is_left_out(
    name: str, empty: Callable[[Tensor], Tensor], recwarn: pytest.WarningsRecorder
) -> None:
    model = nn.Linear(3, 4)
    opt = made(name, model)
    x = torch.randn(5, 3)
    opt.observe(model(x))
    model(x).square().mean().backward()
    opt.step()
    before = Snapshot(model.parameters(), opt)
    opt.observe(empty(model(x)))
    opt.observe(Masked(empty(model(x)), torch.ones(0, dtype=torch.bool)))
    before.assert_unchanged()
    opt.step()  # with the statistics that it has
    assert not [str(w.message) for w in recwarn if "observe" in str(w.message)]
    with pytest.raises(ValueError, match="outputs|output must hold at least one example"):
        opt.warm_start([empty(model(x))])


@tnt_and_kfac
@pytest.mark.parametrize("wrong", WRONG)
def test_a_refused_output_leaves_an_earlier_observation(name: str, wrong: str) -> None:
    model = nn.Linear(3, 4)
    opt = made(name, model)
    opt.observe(model(torch.randn(5, 3)))
    before = Snapshot(model.parameters(), opt)
    assert observation_count(opt) == 1
    change, message = WRONG[wrong]
    with pytest.raises(ValueError, match=message):
        opt.observe(change(model(torch.randn(5, 3))))
    with pytest.raises(ValueError, match=message):
        opt.warm_start(change(model(torch.randn(5, 3))) for _ in range(2))
    before.assert_unchanged()


@tnt_and_kfac
@pytest.mark.parametrize(
    ("likelihood", "message"),
    [(lambda z: 2 * z, "must give a 0-dim"), (lambda z: z.sum().detach(), "must have a graph")],
)
def test_a_likelihood_function_must_return_a_scalar_with_a_graph(
    name: str, likelihood: Callable[[Tensor], Tensor], message: str
) -> None:
    model = nn.Linear(3, 4)
    with pytest.raises(ValueError, match=f"^likelihood {message}"):
        made(name, model, likelihood=likelihood).observe(model(torch.randn(5, 3)))


@tnt_and_kfac
def test_an_output_whose_graph_is_gone_is_refused(name: str) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4))
    opt = made(name, model)
    output = model(torch.randn(5, 3))
    output.sum().backward()
    with pytest.raises(RuntimeError, match="observe must be called before the backward"):
        opt.observe(output)
    assert observation_count(opt) == 0


# ------------------------------------------------------------------ when it samples


@tnt_and_kfac
def test_observe_costs_a_backward_only_where_due_and_leaves_no_trace(name: str) -> None:
    """Gradients, which add up here, buffers and the global generator are to the bit what they are
    without; with fisher="empirical" nothing happens."""
    model, plain = conv_net(), conv_net()
    opt = made(name, model, stat_interval=3, inverse_interval=3)
    empirical = TNT.paper(model.parameters(), likelihood=None)
    for t in range(7):
        plain.load_state_dict(model.state_dict())
        x, _ = images(t)
        output = model(x)
        calls: list[Tensor] = []
        output.register_hook(calls.append)
        before, untouched = torch.get_rng_state(), Snapshot(model.parameters(), empirical)
        empirical.observe(output)
        untouched.assert_unchanged()
        opt.observe(output)
        assert len(calls) == (1 if t % 3 == 0 else 0)
        assert torch.equal(torch.get_rng_state(), before)
        for result in (output, plain(x)):
            result.softmax(1).square().sum().backward()
        assert equal([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])
        assert equal(model.buffers(), plain.buffers())
        opt.step()


@tnt_and_kfac
def test_a_step_before_any_statistic_says_what_to_do(name: str) -> None:
    model = net()
    opt = made(name, model)
    model(torch.randn(5, 4)).sum().backward()
    before = Snapshot(model.parameters(), opt)
    with pytest.raises(RuntimeError, match=r"no statistics.*observe\(output\) .*attach\(model\)"):
        opt.step()
    before.assert_unchanged()


@tnt_and_kfac
def test_a_forgotten_observe_warns_once_and_keeps_the_statistics(name: str) -> None:
    model = net()
    opt = made(name, model, stat_interval=1, inverse_interval=1)
    train(model, opt, [0])
    held = statistics(opt)
    with pytest.warns(RuntimeWarning, match=r"observe\(output\) was not called") as said:
        opt.step()
    assert [warning.filename for warning in said] == [__file__]
    before = values(model)
    opt.step()  # a second warning would be an error
    assert all(moved(model, before))
    assert equal(held, statistics(opt))


@pytest.mark.parametrize("likelihood", ["categorical", "bernoulli", "gaussian"])
@tnt_and_kfac
def test_later_steps_never_wait_for_the_device(
    name: str, likelihood: str, slow_reports: None
) -> None:
    """Only the first statistics wait for the device, and the comparison at the first step."""
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(12, 4))
    opt = made(name, model, likelihood=likelihood, stat_interval=2, inverse_interval=3)
    opt.warm_start([model(torch.randn(5, 2, 4, 4))])
    for t in range(7):
        opt.zero_grad()
        output = model(torch.randn(5, 2, 4, 4))
        with no_host_reads():
            opt.observe(output)
            for _ in range(t % 3):  # micro-batches
                opt.observe(model(torch.randn(5, 2, 4, 4)))
            output.softmax(1)[:, 0].sum().backward()
        with no_host_reads() if t else nullcontext():
            opt.step()
    with pytest.raises(AssertionError), no_host_reads():
        torch.ones(2).sum().item()


def test_hooks_on_gradients_shape_the_statistics_too() -> None:
    """A hook that freezes rows of a weight: the preconditioner does not mix them with others."""
    model = net()
    weight = next(model.parameters())
    frozen = torch.arange(len(weight)) % 2 == 0
    weight.register_hook(lambda gradient: gradient.masked_fill(frozen[:, None], 0.0))
    steps: list[Tensor] = []
    weight.register_post_accumulate_grad_hook(steps.append)
    before = weight.detach().clone()
    train(model, made("sampled", model, stat_interval=1, inverse_interval=1), range(3))
    assert len(steps) == 3  # the training's own backwards
    assert torch.equal(weight[frozen], before[frozen])
    assert (weight[~frozen] != before[~frozen]).all()


# ------------------------------------------------------------------ micro-batches, skipped steps


@pytest.mark.parametrize(("name", "ends"), [("sampled", [4, 8, 12, 16]), ("kfac", [4, 14, 16])])
def test_micro_batches_are_one_batch(name: str, ends: list[int], fixed_labels: FixedLabels) -> None:
    """Statistics and factors included; the next step is new. KFAC's may be of unequal sizes."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv1d(2, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(9, 4)).double()
    twin = copy.deepcopy(model)
    settings = {"lr": 0.01, "stat_interval": 2, "inverse_interval": 3, "likelihood": fixed_labels}
    opt, whole = (made(name, m, **settings) for m in (model, twin))
    parts = [slice(first, end) for first, end in itertools.pairwise([0, *ends])]
    for t in range(7):
        x, y, sampled = noise(16, 2, 4), *torch.randint(4, (2, 16))
        for net_, chosen, pieces in ((model, opt, parts), (twin, whole, [slice(0, 16)])):
            chosen.zero_grad()
            # At first all forwards, then all observations; later one after the other.
            outputs = map(net_, [x[rows] for rows in pieces])
            for output, rows in zip(list(outputs) if t == 0 else outputs, pieces, strict=True):
                fixed_labels.current = sampled[rows]
                chosen.observe(output)
                (cross_entropy(output, y[rows], reduction="sum") / 16).backward()
            chosen.step()
        assert apart(values(model), values(twin)) <= FLOAT64_REORDERED
        for key in ("stats", "factors"):
            one, other = (
                [m for state in o.state.values() for m in state.get(key, ())] for o in (opt, whole)
            )
            assert apart(one, other) <= 100 * FLOAT64_REORDERED


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("place", [0, 1, 2, 3])
def test_an_observation_that_is_not_finite_is_left_out(place: int, bad: float) -> None:
    """The whole observation, even if the gradient of only one parameter is not finite."""
    good = [[noise(3, 4), noise(5)] for _ in range(3)]
    first = [noise(3, 4), noise(5)]
    params = [weight(3, 4), weight(5)]

    def statistics(observed: list[list[Tensor]]) -> list[Tensor]:
        run = Dictated("sampled", params, lr=0.0, stat_interval=1)
        run.step(first)
        for sampled in observed[:-1]:
            run.observe(sampled)
        run.step(first, observed[-1])
        assert run.opt.failures() == NO_FAILURES
        return run.stats()

    expected = statistics(good)
    spoiled = [noise(3, 4), noise(5)]
    spoiled[1][2] = bad
    assert all(map(torch.equal, statistics([*good[:place], spoiled, *good[place:]]), expected))
    mean = (good[0][1] + good[1][1] + good[2][1]) / 3
    close(expected[2], 0.9 * contraction(first[1], 0) + 0.1 * contraction(mean, 0))


@pytest.mark.parametrize("wrap", [torch.sum, lambda z: {"logits": z}])
def test_a_likelihood_function_takes_any_output(wrap: Callable[[Tensor], object]) -> None:
    def loss(output: Tensor | dict[str, Tensor]) -> Tensor:
        return output["logits"].sum() if isinstance(output, dict) else output * 1.0

    model = net()
    opt = TNT.paper(model.parameters(), likelihood=loss)
    opt.observe(wrap(model(torch.randn(4, 4))))
    model(torch.randn(4, 4)).sum().backward()
    opt.step()
    assert any(s.any() for s in statistics(opt))


def test_observations_of_which_none_is_finite_count_as_one_failure() -> None:
    run = Dictated("sampled", [weight(3, 4)], stat_interval=1)
    run.step([noise(3, 4)])
    held = run.stats()
    run.observe([noise(3, 4) * math.nan])
    with pytest.warns(RuntimeWarning, match="not finite"):
        run.step([noise(3, 4)], [noise(3, 4) * math.inf])
    assert all(map(torch.equal, held, run.stats()))
    assert run.opt.failures() == {**NO_FAILURES, "skipped_statistics": 1}


@tnt_and_kfac
def test_an_output_of_another_model_is_refused_when_a_part_is_due(name: str) -> None:
    model = net()
    groups = [{"params": model[n].parameters(), "stat_interval": 2 + n} for n in (0, 2)]
    opt = (
        KFAC.paper(model, params=groups, likelihood="categorical")
        if name == "kfac"
        else TNT.paper(groups, likelihood="categorical")
    )
    train(model, opt, range(2))
    with pytest.raises(ValueError, match="output must depend on a parameter"):
        opt.observe(net()(torch.randn(8, 4)))
    opt.observe(model[2](torch.randn(8, 6)))  # this one misses what is due


# ------------------------------------------------------------------ parameters out of reach


def train_heads(model: Heads, opt: TNT, heads: Sequence[int]) -> None:
    """One step for each entry, with that head; the other heads have no gradient."""
    for head in heads:
        opt.zero_grad()
        output = model(torch.randn(8, 4).double(), head)
        opt.observe(output)
        cross_entropy(output, torch.randint(3, (8,))).backward()
        opt.step()


@pytest.mark.parametrize("period", [2, 5, 10])
def test_a_head_used_only_between_scheduled_statistics_is_trained(period: int) -> None:
    """It takes the momentum at its first batch, and starts its statistics with its second."""
    model = Heads(2)
    opt = TNT.paper(model.parameters(), stat_interval=10, likelihood="categorical")
    train_heads(model, opt, ([0] * (period - 1) + [1]))
    assert opt.failures()["unreached"] == 2
    train_heads(model, opt, ([0] * (period - 1) + [1]) * 2)
    assert [opt.state[p]["updates"] for p in model.heads[1].parameters()] == [3, 3]
    assert [opt.state[p]["first_step"] for p in model.heads[1].parameters()] == [2 * period - 1] * 2
    assert opt.failures() == NO_FAILURES


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("name", ["sampled", "empirical", "shampoo", "kfac"])
def test_parameters_used_between_scheduled_statistics_are_refreshed(
    name: str, set_to_none: bool
) -> None:
    """Two heads in turn, and an even interval. Gradients of zeros are those of ``empirical``."""
    if not set_to_none and name in ("empirical", "shampoo"):
        pytest.skip("zeros refresh the statistics")
    model = Heads(2)
    opt = made(name, model, stat_interval=4, inverse_interval=8)
    seen: dict[int, set[float]] = {0: set(), 1: set()}
    for step in range(40):
        if step == 21:  # as a state that was loaded
            saved, opt = opt.state_dict(), made(name, model, stat_interval=4, inverse_interval=8)
            opt.load_state_dict(saved)
        opt.zero_grad(set_to_none=set_to_none)
        output = model(torch.randn(8, 4).double(), step % 2)
        if name in ("sampled", "kfac"):
            opt.observe(output)
        cross_entropy(output, torch.randint(3, (8,))).backward()
        opt.step()
        for head, own in seen.items():
            if stats := opt.state.get(model.heads[head].weight, {}).get("stats"):
                own.add(float(stats[0][0, 0]))
    assert len(seen[0]) == 10 and 9 <= len(seen[1]) <= 11


def test_outputs_are_not_asked_for_an_abandoned_head_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(observations, "PATIENCE", 5)
    model = Heads(2)
    opt = TNT.paper(model.parameters(), stat_interval=10, likelihood="categorical")
    train_heads(model, opt, [0, 1])  # between scheduled statistics, once
    asked = []
    for _ in range(2, 20):
        asked.append(opt.observing)
        train_heads(model, opt, [0])
    assert asked == [True] * 5 + [False] * 3 + [True] + [False] * 9
    train_heads(model, opt, [1, 1, 1])  # statistics are due, and later the head is used again
    assert opt.failures() == NO_FAILURES


def test_the_next_batch_may_miss_a_group_added_later() -> None:
    """At the first batch that uses it, observe has not yet asked for it; at the next it has."""
    model = Heads(2)
    opt = TNT.paper(
        [*model.body.parameters(), *model.heads[0].parameters()],
        stat_interval=10,
        likelihood="categorical",
    )
    train_heads(model, opt, [0, 0])
    opt.add_param_group({"params": list(model.heads[1].parameters())})
    train_heads(model, opt, [0, 1, 1])
    assert [opt.state[p]["updates"] for p in model.heads[1].parameters()] == [2, 2]
    assert [opt.state[p]["first_step"] for p in model.heads[1].parameters()] == [4, 4]


# ------------------------------------------------------------------ warm starts


def normalised() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), Counting(), nn.Linear(4, 2))


class Counting(nn.Module):
    """Its forward puts another tensor in place of its buffer."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        """The same."""
        self.calls = self.calls + 1
        return x


small_with_a_norm = pytest.mark.filterwarnings("ignore:KFAC updates 23.5%:RuntimeWarning")


@small_with_a_norm
@tnt_and_kfac
def test_a_warm_start_puts_the_buffers_of_its_model_back(name: str) -> None:
    """The parameters have no gradients afterwards."""
    model = normalised()
    model.register_buffer("expanded", torch.ones(3).expand(2, 3))  # cannot be written
    opt = made(name, model)
    before = [b.clone() for b in model.buffers()]
    opt.warm_start((model(torch.randn(8, 3)) for _ in range(3)), model=model)
    assert equal(before, model.buffers())
    assert all(p.grad is None for p in model.parameters())


def test_a_warm_start_that_leaves_batch_norm_changed_warns_once() -> None:
    """Without ``model=``, and if the forwards of a list have run before."""
    model = normalised()

    def outputs() -> Iterator[Tensor]:
        return (model(torch.randn(8, 3)) for _ in range(3))

    for call in (
        lambda: TNT(model.parameters(), likelihood="categorical").warm_start(outputs()),
        lambda: TNT(model.parameters(), likelihood="categorical").warm_start(
            list(outputs()), model=model
        ),
        lambda: TNT(model.parameters()).warm_start(z.sum() for z in outputs()),
    ):
        with pytest.warns(RuntimeWarning, match=r"batch norm .* model=model\)") as said:
            call()
        assert [warning.filename for warning in said] == [__file__]
    assert int(model[1].num_batches_tracked) == 9
    model.eval()
    TNT(model.parameters(), likelihood="categorical").warm_start(outputs())
    model[1] = nn.BatchNorm1d(4, track_running_stats=False)
    TNT(model.parameters(), likelihood="categorical").warm_start(outputs())


@small_with_a_norm
@tnt_and_kfac
def test_a_warm_start_that_raises_midway_changes_nothing(name: str) -> None:
    model = normalised()
    opt = made(name, model)
    before = Snapshot(model.parameters(), opt)
    buffers = [b.clone() for b in model.buffers()]

    def outputs() -> Iterator[Tensor]:
        yield model(torch.randn(8, 3))
        raise KeyError("the data set is broken")

    with pytest.raises(KeyError, match="broken"):
        opt.warm_start(outputs(), model=model)
    before.assert_unchanged()
    assert equal(buffers, model.buffers())
