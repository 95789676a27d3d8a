"""Streaming generation: pieces of text, sampling, the end of a text, and the artifacts that it opens."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from scone.artifacts import ArtifactBuilder, load_manifest
from scone.errors import IncompatibleArtifactError, MissingArtifactError
from scone.generation import TextGenerator, TextPieces
from scone.storage import Folder
from scone.table.layout import TableLayout
from scone.table.manifest import TableVersion
from scone.table.writer import ShardWriter, commit_version
from scone.vocabulary import FGramVocabulary

from ..tiny_run import VOCAB_SIZE, WIDTH, tiny_model, write_model, write_run

PROMPT = "w3 w22 w6 w43 w7"


def byte_tokenizer() -> Tokenizer:
    """One token per byte, so that characters of several bytes come in several tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def word_tokenizer() -> Tokenizer:
    words = ["<|endoftext|>", *(f"w{number}" for number in range(1, VOCAB_SIZE))]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token=words[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([words[0]])
    return tokenizer


def write_table(run: Folder, with_index: bool = True, model_fingerprint: str = "") -> None:
    """The fp32 table of the run's model and f-grams, as precompute makes it."""
    manifest, vocabulary = load_manifest(run / "model/scone"), FGramVocabulary.open(run / "fgrams")
    fgrams, model, folder = vocabulary.read(0, vocabulary.num_fgrams), tiny_model(), run / "table"
    with torch.no_grad():
        rows = model.fgram_embeddings(
            torch.from_numpy(fgrams.tokens.astype(np.int64)), torch.from_numpy(fgrams.lengths)
        )
    layout = TableLayout(WIDTH, "fp32")
    with ShardWriter(folder, layout, 0) as writer:
        writer.append(rows.numpy())
        shard = writer.publish()
    index = folder.write_bytes("index/i.bin", (run / "fgrams").read_bytes("match_index.bin")) if with_index else None
    version = TableVersion(
        width=WIDTH,
        dtype="fp32",
        stride_bytes=layout.stride_bytes,
        num_rows=len(rows),
        shards=(shard,),
        index=index,
        model_fingerprint=model_fingerprint or manifest.fingerprint,
        fgrams_fingerprint=vocabulary.manifest.fingerprint,
        tokenizer_fingerprint=manifest.tokenizer_fingerprint,
    )
    commit_version(folder, version)
    ArtifactBuilder(folder, kind="table", format=1, config={}, inputs={}).publish([], {}, {})


def make_run(folder: Path) -> Folder:
    """A run with a word tokenizer in its model, and no table yet."""
    run = Folder(folder)
    write_run(run)
    run.delete("model/scone")
    (run / "model/scone").write_bytes("tokenizer.json", word_tokenizer().to_str().encode())
    write_model(run / "model/scone", load_manifest(run / "sequences"), tiny_model(), final_loss=3.0)
    return run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """A finished run; tests read it only."""
    run = make_run(tmp_path_factory.mktemp("generation") / "run")
    write_table(run)
    return run


def test_table_and_f_gram_model_continue_a_text_alike_and_as_generate_does(run: Folder) -> None:
    texts = ["".join(TextGenerator.open(run, from_table=from_table).stream(PROMPT)) for from_table in (True, False)]
    assert texts[0] == texts[1]
    generator = TextGenerator.open(run)
    ids = torch.tensor([generator.tokenizer.encode(PROMPT).ids])
    output = generator.model.generate(ids, max_new_tokens=64, do_sample=False, eos_token_id=0, pad_token_id=0)
    expected = [token_id for token_id in output[0, ids.shape[1] :].tolist() if token_id]
    assert texts[0].split() == [f"w{token_id}" for token_id in expected]


def test_drawn_text_depends_on_the_seed_alone(run: Folder) -> None:
    generator = TextGenerator.open(run)
    texts = ["".join(generator.stream(PROMPT, max_tokens=20, temperature=1.0, seed=seed)) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_text_ends_at_max_tokens_or_at_the_end_of_text_token(run: Folder) -> None:
    generator = TextGenerator.open(run)
    ids = list(generator.stream_tokens([3, 4], 9))
    assert len(ids) == 9
    generator.model.config.eos_token_id = ids[4]
    assert list(generator.stream_tokens([3, 4], 9)) == ids[: ids.index(ids[4])]


def test_empty_prompt_starts_a_document(run: Folder) -> None:
    generator = TextGenerator.open(run)
    generator.model.config.eos_token_id = 0
    assert list(generator.stream("", max_tokens=3)) == list(generator.stream("<|endoftext|>", max_tokens=3))


def test_numbers_out_of_range_are_refused(run: Folder) -> None:
    generator = TextGenerator.open(run)
    for numbers in ({"max_tokens": 0}, {"temperature": -1.0}):
        with pytest.raises(ValueError, match="max_tokens must be at least 1 and temperature at least 0"):
            next(generator.stream(PROMPT, **numbers))


def test_baseline_continues_a_text_without_a_table(run: Folder, tmp_path: Path) -> None:
    plain = Folder(tmp_path / "plain")
    (plain / "model/baseline").write_bytes("tokenizer.json", word_tokenizer().to_str().encode())
    model = tiny_model(with_fgrams=False)
    write_model(plain / "model/baseline", load_manifest(run / "sequences"), model, final_loss=3.0)
    assert len("".join(TextGenerator.open(plain, variant="baseline").stream(PROMPT, max_tokens=5)).split()) <= 5


def test_missing_or_foreign_artifacts_are_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    with pytest.raises(MissingArtifactError, match="no finished table artifact"):
        TextGenerator.open(run)
    write_table(run, model_fingerprint="other")
    with pytest.raises(IncompatibleArtifactError, match="was made from model other"):
        TextGenerator.open(run)
    run.delete("table")
    write_table(run, with_index=False)
    with pytest.raises(IncompatibleArtifactError, match="has no match index; rebuild it"):
        TextGenerator.open(run)
    with pytest.raises(MissingArtifactError, match="no finished model artifact"):
        TextGenerator.open(Folder(tmp_path / "nothing"))


@pytest.mark.parametrize("text", ["plain words", "naïve café – 東京 🎉 done", "🎉🎉"])
def test_pieces_are_whole_characters_that_make_up_the_text(text: str) -> None:
    tokenizer = byte_tokenizer()
    pieces = TextPieces(tokenizer)
    pushed = [pieces.push(token_id) for token_id in tokenizer.encode(text).ids]
    assert "".join(pushed) == text
    assert "\ufffd" not in "".join(pushed)
    assert pieces.rest() == ""


def test_bytes_of_an_unfinished_character_come_at_the_end() -> None:
    tokenizer = byte_tokenizer()
    pieces = TextPieces(tokenizer)
    assert [pieces.push(token_id) for token_id in tokenizer.encode("a🎉").ids[:-1]] == ["a", "", "", ""]
    assert set(pieces.rest()) == {"\ufffd"}
