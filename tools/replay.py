"""Looks into an update that was skipped: python tools/replay.py RUN/skipped/step_N.npz

The batch that the run kept is computed again, a row at a time, on one device, with the parameters of that moment if a
checkpoint still has them, else with those of the nearest one. The output says which rows have a loss or a gradient that
isn't finite, and in which parameters.

Exit codes: 0 everything is finite, 1 something isn't, 2 an error that one line explains.
"""

import re
import sys
import zipfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))  # a script sees only its own folder
from mllm import errors
from mllm.errors import UserError
from mllm.store.run_store import tool_run

if TYPE_CHECKING:
    from mllm.data.batch import Batch


@errors.command
def main(arguments: Sequence[str] | None = None) -> int:
    parser = errors.ArgumentParser(__doc__)
    parser.add_argument("dump", metavar="RUN/skipped/step_N.npz", help="the batch of a skipped update")
    options = parser.parse_args(arguments)
    folder, skipped, name = options.dump.rpartition("skipped/")
    if not skipped or not re.fullmatch(r"step_[0-9]+\.npz", name):
        raise UserError(f"{options.dump}: not a batch as runs keep them, in run_dir/skipped/step_N.npz")
    run = tool_run(folder.rstrip("/") or ".")
    batch, step = read(run.local(f"skipped/{name}"))
    import jax
    import jax.numpy as jnp

    from mllm.config.model import MeshConfig
    from mllm.parallel.mesh import make_mesh
    from mllm.run.checkpoint import by_name
    from mllm.run.metrics import read_records
    from mllm.run.teacher import load_teacher
    from mllm.train.step import Forward
    from tools.export import restore

    updated = [record["step"] for record in read_records(run, "metrics.jsonl") if record.get("skipped") == 0]

    def updates(checkpoint: int) -> int:
        """The number of updates between a checkpoint's parameters and those that the skipped update had."""
        first, last = sorted((checkpoint, step - 1))
        return sum(first < number <= last for number in updated)

    nearest = min(sorted(run.steps()), key=updates, default=None)
    config, policy, checkpoint, params = restore(run.url, nearest)
    between = updates(checkpoint)
    when = f"{between} updates {'earlier' if checkpoint < step else 'later'}" if between else "as they were then"
    print(f"step {step} of {run}, parameters of checkpoint {checkpoint}: {when}")

    mesh = make_mesh(MeshConfig())
    teacher = load_teacher(config, mesh, policy.tokenizer) if config.teacher_in_update else None
    forward = Forward.of(config, policy.graphdef, mesh, teacher and teacher.graphdef)
    scoring = [teacher.initial_params()] if teacher and config.teacher_in_update else []

    @jax.jit
    def examine(params: Any, row: "Batch", *teacher: Any) -> tuple[Any, Any, Any]:
        """Whether the hidden states are finite, the loss, and which gradients are finite."""
        own, frozen = policy.split(params)
        loss_of = lambda own: forward.loss(policy.join(own, frozen), row, *teacher)[0]  # noqa: E731
        loss, gradients = jax.value_and_grad(loss_of)(own)
        finite = jnp.isfinite(forward.states(params, row).hidden).all()
        return finite, loss, jax.tree.map(lambda leaf: jnp.isfinite(leaf).all(), gradients)

    broken: list[str] = []
    parameters: Counter[str] = Counter()
    for row in range(len(batch.tokens)):
        one = jax.tree.map(lambda x, row=row: jnp.asarray(x[row : row + 1]), batch)
        hidden, loss, gradients = examine(params, one, *scoring)
        names = [name for name, finite in by_name(gradients).items() if not finite]
        parameters.update(names)
        if names or not np.isfinite(loss):
            tokens = int((one.weights > 0).sum())
            broken.append(f"{row:5} {tokens:7} {'finite' if hidden else 'not finite':>14} {float(loss):12g}")
    if not broken:
        print(f"all {len(batch.tokens)} rows are finite")
        return 0
    print(f"{len(broken)} of {len(batch.tokens)} rows aren't finite:")
    print("  row  tokens  hidden states         loss", *broken, sep="\n")
    print("gradients that aren't finite, and in how many rows:")
    print(*(f"  {name}: {count}" for name, count in parameters.items()), sep="\n")
    return 1


def read(path: Path) -> tuple["Batch", int]:
    """The batch that a run has kept, and the step of its update."""
    from mllm.data.batch import Batch

    try:
        with np.load(path, allow_pickle=False) as kept:
            fields = {name: kept[name] for name in kept.files}
        return Batch(**{name: value for name, value in fields.items() if name in Batch._fields}), int(fields["step"])
    except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile, EOFError) as error:
        raise UserError(f"{path}: not a batch as runs keep them, in run_dir/skipped/step_N.npz ({error})") from None


if __name__ == "__main__":
    errors.run_main(main)
