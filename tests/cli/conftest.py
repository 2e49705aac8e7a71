import pytest


@pytest.fixture(autouse=True)
def room_for_all_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
