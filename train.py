"""Train Qwen2.5 by SFT or GRPO: python train.py --config qwen25_3b_grpo.yaml [key.sub=value ...]

The same command again resumes from the newest checkpoint in run_dir, and ends as a run that was never stopped.

Several processes train one model, over the devices of all, if each gets --coordinator HOST:PORT (of process 0),
--processes and --process, or JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID in its environment, or
--cluster where JAX knows the cluster (TPU pods, Slurm, Open MPI, Kubernetes). They share run_dir, and end together.
Exit codes: 0 done; 1 a bug, with a traceback; 2 an error that you can mend, in one line; 75 another process was lost:
start again; 143 or 130 saved and stopped by SIGTERM or SIGINT.
"""

# Nothing heavy is imported here: --help, --print-config and errors in the configuration must not wait for JAX.
import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial

from mllm.config import load as configs
from mllm.config.schema import Config
from mllm.errors import ArgumentParser, StepError, UserError, command, run_main


@command
def main(arguments: Sequence[str] | None = None) -> int:
    options = make_parser().parse_intermixed_args(arguments)
    config = configs.load(options.config, options.overrides)
    if options.print_config:
        print(configs.dump(config), end="")
        return 0
    if options.target and not options.plan:
        raise UserError("--target: is for --plan; training takes the devices at hand")
    if options.plan:
        from mllm.plan.memory import plan

        plan(config, options.target)
        return 0

    from mllm.parallel.processes import ProcessGroup

    flags = options.coordinator, options.processes, options.process
    if group := ProcessGroup.of_cluster(options.wait) if options.cluster else ProcessGroup.find(*flags, os.environ):
        group.join(options.wait)
    return train(config, options.change)


def make_parser() -> ArgumentParser:
    parser = ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, metavar="NAME", help="a path, or a file in configs/")
    parser.add_argument("--print-config", action="store_true", help="print the resolved configuration and exit")
    parser.add_argument("--plan", action="store_true", help="say what the run will hold in memory, and exit")
    parser.add_argument("--target", metavar="SLICE", help="with --plan: for TPUs that aren't there, such as v6e:2x4")
    parser.add_argument("--change", action="store_true", help="go on from run_dir with other settings than it has had")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value", help="settings that replace the file's")
    several = parser.add_argument_group("several processes")
    several.add_argument("--coordinator", metavar="HOST:PORT", help="where process 0 listens")
    several.add_argument("--processes", type=int, metavar="N", help="how many train this model")
    several.add_argument("--process", type=int, metavar="I", help="which one this is, from 0")
    several.add_argument("--cluster", action="store_true", help="find all of these in the cluster's environment")
    several.add_argument("--wait", type=int, default=300, metavar="SECONDS", help="for the others (default 300)")
    return parser


