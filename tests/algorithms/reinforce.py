"""REINFORCE without a baseline (Williams 1992): an algorithm in one file, as a user would add it to the tables.

A completion's reward is its advantage; failed rewards are left out. Sampling and packing are those of GRPO.
"""

from typing import Literal

import jax.numpy as jnp
import numpy as np

from mllm.algorithms.grpo import algorithm as grpo
from mllm.algorithms.grpo.inputs import PolicyInputs
from mllm.algorithms.grpo.settings import RolloutRun
from mllm.algorithms.rollouts import Learning, RolloutSource, ScoredRollout
from mllm.config.section import Section
from mllm.training.means import masked_mean
from mllm.training.recipe import Recipe


class ReinforceConfig(Section):
    """The loss on completions."""

    reward_scale: float = 1.0
    """The factor of all rewards."""


class ReinforceRun(RolloutRun):
    """REINFORCE on the problems of `task`."""

    algorithm: Literal["reinforce"]
    reinforce: ReinforceConfig = ReinforceConfig()


def make(config: ReinforceRun) -> Recipe:
    def score(rollout):
        rewards = config.reinforce.reward_scale * rollout.rewards.reshape(-1)
        failed = np.isnan(rewards)
        return ScoredRollout(rollout.trajectories, np.where(failed, 0.0, rewards), ~failed, failed, 1.0)

    def source(parts):
        return RolloutSource(config, parts, Learning(score, lambda batch, *_: (batch, {}), all_learned=False))

    demands = grpo.rollout_demands(config, lambda tokens, rows: PolicyInputs(tokens, tokens))
    return Recipe(loss, metrics, source, demands)


def loss(head, states, batch, teacher=None):
    return head.loss(states, batch, lambda logprob, entropy, reward: -reward * logprob, batch.inputs.advantages)


def metrics(batch, outputs):
    entropy = masked_mean(outputs.entropy, batch.weights > 0)
    return {"entropy": jnp.where((batch.weights > 0).any(), entropy, jnp.nan)}
