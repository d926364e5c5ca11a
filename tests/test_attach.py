"""A model that hands its output over by itself: what observe() in the loop would have done."""

import contextlib
import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from processes import run_in
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from tnt_optim import TNT, with_fallback

pytestmark = pytest.mark.usefixtures("one_thread")

SETTINGS: dict[str, Any] = {"lr": 0.05, "damping": 0.1, "stat_interval": 2, "inverse_interval": 3}


class Net(nn.Module):
    """Two linear layers with batch norm between; its result is made of the logits by ``wrap``."""

    def __init__(self, wrap: Callable[[Tensor], Any] = lambda logits: logits) -> None:
        super().__init__()
        self.hidden, self.norm, self.out = nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 4)
        self.wrap = wrap

    def forward(self, x: Tensor) -> Any:
        """Logits."""
        return self.wrap(self.out(torch.tanh(self.norm(self.hidden(x)))))


def made_net(**more: Any) -> Net:
    torch.manual_seed(3)
    return Net(**more)


def batches(step: int, micro: int = 1) -> Iterator[tuple[Tensor, Tensor]]:
    rng = torch.Generator().manual_seed(step)
    for _ in range(micro):
        yield torch.randn(8, 5, generator=rng), torch.randint(4, (8,), generator=rng)


def train(
    model: nn.Module,
    opt: Any,
    steps: int = 7,
    *,
    observe: bool,
    micro: int = 1,
    logits: Callable[[Any], Tensor] = lambda result: result,
) -> None:
    """Trains; ``observe`` says whether the loop does it."""
    for step in range(steps):
        opt.zero_grad()
        for x, y in batches(step, micro):
            output = logits(model(x))
            if observe:
                opt.observe(output)
            (cross_entropy(output, y) / micro).backward()
        opt.step()


def contents(model: nn.Module, opt: Any) -> tuple[Any, ...]:
    """The state of a training, copied, and how many steps it has gone."""
    saved = opt.state_dict()
    steps = [group["step"] for group in saved["param_groups"] if "step" in group]
    return copy.deepcopy((model.state_dict(), saved["state"], steps))


def assert_same(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0)


def explicit(**how: Any) -> tuple[Any, ...]:
    """Where a loop with ``observe`` in it ends."""
    model = made_net()
    opt = TNT(model.parameters(), **SETTINGS)
    train(model, opt, observe=True, **how)
    assert all(opt.state[p] for p in model.parameters())
    return contents(model, opt)


@pytest.mark.parametrize("micro", [1, 3])
def test_it_is_the_loop_that_observes(micro: int) -> None:
    model = made_net()
    opt = TNT(model.parameters(), **SETTINGS)
    opt.attach(model)
    train(model, opt, observe=False, micro=micro)
    assert_same(contents(model, opt), explicit(micro=micro))


def test_beside_a_fallback() -> None:
    def made() -> tuple[Net, Any]:
        model = made_net()
        main = TNT([model.hidden.weight, model.out.weight], **SETTINGS)
        rest = [p for p in model.parameters() if p.dim() == 1]
        return model, with_fallback(main, torch.optim.AdamW(rest, lr=0.01))

    model, opt = made()
    handle = opt.attach(model)
    train(model, opt, observe=False)
    other, reference = made()
    train(other, reference, observe=True)
    assert_same(contents(model, opt), contents(other, reference))
    handle.remove()
    model(torch.randn(8, 5))
    assert opt.main._observed.count == 0


def counted() -> tuple[list[Any], Callable[[Any], Any]]:
    """What an ``output`` function was called with, and the function."""
    seen: list[Any] = []

    def output(result: Any) -> Any:
        seen.append(result)
        return result

    return seen, output


def test_only_training_is_observed() -> None:
    model = made_net()
    opt = TNT(model.parameters(), **SETTINGS)
    seen, output = counted()
    opt.attach(model, output)
    x = torch.randn(8, 5)
    model.eval()
    model(x)
    model.train()
    with torch.no_grad():
        model(x)
    with torch.inference_mode():
        model(x)
    assert not seen and opt._observed.count == 0
    model.wrap = Tensor.detach
    model(x)
    assert len(seen) == 1 and opt._observed.count == 0
    model.wrap = Tensor.clone
    model(x)
    assert len(seen) == 2 and opt._observed.count == 1


def test_only_what_is_due_is_observed() -> None:
    model = made_net()
    opt = TNT(model.parameters(), **SETTINGS)
    seen, output = counted()
    opt.attach(model, output)
    train(model, opt, 6, observe=False)
    assert len(seen) == 3  # steps 0, 2, 4
    empirical = TNT(model.parameters(), fisher="empirical", **SETTINGS)
    seen, output = counted()
    empirical.attach(model, output)
    train(model, empirical, 3, observe=False)
    assert not seen and all(empirical.state[p] for p in model.parameters())


