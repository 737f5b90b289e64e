"""The table and the answer say what was measured: merged, sorted, folded, and never a gain over a crash."""

from dataclasses import replace

import pytest
from report_cases import BASELINE, BUDGET, FUSED, IN_CODE, LARGE, MB, SMALL, choice, probe, selection, usual

from autofit.records import Candidate, Failure, Outcome
from autofit.report.labels import about_text, change_text, count_text, gain_text, in_unit, knob_texts, plain, rate_text
from autofit.report.sentences import answer, busy_text, difference, next_command
from autofit.report.summary import is_projected, summarize
from autofit.selection import reasons

OOM = Failure("evaluate", 3, "OutOfMemoryError", "no more memory")


def rows_of(measurements, chosen):
    return summarize(measurements, chosen, BUDGET, "runs/x").rows


def row_of(candidate, measurements, chosen):
    return next(row for row in rows_of(measurements, chosen) if row.candidate == candidate)


def failing_baseline():
    """The user's settings train and then run out of memory in evaluation."""
    measurements = [
        probe(1, BASELINE, "baseline", Outcome.DEVICE_OOM, rates=(60.0, 60.2), train=300, failure=OOM),
        probe(2, LARGE, rates=(41.0, 41.4), train=400),
        probe(3, SMALL, "evaluate", rates=(12.1, 12.1), train=250, evaluate=260),
        probe(4, LARGE.but(per_device_eval_batch_size=2), "confirm", rates=(41.2, 41.2), train=400, evaluate=410),
    ]
    best = choice(LARGE.but(per_device_eval_batch_size=2), 41.2, None, 410)
    return measurements, selection(best, baseline_outcome=Outcome.DEVICE_OOM)


# The table


def test_probes_of_one_candidate_make_one_row_with_the_median_of_all_windows():
    measurements = [probe(1, LARGE, rates=(10.0, 12.0)), probe(2, LARGE, "race", rates=(14.0,))]
    (row,) = rows_of(measurements, selection(None))
    assert row.train_per_second == pytest.approx(12.0)
    assert row.train_spread == pytest.approx(2.0 / 12.0)
    assert row.probes == ("0001", "0002")


def test_one_window_has_no_spread():
    (row,) = rows_of([probe(1, LARGE, rates=(10.0,))], selection(None))
    assert row.train_spread is None


def test_a_disturbed_probe_counts_only_where_no_clean_one_is():
    disturbed = probe(1, LARGE, outcome=Outcome.CONTAMINATED, rates=(5.0,))
    assert rows_of([disturbed], selection(None))[0].train_per_second == pytest.approx(5.0)
    assert rows_of([disturbed], selection(None))[0].outcome is Outcome.CONTAMINATED
    both = rows_of([probe(2, LARGE, rates=(10.0,)), disturbed], selection(None))[0]
    assert (both.train_per_second, both.outcome) == (pytest.approx(10.0), Outcome.FITS)


def test_the_chosen_comes_first_then_by_speed_and_failures_last():
    measurements, chosen = usual()
    failed = LARGE.but(activation_checkpointing=True)
    over = probe(7, FUSED, outcome=Outcome.OVER_BUDGET, rates=(90.0, 90.0), train=600)
    assert [row.candidate for row in rows_of([*measurements, over], chosen)] == [LARGE, BASELINE, SMALL, FUSED, failed]
    slow = selection(choice(SMALL, 9.1, 0.46))
    assert rows_of(measurements, slow)[0].candidate == SMALL


def test_the_last_undisturbed_probe_decides_the_outcome():
    failed = probe(2, LARGE, "confirm", Outcome.DEVICE_OOM, failure=OOM)
    (row,) = rows_of([probe(1, LARGE, rates=(10.0,)), failed], selection(None))
    assert row.outcome is Outcome.DEVICE_OOM
    again = probe(3, LARGE, "confirm", rates=(10.0,))
    (row,) = rows_of([failed, again], selection(choice(LARGE, 10.0, None)))
    assert row.outcome is Outcome.FITS


