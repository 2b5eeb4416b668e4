"""Conversations of a rollout: sends assistant turns to environments, and returns their replies as tokens.

This is the trainer's side; mllm/rewards/environments.py is the worker's side. Each process runs the conversations of
its own share, in whole groups, and receives every answer, so that all processes make the same decisions. Sampled tokens
are never encoded again. A failing environment ends its conversation without a reward.
"""

import hashlib
import json
import math
from array import array
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Event
from typing import Any

from mllm.config.rollout import RolloutConfig
from mllm.data.prompts import Prompt
from mllm.data.tasks.task import Example, prompt_hash
from mllm.data.turns import observation_tokens, opens_thought, prompt_tokens
from mllm.errors import CommonError, UserError
from mllm.model.tokenizer import Message, Renderer, stop_ids
from mllm.parallel.processes import ALL_ROWS, RowShare, gather_objects
from mllm.rewards.calls import ConversationResult, Sample
from mllm.rewards.environments import Move, Turn
from mllm.rewards.runner import RewardRunner
from mllm.rewards.scores import NOTHING, Answer, judge
from mllm.rewards.worker import TICK, Workers

Waiting = SimpleQueue[tuple[Move, Future[Answer]]]
"""Moves for a worker, each with the future for its answer."""


class RolloutLeft(Exception):
    """The rollout was left while an environment made a move."""


@dataclass
class Conversation:
    """The state of a conversation, which all processes know."""

    prompt: list[Message]
    tokens: list[int]
    sampled: list[bool] = field(default_factory=list)
    """Whether each token is in an assistant turn."""
    messages: list[Message] = field(default_factory=list)
    """The messages after the prompt. Assistant messages have `reward`, a number or None, and after tool calls
    `tool_calls` and the number of `tool_errors`."""
    finished: bool = True
    """Whether a stop token or text ended the last turn, and the conversation had room for another turn."""
    thinks: bool = False
    """Whether a thought was open before the last turn."""
    values: Mapping[str, Any] = field(default_factory=dict)
    failure: Answer | None = None

    def sample(self, example: Example) -> Sample:
        """The sample for reward functions: its text is the last turn's, its tokens are all sampled tokens."""
        tokens = array("i", [token for token, sampled in zip(self.tokens, self.sampled, strict=True) if sampled])
        return Sample(example, self.assistant[-1]["content"], tokens, not self.finished, self.thinks, self.result)

    def add(self, tokens: Sequence[int], sampled: bool) -> None:
        self.tokens += tokens
        self.sampled += [sampled] * len(tokens)

    def record(self, answer: Any) -> Turn | None:
        """The result of a move, None if it failed; its reward is added to the last assistant turn."""
        match answer:
            case (("value" | "not_applicable") as kind, reward, ("turn", *fields)):
                if kind == "value" and self.assistant:
                    self.assistant[-1]["reward"] = (self.assistant[-1]["reward"] or 0.0) + reward
                return Turn(*fields)
        self.failure = (answer[0], answer[1])
        return None

    @property
    def assistant(self) -> list[Message]:
        """The assistant's turns."""
        return [message for message in self.messages if "reward" in message]

    @property
    def result(self) -> ConversationResult:
        """The conversation's result for reward functions; the environment's reward is the sum over the turns."""
        rewards = [message["reward"] for message in self.assistant if message["reward"] is not None]
        total: Answer = judge(math.fsum(rewards)) if rewards else NOTHING
        errors = sum(message.get("tool_errors", 0) for message in self.assistant)
        return ConversationResult(self.messages, self.values, errors, self.failure or total)


