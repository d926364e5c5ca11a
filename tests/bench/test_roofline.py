"""The roofline model's counts, on plans small enough to count by hand, and its floors."""

import doctest
import importlib
import math
from dataclasses import replace

import pytest
import torch

from bench.kernels import planned_inverses, planned_work, roofline, roofline_page
from bench.kernels.devices import GPUS, PRECISIONS, Gpu
from bench.kernels.planned_work import gram_launches, momentum_launches, product_launches
from bench.kernels.roofline import LaunchTime, floors, longest, predict, timed
from tools.measuring.parameter_sets import PARAMETER_SETS, ParameterSet
from tools.measuring.provenance import provenance

H200 = GPUS["H200"]
LARGE_CACHE = 1 << 40
# One flop and one byte a second, so that times are counts.
UNIT = Gpu("unit", 4, 1.0, 1.0, 1.0, 1.0, LARGE_CACHE, 1.0, "")


def weights(name: str) -> tuple[list[tuple[int, ...]], list[tuple[bool, ...]]]:
    """What kernels.md's table of floors counts: no vectors, no embeddings of GPT-2.

    Its row vgg16 is that of the convolutions and one linear layer from 512 to 100, where the set
    of the benchmarks has three of up to 4096.
    """
    shapes = PARAMETER_SETS[name].views
    views = [v for v in shapes if len(v) > 1 and v[0] != 50257 and v != (1024, 768)]
    if name == "vgg16_conv":
        views.append((100, 512))
    return views, [(False,) * len(v) for v in views]


# name, gram (memory, TF32, bf16, FFMA), inverse (FFMA), step (memory, TF32, bf16, FFMA), us.
QUOTED = [
    ("resnet32", (1.5, 0.14, 0.07, 0.9), 0.1, (2.3, 0.3, 0.14, 1.8)),
    ("vgg16_conv", (48, 35, 18, 232), 29, (72, 69, 35, 463)),
    ("faces_ae", (55, 50, 25, 335), 617, (55, 101, 51, 670)),
    ("gpt2_full", (764, 734, 372, 4892), 14496, (698, 1468, 743, 9784)),
    ("square4096", (94, 344, 174, 2291), 2291, (109, 687, 348, 4581)),
]


@pytest.mark.parametrize(("name", "gram", "inverse", "step"), QUOTED, ids=[q[0] for q in QUOTED])
def test_floors_are_those_of_the_design(
    name: str, gram: tuple[float, ...], inverse: float, step: tuple[float, ...]
) -> None:
    for operator, quoted in (("gram_ema_", gram), ("preconditioned_step_", step)):
        f = floors(*weights(name), operator, H200)
        for found, wanted in zip((f.memory, f.tf32, f.bf16, f.ffma), quoted, strict=True):
            # Rounded to what is printed; one unit more where it was rounded on its way.
            assert abs(found * 1e6 - wanted) <= max(0.01 * wanted, unit(wanted)), operator
        assert f.tf32x3 == pytest.approx(3 * f.tf32)
    found = floors(*weights(name), "damped_inverse", H200).ffma * 1e6
    assert abs(found - inverse) <= max(0.01 * inverse, unit(inverse))


def unit(value: float) -> float:
    """Half of the last printed digit.

    >>> unit(0.14), unit(1.5), unit(48)
    (0.005, 0.05, 0.5)
    """
    text = f"{value:g}"
    return 0.5 * 10.0 ** -len(text.partition(".")[2])


def test_floors_tell_apart_what_they_count() -> None:
    views, full = [(3, 2)], [(False, False)]
    f = floors(views, full, "gram_ema_", UNIT)
    # G twice, S and its new value; 6 numbers times 3 and 2 rows.
    assert (f.memory, f.tf32) == (4 * (2 * 6 + 2 * (9 + 4)), 6 * (3 + 2))
    f = floors(views, [(True, False)], "gram_ema_", UNIT)
    assert (f.memory, f.tf32) == (4 * (2 * 6 + 2 * (3 + 4)), 6 * 2 + 6 * 2)
    f = floors(views, full, "preconditioned_step_", UNIT)
    assert (f.memory, f.tf32) == (4 * (5 * 6 + 9 + 4), 2 * 6 * (3 + 2))
    assert f.of("tf32x3") == max(f.memory, f.tf32x3)


