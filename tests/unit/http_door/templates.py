"""A chat template of each family's kind, as short as it may be and still write calls."""

_TURNS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"

TEMPLATES = {
    "hermes": "{% if tools %}# Tools\nFor each call return JSON within <tool_call></tool_call>:\n"
    '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>{% endif %}'
    + _TURNS,
    "llama3_json": "{% for m in messages %}{% if m.tool_calls %}<|python_tag|>"
    "{{ m.tool_calls[0].function | tojson }}"
    "{% else %}<|start_header_id|>{{ m.role }}<|end_header_id|>{{ m.content }}<|eot_id|>{% endif %}{% endfor %}",
    "pythonic": "{% if tools %}Write functions as [func_name1(params_name1=params_value1), func_name2(...)]."
    "{{ tools | tojson }}{% endif %}" + _TURNS,
    "mistral": "{% for m in messages %}{% if m.tool_calls %}[TOOL_CALLS] [{{ m.tool_calls[0].function | tojson }}]"
    "{% else %}[INST] {{ m.content }}[/INST]{% endif %}{% endfor %}",
    "phi4": "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% if m.tools %}<|tool|>{{ m.tools }}<|/tool|>{% endif %}"
    "<|end|>{% endfor %}",
    "gemma": "{% for m in messages %}{% for c in m.tool_calls %}<start_function_call>call:{{ c.function.name }}{ }"
    "<end_function_call>{% endfor %}<start_of_turn>{{ m.role }}\n{{ m.content }}<end_of_turn>{% endfor %}",
}
THINKING = {
    "think": "{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}<|Assistant|><think>\n",
    "mistral": "{% for m in messages %}[THINK]{{ m.reasoning }}[/THINK]{{ m.content }}{% endfor %}",
}
WITHOUT = {
    "SmolLM2": "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}",
    "ChatML": _TURNS,
    "Gemma 3": "{% for m in messages %}<start_of_turn>{{ m.role }}\n{{ m.content }}<end_of_turn>\n{% endfor %}",
    "XML calls": "{% if tools %}<tool_call>\n<function=f>\n<parameter=p>\n1\n</parameter></function></tool_call>"
    "{% endif %}" + _TURNS,
    "XML arguments": "{% if tools %}<tool_call>f\n<arg_key>k</arg_key></tool_call>{% endif %}" + _TURNS,
}
