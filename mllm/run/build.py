"""Builds a run's parts from its configuration, and checks them before anything is written.

A run starts in one of these ways, which `Run.start` tells apart:

    new        run_dir is empty: start with the parameters of `model.source`, or random parameters
    resumed    run_dir has checkpoints: start with the newest undamaged checkpoint; --change permits other settings
    pending    that checkpoint's step still lacks its evaluation: evaluate before the next step
    finished   all steps are done: train nothing, and print the summary again
"""

import hashlib
import json
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from mllm.algorithms.recipes import recipe_of
from mllm.config.load import for_devices
from mllm.config.run import RunConfig
from mllm.config.task import Form
from mllm.data.prompts import task_renderer
from mllm.data.source import FrozenModels, ReferencedSource, Source
from mllm.data.tasks.load import load as load_task
from mllm.data.turns import check_turns, with_tools
from mllm.errors import CommonError, UserError, need
from mllm.model.folder import is_there
from mllm.model.layout import Params
from mllm.model.load import Policy
from mllm.model.tokenizer import Renderer, save_tokenizer, warn_of_mismatch
from mllm.model.weights import write_settings
from mllm.parallel.group import ending_together
from mllm.parallel.mesh import make_mesh
from mllm.parallel.processes import RowShare, from_writer, gather_objects, is_writer
from mllm.rewards.runner import RewardRunner
from mllm.run import folder
from mllm.run.checkpoint import Checkpoints, by_name
from mllm.run.checksum import checksums
from mllm.run.compiling import keep_programs
from mllm.run.evaluation import make_evaluation
from mllm.run.identity import dependencies
from mllm.run.metrics import RunLog, start_lines
from mllm.run.signals import Interrupt
from mllm.run.source_run import load_own_policy, load_policy, load_teacher, pin_all
from mllm.run.state import Measurement, Measurements, PendingEvaluation, RunState
from mllm.sampler.sampler import Sampler
from mllm.sampler.schedule import TypicalBatch
from mllm.training.decode_limits import fitting_limits
from mllm.training.head import choose_head
from mllm.training.optimizer import make_optimizer, make_schedule
from mllm.training.recipe import Parts, Sampling
from mllm.training.step import abstract_state, init_state, make_train_step

logger = logging.getLogger(__name__)
Fit = Callable[[RunConfig, Policy, Mesh], RunConfig]
"""(configuration, model, devices) -> the configuration with numbers in place of its open settings."""


