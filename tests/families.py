"""Small tokenizers with the real added tokens and chat templates of all admitted families: one
token a byte or a character, but for a few merges."""

from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

_GPT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_MERGES = ["<|", "|>", "he", "in", "er", "us", "</", "or", "an", "th", "the"]

_CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_QWEN3 = (
    "{%- if tools %}{{- '<tools>' }}{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}"
    "{{- '</tools>\n<tool_call>\n{}\n</tool_call><|im_end|>\n' }}"
    "{%- elif messages[0].role == 'system' %}"
    "{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}{%- endif %}"
    "{%- for message in messages %}{%- if message.role == 'user' %}"
    "{{- '<|im_start|>user\n' + message.content + '<|im_end|>\n' }}"
    "{%- elif message.role == 'assistant' %}"
    "{{- '<|im_start|>assistant\n' + message.content.split('</think>')[-1].lstrip('\n') }}"
    "{{- '<|im_end|>\n' }}{%- endif %}{%- endfor %}{%- if add_generation_prompt %}"
    "{{- '<|im_start|>assistant\n' }}{%- if enable_thinking is defined and not enable_thinking %}"
    "{{- '<think>\n\n</think>\n\n' }}{%- endif %}{%- endif %}"
)
_LLAMA3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = "
    "'<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim "
    "+ '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}"
    "{{ content }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
_PHI3 = (
    "{% for message in messages %}{% if message['role'] == 'system' %}"
    "{{'<|system|>\n' + message['content'] + '<|end|>\n'}}{% elif message['role'] == 'user' %}"
    "{{'<|user|>\n' + message['content'] + '<|end|>\n'}}{% elif message['role'] == 'assistant' %}"
    "{{'<|assistant|>\n' + message['content'] + '<|end|>\n'}}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
_GEMMA2 = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}{% for message in messages %}"
    "{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}"
    "{% set role = message['role'] %}{% endif %}{{ '<start_of_turn>' + role + '\n' + "
    "message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"
)
_GEMMA3 = (
    "{{ bos_token }}{%- if messages[0]['role'] == 'system' -%}"
    "{%- set first_user_prefix = messages[0]['content'] + '\n\n' -%}"
    "{%- set loop_messages = messages[1:] -%}{%- else -%}{%- set first_user_prefix = '' -%}"
    "{%- set loop_messages = messages -%}{%- endif -%}{%- for message in loop_messages -%}"
    "{%- if (message['role'] == 'assistant') -%}{%- set role = 'model' -%}{%- else -%}"
    "{%- set role = message['role'] -%}{%- endif -%}{{ '<start_of_turn>' + role + '\n' + "
    "(first_user_prefix if loop.first else '') }}{{ message['content'] | trim }}"
    "{{ '<end_of_turn>\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{'<start_of_turn>model\n'}}{%- endif -%}"
)
_MISTRAL = (
    "{%- if messages[0]['role'] == 'system' %}{%- set system_message = messages[0]['content'] %}"
    "{%- set loop_messages = messages[1:] %}{%- else %}{%- set loop_messages = messages %}"
    "{%- endif %}{{- bos_token }}{%- for message in loop_messages %}"
    "{%- if message['role'] == 'user' %}{%- if loop.last and system_message is defined %}"
    "{{- '[INST] ' + system_message + '\n\n' + message['content'] + '[/INST]' }}{%- else %}"
    "{{- '[INST] ' + message['content'] + '[/INST]' }}{%- endif %}"
    "{%- elif message['role'] == 'assistant' %}{{- ' ' + message['content']|trim + eos_token}}"
    "{%- endif %}{%- endfor %}"
)
_MIXTRAL = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token}}{% endif %}"
    "{% endfor %}"
)

_HTML = [
    *("table", "caption", "thead", "tbody", "tfoot", "tr", "th", "td", "h1", "h2", "h3", "h4"),
    *("h5", "h6", "blockquote", "strong", "em", "b", "i", "u", "s", "sub", "sup", "code"),
]
GEMMA_TEXT = [
    *("\n" * count for count in range(1, 32)),
    *("\u2581" * count for count in range(2, 32)),
    *(f"<{slash}{tag}>" for slash in ("", "/") for tag in _HTML),
]
# The first and the last of 6,242 that are alike.
_GEMMA3_UNUSED = [f"<unused{number}>" for number in (*range(99), *range(6222, 6242))]
_PHI3_TURNS = [
    *("assistant", "placeholder1", "placeholder2", "placeholder3", "placeholder4", "system"),
    *("end", "placeholder5", "placeholder6", "user"),
]
_QWEN = [
    *("object_ref_start", "object_ref_end", "box_start", "box_end", "quad_start", "quad_end"),
    *("vision_start", "vision_end", "vision_pad", "image_pad", "video_pad"),
]
_QWEN_TOOLS = [
    *("<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"),
    *("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"),
]
_SMOLLM = [
    *("repo_name", "reponame", "file_sep", "filename", "gh_stars", "issue_start", "issue_comment"),
    *("issue_closed", "jupyter_start", "jupyter_text", "jupyter_code", "jupyter_output"),
    *("jupyter_script", "empty_output"),
]


