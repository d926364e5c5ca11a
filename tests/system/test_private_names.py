"""Names that PyTorch promises nothing about: each is where the packages look for it.

What a name means is tested where the packages use it. Run this file first with another version of
PyTorch: a failure lists the names that have changed.
"""

import ast
import importlib
import itertools
import re
import subprocess
import sys
import warnings
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._composable_state
from processes import run_in
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.modules import linear
from torch.nn.modules._functions import SyncBatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

ROOT = Path(__file__).parents[2]
SOURCES = [*(ROOT / "tnt_kernels").rglob("*.py"), *(ROOT / "python" / "tnt_optim").rglob("*.py")]

# By what has them: the private names that the sources use, and public ones without documentation.
NAMES: dict[str, tuple[str, ...]] = {
    "torch": (
        "_C", "_compile", "_debug_has_internal_overlap", "_foreach_add_", "_foreach_addcmul_",
        "_foreach_copy_", "_foreach_div", "_foreach_mul", "_foreach_mul_", "_foreach_norm",
        "_foreach_sqrt", "_functorch",
    ),
    "torch._C": (
        "_autograd", "_current_graph_task_id", "_dispatch_has_kernel_for_dispatch_key",
        "_functorch", "_is_torch_function_mode_enabled", "_len_torch_dispatch_stack",
    ),
    "torch._C._autograd": ("_profiler_enabled",),
    "torch._C._functorch": ("peek_interpreter_stack",),
    "torch._compile": ("_disable_dynamo",),
    "torch._functorch.config": ("donated_buffer",),
    "torch.distributed": ("_composable_state", "get_backend_config"),
    "torch.distributed._composable_state": ("_module_state_mapping",),
    "torch.nn.modules.linear": ("NonDynamicallyQuantizableLinear",),
    "a tensor": (
        "_base", "_is_view", "_is_zerotensor", "_post_accumulate_grad_hooks", "_version",
    ),
    "a node of autograd": ("_input_metadata",),
    "a node of batch norm": ("_saved_running_mean", "_saved_training"),
    "the names of nodes": (
        "CheckpointFunctionBackward", "SyncBatchNormBackward", "_DDPSinkBackward",
    ),
    "a node of DistributedDataParallel": ("ddp_weakref",),
    "a convolution": ("_buffers", "_conv_forward", "_forward_hooks"),
    "torch.utils": ("_pytree",),
    "a replica of DataParallel": ("_is_replica",),
    "an optimizer": tuple(
        f"_optimizer_{what}_{when}_hooks"
        for what in ("state_dict", "load_state_dict") for when in ("pre", "post")
    ),
    "a compiled module": ("_orig_mod",),
    "DistributedDataParallel": ("_get_active_ddp_module", "static_graph"),
    "a parameter of FSDP1": ("_fsdp_flattened",),
    "a module of FSDP2": ("_get_fsdp_state",),
    "a group of FSDP2": (
        "_partial_reduce_output", "all_reduce_grads", "fsdp_params", "reduce_grads",
    ),
    "a parameter of FSDP2": ("_unsharded_param", "sharded_param", "unsharded_accumulated_grad"),
    "Python": ("_getframe",),
    "a named tuple": ("_replace",),
}  # fmt: skip
GROUPS = {"_fsdp_param_group", "_fsdp_param_groups"}  # one of them, by PyTorch's version


def foreign(sources: list[str]) -> set[str]:
    """Private names that the sources read, as attributes, imports or strings, and do not define."""
    read: set[str] = set()
    own: set[str] = set()
    for node in itertools.chain.from_iterable(ast.walk(ast.parse(text)) for text in sources):
        match node:
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                own.add(name)
            case ast.Attribute(attr=name) | ast.Constant(value=str(name)):
                read.add(name)
            case ast.ImportFrom(module=str(name)) | ast.alias(name=name):
                read.update(name.split("."))
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.arg(arg=name):
                own.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                own.add(name)
            case ast.Dict(keys=keys):
                own.update(key.value for key in keys if isinstance(key, ast.Constant))
    return {name for name in read - own if name.isidentifier() and re.match("_[^_]", name)}


def test_the_table_has_every_private_name() -> None:
    known = {name for name in itertools.chain(GROUPS, *NAMES.values()) if name.startswith("_")}
    assert foreign([path.read_text() for path in SOURCES]) == known


