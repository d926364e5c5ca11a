"""What KFAC captures in a forward pass, and which graphs it refuses."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import Snapshot
from drawn import close, noise
from kfac_models import batch, conv_net, images, observed_statistics
from optimizers import train
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tnt_optim import KFAC
from tnt_optim.autograd import graph_nodes
from tnt_optim.kfac.activations import Call


def captured(output: Tensor) -> list[Call]:
    """The calls in the graph of an output."""
    uses = [use for node in graph_nodes(output) for use in node.metadata.values()]
    assert all(isinstance(use, Call) for use in uses)
    return uses


def compare(model: nn.Module, output: Callable[[], Tensor], like: Callable[[], Tensor]) -> None:
    """The statistics of one output are those of another, but for rounding."""
    labels = torch.randint(5, (8,))
    expected = observed_statistics(model, like, labels)
    close(observed_statistics(model, output, labels), expected)


class Positions(nn.Module):
    """Layers whose outputs are views (three dimensions), then changed in place."""

    def __init__(self, inplace: bool) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 5)
        self.act = nn.ReLU(inplace)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        """(N, positions, 4) to (N, 5)."""
        z = self.second(self.act(self.first(x)))
        if self.act.inplace:
            z[:, 0] *= 2
        else:
            z = torch.cat([2 * z[:, :1], z[:, 1:]], dim=1)
        return z.sum(1)


@pytest.mark.parametrize("kind", ["conv", "positions"])
def test_changes_in_place_after_a_layer_change_nothing(kind: str) -> None:
    x, labels = images() if kind == "conv" else noise(8, 3, 4), torch.randint(5, (8,))
    found = []
    for inplace in (False, True):
        model = conv_net(inplace=inplace) if kind == "conv" else Positions(inplace)
        found.append(observed_statistics(model, lambda model=model: model(x), labels))
    close(*found)


def test_hooks_that_replace_an_output_are_not_the_layer() -> None:
    """G belongs to what the layer itself computed, even if the other hook was there before."""
    x, labels, model = images(), torch.randint(5, (8,)), conv_net()
    expected = observed_statistics(model, lambda: 2 * model(x), labels)
    model[-1].register_forward_hook(lambda module, args, output: 2 * output)
    close(observed_statistics(model, lambda: model(x), labels), expected)


def test_calls_of_one_layer_are_positions() -> None:
    """Also if the layer has two names, and if calls are checkpointed."""
    model, x = Positions(inplace=False), noise(8, 3, 4)
    model.alias = model.first

    def apart() -> Tensor:
        first, alias = model.first(x[:, 0]), checkpoint(model.alias, x[:, 1], use_reentrant=False)
        hidden = [model.act(each) for each in (first, alias, model.first(x[:, 2]))]
        outputs = [model.second(each) for each in hidden]
        return 2 * outputs[0] + outputs[1] + outputs[2]

    assert KFAC(model, likelihood="categorical")._observed.names == ["first", "second"]
    compare(model, apart, lambda: model(x))


def test_inputs_may_be_sparse() -> None:
    model, x = nn.Sequential(nn.Linear(4, 5)).double(), noise(8, 4).relu()
    compare(model, lambda: model(x.to_sparse()), lambda: model(x))


def test_forward_passes_that_are_not_observed_do_not_count() -> None:
    model, x = conv_net(), images()

    def output() -> Tensor:
        model(3 * x)
        with torch.no_grad():
            model(x)
        result = model(x)
        model(-x).sum().backward()
        return result

    compare(model, output, lambda: model(x))


def test_two_optimizers_on_one_model_do_not_mix() -> None:
    model, x = conv_net(), images()
    other = KFAC(model, likelihood="categorical")

    def output() -> Tensor:
        other.observe(model(x))
        return model(x)

    compare(model, output, lambda: model(x))


# ------------------------------------------------------------------ graphs that are refused


class Twice(nn.Module):
    """A layer that is read by another function, or changed afterwards."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer, self.head, self.how = nn.Linear(4, 4), nn.Linear(4, 3), how

    def forward(self, x: Tensor) -> Tensor:
        """(N, 4) to (N, 3)."""
        if self.how == "functional":
            return self.head(nn.functional.linear(x, self.layer.weight))
        if self.how == "reentrant":
            return self.head(checkpoint(self.layer, x.requires_grad_(), use_reentrant=True))
        with torch.no_grad():
            self.layer(x)  # not a use: nothing of it is in the output
        y = self.layer(x)
        self.layer(2 * x)  # not a use either
        x.mul_(2)
        return self.head(y)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("functional", "not through a forward call"),
        ("reentrant", "use_reentrant=False"),
        ("input", "input of 'layer' must not be changed"),
    ],
)
def test_uses_that_do_not_fit_are_refused(how: str, message: str) -> None:
    model = Twice(how)
    opt = KFAC(model, likelihood="categorical")
    before = Snapshot(model.parameters(), opt)
    with pytest.raises(ValueError, match=message):
        opt.observe(model(torch.randn(5, 4)))
    before.assert_unchanged()


