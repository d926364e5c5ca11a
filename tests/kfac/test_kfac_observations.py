"""What KFAC captures from a forward pass, what observe() takes from it, and what is left behind."""

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from drawn import close
from optimizers import no_host_reads
from tolerances import BFLOAT16_SPACING, FLOAT64_REORDERED
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tnt_optim import KFAC
from tnt_optim.kfac.activations import LayerHook

if TYPE_CHECKING:
    from conftest import FixedLabels, Snapshot

    TakeSnapshot = Callable[..., Snapshot]

pytestmark = pytest.mark.usefixtures("one_thread")


def conv_net(*, inplace: bool = False, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """Two convolutions, a batch norm and a linear layer; (N, 2, 4, 4) to (N, 5)."""
    torch.manual_seed(4)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, bias=False),
        nn.BatchNorm2d(4),
        nn.Conv2d(4, 4, 1),
        nn.ReLU(inplace),
        nn.Flatten(),
        nn.Linear(16, 5),
    ).to(dtype)


def train(model: nn.Module, opt: KFAC, steps: int = 1, x: Tensor | None = None) -> None:
    """Steps on random data from the global generator."""
    for _ in range(steps):
        opt.zero_grad()
        p = next(model.parameters())
        output = model(torch.randn(8, 2, 4, 4, dtype=p.dtype) if x is None else x)
        opt.observe(output)
        nn.functional.cross_entropy(output, torch.randint(5, (len(output),))).backward()
        opt.step()


def statistics(model: nn.Module, output: Callable[[], Tensor], labels: Tensor) -> list[Tensor]:
    """All layers' [G, A] after one observed step."""
    opt = KFAC(model, likelihood=lambda z: nn.functional.cross_entropy(z, labels), lr=0.0)
    result = output()
    opt.observe(result)
    result.sum().backward()
    opt.step()
    return [matrix for state in opt._layer_states().values() for matrix in state["stats"]]


# ------------------------------------------------------------------ the graph


class Positions(nn.Module):
    """Layers whose outputs are views (three dimensions), then changed in place."""

    def __init__(self, inplace: bool) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 5)
        self.act = nn.ReLU(inplace)

    def forward(self, x: Tensor) -> Tensor:
        """(N, positions, 4) to (N, 5)."""
        y = self.act(self.first(x))
        z = self.second(y)
        if self.act.inplace:
            z[:, 0] *= 2
        else:
            z = torch.cat([2 * z[:, :1], z[:, 1:]], dim=1)
        return z.sum(1)


@pytest.mark.parametrize("kind", ["conv", "positions"])
def test_changes_in_place_after_a_layer_change_nothing(kind: str) -> None:
    x = torch.randn(8, 2, 4, 4) if kind == "conv" else torch.randn(8, 3, 4)
    x, labels = x.double(), torch.randint(5, (8,))
    found = []
    for inplace in (False, True):
        model = conv_net(inplace=inplace) if kind == "conv" else Positions(inplace).double()
        found.append(statistics(model, lambda model=model: model(x), labels))
    for a, b in zip(*found, strict=True):
        close(b, a)


class Checkpointed(nn.Module):
    """A model whose first part is computed again in the backward."""

    def __init__(self, model: nn.Sequential, use_reentrant: bool) -> None:
        super().__init__()
        self.model, self.use_reentrant = model, use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        """The model's output."""
        hidden = checkpoint(self.model[:4], x, use_reentrant=self.use_reentrant)
        return self.model[4:](hidden)


def test_checkpointing_changes_nothing() -> None:
    x, labels = torch.randn(8, 2, 4, 4).double(), torch.randint(5, (8,))
    plain, wrapped = conv_net(), Checkpointed(conv_net(), use_reentrant=False)
    expected = statistics(plain, lambda: plain(x), labels)
    for a, b in zip(expected, statistics(wrapped, lambda: wrapped(x), labels), strict=True):
        close(b, a)


def test_reentrant_checkpointing_is_refused() -> None:
    model = Checkpointed(conv_net(), use_reentrant=True)
    opt = KFAC(model)
    with pytest.raises(ValueError, match="use_reentrant=False"):
        opt.observe(model(torch.randn(8, 2, 4, 4).double().requires_grad_()))


