"""Train Qwen2.5 by SFT or GRPO: python train.py --config qwen25_3b_grpo.yaml [key.sub=value ...]

The same command again resumes from the newest checkpoint in run_dir, and ends as a run that was never stopped.

Several processes train one model, over the devices of all, if each gets --coordinator HOST:PORT (of process 0),
--processes and --process, or JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID in its environment, or
--cluster where JAX knows the cluster (TPU pods, Slurm, Open MPI, Kubernetes). They share run_dir.

Exit codes: 0 done; 2 an error that you can mend, in one line; 143 or 130 saved and stopped by SIGTERM or SIGINT.
"""

# Nothing heavy is imported here: --help, --print-config and errors in the configuration must not wait for JAX.
import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

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

    from mllm.parallel.processes import ProcessGroup, join_cluster

    if options.cluster:
        join_cluster(options.wait)
    elif group := ProcessGroup.find(options.coordinator, options.processes, options.process, os.environ):
        group.join(options.wait)
    return train(config)


def make_parser() -> ArgumentParser:
    parser = ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, metavar="NAME", help="a path, or a file in configs/")
    parser.add_argument("--print-config", action="store_true", help="print the resolved configuration and exit")
    parser.add_argument("--plan", action="store_true", help="say what the run will hold in memory, and exit")
    parser.add_argument("--target", metavar="SLICE", help="with --plan: for TPUs that aren't there, such as v6e:2x4")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value", help="settings that replace the file's")
    several = parser.add_argument_group("several processes")
    several.add_argument("--coordinator", metavar="HOST:PORT", help="where process 0 listens")
    several.add_argument("--processes", type=int, metavar="N", help="how many train this model")
    several.add_argument("--process", type=int, metavar="I", help="which one this is, from 0")
    several.add_argument("--cluster", action="store_true", help="find all of these in the cluster's environment")
    several.add_argument("--wait", type=int, default=300, metavar="SECONDS", help="for the others (default 300)")
    return parser


def train(config: Config) -> int:
    """Train until `steps` are done, the data ends, or a signal asks to stop. Returns the exit code."""
    from mllm.data import tasks
    from mllm.model.load import load_policy
    from mllm.parallel.mesh import make_mesh, shard_batch
    from mllm.parallel.processes import RowShare, is_writer, raise_everywhere
    from mllm.run import folder as run_dir
    from mllm.run import report, skipped
    from mllm.run.checkpoint import Checkpoints
    from mllm.run.metrics import NoLog, RunLog
    from mllm.run.signals import Interrupt, Interrupted
    from mllm.run.state import PendingEvaluation, RunState, copy_on_device
    from mllm.run.storage import saved_steps
    from mllm.stopwatch import Stopwatch
    from mllm.train.optimizer import make_optimizer, make_schedule
    from mllm.train.step import abstract_state, init_state, make_train_step

    folder = Path(config.run_dir)
    mesh = make_mesh(config.mesh)
    rows = RowShare.of_mesh(mesh)

    with ExitStack() as stack:
        interrupt = stack.enter_context(Interrupt())

        # Load, and check everything before anything is written.
        with raise_everywhere():
            run_dir.check(folder, config)
            if is_writer():
                stack.enter_context(run_dir.lock(folder))
                run_dir.check(folder, config)  # another process may have held the folder until now
            policy = load_policy(config, mesh)
        optimizer = make_optimizer(config.optimizer, config.steps)
        schedule = make_schedule(config.optimizer, config.steps)
        train_step = make_train_step(policy.graphdef, optimizer, schedule, config, mesh)
        with raise_everywhere():
            task = None if config.task is None else tasks.load(config.task, config.seed)
            source = make_source(config, policy, mesh, task, stack, interrupt)
            evaluate = make_evaluation(config, policy, task, rows, interrupt)
            keeps_reference = config.grpo is not None and config.grpo.beta > 0
            begins = not saved_steps(folder / "checkpoints")
            initial = policy.initial_params() if begins or keeps_reference else None
            if keeps_reference:
                source.reference = initial
        with raise_everywhere():
            if is_writer():
                run_dir.write(folder, config)

        # Resume, or begin.
        checkpoints = stack.enter_context(closing(Checkpoints(folder / "checkpoints", config.checkpoint)))
        state = checkpoints.restore(abstract_state(policy.params, optimizer))
        if state is not None:
            source.seek(state.position)
        else:
            # The updates take over the memory of what they begin with.
            params = copy_on_device(initial) if keeps_reference else initial
            pending = None if evaluate is None else PendingEvaluation({}, [])
            state = RunState(0, init_state(params, optimizer), source.position(), pending_evaluation=pending)
        del initial
        log = stack.enter_context(closing(RunLog(folder, state.logged_step, config.steps) if is_writer() else NoLog()))

        def save(metrics: Mapping[str, Any]) -> None:
            log.sync()
            checkpoints.save(state, configs.dump(config), metrics)

        # The loop. A signal is heard between two steps, and in the middle of rollouts and evaluations.
        saved_step, finished, stopping, fatal_error = state.step, state.step == config.steps, False, ""
        interrupt.hold()
        try:
            if state.pending_evaluation is not None:
                pending = state.pending_evaluation
                log.write(state.step, pending.metrics | evaluate(state.train.params, state.step), pending.samples)
                state = replace(state, pending_evaluation=None)
            while not (finished or stopping or fatal_error):
                watch = Stopwatch()
                try:
                    data = source.next(state.train.params, state.step, watch)
                except StopIteration:
                    break
                except StepError as error:
                    fatal_error = str(error)
                    break
                with watch.phase("update"):
                    train_state, results = train_step(state.train, shard_batch(mesh, data.batch))
                    metrics = data.metrics | {name: float(value) for name, value in results.items()}
                watch.count_tokens(data.tokens)
                step = state.step + 1
                skipped_in_a_row = state.skipped_in_a_row + 1 if metrics["skipped"] else 0
                state = RunState(step, train_state, source.position(), skipped_in_a_row)

                if skipped_in_a_row:
                    path = skipped.save_batch(folder, data.batch, rows, step=step, seed=config.seed)
                if skipped_in_a_row > config.optimizer.max_skipped:
                    fatal_error = (
                        f"optimizer.max_skipped: the last {skipped_in_a_row} updates were not finite and skipped; "
                        f"the last batch is {path}, and tools/replay.py looks into it"
                    )
                finished = data.last or step == config.steps
                stopping = interrupt.agree() and source.resumable(step)
                if evaluate is not None and (finished or is_due(config.eval.every, step)):
                    state = replace(state, pending_evaluation=PendingEvaluation(metrics, data.samples))
                    with watch.phase("eval"):
                        metrics = metrics | evaluate(state.train.params, step)
                    state = replace(state, pending_evaluation=None)
                log.write(step, metrics, data.samples)
                if finished or stopping or is_due(config.checkpoint.every, step):
                    with watch.phase("save"):
                        save(metrics)
                    saved_step = step
                log.write_timings(step, watch.timings() | checkpoints.timings(), metrics)
        except Interrupted:  # in a rollout, whose step counts as not begun, or in an evaluation, which is pending
            finished, stopping = False, True
        # Under keep_best a step whose evaluation is pending is not saved: nothing would compare it with the others.
        comparable = state.pending_evaluation is None or not config.checkpoint.keep_best
        if (stopping or fatal_error) and state.step > saved_step and source.resumable(state.step) and comparable:
            save(metrics)
            saved_step = state.step
        checkpoints.wait()

    if fatal_error:
        raise UserError(
            fatal_error + (f" (saved after step {saved_step}: the same command resumes)" if saved_step else "")
        )
    if stopping and not finished:
        print(f"stopped by a signal after step {saved_step}; saved: the same command resumes", file=sys.stderr)
        return interrupt.exit_code
    if is_writer():
        print(report.summary(folder))
    return 0


