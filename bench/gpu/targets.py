"""The ratios to reach on one H200, set before anything ran on a GPU: estimates all of them."""

from __future__ import annotations

from bench.kernels.targets import CYCLE

# (operator, kind of step, baseline) -> set -> how many times the baseline's median is to be ours,
# in the same precision. gpt2 with all its 12 blocks.
TARGETS: dict[tuple[str, str, str], dict[str, float]] = {
    ("gram_ema_", "", "einsum + lerp_"): {
        "resnet32": 60,
        "vgg16": 10,
        "faces_ae": 3,
        "gpt2_full": 2.5,
        "square4096": 2,
    },
    ("gram_ema_", "", "addmm_"): {
        "resnet32": 20,
        "vgg16": 4,
        "faces_ae": 1.8,
        "gpt2_full": 1.7,
        "square4096": 1.6,
    },
    ("preconditioned_step_", "", "tensordot + foreach"): {
        "resnet32": 30,
        "vgg16": 4,
        "faces_ae": 2,
        "gpt2_full": 1.5,
        "square4096": 1.25,
    },
    ("damped_inverse", "", "linalg.inv"): {"resnet32": 100, "faces_ae": 5, "gpt2_full": 5},
    ("damped_inverse", "", "cholesky_inverse"): {"resnet32": 20, "faces_ae": 3, "gpt2_full": 3},
    ("TNT.step", CYCLE, "plain torch"): {"mnist_ae": 5, "resnet32": 20},
}
