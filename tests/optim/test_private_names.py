"""Names that PyTorch promises nothing about: each is there, and means what is relied on.

To be run first with another version of it: what has changed says here where it is used.
"""

import ast
import functools
import itertools
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

from tnt_optim.autograd import graph_nodes

pytestmark = pytest.mark.usefixtures("one_thread")

ROOT = Path(__file__).parents[2]
FOLDERS = {"tnt_kernels": ROOT / "tnt_kernels", "tnt_optim": ROOT / "python" / "tnt_optim"}
# Private, but Python's own.
PYTHONS = {"_getframe"}

SHARDS = ("tnt_optim/shards.py",)
DIRECTIONS, LAYER_STEP = "tnt_optim/directions.py", "tnt_optim/layer_step.py"
GRAFTED = "tnt_kernels/triton/grafted_directions.py"
CAPTURE, COMBINED = ("tnt_optim/capture.py",), ("tnt_optim/combined.py",)
GRADIENTS = ("tnt_optim/gradients.py",)
FSDP = "torch.distributed.fsdp"

# Where each is used. Those that no underscore gives away belong to an object that is private, or
# are not documented.
USED: dict[str, tuple[str, ...]] = {
    "torch._C._dispatch_has_kernel_for_dispatch_key": (
        "tnt_kernels/backends.py",
        "tnt_kernels/ops.py",
    ),
    "torch._C._current_graph_task_id": ("tnt_optim/attach.py",),
    "torch._compile._disable_dynamo": (
        "tnt_optim/kfac.py",
        "tnt_optim/kronecker.py",
        "tnt_optim/tnt.py",
    ),
    "torch._debug_has_internal_overlap": ("tnt_optim/graphs.py",),
    "torch._functorch.config.donated_buffer": GRADIENTS,
    "torch._foreach_add_": ("tnt_optim/device_step.py", LAYER_STEP, GRAFTED),
    "torch._foreach_addcmul_": (GRAFTED,),
    "torch._foreach_copy_": ("tnt_optim/graphs.py",),
    "torch._foreach_div": (GRAFTED,),
    "torch._foreach_mul": (LAYER_STEP,),
    "torch._foreach_mul_": (DIRECTIONS, LAYER_STEP, GRAFTED),
    "torch._foreach_norm": ("tnt_optim/diagnostics.py", *GRADIENTS, GRAFTED),
    "torch._foreach_sqrt": (GRAFTED,),
    "torch._foreach_sub_": (LAYER_STEP,),
    "torch.Tensor._base": CAPTURE,
    "torch.Tensor._is_view": CAPTURE,
    "torch.Tensor._is_zerotensor": ("tnt_kernels/arguments.py",),
    "torch.Tensor._version": CAPTURE,
    "torch.autograd.graph.Node._input_metadata": GRADIENTS,
    "torch.autograd.graph.Node.variable": (*CAPTURE, *SHARDS),
    "torch.autograd.graph.Node.CheckpointFunctionBackward": CAPTURE,
    "torch.autograd.graph.Node.CompiledFunctionBackward": (*CAPTURE, *GRADIENTS),
    "torch.nn.Module._is_replica": ("tnt_optim/attach.py",),
    "torch.nn.Module._parameters": ("tnt_optim/layers.py",),
    "torch.nn.Conv2d._conv_forward": ("tnt_optim/layers.py",),
    "torch.nn.modules.linear.NonDynamicallyQuantizableLinear": ("tnt_optim/layers.py",),
    "torch.nn.parallel.DistributedDataParallel._get_active_ddp_module": ("tnt_optim/attach.py",),
    "torch.nn.parallel.distributed._DDPSinkBackward": ("tnt_optim/processes.py",),
    "torch.nn.parallel.distributed._DDPSinkBackward.ddp_weakref": ("tnt_optim/processes.py",),
    "torch.nn.parallel.DistributedDataParallel.find_unused_parameters": (
        "tnt_optim/attach.py",
        "tnt_optim/tnt.py",
    ),
    "torch.nn.parallel.DistributedDataParallel.static_graph": ("tnt_optim/processes.py",),
    "torch.optim.Optimizer._optimizer_load_state_dict_post_hooks": COMBINED,
    "torch.optim.Optimizer._optimizer_load_state_dict_pre_hooks": COMBINED,
    "torch.optim.Optimizer._optimizer_state_dict_post_hooks": COMBINED,
    "torch.optim.Optimizer._optimizer_state_dict_pre_hooks": COMBINED,
    "torch.distributed.get_backend_config": ("tnt_optim/processes.py",),
    "torch.distributed._composable_state._module_state_mapping": SHARDS,
    f"{FSDP}.FSDPModule._get_fsdp_state": SHARDS,
    # One or the other, by version.
    f"{FSDP}.FSDPState._fsdp_param_group": SHARDS,
    f"{FSDP}.FSDPState._fsdp_param_groups": SHARDS,
    f"{FSDP}.FSDPParamGroup.fsdp_params": SHARDS,
    f"{FSDP}.FSDPParamGroup._partial_reduce_output": SHARDS,
    f"{FSDP}.FSDPParamGroup.all_reduce_grads": SHARDS,
    f"{FSDP}.FSDPParamGroup.reduce_grads": SHARDS,
    f"{FSDP}.FSDPParam.sharded_param": SHARDS,
    f"{FSDP}.FSDPParam._unsharded_param": SHARDS,
    f"{FSDP}.FSDPParam.unsharded_accumulated_grad": SHARDS,
}


