"""`tight-fit explain`: snapshots in the form in which PyTorch writes them, and files that are not.

The form is that of torch/cuda/_memory_viz.py: segments with blocks, and a trace of events.
"""

import pickle

import pytest

from tight_fit.command import explain
from tight_fit.script import snapshot
from tight_fit.units import GIB, MIB

SITE = "/usr/lib/python3.12/site-packages/torch"
FORWARD = [
    {"name": "forward", "filename": f"{SITE}/nn/modules/linear.py", "line": 120},
    {"name": "main", "filename": "/home/me/train.py", "line": 84},
]
BACKWARD = [
    {"name": "_engine_run_backward", "filename": f"{SITE}/autograd/graph.py", "line": 800},
    {"name": "main", "filename": "/home/me/train.py", "line": 85},
]
STATES = [
    {"name": "_init_group", "filename": f"{SITE}/optim/adamw.py", "line": 140},
    {"name": "main", "filename": "/home/me/train.py", "line": 90},
]


def event(action, address, size, frames=(), **more):
    return {"action": action, "addr": address, "size": size, "frames": [*frames], **more}


def taken(trace, blocks, total=12 * GIB):
    segment = {"device": 0, "address": 0, "total_size": total, "blocks": blocks}
    return {"segments": [segment], "device_traces": [trace]}


def block(address, size, frames):
    return {"address": address, "size": size, "state": "active_allocated", "frames": frames}


OUT_OF_MEMORY = taken(
    [
        event("alloc", 1, 6 * GIB, FORWARD),
        event("alloc", 2, 2 * GIB, STATES),
        event("oom", 0, 3 * GIB, FORWARD, device_free=1 * GIB),
        event("free_completed", 1, 6 * GIB),
    ],
    [block(2, 2 * GIB, STATES)],
)


@pytest.fixture
def write(tmp_path):
    def write(held) -> str:
        path = tmp_path / "snapshot.pickle"
        path.write_bytes(held if isinstance(held, bytes) else pickle.dumps(held))
        return str(path)

    return write


def test_what_was_freed_after_the_error_was_there(write, capsys):
    assert explain.main([write(OUT_OF_MEMORY)]) == 0
    out = capsys.readouterr().out
    assert "3.00 GiB more were asked for, and the GPU had 1.00 GiB free" in out
    assert "In use: 8.00 GiB, in 2 tensors; the allocator held 12.00 GiB" in out
    assert "6.00 GiB  train.py:84: activations" in out
    assert "2.00 GiB  train.py:90: optimizer states" in out
    assert "3.00 GiB  half of the examples" in out
    assert "1.50 GiB  8-bit AdamW instead of AdamW (not enough alone)" in out


def test_weights_are_known_by_where_modules_make_them():
    made = [
        {"name": "__init__", "filename": f"{SITE}/nn/modules/linear.py", "line": 108},
        {"name": "main", "filename": "/home/me/train.py", "line": 12},
    ]
    found = snapshot.moment(taken([], [block(1, MIB, made), block(2, 2 * MIB, FORWARD)]))
    assert [(one.category, one.line) for one in found.blocks] == [
        ("weights", "train.py:12"),
        ("activations", "train.py:84"),
    ]


def test_without_an_error_it_is_the_moment_of_most_memory():
    trace = [event("alloc", 1, 5 * MIB, FORWARD), event("alloc", 2, 4 * MIB, BACKWARD)]
    trace += [event("free_completed", 1, 5 * MIB), event("alloc", 3, MIB, STATES)]
    found = snapshot.moment(taken(trace, [block(2, 4 * MIB, BACKWARD), block(3, MIB, STATES)]))
    assert found.allocated == 9 * MIB and not found.asked
    assert {one.category.split()[0] for one in found.blocks} == {"activations", "gradients"}


def test_every_field_that_pytorch_writes_is_read_over(tmp_path, capsys):
    """All fields of a snapshot of PyTorch 2.13, of two GPUs, the second one out of memory."""
    frames = [*STATES, {"name": "PyEval", "filename": "??", "line": 0}]
    common = {"stream": 0, "time_us": 1, "compile_context": "N/A", "user_metadata": ""}

    def segment(device, size, blocks):
        return {
            "device": device, "address": 4096, "total_size": size, "allocated_size": size,
            "active_size": size, "requested_size": size, "stream": 0, "segment_type": "large",
            "segment_pool_id": (0, 0), "is_expandable": False, "frames": frames, "blocks": blocks,
        }  # fmt: skip

    def full(address, size, state):
        return {
            "address": address, "size": size, "requested_size": size - 8, "state": state,
            "frames": frames,
        }  # fmt: skip

    held = [full(4096, 3 * GIB, "active_allocated"), full(4096 + 3 * GIB, GIB, "inactive")]
    trace = [
        {"action": "segment_alloc", "addr": 4096, "size": 4 * GIB, "frames": frames, **common},
        {"action": "alloc", "addr": 4096, "size": 3 * GIB, "frames": frames, **common},
        {"action": "oom", "size": 2 * GIB, "device_free": GIB, "frames": frames, **common},
    ]
    written = {
        "segments": [segment(0, GIB, [full(4096, GIB, "inactive")]), segment(1, 4 * GIB, held)],
        "device_traces": [[], trace],
        "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": "", "expandable_segments": False},
        "external_annotations": [{"stage": "START", "name": "step", "device": 1, "time_us": 1}],
    }
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(written))
    assert explain.main([str(path)]) == 0
    said = capsys.readouterr().out
    assert "2.00 GiB more were asked for, and the GPU had 1.00 GiB free" in said
    assert "3.00 GiB, in 1 tensors" in said and "train.py:90: optimizer states" in said
