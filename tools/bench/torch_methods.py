"""Methods of the bench that run through torch, and how they are measured: as in bench_child.py, by torch's means.

The bare products are torch's, and so is the count of memory: `max_memory_allocated`, for each share of rows that count.
Rows that don't count have the label that these libraries ignore, -100. Leaves out: gradients that are summed in
another dtype than the weight's, which both Liger and cut-cross-entropy offer.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tools.bench import timing as bench_timing
from tools.bench.methods import Method
from tools.bench.problem import Problem, largest_error

IGNORED = -100


def loss_of(name: str) -> Callable[..., Any]:
    """(hidden, weight, labels) -> the sum of cross-entropies."""
    if name.startswith("Liger"):
        from liger_kernel.transformers import (  # type: ignore[import-not-found]  # nothing here depends on it
            LigerFusedLinearCrossEntropyLoss,
        )

        liger = LigerFusedLinearCrossEntropyLoss(ignore_index=IGNORED, reduction="sum")
        return lambda hidden, weight, labels: liger(weight, hidden, labels)
    if name.startswith("cut-cross-entropy"):
        from cut_cross_entropy import linear_cross_entropy  # type: ignore[import-not-found]

        options = {"ignore_index": IGNORED, "reduction": "sum", "filter_eps": None}  # None: nothing is left out
        return lambda hidden, weight, labels: linear_cross_entropy(hidden, weight, labels, **options)
    from torch.nn import functional  # type: ignore[import-not-found]

    return lambda hidden, weight, labels: functional.cross_entropy(
        functional.linear(hidden, weight).float(), labels, ignore_index=IGNORED, reduction="sum"
    )


def measure(
    method: Method, problem: Problem, lives: list[float], rounds: int, least: float
) -> Iterator[dict[str, Any]]:
    import torch  # type: ignore[import-not-found]

    gpu = torch.cuda.is_available()
    if method.on_gpu and not gpu:
        raise RuntimeError("torch finds no GPU")
    place = torch.device("cuda" if gpu else "cpu")
    queue = bench_timing.MOST_CALLS if gpu else 1  # its results take each other's place, and it can wait for all only

    def put(array: np.ndarray) -> Any:
        """torch has no bfloat16 of numpy's."""
        if array.dtype.kind == "f" and array.dtype.itemsize == 4:
            return torch.from_numpy(array).to(place)
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).to(place)

    def compare(got: Any, expected: np.ndarray) -> tuple[float, float]:
        wide = torch.from_numpy(np.array(expected)).to(place)
        return float((got.float() - wide).abs().max()), float(wide.abs().max())

    def wait(_: Any) -> None:
        if gpu:
            torch.cuda.synchronize()

    loss = loss_of(method.name)
    hidden, weight = (put(problem.read(name)).requires_grad_() for name in ("hidden", "weight"))
    for live in lives:
        chosen = np.where(problem.weights(live) != 0, problem.labels(), IGNORED).astype(np.int64)
        labels = torch.from_numpy(chosen).to(place)

        def call(labels: Any = labels) -> Any:
            hidden.grad = weight.grad = None
            value = loss(hidden, weight, labels)
            value.backward()
            return value

        if gpu:
            torch.cuda.reset_peak_memory_stats()
        value = call()
        wait(value)
        arguments = sum(x.nbytes for x in (hidden, weight, labels))
        results = sum(x.nbytes for x in (value, hidden.grad, weight.grad))
        peak = torch.cuda.max_memory_allocated() if gpu else None
        expected = problem.expected(False, live)
        result = zip(expected, (value.detach(), hidden.grad, weight.grad), strict=True)
        errors = {name: largest_error(got, expected[name], compare) for name, got in result}
        hidden.grad = weight.grad = None
        bare = bare_products(torch, hidden.detach()[: problem.live_rows(live)], weight.detach())
        yield {
            "live": live,
            "through": "torch",
            "errors": errors,
            "rounds": bench_timing.in_turns({"method": call, **bare}, wait, rounds=rounds, least=least, queue=queue),
            "arguments_bytes": arguments,
            "results_bytes": results,
            "compiled_temp_bytes": None,
            "peak_bytes": peak,
            "peak_is_bound": False,
            "temp_bytes": None if peak is None else max(0, peak - arguments - results),
        }
        hidden.grad = weight.grad = None


def bare_products(torch: Any, hidden: Any, weight: Any) -> dict[str, Callable[[], Any]]:
    slopes = torch.empty(len(hidden), len(weight), dtype=hidden.dtype, device=hidden.device).normal_()
    return {"hW": lambda: hidden @ weight.T, "gW": lambda: slopes @ weight, "gh": lambda: slopes.T @ hidden}
