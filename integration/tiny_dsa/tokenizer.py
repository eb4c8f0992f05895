"""A byte-level tokenizer: every text has a tokenization, one token a UTF-8 byte, and decoding gives the text back.

Ids: three special tokens, 256 bytes (id = byte + 3), then syllables up to the vocabulary size. Encoding never produces
a syllable (there are no merges); a model may generate them, which makes random text readable.
"""

from __future__ import annotations

from enum import IntEnum
from itertools import islice, product
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from integration.tiny_dsa import dimensions as dim

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


class SpecialToken(IntEnum):
    """Ids of the special tokens."""

    BOS = 0
    EOS = 1
    PAD = 2

    @property
    def role(self) -> str:
        """``bos``, ``eos`` or ``pad``, as configuration keys spell it."""
        return self.name.lower()

    @property
    def text(self) -> str:
        """The token as it stands in the vocabulary."""
        return f"<{self.role}>"


FIRST_BYTE = len(SpecialToken)
FIRST_SYLLABLE = FIRST_BYTE + 256


def build_tokenizer() -> Tokenizer:
    """The tokenizer, as ``tokenizer.json`` holds it."""
    vocabulary = {text: token for token, text in enumerate(_vocabulary())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token.text, special=True) for token in SpecialToken])
    return tokenizer


def tokenizer_config() -> dict[str, Any]:
    """``tokenizer_config.json``: what ``transformers`` adds around ``tokenizer.json``."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": dim.MAX_POSITION,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    } | {f"{token.role}_token": token.text for token in SpecialToken}


def readable_tokens() -> list[int]:
    """Ids that decode to printable ASCII on their own, in any order and number."""
    return [FIRST_BYTE + byte for byte in range(0x20, 0x7F)] + list(range(FIRST_SYLLABLE, dim.VOCABULARY))


def _vocabulary() -> list[str]:
    letters = _byte_letters()
    syllables = islice(map("".join, product("bdfgklmnprstvz", "aeiou", ("", "n", "r ", "s "))), dim.VOCABULARY)
    spelled = ("".join(letters[byte] for byte in syllable.encode()) for syllable in syllables)
    tokens = [token.text for token in SpecialToken] + letters + list(spelled)
    return tokens[: dim.VOCABULARY]


def _byte_letters() -> list[str]:
    """The character that stands for each byte in a byte-level vocabulary (the mapping GPT-2 introduced).

    Bytes that are visible in Latin-1 stand for themselves, the others for the characters from U+0100 on.
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = iter(range(0x100, 0x200))
    return [chr(byte if byte in visible else next(hidden)) for byte in range(256)]
