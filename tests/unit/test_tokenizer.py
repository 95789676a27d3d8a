"""Tokenizers: trained ones are reproducible, given ones keep their bytes, and text never becomes a special token."""

import json

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from scone.errors import ConfigError
from scone.tokenizer import END_OF_TEXT, TokenizerFile, open_tokenizer, train_tokenizer

TEXTS = ["the cat sat on the mat", "the dog sat on the log", "ein Käfer saß auf der Matte"] * 5


def _word_tokenizer(*special: str) -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "b": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in special])
    return tokenizer


def _open(tokenizer: Tokenizer, end_of_text_token: str = "") -> TokenizerFile:
    return open_tokenizer(tokenizer.to_str().encode(), "t.json", end_of_text_token)


def test_the_same_texts_train_the_same_bytes() -> None:
    first, second = train_tokenizer(TEXTS, 300), train_tokenizer(iter(TEXTS), 300)
    assert first.content == second.content
    assert first.fingerprint == second.fingerprint


def test_trained_tokenizer_has_every_byte_and_the_end_of_text() -> None:
    made = train_tokenizer(TEXTS, 300)
    text = "any text: 日本語 \x00\n\t ß"
    (ids,) = made.encode([text])
    assert made.tokenizer.decode(ids) == text
    assert (made.end_of_text_token, made.end_of_text_id, made.special_ids) == (END_OF_TEXT, 0, (0,))
    assert 257 < made.token_vocab_size <= 300


def test_little_text_makes_a_smaller_vocabulary() -> None:
    assert train_tokenizer(["ab"], 1000).token_vocab_size < 300


def test_vocabulary_without_room_for_every_byte_is_refused() -> None:
    with pytest.raises(ValueError, match="vocab_size must be at least 257, got 256"):
        train_tokenizer(TEXTS, 256)


def test_special_tokens_written_in_a_text_are_text() -> None:
    made = train_tokenizer([*TEXTS, END_OF_TEXT], 300)
    (ids,) = made.encode([f"the{END_OF_TEXT}cat"])
    assert made.end_of_text_id not in ids
    assert made.tokenizer.decode(ids) == f"the{END_OF_TEXT}cat"


def test_given_tokenizer_with_its_own_end_keeps_its_bytes() -> None:
    given = _word_tokenizer("<pad>", "</s>")
    made = _open(given)
    assert made.content == given.to_str().encode()
    assert made.end_of_text_token == "</s>"
    assert made.special_ids == (3, 4)
    assert made.token_vocab_size == 5


def test_given_tokenizer_without_an_end_gets_one() -> None:
    made = _open(_word_tokenizer("<pad>"))
    assert (made.end_of_text_token, made.end_of_text_id) == (END_OF_TEXT, 4)
    assert made.special_ids == (3, 4)
    assert _open(made.tokenizer).end_of_text_id == 4


def test_named_end_of_text_is_special_even_if_not_flagged() -> None:
    made = _open(_word_tokenizer(), "b")
    assert (made.end_of_text_id, made.special_ids) == (2, (2,))


def test_named_end_of_text_must_exist() -> None:
    with pytest.raises(
        ConfigError, match=r"tokenizer t\.json has no token '<stop>'; leave tokenize\.end_of_text_token"
    ):
        _open(_word_tokenizer(), "<stop>")


def test_truncation_and_padding_of_the_file_do_not_touch_documents() -> None:
    given = _word_tokenizer("</s>")
    given.enable_truncation(2)
    given.enable_padding(length=5)
    assert _open(given).encode(["a b a b", "a"]) == [[1, 2, 1, 2], [1]]


@pytest.mark.parametrize("content", [b"not json", b"\xff\xfe", json.dumps({"model": 1}).encode()])
def test_file_that_is_not_a_tokenizer_is_refused(content: bytes) -> None:
    with pytest.raises(ConfigError, match=r"t\.json is not a Hugging Face tokenizer\.json \(.+\)"):
        open_tokenizer(content, "t.json")