class Conversations:
    """The conversations of a rollout, a context manager. All processes make the same calls in the same order.

    Call `start`, then `send` and `receive` each turn until the reply is None, then `finish`. A UserError in one process
    is raised in all processes. Exceptions of the runner's `poll` pass through.
    """

    def __init__(
        self,
        runner: RewardRunner,
        renderer: Renderer,
        options: RolloutConfig,
        seed: int,
        rows: RowShare = ALL_ROWS,
        group: int = 1,
        *,
        step: int,
        first_sequence: int = 0,
        fixed: bool = False,
    ) -> None:
        """Each `group` of consecutive conversations has the same seed, from (seed, step, first_sequence, group index).

        If `fixed`, as in evaluation, the seed depends on the problem only.
        """
        self.runner, self.renderer, self.options = runner, renderer, options
        self.rows, self.group = rows, group
        self.seeds = None if fixed else f"{seed} {step} {first_sequence}"
        self.tools = [*runner.tools] or None
        self.closing = stop_ids(renderer.tokenizer)
        self.conversations: list[Conversation] = []
        self.mine = range(0)
        self.ends: list[int] = []
        """Conversations that the trainer ended."""
        self.answers: dict[int, Future[Answer]] = {}
        self.waiting = [Waiting() for _ in runner.environments]
        self.pools = [ThreadPoolExecutor(1) for _ in runner.environments]
        self.left = Event()

    def __enter__(self) -> "Conversations":
        return self

    def __exit__(self, *exception: object) -> None:
        self.left.set()
        for pool in self.pools:
            pool.shutdown(cancel_futures=True)

    def check_left(self) -> None:
        if self.left.is_set():
            raise RolloutLeft

    def serve(self, workers: Workers, waiting: Waiting) -> None:
        """Run all moves that are queued for a process."""
        batch = [waiting.get() for _ in range(waiting.qsize())]
        try:
            moves = [move for move, _ in batch]
            answers = workers.ask(moves, self.runner.timeout, self.check_left) if batch else []
        except BaseException as error:
            workers.close()  # its process may be in the middle of a move
            for _, future in batch:
                future.set_exception(error)
        else:
            for (_, future), answer in zip(batch, answers, strict=True):
                future.set_result(answer)

    def start(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Begin all conversations; returns their prompts' token ids, with the text or messages of `reset`.

        A conversation that fails at once keeps its original prompt, and ends after its first turn.
        """
        self.conversations = [Conversation([*prompt.example.prompt], [*prompt.tokens]) for prompt in prompts]
        self.mine = range(len(prompts))[self.rows.part_of(len(prompts), self.group)]
        for number, prompt in enumerate(prompts):
            name = f"{self.seeds} {number // self.group}" if self.seeds else prompt_hash(prompt.example, fields=True)
            seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest()) >> 1
            self.move(Move(number, prompt.example, seed))
        for number, answer in self.collect(range(len(prompts))).items():
            conversation, limit = self.conversations[number], self.options.max_prompt_length
            if (turn := conversation.record(answer)) is not None:
                try:
                    if not turn.messages:
                        raise UserError("task.environment: reset left no message of the prompt")
                    tokens = prompt_tokens(self.renderer, turn.messages, self.tools)
                    if len(tokens) > limit:
                        raise UserError(f"rollout.max_prompt_length: the prompt has {len(tokens)} tokens: raise it")
                    conversation.prompt, conversation.tokens = turn.messages, tokens
                except UserError as error:
                    self.end(number, error)
            conversation.sampled = [False] * len(conversation.tokens)
        return [[*conversation.tokens] for conversation in self.conversations]

    def send(self, ended: Mapping[int, Any]) -> None:
        """Send ended turns, by conversation index, to the environments.

        A turn has the `tokens`, `text` and `finished` of a completion.
        """
        for number, turn in ended.items():
            conversation = self.conversations[number]
            conversation.thinks = opens_thought(self.renderer, conversation.tokens)
            conversation.add(turn.tokens, sampled=True)
            conversation.messages.append({"role": "assistant", "content": turn.text, "reward": None})
            conversation.finished = turn.finished
            if conversation.failure is None:
                last = len(conversation.assistant) == self.options.turns
                self.move(Move(number, completion=turn.text, thinks=conversation.thinks, last=last))

    def receive(self, sequences: Sequence[int]) -> dict[int, list[int] | None]:
        """The token ids of the replies in these conversations, None for a conversation that has ended."""
        answers = self.collect([number for number in sequences if self.conversations[number].failure is None])
        return {number: self.follow(number, answers[number]) if number in answers else None for number in sequences}

    def follow(self, number: int, answer: Any) -> list[int] | None:
        conversation, assistant = self.conversations[number], self.conversations[number].messages[-1]
        if (turn := conversation.record(answer)) is None:
            return None
        if turn.calls:
            assistant["tool_calls"] = [{"type": "function", "function": call} for call in turn.calls]
        if turn.errors:
            assistant["tool_errors"] = turn.errors
        conversation.messages += turn.messages
        conversation.values = turn.values
        if turn.done or len(conversation.assistant) == self.options.turns:
            return None
        ended = conversation.tokens[-1] in self.closing
        try:
            tokens = observation_tokens(self.renderer, turn.messages, ended, self.tools)
        except UserError as error:
            self.end(number, error)
            return None
        length = len(conversation.tokens) + len(tokens) + self.options.max_completion_length
        if length > self.options.total_length:
            conversation.finished = False
            self.end(number)
            return None
        conversation.add(tokens, sampled=False)
        return tokens

    def finish(self) -> list[Conversation]:
        """Wait until all conversations have ended, and return them."""
        if self.ends:  # the same in all processes
            for number, answer in self.collect(self.ends).items():
                conversation = self.conversations[number]
                if conversation.failure is None and (turn := conversation.record(answer)) is not None:
                    conversation.values = turn.values
        return self.conversations

    def end(self, number: int, error: UserError | None = None) -> None:
        """End a conversation; with an error it counts as failed."""
        self.conversations[number].failure = ("raised", str(error)) if error else None
        self.ends.append(number)
        self.move(Move(number))

    def move(self, move: Move) -> None:
        """Queue a move if the conversation belongs to this process; all conversations of a group use one worker."""
        if move.conversation in self.mine:
            worker = move.conversation // self.group % len(self.pools)
            self.answers[move.conversation] = Future()
            self.waiting[worker].put((move, self.answers[move.conversation]))
            self.pools[worker].submit(self.serve, self.runner.environments[worker], self.waiting[worker])

    def collect(self, numbers: Sequence[int]) -> dict[int, Any]:
        """The answers to these conversations' moves, gathered from all processes."""
        futures = {number: self.answers.pop(number) for number in numbers if number in self.answers}
        local: Any
        try:
            while wait(futures.values(), TICK).not_done:
                self.runner.poll()
            local = [(number, future.result()) for number, future in futures.items()]
        except UserError as error:
            local = str(error)
        # Gathered as text: a dict that an environment returns may look like an array to `gather_objects`.
        shares = [(index, json.loads(part)) for index, part in gather_objects((self.rows.index, json.dumps(local)))]
        for _, part in shares:
            if isinstance(part, str):
                raise CommonError(part)
        # Processes with the same share have held the same conversations: the first process's answers count.
        answers = {number: answer for _, part in reversed(shares) for number, answer in part}
        return {number: answers[number] for number in numbers}