@pytest.mark.parametrize(
    ("wrap", "logits"),
    [
        (lambda z: SimpleNamespace(logits=z, loss=None), lambda r: r.logits),
        (lambda z: {"logits": z, "hidden": z + 1}, lambda r: r["logits"]),
    ],
    ids=["attribute", "key"],
)
def test_logits_are_found(wrap: Any, logits: Any) -> None:
    model = made_net(wrap=wrap)
    opt = TNT(model.parameters(), **SETTINGS)
    opt.attach(model)
    train(model, opt, observe=False, logits=logits)
    assert_same(contents(model, opt), explicit())


def test_output_says_what_is_observed() -> None:
    model = made_net(wrap=lambda z: (z.reshape(2, 4, 4), "more"))
    opt = TNT(model.parameters(), **SETTINGS)
    opt.attach(model, lambda result: result[0].flatten(0, 1))
    train(model, opt, observe=False, logits=lambda r: r[0].flatten(0, 1))
    assert_same(contents(model, opt), explicit())


@pytest.mark.parametrize(
    ("wrap", "error", "message"),
    [
        (lambda z: (z, "more"), TypeError, r"output must say .*but tuple: opt.attach\(model, out"),
        (lambda z: {"scores": z}, TypeError, "output must say .*but dict"),
        (lambda z: None, TypeError, "output must say .*but NoneType"),
        (lambda z: z.reshape(2, 4, 4), ValueError, r"output must be \(batch, classes\)"),
    ],
)
def test_what_cannot_be_observed_is_said_in_the_forward(
    wrap: Any, error: type[Exception], message: str
) -> None:
    model = made_net(wrap=wrap)
    opt = TNT(model.parameters())
    opt.attach(model)
    with pytest.raises(error, match=message):
        model(torch.randn(8, 5))
    assert opt._observed.count == 0
    model.eval()
    model(torch.randn(8, 5))


def test_wrong_arguments_leave_what_was() -> None:
    model = made_net()
    opt = TNT(model.parameters())
    opt.attach(model)
    with pytest.raises(TypeError, match=r"^model must be a torch.nn.Module, got generator$"):
        opt.attach(model.parameters())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^output must be a function or None, got str$"):
        opt.attach(nn.Linear(2, 2), "logits")  # type: ignore[arg-type]
    model(torch.randn(8, 5))
    assert opt._observed.count == 1


# Handles.


def test_handles_remove() -> None:
    model = made_net()
    opt = TNT(model.parameters())
    with opt.attach(model) as handle:
        assert isinstance(handle, torch.utils.hooks.RemovableHandle)
        model(torch.randn(8, 5))
    assert opt._observed.count == 1 and not model._forward_hooks
    handle.remove()
    model(torch.randn(8, 5))
    assert opt._observed.count == 1


def test_attaching_again_replaces() -> None:
    model, other = made_net(), made_net()
    opt = TNT([*model.parameters(), *other.parameters()])
    seen, output = counted()
    first = opt.attach(model, output)
    second = opt.attach(model)
    assert len(model._forward_hooks) == 1
    first.remove()  # of what is gone already
    model(torch.randn(8, 5))
    assert opt._observed.count == 1 and not seen
    opt.attach(other)
    assert not model._forward_hooks
    model(torch.randn(8, 5))
    second.remove()
    assert opt._observed.count == 1
    other(torch.randn(8, 5))
    assert opt._observed.count == 2


def test_two_optimizers_observe_one_model() -> None:
    model = made_net()
    one, other = TNT(model.hidden.parameters()), TNT(model.out.parameters())
    one.attach(model)
    other.attach(model)
    model(torch.randn(8, 5))
    assert one._observed.count == other._observed.count == 1
    assert set(other._observed.sampled) == set(model.out.parameters())


def test_neither_keeps_the_other_alive() -> None:
    model = made_net()
    opt = TNT(model.parameters(), **SETTINGS)
    handle = opt.attach(model)
    train(model, opt, 2, observe=False)
    gone = weakref.ref(opt)
    del opt
    gc.collect()
    assert gone() is None and not model._forward_hooks
    model(torch.randn(8, 5))
    opt = TNT(model.parameters())
    handle = opt.attach(model)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    handle.remove()


