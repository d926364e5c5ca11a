"""``attach``: a model that hands over its output by itself trains as a loop with ``observe``.

Compiled models are in tests/system, several processes in tests/distributed.
"""

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import attached
import pytest
import torch
from attached import (
    SETTINGS,
    Net,
    assert_same,
    batches,
    contents,
    counted,
    explicit,
    made_net,
    train,
)
from conftest import observation_count, observed_gradients
from optimizers import batch, made, net, through_a_file, tnt_and_kfac
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from tnt_optim import TNT, Masked, with_fallback


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("micro", [1, 3])
def test_it_is_the_loop_that_observes(micro: int, dtype: torch.dtype | None) -> None:
    """Also under autocast, in which the model hands over its output and the loop does not."""
    model = made_net()
    opt = TNT.paper(model.parameters(), likelihood="categorical", **SETTINGS)
    opt.attach(model)
    train(model, opt, observe=False, micro=micro, dtype=dtype)
    assert_same(contents(model, opt), explicit(micro=micro, dtype=dtype))


def test_with_a_fallback() -> None:
    model, other = made_net(), made_net()
    opt, reference = made("fallback", model), made("fallback", other)
    handle = opt.attach(model)
    train(model, opt, observe=False)
    train(other, reference, observe=True)
    assert_same(contents(model, opt), contents(other, reference))
    handle.remove()
    model(torch.randn(8, 5))
    assert observation_count(opt.main) == 0


def test_only_training_is_observed() -> None:
    model = made_net()
    opt = TNT.paper(model.parameters(), likelihood="categorical", **SETTINGS)
    seen, output = counted()
    opt.attach(model, output)
    x = torch.randn(8, 5)
    model.eval()
    model(x)
    model.train()
    with torch.no_grad():
        model(x)
    with torch.inference_mode():
        model(x)
    assert not seen and observation_count(opt) == 0
    model.wrap = Tensor.detach
    model(x)
    assert len(seen) == 1 and observation_count(opt) == 0
    model.wrap = Tensor.clone
    model(x)
    assert len(seen) == 2 and observation_count(opt) == 1


def test_only_due_steps_are_observed() -> None:
    model = made_net()
    opt = TNT.paper(model.parameters(), likelihood="categorical", **SETTINGS)
    seen, output = counted()
    opt.attach(model, output)
    train(model, opt, 6, observe=False)
    assert len(seen) == 3  # steps 0, 2, 4
    empirical = TNT.paper(model.parameters(), likelihood=None, **SETTINGS)
    seen, output = counted()
    handle = empirical.attach(model, output)
    assert not empirical.observing
    train(model, empirical, 3, observe=False)
    assert not seen and all(empirical.state[p] for p in model.parameters())
    assert not model._forward_hooks, "it replaces the optimizer with a likelihood"
    handle.remove()


@pytest.mark.parametrize(
    ("wrap", "logits"),
    [
        (lambda z: SimpleNamespace(logits=z, loss=None), lambda r: r.logits),
        (lambda z: {"logits": z, "hidden": z + 1}, lambda r: r["logits"]),
    ],
    ids=["attribute", "key"],
)
def test_logits_are_found(wrap: Any, logits: Any) -> None:
    model = made_net(wrap=wrap)
    opt = TNT.paper(model.parameters(), likelihood="categorical", **SETTINGS)
    opt.attach(model)
    train(model, opt, observe=False, logits=logits)
    assert_same(contents(model, opt), explicit())


def test_output_may_take_the_arguments_of_the_forward() -> None:
    class Scaled(Net):
        def forward(self, x: Tensor, *, scale: Tensor) -> Any:
            return super().forward(x) * scale[:, None]

    def rows(x: Tensor, scale: Tensor) -> Tensor:
        return (x[:, 0] > 0) | (scale > 1)

    def run(attached: bool) -> list[Tensor]:
        torch.manual_seed(3)
        model = Scaled()
        opt = TNT(model.parameters(), likelihood="categorical", **SETTINGS)
        if attached:
            opt.attach(model, lambda z, args, kwargs: Masked(z, rows(*args, **kwargs)))
        for step in range(3):
            opt.zero_grad()
            ((x, y),) = batches(step)
            scale = torch.linspace(0.5, 1.5, len(x))
            z = model(x, scale=scale)
            if not attached:
                opt.observe(Masked(z, rows(x, scale)))
            cross_entropy(z, y).backward()
            opt.step()
        return list(model.parameters())

    assert_same(run(True), run(False))


