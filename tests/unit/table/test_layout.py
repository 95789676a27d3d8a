import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scone.errors import ConfigError
from scone.table.layout import TableLayout, bfloat16_to_float32, float32_to_bfloat16, sample_rows, stride_of


@pytest.mark.parametrize(
    ("row_bytes", "stride"), [(2, 2), (3, 4), (256, 256), (400, 512), (4096, 4096), (4097, 8192), (12_288, 12_288)]
)
def test_stride_is_a_power_of_two_up_to_a_page_and_whole_pages_beyond(row_bytes: int, stride: int) -> None:
    assert stride_of(row_bytes) == stride


def test_paper_width_in_bf16_fills_a_page_exactly() -> None:
    layout = TableLayout(2048, "bf16")
    assert layout.row_bytes == layout.stride_bytes == 4096


def test_samples_are_few_distinct_and_include_both_ends() -> None:
    for num_rows in (1, 2, 63, 64, 65, 1000, 262_144):
        rows = sample_rows(num_rows)
        assert len(rows) == len(set(rows.tolist())) == min(64, num_rows)
        assert rows[0] == 0
        assert rows[-1] == num_rows - 1


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=50))
def test_bfloat16_bits_equal_torch_for_any_float32_bits(bits: list[int]) -> None:
    values = np.array(bits, np.uint32).view(np.float32)
    expected = torch.from_numpy(values.copy()).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    found = float32_to_bfloat16(values)
    numbers = ~np.isnan(values)
    np.testing.assert_array_equal(found[numbers], expected[numbers])
    assert np.isnan(bfloat16_to_float32(found)[~numbers]).all()


def test_every_bfloat16_survives_the_way_to_float32_and_back() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    values = bfloat16_to_float32(bits)
    expected = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).to(torch.float32).numpy()
    np.testing.assert_array_equal(values, expected)
    numbers = ~np.isnan(values)
    np.testing.assert_array_equal(float32_to_bfloat16(values)[numbers], bits[numbers])


def test_ties_round_to_the_even_neighbour() -> None:
    below, above = np.array([0x3F808000, 0x3F818000], np.uint32).view(np.float32)[:, None]
    assert float32_to_bfloat16(below)[0] == 0x3F80
    assert float32_to_bfloat16(above)[0] == 0x3F82


def test_encoded_rows_are_padded_with_zeros_and_decode_to_themselves() -> None:
    layout = TableLayout(3, "bf16")
    rows = np.array([[1, -2, 0.5], [4, 8, 16]], np.float32)
    stored = layout.encode(rows)
    assert stored.nbytes == 2 * layout.stride_bytes == 16
    assert (stored[:, 3:] == 0).all()
    np.testing.assert_array_equal(layout.decode(stored), rows)


def test_unknown_type_and_empty_width_are_refused() -> None:
    with pytest.raises(ConfigError, match="bf16 or fp32 rows, got 'int4'"):
        TableLayout(8, "int4")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="width 1 or more, got 0"):
        TableLayout(0)
