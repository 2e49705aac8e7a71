"""What newcomers get wrong in a script and in its environment: one line that says so, and no error of Python's own.

``cli/test_mistakes.py`` has what they get wrong at the command line.
"""

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fusionlayer as fl
import fusionlayer.torch as hvd
from fusionlayer.base import libraries
from tests.cli.test_mistakes import LEAKS

FILES: dict[str, str | bytes] = {
    "empty.yaml": "",
    "list.yaml": "- 1\n",
    "text.yaml": "hello\n",
    "tab.yaml": "codec:\n\tint8\n",
    "binary.yaml": bytes(range(256)),
    "typo.yaml": "codce: int8\n",
    "kind.yaml": "timeout: soon\n",
    "json.yaml": '{"codec": "int8"',
}
OPTIMIZER = (
    *("model", "model, codec='int8'", "None, model", "optimizer, 3", "optimizer, model.parameters()"),
    *("optimizer, [('w', 3)]", "optimizer, [('w', p) for p in model.parameters()]", "optimizer, other"),
    *("optimizer, model, codec='int9'", "optimizer, model, codec=''", "optimizer, model, codec=8"),
    *("optimizer, model, codec='int', bits=5", "optimizer, model, codec='int', bits='4'", "optimizer, codce='int8'"),
    *("optimizer, codec='int4', group_size=-64", "optimizer, codec='int4', groupsize=64", "optimizer, lr=0.1"),
    *("optimizer, codec='topk', density=2", "optimizer, codec='topk', density='1%'", "optimizer, codec='topk', k=5"),
    *("optimizer, codec='powersgd', rank=0", "optimizer, codec='powersgd', rank=1.5", "optimizer, codec=torch.int8"),
    *("optimizer, algorithm='rings'", "optimizer, algorithm=3", "optimizer, codec='topk', algorithm='ring'"),
    *("optimizer, planner='best'", "optimizer, planner=3", "optimizer, groups=-1", "optimizer, groups='all'"),
    *("optimizer, groups=[[torch.ones(1)]]", "optimizer, op='average'", "optimizer, op=torch.distributed.ReduceOp.SUM"),
    *("optimizer, plan='none.yaml'", "optimizer, plan='empty.yaml'", "optimizer, plan='binary.yaml'"),
    *("optimizer, plan='.'", "optimizer, plan=3", "optimizer, policy='none.yaml'", "optimizer, policy='list.yaml'"),
    *("optimizer, policy=3", "optimizer, policy={'rules': 3}", "optimizer, codec='auto', profile='none.yaml'"),
    *("optimizer, codec='auto', profile='tab.yaml'", "optimizer, codec='auto', profile=3"),
    *("optimizer, codec='auto', fidelity='best'", "optimizer, codec='int8', fidelity='lossless'"),
    *("optimizer, op=fl.Sum, gradient_predivide_factor=2.0", "optimizer, gradient_predivide_factor=0"),
    *("optimizer, gradient_predivide_factor='2'", "optimizer, backward_passes_per_step=0"),
    *("optimizer, backward_passes_per_step=1.5", "optimizer, backward_passes_per_step='2'"),
    *("optimizer, check_replicas=-1", "optimizer, check_replicas='often'", "optimizer, broadcast='yes'"),
    *("optimizer, sync=4", "optimizer, sync='averaging'", "optimizer, sync=fl.Local('4')"),
    *("optimizer, sync=fl.Local.diloco(momentum=2)", "optimizer, sync=fl.Local(every=2, states=['exp_avg'])"),
    *("optimizer, autotune=True", "optimizer, overlap_forward=True", "optimizer, overlap_forward=other"),
    *("optimizer, ahead='yes'", "optimizer, error_feedback=2", "optimizer, group='world'", "optimizer, group=3"),
    *("fl.DistributedOptimizer(optimizer, model), model", "torch.optim.LBFGS(other.parameters()), codec='int44'"),
)
BAD = ("None", "3", "'x'", "[3]")
LIVE = "{'a': (i for i in ())}"
"""What cannot be pickled."""
GROUPED = ("grouped_allreduce", "grouped_allreduce_", "grouped_allgather", "grouped_reducescatter")
METHODS = (
    *("load_state_dict(3)", "load_state_dict({})", "load_state_dict(None)", "adopt_plan(3)"),
    *("set_backward_passes_per_step('a')", "set_backward_passes_per_step(1.5)"),
)
OF_HOROVOD = (
    *("process_set=3", "groups=[3]", "groups=2.5", "group=None", "codec='int9'"),
    "codec='int8', compression=hvd.Compression.int8",
)
CALLS = (
    *(f"fl.DistributedOptimizer({words})" for words in OPTIMIZER),
    *("fl.all_reduce([1.0])", "fl.all_reduce(3)", "fl.all_reduce(None)", "fl.all_reduce(x, 'int9')"),
    *("fl.all_reduce(x, op='sum')", "fl.all_reduce(x.int())", "fl.all_reduce(x.to(torch.complex64))"),
    "fl.all_reduce(x, 'int8', bist=4)",
    *("fl.all_reduce(x, codec='auto', algorithm='ring')", "fl.all_reduce(x, group='world')"),
    *("fl.all_gather(None)", "fl.all_gather(x.int())", "fl.all_gather([x, x])", "fl.all_gather(x, 'int8', 'ring')"),
    *("fl.reduce_scatter(torch.ones(()))", "fl.reduce_scatter(x, algorithm='two_shot')", "fl.reduce_scatter(3)"),
    *(
        "fl.all_to_all(x, [1])",
        "fl.all_to_all(x, 'even')",
        "fl.all_to_all(x, [-1, 4])",
        "fl.all_to_all(torch.ones(()))",
    ),
    *("fl.broadcast_object({}, 3)", "fl.broadcast_parameters(3)", "fl.broadcast_parameters(model, 3)"),
    *("fl.broadcast_optimizer_state(model)", "fl.switcher('world')"),
    *("fl.codecs.get('int9')", "fl.codecs.get(4)", "fl.codecs.get('int4', bits=5)", "fl.codecs.get('topk', density=0)"),
    *("fl.planners.get('best')", "fl.planners.get('wfbp', x=1)", "fl.collectives.get('rings')"),
    *(f"fl.FusionPlan.from_yaml('{name}')" for name in ("none.yaml", ".", *FILES)),
    *("fl.FusionPlan.from_yaml(3)", "fl.CodecRules.from_yaml('none.yaml')", "fl.CodecRules.from_yaml('typo.yaml')"),
    *("fl.CodecRule('int9')", "fl.CodecRule('int8', {'bist': 4})", "fl.CodecRule(codec='auto', options={'bits': 4})"),
    *("fl.CodecRules([fl.CodecRule('int8')], fidelity='best')", "fl.CodecRules('int8')"),
    *("fl.ddp.register(model, 'int8')", "fl.ddp.register(None)", "fl.ShardedOptimizer(model, torch.optim.AdamW)"),
    *("fl.ShardedOptimizer(model.parameters(), optimizer)", "fl.ShardedOptimizer(model.parameters(), 'adamw')"),
    *(
        "fl.ShardedOptimizer([], torch.optim.SGD)",
        "fl.ShardedOptimizer(model.parameters(), torch.optim.SGD, gradients=8)",
    ),
    *("fl.Muon(3)", "fl.Muon(model.parameters())", "fl.Muon(model, codec=4)", "fl.Muon(model, lr='x')"),
    *("fl.backend.use('none.yaml')", "fl.backend.use(3)", "fl.backend.use({'rulez': []})"),
    *("fl.backend.use({'rules': [{'codec': 'int9'}]})", "fl.backend.use({'rules': 3})", "fl.backend.traffic()"),
    *("fl.transport.local.run(print, 0)", "fl.transport.local.run(print, 'two')"),
    *("hvd.allreduce([1.0])", "hvd.allreduce(x, op='sum')", "hvd.allreduce(x, average=True, op=hvd.Sum)"),
    *("hvd.broadcast(x, root_rank=5)", "hvd.broadcast(x, root_rank='0')", "hvd.allgather(3)"),
    *("hvd.DistributedOptimizer(optimizer, compression='fp16')", "hvd.add_process_set([7])"),
    *("hvd.DistributedOptimizer(model)", "hvd.allreduce(x, process_set=3)", "hvd.init(comm='world')"),
    *(f"hvd.{call}(x, name={name})" for call in ("allreduce", "allgather", "reducescatter") for name in ("3", "['a']")),
    *(f"hvd.{call}({given})" for call in ("allreduce_", "allgather", "alltoall", "reducescatter") for given in BAD),
    *(f"hvd.{call}({given})" for call in GROUPED for given in (*BAD, "[]", "[x, 3]", "[x, x], name=['a', 'b']")),
    *("hvd.allreduce(x, prescale_factor='2')", "hvd.allreduce(x, postscale_factor=[1])", "hvd.allreduce(x, op=[1])"),
    *(f"hvd.alltoall(x, {splits})" for splits in ("3", "'even'", "[None]", "[1.5]", "[[3]]", "torch.ones(1)")),
    *(f"fl.all_to_all(x, {splits})" for splits in ("3", "[None]", "[1.5]", "[[3]]", "torch.ones(1)")),
    *("hvd.poll([1])", "hvd.synchronize([1])", "hvd.synchronize('a')", "hvd.synchronize(x)", "hvd.poll(99)"),
    *("hvd.sparse_allreduce_async(None, 'a', hvd.Sum)", "hvd.alltoall(x, process_set=3)", "hvd.barrier(3)"),
    *(
        f"hvd.broadcast_parameters({given}, 0)"
        for given in ("None", "3", "[3]", "[(1, 2, 3)]", "{1: x, 'a': x}", "model")
    ),
    "hvd.broadcast_parameters(torch.nn.Sequential(model), 0)",
    *(
        f"hvd.broadcast_optimizer_state({given})"
        for given in ("None, 0", "model, 0", "optimizer, 0, 3", "optimizer, 7")
    ),
    *(f"{module}.broadcast_object({given})" for module in ("fl", "hvd") for given in (LIVE, "{}, 'a'", "{}, 7")),
    *(f"hvd.allgather_object({LIVE})", "hvd.allgather_object({}, name=[3])", "hvd.remove_process_set(None)"),
    *("hvd.start_timeline(3)", "hvd.start_timeline('/nowhere/a')", "hvd.init(process_sets=3)"),
    *(f"hvd.DistributedOptimizer(optimizer, {option})" for option in OF_HOROVOD),
    *("hvd.elastic.run(3)", "hvd.elastic.run(print)(3)", "hvd.elastic.ElasticSampler(3)"),
    *("fl.all_reduce(x, group=[0])", "fl.all_reduce(x.to_sparse())", "fl.switcher([0])", "fl.codecs.get(['a'])"),
    *("fl.broadcast_optimizer_state(optimizer, 'a')", "fl.fsdp.compress(None)", "fl.checkpoint.load(3)"),
    *("fl.checkpoint.save_ranks(3)", "fl.checkpoint.load_ranks(None)", "fl.ShardedOptimizer([{}], torch.optim.SGD)"),
    *(
        f"fl.DistributedOptimizer(optimizer, {name}=['a'])"
        for name in ("planner", "algorithm", "codec", "policy", "group")
    ),
    *(f"fl.DistributedOptimizer(optimizer, model).{call}" for call in METHODS),
)
BEFORE = (
    *("fl.rank()", "fl.size()", "fl.local_rank()", "fl.all_reduce(x)", "hvd.rank()", "hvd.allreduce(x)"),
    *("fl.init(timeout=0)", "fl.init(timeout='soon')", "fl.init(timeout=float('nan'))", "fl.init(settings='a.yaml')"),
)
TORCHRUN = "MASTER_ADDR=localhost MASTER_PORT=29599 "
ENVIRONMENTS = (
    *("RANK=0", "WORLD_SIZE=2", "RANK=x WORLD_SIZE=2", "RANK=2 WORLD_SIZE=2", "RANK=-1 WORLD_SIZE=2", "PMIX_RANK=0"),
    *(f"{TORCHRUN}RANK=0 WORLD_SIZE={size}" for size in ("0", "-2", "two", "2.0")),
    *("RANK=0 WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT=http", "RANK=0 WORLD_SIZE=2 LOCAL_RANK=x"),
    *(
        "RANK=0 WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT=99999",
        "RANK=0 WORLD_SIZE=1 OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2",
    ),
    *(f"FUSIONLAYER_CONFIG={name}" for name in ("none.yaml", ".", *(set(FILES) - {"empty.yaml"}))),
    *(f"FUSIONLAYER_TIMEOUT={text}" for text in ("0", "-1", "soon", "nan")),
    *("FUSIONLAYER_STALL_WARNING=no", "FUSIONLAYER_THREADS=many", "FUSIONLAYER_THREADS=-2", "FUSIONLAYER_THREADS=0"),
    *("FUSIONLAYER_TRANSPORT=tcp", "FUSIONLAYER_CHECKSUM=maybe", "FUSIONLAYER_CHECK_REPLICAS=-1"),
    *(
        "FUSIONLAYER_RANKS_PER_NODE=0",
        "FUSIONLAYER_LANES=0",
        "FUSIONLAYER_CODEC_OPTIONS={bits",
        "FUSIONLAYER_BACKEND=x",
    ),
    *("FUSIONLAYER_AUTOTUNE=1", "FUSIONLAYER_REPLAN=2"),
)
IN_OPTIMIZERS = (
    *(
        "FUSIONLAYER_CODEC=int44",
        "FUSIONLAYER_PLANNER=best",
        "FUSIONLAYER_ALGORITHM=magic",
        "FUSIONLAYER_PLAN=none.yaml",
    ),
    *("FUSIONLAYER_POLICY=list.yaml", "FUSIONLAYER_CODEC=topk FUSIONLAYER_CODEC_OPTIONS={density: 2}"),
    *("FUSIONLAYER_CODEC=auto FUSIONLAYER_FIDELITY=best", "FUSIONLAYER_CODEC=auto FUSIONLAYER_PROFILE=none.yaml"),
    "FUSIONLAYER_PLANNER_OPTIONS={x: 1}",
)


