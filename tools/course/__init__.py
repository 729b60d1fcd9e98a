"""The tooling behind `make`: run and clean notebooks; write pages, tables, records and badges."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = ROOT / "notebooks"
BUILD = ROOT / "build"
