"""Rollouts of the engine beside those of other programs: python tools/bench rollout

A Qwen2 model with random parameters so small that every token is about as likely as any other. Three of the tokens are
stop tokens, so that lengths are about geometric, with a quarter of the limit as their mean. A method's useful tokens
are those up to the first stop token. The methods take turns, each in a process of its own that is warmed up. Columns:

    tokens/s   useful tokens a second, the median over the turns
    seconds    of a rollout, with their ratio to the engine's: the median over the turns, and the range
    useful     useful tokens over slot-steps: what was computed a token for
    GB/s       bytes that decode steps move, over the seconds of the whole rollout; bench kernels --kernel copy says
               what the device can move
    bytes      these bytes over the least possible: the weights once for each token of the longest row, or of a full
               batch, and each token's own keys and values

Methods, where their packages are installed: the engine; `generate` of transformers (torch); the sampler of
google-tunix.
"""

import importlib.util
import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mllm import errors
from tools.bench.frame import Figures, answer, compare, compared, numbers, turn

STOPS = (3, 130, 259)
VOCABULARY, DEVIATION = 260, 1e-3
PROMPT = 32
"""The most tokens of a prompt."""


# --- the methods, each in a process of its own ------------------------------------------------------------------------


def qwen2_config(hidden: int, layers: int, vocabulary: int = VOCABULARY) -> dict[str, Any]:
    """The keys of config.json of a small Qwen2 model with heads of 64."""
    return {
        "model_type": "qwen2",
        "vocab_size": vocabulary,
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


def prompts(options: Figures) -> list[list[int]]:
    """Groups of eight sequences of a prompt."""
    rng = np.random.default_rng(0)
    groups = [rng.integers(4, 128, rng.integers(PROMPT // 4, PROMPT + 1)).tolist() for _ in range(options["rows"] // 8)]
    return [prompt for prompt in groups for _ in range(8)]


def engine(options: Figures) -> Callable[[int], Figures]:
    """A function that makes a rollout with this seed."""
    import jax.numpy as jnp
    from flax import nnx

    from mllm.config.grpo import RolloutConfig
    from mllm.model.architecture import Architecture
    from mllm.model.decoder import Decoder
    from mllm.rl import rollout

    architecture = Architecture.from_hf(qwen2_config(options["hidden"], options["layers"]), "bench")
    graphdef, params = nnx.split(Decoder(architecture, rngs=nnx.Rngs(0), dtype=jnp.float32))
    limits = {"max_prompt_length": PROMPT, "max_completion_length": options["limit"]}
    config, rows = RolloutConfig.model_validate(limits), prompts(options)
    stream: dict[str, Any] = {"options": config, "stop_ids": STOPS, "pad_id": 0, "step": 0}

    def roll_out(seed: int) -> Figures:
        work = rollout.RolloutWork()
        result = rollout.generate(graphdef, params, rows, seed=seed, max_slots=options["slots"], work=work, **stream)
        found = shares(work, result.lengths, architecture, params, options)
        return {"tokens": float(result.lengths.sum()), **found}

    return roll_out


def shares(work: Any, lengths: np.ndarray, architecture: Any, params: Any, options: Figures) -> Figures:
    """The useful share of slot-steps, and moved over least bytes."""
    import jax

    weights = sum(4 * x.size for x in jax.tree.leaves(params))
    place = 2 * 4 * architecture.num_hidden_layers * architecture.num_key_value_heads * architecture.head_dim
    own = np.array([len(prompt) for prompt in prompts(options)]) + lengths
    read = sum(int(n) * (int(n) + 1) - int(n - m) * int(n - m + 1) for n, m in zip(own, lengths, strict=True)) // 2
    least = max(int(lengths.max()), work.tokens / options["slots"]) * weights + read * place
    moved = work.steps * weights + work.place_steps * place
    return {"useful": work.tokens / work.slot_steps, "bytes": moved / least, "moved": moved}


def transformers_generate(options: Figures) -> Callable[[int], Figures]:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**qwen2_config(options["hidden"], options["layers"]))).eval()
    rows = prompts(options)
    tokens = torch.tensor([[0] * (PROMPT - len(prompt)) + prompt for prompt in rows])
    mask = torch.tensor([[0] * (PROMPT - len(prompt)) + [1] * len(prompt) for prompt in rows])
    settings = {"max_new_tokens": options["limit"], "do_sample": True, "top_k": 0, "top_p": 1.0}

    def roll_out(seed: int) -> Figures:
        torch.manual_seed(seed)
        result = model.generate(tokens, attention_mask=mask, pad_token_id=0, eos_token_id=list(STOPS), **settings)
        return {"tokens": useful(result[:, PROMPT:].numpy())}

    return roll_out


def tunix_sampler(options: Figures) -> Callable[[int], Figures]:
    import jax
    from flax import nnx
    from tunix.generate import sampler
    from tunix.models.qwen2 import model

    from mllm.model.tokenizer import bytes_tokenizer

    sizes = qwen2_config(options["hidden"], options["layers"])
    kv_heads = sizes["num_key_value_heads"]
    config = model.ModelConfig(
        num_layers=sizes["num_hidden_layers"],
        vocab_size=VOCABULARY,
        embed_dim=sizes["hidden_size"],
        hidden_dim=sizes["intermediate_size"],
        num_heads=sizes["num_attention_heads"],
        head_dim=64,
        num_kv_heads=kv_heads,
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
    cache = sampler.CacheConfig(PROMPT + options["limit"], sizes["num_hidden_layers"], kv_heads, head_dim=64)
    sample = sampler.Sampler(net, bytes_tokenizer(), cache)
    text = ["".join(map(chr, prompt)) for prompt in prompts(options)]
    settings = {"max_generation_steps": options["limit"], "max_prompt_length": PROMPT, "eos_tokens": list(STOPS)}

    def roll_out(seed: int) -> Figures:
        result = sample(text, **settings, temperature=1.0, top_p=1.0, seed=seed)
        # It returns the stop token of no row.
        return {"tokens": float(sum(min(len(row) + 1, options["limit"]) for row in result.tokens))}

    return roll_out


def useful(rows: Sequence[Sequence[int]]) -> float:
    """The number of tokens up to each row's first stop token."""
    count = 0
    for row in rows:
        stops = np.flatnonzero(np.isin(row, STOPS))
        count += int(stops[0]) + 1 if stops.size else len(row)
    return float(count)


METHODS: dict[str, tuple[str, Callable[[Figures], Callable[[int], Figures]]]] = {
    "engine": ("jax", engine),
    "transformers": ("torch", transformers_generate),
    "google-tunix": ("tunix", tunix_sampler),
}
"""The package that a method needs, and the function that makes it."""
COLUMNS = {
    "tokens/s": ("tokens/s", 1, ".0f"),
    "seconds": ("seconds", 1, ".2fx"),
    "useful": ("useful", 1, ".2f"),
    "GB/s": ("GB/s", 1, ".2f"),
    "bytes": ("bytes", 1, ".2f"),
    "tokens": ("tokens", 1, ".0f"),
}


def make_measure(name: str, options: Figures) -> Callable[[int], Figures]:
    """A function that makes a rollout of this method, and says what it took."""
    roll_out = METHODS[name][1](options)

    def measure(seed: int) -> Figures:
        start = time.perf_counter()
        found = roll_out(seed)
        seconds = time.perf_counter() - start
        rate = {"GB/s": found["moved"] / seconds / 1e9} if "moved" in found else {}
        return {**found, **rate, "seconds": seconds, "tokens/s": found["tokens"] / seconds}

    return measure


# --- the comparison ---------------------------------------------------------------------------------------------------


@errors.command
def main(arguments: Sequence[str] | None = None) -> int:
    sizes = numbers(
        "rollout",
        __doc__,
        arguments,
        rows=(64, "sequences, eight for each prompt"),
        slots=(64, "slots of the engine"),
        limit=(384, "tokens of the longest completion"),
        hidden=(256, "hidden size"),
        layers=(4, "layers"),
        repeats=(3, "turns"),
    )
    installed = [name for name, (package, _) in METHODS.items() if importlib.util.find_spec(package)]
    print(compared(compare("tools.bench.rollout", installed, sizes, sizes.pop("repeats")), COLUMNS))
    return 0


if __name__ == "__main__":
    answer(turn, make_measure, json.loads(sys.argv[1]))
