"""Which layers KFAC preconditions, and their parameters, inputs and gradients as matrices."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from drawn import close
from optimizers import train
from torch import Tensor, nn

from tnt_optim import KFAC
from tnt_optim.kfac.layers import input_rows, is_supported, output_rows
from tnt_optim.kfac.statistics import layer_sums
from tnt_optim.units import Units

LAYERS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "1d": (nn.Conv1d(3, 4, 3, stride=2, padding=1), (5, 3, 8)),
    "1d_same_even": (nn.Conv1d(3, 4, 4, padding="same", dilation=3, bias=False), (5, 3, 13)),
    "1d_circular": (nn.Conv1d(2, 3, 3, padding=2, padding_mode="circular"), (4, 2, 6)),
    "2d": (nn.Conv2d(3, 4, (2, 3), stride=(2, 1), padding=(1, 0), dilation=(1, 2)), (2, 3, 7, 6)),
    "2d_valid": (nn.Conv2d(2, 5, 3, padding="valid"), (3, 2, 5, 6)),
    "2d_reflect": (nn.Conv2d(2, 5, 3, padding=(1, 2), padding_mode="reflect"), (3, 2, 5, 6)),
    "2d_same_replicate": (
        nn.Conv2d(2, 3, (2, 4), padding="same", padding_mode="replicate", bias=False),
        (3, 2, 5, 6),
    ),
    "2d_without_batch": (nn.Conv2d(2, 3, 3, padding=1), (2, 5, 4)),
    "2d_pointwise": (nn.Conv2d(4, 3, 1, stride=2), (2, 4, 5, 5)),
    "3d": (nn.Conv3d(2, 3, (1, 2, 3), stride=(2, 1, 2), padding=(0, 1, 1)), (2, 2, 3, 4, 5)),
    "linear_without_batch": (nn.Linear(4, 3), (4,)),
    "linear": (nn.Linear(4, 3, bias=False), (5, 4)),
    "linear_positions": (nn.Linear(4, 3), (2, 5, 4)),
}


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")
@pytest.mark.parametrize("transposed", [False, True], ids=["contiguous", "permuted"])
@pytest.mark.parametrize("name", LAYERS)
def test_rows_give_the_layers_output_and_gradient(name: str, transposed: bool) -> None:
    """Rows times [W | b] are the output; gradient rows times rows are [W | b]'s gradient."""
    layer, shape = copy.deepcopy(LAYERS[name])
    layer = layer.double()
    assert is_supported(layer)
    x = torch.randn(shape, dtype=torch.float64)
    if transposed:
        reverse = list(range(x.dim()))[::-1]
        x = x.permute(reverse).contiguous().permute(reverse)
    params, a = list(layer.parameters()), input_rows(layer, x)
    if layer.bias is not None:
        a = torch.cat([a, a.new_ones(len(a), 1)], dim=1)
    units = Units({layer.weight: layer.bias})
    matrix = units.joined(layer.weight, {p: p.detach() for p in params})
    parts = [matrix if c is None else matrix[:, c] for c in units.columns(layer.weight)]
    assert all(torch.equal(m.reshape(p.shape), p) for m, p in zip(parts, params, strict=True))
    output = layer(x)
    close(a @ matrix.T, output_rows(layer, output.detach()))
    gradient = torch.randn_like(output)
    grads = torch.autograd.grad(output, params, gradient)
    g = output_rows(layer, gradient)
    close(g.T @ a, units.joined(layer.weight, dict(zip(params, grads, strict=True))))
    sums = layer_sums(layer, x, gradient, 3)
    close(sums.inputs, a.T @ a)
    close(sums.gradients, g.T @ g)
    assert (sums.examples, sums.positions) == (3, len(a))
    assert all(torch.equal(m, m.T) for m in (sums.inputs, sums.gradients))


class Rescaled(nn.Linear):
    """A linear layer that computes something else."""

    def forward(self, input: Tensor) -> Tensor:
        """Twice the product."""
        return 2 * super().forward(input)


class Renamed(nn.Linear):
    """A linear layer by another name."""


