"""Several samples in one step: the mean of their Gram matrices, scaled to the whole batch."""

import itertools
import math
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from attached import SETTINGS, Net, assert_same, batches, contents, made_net
from conftest import FixedLabels
from optimizers import NO_FAILURES, no_host_reads
from oracle import contraction
from tolerances import FLOAT64_REORDERED
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from tnt_optim import TNT

CLASSES = 3
PARTS = (3, 2, 1)  # rows of the outputs of a step


class Small(nn.Module):
    """A convolution, a matrix and a vector; float64."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.conv = nn.Conv1d(2, 3, 2, bias=False)
        self.out = nn.Linear(6, CLASSES)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        return self.out(torch.tanh(self.conv(x)).flatten(1))


def rows_of(step: int, sizes: Sequence[int] = PARTS) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and labels of each output of a step."""
    rng = torch.Generator().manual_seed(step)
    for size in sizes:
        inputs = torch.randn(size, 2, 3, generator=rng, dtype=torch.float64)
        yield inputs, torch.randint(CLASSES, (size,), generator=rng)


def take(opt: TNT, model: nn.Module, labels: FixedLabels, step: int, **how: Any) -> None:
    """One step with an observation of each of `rows_of`."""
    opt.zero_grad()
    for inputs, drawn in rows_of(step):
        labels.current = drawn
        opt.observe(model(inputs), **how)
    cross_entropy(model(inputs), drawn).backward()
    opt.step()


def mean_grams(
    model: nn.Module, outputs: Sequence[tuple[Tensor, Tensor]], scales: Sequence[float], p: Tensor
) -> list[Tensor]:
    """The weighted mean of the Gram matrices of the outputs' gradients, by mode."""
    grams: list[list[Tensor]] = []
    for (inputs, drawn), scale in zip(outputs, scales, strict=True):
        (gradient,) = torch.autograd.grad(cross_entropy(model(inputs), drawn), [p])
        grams.append([scale * contraction(gradient, mode) for mode in range(gradient.dim())])
    return [torch.stack(mode).mean(0) for mode in zip(*grams, strict=True)]


@pytest.mark.parametrize("fraction", [1.0, 0.25])
def test_statistics_are_the_mean_of_the_samples_grams(
    fixed_labels: FixedLabels, fraction: float
) -> None:
    model = Small()
    opt = TNT.paper(model.parameters(), lr=0.1, stat_interval=1, likelihood=fixed_labels, samples=3)
    expected: dict[Tensor, list[Tensor]] = {}
    scales = [fraction * size / sum(PARTS) for size in PARTS]
    for step in range(3):
        outputs = list(rows_of(step))
        for p in model.parameters():
            new = mean_grams(model, outputs, scales, p)
            old = expected.get(p, new)
            expected[p] = [0.9 * a + 0.1 * b for a, b in zip(old, new, strict=True)]
        take(opt, model, fixed_labels, step, fraction=fraction)
    for p, wanted in expected.items():
        for found, stat in zip(opt.state[p]["stats"], wanted, strict=True):
            torch.testing.assert_close(found, stat, rtol=FLOAT64_REORDERED, atol=0)


@pytest.mark.parametrize(
    "settings", [{"block_size": 2}, {"max_factor_dim": 2}, {"merge_small_dims": 8}]
)
def test_layouts_see_each_sample(fixed_labels: FixedLabels, settings: dict[str, Any]) -> None:
    """A stack of samples has the mean of the statistics of single ones."""
    found: list[list[Tensor]] = []
    for chosen in (None, 0, 1, 2):
        model = Small()
        opt = TNT.paper(model.parameters(), likelihood=fixed_labels, samples=3, **settings)
        for number, (inputs, drawn) in enumerate(rows_of(0, (2, 2, 2))):
            if chosen in (None, number):
                fixed_labels.current = drawn
                opt.observe(model(inputs))
        cross_entropy(model(inputs), drawn).backward()
        opt.step()
        found.append([s for p in model.parameters() for s in opt.state[p]["stats"]])
    for together, *alone in zip(*found, strict=True):
        mean = torch.stack(alone).mean(0) / 3  # each stands for a third of the rows
        torch.testing.assert_close(together, mean, rtol=FLOAT64_REORDERED, atol=1e-18)


