"""TNT with dense Kronecker products, in float64: the tests compare the packages with it.

Written from Ren & Goldfarb 2021 alone, before reading the packages. It shares no code with
`tnt_kernels` or `tnt_optim`, and follows the paper's definitions literally. It is slow: a parameter
with n entries costs an n x n matrix and a dense solve per step.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def vec(a: Tensor) -> Tensor:
    """The vectorization of appendix A, recursively: the vec of a's first-mode slices, stacked."""
    if a.dim() == 1:
        return a
    return torch.cat([vec(a[j]) for j in range(a.shape[0])])


def unfolding(a: Tensor, i: int) -> Tensor:
    """mat_i(a): row j is the vec of the slice whose i-th index is j. i counts from 0."""
    if a.dim() == 1:
        return torch.stack([a[j].reshape(1) for j in range(a.shape[0])])
    return torch.stack([vec(a.select(i, j)) for j in range(a.shape[i])])


def contraction(g: Tensor, i: int) -> Tensor:
    """G^(i) = mat_i(G) mat_i(G)^T, a (d_i, d_i) matrix."""
    matrix = unfolding(g, i)
    return matrix @ matrix.T


def mode_product(a: Tensor, u: Tensor, i: int) -> Tensor:
    """The mode product a x_i u by definition: B[.., r, ..] = sum_c a[.., c, ..] u[r, c]."""
    rows = []
    for r in range(u.shape[0]):
        total = torch.zeros_like(a.select(i, 0))
        for c in range(u.shape[1]):
            total = total + a.select(i, c) * u[r, c]
        rows.append(total)
    return torch.stack(rows, dim=i)


def dense_kron(matrices: Sequence[Tensor]) -> Tensor:
    """U_1 kron ... kron U_k: block (p, q) of X kron Y is X[p, q] Y."""
    product = matrices[0]
    for matrix in matrices[1:]:
        blocks = [
            torch.cat([product[p, q] * matrix for q in range(product.shape[1])], dim=1)
            for p in range(product.shape[0])
        ]
        product = torch.cat(blocks, dim=0)
    return product


