"""A leak in words: what stays, how much it comes to over the user's training, where it is, and what would end it.

Sizes are written as bytes; whoever prints them puts them into the user's unit.
"""

from autofit.records import LeakCheck

MUCH_BYTES = 64 * 2**20  # a training that keeps less in all is let be
MOST_NAMED = 3  # holders
REMEDY_OF_STEPS = (
    "keep numbers or detached copies on the host (`loss.item()`, `tensor.detach().cpu()`) instead of tensors"
)
REMEDY_OF_PROCESSES = (
    "make the evaluation loader once, or set dataloader_persistent_workers=False, so that its workers end with it"
)
REMEDY_OF_EVALUATIONS = "let go of what an evaluation made when it ends"


def leak_sentences(check: LeakCheck | None) -> tuple[str, ...]:
    """One sentence for steps and one for evaluations, where they keep something."""
    if check is None:
        return ()
    held = f", held by {', '.join(check.holders)}" if check.holders else ""
    said = []
    if check.per_step_bytes:
        where = "device" if check.device_bytes_per_step >= check.host_bytes_per_step else "host"
        total = _total(check.per_step_bytes, check.steps, "steps")
        said.append(
            f"a leak is suspected: each optimizer step keeps {int(check.per_step_bytes)} bytes of {where} memory{total}{held}; "
            + REMEDY_OF_STEPS
        )
    if check.per_evaluation_bytes or check.processes_per_evaluation:
        where = "host" if check.host_bytes_per_evaluation >= check.device_bytes_per_evaluation else "device"
        total = _total(check.per_evaluation_bytes, check.evaluations, "evaluations")
        processes, remedy = "", REMEDY_OF_EVALUATIONS
        if check.processes_per_evaluation:
            processes = (
                f"{check.processes_per_evaluation} worker processes, {check.files_per_evaluation} open files and "
            )
            remedy = REMEDY_OF_PROCESSES
        said.append(
            f"a leak is suspected: each evaluation keeps {processes}{int(check.per_evaluation_bytes)} bytes of {where} "
            f"memory{total}{held if not check.per_step_bytes else ''}; {remedy}"
        )
    return tuple(said)


def _total(each: float, times: int | None, what: str) -> str:
    return "" if not times else f", {int(each * times)} bytes over {times} {what}"
