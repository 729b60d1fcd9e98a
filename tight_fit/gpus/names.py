"""GPUs by their names in any spelling, those of drivers among them, or by their size alone."""

from __future__ import annotations

import difflib
import re

from tight_fit.checks import shown, whole
from tight_fit.gpus import calibration
from tight_fit.gpus.table import GPU, KNOWN
from tight_fit.units import GIB, MIB

MOST_CAPABLE = 20  # above every compute capability that there is
# A GPU given by its size alone, such as "8GB": which arithmetic it has is not known. Of a card sold
# with 8 GB PyTorch sees about 7.75 GiB, and less where ECC is on; 0.95 is below most of the table.
SEEN = 0.95
ANY = (8, 6)  # the compute capability assumed for it
SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(gb|gib|g)")
LEAST_SEEN = 0.85  # of the size that is written on a card
# What makers, drivers and shops write beside a name.
BESIDE = re.compile(
    r"nvidia|geforce|tesla|amd|instinct|gpu|sxm\d?|hbm\d\w?|blackwell|workstation|server|"
    r"max-?q|edition|generation|oam|480gb"
)
BEFORE = re.compile(r"(rtx|gtx)(pro)?")  # left out where people write "4090"
# Several at once: "2x4090", "4 x T4", "T4 x2". Kaggle writes "T4 x2".
SEVERAL = re.compile(r"(\d{1,3})\s*[x×*]\s*(?=\S)(.+)|(.+?)\s+[x×*]\s*(\d{1,3})", re.I)
# What people train on that no plan is made for, and why.
OTHERS = (
    (r"tpu.*|v[2-6][ep]?-\d+", "a TPU runs no CUDA"),
    (r"(apple )?m[1-9]( pro| max| ultra)?|mps|macbook.*", "Apple's GPUs run no CUDA"),
    (r"(intel )?(arc|gaudi|max).*|xpu", "Intel's GPUs run no CUDA"),
    (r"(amd |radeon )*(rx|w\d{4}).*|radeon.*", "of AMD's GPUs only Instincts are known"),
    (r"trn\d.*|trainium.*|inferentia.*", "Trainium runs no CUDA"),
    (
        r"(tesla |nvidia )?k(20|40|80)\w*|(nvidia |geforce )*gtx ?[67]\d\d(?!\d).*",
        "CUDA 12 and today's PyTorch have left Kepler GPUs out",
    ),
    (
        r"(tesla |nvidia )?m(10|40|60)\b.*|(nvidia |geforce )*gtx ?(9\d\d(?!\d).*|titan x)",
        "PyTorch's builds for CUDA 12.8 and later have no kernels for Maxwell GPUs",
    ),
    (
        r"(nvidia )?(gb10|dgx spark|thor|(jetson )?(agx )?(orin|xavier|nano|thor).*|jetson.*)",
        "its GPU shares one memory with the CPU, of which the system and the data take a part",
    ),
    (r"cpu|host|none", "a CPU has main memory, and no GPU's kernels"),
)


def find(name: str) -> GPU:
    """The GPU of that name in any spelling, or of a size such as "8GB" (as sold) or "7.75GiB".

    Where a name fits several ("A100"), it is the one with the least memory (`matches`). Raises
    ValueError for another name, and asks whether a near one was meant.
    """
    found = matches(name)
    if found:
        return found[0]
    if isinstance(name, str):
        _refuse_known_others(name)
    plain = {_plain(known): known for known in KNOWN}
    asked = _parts(name)[0] or _plain(name) if isinstance(name, str) else ""
    inside = [known for key, known in plain.items() if asked and (asked in key or key in asked)]
    # The longest part of a name says most about what was meant: "L40X" is nearer to L40 than to L4.
    inside.sort(key=lambda known: -len(_plain(known)) if _plain(known) in asked else 0)
    if asked.isdigit() and len(asked) < 4:
        inside = [f"{asked}GB", *inside]
    close = difflib.get_close_matches(asked, plain, 2, 0.6)
    near = inside[:3] or [plain[key] for key in close]
    question = f"did you mean {' or '.join(near)}?" if near else "--list-gpus prints the names."
    raise ValueError(f"gpu={shown(name)} is not known: {question} A size such as 8GB does too.")


def _refuse_known_others(name: str) -> None:
    """Raises ValueError for several GPUs in one name, and for what is no GPU of the table's makers.

    Names that mean one GPU never get here.
    """
    said = name.strip()
    several = SEVERAL.fullmatch(said)
    if several:
        count, one = int(several[1] or several[4]), (several[2] or several[3]).strip()
        if matches(one):
            raise ValueError(
                f"gpu={shown(name)} names {count} GPUs: name one of them, {matches(one)[0].name}, "
                f"and plan a step over all with --gpus {count}, a program for torchrun with "
                f"--ranks {count}."
            )
    for pattern, reason in OTHERS:
        if re.fullmatch(pattern, said.lower()):
            raise ValueError(
                f"gpu={shown(name)} is not planned for: {reason}. A size such as 8GB plans the "
                "memory that a GPU of NVIDIA's would need."
            )


