import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fusionlayer.base.errors import ConfigError
from fusionlayer.base.registry import Registry
from tests.loops import looped

PACKAGE = {
    "__init__.py": "from fusionlayer.base.registry import Registry\nregistry = Registry('animal', __name__, 'animals')",
    "cat.py": "from . import registry\nregistry.add('cat', lambda legs=4: f'cat on {legs} legs')",
    "dog.py": "from . import registry\nregistry.add_preset('kitten', 'cat', legs=3)",
}


@pytest.fixture
def animals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Registry[str]]:
    """The registry of a package of two modules, not yet imported."""
    folder = tmp_path / "animals"
    folder.mkdir()
    for name, text in PACKAGE.items():
        (folder / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    import animals  # type: ignore[import-not-found]

    yield animals.registry
    for name in [name for name in sys.modules if name.split(".")[0] == "animals"]:
        del sys.modules[name]


def test_modules_are_found_by_themselves(animals: Registry[str]) -> None:
    assert animals.names() == ["cat", "kitten"]
    assert animals.get("cat") == "cat on 4 legs"


def test_a_module_of_a_package_that_waits_is_imported_for_its_names_alone() -> None:
    code = """
import sys
from fusionlayer import codecs
told = []
for name in ("int8", "qsdp_gradients", "thc"):
    codecs.get(name)
    told.append([m.rpartition(".")[2] for m in sys.modules if m.startswith("fusionlayer.codecs.research.")])
assert told == [[], ["qsdp"], ["qsdp", "thc"]], told
assert {"oktopk", "taco"} < set(codecs.names())
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_presets_change_defaults_and_arguments_win(animals: Registry[str]) -> None:
    assert animals.get("kitten") == "cat on 3 legs"
    assert animals.get("kitten", legs=2) == "cat on 2 legs"


@looped(
    "name, options, message",
    [
        ("cta", {}, "unknown animal 'cta'; did you mean 'cat'[?] known: cat, kitten"),
        ("whale", {}, "unknown animal 'whale'; known: cat, kitten"),
        (None, {}, "unknown animal None; known: cat, kitten"),
        ("kitten", {"tails": 1}, "animal 'cat' cannot take the options .*tails.*"),
    ],
)
def test_what_is_unknown_is_refused(animals: Registry[str], name: str, options: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        animals.get(name, **options)


def test_a_taken_name_is_refused(animals: Registry[str]) -> None:
    assert animals.names()
    for name in ("cat", "kitten"):
        with pytest.raises(ConfigError, match=f"animal name '{name}' is taken"):
            animals.add(name, str)
        with pytest.raises(ConfigError, match=f"animal name '{name}' is taken"):
            animals.add_preset(name, "cat")
    animals.remove("kitten")
    assert animals.names() == ["cat"]


def test_threads_that_come_first_together_all_see_every_name(animals: Registry[str], tmp_path: Path) -> None:
    entered, go_on = threading.Event(), threading.Event()
    sys.modules["animals"].gate = (entered, go_on)  # type: ignore[attr-defined]
    gated = "from . import gate\ngate[0].set()\nassert gate[1].wait(180)\n" + PACKAGE["cat.py"]
    (tmp_path / "animals" / "cat.py").write_text(gated)
    with ThreadPoolExecutor() as pool:
        first = pool.submit(animals.names)
        assert entered.wait(180)
        second = pool.submit(animals.names)
        go_on.set()
        assert first.result() == second.result() == ["cat", "kitten"]


def test_an_import_that_fails_fails_every_time(animals: Registry[str], tmp_path: Path) -> None:
    (tmp_path / "animals" / "fox.py").write_text("raise RuntimeError('what does it say')")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="what does it say"):
            animals.names()
