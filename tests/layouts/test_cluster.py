"""Clusters: which link an axis uses, and which candidates can lie on them."""

import itertools
from dataclasses import replace

import pytest

from helpers.parallel import Parallel
from tight_fit.layouts.cluster import Cluster
from tight_fit.layouts.seconds import LINKS, Link


def test_an_axis_uses_the_link_that_its_ranks_reach():
    cluster = Cluster("A100-40GB", 8, machines=2, inside="NVLink 3", between="Ethernet 10 Gbit")
    inside, between = LINKS["NVLink 3"], LINKS["Ethernet 10 Gbit"]
    assert cluster.links(Parallel(data=16))["data"] == between
    assert set(cluster.links(Parallel(data=8)).values()) == {inside}
    shared = cluster.links(Parallel(data=2, tensor=8))
    assert (
        shared["tensor"] == inside
        and shared["data"].speed == between.speed / 8
        and "shared by 8" in shared["data"].name
    )
    staged = cluster.links(Parallel(data=8, pipeline=2))
    assert staged["data"] == inside and staged["pipeline"].speed == between.speed / 8
    assert cluster.links(Parallel(data=4, tensor=2))["data"] == inside
    # One group of stages alone sends from machine to machine.
    assert cluster.links(Parallel(data=1, pipeline=16))["pipeline"].speed == between.speed


def test_network_cards_are_shared_by_the_groups_that_send():
    """A DGX has a card for each GPU: eight groups have one each, a single group has all of them."""
    dgx = Cluster(
        "A100-40GB", 8, machines=2, inside="NVLink 3", between="InfiniBand 200 Gbit", cards=8
    )
    card, nvlink = LINKS["InfiniBand 200 Gbit"], LINKS["NVLink 3"]
    assert dgx.links(Parallel(data=2, tensor=8))["data"].speed == card.speed
    alone = dgx.links(Parallel(data=16))["data"]
    assert alone.speed == 8 * card.speed < nvlink.speed and "8 × InfiniBand" in alone.name
    assert "8 × InfiniBand 200 Gbit between" in str(dgx)
    many = replace(dgx, cards=16)  # no faster than the link inside
    assert many.links(Parallel(data=16))["data"].speed == nvlink.speed
    with pytest.raises(ValueError, match="cards=0 must be at least 1"):
        Cluster("T4", machines=2, cards=0)


def test_links_agree_with_the_ranks_counted_one_by_one():
    for data, pipeline, tensor, per_machine in itertools.product(
        (1, 2, 3, 4), (1, 2, 4), (1, 2, 4), (1, 2, 4, 8)
    ):
        if per_machine % tensor:
            continue
        parallel = Parallel(data=data, pipeline=pipeline, tensor=tensor)
        cluster = Cluster(
            "T4",
            per_machine,
            machines=-(-parallel.ranks // per_machine),
            inside=Link("in", 9e9, 0),
            between=Link("out", 1e9, 0),
        )
        number = {
            (p, d, t): (p * data + d) * tensor + t
            for p in range(pipeline)
            for d in range(data)
            for t in range(tensor)
        }
        leaves = {"tensor": False, "data": False, "pipeline": False}
        for first, second in itertools.combinations(number, 2):
            apart = [
                axis for axis, a, b in zip(("pipeline", "data", "tensor"), first, second) if a != b
            ]
            if len(apart) == 1 and number[first] // per_machine != number[second] // per_machine:
                leaves[apart[0]] = True
        links = cluster.links(parallel)
        for axis, out in leaves.items():
            if getattr(parallel, axis) > 1 and cluster.machines > 1:
                assert (links[axis].speed < 9e9) >= out, (parallel, per_machine, axis)
                if parallel.ranks % per_machine == 0 and (
                    per_machine % (tensor * data) == 0 or (tensor * data) % per_machine == 0
                ):
                    assert (links[axis].speed < 9e9) == out, (parallel, per_machine, axis)


def test_clusters_that_are_refused():
    with pytest.raises(ValueError, match="gpu='K90' is not known"):
        Cluster("K90")
    with pytest.raises(ValueError, match="link='string' is not known"):
        Cluster("T4", inside="string")
    with pytest.raises(ValueError, match="machines=0 must be at least 1"):
        Cluster("T4", machines=0)
    with pytest.raises(TypeError, match="per_machine=True must be a whole number"):
        Cluster("T4", True)
    with pytest.raises(ValueError, match="more than one machine of 2"):
        Cluster("T4", 2, machines=2).links(Parallel(tensor=4))
