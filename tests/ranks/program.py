"""Run by test_program_ranks.py as each rank of a program, on real tensors and messages.

Prints the peak of each step in bytes. By the allocator's record it is that above the step's
beginning. Where gloo itself takes tensors of PyTorch's for a message, it is all that is alive, by
the tracker, and what is sent is printed as well.
"""

import gc
import json
import runpy
import sys
from pathlib import Path

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from benchmarks.programs.real import Enough, measured_steps
from tight_fit.layouts.messages import CommMeter
from tight_fit.trace.storage_trace import BORN, DIES
from tight_fit.trace.tracker import Tracker, steady_memory


def tracked_steps(script, arguments, steps):
    tracker, meter, ends, sent = Tracker(), CommMeter(), [], []

    def after(optimizer, args, kwargs):
        gc.collect()
        ends.append(len(tracker.storage_trace.events))
        sent.append(sum(message.bytes for message in meter.sent) - sum(sent))
        if len(ends) == steps:
            raise Enough

    register_optimizer_step_post_hook(after)
    sys.argv = [script, *arguments]
    try:
        with steady_memory(), tracker, meter:
            runpy.run_path(script, run_name="__main__")
    except Enough:
        pass
    trace = tracker.storage_trace
    alive, peaks, most = 0, [], 0
    for event, (kind, storage, _, _) in enumerate(trace.events):
        if event in ends:
            peaks.append(most)
            most = alive
        alive += {BORN: 1, DIES: -1}.get(kind, 0) * trace.bytes[storage]
        most = max(most, alive)
    return [*peaks, most][:steps], sent


how, script, steps, *arguments = sys.argv[1:]
torch.set_num_threads(1)
if "ulysses" in arguments:  # as on a GPU, which has no fused kernel for grouped queries in fp32
    torch.backends.cuda.enable_flash_sdp(False)  # the CPU's as well
if how == "tracked":
    found = tracked_steps(script, arguments, int(steps))
else:
    found = measured_steps(Path(script), tuple(arguments), int(steps))
print("RESULT " + json.dumps(found))