def test_one_gram_launch_by_hand() -> None:
    (launch,) = gram_launches([(128, 64)], [(False, False)], 1, LARGE_CACHE)
    assert launch.kernel == "gram_kernel"
    # Of 128 rows three tiles of two steps of 32 columns, of 64 rows one of four.
    assert sorted(launch.steps.tolist()) == [2, 2, 2, 4]
    assert launch.step_flops == 2 * 64 * 64 * 32
    triangle, square = 64 * 65 // 2, 64 * 64
    assert launch.useful == 2 * (64 * (2 * triangle + square) + 128 * triangle)
    blended = 3 * (triangle + square) + 3 * square  # on the diagonal, and once off it
    assert launch.cache == 4 * (3 * 64 * 128 + 128 * 128 + blended)
    assert launch.memory == 4 * (128 * 64 + blended)


def test_every_wave_reads_what_the_cache_cannot_hold() -> None:
    views, full = [(256, 64)], [(False, False)]
    (held,) = gram_launches(views, full, 132, LARGE_CACHE)
    (spilt,) = gram_launches(views, full, 1, 1)
    blended = held.memory - 4 * 256 * 64
    # Ten tiles of the first mode and one of the second, two at a time: six waves. Of 64 rows of
    # 256 columns in one part each, the panels (0,), (0, 1), (1, 0), (2, ...) of the first mode.
    assert held.steps.tolist() == spilt.steps.tolist()
    panel = 4 * 64 * 64
    pairs = [(i, j) for i in range(4) for j in range(i + 1)]
    waves = [{p for pair in pairs[k : k + 2] for p in pair} for k in range(0, len(pairs), 2)]
    second = 4 * 64 * 256
    assert spilt.memory - blended == panel * sum(len(w) for w in waves) + second


def test_partial_sums_are_written_and_added() -> None:
    # 9 rows of 262144 columns: 8192 steps, in 4 parts for each of 132 multiprocessors and no fewer
    # than 16 steps.
    launches = gram_launches([(9, 1 << 18)], [(False, True)], 132, LARGE_CACHE)
    gram, total, diagonal = launches
    assert [w.kernel for w in launches] == ["gram_kernel", "sum_kernel", "diagonal_kernel"]
    parts = len(gram.steps)
    assert parts == 512 and sum(gram.steps.tolist()) == (1 << 18) // 32
    assert total.steps.tolist() == [parts]
    blended = 9 * 10 // 2 + 81
    assert total.cache == 4 * (parts * 81 + blended) and total.memory == 4 * blended
    assert gram.cache == 4 * (2 * 9 * (1 << 18) + parts * 81)
    assert gram.useful == 2 * 45 * (1 << 18)
    assert len(diagonal.steps) == (1 << 18) // 64 and not diagonal.matrix


def test_a_chain_by_hand() -> None:
    views, full = [(128, 64)], [(False, False)]
    second, first = product_launches(views, full, 1, LARGE_CACHE, update=True)
    # G times the factor of 64: the transposed tiles, two of two steps; then that of 128: two of
    # four. What is between stays in the cache.
    assert (second.steps.tolist(), first.steps.tolist()) == ([2, 2], [4, 4])
    assert (second.useful, first.useful) == (2 * 128 * 64 * 64, 2 * 128 * 64 * 128)
    numbers = 128 * 64
    assert second.cache == 4 * (2 * 64 * 64 + numbers + numbers)
    assert second.memory == 4 * (64 * 64 + numbers)
    # Both tiles read all of the 64 columns; W is read and written.
    assert first.cache == 4 * (128 * 128 + 2 * numbers + 2 * numbers)
    assert first.memory == 4 * (128 * 128 + 2 * numbers)
    made = product_launches(views, full, 1, LARGE_CACHE, update=False)[1]
    assert first.cache - made.cache == 4 * numbers


def test_scratch_that_the_cache_cannot_hold_passes_memory() -> None:
    views, full = [(128, 64)], [(False, False)]
    held = product_launches(views, full, 1, LARGE_CACHE, update=True)
    spilt = product_launches(views, full, 1, 128 * 64 * 4 - 1, update=True)
    assert spilt[0].memory - held[0].memory >= 4 * 128 * 64
    assert spilt[1].memory - held[1].memory >= 4 * 128 * 64


def test_a_diagonal_factor_is_one_step_a_tile() -> None:
    (first,) = product_launches([(8192 + 64,)], [(True,)], 1, LARGE_CACHE, update=False)
    assert set(first.steps.tolist()) == {1} and len(first.steps) == 129
    assert first.useful == 8256 and first.cache == 4 * 3 * 8256


def test_momenta_by_hand() -> None:
    (launch,) = momentum_launches([(100, 100), (4,)], 1)
    assert len(launch.steps) == 3 + 1
    assert launch.cache == launch.memory == 3 * 4 * 10_004