def test_only_knobs_that_vary_are_columns_and_the_others_are_told_once():
    measurements, chosen = usual()
    summary = summarize(measurements, chosen, BUDGET, "runs/x")
    assert summary.varying == ("batch", "ckpt")
    assert summary.same["precision"] == "fp32" and summary.same["eval acc"] == "none"
    assert set(summary.same) & set(summary.varying) == set()
    assert summary.rows[0].knobs["batch"] == "32×1"


def test_a_knob_that_some_candidates_lack_varies():
    without = Candidate({k: v for k, v in LARGE.values.items() if k != "attention"})
    summary = summarize([probe(1, LARGE), probe(2, without)], selection(None), BUDGET, "runs/x")
    assert "attention" in summary.varying


def test_a_projected_evaluation_peak_is_marked_and_a_measured_one_is_not():
    measurements = [probe(1, LARGE, evaluate=310, projected=380), probe(2, SMALL, evaluate=310, projected=300)]
    large, small = (row_of(c, measurements, selection(None)) for c in (LARGE, SMALL))
    assert (large.eval_bytes, large.eval_projected) == (380 * MB, True)
    assert (small.eval_bytes, small.eval_projected) == (310 * MB, False)
    assert not is_projected(probe(3, LARGE, evaluate=310))
    assert not is_projected(probe(3, LARGE, evaluate=310, projected=310))
    notes = summarize(measurements, selection(None), BUDGET, "").notes
    assert any(note.startswith("~ projected") for note in notes)
    assert not any("projected" in n for n in summarize(measurements[1:], selection(None), BUDGET, "").notes)


def test_the_gain_of_the_chosen_is_the_confirmations_and_of_others_that_over_the_speed_shown_of_yours():
    measurements, chosen = usual()
    assert row_of(LARGE, measurements, chosen).gain == 2.102
    assert row_of(SMALL, measurements, chosen).gain == pytest.approx(9.1 / 19.6, rel=1e-3)
    assert row_of(BASELINE, measurements, chosen).gain == pytest.approx(1.0)


def test_the_chosen_has_no_gain_that_the_confirmation_did_not_measure():
    measurements, _ = usual()
    assert row_of(LARGE, measurements, selection(choice(LARGE, 41.2, None))).gain is None


def test_there_is_no_gain_over_a_baseline_that_does_not_fit():
    measurements, chosen = failing_baseline()
    assert [row.gain for row in rows_of(measurements, chosen)] == [None] * 4
    over = [
        probe(1, BASELINE, "baseline", Outcome.OVER_BUDGET, rates=(20.0,), train=600),
        probe(2, LARGE, rates=(40.0,)),
    ]
    assert [r.gain for r in rows_of(over, selection(None, baseline_outcome=Outcome.OVER_BUDGET))] == [None, None]


@pytest.mark.parametrize("first", [Outcome.FITS, Outcome.DEVICE_OOM])
def test_there_is_no_gain_where_only_one_of_the_baselines_probes_fits(first):
    last = Outcome.DEVICE_OOM if first is Outcome.FITS else Outcome.FITS
    measurements = [
        probe(1, BASELINE, "baseline", first, rates=(20.0,)),
        probe(2, LARGE, rates=(40.0,)),
        probe(3, BASELINE, "confirm-baseline", last, rates=(20.0,)),
    ]
    assert row_of(LARGE, measurements, selection(None, baseline_outcome=first)).gain is None


def test_what_does_not_fit_has_a_speed_where_it_ran_and_never_a_gain():
    measurements = [
        probe(1, BASELINE, "baseline", rates=(20.0,)),
        probe(2, LARGE, outcome=Outcome.OVER_BUDGET, rates=(80.0,), train=600),
    ]
    row = row_of(LARGE, measurements, selection(None))
    assert (row.train_per_second, row.gain, row.reason) == (pytest.approx(80.0), None, "over budget")


def test_failures_tell_phase_message_and_log():
    measurements, chosen = usual()
    (failure,) = summarize(measurements, chosen, BUDGET, "runs/x").failures
    assert (failure.outcome, failure.phase, failure.log) == (Outcome.DEVICE_OOM, "backward", "runs/x/probes/0004")
    assert failure.message == "no more memory: tried to allocate 101 MB"


