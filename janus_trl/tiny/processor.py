"""Processor and configuration of the tiny model: the special tokens, template and layout of the converted Janus-Pro
checkpoints, with a vocabulary of words and pictures of 32x32 pixels."""

import re

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import GenerationConfig, JanusConfig, JanusImageProcessor, JanusProcessor, PreTrainedTokenizerFast

from janus_trl.tiny.prompts import DISTINCT, NUMBERS, PLURALS, RELATIONS
from janus_trl.tiny.questions import LETTERS
from janus_trl.tiny.world import CELLS, COLORS, EMPTY, IMAGE_SIZE, NO_OBJECTS, SHAPES

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
BEGIN_OF_IMAGE, IMAGE_PLACEHOLDER, END_OF_IMAGE = "<begin_of_image>", "<image_placeholder>", "<end_of_image>"
USER, ASSISTANT = "<|User|>", "<|Assistant|>"
UNKNOWN = "<unknown>"
SPECIAL_TOKENS = (PAD, BOS, EOS, BEGIN_OF_IMAGE, IMAGE_PLACEHOLDER, END_OF_IMAGE, USER, ASSISTANT, UNKNOWN)
PATCH_SIZE = 4
NUM_IMAGE_TOKENS = (IMAGE_SIZE // PATCH_SIZE) ** 2

_WORDS = "a and at in is are what how many color shape shapes there the picture list choices"
_MARKS = ("\n\n", "\n", ",", ".", "?", ":", "<answer>", "</answer>")
_PATTERN = r"<answer>|</answer>|\n\n|\n|[A-D]\)|[,.?:]|[^\s,.?:<]+|<"

# Turns as in the converted Janus-Pro checkpoints: "<|User|>: text", two newlines, "<|Assistant|>: text" and the end of
# sentence; the generation prompt has no trailing space. A picture is the placeholder on a line of its own.
CHAT_TEMPLATE = """\
{%- macro turn(parts) -%}
{%- for part in parts -%}
{%- if part['type'] == 'image' -%}
{{ '' if loop.first else '\\n' }}<image_placeholder>{{ '' if loop.last else '\\n' }}
{%- else -%}
{%- set text = part['text'].lstrip() if loop.first else part['text'] -%}
{%- set text = text.rstrip() if loop.last else text -%}
{{ ' ' if loop.previtem is defined and loop.previtem['type'] == 'text' else '' }}{{ text }}
{%- endif -%}
{%- endfor -%}
{%- endmacro -%}
{%- for message in messages -%}
{%- set role = message['role'] | lower -%}
{%- set is_string = message['content'] is string -%}
{%- set body = turn([{'type': 'text', 'text': message['content']}] if is_string else message['content']) -%}
{%- if role == 'user' -%}
<|User|>:{{ ' ' + body }}
{%- elif role == 'assistant' -%}
<|Assistant|>:{{ '' if body == '' and loop.last and not add_generation_prompt else ' ' + body }}
{%- else -%}
{{ role | capitalize }}: {{ body }}
{%- endif -%}
{%- if not loop.last or add_generation_prompt -%}
{{ '\\n\\n' if role == 'user' else '<｜end▁of▁sentence｜>' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|Assistant|>:{%- endif -%}
"""


def vocabulary() -> list[str]:
    """All tokens in the order of their ids: special tokens, punctuation, then the words of the world."""
    parts = (*CELLS, *COLORS, *SHAPES, *PLURALS.values(), *NUMBERS, *RELATIONS, *DISTINCT, EMPTY, NO_OBJECTS)
    letters = [token for letter in LETTERS for token in (letter, f"{letter})")]
    words = [word for text in (*parts, _WORDS) for word in re.findall(_PATTERN, text)]
    return list(dict.fromkeys([*SPECIAL_TOKENS, *_MARKS, *letters, *words]))


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Word-level tokenizer that prepends the begin of sentence, pads left, and decodes to the text it was given."""
    tokens = {token: index for index, token in enumerate(vocabulary())}
    core = Tokenizer(models.WordLevel(tokens, unk_token=UNKNOWN))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(_PATTERN), behavior="removed", invert=True)
    core.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, tokens[BOS])]
    )
    # Words are joined by a space, which punctuation and newlines take back.
    joined = [decoders.Replace(before, after) for before, after in _spacing()]
    core.decoder = decoders.Sequence([decoders.WordPiece(prefix="##", cleanup=False), decoders.Fuse(), *joined])
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        unk_token=UNKNOWN,
        extra_special_tokens={
            "image_token": IMAGE_PLACEHOLDER,
            "boi_token": BEGIN_OF_IMAGE,
            "eoi_token": END_OF_IMAGE,
        },
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    )


def build_processor() -> JanusProcessor:
    """Processor of the tiny model: tokenizer, chat template, and pictures of 32x32 pixels scaled to [-1, 1]."""
    image_processor = JanusImageProcessor(
        size={"height": IMAGE_SIZE, "width": IMAGE_SIZE}, image_mean=[0.5] * 3, image_std=[0.5] * 3
    )
    return JanusProcessor(
        image_processor=image_processor,
        tokenizer=build_tokenizer(),
        chat_template=CHAT_TEMPLATE,
        use_default_system_prompt=False,  # its words are not in the vocabulary
        num_image_tokens=NUM_IMAGE_TOKENS,
    )


def build_config(tokenizer: PreTrainedTokenizerFast) -> JanusConfig:
    """Configuration of the tiny model (1.3 M parameters): language model, vision tower and image tokenizer."""
    width = 128
    text = {
        "model_type": "llama",
        "vocab_size": len(tokenizer),
        "hidden_size": width,
        "intermediate_size": 352,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
        **_special_ids(tokenizer),
    }
    vision = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": IMAGE_SIZE,
        "patch_size": PATCH_SIZE,
        "num_image_tokens": NUM_IMAGE_TOKENS,
        "projection_dim": width,
    }
    vq = {
        "embed_dim": 8,
        "num_embeddings": 128,
        "base_channels": 32,  # the model's GroupNorm(32) asks for multiples of 32
        "channel_multiplier": [1, 1, 1],
        "latent_channels": 32,
        "num_res_blocks": 1,
        "projection_dim": width,
        "image_token_embed_dim": width,
    }
    image_token_id = tokenizer.convert_tokens_to_ids(IMAGE_PLACEHOLDER)
    return JanusConfig(
        text_config=text,
        vision_config=vision,
        vq_config=vq,
        image_token_id=image_token_id,
        tie_word_embeddings=False,
        **_special_ids(tokenizer),
    )


def build_generation_config(tokenizer: PreTrainedTokenizerFast) -> GenerationConfig:
    """Generation defaults as in the converted checkpoints, but without guidance, as the tiny model is trained."""
    return GenerationConfig(
        **_special_ids(tokenizer),
        do_sample=True,
        temperature=1.0,
        guidance_scale=1.0,
        generation_kwargs={"boi_token_id": tokenizer.convert_tokens_to_ids(BEGIN_OF_IMAGE)},
    )


def _special_ids(tokenizer: PreTrainedTokenizerFast) -> dict[str, int]:
    names = ("pad_token_id", "bos_token_id", "eos_token_id")
    return {name: getattr(tokenizer, name) for name in names}


def _spacing() -> list[tuple[str, str]]:
    """Replacements that turn words joined by single spaces into plain text."""
    before = [(f" {mark}", mark) for mark in (",", ".", "?", ":", "\n")]
    return [*before, ("\n ", "\n"), ("<answer> ", "<answer>"), (" </answer>", "</answer>")]
