"""Settings that keep libtpu quiet where there is no TPU; importing this makes them.

JAX tries every libtpu that is installed, and without a TPU libtpu warns about each of these settings that is missing.
This hides no TPU: on a machine with a TPU nothing is set.
"""

import os

import jax  # noqa: F401  it looks for TPUs, and sets TPU_SKIP_MDS_QUERY where there are none

if os.environ.get("TPU_SKIP_MDS_QUERY") == "1":
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v6e-1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
