"""At the first step, a likelihood that does not fit the training loss is noticed; no other is."""

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from email.message import Message
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from optimizers import made, tnt_and_kfac
from torch import Tensor, nn

from tnt_optim import TNT, Masked, messages, mismatch

Loss = Callable[[Tensor, Tensor], Tensor]
ROWS, WIDTH, OUTPUTS = 64, 6, 12


def classes(rows: int = ROWS) -> Tensor:
    return torch.randint(OUTPUTS, (rows,))


def bits() -> Tensor:
    return torch.randint(2, (ROWS, OUTPUTS)).float()


def numbers() -> Tensor:
    return torch.randn(ROWS, OUTPUTS)


def summed_bce(z: Tensor, y: Tensor, **more: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(z, y, reduction="sum", **more) / len(z)


def half_squares(z: Tensor, y: Tensor) -> Tensor:
    return (z - y).square().sum() / (2 * len(z))


def first_step(
    name: str,
    likelihood: Any,
    loss: Loss,
    target: Callable[[], Tensor],
    last: nn.Module | None = None,
    mask: Tensor | None = None,
    **settings: Any,
) -> None:
    """One step of a small fresh model, whose last layer is ``last``."""
    body = [nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, OUTPUTS)]
    model = nn.Sequential(*body, *([] if last is None else [last]))
    opt = made(name, model, likelihood=likelihood, **settings)
    output = model(torch.randn(ROWS, WIDTH))
    opt.observe(output if mask is None else Masked(output, mask))
    loss(output, target()).backward()
    opt.step()


# ------------------------------------------------------------------ what does not fit


NO_SOFTMAX = "'categorical' does not fit the training loss: rows .* do not sum to zero.* "
OTHERS: dict[str, tuple[str, Loss, Callable[[], Tensor], nn.Module | None, str]] = {
    "squared error": (
        "categorical", F.mse_loss, numbers, None, "If it is a squared error, use .*'gaussian'",
    ),
    "binary cross entropy": (
        "categorical", F.binary_cross_entropy_with_logits, bits, None,
        NO_SOFTMAX + "binary cross entropy: .*'bernoulli'",
    ),
    "softmax applied": (
        "categorical", lambda p, y: F.nll_loss(p.log(), y), classes, nn.Softmax(1),
        NO_SOFTMAX + "rows sum to one: observe the argument of softmax",
    ),
    "sigmoid applied": (
        "categorical", F.binary_cross_entropy, bits, nn.Sigmoid(),
        NO_SOFTMAX + "All outputs are between 0 and 1: if sigmoid",
    ),
    "sum over a batch": (
        "categorical", lambda z, y: F.cross_entropy(z, y, reduction="sum"), classes, None,
        "'categorical' .* times as large, as that of a sum over the batch of 64",
    ),
    "ten times": (
        "categorical", lambda z, y: 10 * F.cross_entropy(z, y), classes, None,
        r"'categorical' .* gradient is about (9|10)(\.\d)? times as large\. ",
    ),
    "mean over outputs": (
        "bernoulli", F.binary_cross_entropy_with_logits, bits, None,
        "'bernoulli' .* as that of a mean over outputs, which the default .* is: 0.083 times",
    ),
    "sigmoid for bernoulli": (
        "bernoulli", F.binary_cross_entropy, bits, nn.Sigmoid(),
        "'bernoulli' .*all outputs are between 0 and 1. Observe logits",
    ),
    "sum of everything": (
        "bernoulli", lambda z, y: F.binary_cross_entropy_with_logits(z, y, reduction="sum"), bits,
        None, "'bernoulli' .* as that of a sum over the batch of 64",
    ),
    "cross entropy for bernoulli": (
        "bernoulli", F.cross_entropy, classes, None,
        "'bernoulli' .* is that of a cross entropy: use likelihood='categorical'",
    ),
    "cross entropy for gaussian": (
        "gaussian", lambda z, y: -F.cross_entropy(z, y), classes, None,
        "'gaussian' .* is that of a cross entropy: use likelihood='categorical'",
    ),
    "binary cross entropy for gaussian": (
        "gaussian", summed_bce, bits, None,
        "'gaussian' .* is that of a binary cross entropy: use likelihood='bernoulli'",
    ),
    "mean of squares": (
        "gaussian", F.mse_loss, numbers, None,
        "'gaussian' .* mean over outputs, which F.mse_loss is: 0.17 times",
    ),
    "sum of squares": (
        "gaussian", lambda z, y: F.mse_loss(z, y, reduction="sum"), numbers, None,
        "'gaussian' .* as that of a sum over the batch of 64",
    ),
}  # fmt: skip


