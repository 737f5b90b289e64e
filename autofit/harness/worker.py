"""The child's main: run a workload under a meter and leave a reply.

`harness.server` calls it in a fresh interpreter, or in a fork of itself in which torch and transformers are imported already.
The same code runs in both.
"""

import contextlib
import dataclasses
import faulthandler
import os
import resource
import signal
import sys
import threading
from pathlib import Path
from typing import NoReturn

from autofit import codec
from autofit.harness.device_meter import DeviceMeter, make_meter
from autofit.harness.main_module import own_traceback, run_as_main
from autofit.harness.recorder import Recorder
from autofit.harness.template import Template
from autofit.harness.trainer_hooks import Harness
from autofit.probe_folder import write_privately
from autofit.records import Failure, Outcome, Reply, Request
from autofit.workloads.launchers import complete_environment
from autofit.workloads.redaction import redact_text
from autofit.workloads.script_task import redact

REQUEST_FILE = "request.json"
OWN_PROCESSES_SECONDS = 2.0  # of processor time: torch alone takes as long to be imported


def run(folder: str, descriptors: dict[str, int] | None = None) -> NoReturn:
    """Serve the request in `folder`, then end the process. Never returns.

    `descriptors`: sockets by which this process is asked for probes, once its script has come to its Trainer; the request
    is then what it does where it cannot serve.
    """
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # the parent asks where a child hangs before it kills it
    request, recorder, meter = _begin(folder)
    if request.task.script is not None:
        os.chdir(request.task.script.directory)
        os.environ.update(complete_environment(request.task.script.environment))
    template = Template(descriptors, os.getppid()) if descriptors else None
    harness = Harness(request, meter, recorder, template, _begin)
    harness.install()
    try:
        recorder.at("load")
        _run_workload(request)
        for thread in threading.enumerate():  # as an interpreter waits for them before it ends
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
    except SystemExit as error:
        code = 0 if error.code is None else error.code
        if isinstance(code, int):  # what the script said, as a parser of arguments does, is in its output
            with contextlib.suppress(OSError, ValueError):  # the script has closed it
                print(own_traceback(error), file=sys.stderr, flush=True)
            text = ""
        else:
            text = own_traceback(error)
        _ended(harness, f"the script exited with {code!r} before it trained", text, advise=code == 0)
    except BaseException as error:  # noqa: BLE001 - reported as the workload's own failure
        harness.fail(error)
    _ended(harness, "the script ended without calling Trainer.train()", "")


def _begin(folder: str, before: DeviceMeter | None = None) -> tuple[Request, Recorder, DeviceMeter]:
    """What a child of this folder is asked for, and what it tells and measures by. `before`: of the template it comes from."""
    path = Path(folder) / REQUEST_FILE
    request = codec.decode(path.read_bytes(), Request, path)
    if request.task.script is not None:  # its command may hold secrets, and whoever wrote it may be killed
        write_privately(path, codec.encode(dataclasses.replace(request, task=redact(request.task))))
    recorder = Recorder(folder, request.requested_at)
    recorder.at("start")
    return request, recorder, _make_meter(request, before)


def _make_meter(request: Request, before: DeviceMeter | None) -> DeviceMeter:
    if request.shadow is None:
        return make_meter(request.device)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a shadow run may share the machine with a probe, never its device
    from autofit.harness.shadow.meter import ShadowMeter

    if isinstance(before, ShadowMeter):
        return ShadowMeter(request.shadow, before.fakes)
    meter = ShadowMeter(request.shadow)
    meter.install()
    return meter


def _run_workload(request: Request) -> None:
    if request.task.model is not None:
        from autofit.workloads import builtin

        builtin.main(request.task.model, request.files, request.model_kwargs)
    else:
        run_as_main(request.task.script.command)


def _ended(harness: Harness, message: str, text: str, advise: bool = True) -> NoReturn:
    """`advise`: the script ended well, so that the message says what autofit needs."""
    kind = "no_training" if harness.trainer_seen else "no_trainer"
    if advise and harness.trainer_seen:
        message += "; one that trains only when told to (as by --do_train) has to be told so in its command"
    elif advise:
        message += (
            " and without making a Trainer; autofit needs a script that trains by the train() of a transformers Trainer"
        )
        started = resource.getrusage(resource.RUSAGE_CHILDREN)
        if started.ru_utime + started.ru_stime > OWN_PROCESSES_SECONDS:
            message += ", in its own process and not in one that it starts"
    failure = Failure(harness.recorder.phase, None, kind, message, redact_text(text, os.environ))
    harness.recorder.finish(Reply(Outcome.CRASHED, failure=failure))
