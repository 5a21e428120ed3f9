"""The command of the user's that runs when a run has ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

HOOK_SECONDS = 60.0
_STANDARD_ERROR = 2


def on_finish(
    command: str, exit_code: int, out: Path, summary: Mapping[str, Any], *, seconds: float = HOOK_SECONDS
) -> str | None:
    """Run a command by the shell and wait for it, at most so many seconds; then it and what it started are killed.

    It finds LONGBATCH_OUT, LONGBATCH_EXIT_CODE and, as JSON, LONGBATCH_SUMMARY; what it prints goes to standard
    error. Returns what went wrong, for a warning, or None. The text does not repeat the command, which may hold a
    token.
    """
    environment = {
        **os.environ,
        "LONGBATCH_OUT": str(out.absolute()),
        "LONGBATCH_EXIT_CODE": str(int(exit_code)),
        "LONGBATCH_SUMMARY": json.dumps(dict(summary)),
    }
    try:
        process = subprocess.Popen(
            command,
            shell=True,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=_STANDARD_ERROR,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        return f"the --on-finish command could not be started ({type(error).__name__})"
    try:
        code = process.wait(seconds)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return f"the --on-finish command took more than {seconds:g} seconds and was ended"
    return f"the --on-finish command ended with {code}" if code else None
