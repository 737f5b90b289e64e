"""Reductions of logits before Trainer accumulates them, for `preprocess_logits_for_metrics`.

    from autofit.logits import argmax
    trainer = Trainer(…, preprocess_logits_for_metrics=argmax)

Trainer keeps the outputs of every row of an evaluation until its end, twice while it concatenates them: for a language
model 4 bytes for each token of each row and each word of the vocabulary. A reduction keeps what metrics need.

Each looks at what the model gives besides the loss (a tensor, a tuple, list or dict of tensors, tuples inside of these)
and takes the part whose shape says that it is the scores of these labels. Where two parts could be, labels that no class
of one of them has rule that one out, and batches seen before in which it was clear; where nothing decides it raises
CannotReduceError, since a guess would change metrics silently. Tuples that hold several tensors inside of the outputs
are one tensor for each layer (hidden states, attentions, caches), and are the scores only where nothing else could be.

Whole numbers are as small as holds the square of the number of classes (16 bits up to 181 classes, 32 up to 46340), so
that `classes * prediction + label`, the index into a confusion matrix, does not overflow; -100, with which Trainer pads
rows to the longest, fits too.

Shapes: B rows, C classes or words of the vocabulary, T tokens, K the chosen classes, H and W pixels. `_BtC` stands for
(B, C) and (B, T, C): labels of whole rows and of tokens alike.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

IGNORED = (-100, 255)  # labels that no class has: torch's, and the one of segmentation maps

# Layout of the outputs -> (where the scores were, how many classes they had) in a batch in which labels decided it.
_DECIDED: dict[tuple[Any, ...], tuple[tuple[Any, ...], int]] = {}


class CannotReduceError(TypeError):
    """The model's output has a structure that this reduction does not know."""

    def __init__(self, why: str) -> None:
        super().__init__(f"cannot_reduce: {why}")


def argmax(logits: Any, labels: Any) -> Any:
    """The most likely class instead of all scores.

    Of scores_BtC and labels_Bt it gives classes_Bt, where `np.argmax(scores, axis=-1)` would find them: 2, 4 or 8 bytes
    (see above) for each label in place of 4·C. Metrics take them as they are, without an argmax. Raises
    CannotReduceError.
    """
    scores_BtC = _take(logits, labels, _scores_classes)
    return _small(scores_BtC.argmax(dim=-1), scores_BtC.shape[-1])


def top_k(logits: Any, labels: Any, k: int = 5) -> Any:
    """The `k` most likely classes, the most likely first, instead of all scores.

    Of scores_BtC and labels_Bt it gives classes_BtK, K = min(k, C): k times the bytes of `argmax`. `classes[..., 0]` is
    what argmax gives, `(classes == labels[..., None]).any(-1)` what counts for top-k accuracy. Among equal scores any may
    come first. Another `k`: `functools.partial(top_k, k=10)`. Raises CannotReduceError.
    """
    scores_BtC = _take(logits, labels, _scores_classes)
    classes = scores_BtC.shape[-1]
    return _small(scores_BtC.topk(min(k, classes), dim=-1).indices, classes)


def token_loss(logits: Any, labels: Any) -> Any:
    """The cross-entropy of every label, of models that predict label t at position t instead of all scores.

    Those are classifiers, taggers, masked language models and encoder-decoders; for causal language models it is
    `next_token_loss`, and nothing in the shapes tells the two apart. Of scores_BtC and labels_Bt it gives losses_Bt in
    32 bits, 4 bytes for each label in place of 4·C, 0 where the label is -100. Perplexity is
    `np.exp(losses[labels != -100].mean())`. Takes memory for the scores of one row in 32 bits, twice. Raises
    CannotReduceError.
    """
    return _losses(_take(logits, labels, _scores_classes), labels)


def next_token_loss(logits: Any, labels: Any) -> Any:
    """The cross-entropy of every label, of models that predict label t at position t - 1 instead of all scores.

    Those are causal language models, whose labels are their inputs; for all others it is `token_loss`. Of scores_BTC and
    labels_BT it gives losses_BT in 32 bits, where column t is the loss of label t: 4 bytes for each label in place of
    4·C, 0 where the label is -100 and in column 0, which nothing predicts. Perplexity is
    `np.exp(losses[:, 1:][labels[:, 1:] != -100].mean())`. Takes memory for the scores of one row in 32 bits, twice.
    Raises CannotReduceError.
    """
    scores_BTC = _take(logits, labels, _scores_classes)
    if labels is None:
        raise CannotReduceError("without labels there is no loss")
    if labels.dim() != 2:
        raise CannotReduceError(f"labels of shape {tuple(labels.shape)} are no tokens of which one follows another")
    losses_BT = _losses(scores_BTC[:, :-1], labels[:, 1:])
    return _zero_column(losses_BT, labels)


