"""Which parameters TNT takes, and how: groups, frozen ones, views, dtypes, and what repr says."""

import copy
import io
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from oracle import DenseTNT
from tolerances import BFLOAT16_SPACING, FLOAT32_FORMULA, FLOAT64_REORDERED, FLOAT64_TRAJECTORY
from torch import Tensor, nn

from tnt_optim import TNT

if TYPE_CHECKING:
    from conftest import DirectGradients, FixedLabels

    Direct = Callable[[Sequence[Tensor]], DirectGradients]


def assert_close_to(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    """Within `tolerance`, relative to the norm of what is expected."""
    assert actual.shape == expected.shape
    error = float((actual.detach().double() - expected.detach().double()).norm())
    assert error <= tolerance * float(expected.detach().double().norm())


def test_groups_with_their_own_values_are_separate_optimizers(fixed_labels: "FixedLabels") -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 4)).double()
    twin = copy.deepcopy(model)
    values: list[dict[str, Any]] = [
        {"lr": 1e-3, "damping": 0.05, "stat_interval": 1, "inverse_interval": 4, "graft": "adam"},
        {
            "lr": 3e-4, "damping": 0.2, "momentum": 0.5, "stat_decay": 0.8, "weight_decay": 0.3,
            "stat_interval": 2, "inverse_interval": 3, "max_factor_dim": 5,
            "relative_damping": True,
        },
    ]  # fmt: skip
    groups = [{"params": model[i].parameters(), **v} for i, v in zip((0, 2), values, strict=True)]
    opt = TNT(groups, likelihood=fixed_labels)
    separate = [
        TNT(twin[i].parameters(), likelihood=fixed_labels, **v)
        for i, v in zip((0, 2), values, strict=True)
    ]
    for _ in range(9):
        x, y, fixed_labels.current = torch.randn(8, 3).double(), *torch.randint(4, (2, 8))
        for net, optimizers in ((model, [opt]), (twin, separate)):
            net.zero_grad()
            output = net(x)
            for optimizer in optimizers:
                optimizer.observe(output)
            nn.functional.cross_entropy(output, y).backward()
            for optimizer in optimizers:
                optimizer.step()
        for a, b in zip(model.parameters(), twin.parameters(), strict=True):
            assert_close_to(a, b, FLOAT64_REORDERED)


def test_frozen_parameter_is_left_alone_and_caught_up_when_unfrozen(direct: "Direct") -> None:
    """Unfrozen at t = 4 (T1 = 3): its statistics are due at once, and so is its inverse."""
    shapes = [(3, 4), (5,)]
    settings: dict[str, Any] = {"lr": 0.01, "stat_interval": 3, "inverse_interval": 5}
    params = [nn.Parameter(torch.randn(s, dtype=torch.float64)) for s in shapes]
    params[1].requires_grad_(False)
    mirrors = [p.detach().clone() for p in params]
    harness = direct(params)
    opt = TNT(params, damping=0.1, likelihood=harness.likelihood, **settings)
    oracle = DenseTNT(mirrors, damping=0.1, **settings)
    for t in range(16):
        if t == 4:
            assert torch.equal(params[1], mirrors[1]) and params[1] not in opt.state
            params[1].requires_grad_(True)
        grads, sampled = ([torch.randn(s).double() for s in shapes] for _ in range(2))
        frozen = t < 4
        harness.iterate(opt, [grads[0], None if frozen else grads[1]], [sampled[0], sampled[1]])
        oracle.step(
            [grads[0], None if frozen else grads[1]], [sampled[0], None if frozen else sampled[1]]
        )
        for p, mirror in zip(params, mirrors, strict=True):
            assert_close_to(p, mirror, FLOAT64_TRAJECTORY)


def test_parameter_without_gradient_keeps_still(direct: "Direct") -> None:
    """Neither moved, nor decayed, nor its momentum touched, while its gradient is None."""
    params = [nn.Parameter(torch.randn(s, dtype=torch.float64)) for s in [(3, 4), (5,)]]
    mirrors, harness = [p.detach().clone() for p in params], direct(params)
    settings: dict[str, Any] = {
        "lr": 0.01,
        "weight_decay": 0.5,
        "stat_interval": 1,
        "inverse_interval": 1,
    }
    opt = TNT(params, damping=0.1, likelihood=harness.likelihood, **settings)
    oracle = DenseTNT(mirrors, damping=0.1, **settings)
    for t in range(8):
        grads: list[Tensor | None] = [torch.randn_like(p) for p in params]
        sampled: list[Tensor | None] = [torch.randn_like(p) for p in params]
        if t % 3 == 1:
            grads[1] = sampled[1] = None
        still = params[1].detach().clone()
        harness.iterate(opt, grads, sampled)
        oracle.step(grads, sampled)
        assert torch.equal(still, params[1]) == (t % 3 == 1)
        for p, mirror in zip(params, mirrors, strict=True):
            assert_close_to(p, mirror, FLOAT64_TRAJECTORY)


