"""The optimizers that one suite tests, with small models, their batches and their training."""

import functools
import io
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from conftest import Snapshot
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

from tnt_optim import KFAC, TNT, Shampoo, with_fallback

# The optimizers that precondition mode by mode, by name.
FACTORED: dict[str, Callable[..., Any]] = {
    "sampled": functools.partial(TNT.paper, likelihood="categorical"),
    "empirical": functools.partial(TNT.paper, likelihood=None),
    "shampoo": Shampoo.paper,
}
EVERY = (*FACTORED, "kfac", "fallback")  # "fallback": TNT with AdamW for vectors
METHODS = (*FACTORED, "kfac", "eigenbasis")  # "eigenbasis": KFAC with inverse="eigenbasis"
SAMPLING = ("sampled", "kfac", "eigenbasis")  # statistics come from observe(), not from .grad
SETTINGS: dict[str, Any] = {"lr": 0.02, "damping": 0.1, "stat_interval": 2, "inverse_interval": 4}
# What TNT has by default only, and the settings that it needs.
EARLY: dict[str, Any] = {
    **{"likelihood": None, "nesterov": True, "early_roots": True},
    **{"relative_damping": True, "graft": "adam"},
}
factored = pytest.mark.parametrize("name", FACTORED)
every = pytest.mark.parametrize("name", EVERY)
tnt_and_kfac = pytest.mark.parametrize("name", ["sampled", "kfac"])
NO_FAILURES = {"skipped_statistics": 0, "failed_inverses": 0, "unreached": 0}

Batches = Callable[[int], tuple[Tensor, Tensor]]


# The loss is always a cross entropy.
any_likelihood = pytest.mark.filterwarnings("ignore:likelihood '(gaussian|bernoulli)' does not fit")


def made(name: str, model: nn.Module, *, named: bool = False, **settings: Any) -> Any:
    """The optimizer of this name for the parameters of a model."""
    chosen = {**SETTINGS, **settings}
    if name in ("kfac", "eigenbasis"):
        inverse = {"inverse": name} if name == "eigenbasis" else {}
        return KFAC.paper(model, **{"likelihood": "categorical", **chosen, **inverse})
    params: list[Any] = [(n, p) if named else p for n, p in model.named_parameters()]
    if name != "fallback":
        return FACTORED[name](params, **chosen)
    common = {k: chosen.get(k, 0.0) for k in ("lr", "weight_decay", "maximize")}
    small = [p.dim() < 2 for p in model.parameters()]
    main = FACTORED["sampled"](
        [p for p, is_small in zip(params, small, strict=True) if not is_small], **chosen
    )
    rest = [p for p, is_small in zip(params, small, strict=True) if is_small]
    return with_fallback(main, torch.optim.AdamW(rest, **common))


# ------------------------------------------------------------------ models and their batches


def net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Two linear layers with biases, for ``batch``."""
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).to(dtype)


def conv_net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """A convolution, batch norm and a linear layer, for ``images``."""
    body = [nn.Conv2d(2, 4, 2, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*body, nn.Linear(16, 4)).to(dtype)


class ValueHead(nn.Module):
    """Logits, and a second output that only the loss uses."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.policy, self.value = nn.Linear(4, 6), nn.Linear(6, 3), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.body(x))
        return self.policy(hidden), self.value(hidden)


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Inputs (8, 4) and labels, which depend on the step alone."""
    rng = torch.Generator().manual_seed(100 + step)
    x = torch.randn(8, 4, generator=rng, dtype=torch.float64)
    return x, torch.randint(3, (8,), generator=rng)


def images(step: int, rows: int = 32) -> tuple[Tensor, Tensor]:
    """Images (rows, 2, 3, 3), which depend on the step alone, and labels computed from them."""
    x = torch.randn(rows, 2, 3, 3, generator=torch.Generator().manual_seed(100 + step))
    return x, x.flatten(1)[:, :4].argmax(1)


def no_memory(*arguments: Any) -> Any:
    """Stands in for a function that runs out of memory."""
    raise torch.OutOfMemoryError("no memory")


def backward(
    model: nn.Module, opts: Any, step: int, sign: float = 1.0, data: Batches = batch
) -> Tensor:
    """One optimizer, or several, observe; then the backward of the loss times ``sign``."""
    x, y = data(step)
    output = model(x.to(next(model.parameters()).dtype))
    for opt in opts if isinstance(opts, list) else [opts]:
        opt.zero_grad()
        if hasattr(opt, "observe"):  # torch's optimizers have none
            opt.observe(output)
    loss = cross_entropy(output, y)
    (sign * loss).backward()
    return loss


def train(
    model: nn.Module,
    opt: Any,
    steps: Iterable[int],
    schedulers: Sequence[Any] = (),
    data: Batches = batch,
) -> list[float]:
    """Takes steps; returns the loss before each."""
    losses = []
    for step in steps:
        loss = backward(model, opt, step, data=data)
        opt.step()
        losses.append(float(loss.detach()))
        for scheduler in schedulers:
            scheduler.step()
    return losses


def warm_start(opt: Any, model: nn.Module, count: int = 3, data: Batches = batch) -> None:
    """Starts the statistics from batches that training does not use."""
    dtype = next(model.parameters()).dtype
    main = getattr(opt, "main", opt)
    is_sampled = isinstance(main, KFAC) or getattr(main, "likelihood", None) is not None
    pairs = ((model(x.to(dtype)), y) for x, y in map(data, range(900, 900 + count)))
    opt.warm_start((out if is_sampled else cross_entropy(out, y) for out, y in pairs), model=model)


# ------------------------------------------------------------------ what a training has become


def values(model: nn.Module) -> list[Tensor]:
    """Copies of the parameters."""
    return [p.detach().clone() for p in model.parameters()]


def moved(model: nn.Module, before: Sequence[Tensor]) -> list[bool]:
    """For each parameter, whether it has changed."""
    return [not torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True)]


def statistics(opt: Any) -> list[Tensor]:
    """Copies of all statistics, by parameter or layer."""
    found = []

    def collect(state: Any) -> None:
        if isinstance(state, dict):
            found.extend(s.clone() for s in state.get("stats", ()))
            for value in state.values():
                collect(value)

    collect(opt.state_dict()["state"])
    return found


def equal(a: Iterable[Tensor], b: Iterable[Tensor]) -> bool:
    """Whether both have the same tensors, to the bit, and at least one."""
    one, other = list(a), list(b)
    return len(one) == len(other) > 0 and all(map(torch.equal, one, other))


def apart(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """The largest distance of two tensors, relative to the norm of the wanted one."""
    pairs = zip(found, wanted, strict=True)
    return max(float((a.double() - b.double()).norm() / b.double().norm()) for a, b in pairs)


def leaves(value: Any, path: str = "") -> dict[str, Any]:
    """The content of nested dictionaries and lists, by path; tensors as (dtype, entries)."""
    if isinstance(value, Tensor):
        return {path: (value.dtype, value.tolist())}
    if isinstance(value, dict):
        value = [(f"[{key!r}]", item) for key, item in value.items()]
    elif isinstance(value, list | tuple):
        value = [(f"[{index}]", item) for index, item in enumerate(value)]
    else:
        return {path: value}
    found: dict[str, Any] = {}
    for key, item in value:
        found.update(leaves(item, path + key))
    return found


def through_a_file(content: Any, weights_only: bool = True) -> Any:
    """Calls torch.save, then torch.load."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=weights_only)


