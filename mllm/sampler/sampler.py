"""Prompts in, completions out: the sampler, for training, evaluation and tools/generate.py; engine.py does the work."""

from collections.abc import Callable, Mapping, Sequence

from mllm.model.layout import Params
from mllm.sampler.completion import Completion, SamplerSettings, Turns
from mllm.sampler.engine import RolloutEngine


class Sampler(SamplerSettings):
    """Completes prompts with parameters that each call passes."""

    def complete(
        self,
        params: Params,
        prompts: Sequence[Sequence[int]],
        *,
        step: int,
        first_sequence: int = 0,
        greedy: bool = False,
        ended: Callable[[Mapping[int, Completion]], object] = lambda completions: None,
        conversations: Turns | None = None,
    ) -> list[Completion]:
        """Complete each prompt (token ids) once; prompt i draws from the stream (seed, step, first_sequence + i).

        All processes pass the same prompts, and get all completions. With `greedy` the likeliest token is taken;
        log-probabilities are 0. `ended` is called with finished completions, by their prompts' numbers, while other
        completions decode. `conversations` may have answers to continue with. ValueError is raised without prompts, and
        for a prompt that is empty or longer than `options.max_prompt_length`.
        """
        lengths, limit = sorted({*map(len, prompts)}), self.options.max_prompt_length
        if not lengths or lengths[0] == 0 or lengths[-1] > limit:
            raise ValueError(f"prompts: expected 1 to {limit} tokens each (rollout.max_prompt_length), got {lengths}")
        engine = RolloutEngine(self, params, prompts, step, first_sequence, greedy)
        while (rows := engine.admit()) or engine.waiting:
            finished = engine.decode_chunk() if rows else {}
            ended(engine.answer(conversations, finished) if conversations else engine.release(finished))
        if self.typical and self.options.turns > 1:  # in later rollouts conversations may end earlier
            engine.compile_rest()
        return engine.completions
