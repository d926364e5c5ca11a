"""Digests of training trajectories, to show that a refactoring changed no number.

Each case trains a small network for 30 steps on one thread, from fixed seeds, and prints the sha256
of all parameters and of the optimizer's state. Digests depend on the processor, the BLAS and
PyTorch: compare two commits on one machine, in one environment::

    python tools/trajectory_digests.py --save before > before.txt     # at the old commit
    python tools/trajectory_digests.py > after.txt                    # at the new commit
    python tools/trajectory_digests.py --resume before > resumed.txt  # old checkpoints, new code

All three files must be equal. The script uses public names only, so that it runs at both commits;
``PYTHONPATH=CLONE:CLONE/python`` selects the clone it imports.
"""

import hashlib
import multiprocessing
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

from tnt_optim import KFAC, TNT, Shampoo, with_fallback

STEPS, CHECKPOINT_STEP, BATCH = 30, 15, 16
Maker = Callable[[nn.Module], Any]
Wrap = Callable[[nn.Module], nn.Module]


def network(dtype: torch.dtype) -> nn.Module:
    """Convolutions, matrices, biases and norms; odd sizes."""
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 5, (3, 2), stride=2, bias=False),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(45, 33),
        nn.LayerNorm(33),
        nn.Tanh(),
        nn.Linear(33, 7),
    ).to(dtype)


