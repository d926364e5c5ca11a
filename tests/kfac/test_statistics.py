"""KFAC's statistics are the factors of the exact Fisher matrix; sums, positions and triangles."""

import pytest
import torch
from drawn import close, noise
from kfac_models import held
from oracle import dense_kron
from tolerances import FLOAT64_FORMULA, SAMPLE_DEVIATIONS
from torch import Tensor, nn

from tnt_optim import KFAC
from tnt_optim.kfac.statistics import packed, packed_size, unpacked


def exact_gram(likelihood: str, logits: Tensor) -> tuple[Tensor, Tensor]:
    """E[g gᵀ] over labels, mean over rows, and the variance of an estimate from one draw a row."""
    n, c = logits.shape
    if likelihood == "categorical":
        p = logits.softmax(1)
        g = p[:, None, :] - torch.eye(c, dtype=p.dtype)  # (n, label, c)
        products = g[:, :, :, None] * g[:, :, None, :]
        first = (p[:, :, None, None] * products).sum(1)
        second = (p[:, :, None, None] * products.square()).sum(1)
    elif likelihood == "bernoulli":
        p = logits.sigmoid()
        # g = p - y: squares have mean p(1-p), fourth powers p(1-p)(1 - 3p(1-p)).
        v = p * (1 - p)
        first = torch.diag_embed(v)
        second = v[:, :, None] * v[:, None, :]
        second = second - torch.diag_embed(v.square()) + torch.diag_embed(v * (1 - 3 * v))
    else:
        first = torch.eye(c, dtype=logits.dtype).expand(n, c, c)
        second = 1 + 2 * first
    return first.mean(0), (second - first.square()).sum(0) / n**2


@pytest.mark.parametrize("inputs", ["one", "many"])
@pytest.mark.parametrize("likelihood", ["categorical", "bernoulli", "gaussian"])
def test_factors_are_those_of_the_exact_fisher(likelihood: str, inputs: str) -> None:
    """On one input the Fisher matrix is a Kronecker product exactly."""
    torch.manual_seed(5)
    layer, n = nn.Linear(3, 4).double(), 40_000
    x = noise(1, 3).expand(n, 3) if inputs == "one" else 2 * noise(n, 3)
    opt = KFAC(layer, lr=0.0, likelihood=likelihood, seed=3)
    opt.warm_start([layer(x)])
    g, a = opt.state[layer.weight]["stats"]
    exact, variance = exact_gram(likelihood, layer(x).detach())
    allowed = SAMPLE_DEVIATIONS * variance.sqrt()
    assert bool(((g - exact).abs() <= allowed + FLOAT64_FORMULA).all())
    assert float(allowed.max()) < 0.05 * float(exact.abs().max())  # so that a factor 1.1 shows
    rows = torch.cat([x, torch.ones(n, 1)], dim=1)
    close(a, rows.T @ rows / n)
    if inputs == "one" and likelihood == "categorical":
        p = layer(x[:1]).detach().softmax(1)[0]
        gradients = p - torch.eye(4, dtype=p.dtype)  # one row a label
        blocks = [torch.outer(v, rows[0]).reshape(-1) for v in gradients]
        fisher = sum(p[y] * torch.outer(v, v) for y, v in enumerate(blocks))
        close(dense_kron([exact, a]), fisher)


class Positions(nn.Module):
    """A layer on (N, positions, features), and logits for each example or each position."""

    def __init__(self, body: nn.Module, pooled: bool) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.body, self.head, self.pooled = body, nn.Linear(6, 5), pooled
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        """(N, positions, 4) to (N, 5) or (N * positions, 5)."""
        hidden = self.body(x) if isinstance(self.body, nn.Linear) else self.body(x.mT).mT
        return self.head(hidden.tanh().mean(1) if self.pooled else hidden.tanh()).reshape(-1, 5)

    def statistics(self, x: Tensor) -> list[Tensor]:
        """The statistics of both layers at their first batch."""
        opt = KFAC(self, likelihood="categorical")
        opt.warm_start([self(x)])
        return held(opt)


def test_positions_of_a_linear_layer_are_those_of_a_convolution() -> None:
    linear, convolution, x = nn.Linear(4, 6), nn.Conv1d(4, 6, 1), noise(8, 7, 4)
    convolution.weight.data = linear.weight.data[:, :, None].clone()
    convolution.bias.data = linear.bias.data.clone()
    pair = [Positions(body, pooled=True).statistics(x) for body in (linear, convolution)]
    close(*pair)


def test_positions_with_labels_of_their_own_are_examples() -> None:
    model, x = Positions(nn.Linear(4, 6), pooled=False), noise(8, 7, 4)
    close(model.statistics(x), model.statistics(x.reshape(56, 1, 4)))


# ------------------------------------------------------------------ triangles


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 8, 65])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_symmetric_matrix_is_packed_and_unpacked(size: int, dtype: torch.dtype) -> None:
    matrix = torch.randn(size, size, dtype=dtype)
    matrix = matrix + matrix.T
    flat = packed(matrix)
    assert (flat.shape, flat.dtype) == ((packed_size(size),), dtype)
    lower = matrix[torch.tril_indices(size, size).unbind()]
    assert torch.equal(flat.sort().values, lower.sort().values)
    assert torch.equal(unpacked(flat, size), matrix)
    random = unpacked(torch.randn(packed_size(size)), size)
    assert torch.equal(random, random.T)
