"""A program run for real, on this machine's CPU, with PyTorch's own record of every allocation.

Nothing of the planner is at work here: the record is that of torch.profiler, and the steps are told
by PyTorch's hooks of optimizers.
"""

import gc
import json
import os
import runpy
import sys
from pathlib import Path

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.profiler import ProfilerActivity, profile, record_function

END = "end of a step"


class Enough(BaseException):
    """The steps have been taken."""


def steps_of(script: Path, arguments: tuple[str, ...], steps: int, folder: Path) -> list[int]:
    """Bytes of each step's peak above what was allocated when it began, by the CPU's allocator.

    The program runs in a copy of this process, in `folder`, where it may write.
    """
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.close(read)
        try:
            os.chdir(folder)
            torch.set_num_threads(1)
            os.write(write, json.dumps(measured_steps(script, arguments, steps)).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    assert text, f"{script.name} failed on real tensors"
    return json.loads(text)


def measured_steps(script: Path, arguments: tuple[str, ...], steps: int) -> list[int]:
    """As `steps_of`, in this process, which is good for nothing else afterwards."""
    first: list[torch.optim.Optimizer] = []
    taken = [0]

    def after(optimizer, args, kwargs):
        if not first:
            first.append(optimizer)
        if optimizer is first[0]:
            gc.collect()
            with record_function(END):
                taken[0] += 1
            if taken[0] == steps:
                raise Enough

    register_optimizer_step_post_hook(after)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.parent))
    gc.collect()
    gc.disable()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        try:
            runpy.run_path(str(script), run_name="__main__")
        except BaseException:  # Enough, or what a program's own `finally` makes of it
            if taken[0] < steps:
                raise
    return _peaks(profiler.profiler.kineto_results.events())


def _peaks(events) -> list[int]:
    kept = [event for event in events if event.name() in ("[memory]", END)]
    peaks, now, most = [], 0, 0
    for event in sorted(kept, key=lambda event: event.start_ns()):
        if event.name() == END:
            peaks.append(most)
            now = most = 0
        else:
            now += event.nbytes()
            most = max(most, now)
    return peaks
