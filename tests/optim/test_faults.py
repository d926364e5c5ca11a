"""Faults from outside: what raises in the middle of a step, what is not finite, what dies."""

import io
import itertools
import math
import os
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from conftest import DirectGradients, Snapshot
from drawn import raising
from processes import run_in
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from tnt_optim import TNT, PreconditionerError

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPES = [(3, 4), (5,), (4, 4)]  # the last one in a group of its own
SETTINGS: dict[str, Any] = {"lr": 0.05, "damping": 0.1, "stat_interval": 1, "inverse_interval": 1}


class Run:
    """Parameters in two groups, whose gradients are functions of the step's number."""

    def __init__(self, **settings: Any) -> None:
        rng = torch.Generator().manual_seed(1)
        self.params = [
            nn.Parameter(torch.randn(shape, generator=rng, dtype=torch.float64)) for shape in SHAPES
        ]
        self.direct = DirectGradients(self.params)
        groups = [{"params": self.params[:2]}, {"params": self.params[2:]}]
        self.opt = TNT(groups, likelihood=self.direct.likelihood, **{**SETTINGS, **settings})

    def step(self, number: int) -> None:
        """One step; all parameters are in reach of the observation."""
        rng = torch.Generator().manual_seed(100 + number)
        drawn = [
            [torch.randn(shape, generator=rng, dtype=torch.float64) for shape in SHAPES]
            for _ in range(2)
        ]
        self.direct.iterate(self.opt, drawn[0], drawn[1])

    def steps(self, first: int, last: int) -> None:
        """Some steps."""
        for number in range(first, last):
            self.step(number)

    def checkpoint(self) -> dict[str, Any]:
        """What a user would save, through a file's bytes."""
        file = io.BytesIO()
        content = {"params": [p.detach() for p in self.params], "opt": self.opt.state_dict()}
        torch.save(content, file)
        return {"bytes": file.getvalue()}

    def load(self, source: Any) -> None:
        """Goes back to a checkpoint, or to one in a file."""
        file = io.BytesIO(source["bytes"]) if isinstance(source, dict) else source
        content = torch.load(file, weights_only=True)
        with torch.no_grad():
            for param, saved in zip(self.params, content["params"], strict=True):
                param.copy_(saved)
        self.opt.load_state_dict(content["opt"])

    def snapshot(self) -> Snapshot:
        """Parameters and state, bit for bit."""
        return Snapshot(self.params, self.opt)

    def momenta(self) -> list[Tensor]:
        """Copies of parameters and momenta: what only the update may change."""
        held = [self.opt.state[p]["momentum"] for p in self.params]
        return [t.detach().clone() for t in (*self.params, *held)]


class InjectedError(RuntimeError):
    """Raised on purpose."""


