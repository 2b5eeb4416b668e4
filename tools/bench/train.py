"""An update of all parameters beside one of LoRA's adapters: python tools/bench train

The update is that of a GRPO run, on a small Qwen2 model with random parameters and full rows, in float32 on CPUs and
bfloat16 elsewhere. Each way of training has a process of its own; both are warmed up, and then timed in turns. The peak
is what a device, or on CPUs the process, held more than before the parameters were made.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, sys.argv[1])
from mllm import child_process, errors
from tools.bench import turns as processes
from tools.bench import update

WAYS = ("full", "LoRA")


def prepare(sizes: dict[str, Any]) -> Callable[[], dict[str, float]]:
    """A function that makes an update and says its seconds and the peak until then, in bytes."""
    import jax

    from mllm.config.schema import Config
    from mllm.parallel.mesh import make_mesh
    from mllm.plan.programs import Programs
    from mllm.train.step import init_state
    from tools.memory_programs import count_peak

    settings = update.settings(sizes)
    settings["model"] |= {"dtype": "float32" if jax.default_backend() == "cpu" else "bfloat16", "remat": "full"}
    if sizes["rank"]:
        settings["model"]["lora"] = {"rank": sizes["rank"], "alpha": sizes["rank"]}
    config = Config.model_validate(settings)
    programs = Programs(config, make_mesh(config.mesh))
    train_step: Any
    train_step, (state, batch, frozen) = programs.update()
    compiled = train_step.lower(state, batch, frozen).compile()

    peak = count_peak()
    trained, frozen = programs.policy.split(programs.policy.initial_params())
    state = init_state(trained, programs.optimizer)
    batch = jax.tree.map(lambda x: jax.numpy.ones(x.shape, x.dtype), batch)
    del trained  # the update reuses their memory

    def measure() -> dict[str, float]:
        nonlocal state
        start = time.perf_counter()
        state, _ = jax.block_until_ready(compiled(state, batch, frozen))
        return {"seconds": time.perf_counter() - start, "peak": peak()}

    return measure


def child(sizes: dict[str, Any]) -> None:
    """Answer each line of stdin with the figures of an update."""
    measure = prepare(sizes)
    for _ in sys.stdin:
        child_process.answer(measure())


@errors.command
def main(arguments: Sequence[str] | None = None) -> int:
    parser = errors.ArgumentParser(
        prog="python tools/bench train", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sequences", type=int, default=8, help="rows of an update (default 8)")
    parser.add_argument("--limit", type=int, default=128, help="tokens of a row (default 128)")
    parser.add_argument("--hidden", type=int, default=512, help="hidden size (default 512)")
    parser.add_argument("--layers", type=int, default=8, help="(default 8)")
    parser.add_argument("--vocabulary", type=int, default=32_768, help="its words (default 32,768)")
    parser.add_argument("--rank", type=int, default=32, help="of the adapters (default 32)")
    parser.add_argument("--repeats", type=int, default=5, help="turns (default 5)")
    options = vars(parser.parse_args(arguments))
    repeats, rank = options.pop("repeats"), options.pop("rank")
    ranks = dict(zip(WAYS, (0, rank), strict=True))
    children = {
        way: processes.start(__file__, processes.ROOT, json.dumps({**options, "rank": ranks[way]})) for way in WAYS
    }
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for turn in range(1 + repeats):
        for way, process in children.items():
            figures = processes.ask(way, process, turn)
            print(f"{way}, turn {turn}: {figures['seconds']:.2f} s", file=sys.stderr)
            found[way] += [figures] * (turn > 0)
    for process in children.values():
        process.kill()
    print(table(found))
    return 0


def table(found: dict[str, list[dict[str, float]]]) -> str:
    """Medians, and the median of the turns' ratios with their range, as Markdown."""
    lines = [f"| | {' | '.join(WAYS)} | LoRA / full |", "| --- |" + " ---: |" * 3]
    for key, name, unit, form in (("seconds", "seconds of an update", 1, ".3f"), ("peak", "peak, MiB", 2**20, ".0f")):
        figures = [format(statistics.median(turn[key] for turn in found[way]) / unit, form) for way in WAYS]
        ratios = [lora[key] / full[key] for full, lora in zip(*(found[way] for way in WAYS), strict=True)]
        figures.append(f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
        lines.append(f"| {name} | {' | '.join(figures)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    child(json.loads(sys.argv[2]))
