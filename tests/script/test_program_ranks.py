"""A program for torchrun is planned as one of its ranks: against ranks that gloo connects."""

from pathlib import Path

import pytest

from tests.forked import forked, results
from tests.night import few_by_day
from tests.script import LOOP, run
from tight_fit.command import script as command
from tight_fit.gpus import NCCL
from tight_fit.script import process, report
from tight_fit.script.program import ProgramFailed, Refused, ToPlan, script_of
from tight_fit.script.ranks import ProgramRank

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).parent / "programs"
REAL = ROOT / "tests" / "ranks" / "program.py"
STEPS = 4
NUMBERS = 64  # bytes of the numbers of which a CPU makes tensors
PUBLISHED = ("ddp", "fsdp", "tensor_parallel")  # of scripts/


def planned(name, *arguments, number=0, ranks=2):
    wanted = ToPlan(name, arguments, None, STEPS, rank=ProgramRank(number, ranks))
    return process.plan(wanted, script_of(name, arguments), 300.0)


@pytest.mark.parametrize("options", [(), ("--view",)], ids=["beside", "views"])
def test_a_rank_of_ddp_takes_what_a_real_rank_takes(options, tmp_path, monkeypatch):
    """By the allocator's record. Gradients lie beside DDP's buckets, unless the program asks for
    views of them, as the first step shows, whose peak is all that is alive."""
    monkeypatch.chdir(tmp_path)
    path = str(PROGRAMS / "ddp_loop.py")
    facts = planned(path, *options)
    plan = [step["peak"] - step["begin"] for step in facts["steps"]]
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


def test_a_rank_of_fsdp_takes_and_sends_what_a_real_rank_does(tmp_path, monkeypatch):
    """Bytes sent are equal. Gloo lets go of messages later than a plan, so memory is within 5%."""
    monkeypatch.chdir(tmp_path)
    path = str(PROGRAMS / "fully_shard_loop.py")
    facts = planned(path)
    for peaks, sent in results(forked(REAL, "tracked", path, STEPS, ranks=2)):
        plan = [step["peak"] for step in facts["steps"]]
        assert plan[1:] == pytest.approx(peaks[1:], rel=0.05), (plan, peaks)
        assert sum(count for _, count in facts["rank"]["sent"].values()) == sent[-1]
    assert facts["parameters"] == 4 * 789_760


@pytest.mark.parametrize("base", ["nf4", pytest.param("bf16", marks=pytest.mark.night)])
def test_a_rank_of_a_fine_tune_of_adapters_sends_what_a_real_rank_does(base, tmp_path, monkeypatch):
    """LoRA and QLoRA with FSDP2: scripts/finetune_llm.py as it is."""
    pytest.importorskip("bitsandbytes")
    monkeypatch.chdir(tmp_path)
    Path("data.jsonl").write_text('{"prompt": "Oil rose.", "answer": "crude"}\n' * 4, "utf8")
    path = str(ROOT / "scripts" / "finetune_llm.py")
    model = str(ROOT / "helpers" / "mini" / "decoder")
    asked = ["--model", model, "--data", "data.jsonl", "--base", base]
    asked += ["--batch", "2", "--held", "0", "--length", "64"]
    facts = run(path, *asked, gpu="RTX 3090", seconds=300.0, rank=ProgramRank(0, 2))
    for _, sent in results(forked(REAL, "tracked", path, STEPS, *asked, ranks=2)):
        assert sum(count for _, count in facts["rank"]["sent"].values()) == sent[-1]