def as_gpu(gpu: str | GPU) -> GPU:
    """The GPU itself, or the one of that name.

    Raises ValueError for an unknown name and for a `GPU` without memory, TypeError for anything
    else.
    """
    if isinstance(gpu, str):
        return find(gpu)
    if not isinstance(gpu, GPU):
        raise TypeError(f"gpu={shown(gpu)} must be a name, such as 'T4', or a GPU.")
    if not isinstance(gpu.name, str) or not gpu.name.strip() or not gpu.name.isprintable():
        raise TypeError(f"name={shown(gpu.name)} of a GPU must be a text of one line.")
    whole(f"memory of {shown(gpu.name)}", gpu.memory, MIB, 2**50)
    capability = gpu.capability
    if not isinstance(capability, tuple) or [type(part) for part in capability] != [int, int]:
        raise TypeError(
            f"capability={shown(capability)} must be two whole numbers, such as (8, 6)."
        )
    if not (0 <= capability[0] <= MOST_CAPABLE and 0 <= capability[1] <= 9):
        raise ValueError(
            f"capability={shown(capability)} is that of no GPU: the first number is from 0 to "
            f"{MOST_CAPABLE}, and the second from 0 to 9."
        )
    return gpu


def matches(name: str) -> list[GPU]:
    """The GPUs that a name means, the one with the least memory first; empty where it means none.

    Raises ValueError for a size that no GPU has.
    """
    if not isinstance(name, str):
        return []
    if name in KNOWN:
        return [KNOWN[name]]
    size = SIZE.fullmatch(name.strip().lower())
    if size:
        return [_of_size(float(size[1]), size[2])]
    asked = _plain(name)
    own = calibration.active()  # a GPU of no row may have been measured
    if own is not None and own.gpu.name not in KNOWN and _plain(own.gpu.name) == asked:
        return [own.gpu]
    equal = [gpu for gpu in KNOWN.values() if _plain(gpu.name) == asked]
    # "Quadro RTX 6000" and "RTX 6000 Ada" are told apart by it; "Quadro RTX A4000" has it for show.
    found = equal or _by_parts(name) or _by_parts(re.sub("quadro", "", name, flags=re.I))
    return sorted(found, key=lambda gpu: gpu.memory)


def of_size(gpu: GPU) -> list[GPU]:
    """The GPUs of the table that are sold with the memory of one that was given by its size.

    Empty for a GPU with a name.
    """
    size = SIZE.fullmatch(gpu.name.lower())
    if not size:
        return []
    sold = float(size[1])
    return [known for known in KNOWN.values() if _sold_with(known, sold)]


def _sold_with(gpu: GPU, size: float) -> bool:
    return LEAST_SEEN < gpu.memory / (size * GIB) <= 1


def _of_size(size: float, unit: str) -> GPU:
    name = f"{size:g}{'GiB' if unit == 'gib' else 'GB'}"
    if not 0.5 <= size <= 1024:
        raise ValueError(f"gpu={name!r} is no size of a GPU: give 0.5 to 1024 GB.")
    return GPU(name, int(size * GIB * (1 if unit == "gib" else SEEN)), ANY)


def _plain(name: str) -> str:
    """A name without makers, spaces and case."""
    lower = name.lower().replace("mobile", "laptop")
    return re.sub("[^a-z0-9]", "", BESIDE.sub("", lower))


def _parts(name: str) -> tuple[str, int | None, bool]:
    """(the name of the kind, GB on the label, whether it says PCIe)."""
    lower = BESIDE.sub("", name.lower().replace("mobile", "laptop"))
    label = re.search(r"(?<!\d)(\d{1,3})\s*gi?b?(?![a-z0-9])", lower)
    if label:
        lower = lower[: label.start()] + " " + lower[label.end() :]
    kind = re.sub("[^a-z0-9]", "", lower)
    return kind.replace("pcie", ""), int(label[1]) if label else None, "pcie" in kind


def _by_parts(name: str) -> list[GPU]:
    """Those whose kind it is, of the memory and with the connection that the name gives, if any.

    "A100", "A100-40", "RTX 3060 12GB", "4060 Ti"; of "16" nobody knows what is meant.
    """
    kind, label, pcie = _parts(re.sub(r"-(\d\d)$", r"-\1gb", name.strip()))
    if len(kind) < 2 or (kind.isdigit() and len(kind) < 4):
        return []
    found = []
    for gpu in KNOWN.values():
        known, _, on_pcie = _parts(gpu.name)
        spoken = (known, BEFORE.sub("", known)) if BEFORE.match(known) else (known,)
        if kind in spoken and (label is None or _sold_with(gpu, label)):
            found.append((gpu, on_pcie))
    with_it = [gpu for gpu, on_pcie in found if on_pcie == pcie]
    return with_it or [gpu for gpu, _ in found]
