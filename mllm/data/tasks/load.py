"""Loads the task that a configuration names."""

from mllm.config.task import TaskConfig
from mllm.data.tasks.arithmetic import arithmetic
from mllm.data.tasks.gsm8k import gsm8k
from mllm.data.tasks.gym import reasoning_gym
from mllm.data.tasks.listed import from_files, from_function, from_hub
from mllm.data.tasks.task import Task

LOADERS = {"arithmetic": arithmetic, "gsm8k": gsm8k, "jsonl": from_files, "hub": from_hub, "function": from_function}


def load(config: TaskConfig, seed: int) -> Task:
    """The task that `config` names. `seed` only determines which problems reasoning_gym makes for training.

    UserError is raised if the data or package isn't there, a line of it is bad, or there are too few problems.
    """
    if config.kind == "reasoning_gym":
        return reasoning_gym(config, config.name.partition(":")[2], seed)
    return LOADERS[config.kind](config)