FOLDERS = ("bench", "examples", "experiments", "python", "tests", "tnt_kernels", "tools")
# Private functions with a public one that does the same.
TWINS = {"torch._dynamo." + "reset()": "torch.compiler.reset()"}
PUBLIC = (torch, torch.autograd, torch.compiler, torch.cuda, dist, torch.library, nn, torch.utils)


def names_with_a_public_home(path: Path) -> list[str]:
    """What a file takes from private modules of PyTorch although a public module has it."""
    text = path.read_text()
    found = [f"{private}: {public}" for private, public in TWINS.items() if private in text]
    for node in ast.walk(ast.parse(text)):
        source = (isinstance(node, ast.ImportFrom) and node.module) or ""
        if isinstance(node, ast.ImportFrom) and source.startswith("torch.") and "._" in source:
            module = importlib.import_module(source)
            for name in (alias.name for alias in node.names if not alias.name.startswith("_")):
                homes = [
                    m.__name__ for m in PUBLIC if getattr(m, name, m) is getattr(module, name, None)
                ]
                found += [f"{source}.{name}: {home}.{name}" for home in homes]
    return found


def test_no_private_name_is_used_where_a_public_one_is() -> None:
    files = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    assert {path.name: found for path in files if (found := names_with_a_public_home(path))} == {}


def holders() -> dict[str, Any]:
    """What has the names of the table, after a first backward."""
    x, layer = torch.ones(4, 3, requires_grad=True), nn.Linear(3, 2)
    replicas = DistributedDataParallel(layer, static_graph=True)
    sink = replicas(x).grad_fn
    recomputed = checkpoint(torch.sin, x, use_reentrant=True).grad_fn
    sharded = fully_shard(nn.Linear(3, 2), mesh=init_device_mesh("cpu", (1,)))
    sharded(x).sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that a single process shards nothing
        flattened = FullyShardedDataParallel(nn.Linear(3, 2), device_id=torch.device("cpu"))
    state: Any = sharded._get_fsdp_state()
    (group,) = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return {
        "torch": torch,
        "torch._C": torch._C,
        "torch._C._autograd": torch._C._autograd,
        "torch._C._functorch": torch._C._functorch,
        "torch.utils": torch.utils,
        "torch._compile": torch._compile,
        "torch._functorch.config": torch._functorch.config,
        "torch.distributed": dist,
        "torch.distributed._composable_state": dist._composable_state,
        "torch.nn.modules.linear": linear,
        "a tensor": x,
        "a node of autograd": x.sin().grad_fn,
        "a node of batch norm": nn.BatchNorm1d(3)(x).grad_fn,
        "the names of nodes": SimpleNamespace(
            # The forward of SyncBatchNorm needs a GPU.
            **{n.name(): n for n in (sink, recomputed)},
            **{SyncBatchNorm._backward_cls.__name__: SyncBatchNorm},
        ),
        "a node of DistributedDataParallel": sink,
        "a convolution": nn.Conv2d(2, 2, 2),
        "a replica of DataParallel": layer._replicate_for_data_parallel(),
        "an optimizer": torch.optim.SGD(layer.parameters()),
        "a compiled module": torch.compile(nn.Linear(3, 2)),
        "DistributedDataParallel": replicas,
        "a parameter of FSDP1": next(flattened.parameters()),
        "a module of FSDP2": sharded,
        "a group of FSDP2": group,
        "a parameter of FSDP2": group.fsdp_params[0],
        "Python": sys,
        "a named tuple": namedtuple("Pair", "a b")(1, 2),
    }


def lacking(rank: int, processes: int) -> list[str]:
    """The names of the table that this version of PyTorch has not."""
    found = holders()
    return [
        f"{name} of {what}"
        for what, names in NAMES.items()
        for name in names
        if not hasattr(found[what], name)
    ]


def test_every_name_is_where_the_packages_look_for_it() -> None:
    assert run_in(1, lacking) == [[]], torch.__version__


def test_an_import_does_not_load_the_compiler() -> None:
    """It would take seconds: ``_disable_dynamo`` loads it with the first call."""
    source = "import sys, tnt_optim; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", source]).returncode == 0