def test_tasks_go_to_whoever_is_free() -> None:
    assert longest([], 3) == 0
    assert longest([1] * 7, 3) == 3
    assert longest([1, 1, 5], 2) == 6
    assert longest([5, 1, 1], 2) == 5


def test_a_launch_takes_the_longest_of_four() -> None:
    (work,) = gram_launches([(128, 64)], [(False, False)], 4, LARGE_CACHE)
    fast = replace(UNIT, memory=1e30, tf32=1e30, cache_rate=1e30)
    assert timed(work, fast, "tf32").binds == "latency"
    slow = timed(work, replace(fast, memory=2.0), "tf32")
    assert (slow.binds, slow.memory) == ("memory", work.memory / 2)
    slow = timed(work, replace(fast, cache_rate=2.0), "tf32")
    assert (slow.binds, slow.cache) == ("cache", work.cache / 2)
    slow = timed(work, replace(fast, tf32=1.0), "tf32")
    # The busiest of four multiprocessors has a quarter of the rate, and four of the ten steps.
    assert (slow.binds, slow.flops) == ("flops", 4 * 4 * work.step_flops)
    assert slow.imbalance == pytest.approx(1.6)
    assert timed(work, replace(fast, tf32=1.0), "tf32x3").flops == pytest.approx(3 * slow.flops)
    assert slow.seconds == pytest.approx(roofline.GRAPH_LAUNCH + slow.flops)


def test_latency_counts_programs_and_steps() -> None:
    (work,) = gram_launches([(128, 64)], [(False, False)], 4, LARGE_CACHE)
    found = timed(work, replace(UNIT, multiprocessors=1), "tf32").latency
    # Two at a time: [2, 2], then whichever comes next.
    ends = [0.0, 0.0]
    for steps in work.steps.tolist():
        ends[0] += roofline.PROGRAM_LATENCY + roofline.STEP_LATENCY * steps
        ends.sort()
    assert found == pytest.approx(max(ends))


@pytest.mark.parametrize("device", GPUS)
def test_a_small_model_takes_few_launches(device: str) -> None:
    resnet = PARAMETER_SETS["resnet32"]
    step = predict(resnet, "preconditioned_step_", GPUS[device])
    assert 2 <= len(step.launches) <= 4
    assert len(predict(resnet, "gram_ema_", GPUS[device]).launches) <= 3
    assert step.eager_seconds >= len(step.launches) * roofline.EAGER_LAUNCH


def test_launches_are_those_of_the_plan() -> None:
    resnet = PARAMETER_SETS["resnet32"]
    tensors = planned_work.layouts_of(resnet.views)
    flat = tuple(f for kinds in resnet.diagonal for f in kinds)
    p = planned_work.gram_ema.plan(tensors, flat, torch.device("cpu"), H200.multiprocessors)
    found = predict(resnet, "gram_ema_", H200).launches
    planned = [count for launches in (p.tiles, p.sums, p.diagonals) for _, count, _ in launches]
    assert [launch.programs for launch in found] == planned


@pytest.mark.parametrize("precision", PRECISIONS)
def test_nothing_is_predicted_below_its_flops(precision: str) -> None:
    for name in ("mnist_ae", "resnet32", "square4096"):
        for operator in roofline.OPERATORS:
            p = predict(PARAMETER_SETS[name], operator, H200, precision)
            assert p.seconds >= getattr(p.floors, precision)
            assert sum(p.shares().values()) == pytest.approx(p.seconds)
            assert p.binds == max(p.shares(), key=lambda key: p.shares()[key])
            assert math.isfinite(p.ratio)


def test_useful_flops_are_those_of_the_floor() -> None:
    """Counted tile by tile and counted from shapes: two ways that must agree."""
    s = PARAMETER_SETS["mnist_ae"]
    products = predict(s, "mode_products", H200)
    assert sum(la.useful for la in products.launches) == pytest.approx(
        products.floors.tf32 * H200.tf32
    )
    gram = predict(s, "gram_ema_", H200)
    # A triangle has d (d + 1) / 2 entries, where the floor has d d / 2.
    assert sum(la.useful for la in gram.launches) == planned_triangles(s)


def planned_triangles(s: ParameterSet) -> int:
    return sum((d + 1) * math.prod(view) for view in s.views for d in view)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="operator must be one of"):
        predict(PARAMETER_SETS["resnet32"], "newton", H200)
    with pytest.raises(ValueError, match="precision one of"):
        predict(PARAMETER_SETS["resnet32"], "gram_ema_", H200, "bf16")