@contextmanager
def failing(where: str, call: int, error: Exception | None = None) -> Iterator[None]:
    """One call of an operator raises, counted from 0: here each group is one call."""
    module, name = where.rsplit(".", 1)
    original = getattr(__import__(module, fromlist=[name]), name)
    numbers = itertools.count()

    def wrapped(*arguments: Any, **named: Any) -> Any:
        if next(numbers) == call:
            raise error or InjectedError(where)
        return original(*arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(where, wrapped)
        yield
    assert next(numbers) > call  # it was called


FIRST = ["tnt_optim.kronecker.gram_ema_", "tnt_optim.tnt.damped_inverse"]
BEFORE_THE_UPDATE = ["tnt_optim.update.gram_ema_", "tnt_optim.tnt.damped_inverse"]
UPDATE = "tnt_optim.update.preconditioned_step_"


@pytest.mark.parametrize("group", [0, 1])
@pytest.mark.parametrize("where", FIRST)
def test_an_exception_on_the_way_to_first_statistics_changes_nothing(
    where: str, group: int
) -> None:
    run, undisturbed = Run(), Run()
    before = run.snapshot()
    with failing(where, group), pytest.raises(InjectedError):
        run.step(0)
    for param in run.params:
        param.grad = None
    before.assert_unchanged()
    run.steps(0, 3)
    undisturbed.steps(0, 3)
    run.snapshot().assert_equals(undisturbed.snapshot())


@pytest.mark.parametrize("group", [0, 1])
@pytest.mark.parametrize("where", BEFORE_THE_UPDATE)
def test_an_exception_before_the_update_leaves_what_moves(where: str, group: int) -> None:
    """Parameters, momenta and counts; and it can go on from there, or from a checkpoint."""
    run, undisturbed = Run(), Run()
    run.steps(0, 3)
    undisturbed.steps(0, 6)
    saved, held = run.checkpoint(), run.momenta()
    with failing(where, group), pytest.raises(InjectedError):
        run.step(3)
    assert all(map(torch.equal, run.momenta(), held))
    assert [g["step"] for g in run.opt.param_groups] == [3, 3]
    assert [run.opt.state[p]["updates"] for p in run.params] == [3, 3, 3]
    assert run.opt.failures() == {"skipped_statistics": 0, "failed_inverses": 0}
    run.step(4)
    assert not any(map(torch.equal, run.momenta(), held))
    assert all(bool(tensor.isfinite().all()) for tensor in run.momenta())
    run.load(saved)
    run.steps(3, 6)
    run.snapshot().assert_equals(undisturbed.snapshot())


@pytest.mark.parametrize("graft", [None, "adam"])
@pytest.mark.parametrize("group", [0, 1])
def test_after_an_exception_in_the_update_the_checkpoint_goes_on(
    group: int, graft: str | None
) -> None:
    """Groups before it have moved, so that only a checkpoint is of one step."""
    run, undisturbed = Run(graft=graft), Run(graft=graft)
    run.steps(0, 3)
    undisturbed.steps(0, 6)
    saved, held = run.checkpoint(), run.momenta()
    where = "tnt_optim.update.scaled_directions_" if graft else UPDATE
    with failing(where, group), pytest.raises(InjectedError):
        run.step(3)
    same = list(map(torch.equal, run.momenta(), held))
    assert same == [group == 0] * 2 + [True] + [group == 0] * 2 + [True]
    run.load(saved)
    run.steps(3, 6)
    run.snapshot().assert_equals(undisturbed.snapshot())


@pytest.mark.parametrize("group", [0, 1])
@pytest.mark.parametrize("step", [0, 3, 4])
def test_a_step_that_ran_out_of_memory_can_be_repeated(step: int, group: int) -> None:
    """To the same bits as if there had been enough: at the first, a young and a later step."""
    settings = {"stat_interval": 1, "inverse_interval": 4}
    run, undisturbed = Run(**settings), Run(**settings)
    run.steps(0, step)
    undisturbed.steps(0, step + 2)
    error = torch.OutOfMemoryError("no memory")
    with failing("tnt_optim.tnt.damped_inverse", group, error), raising(type(error), "no memory"):
        run.step(step)
    run.steps(step, step + 2)
    run.snapshot().assert_equals(undisturbed.snapshot())


def test_a_gradient_that_is_not_finite_goes_where_torch_lets_it_go() -> None:
    """Into its parameter, of which then no direction is finite, and nowhere else."""
    run, twin = Run(), Run()
    for each in (run, twin):
        each.steps(0, 2)
    saved = run.checkpoint()
    rng = torch.Generator().manual_seed(102)
    grads = [torch.randn(shape, generator=rng, dtype=torch.float64) for shape in SHAPES]
    sampled = [torch.randn(shape, generator=rng, dtype=torch.float64) for shape in SHAPES]
    spoiled = [grads[0].clone(), *grads[1:]]
    spoiled[0][1, 2] = math.inf
    run.direct.iterate(run.opt, spoiled, sampled)
    twin.direct.iterate(twin.opt, grads, sampled)
    assert not run.params[0].isfinite().any()
    assert all(map(torch.equal, run.params[1:], twin.params[1:]))
    for param, other in zip(run.params, twin.params, strict=True):
        for name in ("stats", "factors"):
            assert all(map(torch.equal, run.opt.state[param][name], twin.opt.state[other][name]))
    assert run.opt.failures() == {"skipped_statistics": 0, "failed_inverses": 0}
    run.load(saved)
    for each in (run, twin):
        each.load(saved)
        each.steps(2, 4)
    run.snapshot().assert_equals(twin.snapshot())


ROWS = 6


def least_likely(output: Tensor) -> Tensor:
    """A likelihood that samples nothing: the loss at the least likely labels."""
    return cross_entropy(output, output.detach().argmin(1))


def made_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def forward(model: nn.Module, opt: TNT, rank: int, step: int) -> Tensor:
    """Up to the loss of one process's batch."""
    rng = torch.Generator().manual_seed(1000 * step + rank)
    output = model(torch.randn(ROWS, 4, generator=rng, dtype=torch.float64))
    opt.observe(output)
    return cross_entropy(output, torch.randint(3, (ROWS,), generator=rng))


def nan_in_one_loss(rank: int, processes: int) -> dict[str | None, Any]:
    """The loss of process 1 is NaN at step 1, and never again."""
    found: dict[str | None, Any] = {}
    for shard in (None, "directions", "inverses"):
        net = made_net()
        model = DistributedDataParallel(net)
        opt = TNT(net.parameters(), likelihood=least_likely, shard=shard, **SETTINGS)
        message, step = "", 0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                for step in range(20):
                    opt.zero_grad()
                    loss = forward(model, opt, rank, step)
                    (loss * math.nan if step == 1 and rank == 1 else loss).backward()
                    opt.step()
            except PreconditionerError as error:
                message = str(error)
        finite = [bool(p.isfinite().any()) for p in net.parameters()]
        found[shard] = (step, message, finite, opt.failures()["skipped_statistics"])
    return found


def test_nan_in_the_loss_of_one_process_stops_all_of_them_within_five_refreshes() -> None:
    """All-reduced gradients are NaN everywhere, and so is what is sampled from then on."""
    ranks = run_in(2, nan_in_one_loss)
    assert ranks[0] == ranks[1]
    for step, message, finite, skipped in ranks[0].values():
        assert (step, finite, skipped) == (6, [False] * 4, 5)
        assert "not finite" in message and "time 5 in a row" in message


TIMEOUT = timedelta(seconds=3)


def left_alone(rank: int, folder: str) -> None:
    """Process 1 observes but does not step, and stays; at last it exits."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    found: list[tuple[str, float, bool]] = []
    for shard, stays in [(None, True), ("directions", True), ("inverses", False)]:
        net, group = made_net(), dist.new_group(timeout=TIMEOUT)
        model = DistributedDataParallel(net, process_group=group)
        opt = TNT(
            net.parameters(), likelihood=least_likely, shard=shard, process_group=group, **SETTINGS
        )
        for step in range(2):
            opt.zero_grad()
            forward(model, opt, rank, step).backward()
            if step == 0:
                opt.step()
        if rank == 1:
            if not stays:
                os._exit(1)
            continue
        before, began = [p.detach().clone() for p in net.parameters()], time.monotonic()
        try:
            opt.step()
        except RuntimeError as error:
            unchanged = all(map(torch.equal, before, net.parameters()))
            found.append((str(error), time.monotonic() - began, unchanged))
    torch.save(found, f"{folder}/found.pt")
    os._exit(0)  # gloo would wait for the other


def test_a_process_that_does_not_step_is_an_error_for_the_others(tmp_path: Path) -> None:
    context = mp.get_context("spawn")
    started = [context.Process(target=left_alone, args=(r, str(tmp_path))) for r in range(2)]
    for process in started:
        process.start()
    for process in started:
        process.join(60)
    assert [process.exitcode for process in started] == [0, 1]
    found = torch.load(tmp_path / "found.pt", weights_only=True)
    assert len(found) == 3
    for message, seconds, unchanged in found:
        assert unchanged
        assert seconds < 3 * TIMEOUT.total_seconds()
        assert message
    assert all("imeout" in message or "imed out" in message for message, _, _ in found[:2])
    assert found[2][1] < TIMEOUT.total_seconds()
