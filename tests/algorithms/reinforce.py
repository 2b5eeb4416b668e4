"""REINFORCE without a baseline (Williams 1992): an algorithm in one file, as a user would add it to the table.

A completion's reward is its advantage; failed rewards are left out. It samples and packs as GRPO does.
"""

import jax.numpy as jnp
import numpy as np

from mllm.algorithms.grpo.algorithm import Grpo
from mllm.algorithms.grpo.settings import GrpoConfig, packed_rows, rollout_faults
from mllm.algorithms.grpo.source import GrpoSource, Judged
from mllm.config.schema import Rules
from mllm.config.section import Section
from mllm.training.means import masked_mean


class ReinforceConfig(Section):
    """What is learned from completions."""

    reward_scale: float = 1.0
    """The factor of all rewards."""


class ReinforceRules(Rules):
    implementation = "reinforce:Reinforce"
    sections = {"reinforce": ReinforceConfig, "grpo": GrpoConfig}  # noqa: RUF012
    needs = ("task", "rollout", "reinforce", "grpo")
    unused = ("data", "teacher")

    def faults(self, config):
        return rollout_faults(config)

    def rows(self, config):
        return packed_rows(config)


class RewardSource(GrpoSource):
    scale = 1.0

    def judge(self, drawn, step):
        rewards = self.scale * drawn.rewards.reshape(-1)
        failed = np.isnan(rewards)
        return Judged(drawn.trajectories, np.where(failed, 0.0, rewards), ~failed, failed, 1.0)


class Reinforce(Grpo):
    def __init__(self, config):
        scale = config.section(ReinforceConfig).reward_scale
        super().__init__(config, type("ScaledSource", (RewardSource,), {"scale": scale}))

    def loss(self, head, states, batch, teacher=None):
        return head.loss(states, batch, lambda logprob, entropy, reward: -reward * logprob, batch.inputs.advantages)

    def metrics(self, batch, outputs):
        entropy = masked_mean(outputs.entropy, batch.weights > 0)
        return {"entropy": jnp.where((batch.weights > 0).any(), entropy, jnp.nan)}
