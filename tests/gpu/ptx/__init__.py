"""A machine that executes the PTX of one kernel launch on the CPU.

Written from NVIDIA's "Parallel Thread Execution ISA", version 9; names are the manual's. ``launch``
lets the launchers of ``tnt_kernels.triton`` run on it: Triton compiles a kernel for an architecture
as it does on a GPU, and the machine executes what came out.

All threads of all programs execute an instruction together, as one numpy operation. What the
hardware leaves open is therefore not tried in some order but checked, each as an error:

- accesses outside of a tensor or of shared memory, or not aligned;
- two warps that use the same shared memory between two barriers, one of them writing;
- two programs of a launch that use the same global memory, one of them writing;
- memory and registers that an asynchronous instruction still writes or reads;
- lanes of one warp that store different numbers to one place.

Shared memory and registers start as NaN. It does not show: time, the order of a sum within a tensor
core's product (exact here, rounded once), approximate functions (exact here), streams, graphs.
"""
