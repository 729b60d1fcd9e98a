"""What an answer says of states that the driver moves between GPU and host."""

from dataclasses import replace

from transformers import LlamaConfig

from tests.small import configured
from tight_fit.command import notes
from tight_fit.gpus import GPU
from tight_fit.gpus.specs import find_gpu
from tight_fit.kernels.host_memory import link_rate
from tight_fit.models.step import ModelStep
from tight_fit.plans.model import plan_model_step
from tight_fit.units import duration, size


def test_an_answer_says_where_paged_states_lie_and_what_moving_them_takes():
    """bitsandbytes waits for each update: all that finds no room is copied in and out, unhidden."""
    step = ModelStep(
        configured(LlamaConfig, 512, 2, 4, 1024, 4000), 2, 64, optimizer="paged_adamw8bit"
    )
    planned = plan_model_step(step)
    need = 2**30
    roomy, full, half = (
        GPU("T4", need + room, (7, 5)) for room in (planned.host, 0, planned.host // 2)
    )

    def said(gpu):
        return [one for one in notes.of_plan(step, planned, gpu, need) if "paged states" in one]

    assert planned.host > 2**22
    (note,) = said(roomy)
    assert "nothing is moved" in note and size(planned.host) in note
    (note,) = said(full)
    took = duration(2 * planned.host / link_rate(find_gpu("T4")))
    assert f"takes {took} to {took} more" in note
    (note,) = said(half)
    assert f"takes {duration(planned.host / link_rate(find_gpu('T4')))} to {took} more" in note
    assert not said(full._replace(memory=need - 1))  # the step does not fit
    plain = replace(step, optimizer="adamw8bit")
    assert not any("paged" in one for one in notes.of_plan(plain, planned, roomy, need))