def dense_argmax(logits: Any, labels: Any) -> Any:
    """The most likely class of every pixel instead of all scores, for segmentation.

    Of scores_BChw and labels_BHW it gives classes_BHW: scores are brought to the size of the labels (bilinear, corners not
    aligned, in 32 bits, as the examples of transformers do) row by row, then the class is chosen. 2 bytes for each pixel
    of the labels (up to 181 classes), in place of 4·C for each pixel of the scores, which are often a quarter as high and
    wide. Takes memory for the scores of one row at full size. Raises CannotReduceError.
    """
    import torch

    scores_BChw = _take(logits, labels, _scores_pixels)
    if labels is None:
        raise CannotReduceError("without labels there is no size to bring the scores to")
    rows = []
    for scores_Chw in scores_BChw:
        scores_1CHW = torch.nn.functional.interpolate(
            scores_Chw[None].float(), size=tuple(labels.shape[-2:]), mode="bilinear", align_corners=False
        )
        rows.append(_small(scores_1CHW.argmax(dim=1), scores_BChw.shape[1]))
    return torch.cat(rows)


def first(logits: Any, labels: Any) -> Any:
    """The scores alone, as they are, of outputs that also hold hidden states, attentions, caches or an encoder's output.

    Named after the place that they have in the outputs of transformers' own models; they are found by their shape all the
    same, also where labels are numbers (regression, several labels per row). Of a bare tensor nothing is dropped. Raises
    CannotReduceError.
    """
    numbers = _is_tensor(labels) and labels.is_floating_point()
    refused = None
    for fits in (_scores_numbers,) if numbers else (_scores_classes, _scores_pixels):
        try:
            return _take(logits, labels, fits)
        except CannotReduceError as error:
            refused = refused or error
    raise refused


REDUCTIONS = {f.__name__: f for f in (argmax, top_k, token_loss, next_token_loss, dense_argmax, first)}


# ---- which part is the scores ----


def find_scores(logits: Any, labels: Any, fits: Callable[[Any, Any], bool]) -> tuple[tuple[Any, ...], Any]:
    """(indices and keys that lead to the scores, the scores) in the outputs. Raises CannotReduceError."""
    parts = list(_floating(logits))
    layout = (fits.__name__, type(logits).__name__, *((path, part.dim()) for path, part, layers in parts if not layers))
    if labels is None:
        known = [(path, part) for path, part, _ in parts if _DECIDED.get(layout) == (path, _classes(part, fits))]
        if not known:
            raise CannotReduceError(
                "a batch has no labels, and none before had any, so that nothing tells which output is the scores; leave "
                "preprocess_logits_for_metrics out where rows have no labels"
            )
        return known[0]
    if not hasattr(labels, "dim") or not hasattr(labels, "shape"):
        raise CannotReduceError(f"labels are {_told(labels)}, not one tensor")
    fitting = [(path, part, layers) for path, part, layers in parts if fits(part, labels)]
    if any(not layers for _, _, layers in fitting):
        fitting = [entry for entry in fitting if not entry[2]]
    if not fitting:
        what = _told(logits) if parts else f"{_told(logits)}, with no scores in it"
        raise CannotReduceError(f"no part of the outputs ({what}) has the shape of scores for labels {_told(labels)}")
    if len(fitting) > 1:
        fitting = _decide(fitting, labels, layout, fits)
    path, part, _ = fitting[0]
    _DECIDED[layout] = path, _classes(part, fits)
    return path, part


def _decide(fitting: list[tuple[Any, ...]], labels: Any, layout: tuple[Any, ...], fits: Any) -> list[tuple[Any, ...]]:
    """The one of several that is the scores."""
    if hasattr(labels, "fake_mode"):  # of a shadow run: there are no values, and whichever it is, its size is the same
        return fitting[:1]
    known = [entry for entry in fitting if _DECIDED.get(layout) == (entry[0], _classes(entry[1], fits))]
    if known:
        return known
    if fits is not _scores_numbers:
        counted = labels.reshape(-1)
        for value in IGNORED:
            counted = counted[counted != value]
        highest = int(counted.max()) if counted.numel() else 0
        fitting = [entry for entry in fitting if _classes(entry[1], fits) > highest]
    if len(fitting) != 1:
        shapes = ", ".join(str(tuple(part.shape)) for _, part, _ in fitting) or "none with enough classes"
        raise CannotReduceError(
            f"several outputs could be the scores for labels {_told(labels)}: {shapes}; have the model give only the scores"
        )
    return fitting


