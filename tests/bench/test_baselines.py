"""The operators in plain torch, where torch itself is inaccurate."""

import torch

from bench.baselines import _norms


def test_the_norm_of_a_large_tensor() -> None:
    # As large as an embedding. With PyTorch 2.13 on AMD one dot is off by 3e-4.
    tensors = [torch.rand(38_000_000, generator=torch.Generator().manual_seed(0)), torch.ones(3)]
    norms = _norms(tensors)
    expected = [float(tensor.double().norm()) for tensor in tensors]
    torch.testing.assert_close(norms.tolist(), expected, rtol=1e-5, atol=0)
