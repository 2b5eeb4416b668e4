"""Twelve public chat templates by their rules, in the fewest words, each with the control tokens that it writes."""

from typing import NamedTuple

from transformers import PreTrainedTokenizerFast

from mllm.model.tokenizer import bytes_tokenizer


class Public(NamedTuple):
    """A model's template, its control tokens, and whether it has calls of tools. The last token ends a text."""

    template: str
    controls: tuple[str, ...]
    calls: bool = False

    def tokenizer(self, template: str | None = None) -> PreTrainedTokenizerFast:
        tokenizer = bytes_tokenizer()
        tokenizer.add_special_tokens({"additional_special_tokens": [*self.controls]})
        tokenizer.eos_token, tokenizer.bos_token = self.controls[-1], self.controls[0]
        tokenizer.chat_template = template or self.template
        return tokenizer


HERMES = (
    "{% for c in m.tool_calls or [] %}{% set f = c.function or c %}\n<tool_call>\n"
    '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}\n</tool_call>{% endfor %}'
)
TOOLS = "{% if tools %}{{ '<|im_start|>system\\n# Tools\\n' + tools | tojson + '<|im_end|>\\n' }}{% endif %}"
RESPONSE = "<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n"
QWEN25 = (
    TOOLS + "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are Qwen.<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}" + RESPONSE + "{% else %}<|im_start|>{{ m.role + '\n' }}"
    "{{ m.content }}" + HERMES + "<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{{ '' }}{% endif %}"
)
# Thoughts before the last question are dropped. Later turns have a thought, be it empty.
QWEN3 = (
    TOOLS + "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}"
    "{% if m.role == 'tool' %}" + RESPONSE + "{% elif m.role != 'assistant' %}"
    "<|im_start|>{{ m.role + '\n' + m.content }}<|im_end|>\n{% else %}{% set thought = m.reasoning_content or '' %}"
    "{% set said = m.content %}{% if '</think>' in said %}"
    "{% set thought = said.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set said = said.split('</think>')[-1].lstrip('\n') %}{% endif %}<|im_start|>assistant\n"
    "{% if loop.index0 > ns.last %}{{ '<think>\n' + thought.strip('\n') + '\n</think>\n\n' }}{% endif %}"
    "{{ said }}" + HERMES + "<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{{ '' }}{% endif %}"
)
# As Qwen3's, but each text is trimmed, a call has its arguments singly, and a prompt opens the thought or closes it.
QWEN35 = (
    TOOLS + "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}{% set said = m.content | trim %}"
    "{% if m.role == 'tool' %}{% if messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\n<tool_response>\n' + said + '\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% elif m.role != 'assistant' %}<|im_start|>{{ m.role + '\n' + said }}<|im_end|>\n"
    "{% else %}{% set thought = m.reasoning_content or '' %}{% if not m.reasoning_content and '</think>' in said %}"
    "{% set thought = said.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}"
    "{% set said = said.split('</think>')[-1].lstrip('\n') %}{% endif %}<|im_start|>assistant\n"
    "{% if loop.index0 > ns.last %}{{ '<think>\n' + thought | trim + '\n</think>\n\n' }}{% endif %}{{ said }}"
    "{% for c in m.tool_calls or [] %}{% set f = c.function or c %}"
    "{{ ('\n\n' if said else '') if loop.first else '\n' }}<tool_call>\n<function={{ f.name }}>\n"
    "{% for name, value in f.arguments.items() %}<parameter={{ name }}>\n"
    "{{ value if value is string else value | tojson }}\n</parameter>\n{% endfor %}</function>\n</tool_call>"
    "{% endfor %}"
    "<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{{ '<think>\n\n</think>\n\n' if enable_thinking is defined and not enable_thinking else '<think>\n' }}{% endif %}"
)
LATER = "{% if loop.index0 > ns.last %}"
# As Qwen3.5's, but thoughts of earlier turns may be kept.
QWEN36 = QWEN35.replace(LATER, "{% if (preserve_thinking is defined and preserve_thinking) or loop.index0 > ns.last %}")
# As Qwen3.6's, but they are kept by default, stand in a field of their own alone, and an effort is told.
QWEN38 = (
    "{% set effort = reasoning_effort | default('xhigh') %}"
    "{% if effort not in ('xhigh', 'medium', 'low') %}{{ raise_exception('Unexpected reasoning effort ' + effort) }}"
    "{% endif %}{% set told = {'xhigh': 'Think carefully.', 'low': 'Be brief.'}.get(effort, '') %}"
    "{% if enable_thinking is defined and not enable_thinking %}{% set told = '' %}{% endif %}"
    "{% set first = messages[0].content | trim if messages[0].role == 'system' else '' %}"
    "{% set parts = [told, '# Tools\n' + tools | tojson if tools else '', first] | select | join('\n\n') %}"
    "{{ '<|im_start|>system\n' + parts + '<|im_end|>\n' if parts else '' }}"
    + QWEN35.removeprefix(TOOLS)
    .replace("{% elif m.role != 'assistant' %}", "{% elif m.role == 'system' %}{% elif m.role != 'assistant' %}")
    .replace("not m.reasoning_content and '</think>' in said", "false")
    .replace(LATER, "{% if preserve_thinking is undefined or preserve_thinking or loop.index0 > ns.last %}")
)
LLAMA3 = (
    "{{ bos_token }}{% set date = date_string or strftime_now('%d %b %Y') %}{% set first = messages[0] %}"
    "<|start_header_id|>system<|end_header_id|>\n\nToday Date: {{ date }}\n\n"
    "{{ first.content | trim if first.role == 'system' else '' }}{{ tools | tojson if tools else '' }}<|eot_id|>"
    "{% for m in messages if m.role != 'system' %}"
    "<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}<|end_header_id|>\n\n"
    "{% if m.tool_calls %}{% for c in m.tool_calls %}{% set f = c.function or c %}"
    '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}{% endfor %}<|eom_id|>'
    "{% else %}{{ m.content | trim }}<|eot_id|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{{ '' }}{% endif %}"
)
ALTERNATE = (
    "{% if (m.role == 'user') == (loop.index0 % 2 == 1) %}{{ raise_exception('roles must alternate') }}{% endif %}"
)
GEMMA3 = (
    "{{ bos_token }}{% set first = messages[0].content + '\n\n' if messages[0].role == 'system' else '' %}"
    "{% for m in (messages[1:] if first else messages) %}" + ALTERNATE + "<start_of_turn>"
    "{{ ('model' if m.role == 'assistant' else m.role) + '\n' + (first if loop.first else '') }}"
    "{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{{ '' }}{% endif %}"
)
SMOLLM3 = (
    "<|im_start|>system\nToday Date: {{ strftime_now('%d %B %Y') }}\n{{ tools | tojson if tools else '' }}<|im_end|>\n"
    "{% for m in messages if m.role != 'system' %}{% if m.role == 'assistant' %}{% generation %}"
    "<|im_start|>assistant\n{{ '<think>\n\n</think>\n' if loop.last else '' }}{{ m.content.lstrip('\n') }}"
    + HERMES
    + "<|im_end|>\n{% endgeneration %}{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{{ '' }}{% endif %}"
)
# A call of tools begins with a control token, and the last question has the system's message.
MISTRAL = (
    "{{ bos_token }}{% set ns = namespace(last=0, first='') %}{% for m in messages %}"
    "{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
    "{% if m.role == 'system' %}{% set ns.first = m.content + '\n\n' %}{% endif %}{% endfor %}{% for m in messages %}"
    "{% if m.role == 'user' %}{% if tools and loop.index0 == ns.last %}"
    "[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "[INST]{{ ns.first if loop.index0 == ns.last else '' }}{{ m.content }}[/INST]"
    "{% elif m.tool_calls %}[TOOL_CALLS]{% for c in m.tool_calls %}{{ (c.function or c) | tojson }}{% endfor %}"
    "{{ eos_token }}{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]"
    "{% elif m.role == 'assistant' %}{{ ' ' + m.content | trim + eos_token }}{% endif %}{% endfor %}"
)
PHI = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{{ '' }}{% endif %}"
)
# A prompt opens the thought, which no earlier turn keeps.
DEEPSEEK = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% elif m.role == 'user' %}"
    "<|User|>{{ m.content }}{% else %}<|Assistant|>{{ m.content.split('</think>')[-1] }}{{ eos_token }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|Assistant|><think>\n{{ '' }}{% endif %}"
)
# The end of sequence stands at the chat's end alone.
VICUNA = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ m.content + ' ' }}{% elif m.role == 'user' %}"
    "{{ 'USER: ' + m.content + ' ' }}{% else %}{{ 'ASSISTANT: ' + m.content }}{{ eos_token if loop.last else ' ' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT: ' }}{% endif %}"
)
IM = ("<|im_start|>", "<|im_end|>")
MISTRAL_CONTROLS = ("<s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]")
PUBLIC = {
    "qwen2.5": Public(QWEN25, IM, calls=True),
    "qwen3": Public(QWEN3, IM, calls=True),
    "qwen3.5": Public(QWEN35, IM, calls=True),
    "qwen3.6": Public(QWEN36, IM, calls=True),
    "qwen3.8": Public(QWEN38, IM, calls=True),
    "llama3": Public(
        LLAMA3, ("<|begin|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>"), calls=True
    ),
    "gemma3": Public(GEMMA3, ("<bos>", "<start_of_turn>", "<end_of_turn>")),
    "smollm3": Public(SMOLLM3, IM, calls=True),
    "mistral": Public(MISTRAL, (*MISTRAL_CONTROLS, "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "</s>"), calls=True),
    "phi": Public(PHI, ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")),
    "deepseek": Public(DEEPSEEK, ("<|begin|>", "<|User|>", "<|Assistant|>", "<|eos|>")),
    "vicuna": Public(VICUNA, ("</s>",)),
}
