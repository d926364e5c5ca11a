"""Plans of the Triton launchers: tiles, launches, partial sums, workspace, addresses."""

import gc
import itertools
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import triton_operators
from cases import (
    DTYPES,
    GPU,
    STATE_DTYPES,
    flat,
    identical,
    normal,
    scalar,
    state_dtype,
    unchanged,
)
from operators import GRAFTS, STEPS, Call, Results, agree, call, everything, row, same
from recorded_graph import Recording
from torch import Tensor

from tnt_kernels import reference
from tnt_kernels.triton import (
    chain,
    cublas,
    grafted_directions,
    gram_ema,
    launch,
    mode_products,
    momentum,
    pack,
    preconditioned_step,
    product,
    scaled_step,
    tiles,
)
from tnt_kernels.triton.gram_ema import Kind
from tnt_kernels.triton.pack import Packing
from tnt_kernels.triton.product import Multiplying, Scaling
from tnt_kernels.triton.tiles import (
    LARGEST_INDEX,
    axis,
    cut,
    lower_tiles,
    merged,
    pieces,
    tile_order,
    unfolded,
)
from tools.measuring.parameter_sets import PARAMETER_SETS

# Sizes and strides that allow the widest loads in every dtype.
WIDE_SHAPES = [(64, 128), (72, 40)]
# Large enough for large tiles, the last of them not full.
LARGE_SHAPES = [(264, 256), (136, 128)]
CPU = torch.device("cpu")
H200 = 132  # multiprocessors


def layouts_of(shapes: Sequence[Sequence[int]]) -> tuple[launch.Layout, ...]:
    """Layouts of contiguous float32 tensors."""
    return tuple(
        launch.contiguous(launch.Layout(tuple(shape), (), torch.float32, True)) for shape in shapes
    )


# Unfoldings.


def test_modes_as_one_index() -> None:
    assert axis((2, 3, 4), (12, 4, 1), [0, 1, 2]) == (24, 24, 1, 0)
    assert axis((2, 3, 4), (12, 4, 1), [0, 2]) == (8, 4, 1, 12)
    assert axis((2, 3, 4), (12, 4, 1), [2, 0]) == (8, 2, 12, 1)
    assert axis((2, 1, 4), (1, 7, 2), [2, 1, 0]) == (8, 8, 1, 0)
    assert axis((2, 3, 4), (1, 2, 6), [0, 1, 2]) is None
    assert axis((2, 3), (5, 5), []) == (1, 1, 1, 0)
    assert axis((2, 0, 4), (1, 7, 2), [0, 1, 2]) == (0, 1, 1, 0)
    # One of them counted by itself.
    assert axis((2, 3, 4), (12, 4, 1), [0, 1, 2], alone=2) == (24, 4, 1, 4)
    assert axis((2, 3, 4), (12, 4, 1), [0, 1, 2], alone=0) == (24, 12, 1, 12)
    assert axis((2, 3, 4), (12, 4, 1), [0, 1, 2], alone=1) is None
    assert axis((2, 1, 4), (4, 4, 1), [0, 1], alone=1) == (2, 1, 4, 4)


def test_what_does_not_merge_or_fit_has_no_unfolding() -> None:
    assert unfolded((2, 3, 4, 5), 0, (1, 2, 6, 24)) is not None
    assert unfolded((2, 3, 4, 5), 0, (60, 2, 10, 100)) is None
    for columns, fits in ((LARGEST_INDEX, True), (LARGEST_INDEX + 1, False)):
        assert (unfolded((2, columns), 0, (columns, 1)) is not None) == fits
        assert (unfolded((2, columns), 1, (columns, 1)) is not None) == fits
    # The end of the last block must fit a 32-bit index.
    assert LARGEST_INDEX + max(momentum.SPAN.value, 64) < 2**31


def test_merged_dimensions() -> None:
    assert merged((2, 3, 4), (12, 4, 1)) == ([24], [(1,)])
    assert merged((2, 1, 4), (1, 7, 2)) == ([8], [(1,)])
    assert merged((2, 3, 4), (12, 4, 1), (1, 2, 6)) == ([4, 3, 2], [(1, 6), (4, 2), (12, 1)])
    assert merged((1, 1), (5, 5)) == ([], [])


