"""Clusters: which link an axis uses."""

import itertools
from dataclasses import replace

import pytest

from tight_fit.layouts.cluster import Cluster
from tight_fit.layouts.layout import Layout, parse
from tight_fit.layouts.seconds import LINKS, Link


def test_an_axis_uses_the_link_that_its_ranks_reach():
    cluster = Cluster("A100-40GB", 8, machines=2, inside="NVLink 3", between="Ethernet 10 Gbit")
    inside, between = LINKS["NVLink 3"], LINKS["Ethernet 10 Gbit"]

    def links(text: str) -> dict[str, Link]:
        return cluster.links_of_axes(parse(text).axes)

    assert links("ddp=16")["data"] == between
    assert set(links("ddp=8").values()) == {inside}
    shared = links("fsdp=2,tensor=8")
    assert shared["tensor"] == inside
    assert shared["data"].speed == between.speed / 8
    assert "shared by 8" in shared["data"].name
    staged = links("pipeline=2,fsdp=8")
    assert staged["data"] == inside and staged["pipeline"].speed == between.speed / 8
    assert links("fsdp=4,tensor=2")["data"] == inside
    # One group of stages alone sends from machine to machine.
    assert links("pipeline=16")["pipeline"].speed == between.speed


def test_network_cards_are_shared_by_the_groups_that_send():
    """A DGX has a card for each GPU: eight groups have one each, a single group has all of them."""
    dgx = Cluster(
        "A100-40GB", 8, machines=2, inside="NVLink 3", between="InfiniBand 200 Gbit", cards=8
    )
    card, nvlink = LINKS["InfiniBand 200 Gbit"], LINKS["NVLink 3"]
    sharded, over_all = parse("fsdp=2,tensor=8").axes, parse("fsdp=16").axes
    assert dgx.links_of_axes(sharded)["data"].speed == card.speed
    alone = dgx.links_of_axes(over_all)["data"]
    assert alone.speed == 8 * card.speed < nvlink.speed and "8 × InfiniBand" in alone.name
    assert "8 × InfiniBand 200 Gbit between" in str(dgx)
    many = replace(dgx, cards=16)  # no faster than the link inside
    assert many.links_of_axes(over_all)["data"].speed == nvlink.speed
    with pytest.raises(ValueError, match="cards=0 must be at least 1"):
        Cluster("T4", machines=2, cards=0)


def test_links_agree_with_the_ranks_counted_one_by_one():
    for data, outer, tensor, per_machine in itertools.product(
        (1, 2, 3, 4), (1, 2, 4), (1, 2, 4), (1, 2, 4, 8)
    ):
        if per_machine % tensor:
            continue
        layout = Layout(data=data * outer, replicate=outer, tensor=tensor)
        cluster = Cluster(
            "T4", per_machine, machines=-(-layout.ranks // per_machine), inside=Link("in", 9e9, 0),
            between=Link("out", 1e9, 0),
        )  # fmt: skip
        number = {
            (o, d, t): (o * data + d) * tensor + t
            for o in range(outer)
            for d in range(data)
            for t in range(tensor)
        }
        axes = {"replicate": outer, "data": data, "tensor": tensor}
        leaves = dict.fromkeys(axes, False)
        for first, second in itertools.combinations(number, 2):
            apart = [axis for axis, a, b in zip(axes, first, second) if a != b]
            if len(apart) == 1 and number[first] // per_machine != number[second] // per_machine:
                leaves[apart[0]] = True
        links = cluster.links_of_axes(layout.axes)
        for axis, out in leaves.items():
            if axes[axis] > 1 and cluster.machines > 1:
                assert (links[axis].speed < 9e9) >= out, (layout, per_machine, axis)
                if layout.ranks % per_machine == 0 and (
                    per_machine % (tensor * data) == 0 or (tensor * data) % per_machine == 0
                ):
                    assert (links[axis].speed < 9e9) == out, (layout, per_machine, axis)