def test_output_is_called_with_one_argument_where_it_can_be() -> None:
    model = made_net()
    opt = TNT(model.parameters(), likelihood="categorical")
    seen: list[int] = []

    def noted(result: Tensor, scale: float = 1.0, shift: float = 0.0) -> Tensor:
        seen.append(1)
        return result * scale + shift

    for output in (noted, lambda *result: seen.append(len(result)) or result[0], torch.relu):
        opt.attach(model, output)
        model(torch.randn(8, 5))
    assert seen == [1, 1] and observation_count(opt) == 3


@pytest.mark.parametrize("masked", [False, True])
def test_a_call_without_a_row_that_counts_is_no_micro_batch(masked: bool) -> None:
    def rows(z: Tensor, args: Any, kwargs: Any) -> Any:
        counts = args[0][:, 0] > 0
        return Masked(z, counts) if masked else z[counts]

    model = made_net()
    opt = TNT(model.parameters(), likelihood="categorical", **SETTINGS)
    opt.attach(model, rows)
    model(torch.rand(0, 5))
    assert observation_count(opt) == 0
    x = torch.rand(8, 5) + 0.1
    cross_entropy(model(-x), torch.zeros(8, dtype=torch.long)).backward()
    assert observation_count(opt) == int(masked)  # the mask is not read
    cross_entropy(model(x), torch.zeros(8, dtype=torch.long)).backward()
    assert observation_count(opt) == 1 + int(masked)
    opt.step()


def test_a_model_in_eval_mode_is_named_as_the_reason_of_a_missing_observation() -> None:
    model = made_net()
    opt = TNT(model.parameters(), likelihood="categorical", **{**SETTINGS, "stat_interval": 1})
    opt.attach(model)
    model.eval()
    with pytest.raises(RuntimeError, match=r"no statistics .* eval mode, .* model\.train\(\)"):
        train(model, opt, 1, observe=False)
    train(model.train(), opt, 1, observe=False)
    with pytest.warns(RuntimeWarning, match=r"on with the old .* eval mode, .* model\.train\(\)"):
        train(model.eval(), opt, 2, observe=False)


def test_the_reason_of_an_earlier_step_is_forgotten() -> None:
    """A step with a call in eval mode, as of a teacher, and one without any call."""
    model = made_net()
    opt = TNT(model.parameters(), likelihood="categorical", **{**SETTINGS, "stat_interval": 1})
    opt.attach(model)
    model.eval()(torch.randn(8, 5))
    train(model.train(), opt, 1, observe=False)
    with pytest.warns(RuntimeWarning, match=r"observe\(output\) was not called") as said:
        opt.step()
    assert "eval mode" not in str(said[0].message)


def test_a_batch_that_the_loop_observes_too_is_warned_of_once() -> None:
    model = made_net()
    opt = TNT(model.parameters(), likelihood="categorical", **SETTINGS)
    with opt.attach(model):
        train(model, opt, 2, observe=False)
        with pytest.warns(RuntimeWarning, match=r"attach and .* observe both .* twice") as said:
            train(model, opt, 6, observe=True)
    assert [warning.filename for warning in said] == [attached.__file__]
    other = TNT(model.parameters(), likelihood="categorical", **SETTINGS)
    with other.attach(model):
        pass
    train(model, other, 2, observe=True)  # a warning would be an error


@pytest.mark.parametrize(
    ("wrap", "error", "message"),
    [
        (lambda z: (z, "more"), TypeError, r"output must say .*but tuple: opt.attach\(model, out"),
        (lambda z: {"scores": z}, TypeError, "output must say .*but dict"),
        (lambda z: None, TypeError, "output must say .*but NoneType"),
        (lambda z: z.sum(1), ValueError, r"output must be \(batch, ..., classes\)"),
    ],
)
def test_a_result_that_cannot_be_observed_is_an_error_in_the_forward(
    wrap: Any, error: type[Exception], message: str
) -> None:
    model = made_net(wrap=wrap)
    opt = TNT.paper(model.parameters(), likelihood="categorical")
    opt.attach(model)
    with pytest.raises(error, match=message):
        model(torch.randn(8, 5))
    assert observation_count(opt) == 0
    model.eval()
    model(torch.randn(8, 5))


