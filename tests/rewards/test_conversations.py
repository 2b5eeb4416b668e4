"""Conversations of a rollout: exact tokens, limits, failures that lose nothing else, several processes."""

import re
from array import array
from contextlib import contextmanager
from itertools import chain
from types import SimpleNamespace

import numpy as np
import pytest
from rollouts import BYTES, RandomCompletions, SquareRewards

from mllm.config.rollout import RolloutConfig
from mllm.config.task import EvalConfig, TaskConfig
from mllm.data.prompts import Prompt
from mllm.data.tasks.task import Example, Task
from mllm.errors import StepError, UserError
from mllm.model.tokenizer import Renderer, bytes_tokenizer, encode_prompt
from mllm.parallel.processes import ALL_ROWS
from mllm.rewards.runner import RewardRunner
from mllm.run.evaluation import make_evaluation
from mllm.sampler.conversations import Conversation, Conversations
from mllm.sampler.sampler import Completion, Sampler
from mllm.sampler.trajectories import completion_metrics, group_rewards, sample_line, sample_trajectories
from mllm.stopwatch import Stopwatch

RENDERER = Renderer(BYTES, "always")
START, END = 257, 258
"""The ids at the start and the end of each message in the bytes' template."""


def prompt(text="Go.", **fields) -> Prompt:
    example = Example([{"role": "user", "content": text}], "7", fields=fields, conversational=True)
    return Prompt(example, encode_prompt(RENDERER, example.prompt))


def options(**settings) -> RolloutConfig:
    return RolloutConfig(**{"max_prompt_length": 40, "max_completion_length": 60, "max_turns": 3, **settings})


def task(environment, **settings) -> TaskConfig:
    name = environment and f"own_environments:{environment}"
    return TaskConfig.model_validate({"name": "arithmetic", "environment": name, **settings})


@contextmanager
def opened(environment="Guess", group=1, **settings):
    """Makes the conversations of a rollout, one after the other, with the same processes."""
    with RewardRunner(task(environment, **settings), Task("", [prompt().example], []), 60) as runner:

        def talk(step=0, first_sequence=0, fixed=False, **limits):
            where = {"step": step, "first_sequence": first_sequence, "fixed": fixed}
            return Conversations(runner, RENDERER, options(**limits), 0, ALL_ROWS, group, **where)

        yield talk


@pytest.fixture(scope="module")
def guess():
    with opened(group=4) as made:
        yield made


def turn(text, finished=True):
    return SimpleNamespace(tokens=[*text.encode(), *[END] * finished], text=text, finished=finished)


def play(talk, prompts, says):
    """Acts as the engine: conversation i says says[i], one text a turn, and the last text again and again."""
    with talk:
        talk.start(prompts)
        live, round = [*range(len(prompts))], 0
        while live:
            talk.send({i: turn(says[i][min(round, len(says[i]) - 1)]) for i in live})
            observations = talk.receive(live)
            assert [*observations] == live
            live, round = [i for i in live if observations[i] is not None], round + 1
        return talk.finish()


def call(arguments):
    return f'<tool_call>{{"name": "double", "arguments": {arguments}}}</tool_call>'


def rendered(*texts):
    return [token for text in texts for token in (START, *text.encode(), END)]


def test_a_conversation_is_samples_and_the_template_between(guess):
    with guess() as talk:
        (first,) = talk.start([prompt("Guess.")])
        assert first == [*rendered("Guess. Up to 9."), START]
        talk.send({0: turn("0")})
        assert talk.receive([0]) == {0: [*rendered("higher"), START]}
        talk.send({0: turn("99", finished=False)})  # cut off, so the template's own token ends it
        assert talk.receive([0]) == {0: [END, *rendered("lower"), START]}
        talk.send({0: turn("x")})
        assert talk.receive([0]) == {0: None}  # the third turn is the last
        (conversation,) = talk.finish()
    sampled = [[*b"0", END], [*b"99"], [*b"x", END]]
    whole = [*first, *sampled[0], *rendered("higher"), START, *sampled[1], END, *rendered("lower"), START, *sampled[2]]
    assert conversation.tokens == whole
    assert [token for token, own in zip(whole, conversation.sampled, strict=True) if own] == [*chain(*sampled)]
    assert [message["role"] for message in conversation.messages] == ["assistant", "user"] * 3
    assert [message["reward"] for message in conversation.assistant] == [0, 0, -0.75]
    assert conversation.result.reward == ("value", -0.75)
    assert conversation.values["tried"] == ["0", "99", "x"]
    assert conversation.finished
    scored = conversation.sample(prompt("Guess.").example)
    assert (scored.completion, [*scored.tokens]) == ("x", [*chain(*sampled)])


