"""Completes prompts with a model or a run's newest checkpoint, by the trainer's own rollout engine.

    python tools/generate.py MODEL_OR_RUN "What is 7 times 8?" "And 6 times 7?"
    python tools/generate.py MODEL_OR_RUN                     a chat on the terminal, until an empty line
    python tools/generate.py MODEL_OR_RUN < question.txt
    python tools/generate.py MODEL_OR_RUN --prompts prompts.jsonl --out completions.jsonl
    python tools/generate.py RUN "game 1" --environment task

MODEL_OR_RUN is a run_dir, a folder in Hugging Face's layout or PEFT's, or a hub id. Its chat template is applied,
unless it has learned texts. A line of prompts has a `question`, a `prompt`, or `messages`, without the
assistant's last messages. A line of the output has the `messages`, the `completion`, its number of `tokens`, and
whether it `finished` or was cut off. With --environment an environment answers, and a line has the `messages` of its
prompt, the `turns` and the sum of their rewards, `reward`. Without --temperature the likeliest token is taken. A
completion's control characters are escaped on a terminal.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parent.parent))  # a script sees only its own folder
from mllm import errors
from mllm.config.section import LARGEST_NUMBER
from mllm.data.formats import messages_of, text, turns
from mllm.data.records import Origin, Record, read_records, sound_records
from mllm.errors import UserError
from tools.bench.frame import positive

if TYPE_CHECKING:
    from mllm.config.run import RunConfig
    from mllm.config.task import TaskConfig
    from mllm.model.layout import Params
    from mllm.model.load import Policy
    from mllm.sampler.sampler import Sampler

Chat = list[dict[str, str]]
Answer = tuple[str, dict[str, Any]]
"""The text of a completion to be printed, and the line of the output."""
MOST_TOKENS, TURNS, SLOTS = 512, 8, 64


@dataclass(frozen=True)
class Model:
    policy: "Policy"
    params: "Params"
    name: str
    run: "RunConfig | None" = None
    """The configuration of a run."""

    @property
    def task(self) -> "TaskConfig | None":
        """The task of a run."""
        return self.run.task if self.run else None


@errors.command
def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if not options.prompt and not options.prompts and sys.stdin.isatty():
        return chat_on_terminal(options)
    chats = [chat for chat in read_prompts(options) for _ in range(options.n)]
    if options.out and options.out.exists():
        raise UserError(f"--out: {options.out} exists, and would be overwritten; give another name")
    model = load(options)
    first = system_message(options, model)
    chats = [chat if chat[0]["role"] == "system" else [*first, *chat] for chat in chats]
    answers = complete(options, model, chats)
    if options.out is None:
        for chat, (shown, _) in zip(chats, answers, strict=True):
            if len(chats) > 1:
                print(errors.printable(f"> {chat[-1]['content']}"), file=sys.stderr, flush=True)
            print(errors.printable(shown, keep="\n\t") if sys.stdout.isatty() else shown, flush=True)
        return 0
    try:
        options.out.write_text("".join(f"{json.dumps(line, ensure_ascii=False)}\n" for _, line in answers), "utf-8")
    except OSError as error:
        raise UserError(f"--out: {options.out} can't be written ({error.strerror}); give another name") from None
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = errors.ArgumentParser(__doc__)
    add = parser.add_argument
    add("model", metavar="MODEL_OR_RUN", help="a run_dir, a folder, both also in a bucket, or a hub id")
    add("prompt", nargs="*", metavar="PROMPT", help="a user's message; default: what is on stdin, a chat on a terminal")
    add("--prompts", metavar="FILE", help="JSON lines of prompts")
    add("--out", type=Path, metavar="FILE", help="where JSON lines of completions are written")
    add("--step", type=positive(int), metavar="N", help="a run's checkpoint; default: the newest")
    add("--dtype", choices=["bfloat16", "float32"], help="default: bfloat16, or the run's")
    rule = "render prompts by the chat template; auto (default): unless the model has learned texts"
    add("--chat-template", choices=["auto", "always", "never"], default="auto", help=rule)
    add("--system", metavar="TEXT", help="the system's message; default: that of the run's task")
    add("--stop", action="append", default=[], metavar="TEXT", help="ends a completion; repeatable")
    most = f"of a completion (default {MOST_TOKENS}, if they fit; of a turn as in the run)"
    add("--max-tokens", type=positive(int), metavar="N", help=most)
    add("--n", type=positive(int), default=1, metavar="N", help="completions of each prompt")
    greedy = "0 takes the likeliest token (default)"
    add("--temperature", type=positive(float, zero=True), default=0.0, help=greedy)
    add("--seed", type=positive(int, zero=True, most=LARGEST_NUMBER), default=0)
    meaning = "what answers, package.module:Class; task: what the run's task has"
    add("--environment", metavar="NAME", help=meaning)
    most = f"with --environment (default as in the run, or {TURNS})"
    add("--max-turns", type=positive(int), metavar="N", help=most)
    options = parser.parse_intermixed_args(arguments)
    if options.prompt and options.prompts:
        raise UserError("--prompts: is instead of PROMPT: give one of them")
    return options


def system_message(options: argparse.Namespace, model: Model) -> Chat:
    system = options.system or (model.task and model.task.system_prompt)
    return [{"role": "system", "content": system}] if system else []


def chat_on_terminal(options: argparse.Namespace) -> int:
    """Answer each typed line in the conversation so far, until an empty line or the end of the input."""
    model, quiet = load(options), False
    chat = system_message(options, model)
    while True:
        print("> ", end="", file=sys.stderr, flush=True)
        if not (line := sys.stdin.readline().rstrip("\n")):
            return 0
        chat.append({"role": "user", "content": text({"PROMPT": line}, "PROMPT")})
        ((shown, _),) = complete(options, model, [chat], quiet)
        print(errors.printable(shown, keep="\n\t"), flush=True)
        chat.append({"role": "assistant", "content": shown})
        quiet = True


def read_prompts(options: argparse.Namespace) -> list[Chat]:
    """The chats to be completed, without the assistant's last messages; UserError where a line is not as expected."""
    if options.prompts is None:
        prompts = options.prompt or [sys.stdin.read().rstrip("\n")]
        return [[{"role": "user", "content": text({"PROMPT": prompt}, "PROMPT")}] for prompt in prompts]
    records = read_records(Origin("--prompts", options.prompts).records(), read_chat)
    chats = [chat for _, chat in sound_records(records, "--prompts")]
    if not chats:
        raise UserError(f"--prompts: {options.prompts} has no lines")
    return chats


