"""What observe() collects: micro-batches, draws, and the layers that outputs reach or miss."""

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from drawn import close, noise
from kfac_models import Heads, conv_net, held, images, least_likely, missed
from optimizers import NO_FAILURES, equal, through_a_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tnt_optim import KFAC


def test_structured_outputs_count_examples_by_their_first_tensor() -> None:
    model, x = nn.Linear(3, 2).double(), noise(6, 3)

    def logits(output: Any) -> Tensor:
        return output["logits"][0] if isinstance(output, dict) else output

    found = []
    for wrap in (lambda z: z, lambda z: {"loss": z.sum(), "logits": [z]}):
        opt = KFAC.paper(model, likelihood=lambda out: logits(out).square().sum() / 6, lr=0.0)
        opt.warm_start([wrap(model(x))])
        found.append(held(opt))
    assert equal(*found)
    with pytest.raises(ValueError, match="batch as its first dimension"):
        KFAC.paper(model, likelihood=lambda z: z).warm_start([model(x).sum()])


def test_a_warm_start_that_is_not_due_needs_a_generator() -> None:
    model = conv_net()
    opt = KFAC.paper(model, likelihood="categorical")
    opt.param_groups[0]["step"] = 1  # not due any more, and the outputs were made before
    opt.warm_start([model(images())])  # a layer without statistics is captured at every step
    late = [model(images())]
    with pytest.raises(ValueError, match="generator"):
        opt.warm_start(late)


# ------------------------------------------------------------------ layers reached or missed


def use(model: Heads, opt: KFAC, *heads: int, observed: bool = True) -> None:
    """One step on the loss of some heads, of which the first is observed."""
    opt.zero_grad()
    outputs = model(noise(8, 4), *heads)
    outputs = outputs if isinstance(outputs, list) else [outputs]
    if observed:
        opt.observe(outputs[0])
    sum(output.softmax(1).square().sum() for output in outputs).backward()
    opt.step()


def test_heads_used_in_turn_are_all_trained() -> None:
    model = Heads()
    opt = KFAC.paper(model, stat_interval=10, likelihood="categorical")
    before = copy.deepcopy(model.state_dict())
    for head in [0, 0, 1, 0, 1]:
        stats = held(opt)[:2]
        use(model, opt, head)
        # The first statistics of a head do not change those of the body.
        assert not stats or equal(stats, held(opt)[:2])
    assert not any(torch.equal(before[k], v) for k, v in model.state_dict().items())


def test_a_layer_that_only_the_loss_reaches_takes_the_momentum_with_one_warning() -> None:
    """A value head: it is trained, named once, and preconditioned once an output reaches it."""
    model = Heads(3)
    opt = KFAC.paper(model, lr=0.1, stat_interval=1, weight_decay=0.5, likelihood="categorical")
    head, body = model.heads[2], model.body.weight.detach().clone()
    names = r"does not depend on .*'heads.1.weight'.* \(and 1 more\).* updated with plain momentum"
    momentum = [torch.zeros_like(p) for p in head.parameters()]
    for step in range(3):
        before = [p.detach().clone() for p in head.parameters()]
        with pytest.warns(RuntimeWarning, match=names) if step == 0 else nullcontext():
            use(model, opt, 0, 1, 2)
        momentum = [0.9 * m + p.grad for m, p in zip(momentum, head.parameters(), strict=True)]
        for old, m, p in zip(before, momentum, head.parameters(), strict=True):
            close(p.detach(), old - 0.1 * (m + 0.5 * old))
    assert not torch.equal(body, model.body.weight) and not opt.state[head.weight]["stats"]
    opt.load_state_dict(opt.state_dict())
    use(model, opt, 2)
    assert len(opt.state[head.weight]["stats"]) == 2
    close(opt.state[head.weight]["momentum"][:, :-1], 0.9 * momentum[0] + head.weight.grad)


def counting(model: nn.Module, stat_interval: int) -> tuple[KFAC, list[Tensor]]:
    """The optimizer of a model, and the outputs that it samples."""
    sampled = []

    def likelihood(output: Tensor) -> Tensor:
        sampled.append(output)
        return least_likely(output)

    return KFAC.paper(model, stat_interval=stat_interval, likelihood=likelihood), sampled


def test_a_layer_that_outputs_never_reach_is_asked_for_at_scheduled_steps_only() -> None:
    model = Heads()
    opt, sampled = counting(model, stat_interval=4)
    for t in range(9):
        sampled.clear()
        # No step is refused, though observe is mostly not called.
        with pytest.warns(RuntimeWarning, match="'heads.1.weight'") if t == 0 else nullcontext():
            use(model, opt, 0, 1, observed=t % 4 == 0 or t == 2)
        assert len(sampled) == (t % 4 == 0)
        assert missed(opt) == {2: True}
    assert missed(copy.deepcopy((model, opt))[1]) == {2: True}
    opt.param_groups[0]["step"] = 12
    use(model, opt, 1, 0)
    assert opt.state[model.heads[1].weight]["stats"]
    assert missed(opt) == {1: True}  # now the other head is missed


