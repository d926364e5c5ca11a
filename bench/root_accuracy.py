"""The accuracy of inverse_root in float32, next to the coupled Newton iteration's.
Run it with ``python -m bench.root_accuracy``.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tnt_kernels import inverse_root, reference

CONDITIONS, ROOTS = (1e2, 1e4, 1e6, 1e8), (2, 4, 6)


def statistic(n: int, condition: float) -> Tensor:
    """A random float32 matrix with eigenvalues from 1 to 1 / condition, uniform in logarithm."""
    draws = torch.randn(n, n, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    basis = torch.linalg.qr(draws).Q
    values = condition ** -torch.linspace(0, 1, n, dtype=torch.float64)
    matrix = ((basis * values) @ basis.mT).float()
    symmetric: Tensor = matrix.tril() + matrix.tril(-1).mT
    return symmetric


def errors(stat: Tensor, roots: Sequence[int]) -> list[tuple[str, str]]:
    """For each root, Newton's relative error and the operator's (Frobenius), undamped."""
    values, vectors = torch.linalg.eigh(stat.double())
    found = []
    for root in roots:
        exact = (vectors * values ** (-1 / root)) @ vectors.mT
        pair = []
        for function in (reference.inverse_root, inverse_root):
            ((factor,),), info = function([[stat]], 0.0, root)
            error = float((factor - exact).norm() / exact.norm())
            pair.append("fails" if int(info) else f"{error:.0e}")
        found.append((pair[0], pair[1]))
    return found


def table(sizes: Sequence[int]) -> str:
    """Rows of Markdown: a size and a condition, then for each root Newton's error, ours."""
    lines = ["| d | condition | " + " | ".join(f"p = {p}" for p in ROOTS) + " |"]
    lines.append("|---" * (2 + len(ROOTS)) + "|")
    for n in sizes:
        for condition in CONDITIONS:
            pairs = errors(statistic(n, condition), ROOTS)
            cells = [f"{old}, {new}" for old, new in pairs]
            lines.append(f"| {n} | {condition:.0e} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    with torch.no_grad():
        print(table((30, 250, 1000)))
