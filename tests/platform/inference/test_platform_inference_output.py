"""An output as its client gets it: text, tokens, log-probabilities and bill agree, however the engine's items are cut."""

from __future__ import annotations

import math

import msgspec
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from graftwork_engine.messages import OutItem, TokenLogprob
from graftwork_engine.request import FinishReason
from graftwork_platform.inference.output import Delta, OutputText, StopRule, join
from graftwork_platform.text.tokenizer import Tokenizer


def byte_level() -> Tokenizer:
    """Tokens of one to three bytes, many of them parts of a character."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=290, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["</s>"], show_progress=False
    )
    backend.train_from_iterator(["hello world 日本語 🎉🎉 été"] * 5, trainer)
    return Tokenizer(backend, {"eos_token": "</s>"})


def byte_fallback() -> Tokenizer:
    """SentencePiece's kind: a token's text depends on its neighbours."""
    words = ["<unk>", "</s>", "▁", "▁hello", "lo", "a", "é", "▁日", *(f"<0x{byte:02X}>" for byte in range(256))]
    backend = tokenizers.Tokenizer(models.BPE({w: i for i, w in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "</s>"])
    return Tokenizer(backend, {"eos_token": "</s>"})


BYTE_LEVEL = byte_level()
BYTE_FALLBACK = byte_fallback()
EOS = BYTE_LEVEL.token_id("</s>") or 0
WORDS = st.sampled_from(["hello", " world", "日", "本語", "🎉", "é", "a", "\n\n", "ll", "o w"])
TEXTS = st.lists(WORDS, max_size=8).map("".join)
STOPS = st.lists(st.sampled_from(["l", "lo", "llo w", "日", "本", "語🎉", "🎉🎉", "é", "\n", "\n\n", "hello w"]), max_size=4)


def single_bytes(text: str) -> list[int]:
    """A token for each byte."""
    return [next(i for i in range(BYTE_LEVEL.vocab_size) if BYTE_LEVEL.token_bytes(i) == bytes([b])) for b in text.encode()]


def items_of(ids: list[int], sizes: list[int], finish: str) -> list[OutItem]:
    """The engine's items: as many tokens each as ``sizes`` says, then one each; the last has the finish."""
    items, start = [], 0
    while start < len(ids):
        size = sizes.pop(0) if sizes else 1
        part = ids[start : start + size]
        logprobs = [TokenLogprob(-0.5 * place, (token_id,), (-0.5 * place,)) for place, token_id in enumerate(part, start)]
        items.append(OutItem("r", start, part, logprobs, finish=finish if start + size >= len(ids) else None))
        start += size
    return items


def without_logprobs(items: list[OutItem]) -> list[OutItem]:
    """What nearly all requests get, which is read in a shorter way."""
    return [msgspec.structs.replace(item, logprobs=None) for item in items]


def deltas_of(output: OutputText, items: list[OutItem]) -> list[Delta]:
    """As a client gets them: nothing is taken behind the finish."""
    deltas: list[Delta] = []
    for item in items:
        deltas.append(output.take(item))
        if output.is_finished:
            break
    return deltas


def expected(ids: list[int], finish: str, rule: StopRule) -> tuple[str, int, FinishReason]:
    """From the decoding of all tokens: the text, the tokens to be billed, and the finish."""
    words = ids[:-1] if finish == "stop" else ids
    text = BYTE_LEVEL.decode(words)
    # Where each token's text ends: incomplete characters at an end are no text yet, but the very end takes them as they are.
    ends = [len(BYTE_LEVEL.decode(words[:count]).rstrip("\ufffd")) for count in range(len(words))] + [len(text)]
    for end in range(1, len(text) + 1):
        complete = [stop for stop in rule.strings if text[:end].endswith(stop)]
        billed = next(count for count, reached in enumerate(ends) if reached >= end)
        if complete and billed >= rule.min_tokens:
            return text[: end if rule.include else end - max(map(len, complete))], billed, FinishReason.STOP
    return text, len(ids), FinishReason(finish)