def test_the_page_says_that_it_is_a_prediction() -> None:
    small = {name: PARAMETER_SETS["resnet32"] for name in roofline.SETS}
    predictions = [
        replace(predict(s, operator, gpu, precision), set=name)
        for name, s in small.items()
        for operator in roofline.OPERATORS
        for gpu in GPUS.values()
        for precision in PRECISIONS
    ]
    predictions += [
        replace(predict(s, operator, gpu), set=name)
        for name, s in small.items()
        for operator in roofline.INVERSES
        for gpu in GPUS.values()
    ]
    text = roofline_page.page(provenance(), predictions)
    assert "Nothing on it was measured on a GPU" in text.split("## ")[0]
    for p in predictions:
        assert roofline_page.microseconds(p.seconds) in text
    assert "tiles 10" in text  # 9 x 9 modes are explained


def test_what_is_near_its_floor_is_not_explained() -> None:
    launch = LaunchTime("gram_kernel", 1, 1, 1, 100, 10, 1.0, 1e-5, 0.0, 0.0, 0.0)
    f = roofline.Floors(1e-5, 0.0, 0.0, 0.0, 0.0)
    near = roofline.Prediction("s", "gram_ema_", "H200", "tf32", (launch,), f)
    assert near.ratio == pytest.approx(1.15) and roofline_page.explained(near) == ""
    far = replace(near, floors=replace(f, memory=1e-6))
    assert roofline_page.explained(far) == "products 87 %, launches 13 %, tiles 10.0×"


@pytest.mark.parametrize("module", ["bench.kernels.roofline", "bench.kernels.roofline_page"])
def test_examples(module: str) -> None:
    failed, attempted = doctest.testmod(importlib.import_module(module))
    assert attempted > 0 and failed == 0


# The inverses.


def test_iterations_of_a_root_by_hand() -> None:
    """One 96 x 96 mode of root 4 beside a diagonal one: N^2, N^4 with H N, and N^4 M."""
    views, diagonal = [(96, 7)], [(False, True)]
    launches = planned_inverses.inverse_root_launches(views, diagonal, 1, 1 << 30)
    products = [launch for launch in launches if launch.kernel == "newton.product_kernel"]
    assert len(products) == planned_inverses.ITERATIONS * 3
    # 64 x 64 tiles, the lower three of four, of three steps of 32 terms each.
    counted = sorted(launch.steps.numel() for launch in products[:3])
    assert counted == [3, 3, 6] and set(products[0].steps.tolist()) == {3}
    assert products[0].step_flops == 2 * 64 * 64 * 32
    triangle = 2 * 96 * (96 * 97 // 2)
    assert sum(launch.useful for launch in products[:3]) == 4 * triangle
    assert planned_inverses.root_flops(views, diagonal) == planned_inverses.ITERATIONS * 4 * 96**3
    assert all(launch.memory == 0 for launch in products)
    small_cache = planned_inverses.inverse_root_launches(views, diagonal, 1, 1000)
    assert all(w.memory > 0 for w in small_cache if w.kernel == "newton.product_kernel")


def test_a_block_for_each_small_matrix() -> None:
    launches = planned_inverses.damped_inverse_launches(
        [(9, 128), (64,)], [(False,) * 2, (True,)], 4
    )
    (inverted,) = [launch for launch in launches if launch.kernel == "invert_kernel"]
    assert inverted.steps.tolist() == [2, 16]
    assert inverted.useful == 9**3 + 128**3
    assert inverted.memory == 4 * 2 * (9**2 + 128**2)
    assert not any(launch.kernel == "PyTorch's Cholesky" for launch in launches)


def test_large_matrices_share_calls_up_to_a_size() -> None:
    sizes = [129, 1000, 990, 784, 2000, 2000]
    launches = planned_inverses.damped_inverse_launches(
        [(d,) for d in sizes], [(False,)] * len(sizes), 4
    )
    useful = [launch.useful for launch in launches if launch.kernel == "PyTorch's Cholesky"]
    assert useful == [2000**3, 2000**3, 1000**3 + 990**3, 784**3, 129**3]


@pytest.mark.parametrize("operator", roofline.INVERSES)
@pytest.mark.parametrize("name", ["resnet32", "square4096"])
def test_inverses_are_predicted_above_their_floors(operator: str, name: str) -> None:
    for gpu in GPUS.values():
        p = roofline.predict(PARAMETER_SETS[name], operator, gpu)
        assert p.precision == roofline.INVERSES[operator]
        assert p.seconds > p.floor > 0
        assert p.ratio < 1.5 or roofline_page.explained(p)
