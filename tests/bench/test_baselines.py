"""Baselines of the benchmarks, on inputs that small parameter sets do not have."""

import torch
from torch import nn

from bench.baselines import _norms
from bench.test_steps import PLAIN, _muon


def test_the_norm_of_a_large_tensor() -> None:
    # As large as an embedding. With PyTorch 2.13 on AMD one dot is off by 3e-4.
    tensors = [torch.rand(38_000_000, generator=torch.Generator().manual_seed(0)), torch.ones(3)]
    norms = _norms(tensors)
    expected = [float(tensor.double().norm()) for tensor in tensors]
    torch.testing.assert_close(norms.tolist(), expected, rtol=1e-5, atol=0)


def test_muon_without_vectors() -> None:
    matrix = nn.Parameter(torch.eye(4))
    matrix.grad = torch.ones(4, 4)
    _muon([matrix], PLAIN)()
    assert not torch.equal(matrix.detach(), torch.eye(4))
