"""Outputs with leading dimensions, with rows that do not count, and with several parts."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from optimizers import equal, made, statistics, through_a_file, tnt_and_kfac
from tolerances import FLOAT64_REORDERED
from torch import Tensor, nn

from tnt_optim import TNT, Masked
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
    """For KFAC in the gradients' part: the inputs of padding are inputs."""
    model, (x, mask) = linear(), masked(likelihood)
    whole = first_statistics(name, model, lambda: Masked(model(x), mask), likelihood=likelihood)
    counted = first_statistics(name, model, lambda: model(x[mask]), likelihood=likelihood)
    assert len(whole) == len(counted) >= 2
    close(whole[:1], counted[:1])
    if name == "sampled":
        close(whole, counted)


@tnt_and_kfac
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_micro_batch_of_padding_is_left_out(name: str, place: int, fixed_draws: None) -> None:
    model = linear()
    (x, mask), (y, other) = masked("categorical"), masked("categorical")
    outputs = [lambda: Masked(model(x), mask), lambda: Masked(model(y), other)]
    wanted = first_statistics(name, model, *outputs)
    outputs.insert(place, lambda: Masked(model(x), torch.zeros_like(mask)))
    found = first_statistics(name, model, *outputs)
    close(found[:1], wanted[:1])


@tnt_and_kfac
def test_a_step_of_padding_keeps_the_statistics(name: str) -> None:
    model, (x, mask) = linear(), masked("categorical")
    opt = made(name, model, **DAILY)
    for step in range(2):
        opt.zero_grad()
        output = model(x)
        opt.observe(Masked(output, mask & (step == 0)))
        F.cross_entropy(output.flatten(0, 1), torch.randint(4, (30,))).backward()
        if step == 0:
            opt.step()
            before = statistics(opt)
        else:
            with pytest.warns(RuntimeWarning, match="not refreshed"):
                opt.step()
    assert equal(before, statistics(opt))
    assert opt.failures()["skipped_statistics"] == 1


@pytest.mark.parametrize(
    "change",
    [lambda m: m.float(), lambda m: m[:, :2], lambda m: m.flatten(), lambda m: m[..., None]],
)
def test_a_mask_that_does_not_fit_is_refused(change: Callable[[Tensor], Tensor]) -> None:
    model, (x, mask) = linear(), masked("categorical")
    opt = TNT.paper(model.parameters())
    with pytest.raises(ValueError, match=r"^mask must be bool, \(6, 5\) for likelihood 'categ"):
        opt.observe(Masked(model(x), change(mask)))
    assert not opt._observed.count


@tnt_and_kfac
def test_a_warm_start_takes_masks(name: str, fixed_draws: None) -> None:
    model, (x, mask) = linear(), masked("categorical")
    opt = made(name, model)
    wanted = first_statistics(name, model, lambda: model(x[mask]))
    opt.warm_start(Masked(model(x), mask) for _ in range(2))
    close(statistics(opt)[:1], wanted[:1])


@tnt_and_kfac
def test_attach_takes_masks(name: str, fixed_draws: None) -> None:
    model, (x, mask) = linear(), masked("categorical")
    opt = made(name, model)
    wanted = first_statistics(name, model, lambda: model(x[mask]))
    opt.attach(model, output=lambda out: Masked(out, mask))
    F.cross_entropy(model(x)[mask], torch.zeros(int(mask.sum()), dtype=torch.int64)).backward()
    opt.step()
    close(statistics(opt)[:1], wanted[:1])


# ------------------------------------------------------------------ parts


class PolicyAndValue(nn.Module):
    """Logits (N, 3) and a value for each example."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 5)
        self.policy, self.value = nn.Linear(5, 3), nn.Linear(5, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Both."""
        hidden = self.body(x).tanh()
        return self.policy(hidden), self.value(hidden).squeeze(1)


PARTS = ("categorical", "gaussian")


def test_the_loss_is_the_sum_of_the_parts_each_with_its_own_draws() -> None:
    policy, value = PolicyAndValue()(torch.randn(8, 3))
    found = loss_at_samples(PARTS, (policy, value), 5, ("step", 0, 0), set())
    draws = [torch.Generator().manual_seed(stream_seed(5, "step", 0, 0, i)) for i in range(2)]
    wanted = sampled_loss("categorical", policy, draws[0])
    wanted = wanted + sampled_loss("gaussian", value.unsqueeze(1), draws[1])
    assert float(found.detach()) == float(wanted.detach())


@tnt_and_kfac
def test_a_policy_and_a_value_are_trained_and_resumed(name: str) -> None:
    """The composite is in no way part of the state that is saved."""
    model = PolicyAndValue()
    opt = made(name, model, likelihood=PARTS)
    before = [p.detach().clone() for p in model.parameters()]
    for _ in range(3):
        opt.zero_grad()
        policy, value = model(torch.randn(8, 3))
        opt.observe((policy, value))
        loss = F.cross_entropy(policy, torch.randint(3, (8,))) + F.mse_loss(value, torch.zeros(8))
        loss.backward()
        opt.step()
        opt.load_state_dict(through_a_file(opt.state_dict()))
    assert not any(map(torch.equal, before, model.parameters()))
    assert all(s.any() for s in statistics(opt))


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


@pytest.mark.parametrize(
    "wrong", ["poisson", (), ("categorical", "poisson"), ["categorical"], (None,)]
)
def test_unknown_likelihoods_are_refused(wrong: object) -> None:
    known = "'categorical', 'bernoulli', 'gaussian'"
    message = f"^likelihood must be {known}, a tuple of these or a function, got"
    with pytest.raises(ValueError, match=message):
        TNT.paper(linear().parameters(), likelihood=wrong)  # type: ignore[arg-type]