def test_wrong_arguments_leave_the_attached_model() -> None:
    model = made_net()
    opt = TNT.paper(model.parameters(), likelihood="categorical")
    opt.attach(model)
    with pytest.raises(TypeError, match=r"^model must be a torch.nn.Module, got generator$"):
        opt.attach(model.parameters())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^output must be a function or None, got str$"):
        opt.attach(nn.Linear(2, 2), "logits")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^output must be .*kwargs\), got \(out, mask\)$"):
        opt.attach(nn.Linear(2, 2), lambda out, mask: out)
    with pytest.raises(ValueError, match=r"^model must have a parameter of this optimizer"):
        opt.attach(made_net())
    model(torch.randn(8, 5))
    assert observation_count(opt) == 1


# ------------------------------------------------------------------ handles and copies


def test_handles_remove() -> None:
    model = made_net()
    opt = TNT.paper(model.parameters(), likelihood="categorical")
    with opt.attach(model) as handle:
        assert isinstance(handle, torch.utils.hooks.RemovableHandle)
        model(torch.randn(8, 5))
    assert observation_count(opt) == 1 and not model._forward_hooks
    handle.remove()
    model(torch.randn(8, 5))
    assert observation_count(opt) == 1


def test_attaching_again_replaces() -> None:
    model, other = made_net(), made_net()
    opt = TNT.paper([*model.parameters(), *other.parameters()], likelihood="categorical")
    seen, output = counted()
    first = opt.attach(model, output)
    second = opt.attach(model)
    assert len(model._forward_hooks) == 1
    first.remove()  # which is gone already
    model(torch.randn(8, 5))
    assert observation_count(opt) == 1 and not seen
    opt.attach(other)
    assert not model._forward_hooks
    model(torch.randn(8, 5))
    second.remove()
    assert observation_count(opt) == 1
    other(torch.randn(8, 5))
    assert observation_count(opt) == 2


def test_attaching_at_every_step_keeps_nothing_of_earlier_ones() -> None:
    model = net()
    opt = made("sampled", model)
    gc.collect()  # leftovers of other tests
    alive = len(weakref.finalize._registry)  # type: ignore[attr-defined]
    for _ in range(5):
        with opt.attach(model):
            pass
    assert len(weakref.finalize._registry) <= alive + 1  # type: ignore[attr-defined]


def test_two_optimizers_observe_one_model() -> None:
    model = made_net()
    one, other = (
        TNT.paper(model.hidden.parameters(), likelihood="categorical"),
        TNT.paper(model.out.parameters(), likelihood="categorical"),
    )
    one.attach(model)
    other.attach(model)
    model(torch.randn(8, 5))
    assert observation_count(one) == observation_count(other) == 1
    assert set(observed_gradients(other)) == set(model.out.parameters())


def test_an_optimizer_of_the_same_parameters_replaces_an_earlier_one() -> None:
    """As where a trainer makes one for each fit, and the earlier trainer lives on."""
    model, elsewhere = made_net(), made_net()
    one, other, apart = (
        TNT.paper(m.parameters(), likelihood="categorical") for m in (model, model, elsewhere)
    )
    apart.attach(elsewhere)
    one.attach(model)
    other.attach(model)
    model(torch.randn(8, 5))
    elsewhere(torch.randn(8, 5))
    assert [observation_count(opt) for opt in (one, other, apart)] == [0, 1, 1]
    one.attach(model)
    model(torch.randn(8, 5))
    assert [observation_count(opt) for opt in (one, other)] == [1, 1]
    assert len(model._forward_hooks) == 1
    part = TNT.paper(model.out.parameters(), likelihood="categorical")
    part.attach(model)
    assert len(model._forward_hooks) == 2
    TNT(model.parameters()).attach(model)  # has nothing to observe itself
    assert len(model._forward_hooks) == 1


def test_neither_keeps_the_other_alive() -> None:
    model = made_net()
    opt = TNT.paper(model.parameters(), likelihood="categorical", **SETTINGS)
    handle = opt.attach(model)
    train(model, opt, 2, observe=False)
    gone = weakref.ref(opt)
    del opt
    gc.collect()
    assert gone() is None and not model._forward_hooks
    model(torch.randn(8, 5))
    opt = TNT.paper(model.parameters(), likelihood="categorical")
    handle = opt.attach(model)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    handle.remove()