@tnt_and_kfac
@pytest.mark.parametrize("other", OTHERS)
def test_a_loss_that_does_not_fit_is_noticed(name: str, other: str) -> None:
    """Once, at the line of the user's step."""
    likelihood, loss, target, last, message = OTHERS[other]
    with pytest.warns(RuntimeWarning, match=message) as said:
        first_step(name, likelihood, loss, target, last)
    assert [warning.filename for warning in said] == [__file__]


def test_a_constant_factor_is_noticed_only_where_it_matters() -> None:
    """With relative damping and grafting it changes nothing; another kind of loss does."""
    free: dict[str, Any] = {"relative_damping": True, "graft": "adam"}
    mean_bce = F.binary_cross_entropy_with_logits
    first_step("sampled", "bernoulli", mean_bce, bits, **free)
    with pytest.warns(RuntimeWarning, match=NO_SOFTMAX):
        first_step("sampled", "categorical", F.mse_loss, numbers, **free)


# ------------------------------------------------------------------ what fits


def imbalanced(z: Tensor, y: Tensor) -> Tensor:
    """One class in 64 rows is rare and weighs 100 times as much."""
    y = torch.zeros_like(y)
    y[0] = 1
    return F.cross_entropy(z, y, torch.tensor([1.0] + 11 * [100.0]))


def with_penalty(z: Tensor, y: Tensor) -> Tensor:
    """The z-loss of large language models, on logits with a large sum of exponentials."""
    return F.cross_entropy(z, y) + 1e-4 * z.logsumexp(1).square().mean()


def one_hot() -> Tensor:
    return F.one_hot(classes(), OUTPUTS).float()


