"""`tight-fit explain`: snapshots in the form in which PyTorch writes them.

The form is that of torch/cuda/_memory_viz.py: segments with blocks, and a trace of events. What is
no snapshot is in tests/attack/test_programs.py.
"""

import pickle

from tight_fit.command import explain
from tight_fit.script import snapshot
from tight_fit.units import GIB, MIB

SITE = "/usr/lib/python3.12/site-packages/torch"
COMMON = {"stream": 0, "time_us": 1, "compile_context": "N/A", "user_metadata": ""}


def frames(name, file, line):
    """Of a call in PyTorch that a line of a program makes."""
    return [
        {"name": name, "filename": f"{SITE}/{file}", "line": 120},
        {"name": "main", "filename": "/home/me/train.py", "line": line},
        {"name": "PyEval", "filename": "??", "line": 0},
    ]


MADE = frames("__init__", "nn/modules/linear.py", 12)
FORWARD = frames("forward", "nn/modules/linear.py", 84)
BACKWARD = frames("_engine_run_backward", "autograd/graph.py", 85)
STATES = frames("_init_group", "optim/adamw.py", 90)


def event(action, address, size, frames=(), **more):
    place = {} if action == "oom" else {"addr": address}
    return {"action": action, "size": size, "frames": [*frames], **place, **COMMON, **more}


def block(address, size, frames, state="active_allocated"):
    return {
        "address": address, "size": size, "requested_size": size - 8, "state": state,
        "frames": frames,
    }  # fmt: skip


def segment(device, size, blocks):
    return {
        "device": device, "address": 0, "total_size": size, "allocated_size": size,
        "active_size": size, "requested_size": size, "stream": 0, "segment_type": "large",
        "segment_pool_id": (0, 0), "is_expandable": False, "frames": MADE, "blocks": blocks,
    }  # fmt: skip


def taken(trace, blocks):
    """A snapshot with all fields of PyTorch 2.13, of two GPUs of which the second was used."""
    return {
        "segments": [
            segment(0, GIB, [block(4096, GIB, MADE, "inactive")]),
            segment(1, 12 * GIB, [*blocks, block(9, GIB, FORWARD, "inactive")]),
        ],
        "device_traces": [[], trace],
        "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": "", "expandable_segments": False},
        "external_annotations": [{"stage": "START", "name": "step", "device": 1, "time_us": 1}],
    }


def test_what_was_freed_after_the_error_was_there(tmp_path, capsys):
    trace = [
        event("segment_alloc", 0, 12 * GIB, FORWARD),
        event("alloc", 1, 6 * GIB, FORWARD),
        event("alloc", 2, 2 * GIB, STATES),
        event("oom", 0, 3 * GIB, FORWARD, device_free=1 * GIB),
        event("free_completed", 1, 6 * GIB),
    ]
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(taken(trace, [block(2, 2 * GIB, STATES)])))
    assert explain.main([str(path)]) == 0
    out = capsys.readouterr().out
    assert "3.00 GiB more were asked for, and the GPU had 1.00 GiB free" in out
    assert "In use: 8.00 GiB, in 2 tensors; the allocator held 12.00 GiB" in out
    assert "6.00 GiB  train.py:84: activations" in out
    assert "2.00 GiB  train.py:90: optimizer states" in out
    assert "3.00 GiB  half of the examples" in out
    assert "1.50 GiB  8-bit AdamW instead of AdamW (not enough alone)" in out


def test_without_an_error_it_is_the_moment_of_most_memory():
    """Weights are known by where modules make them."""
    trace = [event("alloc", 1, 5 * MIB, FORWARD), event("alloc", 2, 4 * MIB, BACKWARD)]
    trace += [event("free_completed", 1, 5 * MIB), event("alloc", 3, MIB, STATES)]
    left = [block(2, 4 * MIB, BACKWARD), block(3, MIB, STATES), block(4, 2 * MIB, MADE)]
    found = snapshot.moment(taken(trace, left))
    assert found.allocated == 11 * MIB and not found.asked
    assert {(one.category.split()[0], one.line) for one in found.blocks} == {
        ("activations", "train.py:84"),
        ("gradients", "train.py:85"),
        ("weights", "train.py:12"),
    }
