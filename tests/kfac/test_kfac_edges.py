"""Bad input: models, settings, outputs and gradients that KFAC refuses."""

import copy
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from test_kfac_observations import conv_net, train
from torch import Tensor, nn

from tnt_optim import KFAC

if TYPE_CHECKING:
    from conftest import Snapshot

    TakeSnapshot = Callable[..., Snapshot]

pytestmark = pytest.mark.usefixtures("one_thread")

NAN = math.nan
BAD_SETTINGS: list[tuple[str, Any]] = [
    *[("lr", bad) for bad in (-1e-3, NAN, math.inf)],
    *[("damping", bad) for bad in (-0.1, NAN, math.inf)],
    *[("weight_decay", bad) for bad in (-1.0, NAN)],
    *[("momentum", bad) for bad in (-0.1, 1.0, NAN)],
    *[("stat_decay", bad) for bad in (-0.1, 1.0, NAN)],
    *[("stat_interval", bad) for bad in (0, 1.5)],
    *[("inverse_interval", bad) for bad in (0, 2.5)],
]


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        *BAD_SETTINGS,
        ("likelihood", "poisson"),
        ("inverse", "svd"),
        ("shard", "directions"),
        ("seed", 1.5),
        ("seed", True),
    ],
)
def test_bad_argument_is_refused_by_name(name: str, bad: Any) -> None:
    model = conv_net()
    with pytest.raises(ValueError, match=name):
        KFAC(model, **{name: bad})
    assert not any(m._forward_hooks for m in model.modules())


@pytest.mark.parametrize(("name", "bad"), BAD_SETTINGS)
def test_setting_that_goes_bad_later_changes_nothing(
    name: str, bad: Any, snapshot: "TakeSnapshot"
) -> None:
    model = conv_net()
    opt = KFAC(model)
    train(model, opt, 2)
    before = snapshot(model.parameters(), opt)
    good, opt.param_groups[0][name] = opt.param_groups[0][name], bad
    with pytest.raises(ValueError, match=name):
        opt.step()
    opt.param_groups[0][name] = good
    before.assert_unchanged()
    train(model, opt)


def tied_weight() -> nn.Module:
    model = nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    return model


def shared_bias() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].bias = model[0].bias
    return model


def same_layer_twice() -> nn.Module:
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, nn.Tanh(), layer)