def test_an_over_budget_failure_tells_peak_and_budget_in_the_users_unit():
    measured = probe(1, LARGE, outcome=Outcome.OVER_BUDGET, train=612)
    projected = probe(2, SMALL, outcome=Outcome.OVER_BUDGET, train=300, evaluate=310, projected=700)
    failures = summarize([measured, projected], selection(None), BUDGET, "").failures
    assert [f.message for f in failures] == ["peak 612 MB of 500 MB", "peak ~700 MB of 500 MB"]


def test_a_message_is_one_line_of_bounded_length_without_escape_sequences():
    failure = Failure("train", 1, "RuntimeError", "\x1b[31mred\nand" + "x" * 900)
    (row,) = summarize(
        [probe(1, LARGE, outcome=Outcome.CRASHED, failure=failure)], selection(None), BUDGET, ""
    ).failures
    assert row.message.isprintable() and row.message.startswith("[31mred and")
    assert len(row.message) == 200 and row.message.endswith("…")


def test_a_budget_that_was_only_judged_is_said_to_be():
    judged, capped, unknown = (probe(n, LARGE, cap=cap) for n, cap in enumerate(("judged", "enforced", "none")))
    notes = {name: summarize(ms, selection(None), BUDGET, "").notes for name, ms in {
        "all": [judged, unknown], "some": [judged, capped], "none": [capped, unknown],
    }.items()}  # fmt: skip
    assert "judged, not enforced: " in notes["all"][0]
    assert "judged, not enforced in 1 of 2 probes: " in notes["some"][0]
    assert notes["none"] == ()


def test_notes_are_told_only_where_they_apply():
    calm = [probe(1, BASELINE, "baseline", rates=(20.0,))]
    assert summarize(calm, selection(choice(BASELINE, 20.0, None)), BUDGET, "").notes == ()
    disturbed = [probe(1, BASELINE, "baseline", Outcome.CONTAMINATED, rates=(20.0,))]
    (note,) = summarize(disturbed, selection(choice(BASELINE, 20.0, None)), BUDGET, "").notes
    assert note.startswith("contaminated: ")
    measurements, chosen = usual()
    assert any("gain of the chosen" in note for note in summarize(measurements, chosen, BUDGET, "").notes)


def test_what_the_chosen_probes_noted_is_told_once_and_what_others_noted_is_not():
    noted = lambda m, *notes: replace(m, notes=notes)  # noqa: E731
    measurements = [
        noted(probe(1, LARGE, rates=(40.0,)), "rows: sampled", "held 2097152 bytes"),
        noted(probe(2, LARGE, "confirm", rates=(40.0,)), "rows: sampled"),
        noted(probe(3, LARGE, "race", Outcome.CONTAMINATED, rates=(40.0,)), "rows: sampled", "threads waited 30%"),
        noted(probe(4, SMALL, rates=(9.0,)), "of another"),
    ]
    assert summarize(measurements, selection(choice(LARGE, 40.0, None)), BUDGET, "").notes == (
        "rows: sampled",
        "held 2.10 MB",
    )


# What a row shows


def confirmed_case():
    """A search on a quiet machine, and a confirmation on one that is half as fast."""
    baseline = probe(1, BASELINE, "baseline", rates=(30.0, 30.0), eval_rates=(200.0,), train=350, evaluate=360)
    return [
        baseline,
        probe(2, LARGE, rates=(60.0, 60.0), train=400),
        probe(3, FUSED, rates=(60.1, 60.1), train=450),
        probe(4, SMALL, rates=(15.0, 15.0), train=250),
        probe(5, BASELINE, "confirm-baseline", Outcome.CONTAMINATED, rates=(10.0,), train=300, evaluate=310),
        probe(6, LARGE, "confirm", rates=(40.0, 40.4), eval_rates=(310.0,), train=402, evaluate=410),
        probe(7, BASELINE, "confirm-baseline", rates=(20.0, 20.2), eval_rates=(100.0,), train=300, evaluate=310),
        probe(8, LARGE, "confirm", Outcome.CONTAMINATED, rates=(5.0,), eval_rates=(9.0,), train=440, evaluate=440),
    ], selection(choice(LARGE, 33.0, 2.0, 440), reasons={FUSED.key: "51% slower", SMALL.key: "50% slower"})