def read_chat(record: Record) -> Chat:
    """The chat in a record, up to the assistant's next turn; UserError if the record has no chat."""
    if isinstance(record.get("prompt"), str):
        record = {"question": text(record, "prompt")}
    chat = turns(record, "prompt") if "prompt" in record else messages_of(record, needs_answer=False)
    while chat and chat[-1]["role"] == "assistant":
        chat.pop()
    if not chat:
        raise UserError("messages: nothing is left to be answered")
    return chat


def load(options: argparse.Namespace) -> Model:
    from mllm.config.model import MeshConfig, ModelConfig
    from mllm.model import peft
    from mllm.model.folder import SMALL, local_folder, read_json
    from mllm.model.load import load_model
    from mllm.parallel.mesh import make_mesh
    from mllm.run.compiling import keep_programs
    from mllm.run.store import find_run
    from tools.export import restore

    dtype = options.dtype or "bfloat16"
    keep_programs()
    if find_run(options.model, "MODEL_OR_RUN") is not None:
        config, policy, step, params = restore(options.model, options.step, options.dtype)
        return Model(policy, params, f"step {step}", config)
    if options.step is not None:
        raise UserError(f"--step: {options.model} is no run, which alone has checkpoints: leave it out")
    model, name = {"source": options.model, "param_dtype": dtype}, "the model"
    if (adapter := Path(options.model).expanduser() / peft.CONFIG).is_file():
        base = read_json(adapter).get("base_model_name_or_path")
        if not isinstance(base, str):
            raise UserError(f"{adapter}: base_model_name_or_path names no model: add the adapters' base model")
        local_folder(base, SMALL, f"{adapter}: base_model_name_or_path", "export it (tools/export.py RUN)")
        model, name = {"source": base, "lora": {"source": options.model}}, f"adapters of {base}"
    local_folder(options.model, SMALL, "MODEL_OR_RUN", "the folder of a run")
    mesh = make_mesh(MeshConfig(fsdp=1))
    policy = load_model(ModelConfig.model_validate({**model, "dtype": dtype}), mesh, packed=False)
    return Model(policy, policy.initial_params(), name)