def test_a_call_with_other_weights_is_refused() -> None:
    model = nn.Linear(3, 4)
    opt = KFAC(model, likelihood="categorical")
    others = {name: torch.randn_like(p).requires_grad_() for name, p in model.named_parameters()}
    with pytest.raises(ValueError, match="was called with others, as by torch.func"):
        opt.observe(torch.func.functional_call(model, others, (torch.randn(5, 3),)))


def test_a_weight_used_outside_of_its_layers_calls_is_named_once() -> None:
    """As in an autoencoder whose decoder is the encoder's transpose."""
    model = nn.Linear(4, 3, bias=False)
    opt = KFAC(model, likelihood="gaussian")

    def observe() -> None:
        opt.observe(F.linear(model(torch.randn(5, 4)), model.weight.t()))

    with pytest.warns(RuntimeWarning, match="weight of '' is used outside of the layer's calls"):
        observe()
    observe()
    opt.observe(model(torch.randn(5, 4)) + model(torch.randn(5, 4)))


def test_an_output_is_observed_once() -> None:
    model = nn.Linear(3, 4)
    opt = KFAC(model, likelihood="categorical")
    output = model(torch.randn(5, 3))
    opt.observe(output)
    before = Snapshot(model.parameters(), opt)
    with pytest.raises(ValueError, match="output"):
        opt.observe(2 * output)
    before.assert_unchanged()


# ------------------------------------------------------------------ what is left behind


def test_nothing_is_captured_or_sampled_unless_due() -> None:
    model = conv_net()
    opt = KFAC.paper(model, stat_interval=3, likelihood="categorical")
    for t in range(7):
        output = model(images())
        assert len(captured(output)) == (3 if t % 3 == 0 else 0)
        calls: list[Tensor] = []
        output.register_hook(calls.append)
        opt.observe(output)
        assert len(calls) == (t % 3 == 0)
        # The inputs are freed before the user's backward.
        assert not any(call.inputs.numel() for call in captured(output))
        output.softmax(1).square().sum().backward()
        opt.step()


def test_captured_inputs_are_freed_with_the_graph() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    opt = KFAC(model, likelihood="categorical")
    output = model(torch.randn(5, 4))
    calls: list[Any] = [weakref.ref(call) for call in captured(output)]
    assert len(calls) == 2 and all(call() is not None for call in calls)
    del output
    assert all(call() is None for call in calls) and opt.param_groups


def test_nothing_keeps_the_model_or_the_optimizer_alive() -> None:
    model = conv_net()
    opt = KFAC(model, likelihood="categorical")
    train(model, opt, range(2), data=batch)
    gone, model_gone = weakref.ref(opt), weakref.ref(model)
    gc.collect()
    gc.disable()
    try:
        del opt
        assert gone() is None
        assert not any(m._forward_hooks for m in model.modules())
        opt = KFAC(model, likelihood="categorical")
        opt.close()
        opt.close()
        assert not any(m._forward_hooks for m in model.modules())
        with pytest.raises(ValueError, match="close"):
            opt.observe(model(images()))
        del opt, model
    finally:
        gc.enable()
    gc.collect()  # the traceback of the refused observe
    assert model_gone() is None
