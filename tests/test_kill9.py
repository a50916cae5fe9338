"""What was finished outlives kill -9, at whatever moment."""

import subprocess
import sys

import pytest


@pytest.mark.long
@pytest.mark.skipif(sys.platform == "win32", reason="there is no fork")
def test_nothing_that_was_finished_is_lost_to_kill_9() -> None:
    command = [sys.executable, "-m", "tests.kill9", "0", "20"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "nothing was lost" in done.stdout, done.stderr
