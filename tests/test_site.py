"""The site: pages made from code are current, nothing public is left out, and all of it builds without a warning."""

import ast
import re
from functools import cache
from typing import Any

import pytest
import yaml

from docs.site import pages
from fusionlayer.base import config, errors
from tests.loops import looped
from tests.pages import DOCS, ROOT
from tests.site import site
from tests.tiers import exhaustive

PUBLIC = {
    "fusionlayer": "fusionlayer",
    "fusionlayer.backend": "fusionlayer.backend",
    "fusionlayer.codecs": "fusionlayer.codecs",
    "fusionlayer.collectives": "fusionlayer.collectives",
    "fusionlayer.transport": "fusionlayer.transport",
    "fusionlayer.planners": "fusionlayer.scheduler.planners",
    "fusionlayer.ddp": "fusionlayer.training.ddp",
    "fusionlayer.fsdp": "fusionlayer.sharded.fsdp",
    "fusionlayer.deepspeed": "fusionlayer.frameworks.deepspeed",
    "fusionlayer.megatron": "fusionlayer.frameworks.megatron",
    "fusionlayer.moe": "fusionlayer.parallel.moe",
    "fusionlayer.pipeline": "fusionlayer.parallel.pipeline",
    "fusionlayer.tensor_parallel": "fusionlayer.parallel.tensor_parallel",
    "fusionlayer.torch": "fusionlayer.torch",
    "fusionlayer.torch.elastic": "fusionlayer.torch.elastic",
}
"""Modules whose names users import, by the name that users have for them."""

LINK = re.compile(r"\]\(([^)#:\s]+\.md)")
VARIABLE = re.compile(
    r"(FUSIONLAYER|HOROVOD|MASTER|GLOO|NCCL|TORCH|TORCHELASTIC|SLURM|OMPI|PMI|PMIX|MPI|PET|OMP|CUDA|WORLD|LOCAL)"
    "(_[A-Z0-9]+)+|RANK|CXX"
)


@looped("page", pages.PAGES)
def test_pages_made_from_code_are_current(page: str) -> None:
    assert (ROOT / page).read_text() == pages.PAGES[page](), "write it anew with 'make docs'"


def test_every_variable_that_code_reads_is_named() -> None:
    named = set(re.findall(r"`([A-Z][A-Z0-9_]*)`", (DOCS / "config.md").read_text()))
    named |= {f"FUSIONLAYER_{name.upper()}" for name in config.flat(config.Config())}  # each key has one
    read = {text for text in _texts() if VARIABLE.fullmatch(text)}
    exports = {"HOROVOD_UNUSED", "MPI_LOCAL"}  # a name of Python, and the beginning of names
    assert len(read) > 60 and read - exports <= named, sorted(read - exports - named)


def test_every_error_has_a_remedy_and_every_message_there_is_one_of_the_code() -> None:
    page = (DOCS / "troubleshooting.md").read_text()
    for name, value in vars(errors).items():
        if isinstance(value, type) and issubclass(value, errors.FusionLayerError):
            assert f"`fl.{name}`" in page, name
    remedies = re.findall(r"^- (`.*(?:\n  .*)*)", page.partition("## The job does not start")[2], re.MULTILINE)
    messages = [" ".join(text.split()) for each in remedies for text in each.partition("`: ")[0].split("`")[1::2]]
    assert len(messages) > 60
    for message in messages:
        parts = message.split("...")
        likely = [text for text in _texts() if max(parts, key=len) in text]
        pattern = ".*".join(map(re.escape, parts))
        assert any(re.search(pattern, text) for text in likely), f"no error says: {message}"


@cache
def _texts() -> list[str]:
    """Return all strings in the code of the package and of its build, those that are formatted with "..." in gaps."""
    texts = []
    for path in [ROOT / "setup.py", *(ROOT / "fusionlayer").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value.replace("\n", " "))
            elif isinstance(node, ast.JoinedStr):
                parts = [str(part.value) if isinstance(part, ast.Constant) else "..." for part in node.values]
                texts.append("".join(parts).replace("\n", " "))
    return texts


def test_the_api_reference_has_every_public_name() -> None:
    text = "\n".join(page.read_text() for page in DOCS.glob("api/*.md"))
    shown = set(re.findall(r"^::: (\S+)", text, re.MULTILINE))
    told = set(re.findall(r"`(?:fl|hvd)?\.?([\w.]+)(?:\([^`]*\))?`", text))
    for face, module in PUBLIC.items():
        for name in _exports(module):
            mentioned = {name, f"{face}.{name}".removeprefix("fusionlayer.")} & told
            assert f"{face}.{name}" in shown or mentioned or f"{face}.{name}" in PUBLIC, f"{face}.{name}"


def _exports(module: str) -> list[str]:
    """Return ``__all__`` of a module. It is read, not imported, which takes seconds for some."""
    path = ROOT / module.replace(".", "/")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names: list[str] = ast.literal_eval(node.value)
            return names
    raise AssertionError(f"{file} has no __all__")


@pytest.mark.medium
@pytest.mark.xdist_group("site")
@exhaustive(guarded_by="tests/test_documents.py::test_links_lead_somewhere")
def test_the_site_is_built_without_a_warning() -> None:
    """MkDocs warns of links and headings that lead nowhere."""
    pytest.importorskip("mkdocs")
    assert {f"{page.stem}.html" for page in DOCS.glob("*.md")} <= {page.name for page in site().glob("docs/*.html")}


class _Tagless(yaml.SafeLoader):
    """Reads mkdocs.yml without MkDocs: values with tags are None."""


_Tagless.add_multi_constructor("", lambda *_: None)


def test_the_menu_is_short_names_pages_by_their_headings_and_leads_to_all() -> None:
    def leaves(part: Any) -> list[str]:
        if isinstance(part, str):
            return [part]
        assert isinstance(part, list) or not any(isinstance(value, str) for value in part.values()), part
        return [leaf for each in (part if isinstance(part, list) else part.values()) for leaf in leaves(each)]

    menu = leaves(yaml.load((ROOT / "mkdocs.yml").read_text(), _Tagless)["nav"])
    assert len(menu) == len({*menu}) <= 40
    for page in menu:
        heading = re.search(r"^# (.+)", (ROOT / page).read_text(), re.MULTILINE)
        assert heading and len(heading[1]) <= 70, page
    reached, new = set(), {ROOT / page for page in menu}
    while new:
        reached |= new
        linked = {(page.parent / link).resolve() for page in new for link in LINK.findall(page.read_text())}
        new = {page for page in linked if page.is_file()} - reached
    assert not {*DOCS.rglob("*.md")} - reached, "pages to which no page of the menu leads"
