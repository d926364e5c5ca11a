"""GPUs as the roofline model sees them: a handful of rates each, with their sources."""

from __future__ import annotations

from dataclasses import dataclass

# How float32 products may be made, and what part of the TF32 rate 3xTF32 has: three products.
PRECISIONS = ("tf32x3", "tf32")


@dataclass(frozen=True)
class Gpu:
    """One GPU; rates in flops and bytes a second.

    Attributes:
        name: as in the tables.
        multiprocessors: how many.
        memory: of device memory.
        tf32: of dense TF32 products.
        bf16: of dense bfloat16 products that are summed in float32.
        ffma: of float32 multiply-adds outside the matrix units.
        cache: bytes of the second-level cache.
        cache_rate: of reads from it.
        source: where the figures are from.
    """

    name: str
    multiprocessors: int
    memory: float
    tf32: float
    bf16: float
    ffma: float
    cache: int
    cache_rate: float
    source: str

    def rate(self, precision: str) -> float:
        """Flops a second of products made in one of ``PRECISIONS``, ``bf16`` or ``ffma``."""
        if precision == "tf32x3":
            return self.tf32 / 3
        return float(getattr(self, precision))


_CACHE_RATES = "second-level cache: gpu-l2-cache of te42kyfo/gpu-benches"
GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu(
            "H200",
            132,
            4.3e12,
            400e12,
            790e12,
            60e12,
            50 << 20,
            9.7e12,
            "memory (a copy), TF32, bfloat16 and float32 as kernels.md has them, measured or "
            f"quoted; {_CACHE_RATES}, measured on an H200",
        ),
        Gpu(
            "H100",
            132,
            3.35e12,
            494.7e12,
            989.4e12,
            66.9e12,
            50 << 20,
            9.7e12,
            "NVIDIA's datasheet of the H100 SXM5, peaks without sparsity; second-level cache: the "
            "H200's, the same chip",
        ),
        Gpu(
            "A100",
            108,
            2.039e12,
            156e12,
            312e12,
            19.5e12,
            40 << 20,
            5.4e12,
            "NVIDIA's datasheet of the A100 SXM4 80 GB, peaks without sparsity; "
            f"{_CACHE_RATES}, measured on an A100 80 GB",
        ),
        Gpu(
            "RTX 4090",
            128,
            1.008e12,
            82.6e12,
            165.2e12,
            82.6e12,
            72 << 20,
            4.9e12,
            "NVIDIA's Ada whitepaper, peaks without sparsity, sums in float32; second-level "
            "cache: smallscientist1/cuda_microbenchmark, measured on an RTX 4090 with cp.async",
        ),
    )
}
