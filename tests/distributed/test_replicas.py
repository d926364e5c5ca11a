"""Processes with copies of one model: the training of one process on all their batches.

Each is compared with one process that observes the same micro-batches one after the other. States
of processes that share the work are saved, and loaded by as many processes or others.
"""

import functools
import runpy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import observation_count
from kfac_models import least_likely
from optimizers import EARLY, equal, values, warm_start
from processes import run_in
from replicas import Batches, assert_trained_as, drawn, load, save, train
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.nn.parallel import DistributedDataParallel

from tnt_optim import TNT, Shampoo

STEPS, MICRO, SHAPE = 7, 2, (5, 2, 2, 4)  # SHAPE: of a micro-batch's images

# By name: the method, its settings.
FORMS: dict[str, tuple[type[TNT | Shampoo], dict[str, Any]]] = {
    "tnt": (TNT, {"weight_decay": 0.1}),
    "grafted": (TNT, {"graft": "adam", "relative_damping": True, "estimator": "mle"}),
    "grafted to the momentum": (TNT, {"graft": "sgd"}),
    "diagonal": (TNT, {"max_factor_dim": 4}),
    "in blocks": (TNT, {"block_size": 4, "graft": "adam"}),
    "empirical": (TNT, EARLY),
    "ahead": (TNT, {"graft": "sgd", "nesterov": True, "likelihood": least_likely}),
    "shampoo": (Shampoo, {}),
}
SHARDS = (None, "directions", "inverses")


class Net(nn.Module):
    """A convolution in channels_last and two linear layers; float64."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.conv = nn.Conv2d(2, 3, (2, 3))
        self.hidden = nn.Linear(6, 5)
        self.out = nn.Linear(5, 4)
        self.double().to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        return self.out(torch.tanh(self.hidden(torch.tanh(self.conv(x)).flatten(1))))


def made_optimizer(net: nn.Module, form: str, **more: Any) -> TNT | Shampoo:
    method, settings = FORMS[form]
    rest = [p for name, p in net.named_parameters() if "conv" not in name]
    groups = [{"params": [*net.conv.parameters()], "lr": 0.02}, {"params": rest}]
    defaults: dict[str, Any] = {
        "lr": 0.05,
        "damping": 0.1,
        "stat_interval": 2,
        "inverse_interval": 3,
    }
    if method is TNT:
        defaults["likelihood"] = "categorical"
    return method.paper(groups, **{**defaults, **settings, **more})


def warm_start_on(batches: Batches, opt: TNT | Shampoo, model: nn.Module) -> None:
    warm_start(opt, model, len(batches), lambda number: batches[number - 900])


@functools.cache
def alone(form: str, processes: int, warm: bool) -> tuple[list[Tensor], list[Tensor]]:
    """End and start of one process's training on the micro-batches of all."""
    net = Net()
    start, opt = values(net), made_optimizer(net, form)
    if warm:
        # The batches of all processes are one batch here. Its sampled labels would be others, so
        # only the forms that sample none are compared. The last batch is the first process's alone.
        parts = drawn(2 * processes + 1, 99, *SHAPE)
        joined = [parts[i : i + processes] for i in range(0, len(parts), processes)]
        warm_start_on([tuple(map(torch.cat, zip(*b, strict=True))) for b in joined], opt, net)  # type: ignore[misc]
    train(net, opt, [drawn(MICRO * processes, step, *SHAPE) for step in range(STEPS)])
    return values(net), start


def replica(
    rank: int, processes: int, form: str, shard: str | None, warm: bool = False
) -> dict[str, Any]:
    """One process's training: its last parameters, and the state it keeps."""
    net = Net()
    model = DistributedDataParallel(net)
    opt = made_optimizer(net, form, shard=shard)
    if warm:
        warm_start_on(drawn(2 * processes + 1, 99, *SHAPE)[rank::processes], opt, model)
    steps = [drawn(MICRO * processes, step, *SHAPE) for step in range(STEPS)]
    train(model, opt, [batches[rank::processes] for batches in steps])
    kept = [sorted(opt.state[p]) for p in net.parameters()]
    sizes = [sum(s.nbytes for s in opt.state[p].get("stats", [])) for p in net.parameters()]
    return {"ends": values(net), "kept": kept, "bytes": sum(sizes)}


WARM = ("empirical", "ahead", "shampoo")
CASES = [*((form, False) for form in FORMS), *((form, True) for form in WARM)]


