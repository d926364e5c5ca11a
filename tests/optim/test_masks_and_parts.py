"""Outputs with leading dimensions, with rows that do not count, and with several parts."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from optimizers import NO_FAILURES, equal, made, statistics, tnt_and_kfac
from tolerances import FLOAT64_REORDERED
from torch import Tensor, nn

from tnt_optim import TNT, Masked
from tnt_optim.failures import FAILURES_IN_A_ROW, PreconditionerError
from tnt_optim.likelihoods import loss_at_samples, sampled_loss, stream_seed

DAILY = {"stat_interval": 1, "inverse_interval": 1, "stat_decay": 0.5}


@pytest.fixture
def fixed_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """The label of a row depends on the row alone."""
    monkeypatch.setattr("tnt_optim.likelihoods.drawn_classes", lambda z, generator: z.argmin(1))

    def dictate(name: str, value: float) -> None:
        drawn = getattr(Tensor, name)

        def fill(z: Tensor, *limits: float, generator: torch.Generator | None) -> Tensor:
            return drawn(z, *limits) if limits else z.fill_(value)

        monkeypatch.setattr(Tensor, name, fill)

    dictate("normal_", 1.0)
    dictate("uniform_", 0.5)


def close(found: list[Tensor], wanted: list[Tensor]) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert float((one - other).norm()) <= 100 * FLOAT64_REORDERED * float(other.norm())


def linear() -> nn.Linear:
    return nn.Linear(3, 4).double()


def first_statistics(
    name: str, model: nn.Module, *outputs: Callable[[], object], **settings: object
) -> list[Tensor]:
    """After one step that observes these."""
    opt = made(name, model, **DAILY, **settings)
    for output in outputs:
        opt.observe(output())
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    opt.step()
    return statistics(opt)


# ------------------------------------------------------------------ leading dimensions


@tnt_and_kfac
def test_leading_dimensions_are_rows(name: str) -> None:
    """Of a language model's logits (N, T, C), to the bit."""
    model, x = linear(), torch.randn(5, 7, 3, dtype=torch.float64)
    rows = first_statistics(name, model, lambda: model(x.flatten(0, 1)))
    assert equal(rows, first_statistics(name, model, lambda: model(x)))
    assert equal(rows, first_statistics(name, model, lambda: Masked(model(x), None)))


# ------------------------------------------------------------------ masks


def masked(likelihood: str) -> tuple[Tensor, Tensor]:
    """Inputs, and which of their outputs count."""
    lead = (6, 5) if likelihood == "categorical" else (6,)
    x = torch.randn(*lead, 3, dtype=torch.float64)
    mask = torch.rand(lead) < 0.6
    assert bool(mask.any()) and not bool(mask.all())
    return x, mask


@tnt_and_kfac
@pytest.mark.parametrize("likelihood", ["categorical", "bernoulli", "gaussian"])
def test_masked_rows_are_as_if_they_were_not_there(
    name: str, likelihood: str, fixed_draws: None
) -> None:
    model, (x, mask) = linear(), masked(likelihood)
    whole = first_statistics(name, model, lambda: Masked(model(x), mask), likelihood=likelihood)
    counted = first_statistics(name, model, lambda: model(x[mask]), likelihood=likelihood)
    assert len(whole) == len(counted) >= 2
    close(whole, counted)


@tnt_and_kfac
def test_layers_may_have_the_sequence_first(name: str, fixed_draws: None) -> None:
    """As in nn.Transformer; the mask has the order of the logits' rows."""
    model, (x, mask) = linear(), masked("categorical")
    plain = first_statistics(name, model, lambda: Masked(model(x), mask))
    first = lambda: Masked(model(x.transpose(0, 1)).transpose(0, 1), mask)  # noqa: E731
    close(first_statistics(name, model, first), plain)


class Attending(nn.Module):
    """Logits at each position, from its sequence's positions that are no padding."""

    def __init__(self, sequence_first: bool) -> None:
        super().__init__()
        self.body, self.head, self.sequence_first = nn.Linear(3, 4), nn.Linear(4, 5), sequence_first
        self.double()

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        """(N, T, 3) to (N, T, 5)."""
        if self.sequence_first:
            hidden = self.body(x.transpose(0, 1)).transpose(0, 1)
        else:
            hidden = self.body(x)
        hidden = hidden.tanh() * real.unsqueeze(2)
        return self.head(hidden + hidden.mean(1, keepdim=True))