def test_which_layers_are_supported() -> None:
    yes = [Renamed(2, 3), nn.Conv3d(1, 2, 2), nn.Conv1d(2, 2, 1)]
    no = [
        Rescaled(2, 3),
        nn.Conv2d(4, 4, 3, groups=2),
        nn.ConvTranspose2d(2, 3, 3),
        nn.Bilinear(2, 2, 3),
        nn.utils.parametrizations.weight_norm(nn.Linear(2, 3)),
        nn.MultiheadAttention(4, 2).out_proj,
        nn.Embedding(4, 3),
        nn.BatchNorm2d(3),
    ]
    assert [is_supported(m) for m in yes + no] == [True] * len(yes) + [False] * len(no)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: nn.Sequential(nn.Conv2d(4, 4, 3, groups=2), nn.BatchNorm2d(4)),
            "with BatchNorm2d, Conv2d with groups",
        ),
        (lambda: nn.Sequential(nn.LazyLinear(3)), "lazy"),
        (lambda: nn.Sequential(nn.Linear(2, 3, dtype=torch.complex64)), "complex64"),
    ],
)
def test_a_model_that_does_not_fit_is_refused(make: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(ValueError, match=f"(model|params) must .*{message}"):
        KFAC(make(), likelihood="categorical")


def test_modules_without_a_layer_may_be_shared() -> None:
    norm, act = nn.LayerNorm(4), nn.ReLU()
    model = nn.Sequential(nn.Linear(4, 4), norm, act, nn.Linear(4, 4), norm, act)
    with pytest.warns(RuntimeWarning, match="16.7% .*: 8 in LayerNorm$"):
        opt = KFAC(model, likelihood="categorical")
    assert len(opt.param_groups[0]["params"]) == 6


# ------------------------------------------------------------------ what is not preconditioned


class Language(nn.Module):
    """A character model whose output layer has the weight of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding, self.hidden = nn.Embedding(7, 4), nn.Linear(4, 4)
        self.wide, self.back = nn.Linear(4, 40), nn.Linear(40, 4)
        self.memory = nn.GRU(4, 4)
        self.out = nn.Linear(4, 7)
        self.out.weight = self.embedding.weight
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        """(N,) to (N, 7)."""
        h = self.back(self.wide(self.hidden(self.embedding(x)).tanh()).tanh())
        return self.out(self.memory(h)[0])


def test_layers_that_share_or_are_too_large_are_trained_and_named_by_one_warning() -> None:
    """By the momentum, at the norm of Adam's step; frozen parameters do not count."""
    model = Language()
    with pytest.warns(RuntimeWarning) as said:
        opt = KFAC(model, lr=0.1, max_factor_dim=39, likelihood="categorical")
    wanted = (
        "96.3% of the trainable parameters without preconditioning: 364 in Linear above "
        "max_factor_dim, 120 in GRU, 35 in Linear with a shared parameter"
    )
    assert [w.filename for w in said] == [__file__] and wanted in str(said[0].message)
    assert wanted in repr(opt) and "1 layers" in repr(opt)
    before = {p: p.detach().clone() for p in model.parameters()}
    output = model(torch.arange(7))
    opt.observe(output)
    nn.functional.cross_entropy(output, torch.arange(7)).backward()
    opt.step()
    held = {name for name, p in model.named_parameters() if opt.state.get(p, {}).get("stats")}
    assert held == {"hidden.weight"}
    layer = [model.hidden.weight, model.hidden.bias]
    for unit in [layer, *([p] for p in before if all(p is not other for other in layer))]:
        step = torch.cat([(before[p] - p).flatten() for p in unit]).norm()
        adam = torch.cat([(p.grad / (p.grad.abs() + 1e-8)).flatten() for p in unit]).norm()
        close(step.detach(), 0.1 * adam)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_layers_without_entries_take_the_momentum() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 0), nn.Linear(0, 3))
    with pytest.warns(RuntimeWarning, match=": 3 in Linear without entries"):
        opt = KFAC(model, likelihood="categorical")
    x, before = torch.randn(5, 4), model[0].weight.detach().clone()
    for _ in range(2):
        out = model[0](x) + model(x)
        opt.observe(out)
        nn.functional.cross_entropy(out, torch.arange(5) % 3).backward()
        opt.step()
    assert not torch.equal(model[0].weight, before)


def test_frozen_weights_may_be_shared_and_do_not_count() -> None:
    """As under LoRA; a few norms are shown, without a warning."""
    model = Language()
    model.embedding.requires_grad_(False)
    model.memory.requires_grad_(False)
    model.out.bias.requires_grad_(False)
    opt = KFAC(nn.Sequential(model, nn.LayerNorm(7)), likelihood="categorical")
    assert "3 layers, and 3.5% of the trainable parameters" in repr(opt)
    assert repr(opt).count(": 14 in LayerNorm\n") == 1


def test_an_adapter_of_a_frozen_layer_trains() -> None:
    """LoRA, added by a hook: the adapter is the layer's child."""
    layer = nn.Linear(4, 6).requires_grad_(False)
    model = nn.Sequential(layer, nn.Tanh(), nn.Linear(6, 3))
    layer.add_module("adapter", nn.Linear(4, 6))
    layer.register_forward_hook(lambda _, inputs, output: output + layer.adapter(*inputs))
    before = [p.clone() for p in model.parameters()]
    train(model, KFAC(model, likelihood="categorical"), range(3))
    moved = [not torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True)]
    assert moved == [p.requires_grad for p in model.parameters()]


