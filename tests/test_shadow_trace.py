"""Traces: stored, rewritten for other batch sizes, replayed and summed up. No run is behind these; they are made up."""

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autofit.harness.shadow.allocator import MIB, AllocatorSettings
from autofit.harness.shadow.family import TracesDifferError, fit, with_accumulation
from autofit.harness.shadow.trace import Trace, breakdown, by_module, replay, timeline

PHASES = ("load", "train", "evaluate", "train-again", "save")
CATEGORIES = ("parameters", "gradients", "activations", "batch")
KINDS = ("matmul_fp32", "matmul_half", "other")
MODULES = ("", "encoder.0", "encoder.1", "head")


def make_trace(events, sizes, phases=None, facts=None, ops=(), **changes) -> Trace:
    """A trace of these events; `ops` are (flops, bytes, kind, phase)."""
    blocks = len(sizes)
    costs = np.array(ops, dtype=np.float64).reshape(-1, 4)
    return Trace(
        **{
            "events": events,
            "sizes": sizes,
            "phases": [1] * len(events) if phases is None else phases,
            "phase_names": PHASES,
            "categories": [2] * blocks,
            "category_names": CATEGORIES,
            "modules": [0] * blocks,
            "module_names": MODULES,
            "micro_batches": [-1] * blocks,
            "op_flops": costs[:, 0],
            "op_bytes": costs[:, 1],
            "op_kinds": costs[:, 2],
            "op_kind_names": KINDS,
            "op_phases": costs[:, 3],
            "facts": {"batch": 2, "eval_batch": 2} if facts is None else facts,
            **changes,
        }
    )


def fields_of(trace: Trace) -> dict:
    """Everything in it, comparable."""
    values = {one.name: getattr(trace, one.name) for one in dataclasses.fields(trace)}
    return {
        name: (str(value.dtype), value.tolist()) if isinstance(value, np.ndarray) else value
        for name, value in values.items()
    }


def program(steps, batch: int, eval_batch: int | None = None) -> Trace:
    """Run a made-up program: ("new", base, slope, category, module) or ("free", n) or ("phase", n) or ("op", base, slope, kind)."""
    eval_batch = batch if eval_batch is None else eval_batch
    events, phases, sizes, categories, modules, ops, live, phase = [], [], [], [], [], [], [], 0
    for what, *rest in steps:
        rows = eval_batch if PHASES[phase] == "evaluate" else batch
        if what == "phase":
            phase = rest[0]
        elif what == "op":
            ops.append((rest[0] + rest[1] * rows, rest[1] * rows, rest[2], phase))
        elif what == "new":
            live.append(len(sizes))
            events.append(len(sizes))
            phases.append(phase)
            sizes.append(rest[0] + rest[1] * rows)
            categories.append(rest[2])
            modules.append(rest[3])
        elif live:
            events.append(~live.pop(rest[0] % len(live)))
            phases.append(phase)
    facts = {"batch": batch, "eval_batch": eval_batch, "accumulation": 1}
    return make_trace(events, sizes, phases, facts, ops, categories=categories, modules=modules)


STEP = st.one_of(
    st.tuples(
        st.just("new"),
        st.integers(0, 30 * MIB),
        st.one_of(st.just(0), st.integers(0, 4 * MIB)),
        st.integers(0, 3),
        st.integers(0, 3),
    ),
    st.tuples(st.just("free"), st.integers(0, 1000)),
    st.tuples(st.just("phase"), st.integers(0, 4)),
    st.tuples(st.just("op"), st.integers(0, 1 << 40), st.integers(0, 1 << 30), st.integers(0, 2)),
)
STEPS = st.one_of(st.lists(STEP, max_size=4), st.lists(STEP, min_size=20, max_size=80))


# ---- what a trace may be ----


@pytest.mark.parametrize(
    ("events", "sizes", "changes", "message"),
    [
        ([0, 1], [1], {}, "event of block 1 of 1"),
        ([0], [1, 1], {}, "not allocated once"),
        ([0, 0], [1], {}, "not allocated once"),
        ([0, ~0, ~0], [1], {}, "not allocated once"),
        ([~0, 0], [1], {}, "freed before"),
        ([0], [-1], {}, "-1 bytes"),
        ([0], [1], {"phases": [1, 1]}, "2 phases where there should be 1"),
        ([0], [1], {"categories": [4]}, "outside its names"),
        ([0], [1], {"modules": [-1]}, "outside its names"),
    ],
)
def test_what_is_no_run_is_refused(events, sizes, changes, message):
    with pytest.raises(ValueError, match=message):
        make_trace(events, sizes, **changes)


