"""The 256 words of the trained model: what tasks are made of, and what its tokenizer reads and writes."""

from __future__ import annotations

from itertools import product
from typing import Final

SPECIAL: Final = ("<bos>", "<eos>", "<pad>", "<unk>", "?", "none")
BOS, EOS, PAD, UNKNOWN, ASK, NONE = range(len(SPECIAL))
"""``ASK`` stands before a key that is asked for; ``NONE`` is the answer where that key was never given a value."""

_FILLER = (
    "the a of to and in that it was for on with as at by from up out over under near far old new cold warm dark light "
    "sea sky road river stone tree house door window table bread water fire wind rain snow field hill town ship horse "
    "bird fish dog cat child woman man friend king story song word book name day night year hour hand eye heart head "
    "went came saw said took gave made found lost kept held stood ran sang slept home lamp sail wool"
)

KEY_WORDS: Final = tuple(
    map("".join, product("bdfgklmnprst", ("aro", "eni", "olu", "ima", "ubo", "ata", "eko", "ino")))
)
VALUE_WORDS: Final = tuple(str(number) for number in range(10, 74))
FILLER_WORDS: Final = tuple(_FILLER.split())

WORDS: Final = SPECIAL + KEY_WORDS + VALUE_WORDS + FILLER_WORDS
FIRST_KEY: Final = len(SPECIAL)
FIRST_VALUE: Final = FIRST_KEY + len(KEY_WORDS)
FIRST_FILLER: Final = FIRST_VALUE + len(VALUE_WORDS)