def names() -> dict[str, Any]:
    model, other = nn.Linear(3, 3), nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return {
        "fl": fl,
        "hvd": hvd,
        "torch": torch,
        "model": model,
        "other": other,
        "optimizer": optimizer,
        "x": torch.ones(3),
    }


def complaint(code: str) -> str:
    """Return what is wrong with the answer to ``code``, or nothing."""
    try:
        exec(code, names())
    except fl.FusionLayerError as error:
        told = str(error)
        bad = len(told.splitlines()) != 1 or len(told) > 600 or [leak for leak in LEAKS if leak in told]
        bad = bad or error.__cause__ is not None  # which Python would print as well
        return f"{code}: {told}" if bad else ""
    except BaseException as error:
        return f"{code}: {type(error).__name__}: {error}"
    return f"{code}: was taken"


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process without a launcher and without a job, in a folder with files."""
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    monkeypatch.chdir(tmp_path)
    fl.shutdown()
    yield
    hvd.shutdown()
    fl.shutdown()


def test_of_calls() -> None:
    assert not [*filter(None, map(complaint, BEFORE))]
    fl.init()
    hvd.init()
    assert not "\n".join(filter(None, map(complaint, CALLS)))
    assert len(CALLS) > 200


@pytest.mark.parametrize(
    "lines, code", [(ENVIRONMENTS, "fl.init()"), (IN_OPTIMIZERS, "fl.DistributedOptimizer(optimizer)")]
)
def test_of_the_environment(lines: tuple[str, ...], code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for line in lines:
        with monkeypatch.context() as changed:
            for pair in line.replace(" FUSIONLAYER", "\nFUSIONLAYER").splitlines() if "{" in line else line.split():
                changed.setenv(*pair.split("=", 1))
            if code != "fl.init()":
                fl.init()
            if bad := complaint(code):
                found.append(f"{line}: {bad}")
            fl.shutdown()
    assert not "\n".join(found)


def test_of_a_port_that_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(fl.FusionLayerError, match=port) as error:
            fl.init(timeout=1)
    assert len(str(error.value).splitlines()) == 1


def test_of_a_clone_in_which_nothing_was_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank alone would need the library only with its first codec."""
    monkeypatch.setattr(libraries, "__file__", "/nowhere/base/libraries.py")
    with pytest.raises(
        fl.FusionLayerError, match="libfusionlayer_cpu.so is not installed; reinstall the package, or run"
    ):
        fl.init()
    assert not fl.is_initialized()
