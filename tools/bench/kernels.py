"""The head's kernels one by one: python tools/bench kernels --kernel X --impl NAME --shape N,D,V

A kernel is given what others would hand it, computed in float64, and its results' errors relative to float64 are
printed as JSON; an error past 0.01 is an exit code of 1. With --timed it is the time beside that of the bare products
that the kernel has to make. On a CPU the tests' interpreters run the kernels. bfloat16. Kernels:

    statistics   the forward kernel                   mean     a TPU's dh from E_q[W]
    dh, dW       a GPU's after slopes by the logits   kept     a loss that keeps logits
    loss         with --workspace bytes               copy     a GiB within the device's memory
    device       what JAX runs on
"""

import argparse
import functools
import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from kernels.lm_head import HeadSharding, TokenLogprobs, token_loss
from kernels.lm_head.contract import Inputs, Options, Terms
from kernels.lm_head.gpu import engine as gpu_engine
from kernels.lm_head.gpu import tiles as gpu_tiles
from kernels.lm_head.softmax import Softmax
from kernels.lm_head.tpu import engine as tpu_engine
from kernels.lm_head.tpu import tiles as tpu_tiles
from mllm import child_process, errors
from tests.kernels import oracle
from tools.bench import measure
from tools.bench.frame import Shape, in_turns, parser, shape_of

PRODUCTS = {"statistics": "hW", "mean": "hW gW", "dh": "hW gW", "dW": "hW gh", "kept": "hW gW gh"}
"""The bare products that each has to make; a loss without a workspace, all and the first one twice."""
ALLOWED = 0.01
"""The norm of the difference over that of the exact result; rounding to bfloat16 makes it about 0.003."""


def make_kernel(name: str, engine: Any, slopes: TokenLogprobs, softmax: Softmax, **options: Any) -> Callable[..., Any]:
    """(hidden, weight, labels) -> results by name, with these slopes and this softmax."""

    def call(hidden: jax.Array, weight: jax.Array, labels: jax.Array) -> dict[str, Any]:
        count = len(hidden)
        if name == "loss":

            def loss(hidden: jax.Array, weight: jax.Array) -> Any:
                by = slopes.logprob, slopes.entropy
                return token_loss(hidden, weight, labels, lambda x, h, a, b: a * x + b * h, *by, **options)

            (dh, dw), tokens = jax.grad(loss, (0, 1), has_aux=True)(hidden, weight)
            return {**tokens._asdict(), "dh": dh, "dW": dw}
        inputs = Inputs(hidden, weight, labels, jnp.ones(count, bool), jnp.float32(1))
        wants = name != "dW", name not in ("dh", "mean"), name not in ("mean", "kept")
        how = Options(None, hidden.dtype, 1 << 40, *wants)  # dh, dW, and slopes by the entropy
        if name == "statistics":
            return engine.statistics(inputs, how).outputs()._asdict()
        if name == "kept":
            terms = Terms(slopes.logprob, ())
            dh, dw = engine.loss_and_gradients(inputs, lambda logprob, _: logprob, terms, how)[1]
        else:
            no_mean = tpu_engine.Saved(softmax.top, jnp.zeros(count), None)
            saved = engine.forward(inputs, how)[1] if name == "mean" else no_mean
            dh, dw = engine.gradients(inputs, softmax, saved, slopes, how)
        return {key: x for key, x in {"dh": dh, "dW": dw}.items() if x is not None}

    return call


