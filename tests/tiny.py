"""The smallest run that has every part: configurations and data that tests share."""

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mllm.algorithms.grpo.inputs import PolicyInputs
from mllm.algorithms.recipes import recipe_of
from mllm.algorithms.table import schema
from mllm.config.model import MeshConfig
from mllm.config.run import RunConfig
from mllm.data.batch import Batch
from mllm.model import weights
from mllm.model.decoder import Decoder
from mllm.model.layout import Layout
from mllm.model.load import load_policy
from mllm.parallel.mesh import make_mesh
from mllm.training.optimizer import make_optimizer, make_schedule
from mllm.training.step import Forward, make_train_step

FIXTURES = Path(__file__).parent / "fixtures"
ARCHITECTURE = {
    "model_type": "qwen2",
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "rope_theta": 10000.0,
}

QWEN35 = {
    **ARCHITECTURE,
    "model_type": "qwen3_5_text",
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "head_dim": 16,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
"""A model with delta nets."""


def config(algorithm: str = "grpo", **sections) -> RunConfig:
    """A valid configuration of two-digit sums on 8 rows; `sections` replace or extend settings, a level deep."""
    settings = {
        "algorithm": algorithm,
        "run_dir": "unused",
        "steps": 4,
        "batch_size": 8,
        "model": {"init": "random", "architecture": ARCHITECTURE, "dtype": "float32"},
        "optimizer": {"learning_rate": 1e-2},
        "mesh": {"fsdp": 1},
        "task": {"name": "arithmetic", "heldout": 16},
        "rollout": {"max_prompt_length": 16, "max_completion_length": 4},
    }
    own = "grpo" in sections or algorithm == "grpo"
    if own:
        settings["grpo"] = {"num_generations": 4}
    else:
        settings |= {"data": {"source": "task", "max_length": 32}, "eval": {}}
    for name, value in sections.items():
        settings[name] = {**settings.get(name, {}), **value} if isinstance(value, dict) else value
    return schema().validate_python(settings)


SUMS = [{"prompt": f"{i % 9}+{i % 5}=", "completion": str(i % 9 + i % 5)} for i in range(40)]
"""Examples for a file."""
EXAMPLES = FIXTURES.parents[1] / "docs" / "examples"
FOUR_STEPS = {"steps": 4, "batch_size": 4, "eval": None, "checkpoint": {"every": 2}}
TEACHER = {"source": str(FIXTURES / "tiny_grpo"), "dtype": "float32"}
TURNS = {
    **FOUR_STEPS,
    "mesh": {"dp": 2},
    "task": {
        "environment": "user_rewards:Counter",
        "rewards": [{"name": "user_rewards:even_characters"}],
        "reward_timeout": 600,
    },
    # some turns are cut off and others not, and some conversations have no room for a third turn
    "rollout": {"max_turns": 3, "max_total_length": 30, "max_slots": 2, "stop": [*map(chr, range(65, 91))]},
    "grpo": {"num_generations": 2},
}
METHODS = {
    "plain": config("sft", **FOUR_STEPS, rollout=None),
    "sft": config(
        "sft",
        steps=8,
        model={"architecture": {**ARCHITECTURE, "initializer_range": 0.3}},  # else every completion is empty
        task={"system_prompt": "Sum."},
        rollout={"stop": ["~"]},
        checkpoint={"every": 4},
        eval={"every": 4},
    ),
    "grpo": config(
        steps=10,
        model={"dtype": "bfloat16"},  # its masters are dithered
        grpo={"num_iterations": 2, "beta": 0.1, "reference": "initial"},
        task={"rewards": [{"name": "user_rewards:even_characters"}]},
        checkpoint={"every": 2, "keep": 5},
        eval={"every": 6, "samples": 1},
    ),
    "turns": config(**TURNS),
    "delta": config(**TURNS, model={"architecture": QWEN35}),
    "distill": config(
        "distill",
        **FOUR_STEPS,
        mesh={"dp": 2},
        model={"lora": {"rank": 2, "alpha": 2}},
        grpo={"num_generations": 2},
        distill={},
        teacher=TEACHER,
    ),
    "dpo": config(
        "dpo",
        **FOUR_STEPS,
        mesh={"dp": 2},
        micro_batch_size=2,
        data={"source": str(EXAMPLES / "preferences.jsonl"), "validation": {"share": 0.2, "every": 2}},
        dpo={},
        **dict.fromkeys(("task", "rollout")),
    ),
}
"""Runs with several checkpoints, which `finished` in conftest.py makes once a session."""


def make_trainer(settings: RunConfig, mesh=None):
    """Policy, optimizer and jitted update of a run."""
    mesh = mesh or make_mesh(settings.mesh)
    policy = load_policy(settings, mesh)
    optimizer = make_optimizer(settings.optimizer, settings.steps)
    schedule = make_schedule(settings.optimizer, settings.steps)
    forward = forward_of(policy.graphdef, mesh, settings)
    return policy, optimizer, make_train_step(forward, optimizer, schedule, settings.seed)


def forward_of(graphdef, mesh, settings: RunConfig) -> Forward:
    """The model and the head of a run."""
    return recipe_of(settings).forward(settings, graphdef, mesh)


def random_batch(rows: int, length: int, seed: int = 0) -> Batch:
    """Rows of a prompt, a completion and padding, all of different lengths."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(1, 260, (rows, length), dtype=np.int32)
    lengths = rng.integers(length // 2, length, (rows, 1))
    place = np.arange(length)
    mask = (place >= 5) & (place < lengths - 1)
    numbers = rng.normal(size=(4, rows, length)).astype(np.float32)
    return Batch(
        tokens=tokens,
        positions=np.broadcast_to(place, tokens.shape).astype(np.int32),
        segments=(place < lengths).astype(np.int32),
        labels=(np.roll(tokens, -1, 1) * mask).astype(np.int32),
        weights=(mask / mask.sum()).astype(np.float32),
        inputs=PolicyInputs(
            advantages=numbers[0],
            sampler_logprobs=-5.5 + 0.1 * numbers[1],
            old_logprobs=-5.5 + 0.1 * numbers[2],
            reference_logprobs=-5.5 + 0.1 * numbers[3],
        ),
    )


def with_inputs(batch: Batch, **inputs) -> Batch:
    """The batch with some of its algorithm's inputs replaced."""
    return batch._replace(inputs=batch.inputs._replace(**inputs))


@partial(jax.jit, static_argnums=0)
def logits(graphdef: nnx.GraphDef, params: nnx.State, tokens, positions=None, segments=None) -> jax.Array:
    """A model's logits of rows of tokens, float32 [B, T, V]; unless other arguments are given, a row is a document."""
    model = nnx.merge(graphdef, params)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape) if positions is None else positions
    hidden = model(tokens, positions, jnp.ones_like(tokens) if segments is None else segments)
    return jnp.einsum("btd,vd->btv", hidden, model.head_weight, precision="highest")


def load_weights(folder: Path, **mesh: int) -> nnx.State:
    """The parameters in a model's folder, float32; by default on one device."""
    sizes = weights.read_config(folder)
    layout = Layout.of(make_mesh(MeshConfig(**{"fsdp": 1, **mesh})), sizes)
    return weights.load(folder, layout.abstract_parameters(nnx.state(Decoder.abstract(sizes))), sizes)
