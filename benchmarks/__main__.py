"""All benchmarks that this machine can run."""

from __future__ import annotations

import argparse

import torch

from benchmarks import cpu, laplace, mcmc, variational

argparse.ArgumentParser("python -m benchmarks", description=__doc__).parse_args()
cpu.main()
variational.main()
laplace.main()
mcmc.main()
if torch.cuda.is_available():
    from benchmarks import gpu, mcmc_gpu

    gpu.main()
    mcmc_gpu.main()