def test_a_trace_knows_when_each_block_is_made_and_freed_and_what_is_alive():
    trace = make_trace([1, 0, ~1, 2], [10, 20, 5])
    assert trace.allocated_at.tolist() == [1, 0, 3]
    assert trace.freed_at.tolist() == [4, 2, 4]
    assert trace.live_bytes.tolist() == [20, 30, 10, 15]


# ---- the file ----


@settings(max_examples=50, deadline=None)
@given(steps=STEPS, note=st.text(), value=st.one_of(st.none(), st.booleans(), st.floats(allow_nan=False), st.text()))
def test_a_trace_comes_back_from_its_file_as_it_was(tmp_path_factory, steps, note, value):
    path = tmp_path_factory.getbasetemp() / "0007.partial"  # no suffix is added
    trace = program(steps, 2)
    trace = dataclasses.replace(trace, facts={**trace.facts, note: value}, module_names=("", note, "é ∑", "x"))
    trace.save(path)
    assert fields_of(Trace.load(path)) == fields_of(trace)


def test_twenty_thousand_events_take_less_than_three_bytes_each(tmp_path):
    events = [event for block in range(10_000) for event in (block, ~block)]
    make_trace(events, [512] * 10_000).save(tmp_path / "trace.npz")
    assert (tmp_path / "trace.npz").stat().st_size < 60_000


@pytest.mark.parametrize("damage", ["empty", "cut", "text", "pickle", "version", "missing array", "header"])
def test_a_file_that_is_damaged_or_of_another_version_is_refused_with_the_way_out(tmp_path, damage):
    path = tmp_path / "trace.npz"
    trace = make_trace([0, ~0], [512])
    trace.save(path)
    with np.load(path) as file:
        arrays = dict(file)
    header = json.loads(arrays["header"].tobytes())
    if damage == "empty":
        path.write_bytes(b"")
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:300])
    elif damage == "text":
        path.write_text("{}")
    elif damage == "pickle":
        arrays["events"] = np.array([{}, {}], dtype=object)
    elif damage == "version":
        header["version"] = 99
    elif damage == "missing array":
        del arrays["sizes"]
    else:
        header["more"] = 1
    if damage in ("pickle", "version", "missing array", "header"):
        arrays["header"] = np.frombuffer(json.dumps(header).encode(), dtype=np.uint8)
        np.savez(path, **arrays)
    with pytest.raises(ValueError, match="no trace that can be read.*Delete it"):
        Trace.load(path)


def test_a_file_that_is_not_there_is_told_as_such(tmp_path):
    with pytest.raises(FileNotFoundError):
        Trace.load(tmp_path / "none.npz")


# ---- other batch sizes ----


@settings(max_examples=100, deadline=None)
@given(STEPS, st.integers(1, 500), st.integers(1, 500), st.sampled_from([(2, 3), (2, 4), (3, 7)]))
def test_two_traces_give_the_trace_of_any_batch(steps, batch, eval_batch, traced):
    family = fit(*(program(steps, rows) for rows in traced))
    assert fields_of(family.at(batch, eval_batch)) == fields_of(program(steps, batch, eval_batch))
    assert fields_of(family.at(batch)) == fields_of(program(steps, batch))


@settings(max_examples=30, deadline=None)
@given(STEPS, st.integers(1, 200), st.booleans())
def test_the_replay_of_a_rewritten_trace_is_that_of_the_direct_one(steps, batch, expandable):
    rules = AllocatorSettings(expandable_segments=expandable)
    family = fit(program(steps, 2), program(steps, 3))
    assert replay(family.at(batch), rules) == replay(program(steps, batch), rules)


