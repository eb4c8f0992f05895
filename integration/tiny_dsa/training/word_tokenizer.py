"""The trained model's tokenizer: one token a word, ``<bos>`` in front, unknown words as ``<unk>``."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors

from integration.tiny_dsa import dimensions as dim
from integration.tiny_dsa.training.vocabulary import BOS, SPECIAL, UNKNOWN, WORDS

CHAT_TEMPLATE = "{{ bos_token }}{% for message in messages %} {{ message['content'] }}{% endfor %}"
"""No roles: the model has no words for them."""
BRACKETED = [word for word in SPECIAL if word.startswith("<")]


def build_word_tokenizer() -> Tokenizer:
    """The tokenizer, as ``tokenizer.json`` holds it; it decodes to words with a space between them."""
    vocabulary = {word: token for token, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIAL[UNKNOWN]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{SPECIAL[BOS]} $A", special_tokens=[(SPECIAL[BOS], BOS)]
    )
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in BRACKETED])
    return tokenizer


def word_tokenizer_config() -> dict[str, Any]:
    """``tokenizer_config.json``: what ``transformers`` adds around ``tokenizer.json``."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": dim.MAX_POSITION,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    } | {f"{word.strip('<>')}_token": word for word in BRACKETED}
