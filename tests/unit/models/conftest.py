"""Tiny SCONE models, and f-grams that their random texts are full of."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from scone.matching import MatchIndex
from scone.models import SconeConfig, SconeForCausalLM
from scone.storage import Folder
from scone.table.layout import TableDtype, TableLayout
from scone.table.manifest import TableVersion
from scone.table.reader import EmbeddingTable
from scone.table.writer import ShardWriter, commit_version

VOCAB, K, WIDTH = 24, 4, 32
SPECIAL = 0

BuildModel = Callable[..., SconeForCausalLM]
BuildTable = Callable[..., EmbeddingTable]


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Tiny matrices: more threads cost time on a busy machine, and their number decides the last bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass(frozen=True)
class FGramSet:
    """f-grams of a random text in rank order, and their index."""

    tokens: np.ndarray
    lengths: np.ndarray
    index: MatchIndex

    def text(self, num_tokens: int, seed: int) -> torch.Tensor:
        """Another text of the same kind [1, T]."""
        return torch.tensor([random_text(num_tokens, seed)])

    def match_length(self, token_ids: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(self.index.match_batch(token_ids.numpy()).length)


def random_text(num_tokens: int, seed: int) -> list[int]:
    """Tokens of a Markov chain with few successors, so that n-grams repeat."""
    generator = np.random.default_rng(seed)
    text = [1]
    while len(text) < num_tokens:
        text.append(1 + (3 * text[-1] + int(generator.integers(0, 3))) % (VOCAB - 1))
    return text


def rank_fgrams(texts: Sequence[Sequence[int]], num_fgrams: int) -> list[tuple[int, ...]]:
    counts = Counter(
        tuple(text[start : start + length])
        for text in texts
        for length in range(2, K + 1)
        for start in range(len(text) - length + 1)
    )
    return sorted(counts, key=lambda ngram: (-counts[ngram], len(ngram), ngram))[:num_fgrams]


@pytest.fixture(scope="session")
def fgrams() -> FGramSet:
    ranked = rank_fgrams([random_text(600, 0)], 120)
    tokens = np.zeros((len(ranked), K), np.uint32)
    for row, ngram in enumerate(ranked):
        tokens[row, : len(ngram)] = ngram
    lengths = np.array([len(ngram) for ngram in ranked], np.uint8)
    return FGramSet(tokens, lengths, MatchIndex.build(tokens, lengths, token_vocab_size=VOCAB, special_ids=[SPECIAL]))


@pytest.fixture
def make_llama() -> Callable[..., LlamaConfig]:
    return llama


def llama(width: int = WIDTH, layers: int = 2, tie: bool = True) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tie,
        bos_token_id=None,
        eos_token_id=SPECIAL,
    )


@pytest.fixture
def build_model() -> BuildModel:
    """A model with everything in it different from where it starts, so that nothing is the identity by chance."""

    def build(seed: int = 0, fgram_width: int = WIDTH, tie: bool = True, **settings: object) -> SconeForCausalLM:
        torch.manual_seed(seed)
        options = {"max_fgram_length": K, "residual_init": "normal", **settings}
        fgram_config = llama(fgram_width, layers=1) if options["max_fgram_length"] else None
        model = SconeForCausalLM(SconeConfig(llama(tie=tie), fgram_config, **options)).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape) * 0.1)
        return model

    return build


@pytest.fixture
def build_table(tmp_path: Path, fgrams: FGramSet) -> BuildTable:
    """The real table of all f-grams of a model, or of the first `num_rows`."""

    def build(model: SconeForCausalLM, dtype: TableDtype = "fp32", num_rows: int | None = None) -> EmbeddingTable:
        num_rows = len(fgrams.tokens) if num_rows is None else num_rows
        with torch.no_grad():
            rows = model.fgram_embeddings(
                torch.from_numpy(fgrams.tokens[:num_rows].astype(np.int64)), torch.from_numpy(fgrams.lengths[:num_rows])
            )
        folder, layout = Folder(tmp_path / f"table-{dtype}-{num_rows}"), TableLayout(model.config.hidden_size, dtype)
        with ShardWriter(folder, layout, 0) as writer:
            writer.append(rows.numpy())
            shards = (writer.publish(),)
        version = TableVersion(
            width=layout.width,
            dtype=dtype,
            stride_bytes=layout.stride_bytes,
            num_rows=num_rows,
            shards=shards,
            index=None,
            model_fingerprint="model",
            fgrams_fingerprint="fgrams",
            tokenizer_fingerprint="tokenizer",
        )
        commit_version(folder, version)
        return EmbeddingTable.open(folder)

    return build
