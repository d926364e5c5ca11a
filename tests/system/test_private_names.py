"""Names that PyTorch promises nothing about: each exists, and means what the packages rely on.

Run this file first with another version of PyTorch: a failure names the name that has changed.
"""

import ast
import itertools
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import run_in
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

ROOT = Path(__file__).parents[2]
SOURCES = [*(ROOT / "tnt_kernels").rglob("*.py"), *(ROOT / "python" / "tnt_optim").rglob("*.py")]

# The private names that the sources use, by where they belong.
NAMES: dict[str, tuple[str, ...]] = {
    "torch": ("_debug_has_internal_overlap", "_compile", "_disable_dynamo", "_functorch"),
    "torch._C": ("_C", "_current_graph_task_id", "_dispatch_has_kernel_for_dispatch_key"),
    "lists of tensors": (
        "_foreach_add_", "_foreach_addcmul_", "_foreach_copy_", "_foreach_div", "_foreach_mul",
        "_foreach_mul_", "_foreach_norm", "_foreach_sqrt", "_foreach_sub_",
    ),
    "Tensor": ("_base", "_is_view", "_is_zerotensor", "_version"),
    "autograd's nodes": ("_input_metadata",),
    "Module": ("_is_replica", "_parameters", "_conv_forward"),
    "Optimizer": tuple(
        f"_optimizer_{what}_{when}_hooks"
        for what in ("state_dict", "load_state_dict") for when in ("pre", "post")
    ),
    "DistributedDataParallel": ("_get_active_ddp_module", "_DDPSinkBackward"),
    "FSDP2": (
        "_composable_state", "_module_state_mapping", "_get_fsdp_state", "_fsdp_param_group",
        "_fsdp_param_groups", "_partial_reduce_output", "_unsharded_param",
    ),
    "Python": ("_getframe",),
}  # fmt: skip


def changed(name: str) -> str:
    """The message of a failure."""
    return f"PyTorch {torch.__version__} has changed {name}: see its uses in the sources"


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
    known = set(itertools.chain.from_iterable(NAMES.values()))
    assert foreign([path.read_text() for path in SOURCES]) == known


# ------------------------------------------------------------------ functions of torch


def test_kernels_differ_from_defaults() -> None:
    library = torch.library.Library("tnt_private_names", "DEF")
    for name in ("everywhere", "on_cpu"):
        library.define(f"{name}(Tensor x) -> Tensor")
        library.impl(name, torch.Tensor.clone, "CompositeExplicitAutograd")
    library.impl("on_cpu", torch.Tensor.clone, "CPU")
    pairs = list(itertools.product(("everywhere", "on_cpu"), ("CPU", "CUDA")))
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    found = [pair for pair in pairs if has(f"{library.ns}::{pair[0]}", pair[1])]
    assert found == [("on_cpu", "CPU")], changed("_dispatch_has_kernel_for_dispatch_key")
    library._destroy()


def test_a_backward_has_a_number() -> None:
    seen = []
    x = torch.ones(3, requires_grad=True)
    y = x.square()
    y.register_hook(lambda g: seen.append(torch._C._current_graph_task_id()))
    y.sum().backward()
    message = changed("_current_graph_task_id")
    assert torch._C._current_graph_task_id() == -1 and len(seen) == 1 and seen[0] != -1, message


def test_overlap_within_a_tensor_is_seen() -> None:
    dense, expanded = torch.ones(2, 3), torch.ones(3).expand(2, 3)
    found = [torch._debug_has_internal_overlap(t) for t in (dense, dense.t(), expanded)]
    assert found[:2] == [0, 0] and found[2] != 0, changed("_debug_has_internal_overlap")


def test_functions_of_lists() -> None:
    """Their results are tested wherever the packages use them."""
    for name in NAMES["lists of tensors"]:
        given = [torch.full((2,), 4.0)]
        unary = name in ("_foreach_norm", "_foreach_sqrt")
        others = () if unary else ([torch.ones(2)],) * (2 if "addcmul" in name else 1)
        getattr(torch, name)(given, *others)
        in_place = name.endswith("_") and name != "_foreach_mul_"  # times 1
        assert torch.equal(given[0], torch.full((2,), 4.0)) != in_place, changed(name)


