"""The snapshot held against fresh starts, over measurements of this search and of those before it."""

import pytest

from autofit.launch.snapshot import Snapshot
from autofit.records import Candidate, Measurement, Outcome, PhaseRecord, Request, Schedule, Speed, Task
from autofit.study.snapshot_watch import SnapshotWatch

MiB = 2**20


class Standing:
    """What a launcher tells of its snapshot."""

    def __init__(self) -> None:
        self.snapshot, self.lost = Snapshot(frozenset({"optim"}), resolved={"optim": "adamw_torch"}), None

    def drop_snapshot(self) -> None:
        self.snapshot = None


class Found:
    """Measurements in a run directory, and peaks of those that are still to be made."""

    def __init__(self, *before: Measurement, peaks: dict[str, int] | None = None, outcomes=()) -> None:
        self.all, self.peaks, self.outcomes = list(before), peaks or {}, list(outcomes)
        self.launcher, self.said, self.asked = Standing(), [], []
        self.watch = SnapshotWatch(self.launcher, self.said.append)

    def canary(self, way: str) -> Measurement:
        self.asked.append(way)
        outcome = self.outcomes.pop(0) if self.outcomes else Outcome.FITS
        self.all.append(measured(way, self.peaks.get(way, 1000), outcome))
        return self.all[-1]

    def check(self, hurried: bool = False) -> list[str]:
        self.watch.check(lambda: self.all, self.canary, hurried)
        return self.asked


def measured(start: str, peak: int = 1000, outcome: Outcome = Outcome.FITS) -> Measurement:
    phases = (PhaseRecord("train", 1.0, process_bytes=peak * MiB),) if outcome is not Outcome.CRASHED else ()
    return Measurement(
        "1", "baseline", Candidate({}), outcome, 9.0, phases=phases, train_speed=Speed(8, (1.0,)), start=start
    )


@pytest.mark.parametrize(
    ("before", "asked"),
    [
        ([measured("snapshot")], ["fresh"]),
        ([measured("fresh")], ["snapshot"]),  # a search without a snapshot is resumed with one
        ([measured("fork")], ["snapshot"]),
        ([measured("snapshot"), measured("fresh")], []),
        ([measured("snapshot"), measured("fresh", 900, Outcome.CONTAMINATED)], ["fresh"]),
        ([measured("snapshot", outcome=Outcome.CONTAMINATED)], ["fresh"]),
    ],
)
def test_the_way_that_was_not_measured_is(before, asked):
    found = Found(*before)
    assert found.check() == asked
    assert found.launcher.snapshot is not None and not found.watch.rejected and found.said == []


@pytest.mark.parametrize("before", [["snapshot", "fresh"], ["snapshot"], ["fresh"]])
def test_a_snapshot_that_measures_otherwise_is_dropped_whenever_the_two_were_measured(before):
    peaks = {"snapshot": 1300, "fresh": 1000}
    found = Found(*(measured(way, peaks[way]) for way in before), peaks=peaks)
    found.check()
    assert found.watch.rejected and found.launcher.snapshot is None
    assert f"peak {1300 * MiB} bytes against {1000 * MiB} bytes" in found.said[0]


def test_a_disturbed_fresh_start_is_made_twice_and_once_in_a_hurry():
    disturbed = [Outcome.CONTAMINATED] * 3
    assert Found(measured("snapshot"), outcomes=disturbed).check() == ["fresh", "fresh"]
    assert Found(measured("snapshot"), outcomes=disturbed).check(hurried=True) == ["fresh"]


def test_an_earlier_disturbed_start_does_not_hide_a_quiet_one():
    found = Found(measured("snapshot"), measured("fresh"), measured("fresh", 2000, Outcome.CONTAMINATED))
    assert found.check() == [] and not found.watch.rejected


def test_nothing_is_measured_where_no_snapshot_stands():
    found = Found(measured("fresh"))
    found.launcher.snapshot = None
    assert found.check() == []


def request(**arguments: object) -> Request:
    return Request("1", "/nowhere", Task(), "cpu", Schedule(), arguments=arguments)


def test_a_field_that_the_script_has_read_is_named_once():
    found = Found()
    changed = request(optim="adafactor")
    for asked, how in (("snapshot", "fresh"), ("snapshot", "fresh"), ("snapshot", "snapshot"), ("fresh", "fresh")):
        found.watch.tell(changed, asked, how)
    assert len(found.said) == 1 and "reads optim before" in found.said[0]


@pytest.mark.parametrize(("again", "then"), [(True, "taken again"), (False, "run the script from its start")])
def test_a_lost_snapshot_is_told_once_with_what_comes_of_it(again, then):
    found = Found()
    found.launcher.lost = "its server died"
    if not again:
        found.launcher.snapshot = None
    found.watch.tell(request(), "snapshot", "fresh")
    found.watch.tell(request(), "fresh", "fresh")
    assert len(found.said) == 1 and "its server died" in found.said[0] and then in found.said[0]
