"""The tokenizer of a run: one Hugging Face `tokenizer.json`, given or trained, with an end-of-text token."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from scone.errors import ConfigError

END_OF_TEXT = "<|endoftext|>"
MIN_TRAINED_VOCAB_SIZE = 257  # every byte, and the end-of-text token

# Names that published tokenizers give to the token that ends a text.
_KNOWN_ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "[EOS]")


@dataclass(frozen=True)
class TokenizerFile:
    """A `tokenizer.json` that has an end-of-text token, and what the other stages need to know about it."""

    content: bytes
    """The file's bytes; its SHA-256 is the fingerprint that all later artifacts carry."""
    end_of_text_token: str

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """For document text: special tokens written out in a text are text, nothing is added, cut or padded."""
        tokenizer = Tokenizer.from_str(self.content.decode())
        tokenizer.encode_special_tokens = True
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer

    @cached_property
    def token_vocab_size(self) -> int:
        """One more than the highest id."""
        return max(self.tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    @property
    def end_of_text_id(self) -> int:
        return self.tokenizer.get_vocab(with_added_tokens=True)[self.end_of_text_token]

    @property
    def special_ids(self) -> tuple[int, ...]:
        """Ids that never belong to an f-gram, the end of text among them, ascending."""
        flagged = {i for i, token in self.tokenizer.get_added_tokens_decoder().items() if token.special}
        return tuple(sorted(flagged | {self.end_of_text_id}))

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, without special tokens. Uses one core: the caller runs many side by side."""
        with _one_thread():
            return [encoding.ids for encoding in self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)]


def open_tokenizer(content: bytes, where: str, end_of_text_token: str = "") -> TokenizerFile:
    """A given `tokenizer.json`, with `<|endoftext|>` added if it has no end-of-text token of its own.

    Args:
        end_of_text_token: The token to use; "" looks for the usual names.

    Raises:
        ConfigError: `content` is not a tokenizer, or it has no such token.
    """
    try:
        tokenizer = Tokenizer.from_str(content.decode())
    except Exception as error:  # the library raises bare Exception
        reason = str(error).splitlines()[0][:200]
        raise ConfigError(
            f"{where} is not a Hugging Face tokenizer.json ({reason}); give the file that has one"
        ) from error
    if end_of_text_token:
        if tokenizer.token_to_id(end_of_text_token) is None:
            raise ConfigError(
                f"tokenizer {where} has no token {end_of_text_token!r}; leave tokenize.end_of_text_token empty "
                f"to use its own, or to add {END_OF_TEXT}"
            )
        return TokenizerFile(content, end_of_text_token)
    for name in _KNOWN_ENDS:
        if tokenizer.token_to_id(name) is not None:
            return TokenizerFile(content, name)
    tokenizer.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    return TokenizerFile(tokenizer.to_str().encode(), END_OF_TEXT)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> TokenizerFile:
    """A byte-level BPE of at most `vocab_size` tokens; the same texts make the same bytes.

    Raises:
        ValueError: `vocab_size` has no room for every byte and the end-of-text token.
    """
    if vocab_size < MIN_TRAINED_VOCAB_SIZE:
        raise ValueError(f"vocab_size must be at least {MIN_TRAINED_VOCAB_SIZE}, got {vocab_size}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return TokenizerFile(tokenizer.to_str(pretty=True).encode(), END_OF_TEXT)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """The library reads this variable at each call."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