def _take(logits: Any, labels: Any, fits: Callable[[Any, Any], bool]) -> Any:
    return find_scores(logits, labels, fits)[1]


def _classes(part: Any, fits: Callable[[Any, Any], bool]) -> int:
    return part.shape[1 if fits is _scores_pixels and part.dim() > 1 else -1]


def _scores_classes(part: Any, labels: Any) -> bool:
    """Whether each label, a class, has a score for every class."""
    whole = not labels.is_floating_point() and labels.dim() > 0
    return whole and part.dim() == labels.dim() + 1 and part.shape[:-1] == labels.shape and part.shape[-1] > 1


def _scores_pixels(part: Any, labels: Any) -> bool:
    """Whether each class has a map of scores that may be smaller than the labels' and has their proportions."""
    if labels.is_floating_point() or labels.dim() != 3 or part.dim() != 4 or part.shape[0] != labels.shape[0]:
        return False
    height, width = part.shape[2:]
    rounding = max(labels.shape[1:])
    return part.shape[1] > 1 and abs(height * labels.shape[2] - width * labels.shape[1]) <= rounding


def _scores_numbers(part: Any, labels: Any) -> bool:
    """Whether each label, a number, has one."""
    return part.shape == labels.shape or (part.dim() == labels.dim() + 1 and part.shape == (*labels.shape, 1))


SHAPES = {"classes": _scores_classes, "pixels": _scores_pixels, "numbers": _scores_numbers}


def _floating(
    value: Any, path: tuple[Any, ...] = (), layers: bool = False
) -> Iterator[tuple[tuple[Any, ...], Any, bool]]:
    """(path, tensor, whether it is one of several in a tuple inside of the outputs) of all tensors that hold fractions."""
    if _is_tensor(value):
        if value.is_floating_point() and value.dim():
            yield path, value, layers
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _floating(item, (*path, key), layers)
    elif isinstance(value, (list, tuple)):
        several = bool(path) and len(value) > 1
        for index, item in enumerate(value):
            yield from _floating(item, (*path, index), layers or several)


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "is_floating_point") and hasattr(value, "dim")


def _told(value: Any) -> str:
    """The structure in a few words."""
    if _is_tensor(value):
        return f"{str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_told(item)}" for key, item in list(value.items())[:4]) + "}"
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__} of {len(value)}: " + ", ".join(_told(item) for item in value[:4])
    return type(value).__name__


# ---- what is made of them ----


def _small(classes: Any, count: int) -> Any:
    """Class numbers below `count` as the smallest whole numbers that hold its square."""
    import torch

    kinds = (torch.int16, torch.int32, torch.int64)
    return classes.to(next(kind for kind in kinds if count * count <= torch.iinfo(kind).max))


def _losses(scores_BtC: Any, labels_Bt: Any) -> Any:
    import torch

    if labels_Bt is None:
        raise CannotReduceError("without labels there is no loss")
    if not hasattr(labels_Bt, "fake_mode"):  # a fake has no values
        _check_classes(labels_Bt[labels_Bt != -100], scores_BtC.shape[-1])
    losses = [
        torch.nn.functional.cross_entropy(
            scores_tC.reshape(-1, scores_tC.shape[-1]).float(), labels_t.reshape(-1).long(), reduction="none"
        )
        for scores_tC, labels_t in _rows(scores_BtC, labels_Bt)
    ]
    return torch.cat(losses).reshape(labels_Bt.shape)


def _check_classes(labels_N: Any, classes: int) -> None:
    """Raise CannotReduceError for labels that are none; on a GPU torch would end the process over them."""
    if labels_N.numel() and (int(labels_N.min()) < 0 or int(labels_N.max()) >= classes):
        raise CannotReduceError(
            f"cannot_reduce: labels from {int(labels_N.min())} to {int(labels_N.max())} are no {classes} classes"
        )


def _rows(scores_BtC: Any, labels_Bt: Any) -> Iterator[tuple[Any, Any]]:
    """Row by row where a row is long, so that the copy in 32 bits is one row's."""
    return iter([(scores_BtC, labels_Bt)]) if labels_Bt.dim() == 1 else zip(scores_BtC, labels_Bt, strict=True)


def _zero_column(losses_BT: Any, labels_BT: Any) -> Any:
    import torch

    return torch.cat([losses_BT.new_zeros(labels_BT.shape[0], 1), losses_BT], dim=1)
