"""How an answer gets from the process of a student to the one that checks it.

A teacher's program listens on a socket beside this file, in a copy of the project in which the
student's notebook runs. Where there is such a socket, `check` hands the answer out: it sends the
number and the answer in the form of `exercises.encoding`, and learns nothing about them. Whether
the answer is right is found by the program that listens, which runs no line of the student.

An answer that is a function stays where it was made, with all that it needs, and is called over the
same connection: the checking process chooses the arguments and gets back the result. A test that
must watch a function at work (count its steps, hold its tensors) does so in a function of its own
beside the student's, and `observe` calls that one; what it saw comes back as plain values, which
the checking process compares.

Messages are JSON, each after its length in eight bytes. A socket of the family AF_UNIX is needed,
which Linux and macOS have.
"""

from __future__ import annotations

import builtins
import importlib
import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from exercises.encoding import decode, encode, is_tensor

ADDRESS = Path(__file__).with_name("handout.sock")
LARGEST = 32 * 2**20  # bytes of a message
MOST_PARTS = 10**6  # values in a message: each takes some hundred bytes where it is read
RAISED = (
    *("ValueError", "TypeError", "AssertionError", "IndexError", "KeyError", "AttributeError"),
    *("ZeroDivisionError", "NotImplementedError", "OverflowError", "NameError", "RuntimeError"),
)


class Broken(RuntimeError):
    """The other process ended, or sent what is no message."""


class HandedFunction:
    """A function in a student's process: called from here, run there.

    Arguments are sent as `exercises.encoding` writes them. After a call, the tensors and lists
    among the arguments hold what they hold there, so that a function that writes into its arguments
    does so here too. Raises what the function raises, as the nearest built-in exception, and Broken
    where its process has ended.
    """

    def __init__(self, connection: socket.socket, place: int):
        self._connection, self._place = connection, place

    def __call__(self, *arguments: Any) -> Any:
        return self.observe(None, *arguments)

    def observe(self, watcher: Callable | None, *arguments: Any) -> Any:
        """What `watcher(function, *arguments)` gives there; None calls the function alone."""
        name = [watcher.__module__, watcher.__qualname__] if watcher else None
        sent = encode(list(arguments), [])
        send(self._connection, {"function": self._place, "watcher": name, "arguments": sent})
        reply = receive(self._connection)
        if "raised" in reply:
            raise _exception(*reply["raised"])
        try:
            for before, after in zip(arguments, self._decoded(reply["arguments"])):
                _write_back(before, after)
            return self._decoded(reply["result"])
        except (KeyError, TypeError) as error:
            raise Broken("The student's process sent what is no result.") from error

    def _decoded(self, data: Any) -> Any:
        return decode(data, lambda place: HandedFunction(self._connection, place))


def observe(watcher: Callable, answer: Callable, *arguments: Any) -> Any:
    """What `watcher(answer, *arguments)` gives, computed in the process that holds the answer.

    watcher    a function at the top of a module; gives plain values, tensors or arrays
    arguments  plain values, tensors and arrays
    """
    if isinstance(answer, HandedFunction):
        return answer.observe(watcher, *arguments)
    return watcher(answer, *arguments)


def hand_out(number: Any, answer: Any, missing: bool) -> None:
    """Send an answer to the process that listens on `ADDRESS`, and serve its calls to the end.

    Raises ValueError where that process knows no such exercise, OSError where it is gone.
    """
    functions: list[Callable] = []
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(ADDRESS))
        message = {
            "number": number if isinstance(number, str) else repr(number)[:80],
            "missing": missing,
            "answer": encode(answer, functions),
        }
        send(connection, message)
        while not (request := receive(connection)).get("done"):
            if "refused" in request:
                raise ValueError(request["refused"])
            send(connection, served(request, functions))


def served(request: dict[str, Any], functions: list[Callable]) -> dict[str, Any]:
    """The reply to one call."""
    function = functions[request["function"]]
    arguments = decode(request["arguments"], functions.__getitem__)
    try:
        if request["watcher"]:
            module, name = request["watcher"]
            watcher = getattr(importlib.import_module(module), name)
            result = watcher(function, *arguments)
        else:
            result = function(*arguments)
    except Exception as error:
        names = [kind.__name__ for kind in type(error).__mro__]
        nearest = next((name for name in names if name in RAISED), "RuntimeError")
        told = str(error.args[0]) if nearest == "KeyError" and error.args else str(error)
        text = told if nearest == names[0] else f"{names[0]}: {told}"
        return {"raised": [nearest, text[:2000]]}
    return {"result": encode(result, functions), "arguments": encode(arguments, functions)}


def _exception(name: Any, text: Any) -> Exception:
    return getattr(builtins, name if name in RAISED else "RuntimeError")(str(text)[:2000])


def _write_back(before: Any, after: Any) -> None:
    if is_tensor(before) and is_tensor(after):
        if before.shape == after.shape and before.dtype == after.dtype:
            before.detach().copy_(after)
    elif isinstance(before, list) and isinstance(after, list):
        before[:] = after


def send(connection: socket.socket, message: dict[str, Any]) -> None:
    """Send one message. Raises ValueError for more than `LARGEST` bytes or `MOST_PARTS` values."""
    data = json.dumps(message).encode()
    if len(data) > LARGEST:
        raise ValueError(f"An answer has at most {LARGEST // 2**20} MiB, and this has more.")
    if _parts(data) > MOST_PARTS:
        raise ValueError(f"An answer has at most {MOST_PARTS:,} values, and this has more.")
    connection.sendall(len(data).to_bytes(8, "big") + data)


def receive(connection: socket.socket) -> dict[str, Any]:
    """Read one message. Raises Broken where there is none, or something else comes."""
    length = int.from_bytes(_exactly(connection, 8), "big")
    if length > LARGEST:
        raise Broken(f"A message has at most {LARGEST // 2**20} MiB, and this has more.")
    data = _exactly(connection, length)
    if _parts(data) > MOST_PARTS:
        raise Broken(f"A message has at most {MOST_PARTS:,} values, and this has more.")
    try:
        message = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Broken("What came is no message.") from error
    if not isinstance(message, dict):
        raise Broken("What came is no message.")
    return message


def _parts(data: bytes) -> int:
    """At least the number of values in a message; tensors count as one."""
    return sum(map(data.count, (b"[", b"{", b",")))


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        try:
            part = connection.recv(min(count - len(data), 2**20))
        except OSError as error:
            raise Broken("The other process does not answer.") from error
        if not part:
            raise Broken("The other process ended.")
        data += part
    return bytes(data)
