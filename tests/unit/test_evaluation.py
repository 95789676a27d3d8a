import math
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from scone.evaluation import (
    LOGITS_TOLERANCE,
    LossSums,
    Measurement,
    Parity,
    RowsInMemory,
    count_parameters,
    fgrams_in_batch,
    measure_lookup,
    measure_plain,
    measure_scone,
    token_losses,
)
from scone.matching import MatchIndex
from scone.storage import Folder
from scone.table.layout import TableDtype, TableLayout
from scone.table.manifest import TableVersion
from scone.table.reader import EmbeddingTable
from scone.table.writer import ShardWriter, commit_version

from ..tiny_run import (
    END_OF_TEXT,
    WIDTH,
    match_index_of,
    most_frequent_fgrams,
    random_stream,
    tiny_model,
)

NUM_FGRAMS = 300
# Losses are means of float32 logits that were summed in another order.
LOSS_TOLERANCE = 1e-5

FGRAMS = most_frequent_fgrams(random_stream(0), NUM_FGRAMS)


@pytest.fixture(scope="module")
def index() -> MatchIndex:
    return match_index_of(FGRAMS)


@pytest.fixture
def token_ids() -> NDArray[np.int64]:
    return random_stream(1)[:250].reshape(5, 50)


def write_table(folder: Folder, dtype: TableDtype, num_rows: int = NUM_FGRAMS) -> EmbeddingTable:
    """The table of the tiny model's first ranks."""
    layout = TableLayout(WIDTH, dtype)
    tokens, lengths = FGRAMS.tokens[:num_rows].astype(np.int64), FGRAMS.lengths[:num_rows]
    with torch.inference_mode(), ShardWriter(folder, layout, 0) as writer:
        writer.append(tiny_model().fgram_embeddings(torch.from_numpy(tokens), torch.from_numpy(lengths)).numpy())
        shard = writer.publish()
    commit_version(
        folder,
        TableVersion(
            width=WIDTH,
            dtype=dtype,
            stride_bytes=layout.stride_bytes,
            num_rows=num_rows,
            shards=(shard,),
            index=None,
            model_fingerprint="model",
            fgrams_fingerprint="fgrams",
            tokenizer_fingerprint="tokenizer",
        ),
    )
    return EmbeddingTable.open(folder)


def test_loss_is_that_of_the_model_itself(token_ids: NDArray[np.int64], index: MatchIndex) -> None:
    model = tiny_model(with_fgrams=False)
    measured = measure_plain(model, token_ids, index, NUM_FGRAMS).losses["baseline"]
    ids = torch.from_numpy(token_ids)
    expected = model(input_ids=ids, labels=ids).loss.item()
    assert measured.loss == pytest.approx(expected, rel=LOSS_TOLERANCE)
    assert measured.perplexity == pytest.approx(math.exp(expected), rel=1e-4)
    assert measured.num_tokens == 5 * 49


def test_losses_count_under_the_match_of_the_position_that_predicts(
    token_ids: NDArray[np.int64], index: MatchIndex
) -> None:
    model = tiny_model(with_fgrams=False)
    measured = measure_plain(model, token_ids, index, NUM_FGRAMS).losses["baseline"]
    lengths = index.match_batch(token_ids[:, :-1]).length
    with torch.inference_mode():
        logits = model(input_ids=torch.from_numpy(token_ids[:, :-1])).logits
    losses = token_losses(logits, torch.from_numpy(token_ids[:, 1:])).numpy()
    for n in (0, 2, 3, 4):
        assert measured.tokens[n] == (lengths == n).sum() > 0
        assert measured.loss_by_length()[n] == pytest.approx(losses[lengths == n].mean(), rel=LOSS_TOLERANCE)
    assert measured.loss_by_length()[1] is None


@pytest.mark.parametrize("fusion", ["replace", "add", "gated"])
def test_float32_table_and_f_gram_model_give_the_same_logits(
    tmp_path: Path, token_ids: NDArray[np.int64], index: MatchIndex, fusion: str
) -> None:
    table = write_table(Folder(tmp_path), "fp32")
    measured = measure_scone(tiny_model(fusion=fusion), token_ids, index, table, check_fp32=True)
    for parity in measured.parity.values():
        assert parity.positions == 5 * 49
        assert parity.is_within("fp32"), parity.relative_difference
    assert measured.losses["scone_table"].loss == pytest.approx(
        measured.losses["scone_fgram_model"].loss, rel=LOSS_TOLERANCE
    )


def test_bf16_table_is_within_rounding_and_not_exact(
    tmp_path: Path, token_ids: NDArray[np.int64], index: MatchIndex
) -> None:
    table = write_table(Folder(tmp_path), "bf16")
    parity = measure_scone(tiny_model(), token_ids, index, table, check_fp32=False).parity
    assert list(parity) == ["stored"]
    assert parity["stored"].is_within("bf16"), parity["stored"].relative_difference
    assert not parity["stored"].is_within("fp32")


def test_the_table_of_another_model_is_out_of_tolerance(
    tmp_path: Path, token_ids: NDArray[np.int64], index: MatchIndex
) -> None:
    table = write_table(Folder(tmp_path), "bf16")
    parity = measure_scone(tiny_model(seed=1), token_ids, index, table, check_fp32=True).parity
    assert not parity["stored"].is_within("bf16")
    assert parity["fp32"].is_within("fp32")


