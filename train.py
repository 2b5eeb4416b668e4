"""Train Qwen2.5, Qwen3, Qwen3.5, Llama 3, Gemma 3 and kin by SFT, GRPO, DPO or distillation:

    python train.py --config qwen25_3b_grpo.yaml [key.sub=value ...]

The same command again resumes from the newest checkpoint in run_dir, and ends as a run that was never stopped.

Several processes train one model over their devices. They share run_dir, and end together. Each process gets
--coordinator HOST:PORT (of process 0), --processes and --process. Or its environment has JAX_COORDINATOR_ADDRESS,
JAX_NUM_PROCESSES and JAX_PROCESS_ID. If JAX knows the cluster (TPU pods, Slurm, Open MPI, Kubernetes), --cluster is
enough. Exit codes:

    0            done
    1            a bug, with a traceback
    2            an error that you can mend, in one line
    75 or 134    another process was lost: start again
    143 or 130   saved and stopped by SIGTERM or SIGINT
"""

# Nothing heavy is imported here: --help, --print-config and errors in the configuration must not wait for JAX.
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from mllm.config import load as configs
from mllm.config.run import RunConfig
from mllm.errors import ArgumentParser, CommonError, StepError, UserError, command, run_main


@command
def main(arguments: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if arguments is None else arguments
    options, unknown = make_parser().parse_known_intermixed_args(words)
    if unknown:
        name, _, value = unknown[0].lstrip("-").partition("=")
        value = value or " ".join(words[words.index(unknown[0]) + 1 :][:1])
        raise UserError(f"{unknown[0]}: no option; a setting has no dashes: {name.replace('-', '_')}={value}")
    config = configs.load(options.config, options.overrides)
    if options.print_config:
        print(configs.dump(config), end="")
        return 0
    if options.target and not options.plan:
        raise UserError("--target: is for --plan; training takes the devices at hand")
    from mllm.parallel.mesh import claim_gpu_memory

    claim_gpu_memory()
    if options.plan:
        from mllm.plan.fit import fitted
        from mllm.plan.memory import plan
        from mllm.plan.targets import find_devices

        config, devices = find_devices(config, options.target)
        config, update = fitted(config, devices)
        plan(config, devices, update=update)
        return 0

    group = options.coordinator, options.processes, options.process
    if options.cluster or group != (None, None, None):
        from mllm.parallel.group import join

        join(group, config.model_dump(mode="json"), options.heartbeat)
    return train(config, options.change)


def make_parser() -> ArgumentParser:
    parser = ArgumentParser(__doc__)
    parser.add_argument("--config", required=True, metavar="NAME", help="a path, or a file in configs/")
    parser.add_argument("--print-config", action="store_true", help="print the resolved configuration and exit")
    parser.add_argument("--plan", action="store_true", help="say what the run takes: memory, disk; and exit")
    parser.add_argument("--target", metavar="SLICE", help="with --plan: for devices that aren't there: v6e:2x4, h100:8")
    parser.add_argument("--change", action="store_true", help="go on from run_dir with other settings than it has had")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value", help="settings that replace the file's")
    several = parser.add_argument_group("several processes")
    address, count, index = map(os.environ.get, ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"))
    several.add_argument("--coordinator", default=address, metavar="HOST:PORT", help="where process 0 listens")
    several.add_argument("--processes", default=count, type=int, metavar="N", help="how many train this model")
    several.add_argument("--process", default=index, type=int, metavar="I", help="which one this is, from 0")
    several.add_argument("--cluster", action="store_true", help="find what is not given in the cluster's environment")
    several.add_argument(
        "--heartbeat", type=int, default=60, metavar="SECONDS", help="of silence after which one is lost (default 60)"
    )
    return parser


def train(config: RunConfig, change: bool = False) -> int:
    """Train until `steps` are done, the data ends, or a signal asks to stop. Returns the exit code."""
    from mllm.parallel.mesh import claim_gpu_memory, shard_batch
    from mllm.parallel.processes import is_writer
    from mllm.plan.fit import fit
    from mllm.run.build import Run
    from mllm.run.metrics import summary, why_ended
    from mllm.run.signals import Interrupted
    from mllm.run.state import PendingEvaluation
    from mllm.stopwatch import Stopwatch

    claim_gpu_memory()  # again where Python calls this

    # Load and check every part: nothing is written before all of them are sound.
    with Run.build(config, change, fit) as run:
        config, source, measurements, checkpoints = run.config, run.source, run.measurements, run.checkpoints
        joined = partial(run.policy.join, frozen=run.frozen)

        # Begin, or resume from the newest checkpoint: mllm/run/build.py lists the ways to start. From here on signals
        # are noticed between two steps, and in rollouts and evaluations.
        state = run.start()
        log, pending, settings = run.log, state.pending_evaluation, config.model_dump(mode="json")
        finished = state.step == source.steps or measurements.end_early(state)
        saved_step, stopping, fatal_error = state.step, False, ""

        try:
            # Make up for the evaluation that a new run begins with, or that a kill has cut off.
            if pending:
                state, metrics, finished = measurements.measure_pending(state, joined(state.train.params), finished)
                log.write(state.step, metrics, pending.samples)

            while not (finished or stopping or fatal_error):
                watch = Stopwatch()

                # Data: SFT reads a batch; GRPO samples completions, scores them, and packs any that teach something.
                data = source.next(joined(state.train.params), state.step, watch, run.frozen_models)

                # Update: loss, gradients and optimizer in one compiled program.
                with watch.phase("update"):
                    train_state, results = run.train_step(state.train, shard_batch(run.mesh, data.batch), run.frozen)
                    metrics = {**data.metrics, **{name: float(value) for name, value in results.items()}}
                watch.count_tokens(data.tokens)
                state = state.after_update(train_state, source.position(), metrics["skipped"] > 0)
                step, skipped = state.step, state.skipped_in_a_row

                # An update that was not finite changed nothing, and too many of them end the run.
                if skipped > config.optimizer.max_skipped:
                    fatal_error = f"optimizer.max_skipped: the last {skipped} updates were not finite and skipped"
                finished = step == source.steps
                stopping = run.interrupt.agree() and source.resumable(step)

                # Evaluate if due. The step counts as done before its evaluation, so that a kill costs no update.
                if measurements.are_due(step, finished):
                    state = replace(state, pending_evaluation=PendingEvaluation(metrics, data.samples))
                    with watch.phase("eval"):
                        params = joined(state.train.params)
                        state, metrics, finished = measurements.measure_pending(state, params, finished)

                # Log, and save: the lines of a step are on disk before its checkpoint is.
                log.write(step, metrics, data.samples)
                if finished or stopping or config.checkpoint.is_due(step):
                    with watch.phase("save"):
                        checkpoints.save(state, settings, log.sync(), measurements.score(metrics))
                    saved_step = step
                log.write_timings(step, watch.timings(), metrics)
                checkpoints.check()
        except Interrupted:  # in a rollout: its step has not begun; in an evaluation: it stays pending
            finished, stopping = False, True
        except CommonError as error:  # in a rollout or evaluation: no process can go on, and all are at the same place
            fatal_error = str(error)

        # Save the newest state. With keep_best a step with a pending evaluation is not saved: it has no score to
        # compare.
        comparable = state.pending_evaluation is None or not config.checkpoint.keep_best
        if (stopping or fatal_error) and state.step > saved_step and source.resumable(state.step) and comparable:
            checkpoints.save(state, settings, log.sync(), measurements.score(metrics))
            saved_step = state.step
        checkpoints.wait()

    if fatal_error:
        raise StepError(fatal_error + f" (saved after step {saved_step}: the same command resumes)" * (saved_step > 0))
    if stopping and not finished:
        outcome = "saved: the same command resumes" if saved_step else "nothing to save: the same command begins anew"
        print(f"stopped by a signal after step {saved_step}; {outcome}", file=sys.stderr)
        return 128 + run.interrupt.received  # as a shell reports a process that a signal killed
    if is_writer():
        print(summary(run.store, why_ended(state, source.steps), run.recipe.progress))
    return 0


if __name__ == "__main__":
    run_main(main)
