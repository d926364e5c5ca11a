"""What the paper claims, and what this project claims beyond it, each with its judge."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from experiments.figures import judge_costs, judge_directions, judge_language
from experiments.figures.evidence import Record
from experiments.figures.judge_training import (
    FIRST_ORDER,
    as_low_error,
    as_low_loss,
    lower_loss,
    process_time,
    roughly_same_errors,
    second_order_alike,
    slowest_epochs,
    sooner,
    usually_better,
)
from experiments.figures.verdicts import Verdict

AUTOENCODERS = "section 6.1"
NETWORKS = "section 6.2"


@dataclass(frozen=True)
class Claim:
    """One claim.

    Attributes:
        name: what links lead to.
        subject: the section of the page that it is in.
        where: in the paper; or whose else it is.
        text: what it says, in a sentence.
        judge: what a record of the subject says of it.
    """

    name: str
    subject: str
    where: str
    text: str
    judge: Callable[[Record], Verdict]


def _autoencoder(subject: str, figure: str, where: str) -> list[Claim]:
    """What the paper says of an autoencoder with its Table 3."""
    particularly = ", and particularly well here" if subject == "faces" else ""
    return [
        Claim(
            f"{subject}-epochs",
            subject,
            where,
            "After as many epochs TNT's training loss is below those of SGD with momentum and "
            "Adam.",
            lower_loss(FIRST_ORDER),
        ),
        Claim(
            f"{subject}-time",
            subject,
            where,
            "TNT is ahead of SGD with momentum and Adam in process time, too: it reaches their "
            "last losses in less time than they took.",
            sooner(FIRST_ORDER),
        ),
        Claim(
            f"{subject}-kfac",
            subject,
            where,
            f"TNT does at least as well as KFAC{particularly}.",
            as_low_loss(("kfac",)),
        ),
        Claim(
            f"{subject}-shampoo",
            subject,
            where,
            f"TNT does at least as well as Shampoo{particularly}.",
            as_low_loss(("shampoo",)),
        ),
        Claim(
            f"{subject}-ef",
            subject,
            figure,
            "TNT does somewhat better than TNT-EF, which takes the empirical Fisher matrix."
            if subject == "faces"
            else "TNT does at least as well as TNT-EF, which takes the empirical Fisher matrix.",
            (lower_loss if subject == "faces" else as_low_loss)(("tnt-ef",)),
        ),
    ]


def _network(subject: str, data: str) -> list[Claim]:
    """What the paper says of a convolutional network."""
    resnet = subject == "resnet32"
    panel = "a" if resnet else "b"
    accuracies = (
        "93.08 % against 93.06 %, after 100 epochs and 200"
        if resnet
        else "73.33 % against 73.43 % (73.44 % in its table), after 100 epochs and 200"
    )
    speed = "roughly twice as fast as" if resnet else "equally as fast as"
    ef = (
        "TNT generalises at least as well as TNT-EF (the paper's own table: 93.08 % against "
        "93.62 % validation accuracy)."
        if resnet
        else "TNT generalises somewhat better than TNT-EF (73.33 % against 72.85 % validation "
        "accuracy)."
    )
    claims = [
        Claim(
            f"{subject}-accuracy",
            subject,
            f"Figure 3{panel}, {NETWORKS}",
            f"TNT's validation accuracy is similar to SGD with momentum's: {accuracies}.",
            as_low_error("tnt", "sgd"),
        ),
        Claim(
            f"{subject}-same",
            subject,
            f"Figure 3{panel}, {NETWORKS}",
            "Second-order methods and Adam generalise roughly as well as SGD with momentum.",
            roughly_same_errors,
        ),
        Claim(
            f"{subject}-time",
            subject,
            f"Figure 3{panel}, {NETWORKS}",
            f"In process time TNT is {speed} SGD with momentum on {data}.",
            process_time(faster=resnet),
        ),
        Claim(
            f"{subject}-ef",
            subject,
            f"Figure 5{panel}, appendix",
            ef,
            as_low_error("tnt", "tnt-ef"),
        ),
    ]
    if not resnet:
        claims.append(
            Claim(
                f"{subject}-kfac",
                subject,
                f"Figure 3b, {NETWORKS}",
                "KFAC, whose inverses come from eigenvalues, is much slower than TNT and Shampoo.",
                slowest_epochs,
            )
        )
    return claims


def _tuned(subject: str, panel: str) -> list[Claim]:
    """What the paper says of an autoencoder with its Table 5."""
    where = f"Figure 6{panel}, appendix"
    return [
        Claim(
            f"{subject}-first-order",
            subject,
            where,
            "Tuned more extensively, second-order methods are usually better than well-tuned "
            "first-order ones.",
            usually_better,
        ),
        Claim(
            f"{subject}-second-order",
            subject,
            where,
            "Tuned more extensively, second-order methods perform similarly to each other.",
            second_order_alike,
        ),
    ]


CLAIMS: Sequence[Claim] = (
    Claim(
        "cosine-range",
        "cosine",
        "Figure 1, section 3.4",
        "The cosine similarity of TNT's direction to block Fisher's is always around 0.7 to 0.8.",
        judge_directions.in_range,
    ),
    Claim(
        "cosine-shampoo",
        "cosine",
        "Figure 1, section 3.4",
        "TNT's similarity is always better than Shampoo's.",
        judge_directions.above_shampoo,
    ),
    Claim(
        "cosine-kfac",
        "cosine",
        "Figure 1, section 3.4",
        "TNT's similarity is like that of KFAC, which knows the structure, and sometimes higher.",
        judge_directions.like_kfac,
    ),
    Claim(
        "cosine-first-order",
        "cosine",
        "Figure 1, section 3.4",
        "The similarity of SGD with momentum and of Adam is usually lower than that of the "
        "second-order methods.",
        judge_directions.first_order_lower,
    ),
    *_autoencoder("mnist", "Figure 4a, appendix", f"Figure 2a, {AUTOENCODERS}"),
    *_autoencoder("faces", "Figure 4b, appendix", f"Figure 2b, {AUTOENCODERS}"),
    *_network("resnet32", "ResNet-32 and CIFAR-10"),
    *_network("vgg16", "VGG16 and CIFAR-100"),
    *_tuned("mnist-tuned", "a"),
    *_tuned("faces-tuned", "b"),
    Claim(
        "complexity-memory",
        "complexity",
        "Table 2, section 5",
        "TNT and Shampoo keep O(sum d²) beyond SGD, Adam O(prod d), Newton-like methods "
        "O(prod d²).",
        judge_costs.memory_orders,
    ),
    Claim(
        "complexity-time",
        "complexity",
        "Table 2, section 5",
        "Per iteration TNT takes O((m/T1 + sum d) prod d + sum d³/T2) beyond SGD, Shampoo the same "
        "without m, Adam O(prod d).",
        judge_costs.time_orders,
    ),
    Claim(
        "idealized-bound",
        "idealized",
        "Theorem 1, section 4",
        "With the theorem's step sizes the average expected squared gradient norm of the "
        "idealized TNT stays below its bound, which falls as N^(β-1).",
        judge_costs.bound_holds,
    ),
    Claim(
        "step-authors",
        "step-times",
        "the authors' stored run of the MNIST autoencoder, not the paper",
        "TNT's step takes 2.28 times as long as SGD with momentum's (30.8 ms against 13.5 ms on "
        "their GPU).",
        judge_costs.authors_ratio,
    ),
    Claim(
        "step-moderate",
        "step-times",
        NETWORKS,
        "TNT usually needs only moderately more computation per iteration than first-order "
        "methods; here: at most twice SGD-m's step at the networks' T1 and T2.",
        judge_costs.moderate_step,
    ),
    Claim(
        "step-kfac",
        "step-times",
        "section 5",
        "In general an iteration of KFAC costs no less than one of TNT.",
        judge_costs.kfac_not_cheaper,
    ),
    Claim(
        "step-kfac-vgg16",
        "step-times",
        NETWORKS,
        "KFAC with eigenvalues seems to be much slower than TNT and Shampoo on larger models such "
        "as VGG16; here: at least 1.5 times.",
        judge_costs.kfac_much_slower,
    ),
    *(
        Claim(
            f"{claim.name}-beside",
            claim.subject,
            f"{AUTOENCODERS}'s claim, on {subject}",
            claim.text,
            claim.judge,
        )
        for subject in ("digits", "curves")
        for claim in _autoencoder(subject, "", "")
    ),
    Claim(
        "search-lower",
        "search",
        f"{AUTOENCODERS}'s claim, on digits",
        "With the best learning rate and damping of a grid for each method, TNT's training loss is "
        "below those of SGD with momentum and Adam.",
        judge_language.lower_when_tuned,
    ),
    Claim(
        "language-adamw",
        "language",
        "this project's own, from a probe",
        "On a character transformer TNT with Adam's step lengths and relative damping has a lower "
        "validation loss than AdamW after as many tokens.",
        judge_language.lower_at_equal_tokens("adam"),
    ),
    Claim(
        "language-muon",
        "language",
        "this project's own, from a probe",
        "On a character transformer TNT with Adam's step lengths and relative damping has a lower "
        "validation loss than Muon after as many tokens.",
        judge_language.lower_at_equal_tokens("muon"),
    ),
    Claim(
        "sensitivity-serves",
        "sensitivity",
        "this project's own, from a probe",
        "One learning rate serves TNT with Adam's step lengths and relative damping across batch "
        "size, T2, damping and width.",
        judge_language.one_rate_serves,
    ),
    Claim(
        "sensitivity-better",
        "sensitivity",
        "this project's own, from a probe",
        "Across batch size, T2, damping and width one learning rate serves TNT with Adam's step "
        "lengths and relative damping better than TNT as in the paper.",
        judge_language.serves_better,
    ),
)