def test_pieces_are_all_elements_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four modes that do not merge, and of more elements than an index may have."""
    assert not list(pieces((3, 0, 2), (0, 2, 1)))
    for most, count in ((LARGEST_INDEX, 3), (50, 9)):
        monkeypatch.setattr(tiles, "LARGEST_INDEX", most)
        given = call("scaled_step_", [(6, 4, 5, 3)])
        given.arguments["params"] = [normal((3, 4, 6, 5)).permute(2, 1, 3, 0)]
        strides = [given.arguments[key][0].stride() for key in ("params", "directions")]
        assert len(list(pieces((6, 4, 5, 3), *strides))) == count
        launch._plans.clear()
        wanted = given.double()(reference)
        agree(given(triton_operators), wanted, given)
    launch._plans.clear()


def test_cut_is_even() -> None:
    assert cut(94, 16) == [(0, 15), (15, 31), (31, 47), (47, 62), (62, 78), (78, 94)]
    assert cut(0, 4) == [(0, 0)]


@pytest.mark.parametrize("rows", [1, 8, 19])
def test_tiles_are_whole_and_grouped(rows: int) -> None:
    tiles = list(tile_order(rows, 5))
    assert sorted(tiles) == [(i, j) for i in range(rows) for j in range(5)]
    assert {i for i, _ in tiles[: 8 * 5]} == set(range(min(rows, 8)))
    lower = list(lower_tiles(rows, 1))
    assert sorted(lower) == [(i, j) for i in range(rows) for j in range(i + 1)]


@pytest.mark.parametrize(("programs", "large"), [(12, True), (13, False)])
def test_large_tiles_are_taken_where_they_fill_the_device(programs: int, large: bool) -> None:
    """A product with a side below 96 keeps small tiles."""
    layouts = layouts_of([(512, 384), (128, 64)])
    factors = layouts_of([(d, d) for d in (512, 384, 128, 64)])
    plan = chain.plan(layouts, layouts, factors, CPU, programs)
    assert _heights(plan) == ({64, 128} if large else {64})


def _heights(plan: chain.Plan) -> set[int]:
    """Rows of the tiles of its products."""
    return {kind.height for kind, _, _ in plan.launches if isinstance(kind, Multiplying)}


# Tiles, partial sums and a small workspace do not change the results.


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("large", [False, True])
def test_gram_matrices_of_every_tile(dtype: torch.dtype, large: bool) -> None:
    """Short modes, whatever the rest; large ones where they fill the device."""
    shapes = [*(LARGE_SHAPES if large else WIDE_SHAPES), (16, 30)]
    tensors = [normal(shape, dtype) for shape in shapes]
    (wave,) = gram_plan(launch.layouts(tensors)).waves
    small = {Kind(dtype, 16), Kind(dtype, _block(dtype, False))}
    assert {kind for kind, _, _ in wave.grams} == small | {Kind(dtype, _block(dtype, large))}
    _check_gram(tensors)


def _block(dtype: torch.dtype, large: bool) -> int:
    return 32 if dtype == torch.float64 else 128 if large else 64


def gram_plan(
    layouts: tuple[launch.Layout, ...], programs: int = triton_operators.PROGRAMS
) -> gram_ema.Plan:
    """The plan for full and aligned statistics."""
    stats = layouts_of([(d, d) for layout in layouts for d in layout.shape])
    return gram_ema.plan(layouts, stats, CPU, programs)


def _sums(plan: gram_ema.Plan) -> bool:
    """Whether some columns are split."""
    return any(wave.sums for wave in plan.waves)


def _check(variant: str, tensors: list[Tensor]) -> Results:
    """The call on these tensors, with full statistics or factors, equals the reference."""
    given = call(variant, [t.shape for t in tensors], "full", [t.dtype for t in tensors])
    given.arguments["tensors"] = tensors
    wanted = given.double()(reference)
    results = given(triton_operators)
    agree(results, wanted, given)
    return results


def _check_gram(tensors: list[Tensor]) -> list[Tensor]:
    return everything(_check("gram_ema_", tensors))


def test_an_address_that_is_not_aligned_is_packed() -> None:
    _check_gram([normal((64 * 64 + 1,))[1:].view(64, 64)])


@pytest.mark.parametrize("variant", ["gram_ema_", "gram_ema_ whitened"])
def test_packed_operands_take_turns(monkeypatch: pytest.MonkeyPatch, variant: str) -> None:
    """If they are too large to exist together; to the bit."""
    together = call(variant, [(72, 130), (9,), (65, 1, 9)], "mixed")
    in_turn = together.copy()
    results = together(triton_operators)
    monkeypatch.setattr(gram_ema, "PACKED_BYTES", 1 << 15)
    launch._plans.clear()
    shapes = [(72, 130), (65, 1, 9)]
    assert len(gram_plan(layouts_of(shapes)).waves) > 1
    same(in_turn(triton_operators), results)
    launch._plans.clear()


def test_rounded_statistics_have_no_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    """In TF32 the units drop bits; packed numbers are rounded before, and subnormals stay."""
    tensor = normal((40, 700)) + 1
    tensor[3] = 1e-41
    monkeypatch.setattr(gram_ema, "precision", lambda device: "tf32")
    stats = [torch.full((d, d), torch.nan) for d in tensor.shape]
    gram_ema.gram_ema_(stats, [tensor], scalar(0.0))
    stat = stats[0].double()
    exact = tensor.double() @ tensor.double().mT
    kept = exact.diagonal() > 1e-30
    error = (stat.diagonal()[kept] / exact.diagonal()[kept] - 1).mean()
    assert abs(float(error)) < 1e-5
    assert (stat - exact).abs().max() < 2e-4 * exact.abs().max()


def test_rounded_products_have_no_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    """In TF32 the units drop bits, which would make this product 1.4e-3 too short."""
    monkeypatch.setattr(chain, "precision", lambda device: "tf32")
    tensor, factors = normal((70, 96)), [normal((d, d)) for d in (70, 96)]
    (product,) = mode_products.mode_products([tensor], factors)
    left, right = (f.double() for f in factors)
    exact = left @ tensor.double() @ right.mT
    assert abs(float((product * exact).sum() / exact.square().sum()) - 1) < 2e-5
    # Rounding two operands of two products to 11 bits.
    assert (product - exact).norm() < 5e-4 * exact.norm()


@pytest.mark.parametrize("setting", ["tf32", "tf32x3"])
def test_extreme_numbers_in_products(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest stay finite, subnormals stay, and what is not finite reaches its row only."""
    monkeypatch.setattr(chain, "precision", lambda device: setting)
    tensor = torch.ones(5, 40)
    tensor[0, 0], tensor[1, 0], tensor[2, 3], tensor[3, 7] = 3.4e38, 1e-41, torch.inf, torch.nan
    tensor[1, 1:] = 0
    (product,) = mode_products.mode_products([tensor], [torch.ones(5), torch.eye(40)])
    assert product[4].equal(tensor[4]) and product[0, 1:].equal(tensor[0, 1:])
    error = abs(float(product[0, 0] / tensor[0, 0]) - 1)
    assert error < (1e-7 if setting == "tf32x3" else 1e-3)
    # A subnormal number has fewer bits; TF32 keeps it to 2**-137.
    assert abs(float(product[1, 0]) - 1e-41) < 2.0**-137
    assert not product[2].isfinite().all() and not product[3].isfinite().all()
    assert product[[0, 1, 4]].isfinite().all()


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((9, 2000), torch.float32),
        ((136, 1100), torch.float32),  # large tiles, whose sums are added in parts
        ((2000, 9), torch.float64),
        ((3, 40, 50), torch.bfloat16),
        ((70, 31, 5), torch.float16),
    ],
    ids=str,
)
def test_partial_sums(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Few rows and many columns, in every mode: the columns are split (split-K)."""
    given = call("gram_ema_", [shape], "full", dtype)
    given.arguments["stats"] = [
        [s.diagonal().clone() if len(s) > 1000 else s for s in given.arguments["stats"][0]]
    ]
    groups = given.arguments["tensors"], given.arguments["stats"][0]
    plan = gram_ema.plan(*map(launch.layouts, groups), CPU, triton_operators.PROGRAMS)
    assert _sums(plan)
    wanted, again = given.double()(reference), given.copy()(triton_operators)
    results = given(triton_operators)
    agree(results, wanted, given)
    same(results, again)


def test_partial_sums_take_little_memory() -> None:
    """None for a large matrix; for ResNet-32 less than twice its statistics."""
    assert not _sums(gram_plan(layouts_of([(4096, 4096)]), H200))
    shapes = PARAMETER_SETS["resnet32"].views
    plan = gram_plan(layouts_of(shapes), H200)
    statistics = sum(d * d * 4 for shape in shapes for d in shape)
    # The operands begin after the partial sums.
    partials = int(plan.packed.view(-1, pack.PACK_FIELDS.value)[:, pack.TARGET.value].min())
    assert 0 < partials < 2 * statistics


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("large", [False, True])
def test_products_of_every_tile(dtype: torch.dtype, large: bool) -> None:
    shapes = [*(LARGE_SHAPES if large else WIDE_SHAPES), (16, 30)]
    tensors = [normal(shape, dtype) for shape in shapes]
    short = set() if dtype == torch.float64 else {16}
    small = _block(dtype, False)
    assert _heights(_chain_plan(tensors)) == {small, _block(dtype, large), *short}
    _check("mode_products", tensors)


@pytest.mark.parametrize("shape", [(64, 128), (8, 12, 20), (4, 8, 12, 20)], ids=str)
def test_a_dense_tensor_is_packed_once(shape: tuple[int, ...]) -> None:
    """Also if its first mode is the dense one: products store the next operand."""
    for tensor in (normal(shape), normal(shape[::-1]).permute(*range(len(shape))[::-1])):
        kinds = [kind for kind, _, _ in _chain_plan([tensor], [tensor]).launches]
        products = list(itertools.dropwhile(lambda kind: isinstance(kind, Packing), kinds))
        assert len(products) == len(shape) and not any(isinstance(k, Packing) for k in products)
        _check("mode_products", [tensor])


@pytest.mark.parametrize(
    ("full", "kernels"),
    [
        ([0, 2], ["pack", "product"]),  # packing scales
        ([2], ["pack", "scaling", "pack", "product"]),  # by one of two
        ([], ["scaling"]),
    ],
    ids=str,
)
def test_diagonal_factors(full: list[int], kernels: list[str]) -> None:
    given, plan = _mixed_products((40, 6, 70), full)
    names = {Packing: "pack", Multiplying: "product", Scaling: "scaling"}
    started = [names[type(kind)] for kind, _, _ in plan.launches]
    assert [name for name, _ in itertools.groupby(started)] == kernels
    _agrees(given)


def test_modes_far_apart_are_packed_again() -> None:
    """Diagonal modes between full ones: no operand has both in the order that it needs."""
    given, plan = _mixed_products((3, 4, 5, 6, 7), [0, 2, 4])
    kinds = [type(kind) for kind, _, _ in plan.launches]
    assert Packing in kinds[kinds.index(Multiplying) :]
    _agrees(given)


def _mixed_products(shape: tuple[int, ...], full: Sequence[int]) -> tuple[Call, chain.Plan]:
    """A call with factors that are full for some modes, and its plan."""
    given = call("mode_products", [shape], "full")
    (row,) = given.arguments["factors"]
    row = [f if i in full else f.diagonal().clone() for i, f in enumerate(row)]
    given.arguments["factors"] = [row]
    tensors = launch.layouts(given.arguments["tensors"])
    return given, chain.plan(tensors, tensors, launch.layouts(row), CPU, H200)


def _agrees(given: Call) -> None:
    wanted = given.double()(reference)
    agree(given(triton_operators), wanted, given)


def _chain_plan(tensors: list[Tensor], results: list[Tensor] | None = None) -> chain.Plan:
    results = results or [torch.empty(t.shape, dtype=state_dtype(t.dtype)) for t in tensors]
    factors = [torch.eye(d, dtype=r.dtype) for r in results for d in r.shape]
    every = [launch.layouts(group) for group in (tensors, results, factors)]
    return chain.plan(*every, CPU, triton_operators.PROGRAMS)


def test_the_workspace_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors share a workspace of the size that the largest of them needs."""
    tensors = [normal(shape) for shape in [(9, 5), (20, 30), (4, 5, 6), (7,), (10, 20, 3)]]
    alone = [_chain_plan([tensor]).scratch for tensor in tensors]
    together = _chain_plan(tensors)
    assert together.scratch == sum(alone)
    monkeypatch.setattr(chain, "PACKED_BYTES", 0)
    launch._plans.clear()
    plan = _chain_plan(tensors)
    assert plan.scratch == max(alone) and len(plan.launches) > len(together.launches)
    _check("mode_products", tensors)
    launch._plans.clear()


def test_large_matrices_in_tf32_are_cublass() -> None:
    """By shapes and precision alone, so that replicas compute the same bits."""
    good = (1024, 2048)
    for shape, setting, dtype, full, wanted in (
        (good, "tf32", torch.float32, (2, 2), True),
        (good, "tf32x3", torch.float32, (2, 2), False),
        (good, "tf32", torch.bfloat16, (2, 2), False),
        (good, "tf32", torch.float32, (2, 1), False),
        ((1023, 2048), "tf32", torch.float32, (2, 2), False),
        ((1024, 1024, 2), "tf32", torch.float32, (2, 2, 2), False),
    ):
        layout = launch.contiguous(launch.Layout(shape, (), dtype, True))
        factors = layouts_of([(d,) * dim for d, dim in zip(shape, full, strict=True)])
        plan = chain.plan((layout,), (layout,), factors, CPU, H200, setting)
        assert (plan.by_cublas == {0: 0}) == wanted and bool(plan.launches) != wanted
    strided = launch.Layout(good, (1, 1024), torch.float32, True)
    assert not cublas.is_faster(strided, layouts_of([(d, d) for d in good]), "tf32")


@pytest.mark.usefixtures("by_cublas")
@pytest.mark.parametrize("variant", ["mode_products", *STEPS])
def test_cublas_computes_the_same(variant: str) -> None:
    _agrees(call(variant, [(72, 64), (9, 5), (3, 4, 5)], "full"))


def test_the_copy_of_a_tensor_that_is_not_aligned_is() -> None:
    """Copied because the parameter's modes do not merge, though it is contiguous itself."""
    shape = (4, 4, 4, 4)
    given = call("preconditioned_step_", [shape], "full").with_arguments(
        params=[normal((8, 8, 8, 8))[::2, ::2, ::2, ::2]],
        momenta=[normal((257,))[1:].view(shape)],
    )
    wanted = given.double()(reference)
    agree(given(triton_operators), wanted, given)


def test_copies_live_until_their_launches() -> None:
    """Kernels know only the addresses of copies; the emulator frees a copy that nobody holds."""
    given = call("mode_products", [(33, 9)], "full")
    (row,) = given.arguments["factors"]
    given.arguments["factors"] = [[factor.mT for factor in row]]
    assert not row[0].mT.is_contiguous()
    _agrees(given)
    _check_gram([normal((6, 4, 5, 3)).permute(2, 0, 3, 1)[:, ::2]])


def test_modes_that_do_not_merge_are_copied() -> None:
    """Four modes whose strides do not merge into two dimensions."""
    tensor = normal((6, 4, 5, 3)).permute(2, 0, 3, 1)[:, ::2]
    assert gram_plan(launch.layouts([tensor])).copied == {0}
    _check_gram([tensor])
    _check("mode_products", [tensor])
    given = call("preconditioned_step_", [tensor.shape], "full").with_arguments(
        params=[normal((6, 4, 5, 3)).permute(2, 0, 3, 1)[:, ::2]], grads=[tensor]
    )
    wanted = given.double()(reference)
    agree(given(triton_operators), wanted, given)


@pytest.mark.parametrize("dtype", STATE_DTYPES, ids=str)
def test_too_many_columns_are_named(dtype: torch.dtype) -> None:
    layout = launch.contiguous(launch.Layout((2, 2**31), (), dtype, True))
    for plan in (
        lambda: gram_ema.plan((layout,), layouts_of([(2, 2), (2**31,)]), CPU, 1),
        lambda: gram_ema.plan_whitened((layout,), CPU, 1),
    ):
        with pytest.raises(
            ValueError, match=rf"^tensors\[0\] must .*{LARGEST_INDEX} .*got \(2, 2147483648\)"
        ):
            plan()
    factors = layouts_of([(2, 2), (2**31,)])
    with pytest.raises(
        ValueError, match=rf"^tensor 0 must .*{LARGEST_INDEX} .*got \(2, 2147483648\)"
    ):
        chain.plan((layout,), (layout,), factors, CPU, 1)


@pytest.mark.parametrize("variant", ["preconditioned_step_", *GRAFTS])
def test_what_does_not_fit_changes_nothing(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The products come last but are planned first."""
    given = call(variant, [(4, 5)])
    monkeypatch.setattr(tiles, "LARGEST_INDEX", 3)
    launch._plans.clear()
    with unchanged(given.arguments), pytest.raises(ValueError, match=r"^tensor 0 must .*\(4, 5\)"):
        given(triton_operators)


# The work of the host.


def test_the_host_does_not_work_for_each_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of Python and C++ functions, launches too, once there is a plan: it must outrun the
    device.
    """
    for module in (pack, product, grafted_directions, gram_ema, momentum):
        monkeypatch.setattr(module, "launch", lambda *_, **__: None)
    monkeypatch.setattr(launch, "programs_at_once", lambda device: H200)
    half, counts = scalar(0.5), []
    for repeats in (1, 4):
        step = call("preconditioned_step_", [(9, 5), (7,)] * repeats, "full").arguments
        moved, matrices = (step["params"], step["momenta"]), flat(step["factors"])
        # A full factor multiplies a vector's look-ahead out of place, with a copy for each.
        diagonal = [f if len(f) != 7 else f.diagonal().contiguous() for f in matrices]
        grads, ones = step["grads"], torch.ones(2 * repeats, 2, dtype=torch.float64)
        flags = [True] * len(grads)
        calls = 0

        def count(frame: FrameType, event: str, _: object) -> None:
            nonlocal calls
            of_machine = "ptx" in Path(frame.f_code.co_filename).parts
            calls += event.endswith("call") and not of_machine

        for profile in (None, count):
            gc.disable()  # finalizers would be counted
            sys.setprofile(profile)
            try:
                preconditioned_step.preconditioned_step_(*moved, grads, matrices, half, half, half)
                scaled_step.scaled_step_(*moved, half, half, flags, ones[:, 0])
                gram_ema.gram_ema_(matrices, grads, half)
                for factors, nesterov in ((matrices, False), (diagonal, True)):
                    grafted_directions.grafted_directions_(
                        *(moved[0], moved[0], moved[1], grads, factors, half, ones),
                        *(0.99, 1e-8, nesterov),
                    )
            finally:
                sys.setprofile(None)
                gc.enable()
        counts.append(calls)
    assert 0 < counts[0] == counts[1]


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("adam", [False, True])
def test_launches_of_norms(monkeypatch: pytest.MonkeyPatch, adam: bool, nesterov: bool) -> None:
    """Those of PyTorch's operations included: each takes the host time."""
    started: list[str] = []
    for module in (product, grafted_directions, momentum):
        monkeypatch.setattr(
            module, "launch", lambda kernel, *_, **__: started.append(kernel.fn.__name__)
        )
    monkeypatch.setattr(launch, "programs_at_once", lambda device: H200)
    tensors = [torch.ones(9, 5), torch.ones(7, dtype=torch.float64)]
    momenta, squares, out = ([t.clone() for t in tensors] for _ in range(3))
    factors = [torch.ones(d, dtype=t.dtype) for t in tensors for d in t.shape]
    mu, updates = scalar(0.9), torch.ones(2, 2, dtype=torch.float64)
    for _ in range(2):  # the first call makes the plans
        started.clear()
        with Recording(lambda name: True) as recording:
            grafted_directions.grafted_directions_(
                *(momenta, squares if adam else [], out, tensors, factors),
                *(mu, updates, 0.99, 1e-8, nesterov),
            )
    assert started == [
        *["momentum_kernel"] * 2,  # of float32 and of float64
        *["scaling_kernel"] * 3,
        *["inner_kernel"] * 2,
        "norms_kernel",
    ]
    operations = {func._schema.name for func, *_ in recording.calls}
    assert operations == {"aten::empty", "aten::detach"}  # nothing computes


def test_whitened_tensors_may_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """If they are too large to exist together; to the bit."""
    together = call("gram_ema_ whitened", [(72, 130), (9,), (65, 1, 9)], "mixed")
    started: list[str] = []

    def start(kernel: Any, programs: int, *arguments: object, **constants: object) -> None:
        started.append(kernel.fn.__name__)
        launch.launch(kernel, programs, *arguments, **constants)

    monkeypatch.setattr(gram_ema, "launch", start)
    in_turn = together.copy()
    results = together(triton_operators)
    assert started.count("scale_kernel") == 1
    monkeypatch.setattr(gram_ema, "WHITENED_BYTES", 1 << 16)
    launch._plans.clear()
    same(in_turn(triton_operators), results)
    assert started.count("scale_kernel") == 3
    launch._plans.clear()


@pytest.mark.parametrize("variant", GRAFTS)
def test_norms_do_not_depend_on_the_list(variant: str) -> None:
    """To the bit: alone, these tensors are read widely; the third makes the launch narrow."""
    together = call(variant, [(72, 130), (64, 128), (9, 5)], "diagonal")
    alone = together.copy()
    results = together(triton_operators)
    agree(results, alone.double()(reference), together)
    for t in range(3):
        identical(row(results, t), row(alone.only(t)(triton_operators), 0))


def test_small_wide_work_joins_the_narrow() -> None:
    """A launch of its own costs more than narrow loads, unless the work is large."""
    vectors = []
    for shapes in ([(64, 64), (9, 5)], [(4096, 4096), (9, 5)]):
        layouts = layouts_of(shapes)
        plan = momentum.plan((*layouts, *layouts), CPU, H200, (True, True))
        vectors.append(sorted({kind.vector for kind, _, _ in plan.launches}))
    assert vectors == [[1], [1, 4]]


# Caches between calls.


def test_plans_and_addresses_are_kept() -> None:
    tensors = [normal((9, 5)).to(GPU), normal((4, 3, 2)).to(GPU)]
    first = launch.addresses_of(tensors)
    assert first.tolist() == [t.data_ptr() for t in tensors]
    moved = [tensors[0], tensors[1].clone()]
    second = launch.addresses_of(moved)
    assert second is not first and second.tolist() == [t.data_ptr() for t in moved]
    assert launch.addresses_of(tensors) is first and launch.addresses_of(moved) is second
    kept = [
        launch.planned(momentum.plan, [*group, *group], rest=((False, False),))
        for group in (tensors, [t.clone() for t in tensors], [t.double() for t in tensors])
    ]
    assert kept[0] is kept[1] and kept[0] is not kept[2]


class Tables:
    """The tables of addresses of launches that update momenta."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.read: list[Tensor] = []
        monkeypatch.setattr(momentum, "launch", self._launch)

    def _launch(self, *arguments: Any, **_: object) -> None:
        self.problems = arguments[3]
        self.read.append(arguments[4])

    def of_update(self, tensors: list[Tensor]) -> Tensor:
        """The table for m <- m / 2 + g, which does not run."""
        lists, half = [tensors[:1], tensors[1:]], scalar(0.5)
        numbers = (half, half, half, 0.0, 0.0)
        update, _ = momentum.over_elements(
            momentum.momentum_kernel, lists, numbers, SUMS=False, ADAM=False, AHEAD=False
        )
        update.start(torch.empty(0))
        return self.read.pop()


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> Tables:
    return Tables(monkeypatch)


def test_a_table_is_for_one_stream(tables: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another stream might read it before it is written, or after its memory has another use."""
    tensors = [normal((9, 5)).to(GPU) for _ in range(2)]
    found = []
    for stream in (1, 2, 1):
        monkeypatch.setattr(launch, "stream_of", lambda device, s=stream: s)
        found.append(
            (tables.of_update(tensors), launch.scalar_on(torch.device("meta"), scalar(7.0)))
        )
    for first, second, again in zip(*found, strict=True):
        assert first is again and first is not second


@pytest.mark.parametrize("other", [(9, 5), (9, 7)], ids=["same plan", "other plan"])
def test_threads_do_not_exchange_tables(
    tables: Tables, monkeypatch: pytest.MonkeyPatch, other: tuple[int, ...]
) -> None:
    """Before every line of one model's call another thread calls for another model.

    There is room for one plan, so that the models' calls drop each other's.
    """
    monkeypatch.setattr(launch, "_MOST_PLANS", 1)
    models = [[normal(shape).to(GPU) for _ in range(2)] for shape in ((9, 5), other)]
    lines = 0

    def interrupted(frame: FrameType, event: str, _: object) -> Any:
        nonlocal lines
        if frame.f_code.co_filename == launch.__file__ and event == "line":
            lines += 1
            thread = threading.Thread(target=tables.of_update, args=models[1:])
            thread.start()
            thread.join()
        return interrupted

    before = sys.gettrace()
    sys.settrace(interrupted)
    try:
        table = tables.of_update(models[0])
    finally:
        sys.settrace(before)
    assert lines > 5
    assert table.tolist() == [t.data_ptr() for t in models[0]]
    assert tables.problems.tolist()[momentum.COUNT.value] == 9 * 5


def test_a_graph_frees_its_tables(tables: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only its plan is kept, once however often the graph is recorded."""
    capturing = [False]
    monkeypatch.setattr(launch, "_read_by_graphs", {})
    monkeypatch.setattr(launch, "is_capturing", lambda device: capturing[0])
    tensors = [normal((9, 5)).to(GPU) for _ in range(2)]
    eager = tables.of_update(tensors)
    assert not launch._read_by_graphs
    capturing[0] = True
    recorded = []
    for _ in range(3):
        table = tables.of_update(tensors)
        assert table is not eager and table.tolist() == eager.tolist()
        recorded.append(weakref.ref(table))
        del table
    assert not any(table() for table in recorded)
    assert [type(plan) for plan in launch._read_by_graphs.values()] == [momentum.Plan]
    capturing[0] = False
    assert tables.of_update(tensors) is eager


def test_plans_are_dropped_without_waiting_for_the_device(
    tables: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest first; and a stream has plans of its own, so that their memory is its own."""
    monkeypatch.setattr(launch, "_plans", {})
    monkeypatch.setattr(launch, "_MOST_PLANS", 3)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: pytest.fail("waits"))

    def problems(n: int) -> Tensor:
        tables.of_update([normal((n,)).to(GPU) for _ in range(2)])
        return tables.problems

    first = problems(1)
    assert problems(1) is first
    for n in range(2, 300):
        problems(n)
        assert len(launch._plans) <= 3
    assert problems(1) is not first
    here = problems(2)
    monkeypatch.setattr(launch, "stream_of", lambda device: 7)
    assert problems(2) is not here and len(launch._plans) == 3


def test_graphs_of_one_plan_keep_it_once(tables: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    """However often it was dropped and made again in between."""
    monkeypatch.setattr(launch, "_read_by_graphs", {})
    tensors = [normal((9, 5)).to(GPU) for _ in range(2)]
    for _ in range(3):
        launch._plans.clear()
        tables.of_update(tensors)
        with monkeypatch.context() as patched:
            patched.setattr(launch, "is_capturing", lambda device: True)
            tables.of_update(tensors)
    assert len(launch._read_by_graphs) == 1


@pytest.mark.parametrize("pinned", [False, True])
def test_a_copy_of_pinned_numbers_blocks(monkeypatch: pytest.MonkeyPatch, pinned: bool) -> None:
    """The host may change them before a copy that does not block has read them."""
    numbers, said = torch.ones(3), []

    def to(self: Tensor, *_: object, non_blocking: bool) -> Tensor:
        said.append(non_blocking)
        return self

    monkeypatch.setattr(Tensor, "is_pinned", lambda self: pinned)
    monkeypatch.setattr(Tensor, "to", to)
    launch.table_on(torch.device("meta"), numbers)
    assert said == [not pinned]


def test_a_graph_needs_cached_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    launch._plans.clear()
    _check_gram([normal((7, 11))])
    monkeypatch.setattr(launch, "is_capturing", lambda device: True)
    _check_gram([normal((7, 11))])
    with pytest.raises(RuntimeError, match="once before a CUDA graph"):
        _check_gram([normal((7, 12))])


def test_scalars_are_sent_once() -> None:
    there = scalar(0.25).to(GPU)
    assert launch.scalar_on(there.device, there) is there
    elsewhere = torch.device("meta") if GPU.type == "cpu" else GPU
    sent = launch.scalar_on(elsewhere, scalar(0.25))
    assert sent.device.type == elsewhere.type
    assert launch.scalar_on(elsewhere, scalar(0.25)) is sent
    assert launch.scalar_on(elsewhere, scalar(0.5)) is not sent
    for n in range(100):
        launch.scalar_on(elsewhere, scalar(float(n)))
        assert launch._number.cache_info().currsize <= 64


@pytest.fixture
def default_precision() -> Iterator[None]:
    """Restores what PyTorch's settings of float32 products are at the start."""
    yield
    torch.set_float32_matmul_precision("highest")
    for backend in (torch.backends, torch.backends.cuda.matmul, torch.backends.mkldnn.matmul):
        backend.fp32_precision = "none"


@pytest.mark.usefixtures("default_precision")
@pytest.mark.parametrize(
    ("backend", "switch", "wanted"),
    [
        (None, "highest", "tf32x3"),
        (None, "high", "tf32"),
        (None, "medium", "tf32"),
        (torch.backends.cuda.matmul, "ieee", "tf32x3"),
        (torch.backends.cuda.matmul, "tf32", "tf32"),
        (torch.backends, "ieee", "tf32x3"),
        (torch.backends, "tf32", "tf32"),
    ],
)
def test_precision_follows_every_switch(
    monkeypatch: pytest.MonkeyPatch, backend: Any, switch: str, wanted: str
) -> None:
    if backend is None:
        torch.set_float32_matmul_precision(switch)
    else:
        backend.fp32_precision = switch
    for tensor_cores, found in ((True, wanted), (False, "ieee")):
        monkeypatch.setattr(launch, "has_tensor_cores", lambda device, t=tensor_cores: t)
        assert launch.precision(GPU) == found
