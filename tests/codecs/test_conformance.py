from __future__ import annotations

import pytest
import torch

from fusionlayer.codecs import Codec, TorchCodec

from .conformance import CHECKS, DTYPES, Check
from .variants import defaults, every

pytestmark = pytest.mark.short


# Codecs in torch, which are slow, leave types to their base class: those of their options are not all tried.
CASES = [
    pytest.param(codec, dtype, id=f"{codec}-{str(dtype).removeprefix('torch.')}")
    for codec in every()
    for dtype in DTYPES
    if dtype is torch.float32 or not isinstance(codec, TorchCodec) or codec in defaults()
]


@pytest.mark.parametrize("codec, dtype", CASES)
@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_codec(check: Check, codec: Codec, dtype: torch.dtype, device: torch.device) -> None:
    check(codec, dtype, device)