class Times(nn.Module):
    """With 100 the model is almost certain, and wrong; with 0.001 it knows nothing."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        """The factor times the input."""
        return self.factor * x


FITTING: dict[str, tuple[str, Loss, Callable[[], Tensor], nn.Module | None]] = {
    "cross entropy": ("categorical", F.cross_entropy, classes, None),
    "weighted": ("categorical", imbalanced, classes, None),
    "penalised": ("categorical", with_penalty, classes, None),
    "margin": ("categorical", F.multi_margin_loss, classes, None),
    "log-probabilities": ("categorical", F.nll_loss, classes, nn.LogSoftmax(1)),
    "certain and wrong": ("categorical", F.cross_entropy, classes, Times(100)),
    "an eighth": ("categorical", lambda z, y: F.cross_entropy(z, y) / 8, classes, None),
    "scaled": ("categorical", lambda z, y: 65536 * F.cross_entropy(z, y), classes, None),
    "binary": ("bernoulli", summed_bce, bits, None),
    "binary, a part": ("bernoulli", lambda z, y: summed_bce(z, y.sigmoid()), numbers, None),
    "binary, weighted": (
        "bernoulli", lambda z, y: summed_bce(z, y, pos_weight=torch.full((OUTPUTS,), 4.0)), bits,
        None,
    ),
    "binary, positive logits": ("bernoulli", summed_bce, bits, nn.Sigmoid()),
    "binary, scaled": ("bernoulli", lambda z, y: 65536 * summed_bce(z, y), bits, None),
    "binary, one-hot": ("bernoulli", summed_bce, one_hot, Times(0.001)),
    "squares": ("gaussian", half_squares, numbers, None),
    "squares to signs": ("gaussian", half_squares, lambda: 2 * bits() - 1, Times(0.001)),
    "squares to classes": ("gaussian", half_squares, one_hot, None),
    "large targets": ("gaussian", lambda z, y: half_squares(z, 10_000 * y), numbers, None),
    "small residuals": (
        "gaussian", lambda z, y: half_squares(z, z.detach() + 0.01 * y), numbers, None,
    ),
}  # fmt: skip


def test_a_loss_that_is_maximized_fits() -> None:
    """Its gradient is that of the loss with the other sign; logits are between 0 and 1."""
    first_step("sampled", "bernoulli", lambda z, y: -summed_bce(z, y), bits, nn.Sigmoid())


@tnt_and_kfac
@pytest.mark.parametrize("fitting", FITTING)
def test_a_loss_that_fits_is_not_noticed(name: str, fitting: str) -> None:
    """A warning is an error in this suite."""
    likelihood, loss, target, last = FITTING[fitting]
    first_step(name, likelihood, loss, target, last)


def test_rare_labels_of_many_fit() -> None:
    """Where a label is, the gradient is about that of a cross entropy; elsewhere it is not."""
    model = nn.Linear(WIDTH, 1000)
    nn.init.constant_(model.bias, -4.6)
    opt = TNT(model.parameters(), likelihood="bernoulli")
    output = model(torch.randn(ROWS, WIDTH))
    opt.observe(output)
    labels = F.one_hot(torch.randint(1000, (ROWS,)), 1000).float()
    summed_bce(output, labels, pos_weight=torch.full((1000,), 5.0)).backward()
    opt.step()


@tnt_and_kfac
def test_a_model_that_knows_its_data_by_heart_fits(name: str) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, 64), nn.Tanh(), nn.Linear(64, OUTPUTS))
    x, y = torch.randn(ROWS, WIDTH), classes()
    adam = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(300):
        adam.zero_grad()
        F.cross_entropy(model(x), y).backward()
        adam.step()
    opt = made(name, model)
    output = model(x)
    opt.observe(output)
    loss = F.cross_entropy(output, y)
    assert float(loss.detach()) < 0.01
    loss.backward()
    opt.step()


@tnt_and_kfac
@pytest.mark.parametrize("likelihood", ["categorical", "bernoulli"])
def test_accumulation_fits(name: str, likelihood: str) -> None:
    """The loss of each of twelve micro-batches is divided by twelve, as a mean over outputs is."""
    model = nn.Linear(WIDTH, OUTPUTS)
    opt = made(name, model, likelihood=likelihood)
    for _ in range(OUTPUTS):
        output = model(torch.randn(ROWS, WIDTH))
        opt.observe(output)
        if likelihood == "categorical":
            loss = F.cross_entropy(output, classes())
        else:
            loss = summed_bce(output, bits())
        (loss / OUTPUTS).backward()
    opt.step()


@tnt_and_kfac
@pytest.mark.parametrize("by_hand", [False, True])
def test_the_scale_of_a_loss_in_float16_fits(name: str, by_hand: bool) -> None:
    """Whatever scales it, and also by N; a loss of another kind is still noticed."""
    for loss, target in ((F.cross_entropy, classes), (F.mse_loss, numbers)):
        model = nn.Linear(WIDTH, OUTPUTS)
        opt, scaler = made(name, model), torch.amp.GradScaler("cpu", init_scale=float(ROWS))
        with torch.autocast("cpu", torch.float16):
            output = model(torch.randn(ROWS, WIDTH))
        output = output.float()  # its gradient is in float32
        opt.observe(output)
        scaler.scale(loss(output, target())).backward()
        if by_hand:
            for param in model.parameters():
                param.grad /= ROWS
        noticed = pytest.warns(RuntimeWarning, match=NO_SOFTMAX)
        with nullcontext() if loss is F.cross_entropy else noticed:
            opt.step() if by_hand else scaler.step(opt)


@tnt_and_kfac
def test_a_scale_in_float32_fits_unless_it_is_about_the_number_of_rows(name: str) -> None:
    """float32 needs no GradScaler; its first scale, 65536, is not taken for a reduction."""
    for scale in (65536.0, float(ROWS)):
        model = nn.Linear(WIDTH, OUTPUTS)
        opt, scaler = made(name, model), torch.amp.GradScaler("cpu", init_scale=scale)
        output = model(torch.randn(ROWS, WIDTH))
        opt.observe(output)
        scaler.scale(F.cross_entropy(output, classes())).backward()
        noticed = pytest.warns(RuntimeWarning, match="as that of a sum over the batch of 64")
        with noticed if scale == ROWS else nullcontext():
            scaler.step(opt)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_fits(dtype: torch.dtype) -> None:
    """With many classes, of whose gradients float16 loses almost all."""
    model = nn.Linear(WIDTH, 5000)
    opt = TNT.paper(model.parameters(), likelihood="categorical")
    with torch.autocast("cpu", dtype):
        output = model(torch.randn(256, WIDTH))
        opt.observe(output)
        loss = F.cross_entropy(output, torch.randint(5000, (256,)))
    assert output.dtype == dtype
    loss.backward()
    opt.step()


# ------------------------------------------------------------------ padding


COUNTED = torch.arange(ROWS) >= 60  # most rows are padding


def ignoring(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z, torch.where(COUNTED, y, -100))


PADDED: dict[str, tuple[Loss, Callable[[], Tensor]]] = {
    "categorical": (ignoring, classes),
    "bernoulli": (lambda z, y: summed_bce(z[COUNTED], y[COUNTED]), bits),
    "gaussian": (lambda z, y: half_squares(z[COUNTED], y[COUNTED]), numbers),
}


@tnt_and_kfac
@pytest.mark.parametrize("likelihood", PADDED)
def test_padding_that_is_not_masked_is_noticed(name: str, likelihood: str) -> None:
    """Once; the loss fits in the rows that count."""
    message = r"^60 of the 64 .* no gradient .* pass tnt_optim\.Masked\(output, mask\)"
    with pytest.warns(RuntimeWarning, match=message) as said:
        first_step(name, likelihood, *PADDED[likelihood])
    assert [warning.filename for warning in said] == [__file__]


@tnt_and_kfac
@pytest.mark.parametrize("likelihood", PADDED)
def test_masked_padding_fits(name: str, likelihood: str) -> None:
    first_step(name, likelihood, *PADDED[likelihood], mask=COUNTED)


def test_a_mask_that_counts_padding_is_noticed() -> None:
    """The mask lets 8 padded rows count."""
    mask = torch.arange(ROWS) >= 52
    with pytest.warns(RuntimeWarning, match="^8 of the 12 rows"):
        first_step("sampled", "categorical", ignoring, classes, mask=mask)


@pytest.mark.parametrize("likelihood", ["categorical", "bernoulli"])
def test_rows_that_are_sure_of_their_label_are_no_padding(likelihood: str) -> None:
    """Their gradient rounds to zero."""

    def loss(z: Tensor, y: Tensor) -> Tensor:
        if likelihood == "categorical":
            found = F.cross_entropy(z, torch.where(COUNTED, y, z.argmax(1)))
        else:
            found = summed_bce(z, torch.where(COUNTED[:, None], y, (z > 0).float()))
        (gradient,) = torch.autograd.grad(found, z, retain_graph=True)
        assert 30 < int((gradient == 0).all(1).sum()) <= 60
        return found

    target = classes if likelihood == "categorical" else bits
    free: dict[str, Any] = {"relative_damping": True, "graft": "adam"}  # sizes are not compared
    first_step("sampled", likelihood, loss, target, Times(1e4), **free)


def test_padding_of_a_language_model_is_counted_by_position() -> None:
    """One position of 256 in each of two sequences: a share that would round to zero."""
    model = nn.Linear(WIDTH, OUTPUTS)
    opt = TNT(model.parameters(), likelihood="categorical")
    output = model(torch.randn(2, 256, WIDTH))
    opt.observe(output)
    F.cross_entropy(output[:, :-1].flatten(0, 1), classes(510)).backward()
    with pytest.warns(RuntimeWarning, match="^2 of the 512 rows"):
        opt.step()


def test_a_mask_of_a_large_output_is_compared_in_part() -> None:
    model = nn.Linear(WIDTH, 4096, bias=False)
    opt = TNT(model.parameters(), max_factor_dim=100, likelihood="categorical")
    output, mask = model(torch.randn(7, 100, WIDTH)), torch.rand(7, 100) < 0.5
    opt.observe(Masked(output, mask))
    F.cross_entropy(output[mask], torch.randint(4096, (int(mask.sum()),))).backward()
    opt.step()


# ------------------------------------------------------------------ the hook


@tnt_and_kfac
def test_only_the_first_step_compares(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of later outputs is kept, nor of a graph that lives on."""
    taken: list[Tensor] = []
    monkeypatch.setattr(mismatch, "_some_rows", lambda name, z: taken.append(z) or z)
    model = nn.Linear(WIDTH, OUTPUTS)
    opt = made(name, model, stat_interval=1, inverse_interval=1)
    x, y = torch.randn(ROWS, WIDTH), classes()
    outputs = []
    for step in range(3):
        outputs.append(model(x))
        opt.observe(outputs[-1])
        loss = F.cross_entropy(outputs[-1], y) if step == 0 else outputs[-1].sum()
        loss.backward(retain_graph=True)
        opt.step()
        outputs[0].sum().backward(retain_graph=True)
    assert len(taken) == 2  # the output and its gradient


