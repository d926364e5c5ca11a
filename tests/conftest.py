"""Fixtures of all tests: a fixed seed, one thread, bitwise snapshots."""

import copy
import dataclasses
import importlib.util
import os
import random
import signal
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

# pytest rewrites the asserts of these modules as it does those of tests.
pytest.register_assert_rewrite("cases", "operators", "contract", "drawn", "failing_memory")
# Property tests draw new examples at every run; a failure prints the seed that reproduces it.
if importlib.util.find_spec("hypothesis"):
    from hypothesis import HealthCheck, Phase, settings

    settings.register_profile(
        "tnt",
        max_examples=int(os.environ.get("TNT_FUZZ_EXAMPLES") or 20),
        print_blob=True,
        deadline=None,
        phases=[phase for phase in Phase if phase != Phase.explain],
        # Fixtures need no reset between examples, and the examples are large on purpose.
        suppress_health_check=[
            HealthCheck.function_scoped_fixture,
            HealthCheck.too_slow,
            HealthCheck.data_too_large,
        ],
    )
    settings.load_profile("tnt")


# Folders whose tests compile, interpret, or start processes: only `make test-all` runs them.
SLOW = ("distributed", "gpu", "system")
TESTS = Path(__file__).parent


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave these folders unread where no slow test is to run: they import Triton, for one."""
    quick = config.getoption("markexpr") == "not slow"
    return (
        True if quick and collection_path.parent == TESTS and collection_path.name in SLOW else None
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests as slow by their folder."""
    for item in items:
        if item.path.relative_to(TESTS).parts[0] in SLOW:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    """Every test starts from the same global generators."""
    torch.manual_seed(0)
    random.seed(0)


@pytest.fixture
def ctrl_c() -> Iterator[Any]:
    """Python's own handler of Ctrl-C, which a shell's background takes away."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield signal.default_int_handler
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """One thread: small tensors gain nothing from two. Tests about threads set their own."""
    torch.set_num_threads(1)


@pytest.fixture
def real_data() -> Callable[[str], Path]:
    """The folder of a data set under TNT_DATA, or under ../shared/data; skips without it."""

    def folder(name: str) -> Path:
        root = Path(os.environ.get("TNT_DATA", TESTS.parents[1] / "shared" / "data"))
        if not (root / name).is_dir():
            pytest.skip(f"no {name}: set TNT_DATA to its parent folder")
        return root / name

    return folder


class FixedLabels:
    """A callable likelihood: mean cross entropy at the labels the test has put in `current`."""

    def __init__(self) -> None:
        self.current = torch.empty(0, dtype=torch.int64)

    def __call__(self, output: Tensor) -> Tensor:
        """-log p(current | output), mean over the rows."""
        return torch.nn.functional.cross_entropy(output, self.current)


@pytest.fixture
def fixed_labels() -> FixedLabels:
    """The likelihood whose sampled labels the test sets before each observation."""
    return FixedLabels()


# The tests reach into the optimizers here and nowhere else, so that a rename is one edit.


def observation_count(optimizer: Any) -> int:
    """How many outputs TNT has observed since its last step."""
    return int(optimizer._observed.count)


def observed_gradients(optimizer: Any) -> dict[Tensor, Tensor]:
    """Copies of the sums of sampled gradients that TNT holds for its next step, by parameter."""
    return {p: g.clone() for p, g in optimizer._observed.totals.items()}


@pytest.fixture
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Directions and diagnostics are computed for a few parameters at a time, not for all."""
    monkeypatch.setattr("tnt_optim.modes._BUCKET", 20)
    monkeypatch.setattr("tnt_optim.diagnostics._STACK", 50)


@pytest.fixture
def slow_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports of failures stay on the device until something waits for them, as on a GPU."""
    monkeypatch.setattr("tnt_optim.failures.Delivery.arrived", lambda self: False)


class Snapshot:
    """A copy of parameters, their gradients and the optimizer's whole state, compared bit for bit.

    Parameters that are frozen or without gradient are included, and what the optimizer holds
    between ``observe`` and ``step``; NaN equals NaN.
    """

    def __init__(self, params: Iterable[Tensor], optimizer: torch.optim.Optimizer) -> None:
        self.params = list(params)
        self.optimizer = optimizer
        self.content: dict[str, Any] = copy.deepcopy(self._content())

    def _content(self) -> dict[str, Any]:
        return {
            "params": [p.detach() for p in self.params],
            "grads": [p.grad for p in self.params],
            "optimizer": self.optimizer.state_dict(),
            "held": self._by_number(getattr(self.optimizer, "_observed", None)),
        }

    def _by_number(self, held: Any) -> Any:
        """The same with numbers in place of parameters, as a copied parameter is another key."""
        if dataclasses.is_dataclass(held):
            # Not `called`, the layers of a forward pass: that one changes without observe().
            left_out = ("called", "names", "layers", "weights", "hooks")
            return {k: self._by_number(v) for k, v in vars(held).items() if k not in left_out}
        groups = self.optimizer.param_groups
        numbers = {id(p): n for n, p in enumerate(p for g in groups for p in g["params"])}
        if isinstance(held, dict):
            return {numbers.get(id(k), k): self._by_number(v) for k, v in held.items()}
        if isinstance(held, list):
            return [self._by_number(item) for item in held]
        if isinstance(held, set):
            return sorted(numbers.get(id(k), k) for k in held)
        return held

    def assert_unchanged(self) -> None:
        """The parameters and the optimizer are to the bit what they were."""
        _assert_same(self.content, self._content(), "")

    def assert_equals(self, other: "Snapshot") -> None:
        """Two runs are at the same point, to the bit."""
        _assert_same(self.content, other.content, "")


def _assert_same(a: object, b: object, path: str) -> None:
    assert type(a) is type(b), path
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        assert a.dtype == b.dtype and a.shape == b.shape, path
        assert torch.equal(a.nan_to_num(nan=12345.0), b.nan_to_num(nan=12345.0)), path
    elif isinstance(a, dict) and isinstance(b, dict):
        assert list(a) == list(b), path
        for key in a:
            _assert_same(a[key], b[key], f"{path}[{key!r}]")
    elif isinstance(a, list | tuple) and isinstance(b, list | tuple):
        assert len(a) == len(b), path
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            _assert_same(x, y, f"{path}[{i}]")
    else:
        assert a == b or (a != a and b != b), path