@pytest.mark.parametrize("graft", [None, "adam"])
def test_biases_and_norms_decay_in_the_papers_form_only(graft: str | None) -> None:
    moves = []
    for decay in (0.0, 0.5):
        torch.manual_seed(7)
        model = nn.Sequential(nn.Linear(4, 20), nn.LayerNorm(20), nn.Linear(20, 20)).double()
        before = [p.detach().clone() for p in model.parameters()]
        opt = KFAC.paper(model, lr=0.1, graft=graft, weight_decay=decay, likelihood="categorical")
        output = model(torch.randn(8, 4).double())
        opt.observe(output)
        nn.functional.cross_entropy(output, torch.arange(8)).backward()
        opt.step()
        moves.append([p.detach() - b for p, b in zip(model.parameters(), before, strict=True)])
    for plain, decayed, start in zip(*moves, before, strict=True):
        share = 0.05 if graft is None or start.dim() > 1 else 0.0
        close(decayed - plain, -share * start)


# ------------------------------------------------------------------ parameter groups


def groups_of(model: nn.Sequential) -> list[dict[str, Any]]:
    """Of a model of five layers: three weights, the last one skipped, and biases."""
    weights, biases = ([getattr(model[i], n) for i in (0, 1, 2)] for n in ("weight", "bias"))
    return [
        {"params": weights[:2], "weight_decay": 0.5, "damping": 0.7},
        {"params": [("any name", weights[2])], "max_factor_dim": 1},
        {"params": model[4].weight},  # without its bias
        {"params": biases, "lr": 0.3},
    ]


def test_groups_have_settings_of_their_own() -> None:
    """A layer's statistics are its weight's; the rest of the model is not touched."""
    torch.manual_seed(7)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(5))).double()
    like, x = copy.deepcopy(model), torch.randn(8, 4).double()
    with pytest.warns(RuntimeWarning, match="26.3% .*: 20 in Linear above max_factor_dim"):
        opt = KFAC.paper(model, params=groups_of(model), lr=0.1, likelihood="categorical")
    other, moved = KFAC.paper(like, lr=0.1, damping=0.7, likelihood="categorical"), {}
    for net, optimizer in ((like, other), (model, opt)):
        before = {name: p.detach().clone() for name, p in net.named_parameters()}
        output = net(x)
        optimizer.observe(output)
        output.softmax(1).square().sum().backward()
        optimizer.step()
        moved[net] = {n: before[n] - p.detach() for n, p in net.named_parameters()}
    for layer in (0, 1):
        weight, bias = f"{layer}.weight", f"{layer}.bias"
        close(moved[model][weight], moved[like][weight] + 0.05 * before[weight])
        close(moved[model][bias], 3 * moved[like][bias])
    close(moved[model]["2.weight"], 0.1 * model[2].weight.grad)
    assert moved[model]["4.weight"].any()
    assert not any(moved[model][name].any() for name in ("3.weight", "3.bias", "4.bias"))
    assert not model[3]._forward_hooks and model[3].weight not in opt.state
    assert "group 3: 3 parameters" in repr(opt) and "lr: 0.3" in repr(opt)
    with pytest.warns(RuntimeWarning, match="preconditioning"):
        again = KFAC.paper(model, params=groups_of(model), likelihood="categorical")
    again.load_state_dict(opt.state_dict())
    assert repr(again) == repr(opt)
    assert [group["step"] for group in again.param_groups] == [1, 1, 1, 1]
    close(again.state[model[0].weight]["momentum"][:, -1], model[0].bias.grad)


def test_a_group_may_be_empty() -> None:
    """As the biases of a model without biases."""
    layer = nn.Linear(3, 2, bias=False)
    opt = KFAC(
        layer,
        params=[{"params": layer.parameters()}, {"params": []}],
        likelihood="categorical",
    )
    opt.observe(layer(torch.randn(4, 3)))
    layer(torch.randn(4, 3)).sum().backward()
    opt.step()
    assert "stats" in opt.state[layer.weight]


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ({"params": [nn.Parameter(torch.ones(2))]}, "params must be parameters of the model"),
        ({"lr": -1.0}, "lr must be"),
        ({"damping": -1.0}, "damping must be"),
        ({"inverse": "eigenbasis"}, "inverse cannot be set for a parameter group"),
        ({"likelihood": "gaussian"}, "likelihood cannot be set for a parameter group"),
        ({"maximize": True}, "maximize cannot be set for a parameter group"),
    ],
)
def test_groups_that_do_not_fit_are_refused(group: dict[str, Any], message: str) -> None:
    model = nn.Linear(2, 3)
    with pytest.raises(ValueError, match=message):
        KFAC(model, params=[{"params": model.parameters(), **group}], likelihood="categorical")
    assert not model._forward_hooks