def complete(options: argparse.Namespace, model: Model, chats: list[Chat], quiet: bool = False) -> list[Answer]:
    """The chats' completions. UserError if a chat doesn't fit the model's positions.

    Unless it is to be `quiet`, a line says how prompts are rendered.
    """
    from mllm.config.rollout import RolloutConfig
    from mllm.model.tokenizer import Renderer, encode, encode_prompt, warn_of_mismatch
    from mllm.sampler.completion import RolloutWork
    from mllm.sampler.sampler import Sampler
    from mllm.sampler.schedule import DecodeLimits
    from mllm.stopwatch import COMPILING

    policy, are_texts = model.policy, not options.environment and all(len(chat) == 1 for chat in chats)
    args = (model.task and model.task.template_args) or {}
    renderer = Renderer(policy.tokenizer, options.chat_template, args).for_prompts(policy.learned, are_texts)
    form = "rendered by the chat template" if renderer.form == "chats" else "texts, without the chat template"
    if not quiet:
        print(f"{options.model}: {model.name}; prompts are {form}", file=sys.stderr)
        warn_of_mismatch(options.model, policy.learned, "prompts", renderer.form, "--chat-template ")
    prompts = [encode_prompt(renderer, chat) for chat in chats]
    longest, most = max(map(len, prompts)), policy.architecture.max_position_embeddings
    plays = model.run and options.environment and model.run.rollout
    turns = options.max_turns or (plays.turns if plays else TURNS) if options.environment else 1
    # As `RolloutConfig.total_length`: a conversation has room for a reply of this size after each turn but the last.
    of_turn = plays.max_completion_length if plays else min(MOST_TOKENS, (most - longest) // (2 * turns - 1))
    limit = options.max_tokens or max(1, min(of_turn, most - longest))
    if longest + limit > most:
        fault = f"{limit} after a prompt of {longest} tokens are more than the {most} positions of the model"
        raise UserError(f"--max-tokens: {fault}; at most {max(0, most - longest)} would fit")
    settings: dict[str, Any] = {"max_prompt_length": longest, "max_completion_length": limit}
    if options.environment:  # which may add to the prompt
        settings["max_prompt_length"] = most - limit
        settings |= {"max_turns": turns, "max_total_length": most} if turns > 1 else {}
    stops = [ids[0] for stop in options.stop if len(ids := encode(policy.tokenizer, stop)) == 1]
    start, work = time.monotonic() - COMPILING.seconds, RolloutWork()
    sampler = Sampler(
        policy.graphdef,
        renderer,
        (*policy.stop_ids, *stops),
        RolloutConfig(temperature=options.temperature or 1.0, **settings),
        options.seed,
        room=lambda: DecodeLimits(SLOTS),
        work=work,
        stop_texts=(*policy.stop_texts, *options.stop),
    )
    if options.environment:
        result = converse(options, model, sampler, chats, prompts)
    else:
        made = sampler.complete(model.params, prompts, step=0, greedy=not options.temperature)
        result = [
            (one.text, {"messages": chat, "completion": one.text, "tokens": len(one.tokens), "finished": one.finished})
            for chat, one in zip(chats, made, strict=True)
        ]
    if len(prompts) > 1:
        speed = work.tokens / (time.monotonic() - COMPILING.seconds - start)
        print(f"{len(prompts)} done, {work.tokens} tokens, {speed:.0f} tokens/s", file=sys.stderr)
    return result


def converse(
    options: argparse.Namespace, model: Model, sampler: "Sampler", chats: list[Chat], prompts: list[list[int]]
) -> list[Answer]:
    """The chats, with turns between the model and an environment; UserError for an unknown environment."""
    from mllm.config.places import add_modules
    from mllm.config.task import TaskConfig
    from mllm.data.prompts import Prompt
    from mllm.data.tasks.task import Example, Task
    from mllm.rewards.runner import RewardRunner
    from mllm.sampler.conversations import Conversations

    task = model.task
    if options.environment != "task":
        task = TaskConfig(name="arithmetic").model_copy(update={"environment": options.environment})
    elif task is None or not task.converses:
        raise UserError("--environment: task: this is no run of a task with an environment or tools: name one")
    add_modules(Path())
    starts = [Example(chat, None, conversational=sum(turn["role"] != "system" for turn in chat) > 1) for chat in chats]
    alone = task.model_copy(update={"rewards": ()})
    with (
        RewardRunner(alone, Task("", starts, []), sampler.options.sampled_length) as runner,
        Conversations(runner, sampler.renderer, sampler.options, options.seed, step=0) as talk,
    ):
        started = talk.start([Prompt(start, tokens) for start, tokens in zip(starts, prompts, strict=True)])
        sampler.complete(model.params, started, step=0, greedy=not options.temperature, conversations=talk)
        played = talk.finish()
    answers = []
    for game in played:
        kind, reward, *_ = game.result.reward
        reported = reward if kind == "value" else f"{kind} {reward}"
        shown = [f"{message['role']}: {message['content']}" for message in game.messages] + [f"reward: {reported}"]
        line = {"messages": game.prompt, "turns": game.messages, "reward": reward if kind == "value" else None}
        answers.append(("\n".join(shown), line | {"tokens": sum(game.sampled), "finished": game.finished}))
    return answers


if __name__ == "__main__":
    errors.run_main(main)