@settings(max_examples=200, deadline=None)
@given(TEXTS, st.integers(0, 3), st.lists(st.integers(1, 5), max_size=12), STOPS, st.booleans(), st.integers(0, 6), st.booleans())
def test_streamed_whole_and_reference_agree(
    text: str, cut_bytes: int, sizes: list[int], stops: list[str], include: bool, min_tokens: int, ends_by_token: bool
) -> None:
    ids = BYTE_LEVEL.encode(text)
    ids = ids[: len(ids) - cut_bytes] if cut_bytes < len(ids) else ids  # perhaps in the middle of a character
    finish = "stop" if ends_by_token else "length"
    ids = [*ids, EOS] if ends_by_token else ids
    if not ids:
        return
    rule = StopRule(tuple(dict.fromkeys(stops)), include, min_tokens)
    output = OutputText(BYTE_LEVEL, rule)
    streamed = deltas_of(output, items_of(ids, list(sizes), finish))
    whole = deltas_of(OutputText(BYTE_LEVEL, rule), items_of(ids, [len(ids)], finish))
    plain = deltas_of(OutputText(BYTE_LEVEL, rule), without_logprobs(items_of(ids, list(sizes), finish)))
    left, billed, reason = expected(ids, finish, rule)

    assert [(delta.text, delta.token_ids, delta.finish) for delta in plain] == [(d.text, d.token_ids, d.finish) for d in streamed]
    assert "".join(delta.text for delta in streamed) == join(whole).text == left
    assert join(streamed) == join(whole)
    assert output.num_tokens == len(join(streamed).token_ids) == billed
    assert join(streamed).token_ids == ids[:billed]
    assert [token.token_id for token in join(streamed).tokens or ()] == ids[:billed]
    assert [delta.finish for delta in streamed] == [None] * (len(streamed) - 1) + [reason]
    assert [delta.is_first for delta in streamed] == [True] + [False] * (len(streamed) - 1)
    shown = "".join(delta.text for delta in streamed[:-1])
    assert "\ufffd" not in shown
    assert left.startswith(shown)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.sampled_from(["▁hello", "lo", "a", "é", "▁日", "☃", "</s>"]), min_size=1, max_size=10),
    st.lists(st.sampled_from(["lo", "hello", " 日", "☃", "a☃", "é"]), max_size=3),
    st.lists(st.integers(1, 4), max_size=8),
)
def test_tokenizers_that_look_at_neighbours(parts: list[str], stops: list[str], sizes: list[int]) -> None:
    ids: list[int] = []
    for part in parts:
        known = BYTE_FALLBACK.token_id(part)
        ids += [BYTE_FALLBACK.token_id(f"<0x{byte:02X}>") or 0 for byte in part.encode()] if known is None else [known]
    rule = StopRule(tuple(dict.fromkeys(stops)))
    streamed = deltas_of(OutputText(BYTE_FALLBACK, rule), items_of(ids, list(sizes), "length"))
    text = BYTE_FALLBACK.decode(ids)
    ends = sorted((text.find(stop) + len(stop), -len(stop)) for stop in stops if stop in text)
    assert join(streamed).text == (text[: ends[0][0] + ends[0][1]] if ends else text)
    assert "\ufffd" not in "".join(delta.text for delta in streamed)


def test_a_stop_string_over_token_borders_is_never_shown() -> None:
    ids = [i for word in ("hello", " w", "orl", "d", " hello") for i in BYTE_LEVEL.encode(word)]
    output = OutputText(BYTE_LEVEL, StopRule((" world",)))
    deltas = deltas_of(output, items_of(ids, [], "length"))
    assert [delta.text for delta in deltas if delta.text] == ["hello"]
    assert deltas[0].text == "hello", "what cannot become the stop is sent at once"
    assert deltas[-1].finish is FinishReason.STOP
    assert BYTE_LEVEL.decode(ids[: output.num_tokens]) == "hello world"


@pytest.mark.parametrize("finish", ["length", "stop"])
def test_held_text_is_not_lost_at_the_end(finish: str) -> None:
    """The text ends with the beginning of a stop string."""
    ids = BYTE_LEVEL.encode("hello wor")
    deltas = deltas_of(
        OutputText(BYTE_LEVEL, StopRule((" world",))), items_of([*ids, EOS] if finish == "stop" else ids, [], finish)
    )
    assert join(deltas).text == "hello wor"
    assert deltas[-1].finish is FinishReason(finish)


def test_a_token_behind_the_stop_in_the_same_item_is_no_output() -> None:
    ids = BYTE_LEVEL.encode("a\n\na")
    delta = OutputText(BYTE_LEVEL, StopRule(("\n",))).take(items_of(ids, [len(ids)], "length")[0])
    assert (delta.text, delta.finish) == ("a", FinishReason.STOP)
    assert delta.token_ids == ids[: BYTE_LEVEL.decode(delta.token_ids).count("\n") + 1]
    assert len(delta.tokens or ()) == len(delta.token_ids) < len(ids)