@dataclass(frozen=True)
class Family:
    """What there is to know of a family's tokenizer.

    Attributes:
        kind: "bytes", or what is put before a text: "prepend", "first", "nothing".
        special: added tokens that are flagged as special.
        plain: those that are not.
        rstrip: those that take the white space behind them.
        named: what they are to transformers.
        ordinary: those of `plain` that are ordinary text.
    """

    kind: str
    template: str
    special: list[str]
    plain: list[str]
    named: dict[str, str]
    rstrip: tuple[str, ...] = ()
    ordinary: tuple[str, ...] = ()
    normalizer: Any = None

    @property
    def controls(self) -> list[str]:
        """All that must not come out of a text."""
        return [each for each in (*self.special, *self.plain) if each not in self.ordinary]

    def tokenizer(self) -> Any:
        """Made anew."""
        made = _bytes() if self.kind == "bytes" else _characters(self.kind, self.special[:3])
        if self.normalizer is not None:
            made.normalizer = self.normalizer
        for content in self.special:
            made.add_special_tokens([self._added(content, True)])
        made.add_tokens([self._added(content, False) for content in self.plain])
        return PreTrainedTokenizerFast(
            tokenizer_object=made,
            chat_template=self.template,
            clean_up_tokenization_spaces=False,
            **self.named,
        )

    def _added(self, content: str, special: bool) -> AddedToken:
        rstrip = content in self.rstrip
        return AddedToken(content, rstrip=rstrip, normalized=False, special=special)


def _bytes() -> Tokenizer:
    vocab = {each: at for at, each in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(*_merged(vocab)))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_GPT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    return made


def _characters(kind: str, first: list[str]) -> Tokenizer:
    pieces = [*first, *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581"]
    vocab = {each: at for at, each in enumerate([*pieces, *map(chr, range(33, 127))])}
    made = Tokenizer(models.BPE(*_merged(vocab), byte_fallback=True, unk_token="<unk>"))
    spaces = normalizers.Replace(" ", "\u2581")
    if kind == "prepend":
        made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), spaces])
    elif kind == "first":
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        made.normalizer = spaces
        made.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    made.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return made


def _merged(vocab: dict[str, int]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    merges = []
    for each in [*_MERGES, *(["\u2581t", "\u2581<"] if "\u2581" in vocab else [])]:
        vocab[each] = len(vocab)
        merges.append((each[:-1], each[-1]))
    return vocab, merges


_SENTENCEPIECE = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
_GEMMA = {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<pad>"}
_TURNS = ["<start_of_turn>", "<end_of_turn>"]
_ENDOFTEXT = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
_STARTS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]

FAMILIES = {
    "llama3": Family(
        "bytes",
        _LLAMA3,
        [
            *("<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>"),
            *("<|reserved_special_token_1|>", "<|finetune_right_pad_id|>"),
            *("<|reserved_special_token_2|>", "<|start_header_id|>", "<|end_header_id|>"),
            *("<|eom_id|>", "<|eot_id|>", "<|python_tag|>"),
            *(f"<|reserved_special_token_{number}|>" for number in range(3, 248)),
        ],
        [],
        {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
    ),
    "phi3": Family(
        "prepend",
        _PHI3,
        ["<unk>", "<s>", "<|endoftext|>", *(f"<|{name}|>" for name in _PHI3_TURNS)],
        ["</s>"],
        {**_SENTENCEPIECE, "eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"},
        rstrip=("</s>", *(f"<|{name}|>" for name in _PHI3_TURNS)),
    ),
    "gemma2": Family(
        "nothing",
        _GEMMA2,
        ["<pad>", "<eos>", "<bos>", "<unk>", *_TURNS],
        ["<mask>", "<2mass>", "[@BOS@]", *(f"<unused{n}>" for n in range(99)), *GEMMA_TEXT],
        _GEMMA,
        ordinary=(*GEMMA_TEXT,),
    ),
    "gemma3": Family(
        "nothing",
        _GEMMA3,
        [
            *("<pad>", "<eos>", "<bos>", "<unk>", *_TURNS),
            *("<start_of_image>", "<end_of_image>", "<image_soft_token>"),
        ],
        ["<mask>", "[multimodal]", *_GEMMA3_UNUSED, *GEMMA_TEXT],
        _GEMMA,
        ordinary=(*GEMMA_TEXT,),
    ),
    "mistral-v0.3": Family(
        "first",
        _MISTRAL,
        [
            *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]"),
            *("[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
            *(f"[control_{number}]" for number in range(8, 769)),
        ],
        [],
        _SENTENCEPIECE,
    ),
    "mixtral": Family("prepend", _MIXTRAL, ["<unk>", "<s>", "</s>"], [], _SENTENCEPIECE),
    "qwen2": Family("bytes", _CHATML, _STARTS, [], _ENDOFTEXT, normalizer=normalizers.NFC()),
    "qwen2.5": Family(
        "bytes",
        _CHATML,
        [*_STARTS, *(f"<|{name}|>" for name in _QWEN)],
        _QWEN_TOOLS,
        _ENDOFTEXT,
        normalizer=normalizers.NFC(),
    ),
    "qwen3": Family(
        "bytes",
        _QWEN3,
        [*_STARTS, *(f"<|{name}|>" for name in _QWEN)],
        [*_QWEN_TOOLS, "<tool_response>", "</tool_response>", "<think>", "</think>"],
        _ENDOFTEXT,
        normalizer=normalizers.NFC(),
    ),
    "smollm2": Family(
        "bytes",
        _CHATML,
        [*_STARTS, *(f"<{name}>" for name in _SMOLLM)],
        [],
        {**_ENDOFTEXT, "bos_token": "<|im_start|>", "unk_token": "<|endoftext|>"},
    ),
}