def covariances(stats: Sequence[Tensor]) -> tuple[list[Tensor], float]:
    """Eq. 13: the U_i from the E[G^(i)] (square matrices, also for a diagonal mode), and c.

    c = (tr S_1 / prod d)^(1/k), U_i = S_i / (c^(k-1) prod_{j != i} d_j); all are 0 if tr S_1 = 0.
    """
    dims = [s.shape[0] for s in stats]
    k, total = len(dims), math.prod(dims)
    trace = sum(float(stats[0][j, j]) for j in range(dims[0]))
    c = (trace / total) ** (1.0 / k)
    if c == 0.0:
        return [torch.zeros_like(s) for s in stats], 0.0
    return [s / (c ** (k - 1) * (total // d)) for s, d in zip(stats, dims, strict=True)], c


def damped_covariances(stats: Sequence[Tensor], damping: float, relative: bool) -> list[Tensor]:
    """U_i + e I for every mode; e is damping, or damping times c."""
    us, c = covariances(stats)
    shift = damping * c if relative else damping
    if relative and c == 0.0:
        shift = 1.0  # an all-zero statistic: the identity, by definition
    return [u + shift * torch.eye(len(u), dtype=u.dtype) for u in us]


def square_root(matrix: Tensor) -> Tensor:
    """The symmetric square root of a positive definite matrix."""
    values, vectors = torch.linalg.eigh(matrix)
    return vectors @ torch.diag(values.sqrt()) @ vectors.T


def damped_kron(stats: Sequence[Tensor], damping: float, relative: bool) -> Tensor:
    """F_TNT = (U_1 + e I) kron ... kron (U_k + e I)."""
    return dense_kron(damped_covariances(stats, damping, relative))


def whitened_gram(g: Tensor, covariances: Sequence[Tensor], i: int) -> Tensor:
    """mat_i(G) (kron of the inverses of the other modes' covariances) mat_i(G)^T, of trace |G|^2.

    The update of S_i in the alternating maximisation of a tensor-normal likelihood, after which its
    scale is replaced.
    """
    others = [c for j, c in enumerate(covariances) if j != i]
    matrix = unfolding(g, i)
    whitener = torch.linalg.inv(dense_kron(others)) if others else torch.eye(1, dtype=g.dtype)
    gram = matrix @ whitener @ matrix.T
    trace = float(gram.diagonal().sum())
    return gram * (float(g.square().sum()) / trace) if trace else gram


def modes_of(shape: Sequence[int]) -> tuple[int, ...]:
    """The modes of a shape: () -> (1,); (out, in, *kernel) -> (out, in, prod kernel)."""
    if len(shape) == 0:
        return (1,)
    if len(shape) <= 2:
        return tuple(shape)
    return (shape[0], shape[1], math.prod(shape[2:]))


class _Block:
    """One parameter's momentum, statistics and dense Fisher matrix."""

    def __init__(self, dims: tuple[int, ...], max_factor_dim: int) -> None:
        self.dims = dims
        self.diagonal = [d > max_factor_dim for d in dims]
        self.momentum = torch.zeros(math.prod(dims), dtype=torch.float64)
        self.second_moment = torch.zeros(math.prod(dims), dtype=torch.float64)
        self.updates = 0
        self.stats: list[Tensor] | None = None
        self.first_statistic = 0  # the step at which self.stats was first set
        self.fisher: Tensor | None = None
        self.covariances: list[Tensor] = []  # damped, whose Kronecker product is the Fisher matrix

    def grams(self, sampled: Tensor, whitened: bool = False) -> list[Tensor]:
        """G^(i) of every mode; that of a diagonal mode has zeros off the diagonal."""
        g = sampled.detach().double().reshape(self.dims)
        if whitened:
            full = [whitened_gram(g, self.covariances, i) for i in range(len(self.dims))]
        else:
            full = [contraction(g, i) for i in range(len(self.dims))]
        return [
            torch.diag(torch.diag(gram)) if diagonal else gram
            for gram, diagonal in zip(full, self.diagonal, strict=True)
        ]


class DenseTNT:
    """Algorithm 2: forms the dense Fisher block of every parameter, and solves with it.

    `step` updates params, float64 tensors, in place. It takes gradients as lists with an entry for
    each parameter, None for a parameter without one. lr and weight_decay may change between steps.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        *,
        lr: float,  # alpha
        damping: float,  # epsilon
        momentum: float = 0.9,  # mu
        stat_decay: float = 0.9,  # beta
        weight_decay: float = 0.0,  # gamma
        stat_interval: int = 1,  # T_1
        inverse_interval: int = 1,  # T_2
        max_factor_dim: int = 8192,
        relative_damping: bool = False,
        graft: str | None = None,
        estimator: str = "moments",
        nesterov: bool = False,
        early_roots: bool = False,
        mode_shapes: Sequence[tuple[int, ...]] | None = None,
    ) -> None:
        self.params = list(params)
        self.lr, self.damping, self.momentum = lr, damping, momentum
        self.stat_decay, self.weight_decay = stat_decay, weight_decay
        self.stat_interval, self.inverse_interval = stat_interval, inverse_interval
        self.relative_damping, self.graft = relative_damping, graft
        self.estimator, self.nesterov, self.takes_roots = estimator, nesterov, early_roots
        self.steps = 0
        shapes = mode_shapes or [modes_of(p.shape) for p in self.params]
        self.blocks = [_Block(shape, max_factor_dim) for shape in shapes]

    def _refresh(self, block: _Block) -> None:
        assert block.stats is not None
        damped = damped_covariances(block.stats, self.damping, self.relative_damping)
        if self.takes_roots:
            damped = [square_root(matrix) for matrix in damped]
        block.covariances, block.fisher = damped, dense_kron(damped)

    def warm_start(self, sampled_batches: Sequence[Sequence[Tensor]]) -> None:
        """Sets the statistics to the average of the batches' Gram matrices, then the inverses."""
        for index, block in enumerate(self.blocks):
            grams = [block.grams(batch[index]) for batch in sampled_batches]
            block.stats = [
                sum((gram[i] for gram in grams[1:]), start=grams[0][i]) / len(grams)
                for i in range(len(block.dims))
            ]
            block.first_statistic = self.steps
            self._refresh(block)

    def step(
        self, grads: Sequence[Tensor | None], sampled: Sequence[Tensor | None] | None = None
    ) -> None:
        """One iteration. It uses the sampled gradients only if statistics are due."""
        t = self.steps
        refreshed = []
        for index, block in enumerate(self.blocks):
            observed = None if sampled is None else sampled[index]
            due = t % self.stat_interval == 0 or block.stats is None
            if due and observed is not None:
                self._observe(block, observed)
            if block.stats is not None:
                young = t - block.first_statistic < self.inverse_interval
                if t % self.inverse_interval == 0 or (due and observed is not None and young):
                    refreshed.append(block)
        if self.takes_roots:
            self._end_roots(refreshed)
        for block in refreshed:
            self._refresh(block)
        for param, block, gradient in zip(self.params, self.blocks, grads, strict=True):
            if gradient is not None:
                self._update(param, block, gradient)
        self.steps += 1

    def _end_roots(self, blocks: Sequence[_Block]) -> None:
        """Ends the roots if the mean has less than a quarter of the second moment, on average.

        A mean's share is that of its square, less the share that independent gradients would have.
        """
        mu, shares = self.momentum, []
        for block in blocks:
            if block.updates and block.stats is not None and mu:
                mean = (1 - mu) * block.momentum / (1 - mu**block.updates)
                share = float(mean.square().sum() / torch.trace(block.stats[0]))
                noise = (1 - mu) / (1 + mu)
                shares.append((share - noise) / (1 - noise))
        shares = [share for share in shares if not math.isnan(share)]
        if shares and sum(shares) / len(shares) < 0.25:
            self.takes_roots = False

    def _observe(self, block: _Block, observed: Tensor) -> None:
        if block.stats is None:
            block.stats, block.first_statistic = block.grams(observed), self.steps
            return
        grams = block.grams(observed, whitened=self.estimator == "mle")
        beta = self.stat_decay
        block.stats = [beta * s + (1 - beta) * g for s, g in zip(block.stats, grams, strict=True)]

    def _update(self, param: Tensor, block: _Block, gradient: Tensor) -> None:
        g = vec(gradient.detach().double().reshape(block.dims))
        block.momentum = self.momentum * block.momentum + g
        block.second_moment = 0.99 * block.second_moment + 0.01 * g * g
        block.updates += 1
        assert block.fisher is not None, "no statistic has been observed"
        # The sum of mu^j g_(t-j), or the next one if its gradient were g again.
        n = self.momentum * block.momentum + g if self.nesterov else block.momentum
        direction = torch.linalg.solve(block.fisher, n)
        direction = direction * self._graft_factor(block, n, direction)
        with torch.no_grad():
            step = direction.reshape(param.shape) + self.weight_decay * param
            param.copy_(param - self.lr * step)

    def _graft_factor(self, block: _Block, n: Tensor, direction: Tensor) -> float:
        length = float(direction.norm())
        if self.graft is None or length == 0.0:
            return 1.0
        if self.graft == "rms":
            return 0.2 * math.sqrt(len(direction)) / length
        if self.graft == "sgd":
            return float(n.norm()) / length
        # Adam's first moment is an average: the weights of the gradients that n sums become one.
        powers = block.updates + (1 if self.nesterov else 0)
        first = (1 - self.momentum) * n / (1 - self.momentum**powers)
        second = block.second_moment / (1 - 0.99**block.updates)
        return float((first / (second.sqrt() + 1e-8)).norm()) / length