@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("shard", SHARDS)
@pytest.mark.parametrize(("form", "warm"), CASES)
def test_replicas_train_as_one_process(
    form: str, warm: bool, shard: str | None, processes: int
) -> None:
    ranks = run_in(processes, replica, form, shard, warm)
    assert_trained_as([rank["ends"] for rank in ranks], *alone(form, processes, warm))


@pytest.mark.parametrize("processes", [2, 4])
def test_statistics_live_with_their_owner_alone(processes: int) -> None:
    whole = run_in(processes, replica, "tnt", None)[0]["bytes"]
    for shard in ("directions", "inverses"):
        ranks = run_in(processes, replica, "tnt", shard)
        assert sum(rank["bytes"] for rank in ranks) == whole
        for number in range(len(ranks[0]["kept"])):
            kept = [rank["kept"][number] for rank in ranks]
            owners = [keys for keys in kept if "stats" in keys]
            others = [keys for keys in kept if "stats" not in keys]
            assert len(owners) == 1
            assert {"factors", "momentum"} <= set(owners[0])
            for keys in others:
                assert ("momentum" in keys) == ("factors" in keys) == (shard == "inverses")


# ------------------------------------------------------------------ checkpoints


def train_on_four(
    rank: int, processes: int, net: nn.Module, opt: TNT | Shampoo, steps: range
) -> None:
    """Steps on four micro-batches, however many processes there are."""
    model = net if processes == 1 else DistributedDataParallel(net)
    train(model, opt, [drawn(4, step, *SHAPE)[rank::processes] for step in steps])


def saved(rank: int, processes: int, folder: str, shard: str | None, by_name: bool) -> list[Tensor]:
    """Trains, saves, goes on; returns the last parameters."""
    net = Net()
    opt = made_optimizer(net, "grafted", shard=shard)
    train_on_four(rank, processes, net, opt, range(5))
    save(folder, net, opt, by_name)
    train_on_four(rank, processes, net, opt, range(5, 9))
    return values(net)


def loaded(
    rank: int, processes: int, folder: str, shard: str | None, how: str
) -> tuple[list[Tensor], list[bool]]:
    """Loads and goes on; returns the last parameters, and which statistics the process keeps.

    From one file that has the "whole" state, else with torch.distributed.checkpoint.
    """
    net = Net()
    with torch.no_grad():
        for param in net.parameters():
            param.zero_()
    opt = made_optimizer(net, "grafted", shard=shard)
    if how == "whole":
        files = torch.load(f"{folder}/whole.pt", weights_only=True)
        net.load_state_dict(files[0])
        opt.load_state_dict(files[1])
    else:
        load(folder, net, opt, how == "by name")
    train_on_four(rank, processes, net, opt, range(5, 9))
    return values(net), ["stats" in opt.state[p] for p in net.parameters()]


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("shard", SHARDS)
def test_as_many_processes_go_on_bit_for_bit(
    shard: str | None, by_name: bool, tmp_path: Path
) -> None:
    wanted = run_in(2, saved, str(tmp_path), shard, by_name)
    found = run_in(2, loaded, str(tmp_path), shard, "by name" if by_name else "by number")
    assert all(equal(end, wanted[0]) for end in (wanted[1], found[0][0], found[1][0]))


def saved_by_one(
    rank: int, processes: int, folder: str, shard: str
) -> tuple[list[Tensor], list[str]]:
    """As ``saved``, by process 1 in one file; also returns the warnings."""
    net = Net()
    opt = made_optimizer(net, "grafted", shard=shard)
    for param in net.parameters():  # as a wrapper does
        opt.state[param]["old_p"] = param.detach().clone()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        train_on_four(rank, processes, net, opt, range(5))
        with pytest.raises(ValueError, match="to must be a rank below 2, got 2"):
            opt.consolidate_state_dict(to=2)
        opt.consolidate_state_dict(to=1)
        files = net.state_dict(), opt.state_dict()
        if rank == 1:
            torch.save(files, f"{folder}/whole.pt")
        assert not said
        missing = [n for n, state in opt.state_dict()["state"].items() if "stats" not in state]
        assert bool(missing) == (rank == 0)
        assert all("old_p" in state for state in opt.state_dict()["state"].values())
        train_on_four(rank, processes, net, opt, range(5, 9))
        for _ in range(2):
            part = opt.state_dict()
            assert any("stats" not in state for state in part["state"].values())
        get_optimizer_state_dict(net, opt)
        dcp.save({"opt": opt}, checkpoint_id=f"{folder}/parts")
        for loads_with in (None, "inverses") if shard == "directions" else (None,):
            other = made_optimizer(net, "grafted", shard=loads_with)
            with pytest.raises(ValueError, match=r"lacks .*with shard.*consolidate_state_dict"):
                other.load_state_dict(part)
    return values(net), [str(w.message) for w in said]