def why(*names: str) -> str:
    """What a failure says: names of the table by how their last parts begin, and who uses them."""
    found = [full for full in USED if full.rpartition(".")[2].startswith(names)]
    assert found, names
    uses = "; ".join(f"{full} (used in {', '.join(USED[full])})" for full in found)
    return f"PyTorch {torch.__version__} has changed {uses}"


# The table.


def names_in(source: str) -> tuple[set[str], set[str]]:
    """The names that a source reads, as attributes, imports or strings; and those it makes."""
    read, made = set(), set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            is_own = isinstance(node.value, ast.Name) and node.value.id == "self"
            (made if is_own and isinstance(node.ctx, ast.Store) else read).add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            read.add(node.value)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            modules = [getattr(node, "module", None) or ""]
            for name in modules + [alias.name for alias in node.names]:
                read.update(name.split("."))
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            made.add(node.name)
        elif isinstance(node, ast.arg):
            made.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            made.add(node.id)
        elif isinstance(node, ast.Dict):
            made.update(k.value for k in node.keys if isinstance(k, ast.Constant))
    return read, made


@functools.cache
def sources() -> dict[str, tuple[set[str], set[str]]]:
    return {
        f"{package}/{path.relative_to(folder)}": names_in(path.read_text())
        for package, folder in FOLDERS.items()
        for path in sorted(folder.rglob("*.py"))
    }


def foreign(found: dict[str, tuple[set[str], set[str]]]) -> set[str]:
    """Private names that are read, and that nothing here makes."""
    made = set().union(*(own for _, own in found.values()))
    read = set().union(*(names for names, _ in found.values())) - made
    return {
        name
        for name in read
        if isinstance(name, str) and name.isidentifier() and name[0] == "_" and name[:2] != "__"
    }


def test_the_table_has_every_private_name() -> None:
    known = {part for full in USED for part in full.split(".") if part.startswith("_")}
    assert foreign(sources()) - PYTHONS == known


def test_the_table_says_where_each_is_used() -> None:
    for full, files in USED.items():
        name = full.rpartition(".")[2]
        assert {file for file, (read, _) in sources().items() if name in read} == set(files), full


def test_a_private_name_is_found_however_it_is_used() -> None:
    source = """
from torch._one import _two
import torch._three
def f(x):
    return x._four, getattr(x, "_five"), x.public, self._six, _mine(x), torch.__version__
class A:
    def __init__(self, _given):
        self._six = {"_seven": 0}
def _mine(x):
    _local = "_seven", _given
    return "not _a name"
"""
    assert foreign({"a": names_in(source)}) == {"_one", "_two", "_three", "_four", "_five"}


# Functions of torch.


@pytest.fixture
def made_up() -> Iterator[torch.library.Library]:
    library = torch.library.Library("tnt_private_names", "DEF")
    yield library
    library._destroy()


def test_kernels_are_told_from_defaults(made_up: torch.library.Library) -> None:
    for name in ("everywhere", "on_cpu"):
        made_up.define(f"{name}(Tensor x) -> Tensor")
        made_up.impl(name, torch.Tensor.clone, "CompositeExplicitAutograd")
    made_up.impl("on_cpu", torch.Tensor.clone, "CPU")
    found = {
        (name, key): torch._C._dispatch_has_kernel_for_dispatch_key(f"{made_up.ns}::{name}", key)
        for name in ("everywhere", "on_cpu")
        for key in ("CPU", "CUDA")
    }
    assert found == {key: key == ("on_cpu", "CPU") for key in found}, why(
        "_dispatch_has_kernel_for_dispatch_key"
    )


def test_a_backward_has_a_number() -> None:
    seen = []
    x = torch.ones(3, requires_grad=True)
    y = x.square()
    y.register_hook(lambda g: seen.append(torch._C._current_graph_task_id()))
    y.sum().backward()
    message = why("_current_graph_task_id")
    assert torch._C._current_graph_task_id() == -1 and len(seen) == 1 and seen[0] != -1, message


@pytest.fixture
def compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_disabled_functions_are_not_compiled(compiler: None) -> None:
    @_disable_dynamo
    def plain(x: Tensor) -> Tensor:
        """What it does."""
        compiled.append(torch.compiler.is_compiling())
        return x + 1

    compiled: list[bool] = []
    around = torch.compile(lambda x: plain(x * 2) * 3, backend="aot_eager")
    message = why("_disable_dynamo")
    assert plain.__doc__ == "What it does.", message
    assert torch.equal(around(torch.ones(2)), torch.full((2,), 9.0)), message
    assert compiled == [False], message


def test_the_first_call_imports_the_compiler() -> None:
    """Not the decorator, which would make an import slow; but then its settings are there."""
    source = """
import sys, torch
from torch._compile import _disable_dynamo
@_disable_dynamo
def f(): return torch._functorch.config.donated_buffer
print("torch._dynamo" in sys.modules, type(f()))
"""
    told = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)
    assert told.stdout == "False <class 'bool'>\n", (
        f"{why('_disable_dynamo', 'donated_buffer')}: {told.stdout}{told.stderr}"
    )


def test_without_donated_buffers_a_compiled_graph_has_a_second_backward(compiler: None) -> None:
    def second_backward() -> None:
        torch._dynamo.reset()
        compiled = torch.compile(lambda x: (x.sin() @ x.cos()).tanh().sum(), backend="aot_eager")
        compiled(torch.ones(3, 3, requires_grad=True)).backward()
        loss = compiled(torch.ones(3, 3, requires_grad=True))
        loss.backward(retain_graph=True)
        loss.backward()

    message = why("donated_buffer")
    with torch._functorch.config.patch(donated_buffer=False):
        second_backward()
    with torch._functorch.config.patch(donated_buffer=True):
        try:
            second_backward()
        except RuntimeError as error:
            assert "donated" in str(error), message
        else:
            pytest.fail(f"{message}: no harm is done any more, so that nothing need be refused")


def test_overlap_within_a_tensor_is_seen() -> None:
    dense, expanded = torch.ones(2, 3), torch.ones(3).expand(2, 3)
    found = [torch._debug_has_internal_overlap(t) for t in (dense, dense.t(), expanded)]
    assert found[:2] == [0, 0] and found[2] != 0, why("_debug_has_internal_overlap")


A = [torch.tensor([1.0, -2.0, 3.0]), torch.tensor([[4.0, 0.5]])]
B = [torch.tensor([2.0, 7.0, -1.0]), torch.tensor([[3.0, 0.25]])]
NUMBERS = [3.0, 0.5]

FOREACH: dict[str, list[tuple[tuple[Any, ...], Callable[[int], Tensor]]]] = {
    "_foreach_add_": [
        ((B,), lambda i: A[i] + B[i]),
        ((1,), lambda i: A[i] + 1),
        ((NUMBERS,), lambda i: A[i] + NUMBERS[i]),
    ],
    "_foreach_addcmul_": [((B, B, 0.5), lambda i: A[i] + 0.5 * B[i] * B[i])],
    "_foreach_copy_": [((B,), lambda i: B[i])],
    "_foreach_div": [((B,), lambda i: A[i] / B[i])],
    "_foreach_mul": [
        ((0.5,), lambda i: A[i] * 0.5),
        ((NUMBERS,), lambda i: A[i] * NUMBERS[i]),
    ],
    "_foreach_mul_": [
        ((0.5,), lambda i: A[i] * 0.5),
        (([torch.tensor(n) for n in NUMBERS],), lambda i: A[i] * NUMBERS[i]),
    ],
    "_foreach_norm": [
        ((), lambda i: A[i].norm()),
        ((2, torch.float64), lambda i: A[i].double().norm()),
    ],
    "_foreach_sqrt": [((), lambda i: A[i].sqrt())],
    "_foreach_sub_": [((B,), lambda i: A[i] - B[i])],
}


@pytest.mark.parametrize("name", sorted(n for n in USED if "_foreach_" in n))
def test_functions_of_lists(name: str) -> None:
    name = name.rpartition(".")[2]
    for arguments, wanted in FOREACH[name]:
        given = [t.clone() for t in A]
        result = getattr(torch, name)(given, *arguments)
        result = given if name.endswith("_") else result
        for i, tensor in enumerate(result):
            torch.testing.assert_close(
                tensor, wanted(i), equal_nan=True, msg=lambda said: f"{why(name)}: {said}"
            )


# Tensors and their graphs.


def test_views_lead_to_what_was_computed() -> None:
    """A linear layer's output on three dimensions is a view; a change in place leaves its base."""
    out = nn.Linear(3, 2)(torch.randn(4, 5, 3))
    message = why("_is_view", "_base")
    assert out._is_view() and out._base is not None, message
    assert out._base.numel() == out.numel() and not nn.Linear(2, 2)(A[1])._is_view(), message
    node = out._base.grad_fn
    torch.relu_(out)
    assert node in set(graph_nodes(out)), message


def test_changes_in_place_are_counted() -> None:
    x = torch.ones(3)
    kept, before = x.detach(), x._version
    assert kept._version == before, why("_version")
    x.add_(1)
    assert kept._version == before + 1, why("_version")


def test_zero_tensors_are_told() -> None:
    zeros = [torch._efficientzerotensor((2,)), torch.zeros(2)]
    assert [t._is_zerotensor() for t in zeros] == [True, False], why("_is_zerotensor")


def test_nodes_tell_the_dtypes_of_their_gradients() -> None:
    x = torch.ones(3, requires_grad=True)

    def dtypes(output: Tensor) -> set[torch.dtype]:
        return {entry.dtype for n in graph_nodes(output) for entry in n._input_metadata}

    message = why("_input_metadata")
    assert dtypes(x.square().sum()) == {torch.float32}, message
    assert torch.float16 in dtypes(x.half().square().float().sum()), message


def test_the_ends_of_a_graph_have_their_leaves() -> None:
    x, y = (torch.ones(3, requires_grad=True) for _ in range(2))
    found = [n.variable for n in graph_nodes((x * y).sum()) if hasattr(n, "variable")]
    assert len(found) == 2 and {id(v) for v in found} == {id(x), id(y)}, why("variable")


def node_names(output: Tensor) -> set[str]:
    return {node.name() for node in graph_nodes(output)}


def test_nodes_that_hide_pieces_of_a_model(compiler: None) -> None:
    x = torch.ones(3, requires_grad=True)
    hidden = checkpoint(torch.sin, x, use_reentrant=True)
    name = "CheckpointFunctionBackward"
    assert name in node_names(hidden) and name not in node_names(x.sin()), why(name)
    compiled = torch.compile(lambda x: x.sin().sum(), backend="aot_eager")(x)
    name = "CompiledFunctionBackward"
    assert name in node_names(compiled) and name not in node_names(x.sin()), why(name)


# Modules and optimizers.


def test_replicas_of_threads_say_so() -> None:
    module = nn.Linear(2, 2)
    assert module._replicate_for_data_parallel()._is_replica, why("_is_replica")
    assert not hasattr(module, "_is_replica"), why("_is_replica")


def test_modules_have_their_parameters_by_name() -> None:
    module = nn.Linear(2, 2, bias=False)
    message = why("_parameters")
    assert dict(module._parameters) == {"weight": module.weight, "bias": None}, message
    nn.utils.parametrizations.weight_norm(module)
    assert "weight" not in module._parameters, message


