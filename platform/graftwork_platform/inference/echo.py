"""Where each token of a repeated prompt lies in the text as its client sent it. Knows no requests."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from graftwork_platform.text.detokenizer import new_detokenizer
from graftwork_platform.text.tokenizer import Tokenizer


def text_offsets(tokenizer: Tokenizer, ids: Sequence[int], text: str) -> list[int]:
    """Characters of ``text`` before each of ``ids``, which are what the tokenizer makes of it, its own BOS and EOS included.

    Tokens spell their text exactly, special ones too, unless the pipeline normalises it; then they lie where the pipeline says,
    which may count a token's space to its predecessor. Offsets never fall.
    """
    end = len(ids) - tokenizer.num_trailing
    detokenizer = new_detokenizer(tokenizer, skip_special_tokens=False)
    pieces = [detokenizer.push(token_id) for token_id in ids[tokenizer.num_leading : end]]
    if "".join(pieces) + detokenizer.flush() == text:
        offsets = list(accumulate(map(len, pieces[:-1]), initial=0)) if pieces else []
    else:
        offsets = list(accumulate(tokenizer.find_offsets(text), max))
    return [0] * tokenizer.num_leading + offsets + [len(text)] * tokenizer.num_trailing