def test_only_what_is_made_in_evaluation_grows_with_its_batch():
    steps = [("phase", 1), ("new", 5, 10, 2, 0), ("phase", 2), ("new", 5, 10, 2, 0), ("op", 1, 1, 0)]
    trace = fit(program(steps, 2), program(steps, 3)).at(4, 100)
    assert trace.sizes.tolist() == [45, 1005]
    assert trace.op_flops.tolist() == [101]
    assert (trace.facts["batch"], trace.facts["eval_batch"]) == (4, 100)


def test_facts_of_one_run_are_not_those_of_the_family():
    low = make_trace([0], [2], facts={"batch": 2, "eval_batch": 2, "accumulation": 1, "seconds": 1.5})
    high = make_trace([0], [3], facts={"batch": 3, "eval_batch": 3, "accumulation": 1, "seconds": 1.75})
    assert fit(low, high).at(8).facts == {"batch": 8, "eval_batch": 8, "accumulation": 1}


def test_names_in_another_order_are_the_same_names():
    low = make_trace([0, 1], [2, 4], categories=[0, 1], modules=[1, 2])
    high = make_trace(
        [0, 1],
        [3, 6],
        categories=[1, 0],
        category_names=("gradients", "parameters"),
        modules=[0, 1],
        module_names=("encoder.0", "encoder.1"),
        facts={"batch": 3, "eval_batch": 3},
    )
    assert fit(low, high).at(10).sizes.tolist() == [10, 20]


BASE = {"events": [0, 1, ~0, 2], "sizes": [10, 20, 30], "phases": [0, 1, 1, 2], "modules": [0, 1, 2]}
OPS = [(1.0, 1.0, 0, 1), (1.0, 1.0, 2, 1)]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"events": [0, 1, ~1, 2]}, r"event 2 \(phase train, no module\) of batch 2 is about another block at batch 3"),
        (
            {"phases": [0, 1, 1, 3]},
            r"event 3 \(phase evaluate, module encoder.1\) of batch 2 is in another phase at batch 3",
        ),
        (
            {"categories": [2, 1, 2]},
            r"event 1 \(phase train, module encoder.0\) of batch 2 is of another category at batch 3",
        ),
        ({"modules": [0, 3, 2]}, r"event 1 \(phase train, module encoder.0\) of batch 2 is made by another module"),
        ({"micro_batches": [0, -1, -1]}, r"event 0 \(phase load, no module\) of batch 2 is of another micro-batch"),
        (
            {"events": [0, 1, ~0, 2, ~2], "phases": [0, 1, 1, 2, 2]},
            r"event 4 \(phase evaluate, module encoder.1\) of batch 3 has no counterpart at batch 2",
        ),
        ({"ops": [OPS[0], (1, 1, 1, 1)]}, r"operation 1 is other \(phase train\) at batch 2 and matmul_half"),
        ({"ops": [(1, 1, 0, 2), OPS[1]]}, r"operation 0 is matmul_fp32 \(phase train\) at batch 2 and .*\(phase evalu"),
        ({"ops": OPS[:1]}, "there are 2 operations at batch 2 and 1 at 3"),
    ],
)
def test_traces_that_are_not_one_program_tell_the_first_difference(change, reason):
    low = make_trace(**BASE, ops=OPS)
    high = make_trace(**{**BASE, "ops": OPS, "facts": {"batch": 3, "eval_batch": 3}, **change})
    with pytest.raises(TracesDifferError, match=reason) as caught:
        fit(low, high)
    assert "\n" not in str(caught.value)


def test_a_size_that_is_not_affine_in_whole_bytes_is_told():
    low = make_trace([0], [10], modules=[1])
    high = make_trace([0], [11], modules=[1], facts={"batch": 4, "eval_batch": 4})
    with pytest.raises(
        TracesDifferError, match=r"event 0 \(phase train, module encoder.0\): 10 bytes at batch 2 and 11"
    ):
        fit(low, high)


@pytest.mark.parametrize("facts", [{"batch": 2, "eval_batch": 2}, {"batch": 4, "eval_batch": 3}, {}])
def test_a_fit_takes_two_traces_of_increasing_batch(facts):
    with pytest.raises(ValueError, match="a fit needs"):
        fit(make_trace([0], [2]), make_trace([0], [3], facts=facts))