def test_the_chosen_and_yours_show_the_undisturbed_probes_of_the_confirmation_alone():
    measurements, chosen = confirmed_case()
    best, yours = row_of(LARGE, measurements, chosen), row_of(BASELINE, measurements, chosen)
    assert (best.train_per_second, best.eval_per_second) == (pytest.approx(40.2), pytest.approx(310.0))
    assert (best.train_bytes, best.eval_bytes, best.probes) == (402 * MB, 410 * MB, ("0006", "0008"))
    assert (yours.train_per_second, yours.eval_per_second) == (pytest.approx(20.1), pytest.approx(100.0))
    assert (yours.train_bytes, yours.probes) == (300 * MB, ("0005", "0007"))
    assert best.outcome is yours.outcome is Outcome.FITS
    winner = selection(choice(BASELINE, 30.0, None))
    own = [*measurements, probe(9, BASELINE, "confirm", rates=(25.0,), train=320)]
    assert row_of(BASELINE, own, winner).train_per_second == pytest.approx(25.0)
    assert row_of(LARGE, measurements, winner).train_per_second == pytest.approx(60.0)


def test_the_headline_has_the_figures_of_the_table():
    measurements, chosen = confirmed_case()
    (sentence,) = answer(chosen, measurements, BUDGET)
    assert "(40.2 ±0.5% against 20.1 ±0.5%), peak 410 MB of 500 MB, evaluation 310 rows/s" in sentence


def test_only_disturbed_turns_are_shown_and_marked():
    measurements = [
        probe(1, LARGE, rates=(60.0,), train=400),
        probe(2, LARGE, "confirm", Outcome.CONTAMINATED, rates=(40.0,), train=402),
    ]
    chosen = selection(choice(LARGE, 40.0, None))
    row = row_of(LARGE, measurements, chosen)
    assert (row.train_per_second, row.outcome) == (pytest.approx(40.0), Outcome.CONTAMINATED)
    assert "40.0 samples/s (contaminated)" in answer(chosen, measurements, BUDGET)[0]


def test_gains_and_slower_agree_with_the_speeds_shown():
    measurements, chosen = confirmed_case()
    small, fused = row_of(SMALL, measurements, chosen), row_of(FUSED, measurements, chosen)
    assert (small.gain, small.reason) == (pytest.approx(15.0 / 20.1), "63% slower")
    assert fused.gain == pytest.approx(60.1 / 20.1) and "slower" not in fused.reason
    for rates, train, reason in (
        ((40.3,), 390, "as fast within the noise"),
        ((40.3,), 450, "as fast, larger peak"),
        ((30.15,), 450, "25% slower"),
    ):
        other = [m for m in measurements if m.candidate != FUSED] + [probe(9, FUSED, rates=rates, train=train)]
        assert row_of(FUSED, other, chosen).reason == reason


def test_a_faster_row_tells_why_it_lost():
    measurements, chosen = confirmed_case()
    failed = probe(9, FUSED, "confirm", Outcome.DEVICE_OOM, failure=OOM)
    row = row_of(FUSED, [*measurements, failed], selection(chosen.best))
    assert row.reason.startswith("failed its confirmation: out of device memory") and not row.fits
    evaluated = probe(9, FUSED.but(per_device_eval_batch_size=1), "evaluate", Outcome.DEVICE_OOM, failure=OOM)
    fast = [m for m in measurements if m.candidate != FUSED] + [probe(3, FUSED, rates=(70.0,)), evaluated]
    assert row_of(FUSED, fast, chosen).reason == "evaluation does not fit"
    (sentence,) = answer(chosen, fast, BUDGET)
    assert "within" not in sentence
    assert sentence.endswith("(70.0 samples/s), which lost: evaluation does not fit.")