def test_compiled_model_is_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    opt = KFAC(model)
    compiled = torch.compile(model, backend="aot_eager")
    with pytest.raises(ValueError, match="parameters of '0'.* Observe .* without torch.compile"):
        opt.observe(compiled(torch.randn(5, 3)))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # dynamo's own
def test_compiled_parts_without_layers_are_welcome() -> None:
    x, labels = torch.randn(8, 2, 4, 4).double(), torch.randint(5, (8,))
    model = conv_net()
    expected = statistics(model, lambda: model(x), labels)
    model[3] = torch.compile(model[3], backend="aot_eager")
    result = model(x)
    assert any(node.name() == "CompiledFunctionBackward" for node in nodes(result))
    for a, b in zip(expected, statistics(model, lambda: model(x), labels), strict=True):
        close(b, a)


class Twice(nn.Module):
    """The same layer at two places, or its weight read beside it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer, self.head, self.how = nn.Linear(4, 4), nn.Linear(4, 3), how

    def forward(self, x: Tensor) -> Tensor:
        """(N, 4) to (N, 3)."""
        if self.how == "calls":
            return self.head(self.layer(torch.tanh(self.layer(x))))
        if self.how == "functional":
            return self.head(nn.functional.linear(x, self.layer.weight))
        with torch.no_grad():
            self.layer(x)  # no use: nothing of it is in the output
        y = self.layer(x)
        self.layer(2 * x)  # no use, either
        x.mul_(2)
        return self.head(y)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("calls", "2 calls of 'layer'"),
        ("functional", "not through a forward call"),
        ("input", "input of 'layer' must not be changed"),
    ],
)
def test_uses_that_do_not_fit_are_refused(how: str, message: str, snapshot: "TakeSnapshot") -> None:
    model = Twice(how)
    opt = KFAC(model)
    before = snapshot(model.parameters(), opt)
    with pytest.raises(ValueError, match=message):
        opt.observe(model(torch.randn(5, 4)))
    before.assert_unchanged()


def test_output_observed_twice_is_refused() -> None:
    model = nn.Linear(4, 3)
    opt = KFAC(model)
    output = model(torch.randn(5, 4))
    opt.observe(output)
    with pytest.raises(ValueError, match="observed before"):
        opt.observe(2 * output)


def test_forward_passes_that_are_not_observed_do_not_count() -> None:
    x, labels = torch.randn(8, 2, 4, 4).double(), torch.randint(5, (8,))
    model = conv_net()
    expected = statistics(model, lambda: model(x), labels)

    def output() -> Tensor:
        model(3 * x)
        with torch.no_grad():
            model(x)
        result = model(x)
        model(-x).sum().backward()
        return result

    for a, b in zip(expected, statistics(model, output, labels), strict=True):
        assert torch.equal(a, b)


# ------------------------------------------------------------------ micro-batches, traces


def test_micro_batches_are_one_batch(fixed_labels: "FixedLabels") -> None:
    """Of unequal sizes, and backward before the next forward: trap 5 would add them up."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv1d(2, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(9, 4)).double()
    twin = copy.deepcopy(model)
    opt, whole = (
        KFAC(m, lr=0.01, stat_interval=2, inverse_interval=3, likelihood=fixed_labels)
        for m in (model, twin)
    )
    for t in range(5):
        x, y = torch.randn(16, 2, 4).double(), torch.randint(4, (16,))
        sampled = torch.randint(4, (16,))
        opt.zero_grad()
        whole.zero_grad()
        parts = [slice(0, 4), slice(4, 14), slice(14, 16)]
        if t == 0:  # the other order: all forwards, then all observations
            outputs = [model(x[rows]) for rows in parts]
        for i, rows in enumerate(parts):
            output = outputs[i] if t == 0 else model(x[rows])
            fixed_labels.current = sampled[rows]
            opt.observe(output)
            loss = nn.functional.cross_entropy(output, y[rows], reduction="sum") / 16
            loss.backward()
        opt.step()
        output = twin(x)
        fixed_labels.current = sampled
        whole.observe(output)
        nn.functional.cross_entropy(output, y).backward()
        whole.step()
        for mine, expected in zip(
            opt._layer_states().values(), whole._layer_states().values(), strict=True
        ):
            for a, b in zip(mine["stats"], expected["stats"], strict=True):
                assert float((a - b).norm()) <= 100 * FLOAT64_REORDERED * float(b.norm())
        for a, b in zip(model.state_dict().values(), twin.state_dict().values(), strict=True):
            assert float((a - b).norm()) <= 100 * FLOAT64_REORDERED * float(b.norm())


