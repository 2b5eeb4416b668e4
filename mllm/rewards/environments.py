"""Runs users' environments and tools in a reward process; docs/environments.md describes them.

An environment is an object of a class with tools (TRL's `environment_factory`) or with `step`. A process holds many
environments, one for each conversation. A `Player` is called like a reward function, with moves in place of samples:
calls.py counts its failures and awaits its coroutines. This module must not import JAX.
"""

import asyncio
import inspect
import json
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from types import FrameType
from typing import Any, NamedTuple

from mllm import strict_json
from mllm.data.tasks.task import Example
from mllm.data.turns import failed_call, tool_calls, tool_schemas
from mllm.errors import UserError
from mllm.rewards.calls import Notes, file_of, judge
from mllm.rewards.functions import imported
from mllm.strict_json import whole_characters

NO_TOOLS = ("reset", "get_reward", "close")
"""Public methods of an environment that are no tools."""
Messages = list[dict[str, Any]]
Tools = Mapping[str, Callable[..., Any]]


class Move(NamedTuple):
    """A request to a conversation's environment."""

    conversation: int
    example: Example | None = None
    """The problem that begins the conversation."""
    seed: int = 0
    completion: str | None = None
    """The assistant's turn. Without `example` and `completion` the conversation ends."""
    thinks: bool = False
    """Whether the prompt has opened a thought (`<think>`)."""
    last: bool = False
    """Whether this turn is the last."""
    trial: bool = False
    """Whether the conversation ends as soon as it has begun, without a reward."""


class Turn(NamedTuple):
    """The result of a move, apart from its reward."""

    messages: Messages
    """The new messages; for the first move the prompt."""
    done: bool = False
    calls: Sequence[Mapping[str, Any]] = ()
    """The assistant's tool calls, each a name and arguments."""
    errors: int = 0
    """The number of calls that did not parse, named no tool, or raised."""
    values: Mapping[str, Any] = {}
    """At the end of a conversation, the environment's public attributes that strict JSON can hold."""


class Player:
    """Holds the conversations of a process. A call with a move returns the reward, and logs the `Turn` in `notes`."""

    batched = False

    def __init__(self, environment: str | None, tools: Sequence[str], seconds: float) -> None:
        """`seconds` is the time limit of a move. UserError if an import fails or `environment` is not a class."""
        self.seconds = seconds
        self.make: Callable[..., Any] = object
        cls: Any = object
        if environment:
            self.make = cls = imported("task.environment", environment)
            if not isinstance(cls, type):
                raise UserError(f"task.environment: {environment} is not a class")
        functions = [imported("task.tools", name) for name in tools]
        public = [name for name, _ in inspect.getmembers(cls, inspect.isroutine) if not name.startswith("_")]
        step = getattr(cls, "step", None)
        self.has_step = step is not None and inspect.signature(step).return_annotation not in (str, "str")
        self.methods = [] if self.has_step else [name for name in public if name not in NO_TOOLS]
        every = [*functions, *(getattr(cls, name) for name in public)]
        self.kind = "async" if any(map(inspect.iscoroutinefunction, every)) else "played"
        described = [*functions, *(getattr(cls, name) for name in self.methods)]
        try:
            self.tools = tool_schemas(described) if described else []
        except UserError as error:
            raise UserError(f"{'task.environment' if self.methods else 'task.tools'}: {error}") from None
        self.functions = {function.__name__: function for function in functions}
        self.file = file_of(cls if environment else functions[0])
        """The source file. Error messages quote its lines."""
        names = [function.__name__ for function in described]
        if twice := [name for name in names if names.count(name) > 1]:
            raise UserError(f"task.tools: two tools are named {twice[0]}: rename one")
        self.episodes: dict[int, tuple[Any, Messages]] = {}
        """The environment and the messages of each conversation."""
        self.run = asyncio.Runner().run  # one event loop for all moves, since environments may hold its objects

    def __call__(self, moves: Sequence[Move], notes: Notes) -> Any:
        playing = self.play(moves[0], notes)
        if self.kind == "async":
            return playing
        try:
            signal.signal(signal.SIGALRM, self.interrupt)
            signal.setitimer(signal.ITIMER_REAL, self.seconds, self.seconds)  # again where it is swallowed
            playing.send(None)
        except StopIteration as ended:
            return ended.value
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        raise TypeError("only methods that are `async def` may return something to be awaited")

    def interrupt(self, number: int, frame: FrameType | None) -> None:
        raise asyncio.CancelledError(f"took longer than {self.seconds:g} s")

    async def play(self, move: Move, notes: Notes) -> Any:
        """The reward of a move; a failing environment is closed."""
        number = move.conversation
        try:
            if move.example:
                await self.close(number)  # an interrupted rollout has left it
                turn, reward = await self.begin(move, move.example), None
            elif number not in self.episodes:
                raise LookupError("its environment was lost with its process")
            else:
                turn, reward = await self.take_turn(move, *self.episodes[number])
            try:
                strict_json.dump([[*turn]])  # nested as deep as in the message to the trainer
            except ValueError as error:
                raise ValueError(f"what it said and its values can't be sent: {error}") from None
            if turn.done or move.trial or judge(reward)[0] == "not_a_number":
                await self.close(number)
        except BaseException:
            with suppress(Exception):
                await self.close(number)
            raise
        notes.rows[0].append(("turn", *turn))
        return reward

    async def begin(self, move: Move, example: Example) -> Turn:
        """The prompt, with the text or messages that `reset` returns."""
        example = deepcopy(example)  # a group's conversations share it
        prompt = example.prompt if example.conversational else example.question
        fields = {"prompt": prompt, "answer": example.answer, "solution": example.solution}
        row = {name: value for name, value in fields.items() if value is not None} | dict(example.fields)
        environment, messages = self.make(), list(example.prompt)
        self.episodes[move.conversation] = environment, messages
        observation = None
        if reset := getattr(environment, "reset", None):
            further = {"seed": move.seed, "row": row, "messages": messages}
            observation = await settled(reset(**accepted(reset, row, further)))
        if isinstance(observation, str):
            messages[-1] = messages[-1] | {"content": messages[-1]["content"] + observation}
        elif observation is not None:
            messages[:] = as_messages(observation)
        if move.trial:
            self.check_methods(environment)
        return Turn([*messages])

    def check_methods(self, environment: Any) -> None:
        """Raise TypeError where a method can't be called as it will be."""
        calls = {"step": ("",)} if self.has_step else {}
        for name, arguments in {**calls, "get_reward": (), "close": ()}.items():
            method = getattr(environment, name, None)
            try:
                with suppress(ValueError):  # Python can't tell the arguments of some methods
                    _ = method and inspect.signature(method).bind(*arguments)
            except TypeError as error:
                raise TypeError(f"{name}: {error}") from None

    async def take_turn(self, move: Move, environment: Any, messages: Messages) -> tuple[Turn, Any]:
        """The results of the turn's tool calls, or else the environment's observation, or the end; and the reward."""
        calls: list[tuple[str, dict[str, Any]]] = []
        replies, errors, reward, done = Messages(), 0, None, move.completion is None
        if move.completion is not None:
            messages.append({"role": "assistant", "content": move.completion})
            tools = self.functions | {name: getattr(environment, name) for name in self.methods}
            for parsed in tool_calls("<think>" * move.thinks + move.completion, self.tools) if tools else []:
                if isinstance(parsed, ValueError):
                    replies.append({"role": "tool", "content": failed_call(parsed)})
                    errors += 1
                    continue
                calls.append(parsed)
                content, failed = await answer_call(tools, *parsed)
                replies.append({"role": "tool", "name": parsed[0], "content": content})
                errors += failed
            if not replies and self.has_step:
                observation, reward, done = outcome(await call(environment, "step", move.completion))
                replies = [] if observation is None else as_messages(observation)
                if not (replies or done):
                    raise TypeError("it is not done, and there is no observation")
            messages += replies
            done = done or not replies or move.last
        if done:
            final = await call(environment, "get_reward")
            reward = final if reward is None else reward if final is None else reward + final
        named = [{"name": name, "arguments": arguments} for name, arguments in calls]
        return Turn(replies, done, named, errors, public_values(environment) if done else {}), reward

    async def close(self, conversation: int) -> None:
        """Close the conversation's environment, if it has one."""
        environment, _ = self.episodes.pop(conversation, (None, None))
        await call(environment, "close")