def train(config: Config, change: bool = False) -> int:
    """Train until `steps` are done, the data ends, or a signal asks to stop. Returns the exit code."""
    from mllm.data.sft_source import SftSource
    from mllm.data.source import Source
    from mllm.data.tasks.load import load as load_task
    from mllm.parallel.mesh import make_mesh, shard_batch
    from mllm.parallel.processes import RowShare, check_same, is_writer, raise_everywhere
    from mllm.rl.grpo_source import GrpoSource
    from mllm.rl.rewards import RewardRunner
    from mllm.rl.sampler import make_sampler
    from mllm.run import folder as run_dir
    from mllm.run import report, wandb
    from mllm.run.checkpoint import Checkpoints
    from mllm.run.heartbeat import Heartbeat
    from mllm.run.measurements import make_measurements
    from mllm.run.metrics import RunLog
    from mllm.run.signals import Interrupt, Interrupted
    from mllm.run.skipped import save_batch, too_many_skipped
    from mllm.run.source_run import load_policy
    from mllm.run.state import PendingEvaluation, RunState
    from mllm.stopwatch import Stopwatch
    from mllm.train.optimizer import make_optimizer, make_schedule
    from mllm.train.step import Forward, abstract_state, choose_head, make_train_step

    with ExitStack() as stack, Heartbeat() as heartbeat:
        # Load and check everything before anything is written.
        interrupt = stack.enter_context(Interrupt())
        mesh = make_mesh(config.mesh)
        store, config = stack.enter_context(run_dir.claim(config, change))
        with raise_everywhere():
            wandb.check(config.log)
            task = None if config.task is None else load_task(config.task, config.seed)
            rewards = None
            if task and config.task and config.rollout:
                rewards = RewardRunner(config.task, task, config.rollout.max_completion_length, interrupt.poll_alone)
                stack.enter_context(rewards)
            policy = load_policy(config, mesh)
            forward = Forward(policy.graphdef, mesh, config.head, config.rows, config.grpo, config.rollout)
            sampler = None
            if config.rollout:
                sampler = make_sampler(
                    policy,
                    config.rollout,
                    config.optimizer,
                    needs_reference=config.grpo is not None and config.grpo.beta > 0,
                    seed=config.seed,
                    poll=interrupt.poll,
                )
            if config.grpo and config.task and task and sampler and rewards:
                source: Source = GrpoSource(
                    config.grpo,
                    task,
                    sampler,
                    rewards,
                    forward,
                    long_prompts=config.task.long_prompts,
                    batch_size=config.batch_size,
                    steps=config.steps or 0,
                    seed=config.seed,
                    logged_samples=config.log.samples,
                )
            else:
                assert config.data is not None
                source = SftSource(
                    config.data,
                    task,
                    policy.tokenizer,
                    mesh,
                    batch_size=config.batch_size,
                    steps=config.steps,
                    warmup_steps=config.optimizer.warmup_steps,
                    seed=config.seed,
                )
            steps = source.steps
            optimizer, schedule = make_optimizer(config.optimizer, steps), make_schedule(config.optimizer, steps)
            train_step = make_train_step(forward, optimizer, schedule, config.seed)
            measurements = make_measurements(
                config.eval,
                config.task,
                config.data,
                config.batch_size,
                task=task,
                sampler=sampler,
                rewards=rewards,
                source=source,
                forward=forward,
                poll=interrupt.poll,
            )
            needed = source.needs_reference or policy.lora is not None or not store.steps()
            trained, frozen = policy.split(initial := policy.initial_params() if needed else None)
            reference = initial if source.needs_reference else None
            whole, fixed = partial(policy.join, frozen=frozen), reference or frozen
        check_same(source.position(), "data: the processes have different examples: give all the same data")
        with raise_everywhere():
            run_dir.write(store, config)
        heartbeat.store = store

        # Resume or begin.
        checkpoints = stack.enter_context(closing(Checkpoints(store, config.checkpoint, fixed)))
        if state := checkpoints.restore(abstract_state(policy.trained, optimizer)):
            source.seek(state.position)
        else:
            position, evaluates = source.position(), measurements.are_due(0, final=False)
            state = RunState.begin(trained, optimizer, position, source.needs_reference, evaluates)
        del initial, trained, fixed
        if is_writer():
            head = choose_head(config.head, config.model, config.rows, policy.architecture, mesh)
            print(report.start_line(mesh, policy.params, head, policy.attention, state.step), file=sys.stderr)
        log = stack.enter_context(closing(RunLog(store, state.logged_step, steps, config)))

        # The loop. Signals are noticed between two steps, and in the middle of rollouts and evaluations.
        pending = state.pending_evaluation
        finished = state.step == steps or measurements.end_early(state)
        saved_step, stopping, fatal_error = state.step, False, ""
        interrupt.hold()
        try:
            if pending:
                state, metrics, finished = measurements.measure_pending(state, whole(state.train.params), finished)
                log.write(state.step, metrics, pending.samples)
            while not (finished or stopping or fatal_error):
                watch = Stopwatch(partial(heartbeat.mark, state.step))
                try:
                    data = source.next(whole(state.train.params), state.step, watch, reference)
                except StepError as error:
                    fatal_error = str(error)
                    break
                with watch.phase("update"):
                    train_state, results = train_step(state.train, shard_batch(mesh, data.batch), frozen)
                    metrics = {**data.metrics, **{name: float(value) for name, value in results.items()}}
                watch.count_tokens(data.tokens)
                state = state.after_update(train_state, source.position(), metrics["skipped"] > 0)
                step, skipped = state.step, state.skipped_in_a_row
                if skipped:
                    path = save_batch(store, data.batch, RowShare.of_mesh(mesh), step=step, seed=config.seed)
                if skipped > config.optimizer.max_skipped:
                    fatal_error = too_many_skipped(skipped, path)
                finished = step == steps
                stopping = interrupt.agree() and source.resumable(step)
                if measurements.are_due(step, finished):
                    state = replace(state, pending_evaluation=PendingEvaluation(metrics, data.samples))
                    with watch.phase("eval"):
                        state, metrics, finished = measurements.measure_pending(
                            state, whole(state.train.params), finished
                        )
                log.write(step, metrics, data.samples)
                if finished or stopping or config.checkpoint.is_due(step):
                    with watch.phase("save"):
                        checkpoints.save(state, configs.dump(config), measurements.score(metrics))
                    saved_step = step
                log.write_timings(step, watch.timings() | checkpoints.timings(), metrics)
        except Interrupted:  # in a rollout, whose step counts as not begun, or in an evaluation, which stays pending
            finished, stopping = False, True
        # With keep_best a step whose evaluation is pending is not saved: nothing could compare it with the others.
        comparable = state.pending_evaluation is None or not config.checkpoint.keep_best
        if (stopping or fatal_error) and state.step > saved_step and source.resumable(state.step) and comparable:
            checkpoints.save(state, configs.dump(config), measurements.score(metrics))
            saved_step = state.step
        checkpoints.wait()

    if fatal_error:
        raise StepError(fatal_error + f" (saved after step {saved_step}: the same command resumes)" * (saved_step > 0))
    if stopping and not finished:
        print(f"stopped by a signal after step {saved_step}; saved: the same command resumes", file=sys.stderr)
        return interrupt.exit_code
    if is_writer():
        print(report.summary(store))
    return 0


if __name__ == "__main__":
    run_main(main)