def test_a_loaded_state_remembers_the_layers_that_outputs_missed() -> None:
    model = Heads()
    opt = KFAC(model, stat_interval=4, likelihood="categorical")
    with pytest.warns(RuntimeWarning, match="'heads.1.weight'"):
        use(model, opt, 0, 1)
    twin = copy.deepcopy(model)
    fresh = KFAC(twin, stat_interval=4, likelihood="categorical")
    fresh.load_state_dict(through_a_file(opt.state_dict()))
    assert opt.failures() == fresh.failures() == NO_FAILURES | {"unreached": 1}
    for optimizer, net in ((opt, model), (fresh, twin)):
        torch.manual_seed(0)
        with pytest.warns(RuntimeWarning) if optimizer is fresh else nullcontext():
            use(net, optimizer, 0, 1)
        use(net, optimizer, 1, 0)  # an output reaches it between two refreshes
    assert equal(model.parameters(), twin.parameters())


def test_a_layer_unused_so_far_costs_nothing_and_joins_when_it_is_used() -> None:
    """Between the scheduled steps, at its first use, whatever was asked for before."""
    model = Heads()
    opt, sampled = counting(model, stat_interval=10)
    before = model.heads[1].weight.detach().clone()
    for step, head in enumerate([0, 0, 0, 1]):
        sampled.clear()
        use(model, opt, head)
        assert len(sampled) == (step == 0 or head == 1)
        assert missed(opt) == ({2: False} if head == 0 else {})
    assert not torch.equal(before, model.heads[1].weight)


def test_a_layer_unused_at_the_scheduled_step_moves_if_later_ones_are_not_observed() -> None:
    model = Heads()
    opt = KFAC.paper(model, stat_interval=3, likelihood="categorical")
    before = model.heads[1].weight.detach().clone()
    for t, head in enumerate([0, 1, 1, 1]):
        with pytest.warns(RuntimeWarning, match="'heads.1.weight'") if t == 1 else nullcontext():
            use(model, opt, head, observed=t % 3 == 0)
        assert torch.equal(before, model.heads[1].weight) == (t == 0)
        assert bool(opt.state[model.heads[1].weight].get("stats")) == (t == 3)


@pytest.mark.filterwarnings("ignore:KFAC updates:RuntimeWarning")
def test_an_output_may_miss_every_layer_but_not_every_parameter() -> None:
    """As with layer drop: the statistics stay, what the loss reaches moves."""
    model = nn.ModuleDict({"words": nn.Embedding(5, 4), "layer": nn.Linear(4, 4)})
    opt = KFAC.paper(model, stat_interval=1, lr=0.1, likelihood="categorical")
    tokens = torch.tensor([0, 1, 2, 3, 4, 1])
    for is_dropped in (False, True, False):
        hidden = model["words"](tokens)
        output = hidden if is_dropped else hidden + model["layer"](hidden)
        stats, words = held(opt), model["words"].weight.detach().clone()
        opt.zero_grad()
        opt.observe(output)
        cross_entropy(output, tokens % 4).backward()
        opt.step()
        assert not stats or equal(stats, held(opt)) == is_dropped
        assert not torch.equal(words, model["words"].weight)
    assert opt.failures() == NO_FAILURES
    stats = held(opt)
    with pytest.raises(ValueError, match="outputs must depend on a layer"):
        opt.warm_start(model["words"](tokens) for _ in range(2))
    model["layer"].requires_grad_(False)
    with pytest.raises(ValueError, match="outputs must depend on a layer"):
        opt.warm_start(model["layer"](model["words"](tokens)) for _ in range(2))
    assert equal(stats, held(opt))


def test_a_layer_with_another_weight_is_named() -> None:
    model = Heads()
    opt = KFAC(model, likelihood="categorical")
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    with pytest.raises(RuntimeError, match=r"^layer 'body' .*assign=True"):
        opt.step()


class Experts(nn.Module):
    """Rows go to one expert or to another."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 3) for _ in range(2))
        self.head = nn.Linear(3, 3)

    def forward(self, x: Tensor, first: int) -> Tensor:
        """(N, 4) to (N, 3); the first expert gets so many rows."""
        parts = [expert(x[rows]) for expert, rows in zip(
            self.experts, (slice(first), slice(first, None)), strict=True
        )]  # fmt: skip
        return self.head(torch.cat(parts))


@pytest.mark.parametrize("first", [0, 3])
def test_a_layer_that_is_called_without_rows_is_as_if_it_was_not_called(first: int) -> None:
    model = Experts()
    opt = KFAC.paper(model, stat_interval=1, likelihood="categorical")
    expert = model.experts[0]
    for t in range(8):
        opt.zero_grad()
        output = model(noise(8, 4).float(), first if t == 0 else 0 if t < 7 else 5)
        opt.observe(output)
        before = opt.state[expert.weight].get("stats")
        before = before and [stat.clone() for stat in before]
        output.softmax(1).square().sum().backward()
        # Without statistics it takes the momentum, here zero; its next call with rows gives them.
        opt.step()
        after = opt.state[expert.weight].get("stats")
        assert bool(after) == (first > 0 or t == 7)
        if 0 < t < 7 and before:
            assert equal(before, after)
    assert opt.failures() == NO_FAILURES