@pytest.mark.parametrize(
    ("rates", "reason"),
    [
        ((30.15,), "25% slower"),
        ((40.3, 40.5), "needs code, for no gain beyond the noise"),
        ((58.0,), "no faster in the search"),
        ((70.0,), "needs code, not confirmed"),
    ],
)
def test_what_needs_code_lost_by_its_speed_or_for_no_gain(rates, reason):
    measurements, chosen = confirmed_case()
    coded = LARGE.but(attention="eager")
    assert row_of(coded, [*measurements, probe(9, coded, rates=rates, train=400)], chosen).reason == reason


def test_the_selection_says_of_what_needs_code_that_it_gains_nothing_only_where_it_is_so():
    def reason(*probes, also=None):
        keys = {m.candidate.key for m in probes if m.candidate["attention"] == "eager"}
        return reasons(probes, choice(LARGE, 40.0, 2.0, eval_rate=100.0), also, keys)[coded.key]

    coded, winner = LARGE.but(attention="eager"), FUSED.but(attention="eager")
    assert reason(probe(1, coded, rates=(30.0,))) == "25% slower"
    assert reason(probe(1, coded, rates=(40.2,))) == "needs code, for no gain beyond the noise"
    assert reason(probe(1, coded, rates=(60.0,))) == "needs code, not confirmed"
    assert reason(probe(1, coded, "confirm", rates=(60.0,))) == "needs code, no faster in its confirmation"
    assert reason(probe(1, coded, "evaluate", eval_rates=(90.0,))) == "fits, evaluation no faster"
    assert reason(probe(1, coded, "evaluate", eval_rates=(101.0,))) == "needs code, for no gain beyond the noise"
    beaten = probe(1, coded, rates=(60.0,)), probe(2, winner, "confirm", rates=(80.0,))
    assert reason(*beaten, also=choice(winner, 80.0, 4.0)) == "25% slower than with code"


def test_what_needs_code_is_held_against_what_was_chosen_with_code():
    measurements, chosen = confirmed_case()
    winner, other = LARGE.but(attention="eager"), FUSED.but(attention="eager")
    measurements += [probe(9, winner, "confirm", rates=(80.0,)), probe(10, other, rates=(60.0,))]
    both = selection(chosen.best, choice(winner, 80.0, 4.0))
    assert row_of(other, measurements, both).reason == "25% slower than with code"
    assert row_of(SMALL, measurements, both).reason == "63% slower"
    assert row_of(other, measurements, selection(None, choice(winner, 80.0, 4.0))).reason == "25% slower"


def test_the_sentence_has_the_gain_of_the_table_and_says_so_where_the_speeds_shown_are_of_more_turns():
    measurements, chosen = confirmed_case()
    (sentence,) = answer(chosen, measurements, BUDGET)
    assert "2.0× the samples/s of your settings (40.2" in sentence
    (sentence,) = answer(selection(choice(LARGE, 40.0, 1.7)), measurements, BUDGET)
    assert "1.70× the samples/s of your settings in undisturbed turns (40.2" in sentence
    failed = [*measurements, probe(9, BASELINE, "confirm-baseline", Outcome.DEVICE_OOM, failure=OOM)]
    assert row_of(LARGE, failed, chosen).gain is None
    assert "× the samples" not in answer(chosen, failed, BUDGET)[0]


def test_a_disturbed_evaluation_leaves_a_clean_speed_fitting_and_not_the_other_way_round():
    evaluated = probe(2, LARGE, "evaluate", Outcome.CONTAMINATED, eval_rates=(5.0,), evaluate=300)
    (row,) = rows_of([probe(1, LARGE, rates=(10.0,)), evaluated], selection(None))
    assert (row.outcome, row.eval_per_second) == (Outcome.FITS, pytest.approx(5.0))
    evaluated = probe(2, LARGE, "evaluate", eval_rates=(5.0,), evaluate=300)
    (row,) = rows_of([probe(1, LARGE, outcome=Outcome.CONTAMINATED, rates=(10.0,)), evaluated], selection(None))
    assert row.outcome is Outcome.CONTAMINATED