def test_a_conversation_ends_before_a_turn_without_room(guess):
    limit = len(rendered("Guess. Up to 9.", "0", "higher")) + 1 + 60
    for total, turns in ((limit, 2), (limit - 1, 1)):
        (conversation,) = play(guess(max_total_length=total, max_prompt_length=20), [prompt("Guess.")], ["0"])
        assert (len(conversation.assistant), conversation.finished) == (turns, False)
        assert conversation.result.reward == ("value", -turns / 4)  # the environment gives it at the end as well


def test_a_group_shares_a_state_and_each_step_has_another(guess):
    """Held-out problems have a fixed state that is the same at each step."""
    prompts = [prompt(largest=10**6)] * 4 + [prompt(largest=10**6 + 1)] * 4
    places = ((3,), (3,), (4,), (3, 8), (3, 0, True), (4, 0, True))
    rollouts = (play(guess(*place), prompts, ["0"] * 8) for place in places)
    first, again, other, later, fixed, same = ([game.values["number"] for game in games] for games in rollouts)
    assert (first, fixed) == (again, same)
    assert first == [first[0]] * 4 + [first[4]] * 4
    assert len({*first, *other, *later, *fixed}) == 8


@pytest.mark.slow
def test_a_thought_opened_by_the_prompt_calls_nothing(monkeypatch):
    tokenizer = bytes_tokenizer()
    tokenizer.chat_template += "{% if add_generation_prompt %}<think>\n{% endif %}"
    monkeypatch.setitem(globals(), "RENDERER", Renderer(tokenizer, "always"))
    two = call('{"number": 2}')
    says = [two], [f"{two}</think>4"], [f"a</think>{two}", "b</think>4"]
    with opened(None, tools=["own_environments:double"]) as talk:
        played = play(talk(max_completion_length=120), [prompt()] * 3, says)
    assert [len(each.assistant) for each in played] == [1, 1, 2]
    assert all(each.sample(prompt().example).thinks for each in played)  # so a reward finds no answer in the thought
    assert [message["content"] for message in played[2].messages if message["role"] == "tool"] == ["4"]


def test_a_prompt_that_grows_too_long_fails_alone(guess):
    prompts = [prompt("Guess."), prompt("Guess " + "x" * 25)]
    conversations = play(guess(), prompts, ["0", "0"])
    failure = "raised", "rollout.max_prompt_length: the prompt has 43 tokens: raise it"
    assert [one.failure for one in conversations] == [None, failure]
    assert conversations[1].tokens == [*prompts[1].tokens, *b"0", END]


@pytest.mark.parametrize(
    ("environment", "begins", "fault"),
    [
        ("Hostile", "raise ValueError('no board')", r"ValueError: no board \(own_environments.py:\d+\)"),
        ("Hostile", "os._exit(3)", "ended its process with exit code 3"),
        ("Ended", None, "TypeError: step: too many positional arguments"),
    ],
)
def test_an_environment_that_fails_on_problem_one_is_refused(environment, begins, fault):
    first = prompt(**({} if begins is None else {"begins": begins})).example
    message = f"task.environment: own_environments:{environment} fails with the first problem: {fault}"
    with pytest.raises(UserError, match=message):
        RewardRunner(task(environment), Task("", [first], []), 60)


def test_an_environment_that_was_tried_out_is_closed(capfd):
    with RewardRunner(task("Hostile"), Task("", [prompt().example], []), 60):
        assert capfd.readouterr().err == "closed\n"


@pytest.mark.slow
def test_an_interrupted_rollout_ends_its_environments():
    """The next rollout begins them again."""

    def interrupt():
        raise KeyboardInterrupt

    with opened("Hostile") as made:
        talk = made()
        talk.runner.poll = interrupt
        with pytest.raises(KeyboardInterrupt):
            play(talk, [prompt()], [["time.sleep(600)"]])
        talk.runner.poll = lambda: None
        assert play(made(), [prompt()], [["pass"]])[0].result.reward == ("value", 3)