def test_there_is_no_batch_below_one_row():
    family = fit(make_trace([0], [2]), make_trace([0], [3], facts={"batch": 3, "eval_batch": 3}))
    with pytest.raises(ValueError, match="at least one"):
        family.at(0)
    with pytest.raises(ValueError, match="at least one"):
        family.at(2, 0)


# ---- accumulation ----


def trace_of_accumulation(micro_batches: int, steps: int) -> Trace:
    """Each step fetches all its micro-batches (one tensor cast on the way, and a second), and frees them at its end."""
    events, sizes, places, phases = [], [], [], []

    def new(size, micro_batch=-1):
        sizes.append(size)
        places.append(micro_batch)
        events.append(len(sizes) - 1)
        return len(sizes) - 1

    for step in range(steps):
        fetched = []
        for micro_batch in range(micro_batches):
            host_type = new(800, micro_batch)
            rows = new(400, micro_batch)
            events.append(~host_type)
            fetched.append((rows, new(100, micro_batch)))
        for _ in fetched:
            activation = new(10_000)
            events.append(~activation)
        for rows, labels in fetched:
            events += [~rows, ~labels]
        phases += [(1, 3)[step]] * (len(events) - len(phases))
    facts = {"batch": 2, "eval_batch": 2, "accumulation": micro_batches}
    categories = [3 if place >= 0 else 2 for place in places]
    return make_trace(events, sizes, phases, facts, categories=categories, micro_batches=places)


@pytest.mark.parametrize("count", [2, 3, 8])
@pytest.mark.parametrize("steps", [1, 2])
def test_more_micro_batches_are_fetched_and_held_like_the_last(count, steps):
    traced, direct = trace_of_accumulation(2, steps), trace_of_accumulation(count, steps)
    widened = with_accumulation(traced, count)
    assert replay(widened, None).peaks == replay(direct, None).peaks
    assert widened.facts["accumulation"] == count
    assert widened.facts["traced_accumulation"] == 2
    assert sorted(widened.sizes[widened.micro_batches >= 0]) == sorted(direct.sizes[direct.micro_batches >= 0])
    assert sorted(widened.micro_batches.tolist()) != sorted(traced.micro_batches.tolist()) or count == 2
    assert widened.live_bytes[-1] == 0


def test_copies_come_right_after_the_fetch_that_they_repeat_and_go_with_it():
    facts = {"batch": 2, "eval_batch": 2, "accumulation": 2}
    trace = make_trace(
        [0, 1, 2, 3, ~0, ~2, ~1],
        [10, 20, 21, 99],
        phases=[1, 1, 1, 1, 1, 1, 2],
        categories=[3, 3, 3, 2],
        modules=[0, 1, 2, 3],
        micro_batches=[0, 1, 1, -1],
        facts=facts,
        ops=OPS,
    )
    widened = with_accumulation(trace, 4)
    assert widened.events.tolist() == [0, 1, 2, 4, 5, 6, 7, 3, ~0, ~2, ~5, ~7, ~1, ~4, ~6]
    assert widened.phases.tolist() == [1] * 12 + [2] * 3
    assert widened.sizes.tolist() == [10, 20, 21, 99, 20, 21, 20, 21]
    assert widened.categories.tolist() == [3, 3, 3, 2, 3, 3, 3, 3]
    assert widened.modules.tolist() == [0, 1, 2, 3, 1, 2, 1, 2]
    assert widened.micro_batches.tolist() == [0, 1, 1, -1, 2, 2, 3, 3]
    assert widened.op_flops.tolist() == trace.op_flops.tolist()


def test_batches_of_the_evaluation_are_not_copied():
    facts = {"batch": 2, "eval_batch": 2, "accumulation": 2}
    trace = make_trace([0, ~0], [10], phases=[2, 2], categories=[3], facts=facts)
    assert with_accumulation(trace, 8).events.tolist() == [0, ~0]


@pytest.mark.parametrize(("traced", "steps"), [(1, 4), (4, 8), (2, 1), (None, 4)])
def test_only_a_trace_of_two_micro_batches_is_widened(traced, steps):
    trace = make_trace([0], [10], facts={"batch": 2, "eval_batch": 2, "accumulation": traced})
    with pytest.raises(ValueError, match="accumulation"):
        with_accumulation(trace, steps)


# ---- replay ----