def test_modes_of_a_group_review_its_parameters(direct: "Direct") -> None:
    p = nn.Parameter(torch.randn(6, 5, dtype=torch.float64))
    mirror, harness = p.detach().clone(), direct([p])
    group = {"params": [p], "modes": lambda shape: (2, shape[0] // 2, shape[1])}
    opt = TNT([group], lr=0.01, stat_interval=1, likelihood=harness.likelihood)
    oracle = DenseTNT(
        [mirror], lr=0.01, damping=0.01, inverse_interval=100, mode_shapes=[(2, 3, 5)]
    )
    for _ in range(5):
        g, s = torch.randn(6, 5).double(), torch.randn(6, 5).double()
        harness.iterate(opt, [g], [s])
        oracle.step([g], [s])
        assert_close_to(p, mirror, FLOAT64_TRAJECTORY)


def test_bfloat16_parameters_keep_float32_state(direct: "Direct") -> None:
    """Each step is the oracle's, rounded to bfloat16 once; checkpoints do not round the state."""
    shapes = [(9, 7), (4, 3, 3, 3), (6,), ()]
    params = [nn.Parameter(torch.randn(s).bfloat16()) for s in shapes]
    mirrors, harness = [p.detach().double() for p in params], direct(params)
    settings: dict[str, Any] = {
        "lr": 0.3,
        "damping": 0.5,
        "stat_interval": 2,
        "inverse_interval": 3,
    }
    opt = TNT(params, likelihood=harness.likelihood, **settings)
    oracle = DenseTNT(mirrors, **settings)
    for _ in range(8):
        grads, sampled = ([torch.randn(s).bfloat16() for s in shapes] for _ in range(2))
        for p, mirror in zip(params, mirrors, strict=True):
            mirror.copy_(p.detach())  # the gradients do not depend on it: no drift in the rest
        harness.iterate(opt, list(grads), list(sampled))
        oracle.step(list(grads), list(sampled))
        for p, mirror, block in zip(params, mirrors, oracle.blocks, strict=True):
            assert p.dtype == torch.bfloat16
            error = (p.detach().double() - mirror.bfloat16().double()).abs()
            assert bool((error <= BFLOAT16_SPACING * mirror.abs() + 1e-6).all())
            state = opt.state[p]
            assert all(
                x.dtype == torch.float32
                for x in [state["momentum"], *state["stats"], *state["factors"]]
            )
            assert_close_to(state["momentum"].reshape(-1), block.momentum, FLOAT32_FORMULA)
            for s, expected in zip(state["stats"], block.stats or [], strict=True):
                assert_close_to(s, expected, FLOAT32_FORMULA)
    twins = [nn.Parameter(p.detach().clone()) for p in params]
    fresh = TNT(twins, likelihood=harness.likelihood, **settings)
    buffer = io.BytesIO()
    torch.save(opt.state_dict(), buffer)
    buffer.seek(0)
    fresh.load_state_dict(torch.load(buffer, weights_only=True))
    for p, q in zip(params, twins, strict=True):
        assert torch.equal(opt.state[p]["momentum"], fresh.state[q]["momentum"])
        assert all(map(torch.equal, opt.state[p]["factors"], fresh.state[q]["factors"]))
        assert fresh.state[q]["momentum"].dtype == torch.float32


def test_float64_parameters_keep_float64_state(direct: "Direct") -> None:
    p = nn.Parameter(torch.randn(4, 3, dtype=torch.float64))
    harness = direct([p])
    opt = TNT([p], likelihood=harness.likelihood)
    for _ in range(2):
        harness.iterate(opt, [torch.randn_like(p)], [torch.randn_like(p)])
        state = opt.state[p]
        tensors = [state["momentum"], *state["stats"], *state["factors"]]
        assert all(x.dtype == torch.float64 for x in tensors)


def test_repr_names_the_class_the_settings_and_the_parameters() -> None:
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 5))
    opt = TNT(
        [
            {"params": model[0].parameters(), "lr": 0.0123, "damping": 0.456},
            {"params": model[1:].parameters(), "stat_interval": 17, "graft": "adam"},
        ]
    )
    text = repr(opt)
    for wanted in ("TNT", "0.0123", "0.456", "17", "adam", "inverse_interval", "max_factor_dim"):
        assert wanted in text
    assert str(len(list(model[1:].parameters()))) in text
