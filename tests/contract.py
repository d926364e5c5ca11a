"""What every implementation of an operator must keep, written once.

tests/kernels runs these classes over the C++ kernels and the reference, tests/gpu over the Triton
kernels and the public functions on a GPU. A subclass says which functions serve (`functions`, with
the public signatures) and which operators they have; slow implementations choose fewer shapes.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import pytest
import torch
from cases import (
    DTYPES,
    EMPTY_SHAPES,
    HELD,
    KINDS,
    LAYOUT_SHAPE,
    LAYOUTS,
    SHAPES,
    SPOILS,
    STATE_DTYPES,
    WRITABLE_LAYOUTS,
    bits,
    buffer_of,
    close,
    flat,
    identical,
    normal,
    noticed_by_autograd,
    poisoned_like,
    scalar,
    unchanged,
    with_spectrum,
)
from operators import (
    ADAM,
    GRAFTS,
    GRAMS,
    INVERSES,
    NORMS,
    NUMBERS,
    RELATIVE,
    ROOTED,
    STEPS,
    STRIDED_WRITTEN,
    TABLES,
    VARIANTS,
    WRITTEN,
    Call,
    agree,
    call,
    row,
    same,
)
from tolerances import NEWTON_OPERATOR
from torch import Tensor, nn

import tnt_kernels
from tnt_kernels import reference
from tnt_kernels.operators import OPERATORS

Shape = tuple[int, ...]
NAN, INF = math.nan, math.inf


class Implementation:
    """What serves, and on which arguments it is tested."""

    functions: Any = tnt_kernels
    operators: ClassVar[Sequence[str]] = list(OPERATORS)
    shapes: ClassVar[Sequence[Shape]] = SHAPES
    kinds: ClassVar[Sequence[str]] = KINDS
    dtypes: ClassVar[Sequence[torch.dtype]] = DTYPES
    layout_shape: ClassVar[Shape] = LAYOUT_SHAPE
    # The shape of tensors whose factors fail: every mode has an entry (2, 1) to spoil.
    failing_shape: ClassVar[Shape] = (5, 9, 3)
    # Whether a tensor has the same bits in a list as alone.
    alone_to_the_bit = True

    @classmethod
    def pytest_generate_tests(cls, metafunc: pytest.Metafunc) -> None:
        """Every test runs over the variants it names, all by default."""
        chosen = {
            "kind": cls.kinds,
            "dtype": cls.dtypes,
            "layout": list(LAYOUTS),
        }
        for argument, values in chosen.items():
            if argument in metafunc.fixturenames:
                metafunc.parametrize(argument, values, ids=str)
        if "variant" in metafunc.fixturenames:
            variants = getattr(metafunc.function, "variants", VARIANTS)
            served = [v for v in variants if v.split()[0] in cls.operators]
            metafunc.parametrize("variant", served)

    def check(self, given: Call, tolerance: float | None = None) -> dict[str, Any]:
        """Close to the reference in float64; arguments that are only read stay."""
        wanted = given.double()(reference)
        with unchanged(given.read):
            results = given(self.functions)
        agree(results, wanted, given, tolerance)
        return results


def over(*variants: str) -> Callable[[Any], Any]:
    """Limits a test to some variants."""

    def mark(test: Any) -> Any:
        test.variants = variants
        return test

    return mark


class EveryOperator(Implementation):
    """What holds for all operators."""

    def test_definition(self, variant: str, kind: str, dtype: torch.dtype) -> None:
        if variant in INVERSES and dtype not in STATE_DTYPES:
            pytest.skip("statistics are float32 or float64")
        self.check(call(variant, [*self.shapes, *EMPTY_SHAPES, *self.shapes[::-1]], kind, dtype))

    def test_a_list_is_its_entries_one_by_one(self, variant: str) -> None:
        together = call(variant, self.shapes, dtype=DTYPES)
        alone = together.copy()
        results = together(self.functions)
        for t in range(len(self.shapes)):
            single = alone.only(t)(self.functions)
            for a, b in zip(row(results, t), row(single, 0), strict=True):
                if self.alone_to_the_bit:
                    identical(a, b)
                elif a.is_floating_point():
                    close(a, b.double())

    def test_layouts(self, variant: str, layout: str) -> None:
        """Any strides of tensors that are read or moved; gaps between their numbers stay."""
        dtypes = STATE_DTYPES if layout == "negated" else DTYPES
        plain = call(variant, [self.layout_shape] * len(dtypes), dtype=dtypes)
        given = _laid_out(plain, layout)
        before = given.copy()
        strides = [tensor.stride() for tensor in given.written]
        self.check(given)
        assert strides == [tensor.stride() for tensor in given.written]
        for new, old in zip(given.written, before.written, strict=True):
            if not new.is_contiguous():
                gaps = buffer_of(old).isnan()
                assert torch.equal(buffer_of(new).isnan(), gaps)

    @over(*STEPS)
    def test_gradients_of_any_dtype(self, variant: str) -> None:
        pairs = [(a, b) for a in DTYPES for b in DTYPES]
        params, grads = zip(*pairs, strict=True)
        self.check(call(variant, [(9, 5)] * len(pairs), dtype=params, grad_dtype=grads))

    def test_numbers_as_tensors(self, variant: str) -> None:
        """A number may be a float64 tensor, or a float32 one that holds it exactly: same bits."""
        shapes = [(9, 5), (7,), (3, 4, 5)]
        for value in (0.25, 0.3):
            given = call(variant, shapes, dtype=DTYPES)
            numbers: dict[str, Any] = dict.fromkeys(NUMBERS[given.name], value)
            wanted = given.copy().with_arguments(**numbers)(self.functions)
            for dtype in STATE_DTYPES if value == 0.25 else (torch.float64,):
                tensors = {key: scalar(value, dtype) for key in numbers}
                with unchanged(tensors):
                    again = given.copy().with_arguments(**tensors)(self.functions)
                same(again, wanted)

    def test_empty_lists(self, variant: str) -> None:
        for number in (0.1, scalar(0.1)):
            given = call(variant, [])
            results = given.with_arguments(**dict.fromkeys(NUMBERS[given.name], number))(
                self.functions
            )
            for key, result in results.items():
                assert len(result) == 0
                if key in ("info", *NORMS):
                    assert result.dtype == (torch.int32 if key == "info" else torch.float64)

    @over(*GRAMS, "mode_products", *STEPS)
    def test_a_tensor_that_is_not_finite(self, variant: str) -> None:
        """NaN stays in its own tensor: its neighbours get the bits they would have had."""
        good = call(variant, [(9, 5)] * 3)
        bad = good.copy()
        bad.arguments["tensors" if "tensors" in bad.arguments else "grads"][1][2, 3] = NAN
        clean, results = good(self.functions), bad(self.functions)
        for t in (0, 2):
            identical(row(results, t), row(clean, t))
        for key, entries in results.items():
            for result in flat([entries[1]]):
                assert result.isnan().any(), key
                if key in ("momenta", "second_moments"):
                    assert result.isnan().sum() == 1 and result[2, 3].isnan()

    @over(*GRAMS, *INVERSES)
    def test_the_upper_triangles_are_not_read(self, variant: str) -> None:
        shapes = [(9, 5), (65,), (150,)][: 2 if variant in ROOTED else 3]
        for dtype in STATE_DTYPES:
            given = call(variant, shapes, "full", dtype)
            wanted = given.double()(reference)
            for stat in flat(given.arguments["stats"]):
                stat += torch.full_like(stat, NAN).triu(1)
            agree(given(self.functions), wanted, given)

    def test_autograd_notices_the_write(self, variant: str) -> None:
        given = call(variant, [(9, 5), (7,)], dtype=(torch.float32, torch.float64))
        for written in given.written:
            written.nan_to_num_(nan=0.5)
            version = written._version
            assert noticed_by_autograd(written, lambda: given(self.functions))
            assert written._version > version

    def test_outside_autograd(self, variant: str) -> None:
        """Arguments may need gradients, and parameters be leaves: nothing is recorded."""
        given = call(variant, [(9, 5), (7,)])
        wanted = given.double()(reference)

        def recorded(key: str, tensor: Tensor) -> Tensor:
            if key == "params":
                return nn.Parameter(tensor)
            written = key in (*WRITTEN[given.name], *TABLES)
            return tensor if written else tensor.requires_grad_() * 1.0

        inside = given.map(recorded)
        results = inside(self.functions)
        agree(results, wanted, inside)
        for key, result in results.items():
            leaves = key == "params"
            assert all(r.requires_grad == leaves and r.is_leaf for r in flat(result))

    def test_inference_mode(self, variant: str) -> None:
        with torch.inference_mode():
            self.check(call(variant, [(9, 5), (7,)]))

    @over(*INVERSES, *GRAFTS)
    def test_out(self, variant: str) -> None:
        """Results go to ``out``, which is returned, or to new tensors: the same bits."""
        given = call(variant, [(9, 5), (33,), (3, 0)], dtype=STATE_DTYPES)
        fresh = given.copy().with_arguments(out=None)
        results, new = given(self.functions), fresh(self.functions)
        same(new, results)
        key = "factors" if variant in INVERSES else "directions"
        returned, out = flat(results[key]), flat(given.arguments["out"])
        assert all(a is b for a, b in zip(returned, out, strict=True))
        held = {t.data_ptr() for t in [*fresh.read, *fresh.written] if t.numel()}
        made = [t.data_ptr() for t in flat(new[key]) if t.numel()]
        assert len(set(made)) == len(made) and not held & set(made)


def _laid_out(given: Call, layout: str) -> Call:
    """The tensors of a call in a layout, those that are written in a writable one."""

    def change(key: str, tensor: Tensor) -> Tensor:
        name = layout
        if key in STRIDED_WRITTEN:
            # Parameters, momenta and second moments in layouts of their own.
            turn = WRITABLE_LAYOUTS.index(layout) if layout in WRITABLE_LAYOUTS else 1
            name = WRITABLE_LAYOUTS[(turn + STRIDED_WRITTEN.index(key)) % len(WRITABLE_LAYOUTS)]
        elif key in (*WRITTEN[given.name], *TABLES):
            return tensor
        elif key in ("stats", "factors") and layout not in ("sliced", "transposed", "negated"):
            return tensor
        return LAYOUTS[name](tensor)

    return given.map(change)


_of_both = pytest.mark.parametrize("gram", GRAMS)


class Gram(Implementation):
    """gram_ema_: the edges of its decay, and what it must not read."""

    @_of_both
    def test_decay_zero_does_not_read_the_statistics(self, gram: str) -> None:
        for zero in (0, 0.0, scalar(0.0), scalar(0.0, torch.float32)):
            given = call(gram, [*SHAPES[:5], *EMPTY_SHAPES]).with_arguments(decay=zero)
            wanted = given.double().with_arguments(decay=0.0)(reference)
            agree(given.map(_poisoned("stats", NAN))(self.functions), wanted, given)

    @_of_both
    def test_decay_one_does_not_look_at_the_tensor(self, gram: str) -> None:
        for one, value in ((1, NAN), (1.0, INF), (scalar(1.0), -INF), (scalar(1.0).float(), 1e30)):
            given = call(gram, [*SHAPES[:5], *EMPTY_SHAPES]).with_arguments(decay=one)
            before = given.copy()
            given.map(_poisoned("tensors", value))(self.functions)
            identical(given.written, before.written)

    @_of_both
    def test_a_tensor_of_zeros_has_no_gram_matrix(self, gram: str) -> None:
        given = call(gram, [(9, 5), (3, 4, 5)]).map(_poisoned("tensors", 0.0))
        before = given.copy()
        given(self.functions)
        for stat, old in zip(given.written, before.written, strict=True):
            close(stat, NUMBERS["gram_ema_"]["decay"] * old.double())

    def test_a_whitened_product_that_overflows_shows(self) -> None:
        """Its trace is infinite, by which a finite scale would be 0."""
        tensor, factors = torch.tensor([[1e25, 1.0], [1.0, 1.0]]), [[torch.full((2,), 1e15)] * 2]
        for shape in ((2,), (2, 2)):
            stats = [[torch.ones(shape) for _ in range(2)]]
            self.functions.gram_ema_(stats, [tensor], 0.9, factors)
            assert not any(bool(stat.isfinite().all()) for stat in stats[0])


def _poisoned(name: str, value: float) -> Callable[[str, Tensor], Tensor]:
    return lambda key, tensor: tensor.fill_(value) if key == name else tensor


class Inverses(Implementation):
    """damped_inverse and inverse_root: what fails, what is singular, what is out of range."""

    dtypes: ClassVar[Sequence[torch.dtype]] = STATE_DTYPES
    # How many ways to fail one call combines.
    failures_at_once = 24
    # Whether the implementation itself creates the factors where no `out` is given.
    creates_factors = True

    @over(*INVERSES)
    def test_failures(self, variant: str, dtype: torch.dtype) -> None:
        """``info`` names the mode, ``out`` keeps what it held, and the neighbours do not notice."""
        for kind in ("full", "diagonal"):
            ways = [(i, s) for i in range(3) for n, s in SPOILS.items() if _applies(n, kind)]
            ways = ways[:: max(1, len(ways) // self.failures_at_once)]
            shapes = [self.failing_shape, self.failing_shape[:1]] * len(ways)
            given = call(variant, shapes, kind, dtype)
            given.arguments["damping"] = 3.0  # few of Newton's iterations
            if variant in ROOTED:
                given.arguments["root"] = [1 + t % 3 for t in range(len(shapes))]
            sound = given.copy()
            for n, (mode, spoil) in enumerate(ways):
                stats, out = (given.arguments[key][2 * n] for key in ("stats", "out"))
                stats[mode] = spoil(stats[mode])
                out[:] = map(HELD[(n + mode) % len(HELD)], out)
            held = given.copy().arguments["out"]
            fresh = given.copy().with_arguments(out=None)
            with unchanged(given.read):
                results = given(self.functions)
            assert results["info"].tolist() == [c for mode, _ in ways for c in (mode + 1, 0)]
            wanted = sound.double()(reference)["factors"]
            for t in range(2 * len(ways)):
                for factor, old, value in zip(
                    results["factors"][t], held[t], wanted[t], strict=True
                ):
                    if t % 2 == 0:
                        identical(bits(factor), bits(old))
                    else:
                        close(factor, value, _root_tolerance(variant, dtype))
            if not self.creates_factors:
                continue
            new = fresh(self.functions)
            assert all(factor.isnan().all() for rows in new["factors"][::2] for factor in rows)
            for t in range(1, 2 * len(ways), 2):
                identical(new["factors"][t], results["factors"][t])

    @over(*INVERSES)
    def test_the_first_failure_counts(self, variant: str) -> None:
        given = call(variant, [(5, 9, 3)] * 4)
        spoiled = ([0, 2], [1, 2], [2], [0, 1, 2])
        for stats, modes in zip(given.arguments["stats"], spoiled, strict=True):
            for mode in modes:
                stats[mode].neg_()
        assert given(self.functions)["info"].tolist() == [1, 2, 3, 1]

    @over(*INVERSES)
    def test_zero_statistics(self, variant: str, kind: str, dtype: torch.dtype) -> None:
        """The damping alone; relative damping gives the identity. Also without elements.

        Every second tensor's statistics are not zero, but so small that they count as zero.
        """
        shapes = [*self.shapes, *EMPTY_SHAPES]
        given = call(variant, shapes, kind, dtype)
        for t, modes in enumerate(given.arguments["stats"]):
            for stat in modes:
                stat.mul_(1000 * torch.finfo(stat.dtype).tiny if t % 2 else 0)
        results = given(self.functions)
        assert not results["info"].any()
        for t, factors in enumerate(results["factors"]):
            power = given.arguments["root"][t] if "root" in given.arguments else 1
            value = 1.0 if variant in RELATIVE else 0.1 ** (-1 / power)
            for factor in factors:
                eye = value * torch.eye(len(factor), dtype=torch.float64)
                eye = eye if factor.dim() == 2 else eye.diagonal()
                close(factor, eye, _root_tolerance(variant, dtype))
                if variant == "damped_inverse relative":
                    identical(factor, eye.to(factor.dtype))

    @over(*INVERSES)
    def test_undamped(self, variant: str) -> None:
        """Damping 0: a regular matrix is inverted, a singular one is reported."""
        for kind in ("full", "diagonal"):
            given = call(variant, [(5,)] * 3, kind).with_arguments(damping=0.0)
            stats = given.arguments["stats"]
            wanted = given.double().only(0)(reference)["factors"][0][0]
            stats[1][0].zero_()
            stats[2][0][3] = 0
            if kind == "full":
                stats[2][0][:, 3] = 0
            results = given(self.functions)
            assert results["info"].tolist() == [0, *([0, 1] if variant in RELATIVE else [1, 1])]
            close(results["factors"][0][0], wanted)

    @over(*RELATIVE, "inverse_root")
    def test_units(self, variant: str) -> None:
        """Small and large units neither under- nor overflow float32 on the way."""
        for scale in (1e-28, 1e-15, 1e15, 1e30):
            given = call(variant, [(9, 33), (5, 9, 3)]).map(
                lambda key, s, scale=scale: s.mul_(scale) if key == "stats" else s
            )
            damping = 0.1 if variant in RELATIVE else 0.1 * scale
            self.check(given.with_arguments(damping=damping))

    @over(*INVERSES)
    def test_gram_matrices_of_one_gradient(self, variant: str, dtype: torch.dtype) -> None:
        """Statistics as training makes them: singular for the larger modes."""
        for shape, damping in (((9,), 1.0), ((33, 9), 1.0), ((7, 3, 2), 1e-2)):
            g = normal(shape, torch.float64)
            grams = [
                g.movedim(i, 0).flatten(1) if g.dim() > 1 else g[:, None] for i in range(g.dim())
            ]
            stats = [(x @ x.mT).tril() + (x @ x.mT).tril(-1).mT for x in grams]
            given = call(variant, [shape], "full", dtype)
            given.arguments["stats"] = [[s.to(dtype) for s in stats]]
            results = given.with_arguments(damping=damping)(self.functions)
            wanted = given.double().with_arguments(damping=damping)(reference)
            assert results["info"].tolist() == [0]
            # The largest eigenvalue bounds the condition: those of U_i are at most d_i c.
            largest = max(float(torch.linalg.eigvalsh(s)[-1]) for s in stats)
            tolerance = 4 * (1 + largest / damping) * torch.finfo(dtype).eps
            tolerance += NEWTON_OPERATOR if variant in ROOTED else 0
            for a, b in zip(flat(results["factors"]), flat(wanted["factors"]), strict=True):
                close(a, b, tolerance)

    @over(*INVERSES)
    def test_an_inverse_out_of_range_fails(self, variant: str) -> None:
        """1 / 1e-42 is not a float32."""
        stats = [[torch.full((3,), 1e-42)], [1e-42 * torch.eye(3)]]
        given = call(variant, [(3,)] * 2).with_arguments(stats=stats, damping=0.0)
        options = {"root": [1, 1]} if variant in ROOTED else {}
        given = given.with_arguments(
            **options, relative=False, out=[poisoned_like(rows) for rows in stats]
        )
        assert given(self.functions)["info"].tolist() == [1, 1]


def _applies(name: str, kind: str) -> bool:
    return kind == "full" or name in ("nan", "inf", "-inf", "negative")


def _root_tolerance(variant: str, dtype: torch.dtype) -> float | None:
    newton = variant in ROOTED and dtype == torch.float64
    return NEWTON_OPERATOR if newton else None


class DampedInverse(Implementation):
    """Which matrices damped_inverse takes for singular, and the sum of a long trace."""

    def test_singular_without_damping_fails(self) -> None:
        """The largest mode's Gram matrix has too small a rank; its last pivots are roundings."""
        for dtype in STATE_DTYPES:
            for shape, singular in (((20, 50), 2), ((70, 3, 9), 1)):
                for _ in range(10):
                    g = normal(shape, dtype)
                    rows = [g.movedim(i, 0).flatten(1) for i in range(len(shape))]
                    factors, info = self.functions.damped_inverse([[x @ x.mT for x in rows]], 0.0)
                    assert info.tolist() == [singular]
                    assert all(factor.isnan().all() for factor in factors[0])

    def test_ill_conditioned_is_not_singular(self) -> None:
        for exponent in (2, 6):
            spectrum = torch.logspace(0, -exponent, 65, dtype=torch.float64)
            stat = with_spectrum(spectrum).float()
            assert self.functions.damped_inverse([[stat]], 0.0)[1].tolist() == [0]

    def test_a_long_trace_of_equal_entries_is_exact(self) -> None:
        """Added one by one, 50,000 equal numbers would all be rounded to the same side."""
        d = 50_000
        stats = [torch.full((d,), 0.7, dtype=torch.float64), torch.full((1,), d * 0.7).double()]
        (factors, *_), info = self.functions.damped_inverse([stats], 0.1)
        assert info.tolist() == [0]
        close(factors[0], torch.full_like(stats[0], 1 / (math.sqrt(0.7) + 0.1)), tolerance=1e-15)