def test_without_an_allocator_every_byte_counts_as_asked():
    trace = make_trace([0, 1, ~0, 2, ~1, ~2], [100, 30, 50], phases=[0, 1, 1, 1, 2, 2])
    result = replay(trace, None)
    assert {name: peak.allocated_bytes for name, peak in result.peaks.items()} == {
        "load": 100,
        "train": 130,
        "evaluate": 80,  # what it found at its start
    }
    assert all(peak.reserved_bytes == peak.allocated_bytes for peak in result.peaks.values())
    assert (result.peak_event, result.peak_allocated_bytes, result.peak_reserved_bytes) == (1, 130, 130)


def test_with_one_blocks_count_whole_and_what_is_cached_stays_reserved():
    trace = make_trace([0, ~0, 1, 2], [30 * MIB, 29 * MIB, 1], phases=[1, 1, 2, 2])
    result = replay(trace, AllocatorSettings())
    assert list(result.peaks) == ["train", "evaluate"]
    assert result.peaks["train"].allocated_bytes == result.peaks["train"].reserved_bytes == 30 * MIB
    assert result.peaks["evaluate"].allocated_bytes == 30 * MIB + 512
    assert result.peaks["evaluate"].reserved_bytes == 32 * MIB
    assert result.peak_event == 3


def test_a_phase_that_comes_back_keeps_its_highest_peak_and_its_place():
    trace = make_trace([0, ~0, 1, 2, ~2], [40, 10, 5], phases=[1, 2, 2, 1, 1])
    for rules, unit in ((None, 1), (AllocatorSettings(), 512)):
        peaks = replay(trace, rules).peaks
        assert list(peaks) == ["train", "evaluate"]
        assert peaks["train"].allocated_bytes == max(40, 2 * unit)
        assert peaks["evaluate"].allocated_bytes == max(40, unit)


def test_base_bytes_are_in_every_peak_and_count_against_the_cap():
    trace = make_trace([0], [20 * MIB])
    assert replay(trace, None, base_bytes=7).peaks["train"].allocated_bytes == 20 * MIB + 7
    fits = replay(trace, AllocatorSettings(cap_bytes=25 * MIB), base_bytes=5 * MIB)
    assert (fits.out_of_memory, fits.peak_reserved_bytes) == (None, 25 * MIB)
    fails = replay(trace, AllocatorSettings(cap_bytes=25 * MIB), base_bytes=5 * MIB + 1).out_of_memory
    assert (fails.reserved_bytes, fails.allocated_bytes) == (5 * MIB + 1, 5 * MIB + 1)


def test_running_out_of_memory_is_told_and_what_came_before_stays():
    trace = make_trace([0, 4, 1, ~1, 2, 3], [20 * MIB, 30 * MIB, 25 * MIB + 1, 512, 0], phases=[0, 0, 1, 1, 2, 2])
    result = replay(trace, AllocatorSettings(cap_bytes=52 * MIB))
    assert result.out_of_memory is None  # the 30 MiB serve the 25 MiB and a byte, and 2 MiB the 512 bytes
    result = replay(trace, AllocatorSettings(cap_bytes=49 * MIB))
    failure = result.out_of_memory
    assert (failure.phase, failure.event, failure.requested_bytes) == ("train", 2, 30 * MIB)
    assert (failure.allocated_bytes, failure.reserved_bytes) == (20 * MIB, 20 * MIB)
    assert list(result.peaks) == ["load", "train"]
    assert (result.peak_event, result.peak_allocated_bytes, result.retries) == (0, 20 * MIB, 1)


def test_running_out_of_memory_at_once_leaves_no_peak():
    result = replay(make_trace([0, ~0], [30 * MIB]), AllocatorSettings(cap_bytes=MIB))
    assert (result.out_of_memory.event, result.peak_event, result.peak_reserved_bytes) == (0, None, 0)


def test_a_later_phase_does_not_inherit_the_peak_of_an_earlier_one():
    trace = make_trace([0, ~0, 1], [30 * MIB, 20 * MIB], phases=[1, 1, 3])
    peaks = replay(trace, AllocatorSettings()).peaks
    assert (peaks["train-again"].allocated_bytes, peaks["train-again"].reserved_bytes) == (20 * MIB, 30 * MIB)


