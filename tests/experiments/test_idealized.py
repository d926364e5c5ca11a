"""The idealized TNT: exact expectations, valid constants, and Theorem 1's bound in a run."""

import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from experiments import idealized
from experiments.idealized import idealized_run, recorded_at
from experiments.problems.softmax_regression import (
    Constants,
    Problem,
    constants,
    synthetic_problem,
)
from tests.oracle import contraction, covariances, damped_kron, vec

BETAS = (0.55, 0.75, 0.95)
DAMPING = 0.3


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Matrices this small only wait for a second thread, the more where others use the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def problem() -> Problem:
    return synthetic_problem(30, 4, 3, seed=1)


def weights_of(problem: Problem, scale: float, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(problem.shape, dtype=torch.float64, generator=generator)


def grams_at(problem: Problem, weights: Tensor) -> list[Tensor]:
    return problem.expected_grams(problem.example_slopes(weights)[0])


def fisher_by_loops(problem: Problem, weights: Tensor) -> Tensor:
    """E[vec(G) vec(G)^T] over every example and every label, G by autograd."""
    total = torch.zeros(2 * (weights.numel(),), dtype=torch.float64)
    for x in problem.inputs:
        chances = (weights @ x).softmax(dim=0)
        for y in range(problem.classes):
            leaf = weights.clone().requires_grad_()
            loss = functional.cross_entropy((leaf @ x)[None], torch.tensor([y]))
            gradient = vec(torch.autograd.grad(loss, leaf)[0])
            total += chances[y] / len(problem.inputs) * torch.outer(gradient, gradient)
    return total


# Exact expectations


@pytest.mark.parametrize("scale", [0.0, 1.0, 10.0])
def test_expected_grams_are_those_of_loops_over_examples_and_labels(
    problem: Problem, scale: float
) -> None:
    weights = weights_of(problem, scale)
    wanted = [torch.zeros(2 * (d,), dtype=torch.float64) for d in problem.shape]
    for x in problem.inputs:
        chances = (weights @ x).softmax(dim=0)
        for y in range(problem.classes):
            gradient = torch.outer(chances - torch.eye(problem.classes)[y], x)
            for mode in (0, 1):
                share = chances[y] / len(problem.inputs)
                wanted[mode] += share * contraction(gradient, mode)
    found = grams_at(problem, weights)
    torch.testing.assert_close(found, wanted)
    trace = fisher_by_loops(problem, weights).trace()
    assert all(gram.trace().item() == pytest.approx(trace.item()) for gram in found)


def test_expected_grams_are_the_mean_of_sampled_ones(problem: Problem) -> None:
    weights, draws = weights_of(problem, 2.0), 20_000
    generator = torch.Generator().manual_seed(0)
    chosen = torch.randint(len(problem.inputs), (draws,), generator=generator)
    inputs = problem.inputs[chosen]
    chances = (inputs @ weights.T).softmax(dim=1)
    labels = torch.multinomial(chances, 1, generator=generator).squeeze(1)
    slopes = chances - functional.one_hot(labels, problem.classes)
    gradients = torch.einsum("nc,nf->ncf", slopes, inputs)
    sampled = (gradients @ gradients.mT, gradients.mT @ gradients)
    for grams, exact in zip(sampled, grams_at(problem, weights), strict=True):
        # The mean of independent entries: each within five of its standard errors.
        error = grams.std(dim=0) / math.sqrt(draws)
        assert ((grams.mean(dim=0) - exact).abs() <= 5 * error).all()
        assert (error < 0.1 * exact.abs().max()).all(), "the draws must be enough to tell"


# The constants


@pytest.mark.parametrize("scale", [0.0, 0.3, 3.0, 30.0])
def test_constants_hold_at_any_weights(problem: Problem, scale: float) -> None:
    known = constants(problem, torch.zeros(problem.shape, dtype=torch.float64), 5, DAMPING)
    for seed in range(5):
        weights = weights_of(problem, scale, seed)
        preconditioner = torch.linalg.inv(damped_kron(grams_at(problem, weights), DAMPING, False))
        eigenvalues = torch.linalg.eigvalsh(preconditioner)
        assert known.kappa_low <= eigenvalues[0] and eigenvalues[-1] <= known.kappa_high

        leaf = weights.clone().requires_grad_()
        losses = functional.cross_entropy(problem.inputs @ leaf.T, problem.labels, reduction="none")
        assert losses.mean() >= known.lowest
        assert problem.loss(weights) == pytest.approx(losses.mean().item())
        gradients = torch.stack(
            [torch.autograd.grad(loss, leaf, retain_graph=True)[0] for loss in losses]
        )
        noise = (gradients - gradients.mean(dim=0)).square().sum(dim=(1, 2)).mean()
        assert noise <= known.noise

        def mean_loss(flat: Tensor) -> Tensor:
            logits = problem.inputs @ flat.reshape(problem.shape).T
            return functional.cross_entropy(logits, problem.labels)

        hessian = torch.autograd.functional.hessian(mean_loss, weights.flatten())
        torch.testing.assert_close(hessian, fisher_by_loops(problem, weights))
        assert torch.linalg.eigvalsh(hessian)[-1] <= known.lipschitz


def test_the_bound_of_the_fisher_matrix_is_no_looser_than_lemma_9(problem: Problem) -> None:
    known = constants(problem, weights_of(problem, 0.0), 5, DAMPING)
    largest_fisher = known.lipschitz  # of softmax regression: the Fisher matrix is the Hessian
    lemma = math.prod(d**0.5 * largest_fisher**0.5 + DAMPING for d in problem.shape)
    assert 1 / known.kappa_low <= lemma


@pytest.mark.parametrize("beta", BETAS)
def test_the_bound_is_the_theorems(beta: float) -> None:
    known = Constants(2.0, -1.0, 3.0, 5.0, 4, 0.1, 7.0)
    assert known.step_size(1, beta) == pytest.approx(0.1 / (2 * 49))
    assert known.step_size(10, beta) == pytest.approx(0.1 / (2 * 49) * 10**-beta)
    for count in (1, 7, 300):
        descent = 2 * 2.0 * (known.largest_loss(beta) + 1) * 49 / 0.01 * count ** (beta - 1)
        noise = 5 / ((1 - beta) * 4) * (count**-beta - 1 / count)
        assert known.bound(count, beta) == pytest.approx(descent + noise)
        # What the proof needs: sigma^2 / m times the average of t^-beta.
        needed = 5 / 4 / count * sum(t**-beta for t in range(1, count + 1))
        assert known.safe_bound(count, beta) >= descent + needed
        if count < 300:
            assert noise < needed, "as it stands the theorem's second term alone is too small"
    squares = sum(t ** (-2 * beta) for t in range(1, 100_000))
    alpha = known.step_size(1, beta)
    assert known.largest_loss(beta) >= 3.0 + 2.0 * 49 * alpha**2 / 2 * 5 / 4 * squares


# The run


def test_steps_are_algorithm_1s_with_dense_matrices(problem: Problem) -> None:
    first = weights_of(problem, 1.0)
    known = constants(problem, first, 5, DAMPING)
    points = list(itertools.islice(idealized_run(problem, first, known, DAMPING, 0.6, 50.0, 3), 4))
    assert torch.equal(points[0].weights, first) and torch.equal(first, weights_of(problem, 1.0))
    generator = torch.Generator().manual_seed(3)
    weights = first
    for t, point in enumerate(points, 1):
        assert point.t == t
        torch.testing.assert_close(point.weights, weights)
        leaf = weights.clone().requires_grad_()
        loss = functional.cross_entropy(problem.inputs @ leaf.T, problem.labels)
        (gradient,) = torch.autograd.grad(loss, leaf)
        assert point.loss == pytest.approx(loss.item())
        assert point.squared_norm == pytest.approx(gradient.square().sum().item())
        batch = torch.randint(30, (5,), generator=generator)
        loss = functional.cross_entropy(problem.inputs[batch] @ leaf.T, problem.labels[batch])
        (noisy,) = torch.autograd.grad(loss, leaf)
        dense = damped_kron(grams_at(problem, weights), DAMPING, False)
        step = torch.linalg.solve(dense, vec(noisy)).reshape(problem.shape)
        weights = weights - 50 * known.step_size(t, 0.6) * step


def test_the_common_average_eigenvalue_is_the_models(problem: Problem) -> None:
    grams = grams_at(problem, weights_of(problem, 1.0))
    factors, c = covariances(grams)
    assert all(u.trace().item() / len(u) == pytest.approx(c) for u in factors)


@pytest.mark.parametrize("beta", BETAS)
def test_the_bound_holds_in_the_run(problem: Problem, beta: float) -> None:
    first = weights_of(problem, 0.0)
    known = constants(problem, first, 2, DAMPING)
    seeds, count = 4, 300
    runs = [
        list(itertools.islice(idealized_run(problem, first, known, DAMPING, beta, 1.0, s), count))
        for s in range(seeds)
    ]
    norms = torch.tensor([[point.squared_norm for point in run] for run in runs])
    losses = torch.tensor([[point.loss for point in run] for run in runs])
    averages = norms.mean(dim=0).cumsum(dim=0) / torch.arange(1, count + 1)
    for n, average in enumerate(averages.tolist(), 1):
        assert average <= known.bound(n, beta)
    assert losses.mean(dim=0).max() <= known.largest_loss(beta)
    assert losses[:, -1].mean() < losses[:, 0].mean(), "the run must get somewhere"
    assert not torch.equal(norms[0], norms[1])


# The command


def command(out: Path, *more: str) -> list[str]:
    given = "--iterations 40 --examples 20 --features 3 --classes 3 --betas 0.6 0.9 --multiples 20"
    return [*given.split(), "--out", str(out), *more]


def test_the_command_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, parted = tmp_path / "whole.json", tmp_path / "parted.json"
    assert idealized.main(command(whole, "--seeds", "0", "1")) == 0
    out = capsys.readouterr().out
    assert out.count("it holds at every N") == 2 and out.count("(outside the theorem)") == 2
    assert whole.with_suffix(".png").read_bytes().startswith(b"\x89PNG")

    made = iter(range(3))

    def three(*arguments: object) -> object:
        if next(made, None) is None:
            raise KeyboardInterrupt
        return idealized_run(*arguments)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(idealized, "idealized_run", three)
        with pytest.raises(KeyboardInterrupt):
            idealized.main(command(parted, "--seeds", "0", "1"))
    assert len(json.loads(parted.read_text())["runs"]) == 3
    idealized.main(command(parted, "--seeds", "0", "1"))
    record, again = (json.loads(path.read_text()) for path in (whole, parted))
    for runs in (record["runs"], again["runs"]):
        for run in runs:
            assert run.pop("provenance") in (0, 1)
    assert record["runs"] == again["runs"]
    assert len(record["runs"]) == 8
    assert record["protocol"]["recorded_at"] == recorded_at(40)
    for run in record["runs"]:
        assert len(run["averages"]) == len(run["losses"]) == len(recorded_at(40))
        assert run["largest_loss"] >= run["losses"][0]


def test_averages_are_recorded_from_the_first_to_the_last() -> None:
    assert recorded_at(1) == [1]
    assert recorded_at(6) == [1, 2, 3, 4, 5, 6]
    points = recorded_at(100_000)
    assert points[0] == 1 and points[-1] == 100_000 and len(points) <= 50


def test_other_settings_are_refused_and_the_file_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run.json"
    idealized.main(command(out, "--seeds", "0"))
    before = out.read_bytes()
    with pytest.raises(SystemExit):
        idealized.main(command(out, "--seeds", "0", "--damping", "0.5"))
    assert "damping was 0.3 and is 0.5" in capsys.readouterr().err
    assert out.read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run.json", "run.png"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--betas", "0.5"], "argument --betas: must be above 0.5 and below 1, got 0.5"),
        (["--betas", "1"], "argument --betas: must be above 0.5 and below 1, got 1"),
        (["--multiples", "1"], "argument --multiples: must be above 1, got 1"),
        (["--damping", "0"], "argument --damping: must be positive"),
        (["--iterations", "0"], "argument --iterations: must be at least 1"),
        (["--out", "run.txt"], "argument --out: cannot write there: must end in .json"),
    ],
)
def test_bad_arguments_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], message: str
) -> None:
    with pytest.raises(SystemExit):
        idealized.main(command(tmp_path / "run.json", *more))
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