def second_moment(rows: Tensor) -> Tensor:
    """Of rows with a 1 for the bias, not divided."""
    rows = torch.cat([rows, torch.ones_like(rows[:, :1])], 1)
    return rows.T @ rows


@pytest.mark.parametrize("shape", [(5, 7), (6, 6)])
@pytest.mark.parametrize("sequence_first", [False, True])
@pytest.mark.parametrize("likelihood", ["categorical", ("categorical",)])
def test_kfac_leaves_padding_out_and_counts_context(
    shape: tuple[int, int], sequence_first: bool, likelihood: Any, fixed_draws: None
) -> None:
    """Positions without a label count in a layer whose outputs reach the labelled ones."""
    model, x = Attending(sequence_first), torch.randn(*shape, 3, dtype=torch.float64)
    real, labelled = torch.ones(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.bool)
    real[:, 4:], labelled[:, 1:3] = False, True
    x[~real] = 1e3

    def whole() -> object:
        found = Masked(model(x, real), labelled)
        return (found,) if isinstance(likelihood, tuple) else found

    def rows() -> object:
        found = model(x, real)[labelled]
        return (found,) if isinstance(likelihood, tuple) else found

    body_g, body_a, head_g, head_a = first_statistics("kfac", model, whole, likelihood=likelihood)
    count = int(labelled.sum())
    hidden: list[Tensor] = []
    with model.head.register_forward_pre_hook(lambda _, args: hidden.append(args[0].detach())):
        model(x, real)
    close([body_a], [second_moment(x[real]) / count])
    close([head_a], [second_moment(hidden[0][labelled]) / count])
    # Divided by all positions, there: in truth the padding has no part in them.
    others = first_statistics("kfac", model, rows, likelihood=likelihood)
    close([body_g * int(real.sum()), head_g * count], [g * real.numel() for g in others[::2]])


def test_kfac_counts_all_positions_of_a_layer_without_a_gradient(fixed_draws: None) -> None:
    """As at the start, where the next layer's weights are zero."""
    model, x = Attending(False), torch.randn(5, 7, 3, dtype=torch.float64)
    nn.init.zeros_(model.head.weight)
    mask = torch.rand(5, 7) < 0.5
    output = lambda: Masked(model(x, torch.ones_like(mask)), mask)  # noqa: E731
    body_g, body_a, _, _ = first_statistics("kfac", model, output)
    assert not body_g.any()
    close([body_a], [second_moment(x.flatten(0, 1)) / int(mask.sum())])


@tnt_and_kfac
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_micro_batch_of_padding_is_left_out(name: str, place: int, fixed_draws: None) -> None:
    model = linear()
    (x, mask), (y, other) = masked("categorical"), masked("categorical")
    outputs = [lambda: Masked(model(x), mask), lambda: Masked(model(y), other)]
    wanted = first_statistics(name, model, *outputs)
    outputs.insert(place, lambda: Masked(model(x), torch.zeros_like(mask)))
    found = first_statistics(name, model, *outputs)
    close(found, wanted)


@tnt_and_kfac
def test_a_warm_start_leaves_out_batches_of_padding(name: str, fixed_draws: None) -> None:
    found = []
    for masks in ([True], [True, False], [False]):
        torch.manual_seed(2)
        model, x = linear(), torch.randn(6, 3, dtype=torch.float64)
        opt = made(name, model)
        batches = (Masked(model(x), torch.full((6,), counts)) for counts in masks)
        if masks[0]:
            opt.warm_start(batches)
            found.append(statistics(opt))
            assert opt.failures() == NO_FAILURES
        else:
            with pytest.raises(ValueError, match="at least one batch"):
                opt.warm_start(batches)
    close(*found)


