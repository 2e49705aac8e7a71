from __future__ import annotations

import pytest
import torch

from fusionlayer.codecs import Codec

from .conformance import CHECKS, DTYPES, Check
from .variants import every

pytestmark = pytest.mark.short


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("codec", every(), ids=str)
@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_codec(check: Check, codec: Codec, dtype: torch.dtype, device: torch.device) -> None:
    check(codec, dtype, device)
