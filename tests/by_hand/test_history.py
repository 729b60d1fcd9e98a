"""Memory snapshots of steps on a CPU, in bytes counted by hand; PyTorch's own calls on a GPU."""

from collections import Counter
from contextlib import suppress

import pytest
import torch
from torch import nn

from by_hand import history
from tight_fit.command import explain
from tight_fit.script import snapshot

WIDTH, EXAMPLES = 64, 1000


def taken(path, run):
    """The snapshot of what `run` does."""
    with history.recorded(path):
        kept = run()
    del kept
    return snapshot.read(path)


def test_the_bytes_in_use_are_those_counted_by_hand(tmp_path):
    def run():
        a = torch.ones(1000)  # 4,000 bytes
        b = a * 2  # 4,000
        view = b[:10]  # none
        del a
        c = torch.cat([view, view]).double()  # 80 and, freed once it is converted, 160
        return b, c

    held = taken(tmp_path / "x.pickle", run)
    events = [(event["action"], event["size"]) for event in held["device_traces"][0]]
    made, freed = "alloc", "free_completed"
    assert events[:3] == [(made, 4000), (made, 4000), (freed, 4000)]
    assert events[3:] == [(made, 80), (made, 160), (freed, 80)]
    in_use = snapshot.moment(held)
    assert in_use.allocated == 8000 and not in_use.asked
    assert sum(segment["total_size"] for segment in held["segments"]) == 4160


def test_a_step_has_its_categories_and_lines(tmp_path, capsys):
    layer = WIDTH * WIDTH + WIDTH

    def run():
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
        for _ in range(2):
            model(torch.ones(EXAMPLES, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizer

    in_use = snapshot.moment(taken(tmp_path / "x.pickle", run))
    sums = Counter()
    for block in in_use.blocks:
        sums[block.category] += block.bytes
    assert sums["weights"] == 4 * 2 * layer
    assert sums["optimizer states and temporaries"] == 4 * 2 * layer  # SGD's momentum
    # At the peak the results of both layers and of GELU are kept for the backward pass.
    assert sums["activations"] >= 3 * 4 * EXAMPLES * WIDTH
    assert explain.main([str(tmp_path / "x.pickle")]) == 0
    assert "test_history.py:" in capsys.readouterr().out


@pytest.mark.parametrize("fails", [False, True])
def test_on_a_gpu_pytorch_writes_it(monkeypatch, tmp_path, fails):
    calls = []
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    begin, dump = "_record_memory_history", "_dump_snapshot"
    for name in (begin, dump):

        def called(*args, name=name, **settings):
            calls.append((name, args, settings))

        monkeypatch.setattr(f"torch.cuda.memory.{name}", called)
    path = tmp_path / "x.pickle"
    with suppress(torch.OutOfMemoryError), history.recorded(path):
        if fails:
            raise torch.OutOfMemoryError("CUDA out of memory.")
    assert calls == [(begin, (), {}), (dump, (str(path),), {}), (begin, (), {"enabled": None})]


def test_a_snapshot_is_written_after_an_error(tmp_path):
    with pytest.raises(RuntimeError), history.recorded(tmp_path / "x.pickle"):
        kept = torch.ones(10)
        raise RuntimeError("out of memory")
    assert snapshot.moment(snapshot.read(tmp_path / "x.pickle")).allocated == 40
    del kept
