"""Bad input, failures and degenerate statistics: what TNT refuses, survives and reports."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pytest
import torch
from drawn import close, noise, raising, weight
from oracle import contraction, covariances
from torch import Tensor, nn

from tnt_optim import TNT

if TYPE_CHECKING:
    from conftest import DirectGradients, FixedLabels, Snapshot

    Direct = Callable[[Sequence[Tensor]], DirectGradients]
    TakeSnapshot = Callable[..., Snapshot]

NAN = math.nan
BAD_SETTINGS: list[tuple[str, Any]] = [
    *[("lr", bad) for bad in (-1e-3, NAN, math.inf)],
    *[("damping", bad) for bad in (-0.1, NAN, math.inf)],
    *[("weight_decay", bad) for bad in (-1.0, NAN, math.inf)],
    *[("momentum", bad) for bad in (-0.1, 1.0, NAN)],
    *[("stat_decay", bad) for bad in (-0.1, 1.0, NAN)],
    *[("stat_interval", bad) for bad in (0, -1, 1.5)],
    *[("inverse_interval", bad) for bad in (0, -1, 2.5)],
    *[("max_factor_dim", bad) for bad in (0, -3)],
    ("graft", "lion"),
]


# ------------------------------------------------------------------ arguments


@pytest.mark.parametrize(("name", "bad"), BAD_SETTINGS)
def test_bad_setting_is_refused_by_name(name: str, bad: Any) -> None:
    with pytest.raises((ValueError, TypeError), match=name):
        TNT([weight(2, 3)], **{name: bad})
    with pytest.raises((ValueError, TypeError), match=name):
        TNT([{"params": [weight(2, 3)], name: bad}])
    opt = TNT([weight(2, 3)])
    with pytest.raises((ValueError, TypeError), match=name):
        opt.add_param_group({"params": [weight(4)], name: bad})
    assert len(opt.param_groups) == 1


@pytest.mark.parametrize("name", ["likelihood", "fisher", "seed"])
def test_what_all_groups_share_is_refused_in_one(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} cannot be set for a parameter group"):
        TNT([{"params": [weight(2, 3)], name: "bernoulli"}])


@pytest.mark.parametrize(
    ("name", "bad"),
    [("lr", -1.0), ("lr", torch.tensor(1)), ("stat_interval", 0), ("damping", math.inf)],
)
def test_setting_that_goes_bad_later_changes_nothing(
    name: str, bad: Any, direct: "Direct", snapshot: "TakeSnapshot"
) -> None:
    p, q = weight(2, 3), weight(4)
    harness = direct([p, q])
    opt = TNT([{"params": [p]}, {"params": [q]}], likelihood=harness.likelihood)
    harness.iterate(opt, [noise(2, 3), noise(4)], [noise(2, 3), noise(4)])
    good, opt.param_groups[1][name] = opt.param_groups[1][name], bad
    before = snapshot([p, q], opt)
    with pytest.raises(ValueError, match=name):
        opt.step()
    before.assert_unchanged()
    opt.param_groups[1][name] = good
    opt.step()
    assert [group["step"] for group in opt.param_groups] == [2, 2]


@pytest.mark.parametrize(
    "edge",
    [{"lr": 0.0}, {"damping": 0.0}, {"momentum": 0.0}, {"stat_decay": 0.0}, {"max_factor_dim": 1}],
)
def test_the_ends_of_the_allowed_ranges_are_allowed(edge: dict[str, Any]) -> None:
    opt = TNT([weight(2, 3)], **edge)
    assert edge.items() <= opt.param_groups[0].items()


def test_unknown_likelihood_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="likelihood") as caught:
        TNT([weight(2)], likelihood="poisson")
    assert all(name in str(caught.value) for name in ("categorical", "bernoulli", "gaussian"))


def test_unknown_fisher_is_refused() -> None:
    with pytest.raises(ValueError, match="fisher"):
        TNT([weight(2)], fisher="exact")


def test_modes_with_another_product_are_refused() -> None:
    with pytest.raises(ValueError, match="modes"):
        TNT([{"params": [weight(4, 6)], "modes": lambda shape: (4, 5)}])


def test_complex_and_sparse_parameters_are_refused() -> None:
    for bad in (torch.zeros(2, 2, dtype=torch.complex64), torch.eye(2).to_sparse()):
        with pytest.raises((ValueError, TypeError), match="complex|sparse"):
            TNT([nn.Parameter(bad)])


def test_sparse_gradient_is_refused(direct: "Direct", snapshot: "TakeSnapshot") -> None:
    p = weight(4, 3)
    opt = TNT([p], likelihood=(harness := direct([p])).likelihood)
    harness.iterate(opt, [noise(4, 3)], [noise(4, 3)])
    p.grad = noise(4, 3).to_sparse()
    values, state = p.detach().clone(), opt.state[p]["momentum"].clone()
    with raising((RuntimeError, ValueError, TypeError), "sparse"):
        opt.step()
    assert torch.equal(p, values) and torch.equal(opt.state[p]["momentum"], state)


# ------------------------------------------------------------------ observe


def test_observe_refuses_an_output_without_a_graph() -> None:
    model = nn.Linear(3, 4)
    opt = TNT(model.parameters())
    with pytest.raises((ValueError, RuntimeError), match="graph|grad"):
        opt.observe(model(torch.randn(2, 3)).detach())


def test_observe_refuses_another_models_logits() -> None:
    opt = TNT(nn.Linear(3, 4).parameters())
    with pytest.raises((ValueError, RuntimeError), match="parameter"):
        opt.observe(nn.Linear(3, 4)(torch.randn(2, 3)))


@pytest.mark.parametrize(
    ("likelihood", "shape"),
    [
        ("categorical", (4,)),
        ("categorical", (2, 3, 4)),
        ("bernoulli", (4,)),
        ("gaussian", (4,)),
        ("gaussian", ()),
    ],
)
def test_observe_refuses_wrong_dimensions(likelihood: str, shape: tuple[int, ...]) -> None:
    p = nn.Parameter(torch.randn(shape))
    opt = TNT([p], likelihood=likelihood)
    with pytest.raises(ValueError, match="output|dim|shape"):
        opt.observe(p * 1.0)


def test_observe_refuses_a_likelihood_that_is_no_scalar() -> None:
    p = weight(2, 3)
    opt = TNT([p], likelihood=lambda output: output * 2.0)
    with pytest.raises((ValueError, TypeError, RuntimeError), match="likelihood|scalar"):
        opt.observe(p * 1.0)


def test_callable_likelihood_draws_from_a_generator_keyed_on_seed_step_and_micro_batch() -> None:
    def draws(seed: int) -> list[float]:
        torch.manual_seed(int(torch.randint(1000, ())))  # the global seed does not matter
        p, seen = weight(2, 3), []

        def likelihood(output: Tensor) -> Tensor:
            seen.append(float(torch.rand(())))
            return output.square().sum()

        opt = TNT([p], likelihood=likelihood, stat_interval=1, seed=seed)
        for _ in range(2):
            for _ in range(2):
                before = torch.get_rng_state()
                opt.observe(p * 1.0)
                assert torch.equal(torch.get_rng_state(), before)
            p.grad = noise(2, 3)
            opt.step()
        return seen

    first, again, other = draws(0), draws(0), draws(1)
    assert first == again
    assert len(set(first + other)) == 8


def test_step_before_any_statistic_says_what_to_do(snapshot: "TakeSnapshot") -> None:
    p = weight(3, 4)
    opt = TNT([p])
    p.grad = noise(3, 4)
    before = snapshot([p], opt)
    with raising(RuntimeError, "observe.*warm_start|warm_start.*observe"):
        opt.step()
    before.assert_unchanged()


def test_forgotten_observe_warns_once_and_keeps_the_statistics(direct: "Direct") -> None:
    p = weight(3, 4)
    harness = direct([p])
    opt = TNT([p], stat_interval=1, inverse_interval=1, likelihood=harness.likelihood)
    harness.iterate(opt, [noise(3, 4)], [noise(3, 4)])
    stats = [s.clone() for s in opt.state[p]["stats"]]
    with pytest.warns(RuntimeWarning, match="observe"):
        harness.iterate(opt, [noise(3, 4)])
    before = p.detach().clone()
    harness.iterate(opt, [noise(3, 4)])  # a second warning would be an error
    assert not torch.equal(before, p)
    assert all(torch.equal(a, b) for a, b in zip(stats, opt.state[p]["stats"], strict=True))


# ------------------------------------------------------------------ warm start


def test_warm_start_is_the_plain_average(direct: "Direct") -> None:
    p = weight(3, 4)
    harness = direct([p])
    opt = TNT([p], damping=0.1, stat_decay=0.5, likelihood=harness.likelihood)
    gradients = [noise(3, 4) for _ in range(4)]

    def outputs() -> Iterator[Tensor]:
        for g in gradients:
            harness.sampled = [g]
            yield harness.output()

    opt.warm_start(outputs())
    assert p.grad is None
    average = [torch.stack([contraction(g, i) for g in gradients]).mean(0) for i in range(2)]
    for i, (u, s) in enumerate(zip(covariances(average)[0], average, strict=True)):
        close(opt.state[p]["stats"][i], s)
        close(opt.state[p]["factors"][i], torch.linalg.inv(u + 0.1 * torch.eye(len(u)).double()))
    extra = noise(3, 4)
    harness.iterate(opt, [noise(3, 4)], [extra])
    for i in range(2):
        close(opt.state[p]["stats"][i], 0.5 * average[i] + 0.5 * contraction(extra, i))


def test_empty_warm_start_is_refused(snapshot: "TakeSnapshot") -> None:
    p = weight(3, 4)
    opt = TNT([p])
    before = snapshot([p], opt)
    with pytest.raises(ValueError, match="warm_start|outputs"):
        opt.warm_start(iter(()))
    before.assert_unchanged()


def test_warm_start_restores_the_buffers_of_a_given_model() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    opt = TNT(model.parameters())
    before = {name: b.clone() for name, b in model.named_buffers()}
    opt.warm_start((model(torch.randn(8, 3)) for _ in range(3)), model=model)
    assert all(torch.equal(b, before[name]) for name, b in model.named_buffers())
    TNT(model.parameters()).warm_start(model(torch.randn(8, 3)) for _ in range(3))
    assert int(model[1].num_batches_tracked) == 3


def test_warm_start_that_raises_midway_changes_nothing(snapshot: "TakeSnapshot") -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    opt = TNT(model.parameters())
    params = list(model.parameters())
    before, buffers = snapshot(params, opt), [b.clone() for b in model.buffers()]

    def outputs() -> Iterator[Tensor]:
        yield model(torch.randn(8, 3))
        raise KeyError("the data set is broken")

    with pytest.raises(KeyError, match="broken"):
        opt.warm_start(outputs(), model=model)
    before.assert_unchanged()
    assert all(torch.equal(a, b) for a, b in zip(buffers, model.buffers(), strict=True))
    for p in params:
        p.grad = torch.randn_like(p)
    with raising(RuntimeError, "observe"):
        opt.step()


def test_empirical_observe_does_nothing(snapshot: "TakeSnapshot") -> None:
    model = nn.Linear(3, 4)
    opt = TNT(model.parameters(), fisher="empirical")
    before = snapshot(model.parameters(), opt)
    output = model(torch.randn(2, 3))
    calls: list[Tensor] = []
    output.register_hook(calls.append)
    opt.observe(output)
    assert not calls
    before.assert_unchanged()


# ------------------------------------------------------------------ degenerate statistics


@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("shape", [(5,), (3, 4), (3, 2, 3, 3)], ids=str)
def test_zero_statistics_give_a_multiple_of_the_identity(
    direct: "Direct", shape: tuple[int, ...], relative: bool
) -> None:
    p, g, damping = weight(*shape), noise(*shape), 0.1
    start, harness = p.detach().clone(), direct([p])
    opt = TNT(
        [p],
        lr=0.5,
        damping=damping,
        relative_damping=relative,
        max_factor_dim=3,
        likelihood=harness.likelihood,
    )
    harness.iterate(opt, [g], [torch.zeros(shape, dtype=torch.float64)])
    scale = 1.0 if relative else 1 / damping
    for factor in opt.state[p]["factors"]:
        dense = factor if factor.dim() == 2 else torch.diag(factor)
        close(dense, scale * torch.eye(len(dense), dtype=torch.float64))
    close(start - p.detach(), 0.5 * scale ** min(len(shape), 3) * g)


@pytest.mark.parametrize("graft", [None, "adam", "sgd"])
def test_zero_gradients_never_give_nan(direct: "Direct", graft: str | None) -> None:
    p = weight(3, 4)
    start, zero, harness = p.detach().clone(), torch.zeros(3, 4).double(), direct([p])
    opt = TNT([p], graft=graft, likelihood=harness.likelihood)
    for _ in range(3):
        harness.iterate(opt, [zero], [zero])
    assert torch.equal(p, start)


def test_statistics_and_inverses_are_symmetric_to_the_bit(direct: "Direct") -> None:
    p = nn.Parameter(torch.randn(65, 9, 3, 3))
    harness = direct([p])
    opt = TNT([p], stat_interval=1, inverse_interval=1, likelihood=harness.likelihood)
    for _ in range(3):
        harness.iterate(opt, [torch.randn_like(p)], [torch.randn_like(p)])
    for matrix in opt.state[p]["stats"] + opt.state[p]["factors"]:
        assert matrix.dtype == torch.float32
        assert torch.equal(matrix, matrix.T)


def test_user_gradients_are_left_alone(fixed_labels: "FixedLabels") -> None:
    model = nn.Linear(3, 4)
    opt = TNT(model.parameters(), likelihood=fixed_labels, weight_decay=0.1)
    fixed_labels.current = torch.tensor([0, 3, 1])
    output = model(torch.randn(3, 3))
    opt.observe(output)
    assert all(p.grad is None for p in model.parameters())
    output.square().sum().backward()
    grads = [p.grad.clone() for p in model.parameters()]
    opt.step()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), grads, strict=True))


def test_looking_at_a_state_that_is_not_there_yet_is_harmless(direct: "Direct") -> None:
    """`opt.state` is a defaultdict: reading opt.state[p] leaves an empty entry behind."""
    p, q = weight(3, 4), weight(5)
    q.requires_grad_(False)
    harness = direct([p, q])
    opt = TNT([p, q], stat_interval=1, inverse_interval=1, likelihood=harness.likelihood)
    for _ in range(2):
        assert not opt.state[q]
        harness.iterate(opt, [noise(3, 4), None], [noise(3, 4), None])
    opt.load_state_dict(opt.state_dict())
    q.requires_grad_(True)
    before = q.detach().clone()
    harness.iterate(opt, [noise(3, 4), noise(5)], [noise(3, 4), noise(5)])
    assert not torch.equal(q, before)
