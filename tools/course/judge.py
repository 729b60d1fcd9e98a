"""Whether the answers that a student's process hands out are right, found in this process.

No line of the student runs here: answers arrive as data, and functions stay in their process and
are called there (`exercises.handout`). What counts is the last answer to each exercise that is one.
"""

from __future__ import annotations

import socket
import threading
from pathlib import Path
from typing import Any

from exercises.check import Result, load, verdict
from exercises.encoding import Unreadable, decode
from exercises.handout import Broken, HandedFunction, receive, send

MOST_ANSWERS = 2000  # of one submission; a loop that tries every number ends here


class Judge:
    """Listens on a socket for the answers of one submission.

    address  the file of the socket, which is made
    unknown  the sentences about exercises that do not exist, in the order of the checks
    """

    def __init__(self, address: Path):
        self.unknown: list[str] = []
        self._last: dict[str, Any] = {}  # number: an answer, or the Result about a function
        self._open: dict[str, str] = {}  # number: why there is no answer
        self._listener = socket.socket(socket.AF_UNIX)
        try:
            self._listener.bind(str(address))
        except OSError as error:
            self._listener.close()
            raise OSError(
                f"Answers cannot be heard on {address} ({error}): set TMPDIR to a folder of your "
                "own with a short path."
            ) from error
        self._listener.listen(8)
        self._connection: socket.socket | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def results(self) -> dict[str, Result]:
        """{number: what was found} of every exercise that was checked. Call it after `close`."""
        found = {number: Result(None, said) for number, said in self._open.items()}
        for number, answer in self._last.items():
            if isinstance(answer, Result):
                found[number] = answer
            else:
                found[number] = verdict(load(number), answer)
        return found

    def close(self) -> None:
        """Hear nothing more. The student's process must have ended."""
        self._closed = True
        for connection in (self._connection, self._listener):
            if connection is not None:
                # A read that is under way ends with nothing.
                try:
                    connection.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass
        self._listener.close()
        self._thread.join(60)

    def _serve(self) -> None:
        heard = 0
        while not self._closed:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            heard += 1
            self._connection = connection
            with connection:
                try:
                    if heard > MOST_ANSWERS:
                        send(connection, {"refused": f"More than {MOST_ANSWERS:,} answers."})
                    else:
                        self._hear(connection)
                except (Broken, OSError, ValueError):
                    continue  # whoever connected sent no answer, or is gone

    def _hear(self, connection: socket.socket) -> None:
        message = receive(connection)
        number = message.get("number")
        try:
            asked = load(number)
        except ValueError as error:
            self.unknown.append(str(error))
            send(connection, {"refused": str(error)})
            return
        if message.get("missing") is True:
            self._open[number] = "not answered yet."
            send(connection, {"done": True})
            return
        called: list[HandedFunction] = []

        def function(place: int) -> HandedFunction:
            called.append(HandedFunction(connection, place))
            return called[-1]

        try:
            answer = decode(message.get("answer"), function)
        except ValueError:
            answer = Unreadable("no exercise")
        if answer is None or answer is ...:
            self._open[number] = "not answered yet."
            send(connection, {"done": True})
            return
        # A function lives as long as its process waits here, and a value can be looked at later.
        self._last[number] = verdict(asked, answer) if called else answer
        send(connection, {"done": True})