def is_due(every: int | None, step: int) -> bool:
    return every is not None and step % every == 0


def make_source(config, policy, mesh, task, stack, interrupt):
    from mllm.data import pipeline as data
    from mllm.data.sft_source import SftSource
    from mllm.parallel.mesh import shard_batch
    from mllm.parallel.processes import RowShare
    from mllm.rl.grpo_source import GrpoSource
    from mllm.rl.rewards import RewardRunner
    from mllm.train.step import make_logprob_pass

    rows = RowShare.of_mesh(mesh)
    place = {"seed": config.seed, "process_index": rows.index, "process_count": rows.count}
    if config.algorithm == "sft":
        batches = data.sft_batches(config.data, policy.tokenizer, task=task, batch_size=config.batch_size, **place)
        return SftSource(batches, rows)
    prompts = data.prompt_batches(
        task,
        policy.tokenizer,
        prompts_per_step=config.batch_size // config.grpo.num_generations,
        max_prompt_length=config.rollout.max_prompt_length,
        **place,
    )
    logprob_pass = make_logprob_pass(policy.graphdef, config, mesh)
    return GrpoSource(
        config.grpo,
        config.task,
        prompts,
        make_sampler(config, policy, interrupt),
        stack.enter_context(RewardRunner(config.task, task)),
        lambda params, batch: logprob_pass(params, shard_batch(mesh, batch)),
        reference=None,
        logged_samples=config.log.samples,
        rows=rows,
        poll=interrupt.poll_alone,
    )


def make_evaluation(config, policy, task, rows, interrupt):
    from mllm.model.tokenizer import encode_prompt
    from mllm.rl.evaluation import evaluate

    if config.eval is None or task is None:
        return None
    assert config.rollout is not None
    sampler = make_sampler(config, policy, interrupt)
    examples = [task.heldout[i] for i in range(config.eval.prompts or len(task.heldout))]
    for index, example in enumerate(examples):
        length, limit = len(encode_prompt(policy.tokenizer, example.prompt)), config.rollout.max_prompt_length
        if length > limit:
            raise UserError(
                f"rollout.max_prompt_length: held-out prompt {index} of task {task.name} has {length} tokens, "
                f"and the limit is {limit}"
            )
    sampled = config.eval.sampled
    return lambda params, step: evaluate(sampler, examples, params, step, sampled=sampled, rows=rows)


def make_sampler(config, policy, interrupt):
    from mllm.rl.sampler import Sampler

    return Sampler(policy.graphdef, policy.tokenizer, policy.stop_ids, config.rollout, config.seed, interrupt.poll)


if __name__ == "__main__":
    run_main(main)