def players(environment: str | None, tools: Sequence[str], seconds: float) -> list[Player]:
    """The functions of a process of `Workers`: one `Player`."""
    return [Player(environment, tools, seconds)]


async def call(environment: Any, name: str, *args: Any) -> Any:
    """The result of the method; None where there is no such method."""
    method = getattr(environment, name, None)
    return None if method is None else await settled(method(*args))


async def settled(returned: Any) -> Any:
    return await returned if inspect.isawaitable(returned) else returned


async def answer_call(tools: Tools, name: str, arguments: Mapping[str, Any]) -> tuple[str, bool]:
    """A tool's result or error as a text, and whether the tool raised."""
    try:
        if name not in tools:
            raise LookupError(f"there is no tool {name}; there are {', '.join(tools)}")
        return whole_characters(str(await settled(tools[name](**deepcopy(arguments))))), False
    except (Exception, SystemExit) as error:  # code that the assistant wrote may exit
        return failed_call(error), True


def accepted(function: Callable[..., Any], row: Mapping[str, Any], further: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that a function accepts; `further` arguments only if it declares them."""
    parameters = inspect.signature(function).parameters.values()
    names = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    named = {name: value for name, value in {**row, **further}.items() if name in names}
    return {**row, **named} if any(p.kind == p.VAR_KEYWORD for p in parameters) else named


def public_values(environment: Any) -> dict[str, Any]:
    values = {}
    for name, value in getattr(environment, "__dict__", {}).items():
        with suppress(TypeError, ValueError, RecursionError):
            if not name.startswith("_"):
                values[name] = strict_json.load(json.dumps(value))
    return values


def outcome(returned: Any) -> tuple[Any, Any, bool]:
    """(observation, reward, done) from `step`'s result; TypeError for any other result."""
    if isinstance(returned, tuple | list) and len(returned) in (3, 4) and not isinstance(returned[2], str):
        observation, reward, done = returned[:3]
        return observation, reward, bool(done)
    raise TypeError(f"expected observation, reward and done, got {returned!r:.100}")


def as_messages(observation: Any) -> Messages:
    """An observation as messages; a text becomes a user message. TypeError if it is neither a text nor messages."""
    messages = [{"role": "user", "content": observation}] if isinstance(observation, str) else observation
    if not isinstance(messages, list) or not all(
        isinstance(message, dict) and isinstance(message.get("role"), str) and isinstance(message.get("content"), str)
        for message in messages
    ):
        raise TypeError(f"expected a text or messages, got {observation!r:.100}")
    return [{"role": message["role"], "content": whole_characters(message["content"])} for message in messages]