@tnt_and_kfac
def test_an_observation_is_freed(name: str) -> None:
    """log_softmax saves its own result, which must not hold itself."""
    model = net()
    opt = made(name, model)
    opt.attach(model)
    model(batch(0)[0].float())
    assert opt._observed.count == 1
    gone = weakref.ref(model[2].weight)
    del opt, model
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, copy.copy, lambda m: through_a_file(m, weights_only=False)]
)
def test_copies_of_the_model_observe_nothing(copied: Callable[[nn.Module], nn.Module]) -> None:
    model = nn.Sequential(nn.Linear(5, 4))
    opt = TNT.paper(model.parameters(), likelihood="categorical")
    opt.attach(model, lambda result: result)  # a function that cannot be pickled
    twin = copied(model)
    twin(torch.randn(8, 5))
    # A shallow copy shares its hooks, as it does its parameters.
    assert observation_count(opt) == (copied is copy.copy)
    again = TNT.paper(twin.parameters(), likelihood="categorical")
    again.attach(twin)
    twin(torch.randn(8, 5))
    assert observation_count(again) == 1


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_of_the_optimizer_are_not_attached(copied: Callable[[Any], Any]) -> None:
    model = nn.Sequential(nn.Linear(5, 4))
    opt = TNT.paper(model.parameters(), likelihood="categorical", **SETTINGS)
    opt.attach(model)
    train(model, opt, 3, observe=False)
    twin_model, twin = copied((model, opt))
    twin_model(torch.randn(8, 5))
    assert observation_count(twin) == observation_count(opt) == 0
    twin.attach(twin_model)
    assert model._forward_hooks  # the original keeps its hook
    train(model, opt, observe=False)
    train(twin_model, twin, observe=False)
    assert_same(contents(model, opt), contents(twin_model, twin))


# ------------------------------------------------------------------ calls that are no micro-batch


@pytest.mark.parametrize("kind", [iter, list], ids=["generator", "list"])
def test_warm_start_is_not_observed(kind: Callable[[Any], Any]) -> None:
    def run(attached: bool) -> tuple[Any, ...]:
        model = made_net()
        opt = TNT.paper(model.parameters(), likelihood="categorical", **SETTINGS)
        seen, output = counted()
        if attached:
            opt.attach(model, output)
        with pytest.warns(match="batch norm") if kind is list else nullcontext():
            opt.warm_start(kind(model(x) for x, _ in batches(99, 3)), model=model)
        assert observation_count(opt) == 0
        assert kind is list or not seen
        train(model, opt, 4, observe=not attached)
        # Once more: the weights have changed.
        with pytest.warns(match="batch norm") if kind is list else nullcontext():
            opt.warm_start(kind(model(x) for x, _ in batches(98, 3)), model=model)
        train(model, opt, 4, observe=not attached)
        return contents(model, opt)

    # With a list the buffers of batch norm are not put back, in either run.
    assert_same(run(True), run(False))


def test_warm_start_that_fails_leaves_the_model_attached() -> None:
    model = made_net()
    opt = TNT.paper(model.parameters(), likelihood="categorical", **SETTINGS)
    opt.attach(model)

    def outputs() -> Iterator[Tensor]:
        yield model(torch.randn(8, 5))
        raise KeyError("no more data")

    with pytest.raises(KeyError):
        opt.warm_start(outputs(), model=model)
    model(torch.randn(8, 5))
    assert observation_count(opt) == 1


@pytest.mark.parametrize("early_stop", [True, False])
def test_model_checkpointed_as_a_whole_is_observed_once(early_stop: bool) -> None:
    """Its own hook is called again in the backwards of the user and of ``observe``."""
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4))
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    opt = TNT.paper(model.parameters(), likelihood="categorical", **SETTINGS)
    seen, output = counted()
    opt.attach(model, output)
    with set_checkpoint_early_stop(early_stop):
        train(lambda x: checkpoint(model, x, use_reentrant=False), opt, 4, observe=False)  # type: ignore[arg-type]
    assert len(seen) == 2
    assert len(calls) == (4 if early_stop else 4 + 4 + 2)


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace")
@pytest.mark.parametrize(
    "exported",
    [lambda model, x: torch.export.export(model, x, strict=False).module(), torch.jit.trace],
)
def test_exported_model_is_not_observed(exported: Callable[..., Any]) -> None:
    model = nn.Sequential(nn.Linear(5, 4))
    opt = TNT.paper(model.parameters(), likelihood="categorical")
    opt.attach(model)
    x = torch.randn(8, 5)
    torch.testing.assert_close(exported(model, (x,))(x), model(x))
    assert observation_count(opt) == 1


