"""The site as ``make docs`` builds it, once for all tests of a process."""

import atexit
import os
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from tests.pages import ROOT

__all__ = ["site"]


@cache
def site() -> Path:
    """Return the folder of the site. Tests that use it share a process: ``pytest.mark.xdist_group("site")``."""
    folder = Path(tempfile.mkdtemp(prefix="site-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environ = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "SITE_URL": "", "REPOSITORY_URL": ""}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder
