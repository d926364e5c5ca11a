"""``attach`` in several processes: DistributedDataParallel in every form, and fully_shard."""

import contextlib
from typing import Any

import pytest
import torch
from attached import SETTINGS, assert_same, batches
from kfac_models import Heads
from processes import run_in
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from tnt_optim import KFAC, TNT

# By form: arguments of DistributedDataParallel, micro-batches (a static graph takes one), and the
# head that each process uses at each step.
FORMS: dict[str, tuple[dict[str, Any], int, list[list[int]]]] = {
    "plain": ({}, 1, [[0, 0]] * 5),
    "accumulated": ({}, 2, [[0, 0]] * 5),
    "unused": ({"find_unused_parameters": True}, 2, [[0, 1], [0, 1], [0, 0], [1, 0], [1, 1]]),
    "static": ({"static_graph": True}, 1, [[0, 0]] * 5),
}


def train(
    rank: int, processes: int, form: str, place: str, method: type[TNT | KFAC] = TNT
) -> list[Tensor] | str:
    """One process's training: gradients, parameters and statistics at the end, or its error."""
    wrapping, micro, heads = FORMS[form]
    torch.manual_seed(3)
    model = Heads(sizes=(5, 6, 4))
    model.heads[1].requires_grad_(form == "unused")
    replicas = DistributedDataParallel(model, **wrapping)
    params = [p for p in model.parameters() if p.requires_grad]
    settings = {**SETTINGS, "stat_interval": 1, "likelihood": "categorical"}
    opt = method.paper(model if method is KFAC else params, **settings)
    if place != "in the loop":
        opt.attach(model if place == "inside" else replicas)
    results: list[Tensor] = []
    try:
        for step in range(5):
            opt.zero_grad()
            for number, (x, y) in enumerate(batches(10 * rank + step, micro), 1):
                with contextlib.nullcontext() if number == micro else replicas.no_sync():
                    output = replicas(x.double(), heads[step][rank])
                    if place == "in the loop":
                        opt.observe(output)
                    (cross_entropy(output, y) / micro).backward()
            results += [p.grad.clone() for p in params if p.grad is not None]
            opt.step()
    except RuntimeError as error:
        return str(error)
    held = [p for p in params if method is TNT or p.dim() > 1]  # KFAC's are those of layers
    stats = [s for p in held for s in opt.state[p]["stats"]]
    return results + [p.detach().clone() for p in params] + stats


@pytest.mark.parametrize("form", FORMS)
def test_replicas(form: str) -> None:
    """With a static graph only the module inside can be attached to: then it is the plain form."""
    loop = run_in(2, train, "plain" if form == "static" else form, "in the loop")
    assert_same(run_in(2, train, form, "inside"), loop)
    wrapped = run_in(2, train, form, "wrapped")
    if form == "static":
        assert all("static_graph" in message for message in wrapped)
    else:
        assert_same(wrapped, loop)


def test_kfac_inside_a_static_graph() -> None:
    wanted = run_in(2, train, "plain", "inside", KFAC)
    assert_same(run_in(2, train, "static", "inside", KFAC), wanted)


def sharded(rank: int, processes: int) -> dict[str, list[Tensor] | str]:
    """One process's training of sharded parameters, attached before or after, or in the loop."""
    found: dict[str, list[Tensor] | str] = {}
    for place in ("in the loop", "after", "around", "before"):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4))
        if place == "before":
            opt = TNT.paper(model.parameters(), likelihood="categorical", **SETTINGS)
            opt.attach(model)
        fully_shard(model, mesh=init_device_mesh("cpu", (processes,)))
        if place != "before":
            opt = TNT.paper(model.parameters(), likelihood="categorical", **SETTINGS)
        if place == "after":
            opt.attach(model)
        if place == "around":
            opt.attach(whole := nn.Sequential(model))
        try:
            for step in range(5):
                opt.zero_grad()
                ((x, y),) = batches(10 * rank + step)
                output = (whole if place == "around" else model)(x)
                if place == "in the loop":
                    opt.observe(output)
                cross_entropy(output, y).backward()
                opt.step()
        except RuntimeError as error:
            found[place] = str(error)
            continue
        found[place] = [p.detach().full_tensor() for p in model.parameters()]  # type: ignore[attr-defined]
    return found


def test_sharded_models() -> None:
    for rank in run_in(2, sharded):
        assert_same(rank["after"], rank["in the loop"])
        assert_same(rank["around"], rank["in the loop"])
        assert "after fully_shard(model)" in rank["before"]
