"""The update and the log-prob pass of GRPO beside those of an older checkout: python tools/bench update --old FOLDER

A small Qwen2 model with random parameters, float32. Lengths of completions are geometric, with a quarter of the limit
as their mean, and cut off there. Rewards are random, but equal in the groups that --without-gradient sets. Batches come
from the checkout's own source of batches: sampling and scoring are replaced, packing or padding are its own. Each
checkout runs in a process of its own; both are warmed up on all batches, and then timed in turns.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

if __name__ == "__main__":
    sys.path.insert(0, sys.argv[1])  # the checkout that is measured
from mllm import child_process, errors

PHASES = ("log-prob pass", "update", "both")
GROUP, MICRO = 8, 4
"""Completions of a prompt, and rows of a micro-batch."""


def settings(sizes: dict[str, Any]) -> dict[str, Any]:
    """The configuration, with two updates a rollout, for the log-prob pass to be needed."""
    hidden, limit = sizes["hidden"], sizes["limit"]
    architecture = {
        "model_type": "qwen2",
        "vocab_size": sizes["vocabulary"],
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": sizes["layers"],
        "num_attention_heads": max(2, hidden // 64),
        "num_key_value_heads": max(1, hidden // 128),
        "tie_word_embeddings": True,
    }
    return {
        "algorithm": "grpo",
        "run_dir": "unused",
        "steps": 2,
        "batch_size": sizes["sequences"],
        "micro_batch_size": MICRO,
        "model": {"init": "random", "architecture": architecture, "dtype": "float32", "remat": "none"},
        "optimizer": {"learning_rate": 1e-6},
        "task": {"name": "arithmetic", "heldout": 16},
        "rollout": {"max_prompt_length": 32, "max_completion_length": limit - 32},
        "grpo": {"num_generations": GROUP, "num_iterations": 2},
    }


def prepare(sizes: dict[str, Any]) -> Callable[[int], dict[str, float]]:
    """A function that times the log-prob pass and the update on the batch with this seed."""
    import jax

    from mllm.config.schema import Config
    from mllm.data.tasks.load import load
    from mllm.model.load import load_policy
    from mllm.parallel.mesh import make_mesh, shard_batch
    from mllm.rl.grpo_source import make_grpo_source
    from mllm.rl.rewards import Scores
    from mllm.rl.rollout import Completions
    from mllm.stopwatch import Stopwatch
    from mllm.train.optimizer import make_optimizer, make_schedule
    from mllm.train.step import init_state, make_train_step

    config = Config.model_validate(settings(sizes))
    assert config.rollout and config.task  # noqa: PT018
    limit = config.rollout.max_completion_length

    class Sampler:
        options = config.rollout

        def complete(
            self, params: Any, prompts: Sequence[Any], *, step: int, **_: Any
        ) -> tuple[Completions, list[str]]:
            rng = np.random.default_rng(step)
            lengths = np.minimum(rng.geometric(4 / limit, len(prompts)), limit).astype(np.int32)
            tokens = rng.integers(0, 256, (len(prompts), limit), np.int32)
            logprobs = -rng.random(tokens.shape, np.float32)
            return Completions(tokens, logprobs, lengths, lengths < limit), [str(length) for length in lengths]

    class Rewards:
        def score(self, examples: Sequence[Any], *_: Any) -> Scores:
            values = np.random.default_rng(0).random((len(examples), 1))
            values[: round(sizes["without_gradient"] * len(examples) / GROUP) * GROUP] = 0
            return Scores(values, np.full(values.shape, "value", object), [])

    mesh = make_mesh(config.mesh)
    policy = load_policy(config, mesh)
    optimizer, schedule = (make(config.optimizer, config.steps or 1) for make in (make_optimizer, make_schedule))
    train_step = make_train_step(policy.graphdef, optimizer, schedule, config, mesh)
    sampler: Any = Sampler()
    rewards: Any = Rewards()
    source = make_grpo_source(config, policy, mesh, load(config.task, 0), sampler, rewards)
    state = init_state(policy.initial_params(), optimizer)

    def measure(seed: int) -> dict[str, float]:
        nonlocal state
        watch = Stopwatch()
        step = source.next(state.params, 2 * seed, watch)
        start = time.perf_counter()
        state, _ = jax.block_until_ready(train_step(state, shard_batch(mesh, step.batch)))
        update = time.perf_counter() - start
        logprob = watch.timings()["time/logprob"]
        times = dict(zip(PHASES, (logprob, update, logprob + update), strict=True))
        tokens = np.asarray(step.batch.segments) > 0
        passes = -(-int(tokens.any(axis=1).sum()) // MICRO)
        places = passes * MICRO * tokens.shape[1]
        return {**times, "places": places, "padding": 1 - int(tokens.sum()) / places}

    return measure


def child(sizes: dict[str, Any]) -> None:
    """Answer each line of stdin, a seed, with the seconds of its batch."""
    measure = prepare(sizes)
    for line in sys.stdin:
        child_process.answer(measure(int(line)))


@errors.command
def main(arguments: Sequence[str] | None = None) -> int:
    parser = errors.ArgumentParser(
        prog="python tools/bench update", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--old", type=Path, metavar="FOLDER", help="the checkout to compare with")
    parser.add_argument("--sequences", type=int, default=64, help="of an update (default 64)")
    parser.add_argument("--limit", type=int, default=384, help="tokens of the longest sequence (default 384)")
    parser.add_argument("--hidden", type=int, default=256, help="hidden size (default 256)")
    parser.add_argument("--layers", type=int, default=4, help="(default 4)")
    parser.add_argument("--vocabulary", type=int, default=260, help="its words (default 260)")
    parser.add_argument("--without-gradient", type=float, default=0, metavar="SHARE", help="of the groups (default 0)")
    parser.add_argument("--repeats", type=int, default=5, help="turns, each with another batch (default 5)")
    options = parser.parse_args(arguments)
    from tools.bench import turns as processes  # not in an older checkout, whose code a child imports

    sizes = {key: value for key, value in vars(options).items() if key not in ("old", "repeats")}
    folders = {"new": processes.ROOT, **({"old": processes.old_checkout(options.old)} if options.old else {})}
    children = {name: processes.start(__file__, folder, json.dumps(sizes)) for name, folder in folders.items()}
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in folders}
    for turn in range(2 * options.repeats):  # the first half compiles
        for name, process in children.items():
            found = processes.ask(name, process, turn % options.repeats)
            print(f"{name}, batch {turn % options.repeats}: {found['both']:.2f} s", file=sys.stderr)
            turns[name] += [found] * (turn >= options.repeats)
    for process in children.values():
        process.kill()
    print(table(turns))
    return 0


def table(turns: dict[str, list[dict[str, float]]]) -> str:
    """Medians, and the median of the turns' ratios with their range, as Markdown; `places` are tokens and padding."""
    lines = [f"| seconds | {' | '.join(turns)} | new / old |", "| --- |" + " ---: |" * (len(turns) + 1)]
    for phase in PHASES:
        figures = [f"{statistics.median(turn[phase] for turn in taken):.3f}" for taken in turns.values()]
        pairs = zip(turns["new"], turns.get("old", []), strict=False)
        ratios = [new[phase] / old[phase] for new, old in pairs]
        figures.append(f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})" if ratios else "-")
        lines.append(f"| {phase} | {' | '.join(figures)} |")
    for key, form in (("places", ".0f"), ("padding", ".2f")):
        figures = [format(statistics.median(turn[key] for turn in taken), form) for taken in turns.values()]
        lines.append(f"| {key} | {' | '.join(figures)} | |")
    return "\n".join(lines)


if __name__ == "__main__":
    child(json.loads(sys.argv[2]))
