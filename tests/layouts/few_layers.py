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
    assert same(few, every)
    return few, every


def same(one, other):
    """Whether two plans are equal: events, operations and messages in order."""
    return (
        one.timeline.shape == other.timeline.shape
        and (one.timeline == other.timeline).all()
        and one.sent == other.sent
        and one.flops == other.flops
        and one.largest_tensors == other.largest_tensors
        and list(kernels(one)) == list(kernels(other))
        and (one.streams == other.streams).all()
    )


def kernels(planned):
    """The operations in the order in which they are issued, each with its phase."""
    for index, phase in planned.operations.issued():
        yield planned.operations.ops[index], phase