# ------------------------------------------------------------------ compiler


@pytest.fixture
def compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_disabled_functions_are_not_compiled(compiler: None) -> None:
    @_disable_dynamo
    def plain(x: Tensor) -> Tensor:
        """A docstring."""
        compiled.append(torch.compiler.is_compiling())
        return x + 1

    compiled: list[bool] = []
    around = torch.compile(lambda x: plain(x * 2) * 3, backend="aot_eager")
    message = changed("_disable_dynamo")
    assert plain.__doc__ == "A docstring.", message
    assert torch.equal(around(torch.ones(2)), torch.full((2,), 9.0)), message
    assert compiled == [False], message


def test_the_first_call_imports_the_compiler() -> None:
    """The decorator does not, which would make an import slow; the call does, with its settings."""
    source = """
import sys, torch
from torch._compile import _disable_dynamo
@_disable_dynamo
def f(): return torch._functorch.config.donated_buffer
print("torch._dynamo" in sys.modules, type(f()))
"""
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)
    message = f"{changed('_disable_dynamo, donated_buffer')}: {done.stdout}{done.stderr}"
    assert done.stdout == "False <class 'bool'>\n", message


@pytest.mark.parametrize("donated", [False, True])
def test_a_compiled_graph_has_a_second_backward_without_donated_buffers(
    donated: bool, compiler: None
) -> None:
    compiled = torch.compile(lambda x: (x.sin() @ x.cos()).tanh().sum(), backend="aot_eager")
    with torch._functorch.config.patch(donated_buffer=donated):
        compiled(torch.ones(3, 3, requires_grad=True)).backward()
        loss = compiled(torch.ones(3, 3, requires_grad=True))
        if not donated:
            loss.backward(retain_graph=True)
            loss.backward()
            return
        # Without this error observe() would have no reason to refuse such a graph.
        with pytest.raises(RuntimeError, match="donated"):
            loss.backward(retain_graph=True)


# ------------------------------------------------------------------ tensors and their graphs