# ------------------------------------------------------------------ dictated gradients


class Dictated:
    """An optimizer on gradients that the test dictates.

    ``params`` are parameters, named parameters or groups. Only the method "sampled" uses the
    sampled gradients; the others take their statistics from the training gradients. The "model
    output" is the parameters' own entries, and the likelihood is their inner product with the
    sampled gradients, so that its derivative is those gradients, to the bit.
    """

    def __init__(self, name: str, params: Sequence[Any], **settings: Any) -> None:
        members = [p for g in params for p in (g["params"] if isinstance(g, dict) else [g])]
        self.params: list[Tensor] = [p[1] if isinstance(p, tuple) else p for p in members]
        self.sampled: Sequence[Tensor | None] = []
        self.is_sampled = name == "sampled"
        if self.is_sampled:
            settings["likelihood"] = self.likelihood
        self.opt = FACTORED[name](params, **settings)

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """The trainable parameters that have a sampled gradient, and these."""
        pairs = zip(self.params, self.sampled, strict=True)
        return [(p, g) for p, g in pairs if p.requires_grad and g is not None]

    def output(self, sampled: Sequence[Tensor | None]) -> Tensor:
        """An output whose sampled gradients are these."""
        self.sampled = sampled
        return torch.cat([p.reshape(-1) for p, _ in self.pairs()])

    def likelihood(self, output: Tensor) -> Tensor:
        """The inner product."""
        return (output * torch.cat([g.reshape(-1) for _, g in self.pairs()])).sum()

    def observe(self, sampled: Sequence[Tensor | None]) -> None:
        """Observes these sampled gradients."""
        if self.is_sampled and any(g is not None for g in sampled):
            self.opt.observe(self.output(sampled))

    def step(
        self, grads: Sequence[Tensor | None], sampled: Sequence[Tensor | None] | None = None
    ) -> list[Tensor]:
        """One step; the sampled gradients are ``grads`` by default. Returns how it moved."""
        self.observe(grads if sampled is None else sampled)
        before = [p.detach().clone() for p in self.params]
        for p, g in zip(self.params, grads, strict=True):
            p.grad = None if g is None else g.clone()
        self.opt.step()
        return [p.detach() - b for p, b in zip(self.params, before, strict=True)]

    def warm_start(self, batches: Sequence[Sequence[Tensor]]) -> None:
        """Starts the statistics from these gradients."""
        outputs = map(self.output, batches)
        self.opt.warm_start(outputs if self.is_sampled else map(self.likelihood, outputs))

    def stats(self, *params: Tensor) -> list[Tensor]:
        """Copies of the statistics of these parameters, or of all."""
        return [s.clone() for p in params or self.params for s in self.opt.state[p]["stats"]]

    def factors(self, *params: Tensor) -> list[Tensor]:
        """Copies of the factors of these parameters, or of all."""
        return [f.clone() for p in params or self.params for f in self.opt.state[p]["factors"]]

    def snapshot(self) -> Snapshot:
        """Parameters and state, to be compared bit for bit."""
        return Snapshot(self.params, self.opt)


# ------------------------------------------------------------------ reads on the host


class no_host_reads(TorchDispatchMode):  # noqa: N801 - used as a function
    """Fails at the end of a ``with`` in which a tensor's value was read on the host."""

    READS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select")

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in self.READS:
            self.reads.append(name)
        return func(*args, **(kwargs or {}))

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if error[0] is None:
            assert self.reads == []


def trained(name: str, steps: int = 5, **settings: Any) -> tuple[nn.Sequential, Any]:
    """The small net and its optimizer after some steps."""
    model = net()
    opt = made(name, model, **settings)
    train(model, opt, range(steps))
    return model, opt


def refuses(opt: Any, model: nn.Module, state: Any, message: str) -> None:
    """Loading raises, and nothing has changed."""
    before = Snapshot(model.parameters(), opt)
    with pytest.raises(ValueError, match=message):
        opt.load_state_dict(state)
    before.assert_unchanged()
