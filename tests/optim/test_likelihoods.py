"""Draws from every likelihood, and statistics whose expectation is the Fisher's contraction."""

import itertools
import math

import pytest
import torch
from optimizers import made, tnt_and_kfac
from oracle import contraction
from torch import Tensor, nn

from tnt_optim.likelihoods import drawn_classes, sampled_loss

likelihoods = pytest.mark.parametrize("likelihood", ["categorical", "bernoulli", "gaussian"])
ROWS, FEATURES, OUTPUTS = 3, 2, 3
Z_BOUND = 6.0  # P(|z| >= 6) = 2e-9


def inputs() -> Tensor:
    """Rows that differ, so that the average over the batch matters."""
    return torch.randn(ROWS, FEATURES, generator=torch.Generator().manual_seed(4)).double() * 2


def flat_gradient(loss: Tensor, model: nn.Module) -> Tensor:
    """The gradient with respect to all parameters, as one vector."""
    gradients = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    return torch.cat([g.reshape(-1) for g in gradients])


def enumerated_fisher(likelihood: str, model: nn.Module, x: Tensor) -> Tensor:
    """Cov of the gradient of the mean over rows of -log p(y | x), y drawn from the model.

    Rows are independent, so it is 1/N^2 times the sum of the rows' Fisher matrices: those are
    sums over every label (categorical), over all 2^outputs label vectors (Bernoulli), and
    sum_o J_o J_o^T with the output's Jacobian J (Gaussian with unit variance).
    """
    n = sum(p.numel() for p in model.parameters())
    total = torch.zeros(n, n, dtype=torch.float64)
    for row in x:
        z = model(row)
        terms: list[tuple[float, Tensor]] = []
        if likelihood == "categorical":
            log_p = z - torch.logsumexp(z, 0)
            terms = [(float(lp.detach().exp()), flat_gradient(-lp, model)) for lp in log_p]
        elif likelihood == "bernoulli":
            for labels in itertools.product([0.0, 1.0], repeat=len(z)):
                signs = torch.tensor([2 * y - 1 for y in labels], dtype=torch.float64)
                log_p = -torch.log1p(torch.exp(-signs * z)).sum()
                terms.append((float(log_p.detach().exp()), flat_gradient(-log_p, model)))
        else:
            terms = [(1.0, flat_gradient(output, model)) for output in z]
        for probability, gradient in terms:
            total += probability * torch.outer(gradient, gradient)
    return total / len(x) ** 2


@pytest.mark.parametrize("likelihood", ["bernoulli", "gaussian"])
def test_outputs_have_any_trailing_shape(likelihood: str) -> None:
    """(N, a, b): the sum over a and b, the mean over N."""
    z = torch.randn(4, 2, 3, dtype=torch.float64, requires_grad=True)
    flat = z.detach().reshape(4, 6).requires_grad_()
    loss = sampled_loss(likelihood, z, torch.Generator().manual_seed(1))
    same = sampled_loss(likelihood, flat, torch.Generator().manual_seed(1))
    assert loss.shape == ()
    assert loss.item() == pytest.approx(same.item(), rel=1e-14)


@likelihoods
def test_extreme_outputs_stay_finite(likelihood: str) -> None:
    """Saturated probabilities: the loss at a drawn label does not overflow in float32."""
    z = torch.tensor([[200.0, -200.0, 0.0], [-150.0, 3e4, 1.0]], requires_grad=True)
    loss = sampled_loss(likelihood, z, torch.Generator().manual_seed(0))
    (g,) = torch.autograd.grad(loss, z)
    assert bool(torch.isfinite(loss)) and bool(torch.isfinite(g).all())


@likelihoods
def test_draws_come_from_the_given_generator_alone(likelihood: str) -> None:
    z = torch.randn(64, 5, requires_grad=True)
    before = torch.get_rng_state()
    first, again, other = (
        torch.autograd.grad(sampled_loss(likelihood, z, torch.Generator().manual_seed(s)), z)[0]
        for s in (1, 1, 2)
    )
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize(
    ("likelihood", "micro_batches"),
    [("categorical", 1), ("bernoulli", 1), ("gaussian", 1), ("categorical", 3)],
)
def test_statistics_of_tnt_have_the_fishers_expectation(
    likelihood: str, micro_batches: int
) -> None:
    """Every step, micro-batch and warm-start batch draws anew; E[S_i] is the Fisher's contraction.

    lr = 0 keeps the model, stat_decay = 0 makes S_i one step's G^(i). The average over n
    micro-batches of the same rows has an n-th of the covariance only if their draws are
    independent. Each entry's mean over the steps, and the warm start's average over as many
    batches, are held to 6 standard errors; 26 entries in all: false alarm 5.2e-8.
    """
    torch.manual_seed(3)
    model = nn.Linear(FEATURES, OUTPUTS, bias=False).double()
    x, steps = inputs(), 1000
    schedule: dict[str, int] = {"stat_interval": 1, "inverse_interval": 100}
    opt = made("sampled", model, lr=0.0, stat_decay=0.0, likelihood=likelihood, **schedule)
    fisher = enumerated_fisher(likelihood, model, x)
    values, vectors = torch.linalg.eigh(fisher)
    seen: list[list[Tensor]] = [[], []]
    for _ in range(steps):
        output = model(x)
        for _ in range(micro_batches):
            opt.observe(output)
        model.weight.grad = torch.zeros_like(model.weight)
        opt.step()
        for i, stat in enumerate(opt.state[model.weight]["stats"]):
            seen[i].append(stat.clone())
    opt.warm_start(model(x) for _ in range(steps))
    for i, warm in enumerate(opt.state[model.weight]["stats"]):
        parts = [
            value * contraction(vectors[:, j].reshape(OUTPUTS, FEATURES), i)
            for j, value in enumerate(values)
        ]
        expected = torch.stack(parts).sum(0)
        stats = torch.stack(seen[i])
        error = stats.std(0) / math.sqrt(steps)
        assert float(((stats.mean(0) - expected / micro_batches) / error).abs().max()) < Z_BOUND
        assert micro_batches > 1 or float(((warm - expected) / error).abs().max()) < Z_BOUND


@tnt_and_kfac
def test_a_likelihood_function_draws_from_a_stream_of_seed_step_and_micro_batch(name: str) -> None:
    """torch's global generator is seeded for it and put back."""

    def draws(seed: int) -> list[float]:
        torch.manual_seed(int(torch.randint(1000, ())))  # the global seed does not matter
        model, seen = nn.Linear(3, 2), []

        def likelihood(output: Tensor) -> Tensor:
            seen.append(float(torch.rand(())))
            return output.square().sum()

        opt = made(name, model, likelihood=likelihood, stat_interval=1, seed=seed)
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_classes_of_probability_zero_are_never_drawn(dtype: torch.dtype) -> None:
    """Also the last one, and with numbers drawn as near to 1 as the dtype has them."""
    logits = torch.tensor([-math.inf, 0.3, -math.inf, 1.0, -math.inf], dtype=dtype)
    rows = logits.expand(200_000, 5).contiguous()
    drawn = drawn_classes(rows, torch.Generator().manual_seed(0))
    counts = torch.bincount(drawn, minlength=5)
    assert counts[[0, 2, 4]].tolist() == [0, 0, 0]
    # |z| >= 6: 2e-9.
    share = float(logits[[1, 3]].softmax(0)[0])
    assert abs(int(counts[1]) - 200_000 * share) <= 6 * math.sqrt(200_000 * share * (1 - share))
    assert drawn_classes(torch.full((2, 3), math.nan), torch.Generator()).tolist() == [2, 2]
