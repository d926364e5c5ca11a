"""``attach`` where others have their hands in the model: autocast, compilers, wrappers, processes.

What it does to a plain training loop is in ``test_attach``.
"""

import contextlib
import gc
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from processes import run_in
from test_attach import (
    SETTINGS,
    Net,
    assert_same,
    batches,
    contents,
    counted,
    explicit,
    made_net,
    train,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from tnt_optim import TNT

pytestmark = pytest.mark.usefixtures("one_thread")

SKIPPED = (0, 3, 4)


def train_scaled(model: nn.Module, opt: TNT, dtype: torch.dtype, *, observe: bool) -> None:
    """Trains under autocast, with a loss that overflows at some steps."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(9):
        opt.zero_grad()
        ((x, y),) = batches(step)
        with torch.autocast("cpu", dtype=dtype):
            output = model(x)
            loss = cross_entropy(output, y) * (torch.inf if step in SKIPPED else 1)
        if observe:
            opt.observe(output)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
    assert opt.param_groups[0]["step"] == 9 - len(SKIPPED)
    assert opt.failures() == {"skipped_statistics": 0, "failed_inverses": 0}


class Mixed(Net):
    """A head in float32, which autocast would run in half precision in a backward of its own."""

    def forward(self, x: Tensor) -> Any:
        """Logits."""
        hidden = torch.tanh(self.norm(self.hidden(x)))
        with torch.autocast("cpu", enabled=False):
            return self.out(hidden.float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [Net, Mixed])
def test_autocast_and_scaled_losses(kind: type[Net], dtype: torch.dtype) -> None:
    def run(attached: bool) -> tuple[Any, ...]:
        torch.manual_seed(3)
        model = kind()
        opt = TNT(model.parameters(), **SETTINGS)
        if attached:
            opt.attach(model)
        train_scaled(model, opt, dtype, observe=not attached)
        return contents(model, opt)

    assert_same(run(True), run(False))


@pytest.fixture
def compiler() -> Iterator[Any]:
    """torch.compile, with nothing left over from or for other tests."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with torch._functorch.config.patch(donated_buffer=False):
        yield torch._dynamo.utils.counters
    torch._dynamo.reset()


def compiled(model: Net, opt: TNT, how: str) -> Any:
    """Attaches and compiles."""
    if how == "before":
        opt.attach(model)
        return torch.compile(model, backend="aot_eager")
    if how == "in place":
        opt.attach(model)
        model.compile(backend="aot_eager")
        return model
    result = torch.compile(model, backend="aot_eager", fullgraph=how == "whole")
    opt.attach(result)  # type: ignore[arg-type]
    return result


# Which dynamo itself hides, but not from a filter that makes it an error.
hidden_warning = pytest.mark.filterwarnings("default:The .grad attribute of a Tensor")


@hidden_warning
@pytest.mark.parametrize("how", ["before", "after", "in place", "whole"])
def test_compiled_models(how: str, compiler: Any) -> None:
    model = made_net()
    opt = TNT(model.parameters(), **SETTINGS)
    seen, output = counted()
    called = compiled(model, opt, how)
    train(called, opt, observe=False)
    assert compiler["stats"]["unique_graphs"] == 1
    reference = made_net()
    observing = TNT(reference.parameters(), **SETTINGS)
    train(torch.compile(reference, backend="aot_eager"), observing, observe=True)
    assert_same(contents(model, opt), contents(reference, observing))
    called.eval()
    called(torch.randn(8, 5))
    assert opt._observed.count == 0


def test_whole_graphs_with_the_hook_inside_are_refused(compiler: Any) -> None:
    model = made_net()
    opt = TNT(model.parameters())
    opt.attach(model)
    whole = torch.compile(model, backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match="attach it to what torch.compile returned"):
        whole(torch.randn(8, 5))


@hidden_warning
def test_graphs_that_do_not_last_are_refused(compiler: Any) -> None:
    model = made_net()
    opt = TNT(model.parameters(), **SETTINGS)
    called = torch.compile(model, backend="aot_eager")
    with torch._functorch.config.patch(donated_buffer=True):
        opt.attach(called)
        with pytest.raises(RuntimeError, match="donated_buffer = False, set before torch.compile"):
            called(torch.randn(8, 5))
    torch._dynamo.reset()
    # The first backward of a graph that does not retain it, as that of a warm start or of a batch
    # of another size, would have donated its buffers.
    model = made_net()
    opt = TNT(model.parameters(), **SETTINGS)
    called = torch.compile(model, backend="aot_eager")
    opt.attach(called)
    opt.warm_start(called(x) for x, _ in batches(99, 3))
    train(called, opt, 4, observe=False)


class Borrowing:
    """Wraps an optimizer as Lightning does: a class that inherits its methods, not its state."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.__class__ = type("Wrapped", (type(self), type(optimizer)), {})

    def __getattr__(self, item: str) -> Any:
        return getattr(self.optimizer, item)


def test_wrappers_that_borrow_the_methods() -> None:
    model = made_net()
    opt = TNT(model.parameters(), **SETTINGS)
    wrapper: Any = Borrowing(opt)
    wrapper.attach(model)
    wrapper.attach(model)
    del wrapper
    gc.collect()
    train(model, opt, observe=False)
    assert_same(contents(model, opt), explicit())


def test_replicas_in_threads_are_refused() -> None:
    model = made_net()
    opt = TNT(model.parameters())
    opt.attach(model)
    replica = model._replicate_for_data_parallel()  # what DataParallel makes for each GPU
    with pytest.raises(RuntimeError, match="attach to the DataParallel module"):
        replica(torch.randn(8, 5))
    whole = nn.DataParallel(model)
    opt.attach(whole)
    whole(torch.randn(8, 5))
    assert opt._observed.count == 1


# Processes.


class Heads(nn.Module):
    """One body and three heads, of which a batch uses one; float64."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(5, 6)
        self.heads = nn.ModuleList(nn.Linear(6, 4) for _ in range(3))
        self.double()

    def forward(self, x: Tensor, head: int) -> Tensor:
        """Logits of one head."""
        logits: Tensor = self.heads[head](torch.tanh(self.body(x)))
        return logits


# By name: what DistributedDataParallel is told, how many micro-batches (a static graph takes one),
# and the head that each process uses at each step.
Heading = Sequence[Sequence[int]]
REPLICAS: dict[str, tuple[dict[str, Any], int, Heading]] = {
    "plain": ({}, 1, [[0, 0]] * 5),
    "accumulated": ({}, 2, [[0, 0]] * 5),
    "unused": ({"find_unused_parameters": True}, 2, [[0, 1], [0, 1], [0, 0], [1, 0], [1, 1]]),
    "static": ({"static_graph": True}, 1, [[0, 0]] * 5),
}
PLACES = ("in the loop", "wrapped", "inside")


def replica(rank: int, processes: int) -> dict[tuple[str, str], list[Tensor]]:
    """One process's training in every form: gradients, parameters and statistics at the end."""
    found = {}
    for form, (settings, micro, heads) in REPLICAS.items():
        for place in PLACES:
            torch.manual_seed(3)
            model = Heads()
            used = [p for i in range(3) if i in sum(heads, []) for p in model.heads[i].parameters()]
            if form != "unused":
                for head in (1, 2):
                    model.heads[head].requires_grad_(False)
            replicas = DistributedDataParallel(model, **settings)
            params = [*model.body.parameters(), *used]
            opt = TNT(params, **{**SETTINGS, "stat_interval": 1})
            if place != "in the loop":
                opt.attach(model if place == "inside" else replicas)
            results = []
            try:
                for step in range(5):
                    opt.zero_grad()
                    for number, (x, y) in enumerate(batches(10 * rank + step, micro), 1):
                        last = number == micro
                        with contextlib.nullcontext() if last else replicas.no_sync():
                            output = replicas(x.double(), heads[step][rank])
                            if place == "in the loop":
                                opt.observe(output)
                            (cross_entropy(output, y) / micro).backward()
                    results += [p.grad.clone() for p in params if p.grad is not None]
                    opt.step()
            except RuntimeError as error:
                found[form, place] = [str(error)]
                continue
            results += [p.detach().clone() for p in params]
            results += [s for p in params for s in opt.state[p]["stats"]]
            found[form, place] = results
    return found


def test_replicas() -> None:
    ranks = run_in(2, replica)
    for form in REPLICAS:
        for rank in ranks:
            inside, wrapped = rank[form, "inside"], rank[form, "wrapped"]
            # Where the graph is static an output from outside cannot be observed; inside it can,
            # and the gradients are those without a static graph.
            loop = rank["plain" if form == "static" else form, "in the loop"]
            assert_same(inside, loop)
            if form == "static":
                assert "static_graph" in wrapped[0]
            else:
                assert_same(wrapped, loop)


def sharded(rank: int, processes: int, place: str) -> list[Tensor] | str:
    """One process's training of pieces: what all of them end as."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4))
    mesh = init_device_mesh("cpu", (processes,))
    if place != "before":
        fully_shard(model, mesh=mesh)
    opt = TNT(model.parameters(), **SETTINGS)
    if place != "in the loop":
        opt.attach(model)
    if place == "before":
        fully_shard(model, mesh=mesh)
    for step in range(5):
        opt.zero_grad()
        ((x, y),) = batches(10 * rank + step)
        try:
            output = model(x)
        except RuntimeError as error:
            return str(error)
        if place == "in the loop":
            opt.observe(output)
        cross_entropy(output, y).backward()
        opt.step()
    return [p.detach().full_tensor() for p in model.parameters()]  # type: ignore[attr-defined]


def sharded_everywhere(rank: int, processes: int) -> dict[str, list[Tensor] | str]:
    return {place: sharded(rank, processes, place) for place in ("in the loop", "after", "before")}


def test_sharded_models() -> None:
    for rank in run_in(2, sharded_everywhere):
        assert_same(rank["after"], rank["in the loop"])
        assert "after fully_shard(model)" in rank["before"]
