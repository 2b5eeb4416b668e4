"""Train Qwen2.5 by SFT or GRPO: python train.py --config qwen25_3b_grpo.yaml [key.sub=value ...]

The whole story on one page: configuration, mesh, model, source of batches, update, evaluation, checkpoint. The same
command again resumes from the newest checkpoint in run_dir and ends as a run that never stopped would have.

Several processes train one model, over the devices of all, when each gets --coordinator HOST:PORT (of process 0),
--processes and --process, or JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID in its environment, or
--cluster where JAX knows the cluster (TPU pods, Slurm, Open MPI, Kubernetes). They share run_dir.

Exit codes: 0 done, 2 something that you can mend (one line says what), 143 or 130 saved and left on SIGTERM or SIGINT.
"""

import argparse
import logging
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from mllm.config import load as configs
from mllm.config.schema import Config
from mllm.data import pipeline as data
from mllm.data import tasks
from mllm.data.batch import Batch
from mllm.data.tasks import Task
from mllm.errors import ArgumentParser, StepError, UserError
from mllm.model.load import Policy, load_policy
from mllm.model.tokenizer import encode_prompt
from mllm.parallel.mesh import make_mesh, shard_batch
from mllm.parallel.processes import ProcessGroup, RowShare, is_writer, join_cluster, local_rows, raise_everywhere
from mllm.plan.memory import plan
from mllm.rl.evaluation import evaluate
from mllm.rl.rewards import RewardRunner
from mllm.rl.sampler import Sampler
from mllm.data.sft_source import SftSource
from mllm.data.source import Source
from mllm.rl.sources import GrpoSource
from mllm.run import folder as run_dir
from mllm.run import report, storage
from mllm.run.checkpoint import Checkpoints
from mllm.run.metrics import NoLog, RunLog
from mllm.stopwatch import Stopwatch
from mllm.run.signals import Interrupt, Interrupted
from mllm.train.optimizer import make_optimizer, make_schedule
from mllm.train.step import abstract_state, init_state, make_logprob_pass, make_train_step


def main(arguments: Sequence[str] | None = None) -> int:
    parser = ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, metavar="NAME", help="a path, or a file in configs/")
    parser.add_argument("--print-config", action="store_true", help="print the resolved configuration and exit")
    parser.add_argument("--plan", action="store_true", help="say what the run will hold in memory, and exit")
    parser.add_argument("--target", metavar="SLICE", help="with --plan: of TPUs that aren't there, as in v6e:2x4")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value", help="settings that replace the file's")
    several = parser.add_argument_group("several processes")
    several.add_argument("--coordinator", metavar="HOST:PORT", help="where process 0 answers")
    several.add_argument("--processes", type=int, metavar="N", help="how many train this model")
    several.add_argument("--process", type=int, metavar="I", help="which one this is, from 0")
    several.add_argument("--cluster", action="store_true", help="find all of that by the cluster's environment")
    several.add_argument("--wait", type=int, default=300, metavar="SECONDS", help="for the others (default 300)")
    try:
        options = parser.parse_intermixed_args(arguments)
        config = configs.load(options.config, options.overrides)
        if options.print_config:
            print(configs.dump(config), end="")
            return 0
        if options.target and not options.plan:
            raise UserError("--target: is for --plan; training takes the devices at hand")
        if options.plan:
            plan(config, options.target)
            return 0
        if options.cluster:
            join_cluster(options.wait)
        elif group := ProcessGroup.find(options.coordinator, options.processes, options.process, os.environ):
            group.join(options.wait)
        return train(config)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # before training, which hears signals itself
        return 130
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        print(f"error: out of memory ({str(error).splitlines()[0]}); --plan says what would fit", file=sys.stderr)
        return 2