def nodes(output: Tensor) -> list[Any]:
    """All nodes of a graph."""
    found, waiting = [], [output.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in found:
            found.append(node)
            waiting += [earlier for earlier, _ in node.next_functions]
    return found


def test_views_lead_to_the_computed_tensor() -> None:
    """A linear layer's output on three dimensions is a view; a change in place leaves its base."""
    out = nn.Linear(3, 2)(torch.randn(4, 5, 3))
    message = changed("_is_view, _base")
    assert out._is_view() and out._base is not None and out._base.numel() == out.numel(), message
    assert not nn.Linear(2, 2)(torch.ones(1, 2))._is_view(), message
    node = out._base.grad_fn
    torch.relu_(out)
    assert node in nodes(out), message


def test_tensors_count_changes_and_name_zeros() -> None:
    x = torch.ones(3)
    kept, before = x.detach(), x._version
    assert kept._version == before, changed("_version")
    x.add_(1)
    assert kept._version == before + 1, changed("_version")
    zeros = [torch._efficientzerotensor((2,)), torch.zeros(2)]
    assert [t._is_zerotensor() for t in zeros] == [True, False], changed("_is_zerotensor")


def test_nodes_have_dtypes_and_leaves() -> None:
    x, y = (torch.ones(3, requires_grad=True) for _ in range(2))

    def dtypes(output: Tensor) -> set[torch.dtype]:
        return {entry.dtype for n in nodes(output) for entry in n._input_metadata}

    assert dtypes(x.square().sum()) == {torch.float32}, changed("_input_metadata")
    assert torch.float16 in dtypes(x.half().square().float().sum()), changed("_input_metadata")
    found = [n.variable for n in nodes((x * y).sum()) if hasattr(n, "variable")]
    assert len(found) == 2 and {id(v) for v in found} == {id(x), id(y)}, changed("variable")


def test_nodes_that_hide_pieces_of_a_model(compiler: None) -> None:
    x = torch.ones(3, requires_grad=True)
    compiled = torch.compile(lambda x: x.sin().sum(), backend="aot_eager")
    for name, hidden in {
        "CheckpointFunctionBackward": checkpoint(torch.sin, x, use_reentrant=True),
        "CompiledFunctionBackward": compiled(x),
    }.items():
        names = [[node.name() for node in nodes(output)] for output in (hidden, x.sin())]
        assert name in names[0] and name not in names[1], changed(name)


# ------------------------------------------------------------------ modules and optimizers


def test_modules() -> None:
    module = nn.Linear(2, 2, bias=False)
    assert module._replicate_for_data_parallel()._is_replica, changed("_is_replica")
    assert not hasattr(module, "_is_replica"), changed("_is_replica")
    assert set(module._parameters) == {"weight", "bias"}, changed("_parameters")
    nn.utils.parametrizations.weight_norm(module)
    assert "weight" not in module._parameters, changed("_parameters")


@pytest.mark.parametrize("kind", [nn.Conv1d, nn.Conv2d, nn.Conv3d])
def test_convolutions_compute_in_one_method(kind: type[nn.Module]) -> None:
    other = type("Changed", (kind,), {"_conv_forward": lambda self, *_: "another output"})
    x = torch.ones(1, 2, *itertools.repeat(3, int(kind.__name__[4])))
    assert other(2, 2, 3)(x) == "another output", changed("_conv_forward")


def test_attention_never_calls_its_output_layer() -> None:
    attention = nn.MultiheadAttention(4, 2)
    message = changed("NonDynamicallyQuantizableLinear")
    assert type(attention.out_proj) is NonDynamicallyQuantizableLinear, message
    assert issubclass(NonDynamicallyQuantizableLinear, nn.Linear), message
    attention.out_proj.register_forward_hook(lambda *_: pytest.fail(f"{message}: it is called"))
    x = torch.ones(3, 1, 4)
    attention(x, x, x)


def test_hooks_of_state_dicts() -> None:
    opt, hook = torch.optim.SGD([torch.ones(1, requires_grad=True)]), lambda *_: None
    for direction, moment in itertools.product(("state_dict", "load_state_dict"), ("pre", "post")):
        held = f"_optimizer_{direction}_{moment}_hooks"
        handle = getattr(opt, f"register_{direction}_{moment}_hook")(hook)
        assert list(getattr(opt, held).values()) == [hook], changed(held)
        handle.remove()
        assert not getattr(opt, held), changed(held)


# ------------------------------------------------------------------ processes: results by name


def replicas(rank: int, processes: int) -> dict[str, bool]:
    """What DistributedDataParallel shows."""
    x, seen, module = torch.ones(4, 3), [], nn.Linear(3, 2)
    active = DistributedDataParallel._get_active_ddp_module
    module.register_forward_hook(lambda *_: seen.append(active()))
    plain = DistributedDataParallel(module)
    unused = DistributedDataParallel(nn.Linear(3, 2), find_unused_parameters=True)
    static = DistributedDataParallel(nn.Linear(3, 2), static_graph=True)
    kinds = (plain, unused, static)
    sinks = [[n for n in nodes(m(x)) if n.name() == "_DDPSinkBackward"] for m in kinds]
    behind = [[n.ddp_weakref() for n in found] for found in sinks]
    return {
        "_get_active_ddp_module": seen == [plain] and active() is None,
        "_DDPSinkBackward": list(map(bool, sinks)) == [False, True, True],
        "ddp_weakref": all(m is ddp for ms, ddp in zip(behind, kinds, strict=True) for m in ms),
        "find_unused_parameters": [m.find_unused_parameters for m in kinds] == [False, True, False],
        "static_graph": [m.static_graph for m in kinds] == [False, False, True],
        "get_backend_config": "cpu" in dist.get_backend_config(None),
    }


def sharded(form: str) -> Any:
    """Two layers, of which the first is a module of FSDP's of its own."""
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2, bias=False))
    names = ("replicate", "shard") if form == "hybrid" else ("shard",)
    mesh = init_device_mesh("cpu", (1,) * len(names), mesh_dim_names=names)
    policy = MixedPrecisionPolicy()
    if form == "mixed":  # gradients summed in another dtype wait in another place
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (net[0], net):
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    return net


