"""The head with the logits of one chunk of tokens at a time, recomputed for the gradients: the low-memory baseline.

This is the best form of rematerialisation in a scan over tokens. A chunk has as many tokens as the fused head's default
wave, or as fit into the workspace. Chunks without a token that counts are skipped. The program is xla.py's, for blocks
of a chunk's rows and one tile of all columns. dW is summed in float32.
"""

from typing import Any

from . import contract, full_logits, target, xla
from .contract import Gradients, Inputs, Options, Terms
from .live_rows import round_up
from .softmax import Slopes, Softmax

_CPU_ROWS, _ROWS, _LEAST_ROWS = 256, 1024, 64  # a chunk's rows: at most without a workspace, at least with a workspace


obstacle = xla.obstacle  # it always runs


def forward(inputs: Inputs, options: Options) -> tuple[Softmax, None]:
    """The statistics: 1 matrix product, r with a teacher."""
    return xla.forward(inputs, options, _plan(inputs, options))


def gradients(inputs: Inputs, softmax: Softmax, saved: Any, slopes: Slopes, options: Options) -> Gradients:
    """The gradients: 3 matrix products, 2 for one gradient alone, and r with a teacher."""
    return xla.gradients(inputs, softmax, saved, slopes, options, _plan(inputs, options))


def loss_and_gradients(inputs: Inputs, terms: Terms, options: Options) -> tuple[Softmax, Gradients]:
    softmax, _ = forward(inputs, options)
    return softmax, gradients(inputs, softmax, None, contract.loss_slopes(softmax, terms, inputs, options), options)


def _plan(inputs: Inputs, options: Options) -> xla.Tiling:
    """Chunks of one size."""
    plan, count = full_logits.plan_of(inputs), len(inputs.labels)
    most = _CPU_ROWS if target.platform() == "cpu" else _ROWS
    if options.workspace is not None:
        most = max(_LEAST_ROWS, options.workspace // (4 * plan.vocabulary) // 8 * 8)
    return plan._replace(block=round_up(-(-count // -(-count // most)), min(8, count)))