class InverseRoot(Implementation):
    """Which matrices have no root, the accuracy of those that have, and what is read."""

    def test_a_power_undoes_it(self) -> None:
        """A^p (S + eps I) = I."""
        roots = [1, 2, 3, 4, 5, 7, 16]
        given = call("inverse_root", [(9,)] * len(roots), "full", torch.float64)
        results = given.with_arguments(root=roots)(self.functions)
        eye = torch.eye(9, dtype=torch.float64)
        for root, (factor,), (stat,) in zip(
            roots, results["factors"], given.arguments["stats"], strict=True
        ):
            power = torch.linalg.matrix_power(factor, root)
            close(power @ (stat + 0.1 * eye), eye, root * NEWTON_OPERATOR)

    def test_rank_one(self) -> None:
        """Small entries hide the large eigenvalue, and max|M - I| increases at first."""
        for dtype in STATE_DTYPES:
            for d in self.rank_one_sizes:
                x = 1 + 0.1 * normal((d, 1), torch.float64)
                given = call("inverse_root", [(d,)] * 4).with_arguments(root=[1, 2, 4, 6])
                given.arguments["stats"] = [[(x @ x.mT).to(dtype)] for _ in range(4)]
                given.arguments["out"] = [poisoned_like(row) for row in given.arguments["stats"]]
                self.check(given)

    rank_one_sizes: ClassVar[Sequence[int]] = (2, 9, 65)

    def test_a_negative_eigenvalue(self) -> None:
        """However small: the iteration must not end on something that looks like a root."""
        stats = []
        for value in (-1e-3, -0.3, -2.0):
            spectrum = torch.linspace(0.5, 2, 5, dtype=torch.float64)
            spectrum[0] = value - 0.1
            stats += [[with_spectrum(spectrum).to(dtype)] for dtype in STATE_DTYPES]
        for root in (1, 2, 3):
            roots, out = [root] * len(stats), [poisoned_like(row) for row in stats]
            factors, info = self.functions.inverse_root(stats, 0.1, roots, out)
            assert info.tolist() == [1] * len(stats)