@pytest.mark.parametrize(("sizes", "samples"), [((4,), 1), ((2, 2), 2), ((1, 1, 1, 1), 4)])
def test_the_expectation_is_that_of_the_whole_batch(
    fixed_labels: FixedLabels, sizes: tuple[int, ...], samples: int
) -> None:
    """By enumeration of all labels of a batch of four, weighted by their probabilities."""
    model = Small()
    inputs = torch.cat([x for x, _ in rows_of(0, (4,))])
    probabilities = model(inputs).softmax(1).detach()
    total: list[Tensor] = []
    for drawn in itertools.product(range(CLASSES), repeat=4):
        opt = TNT.paper(model.parameters(), lr=0.0, likelihood=fixed_labels, samples=samples)
        for x, y in zip(inputs.split(sizes), torch.tensor(drawn).split(sizes), strict=True):
            fixed_labels.current = y
            opt.observe(model(x))
        model.zero_grad()
        model(inputs).sum().backward()
        opt.step()
        weight = math.prod(float(probabilities[row, label]) for row, label in enumerate(drawn))
        stats = [weight * s for p in model.parameters() for s in opt.state[p]["stats"]]
        total = stats if not total else [a + b for a, b in zip(total, stats, strict=True)]
    # The Fisher matrix of a mean over N rows: sum over rows and labels of p g g^T / N^2.
    wanted: list[Tensor] = []
    for p in model.parameters():
        modes: list[Tensor] = [torch.zeros(())] * p.dim()
        for row, label in itertools.product(range(4), range(CLASSES)):
            loss = cross_entropy(model(inputs[row : row + 1]), torch.tensor([label]))
            (g,) = torch.autograd.grad(loss, [p])
            weight = float(probabilities[row, label]) / 16
            modes = [s + weight * contraction(g, mode) for mode, s in enumerate(modes)]
        wanted += modes
    for found, expected in zip(total, wanted, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("bad", [(1,), (0, 2), (0, 1, 2)])
def test_samples_that_are_not_finite_are_left_out(
    fixed_labels: FixedLabels, bad: tuple[int, ...]
) -> None:
    model = Small()
    opt = TNT.paper(model.parameters(), lr=0.0, stat_interval=1, likelihood=fixed_labels, samples=3)
    take(opt, model, fixed_labels, 0)
    before = [s.clone() for p in model.parameters() for s in opt.state[p]["stats"]]
    outputs = list(rows_of(1))
    for number, (inputs, drawn) in enumerate(outputs):
        fixed_labels.current = drawn
        opt.observe(model(inputs) * (math.nan if number in bad else 1.0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # if no sample is left
        opt.step()
    good = [n for n in range(3) if n not in bad]
    assert opt.failures()["skipped_statistics"] == int(not good)
    after = [s for p in model.parameters() for s in opt.state[p]["stats"]]
    if not good:
        assert all(map(torch.equal, before, after))
        return
    chosen, scales = [outputs[n] for n in good], [PARTS[n] / sum(PARTS) for n in good]
    new = [s for p in model.parameters() for s in mean_grams(model, chosen, scales, p)]
    for old, found, gram in zip(before, after, new, strict=True):
        wanted = 0.9 * old + 0.1 * gram
        torch.testing.assert_close(found, wanted, rtol=FLOAT64_REORDERED, atol=1e-18)


def test_further_observations_are_averaged_in_turn(fixed_labels: FixedLabels) -> None:
    """Four outputs in two samples: the first with the third, the second with the fourth."""
    model = Small()
    opt = TNT.paper(model.parameters(), likelihood=fixed_labels, samples=2)
    outputs = list(rows_of(0, (2, 2, 2, 2)))
    for inputs, drawn in outputs:
        fixed_labels.current = drawn
        opt.observe(model(inputs))
    cross_entropy(model(inputs), drawn).backward()
    opt.step()
    pairs = [
        (torch.cat([outputs[a][0], outputs[b][0]]), torch.cat([outputs[a][1], outputs[b][1]]))
        for a, b in ((0, 2), (1, 3))
    ]
    model = Small()
    for p, own in zip(model.parameters(), opt.state.values(), strict=True):
        for found, wanted in zip(
            own["stats"], mean_grams(model, pairs, (0.5, 0.5), p), strict=True
        ):
            torch.testing.assert_close(found, wanted, rtol=FLOAT64_REORDERED, atol=1e-18)


def test_an_output_may_be_anything_that_the_likelihood_takes() -> None:
    """A number or a dictionary counts as one example."""
    for wrap in (torch.sum, lambda z: {"logits": z}):
        layer = nn.Linear(3, 2)
        opt = TNT.paper(
            layer.parameters(),
            likelihood=lambda o: (
                sum(map(torch.sum, o.values())) if isinstance(o, dict) else o * 1.0
            ),
        )
        opt.observe(wrap(layer(torch.randn(4, 3))))
        layer(torch.randn(4, 3)).sum().backward()
        opt.step()
        assert all("stats" in state for state in opt.state.values())


def test_a_step_with_samples_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = made_net()
    opt = TNT.paper(model.parameters(), samples=2, **SETTINGS)
    for step in range(3):
        opt.zero_grad()
        (x, y), *_ = batches(step)
        for part in x.chunk(2):
            opt.observe(model(part))
        cross_entropy(model(x), y).backward()
        with no_host_reads() if step else torch.no_grad():
            opt.step()
    assert opt.failures() == NO_FAILURES


# attach


def with_dropout(**more: Any) -> Net:
    """A net whose forward draws from the global generator and has buffers."""
    model = made_net(**more)
    model.out = nn.Sequential(nn.Dropout(0.5), model.out)
    return model


def trained(how: str, attached: bool) -> tuple[Any, Tensor]:
    """The end of a training on half of each batch, observed by ``attach`` or by the loop."""
    model = with_dropout()
    opt = TNT.paper(model.parameters(), samples=2, **SETTINGS)
    if attached:
        opt.attach(model, fraction=0.5)
    torch.manual_seed(0)
    for step in range(7):
        opt.zero_grad()
        ((x, y),) = batches(step)
        with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
            if opt.observing and not attached:
                kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
                with torch.random.fork_rng(devices=[]):
                    for part in x[:4].chunk(2):
                        opt.observe(model(part), fraction=0.5)
                model.load_state_dict(kept, strict=False)
            if how == "checkpointed":
                output = checkpoint(model, x, use_reentrant=False)
            else:
                output = model(x)
            loss = cross_entropy(output, y)
        loss.backward()
        opt.step()
    return contents(model, opt), torch.get_rng_state()


@pytest.mark.parametrize("how", ["plain", "autocast", "checkpointed"])
def test_attach_is_the_loop_over_parts(how: str) -> None:
    assert_same(trained(how, attached=True), trained(how, attached=False))


def test_attach_leaves_buffers_and_random_states() -> None:
    """The steps of a method without statistics are the same with and without observations."""

    def losses(attached: bool) -> list[float]:
        torch.manual_seed(0)
        model = with_dropout()
        opt = TNT.paper(
            model.parameters(), samples=2, **{**SETTINGS, "lr": 0.0, "stat_interval": 1}
        )
        if attached:
            opt.attach(model, fraction=0.5)
        found = []
        for step in range(3):
            ((x, y),) = batches(step)
            loss = cross_entropy(model(x), y)
            found.append(loss.item())
        return [*found, *model.norm.running_mean.tolist(), float(model.norm.num_batches_tracked)]

    assert losses(attached=True) == losses(attached=False)


@pytest.mark.parametrize("fraction", [0.0, -1.0, 1.5, math.nan])
def test_a_fraction_is_refused(fraction: float) -> None:
    model = made_net()
    with pytest.raises(ValueError, match=r"fraction must be a number in \(0, 1\]"):
        TNT.paper(model.parameters()).attach(model, fraction=fraction)