@tnt_and_kfac
def test_an_output_without_a_backward_is_not_compared(name: str) -> None:
    model = nn.Linear(WIDTH, OUTPUTS)
    opt = made(name, model)
    opt.observe(model(torch.randn(ROWS, WIDTH)))
    F.mse_loss(model(torch.randn(ROWS, WIDTH)), numbers()).backward()
    opt.step()


def test_two_optimizers_of_one_output_compare_with_the_training_loss() -> None:
    """The sampled backward of the second passes the hook of the first."""
    model = nn.Sequential(nn.Linear(WIDTH, 8), nn.Linear(8, OUTPUTS))
    first = TNT.paper(model[0].parameters(), likelihood="categorical")
    second = TNT.paper(model[1].parameters(), likelihood=lambda z: z.square().sum())
    output = model(torch.randn(ROWS, WIDTH))
    first.observe(output)
    second.observe(output)
    F.cross_entropy(output, classes()).backward()
    first.step()
    second.step()


def test_the_hook_keeps_nothing_alive_and_a_copy_works() -> None:
    model = nn.Linear(WIDTH, OUTPUTS)
    opt = TNT.paper(model.parameters(), likelihood="categorical")
    output = model(torch.randn(ROWS, WIDTH))
    opt.observe(output)
    copied = copy.deepcopy(opt)
    assert pickle.loads(pickle.dumps(opt)).observing
    gone = weakref.ref(opt)
    del opt
    gc.collect()
    assert gone() is None
    F.mse_loss(output, numbers()).backward()
    for p in copied.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    copied.step()


