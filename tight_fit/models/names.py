"""Names of models as people type them, and where the configuration of each is found.

Nothing here imports PyTorch or transformers.
"""

from __future__ import annotations

import difflib
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

from tight_fit.checks import shown
from tight_fit.files import small_text
from tight_fit.models import hub
from tight_fit.models.local import MIRROR, in_cache, in_mirror
from tight_fit.models.repositories import Repo

KNOWN = Path(__file__).parent / "known" / "configs.json"
LARGEST = 1 << 22  # bytes of a config.json; of published ones the largest name 21,843 classes

# "owners" has names without an owner, under which the hub kept its first models, by who owns them
# today; "families" the model of each that is meant where nothing more is said.
_SHORT = json.loads(KNOWN.with_name("short_names.json").read_text(encoding="utf8"))
FAMILIES: dict[str, str] = _SHORT["families"]
LEGACY = {name: f"{owner}/{name}" for owner, names in _SHORT["owners"].items() for name in names}


@cache
def known() -> dict[str, dict[str, Any]]:
    """{name on the hub: what its published config.json says} of the models that come with this."""
    return json.loads(KNOWN.read_text(encoding="utf8"))


def full_name(name: str) -> str:
    """The name on the hub of a model that has an older or a shorter one; others as they are."""
    name = LEGACY.get(FAMILIES.get(name, name), name)
    if "/" in name or Path(name).suffix == ".json" or Path(name).is_dir():
        return name
    asked = name.lower()
    found = [full for full in (*known(), *LEGACY.values()) if full.split("/")[1].lower() == asked]
    return found[0] if found else name


def check_name(name: str) -> None:
    """Raises FileNotFoundError for what is no folder, no file and no name of the hub's form, and
    for GGUF."""
    path = Path(name).expanduser()
    if re.search(r"[-_.]gguf$", name, re.I) and not (path / "config.json").is_file():
        raise FileNotFoundError(
            f"model={name!r} is stored as GGUF, from which nothing is trained: name the model that "
            "it was made from, with --base nf4 for adapters beside weights in 4 bits."
        )
    if path.is_dir() or path.suffix == ".json":
        return
    if name.count("/") == 1 and not name.startswith((".", "/", "~")) and not name.endswith("/"):
        return
    names = {full.split("/")[1].lower(): full for full in (*LEGACY.values(), *known())}
    near = difflib.get_close_matches(name.lower().rpartition("/")[2], names, 2, 0.6)
    question = f" (did you mean {' or '.join(names[key] for key in near)}?)" if near else ""
    raise FileNotFoundError(
        f"model={name!r}{question} is neither a folder, nor a config.json, nor a name of the hub's "
        "form owner/name."
    )


def config_file(source: str | Path) -> Path | dict[str, Any]:
    """The config.json of a model, or its values where they come with this package.

    source  a folder, a config.json, or a name, also a short or an older one
    Raises FileNotFoundError, ValueError for another file, and hub.HubUnavailable where a name is
    nowhere to be had.
    """
    name = full_name(str(source))
    check_name(name)
    path = Path(name).expanduser()
    if path.is_dir() or path.suffix == ".json":
        return path / "config.json" if path.is_dir() else path
    if name in known():
        return dict(known()[name])
    if path.is_file():
        raise ValueError(
            f"{shown(name)} is a file, and no config.json: give the folder of the model, or its "
            "config.json."
        )
    return _on_the_hub(name) / "config.json"


def _on_the_hub(name: str) -> Path:
    """The folder with the config.json of a repository, from the mirror, the cache or the hub."""
    repo = Repo(name, "model", ("main",), ("config.json",), (("config.json",),))
    copy_here = in_mirror(repo) or in_cache(repo)
    if copy_here:
        return copy_here.path
    problem = hub.unreachable(repo)
    if problem is None:
        problem, fetched = hub.download(repo)
        if fetched:
            return fetched.path
    raise hub.HubUnavailable(
        f"The configuration of {name} cannot be had ({problem}; neither {MIRROR} nor the cache has "
        "it): connect to the internet, give a folder or a config.json instead of the name, or "
        f"one of {', '.join(list(known())[:3])} and the others that come with this package."
    )


def values_of(source: str | Path) -> dict[str, Any]:
    """What a model's config.json says. Raises what `config_file` raises, and ValueError."""
    found = config_file(source)
    if isinstance(found, dict):
        return found
    try:
        values = json.loads(small_text(found, LARGEST))
    except FileNotFoundError:
        raise FileNotFoundError(
            f"There is no file {found}: give the folder or the config.json of a model."
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{found} is not JSON ({error}).") from None
    if not isinstance(values, dict) or values.get("model_type") is None:
        raise ValueError(
            f"{found} has no model_type: it is not the configuration of a transformers model."
        )
    for name, right in (("model_type", str), ("architectures", list)):
        value = values.get(name)
        if value is not None and not isinstance(value, right):
            kind = "a text" if right is str else "a list of class names"
            raise ValueError(f"{found} has {name}={shown(value)}, which is not {kind}.")
    return values