@pytest.mark.parametrize("kind", [nn.Conv1d, nn.Conv2d, nn.Conv3d])
def test_convolutions_compute_in_one_method(kind: type[nn.Module]) -> None:
    def other(self: Any, *arguments: Any) -> str:
        return "another output"

    changed = type("Changed", (kind,), {"_conv_forward": other})
    x = torch.ones(1, 2, *itertools.repeat(3, int(kind.__name__[4])))
    assert changed(2, 2, 3)(x) == "another output", why("_conv_forward")
    assert not hasattr(nn.Linear, "_conv_forward"), why("_conv_forward")


def test_attention_never_calls_its_output_layer() -> None:
    attention = nn.MultiheadAttention(4, 2)
    message = why("NonDynamicallyQuantizableLinear")
    assert type(attention.out_proj) is NonDynamicallyQuantizableLinear, message
    assert issubclass(NonDynamicallyQuantizableLinear, nn.Linear), message
    attention.out_proj.register_forward_hook(lambda *_: pytest.fail(f"{message}: it is called"))
    x = torch.ones(3, 1, 4)
    attention(x, x, x)


def test_hooks_of_state_dicts() -> None:
    opt = torch.optim.SGD([torch.ones(1, requires_grad=True)])

    def hook(*_: Any) -> None:
        pass

    for direction, moment in itertools.product(("state_dict", "load_state_dict"), ("pre", "post")):
        held = f"_optimizer_{direction}_{moment}_hooks"
        handle = getattr(opt, f"register_{direction}_{moment}_hook")(hook)
        assert list(getattr(opt, held).values()) == [hook], why(held)
        handle.remove()
        assert not getattr(opt, held), why(held)


# Processes. What one process finds, by name.


def replicas(rank: int, processes: int) -> dict[str, bool]:
    x = torch.ones(4, 3)
    seen: list[Any] = []
    module = nn.Linear(3, 2)
    module.register_forward_hook(
        lambda *_: seen.append(DistributedDataParallel._get_active_ddp_module())
    )
    plain = DistributedDataParallel(module)
    plain_out = plain(x)
    active = seen == [plain] and DistributedDataParallel._get_active_ddp_module() is None
    unused = DistributedDataParallel(nn.Linear(3, 2), find_unused_parameters=True)
    static = DistributedDataParallel(nn.Linear(3, 2), static_graph=True)

    def sinks(output: Tensor) -> list[Any]:
        return [n for n in graph_nodes(output) if n.name() == "_DDPSinkBackward"]

    shown = [sinks(unused(x)), sinks(static(x))]
    behind = [[getattr(n, "ddp_weakref", lambda: None)() for n in nodes] for nodes in shown]
    return {
        "_get_active_ddp_module": active,
        "_DDPSinkBackward": not sinks(plain_out) and all(shown),
        "ddp_weakref": all(
            found and all(module is ddp for module in found)
            for found, ddp in zip(behind, (unused, static), strict=True)
        ),
        "find_unused_parameters": [m.find_unused_parameters for m in (plain, unused)]
        == [False, True],
        "static_graph": [m.static_graph for m in (plain, unused, static)] == [False, False, True],
        "get_backend_config": "cpu" in dist.get_backend_config(None),
    }


class Body(nn.Module):
    """Two layers, of which the first is a module of FSDP's of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(3, 3), nn.Linear(3, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The output."""
        out: Tensor = self.outer(self.inner(x).tanh())
        return out


def sharded(form: str) -> Any:
    net = Body()
    names = ("replicate", "shard") if form == "hybrid" else ("shard",)
    mesh = init_device_mesh("cpu", (1,) * len(names), mesh_dim_names=names)
    # What is summed in another dtype than the pass is made in waits in another place.
    policy = MixedPrecisionPolicy()
    if form == "mixed":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (net.inner, net):
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    return net


def groups_of(module: Any) -> list[Any]:
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def waiting(net: Any, name: str) -> list[bool]:
    """Of which parameters, or groups of them, something waits to be averaged."""
    groups = [group for module in (net, net.inner) for group in groups_of(module)]
    if name == "_partial_reduce_output":
        # Which a group gets with its first backward in some versions.
        return [getattr(group, name, None) is not None for group in groups]
    cut = [param for group in groups for param in group.fsdp_params]
    if name == "_unsharded_param":
        return [param._unsharded_param.grad is not None for param in cut]
    return [param.unsharded_accumulated_grad is not None for param in cut]


