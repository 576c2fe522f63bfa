from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headway.errors import LabError
from headway.lab.spec import Kill, LabSpec, LinkChange, SlowChange, TrafficStart, load_spec, parse_spec

EXAMPLES = Path(__file__).parents[2] / "examples" / "lab"


def test_a_count_of_hosts_names_them() -> None:
    spec = LabSpec(hosts=2, workers_per_host=2, rate="400mbit")
    assert [(link.name, link.workers, link.up_gbps, link.down_gbps) for link in spec.links] == [
        ("host0", 2, 0.4, 0.4),
        ("host1", 2, 0.4, 0.4),
    ]
    assert spec.host_of_rank == (0, 0, 1, 1)


def test_the_nearest_rate_counts() -> None:
    hosts = [{"name": "a", "rate": "1gbit"}, {"name": "b", "up": "10mbit"}, {"name": "c", "workers": 3}]
    spec = parse_spec({"hosts": hosts, "rate": "100mbit", "down": "50mbit"})
    assert [(link.up_gbps, link.down_gbps) for link in spec.links] == [(1, 1), (0.01, 0.05), (0.1, 0.05)]
    assert spec.world_size == 5


def test_no_rate_is_unshaped() -> None:
    spec = LabSpec(hosts=1)
    assert spec.links[0].up_gbps is None
    assert not spec.shapes_links


def test_the_timeline_tells_its_events_apart() -> None:
    spec = parse_spec(
        {
            "hosts": 2,
            "timeline": [
                {"at": "0s", "link": "host1", "rate": "1mbit"},
                {"at": "3s", "traffic": {"from": "host0", "to": "host1", "rate": "2mbit", "for": "4s"}},
                {"at": "4s", "slow": {"rank": 1, "share": 0.5}},
                {"at": "8s", "kill": 1},
            ],
        }
    )
    assert [type(event) for event in spec.timeline] == [LinkChange, TrafficStart, SlowChange, Kill]
    assert LabSpec.model_validate_json(spec.model_dump_json(by_alias=True)) == spec


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_examples_are_valid(path: Path) -> None:
    assert load_spec(path).world_size >= 2


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"rate": "0mbit"}, "rate is out of range"),
        ({"rate": "10 gigabit"}, "rate: rate cannot be read; got '10 gigabit'"),
        ({"rate": 400}, "expected a rate such as 400mbit"),
        ({"rate": "100gbit"}, "range"),
        ({"rate": "10bit"}, "range"),
        ({"host": 2}, "unknown key host"),
        ({"hosts": 0}, "greater than or equal to 1"),
        ({"hosts": 201}, "less than or equal to 200"),
        ({"hosts": True}, "valid integer"),
        ({"hosts": 100, "workers_per_host": 3}, "too many workers"),
        ({"hosts": []}, "at least 1"),
        ({"hosts": [{"name": "a"}, {"name": "a"}]}, "names repeat"),
        ({"hosts": [{"name": "a\nb"}]}, "pattern"),
        ({"hosts": 2, "slow": {2: 0.5}}, "slow: no such rank; got 2; expected 0 to 1"),
        ({"hosts": 2, "pace": {-1: 2.0}}, "greater than or equal to 0"),
        ({"hosts": 2, "slow": {0: 0}}, "greater than 0"),
        ({"hosts": 2, "slow": {0: 1.5}}, "less than or equal to 1"),
        ({"hosts": 2, "slow": {0: float("nan")}}, "slow"),
        ({"slow_by": "magic"}, "'auto', 'signals' or 'quota'"),
        ({"hosts": 2, "pace": {0: float("inf")}}, "finite"),
        ({"timeline": [{"at": "1s", "link": "host7", "rate": "1mbit"}]}, "no such host; got host7"),
        ({"timeline": [{"at": "1s", "kill": 2}]}, "timeline.0: no such rank"),
        ({"timeline": [{"at": "1s", "slow": {"rank": 0, "share": 2}}]}, "less than or equal to 1"),
        ({"timeline": [{"at": "1s"}]}, "exactly one of link, traffic, slow, kill"),
        ({"timeline": [{"at": "1s", "kill": 0, "slow": {}}]}, "exactly one of"),
        ({"timeline": ["1s kill 0"]}, "exactly one of"),
        ({"timeline": [{"at": "soon", "kill": 0}]}, "time cannot be read"),
        ({"timeline": [{"at": "99999min", "kill": 0}]}, "at most a week"),
        ({"timeline": [{"at": "1s", "link": "host0", "rate": "1mbit", "direction": "left"}]}, "'up'"),
        (
            {"timeline": [{"at": "1s", "traffic": {"from": "host0", "to": "host0", "rate": "1mbit"}}]},
            "from a host to itself",
        ),
        (["hosts"], "not a mapping"),
    ],
)
def test_bad_specs_are_refused_in_one_line(data: Any, says: str) -> None:
    with pytest.raises(LabError) as caught:
        parse_spec(data, "lab file x.yaml")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("lab file x.yaml")


BOMB = "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"{chr(98 + n)}: &{chr(98 + n)} [{', '.join(['*' + chr(97 + n)] * 10)}]\n" for n in range(8)
)


@pytest.mark.parametrize(
    "text",
    [
        "hosts: [", "- 1", "hosts: 2\nhosts: !!python/object:os.system 3", "\0", f"{BOMB}rate: *i", "hosts: !!int ''",
        "hosts: 2\nhosts: 2", "hosts: !!bool foo", "rate: 1:1:1",
    ],
)  # fmt: skip
def test_files_that_are_not_yaml_mappings_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "lab.yaml").write_text(text)
    with pytest.raises(LabError, match=r"lab\.yaml"):
        load_spec(tmp_path / "lab.yaml")


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LabError, match="not found"):
        load_spec(tmp_path / "none.yaml")
