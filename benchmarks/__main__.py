"""All benchmarks that this machine can run."""

from __future__ import annotations

import torch

from benchmarks import cpu, laplace, variational

cpu.main()
variational.main()
laplace.main()
if torch.cuda.is_available():
    from benchmarks import gpu

    gpu.main()
