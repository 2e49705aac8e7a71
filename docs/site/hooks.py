"""What MkDocs does next to its plugins: it takes pages from the whole repository, each at its own path.

So a relative link means the same on GitHub and on the site. A page or file that a page of the site links to is part of
the site; a link to a folder leads to the README.md in it. Lists and tables are written as GitHub reads them, and
Python-Markdown gets them as it needs them. Long commands wrap. Each cell of a table knows its column's name, which the
style sheet shows on phones, and long names in tables may break. A picture leads to its file, to be enlarged. A page's
first paragraph describes it. Search leaves out results and the changelog, and finds each error, in the row of a table
or in an item of a list, by its text.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
STYLE, CARD = "docs/site/site.css", "docs/site/card.png"

_LINK = re.compile(r"(?<=\]\()([^)\s#:]+)(?=[)#])")
_MARKER = re.compile(r"(\d+\.|[-*]) ")
_ROW = re.compile(r"^\|.*", re.MULTILINE)
_CODE = re.compile(r"`[^`]*`")
_COMMANDS = re.compile(
    r"(?<=<pre><span></span><code>)"
    r"(?:[A-Z_]+=\S+ )*(?:fusionlayer|fusionrun|mpirun|pip|python|torchrun) [^<]*(?=</code>)"
)
_NOT_FOUND_BY_SEARCH = re.compile(r"benchmarks/results/.+_.+\.md|CHANGELOG\.md")
_INTERNAL = re.compile(
    r"benchmarks/|tests/|profiles/|docs/(design/|architecture|kernels|papers|releasing|simulation|wire_format|adding_)"
)
_LONGEST = 160
"""Characters of a description that search engines show."""
_OF_ERRORS = re.compile(r"the error says|error|message")
"""Headings of the first column of tables of errors."""
_PICTURE = re.compile(r'(<img [^>]*src="([^"]+\.svg)"[^>]*>)')
_BREAKS = re.compile(r"(?<=[/_.:=(,])(?=\w)")
"""Where a long name in a table may go on in the next line."""
_ITEM = re.compile(r"<li>\s*(?=<code>)(.*?</code>:)(.*?)</li>", re.DOTALL)
"""An item that begins with texts of errors. The remedy follows."""
_errors: list[dict[str, str | int]] = []
"""What search finds of these tables, in the form of its index."""
_TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)
_FENCE = re.compile(r"^(```|~~~).*?^\1$", re.MULTILINE | re.DOTALL)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Leave out links for editing if the repository has no address; let VERSIONS=mike add the selector of versions."""
    if not config.repo_url:
        config.edit_uri = None
    if provider := os.environ.get("VERSIONS"):
        config.extra["version"] = {"provider": provider}
    return config


