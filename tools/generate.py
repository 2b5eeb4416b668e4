"""Completes prompts with a model or a run's newest checkpoint, by the trainer's own rollout engine.

    python tools/generate.py MODEL_OR_RUN "What is 7 times 8?"
    python tools/generate.py MODEL_OR_RUN --prompts prompts.jsonl --out completions.jsonl

MODEL_OR_RUN is a run_dir, a folder in Hugging Face's layout, or a hub id. Its chat template is applied, unless it has
learned texts. A line of prompts has a `question`, or `messages` of which the assistant's last ones are left out; a line
of the output has the `messages`, the `completion`, how many `tokens` it has, and whether it `finished` or was cut off.
Without --temperature the likeliest token is taken. On a terminal, what it would obey in a completion is escaped.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parent.parent))  # a script sees only its own folder
from mllm import errors
from mllm.data.formats import messages_of
from mllm.data.records import Origin, Record, read_records, sound_records
from mllm.errors import UserError
from tools.bench.frame import positive

if TYPE_CHECKING:
    from mllm.config.task import TaskConfig
    from mllm.model.layout import Params
    from mllm.model.load import Policy
    from mllm.rl.rollout import Completion

Chat = list[dict[str, str]]
MOST_TOKENS = 512


@errors.command
def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    chats = read_prompts(options)
    if options.out and options.out.exists():
        raise UserError(f"--out: {options.out} exists, and would be overwritten; give another name")
    policy, params, task = load(options)
    if system := options.system or (task and task.system_prompt):
        first = {"role": "system", "content": system}
        chats = [chat if chat[0]["role"] == "system" else [first, *chat] for chat in chats]
    completions = complete(options, policy, params, chats, (task and task.template_args) or {})
    if options.out is None:
        for completion in completions:
            text = completion.text
            print(errors.printable(text, keep="\n\t") if sys.stdout.isatty() else text)
        return 0
    lines = [
        {"messages": chat, "completion": one.text, "tokens": len(one.tokens), "finished": one.finished}
        for chat, one in zip(chats, completions, strict=True)
    ]
    try:
        options.out.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
    except OSError as error:
        raise UserError(f"--out: {options.out} can't be written ({error.strerror}); give another name") from None
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = errors.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL_OR_RUN", help="a run_dir, a folder, both also in a bucket, or a hub id")
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="the user's message")
    parser.add_argument("--prompts", metavar="FILE", help="JSON lines of prompts")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where JSON lines of completions are written")
    rule = "render prompts by the chat template; auto (default): unless the model has learned texts"
    parser.add_argument("--chat-template", choices=["auto", "always", "never"], default="auto", help=rule)
    parser.add_argument("--system", metavar="TEXT", help="the system's message; default: that of the run's task")
    most = f"of a completion (default {MOST_TOKENS}, if they fit)"
    parser.add_argument("--max-tokens", type=positive(int), metavar="N", help=most)
    greedy = "0 takes the likeliest token (default)"
    parser.add_argument("--temperature", type=positive(float, zero=True), default=0.0, help=greedy)
    parser.add_argument("--top-p", type=positive(float, most=1), default=1.0)
    parser.add_argument("--top-k", type=positive(int, zero=True), default=0)
    parser.add_argument("--seed", type=positive(int, zero=True), default=0)
    parser.add_argument("--slots", type=positive(int), default=64, metavar="N", help="prompts at a time (default 64)")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], help="default: bfloat16, or the run's")
    options = parser.parse_args(arguments)
    if (options.prompt is None) == (options.prompts is None):
        raise UserError("--prompts: is instead of PROMPT: give one of them")
    if options.out is not None and options.prompts is None:
        raise UserError("--out: is for --prompts; other completions are printed")
    return options


def read_prompts(options: argparse.Namespace) -> list[Chat]:
    """The chats to be completed, without the assistant's last messages; UserError where a line is not as expected."""
    if options.prompt is not None:
        return [[{"role": "user", "content": options.prompt}]]
    found = read_records(Origin("--prompts", options.prompts).records(), read_chat)
    chats = [chat for _, chat in sound_records(found, "--prompts")]
    if not chats:
        raise UserError(f"--prompts: {options.prompts} has no lines")
    return chats


def read_chat(record: Record) -> Chat:
    """The chat in a record, up to where the assistant shall speak; UserError where there is none."""
    chat = messages_of(record, needs_answer=False)
    while chat and chat[-1]["role"] == "assistant":
        chat.pop()
    if not chat:
        raise UserError("messages: nothing is left to be answered")
    return chat


def load(options: argparse.Namespace) -> "tuple[Policy, Params, TaskConfig | None]":
    """The model, its parameters and, of a run, its task."""
    from mllm.config.model import MeshConfig, ModelConfig
    from mllm.model.load import load_model
    from mllm.parallel.mesh import make_mesh
    from mllm.store.run_store import find_run
    from tools.export import restore

    mesh = make_mesh(MeshConfig())
    if find_run(options.model, "MODEL_OR_RUN") is None:
        dtype = options.dtype or "bfloat16"
        model = ModelConfig.model_validate({"source": options.model, "dtype": dtype, "param_dtype": dtype})
        policy = load_model(model, mesh, packed=False)
        return policy, policy.initial_params(), None
    config, policy, step, params = restore(options.model, None, options.dtype)
    print(f"{options.model}: step {step}", file=sys.stderr)
    return policy, params, config.task


def complete(
    options: argparse.Namespace, policy: "Policy", params: "Params", chats: Sequence[Chat], args: dict[str, Any]
) -> "list[Completion]":
    """The chats' completions; `args` are the template's. UserError where one doesn't fit the model's positions."""
    from tqdm import tqdm

    from mllm.config.grpo import RolloutConfig
    from mllm.model.tokenizer import Renderer, encode_prompt, warn_of_mismatch
    from mllm.rl.rollout import RolloutWork, Sampler

    are_texts = all(len(chat) == 1 for chat in chats)
    renderer = Renderer(policy.tokenizer, options.chat_template, args).for_prompts(policy.learned, are_texts)
    warn_of_mismatch(options.model, policy.learned, "prompts", renderer.form, "--chat-template ")
    prompts = [encode_prompt(renderer, chat) for chat in chats]
    longest, most = max(map(len, prompts)), policy.architecture.max_position_embeddings
    limit = options.max_tokens or max(1, min(MOST_TOKENS, most - longest))
    if longest + limit > most:
        raise UserError(
            f"--max-tokens: {limit} after a prompt of {longest} tokens are more than the "
            f"{most} positions of the model; at most {max(0, most - longest)} would fit"
        )
    settings: dict[str, Any] = {"max_prompt_length": longest, "max_completion_length": limit}
    if options.temperature:
        settings |= {name: getattr(options, name) for name in ("temperature", "top_p", "top_k")}
    start, work = time.monotonic(), RolloutWork()
    with tqdm(total=len(prompts), unit=" prompts", leave=False, dynamic_ncols=True, disable=None) as bar:
        result = Sampler(
            policy.graphdef,
            renderer,
            policy.stop_ids,
            RolloutConfig(**settings),
            options.seed,
            max_slots=lambda: options.slots,
            poll=lambda: bar.update(work.completions - bar.n),
            work=work,
        ).complete(params, prompts, step=0, greedy=not options.temperature)
    seconds = time.monotonic() - start
    print(f"{len(prompts)} done, {work.tokens} tokens, {work.tokens / seconds:.0f} tokens/s", file=sys.stderr)
    return result


if __name__ == "__main__":
    errors.run_main(main)
