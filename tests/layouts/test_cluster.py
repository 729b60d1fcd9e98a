"""Clusters: which link an axis uses, and how long a message takes on it."""

import itertools
from dataclasses import replace

import pytest

from tight_fit.layouts.cluster import Cluster
from tight_fit.layouts.layout import Layout, parse
from tight_fit.layouts.messages import SentMessage
from tight_fit.layouts.seconds import BEGIN, LINKS, Link, transfer


def test_an_axis_uses_the_link_that_its_ranks_reach():
    cluster = Cluster("A100-40GB", 8, machines=2, inside="NVLink 3", between="Ethernet 10 Gbit")
    inside, between = LINKS["NVLink 3"], LINKS["Ethernet 10 Gbit"]

    def links(text: str) -> dict[str, Link]:
        return cluster.links_of_axes(parse(text).axes)

    assert links("ddp=16")["data"] == between and set(links("ddp=8").values()) == {inside}
    assert links("fsdp=4,tensor=2")["data"] == inside
    shared = links("fsdp=2,tensor=8")
    assert shared["tensor"] == inside and shared["data"].speed == between.speed / 8
    assert "shared by 8" in shared["data"].name
    staged = links("pipeline=2,fsdp=8")
    assert staged["data"] == inside and staged["pipeline"].speed == between.speed / 8
    # One group of stages alone sends from machine to machine.
    assert links("pipeline=16")["pipeline"].speed == between.speed


def test_network_cards_are_shared_by_the_groups_that_send():
    """A DGX has a card for each GPU: eight groups have one each, a single group has all of them."""
    dgx = Cluster("H100", 8, 2, inside="NVLink 3", between="InfiniBand 200 Gbit", cards=8)
    card, nvlink = LINKS["InfiniBand 200 Gbit"], LINKS["NVLink 3"]
    assert dgx.links_of_axes(parse("fsdp=2,tensor=8").axes)["data"].speed == card.speed
    alone = dgx.links_of_axes(parse("fsdp=16").axes)["data"]
    assert alone.speed == 8 * card.speed < nvlink.speed and "8 × InfiniBand" in alone.name
    assert "8 × InfiniBand 200 Gbit between" in str(dgx)
    many = replace(dgx, cards=16).links_of_axes(parse("fsdp=16").axes)
    assert many["data"].speed == nvlink.speed, "no faster than the link inside"
    experts = dgx.links_of_axes(Layout(16, expert=8).axes)
    assert experts["expert"].name == "NVLink 3" and experts["expert_data"].speed == card.speed


def test_links_agree_with_the_ranks_counted_one_by_one():
    for data, outer, tensor, per_machine in itertools.product(
        (1, 2, 3, 4), (1, 2, 4), (1, 2, 4), (1, 2, 4, 8)
    ):
        layout = Layout(data=data * outer, replicate=outer, tensor=tensor)
        machines = -(-layout.ranks // per_machine)
        if per_machine % tensor or machines == 1:
            continue
        cluster = Cluster("T4", per_machine, machines, Link("in", 9e9, 0), Link("out", 1e9, 0))
        axes = {"replicate": outer, "data": data, "tensor": tensor}
        number = {
            (o, d, t): (o * data + d) * tensor + t
            for o, d, t in itertools.product(*map(range, axes.values()))
        }
        leaves = set()
        for first, second in itertools.combinations(number, 2):
            apart = [axis for axis, a, b in zip(axes, first, second) if a != b]
            if len(apart) == 1 and number[first] // per_machine != number[second] // per_machine:
                leaves.add(apart[0])
        of_data = tensor * data
        even = layout.ranks % per_machine == 0
        even = even and (per_machine % of_data == 0 or of_data % per_machine == 0)
        for axis, link in cluster.links_of_axes(layout.axes).items():
            if axes.get(axis, 1) > 1:
                out = link.speed < 9e9
                assert out == (axis in leaves) or not even and out, (layout, per_machine, axis)


@pytest.mark.parametrize(
    "kind, seconds",
    [
        ("all_reduce", 2 * 2 * 0.5 + 6),  # 6 MB each, up and down a tree
        ("all_gather", 3 * 0.5 + 3),
        ("send", 0.5 + 4),
    ],
)
def test_time_of_4_mb_between_four_ranks(kind, seconds):
    message = SentMessage(kind, payload=4_000_000, ranks=4, axis="data", phase="backward")
    assert transfer(message, Link("slow", 1e6, 0.5)) == pytest.approx(BEGIN + seconds)


def test_what_leaves_the_machine_takes_as_long_as_over_the_card_of_one_gpu():
    cluster = Cluster("H100", 8, 2, "NVLink 4", "InfiniBand 400 Gbit", cards=8)
    between = cluster.links_of_axes(Layout(16, expert=16).axes)["expert"]
    seconds = transfer(SentMessage("all_to_all", 2**30, 16, "expert", ""), between)
    leaves = 2**30 * 8 / 16 / LINKS["InfiniBand 400 Gbit"].speed
    assert seconds == pytest.approx(leaves + BEGIN + 15 * between.latency)


def test_published_latencies_and_speeds_of_nccl():
    """Those that the comment on `LINKS` names, to a quarter (latencies) and a tenth (speeds)."""
    for ranks, link, seconds in (
        (2, "NVLink 3", 12e-6),
        (8, "NVLink 4", 18e-6),
        (8, "PCIe 4 x16", 42e-6),
        (2, "InfiniBand 200 Gbit", 30e-6),
    ):
        small = transfer(SentMessage("all_reduce", 8, ranks, "data", ""), LINKS[link])
        assert small == pytest.approx(seconds, rel=0.25), link
    assert LINKS["NVLink 4"].speed == pytest.approx(370e9, rel=0.1)
    assert LINKS["NVLink 3"].speed == pytest.approx(208e9, rel=0.12)
    assert 4 * LINKS["InfiniBand 200 Gbit"].speed == pytest.approx(96e9, rel=0.1)