def speaker(*says, **limits):
    """An engine with assistants that say this, as in `play`."""

    class Speaker(Sampler):
        def complete(self, params, prompts, *, step, first_sequence=0, greedy=False, ended=None, conversations=None):
            completions, live, round = [Completion() for _ in prompts], [*range(len(prompts))], 0
            while live:
                turns = {i: turn(says[i][min(round, len(says[i]) - 1)]) for i in live}
                for i, one in turns.items():
                    completions[i].tokens += array("i", one.tokens)
                    completions[i].logprobs += array("f", [-i - round] * len(one.tokens))
                conversations.send(turns)
                observations = conversations.receive(live)
                ended({i: completions[i] for i in live if observations[i] is None})
                live, round = [i for i in live if observations[i] is not None], round + 1
            return completions

    return Speaker(None, RENDERER, (END,), options(**limits), 0)


HOW = {"step": 0, "first_sequence": 0, "rows": ALL_ROWS, "watch": Stopwatch(), "group": 2}


def test_trajectories_have_samples_reward_sums_and_turns():
    """The environments of a group begin in the same state. Another group begins in another state."""
    sampler = speaker(["0"], ["0"], ["0", "x" * 10], ["1"], max_turns=2)
    rewards = [{"name": f"own_environments:{name}", "weight": w} for name, w in (("errors", 2), ("number", 0))]
    with RewardRunner(task("Guess", rewards=rewards), Task("", [prompt().example], []), 60) as runner:
        samples = sample_trajectories(sampler, runner, [prompt("Guess.", largest=10**6)] * 4, None, **HOW)
    one, rewards, line = samples[2], group_rewards(samples, runner, 2), sample_line(samples[2], runner, 0.5)
    assert one.tokens[one.sampled].tolist() == [*b"0", END, *b"x" * 10, END]
    assert one.logprobs.tolist() == [-2] * 2 + [-3] * 11
    assert (one.prompt, one.text, line["completion"]) == ("Guess. Up to 1000000.", "x" * 10, "x" * 10)
    assert [message.get("reward") for message in line["turns"]] == [0, None, -0.5, None]
    numbers = [one.rewards[1][1] for one in samples]
    assert numbers == [numbers[0]] * 2 + [numbers[2]] * 2
    assert numbers[0] != numbers[2]
    assert line["rewards"] == {"errors": pytest.approx(0.4 + 13 / 1000), "number": numbers[2], "environment": -0.5}
    assert rewards[1, 0] == line["reward"] == pytest.approx(2 * (0.4 + 0.013) - 0.5)
    metrics = completion_metrics(samples, runner.names)
    assert metrics["environment/mean_turns"] == np.mean([len(one.turns) / 2 for one in samples])
    assert (metrics["tools/call_frequency"], metrics["rewards/environment/raised"]) == (0, 0)


def test_rewards_know_that_the_prompt_has_opened_a_thought():
    prompts, rewards = [prompt()._replace(thinks=thinks) for thinks in (True, False)], SquareRewards()
    sampler = RandomCompletions(None, RENDERER, (END,), options(max_turns=None), 0)
    sample_trajectories(sampler, rewards, prompts, None, **HOW)
    assert [sample.thinks for sample in rewards.samples] == [True, False]


def test_evaluations_begin_in_the_same_state_at_each_step():
    config = task("Guess", rewards=[{"name": "own_environments:number"}])
    problems = [prompt("Guess.", largest=10**6).example] * 2
    with RewardRunner(config, Task("", problems, []), 60) as runner:
        sampler = speaker(["0"], ["0"])
        evaluate = make_evaluation(EvalConfig(), config, problems, sampler, runner, ALL_ROWS)
        first, later = (evaluate(None, step)["eval/rewards/number/mean"] for step in (3, 4))
    assert first == later


def test_the_rewards_of_a_turn_are_added():
    """An environment gives a reward with its answer, and a reward for a conversation that has ended."""
    conversation = Conversation([], [], messages=[{"role": "assistant", "content": "0", "reward": None}])
    for reward in (0.5, -2.0):
        conversation.record(("value", reward, ("turn", [], True, {})))
    assert conversation.result.reward == ("value", -1.5)
    conversation.messages += [{"role": "assistant", "content": "", "reward": reward} for reward in (1e17, 1.0, -1e17)]
    assert conversation.result.reward == ("value", -0.5)  # in any order of the turns


