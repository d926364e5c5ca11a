"""Without a GPU the Triton kernels run on the CPU's tensors, in Triton's interpreter."""

import os
import sys

import torch

if not torch.cuda.is_available():
    assert "triton" not in sys.modules, "TRITON_INTERPRET must be set before Triton is imported"
    os.environ["TRITON_INTERPRET"] = "1"
