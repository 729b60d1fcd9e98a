"""A plan that traces a few layers and repeats them, beside the plan that traces every one."""

from tight_fit.layouts import plan as planner


def few_and_every(monkeypatch, config, layout, **fields):
    """Both plans, after a look that they are equal: events, operations and messages in order."""
    traced = []
    whole = planner.RepeatedLayers.whole
    monkeypatch.setattr(
        planner.RepeatedLayers, "whole", lambda *given: traced.append(1) or whole(*given)
    )
    few, every = (
        planner.plan_layout(config, layout, all_layers=all_layers, length=32, **fields)
        for all_layers in (False, True)
    )
    assert traced == [1]
    assert (few.timeline == every.timeline).all() and few.sent == every.sent
    assert few.flops == every.flops and few.largest_tensors == every.largest_tensors
    assert list(kernels(few)) == list(kernels(every))
    assert (few.streams == every.streams).all()
    return few, every


def kernels(planned):
    """The operations in the order in which they are issued, each with its phase."""
    for index, phase in planned.operations.issued():
        yield planned.operations.ops[index], phase