def test_observe_leaves_no_trace() -> None:
    """`.grad` is to the bit what it is without KFAC; so are buffers and the global generator."""
    plain, model = conv_net(), conv_net()
    opt = KFAC(model, stat_interval=1)
    x, y = torch.randn(8, 2, 4, 4).double(), torch.randint(5, (8,))
    for m in (plain, model):
        before = torch.get_rng_state()
        for rows in (slice(0, 4), slice(4, 8)):
            output = m(x[rows])
            if m is model:
                opt.observe(output)
            nn.functional.cross_entropy(output, y[rows]).backward()
        assert torch.equal(torch.get_rng_state(), before)
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
    for a, b in zip(plain.buffers(), model.buffers(), strict=True):
        assert torch.equal(a, b)
    grads = [p.grad.clone() for p in model.parameters()]
    opt.step()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), grads, strict=True))


def test_nothing_is_captured_or_sampled_where_not_due() -> None:
    model = conv_net()
    opt = KFAC(model, stat_interval=3)
    for t in range(7):
        output = model(torch.randn(8, 2, 4, 4).double())
        captured = any(LayerHook in map(type, node.metadata) for node in nodes(output))
        assert captured == (t % 3 == 0)
        calls: list[Tensor] = []
        output.register_hook(calls.append)
        opt.observe(output)
        assert len(calls) == (t % 3 == 0)
        held = [use for node in nodes(output) for use in node.metadata.values()]
        assert not any(held)  # let go before the user's backward
        output.square().sum().backward()
        opt.step()


def nodes(output: Tensor) -> list[Any]:
    """The graph of an output."""
    found: list[Any] = []
    waiting = [output.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in found:
            found.append(node)
            waiting += [following for following, _ in node.next_functions]
    return found


def test_captured_inputs_go_with_the_graph() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    opt = KFAC(model)
    x = torch.randn(5, 4)
    output = model(x)
    uses = [weakref.ref(u) for n in nodes(output) for k, u in n.metadata.items()]
    assert len(uses) == 2 and all(use() is not None for use in uses)
    del output
    assert all(use() is None for use in uses)
    assert opt.param_groups


def test_nothing_keeps_the_model_or_the_optimizer_alive() -> None:
    model = conv_net()
    opt = KFAC(model)
    train(model, opt, 2)
    gone, model_gone = weakref.ref(opt), weakref.ref(model)
    gc.collect()
    gc.disable()
    try:
        del opt
        assert gone() is None
        assert not any(m._forward_hooks for m in model.modules())
        opt = KFAC(model)
        opt.close()
        opt.close()
        assert not any(m._forward_hooks for m in model.modules())
        with pytest.raises(ValueError, match="close"):
            opt.observe(model(torch.randn(8, 2, 4, 4).double()))
        del opt, model
    finally:
        gc.enable()
    gc.collect()  # the refused observe's traceback
    assert model_gone() is None


@pytest.mark.parametrize(
    "clone",
    [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))],
    ids=["deepcopy", "pickle"],
)
@pytest.mark.parametrize("inverse", ["damped", "eigenbasis"])
@pytest.mark.parametrize("stop", [0, 5])
def test_copies_continue_bit_for_bit(
    clone: Callable[[Any], Any], stop: int, inverse: str, snapshot: "TakeSnapshot"
) -> None:
    model = conv_net()
    opt = KFAC(model, stat_interval=2, inverse_interval=5, inverse=inverse)
    train(model, opt, stop)
    model2, opt2 = clone((model, opt))
    lone = clone(model)  # its hooks are dead
    lone(torch.randn(8, 2, 4, 4).double())
    torch.manual_seed(9)
    train(model, opt, 6)
    pairs = zip(model.parameters(), model2.parameters(), strict=True)
    assert not any(torch.equal(a, b) for a, b in pairs), "the copy is not a copy"
    torch.manual_seed(9)
    train(model2, opt2, 6)
    snapshot(model.parameters(), opt).assert_equals(snapshot(model2.parameters(), opt2))
    output = lone(torch.randn(8, 2, 4, 4).double())
    assert not any(node.metadata for node in nodes(output))


