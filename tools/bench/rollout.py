"""Rollouts of the engine beside google-tunix's sampler, if it is installed: python tools/bench rollout

A Qwen2 model with random parameters so small that every token is about as likely as any other. Three of the tokens are
stop tokens, so that lengths are about geometric, with a quarter of the limit as their mean. Tokens count up to the
first stop token. The methods are warmed up, then take turns. Medians over the turns:

    ratio      of the seconds a token to the engine's in the same turn, and its range
    useful     tokens over slot-steps
    bytes      of decode steps over the least: weights once a step, and the keys and values that sequences have
    prefilled  tokens, with padding, over the tokens of prompts and completions
    programs   that decode
"""

import importlib.util
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from mllm import errors
from tools.bench.frame import positive, table

STOPS = (3, 130, 259)
VOCABULARY, DEVIATION = 260, 1e-3
PROMPT = 32
"""The most tokens of a prompt."""
Sizes = dict[str, int]
Figures = dict[str, float]
Rollout = Callable[[int], Figures]
"""Makes a rollout with this seed, and counts."""


def qwen2_config(hidden: int, layers: int) -> dict[str, Any]:
    """The keys of config.json of a small Qwen2 model with heads of 64."""
    return {
        "model_type": "qwen2",
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": max(1, hidden // 128),
        "tie_word_embeddings": True,
        "rope_theta": 10000.0,
        "max_position_embeddings": 4096,
        "initializer_range": DEVIATION,
    }


def prompts(options: Sizes) -> list[list[int]]:
    """Groups of eight sequences of a prompt."""
    rng = np.random.default_rng(0)
    groups = [rng.integers(4, 128, rng.integers(PROMPT // 4, PROMPT + 1)).tolist() for _ in range(options["rows"] // 8)]
    return [prompt for prompt in groups for _ in range(8)]


def engine(options: Sizes) -> Rollout:
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from mllm.config.rollout import RolloutConfig
    from mllm.model.architecture import Architecture
    from mllm.model.decoder import Decoder
    from mllm.model.tokenizer import Renderer, bytes_tokenizer
    from mllm.sampler.completion import RolloutWork
    from mllm.sampler.decoding import abstract_cache
    from mllm.sampler.sampler import Sampler
    from mllm.sampler.schedule import DecodeLimits

    architecture = Architecture.from_hf(qwen2_config(options["hidden"], options["layers"]), "bench")
    model = Decoder(architecture, rngs=nnx.Rngs(0), dtype=jnp.float32)
    graphdef, params = nnx.split(model)
    limits = {"max_prompt_length": PROMPT, "max_completion_length": options["limit"]}
    config, rows = RolloutConfig.model_validate(limits), prompts(options)
    trees = jax.tree.leaves(params), jax.tree.leaves(abstract_cache(model, [1], 1))
    weights, token = (sum(x.size * x.dtype.itemsize for x in tree) for tree in trees)

    def roll_out(seed: int) -> Figures:
        slots, work, tokens = options["slots"], RolloutWork(), Renderer(bytes_tokenizer())
        sampler = Sampler(graphdef, tokens, STOPS, config, seed, room=lambda: DecodeLimits(slots), work=work)
        completions = sampler.complete(params, rows, step=0)
        total = sum(len(row) + len(completion.tokens) for row, completion in zip(rows, completions, strict=True))
        return {
            "tokens": work.tokens,
            "useful": work.tokens / work.slot_steps,
            "bytes": work.bytes_over_least(weights, token),
            "prefilled": work.prefilled / total,
            "programs": len(work.programs),
        }

    return roll_out


def tunix_sampler(options: Sizes) -> Rollout:
    import jax
    from flax import nnx
    from tunix.generate import sampler
    from tunix.models.qwen2 import model

    from mllm.model.tokenizer import bytes_tokenizer

    sizes = qwen2_config(options["hidden"], options["layers"])
    config = model.ModelConfig(
        num_layers=sizes["num_hidden_layers"],
        vocab_size=VOCABULARY,
        embed_dim=sizes["hidden_size"],
        hidden_dim=sizes["intermediate_size"],
        num_heads=sizes["num_attention_heads"],
        head_dim=64,
        num_kv_heads=sizes["num_key_value_heads"],
        rope_theta=10000,
        norm_eps=1e-6,
        use_tied_embedding=True,
    )
    net = model.Qwen2(config, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)
    # Matrices as small as ours; the norms' scales stay 1.
    small = jax.tree.map(
        lambda x: rng.normal(0, DEVIATION, x.shape).astype(np.float32) if x.ndim > 1 else x, nnx.state(net)
    )
    nnx.update(net, small)
    cache = sampler.CacheConfig(PROMPT + options["limit"], config.num_layers, config.num_kv_heads, head_dim=64)
    sample = sampler.Sampler(net, bytes_tokenizer(), cache)
    settings = {"max_generation_steps": options["limit"], "eos_tokens": list(STOPS), "temperature": 1.0, "top_p": 1.0}
    text = ["".join(map(chr, prompt)) for prompt in prompts(options)]

    def roll_out(seed: int) -> Figures:
        rows = sample(text, **settings, max_prompt_length=PROMPT, seed=seed).tokens
        # It returns the stop token of no row.
        return {"tokens": sum(len(row) + (len(row) < options["limit"]) for row in rows)}

    return roll_out


@errors.command
def main(arguments: Sequence[str] | None = None) -> int:
    known = errors.ArgumentParser(__doc__, prog="python tools/bench rollout")
    for option, default, meaning in (
        ("rows", 64, "sequences, eight for each prompt"),
        ("slots", 64, "slots of the engine"),
        ("limit", 384, "tokens of the longest completion"),
        ("hidden", 256, "hidden size"),
        ("layers", 4, "layers"),
        ("repeats", 3, "turns of the methods"),
    ):
        known.add_argument(f"--{option}", type=positive(int), default=default, help=f"{meaning} (default {default})")
    sizes: Sizes = vars(known.parse_args(arguments))
    methods = {"engine": engine(sizes)}
    if importlib.util.find_spec("tunix"):
        methods["google-tunix"] = tunix_sampler(sizes)
    turns: dict[str, list[Figures]] = {name: [] for name in methods}
    for seed in range(sizes["repeats"]):
        for name, roll_out in methods.items():
            roll_out(seed)  # lengths differ between seeds, and with them the programs
            start = time.perf_counter()
            figures = roll_out(seed)
            seconds = time.perf_counter() - start
            turns[name].append({"seconds": seconds, "tokens/s": figures["tokens"] / seconds, **figures})
            print(f"turn {seed + 1}: {name}: {seconds:.2f} s", file=sys.stderr)
    print(compared(turns))
    return 0


def compared(measured: Mapping[str, Sequence[Figures]]) -> str:
    """The table, a row for each method: medians over the turns, and ratios to the first, which has all columns."""
    first = next(iter(measured.values()))
    rows = []
    for name, turns in measured.items():
        ratios = [base["tokens/s"] / turn["tokens/s"] for turn, base in zip(turns, first, strict=True)]
        cells = [name, f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"]
        for key in first[0]:
            middle = statistics.median(turn.get(key, math.nan) for turn in turns)
            cells.append("-" if math.isnan(middle) else f"{middle:.{0 if middle >= 100 else 3}f}")
        rows.append(cells)
    return table(["method", "ratio", *first[0]], rows)