class Run:
    """All parts of the training loop, loaded and checked."""

    @classmethod
    @contextmanager
    def build(
        cls, config: RunConfig, change: bool = False, fit: Fit = lambda config, policy, mesh: config
    ) -> Iterator["Run"]:
        """Build the run of a configuration, and lock its folder until it ends. UserError if a setting can't work.

        All processes must enter this. `change` permits settings to differ from the run's earlier settings. `fit`
        chooses the settings that depend on the available memory.
        """
        with ExitStack() as stack, ending_together():
            yield cls(config, change, fit, stack)

    def __init__(self, config: RunConfig, change: bool, fit: Fit, stack: ExitStack) -> None:
        """Load all parts, and write config.yaml last. `stack` closes the parts when the run ends."""
        self.stack = stack
        self.interrupt = Interrupt()
        config = for_devices(config, jax.device_count())
        self.mesh = make_mesh(config.mesh)
        keep_programs()
        self.store, config = stack.enter_context(folder.open_run(config, change))
        if config.log.wandb and is_writer():
            need("wandb", "wandb", "log.wandb")
        run_exists = from_writer(self.store.is_run)  # processes may see new files at different times
        if not run_exists:
            config = pin_all(config)
        self.config = config
        task = config.task and config.task.of_run(evaluates=config.eval is not None)
        self.task = load_task(task) if task else None
        self.rewards = self.make_rewards()
        policy = self.find_policy(resumes := bool(from_writer(self.store.steps)))
        self.config = config = fit(config, policy, self.mesh)
        self.policy = policy = policy.rematerialized(config.model.remat)
        self.teacher = teacher = load_teacher(config, self.mesh, policy.tokenizer)
        self.recipe, demands = (recipe := recipe_of(config)), recipe.demands
        self.forward = recipe.forward(config, policy.graphdef, self.mesh, None if teacher is None else teacher.graphdef)
        self.source, self.sampling = self.make_source()
        steps = self.source.steps
        self.optimizer, schedule = make_optimizer(config.optimizer, steps), make_schedule(config.optimizer, steps)
        train_step = make_train_step(self.forward, self.optimizer, schedule, config.seed)
        self.measurements = self.make_measurements()
        # A resumed run reads its parameters from a checkpoint; it may need the initial parameters as well.
        needed = policy.lora is not None or not resumes
        initial = policy.initial_params() if demands.reference or needed else None
        if initial is not None and demands.reference == "at_start" and isinstance(self.source, ReferencedSource):
            self.set_reference(self.source, initial)
            initial = initial if needed else None
        self.trained, self.frozen = policy.split(initial)
        """The trained parameters, until `start` takes them; and the frozen parameters."""
        reference = initial if demands.reference == "held" else None
        self.frozen_models = FrozenModels(reference, teacher.initial_params() if teacher else None)
        scored = {"teacher": self.frozen_models.teacher} if demands.teacher_in_update else {}
        self.train_step = partial(train_step, **scored)
        position, *others = gather_objects(self.source.position())
        if any(other != position for other in others):
            raise CommonError("data: the processes have different examples: give all the same data")
        fixed: Any = self.frozen_models.reference or self.frozen
        fixed = {"student": fixed, "teacher": self.frozen_models.teacher} if self.frozen_models.teacher else fixed
        known = dependencies(policy, Renderer(policy.tokenizer, config.chat_template), self.task)
        self.checkpoints = stack.enter_context(closing(Checkpoints(self.store, config.checkpoint, fixed, known)))
        folder.write(self.store, config, None if run_exists else partial(self.write_model, self.source.form))

    def find_policy(self, resumes: bool) -> Policy:
        """The policy of the configuration; if its source is gone, a resumed run loads it from its own folder."""
        model = self.config.model
        try:
            return load_policy(self.config, self.mesh)
        except UserError as error:
            places = [place for place in (model.source, model.tokenizer) if place not in (None, "bytes")]
            if not resumes or model.init != "pretrained" or all(map(is_there, places)):
                raise
            logger.warning("%s; going on with the model's files in %s", error, self.store)
            return load_own_policy(self.store, self.config, self.mesh)

    def write_model(self, learned: Form | None, target: Path) -> None:
        """Write the model's folder without its parameters; tools and other runs read the model from there."""
        policy, dtype = self.policy, self.config.model.dtype
        save_tokenizer(policy.tokenizer, target)
        ids = policy.tokenizer.pad_token_id, policy.tokenizer.bos_token_id
        write_settings(target, policy.architecture, dtype, policy.stop_ids, policy.stop_texts, *ids, learned)

    def make_rewards(self) -> RewardRunner | None:
        """The processes that score completions; None for a run without sampling."""
        task, rollout = self.config.task, self.config.rollout
        if not (task and rollout and self.task):
            return None
        # Several processes may only stop where all of them check for signals.
        poll = self.interrupt.poll if jax.process_count() == 1 else lambda: None
        return self.stack.enter_context(RewardRunner(task, self.task, rollout.sampled_length, poll))

    def make_source(self) -> tuple[Source, Sampling | None]:
        """The source of the algorithm's batches, and the sampler if the run samples.

        Prompts have the form that the policy is trained on: the form of the run's own examples, or else of the model's
        earlier training.
        """
        config, policy = self.config, self.policy
        renderer, learned = Renderer(policy.tokenizer, config.chat_template), policy.learned
        parts = partial(Parts, self.mesh, self.forward)
        if config.examples is None:
            sampling = self.make_sampling(renderer, learned, str(config.model.source))
            return self.recipe.source(parts(renderer, None, sampling)), sampling
        task = self.task if config.examples.source == "task" else None
        examples = task_renderer(config.task, task, renderer, learned) if config.task and task else renderer
        source = self.recipe.source(parts(examples, task))
        warn_of_mismatch(str(config.model.source), learned, "this run's examples", source.form)
        return source, self.make_sampling(renderer, source.form, "the run")

    def make_sampling(self, renderer: Renderer, learned: Form | None, who: str) -> Sampling | None:
        """The sampler; None for a run without sampling. `who` was trained on the form `learned`; a warning names it."""
        config, policy, demands = self.config, self.policy, self.recipe.demands
        rollout, task, rewards = config.rollout, self.task, self.rewards
        if not (config.task and rollout and task and rewards):
            return None
        renderer = task_renderer(config.task, task, renderer, learned)
        if config.task.converses:
            tools = [*rewards.tools]
            if rollout.turns > 1:
                check_turns(renderer, tools)
            renderer = with_tools(renderer, tools)
        warn_of_mismatch(who, learned, f"the prompts of task {task.name}", renderer.form)
        keeps_reference, completions = demands.reference == "held", demands.completions
        sampler = Sampler(
            policy.graphdef,
            renderer,
            policy.stop_ids,
            rollout,
            config.seed,
            # Computed when needed, so that cheaper checks of the configuration come first.
            cache(partial(fitting_limits, policy, rollout, config.optimizer, keeps_reference, teacher=self.teacher)),
            TypicalBatch(completions // demands.group, completions) if completions else None,
            self.interrupt.poll,
            stop_texts=policy.stop_texts,
        )
        return Sampling(task, sampler, rewards)

    def set_reference(self, source: ReferencedSource, initial: Params) -> None:
        """Set the run's initial parameters as the source's reference, with their checksum.

        The checksum leaves out new adapters, which don't change the model yet.
        """
        policy = self.policy
        fixed = policy.split(initial)[1] if policy.lora and not policy.adapters else initial
        checksum = hashlib.sha256(json.dumps(checksums(by_name(fixed))).encode()).hexdigest()
        source.set_reference(initial, checksum)

    def make_measurements(self) -> Measurements:
        """The run's evaluation on held-out problems, validation, and test set, if configured."""
        config, sampling = self.config, self.sampling
        validation = config.examples.validation if config.examples else None
        repeated, at_end = [], []
        rows = RowShare.of_mesh(self.mesh)
        if config.eval and config.task and sampling:
            task, sampler = sampling.task, sampling.sampler
            evaluation = partial(make_evaluation, config.eval, config.task)
            make = partial(evaluation, sampler=sampler, rewards=sampling.rewards, rows=rows)
            if task.heldout:
                repeated.append(Measurement(make(task.heldout), config.eval.every))
            if config.eval.test:
                if task.test is None:
                    raise UserError(f"eval.test: task {task.name} has no test set: remove it, or give the task one")
                at_end.append(make(task.test, prefix="test/"))
        if validation:
            measures = self.source.evaluations(self.interrupt.poll)
            repeated += [Measurement(measure, validation.every) for measure in measures]
        return Measurements(repeated, at_end, validation, bool(config.task and config.task.pays_answers))

    def start(self) -> RunState:
        """The first state: the newest checkpoint's, or a new state. Also moves the source there and opens the log."""
        trained, self.trained = self.trained, None
        state = self.checkpoints.restore(abstract_state(self.policy.trained, self.optimizer))
        if state is not None:
            self.source.seek(state.position)
        else:
            if self.frozen_models.reference is not None:  # the first update must not reuse its buffers
                shardings = jax.tree.map(lambda leaf: leaf.sharding, trained)
                trained = jax.jit(lambda params: jax.tree.map(jnp.copy, params), out_shardings=shardings)(trained)
            pending = PendingEvaluation({}, []) if self.measurements.are_due(0, final=False) else None
            train = init_state(trained, self.optimizer)
            state = RunState(0, train, self.source.position(), pending_evaluation=pending)
        if is_writer():
            config, policy = self.config, self.policy
            head = choose_head(config.head, config.model, config.batch_shape, policy.architecture, self.mesh)
            lines = start_lines(self.mesh, policy, head, self.source.summary, config, state.step)
            print(lines, file=sys.stderr)
        steps, ends = self.source.steps, self.checkpoints.ends
        last_step = state.step - (state.pending_evaluation is not None)  # the last step with written lines
        log = RunLog(self.store, last_step, steps, self.config, self.recipe.progress, ends)
        self.log = self.stack.enter_context(closing(log))
        self.stack.enter_context(self.interrupt)
        return state