def accumulates(form: str, name: str, sync: str, count: int) -> bool:
    """Whether something waits after a backward that is not to be averaged, and only there."""
    net, x = sharded(form), torch.ones(4, 3)
    found = []
    for synchronised in (True, False, True):
        getattr(net, sync)(synchronised)
        net(x).sum().backward()
        found.append(waiting(net, name))
    return found == [[False] * count, [True] * count, [False] * count]


def shards(rank: int, processes: int) -> dict[str, bool]:
    from torch.distributed._composable_state import _module_state_mapping

    unwrapped, net, x = nn.Linear(1, 1), sharded("plain"), torch.ones(4, 3)
    modules = [module for module in list(_module_state_mapping) if isinstance(module, FSDPModule)]
    empty = nn.Sequential(nn.Tanh())
    fully_shard(empty, mesh=init_device_mesh("cpu", (1,)))
    groups = [groups_of(net), groups_of(net.inner)]
    cut = [[p for group in own for p in group.fsdp_params] for own in groups]
    own_params = [{net.outer.weight}, set(net.inner.parameters())]
    pieces = [{p.sharded_param for p in params} for params in cut]
    flat = [p for params in cut for p in params]
    early = any(getattr(p, "_unsharded_param", None) is not None for p in flat)
    leaves = {id(n.variable) for n in graph_nodes(net(x)) if hasattr(n, "variable")}

    settings = {}
    for name, sync in (
        ("reduce_grads", "set_requires_gradient_sync"),
        ("all_reduce_grads", "set_requires_all_reduce"),
    ):
        model = sharded("hybrid")
        held = [group for module in (model, model.inner) for group in groups_of(module)]
        found = [[getattr(group, name) for group in held]]
        getattr(model, sync)(False)
        found.append([getattr(group, name) for group in held])
        # The users' own setting gives way to these, written to the groups.
        for group in held:
            setattr(group, name, True)
            if name == "reduce_grads":
                group.all_reduce_grads = True
        model(x).sum().backward()
        averaged = all(p.grad is not None for p in model.parameters())
        settings[name] = found == [[True, True], [False, False]] and averaged

    return {
        "_module_state_mapping": all(
            sum(module is other for other in modules) == 1 for module in (net, net.inner)
        )
        and unwrapped not in _module_state_mapping,
        "_get_fsdp_state": net._get_fsdp_state() is not net.inner._get_fsdp_state(),
        "_fsdp_param_group": [len(own) for own in groups] == [1, 1] and not groups_of(empty),
        "fsdp_params": [len(params) for params in cut] == [1, 2],
        "sharded_param": pieces == own_params,
        "_unsharded_param": not early
        and {id(p._unsharded_param) for p in flat} == leaves
        and accumulates("plain", "_unsharded_param", "set_requires_gradient_sync", 3),
        "unsharded_accumulated_grad": accumulates(
            "mixed", "unsharded_accumulated_grad", "set_requires_gradient_sync", 3
        ),
        "_partial_reduce_output": accumulates(
            "hybrid", "_partial_reduce_output", "set_requires_all_reduce", 2
        ),
        **settings,
    }


@functools.cache
def found_in_a_process(function: Callable[[int, int], dict[str, bool]]) -> dict[str, bool]:
    found: dict[str, bool] = run_in(1, function)[0]
    return found


PROCESSES = {
    replicas: (
        "_get_active_ddp_module",
        "_DDPSinkBackward",
        "ddp_weakref",
        "find_unused_parameters",
        "static_graph",
        "get_backend_config",
    ),
    shards: (
        "_module_state_mapping",
        "_get_fsdp_state",
        "_fsdp_param_group",
        "fsdp_params",
        "sharded_param",
        "_unsharded_param",
        "unsharded_accumulated_grad",
        "_partial_reduce_output",
        "reduce_grads",
        "all_reduce_grads",
    ),
}


@pytest.mark.parametrize(
    ("function", "name"),
    [(function, name) for function, names in PROCESSES.items() for name in names],
)
def test_in_a_process(function: Callable[[int, int], dict[str, bool]], name: str) -> None:
    assert found_in_a_process(function)[name], why(name)