def test_running_out_of_memory_tells_the_event_of_a_later_phase():
    trace = make_trace([0, ~0, 1, ~1, 2], [12 * MIB, 0, 40 * MIB], phases=[1, 1, 1, 1, 2])
    failure = replay(trace, AllocatorSettings(cap_bytes=30 * MIB)).out_of_memory
    assert (failure.phase, failure.event, failure.requested_bytes) == ("evaluate", 4, 40 * MIB)


def test_retries_are_counted():
    trace = make_trace([0, ~0, 1], [20 * MIB, 30 * MIB])
    result = replay(trace, AllocatorSettings(cap_bytes=40 * MIB))
    assert (result.out_of_memory, result.retries, result.peak_reserved_bytes) == (None, 1, 30 * MIB)


def test_a_trace_without_events_takes_nothing():
    for rules in (None, AllocatorSettings()):
        result = replay(make_trace([], []), rules)
        assert (result.peaks, result.peak_event, result.peak_reserved_bytes) == ({}, None, 0)


@settings(max_examples=60, deadline=None)
@given(STEPS, st.sampled_from([None, AllocatorSettings(), AllocatorSettings(expandable_segments=True)]))
def test_a_replay_is_the_same_each_time_and_no_lower_than_what_is_alive(steps, rules):
    trace = program(steps, 2)
    result = replay(trace, rules)
    assert result == replay(trace, rules)
    highest = int(trace.live_bytes.max(initial=0))
    assert highest <= result.peak_allocated_bytes <= result.peak_reserved_bytes
    if rules is None and result.peak_event is not None:
        assert trace.live_bytes[result.peak_event] == highest == result.peak_allocated_bytes


# ---- what is alive ----


def test_what_is_alive_is_summed_by_category_and_by_module():
    trace = make_trace([0, 1, 2, ~1, 3], [10, 500, 30, 7], categories=[0, 1, 0, 2], modules=[1, 2, 3, 1])
    assert breakdown(trace, 2) == {"gradients": 500, "parameters": 40}
    assert breakdown(trace, 3) == {"parameters": 40}
    assert list(breakdown(trace, 4).items()) == [("parameters", 40), ("activations", 7)]
    assert list(by_module(trace, 4).items()) == [("head", 30), ("encoder.0", 17)]
    assert by_module(trace, 2, top=1) == {"encoder.1": 500}
    with pytest.raises(ValueError, match="event 5 of a trace with 5"):
        breakdown(trace, 5)


@settings(max_examples=50, deadline=None)
@given(STEPS, st.integers(0, 100))
def test_every_breakdown_adds_up_to_what_is_alive(steps, event):
    trace = program(steps, 2)
    if event < len(trace.events):
        assert sum(breakdown(trace, event).values()) == trace.live_bytes[event]
        assert sum(by_module(trace, event).values()) == trace.live_bytes[event]


@settings(max_examples=60, deadline=None)
@given(STEPS, st.integers(2, 20))
def test_a_timeline_keeps_the_maximum_and_its_categories_add_up(steps, points):
    trace = program(steps, 2)
    line = timeline(trace, points)
    assert len(line.events) == len(line.phases) == len(line.total_bytes) <= points
    assert (np.diff(line.events) > 0).all()
    assert line.total_bytes.tolist() == trace.live_bytes[line.events].tolist()
    assert sum(line.category_bytes.values(), np.zeros(len(line.events))).tolist() == line.total_bytes.tolist()
    if len(trace.events):
        assert line.total_bytes.max() == trace.live_bytes.max()
        assert line.events[-1] == len(trace.events) - 1
    for i, event in enumerate(line.events.tolist()):
        assert line.phases[i] == PHASES[trace.phases[event]]
        alive = breakdown(trace, event)
        assert {name: values[i] for name, values in line.category_bytes.items() if values[i]} == alive


def test_a_short_spike_in_a_long_run_is_in_the_timeline():
    events = [event for block in range(5000) for event in (block, ~block)]
    sizes = [10] * 5000
    sizes[3333] = 1000
    line = timeline(make_trace(events, sizes), points=50)
    assert line.total_bytes.max() == 1000
    assert 6666 in line.events.tolist()
    assert (line.events[-1], line.total_bytes[-1]) == (9999, 0)
