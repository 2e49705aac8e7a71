"""``CompressingGroup`` has a method for every operation of torch's process groups, those of newer releases included."""

import inspect
import re
from pathlib import Path

import torch
import torch.distributed as dist

from fusionlayer.backend.group import CompressingGroup

# The virtual methods of torch that need no method of ours: they queue no work of tensors.
NOT_OURS = {"getRank", "getSize", "getGroupName", "setGroupName", "getGroupDesc", "setGroupDesc", "mergeRemoteGroup"}


def test_every_method_that_torch_lets_python_override_is_overridden() -> None:
    """Without an override the call holds the GIL in C++ and can block for ever; see ``CompressingGroup``."""
    (header,) = (Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d").rglob("PyProcessGroup.hpp")
    text = header.read_text()
    named = set(re.findall(r"\bProcessGroup, /\* Parent class \*/\s*(\w+)", text))
    named |= set(re.findall(r'static_cast<const ProcessGroup\*>\(this\),\s*"(\w+)"', text))
    assert {"allreduce", "broadcast", "send", "all_to_all_single"} <= named, "the header has another form"
    assert named - NOT_OURS <= set(vars(CompressingGroup)), named - NOT_OURS - set(vars(CompressingGroup))


# What Python may call by attribute and queues no work of tensors.
LEFT = {
    *("name", "rank", "size", "bound_device_id", "group_desc", "group_name", "get_backend", "set_timeout"),
    *("boxed", "unbox", "merge_remote_group", "monitored_barrier", "new_window", "supports_window"),
    *("reconfigure", "supports_reconfigure", "get_reconfigure_handle", "use_pg_for_symm_mem_rendezvous"),
    *(f"{verb}_{kind}_hook" for verb in ("register", "unregister") for kind in ("abort", "pre", "post")),
}


def test_no_operation_of_torchs_groups_is_unknown() -> None:
    """A name that fails here may be an operation to override; if not, add it to ``LEFT``."""
    for name in dir(dist.ProcessGroup):
        if name[0].islower() and name not in LEFT:
            assert inspect.isfunction(vars(CompressingGroup).get(name)), name