def on_post_build(config: MkDocsConfig) -> None:
    """Add the rows of tables of errors to the index of the search."""
    path = Path(config.site_dir) / "search/search_index.json"
    index = json.loads(path.read_text())
    index["docs"] += _errors
    path.write_text(json.dumps(index, separators=(",", ":")))
    _errors.clear()


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replace MkDocs' list of docs/ by all that is reached from README.md and docs/; theme and plugins keep theirs."""
    docs = Path(config.docs_dir)
    for file in [*files]:
        if file.src_dir == config.docs_dir:
            files.remove(file)
    wanted = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / STYLE, ROOT / CARD, *sorted(docs.rglob("*.md"))]
    known = set(wanted)
    for path in wanted:  # which grows
        name = str(path.relative_to(ROOT))
        files.append(File(name, str(ROOT), config.site_dir, config.use_directory_urls))
        if path.suffix == ".md":
            linked = {target for _, target in _targets(path, path.read_text()) if target.is_file()}
            wanted += sorted(linked - known)
            known |= linked
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links to folders lead to the README.md in them, and set lists in Python-Markdown's way."""
    here = ROOT / page.file.src_uri
    for link, target in _targets(here, markdown):
        if target.name == "README.md" and not link.endswith("README.md"):
            markdown = re.sub(rf"(?<=\]\(){re.escape(link)}(?=[)#])", f"{link.rstrip('/')}/README.md", markdown)
    page.meta.setdefault("description", _first_paragraph(markdown))
    page.meta.setdefault("search", _weight(page.file.src_uri))
    # GitHub needs the backslash, Python-Markdown would show it.
    markdown = _ROW.sub(lambda row: _CODE.sub(lambda code: code[0].replace(r"\|", "|"), row[0]), markdown)
    return _with_wide_lists(markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let no command be cut, and no option be torn: commands wrap line by line, names of options do not."""

    def lines(block: re.Match[str]) -> str:
        told = re.sub(r"(?<=[ \n])-\S+", r'<span class="option">\g<0></span>', block[0])
        return "".join(f'<span class="command">{line}</span>' for line in told.splitlines(keepends=True))

    html = _TABLE.sub(lambda table: _labelled(table[0], page), html)
    html = _PICTURE.sub(r'<a href="\2" title="enlarge">\1</a>', html)
    if page.file.src_uri == "docs/troubleshooting.md":
        html = _ITEM.sub(
            lambda item: f'<li id="{_place_of_error(page, item[1], item[2])}">{item[1]}{item[2]}</li>', html
        )
    html = re.sub(r"<code>(-[^<\s]+)</code>", r'<code class="option">\1</code>', html)
    return _COMMANDS.sub(lines, html)


def _weight(name: str) -> dict[str, float | bool]:
    """Return what the search does with a page: guides come before internals, results are found from their page."""
    if _NOT_FOUND_BY_SEARCH.fullmatch(name):
        return {"exclude": True}
    return {"boost": 0.3 if _INTERNAL.match(name) else 0.4 if name.startswith("docs/api/") else 1}


def _first_paragraph(markdown: str) -> str:
    """Return the beginning of a page's first paragraph as plain text, cut after a word."""
    parts = re.split(r"\n\s*\n", _FENCE.sub("", re.sub(r"<!--.*?-->", "", markdown, flags=re.DOTALL)))
    prose = (part for part in parts if re.match(r"[A-Z*`\[]", part.strip()) and not part.strip().startswith("[!["))
    text = " ".join(re.sub(r"\[([^]]*)\]\([^)]*\)|[*`]", r"\1", next(prose, "")).split())
    return text if len(text) <= _LONGEST else text[: text.rfind(" ", 0, _LONGEST)] + "..."


def _labelled(table: str, page: Page) -> str:
    """Return a table whose cells have the text of their column's heading as ``data-label``; note rows of errors."""
    heads = [_plain(head) for head in re.findall(r"<th\b[^>]*>(.*?)</th>", table, re.DOTALL)]
    says = bool(heads) and bool(_OF_ERRORS.fullmatch(heads[0]))

    def labelled(row: re.Match[str]) -> str:
        cells = re.findall(r"<td\b([^>]*)>(.*?)</td>", row[2], re.DOTALL)
        if not cells:
            return row[0]
        place = ""
        if says:
            place = _place_of_error(page, cells[0][1], " ".join(cell for _, cell in cells[1:]))
        named = (f'<td{more} data-label="{head}">{cell}</td>' for head, (more, cell) in zip(heads, cells, strict=True))
        return f"<tr{row[1]}" + (f' id="{place}">' if place else ">") + "".join(named) + "</tr>"

    table = re.sub(r"<code>([^<]{16,})</code>", lambda code: f"<code>{_BREAKS.sub('<wbr>', code[1])}</code>", table)
    return re.sub(r"<tr\b([^>]*)>(.*?)</tr>", labelled, table, flags=re.DOTALL)


def _place_of_error(page: Page, says: str, remedy: str) -> str:
    """Let the search find an error by its text, and return the name of its place on the page."""
    place = f"error-{len(_errors)}"
    _errors.append({"location": f"{page.url}#{place}", "title": _plain(says), "text": _plain(remedy), "boost": 2})
    return place


def _plain(html: str) -> str:
    """Return the text of HTML, still escaped."""
    return " ".join(re.sub(r"<[^>]+>", "", html).replace('"', "&quot;").split())


def _with_wide_lists(markdown: str) -> str:
    """Return the page with 4 spaces before what belongs to an item, and an empty line before lists and tables."""
    lines: list[str] = []
    width, long = 0, False  # of the item's marker, 0 outside lists; whether the item has several paragraphs
    fenced = False  # outside lists
    for line in markdown.splitlines():
        if line.startswith("```"):
            fenced, width = not fenced, 0
        elif not fenced:
            marker = _MARKER.match(line)
            before = lines[-1] if lines else ""
            # An item of several paragraphs would swallow the next one.
            begins = long or not width if marker else line.startswith("|") and not before.startswith("|")
            long = not marker and bool(width) and (long or not line)
            if begins and before.strip():
                lines.append("")
            if marker:
                width = len(marker[0])
            elif width and line.startswith(" " * width):
                line = "    " + line[width:]
            elif line.strip():
                width = 0
        lines.append(line)
    return "\n".join(lines)


def _targets(page: Path, text: str) -> Iterator[tuple[str, Path]]:
    """Yield each link of a page to another file of the repository, as it is written, and the file."""
    for link in sorted(set(_LINK.findall(_FENCE.sub("", text)))):
        target = (page.parent / link).resolve()
        if target.is_dir() and (target / "README.md").exists():
            target /= "README.md"
        if target.is_relative_to(ROOT):
            yield link, target