def batch(step: int, rank: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Inputs and labels of one step in one process."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    x = torch.randn(BATCH, 3, 9, 8, generator=generator)
    return x.to(dtype), torch.randint(0, 7, (BATCH,), generator=generator)


def digest(value: Any) -> str:
    """sha256 of tensors, numbers and strings in nested dicts and lists."""
    sha = hashlib.sha256()

    def add(item: Any) -> None:
        if isinstance(item, Tensor):
            if hasattr(item, "to_local"):
                item = item.to_local()
            sha.update(f"{item.dtype}{tuple(item.shape)}".encode())
            sha.update(item.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(item, dict):
            for key in sorted(item, key=str):
                sha.update(str(key).encode())
                add(item[key])
        elif isinstance(item, list | tuple):
            for entry in item:
                add(entry)
        else:
            sha.update(repr(item).encode())

    add(value)
    return sha.hexdigest()


def train(
    name: str,
    make: Maker,
    *,
    dtype: torch.dtype = torch.float32,
    micro_batches: int = 1,
    warm_start: str | None = None,
    rank: int = 0,
    wrap: Wrap = lambda model: model,
    save: Path | None = None,
    resume: Path | None = None,
) -> str:
    """Trains one case; returns the digest of parameters, buffers and the optimizer's state."""
    model = network(dtype)
    wrapped = wrap(model)
    opt = make(wrapped)
    observe = getattr(opt, "observe", lambda output: None)
    criterion = nn.CrossEntropyLoss()
    file = f"{name}-{rank}.pt"
    start = 0
    if resume is not None and (resume / file).exists():
        saved = torch.load(resume / file, weights_only=True)
        model.load_state_dict(saved["model"])
        opt.load_state_dict(saved["optimizer"])
        start = CHECKPOINT_STEP
    elif warm_start is not None:
        batches = (batch(500 + i, rank, dtype) for i in range(3))
        outputs = (
            wrapped(x) if warm_start == "outputs" else criterion(wrapped(x), y) for x, y in batches
        )
        warm = opt.warm_start
        warm(outputs, **({} if isinstance(opt, KFAC) else {"model": model}))
    for step in range(start, STEPS):
        if save is not None and step == CHECKPOINT_STEP:
            torch.save({"model": model.state_dict(), "optimizer": opt.state_dict()}, save / file)
        opt.zero_grad()
        for number in range(micro_batches):
            x, y = batch(step + 100 * number, rank, dtype)
            output = wrapped(x)
            observe(output)
            (criterion(output.float(), y) / micro_batches).backward()
        opt.step()
    state = opt.state_dict()
    # A group may gain settings, and their order is not part of the numbers.
    tensors = [state["state"], [group["step"] for group in opt.param_groups if "step" in group]]
    return digest([model.state_dict(), tensors])


def maker(method: type, **settings: Any) -> Maker:
    """A method with short intervals, at rates at which the network trains."""
    damping = {TNT: 0.1, Shampoo: 1e-3, KFAC: 0.3}[method]
    defaults = {"lr": 1e-3, "damping": damping, "stat_interval": 2, "inverse_interval": 5}
    settings = {**defaults, **settings}
    return lambda model: method(model if method is KFAC else model.parameters(), **settings)


def two_groups(model: nn.Module) -> TNT:
    """Settings by group."""
    params = list(model.parameters())
    groups = [
        {"params": params[:5], "graft": "adam", "damping": 0.03, "weight_decay": 0.1},
        {"params": params[5:], "stat_interval": 3, "lr": 2e-3, "max_factor_dim": 10},
    ]
    return TNT(groups, lr=1e-3, damping=0.1, stat_interval=2, inverse_interval=6)


def fallback(model: nn.Module) -> torch.optim.Optimizer:
    """TNT for matrices, AdamW for the rest."""
    params = list(model.parameters())
    matrices = [p for p in params if p.dim() > 1]
    rest = [p for p in params if p.dim() <= 1]
    return with_fallback(TNT(matrices, lr=1e-3, damping=0.1), torch.optim.AdamW(rest, lr=1e-3))


GRAFTED = {"graft": "adam", "relative_damping": True, "lr": 1e-2}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "decay": {"weight_decay": 0.1, "momentum": 0.5, "stat_decay": 0.7},
    "every": {"stat_interval": 1, "inverse_interval": 1},
    "relative": {"relative_damping": True},
    "graft-sgd": {"graft": "sgd", "weight_decay": 0.1},
    "graft-adam": GRAFTED,
    "kl-clip": {"kl_clip": 1e-4},
    "kl-clip-graft": {**GRAFTED, "kl_clip": 1e-6},
    "diagonal": {"max_factor_dim": 20},
    "blocks": {"block_size": 7},
    "blocks-graft": {**GRAFTED, "block_size": 7, "merge_small_dims": 30},
    "merged": {"merge_small_dims": 30},
    "maximize": {"maximize": True},
}
BFLOAT16: dict[str, dict[str, Any]] = {
    f"bfloat16-{rounding}{'-graft' * bool(graft)}": {"rounding": rounding, **graft}
    for rounding in ("nearest", "stochastic", "master")
    for graft in ({}, GRAFTED)
}


METHODS: dict[str, tuple[type, dict[str, Any]]] = {
    "tnt": (TNT, {}),
    "tnt-ef": (TNT, {"fisher": "empirical"}),
    "shampoo": (Shampoo, {}),
}


def single_process_cases() -> dict[str, tuple[Maker, dict[str, Any]]]:
    """Each case's optimizer and the arguments of ``train``."""
    cases: dict[str, tuple[Maker, dict[str, Any]]] = {}
    bfloat16 = {"dtype": torch.bfloat16}
    for name, (method, fixed) in METHODS.items():
        plain = maker(method, **fixed)
        for variant, settings in VARIANTS.items():
            cases[f"{name}-{variant}"] = maker(method, **fixed, **settings), {}
        for variant, settings in BFLOAT16.items():
            cases[f"{name}-{variant}"] = maker(method, **fixed, **settings), bfloat16
        cases[f"{name}-float64"] = plain, {"dtype": torch.float64}
        cases[f"{name}-warm"] = plain, {"warm_start": "outputs" if name == "tnt" else "losses"}
        cases[f"{name}-accumulated"] = plain, {"micro_batches": 2}
    for inverse in ("damped", "eigenbasis"):
        plain = maker(KFAC, inverse=inverse)
        cases[f"kfac-{inverse}"] = plain, {}
        cases[f"kfac-{inverse}-decay"] = maker(KFAC, inverse=inverse, weight_decay=0.1), {}
        cases[f"kfac-{inverse}-warm"] = plain, {"warm_start": "outputs"}
        cases[f"kfac-{inverse}-accumulated"] = plain, {"micro_batches": 2}
        cases[f"kfac-{inverse}-bfloat16"] = plain, bfloat16
    cases["tnt-bernoulli"] = maker(TNT, likelihood="bernoulli"), {}
    cases["tnt-gaussian"] = maker(TNT, likelihood="gaussian", seed=3), {}
    cases["tnt-groups"] = two_groups, {}
    cases["tnt-fallback"] = fallback, {}
    return cases


def two_process_cases() -> dict[str, tuple[Maker, Wrap]]:
    """Each case's optimizer, and how its model is spread."""
    cases: dict[str, tuple[Maker, Wrap]] = {}
    grafted = {**GRAFTED, "kl_clip": 1e-6}
    for shard in (None, "directions", "inverses"):
        for spread, wrap in (("ddp", DistributedDataParallel), ("fsdp", fully_sharded)):
            for name, (method, fixed) in METHODS.items():
                cases[f"{name}-{spread}-{shard}"] = maker(method, **fixed, shard=shard), wrap
            cases[f"tnt-graft-{spread}-{shard}"] = maker(TNT, **grafted, shard=shard), wrap
    for shard in (None, "inverses"):
        cases[f"kfac-ddp-{shard}"] = maker(KFAC, shard=shard), DistributedDataParallel
    return cases


def fully_sharded(model: nn.Module) -> nn.Module:
    """The model with every linear and convolutional layer sharded by FSDP2."""
    for module in model.children():
        if isinstance(module, nn.Linear | nn.Conv2d):
            fully_shard(module)
    fully_shard(model)
    return model


def _process(rank: int, store: str, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    for name, (make, wrap) in two_process_cases().items():
        results[name, rank] = _or_error(name, make, rank=rank, wrap=wrap)
    dist.barrier()
    dist.destroy_process_group()


def _or_error(*args: Any, **kwargs: Any) -> str:
    try:
        return train(*args, **kwargs)
    except ValueError as error:  # a combination that is refused stays refused
        return f"refused: {type(error).__name__}"


def main(
    save: Annotated[Path | None, typer.Option(help="folder for checkpoints of step 15")] = None,
    resume: Annotated[Path | None, typer.Option(help="folder of checkpoints to start from")] = None,
    only: Annotated[str, typer.Option(help="cases whose names contain this")] = "",
) -> None:
    """Print a line for each case."""
    if save:
        save.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    for name, (make, how) in single_process_cases().items():
        if only in name:
            print(name, _or_error(name, make, **how, save=save, resume=resume))
    with tempfile.TemporaryDirectory() as folder, multiprocessing.Manager() as manager:
        results = manager.dict()
        if any(only in name for name in two_process_cases()):
            os.environ["OMP_NUM_THREADS"] = "1"
            spawn(_process, (f"{folder}/store", results), nprocs=2)
        for (name, rank), value in sorted(results.items()):
            print(f"{name}-rank{rank}", value)


if __name__ == "__main__":
    typer.run(main)