def groups_of(module: Any) -> list[Any]:
    """FSDP's groups of parameters; the attribute depends on the version."""
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def accumulates(form: str, name: str, sync: str) -> bool:
    """Whether a gradient waits after a backward without reduction, and only then."""
    net, found = sharded(form), []
    for synchronised in (True, False, True):
        getattr(net, sync)(synchronised)
        net(torch.ones(4, 3)).sum().backward()
        groups = [group for module in (net, net[0]) for group in groups_of(module)]
        # Some versions give a group this attribute with its first backward.
        held = [getattr(group, name, None) for group in groups]
        if name != "_partial_reduce_output":
            held = [getattr(param, name) for group in groups for param in group.fsdp_params]
        if name == "_unsharded_param":
            held = [param.grad for param in held]
        found.append({gradient is not None for gradient in held})
    return found == [{False}, {True}, {False}]


def reduces(name: str, sync: str) -> bool:
    """Whether a setting reaches the groups, and a value written to the groups counts."""
    net = sharded("hybrid")
    groups = [group for module in (net, net[0]) for group in groups_of(module)]
    found = [[getattr(group, name) for group in groups]]
    getattr(net, sync)(False)
    found.append([getattr(group, name) for group in groups])
    for group in groups:
        group.reduce_grads = group.all_reduce_grads = True
    net(torch.ones(4, 3)).sum().backward()
    return found == [[True] * 2, [False] * 2] and all(p.grad is not None for p in net.parameters())


def shards(rank: int, processes: int) -> dict[str, bool]:
    """What fully_shard shows."""
    from torch.distributed._composable_state import _module_state_mapping

    earlier = {id(module) for module in list(_module_state_mapping)}  # of other tests' models
    net, empty, sync = sharded("plain"), nn.Sequential(nn.Tanh()), "set_requires_gradient_sync"
    modules = [m for m in list(_module_state_mapping) if isinstance(m, FSDPModule)]
    modules = [module for module in modules if id(module) not in earlier]
    fully_shard(empty, mesh=init_device_mesh("cpu", (1,)))
    groups = [groups_of(net), groups_of(net[0])]
    cut = [[p for group in own for p in group.fsdp_params] for own in groups]
    flat = [p for params in cut for p in params]
    pieces = [{p.sharded_param for p in params} for params in cut]
    are_own = pieces == [{net[2].weight}, set(net[0].parameters())]
    early = any(getattr(p, "_unsharded_param", None) is not None for p in flat)
    leaves = {id(n.variable) for n in nodes(net(torch.ones(4, 3))) if hasattr(n, "variable")}
    unsharded = not early and {id(p._unsharded_param) for p in flat} == leaves
    other, all_sync = "unsharded_accumulated_grad", "set_requires_all_reduce"
    return {
        "_module_state_mapping": {id(net), id(net[0])} == {id(module) for module in modules},
        "_get_fsdp_state": net._get_fsdp_state() is not net[0]._get_fsdp_state(),
        "_fsdp_param_group": [len(own) for own in groups] == [1, 1] and not groups_of(empty),
        "fsdp_params": [len(params) for params in cut] == [1, 2],
        "sharded_param": are_own,
        "_unsharded_param": unsharded and accumulates("plain", "_unsharded_param", sync),
        other: accumulates("mixed", other, sync),
        "_partial_reduce_output": accumulates("hybrid", "_partial_reduce_output", all_sync),
        "reduce_grads": reduces("reduce_grads", sync),
        "all_reduce_grads": reduces("all_reduce_grads", all_sync),
    }


@pytest.mark.parametrize("function", [replicas, shards])
def test_names_in_a_process(function: Callable[[int, int], dict[str, bool]]) -> None:
    (found,) = run_in(1, function)
    wrong = [name for name, is_right in found.items() if not is_right]
    assert len(found) >= 6 and not wrong, changed(", ".join(wrong))