def test_the_loss_may_come_from_another_view_of_the_output() -> None:
    """A language model's loss has logits (N, T, C), and ``attach`` observes them flattened."""
    model = nn.Linear(WIDTH, OUTPUTS)
    opt = TNT.paper(model.parameters(), likelihood="categorical")
    opt.attach(model, output=lambda out: out.flatten(0, 1))
    F.mse_loss(model(torch.randn(4, 16, WIDTH)), numbers().view(4, 16, -1)).backward()
    with pytest.warns(RuntimeWarning, match=NO_SOFTMAX):
        opt.step()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_values_of_nested_outputs_are_compared() -> None:
    model = nn.Linear(WIDTH, OUTPUTS)
    opt = TNT.paper(model.parameters(), likelihood="categorical")
    parts = [torch.randn(rows, WIDTH) for rows in (ROWS // 4, 3 * ROWS // 4)]
    output = model(torch.nested.nested_tensor(parts, layout=torch.jagged)).values()
    opt.observe(output)
    F.mse_loss(output, numbers()).backward()
    with pytest.warns(RuntimeWarning, match=NO_SOFTMAX):
        opt.step()


def test_large_outputs_are_compared_in_part() -> None:
    """A stride of rows is enough to see the loss, and the factor."""
    model = nn.Linear(WIDTH, 4096, bias=False)
    opt = TNT.paper(model.parameters(), max_factor_dim=100, likelihood="categorical")
    output = model(torch.randn(700, WIDTH))
    opt.observe(output)
    (held,) = opt._observed.comparisons
    assert held.output.numel() < 2**20 < output.numel()
    F.binary_cross_entropy_with_logits(output, torch.rand(700, 4096).round()).backward()
    with pytest.warns(RuntimeWarning, match="binary cross entropy: use likelihood='bernoulli'"):
        opt.step()


def test_each_part_of_a_composite_is_compared() -> None:
    model = nn.Linear(WIDTH, OUTPUTS)
    opt = TNT.paper(model.parameters(), likelihood=("categorical", "gaussian"))
    output = model(torch.randn(ROWS, WIDTH))
    policy, value = output[:, :5], output[:, 5]
    opt.observe((policy, value))
    (F.mse_loss(policy, torch.randn(ROWS, 5)) + F.mse_loss(value, torch.randn(ROWS))).backward()
    with pytest.warns(RuntimeWarning, match=NO_SOFTMAX) as said:
        opt.step()
    assert len(said) == 1


def test_similarities_and_their_transpose_are_not_compared() -> None:
    """A symmetric contrastive loss: the gradient of each has rows that do not sum to zero."""
    model = nn.Linear(WIDTH, WIDTH)
    opt = TNT(model.parameters(), likelihood=("categorical", "categorical"))
    x = torch.randn(ROWS, WIDTH)
    forth = model(x) @ x.T
    back = forth.t()
    opt.observe((forth, back))
    (
        F.cross_entropy(forth, torch.arange(ROWS)) + F.cross_entropy(back, torch.arange(ROWS))
    ).backward()
    opt.step()


# ------------------------------------------------------------------ statistics of zero


def test_first_statistics_that_are_all_zero_are_noticed() -> None:
    model = nn.Linear(WIDTH, OUTPUTS)
    opt = TNT.paper(model.parameters(), likelihood=lambda z: (0 * z).sum(), stat_interval=1)
    for step in range(2):
        output = model(torch.randn(ROWS, WIDTH))
        opt.observe(output)
        F.cross_entropy(output, classes()).backward()
        if step:
            opt.step()  # a second warning would be an error
        else:
            with pytest.warns(RuntimeWarning, match="first statistics are all zero"):
                opt.step()


# ------------------------------------------------------------------ where to read on


@pytest.mark.parametrize(
    ("urls", "address"),
    [
        (["Repository, https://a.org/b", "Documentation, https://a.org/b/docs"],
         "https://a.org/b/docs/likelihoods.md"),
        (["Documentation, https://github.com/OWNER/b/docs"], 'the guide "Likelihoods"'),
        (["Repository, https://a.org/b"], 'the guide "Likelihoods"'),
        ([], 'the guide "Likelihoods"'),
    ],
)  # fmt: skip
def test_the_warning_names_the_guide_by_the_address_in_the_metadata(
    urls: list[str], address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = Message()
    for url in urls:
        installed["Project-URL"] = url
    monkeypatch.setattr(messages, "metadata", {"tnt_kernels": installed}.__getitem__)
    with pytest.warns(RuntimeWarning, match=f"'gaussian'[^.]*\\. {address} lists losses"):
        first_step("sampled", "categorical", F.mse_loss, numbers)


def test_without_metadata_the_warning_names_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_installed(name: str) -> Message:
        raise messages.PackageNotFoundError(name)

    monkeypatch.setattr(messages, "metadata", not_installed)
    with pytest.warns(RuntimeWarning, match=r"\. the guide \"Likelihoods\" lists losses"):
        first_step("sampled", "categorical", F.mse_loss, numbers)
