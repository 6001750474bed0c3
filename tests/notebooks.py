"""The notebooks of ``examples/notebooks``: executed, and written anew with outputs by ``python -m tests.notebooks``.

They are committed with outputs, because readers look at them where they cannot run them.
"""

from __future__ import annotations

import os
import re
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[1] / "examples" / "notebooks"
PATHS = sorted(FOLDER.glob("*.ipynb"))
VARIES = "varies"
"""The tag of cells whose output has times, or depends on the machine."""
ENVIRONMENT = {
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "LOCKSTEP_CONFIG_FILE": "",
    "XDG_CONFIG_HOME": "/nonexistent",
    "NO_COLOR": "1",
}


def read(path: Path) -> Any:
    return nbformat.read(path, as_version=4)


def executed(path: Path, folder: Path) -> Any:
    """The notebook with the outputs of a run in ``folder``. Raises CellExecutionError where a cell does."""
    notebook = read(path)
    client = NotebookClient(notebook, timeout=150, resources={"metadata": {"path": str(folder)}})
    with mock.patch.dict(os.environ, ENVIRONMENT):
        client.execute()
    for cell in code_cells(notebook):
        cell.metadata.pop("execution", None)  # when it ran
        cell.outputs = joined(cell.outputs)
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    return notebook


def joined(outputs: list[Any]) -> list[Any]:
    """Without what goes to stderr, and the machine's name; the pieces in which text arrives, as one."""
    kept = [output for output in outputs if output.get("name") != "stderr"]
    text = "".join(output.text for output in kept if output.output_type == "stream")
    text = text.replace(f" on {socket.gethostname()} ", " on host ")
    rest = [output for output in kept if output.output_type != "stream"]
    return [*([nbformat.v4.new_output("stream", name="stdout", text=text)] if text else []), *rest]


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def text_of(cell: Any) -> str:
    """What the cell printed and returned, as plain text."""
    parts = [output.get("text") or output.get("data", {}).get("text/plain", "") for output in cell.outputs]
    return "".join(parts)


def paths_of_a_machine(text: str) -> list[str]:
    """Absolute paths, home folders and addresses, which a reader has no use for."""
    return re.findall(
        r"(?<![\w.:/])/(?:home|root|Users|tmp|work|var|usr|opt)/[^\s\"']*|\b127\.0\.0\.1\b", text
    )


if __name__ == "__main__":
    for path in PATHS:
        with tempfile.TemporaryDirectory() as place:
            nbformat.write(executed(path, Path(place)), path)
