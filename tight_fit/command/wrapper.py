"""Running a command so that whatever ends it is told in one sentence, with an exit status.

    if __name__ == "__main__":
        raise SystemExit(run(main, "python -m tight_fit"))

The exit statuses are those of a shell: 2 for an error, 130 after Ctrl-C (128 + SIGINT), 141 where
the reader of the output went away (128 + SIGPIPE). What a command returns itself is kept.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import inspect
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from typing import Any

FAILED, INTERRUPTED, NO_READER = 2, 130, 141

_FAULTS = {
    errno.ENOSPC: "there is no space left on the disk: free some, or write to another one",
    errno.EDQUOT: "the disk quota is used up: free some space, or write to another disk",
    errno.EROFS: "the disk is read-only: write to another folder",
    errno.EACCES: "this is not allowed: write to a folder of your own",
    errno.EPERM: "this is not allowed: write to a folder of your own",
}


_own_process = False  # whether `run` is running: then the process does nothing but a command


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Inside, imports take less time, as nothing that is imported is garbage.

    In a process of a command's own it is not looked at later either, where as much time would go.
    PyTorch asks for the line at which each of its operations is registered: it is told the number
    and not the text, for which Python would go through all modules.
    """
    gc.disable()
    told = inspect.getframeinfo

    def told_without_lines(frame: Any, context: int = 0) -> Any:
        return told(frame, context)  # who asks for lines, as inspect.stack does, gets them

    inspect.getframeinfo = told_without_lines
    try:
        yield
    finally:
        inspect.getframeinfo = told
        gc.enable()
        if _own_process:
            gc.freeze()


def run(main: Callable[[], int | None], name: str) -> int:
    """Call `main()` and return the exit status of the command `name`.

    What the output's encoding lacks is printed as a question mark. Ctrl-C, a full or read-only
    disk, too little memory, a value that is nested too deeply, and any ValueError, OSError or
    ModuleNotFoundError that `main` raises become one line on stderr; a closed pipe is no error of
    ours and says nothing. Other exceptions are faults of this project and are raised, with their
    traceback.
    """
    global _own_process
    _replace_what_cannot_be_encoded()
    _own_process = True
    gc.set_threshold(50_000, 10, 10)  # a trace makes many objects that stay until its end
    try:
        status = main() or 0
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        _say("\nInterrupted: what was unfinished is not kept.")
        return INTERRUPTED
    except BrokenPipeError:
        return NO_READER
    except MemoryError:
        _say(f"{name}: error: this machine has too little memory for that: ask for less.")
    except RecursionError:
        _say(f"{name}: error: the input is nested too deeply to be read.")
    except (ValueError, OSError, ModuleNotFoundError) as error:
        _say(f"{name}: error: {sentence(error)}")
    except RuntimeError as error:
        if "home directory" not in str(error):  # of pathlib, for "~" and "~user"
            raise
        _say(f"{name}: error: there is no home directory for '~' here: write the whole path.")
    finally:
        _own_process = False
        gc.freeze()  # Python would look for garbage once more at its end, for up to a second
        _close()
    return FAILED


def sentence(error: BaseException) -> str:
    """What an error says, in one line that ends with a full stop.

    Where the operating system refused something, the line says what was refused and what to do.
    """
    if isinstance(error, shutil.Error) and error.args and isinstance(error.args[0], list):
        _, target, why = error.args[0][0]  # of the many files that were not copied
        number = re.match(r"\[Errno (\d+)\]", str(why))
        error = OSError(int(number[1]) if number else 0, str(why), str(target))
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return "The name of a file is too long: write the name of one that exists."
    fault = _FAULTS.get(error.errno or 0) if isinstance(error, OSError) else None
    if fault:
        name = getattr(error, "filename", None)
        text = f"{f'{name} cannot be written' if name else 'the output cannot be written'}: {fault}"
    else:
        text = " ".join(str(error).split()) or type(error).__name__
    return text if text.endswith((".", "!", "?")) else f"{text}."


def _replace_what_cannot_be_encoded() -> None:
    for stream in (sys.stdout, sys.stderr):
        reconfigure: Any = getattr(stream, "reconfigure", None)
        if reconfigure:
            reconfigure(errors="replace")


def _say(line: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # nobody can read it, and that is no new error
        print(line, file=sys.stderr, flush=True)


def _close() -> None:
    """Flush the streams; where that fails, drop what is left, which Python would try again."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                nothing = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nothing, stream.fileno())
                os.close(nothing)
