"""Mistakes that every operator must refuse, by the argument's name, before it writes anything.

Each mistake is made through the public functions, with C++ and with Python's own checks (which
serve where there is no kernel), and, where it concerns memory safety, through torch.ops.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from cases import flat, normal, scalar, unchanged
from operators import NUMBERS, RELATIVE, VARIANTS, WRITTEN, Call, call, flat_arguments
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import tnt_kernels
from tnt_kernels import calls

Change = Callable[[dict[str, Any]], None]
Error = type[Exception] | tuple[type[Exception], ...]

# One call of (9, 5) in float32, with a diagonal and a full mode, and of (3,) in float64.
SHAPES = [(9, 5), (3,)]
# What PyTorch makes of a refusal in C++. Python does not read the values of tensors.
BY_THE_KERNEL = (RuntimeError if torch.__version__ >= "2.15" else ValueError,)
# The argument that says how many tensors there are, and their shapes.
FIRST = {
    **dict.fromkeys(("gram_ema_", "mode_products"), "tensors"),
    **dict.fromkeys(("preconditioned_step_", "scaled_step_"), "params"),
}
OPERATORS = [
    v for v in VARIANTS if v not in (*RELATIVE, "grafted_directions_") and "Nesterov" not in v
]


def good(variant: str) -> Call:
    return call(variant, SHAPES, dtype=(torch.float32, torch.float64)).map(
        lambda key, tensor: torch.rand_like(tensor) if key == "out" else tensor
    )


@dataclass
class Mistake:
    """What is wrong, how to make it of good arguments, and the error that names it."""

    name: str
    change: Change
    error: Error
    message: str
    direct: bool = False  # torch.ops refuses it too


def entry(argument: str, t: int, value: Any, i: int | None = None) -> Change:
    """Puts ``value``, or what it makes of the old entry, at argument[t] or argument[t][i]."""

    def change(arguments: dict[str, Any]) -> None:
        holder, index = arguments[argument], t
        if i is not None:
            holder, index = holder[t], i
        holder[index] = value(holder[index]) if callable(value) else value

    return change


def instead(**wrong: Any) -> Change:
    return lambda arguments: arguments.update(wrong)


def first_only(argument: str) -> Change:
    return lambda arguments: arguments.update({argument: arguments[argument][:1]})


def of_lists(name: str, argument: str, alone: bool) -> Iterator[Mistake]:
    """In a list of tensors; ``alone``: no other argument says their shapes."""
    yield Mistake("no list", instead(**{argument: normal((9, 5))}), TypeError, "{0} .*list")
    yield Mistake("a number", entry(argument, 1, 2.0), TypeError, r"{0}\[1\] .*float")
    yield Mistake("None", entry(argument, 1, None), TypeError, r"{0}\[1\] .*None")
    for dtype in (torch.int32, torch.complex64, torch.bool):
        what = str(dtype).removeprefix("torch.")
        wrong = entry(argument, 0, lambda old, d=dtype: old.to(d))
        yield Mistake(what, wrong, ValueError, rf"{{0}}\[0\] .*{what}", True)
    yield Mistake("sparse", entry(argument, 0, Tensor.to_sparse), ValueError, r"{0}\[0\] .*sparse")
    yield Mistake("0-dim", entry(argument, 1, scalar(1.0)), ValueError, r"{0}\[1\] ")
    yield Mistake("too few", first_only(argument), ValueError, r"\w+ .*(\(1\), got 2|got 1)$")
    yield Mistake("empty", instead(**{argument: []}), ValueError, r"\w+ .*(\(0\), got 2|got 0)$")
    meta = entry(argument, 0, lambda old: old.to("meta"))
    yield Mistake("elsewhere", meta, ValueError, r"\w+ .*(cpu.*meta|meta.*cpu)")
    if alone:  # its modes are then wrong
        wider = entry(argument, 0, lambda old: normal((old.shape[0] + 1, *old.shape[1:])))
        message = r"(stats|factors|momenta|grads|directions|second_moments)\["
        yield Mistake("shape", wider, ValueError, message, True)
        return
    yield Mistake("shape", entry(argument, 0, normal((5, 9))), ValueError, r"{0}\[0\] .*\(5, 9\)")
    if argument != "grads":
        half = entry(argument, 0, lambda old: old.bfloat16())
        yield Mistake("half", half, ValueError, r"{0}\[0\] must be .*bfloat16", True)
        yield Mistake("single", entry(argument, 1, Tensor.float), ValueError, r"{0}\[1\] .*float32")


def of_modes(name: str, argument: str) -> Iterator[Mistake]:
    """In a list with a list of modes for each tensor."""
    either = (TypeError, ValueError)
    yield Mistake("row is a tensor", entry(argument, 1, torch.eye(3)), either, r"{0}\[1\] ")
    yield Mistake("no modes", entry(argument, 1, []), ValueError, r"{0}\[1\] .*got (0|\[\])")
    yield Mistake("a number", entry(argument, 0, 1.0, 1), TypeError, r"{0}\[0\]\[1\] .*float")
    yield Mistake("None", entry(argument, 0, None, 1), TypeError, r"{0}\[0\]\[1\] .*None")
    yield Mistake("too few", first_only(argument), ValueError, r"\w+ .*(\(1\), got 2|got 1)$")
    at = r"{0}\[0\]\[1\] "
    for what, wrong, came in (
        ("0-dim", scalar(1.0, torch.float32), ""),
        ("size", torch.eye(4), r"got \(4, 4\)"),
        ("not square", torch.ones(5, 4), r"got \(5, 4\)"),
        ("three dimensions", torch.ones(5, 5, 5), r"got \(5, 5, 5\)"),
        ("half", torch.eye(5).half(), "float16"),
        ("double", torch.eye(5).double(), "float64"),
        ("integers", torch.eye(5).int(), "int32"),
        ("complex", torch.eye(5).cfloat(), "complex64"),
    ):
        direct = what not in ("size", "0-dim")
        if name in ("damped_inverse", "inverse_root") and argument == "stats":
            # Statistics may have any size, but that of `out` is then another.
            came, direct = came if what != "size" else r"got", False
            message = r"(stats|out)\[0\]\[1\] .*" + came
        else:
            message = at + ".*" + came
        yield Mistake(what, entry(argument, 0, wrong, 1), ValueError, message, direct)
    meta = entry(argument, 0, lambda old: old.to("meta"), 1)
    yield Mistake("elsewhere", meta, ValueError, r"\w+ .*(cpu.*meta|meta.*cpu)")
    sparse = entry(argument, 0, torch.eye(5).to_sparse(), 1)
    message = r"{0}\[0\]\[1\] .*(sparse|memory of its own)"
    yield Mistake("sparse", sparse, ValueError, message)
    if argument in WRITTEN[name]:
        strided = entry(argument, 0, torch.rand(5, 10)[:, ::2], 1)
        yield Mistake("strided", strided, ValueError, at + "must be contiguous, got", True)


def of_memory(name: str, argument: str, lists: list[str]) -> Iterator[Mistake]:
    """In an argument that is written: entries that share memory, or have none."""
    i = 0 if name != "mode_products" and argument in ("stats", "out") else None
    i = None if name == "grafted_directions_" else i
    one = rf"{argument}\["
    expanded = entry(argument, 0, lambda old: old[:1].expand(old.shape), i)
    yield Mistake("expanded", expanded, ValueError, one, True)
    matrix = None if i is None else 1
    window = entry(argument, 0, lambda old: torch.rand(100).as_strided(old.shape, (2, 1)), matrix)
    yield Mistake("sliding window", window, ValueError, one, True)
    # PyTorch's dispatcher refuses these two with words of its own.
    zero = entry(argument, 0, lambda old: torch._efficientzerotensor(tuple(old.shape)), i)
    yield Mistake("zero tensor", zero, (ValueError, RuntimeError), f"{one}|ZeroTensors", True)
    negated = entry(argument, 0, lambda old: torch.complex(old, -old).conj().imag, i)
    yield Mistake("negated", negated, (ValueError, RuntimeError), f"{one}| fallback", True)

    def overlap(arguments: dict[str, Any]) -> None:
        holder = arguments[argument] if i is None else arguments[argument][0]
        if i is None:
            holder[1] = normal((3,))  # of one dtype
        first, second = (t.shape for t in holder[:2])
        memory = torch.randn(math.prod(first) + math.prod(second) - 1)
        holder[0] = memory[: math.prod(first)].view(first)
        holder[1] = memory[math.prod(first) - 1 :].view(second)
        if i is None:
            for key, others in arguments.items():
                if key not in (argument, "counts", "decayed") and isinstance(others, list):
                    others[1] = [torch.eye(3)] if key == "factors" else normal((3,))

    yield Mistake("overlapping", overlap, ValueError, argument, True)
    for other in lists:
        if other != argument:

            def share(arguments: dict[str, Any], other: str = other) -> None:
                memory = torch.randn(100)
                for key in (argument, other):
                    holder = arguments[key]
                    while isinstance(holder[0], list):
                        holder = holder[0]
                    holder[0] = memory[: holder[0].numel()].view(holder[0].shape)

            yield Mistake(f"is {other}", share, ValueError, f"({argument}|{other})", True)


def of_numbers(name: str) -> Iterator[Mistake]:
    """In arguments that are numbers or 0-dim tensors."""
    for argument in NUMBERS[name]:
        above = [1.1] if argument == "decay" else []
        for value in (-0.1, math.nan, math.inf, -math.inf, *above):
            message = f"{argument} must be .*got {value}$"
            yield Mistake(f"{argument} {value}", instead(**{argument: value}), ValueError, message)
            tensor = instead(**{argument: scalar(value)})
            message = f"{argument} must be .*got"
            yield Mistake(f"{argument} tensor {value}", tensor, BY_THE_KERNEL, message, True)
        for what, wrong, error, came in (
            ("(1,)", torch.ones(1), ValueError, r"got \(1,\)"),
            ("elsewhere", torch.ones((), device="meta"), ValueError, "got meta"),
            ("None", None, TypeError, "None"),
            ("text", "0.5", TypeError, "(str|'0.5')"),
        ):
            message = f"{argument} must be .*{came}"
            yield Mistake(f"{argument} {what}", instead(**{argument: wrong}), error, message)


def of_roots() -> Iterator[Mistake]:
    for root in (0, -2, True, [2, 0], [2, 2.0], [2, None], 2.0, None, "2"):
        message = "root must .*got"
        yield Mistake(f"root {root!r}", instead(root=root), (TypeError, ValueError), message)
    for count in (1, 3):
        message = rf"root must have .*\(2\), got {count}"
        yield Mistake(f"{count} roots", instead(root=[2] * count), ValueError, message)


def of_grafting() -> Iterator[Mistake]:
    counts = torch.ones(2, 2, dtype=torch.float64)
    for what, wrong, came in (
        ("of one", counts[:1], r"\(2, 2\) .*got \(1, 2\)"),
        ("of one moment", counts[:, 0], r"\(2, 2\) .*got \(2,\)"),
        ("single", counts.float(), "float64, got .*float32"),
        ("integers", counts.long(), "float64, got .*int64"),
        ("sparse", counts.to_sparse(), "got .*sparse_coo"),
        ("zero", counts.clone().fill_diagonal_(0), "at least 1, got 0$"),
        ("below one", counts - 0.5, "at least 1, got 0.5"),
        ("NaN", counts * math.nan, "at least 1, got nan"),
        ("elsewhere", counts.to("meta"), "cpu.*meta"),
    ):
        message = f"counts (must )?.*{came}"
        yield Mistake(f"counts {what}", instead(counts=wrong), ValueError, message)
    yield Mistake("counts a list", instead(counts=[[1.0] * 2] * 2), TypeError, "counts .*got list")
    for missing, there in (("second_moments", "counts"), ("counts", "second_moments")):
        message = f"second_moments .*counts .*got {there}"
        yield Mistake(f"no {missing}", instead(**{missing: None}), ValueError, message)
    for one in (1.0, scalar(1.0)):
        message = r"momentum must be .*got 1"
        error = ValueError if isinstance(one, float) else BY_THE_KERNEL
        yield Mistake(f"momentum {one}", instead(momentum=one), error, message)
    for name, values in (("second_decay", (-0.1, 1.0)), ("eps", (-1e-8,))):
        for value in (*values, math.nan, math.inf, -math.inf):
            message = f"{name} must be .*got {value}$"
            yield Mistake(f"{name} {value}", instead(**{name: value}), ValueError, message)
        for wrong, came in ((None, "None"), ("0.5", "'0.5'"), (scalar(0.5), "a tensor")):
            message = f"{name} must be .*{came}"
            yield Mistake(f"{name} {wrong!r}", instead(**{name: wrong}), TypeError, message)
    strided = entry("out", 0, normal((5, 9)).mT)
    message = r"out\[0\] must be contiguous, got \(1, 9\)"
    yield Mistake("out strided", strided, ValueError, message, True)


def of_scaling() -> Iterator[Mistake]:
    scales = torch.ones(2, dtype=torch.float64)
    for what, wrong, came in (
        ("of one", scales[:1], r"\(?\[?2,?\)?\]? .*got [\(\[]1"),
        ("single", scales.float(), "float64.*got .*([Ff]loat)"),
        ("elsewhere", scales.to("meta"), "cpu.*meta"),
    ):
        yield Mistake(f"scales {what}", instead(scales=wrong), ValueError, f"scales .*{came}")
    yield Mistake("scales a list", instead(scales=[1.0] * 2), TypeError, "scales .*got list")
    message = "params must be .* got NoneType"
    yield Mistake("params None", instead(params=None), TypeError, message, True)
    short = instead(decayed=[True])
    yield Mistake("decayed short", short, ValueError, r"decayed .*\(2\), got 1", True)


def mistakes() -> Iterator[Any]:
    """All, as parameters of a test."""
    for variant in OPERATORS:
        given = good(variant)
        name, lists = given.name, given.lists
        found: list[tuple[str, Mistake]] = []
        for argument in lists:
            nested = isinstance(given.arguments[argument][0], list)
            first = argument == FIRST.get(name, "momenta")
            made = of_modes(name, argument) if nested else of_lists(name, argument, first)
            found += [(argument, mistake) for mistake in made]
        for argument in WRITTEN[name]:
            found += [(argument, mistake) for mistake in of_memory(name, argument, lists)]
        others = [of_numbers(name)]
        others += [of_roots()] if name == "inverse_root" else []
        others += [of_grafting()] if name == "grafted_directions_" else []
        others += [of_scaling()] if name == "scaled_step_" else []
        found += [("", mistake) for mistake in itertools.chain(*others)]
        for argument, mistake in found:
            identity = f"{name}-{argument} {mistake.name}".replace(" -", "-")
            yield pytest.param(variant, argument, mistake, id=identity)


@pytest.mark.parametrize(("variant", "argument", "mistake"), list(mistakes()))
def test_refused(
    variant: str, argument: str, mistake: Mistake, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = "^(" + mistake.message.replace("{0}", argument) + ")"
    for caller in ("C++", "Python", "torch.ops"):
        if caller == "torch.ops" and not mistake.direct:
            continue
        if caller == "Python":
            monkeypatch.setattr(calls, "in_extension", lambda name: False)
            if mistake.error in (ValueError, TypeError):  # before a kernel is called
                monkeypatch.setattr(calls, "_op", lambda name: pytest.fail)
        elif caller == "torch.ops":
            monkeypatch.undo()
        given = good(variant)
        mistake.change(given.arguments)
        with unchanged(given.arguments):
            if caller == "torch.ops":
                with pytest.raises((ValueError, RuntimeError)):
                    getattr(torch.ops.tnt_kernels, given.name)(*flat_arguments(given))
            else:
                with pytest.raises(mistake.error, match=message):
                    given()


@pytest.mark.parametrize("variant", VARIANTS)
def test_good_arguments_are_not_refused(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mistakes are made of these."""
    given = good(variant)
    given.copy()()
    getattr(torch.ops.tnt_kernels, given.name)(*flat_arguments(given.copy()))
    monkeypatch.setattr(calls, "in_extension", lambda name: False)
    given()


def halves(width: int) -> dict[str, Any]:
    """A step on the first ``width`` columns of a buffer, and on all but the first three."""
    memory = torch.randn(4, 8)
    params = [memory[:, :width], memory[:, 3:]]
    return {
        "params": params,
        "momenta": [torch.zeros(p.shape) for p in params],
        "grads": [torch.ones(p.shape) for p in params],
        "factors": [[torch.eye(d) for d in p.shape] for p in params],
        **{"lr": 0.5, "momentum": 0.9, "weight_decay": 0.0},
    }


@pytest.mark.parametrize("served", ["C++", "Python"])
def test_columns_of_a_buffer(served: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns side by side share no memory; columns that overlap are refused."""
    if served == "Python":
        monkeypatch.setattr(calls, "in_extension", lambda name: False)
    tnt_kernels.preconditioned_step_(**halves(3))
    arguments = halves(5)
    with unchanged(flat(list(arguments.values())[:4])), pytest.raises(ValueError, match="share"):
        tnt_kernels.preconditioned_step_(**arguments)


def test_a_tensor_is_no_list_of_its_rows() -> None:
    square = torch.eye(2)
    for name, wrong in {
        r"stats\[0\]": lambda: tnt_kernels.damped_inverse([square], 0.1),
        "stats": lambda: tnt_kernels.inverse_root(torch.stack([square]), 0.1, 2),
        r"factors\[0\]": lambda: tnt_kernels.mode_products([torch.ones(2, 2)], [square]),
        "tensors": lambda: tnt_kernels.mode_products(torch.ones(1, 2), [[square]]),
        "params": lambda: tnt_kernels.scaled_step_(square, [torch.ones(2)] * 2, 0.1, 0.0),
    }.items():
        with unchanged([square]), pytest.raises((TypeError, ValueError), match=f"^{name} must"):
            wrong()


@pytest.mark.parametrize("served", ["C++", "Python"])
def test_memory_that_is_written_twice_is_named(
    served: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if served == "Python":
        monkeypatch.setattr(calls, "in_extension", lambda name: False)
    a, b, c = (torch.zeros(2, 2) for _ in range(3))
    with pytest.raises(ValueError, match=r"stats\[1\]\[0\] must not share .* with stats\[0\]\[1\]"):
        tnt_kernels.gram_ema_([[a, b], [b, c]], [torch.ones(2, 2)] * 2, 0.5)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_a_quantized_gradient_is_refused_before_anything_changes() -> None:
    params = [torch.ones(2, 2) for _ in range(2)]
    grads = [torch.ones(2, 2), torch.quantize_per_tensor(torch.ones(2, 2), 0.1, 0, torch.qint8)]
    momenta, factors = [torch.zeros(2, 2) for _ in range(2)], [[torch.eye(2)] * 2] * 2
    with unchanged(params, momenta), pytest.raises(ValueError, match=r"grads\[1\] must be"):
        tnt_kernels.preconditioned_step_(params, momenta, grads, factors, 0.1, 0.9, 0.0)


def test_fake_tensors_are_checked() -> None:
    with FakeTensorMode(), pytest.raises(ValueError, match=r"stats\[0\]\[1\] must be \(4, 4\)"):
        stats = [[torch.eye(3), torch.eye(7)]]
        tnt_kernels.gram_ema_(stats, [torch.ones(3, 4)], 0.5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_lazy_copy_gets_memory_of_its_own(variant: str) -> None:
    """What an operator writes does not reach the tensor that was copied."""
    given = good(variant)
    for name in given.arguments.keys() & set(WRITTEN[given.name]):
        row = given.arguments[name]
        while isinstance(row[0], list):
            row = row[0]
        first, row[0] = row[0], torch._lazy_clone(row[0])
        before = first.clone()
        given()
        assert torch.equal(first, before) and not torch.equal(row[0], before)


def test_a_tensor_too_large_for_the_blas_is_refused() -> None:
    """The BLAS counts in 32 bits; nothing of the 8 GB is touched."""
    tensor = torch.zeros(1).expand(2, 2**31)
    factors = [torch.eye(2), torch.ones(1).expand(2**31)]
    message = r"factors\[0\] must be diagonal, \(2,\): 2147483648"
    with pytest.raises(BY_THE_KERNEL, match=message):
        tnt_kernels.mode_products([tensor], [factors])


@pytest.mark.parametrize("name", ["damped_inverse", "inverse_root"])
@pytest.mark.parametrize(
    "stat", [torch.eye(2).long(), torch.eye(2).to_sparse(), torch.eye(2).to_mkldnn()]
)
def test_statistics_that_have_no_factors_are_named(name: str, stat: Tensor) -> None:
    """Also without ``out``, whose tensors would be like them."""
    root = (2,) if name == "inverse_root" else ()
    with pytest.raises(ValueError, match=r"^stats\[0\]"):
        getattr(tnt_kernels, name)([[stat]], 0.1, *root)


def test_orders_that_overflow_are_refused() -> None:
    stats, orders = [torch.eye(3)] * 2, [2**63 - 1, 2**63 - 1, 4]
    out = [torch.empty(3, 3) for _ in stats]
    for name, last in (("damped_inverse", [False]), ("inverse_root", [[1, 1, 1], False])):
        operator = getattr(torch.ops.tnt_kernels, name)
        with pytest.raises(BY_THE_KERNEL, match="orders must sum to the length of stats, 2, got"):
            operator(out, stats, orders, scalar(1.0), *last)


# torch.ops alone: the flat lists must have as many statistics as the tensors have modes.
FLAT_MISTAKES: list[tuple[list[Tensor], list[Tensor], str]] = [
    ([], [torch.ones(3)], "stats .*1 entries, got 0"),
    ([torch.eye(3)], [torch.ones(3, 2)], "stats .*2 entries, got 1"),
    ([torch.eye(3)] * 2, [torch.ones(3)], "must have 1 entries, got 2"),
    ([torch.ones(())], [torch.ones(3)], r"stats\[0\] .*got \[\]"),
    ([torch.ones(2)], [torch.ones(3)], r"stats\[0\] .*got \[2\]"),
    ([torch.eye(3), torch.eye(4)], [torch.ones(3), torch.ones(2)], r"stats\[1\] must be \(2, 2\)"),
]


@pytest.mark.parametrize(("stats", "tensors", "message"), FLAT_MISTAKES)
def test_flat_lists(stats: list[Tensor], tensors: list[Tensor], message: str) -> None:
    with unchanged(flat([stats, tensors])), pytest.raises(BY_THE_KERNEL, match=message):
        torch.ops.tnt_kernels.gram_ema_(stats, tensors, scalar(0.5), [])


def test_a_tensor_has_at_most_64_modes() -> None:
    """In C++ and in the check that writes the message."""
    tensor = torch.ones([1] * 65)
    with pytest.raises(ValueError, match=r"tensors\[0\] must have at most 64 modes, got 65"):
        tnt_kernels.mode_products([tensor], [[torch.ones(1)] * 65])
    (product,) = tnt_kernels.mode_products([tensor[0]], [[torch.ones(1)] * 64])
    assert torch.equal(product, tensor[0])