def test_two_optimizers_on_one_model_do_not_mix() -> None:
    x, labels = torch.randn(8, 2, 4, 4).double(), torch.randint(5, (8,))
    model = conv_net()
    expected = statistics(model, lambda: model(x), labels)
    other = KFAC(model)
    output = model(x)
    other.observe(output)
    for a, b in zip(expected, statistics(model, lambda: model(x), labels), strict=True):
        assert torch.equal(a, b)


def test_later_steps_never_wait_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    model = conv_net()
    opt = KFAC(model, stat_interval=2, inverse_interval=3)
    monkeypatch.setattr("tnt_optim.failures._Delivery.arrived", lambda self: False)
    train(model, opt)
    for t in range(1, 7):
        opt.zero_grad()
        output = model(torch.randn(8, 2, 4, 4).double())
        with no_host_reads():
            opt.observe(output)
            for _ in range(t % 3):  # micro-batches
                opt.observe(model(torch.randn(8, 2, 4, 4).double()))
        output.sum().backward()
        with no_host_reads():
            opt.step()


def test_draws_are_keyed_on_seed_step_and_micro_batch() -> None:
    def draws(seed: int) -> list[float]:
        torch.manual_seed(int(torch.randint(1000, ())))  # the global seed does not matter
        model, seen = nn.Linear(3, 2), []

        def likelihood(output: Tensor) -> Tensor:
            seen.append(float(torch.rand(())))
            return output.square().sum()

        opt = KFAC(model, likelihood=likelihood, stat_interval=1, seed=seed)
        for _ in range(2):
            for _ in range(2):
                output = model(torch.randn(4, 3))
                before = torch.get_rng_state()
                opt.observe(output)
                assert torch.equal(torch.get_rng_state(), before)
                output.sum().backward()
            opt.step()
        return seen

    first, again, other = draws(0), draws(0), draws(1)
    assert first == again
    assert len(set(first + other)) == 8


def test_structured_outputs_count_examples_by_their_first_tensor() -> None:
    model = nn.Linear(3, 2).double()
    x = torch.randn(6, 3).double()
    found = []
    for wrap in (lambda z: z, lambda z: {"loss": z.sum(), "logits": [z]}):
        opt = KFAC(model, likelihood=lambda out: total(out).square().sum() / 6, lr=0.0)
        opt.warm_start([wrap(model(x))])
        found.append(opt.state[model.weight]["stats"])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)
    with pytest.raises(ValueError, match="batch as its first dimension"):
        KFAC(model, likelihood=lambda z: z).warm_start([model(x).sum()])


def total(output: Any) -> Tensor:
    """The logits of either form."""
    return output["logits"][0] if isinstance(output, dict) else output


def test_hooks_that_replace_an_output_are_not_the_layer() -> None:
    """G belongs to what the layer itself computed, whoever hooked it first."""
    x, labels = torch.randn(8, 2, 4, 4).double(), torch.randint(5, (8,))
    model = conv_net()
    expected = statistics(model, lambda: 2 * model(x), labels)
    model[-1].register_forward_hook(lambda module, args, output: 2 * output)
    for a, b in zip(expected, statistics(model, lambda: model(x), labels), strict=True):
        close(b, a)


def test_autocast_gives_the_statistics_in_float32() -> None:
    """With the roundings of bfloat16: 2^-8 of each a and each g, twice in a product."""
    x, labels = torch.randn(64, 3), torch.randint(5, (64,))
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 5))
    expected = statistics(model, lambda: model(x), labels)

    def output() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x)

    for a, b in zip(expected, statistics(model, output, labels), strict=True):
        assert b.dtype == torch.float32
        assert float((a - b).norm()) <= 4 * BFLOAT16_SPACING * float(a.norm())