@pytest.mark.slow
def test_a_failed_environment_gives_no_reward(caplog):
    """Calls of tools are counted."""
    sampler = speaker(["pass"], ["raise ValueError"], [call('{"number": 1}')], [call("{}")])
    weights = {"by_environment": 1, "numbered": 0}
    rewards = [{"name": f"own_environments:{name}", "weight": weight} for name, weight in weights.items()]
    config = task("Hostile", tools=["own_environments:double"], rewards=rewards)
    with RewardRunner(config, Task("", [], []), 60) as runner:
        samples = sample_trajectories(sampler, runner, [prompt()] * 4, None, **HOW)
    np.testing.assert_array_equal(group_rewards(samples, runner, 2), [[3, np.nan], [0, 0]])
    with pytest.raises(StepError, match=r"task.environment: a reward failed for 1 of 4 .* environment raised 1 times"):
        group_rewards(samples, runner, 2, most_failed=0.1)
    # A batched function may count on the order of the groups, so it gets the failed conversation as well.
    assert [one.rewards[1] for one in samples] == [("value", 0), ("not_applicable", ""), ("value", 2), ("value", 3)]
    metrics = completion_metrics(samples, runner.names)
    assert (metrics["tools/call_frequency"], metrics["tools/failure_frequency"]) == (6 / 4, 0.5)
    assert metrics["rewards/environment/raised"] == 1
    assert "reward environment raised: ValueError" in caplog.text


# A failure of an environment costs its own conversation, at worst the conversations of its process

TOO_MUCH = r"raised ValueError: what it said and its values can't be sent: it takes [0-9,]+ bytes as JSON, and .*"
LASTING = {
    "result = 'on', 'jax' not in sys.modules, False": None,
    "result = 'on', 0.0": "raised TypeError: expected observation, reward and done.*",
    "result = 5, 0.0, False": "raised TypeError: expected a text or messages, got 5.*",
    "result = None, 0.0, False": "raised TypeError: it is not done, and there is no observation.*",
    "result = 'x' * 10**7, 0.0, False": TOO_MUCH,
    "self.board = 'x' * 10**7; result = '', 0, True": TOO_MUCH,
    "result = 'on', float('nan'), False": "not_a_number returned nan",
    "result = ' \\ud800<|im_end|>', 1.0, False": None,
    "self.board = float('inf')": None,
    "self.board = functools.reduce(lambda board, _: [board], range(10**5), 0)": None,
}
"""The acts of an environment in its first turn, and their counts. None: no count, and each of its turns gives 1."""
HANGING = "time.sleep(600)", "re.match(r'(a+)+$', 'a' * 64 + 'b')"
DEADLY = {
    "os._exit(3)": "raised ended its process with exit code 3",
    "while True:\n try: time.sleep(600)\n except BaseException: pass": "timed_out took longer than 2 s",
}
"""Acts that end the process with the other environments in it. Other moves of the same call fail in the same way."""


def counted(conversations):
    return [" ".join(one.failure) if one.failure else None for one in conversations]


@pytest.mark.slow
def test_a_hostile_environment_is_counted():
    with opened("Hostile", reward_timeout=60) as made:
        prompts = [prompt(begins="raise ValueError('at once')")] + [prompt()] * len(LASTING)
        conversations = play(made(), prompts, [["pass"], *([does, "pass"] for does in LASTING)])
    expected = [r"raised ValueError: at once \(own_environments.py:\d+\)", *LASTING.values()]
    for failure, pattern in zip(counted(conversations), expected, strict=True):
        assert failure is pattern is None or re.fullmatch(pattern, failure)
    assert {one.result.reward for one in conversations if one.failure is None} == {("value", 3)}


@pytest.mark.slow
def test_a_hang_costs_one_conversation_and_an_exit_its_process():
    """Even conversations are in one process, odd ones in another."""
    late = "timed_out took longer than 0.5 s"
    with opened("Hostile", reward_timeout=0.5, reward_workers=2) as made:

        def played(*says):
            return counted(play(made(), [prompt()] * 4, [[does] for does in says]))

        assert played(*HANGING, "pass", "pass") == [late] * 2 + [None] * 2
        for does, failure in DEADLY.items():
            assert played(does, "pass", "pass", "pass") == [failure, None, failure, None]
        assert played(*["pass"] * 4) == [None] * 4
