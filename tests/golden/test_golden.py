from tests.loops import looped

from .regenerate import FILES, FOLDER, text


@looped("name", FILES)
def test_bytes_are_what_they_were(name: str) -> None:
    stored, made = ((FOLDER / name).read_text().splitlines(), text(name).splitlines())
    changed = sorted(set(stored) ^ set(made))
    assert not changed, f"{len(changed)} lines of {name} differ; if meant: python -m tests.golden.regenerate"
    assert stored == made