@tnt_and_kfac
def test_steps_of_padding_keep_the_statistics_and_are_no_failures(name: str) -> None:
    model, (x, mask) = linear(), masked("categorical")
    opt = made(name, model, **DAILY)
    for step in range(FAILURES_IN_A_ROW + 1):
        opt.zero_grad()
        output = model(x)
        opt.observe(Masked(output, mask & (step == 0)))
        F.cross_entropy(output.flatten(0, 1), torch.randint(4, (30,))).backward()
        opt.step()
        if step == 0:
            before = statistics(opt)
    assert equal(before, statistics(opt))
    assert opt.failures() == NO_FAILURES


@tnt_and_kfac
def test_a_first_step_of_padding_is_refused(name: str) -> None:
    model, (x, mask) = linear(), masked("categorical")
    opt = made(name, model, **DAILY)
    opt.observe(Masked(model(x), torch.zeros_like(mask)))
    F.cross_entropy(model(x).flatten(0, 1), torch.randint(4, (30,))).backward()
    with pytest.raises(PreconditionerError, match="no row of the output counts"):
        opt.step()


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.float(),
        lambda m: m.float() * 0,
        lambda m: m[:, :2],
        lambda m: m.flatten(),
        lambda m: m[..., None],
        lambda m: m.tolist(),
    ],
)
def test_a_mask_that_does_not_fit_is_refused(change: Callable[[Tensor], Any]) -> None:
    model, (x, mask) = linear(), masked("categorical")
    opt = TNT.paper(model.parameters(), likelihood="categorical")
    for call in (opt.observe, lambda output: opt.warm_start([output])):
        with pytest.raises(ValueError, match=r"^mask must be bool, \(6, 5\) for likelihood 'categ"):
            call(Masked(model(x), change(mask)))
    assert not opt._observed.count and not opt.state


# ------------------------------------------------------------------ parts


PARTS = ("categorical", "gaussian")


def test_the_loss_is_the_sum_of_the_parts_each_with_its_own_draws() -> None:
    policy, value = torch.randn(8, 3).requires_grad_(), torch.randn(8).requires_grad_()
    found = loss_at_samples(PARTS, (policy, value), 5, ("step", 0, 0), set())
    draws = [torch.Generator().manual_seed(stream_seed(5, "step", 0, 0, i)) for i in range(2)]
    wanted = sampled_loss("categorical", policy, draws[0])
    wanted = wanted + sampled_loss("gaussian", value.unsqueeze(1), draws[1])
    assert float(found.detach()) == float(wanted.detach())


@tnt_and_kfac
def test_a_part_may_have_a_mask(name: str, fixed_draws: None) -> None:
    """With one for each part, an output without a counted row is left out."""
    model, mask = linear(), torch.tensor([True, False, True])
    x = torch.randn(3, 3, dtype=torch.float64)
    parts: dict = {"likelihood": ("gaussian", "gaussian")}

    def both(rows: Tensor, mask: Tensor | None) -> Callable[[], object]:
        def output() -> object:
            z = model(rows)
            return tuple(v if mask is None else Masked(v, mask) for v in (z[:, :2], z[:, 2:]))

        return output

    wanted = first_statistics(name, model, both(x[mask], None), **parts)
    nothing = torch.zeros_like(mask)
    found = first_statistics(name, model, both(x, nothing), both(x, mask), **parts)
    close(found[:1], wanted[:1])


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (lambda z: (z,), r"a part for each of \('categorical', 'gaussian'\), got 1 parts"),
        (lambda z: z, "must be a tuple for .* got Tensor"),
        (lambda z: Masked(z, z[:, 0] > 0), "must be a tuple for .* got Masked"),
        (lambda z: (z, z.detach()), "must have a graph"),
        (lambda z: (z, [z]), "must be a floating-point tensor, got list"),
        (lambda z: (z[:, 0], z), "at least two classes"),
    ],
)
def test_parts_that_do_not_fit_are_refused(
    output: Callable[[Tensor], object], message: str
) -> None:
    model = linear()
    opt = TNT.paper(model.parameters(), likelihood=PARTS)
    with pytest.raises(ValueError, match=f"^output must .*{message.removeprefix('must ')}"):
        opt.observe(output(model(torch.randn(5, 3, dtype=torch.float64))))
    assert not opt._observed.count