@pytest.mark.parametrize(
    "script, arguments",
    few_by_day(
        [
            ("expert_parallel", ()),
            ("context_parallel", ("--attention", "ring")),
            ("context_parallel", ("--attention", "ulysses")),
            ("cluster", ()),
        ],
        lambda case: case[0] == "expert_parallel",
    ),
)
def test_a_script_with_messages_of_its_own_is_planned_as_a_real_rank(
    script, arguments, tmp_path, monkeypatch
):
    """Of scripts/, those that no layout of lessons 24 and 25 is. Gloo holds on to messages of
    FSDP's longer than a plan (cluster, 1.4%), and its thread to any message in a step now and then:
    the least of the settled steps is compared."""
    monkeypatch.chdir(tmp_path)
    path = str(ROOT / "scripts" / f"{script}.py")
    facts = run(path, *arguments, gpu="RTX 3060", seconds=300.0, rank=ProgramRank(1, 2))
    for peaks, sent in results(forked(REAL, "tracked", path, STEPS, *arguments, ranks=2)):
        assert facts["peak"] == pytest.approx(min(peaks[1:]), rel=0.02)
        assert sum(count for _, count in facts["rank"]["sent"].values()) == sent[-1]


def test_more_ranks_hold_less_each(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = str(PROGRAMS / "fully_shard_loop.py")
    two, eight = (planned(path, number=1, ranks=ranks) for ranks in (2, 8))
    assert two["at_peak"]["optimizer states"] == pytest.approx(
        4 * eight["at_peak"]["optimizer states"], rel=0.01
    )
    assert two["parameters"] == eight["parameters"] and eight["rank"]["number"] == 1


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_scripts_of_this_repository_are_planned_as_they_are(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    facts = run(
        str(ROOT / "scripts" / f"{name}.py"), gpu="T4", seconds=200.0, rank=ProgramRank(1, 2)
    )
    assert facts["fits"] and facts["terms"]["NCCL buffers"] == NCCL
    assert sum(count for _, count in facts["rank"]["sent"].values()) > 0
    assert any("Planned is rank 1 of 2, which sends" in line for line in report.verdict(facts))


def test_a_pipeline_that_asks_other_ranks_for_shapes_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Refused, match=r"pipeline.py:\d+: the program receives objects of another"):
        run(str(ROOT / "scripts" / "pipeline.py"), rank=ProgramRank(1, 2))


@pytest.mark.parametrize("asks", ["os.environ['LOCAL_RANK']", "os.environ['RANK']; exit(2)"])
def test_without_the_option_a_program_for_torchrun_is_told_of_it(asks, program):
    text = f"import os\nimport torch.distributed as dist\n{asks}\ndist.init_process_group('nccl')\n"
    with pytest.raises(ProgramFailed) as error:
        run(program(text + LOOP))
    assert "plan one of its ranks with --ranks" in str(error.value)


def test_the_option_and_torchruns_environment_name_the_rank(program, capsys, monkeypatch):
    text = LOOP.replace("device =", "import torch.distributed as dist\ndevice =", 1)
    text = text.replace("for step", "dist.init_process_group('nccl')\nfor step")
    path = program(text + "    assert dist.get_world_size() == 4 and dist.get_rank() == RANK\n")
    program(Path(path).read_text().replace("RANK", "0"))
    assert command.main([path, "--gpu", "T4", "--quick", "--ranks", "4"]) == command.FITS
    assert "Planned is rank 0 of 4" in capsys.readouterr().out
    program(Path(path).read_text().replace("get_rank() == 0", "get_rank() == 3"))
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert command.main([path, "--gpu", "T4", "--quick"]) == command.FITS
    assert "Planned is rank 3 of 4" in capsys.readouterr().out


@pytest.mark.parametrize("version", (1, 2))
def test_accelerates_own_sharding_is_refused_with_a_way_on(version, tmp_path):
    path = tmp_path / "train.py"
    path.write_text(
        "import torch\n"
        "from accelerate import Accelerator, FullyShardedDataParallelPlugin\n"
        f"plugin = FullyShardedDataParallelPlugin(fsdp_version={version})\n"
        "accelerator = Accelerator(fsdp_plugin=plugin)\n"
        "model = torch.nn.Linear(64, 64)\n"
        "model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))\n",
        encoding="utf8",
    )
    with pytest.raises(Refused, match=r"^train.py:6: .*FSDP plugin.*--layout fsdp=2.*fully_shard"):
        run(str(path), rank=ProgramRank(0, 2))
