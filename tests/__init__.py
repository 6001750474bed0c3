"""The tests. This package is imported in each process that runs some of them."""

import os

if "TESTS_WITHOUT_ONEDNN" in os.environ:
    # A set of tests/kernels.py.
    import torch

    torch.backends.mkldnn.set_flags(False)
