"""What Nsight Compute looks at: two kernels, each behind a call that is not looked at.

ncu --clock-control none --profile-from-start off --set full python -m tests.gpu.profiled
"""

import torch

import fusionlayer as fl
from benchmarks.codec.rows import codec_rows

CALLS = {"int4": "encode", "taco": "recode x8"}


def main() -> None:
    x = torch.randn(1 << 26, dtype=torch.bfloat16, device="cuda")
    for name, verb in CALLS.items():
        row = next(row for row in codec_rows(name, fl.codecs.get(name).bare, x) if row.verb == verb)
        row.call()
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        row.call()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


if __name__ == "__main__":
    main()