def test_a_probe_that_did_not_run_shows_no_peak():
    (row,) = rows_of([probe(1, LARGE, outcome=Outcome.DEVICE_OOM, train=200, evaluate=200)], selection(None))
    assert (row.train_bytes, row.eval_bytes) == (None, None)


def test_a_busy_machine_is_told_where_more_than_a_third_was_disturbed():
    calm = [probe(n, LARGE, rates=(10.0,)) for n in range(2)]
    disturbed = [probe(n, LARGE, outcome=Outcome.CONTAMINATED) for n in (3, 4)]
    assert busy_text([*calm, disturbed[0]]) is None
    told = "the machine was busy: 2 of 4 probes were disturbed; search again when it is quiet, with --out and another folder"
    assert busy_text([*calm, *disturbed]) == told


# The answer


def test_the_answer_tells_the_confirmed_gain_both_speeds_the_peak_and_why():
    measurements, chosen = usual()
    (sentence,) = answer(chosen, measurements, BUDGET)
    assert sentence.startswith("2.1× the samples/s of your settings (41.2 ±0.2% against 19.6 ±0.5%)")
    assert "peak ~412 MB of 500 MB" in sentence
    assert sentence.endswith("the fastest of 3 that fit.")


def test_the_answer_never_tells_a_gain_over_a_crash_and_names_the_nearest_that_fits():
    measurements, chosen = failing_baseline()
    first, second = answer(chosen, measurements, BUDGET)
    assert first.startswith(
        "Your settings run out of device memory in evaluation; nearest that fits: batch 2×16, 12.1 samples/s"
    )
    assert second.startswith("Batch 32×1, eval batch 2, 41.2")
    assert "× the" not in first + second and "against" not in first + second


def test_no_gain_is_told_over_a_crash_even_where_one_was_recorded():
    measurements, chosen = failing_baseline()
    lying = selection(choice(LARGE, 41.2, 9.9), baseline_outcome=Outcome.DEVICE_OOM)
    assert "9.9×" not in " ".join(answer(lying, measurements, BUDGET))
    assert [row.gain for row in rows_of(measurements, lying)] == [None] * 4


def test_what_was_probed_in_training_only_is_not_the_nearest_that_fits():
    measurements, chosen = failing_baseline()
    first, _ = answer(chosen, [m for m in measurements if m.candidate != SMALL], BUDGET)
    assert "nearest that fits: batch 32×1, eval batch 2" in first


def test_of_the_nearest_that_fit_the_fastest_is_named():
    measurements, chosen = failing_baseline()
    faster = probe(5, BASELINE.but(precision="bf16", optim="sgd"), rates=(12.3,), train=250, evaluate=250)
    assert (
        "nearest that fits: precision bf16, optim sgd, 12.3 samples/s"
        in answer(chosen, [*measurements, faster], BUDGET)[0]
    )


def test_a_baseline_over_budget_is_told_with_its_peak():
    measurements = [
        probe(1, BASELINE, "baseline", Outcome.OVER_BUDGET, rates=(20.0,), train=300, evaluate=310, projected=900)
    ]
    chosen = selection(choice(LARGE, 41.2, None), baseline_outcome=Outcome.OVER_BUDGET)
    assert answer(chosen, measurements, BUDGET)[0] == "Your settings exceed the budget (peak ~900 MB of 500 MB)."


def test_a_confirmation_within_the_noise_is_told_as_a_tie():
    measurements = [
        probe(1, BASELINE, "confirm-baseline", rates=(19.0, 21.0), train=300),
        probe(2, LARGE, "confirm", rates=(19.5, 21.5), train=200),
    ]
    (sentence,) = answer(selection(choice(LARGE, 20.5, 1.025)), measurements, BUDGET)
    assert sentence.startswith("As fast as your settings within the noise (20.5 ±4.9% against 20.0 ±5.0% samples/s)")
    assert "1.02×" not in sentence


