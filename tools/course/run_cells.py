"""Executes the cells of one submission, in a process of its own that trusts nothing and nobody.

Started by path as `python run_cells.py CELLS PROGRESS`: CELLS is a JSON list of the code cells,
[number, source] each; to the open file with the descriptor PROGRESS a line is added before each
cell and after one that fails. A cell that fails does not stop the others. What cells print is lost.
"""

from __future__ import annotations

import json
import os
import sys


def main(cells: str, progress: str) -> None:
    with open(cells, encoding="utf8") as file:
        sources = json.load(file)
    told = int(progress)
    sys.path[0] = os.getcwd()  # not this file's folder
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    class Shell(InteractiveShell):
        def enable_gui(self, gui=None):  # for %matplotlib; there is no window to show
            pass

    config = Config()
    config.HistoryManager.enabled = False
    shell = Shell.instance(config=config)
    shell.display_formatter.active_types = ["text/plain"]
    for number, source in sources:
        os.write(told, f"{json.dumps({'cell': number})}\n".encode())
        try:
            result = shell.run_cell(source, store_history=True)
            error = result.error_before_exec or result.error_in_exec
        except BaseException as raised:  # the shell itself, when a cell breaks it
            error = raised
        if error is not None:
            said = f"{type(error).__name__}: {str(error)[:300]}"
            os.write(told, f"{json.dumps({'cell': number, 'error': said})}\n".encode())
    os.write(told, f"{json.dumps({'cell': None})}\n".encode())
    os._exit(0)  # threads and exit handlers of a student do not hold the class up


if __name__ == "__main__":
    main(*sys.argv[1:])
