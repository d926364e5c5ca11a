"""torch.compile and activation checkpointing: the training without them, to the bit.

With the compiler's "aot_eager", which makes graphs and runs them operation by operation, and once
with generated code.
"""

import copy
import shutil
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attached
import kfac_models
import optimizers
import pytest
import torch
from conftest import Snapshot, observation_count, observed_gradients
from drawn import close, raising
from optimizers import (
    METHODS,
    NO_FAILURES,
    SAMPLING,
    apart,
    equal,
    factored,
    made,
    statistics,
    tnt_and_kfac,
    values,
)
from optimizers import images as batch
from tolerances import FLOAT32_TRAJECTORY
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from tnt_optim import KFAC, TNT
from tnt_optim.autograd import graph_nodes

# dynamo hides this warning itself, but not from a filter that makes it an error.
pytestmark = pytest.mark.filterwarnings("default:The .grad attribute of a Tensor")

Reentrant = bool | None


@pytest.fixture(autouse=True)
def counters() -> Iterator[Any]:
    """dynamo's counters; every test starts and ends without compiled code."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    with torch._functorch.config.patch(donated_buffer=False):
        yield torch._dynamo.utils.counters
    torch.compiler.reset()


def graphs() -> int:
    """How many were compiled."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


class Net(nn.Module):
    """Logits (N, 4) of images (N, 2, 3, 3), with a part that may be checkpointed."""

    def __init__(self, reentrant: Reentrant = None, dropout: float = 0.0) -> None:
        torch.manual_seed(3)
        super().__init__()
        self.first, self.hidden, self.out = nn.Linear(18, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.norm, self.drop = nn.LayerNorm(8), nn.Dropout(dropout)
        self.reentrant, self.passes = reentrant, 0

    def body(self, h: Tensor) -> Tensor:
        """The part."""
        if not torch.compiler.is_compiling():
            self.passes += 1
        result: Tensor = self.drop(torch.tanh(self.norm(self.hidden(h))))
        return result

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        h = torch.tanh(self.first(x.flatten(1)))
        if self.reentrant is None:
            h = self.body(h)
        else:
            h = checkpoint(self.body, h, use_reentrant=self.reentrant)
        logits: Tensor = self.out(h)
        return logits


def train(
    model: Callable[[Tensor], Tensor],
    opt: Any,
    steps: Sequence[int],
    *,
    step: Callable[[], Any] | None = None,
    rows: Callable[[int], int] = lambda number: 32,
    dtype: torch.dtype | None = None,
) -> None:
    for number in steps:
        opt.zero_grad()
        x, y = batch(number, rows(number))
        with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            output = model(x)
            loss = cross_entropy(output, y)
            opt.observe(output)
        loss.backward()
        (opt.step if step is None else step)()


def assert_same(model: nn.Module, opt: Any, twin: nn.Module, reference: Any) -> None:
    assert not any(map(torch.equal, values(model), values(Net())))
    assert equal(values(model), values(twin))
    assert equal(statistics(opt), statistics(reference))


def pair(name: str, reentrant: Reentrant = None, **settings: Any) -> tuple[Net, Any, Net, Any]:
    """A model and its optimizer, twice; a part of the first may be checkpointed."""
    model, twin = Net(reentrant), Net()
    return model, made(name, model, **settings), twin, made(name, twin, **settings)


# ------------------------------------------------------------------ compiled models


@pytest.mark.parametrize(
    ("dtype", "reentrant"),
    [(None, None), (torch.bfloat16, None), (None, False)],
    ids=["float32", "bfloat16", "checkpointed"],
)
@factored
def test_compiled_models_train_as_others(
    name: str, dtype: torch.dtype | None, reentrant: Reentrant
) -> None:
    """One graph for steps with and without statistics, also under autocast or checkpointed."""
    model, opt, twin, reference = pair(name, reentrant)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        train(compiled, opt, range(9), dtype=dtype)
    train(twin, reference, range(9), dtype=dtype)
    assert graphs() == 1
    assert_same(model, opt, twin, reference)


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")
@pytest.mark.filterwarnings("ignore:likelihood 'gaussian' does not fit the training loss")
@pytest.mark.skipif(shutil.which("g++") is None, reason="generated code needs a C++ compiler")
def test_models_in_generated_code_train_as_others_but_for_rounding() -> None:
    model, opt, twin, reference = pair("sampled", likelihood="gaussian")
    start = values(model)
    compiled = torch.compile(model, fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        train(compiled, opt, range(5))
    train(twin, reference, range(5))
    assert graphs() == 1
    assert apart(statistics(opt), statistics(reference)) < FLOAT32_TRAJECTORY
    for a, b, c in zip(values(model), values(twin), start, strict=True):
        assert float((a - b).norm()) < FLOAT32_TRAJECTORY * float((b - c).norm())


@factored
def test_batches_of_other_sizes(name: str) -> None:
    """As the last batch of an epoch. They need one more graph, which serves any size, and whose
    first backward is at a step without statistics."""
    model, opt, twin, reference = pair(name, stat_interval=4)

    def rows(number: int) -> int:
        return 32 if number < 3 else 20 + number

    train(torch.compile(model, backend="aot_eager"), opt, range(9), rows=rows)
    train(twin, reference, range(9), rows=rows)
    assert graphs() == 2
    assert_same(model, opt, twin, reference)


def test_graphs_that_do_not_last() -> None:
    """If the first backward of a graph does not retain it, every later one frees the buffers.
    ``observe`` then says what to change, and changes nothing."""
    model = Net()
    opt = made("sampled", model)
    with torch._functorch.config.patch(donated_buffer=True):
        compiled = torch.compile(model, backend="aot_eager")
        opt.warm_start([compiled(batch(0)[0])])
        output = compiled(batch(2)[0])
        before = Snapshot(model.parameters(), opt)
        with raising(RuntimeError, match="= False, set before .* Without one .* needs nothing"):
            opt.observe(output)
        before.assert_unchanged()
        opt.observe(model(batch(2)[0]))  # as it is, without the compiler
        opt.step()


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_graphs_that_last_serve_after_a_warm_start(dtype: torch.dtype | None) -> None:
    model, opt, twin, reference = pair("sampled")
    compiled = torch.compile(model, backend="aot_eager")
    for net, chosen in ((compiled, opt), (twin, reference)):
        chosen.warm_start(net(batch(90 + index)[0]) for index in range(3))
        train(net, chosen, range(5), dtype=dtype)
    assert_same(model, opt, twin, reference)


# ------------------------------------------------------------------ compiled steps


@pytest.mark.parametrize("name", METHODS)
def test_a_compiled_step_is_the_step(name: str) -> None:
    """The optimizer's own function, with and without a closure; it is left out of graphs."""
    model, opt, twin, reference = pair(name)
    step: Any = torch.compile(opt.step, backend="aot_eager")
    train(model, opt, range(7), step=step)
    train(twin, reference, range(7))
    assert_same(model, opt, twin, reference)

    loss = step(lambda: optimizers.backward(model, opt, 7, data=batch))
    assert float(loss.detach()) > 0
    train(twin, reference, [7])
    assert_same(model, opt, twin, reference)
    assert graphs() == 0


def whole_step(model: nn.Module, opt: Any) -> Callable[[Tensor, Tensor], Tensor]:
    def take(x: Tensor, y: Tensor) -> Tensor:
        opt.zero_grad()
        output = model(x)
        opt.observe(output)
        loss = cross_entropy(output, y)
        loss.backward()
        opt.step()
        return loss

    return take


@factored
def test_a_training_step_compiled_as_a_whole(name: str) -> None:
    """In pieces that are compiled once: none after every kind of step has been taken."""
    model, opt, twin, reference = pair(name)
    compiled = torch.compile(whole_step(model, opt), backend="aot_eager")
    plain = whole_step(twin, reference)
    for number in range(16):
        with torch._dynamo.config.patch(error_on_recompile=number >= 8):
            loss = compiled(*batch(number))
        assert torch.equal(loss, plain(*batch(number)))
        # The model and its loss. An observation would make a dozen, which take seconds to compile.
        assert number != 3 or name != "sampled" or graphs() == 2
    assert_same(model, opt, twin, reference)
    assert opt.failures() == NO_FAILURES


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a:UserWarning")
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")
def test_a_compiled_step_of_a_fallback_follows_a_scheduler_without_recompiling() -> None:
    """After every kind of step has been taken, none is compiled again; the results are the same."""
    model = optimizers.net()
    twin = copy.deepcopy(model)
    opts = [made("fallback", m, lr=torch.tensor(0.01), inverse_interval=2) for m in (model, twin)]
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(opt, 0.9) for opt in opts]
    compiled = torch.compile(lambda: opts[0].step(), backend="eager")
    frames = torch._dynamo.utils.counters["frames"]
    frames.clear()
    for step in range(9):
        if step == 4:
            taken = dict(frames)
            assert taken["total"] > 0
        optimizers.backward(model, opts[0], step)
        compiled()
        optimizers.train(twin, opts[1], [step])
        for scheduler in schedulers:
            scheduler.step()
    assert dict(frames) == taken
    torch.testing.assert_close(values(model), values(twin))
    torch.compiler.reset()


# ------------------------------------------------------------------ attach


def attached_and_compiled(model: attached.Net, opt: TNT, how: str) -> Any:
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


@pytest.mark.parametrize("how", ["before", "after", "in place", "whole"])
def test_attached_models(how: str) -> None:
    model = attached.made_net()
    opt = TNT.paper(model.parameters(), likelihood="categorical", **attached.SETTINGS)
    seen, output = attached.counted()
    called = attached_and_compiled(model, opt, how)
    attached.train(called, opt, observe=False)
    assert graphs() == 1
    reference = attached.made_net()
    observing = TNT.paper(reference.parameters(), likelihood="categorical", **attached.SETTINGS)
    attached.train(torch.compile(reference, backend="aot_eager"), observing, observe=True)
    attached.assert_same(attached.contents(model, opt), attached.contents(reference, observing))
    called.eval()
    called(torch.randn(8, 5))
    assert observation_count(opt) == 0


def test_whole_graphs_with_the_hook_inside_are_refused() -> None:
    model = attached.made_net()
    opt = TNT.paper(model.parameters(), likelihood="categorical")
    opt.attach(model)
    whole = torch.compile(model, backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match="attach it to what torch.compile returned"):
        whole(torch.randn(8, 5))


# ------------------------------------------------------------------ KFAC, which must see its layers


def test_kfac_refuses_a_compiled_model() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    opt = KFAC(model, likelihood="categorical")
    compiled = torch.compile(model, backend="aot_eager")
    with pytest.raises(ValueError, match="parameters of '0'.* Observe .* without torch.compile"):
        opt.observe(compiled(torch.randn(5, 3)))


def test_compiled_parts_without_layers_change_nothing_for_kfac() -> None:
    x, labels = kfac_models.images(), torch.randint(5, (8,))
    model = kfac_models.conv_net()
    expected = kfac_models.observed_statistics(model, lambda: model(x), labels)
    model[3] = torch.compile(model[3], backend="aot_eager")
    nodes = graph_nodes(model(x))
    assert any(node.name() == "CompiledFunctionBackward" for node in nodes)
    found = kfac_models.observed_statistics(model, lambda: model(x), labels)
    close(found, expected)


# ------------------------------------------------------------------ activation checkpointing


def checkpointed(name: str, reentrant: Reentrant, dropout: float) -> tuple[Net, Any, Tensor]:
    """A trained model, its optimizer, and the numbers that the global generator gives then."""
    model = Net(reentrant, dropout)
    opt = made(name, model)
    torch.manual_seed(11)
    train(model, opt, range(6))
    return model, opt, torch.rand(3)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("name", METHODS)
def test_checkpointed_layers(name: str, dropout: float) -> None:
    """An observation and the backward compute them again, with the same dropout; the global
    generator is as without checkpoints."""
    model, opt, drawn = checkpointed(name, False, dropout)
    twin, reference, wanted = checkpointed(name, None, dropout)
    assert_same(model, opt, twin, reference)
    assert torch.equal(drawn, wanted)
    observations = 3 if name in SAMPLING else 0
    assert (model.passes, twin.passes) == (6 + 6 + observations, 6)


def test_dropout_in_checkpointed_layers_of_a_compiled_model() -> None:
    """The forward, the observation and the backward use one mask: the sampled loss and the training
    loss, here the same function, have the same gradients."""
    model = Net(False, dropout=0.5)
    opt = TNT.paper(model.parameters(), likelihood=lambda output: output.square().mean())
    output = torch.compile(model, backend="aot_eager", fullgraph=True)(batch(0)[0])
    opt.observe(output)
    sampled = observed_gradients(opt)
    output.square().mean().backward()
    assert model.hidden.weight.grad is not None and bool(model.hidden.weight.grad.any())
    for param in model.parameters():
        assert param.grad is not None and torch.equal(param.grad, sampled[param])


@tnt_and_kfac
@pytest.mark.parametrize("where", ["a part", "the whole"])
def test_reentrant_checkpointing_is_refused(name: str, where: str) -> None:
    """It hides the parameters from everything but ``backward()``. The refusal changes nothing, and
    training goes on without checkpointing."""
    model = Net(True if where == "a part" else None)
    opt = made(name, model)
    x = batch(0)[0].requires_grad_()
    for _ in range(2):
        whole: Any = checkpoint(model, x, use_reentrant=True) if where == "the whole" else model(x)
        before = Snapshot(model.parameters(), opt)
        with raising((RuntimeError, ValueError), match="reentrant"):
            opt.observe(whole)
        before.assert_unchanged()
    model.reentrant = False
    before_training = values(model)
    train(model, opt, range(3))
    assert not any(map(torch.equal, values(model), before_training))


@pytest.mark.parametrize("name", ["empirical", "shampoo"])
def test_reentrant_checkpointing_without_observations(name: str) -> None:
    model, opt, _ = checkpointed(name, True, 0.3)
    twin, reference, _ = checkpointed(name, None, 0.3)
    assert_same(model, opt, twin, reference)
