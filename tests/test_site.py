"""The site: pages made from code are current, nothing public is left out, and all of it builds without a warning."""

import ast
import re
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

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
    for name in errors.__all__:
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


class _Page(HTMLParser):
    """What a page of the site links to, loads, and can be linked at."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.anchors: set[str] = set()
        self.prose: list[str] = []
        self.description = self.title = False
        self._verbatim = 0
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {key: value or "" for key, value in attrs}
        self.anchors |= {given[key] for key in ("id", "name") if key in given}
        self._verbatim += tag in ("code", "pre", "script", "style")
        self.title |= tag == "title"
        self.description |= given.get("name") == "description" and bool(given["content"])
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif "src" in given:
            self.loads.append(given["src"])
        elif tag == "link" and given.get("rel") in ("stylesheet", "icon", "preload"):
            self.loads.append(given["href"])

    def handle_endtag(self, tag: str) -> None:
        self._verbatim -= tag in ("code", "pre", "script", "style")

    def handle_data(self, data: str) -> None:
        if not self._verbatim:
            self.prose.append(data)


@pytest.mark.medium
@pytest.mark.xdist_group("site")
@exhaustive(guarded_by="tests/test_documents.py::test_links_lead_somewhere")
def test_the_site_is_built_without_a_warning_and_every_link_leads_somewhere() -> None:
    root = site()
    built = {path: _Page(path.read_text()) for path in root.rglob("*.html")}
    assert {f"docs/{page.stem}.html" for page in DOCS.glob("*.md")} <= {str(p.relative_to(root)) for p in built}
    linked: dict[Path, set[Path]] = {}
    for path, page in built.items():
        for link in [*page.links, *page.loads]:
            place = urlsplit(link)
            if place.scheme or place.netloc:
                assert link in page.links and place.scheme in ("https", "mailto"), f"{path} loads {link}"
                continue
            beside = root if place.path.startswith("/") else path.parent  # only the page for errors begins with /
            target = (beside / unquote(place.path).lstrip("/")).resolve() if place.path else path
            target = target / "index.html" if target.is_dir() else target
            assert target.is_file(), f"{path} links to {link}"
            linked.setdefault(path, set()).add(target)
            if place.fragment and target in built:
                assert unquote(place.fragment) in built[target].anchors, f"{path} links to {link}"
        raw = [text for text in page.prose if re.search(r"\]\(|^\s*(- |\||#+ |```)", text, re.MULTILINE)]
        assert not raw, f"{path} shows Markdown: {raw}"
        assert page.description and page.title, path
    reached, new = set(), {root / "index.html"}
    while new:
        reached |= new
        new = set().union(*(linked.get(path, set()) for path in new)) - reached
    assert {*built} - reached == {root / "404.html"}, "pages that no page links to"
    assert not built[root / "404.html"].loads, "a server shows it at any address"


class _Tagless(yaml.SafeLoader):
    """Reads mkdocs.yml without MkDocs: values with tags are None."""


_Tagless.add_multi_constructor("", lambda *_: None)


def test_the_menu_is_short_and_names_pages_by_their_headings() -> None:
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