def test_settings_that_are_the_best_already_are_told_without_a_gain():
    measurements = [probe(1, BASELINE, "baseline", rates=(20.0, 20.2)), probe(2, LARGE, rates=(10.0, 10.1))]
    (sentence,) = answer(selection(choice(BASELINE, 20.1, None)), measurements, BUDGET)
    assert sentence == "Your settings, 20.1 ±0.5% samples/s, peak 412 MB of 500 MB: the fastest of 2 that fit."


def test_a_winner_within_the_noise_of_the_fastest_says_what_for():
    measurements = [
        probe(1, LARGE, "confirm", rates=(40.0, 40.0), train=300),
        probe(2, FUSED, rates=(40.2, 40.2), train=400),
    ]
    (sentence,) = answer(selection(choice(LARGE, 40.0, 2.0)), measurements, BUDGET)
    assert sentence.endswith(": as fast as the fastest within the noise, with a smaller peak.")


def test_what_only_evaluation_sees_is_no_other_training_setting():
    other_eval = probe(2, LARGE.but(per_device_eval_batch_size=64), rates=(43.0, 43.0), train=300)
    measurements = [probe(1, LARGE, "confirm", rates=(40.0, 40.0), train=300), other_eval]
    (sentence,) = answer(selection(choice(LARGE, 40.0, 2.0)), measurements, BUDGET)
    assert sentence.endswith("the only training settings that were measured and fit.")


def test_what_needs_code_is_told_apart_with_its_own_gain():
    measurements, _ = usual()
    eager = LARGE.but(attention="eager")
    chosen = selection(choice(LARGE, 41.2, 2.1), choice(eager, 50.0, 2.6))
    _, coded = answer(chosen, measurements, BUDGET)
    assert coded.startswith("With code (attention eager): 2.6× the samples/s of your settings")
    only = answer(selection(None, choice(IN_CODE, 50.0, 2.6)), measurements, BUDGET)
    assert len(only) == 1 and only[0].startswith("What fits needs code: 2.6×")


@pytest.mark.parametrize("more", [{}, {"attention": "eager"}])
def test_code_that_pays_in_evaluation_alone_is_told_with_that_gain_and_no_second_one_of_training(more):
    best = choice(LARGE, 41.2, 2.1, eval_rate=310.0)
    coded = choice(IN_CODE.but(more), 41.5, 2.12, eval_rate=558.0)
    _, sentence = answer(selection(best, coded), usual()[0], BUDGET)
    assert "evaluation 1.80× the rows/s of best (558 rows/s against 310)" in sentence
    assert "samples/s" not in sentence and "2.1" not in sentence


def test_after_a_disturbed_confirmation_no_gain_is_claimed_and_its_note_is_told():
    measurements, _ = usual()
    best, coded = choice(LARGE, 41.2, None, eval_rate=310.0), choice(IN_CODE, 41.5, None, eval_rate=558.0)
    chosen = selection(best, coded, notes=("disturbed, so no gain is told",))
    assert "×" not in "".join(answer(chosen, measurements, BUDGET)).replace("32×1", "")
    summary = summarize(measurements, chosen, BUDGET, "")
    assert summary.notes[-1] == "disturbed, so no gain is told" and summary.rows[0].gain is None


def test_without_a_confirmed_candidate_nothing_is_claimed():
    assert answer(selection(None), usual()[0], BUDGET) == ["No candidate that fits was confirmed."]


# The difference, and what to do next


def test_the_difference_names_fields_and_both_values():
    assert difference(BASELINE, LARGE) == [
        "per_device_train_batch_size  8 → 32",
        "gradient_accumulation_steps  4 → 1",
    ]
    assert difference(BASELINE, BASELINE) == []