def test_a_stop_inside_a_character_of_several_tokens() -> None:
    ids = single_bytes("é☃")
    deltas = deltas_of(OutputText(BYTE_LEVEL, StopRule(("☃",))), items_of(ids, [], "length"))
    assert [delta.text for delta in deltas] == ["", "é", "", "", ""]
    assert deltas[-1].finish is FinishReason.STOP


def test_a_repeated_prompt_is_searched_for_nothing_and_goes_on_into_the_output() -> None:
    snowman = single_bytes("☃")
    prompt, ids = [EOS, *BYTE_LEVEL.encode("hello"), snowman[0]], [*snowman[1:], *BYTE_LEVEL.encode("a")]
    scores = [None, *(TokenLogprob(-1.0, (3,), (-0.5,)) for _ in prompt[1:])]
    output = OutputText(BYTE_LEVEL, StopRule(("ello", "a")), echo=prompt, index=3)
    first, *others = items_of(ids, [], "length")
    first = OutItem("r", 0, first.token_ids, first.logprobs, prompt_logprobs=scores)
    delta = join(deltas_of(output, [first, *others]))
    assert (delta.text, delta.finish, delta.index) == ("hello☃", FinishReason.STOP, 3)
    assert delta.token_ids == ids
    assert delta.tokens is not None
    assert [token.token_id for token in delta.tokens] == prompt + ids
    assert [token.logprob for token in delta.tokens[:2]] == [None, -1.0]
    offsets = [token.offset for token in delta.tokens]
    assert offsets[:2] == [0, 0]
    assert offsets[-3:] == [5, 5, 6]


def scored(ids: list[int]) -> list[TokenLogprob | None]:
    return [None, *(TokenLogprob(-1.0) for _ in ids[1:])]


@pytest.mark.parametrize("text", ["hello</s>\nhello ☃</s>", "</s>", "é�", "日本語🎉"])
def test_a_repeated_text_is_exact_and_its_offsets_point_into_it(text: str) -> None:
    prompt = BYTE_LEVEL.encode(text)
    first, *others = items_of(BYTE_LEVEL.encode(" world"), [], "length")
    first = OutItem("r", 0, first.token_ids, first.logprobs, scored(prompt))
    delta = join(deltas_of(OutputText(BYTE_LEVEL, echo=prompt, echo_text=text), [first, *others]))
    assert delta.text == text + " world"
    tokens = delta.tokens or ()
    assert [token.token_id for token in tokens[: len(prompt)]] == prompt
    assert tokens[len(prompt)].offset == len(text)
    whole = [token for token in tokens if not BYTE_LEVEL.token_text(token.token_id).startswith("bytes:")]
    assert all(delta.text[token.offset :].startswith(BYTE_LEVEL.token_text(token.token_id)) for token in whole)


def test_offsets_into_a_text_that_is_normalised_stay_in_step_with_it() -> None:
    """And the output's first space is not lost, as it would be at the beginning of a text."""
    backend = tokenizers.Tokenizer.from_str(BYTE_FALLBACK._backend.to_str())
    backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.post_processor = processors.TemplateProcessing(single="</s> $A </s>", special_tokens=[("</s>", 1)])
    tokenizer = Tokenizer(backend, {"eos_token": "</s>"})
    text = "A é</s>Aa"
    prompt = tokenizer.encode(text)
    assert (tokenizer.num_leading, tokenizer.num_trailing) == (1, 1)
    item = OutItem("r", 0, [tokenizer.token_id("▁hello") or 0], [TokenLogprob(0.0)], scored(prompt), finish="length")
    delta = OutputText(tokenizer, echo=prompt, echo_text=text).take(item)
    assert delta.text == "A é</s>Aa hello"
    offsets = [token.offset for token in delta.tokens or ()]
    assert len(offsets) == len(prompt) + 1
    assert offsets == sorted(offsets)
    by_token = {token.token_id: token.offset for token in (delta.tokens or ())[1:-2]}
    assert by_token[tokenizer.token_id("é") or 0] == text.index("é")
    assert by_token[1] == text.index("</s>")
    assert offsets[-2:] == [len(text), len(text)]


def test_impossible_tokens_have_a_logprob_that_json_can_write() -> None:
    entry = TokenLogprob(-math.inf, (1, 2), (-math.inf, math.nan))
    [token] = OutputText(BYTE_LEVEL).take(OutItem("r", 0, [5], [entry])).tokens or ()
    assert (token.logprob, token.top) == (-9999.0, ((1, -9999.0), (2, -9999.0)))
