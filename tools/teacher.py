"""Stores a teacher's likeliest tokens of a run's data: python tools/teacher.py --config NAME --out PLACE

NAME is a configuration with `algorithm: distill`, `data` and a `teacher`. PLACE, a folder, then holds
the K likeliest tokens at each learned token of each of the data's documents, and the same configuration learns from it
without a teacher in memory: distill.teacher_logprobs=PLACE teacher=null. The same command goes on where it was stopped.
"""

import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parent.parent))  # a script sees only its own folder
from mllm import errors
from mllm.config import load as configs
from mllm.errors import UserError
from mllm.store.bucket import is_bucket
from mllm.store.folder import failing, write_file

if TYPE_CHECKING:
    from mllm.config.schema import Config
    from mllm.data.teacher_lists import Lists
    from mllm.data.tokenizing import Documents


@errors.command
def main(arguments: Sequence[str] | None = None) -> int:
    parser = errors.ArgumentParser(__doc__)
    parser.add_argument("--config", required=True, metavar="NAME", help="a path, or a file in configs/")
    parser.add_argument("--top-k", type=int, default=64, metavar="K", help="tokens of each place (default 64)")
    parser.add_argument("--out", required=True, metavar="PLACE", help="a folder")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value", help="settings that replace the file's")
    options = parser.parse_intermixed_args(arguments)
    config = configs.load(options.config, options.overrides)
    if config.teacher is None or config.data is None or config.data.source == "task":
        way_out = "give one with algorithm: distill, a teacher, and data of files or the hub"
        raise UserError(f"--config: {options.config}: {way_out}")
    if is_bucket(options.out):
        raise UserError(f"--out: {options.out}: give a folder of this machine; a bucket may get a copy of it")
    from tqdm import tqdm

    from mllm.data import teacher_lists
    from mllm.data.sft_source import load_documents
    from mllm.model.tokenizer import Renderer
    from mllm.parallel.mesh import make_mesh
    from mllm.run.checkpoint import by_name
    from mllm.run.source_run import load_policy
    from mllm.run.teacher import load_teacher, pin_teacher
    from mllm.store.checksum import checksums

    config, mesh = pin_teacher(config), make_mesh(config.mesh)
    student = load_policy(config, mesh)
    vocabulary = student.architecture.vocab_size
    if not 1 <= options.top_k <= vocabulary:
        raise UserError(f"--top-k: {options.top_k}: give a number from 1 to {vocabulary}, the student's vocabulary")
    teacher = load_teacher(config, mesh, student.tokenizer)
    assert teacher is not None
    assert config.teacher is not None
    assert config.data is not None
    documents, _ = load_documents(config.data, Renderer(student.tokenizer, config.chat_template), None)
    out = Path(options.out).expanduser()
    params = teacher.initial_params()
    sums = hashlib.sha256(json.dumps(checksums(by_name(params))).encode()).hexdigest()
    summary = teacher_lists.summarize(documents, options.top_k, config.teacher.source, sums)
    found = teacher_lists.read_summary(out, "--out")
    if found not in (None, summary):
        odd = [name for name in summary if found.get(name) != summary[name]]
        raise UserError(f"--out: {out} is of another {' and '.join(odd)}: give another place")
    with failing(out, "written"):
        out.mkdir(parents=True, exist_ok=True)
        write_file(out / teacher_lists.SUMMARY, json.dumps(summary).encode())
    lists = make_lists(config, student, teacher, params, documents, options.top_k, mesh)
    for number, name in enumerate(tqdm(teacher_lists.names_of(summary), "scoring", unit=" files", disable=None)):
        if not (out / name).exists():
            first = number * teacher_lists.DOCUMENTS
            last = min(first + teacher_lists.DOCUMENTS, len(documents))
            with failing(out, "written"):
                teacher_lists.write_lists(out / name, lists(range(first, last)))
    tokens = sum(int(learned) for _, learned in documents.sizes)
    print(f"{len(documents):,} documents, {options.top_k} tokens at each of {tokens:,} learned ones: {out}")
    return 0


def make_lists(
    config: "Config", student: Any, teacher: Any, params: Any, documents: "Documents", top_k: int, mesh: Any
) -> Any:
    """The function from a range of documents to their lists, a micro-batch at a time."""
    import jax
    import numpy as np

    from mllm.data.sft_source import SftBatches
    from mllm.parallel.mesh import shard_batch
    from mllm.train.step import Forward

    assert config.data is not None
    forward = Forward.of(config.model_copy(update={"grpo": None}), student.graphdef, mesh, teacher.graphdef)
    batches = SftBatches(config.data, documents, forward.rows.micro)

    @jax.jit
    def likeliest(params: Any, batch: Any) -> Any:
        assert forward.teacher is not None
        states, shared = forward.teacher.states(params, batch), student.architecture.vocab_size
        return forward.head.top_k(states, top_k, batch.weights > 0, shared)

    def lists(indices: range) -> Iterator["Lists"]:
        while indices:
            plan = batches.plan(indices)
            batch = batches.make(plan)
            logprobs, ids = map(np.asarray, likeliest(params, shard_batch(mesh, batch)))
            seen = dict.fromkeys(range(len(batch.tokens)), 0)
            for _, row in plan:
                seen[row] += 1
                learned = (batch.segments[row] == seen[row]) & (batch.weights[row] > 0)
                yield ids[row][learned], logprobs[row][learned]
            indices = indices[len(plan) :]

    return lists


if __name__ == "__main__":
    errors.run_main(main)
