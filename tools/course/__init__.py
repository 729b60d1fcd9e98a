"""The tooling behind `make`: execute and clean notebooks, make pages and tables, keep records, write badges."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = ROOT / "notebooks"
BUILD = ROOT / "build"
