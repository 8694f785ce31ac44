"""What the controller decides, without Ray: where replicas go, which are replaced, how many there are."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from lightserve.cli.status import lines
from lightserve.ray.autoscaling import Autoscaler, replicas_for
from lightserve.ray.gateway_load import taken_by_all, total_by_role, total_load, url_for_proxy
from lightserve.ray.gateway_metrics import parse_metrics
from lightserve.ray.messages import (
    NORMAL,
    Deployment,
    DeploymentStatus,
    GatewayStatus,
    GroupStatus,
    Load,
    ProcessStatus,
    ReplicaGroup,
    ReplicaStatus,
    pack,
    unpack,
)
from lightserve.ray.placement import HEAD_RESOURCE, Node, place_gateways, place_replicas, plan_lines
from lightserve.ray.replica_changes import Changes, GroupView, ReplicaView, group_changes, next_changes
from lightserve.ray.replica_name import parse_replica_name, replica_name

GPU_NODE = {"GPU": 4.0, "CPU": 8.0}
GROUPS = [ReplicaGroup(1, 2, "prefill"), ReplicaGroup(2, 4, "decode")]
BUNDLE = {"GPU": 2.0, "CPU": 1.0}


def node(name: str, **free: float) -> Node:
    return Node(name, f"10.0.0.{name}", free, GPU_NODE)


def view(name: str, *, is_old: bool = False, takes: bool = True, drains: bool = False) -> ReplicaView:
    return ReplicaView(name, not is_old, takes, drains)


def deployment(*groups: ReplicaGroup) -> Deployment:
    return Deployment("d", 1, {}, {}, {}, {"CPU": 1.0}, list(groups), target_queue=4.0, scale_down_s=60.0)


def scaler_of(group: ReplicaGroup, running: int) -> Autoscaler:
    return Autoscaler(deployment(group), group, running)


def test_replicas_are_spread_over_the_nodes_that_have_room() -> None:
    nodes = [node("1", GPU=4, CPU=8), node("2", GPU=2, CPU=8), node("3", GPU=1, CPU=8), node("4", GPU=4, CPU=0)]

    assert place_replicas(nodes, BUNDLE, [NORMAL] * 4) == ["1", "2", "1", None]
    assert place_replicas(nodes, BUNDLE, [NORMAL], used=[("1", NORMAL)]) == ["2"]
    assert place_replicas([], BUNDLE, [NORMAL]) == [None]


def test_the_first_gateway_is_on_the_head_node_and_the_others_are_spread() -> None:
    head = Node("head", "10.0.0.9", {}, {HEAD_RESOURCE: 1.0})
    nodes = [node("1"), head, node("2")]

    assert place_gateways(nodes, 4) == [None, "1", "2", "1"]
    assert place_gateways([head], 2) == [None, None]


def test_the_plan_says_why_a_replica_has_no_place() -> None:
    busy = plan_lines([node("1", GPU=2, CPU=8)], BUNDLE, [NORMAL] * 2)
    too_large = plan_lines([node("1", GPU=2, CPU=8)], {"GPU": 8.0, "CPU": 1.0}, [NORMAL])

    assert busy == ["replica 0: node 1 (10.0.0.1)", "1 replica has no place: no node has 2 GPU, 1 CPU free now"]
    assert too_large[0].endswith("a replica runs on one node, and the largest ones have 4 GPU, 8 CPU")


def test_replicas_are_started_until_there_are_enough_and_drained_when_there_are_too_many() -> None:
    three = [view("a"), view("b", takes=False), view("c")]

    assert next_changes([], 3, True) == Changes(start=3)
    assert next_changes([view("a"), view("b", drains=True)], 2, False) == Changes(start=1)
    assert next_changes(three, 3, True) == Changes()
    assert next_changes(three, 2, True) == Changes(drain=("b",))
    assert next_changes(three, 1, True) == Changes(drain=("b", "c"))


def test_a_successor_takes_requests_before_an_old_replica_is_drained_if_there_is_room() -> None:
    old = [view("a", is_old=True), view("b", is_old=True)]

    assert next_changes(old, 2, True) == Changes(start=1)
    assert next_changes([*old, view("c", takes=False)], 2, True) == Changes()
    assert next_changes([old[0], view("c", takes=False)], 2, True) == Changes()  # "c" may need that room
    assert next_changes([*old, view("c")], 2, False) == Changes(drain=("a",))


def test_without_room_one_old_replica_is_drained_at_a_time() -> None:
    old = [view("a", is_old=True), view("b", is_old=True)]

    assert next_changes(old, 2, False) == Changes(drain=("a",))
    assert next_changes([view("a", is_old=True, drains=True), old[1]], 2, False) == Changes(start=1)
    waiting = [view("a", is_old=True, drains=True), old[1], view("c", takes=False)]
    assert next_changes(waiting, 2, False) == Changes()
    assert next_changes([old[1], view("c")], 2, False) == Changes(drain=("b",))


def test_a_successor_that_finds_no_place_gets_that_of_an_old_replica() -> None:
    replicas = [view("a", is_old=True), view("b", is_old=True), ReplicaView("c", True, False, False, is_stuck=True)]

    assert next_changes(replicas, 2, False) == Changes(drain=("a",))
    assert next_changes([view("a", is_old=True, drains=True), *replicas[1:]], 2, False) == Changes()


@pytest.mark.parametrize("seed", range(20))
def test_every_rolling_update_ends_with_new_replicas_only_and_keeps_all_but_one_serving(seed: int) -> None:
    choice = random.Random(seed)
    wanted, room = choice.randint(1, 4), choice.randint(0, 2)
    replicas = [view(f"old{index}", is_old=True) for index in range(wanted)]
    started = 0
    for _ in range(200):
        free = wanted + room - len(replicas)
        changes = next_changes(replicas, wanted, free > 0)
        replicas = [view(one.replica, is_old=not one.is_current, takes=one.takes_requests, drains=True)
                    if one.replica in changes.drain else one for one in replicas]  # fmt: skip
        for _ in range(changes.start):
            replicas.append(view(f"new{started}", takes=False))
            started += 1
        assert sum(one.is_current and not one.takes_requests for one in replicas) <= 1  # they could take one place
        placed = replicas[: wanted + room]  # others wait until Ray has room
        for index, one in enumerate(replicas):
            if one.is_current and not one.takes_requests and one in placed and choice.random() < 0.3:
                replicas[index] = view(one.replica)
        serving = sum(one.takes_requests and not one.is_draining for one in replicas)
        assert serving >= wanted - 1
        assert serving >= wanted or not room
        if any(one.is_draining for one in replicas) and choice.random() < 0.3:
            replicas.remove(next(one for one in replicas if one.is_draining))

    assert [(one.is_current, one.takes_requests) for one in replicas] == [(True, True)] * wanted
    assert started == wanted


def test_replicas_of_one_role_are_spread_first() -> None:
    nodes = [node("1", GPU=8, CPU=8), node("2", GPU=4, CPU=8)]

    assert place_replicas(nodes, BUNDLE, ["prefill", "prefill", "decode", "decode"]) == ["1", "2", "1", "2"]
    used = [("1", "decode"), ("2", "prefill"), ("2", "prefill")]
    assert place_replicas(nodes, BUNDLE, ["decode"], used) == ["2"]


def test_the_plan_says_which_role_has_no_place() -> None:
    found = plan_lines([node("1", GPU=2, CPU=8)], BUNDLE, ["prefill", "decode", "decode"])

    assert found == [
        "prefill replica 0: node 1 (10.0.0.1)",
        "2 decode replicas have no place: no node has 2 GPU, 1 CPU free now",
    ]


def test_of_all_roles_one_replica_is_replaced_at_a_time() -> None:
    prefill = GroupView("prefill", 1, [view("p", is_old=True)])
    decode = GroupView("decode", 2, [view("d", is_old=True), view("e", is_old=True)])
    draining = GroupView("prefill", 1, [view("p", is_old=True, drains=True), view("q", takes=False)])

    assert group_changes([prefill, decode], 0) == {"prefill": Changes(drain=("p",)), "decode": Changes()}
    assert group_changes([prefill, decode], 2) == {"prefill": Changes(start=1), "decode": Changes()}
    assert group_changes([draining, decode], 1) == {"prefill": Changes(), "decode": Changes()}
    assert group_changes([GroupView("prefill", 1, [view("q")]), decode], 1)["decode"] == Changes(start=1)


def test_room_is_for_replicas_that_are_missing_first() -> None:
    prefill = GroupView("prefill", 1, [view("p", is_old=True)])
    decode = GroupView("decode", 2, [view("d")])

    assert group_changes([prefill, decode], 1) == {"prefill": Changes(drain=("p",)), "decode": Changes(start=1)}
    assert group_changes([prefill, decode], 2) == {"prefill": Changes(start=1), "decode": Changes(start=1)}


class Nodes:
    """Replicas by role, and a cluster that has room for some of them."""

    def __init__(self, choice: random.Random, before: dict[str, int], room: int) -> None:
        self._choice = choice
        self.replicas = {role: [view(f"old-{role}-{n}", is_old=True) for n in range(before[role])] for role in before}
        self._placed = {one.replica for one in self.all()}
        self._capacity = len(self._placed) + room
        self._calm_ticks = 0
        self.started = 0

    def all(self) -> list[ReplicaView]:
        return [one for own in self.replicas.values() for one in own]

    def change(self, wanted: dict[str, int]) -> None:
        is_late = self._calm_ticks > 3
        groups = []
        for role in dict.fromkeys((*wanted, *self.replicas)):
            own = self.replicas.setdefault(role, [])
            stuck = [replace(one, is_stuck=is_late and one.replica not in self._placed) for one in own]
            groups.append(GroupView(role, wanted.get(role, 0), stuck))
        for role, changes in group_changes(groups, self._capacity - len(self._placed)).items():
            own = self.replicas[role]
            own[:] = [replace(one, is_draining=one.is_draining or one.replica in changes.drain) for one in own]
            for _ in range(changes.start):
                own.append(view(f"new-{role}-{self.started}", takes=False))
                self.started += 1

    def tick(self) -> None:
        self._calm_ticks += 1
        waiting = [one.replica for one in self.all() if one.replica not in self._placed]
        self._choice.shuffle(waiting)
        self._placed.update(waiting[: self._capacity - len(self._placed)])
        for own in self.replicas.values():
            for index, one in enumerate(own):
                if one.replica in self._placed and not one.is_draining and self._choice.random() < 0.2:
                    own[index] = replace(one, takes_requests=True)
            for one in [one for one in own if one.is_draining and self._choice.random() < 0.3]:
                own.remove(one)
                self._placed.discard(one.replica)
                self._calm_ticks = 0


@pytest.mark.parametrize("seed", range(30))
def test_every_change_of_roles_ends_with_the_wanted_ones_and_keeps_all_but_one_serving(seed: int) -> None:
    """New flags, or replicas without roles before."""
    choice = random.Random(seed)
    wanted = {"prefill": choice.randint(1, 2), "decode": choice.randint(1, 3)}
    total = sum(wanted.values())
    nodes = Nodes(choice, choice.choice([wanted, {NORMAL: total}]), room=choice.randint(0, 2))
    for _ in range(600):
        nodes.change(wanted)
        assert sum(one.takes_requests and not one.is_draining for one in nodes.all()) >= total - 1
        nodes.tick()

    assert {role: len(own) for role, own in nodes.replicas.items() if own} == wanted
    assert all(one.is_current and one.takes_requests for one in nodes.all())
    assert nodes.started == total


@pytest.mark.parametrize(
    ("load", "replicas", "needed"),
    [
        (Load(), 3, 0),
        (Load(running=2, waiting=0, kv_usage=0.1), 3, 1),
        (Load(running=9, waiting=0, kv_usage=0.6), 3, 3),
        (Load(running=9, waiting=3, kv_usage=0.1), 3, 3),
        (Load(running=9, waiting=13, kv_usage=0.1), 3, 4),
        (Load(running=9, waiting=400, kv_usage=0.1), 3, 6),
        (Load(running=9, waiting=0, kv_usage=0.95), 3, 4),
    ],
)
def test_the_load_decides_how_many_replicas_it_needs(load: Load, replicas: int, needed: int) -> None:
    assert replicas_for(load, replicas, target_queue=4.0) == needed


def test_replicas_are_added_at_once_and_removed_one_by_one_after_a_while() -> None:
    scaler = scaler_of(ReplicaGroup(1, 4), running=0)
    busy, idle = Load(running=8, waiting=20), Load()

    assert [scaler.update(busy, now_s) for now_s in (0.0, 1.0, 2.0)] == [2, 4, 4]
    assert scaler.update(idle, 10.0) == 4
    assert scaler.update(idle, 69.0) == 4
    assert scaler.update(Load(running=8, waiting=1), 69.5) == 4  # the time begins again
    assert [scaler.update(idle, now_s) for now_s in (70.0, 129.0, 130.0, 131.0, 191.0)] == [4, 4, 3, 3, 2]
    assert [scaler.update(idle, float(now_s)) for now_s in range(192, 400)][-1] == 1


def test_a_full_kv_cache_adds_no_replica_while_one_starts_or_gets_its_share() -> None:
    scaler, full = scaler_of(ReplicaGroup(1, 8), running=2), Load(running=40, kv_usage=0.95)

    assert scaler.update(full, 0.0, serving=2) == 3
    assert [scaler.update(full, float(now_s), serving=2) for now_s in range(1, 300)] == [3] * 299
    assert [scaler.update(full, now_s, serving=3) for now_s in (300.0, 305.0, 309.9)] == [3, 3, 3]
    assert scaler.update(full, 310.0, serving=3) == 4
    assert scaler.update(Load(running=40, waiting=99, kv_usage=0.95), 311.0, serving=3) == 8, "requests wait"


def test_a_role_grows_by_its_own_load() -> None:
    prefill, decode = (Autoscaler(deployment(*GROUPS), group, 0) for group in GROUPS)
    prompts_wait, kv_is_full = Load(running=1, waiting=9, kv_usage=0.1), Load(running=40, waiting=0, kv_usage=0.95)

    assert (prefill.wanted, decode.wanted) == (1, 2)
    assert (prefill.update(prompts_wait, 0.0), decode.update(Load(running=40, kv_usage=0.5), 0.0)) == (2, 2)
    assert (prefill.update(Load(running=1, kv_usage=0.95), 1.0), decode.update(kv_is_full, 1.0)) == (2, 3)
    assert decode.update(Load(running=9, waiting=400), 2.0) == 4, "MAX of its role"


def test_a_prefill_replica_leaves_if_there_never_was_a_prompt_for_it() -> None:
    scaler = scaler_of(ReplicaGroup(1, 4, "prefill"), running=2)
    one, two = Load(running=1, kv_usage=0.9), Load(running=1, waiting=1, kv_usage=0.1)

    assert [scaler.update(one, 0.0), scaler.update(two, 50.0)] == [2, 2]
    assert [scaler.update(one, now_s) for now_s in (51.0, 110.0, 111.0)] == [2, 2, 1]


def test_a_prefill_replica_is_added_if_decode_replicas_compute_prompts_all_the_time() -> None:
    group = ReplicaGroup(1, 4, "prefill")
    scaler, bursts = scaler_of(group, running=1), scaler_of(group, running=1)

    wanted = [scaler.update(Load(running=1, local_prefill_tokens=1000.0 * now_s), now_s) for now_s in range(31)]
    seldom = [
        bursts.update(Load(running=1, local_prefill_tokens=1000.0 * (now_s // 20)), now_s) for now_s in range(200)
    ]

    assert wanted[:11] == [1] * 11  # the first figure is old: the counter may have grown at any time
    assert (wanted[11], wanted[20], wanted[21]) == (2, 2, 3)
    assert seldom == [1] * 200
    assert scaler.update(Load(local_prefill_tokens=0.0), 32.0) == 3, "a gateway was restarted"


def test_loads_of_roles_come_from_the_metrics_of_a_gateway() -> None:
    text = (
        "# TYPE lightserve_num_requests_running gauge\nlightserve_num_requests_running 5\n"
        "# TYPE lightserve_kv_transfer_local_prefill_tokens counter\n"
        "lightserve_kv_transfer_local_prefill_tokens_total 700\n"
        "# TYPE lightserve_role_requests_running gauge\n"
        'lightserve_role_requests_running{role="prefill"} 1\nlightserve_role_requests_running{role="decode"} 4\n'
        '# TYPE lightserve_role_requests_waiting gauge\nlightserve_role_requests_waiting{role="prefill"} 3\n'
        '# TYPE lightserve_role_kv_cache_usage_perc gauge\nlightserve_role_kv_cache_usage_perc{role="decode"} 0.5\n'
        "# TYPE lightserve_engine_takes_requests gauge\n"
        'lightserve_engine_takes_requests{address="tcp://a:1"} 1\n'
        'lightserve_engine_takes_requests{address="tcp://a:2"} 0\n'
    )
    by_role = {"prefill": Load(1, 3, 0.0, 700), "decode": Load(4, 0, 0.5, 700)}

    assert parse_metrics(text) == (Load(5, 0, 0.0, 700), by_role, ["tcp://a:1"])


def test_several_gateways_say_the_same_of_engines_and_each_counts_its_own_local_prefills() -> None:
    serving = ProcessStatus("serving", "http://a")
    first = GatewayStatus(serving, by_role={"prefill": Load(1, 3, 0.1, 100), "decode": Load(9, 0, 0.5, 100)})
    second = GatewayStatus(serving, by_role={"prefill": Load(1, 2, 0.1, 50)})

    assert total_by_role([first, second]) == {"prefill": Load(1, 3, 0.1, 150), "decode": Load(9, 0, 0.5, 100)}


def test_a_replica_takes_requests_if_every_gateway_that_has_engines_sends_it_some() -> None:
    serving = ProcessStatus("serving", "http://a")
    first = GatewayStatus(serving, Load(3, 1, 0.2), ["a", "b"])
    second = GatewayStatus(serving, Load(3, 2, 0.2), ["b", "c"])
    new = GatewayStatus(serving)

    assert taken_by_all([first, second, new]) == ["b"]
    assert taken_by_all([new]) == []
    assert total_load([first, second, new]) == Load(3, 2, 0.2)


def test_haproxy_gets_a_gateway_when_it_has_an_engine_and_keeps_it_while_nothing_is_known() -> None:
    serving, starting = ProcessStatus("serving", "http://a"), ProcessStatus("starting", "http://a")

    assert url_for_proxy(GatewayStatus(serving, taking=["e"], node="n")) == "http://a"
    assert url_for_proxy(GatewayStatus(starting, taking=["e"], node="n")) == ""
    assert url_for_proxy(GatewayStatus(serving, node="n")) is None  # no engine yet, or it was too busy to say
    assert url_for_proxy(GatewayStatus(starting)) is None  # the controller has just started


def test_the_progress_of_a_deployment_says_why_a_replica_has_no_node() -> None:
    gateway, serving = GatewayStatus(ProcessStatus("serving")), ProcessStatus("serving", "tcp://a")
    waiting = ProcessStatus("starting", reason="no node has 1 CPU free now")
    replicas = [ReplicaStatus(name, 2, "n", serving, True) for name in ("a", "b")]

    def progress(*last: ReplicaStatus) -> str:
        groups = [GroupStatus(NORMAL, 3, 3, 3)]
        return DeploymentStatus("d", 2, groups, gateway, [*replicas, *last], []).progress()

    assert progress(ReplicaStatus("c", 1, "n", serving, True)) == "2 of 3 replicas serve"  # it has old flags
    assert progress(ReplicaStatus("c", 2, "", ProcessStatus("starting"), False)) == "2 of 3 replicas serve"
    assert progress(ReplicaStatus("c", 2, "", waiting, False)) == "2 of 3 replicas serve: no node has 1 CPU free now"


def test_progress_and_status_have_a_number_for_each_role() -> None:
    load = {"prefill": Load(1, 3, 0.1), "decode": Load(9, 0, 0.5)}
    gateway = GatewayStatus(ProcessStatus("serving", "http://g"), Load(10, 3, 0.3), by_role=load)
    serving, groups = (
        ProcessStatus("serving", "tcp://a"),
        [GroupStatus("prefill", 1, 1, 2), GroupStatus("decode", 2, 2, 2)],
    )
    replicas = [
        ReplicaStatus("replica-prefill-v1.0", 1, "n", serving, True, "prefill"),
        ReplicaStatus("replica-decode-v1.1", 1, "n", serving, True, "decode"),
        ReplicaStatus("replica-v1.2", 1, "n", serving, True),  # of an earlier deployment, without roles
    ]
    found = DeploymentStatus("d", 1, groups, gateway, replicas, [])

    assert found.wanted == 3
    assert found.progress() == "1 of 1 prefill and 1 of 2 decode replicas serve"
    first, _, *loads, header, prefill, decode, _ = lines(found)
    assert first == "d: 1 of 1 (1:2) prefill and 1 of 2 decode replicas serve, version 1"
    assert loads[1:] == ["prefill: 1 running, 3 waiting; KV 10%", "decode: 9 running, 0 waiting; KV 50%"]
    assert (header.split()[1], prefill.split()[1], decode.split()[1]) == ("role", "prefill", "decode")


def test_new_limits_count_at_once() -> None:
    scaler = scaler_of(ReplicaGroup(1, 4), running=2)
    scaler.change(deployment(), ReplicaGroup(3, 5))
    assert scaler.wanted == 3
    scaler.change(deployment(), ReplicaGroup(1, 2))
    assert scaler.wanted == 2


def test_a_deployment_is_the_same_after_its_way_through_ray() -> None:
    sent = Deployment("d", 2, {"tp": 2, "model_dir": "m"}, {"api_key": ["k"]}, {"a": b"\xff"}, {"GPU": 2.0}, GROUPS)

    assert unpack(pack(sent), Deployment) == sent


@pytest.mark.parametrize("role", [NORMAL, "prefill"])
def test_the_name_of_a_replica_tells_its_role_version_and_number(role: str) -> None:
    name = f"my-d/{replica_name(role, 3, 14)}"

    assert name.startswith("my-d/replica-")
    assert parse_replica_name(name) == (role, 3, 14)