def test_the_difference_has_at_most_four_lines_and_loses_nothing():
    far = LARGE.but(
        activation_checkpointing=True, precision="bf16", attention="eager", optim="adamw_torch_fused", logits="argmax"
    )
    lines = difference(BASELINE, far)
    assert len(lines) == 4
    assert lines[3].startswith("and 4 more: precision fp32 → bf16, attention sdpa → eager  (in code), optim")
    assert "logits full → argmax" in lines[3]
    exactly = difference(BASELINE, LARGE.but(precision="bf16", activation_checkpointing=True))
    assert len(exactly) == 4 and not any("more" in line for line in exactly)


def test_the_difference_uses_the_name_that_the_installed_release_has():
    changed = BASELINE.but(activation_checkpointing=True)
    assert difference(BASELINE, changed, ["gradient_checkpointing"]) == ["gradient_checkpointing  False → True"]
    assert difference(BASELINE, changed, ["activation_checkpointing"]) == ["activation_checkpointing  False → True"]


def test_the_next_command_shows_both_ways_to_read_the_file_as_python():
    path, first, either, second, _ = next_command("runs/it's/best", None)
    assert either.strip() == "or"
    assert path == "runs/it's/best/training_args.json"
    for line in (first, second):
        compile(line.strip(), "next", "exec")
        assert '"runs/it\'s/best/training_args.json"' in line


def test_what_needs_code_points_to_its_snippet():
    lines = next_command("runs/best", "runs/best-with-code")
    assert len(lines) == 6 and "snippet.py" in lines[4] and "best-with-code" in lines[4]
    alone = next_command(None, "runs/best-with-code")
    assert "snippet.py" in alone[0] and sum("json.load" in line for line in alone) == 1
    assert next_command(None, None) == []


# Words and numbers


@pytest.mark.parametrize(
    ("rate", "text"),
    [(1234.5, "1234"), (412.0, "412"), (99.96, "100"), (41.23, "41.2"), (1.0, "1.00"), (0.0412, "0.041"), (None, "–")],
)
def test_rates_have_about_three_digits_and_no_exponent(rate, text):
    assert rate_text(rate) == text


@pytest.mark.parametrize(
    ("gain", "text"), [(1.0, "1.00×"), (1.04, "1.04×"), (2.102, "2.1×"), (12.3, "12×"), (None, "–")]
)
def test_gains(gain, text):
    assert gain_text(gain) == text


@pytest.mark.parametrize(
    ("count", "text"), [(7, "7"), (22_713_216, "22.7 M"), (109_483_778, "109 M"), (8_030_261_248, "8.03 B")]
)
def test_counts(count, text):
    assert count_text(count) == text


def test_changes_are_told_against_the_users_settings_and_in_full_without_them():
    assert change_text(BASELINE, LARGE.but(activation_checkpointing=True)) == "batch 32×1, ckpt on"
    assert change_text(BASELINE, BASELINE) == "your settings"
    assert "precision fp32" in change_text(None, LARGE)
    assert knob_texts(Candidate({"new": True, "batch": 1})) == {"new": "on", "batch": "1"}


@pytest.mark.parametrize("text", ["a\x1b[2Kb", "a\nb", "a\tb", "a\u202eb", "a\udcffb", "a\x00b"])
def test_plain_text_is_one_printable_line_that_can_be_encoded(text):
    assert plain(text).isprintable() and plain(text).encode() and plain(text)[0] + plain(text)[-1] == "ab"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("peak of 612000000 bytes above", "peak of 612 MB above"),
        ("allocate 96.00 MiB. GPU 0", "allocate 101 MB. GPU 0"),
        ("1.50 GiB is free", "1.61 GB is free"),
        ("24GB, 10⁹ bytes, 3 bytesize", "24GB, 10⁹ bytes, 3 bytesize"),
        ("101 MB", "101 MB"),
    ],
)
def test_sizes_in_a_text_become_those_of_the_users_unit(text, told):
    assert in_unit(text, "MB") == told


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (1, "about 5 s"),
        (41, "about 40 s"),
        (56, "about 1 min"),
        (250, "about 4 min"),
        (4800, "about 1 h 20 min"),
        (7200, "about 2 h"),
    ],
)
def test_an_estimated_time_is_told_no_finer_than_it_is_known(seconds, text):
    assert about_text(seconds) == text
