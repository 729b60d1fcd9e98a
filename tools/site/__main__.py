"""`python -m tools.site`: write build/site, and say how large it is and how long it took.

With --picture also docs/lesson.png, README's picture of a lesson.
"""

from __future__ import annotations

import argparse
import time

from tight_fit.command.wrapper import run
from tools.site import picture
from tools.site.build import build


def main() -> None:
    """Build the site."""
    options = argparse.ArgumentParser(prog="python -m tools.site", description=__doc__)
    options.add_argument("--picture", action="store_true", help="write docs/lesson.png as well")
    asked = options.parse_args()
    begun = time.perf_counter()
    site = build()
    files = [file for file in site.rglob("*") if file.is_file()]
    size = sum(file.stat().st_size for file in files) / 1e6
    pages = sum(file.suffix == ".html" for file in files)
    took = time.perf_counter() - begun
    if asked.picture:
        print(f"Picture: {picture.write(site)}")
    print(f"Site: {pages} pages, {size:.0f} MB, {took:.0f} s: {site / 'index.html'}")


if __name__ == "__main__":
    raise SystemExit(run(main, "python -m tools.site"))
