"""Words that readers need twice: the package's docstrings, comments and messages, and pages, use the field's terms."""

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.pages import PAGES, ROOT

PACKAGE = Path(__file__).parents[1] / "fusionlayer"


class Word(NamedTuple):
    """A word in a sense that is not used: what finds it, what it finds, what it does not, and what to write."""

    pattern: str
    wrong: str
    right: str
    instead: str


WORDS = [
    Word(r"\btravel(s|led|ling)?\b", "values travel as they are", "values are sent", "send"),
    Word(r"\bunder way\b", "a message is under way", "a message is in flight", "in flight"),
    Word(r"\b(told|tells?|telling)\b", "the rank is told of it", "the rank reports it", "report, log, print"),
    Word(r"\b[Ww]ho(m|ever)?\b", "the rank who is late", "a parameter whose rank is late", "the rank, which"),
    Word(r"\b[Ll]ate ranks?\b", "late ranks are named", "stragglers are named", "straggler"),
    Word(r"\blost (rank|peer)s?\b|\bpeers? (is|was|are) lost\b", "a peer was lost", "a peer failed", "failed"),
    Word(r"\bbeside\b", "beside the model", "besides, next to the model", "next to, compared with"),
    Word(r"\b[Ii]n place of\b", "in place of gloo", "changed in place, instead of gloo", "instead of"),
    Word(r"\bas ever\b", "start it as ever", "as everybody does", "as usual"),
    Word(r"\bends? in time\b", "a failure ends in time", "ends within the timeout", "within the timeout"),
    Word(r"\bthe (fronts?|face)\b", "the front of it", "in front of it", "API, integration"),
    Word(r"\b(higher|lower) rooms?\b", "a lower room", "room for a message", "package"),
    Word(r"\b(learn|hear)s? of\b", "they learn of it", "they learn it", "are notified of"),
    Word(r"\bnobody\b", "nobody waits for it", "no rank waits for it", "no rank, no process"),
    Word(r"\bmay not return\b", "a call that may not return", "a call that may block", "may block forever"),
    Word(
        r"\broll call|\bcadences?\b|\btellers?\b", "the teller's board", "the reporter's board", "reporter, step state"
    ),
    Word(r"\b[Dd]esks?\b|\b[Rr]osters?\b", "a member's desk", "a member's store", "store, member list"),
    Word(r"\bbr(ings?|ought)\b", "what brings messages", "what copies messages", "fetch, copy"),
]


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the strings and comments of a module with their first lines."""
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if re.fullmatch(r"(['\"])\w+\1", token.string):
            continue  # a name in __all__
        if token.type in (tokenize.STRING, tokenize.COMMENT) or tokenize.tok_name[token.type] == "FSTRING_MIDDLE":
            yield token.start[0], re.sub(r"``[^`\n]*``|`\w+`", "``", token.string)  # names of the code


def test_each_pattern_finds_its_wrong_example_and_not_the_right_one() -> None:
    for word in WORDS:
        assert re.search(word.pattern, word.wrong) and not re.search(word.pattern, word.right), word


def test_texts_of_the_package_use_the_terms_of_the_field() -> None:
    found = []
    for path in PACKAGE.rglob("*.py"):
        place = path.relative_to(PACKAGE)
        for line, text in texts(path):
            for word in WORDS:
                for match in re.finditer(word.pattern, text):
                    at = line + text[: match.start()].count("\n")
                    found.append(f"{place}:{at}: {match.group()!r}; write {word.instead}")
    assert not found, "\n".join(sorted(found))


def test_pages_use_the_terms_of_the_field() -> None:
    found = []
    for page in (ROOT / name for name in PAGES if not name.startswith(("benchmarks/", "tests/"))):
        text = re.sub(r"```.*?```|`[^`]*`", "", page.read_text(), flags=re.DOTALL)
        found += [
            f"{page.name}: {match[0]!r}; write {w.instead}" for w in WORDS for match in re.finditer(w.pattern, text)
        ]
    assert not found, "\n".join(sorted(found))
