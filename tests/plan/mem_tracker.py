"""A step by torch's own tracker, which shares no code with the planner."""

import warnings

from torch.distributed._tools.mem_tracker import MemTracker

from helpers import models
from helpers.plan import fake_batch
from helpers.recipe import Recipe
from tight_fit.techniques.model_changes import as_if_real
from tight_fit.techniques.optimizers import make_optimizer
from tight_fit.techniques.step import train_step
from tight_fit.trace.fake_mode import FakeTensorMode
from tight_fit.trace.fake_tensors import FakeValues


def naive(recipe: Recipe) -> tuple[int, dict[str, int]]:
    """(peak, {torch's name of a category: its part}) of a step of the whole model, in bytes."""
    with (
        as_if_real(),
        FakeTensorMode(allow_non_fake_inputs=True),
        FakeValues(),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        model = models.empty(recipe)
        optimizer = make_optimizer(model, recipe)
        tracker = MemTracker()
        tracker.track_external(model, optimizer)
        with tracker:
            for step in range(2):  # so that the optimizer has its states
                train_step(model, optimizer, [fake_batch(model, recipe)], recipe.batch_size, recipe)
                if step == 0:
                    tracker.reset_mod_stats()
    (peak,) = tracker.get_tracker_snapshot("peak").values()  # of the only device
    parts = {str(kind).split(".")[-1]: size for kind, size in peak.items()}
    return parts.pop("Total"), parts
