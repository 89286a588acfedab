import struct
import zlib

import pytest
import torch

from packhorse.runtime.checksum import checksum

pytestmark = pytest.mark.cpu


def test_of_the_elements_in_order():
    first, second = torch.tensor([[1, 2, 3], [4, 5, 6]]), torch.tensor(2.5)
    expected = zlib.crc32(struct.pack("=6qf", 1, 2, 3, 4, 5, 6, 2.5))
    assert checksum([first, second]) == expected
    assert checksum([first.t().contiguous().t(), second]) == expected, "however they lie"
    assert checksum([first.t(), second]) != expected


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.bfloat16, torch.float64, torch.complex64])
def test_of_any_dtype(dtype):
    ones, other = torch.ones(4, dtype=dtype), torch.tensor([1, 1, 1, 0], dtype=dtype)
    assert checksum([ones]) == checksum([ones.clone()]) != checksum([other])
    assert checksum([torch.empty(0, dtype=dtype)]) == checksum([]) == 0
