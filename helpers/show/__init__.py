"""What lessons show with one call: tables, with the sentence that reads them.

from helpers import show

show.before_and_after(before, after)  # two runs: memory, time, accuracy, and the record
show.plans({"before": before, "after": after})  # memory and seconds at full size, per GPU
show.phases({"before": before, "after": after}, "T4")  # where the time of a step goes
show.layouts(job, {"DDP": Parallel(data=4)}, cluster)  # memory, messages and seconds per GPU
show.moved({"offloaded": plan}, ["T4"])  # bytes on the GPU and on the host, and seconds
show.contexts()  # long texts, on one GPU each or over several
show.large("8B on 8")  # layouts of 8 and 70 billion parameters on many GPUs
show.trainer_factors()  # what Trainer multiplies accumulated gradients by, model by model
show.rungs(), show.savings()  # the ladder of techniques, and what each is worth
"""

from helpers.show.comparison import before_and_after
from helpers.show.context_table import contexts
from helpers.show.ladder_table import rungs, savings
from helpers.show.large_table import large
from helpers.show.layout_table import layouts
from helpers.show.moved_table import moved
from helpers.show.trainer_table import trainer_factors
from helpers.strategy.show import show_phases as phases
from helpers.strategy.show import show_plans as plans

__all__ = [
    "before_and_after",
    "contexts",
    "large",
    "layouts",
    "moved",
    "phases",
    "plans",
    "rungs",
    "savings",
    "trainer_factors",
]