def run(
    kernel: str,
    shape: Shape,
    impl: str,
    timed: bool,
    tiles: dict[str, Any],
    workspace: int | None,
    sharded: bool,
) -> dict[str, float]:
    """Relative errors by the result's name, or what `time` returns."""
    tokens, features, vocabulary = shape
    rng = np.random.default_rng(0)
    h, w = (rng.standard_normal((n, features), np.float32) * features**-0.25 for n in (tokens, vocabulary))
    labels = rng.integers(0, vocabulary, tokens, np.int32)
    arrays = jnp.asarray(h, jnp.bfloat16), jnp.asarray(w, jnp.bfloat16), jnp.asarray(labels)
    by_logprob, by_entropy = rng.standard_normal((2, tokens)).astype(np.float32)
    by_entropy *= kernel not in ("mean", "kept")
    zero, lse = np.zeros(tokens), np.full(tokens, np.log(vocabulary))
    # A large problem is timed: there any numbers do.
    exact = None if timed else oracle.exact(*arrays, lambda *_: (by_logprob, zero, by_entropy))
    logprob, lse, entropy = exact[:3] if exact else (-lse, lse, lse)
    slopes = TokenLogprobs(*(jnp.asarray(x, jnp.float32) for x in (by_logprob, zero, by_entropy)))
    softmax = Softmax(*(jnp.asarray(x, jnp.float32) for x in (lse, zero, logprob, entropy)))
    options: dict[str, Any] = {"impl": impl, "workspace": workspace}
    if sharded:
        mesh = Mesh(np.array(jax.devices()).reshape(-1, 2), ("dp", "tp"))
        options["sharding"] = HeadSharding(mesh, ("dp",), "tp", None)
    engine = gpu_engine if impl == "mosaic_gpu" else tpu_engine
    with ExitStack() as stack:
        if interpreted := jax.default_backend() == "cpu" and impl.startswith("mosaic"):
            sys.path.insert(0, str(Path(__file__).parent.parent.parent / "tests" / "kernels"))
            import engines  # type: ignore[import-not-found]

            stack.enter_context((engines.GPU if impl == "mosaic_gpu" else engines.TPU).strictly())
        if impl == "mosaic_tpu" and tiles:
            stack.enter_context(tpu_tiles.override(**tiles))
        elif impl == "mosaic_gpu" and (tiles or not timed) and not interpreted:
            chunk = tiles.pop("chunk", 2048)
            if not timed:  # several chunks, and waves where there is room for one
                chunk = 256
            sizes = gpu_tiles.Sizes(gpu_tiles.Tiles(**tiles), chunk, wave_cost=0)
            stack.enter_context(gpu_tiles.override(sizes))
        program = jax.jit(make_kernel(kernel, engine, slopes, softmax, **options)).lower(*arrays).compile()
        found = jax.block_until_ready(program(*arrays))
    if exact is None:
        return time(functools.partial(program, *arrays), arrays, PRODUCTS.get(kernel, "hW hW gW gh").split())
    wanted = {**exact._asdict(), "dh": exact.hidden, "dW": exact.weight}
    return {name: float(np.linalg.norm(x - wanted[name]) / np.linalg.norm(wanted[name])) for name, x in found.items()}


def time(call: Callable[[], Any], arrays: Sequence[jax.Array], names: Sequence[str]) -> dict[str, float]:
    """Milliseconds, their ratio to those of the bare products of these names, and TFLOP/s."""
    bare = measure.bare_products(*arrays[:2])
    calls = {"kernel": call, **{name: bare[name] for name in names}}
    rounds = in_turns(calls, jax.block_until_ready, rounds=5, least=0.05, queue=2)
    seconds = {name: statistics.median(each) for name, each in rounds.items()}
    own, products = seconds["kernel"], sum(seconds[name] for name in names)
    flops = 2 * len(names) * arrays[0].size * len(arrays[1])
    return {"ms": 1e3 * own, "of bare products": own / products, "TFLOP/s": flops / own / 1e12}


def copy() -> dict[str, float]:
    array, double = jnp.ones(2**26, jnp.float32), jax.jit(lambda x: 2 * x)
    rounds = in_turns({"copy": lambda: double(array)}, jax.block_until_ready, rounds=5, least=0.1, queue=2)
    return {"GB/s, read and written": 2 * array.nbytes / statistics.median(rounds["copy"]) / 1e9}


def sizes_of(text: str) -> dict[str, int]:
    """For argparse: sizes by name."""
    try:
        return {name: int(size) for name, size in (part.split("=") for part in text.split(","))}
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=SIZE,NAME=SIZE") from None


@errors.command
def main(arguments: Sequence[str] | None = None) -> int:
    known = parser("kernels", __doc__)
    add = known.add_argument
    add("--kernel", required=True, choices=(*PRODUCTS, "loss", "copy", "device"), metavar="X", help="which one")
    engines = ("mosaic_tpu", "mosaic_gpu", "xla", "full_logits")
    add("--impl", choices=engines, default="xla", help="the engine that it is of (default xla)")
    add("--shape", type=shape_of, default="512,256,1496", metavar="N,D,V", help="(default 512,256,1496)")
    add("--timed", action="store_true", help="time it, and compute no errors")
    add("--workspace", type=int, metavar="BYTES", help="of the loss (default: the head chooses)")
    tiles = "as in rows=512,columns=512,step=256 (TPU) or columns=256,slots=4,cluster=2,chunk=2048 (GPU)"
    add("--tiles", type=sizes_of, default={}, metavar="NAME=SIZE,...", help=f"{tiles}; default: the engine's own")
    add("--sharded", action="store_true", help="the loss over all devices, an even number of them")
    options = known.parse_args(arguments)
    if options.kernel in PRODUCTS and not options.impl.startswith("mosaic"):
        raise errors.UserError(f"--impl: {options.impl} has no kernel {options.kernel}; it is for --kernel loss")
    if options.kernel == "device":
        child_process.answer({**measure.device(), "devices": jax.device_count(), "jax": jax.__version__})
    elif options.kernel == "copy":
        child_process.answer(copy())
    else:
        found = run(**vars(options))
        child_process.answer(found)
        if not options.timed and not all(error <= ALLOWED for error in found.values()):
            print(f"WRONG: an error is past {ALLOWED}", file=sys.stderr)
            return 1
    return 0