def test_a_smaller_table_is_measured_with_the_matches_it_serves(
    tmp_path: Path, token_ids: NDArray[np.int64], index: MatchIndex
) -> None:
    table = write_table(Folder(tmp_path), "fp32", num_rows=40)
    measured = measure_scone(tiny_model(), token_ids, index, table, check_fp32=True)
    expected = index.match_batch(token_ids[:, :-1], num_fgrams=40).length
    assert measured.losses["scone_table"].match_rate == pytest.approx((expected > 0).mean())
    assert all(parity.is_within("fp32") for parity in measured.parity.values())


def test_sequences_without_any_match_are_measured_too(tmp_path: Path, index: MatchIndex) -> None:
    table = write_table(Folder(tmp_path), "fp32")
    nothing = np.full((2, 6), END_OF_TEXT, np.int64)
    measured = measure_scone(tiny_model(), nothing, index, table, check_fp32=True)
    assert measured.losses["scone_table"].match_rate == 0
    assert measured.losses["scone_table"].mean_match_length == 0
    assert measured.parity["fp32"].is_within("fp32")


def test_match_rate_and_mean_length_are_those_of_the_positions() -> None:
    sums = LossSums.zeros(4)
    sums.add(torch.ones(2, 4), np.array([[0, 2, 2, 4], [0, 0, 3, 0]], np.uint8))
    assert sums.match_rate == 0.5
    assert sums.mean_match_length == 11 / 4
    assert sums.tokens.tolist() == [4, 0, 2, 1, 1]


def test_spans_add_up_to_the_whole_and_survive_json(
    tmp_path: Path, token_ids: NDArray[np.int64], index: MatchIndex
) -> None:
    table, model = write_table(Folder(tmp_path), "fp32"), tiny_model()
    whole = measure_scone(model, token_ids, index, table, check_fp32=True)
    parts = Measurement.empty()
    for rows in (token_ids[:2], token_ids[2:]):
        part = measure_scone(model, rows, index, table, check_fp32=True)
        parts.merge(Measurement.from_dict(part.to_dict()))
    for path, sums in whole.losses.items():
        assert parts.losses[path].tokens.tolist() == sums.tokens.tolist()
        assert parts.losses[path].loss == pytest.approx(sums.loss, rel=LOSS_TOLERANCE)
    assert parts.parity["stored"].positions == whole.parity["stored"].positions


def test_f_grams_of_a_batch_are_read_from_its_tokens(token_ids: NDArray[np.int64], index: MatchIndex) -> None:
    matches = index.match_batch(token_ids)
    ids, tokens, lengths = fgrams_in_batch(token_ids, matches.length, matches.fgram_id)
    assert ids.tolist() == sorted(set(matches.fgram_id.ravel().tolist()) - {-1})
    np.testing.assert_array_equal(lengths, FGRAMS.lengths[ids])
    np.testing.assert_array_equal(tokens, FGRAMS.tokens[ids][:, : tokens.shape[1]])


def test_rows_in_memory_refuse_ids_they_do_not_hold() -> None:
    table = RowsInMemory(np.array([3, 7], np.int32), np.eye(2, dtype=np.float32), 10)
    out = np.empty((2, 2), np.float32)
    table.lookup(np.array([7, 3]), out)
    np.testing.assert_array_equal(out, [[0, 1], [1, 0]])
    for ids in ([3, 4], [3, 9]):
        with pytest.raises(IndexError, match="has no row in memory"):
            table.lookup(np.array(ids), out)
    with pytest.raises(IndexError, match="has no row in memory"):
        RowsInMemory(np.array([], np.int32), np.empty((0, 2), np.float32), 10).lookup(np.array([1]), out[:1])


def test_parity_compares_lengths_of_all_logits() -> None:
    parity = Parity()
    parity.add(torch.tensor([[[3.0, 4.5]]]), torch.tensor([[[3.0, 4.0]]]))
    assert parity.relative_difference == pytest.approx(0.1)
    assert parity.largest_difference == 0.5
    assert not parity.is_within("bf16")
    assert not Parity().is_within("fp32"), "nothing compared is not within"
    assert LOGITS_TOLERANCE["fp32"] == 1e-5


def test_the_f_gram_model_is_needed_in_training_only() -> None:
    plain, scone = count_parameters(tiny_model(with_fgrams=False)), count_parameters(tiny_model())
    assert plain == {
        "inference": sum(p.numel() for p in tiny_model(with_fgrams=False).parameters()),
        "training_only": 0,
    }
    assert scone["inference"] == plain["inference"] + 1, "one fusion scale"
    assert scone["training_only"] == sum(p.numel() for p in tiny_model().fgram_model.parameters())


def test_lookup_is_timed_for_batches_that_the_table_can_fill(tmp_path: Path) -> None:
    timings = measure_lookup(write_table(Folder(tmp_path), "bf16"), (1, 256, 4096))
    assert [timing.batch for timing in timings] == [1, 256]
    for timing in timings:
        assert timing.lookup_microseconds > 0
        assert timing.ratio == timing.lookup_microseconds / timing.copy_microseconds
