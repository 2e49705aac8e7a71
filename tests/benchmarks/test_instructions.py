from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import instructions

pytestmark = pytest.mark.short

SUM = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P0 BRA `(.L_x_9) ;
.L_x_1:
        /*0020*/                   IADD3 R2, R2, 0x1, RZ ;
        /*0030*/                   BRA.DIV UR6, `(.L_x_8) ;
.L_x_2:
        /*0040*/                   LDG.E R4, [R2] ;
        /*0050*/                   FADD R5, R5, R4 ;
        /*0060*/               @P1 BRA `(.L_x_2) ;
        /*0070*/                   STG.E [R2], R5 ;
        /*0080*/               @P2 BRA `(.L_x_1) ;
.L_x_9:
        /*0090*/                   EXIT ;
.L_x_8:
        /*00a0*/                   WARPSYNC.COLLECTIVE R41, `(.L_x_10) ;
.L_x_10:
        /*00b0*/                   BRA `(.L_x_2) ;
        /*00c0*/                   NOP ;
"""


def test_loops_over_tiles_and_over_messages_are_counted_apart() -> None:
    assert instructions.counted(SUM, sums=True) == (4, 3)
    assert instructions.counted(SUM, sums=False) == (0, 3)
    without = SUM.replace("@P1 BRA `(.L_x_2)", "NOP")
    assert instructions.counted(without, sums=False) == (0, 7)


def test_every_probe_fits_its_source(tmp_path: Path) -> None:
    each = {(probe.source, probe.kernel.partition("_kernel")[0], probe.fixed): probe for probe in instructions.PROBES}
    for probe in {(source, name): probe for (source, name, _), probe in each.items()}.values():
        text = instructions.probed(tmp_path / "csrc", probe, 2).read_text()
        assert all(fixed.format(dtype="FL_BF16") in text for fixed in probe.fixed), probe
    assert "FL_PROBED_DTYPE" in (tmp_path / "csrc/cuda/elements.cuh").read_text()


def test_bytes_are_those_of_messages_and_elements() -> None:
    (recode,) = (each for each in instructions.PROBES if (each.codec, each.verb) == ("int8", "recode x8"))
    (total,) = (each for each in instructions.PROBES if (each.codec, each.verb) == ("int8", "decode_sum x8"))
    (raw,) = (each for each in instructions.PROBES if each.codec == "raw")
    assert (recode.nbytes(4), total.nbytes(2), raw.nbytes(2)) == (9 * 1.03125, 8 * 1.03125 + 2, 4)