def test_transforms_and_other_weights_are_not_observed() -> None:
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4))
    opt = TNT.paper(model.parameters(), likelihood="categorical")
    opt.attach(model)
    x, y = torch.randn(8, 5), torch.randint(4, (8,))
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}

    def loss(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(functional_call(model, weights, (x[None],)), y[None])

    wanted = torch.stack([loss(weights, *pair) for pair in zip(x, y, strict=True)])
    torch.testing.assert_close(vmap(loss, (None, 0, 0))(weights, x, y), wanted)
    own = dict(model.named_parameters())
    gradients = grad(loss)(own, x[0], y[0])
    assert gradients.keys() == own.keys()
    others = {name: w.requires_grad_() for name, w in weights.items()}
    functional_call(model, others, (x,)).sum().backward()
    assert observation_count(opt) == 0
    model(x)
    assert observation_count(opt) == 1


# ------------------------------------------------------------------ wrappers


class Borrowing:
    """Wraps an optimizer as Lightning and Fabric do: a class that inherits from the optimizer's."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self.__class__ = type("Wrapped", (type(self), type(optimizer)), {})

    @property
    def optimizer(self) -> Any:
        """The wrapped optimizer."""
        return self._optimizer

    def __getattr__(self, item: str) -> Any:
        return getattr(self._optimizer, item)


@tnt_and_kfac
@pytest.mark.parametrize("observe", [False, True])
@pytest.mark.filterwarnings("ignore:KFAC updates:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:likelihood 'bernoulli':RuntimeWarning")
def test_a_wrapper_is_the_optimizer(name: str, observe: bool) -> None:
    settings: dict[str, Any] = {"likelihood": "bernoulli", "seed": 5, "graft": "rms"}
    model, other = made_net(), made_net()
    opt, reference = made(name, model, **settings), made(name, other, **settings)
    wrapper: Any = Borrowing(opt)
    if not observe:
        wrapper.attach(model)
        wrapper.attach(model)
    assert wrapper.observing
    wrapper.warm_start((model(x) for x, _ in batches(9)), model=model)
    reference.warm_start((other(x) for x, _ in batches(9)), model=other)
    if observe:
        train(model, wrapper, observe=True)
    else:  # what the wrapper attached outlives it
        del wrapper
        gc.collect()
        train(model, opt, observe=False)
    train(other, reference, observe=True)
    wrapper = Borrowing(opt)
    assert_same(contents(model, wrapper), contents(other, reference))
    assert wrapper.failures() == reference.failures()
    if name == "kfac":
        wrapper.close()
        assert not model._forward_hooks


def test_what_a_wrapper_has_of_the_optimizer() -> None:
    opt = TNT(made_net().parameters(), likelihood="gaussian", shard="inverses")
    wrapper: Any = Borrowing(opt)
    opt.process_group = group = object()
    assert wrapper.process_group is group
    assert (wrapper.likelihood, wrapper.shard) == ("gaussian", "inverses")
    both: Any = Borrowing(with_fallback(opt, SGD(made_net().parameters())))
    assert both.main is opt and len(both.param_groups) == 2


@tnt_and_kfac
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
@pytest.mark.filterwarnings("ignore:KFAC updates:RuntimeWarning")
def test_a_copy_of_a_wrapper_wraps(name: str, copied: Callable[[Any], Any]) -> None:
    wrapper: Any = copied(Borrowing(made(name, made_net(), seed=5)))
    assert vars(wrapper).keys() == {"_optimizer"}
    assert wrapper.state_dict()["sampling"]["seed"] == 5


def test_a_wrapper_keeps_what_is_its_own() -> None:
    class Option(TNT):
        extra: Any = 1

        @property
        def optimizer(self) -> str:
            return "no wrapper"

    class Sub(Option):
        def more(self) -> int:
            return 2

    opt = Sub(made_net().parameters(), likelihood="categorical")
    assert opt.more() == 2 and opt.observing
    wrapper: Any = Borrowing(opt)
    wrapper.extra = 3
    assert (wrapper.extra, opt.extra) == (3, 1)


def test_replicas_in_threads_are_refused() -> None:
    model = made_net()
    opt = TNT.paper(model.parameters(), likelihood="categorical")
    opt.attach(model)
    replica = model._replicate_for_data_parallel()  # what DataParallel makes for each GPU
    with pytest.raises(RuntimeError, match="attach to the DataParallel module"):
        replica(torch.randn(8, 5))
    whole = nn.DataParallel(model)
    opt.attach(whole)
    whole(torch.randn(8, 5))
    assert observation_count(opt) == 1
