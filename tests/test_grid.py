"""A table keeps every cell whole at every width: what has no room is folded below its row."""

from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from autofit.report.grid import Column, fold_parts, lay_out

COLUMNS = [Column("name"), Column("speed", right=True), Column("peak", right=True, fold=1), Column("why", fold=2)]
ROWS = [["one", "41.2", "412 MB", "as fast, larger peak"], ["two", "9", "1.20 GB", ""]]
WORDS = st.text(st.characters(categories=("L", "N"), max_codepoint=0x2FFF), min_size=1, max_size=12)


def texts(columns, rows, width):
    return [line.text for line in lay_out(columns, rows, width)]


def test_columns_line_up_where_there_is_room():
    assert texts(COLUMNS, ROWS, 60) == [
        "name  speed     peak  why",
        "one    41.2   412 MB  as fast, larger peak",
        "two       9  1.20 GB",
    ]


def test_the_column_that_may_fold_first_folds_first_and_keeps_its_name():
    assert texts(COLUMNS, ROWS, 30) == [
        "name  speed     peak",
        "one    41.2   412 MB",
        "    why as fast, larger peak",
        "two       9  1.20 GB",
    ]
    assert texts(COLUMNS, ROWS, 15)[1:3] == ["one    41.2", "    peak 412 MB"]


def test_a_column_without_content_is_no_column():
    assert texts([Column("a"), Column("b")], [["1", ""], ["2", ""]], 40) == ["a", "1", "2"]


def test_wide_characters_are_counted_as_wide():
    lines = texts([Column("name"), Column("n")], [["機械", "1"], ["a", "2"]], 40)
    assert [cell_len(line[: line.index(n)]) for line, n in zip(lines[1:], "12", strict=True)] == [6, 6]


def test_lines_tell_which_row_they_belong_to():
    assert [line.row for line in lay_out(COLUMNS, ROWS, 30)] == [None, 0, 0, 1]


@settings(deadline=None)
@given(st.lists(st.lists(WORDS, min_size=4, max_size=4), min_size=1, max_size=4), st.integers(10, 100))
def test_no_cell_is_cut_at_any_width(rows, width):
    joined = " ".join(texts(COLUMNS, rows, width))
    assert all(cell in joined for row in rows for cell in row)


@settings(deadline=None)
@given(st.lists(st.lists(WORDS, min_size=1, max_size=5).map(" ".join), min_size=1, max_size=6), st.integers(20, 80))
def test_folded_parts_keep_all_words_and_the_width(parts, width):
    lines = fold_parts(parts, width, indent="  ", first="first: ")
    assert " ".join(lines).replace("·", " ").split() == ["first:", *" ".join(parts).split()]
    longest = max(cell_len(word) for part in parts for word in part.split())
    assert all(cell_len(line) <= max(width, len("first: ") + longest) for line in lines)


def test_a_number_is_never_parted_from_its_unit():
    text = "the peak is 412 MB of 500 MB and took 12 s at 41.2 samples/s"
    for width in range(12, 60):
        lines = fold_parts([text], width)
        assert all(any(amount in line for line in lines) for amount in ("412 MB", "500 MB", "12 s", "41.2 samples/s"))