def loaded(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    found: nn.Module = torch.load(file, weights_only=False)
    return found


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, copy.copy, lambda m: pickle.loads(pickle.dumps(m)), loaded]
)
def test_copies_of_the_model_observe_nothing(copied: Callable[[nn.Module], nn.Module]) -> None:
    model = nn.Sequential(nn.Linear(5, 4))
    opt = TNT(model.parameters())
    opt.attach(model, lambda result: result)  # a function that cannot be pickled
    twin = copied(model)
    twin(torch.randn(8, 5))
    # A shallow copy shares its hooks, as it does its parameters.
    assert opt._observed.count == (copied is copy.copy)
    again = TNT(twin.parameters())
    again.attach(twin)
    twin(torch.randn(8, 5))
    assert again._observed.count == 1


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_of_the_optimizer_are_not_attached(copied: Callable[[Any], Any]) -> None:
    model = nn.Sequential(nn.Linear(5, 4))
    opt = TNT(model.parameters(), **SETTINGS)
    opt.attach(model)
    train(model, opt, 3, observe=False)
    twin_model, twin = copied((model, opt))
    twin_model(torch.randn(8, 5))
    assert twin._observed.count == opt._observed.count == 0
    twin.attach(twin_model)
    assert model._forward_hooks  # where it was copied from is left alone
    train(model, opt, observe=False)
    train(twin_model, twin, observe=False)
    assert_same(contents(model, opt), contents(twin_model, twin))


# Calls of the model that are no micro-batch.


@pytest.mark.parametrize("kind", [iter, list], ids=["generator", "list"])
def test_warm_start_is_not_observed(kind: Callable[[Any], Any]) -> None:
    def run(attached: bool) -> tuple[Any, ...]:
        model = made_net()
        opt = TNT(model.parameters(), **SETTINGS)
        seen, output = counted()
        if attached:
            opt.attach(model, output)
        opt.warm_start(kind(model(x) for x, _ in batches(99, 3)), model=model)
        assert opt._observed.count == 0 and not opt._observed.sampled
        assert kind is list or not seen
        train(model, opt, 4, observe=not attached)
        # Once more: the weights have changed.
        opt.warm_start(kind(model(x) for x, _ in batches(98, 3)), model=model)
        train(model, opt, 4, observe=not attached)
        return contents(model, opt)

    # With a list the running statistics of batch norm are not put back, in either.
    assert_same(run(True), run(False))


def test_warm_start_that_fails_leaves_the_model_attached() -> None:
    model = made_net()
    opt = TNT(model.parameters(), **SETTINGS)
    opt.attach(model)

    def outputs() -> Iterator[Tensor]:
        yield model(torch.randn(8, 5))
        raise KeyError("no more data")

    with pytest.raises(KeyError):
        opt.warm_start(outputs(), model=model)
    model(torch.randn(8, 5))
    assert opt._observed.count == 1


class Checkpointed(Net):
    """The first layers are gone through again in the backward."""

    def forward(self, x: Tensor) -> Any:
        """Logits."""

        def body(x: Tensor) -> Tensor:
            self.bodies = getattr(self, "bodies", 0) + 1
            return torch.tanh(self.hidden(x))

        return self.out(checkpoint(body, x, use_reentrant=False))


def test_checkpointed_layers_are_observed_once() -> None:
    torch.manual_seed(3)
    model = Checkpointed()
    opt = TNT([*model.hidden.parameters(), *model.out.parameters()], **SETTINGS)
    seen, output = counted()
    opt.attach(model, output)
    train(model, opt, 4, observe=False)
    assert len(seen) == 2
    assert model.bodies == 4 + 4 + 2  # forwards, backwards, observations
    torch.manual_seed(3)
    plain = Checkpointed()
    reference = TNT([*plain.hidden.parameters(), *plain.out.parameters()], **SETTINGS)
    train(plain, reference, 4, observe=True)
    assert_same(contents(model, opt), contents(plain, reference))


@pytest.mark.parametrize("early_stop", [True, False])
def test_model_checkpointed_as_a_whole_is_observed_once(early_stop: bool) -> None:
    """Its own hook is called again in the backward, the user's and that of observe."""
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4))
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    opt = TNT(model.parameters(), **SETTINGS)
    seen, output = counted()
    opt.attach(model, output)
    with set_checkpoint_early_stop(early_stop):
        train(lambda x: checkpoint(model, x, use_reentrant=False), opt, 4, observe=False)  # type: ignore[arg-type]
    assert len(seen) == 2
    assert len(calls) == (4 if early_stop else 4 + 4 + 2)


def test_exported_model_is_not_observed() -> None:
    model = nn.Sequential(nn.Linear(5, 4))
    opt = TNT(model.parameters())
    opt.attach(model)
    x = torch.randn(8, 5)
    exported = torch.export.export(model, (x,), strict=False).module()
    torch.testing.assert_close(exported(x), model(x))
    assert opt._observed.count == 1


# Who else calls the model.


def test_closures() -> None:
    model = made_net()
    opt = TNT(model.parameters(), **SETTINGS)
    opt.attach(model)
    for step in range(7):

        def closure(step: int = step) -> Tensor:
            opt.zero_grad()
            ((x, y),) = batches(step)
            loss = cross_entropy(model(x), y)
            loss.backward()
            return loss

        opt.step(closure)
    assert_same(contents(model, opt), explicit())


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
