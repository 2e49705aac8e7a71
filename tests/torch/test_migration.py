"""What docs/horovod.md tells those who come from Horovod."""

import inspect
import re
from pathlib import Path
from typing import Any

import torch

import fusionlayer.torch as hvd
from fusionlayer.transport import local

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "horovod.md").read_text()
CODE = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


SCALES = "prescale_factor postscale_factor"
HOROVODS = {
    "allreduce": f"tensor average name compression op {SCALES} process_set",
    "grouped_allreduce": f"tensors average name compression op {SCALES} process_set",
    **dict.fromkeys(
        ["allreduce_", "allreduce_async", "allreduce_async_"], f"tensor average name op {SCALES} process_set"
    ),
    **dict.fromkeys(
        ["grouped_allreduce_", "grouped_allreduce_async", "grouped_allreduce_async_"],
        f"tensors average name op {SCALES} process_set",
    ),
    "reducescatter_async": f"tensor name op process_set {SCALES}",
    "grouped_reducescatter_async": f"tensors name op process_set {SCALES}",
}
"""The parameters of functions in Horovod 0.28."""


def test_parameters_are_horovods_by_place_and_by_name() -> None:
    given = {name: " ".join(inspect.signature(getattr(hvd, name)).parameters) for name in HOROVODS}
    assert given == HOROVODS

    def rank_main(rank: int) -> list[float]:
        hvd.init()
        x = torch.ones(2)
        results = [hvd.synchronize(hvd.allreduce_async(tensor=x, op=hvd.Sum)), hvd.allreduce_(x, False, "named")]
        hvd.shutdown()
        return [float(result[0]) for result in results]

    assert local.run(rank_main, 2) == [[2.0, 2.0]] * 2


def test_the_python_of_the_page_trains_on_uneven_data() -> None:
    first, uneven, _ = CODE

    def rank_main(rank: int) -> tuple[list[float], int, int]:
        known: dict[str, Any] = {}
        exec(first, known)
        exec(uneven, known)
        step = known["optimizer"].state_dict()["fusionlayer"]["step"]
        parameters = torch.cat([p.detach().flatten() for p in known["model"].parameters()]).tolist()
        hvd.shutdown()
        return parameters, step, known["last"]

    one, two = local.run(rank_main, 2)
    assert one == two and one[1:] == (14, 1)


def test_the_python_of_the_page_trains_and_goes_on_after_a_failure() -> None:
    first, _, elastic = CODE

    def rank_main(rank: int) -> tuple[list[float], int]:
        known: dict[str, Any] = {}
        exec(first, known)
        assert known["loss"].dim() == 0
        failures = [hvd.HorovodInternalError("as if a peer were lost")]

        class Data(torch.utils.data.Dataset[torch.Tensor]):
            def __len__(self) -> int:
                return 24

            def __getitem__(self, index: int) -> torch.Tensor:
                if index == 17 and known["state"].epoch == 1 and failures:
                    raise failures.pop()
                return torch.full((8,), index / 24)

        known.update(dataset=Data(), epochs=3)
        exec(elastic, known)
        return torch.cat([p.detach().flatten() for p in known["model"].parameters()]).tolist(), known["state"].epoch

    results = local.run(rank_main, 1)
    assert results[0][1] == 3