def train(config: Config) -> int:
    """Train until `steps` are done, the data ends, or a signal asks to stop. Returns the exit code."""
    folder = Path(config.run_dir)
    mesh = make_mesh(config.mesh)
    rows = RowShare.of_mesh(mesh)

    with ExitStack() as stack:
        interrupt = stack.enter_context(Interrupt())
        with raise_everywhere():
            run_dir.check(folder, config)
            if is_writer():
                stack.enter_context(run_dir.lock(folder))
                run_dir.check(folder, config)  # it may have been another's until now
            policy = load_policy(config, mesh)
        optimizer = make_optimizer(config.optimizer, config.steps)
        schedule = make_schedule(config.optimizer, config.steps)
        train_step = make_train_step(policy.graphdef, optimizer, schedule, config, mesh)
        with raise_everywhere():
            task = None if config.task is None else tasks.load(config.task, config.seed)
            source = make_source(config, policy, mesh, task, stack, interrupt)
            judge = make_judge(config, policy, task, rows, interrupt)
            # Before anything is written: the files of the parameters may turn out to be damaged.
            initial = None if run_dir.is_run(folder) else policy.initial_params()
        with raise_everywhere():
            if is_writer():
                run_dir.write(folder, config)

        checkpoints = stack.enter_context(closing(Checkpoints(folder / "checkpoints", config.checkpoint)))
        if restored := checkpoints.restore(abstract_state(policy.params, optimizer)):
            done, state, position = restored
            source.seek(position)
        else:
            done, state = 0, init_state(policy.initial_params() if initial is None else initial, optimizer)
            position = {**source.position(), "skipped": 0, "unjudged": {"metrics": {}, "samples": []}}
        logged = done - ("unjudged" in position)
        log = stack.enter_context(closing(RunLog(folder, logged, config.steps) if is_writer() else NoLog()))

        def save(metrics: dict[str, float]) -> None:
            log.sync()
            checkpoints.save(done, state, position, configs.dump(config), metrics)

        saved, skipped = done, position.get("skipped", 0)
        finished, leaving, hopeless = done == config.steps, False, ""
        interrupt.hold()
        try:
            unjudged = position.pop("unjudged", None)
            if unjudged and (metrics := unjudged["metrics"] | judge(state.params, done)):
                log.write(done, metrics, unjudged["samples"])
            while not (finished or leaving or hopeless):
                watch = Stopwatch()
                try:
                    drawn = source.next(state.params, done, watch)
                except StopIteration:
                    break
                except StepError as error:
                    hopeless = str(error)
                    break
                with watch.phase("update"):
                    state, results = train_step(state, shard_batch(mesh, drawn.batch))
                    metrics = {**drawn.metrics, **{name: float(value) for name, value in results.items()}}
                watch.count_tokens(drawn.tokens)
                done += 1
                dump = folder / "skipped" / f"step_{done}.npz"
                skipped = skipped + 1 if metrics["skipped"] else 0
                if skipped:
                    dump_batch(dump, drawn.batch, rows, step=done, seed=config.seed)

                finished = drawn.last or done == config.steps
                if skipped > config.optimizer.max_skipped:
                    hopeless = (
                        f"optimizer.max_skipped: the last {skipped} updates were not finite and skipped; "
                        f"the last batch is {dump}, and tools/replay.py looks into it"
                    )
                leaving = interrupt.agree() and source.resumable(done)
                position = {**source.position(), "skipped": skipped}
                if finished or due(config.eval.every if config.eval else None, done):
                    position["unjudged"] = {"metrics": metrics, "samples": drawn.samples}
                    with watch.phase("eval"):
                        metrics |= judge(state.params, done)
                    del position["unjudged"]
                log.write(done, metrics, drawn.samples)
                if finished or leaving or due(config.checkpoint.every, done):
                    with watch.phase("save"):
                        save(metrics)
                    saved = done
                log.write_timings(done, {**watch.timings(), **checkpoints.timings()}, metrics)
        except Interrupted:  # in a rollout, whose step is as if it had not begun, or in an evaluation, still to be made
            finished, leaving = False, True
        # The best is known by its evaluation: under keep_best a step is saved with it or not at all.
        whole = not (config.checkpoint.keep_best and "unjudged" in position)
        if (leaving or hopeless) and done > saved and source.resumable(done) and whole:
            save(metrics)
            saved = done
        checkpoints.wait()

    if hopeless:
        raise UserError(hopeless + (f" (saved after step {saved}: the same command resumes)" if saved else ""))
    if leaving and not finished:
        print(f"stopped by a signal after step {saved}; saved: the same command resumes", file=sys.stderr)
        return interrupt.exit_code
    if is_writer():
        print(report.summary(folder))
    return 0


def make_source(
    config: Config, policy: Policy, mesh: Mesh, task: Task | None, stack: ExitStack, interrupt: Interrupt
) -> Source:
    """What the loop draws batches from; `stack` closes what it opens."""
    rows = RowShare.of_mesh(mesh)
    place = {"seed": config.seed, "process_index": rows.index, "process_count": rows.count}
    if config.algorithm == "sft":
        assert config.data is not None
        batches = data.sft_batches(config.data, policy.tokenizer, task=task, batch_size=config.batch_size, **place)
        return SftSource(batches, rows)

    assert config.grpo is not None
    assert config.rollout is not None
    assert config.task is not None
    assert task is not None
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
        reference=policy.initial_params() if config.grpo.beta > 0 else None,
        logged_samples=config.log.samples,
        rows=rows,
        poll=interrupt.poll_alone,
    )


def make_judge(
    config: Config, policy: Policy, task: Task | None, rows: RowShare, interrupt: Interrupt
) -> Callable[[Any, int], dict[str, float]]:
    """(parameters, step) -> the metrics of an evaluation; none where the configuration asks for no evaluation.

    Raises:
        UserError: a held-out prompt is longer than `rollout.max_prompt_length`, or can't be written as a chat.
    """
    if config.eval is None or task is None:
        return lambda params, step: {}
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
    return lambda params, step: evaluate(sampler, params, examples, step=step, sampled=sampled, rows=rows)


def make_sampler(config: Config, policy: Policy, interrupt: Interrupt) -> Sampler:
    assert config.rollout is not None
    return Sampler(policy.graphdef, policy.tokenizer, policy.stop_ids, config.rollout, config.seed, interrupt.poll)


def due(every: int | None, step: int) -> bool:
    return every is not None and step % every == 0


def dump_batch(path: Path, batch: Batch, rows: RowShare, **place: int) -> None:
    """Keep the batch of an update that was skipped, and its place in the run; `tools/replay.py` looks into it."""
    fields = {name: local_rows(value) for name, value in batch._asdict().items() if value is not None}
    shares = rows.gather(fields)
    if is_writer():
        whole: dict[str, Any] = {name: np.concatenate([share[name] for share in shares]) for name in fields}
        whole |= place
        with storage.writing(path, path.parent.parent / "checkpoints"):
            path.parent.mkdir(exist_ok=True)
            np.savez(path, **whole)


if __name__ == "__main__":
    # What is imported has set the root's format already.
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s", force=True)
    sys.exit(main())
