"""Small tokenizers and chat templates in the manner of each model family, written as model folders.

The tokenizers are trained here on a few lines, with the family's own pipeline and the flags of its special tokens;
the templates do what the family's own do, in fewer words.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = (
    "What is the capital of France? The capital of France is Paris, and 1234567 people know it.",
    "def add(a, b):\n    return a + b\n\n\nprint(add(1, 22))  # 23\n",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. Übung macht den Meister!",
    "You are a helpful assistant. Summarize the document: the system, the user and the model.",
    "一只敏捷的棕色狐狸跳过懒狗。 Быстрая коричневая лиса. \u0928\u092e\u0938\u094d\u0924\u0947",
) * 4
GPT4_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)

CHATML = """{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system
You are a helpful assistant<|im_end|>
' }}{% endif %}{{ '<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>' + '
' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}"""

LLAMA3 = r"""{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}{%- set date_string = strftime_now("%d %b %Y") %}{%- endif %}
{%- endif %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\n\n" }}
{%- if tools is not none %}{{- "Environment: ipython\n" }}{%- endif %}
{{- "Cutting Knowledge Date: December 2023\nToday Date: " + date_string + "\n\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""

QWEN25 = r"""{%- if tools %}
    {{- '<|im_start|>system\n# Tools\n<tools>' }}
    {%- for tool in tools %}{{- "\n" }}{{- tool | tojson }}{%- endfor %}
    {{- '\n</tools><|im_end|>\n' }}
{%- elif messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\n' + messages[0]['content'] + '<|im_end|>\n' }}
{%- else %}
    {{- '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) or message.role == "assistant" %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""

QWEN3 = r"""{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(searching=true, last_query=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.searching and message.role == "user" and message.content is string
        and not (message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.searching = false %}
        {%- set ns.last_query = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {%- set content = message.content %}
        {%- set thoughts = '' %}
        {%- if '</think>' in content %}
            {%- set thoughts = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query and thoughts %}
            {{- '<|im_start|>assistant\n<think>\n' + thoughts.strip('\n') + '\n</think>\n\n' + content }}
        {%- else %}
            {{- '<|im_start|>assistant\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}
"""

GEMMA3 = r"""{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- set first_user_prefix = messages[0]['content'] + '\n\n' -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_user_prefix = "" -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {%- set role = "model" if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\n' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- else -%}
        {{ raise_exception("Invalid content type") }}
    {%- endif -%}
    {{ '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{'<start_of_turn>model\n'}}
{%- endif -%}
"""

PHI3 = (
    "{% for message in messages %}{% if message['role'] == 'system' %}{{'<|system|>\n' + message['content'] + "
    "'<|end|>\n'}}{% elif message['role'] == 'user' %}{{'<|user|>\n' + message['content'] + '<|end|>\n'}}"
    "{% elif message['role'] == 'assistant' %}{{'<|assistant|>\n' + message['content'] + '<|end|>\n'}}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)

MISTRAL = r"""{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('After the optional system message, roles must alternate') }}
    {%- endif %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\n\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"] | trim + eos_token }}
    {%- endif %}
{%- endfor %}
"""

GPT_OSS = r"""{%- macro identity() -%}
    {{- model_identity | default("You are ChatGPT, a large language model.") }}
    {{- "\nCurrent date: " + strftime_now("%Y-%m-%d") + "\n\n" }}
    {{- "Reasoning: " + (reasoning_effort if reasoning_effort is defined else "medium") + "\n\n" }}
    {{- "# Valid channels: analysis, commentary, final." }}
{%- endmacro -%}
{{- "<|start|>system<|message|>" }}{{- identity() }}{{- "<|end|>" }}
{%- if messages[0].role in ["developer", "system"] %}
    {%- set instructions = messages[0].content %}
    {%- set loop_messages = messages[1:] %}
    {{- "<|start|>developer<|message|># Instructions\n\n" + instructions + "<|end|>" }}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set last = namespace(name=none) %}
{%- for message in loop_messages -%}
    {%- if message.role == 'assistant' -%}
        {%- generation -%}
        {{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|end|>" }}
        {%- endgeneration -%}
        {%- set last.name = none %}
    {%- elif message.role == 'user' -%}
        {{- "<|start|>user<|message|>" + message.content + "<|end|>" }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}
"""

LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}{% set system_message = "
    "'<<SYS>>\n' + messages[0]['content'] + '\n<</SYS>>\n\n' %}{% else %}{% set loop_messages = messages %}"
    "{% set system_message = '' %}{% endif %}{% for message in loop_messages %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + (system_message if loop.first else '') + "
    "message['content'].strip() + ' [/INST]' }}{% else %}{{ ' ' + message['content'].strip() + ' ' + eos_token }}"
    "{% endif %}{% endfor %}"
)

FAMILIES: dict[str, str] = {
    "llama2": LLAMA2,
    "chatml": CHATML,
    "llama3": LLAMA3,
    "qwen2.5": QWEN25,
    "qwen3": QWEN3,
    "gemma3": GEMMA3,
    "phi3": PHI3,
    "mistral": MISTRAL,
    "gpt-oss": GPT_OSS,
}
# A control token that the family's template writes.
CONTROL: dict[str, str] = {
    "llama2": "</s>",
    "chatml": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "qwen2.5": "<|im_end|>",
    "qwen3": "<|im_end|>",
    "gemma3": "<end_of_turn>",
    "phi3": "<|end|>",
    "mistral": "[INST]",
    "gpt-oss": "<|end|>",
}
# What config.json calls the model and tokenizer_config.json the tokenizer: transformers builds some from it in code.
CLASSES: dict[str, tuple[str, str]] = {
    "llama2": ("llama", "LlamaTokenizer"),
    "chatml": ("llama", "PreTrainedTokenizerFast"),
    "llama3": ("llama", "PreTrainedTokenizerFast"),
    "qwen2.5": ("qwen2", "Qwen2Tokenizer"),
    "qwen3": ("qwen3", "Qwen2Tokenizer"),
    "gemma3": ("gemma3_text", "GemmaTokenizer"),
    "phi3": ("phi3", "LlamaTokenizer"),
    "mistral": ("mistral", "LlamaTokenizer"),
    "gpt-oss": ("gpt_oss", "PreTrainedTokenizerFast"),
}
NAMED: dict[str, dict[str, object]] = {
    "llama2": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "legacy": False},
    "chatml": {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"},
    "llama3": {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
    "qwen2.5": {"bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
    "qwen3": {"bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
    "gemma3": {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"},
    "phi3": {"bos_token": "<s>", "eos_token": "<|endoftext|>", "add_bos_token": False, "add_eos_token": False},
    "mistral": {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, "add_eos_token": False},
    "gpt-oss": {"bos_token": "<|startoftext|>", "eos_token": "<|return|>"},
}


def write_folder(folder: Path, family: str, *, template: str | None = "") -> Path:
    """A model folder with tokenizer and template; template: another one, or None for none."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(_tokenizer(family))
    model_type, tokenizer_class = CLASSES[family]
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    settings = {"tokenizer_class": tokenizer_class, **NAMED[family]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template or FAMILIES[family])
    return folder


@cache
def _tokenizer(family: str) -> str:
    make = {"gemma3": _gemma, "phi3": _phi, "llama2": _llama2, "mistral": _mistral}.get(family)
    return (make() if make else _byte_level(family)).to_str()


def _special(*contents: str, **flags: bool) -> list[AddedToken]:
    return [AddedToken(content, special=True, normalized=False, **flags) for content in contents]


def _byte_level(family: str) -> Tokenizer:
    """GPT-2's kind of BPE over bytes, in the variants of Llama 3, Qwen and gpt-oss."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=family == "llama3"))
    if family.startswith("qwen"):
        tokenizer.normalizer = normalizers.NFC()
    if family == "chatml":
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    else:
        pattern = GPT4_SPLIT.replace("{1,3}", "") if family.startswith("qwen") else GPT4_SPLIT
        split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    if family == "llama3":
        tokenizer.add_special_tokens(
            _special("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
        )
        bos = ("<|begin_of_text|>", tokenizer.token_to_id("<|begin_of_text|>"))
        tokenizer.post_processor = processors.Sequence(
            [
                processors.ByteLevel(trim_offsets=True),
                processors.TemplateProcessing(single=f"{bos[0]} $A", pair=f"{bos[0]} $A $B:1", special_tokens=[bos]),
            ]
        )
    elif family == "gpt-oss":
        tokenizer.add_special_tokens(
            _special("<|startoftext|>", "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>")
        )
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    else:
        tokenizer.add_special_tokens(_special("<|endoftext|>", "<|im_start|>", "<|im_end|>"))
        plain = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
        if family == "qwen3":
            tokenizer.add_tokens([AddedToken(content, special=False, normalized=False) for content in plain])
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer


def _sentence_piece(specials: list[str]) -> Tokenizer:
    """BPE over characters with byte fallback; control tokens and bytes come first in the vocabulary."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    trained.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=400, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    pieces = [*specials, *(f"<0x{byte:02X}>" for byte in range(256)), *model["vocab"]]
    # These join to control tokens, as some real vocabularies' merges do.
    pieces += [piece for piece in ("<b", "os>", "<end", "_of", "_turn>", "<end_of") if piece not in pieces]
    merges = [tuple(merge) for merge in model["merges"]]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    return Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))


def _fallback_decoder(*more: decoders.Decoder) -> decoders.Decoder:
    return decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *more])


def _gemma() -> Tokenizer:
    specials = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<start_of_turn>", "<end_of_turn>"]
    tokenizer = _sentence_piece(specials)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    tokenizer.decoder = _fallback_decoder()
    tokenizer.add_special_tokens(_special(*specials))
    # Runs of white space are added tokens of Gemma's, though ordinary text.
    tokenizer.add_tokens([AddedToken(run, normalized=False) for run in ("\n", "\n\n", "\n\n\n", "▁▁", "▁▁▁")])
    bos = ("<bos>", tokenizer.token_to_id("<bos>"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A <bos> $B:1", special_tokens=[bos]
    )
    return tokenizer


def _phi() -> Tokenizer:
    tokenizer = _sentence_piece(["<unk>", "<s>", "</s>"])
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = _fallback_decoder(decoders.Strip(" ", 1, 0))
    tokenizer.add_special_tokens(_special("<unk>", "<s>", "<|endoftext|>"))
    tokenizer.add_special_tokens(_special("<|system|>", "<|user|>", "<|assistant|>", "<|end|>", rstrip=True))
    return tokenizer


def _llama2() -> Tokenizer:
    """As its file comes: the normalizer puts a space after every special token, which transformers overrules."""
    tokenizer = _sentence_piece(["<unk>", "<s>", "</s>"])
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = _fallback_decoder(decoders.Strip(" ", 1, 0))
    tokenizer.add_special_tokens(_special("<unk>", "<s>", "</s>"))
    bos = ("<s>", tokenizer.token_to_id("<s>"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B:1", special_tokens=[bos]
    )
    return tokenizer


def _mistral() -> Tokenizer:
    tokenizer = _sentence_piece(["<unk>", "<s>", "</s>", "[INST]", "[/INST]"])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = _fallback_decoder(decoders.Strip(" ", 1, 0))
    tokenizer.add_special_tokens(_special("<unk>", "<s>", "</s>", "[INST]", "[/INST]"))
    bos = ("<s>", tokenizer.token_to_id("<s>"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B:1", special_tokens=[bos]
    )
    return tokenizer
