"""A program for torchrun is planned as one of its ranks: against ranks that gloo connects."""

from pathlib import Path

import pytest

from tests.forked import forked, results
from tests.night import few_by_day
from tests.script import LOOP, run, taken
from tests.small import ROOT
from tight_fit.command import script as command
from tight_fit.gpus import NCCL
from tight_fit.script import program_report
from tight_fit.script.program import Refused
from tight_fit.script.ranks import ProgramRank

PROGRAMS = Path(__file__).parent / "programs"
REAL = ROOT / "tests" / "ranks" / "program.py"
STEPS = 4
NUMBERS = 64  # bytes of the numbers of which a CPU makes tensors
MODEL = str(ROOT / "helpers" / "mini" / "decoder")
FINE_TUNE = ["--model", MODEL, "--data", "data.jsonl", "--base", "nf4", "--batch", "2"]
FINE_TUNE += ["--held", "0", "--length", "64"]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def planned(name, *arguments, ranks=2):
    wanted = {"steps": STEPS, "rank": ProgramRank(0, ranks)}
    return run(name, *arguments, gpu=None, seconds=300.0, **wanted)


def sent_bytes(facts):
    return sum(count for _, count in facts["rank"]["sent"].values())


@pytest.mark.parametrize("options", [(), ("--view",)], ids=["beside", "views"])
def test_a_rank_of_ddp_takes_what_a_real_rank_takes(options):
    """By the allocator's record. Gradients lie beside DDP's buckets, unless the program asks for
    views of them, as the first step shows, whose peak is all that is alive."""
    path = str(PROGRAMS / "ddp_loop.py")
    facts = planned(path, *options)
    plan = taken(facts)
    weights = 4 * (256 * 2048 + 2048 + 2048 * 1000 + 1000)
    for real in results(forked(REAL, "recorded", path, STEPS, *options, ranks=2)):
        beside = [there - here for there, here in zip(real, plan)]
        assert all(0 <= number <= NUMBERS for number in beside[1:]), (real, plan)
        # With views DDP takes in its first step what it gives back after it.
        # A thread of gloo's may hold on to a copy of all weights, by which ranks are made equal.
        begun = [beside[0], beside[0] - weights]
        assert options or any(0 <= number <= 2 * NUMBERS for number in begun), (real, plan)
    assert facts["at_peak"]["gradients"] == weights * (1 if options else 2)
    assert facts["rank"]["sent"]["all_reduce"][1] == weights  # 2 (n - 1) / n of it, of 2 ranks


def test_a_rank_of_fsdp_takes_and_sends_what_a_real_rank_does():
    """Bytes sent are equal. Gloo lets go of messages later than a plan, so memory is within 5%.
    Of eight ranks each holds a quarter of the states."""
    path = str(PROGRAMS / "fully_shard_loop.py")
    facts, of_eight = planned(path), planned(path, ranks=8)
    plan = [step["peak"] for step in facts["steps"]]
    for peaks, sent in results(forked(REAL, "tracked", path, STEPS, ranks=2)):
        assert plan[1:] == pytest.approx(peaks[1:], rel=0.05), (plan, peaks)
        assert sent_bytes(facts) == sent[-1]
    assert facts["parameters"] == of_eight["parameters"] == 4 * 789_760
    states = [found["at_peak"]["optimizer states"] for found in (facts, of_eight)]
    assert states[0] == pytest.approx(4 * states[1], rel=0.01)


@pytest.mark.parametrize(
    "script, arguments",
    few_by_day(
        [
            ("expert_parallel", []),
            ("context_parallel", ["--attention", "ring"]),
            ("context_parallel", ["--attention", "ulysses"]),
            ("cluster", []),
            ("finetune_llm", FINE_TUNE),  # QLoRA with FSDP2
        ],
        lambda case: case[0] == "expert_parallel",
    ),
)
def test_a_script_with_messages_of_its_own_is_planned_as_a_real_rank(script, arguments):
    """Gloo holds on to messages of FSDP's longer than a plan (cluster, 1.4%), and its thread to any
    message in a step now and then: the least of the settled steps is compared."""
    if script == "finetune_llm":
        pytest.importorskip("bitsandbytes")
        Path("data.jsonl").write_text('{"prompt": "Oil rose.", "answer": "crude"}\n' * 4, "utf8")
    path = str(ROOT / "scripts" / f"{script}.py")
    facts = run(path, *arguments, gpu="RTX 3060", seconds=300.0, rank=ProgramRank(1, 2))
    for peaks, sent in results(forked(REAL, "tracked", path, STEPS, *arguments, ranks=2)):
        assert sent_bytes(facts) == sent[-1] > 0
        if script != "finetune_llm":  # whose weights in 4 bits a CPU computes with in its own way
            assert facts["peak"] == pytest.approx(min(peaks[1:]), rel=0.02)


def test_a_script_that_scatters_its_weights_is_planned_as_it_is():
    """Scattering is not counted of a real rank, but the plan's steps have none."""
    path = str(ROOT / "scripts" / "tensor_parallel.py")
    facts = run(path, gpu="T4", seconds=200.0, rank=ProgramRank(1, 2))
    assert facts["fits"] and facts["terms"]["NCCL buffers"] == NCCL and sent_bytes(facts) > 0
    assert any(
        "Planned is rank 1 of 2, which sends" in line for line in program_report.verdict(facts)
    )


def test_the_option_and_torchruns_environment_name_the_rank(program, capsys, monkeypatch):
    text = LOOP.replace("device =", "import torch.distributed as dist\ndevice =", 1)
    text = text.replace("for step", "dist.init_process_group('nccl')\nfor step")
    text += "    assert dist.get_world_size() == 4 and dist.get_rank() == {}\n"
    asked = [program(text.format(0)), "--gpu", "T4", "--quick"]
    assert command.main([*asked, "--ranks", "4"]) == command.FITS
    assert "Planned is rank 0 of 4" in capsys.readouterr().out
    program(text.format(3))
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert command.main(asked) == command.FITS
    assert "Planned is rank 3 of 4" in capsys.readouterr().out


def test_ranks_that_are_not_planned_are_refused_with_a_way_on(program):
    rank = ProgramRank(1, 2)
    sharding = program("""\
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
model = torch.nn.Linear(64, 64)
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
""")
    with pytest.raises(Refused, match=r"^train.py:5: .*FSDP plugin.*--layout fsdp=2.*fully_shard"):
        run(sharding, rank=rank)
    with pytest.raises(Refused, match=r"pipeline.py:\d+: the program receives objects of another"):
        run(str(ROOT / "scripts" / "pipeline.py"), rank=rank)