class Steps(Implementation):
    """preconditioned_step_ and grafted_directions_: numbers, counts and lengths."""

    @over(*STEPS)
    def test_each_number_does_its_part(self, variant: str) -> None:
        names = list(NUMBERS[variant.split()[0]])
        if variant in GRAFTS:
            names += ["second_decay", "eps"]
        for name in names:
            for value in (0.0, 0.3):
                shapes = [(65,), (9, 5), (9, 5), (3, 4, 5)]
                self.check(call(variant, shapes, dtype=DTYPES).with_arguments(**{name: value}))

    @over(*STEPS)
    def test_momentum_zero_is_the_gradient(self, variant: str) -> None:
        given = call(variant, [(9, 5)] * 4, dtype=DTYPES).with_arguments(momentum=0.0)
        given(self.functions)
        moved = zip(given.arguments["momenta"], given.arguments["grads"], strict=True)
        for momentum, grad in moved:
            identical(momentum, grad.to(momentum.dtype))

    @over("preconditioned_step_")
    def test_learning_rate_zero_moves_only_the_momenta(self, variant: str) -> None:
        given = call(variant, [(9, 5), (7,)] * 4, dtype=DTYPES).with_arguments(lr=0.0)
        before = given.copy().arguments
        given(self.functions)
        for key in ("params", "momenta"):
            for new, old in zip(given.arguments[key], before[key], strict=True):
                assert torch.equal(new, old) == (key == "params")

    @over("preconditioned_step_", "scaled_step_")
    def test_an_infinite_parameter_without_decay_stays(self, variant: str) -> None:
        given = call(variant, [(9, 5), (7,)] * 4, dtype=DTYPES)
        no_decay = {"decayed": [False] * 8} if variant == "scaled_step_" else {"weight_decay": 0.0}
        given = given.with_arguments(**no_decay)
        given = given.map(lambda key, t: t.fill_(-INF) if key == "params" else t)
        for result in given(self.functions)["params"]:
            assert bool((result == -INF).all())

    @over("preconditioned_step_")
    def test_a_momentum_that_is_not_finite_shows_at_learning_rate_zero(self, variant: str) -> None:
        """In every kind of mode: 0 NaN is NaN."""
        for kind in ("full", "diagonal"):
            for shape, lr in itertools.product(((9, 5), (5, 9, 3), (7,), (1, 4)), (0.0, 1e-200)):
                given = call(variant, [shape], kind).with_arguments(lr=lr)
                given.arguments["momenta"][0].flatten()[-1] = NAN
                wanted = given.copy()(reference)
                assert wanted["params"][0].isnan().any()
                found = given(self.functions)["params"]
                assert torch.equal(found[0].isnan(), wanted["params"][0].isnan())

    @over(*ADAM)
    def test_counts_of_each(self, variant: str) -> None:
        """Bias corrections belong to a tensor, and differ between the two moments."""
        counts = [(1.0, 1.0), (1.0, 50.0), (50.0, 1.0), (3.0, 7.0), (1e6, 1e7)]
        one = call(variant, [(9, 5)], dtype=torch.float64).arguments
        many = {k: [t.clone() for t in a * len(counts)] for k, a in one.items() if k in TENSORS}
        given = Call(variant.split()[0], {**one, **many, "factors": one["factors"] * len(counts)})
        given.arguments["counts"] = torch.tensor(counts, dtype=torch.float64)
        results = self.check(given)
        assert len(set(results["other_norms"].tolist())) == len(counts)

    @over("grafted_directions_", "grafted_directions_ Nesterov")
    def test_a_plain_sum_of_gradients_has_a_length(self, variant: str) -> None:
        self.check(call(variant, self.shapes).with_arguments(momentum=1.0))

    @over(*GRAFTS)
    def test_a_direction_of_zero_has_norm_zero(self, variant: str) -> None:
        for dtype in STATE_DTYPES:
            given = call(variant, [(9, 5)] * 4, dtype=dtype)
            given.arguments["factors"][1][0].zero_()
            for key in ("momenta", "second_moments", "grads"):
                if key in given.arguments:
                    given.arguments[key][2].zero_()
            results = self.check(given)
            assert [n > 0 for n in results["norms"].tolist()] == [True, False, False, True]
            assert [n > 0 for n in results["other_norms"].tolist()] == [True, True, False, True]
            assert not results["directions"][1].any() and results["momenta"][1].any()

    @over("grafted_directions_", "grafted_directions_ Nesterov")
    def test_lengths_whose_squares_leave_the_range(self, variant: str) -> None:
        """Of float32: 1e50 is above it, 1e-50 below."""
        for size in (1e25, 1e-25):
            given = call(variant, self.shapes).map(
                lambda key, t, size=size: t.mul_(size) if key in ("momenta", "grads") else t
            )
            self.check(given)

    @over(*ADAM)
    def test_defaults(self, variant: str) -> None:
        """A second decay of 0.99 and an eps of 1e-8, here on numbers so small that eps counts."""
        given = call(variant, [(9, 5)], dtype=torch.float64)
        for key, size in (("momenta", 1e-8), ("grads", 1e-8), ("second_moments", 1e-16)):
            given.arguments[key][0].mul_(size)
        named = given.double().with_arguments(second_decay=0.99, eps=1e-8)
        agree(given(self.functions), named(reference), given)


TENSORS = ("momenta", "grads", "second_moments", "out")
