"""The page about Slurm on Slurm itself: its daemons run here, as four nodes of one machine. Else a stand-in does."""

from collections.abc import Iterator

import pytest

import fusionlayer as fl
from fusionlayer.launch import RankInfo, find_place
from fusionlayer.launch.slurm import meeting_point
from tests.pages import blocks
from tests.test_guides import check_losses
from tests.tiers import exhaustive, long

from .slurm import Cluster, cluster, needs_slurm, read_variables

pytestmark = [pytest.mark.medium, *needs_slurm]

GUARD = "tests/integrations/test_launch.py::test_tasks_of_srun"


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("slurm")) as running:
        yield running


@exhaustive(guarded_by=GUARD)
def test_tasks_know_their_place(slurm: Cluster) -> None:
    """Also over nodes that are no range, with unequal numbers of tasks, and where srun speaks PMI itself."""
    uneven = ["--nodelist", "node[02-03,07]", "--nodes", "3", "--ntasks", "5"]
    for options in [], ["--mpi=pmi2"], ["--distribution", "cyclic"]:
        tasks = slurm.environments(*uneven, *options)
        nodes = [task["SLURMD_NODENAME"] for task in tasks]
        assert {*nodes} == {"node02", "node03", "node07"} and nodes[0] == "node02"
        assert [find_place(task) for task in tasks] == [
            RankInfo(rank, 5, nodes[:rank].count(node), nodes.count(node), "srun") for rank, node in enumerate(nodes)
        ]
        assert ["PMI_RANK" in task for task in tasks] == ["--mpi=pmi2" in options] * 5
        assert {meeting_point(task)[0] for task in tasks} == {"node02"} and len({*map(meeting_point, tasks)}) == 1
    assert [find_place(task) for task in slurm.environments("--ntasks", "1")] == [RankInfo()]


@exhaustive(guarded_by=GUARD)
def test_what_srun_has_not_started_is_no_task(slurm: Cluster) -> None:
    (slurm.folder / "batch.sh").write_text("#!/bin/sh\nenv -0 > batch.env\n")
    slurm.batch("--ntasks", "3", "batch.sh")
    done = slurm.run("salloc", "--ntasks", "3", "sh", "-c", "env -0 > shell.env")
    assert done.returncode == 0, done.stderr + slurm.logs()
    for name in "batch", "shell":
        with pytest.raises(fl.ConfigError, match="has 3 tasks, and this process is none of them: start it by srun"):
            find_place(read_variables(slurm.folder / f"{name}.env"))


@exhaustive(guarded_by=GUARD)
@pytest.mark.parametrize("number", [0, pytest.param(1, marks=long)])
def test_the_scripts_of_the_page(slurm: Cluster, number: int) -> None:
    (code,) = blocks("start/laptop.md", "python")
    (slurm.folder / "train.py").write_text(code)
    job = blocks("start/slurm.md", "bash")[number]
    assert "source .venv/bin/activate\n" in job and "eth0" in job
    (slurm.folder / "job.sh").write_text(job.replace("source .venv/bin/activate\n", "").replace("eth0", "lo"))
    job = slurm.batch("job.sh")
    check_losses((slurm.folder / f"job-{job}.out").read_text(), ranks=4)