@pytest.mark.parametrize("shard", ["directions", "inverses"])
def test_a_state_that_one_process_saved_loads_in_any(shard: str, tmp_path: Path) -> None:
    """As ``Trainer`` saves it; without consolidate_state_dict, which all call, it is warned of."""
    (wanted, said), (other, _) = run_in(2, saved_by_one, str(tmp_path), shard)
    assert equal(wanted, other)
    assert ["one process's part" in text and "consolidate" in text for text in said] == [True]
    for processes, loads_with in [(2, shard), (2, None), (4, "directions"), (1, None)]:
        found = run_in(processes, loaded, str(tmp_path), loads_with, "whole")
        for end, _ in found:
            assert equal(end, found[0][0])
            torch.testing.assert_close(end, wanted, rtol=0, atol=1e-11)
        if (processes, loads_with) == (2, shard):
            assert equal(found[0][0], wanted)
        kept = [sum(kept[number] for _, kept in found) for number in range(len(wanted))]
        assert set(kept) == {processes if loads_with is None else 1}


def skipped(rank: int, processes: int, folder: str) -> list[Any]:
    """Observes, does not step, saves and loads; each process has its own observations."""
    net = Net()
    opt = made_optimizer(net, "tnt")
    train_on_four(rank, processes, net, opt, range(2))
    opt.observe(net(drawn(4, 2, *SHAPE)[rank][0]))
    before = opt.state_dict()
    other = made_optimizer(net, "tnt")
    alone = {"totals": {}, "number": 1, "asked": [], "count": 1, "attached": 0}
    other.load_state_dict({**before, "observed": alone})
    return ["observed" in before, observation_count(opt), observation_count(other)]


def test_several_processes_leave_observations_out_of_a_state(tmp_path: Path) -> None:
    assert run_in(2, skipped, str(tmp_path)) == [[False, 1, 0]] * 2


def test_other_numbers_of_processes_and_other_shards_go_on(tmp_path: Path) -> None:
    wanted = run_in(4, saved, str(tmp_path), "directions", False)[0]
    for processes, shard in [(2, "directions"), (2, "inverses"), (1, None)]:
        found = run_in(processes, loaded, str(tmp_path), shard, "by number")
        for end, _ in found:
            torch.testing.assert_close(end, wanted, rtol=0, atol=1e-11)
        for number in range(len(wanted)):
            assert sum(kept[number] for _, kept in found) == 1


# ------------------------------------------------------------------ methods of the examples


class Matrices(nn.Module):
    """Two linear layers without biases; float64."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.out = nn.Linear(16, 6, bias=False), nn.Linear(6, 4, bias=False)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        return self.out(torch.tanh(self.first(x.flatten(1))))


def example(
    rank: int, processes: int, name: str, shard: str | None
) -> tuple[list[Tensor], list[Tensor]]:
    """The last and the first weights of a training by the method of an example."""
    path = Path(__file__).parents[2] / "examples" / f"{name.lower()}.py"
    make, net = runpy.run_path(str(path))[name], Matrices()
    start, opt = values(net), make(net.parameters(), lr=0.02, shard=shard)
    model = net if processes == 1 else DistributedDataParallel(net)
    steps = [drawn(2, step, *SHAPE) for step in range(STEPS)]
    train(model, opt, [batches[rank::processes] for batches in steps])
    return values(net), start


@pytest.mark.parametrize("shard", SHARDS)
@pytest.mark.parametrize("name", ["Muon", "SOAP"])
def test_methods_of_the_examples_train_as_one_process(name: str, shard: str | None) -> None:
    """Muon up to bfloat16, in which a difference of rounding may take the next number."""
    ranks, (alone, start) = run_in(2, example, name, shard), example(0, 1, name, None)
    assert equal(ranks[0][0], ranks[1][0])
    for own, other, before in zip(ranks[0][0], alone, start, strict=True):
        limit = 1e-2 if name == "Muon" else 1e-8
        assert (own - other).norm() <= limit * (other - before).norm()
