"""How a chat with tools and thoughts is laid out: the Jinja template that the model is shipped with.

Calls and results stand in the marks that many models share: ``<tool_call>`` around a JSON object with ``name`` and
``arguments``, ``<tool_response>`` around a result in a user's turn, ``<think>`` around thoughts.
"""

from __future__ import annotations

END_OF_TEXT = "<|endoftext|>"
IM_START = "<|im_start|>"
IM_END = "<|im_end|>"
TEXT_MARKS = (
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
    "<tools>",
    "</tools>",
)
"""Tokens of their own that are part of the text: they are not special, so decoding shows them."""

ROLES = ("system", "user", "assistant", "tool")

TOOLS_HEAD = "# Tools\n<tools>"
TOOLS_TAIL = '</tools>\nCall a tool like this:\n<tool_call>\n{"name": name, "arguments": arguments}\n</tool_call>'

_TOOLS_HEAD, _TOOLS_TAIL = (text.replace("\n", "\\n") for text in (TOOLS_HEAD, TOOLS_TAIL))

CHAT_TEMPLATE = (
    "{%- set given = tools or [] %}"
    "{%- if given %}"
    "{{- '" + IM_START + "system\\n' }}"
    "{%- if messages and messages[0]['role'] == 'system' and messages[0]['content'] %}"
    "{{- messages[0]['content'] + '\\n\\n' }}"
    "{%- endif %}"
    "{{- '" + _TOOLS_HEAD + "\\n' }}"
    "{%- for tool in given %}{{- tool | tojson }}{{- '\\n' }}{%- endfor %}"
    "{{- '" + _TOOLS_TAIL + IM_END + "\\n' }}"
    "{%- endif %}"
    "{%- for message in messages %}"
    "{%- set role = message['role'] %}"
    "{%- set content = message['content'] or '' %}"
    "{%- if role not in " + repr(ROLES) + " %}"
    "{{- raise_exception('unknown role ' + (role | string) + ': use system, user, assistant or tool') }}"
    "{%- elif role == 'system' and loop.first and given %}"
    "{%- elif role == 'tool' %}"
    "{%- if loop.first or messages[loop.index0 - 1]['role'] != 'tool' %}{{- '" + IM_START + "user' }}{%- endif %}"
    "{{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1]['role'] != 'tool' %}{{- '" + IM_END + "\\n' }}{%- endif %}"
    "{%- else %}"
    "{{- '" + IM_START + "' + role + '\\n' + content }}"
    "{%- for call in (message['tool_calls'] or [] if role == 'assistant' else []) %}"
    "{%- set call = call['function'] or call %}"
    "{%- if content or not loop.first %}{{- '\\n' }}{%- endif %}"
    "{{- '<tool_call>\\n{\"name\": ' + (call['name'] | tojson) + ', \"arguments\": ' }}"
    "{{- call['arguments'] if call['arguments'] is string else call['arguments'] | tojson }}"
    "{{- '}\\n</tool_call>' }}"
    "{%- endfor %}"
    "{{- '" + IM_END + "\\n' }}"
    "{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}"
    "{{- '" + IM_START + "assistant\\n' }}{%- if enable_thinking %}{{- '<think>\\n' }}{%- endif %}"
    "{%- endif %}"
)
