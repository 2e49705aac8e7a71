"""What the ranks of tests/transport/test_horovod.py do, under horovodrun."""

import sys
import traceback

import horovod.torch as hvd
import pytest
import torch

import fusionlayer as fl
from fusionlayer import context
from fusionlayer.base.errors import TransportError, UsageError
from fusionlayer.transport.horovod import HorovodTransport
from tests.transport import conformance
from tests.transport.conformance import send_and_recv_by_tag, wrong_arguments_are_refused_and_harmless


def conform(transport: HorovodTransport) -> None:
    conformance.conform(transport, without=(send_and_recv_by_tag, wrong_arguments_are_refused_and_harmless))
    for call in (transport.send, transport.recv):
        with pytest.raises(UsageError, match="Horovod has no message from one rank to another alone"):
            call(torch.zeros(1), 0)
    transport.close()


def differ() -> None:
    transport = HorovodTransport(timeout=120)
    x = torch.zeros(100 + hvd.rank() // 2, dtype=torch.uint8)
    with pytest.raises(TransportError, match="rank . sends 10[01] bytes .*, which expects 10[01]") as caught:
        transport.exchange({rank: (x, torch.empty_like(x)) for rank in range(hvd.size())})
    assert 2 in caught.value.ranks
    with pytest.raises(TransportError, match="sends 10[01] bytes"):
        transport.barrier()


def main() -> None:
    with pytest.raises(UsageError, match=r"call horovod.torch.init\(\) first"):
        HorovodTransport()
    fl.init()
    assert isinstance(context.transport(), HorovodTransport) and not torch.distributed.is_initialized()
    x = torch.full((1000,), float(fl.rank()))
    fl.all_reduce(x, codec="int8", op=fl.Sum)
    torch.testing.assert_close(x, torch.full_like(x, sum(range(fl.size()))), rtol=0.02, atol=0)
    conform(HorovodTransport(timeout=120))
    differ()
    print(f"rank {fl.rank()} {fl.size()} {fl.local_rank()} {fl.local_size()} conforms", flush=True)
    fl.shutdown()


if __name__ == "__main__":
    try:
        main()
    except BaseException:
        traceback.print_exc()
        sys.stdout.flush()
        raise