def layer_in_a_shared_container() -> nn.Module:
    block = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    return nn.ModuleDict({"a": block, "b": block})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.Sequential(nn.Conv2d(4, 4, 3, groups=2), nn.BatchNorm2d(4)), "with none"),
        (lambda: nn.Sequential(nn.LazyLinear(3)), "lazy"),
        (lambda: nn.Sequential(nn.Linear(2, 3, dtype=torch.complex64)), "complex64"),
        (tied_weight, "'0.weight' is '1.weight', too"),
        (shared_bias, "'0.bias' is '1.bias', too"),
        (same_layer_twice, "'0' is '2', too"),
        (layer_in_a_shared_container, "'a.0' is 'b.0', too"),
    ],
)
def test_model_that_does_not_fit_is_refused(make: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(ValueError, match=f"model must .*{message}"):
        KFAC(make())


def test_parameters_instead_of_a_model_are_refused() -> None:
    with pytest.raises(TypeError, match="model must be a torch.nn.Module, got generator"):
        KFAC(conv_net().parameters())


def test_shared_modules_without_a_block_are_welcome() -> None:
    norm, act = nn.LayerNorm(4), nn.ReLU()
    model = nn.Sequential(nn.Linear(4, 4), norm, act, nn.Linear(4, 4), norm, act)
    assert len(KFAC(model).param_groups[0]["params"]) == 6


def test_second_group_is_refused() -> None:
    opt = KFAC(conv_net())
    with pytest.raises(ValueError, match="param_group"):
        opt.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    assert len(opt.param_groups) == 1


@pytest.mark.parametrize(
    ("likelihood", "output", "message"),
    [
        ("categorical", lambda z: z.sum(1), "output must be"),
        ("categorical", lambda z: z[None], "output must be"),
        ("bernoulli", lambda z: z.sum(1), "output must be"),
        ("gaussian", lambda z: z.sum(), "output must be"),
        ("gaussian", lambda z: z.detach(), "graph"),
        ("gaussian", lambda z: (z,), "floating-point tensor, got tuple"),
        ("gaussian", lambda z: z[:0], "at least one example"),
        ("gaussian", lambda z: nn.Linear(2, 2)(torch.ones(3, 2)), "another model's"),
        (lambda z: 2 * z, lambda z: z, "likelihood must give a 0-dim"),
        (lambda z: z.sum().detach(), lambda z: z, "likelihood must have a graph"),
    ],
)
def test_outputs_that_do_not_fit_are_refused(
    likelihood: Any, output: Callable[[Tensor], Any], message: str, snapshot: "TakeSnapshot"
) -> None:
    model = nn.Linear(3, 4)
    opt = KFAC(model, likelihood=likelihood)
    before = snapshot(model.parameters(), opt)
    with pytest.raises(ValueError, match=message):
        opt.observe(output(model(torch.randn(5, 3))))
    with pytest.raises(ValueError, match=message):
        opt.warm_start(output(model(torch.randn(5, 3))) for _ in range(2))
    before.assert_unchanged()


@pytest.mark.parametrize(
    "bad", [lambda z: z.detach(), lambda z: z[:0], lambda z: nn.Linear(2, 4)(torch.ones(5, 2))]
)
def test_refused_output_leaves_an_earlier_one(
    bad: Callable[[Tensor], Tensor], snapshot: "TakeSnapshot"
) -> None:
    model = nn.Linear(3, 4)
    opt = KFAC(model)
    good = model(torch.randn(5, 3))
    opt.observe(good)
    before = snapshot(model.parameters(), opt)
    assert before.content["held"]["_observed"]["count"] == 1
    for output in (good, bad(model(torch.randn(5, 3)))):
        with pytest.raises(ValueError, match="output"):
            opt.observe(output)
    before.assert_unchanged()


def test_sparse_gradient_is_refused_by_name(snapshot: "TakeSnapshot") -> None:
    model = nn.Sequential(nn.Embedding(4, 3, sparse=True), nn.Linear(3, 2))
    opt = KFAC(model)
    output = model(torch.tensor([0, 2, 2]))
    opt.observe(output)
    output.sum().backward()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(RuntimeError, match=r"gradient of '0.weight' must be dense, got .*sparse"):
        opt.step()
    assert all(map(torch.equal, before, model.parameters())) and not opt.state_dict()["state"]


def test_warm_start_needs_batches_and_restores_what_it_moved(snapshot: "TakeSnapshot") -> None:
    model = conv_net()
    opt = KFAC(model)
    buffers, before = copy.deepcopy(list(model.buffers())), snapshot(model.parameters(), opt)
    with pytest.raises(ValueError, match="outputs must hold at least one batch"):
        opt.warm_start(iter(()))
    with pytest.raises(TypeError, match="iterable"):
        opt.warm_start(3)

    def outputs() -> Any:
        yield model(torch.randn(8, 2, 4, 4).double())
        raise KeyError("the data set is broken")

    with pytest.raises(KeyError, match="broken"):
        opt.warm_start(outputs(), model=model)
    before.assert_unchanged()
    assert all(torch.equal(a, b) for a, b in zip(buffers, model.buffers(), strict=True))
    opt.param_groups[0]["step"] = 1  # not due any more, and the outputs were made before
    train_outputs = [model(torch.randn(8, 2, 4, 4).double())]
    opt.warm_start(train_outputs)  # a layer without statistics is captured at every step
    late = [model(torch.randn(8, 2, 4, 4).double())]
    with pytest.raises(ValueError, match="generator"):
        opt.warm_start(late)
